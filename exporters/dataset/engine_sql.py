"""SQL that lets ClickHouse, Trino and Athena read a data set, with the documented views. Pure.

Invariant: engines read the segments that manifests list, not all files of the folder: a replaced segment stays there
until it is deleted, and would be counted twice."""

# ruff: noqa: S608 - the SQL is printed for its reader, who names database and location

from __future__ import annotations

import re
from collections.abc import Iterator

from exporters.dataset import columns, layout, views

CLICKHOUSE_TYPES = {
    "TIMESTAMP WITH TIME ZONE": "DateTime64(6, 'UTC')",
    "VARCHAR": "String",
    "BIGINT": "Int64",
    "DOUBLE": "Float64",
    "BOOLEAN": "Bool",
}
_TRINO_TYPES = dict(zip(CLICKHOUSE_TYPES, ("TIMESTAMP(6)", "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN"), strict=True))
_ATHENA_TYPES = {
    "TIMESTAMP WITH TIME ZONE": "timestamp", "VARCHAR": "string", "BIGINT": "bigint", "DOUBLE": "double",
    "BOOLEAN": "boolean",
}  # fmt: skip
_FILE = "regexp_extract({}, '[^/]+$')"


def clickhouse(location: str, endpoint: str | None = None, database: str = "vllm_watch") -> Iterator[str]:
    """Yield statements for ClickHouse: the segments as `recorded`, and the views. location: folder or s3://bucket/prefix.

    Credentials are those of the server: environment, role, or a named collection."""
    structure = ", ".join(f"{c.name} Nullable({CLICKHOUSE_TYPES[c.type]})" for c in columns.COLUMNS)
    segments = _clickhouse_files(location, endpoint, "day=*/cluster=*/model=*/*.parquet", "Parquet", structure)
    manifests = _clickhouse_files(location, endpoint, f"{layout.MANIFESTS}/day=*/cluster=*/*.json", "JSONAsString", "")
    names = ", ".join(column.name for column in columns.COLUMNS)
    yield f"CREATE DATABASE IF NOT EXISTS {database}"
    yield (
        f"CREATE OR REPLACE VIEW {database}.listed AS\n"
        "SELECT splitByChar('/', JSONExtractString(segment, 'key'))[-1] AS file\n"
        f"FROM {manifests}\nARRAY JOIN JSONExtractArrayRaw(json, 'segments') AS segment"
    )
    settings = "SETTINGS use_hive_partitioning = 0, input_format_parquet_allow_missing_columns = 1"
    rows = f"SELECT {names}\nFROM {segments}\nWHERE _file IN (SELECT file FROM {database}.listed)"
    yield f"CREATE OR REPLACE VIEW {database}.recorded AS\n{rows}\n{settings}"
    yield from _views(views.CLICKHOUSE, database)


def _clickhouse_files(location: str, endpoint: str | None, pattern: str, form: str, structure: str) -> str:
    named = f", {form}, {columns.sql_literal(structure)}" if structure else f", {form}"
    location = location.rstrip("/")
    if not location.startswith("s3://"):
        return f"file({columns.sql_literal(f'{location}/{pattern}')}{named})"
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    base = f"{endpoint.rstrip('/')}/{bucket}" if endpoint else f"https://{bucket}.s3.amazonaws.com"
    return f"s3({columns.sql_literal('/'.join(filter(None, (base, prefix, pattern))))}{named})"


def trino(location: str, schema: str = "hive.vllm_watch") -> Iterator[str]:
    """Yield statements for Trino's Hive connector, which needs hive.recursive-directories=true. Raises ValueError.

    Partitions are days only: model and cluster are columns of the files, as a partition may hold several models."""
    catalog, _, name = schema.partition(".")
    if not re.fullmatch(r"[A-Za-z0-9_]+\.[A-Za-z0-9_]+", schema):
        raise ValueError(f"{schema!r} is no catalog.schema of Trino, such as hive.vllm_watch")
    rows = ",\n  ".join([*(f"{c.name} {_TRINO_TYPES[c.type]}" for c in columns.COLUMNS), "day VARCHAR"])
    base = location.rstrip("/")
    yield f"CREATE SCHEMA IF NOT EXISTS {schema}"
    yield (
        f"CREATE TABLE IF NOT EXISTS {schema}.segments (\n  {rows}\n)\nWITH (format = 'PARQUET',"
        f" external_location = {columns.sql_literal(base + '/')}, partitioned_by = ARRAY['day'])"
    )
    yield (
        f"CREATE TABLE IF NOT EXISTS {schema}.manifests (segments ARRAY(ROW(key VARCHAR)))\n"
        f"WITH (format = 'JSON', external_location = {columns.sql_literal(f'{base}/{layout.MANIFESTS}/')})"
    )
    # again after midnight, for the new day
    yield f"CALL {catalog}.system.sync_partition_metadata({columns.sql_literal(name)}, 'segments', 'ADD')"
    yield _listed_only(schema)
    yield from _views(views.TRINO, schema)


def athena(location: str, database: str = "vllm_watch") -> Iterator[str]:
    """Yield statements for Athena, which reads subfolders of a partition."""
    base = location.rstrip("/")
    rows = ",\n  ".join(f"`{c.name}` {_ATHENA_TYPES[c.type]}" for c in columns.COLUMNS)
    yield f"CREATE DATABASE IF NOT EXISTS {database}"
    yield (
        f"CREATE EXTERNAL TABLE IF NOT EXISTS {database}.segments (\n  {rows}\n)\nPARTITIONED BY (`day` string)\n"
        f"STORED AS PARQUET\nLOCATION {columns.sql_literal(base + '/')}"
    )
    yield (
        f"CREATE EXTERNAL TABLE IF NOT EXISTS {database}.manifests (`segments` array<struct<key:string>>)\n"
        "ROW FORMAT SERDE 'org.openx.data.jsonserde.JsonSerDe'\n"
        f"LOCATION {columns.sql_literal(f'{base}/{layout.MANIFESTS}/')}"
    )
    # again after midnight, for the new day
    yield f"MSCK REPAIR TABLE {database}.segments"
    yield _listed_only(database)
    yield from _views(views.TRINO, database)


def _listed_only(schema: str) -> str:
    names = ", ".join(column.name for column in columns.COLUMNS)
    listed = f"SELECT {_FILE.format('s.key')} FROM {schema}.manifests CROSS JOIN UNNEST(segments) AS s(key)"
    where = f"{_FILE.format(chr(34) + '$path' + chr(34))} IN ({listed})"
    return f"CREATE OR REPLACE VIEW {schema}.recorded AS\nSELECT {names}\nFROM {schema}.segments\nWHERE {where}"


def _views(dialect: views.Dialect, schema: str) -> Iterator[str]:
    for view in views.VIEWS:
        sql = view.select(dialect).replace("FROM recorded", f"FROM {schema}.recorded")
        if view.name != "requests":
            sql = sql.replace("FROM requests", f"FROM {schema}.requests")
        yield f"CREATE OR REPLACE VIEW {schema}.{view.name} AS\n{sql}"
