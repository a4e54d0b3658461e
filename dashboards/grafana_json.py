"""Render dashboards as Grafana JSON. The only module that imports grafanalib.

grafanalib is frozen and prints schemaVersion 12; `normalise` turns that into 39, which Grafana 10.4 to 13 load. Nothing
outside this file knows grafanalib or Grafana's JSON, so that it can be replaced here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from grafanalib import core as g
from grafanalib._gen import DashboardEncoder

from alerts.panel_ref import PanelRef, board_uid
from alerts.rules import Links
from dashboards import annotations as marked
from dashboards import variables
from dashboards.annotations import Annotation
from dashboards.model import (
    ABSENT,
    COLUMNS,
    LEAST_RATE_S,
    Dashboard,
    Panel,
    Precondition,
    Profile,
    Query,
    Shape,
    Variable,
    shown_unit,
)
from exporters.catalogue.metric import Unit
from exporters.catalogue.promql import BOUND

SCHEMA_VERSION = 39
# the oldest that loads these boards; without one Grafana would run its oldest migrations on each panel
PLUGIN_VERSION = "10.4.0"
TAG = "vllm-watch"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_KEEP = "${__url_time_range}&${__all_variables}"  # a link takes the time range and the choices along
_OTHER_BOARDS = {
    "type": "dashboards", "title": "vLLM boards", "tags": [TAG], "asDropdown": True, "keepTime": True,
    "includeVars": True, "icon": "external link", "tooltip": "", "url": "", "targetBlank": False,
}  # fmt: skip
_FLAG = shown_unit(Unit.FLAG)
_RATIO = shown_unit(Unit.RATIO)


def to_json(
    board: Dashboard,
    profile: Profile = Profile.FULL,
    *,
    links: Links | None = None,
    editable: bool = True,
    compact: bool = False,
) -> str:
    """Return the dashboard as Grafana imports it. Same dashboard, same text.

    editable: people want to edit what they import, not what is provisioned. compact: without indentation, for stores
    with a size limit."""
    raw = json.loads(json.dumps(_dashboard(board, links or Links(), editable).to_json_data(), cls=DashboardEncoder))
    marks = marked.only(marked.of(board), profile.components)
    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 1}
    return json.dumps(normalise(raw, board, marks), sort_keys=True, ensure_ascii=False, **layout) + "\n"


def _dashboard(board: Dashboard, links: Links, editable: bool) -> g.Dashboard:
    return g.Dashboard(
        title=board.title, uid=board_uid(board.slug), description=board.question, tags=[TAG], timezone="browser",
        refresh="30s",
        time=g.Time("now-1h", "now"), schemaVersion=SCHEMA_VERSION, panels=list(_placed(board, links)),
        templating=g.Templating([_datasource(), *map(_variable, variables.of(board))]),
        links=[] if board.team else [_OTHER_BOARDS],
        editable=editable, sharedCrosshair=True,
    )  # fmt: skip


def _placed(board: Dashboard, links: Links) -> Iterator[Any]:
    """Panels and row headings with their places: each row's panels wrap at the width of the board."""
    top = 0
    missing = [_said_once(one) for one in board.preconditions]
    for at, panel in enumerate(missing):
        width = COLUMNS // len(missing)
        yield _panel(board, panel, g.GridPos(h=panel.height, w=width, x=at * width, y=0), links)
        top = panel.height
    for row in board.rows:
        heading = None
        if row.title:
            heading = g.RowPanel(
                title=row.title,
                collapsed=row.collapsed,
                id=PanelRef(board.slug, f"row-{_slug(row.title)}").panel_id,
                gridPos=g.GridPos(h=1, w=COLUMNS, x=0, y=top),
            )
            yield heading
            top += 1
        below = []
        left = height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            below.append(_panel(board, panel, g.GridPos(h=panel.height, w=panel.width, x=left, y=top), links))
            left, height = left + panel.width, max(height, panel.height)
        top += height
        if heading and row.collapsed:
            heading.panels = below
        else:
            yield from below


def _said_once(one: Precondition) -> Panel:
    """Return what Grafana shows of a precondition, at the top of a dashboard: whether it is met, else the sentence that
    its panels leave out."""
    return Panel(
        f"has-{one.slug}",
        one.title[0].upper() + one.title[1:],
        f"Whether this dashboard has data of a {one.title} in the shown range.",
        "Present.",
        one.missing,
        (Query(one.expr, one.title, _FLAG),),
        Shape.NUMBER,
        optional=one.missing,
        height=3,
    )


def _slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def _panel(board: Dashboard, panel: Panel, at: g.GridPos, links: Links) -> Any:
    shared = {
        "title": panel.title,
        "description": panel.description,
        "dataSource": DATASOURCE,
        "gridPos": at,
        "id": PanelRef(board.slug, panel.slug).panel_id,
        "targets": [_target(q, chr(65 + i), panel.shape) for i, q in enumerate(panel.queries)],
        "links": list(_links(board, panel, links)),
    }
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": _thresholds(panel),
        "color": {"mode": "palette-classic"},
        "noValue": panel.when_empty,
        "mappings": [],
    }
    if panel.unit == _RATIO:
        defaults |= {"min": 0} | ({"max": 1} if panel.full_scale else {})
    if panel.unit == _FLAG:
        words = {
            "0": {"text": "no", "index": 0},
            "1": {"text": "yes", "index": 1},
            f"{ABSENT:g}": {"text": "not present", "index": 2},
        }
        defaults["mappings"] = [{"type": "value", "options": words}]
    overrides: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    match panel.shape:
        case Shape.LINES | Shape.STACK:
            kind = g.TimeSeries
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 30 if panel.shape is Shape.STACK else 8,
                "showPoints": "auto",
                "pointSize": 4,
                "spanNulls": False,
                "stacking": {"mode": "normal" if panel.shape is Shape.STACK else "none", "group": "A"},
                "thresholdsStyle": {"mode": "dashed" if panel.threshold else "off"},
            }
            overrides = [_BEYOND_BUCKETS, _AROUND_VALUE] if _bounded(panel) else []
        case Shape.NUMBER:
            kind = g.Stat
            defaults["color"] = {"mode": "thresholds"}
        case Shape.TABLE:
            kind = g.Table
            overrides = list(_columns(panel))
            extra["transformations"] = _merge(panel)
        case Shape.HEATMAP:
            kind = g.Heatmap  # its options are replaced whole: it knows only the shape of Grafana 8
            defaults["custom"] = {
                "hideFrom": {"legend": False, "tooltip": False, "viz": False},
                "scaleDistribution": {"type": "linear"},
            }
    if panel.ranked:
        # Grafana's $__rate_interval is at least this and a scrape; the data source's own still holds
        shared["interval"] = f"{LEAST_RATE_S}s"
    built = kind(**shared)
    built.extraJson = {
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": _options(panel),
        "pluginVersion": PLUGIN_VERSION,
    }
    built.extraJson |= extra
    return built


def _bounded(panel: Panel) -> bool:
    """Return whether a panel shows quantiles of buckets, which may be bounds."""
    return any(f"{{{{{BOUND}}}}}" in query.legend for query in panel.queries)


# A series that is only known to lie below or above a bound: a band up to the bound instead of a line of values.
_BEYOND_BUCKETS = {
    "matcher": {"id": "byRegexp", "options": "/ [<>]$/"},
    "properties": [
        {"id": "custom.lineStyle", "value": {"fill": "dot", "dash": [2, 6]}}, {"id": "custom.fillOpacity", "value": 15},
        {"id": "custom.showPoints", "value": "never"},
    ],
}  # fmt: skip


# The bounds of the bucket that a value lies in.
_AROUND_VALUE = {
    "matcher": {"id": "byRegexp", "options": "/ at (least|most)$/"},
    "properties": [
        {"id": "custom.lineStyle", "value": {"fill": "dot", "dash": [1, 8]}}, {"id": "custom.fillOpacity", "value": 0},
        {"id": "custom.showPoints", "value": "never"},
    ],
}  # fmt: skip


def _links(board: Dashboard, panel: Panel, links: Links) -> Iterator[dict[str, Any]]:
    if panel.detail:
        yield {
            "title": f"More: {panel.detail} board",
            "url": f"/d/{board_uid(panel.detail)}?{_KEEP}",
            "targetBlank": False,
        }
    for alert in panel.alerts(board.slug):
        yield {"title": f"Runbook: {alert}", "url": links.runbook(alert), "targetBlank": True}


def _target(query: Query, ref: str, shape: Shape) -> g.Target:
    instant = shape in (Shape.TABLE, Shape.NUMBER)
    form = {Shape.TABLE: "table", Shape.HEATMAP: "heatmap"}.get(shape, "time_series")
    return g.Target(
        expr=query.expr,
        legendFormat=query.legend or "__auto",
        refId=ref,
        datasource=DATASOURCE,
        instant=instant,
        format=form,
    )


def _thresholds(panel: Panel) -> dict[str, Any]:
    """A value without thresholds is neutral: green would be a promise."""
    if panel.unit == _FLAG and panel.limit is None:
        return {
            "mode": "absolute",
            "steps": [{"color": "text", "value": None}, {"color": "red", "value": 0}, {"color": "green", "value": 1}],
        }
    if panel.limit is None:
        return {"mode": "absolute", "steps": [{"color": "text", "value": None}]}
    return {"mode": "absolute", "steps": [{"color": "green", "value": None}, {"color": "red", "value": panel.limit}]}


def _options(panel: Panel) -> dict[str, Any]:
    match panel.shape:
        case Shape.LINES | Shape.STACK:
            table = {"displayMode": "table", "calcs": ["mean", "lastNotNull"], "sortBy": "Mean", "sortDesc": True}
            return {
                # The last value beside a legend that ends in < or >, at least or at most: together they are what is
                # known.
                "legend": {
                    "displayMode": "list",
                    "placement": "bottom",
                    "showLegend": True,
                    "calcs": ["lastNotNull"] if _bounded(panel) else [],
                }
                | (table if panel.ranked else {}),
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case Shape.NUMBER:
            reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {
                "reduceOptions": reduce,
                "graphMode": "none",
                "colorMode": "value",
                "textMode": "value_and_name" if _bounded(panel) else "auto",
                "justifyMode": "auto",
                "orientation": "auto",
            }
        case Shape.TABLE:
            return {
                "showHeader": True,
                "cellHeight": "sm",
                "sortBy": [{"displayName": panel.queries[0].legend, "desc": not panel.lowest_first}],
            }
        case Shape.HEATMAP:
            return {
                "calculate": False, "cellGap": 1, "cellValues": {"unit": "short", "decimals": 0},
                # requests, not seconds
                "exemplars": {"color": "rgba(255,0,255,0.7)"}, "filterValues": {"le": 1e-9},
                "color": {"mode": "scheme", "scheme": "Oranges", "fill": "dark-orange", "scale": "exponential",
                    "exponent": 0.5, "steps": 64,
                          "reverse": False},
                "legend": {"show": True}, "rowsFrame": {"layout": "auto"}, "showValue": "never",
                "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
                "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
            }  # fmt: skip


def _columns(panel: Panel) -> Iterator[dict[str, Any]]:
    """Each figure of a table in its own unit, a dash where a row has none, and the first figure in red from the panel's
    limit on."""
    for query in panel.queries:
        properties: list[dict[str, Any]] = [{"id": "unit", "value": query.unit}, {"id": "noValue", "value": "-"}]
        if panel.limit is not None and query is panel.queries[0]:
            properties += [
                {"id": "color", "value": {"mode": "thresholds"}},
                {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            ]
        yield {"matcher": {"id": "byName", "options": query.legend}, "properties": properties}


def _merge(panel: Panel) -> list[dict[str, Any]]:
    """One row for each set of labels, its figures side by side, called by the legends of their queries."""
    refs = [chr(65 + i) for i in range(len(panel.queries))]
    values = ["Value"] if len(refs) == 1 else [f"Value #{ref}" for ref in refs]
    renamed = {value: query.legend for value, query in zip(values, panel.queries, strict=True)}
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": renamed}},
    ]


def _datasource() -> g.Template:
    return g.Template(name="datasource", label="Data source", type="datasource", query="prometheus")


def _variable(variable: Variable) -> g.Template:
    if variable.kind == "query":
        return g.Template(name=variable.name, label=variable.label, type="query", query=variable.query,
            dataSource=DATASOURCE, refresh=2,
                          includeAll=True, multi=True, allValue=".*", default="All", sort=1)  # fmt: skip
    kind = {"custom": "custom", "text": "textbox"}[variable.kind]
    return g.Template(
        name=variable.name,
        label=variable.label,
        type=kind,
        query=",".join(variable.options) or variable.default,
        default=variable.default,
    )


_LEGACY = frozenset({
    "rows", "hideControls", "sharedCrosshair", "style", "gnetId", "__inputs", "cacheTimeout", "height", "span",
    "minSpan", "error",
    "maxDataPoints", "intervalFactor", "step", "metric", "target", "query_type", "transparent", "renderer", "repeat",
    "timeFrom", "timeShift", "hideTimeOverride", "maxPerRow", "alert", "iteration", "timezone_", "repeatDirection",
    # of the heatmap that Grafana 9 replaced
    "cards", "highlightCards", "hideZeroBuckets", "reverseYBuckets", "tooltip", "xAxis", "xBucketNumber", "xBucketSize",
    "yAxis",
    "yBucketBound", "yBucketNumber", "yBucketSize", "dataFormat", "heatmap", "legend", "color",
})  # fmt: skip


def normalise(dashboard: dict[str, Any], board: Dashboard, marks: Sequence[Annotation]) -> dict[str, Any]:
    """grafanalib's output as schemaVersion 39: no nulls, none of the keys that Grafana dropped, data sources by type
    and uid."""
    clean: dict[str, Any] = _drop(dashboard)
    clean |= {
        "schemaVersion": SCHEMA_VERSION,
        "graphTooltip": 1,
        "id": None,
        "version": 1,
        "fiscalYearStartMonth": 0,
        "weekStart": "",
    }
    clean["timepicker"] = {}
    clean["annotations"] = {"list": [_BUILT_IN, *map(_annotation, marks)]}
    traced = frozenset(query.expr for panel in board.panels for query in panel.queries if query.exemplars)
    clean["panels"] = [_normalise_panel(panel, traced) for panel in clean["panels"]]
    own = {variable.name: variable for variable in board.extra}
    for variable in clean["templating"]["list"]:
        _normalise_variable(variable, own.get(variable["name"]))
    return clean


def _normalise_panel(panel: dict[str, Any], traced: frozenset[str]) -> dict[str, Any]:
    if panel["type"] == "row":
        keep = {"id", "type", "title", "collapsed", "gridPos"}
        return {key: panel[key] for key in keep} | {
            "panels": [_normalise_panel(inner, traced) for inner in panel.get("panels") or ()]
        }
    for key in ("editable", "columns", "fontSize", "mappings"):
        panel.pop(key, None)
    if not panel.get("links"):
        panel.pop("links", None)
    defaults = panel["fieldConfig"]["defaults"]
    for holder in (defaults, defaults.get("custom", {})):
        for key in [key for key, value in holder.items() if value is None or key == "displayMode"]:
            del holder[key]
    for target in panel["targets"]:
        for key in ("query", "interval"):
            target.pop(key, None)
        target["range"] = not target.get("instant", False)
        target["editorMode"] = "code"
        target["exemplar"] = target["expr"] in traced and target["range"]
    return panel


_BUILT_IN = {
    "builtIn": 1, "datasource": {"type": "grafana", "uid": "-- Grafana --"}, "enable": True, "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)", "name": "Annotations & Alerts", "type": "dashboard",
}  # fmt: skip


def _annotation(mark: Annotation) -> dict[str, Any]:
    return {
        "name": mark.name, "datasource": DATASOURCE, "enable": True, "hide": False, "iconColor": mark.colour,
        "expr": mark.expr,
        "titleFormat": mark.title, "textFormat": "", "tagKeys": "", "step": "", "useValueForTime": mark.at_value,
    }  # fmt: skip


def _normalise_variable(variable: dict[str, Any], own: Variable | None) -> None:
    keep, current = {"name", "label", "type", "query"}, dict[str, Any]()
    if variable["type"] == "query":
        keep |= {"datasource", "refresh", "includeAll", "multi", "allValue", "sort"}
        current = {"text": ["All"], "value": ["$__all"], "selected": True}
        variable["definition"] = variable["query"]
        variable["query"] = {"query": variable["query"], "refId": variable["name"]}
        keep |= {"definition"}
    for key in set(variable) - keep:
        del variable[key]
    options = []
    if own:
        current = {"text": own.default, "value": own.default, "selected": True}
        options = [{"text": o, "value": o, "selected": o == own.default} for o in own.options or (own.default,)]
    if variable["type"] == "custom":
        variable |= {"multi": False, "includeAll": False}
    variable |= {"current": current, "options": options, "hide": 0, "skipUrlSync": False}
    if variable["type"] != "textbox":
        variable["regex"] = ""


def _drop(value: Any) -> Any:
    """Without nulls and legacy keys; what we wrote ourselves (fieldConfig, options, transformations) is taken as it
    is."""
    if isinstance(value, dict):
        ours = ("fieldConfig", "links", "options", "templating", "transformations")
        return {
            k: v if k in ours else _drop(v)
            for k, v in value.items()
            if k in ours or (v is not None and k not in _LEGACY)
        }
    if isinstance(value, list):
        return [_drop(v) for v in value]
    return value
