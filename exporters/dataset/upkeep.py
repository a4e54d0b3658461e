"""Upkeep of a writer's segments: merge small ones, delete what was replaced, and what is older than the retention.

Invariant: a manifest lists a merged segment only after its rows and sums were found equal to those of the segments that
it replaces, and the store returned its bytes. Segments are deleted only after no manifest lists them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date, timedelta

from msgspec.structs import replace

from exporters.dataset import layout
from exporters.dataset.catalog import local_copy
from exporters.dataset.layout import UNDATED, BadDataset, LogSegment, Manifest, day_of
from exporters.dataset.parquet import SegmentFile, SegmentMaker, SegmentTooLarge, SumsDiffer
from exporters.dataset.ship_config import ShipConfig
from exporters.dataset.ship_state import ShipState
from exporters.dataset.writer import DatasetWriter

MERGE_FROM = 8  # small segments of one day and model; two once the day is over
MERGE_AT_MOST = 64  # segments in one merge, and rows, which bound its memory and time
MERGE_ROWS = 1_000_000

log = logging.getLogger("vllm_watch.ship")


class Upkeep:
    """Upkeep of the days that this writer changed, and of the two newest after a restart. clock: unix seconds."""

    def __init__(
        self,
        config: ShipConfig,
        writer: DatasetWriter,
        state: ShipState,
        maker: SegmentMaker,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._writer, self._state, self._maker, self._clock = config, writer, state, maker, clock
        self.days = {day_of(clock()), day_of(clock() - 86_400), UNDATED}
        self.damaged: set[str] = set()  # keys that cannot be merged

    def step(self) -> bool:
        """Do one piece of work; return False if there is none now. Raises StoreError, BadDataset, OSError."""
        for day in sorted(self.days):
            found = self._writer.update(day, lambda manifest: manifest)
            if chosen := self._to_merge(found):
                self._merge(chosen)
                return True
            if self._delete_replaced(found):
                return True
            if day not in (UNDATED, day_of(self._clock())) and not found.replaced:
                self.days.discard(day)
        return self._retain()

    def _to_merge(self, manifest: Manifest) -> list[LogSegment]:
        """Return small segments of one model that are worth merging, oldest first."""
        small: defaultdict[str, list[LogSegment]] = defaultdict(list)
        for segment in manifest.segments:
            if segment.size < self._config.compact_bytes / 2 and segment.key not in self.damaged:
                small[segment.model].append(segment)
        over = manifest.day < day_of(self._clock() - 3600)  # records of late requests may follow for an hour
        for of_model in small.values():
            chosen = list(_fitting(of_model, self._config.compact_bytes))
            if len(chosen) >= (2 if over else MERGE_FROM):
                return chosen
        return []

    def _merge(self, segments: list[LogSegment]) -> None:
        files = []
        for segment in segments:
            try:
                path = local_copy(self._writer.store, segment, self._maker.spool / "merge")
            except BadDataset as error:
                self.damaged.add(segment.key)
                log.error("%s; it stays as it is", error)
                return
            files.append(SegmentFile(segment, path))
        try:
            made = self._maker.merge(segments[0].day, segments[0].model, files)
        except (SumsDiffer, SegmentTooLarge) as error:
            self.damaged |= {segment.key for segment in segments}
            log.error("%s; they stay as they are: %s", error, ", ".join(segment.key for segment in segments))
            return
        finally:
            self._maker.clear_copies()
        self._state.merge(made.segment, [segment.key for segment in segments])
        self._writer.upload()
        log.info("merged %d segments of %s into %s", len(segments), segments[0].day, made.segment.key)

    def _delete_replaced(self, manifest: Manifest) -> bool:
        """Delete segments whose grace period is over. Return True if there were any."""
        live = {segment.key for segment in manifest.segments}
        over = [one for one in manifest.replaced if one.delete_after <= self._clock()]
        for one in over:
            if one.key not in live:
                self._writer.store.delete(one.key)
        if over:
            self._writer.update(
                manifest.day, lambda now: replace(now, replaced=tuple(one for one in now.replaced if one not in over))
            )
        return bool(over)

    def _retain(self) -> bool:
        """Take the oldest day beyond the retention out of the data set. Return True if there was one.

        First the manifest lists nothing, then the segments are deleted, then the manifest."""
        if self._config.retain_days is None:
            return False
        first = date.fromisoformat(day_of(self._clock())) - timedelta(days=self._config.retain_days)
        for key in self._writer.store.keys(f"{layout.MANIFESTS}/"):
            day = key.split("/")[1].removeprefix("day=")
            own = key == layout.manifest_key(day, self._writer.cluster, self._writer.writer)
            if not own or not layout.is_day(day) or day == UNDATED or date.fromisoformat(day) >= first:
                continue
            emptied = self._writer.update(day, self._emptied)
            if any(one.delete_after > self._clock() for one in emptied.replaced):
                continue
            for one in emptied.replaced:
                self._writer.store.delete(one.key)
            self._writer.store.delete(key)
            self.days.discard(day)
            return True
        return False

    def _emptied(self, manifest: Manifest) -> Manifest:
        gone = self._writer.replaced(segment.key for segment in manifest.segments)
        return replace(manifest, segments=(), replaced=(*manifest.replaced, *gone))


def _fitting(segments: list[LogSegment], size: int) -> Iterator[LogSegment]:
    """Yield the first segments that one merge can take."""
    rows = 0
    for segment in sorted(segments, key=lambda one: (one.min_ts or 0.0, one.key))[:MERGE_AT_MOST]:
        size -= segment.size
        rows += segment.sums.requests
        if size < 0 or rows > MERGE_ROWS:
            return
        yield segment
