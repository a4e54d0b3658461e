"""What looks at engines and cards add to the books: the log against the engine, and whose the GPU time, the energy and
the cost were.

The arithmetic is in reconcile.py and attribution.py, which know no engine, no card and no clock; here the readings are
brought into their words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from exporters.accounting import attribution, busy_hours, gpu_use, reconciled
from exporters.accounting.attribution import Attribution
from exporters.accounting.busy_hours import Hours
from exporters.accounting.gpu_use import GpuShare, UsageSample
from exporters.accounting.prices import Prices
from exporters.accounting.reconciliation import Reconciler
from exporters.engine import view as engine_view
from exporters.engine.view import EngineView
from exporters.gpu.source import GpuReading
from exporters.requests.bounded_names import OTHER
from exporters.requests.counters import RequestCounters
from exporters.requests.record import UNKNOWN_TEAM, RequestRecord, ended_at
from exporters.requests.store import StateProvider
from exporters.requests.work import FinishedRequest, Work

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Energy:
    """Joules of every card and MIG instance since the sidecar started; how they were had; and what each reader of them
    has taken."""

    joules: dict[str, float] = field(default_factory=dict)
    method: dict[str, gpu_use.EnergyMethod] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _taken: dict[tuple[str, str], float] = field(default_factory=dict)

    def read(self, cards: Iterable[GpuReading]) -> None:
        """Take in a reading. A counter that fell began anew with a driver: what it shows is all there is to add."""
        for card in cards:
            if card.energy_joules is None:
                continue
            before = self._last.get(card.uuid, card.energy_joules)
            self._last[card.uuid] = card.energy_joules
            grown = card.energy_joules - before if card.energy_joules >= before else card.energy_joules
            if card.instances:
                named = [(i.mig_uuid, i.profile, i.graphics_ratio) for i in card.instances if i.mig_uuid and i.profile]
                shares = {
                    uuid: (gpu_use.mig_fraction(profile, card.name), activity) for uuid, profile, activity in named
                }
                for uuid, (joules, method) in gpu_use.split_energy(grown, shares).items() if shares else ():
                    self._add(uuid, joules, method)
            else:
                self._add(card.uuid, grown, card.energy_method or "counter")

    def since(self, reader: str, uuid: str) -> float | None:
        """Joules since this reader last asked; None where nobody measures."""
        if (now := self.joules.get(uuid)) is None:
            return None
        before = self._taken.get((reader, uuid), now)
        self._taken[reader, uuid] = now
        return now - before

    def _add(self, uuid: str, joules: float, method: gpu_use.EnergyMethod) -> None:
        self.joules[uuid] = self.joules.get(uuid, 0.0) + joules
        self.method[uuid] = method


class Joiner:
    """Reconciliation and attribution for some engines. gpus: by engine, the UUIDs of its cards or MIG instances; an
    engine alone has all.

    now_s tells when something was (unix seconds), clock_s (monotonic) how long it took: a clock that is put right must
    not cost a year of GPU time.
    stored: what `accounts` told when it was last stored. Raises msgspec.MsgspecError for what is none of it."""

    def __init__(
        self,
        traffic: RequestCounters,
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
        self.hours = Hours()
        self._traffic = traffic
        self._gpus = gpus
        self._views: dict[str, tuple[float, EngineView]] = {}  # the last look at each engine, by the monotonic clock
        self._silent: set[str] = set()
        self._energy = _Energy()
        self._cards: dict[str, GpuShare] = {}  # what can be claimed, by UUID
        self._unclaimed_s: float | None = None  # monotonic
        self._revision = 0

    def accounts(self) -> list[StateProvider]:
        """What is stored and shown with the counts of the log."""
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

    def looked(
        self,
        upstream: str,
        view: EngineView,
        asked_s: float,
        asked_clock_s: float,
        now_s: float,
        clock_s: float,
        logged: Mapping[str, FinishedRequest],
    ) -> None:
        """Take in an engine's page. asked_s, asked_clock_s: when it was asked for, by both clocks; logged: what the log
        held then."""
        self._revision += 1
        self.reconciler.look(upstream, view, asked_s, logged, self._traffic.e2e_p99_s(), asked_clock_s=asked_clock_s)
        before_clock_s, before = self._views.get(upstream, (clock_s, view))
        before_s = now_s - (clock_s - before_clock_s)
        silent = upstream in self._silent
        self._silent.discard(upstream)
        self._views[upstream] = clock_s, view
        cards = self._claimed(upstream)
        for model, grown in engine_view.growth(before, view).items():
            self._advance(
                UsageSample(
                    upstream, model, before_s, now_s,
                    running_before=None if silent else _running(before, model),
                    running_after=_running(view, model),
                    waiting=sum(core.waiting for (name, _), core in view.cores.items() if name == model),
                    inference_s=grown.inference_s, decode_s=grown.decode_s, prefill_s=grown.prefill_s,
                    produced=Work(grown.prompt_tokens, grown.cached_tokens, grown.completion_tokens),
                    cards=cards,
                )
            )  # fmt: skip
            cards = ()  # they are the engine's, and counted once, whatever it serves
        self.attribution.unclaimed(cards, before_s, now_s)  # where it serves nothing

    def gone(self, upstream: str, now_s: float, clock_s: float) -> None:
        """This engine did not answer. Its cards are there all the same; what they did nobody knows."""
        self._revision += 1
        self.reconciler.gone(upstream)
        self._silent.add(upstream)
        if upstream not in self._views:
            return
        before_clock_s, view = self._views[upstream]
        before_s = now_s - (clock_s - before_clock_s)
        self._views[upstream] = clock_s, view
        if model := next((name for name, _ in view.cores), None):
            self._advance(UsageSample(upstream, model, before_s, now_s, None, None, cards=self._claimed(upstream)))
        else:
            self.attribution.unclaimed(self._claimed(upstream), before_s, now_s)

    def settle(self, now_s: float, clock_s: float, at_end: bool) -> None:
        """Take in the newest state of the log. at_end: it was read to its end just now."""
        self._revision += 1
        self.reconciler.settle(now_s, self._traffic.finished(), at_end, clock_s)

    def cards(self, cards: Sequence[GpuReading], clock_s: float) -> None:
        """Take in a reading of the cards. Those that no engine has cost money too."""
        self._revision += 1
        self._energy.read(cards)
        self._cards = {card.uuid: card for reading in cards for card in _parts(reading)}
        before_s, self._unclaimed_s = self._unclaimed_s, clock_s
        taken = {uuid for upstream in self._views for uuid in self._owned(upstream)}
        free = [self._with_energy("", card) for uuid, card in self._cards.items() if uuid not in taken]
        if before_s is not None:
            self.attribution.unclaimed(free, before_s, clock_s)

    def ran(self, records: Sequence[RequestRecord], now_s: float) -> None:
        """Keep when these requests ran, for the other way to share the hour; worth the time only where there is a card
        to share."""
        if not self._cards:
            return
        if not any(
            ended and now_s - ended < 2 * busy_hours.HOUR_S for ended in (ended_at(records[0]), ended_at(records[-1]))
        ):
            return  # a backlog of hours long past, for which there is no live figure
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
        """Where an hour is over, lay the two ways to share it side by side."""
        if hour := self.hours.close_hour(now_s):
            self.attribution.compare(hour.hour, await asyncio.to_thread(hour.seconds))

    def _advance(self, look: UsageSample) -> None:
        """With what the log and its comparison with the engine say of the model by now."""
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
            yield from self._cards

    def _claimed(self, upstream: str) -> tuple[GpuShare, ...]:
        """The engine's cards, with what they used since its last look. One that is not seen is there all the same, if
        the operator says so."""
        return tuple(
            self._with_energy(upstream, self._cards.get(uuid, GpuShare(uuid))) for uuid in self._owned(upstream)
        )

    def _with_energy(self, reader: str, card: GpuShare) -> GpuShare:
        joules = self._energy.since(reader, card.uuid)
        return GpuShare(
            card.uuid, card.name, card.fraction, card.profile, joules, self._energy.method.get(card.uuid, "counter")
        )


def _running(view: EngineView, model: str) -> int:
    return sum(core.running for (name, _), core in view.cores.items() if name == model)


def _parts(reading: GpuReading) -> Iterator[GpuShare]:
    """What an engine can run on: the card, or its MIG instances."""
    if not reading.instances:
        yield GpuShare(reading.uuid, reading.name)
    for instance in reading.instances:
        if instance.mig_uuid and instance.profile:
            yield GpuShare(
                instance.mig_uuid, reading.name, gpu_use.mig_fraction(instance.profile, reading.name), instance.profile
            )
