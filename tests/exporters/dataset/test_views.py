"""Documented views: the same answers from DuckDB, ClickHouse and the sidecar's counters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards import clickhouse_requests
from exporters.dataset import engine_sql, views
from exporters.dataset.query import RequestData, RequestSource, open_requests
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counter_rows import read_row
from exporters.requests.counters import OUTCOMES, RequestCounters
from exporters.requests.phases import PHASES, phases_of
from exporters.requests.record import RequestRecord, ended_at
from tests.support import engine_rows
from tests.support.engine_rows import rows_of
from tests.support.request_dataset import START_S, made_requests, make_dataset


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    return made_requests(3000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, records: list[RequestRecord]) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    make_dataset(folder, records)
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> Iterator[RequestData]:
    with open_requests(RequestSource(location=str(folder))) as data:
        yield data


def test_records_come_back_unchanged(data: RequestData, records: list[RequestRecord]):
    found = {record.request_id: record for record in data.records()}
    assert len(records) == len(found)
    for record in records:
        same = found[record.request_id]
        assert ended_at(record) == ended_at(same)
        assert {name: getattr(record, name) for name in RequestRecord.__struct_fields__ if name != "ts"} == {
            name: getattr(same, name) for name in RequestRecord.__struct_fields__ if name != "ts"
        }


def test_totals_equal_the_counters(data: RequestData, records: list[RequestRecord]):
    counters = RequestCounters(BoundedNames((), 50), BoundedNames((), 50))
    counters.add_all(records)
    counted = {key: read_row(change[0]) for key, change in counters.changed().items()}
    traffic = {(row["model"], row["team"]): row for row in rows_of(data, "traffic")}
    latency = {(row["model"], row["team"]): row for row in rows_of(data, "latency")}
    finished = {(row["model"], row["team"]): row for row in rows_of(data, "finished")}
    reasons: dict[tuple[object, object], dict[str, dict[str, int]]] = {}
    for row in rows_of(data, "reasons"):
        by_reason = reasons.setdefault((row["model"], row["team"]), {}).setdefault(str(row["outcome"]), {})
        by_reason[str(row["reason"])] = int(str(row["requests"]))
    assert counted.keys() == traffic.keys() == latency.keys() == finished.keys()
    for key, series in counted.items():
        mine = traffic[key]
        assert {**dict.fromkeys(OUTCOMES, 0), "unknown": 0, **series.outcomes} == {
            name: mine[name] for name in (*OUTCOMES, "unknown")
        }
        assert series.tokens == (mine["prompt_tokens"], mine["cached_tokens"], mine["completion_tokens"])
        assert sum(series.unreadable.values()) == mine["unreadable_requests"]
        assert series.estimated == (mine["estimated_prompt_tokens"], mine["estimated_completion_tokens"])
        assert reasons.get(key, {}) == series.reasons
        work = finished[key]
        requests, prompt, completion, _, cached = series.finished
        assert (requests, prompt, cached, completion) == tuple(
            work[name] for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        )
        for at, name in enumerate(("ttft", "tpot", "e2e", "queue", "engine_queue")):
            assert sum(series.counts[at]) == latency[key][f"{name}_count"], name
            assert math.isclose(series.sums_ms[at], float(str(latency[key][f"{name}_sum_ms"] or 0)), rel_tol=1e-9), name


def test_phases_of_sql_equal_those_of_python(data: RequestData, records: list[RequestRecord]):
    named = [name for name in PHASES if name != "stall"]
    columns = ", ".join(f"{name}_phase_ms" for name in named)
    found = {row[0]: row[1:] for row in data.select(f"SELECT request_id, {columns} FROM requests")[1]}  # noqa: S608
    for record in records:
        mine = {phase.name: phase.length_ms for phase in phases_of(record)}
        assert {name: mine.get(name, 0.0) for name in named} == pytest.approx(
            dict(zip(named, found[record.request_id], strict=True)), abs=1e-6
        )
        assert (record.e2e_ms or 0.0) == pytest.approx(sum(mine.values()), abs=1e-6)


def test_clickhouse_gives_the_same_rows(data: RequestData, folder: Path):
    """The real engine runs the printed statements on the same files."""
    session = pytest.importorskip("chdb.session").Session()
    leftover = next(folder.glob("day=*/**/*.parquet"))  # replaced by compaction, not deleted yet
    (leftover.parent / f"{'0' * 40}.parquet").write_bytes(leftover.read_bytes())
    try:
        for statement in engine_sql.clickhouse(str(folder)):
            session.query(statement)
        for view in views.VIEWS:
            mine = rows_of(data, view.name)
            theirs = engine_rows.of_clickhouse(session, f"SELECT * FROM vllm_watch.{view.name}")  # noqa: S608
            assert engine_rows.difference(mine, theirs) is None, view.name
        for panel in clickhouse_requests.PANELS:
            assert session.query(_filled(panel.sql("vllm_watch")), "JSONEachRow").bytes(), panel.title
        for variable in clickhouse_requests.dashboard()["templating"]["list"][1:]:
            assert session.query(_filled(variable["query"]), "JSONEachRow").bytes()
    finally:
        session.close()
        (leftover.parent / f"{'0' * 40}.parquet").unlink()


def _filled(sql: str) -> str:
    """Return a query of the Grafana dashboard with its macros and variables filled in as the plugin does."""
    return (
        sql.replace("$__timeFilter(ts)", "ts >= '2025-11-24 00:00:00'")
        .replace("$__timeInterval(ts)", "toStartOfInterval(ts, INTERVAL 60 second)")
        .replace("${model:singlequote}", "'large','small'")
        .replace("${team:singlequote}", "'chat','batch'")
    )


def test_trino_and_athena_statements_name_every_column_and_view():
    """No engine of theirs runs here: the statements are checked for what they must name."""
    for statements in (list(engine_sql.trino("s3://bucket/logs")), list(engine_sql.athena("s3://bucket/logs"))):
        text = ";\n".join(statements)
        assert text.count("CREATE OR REPLACE VIEW") == len(views.VIEWS) + 1
        assert "s3://bucket/logs/manifests/" in text
        assert '"$path"' in text
    with pytest.raises(ValueError, match="is no catalog"):
        list(engine_sql.trino("s3://bucket/logs", "x; DROP TABLE y"))


def test_hour_and_time_range(folder: Path, records: list[RequestRecord]):
    with open_requests(RequestSource(location=str(folder)), START_S + 100, START_S + 700) as data:
        inside = [one for one in records if START_S + 100 <= (ended_at(one) or 0) < START_S + 700]
        assert len(inside) == data.select("SELECT sum(requests) FROM traffic")[1][0][0]
        assert len(inside) == data.select("SELECT sum(requests) FROM hourly")[1][0][0]
