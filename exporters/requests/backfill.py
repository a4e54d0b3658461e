"""Backfill of old request logs as past series: counted as in the sidecar, one sample per series and step.

Invariant: a request is counted in the step in which it ended; a line that comes after its step was written is
counted in the next one and reported. A counter starts with a 0 one step earlier, so that its increase over the whole
time is complete."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from exporters import exposition
from exporters.catalogue import sidecar
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution
from exporters.requests.counter_rows import CounterRow, read_row, row_samples
from exporters.requests.counters import Change, RequestCounters
from exporters.requests.duplicates import RecentRequests
from exporters.requests.read import ReadReport, RecordReader, read_records
from exporters.requests.record import FieldMap, RequestRecord, ended_at, timestamp

FILL_S = 86_400  # an unchanged series is repeated for this long; a gap of years is a wrong clock


@dataclass(slots=True)
class BackfillResult:
    """Result of a backfill. first_s, last_s: end of the first and last request, unix seconds."""

    requests: int = 0
    untimed: int = 0
    late: int = 0
    report: ReadReport = field(default_factory=ReadReport)
    first_s: float | None = None
    last_s: float | None = None
    samples: int = 0


def run(
    files: Iterable[Path],
    out: IO[str],
    traffic: RequestCounters,
    fields: FieldMap,
    window: RecentRequests,
    step_s: int = 60,
    labels: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
    read: RecordReader | None = None,
) -> BackfillResult:
    """Write the series of these files as OpenMetrics for `promtool tsdb create-blocks-from openmetrics`.

    labels: added to every series, such as the job that scraped the sidecar. progress: called with the number of
    bytes read. read: source instead of the files, in the order of ends. Raises OSError, with the file's name, for an
    unreadable file."""
    result = BackfillResult()
    with tempfile.TemporaryFile() as spool:
        history = _History(spool)
        step: int | None = None
        batch: list[RequestRecord] = []

        def close(step: int) -> None:
            result.requests += len(batch)
            traffic.add_all(batch)
            batch.clear()
            history.keep(step, traffic.changed())

        files_read = (partial(read_records, [path], fields=fields, progress=progress, window=window) for path in files)
        streams = [_timed(one(result.report), result) for one in ((read,) if read else files_read)]
        for ended_s, record in heapq.merge(*streams, key=lambda pair: pair[0]):
            result.first_s = ended_s if result.first_s is None else result.first_s
            result.last_s = max(ended_s, result.last_s or ended_s)
            now = int(ended_s // step_s)
            if step is not None and now > step:
                close(step)
            result.late += step is not None and now < step
            step = now if step is None else max(step, now)
            batch.append(record)
        if step is not None:
            close(step)
            result.samples = history.write(out, step, step_s, labels or {})
        out.write("# EOF\n")
    return result


class _History:
    """State of each row at the end of each step in which it changed; on disk, because it may exceed memory."""

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool
        self._places: dict[tuple[str, str], list[tuple[int, int, int]]] = {}  # step, offset and length per state

    def keep(self, step: int, rows: Mapping[tuple[str, str], Change]) -> None:
        for key, (stored, _) in rows.items():
            self._places.setdefault(key, []).append((step, self._spool.tell(), len(stored)))
            self._spool.write(stored)

    def write(self, out: IO[str], last: int, step_s: int, labels: Mapping[str, str]) -> int:
        """Write all series until the step `last`, sorted by family, series and time. Return the number of samples."""
        count = 0
        for metric in sidecar.REQUEST_TRAFFIC:
            headed = False
            for places in self._places.values():
                series: dict[tuple[str, ...], list[str]] = {}
                for (step, row), until in zip(self._rows(places), (*(p[0] for p in places[1:]), last + 1), strict=True):
                    for sample in row_samples(row):
                        if sample[0] is metric:
                            every = {**sample[1], **labels}
                            lines = series.setdefault(tuple(every.values()), [])
                            if not lines:
                                lines.append(_lines(metric, every, _nothing(sample[2]), step * step_s))
                            text = _lines(metric, every, sample[2])
                            lines += [
                                text.replace("\n", f" {(at + 1) * step_s}\n")
                                for at in range(step, min(until, step + FILL_S // step_s))
                            ]
                if series and not headed:
                    out.write(exposition.head(metric, openmetrics=True))
                    headed = True
                for lines in series.values():
                    count += sum(text.count("\n") for text in lines)
                    out.writelines(lines)
        return count

    def _rows(self, places: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, CounterRow]]:
        for step, offset, length in places:
            self._spool.seek(offset)
            yield step, read_row(self._spool.read(length))


def _lines(metric: Metric, labels: Mapping[str, str], value: float | Distribution, at_s: int | None = None) -> str:
    _, text = exposition.block([(metric, labels, value)])[metric.name]
    return text if at_s is None else text.replace("\n", f" {at_s}\n")


def _nothing(value: float | Distribution) -> float | Distribution:
    """Return the value before the first count."""
    return Distribution(value.bounds, [0] * len(value.counts), 0.0) if isinstance(value, Distribution) else 0.0


def _timed(records: Iterable[RequestRecord], result: BackfillResult) -> Iterator[tuple[float, RequestRecord]]:
    """Yield records with their end times, in the same order."""
    for record in records:
        ended_s = ended_at(record)
        if ended_s is None:
            result.untimed += 1
        else:
            yield ended_s, record


def summary(result: BackfillResult, out: Path) -> str:
    """Return the result as text."""
    if result.first_s is None or result.last_s is None:
        lines = [f"no request with a time found; {out} has no series"]
    else:
        lines = [
            (
                f"{result.requests} requests from {timestamp(result.first_s)} to {timestamp(result.last_s)},"
                f" {result.samples} samples in {out}"
            )
        ]
    lines += [f"  {result.untimed} lines without ts skipped, because their time is unknown"] if result.untimed else []
    lines += (
        [f"  {result.late} late lines counted in a later step; pass files that overlap in time in one call"]
        if result.late
        else []
    )
    lines += [f"  {note}" for note in result.report.notes]
    return "\n".join(lines)
