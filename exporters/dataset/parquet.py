"""Parquet segments through DuckDB."""

from __future__ import annotations

from pathlib import Path

import duckdb


def connect(memory_mb: int = 256, threads: int = 1, spill: Path | None = None) -> duckdb.DuckDBPyConnection:
    """Return an in-memory DuckDB with limits, in UTC, which loads no extension and no setting from elsewhere.

    spill: folder for what does not fit into memory; None: a query that needs more fails."""
    connection = duckdb.connect(
        config={
            "threads": threads,
            "memory_limit": f"{memory_mb}MB",
            "temp_directory": "" if spill is None else str(spill),
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
    )
    connection.execute("SET TimeZone = 'UTC'")
    return connection
