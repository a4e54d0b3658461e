"""Health of engines: periodic probes, and failures that the data path observed.

Invariant: nothing that an engine sends, or does not send, ends the watching, and no more than PAGE_BYTES of it are
kept. A
slow gateway is no slow engine: a sample bears the time when its answer was read, and a probe counts for nothing if this
process itself woke up too late to wait for the answer."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp

from exporters.engine.client import EngineClient
from stack.gateway.load_signals import API, ENGINE, Health, Sample, read
from stack.gateway.policy import Upstream

EVERY_S = 1.0  # figures while there are requests, and the probe of an engine that is down
IDLE_S = 5.0  # figures while there are none, and the probe of an engine that is up
TIMEOUT_S = 2.0  # of 0.32 on two busy cores, a page took 0.9 s at most but for one of 3.5 s
LATE_S = 0.25
PAGE_BYTES = 4 << 20  # the longest pages seen have 65 kB; many adapters and ranks make some MB

_log = logging.getLogger("gateway.watch")


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
    probe_due: float = -math.inf
    read_due: float = -math.inf
    task: asyncio.Task[None] | None = None


class HealthMonitor:
    """Watches upstreams from `follow` to `stop`. tell: hears of each upstream when it is known to be up or down, and of
    every change.

    busy: whether the gateway has any requests, running or waiting. Engines are probed and read; a service of kind api
    is never asked anything, only `failed` and `worked` say how it is."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        tell: Callable[[str, bool], None],
        busy: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._tell = tell
        self._busy = busy
        self._clock = clock
        self._sleep = sleep
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
                    it.task = asyncio.create_task(self._run(it), name=f"watch {name}")
                    self._tasks.add(it.task)
                    it.task.add_done_callback(self._tasks.discard)
            self._watched[name] = it
        for it in former.values():
            if it.task is not None and it is not self._watched.get(it.name):
                it.task.cancel()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def healthy(self, name: str) -> bool:
        """Return whether an upstream is worth asking; one that is not known is."""
        it = self._watched.get(name)
        return it is None or it.health.open(self._clock())

    def latest(self, name: str) -> Sample | None:
        """The last figures of an engine, however old."""
        it = self._watched.get(name)
        return None if it is None else it.sample

    def samples(self) -> dict[str, Sample]:
        """The last figures of every engine that has given any, as `Slots.after` takes them."""
        return {name: it.sample for name, it in self._watched.items() if it.sample is not None}

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
        if now >= it.read_due or self._busy():
            it.read_due = now + IDLE_S
            due.append(self._read(it))
        await asyncio.gather(*due)

    async def _probe(self, it: _Watched) -> None:
        began = self._clock()
        try:
            status = await self._client(it).health()
        except TimeoutError:
            if self._clock() - began <= self._timeout_s + LATE_S:
                self._went_wrong(it, f"/health does not answer in {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self._went_wrong(it, f"/health: {error or type(error).__name__}", for_sure=_refused(error))
        else:
            if status == 200:
                self._went_well(it)
            else:
                self._went_wrong(it, f"/health answers {status}")

    async def _read(self, it: _Watched) -> None:
        why = "it shows no figures of vLLM"
        try:
            sample = await self._sample(it)
        except TimeoutError:
            sample, why = None, f"no answer in {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            sample, why = None, str(error) or type(error).__name__
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
        return read(await self._client(it).metrics(PAGE_BYTES), self._clock())

    def _client(self, it: _Watched) -> EngineClient:
        options = {"headers": {"Accept-Encoding": "identity", **it.headers}, "allow_redirects": False}
        return EngineClient(self._session, it.upstream.url.rstrip("/"), self._timeout_s, options=options)

    def _went_well(self, it: _Watched) -> None:
        it.health = it.health.worked()
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


def _refused(error: BaseException) -> bool:
    """Nobody listens there: the process is gone, however busy the machine is."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED
