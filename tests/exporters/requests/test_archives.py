"""Rotated logs that were compressed before they were read to their end: read on from the known position, and nothing
else ever."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.requests import compressed, tail
from exporters.requests.compressed import Damaged, Unpacked
from exporters.requests.positions import CHUNK_BYTES, GUARD_BYTES, HEAD_BYTES, Position, start_position
from exporters.requests.tail import ARCHIVE_BYTES, ARCHIVE_PATIENCE_S, Tail
from tests.support.tailed_log import add, again, drained, polled, stored

PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "requests.jsonl"


def lines(start: int, end: int, seed: int = 0) -> list[str]:
    """Lines of 40 bytes that do not compress to nothing."""
    chance = random.Random(seed)
    return [f"{number:08} {chance.getrandbits(120):030x}" for number in range(end)][start:]


def of(start: int, end: int, seed: int = 0) -> list[bytes]:
    return [line.encode() for line in lines(start, end, seed)]


def compress(plain: Path, ending: str = "gz", keep: bool = False) -> Path:
    """Compress a file as gzip, bzip2 and xz do: the new file is whole before the old one goes."""
    archive = plain.with_name(f"{plain.name}.{ending}")
    archive.write_bytes(PACK[ending](plain.read_bytes()))
    if not keep:
        plain.unlink()
    return archive


def rotate(path: Path, ending: str = "1") -> Path:
    rotated = path.with_name(f"{path.name}.{ending}")
    path.rename(rotated)
    path.touch()
    return rotated


@pytest.mark.parametrize("killed", [False, True], ids=["live", "after a SIGKILL"])
@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("read", [0, 10, 1000], ids=["seen", "within the head", "far"])
def test_rotated_file_compressed_before_its_end_is_read_on(path, ending, killed, read):
    """The reader was stopped (SIGSTOP) or killed while logrotate renamed and compressed the file."""
    add(path, *lines(0, read))
    reader = Tail(path)
    assert of(0, read) == drained(reader)
    positions = stored(reader)
    add(path, *lines(read, 2000))
    if killed:
        reader.close()
    else:  # a handle that is still open would reach the rest
        reader.close()
        reader._known = list(positions)
    compress(rotate(path, "1-20261123"), ending)
    add(path, "next")
    reader = Tail(path, positions) if killed else reader
    assert sorted([*of(read, 2000), b"next"]) == sorted(drained(reader, 60))
    assert not reader.faults
    assert [] == drained(again(reader), 120)


def test_copy_that_copytruncate_compressed_is_read_on(path):
    add(path, *lines(0, 50))
    reader = Tail(path)
    polled(reader, 0)
    add(path, *lines(50, 90))
    copy = path.with_name("requests.jsonl.1")
    copy.write_bytes(path.read_bytes())
    os.truncate(path, 0)
    add(path, "next")
    compress(copy)
    assert sorted([*of(50, 90), b"next"]) == sorted(drained(reader, 1))
    assert not reader.faults


@pytest.mark.parametrize("delayed", [False, True], ids=["compress", "delaycompress"])
def test_two_generations_compressed_while_nobody_read(path, delayed):
    """The newer one was never seen: it is read from its beginning."""
    add(path, *lines(0, 30))
    reader = Tail(path)
    polled(reader, 0)
    add(path, *lines(30, 100))
    first = rotate(path, "2")
    add(path, *lines(0, 60, seed=1))
    second = rotate(path, "1")
    add(path, "next")
    compress(first)
    if not delayed:
        compress(second)
    reader = again(reader)
    assert sorted([*of(30, 100), *of(0, 60, seed=1), b"next"]) == sorted(drained(reader))
    if delayed:
        compress(second)
    assert [] == drained(again(reader), 60)
    assert not reader.faults


def test_archive_of_another_file_is_never_read(path):
    """It begins alike and is longer; what stands before the position is not what was read."""
    add(path, *lines(0, 100))
    reader = Tail(path)
    polled(reader, 0)
    path.unlink()
    path.with_name("hold-the-inode").touch()
    strange = path.with_name("requests.jsonl.1")
    add(strange, *lines(0, 20), *lines(20, 300, seed=1))
    compress(strange)
    add(path, "next")
    reader = again(reader)
    assert [b"next"] == drained(reader)
    assert 1 == reader.faults["gone"] + reader.faults["cut"], "its unread lines are lost, and that is counted"
    assert [] == drained(again(reader), 60)


def test_copies_are_left_out_also_when_their_file_goes(path):
    add(path, *lines(0, 100))
    reader = Tail(path)
    assert of(0, 100) == polled(reader, 0)
    compress(path, "gz", keep=True)
    assert [] == drained(reader, 1)
    add(path, *lines(100, 150))
    compress(path, "xz", keep=True)
    assert of(100, 150) == drained(reader, 40)
    rotated = rotate(path)
    assert [] == drained(reader, 80)
    rotated.unlink()
    assert [] == drained(reader, 120)
    assert [] == drained(again(reader), 160)
    assert not reader.faults


def test_archives_of_before_the_first_look_are_history(path):
    add(path, *lines(0, 100))
    archive = compress(rotate(path))
    reader = Tail(path)
    assert [] == drained(reader)
    archive.rename(path.with_name("requests.jsonl.2.gz"))
    assert [] == drained(again(reader), 40)
    assert [] == drained(again(reader), 80)


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=12).digest()


@pytest.mark.parametrize("found_by", ["left out when compressed", "the first look"])
def test_archives_that_an_older_release_left_out_stay_left_out(path, found_by):
    add(path, *lines(0, 100))
    archive = compress(rotate(path))
    stat, raw = archive.stat(), archive.read_bytes()
    position = msgspec.structs.replace(start_position(archive.name, (stat.st_dev, stat.st_ino)), left=stat.st_size)
    if found_by == "the first look":  # which took its bytes for lines
        heads = (msgspec.structs.replace(position.marks[0], offset=HEAD_BYTES, digest=digest(raw[:HEAD_BYTES])),)
        end = raw.rindex(b"\n") + 1
        mark = msgspec.structs.replace(
            position.marks[0], offset=end, digest=digest(raw[max(0, end - GUARD_BYTES) : end])
        )
        position = msgspec.structs.replace(position, heads=heads, marks=(mark,))
    assert [] == drained(Tail(path, (position,)))


def behind(path: Path, read: int, end: int) -> tuple[tuple[Position, ...], bytes]:
    """Positions after some lines were read, and the whole file compressed; it is gone itself."""
    add(path, *lines(0, read))
    reader = Tail(path)
    assert of(0, read) == drained(reader)
    positions = stored(reader)
    reader.close()
    add(path, *lines(read, end))
    data = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_name("hold-the-inode").touch()
    add(path, "next")
    return positions, data


def test_archive_that_is_still_being_written_is_read_as_it_grows(path):
    positions, data = behind(path, 1000, 9000)
    archive = path.with_name("requests.jsonl.1.gz")
    archive.write_bytes(data[:30])
    reader = Tail(path, positions)
    assert [b"next"] == drained(reader)
    got = []
    with archive.open("ab", buffering=0) as compressor:
        for second, at in enumerate(range(30, len(data), 20_000)):
            got += drained(reader, 40 * (second + 1))
            compressor.write(data[at : at + 20_000])
    got += drained(reader, 4000)
    assert of(1000, 9000) == got
    assert 0 == reader.faults["packed"]


def test_short_archive_is_reported_once_and_read_later(path, caplog):
    """Archive that ends early is reported once and read on when it is whole."""
    positions, data = behind(path, 1000, 9000)
    archive = path.with_name("requests.jsonl.1.gz")
    archive.write_bytes(data[: len(data) // 2])
    reader = Tail(path, positions)
    got = drained(reader)
    assert not reader.faults
    got += drained(reader, ARCHIVE_PATIENCE_S)
    assert {"packed": 1} == reader.faults
    assert "incomplete" in caplog.text
    reader = again(reader)
    got += drained(reader, 300)
    assert not reader.faults, "once"
    archive.write_bytes(data)
    assert sorted([*of(1000, 9000), b"next"]) == sorted(got + drained(reader, 400))


def test_damaged_archive_is_reported_once(path, caplog):
    positions, data = behind(path, 1000, 9000)
    path.with_name("requests.jsonl.1.gz").write_bytes(data[: len(data) // 2] + b"\xff" * 999 + data[len(data) // 2 :])
    reader = Tail(path, positions)
    got = drained(reader)
    assert {*of(1000, 4000), b"next"} <= set(got), "up to the damage"
    assert {"packed": 1} == reader.faults
    assert "lines after byte" in caplog.text
    reader = again(reader)
    assert [] == drained(reader, 300)
    assert not reader.faults


def test_unreadable_archive_format_is_reported_once(path):
    """Archive in a format that cannot be read is reported once."""
    add(path, 1)
    reader = Tail(path)
    polled(reader, 0)
    path.with_name("requests.jsonl.1.lz4").write_bytes(compressed.PACKED[-1] + b"x" * 2000)
    assert [] == drained(reader, 1)
    assert {"packed": 1} == reader.faults
    reader = again(reader)
    assert [] == drained(reader, 60)
    assert not reader.faults


def test_large_archive_is_unpacked_a_bounded_piece_in_each_poll(path):
    """To reach the position takes several polls; until then the log is not read to its end."""
    filler = "x" * 4000
    add(path, *(f"{number} {filler}" for number in range(2000)))
    reader = Tail(path)
    assert 2000 == len(drained(reader))
    positions = stored(reader)
    reader.close()
    add(path, "last")
    compress(rotate(path))
    add(path, "next")
    reader = Tail(path, positions)
    assert [b"next"] == polled(reader, 0)
    polls = 0
    while reader.busy:
        before = sum(file.archive.unpacked.end for file in reader._followed if file.archive)
        got = polled(reader, 0.1)
        after = sum(file.archive.unpacked.end for file in reader._followed if file.archive)
        assert after - before <= ARCHIVE_BYTES + CHUNK_BYTES + GUARD_BYTES
        assert sum(len(file.archive.unpacked._kept) for file in reader._followed if file.archive) <= 2 * CHUNK_BYTES
        polls += 1
    assert [b"last"] == got
    assert polls >= 7


def test_archive_bomb_is_given_up(path):
    """Archive that unpacks to a thousand times its size is given up."""
    positions, _ = behind(path, 1000, 1001)
    bomb = b"".join(line + b"\n" for line in of(0, 1001)) + bytes(200 << 20)
    path.with_name("requests.jsonl.1.xz").write_bytes(lzma.compress(bomb, preset=0))
    reader = Tail(path, positions)
    got = [line for second in range(400) for line in polled(reader, second / 10)]
    assert {b"next"} <= set(got) <= {b"next", *of(1000, 1001)}
    assert {"packed": 1} == {why: count for why, count in reader.faults.items() if why == "packed"}
    assert not reader.busy


@given(
    st.lists(st.binary(max_size=3000), min_size=1, max_size=4),
    st.sampled_from(list(PACK)),
    st.integers(1, 5000),
    st.integers(0, 40),
)
def test_unpacked_content_is_the_content(members, ending, size, padding):
    data = b"".join(map(PACK[ending], members)) + b"\0" * 4 * padding
    unpacked = Unpacked(lambda offset, size: data[offset : offset + size])
    got = b""
    while chunk := unpacked.read(len(got), size):
        got += chunk
    assert b"".join(members) == got
    assert unpacked.complete
    assert got[:HEAD_BYTES] == unpacked.read(0, min(len(got), HEAD_BYTES))


@given(st.binary(max_size=200), st.sampled_from(compressed.PACKED))
def test_any_bytes_are_unpacked_or_refused(data, magic):
    """Nothing but Damaged is raised, and nothing runs for ever."""
    whole = magic + data
    unpacked = Unpacked(lambda offset, size: whole[offset : offset + size])
    try:
        while unpacked.read(unpacked.end, 1000):
            pass
    except Damaged:
        pass


def test_log_counts_as_read_only_when_its_archive_is(path, tmp_path, monkeypatch):
    """Counts are shown once every log was read to its end, and that includes what was compressed meanwhile."""
    from exporters.sidecar import Sidecar
    from exporters.sidecar_config import SidecarConfig

    monkeypatch.setattr(tail, "ARCHIVE_BYTES", 1000)
    sidecar = Sidecar(SidecarConfig(requests_log=(str(path),), gpu="off"))
    (reader,) = sidecar.logs.tails
    positions, data = behind(path, 1000, 2000)
    path.with_name("requests.jsonl.1.gz").write_bytes(data)
    reader.since, reader._known, reader._first_look = positions, list(positions), False
    polls = 0
    while sidecar.logs.poll(reader, 0.0, polls / 10):
        polls += 1
        assert not sidecar.logs.at_end or not reader.busy
        sidecar.logs.begin_commit()
        assert not sidecar.ledger.tallies.complete
    assert polls > 30
    sidecar.logs.begin_commit()
    assert sidecar.ledger.tallies.complete
