"""Prometheus configuration files for a fleet: standalone, and one for each long-term store.

Invariant: Prometheus has no include for remote_write, and promtool must see what will run; so what the files share
stands here once and each is printed whole. Limits come from stack/deploy/fleet/budget.py, what a long-term store is
sent from the rules and boards that read it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alerts.labels import TARGET
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, promql_ast
from exporters.catalogue.producers import Component, shown_by
from stack.deploy.fleet import budget

FOLDER = Path("stack/deploy/fleet")
BYTES_PER_SAMPLE = 512  # names, labels, exemplars and help, generously: captured pages have under 200
LABELS = 80  # of one series: vllm:cache_config_info has one for each of vLLM's cache settings, more with each release
LABEL_BYTES = 4096  # of one value: vllm:lora_requests_info lists adapters in one
RECORDED = "[^:]+:[^:]+:[^:]+"  # two colons; a raw name of vLLM's has one
ALWAYS = ("ALERTS", "up")
RAW_BOARDS = ("overview", "fleet")

_HEAD = (
    "# Printed by `vllm-watch render` from stack/deploy/fleet/files.py: copy it and change the copy."
    " docs/guides/fleet.md explains each part.\n"
)


@dataclass(frozen=True, slots=True)
class Store:
    """A long-term store as Prometheus writes to it. replica: the label by which it distinguishes a pair of Prometheus
    servers."""

    name: str
    title: str
    remote_write: str
    replica: str = "replica"
    drops_replica: bool = False


MIMIR = Store("mimir", "Grafana Mimir", """\
url: https://mimir.example/api/v1/push
headers:
  X-Scope-OrgID: inference  # the tenant; a gateway in front may set it from the user instead
basic_auth:
  username: inference
  password_file: secrets/mimir-password
send_exemplars: true
""", replica="__replica__")  # fmt: skip
THANOS = Store("thanos", "Thanos Receive", """\
url: https://thanos-receive.example/api/v1/receive
headers:
  THANOS-TENANT: inference
authorization:
  type: Bearer
  credentials_file: secrets/thanos-token
send_exemplars: true
""")  # fmt: skip
VICTORIAMETRICS = Store("victoriametrics", "VictoriaMetrics", """\
url: https://victoriametrics.example/api/v1/write
basic_auth:  # as -httpAuth.username and -httpAuth.password of a single node; behind vmauth its own
  username: inference
  password_file: secrets/victoriametrics-password
# It keeps no exemplars, so none are sent.
""", drops_replica=True)  # fmt: skip
STORES = (MIMIR, THANOS, VICTORIAMETRICS)

_HA = {
    MIMIR: (
        "The pair is distinguished by __replica__ and cluster, Mimir's defaults for its HA tracker, which takes samples"
        " of one of the two."
    ),
    THANOS: "The pair is distinguished by replica: start the querier with --query.replica-label=replica.",
    VICTORIAMETRICS: "The pair writes the same series twice: start VictoriaMetrics with -dedup.minScrapeInterval=15s.",
}


def files() -> Iterator[tuple[Path, str]]:
    """Path below the root and text of each file."""
    yield FOLDER / "prometheus.yml", _HEAD + _base() + _scraping()
    for store in STORES:
        yield FOLDER / f"prometheus-{store.name}.yml", _HEAD + _base(store.replica) + _writing(store) + _scraping()
    yield FOLDER / "more/engines-by-dns.yml", _HEAD + _by_dns()


def raw_names() -> tuple[str, ...]:
    """The raw series that Overview and Fleet read, older names included."""
    shown = [
        query.expr for board in BOARDS if board.slug in RAW_BOARDS for panel in board.panels for query in panel.queries
    ]
    return tuple(sorted({name for expr in shown for name in promql_ast.names(expr)} - {*ALWAYS}))


def _base(replica: str = "replica") -> str:
    return f"""\
global:
  scrape_interval: 15s
  evaluation_interval: 15s
  # Native histograms of gateway and sidecar: start Prometheus 3.5 with --enable-feature=native-histograms; from 3.8 on
  # set scrape_native_histograms: true here instead. The classic ones are kept beside them, for alerts on the bounds of
  # objectives.
  always_scrape_classic_histograms: true
  # Added to what leaves this Prometheus (alerts, remote write), not to what it keeps. Set cluster here and nowhere
  # else, unless this one Prometheus scrapes several clusters: then it is a label of the targets.
  external_labels:
    cluster: prod-a
    {replica}: a  # the other of a pair: b

rule_files:
  - rules/*.yaml  # alerts/prometheus, or what `vllm-watch alerts export` wrote

alerting:
  # Both of a pair send every alert; without their own label the two are one to Alertmanager.
  alert_relabel_configs:
    - action: labeldrop
      regex: _*replica_*
  alertmanagers:
    - static_configs:
        - targets: [alertmanager-0:9093, alertmanager-1:9093]  # all of a cluster of Alertmanagers; no load balancer

"""


def _writing(store: Store) -> str:
    dropped = "      - {action: labeldrop, regex: replica}\n" if store.drops_replica else ""
    return f"""\
# To {store.title}. {_HA[store]}
remote_write:
  - name: {store.name}
{textwrap.indent(store.remote_write, "    ")}\
    queue_config:
      capacity: 10000
      max_samples_per_send: 2000
      max_shards: 20
      batch_send_deadline: 5s
      max_backoff: 30s
      sample_age_limit: 2h  # after a longer outage of the store the newest figures come first
    write_relabel_configs:
      # What our rules recorded (two colons; a raw name of vLLM's has one), alerts, and who was up: enough for the
      # dashboard Fleet (weeks).
      - source_labels: [__name__]
        action: keep
        regex: '{RECORDED}|{"|".join(ALWAYS)}'
{dropped}\
      # So that Overview and Fleet work there as well, keep these too:
      #   {"|".join(raw_names())}
      # Or take the rule out and send everything: docs/guides/fleet.md says how many series that is.

"""


def _scraping() -> str:
    jobs = (_job("vllm", "engines", _OF_ENGINES), _job("gateway", "gateways"), _job("sidecar", "sidecars"))
    return f"""\
# More jobs, a file each: more/engines-by-dns.yml is one, to be copied here.
scrape_config_files:
  - jobs/*.yml

scrape_configs:
{textwrap.indent("".join(jobs), "  ")}\
  - job_name: prometheus
    static_configs:
      - targets: [localhost:9090]
"""


CREATED = ".+_created"
_OF_ENGINES = f"""\
  # vLLM answers every Accept header with plain text. What re-exports its page with prometheus_client 0.23 or later
  # would write vllm_ for vllm: to a Prometheus 2 that asks for anything else.
  scrape_protocols: [PrometheusText0.0.4]
  # The times at which counters were made, one sample in eight: no board, rule or command of ours reads them.
  metric_relabel_configs:
    - source_labels: [__name__]
      action: drop
      regex: {CREATED}
"""


def _job(name: str, what: str, more: str = "") -> str:
    return f"""\
- job_name: {name}
  file_sd_configs:
    - files: [targets/{what}-*.yml]
      refresh_interval: 1m
{_limits(name)}{more}{_RELABEL}"""


def _by_dns() -> str:
    return f"""\
scrape_configs:
  - job_name: vllm-dns  # the rules take every job whose name begins with vllm for one of engines
    dns_sd_configs:
      - names: [_metrics._tcp.vllm.inference.svc.cluster.local]  # SRV: address and port, as of a headless Service
        type: SRV
        refresh_interval: 30s
      - names: [vllm.example.internal]  # A: addresses only
        type: A
        port: 8000
        refresh_interval: 30s
{textwrap.indent(_limits("vllm") + _OF_ENGINES + _RELABEL, "  ")}"""


def _limits(job: str) -> str:
    most = budget.SAMPLE_LIMIT[job]
    return f"""\
  # A page is expected to hold {budget.PAGES[job]} samples at most (stack/deploy/fleet/budget.py). Above any of these
  # the whole page is thrown away, and `up` is 0; with more targets than target_limit no target of the job is scraped.
  sample_limit: {most}
  body_size_limit: {-(-most * BYTES_PER_SAMPLE // 2**20)}MB
  label_limit: {LABELS}
  label_value_length_limit: {LABEL_BYTES}
  target_limit: 1000
"""


def _of_pages() -> Iterator[str]:
    """Labels that the page of an engine, a gateway or a sidecar has for itself."""
    yield "le"
    for metric in EVERYTHING:
        if shown_by(metric) in (Component.ENGINE, Component.GATEWAY, Component.SIDECAR, Component.GPU):
            yield from set(metric.labels) - set(TARGET)


# honor_labels stays false: a page may not say whose it is. A target that is labelled like a series of its page would
# turn the page's own label into exported_team and the like, and every board would lose it.
OF_PAGES = "|".join(sorted(set(_of_pages())))
_RELABEL = f"""\
  # A label of a target may not be called as one of its page's: that would become exported_team, and boards by team
  # would be empty.
  relabel_configs:
    - action: labeldrop
      regex: {OF_PAGES}
"""
