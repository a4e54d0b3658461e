"""Series of blocks of live traffic: each metric's level in every ten minutes, over strata that are weighed alike.

Requests are compared within strata (model, team, length of the prompt by powers of two; end to end also by length of
the answer), so that a changed mix is no effect."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from exporters.statistics import quantile
from stack.tuning.comparison import MARGIN, SHARE, ComparedMetric
from stack.tuning.samples import RequestSample

MINUTE_S, BLOCK_S = 60.0, 600.0
LEAST_REQUESTS = 20  # of a stratum on each side; and of a block for its p95
LEAST_PRESENT = 0.5  # of the strata's weight that a block must have

Minutes = list[list[Any]]  # the values of a stratum in a block, by minute
Stratum = Callable[[RequestSample], Hashable]


class LiveMetric(NamedTuple):
    """A metric of live traffic.

    of: its value of a request, None where the record does not say. stratum: what is compared with its like only. level:
    of a block of a stratum, None for too few; in logarithms for ratios. work: what may explain a change within a
    stratum. counted: the value is a share of requests, so that few requests say little however alike the blocks are.
    has_verdict: it gets one."""

    metric: ComparedMetric
    of: Callable[[RequestSample], Any]
    stratum: Stratum
    level: Callable[[Minutes], float | None]
    work: Callable[[RequestSample], float | None] | None = None
    counted: bool = False
    has_verdict: bool = True


def _bucket(tokens: int | None) -> int | None:
    """Group by powers of two: 0, 1, 2-3, 4-7, ..."""
    return None if tokens is None else tokens.bit_length()


def _who(sample: RequestSample) -> Hashable:
    return sample.model, sample.team


def by_prompt(sample: RequestSample) -> Hashable:
    return sample.model, sample.team, _bucket(sample.prompt_tokens)


def _prompt_and_answer(sample: RequestSample) -> Hashable:
    return sample.model, sample.team, _bucket(sample.prompt_tokens), _bucket(sample.completion_tokens)


def prompt_tokens(sample: RequestSample) -> float | None:
    return sample.prompt_tokens or None


def _all_tokens(sample: RequestSample) -> float | None:
    return (sample.prompt_tokens or 0) * (sample.completion_tokens or 0) or None


def _answered(name: str) -> Callable[[RequestSample], float | None]:
    """Return a reader of a field of answered requests; of others it says when they were given up."""
    read = attrgetter(name)
    return lambda sample: read(sample) if sample.outcome in ("ok", None) else None


def _cached(sample: RequestSample) -> tuple[int, int] | None:
    if sample.cached_tokens is None or not sample.prompt_tokens:
        return None
    return sample.cached_tokens, sample.prompt_tokens


def _failed(sample: RequestSample) -> tuple[int, int] | None:
    return None if sample.outcome is None else (sample.outcome in ("upstream_error", "timeout"), 1)


def _mean_ms(minutes: Minutes) -> float:
    return fmean(map(fmean, minutes))


def mean_log(minutes: Minutes) -> float:
    return fmean([fmean(map(_log, values)) for values in minutes])


def _log_p95(minutes: Minutes) -> float | None:
    """Return the p95 by rank 0.95 (n + 1), which few requests do not make smaller."""
    logs = [_log(value) for values in minutes for value in values]
    return quantile(logs, 0.95, "weibull") if len(logs) >= LEAST_REQUESTS else None


def _log(value: float) -> float:
    return math.log(max(value, 1e-3))  # a microsecond: no clock of ours is finer


def _share(minutes: Minutes) -> float:
    share: float = sum(part for values in minutes for part, _ in values) / sum(
        whole for values in minutes for _, whole in values
    )
    return share


def _ms(figure: str, title: str, scale: Any = "ratio", least: float = 0.0) -> ComparedMetric:
    return ComparedMetric(figure, title, "ms", "lower", scale, MARGIN, least)


LIVE_METRICS: tuple[LiveMetric, ...] = (
    LiveMetric(_ms("ttft_ms", "TTFT"), _answered("ttft_ms"), by_prompt, mean_log, prompt_tokens),
    LiveMetric(_ms("tpot_ms", "TPOT"), _answered("tpot_ms"), by_prompt, mean_log, prompt_tokens),
    LiveMetric(_ms("e2e_ms", "end to end"), _answered("e2e_ms"), _prompt_and_answer, mean_log, _all_tokens),
    # Queues are often empty, and nothing is a multiple of 0.
    LiveMetric(
        _ms("queue_ms", "queue time in the gateway", "difference", 1.0), _answered("queue_ms"), by_prompt, _mean_ms
    ),
    LiveMetric(
        _ms("engine_queue_ms", "queue time in the engine", "difference", 1.0),
        _answered("engine_queue_ms"),
        by_prompt,
        _mean_ms,
    ),
    LiveMetric(ComparedMetric("hit_ratio", "cache hits", SHARE, "higher", "difference"), _cached, by_prompt, _share),
    LiveMetric(
        ComparedMetric("error_ratio", "errors", SHARE, "lower", "difference", 0.005),
        _failed,
        _who,
        _share,
        counted=True,
    ),
    LiveMetric(_ms("ttft_ms.p95", "TTFT p95"), _answered("ttft_ms"), by_prompt, _log_p95, has_verdict=False),
    LiveMetric(_ms("tpot_ms.p95", "TPOT p95"), _answered("tpot_ms"), by_prompt, _log_p95, has_verdict=False),
    LiveMetric(
        _ms("e2e_ms.p95", "end to end p95"), _answered("e2e_ms"), _prompt_and_answer, _log_p95, has_verdict=False
    ),
)


# ---- requests -> series of blocks ---------------------------------------------------------------------------------


class BlockPosition(NamedTuple):
    """The place of a request.

    series: today is 0 and baselines follow; or a is 0 and b is 1. side: what a stratum must be on each of."""

    series: int
    block: int
    minute: int
    side: Hashable


Placed = list[tuple[BlockPosition, RequestSample]]
At = tuple[int, int]  # series and block
Strata = dict[Hashable, dict[At, dict[int, list[RequestSample]]]]  # by stratum, place and minute


class SamplesByBlock:
    """Requests with their places."""

    def __init__(self, requests: Placed) -> None:
        self.requests = requests
        self.side_of: dict[At, Hashable] = {
            (position.series, position.block): position.side for position, _ in requests
        }
        self.sides = set(self.side_of.values())
        self._strata: dict[Stratum, Strata] = {}

    def strata(self, stratum: Stratum) -> Strata:
        if stratum not in self._strata:
            found: Strata = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
            for position, sample in self.requests:
                found[stratum(sample)][position.series, position.block][position.minute].append(sample)
            self._strata[stratum] = found
        return self._strata[stratum]

    def cells(self, stratum: Stratum, of: Callable[[RequestSample], Any]) -> dict[Hashable, dict[At, Minutes]]:
        """Return the values that records do say."""
        found: dict[Hashable, dict[At, Minutes]] = {}
        for key, places in self.strata(stratum).items():
            found[key] = {}
            for at, minutes in places.items():
                cell = [[value for value in map(of, there) if value is not None] for there in minutes.values()]
                if cell := [values for values in cell if values]:
                    found[key][at] = cell
        return found

    def counts(self, cells: Mapping[At, Iterable[Sequence[Any]]]) -> Counter[Hashable]:
        """Count the values on each side, those with none too."""
        counts = Counter(dict.fromkeys(self.sides, 0))
        for at, cell in cells.items():
            counts[self.side_of[at]] += sum(map(len, cell))
        return counts

    def says(self, of: Callable[[RequestSample], Any]) -> bool:
        return any(of(sample) is not None for _, sample in self.requests)


class SeriesByBlock(NamedTuple):
    """A metric by series and block, all strata weighed alike.

    level: of all that is compared. requests: on each side."""

    at: Mapping[At, float]
    level: float
    requests: Counter[Hashable]


def series_by_block(
    placed: SamplesByBlock,
    of: Callable[[RequestSample], Any],
    stratum: Stratum,
    level: Callable[[Minutes], float | None],
) -> SeriesByBlock | None:
    """Return the series of a metric, None where no stratum has enough requests on every side.

    Each stratum is centred on the mean of its sides, so that a stratum which is absent from some blocks does not move
    those."""
    cells = placed.cells(stratum, of)
    counts = {
        key: count for key, places in cells.items() if min((count := placed.counts(places)).values()) >= LEAST_REQUESTS
    }
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
    return SeriesByBlock(
        {at: sums[at] / there for at, there in present.items() if there >= LEAST_PRESENT * total},
        middle / total,
        sum(counts.values(), Counter()),
    )
