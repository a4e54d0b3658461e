"""Request log ingestion: read new records of all logs, and count each once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exporters.accounting.join import Joiner
from exporters.catalogue import sidecar
from exporters.exposition import Sample
from exporters.requests.grouped_latency import GroupedLatency
from exporters.requests.log_reader import LogReader
from exporters.requests.record import FieldMap, RequestRecord, ended_at
from exporters.requests.store import CounterStore
from exporters.requests.tail import Tail
from exporters.scrape import Block, Format
from exporters.tracing.span_queue import SpanQueue

if TYPE_CHECKING:
    from exporters.tracing.genai_metrics import GenAiMetrics

CLOCKS_DIFFER_S = 1.0
BATCH_BYTES = 2 << 20  # lines per batch
# with GenAI metrics at 34 us per record, so that a scrape waits 15 ms, not 120
METERED_BATCH_BYTES = 1 << 18

log = logging.getLogger("vllm_watch.sidecar")


@dataclass(slots=True)
class LogIngest:
    """All request logs of this sidecar and the consumers of their records."""

    tails: list[Tail]
    ledger: CounterStore
    fields: FieldMap
    accounts: Joiner
    grouped: GroupedLatency
    spans: SpanQueue | None = None
    genai_metrics: GenAiMetrics | None = None
    lag_s: dict[str, float] = field(default_factory=dict)
    caught_up: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    _readers: dict[str, LogReader] = field(default_factory=dict)
    # end positions of logs that are read to their end
    _left_bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        logged = set[str]()
        for tail in self.tails:
            self._readers[str(tail.path)] = LogReader(
                tail, self.fields, self.ledger.tallies, self.ledger.window, log, logged
            )

    def poll(self, tail: Tail, now_s: float, clock_s: float) -> bool:
        """Read and count new lines of one log. Return True to read on at once.

        now_s: unix seconds, clock_s: monotonic."""
        path = str(tail.path)
        self._left_bytes.pop(path, None)
        self.failing.add(path)
        records, any_read = self._readers[path].poll(
            clock_s, METERED_BATCH_BYTES if self.genai_metrics else BATCH_BYTES
        )
        self.failing.discard(path)
        if records:
            self._count(tail, records, now_s)
        if any_read or tail.busy:
            return True
        self.caught_up.add(path)
        self._left_bytes[path] = tail.unread_bytes()
        return False

    def begin_commit(self) -> Callable[[], None] | None:
        """Begin a commit, like `CounterStore.begin`, with the positions up to which the logs were counted.

        An unreadable log does not keep others from being complete. A log that was never opened has no position,
        which differs from nothing read."""
        self.ledger.tallies.complete |= len(self.caught_up | self.failing) == len(self.tails)
        found = {str(tail.path): tail.positions() for tail in self.tails}
        return self.ledger.begin(
            {path: positions for path, positions in found.items() if positions or path not in self.failing}
        )

    @property
    def at_end(self) -> bool:
        """Return True if all logs are read to their end. An incomplete last line is beyond the end."""
        return all(self._left_bytes.get(str(tail.path)) == tail.unread_bytes() for tail in self.tails)

    def _count(self, tail: Tail, fresh: Sequence[RequestRecord], now_s: float) -> None:
        tallies = self.ledger.tallies
        self.ledger.count(fresh)
        tallies.untimed += sum(record.ts is None for record in fresh)
        if self.spans:
            for record in fresh:
                self.spans.add(record)
        if self.genai_metrics:
            self.genai_metrics.add_all(fresh)
        self.grouped.add_all(fresh)
        self.accounts.on_requests(fresh, now_s)
        ended = ended_at(fresh[-1])
        lag_s = 0.0 if ended is None else now_s - ended
        tallies.ahead += lag_s < -CLOCKS_DIFFER_S
        self.lag_s[str(tail.path)] = max(0.0, lag_s)

    @property
    def shown(self) -> bool:
        """Return True once every log was read to its end, so that counts may be exposed.

        An earlier scrape would make later counts look like new traffic."""
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
