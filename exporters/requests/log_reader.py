"""Reader of one growing request log: each request once, with invalid lines, repeats and faults of the file counted.

Invariant: an invalid line affects no other line, is counted by reason, and is never quoted because it may hold a
prompt."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from exporters.requests import tail as tail_module
from exporters.requests.duplicates import RecentRequests, mostly_repeats, repeats_note
from exporters.requests.record import BadLine, FieldMap, RequestRecord, parse_block
from exporters.requests.store import LogTotals
from exporters.requests.tail import Tail

LOGGED_AT_MOST = 50
BAD_LINES = ("json", "type", "range", "size", "torn")


@dataclass(slots=True, eq=False)
class LogReader:
    """Reader of the records of one tail. totals: receives counts of lines, repeats, bad lines, faults and rotations.

    window: requests that were read before; readers share it. logged_errors: messages that were logged; readers may
    share them. log: receives the first of each message."""

    tail: Tail
    fields: FieldMap
    totals: LogTotals
    window: RecentRequests
    log: logging.Logger
    logged_errors: set[str] = field(default_factory=set)
    _faults: Counter[str] = field(default_factory=Counter)
    _rotations: int = 0
    _lines: int = 0  # since the start of this process, with _repeats
    _repeats: int = 0

    def __post_init__(self) -> None:
        for why in (*BAD_LINES, "long"):
            self.totals.bad.setdefault(why, 0)
        self.totals.rotations.setdefault(self.path, 0)
        self.totals.repeats.setdefault(self.path, 0)
        for why in tail_module.REASONS:
            self.totals.faults.setdefault(self.path, {}).setdefault(why, 0)

    @property
    def path(self) -> str:
        return str(self.tail.path)

    def poll(self, clock_s: float, budget_bytes: int) -> tuple[list[RequestRecord], bool]:
        """Return records of new requests, and True if there was anything to read. Raises OSError, as Tail.poll does.

        clock_s: a monotonic clock."""
        blocks = self.tail.poll(clock_s, budget_bytes)
        records: list[RequestRecord] = []
        for block in blocks:
            found, bad = parse_block(block, self.fields)
            records += found
            for line, error in bad:
                self._refuse(line, error)
        self._note()
        return self._fresh(records), bool(blocks)

    def finish(self) -> list[RequestRecord]:
        """Return what a last line without newline holds, if its writer has ended. Raises OSError."""
        return self._fresh([one for rest in self.tail.unfinished() for one in parse_block(rest, self.fields)[0]])

    def _fresh(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """Return the records of requests that were not read before."""
        fresh = self.window.fresh(records)
        repeats = len(records) - len(fresh)
        self.totals.lines += len(fresh)
        self.totals.repeats[self.path] += repeats
        warned = mostly_repeats(self._repeats, self._lines)
        self._lines += len(records)
        self._repeats += repeats
        if not warned and mostly_repeats(self._repeats, self._lines):
            self.log.warning("%s: %s", self.path, repeats_note(self._repeats, self._lines))
        return fresh

    def _refuse(self, line: bytes, error: BadLine) -> None:
        self.totals.bad[error.reason] += 1
        # each error once; never the line, which may hold a prompt
        if str(error) not in self.logged_errors and len(self.logged_errors) < LOGGED_AT_MOST:
            self.logged_errors.add(str(error))
            self.log.warning("%s: a line of %d bytes is bad (%s): %s", self.path, len(line), error.reason, error)

    def _note(self) -> None:
        """Add the file's faults since the last call to those of before a restart."""
        if self.tail.faults != self._faults:
            for why, more in (self.tail.faults - self._faults).items():
                self.totals.faults[self.path][why] += more
                self.totals.bad["long"] += more if why == "long" else 0
            self._faults = Counter(self.tail.faults)
        self.totals.rotations[self.path] += self.tail.rotations - self._rotations
        self._rotations = self.tail.rotations
