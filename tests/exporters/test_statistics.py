"""Our statistics beside SciPy and numpy, which the product does not carry, or beside their definition where neither has
them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import scipy  # which imports scipy.stats at its first use
from hypothesis import given
from hypothesis import strategies as st

from exporters.statistics import (
    CountSpread,
    Design,
    QuantileMethod,
    SequentialSeries,
    SeriesDesign,
    bootstrap,
    coin_evidence,
    deleted_residuals,
    detectable_effect,
    drift_terms,
    exceedance,
    holm,
    ks_critical,
    ks_distance,
    mean_design,
    mean_series,
    median_or_none,
    quantile,
    quantiles,
    ranks,
    run_design,
    step_series,
    t_quantile,
    two_sided_p,
    variant_effect,
)
from tests.support.simulated_experiments import INTERLEAVED

OF_B = [letter == "B" for letter in INTERLEAVED]
PLACES = [float(place) for place in range(12)]
NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


# ---- quantiles and ranks ------------------------------------------------------------------------------------------


@given(
    NUMBERS,
    st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0]),
    st.sampled_from(["linear", "weibull", "inverted_cdf"]),
)
def test_quantiles_are_numpys(values: list[float], share: float, method: QuantileMethod):
    expected = float(np.quantile(values, share, method=method))
    assert expected == pytest.approx(quantile(values, share, method), rel=1e-9, abs=1e-6)


@given(NUMBERS)
def test_quantiles_lie_between_the_ends_and_rise(values: list[float]):
    found = quantiles(values, (0.0, 0.5, 0.95, 0.99, 1.0))
    assert sorted(found) == pytest.approx(found)
    assert (min(values), max(values)) == (found[0], found[-1])


def test_nearest_rank_is_one_of_the_values():
    values = list(range(1, 21))
    assert [10, 19, 20] == quantiles(values, (0.5, 0.95, 1.0), "inverted_cdf")


def test_median_of_nothing_is_none():
    assert (None, 2.5) == (median_or_none([]), median_or_none([4.0, 1.0, 2.0, 3.0]))


@given(NUMBERS)
def test_ranks_are_scipys_from_zero(values: list[float]):
    assert [rank - 1 for rank in scipy.stats.rankdata(values)] == ranks(values)


# ---- Student's t and power ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 8, 9, 10, 31, 120])
@pytest.mark.parametrize("confidence", [0.05, 0.6, 0.8, 0.95, 0.99, 0.999])
def test_students_t_is_scipys(confidence: float, df: int):
    expected = float(scipy.stats.t.ppf((1 + confidence) / 2, df))
    assert expected == pytest.approx(t_quantile(confidence, df), rel=1e-9)
    assert 1 - confidence == pytest.approx(two_sided_p(-expected, df), abs=1e-12)


def test_two_sided_p_ends_at_certainty_and_at_nothing():
    assert (1.0, 0.0) == (two_sided_p(0.0, 8), two_sided_p(math.inf, 7))


@pytest.mark.parametrize("df", [4, 8, 20])
@pytest.mark.parametrize("effect", [0.0, 1.5, 4.0, 8.0])
def test_power_is_the_tail_of_noncentral_t(effect: float, df: int):
    t = t_quantile(0.95, df)
    assert float(scipy.stats.nct.sf(t, df, effect)) == pytest.approx(exceedance(effect, t, df), abs=1e-4)


@pytest.mark.parametrize(("alpha", "power"), [(0.05, 0.8), (0.05 / 7, 0.8), (0.05, 0.95)])
def test_detectable_effect_has_its_power(alpha: float, power: float):
    effect = detectable_effect(8, alpha, power)
    assert power == pytest.approx(float(scipy.stats.nct.sf(scipy.stats.t.ppf(1 - alpha / 2, 8), 8, effect)), abs=1e-4)


# ---- several tests, two samples -----------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), max_size=7))
def test_holm_is_closed_testing_with_bonferroni(ps: list[float]):
    """A hypothesis is rejected only with every set that holds it: the largest of size times the smallest p."""
    families = [chosen for size in range(1, len(ps) + 1) for chosen in itertools.combinations(range(len(ps)), size)]
    closed = [
        max(min(1.0, len(each) * min(ps[k] for k in each)) for each in families if i in each) for i in range(len(ps))
    ]
    assert closed == pytest.approx(holm(ps))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # scipy's own, about a p that is not read here
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_ks_distance_is_scipys(left: list[int], right: list[int]):
    assert float(scipy.stats.ks_2samp(left, right, method="exact").statistic) == pytest.approx(ks_distance(left, right))


def test_ks_critical_is_smirnovs_one_percent():
    assert float(scipy.stats.kstwobign.isf(0.01)) * math.sqrt(1 / 300 + 1 / 500) == pytest.approx(
        ks_critical(300, 500), rel=0.002
    )


# ---- least squares ------------------------------------------------------------------------------------------------


def lstsq(columns: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray, float]:
    """Return numpy's coefficients, their standard errors and the sum of squared residuals."""
    x, y = np.column_stack(columns), np.array(values)
    found = np.linalg.lstsq(x, y, rcond=None)[0]
    squares = float(np.sum((y - x @ found) ** 2))
    covariance = np.linalg.inv(x.T @ x) * squares / (len(y) - x.shape[1])
    return found, np.sqrt(np.diag(covariance)), squares


def noise(seed: int, n: int = 12) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0, 1) for _ in range(n)]


@pytest.mark.parametrize("seed", range(4))
def test_design_is_numpys_least_squares(seed: int):
    columns = [[1.0] * 12, noise(seed + 10), noise(seed + 20), noise(seed + 30)]
    found, errors, _ = lstsq(columns, noise(seed))
    estimate = Design.of(*columns).estimate(noise(seed))
    assert (found[-1], errors[-1], 8) == pytest.approx(estimate)
    assert 2 * scipy.stats.t.sf(abs(found[-1] / errors[-1]), 8) == pytest.approx(estimate.p)


def test_mean_has_students_interval():
    values = noise(3, 6)
    expected = scipy.stats.t.interval(0.95, 5, np.mean(values), scipy.stats.sem(values))
    assert tuple(map(float, expected)) == pytest.approx(mean_design(6).estimate(values).interval(0.05))
    assert mean_design(1).estimate([3.0]).interval(0.05) is None


@pytest.mark.parametrize("drift", [True, False])
def test_variant_effect_is_that_of_numpy_with_line_and_bend(drift: bool):
    values = noise(5)
    terms = [[1.0] * 12, *([PLACES, [at * at for at in PLACES]] if drift else [])]
    found, errors, _ = lstsq([*terms, OF_B], values)
    estimate = variant_effect(values, OF_B, PLACES, drift)
    assert (found[-1], errors[-1], 8 if drift else 10) == pytest.approx(estimate)


def test_drift_terms_have_numpys_p_and_reach():
    """The bend's p is that of the square; how far two runs are apart is that of the fitted curve."""
    values = [value + 0.3 * at for at, value in enumerate(noise(6))]
    found, errors, _ = lstsq([[1.0] * 12, OF_B, PLACES, [at * at for at in PLACES]], values)
    terms, apart = drift_terms(values, OF_B, PLACES)
    assert 2 * scipy.stats.t.sf(abs(found[-1] / errors[-1]), 8) == pytest.approx(terms[-1].p)
    curve = [found[2] * at + found[3] * at * at for at in PLACES]
    assert max(curve) - min(curve) == pytest.approx(apart)


def test_fit_takes_out_a_line_and_a_bend_exactly():
    values = [7 + 0.3 * b + 0.1 * at - 0.02 * at * at for b, at in zip(OF_B, PLACES, strict=True)]
    assert (pytest.approx(0.3), pytest.approx(0.0, abs=1e-9), 8) == variant_effect(values, OF_B, PLACES)


@pytest.mark.parametrize("values", [[10.0] * 12, [0.1] * 12, [1e-9] * 12])
def test_constant_values_have_no_effect_and_p_1(values: list[float]):
    """Rounding is not taken for a difference."""
    estimate = variant_effect(values, OF_B, PLACES)
    assert (0.0, 1.0) == pytest.approx((estimate.value, estimate.p))


def test_late_variant_alone_has_no_drift():
    """Variant that is nothing but a late time has no drift beside it."""
    values, late = noise(7, 6), [False] * 3 + [True] * 3
    times = [0.0] * 3 + [9.0] * 3
    assert variant_effect(values, late, times, drift=False) == variant_effect(values, late, times)
    assert 2 == len(run_design(tuple(map(float, late)), tuple(times), True).axes)


def test_p_is_that_of_an_exact_permutation():
    """Every way to call six of twelve runs B: how many go as far as what was seen, within what noise allows."""
    for seed in range(4):
        rng = random.Random(seed)
        values = [rng.gauss(0.08 * b * seed, 0.08) for b in OF_B]
        seen = variant_effect(values, OF_B, PLACES, drift=False)
        others = [[place in chosen for place in range(12)] for chosen in itertools.combinations(range(12), 6)]
        further = sum(
            abs(variant_effect(values, each, PLACES, drift=False).value) >= abs(seen.value) - 1e-12 for each in others
        )
        assert further / len(others) == pytest.approx(seen.p, abs=0.02)


def test_deleted_residuals_are_those_of_a_fit_without_the_run():
    """Expected from the definition: a column of its own for a run gives its distance and t."""
    values = [value + 5.0 * (place == 4) for place, value in enumerate(noise(1))]
    found, df = deleted_residuals(values, OF_B, PLACES)
    assert 7 == df
    assert 4 == max(range(12), key=lambda at: abs(found[at][1]))
    for place in range(12):
        alone = [float(place == other) for other in range(12)]
        fit, errors, _ = lstsq([[1.0] * 12, PLACES, [at * at for at in PLACES], OF_B, alone], values)
        assert (fit[-1], fit[-1] / errors[-1]) == pytest.approx(found[place])


# ---- series of blocks ---------------------------------------------------------------------------------------------


def blocks(rng: random.Random, count: int, correlation: float) -> list[float]:
    """Means of ten minutes, of which each is like the one before."""
    now, fresh = rng.gauss(0, 1), math.sqrt(1 - correlation**2)
    series = []
    for _ in range(count):
        minutes = []
        for _ in range(10):
            now = correlation * now + fresh * rng.gauss(0, 1)
            minutes.append(now)
        series.append(sum(minutes) / 10)
    return series


@pytest.mark.parametrize(
    ("design", "count"), [(step_series(24, 24, False), 48), (step_series(24, 24, True), 48), (mean_series(24), 24)]
)
def test_series_that_is_like_itself_is_rarely_called_a_step(design: SeriesDesign, count: int):
    """Where a t test that takes blocks for independent is wrong in a tenth or more: neighbours of one minute correlate
    at 0.8."""
    rng, called, naive = random.Random(1), 0, 0
    for n in range(200):
        series = blocks(rng, count, 0.8)
        called += bootstrap(design, series, 100, n, 0.05).p < 0.05
        naive += (design.design.estimate(series).p or 0.0) < 0.05
    assert called <= 18, "9 % of 200, which a method that is wrong in 5 % exceeds in 1 of 100 trials"
    assert naive >= 18


def test_independent_blocks_have_the_plain_error():
    """Where neighbours have nothing in common, widths are those of least squares but for the lost degrees of
    freedom."""
    design, series = step_series(24, 24, False), [(-1.0) ** at for at in range(48)]
    assert (0.0, pytest.approx(design.design.estimate(series).error)) == (
        design.fit(series).correlation,
        design.fit(series).error,
    )


def test_step_beside_a_line_is_numpys():
    values = [0.1 * at + 2.0 * (at >= 20) + value for at, value in enumerate(noise(8, 40))]
    found, _, squares = lstsq([[1.0] * 40, list(range(40)), [0.0] * 20 + [1.0] * 20], values)
    fit = step_series(20, 20, True).fit(values)
    assert found[-1] == pytest.approx(fit.effect)
    assert squares == pytest.approx(sum(value * value for value in fit.residuals))


def test_equal_blocks_are_no_surer_than_requests():
    """Blocks that are alike by chance are not surer than their requests."""
    series, design = [0.01, -0.01] * 24, step_series(24, 24, False)
    assert bootstrap(design, series, 100, 0, 0.05).reach < 0.1
    assert bootstrap(design, series, 100, 0, 0.05, least_error=1.0).reach > 1.5


def test_bootstrap_of_equal_blocks_is_certain():
    design = mean_series(24)
    assert (0.0, 0.0, 1.0) == bootstrap(design, [0.0] * 24, 99, 0, 0.05)
    assert (2.0, 0.0, 0.01) == bootstrap(design, [2.0] * 24, 99, 0, 0.05)


# ---- series that are looked at again and again ---------------------------------------------------------------------


def series_of(values: Sequence[float]) -> SequentialSeries:
    series = SequentialSeries()
    for value in values:
        series = series.plus(value)
    return series


def mixture_evidence(values: Sequence[float], mu: float, r: float, scale: float) -> float:
    """The t mixture's evidence against a mean, by its definition: k^(-1/2) ((1 + z) / (1 + z / k))^(N / 2)."""
    n, variance = len(values), float(np.var(values, ddof=1))
    count = max(n * (1 - r) / (1 + r), 2)
    k = 1 + scale**2 * count
    squares = variance * (n - 1) / n * (count - 1) / max(1 - 1 / count, 0.3)
    z = count * (float(np.mean(values)) - mu) ** 2 / squares
    return float(k**-0.5 * ((1 + z) / (1 + z / k)) ** (count / 2))


@pytest.mark.parametrize(("n", "scale"), [(30, 1.0), (200, 1.0), (200, 0.5), (2000, 0.5)])
def test_ends_of_a_sequential_interval_have_its_evidence(n: int, scale: float):
    values = np.random.default_rng(n).normal(0.1, 0.3, n).tolist()
    series = series_of(values)
    interval = series.interval(0.05, scale)
    assert interval is not None
    for end in interval:
        assert pytest.approx(1 / 0.05, rel=1e-6) == mixture_evidence(values, end, series.correlation, scale)


def test_few_blocks_have_no_sequential_interval():
    """At a correlation of 0.6 eight blocks count as two."""
    assert series_of([0.1] * 7).interval(0.05) is None
    assert (-math.inf, math.inf) == series_of([0.1, -0.1] * 4).interval(0.05)
    low, high = series_of([0.1, -0.1] * 40).interval(0.05) or (math.nan, math.nan)
    assert low < 0 < high


def test_correlation_of_neighbours_is_corrected_and_bounded():
    rng = np.random.default_rng(5)
    for rho, low, high in ((0.0, 0.6, 0.6), (0.8, 0.75, 0.85), (0.99, 0.95, 0.95)):
        value, values = 0.0, []
        for _ in range(4000):
            value = rho * value + float(rng.normal(0, math.sqrt(1 - rho**2)))
            values.append(value)
        assert low <= series_of(values).correlation <= high
    around = np.array(values) - np.mean(values)
    plain = float(np.sum(around[1:] * around[:-1]) / np.sum(around**2))
    series = series_of(values[:600])
    assert 0.6 < series.correlation <= 0.95
    assert plain > 0.95


def test_equal_values_have_a_sequential_interval_of_no_width():
    assert (0.25, 0.25) == pytest.approx(series_of([0.25] * 100).interval(0.05), abs=1e-9)


def test_dispersion_of_counts_is_variance_by_mean():
    counts = [0, 0, 5, 0, 5, 10, 0, 0]
    spread = CountSpread()
    for count in counts:
        spread = spread.plus(count)
    assert float(np.var(counts, ddof=1) / np.mean(counts)) == pytest.approx(spread.dispersion)
    assert 1.0 == CountSpread().dispersion == CountSpread().plus(3).dispersion == CountSpread(9, 0, 0).dispersion


@pytest.mark.parametrize(("hits", "flips", "chance"), [(0, 0, 0.05), (3, 10, 0.05), (40, 50, 0.5), (7, 9, 0.2)])
def test_coin_evidence_is_a_beta_mixture_by_the_binomial(hits: int, flips: int, chance: float):
    mixed = scipy.stats.betabinom.logpmf(hits, flips, 8 * chance, 8 * (1 - chance))
    assert mixed - scipy.stats.binom.logpmf(hits, flips, chance) == pytest.approx(
        coin_evidence(hits, flips, chance), abs=1e-9
    )
