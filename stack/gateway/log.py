"""Writer of request records: append-only file, off the event loop, rotation.

Invariant: `write` never waits and never raises. A line reaches the file within 50 ms, or stays in a bounded buffer
until the disk takes it again.
One gateway per file: after a failed write the file is cut back to whole lines, which would hurt a second writer.
Rotation: rename the file; it is opened anew at the next write, or on `reopen`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections import deque
from pathlib import Path
from typing import Protocol

from stack.config import BadConfig
from stack.gateway.journal import Journal, Lost

FLUSH_S = 0.02  # collects the lines of a burst; well under the 50 ms that readers are promised
RETRY_S = 1.0
STOP_S = 5.0

_log = logging.getLogger("gateway.log")


class LogCounters(Protocol):
    """Counters of the log."""

    def log_failed(self) -> None: ...
    def log_lost(self, lines: int) -> None: ...
    def log_waiting(self, lines: int) -> None: ...
    def log_lost_before(self, lost: Lost) -> None: ...


class RequestLog:
    """An open request log. Start with `open`, end with `stop`."""

    def __init__(self, path: Path, counters: LogCounters, kept_bytes: int = 8 << 20) -> None:
        self._path = path
        self._counters = counters
        self._journal = Journal(path)
        self.accepted = self._journal.accepted  # for each request that will leave a record
        self._kept_bytes = kept_bytes
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._fd = -1
        self._wake = asyncio.Event()
        self._stopping = False
        self._reopen = False
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Opens the file and starts writing; reports what the run before left out. Raises BadConfig when the file
        cannot be written at all."""
        self._counters.log_lost_before(self._journal.open())
        try:
            self._open()
        except OSError as error:
            self._journal.close()
            raise BadConfig(f"requests_log: {self._path} cannot be written: {error.strerror}") from error
        self._task = asyncio.create_task(self._run())

    def write(self, line: bytes) -> None:
        """Takes one line; beyond the buffer's bound the newest line is dropped and counted."""
        self._journal.made()
        if self._size + len(line) > self._kept_bytes:
            self._journal.dropped()
            self._counters.log_lost(1)
            return
        self._lines.append(line)
        self._size += len(line)
        self._wake.set()

    def reopen(self) -> None:
        """Opens the path anew before the next write, for rotation by signal."""
        self._reopen = True
        self._wake.set()

    async def stop(self) -> None:
        """Writes what is left; what the disk does not take now is counted as lost."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, STOP_S)
        if self._lines:
            self._counters.log_lost(len(self._lines))
            _log.error("%s: %d records were not written and are lost", self._path, len(self._lines))
        self._journal.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _run(self) -> None:
        while not (self._stopping and not self._lines):
            await self._wake.wait()
            self._wake.clear()
            if not self._stopping:
                await asyncio.sleep(FLUSH_S)
            batch, size = list(self._lines), self._size
            error = await asyncio.to_thread(self._append, b"".join(batch), len(batch))
            if error is None:
                self._taken(len(batch), size)
                continue
            self._failed(error)
            if self._stopping:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked(), RETRY_S)
            self._wake.set()

    async def _stop_asked(self) -> None:
        while not self._stopping:
            self._wake.clear()
            await self._wake.wait()

    def _taken(self, count: int, size: int) -> None:
        for _ in range(count):
            self._lines.popleft()
        self._size -= size
        self._counters.log_waiting(len(self._lines))
        if self._failing:
            _log.warning("%s is written again", self._path)
        self._failing = False

    def _failed(self, error: OSError) -> None:
        self._counters.log_failed()
        self._counters.log_waiting(len(self._lines))
        if not self._failing:  # once per trouble, not once per second
            _log.error(
                "%s cannot be written: %s; records wait in memory, requests go on", self._path, error.strerror or error
            )
        self._failing = True

    # From here on: in a worker thread, one call at a time.

    def _append(self, data: bytes, lines: int) -> OSError | None:
        try:
            if self._fd < 0 or self._reopen or not self._is_current():
                self._open()
            if data:
                self._write_whole(data)
                self._journal.wrote(lines, self._fd)
        except OSError as error:
            return error
        return None

    def _write_whole(self, data: bytes) -> None:
        """Writes all of it or none: a full disk may take half a line."""
        start = os.fstat(self._fd).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise

    def _is_current(self) -> bool:
        """Return whether the open file is still the one at the path."""
        ours = os.fstat(self._fd)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def _open(self) -> None:
        """Opens the path for appending; a line left torn by a crash is closed so that it spoils only itself."""
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode) and info.st_size and os.pread(fd, 1, info.st_size - 1) != b"\n":
                os.write(fd, b"\n")
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._reopen = fd, False
        self._journal.wrote(0, fd)
