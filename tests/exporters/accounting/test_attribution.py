"""Whose the seconds, joules and cents were: what adds up, always, and who gets which part in cases that one can reckon
by hand."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.accounting.attribution import NO_MODEL, Attribution, AttributionState
from exporters.accounting.busy_hours import HOUR_S, Hours, sweep
from exporters.accounting.gpu_use import (
    ABORTED,
    DEFAULT_DECODE_WEIGHT,
    EVIDENCE_S,
    EVIDENCE_TOKENS,
    IDLE,
    NOTHING,
    UNATTRIBUTED,
    GpuShare,
    PhaseTimes,
    UsageSample,
    mig_fraction,
    split_energy,
)
from exporters.accounting.prices import ApiPrice, GpuPrice, Prices
from exporters.catalogue import EVERYTHING, attributed
from exporters.catalogue.metric import Kind, Metric
from exporters.requests.work import Work

T0 = 1_760_000_400.0
CARD = GpuShare("GPU-1", name="NVIDIA H100 80GB HBM3")
PRICES = Prices(gpu_hour=3.6, currency="EUR")  # a second costs 0.001
CLOSE = 1e-9


def sums(attribution: Attribution, metric: Metric, *by: str, **where: str) -> dict[tuple[str, ...], float]:
    """Samples of a metric that match, summed by labels."""
    found: Counter[tuple[str, ...]] = Counter()
    for sample, labels, value in attribution.samples():
        if sample is metric and where.items() <= labels.items():
            found[tuple(labels[name] for name in by)] += value
    return dict(found)


def total(attribution: Attribution, metric: Metric, **where: str) -> float:
    return sum(sums(attribution, metric, **where).values())


def seconds(attribution: Attribution) -> dict[str, float]:
    """GPU seconds by team, as far as there are any."""
    return {team: s for (team,), s in sums(attribution, attributed.TEAM_SECONDS, "team").items() if s}


def pending(attribution: Attribution, part: str) -> float:
    pools = [model.pool for model in attribution.models.values()]
    if part == "seconds":
        return sum(pool.seconds for pool in pools)
    return sum(sum(getattr(pool, part).values()) for pool in pools)


def look(
    from_s: float, to_s: float, running: tuple[float | None, float | None] = (1, 1), **more: object
) -> UsageSample:
    """A look at the only engine of the only model, at times since T0."""
    settled = {"gpus": (CARD,), **more}
    return UsageSample("vllm", "chat", T0 + from_s, T0 + to_s, *running, **settled)  # type: ignore[arg-type]


def after(*looks: UsageSample, prices: Prices | None = None) -> Attribution:
    attribution = Attribution(prices)
    for each in looks:
        attribution.advance(each)
    return attribution


FIRST = look(0, 0, logged={"red": NOTHING, "blue": NOTHING})


# ---- the sums

tokens = st.integers(0, 100_000).map(float)
works = st.builds(Work, tokens, tokens, tokens)
running = st.sampled_from([None, 0.0, 1.0, 7.0])
TEAMS = ("red", "blue", "__other__")
cards = st.tuples(
    st.builds(
        GpuShare,
        uuid=st.sampled_from(["GPU-1", "GPU-2", "MIG-3"]),
        name=st.sampled_from([None, "NVIDIA H100", "NVIDIA L4"]),
        fraction=st.sampled_from([1.0, 3 / 7]),
        joules=st.none() | st.floats(0, 1e5),
        method=st.sampled_from(["counter", "integrated"]),
    )
)


@st.composite
def histories(draw: st.DrawFn) -> list[UsageSample]:
    """Looks one after the other at two engines that serve one model and one that serves another, over several hours."""
    at_s, told, looks = dict.fromkeys("abc", 0.0), {model: {} for model in ("chat", "code")}, []
    abandoned: dict[str, dict[str, Work]] = {model: {} for model in told}
    lost = dict.fromkeys((ABORTED, UNATTRIBUTED), NOTHING)
    for _ in range(draw(st.integers(1, 12))):
        upstream = draw(st.sampled_from("abc"))
        model = "code" if upstream == "c" else "chat"
        length_s = draw(st.sampled_from([0.0, 0.001, 5.0, 31.0, 4000.0]))
        for team in draw(st.sets(st.sampled_from(TEAMS))):
            told[model] = {**told[model], team: told[model].get(team, NOTHING).plus(draw(works))}
        for team in draw(st.sets(st.sampled_from(TEAMS))):
            abandoned[model] = {**abandoned[model], team: abandoned[model].get(team, NOTHING).plus(draw(works))}
        which = draw(st.sampled_from([ABORTED, UNATTRIBUTED]))
        lost[which] = lost[which].plus(draw(works))
        looks.append(
            UsageSample(
                upstream, model, T0 + at_s[upstream], T0 + at_s[upstream] + length_s, draw(running), draw(running),
                waiting=draw(st.sampled_from([0.0, 3.0])), inference_s=draw(st.floats(0, 100)),
                decode_s=draw(st.floats(0, 100)),
                prefill_s=draw(st.floats(0, 100)), produced=draw(works), logged=told[model], abandoned=abandoned[model],
                aborted=lost[ABORTED], missing_in_log=lost[UNATTRIBUTED],
                gpus=draw(cards),
            )
        )  # fmt: skip
        at_s[upstream] += length_s
    return looks


def near(value: float) -> object:
    return pytest.approx(value, rel=CLOSE, abs=1e-9)


def assert_all_is_accounted_for(attribution: Attribution, looks: Iterable[UsageSample], prices: Prices) -> None:
    used = [(each, card) for each in looks for card in each.gpus]
    allocated = sum(each.length_s * card.fraction for each, card in used)
    assert near(allocated) == total(attribution, attributed.ALLOCATED)
    assert near(allocated) == total(attribution, attributed.TEAM_SECONDS) + pending(attribution, "seconds")
    assert near(sum(card.joules or 0 for _, card in used)) == total(attribution, attributed.TEAM_ENERGY) + pending(
        attribution, "joules"
    )
    rates = [(each, prices.per_hour(card.name, card.fraction) / HOUR_S) for each, card in used]
    idle_cost = sum(sum(model.idle_cost.values()) for model in attribution.models.values())
    cost = total(attribution, attributed.COST, basis="allocation") + pending(attribution, "cost") + idle_cost
    assert near(sum(each.length_s * rate for each, rate in rates)) == cost
    usage = total(attribution, attributed.COST, basis="usage") + pending(attribution, "cost")
    assert near(sum((each.busy_s or 0) * rate for each, rate in rates)) == usage


@settings(deadline=None, max_examples=40)
@given(histories(), st.booleans())
def test_every_second_joule_and_cent_is_somebodys(looks, spread):
    """Over teams, idle, aborted, unattributed and pending: all the time that was allocated, all that was used, all that
    it cost."""
    prices = Prices(gpu_hour=2.0, gpus=(GpuPrice("H100", 3.0), GpuPrice("L4", 0.7)), spread_idle=spread)
    attribution = after(*looks, prices=prices)
    assert_all_is_accounted_for(attribution, looks, prices)
    assert all(value >= 0 for metric, _, value in attribution.samples() if metric is not attributed.SHARE_DIFFERENCE)


@settings(deadline=None, max_examples=25)
@given(histories(), st.integers(0, 12))
def test_a_restart_in_between_changes_nothing(looks, cut):
    """The state goes through JSON and back; what follows is counted as if nothing had been."""
    before = after(*looks[:cut], prices=PRICES)
    resumed = Attribution(PRICES, msgspec.json.decode(msgspec.json.encode(before.state()), type=AttributionState))
    for each in looks[cut:]:
        resumed.advance(each)
    through = after(*looks, prices=PRICES)
    assert [(m.name, labels, near(value)) for m, labels, value in through.samples()] == [
        (m.name, labels, v) for m, labels, v in resumed.samples()
    ]


@settings(deadline=None, max_examples=25)
@given(histories(), st.lists(st.floats(0, 1), max_size=3))
def test_more_looks_at_the_same_time_change_no_sum(looks, cuts):
    """A window cut into shorter ones, with the counters read at its end, is the same time, energy and cost."""
    cut = [piece for each in looks for piece in pieces(each, cuts)]
    whole, split = after(*looks, prices=PRICES), after(*cut, prices=PRICES)
    for metric, part in ((attributed.TEAM_SECONDS, "seconds"), (attributed.TEAM_ENERGY, "joules")):
        assert near(total(whole, metric) + pending(whole, part)) == total(split, metric) + pending(split, part)
    costs = [total(one, attributed.COST, basis="allocation") + pending(one, "cost") for one in (whole, split)]
    assert near(costs[0]) == costs[1]


def pieces(each: UsageSample, cuts: Sequence[float]) -> list[UsageSample]:
    """A look as several, the last with all that its counters grew by; what ran at its ends ran at every cut."""
    marks = [0.0, *sorted(cuts), 1.0]
    found = []
    for low, high in itertools.pairwise(marks):
        middle = each.running_before
        cards = tuple(
            replace(card, joules=None if card.joules is None else card.joules * (high - low)) for card in each.gpus
        )
        piece = replace(
            each,
            from_s=each.from_s + each.length_s * low,
            to_s=each.from_s + each.length_s * high,
            running_after=middle,
            gpus=cards,
        )
        found.append(replace(piece, inference_s=0.0, decode_s=0.0, prefill_s=0.0, produced=NOTHING))
    found[-1] = replace(
        found[-1],
        running_after=each.running_after,
        inference_s=each.inference_s,
        decode_s=each.decode_s,
        prefill_s=each.prefill_s,
        produced=each.produced,
    )
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TEAMS), works), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_lines_changes_nothing(lines, rng):
    """Only what was read by the time of a look counts, not who came first."""

    def told(order: Iterable[tuple[str, Work]]) -> dict[str, Work]:
        found: dict[str, Work] = {}
        for team, work in order:
            found[team] = found.get(team, NOTHING).plus(work)
        return found

    shuffled = list(lines)
    rng.shuffle(shuffled)
    one, other = (after(look(0, 0), look(0, 10, logged=told(order))) for order in (lines, shuffled))
    assert {team: near(s) for team, s in seconds(one).items()} == seconds(other)


# ---- who gets which part


def test_teams_share_busy_time_by_their_work():
    """A generated token weighs 4 while nothing is known: 400 prompt tokens of red are as much work as 100 generated
    ones of blue."""
    logged = {"red": Work(400, 0, 0), "blue": Work(0, 0, 100)}
    attribution = after(FIRST, look(0, 10, logged=logged, produced=Work(400, 0, 100)))
    assert {"red": 5.0, "blue": 5.0} == seconds(attribution)
    assert {("default", "chat"): DEFAULT_DECODE_WEIGHT} == sums(
        attribution, attributed.DECODE_WEIGHT, "method", "model_name"
    )


def test_tokens_in_flight_keep_their_part():
    """Half of what the engine made belongs to requests that still run: half of its time waits for them."""
    logged = {"red": Work(0, 0, 100)}
    attribution = after(FIRST, look(0, 10, logged=logged, produced=Work(0, 0, 200)))
    assert {"red": 5.0} == seconds(attribution)
    assert {(): 5.0} == sums(attribution, attributed.PENDING)
    attribution.advance(look(10, 20, (1, 0), logged={"red": Work(0, 0, 200)}))
    assert {"red": 15.0, IDLE: 5.0} == seconds(attribution)


def test_line_before_the_engine_count_is_paid_once():
    """The log may be some seconds ahead of the engine's page; the tokens that come later are then nobody's work in
    flight."""
    red = {"red": Work(0, 0, 100)}
    attribution = after(FIRST, look(0, 5, logged=red), look(5, 10, logged=red, produced=Work(0, 0, 100)))
    assert 0.0 == attribution.models["chat"].generation_ahead
    attribution.advance(look(10, 15, logged={**red, "blue": Work(0, 0, 100)}, produced=Work(0, 0, 100)))
    assert {"red": 5.0, "blue": 10.0} == seconds(attribution)


def test_uncounted_tokens_are_not_missed_for_ever():
    """1,000 tokens in the log that no page shows: two looks later, what is in flight is seen again."""
    attribution = after(FIRST, look(0, 5, logged={"red": Work(0, 0, 1000)}))
    for number in (1, 2):
        attribution.advance(
            look(5 * number, 5 * number + 5, logged={"red": Work(0, 0, 1000 + 10 * number)}, produced=Work(0, 0, 100))
        )
    assert 80.0 == attribution.models["chat"].generation_ahead


def test_aborted_prompts_had_their_part_of_the_cache():
    """Who hung up was told no usage; of 1,000 such tokens a tenth was computed where the engine computed a tenth."""
    logged = {"red": Work(900, 800, 0)}
    attribution = after(FIRST, look(0, 10, logged=logged, aborted=Work(1000, 0, 0), produced=Work(2000, 1800, 0)))
    assert {"red": near(5.0), ABORTED: near(5.0)} == seconds(attribution)


def test_what_the_cache_had_was_no_work():
    """Hits of the prefix cache are tokens: nothing is multiplied by a block size, so 1,000 of 1,600 leave 600, not
    0."""
    logged = {"red": Work(1600, 1000, 0), "blue": Work(600, 0, 0)}
    assert {"red": 5.0, "blue": 5.0} == seconds(after(FIRST, look(0, 10, logged=logged, produced=Work(2200, 1000, 0))))


def test_log_without_cached_tokens_gets_its_share():
    """Engines tell clients of cached tokens only when asked to; else prompts would look like more work than the engine
    did, and answers like less."""
    logged = {"red": Work(1000, 0, 0), "blue": Work(0, 0, 25)}
    assert {"red": 5.0, "blue": 5.0} == seconds(after(FIRST, look(0, 10, logged=logged, produced=Work(1000, 900, 25))))


def test_work_for_callers_who_hung_up_has_a_name():
    """The engine's counters of finished requests never show it."""
    attribution = after(
        FIRST, look(0, 10, logged={"red": Work(0, 0, 60)}, aborted=Work(0, 0, 40), produced=Work(0, 0, 100))
    )
    assert {"red": near(6.0), ABORTED: near(4.0)} == seconds(attribution)


def test_work_that_was_broken_off_is_its_teams_and_is_paid_once():
    """blue's record claims 30 tokens of a stream that it left. When the engine counts 40 aborted ones, 10 are left that
    no record claims."""
    logged, left = {"red": Work(0, 0, 70)}, {"blue": Work(0, 0, 30)}
    attribution = after(FIRST, look(0, 10, logged=logged, abandoned=left, produced=Work(0, 0, 100)))
    assert {"red": near(7.0), "blue": near(3.0)} == seconds(attribution)
    assert {("blue",): near(3.0)} == {
        k: v for k, v in sums(attribution, attributed.TEAM_SECONDS, "team", method="aborted").items() if v
    }
    attribution.advance(look(10, 20, logged=logged, abandoned=left, aborted=Work(0, 0, 40), produced=Work(0, 0, 10)))
    assert {"red": near(7.0), "blue": near(3.0), ABORTED: near(10.0)} == seconds(attribution)


def test_answer_finished_after_disconnect_is_paid_once():
    """The engine counts it as finished, the log has no usage of it: the reconciliation calls it missing in the log, and
    the record has claimed it before."""
    left = {"blue": Work(30, 0, 70)}
    attribution = after(FIRST, look(0, 10, abandoned=left, produced=Work(30, 0, 70)))
    attribution.advance(look(10, 20, abandoned=left, missing_in_log=Work(30, 0, 70)))
    assert {"blue": near(10.0)} == seconds(attribution)
    assert 10.0 == pending(attribution, "seconds")


def test_high_estimate_hides_no_later_abort():
    """An estimate that was too high does not swallow what breaks off later."""
    left = {"blue": Work(0, 0, 1000)}
    rest = [look(at, at + 10, (0, 0), abandoned=left, aborted=Work(0, 0, 100)) for at in range(10, 60, 10)]
    attribution = after(FIRST, look(0, 10, abandoned=left, produced=Work(0, 0, 100)), *rest)
    attribution.advance(look(60, 70, abandoned=left, aborted=Work(0, 0, 200), produced=Work(0, 0, 100)))
    assert {"blue": near(10.0), IDLE: near(50.0), ABORTED: near(10.0)} == seconds(attribution)


def test_work_that_no_log_shows_has_a_name():
    attribution = after(
        FIRST, look(0, 10, logged={"red": Work(0, 0, 60)}, missing_in_log=Work(0, 0, 40), produced=Work(0, 0, 100))
    )
    assert {"red": near(6.0), UNATTRIBUTED: near(4.0)} == seconds(attribution)
    assert {("tokens", UNATTRIBUTED): near(4.0)} == {
        key: value
        for key, value in sums(attribution, attributed.TEAM_SECONDS, "method", "team").items()
        if key[1] == UNATTRIBUTED and value
    }


def test_what_was_told_before_the_first_look_takes_nothing():
    """A log that was there before us is history, and its work was done in time that nobody measured."""
    history = {"red": Work(0, 0, 10**6)}
    attribution = after(
        look(0, 0, logged=history), look(0, 10, logged={**history, "blue": Work(0, 0, 1)}, produced=Work(0, 0, 1))
    )
    assert {"blue": 10.0} == seconds(attribution)


def test_idle_work_without_owner_is_unattributed():
    """Half a minute is given to the lines; then no one will come."""
    looks = [
        FIRST,
        look(0, 10, produced=Work(0, 0, 50)),
        look(10, 20, (0, 0)),
        look(20, 45, (0, 0)),
        look(45, 50, (0, 0)),
    ]
    attribution = after(*looks[:-1])
    assert {(): 10.0} == sums(attribution, attributed.PENDING)
    attribution.advance(looks[-1])
    assert {UNATTRIBUTED: 10.0, IDLE: 40.0} == seconds(attribution)
    assert 0.0 == attribution.models["chat"].generation_ahead


def test_request_between_scrapes_waits_for_its_line():
    """After an hour of rest too: its line may be read some seconds after the engine's page."""
    attribution = after(FIRST, look(0, 3600, (0, 0)), look(3600, 3605, (0, 0), inference_s=2.0, produced=Work(0, 0, 9)))
    attribution.advance(look(3605, 3610, (0, 0), logged={"red": Work(0, 0, 9)}))
    assert {"red": 2.0, IDLE: 3608.0} == seconds(attribution)


def test_resting_engine_does_not_settle_a_busy_model():
    """One engine that rests does not settle a model that runs on another."""
    looks = [FIRST, look(0, 10, produced=Work(0, 0, 50)), *(look(t, t + 20, (0, 0)) for t in (10, 30, 50))]
    other = [replace(each, upstream="other", running_before=1.0, running_after=1.0, gpus=()) for each in looks]
    attribution = after(*(each for pair in zip(looks, other, strict=True) for each in pair))
    assert {(): 10.0} == sums(attribution, attributed.PENDING)


@pytest.mark.parametrize(
    ("running", "inference_s", "busy_s"),
    [
        ((2, 3), 0, 10),
        ((0, 0), 0, 0),
        ((0, 0), 4, 4),
        ((0, 0), 400, 10),
        ((0, 2), 0, 5),
        ((2, 0), 60, 5),
        ((None, 1), 0, None),
        ((1, None), 0, None),
    ],
)
def test_busy_is_what_the_engine_says(running, inference_s, busy_s):
    """Running at both ends: all of it; at one: half; between two idle looks: as long as the requests took, at most all
    of it; silent: unknown."""
    assert busy_s == look(0, 10, running, inference_s=inference_s).busy_s


def test_a_silent_engine_still_holds_its_card():
    """Allocated time goes on; whether it was busy nobody knows, until it answers."""
    attribution = after(
        FIRST,
        look(0, 10, (1, None)),
        look(10, 20, (None, None)),
        look(20, 30, (None, 0)),
        look(30, 40, (0, 0)),
        prices=PRICES,
    )
    assert {UNATTRIBUTED: 30.0, IDLE: 10.0} == seconds(attribution)
    assert 0.0 == total(attribution, attributed.BUSY)
    assert 40.0 == total(attribution, attributed.ALLOCATED)
    assert 0.0 == total(attribution, attributed.COST, basis="usage")


def test_gpu_seconds_begin_at_0_once_a_gpu_is_seen():
    """Without a GPU there are no seconds of one and with it they begin at 0."""
    worked = {"running": (1, 1), "logged": {"red": Work(100.0, 0.0, 10.0)}, "produced": Work(100.0, 0.0, 10.0)}
    attribution = after(look(0, 0, logged={"red": NOTHING}, gpus=()), look(0, 5, gpus=(), **worked))
    assert {attributed.DECODE_WEIGHT} == {metric for metric, _, _ in attribution.samples()}
    attribution.advance(look(5, 5, **worked))
    began = {
        (metric, labels.get("team")): value
        for metric, labels, value in attribution.samples()
        if metric is not attributed.DECODE_WEIGHT
    }
    assert {0.0} == set(began.values())
    assert {attributed.ALLOCATED, attributed.BUSY, attributed.TEAM_SECONDS, attributed.PENDING} == {
        metric for metric, _ in began
    }
    assert {"red", IDLE, ABORTED, UNATTRIBUTED} == {team for metric, team in began if metric is attributed.TEAM_SECONDS}


def test_a_card_that_no_engine_claims_is_on_the_bill():
    attribution = Attribution(PRICES)
    attribution.add_unclaimed([replace(CARD, joules=500.0)], T0, T0 + 10)
    assert {("unknown", NO_MODEL, UNATTRIBUTED): 10.0} == sums(
        attribution, attributed.TEAM_SECONDS, "method", "model_name", "team"
    )
    assert {("unknown", UNATTRIBUTED): 500.0} == sums(attribution, attributed.TEAM_ENERGY, "state", "team")
    assert {("allocation", UNATTRIBUTED): near(0.01)} == sums(attribution, attributed.COST, "basis", "team")


def test_restarted_engine_counts_on_from_its_totals():
    """Growth of what fell is what it is now: the sums of others are not swallowed."""
    assert Work(5, 0, 3) == Work(5, 0, 3).since(Work(100, 50, 100))
    assert Work(5, 1, 0) == Work(105, 51, 100).since(Work(100, 50, 100))


def test_growth_is_taken_of_each_team_before_it_is_summed():
    """A team whose count began again swallows no other's: 100 of red and 100 of blue are half and half."""
    attribution = after(look(0, 0, logged={"red": Work(0, 0, 10_000), "blue": NOTHING}))
    attribution.advance(look(0, 10, logged={"red": Work(0, 0, 100), "blue": Work(0, 0, 100)}, produced=Work(0, 0, 200)))
    assert {"red": 5.0, "blue": 5.0} == seconds(attribution)


# ---- the weight of a generated token


def test_a_generated_token_weighs_what_the_engine_took_for_it():
    """20 ms against 0.5 ms: 40. The sum of decode times is asked for; that of mean times per token would say 0.2 s
    here, and 0.4."""
    attribution = after(FIRST, look(0, 10, decode_s=20.0, prefill_s=1.0, produced=Work(3000, 1000, 1000)))
    assert {("engine",): near(40.0)} == sums(attribution, attributed.DECODE_WEIGHT, "method")


def test_the_weight_keeps_within_reason_and_forgets():
    evidence = PhaseTimes()
    evidence.learn(look(0, 10, decode_s=1e6, prefill_s=1e-3, produced=Work(1000, 0, 1000)))
    assert 256.0 == evidence.decode_weight
    evidence.learn(look(0, 20_000, decode_s=10.0, prefill_s=10.0, produced=Work(1000, 0, 1000)))
    assert pytest.approx(1.0, rel=0.01) == PhaseTimes(10.0, 10.0, 1000, 1000).decode_weight
    assert evidence.decode_weight < 256.0
    assert PhaseTimes(1.0, 1.0, 99.0, 1000.0).decode_weight is None
    assert PhaseTimes(EVIDENCE_S, EVIDENCE_S, EVIDENCE_TOKENS, EVIDENCE_TOKENS).decode_weight is not None


# ---- energy


def powered(
    from_s: float, to_s: float, watts: float, running: tuple[float | None, float | None], **more: object
) -> UsageSample:
    return look(from_s, to_s, running, gpus=(replace(CARD, joules=watts * (to_s - from_s)),), **more)


def test_idle_power_is_measured_and_unattributed():
    """After half a minute of 100 W at rest, 10 s at 400 W are 3,000 J of work; the 1,000 J of a GPU that is merely on
    stay idle's."""
    rest = [powered(t, t + 10, 100.0, (0, 0)) for t in (0, 10, 20)]
    attribution = after(FIRST, *rest)
    assert {("GPU-1",): 100.0} == sums(attribution, attributed.IDLE_WATTS, "uuid")
    attribution.advance(powered(30, 40, 400.0, (1, 1), logged={"red": Work(0, 0, 10)}, produced=Work(0, 0, 10)))
    joules = sums(attribution, attributed.TEAM_ENERGY, "state", "team")
    assert {("idle", IDLE): 4000.0, ("active", "red"): 3000.0} == {key: value for key, value in joules.items() if value}


def test_a_short_rest_tells_no_idle_power():
    """Power falls for a while after the last request; until it is known, a busy second's energy is all work."""
    attribution = after(
        FIRST, powered(0, 20, 100.0, (0, 0)), powered(20, 30, 400.0, (1, 1)), powered(30, 59, 100.0, (0, 0))
    )
    assert {} == sums(attribution, attributed.IDLE_WATTS, "uuid")
    assert 4000.0 == pending(attribution, "joules")


def test_a_queue_is_no_rest():
    attribution = after(FIRST, powered(0, 60, 300.0, (0, 0), waiting=5))
    assert {} == sums(attribution, attributed.IDLE_WATTS, "uuid")


def test_a_part_of_a_card_tells_no_idle_power():
    """Its neighbours' work is in what the GPU draws."""
    part = GpuShare("MIG-1", fraction=3 / 7, joules=6000.0, method="mig_fraction")
    assert {} == sums(after(look(0, 0), look(0, 60, (0, 0), gpus=(part,))), attributed.IDLE_WATTS, "uuid")


def test_the_way_energy_was_measured_goes_with_it():
    """Joules by the driver's counter and joules from power over time are not one figure."""
    cards = (replace(CARD, joules=10.0), GpuShare("GPU-2", joules=30.0, method="integrated"))
    attribution = after(FIRST, look(0, 10, gpus=cards, logged={"red": Work(0, 0, 10)}, produced=Work(0, 0, 10)))
    assert {("counter", "red"): 10.0, ("integrated", "red"): 30.0} == {
        key: value for key, value in sums(attribution, attributed.TEAM_ENERGY, "method", "team").items() if value
    }


def test_a_divided_card_counts_by_its_compute_slices():
    assert 3 / 7 == mig_fraction("3g.40gb")
    assert 1 / 7 == mig_fraction("1c.1g.10gb+me")
    with pytest.raises(ValueError, match=r"'H100' .*1g\.10gb"):
        mig_fraction("H100")
    part = GpuShare("MIG-1", fraction=3 / 7, profile="3g.40gb")
    attribution = after(look(0, 0), look(0, 7, gpus=(part,)))
    assert near(3.0) == sums(attribution, attributed.ALLOCATED, "uuid")["MIG-1",]


@given(
    st.floats(0, 1e6),
    st.dictionaries(
        st.text(min_size=1), st.tuples(st.sampled_from([1 / 7, 3 / 7]), st.none() | st.floats(0, 1)), min_size=1
    ),
)
def test_a_divided_cards_energy_is_split_whole(joules, parts):
    assert pytest.approx(joules, rel=CLOSE) == sum(part for part, _ in split_energy(joules, parts).values())


def test_divided_gpu_energy_follows_activity():
    """A divided GPUs energy goes by activity or says that it does not."""
    assert {"a": (75.0, "mig_activity"), "b": (25.0, "mig_activity")} == split_energy(
        100.0, {"a": (3 / 7, 0.5), "b": (1 / 7, 0.5)}
    )
    assert {"a": (near(75.0), "mig_fraction"), "b": (near(25.0), "mig_fraction")} == split_energy(
        100.0, {"a": (3 / 7, 0.5), "b": (1 / 7, None)}
    )
    assert {"a": (50.0, "mig_fraction"), "b": (50.0, "mig_fraction")} == split_energy(
        100.0, {"a": (3 / 7, 0.0), "b": (3 / 7, 0.0)}
    )


# ---- cost


def test_cost_has_two_bases():
    """An hour of a GPU at 3.60, busy for a quarter: 3.60 by allocation, of which 2.70 stand idle; 0.90 by usage."""
    looks = [FIRST, look(0, 900, logged={"red": Work(0, 0, 10)}, produced=Work(0, 0, 10)), look(900, 3600, (0, 0))]
    found = sums(after(*looks, prices=PRICES), attributed.COST, "basis", "currency", "team")
    assert {
        ("allocation", "EUR", IDLE): near(2.7),
        ("allocation", "EUR", "red"): near(0.9),
        ("usage", "EUR", "red"): near(0.9),
    } == {key: value for key, value in found.items() if value}


def test_idle_time_can_be_charged_to_those_who_used_the_hour():
    """It is known when the hour is over: red had three quarters of its work, so three quarters of its idle cost."""
    prices = msgspec.structs.replace(PRICES, spread_idle=True)
    start = HOUR_S - T0 % HOUR_S  # a full hour
    logged = {"red": Work(0, 0, 30), "blue": Work(0, 0, 10)}
    looks = [
        look(start, start),
        look(start, start + 1000, logged=logged, produced=Work(0, 0, 40)),
        look(start + 1000, start + 3000, (0, 0), logged=logged),
    ]
    attribution = after(*looks, prices=prices)
    attribution.advance(look(start + 3600, start + 3600, (0, 0), logged=logged))
    found = sums(attribution, attributed.COST, "team", basis="allocation")
    assert {"red": near(2.25), "blue": near(0.75)} == {team: value for (team,), value in found.items() if value}


def test_an_hour_that_nobody_used_stays_idle():
    prices = msgspec.structs.replace(PRICES, spread_idle=True)
    attribution = after(look(0, 0), look(0, 1800, (0, 0)), look(5400, 5400, (0, 0)), prices=prices)
    assert {(IDLE,): near(1.8)} == {
        key: v for key, v in sums(attribution, attributed.COST, "team", basis="allocation").items() if v
    }


def test_cost_is_booked_at_the_price_of_the_moment():
    attribution = after(FIRST, look(0, 1000, (0, 0)), prices=PRICES)
    attribution.prices = Prices(gpu_hour=7.2, currency="EUR")
    attribution.advance(look(1000, 2000, (0, 0)))
    attribution.prices = Prices(gpu_hour=3.6, currency="USD")
    attribution.advance(look(2000, 3000, (0, 0)))
    assert {("EUR",): near(3.0), ("USD",): near(1.0)} == sums(attribution, attributed.COST, "currency")


def test_without_prices_there_is_no_cost():
    attribution = after(FIRST, look(0, 10, logged={"red": Work(0, 0, 10)}))
    assert {} == sums(attribution, attributed.COST, "team") | sums(attribution, attributed.API_COST, "team")


def test_the_same_tokens_elsewhere():
    """1,000 prompt tokens, of which 400 cached, and 100 generated: 0.6 x 1 + 0.4 x 0.5 + 0.1 x 3."""
    prices = msgspec.structs.replace(PRICES, api=(ApiPrice("chat", 1.0, 3.0, 0.5),))
    attribution = after(FIRST, look(0, 10, logged={"red": Work(1000, 400, 100)}), prices=prices)
    assert near(1.1) == sums(attribution, attributed.API_COST, "currency", "model_name", "team")["EUR", "chat", "red"]


# ---- the page


def test_samples_carry_the_labels_of_the_catalogue():
    prices = msgspec.structs.replace(PRICES, api=(ApiPrice("*", 1.0, 3.0),))
    rest = [powered(t, t + 10, 100.0, (0, 0)) for t in (0, 10, 20)]
    attribution = after(
        FIRST,
        *rest,
        powered(30, 40, 400.0, (1, 1), logged={"red": Work(0, 0, 10), "blue": Work(0, 0, 5)}),
        prices=prices,
    )
    attribution.compare(int((T0 + 40) // HOUR_S), {"chat": {"red": 1.0, "blue": 1.0}})
    seen = set()
    for metric, labels, value in attribution.samples():
        assert metric.labels == tuple(sorted(labels))
        assert isinstance(value, float)
        seen.add(metric)
    assert set(attributed.ATTRIBUTED) == seen


def test_names_collide_with_no_other():
    mine = {metric.name for metric in attributed.ATTRIBUTED}
    assert len(attributed.ATTRIBUTED) == len(mine)
    assert set() == mine & {metric.name for metric in EVERYTHING if metric not in attributed.ATTRIBUTED}
    assert all(metric.labels == tuple(sorted(metric.labels)) for metric in attributed.ATTRIBUTED)
    assert {m for m in attributed.ATTRIBUTED if m.name.endswith("_total")} == {
        m for m in attributed.ATTRIBUTED if m.kind is Kind.COUNTER
    }


# ---- the sweep line


def test_each_busy_second_is_split_over_those_who_run():
    """red alone for 2 s, then beside two of blue for 3 s, then blue's two for 1 s."""
    requests = [(0, 5, "red"), (2, 6, "blue"), (2, 6, "blue")]
    assert {"red": near(3.0), "blue": near(3.0)} == sweep(requests, (0, 100))


def test_a_window_cuts_what_reaches_over_its_ends():
    assert {"red": near(5.0), "blue": near(5.0)} == sweep([(-100, 200, "red"), (0, 200, "blue")], (0, 10))
    assert {} == sweep([(0, 10, "red"), (20, 30, "blue"), (15, 15, "red")], (10, 20))


spans = st.tuples(st.floats(0, 3600), st.floats(0, 300), st.sampled_from(TEAMS)).map(
    lambda one: (T0 + one[0], T0 + one[0] + one[1], one[2])
)


def union_s(requests: Iterable[tuple[float, float, str]], window: tuple[float, float]) -> float:
    """The time in which any ran, the plain way."""
    found, end = 0.0, window[0]
    for start, stop, _ in sorted(requests):
        found += max(0.0, min(stop, window[1]) - max(start, end))
        end = max(end, min(stop, window[1]))
    return found


@settings(deadline=None)
@given(st.lists(spans, max_size=60), st.randoms(use_true_random=False))
def test_the_sweep_sums_to_the_time_in_which_any_ran(requests, rng):
    """Also cut into windows, and in any order."""
    whole = sweep(requests, (T0, T0 + 3600))
    assert pytest.approx(union_s(requests, (T0, T0 + 3600)), rel=CLOSE, abs=1e-8) == sum(whole.values())
    rng.shuffle(requests)
    parts: Counter[str] = Counter()
    for number in range(10):
        parts.update(sweep(requests, (T0 + 360 * number, T0 + 360 * (number + 1))))
    assert {team: pytest.approx(s, rel=CLOSE, abs=1e-8) for team, s in whole.items()} == {
        team: s for team, s in parts.items() if team in whole
    }


HOUR = 490_000
START = HOUR * HOUR_S


@settings(deadline=None)
@given(st.lists(spans, max_size=40))
def test_an_hour_is_swept_minute_by_minute_to_the_same_end(requests):
    moved = [(start - T0 + START, end - T0 + START, team) for start, end, team in requests]
    hours = Hours()
    for start, end, team in moved:
        hours.add(start, end, "chat", team, now_s=end)
    closed = hours.close_hour(START + HOUR_S + 600)
    found = closed.seconds().get("chat", {}) if closed else {}
    expected = sweep(moved, (START, START + HOUR_S))
    assert {team: pytest.approx(s, rel=CLOSE, abs=1e-8) for team, s in expected.items()} == {
        team: s for team, s in found.items() if s or team in expected
    }


def test_an_hour_waits_for_those_who_began_in_it():
    """A request that ends at ten past four ran before four too; the hour is closed once, and later lines leave it
    alone."""
    hours = Hours(late_s=600)
    hours.add(START + 3590, START + HOUR_S + 10, "chat", "red", now_s=START + HOUR_S + 10)
    assert hours.close_hour(START + HOUR_S + 599) is None
    closed = hours.close_hour(START + HOUR_S + 600)
    assert (HOUR, {"chat": {"red": 10.0}}) == (closed.hour, closed.seconds())
    hours.add(START, START + HOUR_S + 20, "chat", "red", now_s=START + HOUR_S + 700)
    assert hours.close_hour(START + HOUR_S + 1200) is None
    assert HOUR + 1 == hours.close_hour(START + 2 * HOUR_S + 600).hour


def test_lines_of_another_time_open_no_hours():
    """A log read from its beginning, or a clock gone wrong, has nothing live to be compared with."""
    hours = Hours()
    for end_s in (START - 100 * HOUR_S, START + 100 * HOUR_S):
        hours.add(end_s - 1, end_s, "chat", "red", now_s=START)
    assert hours.close_hour(START + 1000 * HOUR_S) is None


def test_a_crowded_hour_is_a_fair_sample_of_bounded_size():
    """Each request has the same chance: a team with a quarter of them keeps about a quarter of the time."""
    hours = Hours(limit=2000, rng=random.Random(7))
    for number in range(20_000):
        at_s = START + number * 0.15
        hours.add(at_s, at_s + 0.1, "chat", "red" if number % 4 else "blue", now_s=at_s)
    closed = hours.close_hour(START + HOUR_S + 600)
    assert (2000, 20_000) == (len(closed), closed.count)
    found = closed.seconds()["chat"]
    assert pytest.approx(0.25, abs=0.04) == found["blue"] / sum(found.values())


def test_the_live_split_is_near_the_one_that_knows_every_request():
    """Ten minutes of short prompts with short answers and long ones, two requests a second: by tokens at 5 s looks as
    by who ran at each moment."""
    rng = random.Random(3)
    requests, at_s = [], 0.0
    while at_s < 600:
        at_s += rng.expovariate(2.0)
        team = "red" if rng.random() < 0.7 else "blue"
        requests.append((at_s, team, rng.randint(50, 2000), rng.randint(10, 200 if team == "red" else 1000)))
    prefill_s, decode_s = 1 / 2000, 1 / 50

    def engine(now_s: float) -> tuple[float, ...]:
        """What its counters say: running, prompt and generated tokens, decode and prefill time of those that
        finished."""
        found = [0.0] * 5
        for start, _, prompt, completion in requests:
            first, end = start + prompt * prefill_s, start + prompt * prefill_s + completion * decode_s
            found[0] += start <= now_s < end
            found[1] += prompt * (first <= now_s)
            found[2] += min(completion, max(0.0, now_s - first) / decode_s)
            found[3] += completion * decode_s * (end <= now_s)
            found[4] += prompt * prefill_s * (end <= now_s)
        return tuple(found)

    attribution, before = after(FIRST), engine(0)
    for now_s in range(5, 680, 5):
        now = engine(now_s)
        told = {"red": NOTHING, "blue": NOTHING}
        for start, team, prompt, completion in requests:
            # lines are read up to a moment after the page
            if start + prompt * prefill_s + completion * decode_s <= now_s + 0.1:
                told[team] = told[team].plus(Work(prompt, 0, completion))
        _, prompts, generated, decoding, prefilling = (b - a for a, b in zip(before, now, strict=True))
        attribution.advance(
            look(
                now_s - 5,
                now_s,
                (before[0], now[0]),
                decode_s=decoding,
                prefill_s=prefilling,
                produced=Work(prompts, 0, generated),
                logged=told,
            )
        )
        before = now
    swept = sweep([(start, start + p * prefill_s + c * decode_s, team) for start, team, p, c in requests], (0, 680))
    assert {("engine", "chat"): pytest.approx(40.0, rel=0.05)} == sums(
        attribution, attributed.DECODE_WEIGHT, "method", "model_name"
    )
    live = seconds(attribution)
    assert near(0.0) == pending(attribution, "seconds")
    assert pytest.approx(swept["red"] / sum(swept.values()), abs=0.03) == live["red"] / (live["red"] + live["blue"])


def test_the_two_ways_to_share_are_compared_by_the_hour():
    """By tokens red had 3 of 4; by requests running, half. What no log shows is in neither."""
    logged = {"red": Work(0, 0, 30), "blue": Work(0, 0, 10)}
    attribution = after(FIRST, look(0, 10, logged=logged, missing_in_log=Work(0, 0, 40), produced=Work(0, 0, 80)))
    attribution.compare(int((T0 + 10) // HOUR_S), {"chat": {"red": 4.0, "blue": 4.0}, "unseen": {"red": 1.0}})
    assert {("chat", "red"): near(-0.25), ("chat", "blue"): near(0.25)} == sums(
        attribution, attributed.SHARE_DIFFERENCE, "model_name", "team"
    )
    attribution.compare(HOUR, {})
    assert {} == sums(attribution, attributed.SHARE_DIFFERENCE, "team")


def test_busy_seconds_stand_at_0_while_unknown():
    attribution = after(look(0, 10, (None, None)))
    assert {("GPU-1",): 0.0} == sums(attribution, attributed.BUSY, "uuid")
