"""Conservation of a day: the sums of segments equal the sidecar's counters, and these equal the engines'.

Invariant: a difference is either bounded by causes that were measured, or reported as unexplained. The counters are
read as increases between stored samples, without extrapolation; so at midnight they include requests that were read
late, and those that ended shortly before bound the difference."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from exporters.accounting.billing_period import PriceSegment
from exporters.accounting.counter_growth import read_growth
from exporters.catalogue import promql, reconciled, sidecar, vllm
from exporters.catalogue.metric import Metric
from exporters.dataset import catalog, layout
from exporters.dataset.layout import NULL_PARTITION, OTHER_MODELS, UNDATED, LogSegment
from exporters.dataset.objects import ObjectStore
from exporters.net.prometheus import Address, Prometheus
from exporters.requests.bounded_names import UNKNOWN_MODEL

DAY_S = 86_400.0
KINDS = ("requests", "prompt", "cached", "completion")
LATE_S = 120.0  # a line is read, committed and scraped within this time after its request ended

# Sums of the records of a time range by model: (segments, first second, end second) -> model -> kind -> sum
EdgeSums = Callable[[Sequence[LogSegment], float, float], Mapping[str, Mapping[str, float]]]


@dataclass(slots=True)
class DayBalance:
    """Comparison of one day, cluster and model for one kind of sum.

    segments, sidecar: sums of records. engine, logged: finished work as engines count it, in the engines and in the
    logs; None where the sidecar compares no engine. low, high: bounds of segments minus sidecar by known causes;
    engine_low, engine_high: of engine minus logged, less what is explained. causes: what was measured, by name."""

    day: str
    cluster: str
    model: str
    kind: str
    segments: float = 0.0
    sidecar: float | None = None
    logged: float | None = None
    engine: float | None = None
    low: float = 0.0
    high: float = 0.0
    engine_explained: float = 0.0
    engine_low: float = 0.0
    engine_high: float = 0.0
    causes: dict[str, float] = field(default_factory=dict)

    @property
    def unexplained(self) -> float:
        """Return the part of the differences that no known cause bounds; 0 if the sums agree."""
        apart = 0.0 if self.sidecar is None else self.segments - self.sidecar
        beyond = max(0.0, apart - self.high, self.low - apart)
        if self.engine is None or self.logged is None:
            return beyond
        between = self.engine - self.logged - self.engine_explained
        return max(beyond, between - self.engine_high, self.engine_low - between)


class _Day:
    """Balances of a day by cluster, model and kind."""

    def __init__(self, day: str, cluster: str) -> None:
        self.day, self.cluster = day, cluster
        self.rows: dict[tuple[str, str, str], DayBalance] = {}

    def row(self, cluster: str, model: str, kind: str) -> DayBalance:
        key = cluster, model, kind
        if key not in self.rows:
            self.rows[key] = DayBalance(self.day, *key)
        return self.rows[key]

    def of(self, labels: Mapping[str, str], kind: str) -> DayBalance:
        return self.row(labels.get("cluster") or self.cluster, labels.get("model_name", UNKNOWN_MODEL), kind)

    def explain(self, labels: Mapping[str, str], amount: float, sign: int, name: str) -> None:
        """Add an amount by which engines and logs differ, and its cause."""
        row = self.of(labels, labels.get("kind", ""))
        row.engine_explained += sign * amount
        if row.kind == "prompt":  # a cached token is one of them
            cached = self.of(labels, "cached")
            cached.engine_low += min(0.0, sign * amount)
            cached.engine_high += max(0.0, sign * amount)
        if amount:
            cause = f"{name}: {labels.get('cause', 'unknown')}"
            row.causes[cause] = row.causes.get(cause, 0.0) + amount


async def balance_day(
    store: ObjectStore, where: Address, day: str, clusters: Collection[str], cluster: str, edge_sums: EdgeSums
) -> list[DayBalance]:
    """Return the balances of a day in UTC, by cluster, model and kind.

    clusters: of the data set; empty: all. cluster: of series without such a label. Raises StoreError, BadDataset, and
    ValueError with a sentence if Prometheus does not answer or has no counters of that day."""
    start_s = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    found = _Day(day, cluster)
    segments = await asyncio.to_thread(
        catalog.segments, store, start_s - LATE_S, start_s + DAY_S, clusters, (), undated=True
    )
    of_day = [segment for segment in segments if segment.day == day]
    async with Prometheus(where) as prometheus:
        await _add_counters(found, prometheus, PriceSegment(start_s, start_s + DAY_S))
    if not any(row.sidecar is not None for row in found.rows.values()):
        raise ValueError(
            f"{where.shown} has no {sidecar.REQUESTS.name} of {day}: name the Prometheus that scrapes the sidecar"
        )
    _add_segments(found, of_day)
    edges = (
        ("read after midnight", of_day, start_s + DAY_S - LATE_S, start_s + DAY_S, 1),
        ("read after the midnight before", segments, start_s - LATE_S, start_s, -1),
        ("without a time", [one for one in segments if one.day == UNDATED], float("-inf"), float("inf"), -1),
    )
    for cause, among, first_s, end_s, sign in edges:
        by_cluster: defaultdict[str, list[LogSegment]] = defaultdict(list)
        for segment in among:
            by_cluster[segment.cluster].append(segment)
        for of_cluster, theirs in by_cluster.items():
            sums = await asyncio.to_thread(edge_sums, theirs, first_s, end_s)
            _add_bounds(found, of_cluster, cause, sums, sign)
    _bound_cached(found)
    return [found.rows[key] for key in sorted(found.rows)]


async def _add_counters(found: _Day, prometheus: Prometheus, day: PriceSegment) -> None:
    async def read(metric: Metric, add: Callable[[Mapping[str, str], float], None]) -> None:
        async for _, labels, amount in read_growth(prometheus, metric, (day,)):
            add(labels, amount)

    def counted(labels: Mapping[str, str], amount: float, kind: str) -> None:
        row = found.of(labels, kind)
        row.sidecar = (row.sidecar or 0.0) + amount

    def logged(labels: Mapping[str, str], amount: float) -> None:
        row = found.of(labels, labels.get("kind", ""))
        row.logged = (row.logged or 0.0) + amount

    def worked(labels: Mapping[str, str], amount: float) -> None:
        row = found.of(labels, labels.get("kind", ""))
        row.engine = (row.engine or 0.0) + amount

    await read(sidecar.REQUESTS, lambda labels, amount: counted(labels, amount, "requests"))
    await read(sidecar.TOKENS, lambda labels, amount: counted(labels, amount, labels.get("type", "")))
    await read(reconciled.LOGGED, logged)
    for at_s, sign in ((day.from_s, -1), (day.to_s, 1)):
        for one in (await prometheus.as_of(promql.series(reconciled.OPEN), at_s)).series:
            amount = float(one.value[1]) if one.value else 0.0
            found.explain({**one.metric, "cause": "open"}, amount, sign, "in flight")
    await read(reconciled.ENGINE, worked)
    await read(reconciled.MISSING_IN_LOG, lambda labels, amount: found.explain(labels, amount, 1, "missing in log"))
    await read(reconciled.EXTRA_IN_LOG, lambda labels, amount: found.explain(labels, amount, -1, "extra in log"))
    await _add_cached(found, prometheus, day)


async def _add_cached(found: _Day, prometheus: Prometheus, day: PriceSegment) -> None:
    """Add cached tokens of finished requests by the engines' own series: prompt tokens less computed ones.

    Neither half of a prefill/decode pair knows them, and releases before 0.13 do not report them."""
    cached: dict[tuple[str, str], float] = {}
    skipped = set[tuple[str, str]]()
    for metric, sign in ((vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS, -1), (vllm.REQUEST_PROMPT_TOKENS, 1)):
        async for _, labels, amount in read_growth(prometheus, metric, (day,)):
            row = found.of(labels, "cached")
            key = row.cluster, row.model
            if promql.ROLE in labels or (sign > 0 and key not in cached):
                skipped.add(key)
            cached[key] = cached.get(key, 0.0) + sign * amount
    for key in cached.keys() - skipped:
        row = found.row(*key, "cached")
        if row.sidecar is not None:
            row.engine, row.logged = cached[key], row.sidecar


def _bound_cached(found: _Day) -> None:
    """Add bounds of the cached tokens that engines and records count differently.

    Engines count each of several texts, and requests of adapters under their model: no more cached tokens than prompt
    tokens. And an engine is not scraped when its log is read: what ended around midnight may be in the next day."""
    for (cluster, model, kind), row in found.rows.items():
        prompt = found.rows.get((cluster, model, "prompt"))
        if kind != "cached" or row.engine is None:
            continue
        if prompt is None or prompt.logged is None or prompt.sidecar is None:
            row.engine = row.logged = None
            continue
        more, late = prompt.logged - prompt.sidecar, row.high - row.low
        row.engine_low += min(0.0, more) - late
        row.engine_high += max(0.0, more) + late
        for name, bound in (("less", row.engine_low), ("more", row.engine_high)):
            if bound:
                row.causes[f"engines may have {name}, by prompt tokens"] = abs(bound)


def _add_segments(found: _Day, segments: Sequence[LogSegment]) -> None:
    """Add sums of segments. Models that the sidecar counts as __other__ are added there."""
    for segment in segments:
        sums = segment.sums
        values = (sums.requests, sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)
        model = _model_of(found, segment.cluster, segment.model)
        for kind, value in zip(KINDS, values, strict=True):
            found.row(segment.cluster, model, kind).segments += value


def _add_bounds(found: _Day, cluster: str, cause: str, sums: Mapping[str, Mapping[str, float]], sign: int) -> None:
    for partition, by_kind in sums.items():
        model = _model_of(found, cluster, partition)
        for kind, value in by_kind.items():
            if not value:
                continue
            row = found.row(cluster, model, kind)
            row.causes[cause] = row.causes.get(cause, 0.0) + value
            if sign > 0:
                row.high += value
            else:
                row.low -= value


def _model_of(found: _Day, cluster: str, partition: str) -> str:
    """Return the sidecar's name of a model partition."""
    if partition == OTHER_MODELS:
        return OTHER_MODELS
    name = UNKNOWN_MODEL if partition == NULL_PARTITION else layout.model_name(partition) or UNKNOWN_MODEL
    row = found.rows.get((cluster, name, "requests"))
    return name if row and row.sidecar is not None else OTHER_MODELS
