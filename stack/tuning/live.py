"""What live traffic says about a change: before and after an event, or two variants that were served at the same time.

Law: nobody interleaved live traffic, so the most it can say is `consistent with`; only variants that got the same traffic at the same time are
controlled.

Method. Requests are compared within strata (model, team, length of the prompt by powers of two; end to end also by length of the answer), weighed
alike on both sides, so that a changed mix is no effect. What a stratum comes to in ten minutes is the mean of its minutes' means (of logarithms for
ratios, where an outlier weighs little; not medians: that of few requests is another than that of many, and a canary of a tenth of the traffic was
called a change of the queue in 6 of 15 trials without one). The unit is the block of ten minutes. Around an event a block is taken relative to the
same hours of up to four weeks (or days) before, and the effect is how much further from them it is after the event than right before it: a day that
is slow as a whole is no effect. Where the log is too short for that, a straight line through the hours on both sides stands in for the course of the
day. Of two variants it is b - a in the same block.

Neighbouring blocks are alike, and a bootstrap that draws them as if they were not is wrong: where minutes correlate at 0.8 it calls 13 % of unchanged
traffic a change, at 0.9 22 %. So the standard error is widened by the correlation of neighbours (first order, corrected for its bias), and interval
and p come from a studentised block bootstrap: the blocks' surprises are drawn, courses of the same correlation are made of them, and of each the
whole estimate anew. `simulate` in tests/test_live_compare.py says how often this is wrong."""

from __future__ import annotations

import gzip
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from operator import attrgetter, mul
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from exporters.request_log import Fields, RequestRecord, ended_at, parse_block, timestamp
from stack.tuning.judge import ALPHA, MARGIN, NOT_JUDGED, SHARE, BadComparison, Check, Finding, Judgement, Metric, holm

MINUTE_S, BLOCK_S, HOUR_S, DAY_S, WEEK_S = 60.0, 600.0, 3600.0, 86_400.0, 604_800.0
WINDOW_S = 4 * HOUR_S  # on each side of an event
SETTLE_S = 60.0  # on each side of an event: caches fill, connections move
LEAST_BLOCKS = 18  # on each side: with 12 the noise's own correlation is known too badly, and 7 % of unchanged traffic is called a change
MOST_STRAIGHT_S = 4 * HOUR_S  # without the same hours before: longer, and a day's course is no straight line any more
BASELINES = 4  # weeks, or days
RESAMPLES = 1000
LEAST_REQUESTS = 20  # of a stratum on each side; and of a block for its p95
LEAST_PRESENT = 0.5  # of the strata's weight that a block must have
MOST_REQUESTS = 500_000  # kept in memory, about 350 bytes each
MOST_APART = 0.1  # distance of two distributions of prompt lengths, or of two mixes, that is never blamed
MOST_LOAD = 1.25  # times as many requests that are not blamed
LEAST_COMPARED = 0.8  # of the traffic that should be in strata of both sides
LEAST_SHARED = 0.9  # of the blocks in which both variants should have traffic
TOO_LITTLE = "too little traffic to say"


# ---- what is kept of a log ----------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a comparison needs of a record. started_s: its end less its e2e_ms; its end where that is not said."""

    started_s: float
    ended_s: float
    model: str | None
    team: str | None
    variant: str | None
    upstream: str | None
    outcome: str | None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_ms: float | None = None
    engine_queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(slots=True)
class Log:
    """Records in memory. untimed: records without ts; bad: lines that are none; outside: records of other times. first_s, last_s: of the whole log.

    share: of the records that are kept, drawn at random: 1 until there are too many."""

    seen: list[Seen] = field(default_factory=list)
    untimed: int = 0
    bad: int = 0
    outside: int = 0
    first_s: float = math.inf
    last_s: float = -math.inf
    share: float = 1.0


Span = tuple[float, float]


def kept(records: Iterable[RequestRecord], spans: Sequence[Span] = (), *, most: int = MOST_REQUESTS, log: Log | None = None, seed: int = 0) -> Log:
    """The records that ended within one of the spans (without spans all), added to `log`. Beyond `most` every second one is dropped, by lot."""
    log, rng = log or Log(), Random(seed)  # noqa: S311 (nothing secret)
    names: dict[str | None, str | None] = {}
    for record in records:
        ended_s = ended_at(record)
        if ended_s is None:
            log.untimed += 1
            continue
        log.first_s, log.last_s = min(log.first_s, ended_s), max(log.last_s, ended_s)
        if spans and not any(start <= ended_s < end for start, end in spans):
            log.outside += 1
        elif log.share == 1.0 or rng.random() < log.share:
            log.seen.append(_seen(record, ended_s, names))
            if len(log.seen) > most:
                log.seen = [each for each in log.seen if rng.random() < 0.5]
                log.share /= 2
    return log


def _seen(record: RequestRecord, ended_s: float, names: dict[str | None, str | None]) -> Seen:
    model, team, variant, upstream, outcome = (  # one text for each name, however many records have it
        names.setdefault(name, name) for name in (record.model, record.team, record.variant, record.upstream, record.outcome)
    )
    return Seen(
        ended_s - (record.e2e_ms or 0.0) / 1000, ended_s, model, team, variant, upstream, outcome,
        record.prompt_tokens, record.cached_tokens, record.completion_tokens,
        record.queue_ms, record.engine_queue_ms, record.ttft_ms, record.tpot_ms, record.e2e_ms,
    )  # fmt: skip


def windowed(blocks: Iterable[bytes], spans: Sequence[Span] = (), fields: Fields | None = None, most: int = MOST_REQUESTS) -> Log:
    """The log of blocks of whole lines, such as `blocks_of` reads; lines that are no records are counted."""
    log = Log()

    def records() -> Iterator[RequestRecord]:
        for block in blocks:
            found, bad = parse_block(block, fields)
            log.bad += len(bad)
            yield from found

    return kept(records(), spans, most=most, log=log)


def blocks_of(paths: Iterable[Path]) -> Iterator[bytes]:
    """Whole lines of files, a megabyte at a time; packed ones end in .gz. Raises OSError."""
    for path in paths:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while lines := file.readlines(1 << 20):
                yield b"".join(lines)


def spans_around(event_at_s: float, window_s: float = WINDOW_S, settle_s: float = SETTLE_S) -> tuple[Span, ...]:
    """The times of which `around_event` can use records: around the event, and around the same hour of days and weeks before."""
    reach = window_s + settle_s
    shifts = (0.0, *_shifts(WEEK_S, reach), *_shifts(DAY_S, reach))
    return tuple((event_at_s - shift - reach, event_at_s - shift + reach + HOUR_S) for shift in shifts)  # by end, and requests last


def _shifts(period_s: float, reach_s: float) -> list[float]:
    """How much earlier the baselines are: whole periods, so that none overlaps the hours around the event."""
    first = math.ceil(2 * reach_s / period_s)
    return [period_s * (first + k) for k in range(BASELINES)]


# ---- figures ------------------------------------------------------------------------------------------------------------------

Cell = list[list[Any]]  # the values of a stratum in a block, by minute
Stratum = Callable[[Seen], Hashable]


class Figure(NamedTuple):
    """A metric of live traffic. of: its value of a request, None where the record does not say. stratum: what is compared with its like only.
    level: what a block of a stratum comes to, None for too few; in logarithms for ratios. work: what may explain a change within a stratum.
    counted: the value is a share of requests, so that few requests say little however alike the blocks are. judged: it gets a verdict."""

    metric: Metric
    of: Callable[[Seen], Any]
    stratum: Stratum
    level: Callable[[Cell], float | None]
    work: Callable[[Seen], float | None] | None = None
    counted: bool = False
    judged: bool = True


def _bucket(tokens: int | None) -> int | None:
    """Powers of two: 0, 1, 2-3, 4-7, ..."""
    return None if tokens is None else tokens.bit_length()


def _who(seen: Seen) -> Hashable:
    return seen.model, seen.team


def _prompt(seen: Seen) -> Hashable:
    return seen.model, seen.team, _bucket(seen.prompt_tokens)


def _prompt_and_answer(seen: Seen) -> Hashable:
    return seen.model, seen.team, _bucket(seen.prompt_tokens), _bucket(seen.completion_tokens)


def _prompt_tokens(seen: Seen) -> float | None:
    return seen.prompt_tokens or None


def _all_tokens(seen: Seen) -> float | None:
    return seen.prompt_tokens * seen.completion_tokens or None if seen.prompt_tokens and seen.completion_tokens else None


def _answered(name: str) -> Callable[[Seen], float | None]:
    """A field of a request that was answered; of others it says when they were given up."""
    told = attrgetter(name)
    return lambda seen: told(seen) if seen.outcome in ("ok", None) else None


def _cached(seen: Seen) -> tuple[int, int] | None:
    return (seen.cached_tokens, seen.prompt_tokens) if seen.cached_tokens is not None and seen.prompt_tokens else None


def _failed(seen: Seen) -> tuple[int, int] | None:
    return None if seen.outcome is None else (seen.outcome in ("upstream_error", "timeout"), 1)


def _mean_ms(cell: Cell) -> float:
    return fmean(map(fmean, cell))


def _mean_log(cell: Cell) -> float:
    return fmean([fmean(map(_log, values)) for values in cell])


def _log_p95(cell: Cell) -> float | None:
    """Between the two nearest, by rank 0.95 (n + 1), which few requests do not make smaller."""
    values = sorted(value for values in cell for value in values)
    if len(values) < LEAST_REQUESTS:
        return None
    below, part = divmod(0.95 * (len(values) + 1), 1)
    low, high = _log(values[int(below) - 1]), _log(values[min(int(below), len(values) - 1)])
    return low + part * (high - low)


def _log(value: float) -> float:
    return math.log(max(value, 1e-3))  # a microsecond: no clock of ours is finer


def _share(cell: Cell) -> float:
    share: float = sum(part for values in cell for part, _ in values) / sum(whole for values in cell for _, whole in values)
    return share


def _ms(figure: str, title: str, scale: Any = "ratio", least: float = 0.0) -> Metric:
    return Metric(figure, title, "ms", "lower", scale, MARGIN, least)


FIGURES: tuple[Figure, ...] = (
    Figure(_ms("ttft_ms", "TTFT"), _answered("ttft_ms"), _prompt, _mean_log, _prompt_tokens),
    Figure(_ms("tpot_ms", "TPOT"), _answered("tpot_ms"), _prompt, _mean_log, _prompt_tokens),
    Figure(_ms("e2e_ms", "end to end"), _answered("e2e_ms"), _prompt_and_answer, _mean_log, _all_tokens),
    # Queues are often empty, and nothing is a multiple of 0.
    Figure(_ms("queue_ms", "queue time in the gateway", "difference", 1.0), _answered("queue_ms"), _prompt, _mean_ms),
    Figure(_ms("engine_queue_ms", "queue time in the engine", "difference", 1.0), _answered("engine_queue_ms"), _prompt, _mean_ms),
    Figure(Metric("hit_ratio", "cache hits", SHARE, "higher", "difference"), _cached, _prompt, _share),
    Figure(Metric("error_ratio", "errors", SHARE, "lower", "difference", 0.005), _failed, _who, _share, counted=True),
    Figure(_ms("ttft_ms.p95", "TTFT p95"), _answered("ttft_ms"), _prompt, _log_p95, judged=False),
    Figure(_ms("tpot_ms.p95", "TPOT p95"), _answered("tpot_ms"), _prompt, _log_p95, judged=False),
    Figure(_ms("e2e_ms.p95", "end to end p95"), _answered("e2e_ms"), _prompt_and_answer, _log_p95, judged=False),
)


# ---- requests -> one course of blocks -------------------------------------------------------------------------------------------


class Spot(NamedTuple):
    """Where a request belongs. course: today is 0 and baselines follow; or a is 0 and b is 1. side: what a stratum must be on each of."""

    course: int
    block: int
    minute: int
    side: Hashable


At = tuple[int, int]  # course and block
Strata = dict[Hashable, dict[At, dict[int, list[Seen]]]]  # by stratum, place and minute


class Placed:
    """Requests with their places."""

    def __init__(self, requests: list[tuple[Spot, Seen]]) -> None:
        self.requests = requests
        self.side_of: dict[At, Hashable] = {(spot.course, spot.block): spot.side for spot, _ in requests}
        self.sides = set(self.side_of.values())
        self._strata: dict[Stratum, Strata] = {}

    def strata(self, stratum: Stratum) -> Strata:
        if stratum not in self._strata:
            found: Strata = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
            for spot, seen in self.requests:
                found[stratum(seen)][spot.course, spot.block][spot.minute].append(seen)
            self._strata[stratum] = found
        return self._strata[stratum]

    def cells(self, stratum: Stratum, of: Callable[[Seen], Any]) -> dict[Hashable, dict[At, Cell]]:
        """The values that records do say."""
        found: dict[Hashable, dict[At, Cell]] = {}
        for key, places in self.strata(stratum).items():
            found[key] = {}
            for at, minutes in places.items():
                cell = [[value for value in map(of, there) if value is not None] for there in minutes.values()]
                if cell := [values for values in cell if values]:
                    found[key][at] = cell
        return found

    def counts(self, cells: Mapping[At, Iterable[Sequence[Any]]]) -> Counter[Hashable]:
        """How many there are on each side, those with none too."""
        counts = Counter(dict.fromkeys(self.sides, 0))
        for at, cell in cells.items():
            counts[self.side_of[at]] += sum(map(len, cell))
        return counts

    def says(self, of: Callable[[Seen], Any]) -> bool:
        return any(of(seen) is not None for _, seen in self.requests)


class Courses(NamedTuple):
    """A figure by course and block, all strata weighed alike. level: of all that is compared. requests: on each side."""

    at: Mapping[At, float]
    level: float
    requests: Counter[Hashable]


def _courses(placed: Placed, of: Callable[[Seen], Any], stratum: Stratum, level: Callable[[Cell], float | None]) -> Courses | None:
    """None where no stratum has enough requests on every side.

    Each stratum is centred on the mean of its sides, so that a stratum which is absent from some blocks does not move those."""
    cells = placed.cells(stratum, of)
    counts = {key: count for key, places in cells.items() if min((count := placed.counts(places)).values()) >= LEAST_REQUESTS}
    weights = {key: min(count.values()) for key, count in counts.items()}
    total = sum(weights.values())
    sums: dict[At, float] = defaultdict(float)
    present: dict[At, float] = defaultdict(float)
    middle = 0.0
    for key, weight in weights.items():
        levels = {at: found for at, cell in cells[key].items() if (found := level(cell)) is not None}
        by_side: dict[Hashable, list[float]] = defaultdict(list)
        for at, found in levels.items():
            by_side[placed.side_of[at]].append(found)
        if len(by_side) < len(placed.sides):
            total -= weight
            continue
        centre = fmean([fmean(values) for values in by_side.values()])
        middle += weight * centre
        for at, found in levels.items():
            sums[at] += weight * (found - centre)
            present[at] += weight
    if not total:
        return None
    return Courses(
        {at: sums[at] / there for at, there in present.items() if there >= LEAST_PRESENT * total}, middle / total, sum(counts.values(), Counter())
    )


# ---- the estimate ---------------------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """effect: from a to b. reach: half of the 95 % interval."""

    effect: float
    reach: float
    p: float


class _Design:
    """Least squares of a course of blocks on some columns, the last of which is the effect."""

    def __init__(self, *columns: Sequence[float]) -> None:
        self.n, self.k = len(columns[0]), len(columns)
        self.basis: list[list[float]] = []
        for column in columns:
            rest = [float(value) for value in column]
            for unit in self.basis:
                part = _dot(unit, rest)
                rest = [value - part * other for value, other in zip(rest, unit, strict=True)]
            size = math.sqrt(_dot(rest, rest))
            self.basis.append([value / size for value in rest])
        self.size = size  # of what is left of the effect's column
        last = self.basis[-1]
        self.overlaps = [_dot(last[k:], last) for k in range(self.n)]
        self.widths = [self._width(i / 100) for i in range(91)]

    def _width(self, rho: float) -> float:
        """Standard error of the effect by the residuals' length, at that correlation of neighbours."""
        along = self.overlaps[0] + 2 * sum(rho**lag * overlap for lag, overlap in enumerate(self.overlaps) if lag)
        lost = self.k * (1 + rho) / (1 - rho)  # residuals are smaller than the noise, the more so the slower it is
        return math.sqrt(max(along, 0.1) / max(self.n - lost, self.n / 3)) / self.size

    def estimate(self, values: Sequence[float]) -> tuple[float, float, float, list[float]]:
        """Effect, its standard error, the correlation of neighbours, the residuals."""
        rest, part = list(values), 0.0
        for unit in self.basis:
            part = _dot(unit, rest)
            rest = [value - part * other for value, other in zip(rest, unit, strict=True)]
        length = _dot(rest, rest)
        together = _dot(rest[1:], rest) / length if length else 0.0
        rho = min(0.9, max(0.0, (self.n * together + self.k) / (self.n - self.k - 1)))  # an estimate from few is too low by about that
        return part / self.size, math.sqrt(length) * self.widths[round(rho * 100)], rho, rest


@lru_cache(maxsize=64)
def _step(before: int, after: int, line: bool) -> _Design:
    """A step between so many blocks before and after, besides a level and, with `line`, a straight line through both."""
    columns = [[1.0] * (before + after), [0.0] * before + [1.0] * after]
    if line:
        columns.insert(1, [float(i) for i in range(before + after)])
    return _Design(*columns)


@lru_cache(maxsize=64)
def _mean(n: int) -> _Design:
    return _Design([1.0] * n)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(mul, left, right), 0.0)


def _estimated(design: _Design, values: Sequence[float], resamples: int, seed: int, least_error: float = 0.0) -> Estimate:
    """The effect with its interval and p, from courses that are made of the residuals' surprises and have no effect.

    least_error: a standard error that is known from elsewhere, for courses that may be smooth by chance."""
    effect, seen_error, rho, residuals = design.estimate(values)
    error = max(seen_error, least_error)
    if error <= 1e-12 * (1 + abs(effect)):  # every block is the same
        return Estimate(effect, 0.0, 1 / (resamples + 1) if abs(effect) > 1e-12 else 1.0)
    surprises = [value - rho * last for last, value in pairwise(residuals)]
    drift = fmean(surprises)
    surprises = [value - drift for value in surprises]
    rng, warm = Random(seed), round(3 / (1 - rho))  # noqa: S311 (nothing secret)
    apart = []
    for _ in range(resamples):
        course, now = [], 0.0
        for surprise in rng.choices(surprises, k=design.n + warm):
            now = rho * now + surprise
            course.append(now)
        off, error_there, _, _ = design.estimate(course[warm:])
        apart.append(abs(off) / error_there if error_there else 0.0)
    apart.sort()
    beyond = resamples - bisect_right(apart, abs(effect) / error)
    return Estimate(effect, apart[math.ceil((1 - ALPHA) * resamples) - 1] * error, (1 + beyond) / (resamples + 1))


TODAY_BEFORE, TODAY_AFTER, USUAL_BEFORE, USUAL_AFTER = ((usual, late) for usual in (False, True) for late in (False, True))  # sides of a spot


# ---- around an event --------------------------------------------------------------------------------------------------------------


def around_event(
    records: Log | Iterable[RequestRecord],
    event_at_s: float,
    window_s: float = WINDOW_S,
    *,
    settle_s: float = SETTLE_S,
    other_events_s: Sequence[float] = (),
    figures: Sequence[Figure] = FIGURES,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Judgement:
    """What changed with an event, as far as live traffic can say. other_events_s: what else happened, which would be taken for the effect.
    Raises BadComparison."""
    log = records if isinstance(records, Log) else kept(records, spans_around(event_at_s, window_s, settle_s))
    _expect_both_sides(log, event_at_s)
    shifts, period = _baselines(log, event_at_s, window_s + settle_s)
    if not shifts:
        window_s = min(window_s, MOST_STRAIGHT_S)
    marks = [event_at_s - shift for shift in (0.0, *shifts)]
    blocks = round(window_s / BLOCK_S)
    placed, dropped = _around(log, marks, blocks, settle_s)
    if not {TODAY_BEFORE, TODAY_AFTER} <= placed.sides:
        raise BadComparison(
            f"the log has no whole {BLOCK_S / 60:.0f} minutes of traffic on both sides of {timestamp(event_at_s)}; it holds {_reach(log)}"
        )
    load = _load_after(placed)
    checks = (
        _check_baseline(len(shifts), period),
        _check_other_events(other_events_s, event_at_s, marks, window_s + settle_s),
        *_check_mix(
            [seen for spot, seen in placed.requests if _is_before(spot, bool(shifts))],
            [seen for spot, seen in placed.requests if spot.side == TODAY_AFTER],
            ("before", "after"),
        ),
        _check_compared(placed),
        _check_load(load, "after the event, for what was to be expected"),
    )
    caveats = [
        "live traffic: nothing was interleaved, so whatever else changed at that time is in the difference",
        *_left_out(log),
        *([f"{dropped:,} requests in flight across the event, or within {settle_s:g} s of it, are left out"] if dropped else []),
    ]
    findings = [_finding(figure, placed, partial(_step_of, line=not shifts), load, resamples, seed) for figure in figures]
    return Judgement(
        "before", "after", "live traffic", f"{timestamp(event_at_s)}, {window_s / HOUR_S:.3g} h on each side",
        findings=_judged(findings, figures), checks=checks, controlled=False,
        caveats=tuple(dict.fromkeys([*caveats, *(check.what for check in checks if not check.ok)])),
    )  # fmt: skip


def _expect_both_sides(log: Log, event_at_s: float) -> None:
    if log.first_s > log.last_s:
        untimed = f": its {log.untimed:,} records have no ts" if log.untimed else ""
        raise BadComparison(f"the log holds no request with a time{untimed}")
    if not log.first_s < event_at_s < log.last_s:
        raise BadComparison(f"the event at {timestamp(event_at_s)} has no traffic on both sides; the log holds {_reach(log)}")


def _reach(log: Log) -> str:
    return f"{timestamp(log.first_s)} to {timestamp(log.last_s)}"


def _baselines(log: Log, event_at_s: float, reach_s: float) -> tuple[list[float], str]:
    """Weeks before, else days, else none, that the log holds wholly and in which there was traffic."""
    for period_s, name in ((WEEK_S, "week"), (DAY_S, "day")):
        shifts = [shift for shift in _shifts(period_s, reach_s) if event_at_s - shift - reach_s >= log.first_s - BLOCK_S]
        busy = [0] * len(shifts)
        for seen in log.seen:
            for i, shift in enumerate(shifts):
                busy[i] += abs(seen.started_s - event_at_s + shift) <= reach_s
        if found := [shift for shift, requests in zip(shifts, busy, strict=True) if requests >= LEAST_REQUESTS]:
            return found, name
    return [], ""


def _around(log: Log, marks: Sequence[float], blocks: int, settle_s: float) -> tuple[Placed, int]:
    """Requests with their places, by when they started, and how many were too near to the event. Blocks that the log holds in part are none."""
    placed, near = [], 0
    reach_s = settle_s + blocks * BLOCK_S
    bounds = [(mark, mark - reach_s, mark + reach_s) for mark in marks]
    for seen in log.seen:
        for course, (mark, start, end) in enumerate(bounds):
            if start < seen.started_s < end:
                after = seen.started_s - mark
                if abs(after) < settle_s or (after < 0 and seen.ended_s > mark):
                    near += course == 0
                    break
                past = abs(after) - settle_s
                block = int(past // BLOCK_S)
                edge = mark + math.copysign(settle_s + (block + 1) * BLOCK_S, after)
                if (edge + settle_s <= log.last_s) if after > 0 else (edge >= log.first_s - BLOCK_S / 10):
                    spot = Spot(course, block if after > 0 else -1 - block, int(past // MINUTE_S), (course > 0, after > 0))
                    placed.append((spot, seen))
                break
    return Placed(placed), near


def _is_before(spot: Spot, same_hours: bool) -> bool:
    """The traffic that the one after the event is held against: the same hours, or else those right before."""
    return spot.side == (USUAL_AFTER if same_hours else TODAY_BEFORE)


def _step_of(courses: Courses, line: bool) -> Sided:
    relative = sorted(_relative(courses).items())
    course = [value for _, value in relative]
    late = sum(block >= 0 for block, _ in relative)
    today = [courses.at[0, block] for block, _ in relative]
    early = len(course) - late
    return Sided(_step(early, late, line) if min(early, late) >= LEAST_BLOCKS else None, course, (today[:early], today[early:]))


def _relative(courses: Courses) -> dict[int, float]:
    """Today's blocks, less the mean of the same blocks of the baselines where there are any."""
    baselines: dict[int, list[float]] = defaultdict(list)
    for (course, block), value in courses.at.items():
        if course:
            baselines[block].append(value)
    today = {block: value for (course, block), value in courses.at.items() if not course}
    return {block: value - fmean(baselines[block]) for block, value in today.items() if block in baselines} if baselines else today


def _load_after(placed: Placed) -> float:
    """Requests per block after the event, by those before it, and by the same of the baselines."""
    counts = Counter(spot.side for spot, _ in placed.requests)
    blocks = Counter(placed.side_of.values())
    rate = {side: count / blocks[side] for side, count in counts.items()}
    usual = rate[USUAL_AFTER] / rate[USUAL_BEFORE] if {USUAL_BEFORE, USUAL_AFTER} <= rate.keys() else 1.0
    return rate[TODAY_AFTER] / rate[TODAY_BEFORE] / usual


# ---- two variants ---------------------------------------------------------------------------------------------------------------


def between_variants(
    records: Log | Iterable[RequestRecord], a: str, b: str, *, figures: Sequence[Figure] = FIGURES, resamples: int = RESAMPLES, seed: int = 0
) -> Judgement:
    """What variant b does, compared with a, over the blocks in which both were served. Controlled where both got the same kind of traffic at the same
    time. Raises BadComparison."""
    log = records if isinstance(records, Log) else kept(records)
    _expect_variants(log, a, b)
    names = {a: 0, b: 1}
    requests = [
        (Spot(names[seen.variant], int(seen.started_s // BLOCK_S), int(seen.started_s // MINUTE_S), names[seen.variant]), seen)
        for seen in log.seen
        if seen.variant in names
    ]
    placed = Placed(requests)
    arms = [[(spot, seen) for spot, seen in requests if spot.course == course] for course in (0, 1)]
    load = _load_between(arms)
    routing = (
        _check_same_time(arms, (a, b)),
        _check_steady(arms, b),
        *_check_mix([seen for _, seen in arms[0]], [seen for _, seen in arms[1]], (a, b)),
        _check_compared(placed),
        _check_load(load, f"for each engine of {b}, by those of {a}"),
    )
    controlled = all(check.ok for check in routing)
    caveats = [
        *([] if controlled else [f"not controlled: {', '.join(check.name for check in routing if not check.ok)}"]),
        "whether requests were routed by lot, the log does not say: the checks only see what they sent",
        *_left_out(log),
        *(check.what for check in routing if not check.ok),
    ]
    findings = [_finding(figure, placed, _difference_of, load or 1.0, resamples, seed) for figure in figures]
    return Judgement(
        a, b, "live traffic", f"{timestamp(min(seen.started_s for _, seen in requests))} to {timestamp(max(seen.ended_s for _, seen in requests))}",
        findings=_judged(findings, figures), checks=routing, controlled=controlled, caveats=tuple(dict.fromkeys(caveats)),
    )  # fmt: skip


def _expect_variants(log: Log, a: str, b: str) -> None:
    if log.first_s > log.last_s:
        untimed = f": its {log.untimed:,} records have no ts" if log.untimed else ""
        raise BadComparison(f"the log holds no request with a time{untimed}")
    if a == b:
        raise BadComparison(f"{a!r} is compared with itself; name two variants")
    there = Counter(seen.variant for seen in log.seen if seen.variant is not None)
    if missing := [name for name in (a, b) if name not in there]:
        have = ", ".join(f"{name} ({count:,})" for name, count in there.most_common(10)) or "none that names a variant"
        raise BadComparison(f"no request of variant {' or '.join(missing)} is in the log; there are requests of {have}")


def _difference_of(courses: Courses) -> Sided:
    both = sorted(block for course, block in courses.at if not course and (1, block) in courses.at)
    first, second = ([courses.at[course, block] for block in both] for course in (0, 1))
    course = [b - a for a, b in zip(first, second, strict=True)]
    return Sided(_mean(len(both)) if len(both) >= LEAST_BLOCKS else None, course, (first, second))


def _load_between(arms: Sequence[Sequence[tuple[Spot, Seen]]]) -> float | None:
    """Requests for each engine of b, by those of a; None where the log does not name engines."""
    engines = [{seen.upstream for _, seen in arm} for arm in arms]
    if any(None in each for each in engines):
        return None
    if engines[0] == engines[1]:
        return 1.0
    first, second = (len(arm) / len(each) for arm, each in zip(arms, engines, strict=True))
    return second / first


# ---- findings -------------------------------------------------------------------------------------------------------------------


class Sided(NamedTuple):
    """A course that an effect is estimated of, and the blocks of a and b as they were seen. design: None where there are too few blocks."""

    design: _Design | None
    course: list[float]
    levels: tuple[list[float], list[float]]


def _finding(figure: Figure, placed: Placed, sided: Callable[[Courses], Sided], load: float, resamples: int, seed: int) -> tuple[Finding, str | None]:
    """A finding without its verdict, and what else may explain it."""
    if (courses := _courses(placed, figure.of, figure.stratum, figure.level)) is None:
        return _nothing(figure.metric, placed.says(figure.of)), None
    design, course, (first, second) = sided(courses)
    blocks = len(first), len(second)
    if design is None:
        return _nothing(figure.metric, True, blocks), None
    least = math.sqrt(courses.level * (1 - courses.level) * sum(1 / count for count in courses.requests.values())) if figure.counted else 0.0
    found = _estimated(design, course, resamples, seed, least)
    values = tuple(courses.level + value for value in first), tuple(courses.level + value for value in second)
    longer = 0.0
    if figure.work is not None and (lengths := _courses(placed, figure.work, figure.stratum, _mean_log)) is not None:
        design, course, _ = sided(lengths)
        longer = design.estimate(course)[0] if design else 0.0
    return _measured(figure, found, values, blocks, min(courses.requests.values())), _explained(figure, found, load, longer)


def _nothing(metric: Metric, measured: bool, blocks: tuple[int, int] = (0, 0)) -> Finding:
    few = f"{TOO_LITTLE}: {min(blocks)} of {LEAST_BLOCKS} blocks of {BLOCK_S / 60:.0f} minutes that can be compared"
    return Finding(metric, None, None, None, None, None, None, None, "inconclusive", few if measured else "not measured", blocks)


def _measured(
    figure: Figure, found: Estimate, values: tuple[tuple[float, ...], tuple[float, ...]], blocks: tuple[int, int], requests: int
) -> Finding:
    """b is what was seen; a is what would have been without the effect."""
    metric = figure.metric
    reach = max(found.reach, 3 / requests) if figure.counted else found.reach  # nothing in n requests: up to 3 in n, 95 %
    b = fmean(values[1])
    a, effect, low, high = b - found.effect, found.effect, found.effect - reach, found.effect + reach
    if metric.scale == "ratio":
        a, b, effect, low, high = map(math.exp, (a, b, effect, low, high))
        values = tuple(map(math.exp, values[0])), tuple(map(math.exp, values[1]))
    else:
        a = max(0.0, a)
        metric = replace(metric, margin=MARGIN * a) if metric.unit == "ms" else metric
    return Finding(metric, a, b, effect, low, high, found.p, None, "inconclusive", NOT_JUDGED, blocks, values)


def _explained(figure: Figure, found: Estimate, load: float, longer: float) -> str | None:
    """What other than the change may have made the whole of an effect, or hidden one, as a sentence. longer: logarithm, within strata."""
    near = max(0.0, abs(found.effect) - found.reach)
    if near and figure.metric.unit == "ms" and (load > MOST_LOAD if found.effect > 0 else load < 1 / MOST_LOAD):
        return f"there were {load:.2g} times as many requests, which alone can do this"
    if abs(longer) > math.log1p(MARGIN) or (near and longer * found.effect > 0 and abs(longer) >= near):
        what = "prompts" if figure.work is _prompt_tokens else "prompts and answers"
        size = f"{abs(math.expm1(longer)) * 100:.2g} % {'longer' if longer > 0 else 'shorter'}"
        return f"{what} that were compared as alike became {size}, which may be all of it"
    return None


def _judged(measured: Sequence[tuple[Finding, str | None]], figures: Sequence[Figure]) -> tuple[Finding, ...]:
    """Holm's correction over what can get a verdict, then the verdicts."""
    family = [i for i, (found, _) in enumerate(measured) if found.p is not None and figures[i].judged]
    corrected = dict(zip(family, holm([measured[i][0].p or 0.0 for i in family]), strict=True))
    return tuple(
        _decided(replace(found, p_holm=corrected[i]), explained, len(family)) if i in corrected else found
        for i, (found, explained) in enumerate(measured)
    )


def _decided(found: Finding, explained: str | None, family: int) -> Finding:
    metric, effect, low, high, p = found.metric, found.effect or 0.0, found.low or 0.0, found.high or 0.0, found.p_holm or 0.0
    interval = f"{_amount(metric, low)} to {_amount(metric, high)}"
    if explained is not None:
        return replace(found, why=f"not clear: {interval}, but {explained}")
    if _too_small(found):
        return replace(found, verdict="equivalent", why=f"consistent with no change: {interval} lies within {_margin(metric)}")
    none = 1.0 if metric.scale == "ratio" else 0.0
    if p >= ALPHA or low <= none <= high:
        among = "" if low <= none <= high else f" (leaving out no change, which chance does among {family} metrics)"
        return replace(found, why=f"not clear: {interval} all fit{among}")
    better = (effect > none) is (metric.better == "higher")
    why = f"consistent with {'better' if better else 'worse'}: {_amount(metric, effect)} ({interval}), p {p:.2g} after Holm over {family} metrics"
    return replace(found, verdict="better" if better else "worse", why=why)


def _too_small(found: Finding) -> bool:
    """Whether the whole interval is a change that does not matter."""
    metric, low, high = found.metric, found.low or 0.0, found.high or 0.0
    if metric.scale == "difference":
        return max(abs(low), abs(high)) <= max(metric.margin, metric.least)
    return 1 / (1 + metric.margin) <= low and high <= 1 + metric.margin


def consistent(found: Finding) -> str:
    """A finding as live traffic may put it: consistent with 12 % lower, no sign of a change beyond 5 %, too little traffic to say."""
    if found.verdict in ("better", "worse") and found.effect is not None and found.low is not None and found.high is not None:
        metric = found.metric
        return f"consistent with {_amount(metric, found.effect)} ({_amount(metric, found.low)} to {_amount(metric, found.high)})"
    if found.verdict == "equivalent":
        return f"no sign of a change beyond {_margin(found.metric)}"
    return TOO_LITTLE if found.why.startswith(TOO_LITTLE) else found.why


def _amount(metric: Metric, effect: float) -> str:
    """12 % lower, 3.1 times, 2 points higher, 4 ms lower."""
    if metric.scale == "ratio" and effect >= 2:
        return f"{effect:.3g} times"
    size = (effect - 1) * 100 if metric.scale == "ratio" else effect * 100 if metric.unit == SHARE else effect
    unit = "%" if metric.scale == "ratio" else "points" if metric.unit == SHARE else metric.unit
    number = f"{abs(size):.1f}" if abs(size) < 99.95 else f"{abs(size):,.0f}"
    return f"{number.removesuffix('.0')} {unit} {'higher' if size >= 0 else 'lower'}"


def _margin(metric: Metric) -> str:
    if metric.scale == "ratio":
        return f"{metric.margin * 100:g} %"
    most = max(metric.margin, metric.least)
    return f"{most * 100:g} points" if metric.unit == SHARE else f"{most:.3g} {metric.unit}"


# ---- checks ---------------------------------------------------------------------------------------------------------------------


def _left_out(log: Log) -> list[str]:
    said = []
    if log.untimed:
        said.append(f"{log.untimed:,} records without ts are left out")
    if log.bad:
        said.append(f"{log.bad:,} lines that are no records are left out")
    if log.share < 1:
        said.append(f"the log is large: one request in {1 / log.share:g} was looked at, drawn by lot")
    return said


def _check_baseline(count: int, period: str) -> Check:
    if not count:
        what = (
            "the log holds no such hours of a day or week before: a straight line through both sides stands in for the course of the day, "
            "and a bend in it is taken for an effect"
        )
        return Check("baseline", False, what)
    same = "the same hours of the week" if period == "week" else "the same hours of the day, on other days of the week"
    than = f"{count} {period}{'s' if count > 1 else ''} before, and the hours right before the event"
    rest = "; a course of its own that this day took after the event is taken for an effect"
    return Check("baseline", True, f"held against {same}, {than}{rest}")


def _check_other_events(others: Sequence[float], event_at_s: float, marks: Sequence[float], reach_s: float) -> Check:
    inside = sorted(at for at in others if abs(at - event_at_s) > 1 and any(abs(at - mark) <= reach_s for mark in marks))
    if inside:
        return Check("other events", False, f"{len(inside)} other events lie in the hours compared, the first at {timestamp(inside[0])}")
    return Check("other events", True, "no other event is known in the hours compared")


def _check_mix(a: Sequence[Seen], b: Sequence[Seen], names: tuple[str, str]) -> list[Check]:
    """Distance of prompt lengths (Kolmogorov and Smirnov) and of the shares of teams and models. Strata take both out, as far as they go."""
    lengths = [sorted(seen.prompt_tokens for seen in side if seen.prompt_tokens is not None) for side in (a, b)]
    checks = []
    if all(lengths):
        apart = max(
            abs(bisect_right(lengths[0], at) / len(lengths[0]) - bisect_right(lengths[1], at) / len(lengths[1])) for at in {*lengths[0], *lengths[1]}
        )
        chance = 1.63 * math.sqrt(sum(1 / len(side) for side in lengths))  # 1 %: Smirnov
        middle = " and ".join(f"{median(side):g} {name}" for side, name in zip(lengths, names, strict=True))
        alike = apart <= max(MOST_APART, chance)
        checks.append(
            Check(
                "mix", alike, f"prompts {'are alike in length' if alike else 'differ in length'} (median {middle}; distance {apart:.2f}, 0 is alike)"
            )
        )
    else:
        checks.append(Check("mix", False, "the log does not tell the lengths of prompts, so they may differ"))
    shares = [Counter((seen.team, seen.model) for seen in side) for side in (a, b)]
    apart = sum(abs(shares[0][who] / max(len(a), 1) - shares[1][who] / max(len(b), 1)) for who in {*shares[0], *shares[1]}) / 2
    alike = apart <= MOST_APART + math.sqrt(1 / max(len(a), 1) + 1 / max(len(b), 1))
    checks.append(
        Check(
            "teams",
            alike,
            f"teams and models have {'like' if alike else 'other'} shares of {names[0]} and {names[1]} (distance {apart:.2f}, 0 is alike)",
        )
    )
    return checks


def _check_compared(placed: Placed) -> Check:
    """How much of the traffic is in strata that every side has."""
    sizes = [placed.counts({at: list(minutes.values()) for at, minutes in places.items()}) for places in placed.strata(_prompt).values()]
    share = sum(count.total() for count in sizes if min(count.values()) >= LEAST_REQUESTS) / len(placed.requests)
    return Check(
        "compared",
        share >= LEAST_COMPARED,
        f"{share * 100:.0f} % of the requests have their like (team, model, length of prompt) on every side; the rest is left out",
    )


def _check_load(load: float | None, of: str) -> Check:
    if load is None:
        return Check("load", False, "the log does not name engines, so the load on each may differ")
    return Check("load", 1 / MOST_LOAD <= load <= MOST_LOAD, f"{load:.2g} times as many requests {of}")


def _check_same_time(arms: Sequence[Sequence[tuple[Spot, Seen]]], names: tuple[str, str]) -> Check:
    first, second = ({spot.block for spot, _ in arm} for arm in arms)
    share = len(first & second) / len(first | second)
    return Check(
        "same time",
        share >= LEAST_SHARED,
        f"{names[0]} and {names[1]} both had traffic in {share * 100:.0f} % of the blocks of {BLOCK_S / 60:.0f} minutes",
    )


def _check_steady(arms: Sequence[Sequence[tuple[Spot, Seen]]], b: str) -> Check:
    """Whether b's share of the requests stays: by the hour, within ten points and what chance does."""
    hours = [Counter(spot.block // 6 for spot, _ in arm) for arm in arms]
    whole = len(arms[1]) / sum(map(len, arms))
    shares = []
    for hour in {*hours[0], *hours[1]}:
        count = hours[0][hour] + hours[1][hour]
        if count >= LEAST_REQUESTS:
            shares.append((hours[1][hour] / count, 3 * math.sqrt(whole * (1 - whole) / count)))
    steady = all(abs(share - whole) <= MOST_APART + chance for share, chance in shares)
    span = f"{min(shares)[0] * 100:.0f} to {max(shares)[0] * 100:.0f} % of an hour" if shares else "not told by the hour"
    return Check("steady share", steady, f"{b} got {whole * 100:.0f} % of the requests ({span})")
