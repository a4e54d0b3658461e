"""Comparison of two variants: its arithmetic, its verdicts, its checks and its gates; and in a small simulation,
how often it is wrong."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.statistics import variant_effect
from stack.bench.result import Run
from stack.tuning.comparison import (
    HEADLINE,
    BadComparison,
    Check,
    Comparison,
    Finding,
    metric_of,
    table_rows,
    verdict_counts,
)
from stack.tuning.gates import Limits, gates
from stack.tuning.run_comparison import Setting, compare_runs, smallest_effect
from tests.support.simulated_experiments import DRAWN as DRAWN_ORDER
from tests.support.simulated_experiments import INTERLEAVED, SEQUENTIAL, World, experiment, mann_whitney_p, tally

TTFT, TPOT, QUEUE, SPEED, HITS, ERRORS, MEMORY = HEADLINE
STILL = (0.99, 1.01, 1.0, 1.02, 0.98, 1.0)  # 1 to 2 % between runs
DRAWN = "ABBABAABBAAB"  # as `stack.tuning.turns` may draw it
LOUD = (0.8, 1.25, 1.0, 1.3, 0.85, 1.0)


def variant(name: str, figures: Mapping[str, Sequence[float]], order: str = INTERLEAVED, **more: object) -> list[Run]:
    """The runs of a variant at its places in the order, with these figures run by run."""
    places = [place for place, letter in enumerate(order) if letter == name]
    whole = {"asked": 100, "ok": 100, "workload": "chat", "point": "c8"}
    runs = []
    for at, place in enumerate(places):
        seen = {figure: values[at] for figure, values in figures.items() if at < len(values)}
        given = {
            "number": place,
            "variant": name,
            "started_s": 100.0 * place,
            "ended_s": 100.0 * place + 90,
            "seed": place,
            "figures": seen,
        }
        runs.append(Run(**{**whole, **given, **more}))
    return runs


def times(values: Sequence[float], by: float) -> list[float]:
    return [value * by for value in values]


def of_two(
    a: Sequence[float], b: Sequence[float], figure: str = "ttft_ms.p50", order: str = INTERLEAVED, **more: object
) -> Comparison:
    """A comparison of one figure."""
    return compare_runs(variant("A", {figure: a}, order), variant("B", {figure: b}, order), **more)


def found(comparison: Comparison, figure: str = "ttft_ms.p50") -> Finding:
    return next(each for each in comparison.findings if each.metric.figure == figure)


def check(comparison: Comparison, name: str) -> Check:
    return next(each for each in comparison.checks if each.name == name)


@pytest.mark.parametrize(("runs", "sd"), [(6, 0.03), (6, 0.08), (12, 0.08)])
def test_the_smallest_effect_is_found_in_four_of_five(runs, sd):
    """By the first step of Holm's correction, which one changed metric of seven has to pass."""
    of_b = [letter == "B" for letter in INTERLEAVED * (runs // 6)]
    when = [float(place) for place in range(len(of_b))]
    rng, effect, experiments = random.Random(4), math.log(smallest_effect(runs, sd)), 1500
    hits = sum(
        variant_effect([b * effect + rng.gauss(0, sd) for b in of_b], of_b, when).p < 0.05 / 7
        for _ in range(experiments)
    )
    assert 0.8 == pytest.approx(hits / experiments, abs=0.03)


def test_more_runs_and_fewer_metrics_find_less():
    assert smallest_effect(6) > smallest_effect(12) > 1
    assert smallest_effect(6, metrics=1) < smallest_effect(6)
    assert smallest_effect(5) is None


# ---- verdicts, and why


def test_what_is_slower_is_worse_and_what_is_more_is_better():
    """And the effect is the ratio of B to A with the interval around it."""
    figures = {"ttft_ms.p50": times(STILL, 100), "tokens_per_second": times(STILL, 50)}
    slower = {"ttft_ms.p50": times(STILL[::-1], 130), "tokens_per_second": times(STILL[::-1], 70)}
    comparison = compare_runs(variant("A", figures, DRAWN), variant("B", slower, DRAWN))
    worse, better = found(comparison), found(comparison, "tokens_per_second")
    assert ("worse", "better") == (worse.verdict, better.verdict)
    assert 1.3 == pytest.approx(worse.effect, rel=0.02)
    assert 1.2 < worse.low < worse.effect < worse.high < 1.4
    assert (100, 130) == (worse.a, worse.b)
    assert "+30.1 % (+27.8 % to +32.3 %), p <0.0001 after Holm over 2 metrics" == worse.why
    assert comparison.controlled
    assert () == comparison.caveats


def test_an_interval_within_the_margin_is_equivalent():
    same = found(of_two(STILL, STILL[::-1]))
    assert "equivalent" == same.verdict
    assert "the interval -2.0 % to +1.9 % lies within 5 %" == same.why


def test_a_sure_difference_that_is_small_is_equivalent_too():
    small = found(
        of_two(times((1, 1.001, 0.999, 1, 1.001, 0.999), 100), times((1, 1.001, 0.999, 1, 1.001, 0.999), 102))
    )
    assert "equivalent" == small.verdict
    assert small.p < 0.0001
    assert re.search(r" \+1\.\d % to \+2\.\d % .* 5 %$", small.why)


def test_noise_is_inconclusive_never_equivalent():
    loud = found(of_two(LOUD, LOUD[::-1]))
    assert "inconclusive" == loud.verdict
    assert re.search(r" -23\.3 % to \+25\.8 % .* 5 %$", loud.why)


def test_chance_p_of_one_of_many_is_inconclusive():
    """0.03 would do for one metric; of seven, one is as small in a fifth of all experiments."""
    wide = times((1.04, 0.97, 1.0, 1.03, 0.96, 1.0), 100)
    figures = {"ttft_ms.p50": wide, **{metric.figure: STILL for metric in HEADLINE[1:]}}
    other = {"ttft_ms.p50": times(wide[::-1], 1.06), **{metric.figure: STILL[::-1] for metric in HEADLINE[1:]}}
    alone, among = (
        found(compare_runs(variant("A", figures), variant("B", other), metrics=asked))
        for asked in (HEADLINE[:1], HEADLINE)
    )
    assert "worse" == alone.verdict
    assert 0.007 < alone.p < 0.05
    assert "inconclusive" == among.verdict
    assert among.p < 0.05 < among.p_holm
    assert "among 7 metrics" in among.why


def test_five_runs_of_a_variant_are_too_few_for_any_verdict():
    few = found(of_two(times(STILL[:5], 100), times(STILL, 200)))
    assert ("inconclusive", (5, 6), None) == (few.verdict, few.runs, few.p_holm)
    assert few.why.endswith(" 5 of 6")
    assert 2.0 == pytest.approx(few.effect, rel=0.02)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_very_few_runs_still_show_what_they_say(count):
    order = "ABBAABBA"[: 2 * count]
    few = found(of_two(times(STILL[:count], 100), times(STILL[:count], 200), order=order))
    assert few.why.endswith(f" {count} of 6")
    assert 2.0 == pytest.approx(few.effect, rel=0.05)
    assert (few.low is None) is (count == 1)


def test_what_was_not_measured_is_not_zero():
    comparison = of_two(STILL, ())
    only_a, only_b, neither = found(comparison), found(of_two((), STILL)), found(comparison, "queue_ms.mean")
    assert ("inconclusive", 1.0, None, None) == (only_a.verdict, only_a.a, only_a.b, only_a.effect)
    assert ((6, 0), (0, 6)) == (only_a.runs, only_b.runs)
    assert only_a.why.endswith(" B")
    assert only_b.why.endswith(" A")
    assert ((0, 0), "not measured") == (neither.runs, neither.why)


def test_a_figure_that_is_no_number_was_not_measured():
    assert (5, 6) == found(of_two([*STILL[:5], math.nan], STILL)).runs


def test_values_that_never_vary_are_equal_or_not():
    """No errors at all in both variants is equivalent; a memory peak that is always 10 and always 12 is a difference
    without noise."""
    errors = found(of_two([0.0] * 6, [0.0] * 6, "error_ratio"), "error_ratio")
    assert ("equivalent", 0.0) == (errors.verdict, errors.effect)
    assert "same value" in errors.why
    assert "equivalent" == found(of_two([10.0] * 6, [10.0] * 6, "memory_peak_gb"), "memory_peak_gb").verdict
    more = found(of_two([10.0] * 6, [12.0] * 6, "memory_peak_gb"), "memory_peak_gb")
    assert ("worse", pytest.approx(1.2)) == (more.verdict, more.effect)


def test_shares_are_compared_by_their_difference():
    hits = found(of_two([0.0] * 6, times(STILL, 0.6), "hit_ratio"), "hit_ratio")
    assert ("better", pytest.approx(0.6, abs=0.001)) == (hits.verdict, hits.effect)
    assert hits.why.startswith("+60.0 points (+59.")
    errors = found(
        of_two([0.0, 0.001, 0.0, 0.0, 0.001, 0.0], [0.0, 0.0, 0.001, 0.0, 0.0, 0.0], "error_ratio"), "error_ratio"
    )
    assert "equivalent" == errors.verdict
    assert errors.why.endswith("points lies within 0.5 points")
    assert pytest.approx(0.002 / 6) == errors.a, "the mean: a median of errors is mostly 0"


def test_a_wait_is_seen_beside_next_to_none():
    """0.02 to 0.08 ms of queue are all the same to everybody; in logarithms they would drown a wait of 25 ms."""
    none, wait = [0.02, 0.08, 0.03, 0.06, 0.02, 0.07], [24.0, 31.0, 19.0, 27.0, 22.0, 25.0]
    queue = found(of_two(none, wait, "queue_ms.mean"), "queue_ms.mean")
    assert "worse" == queue.verdict
    assert 15 < (queue.effect or 0) < 40, "times 1 ms"


def test_vanished_queue_is_better():
    """2.6 ms more or less are 2.6 ms, however near to nothing the smaller one is."""
    waits, none = [2.1, 2.9, 1.6, 3.4, 2.6, 2.2], [0.018, 0.012, 0.02, 0.015, 0.018, 0.017]
    assert ("better", "worse") == tuple(
        found(of_two(*variants, "queue_ms.mean"), "queue_ms.mean").verdict
        for variants in ((waits, none), (none, waits))
    )
    assert "equivalent" == found(of_two([0.9, 0.4, 0.7, 0.5, 0.8, 0.6], none, "queue_ms.mean"), "queue_ms.mean").verdict


def test_a_ratio_of_values_that_may_be_zero_is_a_difference():
    """A queue that is empty in some runs has no ratio; within a millisecond nobody waits longer."""
    queue = found(
        of_two([0.0, 0.2, 0.1, 0.0, 0.1, 0.0], [0.3, 0.2, 0.1, 0.4, 0.2, 0.3], "queue_ms.mean"), "queue_ms.mean"
    )
    assert ("difference", "equivalent") == (queue.metric.scale, queue.verdict)
    assert queue.why.endswith("ms lies within 1 ms")
    assert "equivalent" == found(of_two([0.0] * 6, [0.0] * 6, "queue_ms.mean"), "queue_ms.mean").verdict
    assert "worse" == found(of_two([0.0] * 6, times(STILL, 300), "queue_ms.mean"), "queue_ms.mean").verdict


def test_tiny_queue_times_three_is_no_change():
    """Three times a hundredth of a millisecond in the queue is no change."""
    assert (
        "equivalent" == found(of_two(times(STILL, 0.01), times(STILL, 0.03), "queue_ms.mean"), "queue_ms.mean").verdict
    )
    assert "worse" == found(of_two(times(STILL, 10), times(STILL, 30), "queue_ms.mean"), "queue_ms.mean").verdict


def test_other_figures_get_no_verdict_unless_asked_for():
    figures = {"short:ttft_ms.p95": times(STILL, 300), "goodput_qps": STILL}
    slower = {"short:ttft_ms.p95": times(STILL, 600), "goodput_qps": STILL}
    comparison = compare_runs(variant("A", figures), variant("B", slower))
    p95 = found(comparison, "short:ttft_ms.p95")
    assert ("inconclusive", False) == (p95.verdict, p95.has_verdict)
    assert (None, True, "short: TTFT p95") == (p95.p_holm, p95.p < 0.001, p95.metric.title)
    assert "higher" == found(comparison, "goodput_qps").metric.better
    asked = found(
        compare_runs(variant("A", figures), variant("B", slower), metrics=(*HEADLINE, metric_of("short:ttft_ms.p95"))),
        "short:ttft_ms.p95",
    )
    assert "worse" == asked.verdict


def test_a_drift_does_not_hide_an_effect_nor_make_one():
    drift = [1 + 0.1 * math.sin(math.pi * place / 11) for place in range(12)]
    mixed = {
        name: [drift[run.number] * value for run, value in zip(variant(name, {}), STILL, strict=True)] for name in "AB"
    }
    assert "equivalent" == found(of_two(mixed["A"], mixed["B"])).verdict
    assert "worse" == found(of_two(mixed["A"], times(mixed["B"], 1.1))).verdict


# ---- what must always hold

# rounded: values that differ in their last bit only would test rounding errors
VALUES = st.lists(st.floats(0.5, 2.0).map(lambda value: round(value, 6)), min_size=6, max_size=6)
OPPOSITE = {"better": "worse", "worse": "better", "equivalent": "equivalent", "inconclusive": "inconclusive"}


@given(
    VALUES,
    VALUES,
    st.sampled_from(["ttft_ms.p50", "hit_ratio", "queue_ms.mean"]),
    st.sampled_from([INTERLEAVED, SEQUENTIAL]),
)
@settings(max_examples=60, deadline=None)
def test_swapping_the_variants_turns_everything_round(a, b, figure, order):
    left, right = variant("A", {figure: a}, order), variant("B", {figure: b}, order)
    forth, back = found(compare_runs(left, right), figure), found(compare_runs(right, left), figure)
    assert OPPOSITE[forth.verdict] == back.verdict
    turned = (
        (1 / back.effect, 1 / back.high, 1 / back.low)
        if forth.metric.scale == "ratio"
        else (-back.effect, -back.high, -back.low)
    )
    assert (forth.effect, forth.low, forth.high) == pytest.approx(turned, rel=1e-6, abs=1e-9)
    assert forth.p == pytest.approx(back.p, abs=1e-9)


@given(VALUES, VALUES, st.floats(0.001, 1000))
@settings(max_examples=60, deadline=None)
def test_the_unit_changes_nothing(a, b, scale):
    plain, scaled = found(of_two(a, b)), found(of_two(times(a, scale), times(b, scale)))
    assert plain.verdict == scaled.verdict
    assert (plain.effect, plain.low, plain.high, plain.p) == pytest.approx(
        (scaled.effect, scaled.low, scaled.high, scaled.p), rel=1e-6, abs=1e-9
    )


@given(VALUES, VALUES, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_in_which_order_runs_are_given_changes_nothing(a, b, rng):
    """Their times count. Three pairs of runs each start at one moment here, and those may change places too."""
    left, right = (
        [msgspec.structs.replace(run, started_s=run.started_s // 400) for run in variant(name, {"ttft_ms.p50": each})]
        for name, each in (("A", a), ("B", b))
    )
    first = compare_runs(left, right)
    rng.shuffle(left)
    rng.shuffle(right)
    again = compare_runs(left, right)
    assert first.checks == again.checks
    one, other = found(first), found(again)
    assert (one.verdict, one.effect, one.p) == (
        other.verdict,
        pytest.approx(other.effect),
        pytest.approx(other.p, abs=1e-9),
    )


# ---- checks


def test_sequential_runs_are_uncontrolled():
    """Sequential runs are called uncontrolled and no drift is taken out."""
    comparison = of_two(STILL, times(STILL, 1.3), order=SEQUENTIAL)
    assert not comparison.controlled
    assert comparison.caveats[0].startswith("uncontrolled: sequential: ")
    assert "no drift" in comparison.caveats[0]
    assert ("worse", pytest.approx(1.3)) == (found(comparison).verdict, found(comparison).effect)
    assert "worse (uncontrolled)" == table_rows(comparison)[0].verdict


@pytest.mark.parametrize(
    ("order", "controlled"),
    [
        (INTERLEAVED, True),
        ("ABABABABABAB", True),
        ("BAABBAABBAAB", True),
        ("AAABBBBBBAAA", False),
        ("AAAABABBABBB", False),
        (SEQUENTIAL, False),
    ],
)
def test_interleaved_is_what_shares_every_slow_drift(order, controlled):
    comparison = of_two(STILL, STILL, order=order)
    assert controlled is comparison.controlled
    assert controlled or comparison.caveats[0].startswith("uncontrolled: ")


def test_blocks_are_shown_as_they_were():
    assert "(AAABBBBBBAAA, " in check(of_two(STILL, STILL, order="AAABBBBBBAAA"), "order").what


@pytest.mark.parametrize(
    ("order", "period"), [(INTERLEAVED, 4), ("ABABABABABAB", 2), ("ABBABAABBABA", 3), (DRAWN, None)]
)
def test_order_with_a_period_is_reported(order, period):
    """A disturbance of four runs follows A B B A, so that the verdict alone would blame the change."""
    slow = {place: 1.3 if place % 4 in (1, 2) else 1.0 for place in range(12)}
    a, b = ([slow[place] * STILL[place // 2] for place, letter in enumerate(order) if letter == name] for name in "AB")
    comparison = of_two(a, b, order=order)
    assert (order == INTERLEAVED) is (found(comparison).verdict == "worse")
    assert (period is None) is check(comparison, "period").ok
    assert period is None or f" {period:g} runs" in check(comparison, "period").what


def test_stalled_run_is_named_and_counts():
    """One stalled run is named and counts until it is excluded."""
    slower = times(STILL, 1.1)
    slower[3] *= 3
    a, b = variant("A", {"ttft_ms.p50": STILL}, DRAWN), variant("B", {"ttft_ms.p50": slower}, DRAWN)
    comparison, number = compare_runs(a, b), b[3].number
    assert "inconclusive" == found(comparison).verdict
    said = check(comparison, "stalls")
    assert not said.ok
    assert said.what.startswith(f"run {number} of B: TTFT p50 ")
    assert " 3.06 times higher " in said.what
    assert f"`vllm-watch compare FOLDER --exclude-run {number}`" in said.what
    without = compare_runs(a, b, excluded={number})
    assert ("worse", (6, 5)) == (found(without).verdict, found(without).runs)
    assert re.fullmatch(rf"excluded .*: run {number} of B", check(without, "runs").what)
    assert check(without, "stalls").ok


def test_two_stalls_do_not_hide_each_other():
    both = [*STILL[:2], STILL[2] * 3, STILL[3], STILL[4] * 3, STILL[5]]
    comparison = compare_runs(variant("A", {"ttft_ms.p50": STILL}, DRAWN), variant("B", {"ttft_ms.p50": both}, DRAWN))
    assert 2 == check(comparison, "stalls").what.count("run ") - check(comparison, "stalls").what.count("exclude-run ")


def test_more_than_one_excluded_run_of_a_variant_leaves_too_few():
    a, b = variant("A", {"ttft_ms.p50": STILL}, DRAWN), variant("B", {"ttft_ms.p50": times(STILL, 2)}, DRAWN)
    few = found(compare_runs(a, b, excluded={b[0].number, b[1].number}))
    assert ("inconclusive", (6, 4)) == (few.verdict, few.runs)
    assert few.why.endswith(" 4 of 5")


def test_separate_benches_are_uncontrolled():
    """Benches that were saved apart are uncontrolled even if their times mix."""
    comparison = of_two(STILL, STILL, setting=Setting(one_bench=False))
    assert not comparison.controlled
    assert comparison.caveats[0].startswith("uncontrolled: sequential: ")
    assert "run apart" in comparison.caveats[0]


def test_variants_that_run_at_the_same_time_are_controlled():
    same = [
        msgspec.structs.replace(run, started_s=1.0)
        for run in (*variant("A", {"ttft_ms.p50": STILL}), *variant("B", {"ttft_ms.p50": STILL}))
    ]
    comparison = compare_runs(same[:6], same[6:])
    assert comparison.controlled
    assert "equivalent" == found(comparison).verdict


def test_runs_that_broke_off_are_left_out_and_named():
    a, b = variant("A", {"ttft_ms.p50": STILL}), variant("B", {"ttft_ms.p50": [*STILL[:5], 900.0]})
    b[5] = msgspec.structs.replace(b[5], cut="the engine died")
    comparison = compare_runs(a, b)
    said = check(comparison, "runs").what
    assert "run 10 of B (the engine died)" in said
    assert ["10", "6", "5", "6"] == re.findall(r"\d+", said)
    assert said in comparison.caveats
    assert (6, 5) == found(comparison).runs
    assert found(comparison).b < 2


def test_variants_that_broke_off_whole_are_not_measured():
    a = variant("A", {"ttft_ms.p50": STILL}, cut="the engine died")
    comparison = compare_runs(a, variant("B", {"ttft_ms.p50": STILL}))
    assert ((0, 6), None) == (found(comparison).runs, found(comparison).a)
    assert found(comparison).why.endswith(" A")
    assert not comparison.controlled


@pytest.mark.parametrize("shape", [lambda at: at, lambda at: math.sin(math.pi * at)], ids=["line", "half sine"])
def test_a_drift_is_seen(shape):
    slower = {
        name: [value * (1 + 0.3 * shape(run.number / 11)) for run, value in zip(variant(name, {}), STILL, strict=True)]
        for name in "AB"
    }
    drifted = check(of_two(slower["A"], slower["B"]), "drift")
    assert not drifted.ok
    assert drifted.what.startswith("TTFT p50 drifted by ")
    assert "is taken out" in drifted.what
    assert check(of_two(STILL, STILL), "drift").ok


def test_a_drift_in_sequential_order_is_seen_and_not_taken_out():
    of_a, of_b = (
        [value * (1 + 0.05 * place) for value, place in zip(STILL, places, strict=True)]
        for places in (range(6), range(6, 12))
    )
    drifted = check(of_two(of_a, of_b, order=SEQUENTIAL), "drift")
    assert not drifted.ok
    assert "cannot be separated" in drifted.what


def test_a_seed_used_again_is_the_warm_cache_trap():
    """The published one: the same prompts in every run, so that the first run measures the engine and the others its
    cache."""
    warm = {"ttft_ms.p50": [100.0, *times(STILL[1:], 2)], "hit_ratio": [0.0, *[0.98] * 5]}
    comparison = compare_runs(variant("A", warm, seed=42), variant("B", warm, seed=42))
    assert not check(comparison, "cache").ok
    assert re.search(r"\bA .*same seed", check(comparison, "cache").what)
    assert "inconclusive" == found(comparison).verdict
    assert found(comparison).why.endswith(check(comparison, "cache").what)
    assert check(
        compare_runs(variant("A", warm, seed=42), variant("B", warm, seed=42), setting=Setting(repeated=True)), "cache"
    ).ok


def test_rising_hits_are_the_trap_with_other_seeds():
    """Hits that rise from run to run are the trap with other seeds."""
    warm, cold = (
        {"ttft_ms.p50": STILL, "hit_ratio": [0.1, *[0.9] * 5]},
        {"ttft_ms.p50": times(STILL, 3), "hit_ratio": [0.1] * 6},
    )
    comparison = compare_runs(variant("A", cold), variant("B", warm))
    assert re.search(r": 10 % .* B .* 90 % ", check(comparison, "cache").what)
    assert "inconclusive" == found(comparison).verdict
    prefix = {"ttft_ms.p50": STILL, "hit_ratio": [0.8] * 6}
    assert check(compare_runs(variant("A", cold), variant("B", prefix)), "cache").ok, (
        "a shared prefix hits from the first run on"
    )


def test_same_prompts_are_a_trap_in_one_cache_only():
    """Two engines may well be asked the same; one engine answers the second variant from its cache. One seed and
    another number make other prompts."""
    a, b = (variant(name, {"ttft_ms.p50": STILL}) for name in "AB")
    one_round = [msgspec.structs.replace(run, seed=other.seed) for run, other in zip(b, a, strict=True)]
    again = [msgspec.structs.replace(run, number=other.number) for run, other in zip(one_round, a, strict=True)]
    one_cache = Setting(shared_engine=True)
    fine = (compare_runs(a, one_round), compare_runs(a, again), compare_runs(a, one_round, setting=one_cache))
    assert all(check(comparison, "cache").ok for comparison in fine)
    trap = check(compare_runs(a, again, setting=one_cache), "cache")
    assert not trap.ok
    assert re.match(r"B .*same engine.* A;", trap.what)


def test_hits_rising_across_variants_are_the_trap():
    """The first run of all was cold, whosever it was."""
    a, b = (
        variant("A", {"ttft_ms.p50": STILL, "hit_ratio": [0.0, *[0.9] * 5]}),
        variant("B", {"ttft_ms.p50": STILL, "hit_ratio": [0.9] * 6}),
    )
    trap = check(compare_runs(a, b, setting=Setting(shared_engine=True)), "cache")
    assert re.search(r": 0 % .*both variants.* 90 % ", trap.what)


def test_prompts_of_another_length_make_no_verdict():
    lengths = [100 + place % 50 for place in range(600)]
    alike = of_two(STILL, times(STILL, 2), setting=Setting(lengths=(lengths, lengths[::-1])))
    longer = of_two(STILL, times(STILL, 2), setting=Setting(lengths=(lengths, [length + 20 for length in lengths])))
    assert (True, "worse") == (check(alike, "mix").ok, found(alike).verdict)
    assert (False, "inconclusive") == (check(longer, "mix").ok, found(longer).verdict)
    assert "(distance 0.40, " in check(longer, "mix").what


def test_where_no_lengths_are_given_the_engines_own_tokens_tell():
    figures = {"ttft_ms.p50": STILL, "prompt_tokens": [10_000] * 6, "completion_tokens": [5_000] * 6}
    other = {"ttft_ms.p50": STILL, "prompt_tokens": [20_000] * 6, "completion_tokens": [4_000] * 6}
    comparison = compare_runs(variant("A", figures), variant("B", other))
    prompts, answers, unknown = (
        check(comparison, "mix"),
        check(comparison, "answers"),
        check(of_two(STILL, STILL), "mix"),
    )
    assert (False, False, True) == (prompts.ok, answers.ok, unknown.ok)
    assert re.match(r"prompts .*\b100 tokens in A .*\b200 in B,", prompts.what)
    assert re.match(r"answers .*\b50 tokens in A .*\b40 in B,", answers.what)
    assert unknown.what.startswith("not checked: ")


def test_other_answer_lengths_are_a_remark():
    """A lever may well change what is answered: structured outputs do."""
    comparison = compare_runs(
        variant("A", {"ttft_ms.p50": STILL, "completion_tokens": [5_000] * 6}),
        variant("B", {"ttft_ms.p50": times(STILL, 2), "completion_tokens": [4_000] * 6}),
    )
    assert "worse" == found(comparison).verdict
    assert check(comparison, "answers").what in comparison.caveats


def test_failures_and_other_numbers_of_requests_are_told():
    comparison = compare_runs(
        variant("A", {"ttft_ms.p50": STILL}), variant("B", {"ttft_ms.p50": STILL}, asked=50, ok=45)
    )
    assert not check(comparison, "load").ok
    assert re.match(r"runs of A .*\b100 .* B 50; 30 of 300 requests of B ", check(comparison, "load").what)
    assert check(of_two(STILL, STILL), "load").ok


def test_a_p95_of_a_dozen_answers_is_told():
    few = compare_runs(
        variant("A", {"ttft_ms.p50": STILL}, asked=12, ok=12), variant("B", {"ttft_ms.p50": STILL}, asked=12, ok=12)
    )
    assert not check(few, "requests").ok
    assert re.search(r"\b20 .*: run 0 of A .*\b12$", check(few, "requests").what)


def test_what_the_runs_say_themselves_is_told_once():
    comparison = compare_runs(
        *(variant(name, {"ttft_ms.p50": STILL}, DRAWN, caveats=("scaled by 0.5",)) for name in "AB")
    )
    assert ("scaled by 0.5",) == comparison.caveats


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([], variant("B", {}), "^a .*no runs.* 6 "),
        (variant("A", {}), [*variant("A", {}), *variant("B", {})], r" b .*\(A, B\)"),
        (variant("A", {}), variant("B", {}, point="c16"), r"\(chat at c16, chat at c8\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(a, b, said):
    with pytest.raises(BadComparison, match=said):
        compare_runs(a, b)


def test_variants_of_one_name_are_told_apart():
    a = variant("A", {"ttft_ms.p50": STILL})
    assert ("A (a)", "A (b)") == (compare_runs(a, a).a, compare_runs(a, a).b)
    assert ("old", "new") == (compare_runs(a, a, names=("old", "new")).a, compare_runs(a, a, names=("old", "new")).b)


# ---- gates and the table

GATES = Limits(max_p95_regression=0.15, max_error_rate=0.005)


def gated(p95: Sequence[float], errors: Sequence[float] = (0.0,) * 6) -> Comparison:
    return compare_runs(
        variant("A", {"ttft_ms.p95": times(STILL, 100), "error_ratio": (0.0,) * 6}),
        variant("B", {"ttft_ms.p95": p95, "error_ratio": errors}),
    )


def test_gates_stay_open_within_their_limits():
    assert [] == gates(gated(times(STILL, 114), (0.004,) * 6), GATES)
    assert [] == gates(gated(times(STILL, 300), (0.5,) * 6), Limits())


def test_gate_closes_by_point_estimate_with_confidence():
    """A gate closes by the point estimate and says how sure it is."""
    sure, unsure = gates(gated(times(STILL, 130)), GATES)[0], gates(gated(times(LOUD, 117)), GATES)[0]
    assert ("max-p95-regression", "ttft_ms.p95", True) == (sure.limit, sure.figure, sure.sure)
    assert (pytest.approx(0.299, abs=0.001), 0.15) == (sure.value, sure.most)
    assert ["29.9 %", "15 %", "27.4 %", "32.4 %"] == re.findall(r"[\d.]+ %", sure.what)
    _, _, low, high = re.findall(r"(-?[\d.]+) %", unsure.what)
    assert not unsure.sure
    assert float(low) < 15 < 100 * unsure.value < float(high)


def test_the_error_gate_looks_at_b_alone_over_all_its_runs():
    """A median would miss two bad runs of six."""
    broken = gates(gated(times(STILL, 100), (0.0, 0.0, 0.0, 0.0, 0.06, 0.06)), GATES)
    assert [("max-error-rate", pytest.approx(0.02), 0.005, False)] == [
        (each.limit, each.value, each.most, each.sure) for each in broken
    ]
    assert ["2 %", "0.5 %", "0 %", "5.25 %"] == re.findall(r"[\d.]+ %", broken[0].what)
    assert "requests of B" in broken[0].what
    assert gates(gated(times(STILL, 100), (0.02,) * 6), GATES)[0].sure


def test_a_gate_that_measured_nothing_is_not_open():
    p95, errors = gates(of_two(STILL, STILL), GATES)
    assert ("max-p95-regression", "p95", None, 0.15, False) == (p95.limit, p95.figure, p95.value, p95.most, p95.sure)
    assert ("max-error-rate", "error_ratio", None, 0.005) == (errors.limit, errors.figure, errors.value, errors.most)
    assert re.search(r"^max-p95-regression: p95 .*not measured.* 15 %", p95.what)
    assert re.search(r"^max-error-rate: error_ratio .*not measured.* 0\.5 %", errors.what)


def test_a_single_run_can_break_a_gate_without_an_interval():
    comparison = compare_runs(
        variant("A", {"ttft_ms.p95": (100.0,)}, "AB"), variant("B", {"ttft_ms.p95": (130.0,)}, "AB")
    )
    (broken,) = gates(comparison, Limits(0.15))
    assert (pytest.approx(0.3), False) == (broken.value, broken.sure)
    assert "too few runs" in broken.what


def test_the_table_has_a_row_for_every_finding_in_plain_words():
    figures = {
        "ttft_ms.p50": times(STILL, 100),
        "hit_ratio": [0.0] * 6,
        "tpot_ms.p50": times(STILL, 10),
        "ttft_ms.p95": times(STILL, 1200),
    }
    other = {
        "ttft_ms.p50": times(STILL, 2),
        "hit_ratio": [0.62] * 6,
        "tpot_ms.p50": times(STILL, 49),
        "ttft_ms.p95": times(STILL, 1200),
    }
    rows = {row.metric: row for row in table_rows(compare_runs(variant("A", figures), variant("B", other)))}
    assert ("100 ms", "2 ms", "-98.0 %", "better") == (
        rows["TTFT p50"].a,
        rows["TTFT p50"].b,
        rows["TTFT p50"].change,
        rows["TTFT p50"].verdict,
    )
    assert ("0 %", "62 %", "+62.0 points") == (rows["cache hits"].a, rows["cache hits"].b, rows["cache hits"].change)
    assert "4.9 times" == rows["TPOT p50"].change
    assert ("1,200 ms", "no verdict") == (rows["TTFT p95"].a, rows["TTFT p95"].verdict)
    assert ("", "", "", "", "", "inconclusive", "not measured") == rows["queue time"][1:]


def test_a_judgement_counts_its_verdicts_and_is_json():
    comparison = of_two(STILL, times(STILL, 1.5))
    assert {"better": 0, "worse": 1, "equivalent": 0, "inconclusive": 6} == verdict_counts(comparison)
    assert "worse" == msgspec.json.decode(msgspec.json.encode(comparison))["findings"][0]["verdict"]
    assert comparison == msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison)


# ---- how often it is wrong; `make bench-judge` has thousands


@pytest.mark.parametrize("drift", ["line", "half sine"])
def test_a_a_comparison_is_hardly_ever_different(drift):
    """An variant compared with itself is hardly ever called different."""
    told = tally(World(0.08, drift), 250, seed=2)
    assert told.alarms <= 0.05 * told.of
    assert 0 == told.broken["order"]


def test_periodic_disturbance_does_not_follow_the_drawn_order():
    drawn, fixed = (
        tally(World(0.08, order=order, period=4, amplitude=0.2), 250, seed=2) for order in (DRAWN_ORDER, INTERLEAVED)
    )
    assert drawn.alarms <= 0.06 * drawn.of < 0.2 * fixed.of < fixed.alarms
    assert (0, fixed.of) == (drawn.broken["period"], fixed.broken["period"])


def test_excluding_a_stall_restores_the_power():
    """Stall costs the power and excluding the named run brings it back."""
    told = tally(World(0.03, "line", effect=1.1, stall=3.0), 100, seed=2)
    assert told.share("worse") < 0.1
    assert told.broken["stalls"] > 0.97 * told.of
    assert told.excluded_ttft["worse"] > 0.8 * told.of


def test_no_run_is_named_without_a_stall():
    assert tally(World(0.08, "line"), 250, seed=2).broken["stalls"] < 0.05 * 250


def test_equivalent_is_found_on_a_quiet_machine():
    """Equivalent is found where the machine is quiet and a tenth where it is not loud."""
    quiet, effect = (
        tally(World(0.03, "half sine"), 200, seed=2),
        tally(World(0.03, "half sine", effect=1.1), 200, seed=2),
    )
    assert quiet.share("equivalent") > 0.3
    assert effect.share("worse") > 0.8
    assert effect.share("better") == 0


def test_the_naive_ways_cry_wolf_in_the_same_simulation():
    """Requests counted as if each were an experiment, and one variant after the other while the machine gets slower:
    the comparison calls it uncontrolled."""
    rng = random.Random(3)
    pooled = [mann_whitney_p(*experiment(World(0.08, kind="requests"), rng)[2]) < 0.05 for _ in range(60)]
    assert sum(pooled) > 0.3 * len(pooled)
    sequential = tally(World(0.03, "line", order=SEQUENTIAL), 100, seed=3)
    assert sequential.plain_t > 0.4 * sequential.of
    assert sequential.broken["order"] == sequential.of
