"""Shipping: request logs become segments of a data set, each record in exactly one.

Invariant: records are read, buffered, sealed into segment files, committed together with the read positions, stored,
and listed in a manifest, in this order. What comes after the commit is repeated until it succeeds; what comes before
is read from the log again after a crash."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from exporters.catalogue import ship as series
from exporters.dataset.catalog import open_store
from exporters.dataset.layout import NULL_PARTITION, LogSegment, model_name, total
from exporters.dataset.objects import ObjectStore, StoreError
from exporters.dataset.parquet import SegmentMaker, SumsDiffer
from exporters.dataset.segment_buffer import SegmentBuffer
from exporters.dataset.ship_config import ShipConfig
from exporters.dataset.ship_state import ShipState
from exporters.dataset.upkeep import Upkeep
from exporters.dataset.writer import DatasetWriter
from exporters.exposition import Sample
from exporters.requests.bounded_names import UNKNOWN_MODEL
from exporters.requests.checkpoint import Checkpoint
from exporters.requests.log_reader import LogReader
from exporters.requests.record import RequestRecord
from exporters.requests.tail import Tail

BATCH_BYTES = 1 << 19  # lines per poll
POLL_S = 0.2
RETRY_S = 5.0  # after a failure of the store or the disk
UPKEEP_S = 60.0

log = logging.getLogger("vllm_watch.ship")


class Shipper:
    """Shipping of some logs. `run` in a thread of its own, or `step` again and again.

    clock: unix seconds; ticks: a monotonic clock. Raises Locked, Unreadable and OSError for its state."""

    def __init__(
        self,
        config: ShipConfig,
        store: ObjectStore | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.config = config
        self._ticks = ticks
        folder = Path(config.state)
        self._checkpoint = checkpoint or Checkpoint(folder / "positions")
        self.state = ShipState(self._checkpoint, config.remember)
        self.state.open()
        spool = folder / "spool"
        spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.buffer = SegmentBuffer()
        self.totals = msgspec.convert(msgspec.to_builtins(self.state.last.totals), type(self.state.last.totals))
        logged = set[str]()
        self.readers = [
            LogReader(
                Tail(Path(path), self.state.last.positions.get(path), rotated=config.rotated.get(path)),
                config.fields,
                self.totals,
                self.state.window,
                log,
                logged,
            )
            for path in config.requests_log
        ]
        self._sealed: list[LogSegment] | None = None  # segment files whose commit failed
        self._oldest_s: float | None = None  # when the buffer got its first record
        self._store_retry_s = self._disk_retry_s = self._upkeep_s = float("-inf")
        self.store_error = self.disk_error = ""
        self._unread: dict[str, int] = {}
        self._begun = set(self.state.last.positions)
        self._log_error = ""
        with contextlib.suppress(OSError):  # the first step reports it
            self._begin(ticks())  # also before a store that cannot be opened yet
        self._maker = SegmentMaker(spool, config.cluster, config.writer)
        self.writer = DatasetWriter(
            store or open_store(config.dataset, config.s3),
            self.state,
            spool,
            config.cluster,
            config.writer,
            clock,
            config.grace_s,
        )
        self.writer.clean_spool()
        self._maker.clear_copies()
        self._upkeep = Upkeep(config, self.writer, self.state, self._maker, clock)

    def claim(self) -> None:
        """Claim the writer's name. Raises WriterConflict, StoreError, BadDataset."""
        self.writer.claim()

    def run(self, stop: threading.Event) -> None:
        """Ship until `stop` is set, then seal and store what was read. Raises BadDataset, as WriterConflict."""
        while not stop.is_set():
            if not self.step():
                stop.wait(POLL_S)
        self.step(last=True)

    def step(self, last: bool = False) -> bool:
        """Claim the name, read, seal and store as needed. Return True if there is more to do at once.

        A store that does not answer delays storing alone. last: seal everything that was read. Raises BadDataset where
        another attempt would change nothing."""
        now_s = self._ticks()
        more = False
        if not self.writer.claimed and (now_s >= self._store_retry_s or last):
            self._on_store(self.claim)
        if now_s >= self._disk_retry_s or last:
            try:
                more = self._read(now_s)
                if self._is_due(now_s) or last:
                    self.seal()
                if self._log_error:
                    self._failed("disk", OSError(self._log_error))
                self.disk_error = self._log_error
            except (OSError, SumsDiffer) as error:
                self._failed("disk", error)
                if self._sealed is None:
                    self.writer.clean_spool()
                self._disk_retry_s = now_s + RETRY_S
                more = False
        if self.writer.claimed and (now_s >= self._store_retry_s or last):
            more |= self._on_store(lambda: self._store(now_s, last)) or False
        return more

    def seal(self) -> None:
        """Make segments of the buffer and commit them with the read positions. Raises OSError."""
        if self._sealed is None:
            files = self._maker.seal(self.buffer) if self.buffer.bytes else []
            self._maker.sync([file.path for file in files])
            self._sealed = [file.segment for file in files]
        totals = msgspec.convert(msgspec.to_builtins(self.totals), type(self.totals))
        found = {reader.path: reader.tail.positions() for reader in self.readers if reader.path in self._begun}
        self.state.seal(totals, found, self._sealed)
        self._sealed, self._oldest_s = None, None
        self.buffer.clear()

    @property
    def spool_bytes(self) -> int:
        """Return the size of the committed segments that wait for the store."""
        return sum(one.segment.size for one in self.state.last.pending)

    def samples(self) -> Iterator[Sample]:
        """Yield its series. Counters are those of the last commit, so they never fall."""
        last = self.state.last
        for partition, sums in last.sealed.items():
            model = UNKNOWN_MODEL if partition == NULL_PARTITION else model_name(partition) or UNKNOWN_MODEL
            yield series.SHIPPED_REQUESTS, {"model_name": model}, sums.requests
            tokens = (sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)
            for kind, value in zip(("prompt", "cached", "completion"), tokens, strict=True):
                yield series.SHIPPED_TOKENS, {"model_name": model, "type": kind}, value
        yield series.SHIP_UNSEALED, {}, self.buffer.sums.requests
        yield series.SHIP_WAITING, {}, self.spool_bytes
        for reader in self.readers:
            yield series.SHIP_UNREAD, {"path": reader.path}, self._unread.get(reader.path, 0)
        yield series.SHIP_UP, {"kind": "store"}, float(self.writer.claimed and not self.store_error)
        yield series.SHIP_UP, {"kind": "disk"}, float(not self.disk_error)
        for reason, count in last.totals.bad.items():
            yield series.SHIP_BAD_LINES, {"reason": reason}, count
        for path, count in last.totals.repeats.items():
            yield series.SHIP_DUPLICATES, {"path": path}, count

    def close(self) -> None:
        for reader in self.readers:
            reader.tail.close()
        self.state.close()

    def _read(self, now_s: float) -> bool:
        """Read a batch of each log into the buffer. Return True if a log may have more. Raises OSError of the disk.

        A log that cannot be read does not stop the others."""
        more, self._log_error = False, ""
        self._begin(now_s)
        if self._sealed is not None or self.buffer.is_full(self.config.seal_bytes):
            return False  # sealing failed
        if self.spool_bytes >= self.config.spool_bytes:
            return False
        for reader in self.readers:
            if reader.path not in self._begun or (found := self._poll(reader, now_s, BATCH_BYTES)) is None:
                continue
            records, any_read = found
            self._unread[reader.path] = reader.tail.unread_bytes()
            more |= any_read or reader.tail.busy
            if any_read and self._oldest_s is None:
                self._oldest_s = now_s
            self.buffer.add(records)
        return more

    def _poll(self, reader: LogReader, now_s: float, budget_bytes: int) -> tuple[list[RequestRecord], bool] | None:
        """Return new records, and True if there was anything to read; None if the log cannot be read."""
        try:
            return reader.poll(now_s, budget_bytes)
        except OSError as error:
            self._log_error = f"{reader.path} cannot be read: {error.strerror or error}"
            return None

    def _begin(self, now_s: float) -> None:
        """Commit where reading of new logs begins, so that nothing that happens before the first sealing changes it."""
        for reader in self.readers:
            # finds the files and reads nothing
            if reader.path not in self._begun and self._poll(reader, now_s, 0) is not None:
                self.state.seal(self.state.last.totals, {reader.path: reader.tail.positions()}, ())
                self._begun.add(reader.path)

    def _is_due(self, now_s: float) -> bool:
        return (
            self._sealed is not None
            or self.buffer.is_full(self.config.seal_bytes)
            or (self._oldest_s is not None and now_s - self._oldest_s >= self.config.seal_s)
        )

    def _store(self, now_s: float, last: bool) -> bool:
        """Store what is committed, and do one piece of upkeep. Return True if there may be more."""
        for manifest in self.writer.upload():
            self._upkeep.days.add(manifest.day)
        worked = False
        if now_s >= self._upkeep_s and not last:
            worked = self._upkeep.step()
            self._upkeep_s = now_s if worked else now_s + UPKEEP_S
        return worked

    def _on_store(self, act: Callable[[], bool | None]) -> bool | None:
        """Do what needs the store and return its answer; None if it fails, to be tried again. Raises BadDataset."""
        try:
            answer = act()
        except OSError as error:
            self._failed("store", error)
            self._store_retry_s = self._ticks() + RETRY_S  # logs are read meanwhile, however long the attempt took
            return None
        self.store_error = ""
        return answer

    def _failed(self, what: str, error: Exception) -> None:
        """Note a failure that is retried; log it when it is new."""
        if (self.store_error if what == "store" else self.disk_error) != str(error):
            log.warning("%s; retrying in %g s", error, RETRY_S)
        if what == "store":
            self.store_error = str(error)
        else:
            self.disk_error = str(error)


def ship_once(config: ShipConfig) -> int:
    """Ship what the logs hold now; return the number of requests. Raises BadDataset, OSError."""
    shipper = Shipper(config)
    try:
        before = total(shipper.state.last.sealed.values()).requests
        while shipper.step():
            pass
        shipper.step(last=True)
        if error := shipper.disk_error or shipper.store_error:
            raise StoreError(error)
        return total(shipper.state.last.sealed.values()).requests - before
    finally:
        shipper.close()
