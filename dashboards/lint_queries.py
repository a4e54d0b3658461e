"""Lint rules for a query of a panel, a variable or an annotation."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from alerts.registry import RECORDINGS
from dashboards import queries as query_builders
from dashboards.lint_model import LintedQuery, Messages, ask_safely, labels_of, variables_in
from exporters.catalogue import promql_ast, promql_lint
from exporters.catalogue.metric import Across, Kind, Unit
from exporters.catalogue.promql import BOUND
from exporters.catalogue.promql_ast import BadExpression
from exporters.catalogue.promql_lint import GROWTH, METRICS

_LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")

_RECORDED = {recording.record for recording in RECORDINGS}
_ADDED_UP = ("sum", "sum_over_time")
_NO_LONGER_ITSELF = (
    "*",
    "/",
    "%",
    "^",
    "count",
    "count_over_time",
    "group",
    "presence",
    "changes",
    "absent",
    "timestamp",
)


def _labels_of_buckets(sample: str) -> frozenset[str]:
    return frozenset({"le"}) if sample in METRICS and sample.endswith("_bucket") else frozenset()


def _parses(query: LintedQuery) -> Messages:
    try:
        promql_ast.parse(query.text)
    except BadExpression as error:
        yield str(error)


def _known_series(query: LintedQuery) -> Messages:
    """A board shows what it says without any rule of ours being loaded."""
    for read in query.reads:
        if read.name in _RECORDED:
            yield f"{read.name} is recorded by our rules; a board works without them"
        elif read.name not in METRICS:
            yield f"{read.name or 'a selector without a name'} is not in the catalogue"


def _known_variables(query: LintedQuery) -> Messages:
    known = {str(variable.get("name")) for variable in query.board.variables}
    for name in sorted(variables_in(query.text) - known):
        yield f"the board has no variable ${name}"


def _matchers(query: LintedQuery) -> Messages:
    """dashboard-linter's target-job and target-instance: what a series can be narrowed by, each of its selectors is; by
    regular expression, since several values can be chosen. That the board has these variables is query-variables'
    business."""
    several = {str(v.get("name")) for v in query.board.variables if v.get("multi")}
    for read, metric in query.series:
        for label, op, value in read.matchers:
            if op in ("=", "!=") and variables_in(value) & several:
                yield f"{read.name}: {label} {op} {value} fails when two are chosen; write =~"
        have = {(label, value.strip("${}")) for label, op, value in read.matchers if op == "=~"}
        missing = [
            label
            for label in (wanted.split("=~")[0] for wanted in query_builders.where(metric))
            if (label, label) not in have
        ]
        if missing and query.panel:
            yield f"{read.name} is not narrowed by {', '.join('$' + label for label in missing)}"


def _rate_interval(query: LintedQuery) -> Messages:
    instant = bool(query.raw.get("instant"))
    allowed = ("$__rate_interval", "${__rate_interval}", *(("$__range", "${__range}") if instant else ()))
    for read in query.reads:
        # who is shown is decided once, over all that is shown
        if "topk" in read.above and read.window == query_builders.RANGE:
            continue
        if read.above and read.above[0] in GROWTH and read.window not in allowed:
            yield (
                f"{read.above[0]}({read.name}[{read.window}]): the window follows the zoom, {' or '.join(allowed[::2])}"
            )


def _shared(rule: promql_lint.Rule, query: LintedQuery) -> Messages:
    yield from ask_safely(lambda text: list(rule(text, labels_of)), query.text)


def _rate_of_gauge(query: LintedQuery) -> Messages:
    """Find rates of gauges, among series of the catalogue; another rule reports unknown ones."""
    if all(read.name in METRICS for read in query.reads):
        yield from _shared(promql_lint.RULES["rate-of-gauge"], query)


def _buckets(query: LintedQuery) -> Messages:
    """Apply the rules of alerts, and require a heatmap for a panel that keeps buckets apart."""
    if query.panel is None or query.panel.kind != "heatmap":
        for name in ask_safely(lambda text: list(promql_lint.cumulative(text, _labels_of_buckets)), query.text):
            yield f"{name} is cumulative: it belongs into histogram_quantile or on a heatmap"


def _legend(query: LintedQuery) -> Messages:
    try:
        kept = promql_ast.some_labels(query.text, labels_of)
    except BadExpression:
        return
    # which what is recorded may have
    for label in sorted(set(_LEGEND_LABEL.findall(query.legend)) - set(kept) - {BOUND}):
        yield f"the legend names {label}, which the answer does not have"


def _sums(query: LintedQuery) -> Messages:
    """Two engines whose cache is 40 % full are not one whose cache is 80 % full."""
    for read, metric in query.series:
        if metric.kind is not Kind.GAUGE or metric.across is Across.SUM or metric.unit is Unit.FLAG:
            continue
        for step in read.above:
            if step in _NO_LONGER_ITSELF or step.endswith(" bool"):
                break
            if step in _ADDED_UP:
                yield f"{read.name} is not added up: its engines combine by {metric.across}"


QUERY_RULES: dict[str, Callable[[LintedQuery], Messages]] = {
    "query-promql": _parses,
    "query-series": _known_series,
    "query-variables": _known_variables,
    "query-matchers": _matchers,
    "query-rate-interval": _rate_interval,
    **{f"query-{name}": partial(_shared, rule) for name, rule in promql_lint.RULES.items()},
    "query-rate-of-gauge": _rate_of_gauge,
    "query-buckets": _buckets,
    "query-legend": _legend,
    "query-sum": _sums,
}
