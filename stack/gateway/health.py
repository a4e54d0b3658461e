"""Health of engines: periodic probes, and failures that the data path observed.

Invariant: nothing that an engine sends, or does not send, ends the watching, and no more than PAGE_BYTES of it are
kept. A
slow gateway is no slow engine: a sample bears the time when its answer was read, and a probe counts for nothing if this
process itself woke up too late to wait for the answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from exporters.engine.client import EngineClient, is_refused
from exporters.engine.liveness import DEFAULT_LIMITS, Endpoint, EngineState, Liveness, LivenessLimits, StepValues
from exporters.engine.page_values import step_values
from stack.gateway.engine_liveness import EngineAttempt, EngineLiveness
from stack.gateway.evidence_hook import report, run_hook
from stack.gateway.load_signals import API, ENGINE, Health, Sample, read
from stack.gateway.policy import Upstream

EVERY_S = 1.0  # figures while there are requests, and the probe of an engine that is down
IDLE_S = 5.0  # figures while there are none, and the probe of an engine that is up
TIMEOUT_S = 2.0  # of 0.32 on two busy cores, a page took 0.9 s at most but for one of 3.5 s
LATE_S = 0.25
GAP_S = EVERY_S + 1.0  # two looks further apart: this process was late, and has seen no silence
_ASKED = (EngineState.SUSPECT, EngineState.HUNG, EngineState.DRAINING)  # whether they are paused
PAGE_BYTES = 4 << 20  # the longest pages seen have 65 kB; many adapters and ranks make some MB

LONG_PAGE = 256 << 10  # 4 MiB take 20 ms to look through, and longer pages than this are looked through in a thread
OLD_S = 3 * IDLE_S  # a page older than this says nothing of now

_log = logging.getLogger("gateway.watch")


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The /metrics of an engine, as it was read last."""

    text: bytes
    content_type: str
    at: float


@dataclass(slots=True, eq=False)
class _Watched:
    """One upstream and what is known of it.

    reported: the last state passed to `tell`. readable: whether its metrics could be read the last time."""

    name: str
    upstream: Upstream
    headers: Mapping[str, str]
    health: Health
    reported: bool | None = None
    readable: bool = True
    sample: Sample | None = None
    page: MetricsPage | None = None
    engine: EngineLiveness | None = None
    probe_due: float = -math.inf
    read_due: float = -math.inf
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def in_rotation(self, now: float) -> bool:
        return self.health.open(now) and (self.engine is None or self.engine.liveness.in_rotation)


class HealthMonitor:
    """Watches upstreams from `follow` to `stop`. tell: hears of each upstream when it is known to be up or down, and of
    every change.

    busy: whether the gateway has any requests, running or waiting. Engines are probed and read; a service of kind api
    is never asked anything, only `failed` and `worked` say how it is. send_probe: sends an engine a completion of one
    token, as Prober.send does; without it no engine is probed. limits: of the liveness of engines. on_hung: command
    of the operator for an engine that hangs."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        tell: Callable[[str, bool], None],
        busy: Callable[[], bool],
        *,
        send_probe: Callable[[str, Upstream, Mapping[str, str]], Awaitable[bool | None]] | None = None,
        limits: LivenessLimits = DEFAULT_LIMITS,
        on_hung: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._tell = tell
        self._busy = busy
        self._clock = clock
        self._sleep = sleep
        self._send_probe = send_probe
        self._limits = limits
        self._on_hung = on_hung
        self._timeout_s = TIMEOUT_S
        self._watched: dict[str, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, upstreams: Mapping[str, Upstream], headers: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """Watches these from now on. What is known of one stays while it is the same place. headers: those that only
        this upstream gets, by name."""
        former, self._watched = self._watched, {}
        for name, upstream in upstreams.items():
            own = (headers or {}).get(name, {})
            it = former.get(name)
            if it is None or (it.upstream.url, it.upstream.kind, it.headers) != (upstream.url, upstream.kind, own):
                it = _Watched(name, upstream, own, ENGINE if upstream.kind == "engine" else API)
                if upstream.kind == "engine":
                    now = self._clock()
                    it.engine = EngineLiveness(
                        Liveness.unknown(now), self._limits, probes=self._send_probe is not None, last_probe=now
                    )
                    it.tasks = [
                        self._start(self._run(it), f"watch {name}"),
                        self._start(self._assess(it, it.engine), f"assess {name}"),
                    ]
            self._watched[name] = it
        for it in former.values():
            if it is not self._watched.get(it.name):
                for task in it.tasks:
                    task.cancel()

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def healthy(self, name: str) -> bool:
        """Return whether an upstream is worth asking; one that is not known is."""
        it = self._watched.get(name)
        return it is None or it.in_rotation(self._clock())

    def liveness(self) -> dict[str, Liveness]:
        """Return the liveness of every engine."""
        return {name: it.engine.liveness for name, it in self._watched.items() if it.engine is not None}

    def began(self, name: str, attempt: EngineAttempt) -> None:
        """Note an attempt at an upstream."""
        if (it := self._watched.get(name)) is not None and it.engine is not None:
            it.engine.attempts.add(attempt)

    def ended(self, name: str, attempt: EngineAttempt, *, answered: bool) -> None:
        """Note its end. answered: by a complete reply."""
        if (it := self._watched.get(name)) is not None and it.engine is not None:
            it.engine.ended(attempt, answered=answered)

    def step_s(self, name: str) -> float:
        """Return the seconds since an engine's own counters were seen to move; infinity where they never were."""
        it = self._watched.get(name)
        return math.inf if it is None or it.engine is None else self._clock() - it.engine.stepped_at

    def latest(self, name: str) -> Sample | None:
        """The last figures of an engine, however old."""
        it = self._watched.get(name)
        return None if it is None else it.sample

    def samples(self) -> dict[str, Sample]:
        """The last figures of every engine that has given any, as `Slots.after` takes them."""
        return {name: it.sample for name, it in self._watched.items() if it.sample is not None}

    def page(self) -> MetricsPage | None:
        """Return the /metrics of the first engine in rotation that has been read lately; None where there is none."""
        now = self._clock()
        pages = (it.page for it in self._watched.values() if it.page is not None and it.in_rotation(now))
        return next((page for page in pages if now - page.at <= OLD_S), None)

    def any_in_rotation(self) -> bool:
        now = self._clock()
        return any(it.in_rotation(now) for it in self._watched.values())

    def worked(self, name: str) -> None:
        """The data path got an answer from it, and not one that says that it is broken."""
        if (it := self._watched.get(name)) is not None:
            self._went_well(it)

    def failed(self, name: str) -> None:
        """The data path could not connect to it. Of an engine that is enough: the next good probe brings it back."""
        if (it := self._watched.get(name)) is not None:
            self._went_wrong(it, "no connection", for_sure=it.upstream.kind == "engine")

    async def _run(self, it: _Watched) -> None:
        while True:
            try:
                await self._look(it)
            except Exception:
                _log.exception("watching %s failed inside the gateway; it goes on", it.name)
            await self._sleep(EVERY_S)

    async def _look(self, it: _Watched) -> None:
        """Whatever is due, side by side: an engine that is slow to give its figures may be well."""
        now, due = self._clock(), []
        if now >= it.probe_due or not it.health.open(now):
            it.probe_due = now + IDLE_S
            due.append(self._probe(it))
        watched = it.engine is not None and it.engine.liveness.state is not EngineState.IDLE
        if now >= it.read_due or watched or self._busy():
            it.read_due = now + IDLE_S
            due.append(self._read(it))
        if it.engine is not None and it.engine.liveness.state in _ASKED:
            due.append(self._ask_whether_paused(it, it.engine))
        await asyncio.gather(*due)

    async def _ask_whether_paused(self, it: _Watched, engine: EngineLiveness) -> None:
        paused = await self._client(it).paused()
        engine.paused = paused and engine.liveness.state in _ASKED

    async def _assess(self, it: _Watched, engine: EngineLiveness) -> None:
        """Assess an engine once a second, however long its answers take; until cancelled."""
        while True:
            await self._sleep(EVERY_S)
            try:
                self._assess_once(it, engine)
            except Exception:
                _log.exception("assessing %s failed inside the gateway; it goes on", it.name)

    def _assess_once(self, it: _Watched, engine: EngineLiveness) -> None:
        now = self._clock()
        before, after = engine.assess(now), engine.liveness
        if after.state not in _ASKED:  # it went on, and is asked no more
            engine.paused = False
        if before.live and not after.live:
            why = f"no progress for {after.quiet_s():.0f} s ({after.cause})"
            _log.error("%s at %s is hung: %s", it.name, it.upstream.url, why)
            if self._on_hung:
                self._start(run_hook(self._on_hung, report(it.name, it.upstream.url, engine)), f"hook {it.name}")
        if before.in_rotation != after.in_rotation:
            self._say(it, it.in_rotation(now), f"{after.state} ({after.cause})")
        if after.state is EngineState.LOADING:  # another process may serve something else
            engine.probes = self._send_probe is not None
        if self._send_probe is not None and engine.wants_probe(now):
            engine.probe_since = engine.last_probe = now
            it.tasks = [task for task in it.tasks if not task.done()]
            it.tasks.append(self._start(self._ask_for_a_token(it, engine), f"probe {it.name}"))

    async def _ask_for_a_token(self, it: _Watched, engine: EngineLiveness) -> None:
        answer: bool | None = False
        try:
            answer = await self._send_probe(it.name, it.upstream, it.headers) if self._send_probe else None
        except Exception:
            _log.exception("the probe of %s failed inside the gateway", it.name)
        finally:
            engine.probe_since = None
        if answer is None and engine.probes:
            engine.probes = False
            _log.warning("%s takes no completion of one token: its liveness is known without probes", it.name)
        engine.probe_answers += bool(answer)

    async def _probe(self, it: _Watched) -> None:
        began = self._clock()
        try:
            status = await self._client(it).health()
        except TimeoutError:
            busy = it.engine is not None and it.engine.busy(self._clock())
            if not busy and self._clock() - began <= self._timeout_s + LATE_S:
                self._went_wrong(it, f"/health does not answer in {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self._went_wrong(it, f"/health: {error or type(error).__name__}", for_sure=is_refused(error))
        else:
            if status == 200:
                self._went_well(it)
            else:
                self._went_wrong(it, f"/health answers {status}")

    async def _read(self, it: _Watched) -> None:
        why, began = "it shows no figures of vLLM", self._clock()
        try:
            sample = await self._sample(it)
        except TimeoutError:
            sample, why = None, f"no answer in {self._timeout_s:g} s"
            it.probe_due = -math.inf  # /metrics alone may be slow: an API server that hangs does not answer /health
            silent = Endpoint.SILENT if it.health.failures else Endpoint.UNREAD
            self._scraped(it, silent, late=self._clock() - began > self._timeout_s + LATE_S)
        except (aiohttp.ClientError, OSError) as error:
            sample, why = None, str(error) or type(error).__name__
            self._scraped(it, await self._client(it).endpoint(error))
        if sample is not None:
            it.sample = sample
        if it.readable and sample is None:
            _log.warning(
                "%s: %s/metrics cannot be read: %s; capacity.slots holds without it", it.name, it.upstream.url, why
            )
        elif not it.readable and sample is not None:
            _log.info("%s: %s/metrics can be read again", it.name, it.upstream.url)
        it.readable = sample is not None

    async def _sample(self, it: _Watched) -> Sample | None:
        """The engine's figures now. Raises aiohttp.ClientError, OSError and TimeoutError."""
        text, content_type = await self._client(it).metrics_page(PAGE_BYTES)
        now = self._clock()
        it.page = MetricsPage(text, content_type, now)
        steps, sample = _figures(text, now) if len(text) <= LONG_PAGE else await asyncio.to_thread(_figures, text, now)
        self._scraped(it, Endpoint.UNREAD if steps is None else Endpoint.READ, steps)
        return sample

    def _scraped(
        self, it: _Watched, endpoint: Endpoint, steps: StepValues | None = None, *, late: bool = False
    ) -> None:
        if it.engine is not None:
            it.engine.late |= late
            if not late:
                it.engine.scraped(endpoint, self._clock(), steps)

    def _client(self, it: _Watched) -> EngineClient:
        options = {"headers": {"Accept-Encoding": "identity", **it.headers}, "allow_redirects": False}
        return EngineClient(self._session, it.upstream.url.rstrip("/"), self._timeout_s, options=options)

    def _went_well(self, it: _Watched) -> None:
        it.health = it.health.worked()
        if it.in_rotation(self._clock()):
            self._say(it, True, "it answers")

    def _went_wrong(self, it: _Watched, why: str, *, for_sure: bool = False) -> None:
        now = self._clock()
        it.health = it.health.failed(now, for_sure=for_sure)
        if not it.health.open(now):
            self._say(it, False, why)

    def _say(self, it: _Watched, up: bool, why: str) -> None:
        if it.reported is up:
            return
        first, it.reported = it.reported is None, up
        if not (up and first):
            _log.log(
                logging.INFO if up else logging.WARNING,
                "%s at %s is %s: %s",
                it.name,
                it.upstream.url,
                "up" if up else "down",
                why,
            )
        self._tell(it.name, up)


def _figures(page: bytes, at: float) -> tuple[StepValues | None, Sample | None]:
    return step_values(page), read(page, at)
