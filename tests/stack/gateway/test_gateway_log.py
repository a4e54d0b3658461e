"""The request log: in time, whole lines only, through rotation, a full disk and a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stack.config import BadConfig
from stack.gateway import log as log_module
from stack.gateway.journal import Lost
from stack.gateway.log import RequestLog
from tests.support.wait import until


@dataclass
class Counted:
    failed: int = 0
    lost: int = 0
    waiting: int = 0
    before: Lost = field(default_factory=Lost)

    def log_failed(self) -> None:
        self.failed += 1

    def log_lost(self, lines: int) -> None:
        self.lost += lines

    def log_waiting(self, lines: int) -> None:
        self.waiting = lines

    def log_lost_before(self, lost: Lost) -> None:
        self.before = lost


@contextlib.asynccontextmanager
async def opened(path: Path, kept_bytes: int = 1000) -> AsyncIterator[tuple[RequestLog, Counted]]:
    counted = Counted()
    log = RequestLog(path, counted, kept_bytes)
    log.open()
    try:
        yield log, counted
    finally:
        await log.stop()


def full_disk(monkeypatch: pytest.MonkeyPatch, after_bytes: int = 0) -> list[int]:
    """os.write takes this many bytes more and then fails, until the list is emptied."""
    real, left = os.write, [after_bytes]

    def write(fd: int, data: bytes) -> int:
        if not left:
            return real(fd, data)
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        took = real(fd, bytes(data)[: left[0]])
        left[0] -= took
        return took

    monkeypatch.setattr(log_module.os, "write", write)
    return left


async def test_a_line_is_in_the_file_without_a_stop(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    async with opened(path) as (log, _):
        for number in range(3):
            log.write(b"%d\n" % number)
            await until(lambda want=b"%d\n" % number: path.read_bytes().endswith(want))


async def test_lines_keep_order_and_flush_at_stop(tmp_path: Path):
    """Lines keep their order and the last ones are written at stop."""
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"old\n")
    async with opened(path, 10_000) as (log, counted):
        for number in range(500):
            log.write(b"%d\n" % number)
    assert b"old\n" + b"".join(b"%d\n" % number for number in range(500)) == path.read_bytes()
    assert (0, 0, 0) == (counted.failed, counted.lost, counted.waiting)


@pytest.mark.parametrize("how", ["renamed", "removed", "signal"])
async def test_the_file_is_opened_anew_after_rotation(tmp_path: Path, how: str):
    path, old = tmp_path / "requests.jsonl", tmp_path / "requests.jsonl.1"
    async with opened(path) as (log, _):
        log.write(b"a\n")
        await until(lambda: path.read_bytes() == b"a\n")
        if how == "removed":
            path.unlink()
        else:
            path.rename(old)
        if how == "signal":
            log.reopen()
            await until(path.exists)
        log.write(b"b\n")
        await until(lambda: path.exists() and path.read_bytes() == b"b\n")
    assert how == "removed" or old.read_bytes() == b"a\n"


async def test_a_full_disk_is_counted_and_survived_without_half_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_module, "RETRY_S", 0.01)
    path = tmp_path / "requests.jsonl"
    async with opened(path) as (log, counted):
        left = full_disk(monkeypatch, after_bytes=7)
        log.write(b"first\n")
        log.write(b"second\n")
        await until(lambda: counted.failed > 0)
        assert (b"", 2) == (path.read_bytes(), counted.waiting)
        left.clear()
        log.write(b"third\n")
        await until(lambda: path.read_bytes() == b"first\nsecond\nthird\n")
        await until(lambda: counted.waiting == 0)
    assert 0 == counted.lost


async def test_what_the_buffer_cannot_hold_is_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "requests.jsonl"
    async with opened(path, kept_bytes=10) as (log, counted):
        full_disk(monkeypatch)
        for _ in range(5):
            log.write(b"1234\n")
        await until(lambda: counted.failed > 0)
        assert 3 == counted.lost
    assert (5, b"") == (counted.lost, path.read_bytes())


async def test_a_torn_line_of_a_crash_spoils_only_itself(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"request_id":"whole"}\n{"request_id":"to')
    async with opened(path) as (log, _):
        log.write(b"next\n")
    assert b'{"request_id":"whole"}\n{"request_id":"to\nnext\n' == path.read_bytes()


async def test_a_path_that_cannot_be_written_is_told_at_start(tmp_path: Path):
    with pytest.raises(BadConfig, match=r"requests_log: .*/no/where\.jsonl .*: No such file"):
        async with opened(tmp_path / "no" / "where.jsonl"):
            pass
