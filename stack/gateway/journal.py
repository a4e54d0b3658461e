"""Journal of the request log: accepted requests and written records, to report losses after a crash.

Invariant: counting never waits for the disk and never raises. Counts are plain integers; a thread copies them, at most
every EVERY_S, into a small file beside the log. The file survives SIGKILL and an out-of-memory kill, not a power cut.
It has a fixed size and is written in place, so a full disk does not matter once it exists.

An mmap that is stored to on the request path would save the thread. It was rejected: on a full copy-on-write file
system (btrfs) or after a truncation such a store raises SIGBUS, and elsewhere it can wait for writeback; both would
break the gateway when it is in trouble already."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from exporters.requests.record import Count

VERSION = 1
SIZE = 512
EVERY_S = 0.01  # what was counted in the last 10 ms before a crash is missing
REPORTED_S = 3600.0  # so long losses of earlier runs are shown and carried on through further crashes
STOP_S = 1.0

_log = logging.getLogger("gateway.log")

Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # unix time


class Lost(msgspec.Struct, frozen=True):
    """Requests of earlier runs that left no record, as found at a start (unix seconds).

    waiting: their records waited in memory. in_flight: they had not ended."""

    waiting: Count = 0
    in_flight: Count = 0
    found_s: Seconds = 0.0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file, of one run. written: records in the log up to byte `end` of this inode.

    dropped: records that found no room in memory, which that run has counted as lost itself."""

    version: int = VERSION
    changed_s: Seconds = 0.0
    accepted: Count = 0
    made: Count = 0
    dropped: Count = 0
    written: Count = 0
    end: Count = 0
    inode: int = 0
    device: int = 0
    lost: Lost = Lost()


class _Version(msgspec.Struct):
    version: int


class _Written(NamedTuple):
    """Replaced as a whole, so that a copy made meanwhile is consistent."""

    lines: int = 0
    end: int = 0
    inode: int = 0
    device: int = 0


class Journal:
    """Journal of the log at a path. Start with `open`, end with `close`; without a usable file it counts for nothing
    and says so once."""

    def __init__(self, log: Path, clock: Callable[[], float] = time.time) -> None:
        self._log_path = log
        # Hidden and without the log's suffix: no pattern for logs or rotated logs (requests.jsonl*, *.jsonl) may match
        # it.
        self._path = log.with_name(f".{log.name.replace('.', '-')}.journal")
        self._clock = clock
        self._fd = -1
        self._accepted = self._made = self._dropped = 0
        self._written = _Written()
        self._lost = Lost()
        self._changed = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def accepted(self) -> None:
        """Count a request that will leave a record."""
        self._accepted += 1
        if not self._changed.is_set():
            self._changed.set()

    def made(self) -> None:
        """Count a record that is to be written."""
        self._made += 1
        if not self._changed.is_set():
            self._changed.set()

    def dropped(self) -> None:
        """Count a record that found no room in memory."""
        self._dropped += 1

    def wrote(self, lines: int, log_fd: int) -> None:
        """Count records that have been written to the open log. In the log's worker thread."""
        info = os.fstat(log_fd)
        self._written = _Written(self._written.lines + lines, info.st_size, info.st_ino, info.st_dev)
        self._changed.set()

    def open(self) -> Lost:
        """Take over from the run before. Return what that and other runs of the last hour lost. Call before the log is
        opened."""
        if self._log_path.exists() and not stat.S_ISREG(self._log_path.stat().st_mode):
            return self._lost  # a pipe or a device: there is no folder of its own to write to
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lost = self._take_over(os.pread(self._fd, SIZE + 1, 0))
            os.ftruncate(self._fd, SIZE)
            self._store()
        except FileNotFoundError:
            pass  # no such folder, which the log itself reports
        except BlockingIOError:
            self._give_up("another gateway holds it; give each gateway a requests_log of its own")
        except OSError as error:
            self._give_up(f"it cannot be written: {error.strerror}")
        else:
            self._thread = threading.Thread(target=self._keep, name="journal", daemon=True)
            self._thread.start()
        return self._lost

    def close(self) -> None:
        """Write the last counts and let go of the file."""
        if self._thread is not None:
            self._closing = True
            self._changed.set()
            self._thread.join(STOP_S)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_over(self, data: bytes) -> Lost:
        """Report what the run that wrote this lost. A file that cannot be used is reported and replaced."""
        now = self._clock()
        if not data:
            return Lost()
        try:
            if (version := msgspec.json.decode(data, type=_Version).version) != VERSION:
                _log.warning(
                    "%s: version %d is of another release; what the run before lost is not known", self._path, version
                )
                return Lost()
            before = msgspec.json.decode(data, type=Counts)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.warning("%s is damaged; what the run before lost is not known, and a new journal begins", self._path)
            return Lost()
        waiting, in_flight = missing(before, self._lines_beyond(before))
        carried = before.lost if now - before.lost.found_s < REPORTED_S else Lost()
        if not waiting + in_flight:
            return carried
        ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(before.changed_s))
        _log.error(
            "%s: %d accepted requests of the run before, which ended about %s, are not in the log: %d records waited in"
            " memory, %d requests were in flight",
            self._log_path,
            waiting + in_flight,
            ended,
            waiting,
            in_flight,
        )
        return Lost(carried.waiting + waiting, carried.in_flight + in_flight, now)

    def _lines_beyond(self, before: Counts) -> int:
        """Count records that were written in the last moment, after the journal's last copy."""
        with contextlib.suppress(OSError), self._log_path.open("rb") as file:
            info = os.fstat(file.fileno())
            if (info.st_ino, info.st_dev) == (before.inode, before.device) and info.st_size > before.end:
                file.seek(before.end)
                return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        return 0

    def _give_up(self, why: str) -> None:
        _log.warning(
            "%s: %s. Requests that this run leaves without a record will not be reported after a crash", self._path, why
        )
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    # From here on: in a thread of its own once it runs.

    def _keep(self) -> None:
        failing = False
        while not self._closing:
            self._changed.wait()
            self._changed.clear()
            try:
                self._store()
                failing = False
            except OSError as error:
                if not failing:
                    _log.error(
                        "%s cannot be written: %s; a crash now would be reported with older counts",
                        self._path,
                        error.strerror,
                    )
                failing = True
            time.sleep(EVERY_S)

    def _store(self) -> None:
        """Write the counts in place. A record is accepted, made, written in this order, so they are read in the
        opposite one."""
        lines, end, inode, device = self._written
        dropped, made, accepted = self._dropped, self._made, self._accepted
        counts = Counts(
            changed_s=self._clock(),
            accepted=accepted,
            made=made,
            dropped=dropped,
            written=lines,
            end=end,
            inode=inode,
            device=device,
            lost=self._lost,
        )
        os.pwrite(self._fd, msgspec.json.encode(counts).ljust(SIZE - 1) + b"\n", 0)


def missing(counts: Counts, beyond: int) -> tuple[int, int]:
    """Return how many records waited in memory and how many requests were in flight. beyond: records written after
    these counts."""
    settled = counts.written + beyond + counts.dropped
    made = max(counts.made, settled)
    return made - settled, max(0, counts.accepted - made)
