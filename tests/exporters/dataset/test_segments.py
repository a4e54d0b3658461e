"""Records become Parquet and come back equal, whatever they hold."""

# ruff: noqa: S608 - names of columns and files of this test

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporters.dataset import parquet, query, views
from exporters.dataset.columns import COLUMNS, OF_RECORD, SCHEMA
from exporters.dataset.layout import OTHER_MODELS, UNDATED, LogSegment, Sums, digest_of, model_name, total
from exporters.dataset.parquet import SegmentFile, SegmentMaker
from exporters.dataset.query import RequestData
from exporters.dataset.segment_buffer import RunKey, SegmentBuffer
from exporters.requests.record import RequestRecord, parse_line
from tests.support.installed import ROOT

EXAMPLES = int(os.environ.get("VLLM_WATCH_HISTORIES", "12"))
texts = st.none() | st.text(max_size=20)
counts = st.none() | st.integers(0, 10**12 - 1)
measures = st.none() | st.floats(0, 1e12, exclude_max=True)
flags = st.none() | st.booleans()
times = st.none() | st.sampled_from(
    [
        "2026-11-25T09:30:00.123Z",
        "2026-11-25T23:59:59.999Z",
        "2026-11-26T00:00:00.000Z",
        "2026-11-25T23:30:00-03:00",
        "2026-11-25 09:30:00",
        "2026-11-25T09:30:00.123456+02:00",
        "20261125T093000Z",
        "2026-11-25T09:30:00,5",
        "2026-W48-3",
        "0001-01-01T00:00:00+14:00",
    ]
)
records = st.builds(
    RequestRecord,
    request_id=st.text(max_size=40),
    ts=times,
    **{
        column.name: {"VARCHAR": texts, "BIGINT": counts, "DOUBLE": measures, "BOOLEAN": flags}[column.type]
        for column in OF_RECORD
        if column.name not in ("request_id", "ts", "n", "prompts", "status", "outcome")
    },
    n=st.none() | st.integers(0, 99_999),
    prompts=st.none() | st.integers(0, 99_999),
    status=st.none() | st.integers(100, 599) | st.just(10**40),
    outcome=st.none() | st.sampled_from(["ok", "client_abort", "rejected", "upstream_error", "timeout"]),
)


def seal(folder: Path, some: list[RequestRecord]) -> list[SegmentFile]:
    buffer = SegmentBuffer()
    buffer.add(some)
    return SegmentMaker(folder, "prod", "gw-0").seal(buffer)


def rows(*files: SegmentFile) -> list[tuple[object, ...]]:
    with parquet.connect() as db:
        paths = [str(file.path) for file in files]
        names = ", ".join("epoch_us(ts)" if column.name == "ts" else column.name for column in COLUMNS)
        return db.execute(f"SELECT {names} FROM read_parquet($paths)", {"paths": paths}).fetchall()


def as_row(record: RequestRecord) -> tuple[object, ...]:
    """What a reader must find of a record."""
    values = msgspec.structs.asdict(record) | {"cluster": "prod", "writer": "gw-0"}
    if record.ts is not None:
        stamp = datetime.fromisoformat(record.ts)
        stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
        since = stamp - datetime(1970, 1, 1, tzinfo=UTC)
        lowest = datetime(1, 1, 1, tzinfo=UTC)
        values["ts"] = None if stamp < lowest else (since.days * 86400 + since.seconds) * 10**6 + since.microseconds
    if record.status == 10**40:
        values["status"] = None
    return tuple(values[column.name] for column in COLUMNS)


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(some=st.lists(records, min_size=1, max_size=8))
def test_segments_hold_every_value_of_their_records(some, tmp_path_factory):
    files = seal(tmp_path_factory.mktemp("spool"), some)
    assert sorted(map(repr, map(as_row, some))) == sorted(map(repr, rows(*files)))
    sums = Sums(
        len(some),
        *(
            sum(getattr(record, name) or 0 for record in some)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        ),
    )
    assert sums == total(file.segment.sums for file in files)


def record(number: int, **fields: object) -> RequestRecord:
    return RequestRecord(
        **(
            {"request_id": f"{number:032x}", "ts": f"2026-11-25T10:00:{number % 60:02}.000Z", "model": "chat"}
            | {"team": f"team-{number % 3}", "prompt_tokens": number, "completion_tokens": 1, "outcome": "ok"}
            | fields
        )
    )


def test_partitions_are_days_and_models(tmp_path):
    some = [
        record(1),
        record(2, model="org/name"),
        record(3, ts="2026-11-26T00:00:00.000Z"),
        record(4, ts=None),
        record(5, model=None),
    ]
    made = {(file.segment.day, file.segment.model): file.segment for file in seal(tmp_path, some)}
    assert {
        ("2026-11-25", "chat"),
        ("2026-11-25", "org%2Fname"),
        ("2026-11-25", "__HIVE_DEFAULT_PARTITION__"),
        ("2026-11-26", "chat"),
        (UNDATED, "chat"),
    } == set(made)
    assert "org/name" == model_name("org%2Fname")
    assert made[UNDATED, "chat"].min_ts is None
    segment = made["2026-11-26", "chat"]
    assert segment.key == f"day=2026-11-26/cluster=prod/model=chat/{segment.sha256[:40]}.parquet"
    assert (1795651200.0, 1795651200.0, SCHEMA) == (segment.min_ts, segment.max_ts, segment.schema)


def test_rare_models_share_a_partition(tmp_path):
    """Clients may send any model name; each with a file of its own would make thousands."""
    some = [record(number, model=f"made-up-{number}") for number in range(200)] + [record(200), record(201)]
    made = [file.segment for file in seal(tmp_path, some)]
    assert 51 == len(made)
    (shared,) = (segment for segment in made if segment.model == OTHER_MODELS)
    assert 202 - 49 - 2 == shared.sums.requests
    assert 2 == next(segment for segment in made if segment.model == "chat").sums.requests


def test_models_that_served_nothing_share_a_partition(tmp_path):
    some = [record(number, model=f"made-up-{number}", outcome="rejected") for number in range(20)] + [record(30)]
    made = {file.segment.model: file.segment.sums.requests for file in seal(tmp_path, some)}
    assert {"chat": 1, OTHER_MODELS: 20} == made


def test_equal_lines_make_equal_bytes(tmp_path):
    some = [record(number) for number in range(5000)]
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    (one,), (other,) = seal(first, some), seal(second, some)
    assert one.segment == other.segment
    assert one.path.read_bytes() == other.path.read_bytes()
    assert one.segment.sha256 == digest_of(one.path.read_bytes())


def test_no_prompt_reaches_a_segment(tmp_path):
    line = b'{"request_id":"1","prompt":"SECRET","messages":[{"content":"SECRET"}],"team":"a"}'
    (made,) = seal(tmp_path, [parse_line(line)])
    assert b"SECRET" not in made.path.read_bytes()
    assert not {"prompt", "messages", "text", "content"} & {column.name for column in COLUMNS}


def test_lost_records_are_noticed(tmp_path, monkeypatch):
    def write_less(buffer: SegmentBuffer, keys: Iterable[RunKey], target: Path) -> None:
        write(buffer, keys, target)
        target.write_bytes(target.read_bytes().splitlines(keepends=True)[0])

    buffer, write = SegmentBuffer(), SegmentBuffer.write
    buffer.add([record(1, team="a"), record(2, team="a")])
    monkeypatch.setattr(SegmentBuffer, "write", write_less)
    with pytest.raises(parquet.SumsDiffer):
        SegmentMaker(tmp_path, "prod", "gw-0").seal(buffer)


def test_rows_are_sorted_by_team(tmp_path):
    """In the order of arrival within a team and outcome, however the lines were read."""
    some = [record(number, outcome=choose) for number in range(300) for choose in ("ok", "rejected")]
    buffer = SegmentBuffer()
    for at in range(0, len(some), 7):
        buffer.add(some[at : at + 7])
    (made,) = SegmentMaker(tmp_path, "prod", "gw-0").seal(buffer)
    ordered = sorted(some, key=lambda one: (one.team, one.outcome))
    assert [one.request_id for one in ordered] == [row[3] for row in rows(made)]
    (whole,) = seal(tmp_path, some)
    assert whole.segment == made.segment


def test_partition_of_a_day_holds_its_days_records(tmp_path):
    """Also where a time names the day in another way: an offset, no zone, the end of the day before."""
    given = ["2026-11-25T23:30:00-03:00", "2026-11-26 01:00:00", "20261126T020000Z", "2026-11-26T23:59:59.999Z"]
    (made,) = seal(tmp_path, [record(number, ts=ts) for number, ts in enumerate(given)])
    assert "2026-11-26" == made.segment.day


def test_merged_segments_hold_the_same_rows(tmp_path):
    parts = [seal(tmp_path, [record(number) for number in range(at, at + 100)])[0] for at in (0, 100, 200)]
    merged = SegmentMaker(tmp_path, "prod", "gw-0").merge("2026-11-25", "chat", parts)
    assert sorted(map(repr, rows(*parts))) == sorted(map(repr, rows(merged)))
    assert 300 == merged.segment.sums.requests


def test_a_merge_that_changes_rows_is_refused(tmp_path):
    (part,) = seal(tmp_path, [record(number) for number in range(10)])
    wrong = SegmentFile(msgspec.structs.replace(part.segment, sums=Sums(11)), part.path)
    with pytest.raises(parquet.SumsDiffer, match="changed their content"):
        SegmentMaker(tmp_path, "prod", "gw-0").merge("2026-11-25", "chat", [wrong])


def test_segments_of_an_older_schema_are_read_with_nulls(tmp_path):
    """As after an update that adds columns: merged and read together."""
    (new,) = seal(tmp_path, [record(1)])
    older = tmp_path / "older.parquet"
    with parquet.connect() as db:
        db.execute(
            f"COPY (SELECT * EXCLUDE (unreadable, est_completion_tokens, writer) FROM '{new.path}') TO '{older}'"
        )
    segment = LogSegment(**(msgspec.structs.asdict(new.segment) | {"schema": 0, "sha256": "0"}))
    merged = SegmentMaker(tmp_path, "prod", "gw-0").merge("2026-11-25", "chat", [new, SegmentFile(segment, older)])
    assert [None, "gw-0"] == sorted((row[2] for row in rows(merged)), key=str)
    assert SCHEMA == merged.segment.schema


@pytest.mark.parametrize("schema", range(1, SCHEMA))
def test_views_read_every_older_schema(tmp_path, schema):
    """A field of a record reaches the view `requests` and the guide; segments from before it have nulls."""
    later = [column.name for column in COLUMNS if column.since > schema]
    (new,) = seal(tmp_path, [record(1, unreadable="usage", client_wait_ms=5.0)])
    older = tmp_path / "older.parquet"
    with parquet.connect() as db:
        db.execute(f"COPY (SELECT * EXCLUDE ({', '.join(later)}) FROM '{new.path}') TO '{older}'")
    assert later
    data = RequestData(parquet.connect(), files=[older, new.path])
    query._create_views(data)
    found = data.select(f"SELECT {', '.join(later)} FROM requests")[1]
    assert [0, len(later)] == sorted(row.count(None) for row in found)
    assert all(data.select(f"SELECT * FROM {view.name}")[0] for view in views.VIEWS)
    data.connection.close()
    guide = (ROOT / "docs/guides/dataset.md").read_text()
    assert all(f"`{name}`" in guide for name in later)
