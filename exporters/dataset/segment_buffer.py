"""Buffer of records until they are sealed: their JSON lines by day, model, team and outcome, and their sums.

Invariant: the lines are exactly the records that `sums` counts, each once, those of a key in the order of arrival."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from exporters.dataset.layout import Sums
from exporters.requests.record import RequestRecord

_LINE_BYTES = 1000  # of a line of our gateway, at most
LONG_BYTES = 16 << 20  # of lines beyond that, in memory; DuckDB needs a multiple of it to write a segment
_TOKENS = tuple(map(attrgetter, ("prompt_tokens", "cached_tokens", "completion_tokens")))
_TS = attrgetter("ts")
_encoder = msgspec.json.Encoder()


class RunKey(NamedTuple):
    """Properties by which lines are put in order. day: in UTC; None for records without a time."""

    day: str | None
    model: str | None
    team: str | None
    outcome: str | None


class SegmentBuffer:
    """Records since the last sealing, in memory: after a crash they are read from the log again.

    counts: number of records of each key. bytes: size of the lines. long_bytes: what they have beyond _LINE_BYTES each,
    in batches of one key."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.bytes = self.long_bytes = 0
        self.counts: defaultdict[RunKey, int] = defaultdict(int)
        self._lines: defaultdict[RunKey, list[bytes]] = defaultdict(list)

    def add(self, records: Sequence[RequestRecord]) -> None:
        """Add records. Small batches are faster: they stay in the processor's cache."""
        self.sums = self.sums.plus(_sums_of(records))
        of_key: defaultdict[tuple[str | None, ...], list[RequestRecord]] = defaultdict(list)
        for record in _with_common_times(records):
            ts = record.ts
            of_key[ts and ts[:10], record.model, record.team, record.outcome].append(record)
        for given, some in of_key.items():
            key, lines = RunKey(*given), _encoder.encode_lines(some)
            self.counts[key] += len(some)
            self._lines[key].append(lines)
            self.bytes += len(lines)
            self.long_bytes += max(0, len(lines) - _LINE_BYTES * len(some))

    def is_full(self, size: int) -> bool:
        """Return True if there are `size` bytes, or so many in long lines that sealing more would take much memory."""
        return self.bytes >= size or self.long_bytes >= LONG_BYTES

    def write(self, keys: Iterable[RunKey], target: Path) -> None:
        """Write the lines of these keys to a file, key by key, in place of what it holds. Raises OSError.

        A file that exists is truncated last: writing into its pages takes a tenth of the time of new ones."""
        with open(target, "wb", opener=_without_truncation) as file:
            for key in keys:
                file.write(b"".join(self._lines[key]))
            file.truncate()

    def clear(self) -> None:
        """Forget all records, which a commit holds now."""
        self.sums, self.bytes, self.long_bytes = Sums(), 0, 0
        self.counts.clear()
        self._lines.clear()


def _without_truncation(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o600)


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
            and "T24" not in text  # the end of a day, which is a time of the next
            and "W" not in text  # a day of a week, such as 2026-W48-3
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
