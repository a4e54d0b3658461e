"""PromQL rules for panels, alerts and recording rules, based on the catalogue. Prometheus accepts these mistakes.

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

Rule = Callable[[str, LabelsOf], Iterable[str]]  # takes an expression that parses


def only_grows(metric: Metric | None) -> bool:
    return metric is not None and metric.kind in (Kind.COUNTER, Kind.HISTOGRAM, Kind.SUMMARY)


def _raw_counter(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """Report counters used without a rate, an increase or a presence check."""
    for read in promql_ast.reads(expr):
        first = read.above[0] if read.above else ""
        if not only_grows(METRICS.get(read.name)):
            continue
        if first in _OF_GAUGES:
            yield f"{first}({read.name}): counter that resets with its process; use rate or increase"
        elif first not in (*_OF_COUNTERS, *_OF_BOTH) and not {"presence", "group", "count"} & set(read.above):
            yield f"{read.name} is a counter; use rate or increase"


def _rate_of_gauge(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """Report rates of gauges and of sums of counters. Recorded series are gauges."""
    for read in promql_ast.reads(expr):
        metric, first = METRICS.get(read.name), read.above[0] if read.above else ""
        if not only_grows(metric) and first in _OF_COUNTERS:
            kind = "not a counter" if metric is None else f"a {metric.kind}"
            yield f"{first}({read.name}): it is {kind}, so each decrease would count as a reset"
        late = (
            step
            for at, step in enumerate(read.above)
            if step in _OF_COUNTERS and set(read.above[:at]) & set(_AGGREGATIONS)
        )
        for step in list(late)[:1]:
            yield f"{step} is applied outside an aggregation of {read.name}: one restart shows as a jump of the sum"


def _buckets(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """Report sums over cumulative buckets without a quantile, a selected bound or a kept `le` label."""
    for name in cumulative(expr, labels_of):
        if "le" not in promql_ast.labels(expr, labels_of):
            yield f"{name} is cumulative: a sum over its buckets counts each observation several times"


def cumulative(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    """Yield bucket series used without a quantile and without a selected bound."""
    for read in promql_ast.reads(expr):
        picked = any(label == "le" for label, _, _ in read.matchers) or {"count", "presence"} & set(read.above)
        if "le" in labels_of(read.name) and not picked and not set(read.above) & set(_OF_BUCKETS):
            yield read.name


def _division(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    for divisor in promql_ast.unguarded(expr):
        yield f"divisor may be 0, which gives NaN; write ({divisor} > 0)"


def _made_up(expr: str, labels_of: LabelsOf) -> Iterator[str]:
    for side in promql_ast.made_up(expr):
        yield f"`or {side}` returns a value where there is no data"


RULES: dict[str, Rule] = {
    "raw-counter": _raw_counter,
    "rate-of-gauge": _rate_of_gauge,
    "buckets": _buckets,
    "labels": promql_ast.lost_labels,
    "division": _division,
    "made-up": _made_up,
}
