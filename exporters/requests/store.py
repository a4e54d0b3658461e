"""The books of the sidecar: what was counted from the logs, which requests those were, and how much of it is safe on
disk.

Law: only what is safe is shown. A count that was shown and then lost in a crash would come again after the restart, and
Prometheus would take the lower count for a reset and add everything once more. So counting goes on in memory, `commit`
makes it safe together with the places up to which the logs were read, and the page is made of what the last commit that
succeeded held.
Law: a request is counted once. Its request_id and span_id are remembered for as long as the window holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from exporters import scrape
from exporters.catalogue import sidecar
from exporters.exposition import Sample
from exporters.fine_ladder import refine
from exporters.native_histogram import BucketCounts
from exporters.requests.checkpoint import Checkpoint
from exporters.requests.counter_rows import read_row, row_samples
from exporters.requests.counters import Change, RequestCounters
from exporters.requests.positions import Position
from exporters.requests.record import RequestRecord
from exporters.scrape import Block, Format

WINDOW = 200_000  # requests that are remembered at most; half as many at least
OUR_CHARS = 48  # of a request_id and a span_id of our gateway, both hexadecimal
KEY_CHARS = 200  # an id may be what a client sent: of a longer one a digest is remembered


class RecentRequests:
    """Requests that were counted lately. Two generations: when the newer one is full, the older one is forgotten."""

    def __init__(self, limit: int = WINDOW) -> None:
        self._half = max(1, limit // 2)
        self.older: set[bytes] = set()
        self.newer: set[bytes] = set()
        self.added: list[bytes] = []  # since the last commit, in the order in which they came

    def __len__(self) -> int:
        return len(self.older) + len(self.newer)

    def fresh(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """Those that were not seen before, remembered from now on."""
        keys = _known([r.request_id if r.span_id is None else r.request_id + r.span_id for r in records])
        unique = set(keys)
        if len(unique) == len(keys) and self.newer.isdisjoint(unique) and self.older.isdisjoint(unique):
            self._add(keys)
            return records
        found = []
        for key, record in zip(keys, records, strict=True):
            if key not in self.newer and key not in self.older:
                self._add((key,))
                found.append(record)
        return found

    def restore(self, keys: Iterable[bytes]) -> None:
        """Remember what was remembered before a restart, in its order."""
        self._add(list(keys))
        self.added.clear()

    def _add(self, keys: Sequence[bytes]) -> None:
        self.added += keys
        while keys:  # a generation is exactly a half: so what is stored without its order becomes the same two again
            room = self._half - len(self.newer)
            self.newer.update(keys[:room])
            keys = keys[room:]
            if len(self.newer) >= self._half:
                self.older, self.newer = self.newer, set()


def _known(ids: Sequence[str]) -> list[bytes]:
    """Ids as they are remembered: those of our gateway as the number they stand for, in half the memory."""
    if ids and set(map(len, ids)) == {OUR_CHARS} and (numbers := _number("".join(ids))) is not None:
        return [numbers[at : at + OUR_CHARS // 2] for at in range(0, len(numbers), OUR_CHARS // 2)]
    return [(_number(one) if len(one) == OUR_CHARS else None) or _kept(one) for one in ids]


def _number(text: str) -> bytes | None:
    """What lower-case hexadecimal digits stand for; None for any other text, since two might stand for one number."""
    with contextlib.suppress(ValueError):
        if (number := bytes.fromhex(text)).hex() == text:
            return number
    return None


def _kept(one: str) -> bytes:
    return one.encode() if len(one) <= KEY_CHARS else blake2b(one.encode(), digest_size=16).hexdigest().encode()


class LogTotals(msgspec.Struct, array_like=True):
    """What is counted of the log as a whole."""

    lines: int = 0
    untimed: int = 0
    ahead: int = 0
    duplicates: int = 0
    teams_overflow: int = 0
    models_overflow: int = 0
    bad: dict[str, int] = {}
    faults: dict[str, dict[str, int]] = {}  # by path, by reason
    rotations: dict[str, int] = {}
    complete: bool = False  # whether every log was read to its end once


class Snapshot(msgspec.Struct, array_like=True):
    """One commit. A whole one holds every row and all requests that are remembered; any other what is new since the
    frame before it.

    native: in a whole frame the native buckets of each row, by key. observed: in any other what was observed of each
    row since the frame before it, as native_histogram has it."""

    rows: list[bytes]
    requests: list[bytes]
    tallies: LogTotals
    positions: dict[str, tuple[Position, ...]]
    accounts: dict[str, bytes]  # what else must be as old as the counts: reconciliation, attribution
    whole: bool = False
    native: list[dict[int, int]] = []
    observed: list[bytes] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)

Key = tuple[str, str]


@dataclass(slots=True)
class _Shown:
    """What the last commit held, and how it looks on a page."""

    rows: dict[Key, bytes] = field(default_factory=dict)
    native: dict[Key, BucketCounts] = field(default_factory=dict)
    tallies: LogTotals = field(default_factory=LogTotals)
    accounts: dict[str, bytes] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    blocks: dict[tuple[Key, Format], tuple[bytes, Block]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class StateProvider:
    """Something else that is counted and shown with the log's counts: its state as bytes, and its series.

    revision: changes whenever the state may have; encoding it for nothing many times a second would be dear."""

    name: str
    revision: Callable[[], int]
    state: Callable[[], bytes]
    samples: Callable[[], Iterable[Sample]]


class CounterStore:
    """Counts records, commits them, and shows what is safe. checkpoint None: nothing outlives the process, and every
    commit succeeds.

    fine: histograms are shown with the fine ladder."""

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
        self.positions: dict[str, tuple[Position, ...]] = {}  # where each log stood when it was last known
        self.commits = 0
        self.up = True
        self._checkpoint = checkpoint
        self._fine = fine
        self._shown = _Shown()
        self._rows: dict[Key, Change] = {}  # changed, and not safe yet
        self._unsafe: dict[Key, BucketCounts] = {}  # observed in commits that failed
        self._told: Snapshot | None = None
        self._revisions: dict[str, int] = {}

    def restore(self, frames: Sequence[bytes]) -> dict[str, bytes]:
        """Go on from what was stored; the state of each account. Raises msgspec.MsgspecError for what is no state of
        this release."""
        accounts: dict[str, bytes] = {}
        rows: dict[Key, bytes] = {}
        native: dict[Key, BucketCounts] = {}
        for data in frames:
            frame = _decoder.decode(data)
            for at, stored in enumerate(frame.rows):
                row = read_row(stored)
                rows[row.model, row.team] = stored
                before = native.setdefault((row.model, row.team), BucketCounts())
                if frame.observed:  # neither is there in a state from before native histograms
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

    def count(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """Count records that were not counted before; they are returned."""
        fresh = self.window.fresh(records)
        self.tallies.duplicates += len(records) - len(fresh)
        self.tallies.lines += len(fresh)
        self.traffic.add_all(fresh)
        return fresh

    def keep(self, accounts: Iterable[StateProvider]) -> None:
        """Store and show these with the counts. What was restored of them is safe, and is shown."""
        self.accounts += accounts
        self._shown.samples = self._account_samples()

    @property
    def complete(self) -> bool:
        """Whether what is safe is all that every log held at some time."""
        return self._shown.tallies.complete

    @property
    def committed_lines(self) -> int:
        return self._shown.tallies.lines

    def begin(self, positions: Mapping[str, tuple[Position, ...]]) -> Callable[[], None] | None:
        """What is to be written for a commit of all that was counted until now, as a call that may run in a thread;
        None: nothing is new.

        positions: up to where each log was counted. Afterwards `succeeded` or `failed` must be called."""
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
        # A log that is not read any more, or cannot be opened just now, may be read again: where it stood stays known.
        self.positions = {**self.positions, **positions}
        stored, observed = ([change[part] for change in self._rows.values()] for part in (0, 1))
        frame = Snapshot(stored, self.window.added, tallies, self.positions, changed, observed=observed)
        before = self._told
        self._revisions = revisions
        if (
            before
            and not frame.rows
            and not frame.requests
            and not changed
            and (tallies, frame.positions) == (before.tallies, before.positions)
        ):
            return None
        self._told = Snapshot([], [], tallies, frame.positions, accounts)
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
        """What was begun is safe: it is what the page shows now."""
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
        """What was begun is not safe; it is part of the next commit, which writes everything."""
        for key, (stored, observed) in self._next[0].items():
            self._unsafe.setdefault(key, BucketCounts()).add(observed)
            self._rows.setdefault(key, (stored, b""))
        self._told, self._revisions = None, {}
        self.up = False

    def _native(self, key: Key, observed: bytes) -> dict[int, int]:
        """Return the native buckets of a row: what is safe, what failed commits held, and what was observed since."""
        native = BucketCounts()
        for known in (self._shown.native.get(key), self._unsafe.get(key)):
            native.counts.update(known.counts if known else {})
        native.add(observed)
        return dict(native.counts)

    def commit(self, positions: Mapping[str, tuple[Position, ...]]) -> None:
        """Begin, write and conclude in one call. Raises OSError."""
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
        """Whether counts are made safe, which is told even while none may be shown."""
        if self._checkpoint:
            yield sidecar.CHECKPOINT_UP, {}, float(self.up)
            yield sidecar.CHECKPOINT_BYTES, {}, self._checkpoint.bytes
            yield sidecar.CHECKPOINT_COMMITS, {}, self.commits

    def samples(self) -> Iterator[Sample]:
        """What is safe, but for the rows."""
        told = self._shown.tallies
        yield sidecar.LOG_LINES, {}, told.lines
        yield sidecar.LOG_UNTIMED, {}, told.untimed
        yield sidecar.LOG_AHEAD, {}, told.ahead
        yield sidecar.LOG_DUPLICATES, {}, told.duplicates
        yield from ((sidecar.LOG_BAD_LINES, {"reason": why}, count) for why, count in told.bad.items())
        for path, faults in told.faults.items():
            yield from ((sidecar.LOG_FAULTS, {"path": path, "reason": why}, count) for why, count in faults.items())
        yield from ((sidecar.LOG_ROTATIONS, {"path": path}, count) for path, count in told.rotations.items())
        yield sidecar.TEAMS, {}, len(self.traffic.teams)
        yield sidecar.TEAMS_OVERFLOW, {}, told.teams_overflow
        yield sidecar.MODELS_OVERFLOW, {}, told.models_overflow
        yield from self._shown.samples

    def blocks(self, into: Format) -> Iterator[Block]:
        """Yield the rows that are safe, serialised. A row that did not change since it was last asked for is not
        serialised again."""
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
    return msgspec.structs.replace(tallies, bad=dict(tallies.bad), faults=faults, rotations=dict(tallies.rotations))
