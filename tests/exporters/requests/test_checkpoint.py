"""The file of state: whole after a crash at any moment, and refused to a second writer."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.requests.checkpoint import MAGIC, Checkpoint, Locked, Unreadable, frames_of
from tests.support.failing_disk import FailingDisk

ROOT = Path(__file__).parents[3]


def framed(frame: bytes) -> bytes:
    return struct.pack("<II", len(frame), zlib.crc32(frame)) + frame


def reopened(path: Path) -> list[bytes]:
    checkpoint = Checkpoint(path)
    try:
        return checkpoint.open()
    finally:
        checkpoint.close()


def test_frames_return_in_order_and_rewrite_replaces(tmp_path):
    """Frames come back in their order and a rewrite replaces them."""
    path = tmp_path / "deep" / "state"
    checkpoint = Checkpoint(path)
    assert [] == checkpoint.open()
    checkpoint.rewrite(b"one")
    checkpoint.append(b"two")
    checkpoint.append(b"")
    checkpoint.close()
    assert [b"one", b"two", b""] == reopened(path)
    checkpoint = Checkpoint(path)
    checkpoint.open()
    checkpoint.rewrite(b"all")
    checkpoint.close()
    assert [b"all"] == reopened(path)
    assert ["state", "state.lock"] == sorted(p.name for p in path.parent.iterdir())


def test_every_commit_and_new_folder_is_synced(tmp_path):
    """Every commit is synced and a new file also in its folder."""
    disk = FailingDisk()
    checkpoint = Checkpoint(tmp_path / "state", disk)
    checkpoint.open()
    checkpoint.rewrite(b"one")
    assert ["sync", "rename", "sync"] == disk.calls
    checkpoint.append(b"two")
    assert ["sync", "rename", "sync", "sync"] == disk.calls
    checkpoint.close()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.data())
def test_a_file_cut_anywhere_ends_with_the_last_whole_frame(frames, data):
    whole, ends = MAGIC, []
    for frame in frames:
        whole += framed(frame)
        ends.append(len(whole))
    cut = data.draw(st.integers(0, len(whole)))
    expected = frames[: sum(end <= cut for end in ends)] or None
    assert expected == frames_of(whole[:cut])


@given(st.binary(min_size=1, max_size=30), st.integers(0, 29), st.integers(1, 255))
def test_a_spoilt_byte_is_never_taken_for_a_frame(frame, at, flip):
    whole = bytearray(MAGIC + framed(b"one") + framed(frame))
    whole[-1 - at % len(frame)] ^= flip
    assert [b"one"] == frames_of(bytes(whole))


@pytest.mark.parametrize("failing", ["write", "sync", "rename"])
def test_failed_write_keeps_the_last_state(tmp_path, failing):
    """What fails leaves the last state and the next rewrite heals."""
    disk = FailingDisk()
    path = tmp_path / "state"
    checkpoint = Checkpoint(path, disk)
    checkpoint.open()
    checkpoint.rewrite(b"one")
    if failing != "rename":
        disk.fails = {failing}
        with pytest.raises(OSError, match="No space"):
            checkpoint.append(b"two")
        assert frames_of(path.read_bytes())[0] == b"one", "what was safe stays safe"
        with pytest.raises(OSError, match="not open"):
            checkpoint.append(b"behind a torn frame")
        assert checkpoint.needs_rewrite
    disk.fails, disk.calls = {failing}, []
    with pytest.raises(OSError, match="No space"):
        checkpoint.rewrite(b"three")
    assert frames_of(path.read_bytes())[0] == b"one"
    disk.fails = set()
    checkpoint.rewrite(b"four")
    checkpoint.append(b"five")
    checkpoint.close()
    assert [b"four", b"five"] == reopened(path)
    assert not (tmp_path / "state.new").exists()


def test_what_is_no_state_is_moved_away_and_named(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"something else")
    checkpoint = Checkpoint(path)
    with pytest.raises(Unreadable, match=r"/state .*state\.unreadable"):
        checkpoint.open()
    checkpoint.rewrite(b"new")
    checkpoint.close()
    assert b"something else" == (tmp_path / "state.unreadable").read_bytes()
    assert [b"new"] == reopened(path)


def test_two_writers_never_share_a_file(tmp_path, monkeypatch):
    """Two writers never share a file and a dead ones lock is free."""
    path = tmp_path / "state"
    first = Checkpoint(path)
    first.open()
    monkeypatch.setattr("exporters.requests.checkpoint.LOCK_S", 0.1)
    with pytest.raises(Locked, match=rf"{path} .*in use .*`state`"):
        Checkpoint(path).open()
    first.close()
    code = "import sys, os; from pathlib import Path; from exporters.requests.checkpoint import Checkpoint\n"
    code += "c = Checkpoint(Path(sys.argv[1])); c.open(); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert -9 == killed.returncode
    second = Checkpoint(path)
    assert [] == second.open()
    second.close()


def test_a_file_of_many_frames_asks_to_be_begun_anew(tmp_path):
    checkpoint = Checkpoint(tmp_path / "state")
    checkpoint.open()
    assert checkpoint.needs_rewrite, (
        "whoever opened it must write it once: what stands behind its last whole frame is not known"
    )
    checkpoint.rewrite(b"x" * 1000)
    while not checkpoint.needs_rewrite:
        checkpoint.append(b"y" * 100_000)
    assert 1 << 20 < checkpoint.bytes < 2 << 20
    assert os.stat(checkpoint.path).st_size == checkpoint.bytes
    checkpoint.close()
