"""Admission: who is let in, who goes next, and what is left behind, on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.gateway.admission import OUTPUT_WEIGHT, PROMPT_WEIGHT, Admission
from stack.gateway.admission_state import Refusal, Ticket, TicketState
from stack.gateway.policy import Band, Team
from tests.support.admission_gate import Gate, gate, ignore, policy
from tests.support.admission_sim import BUSY, FAIR, FIFO, SLOTS, Arrival, End, Flood, Simulation, busy, percentile

# ---- whose turn it is


def test_who_finds_a_free_slot_goes_at_once_and_others_wait():
    it = gate(slots=2)
    it.lets("a", "b", "vip")
    assert ["a", "b"] == it.gone
    assert TicketState.WAITING is it.tickets["vip"].state


def test_within_a_team_whoever_came_first_goes_first():
    it = gate(slots=1)
    it.lets("a.0", "a.1", "a.2")
    assert ["a.0", "a.1", "a.2"] == it.order()


def test_a_higher_band_goes_before_a_lower_one_that_came_earlier():
    it = gate(slots=2)
    it.lets("a.0", "a.1", "b", "vip")
    assert ["vip"] == it.end("a.0")


def test_teams_of_one_band_take_turns():
    """Teams of one band take turns however many one of them sends."""
    it = gate(slots=1)
    it.lets("a.0", "a.1", "a.2", "a.3", "b.0", "b.1")
    assert ["a.0", "b.0", "a.1", "b.1", "a.2", "a.3"] == it.order()


def test_teams_of_two_bands_of_one_rank_take_turns_as_well():
    it = gate(
        {"x": Team(band="demo"), "y": Team(band="replay")}, {"demo": Band(rank=0), "replay": Band(rank=0)}, slots=1
    )
    it.lets("x.0", "x.1", "x.2", "y.0")
    assert ["x.0", "y.0", "x.1", "x.2"] == it.order()


def test_a_team_of_twice_the_weight_has_twice_the_turns():
    it = gate({"a": Team(band="usual", weight=2), "b": Team(band="usual")}, slots=1)
    it.lets(*(f"a.{at}" for at in range(6)), *(f"b.{at}" for at in range(6)))
    assert {"a": 4, "b": 2} == Counter(name[0] for name in it.order()[:6])


def test_a_large_request_counts_as_much_as_many_small_ones():
    it = gate(slots=1)
    it.lets("a.large", prompt=100, output=450)  # 1000
    it.lets("a.next", prompt=1)
    it.lets(*(f"b.{at}" for at in range(5)), prompt=100, output=100)  # 300 each
    assert ["a.large", "b.0", "b.1", "b.2", "b.3", "a.next", "b.4"] == it.order()


def test_expected_output_that_never_came_is_given_back():
    it = gate(slots=1)
    it.lets("a.0", prompt=1, output=1000)
    it.lets("a.1", "b.0", "b.1", prompt=1, output=10)
    assert ["b.0"] == it.end("a.0", prompt=1, output=2)
    assert ["a.1"] == it.end("b.0"), "a has had 5 so far, b 21"


def test_what_is_given_back_counts_by_weight_as_well():
    it = gate({"a": Team(band="usual", weight=10), "b": Team(band="usual")}, slots=1)
    it.lets("a.0", prompt=0, output=500)  # 100
    it.lets("a.1", prompt=0, output=0)
    it.lets("b.0", "b.1", prompt=85)
    assert ["b.0"] == it.end("a.0", output=450), "a has had 90"
    assert ["b.1"] == it.end("b.0"), "b has had 85"


def test_who_comes_back_after_a_pause_has_saved_nothing_up():
    it = gate(slots=1)
    it.lets("a.0", "b.0")
    it.lets(*(f"b.{at}" for at in range(1, 20)))
    for name in ("a.0", *(f"b.{at}" for at in range(10))):
        it.end(name)
    it.lets(*(f"a.{at}" for at in range(1, 5)))
    assert ["b.10", "a.1", "b.11", "a.2", "b.12", "a.3", "b.13", "a.4", "b.14"] == it.order()[11:20]


def test_band_stays_below_its_ceiling():
    """A band holds no more than its ceiling even while slots are free."""
    it = gate(slots=4)
    it.lets("batch.0", "batch.1", "batch.2")
    assert ["batch.0", "batch.1"] == it.gone
    it.lets("a")
    assert ["batch.0", "batch.1", "a"] == it.gone


def test_a_band_below_its_floor_goes_before_a_higher_one():
    it = gate(slots=2)
    it.lets("vip.0", "vip.1", "batch.0", "batch.1", "vip.2")
    assert ["batch.0"] == it.end("vip.0")
    assert ["vip.2"] == it.end("vip.1")


def test_team_limit_lets_the_next_team_go():
    """A team runs no more than it may and the next one goes instead."""
    it = gate({"a": Team(band="usual", max_running=1), "b": Team(band="usual")}, slots=3)
    it.lets("a.0", "a.1", "b.0")
    assert ["a.0", "b.0"] == it.gone
    assert ["a.1"] == it.end("a.0")


def test_nobody_is_overtaken_for_being_large():
    it = gate(slots=9, tokens=100)
    it.lets("a.0", prompt=60)
    it.lets("a.large", prompt=70)
    it.lets("a.small", prompt=10)
    assert ["a.0"] == it.gone
    assert ["a.large", "a.small"] == it.end("a.0")


def test_least_served_goes_first_despite_a_large_one():
    """Who has had less goes first even while a large one waits for room."""
    it = gate(slots=9, tokens=100)
    it.lets("a.0", prompt=60)
    it.lets("a.large", prompt=70)
    it.lets("b.0", "b.1", prompt=40)
    assert ["a.0", "b.0"] == it.gone, "b has had nothing yet, a 60"
    assert ["b.1"] == it.end("b.0")
    assert [] == it.end("b.1"), "b has had 80: it is the turn of a, which waits for room"
    assert ["a.large"] == it.end("a.0")


def test_the_budget_counts_what_is_sent_and_what_is_expected():
    it = gate(slots=9, tokens=100)
    it.lets("a.0", prompt=30, output=30)
    it.lets("a.1", prompt=30, output=11)
    it.lets("b", prompt=30, output=10)
    assert ["a.0", "b"] == it.gone


def test_a_request_larger_than_the_whole_budget_goes_alone():
    it = gate(slots=9, tokens=100)
    it.lets("a.0", prompt=60)
    it.lets("a.huge", prompt=500)
    assert ["a.huge"] == it.end("a.0")


# ---- who is refused


def test_a_team_with_all_it_may_have_in_flight_is_refused():
    it = gate({"a": Team(band="usual", max_in_flight=2)}, slots=1)
    it.lets("a.0", "a.1")
    assert Refusal("team_limit", 1.0) == it.ask("a.2")


def test_rejected_team_is_told_when_its_own_ends():
    """A team that is refused is told when one of its own will have ended."""
    it = gate({"a": Team(band="usual", max_in_flight=4)}, slots=4)
    it.lets("a.0", "a.1", "a.2", "a.3")
    it.end("a.0", after=20.0)
    it.lets("a.4")
    assert Refusal("team_limit", 5.0) == it.ask("a.5"), "four of them, 20 s each"


def test_a_full_queue_refuses_whoever_would_have_to_wait():
    it = gate(slots=1, queue=1)
    it.lets("a.0", "a.1")
    assert Refusal("queue_full", 1.0) == it.ask("b")
    it.end("a.0")
    it.lets("b")


def test_a_full_queue_refuses_nobody_who_finds_a_slot():
    it = gate(slots=4, queue=1)
    it.lets("batch.0", "batch.1", "batch.2")  # the last waits at the ceiling of its band
    it.lets("a")
    assert "a" in it.gone


def test_the_queue_is_bounded_in_tokens_as_well():
    it = gate(slots=1, queue_tokens=100)
    it.lets("a.0", prompt=90)
    it.lets("a.1", prompt=60)
    assert "queue_full" == it.ask("a.2", prompt=41).reason
    it.lets("a.3", prompt=40)


def test_too_long_a_wait_is_rejected_with_its_length():
    """Who would wait longer than its band may is refused at once and told for how long."""
    it = gate(slots=1)
    it.lets("vip.0", "vip.1")
    it.end("vip.0", after=6.0)  # a slot is held for 6 s
    it.lets("vip.2")
    assert Refusal("est_wait", 12.0) == it.ask("vip.3")
    it.lets("a")  # may wait a minute


def test_wait_of_exactly_the_limit_is_admitted():
    """Who would wait exactly as long as its band may is admitted."""
    it = gate(slots=1)
    it.lets("vip.0", "vip.1")
    it.end("vip.0", after=5.0)
    it.lets("vip.2", "vip.3")
    assert 10.0 < it.admission.wait_s("vip")
    assert Refusal("est_wait", 15.0) == it.ask("vip.4")


def test_nobody_is_told_to_come_back_later_than_clients_obey():
    it = gate({"a": Team(band="usual")}, {"usual": Band(rank=0, max_wait_s=100.0)}, slots=1)
    it.lets("a.0", "a.1")
    it.end("a.0", after=5000.0)
    assert Refusal("est_wait", 120.0) == it.ask("a.2")


def test_a_team_without_terms_is_no_team():
    with pytest.raises(KeyError):
        gate().ask("nobody")


# ---- how long one waits


def test_nobody_knows_a_wait_before_a_request_has_ended():
    it = gate(slots=1)
    it.lets(*(f"a.{at}" for at in range(50)))
    assert 0.0 == it.admission.wait_s("a")


@pytest.mark.parametrize(
    ("team", "wait_s"),
    [("vip", 2.0), ("a", 8.0), ("b", 4.0), ("batch", 20.0)],
    ids=["before all", "behind its own", "turns with a", "behind all, on its half of the slots"],
)
def test_the_wait_counts_those_who_go_first(team: str, wait_s: float):
    it = gate(slots=2)
    it.lets("a.first", "a.second")
    it.end("a.first", after=4.0)  # held for 4 s each
    it.lets("b.running")
    it.lets("a.0", "a.1", "a.2", "b.0" if team == "vip" else "a.3")
    assert wait_s == pytest.approx(it.admission.wait_s(team), abs=2.1)


# ---- what is left behind


def test_leaving_twice_is_leaving_once():
    it = gate(slots=1)
    it.lets("a.0", "a.1", "a.2")
    for _ in range(3):
        it.end("a.1")
        it.end("a.0")
    assert ["a.0", "a.2"] == it.gone
    it.end("a.2")
    assert (0, 0, 0, 0) == it.counts()


def test_fewer_slots_take_none_and_more_are_given_out():
    """Fewer slots take nothing from who has one and more slots are given out at once."""
    it = gate(slots=3)
    it.lets("a.0", "a.1", "a.2", "a.3")
    it.admission.resize(1, it.now)
    assert [] == it.end("a.0") + it.end("a.1")
    it.admission.resize(3, it.now)
    assert "a.3" == it.gone[-1]


def test_a_new_policy_keeps_everyone_who_is_there():
    it = gate(slots=1)
    it.lets("a.0", "a.1", "batch.0", "b.0")
    it.admission.adopt(policy({"batch": Team(band="high"), "b": Team(band="low")}, slots=2), it.now)
    assert ["a.0", "b.0"] == it.gone, "the other slot is now b's, whose band is below its floor"
    assert ["a.0", "b.0", "batch.0", "a.1"] == it.order(), "batch was raised above a, which the file no longer has"
    assert (0, 0, 0, 0) == it.counts()
    it.admission.adopt(policy({"b": Team(band="low")}, slots=2), it.now)
    assert ["b"] == [standing.team for standing in it.admission.standings()]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", "leave", "leave", "resize", "adopt")),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    max_size=120,
)
POLICIES = (
    policy(slots=3, tokens=200, queue=20),
    policy(
        {
            "a": Team(band="high", max_running=1),
            "b": Team(band="low", weight=3),
            "batch": Team(band="usual", max_in_flight=4),
        },
        slots=2,
        queue=9,
    ),
    policy({"a": Team(band="only"), "vip": Team(band="only")}, {"only": Band(rank=5, ceiling=0.3)}, slots=7, tokens=50),
)


@given(OPERATIONS)
@settings(max_examples=300, deadline=None)
def test_any_sequence_keeps_counts_and_uses_slots(operations: list[tuple[str, int, int]]):
    """Whatever happens counts are right and no slot stays free."""
    it, tickets, now, current = Admission(POLICIES[0]), [], 0.0, POLICIES[0]
    for what, first, second in operations:
        now += second / 10
        if what == "ask" and (names := sorted(current.teams)):
            name, slots, logprobs = names[first % len(names)], second % 13 if second % 2 else 1, (first % 3, second % 5)
            asked = it.ask(name, second, first, now, lambda name=name: _fits(it, name), ignore, max(1, slots), logprobs)
            tickets += [asked] if isinstance(asked, Ticket) else []
        elif what == "leave" and tickets:
            it.leave(tickets[first % len(tickets)], now, second, first)
        elif what == "resize":
            it.resize(1 + first % 9, now)
        elif what == "adopt":
            current = POLICIES[first % len(POLICIES)]
            it.adopt(current, now)
        _is_right(it, tickets)
    while (running := next((ticket for ticket in tickets if ticket.state is TicketState.RUNNING), None)) is not None:
        it.leave(running, now)
    assert (0, 0, 0, 0) == (it.running, it.waiting, it.tokens, it.waiting_tokens)
    assert all(standing.running == standing.slots == standing.waiting == 0 for standing in it.standings())


def _fits(it: Admission, name: str) -> None:
    """Check that the slots that a team has just been given were there."""
    team = it._teams[name]
    assert it.running <= it.slots
    assert team.band.running <= team.band.most
    assert team.most is None or team.running <= team.most


def _is_right(it: Admission, tickets: list[Ticket]) -> None:
    running, waiting = (
        [t for t in tickets if t.state is state] for state in (TicketState.RUNNING, TicketState.WAITING)
    )
    assert (sum(t.held for t in running), len(waiting)) == (it.running, it.waiting)
    assert it.running or not it.waiting
    assert (sum(t.tokens for t in running), sum(t.tokens for t in waiting)) == (it.tokens, it.waiting_tokens)
    by_team = {s.team: (s.running, s.waiting) for s in it.standings()}
    slots = {s.team: s.slots for s in it.standings()}
    assert {t.team.name for t in running + waiting} <= by_team.keys()
    for name, counts in by_team.items():
        assert slots[name] == sum(t.held for t in running if t.team.name == name)
        assert counts == (sum(t.team.name == name for t in running), sum(t.team.name == name for t in waiting))
    for band in {t.team.band.name: t.team.band for t in running + waiting}.values():
        assert (band.running, band.waiting) == tuple(
            sum(t.held for t in those if t.team.band is band) for those in (running, waiting)
        )
    turn = it.next_team()
    free = turn is not None and it.running + turn.need <= it.slots and it._fits(next(iter(turn.queue)).tokens)
    assert not free, "somebody could go and does not"


# ---- fairness over a long time


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("seed", range(3))
def test_service_gap_of_two_busy_teams_is_bounded(weights: tuple[float, float], seed: int):
    """By the largest request: the one with less goes next, so it is never more than one request behind. Theorem 4.4 of
    the paper."""
    rng = random.Random(seed)
    it = gate(
        {name: Team(band="usual", weight=weight) for name, weight in zip("ab", weights, strict=True)},
        slots=4,
        queue=10**6,
    )
    sizes = {f"{team}.{at}": (rng.randint(1, 400), rng.randint(1, 300)) for at in range(600) for team in "ab"}
    for name, (prompt, output) in sizes.items():
        it.lets(name, prompt=prompt, output=output)
    largest = (PROMPT_WEIGHT * 400 + OUTPUT_WEIGHT * 300) / min(weights)
    served = dict.fromkeys("ab", 0.0)
    waiting = Counter(name[0] for name in sizes)
    for name in it.gone:
        prompt, output = sizes[name]
        served[name[0]] += (PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output) / weights["ab".index(name[0])]
        waiting[name[0]] -= 1
        if not all(waiting.values()):
            break
        assert abs(served["a"] - served["b"]) <= 2 * largest
        it.end(name)
    assert max(served.values()) > 20 * largest, "too short to tell"


def test_lowest_band_is_always_served():
    """The lowest band is served however much the others ask for."""
    it = gate(slots=4, queue=10**6)
    it.lets(
        *(f"vip.{at}" for at in range(400)), *(f"a.{at}" for at in range(400)), *(f"batch.{at}" for at in range(50))
    )
    order = it.order()
    at = [place for place, name in enumerate(order) if name.startswith("batch")]
    assert max(b - a for a, b in pairwise(at)) <= 5, "its floor is one slot of four"


@pytest.fixture(scope="module")
def floods() -> dict[str, list[Flood]]:
    return {name: [Flood(its, seed) for seed in range(3)] for name, its in (("ours", FAIR), ("fifo", FIFO))}


def waits(runs: list[Flood], team: str) -> list[float]:
    return sorted(wait for run in runs for wait in run.waits(team))


def test_a_team_that_dumps_300_requests_hurts_itself(floods):
    ours, fifo = floods["ours"], floods["fifo"]
    assert all(run.use >= 0.95 for run in ours)
    assert percentile(waits(ours, "demo"), 0.99) <= 3.0 < 100 < percentile(waits(fifo, "demo"), 0.99)
    assert percentile(waits(ours, "small"), 0.50) < 1.0 < 60 < percentile(waits(fifo, "small"), 0.50)
    assert percentile(waits(ours, "flood"), 0.50) > 60


def test_every_request_ends_once():
    """A million of them: `make bench-admission`."""
    requests = 20_000
    simulation = Simulation(BUSY, lambda admission, now: _bounded(admission))
    admission = simulation.run(busy(requests))
    assert (0, 0, 0, 0) == (admission.running, admission.waiting, admission.tokens, admission.waiting_tokens)
    assert requests == len({id(one.arrival) for one in simulation.ended}) == len(simulation.ended)
    assert set(End) == {one.end for one in simulation.ended}, "each way to end has been seen"
    assert {"team_limit", "queue_full", "est_wait"} <= {
        one.reason for one in simulation.ended if one.end is End.REFUSED
    }


def _bounded(admission: Admission) -> None:
    assert 0 <= admission.running <= SLOTS
    assert 0 <= admission.waiting <= BUSY.capacity.queue
    assert (
        admission.running == SLOTS
        or admission.next_team() is None
        or not admission._fits(next(iter(admission.next_team().queue)).tokens)
    )


def test_the_same_requests_end_in_the_same_way_each_time():
    arrivals = [Arrival(at * 0.05, f"team-{at % 10}", 100, 50, 3.0) for at in range(500)]
    first, second = (Simulation(BUSY) for _ in range(2))
    first.run(arrivals), second.run(arrivals)
    assert first.ended == second.ended


def test_the_wait_behind_peers_goes_by_weight():
    """A team of twice the weight has two turns while the other has one."""
    it = gate({"a": Team(band="usual", weight=2), "b": Team(band="usual")}, slots=1)
    it.lets("b.first", "b.second")
    it.end("b.first", after=10.0)
    it.lets(*(f"b.{at}" for at in range(6)))
    assert 15.0 == it.admission.wait_s("a"), "half a turn of b, and its own"
    it.end("b.second", after=10.0)
    it.lets(*(f"a.{at}" for at in range(4)))
    assert 100.0 == it.admission.wait_s("b"), "its own five, all four of a, and itself"


def test_slots_above_the_ceiling_of_a_band_are_no_room_for_it():
    it = gate(slots=4)
    it.lets("batch.0", "batch.1", "batch.2")
    it.end("batch.0", after=8.0)
    assert (4.0, 0.0) == (it.admission.wait_s("batch"), it.admission.wait_s("a"))


def test_a_team_at_its_own_limit_waits_for_its_own_requests():
    it = gate({"a": Team(band="usual", max_running=1), "b": Team(band="usual")}, slots=4)
    it.lets("a.0", "a.1")
    it.end("a.0", after=10.0)
    it.lets("a.2")
    assert (20.0, 0.0) == (it.admission.wait_s("a"), it.admission.wait_s("b"))


def test_slots_that_were_taken_away_are_not_waited_for_twice():
    it = gate(slots=3)
    it.lets("a.0", "a.1", "a.2", "a.3")
    it.end("a.0", after=10.0)
    it.admission.resize(1, it.now)
    assert 10.0 == it.admission.wait_s("b")


def test_half_of_five_slots_are_two():
    it = gate(slots=5)
    it.lets("batch.0", "batch.1", "batch.2")
    assert ["batch.0", "batch.1"] == it.gone


def test_full_band_without_queue_rejects():
    """Where nobody may wait whoever finds its band full is refused."""
    it = gate(slots=4, queue=0)
    it.lets("batch.0", "batch.1")
    assert Refusal("queue_full", 1.0) == it.ask("batch.2")
    it.lets("a.0", "a.1")
    assert Refusal("queue_full", 1.0) == it.ask("vip")


def test_who_got_nothing_is_charged_nothing_and_teaches_nothing():
    it = gate(slots=1)
    it.lets("a.0", "a.1", "b.0", prompt=100, output=100)
    assert ["b.0"] == it.end("a.0", after=10.0)
    it.end("b.0", prompt=0, output=0)
    it.lets("b.1", prompt=100)
    it.end("a.1", after=0.001, prompt=0, output=0)
    assert "b.1" == it.gone[-1]
    assert 10.0 == it.admission.wait_s("a")


def test_new_policy_of_same_capacity_keeps_lowered_slots():
    """A new policy of the same capacity leaves lowered slots lowered."""
    it = gate(slots=4)
    it.admission.resize(1, it.now)
    it.admission.adopt(policy({"a": Team(band="high")}, slots=4), it.now)
    assert 1 == it.admission.slots
    it.admission.adopt(policy(slots=3), it.now)
    assert 3 == it.admission.slots


def test_at_limit_of_a_team():
    it = Gate(policy({"a": Team(band="usual", max_in_flight=2), "b": Team(band="usual")}, slots=1))
    it.lets("a.0", "b.0")
    assert (False, False, False) == tuple(map(it.admission.at_limit, ("a", "b", "nobody")))
    it.lets("a.1")
    assert (True, False) == (it.admission.at_limit("a"), it.admission.at_limit("b"))


@pytest.mark.parametrize(("most_s", "wait_s"), [(1000.0, 300.0), (150.0, 250.0), (0.0, 100.0)])
def test_expected_wait_behind_a_better_band(most_s, wait_s):
    """Two requests of 100 s go first, but none of them waits longer than its band may."""
    better = {"high": Band(rank=0, max_wait_s=1000.0), "usual": Band(rank=1)}
    it = Gate(policy({"vip": Team(band="high"), "a": Team(band="usual")}, better, slots=1))
    it.lets("vip.0")
    it.end("vip.0", after=100.0)
    it.lets("vip.1", "vip.2", "vip.3")
    it.admission.adopt(
        policy(
            {"vip": Team(band="high"), "a": Team(band="usual")},
            {**better, "high": Band(rank=0, max_wait_s=most_s)},
            slots=1,
        ),
        it.now,
    )
    assert wait_s == pytest.approx(it.admission.wait_s("a"))
