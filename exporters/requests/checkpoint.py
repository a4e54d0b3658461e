"""File that stores counters and read positions together.

Invariant: after a crash at any moment the file holds a state that was complete: the last one whose write returned,
or the one being written. A full state is written to a temporary file, synced and renamed; later changes are appended
as frames with length and checksum, each synced before `append` returns. So a commit costs what changed, not the full
state: the window of request ids alone has megabytes. A frame cut short by a crash ends the file; nothing is ever
appended after one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
import zlib
from pathlib import Path

MAGIC = b"vllm-watch state 1\n"
_HEAD = struct.Struct("<II")  # length and checksum of the frame that follows
MAX_FRAME_BYTES = 1 << 30
LOCK_S = 10.0  # a process may still store its last segments after SIGTERM


class Locked(OSError):
    """Checkpoint file in use by another process."""


class Unreadable(ValueError):
    """File that is not a checkpoint. The message names it and its new location."""


class CheckpointDisk:
    """Disk operations of a checkpoint. All may raise OSError, which tests use."""

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)


class Checkpoint:
    """File of frames with one writer. `rewrite` replaces all, `append` adds; both return when the data is on disk.

    After a failed call only `rewrite` is allowed, because the result of a failed sync is unknown."""

    def __init__(self, path: Path, disk: CheckpointDisk | None = None) -> None:
        self.path = path
        self.bytes = 0
        self.base_bytes = 0  # size after the last rewrite
        self._disk = disk or CheckpointDisk()
        self._fd: int | None = None
        self._lock_fd: int | None = None

    def open(self) -> list[bytes]:
        """Lock the file and return all complete frames; an empty list without a state.

        A process that is ending, of before a restart, may hold the lock for LOCK_S. Raises Locked, OSError, and
        Unreadable for any other file, after moving it aside."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(LOCK_S / 100)
                    continue
                os.close(lock)
                raise Locked(
                    f"{self.path} is in use by another process, and was for {LOCK_S:g} s; if that process is ending,"
                    " start again; otherwise give each its own `state`"
                ) from None
        self._lock_fd = lock
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        frames = frames_of(data)
        if frames is None:
            raise self.put_aside()
        self.bytes = self.base_bytes = len(data)
        return frames

    def put_aside(self, why: object = "") -> Unreadable:
        """Rename a file that is not a checkpoint, and return the error to raise. Raises OSError."""
        aside = self.path.with_name(f"{self.path.name}.unreadable")
        os.replace(self.path, aside)
        which = f"{self.path} is no state of this release" + (f" ({why})" if why else "")
        return Unreadable(f"{which}; it was moved to {aside.name}, and counting starts again")

    @property
    def needs_rewrite(self) -> bool:
        """True if this process has not rewritten it yet, or so many frames exist that a full state is cheaper."""
        return self._fd is None or self.bytes > 2 * self.base_bytes + (1 << 20)

    def rewrite(self, frame: bytes) -> None:
        """Replace the file by one frame. Raises OSError; the old file then stays valid for the next start."""
        self._forget()
        beside = self.path.with_name(self.path.name + ".new")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            size = self._write(fd, MAGIC + _head(frame)) + self._write(fd, frame)
            self._disk.sync(fd)
            self._disk.rename(beside, self.path)
            self._sync_folder()
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        self._fd, self.bytes, self.base_bytes = fd, size, size

    def append(self, frame: bytes) -> None:
        """Append a frame. Raises OSError."""
        if self._fd is None:
            raise OSError("the state is not open; rewrite it first")
        try:
            # or it was removed: nothing in it is safe
            if not os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                raise OSError(f"{self.path} was replaced by another file; it is rewritten")
            size = self._write(self._fd, _head(frame)) + self._write(self._fd, frame)
            self._disk.sync(self._fd)
        except BaseException:
            self._forget()
            raise
        self.bytes += size

    def close(self) -> None:
        self._forget()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _write(self, fd: int, data: bytes) -> int:
        """Write all data without copying it, and return its size."""
        view = memoryview(data)
        while view:
            view = view[self._disk.write(fd, view) :]
        return len(data)

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._disk.sync(folder)
        finally:
            os.close(folder)

    def _forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def frames_of(data: bytes) -> list[bytes] | None:
    """Return the complete frames; None if the data is not a checkpoint. A broken frame ends the result."""
    if not data.startswith(MAGIC):
        return None
    frames, at = [], len(MAGIC)
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        frame = data[at + _HEAD.size : at + _HEAD.size + length]
        if length > MAX_FRAME_BYTES or len(frame) < length or zlib.crc32(frame) != checksum:
            break
        frames.append(frame)
        at += _HEAD.size + length
    return frames or None


def _head(frame: bytes) -> bytes:
    return _HEAD.pack(len(frame), zlib.crc32(frame))
