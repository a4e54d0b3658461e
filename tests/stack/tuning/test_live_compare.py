"""What live traffic says about a change: the statistics by simulation, strata, caveats, and what it refuses to say.

`PYTHONPATH=. python tests/stack/tuning/test_live_compare.py 500` measures how often the comparison is wrong, and how
often it finds what is there."""

from __future__ import annotations

import gzip
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.tuning import live
from stack.tuning.comparison import BadComparison, Check, ComparedMetric, Comparison, Finding
from stack.tuning.live import DAY_S, HOUR_S, TOO_LITTLE, WEEK_S, around_event, between_variants, consistent
from stack.tuning.samples import RequestSample, SampleLog, collect_samples, read_samples
from stack.tuning.series import LIVE_METRICS

EVENT_S = 1_778_590_800.0  # 2026-05-12T13:00:00Z
# median prompt, share of the traffic, share in cache
TEAMS = (("chat", 400, 0.5, 0.3), ("search", 1500, 0.3, 0.6), ("agents", 6000, 0.2, 0.8))
FEW = tuple(figure for figure in LIVE_METRICS if figure.has_verdict and figure.metric.figure != "engine_queue_ms")


# ---- traffic as it may be


@dataclass(frozen=True)
class World:
    """days: of history, each `period_s` before the next. correlation: of a minute with the next one; noise: of minutes;
    of_day: of days as a whole;
    diurnal: of latency over the day. After the event: longer prompts, a new team, more traffic, `ttft` times the TTFT.
    canary: share of that variant, which has the `ttft` then."""

    days: int = 4
    period_s: float = DAY_S
    hours: float = 4.0
    per_minute: float = 5.0
    correlation: float = 0.8
    noise: float = 0.1
    of_day: float = 0.05
    diurnal: float = 0.3
    longer: float = 1.0
    new_team: bool = False
    more: float = 1.0
    ttft: float = 1.0
    canary: float = 0.0


def traffic(rng: Random, world: World) -> SampleLog:
    log = SampleLog()
    phase = rng.uniform(0, 2 * math.pi)
    reach, fresh = round(world.hours * 60) + 3, math.sqrt(1 - world.correlation**2)
    for day in range(world.days + 1):
        of_day, shared, own = rng.gauss(0, world.of_day), rng.gauss(0, 1), rng.gauss(0, 1)
        for minute in range(-reach, reach + 1):
            shared, own = (
                world.correlation * shared + fresh * rng.gauss(0, 1),
                world.correlation * own + fresh * rng.gauss(0, 1),
            )
            at = EVENT_S - day * world.period_s + 60 * minute
            sun = math.sin(2 * math.pi * at / DAY_S + phase)
            slow = of_day + world.noise * shared + world.diurnal * sun
            after = day == 0 and minute >= 0
            mean = world.per_minute * (1 + 0.5 * sun) * (world.more if after else 1.0)
            teams = rng.choices(TEAMS, [team[2] for team in TEAMS], k=max(0, round(rng.gauss(mean, math.sqrt(mean)))))
            if after and world.new_team:
                teams += [("lawyers", 3000, 0.0, 0.1)] * round(world.per_minute / 5)
            for team in teams:
                _ask(log, rng, world, at + rng.uniform(0, 60), after, slow, world.noise * own, team)
    return log


def _ask(
    log: SampleLog,
    rng: Random,
    world: World,
    at: float,
    after: bool,
    slow: float,
    own: float,
    team: tuple[str, int, float, float],
) -> None:
    name, tokens, _, hits = team
    prompt = max(1, round(tokens * (world.longer if after else 1.0) * math.exp(rng.gauss(0, 0.8))))
    cached = round(prompt * hits) if rng.random() < 0.7 else 0
    answer = max(2, round(150 * math.exp(rng.gauss(0, 0.7))))
    variant = "canary" if rng.random() < world.canary else "stable"
    changed = variant == "canary" if world.canary else after
    ttft = (world.ttft if changed else 1.0) * (40 + 0.1 * (prompt - cached)) * math.exp(slow + rng.gauss(0, 0.3))
    tpot = 25 * math.exp(0.5 * slow + 0.5 * own + rng.gauss(0, 0.15))
    queue = 0.0 if rng.random() < 0.5 else rng.expovariate(0.05) * math.exp(3 * own)
    ok = rng.random() > 0.01 * math.exp(5 * own)
    ended = at + (ttft + tpot * answer) / 1000
    log.first_s, log.last_s = min(log.first_s, ended), max(log.last_s, ended)
    log.samples.append(
        RequestSample(
            at, ended, "m", name, variant, "e1", "ok" if ok else "upstream_error", prompt, cached, answer, queue, None,
            ttft if ok else None, tpot if ok else None, ttft + tpot * answer,
        )
    )  # fmt: skip


def simulate(count: int, world: World, seed: int = 0, resamples: int = 300) -> Counter[str]:
    """In how many of so many comparisons a metric was called better or worse; `any`: at least one was."""
    called: Counter[str] = Counter()
    for n in range(count):
        log = traffic(Random(f"{seed}-{n}"), world)
        if world.canary:
            told = between_variants(log, "stable", "canary", metrics=FEW, resamples=resamples, seed=n)
        else:
            told = around_event(log, EVENT_S, world.hours * HOUR_S, metrics=FEW, resamples=resamples, seed=n)
        found = [each.metric.figure for each in told.findings if each.verdict in ("better", "worse")]
        called.update(found)
        called["any"] += bool(found)
    return called


WORLDS = {
    "nothing changed; 4 days before": World(),
    "nothing changed; 1 week before": World(days=1, period_s=WEEK_S),
    "nothing changed; no history": World(days=0),
    "nothing changed; 4 days; minutes correlate at 0.9": World(correlation=0.9),
    "prompts 1.5 times as long and a new team; 4 days": World(longer=1.5, new_team=True),
    "prompts 1.5 times as long and a new team; no history": World(days=0, longer=1.5, new_team=True),
    "TTFT +15 %; 4 days": World(ttft=1.15),
    "TTFT +15 %; 4 days; minutes 5 % apart": World(ttft=1.15, noise=0.05),
    "TTFT +15 %; no history": World(days=0, ttft=1.15),
    "canary of 20 %; nothing changed": World(days=0, canary=0.2),
    "canary of 20 %; TTFT +15 %": World(days=0, canary=0.2, ttft=1.15),
}


# ---- by simulation

# seconds; the numbers that count come from `python tests/stack/tuning/test_live_compare.py 500`
SMALL = World(days=1, per_minute=3.0)


def test_unchanged_traffic_is_rarely_called_a_change():
    """With a day's course, days that differ as a whole, and minutes that correlate at 0.8."""
    assert simulate(6, SMALL, seed=5, resamples=150)["any"] <= 1
    assert simulate(6, replace(SMALL, days=0), seed=5, resamples=150)["any"] <= 1
    assert simulate(6, replace(SMALL, days=0, canary=0.2), seed=5, resamples=150)["any"] <= 1


def test_longer_prompts_and_a_new_team_are_no_effect():
    assert simulate(6, replace(SMALL, longer=1.5, new_team=True), seed=5, resamples=150)["any"] <= 1


def test_what_is_there_is_found():
    """30 % more TTFT after an event, and 15 % more of a canary."""
    assert simulate(4, replace(SMALL, ttft=1.3, noise=0.05), seed=5, resamples=150)["ttft_ms"] >= 2
    assert simulate(3, World(days=0, canary=0.3, ttft=1.15, per_minute=8), seed=5, resamples=150)["ttft_ms"] >= 2


# ---- plain traffic, in which everything is known


def record(started_s: float, **fields: object) -> RequestRecord:
    """A request that took a second."""
    usual = {
        "request_id": f"r{started_s}", "ts": timestamp(started_s + 1), "team": "t", "model": "m", "upstream": "e1",
        "outcome": "ok",
        "prompt_tokens": 100,
        "cached_tokens": 20, "completion_tokens": 50, "queue_ms": 0.0, "ttft_ms": 100.0, "tpot_ms": 10.0,
        "e2e_ms": 1000.0,
    }  # fmt: skip
    return msgspec.convert(usual | fields, RequestRecord)


def steady(
    before_h: float = 4.2, after_h: float = 4.2, every_s: float = 60.0, at_s: float = EVENT_S
) -> list[RequestRecord]:
    """Traffic without any noise around an event; nothing starts at the very moment."""
    count = int(before_h * HOUR_S / every_s), int(after_h * HOUR_S / every_s)
    return [record(at_s + (n + 0.5) * every_s) for n in range(-count[0], count[1])]


def later(records: list[RequestRecord], **fields: object) -> list[RequestRecord]:
    """The same with other values after the event."""
    return [msgspec.structs.replace(each, **fields) if each.ts >= timestamp(EVENT_S) else each for each in records]


def finding(told: Comparison, figure: str) -> Finding:
    return next(each for each in told.findings if each.metric.figure == figure)


def check(told: Comparison, name: str) -> Check:
    return next(each for each in told.checks if each.name == name)


def around(records: object, at_s: float = EVENT_S, **options: object) -> Comparison:
    return around_event(records, at_s, **{"resamples": 200, **options})


def test_a_step_in_traffic_without_noise_is_told_to_the_digit():
    found = finding(around(later(steady(), ttft_ms=112.0)), "ttft_ms")
    assert (pytest.approx(100), pytest.approx(112), pytest.approx(1.12)) == (found.a, found.b, found.effect)
    assert "worse" == found.verdict
    assert "consistent with 12 % higher (12 % higher to 12 % higher)" == consistent(found)
    assert found.why.startswith("consistent with worse: 12 % higher")


def test_nothing_that_changed_is_no_sign_of_a_change():
    told = around(steady())
    for figure, margin in (("ttft_ms", "5 %"), ("hit_ratio", "5 points"), ("queue_ms", "1 ms")):
        assert "equivalent" == finding(told, figure).verdict
        assert consistent(finding(told, figure)).endswith(f" {margin}")
    assert {"equivalent", "inconclusive"} == {each.verdict for each in told.findings}


def test_live_traffic_around_an_event_is_never_controlled():
    told = around(steady())
    assert not told.controlled
    assert "nothing was interleaved" in told.caveats[0]
    assert ("before", "after", "live traffic") == (told.a, told.b, told.workload)
    assert told.point.startswith("2026-05-12T13:00:00.000Z, 4 h ")


def test_fewer_cache_hits_are_told_in_points():
    found = finding(around(later(steady(), cached_tokens=8)), "hit_ratio")
    assert (pytest.approx(0.2), pytest.approx(0.08), "worse") == (found.a, found.b, found.verdict)
    assert consistent(found).startswith("consistent with 12 points lower")


def test_no_errors_in_few_requests_say_little():
    """None in 200 is up to 1.5 % (three in n, 95 %), so half a point cannot be left out."""
    found = finding(around(steady(every_s=72.0)), "error_ratio")
    assert (0.0, 0.0, "inconclusive") == (found.a, found.b, found.verdict)
    assert found.high == pytest.approx(3 / 200, rel=0.05)
    assert "equivalent" == finding(around(steady(every_s=10.0)), "error_ratio").verdict


# ---- the baseline


def test_baseline_is_last_week_then_days_then_a_line():
    """The same hours a week before come first then days then a line."""
    week, day = (steady(at_s=EVENT_S - shift) for shift in (WEEK_S, DAY_S))
    assert " 1 week " in check(around(week + day + steady()), "baseline").what
    assert " 1 day " in check(around(day + steady()), "baseline").what
    alone = check(around(steady()), "baseline")
    assert not alone.ok
    assert "a straight line" in alone.what


def test_log_silent_a_week_ago_has_no_baseline():
    """A log that goes back a week but was silent then has no baseline."""
    assert not check(around([record(EVENT_S - 8 * DAY_S), *steady()]), "baseline").ok


def test_what_every_day_does_at_that_hour_is_no_effect():
    """The afternoon is slower by half, every day."""
    days = [
        record(at_s + (n + 0.5) * 60, ttft_ms=150.0 if n >= 0 else 100.0)
        for at_s in (EVENT_S - 2 * DAY_S, EVENT_S - DAY_S, EVENT_S)
        for n in range(-250, 250)
    ]
    assert pytest.approx(1.0) == finding(around(days), "ttft_ms").effect


def test_a_day_that_is_slow_as_a_whole_is_no_effect():
    slow = [msgspec.structs.replace(each, ttft_ms=130.0) for each in steady()]
    assert pytest.approx(1.0) == finding(around(steady(at_s=EVENT_S - DAY_S) + slow), "ttft_ms").effect


def test_without_history_a_steady_rise_is_no_effect():
    rising = [msgspec.structs.replace(each, ttft_ms=100 * math.exp(n / 1000)) for n, each in enumerate(steady())]
    assert pytest.approx(1.0, abs=0.005) == finding(around(rising), "ttft_ms").effect


def test_long_window_has_a_baseline_without_overlap():
    """With 13 hours on each side the day before would hold the event's own hours."""
    assert DAY_S * 2 == live._shifts(DAY_S, 13 * HOUR_S)[0]
    assert DAY_S == live._shifts(DAY_S, 4 * HOUR_S)[0]


def test_another_event_in_the_hours_compared_is_said():
    told = around(steady(), other_events_s=(EVENT_S, EVENT_S + HOUR_S))
    assert re.fullmatch(r"1 .* 2026-05-12T14:00:00\.000Z", check(told, "other events").what)
    assert not check(told, "other events").ok
    assert check(told, "other events").what in told.caveats
    assert check(around(steady(), other_events_s=(EVENT_S - 30 * DAY_S,)), "other events").ok


# ---- the mix


def test_a_team_on_one_side_is_left_out_and_its_share_told():
    """The new team's prompts take ten times as long."""
    more = [record(EVENT_S + (n + 0.7) * 60, team="new", ttft_ms=1000.0) for n in range(250)]
    told = around(steady() + more)
    assert pytest.approx(1.0) == finding(told, "ttft_ms").effect
    assert not check(told, "teams").ok
    assert not check(told, "compared").ok
    assert check(told, "compared").what.startswith("67 % ")
    assert not check(told, "load").ok


def test_a_shift_to_longer_prompts_is_no_effect():
    """Short ones are three quarters before, and a quarter after; each is as fast as ever."""
    records = [
        (
            msgspec.structs.replace(each, prompt_tokens=4000, ttft_ms=900.0)
            if (n % 4 == 0) is (each.ts < timestamp(EVENT_S))
            else each
        )
        for n, each in enumerate(steady())
    ]
    told = around(records)
    assert "equivalent" == finding(told, "ttft_ms").verdict
    assert not check(told, "mix").ok
    assert "(median 100 before and 4000 after" in check(told, "mix").what


def test_longer_prompts_within_a_stratum_may_be_all_of_an_effect():
    """70 and 120 tokens are of one stratum."""
    found = finding(
        around(
            later(
                [msgspec.structs.replace(each, prompt_tokens=70) for each in steady()], prompt_tokens=120, ttft_ms=160.0
            )
        ),
        "ttft_ms",
    )
    assert "inconclusive" == found.verdict
    assert " 71 % longer" in found.why


@pytest.mark.parametrize(
    ("prompts", "ttft_ms", "verdict"),
    [(108, 100.0, "inconclusive"), (103, 102.5, "inconclusive"), (97, 102.5, "equivalent")],
)
def test_other_prompts_within_a_stratum_may_hide_an_effect(prompts: int, ttft_ms: float, verdict: str):
    """Much longer ones that take no longer; as much longer as they take; shorter ones that take a little longer."""
    assert verdict == finding(around(later(steady(), prompt_tokens=prompts, ttft_ms=ttft_ms)), "ttft_ms").verdict


def test_a_block_without_most_of_the_traffic_is_no_block():
    """The large team is silent from the second hour after the event to the third."""
    small = [record(EVENT_S + (n + 0.2) * 300, team="small") for n in range(-50, 50)]
    silent = [each for each in steady() if not timestamp(EVENT_S + HOUR_S) <= each.ts < timestamp(EVENT_S + 2 * HOUR_S)]
    assert (24, 19) == finding(around(silent + small), "ttft_ms").runs


def test_longer_answers_are_no_effect_on_the_time_they_take():
    longer = later(steady(), completion_tokens=63, e2e_ms=1250.0)
    assert "inconclusive" == finding(around(longer), "e2e_ms").verdict
    assert "prompts and answers" in finding(around(longer), "e2e_ms").why


def test_twice_the_traffic_may_be_all_of_an_effect():
    slow = later(steady(), ttft_ms=120.0)
    told = around(slow + [each for each in slow if each.ts >= timestamp(EVENT_S)])
    assert " 2 times as many " in finding(told, "ttft_ms").why
    assert "inconclusive" == finding(told, "ttft_ms").verdict


@given(st.permutations(range(3)), st.floats(0.2, 5.0))
@settings(max_examples=15, deadline=None)
def test_effect_is_independent_of_order_and_unit(order: list[int], times: float):
    """Neither which file is read first nor a factor on all times changes a ratio."""
    log = collect_samples(later(steady(every_s=120.0), ttft_ms=130.0))
    parts = [log.samples[place::3] for place in order]
    other = replace(log, samples=[each._replace(ttft_ms=each.ttft_ms * times) for part in parts for each in part])
    first, second = (finding(around(each, metrics=LIVE_METRICS[:1]), "ttft_ms") for each in (log, other))
    assert pytest.approx(first.effect) == second.effect
    assert first.verdict == second.verdict


# ---- what is left out


def test_nothing_is_taken_for_zero():
    """Requests that do not say a figure do not count in it, and a figure that none says is not measured."""
    silent = [
        record(EVENT_S + (n + 0.2) * 60, ttft_ms=None, cached_tokens=None, queue_ms=None, outcome=None)
        for n in range(-250, 250)
    ]
    told = around(steady() + silent)
    for figure, level in (("ttft_ms", 100.0), ("hit_ratio", 0.2), ("error_ratio", 0.0)):
        assert pytest.approx(level) == finding(told, figure).b
    engine = finding(told, "engine_queue_ms")
    assert (None, None, "not measured", "not measured") == (engine.a, engine.b, engine.why, consistent(engine))


def test_latencies_are_those_of_answers():
    """A request that failed after a minute is an error and not a slow answer."""
    failed = [record(EVENT_S + (n + 0.2) * 60, outcome="timeout", ttft_ms=60_000.0) for n in range(250)]
    told = around(steady() + failed)
    assert pytest.approx(1.0) == finding(told, "ttft_ms").effect
    assert ("worse", pytest.approx(0.5)) == (finding(told, "error_ratio").verdict, finding(told, "error_ratio").b)


def test_requests_in_flight_and_the_first_minute_are_left_out():
    across = [
        record(EVENT_S - 300, ts=timestamp(EVENT_S + 100), e2e_ms=400_000.0, ttft_ms=9e6),
        record(EVENT_S + 30.1, ttft_ms=9e6),
    ]
    told = around(steady() + across)
    assert pytest.approx(1.0) == finding(told, "ttft_ms").effect
    assert any(re.match("4 requests in flight .* 60 s ", caveat) for caveat in told.caveats)


def test_records_without_a_time_are_counted_and_said():
    told = around([*steady(), record(0, ts=None), record(0, ts=None)])
    assert any(caveat.startswith("2 records without ts ") for caveat in told.caveats)


def test_too_little_traffic_is_said_and_gets_no_verdict():
    told = around(steady(after_h=2.0))
    found = finding(told, "ttft_ms")
    assert ("inconclusive", None, TOO_LITTLE) == (found.verdict, found.effect, consistent(found))
    assert ["11", "18", "10"] == re.findall(r"\d+", found.why)


def test_p95_is_shown_without_a_verdict():
    told = around(later(steady(every_s=20.0), ttft_ms=150.0))
    found = finding(told, "ttft_ms.p95")
    assert (pytest.approx(1.5), "inconclusive", None) == (found.effect, found.verdict, found.p_holm)
    assert not found.has_verdict


@pytest.mark.parametrize(
    ("records", "at_s", "pattern"),
    [
        ([], EVENT_S, "no request .* time$"),
        ([record(0, ts=None)], EVENT_S, r"no request .*: .*\b1 .* no ts"),
        (
            steady(1, 1),
            EVENT_S + DAY_S,
            r"2026-05-13T13:00:00\.000Z .* both sides; .* 2026-05-12T12:00:31\.000Z to 2026-05-12T13:59:31\.000Z",
        ),
        (steady(1, 1), EVENT_S - DAY_S, r"2026-05-11T13:00:00\.000Z .* both sides; "),
        (steady(1, 0.1), EVENT_S, r" 10 minutes .* 2026-05-12T13:00:00\.000Z; .* 2026-05-12T12:00:31"),
    ],
)
def test_an_event_that_cannot_be_compared_is_one_sentence(records: list[RequestRecord], at_s: float, pattern: str):
    with pytest.raises(BadComparison, match=pattern):
        around(records, at_s)


# ---- two variants


def variants(**fields: object) -> list[RequestRecord]:
    """Two variants in turn for four hours, whose b has other values."""
    return [record(EVENT_S + n * 15, variant="ab"[n % 2], **(fields if n % 2 else {})) for n in range(960)]


def between(records: object, a: str = "a", b: str = "b") -> Comparison:
    return between_variants(records, a, b, resamples=200)


def test_two_variants_at_the_same_time_are_controlled():
    told = between(variants(ttft_ms=90.0))
    assert told.controlled
    assert all(each.ok for each in told.checks)
    assert "routed by lot" in told.caveats[0]
    found = finding(told, "ttft_ms")
    assert (pytest.approx(100), pytest.approx(90), "better") == (found.a, found.b, found.verdict)
    assert consistent(found).startswith("consistent with 10 % lower")


def test_unreadable_answers_are_a_row_of_their_own():
    """Without a verdict. Their unknown tokens are in no stratum of known ones, and not taken for 0."""
    comparison = between(variants(unreadable="usage", prompt_tokens=None, cached_tokens=None, completion_tokens=None))
    finding_row = finding(comparison, "unreadable_ratio")
    assert (0.0, 1.0, False) == (finding_row.a, finding_row.b, finding_row.has_verdict)
    assert finding(comparison, "hit_ratio").effect is None
    assert "unreadable_ratio" not in [each.metric.figure for each in between(variants()).findings]


def test_what_both_variants_do_over_the_day_is_no_effect():
    records = [msgspec.structs.replace(each, ttft_ms=100 + n / 2) for n, each in enumerate(variants())]
    assert "equivalent" == finding(between(records), "ttft_ms").verdict


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("same time", [msgspec.structs.replace(each, variant="ab"[n > 400]) for n, each in enumerate(variants())]),
        (
            "steady share",
            [
                msgspec.structs.replace(each, variant="ab"[n % 10 < (1 if n < 480 else 8)])
                for n, each in enumerate(variants())
            ],
        ),
        ("mix", variants(prompt_tokens=120)),
        ("teams", variants(team="other")),
        ("compared", variants(team="other")),
        (
            "load",
            [
                msgspec.structs.replace(each, upstream="e" + "0001"[n % 4], variant="aaab"[n % 4])
                for n, each in enumerate(variants())
            ],
        ),
        ("load", variants(upstream=None)),
    ],
)
def test_variants_that_did_not_get_the_same_are_not_controlled(name: str, records: list[RequestRecord]):
    told = between(records)
    assert not told.controlled
    assert not check(told, name).ok
    assert check(told, name).what in told.caveats
    assert told.caveats[0].startswith("not controlled: ")
    assert name in told.caveats[0]


def test_a_canary_with_little_load_may_be_faster_for_that():
    """One engine of its own with a third of the load of the other."""
    records = [
        msgspec.structs.replace(
            each, upstream=f"e{n % 4 == 3}", variant="aaab"[n % 4], ttft_ms=80.0 if n % 4 == 3 else 100.0
        )
        for n, each in enumerate(variants())
    ]
    assert " 0.33 times as many " in finding(between(records), "ttft_ms").why


def test_a_small_share_is_compared_like_a_large_one():
    """Half of the queues are empty: the median of one request is another thing than that of ten, the mean is not."""
    rng = Random(7)
    records = [
        record(EVENT_S + n, variant="b" if rng.random() < 0.1 else "a", queue_ms=rng.choice((0.0, 100.0)))
        for n in range(15_000)
    ]
    found = finding(between(records), "queue_ms")
    assert "inconclusive" == found.verdict
    assert abs(found.effect) < 6


@pytest.mark.parametrize(
    ("records", "names", "pattern"),
    [
        (variants(), ("a", "c"), r"variant c .* a \(480\), b \(480\)"),
        (variants(), ("c", "d"), r" c or d .* \(480\)"),
        (steady(), ("a", "b"), "none that names"),
        (variants(), ("a", "a"), "'a' .* itself"),
        ([], ("a", "b"), "no request .* time$"),
    ],
)
def test_missing_variants_are_named(records: list[RequestRecord], names: tuple[str, str], pattern: str):
    """Variants that are not there are named beside those that are."""
    with pytest.raises(BadComparison, match=pattern):
        between(records, *names)


def test_too_few_blocks_of_variants_are_too_little():
    assert TOO_LITTLE == consistent(finding(between(variants()[:400]), "ttft_ms"))


# ---- reading


def test_files_are_read_with_what_is_no_record_counted(tmp_path: Path):
    lines = b"".join(map(to_line, steady(1, 1)))
    (tmp_path / "a.jsonl").write_bytes(lines + b"no record\n" + to_line(record(0, ts=None)))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    log = read_samples((tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"), live.spans_around(EVENT_S))
    report = log.report
    assert (120, 120, 1, 1, 0) == (len(log.samples), report.repeats, report.total, log.untimed, log.outside)
    assert (EVENT_S - 3600 + 31, EVENT_S + 3600 - 29) == (log.first_s, log.last_s)


def test_only_compared_hours_are_kept():
    """Only the hours that are compared are kept but the reach is that of the whole log."""
    log = collect_samples(
        [record(EVENT_S - 60 * DAY_S), *steady(1, 1), record(EVENT_S + 5 * DAY_S)], live.spans_around(EVENT_S)
    )
    assert (120, 2) == (len(log.samples), log.outside)
    assert (EVENT_S - 60 * DAY_S + 1, EVENT_S + 5 * DAY_S + 1) == (log.first_s, log.last_s)


def test_large_log_is_sampled_and_says_so():
    """A log that is too large is thinned by lot and that is said."""
    log = collect_samples(steady(every_s=10.0), most=1000)
    assert 0.25 == log.share
    assert 500 < len(log.samples) < 1000
    assert len(log.samples) / 3024 == pytest.approx(0.25, rel=0.15)
    assert any("one request in 4 " in caveat for caveat in around(log).caveats)


def test_a_request_is_placed_by_when_it_began():
    assert EVENT_S == collect_samples([record(EVENT_S)]).samples[0].started_s
    assert EVENT_S + 1 == collect_samples([record(EVENT_S, e2e_ms=None)]).samples[0].started_s


# ---- words


@pytest.mark.parametrize(
    ("metric", "effect", "words"),
    [
        (ComparedMetric("x", "x", "ms", "lower"), 0.88, "12 % lower"),
        (ComparedMetric("x", "x", "ms", "lower"), 3.1, "3.1 times"),
        (ComparedMetric("x", "x", "share", "higher", "difference"), 0.025, "2.5 points higher"),
        (ComparedMetric("x", "x", "ms", "lower", "difference"), -4.0, "4 ms lower"),
    ],
)
def test_a_change_in_words(metric: ComparedMetric, effect: float, words: str):
    assert words == live._amount(metric, effect)


if __name__ == "__main__":
    how_many, wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 500, sys.argv[2] if len(sys.argv) > 2 else ""
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    for title, world in WORLDS.items():
        if wanted in title:
            called = simulate(how_many, world, first)
            sys.stdout.write(f"{title}: called a change in {called['any']} of {how_many}: {dict(called)}\n")
            sys.stdout.flush()
