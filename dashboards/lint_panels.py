"""Lint rules for a panel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from dashboards.lint_model import DATASOURCE, LintedDashboard, LintedPanel, Messages, ask_safely, variables_in
from exporters.catalogue import promql_ast

# Grafana's names, as far as our series call for them (packages/grafana-data/src/valueFormats/categories.ts), and its
# custom forms.
UNITS = frozenset({
    "none", "short", "percentunit", "s", "ms", "dateTimeAsIso", "dateTimeFromNow", "bytes", "Bps", "joule", "watt",
    "kwatth", "celsius", "hertz",
    "rothz", "reqps", "ops", "cps", "cpm", "bool", "bool_on_off", "bool_yes_no", "currencyUSD", "currencyEUR",
})  # fmt: skip
CUSTOM_UNITS = ("suffix:", "prefix:", "currency:", "si:", "time:")

PANEL_TYPES = frozenset({
    "row", "timeseries", "stat", "table", "heatmap", "gauge", "bargauge", "barchart", "histogram", "piechart",
    "state-timeline",
    "status-history", "text",
})  # fmt: skip
REPLACED_TYPES = {
    "graph": "timeseries",
    "singlestat": "stat",
    "table-old": "table",
    "grafana-piechart-panel": "piechart",
}

_HUES = ("green", "yellow", "red", "blue", "orange", "purple")
_COLOURS = {shade + hue for hue in _HUES for shade in ("", "dark-", "semi-dark-", "light-", "super-light-")} | {
    "text",
    "transparent",
}
_COLOUR_CODE = re.compile(r"#[0-9a-fA-F]{3,8}|rgba?\([\d., ]+\)")
_PERCENTILE = re.compile(r"\bp(\d{1,2}(?:\.\d+)?)\b")


def _panel_type(panel: LintedPanel) -> Messages:
    if panel.kind in REPLACED_TYPES:
        yield f"{panel.kind} was removed; {REPLACED_TYPES[panel.kind]} took its place"
    elif panel.kind not in PANEL_TYPES:
        yield f"{panel.kind!r} is no panel that every Grafana has"
    if panel.asks and not panel.raw.get("pluginVersion"):
        yield "without a pluginVersion Grafana takes it for its oldest form"


def _panel_text(panel: LintedPanel) -> Messages:
    if not panel.raw.get("title"):
        yield "a panel has a title"
    if panel.asks and not panel.raw.get("description"):
        yield "a panel has a description"


def _panel_unit(panel: LintedPanel) -> Messages:
    if panel.asks and not panel.defaults.get("unit"):
        yield "a figure has a unit"
    for unit in panel.configured("unit"):
        if unit not in UNITS and not str(unit).startswith(CUSTOM_UNITS):
            yield f"Grafana, or our list, does not know the unit {unit!r}"


def _panel_no_value(panel: LintedPanel) -> Messages:
    if panel.asks and not panel.defaults.get("noValue"):
        yield "an empty panel says why it is empty: noValue"


def _panel_targets(panel: LintedPanel) -> Messages:
    if panel.asks and not any(target.get("expr") for target in panel.targets):
        yield "it asks nothing"
    refs = Counter(target.get("refId") for target in panel.targets)
    if panel.asks and (None in refs or max(refs.values(), default=0) > 1):
        yield "every query of a panel has a letter of its own"


def _panel_datasource(panel: LintedPanel) -> Messages:
    if panel.asks and panel.raw.get("datasource") != DATASOURCE:
        yield f"the panel's data source is {DATASOURCE}"
    for target in panel.targets:
        if target.get("datasource") != DATASOURCE:
            yield f"the data source of query {target.get('refId')} is {DATASOURCE}"


def _panel_format(panel: LintedPanel) -> Messages:
    """A table of a range repeats each row for every step; a heatmap sorts buckets only in its own format."""
    for target in panel.targets:
        instant, form = bool(target.get("instant")), target.get("format", "time_series")
        if instant is bool(target.get("range", not instant)):
            yield f"query {target.get('refId')} is either instant or over the range"
        if panel.kind == "table" and not (instant and form == "table"):
            yield f"query {target.get('refId')} of a table is instant and in table format"
        if panel.kind == "heatmap" and (instant or form != "heatmap"):
            yield f"query {target.get('refId')} of a heatmap is over the range and in heatmap format"
        if panel.kind == "timeseries" and (instant or form != "time_series"):
            yield f"query {target.get('refId')} of a line is over the range and in time series format"


def _panel_thresholds(panel: LintedPanel) -> Messages:
    for thresholds in panel.configured("thresholds"):
        steps = thresholds.get("steps") or []
        if not steps or steps[0].get("value", 0) is not None:
            yield "the first threshold step is the base: its value is null"
        edges = [step.get("value") for step in steps[1:]]
        if any(edge is None for edge in edges) or any(a >= b for a, b in pairwise(edges)):
            yield f"threshold steps rise, not {edges}"
        for step in steps:
            colour = str(step.get("color", ""))
            if colour not in _COLOURS and not _COLOUR_CODE.fullmatch(colour):
                yield f"Grafana does not know the colour {colour!r}"


def _panel_links(panel: LintedPanel) -> Messages:
    for link in panel.links:
        if not link.get("title"):
            yield "a link has a title"
        yield from bad_url(str(link.get("url", "")), panel.board)


def bad_url(url: str, board: LintedDashboard) -> Messages:
    plain = re.sub(r"\$\{[\w.:]+\}", "x", url)
    if not re.fullmatch(r"(https?://[^\s/]+|/)\S*", plain) or re.search(r"[${}]", plain):
        yield f"{url!r} is no address: http(s)://... or /d/uid"
    known = {str(variable.get("name")) for variable in board.variables}
    for name in sorted(variables_in(url) - known):
        yield f"the address {url!r} takes along ${name}, which the board does not have"


def _panel_percentile(panel: LintedPanel) -> Messages:
    """A title that says p95 shows a p95, and a quantile is called by its name: in the title, or in the legends when
    there are several."""
    asked = {
        query: [f"{round(q * 100, 6):g}" for q in ask_safely(promql_ast.quantiles, query.text)]
        for query in panel.queries
    }
    distinct = {q for qs in asked.values() for q in qs}
    title = set(_PERCENTILE.findall(str(panel.raw.get("title", ""))))
    if panel.asks and title - distinct:
        yield f"the title says p{min(title - distinct)} and no query asks for it"
    for query, qs in asked.items():
        named = set(_PERCENTILE.findall(query.legend)) | (title if len(distinct) == 1 else set())
        for q in qs:
            if q not in named:
                yield f"query {query.raw.get('refId')} asks for p{q}; neither the title nor its legend says so"
        if qs and set(_PERCENTILE.findall(query.legend)) - set(qs):
            yield f"the legend of query {query.raw.get('refId')} names another percentile than p{qs[0]}"


PANEL_RULES: dict[str, Callable[[LintedPanel], Messages]] = {
    "panel-type": _panel_type,
    "panel-title-description": _panel_text,
    "panel-unit": _panel_unit,
    "panel-no-value": _panel_no_value,
    "panel-no-targets": _panel_targets,
    "panel-datasource": _panel_datasource,
    "panel-format": _panel_format,
    "panel-thresholds": _panel_thresholds,
    "panel-links": _panel_links,
    "panel-percentile": _panel_percentile,
}
