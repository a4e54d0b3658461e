"""Evidence and decisions on a canary: blocks, errors, steps, and how often it is wrong (`make bench-canary`)."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from stack.canary.decision import CanaryStage, decide
from stack.canary.evidence import CanaryEvidence, CanaryMinute, LogSums, assess
from stack.gateway.policy import Canary
from stack.tuning.samples import RequestSample
from tests.support.canary_days import CanaryDay, World, alarms, run

POLICY = Canary(share=0.2)


def sample(
    ended_s: float, variant: str = "canary", ttft_ms: float | None = 100.0, outcome: str = "ok"
) -> RequestSample:
    return RequestSample(ended_s - 1, ended_s, "m", "t", variant, variant, outcome, ttft_ms=ttft_ms, e2e_ms=500.0)


def after(
    minutes: int, *, effect: float = 1.0, noise: float = 0.05, errors: float = 0.0, share: float = 0.2
) -> CanaryEvidence:
    """Evidence of so many minutes with 600 requests each; errors: share of the canary's requests."""
    rng, evidence = random.Random(minutes), CanaryEvidence()
    canary, others = round(600 * share), round(600 * (1 - share))
    for at in range(minutes):
        total = canary * (math.log(effect) + rng.gauss(0, noise))
        sums = {"ttft_ms": LogSums(canary, total, others, 0.0)}
        evidence.open = CanaryMinute(60.0 * at, (canary, others), (round(canary * errors), 0), sums)
        assert evidence.close(POLICY, 0.0)
    return evidence


def decided(
    evidence: CanaryEvidence, minutes: float, share: float = 0.2, since: float = 0.0, guards: tuple[str, ...] = ()
):
    return decide(POLICY, evidence, guards, CanaryStage(share, 60 * since, 0.0), 60 * minutes)


# ---- minutes and blocks


def test_requests_make_minutes_by_their_end():
    evidence = CanaryEvidence()
    evidence.add([sample(5.0), sample(59.9, "stable"), sample(61.0)], POLICY, 0.0)
    assert (1, 1) == evidence.requests
    assert evidence.open == CanaryMinute(60.0, (1, 0), (0, 0), {"ttft_ms": LogSums(1, math.log(100.0))})
    assert not evidence.close(POLICY, 0.0, 119.0)
    assert evidence.close(POLICY, 0.0, 120.0)
    assert (1, 1, 1) == (evidence.minutes, evidence.left_out, evidence.metrics["ttft_ms"].open.canary)


def test_a_block_waits_for_thirty_requests_of_both():
    evidence = CanaryEvidence()
    for minute in range(10):
        at = [60 * minute + second for second in range(10)]
        evidence.add([sample(s, "canary", 200.0) for s in at] + [sample(s, "stable") for s in at] * 2, POLICY, 0.0)
    evidence.close(POLICY, 0.0)
    blocks = evidence.metrics["ttft_ms"].blocks
    assert (3, 10) == (blocks.n, evidence.metrics["ttft_ms"].open.canary)
    assert math.log(2) == pytest.approx(blocks.mean)


def test_rejections_and_clients_that_left_count_for_nothing():
    minute = CanaryMinute(0.0)
    for outcome in ("rejected", "client_abort", "ok", "upstream_error", "timeout"):
        minute.add(sample(1.0, outcome=outcome), canary=True)
    assert ((3, 0), (2, 0)) == (minute.requests, minute.errors)
    assert 1 == minute.sums["ttft_ms"].canary


def test_unreadable_answers_are_a_row_without_verdict():
    evidence = after(2)
    assert "unreadable_ratio" not in [each.finding.metric.figure for each in assess(evidence, POLICY)]
    evidence.add([sample(121.0)._replace(unreadable=True), sample(122.0, "stable")], POLICY, 0.0)
    assert evidence.close(POLICY, 0.0)
    row = assess(evidence, POLICY)[-1].finding
    assert ("unreadable_ratio", 0.0, 1 / 241, False) == (row.metric.figure, row.a, row.b, row.has_verdict)


def test_answers_without_a_stream_are_compared_by_their_time():
    minute = CanaryMinute(0.0)
    minute.add(sample(1.0, ttft_ms=None), canary=False)
    assert {"e2e_ms": LogSums(0, 0.0, 1, math.log(500.0))} == minute.sums


def test_warm_up_is_left_out():
    evidence = CanaryEvidence()
    evidence.add([sample(10.0), sample(11.0, "stable"), sample(70.0), sample(71.0, "stable")], POLICY, 60.0)
    evidence.close(POLICY, 60.0)
    assert (1, 1) == (evidence.minutes, evidence.left_out)


def test_evidence_survives_json():
    evidence = after(30, errors=0.01)
    assert evidence == msgspec.json.decode(msgspec.json.encode(evidence), type=CanaryEvidence)


def test_minutes_that_are_much_alike_are_compared_in_batches():
    evidence, level = CanaryEvidence(), 0.0
    rng = random.Random(1)
    for at in range(400):
        level = 0.97 * level + rng.gauss(0, 0.02)
        evidence.open = CanaryMinute(60.0 * at, (100, 100), (0, 0), {"ttft_ms": LogSums(100, 100 * level, 100, 0.0)})
        evidence.close(POLICY, 0.0)
    measured = evidence.metrics["ttft_ms"]
    assert measured.alike
    assert 13 == measured.batches.n
    assert measured.interval(0.05) == measured.batches.interval(0.05) != measured.blocks.interval(0.05)


# ---- decisions


def test_a_slower_canary_is_rolled_back_at_any_time():
    decision = decided(after(45, effect=1.3), 45)
    assert ("roll_back", 0.0) == decision[:2]
    assert "TTFT +" in decision.why


def test_a_canary_is_raised_when_it_is_not_worse():
    assert "hold" == decided(after(20), 20).action
    assert "hold" == decided(after(60), 60, since=30).action
    assert ("raise", 0.5) == decided(after(60), 60)[:2]
    assert ("hold", 0.5) == decided(after(60), 60, share=0.5)[:2]
    assert "hold" == decided(after(40, noise=0.6), 60).action


def test_equal_and_better_need_a_whole_day():
    assert ("hold", 0.5) == decided(after(1439), 1439, share=0.5)[:2]
    assert ("promote", 0.5) == decided(after(1440), 1440, share=0.5)[:2]
    better = decided(after(1440, effect=0.8), 1440, share=0.5)
    assert "promote" == better.action
    assert "TTFT -20" in better.why
    final = decide(Canary(final=1.0), after(1440), (), CanaryStage(0.5, 0.0, 0.0), 86_400.0)
    assert ("promote", 1.0) == final[:2]


def test_a_noisy_week_is_undecided():
    decision = decided(after(200, noise=0.8), 7 * 1440, share=0.5)
    assert ("undecided", 0.0) == decision[:2]
    unmeasured = decided(CanaryEvidence(), 7 * 1440)
    assert ("undecided", True) == (unmeasured.action, "enough requests" in unmeasured.why)


def test_a_guard_goes_before_everything():
    assert ("roll_back", 0.0, "hung") == decided(after(1440), 1440, guards=("hung",))


def test_many_errors_stop_a_canary_within_minutes():
    assert after(2, errors=0.5).failing(POLICY) is None
    decision = decided(after(3, errors=0.5), 3)
    assert ("roll_back", "180 of 360 requests failed (50.0%; others: 0.0%)") == decision[::2]


def test_errors_of_all_are_not_the_canarys():
    evidence = CanaryEvidence()
    for at in range(30):
        evidence.open = CanaryMinute(60.0 * at, (120, 480), (60, 240))
        evidence.close(POLICY, 0.0)
    assert "hold" == decided(evidence, 30).action


def test_few_errors_more_than_its_share_are_found_in_time():
    """1.7 % of the canary's requests: below the guard, and none of the others fails."""
    evidence = after(60, errors=0.0167)
    assert evidence.failing(POLICY) is None
    worse = [each.finding.metric.figure for each in assess(evidence, POLICY) if each.finding.verdict == "worse"]
    assert ["error_ratio"] == worse


def test_bursts_of_errors_are_no_evidence():
    """Two bursts of thirty, both at the canary, among four of the others."""
    evidence = CanaryEvidence()
    for at in range(120):
        burst = {30: (30, 0), 60: (0, 30), 70: (0, 30), 80: (30, 0), 100: (0, 30), 110: (0, 30)}.get(at, (0, 0))
        evidence.open = CanaryMinute(60.0 * at, (120, 480), burst)
        evidence.close(POLICY, 0.0)
    assert 20 < evidence.errors.dispersion < 40
    assert all(each.finding.verdict != "worse" for each in assess(evidence, POLICY))


def test_errors_are_counted_at_the_share_of_their_time():
    evidence = after(30, errors=0.02)
    before = evidence.errors.log_evidence()
    evidence.at_another_share()
    assert before == pytest.approx(evidence.errors.log_evidence())
    assert 60 == evidence.errors.total[0]


# ---- how often it is wrong


def test_peeking_every_minute_raises_few_false_alarms():
    """6 days a line: at 5 %, more than 2 would be seen in one of four hundred runs. The t test stands beside it."""
    for day in (CanaryDay(), CanaryDay(0.2, share=0.05, rate=600), CanaryDay(drift=math.log(2), share=0.5)):
        rng = random.Random(f"{day}")
        found = [alarms(day, rng) for _ in range(6)]
        assert sum(ours for ours, _ in found) <= 2
        assert sum(naive for _, naive in found) >= 3


def test_a_slower_canary_is_found_within_hours():
    rng = random.Random(7)
    ends = [run(CanaryDay(effect=1.2), rng, Canary()) for _ in range(10)]
    assert {"roll_back"} == {action for action, _ in ends}
    assert max(at for _, at in ends) < 480


def test_the_world_of_the_simulation_has_its_shares():
    world = World(CanaryDay(swing=0.0), random.Random(1))
    minutes = [world.minute(at, 0.2) for at in range(100)]
    assert 0.2 == pytest.approx(sum(m.requests[0] for m in minutes) / sum(sum(m.requests) for m in minutes), abs=0.01)
