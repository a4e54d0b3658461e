"""Comparison of log-probabilities with recorded runs, token by token, and the noise learned from those runs. Pure.

Invariant: runs that agree to the last bit are one computation and count once, so that an idle engine, which repeats
itself, is no better evidence than one run.

For token t with B recorded and K new computations: z = (mean_K new - mean_B recorded) / sqrt((s^2 + m^2)(1/K + 1/B)),
s the standard deviation of the recorded ones, m the median of s over all tokens. Z2 = mean of z^2 shows damage of many
tokens, the largest |z| damage of few. Standardising each token matters because noise differs fifty-fold between tokens.
No limit carries over between models: each baseline has its own, from its own runs without damage."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from exporters.statistics import quantile

# Above the worst run without damage; sets of 16 to 24 such runs differ by up to this factor (largest |z|: by 2).
MARGIN = 1.5
# Least limits, above what independent noise reaches by itself with two thousand tokens (0.7 and 4).
LEAST_Z2, LEAST_Z = 1.0, 6.0
CHECK_RUNS = 4  # runs of one check; they average noise, not damage

Vector = Sequence[float]
Run = Sequence[Vector]  # one vector for each prompt


class TokenNoise(msgspec.Struct, frozen=True):
    """Recorded log-probabilities of a prompt's tokens: means and standard deviations over `distinct` computations."""

    mean: tuple[float, ...]
    sd: tuple[float, ...]
    distinct: int


class NoiseLimits(msgspec.Struct, frozen=True):
    """Limits learned from runs without damage. least_sd: m of the formula, 0 for an engine that repeats every bit at
    every batch size; then each difference counts. mean_abs, max_abs: worst differences among those runs, in nats."""

    least_sd: float
    z2: float
    max_z: float
    mean_abs: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Token of a prompt. position: from 0, in the prompt's token ids."""

    prompt: int
    position: int


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Size of a difference in nats. z2, max_z: None without noise to compare with. worst, first: tokens with the
    largest difference and with the first one, None where all are equal."""

    tokens: int
    mean_abs: float
    p99: float
    max_abs: float
    z2: float | None = None
    max_z: float | None = None
    worst: TokenPlace | None = None
    first: TokenPlace | None = None

    @property
    def equal(self) -> bool:
        return self.max_abs == 0


def distinct(vectors: Sequence[Vector]) -> list[Vector]:
    """Return the computations among runs of a prompt: those that differ in any bit."""
    return list(dict.fromkeys(map(tuple, vectors)))


def token_noise(vectors: Sequence[Vector]) -> TokenNoise:
    """Return mean and standard deviation of each token over the distinct runs of a prompt."""
    found = distinct(vectors)
    columns = list(zip(*found, strict=True))
    # a mean of equal values may differ from them in the last bit
    mean = tuple(column[0] if len(found) == 1 else statistics.fmean(column) for column in columns)
    sd = tuple(_deviation(column, each) for column, each in zip(columns, mean, strict=True))
    return TokenNoise(mean, sd, len(found))


def _deviation(values: Vector, mean: float) -> float:
    """Return the standard deviation; statistics.stdev is exact and ten times slower."""
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def least_sd(noise: Sequence[TokenNoise]) -> float:
    """Return the median standard deviation of all tokens; their root mean square where most tokens have none."""
    found = [sd for each in noise for sd in each.sd]
    return statistics.median(found) or math.sqrt(statistics.fmean(sd * sd for sd in found))


def compare(noise: Sequence[TokenNoise], floor: float, runs: Sequence[Run]) -> LogprobDifference:
    """Compare runs with recorded noise. floor: `least_sd` of the record."""
    sizes: list[float] = []
    scores: list[float] = []
    places: list[TokenPlace] = []
    for prompt, each in enumerate(noise):
        found = distinct([run[prompt] for run in runs])
        spread = 1 / len(found) + 1 / each.distinct
        for token, (mean, sd, values) in enumerate(zip(each.mean, each.sd, zip(*found, strict=True), strict=True)):
            difference = (values[0] if len(found) == 1 else statistics.fmean(values)) - mean
            sizes.append(abs(difference))
            places.append(TokenPlace(prompt, token + 1))  # the first token has no log-probability
            if floor:
                scores.append(abs(difference) / math.sqrt((sd * sd + floor * floor) * spread))
    largest = max(sizes)
    return LogprobDifference(
        len(sizes),
        statistics.fmean(sizes),
        quantile(sizes, 0.99),
        largest,
        statistics.fmean(z * z for z in scores) if scores else None,
        max(scores) if scores else None,
        places[sizes.index(largest)] if largest else None,
        next((place for place, size in zip(places, sizes, strict=True) if size), None),
    )


def learn(levels: Mapping[int, Sequence[Run]]) -> tuple[list[TokenNoise], NoiseLimits]:
    """Learn noise and limits from runs by batch size. Each limit is above the worst of held-out runs: single ones, all
    of a batch size, and mixtures of sizes, as checks may meet them."""
    runs = list(itertools.chain.from_iterable(levels.values()))
    noise = _noise(runs)
    floor = least_sd(noise)
    if not floor:
        return noise, NoiseLimits(0.0, 0.0, 0.0, 0.0, 0.0)
    held_out = [_without(runs, part, floor) for part in _parts(levels)]
    return noise, NoiseLimits(
        floor,
        max(LEAST_Z2, MARGIN * max(found.z2 or 0.0 for found in held_out)),
        max(LEAST_Z, MARGIN * max(found.max_z or 0.0 for found in held_out)),
        max(found.mean_abs for found in held_out),
        max(found.max_abs for found in held_out),
    )


def _noise(runs: Sequence[Run]) -> list[TokenNoise]:
    return [token_noise(vectors) for vectors in zip(*runs, strict=True)]


def _without(runs: Sequence[Run], part: Sequence[int], floor: float) -> LogprobDifference:
    rest = [run for number, run in enumerate(runs) if number not in part]
    return compare(_noise(rest), floor, [runs[number] for number in part])


def _parts(levels: Mapping[int, Sequence[Run]]) -> Iterator[Sequence[int]]:
    """Yield the numbers of held-out runs."""
    ends = list(itertools.accumulate(map(len, levels.values())))
    numbers = [range(end - len(runs), end) for end, runs in zip(ends, levels.values(), strict=True)]
    yield from ((number,) for number in range(ends[-1]))
    if len(numbers) > 1:
        yield from numbers
        for turn in range(max(map(len, numbers))):
            mixed = [of_level[turn % len(of_level)] for of_level in numbers]
            yield from (mixed[start : start + CHECK_RUNS] for start in range(0, len(mixed) - CHECK_RUNS + 1, 2))


def is_beyond(difference: LogprobDifference, limits: NoiseLimits) -> bool:
    """Return whether a difference is more than noise."""
    if not limits.least_sd:
        return not difference.equal
    return (difference.z2 or 0.0) > limits.z2 or (difference.max_z or 0.0) > limits.max_z


# Log-probabilities are 32-bit floats: below NEAR nats they are off by up to a quarter of 1e-6 each. A grid finer than
# this would hold a third of all numbers by chance.
NEAR = 8.0
_FINEST_BITS, _OFF_GRID = 18, 5.5e-7
_LEAST_GAPS, _ON_GRID = 20, 0.9


def logit_bits(gaps: Sequence[float]) -> int | None:
    """Return q if differences between log-probabilities of one position are multiples of 2^-q; None if of no such grid.

    gaps: of log-probabilities above -NEAR. Logits of 16-bit floats lie on a grid, 8 times finer for float16 than for
    bfloat16; 32-bit logits lie on none that shows. So another grid is evidence of another dtype."""
    if len(gaps) < _LEAST_GAPS:
        return None
    for bits in range(_FINEST_BITS + 1):
        step = 2.0**-bits
        if sum(abs(gap - step * round(gap / step)) <= _OFF_GRID for gap in gaps) >= _ON_GRID * len(gaps):
            return bits
    return None
