"""`make bench-fleet`: what a fleet costs one Prometheus, from one engine to 200 engines with 50 teams. Method and
results: docs/internals/resource-use.md, "Growth of a fleet".

Real Prometheus, our shipped rules. Each size gets a history by back-fill (promtool), is scraped over HTTP for a while
with all rules evaluated, and is then asked what the boards ask. A figure is a median; every group of rules is evaluated
more often than shipped, which changes how often it is timed and not how long it takes."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alerts import printer
from alerts.registry import ALERTS, RECORDINGS
from dashboards.interpolate import ALL, Range, fill
from dashboards.model import Dashboard
from dashboards.registry import BOARDS
from dashboards.variables import CHAIN
from exporters.catalogue import promql_ast
from stack.lab import install
from tests.bench.bench_fleet_page import Size, lines, targets, text
from tests.bench.bench_gateway import cpu_s
from tests.support import memory
from tests.support.bench_server import get, timed, until_ready, url_of
from tests.support.panel_fixtures import Line
from tests.support.ports import free_port

BLOCK_S, ROUNDS = 7200, 5
RAW, RECORDED = ("overview", "fleet", "teams"), "fleet-weeks"
RECORDED_H, RECORDED_EVERY_S = 24, 300


@dataclass(frozen=True, slots=True)
class Plan:
    """How a size is measured. hours, every_s: its history. watched_s: how long it is scraped and its rules are
    timed."""

    size: Size
    hours: float = 2.0
    every_s: int = 15
    scrape_s: int = 15
    evaluate_s: int = 10
    settle_s: float = 35.0
    watched_s: float = 60.0
    rounds: int = ROUNDS


PLANS = (Plan(Size(1, 2, 1)), Plan(Size(5, 5, 2)), Plan(Size(20, 10, 3)), Plan(Size(200, 50, 5), every_s=60))


@dataclass
class Found:
    """What came of one size. Milliseconds, MiB, and shares of one core. queries: by board; slowest: the dearest query
    of them.

    *_least_ms: the same at their quickest, which says more where the machine had other work: all groups once, all
    queries of a board."""

    plan: Plan
    series: int = 0
    samples_per_s: float = 0.0
    rss_mib: float = 0.0
    cpu_share: float = 0.0
    scrape_ms: float = 0.0
    scrape_worst_ms: float = 0.0
    rules_ms: float = 0.0
    rules_worst_ms: float = 0.0
    rules_worst: str = ""
    groups_ms: dict[str, float] = field(default_factory=dict)
    rules_least_ms: float = 0.0
    boards_least_ms: dict[str, float] = field(default_factory=dict)
    disk_mib_per_h: float = 0.0
    block_mib: float = 0.0
    block_bytes_per_sample: float = 0.0
    built_s: float = 0.0
    rss_asked_mib: float = 0.0
    queries_ms: dict[str, list[float]] = field(default_factory=dict)
    slowest: str = ""


def measure(plan: Plan, folder: Path) -> Found:
    found, zero_s = Found(plan), time.time()
    every = lines(plan.size)
    began = time.monotonic()
    end = int(zero_s) // plan.every_s * plan.every_s
    samples = back_fill(
        folder, [line for line in every if line.name in READ], zero_s, end - round(plan.hours * 3600), end, plan.every_s
    )
    found.built_s = time.monotonic() - began
    tell(f"history of {samples:,} samples built in {found.built_s:.0f} s")
    found.block_mib = size_of(folder / "data") / 2**20
    found.block_bytes_per_sample = size_of(folder / "data") / samples
    configure(folder, plan, every, pages := free_port(), port := free_port())
    with process(
        [
            sys.executable,
            str(Path(__file__).with_name("bench_fleet_page.py")),
            *map(str, (pages, *asdict(plan.size).values(), zero_s)),
        ]
    ):
        until_answers(pages)
        tell("pages are served")
        with prometheus(folder, port) as server:
            until_scraped(f"http://127.0.0.1:{port}", len(targets(every)) + 1)
            watch(found, f"http://127.0.0.1:{port}", server.pid, folder)
            recorded = shown_recorded(f"http://127.0.0.1:{port}")
    tell(f"{found.series:,} series watched; {len(recorded):,} recorded series get a day of history")
    end = int(time.time())
    first = end // RECORDED_EVERY_S * RECORDED_EVERY_S - RECORDED_H * 3600
    back_fill(folder, recorded, zero_s, first, int(zero_s), RECORDED_EVERY_S)
    with prometheus(folder, port) as server:
        ask(found, f"http://127.0.0.1:{port}", end)
        found.rss_asked_mib = memory.mib(server.pid, memory.RESIDENT)
    return found


def tell(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


# ---- the ground


def asked(board: Dashboard, over: Range) -> list[tuple[str, str, Any]]:
    """(panel, query, shape) of everything that a board asks, with every choice at All and its own at their defaults."""
    own = {one.name: one.default or one.options[0] for one in board.extra if one.default or one.options}
    values: dict[str, Any] = {name: [ALL] for name in CHAIN} | own
    return [
        (panel.slug, fill(query.expr, values, over), panel.shape) for panel in board.panels for query in panel.queries
    ]


def _read() -> frozenset[str]:
    """Samples that a rule or one of the boards reads: what is scraped beside these is not in the history."""
    over = Range(0, 3600)
    texts = [rule.expr for rule in (*ALERTS, *RECORDINGS)] + [  # type: ignore[attr-defined]
        query for board in boards(RAW) for _, query, _ in asked(board, over)
    ]
    return frozenset(name for one in texts for name in promql_ast.names(one))


def boards(slugs: Iterable[str]) -> list[Dashboard]:
    wanted = set(slugs)
    return [board for board in BOARDS if board.slug in wanted]


READ = _read()


def back_fill(folder: Path, of: Sequence[Line], zero_s: float, start: int, end: int, every_s: int) -> int:
    """Blocks of these series; how many samples. By the real promtool, two hours at a time, which is what one block
    holds."""
    tool, count = install.find("promtool"), 0
    if tool is None:
        raise SystemExit("promtool is missing: make cli ARGS='lab install promtool prometheus'")
    path = folder / "block.om"
    for first, last in blocks(start, end):
        times = range(-(-first // every_s) * every_s, last, every_s)
        if not times or not of:
            continue
        with path.open("w") as file:
            for line in of:
                head, ends = text(line), [f" {at}\n" for at in times]
                if line.grows or line.clock:
                    shares = [(at - zero_s) / 3600 for at in times]
                    file.writelines(
                        [f"{head}{one:.9g}{end_}" for one, end_ in zip(line.values(shares, zero_s), ends, strict=True)]
                    )
                else:
                    whole = f"{head}{line.start:.9g}"
                    file.writelines([whole + end_ for end_ in ends])
            file.write("# EOF\n")
        command = [tool.path, "tsdb", "create-blocks-from", "openmetrics", "--quiet", path, folder / "data"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"promtool: {(done.stderr or done.stdout)[-500:]}")
        path.unlink()
        count += len(of) * len(times)
    return count


def blocks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans that lie within Prometheus' blocks of two hours."""
    while start < end:
        until = min(end, (start // BLOCK_S + 1) * BLOCK_S)
        yield start, until
        start = until


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def configure(folder: Path, plan: Plan, every: Sequence[Line], pages: int, port: int) -> None:
    """Each target has its own path at the one server, and the name that the fleet knows it by."""
    (folder / "rules").mkdir(exist_ok=True)
    for name, content in printer.rule_files():
        rules = yaml.safe_load(content)
        for group in rules["groups"]:
            group["interval"] = f"{plan.evaluate_s}s"
        (folder / "rules" / name).write_text(json.dumps(rules))  # JSON is YAML
    jobs: dict[str, list[dict[str, Any]]] = {}
    for job, instance in targets(every):
        about = {
            "targets": [f"127.0.0.1:{pages}"],
            "labels": {"__metrics_path__": f"/{job}/{instance}", "instance": instance},
        }
        jobs.setdefault(job, []).append(about)
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {
                    "scrape_interval": f"{plan.scrape_s}s",
                    "scrape_timeout": f"{plan.scrape_s}s",
                    "evaluation_interval": f"{plan.evaluate_s}s",
                },
                "rule_files": [str(folder / "rules/*.yaml")],
                "scrape_configs": [
                    *({"job_name": job, "honor_labels": True, "static_configs": found} for job, found in jobs.items()),
                    {"job_name": "prometheus", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]},
                ],
            }
        )
    )


@contextmanager
def process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ends with the block, and with us."""
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    program = install.find("prometheus")
    if program is None:
        raise SystemExit("Prometheus is missing: make cli ARGS='lab install promtool prometheus'")
    command = [
        str(program.path),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=10y",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with process(command) as server:
        until_ready(f"http://127.0.0.1:{port}")
        yield server


def until_answers(port: int) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server of the fleet's pages did not start")


def until_scraped(base: str, count: int) -> None:
    """Every target, and Prometheus itself."""
    for _ in range(600):
        if (rows := query(base, "sum(up)")) and float(rows[0]["value"][1]) >= count:
            return
        time.sleep(0.2)
    raise SystemExit(f"Prometheus does not scrape all {count} targets; it says {rows}")


# ---- what is measured


def watch(found: Found, base: str, pid: int, folder: Path) -> None:
    """While everything is scraped and every rule evaluated."""
    time.sleep(found.plan.settle_s)
    wal, cpu, began = size_of(folder / "data/wal"), cpu_s(pid), time.monotonic()
    appended = number(base, "prometheus_tsdb_head_samples_appended_total{type='float'}", direct=True)
    groups: dict[str, list[float]] = {}
    rss = []
    while time.monotonic() < began + found.plan.watched_s:
        time.sleep(found.plan.evaluate_s / 2)
        rss.append(memory.mib(pid, memory.RESIDENT))
        for name, seconds in timed_groups(base).items():
            groups.setdefault(name, []).append(seconds * 1000)
    took = time.monotonic() - began
    found.cpu_share = (cpu_s(pid) - cpu) / took
    found.rss_mib = statistics.median(rss)
    found.samples_per_s = (
        number(base, "prometheus_tsdb_head_samples_appended_total{type='float'}", direct=True) - appended
    ) / took
    found.disk_mib_per_h = (size_of(folder / "data/wal") - wal) / 2**20 / took * 3600
    found.series = round(number(base, "prometheus_tsdb_head_series", direct=True))
    durations = sorted(float(row["value"][1]) * 1000 for row in query(base, 'scrape_duration_seconds{job="vllm"}'))
    found.scrape_ms, found.scrape_worst_ms = statistics.median(durations), durations[-1]
    found.groups_ms = {name: statistics.median(seen) for name, seen in groups.items()}
    found.rules_ms, found.rules_least_ms = sum(found.groups_ms.values()), sum(min(seen) for seen in groups.values())
    found.rules_worst, found.rules_worst_ms = max(found.groups_ms.items(), key=lambda pair: pair[1])


def timed_groups(base: str) -> dict[str, float]:
    """Seconds that each group's last evaluation took. Raises SystemExit where a rule fails."""
    told = json.load(urllib.request.urlopen(f"{base}/api/v1/rules", timeout=60))["data"]["groups"]
    for group in told:
        for rule in group["rules"]:
            if rule["health"] == "err":
                raise SystemExit(f"{rule['name']} cannot be evaluated: {rule.get('lastError')}")
    return {group["name"]: group["evaluationTime"] for group in told if not group["lastEvaluation"].startswith("0001")}


def query(base: str, expr: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(
        f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expr})}", timeout=120
    ) as answer:
        rows: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return rows


def number(base: str, series: str, *, direct: bool = False) -> float:
    """A figure of Prometheus' own: from its page as it stands now, or as it has scraped it."""
    if not direct:
        return float(query(base, series)[0]["value"][1])
    name, _, label = series.partition("{")
    for line in urllib.request.urlopen(f"{base}/metrics", timeout=60).read().decode().splitlines():
        if (
            line.startswith(name)
            and (not label or label.rstrip("}").replace("'", '"') in line)
            and line[len(name)] in "{ "
        ):
            return float(line.rpartition(" ")[2])
    raise SystemExit(f"Prometheus does not tell {series}")


def shown_recorded(base: str) -> list[Line]:
    """What the rules have recorded, as it stands."""
    names = sorted({recording.record for recording in RECORDINGS})
    found = []
    for name in names:
        for row in query(base, name):
            labels = {key: one for key, one in row["metric"].items() if key != "__name__"}
            if math.isfinite(level := float(row["value"][1])):
                found.append(Line(name, labels, level))
    return found


def ask(found: Found, base: str, end: int) -> None:
    """What the boards ask of the last hour, and the long view of a day: each query alone, after once to warm up."""
    slowest = (0.0, "")
    for board in boards((*RAW, RECORDED)):
        hours = RECORDED_H if board.slug == RECORDED else 1
        over = Range(end - hours * 3600, end, scrape_s=found.plan.every_s)
        took, least = [], 0.0
        for panel, expr, shape in asked(board, over):
            url = url_of(base, expr, over, shape)
            get(url)
            rounds = [timed(url) * 1000 for _ in range(found.plan.rounds)]
            took.append(statistics.median(rounds))
            least += min(rounds)
            slowest = max(slowest, (took[-1], f"{board.slug}/{panel}"))
        found.queries_ms[board.slug], found.boards_least_ms[board.slug] = took, least
        tell(f"board {board.slug}: {len(took)} queries, {sum(took):,.0f} ms")
    found.slowest = f"{slowest[1]} {slowest[0]:.0f} ms"


# ---- what is told


@dataclass(frozen=True, slots=True)
class Fit:
    """y = at_none + per_one * x, least squares. off: the largest difference between it and what was measured, as a
    share of the largest value."""

    at_none: float
    per_one: float
    off: float

    def at(self, x: float) -> float:
        return self.at_none + self.per_one * x

    def reaches(self, y: float) -> float:
        """The x at which it reaches y."""
        return (y - self.at_none) / self.per_one if self.per_one > 0 else math.inf


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Raises ValueError for fewer than two different places."""
    if len({x for x, _ in points}) < 2:
        raise ValueError("a line needs two different places")
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    at_none = mean_y - slope * mean_x
    most = max(abs(y) for _, y in points) or 1.0
    return Fit(at_none, slope, max(abs(y - at_none - slope * x) for x, y in points) / most)


def p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)]


ROWS: tuple[tuple[str, Any], ...] = (
    ("series in the head", lambda f: f"{f.series:,}"),
    ("samples a second, scraped every {scrape} s", lambda f: f"{f.samples_per_s:,.0f}"),
    ("RSS of Prometheus, MiB", lambda f: f"{f.rss_mib:,.0f}"),
    ("CPU of Prometheus, % of a core", lambda f: f"{100 * f.cpu_share:.1f}"),
    ("scrape of an engine: median, worst, ms", lambda f: f"{f.scrape_ms:.1f}, {f.scrape_worst_ms:.1f}"),
    ("all rules once: sum of the groups, ms (at their quickest)",
        lambda f: f"{f.rules_ms:,.0f} ({f.rules_least_ms:,.0f})"),
    ("the dearest group, ms", lambda f: f"{f.rules_worst_ms:,.0f} ({f.rules_worst.removeprefix('vllm-')})"),
    ("write-ahead log, MiB an hour", lambda f: f"{f.disk_mib_per_h:,.0f}"),
    ("blocks: bytes a sample", lambda f: f"{f.block_bytes_per_sample:.2f}"),
    ("history: hours, step; built in", lambda f: f"{f.plan.hours:g} h, {f.plan.every_s} s; {f.built_s:.0f} s"),
    ("RSS after all queries, MiB", lambda f: f"{f.rss_asked_mib:,.0f}"),
)  # fmt: skip


def report(every: Sequence[Found]) -> str:
    told = [
        f"| engines x teams x models | {' | '.join(found.plan.size.told for found in every)} |",
        "|---|" + "---:|" * len(every),
    ]
    for name, show in ROWS:
        told.append(f"| {name.format(scrape=every[0].plan.scrape_s)} | {' | '.join(show(found) for found in every)} |")
    for slug in every[0].queries_ms:
        hours = f"{RECORDED_H} h, recorded" if slug == RECORDED else "1 h, raw"
        cells = (
            f"{statistics.median(f.queries_ms[slug]):.0f}, {p95(f.queries_ms[slug]):.0f}, {_all(f, slug)}"
            for f in every
        )
        told.append(f"| board {slug} ({hours}): query p50, p95, all, ms (at their quickest) | {' | '.join(cells)} |")
    told.append(f"| the slowest query | {' | '.join(found.slowest for found in every)} |")
    return "\n".join(told + (["", *laws(every)] if len(every) > 1 else []))


def _all(found: Found, slug: str) -> str:
    return f"{sum(found.queries_ms[slug]):,.0f} ({found.boards_least_ms.get(slug, math.nan):,.0f})"


def laws(every: Sequence[Found]) -> Iterator[str]:
    """What the sizes have in common, as straight lines over the series in the head."""
    for what, unit, of in LAWS:
        law = fit([(found.series, of(found)) for found in every])
        yield (
            f"{what} = {law.at_none:,.1f} + {1000 * law.per_one:,.3f} for each 1,000 series ({unit}); off by"
            f" {law.off:.0%} of the largest at most"
        )


LAWS: tuple[tuple[str, str, Any], ...] = (
    ("RSS", "MiB", lambda f: f.rss_mib),
    ("CPU", "% of a core", lambda f: 100 * f.cpu_share),
    ("all rules once", "ms", lambda f: f.rules_ms),
    ("the dearest group", "ms", lambda f: f.rules_worst_ms),
    ("write-ahead log", "MiB an hour", lambda f: f.disk_mib_per_h),
)


def machine() -> str:
    memory = int(
        next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")).split()[1]
    )
    return f"{len(os.sched_getaffinity(0))} cores, {memory / 2**20:.0f} GiB of memory"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        type=int,
        action="append",
        metavar="ENGINES",
        help="only the size with so many engines; may be given again",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one tiny fleet for some seconds, to see that it works; its figures mean nothing",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write what was found there as well; sizes that it holds already are kept",
    )
    options = parser.parse_args(arguments)
    plans = (
        [QUICK] if options.quick else [plan for plan in PLANS if not options.only or plan.size.engines in options.only]
    )
    if not plans:
        parser.error(f"--only {options.only[0]} is none of {', '.join(str(plan.size.engines) for plan in PLANS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends with us
    every = kept(options.json)
    for plan in plans:
        with tempfile.TemporaryDirectory(prefix="bench-fleet-", dir="/var/tmp") as name:
            print(f"{plan.size.told}: measuring; load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            every[plan.size.engines] = measure(plan, Path(name))
        if options.json:
            options.json.write_text(json.dumps([asdict(found) for found in every.values()], indent=1))
    print(f"{machine()}; load average {os.getloadavg()[0]:.1f}\n")
    print(report([every[engines] for engines in sorted(every)]))


QUICK = Plan(Size(2, 2, 1), hours=0.1, evaluate_s=1, scrape_s=2, settle_s=4.0, watched_s=3.0, rounds=1)


def kept(path: Path | None) -> dict[int, Found]:
    """What an earlier run has written."""
    if path is None or not path.exists():
        return {}
    found = {}
    for told in json.loads(path.read_text()):
        plan = told.pop("plan")
        one = Found(Plan(Size(**plan.pop("size")), **plan), **told)
        found[one.plan.size.engines] = one
    return found


if __name__ == "__main__":
    main()
