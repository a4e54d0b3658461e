"""One file that holds what was counted and how far was read, always together.

Law: after a crash at any moment the file holds a state that was once whole: the last one whose writing returned, or the
one being written. A whole state is written beside the file, synced and renamed over it; what changes after that is
appended as frames, each with its length and checksum and synced before `append` returns. So a commit costs what
changed, not what is known: the window of request ids alone has megabytes. A frame that a crash cut short ends the file;
nothing is ever appended behind one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from pathlib import Path

MAGIC = b"vllm-watch state 1\n"
_HEAD = struct.Struct("<II")  # length and checksum of the frame that follows
MAX_FRAME_BYTES = 1 << 30


class Locked(OSError):
    """Another process writes this file."""


class Unreadable(ValueError):
    """A file that is no state of ours. The message names it and where it was moved."""


class CheckpointDisk:
    """The few calls that change the disk. All may raise OSError; a test can make them."""

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)


class Checkpoint:
    """A file of frames with one writer. `rewrite` begins it anew, `append` adds to it; both return when it is safe on
    disk.

    After a failed call only `rewrite` is allowed: what a failed sync left behind is unknown."""

    def __init__(self, path: Path, disk: CheckpointDisk | None = None) -> None:
        self.path = path
        self.bytes = 0
        self.base_bytes = 0  # size when it was last begun anew
        self._disk = disk or CheckpointDisk()
        self._fd: int | None = None
        self._lock_fd: int | None = None

    def open(self) -> list[bytes]:
        """Take the lock and read all whole frames; an empty list where there is no state yet.

        Raises Locked, OSError, and Unreadable for a file that is something else, after moving it out of the way."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Locked(f"{self.path} is in use by another sidecar; give each its own `state`") from None
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
        """Move a file that means nothing to us out of the way, and say so. Raises OSError."""
        aside = self.path.with_name(f"{self.path.name}.unreadable")
        os.replace(self.path, aside)
        which = f"{self.path} is no state of this release" + (f" ({why})" if why else "")
        return Unreadable(f"{which}; it was moved to {aside.name}, and counting begins anew")

    @property
    def needs_rewrite(self) -> bool:
        """It was not begun by this process, or holds so many frames that one whole state is cheaper."""
        return self._fd is None or self.bytes > 2 * self.base_bytes + (1 << 20)

    def rewrite(self, frame: bytes) -> None:
        """Replace all that is there by one frame. Raises OSError; the old file then stays as it was, and stays what the
        next start reads."""
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
        """Add a frame behind the others. Raises OSError."""
        if self._fd is None:
            raise OSError("the state is not open; it is written whole first")
        try:
            # or it was removed: then nothing in it is safe
            if not os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                raise OSError(f"{self.path} was replaced by another file; it is written anew")
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
        """Writes all of it, without another copy of what may be megabytes; how much that was."""
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
    """Whole frames from the beginning on; None for what is no state of ours. A cut or spoilt frame ends the reading."""
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
