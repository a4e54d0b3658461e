"""Lines of request logs that are in no segment yet: after the position up to which they were shipped.

Invariant: a line is read once, in its rotated or compressed file as well, and a request that was shipped or read
before is left out, by the same window of request ids as the sidecar's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from exporters.dataset import columns
from exporters.requests.positions import Position
from exporters.requests.read import BadLines
from exporters.requests.record import FieldMap, RequestRecord, parse_block
from exporters.requests.store import RecentRequests
from exporters.requests.tail import Tail

_BATCH_BYTES = 2 << 20
_SCAN_AGAIN_S = 60.0  # on the clock that is made here: every poll looks for rotated files again


@dataclass(slots=True)
class LiveLines:
    """Reader of one log. since: positions up to which it was shipped; empty: all of it, rotated files included.

    faults: damaged or cut files by reason, as in tail.py."""

    path: Path
    since: Sequence[Position] = ()
    fields: FieldMap = field(default_factory=FieldMap)
    bad: BadLines = field(default_factory=BadLines)
    faults: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0

    def batches(self, window: RecentRequests) -> Iterator[list[RequestRecord]]:
        """Yield the records, oldest file first. window: requests that count as read. Raises OSError."""
        tail = Tail(self.path, self.since)
        clock_s = 0.0
        try:
            while (blocks := tail.poll(clock_s, _BATCH_BYTES)) or tail.busy or not clock_s:
                clock_s += _SCAN_AGAIN_S
                records: list[RequestRecord] = []
                for block in blocks:
                    found, bad = parse_block(block, self.fields)
                    records += found
                    for _, error in bad:
                        self.bad.add(error)
                fresh = window.fresh(records)
                window.added.clear()
                self.duplicates += len(records) - len(fresh)
                if fresh:
                    yield fresh
        finally:
            tail.close()
            self.faults = tail.faults
        if not tail.found:
            raise FileNotFoundError(2, "no such request log", str(self.path))


_encoder = msgspec.json.Encoder()


def lines_of(records: Sequence[RequestRecord]) -> bytes:
    return _encoder.encode_lines(records)


def write_rows(connection: Any, lines: Path, target: Path, cluster: str | None) -> None:
    types = ", ".join(f"'{c.name}': '{'VARCHAR' if c.name == 'ts' else c.type}'" for c in columns.OF_RECORD)
    special = {
        "ts": "CAST(ts AS TIMESTAMPTZ) AS ts",
        "cluster": "CAST(? AS VARCHAR) AS cluster",
        "writer": "CAST(NULL AS VARCHAR) AS writer",
    }
    named = ", ".join(special.get(column.name, f'"{column.name}"') for column in columns.COLUMNS)
    read = f"read_json('{lines}', columns = {{{types}}}, format = 'newline_delimited')"
    connection.execute(f"COPY (SELECT {named} FROM {read}) TO '{target}' (FORMAT parquet)", [cluster])  # noqa: S608
