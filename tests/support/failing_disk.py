"""A disk that fails at a chosen operation."""

from __future__ import annotations

import errno
from pathlib import Path

from exporters.requests.checkpoint import CheckpointDisk


class FailingDisk(CheckpointDisk):
    """A stand-in for a disk that is full or broken: fails at the calls that are named."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, fd: int, data: bytes) -> int:  # type: ignore[override]
        if "write" in self.fails and len(data) == 1:
            self._call("write")
        # as a full disk does: some of it fits
        return super().write(fd, data[: len(data) // 2 or 1] if "write" in self.fails else data)

    def sync(self, fd: int) -> None:
        self._call("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        super().rename(source, target)
