"""Sidecar: reads request logs, engines and GPUs, and exposes them joined.

Invariant: a failing source never empties the exposition. Its last data stays, with its age and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import msgspec

from exporters import process, scrape
from exporters.accounting import peers
from exporters.accounting.fleet_log import FleetLog
from exporters.accounting.join import Joiner
from exporters.accounting.prices import Prices
from exporters.catalogue import exposition_parser
from exporters.catalogue import sidecar as sidecar_series
from exporters.engine import golden_state
from exporters.engine import view as engine_view
from exporters.engine.client import EngineClient
from exporters.engine.liveness import DEFAULT_LIMITS, Cause, Endpoint, EngineState, Evidence, Liveness
from exporters.engine.page_values import step_values
from exporters.engine.probe_endpoints import WatchedEngine
from exporters.events import log as events
from exporters.exposition import Sample
from exporters.gpu import readings as gpu
from exporters.gpu.series import families
from exporters.gpu.source import GpuSource
from exporters.ingest import LogIngest
from exporters.net.http_client import HttpClientConfig
from exporters.net.listener import new_rejections
from exporters.requests import grouped_latency
from exporters.requests.checkpoint import Checkpoint, Unreadable
from exporters.requests.duplicates import RecentRequests
from exporters.requests.grouped_latency import GroupedLatency
from exporters.requests.store import CounterStore
from exporters.requests.tail import Tail
from exporters.tracing.span_queue import SpanQueue

if TYPE_CHECKING:
    from exporters.tracing.genai_metrics import GenAiMetrics
from exporters.sidecar_config import EngineTarget, SidecarConfig, counting
from exporters.source_status import SourceStatus

FIRST_GPU_READING_S = 10.0
LOG_INTERVAL_S = 0.05  # maximum delay before a new line is read
COMMIT_S = 0.1  # commit interval while a backlog is read
RETRY_COMMIT_S = 1.0
SETTLE_S = 0.5  # interval of the reconciliation
PEERS_S = 1.0  # interval of reading other sidecars
GOLDEN_S = 5.0  # interval of reading results of golden checks

log = logging.getLogger("vllm_watch.sidecar")


def open_ledger(config: SidecarConfig) -> tuple[CounterStore, Checkpoint | None, Mapping[str, bytes]]:
    """Open the counters: the store with its last commit or empty, its checkpoint, and the stored provider states.

    Raises Locked if another sidecar uses the file, and OSError if it cannot be read: starting again would count
    twice."""

    def fresh(checkpoint: Checkpoint | None) -> CounterStore:
        return CounterStore(
            counting(config), RecentRequests(config.remember), checkpoint, fine=config.histogram_ladder == "fine"
        )

    if config.state is None:
        return fresh(None), None, {}
    checkpoint = Checkpoint(Path(config.state))
    ledger, stored = fresh(checkpoint), {}
    try:
        stored = ledger.restore(checkpoint.open())
        # a path that was relative before is the same log
        full = {
            path: whole if (whole := os.path.abspath(path)) in config.requests_log else path
            for path in ledger.positions
        }
        ledger.positions = {full[path]: at for path, at in ledger.positions.items()}
    except Unreadable as error:
        log.error("%s", error)
    except msgspec.MsgspecError as error:
        log.error("%s", checkpoint.put_aside(error))
        ledger = fresh(checkpoint)
    return ledger, checkpoint, stored


class Sidecar:
    """Sidecar process: reads every source in its own interval and serves the result.

    GPU readings older than three intervals plus a deadline are omitted."""

    def __init__(self, config: SidecarConfig, version: str = "0") -> None:
        self.config = config
        self.version = version
        self.started_s = time.time()
        self.ledger, self._checkpoint, stored = open_ledger(config)
        # Records before the start are history, unless a state has the positions of every log.
        followed = bool(config.requests_log) and all(path in self.ledger.positions for path in config.requests_log)
        since_s = 0.0 if followed else self.started_s
        self.spans = SpanQueue(config.otlp, version, since_s) if config.otlp else None
        self.genai_metrics = self._open_genai_metrics(since_s)
        tails = [
            Tail(Path(p), self.ledger.positions.get(p), rotated=config.rotated.get(p)) for p in config.requests_log
        ]
        self.fleet_log = self._open_fleet_log(stored)
        self.accounts = self._open_accounts(stored)
        grouped = self._open_grouped(stored)
        self.logs = LogIngest(tails, self.ledger, config.fields, self.accounts, grouped, self.spans, self.genai_metrics)
        self._ways = {
            e.name: HttpClientConfig(Path(e.http_config), f"engines.{e.name}.http_config")
            for e in config.engines
            if e.http_config
        }
        self._peer_ways = {
            peer.url: HttpClientConfig(Path(peer.http_config), "peers.http_config")
            for peer in config.peers
            if peer.http_config
        }
        self._peers_read: dict[str, tuple[float, bool]] = {}  # monotonic time, and whether all were at their logs' end
        self._readers = {e.name: exposition_parser.Parser() for e in config.engines}
        self.liveness = {e.name: Liveness.unknown(time.monotonic()) for e in config.engines}
        # two reads further apart than this were late
        self._limits = replace(DEFAULT_LIMITS, gap_s=2 * (config.engine_interval_s + config.timeout_s))
        self.histories = {e.name: engine_view.History(e.name) for e in config.engines}
        self.sources: list[SourceStatus] = []
        self._gpus: list[gpu.GpuReading] = []
        self._gpu_source: SourceStatus | None = None
        self._events: list[events.TuningEvent] = []
        self._golden: dict[str, tuple[golden_state.GoldenState, ...]] = {}
        self._unwritten: deque[events.TuningEvent] = deque(maxlen=1000)
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state_source: SourceStatus | None = None
        self._accounts_source = SourceStatus("accounts", "accounts", up=True, tried=True)
        self._unbooked: set[str] = set()
        self._writing: asyncio.Future[None] | None = None
        self._retry_s = 0.0
        self.rejected = new_rejections()

    def _open_genai_metrics(self, since_s: float) -> GenAiMetrics | None:
        if not (self.config.otlp and self.config.otlp.metrics):
            return None
        from exporters.tracing.genai_metrics import GenAiMetrics  # loads the metrics half of the SDK

        return GenAiMetrics(self.config.otlp, self.version, since_s, self.ledger.traffic.models)

    def _open_fleet_log(self, stored: Mapping[str, bytes]) -> FleetLog:
        try:
            fleet_log = FleetLog(self.ledger.traffic, stored.get("peers"))
        except msgspec.MsgspecError as error:
            log.error("the stored totals of peers are from another release (%s); they start again", error)
            fleet_log = FleetLog(self.ledger.traffic)
        self.ledger.keep([fleet_log.provider()])
        return fleet_log

    def _open_grouped(self, stored: Mapping[str, bytes]) -> GroupedLatency:
        try:
            grouped = GroupedLatency(stored.get(grouped_latency.NAME))
        except msgspec.MsgspecError as error:
            log.error("the stored latency by route and adapter is from another release (%s); it starts again", error)
            grouped = GroupedLatency()
        self.ledger.keep([grouped.provider()])
        return grouped

    def _open_accounts(self, stored: Mapping[str, bytes]) -> Joiner:
        config, prices = self.config, self.config.prices if isinstance(self.config.prices, Prices) else None
        about = (
            self.fleet_log,
            {target.name: target.claimed_gpus for target in config.engines},
            config.aliases,
            prices,
            config.patience_s,
        )
        roles = {target.name: target.role for target in config.engines if target.role}
        try:
            accounts = Joiner(*about, stored, roles)
        except msgspec.MsgspecError as error:
            log.error("the stored engine and GPU state is from another release (%s); it starts again", error)
            accounts = Joiner(*about, {}, roles)
        self.ledger.keep(accounts.state_providers())
        return accounts

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession()
        if not self.logs.tails and not self.config.engines:
            log.warning("neither requests_log nor engines are configured: few metrics are available")
        for telemetry in (self.spans, self.genai_metrics):
            if telemetry:
                telemetry.start()
        if self._checkpoint:
            self._state_source = SourceStatus("checkpoint", str(self._checkpoint.path))
            self.sources.append(self._state_source)
        log_sources = [SourceStatus("log", str(tail.path)) for tail in self.logs.tails]
        self.sources += log_sources
        self._tasks.append(asyncio.create_task(self._follow_logs(log_sources), name="logs"))
        for peer in self.config.peers:
            client = peers.PeerClient(self._session, peer.url, self.config.timeout_s, self._peer_ways.get(peer.url))
            self._follow(SourceStatus("peer", peer.url), functools.partial(self._read_peer, client), PEERS_S)
        for target in self.config.engines:
            self._follow(
                SourceStatus("engine", target.name),
                functools.partial(self._read_engine, target),
                self.config.engine_interval_s,
            )
        if self.config.gpu == "auto":
            self._gpu_source = SourceStatus("gpu", "gpu")
            self._gpu_reader = GpuSource(energy_gap_s=max(30.0, 3 * self.config.gpu_interval_s))
            self._follow(self._gpu_source, self._read_gpu, self.config.gpu_interval_s)
        if self.config.events:
            self._follow(SourceStatus("events", self.config.events), self._read_events, 2.0)
        for file in self.config.golden:
            self._follow(SourceStatus("golden", file), functools.partial(self._read_golden, file), GOLDEN_S)
        self.sources.append(self._accounts_source)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writing:  # runs in a thread that cannot be cancelled
            await asyncio.wait((self._writing,))
        # events since the last write; a repeated event keeps its id
        with contextlib.suppress(OSError):
            await self._write_events()
        if self._gpu_source:
            await self._gpu_reader.close()
        await self._session.close()
        for tail in self.logs.tails:
            tail.close()
        if self._checkpoint:
            self._checkpoint.close()
        await asyncio.gather(
            *(asyncio.to_thread(telemetry.stop) for telemetry in (self.spans, self.genai_metrics) if telemetry)
        )

    @property
    def ready(self) -> bool:
        """True once every source was read or failed; its own series report which."""
        return all(source.tried for source in self.sources)

    def page(self) -> str:
        """Return current data as plain text."""
        return self.answer("")[0].decode()

    def answer(self, accept: str) -> tuple[bytes, str]:
        """Return current data in the format that an Accept header prefers, and its content type."""
        return scrape.answer(self.samples(time.time()), accept, self.logs.blocks)

    def engines(self) -> Iterator[WatchedEngine]:
        """Yield the engines with their liveness. One that refuses connections is not ready."""
        for target in self.config.engines:
            liveness = self.liveness[target.name]
            ready = liveness.in_rotation and liveness.state is not EngineState.LOADING
            yield target.name, urlsplit(target.url).netloc.rpartition("@")[2], liveness, ready

    def samples(self, now_s: float) -> Iterator[Sample]:
        yield sidecar_series.SIDECAR_INFO, {"version": self.version}, 1
        yield sidecar_series.SIDECAR_START, {}, self.started_s
        if self._loop:
            yield sidecar_series.TASKS, {}, process.tasks(self._loop)
        for reason, times in self.rejected.items():
            yield sidecar_series.LISTENER_REJECTED, {"reason": reason}, times
        for source in self.sources:
            yield from source.samples(now_s)
        yield from self.logs.samples()
        for history in self.histories.values():
            yield from history.samples()
        for name, address, liveness, _ in self.engines():
            labels = {"upstream": name, "address": address}
            labels |= {"state": str(liveness.state), "evidence": str(liveness.cause)}
            yield sidecar_series.ENGINE_STATE, labels, 1
        yield from events.samples(self._events)
        yield from golden_state.samples(chain.from_iterable(self._golden.values()))
        if self.spans:
            yield from self.spans.samples()
        last = self._gpu_source.last_success_s if self._gpu_source else None
        if last is not None and now_s - last <= 3 * self.config.gpu_interval_s + self.config.timeout_s / 2:
            yield from families(self._gpus)
            if isinstance(prices := self.config.prices, Prices):
                yield (
                    sidecar_series.GPU_COST,
                    {"currency": prices.currency},
                    sum(prices.at(now_s).per_hour(reading.name) for reading in self._gpus),
                )
        budget = prices.at(now_s).budget_per_1k_tokens if isinstance(prices := self.config.prices, Prices) else None
        if isinstance(prices, Prices) and budget is not None:
            yield sidecar_series.COST_BUDGET, {"currency": prices.currency}, budget

    def _follow(self, source: SourceStatus, read: Callable[[], Awaitable[None]], every_s: float) -> None:
        self.sources.append(source)

        async def loop() -> None:
            while True:
                async with source.guard():
                    await read()
                await asyncio.sleep(every_s)

        self._tasks.append(asyncio.create_task(loop(), name=f"{source.kind} {source.name}"))

    async def _follow_logs(self, sources: Sequence[SourceStatus]) -> None:
        """Read all logs in turn and commit: at once at low rates, every COMMIT_S under load."""
        committed_s = settled_s = 0.0
        while True:
            more = False
            for tail, source in zip(self.logs.tails, sources, strict=True):
                async with source.guard():
                    more |= self.logs.poll(tail, time.time(), time.monotonic())
                    if not tail.found and not tail.unread_bytes():
                        raise FileNotFoundError(f"{tail.path} does not exist (yet)")
            now_s = time.monotonic()
            if now_s - settled_s >= SETTLE_S:
                with self._guard_update("log"):
                    self.settle(now_s)
                    if not self.config.peers:  # of their requests only totals are known
                        await self.accounts.compare_hour(time.time())
                settled_s = now_s
            if not more or now_s - committed_s >= COMMIT_S:
                with self._guard_update("counts"):
                    await self._commit()
                committed_s = now_s
            await asyncio.sleep(0 if more else LOG_INTERVAL_S)  # a long backlog must not delay a scrape

    def settle(self, now_s: float) -> None:
        """Compare logs and engines, once the logs of all gateways are known. now_s: monotonic.

        The logs are known as of the oldest totals of a peer: while it does not answer, none of its lines is missing."""
        if not self._peers_known:
            return
        at_end = self.logs.at_end and all(ended for _, ended in self._peers_read.values())
        known_s = min((now_s, *(read_s for read_s, _ in self._peers_read.values())))
        self.accounts.settle(time.time(), now_s, at_end, known_s)

    @property
    def _peers_known(self) -> bool:
        return len(self._peers_read) == len(self.config.peers)

    async def _read_peer(self, client: peers.PeerClient) -> None:
        began_s = time.monotonic()
        found = await client.totals()
        for totals in found:
            self.fleet_log.receive(totals)
        self._peers_read[client.url] = began_s, all(totals.at_end for totals in found)

    async def _commit(self) -> None:
        if not self.ledger.up and time.monotonic() < self._retry_s:
            return
        write = self.logs.begin_commit()
        if write is None:
            return
        if self._state_source is None:
            self.ledger.succeeded()
            return
        async with self._state_source.guard():
            try:
                self._writing = asyncio.ensure_future(asyncio.to_thread(write))
                await asyncio.shield(self._writing)
            except BaseException:
                self.ledger.failed()
                self._retry_s = time.monotonic() + RETRY_COMMIT_S
                raise
            self.ledger.succeeded()

    @contextlib.contextmanager
    def _guard_update(self, what: str) -> Iterator[None]:
        """Run an update of the counters. A failure here is a bug: engines, GPUs and logs are not marked as down."""
        source = self._accounts_source
        try:
            yield
        except Exception:
            source.errors["other"] += 1
            if what not in self._unbooked:
                log.exception("bug: cannot process data of %s", what)
            self._unbooked.add(what)
        else:
            self._unbooked.discard(what)
            source.last_success_s = time.time()
        source.up = not self._unbooked

    async def _read_engine(self, target: EngineTarget) -> None:
        accounts = self.accounts
        client = EngineClient(self._session, target.url.rstrip("/"), self.config.timeout_s, self._ways.get(target.name))
        asked_s, asked_clock_s, logged = time.time(), time.monotonic(), self.fleet_log.finished()
        try:
            text, version = await client.scrape()
            view = await asyncio.to_thread(engine_view.parse, text, version, self._readers[target.name].parse)
        except Exception as error:
            self._assess(target.name, Evidence(time.monotonic(), await client.endpoint(error)))
            with self._guard_update(f"engine {target.name}"):
                accounts.on_failure(target.name, time.time(), time.monotonic())
            raise
        steps = step_values(text.encode())
        self._assess(target.name, Evidence(time.monotonic(), Endpoint.READ if steps else Endpoint.UNREAD, steps))
        if not self._peers_known:
            return
        with self._guard_update(f"engine {target.name}"):
            accounts.on_scrape(target.name, view, asked_s, asked_clock_s, time.time(), time.monotonic(), logged)
        if accounts.reconciler.names_due(target.name, time.monotonic()):
            accounts.reconciler.record_names(target.name, await client.served_names(), time.monotonic())
        for event in self.histories[target.name].observe(view, time.time()):
            log.info("%s", event.what)
            if self.config.events:
                self._unwritten.append(event)

    def _assess(self, name: str, evidence: Evidence) -> None:
        """Assess the liveness of an engine by one more read; the start of a scaling is an event."""
        before = self.liveness[name]
        after = self.liveness[name] = before.after(evidence, self._limits)
        if after.state is before.state:
            return
        if after.state is EngineState.HUNG:
            log.error("%s is hung: no progress for %.0f s (%s)", name, after.quiet_s(), after.cause)
        if after.state is EngineState.SCALING and self.config.events:
            retired = after.cause is Cause.RETIRED_RANK
            what = f"{name} is a retired rank" if retired else f"{name} scales its expert parallelism"
            self._unwritten.append(events.TuningEvent(at_s=time.time(), kind="scaling", what=what, upstream=name))

    async def _read_gpu(self) -> None:
        # The first read may load the driver, which takes seconds without persistence mode; this source is
        # down meanwhile.
        first = self._gpu_source is not None and not self._gpu_source.up
        self._gpus = await self._gpu_reader.read(FIRST_GPU_READING_S if first else self.config.timeout_s / 2)
        with self._guard_update("GPUs"):
            self.accounts.use_prices_of(time.time())
            self.accounts.on_gpus(self._gpus, time.monotonic())

    async def _read_golden(self, file: str) -> None:
        self._golden[file] = await asyncio.to_thread(golden_state.read_states, Path(file))

    async def _read_events(self) -> None:
        """Write pending events, then read all. If the disk is full, this source fails and the events wait."""
        await self._write_events()
        self._events, _ = await asyncio.to_thread(events.read, Path(self.config.events or ""))

    async def _write_events(self) -> None:
        while self._unwritten:
            await asyncio.to_thread(events.append, Path(self.config.events or ""), self._unwritten[0])
            self._unwritten.popleft()
