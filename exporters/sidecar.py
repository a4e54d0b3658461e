"""The sidecar: request logs, engines and GPUs read side by side, joined on one page.

Law: one dead source never empties the page. Each source is guarded: what it last said stays, with its age and its errors beside it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
from aiohttp import web

from exporters import engine, events, exposition, gpu, otlp
from exporters.catalogue import ours, page
from exporters.exposition import Sample
from exporters.request_log import BadLine, RequestRecord, ended_at, parse_line
from exporters.tail import Tail
from exporters.traffic import BoundedNames, Traffic

TOLD_AT_MOST = 50
FIRST_GPU_READING_S = 10.0
LOG_INTERVAL_S = 0.1  # how long a line waits at most before it is looked for

log = logging.getLogger("vllm_watch.sidecar")


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM server. url: scheme, host and port, without /metrics."""

    name: str
    url: str

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or self.url.rstrip("/").endswith("/metrics"):
            raise ValueError(f"url {self.url!r} should be like http://127.0.0.1:8000, without /metrics")


class Teams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Teams that always have series of their own, and how many in all; those beyond are counted as __other__."""

    configured: tuple[str, ...] = ()
    limit: int = 50


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a GPU hour costs, and what a thousand tokens may cost, in one currency; without a budget nobody is told when it is passed."""

    gpu_hour: float
    budget_per_1k_tokens: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        if self.gpu_hour <= 0 or (self.budget_per_1k_tokens is not None and self.budget_per_1k_tokens <= 0):
            raise ValueError("prices are more than 0; leave `prices` out where there are none")


class SidecarConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to read, how often, where to serve. Times in seconds."""

    listen: str = "127.0.0.1:9401"
    requests_log: tuple[str, ...] = ()
    field_names: Mapping[str, str] = {}  # their name -> ours, for logs of other gateways
    engines: tuple[Engine, ...] = ()
    teams: Teams = Teams()
    models_limit: int = 50
    gpu: Literal["auto", "off"] = "auto"
    prices: Prices | None = None
    otlp: otlp.Otlp | None = None  # without it no spans
    events: str | None = None
    engine_interval_s: float = 5.0
    gpu_interval_s: float = 1.0
    timeout_s: float = 4.0

    def __post_init__(self) -> None:
        split_address(self.listen)
        if len({e.name for e in self.engines}) != len(self.engines):
            raise ValueError("engines need different names")
        unknown = set(self.field_names.values()) - set(RequestRecord.__struct_fields__)
        for name, listed in (("requests_log", self.requests_log), ("engines", tuple(e.url.rstrip("/") for e in self.engines))):
            if len(set(listed)) != len(listed):
                raise ValueError(f"{name} names one thing twice; it would be counted twice")
        if unknown:
            raise ValueError(f"field_names leads to {sorted(unknown)[0]!r}, which no request record has")
        if min(self.engine_interval_s, self.gpu_interval_s, self.timeout_s) <= 0:
            raise ValueError("intervals and timeouts are more than 0 seconds")


def split_address(address: str) -> tuple[str, int]:
    """'127.0.0.1:9401' or '[::1]:9401' as host and port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError(f"listen {address!r} is no address; write host:port, such as 127.0.0.1:9401")
    return host.strip("[]"), int(port)


@dataclass(slots=True)
class Source:
    """How one source is doing. Times are unix seconds."""

    kind: str
    name: str
    up: bool = False
    tried: bool = False
    last_success_s: float | None = None
    duration_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Run one reading; whatever goes wrong is counted by reason and told once, when the source goes down, and never spreads."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:  # the one place that must survive every failure of a source
            self.errors[reason(error)] += 1
            if self.up or not self.tried:
                log.warning("%s %s is down: %s", self.kind, self.name, error or type(error).__name__)
            self.up = False
        else:
            if self.tried and not self.up:
                log.info("%s %s is back", self.kind, self.name)
            self.up, self.last_success_s = True, time.time()
        finally:
            self.tried = True
            self.duration_s = time.perf_counter() - began

    def samples(self, now_s: float) -> Iterator[Sample]:
        labels = {"kind": self.kind, "source": self.name}
        yield ours.SOURCE_UP, labels, float(self.up)
        yield ours.SOURCE_DURATION, labels, self.duration_s
        if self.last_success_s is not None:
            yield ours.SOURCE_LAST_SUCCESS, labels, self.last_success_s
            yield ours.SOURCE_AGE, labels, max(0.0, now_s - self.last_success_s)
        known = sorted({*REASONS[self.kind], *self.errors})
        yield from ((ours.SOURCE_ERRORS, {**labels, "reason": why}, self.errors[why]) for why in known)


# Why a reading of each kind of source fails. All are shown at 0 from the start: growth needs a sample before the first failure.
REASONS: Mapping[str, tuple[str, ...]] = {
    "log": ("os", "other", "permission"),
    "engine": ("bad_page", "http_4xx", "http_5xx", "other", "timeout", "unreachable"),
    "gpu": (*gpu.REASONS, "other"),
    "events": ("os", "other", "permission", "timeout"),
}


def reason(error: BaseException) -> str:
    """A failure as one of a few words, fit for a label."""
    told = getattr(error, "reason", None)
    match error:
        case gpu.GpuUnavailable() if isinstance(told, str):
            return told
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientResponseError():
            return f"http_{error.status // 100}xx"
        case aiohttp.ClientConnectionError() | ConnectionError():
            return "unreachable"
        case page.BadPage():
            return "bad_page"
        case PermissionError():
            return "permission"
        case OSError():
            return "os"
        case _:
            return "other"


@dataclass(slots=True)
class Logs:
    """All request logs of this sidecar and what was counted from them."""

    tails: list[Tail]
    traffic: Traffic
    names: Mapping[str, str]
    spans: otlp.Spans | None = None
    lines: int = 0
    untimed: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    lag_s: dict[str, float] = field(default_factory=dict)
    caught_up: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)

    def poll(self, tail: Tail, now_s: float, clock_s: float) -> int:
        """Read and count what is new in one log; how many lines that were. now_s: unix seconds, clock_s: monotonic."""
        long_before = tail.long_lines
        lines = tail.poll(clock_s)
        for line in lines:
            self._count(tail, line, now_s)
        self.bad["long"] += tail.long_lines - long_before
        if not lines:
            self.caught_up.add(str(tail.path))
        return len(lines)

    def _count(self, tail: Tail, line: bytes, now_s: float) -> None:
        try:
            record = parse_line(line, self.names)
        except BadLine as error:
            self.bad[error.reason] += 1
            if str(error) not in self.told and len(self.told) < TOLD_AT_MOST:  # each fault once; never the line, which may hold a prompt
                self.told.add(str(error))
                log.warning("%s: a line of %d bytes is no request record (%s): %s", tail.path, len(line), error.reason, error)
            return
        self.lines += 1
        self.traffic.add(record)
        if self.spans:
            self.spans.add(record)
        ended = ended_at(record)
        self.untimed += ended is None
        self.lag_s[str(tail.path)] = max(0.0, now_s - (now_s if ended is None else ended))

    def samples(self) -> Iterator[Sample]:
        """Counts are shown once every log has been read to its end: a scrape in the middle would take what follows for new traffic."""
        for tail in self.tails:
            labels = {"path": str(tail.path)}
            yield ours.LOG_BYTES_BEHIND, labels, tail.unread_bytes()
            yield ours.LOG_ROTATIONS, labels, tail.rotations
            if (lag := self.lag_s.get(str(tail.path))) is not None:
                yield ours.LOG_LAG, labels, lag
        if len(self.caught_up) < len(self.tails):
            return
        yield from self.traffic.samples()
        yield ours.LOG_LINES, {}, self.lines
        yield ours.LOG_UNTIMED, {}, self.untimed
        yield from ((ours.LOG_BAD_LINES, {"reason": why}, self.bad[why]) for why in ("json", "type", "range", "size", "long"))


class Sidecar:
    """Reads every source on its own beat and answers for all of them. GPU readings older than three beats and a deadline are not shown."""

    def __init__(self, config: SidecarConfig, version: str = "0") -> None:
        self.config = config
        self.version = version
        self.started_s = time.time()
        traffic = Traffic(BoundedNames(config.teams.configured, config.teams.limit), BoundedNames((), config.models_limit))
        self.spans = otlp.Spans(config.otlp, version, since_s=self.started_s) if config.otlp else None
        self.logs = Logs([Tail(Path(p)) for p in config.requests_log], traffic, config.field_names, self.spans)
        self.histories = {e.name: engine.History(e.name) for e in config.engines}
        self.sources: list[Source] = []
        self._gpus: list[gpu.GpuReading] = []
        self._gpu_source: Source | None = None
        self._events: list[events.TuningEvent] = []
        self._unwritten: deque[events.TuningEvent] = deque(maxlen=1000)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._session = aiohttp.ClientSession()
        if not self.logs.tails and not self.config.engines:
            log.warning("neither requests_log nor engines are configured: there is little to show")
        if self.spans:
            self.spans.start()
        for tail in self.logs.tails:
            self._follow(Source("log", str(tail.path)), functools.partial(self._read_log, tail), LOG_INTERVAL_S)
        for target in self.config.engines:
            self._follow(Source("engine", target.name), functools.partial(self._read_engine, target), self.config.engine_interval_s)
        if self.config.gpu == "auto":
            self._gpu_source = Source("gpu", "gpu")
            self._gpu_reader = gpu.GpuSource(energy_gap_s=max(30.0, 3 * self.config.gpu_interval_s))
            self._follow(self._gpu_source, self._read_gpu, self.config.gpu_interval_s)
        if self.config.events:
            self._follow(Source("events", self.config.events), self._read_events, 2.0)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._gpu_source:
            await self._gpu_reader.close()
        await self._session.close()
        for tail in self.logs.tails:
            tail.close()
        if self.spans:
            await asyncio.to_thread(self.spans.stop)

    @property
    def ready(self) -> bool:
        """Every source was tried once; whether it answered is told by its own series."""
        return all(source.tried for source in self.sources)

    def page(self) -> str:
        return exposition.render(self.samples(time.time()))

    def samples(self, now_s: float) -> Iterator[Sample]:
        yield ours.SIDECAR_INFO, {"version": self.version}, 1
        yield ours.SIDECAR_START, {}, self.started_s
        for source in self.sources:
            yield from source.samples(now_s)
        yield from self.logs.samples()
        for history in self.histories.values():
            yield from history.samples()
        yield from events.samples(self._events)
        if self.spans:
            yield from self.spans.samples()
        last = self._gpu_source.last_success_s if self._gpu_source else None
        if last is not None and now_s - last <= 3 * self.config.gpu_interval_s + self.config.timeout_s / 2:
            yield from gpu.families(self._gpus)
            if prices := self.config.prices:
                yield ours.GPU_COST, {"currency": prices.currency}, len(self._gpus) * prices.gpu_hour
        if (prices := self.config.prices) and prices.budget_per_1k_tokens is not None:
            yield ours.COST_BUDGET, {"currency": prices.currency}, prices.budget_per_1k_tokens

    def _follow(self, source: Source, read: Callable[[], Awaitable[None]], every_s: float) -> None:
        self.sources.append(source)

        async def loop() -> None:
            while True:
                async with source.guard():
                    await read()
                await asyncio.sleep(every_s)

        self._tasks.append(asyncio.create_task(loop(), name=f"{source.kind} {source.name}"))

    async def _read_log(self, tail: Tail) -> None:
        while self.logs.poll(tail, time.time(), time.monotonic()):
            await asyncio.sleep(0)  # a long backlog must not keep a scrape waiting
        if not tail.path.exists() and not tail.unread_bytes():
            raise FileNotFoundError(f"{tail.path} is not there (yet)")

    async def _read_engine(self, target: Engine) -> None:
        text, version = await engine.read(self._session, target.url.rstrip("/"), self.config.timeout_s)
        view = await asyncio.to_thread(engine.parse, text, version)
        for event in self.histories[target.name].observe(view, time.time()):
            log.info("%s", event.what)
            if self.config.events:
                self._unwritten.append(event)

    async def _read_gpu(self) -> None:
        # A reading after none may have to load the driver, which takes seconds without persistence mode; this source is down meanwhile.
        first = self._gpu_source is not None and not self._gpu_source.up
        self._gpus = await self._gpu_reader.read(FIRST_GPU_READING_S if first else self.config.timeout_s / 2)

    async def _read_events(self) -> None:
        """Write what happened, then read what everyone wrote. A full disk is this source's failure, and the events wait for it to end."""
        path = Path(self.config.events or "")
        while self._unwritten:
            await asyncio.to_thread(events.append, path, self._unwritten[0])
            self._unwritten.popleft()
        self._events, _ = await asyncio.to_thread(events.read, path)


def application(sidecar: Sidecar) -> web.Application:
    """/metrics, /-/healthy (the process answers) and /-/ready (every source was tried)."""

    async def metrics(request: web.Request) -> web.Response:
        page, content_type = exposition.answer(sidecar.samples(time.time()), request.headers.get("Accept", ""))
        return web.Response(body=page.encode(), headers={"Content-Type": content_type})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if sidecar.ready else web.Response(status=503, text="not every source was read yet\n")

    async def start(_: web.Application) -> None:
        await sidecar.start()

    async def stop(_: web.Application) -> None:
        await sidecar.stop()

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/-/healthy", healthy), web.get("/-/ready", ready)])
    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    return app


async def serve(config: SidecarConfig, version: str, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises OSError when the address is taken."""
    runner = web.AppRunner(application(Sidecar(config, version)), access_log=None)
    host, port = split_address(config.listen)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        log.info("serving http://%s:%s/metrics", host, port)
        await stop.wait()
    finally:
        await runner.cleanup()
