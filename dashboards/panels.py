"""Boards and panels as values, and Grafana's JSON from them. The one grafanalib door.

grafanalib is frozen and prints schemaVersion 12; `normalise` turns that into 39, which Grafana 10.4 to 13 load. Nothing outside this
file knows grafanalib, so that it can be replaced here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from grafanalib import core as g
from grafanalib._gen import DashboardEncoder

from alerts.panel_ref import PanelRef, board_uid
from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit

SCHEMA_VERSION = 39
TAG = "vllm-watch"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "$__rate_interval"

_UNITS = {
    Unit.SECONDS: "s", Unit.BYTES: "bytes", Unit.JOULES: "joule", Unit.WATTS: "watt", Unit.CELSIUS: "celsius", Unit.HERTZ: "hertz",
    Unit.RATIO: "percentunit", Unit.TIMESTAMP: "dateTimeFromNow", Unit.FLAG: "bool_on_off",
}  # fmt: skip


class Shape(StrEnum):
    LINES = "timeseries"
    NUMBER = "stat"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL and how its lines are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. slug never changes: links and annotations hang on it. optional: why it may be empty on a healthy engine, else ''."""

    slug: str
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    shape: Shape = Shape.LINES
    threshold: Threshold | None = None
    width: int = 8
    height: int = 7
    optional: str = ""
    full_scale: bool = True  # a ratio's axis goes from 0 to 1; False where its values live near 0


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard: one question, answered in its top row."""

    slug: str
    title: str
    question: str
    rows: tuple[tuple[Panel, ...], ...]
    variables: tuple[tuple[str, str], ...] = field(default=())  # name, label_values(...) query

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row)


def grafana_unit(unit: Unit, per_second: bool = False) -> str:
    """Grafana's name for a unit of the catalogue; rates of counted things get a suffix of their own."""
    if per_second:
        return {Unit.TOKENS: "suffix: tok/s", Unit.REQUESTS: "reqps", Unit.BYTES: "Bps", Unit.JOULES: "watt"}.get(unit, "cps")
    return _UNITS.get(unit, "short")


def to_json(board: Board) -> str:
    """The board as Grafana imports it. Same board, same text."""
    raw = json.loads(json.dumps(_dashboard(board).to_json_data(), cls=DashboardEncoder))
    return json.dumps(normalise(raw), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _dashboard(board: Board) -> g.Dashboard:
    panels, top = [], 0
    for row in board.rows:
        left = 0
        for panel in row:
            panels.append(_panel(board, panel, g.GridPos(h=panel.height, w=panel.width, x=left, y=top)))
            left += panel.width
        top += max(panel.height for panel in row)
    return g.Dashboard(
        title=board.title, uid=board_uid(board.slug), description=board.question, tags=[TAG], timezone="browser", refresh="30s",
        time=g.Time("now-1h", "now"), schemaVersion=SCHEMA_VERSION, panels=panels, templating=g.Templating(_variables(board.variables)),
        links=[{"type": "dashboards", "title": "vLLM boards", "tags": [TAG], "asDropdown": True, "keepTime": True, "includeVars": True}],
        editable=True, sharedCrosshair=True,
    )  # fmt: skip


def _panel(board: Board, panel: Panel, at: g.GridPos) -> Any:
    shared = {
        "title": panel.title, "description": panel.description, "dataSource": DATASOURCE, "gridPos": at,
        "id": PanelRef(board.slug, panel.slug).panel_id, "targets": [_target(q, chr(65 + i), panel.shape) for i, q in enumerate(panel.queries)],
    }  # fmt: skip
    kinds: dict[Shape, type[Any]] = {Shape.LINES: g.TimeSeries, Shape.NUMBER: g.Stat, Shape.TABLE: g.Table}
    built = kinds[panel.shape](**shared)
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": _thresholds(panel), "color": {"mode": "palette-classic"}}
    if panel.unit == "percentunit":
        defaults |= {"min": 0} | ({"max": 1} if panel.full_scale else {})
    if panel.shape is Shape.LINES:
        style = "dashed" if panel.threshold else "off"
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "thresholdsStyle": {"mode": style}}
    if panel.shape is Shape.NUMBER:
        defaults["color"] = {"mode": "thresholds"}
    built.extraJson = {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": _options(panel.shape), "pluginVersion": "10.4.0"}
    return built


def _target(query: Query, ref: str, shape: Shape) -> g.Target:
    instant = shape is Shape.TABLE
    return g.Target(
        expr=query.expr, legendFormat=query.legend or "__auto", refId=ref, datasource=DATASOURCE, instant=instant,
        format="table" if instant else "time_series",
    )  # fmt: skip


def _thresholds(panel: Panel) -> dict[str, Any]:
    if panel.unit == _UNITS[Unit.FLAG]:
        return {"mode": "absolute", "steps": [{"color": "red", "value": None}, {"color": "green", "value": 1}]}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.threshold:
        steps.append({"color": "red", "value": panel.threshold.value})
    return {"mode": "absolute", "steps": steps}


def _options(shape: Shape) -> dict[str, Any]:
    match shape:
        case Shape.LINES:
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case Shape.NUMBER:
            reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": reduce, "graphMode": "area", "colorMode": "value", "textMode": "auto", "justifyMode": "auto"}
        case Shape.TABLE:
            return {"showHeader": True, "cellHeight": "sm"}


def _variables(variables: Sequence[tuple[str, str]]) -> list[Any]:
    source = g.Template(name="datasource", label="Data source", type="datasource", query="prometheus")
    return [source, *(
        g.Template(name=name, label=name, type="query", query=query, dataSource=DATASOURCE, refresh=2, includeAll=True, multi=True,
                   allValue=".*", default="All", sort=1)
        for name, query in variables
    )]  # fmt: skip


_LEGACY = frozenset({
    "rows", "hideControls", "sharedCrosshair", "style", "gnetId", "__inputs", "cacheTimeout", "height", "span", "minSpan", "error",
    "maxDataPoints", "intervalFactor", "step", "metric", "target", "query_type", "transparent", "renderer", "repeat", "interval",
    "timeFrom", "timeShift", "hideTimeOverride", "maxPerRow", "transformations", "alert", "iteration", "timezone_",
})  # fmt: skip


def normalise(dashboard: dict[str, Any]) -> dict[str, Any]:
    """grafanalib's output as schemaVersion 39: no nulls, none of the keys that Grafana dropped, data sources by type and uid."""
    clean: dict[str, Any] = _drop(dashboard, _LEGACY)
    clean |= {"schemaVersion": SCHEMA_VERSION, "graphTooltip": 1, "id": None, "version": 1, "fiscalYearStartMonth": 0, "weekStart": ""}
    clean["annotations"] = {"list": [{
        "builtIn": 1, "datasource": {"type": "grafana", "uid": "-- Grafana --"}, "enable": True, "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)", "name": "Annotations & Alerts", "type": "dashboard",
    }]}  # fmt: skip
    for panel in clean["panels"]:
        for key in ("editable", "links", "repeatDirection"):
            if not panel.get(key):
                panel.pop(key, None)
        panel.pop("editable", None)
        for target in panel["targets"]:
            target["range"] = not target.get("instant", False)
            target["editorMode"] = "code"
        for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
            step.setdefault("value", None)  # the base step is null by design
    for variable in clean["templating"]["list"]:
        _normalise_variable(variable)
    return clean


def _normalise_variable(variable: dict[str, Any]) -> None:
    if variable["type"] == "datasource":
        keep = {"name", "label", "type", "query"}
        current: dict[str, Any] = {}
    else:
        keep = {"name", "label", "type", "query", "datasource", "refresh", "includeAll", "multi", "allValue", "sort"}
        current = {"text": ["All"], "value": ["$__all"], "selected": True}
        variable["query"] = {"query": variable["query"], "refId": variable["name"]}
    for key in set(variable) - keep:
        del variable[key]
    variable |= {"current": current, "options": [], "hide": 0, "regex": "", "skipUrlSync": False}
    if variable["type"] == "query":
        variable["definition"] = variable["query"]["query"]


def _drop(value: Any, keys: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {k: _drop(v, keys) for k, v in value.items() if v is not None and k not in keys}
    if isinstance(value, list):
        return [_drop(v, keys) for v in value]
    return value
