"""Fairness across reloads: a team that moves to another band waits no longer than the teams that were there before."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.gateway.admission import Admission
from stack.gateway.admission_state import Ticket
from stack.gateway.policy import Band, Capacity, Policy, Team
from tests.support.admission_gate import Gate, gate, ignore, policy

BANDS = {"high": Band(rank=0), "low": Band(rank=2)}


def served(it: Gate, team: str, requests: int = 1000) -> None:
    """Serve so many requests of a team, one after the other, and leave one running."""
    for at in range(requests):
        it.lets(f"{team}.served{at}", prompt=100)
        it.end(f"{team}.served{at}")
    it.lets(f"{team}.running", prompt=100)


def turns(it: Gate, running: str, count: int) -> str:
    """End what runs, one after the other; the teams of those that go instead, by their first letters."""
    order = ""
    for _ in range(count):
        (running,) = it.end(running)
        order += running[0]
    return order


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "idle"])
@pytest.mark.parametrize("busy", ["a", "b"], ids=["after much service", "to a band that has had much service"])
@pytest.mark.parametrize(("before", "after"), [("high", "low"), ("low", "high")], ids=["down", "up"])
def test_a_team_that_moves_to_another_band_takes_turns_there(before: str, after: str, busy: str, waits: bool):
    """Team a moves to the band of b: neither waits until the other has had as much service as it had in another
    band."""
    it = gate({"a": Team(band=before), "b": Team(band=after)}, BANDS, slots=1)
    served(it, busy)
    requests = [f"a.{at}" for at in range(4)]
    it.lets(*(requests if waits else ()), prompt=100)
    it.admission.adopt(policy({"a": Team(band=after), "b": Team(band=after)}, BANDS, slots=1), it.now)
    it.lets(*(() if waits else requests), *(f"b.{at}" for at in range(4)), prompt=100)
    order = turns(it, f"{busy}.running", 6)
    assert 2 <= order.count("a") <= 4
    assert ("aaa" not in order, "bbb" not in order) == (True, True), order


def test_a_team_whose_band_changes_its_rank_takes_turns_there():
    teams = {"a": Team(band="high"), "b": Team(band="low")}
    it = gate(teams, BANDS, slots=1)
    served(it, "a")
    it.lets(*(f"{team}.{at}" for at in range(4) for team in "ab"), prompt=100)
    it.admission.adopt(policy(teams, {"high": Band(rank=7), "low": Band(rank=7)}, slots=1), it.now)
    assert turns(it, "a.running", 6) in ("ababab", "bababa")


def test_charge_in_another_band_is_not_returned_here():
    """A request expected to be long runs while its team moves, and ends early: the team gets no credit for it where it
    is now."""
    it = gate({"a": Team(band="high"), "b": Team(band="low")}, BANDS, slots=2)
    it.lets("a.long", prompt=1, output=100_000)
    it.lets("a.running", prompt=1)
    it.admission.adopt(policy({"a": Team(band="low"), "b": Team(band="low")}, BANDS, slots=2), it.now)
    it.admission.resize(1, it.now)
    it.lets(*(f"{team}.{at}" for at in range(4) for team in "ab"), prompt=100)
    assert [] == it.end("a.long", prompt=1, output=1)
    assert turns(it, "a.running", 6) in ("ababab", "bababa")


def test_a_limit_that_goes_leaves_nothing_to_catch_up():
    """A team that could run one request at a time had less than its turns; without its limit it takes turns and does
    not catch up first."""
    bands, teams = {"high": Band(rank=0)}, {"a": Team(band="high", max_running=1), "b": Team(band="high")}
    it = gate(teams, bands, slots=2, queue=10**5)
    it.lets("a.long", "a.0", "b.0", prompt=100)
    it.lets(*(f"b.{at}" for at in range(1, 501)), *(f"a.{at}" for at in range(1, 5)), prompt=100)
    assert {"b"} == set(turns(it, "b.0", 490))
    it.admission.adopt(policy(teams | {"a": Team(band="high")}, bands, slots=2, queue=10**5), it.now)
    assert {"a", "b"} == set(turns(it, "b.490", 3))


def test_limited_team_does_not_catch_up_on_few_slots():
    """A team held back by its own limit does not catch up when slots become few."""
    teams = {"a": Team(band="high", max_running=2), "b": Team(band="high")}
    it = gate(teams, {"high": Band(rank=0)}, slots=9, queue=10**5)
    it.lets(*(f"a.{at}" for at in range(60)), *(f"b.{at}" for at in range(990)), prompt=100)
    for at in range(900):
        it.end(f"b.{at}")
    it.admission.resize(2, it.now)
    granted = len(it.gone)
    for name in it.gone:  # grows meanwhile
        if len(it.gone) >= granted + 8:
            break
        it.end(name)
    order = "".join(name[0] for name in it.gone[granted : granted + 8])
    assert 2 <= order.count("b") <= 6, order


def test_pause_puts_no_team_before_floor_served_ones():
    """Of two bands of one rank, one is far ahead by its floor: a team that comes back to it takes turns with the team
    that was there."""
    teams = {"f": Team(band="floor"), "g": Team(band="floor"), "b": Team(band="usual")}
    bands = {"floor": Band(rank=0, floor=1, ceiling=0.5), "usual": Band(rank=0)}
    it = gate(teams, bands, slots=2, queue=10**5)
    it.lets("b.0", "f.0", *(f"f.{at}" for at in range(1, 500)), *(f"b.{at}" for at in range(1, 20)), prompt=100)
    assert {"f"} == set(turns(it, "f.0", 400))
    it.lets(*(f"g.{at}" for at in range(20)), prompt=100)
    assert turns(it, "f.400", 6) in ("fgfgfg", "gfgfgf")


def test_a_floor_does_not_put_those_who_come_back_behind_it():
    """Two bands of one rank, of which one gets more by its floor: a team of the other that pauses comes back to where
    its peers stand."""
    teams = {"f": Team(band="floor"), "b": Team(band="usual"), "c": Team(band="usual")}
    bands = {"floor": Band(rank=0, floor=1, ceiling=0.5), "usual": Band(rank=0)}
    it = gate(teams, bands, slots=2, queue=10**5)
    it.lets("b.0", "f.0", *(f"f.{at}" for at in range(1, 500)), *(f"b.{at}" for at in range(1, 20)), prompt=100)
    assert {"f"} == set(turns(it, "f.0", 490))
    it.lets(*(f"c.{at}" for at in range(5)), prompt=100)
    assert turns(it, "b.0", 4) in ("bcbc", "cbcb")


def test_team_that_comes_back_takes_turns_beside_a_ceiling():
    """Two bands of one rank, each at its ceiling: the one team of the first gets more than each of the two of the
    second. A third team of the second band takes turns with them at once."""
    teams = {"a": Team(band="one"), "b": Team(band="two"), "c": Team(band="two"), "d": Team(band="two")}
    bands = {"one": Band(rank=0, ceiling=0.5), "two": Band(rank=0, ceiling=0.5)}
    it = gate(teams, bands, slots=2, queue=10**5)
    it.lets("a.0", "b.0", *(f"a.{at}" for at in range(1, 500)), prompt=100)
    it.lets(*(f"{team}.{at}" for at in range(1, 20) for team in "bc"), prompt=100)
    assert {"a"} == set(turns(it, "a.0", 400))
    it.lets(*(f"d.{at}" for at in range(5)), prompt=100)
    assert turns(it, "b.0", 9).count("d") == 3


# ---- random reloads

SLOTS, BAND_NAMES, COSTS, WEIGHTS, HOLD_S = 4, ("x", "y", "z"), (2, 4), (1.0, 2.0), 1.0


def bound_s(teams: int, reloads: int) -> float:
    """The longest wait of the first request of a team, in seconds.

    Each band has a floor of one slot, and there are more slots than bands, so a band serves one request in 2 x HOLD_S
    at least: its request holds the slot for HOLD_S at most, and bands below their floors may go before it, once. Within
    a band each of the other teams goes first until it has caught up with one request of this team, at most 1 + cost
    ratio x weight ratio times. A reload may begin that anew."""
    each = 1 + COSTS[1] / COSTS[0] * WEIGHTS[1] / WEIGHTS[0]
    return (1 + reloads) * 2 * HOLD_S * (2 + (teams - 1) * each)


class Backlog:
    """Teams with two requests waiting, or none in a pause, while policies change, in virtual time. Fails at the first
    wait beyond the bound."""

    def __init__(self, seed: int, teams: int) -> None:
        self.rng = random.Random(seed)
        self.names = [f"t{at}" for at in range(teams)]
        self.it = Admission(self._policy())
        self.events: list[tuple[float, int, str, Ticket | None]] = []
        self.number = 0
        self.reloads: list[float] = []
        self.first_since: dict[str, float] = {}
        self.paused: set[str] = set()
        self.longest = 0.0

    def _policy(self) -> Policy:
        rng = self.rng
        ranks = {
            name: Band(rank=rng.randrange(3), floor=1, max_wait_s=1e9, ceiling=rng.choice((0.5, 1.0)))
            for name in BAND_NAMES
        }
        teams = {
            name: Team(band=rng.choice(BAND_NAMES), weight=rng.choice(WEIGHTS), max_running=rng.choice((None, None, 1)))
            for name in self.names
        }
        return Policy(teams=teams, bands=ranks, capacity=Capacity(slots=SLOTS))

    def run(self, until_s: float) -> float:
        for name in self.names:
            self._ask(name, 0.0), self._ask(name, 0.0)
        for what, every_s in (("reload", 40.0), ("pause", 15.0)):
            self._at(self.rng.expovariate(1 / every_s), what)
        while self.events and self.events[0][0] < until_s:
            now, _, what, ticket = heapq.heappop(self.events)
            self._happens(what, ticket, now)
            for name in self.first_since:
                self._check(name, now)
        return self.longest

    def _happens(self, what: str, ticket: Ticket | None, now: float) -> None:
        if ticket is not None:
            self.it.leave(ticket, now)
        elif what == "reload":
            self.reloads.append(now)
            self.it.adopt(self._policy(), now)
            self._at(now + self.rng.expovariate(1 / 40.0), what)
        elif what == "pause":
            self._pause(self.rng.choice(self.names), now)
            self._at(now + self.rng.expovariate(1 / 15.0), what)
        elif len(self.it._teams[what].queue) < 2:
            self._ask(what, now)

    def _pause(self, name: str, now: float) -> None:
        """It asks for nothing new, or begins again."""
        self.paused ^= {name}
        while name not in self.paused and len(self.it._teams[name].queue) < 2:
            self._ask(name, now)

    def _ask(self, name: str, now: float) -> None:
        holder: list[Ticket] = []
        granted_at_once = []

        def granted() -> None:
            if holder:
                self._runs(holder[0], self.it._now)
            else:
                granted_at_once.append(True)

        asked = self.it.ask(name, self.rng.randint(*COSTS), 0, now, granted, ignore)
        assert isinstance(asked, Ticket)
        holder.append(asked)
        self.first_since.setdefault(name, now)
        if granted_at_once:
            self._runs(asked, now)

    def _runs(self, ticket: Ticket, now: float) -> None:
        name = ticket.team.name
        self._check(name, now)
        self._at(now + self.rng.uniform(HOLD_S / 2, HOLD_S), "end", ticket)
        self.first_since.pop(name, None)
        if ticket.team.queue:
            self.first_since[name] = now
        if name not in self.paused:
            self._at(now, name)

    def _check(self, name: str, now: float) -> None:
        since = self.first_since.get(name, now)
        self.longest = max(self.longest, now - since)
        bound = bound_s(len(self.names), sum(at >= since for at in self.reloads))
        assert now - since <= bound, f"{name} has waited for {now - since:.0f} s at {now:.0f} s, {bound:.0f} s at most"

    def _at(self, when: float, what: str, ticket: Ticket | None = None) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, what, ticket))


@given(st.integers(0, 2**32), st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_nobody_waits_longer_than_the_bound_whatever_is_reloaded(seed: int, teams: int):
    assert Backlog(seed, teams).run(400.0) > 0
