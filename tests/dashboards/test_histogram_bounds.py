"""vLLM's own buckets: the recommended ladder, engines whose bounds differ, and what Prometheus says beside an
answer."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from alerts import printer, slo
from dashboards.interpolate import Range
from dashboards.model import Panel, Query
from exporters.catalogue import bounds, exposition_parser, promql, vllm
from exporters.catalogue.metric import Kind
from exporters.net.prometheus import Prometheus, address
from stack.board import charts
from stack.cli import main
from stack.deploy.fleet import budget
from stack.lab import headlines, plan
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
DEFAULT = {
    "time_to_first_token": bounds.TTFT_S,
    "inter_token_latency": bounds.INTER_TOKEN_S,
    "request_latency": bounds.REQUEST_S,
}
MIXED = "VLLMMixedHistogramBounds"
ENGINES = [line for file in ("docker-compose.yml", "stack/deploy/compose.cpu.yml", "stack/deploy/compose.mig.yml")
           for line in (ROOT / file).read_text().splitlines() if "${VLLM_WATCH_ENGINE_BUCKETS" in line]  # fmt: skip


def bounds_of(text: str, name: str) -> set[float]:
    return {float(labels["le"]) for labels, _ in exposition_parser.parse(text).of(f"{name}_bucket")} - {float("inf")}


# ---- the ladder


@pytest.mark.parametrize("family", bounds.ENGINE_LADDER)
def test_ladder_keeps_default_bounds(family):
    """The ladder keeps every default bound and steps by two thirds at most."""
    ladder = bounds.ENGINE_LADDER[family]
    assert set(DEFAULT[family]) <= set(ladder)
    assert all(low < high for low, high in pairwise(ladder))
    assert 0.001 == ladder[0]
    assert all(high / low < 1.7 for low, high in pairwise(bound for bound in ladder if bound <= 10))


def test_bounds_of_objectives_are_on_the_ladder():
    families = {"ttft": "time_to_first_token", "inter_token": "inter_token_latency"}
    promised = [(one.latency, one.within_s) for one in slo.default_objectives().objectives if one.latency]
    assert promised
    assert all(within in bounds.ENGINE_LADDER[families[latency]] for latency, within in promised)


def test_budget_counts_captured_histograms():
    """The budget counts the histograms that a captured page has of each family."""
    text = (ROOT / "tests/golden/0.32.0-preempt-after-load.prom").read_text()
    histograms = [
        metric.name for metric in vllm.VLLM if metric.kind is Kind.HISTOGRAM and metric.name.startswith("vllm:")
    ]
    found = {
        family: sum(bounds_of(text, name) == set(default) for name in histograms) for family, default in DEFAULT.items()
    }
    assert budget.HISTOGRAMS == found
    assert budget.engine_page(ladder=True) - budget.engine_page() == budget.LADDER


def test_command_and_compose_files_give_the_same_options():
    (printed,) = CliRunner().invoke(main, ["metrics", "buckets"]).output.splitlines()
    assert bounds.engine_arguments() == tuple(printed.split())
    assert bounds.ENGINE_LADDER == {
        family: tuple(ladder)
        for family, ladder in json.loads(CliRunner().invoke(main, ["metrics", "buckets", "--json"]).output).items()
    }
    assert [f"${{VLLM_WATCH_ENGINE_BUCKETS-{printed}}}"] * 4 == [line.strip() for line in ENGINES]


@pytest.mark.parametrize(
    ("version", "takes"), [("0.32.0+cpu", True), ("0.33.0", True), ("0.31.2", False), ("0.10.2", False), ("", False)]
)
def test_the_lab_leaves_the_option_out_for_engines_without_it(tmp_path, version, takes):
    programs = {name: Path(f"/opt/{name}") for name in ("engine", "model", "prometheus", "alertmanager")}
    (engine,) = (
        one for one in plan.processes(plan.LabConfig(tmp_path, programs, engine_version=version)) if one.name == "vllm"
    )
    assert takes is (set(bounds.engine_arguments()) <= set(engine.argv))
    assert takes is ("custom-histogram-buckets" in " ".join(engine.argv))


@pytest.mark.engine
def test_a_real_engine_shows_the_ladder(real_engines):
    engine = real_engines.own(*bounds.engine_arguments()).up()
    body = json.dumps({"model": plan.MODEL, "prompt": "one two", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{engine.spec.address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()
    text = urllib.request.urlopen(f"{engine.spec.address}/metrics", timeout=20).read().decode()
    shown = {metric: set(bounds.ENGINE_LADDER[family]) for metric, family in (
        (vllm.TIME_TO_FIRST_TOKEN, "time_to_first_token"), (vllm.INTER_TOKEN_LATENCY, "inter_token_latency"),
        (vllm.E2E_REQUEST_LATENCY, "request_latency"), (vllm.REQUEST_QUEUE_TIME, "request_latency"),
    )}  # fmt: skip
    assert shown == {metric: bounds_of(text, metric.name) for metric in shown}
    for objective in slo.default_objectives().objectives:
        if objective.latency:
            metric = {"ttft": vllm.TIME_TO_FIRST_TOKEN, "inter_token": vllm.INTER_TOKEN_LATENCY}[objective.latency]
            pattern = re.search(r'le=~?"(.*)"', promql.le(objective.within_s))[1].replace("\\\\", "\\")
            assert any(
                re.fullmatch(pattern, labels["le"])
                for labels, _ in exposition_parser.parse(text).of(f"{metric.name}_bucket")
            )


# ---- engines whose bounds differ


class StandIn(http.server.ThreadingHTTPServer):
    """An engine in which every request takes equally long, a hundred of them a second."""

    def __init__(self, took_s: float, ladder: tuple[float, ...]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(page_of())

            def log_message(self, *_: object) -> None:
                pass

        began = time.monotonic()

        def page_of() -> bytes:
            count = int(100 * (time.monotonic() - began))
            name, labels = vllm.E2E_REQUEST_LATENCY.name, 'engine="0",model_name="m"'
            rows = [f'{name}_bucket{{{labels},le="{bound}"}} {count if took_s <= bound else 0}' for bound in ladder]
            rows += [
                f'{name}_bucket{{{labels},le="+Inf"}} {count}',
                f"{name}_count{{{labels}}} {count}",
                f"{name}_sum{{{labels}}} {count * took_s}",
            ]
            return "\n".join([f"# TYPE {name} histogram", *rows, ""]).encode()

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def differing(part, free_port, tmp_path):
    """Prometheus with our rule on bounds, which holds for two seconds, and two engines of one model: 13.25 s by default
    bounds, 0.4 s by bounds of its own."""
    engines = [StandIn(13.25, bounds.REQUEST_S), StandIn(0.4, (0.1, 0.5, 1.0))]
    job = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{one.server_port}" for one in engines]}]}
    printed = [yaml.safe_load(text) for _, text in printer.rule_files()]
    rules = [rule for file in printed for group in file["groups"] for rule in group["rules"]]
    (rule,) = (rule for rule in rules if rule.get("alert") == MIXED)
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "bounds", "rules": [{**rule, "for": "2s"}]}]})
    )
    timing = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    (tmp_path / "prometheus.yml").write_text(
        yaml.safe_dump({"global": timing, "scrape_configs": [job], "rule_files": [f"{tmp_path}/rules.yaml"]})
    )
    port = free_port()
    command = [
        part("prometheus").path,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)
    for one in engines:
        one.shutdown()
        one.server_close()


@pytest.mark.prometheus
async def test_mixed_bounds_give_no_invented_value(differing):
    """Engines with different bounds give no invented value and an alert."""

    def ask(query: str) -> dict[tuple[tuple[str, str], ...], float]:
        try:
            with urllib.request.urlopen(
                f"{differing}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=5
            ) as reply:
                rows = json.load(reply)["data"]["result"]
        except OSError:
            return {}
        return {
            tuple(sorted((k, v) for k, v in row["metric"].items() if k not in ("__name__", "job"))): float(
                row["value"][1]
            )
            for row in rows
        }

    e2e = vllm.E2E_REQUEST_LATENCY
    invented = f"histogram_quantile(0.95, sum by (model_name, le) (rate({e2e.name}_bucket[10s])))"
    eventually(lambda: ask(invented).get((("model_name", "m"),)) == 7680.0, what="the value that nobody waited for")

    def bound(q: float) -> dict[tuple[tuple[str, str], ...], float]:
        return ask(promql.bounded_quantile(q, e2e, "10s", resolution=True))

    # A scrape that comes late on a busy machine shifts the shares of the two engines for some seconds.
    eventually(lambda: bound(0.95) == {(("bound", ">"), ("model_name", "m")): 1.0}, what="the last shared bound")
    eventually(lambda: bound(0.2) == {(("bound", "<"), ("model_name", "m")): 0.5}, what="the first shared bound")
    apart = sorted(ask(promql.bounded_quantile(0.95, e2e, "10s", ("model_name", "instance"))).values())
    assert [pytest.approx(0.48), pytest.approx(14.75)] == apart
    firing = f'ALERTS{{alertname="{MIXED}", alertstate="firing"}}'
    eventually(lambda: ask(firing), what="the alert")
    assert {"request_latency"} == {dict(labels)["family"] for labels in ask(firing)}

    panel = Panel("p", "P", "M.", "G.", "A.", (Query(invented, "{{model_name}}", "s"),))
    over = Range(time.time() - 20, time.time(), scrape_s=1)
    async with Prometheus(address(differing)) as client:
        drawn = charts.draw(panel, [await client.over_time(invented, over)], over)
    assert "Prometheus says: " in drawn["note"]
    assert "monotonicity" in drawn["note"]


# ---- the words


@pytest.mark.parametrize(
    ("mark", "seconds", "expected"),
    [("<", 0.3, "< 300 ms"), (">", 7680.0, "> 7,680 s"), ("<", 0.001, "< 1 ms"), (">", 2.5, "> 2.5 s")],
)
def test_a_bound_is_written_alike_everywhere(mark, seconds, expected):
    assert expected == bounds.format_bound(mark, seconds)
    headline = next(one for one in headlines.HEADLINES if one.unit == "s")
    assert expected == headline.show(headlines.HeadlineValue(seconds, mark))
