"""Buffer of records until they are sealed: JSON lines in a file, and their sums.

Invariant: the file holds exactly the records that `sums` counts. A failed write is undone and repeated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from exporters.dataset.layout import Sums
from exporters.requests.record import RequestRecord

_TOKENS = tuple(map(attrgetter, ("prompt_tokens", "cached_tokens", "completion_tokens")))
_TS = attrgetter("ts")
_encoder = msgspec.json.Encoder()


class SegmentBuffer:
    """Records since the last sealing. The file needs no sync: after a crash its records are read from the log again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums = Sums()
        self.bytes = 0
        self._unwritten = b""
        path.unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def add(self, records: Sequence[RequestRecord]) -> None:
        """Add records. Raises OSError if the disk is full; they are kept, and `flush` repeats the write."""
        self.sums = self.sums.plus(_sums_of(records))
        self._unwritten += _encoder.encode_lines(_with_common_times(records))
        self.flush()

    def flush(self) -> None:
        """Write what could not be written before. Raises OSError."""
        view = memoryview(self._unwritten)
        try:
            while view:
                written = os.pwrite(self._fd, view, self.bytes)
                self.bytes += written
                view = view[written:]
        finally:
            self._unwritten = bytes(view)

    def clear(self) -> None:
        """Forget all records, which a commit holds now."""
        os.ftruncate(self._fd, 0)
        self.sums, self.bytes = Sums(), 0

    def close(self) -> None:
        os.close(self._fd)


def _sums_of(records: Sequence[RequestRecord]) -> Sums:
    return Sums(len(records), *(sum(filter(None, map(tokens, records))) for tokens in _TOKENS))


def _with_common_times(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    """Return records whose times all readers of JSON parse alike: in UTC with `Z`.

    All at once while every time looks as our gateway writes it, which costs little."""
    times = list(map(_TS, records))
    with contextlib.suppress(TypeError):  # some have none
        text, count = "".join(times), len(times)
        if (
            set(map(len, times)) == {24}
            and text[10::24].count("T") == text[19::24].count(".") == text[23::24].count("Z") == count
        ):
            return records
    return [record if record.ts is None else replace(record, ts=_common_time(record.ts)) for record in records]


def _common_time(ts: str) -> str | None:
    """Return a valid time with microseconds in UTC; None outside of the years 1 to 9999 in UTC."""
    stamp = datetime.fromisoformat(ts)
    try:
        utc = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError:
        return None
    return utc.isoformat(timespec="microseconds").replace("+00:00", "Z")
