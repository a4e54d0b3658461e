"""`make bench-gateway`: what the gateway adds to a request, what a streamed token costs it, and how many streams one
core holds.

Every contender is one process on one core; the stub engine and the load share another. What is compared is measured in
the same round, one contender after the other, in an order that turns from round to round; a figure is the median of the
rounds, with the lowest and the highest. A figure for which stub and load were busy for more than 80 % of their core is
refused. Method and results: docs/internals/benchmark-gateway.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

import uvloop
import yaml

from stack.gateway import make_key
from stack.lab.install import cache_dir
from tests.bench.bench_gateway_load import Load, Shape, answers, drive
from tests.bench.bench_gateway_stub import reply
from tests.support import memory
from tests.support.bench_processes import ALONE, running
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
CONCURRENT, GAP_MS = 32, 20
BUSY = 0.8  # of their core; above, stub and load are what is measured
LONGER = 0.05
# CPU of ours over that of bare aiohttp in the same round, since machines differ: the limit, and the aim
RATIOS = {"json_cpu_us": ("CPU per JSON request", 1.25, 1.0), "event_cpu_us": ("CPU per streamed event", 1.0, 0.7)}
STREAMS_AIM = 1000
QUIET = 0.03  # what others may take of a core before the figures are said to be worth little
PEERS = {
    "httpx": ("httpx==0.28.1", "starlette==1.10.0", "uvicorn[standard]==0.54.0"),
    "litellm": ("litellm[proxy]==1.102.4",),
}
COLUMNS = {
    "json_added_p50_ms": "JSON added p50 ms",
    "json_added_p99_ms": "p99 ms",
    "sse_added_p50_ms": "SSE added p50 ms",
    "sse_added_p99_ms": "p99 ms ",
    "json_per_s": f"JSON/s at {CONCURRENT}",
    "json_cpu_us": "CPU us per JSON",
    "stream_cpu_us": "CPU us per stream",
    "event_cpu_us": "per event",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """seconds: of each measure with a duration. each: requests of a stream one after the other. streams: tried upwards;
    fewer: tried downwards by those that do not hold the first. cost_at: the number of streams at which CPU is read."""

    rounds: int = 5
    seconds: float = 2.0
    tokens: int = 64
    each: int = 3
    streams: tuple[int, ...] = (128, 256, 512, 768, 1024)
    fewer: tuple[int, ...] = (64, 32, 16, 8)
    cost_at: int = 256


QUICK = Sizes(rounds=1, seconds=0.1, tokens=8, each=1, streams=(4, 8), fewer=(), cost_at=8)


@dataclass(slots=True)
class Contender:
    """One way to the stub. exact: it passes everything on as it is. Direct has the stub's own process."""

    name: str
    told: str
    port: int
    process: subprocess.Popen[bytes]
    key: str = "unused"
    exact: bool = True
    asked: int = 0
    failed: int = 0
    rss_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One contender, one measure, one round. *_share: of the core that stub and load have together."""

    p50_ms: float
    p99_ms: float
    per_s: float
    cpu_us: float
    events: int
    load_share: float
    stub_share: float


@dataclass(frozen=True, slots=True)
class Figure:
    """Median, lowest and highest of the rounds; or the reason why there is none."""

    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    refused: str = ""

    def text(self, form: str) -> str:
        return self.refused or f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


@dataclass(slots=True)
class Bench:
    """Everything that runs, and the samples of every contender and measure, one for each round."""

    sizes: Sizes
    stub: Contender
    contenders: list[Contender]
    cores: tuple[int, int]  # of the contender; of stub and load
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    disturbed: tuple[float, float] = (0.0, 0.0)  # by other programs and the hypervisor, as a share of each core

    async def run(self) -> None:
        before, began = self._foreign_s(), time.perf_counter()
        await self._measure()
        wall_s = time.perf_counter() - began
        ours, others = ((now - was) / wall_s for now, was in zip(self._foreign_s(), before, strict=True))
        self.disturbed = max(0.0, ours), max(0.0, others)
        for contender in (self.stub, *self.contenders):
            contender.rss_mb = memory.mib(contender.process.pid, memory.RESIDENT)

    def _foreign_s(self) -> tuple[float, float]:
        """What each core has been kept busy with by anything but us."""
        contenders = sum(cpu_s(it.process.pid) for it in self.contenders)
        return (
            core_s(self.cores[0]) - contenders,
            core_s(self.cores[1]) - cpu_s(self.stub.process.pid) - time.process_time(),
        )

    async def _measure(self) -> None:
        alone, burst = Shape(), Shape(self.sizes.tokens)
        for turn in range(self.sizes.rounds):
            for contender in self._order(turn, self.contenders):
                await self._timed("json", contender, alone, 1)
                await self._timed("sse", contender, burst, 1)
                await self._timed("json at once", contender, alone, CONCURRENT)
        held = await self._streams(self.sizes.streams, self.contenders[:], until_lost=True)
        await self._streams(self.sizes.fewer, [it for it in self.contenders if it.name not in held], until_lost=False)

    def _order(self, turn: int, contenders: list[Contender]) -> list[Contender]:
        everyone = [self.stub, *contenders]
        at = turn % len(everyone)
        return everyone[at:] + everyone[:at]

    async def _streams(self, numbers: tuple[int, ...], left: list[Contender], *, until_lost: bool) -> set[str]:
        """Goes through the numbers with those that have not failed yet, or not held any yet; the names of those that
        held one."""
        held: set[str] = set()
        for number in numbers:
            if not left:
                break
            for turn in range(self.sizes.rounds):
                for contender in self._order(turn, left):
                    await self._paced(contender, number)
            fine = {it.name for it in left if self.holds(it, number)}
            held |= fine
            left = [it for it in left if (it.name in fine) == until_lost]
        return held

    async def _timed(self, measure: str, contender: Contender, shape: Shape, connections: int) -> None:
        await self._drive(contender, shape, connections, seconds=self.sizes.seconds / 10)  # warms up
        await self._sample(
            measure, contender, shape, partial(self._drive, contender, shape, connections, seconds=self.sizes.seconds)
        )

    async def _paced(self, contender: Contender, number: int) -> None:
        shape = Shape(self.sizes.tokens, GAP_MS)
        await self._sample(
            f"streams {number}", contender, shape, partial(self._drive, contender, shape, number, each=self.sizes.each)
        )

    async def _drive(
        self,
        contender: Contender,
        shape: Shape,
        connections: int,
        *,
        seconds: float | None = None,
        each: int | None = None,
    ) -> Load:
        check = answers(shape, reply() if contender.exact else None)
        request = shape.request(contender.port, contender.key)
        try:
            load = await drive(contender.port, request, check, connections, seconds=seconds, each=each)
        except OSError as error:  # also a timeout
            raise SystemExit(f"{contender.name} does not answer any more: {error!r}") from error
        contender.asked += load.asked
        contender.failed += load.failed
        if load.failed:
            raise SystemExit(
                f"{contender.name}: {load.failed} of {load.asked} requests failed; nothing is measured with failing"
                " requests"
            )
        return load

    async def _sample(
        self, measure: str, contender: Contender, shape: Shape, driven: Callable[[], asyncio.Future[Load]]
    ) -> None:
        print(".", end="", file=sys.stderr, flush=True)
        pids = contender.process.pid, self.stub.process.pid
        before = [cpu_s(pid) for pid in pids]
        load = await driven()
        used, stub = (cpu_s(pid) - was for pid, was in zip(pids, before, strict=True))
        took = sorted(load.took_s)
        sample = Sample(
            p50_ms=statistics.median(took) * 1000,
            p99_ms=took[min(len(took) - 1, len(took) * 99 // 100)] * 1000,
            per_s=len(took) / load.wall_s,
            cpu_us=used / len(took) * 1e6,
            events=shape.events,
            load_share=load.busy_s / load.wall_s,
            stub_share=stub / load.wall_s,
        )
        self.samples.setdefault((contender.name, measure), []).append(sample)

    def ratio(self, name: str, ours: Contender, floor: Contender) -> Figure:
        """CPU of one contender over that of another, round by round, of a figure of RATIOS."""
        both = set(self.tried(ours)) & set(self.tried(floor))
        at = max((number for number in both if number <= self.sizes.cost_at), default=0)
        measure = "json at once" if name == "json_cpu_us" else f"streams {at}"
        if refused := self._refused(ours.name, measure) or self._refused(floor.name, measure):
            return Figure(refused=refused)
        pairs = zip(self.samples[ours.name, measure], self.samples[floor.name, measure], strict=True)
        return figure_of([it.cpu_us / bare.cpu_us for it, bare in pairs])

    def figures(self, contender: Contender) -> dict[str, Figure]:
        """Every figure of one contender."""
        name = contender.name
        cost = f"streams {max((n for n in self.tried(contender) if n <= self.sizes.cost_at), default=0)}"
        return {
            "json_added_p50_ms": self._added(name, "json", "p50_ms"),
            "json_added_p99_ms": self._added(name, "json", "p99_ms"),
            "sse_added_p50_ms": self._added(name, "sse", "p50_ms"),
            "sse_added_p99_ms": self._added(name, "sse", "p99_ms"),
            "json_per_s": self._figure(name, "json at once", lambda it: it.per_s),
            "json_cpu_us": self._figure(name, "json at once", lambda it: it.cpu_us),
            "stream_cpu_us": self._figure(name, cost, lambda it: it.cpu_us),
            "event_cpu_us": self._figure(name, cost, lambda it: it.cpu_us / it.events),
        }

    def tried(self, contender: Contender) -> list[int]:
        return sorted(
            int(measure.split()[1])
            for name, measure in self.samples
            if name == contender.name and measure.startswith("streams")
        )

    def longer(self, contender: Contender, number: int) -> Figure:
        """By what share requests take longer than direct, at the median, with so many streams."""
        measure = f"streams {number}"
        pairs = self._pairs(contender.name, measure)
        refused = self._refused(self.stub.name, measure) or self._refused(contender.name, measure)
        return (
            Figure(refused=refused)
            if refused
            else figure_of([ours.p50_ms / direct.p50_ms - 1 for ours, direct in pairs])
        )

    def holds(self, contender: Contender, number: int) -> bool:
        longer = self.longer(contender, number)
        return not longer.refused and longer.median <= LONGER

    def held(self, contender: Contender) -> int:
        return max((number for number in self.tried(contender) if self.holds(contender, number)), default=0)

    def _pairs(self, name: str, measure: str) -> list[tuple[Sample, Sample]]:
        """This contender and direct, round by round."""
        return list(zip(self.samples[name, measure], self.samples[self.stub.name, measure], strict=True))

    def _added(self, name: str, measure: str, what: str) -> Figure:
        refused = self._refused(name, measure) or self._refused(self.stub.name, measure)
        pairs = self._pairs(name, measure)
        return (
            Figure(refused=refused)
            if refused
            else figure_of([getattr(ours, what) - getattr(direct, what) for ours, direct in pairs])
        )

    def _figure(self, name: str, measure: str, of: Callable[[Sample], float]) -> Figure:
        refused = self._refused(name, measure)
        return Figure(refused=refused) if refused else figure_of([of(sample) for sample in self.samples[name, measure]])

    def _refused(self, name: str, measure: str) -> str:
        load, both = self.shares(name, measure)
        share = load if measure in ("json", "sse") else both  # one request at a time: stub and load wait for each other
        return f"refused: load busy {share:.0%}" if share > BUSY else ""

    def shares(self, name: str, measure: str) -> tuple[float, float]:
        """How busy the load alone, and load and stub together, kept their core."""
        samples = self.samples[name, measure]
        return statistics.median(it.load_share for it in samples), statistics.median(
            it.load_share + it.stub_share for it in samples
        )


def figure_of(values: list[float]) -> Figure:
    return Figure(statistics.median(values), min(values), max(values))


def cpu_s(pid: int) -> float:
    """CPU that a process has used, all threads, user and system; the kernel counts it in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def core_s(core: int) -> float:
    """What a core has spent on programs and lost to the hypervisor; interrupts are left out, they are mostly our own
    packets."""
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    user, nice, system, _, _, _, _, steal = (int(ticks) for ticks in line.split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, to see that it works; its figures mean nothing"
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const="httpx",
        choices=PEERS,
        help="also Starlette with httpx, or both that and LiteLLM (700 MB)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 and not options.quick:
        raise SystemExit("two cores are needed: one for the contender, one for stub and load")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    peers = {None: (), "httpx": ("httpx",), "litellm": ("httpx", "litellm")}[options.peers]
    pythons = {peer: environment(peer) for peer in peers}
    core, other = cores[-1], cores[0]  # the first is the one that most interrupts go to
    print(
        f"{processor()}; core {core} for the contender, core {other} for stub and load; load average before:"
        f" {os.getloadavg()[0]:.2f}"
    )
    os.sched_setaffinity(0, {other})
    with tempfile.TemporaryDirectory(prefix="bench-gateway-", dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        stub = Contender(
            "direct",
            "the stub itself",
            port := free_port(),
            stack.enter_context(running(module("bench_gateway_stub", port), port)),
        )
        upstream = f"http://127.0.0.1:{port}"
        gateway = stack.enter_context(_gateway(folder, upstream, core))
        floor = stack.enter_context(_floor(upstream, core))
        contenders = [gateway, floor]
        started = {"httpx": _httpx, "litellm": _litellm}
        contenders += [
            stack.enter_context(started[peer](python, folder, upstream, core)) for peer, python in pythons.items()
        ]
        bench = Bench(QUICK if options.quick else Sizes(), stub, contenders, (core, other))
        began = time.monotonic()
        uvloop.run(bench.run())
        print(f" {time.monotonic() - began:.0f} s", file=sys.stderr)
        stack.close()  # ends everybody in order, so that the log is whole
        lines = (folder / "requests.jsonl").read_bytes().count(b"\n")
    goals = [] if options.quick else judged(bench, gateway, floor)
    wrong = [f"{goal.text}, {goal.wanted}" for goal in goals if goal.limit and not goal.met]
    if lines != gateway.asked:
        wrong.append(f"the request log has {lines} lines for {gateway.asked} requests")
    _print(bench, lines)
    for goal in goals:
        verdict = "met" if goal.met else "MISSED" if goal.limit else "not met"
        print(f"{'limit' if goal.limit else 'aim':6}{verdict:8}{goal.text}, {goal.wanted}")
    if options.json:
        options.json.write_text(json.dumps(_as_json(bench, lines, wrong), indent=1))
    if not peers:
        print("left out: Starlette with httpx, LiteLLM (ARGS='--peers litellm' installs and measures both)")
    if wrong:
        raise SystemExit("missed: " + "; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted of the gateway. limit: the run fails without it; otherwise it is an aim."""

    text: str
    wanted: str
    met: bool
    limit: bool


def judged(bench: Bench, gateway: Contender, floor: Contender) -> list[Goal]:
    """Every limit and aim, as ratios to bare aiohttp in the same run. What was refused is not met: nobody knows."""
    goals = []
    for name, (what, limit, aim) in RATIOS.items():
        figure = bench.ratio(name, gateway, floor)
        text = f"{what}: {figure.text('.2f')} times bare aiohttp"
        for most, is_limit in ((limit, True), (aim, False)):
            met = not figure.refused and figure.median <= most
            goals.append(Goal(text, f"at most {most:g} wanted", met, is_limit))
    ours, bare = bench.held(gateway), bench.held(floor)
    text = f"streams held at {LONGER:.0%} longer: {ours}, bare aiohttp {bare}"
    goals.append(Goal(text, "at least as many wanted", ours >= bare, limit=True))
    goals.append(Goal(text, f"{STREAMS_AIM} wanted", ours >= STREAMS_AIM, limit=False))
    return goals


def _print(bench: Bench, lines: int) -> None:
    print(f"\n| | {' | '.join(COLUMNS.values())} | streams held | RSS MB |\n|---|{'---|' * (len(COLUMNS) + 2)}")
    for it in bench.contenders:
        figures = bench.figures(it)
        cells = [
            figures[name].text(".3f" if name.endswith("_ms") else ".0f" if name == "json_per_s" else ".1f")
            for name in COLUMNS
        ]
        print(f"| {it.name} | {' | '.join(cells)} | {bench.held(it)} | {it.rss_mb:.0f} |")
    print("\nlonger end to end than direct, by the number of streams at 50 tokens/s each:")
    for it in bench.contenders:
        print(f"{it.name:24}" + "; ".join(f"{n}: {bench.longer(it, n).text('+.1%')}" for n in bench.tried(it)))
    print("\ndirect, and how busy load and stub kept their core (the most of any contender):")
    for measure in dict.fromkeys(measure for _, measure in bench.samples):
        direct = bench.samples["direct", measure]
        most = max(bench.shares(it.name, measure)[1] for it in bench.contenders if (it.name, measure) in bench.samples)
        p50, p99 = figure_of([it.p50_ms for it in direct]), figure_of([it.p99_ms for it in direct])
        print(
            f"{measure:24}p50 {p50.median:.3f} ms, p99 {p99.median:.3f} ms; load"
            f" {bench.shares('direct', measure)[0]:.0%}; both {most:.0%}"
        )
    print()
    for it in (bench.stub, *bench.contenders):
        print(f"{it.name:24}{it.asked} requests, {it.failed} failed; {it.told}")
    ours, others = bench.disturbed
    print(
        f"{lines} lines in the gateway's request log; others took {ours:.1%} of the contender's core and {others:.1%}"
        " of the other"
    )
    if max(bench.disturbed) > QUIET:
        print(f"NOT QUIET: more than {QUIET:.0%}, so these figures are worth little")


def _as_json(bench: Bench, lines: int, wrong: list[str]) -> dict[str, object]:
    """The same for programs."""
    told = {
        it.name: {
            "told": it.told,
            "requests": it.asked,
            "failed": it.failed,
            "rss_mb": it.rss_mb,
            "streams_held": bench.held(it),
            "longer": {n: asdict(bench.longer(it, n)) for n in bench.tried(it)},
            "figures": {name: asdict(figure) for name, figure in bench.figures(it).items()},
        }
        for it in bench.contenders
    }
    samples = [
        {"contender": name, "measure": measure, "rounds": [asdict(it) for it in of]}
        for (name, measure), of in bench.samples.items()
    ]
    return {"contenders": told, "samples": samples, "log_lines": lines, "disturbed": bench.disturbed, "missed": wrong}


@contextlib.contextmanager
def _gateway(folder: Path, upstream: str, core: int, **more: object) -> Iterator[Contender]:
    """Ours, with everything on, and limits that nobody here meets. more: of its configuration."""
    port, (key, hashed) = free_port(), make_key("bench")
    limits = {"max_running": 4000, "max_in_flight": 8000, "max_prompt_tokens": 16000, "max_output_tokens": 2000}
    teams = {
        "teams": {
            "bench": {"keys": [hashed], "band": "demo", "models": ["tiny"], **limits},
            "other": {"keys": [make_key("other")[1]]},
        },
        "capacity": {"slots": 4096, "tokens": 4096 * 2048, "queue_tokens": 4096 * 2048},
        "models": {"tiny": {"max_model_len": 32768, "upstreams": ["one", "two"]}},
        "upstreams": {
            "one": {"url": upstream, "weight": 95, "max_prompt_tokens": 32768},
            "two": {"url": upstream, "weight": 5, "variant": "canary"},
        },
    }
    (folder / "teams.yaml").write_text(yaml.safe_dump(teams))
    config = {"upstream": upstream, "listen": f"127.0.0.1:{port}", "metrics_listen": f"127.0.0.1:{free_port()}"}
    config |= more
    (folder / "gateway.yaml").write_text(yaml.safe_dump(config))
    told = f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {metadata.version(name)}" for name in ("aiohttp", "uvloop", "msgspec")
    )
    with running(
        [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", folder / "gateway.yaml"],
        port,
        core,
        {"PYTHONPATH": str(ROOT)},
    ) as process:
        yield Contender("vllm-watch gateway", told, port, process, key)


@contextlib.contextmanager
def _floor(upstream: str, core: int) -> Iterator[Contender]:
    port = free_port()
    with running(module("bench_gateway_peers", "aiohttp", port, upstream), port, core) as process:
        yield Contender("bare aiohttp (floor)", "the same libraries", port, process)


@contextlib.contextmanager
def _httpx(python: Path, folder: Path, upstream: str, core: int) -> Iterator[Contender]:
    port = free_port()
    with running(module("bench_gateway_peers", "httpx", port, upstream, python=python), port, core) as process:
        yield Contender("Starlette + httpx", _versions(python, "starlette", "uvicorn", "httpx"), port, process)


@contextlib.contextmanager
def _litellm(python: Path, folder: Path, upstream: str, core: int) -> Iterator[Contender]:
    """LiteLLM with one worker and one key, no database, no callbacks."""
    port, key = free_port(), "sk-bench"
    model = {
        "model_name": "tiny",
        "litellm_params": {"model": "openai/tiny", "api_base": f"{upstream}/v1", "api_key": "unused"},
    }
    (folder / "litellm.yaml").write_text(
        yaml.safe_dump({"model_list": [model], "general_settings": {"master_key": key}})
    )
    command = [
        python.with_name("litellm"),
        "--config",
        folder / "litellm.yaml",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--num_workers",
        1,
    ]
    env = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with running([*command, "--telemetry", "False"], port, core, env) as process:
        yield Contender("LiteLLM proxy", _versions(python, "litellm"), port, process, key, exact=False)


def module(file: str, *arguments: object, python: Path = Path(sys.executable)) -> list[object]:
    return [python, ROOT / f"tests/bench/{file}.py", *arguments]


def environment(peer: str, requirements: Sequence[str] = ()) -> Path:
    """Return the Python that has this peer; made once for each set of requirements."""
    requirements = requirements or PEERS[peer]
    mark = hashlib.sha256(" ".join((*requirements, sys.version)).encode()).hexdigest()[:12]
    folder = cache_dir() / f"bench-peer-{mark}"
    if not (folder / "done").exists():
        print(f"installing {' '.join(requirements)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin/pip", "install", "-qq", "--disable-pip-version-check"]
        if subprocess.run([*pip, *requirements], env=ALONE, check=False).returncode:  # type: ignore[list-item]
            raise SystemExit(
                f"{' '.join(requirements)} cannot be installed; the lines above say why. Without {peer} it is left out"
            )
        (folder / "done").touch()
    return folder / "bin/python"


def _versions(python: Path, *names: str) -> str:
    code = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    return subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True).stdout.strip()


def processor() -> str:
    named = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
