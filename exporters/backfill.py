"""Old request logs as series in the past: the same counting as in the sidecar, one sample of each series at the end of each step.

Law: what is counted in which step is decided by when a request ended; a line that comes after its step was written is counted in the next one, and
said. A counter begins with a 0 one step earlier, so that growth over the whole time is all there was."""

from __future__ import annotations

import heapq
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from exporters import exposition
from exporters.catalogue import ours
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution
from exporters.ledger import Window
from exporters.packed import Damaged, Unpacked
from exporters.positions import MAX_LINE_BYTES, PACKED
from exporters.request_log import BadLine, Fields, RequestRecord, ended_at, parse_block, timestamp
from exporters.traffic import Row, Traffic, read_row, row_samples

CHUNK_BYTES = 1 << 20
FILL_S = 86_400  # a series without news is repeated for so long; a gap of years is a wrong clock


@dataclass(slots=True)
class Told:
    """What came of the files. first_s, last_s: when the first and the last request ended, unix seconds."""

    requests: int = 0
    duplicates: int = 0
    untimed: int = 0
    late: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)  # reason -> the first sentence of its kind
    first_s: float | None = None
    last_s: float | None = None
    samples: int = 0


def run(
    files: Iterable[Path],
    out: IO[str],
    traffic: Traffic,
    fields: Fields,
    window: Window,
    step_s: int = 60,
    labels: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Told:
    """Write the series of these files as OpenMetrics, as `promtool tsdb create-blocks-from openmetrics` reads it.

    labels: added to every series, such as the job that scraped the sidecar. progress: told how many bytes of the files were read.
    Raises OSError for a file that cannot be read, naming it."""
    told = Told()
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
    """How each row was at the end of each step in which it changed; on disk, since a month of many teams is more than memory should hold."""

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool
        self._places: dict[tuple[str, str], list[tuple[int, int, int]]] = {}  # step, offset and length of each

    def keep(self, step: int, rows: Mapping[tuple[str, str], bytes]) -> None:
        for key, stored in rows.items():
            self._places.setdefault(key, []).append((step, self._spool.tell(), len(stored)))
            self._spool.write(stored)

    def write(self, out: IO[str], last: int, step_s: int, labels: Mapping[str, str]) -> int:
        """All series until the step `last`, as the format wants them: by family, then by series, then by time. How many samples that was."""
        count = 0
        for metric in ours.REQUEST_TRAFFIC:
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
                            lines += [text.replace("\n", f" {(at + 1) * step_s}\n") for at in range(step, min(until, step + FILL_S // step_s))]
                if series and not headed:
                    out.write(exposition.head(metric, openmetrics=True))
                    headed = True
                for lines in series.values():
                    count += sum(text.count("\n") for text in lines)
                    out.writelines(lines)
        return count

    def _rows(self, places: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, Row]]:
        for step, offset, length in places:
            self._spool.seek(offset)
            yield step, read_row(self._spool.read(length))


def _lines(metric: Metric, labels: Mapping[str, str], value: float | Distribution, at_s: int | None = None) -> str:
    _, text = exposition.block([(metric, labels, value)])[metric.name]
    return text if at_s is None else text.replace("\n", f" {at_s}\n")


def _nothing(value: float | Distribution) -> float | Distribution:
    """What it was before it was first counted."""
    return Distribution(value.bounds, [0] * len(value.counts), 0.0) if isinstance(value, Distribution) else 0.0


def _records(path: Path, fields: Fields, told: Told, progress: Callable[[int], None]) -> Iterator[tuple[float, RequestRecord]]:
    """The records of a file with the time at which each ended, in the order of its lines."""
    try:
        for block in _blocks(path, told, progress):
            records, bad = parse_block(block, fields)
            for _, error in bad:
                _refuse(told, error)
            for record in records:
                ended_s = ended_at(record)
                if ended_s is None:
                    told.untimed += 1
                else:
                    yield ended_s, record
    except (OSError, Damaged) as error:
        raise OSError(f"{path} cannot be read: {error}") from error


def _blocks(path: Path, told: Told, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Whole lines of a file, packed or not; the last one may have no end."""
    with path.open("rb") as file:
        rest, skipping = b"", False
        for chunk in _chunks(file.fileno(), progress):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if skipping and newline:
                _, _, whole = whole.partition(b"\n")
                skipping = False
            if len(rest) > MAX_LINE_BYTES:
                if not skipping:
                    _refuse(told, BadLine("long", f"a line has more than {MAX_LINE_BYTES} bytes"))
                rest, skipping = b"", True
            if whole and not skipping:
                yield whole.replace(b"\0", b"\n") + b"\n"
        if rest and not skipping:
            yield rest.replace(b"\0", b"\n") + b"\n"


def _chunks(fd: int, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the content of a file, unpacked where it is compressed. Raises Damaged for one that cannot be unpacked to its end."""

    def read(offset: int, size: int) -> bytes:
        return os.pread(fd, size, offset)

    if not read(0, 8).startswith(PACKED):
        while chunk := os.read(fd, CHUNK_BYTES):
            progress(len(chunk))
            yield chunk
        return
    unpacked, at = Unpacked(read), 0
    while chunk := unpacked.read(unpacked.end, CHUNK_BYTES):
        progress(unpacked.raw_end - at)
        at = unpacked.raw_end
        yield chunk
    if not unpacked.complete:
        raise Damaged("it ends in the middle of its compressed data")


def _refuse(told: Told, error: BadLine) -> None:
    told.bad[error.reason] += 1
    told.faults.setdefault(error.reason, str(error))


def summary(told: Told, out: Path) -> str:
    """What came of it, for people."""
    if told.first_s is None or told.last_s is None:
        lines = [f"no request with a time was found; {out} holds no series"]
    else:
        lines = [f"{told.requests} requests from {timestamp(told.first_s)} to {timestamp(told.last_s)}, {told.samples} samples in {out}"]
    lines += [f"  {told.duplicates} lines of requests that were counted before"] if told.duplicates else []
    lines += [f"  {told.untimed} lines without ts, which cannot be placed in time, were left out"] if told.untimed else []
    lines += [f"  {told.late} lines came late and are counted in a later step; give files that overlap in time together"] if told.late else []
    lines += [f"  {count} lines were no request record ({why}): {told.faults[why]}" for why, count in sorted(told.bad.items())]
    return "\n".join(lines)
