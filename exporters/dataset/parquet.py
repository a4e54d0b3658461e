"""Parquet segments through DuckDB: made from JSON lines, merged, and summed again from their bytes.

Invariant: a segment is used only after a second look at its file found the sums that its records had. Rows of equal
lines in equal order make equal bytes."""

# ruff: noqa: S608 - names in SQL are constants of this package and paths of its own files; all values are parameters

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import duckdb

from exporters.dataset.catalog import local_copy
from exporters.dataset.columns import COLUMNS, OF_RECORD, SCHEMA, empty_select, sql_literal
from exporters.dataset.layout import (
    MODELS_AT_MOST,
    OTHER_MODELS,
    UNDATED,
    LogSegment,
    Sums,
    digest_of,
    model_partition,
    segment_key,
    total,
)
from exporters.dataset.objects import ObjectStore
from exporters.dataset.segment_buffer import RunKey, SegmentBuffer
from exporters.requests.positions import MAX_LINE_BYTES
from exporters.text import sync_folder

MEMORY_MB = 160
ROW_GROUP = 61_440  # rows; a query reads those whose team or time may match, and a writer holds one in memory
DICTIONARY = 2000  # distinct values of a column up to which it is worth a dictionary; ids and times have more
_SUMS = (
    "count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(cached_tokens), 0), coalesce(sum(completion_tokens), 0)"
)
_ORDER = "team NULLS LAST, model NULLS LAST, ts NULLS LAST"
# A record may hold a time or a status that SQL has no value for; a failed cast makes it null, not the segment invalid.
_CAST = ("ts", "status")
_TYPES = ", ".join(f"{column.name}: '{'VARCHAR' if column.name in _CAST else column.type}'" for column in OF_RECORD)
_NAMES = ", ".join(column.name for column in COLUMNS)
_VALUES = ", ".join(
    f"try_cast({column.name} AS {column.type}) AS {column.name}"
    if column.name in _CAST
    else f"${column.name} AS {column.name}"
    if column.source is None
    else column.name
    for column in COLUMNS
)
_FROM_LINES = (
    f"SELECT {_VALUES} FROM read_json($lines, format = 'newline_delimited', columns = {{{_TYPES}}},"
    f" maximum_object_size = {2 * MAX_LINE_BYTES})"
)


class SumsDiffer(ValueError):
    """Segment whose file does not hold the records that were written into it."""


class SegmentError(OSError):
    """Failure of DuckDB, such as a full disk. The message is its first line."""


class SegmentTooLarge(SegmentError):
    """Segment that takes more memory than MEMORY_MB, as rows with names of a megabyte each may."""


@contextlib.contextmanager
def _limited(spill: Path | None) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB for one piece of work. Raises SegmentError for its errors."""
    try:
        with connect(MEMORY_MB, spill=spill) as db:
            yield db
    except duckdb.Error as error:
        kind = SegmentTooLarge if isinstance(error, duckdb.OutOfMemoryException) else SegmentError
        raise kind(str(error).partition("\n")[0][:300]) from error


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """Segment and the local file with its bytes."""

    segment: LogSegment
    path: Path


def connect(memory_mb: int = 256, threads: int = 1, spill: Path | None = None) -> duckdb.DuckDBPyConnection:
    """Return an in-memory DuckDB with limits, in UTC, which loads no extension and no setting from elsewhere.

    spill: folder for what does not fit into memory; None: a query that needs more fails."""
    connection = duckdb.connect(
        config={
            "threads": threads,
            "memory_limit": f"{memory_mb}MB",
            "temp_directory": "" if spill is None else str(spill),
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
    )
    connection.execute("SET TimeZone = 'UTC'")
    return connection


class Partition(NamedTuple):
    """Part of the buffered records: its day, its model as in keys, and the keys of its lines in order."""

    day: str
    model: str
    keys: list[RunKey]


def partitions(counts: Mapping[RunKey, int]) -> list[Partition]:
    """Divide records into segments by day and model, sorted by team and model. counts: records of each key.

    Clients may send any model name: only models that served a request have segments of their own, as they have series
    of their own in the sidecar; the others share one."""
    served: Counter[str | None] = Counter()
    for key, count in counts.items():
        served[key.model] += count if key.outcome in ("ok", None) else 0
    ranked = sorted(served, key=lambda model: (model is not None, -served[model], model or ""))
    own = {model for model in ranked[:MODELS_AT_MOST] if model is None or served[model]}
    found: defaultdict[tuple[str, str], list[RunKey]] = defaultdict(list)
    for key in sorted(counts, key=lambda key: [(one is None, one or "") for one in (key.team, key.model, key.outcome)]):
        found[key.day or UNDATED, model_partition(key.model) if key.model in own else OTHER_MODELS].append(key)
    return [Partition(day, model, keys) for (day, model), keys in sorted(found.items())]


class SegmentMaker:
    """Maker of segments of one writer, as files of its spool folder."""

    def __init__(self, spool: Path, cluster: str, writer: str) -> None:
        self.spool, self.cluster, self.writer = spool, cluster, writer

    def seal(self, buffer: SegmentBuffer) -> list[SegmentFile]:
        """Make segments of buffered records, one for each day and model, and check them.

        Their lines are read in the order of the segment, so that nothing is sorted here. Raises SumsDiffer, and
        OSError, as SegmentError."""
        ordered, made = self.spool / "ordered.jsonl", []
        with _limited(self.spool) as db:
            for part in partitions(buffer.counts):
                buffer.write(part.keys, ordered)
                values = {"lines": str(ordered), "cluster": self.cluster, "writer": self.writer}
                made.append(self._copy(db, _FROM_LINES, values, part.day, part.model))
        if (in_files := total(file.segment.sums for file in made)) != buffer.sums:
            raise SumsDiffer(f"segments hold {in_files}, and the lines {buffer.sums}")
        return made

    def _copy(
        self,
        db: duckdb.DuckDBPyConnection,
        rows: str,
        values: Mapping[str, object],
        day: str,
        model: str,
        level: int = 1,
    ) -> SegmentFile:
        """Write the rows of a query as one segment, and sum them again from the file."""
        partial = self.spool / "segment.partial"
        db.execute(
            f"COPY ({rows}) TO {sql_literal(str(partial))}"
            f" (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL {level},"
            f" ROW_GROUP_SIZE {ROW_GROUP}, DICTIONARY_SIZE_LIMIT {DICTIONARY},"
            f" KV_METADATA {{vllm_watch_schema: '{SCHEMA}'}})",
            values,
        )
        ((*sums, first, last),) = db.execute(
            f"SELECT {_SUMS}, epoch(min(ts)), epoch(max(ts)) FROM read_parquet($path)", {"path": str(partial)}
        ).fetchall()
        data = partial.read_bytes()
        digest = digest_of(data)
        segment = LogSegment(
            key=segment_key(day, self.cluster, model, digest),
            day=day,
            cluster=self.cluster,
            model=model,
            writer=self.writer,
            schema=SCHEMA,
            size=len(data),
            sha256=digest,
            min_ts=first,
            max_ts=last,
            sums=Sums(*map(int, sums)),
        )
        return SegmentFile(segment, partial.replace(self.spool / f"{digest}.parquet"))

    def sync(self, paths: Sequence[Path]) -> None:
        """Write files of the spool and their names to disk. Raises OSError."""
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self.spool)

    def clear_copies(self) -> None:
        """Delete local copies of stored segments, which a merge has read."""
        shutil.rmtree(self.spool / "merge", ignore_errors=True)

    def merge(self, day: str, model: str, files: Sequence[SegmentFile]) -> SegmentFile:
        """Merge segments of one day and model into one that holds the same rows. Raises SumsDiffer, OSError."""
        with _limited(self.spool) as db:
            paths = ", ".join(sql_literal(str(file.path)) for file in files)
            both = f"SELECT * FROM {_rows(paths)} UNION ALL BY NAME {empty_select()}"
            made = self._copy(db, f"SELECT {_NAMES} FROM ({both}) ORDER BY {_ORDER}", {}, day, model, level=9)
            before, after = _content(db, f"({both})"), _content(db, _rows(sql_literal(str(made.path))))
            if before != after or made.segment.sums != total(file.segment.sums for file in files):
                made.path.unlink()
                raise SumsDiffer(f"merging {len(files)} segments of {day} and model {model} changed their content")
            return made


def _rows(paths: str) -> str:
    """Return the rows of files as SQL. Values of their keys must not replace columns: OTHER_MODELS is no model."""
    return f"read_parquet([{paths}], union_by_name = true, hive_partitioning = false)"


def _content(db: duckdb.DuckDBPyConnection, table: str) -> tuple[object, ...]:
    """Return the number of rows, and a digest of them that does not depend on their order."""
    ((*found,),) = db.execute(f"SELECT count(*), sum(hash({_NAMES})::HUGEINT) FROM {table}").fetchall()
    return tuple(found)


def range_sums(
    store: ObjectStore, cache: Path, segments: Sequence[LogSegment], first_s: float, end_s: float
) -> dict[str, dict[str, float]]:
    """Return sums of the records that ended in [first_s, end_s), by model partition and kind; undated ones as well.

    cache: folder for copies of segments. Raises StoreError, BadDataset, SegmentError."""
    paths: dict[str, list[str]] = {}
    for segment in segments:
        if segment.min_ts is None or segment.max_ts is None or (segment.min_ts < end_s and segment.max_ts >= first_s):
            paths.setdefault(segment.model, []).append(str(local_copy(store, segment, cache)))
    found = {}
    with _limited(None) as db:
        for model, of_model in paths.items():
            ((*sums,),) = db.execute(
                f"SELECT {_SUMS} FROM read_parquet($paths, hive_partitioning = false)"
                " WHERE ts IS NULL OR (epoch(ts) >= $first AND epoch(ts) < $end)",
                {"paths": of_model, "first": first_s, "end": end_s},
            ).fetchall()
            found[model] = dict(zip(("requests", "prompt", "cached", "completion"), map(float, sums), strict=True))
    return found
