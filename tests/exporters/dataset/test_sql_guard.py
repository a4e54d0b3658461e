"""SQL of users: one SELECT over the views, and no way to files, network, extensions or settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from exporters.dataset import sql_guard
from exporters.dataset.query import RequestData, RequestSource, open_requests
from tests.support.request_dataset import made_requests, make_dataset

ALLOWED = (
    "SELECT count(*) FROM requests",
    "FROM traffic",
    "WITH x AS (SELECT * FROM traffic) SELECT team, sum(requests) OVER () FROM x ORDER BY 1",
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 5) SELECT * FROM t",
    "SELECT * FROM traffic UNION ALL SELECT * FROM traffic",
    "SELECT unnest([1, 2]) FROM range(2)",
    "DESCRIBE requests",
    "SUMMARIZE traffic",
    "SHOW TABLES",
    "VALUES (1)",
)
# what it tries -> statement; {own} is a file of the data set, {other} one beside it
ESCAPES = {
    "read_csv": "SELECT * FROM read_csv('{other}')",
    "file as table": "SELECT * FROM '{other}'",
    "read_text": "SELECT * FROM read_text('{other}')",
    "environment of the process": "SELECT * FROM read_blob('/proc/self/environ')",
    "glob": "SELECT * FROM glob('/etc/*')",
    "query": "SELECT * FROM query('SELECT * FROM read_text(''{other}'')')",
    "query_table": "SELECT * FROM query_table('{other}')",
    "sniff_csv": "SELECT * FROM sniff_csv('{other}')",
    "parquet metadata": "SELECT * FROM parquet_metadata('{other}')",
    "network": "SELECT * FROM read_csv('https://example.com/x.csv')",
    "object store": "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
    "copy": "COPY requests TO '{other}'",
    "copy over a segment": "COPY traffic TO '{own}' (USE_TMP_FILE false)",
    "copy in a CTE": "WITH x AS (COPY traffic TO '{own}' (USE_TMP_FILE false)) SELECT 1",
    "copy in a subquery": "SELECT (WITH x AS (COPY traffic TO '{own}' (USE_TMP_FILE false)) SELECT 1)",
    "export": "EXPORT DATABASE '{other}'",
    "insert in a CTE": "WITH x AS (INSERT INTO t VALUES (1) RETURNING *) SELECT * FROM x",
    "create": "CREATE TABLE t AS SELECT 1",
    "attach": "ATTACH '{other}' AS y",
    "install": "INSTALL httpfs",
    "load": "LOAD httpfs",
    "set": "SET enable_external_access = true",
    "reset": "RESET lock_configuration",
    "pragma": "PRAGMA database_list",
    "call": "CALL pragma_version()",
    "getenv": "SELECT getenv('HOME')",
    "settings": "SELECT * FROM duckdb_settings()",
    "secrets": "SELECT * FROM duckdb_secrets()",
    "log files": "SELECT * FROM enable_logging(storage_path = '{other}')",
    "explain": "EXPLAIN ANALYZE COPY traffic TO '{other}'",
    "prepare": "PREPARE p AS SELECT 1",
    "two statements": "SELECT 1; COPY traffic TO '{other}'",
    "no SQL": "not sql",
    "unknown column": "SELECT nonsense FROM requests",
}
STOPPED_BY_PARSING_ALONE = ("create", "pragma", "call", "settings", "prepare", "insert in a CTE")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarded")
    make_dataset(folder, made_requests(40))
    (folder / "other.csv").write_text("secret\n1\n")
    return folder


@pytest.fixture(scope="module")
def unlocked(folder: Path) -> Iterator[Callable[[], RequestData]]:
    """Return data in which nothing is locked; it is opened again once a statement came as far as that."""
    with contextlib.ExitStack() as stack:
        opened: list[RequestData] = []

        def get() -> RequestData:
            if not opened or opened[-1].select("SELECT current_setting('lock_configuration')")[1] != [(False,)]:
                opened.append(stack.enter_context(open_requests(RequestSource(location=str(folder)))))
            return opened[-1]

        yield get


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[RequestData]:
    with open_requests(RequestSource(location=str(folder))) as data:
        sql_guard.lock(data)
        yield data


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sql", ALLOWED)
def test_reads_of_views(unlocked: Callable[[], RequestData], sql: str):
    assert sql_guard.run(unlocked(), sql).rows


@pytest.mark.parametrize("what", ESCAPES)
def test_escapes(folder: Path, unlocked: Callable[[], RequestData], what: str):
    before, data = contents(folder), unlocked()
    sql = ESCAPES[what].format(other=folder / "other.csv", own=data.files[0])
    with pytest.raises(ValueError, match=r"\S"):
        sql_guard.run(data, sql)
    assert data.select("SELECT count(*) FROM requests")[1] == [(40,)]
    assert before == contents(folder)


@pytest.mark.parametrize("what", [w for w in ESCAPES if w not in STOPPED_BY_PARSING_ALONE and "own" not in ESCAPES[w]])
def test_escapes_without_the_parser(folder: Path, locked: RequestData, what: str):
    """The second barrier holds by itself: what DuckDB would run reaches no file."""
    before = contents(folder)
    with pytest.raises(duckdb.Error):
        locked.connection.execute(ESCAPES[what].format(other=folder / "other.csv"))
    assert before == contents(folder)


def test_rows_beyond_a_limit_are_left_out(folder: Path):
    with open_requests(RequestSource(location=str(folder))) as data:
        assert 3 == len(sql_guard.run(data, "FROM requests", limit=3).rows)
