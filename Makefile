# Two commands: `make lab` runs the stack, `make test` proves it. Everything they need is installed below $(CACHE), outside the checkout.
CACHE := $(or $(VLLM_WATCH_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vllm-watch)
# The first Python that is 3.11 or later and has venv; Debian splits venv off into python3-venv.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# One environment for each set of dependencies: changed pins get a new one, and checkouts share what is the same.
VENV := $(CACHE)/python-$(firstword $(shell cat requirements/run.txt requirements/dev.txt | sha256sum | cut -c1-12))
UPKEEP := $(CACHE)/upkeep-$(firstword $(shell cat requirements/upkeep.txt | sha256sum | cut -c1-12))
# Nothing is installed whose bytes are not those that requirements/*.txt name.
HASHED := install -qq --disable-pip-version-check --require-hashes
PIP := "$(VENV)/bin/pip" $(HASHED)
NOT_HAD = { echo "make: Python packages could not be installed; the lines above say why: the index must answer, with the very files that requirements/ names"; exit 1; }
RUN := PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m stack.cli
ARGS ?=
PYTEST := PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m pytest
space := $(subst ,, )
REAL := engine or compose or chromium or collector
REAL_OR := $(subst $(space)or$(space),|,$(REAL))
# Two processes for each core: many tests wait for another process more than they work.
WORKERS := $(shell echo $$(( 2 * $$(nproc) )))
# Every process imports every file, so files that have no such test are left out, unless ARGS names files.
NOT_FAST = $(if $(findstring tests/,$(ARGS)),,$(addprefix --ignore=,$(shell grep -rlE '^pytestmark = .*mark\.($(REAL_OR))' tests --include='test_*.py')))
FAST = $(PYTEST) --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not ($(REAL))" $(NOT_FAST)
# Two processes: engines and labs wait for each other's states more than they compute, and two of each fit into 12 GiB.
# Only files that have such tests are imported, unless ARGS names files.
LIVE_FILES = $(if $(findstring tests/,$(ARGS)),,$(sort $(shell grep -rlE 'mark\.($(REAL_OR))' tests --include='test_*.py')))
LIVE = $(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "$(REAL)" $(LIVE_FILES)
# Else every process that the tests start compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help lab cli test test-fast test-live check lint bench-dashboards bench-rules bench-admission bench-gateway bench-replicas bench-judge bench-canary bench-runner bench-crosscheck bench-vllm bench-truth bench-golden bench-tuning bench-faults bench-sidecar bench-fleet bench-histograms bench-soak bench-data
.PHONY: drills screenshots mutants outputs
.PHONY: release image audit pins import-graph
.DEFAULT_GOAL := help

help:
	@echo 'make lab [ARGS="--for 120s"]   a real vLLM on this CPU, watched by the whole stack'
	@echo 'make test [ARGS="-k name"]     set up everything and prove everything'
	@echo 'make check                     lint, types and the fast tests only'
	@echo 'make test-fast, make test-live one half of the tests, with what is installed'
	@echo 'make outputs                   compares what the program puts out with what is recorded; ARGS=--accept records it anew, ARGS=cost one part'
	@echo 'make cli ARGS="metrics list"   any vllm-watch command from this checkout'
	@echo 'make release                   wheel, source, image context, bundle and checksums in dist/, the same bytes each time'
	@echo 'make image                     the image that docker-compose.yml and the Kubernetes manifests name, from the Dockerfile; IMAGE=registry.example.org/vllm-watch:0.1.0'
	@echo 'make pins [ARGS=--upgrade]     requirements/*.txt from pyproject.toml: one version and the hashes of each dependency'
	@echo 'make import-graph              cycles, upward imports, and which package imports which; ARGS=--write draws it into docs/internals/architecture.md'
	@echo 'make mutants                   200 random one-point changes of 20 modules, and which of them no unit test notices; ARGS="--module tail"'
	@echo 'make audit                     known vulnerabilities and licences of what requirements/run.txt pins'
	@echo 'make bench-dashboards          what printing, Overview on 24 h of 20 engines, and our own board there cost; ARGS=--quick 2 h'
	@echo 'make screenshots               pictures of every dashboard at 1440 and 400 px over an hour of 20 teams; ARGS=--docs those of the documentation'
	@echo 'make bench-admission           a flood beside first come first served, and a million requests on a virtual clock; ARGS=--leases: the cost of a store'
	@echo 'make bench-gateway             what the gateway adds to a request, and how many streams a core holds; ARGS=--peers compares'
	@echo 'make bench-replicas            the wait of a small team beside a flood, through one gateway and through three; ARGS="--seconds 60"'
	@echo 'make bench-sidecar             how fast the sidecar reads, how long a scrape waits, what it all takes; ARGS="--soak 50000000" only that'
	@echo 'make bench-judge               2,000 simulated experiments a line: its false alarms, and the effects that it finds'
	@echo 'make bench-canary              400 simulated days a line: false alarms of a canary that is looked at each minute, and time to a verdict; ARGS=--quick 40'
	@echo 'make bench-crosscheck          our TTFT, TPOT and throughput beside those of `vllm bench serve`, in turns on one real engine'
	@echo 'make bench-vllm                every back end of `vllm bench serve`, directly and through the gateway: the same lengths, the same tokens in the log'
	@echo 'make bench-truth               percentiles by PromQL beside the request log and three clients, on one real engine; ARGS=--quick shorter'
	@echo 'make bench-golden              200 checks of golden prompts on a real engine: false alarms, cost; ARGS="--noise strong --damage flip,nan"'
	@echo 'make bench-tuning              prefix caching and chunked prefill, off and on, with a real engine started anew for each turn'
	@echo 'make bench-runner              what sending and measuring a request or an event costs the bench itself'
	@echo 'make bench-faults              what may happen to a log, done to the sidecar and to mtail; then 10,000 random histories; ARGS=--quick 200'
	@echo 'make drills                    breaks a real vLLM for every alert that has a drill, and sees it arrive and go; an hour or more'
	@echo 'make bench-rules               what all alerts and recorded series cost a Prometheus that watches 20 engines'
	@echo 'make bench-fleet               what 1, 5, 20 and 200 engines cost one Prometheus; ARGS="--only 200" only that'
	@echo 'make bench-histograms          what classic and native histograms of one sidecar cost a Prometheus'
	@echo 'make bench-data                request logs as Parquet: lines a second, bytes a row, memory, queries, cost; beside DuckDB on raw JSON and jq; ARGS=--quick smaller, --views ClickHouse too'
	@echo 'make bench-soak                an hour of the whole lab while things go wrong: what leaks, what is lost; ARGS="--for 5m" shorter'

# Ctrl-C is the way to end a lab (130), so it is no error of make.
lab: $(VENV)/run.done
	@$(RUN) lab up $(ARGS) || { status=$$?; [ $$status -eq 130 ] || exit $$status; }

cli: $(VENV)/run.done
	@$(RUN) $(ARGS)

# In CI a part that cannot be had fails the run; elsewhere it is named, and its tests are reported as not run.
# First what needs no processor to itself; then what watches real engines, containers and browsers. A file is one unit of work of a process.
# All run, whatever comes of the first. The outputs, which were recorded on another day and in UTC, are made a day ahead and elsewhere. ARGS may choose tests that only one of them has (5: none was chosen).
test: export VLLM_WATCH_TIMES := $(CURDIR)/.pytest_cache/test-times.jsonl
test: $(VENV)/dev.done
	@$(RUN) lab install --every
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m tests.support.parts
	@$(MAKE) --no-print-directory lint
	@mkdir -p .pytest_cache && rm -f "$$VLLM_WATCH_TIMES"
	$(if $(ARGS),outputs=0,$(MAKE) --no-print-directory outputs ARGS="--days-ahead 1 --timezone Asia/Kathmandu"; outputs=$$?); \
	$(FAST) $(ARGS); fast=$$?; \
	$(LIVE) $(ARGS); live=$$?; \
	$(if $(ARGS),mutants=0,VLLM_WATCH_TIMES= $(MAKE) --no-print-directory mutants ARGS="--seconds 120 --at-least 0.75"; mutants=$$?); \
	echo 'the ten slowest test files:'; PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m tests.support.file_times "$$VLLM_WATCH_TIMES"; \
	case "$$outputs $$fast $$live $$mutants" in "0 0 0 0" | "0 0 5 0" | "0 5 0 0") ;; *) exit 1 ;; esac

test-fast: $(VENV)/dev.done
	$(FAST) $(ARGS)

test-live: $(VENV)/dev.done
	$(LIVE) $(ARGS)

check: $(VENV)/dev.done lint
	@$(if $(ARGS),,$(MAKE) --no-print-directory outputs)
	$(FAST) $(ARGS)

outputs: $(VENV)/dev.done
	@$(RUN) lab install prometheus promtool
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m tests.outputs.driver $(ARGS)

# A mutant that its tests do not notice, in modules whose errors would go unnoticed longest.
mutants: $(VENV)/dev.done
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/mutants.py $(ARGS)

release: $(VENV)/dev.done
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m tools.release $(ARGS)

# Needs Docker alone. The name is that of docker-compose.yml and the default of `kubernetes export --image`.
IMAGE ?= vllm-watch:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image:
	docker build --tag "$(IMAGE)" $(ARGS) .

import-graph: $(VENV)/dev.done
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m tools.import_graph $(ARGS)

pins: $(UPKEEP)/done
	@PYTHONPATH=$(CURDIR) $(UPKEEP)/bin/python -m tools.pins $(ARGS)

audit: $(UPKEEP)/done $(VENV)/run.done
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m tools.audit --pip-audit $(UPKEEP)/bin/pip-audit $(ARGS)

bench-dashboards: $(VENV)/dev.done
	@$(RUN) lab install prometheus promtool
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_dashboards.py $(ARGS)

screenshots: $(VENV)/dev.done
	@$(RUN) lab install prometheus promtool $(if $(findstring --docs,$(ARGS)),engine model)
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_screens.py $(ARGS)

bench-rules: $(VENV)/dev.done
	@$(RUN) lab install prometheus promtool
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_rules.py

drills: $(VENV)/run.done
	@$(RUN) lab install
	@$(RUN) drill $(or $(ARGS),all)

bench-fleet: $(VENV)/dev.done
	@$(RUN) lab install prometheus promtool
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_fleet.py $(ARGS)

bench-histograms: $(VENV)/dev.done
	@$(RUN) lab install prometheus
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_histograms.py $(ARGS)

bench-soak: $(VENV)/dev.done
	@$(RUN) lab install prometheus alertmanager engine model
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_soak.py $(ARGS)

bench-replicas: $(VENV)/dev.done
	@$(RUN) lab install engine model valkey haproxy
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_replicas.py $(ARGS)

bench-data: $(VENV)/dev.done
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_data.py $(ARGS)
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_data_queries.py $(ARGS)

bench-gateway: $(VENV)/dev.done
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_gateway.py $(ARGS)

bench-admission: $(VENV)/dev.done
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/support/admission_sim.py
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/support/admission_scenarios.py
	$(if $(findstring --leases,$(ARGS)),@$(RUN) lab install valkey)
	$(if $(findstring --leases,$(ARGS)),PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_leases.py)

bench-crosscheck: $(VENV)/dev.done
	@$(RUN) lab install engine model
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_crosscheck.py $(ARGS)

bench-vllm: $(VENV)/dev.done
	@$(RUN) lab install engine model
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/vllm_bench_routes.py

bench-truth: $(VENV)/dev.done
	@$(RUN) lab install prometheus engine model
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_truth.py $(ARGS)

bench-golden: $(VENV)/dev.done
	@$(RUN) lab install engine model
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_golden.py $(ARGS)

bench-tuning: $(VENV)/dev.done
	@$(RUN) lab install engine model
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_tuning.py $(ARGS)

bench-runner: $(VENV)/dev.done
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_runner.py $(ARGS)

bench-judge: $(VENV)/dev.done
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_judge.py $(ARGS)

bench-canary: $(VENV)/dev.done
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_canary.py $(ARGS)

bench-faults: $(VENV)/dev.done
	@$(RUN) lab install mtail
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_faults.py
	PYTHONPATH=$(CURDIR) VLLM_WATCH_HISTORIES=$(if $(findstring --quick,$(ARGS)),200,10000) $(VENV)/bin/python -m pytest -q tests/exporters/test_sidecar_histories.py tests/stack/gateway/test_gateway_lease.py tests/stack/gateway/test_gateway_store.py
	PYTHONPATH=$(CURDIR) VLLM_WATCH_HISTORIES=$(if $(findstring --quick,$(ARGS)),20,500) $(VENV)/bin/python -m pytest -q tests/exporters/test_ship_histories.py
	@$(RUN) lab install valkey redis
	PYTHONPATH=$(CURDIR) VLLM_WATCH_OUTAGE_S=$(if $(findstring --quick,$(ARGS)),4,30) $(VENV)/bin/python -m pytest -q tests/stack/gateway/test_gateway_leases_live.py

bench-sidecar: $(VENV)/dev.done
	@$(RUN) lab install mtail
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python tests/bench/bench_sidecar.py $(ARGS)

lint: $(VENV)/dev.done
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	@echo 'mypy, of the product and of the tests'; $(VENV)/bin/mypy & product=$$!; \
	$(VENV)/bin/mypy --cache-dir .mypy_cache/tests --config-file tests/mypy.ini; tests=$$?; wait $$product && exit $$tests

$(VENV)/run.done:
	@test "$$(uname -s)" = Linux || { echo 'make: this needs Linux; elsewhere use a Debian container or virtual machine. Without make:' \
	  'pipx install . gives the command vllm-watch, of which metrics, render, gateway and sidecar work anywhere'; exit 1; }
	@test -n '$(PYTHON)' || { echo 'make: Python 3.11 or later with venv is needed: on Debian and Ubuntu, apt-get install python3 python3-venv'; exit 1; }
	@mkdir -p '$(CACHE)/locks' && echo 'setting up Python (half a minute; three were seen on a busy machine) in $(VENV)' && flock '$(CACHE)/locks/python.lock' sh -ec '\
	  test -e "$@" && exit; $(PYTHON) -m venv "$(VENV)"; \
	  $(PIP) -r requirements/run.txt || $(NOT_HAD); \
	  touch "$@"'

$(VENV)/dev.done: $(VENV)/run.done
	@flock '$(CACHE)/locks/python.lock' sh -ec 'test -e "$@" && exit; $(PIP) -r requirements/dev.txt || $(NOT_HAD); touch "$@"'

$(UPKEEP)/done:
	@mkdir -p '$(CACHE)/locks' && flock '$(CACHE)/locks/upkeep.lock' sh -ec '\
	  test -e "$@" && exit; $(PYTHON) -m venv "$(UPKEEP)"; \
	  "$(UPKEEP)/bin/pip" $(HASHED) -r requirements/upkeep.txt || $(NOT_HAD); touch "$@"'
