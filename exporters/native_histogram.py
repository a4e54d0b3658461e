"""Native histograms: sparse exponential buckets, as Prometheus defines them.

Bucket i holds the values in (2^((i-1)/2^schema), 2^(i/2^schema)]. With schema 5 a bucket is 2.19 % wide, so an
interpolated quantile is at most about 1.1 % off. Source: https://prometheus.io/docs/specs/native_histograms/"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log2
from operator import sub

import msgspec

SCHEMA = 5
ZERO_THRESHOLD_S = 2.0**-20  # about 1 us: a wait as short as this counts as no wait

_PER_DOUBLING = 1 << SCHEMA
_ZERO = -(1 << 20)  # key of the zero bucket; no index of another bucket is as small
_MS = log2(1000.0) * _PER_DOUBLING
_ZERO_THRESHOLD_MS = ZERO_THRESHOLD_S * 1000


class NativeHistogram(msgspec.Struct, array_like=True, frozen=True):
    """Observations per bucket, in the layout of the wire format.

    spans: offset and length of each run of buckets, one after the other; the offset is counted from the end of the run
    before it. counts: one for each bucket of the spans. An empty histogram has one span of length 0, which marks it as native."""

    zero_count: int
    spans: Sequence[int]
    counts: Sequence[int]

    @property
    def indices(self) -> list[int]:
        """The index of each bucket."""
        found: list[int] = []
        end = 0
        for offset, length in zip(self.spans[::2], self.spans[1::2], strict=True):
            end += offset + length
            found += range(end - length, end)
        return found


class ExponentialBuckets:
    """Accumulator of a native histogram of times."""

    __slots__ = ("_counts", "_indices", "_spans")

    def __init__(self, start: NativeHistogram | None = None) -> None:
        self._counts: dict[int, int] = {}
        self._indices: list[int] = []  # in order, of the buckets that the spans describe
        self._spans: Sequence[int] = (0, 0)
        if start is not None:
            self._counts = dict(zip(start.indices, start.counts, strict=True))
            if start.zero_count:
                self._counts[_ZERO] = start.zero_count

    def observe_ms(self, values_ms: Iterable[float]) -> None:
        """Add observations in milliseconds, 0 or more. The buckets are those of seconds."""
        counts, before = self._counts, self._counts.get
        for index in [ceil(log2(value) * _PER_DOUBLING - _MS) if value > _ZERO_THRESHOLD_MS else _ZERO for value in values_ms]:
            counts[index] = before(index, 0) + 1

    def snapshot(self) -> NativeHistogram:
        """Return what was observed so far. The layout is computed anew only when a bucket was added."""
        counts, zero_count = self._counts, self._counts.get(_ZERO, 0)
        if len(counts) - bool(zero_count) != len(self._indices):
            self._indices = sorted(counts)[bool(zero_count) :]
            self._spans = _spans_of(self._indices)
        return NativeHistogram(zero_count, self._spans, [counts[index] for index in self._indices])


def deltas(counts: Sequence[int]) -> Iterable[int]:
    """Yield each count less the one before it, as the wire format has them."""
    return map(sub, counts, (0, *counts))


def _spans_of(indices: Sequence[int]) -> Sequence[int]:
    """Return the runs of consecutive indices, which are in order."""
    starts = [0, *(at for at, step in enumerate(map(sub, indices[1:], indices), 1) if step != 1)]
    spans: list[int] = []
    end = 0
    for start, stop in zip(starts, (*starts[1:], len(indices)), strict=True):
        spans += (indices[start] - end, stop - start)
        end = indices[start] + stop - start
    return spans
