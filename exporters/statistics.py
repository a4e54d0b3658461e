"""Statistics: quantiles, Student's t and power, Holm, Kolmogorov-Smirnov, least squares, block bootstrap, sequential
tests.

Invariant: arithmetic on numbers alone; no run, request or metric is known here. tests/exporters/test_statistics.py
holds each function against SciPy, which is no dependency of the product (CONTRIBUTING.md, decisions)."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import mul
from random import Random
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

# ---- quantiles ----------------------------------------------------------------------------------------------------

# numpy's names. linear: between the two nearest, the extremes at 0 and 1. weibull: rank share * (n + 1), which few
# values do not make smaller. inverted_cdf: nearest rank, always one of the values.
QuantileMethod = Literal["linear", "weibull", "inverted_cdf"]


def quantiles(values: Iterable[float], shares: Iterable[float], method: QuantileMethod = "linear") -> list[float]:
    """Return the quantiles of at least one value. shares: 0 to 1."""
    ordered = sorted(values)
    n, found = len(ordered), []
    for share in shares:
        # the place in the order, from 0; a fraction lies between two of them
        places = {"linear": share * (n - 1), "weibull": share * (n + 1) - 1, "inverted_cdf": math.ceil(share * n) - 1}
        place = min(max(places[method], 0), n - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        found.append(low + (high - low) * (place - math.floor(place)))
    return found


def quantile(values: Iterable[float], share: float, method: QuantileMethod = "linear") -> float:
    """Return one quantile, such as 0.95."""
    return quantiles(values, (share,), method)[0]


def median_or_none(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# ---- Student's t and power ----------------------------------------------------------------------------------------


def two_sided_p(t: float, df: int) -> float:
    """Return how often chance alone goes as far from 0 as t: finite sums in cos(atan(t / sqrt(df))).

    Source: Abramowitz and Stegun 26.7.3, 26.7.4."""
    angle = math.atan2(abs(t), math.sqrt(df))
    odd = df % 2 == 1
    term = total = math.cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, df - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    bracket = math.sin(angle) * total if df > 1 else 0.0
    return min(max(1.0 - (2 / math.pi * (angle + bracket) if odd else bracket), 0.0), 1.0)


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, df: int) -> float:
    """Return the t between whose negative and itself lies that share: 0.95 and 10 give 2.228."""
    low, high = 0.0, 1.0
    while two_sided_p(high, df) > 1 - confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > 1 - confidence else (low, middle)
    return high


def detectable_effect(df: int, alpha: float, power: float) -> float:
    """Return the smallest true effect, in standard errors, that a two-sided t test finds that often."""
    t, low, high = t_quantile(1 - alpha, df), 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if exceedance(middle, t, df) < power else (low, middle)
    return high


def exceedance(effect: float, t: float, df: int) -> float:
    """Return how often an effect, in standard errors, goes beyond t: the upper tail of noncentral t.

    The normal, averaged over what the standard error may be estimated at (chi)."""
    estimates = [step / 100 for step in range(1, 400)]
    weights = [math.exp((df - 1) * math.log(each) - df * (each * each - 1) / 2) for each in estimates]
    beyond = (weight * NormalDist().cdf(effect - t * each) for weight, each in zip(weights, estimates, strict=True))
    return sum(beyond) / sum(weights)


# ---- several tests, two samples -----------------------------------------------------------------------------------


def holm(ps: Sequence[float]) -> list[float]:
    """Return each p after Holm's correction, in the given order."""
    adjusted, most = [1.0] * len(ps), 0.0
    for done, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        most = max(most, min(1.0, ps[place] * (len(ps) - done)))
        adjusted[place] = most
    return adjusted


def ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order, from 0; equal values share theirs."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


def ks_distance(left: Iterable[float], right: Iterable[float]) -> float:
    """Return the largest gap between the shares of two samples at or below any value (Kolmogorov, Smirnov)."""
    first, second = sorted(left), sorted(right)
    places = {*first, *second}
    return max(abs(bisect_right(first, at) / len(first) - bisect_right(second, at) / len(second)) for at in places)


def ks_critical(left: int, right: int) -> float:
    """Return the distance that samples of these sizes from one distribution exceed in 1 % (Smirnov's asymptote)."""
    return 1.63 * math.sqrt(1 / left + 1 / right)


# ---- least squares ------------------------------------------------------------------------------------------------

Column = tuple[float, ...]


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(mul, left, right), 0.0)


class Axis(NamedTuple):
    """A column that is orthogonal to those before it, and its squared length."""

    column: Column
    weight: float


def residuals(values: Sequence[float], axes: Iterable[Axis]) -> Sequence[float]:
    """Return what is left of the values when orthogonal axes are taken out."""
    for column, weight in axes:
        share = dot(column, values) / weight
        values = [value - share * x for value, x in zip(values, column, strict=True)]
    return values


def free_axis(column: Sequence[float], axes: Iterable[Axis]) -> Axis:
    """Return the part of a column that is orthogonal to the axes."""
    left = tuple(residuals(column, axes))
    return Axis(left, dot(left, left))


class Estimate(NamedTuple):
    """A coefficient, its standard error (None: too few values for one) and degrees of freedom."""

    value: float
    error: float | None
    df: int

    @property
    def p(self) -> float | None:
        if self.error is None:
            return None
        infinite = math.copysign(math.inf, self.value) if self.value else 0.0
        return two_sided_p(self.value / self.error if self.error else infinite, self.df)

    def interval(self, alpha: float) -> tuple[float, float] | None:
        if self.error is None:
            return None
        reach = t_quantile(1 - alpha, self.df) * self.error
        return self.value - reach, self.value + reach


class Design(NamedTuple):
    """Least squares on columns, of which the last one is the effect; axes: each made free of those before it.

    The effect is the coefficient of its free part (Frisch, Waugh and Lovell)."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, *columns: Sequence[float]) -> Design:
        axes: tuple[Axis, ...] = ()
        for column in columns:
            axes = (*axes, free_axis(column, axes))
        return cls(axes)

    @property
    def effect(self) -> Axis:
        return self.axes[-1]

    @property
    def df(self) -> int:
        return len(self.effect.column) - len(self.axes)

    def fit(self, values: Sequence[float]) -> tuple[float, Sequence[float]]:
        """Return the effect and the residuals."""
        left = residuals(values, self.axes[:-1])
        return dot(self.effect.column, left) / self.effect.weight, residuals(left, self.axes[-1:])

    def estimate(self, values: Sequence[float]) -> Estimate:
        value, left = self.fit(values)
        return Estimate(
            value, math.sqrt(dot(left, left) / self.df / self.effect.weight) if self.df > 0 else None, self.df
        )


@lru_cache(maxsize=64)
def mean_design(n: int) -> Design:
    return Design.of([1.0] * n)


# ---- runs of two variants, with a drift ---------------------------------------------------------------------------


@lru_cache(maxsize=256)
def run_design(of_b: Column, when: Column, drift: bool) -> Design:
    """Return the design of variant b's effect beside a constant and, with `drift`, a line and a bend over time.

    With few runs or one time the drift has fewer terms; none where the variant is nothing but an early or late time."""
    middle = fmean(when)
    degree = min(2, (len(when) - 2) // 3, len(set(when)) - 1) if drift else 0
    full = Design.of(*([(at - middle) ** power for at in when] for power in range(degree + 1)), of_b)
    return Design.of(full.axes[0].column, of_b) if full.effect.weight < 1e-9 else full


def variant_effect(
    values: Sequence[float], of_b: Sequence[bool], when: Sequence[float], drift: bool = True
) -> Estimate:
    """Return how much more the runs of b have than those of a, with a drift taken out. There must be a run of each."""
    return run_design(tuple(map(float, of_b)), tuple(when), drift).estimate(values)


def drift_terms(values: Sequence[float], of_b: Sequence[bool], when: Sequence[float]) -> tuple[list[Estimate], float]:
    """Return line and bend of the drift with the variant taken out, and how far apart they make two runs at most."""
    variant = tuple(map(float, of_b))
    constant, *terms = (axis.column for axis in run_design(variant, tuple(when), True).axes[:-1])
    found = [
        Design.of(constant, *(other for other in terms if other is not term), variant, term).estimate(values)
        for term in terms
    ]
    curve = [dot([one.value for one in found], column) for column in zip(*terms, strict=True)]
    return found, max(curve, default=0.0) - min(curve, default=0.0)


def deleted_residuals(
    values: Sequence[float], of_b: Sequence[bool], when: Sequence[float], drift: bool = True
) -> tuple[list[tuple[float, float]], int]:
    """Return each run's distance from the fit to all other runs and its t, and t's degrees of freedom (n - terms - 2).

    With residual r and leverage h of the fit to all runs: apart = r / (1 - h), t = r / sqrt(s^2 (1 - h)), s^2 = (SSE -
    r^2 / (1 - h)) / df. A run that decides a coefficient alone (h = 1) has 0. Where the others have no scatter, a run
    off their line has an infinite t. Source: Cook and Weisberg, Residuals and Influence, 2.2."""
    fit = run_design(tuple(map(float, of_b)), tuple(when), drift)
    left, df = residuals(values, fit.axes), fit.df - 1
    free = [1 - sum(axis.column[at] ** 2 / axis.weight for axis in fit.axes) for at in range(len(values))]
    least = 1e-9 * max(map(abs, values), default=0.0)  # what rounding leaves
    squares = dot(left, left)
    return [_deleted(r if abs(r) > least else 0.0, share, squares, df) for r, share in zip(left, free, strict=True)], df


def _deleted(residual: float, free: float, squares: float, df: int) -> tuple[float, float]:
    if free < 1e-9 or df < 1 or not residual:
        return 0.0, 0.0
    variance = (squares - residual * residual / free) / df
    t = residual / math.sqrt(variance * free) if variance > 1e-12 * squares else math.copysign(math.inf, residual)
    return residual / free, t


# ---- series of blocks whose neighbours are alike ------------------------------------------------------------------


class SeriesFit(NamedTuple):
    """An effect in a series of blocks, its standard error, the correlation of neighbours, and the residuals."""

    effect: float
    error: float
    correlation: float
    residuals: Sequence[float]


class SeriesDesign:
    """Least squares of a series of blocks, with standard errors widened by the correlation of neighbours."""

    def __init__(self, design: Design) -> None:
        self.design, self.n, self.k = design, len(design.effect.column), len(design.axes)
        column, weight = design.effect
        self._overlaps = [dot(column[lag:], column) / weight for lag in range(self.n)]
        self._widths = [self._width(i / 100) for i in range(91)]

    def _width(self, correlation: float) -> float:
        """Return the standard error of the effect by the residuals' length, at that correlation of neighbours."""
        neighbours = sum(correlation**lag * overlap for lag, overlap in enumerate(self._overlaps) if lag)
        along = self._overlaps[0] + 2 * neighbours
        # residuals are smaller than the noise, the more so the slower it is
        lost = self.k * (1 + correlation) / (1 - correlation)
        return math.sqrt(max(along, 0.1) / max(self.n - lost, self.n / 3) / self.design.effect.weight)

    def fit(self, values: Sequence[float]) -> SeriesFit:
        effect, left = self.design.fit(values)
        squares = dot(left, left)
        together = dot(left[1:], left) / squares if squares else 0.0
        # an estimate from few is too low by about (1 + k) / n
        correlation = min(0.9, max(0.0, (self.n * together + self.k) / (self.n - self.k - 1)))
        return SeriesFit(effect, math.sqrt(squares) * self._widths[round(correlation * 100)], correlation, left)


class SeriesEstimate(NamedTuple):
    """An effect in a series, half of its interval, and p."""

    effect: float
    reach: float
    p: float


def bootstrap(
    design: SeriesDesign, values: Sequence[float], resamples: int, seed: int, alpha: float, least_error: float = 0.0
) -> SeriesEstimate:
    """Return the effect with its interval and p by a studentised bootstrap of a first-order autoregression.

    Series without an effect are made of the residuals' surprises, and of each the whole estimate anew. least_error: a
    standard error that is known from elsewhere, for series that may be smooth by chance."""
    seen = design.fit(values)
    error, rho = max(seen.error, least_error), seen.correlation
    if error <= 1e-12 * (1 + abs(seen.effect)):  # every block is the same
        return SeriesEstimate(seen.effect, 0.0, 1 / (resamples + 1) if abs(seen.effect) > 1e-12 else 1.0)
    surprises = [value - rho * last for last, value in pairwise(seen.residuals)]
    middle = fmean(surprises)
    surprises = [value - middle for value in surprises]
    rng, warm = Random(seed), round(3 / (1 - rho))  # noqa: S311 (nothing secret)
    apart = []
    for _ in range(resamples):
        series, now = [], 0.0
        for surprise in rng.choices(surprises, k=design.n + warm):
            now = rho * now + surprise
            series.append(now)
        made = design.fit(series[warm:])
        apart.append(abs(made.effect) / made.error if made.error else 0.0)
    beyond = sum(each > abs(seen.effect) / error for each in apart)
    reach = quantile(apart, 1 - alpha, "inverted_cdf") * error
    return SeriesEstimate(seen.effect, reach, (1 + beyond) / (resamples + 1))


@lru_cache(maxsize=64)
def mean_series(n: int) -> SeriesDesign:
    return SeriesDesign(mean_design(n))


@lru_cache(maxsize=64)
def step_series(before: int, after: int, line: bool) -> SeriesDesign:
    """Return the design of a step between so many blocks before and after, with `line` besides a line through both."""
    level, step = [1.0] * (before + after), [0.0] * before + [1.0] * after
    return SeriesDesign(Design.of(level, range(before + after), step) if line else Design.of(level, step))


# ---- series that are looked at again and again ---------------------------------------------------------------------

LEAST_CORRELATION, MOST_CORRELATION = 0.6, 0.95
LEAST_LOOKS = 8  # blocks before the first interval


class SequentialSeries(NamedTuple):
    """Sums of a growing series, which give an interval of its mean that holds at all times at once.

    products: of neighbours. Values should lie around 0, as logarithms of ratios do, or digits are lost."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def plus(self, value: float) -> SequentialSeries:
        """Return the series with one more value."""
        products = self.products + self.last * value if self.n else 0.0
        first = self.first if self.n else value
        return SequentialSeries(self.n + 1, self.total + value, self.squares + value * value, products, first, value)

    @property
    def mean(self) -> float:
        return self.total / self.n

    @property
    def correlation(self) -> float:
        """Return the correlation of neighbours, corrected for the bias of short series, from 0.6 to 0.95.

        Source of the correction: Marriott and Pope 1954, (1 + 3 r) / n. The floor costs time and keeps the false
        alarms of correlated minutes down: docs/internals/sequential-test.md."""
        n, mean = self.n, self.mean
        spread = self.squares - n * mean * mean
        ends = 2 * self.total - self.first - self.last
        estimate = (self.products - mean * ends + (n - 1) * mean * mean) / spread if spread > 1e-12 else 0.0
        return min(max(estimate + (1 + 3 * estimate) / n, LEAST_CORRELATION), MOST_CORRELATION)

    def interval(self, alpha: float, scale: float = 1.0) -> tuple[float, float] | None:
        """Return the interval that holds the true mean at every stopping time with probability 1 - alpha; None for too
        few values.

        A t mixture: the normal mixture over the effect in standard deviations (scale: its own), the right-Haar measure
        over the standard deviation. N = n (1 - r) / (1 + r) values count, r as `correlation`; exact for independent
        normal values with N = n. Source: Lai 1976; Wang and Ramdas 2023 (arXiv 2310.03722); Lindon, Ham, Tingley and
        Bojinov (arXiv 2210.08589)."""
        if self.n < LEAST_LOOKS:
            return None
        r = self.correlation
        count = max(self.n * (1 - r) / (1 + r), 2.0)
        spread = max(self.squares - self.n * self.mean * self.mean, 0.0) / self.n
        squares = spread * (count - 1) / max(1 - 1 / count, 0.3)
        k = 1 + scale * scale * count
        g = math.exp((0.5 * math.log(k) - math.log(alpha)) * 2 / count)
        if g >= k:
            return -math.inf, math.inf
        reach = math.sqrt((g - 1) / (1 - g / k) * squares / count)
        return self.mean - reach, self.mean + reach


class CountSpread(NamedTuple):
    """Sums of counts, such as errors in a minute, which give their index of dispersion: variance / mean, 1 for
    independent events."""

    n: int = 0
    total: int = 0
    squares: int = 0

    def plus(self, count: int) -> CountSpread:
        return CountSpread(self.n + 1, self.total + count, self.squares + count * count)

    @property
    def dispersion(self) -> float:
        """Return the index of dispersion, at least 1."""
        if self.n < 2 or not self.total:
            return 1.0
        mean = self.total / self.n
        return max((self.squares - self.total * mean) / (self.n - 1) / mean, 1.0)


def coin_evidence(hits: float, flips: float, chance: float, prior: float = 8.0) -> float:
    """Return the logarithm of the evidence that a coin's chance is another than `chance`, over all flips so far.

    1 / alpha of it may be waited for at any time: a beta mixture with the mean `chance` and `prior` flips, a martingale
    if the chance is right. Source: Robbins 1970, with a beta in place of the uniform prior."""
    a, b = prior * chance, prior * (1 - chance)

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    misses = flips - hits
    mixed = log_beta(a + hits, b + misses) - log_beta(a, b)
    return mixed - hits * math.log(chance) - misses * math.log1p(-chance)
