"""`make bench-rules`: what all our rules cost a Prometheus that watches 20 engines of three models and everything
beside them.

Real Prometheus, our shipped rule files, evaluated every 15 s. Everything is scraped live from one page (honor_labels),
after a history of 24 h of every series that a rule reads and three days of what rules record, so that long windows are
full. Prometheus itself says how long each group took; the figure is the sum over all groups as if all came at once,
median of the evaluations seen. Limit: 100 ms."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from alerts import printer, recorded
from alerts.registry import ALERTS, RECORDINGS
from exporters.catalogue import promql_ast
from exporters.catalogue.bounds import TTFT_S as BOUNDS
from exporters.text import parse_window
from stack.lab import install
from tests.bench.bench_fleet_page import well
from tests.support.bench_server import until_ready
from tests.support.panel_fixtures import Line, fleet
from tests.support.ports import free_port

ENGINES, MODELS, SCRAPE_S, BLOCK_S, WATCHED_S, LIMIT_MS = 20, 3, 15, 7200, 330, 100
MADE_BY_RULES = {"ALERTS", *(recording.record for recording in RECORDINGS)}
EVERYTHING = tuple(well(line) for line in fleet(ENGINES, MODELS).lines if line.name not in MADE_BY_RULES)
READ = {name for rule in (*ALERTS, *RECORDINGS) for name in promql_ast.names(rule.expr)}  # type: ignore[attr-defined]


def main() -> None:
    now = int(time.time())
    with tempfile.TemporaryDirectory(prefix="bench-rules-") as name:
        folder = Path(name)
        began = time.monotonic()
        for start, end in _blocks(now - 86400, now - SCRAPE_S):
            _write(folder, [line for line in EVERYTHING if line.name in READ], now, start, end)
            print(".", end="", file=sys.stderr, flush=True)
        for start, end in _blocks(now - 3 * 86400, now - SCRAPE_S):
            hours, others = partition(list(_recorded()))
            _write(folder, others, now, start, end, parse_window(recorded.INTERVAL))
            _write(folder, hours, now, start, end, parse_window(recorded.SELDOM))
        print(f" history written in {time.monotonic() - began:.0f} s", file=sys.stderr)
        for file, text in printer.rule_files():
            (folder / "rules").mkdir(exist_ok=True)
            (folder / "rules" / file).write_text(text)
        page = _serve(now)
        try:
            _measure(folder, page.server_address[1])
        finally:
            page.shutdown()


def _recorded() -> Iterator[Line]:
    """What the recording rules would have left behind."""
    for recording in RECORDINGS:
        if ":increase" in recording.record:
            for model in range(MODELS):
                labels = {"model_name": f"model-{model}"}
                bounds = [str(le) for le in (*BOUNDS, "+Inf")] if "_bucket:" in recording.record else []
                for le in bounds or [""]:
                    yield Line(
                        recording.record,
                        labels | ({"le": le} if le else {}),
                        3.0 if "_bad:" in recording.record else 600.0,
                    )


def partition(lines: list[Line]) -> tuple[list[Line], list[Line]]:
    """What is recorded of hours, and the rest."""
    ends = ":increase" + recorded.HOURLY
    return [line for line in lines if line.name.endswith(ends)], [
        line for line in lines if not line.name.endswith(ends)
    ]


def _blocks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans that lie within Prometheus' blocks of two hours."""
    at = start
    while at < end:
        until = min(end, (at // BLOCK_S + 1) * BLOCK_S)
        yield at, until
        at = until


def _write(folder: Path, lines: Iterable[Line], zero: int, start: int, end: int, step_s: int = SCRAPE_S) -> None:
    text = folder / "block.om"
    times = range(-(-start // step_s) * step_s, end, step_s)
    with text.open("w") as file:
        for line in lines:
            head = f"{line.name}{{{_inner(line)}}} "
            file.writelines(f"{head}{_value(line, zero, at):.9g} {at}\n" for at in times)
        file.write("# EOF\n")
    tool = install.find("promtool")
    assert tool, "promtool is missing: make cli ARGS='lab install promtool prometheus'"
    subprocess.run(
        [tool.path, "tsdb", "create-blocks-from", "openmetrics", text, folder / "data"], check=True, capture_output=True
    )
    text.unlink()


def _inner(line: Line) -> str:
    return ",".join(f"{key}={json.dumps(value)}" for key, value in line.labels.items())


def _value(line: Line, zero: int, at: float) -> float:
    return next(line.values([(at - zero) / 3600], zero))


def _serve(zero: int) -> ThreadingHTTPServer:
    """Everything on one page, as of now."""
    heads = [(f"{line.name}{{{_inner(line)}}} ", line) for line in EVERYTHING]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            at = time.time()
            body = "".join(f"{head}{_value(line, zero, at):.9g}\n" for head, line in heads).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _measure(folder: Path, page_port: int) -> None:
    port = free_port()
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": "10s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(folder / "rules/*.yaml")],
        "scrape_configs": [
            {"job_name": "all", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{page_port}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    program = install.find("prometheus")
    assert program
    command = [
        program.path,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=10y",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    server = subprocess.Popen(command)
    try:
        until_ready(f"http://127.0.0.1:{port}")
        _report(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(10)


def _report(base: str) -> None:
    """Each evaluation of each group that falls into the watched time, once."""
    groups: dict[str, dict[str, float]] = {}
    rules: dict[str, dict[str, float]] = {}
    until = time.monotonic() + WATCHED_S
    while time.monotonic() < until:
        time.sleep(2)
        for group in json.load(urllib.request.urlopen(f"{base}/api/v1/rules", timeout=30))["data"]["groups"]:
            if group["lastEvaluation"].startswith("0001"):
                continue
            groups.setdefault(group["name"], {})[group["lastEvaluation"]] = group["evaluationTime"]
            for rule in group["rules"]:
                assert rule["health"] == "ok", rule
                rules.setdefault(rule["name"], {})[rule["lastEvaluation"]] = rule["evaluationTime"]
    took = {
        name: [1000 * seconds for seconds in list(seen.values())[1:] or seen.values()] for name, seen in groups.items()
    }
    medians, quickest = ({name: of(times) for name, times in took.items()} for of in (statistics.median, min))
    for name, usual in sorted(medians.items(), key=lambda pair: -pair[1]):
        print(f"{usual:7.1f} ms  {name}, {quickest[name]:.1f} ms at its quickest")
    dearest = sorted(((statistics.median(seen.values()) * 1000, name) for name, seen in rules.items()), reverse=True)[
        :5
    ]
    print("dearest rules: " + ", ".join(f"{name} {usual:.1f} ms" for usual, name in dearest))
    asked = f"{base}/api/v1/query?query=scrape_samples_scraped{{job=%22all%22}}"
    samples = json.load(urllib.request.urlopen(asked, timeout=30))["data"]["result"][0]["value"][1]
    total = sum(medians.values())
    seldom, often = min(len(seen) for seen in groups.values()), max(len(seen) for seen in groups.values())
    active = len(json.load(urllib.request.urlopen(f"{base}/api/v1/alerts", timeout=30))["data"]["alerts"])
    told = f"{ENGINES} engines, {samples} series, {active} alerts active; medians of {seldom} to {often} evaluations"
    print(f"{total:7.1f} ms  all {len(medians)} groups, {len(rules)} rules; {told}")
    print(
        f"{sum(quickest.values()):7.1f} ms  each group at its quickest, which says more where the machine had other"
        " work"
    )
    if not math.isfinite(total) or total > LIMIT_MS:
        raise SystemExit(f"above the limit of {LIMIT_MS} ms")


if __name__ == "__main__":
    main()
