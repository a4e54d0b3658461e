"""Queries of panels: catalogue metrics filtered by a dashboard's variables. Boards read like a table of contents
because of it.

Each function gives one Query: PromQL with the matchers that the metric can bear, a legend from its labels, the unit of
the catalogue."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dashboards.model import RATE, Query, shown_unit
from exporters.catalogue import promql, sidecar
from exporters.catalogue.metric import Metric, Unit
from exporters.catalogue.producers import Component, shown_by
from exporters.catalogue.prometheus import ALERTS
from exporters.catalogue.promql import BY

RESOLVED = 0.95  # the percentile that panels are read for, and so the one whose bucket is shown
ENGINE = ("cluster", "namespace", "job", "instance")
RANGE = "$__range"
SHOWN = 8  # of teams and the like: as many lines as one can tell apart
OTHERS = "others"
TEAM = ("team",)
# Requests whose key or model nobody knows: the sidecar counts them under reserved names, where nearly all are rejected
# by their nature.
UNKNOWN, KNOWN = ('model_name=~"__unknown__|__other__"',), ('model_name!~"__unknown__|__other__"',)


def where(metric: Metric, *extra: str) -> tuple[str, ...]:
    """Matchers for everything that the board's variables may narrow down. All of them are `.*` by default, which a
    missing label matches too.

    The choices of namespace, job and instance are those of engines, so they are asked of engines only: on Kubernetes
    the watchers, exporters, sidecar and gateway may well run in another namespace, and a choice must not silence
    them."""
    labels = (
        ENGINE if shown_by(metric) is Component.ENGINE else () if shown_by(metric) is Component.RULES else ("cluster",)
    )
    own = tuple(label for label in ("model_name", "team") if label in metric.labels)
    return (*(f'{label}=~"${label}"' for label in (*labels, *own)), *extra)


def legend(by: Sequence[str], prefix: str = "") -> str:
    return " ".join(filter(None, (prefix, *(f"{{{{{label}}}}}" for label in by)))) or "all"


def rate(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = "") -> Query:
    """Return the rate of a counter."""
    expr = promql.per_second(metric, RATE, by, where(metric, *only), offset)
    return Query(expr, legend(by, called), shown_unit(metric.unit, per_second=True))


def growth(
    metric: Metric, window: str = RATE, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = ()
) -> Query:
    """By how much a counter grew; for things that are rare enough to be counted one by one."""
    return Query(promql.growth(metric, window, by, where(metric, *only)), legend(by, called), shown_unit(metric.unit))


def now(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = "") -> Query:
    """A gauge as it stands."""
    return Query(promql.current(metric, by, where(metric, *only), offset), legend(by, called), shown_unit(metric.unit))


def worst(
    metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = ""
) -> Query:
    """The highest of a gauge's series."""
    return Query(promql.worst(metric, by, where(metric, *only), offset), legend(by, called), shown_unit(metric.unit))


def quantile(q: float, metric: Metric, by: Sequence[str] = BY, called: str = "", offset: str = "") -> Query:
    """Return a percentile of a histogram. A legend that ends in < or > says that the value is a bound of the buckets,
    and the percentile beyond it.

    Beside a p95 of vLLM's own stand the bounds of its bucket, as "at least" and "at most": what its value is certain to
    within. By engine there is no room for them. Where the buckets carry traces, they come along."""
    resolution = q == RESOLVED and not offset and "instance" not in by
    expr = promql.bounded_quantile(
        q, metric, RATE, by, where(metric), offset, resolution=resolution and not metric.native
    )
    return Query(expr, legend((*by, promql.BOUND), called), shown_unit(metric.unit), exemplars=metric in sidecar.TRACED)


def resolved(q: float, metric: Metric, by: Sequence[str] = BY, called: str = "") -> Query:
    """Return a percentile for the column of a table: no value where only a bound is known."""
    return Query(
        promql.resolved_quantile(q, metric, RATE, by, where(metric)), legend(by, called), shown_unit(metric.unit)
    )


def p95(metric: Metric, by: Sequence[str] = BY, called: str = "", offset: str = "") -> Query:
    return quantile(RESOLVED, metric, by, called, offset)


def stat_p95(metric: Metric, by: Sequence[str] = BY) -> Query:
    """Return a p95 for a large number: without the bounds of its bucket, for which there is no room."""
    expr = promql.bounded_quantile(RESOLVED, metric, RATE, by, where(metric), "", resolution=False)
    return Query(expr, legend((*by, promql.BOUND), ""), shown_unit(metric.unit))


def mean(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = (), offset: str = "") -> Query:
    """The mean of a histogram or summary."""
    return Query(
        promql.mean(metric, RATE, by, where(metric, *only), offset), legend(by, called), shown_unit(metric.unit)
    )


def events(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = ()) -> Query:
    """Return how many observations a histogram or summary takes per second."""
    return Query(
        promql.events(metric, RATE, by, where(metric, *only)),
        legend(by, called),
        shown_unit(Unit.COUNT, per_second=True),
    )


def amount(metric: Metric, by: Sequence[str] = BY, called: str = "", only: Sequence[str] = ()) -> Query:
    """Return how fast the sum of a histogram or summary grows; of seconds that is how many were in that state at once,
    so it is shown as a number."""
    unit = shown_unit(Unit.COUNT) if metric.unit is Unit.SECONDS else shown_unit(metric.unit, per_second=True)
    return Query(promql.amount(metric, RATE, by, where(metric, *only)), legend(by, called), unit)


def share(
    part: Metric,
    whole: Metric,
    by: Sequence[str] = BY,
    called: str = "",
    part_only: Sequence[str] = (),
    only: Sequence[str] = (),
    offset: str = "",
) -> Query:
    """One counter in another, 0 to 1."""
    expr = promql.share(part, whole, RATE, by, part_only, where(whole, *only), offset)
    return Query(expr, legend(by, called), shown_unit(Unit.RATIO))


def heat(metric: Metric) -> Query:
    """A distribution over time."""
    return Query(promql.buckets(metric, RATE, (), where(metric)), "{{le}}", shown_unit(metric.unit))


def ranked(
    query: Query, rank: str, by: Sequence[str] = TEAM, rest: str = "sum", keep: Sequence[str] = ()
) -> tuple[Query, Query]:
    """Return the SHOWN highest of a query with one value for each of `by`, and all others together as one.

    rank: PromQL over RANGE with one value for each of `by`. It is asked at the end of the shown range, so that the same
    lines stay for all of it.
    rest: how the others are put together; max for what cannot be added, such as a percentile. keep: labels by which the
    others stay apart."""
    on, apart = ", ".join(by), f" by ({', '.join(keep)})" if keep else ""
    called = OTHERS if rest == "sum" else f"{OTHERS}, at most"
    return (
        Query(f"({query.expr}) and on ({on}) {_top(rank)}", query.legend, query.unit, query.exemplars),
        Query(
            f"{rest}{apart} (({query.expr}) unless on ({on}) {_top(rank)})",
            f"{called} {legend(keep)}" if keep else called,
            query.unit,
        ),
    )


def ranked_ratio(above: str, below: str, rank: str, unit: str) -> tuple[Query, Query]:
    """Return one answer over another by team as `ranked` does: that of the others is their sum over their sum."""
    each, others = (
        promql.per(above, below),
        promql.per(*(f"sum({expr} unless on (team) {_top(rank)})" for expr in (above, below))),
    )
    if unit == shown_unit(Unit.RATIO):  # two counters read one after the other may pass each other for a moment
        each, others = f"clamp_max({each}, 1)", f"clamp_max({others}, 1)"
    return Query(f"{each} and on (team) {_top(rank)}", legend(TEAM), unit), Query(others, OTHERS, unit)


def ranked_share(
    part: Metric, whole: Metric, part_only: Sequence[str] = (), only: Sequence[str] = ()
) -> tuple[Query, Query]:
    """Return a share by team as `ranked` does, ranked by the part."""
    at, below = where(whole, *only), promql.per_second(whole, RATE, TEAM, where(whole, *only))
    above = f"({promql.per_second(part, RATE, TEAM, (*at, *part_only))} or {below} * 0)"
    return ranked_ratio(above, below, promql.growth(part, RANGE, TEAM, (*at, *part_only)), shown_unit(Unit.RATIO))


def ranked_rate(metric: Metric, by: Sequence[str] = TEAM, only: Sequence[str] = ()) -> tuple[Query, Query]:
    """Return how fast a counter grows as `ranked` does, ranked by its growth."""
    return ranked(rate(metric, by, only=only), promql.growth(metric, RANGE, by, where(metric, *only)), by)


def ranked_now(metric: Metric, by: Sequence[str] = TEAM) -> tuple[Query, Query]:
    """Return a gauge as `ranked` does, ranked by its average."""
    return ranked(now(metric, by), promql.average(metric, RANGE, by, where(metric)), by)


def ranked_p95(metric: Metric) -> tuple[Query, Query]:
    """Return a 95th percentile by team as `ranked` does, ranked by the mean; of the others the highest."""
    return ranked(p95(metric, TEAM), promql.mean(metric, RANGE, TEAM, where(metric)), rest="max", keep=(promql.BOUND,))


def ranked_coarse_p95(metric: Metric, by: Sequence[str]) -> tuple[Query, Query]:
    """Return a 95th percentile of a family with few classic buckets as `ranked` does, ranked by the mean."""
    return ranked(stat_p95(metric, by), promql.mean(metric, RANGE, by, where(metric)), by, "max")


def _top(rank: str) -> str:
    return f"topk({SHOWN}, {rank.replace(f'[{RANGE}]', f'[{RANGE}] @ end()')})"


def of_team(query: Query, team: str) -> Query:
    """Return the query of a metric with the label team, restricted to one team and without any variable."""
    pinned = query.expr.replace('team=~"$team"', promql.equals("team", team))
    return replace(query, expr=re.sub(r'\b(cluster|model_name)=~"\$\1",\s*', "", pinned))


def shortened(query: Query, label: str) -> Query:
    """Return the query with the last two parts of a label that holds a path in its legend, such as
    .../_data/requests.jsonl."""
    expr = (
        f'label_replace(label_replace({query.expr}, "file", "$1", "{label}", "(.*)"), "file", ".../$1", "{label}",'
        ' ".*/([^/]+/[^/]+)")'
    )
    return Query(expr, query.legend.replace(f"{{{{{label}}}}}", "{{file}}"), query.unit, query.exemplars)


def firing(by: Sequence[str], called: str = "firing") -> Query:
    """Return how many alerts of ours fire right now, as a column of a table. No variable narrows them: an alert has the
    labels of what it watches."""
    alerts = promql.series(ALERTS, ('alertstate="firing"', 'alertname=~"VLLM.*"'))
    return Query(f"count by ({', '.join(by)}) ({alerts})", called, shown_unit(Unit.COUNT))
