"""Lines of request logs that are in no segment yet: those after the position of the last commit.

Invariant: a line is read once, in its rotated or compressed file as well, and a request that is in a segment or was
read before is left out, by the same window of request ids as the sidecar's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from exporters.requests.duplicates import RecentRequests
from exporters.requests.log_reader import LogReader
from exporters.requests.positions import Position
from exporters.requests.record import FieldMap, RequestRecord
from exporters.requests.store import LogTotals
from exporters.requests.tail import Tail

_BATCH_BYTES = 2 << 20
_SCAN_AGAIN_S = 60.0  # on the clock that is made here: every poll looks for rotated files again

log = logging.getLogger("vllm_watch.requests")


def live_records(
    path: Path,
    since: Sequence[Position] | None,
    fields: FieldMap,
    window: RecentRequests,
    totals: LogTotals,
    rotated: str | None = None,
) -> Iterator[list[RequestRecord]]:
    """Yield the records of a log after its positions, oldest file first; with no positions all of it, rotated
    files included; None leaves rotated files out.

    A last line without newline counts where no shipper waits for its end. window: requests that count as read. totals:
    receives bad lines, faults and repeats. Raises OSError."""
    tail = Tail(path, since, rotated=rotated)
    reader = LogReader(tail, fields, totals, window, log)
    clock_s, more = 0.0, True
    try:
        while more or tail.busy:
            records, more = reader.poll(clock_s, _BATCH_BYTES)
            clock_s += _SCAN_AGAIN_S
            if not more and not tail.busy and since == ():
                records += reader.finish()
            window.added.clear()
            if records:
                yield records
    finally:
        tail.close()
