"""Distributions of token counts: values at a share, ends, means."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean

import msgspec

_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)


class Length(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distribution of tokens. p50 and p95: lognormal; min and max cut it, or are the ends of a uniform one. choices:
    each as often as the others.

    A lognormal has p95 half-way (in logarithms) between p50 and its longest, and its shortest as far below; 0.05 %
    would lie beyond each."""

    p50: int | None = None
    p95: int | None = None
    min: int | None = None
    max: int | None = None
    choices: tuple[int, ...] = ()


Lengths = int | Length


def length_at(lengths: Lengths, u: float) -> int:
    """Return the quantile u of a distribution, 0 <= u < 1."""
    if isinstance(lengths, int):
        return lengths
    if lengths.choices:
        return sorted(lengths.choices)[int(u * len(lengths.choices))]
    low, high = length_ends(lengths)
    if lengths.p50 is None or lengths.p95 is None:
        return low + int(u * (high - low + 1))
    wide = (math.log(lengths.p95) - math.log(lengths.p50)) / _P95
    z = _NORMAL.inv_cdf(min(max(u, 1e-9), 1 - 1e-9))
    return min(max(round(lengths.p50 * math.exp(z * wide)), low), high)


def length_ends(lengths: Lengths) -> tuple[int, int]:
    """Return the shortest and the longest length."""
    if isinstance(lengths, int):
        return lengths, lengths
    if lengths.choices:
        return min(lengths.choices), max(lengths.choices)
    if lengths.p50 is None or lengths.p95 is None:
        return lengths.min or 1, lengths.max or lengths.min or 1
    wide = (lengths.p95 / lengths.p50) ** 2
    return lengths.min or max(1, int(lengths.p50 / wide)), lengths.max or math.ceil(lengths.p50 * wide)


def mean_length(lengths: Lengths) -> float:
    return fmean(length_at(lengths, (part + 0.5) / 200) for part in range(200))


def cut_length(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)
