"""Arithmetic of golden checks: distinct runs, scores against noise, limits, grids of logits."""

from __future__ import annotations

import math
import random
import struct

import pytest

from stack.golden import comparison
from stack.golden.comparison import LEAST_Z, LEAST_Z2, LogprobDifference, NoiseLimits, TokenNoise, TokenPlace

SIZES = (1, 2, 4, 8, 16, 32)


def gauss_runs(seed: int, runs: int, tokens: int = 200, sd: float = 0.01) -> list[list[list[float]]]:
    """Runs of one prompt with independent noise."""
    rng = random.Random(seed)
    return [[[-2.0 + rng.gauss(0, sd) for _ in range(tokens)]] for _ in range(runs)]


def levels(runs: list[list[list[float]]]) -> dict[int, list[list[list[float]]]]:
    return {size: runs[place :: len(SIZES)] for place, size in enumerate(SIZES)}


def test_scores_are_those_of_the_formula():
    noise = [TokenNoise((-1.0, -2.0), (0.1, 0.3), 4)]
    found = comparison.compare(noise, 0.2, [[(-1.2, -2.0)], [(-1.4, -2.1)]])
    z = (0.3 / math.sqrt((0.01 + 0.04) * (1 / 2 + 1 / 4)), 0.05 / math.sqrt((0.09 + 0.04) * (1 / 2 + 1 / 4)))
    assert (2, pytest.approx(0.175), pytest.approx(0.3)) == (found.tokens, found.mean_abs, found.max_abs)
    assert (pytest.approx((z[0] ** 2 + z[1] ** 2) / 2), pytest.approx(z[0])) == (found.z2, found.max_z)
    assert TokenPlace(0, 1) == found.worst == found.first


def test_repeated_bits_are_one_run():
    """An idle engine repeats itself; four equal runs are no better evidence than one."""
    noise = [TokenNoise((-1.0,), (0.1,), 4)]
    assert comparison.compare(noise, 0.1, [[(-1.2,)]]) == comparison.compare(noise, 0.1, [[(-1.2,)]] * 4)
    assert TokenNoise((-2.0,), (pytest.approx(math.sqrt(2)),), 2) == comparison.token_noise([(-1.0,), (-3.0,), (-1.0,)])


def test_exact_engine_gets_no_limits():
    """Its mean has every bit of its runs, and then each difference counts."""
    value = -0.1 * 3
    noise, limits = comparison.learn(levels([[[value, value]]] * 12))
    assert NoiseLimits(0.0, 0.0, 0.0, 0.0, 0.0) == limits
    assert not comparison.is_beyond(comparison.compare(noise, 0.0, [[(value, value)]]), limits)
    off = comparison.compare(noise, 0.0, [[(value, math.nextafter(value, 0))]])
    assert comparison.is_beyond(off, limits)
    assert (None, None, TokenPlace(0, 2)) == (off.z2, off.max_z, off.first)


def test_first_and_worst_are_none_for_equal_runs():
    assert LogprobDifference(1, 0.0, 0.0, 0.0) == comparison.compare([TokenNoise((-1.0,), (0.0,), 1)], 0.0, [[(-1.0,)]])


def test_limits_are_above_noise_and_below_damage():
    noise, limits = comparison.learn(levels(gauss_runs(1, 24)))
    assert limits.z2 >= LEAST_Z2
    assert limits.max_z >= LEAST_Z
    alarms = sum(
        comparison.is_beyond(comparison.compare(noise, limits.least_sd, gauss_runs(seed, 4)), limits)
        for seed in range(2, 102)
    )
    assert 0 == alarms
    broad = [[[value - 0.02 for value in run[0]]] for run in gauss_runs(200, 4)]
    local = [[[*run[0][:-1], run[0][-1] - 0.2]] for run in gauss_runs(201, 4)]
    for damaged in (broad, local):
        assert comparison.is_beyond(comparison.compare(noise, limits.least_sd, damaged), limits)


def test_a_batch_size_with_other_kernels_widens_the_limits():
    """One size computes exactly and otherwise than the rest: a check that meets it alone must be no alarm."""
    rng = random.Random(5)
    shift = [rng.gauss(0, 0.05) for _ in range(200)]
    runs = levels(gauss_runs(6, 24))
    exact = [[[-2.0 + each for each in shift]]]
    runs[32] = exact * 4
    noise, limits = comparison.learn(runs)
    assert not comparison.is_beyond(comparison.compare(noise, limits.least_sd, exact * 4), limits)


def rounded(value: float, bits: int) -> float:
    """Round to a float with so many bits of mantissa; 7 is bfloat16, 10 float16."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


def gaps(bits: int | None, scale: float) -> list[float]:
    """Gaps between log-probabilities in 32 bits, of logits rounded to a dtype."""
    rng = random.Random(9)
    found = []
    for _ in range(400):
        logits = [rng.gauss(0, scale) for _ in range(50)]
        if bits is not None:
            logits = [rounded(each, bits) for each in logits]
        log_sum = math.log(sum(map(math.exp, logits)))
        single = [struct.unpack("f", struct.pack("f", each - log_sum))[0] for each in logits]
        found.append(max(single) - single[0])
    return [gap for gap in found if gap and gap < 8]


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_grid_of_logits_tells_dtypes_apart(scale):
    brain, half, single = (comparison.logit_bits(gaps(bits, scale)) for bits in (7, 10, None))
    assert single is None
    assert brain is not None
    assert half is not None
    assert 2 <= half - brain <= 4
    assert comparison.logit_bits([0.5] * 5) is None, "too few to tell"
