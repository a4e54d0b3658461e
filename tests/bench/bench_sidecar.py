"""`make bench-sidecar`: how fast the sidecar reads, how long a scrape waits, how late a line is counted, and what it
all takes.

Every reader is one real process on one core; who writes, scrapes and stands for engines and the collector has another.
A round goes through all measures, ours and the peer's one right after the other; a figure is the median of the rounds,
with the lowest and the highest. Method and results: docs/internals/benchmark-sidecar.md."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import itertools
import json
import os
import random
import re
import resource
import statistics
import sys
import tempfile
import time
import unittest.mock
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from exporters.catalogue import exposition_parser
from exporters.catalogue import sidecar as sidecar_series
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord
from exporters.requests.store import CounterStore
from stack.lab import install
from tests.bench.bench_gateway import QUIET, Figure, core_s, cpu_s, figure_of, module, processor, running
from tests.bench.bench_sidecar_lines import Lines, record
from tests.bench.bench_sidecar_peers import MTAIL
from tests.support import memory
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/0.32.0-after-probe.prom"
POLL_S = 0.05
YARDSTICK_BYTES, YARDSTICK_PER_S = 414, 318_000  # json.loads on the machine that the limits were set on
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
TEAMS, MODELS = 10, 6  # of the big page: 60 rows of 170 series
IN_FLIGHT = 6000  # spans; the queue holds 8,192
SETTLED_S = 0.15  # a line is found, counted, committed and shown by then


@dataclass(frozen=True)
class Sizes:
    """pool: lines that are made; all others are these with other ids. many: lines behind the RSS. at_rest_s: how long a
    sidecar is watched.
    teams, engines: whose growth is measured. recorded: requests that are counted in this process, with native
    histograms and without."""

    rounds: int = 5
    pool: int = 10_000
    lines: int = 300_000
    many: int = 1_000_000
    scrapes: int = 300
    fresh: int = 200
    samples: int = 5000
    recorded: int = 20_000
    seconds: float = 4.0
    at_rest_s: float = 10.0
    teams: tuple[int, ...] = (1, 10, 100)
    engines: tuple[int, ...] = (1, 5, 20)


QUICK = Sizes(1, 1000, 2000, 2000, 15, 3, 500, 1000, 0.2, 0.2, (1,), (1,))


@dataclass(frozen=True)
class Told:
    """What a figure is, and how many digits it deserves. must, aim: at most that much; at least where `least`."""

    what: str
    form: str = ",.0f"
    must: float | None = None
    aim: float | None = None
    least: bool = False

    def missed(self, figure: Figure) -> bool:
        return self.must is not None and (figure.median < self.must if self.least else figure.median > self.must)


def growth(sizes: Sizes) -> dict[str, Told]:
    found = {}
    for teams in sizes.teams:
        found |= {
            f"{teams} teams ingest": Told(f"{teams} teams: lines/s"),
            f"{teams} teams scrape": Told(f"{teams} teams: scrape p50, ms", ".1f"),
        }
        found[f"{teams} teams rss"] = Told(f"{teams} teams: RSS after it, MiB", ".0f")
    for engines in sizes.engines:
        found[f"{engines} engines share"] = Told(f"{engines} engines: CPU at rest, % of a core", ".2f")
        found[f"{engines} engines scrape"] = Told(f"{engines} engines: scrape p50, ms", ".1f")
        found[f"{engines} engines rss"] = Told(f"{engines} engines: RSS, MiB", ".0f")
    return found


TOLD = {
    "ingest": Told("ingest, lines/s", must=300_000, aim=700_000, least=True),
    "ingest cpu": Told("the same per CPU second"),
    "ingest otlp": Told("with spans on, lines/s"),
    "mtail": Told("mtail on the same file, lines/s"),
    "mtail cpu": Told("the same per CPU second "),
    "yardstick": Told(f"json.loads, lines of {YARDSTICK_BYTES} bytes/s"),
    "json": Told("json.loads, these lines/s"),
    "record": Told("counting in blocks of 100 lines, us of CPU a request", ".2f"),
    "record native": Told("what native histograms add to it, us", ".2f", 2.0),
    "record one": Told("counting one line at a time, us of CPU a request", ".2f"),
    "record one native": Told("what native histograms add to it, us ", ".2f"),
    "keep up": Told("CPU at 5,000 lines/s, % of a core", ".2f", 2.0, 1.0),
    "series": Told("series on the big page"),
    "scrape p50": Told("scrape, p50 ms", ".2f"),
    "scrape p99": Told("scrape, p99 ms", ".2f", 15.0, 3.0),
    "changed p50": Told("scrape when every row changed, p50 ms", ".2f"),
    "changed p99": Told("scrape when every row changed, p99 ms", ".2f", 15.0, 3.0),
    "openmetrics p50": Told("OpenMetrics with exemplars, every row changed, p50 ms", ".2f"),
    "openmetrics p99": Told("OpenMetrics with exemplars, every row changed, p99 ms", ".2f", 15.0, 3.0),
    "protobuf kept p50": Told("protobuf with native histograms and exemplars, p50 ms", ".2f"),
    "protobuf kept p99": Told("protobuf with native histograms and exemplars, p99 ms", ".2f", 15.0, 3.0),
    "protobuf p50": Told("the same when every row changed, p50 ms", ".2f"),
    "protobuf p99": Told("the same when every row changed, p99 ms", ".2f", 15.0, 3.0),
    "client_python": Told("client_python with the same series, p50 ms", ".1f"),
    "page kb": Told("the big page, kB"),
    "protobuf kb": Told("the big page in protobuf, kB"),
    "gzip kb": Told("the big page as gzip -1, kB"),
    "gzip ms": Told("gzip -1 of it, ms", ".2f"),
    "fresh p50": Told("line to metric, p50 ms", ".1f"),
    "fresh p99": Told("line to metric, p99 ms", ".1f", 250.0, 60.0),
    "rss": Told("RSS with 10,000 series, a full window and spans, MiB", ".0f", 120.0, 70.0),
    "parse cold": Told("5,000 samples of an engine, first look, ms", ".2f"),
    "parse warm": Told("5,000 samples of an engine, ms", ".2f", 20.0, 2.0),
    "parse client_python": Told("the same with client_python, ms", ".1f"),
    "spans": Told("spans/s to a collector", must=2000, aim=10_000, least=True),
    "spans cpu": Told("the same per CPU second, lines and all"),
    "genai cpu": Told("the same with GenAI metrics on"),
}


@dataclass
class Reader:
    """A process that reads a log and shows a page. counted: finds in the page how many lines it has counted."""

    process: Popen[bytes]
    log: Path
    counted: Callable[[bytes], int]
    connection: http.client.HTTPConnection

    def page(self, accept: str = "text/plain") -> bytes:
        self.connection.request("GET", "/metrics", headers={"Accept": accept})
        return self.connection.getresponse().read()

    def append(self, text: bytes) -> None:
        with self.log.open("ab", buffering=0) as file:
            file.write(text)

    def until(self, lines: int, every_s: float = POLL_S, patience_s: float = 60) -> float:
        """Waits until the page shows so many lines; the monotonic time at which it had come."""
        give_up = time.monotonic() + patience_s
        while (found := self.counted(self.page())) != lines:
            if found > lines or time.monotonic() > give_up:
                raise SystemExit(f"{self.log} has {lines} lines, the page says {found}")
            time.sleep(every_s)
        return time.monotonic()

    def scrape_ms(self, accept: str = "text/plain") -> float:
        began = time.perf_counter()
        self.page(accept)
        return (time.perf_counter() - began) * 1000

    @property
    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    @property
    def rss_mb(self) -> float:
        return memory.mib(self.process.pid, memory.RESIDENT)


def lines_total(text: bytes) -> int:
    return int(float((re.search(rf"^{sidecar_series.LOG_LINES.name} (\S+)$".encode(), text, re.M) or [b"", b"0"])[1]))


def mtail_requests(text: bytes) -> int:
    return sum(int(count) for count in re.findall(rb"^requests\{.*\} (\d+)$", text, re.M))


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


@dataclass
class Bench:
    """Everything that is measured: by figure, one value for each round."""

    sizes: Sizes
    folder: Path
    core: int
    collector: int
    engine: int
    mtail: Path | None
    found: dict[str, list[float]] = field(default_factory=dict)
    used_s: float = 0.0  # CPU of readers that have ended
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _files: dict[Lines, Path] = field(default_factory=dict)

    def tell(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.found.setdefault(name, []).append(value)

    # --- readers

    @contextlib.contextmanager
    def reader(self, command: Callable[[int, Path], list[object]], counted: Callable[[bytes], int]) -> Iterator[Reader]:
        """A reader in a folder of its own, with an empty log: mtail leaves out what a file holds when it first sees
        it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            port, log = free_port(), Path(name, "requests.jsonl")
            log.touch()
            with running(command(port, log), port, self.core, {"PYTHONPATH": str(ROOT)}) as process:
                yield Reader(process, log, counted, http.client.HTTPConnection("127.0.0.1", port, timeout=60))
                self.used_s += cpu_s(process.pid)

    def sidecar(
        self, teams: int = TEAMS, engines: int = 0, *, spans: bool = False, genai: bool = False
    ) -> contextlib.AbstractContextManager[Reader]:
        def command(port: int, log: Path) -> list[object]:
            config: dict[str, Any] = {
                "listen": f"127.0.0.1:{port}",
                "gpu": "off",
                "requests_log": [str(log)],
                "state": str(log.with_name("state")),
            }
            config["teams"] = {"limit": teams}
            config["engines"] = [
                {"name": f"engine-{at}", "url": f"http://127.0.0.1:{self.engine}/{at}"} for at in range(engines)
            ]
            config |= {"otlp": {"endpoint": f"http://127.0.0.1:{self.collector}", "metrics": genai}} if spans else {}
            (path := log.with_name("sidecar.yaml")).write_text(yaml.safe_dump(config))
            return [sys.executable, "-m", "stack.cli", "sidecar", "run", "--config", path]

        return self.reader(command, lines_total)

    def mtail_reader(self) -> contextlib.AbstractContextManager[Reader]:
        def command(port: int, log: Path) -> list[object]:
            (progs := log.with_name("progs")).mkdir()
            (progs / "requests.mtail").write_text(MTAIL)
            place = ["-address", "127.0.0.1", "-port", port, "-log_dir", log.parent]
            return [
                self.mtail,
                "-progs",
                progs,
                "-logs",
                log,
                *place,
                "-poll_interval",
                "50ms",
                "-poll_log_interval",
                "50ms",
            ]

        return self.reader(command, mtail_requests)

    def client_python(self) -> contextlib.AbstractContextManager[Reader]:
        return self.reader(lambda port, log: module("bench_sidecar_peers", "client_python", port, log), lines_total)

    def file(self, lines: Lines) -> Path:
        """A file of as many lines as there are to be read at once, made once."""
        if lines not in self._files:
            self._files[lines] = self.folder / f"prepared-{len(self._files)}"
            with self._files[lines].open("wb") as file:
                for _ in range(self.sizes.lines // lines.count):
                    file.write(lines.text(next(self._numbers)))
        return self._files[lines]

    # --- measures, each once in a round

    def round(self) -> None:
        for measure in (
            self.ingests,
            self.yardstick,
            self.records,
            self.keeps_up,
            self.big_page,
            self.is_fresh,
            self.parses,
            self.sends,
            self.grows,
        ):
            print(".", end="", file=sys.stderr, flush=True)
            measure()

    def ingests(self) -> None:
        wall, cpu = self._ingest(self.sidecar())
        otlp, _ = self._ingest(self.sidecar(spans=True))
        self.tell({"ingest": wall, "ingest cpu": cpu, "ingest otlp": otlp})
        if self.mtail:
            wall, cpu = self._ingest(self.mtail_reader())
            self.tell({"mtail": wall, "mtail cpu": cpu})

    def _ingest(self, starting: contextlib.AbstractContextManager[Reader]) -> tuple[float, float]:
        """Lines per second of wall and of CPU time, from the moment at which the file is there until the page shows all
        of it."""
        prepared = self.file(Lines(TEAMS, count=self.sizes.pool))
        with starting as reader:
            return self._read(reader, prepared)

    def _read(self, reader: Reader, prepared: Path) -> tuple[float, float]:
        reader.page()
        time.sleep(0.2)  # it has found the empty log
        os.link(prepared, beside := reader.log.with_name("prepared"))
        cpu, began = reader.cpu_s, time.monotonic()
        beside.rename(reader.log)
        wall = reader.until(self.sizes.lines) - began
        return self.sizes.lines / wall, self.sizes.lines / max(0.01, reader.cpu_s - cpu)

    def yardstick(self) -> None:
        lines = Lines(TEAMS, count=self.sizes.pool).text(next(self._numbers)).splitlines()
        short = [_shortened(line) for line in lines]
        for name, those in (("json", lines), ("yardstick", short)):
            began = time.perf_counter()
            for line in those:
                json.loads(line)
            self.tell({name: len(those) / (time.perf_counter() - began)})

    def records(self) -> None:
        """CPU of counting and committing what was read, with native histograms and without, in turns; nothing is read
        or written."""
        rng = random.Random(6)
        those = [record(rng, at % TEAMS, 0) for at in range(self.sizes.pool)]
        for name, block, share in (("record", 100, 1), ("record one", 1, 10)):
            took: dict[bool, list[float]] = {True: [], False: []}
            ledgers = {native: CounterStore(RequestCounters(BoundedNames(), BoundedNames())) for native in took}
            for ledger in ledgers.values():  # as after some hours: most buckets are there
                ledger.traffic.add_all(those)
                ledger.commit({})
            for native in (True, False) * 5:
                with (
                    contextlib.nullcontext()
                    if native
                    else unittest.mock.patch("exporters.requests.counters.observed_ms", _nothing)
                ):
                    took[native].append(_counting_s(ledgers[native], those, block, self.sizes.recorded // share // 5))
            median = statistics.median(took[True])
            self.tell({name: median * 1e6, f"{name} native": max(0.0, median - statistics.median(took[False])) * 1e6})

    def keeps_up(self) -> None:
        """CPU of a sidecar to which 5,000 lines come every second, in fifty pieces."""
        piece = Lines(TEAMS, count=100)
        with self.sidecar() as reader:
            reader.append(piece.text(next(self._numbers), time.time()))
            reader.until(100)
            cpu, began = reader.cpu_s, time.monotonic()
            for at in range(pieces := round(50 * self.sizes.seconds)):
                reader.append(piece.text(next(self._numbers), time.time()))
                time.sleep(max(0.0, began + (at + 1) / 50 - time.monotonic()))
            took = time.monotonic() - began
            self.tell({"keep up": 100 * (reader.cpu_s - cpu) / took})
            reader.until(100 * (pieces + 1))

    def big_page(self) -> None:
        """Scrapes of 10,000 series with everything on, then of the same with client_python; RSS in between."""
        lines, every, few = (
            Lines(TEAMS, MODELS, self.sizes.pool),
            Lines(TEAMS, MODELS, count=TEAMS * MODELS),
            Lines(TEAMS, MODELS, count=2),
        )
        with self.sidecar(engines=1, spans=True) as reader:
            count = 0
            for _ in range(self.sizes.many // lines.count):
                reader.append(lines.text(next(self._numbers)))
                count += lines.count
            reader.until(count)
            took = self._scrapes(reader, self.sizes.scrapes, few, 0.01)
            self.tell({"scrape p50": statistics.median(took), "scrape p99": p99(took)})
            took = self._scrapes(reader, self.sizes.scrapes, few, 0.01, PROTOBUF)
            self.tell({"protobuf kept p50": statistics.median(took), "protobuf kept p99": p99(took)})
            self.tell({"protobuf kb": len(reader.page(PROTOBUF)) / 1000})
            for name, accept in (("changed", "text/plain"), ("openmetrics", OPENMETRICS), ("protobuf", PROTOBUF)):
                took = self._scrapes(reader, self.sizes.scrapes // 5, every, SETTLED_S, accept)
                self.tell({f"{name} p50": statistics.median(took), f"{name} p99": p99(took)})
            text = reader.page()
            began = time.perf_counter()
            packed = gzip.compress(text, 1)
            self.tell(
                {
                    "gzip ms": (time.perf_counter() - began) * 1000,
                    "gzip kb": len(packed) / 1000,
                    "page kb": len(text) / 1000,
                }
            )
            self.tell({"rss": reader.rss_mb, "series": sum(not line.startswith(b"#") for line in text.splitlines())})
        with self.client_python() as reader:
            reader.append(lines.text(next(self._numbers)))
            reader.until(lines.count)
            self.tell({"client_python": statistics.median(self._scrapes(reader, self.sizes.scrapes // 15, few, 0.01))})

    def _scrapes(
        self, reader: Reader, times: int, lines: Lines, wait_s: float, accept: str = "text/plain"
    ) -> list[float]:
        """Milliseconds of each scrape; before each, these lines are written."""
        reader.page(accept)
        took = []
        for _ in range(times):
            reader.append(lines.text(next(self._numbers), time.time()))
            time.sleep(wait_s)
            took.append(reader.scrape_ms(accept))
        return took

    def is_fresh(self) -> None:
        """Milliseconds from the writing of one line, at a random moment, until a page shows it."""
        one, took = Lines(TEAMS, count=1), []
        with self.sidecar() as reader:
            for count in range(1, self.sizes.fresh + 1):
                time.sleep(random.uniform(0.0, 0.1))
                text = one.text(next(self._numbers), time.time())
                began = time.monotonic()
                reader.append(text)
                took.append((reader.until(count, every_s=0.002) - began) * 1000)
        self.tell({"fresh p50": statistics.median(took), "fresh p99": p99(took)})

    def parses(self) -> None:
        """The page of an engine with so many models that it has 5,000 samples; of each further look, the numbers
        differ."""
        texts = [engine_page(self.sizes.samples, grown) for grown in range(11)]
        parser, took = exposition_parser.Parser(), []
        for text in texts:
            began = time.perf_counter()
            parser.parse(text)
            took.append((time.perf_counter() - began) * 1000)
        began = time.perf_counter()
        list(text_string_to_metric_families(texts[0]))
        took_theirs = (time.perf_counter() - began) * 1000
        self.tell(
            {"parse cold": took[0], "parse warm": statistics.median(took[1:]), "parse client_python": took_theirs}
        )

    def sends(self) -> None:
        seconds = self.sizes.seconds
        with self.sidecar(spans=True) as reader:
            per_s, per_cpu_s, _ = self._send(reader, lambda arrived, took: bool(arrived) and took >= seconds)
            self.tell({"spans": per_s, "spans cpu": per_cpu_s})
        with self.sidecar(spans=True, genai=True) as reader:
            _, per_cpu_s, _ = self._send(reader, lambda arrived, took: bool(arrived) and took >= seconds)
            self.tell({"genai cpu": per_cpu_s})

    def _send(self, reader: Reader, enough: Callable[[int, float], bool]) -> tuple[float, float, list[float]]:
        """Spans that arrive per second of wall and of CPU time, and the RSS a hundred times meanwhile, until `enough`
        of (arrived, seconds).

        As many go as can: the next lines are written when few enough spans are under way for the queue to hold them."""
        piece, written, rss = Lines(TEAMS, count=1000), 0, list[float]()
        collector = http.client.HTTPConnection("127.0.0.1", self.collector, timeout=60)

        def arrived() -> int:
            collector.request("GET", "/")
            return int(collector.getresponse().read())

        before, began, cpu = arrived(), time.monotonic(), reader.cpu_s
        while not enough(there := arrived() - before, time.monotonic() - began):
            if written - there <= IN_FLIGHT - piece.count:
                reader.append(piece.text(next(self._numbers), time.time()))
                written += piece.count
                rss += [reader.rss_mb] * (written % 10_000 == 0)
            else:
                time.sleep(0.002)
        now, used = time.monotonic(), reader.cpu_s - cpu
        while (left := written - (arrived() - before)) and time.monotonic() < now + 10:
            time.sleep(POLL_S)
        if left:
            raise SystemExit(f"{left} of {written} spans did not arrive")
        return there / (now - began), there / used, rss

    def grows(self) -> None:
        for teams in self.sizes.teams:
            with self.sidecar(teams) as reader:
                wall, _ = self._read(reader, self.file(Lines(teams, count=self.sizes.pool)))
                scrape = statistics.median(reader.scrape_ms() for _ in range(20))
                self.tell(
                    {
                        f"{teams} teams ingest": wall,
                        f"{teams} teams scrape": scrape,
                        f"{teams} teams rss": reader.rss_mb,
                    }
                )
        for engines in self.sizes.engines:
            with self.sidecar(engines=engines) as reader:
                time.sleep(self.sizes.at_rest_s / 10)
                cpu, began = reader.cpu_s, time.monotonic()
                time.sleep(self.sizes.at_rest_s)
                share = 100 * (reader.cpu_s - cpu) / (time.monotonic() - began)
                scrape = statistics.median(reader.scrape_ms() for _ in range(20))
                self.tell(
                    {
                        f"{engines} engines share": share,
                        f"{engines} engines scrape": scrape,
                        f"{engines} engines rss": reader.rss_mb,
                    }
                )

    def figures(self) -> dict[str, tuple[Told, Figure]]:
        told = TOLD | growth(self.sizes)
        return {name: (told[name], figure_of(self.found[name])) for name in told if name in self.found}

    # --- the soak

    def send_many(self, spans: int) -> list[str]:
        """Sends so many spans; what went wrong."""
        with self.sidecar(spans=True, genai=True) as reader:
            per_s, per_cpu_s, rss = self._send(reader, lambda arrived, _: arrived >= spans)
        tenth = max(1, len(rss) // 10)  # after three, of a million, all ids that are remembered are there
        early, late = statistics.median(rss[3 * tenth : 4 * tenth] or rss), statistics.median(rss[-tenth:])
        print(
            f"{spans:,} spans, {per_s:,.0f}/s, {per_cpu_s:,.0f} per CPU second; RSS {early:.1f} MiB early, {late:.1f}"
            " MiB late"
        )
        return [f"RSS grew from {early:.1f} to {late:.1f} MiB"] if late > 1.05 * early else []

    def soak(self, lines: int, file_bytes: int = 128 << 20) -> list[str]:
        """Writes so many lines, rotates, removes what was counted, and waits while too much is not; what went wrong."""
        piece, written, names = Lines(TEAMS), 0, itertools.count(1)
        kept: list[tuple[int, Path]] = []  # rotated files, and how many lines were written by their end
        rss: list[float] = []
        began = time.monotonic()
        with self.sidecar() as reader:
            while written < lines:
                reader.append(piece.text(next(self._numbers), time.time()))
                written += piece.count
                if reader.log.stat().st_size >= file_bytes:
                    kept.append((written, reader.log.with_name(f"requests.jsonl.{next(names)}")))
                    reader.log.rename(kept[-1][1])
                while (counted := reader.counted(reader.page())) < written - (file_bytes // 200):
                    time.sleep(POLL_S)
                while kept and kept[0][0] <= counted:
                    kept.pop(0)[1].unlink()
                if 100 * written // lines > len(rss):
                    rss.append(reader.rss_mb)
                    print(f"\r{written:,} lines, RSS {rss[-1]:.1f} MiB", end="", file=sys.stderr, flush=True)
            wrong = []
            deadline = time.monotonic() + 60
            while (counted := reader.counted(reader.page())) != written and time.monotonic() < deadline:
                time.sleep(POLL_S)
            took = time.monotonic() - began
            tenth = max(1, len(rss) // 10)
            early, late = statistics.median(rss[tenth : 2 * tenth] or rss), statistics.median(rss[-tenth:])
        print(
            f"\n{written:,} lines written, {counted:,} counted, {counted / took:,.0f} lines/s; RSS {early:.1f} MiB"
            f" early, {late:.1f} MiB late"
        )
        if counted != written:
            wrong.append(f"{written} lines were written, {counted} counted")
        if late > 1.05 * early:
            wrong.append(f"RSS grew from {early:.1f} to {late:.1f} MiB")
        return wrong


def _nothing(*_: object) -> array[int]:
    """Stand for `observed_ms` where native histograms are left out."""
    return array("H")


def _counting_s(ledger: CounterStore, records: Sequence[RequestRecord], block: int, count: int) -> float:
    """Return the CPU seconds that each of `count` requests takes in blocks, with a commit after each block."""
    began = time.process_time()
    for start in range(0, count, block):
        at = start % len(records)
        ledger.traffic.add_all(records[at : at + block])
        ledger.commit({})
    return (time.process_time() - began) / count


def _shortened(line: bytes) -> bytes:
    """The same record with as many fields as fit into the yardstick's bytes."""
    fields = json.loads(line)
    while len(text := json.dumps(fields, separators=(",", ":")).encode()) > YARDSTICK_BYTES:
        fields.popitem()
    return text


def engine_page(samples: int, grown: int = 0) -> str:
    """A captured page of vLLM, with so many models that there are about so many samples; `grown` is added to each
    number."""
    lines = GOLDEN.read_text().splitlines()
    times = max(1, round(samples / sum('model_name="' in line for line in lines)))
    found = []
    for line in lines:
        if line.startswith("#") or 'model_name="' not in line:
            found.append(line)
            continue
        before, name, after = line.rpartition('model_name="')
        series, _, value = after.rpartition(" ")
        found += [f"{before}{name}{at}-{series} {float(value) + grown}" for at in range(times)]
    return "\n".join(found) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, to see that it works; its figures mean nothing"
    )
    parser.add_argument(
        "--soak", type=int, metavar="LINES", help="only this: so many lines in rotating files; nothing lost, no growth"
    )
    parser.add_argument(
        "--spans", type=int, metavar="N", help="only this: so many spans, with GenAI metrics on; none lost, no growth"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="so many rounds, not five")
    parser.add_argument(
        "--only",
        metavar="MEASURE",
        help="only this measure: ingests, records, big_page, is_fresh, parses, sends, keeps_up or grows",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value of every round there as well")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 and not options.quick:
        raise SystemExit("two cores are needed: one for the reader, one for who writes and scrapes")
    core, other = cores[-1], cores[0]  # the first is the one that most interrupts go to
    print(
        f"{processor()}; core {core} for the reader, core {other} for all others; load average before:"
        f" {os.getloadavg()[0]:.2f}"
    )
    os.sched_setaffinity(0, {other})
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    mtail = install.find("mtail")
    with tempfile.TemporaryDirectory(prefix="bench-sidecar-", dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        collector, engine = free_port(), free_port()
        stack.enter_context(
            running(module("bench_sidecar_peers", "collector", collector), collector, other, {"PYTHONPATH": str(ROOT)})
        )
        stack.enter_context(running(module("bench_gateway_stub", engine), engine, other, {"PYTHONPATH": str(ROOT)}))
        sizes = QUICK if options.quick else Sizes()
        bench = Bench(sizes, Path(name), core, collector, engine, mtail.path if mtail else None)
        before, began = core_s(core), time.monotonic()
        if options.soak:
            wrong = bench.soak(options.soak)
        elif options.spans:
            wrong = bench.send_many(options.spans)
        else:
            for _ in range(options.rounds or sizes.rounds):
                getattr(bench, options.only)() if options.only else bench.round()
            wrong = [] if options.quick else missed(bench)
        disturbed = max(0.0, core_s(core) - before - bench.used_s) / (time.monotonic() - began)
    print_figures(bench)
    if mtail is None and not (options.soak or options.spans):
        print("left out: mtail (`vllm-watch lab install mtail`)")
    print(f"{time.monotonic() - began:.0f} s; others took {disturbed:.1%} of the reader's core")
    if disturbed > QUIET:
        print(f"NOT QUIET: more than {QUIET:.0%}, so these figures are worth little")
    if options.json:
        options.json.write_text(json.dumps({"found": bench.found, "disturbed": disturbed, "missed": wrong}, indent=1))
    if wrong:
        raise SystemExit("missed: " + "; ".join(wrong))


def missed(bench: Bench) -> list[str]:
    """The limits that are not kept."""
    figures = bench.figures().values()
    return [
        f"{told.what} is {figure.text(told.form)}, the limit {told.must:{told.form}}"
        for told, figure in figures
        if told.missed(figure)
    ]


def print_figures(bench: Bench) -> None:
    if not bench.found:
        return
    print("\n| | median (lowest to highest) | must | aim |\n|---|---|---|---|")
    for told, figure in bench.figures().values():
        limits = [
            "" if limit is None else f"{limit:g}" if limit < 1000 else f"{limit:,.0f}"
            for limit in (told.must, told.aim)
        ]
        print(f"| {told.what.strip()} | {figure.text(told.form)} | {' | '.join(limits)} |")
    print()


if __name__ == "__main__":
    main()
