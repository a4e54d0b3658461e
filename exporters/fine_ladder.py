"""Fine histogram buckets, 9 % wide, for stores without native histograms.

Each bound is one of the coarse ladder or 2^(i/8) s, which is also a bound of native buckets, so the counts come from
those and are exact. Nothing more is recorded or stored, so a sidecar may switch ladders at any start. An
interpolated quantile is off by at most its bucket's width, 9.05 %."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import sub

from exporters.catalogue import sidecar
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution, Exemplar, Sample
from exporters.native_histogram import SCHEMA, NativeHistogram

_PER_DOUBLING = 8
_NATIVE = (1 << SCHEMA) // _PER_DOUBLING  # native buckets per fine bucket
# First and last fine bound as powers of 2 s; coarse bounds outside. 2^-10 is 0.98 ms.
_RANGES: Mapping[Metric, tuple[int, int]] = {
    sidecar.TTFT: (-10, 6), sidecar.TPOT: (-10, 0), sidecar.E2E: (-8, 8), sidecar.QUEUE: (-10, 6),
    sidecar.ENGINE_QUEUE: (-10, 6),
}  # fmt: skip


def refine(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples, with fine buckets for histograms in _RANGES that have native ones."""
    for metric, labels, value in samples:
        if isinstance(value, Distribution) and value.native is not None and metric in _RANGES:
            yield metric, labels, _refined(value, value.native, *_merged(metric, value.bounds))
        else:
            yield metric, labels, value


def bounds_of(metric: Metric, coarse: tuple[float, ...]) -> tuple[float, ...]:
    """Return the fine bounds of a histogram; the coarse ones where it has none."""
    return _merged(metric, coarse)[0] if metric in _RANGES else coarse


@lru_cache(maxsize=64)
def _merged(metric: Metric, coarse: tuple[float, ...]) -> tuple[tuple[float, ...], Sequence[int | None]]:
    """Return all bounds in order, and for each the native bucket that ends there; None for a coarse bound."""
    first, last = (power * _PER_DOUBLING for power in _RANGES[metric])
    found: dict[float, int | None] = {2.0 ** (at / _PER_DOUBLING): at * _NATIVE for at in range(first, last + 1)}
    found |= dict.fromkeys(coarse)  # a value equal to an SLO bound stays in its bucket
    bounds = tuple(sorted(found))
    return bounds, [found[bound] for bound in bounds]


def _indices(spans: Sequence[int]) -> Iterator[int]:
    """Yield the index of each native bucket, in order."""
    end = 0
    for offset, length in zip(spans[::2], spans[1::2], strict=True):
        end += offset + length
        yield from range(end - length, end)


def _refined(
    value: Distribution, native: NativeHistogram, bounds: tuple[float, ...], ends: Sequence[int | None]
) -> Distribution:
    coarse, indices = accumulate(value.counts), list(_indices(native.spans))
    below = list(accumulate(native.counts, initial=native.zero_count))
    running = [next(coarse) if end is None else below[bisect_right(indices, end)] for end in (*ends, None)]
    exemplars: list[Exemplar | None] = [None] * len(running) if value.exemplars else []
    for exemplar in value.exemplars:
        if exemplar is not None:
            exemplars[bisect_left(bounds, exemplar.value)] = exemplar
    return value._replace(bounds=bounds, counts=list(map(sub, running, (0, *running))), exemplars=exemplars)
