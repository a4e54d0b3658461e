"""Join of engine and GPU readings with the log: reconciliation, and attribution of GPU time, energy and cost.

The arithmetic is in reconciliation.py and attribution.py, which know no engine, GPU or clock; this module converts
readings to their types."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from exporters.accounting import attribution, busy_hours, gpu_use, reconciled
from exporters.accounting.attribution import Attribution
from exporters.accounting.busy_hours import Hours
from exporters.accounting.fleet_log import FleetLog
from exporters.accounting.gpu_use import GpuShare, UsageSample, assumed_name
from exporters.accounting.prices import Prices
from exporters.accounting.reconciliation import Reconciler
from exporters.engine import view as engine_view
from exporters.engine.view import EngineView
from exporters.gpu.readings import GpuReading
from exporters.requests.bounded_names import OTHER
from exporters.requests.record import UNKNOWN_TEAM, RequestRecord, ended_at
from exporters.requests.store import StateProvider
from exporters.requests.work import FinishedRequest, Work

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Energy:
    """Joules of every GPU and MIG instance since start-up, the method, and the value at each reader's last read."""

    joules: dict[str, float] = field(default_factory=dict)
    method: dict[str, gpu_use.EnergyMethod] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _taken: dict[tuple[str, str], float] = field(default_factory=dict)

    def read(self, gpus: Iterable[GpuReading]) -> None:
        """Add a reading. A counter that decreased restarted with the driver: its value is the increase."""
        for gpu in gpus:
            if gpu.energy_joules is None:
                continue
            before = self._last.get(gpu.uuid, gpu.energy_joules)
            self._last[gpu.uuid] = gpu.energy_joules
            grown = gpu.energy_joules - before if gpu.energy_joules >= before else gpu.energy_joules
            if gpu.instances:
                named = [(i.mig_uuid, i.profile, i.graphics_ratio) for i in gpu.instances if i.mig_uuid and i.profile]
                shares = {
                    uuid: (gpu_use.mig_fraction(profile, gpu.name), activity) for uuid, profile, activity in named
                }
                for uuid, (joules, method) in gpu_use.split_energy(grown, shares).items() if shares else ():
                    self._add(uuid, joules, method)
            else:
                self._add(gpu.uuid, grown, gpu.energy_method or "counter")

    def since(self, reader: str, uuid: str) -> float | None:
        """Return joules since this reader's last call; None if not measured."""
        if (now := self.joules.get(uuid)) is None:
            return None
        before = self._taken.get((reader, uuid), now)
        self._taken[reader, uuid] = now
        return now - before

    def _add(self, uuid: str, joules: float, method: gpu_use.EnergyMethod) -> None:
        self.joules[uuid] = self.joules.get(uuid, 0.0) + joules
        self.method[uuid] = method


class Joiner:
    """Reconciliation and attribution for some engines. gpus: by engine, its GPU or MIG UUIDs; a single engine has all.

    now_s (unix seconds) dates events, clock_s (monotonic) measures durations: a clock correction must not cost a
    year of GPU time. stored: the last stored state of `accounts`. Raises msgspec.MsgspecError for any other."""

    def __init__(
        self,
        traffic: FleetLog,
        gpus: Mapping[str, Sequence[str]],
        aliases: Mapping[str, str],
        prices: Prices | None,
        patience_s: float,
        stored: Mapping[str, bytes],
    ) -> None:
        states = (
            msgspec.msgpack.decode(stored["reconcile"], type=reconciled.ReconciliationState)
            if "reconcile" in stored
            else None,
            msgspec.msgpack.decode(stored["attribution"], type=attribution.AttributionState)
            if "attribution" in stored
            else None,
        )
        self.reconciler = Reconciler(aliases, states[0], gpus, patience_s)
        self.attribution = Attribution(prices, states[1])
        self._prices = prices
        self.hours = Hours()
        self._traffic = traffic
        self._gpus = gpus
        self._views: dict[str, tuple[float, EngineView]] = {}  # last scrape of each engine, monotonic time
        self._silent: set[str] = set()
        self._energy = _Energy()
        self._visible_gpus: dict[str, GpuShare] = {}  # GPUs and instances that engines can claim, by UUID
        self._unclaimed_s: float | None = None  # monotonic
        self._revision = 0

    def state_providers(self) -> list[StateProvider]:
        """Return the state providers to store and expose with the log's counters."""
        return [
            StateProvider(
                "reconcile", self._revised, lambda: _encode(self.reconciler.state()), self.reconciler.samples
            ),
            StateProvider(
                "attribution", self._revised, lambda: _encode(self.attribution.state()), self.attribution.samples
            ),
        ]

    def _revised(self) -> int:
        return self._revision

    def use_prices_of(self, now_s: float) -> None:
        """Book cost at the prices of this moment from now on."""
        self.attribution.prices = self._prices and self._prices.at(now_s)

    def on_scrape(
        self,
        upstream: str,
        view: EngineView,
        asked_s: float,
        asked_clock_s: float,
        now_s: float,
        clock_s: float,
        logged: Mapping[str, FinishedRequest],
    ) -> None:
        """Process an engine's scrape.

        asked_s, asked_clock_s: request time, by both clocks; logged: the log's counts at that time."""
        self._revision += 1
        self.use_prices_of(now_s)
        self.reconciler.look(upstream, view, asked_s, logged, self._traffic.e2e_p99_s(), asked_clock_s=asked_clock_s)
        before_clock_s, before = self._views.get(upstream, (clock_s, view))
        before_s = now_s - (clock_s - before_clock_s)
        silent = upstream in self._silent
        self._silent.discard(upstream)
        self._views[upstream] = clock_s, view
        gpus = self._claimed(upstream)
        for model, grown in engine_view.growth(before, view).items():
            self._advance(
                UsageSample(
                    upstream, model, before_s, now_s,
                    running_before=None if silent else _running(before, model),
                    running_after=_running(view, model),
                    waiting=sum(core.waiting for (name, _), core in view.cores.items() if name == model),
                    inference_s=grown.inference_s, decode_s=grown.decode_s, prefill_s=grown.prefill_s,
                    produced=Work(grown.prompt_tokens, grown.cached_tokens, grown.completion_tokens),
                    gpus=gpus,
                )
            )  # fmt: skip
            gpus = ()  # count the engine's GPUs once, for its first model
        self.attribution.add_unclaimed(gpus, before_s, now_s)  # if it serves no model

    def on_failure(self, upstream: str, now_s: float, clock_s: float) -> None:
        """Process a failed scrape. The engine's GPUs stay allocated; their load is unknown."""
        self._revision += 1
        self.use_prices_of(now_s)
        self.reconciler.on_failure(upstream)
        self._silent.add(upstream)
        if upstream not in self._views:
            return
        before_clock_s, view = self._views[upstream]
        before_s = now_s - (clock_s - before_clock_s)
        self._views[upstream] = clock_s, view
        if model := next((name for name, _ in view.cores), None):
            self._advance(UsageSample(upstream, model, before_s, now_s, None, None, gpus=self._claimed(upstream)))
        else:
            self.attribution.add_unclaimed(self._claimed(upstream), before_s, now_s)

    def settle(self, now_s: float, clock_s: float, at_end: bool, logs_clock_s: float | None = None) -> None:
        """Process the newest state of the log. at_end: it was just read to its end. logs_clock_s: the time of that
        state on the monotonic clock, if it is not new."""
        self._revision += 1
        self.reconciler.settle(now_s, self._traffic.finished(), at_end, clock_s, logs_clock_s)

    def on_gpus(self, gpus: Sequence[GpuReading], clock_s: float) -> None:
        """Process a GPU reading. GPUs without an engine have a cost too."""
        self._revision += 1
        self._energy.read(gpus)
        self._visible_gpus = {gpu.uuid: gpu for reading in gpus for gpu in _parts(reading)}
        before_s, self._unclaimed_s = self._unclaimed_s, clock_s
        taken = {uuid for upstream in self._views for uuid in self._owned(upstream)}
        free = [self._with_energy("", gpu) for uuid, gpu in self._visible_gpus.items() if uuid not in taken]
        if before_s is not None:
            self.attribution.add_unclaimed(free, before_s, clock_s)

    def on_requests(self, records: Sequence[RequestRecord], now_s: float) -> None:
        """Record when these requests ran, for the hourly comparison; skipped without a GPU."""
        if not self._visible_gpus:
            return
        if not any(
            ended and now_s - ended < 2 * busy_hours.HOUR_S for ended in (ended_at(records[0]), ended_at(records[-1]))
        ):
            return  # a backlog of past hours, without live values to compare
        placed = self.reconciler.state().placed
        for record in records:
            if (
                record.e2e_ms is None
                or (model := placed.get(record.model or "")) is None
                or (ended := ended_at(record)) is None
            ):
                continue
            team = record.team or UNKNOWN_TEAM
            self.hours.add(
                ended - record.e2e_ms / 1000,
                ended,
                model,
                team if team == UNKNOWN_TEAM or team in self._traffic.teams else OTHER,
                now_s,
            )

    async def compare_hour(self, now_s: float) -> None:
        """Compare both cost splits if an hour is complete."""
        if hour := self.hours.close_hour(now_s):
            self.attribution.compare(hour.hour, await asyncio.to_thread(hour.seconds))

    def _advance(self, look: UsageSample) -> None:
        """Advance the attribution with the current log and reconciliation of the model."""
        placed = self.reconciler.state().placed
        logged, abandoned = (
            self._by_team(works, look.model_name, placed) for works in (self._traffic.work(), self._traffic.abandoned())
        )
        lost = self.reconciler.aborted(look.model_name), self.reconciler.missing_in_log(look.model_name)
        aborted, missing_in_log = (Work(tokens.prompt, 0, tokens.completion) for tokens in lost)
        self.attribution.advance(
            replace(look, logged=logged, abandoned=abandoned, aborted=aborted, missing_in_log=missing_in_log)
        )

    @staticmethod
    def _by_team(works: Mapping[tuple[str, str], Work], model_name: str, placed: Mapping[str, str]) -> dict[str, Work]:
        """Return the work on a model by team. placed: name in the log -> model_name."""
        found: dict[str, Work] = {}
        for (name, team), work in works.items():
            if placed.get(name) == model_name:
                found[team] = found.get(team, Work()).plus(work)
        return found

    def _owned(self, upstream: str) -> Iterator[str]:
        if named := self._gpus.get(upstream):
            yield from named
        elif len(self._gpus) == 1:
            yield from self._visible_gpus

    def _claimed(self, upstream: str) -> tuple[GpuShare, ...]:
        """Return the engine's GPUs with their energy since its last scrape.

        A configured GPU counts as allocated even if it is not visible."""
        return tuple(
            self._with_energy(upstream, self._visible_gpus.get(uuid, GpuShare(uuid, assumed_name(uuid))))
            for uuid in self._owned(upstream)
        )

    def _with_energy(self, reader: str, gpu: GpuShare) -> GpuShare:
        joules = self._energy.since(reader, gpu.uuid)
        return GpuShare(
            gpu.uuid, gpu.name, gpu.fraction, gpu.profile, joules, self._energy.method.get(gpu.uuid, "counter")
        )


def _running(view: EngineView, model: str) -> int:
    return sum(core.running for (name, _), core in view.cores.items() if name == model)


def _parts(reading: GpuReading) -> Iterator[GpuShare]:
    """Yield what an engine can run on: the GPU, or its MIG instances."""
    if not reading.instances:
        yield GpuShare(reading.uuid, reading.name)
    for instance in reading.instances:
        if instance.mig_uuid and instance.profile:
            yield GpuShare(
                instance.mig_uuid, reading.name, gpu_use.mig_fraction(instance.profile, reading.name), instance.profile
            )
