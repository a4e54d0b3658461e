"""Requests of a data set and of live logs as one relation of DuckDB, with the documented views.

Invariant: a request is in the relation once. Segments come from manifests, and lines of a log count from the position
that the shipper committed together with its last segments; if that moves meanwhile, both are read again."""

# ruff: noqa: S608 - names in SQL are constants of this package and paths are literals; values of a caller are parameters

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from exporters.dataset import catalog, columns, layout, views
from exporters.dataset.commit_reader import ShippedState
from exporters.dataset.layout import BadDataset, LogSegment
from exporters.dataset.live import live_records
from exporters.dataset.objects import FolderStore, ObjectStore, S3Access
from exporters.dataset.parquet import SegmentMaker, connect
from exporters.dataset.segment_buffer import SegmentBuffer
from exporters.dataset.verified import VerifiedFiles
from exporters.requests.duplicates import WINDOW, RecentRequests, repeats_note
from exporters.requests.record import FieldMap, RequestRecord
from exporters.requests.store import LogTotals

MEMORY_MB = 1024
BATCH_ROWS = 2048
LIVE_BYTES = 64 << 20  # of lines in memory and in one file
READ_AGAIN = 5  # a shipper commits every few seconds at most
_RECORD = ", ".join(
    f"strftime({column.name} AT TIME ZONE 'UTC', '%Y-%m-%dT%H:%M:%S.%fZ') AS ts" if column.name == "ts" else column.name
    for column in columns.OF_RECORD
)
_decoder = msgspec.json.Decoder(RequestRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSource:
    """Source of requests: a data set, logs, or both.

    location: folder or s3://bucket/prefix. committed: reads the last commit of the shipper of these logs; without it
    all lines of the logs count. fields: names of the logs' fields. rotated: patterns of their rotated files. cluster:
    of live lines. clusters, models: empty means all. cache: folder for copies of segments of an object store."""

    location: str | None = None
    logs: tuple[Path, ...] = ()
    committed: Callable[[], ShippedState] | None = None
    fields: FieldMap | None = None
    rotated: Mapping[str, str] = field(default_factory=dict)
    s3: S3Access | None = None
    cluster: str | None = None
    clusters: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not self.location and not self.logs:
            raise ValueError("no requests to read: name a data set with --data, or a request log with --log")
        if len({path.resolve() for path in self.logs}) != len(self.logs):
            raise ValueError("--log lists a file twice; it would be counted twice")


@dataclass(slots=True)
class RequestData:
    """Open relation `recorded` and the views of views.py over it.

    since_s, until_s: bounds of the ends of its requests. damaged: segments that were left out, by message. live:
    records that are in no segment yet."""

    connection: duckdb.DuckDBPyConnection
    since_s: float | None = None
    until_s: float | None = None
    damaged: list[str] = field(default_factory=list)
    totals: LogTotals = field(default_factory=LogTotals)
    segments: int = 0
    live: int = 0
    files: list[Path] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return what a reader must know about the completeness of the answer."""
        found = [f"left out: {message}" for message in self.damaged]
        if self.damaged:
            found.append(f"{len(self.damaged)} of {self.segments} segments are left out; totals are too low")
        found += [f"{count} bad lines ({why})" for why, count in self.totals.bad.items() if count]
        if repeats := sum(self.totals.repeats.values()):
            found.append(repeats_note(repeats, self.totals.lines + repeats))
        return found + [
            f"{path}: {count} {'fault' if count == 1 else 'faults'} while reading ({why})"
            for path, faults in self.totals.faults.items()
            for why, count in faults.items()
            if count
        ]

    def select(self, sql: str, parameters: Sequence[object] = ()) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return names and rows of a query of ours. Raises ValueError with the engine's sentence."""
        try:
            result = self.connection.execute(sql, parameters)
            return [name for name, *_ in result.description or ()], result.fetchall()
        except duckdb.Error as error:
            raise ValueError(first_line(error)) from error

    def records(
        self, where: str = "true", parameters: Sequence[object] = (), order: str = "", limit: int | None = None
    ) -> Iterator[RequestRecord]:
        """Yield records in bounded batches. where, order: SQL of ours over the columns of `requests`."""
        sql = f"SELECT to_json(r) FROM (SELECT {_RECORD} FROM requests WHERE {where}"
        sql += f"{order and f' ORDER BY {order}'}{'' if limit is None else f' LIMIT {limit}'}) AS r"
        try:
            result = self.connection.cursor().execute(sql, parameters)
            while rows := result.fetchmany(BATCH_ROWS):
                yield from _decoder.decode_lines("\n".join([row[0] for row in rows]))
        except duckdb.Error as error:
            raise ValueError(first_line(error)) from error

    def relation(self, paths: Sequence[Path]) -> str:
        """Return a query of the rows of some of its files."""
        parts = [columns.empty_select()]
        if paths:
            files = ", ".join(columns.sql_literal(str(path)) for path in paths)
            parts.append(f"SELECT * FROM read_parquet([{files}], union_by_name = true, hive_partitioning = false)")
        bounds = [
            f"ts {sign} TIMESTAMPTZ '{datetime.fromtimestamp(at_s, UTC).isoformat()}'"
            for sign, at_s in ((">=", self.since_s), ("<", self.until_s))
            if at_s is not None
        ]
        names = ", ".join(column.name for column in columns.COLUMNS)
        source = " UNION ALL BY NAME ".join(parts)
        return f"SELECT {names} FROM ({source}){' WHERE ' + ' AND '.join(bounds) if bounds else ''}"


def first_line(error: Exception) -> str:
    """Return an error of DuckDB as one sentence."""
    return str(error).strip().partition("\n")[0]


def segment_cache() -> Path:
    """Return the user's folder for copies of segments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-watch" / "segments"


@contextlib.contextmanager
def open_requests(
    source: RequestSource,
    since_s: float | None = None,
    until_s: float | None = None,
    *,
    memory_mb: int = MEMORY_MB,
    threads: int | None = None,
) -> Iterator[RequestData]:
    """Open the requests that ended in [since, until), unix seconds; without bounds also those without a time.

    Raises BadDataset, BadConfig, ValueError, OSError (StoreError included)."""
    with tempfile.TemporaryDirectory(prefix="vllm-watch-") as folder:
        scratch = Path(folder)
        connection = connect(memory_mb, threads or min(4, os.cpu_count() or 1), scratch / "spill")
        data = RequestData(connection, since_s, until_s)
        try:
            _gather(data, source, scratch)
            _create_views(data)
            yield data
        finally:
            connection.close()


def describe_views() -> list[tuple[str, str, str, str]]:
    """Return view, column, type and what a row of the view is, for each column."""
    data = RequestData(connect())
    _create_views(data)
    found = [
        (view.name, column, kind, view.meaning)
        for view in views.VIEWS
        for column, kind, *_ in data.select(f"DESCRIBE {view.name}")[1]
    ]
    data.connection.close()
    return found


def _create_views(data: RequestData) -> None:
    data.connection.execute(f"CREATE VIEW recorded AS {data.relation(data.files)}")
    for view in views.VIEWS:
        data.connection.execute(f"CREATE VIEW {view.name} AS {view.select(views.DUCKDB)}")


def _gather(data: RequestData, source: RequestSource, scratch: Path) -> None:
    """Collect the files: segments, and one of live lines, of the same commit of the shipper."""
    store = catalog.open_store(source.location, source.s3) if source.location else None
    for attempt in range(READ_AGAIN):
        data.files, data.damaged, data.totals = [], [], LogTotals()
        state = source.committed() if source.committed else ShippedState()
        listed = _segments(store, source, data.since_s, data.until_s) if store else []
        keys = {segment.key for segment in listed}
        pending = [path for segment, path in state.pending if segment.key not in keys]
        data.segments = len(listed) + len(pending)
        for found in _local(store, listed, source.cache or segment_cache()) if store else ():
            if isinstance(found, BadDataset):
                data.damaged.append(str(found))
            else:
                data.files.append(found)
        # a copy: the shipper deletes its file as soon as the segment is stored
        with contextlib.suppress(FileNotFoundError):
            data.files += [_kept(path, scratch) for path in pending]
            data.live = _live(data, source, state, scratch / f"live-{attempt}")
            now = source.committed() if source.committed else state
            if (now.number, now.pending) == (state.number, state.pending):
                return
    raise BadDataset(f"{source.location} changed {READ_AGAIN} times while it was read; try again")


def _kept(path: Path, scratch: Path) -> Path:
    """Return a second name of a file, or a copy where there can be none. Raises FileNotFoundError."""
    kept = scratch / path.name
    if not kept.exists():
        try:
            os.link(path, kept)
        except OSError:
            shutil.copyfile(path, kept)
    return kept


def _segments(
    store: ObjectStore, source: RequestSource, since_s: float | None, until_s: float | None
) -> list[LogSegment]:
    if isinstance(store, FolderStore) and not store.folder.is_dir():
        raise BadDataset(f"{store.name} is no data set: there is no such folder")
    if not any(True for _ in catalog.writers(store)):
        raise BadDataset(f"{store.name} is no data set: it has no manifest")
    undated = since_s is None and until_s is None
    if since_s is None or until_s is None:
        first_s, last_s = _days(store)
        since_s, until_s = first_s if since_s is None else since_s, last_s if until_s is None else until_s
    return catalog.segments(store, since_s, until_s, source.clusters, source.models, undated=undated)


def _days(store: ObjectStore) -> tuple[float, float]:
    """Return start and end of the days of a data set, in unix seconds."""
    days = {key.split("/")[1].removeprefix("day=") for key in store.keys(f"{layout.MANIFESTS}/")} - {layout.UNDATED}
    if not days:
        return 0.0, 0.0
    first, last = (datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() for day in (min(days), max(days)))
    return first, last + 86_400.0


def _local(store: ObjectStore, segments: Sequence[LogSegment], cache: Path) -> Iterator[Path | BadDataset]:
    """Yield a local file of each segment, or what is wrong with it."""
    if isinstance(store, FolderStore):
        yield from VerifiedFiles(cache / "verified").files(store, segments)
        return
    for segment in segments:
        try:
            yield catalog.local_copy(store, segment, cache)
        except BadDataset as error:
            yield error


def _live(data: RequestData, source: RequestSource, state: ShippedState, scratch: Path) -> int:
    """Write the live records as segments of our own; return their number. Raises OSError."""
    window, count = RecentRequests(max(WINDOW, 2 * len(state.requests))), 0
    window.restore(state.requests)
    scratch.mkdir()
    maker, buffer = SegmentMaker(scratch, source.cluster or "", ""), SegmentBuffer()
    for path in source.logs:
        if not source.committed and not path.exists():
            raise ValueError(f"{path}: no such request log")
        # as the shipper itself begins: rotated files of before its first start are not its own
        since = state.positions.get(os.path.abspath(path)) if source.committed else ()
        for records in live_records(
            path, since, source.fields or FieldMap(), window, data.totals, source.rotated.get(str(path))
        ):
            count += len(records)
            buffer.add(records)
            if buffer.is_full(LIVE_BYTES):
                _seal(data, maker, buffer)
    if buffer.bytes:
        _seal(data, maker, buffer)
    return count


def _seal(data: RequestData, maker: SegmentMaker, buffer: SegmentBuffer) -> None:
    data.files += [file.path for file in maker.seal(buffer)]
    buffer.clear()
