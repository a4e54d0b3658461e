"""One relation of segments and live lines: no line twice, damaged parts named."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import msgspec
import pytest

from exporters.dataset import layout, verified
from exporters.dataset.catalog import local_copy, open_store
from exporters.dataset.commit_reader import ShippedState, read_shipped
from exporters.dataset.layout import BadDataset
from exporters.dataset.objects import FolderStore, ObjectStore, S3Access
from exporters.dataset.parquet import connect
from exporters.dataset.query import RequestSource, open_requests
from exporters.dataset.ship import Shipper
from exporters.dataset.ship_config import ShipConfig
from exporters.requests.duplicates import RecentRequests
from exporters.requests.record import RequestRecord, to_line
from exporters.requests.tail import Tail
from tests.support import s3_standin
from tests.support.request_dataset import START_S, made_requests, make_dataset

RECORDS = made_requests(300)


def lines(records: list[RequestRecord]) -> bytes:
    return b"".join(map(to_line, records))


def ids(source: RequestSource) -> list[str]:
    with open_requests(source) as data:
        return sorted(record.request_id for record in data.records())


def test_rotated_and_compressed_files_belong_to_the_log(tmp_path: Path):
    log = tmp_path / "requests.jsonl"
    (tmp_path / "requests.jsonl.2.gz").write_bytes(gzip.compress(lines(RECORDS[:100])))
    (tmp_path / "requests.jsonl.1").write_bytes(lines(RECORDS[100:200]))
    log.write_bytes(lines([*RECORDS[200:], RECORDS[-1]]) + b'no record\n{"request_id": "unfinished')
    with open_requests(RequestSource(logs=(log,))) as data:
        assert sorted(one.request_id for one in RECORDS) == sorted(one.request_id for one in data.records())
        bad, repeats = data.notes
        assert re.fullmatch(r"1 bad lines \(json\)", bad)
        assert ([1], True) == ([*data.totals.repeats.values()], repeats.startswith("1 of 301 lines"))


def test_a_segment_is_hashed_once_until_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    segments = make_dataset(tmp_path / "data", RECORDS)
    source = RequestSource(location=str(tmp_path / "data"), cache=tmp_path / "cache")
    hashed: list[str] = []

    def noted(store: ObjectStore, segment: layout.LogSegment, cache: Path) -> Path:
        hashed.append(segment.key)
        return local_copy(store, segment, cache)

    monkeypatch.setattr(verified, "local_copy", noted)
    assert ids(source) == ids(source)
    assert sorted(segment.key for segment in segments) == sorted(hashed)
    path = tmp_path / "data" / segments[0].key
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    os.utime(path, ns=(1, 1))
    with open_requests(source) as data:
        assert [segments[0].key] == hashed[len(segments) :]
        assert "is damaged" in data.damaged[0]
    (tmp_path / "cache" / "verified").write_bytes(b"no record of files")
    assert 0 < len(ids(source)) < len(RECORDS)


def shipped(log: Path, count: int) -> ShippedState:
    """Return the state of a shipper that has read `count` lines, by the tail that it uses."""
    content = log.read_bytes()
    log.write_bytes(b"".join(content.splitlines(keepends=True)[:count]))
    tail, window = Tail(log), RecentRequests()
    while tail.poll(0.0):
        pass
    window.fresh(RECORDS[:count])
    tail.close()
    with log.open("ab") as file:  # the same file goes on
        file.write(content[len(log.read_bytes()) :])
    return ShippedState(count, {str(log): tail.positions()}, tuple(window.newer | window.older))


def test_live_lines_count_from_the_shipped_position(tmp_path: Path):
    log = tmp_path / "requests.jsonl"
    log.write_bytes(lines(RECORDS))
    state = shipped(log, 120)
    make_dataset(tmp_path / "data", RECORDS[:120])
    source = RequestSource(location=str(tmp_path / "data"), logs=(log,), committed=lambda: state)
    assert sorted(one.request_id for one in RECORDS) == ids(source)
    log.rename(tmp_path / "requests.jsonl.1")  # rotated since
    log.write_bytes(lines(made_requests(5, seed=2)))
    assert len(RECORDS) + 5 == len(ids(source))
    # a line that was written twice, before and after the position
    log.write_bytes(lines([*made_requests(5, seed=2), RECORDS[7]]))
    assert len(RECORDS) + 5 == len(ids(source))


def test_a_commit_meanwhile_makes_readers_start_again(tmp_path: Path):
    """The position moves after it was read: the new segment must not be counted with the old position."""
    log = tmp_path / "requests.jsonl"
    log.write_bytes(lines(RECORDS))
    states = [shipped(log, 100), shipped(log, 200)]
    make_dataset(tmp_path / "data", RECORDS[:100])
    asked = []

    def state() -> ShippedState:
        asked.append(1)
        if len(asked) == 2:
            make_dataset(tmp_path / "data", RECORDS[100:200])
        return states[len(asked) > 1]

    source = RequestSource(location=str(tmp_path / "data"), logs=(log,), committed=state)
    assert sorted(one.request_id for one in RECORDS) == ids(source)
    assert 4 == len(asked)


def test_every_moment_of_a_real_shipper(tmp_path: Path):
    """Before and after each step, with segments in the spool, listed, and lines that are read but not sealed."""
    log, folder = tmp_path / "requests.jsonl", tmp_path / "state"
    config = ShipConfig(
        dataset=str(tmp_path / "data"), cluster="c", writer="w", requests_log=(str(log),), state=str(folder)
    )
    log.write_bytes(lines(RECORDS[:100]))
    shipper = Shipper(config)
    shipper.claim()
    source = RequestSource(
        location=config.dataset, logs=(log,), committed=lambda: read_shipped(folder, config.remember), cluster="c"
    )

    def expect(count: int, pending: int) -> None:
        assert sorted(one.request_id for one in RECORDS[:count]) == ids(source)
        assert (pending > 0) == bool(read_shipped(folder, config.remember).pending)

    expect(100, 0)  # nothing is committed
    shipper.step()
    expect(100, 0)  # in the buffer only
    shipper.seal()
    expect(100, 1)  # in the spool
    with log.open("ab") as file:
        file.write(lines(RECORDS[100:150]))
    expect(150, 1)
    shipper.step(last=True)
    expect(150, 0)
    log.rename(tmp_path / "requests.jsonl.1")
    log.write_bytes(lines([*RECORDS[150:200], RECORDS[10]]))
    expect(200, 0)
    shipper.step(last=True)
    expect(200, 0)
    shipper.close()


def test_a_damaged_segment_is_named_left_out_and_counted(tmp_path: Path):
    segments = make_dataset(tmp_path, RECORDS)
    victim = max(segments, key=lambda one: one.sums.requests)
    path = tmp_path / victim.key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with open_requests(RequestSource(location=str(tmp_path))) as opened:
        assert len(RECORDS) - victim.sums.requests == len(list(opened.records()))
        first, second = opened.notes
        assert victim.key in first
        assert f"1 of {len(segments)} segments" in second
    path.unlink()
    with open_requests(RequestSource(location=str(tmp_path))) as opened:
        assert f"segment {victim.key} is missing" in opened.notes[0]


def test_a_replaced_segment_is_not_read(tmp_path: Path):
    segments = make_dataset(tmp_path, RECORDS)
    store = FolderStore(tmp_path)
    key = layout.manifest_key(segments[0].day, "test", "w")
    kept = tuple(segments[1:])
    manifest = layout.Manifest(day=segments[0].day, cluster="test", writer="w", sequence=2, segments=kept)
    store.put(key, layout.encode(manifest))
    assert sum(one.sums.requests for one in kept) == len(ids(RequestSource(location=str(tmp_path))))


def test_older_segments_have_nulls_for_newer_columns(tmp_path: Path):
    """A segment without a column is read with nulls, alone and with others."""
    segments = make_dataset(tmp_path, RECORDS, parts=1)
    old = segments[0]
    path = tmp_path / old.key
    connect().execute(
        f"COPY (SELECT * EXCLUDE (est_completion_tokens, variant) FROM '{path}') TO '{tmp_path}/old' (FORMAT parquet)"  # noqa: S608
    )
    data = (tmp_path / "old").read_bytes()
    path.write_bytes(data)
    store, key = FolderStore(tmp_path), layout.manifest_key(old.day, "test", "w")
    for kept in ([], segments[1:]):
        renewed = msgspec.structs.replace(old, sha256=layout.digest_of(data), schema=0, size=len(data))
        made = layout.Manifest(day=old.day, cluster="test", writer="w", sequence=2, segments=(renewed, *kept))
        store.put(key, layout.encode(made))
        with open_requests(RequestSource(location=str(tmp_path))) as opened:
            records = list(opened.records())
            assert sum(one.sums.requests for one in (old, *kept)) == len(records)
            assert any(one.variant for one in records) == bool(kept)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: RequestSource(), "--data, .*--log"),
        (lambda path: RequestSource(logs=(path / "a", path / "." / "a")), "--log .*twice"),
    ],
)
def test_mistakes_in_the_source(tmp_path: Path, make: object, message: str):
    with pytest.raises(ValueError, match=message):
        make(tmp_path)  # type: ignore[operator]


def test_what_is_no_data_set(tmp_path: Path):
    for location, message in ((tmp_path / "none", "no such folder"), (tmp_path, "no manifest")):
        with pytest.raises(BadDataset, match=message), open_requests(RequestSource(location=str(location))):
            pass
    with (
        pytest.raises(ValueError, match=r"/requests\.jsonl: no such"),
        open_requests(RequestSource(logs=(tmp_path / "requests.jsonl",))),
    ):
        pass


def test_time_range_of_several_days(tmp_path: Path):
    records = made_requests(50, step_s=7200)
    make_dataset(tmp_path, records)
    with open_requests(RequestSource(location=str(tmp_path)), START_S + 86_400, START_S + 2 * 86_400) as data:
        assert [f"r1-{number}" for number in range(12, 24)] == [one.request_id for one in data.records(order="ts")]


def test_an_object_store_is_read_once(tmp_path: Path):
    """Segments of a stand-in of S3 are copied into the cache; a damaged object is named and not kept."""
    segments = make_dataset(tmp_path / "made", RECORDS)
    credentials = tmp_path / "credentials"
    credentials.write_text(
        f"[default]\naws_access_key_id = {s3_standin.ACCESS_KEY}\naws_secret_access_key = {s3_standin.SECRET_KEY}\n"
    )
    with s3_standin.running() as standin:
        access = S3Access(
            endpoint=standin.endpoint, region=s3_standin.REGION, credentials_file=str(credentials), retry_s=0.2
        )
        store = open_store("s3://logs/ds", access)
        for path in (tmp_path / "made").rglob("*"):
            if path.suffix in (".json", ".parquet"):
                store.put(path.relative_to(tmp_path / "made").as_posix(), path.read_bytes())
        source = RequestSource(location="s3://logs/ds", s3=access, cache=tmp_path / "cache")
        store.put(segments[0].key, b"PAR1 damaged")
        with open_requests(source) as data:
            assert segments[0].key in data.notes[0]
        store.put(segments[0].key, (tmp_path / "made" / segments[0].key).read_bytes())
        assert sorted(one.request_id for one in RECORDS) == ids(source)
        for segment in segments:
            store.delete(segment.key)
        assert len(RECORDS) == len(ids(source))
        assert 0o600 == next((tmp_path / "cache").rglob("*.parquet")).stat().st_mode & 0o777
