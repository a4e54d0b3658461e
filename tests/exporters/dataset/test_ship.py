"""Shipping against a folder and against a stand-in of S3, which checks signatures: faults of the store, two writers,
merging, retention, a full disk, and SIGKILL of the real process."""

from __future__ import annotations

import errno
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from exporters.catalogue import ship as ship_series
from exporters.config import BadConfig
from exporters.dataset import catalog, layout, objects, parquet, s3, upkeep, writer
from exporters.dataset.layout import BadDataset, Sums, total
from exporters.dataset.objects import (
    FolderStore,
    ObjectStore,
    S3Access,
    StoreConflict,
    StoreError,
    StoreRefusesAccess,
    StoreRefusesKey,
)
from exporters.dataset.query import RequestSource, open_requests
from exporters.dataset.segment_buffer import SegmentBuffer
from exporters.dataset.ship import Shipper, ship_once
from exporters.dataset.ship_config import ShipConfig
from exporters.dataset.writer import WriterConflict
from exporters.requests import checkpoint
from exporters.requests.checkpoint import Locked
from exporters.requests.record import RequestRecord, timestamp, to_line
from tests.support import s3_standin
from tests.support.s3_standin import S3Standin

NOON = 1_795_608_000.0  # 2026-11-25T12:00:00Z
FOREVER = (NOON - 20 * 86_400, NOON + 20 * 86_400)


def lines(first: int, count: int, at_s: float = NOON, model: str = "chat") -> bytes:
    return b"".join(
        to_line(
            RequestRecord(
                request_id=f"{number:032x}",
                span_id=f"{number:016x}",
                ts=timestamp(at_s + number / 1000),
                team=f"team-{number % 3}",
                model=model,
                outcome="ok",
                prompt_tokens=number,
                cached_tokens=number // 2,
                completion_tokens=7,
            )
        )
        for number in range(first, first + count)
    )


def expected(count: int) -> Sums:
    numbers = range(count)
    return Sums(count, sum(numbers), sum(number // 2 for number in numbers), 7 * count)


class Clock:
    """Unix seconds and a monotonic clock that a test moves."""

    def __init__(self, now_s: float = NOON) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "requests.jsonl").touch()
    return tmp_path


def config_of(folder: Path, **fields: object) -> ShipConfig:
    given = {
        "dataset": str(folder / "dataset"),
        "cluster": "prod",
        "writer": "gw-0",
        "requests_log": (str(folder / "requests.jsonl"),),
        "state": str(folder / "state"),
    }
    return ShipConfig(**(given | fields))  # type: ignore[arg-type]


def append(folder: Path, data: bytes) -> None:
    with (folder / "requests.jsonl").open("ab") as log:
        log.write(data)


def ship_all(shipper: Shipper, clock: Clock) -> None:
    """Ship everything that is there, with retries."""
    for _ in range(50):
        clock.now_s += 10
        shipper.step(last=True)
        if not shipper.state.last.pending and not shipper.buffer.bytes and not shipper.store_error:
            return
    raise AssertionError(shipper.store_error or shipper.disk_error)


def stored(store: ObjectStore) -> Sums:
    return total(segment.sums for segment in catalog.segments(store, *FOREVER))


def read_back(store: ObjectStore, cache: Path) -> Sums:
    """Sums of the rows themselves, each once."""
    paths = [str(catalog.local_copy(store, segment, cache)) for segment in catalog.segments(store, *FOREVER)]
    with parquet.connect() as db:
        ((ids, *sums),) = db.execute(
            "SELECT count(DISTINCT request_id), count(*), sum(prompt_tokens), sum(cached_tokens),"
            " sum(completion_tokens) FROM read_parquet($paths)",
            {"paths": paths},
        ).fetchall()
    assert ids == sums[0]
    return Sums(*map(int, sums))


# --- a store that signs and fails


@pytest.fixture
def standin() -> Iterator[S3Standin]:
    with s3_standin.running() as server:
        yield server


def access(folder: Path, standin: S3Standin, secret: str = s3_standin.SECRET_KEY) -> S3Access:
    credentials = folder / "credentials"
    credentials.write_text(
        f"[default]\naws_access_key_id = {s3_standin.ACCESS_KEY}\naws_secret_access_key = {secret}\n"
    )
    return S3Access(
        endpoint=standin.endpoint,
        region=s3_standin.REGION,
        credentials_file=str(credentials),
        retry_s=0.2,
        timeout_s=60,
    )


FAULTS = [
    [("PUT", "day=", "500")] * 6,
    [("PUT", "day=", "stored then 500")],
    [("PUT", "day=", "stored then cut")],
    [("PUT", "manifests/", "500")] * 6,
    [("PUT", "manifests/", "stored then 500")],
    [("PUT", "manifests/", "stored then cut")],
    [("PUT", "writers/", "stored then 500")],
    [("PUT", "writers/", "stored then cut")],
    [("GET", "manifests/", "500")] * 6,
    [("PUT", kind, fault) for kind in ("day=", "manifests/", "writers/") for fault in ("500", "stored then cut")],
    *(
        [("PUT", kind, fault)] * count
        for kind in ("manifests/", "writers/")
        for fault, count in (
            ("409 <Code>ConditionalRequestConflict</Code>", 1),
            ("409 <Code>ConditionalRequestConflict</Code>", 14),
            ("409 <Code>OperationAborted</Code>", 3),
            ("412 <Code>PreconditionFailed</Code>", 2),
            ("404 <Code>NoSuchKey</Code>", 1),
        )
    ),
    [("PUT", "writers/", "deleted")],
]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: f"{len(faults)} {' '.join(faults[0])}")
def test_a_failing_store_loses_and_repeats_nothing(folder, standin, faults, monkeypatch):
    monkeypatch.setattr(writer, "PAUSES_S", (0,) * 5)
    settings = config_of(folder, dataset="s3://logs/ds", s3=access(folder, standin))
    clock = Clock()
    shipper = Shipper(settings, clock=clock, ticks=clock)
    shipper.claim()
    for at in (0, 100):
        append(folder, lines(at, 100))
        standin.faults = list(faults)
        ship_all(shipper, clock)
        assert not shipper.state.last.pending
    shipper.close()
    store = catalog.open_store(settings.dataset, settings.s3)
    standin.late = {key for key in standin.objects if not key.startswith("ds/writers/")}
    assert expected(200) == stored(store) == read_back(store, folder / "cache")
    assert [] == standin.rejected == standin.faults


@pytest.mark.parametrize("kind", ["manifests/", "writers/"])
def test_an_own_request_may_be_applied_late(folder, standin, kind):
    """With other content than the next attempt, as more was sealed meanwhile."""
    settings = config_of(folder, dataset="s3://logs/ds", s3=access(folder, standin))
    clock = Clock()
    shipper = Shipper(settings, clock=clock, ticks=clock)
    shipper.claim()
    append(folder, lines(0, 10))
    standin.faults = [("PUT", kind, "late")]
    shipper.step(last=True)
    assert shipper.store_error
    append(folder, lines(10, 10))
    ship_all(shipper, clock)
    assert [] == standin.faults == standin.delayed
    assert expected(20) == stored(shipper.writer.store)
    shipper.close()


def test_a_late_claim_of_the_process_before_is_taken_over(folder, standin):
    settings = config_of(folder, dataset="s3://logs/ds", s3=access(folder, standin))
    standin.faults = [("PUT", "writers/", "late")]
    append(folder, lines(0, 10))
    shipper = Shipper(settings)
    with pytest.raises(StoreError):
        shipper.claim()
    shipper.close()
    assert 10 == ship_once(settings)
    assert [] == standin.delayed


def test_a_deleted_manifest_does_not_stop_a_merge(folder):
    clock = Clock()
    shipper = Shipper(config_of(folder), clock=clock, ticks=clock)
    shipper.claim()
    for at in range(upkeep.MERGE_FROM):
        append(folder, lines(at * 10, 10))
        ship_all(shipper, clock)
    store = shipper.writer.store
    first = catalog.segments(store, *FOREVER)[0]
    shipper.state.merge(first, [segment.key for segment in catalog.segments(store, *FOREVER)])
    shutil.copy(folder / "dataset" / first.key, folder / "state" / "spool" / f"{first.sha256}.parquet")
    store.delete(layout.manifest_key(first.day, "prod", "gw-0"))
    ship_all(shipper, clock)
    assert [first] == catalog.segments(store, *FOREVER)
    shipper.close()


# --- what a store reports

SKEW = (
    "<Message>The difference is too large.</Message>"
    "<RequestTime>20261125T120000Z</RequestTime><ServerTime>2026-11-25T12:16:00Z</ServerTime>"
)


@pytest.mark.parametrize(
    ("answer", "kind", "facts"),
    [
        ("400 <Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>", StoreError, "region eu-west-1"),
        ("400 <Code>IllegalLocationConstraintException</Code>", StoreError, "wrong region"),
        ("301 <Code>PermanentRedirect</Code>", StoreError, f"wrong region .*{s3_standin.REGION}"),
        (f"403 <Code>RequestTimeTooSkewed</Code>{SKEW}", StoreError, "clock .*16m behind.*too large"),
        (
            "403 <Code>AccessDenied</Code>\n<Message>not &amp; now</Message>",
            StoreRefusesAccess,
            "permission .*not & now",
        ),
        ("403 <Code>InvalidAccessKeyId</Code>", StoreRefusesAccess, "credentials"),
        ("400 <Code>ExpiredToken</Code>", StoreRefusesAccess, "credentials"),
        ("401 <html/>", StoreRefusesAccess, "credentials"),
        ("404 <Code>NoSuchBucket</Code>", StoreError, "no such bucket"),
        ("507 <Code>XMinioStorageFull</Code>", StoreError, "full"),
        ("403 <Code>QuotaExceeded</Code>", StoreError, "full"),
        ("503 <Code>SlowDown</Code>", StoreError, "busy"),
        ("400 <Code>KeyTooLongError</Code>", StoreRefusesKey, "refuses the key"),
        ("400 <Code>XMinioInvalidObjectName</Code>", StoreRefusesKey, "refuses the key"),
        ("409 <Code>OperationAborted</Code>", StoreConflict, "OperationAborted"),
        ("501 <Code>NotImplemented</Code>", StoreError, "not support"),
        (f"418 <a>{'x' * 400}</a><Code>Teapot</Code><Message>short</Message>", StoreError, "Teapot: short"),
        ("413 <html>too <b>large</b></html>", StoreError, "413 Payload Too Large: too large"),
        (f"400 <Code>Odd</Code><Message>{s3_standin.SECRET_KEY}</Message>", StoreError, r"Odd: \*\*\*"),
    ],
)
def test_errors_of_a_store_are_reported_by_cause(folder, standin, answer, kind, facts):
    store = catalog.open_store("s3://logs/ds", access(folder, standin))
    standin.faults = [("PUT", "k", answer)] * 20
    with pytest.raises(StoreError, match=f"s3://logs/ds: k: .*{facts}") as error:
        store.put("k", b"")
    assert kind is type(error.value)
    assert s3_standin.SECRET_KEY not in str(error.value)


def test_a_missing_bucket_is_no_missing_object(folder, standin):
    with pytest.raises(StoreError, match="no such bucket"):
        catalog.open_store("s3://other", access(folder, standin)).get("k")


@pytest.mark.parametrize(
    ("number", "kind", "facts"),
    [
        (errno.ENOSPC, StoreError, "full"),
        (errno.EDQUOT, StoreError, "full"),
        (errno.EACCES, StoreRefusesAccess, "permission"),
        (errno.ENAMETOOLONG, StoreRefusesKey, "refuses the key"),
        (errno.EILSEQ, StoreRefusesKey, "refuses the key"),
    ],
)
def test_errors_of_a_folder_have_the_same_causes(folder, number, kind, facts, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "told so")

    monkeypatch.setattr(objects, "write_atomically", fail)
    with pytest.raises(StoreError, match=f"{folder}: k: .*{facts} .*told so") as error:
        FolderStore(folder).put("k", b"")
    assert kind is type(error.value)


@pytest.mark.parametrize(
    ("key", "kind", "facts"),
    [("a/../b", StoreRefusesKey, "refuses the key"), ("k", StoreError, "cannot be reached .*Connection refused")],
)
def test_errors_before_an_answer_have_causes(folder, standin, free_port, key, kind, facts):
    settings = msgspec.structs.replace(access(folder, standin), endpoint=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreError, match=f"s3://logs: {key}: .*{facts}") as error:
        catalog.open_store("s3://logs", settings).put(key, b"")
    assert kind is type(error.value)


# --- credentials


@pytest.mark.parametrize("damage", [None, "", "[default]\naws_access_key_id = A\n", "\0" * 120])
def test_credentials_are_read_again_when_they_change(folder, standin, damage, monkeypatch):
    settings = access(folder, standin)
    store = catalog.open_store("s3://logs", settings)
    file = folder / "credentials"
    text = file.read_text()
    file.unlink() if damage is None else file.write_text(damage)
    store.put("former", b"")
    monkeypatch.setattr(s3_standin, "ACCESS_KEY", "AKIDRENEWED")
    with pytest.raises(StoreError):
        store.put("renewed", b"")
    file.write_text(text.replace("AKIDEXAMPLE", "AKIDRENEWED"))
    store.put("renewed", b"")
    assert {"former", "renewed"} == {*standin.objects}


def test_refused_credentials_are_read_again(folder, standin, monkeypatch):
    """Also where the file seems unchanged, as on file systems that report changes late."""
    monkeypatch.setattr(s3, "_identity", lambda _: None)
    store = catalog.open_store("s3://logs", access(folder, standin))
    access(folder, standin, "other-secret")
    monkeypatch.setattr(s3_standin, "SECRET_KEY", "other-secret")
    store.put("k", b"")
    assert [b""] == [*standin.objects.values()]
    assert 1 == len(standin.rejected)


def test_a_store_without_the_right_key_is_named(folder, standin):
    secret = "wJalrXUtnFEMI/WRONG"
    settings = config_of(folder, dataset="s3://logs/ds", s3=access(folder, standin, secret))
    shipper = Shipper(settings)
    with pytest.raises(StoreError, match=r"s3://logs/ds: writers/cluster=prod/gw-0\.json") as error:
        shipper.claim()
    assert secret not in str(error.value)
    assert standin.rejected
    assert {} == standin.objects
    shipper.close()


def test_credentials_without_a_key_are_refused(folder):
    (folder / "credentials").write_text("[other]\naws_access_key_id = a\n")
    with pytest.raises(BadConfig, match=r"credentials .*\[default\] .*aws_access_key_id"):
        catalog.open_store("s3://logs", S3Access(credentials_file=str(folder / "credentials")))


@pytest.mark.parametrize("endpoint", ["http://s3.example.org", "ftp://127.0.0.1", "s3.example.org"])
def test_a_store_elsewhere_needs_tls(endpoint):
    with pytest.raises(ValueError, match=rf"'{re.escape(endpoint)}' .*https://"):
        S3Access(endpoint=endpoint)


# --- two writers


def test_another_state_cannot_write_under_a_taken_name(folder):
    append(folder, lines(0, 10))
    ship_once(config_of(folder))
    with pytest.raises(WriterConflict, match=r"writer gw-0 .* another state.*`writer`.*`state`"):
        ship_once(config_of(folder, state=str(folder / "other")))
    assert expected(10) == stored(FolderStore(folder / "dataset"))
    ship_once(config_of(folder, state=str(folder / "third"), writer="gw-1"))
    assert 20 == stored(FolderStore(folder / "dataset")).requests, "another writer is another log"


def test_two_processes_cannot_share_a_state(folder, monkeypatch):
    first = Shipper(config_of(folder))
    monkeypatch.setattr(checkpoint, "LOCK_S", 0.1)
    with pytest.raises(Locked):
        Shipper(config_of(folder))
    first.close()


def test_an_old_copy_of_a_state_is_refused(folder):
    append(folder, lines(0, 10))
    ship_once(config_of(folder))
    shutil.copytree(folder / "state", folder / "copy")
    append(folder, lines(10, 10))
    ship_once(config_of(folder))
    with pytest.raises(WriterConflict, match=r"stored commit 3, .* 2: .* old copy"):
        ship_once(config_of(folder, state=str(folder / "copy")))
    assert expected(20) == stored(FolderStore(folder / "dataset"))


def test_of_two_copies_of_a_state_the_older_process_stops(folder):
    append(folder, lines(0, 10))
    ship_once(config_of(folder))
    shutil.copytree(folder / "state", folder / "copy")
    clock = Clock()
    first = Shipper(config_of(folder), clock=clock, ticks=clock)
    first.claim()
    second = Shipper(config_of(folder, state=str(folder / "copy")), clock=clock, ticks=clock)
    second.claim()
    append(folder, lines(10, 10))
    with pytest.raises(WriterConflict, match=rf": .* of {socket.gethostname()} since 2026\S+ .* gw-0 .*`writer`"):
        first.step(last=True)
    ship_all(second, clock)
    assert expected(20) == stored(FolderStore(folder / "dataset")) == read_back(second.writer.store, folder)
    first.close()
    second.close()


def test_a_conflict_over_a_manifest_names_the_second_writer(folder):
    """It claims the name between the first one's claim and manifest."""
    append(folder, lines(0, 10))
    ship_once(config_of(folder))
    shutil.copytree(folder / "state", folder / "copy")
    first, second = Shipper(config_of(folder)), Shipper(config_of(folder, state=str(folder / "copy")))
    first.claim()

    def write(key: str, data: bytes, version: str | None) -> str:
        if key.startswith("manifests/"):
            second.claim()
            raise StoreConflict(key)
        return FolderStore.put_if(first.writer.store, key, data, version)

    first.writer.store.put_if = write
    append(folder, lines(10, 10))
    second.step()
    second.seal()
    with pytest.raises(WriterConflict, match=f"of {socket.gethostname()} since "):
        first.step(last=True)
    first.close()
    second.close()


def test_a_manifest_of_another_process_is_not_overwritten(folder):
    """Even if it passed the claim, as between a check and a write."""
    append(folder, lines(0, 10))
    ship_once(config_of(folder))
    shutil.copytree(folder / "state", folder / "copy")
    shutil.copytree(folder / "dataset" / "writers", folder / "writers")
    append(folder, lines(10, 10))
    ship_once(config_of(folder))
    shutil.copytree(folder / "writers", folder / "dataset" / "writers", dirs_exist_ok=True)
    append(folder, lines(20, 10))
    with pytest.raises(WriterConflict, match=r"commit 3 .* gw-0 .*`writer`"):
        ship_once(config_of(folder, state=str(folder / "copy")))
    assert expected(20) == stored(FolderStore(folder / "dataset"))


# --- the disk


def test_a_full_disk_keeps_every_record(folder, monkeypatch):
    append(folder, lines(0, 50))
    clock = Clock()
    shipper = Shipper(config_of(folder, seal_bytes=1 << 20), clock=clock, ticks=clock)
    shipper.claim()
    with monkeypatch.context() as full:
        full.setattr(SegmentBuffer, "write", _fill_the_disk)
        shipper.step(last=True)
        assert "No space left" in shipper.disk_error
        append(folder, lines(50, 20_000))
        for _ in range(30):
            clock.now_s += 10
            shipper.step()
        assert shipper.buffer.bytes < 2 << 20, "reading waits while nothing can be sealed"
    while shipper.step() or shipper.buffer.bytes:
        clock.now_s += 10
        ship_all(shipper, clock)
    assert expected(20_050) == stored(shipper.writer.store) == read_back(shipper.writer.store, folder)
    shipper.close()


def _fill_the_disk(buffer: SegmentBuffer, keys: object, target: Path) -> None:
    target.write_bytes(b"{")
    _no_space()


def test_reading_waits_while_the_spool_is_full(folder, monkeypatch):
    append(folder, lines(0, 20_000))
    clock = Clock()
    shipper = Shipper(config_of(folder, seal_bytes=1 << 20, spool_bytes=2 << 20), clock=clock, ticks=clock)
    shipper.claim()
    monkeypatch.setattr(Shipper, "spool_bytes", 3 << 20)
    shipper.step()
    assert 0 == shipper.buffer.sums.requests
    monkeypatch.undo()
    ship_all(shipper, clock)
    while shipper.step():
        clock.now_s += 1
    ship_all(shipper, clock)
    assert expected(20_000) == stored(shipper.writer.store)
    shipper.close()


# --- upkeep


def test_small_segments_are_merged_and_then_deleted(folder):
    clock = Clock()
    shipper = Shipper(config_of(folder, grace_s=600), clock=clock, ticks=clock)
    shipper.claim()
    for at in range(upkeep.MERGE_FROM):
        append(folder, lines(at * 10, 10))
        ship_all(shipper, clock)
    store = shipper.writer.store
    assert upkeep.MERGE_FROM == len(before := catalog.segments(store, *FOREVER))
    while shipper.step():
        pass
    (merged,) = catalog.segments(store, *FOREVER)
    assert expected(80) == merged.sums == read_back(store, folder)
    assert all(store.get(segment.key) for segment in before), "a query that has begun still reads them"
    clock.now_s += 700
    while shipper.step():
        pass
    assert [merged.key] == [key for key in store.keys("") if key.endswith(".parquet")]
    shipper.close()


def test_a_damaged_segment_is_named_and_not_merged(folder, caplog):
    clock = Clock()
    shipper = Shipper(config_of(folder, grace_s=0), clock=clock, ticks=clock)
    shipper.claim()
    for at in range(upkeep.MERGE_FROM + 1):
        append(folder, lines(at * 10, 10))
        ship_all(shipper, clock)
    store = shipper.writer.store
    damaged = min(catalog.segments(store, *FOREVER), key=lambda segment: segment.min_ts or 0)
    path = folder / "dataset" / damaged.key
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    for _ in range(5):
        clock.now_s += 100
        shipper.step()
    assert damaged.key in caplog.text
    assert "is damaged" in caplog.text
    keys = {segment.key for segment in catalog.segments(store, *FOREVER)}
    assert damaged.key in keys, "what is damaged stays, to be repaired or looked at"
    assert 2 == len(keys)
    with pytest.raises(BadDataset, match="is damaged"):
        catalog.local_copy(store, damaged, folder)
    shipper.close()


def test_days_beyond_the_retention_are_deleted(folder):
    append(folder, lines(0, 10, NOON - 10 * 86_400) + lines(10, 10, NOON - 2 * 86_400))
    clock = Clock()
    shipper = Shipper(config_of(folder, retain_days=5, grace_s=0), clock=clock, ticks=clock)
    shipper.claim()
    ship_all(shipper, clock)
    store = shipper.writer.store
    assert 20 == stored(store).requests
    for _ in range(20):
        clock.now_s += 100
        shipper.step()
    assert ["2026-11-23"] == [segment.day for segment in catalog.segments(store, *FOREVER)]
    assert all("2026-11-15" not in key for key in store.keys(""))
    shipper.close()


def test_bad_lines_are_counted_and_left_out(folder):
    append(folder, lines(0, 5) + b'{"request_id":17}\n{"no\n' + lines(5, 5))
    shipper = Shipper(config_of(folder))
    shipper.claim()
    shipper.step(last=True)
    assert {"type": 1, "json": 1} == {why: count for why, count in shipper.state.last.totals.bad.items() if count}
    assert expected(10) == stored(shipper.writer.store)
    shipper.close()


def test_an_unreadable_log_does_not_stop_the_others(folder):
    (folder / "other.jsonl").mkdir()
    logs = (str(folder / "other.jsonl"), str(folder / "requests.jsonl"))
    append(folder, lines(0, 10))
    clock = Clock()
    shipper = Shipper(config_of(folder, requests_log=logs), clock=clock, ticks=clock)
    shipper.claim()
    shipper.step()
    shipper.step(last=True)
    assert expected(10) == stored(shipper.writer.store)
    assert "other.jsonl cannot be read" in shipper.disk_error
    (folder / "other.jsonl").rmdir()
    (folder / "other.jsonl").write_bytes(lines(10, 10))
    ship_all(shipper, clock)
    ship_all(shipper, clock)
    assert expected(20) == stored(shipper.writer.store)
    assert "" == shipper.disk_error
    shipper.close()


def test_lines_rotated_before_the_first_sealing_survive_a_crash(folder):
    append(folder, lines(0, 10))
    clock = Clock()
    shipper = Shipper(config_of(folder), clock=clock, ticks=clock)
    shipper.claim()
    shipper.step()
    shipper.close()
    (folder / "requests.jsonl").rename(folder / "requests.jsonl.1")
    append(folder, lines(10, 10))
    ship_once(config_of(folder))
    assert expected(20) == stored(FolderStore(folder / "dataset"))


def test_segments_are_found_by_time_cluster_and_model(folder):
    append(folder, lines(0, 10) + lines(10, 10, NOON + 86_400, "org/name"))
    ship_once(config_of(folder))
    store = FolderStore(folder / "dataset")
    found = {segment.day: segment for segment in catalog.segments(store, *FOREVER)}
    assert {"2026-11-25", "2026-11-26"} == set(found)
    assert [found["2026-11-26"]] == catalog.segments(store, NOON + 86_000, NOON + 90_000)
    assert [] == catalog.segments(store, NOON + 100, NOON + 200), "after its last record"
    assert [found["2026-11-26"]] == catalog.segments(store, *FOREVER, models=["org/name"])
    assert [] == catalog.segments(store, *FOREVER, clusters=["other"])
    assert ["prod"] == [claim.cluster for claim in catalog.writers(store)]


def test_a_range_of_years_reads_the_days_that_exist(folder):
    append(folder, lines(0, 10))
    ship_once(config_of(folder))
    store = FolderStore(folder / "dataset")
    assert 1 == len(catalog.segments(store, 0, 4e9))
    assert [] == catalog.segments(store, 0, NOON - 90_000)


def test_a_newer_format_is_refused(folder):
    append(folder, lines(0, 1))
    ship_once(config_of(folder))
    store = FolderStore(folder / "dataset")
    key = layout.manifest_key("2026-11-25", "prod", "gw-0")
    store.put(key, store.path(key).read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(BadDataset, match="has format 2"):
        catalog.segments(store, *FOREVER)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"cluster": "a/b"}, "cluster 'a/b' needs"),
        ({"writer": ""}, "writer '' needs"),
        ({"requests_log": ()}, "requests_log needs one entry"),
        ({"seal_bytes": 10}, "seal_bytes .* 1 MiB"),
        ({"retain_days": 0}, "retain_days .* 1$"),
        ({"remember": 1}, "remember .* 1000 requests"),
    ],
)
def test_mistakes_in_the_configuration_are_named(folder, fields, values):
    with pytest.raises(ValueError, match=values):
        config_of(folder, **fields)


# --- odd names, refused keys and a restart


ODD_NAMES = (
    "a" * 250, "\u6a21" * 28, "/models/" + "x" * 230, "", ".", "..", "a/../b", "a\0b", "a\nb", "x" * 1_000_000, "A",
    "a", "__other__", "__HIVE_DEFAULT_PARTITION__", "__unknown__", "%2e", "\U0001f600" * 9, "model=x", "a'b\"c", " ",
)  # fmt: skip


def test_no_name_stops_the_shipper(folder):
    """Whatever models and teams are called: all rows are stored under their true names, and readers find them."""
    for number, name in enumerate(ODD_NAMES):
        one = {
            "request_id": f"r{number}",
            "ts": timestamp(NOON),
            "model": name,
            "team": name[:5000],
            "prompt_tokens": 5,
        }
        append(folder, msgspec.json.encode(one) + b"\n")
    append(folder, b'{"request_id":"s","model":"\\ud800"}\n' + lines(0, 10))
    settings = config_of(folder)
    assert len(ODD_NAMES) + 10 == ship_once(settings)
    append(folder, lines(10, 10))
    assert 10 == ship_once(settings)
    with open_requests(RequestSource(location=settings.dataset, cache=folder / "cache")) as data:
        found = [record.model for record in data.records()]
    assert sorted([*ODD_NAMES, *["chat"] * 20]) == sorted(map(str, found))
    with open_requests(RequestSource(location=settings.dataset, models=("a" * 250,), cache=folder / "cache")) as data:
        assert "a" * 250 in {record.model for record in data.records()}


def test_a_refused_key_moves_its_segment(folder):
    """What the store never takes under its own key goes to the partition of others, and blocks nothing."""

    class Picky(FolderStore):
        def put(self, key: str, data: bytes) -> None:
            if "model=chat" in key:
                raise StoreRefusesKey(key)
            super().put(key, data)

    store, clock = Picky(folder / "dataset"), Clock()
    shipper = Shipper(config_of(folder), store, clock=clock, ticks=clock)
    append(folder, lines(0, 10) + lines(10, 10, model="other"))
    ship_all(shipper, clock)
    shipper.close()
    assert expected(20) == stored(store)
    assert {"__other__", "other"} == {one.model for one in catalog.segments(store, *FOREVER)}


def test_a_restart_waits_for_the_process_before_it(folder):
    """The lock of a process that is ending is no second process."""
    before = Shipper(config_of(folder))
    ending = threading.Timer(0.3, before.close)
    ending.start()
    append(folder, lines(0, 10))
    assert 10 == ship_once(config_of(folder))
    ending.join()


# --- values that foreign logs and clients send


def row(number: int, **fields: object) -> bytes:
    return msgspec.json.encode({"request_id": f"r{number}", "ts": timestamp(NOON), "outcome": "ok"} | fields) + b"\n"


RESERVED = (None, "", "__other__", "__unknown__", "__HIVE_DEFAULT_PARTITION__", "m" * 250, "模" * 28, "2026-11-25", "1")


def test_merged_segments_keep_the_names_of_models(folder):
    """DuckDB takes columns from the names of folders, unless told otherwise."""
    clock = Clock()
    shipper = Shipper(config_of(folder, grace_s=0), clock=clock, ticks=clock)
    for turn in range(upkeep.MERGE_FROM):
        append(folder, b"".join(row(turn * 100 + at, model=model) for at, model in enumerate(RESERVED)))
        ship_all(shipper, clock)
    while shipper.step():
        clock.now_s += 100
    segments = catalog.segments(shipper.writer.store, *FOREVER)
    assert len(segments) == len({segment.model for segment in segments}), "all are merged"
    names = [labels for metric, labels, _ in shipper.samples() if metric is ship_series.SHIPPED_REQUESTS]
    assert len(names) == len({label["model_name"] for label in names})
    shipper.close()
    for model in RESERVED:
        source = RequestSource(
            location=str(folder / "dataset"), models=(model or "__unknown__",), cache=folder / "cache"
        )
        with open_requests(source) as data:
            assert upkeep.MERGE_FROM == [record.model for record in data.records()].count(model)


def test_lines_of_a_megabyte_are_sealed_in_time(folder):
    """All of `seal_bytes` in one row group would take more memory than DuckDB may have."""
    append(folder, b"".join(row(number, team=f"{number}{'t' * 1_000_000}") for number in range(60)))
    assert 60 == ship_once(config_of(folder))
    assert 60 == stored(FolderStore(folder / "dataset")).requests


@pytest.mark.parametrize("ts", ["2026-W48-3T12:00:00.000Z", "9999-12-31T23:59:59.999Z", "0001-01-01T00:00:00.000Z"])
def test_odd_times_stop_no_reader(folder, ts):
    append(folder, row(0, ts=ts))
    ship_once(config_of(folder))
    assert 1 == len(catalog.segments(FolderStore(folder / "dataset"), -62_135_596_800, 3e11))


# --- starts and restarts


def test_a_store_that_is_absent_at_first_loses_nothing(folder):
    """Logs are read, sealed and rotated while the first claim fails."""
    (folder / "dataset").touch()
    clock = Clock()
    shipper = Shipper(config_of(folder, seal_s=1), clock=clock, ticks=clock)
    for turn in range(3):
        append(folder, lines(turn * 10, 10))
        (folder / "requests.jsonl").rename(folder / f"requests.jsonl.{turn}")
        for _ in range(3):
            clock.now_s += 10
            shipper.step()
    assert 3 == len(shipper.state.last.pending)
    assert [0.0, 1.0] == [value for metric, _, value in shipper.samples() if metric is ship_series.SHIP_UP]
    (folder / "dataset").unlink()
    ship_all(shipper, clock)
    assert expected(30) == stored(shipper.writer.store)
    assert [1.0, 1.0] == [value for metric, _, value in shipper.samples() if metric is ship_series.SHIP_UP]
    shipper.close()


def test_once_reports_an_absent_store(folder):
    (folder / "dataset").touch()
    append(folder, lines(0, 10))
    with pytest.raises(StoreError, match="dataset: writers/"):
        ship_once(config_of(folder))
    (folder / "dataset").unlink()
    ship_once(config_of(folder))
    assert expected(10) == stored(FolderStore(folder / "dataset"))


def test_an_old_copy_is_refused_whatever_it_sealed_since(folder):
    """While the store did not answer, an old copy may have made more commits than the store knows."""
    append(folder, lines(0, 10))
    ship_once(config_of(folder))
    shutil.copytree(folder / "state", folder / "copy")
    append(folder, lines(10, 10))
    ship_once(config_of(folder))
    (folder / "dataset").rename(folder / "away")
    (folder / "dataset").touch()
    copy = Shipper(config_of(folder, state=str(folder / "copy")))
    for turn in range(3):
        append(folder, lines(20 + turn, 1))
        copy.step(last=True)
    (folder / "dataset").unlink()
    (folder / "away").rename(folder / "dataset")
    with pytest.raises(WriterConflict):
        copy.step(last=True)
    copy.close()
    assert expected(20) == stored(FolderStore(folder / "dataset"))


def test_a_failed_commit_keeps_its_segments(folder, monkeypatch):
    """Storing what was committed before must not delete what will be committed next."""
    (folder / "dataset").touch()
    clock = Clock()
    shipper = Shipper(config_of(folder), clock=clock, ticks=clock)
    append(folder, lines(0, 10))
    shipper.step(last=True)
    (folder / "dataset").unlink()
    append(folder, lines(10, 10))
    with monkeypatch.context() as full:
        full.setattr(shipper.state, "seal", _no_space)
        shipper.step(last=True)
    assert expected(10) == stored(shipper.writer.store)
    ship_all(shipper, clock)
    assert expected(20) == stored(shipper.writer.store)
    shipper.close()


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
