"""Rows of a view from DuckDB and from ClickHouse, compared."""

from __future__ import annotations

import json
import math
from typing import Any

from exporters.dataset.query import RequestData

KEYS = ("request_id", "hour", "model", "team", "engine", "outcome", "reason")


def of_duckdb(data: RequestData, sql: str) -> list[dict[str, Any]]:
    head, rows = data.select(sql)
    return [dict(zip(head, row, strict=True)) for row in rows]


def rows_of(data: RequestData, view: str) -> list[dict[str, Any]]:
    """Return all rows of a view by DuckDB."""
    return of_duckdb(data, f"SELECT * FROM {view}")  # noqa: S608


def of_clickhouse(session: Any, sql: str) -> list[dict[str, Any]]:
    answer = session.query(f"{sql} SETTINGS output_format_json_quote_64bit_integers = 0", "JSONEachRow")
    return [json.loads(line) for line in answer.bytes().decode().splitlines()]


def difference(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str | None:
    """Return the first difference between rows in any order; None if there is none. Times to the second."""
    if len(mine) != len(theirs) or not mine:
        return f"{len(mine)} and {len(theirs)} rows"
    if list(mine[0]) != list(theirs[0]):
        return f"columns {', '.join(mine[0])} and {', '.join(theirs[0])}"
    for one, other in zip(_ordered(mine), _ordered(theirs), strict=True):
        for name in one:
            if not _same(one[name], other[name]):
                return f"{name}: {one[name]!r} and {other[name]!r}"
    return None


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [str(row[name])[:19] for name in KEYS if name in row])


def _same(one: object, other: object) -> bool:
    if hasattr(one, "isoformat"):
        return str(one.isoformat(sep=" "))[:19] == str(other)[:19]
    if other is None or one is None or isinstance(one, str | bool):
        return one == other
    return math.isclose(float(str(one)), float(str(other)), rel_tol=1e-9, abs_tol=1e-9)
