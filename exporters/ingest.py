"""Request logs on their way into the books: followed, decoded, counted once, with what was wrong on the way beside it.

Law: a line that is no record costs no other, is counted by its reason, and is never quoted: it may hold a prompt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exporters.accounting.join import Joiner
from exporters.catalogue import sidecar
from exporters.exposition import Sample
from exporters.requests import tail as tail_module
from exporters.requests.record import BadLine, FieldMap, RequestRecord, ended_at, parse_block
from exporters.requests.store import CounterStore
from exporters.requests.tail import Tail
from exporters.scrape import Block, Format
from exporters.tracing.span_queue import SpanQueue

if TYPE_CHECKING:
    from exporters.tracing.genai_metrics import GenAiMetrics

TOLD_AT_MOST = 50
CLOCKS_DIFFER_S = 1.0
BATCH_BYTES = 2 << 20  # lines are counted by the thousand where there are as many
# with GenAI metrics, which take 34 us for each record: a scrape waits for 15 ms of them, not 120
METERED_BATCH_BYTES = 1 << 18
BAD_LINES = ("json", "type", "range", "size", "torn")

log = logging.getLogger("vllm_watch.sidecar")


@dataclass(slots=True)
class LogIngest:
    """All request logs of this sidecar, and what is done with their lines."""

    tails: list[Tail]
    ledger: CounterStore
    fields: FieldMap
    accounts: Joiner
    spans: SpanQueue | None = None
    genai_metrics: GenAiMetrics | None = None
    lag_s: dict[str, float] = field(default_factory=dict)
    caught_up: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    # behind the last line, of logs that were read to their end just now
    _left_bytes: dict[str, int] = field(default_factory=dict)
    _faults: dict[str, Counter[str]] = field(default_factory=dict)
    _rotations: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        tallies = self.ledger.tallies
        for why in (*BAD_LINES, "long"):
            tallies.bad.setdefault(why, 0)
        for path in (str(tail.path) for tail in self.tails):
            tallies.rotations.setdefault(path, 0)
            for why in tail_module.REASONS:
                tallies.faults.setdefault(path, {}).setdefault(why, 0)

    def poll(self, tail: Tail, now_s: float, clock_s: float) -> bool:
        """Read and count what is new in one log. Return whether to read on at once. now_s: unix seconds, clock_s:
        monotonic."""
        path = str(tail.path)
        self._left_bytes.pop(path, None)
        self.failing.add(path)
        blocks = tail.poll(clock_s, METERED_BATCH_BYTES if self.genai_metrics else BATCH_BYTES)
        self.failing.discard(path)
        records: list[RequestRecord] = []
        for block in blocks:
            found, bad = parse_block(block, self.fields)
            records += found
            for line, error in bad:
                self._refuse(tail, line, error)
        if fresh := self.ledger.count(records):
            self._count(tail, fresh, now_s)
        self._note(tail)
        if blocks or tail.busy:
            return True
        self.caught_up.add(path)
        self._left_bytes[path] = tail.unread_bytes()
        return False

    def begin_commit(self) -> Callable[[], None] | None:
        """As `Ledger.begin`, with how far the logs were counted. One that cannot be read keeps no other from being
        complete; and as long as it could not even be looked at, nothing is known of it, which is not the same as
        nothing read."""
        self.ledger.tallies.complete |= len(self.caught_up | self.failing) == len(self.tails)
        found = {str(tail.path): tail.positions() for tail in self.tails}
        return self.ledger.begin(
            {path: positions for path, positions in found.items() if positions or path not in self.failing}
        )

    @property
    def at_end(self) -> bool:
        """Whether all logs were read to their end just now. Half a line, whose writer may be dead, is behind the
        end."""
        return all(self._left_bytes.get(str(tail.path)) == tail.unread_bytes() for tail in self.tails)

    def _count(self, tail: Tail, fresh: Sequence[RequestRecord], now_s: float) -> None:
        tallies = self.ledger.tallies
        tallies.untimed += sum(record.ts is None for record in fresh)
        if self.spans:
            for record in fresh:
                self.spans.add(record)
        if self.genai_metrics:
            self.genai_metrics.add_all(fresh)
        self.accounts.ran(fresh, now_s)
        ended = ended_at(fresh[-1])
        lag_s = 0.0 if ended is None else now_s - ended
        tallies.ahead += lag_s < -CLOCKS_DIFFER_S
        self.lag_s[str(tail.path)] = max(0.0, lag_s)

    def _refuse(self, tail: Tail, line: bytes, error: BadLine) -> None:
        self.ledger.tallies.bad[error.reason] += 1
        # each fault once; never the line, which may hold a prompt
        if str(error) not in self.told and len(self.told) < TOLD_AT_MOST:
            self.told.add(str(error))
            log.warning(
                "%s: a line of %d bytes is no request record (%s): %s", tail.path, len(line), error.reason, error
            )

    def _note(self, tail: Tail) -> None:
        """Add what happened to the file since the last look to what happened before a restart."""
        path, tallies = str(tail.path), self.ledger.tallies
        if tail.faults != (before := self._faults.setdefault(path, Counter())):
            for why, more in (tail.faults - before).items():
                tallies.faults[path][why] += more
                tallies.bad["long"] += more if why == "long" else 0
            self._faults[path] = Counter(tail.faults)
        tallies.rotations[path] += tail.rotations - self._rotations[path]
        self._rotations[path] = tail.rotations

    @property
    def shown(self) -> bool:
        """Whether the counts may be shown: once every log was read to its end. A scrape before that would take what
        follows for new traffic."""
        return self.ledger.complete

    def samples(self) -> Iterator[Sample]:
        for tail in self.tails:
            labels = {"path": str(tail.path)}
            yield sidecar.LOG_BYTES_BEHIND, labels, tail.unread_bytes()
            if (lag := self.lag_s.get(str(tail.path))) is not None:
                yield sidecar.LOG_LAG, labels, lag
        yield from self.ledger.health()
        if self.shown:
            yield from self.ledger.samples()

    def blocks(self, into: Format) -> Iterator[Block]:
        if self.shown:
            yield from self.ledger.blocks(into)
