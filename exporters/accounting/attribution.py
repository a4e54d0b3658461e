"""Attribution of every GPU second, joule and cost unit to a team, to idle, or to discarded work. Pure.

Invariant: over teams, __idle__, __aborted__, __unattributed__ and the pending part, seconds sum to the allocated time,
joules to the GPUs' energy and cost to their cost. Neither the length of the samples nor the order of log lines changes
a sum.

Busy time goes into a pool per model. Completed work draws its part from it; tokens in flight keep theirs. A batch
cannot be separated on the GPU, so the split is an estimate: by tokens here, and by running requests at each moment in
`sweep`.

Work on an aborted request belongs to its team (method aborted), by the tokens of its record, which may be estimates.
The engine counts the same work as aborted, or as finished without a usable record; that count is reduced by what the
teams' records have claimed, and only its rest is __aborted__ or __unattributed__."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from exporters.accounting.busy_hours import HOUR_S
from exporters.accounting.gpu_use import (
    ABORTED,
    DEFAULT_DECODE_WEIGHT,
    IDLE,
    NOBODY,
    NOTHING,
    UNATTRIBUTED,
    GpuShare,
    PhaseTimes,
    Pool,
    UsageSample,
)
from exporters.accounting.prices import Prices
from exporters.catalogue import attributed
from exporters.catalogue.metric import Metric
from exporters.exposition import Sample
from exporters.requests.work import Work

NO_MODEL = "__none__"
# methods: busy time split by the tokens of completed work, or of aborted requests
ENDED, ABANDONED = "tokens", "aborted"
IDLE_AT_LEAST_S = 30.0  # power falls for some seconds after the last request
SETTLE_S = 30.0  # maximum delay of a log line after the last request


class AttributedModel(msgspec.Struct):
    """State of one model between samples.

    prompt_ahead, generation_ahead: tokens produced by the engine beyond completed work, so in flight; below 0 the
    log was faster. last_work: cumulative work at the last sample; last_abandoned: the same of aborted requests.
    claimed: tokens of those that the engine has not yet counted as aborted or missing_in_log. last_busy_s: the last
    sample with work or completed work. idle_cost, used_s: of this hour, to spread idle cost."""

    pool: Pool = msgspec.field(default_factory=Pool)
    evidence: PhaseTimes = msgspec.field(default_factory=PhaseTimes)
    prompt_ahead: float = 0.0
    generation_ahead: float = 0.0
    produced: Work = NOTHING
    logged: Work = NOTHING
    last_work: dict[str, Work] | None = None
    last_abandoned: dict[str, Work] | None = None
    claimed: Work = NOTHING
    last_busy_s: float = 0.0
    hour: int = 0
    idle_cost: dict[str, float] = {}
    used_s: dict[str, float] = {}

    @property
    def decode_weight(self) -> float:
        return self.evidence.decode_weight or DEFAULT_DECODE_WEIGHT

    def computed(self, whose: tuple[str, str], work: Work) -> float:
        """Return computed prompt tokens; if the log has no cache data, by the engine's overall ratio."""
        team, method = whose
        if team in NOBODY or method == ABANDONED or not self.logged.cached_tokens:
            return work.prompt_tokens * (
                self.produced.computed_tokens / self.produced.prompt_tokens if self.produced.prompt_tokens else 1.0
            )
        return work.computed_tokens


class Streak(msgspec.Struct):
    """Continuous idle time of a GPU."""

    seconds: float = 0.0
    joules: float = 0.0


class AttributionState(msgspec.Struct):
    """State that outlives the process, as plain values. Encode it before the next sample: it is not a copy."""

    counts: list[tuple[str, dict[str, str], float]] = []
    models: dict[str, AttributedModel] = {}
    idle_watts: dict[str, float] = {}
    streaks: dict[str, Streak] = {}
    hours: dict[int, dict[str, dict[str, float]]] = {}
    differences: dict[str, dict[str, float]] = {}


_COUNTERS = {
    m.name: m
    for m in (
        attributed.ALLOCATED,
        attributed.BUSY,
        attributed.TEAM_SECONDS,
        attributed.TEAM_ENERGY,
        attributed.COST,
        attributed.API_COST,
    )
}


class Attribution:
    """Attribution, updated by every sample of an engine. `prices` may change at any time: cost uses current prices."""

    def __init__(self, prices: Prices | None = None, state: AttributionState | None = None) -> None:
        kept = state or AttributionState()
        self.prices = prices
        self.models = kept.models
        self._counts: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for name, labels, value in kept.counts:
            self._counts[name, tuple(sorted(labels.items()))] = value
        self._idle_watts, self._streaks = kept.idle_watts, kept.streaks
        self._hours, self._differences = kept.hours, kept.differences

    def state(self) -> AttributionState:
        counts = [(name, dict(labels), value) for (name, labels), value in self._counts.items()]
        return AttributionState(counts, self.models, self._idle_watts, self._streaks, self._hours, self._differences)

    def advance(self, look: UsageSample) -> None:
        """Add one sample. Samples of the engines of one model may come in any order."""
        if (model := self.models.get(look.model_name)) is None:
            model = self.models[look.model_name] = AttributedModel()
            self._create_series(look.model_name)
        self._spread(look, model)
        model.evidence.learn(look)
        for gpu in look.gpus:
            self._use(look, gpu, model)
            self._learn_idle(look, gpu)
        ended = self._ended(look, model)
        drawn = self._draw(look, model, ended)
        self._settle(look, model, drawn)

    def add_unclaimed(self, gpus: Iterable[GpuShare], from_s: float, to_s: float) -> None:
        """Add the time of GPUs that no engine claims."""
        length_s = max(0.0, to_s - from_s)
        for gpu in gpus:
            self._count(attributed.ALLOCATED, length_s * gpu.fraction, model_name=NO_MODEL, uuid=gpu.uuid)
            self._unknown(NO_MODEL, gpu, length_s)

    def compare(self, hour: int, swept: Mapping[str, Mapping[str, float]]) -> None:
        """Record `Hour.seconds` of an hour: share by running requests minus share by tokens, for teams in the log."""
        lived = self._hours.pop(hour, {})
        self._differences = {}
        for model_name in swept.keys() & lived.keys():
            by_tokens, by_requests = _shares(lived[model_name]), _shares(swept[model_name])
            if by_tokens and by_requests:
                self._differences[model_name] = {
                    team: by_requests.get(team, 0.0) - by_tokens.get(team, 0.0)
                    for team in sorted(by_tokens.keys() | by_requests.keys())
                }

    def samples(self) -> Iterator[Sample]:
        """Yield the series. A model without a GPU has no seconds: they are omitted, never reported as 0."""
        had_cards = {dict(labels)["model_name"] for name, labels in self._counts if name == attributed.ALLOCATED.name}
        for (name, labels), value in self._counts.items():
            of = dict(labels)
            if (metric := _COUNTERS.get(name)) and (
                metric is not attributed.TEAM_SECONDS or of["model_name"] in had_cards
            ):
                yield metric, of, value
        for model_name, model in self.models.items():
            if model_name in had_cards:
                yield attributed.PENDING, {"model_name": model_name}, model.pool.seconds
            method = "default" if model.evidence.decode_weight is None else "engine"
            yield attributed.DECODE_WEIGHT, {"method": method, "model_name": model_name}, model.decode_weight
        for uuid, watts in self._idle_watts.items():
            yield attributed.IDLE_WATTS, {"uuid": uuid}, watts
        for model_name, by_team in self._differences.items():
            for team, difference in by_team.items():
                yield attributed.SHARE_DIFFERENCE, {"model_name": model_name, "team": team}, difference

    def _create_series(self, model_name: str) -> None:
        """Create series at 0: rates need a sample before the first increase."""
        for method, team in (("measured", IDLE), (ENDED, ABORTED), (ENDED, UNATTRIBUTED), ("unknown", UNATTRIBUTED)):
            self._count(attributed.TEAM_SECONDS, 0.0, method=method, model_name=model_name, team=team)

    def _use(self, look: UsageSample, gpu: GpuShare, model: AttributedModel) -> None:
        """Attribute one GPU's time, energy and cost: the busy part to the pool, the idle part to __idle__."""
        total_s, who = look.length_s * gpu.fraction, {"model_name": look.model_name, "uuid": gpu.uuid}
        self._count(attributed.ALLOCATED, total_s, **who)
        if look.busy_s is None:
            self._count(attributed.BUSY, 0.0, **who)
            self._unknown(look.model_name, gpu, look.length_s)
            return
        share = look.busy_s / look.length_s if look.length_s else 0.0
        self._count(attributed.BUSY, total_s * share, **who)
        self._count(
            attributed.TEAM_SECONDS, total_s * (1 - share), method="measured", model_name=look.model_name, team=IDLE
        )
        model.pool.add(seconds=total_s * share)
        if gpu.joules is not None:
            active = self._active_joules(gpu, gpu.joules, look.length_s, share)
            model.pool.add(joules={gpu.method: active})
            self._energy(look.model_name, IDLE, "idle", gpu.method, gpu.joules - active)
        for currency, price in self._price(gpu, look.length_s):
            model.pool.add(cost={currency: price * share})
            if self.prices and self.prices.spread_idle:
                model.idle_cost[currency] = model.idle_cost.get(currency, 0.0) + price * (1 - share)
            else:
                self._cost(look.model_name, IDLE, "allocation", currency, price * (1 - share))

    def _unknown(self, model_name: str, gpu: GpuShare, length_s: float) -> None:
        """Attribute time of unknown load. It does not count as usage, which is known busy time."""
        self._count(
            attributed.TEAM_SECONDS, length_s * gpu.fraction, method="unknown", model_name=model_name, team=UNATTRIBUTED
        )
        if gpu.joules is not None:
            self._energy(model_name, UNATTRIBUTED, "unknown", gpu.method, gpu.joules)
        for currency, price in self._price(gpu, length_s):
            self._cost(model_name, UNATTRIBUTED, "allocation", currency, price)

    def _price(self, gpu: GpuShare, length_s: float) -> Iterator[tuple[str, float]]:
        if self.prices:
            yield self.prices.currency, self.prices.per_hour(gpu.name, gpu.fraction, gpu.profile) * length_s / HOUR_S

    def _active_joules(self, gpu: GpuShare, joules: float, length_s: float, share: float) -> float:
        """Return the energy of the work: energy above idle power once that is known, before that by busy time."""
        if not share:
            return 0.0
        if (watts := self._idle_watts.get(gpu.uuid)) is None or gpu.fraction != 1:
            return joules * share
        return max(0.0, joules - watts * length_s)

    def _learn_idle(self, look: UsageSample, gpu: GpuShare) -> None:
        if gpu.fraction != 1 or gpu.joules is None or not look.quiet:
            self._streaks.pop(gpu.uuid, None)
            return
        streak = self._streaks.setdefault(gpu.uuid, Streak())
        streak.seconds += look.length_s
        streak.joules += gpu.joules
        if streak.seconds >= IDLE_AT_LEAST_S:
            self._idle_watts[gpu.uuid] = streak.joules / streak.seconds

    def _ended(self, look: UsageSample, model: AttributedModel) -> dict[tuple[str, str], Work]:
        """Return work completed since the last sample, by team and method. Work before the first sample is ignored."""
        work_by_team = {**look.logged, ABORTED: look.aborted, UNATTRIBUTED: look.missing_in_log}
        grown, model.last_work = _growth(work_by_team, model.last_work), work_by_team
        abandoned, model.last_abandoned = _growth(look.abandoned, model.last_abandoned), dict(look.abandoned)
        model.produced = model.produced.plus(look.produced)
        for team in look.logged:
            model.logged = model.logged.plus(grown[team])
            self._api_cost(look.model_name, team, grown[team].plus(abandoned.get(team, NOTHING)))
        for work in abandoned.values():
            model.claimed = model.claimed.plus(work)
        for lost in (ABORTED, UNATTRIBUTED):
            covered = grown[lost].at_most(model.claimed)
            grown[lost], model.claimed = grown[lost].minus(covered), model.claimed.minus(covered)
        return {(team, ENDED): work for team, work in grown.items()} | {
            (team, ABANDONED): work for team, work in abandoned.items()
        }

    def _api_cost(self, model_name: str, team: str, work: Work) -> None:
        if self.prices and (price := self.prices.api_price(model_name)):
            cost = price.cost(work.prompt_tokens, work.cached_tokens, work.completion_tokens)
            self._count(attributed.API_COST, cost, currency=self.prices.currency, model_name=model_name, team=team)

    def _draw(self, look: UsageSample, model: AttributedModel, ended: Mapping[tuple[str, str], Work]) -> bool:
        """Give completed work its part of the pool; return True if there was any."""
        computed = {whose: model.computed(whose, work) for whose, work in ended.items()}
        prompt, generation = sum(computed.values()), sum(work.completion_tokens for work in ended.values())
        # A log may be one sample ahead of the engine: without a bound, tokens missed once would be missing for ever.
        model.prompt_ahead = max(model.prompt_ahead + look.produced.computed_tokens - prompt, -prompt)
        model.generation_ahead = max(model.generation_ahead + look.produced.completion_tokens - generation, -generation)
        weight = model.decode_weight
        units = {whose: computed[whose] + weight * work.completion_tokens for whose, work in ended.items()}
        if (total := sum(units.values())) <= 0:
            return False
        in_flight = max(0.0, model.prompt_ahead) + weight * max(0.0, model.generation_ahead)
        drawn = model.pool.take(total / (total + in_flight))
        for (team, method), part in units.items():
            if part or team in look.logged:
                self._book(look, model, team, method, drawn.times(part / total))
        return True

    def _settle(self, look: UsageSample, model: AttributedModel, drawn: bool) -> None:
        """Attribute the rest of the pool after an idle period without log lines, when no owner can appear."""
        if drawn or look.busy_s or look.running_after or look.waiting:
            model.last_busy_s = max(model.last_busy_s, look.to_s)
        # another engine of the model may not have been sampled yet
        elif look.to_s - model.last_busy_s >= max(SETTLE_S, 3 * look.length_s):
            self._book(look, model, UNATTRIBUTED, "unknown", model.pool.take(1.0))
            model.prompt_ahead = model.generation_ahead = 0.0
            # the engine has counted all aborted work; an estimate that was too high must not remain
            model.claimed = NOTHING

    def _book(self, look: UsageSample, model: AttributedModel, team: str, method: str, part: Pool) -> None:
        self._count(attributed.TEAM_SECONDS, part.seconds, method=method, model_name=look.model_name, team=team)
        for source, joules in part.joules.items():
            self._energy(look.model_name, team, "active", source, joules)
        for currency, cost in part.cost.items():
            for basis in ("allocation", "usage"):
                self._cost(look.model_name, team, basis, currency, cost)
        model.used_s[team] = model.used_s.get(team, 0.0) + part.seconds
        by_team = self._hours.setdefault(int(look.to_s // HOUR_S), {}).setdefault(look.model_name, {})
        by_team[team] = by_team.get(team, 0.0) + part.seconds
        for old in sorted(self._hours)[:-3]:
            del self._hours[old]

    def _spread(self, look: UsageSample, model: AttributedModel) -> None:
        """At the first sample of an hour, spread the last hour's idle cost over its users.

        Without users it stays __idle__'s."""
        hour, before = int(look.to_s // HOUR_S), model.hour
        if hour <= before:
            return
        used = model.used_s if sum(model.used_s.values()) > 0 else {IDLE: 1.0}
        total = sum(used.values())
        for currency, cost in model.idle_cost.items():
            for team, seconds in used.items():
                self._cost(look.model_name, team, "allocation", currency, cost * seconds / total)
        model.hour, model.idle_cost, model.used_s = hour, {}, {}

    def _energy(self, model_name: str, team: str, state: str, method: str, joules: float) -> None:
        self._count(attributed.TEAM_ENERGY, joules, method=method, model_name=model_name, state=state, team=team)

    def _cost(self, model_name: str, team: str, basis: str, currency: str, cost: float) -> None:
        self._count(attributed.COST, cost, basis=basis, currency=currency, model_name=model_name, team=team)

    def _count(self, metric: Metric, amount: float, **labels: str) -> None:
        self._counts[metric.name, tuple(sorted(labels.items()))] += amount


def _growth(now: Mapping[str, Work], before: Mapping[str, Work] | None) -> dict[str, Work]:
    """Return the increase of cumulative work by team; none at the first sample."""
    return {team: work.since((now if before is None else before).get(team, NOTHING)) for team, work in now.items()}


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return shares among the teams in the log."""
    among = {team: s for team, s in seconds.items() if team not in NOBODY}
    total = sum(among.values())
    return {team: s / total for team, s in among.items()} if total > 0 else {}
