"""Usage and cost from a data set: what cost_from_log.py adds up of each record, as sums that DuckDB computes.

Invariant: equal to the cost of the same records in a log, but that starts are rounded to microseconds.

Price segments are read one after the other, the last first; requests that began before a segment are carried to the
one before. The starts and ends in a segment are sorted as single numbers of model, microsecond, start or end, and team;
then a clock that runs 1/n as fast while n requests of a model run is read at each, as busy_hours.sweep does."""

# ruff: noqa: S608 - names and expressions in SQL are constants of this module, or numbers

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from exporters.accounting.billing_period import PriceSegment
from exporters.accounting.cost import TeamUse
from exporters.accounting.cost_from_log import SegmentUse
from exporters.dataset.query import RequestData
from exporters.dataset.views import ESTIMATED
from exporters.requests.bounded_names import UNKNOWN_MODEL
from exporters.requests.read import ReadReport
from exporters.requests.record import UNKNOWN_TEAM

_RAN = "outcome IS DISTINCT FROM 'rejected'"
_BUSY_MS = "greatest(0, e2e_ms - coalesce(queue_ms, 0))"
_START_US = f"epoch_us(ts) - CAST(round({_BUSY_MS} * 1000) AS BIGINT)"
_FIRST_AND_LAST_S = f"min(epoch(ts) - {_BUSY_MS} / 1000), epoch(max(ts))"  # rounded as Python does
_COUNTS = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "completion_tokens",
    **{f"est_{kind}_tokens": sql for kind, sql in ESTIMATED.items()},
    "unreadable_requests": "CASE WHEN unreadable IS NOT NULL THEN 1 END",
}
_SUMS = ", ".join(f"coalesce(sum({sql}), 0)" for sql in _COUNTS.values())
_BIGINT_BITS = 63

Name = str | None
Busy = dict[tuple[str, str, bool], float]  # seconds by model, team and aborted flag


@dataclass(frozen=True, slots=True)
class CostData:
    """Data set as a CostSource. opened: opens its requests of the period."""

    name: str
    opened: Callable[[], AbstractContextManager[RequestData]]

    def covered(self) -> tuple[float, float, ReadReport]:
        with self.opened() as data:
            sql = f"SELECT {_FIRST_AND_LAST_S} FROM recorded WHERE {_RAN} AND e2e_ms IS NOT NULL"
            ((first_s, last_s),) = data.select(sql)[1]
        return (*((float("inf"), float("-inf")) if first_s is None else (first_s, last_s)), ReadReport())

    def uses(self, segments: Sequence[PriceSegment]) -> tuple[list[SegmentUse], int, ReadReport]:
        with self.opened() as data:
            reading = _Reading(data, segments)
            return reading.uses(), reading.untimed, ReadReport()


@dataclass(frozen=True, slots=True)
class _Window:
    """Requests that ended in a price segment, in microseconds: after from_us, until to_us. rows: their relation."""

    from_us: int
    to_us: int
    rows: str

    @property
    def where(self) -> str:
        return f"ts > make_timestamptz({self.from_us}) AND ts <= make_timestamptz({self.to_us}) AND {_RAN}"


@dataclass(frozen=True, slots=True)
class _Bits:
    """A start or end as one number, from its lowest bit on: team in `who` bits, a bit that is set for starts,
    microsecond, and from bit `model` on the model. total: bits of all."""

    who: int
    model: int
    total: int

    @property
    def kind(self) -> str:
        return "HUGEINT" if self.total > _BIGINT_BITS else "BIGINT"


@dataclass(slots=True)
class _Names:
    """Numbers of teams and models for sorting; 0 is for rows without a name."""

    teams: list[Name] = field(default_factory=lambda: [None])
    models: list[Name] = field(default_factory=lambda: [None])

    def create(self, data: RequestData, names: Collection[tuple[Name, Name]]) -> None:
        """Create types of DuckDB for the names: it looks one up once for each entry of a dictionary, not of a row."""
        for kind, known, number in (("team", self.teams, 0), ("model", self.models, 1)):
            given = sorted({pair[number] for pair in names} - {None}, key=str)
            data.select(f"CREATE TABLE {kind}_names AS SELECT unnest(CAST(? AS VARCHAR[])) AS name", [given or [""]])
            data.select(f"CREATE TYPE {kind}_name AS ENUM (SELECT name FROM {kind}_names)")
            rows = data.select(f"SELECT name FROM {kind}_names ORDER BY enum_code(CAST(name AS {kind}_name))")[1]
            known += [name for (name,) in rows]

    def bits(self, window: _Window) -> _Bits:
        """Return how the starts and ends in a window are packed."""
        who = (2 * len(self.teams) - 1).bit_length()  # a team, with or without the aborted flag
        moment = (window.to_us - window.from_us).bit_length()
        model = who + 1 + moment
        return _Bits(who, model, model + (len(self.models) - 1).bit_length())


_MODEL = "coalesce(CAST(enum_code(CAST(model AS model_name)) AS BIGINT) + 1, 0)"
_WHO = (
    "coalesce(CAST(enum_code(CAST(team AS team_name)) AS BIGINT) + 1, 0) * 2"
    " + CASE WHEN outcome IS NULL OR outcome = 'ok' THEN 0 ELSE 1 END"
)


class _Reading:
    """One reading of a data set. untimed: requests without a time."""

    def __init__(self, data: RequestData, segments: Sequence[PriceSegment]) -> None:
        self.untimed = 0
        self._data = data
        self._names = _Names()
        edges = [(round(one.from_s * 1e6), round(one.to_s * 1e6)) for one in segments]
        files = _file_bounds(data)
        self._windows = [
            _Window(
                start, end, data.relation([path for path, first, last, _ in files if first <= end and last > start])
            )
            for start, end in edges
        ]
        self._from_us, self._to_us = edges[0][0], edges[-1][1]
        self._longest_us = max((file.longest for file in files), default=math.inf)
        self._outside = data.relation(
            [path for path, first, last, _ in files if first <= self._from_us or last > self._to_us]
        )

    def uses(self) -> list[SegmentUse]:
        """Return the use of each segment."""
        found, names = [], set[tuple[Name, Name]]()
        for window in self._windows:
            use, of_window = self._tokens(window)
            found.append(use)
            names |= of_window
        names |= self._look_outside(found[-1])
        self._names.create(self._data, names)
        for use, busy in zip(found, self._busy(), strict=True):
            for (model, team, broke_off), seconds in busy.items():
                use.busy[model][team, broke_off] += seconds
        return found

    def _tokens(self, window: _Window) -> tuple[SegmentUse, set[tuple[Name, Name]]]:
        """Return the tokens of a segment, and its teams and models."""
        use, names = SegmentUse(), set()
        sql = f"SELECT team, model, e2e_ms IS NULL, count(*), {_SUMS}, {_FIRST_AND_LAST_S} FROM ({window.rows})"
        for row in self._data.select(f"{sql} WHERE {window.where} GROUP BY 1, 2, 3")[1]:
            team, model, untimed, count, *sums, first_s, last_s = row
            if untimed:
                self.untimed += count
                continue
            names.add((team, model))
            counts = {name: float(total) for name, total in zip(_COUNTS, sums, strict=True)}
            use.tokens[team or UNKNOWN_TEAM, model or UNKNOWN_MODEL].add(TeamUse(**counts))
            use.first_s, use.last_s = min(use.first_s, first_s), max(use.last_s, last_s)
        return use, names

    def _look_outside(self, last: SegmentUse) -> set[tuple[Name, Name]]:
        """Count the requests without a time, and note those that ran in the last segment and ended after it."""
        bounds = f"ts <= make_timestamptz({self._from_us}) OR ts > make_timestamptz({self._to_us})"
        sql = f"SELECT count(*) FROM ({self._outside}) WHERE {_RAN} AND (ts IS NULL OR (e2e_ms IS NULL AND ({bounds})))"
        self.untimed += self._data.select(sql)[1][0][0]
        sql = f"SELECT team, model, {_FIRST_AND_LAST_S} FROM ({self._outside}) WHERE {self._ran_later} GROUP BY 1, 2"
        names = set()
        for team, model, first_s, last_s in self._data.select(sql)[1]:
            names.add((team, model))
            last.first_s, last.last_s = min(last.first_s, first_s), max(last.last_s, last_s)
        return names

    @property
    def _ran_later(self) -> str:
        return (
            f"ts > make_timestamptz({self._to_us}) AND {_RAN} AND e2e_ms IS NOT NULL AND {_START_US} <= {self._to_us}"
        )

    def _busy(self) -> list[Busy]:
        """Return the busy seconds of each segment. One is sorted while the clock of the one after it is read."""
        start = f"SELECT {_MODEL} AS model, {_WHO} AS who, {_START_US} AS start_us"
        self._data.select(f"CREATE TABLE carried AS {start} FROM ({self._outside}) WHERE {self._ran_later}")
        found: list[Future[Busy]] = []
        cursor = RequestData(self._data.connection.cursor())
        with ThreadPoolExecutor(1) as pool:
            for number, window in reversed([*enumerate(self._windows)]):
                self._sort(f"moments_{number}", window)
                early = f"{window.where} AND e2e_ms IS NOT NULL AND {_START_US} < {window.from_us}"
                if math.isfinite(self._longest_us):  # so that most rows are left out by their first column
                    early += f" AND ts <= make_timestamptz({window.from_us + math.ceil(self._longest_us) + 1})"
                self._data.select(f"INSERT INTO carried {start} FROM ({window.rows}) WHERE {early}")
                if found:
                    found[-1].result()
                found.append(pool.submit(self._read_clock, cursor, f"moments_{number}", window))
        cursor.connection.close()
        return [one.result() for one in reversed(found)]

    def _sort(self, table: str, window: _Window) -> None:
        """Create a table of the starts and ends in a segment, in order; of two at once the end is first."""
        bits = self._names.bits(window)
        scale = 2 ** (bits.who + 1)
        rows = (
            f"SELECT {_MODEL} AS model, {_WHO} AS who, {_START_US} AS start_us, epoch_us(ts) AS end_us"
            f" FROM ({window.rows}) WHERE {window.where} AND e2e_ms IS NOT NULL"
            f" UNION ALL SELECT *, {window.to_us} AS end_us FROM carried"
        )
        packed = (
            f"SELECT CAST(model AS {bits.kind}) * {2**bits.model} + who AS name,"
            f" greatest(start_us, {window.from_us}) - {window.from_us} AS start_us,"
            f" end_us - {window.from_us} AS end_us FROM ({rows}) WHERE start_us < end_us"
        )
        pairs = f"SELECT name + start_us * {scale} + {2**bits.who} AS a, name + end_us * {scale} AS b FROM ({packed})"
        self._data.select(f"CREATE TABLE pairs AS {pairs}")
        moments = "SELECT a AS x FROM pairs UNION ALL SELECT b FROM pairs"
        self._data.select(f"CREATE TABLE {table} AS SELECT x FROM ({moments}) ORDER BY x")
        self._data.select("DROP TABLE pairs")

    def _read_clock(self, cursor: RequestData, table: str, window: _Window) -> Busy:
        """Return the busy seconds of a segment, and drop its table.

        The windows have no ORDER BY: rows are read as they are stored."""
        bits = self._names.bits(window)
        step = f"CASE WHEN x & {2**bits.who} = 0 THEN -1.0::DOUBLE ELSE 1.0 END"
        parts = f"SELECT x, x >> {bits.who + 1} AS moment, {step} AS step FROM {table}"
        running = (
            "SELECT x, step, sum(step) OVER (ROWS UNBOUNDED PRECEDING) - step AS running,"
            f" CAST(moment - lag(moment) OVER () AS DOUBLE) AS passed FROM ({parts})"
        )
        clock = (
            "SELECT x, step, sum(CASE WHEN running > 0 THEN passed / running ELSE 0 END)"
            f" OVER (ROWS UNBOUNDED PRECEDING) AS clock FROM ({running})"
        )
        name = f"x >> {bits.model}, x & {2**bits.who - 1}"
        sql = f"SELECT {name}, -fsum(step * clock) / 1e6 FROM ({clock}) GROUP BY 1, 2"
        busy: Busy = {}
        for model, number, seconds in cursor.select(sql)[1]:
            team = self._names.teams[number // 2] or UNKNOWN_TEAM
            key = self._names.models[model] or UNKNOWN_MODEL, team, bool(number % 2)
            busy[key] = busy.get(key, 0.0) + seconds
        cursor.select(f"DROP TABLE {table}")
        return busy


class _FileBounds(NamedTuple):
    """Bounds of a file's requests by its statistics, in microseconds: first and last end, longest duration. Infinite
    where they are not known."""

    path: Path
    first: float
    last: float
    longest: float


def _file_bounds(data: RequestData) -> list[_FileBounds]:
    paths: list[Any] = [str(path) for path in data.files]
    if not paths:
        return []
    of_ts, of_e2e = (f"FILTER (path_in_schema = '{name}')" for name in ("ts", "e2e_ms"))
    ends = ", ".join(f"epoch_us({of}(TRY_CAST(stats_{of}_value AS TIMESTAMPTZ)) {of_ts})" for of in ("min", "max"))
    longest = f"max(TRY_CAST(stats_max_value AS DOUBLE)) {of_e2e}, count(*) {of_e2e} = count(stats_max_value) {of_e2e}"
    sql = f"SELECT file_name, {ends}, sum(stats_null_count) {of_ts}, {longest} FROM parquet_metadata(?) GROUP BY 1"
    found = []
    for name, first, last, nulls, longest_ms, all_known in data.select(sql, [paths])[1]:
        known = first is not None and last is not None and nulls == 0
        longest_us = longest_ms * 1000 if all_known and longest_ms is not None else math.inf
        found.append(_FileBounds(Path(name), first if known else -math.inf, last if known else math.inf, longest_us))
    return found
