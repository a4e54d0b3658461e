"""Usage and cost from the series that sidecars recorded in a Prometheus."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

from exporters.accounting.attribution import ABANDONED
from exporters.accounting.billing_period import BillingPeriod, PriceSegment, segments
from exporters.accounting.busy_hours import HOUR_S
from exporters.accounting.cost import (
    NO_PRICES,
    RECORDED,
    CostPart,
    SourceTotals,
    TeamUse,
    add_api_cost,
    add_price_versions,
    part_of,
)
from exporters.accounting.counter_growth import read_growth
from exporters.accounting.gpu_use import ABORTED, IDLE, UNATTRIBUTED, assumed_name
from exporters.accounting.prices import Prices
from exporters.catalogue import attributed, gpu, promql, sidecar
from exporters.catalogue.metric import Metric
from exporters.net.prometheus import Address, Prometheus
from exporters.requests.bounded_names import UNKNOWN_MODEL

_TOKEN_KINDS = ("prompt", "cached", "completion")
_DIFFERENCE = 1e-6  # of the allocated time, from which on it is worth a note


@dataclass(slots=True)
class AllocatedTime:
    """Allocated GPU seconds of each model and their cost."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    cost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def rate(self, model: str, default: float) -> float:
        """Return the cost of a second, at the mean of the model's GPUs."""
        return self.cost[model] / self.seconds[model] if self.seconds[model] else default


class RecordedUsage:
    """Reader of the series of one period. Every increase lands in the part of its segment and cluster."""

    def __init__(
        self, prometheus: Prometheus, period: BillingPeriod, cut: Sequence[PriceSegment], cluster: str
    ) -> None:
        self.totals = SourceTotals(prometheus.where.shown, period, known={"joules"})
        self.allocated: defaultdict[CostPart, AllocatedTime] = defaultdict(AllocatedTime)
        self.unknown: defaultdict[CostPart, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._prometheus, self._cut, self._cluster = prometheus, cut, cluster

    async def read(self, metric: Metric, add: Callable[[TeamUse, Mapping[str, str], float], None]) -> None:
        """Pass the usage of each series' team and model, its labels and its increase to `add`."""
        async for number, labels, amount in read_growth(self._prometheus, metric, self._cut):
            uses = self.totals.parts[self.part(number, labels)]
            add(uses[labels.get("team", UNATTRIBUTED), _model(labels)], labels, amount)

    async def read_lines(self) -> None:
        """Read the lines of the request logs."""
        for metric in (sidecar.LOG_LINES, sidecar.LOG_BAD_LINES):
            async for _, _, amount in read_growth(self._prometheus, metric, self._cut):
                self.totals.lines += amount
                self.totals.bad_lines += amount if metric is sidecar.LOG_BAD_LINES else 0.0

    def part(self, number: int, labels: Mapping[str, str]) -> CostPart:
        return part_of(self._cut[number], labels.get("cluster") or self._cluster, RECORDED)

    async def read_seconds(self) -> None:
        """Read the GPU time of each team. Raises ValueError if there is none."""
        async for number, labels, amount in read_growth(self._prometheus, attributed.TEAM_SECONDS, self._cut):
            part, team, model = self.part(number, labels), labels.get("team", UNATTRIBUTED), _model(labels)
            aborted = amount if labels.get("method") == ABANDONED or team == ABORTED else 0.0
            self.totals.parts[part][team, model].add(TeamUse(seconds=amount, aborted_seconds=aborted))
            if labels.get("method") == "unknown":
                self.unknown[part][model] += amount
        if not self.totals.parts:
            raise ValueError(
                f"{self._prometheus.where.shown} has no {attributed.TEAM_SECONDS.name} in this period: scrape a"
                " sidecar that reads engines and GPUs. With the request log only: vllm-watch cost --log FILE"
            )

    async def read_allocated(self) -> None:
        """Read the allocated time, and its cost where the segment has prices."""
        length = f"{round(self.totals.period.length_s)}s"
        answer = await self._prometheus.as_of(promql.last_samples(gpu.INFO, length), self.totals.period.to_s)
        names = {one.metric.get("uuid", ""): one.metric.get("name") for one in answer.series}
        async for number, labels, amount in read_growth(self._prometheus, attributed.ALLOCATED, self._cut):
            model, uuid = _model(labels), labels.get("uuid", "")
            held = self.allocated[self.part(number, labels)]
            held.seconds[model] += amount
            if prices := self._cut[number].prices:
                held.cost[model] += amount / HOUR_S * prices.per_hour(names.get(uuid) or assumed_name(uuid))


async def from_prometheus(
    where: Address, period: BillingPeriod, prices: Prices | None = None, cluster: str = ""
) -> SourceTotals:
    """Return totals by the increase of each recorded series, with resets, summed afterwards.

    With prices, cost is computed from the seconds instead of the recorded cost. cluster: name of the series that have
    no such label. Raises ValueError with a sentence."""
    cut = segments(period, prices)
    async with Prometheus(where) as prometheus:
        usage = RecordedUsage(prometheus, period, cut, cluster)
        found = usage.totals
        await usage.read_seconds()
        await asyncio.gather(
            usage.read_allocated(),
            usage.read_lines(),
            usage.read(attributed.TEAM_ENERGY, _add_joules),
            usage.read(sidecar.TOKENS, _add_tokens),
            usage.read(sidecar.ESTIMATED_TOKENS, _Estimates(found)),
            usage.read(sidecar.UNREADABLE, partial(_add_unreadable, found)),
            *(() if prices else _recorded_cost(usage)),
        )
    if prices:
        _price_seconds(usage, cut)
    for uses in found.parts.values():
        for use in uses.values():
            use.set_aborted_cost()
    add_price_versions(found, cut)
    found.notes += _notes(usage, prices)
    return found


def _model(labels: Mapping[str, str]) -> str:
    return labels.get("model_name", UNKNOWN_MODEL)


def _add_joules(use: TeamUse, _: Mapping[str, str], amount: float) -> None:
    use.joules += amount


def _add_tokens(use: TeamUse, labels: Mapping[str, str], amount: float) -> None:
    if (kind := labels.get("type")) in _TOKEN_KINDS:
        setattr(use, f"{kind}_tokens", getattr(use, f"{kind}_tokens") + amount)


@dataclass(frozen=True, slots=True)
class _Estimates:
    found: SourceTotals

    def __call__(self, use: TeamUse, labels: Mapping[str, str], amount: float) -> None:
        self.found.known.add("estimates")
        name = f"est_{labels.get('type')}_tokens"
        if name in {each.name for each in fields(TeamUse)}:
            setattr(use, name, getattr(use, name) + amount)


def _add_unreadable(found: SourceTotals, use: TeamUse, _: Mapping[str, str], amount: float) -> None:
    found.known.add("unreadable")
    use.unreadable_requests += amount


def _recorded_cost(usage: RecordedUsage) -> list[object]:
    found = usage.totals

    def add_currency(labels: Mapping[str, str], kind: str) -> None:
        currency = labels.get("currency", "")
        if found.currency not in (None, currency):
            raise ValueError(
                f"cost was recorded in {' and '.join(sorted((str(found.currency), currency)))} within this time; name"
                " one --prices FILE, or a shorter period"
            )
        found.currency = currency
        found.known.add(kind)

    def add_cost(use: TeamUse, labels: Mapping[str, str], amount: float) -> None:
        add_currency(labels, "cost")
        if labels.get("basis") == "usage":
            use.cost_usage += amount
        else:
            use.cost_allocation += amount

    def add_api(use: TeamUse, labels: Mapping[str, str], amount: float) -> None:
        add_currency(labels, "api")
        use.api_cost += amount

    return [usage.read(attributed.COST, add_cost), usage.read(attributed.API_COST, add_api)]


def _price_seconds(usage: RecordedUsage, cut: Sequence[PriceSegment]) -> None:
    """Set cost at the prices of each segment: GPUs of a model at their own price, its teams at the mean."""
    found, prices_from = usage.totals, {segment.from_s: segment.prices for segment in cut}
    for part, uses in found.parts.items():
        if not (prices := prices_from[part.from_s]):
            continue
        for (team, model), use in uses.items():
            rate = usage.allocated[part].rate(model, prices.per_hour(None) / HOUR_S)
            unknown_s = usage.unknown[part][model] if team == UNATTRIBUTED else 0.0
            use.cost_allocation = use.seconds * rate
            use.cost_usage = 0.0 if team == IDLE else (use.seconds - unknown_s) * rate
        found.currency = prices.currency
        found.known.add("cost")
        add_api_cost(found, uses, prices)


def _notes(usage: RecordedUsage, prices: Prices | None) -> list[str]:
    found, notes = usage.totals, ["counters are read every 5 min; nothing is extrapolated to the ends of the period"]
    if prices:
        notes.append(
            "cost uses the prices of the file at each moment, not those that the sidecar had; a MIG instance costs its"
            " share of a GPU"
        )
    elif "cost" not in found.known:
        notes.append(f"no cost was recorded: the sidecar has no `prices`; {NO_PRICES}")
    elif without := _days_without_cost(found):
        notes.append(
            f"no cost was recorded on {len(without)} of {len({part.from_s for part in found.parts})} days, the first"
            f" {without[0]}: the sidecar had no `prices` then; {NO_PRICES}"
        )
    allocated = sum(sum(held.seconds.values()) for held in usage.allocated.values())
    rows = sum(use.seconds for use in found.uses.values())
    if abs(allocated - rows) > _DIFFERENCE * allocated:
        notes.append(
            f"{(allocated - rows) / HOUR_S:+.6g} GPU hours of the allocated time are not in the rows: requests that"
            " ran over an end of the period (pending) are on the bill of the period in which they end"
        )
    return notes


def _days_without_cost(found: SourceTotals) -> list[str]:
    """Return the days with GPU time and without cost."""
    return [
        found.period.show(part.from_s)[:10]
        for part, uses in sorted(found.parts.items())
        if any(use.seconds for use in uses.values()) and not any(use.cost_allocation for use in uses.values())
    ]
