"""Queries of a user over a data set: one SELECT that reads the views and nothing else.

Invariant: two independent barriers. The statement is parsed, and only the kinds of nodes and the table functions named
here pass: DuckDB takes COPY and INSERT inside WITH. Then it runs where files outside the data set, network, extensions
and settings are switched off and locked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import duckdb

from exporters.dataset.columns import sql_literal
from exporters.dataset.query import RequestData, first_line
from exporters.dataset.request_query import RequestTable

QUERY_NODES = ("SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE")
TABLE_FUNCTIONS = ("range", "generate_series", "unnest")
_ONLY = "only one SELECT over the views is run; see `vllm-watch requests sql --views`"


def check(sql: str, connection: duckdb.DuckDBPyConnection) -> None:
    """Raise ValueError for anything that is not one plain SELECT."""
    try:
        statements = connection.extract_statements(sql)
        (found,) = connection.execute("SELECT json_serialize_sql(CAST(? AS VARCHAR))", [sql]).fetchone() or ("",)
        tree = json.loads(found)
    except duckdb.Error as error:
        raise ValueError(first_line(error)) from error
    if tree.get("error"):
        message = tree.get("error_message", "")
        raise ValueError(f"{message}; {_ONLY}" if tree.get("error_type") == "parser" else _ONLY)
    if len(statements) != 1 or len(tree["statements"]) != 1:
        raise ValueError(f"{len(statements)} statements were given; {_ONLY}")
    for kind, name in _parts(tree):
        if kind == "query" and name not in QUERY_NODES:
            raise ValueError(f"{name.removesuffix('_NODE')} is refused; {_ONLY}")
        if kind == "function" and name not in TABLE_FUNCTIONS:
            raise ValueError(f"the table function {name} is refused: it reads more than the data set; {_ONLY}")


def _parts(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield the kind of each query and the name of each table function in a serialized statement."""
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            kind = part.get("type")
            if isinstance(kind, str) and kind.endswith("_NODE"):
                yield "query", kind
            if kind == "TABLE_FUNCTION":
                yield "function", str((part.get("function") or {}).get("function_name")).lower()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def lock(data: RequestData) -> None:
    """Switch off everything but the files of the data set, for good."""
    files = ", ".join(sql_literal(str(path)) for path in data.files)
    for setting in (
        f"allowed_paths = [{files}]",
        "allow_community_extensions = false",
        "python_enable_replacements = false",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        data.connection.execute(f"SET {setting}")


def run(data: RequestData, sql: str, limit: int | None = None) -> RequestTable:
    """Return the answer to a user's query, after which `data` reads its files and nothing else. Raises ValueError."""
    check(sql, data.connection)
    lock(data)
    try:
        result = data.connection.execute(sql)
        rows = result.fetchall() if limit is None else result.fetchmany(limit)
        return RequestTable([name for name, *_ in result.description or ()], rows)
    except duckdb.Error as error:
        raise ValueError(first_line(error)) from error
