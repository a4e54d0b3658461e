"""Rules of PromQL for panels, alerts and recording rules alike, judged by the catalogue: Prometheus accepts what they
refuse.

Invariant: a rule reads the expression and the catalogue, never the code that made the expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from exporters.catalogue import EVERYTHING, promql_ast
from exporters.catalogue.metric import Kind, Metric
from exporters.catalogue.promql_ast import LabelsOf

METRICS: dict[str, Metric] = {sample: metric for metric in EVERYTHING for sample in metric.samples}
GROWTH = ("rate", "irate", "increase")
_OF_COUNTERS = (*GROWTH, "resets")
_OF_GAUGES = (
    "changes",
    "delta",
    "idelta",
    "deriv",
    "predict_linear",
    "double_exponential_smoothing",
    *(f"{how}_over_time" for how in ("min", "max", "avg", "sum", "quantile", "stddev", "stdvar", "mad")),
)
_OF_BOTH = (
    "last_over_time",
    "present_over_time",
    "count_over_time",
    "absent",
    "absent_over_time",
    "timestamp",
    "count",
    "group",
    "presence",
)
_AGGREGATIONS = ("sum", "avg", "min", "max", "count", "group", "stddev", "stdvar", "quantile")
_OF_BUCKETS = ("histogram_quantile", "histogram_fraction")

Rule = Callable[[str, LabelsOf], Iterable[str]]  # of an expression that parses


def only_grows(metric: Metric | None) -> bool:
    return metric is not None and metric.kind in (Kind.COUNTER, Kind.HISTOGRAM, Kind.SUMMARY)


def _raw_counter(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """A counter is only asked how it grows, or whether it is there."""
    for read in promql_ast.reads(expr):
        first = read.above[0] if read.above else ""
        if not only_grows(METRICS.get(read.name)):
            continue
        if first in _OF_GAUGES:
            yield f"{first}({read.name}): it only ever grows, and starts again with its process"
        elif first not in (*_OF_COUNTERS, *_OF_BOTH) and not {"presence", "group", "count"} & set(read.above):
            yield f"{read.name} only ever grows: ask for its rate or increase"


def _rate_of_gauge(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """A gauge is never asked how it grows, and neither is a sum of counters; what is recorded is a gauge."""
    for read in promql_ast.reads(expr):
        metric, first = METRICS.get(read.name), read.above[0] if read.above else ""
        if not only_grows(metric) and first in _OF_COUNTERS:
            kind = "no counter" if metric is None else f"a {metric.kind}"
            yield f"{first}({read.name}): it is {kind}, and every fall would pass for a restart"
        late = (
            step
            for at, step in enumerate(read.above)
            if step in _OF_COUNTERS and set(read.above[:at]) & set(_AGGREGATIONS)
        )
        for step in list(late)[:1]:
            yield f"{step} stands outside an aggregation of {read.name}: a restart of one shows as a jump of all"


def _buckets(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """Buckets are cumulative: they go through a quantile, or one bound is picked, or the answer keeps them apart."""
    for name in cumulative(expr, labels_of):
        if "le" not in promql_ast.labels(expr, labels_of):
            yield f"{name} is cumulative: a sum over its buckets counts an observation once for each"


def cumulative(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """Yield the series of buckets that go through no quantile and of which no bound is picked."""
    for read in promql_ast.reads(expr):
        picked = any(label == "le" for label, _, _ in read.matchers) or {"count", "presence"} & set(read.above)
        if "le" in labels_of(read.name) and not picked and not set(read.above) & set(_OF_BUCKETS):
            yield read.name


def _division(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    for divisor in promql_ast.unguarded(expr):
        yield f"it divides by what may be 0, and NaN compares with nothing; write ({divisor} > 0)"


def _made_up(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    for side in promql_ast.made_up(expr):
        yield f"`or {side}` answers where there is nothing"


RULES: dict[str, Rule] = {
    "raw-counter": _raw_counter,
    "rate-of-gauge": _rate_of_gauge,
    "buckets": _buckets,
    "labels": promql_ast.lost_labels,
    "division": _division,
    "made-up": _made_up,
}
