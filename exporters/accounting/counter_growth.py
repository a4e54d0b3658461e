"""Increase of counters over the segments of a period, from their stored samples, without extrapolation.

Invariant: the increases of adjacent segments sum to that of both, because each starts at the sample with which the one
before it ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exporters.accounting.billing_period import PriceSegment
from exporters.catalogue import promql
from exporters.catalogue.metric import Metric
from exporters.net.prometheus import Prometheus, QueryResult, QuerySeries

STEP_S = 300.0  # Prometheus shows a sample for 5 min: a larger step could miss the last one of a target that left
LOOK_BACK = "1d"  # last samples before a period, across a gap of the store

_Key = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class StepRange:
    """Range of a query in steps of STEP_S."""

    start_s: float
    end_s: float
    step_s: float = STEP_S


@dataclass(slots=True)
class CounterGrowth:
    """Increase of the series of one counter, from their samples in order of time.

    A counter that falls restarted from 0. A series that is new at a target already seen counts from 0; the first
    series of a new target do not, because part of their value may be from before the period."""

    own_labels: frozenset[str]
    _last: dict[_Key, float] = field(default_factory=dict)
    _targets: set[_Key] = field(default_factory=set)

    def start(self, series: Iterable[QuerySeries]) -> None:
        """Set the values before the first segment, from an instant query."""
        for each in series:
            if each.value:
                self._last[_key(each.metric)] = float(each.value[1])
                self._targets.add(self._target(each.metric))

    def add(self, series: Sequence[QuerySeries]) -> list[tuple[Mapping[str, str], float]]:
        """Add the samples of a range query; return the increase of each series."""
        first: dict[_Key, float] = {}
        for each in series:
            target = self._target(each.metric)
            first[target] = min(first.get(target, float("inf")), each.values[0][0] if each.values else float("inf"))
        found: list[tuple[Mapping[str, str], float]] = [
            (each.metric, self._increase(each, first)) for each in series if each.values
        ]
        self._targets.update(first)
        return found

    def _increase(self, series: QuerySeries, first: Mapping[_Key, float]) -> float:
        key, target = _key(series.metric), self._target(series.metric)
        begin_s, begin = series.values[0]
        if (last := self._last.get(key)) is None:
            last = 0.0 if target in self._targets or first[target] < begin_s else float(begin)
        grown = 0.0
        for _, text in series.values:
            value = float(text)
            grown += value - last if value >= last else value
            last = value
        self._last[key] = last
        return grown

    def _target(self, labels: Mapping[str, str]) -> _Key:
        return frozenset(one for one in labels.items() if one[0] not in self.own_labels and one[0] != "__name__")


def _key(labels: Mapping[str, str]) -> _Key:
    return frozenset(labels.items())


async def read_growth(
    prometheus: Prometheus, metric: Metric, cut: Sequence[PriceSegment]
) -> AsyncIterator[tuple[int, Mapping[str, str], float]]:
    """Yield the number of a segment, the labels of a series and its increase. Raises ValueError with a sentence."""
    growth = CounterGrowth(frozenset(metric.labels))
    growth.start(_series(await prometheus.as_of(promql.last_samples(metric, LOOK_BACK), cut[0].from_s)))
    query = promql.stored(metric)
    for number, segment in enumerate(cut):
        inside = _series(await prometheus.over_time(query, StepRange(segment.from_s, segment.to_s)))
        for labels, amount in growth.add(inside):
            yield number, labels, amount
        if (segment.to_s - segment.from_s) % STEP_S:
            end = _series(await prometheus.as_of(query, segment.to_s))
            for labels, amount in growth.add([QuerySeries(each.metric, [each.value]) for each in end if each.value]):
                yield number, labels, amount


def _series(answer: QueryResult) -> Sequence[QuerySeries]:
    if answer.error:
        raise ValueError(answer.error)
    return answer.series
