"""Complete reads of request logs: plain or compressed files as records, each request once, bad lines counted.

Invariant: memory is bounded by one chunk and one line, whatever a file holds. A bad line affects no other line and
is never quoted, because it may hold a prompt."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from exporters.requests.compressed import Damaged, Unpacked
from exporters.requests.duplicates import RecentRequests, repeats_note
from exporters.requests.positions import MAX_LINE_BYTES, PACKED
from exporters.requests.record import PROBE_TEAM, BadLine, FieldMap, RequestRecord, parse_block

CHUNK_BYTES = 1 << 20
PLACES_AT_MOST = 5  # lines named for each reason


@dataclass(slots=True)
class ReadReport:
    """Lines of request logs that count as no request of their own.

    records: lines that count. repeats: lines of requests that were read before. counts: bad lines by reason. places:
    the first of them, by reason and message."""

    records: int = 0
    repeats: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def add(self, error: BadLine, place: Callable[[], str]) -> None:
        """Count a bad line. place: returns the file and the number of the line."""
        self.counts[error.reason] += 1
        if self.counts[error.reason] <= PLACES_AT_MOST:
            self.places.setdefault(error.reason, {}).setdefault(str(error), []).append(place())

    @property
    def total(self) -> int:
        """Return the number of bad lines."""
        return self.counts.total()

    @property
    def notes(self) -> list[str]:
        """Return sentences on what was left out: number, reason, place and allowed values of bad lines; repeats."""
        found = [repeats_note(self.repeats, self.records + self.repeats)] if self.repeats else []
        for reason, count in sorted(self.counts.items()):
            lines = "; ".join(f"{', '.join(at)}: {message}" for message, at in self.places[reason].items())
            more = f"; and {count - PLACES_AT_MOST} more" if count > PLACES_AT_MOST else ""
            found.append(f"{count} bad {'line' if count == 1 else 'lines'} ({reason}): {lines}{more}")
        return found


# Reads all records, from its beginning at each call; what is left out is added to its argument. Records of a data set
# come in the order of their starts.
RecordReader = Callable[[ReadReport], Iterator[RequestRecord]]


def read_records(
    paths: Iterable[Path],
    report: ReadReport | None = None,
    fields: FieldMap | None = None,
    *,
    progress: Callable[[int], None] = lambda _: None,
    ended_lines_only: bool = False,
    probes: bool = True,
    window: RecentRequests | None = None,
) -> Iterator[RequestRecord]:
    """Yield the records of complete files, one file after the other, in line order; a request once.

    report: receives what is left out. progress: called with the number of file bytes read since the last call.
    ended_lines_only: ignore a last line without newline, whose writer was stopped. probes: yield the gateway's own
    probes of engines, too. window: requests that count as read. Raises OSError with the file's name, also for a
    damaged compressed file."""
    report = ReadReport() if report is None else report
    window = RecentRequests() if window is None else window
    for path in paths:
        for number, block in read_blocks(path, report, progress=progress, ended_lines_only=ended_lines_only):
            # zero bytes, which a crash of the machine leaves in a file, end a line
            records, refused = parse_block(block.replace(b"\0", b"\n"), fields)
            for _, error in refused:
                report.add(error, partial(_place, path, number, block, error))
            fresh = window.fresh(records)
            window.added.clear()
            report.records += len(fresh)
            report.repeats += len(records) - len(fresh)
            yield from fresh if probes else (one for one in fresh if one.team != PROBE_TEAM)


def _place(path: Path, first: int, block: bytes, error: BadLine) -> str:
    """Return file and number of a bad line in a block. first: number of the block's first line."""
    number = first + block.count(b"\n", 0, error.offset)
    return f"{path}:{number}"


def read_blocks(
    path: Path, report: ReadReport, *, progress: Callable[[int], None] = lambda _: None, ended_lines_only: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines of a file, each with the number of its first line; arguments of `read_records`.

    report: receives lines that are too long. Raises OSError as `read_records` does."""
    try:
        with path.open("rb") as file:
            yield from _blocks(_chunks(file.fileno(), progress), path, report, ended_lines_only)
    except Damaged as error:
        raise OSError(errno.EBADMSG, f"cannot be read: {error}", str(path)) from error
    except OSError as error:
        error.filename = str(path)
        raise


def _blocks(
    chunks: Iterable[bytes], path: Path, report: ReadReport, ended_lines_only: bool
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of the first line, from 1, and a block of whole lines."""
    rest, skipping, following = b"", False, 1
    for chunk in chunks:
        lines, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            number, following = following, following + lines.count(b"\n") + 1
            if skipping:
                _, _, lines = lines.partition(b"\n")
                number, skipping = number + 1, False
            if lines:
                yield number, lines + b"\n"
        if len(rest) > MAX_LINE_BYTES:
            if not skipping:
                long = BadLine("long", f"a line has more than {MAX_LINE_BYTES} bytes")
                report.add(long, partial("{}:{}".format, path, following))
            rest, skipping = b"", True
    if rest and not skipping and not ended_lines_only:
        yield following, rest + b"\n"


def _chunks(fd: int, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the content of a file, unpacked where it is compressed. Raises Damaged if it cannot be unpacked to its
    end."""

    def read(offset: int, size: int) -> bytes:
        return os.pread(fd, size, offset)

    if not read(0, 8).startswith(PACKED):
        while chunk := os.read(fd, CHUNK_BYTES):
            progress(len(chunk))
            yield chunk
        return
    unpacked, at = Unpacked(read), 0
    while chunk := unpacked.read(unpacked.end, CHUNK_BYTES):
        progress(unpacked.raw_end - at)
        at = unpacked.raw_end
        yield chunk
    if not unpacked.complete:
        raise Damaged("it ends in the middle of its compressed data")
