"""Columns of a segment: name, SQL type, unit, and the schema version that added each.

Invariant: a column keeps its name, type and meaning. New columns are added at the end with the next schema version;
older segments then have no such column and are read with nulls. No column holds text of a prompt or a reply."""

from __future__ import annotations

from dataclasses import dataclass

from exporters.requests.record import RequestRecord

SCHEMA = 3  # version that is written


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a segment. source: the field of RequestRecord; None: from the data set's configuration.

    unit: "" for text, flags and plain counts. since: schema version that added it."""

    name: str
    type: str
    source: str | None
    unit: str = ""
    since: int = 1


def _of_record(name: str, sql_type: str, unit: str = "", since: int = 1) -> Column:
    return Column(name, sql_type, name, unit, since)


TEXT, COUNT, MEASURE, FLAG = "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN"

COLUMNS: tuple[Column, ...] = (
    # UTC with microseconds; null for a record without a time
    _of_record("ts", "TIMESTAMP WITH TIME ZONE"),
    Column("cluster", TEXT, None),
    Column("writer", TEXT, None),
    _of_record("request_id", TEXT),
    _of_record("trace_id", TEXT),
    _of_record("span_id", TEXT),
    _of_record("parent_span_id", TEXT),
    _of_record("sampled", FLAG),
    _of_record("team", TEXT),
    _of_record("priority", TEXT),
    _of_record("model", TEXT),
    _of_record("adapter", TEXT),
    _of_record("route", TEXT),
    _of_record("upstream", TEXT),
    _of_record("prefill_engine", TEXT),
    _of_record("decode_engine", TEXT),
    _of_record("variant", TEXT),
    _of_record("engine_version", TEXT),
    _of_record("attempt", COUNT),
    _of_record("tried", TEXT),
    _of_record("stream", FLAG),
    _of_record("n", COUNT, "texts per prompt"),
    _of_record("prompts", COUNT, "prompts"),
    _of_record("prompt_tokens", COUNT, "tokens"),
    _of_record("cached_tokens", COUNT, "tokens"),
    _of_record("completion_tokens", COUNT, "tokens"),
    _of_record("cache_hit", FLAG),
    _of_record("queue_ms", MEASURE, "ms"),
    _of_record("ttft_ms", MEASURE, "ms"),
    _of_record("tpot_ms", MEASURE, "ms"),
    _of_record("e2e_ms", MEASURE, "ms"),
    _of_record("engine_queue_ms", MEASURE, "ms"),
    _of_record("engine_ttft_ms", MEASURE, "ms"),
    _of_record("status", COUNT),
    _of_record("finish_reason", TEXT),
    _of_record("outcome", TEXT),
    _of_record("reason", TEXT),
    _of_record("retry_after_s", MEASURE, "s"),
    _of_record("est_prompt_tokens", COUNT, "tokens"),
    _of_record("content_events", COUNT, "events"),
    _of_record("est_completion_tokens", COUNT, "tokens"),
    _of_record("client_wait_ms", MEASURE, "ms", since=2),
    _of_record("unreadable", TEXT, since=3),
)
BY_NAME = {column.name: column for column in COLUMNS}
OF_RECORD = tuple(column for column in COLUMNS if column.source is not None)

if missing := set(RequestRecord.__struct_fields__) - {column.source for column in COLUMNS}:
    raise TypeError(f"columns.py has no column for {', '.join(sorted(missing))} of RequestRecord")


def empty_select() -> str:
    """Return a SELECT of all columns without rows: `UNION ALL BY NAME` with it gives older segments the new columns."""
    return f"SELECT {', '.join(f'NULL::{column.type} AS {column.name}' for column in COLUMNS)} WHERE false"


def sql_literal(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
