"""Replay of a log under an autoscaler: exact small cases, the controller's arithmetic, and agreement with the plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.requests.record import RequestRecord, timestamp
from stack.capacity.plan import steady_rate
from stack.capacity.replay import SYNC_S, ReplayedRequest, ScalingPolicy, replay, requests_of, saturation

T0 = 1_760_000_400.0
ONE = ScalingPolicy(slots=1, target=0.8, least=1, most=1, cold_start_s=60, calm_s=300, smoothed_s=180)


def request(at_s: float, time_s: float = 10.0, texts: int = 1, cache: float = 0.0) -> ReplayedRequest:
    return ReplayedRequest(T0 + at_s, time_s, 0.5, texts, cache)


def poisson(rate_per_s: float, span_s: float, time_s: float, seed: int = 1) -> list[ReplayedRequest]:
    draw, at_s, found = random.Random(seed), 0.0, list[ReplayedRequest]()
    while (at_s := at_s + draw.expovariate(rate_per_s)) < span_s:
        found.append(request(at_s, time_s))
    return found


# ---- one queue, slots and caches


def test_second_of_two_requests_waits_for_the_slot():
    result = replay([request(0), request(4)], ONE, within_s=2.5)
    assert (6.0, 1, 0.5) == (result.longest_wait_s, result.most_waiting, result.within)


def test_full_cache_holds_a_request_back():
    policy = replace(ONE, slots=8)
    assert 6.0 == replay([request(0, cache=0.7), request(4, cache=0.7)], policy, 2.5).longest_wait_s
    assert 0.0 == replay([request(0, cache=0.3), request(4, cache=0.7)], policy, 2.5).longest_wait_s


def test_request_with_several_texts_needs_as_many_slots():
    policy = replace(ONE, slots=4)
    assert 10.0 == replay([request(0, texts=2), request(0, texts=3)], policy, 2.5).longest_wait_s


def test_request_larger_than_all_replicas_starts_alone():
    assert 1.0 == replay([request(0, texts=9, cache=3.0)], ONE, 2.5).within


def test_no_request_is_refused():
    with pytest.raises(ValueError, match="no request"):
        replay([], ONE, 2.5)


# ---- the controller


@pytest.mark.parametrize(
    ("saturation_sum", "replicas", "expected"),
    [
        (1.6, 2, 2),  # exactly the target
        (1.75, 2, 2),  # within a tenth
        (1.77, 2, 3),
        (4.1, 2, 6),  # the sum does not depend on the present replicas
        (0.0, 4, 1),
        (99.0, 2, 8),
    ],
)
def test_wanted_replicas(saturation_sum, replicas, expected):
    assert expected == replace(ONE, most=8).wanted(saturation_sum, replicas)


def test_saturation_is_the_larger_of_slots_and_cache():
    assert 0.5 == saturation(running=4, waiting=4, cache=0.1, slots=16)
    assert pytest.approx(1.8) == saturation(running=4, waiting=4, cache=0.9, slots=16)
    assert 0.0 == saturation(running=0, waiting=0, cache=0.0, slots=16)


def test_new_replica_serves_after_the_cold_start():
    """Three long requests at once on one slot: the controller sees the queue after 15 s, the second replica serves 60 s
    later, and the third another 60 s later."""
    result = replay([*(request(0, 1000.0) for _ in range(3)), request(600, 1.0)], replace(ONE, most=8), 2.5)
    assert SYNC_S + 2 * ONE.cold_start_s == result.longest_wait_s


def test_replicas_stay_until_the_window_is_over():
    load = [*poisson(1.0, 600, 1.5), request(1100, 1.0)]
    policy = replace(ONE, slots=1, most=4)
    short, long = (replay(load, replace(policy, calm_s=calm_s), 2.5) for calm_s in (60, 480))
    assert short.removed > 0
    assert short.hours < long.hours


def test_fixed_replicas_cost_their_number_times_the_time():
    result = replay([request(0), request(3600)], ONE.fixed(3), 2.5)
    assert pytest.approx(3.0, rel=0.01) == result.hours
    assert (3, 0, 0) == (result.most, result.added, result.removed)


@given(st.lists(st.tuples(st.floats(0, 3000), st.floats(0.1, 200)), min_size=1, max_size=60))
def test_more_fixed_replicas_never_serve_fewer_in_time(arrivals):
    load = sorted((request(at_s, time_s) for at_s, time_s in arrivals), key=lambda each: each.arrived_s)
    found = [replay(load, ONE.fixed(replicas), 2.5) for replicas in (1, 2, 100)]
    assert found[0].within <= found[1].within <= found[2].within == 1.0


# ---- agreement with the plan


def test_rate_of_the_plan_leaves_slots_free():
    """Arrivals by chance see the slots as they are at any time, so about one in twenty finds none and waits."""
    slots, time_s = 64, 10.0
    rate = steady_rate(time_s / slots, time_s / slots**2, 1.0)
    result = replay(poisson(rate, 40_000, time_s), replace(ONE, slots=slots), within_s=0.5)
    assert 0.85 < result.within < 0.99


def test_scaled_day_lies_between_fixed_ones():
    load = [
        *poisson(0.1, 7200, 10.0),
        *(replace(each, arrived_s=each.arrived_s + 7200) for each in poisson(1.2, 7200, 10.0)),
        *(replace(each, arrived_s=each.arrived_s + 14400) for each in poisson(0.1, 7200, 10.0)),
    ]
    policy = replace(ONE, slots=8, target=0.55, most=4)
    scaled, most, least = (replay(load, each, 2.5) for each in (policy, policy.fixed(4), policy.fixed(1)))
    assert least.hours < scaled.hours < 0.8 * most.hours
    assert least.within < 0.9 < scaled.within <= most.within


# ---- records


def record(**fields: object) -> RequestRecord:
    return RequestRecord(request_id="r", **{
        "ts": timestamp(T0 + 20), "model": "chat", "outcome": "ok", "prompt_tokens": 100, "completion_tokens": 50,
        **fields,
    })  # fmt: skip


def test_time_in_the_engine_excludes_the_wait():
    (found,), _ = requests_of([record(e2e_ms=9000.0, queue_ms=4000.0, ttft_ms=4500.0)], "chat", None, 0.0, 0.0)
    assert (T0 + 11, 5.0, 0.5) == (found.arrived_s, found.time_s, found.ttft_s)


def test_record_without_times_has_those_of_the_plan():
    (found,), _ = requests_of([record()], "chat", lambda tokens: tokens / 1000, 0.5, 0.02)
    assert (1.5, pytest.approx(0.15)) == (found.time_s, found.cache)


def test_other_models_are_left_out_and_failures_counted():
    records = [record(model="other"), record(outcome="rejected"), record(ts=None), record(e2e_ms=1.0)]
    found, others = requests_of(records, "chat", None, 0.0, 0.0)
    assert (1, 2) == (len(found), others)
