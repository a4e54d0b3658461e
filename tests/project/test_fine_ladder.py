"""The fine ladder: the same observations in narrower classic buckets."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import fine_ladder
from exporters.catalogue import sidecar
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution, Sample
from exporters.native_histogram import BucketCounts
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counter_rows import read_row, row_samples
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord
from exporters.requests.store import CounterStore
from exporters.scrape import Format
from stack.deploy.fleet import budget

FINE = {
    sidecar.TTFT: "ttft_ms",
    sidecar.TPOT: "tpot_ms",
    sidecar.E2E: "e2e_ms",
    sidecar.QUEUE: "queue_ms",
    sidecar.ENGINE_QUEUE: "engine_queue_ms",
}
ON_BOUNDS = st.sampled_from([0.0, 1.0, 250.0, 500.0, 1000.0, 2000.0])
TIMES_MS = st.lists(st.one_of(st.floats(0, 1e9), st.floats(0.5, 1e5), ON_BOUNDS), max_size=60)
WIDTH = 2 ** (1 / 8)


def traffic_of(times_ms: list[float], **more: str) -> RequestCounters:
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    traffic.add_all(
        [
            RequestRecord(
                request_id=str(n), model="m", team="t", outcome="ok", **dict.fromkeys(FINE.values(), time), **more
            )
            for n, time in enumerate(times_ms)
        ]
    )
    return traffic


def samples_of(traffic: RequestCounters) -> list[Sample]:
    """The series of the only row, with native buckets."""
    samples: list[Sample] = []
    for (model, team), (stored, observed) in traffic.changed().items():
        native = BucketCounts()
        native.add(observed)
        samples += row_samples(read_row(stored), traffic.exemplars(model, team), native)
    return samples


def both(traffic: RequestCounters) -> list[tuple[Metric, Distribution, Distribution]]:
    """Each histogram with the coarse and the fine ladder."""
    coarse = samples_of(traffic)
    return [(m, a, b) for (m, _, a), (_, _, b) in zip(coarse, fine_ladder.refine(coarse), strict=True) if m in FINE]


def quantile(q: float, histogram: Distribution) -> float:
    """Interpolate as histogram_quantile does."""
    rank, running = q * sum(histogram.counts), list(accumulate(histogram.counts))
    at = bisect_left(running, rank)
    low, high = (0.0, *histogram.bounds)[at], histogram.bounds[at]
    return low + (high - low) * (rank - (0, *running)[at]) / histogram.counts[at]


@given(TIMES_MS)
def test_each_bucket_holds_what_lies_between_its_bounds(times_ms):
    for metric, coarse, fine in both(traffic_of(times_ms)):
        edges = [bound for bound in fine.bounds if bound not in coarse.bounds]
        if any(math.isclose(time, 1000 * edge, rel_tol=1e-9) for time in times_ms for edge in edges):
            continue  # on a bound that is no number with an end, rounding decides
        counts = [0] * len(fine.counts)
        for time in times_ms:
            counts[bisect_left([1000 * bound for bound in fine.bounds], time)] += 1
        assert counts == fine.counts, metric.name
        assert coarse.sum == fine.sum


@given(TIMES_MS)
def test_coarse_bounds_keep_their_counts(times_ms):
    for _, coarse, fine in both(traffic_of(times_ms)):
        assert list(fine.bounds) == sorted(fine.bounds)
        assert min(fine.counts) >= 0
        running = dict(zip((*fine.bounds, math.inf), accumulate(fine.counts), strict=True))
        assert list(accumulate(coarse.counts)) == [running[bound] for bound in (*coarse.bounds, math.inf)]


@given(st.lists(st.floats(8, 900), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_a_quantile_is_off_by_less_than_a_tenth(times_ms, q):
    truth = sorted(times_ms)[math.ceil(q * len(times_ms)) - 1] / 1000
    for metric, _, fine in both(traffic_of(times_ms)):
        assert truth == pytest.approx(quantile(q, fine), rel=WIDTH - 1 + 1e-9), metric.name


def test_within_their_range_buckets_are_a_tenth_wide():
    for metric in FINE:
        bounds = fine_ladder.bounds_of(metric, budget._BOUNDS[metric])
        assert (
            max(high / low for low, high in pairwise(bound for bound in bounds if 0.005 <= bound <= 1.0))
            <= WIDTH + 1e-9
        )


def test_an_exemplar_is_in_the_bucket_that_holds_its_value():
    traffic = traffic_of([3.0, 40.0, 41.0, 999.0], trace_id="a" * 32, ts="2026-11-22T09:00:00.250Z")
    for _, coarse, fine in both(traffic):
        shown = [(at, one) for at, one in enumerate(fine.exemplars) if one]
        assert [one for one in coarse.exemplars if one] == [one for _, one in shown]
        assert all((0.0, *fine.bounds)[at] < one.value <= fine.bounds[at] for at, one in shown)


def test_histogram_without_native_buckets_is_unchanged():
    """A histogram without native buckets or range stays as it is."""
    samples = [(sidecar.TTFT, {}, Distribution((0.1,), [1, 0], 0.05)), (sidecar.LOG_LINES, {}, 7)]
    samples += [sample for sample in samples_of(traffic_of([1.0])) if sample[0] is sidecar.TTFT_OVERHEAD]
    assert samples == list(fine_ladder.refine(samples))


@pytest.mark.parametrize("fine", [False, True])
def test_a_sidecar_shows_the_ladder_that_it_is_to_show(fine):
    ledger = CounterStore(RequestCounters(BoundedNames(), BoundedNames()), fine=fine)
    ledger.count(
        [RequestRecord(request_id="a", model="m", team="t", outcome="ok", **dict.fromkeys(FINE.values(), 12.0))]
    )
    ledger.commit({})
    (block,) = ledger.blocks(Format.TEXT)
    buckets = sum(text.count("_bucket{") for _, text in block.values())
    families = [metric for metric in budget._BOUNDS if metric in FINE]
    assert sum(len(budget._BOUNDS[metric]) + 1 for metric in families) + fine * budget.SIDECAR_FINE_LADDER == buckets
