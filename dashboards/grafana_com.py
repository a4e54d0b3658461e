"""Dashboards as grafana.com takes them: JSON with `__inputs` and `__requires`, and a description of each.

grafana.com asks for a data source when somebody imports a dashboard. The answer becomes the default of the variable
`datasource`, which every panel reads, so that the dashboard can still be switched to another Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dashboards.grafana_json import PLUGIN_VERSION
from dashboards.model import Dashboard
from exporters.catalogue.producers import Component

INPUT = "DS_PROMETHEUS"
_CHOSEN = f"${{{INPUT}}}"
# Title of each panel type, as Grafana's own export writes it.
_PANELS = {"heatmap": "Heatmap", "stat": "Stat", "table": "Table", "timeseries": "Time series", "text": "Text"}


def shared(text: str) -> str:
    """Return the JSON of a dashboard with `__inputs` and `__requires`. Raises KeyError for an unknown panel type."""
    board = json.loads(text)
    for variable in board["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["current"] = {"text": _CHOSEN, "value": _CHOSEN, "selected": True}
    used = sorted({panel["type"] for panel in _panels(board["panels"])} - {"row"})
    board["__inputs"] = [
        {
            "name": INPUT,
            "label": "Prometheus",
            "description": "Prometheus that scrapes vLLM",
            "type": "datasource",
            "pluginId": "prometheus",
            "pluginName": "Prometheus",
        }
    ]
    board["__elements"] = {}
    board["__requires"] = [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": PLUGIN_VERSION},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        *({"type": "panel", "id": one, "name": _PANELS[one], "version": ""} for one in used),
    ]
    return json.dumps(board, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield panels, also those of collapsed rows."""
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def description(board: Dashboard, mark: str) -> str:
    """Return the text for a dashboard's page on grafana.com, in Markdown. mark: origin of the file, as a comment."""
    return "\n".join(_lines(board, mark))


def _lines(board: Dashboard, mark: str) -> Iterator[str]:
    yield from (f"<!-- {mark} -->", f"# {board.title}", "", board.question, "", "## Needs", "")
    needed = {component for row in board.rows for panel in row.panels for q in panel.queries for component in q.needs}
    yield from (f"- {one.value}" for one in Component if one in needed)
    yield from ("", "Panels whose component is missing stay empty; the dashboard says so.", "", "## Panels", "")
    for row in board.rows:
        if row.title:
            yield from (f"### {row.title}", "")
        yield from (f"- **{panel.title}**: {panel.means}" for panel in row.panels)
        yield ""
