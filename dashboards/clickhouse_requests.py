"""Grafana dashboard "Requests" for the ClickHouse data source, over the views that `requests ddl clickhouse` makes.

Its queries are SQL, so it is none of the dashboards of registry.py, whose queries are PromQL and linted as such."""

# ruff: noqa: S608 - the SQL is text of a dashboard; its reader names the database

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "grafana-clickhouse-datasource", "uid": "${datasource}"}
_WHERE = "$__timeFilter(ts) AND model_label IN (${model:singlequote}) AND team_label IN (${team:singlequote})"
SCHEMA_VERSION = 39
TABLE, TIME_SERIES, BARS = "table", "timeseries", "barchart"


@dataclass(frozen=True, slots=True)
class ClickHousePanel:
    """Panel of one query. select, end: the query without its table and filters."""

    title: str
    kind: str
    select: str
    end: str
    unit: str = "short"
    width: int = 12

    def sql(self, database: str) -> str:
        return f"SELECT {self.select} FROM {database}.requests WHERE {_WHERE} {self.end}"


_BY_TIME = "$__timeInterval(ts) AS time"
PANELS = (
    ClickHousePanel(
        "Requests by outcome", TIME_SERIES, f"{_BY_TIME}, outcome_label, count() AS requests",
        "GROUP BY time, outcome_label ORDER BY time",
    ),
    ClickHousePanel(
        "TTFT p95 by team", TIME_SERIES, f"{_BY_TIME}, team_label, quantile(0.95)(ttft_ms) AS ttft",
        "AND ttft_ms IS NOT NULL GROUP BY time, team_label ORDER BY time", unit="ms",
    ),
    ClickHousePanel(
        "Time by phase", TIME_SERIES,
        f"{_BY_TIME}, sum(gateway_queue_phase_ms) AS gateway_queue, sum(attempts_phase_ms) AS attempts,"
        " sum(network_phase_ms) AS network, sum(engine_queue_phase_ms) AS engine_queue,"
        " sum(prefill_phase_ms) AS prefill, sum(engine_phase_ms) AS engine, sum(decode_phase_ms) AS decode,"
        " sum(delivery_phase_ms) AS delivery",
        "GROUP BY time ORDER BY time", unit="ms",
    ),
    ClickHousePanel(
        "Completion tokens by team", TIME_SERIES, f"{_BY_TIME}, team_label, sum(completion_tokens) AS tokens",
        "GROUP BY time, team_label ORDER BY time",
    ),
    ClickHousePanel(
        "Failed requests by reason", TABLE, "outcome_label, coalesce(reason, 'unknown') AS why, count() AS requests",
        "AND outcome_label NOT IN ('ok', 'unknown') GROUP BY outcome_label, why ORDER BY requests DESC LIMIT 20",
    ),
    ClickHousePanel(
        "Slowest requests by TTFT", TABLE,
        "ts, request_id, team_label, model_label, upstream, outcome_label, prompt_tokens, completion_tokens, ttft_ms,"
        " e2e_ms, trace_id",
        "AND ttft_ms IS NOT NULL ORDER BY ttft_ms DESC LIMIT 50", width=24,
    ),
)  # fmt: skip


def dashboard(database: str = "vllm_watch", panels: Sequence[ClickHousePanel] = PANELS) -> dict[str, Any]:
    """Return the dashboard as JSON for Grafana's import. Raises ValueError for a database that is no plain name."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", database):
        raise ValueError(
            f"--database {database!r} is no plain name of a database; write letters, digits and '_', such as vllm_watch"
        )
    made, x, y, height = [], 0, 0, 9
    for number, panel in enumerate(panels, 1):
        if x + panel.width > 24:
            x, y = 0, y + height
        made.append({
            "id": number, "title": panel.title, "type": panel.kind, "datasource": _SOURCE,
            "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [{
                "refId": "A", "datasource": _SOURCE, "editorType": "sql", "rawSql": panel.sql(database),
                "queryType": "table" if panel.kind == TABLE else "timeseries",
                "format": 1 if panel.kind == TABLE else 0,
            }],
        })  # fmt: skip
        x += panel.width
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": _SOURCE["type"]}
    return {
        "uid": "vllm-watch-requests", "title": "vLLM / Requests", "tags": ["vllm-watch"],
        "schemaVersion": SCHEMA_VERSION, "timezone": "utc", "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *(_variable(name, database) for name in ("model", "team"))]},
        "panels": made,
    }  # fmt: skip


def _variable(name: str, database: str) -> dict[str, Any]:
    sql = f"SELECT DISTINCT {name}_label FROM {database}.requests WHERE $__timeFilter(ts) ORDER BY 1"
    return {
        "name": name, "label": name.capitalize(), "type": "query", "datasource": _SOURCE, "query": sql, "refresh": 2,
        "multi": True, "includeAll": True, "current": {"text": ["All"], "value": ["$__all"]},
    }  # fmt: skip
