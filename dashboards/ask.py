"""The questions of the catalogue, asked of what a board's variables select. Boards read like a table of contents because of it.

Each function gives one Query: PromQL with the matchers that the metric can bear, a legend from its labels, the unit of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.model import RATE, Query, shown_unit
from exporters.catalogue import ours, promql
from exporters.catalogue.component import Component, shown_by
from exporters.catalogue.metric import Metric, Unit
from exporters.catalogue.prometheus import ALERTS
from exporters.catalogue.promql import BY

_ENGINE = ("cluster", "namespace", "job", "instance")


def where(metric: Metric, *extra: str) -> tuple[str, ...]:
    """Matchers for everything that the board's variables may narrow down. All of them are `.*` by default, which a missing label matches too.

    The choices of namespace, job and instance are those of engines, so they are asked of engines only: on Kubernetes the watchers, exporters,
    sidecar and gateway may well run in another namespace, and a choice must not silence them."""
    labels = _ENGINE if shown_by(metric) is Component.ENGINE else () if shown_by(metric) is Component.RULES else ("cluster",)
    own = tuple(label for label in ("model_name", "team") if label in metric.labels)
    return (*(f'{label}=~"${label}"' for label in (*labels, *own)), *extra)


def legend(by: Sequence[str], prefix: str = "") -> str:
    return " ".join(filter(None, (prefix, *(f"{{{{{label}}}}}" for label in by)))) or "all"


def rate(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = "") -> Query:
    """How fast a counter grows."""
    expr = promql.per_second(metric, RATE, by, where(metric, *only), offset)
    return Query(expr, legend(by, called), shown_unit(metric.unit, per_second=True))


def growth(metric: Metric, window: str = RATE, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = ()) -> Query:
    """By how much a counter grew; for things that are rare enough to be counted one by one."""
    return Query(promql.growth(metric, window, by, where(metric, *only)), legend(by, called), shown_unit(metric.unit))


def now(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = "") -> Query:
    """A gauge as it stands."""
    return Query(promql.current(metric, by, where(metric, *only), offset), legend(by, called), shown_unit(metric.unit))


def worst(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = "") -> Query:
    """The highest of a gauge's series."""
    return Query(promql.worst(metric, by, where(metric, *only), offset), legend(by, called), shown_unit(metric.unit))


def quantile(q: float, metric: Metric, by: Sequence[str] = BY, called: str = "", offset: str = "") -> Query:
    """Return a percentile of a histogram. A legend that ends in < or > says that the value is a bound of the buckets, and the percentile beyond it.

    Where the buckets carry traces, they come along."""
    expr = promql.bounded_quantile(q, metric, RATE, by, where(metric), offset)
    return Query(expr, legend((*by, promql.BOUND), called), shown_unit(metric.unit), exemplars=metric in ours.TRACED)


def resolved(q: float, metric: Metric, by: Sequence[str] = BY, called: str = "") -> Query:
    """Return a percentile for the column of a table: no value where only a bound is known."""
    return Query(promql.resolved_quantile(q, metric, RATE, by, where(metric)), legend(by, called), shown_unit(metric.unit))


def p95(metric: Metric, by: Sequence[str] = BY, called: str = "", offset: str = "") -> Query:
    return quantile(0.95, metric, by, called, offset)


def mean(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = "") -> Query:
    """The mean of a histogram or summary."""
    return Query(promql.mean(metric, RATE, by, where(metric, *only), offset), legend(by, called), shown_unit(metric.unit))


def events(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = ()) -> Query:
    """How many observations a histogram or summary takes per second."""
    return Query(promql.events(metric, RATE, by, where(metric, *only)), legend(by, called), shown_unit(Unit.COUNT, per_second=True))


def amount(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = ()) -> Query:
    """How fast the sum of a histogram or summary grows; of seconds that is how many were in that state at once, so it is shown as a number."""
    unit = shown_unit(Unit.COUNT) if metric.unit is Unit.SECONDS else shown_unit(metric.unit, per_second=True)
    return Query(promql.amount(metric, RATE, by, where(metric, *only)), legend(by, called), unit)


def share(
    part: Metric, whole: Metric, by: Sequence[str] = BY, called: str = "", part_only: Sequence[str] = (), only: Sequence[str] = (), offset: str = ""
) -> Query:
    """One counter in another, 0 to 1."""
    expr = promql.share(part, whole, RATE, by, part_only, where(whole, *only), offset)
    return Query(expr, legend(by, called), shown_unit(Unit.RATIO))


def heat(metric: Metric) -> Query:
    """A distribution over time."""
    return Query(promql.buckets(metric, RATE, (), where(metric)), "{{le}}", shown_unit(metric.unit))


def firing(by: Sequence[str], called: str = "firing") -> Query:
    """How many alerts of ours fire right now, as a column of a table. No variable narrows them: an alert has the labels of what it watches."""
    alerts = promql.series(ALERTS, ('alertstate="firing"', 'alertname=~"VLLM.*"'))
    return Query(f"count by ({', '.join(by)}) ({alerts})", called, shown_unit(Unit.COUNT))
