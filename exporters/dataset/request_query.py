"""Questions about requests: filters, order, groups and percentiles, as SQL over the view `requests`.

Invariant: values of a caller are parameters, never part of the SQL; names of columns come from the tables here."""

# ruff: noqa: S608 - names in SQL come from the tables of this module; values of a caller are parameters

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from exporters.config import meant
from exporters.dataset.query import RequestData
from exporters.dataset.views import DUCKDB, QUANTILES
from exporters.requests.record import Outcome

# Field of a filter or group -> column.
FIELDS = {
    "team": "team_label",
    "model": "model_label",
    "outcome": "outcome_label",
    "reason": "reason",
    "engine": "upstream",
    "variant": "variant",
    "cluster": "cluster",
}
GROUPS = FIELDS | {
    "adapter": "adapter",
    "priority": "priority",
    "route": "route",
    "engine_version": "engine_version",
    "finish_reason": "finish_reason",
    "unreadable": "unreadable",
    "hour": "strftime(ts AT TIME ZONE 'UTC', '%Y-%m-%dT%H:00Z')",
    "day": "strftime(ts AT TIME ZONE 'UTC', '%Y-%m-%d')",
}
# Name of a time -> expression, in ms. A missing part of the queue counts as 0, both missing as unknown.
TIMES = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "e2e": "e2e_ms",
    "queue": "CASE WHEN queue_ms IS NULL AND engine_queue_ms IS NULL THEN NULL"
    " ELSE coalesce(queue_ms, 0) + coalesce(engine_queue_ms, 0) END",
}
OUTCOMES = (*get_args(Outcome), "unknown")
LISTED = {
    "ended": "strftime(ts AT TIME ZONE 'UTC', '%Y-%m-%dT%H:%M:%S.%gZ')",
    "request_id": "request_id",
    "team": "team_label",
    "model": "model_label",
    "engine": "upstream",
    "outcome": "outcome_label",
    "reason": "reason",
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "queue_ms": TIMES["queue"],
    "ttft_ms": "ttft_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
}
_NAMES_AT_MOST = 1000  # names that a suggestion is looked for in


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Values by field; several of one field are alternatives. Raises ValueError for an unknown field or outcome."""

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.values:
            if name not in FIELDS:
                raise ValueError(f"requests have no field {name!r}{meant(name, FIELDS)}")
        for outcome in self.values.get("outcome", ()):
            if outcome not in OUTCOMES:
                raise ValueError(f"there is no outcome {outcome!r}{meant(outcome, OUTCOMES)}")

    def where(self) -> tuple[str, list[str]]:
        """Return a condition and its parameters."""
        parts, parameters = ["true"], list[str]()
        for name, values in self.values.items():
            if values:
                parts.append(f"{FIELDS[name]} IN ({', '.join('?' * len(values))})")
                parameters += values
        return " AND ".join(parts), parameters

    def unknown(self, data: RequestData) -> str | None:
        """Return a sentence about a value that no request has, with the nearest one; None if each occurs.

        For an empty answer: it reads every name."""
        for name, values in self.values.items():
            column = FIELDS[name]
            for value in values:
                if data.select(f"SELECT 1 FROM requests WHERE {column} = ? LIMIT 1", [value])[1]:
                    continue
                sql = f"SELECT DISTINCT {column} FROM requests WHERE {column} IS NOT NULL ORDER BY 1"
                known = [row[0] for row in data.select(f"{sql} LIMIT {_NAMES_AT_MOST}")[1]]
                return f"no request has {name} {value!r} in this time{meant(value, known)}"
        return None


@dataclass(frozen=True, slots=True)
class RequestTable:
    """Answer: names of columns, and rows."""

    head: list[str]
    rows: list[tuple[Any, ...]]


def listed(data: RequestData, only: RequestFilter, slowest: str | None = None, limit: int = 20) -> RequestTable:
    """Return the newest requests, or the slowest by a time of TIMES. Raises ValueError."""
    where, parameters = only.where()
    named = ", ".join(f"{sql} AS {name}" for name, sql in LISTED.items())
    order = "ts"
    if slowest is not None:
        order = f"({_known(slowest, TIMES, 'time')})"
        where = f"{where} AND {order} IS NOT NULL"
    # first the value from which on requests are listed: this reads one column of all rows, and all columns of few
    sql = f"SELECT min(o), count(o) FROM (SELECT {order} AS o FROM requests WHERE {where} ORDER BY o DESC NULLS LAST"
    ((least, count),) = data.select(f"{sql} LIMIT {int(limit)})", parameters)[1]
    if count == limit:
        where, parameters = f"{where} AND {order} >= ?", [*parameters, least]
    sql = f"SELECT {named} FROM requests WHERE {where} ORDER BY {order} DESC NULLS LAST, request_id LIMIT {int(limit)}"
    return RequestTable(*data.select(sql, parameters))


def grouped(data: RequestData, only: RequestFilter, by: Iterable[str] = (), limit: int = 1000) -> RequestTable:
    """Return one row for each combination of `by`, the most requests first. Raises ValueError."""
    keys = {name: _known(name, GROUPS, "field") for name in by}
    columns = {
        "requests": "count(*)",
        "errors": "count(*) FILTER (WHERE outcome_label NOT IN ('ok', 'unknown'))",
        **{tokens: f"sum({tokens})" for tokens in ("prompt_tokens", "cached_tokens", "completion_tokens")},
        **{f"{name}_mean_ms": f"avg({time})" for name, time in TIMES.items()},
    }
    return _grouped(data, only, keys, columns, limit)


def percentiles(data: RequestData, only: RequestFilter, by: Iterable[str] = (), limit: int = 1000) -> RequestTable:
    """Return one row for each time of TIMES and combination of `by`, in ms. Raises ValueError."""
    keys = {name: _known(name, GROUPS, "field") for name in by}
    columns = {"requests": "count(*)"}
    for name, time in TIMES.items():
        columns |= {f"{name}_count": f"count({time})"}
        columns |= {f"{name}_{q}": DUCKDB.quantile(time, share) for q, share in QUANTILES.items()}
        columns[f"{name}_max"] = f"max({time})"
    wide = _grouped(data, only, keys, columns, limit)
    each = len(QUANTILES) + 2
    rows = [
        (*row[: len(keys)], name, *row[start : start + each])
        for row in wide.rows
        for name, start in zip(TIMES, range(len(keys) + 1, len(wide.head), each), strict=True)
        if row[start]
    ]
    return RequestTable([*keys, "time", "count", *(f"{q}_ms" for q in QUANTILES), "max_ms"], rows)


def _grouped(
    data: RequestData, only: RequestFilter, keys: Mapping[str, str], columns: Mapping[str, str], limit: int
) -> RequestTable:
    where, parameters = only.where()
    named = ", ".join(f"{sql} AS {name}" for name, sql in {**keys, **columns}.items())
    places = ", ".join(map(str, range(1, len(keys) + 1)))
    group = f" GROUP BY {places} ORDER BY requests DESC, {places}" if keys else ""
    sql = f"SELECT {named} FROM requests WHERE {where}{group} LIMIT {int(limit)}"
    found = RequestTable(*data.select(sql, parameters))
    return RequestTable(found.head, [row for row in found.rows if row[len(keys)]])


def _known(name: str, table: Mapping[str, str], what: str) -> str:
    if name not in table:
        raise ValueError(f"requests have no {what} {name!r}{meant(name, table)}")
    return table[name]
