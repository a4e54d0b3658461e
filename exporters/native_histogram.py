"""Native histograms: sparse exponential buckets, as Prometheus defines them.

Bucket i holds the values in (2^((i-1)/2^schema), 2^(i/2^schema)]. With schema 5 a bucket is 2.19 % wide, so an
interpolated quantile is at most about 1.1 % off. Source: https://prometheus.io/docs/specs/native_histograms/

Invariant: a value is in the bucket that exact arithmetic puts it into, also on a bound and one float beside it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isqrt, ldexp, log2
from operator import sub
from typing import NamedTuple

SCHEMA = 5
ZERO_THRESHOLD_S = 2.0**-20  # about 1 us; shorter waits count as zero

_PER_DOUBLING = 1 << SCHEMA
_ZERO_THRESHOLD_MS = ZERO_THRESHOLD_S * 1000
# A key is a histogram's number x _KEYS + the place of a bucket. Place 0 is the zero bucket; place p > 0 is bucket p -
# _PLACE_OF_0.
_KEYS = 2048
_HISTOGRAMS = 8  # largest number counted together
_RECENT_BYTES = 1 << 16  # not counted yet
_PLACE_OF_0 = _KEYS // 2  # covers the zero threshold to 2^31 s, 68 years
_MARGIN = 1e-9  # of a bucket; above the error of log2, so that the estimate is the right place or the one below
_SHIFT = _PLACE_OF_0 - log2(1000.0) * _PER_DOUBLING - _MARGIN


def _bound_ms(step: int) -> float:
    """Return the largest float that is not above 1000 x 2^(step / 32), exactly: the 32nd root of an integer."""
    bits = 1000**_PER_DOUBLING << step + 43 * _PER_DOUBLING
    for _ in range(SCHEMA):
        bits = isqrt(bits)
    return ldexp(bits, -43) if bits < 1 << 53 else ldexp(bits >> 1, -42)


# bounds of one doubling; all others are these times a power of 2
_BOUNDS_MS = [_bound_ms(step) for step in range(_PER_DOUBLING)]
# by key
_UPPER_MS = [
    ldexp(_BOUNDS_MS[place % _PER_DOUBLING], (place - _PLACE_OF_0) // _PER_DOUBLING) for place in range(_KEYS)
] * _HISTOGRAMS


class NativeHistogram(NamedTuple):
    """Observations per bucket, in the layout of the wire format.

    spans: offset and length of each run of buckets; the offset counts from the end of the previous run. counts: one
    per bucket of the spans."""

    zero_count: int
    spans: Sequence[int]
    counts: Sequence[int]


def observed_ms(histograms_ms: Iterable[Iterable[float]]) -> array[int]:
    """Return the key of each observation of several histograms, in milliseconds from 0 to 68 years. The buckets are
    those of seconds."""
    keys: list[int] = []
    shift, zero = _SHIFT, 0
    for values in histograms_ms:
        keys += [
            key + (value > _UPPER_MS[key])
            if value > _ZERO_THRESHOLD_MS and (key := ceil(log2(value) * _PER_DOUBLING + shift))
            else zero
            for value in values
        ]
        shift += _KEYS
        zero += _KEYS
    return array("H", keys)


class BucketCounts:
    """Counts of several histograms by key; their layout is recomputed only when a bucket was added.

    Observations are kept and counted on reading: counting a few at a time misses the processor's cache (450 ns each
    on a busy machine)."""

    __slots__ = ("_counts", "_keys", "_recent", "_runs")

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._counts = Counter(counts)
        self._recent = bytearray()
        self._keys: list[int] = []
        self._runs: dict[int, tuple[list[int], Sequence[int]]] = {}  # by histogram: its keys and spans

    def add(self, observed: array[int] | bytes) -> None:
        """Add observations by their keys, as `observed_ms` returns them."""
        self._recent += observed
        if len(self._recent) > _RECENT_BYTES:
            self._count()

    def _count(self) -> None:
        self._counts.update(array("H", bytes(self._recent)))
        self._recent.clear()

    @property
    def counts(self) -> Counter[int]:
        """Counts by key."""
        if self._recent:
            self._count()
        return self._counts

    def forget(self, histogram: int) -> None:
        """Reset one histogram."""
        counts = self.counts
        for key in [key for key in counts if key // _KEYS == histogram]:
            del counts[key]
        self._keys, self._runs = [], {}

    def total(self, histogram: int) -> int:
        """Return how many observations a histogram has."""
        return sum(count for key, count in self.counts.items() if key // _KEYS == histogram)

    def snapshot(self, histogram: int = 0) -> NativeHistogram:
        """Return one histogram's current state."""
        counts, first = self.counts, histogram * _KEYS
        if len(counts) != len(self._keys):
            self._keys, self._runs = sorted(counts), {}
        if (run := self._runs.get(histogram)) is None:
            start, end = (bisect_left(self._keys, key) for key in (first + 1, first + _KEYS))
            keys = self._keys[start:end]
            run = self._runs[histogram] = keys, _spans_of([key - first - _PLACE_OF_0 for key in keys])
        keys, spans = run
        return NativeHistogram(counts[first], spans, list(map(counts.__getitem__, keys)))


def deltas(counts: Sequence[int]) -> Iterable[int]:
    """Yield the difference of each count from the previous one, as in the wire format."""
    return map(sub, counts, (0, *counts))


def _spans_of(indices: Sequence[int]) -> Sequence[int]:
    """Return the runs of consecutive sorted indices; without any, the one span that marks a histogram as native."""
    if not indices:
        return 0, 0
    starts = [0, *(at for at, step in enumerate(map(sub, indices[1:], indices), 1) if step != 1)]
    spans: list[int] = []
    end = 0
    for start, stop in zip(starts, (*starts[1:], len(indices)), strict=True):
        spans += (indices[start] - end, stop - start)
        end = indices[start] + stop - start
    return spans
