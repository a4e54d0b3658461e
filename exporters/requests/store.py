"""Store of the sidecar's counters, read positions and counted request ids, with durable commits.

Invariant: only committed counts are exposed. A count that was exposed and then lost in a crash would be counted again
after the restart, and Prometheus would take the lower value as a reset and add it once more. So counting goes on in
memory, `commit` stores it together with the read positions, and the exposition is made of the last successful commit.

Invariant: a request is counted once. Its request_id and span_id are remembered within the window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from exporters import scrape
from exporters.catalogue import sidecar
from exporters.exposition import Sample
from exporters.fine_ladder import refine
from exporters.native_histogram import BucketCounts
from exporters.requests.checkpoint import Checkpoint
from exporters.requests.counter_rows import read_row, row_samples
from exporters.requests.counters import Change, RequestCounters
from exporters.requests.duplicates import RecentRequests
from exporters.requests.positions import Position
from exporters.requests.record import RequestRecord
from exporters.scrape import Block, Format


class LogTotals(msgspec.Struct, array_like=True):
    """Counters over all logs."""

    lines: int = 0
    untimed: int = 0
    ahead: int = 0
    repeated: int = 0  # of all logs, by an earlier release
    teams_overflow: int = 0
    models_overflow: int = 0
    bad: dict[str, int] = {}
    faults: dict[str, dict[str, int]] = {}  # by path, by reason
    rotations: dict[str, int] = {}
    complete: bool = False  # True once every log was read to its end
    repeats: dict[str, int] = {}  # by path


class Snapshot(msgspec.Struct, array_like=True):
    """One commit. A whole one holds every row and all remembered requests; any other the changes since the last frame.

    native: in a whole frame the native buckets of each row, by key. observed: in any other the observations of each
    row since the last frame, as native_histogram encodes them."""

    rows: list[bytes]
    requests: list[bytes]
    tallies: LogTotals
    positions: dict[str, tuple[Position, ...]]
    accounts: dict[str, bytes]  # state that must match the counts: reconciliation, attribution
    complete: bool = False
    native: list[dict[int, int]] = []
    observed: list[bytes] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)

Key = tuple[str, str]


@dataclass(slots=True)
class _Shown:
    """Content of the last commit, and its serialised form."""

    rows: dict[Key, bytes] = field(default_factory=dict)
    native: dict[Key, BucketCounts] = field(default_factory=dict)
    tallies: LogTotals = field(default_factory=LogTotals)
    accounts: dict[str, bytes] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    blocks: dict[tuple[Key, Format], tuple[bytes, Block]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class StateProvider:
    """State and series committed together with the log's counters.

    revision: changes whenever the state may have changed, which avoids encoding it many times a second."""

    name: str
    revision: Callable[[], int]
    state: Callable[[], bytes]
    samples: Callable[[], Iterable[Sample]]


class CounterStore:
    """Counts records, commits them, and exposes committed values.

    checkpoint None: nothing is stored, and every commit succeeds. fine: expose histograms with fine buckets."""

    def __init__(
        self,
        traffic: RequestCounters,
        window: RecentRequests | None = None,
        checkpoint: Checkpoint | None = None,
        fine: bool = False,
    ) -> None:
        self.traffic = traffic
        self.window = window or RecentRequests()
        self.tallies = LogTotals()
        self.accounts: list[StateProvider] = []
        self.positions: dict[str, tuple[Position, ...]] = {}  # last known position of each log
        self.commits = 0
        self.up = True
        self._checkpoint = checkpoint
        self._fine = fine
        self._shown = _Shown()
        self._rows: dict[Key, Change] = {}  # changed, not committed
        self._unsafe: dict[Key, BucketCounts] = {}  # observations of failed commits
        self._last_frame: Snapshot | None = None
        self._revisions: dict[str, int] = {}

    def restore(self, frames: Sequence[bytes]) -> dict[str, bytes]:
        """Continue from stored frames; return the state of each provider. Raises msgspec.MsgspecError.

        The error means a state of another release."""
        accounts: dict[str, bytes] = {}
        rows: dict[Key, bytes] = {}
        native: dict[Key, BucketCounts] = {}
        for data in frames:
            frame = _decoder.decode(data)
            for at, stored in enumerate(frame.rows):
                row = read_row(stored)
                rows[row.model, row.team] = stored
                before = native.setdefault((row.model, row.team), BucketCounts())
                if frame.observed:  # both are empty in a state from before native histograms
                    before.add(frame.observed[at])
                elif frame.native:
                    native[row.model, row.team] = BucketCounts(frame.native[at])
            self.window.restore(frame.requests)
            self.tallies, self.positions = frame.tallies, frame.positions
            accounts |= frame.accounts
        rows = {key: self.traffic.restore(stored, native[key]) for key, stored in rows.items()}
        self.traffic.teams.folded, self.traffic.models.folded = (
            self.tallies.teams_overflow,
            self.tallies.models_overflow,
        )
        self._shown.rows, self._shown.native, self._shown.accounts, self._shown.tallies = (
            rows,
            native,
            accounts,
            _copy(self.tallies),
        )
        return accounts

    def count(self, fresh: Sequence[RequestRecord]) -> None:
        """Count records of requests that no earlier line had."""
        self.traffic.add_all(fresh)

    def keep(self, accounts: Iterable[StateProvider]) -> None:
        """Store and expose these with the counts. Their restored state is committed, and is exposed."""
        self.accounts += accounts
        self._shown.samples = self._account_samples()

    @property
    def complete(self) -> bool:
        """True if the committed values once included every log to its end."""
        return self._shown.tallies.complete

    @property
    def committed_lines(self) -> int:
        return self._shown.tallies.lines

    def begin(self, positions: Mapping[str, tuple[Position, ...]]) -> Callable[[], None] | None:
        """Return the write of a commit of everything counted, as a call for a thread; None if nothing changed.

        positions: positions up to which the logs were counted. Call `succeeded` or `failed` afterwards."""
        self._rows |= self.traffic.changed()
        self.tallies.teams_overflow, self.tallies.models_overflow = (
            self.traffic.teams.folded,
            self.traffic.models.folded,
        )
        revisions = {account.name: account.revision() for account in self.accounts}
        revised = {
            account.name: account.state()
            for account in self.accounts
            if self._revisions.get(account.name) != revisions[account.name]
        }
        changed = {name: state for name, state in revised.items() if self._shown.accounts.get(name) != state}
        accounts = self._shown.accounts | changed
        tallies = _copy(self.tallies)
        # A log that is no longer read, or cannot be opened now, may return: keep its position.
        self.positions = {**self.positions, **positions}
        stored, observed = ([change[part] for change in self._rows.values()] for part in (0, 1))
        frame = Snapshot(stored, self.window.added, tallies, self.positions, changed, observed=observed)
        before = self._last_frame
        self._revisions = revisions
        if (
            before
            and not frame.rows
            and not frame.requests
            and not changed
            and (tallies, frame.positions) == (before.tallies, before.positions)
        ):
            return None
        self._last_frame = Snapshot([], [], tallies, frame.positions, accounts)
        samples = self._account_samples() if changed else self._shown.samples
        self._next = (self._rows, tallies, accounts, samples)
        self.window.added, self._rows = [], {}
        if (checkpoint := self._checkpoint) is None:
            return lambda: None
        if before is None or checkpoint.needs_rewrite:
            rows = self._shown.rows | {key: stored for key, (stored, _) in self._next[0].items()}
            native = [self._native(key, self._next[0].get(key, (b"", b""))[1]) for key in rows]
            requests = [*self.window.older, *self.window.newer]
            data = _encoder.encode(
                Snapshot(list(rows.values()), requests, tallies, frame.positions, accounts, True, native)
            )
            return lambda: checkpoint.rewrite(data)
        data = _encoder.encode(frame)
        return lambda: checkpoint.append(data)

    def succeeded(self) -> None:
        """Mark the commit as stored and expose it."""
        rows, tallies, accounts, samples = self._next
        shown = self._shown
        for key, (stored, observed) in rows.items():
            shown.rows[key] = stored
            if (native := shown.native.get(key)) is None:
                native = shown.native[key] = BucketCounts()
            native.add(observed)
        for key, before in self._unsafe.items():
            shown.native[key].counts.update(before.counts)
        self._unsafe.clear()
        shown.tallies, shown.accounts, shown.samples = tallies, accounts, samples
        self.commits += 1
        self.up = True

    def failed(self) -> None:
        """Mark the commit as failed; its content is part of the next commit, which writes everything."""
        for key, (stored, observed) in self._next[0].items():
            self._unsafe.setdefault(key, BucketCounts()).add(observed)
            self._rows.setdefault(key, (stored, b""))
        self._last_frame, self._revisions = None, {}
        self.up = False

    def _native(self, key: Key, observed: bytes) -> dict[int, int]:
        """Return the native buckets of a row: committed ones, those of failed commits, and `observed`."""
        native = BucketCounts()
        for known in (self._shown.native.get(key), self._unsafe.get(key)):
            native.counts.update(known.counts if known else {})
        native.add(observed)
        return dict(native.counts)

    def commit(self, positions: Mapping[str, tuple[Position, ...]]) -> None:
        """Begin, write and finish a commit. Raises OSError."""
        if (write := self.begin(positions)) is None:
            return
        try:
            write()
        except BaseException:
            self.failed()
            raise
        self.succeeded()

    def _account_samples(self) -> tuple[Sample, ...]:
        return tuple(sample for account in self.accounts for sample in account.samples())

    def health(self) -> Iterator[Sample]:
        """Yield the state of the checkpoint, also while no counts may be exposed."""
        if self._checkpoint:
            yield sidecar.CHECKPOINT_UP, {}, float(self.up)
            yield sidecar.CHECKPOINT_BYTES, {}, self._checkpoint.bytes
            yield sidecar.CHECKPOINT_COMMITS, {}, self.commits

    def samples(self) -> Iterator[Sample]:
        """Yield committed values, except the rows."""
        totals = self._shown.tallies
        yield sidecar.LOG_LINES, {}, totals.lines
        yield sidecar.LOG_UNTIMED, {}, totals.untimed
        yield sidecar.LOG_AHEAD, {}, totals.ahead
        yield from ((sidecar.LOG_DUPLICATES, {"path": path}, count) for path, count in totals.repeats.items())
        yield from ((sidecar.LOG_BAD_LINES, {"reason": why}, count) for why, count in totals.bad.items())
        for path, faults in totals.faults.items():
            yield from ((sidecar.LOG_FAULTS, {"path": path, "reason": why}, count) for why, count in faults.items())
        yield from ((sidecar.LOG_ROTATIONS, {"path": path}, count) for path, count in totals.rotations.items())
        yield sidecar.TEAMS, {}, len(self.traffic.teams)
        yield sidecar.TEAMS_OVERFLOW, {}, totals.teams_overflow
        yield sidecar.MODELS_OVERFLOW, {}, totals.models_overflow
        yield from self._shown.samples

    def blocks(self, into: Format) -> Iterator[Block]:
        """Yield the committed rows, serialised. Unchanged rows are not serialised again."""
        kept = self._shown.blocks
        for key, stored in self._shown.rows.items():
            found = kept.get((key, into))
            if found is None or found[0] is not stored:
                exemplars = self.traffic.exemplars(*key) if into is not Format.TEXT else ()
                native = self._shown.native[key] if self._fine or into is Format.PROTOBUF else None
                samples = row_samples(read_row(stored), exemplars, native)
                found = kept[key, into] = stored, scrape.block(refine(samples) if self._fine else samples, into)
            yield found[1]


def _copy(tallies: LogTotals) -> LogTotals:
    faults = {path: dict(reasons) for path, reasons in tallies.faults.items()}
    return msgspec.structs.replace(
        tallies, bad=dict(tallies.bad), faults=faults, rotations=dict(tallies.rotations), repeats=dict(tallies.repeats)
    )
