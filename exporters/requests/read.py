"""Complete reads of request logs: plain or compressed files as records, bad lines counted.

Invariant: memory is bounded by one chunk and one line, whatever a file holds. A bad line affects no other line and
is never quoted, because it may hold a prompt."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from exporters.requests.compressed import Damaged, Unpacked
from exporters.requests.positions import MAX_LINE_BYTES, PACKED
from exporters.requests.record import PROBE_TEAM, BadLine, FieldMap, RequestRecord, parse_block

CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class BadLines:
    """Counts of lines that are no request records by reason, and the first message of each reason."""

    counts: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, error: BadLine) -> None:
        self.counts[error.reason] += 1
        self.messages.setdefault(error.reason, str(error))

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def why(self) -> str:
        """Return the messages, to be appended to a count; empty without one."""
        return ": " + "; ".join(self.messages.values()) if self.messages else ""


# Reads all records, from its beginning at each call; bad lines are added to its argument. Records of a data set come
# in the order of their starts.
RecordReader = Callable[[BadLines], Iterator[RequestRecord]]


def read_records(
    paths: Iterable[Path],
    bad: BadLines | None = None,
    fields: FieldMap | None = None,
    *,
    progress: Callable[[int], None] = lambda _: None,
    ended_lines_only: bool = False,
    probes: bool = True,
) -> Iterator[RequestRecord]:
    """Yield the records of complete files, one file after the other, in line order.

    bad: receives invalid lines. progress: called with the number of file bytes read since the last call.
    ended_lines_only: ignore a last line without newline, whose writer was stopped. probes: yield the gateway's own
    probes of engines, too. Raises OSError with the file's
    name, also for a damaged compressed file."""
    bad = BadLines() if bad is None else bad
    for path in paths:
        try:
            with path.open("rb") as file:
                for block in _blocks(_chunks(file.fileno(), progress), bad, ended_lines_only):
                    records, refused = parse_block(block, fields)
                    for _, error in refused:
                        bad.add(error)
                    yield from records if probes else (one for one in records if one.team != PROBE_TEAM)
        except Damaged as error:
            raise OSError(errno.EBADMSG, f"cannot be read: {error}", str(path)) from error
        except OSError as error:
            error.filename = str(path)
            raise


def _blocks(chunks: Iterable[bytes], bad: BadLines, ended_lines_only: bool) -> Iterator[bytes]:
    """Yield blocks of whole lines. Zero bytes, which a crash of the machine leaves in a file, end a line."""
    rest, skipping = b"", False
    for chunk in chunks:
        lines, newline, rest = (rest + chunk).rpartition(b"\n")
        if skipping and newline:
            _, _, lines = lines.partition(b"\n")
            skipping = False
        if lines and not skipping:
            yield lines.replace(b"\0", b"\n") + b"\n"
        if len(rest) > MAX_LINE_BYTES:
            if not skipping:
                bad.add(BadLine("long", f"a line has more than {MAX_LINE_BYTES} bytes"))
            rest, skipping = b"", True
    if rest and not skipping and not ended_lines_only:
        yield rest.replace(b"\0", b"\n") + b"\n"


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
