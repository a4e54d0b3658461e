"""Follow a growing file of lines through rotation.

Law: a line is handed out when its newline has arrived, and once. A replaced file is read to its end before it is let go, and for
`grace_s` longer, since its writer may still hold it open."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from errno import EINVAL
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

MAX_LINE_BYTES = 1 << 20
_CHUNK = 1 << 18


@dataclass(slots=True)
class _Open:
    file: BinaryIO
    identity: tuple[int, int]
    rest: bytes = b""
    skipping: bool = False
    leave_at: float | None = None


@dataclass(slots=True)
class Tail:
    """One path. `poll` hands out complete lines; the counters say what happened on the way.

    It starts at the beginning of the file that is there, so that a restarted reader counts the same file to the same figures."""

    path: Path
    grace_s: float = 5.0
    rotations: int = 0
    long_lines: int = 0
    _files: list[_Open] = field(default_factory=list)

    def poll(self, now_s: float, budget_bytes: int = 4 * _CHUNK) -> list[bytes]:
        """Complete lines since the last poll, without their newlines, oldest file first; at most about budget_bytes of them.

        now_s: a monotonic clock. A missing file has no lines. Raises OSError when a file that is there cannot be read."""
        self._notice_replacement(now_s)
        lines: list[bytes] = []
        for source in list(self._files):
            while budget_bytes > 0 and (chunk := source.file.read(_CHUNK)):
                budget_bytes -= len(chunk)
                lines += self._complete(source, chunk)
            if source.leave_at is not None and now_s >= source.leave_at and budget_bytes > 0:
                source.file.close()
                self._files.remove(source)
        return lines

    def unread_bytes(self) -> int:
        """Bytes in the followed files beyond the last complete line handed out."""
        return sum(max(0, os.fstat(s.file.fileno()).st_size - s.file.tell()) + len(s.rest) for s in self._files)

    def close(self) -> None:
        for source in self._files:
            source.file.close()
        self._files.clear()

    def _notice_replacement(self, now_s: float) -> None:
        """See which file the path leads to now. While it leads to none, the last one is followed on: its writer may hold it open."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return
        if not S_ISREG(stat.st_mode):
            raise OSError(EINVAL, "a request log is a regular file", str(self.path))
        identity = (stat.st_dev, stat.st_ino)
        current = next((s for s in self._files if s.leave_at is None), None)
        if current and current.identity == identity:
            whole = current.file.tell() - len(current.rest)
            if whole <= stat.st_size < current.file.tell():  # the writer took back the beginning of a line, as ours does when the disk is full
                current.file.seek(whole)
                current.rest = b""
            elif stat.st_size < whole:  # cut in place: what is there now is new
                self.rotations += 1
                current.file.seek(0)
                current.rest, current.skipping = b"", False
            return
        if current:
            self.rotations += 1
            current.leave_at = now_s + self.grace_s
        known = next((s for s in self._files if s.identity == identity), None)
        if known:  # moved away and back: it is read on from where it stands
            known.leave_at = None
            return
        file = self.path.open("rb", buffering=0)
        opened = os.fstat(file.fileno())
        self._files.append(_Open(file, (opened.st_dev, opened.st_ino)))

    def _complete(self, source: _Open, chunk: bytes) -> list[bytes]:
        *whole, rest = (source.rest + chunk).split(b"\n")
        if whole and source.skipping:
            whole, source.skipping = whole[1:], False
        if len(rest) > MAX_LINE_BYTES or source.skipping:
            self.long_lines += not source.skipping
            rest, source.skipping = b"", True
        source.rest = rest
        return [line for line in whole if line.strip()]
