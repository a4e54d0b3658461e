"""Old request logs as series in the past: the same counting as in the sidecar, one sample of each series at the end of
each step.

Law: what is counted in which step is decided by when a request ended; a line that comes after its step was written is
counted in the next one, and said. A counter begins with a 0 one step earlier, so that growth over the whole time is all
there was."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from exporters import exposition
from exporters.catalogue import sidecar
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution
from exporters.requests.counter_rows import CounterRow, read_row, row_samples
from exporters.requests.counters import Change, RequestCounters
from exporters.requests.read import BadLines, read_records
from exporters.requests.record import FieldMap, RequestRecord, ended_at, timestamp
from exporters.requests.store import RecentRequests

FILL_S = 86_400  # a series without news is repeated for so long; a gap of years is a wrong clock


@dataclass(slots=True)
class BackfillResult:
    """What came of the files. first_s, last_s: when the first and the last request ended, unix seconds."""

    requests: int = 0
    duplicates: int = 0
    untimed: int = 0
    late: int = 0
    bad: BadLines = field(default_factory=BadLines)
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
) -> BackfillResult:
    """Write the series of these files as OpenMetrics, as `promtool tsdb create-blocks-from openmetrics` reads it.

    labels: added to every series, such as the job that scraped the sidecar. progress: told how many bytes of the files
    were read. Raises OSError for a file that cannot be read, naming it."""
    told = BackfillResult()
    with tempfile.TemporaryFile() as spool:
        history = _History(spool)
        step: int | None = None
        batch: list[RequestRecord] = []

        def close(step: int) -> None:
            fresh = window.fresh(batch)
            told.requests += len(fresh)
            told.duplicates += len(batch) - len(fresh)
            traffic.add_all(fresh)
            batch.clear()
            history.keep(step, traffic.changed())

        streams = [_records(path, fields, told, progress) for path in files]
        for ended_s, record in heapq.merge(*streams, key=lambda pair: pair[0]):
            told.first_s = ended_s if told.first_s is None else told.first_s
            told.last_s = max(ended_s, told.last_s or ended_s)
            now = int(ended_s // step_s)
            if step is not None and now > step:
                close(step)
            told.late += step is not None and now < step
            step = now if step is None else max(step, now)
            batch.append(record)
        if step is not None:
            close(step)
            told.samples = history.write(out, step, step_s, labels or {})
        out.write("# EOF\n")
    return told


class _History:
    """How each row was at the end of each step in which it changed; on disk, since a month of many teams is more than
    memory should hold."""

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool
        self._places: dict[tuple[str, str], list[tuple[int, int, int]]] = {}  # step, offset and length of each

    def keep(self, step: int, rows: Mapping[tuple[str, str], Change]) -> None:
        for key, (stored, _) in rows.items():
            self._places.setdefault(key, []).append((step, self._spool.tell(), len(stored)))
            self._spool.write(stored)

    def write(self, out: IO[str], last: int, step_s: int, labels: Mapping[str, str]) -> int:
        """All series until the step `last`, as the format wants them: by family, then by series, then by time. How many
        samples that was."""
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
    """What it was before it was first counted."""
    return Distribution(value.bounds, [0] * len(value.counts), 0.0) if isinstance(value, Distribution) else 0.0


def _records(
    path: Path, fields: FieldMap, told: BackfillResult, progress: Callable[[int], None]
) -> Iterator[tuple[float, RequestRecord]]:
    """The records of a file with the time at which each ended, in the order of its lines."""
    for record in read_records([path], told.bad, fields, progress=progress):
        ended_s = ended_at(record)
        if ended_s is None:
            told.untimed += 1
        else:
            yield ended_s, record


def summary(told: BackfillResult, out: Path) -> str:
    """What came of it, for people."""
    if told.first_s is None or told.last_s is None:
        lines = [f"no request with a time was found; {out} holds no series"]
    else:
        lines = [
            (
                f"{told.requests} requests from {timestamp(told.first_s)} to {timestamp(told.last_s)}, {told.samples}"
                f" samples in {out}"
            )
        ]
    lines += [f"  {told.duplicates} lines of requests that were counted before"] if told.duplicates else []
    lines += (
        [f"  {told.untimed} lines without ts, which cannot be placed in time, were left out"] if told.untimed else []
    )
    lines += (
        [f"  {told.late} lines came late and are counted in a later step; give files that overlap in time together"]
        if told.late
        else []
    )
    lines += [
        f"  {count} lines were no request record ({why}): {told.bad.messages[why]}"
        for why, count in sorted(told.bad.counts.items())
    ]
    return "\n".join(lines)
