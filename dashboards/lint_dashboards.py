"""Lint rules for a whole dashboard, and for all dashboards together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from dashboards import queries as query_builders
from dashboards.lint_model import DATASOURCE, LintedDashboard, Messages, PlacedMessages, labels_of, variables_in
from dashboards.lint_panels import bad_url
from dashboards.model import COLUMNS
from exporters.catalogue import promql_ast, sidecar
from exporters.catalogue.promql_ast import BadExpression
from exporters.catalogue.promql_lint import METRICS
from exporters.text import parse_duration

TAG = "vllm-watch"
SCHEMA_VERSION = 39  # loads in Grafana 10.4 to 13
REFRESH_AT_LEAST_S = 30
VISIBLE_PANELS = 20
UID_LETTERS = 40

# Boards that vLLM and production-stack ship. An import with one of these uids replaces theirs; some of theirs replace
# each other. Sources: vllm-project/vllm examples/{observability,online_serving,production_monitoring},
# vllm-project/production-stack helm/dashboards, observability and tutorials/terraform, as of August 2026.
TAKEN_UIDS = {
    "b281712d-8bff-41ef-9f3f-71ad43c05e9b": (
        "vllm prometheus_grafana/grafana.json, production-stack vllm-model-metrics-dashboard.json"
    ),
    "performance-statistics": "vllm dashboards/grafana/performance_statistics.json",
    "query-statistics4": "vllm dashboards/grafana/query_statistics.json",
    "vllm-overview": "vllm dashboards/grafana/vllm_overview.json",
    "vllm-instances": "vllm dashboards/grafana/vllm_instances.json",
    "vllm-kv-cache": "vllm dashboards/grafana/vllm_kv_cache.json",
    "vllm-status": "vllm dashboards/grafana/vllm_service_status.json",
    "vllm-spec-decode": "vllm dashboards/grafana/vllm_speculative_decoding.json",
    "vllm-fleet-qwen3-235b": "vllm prometheus_grafana/k8s-monitoring/grafana-dashboard.json",
    "750918234": "production-stack helm/dashboards/vllm-dashboard.json",
    "deftu32yowqv4e": "production-stack helm/dashboards/lmcache-dashboard.json",
}
LEGACY_KEYS = {
    "dashboard": {"rows", "hideControls", "sharedCrosshair", "style", "gnetId", "__inputs", "__elements", "__requires",
        "iteration"},
    "panel": {"span", "minSpan", "height", "editable", "error", "renderer", "nullPointMode", "xaxis", "yaxes", "xAxis",
        "yAxis", "lines", "fill",
              "linewidth", "seriesOverrides", "valueName", "sparkline", "styles", "columns", "cards", "dataFormat",
              "isNew", "grid", "alert",
              "aliasColors", "bars", "steppedLine", "tooltip", "legend", "heatmap", "color", "highlightCards",
              "hideZeroBuckets", "fontSize",
              "mappings", "sort", "scroll", "showHeader", "transform"},
    "target": {"intervalFactor", "step", "metric", "target", "query", "textEditor"},
    "timepicker": {"time_options"},
    "variable": {"useTags", "tagsQuery", "tagValuesQuery", "tags", "allFormat", "multiFormat", "refresh_on_load"},
}  # fmt: skip
_LABEL_VALUES = re.compile(r"label_values\(\s*(?P<source>.+?)\s*,\s*(?P<label>\w+)\s*\)", re.DOTALL)
_BARE_LABEL_VALUES = re.compile(r"label_values\(\s*\w+\s*\)")
_BOARD_LINK = re.compile(r"^/d/([\w-]+)")


def _identity(board: LintedDashboard) -> PlacedMessages:
    if not board.raw.get("title"):
        yield board.uid, "the board has no title"
    if not re.fullmatch(rf"[\w-]{{1,{UID_LETTERS}}}", board.uid):
        yield board.uid, f"a uid has 1 to {UID_LETTERS} letters, digits, - or _"
    if owner := TAKEN_UIDS.get(board.uid):
        yield board.uid, f"this uid belongs to {owner}: importing one would replace the other"


def _tags(board: LintedDashboard) -> PlacedMessages:
    if TAG not in board.raw.get("tags", ()):
        yield board.uid, f"the tag {TAG} is missing: the link between our boards finds them by it"


def _schema_version(board: LintedDashboard) -> PlacedMessages:
    if board.raw.get("schemaVersion") != SCHEMA_VERSION:
        yield board.uid, f"schemaVersion is {board.raw.get('schemaVersion')}, not {SCHEMA_VERSION}"


def _editable(board: LintedDashboard) -> PlacedMessages:
    if board.raw.get("editable") is not True:
        yield board.uid, "people want to edit what they import"


def _refresh(board: LintedDashboard) -> PlacedMessages:
    every = board.raw.get("refresh")
    try:
        often = every not in ("", False) and parse_duration(str(every)) < REFRESH_AT_LEAST_S
    except ValueError:
        often = True
    if often:
        yield board.uid, f"refresh is {every!r}: never more often than every {REFRESH_AT_LEAST_S} s"


def _legacy_keys(board: LintedDashboard) -> PlacedMessages:
    places: list[tuple[str, str, Mapping[str, Any]]] = [("dashboard", board.uid, board.raw)]
    places += [("timepicker", board.at("timepicker"), board.raw.get("timepicker") or {})]
    places += [("panel", panel.place, panel.raw) for panel in board.panels]
    places += [("target", query.place, query.raw) for panel in board.panels for query in panel.queries]
    places += [("variable", board.at(f"variable {v.get('name')}"), v) for v in board.variables]
    for kind, place, raw in places:
        if old := LEGACY_KEYS[kind] & raw.keys():
            yield place, f"Grafana dropped {', '.join(sorted(old))}, or only the import dialogue reads it"


def _nulls(board: LintedDashboard) -> PlacedMessages:
    """A null is not the same as nothing: some releases take it for a setting. The base of thresholds and the id of an
    import are null."""
    for path in _null_paths(board.raw, ""):
        if path != ".id" and not re.search(r"\.steps\[0\]\.value$", path):
            yield board.uid, f"{path.removeprefix('.')} is null; leave it out"


def _null_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _null_paths(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _null_paths(inner, f"{path}[{at}]")
    elif value is None:
        yield path


def _size(board: LintedDashboard) -> PlacedMessages:
    # a strip says one thing
    tall = (top for top in board.raw.get("panels", ()) if (top.get("gridPos") or {}).get("h", COLUMNS) > 3)
    visible = sum(1 for top in tall if top.get("type") != "row")
    if visible > VISIBLE_PANELS:
        yield board.uid, f"{visible} panels are visible at once; at most {VISIBLE_PANELS}, the rest in collapsed rows"


def _panel_ids(board: LintedDashboard) -> PlacedMessages:
    ids = [panel.raw.get("id") for panel in board.panels]
    for panel in board.panels:
        number = panel.raw.get("id")
        if not isinstance(number, int) or number < 1:
            yield panel.place, "links lead to a panel by its id; it needs a positive one"
        elif ids.count(number) > 1:
            yield panel.place, f"another panel of this board also has the id {number}"


def _grid(board: LintedDashboard) -> PlacedMessages:
    groups = [list(board.raw.get("panels", ()))]
    for top in groups[0]:
        if top.get("type") == "row":
            groups.append(top.get("panels") or [])
            if groups[-1] and not top.get("collapsed"):
                yield board.at(top.get("title")), "the panels of an open row stand beside it, not in it"
    for group in groups:
        boxes = [(board.at(p.get("title")), p.get("gridPos") or {}) for p in group]
        for place, at in boxes:
            if (
                not {"x", "y", "w", "h"} <= at.keys()
                or min(at["x"], at["y"]) < 0
                or min(at["w"], at["h"]) < 1
                or at["x"] + at["w"] > COLUMNS
            ):
                yield place, f"gridPos {at} does not lie within {COLUMNS} columns"
        whole = [(place, at) for place, at in boxes if {"x", "y", "w", "h"} <= at.keys()]
        for (one, a), (other, b) in combinations(whole, 2):
            if (
                a["x"] < b["x"] + b["w"]
                and b["x"] < a["x"] + a["w"]
                and a["y"] < b["y"] + b["h"]
                and b["y"] < a["y"] + a["h"]
            ):
                yield one, f"it overlaps {other}"


def _template_datasource(board: LintedDashboard) -> PlacedMessages:
    first = board.variables[0] if board.variables else {}
    wanted = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    if wrong := sorted(key for key, value in wanted.items() if first.get(key) != value):
        yield (
            board.uid,
            f"the first variable is the data source: {', '.join(f'{key} {wanted[key]!r}' for key in wrong)}",
        )
    if (first.get("current") or {}).get("value"):
        yield board.uid, "the data source is chosen where the board is loaded; a saved one exists nowhere else"


def _template_choices(board: LintedDashboard) -> PlacedMessages:
    for variable in board.variables:
        place = board.at(f"variable {variable.get('name')}")
        if not variable.get("label"):
            yield place, "a variable has a label that people can read"
        if variable.get("type") != "query":
            continue
        if variable.get("datasource") != DATASOURCE:
            yield place, f"its values come from {DATASOURCE['uid']}"
        if variable.get("refresh") != 2:
            yield (
                place,
                "refresh must be 2, on a change of the time range: else a model that came later is never offered",
            )
        if not (variable.get("multi") and variable.get("includeAll") and variable.get("allValue") == ".*"):
            yield (
                place,
                "several values and All may be chosen, and All is `.*`, which also matches a label that is missing",
            )


def _template_label_values(board: LintedDashboard) -> PlacedMessages:
    """Values come from a series of ours, narrowed by the choices before; a bare label_values(label) offers other
    exporters' values."""
    before: set[str] = set()
    for variable in board.variables:
        name, asked = str(variable.get("name")), variable.get("query")
        if variable.get("type") == "query":
            text = asked.get("query", "") if isinstance(asked, Mapping) else str(asked)
            place = board.at(f"variable {name}")
            yield from ((place, message) for message in _label_values(name, text, before))
            if variable.get("definition") not in (None, text):
                yield place, "its definition, which Grafana shows, is not its query"
        before.add(name)


def _label_values(variable: str, text: str, before: set[str]) -> Messages:
    found = _LABEL_VALUES.fullmatch(text.strip())
    if not found:
        bare = _BARE_LABEL_VALUES.fullmatch(text.strip())
        yield (
            "label_values(label) offers the values of every exporter; name a series"
            if bare
            else f"{text!r} is no label_values(series, label)"
        )
        return
    try:
        (read,) = promql_ast.reads(found["source"])
    except (BadExpression, ValueError):
        yield f"{found['source']!r} is no series"
        return
    metric = METRICS.get(read.name)
    if metric is None:
        yield f"{read.name} is not in the catalogue"
        return
    if found["label"] not in labels_of(read.name):
        yield f"{read.name} has no label {found['label']}"
    narrowed = {(label, value.strip("${}")) for label, op, value in read.matchers if op == "=~"}
    for wanted in query_builders.where(metric):
        label = wanted.split("=~")[0]
        if label in before and label != variable and (label, label) not in narrowed:
            yield f"it is not narrowed by ${label}, which is chosen before it"
    for name in sorted(variables_in(text) - before):
        yield f"${name} is not chosen before it"


def _unused_variables(board: LintedDashboard) -> PlacedMessages:
    """A choice that changes nothing misleads; choices that only narrow others down are used by them."""
    asked = [query.text for query in board.queries] + [str(panel.raw.get("repeat", "")) for panel in board.panels]
    used = {name for text in asked for name in variables_in(text)} | {
        str(p.raw["repeat"]) for p in board.panels if p.raw.get("repeat")
    }
    used |= {"datasource"}
    for variable in reversed(board.variables):
        name = str(variable.get("name"))
        if name not in used:
            yield board.at(f"variable {name}"), "no query of the board reads it"
        else:
            asked_by = variable.get("query")
            used |= variables_in(asked_by.get("query", "") if isinstance(asked_by, Mapping) else str(asked_by))


def _board_links(board: LintedDashboard) -> PlacedMessages:
    for link in board.raw.get("links", ()):
        place = board.at(f"link {link.get('title')}")
        if not link.get("title"):
            yield place, "a link has a title"
        match link.get("type"):
            case "dashboards":
                if not link.get("tags"):
                    yield place, "a link to boards names the tag that they have"
                if not (link.get("keepTime") and link.get("includeVars")):
                    yield place, "it takes the time range and the choices along: keepTime, includeVars"
            case "link":
                yield from ((place, message) for message in bad_url(str(link.get("url", "")), board))
            case other:
                yield place, f"Grafana knows links of type dashboards and link, not {other!r}"


def _annotations(board: LintedDashboard) -> PlacedMessages:
    names = Counter(a.get("name") for a in board.annotations)
    for name, count in names.items():
        if count > 1 or not name:
            yield board.at(f"annotation {name}"), "every annotation has a name of its own"
    first_read: dict[str, str] = {}
    for mark in board.marks:
        if mark.raw.get("datasource") != DATASOURCE:
            yield mark.place, f"it asks {DATASOURCE['uid']}"
        for read in mark.reads[:1]:
            if read.name in first_read:
                yield mark.place, f"{first_read[read.name]} already draws {read.name}: everything would show twice"
            first_read.setdefault(read.name, mark.place)
    copies = [a for a in board.annotations if a.get("type") == "tags" or (a.get("target") or {}).get("type") == "tags"]
    if copies and sidecar.EVENT_TIME.name in first_read:
        yield (
            board.at(f"annotation {copies[0].get('name')}"),
            "events that were pushed to Grafana are the same that Prometheus already has",
        )


BOARD_RULES: dict[str, Callable[[LintedDashboard], PlacedMessages]] = {
    "board-identity": _identity,
    "board-tags": _tags,
    "board-schema-version": _schema_version,
    "board-editable": _editable,
    "board-refresh": _refresh,
    "board-size": _size,
    "board-links": _board_links,
    "legacy-keys": _legacy_keys,
    "json-nulls": _nulls,
    "panel-ids": _panel_ids,
    "panel-grid": _grid,
    "template-datasource": _template_datasource,
    "template-choices": _template_choices,
    "template-label-values": _template_label_values,
    "template-unused": _unused_variables,
    "annotations": _annotations,
}


def _unlike(boards: Sequence[LintedDashboard]) -> PlacedMessages:
    for what in ("uid", "title"):
        for value, count in Counter(board.raw.get(what) for board in boards).items():
            if count > 1:
                yield str(value), f"{count} boards have this {what}"


def _links_lead_somewhere(boards: Sequence[LintedDashboard]) -> PlacedMessages:
    there = {board.uid for board in boards}
    for board in boards:
        links = [(panel.place, link) for panel in board.panels for link in panel.links] + [
            (board.uid, link) for link in board.raw.get("links", ())
        ]
        for place, link in links:
            found = _BOARD_LINK.match(str(link.get("url", "")))
            if found and found[1] not in there:
                yield place, f"no board of ours has the uid {found[1]}"


SHELF_RULES: dict[str, Callable[[Sequence[LintedDashboard]], PlacedMessages]] = {
    "boards-unlike": _unlike,
    "boards-links": _links_lead_somewhere,
}
