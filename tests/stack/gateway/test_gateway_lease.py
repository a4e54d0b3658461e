"""Leases of gateway replicas on a virtual clock: random joins, deaths, partitions, pauses, slow and repeated messages,
restarts of the store and steps of its clock.

`VLLM_WATCH_HISTORIES` sets the number of random histories; `make bench-faults` runs 10,000."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from stack.gateway import clock
from stack.gateway.admission import Admission
from stack.gateway.admission_state import Refusal, Ticket, TicketState
from stack.gateway.lease import AT_ONCE_S, PERIOD_S, TTL_S, Ceilings, LeaseHolder, ReplicaUsage, Usage
from stack.gateway.lease_store import (
    CEILING,
    IN_FLIGHT,
    RUNNING,
    SLOTS,
    TOKENS,
    Grant,
    LeaseReply,
    LeaseRequest,
    LeaseTable,
    transition,
)
from stack.gateway.lease_usage import replica_usage
from stack.gateway.policy import Band, Capacity, Policy, Team
from stack.gateway.sharing import Share, divide

HISTORIES = int(os.environ.get("VLLM_WATCH_HISTORIES", "40"))
END_S = 20.0
PROMPT, OUTPUT = 6, 4  # tokens of every request
NOTHING = Ceilings({}, -math.inf)


def a_policy(draw: random.Random, slots: int) -> Policy:
    """Some policy of three teams, with and without each limit."""

    def maybe(low: int, high: int) -> int | None:
        return draw.randint(low, high) if draw.random() < 0.5 else None

    tokens, ceiling = maybe(80, 400), draw.choice((0.5, 1.0))
    return Policy(
        teams={
            "chat": Team(band="top", max_running=maybe(1, 12), max_in_flight=maybe(2, 40)),
            "lab": Team(band="low", weight=2.0, max_in_flight=maybe(2, 40)),
            "batch": Team(band="low"),
        },
        bands={"top": Band(rank=0), "low": Band(rank=1, ceiling=ceiling, floor=draw.choice((0, 0, 2)))},
        capacity=Capacity(slots=slots, tokens=tokens, queue=draw.randint(6, 200), queue_tokens=maybe(100, 2000)),
    )


def without_limits(slots: int) -> Policy:
    teams = {"chat": Team(), "lab": Team(weight=2.0), "batch": Team()}
    bands = {"default": Band(rank=0, max_wait_s=1e6)}
    return Policy(teams=teams, bands=bands, capacity=Capacity(slots=slots, queue=10_000))


@dataclass(eq=False)
class Running:
    """One request at the engines. since: its admission. fresh: admitted under a lease that has not lapsed since. slots:
    how many it holds."""

    team: str
    ticket: list[Ticket]
    since: float
    fresh: bool
    slots: int


@dataclass(eq=False)
class Replica:
    """One gateway without sockets. policy: of all gateways, as this one has read it."""

    name: str
    holder: LeaseHolder
    admission: Admission
    policy: Policy
    running: list[Running] = field(default_factory=list)
    dead: bool = False
    static: bool = False
    shared_again: bool = False  # the store believed a fixed share, and is calm
    paused_until: float = 0.0
    cut_until: float = 0.0
    rate: float = 1.0  # of its clock
    due: float = 0.0  # of the next request to the store

    def clock(self, now: float) -> float:
        return now * self.rate


class Fleet:
    """Replicas and one store under faults. Checks the bounds at every admission.

    policies: of which the fleet has one after the other; a reload reaches each replica at another time. widest: slots
    that requests ask for at most."""

    def __init__(self, seed: int, replicas: int, policies: Sequence[Policy], *, linger_s: float = 0.0,
                 faults: bool = True, widest: int = 1) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.policies, self.policy, self.faults = policies, policies[0], faults
        self.strict = not faults
        self.linger_s, self.load, self.widest, self.hold_s, self.closed = linger_s, 1.3, widest, 2.0, False
        self.now, self.counter = 0.0, itertools.count()
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.table, self.run, self.step_s, self.store_up_at = LeaseTable(), "run-0", 1_000.0, 0.0
        self.admitted = self.orphans = 0
        self.former: list[tuple[float, Policy]] = []  # until when a replica had a policy
        self.replicas: list[Replica] = []
        self.size = replicas
        for number in range(replicas):
            self.join(f"gw-{number}")
        for _ in range(3 if faults else 0):
            self.at(self.random.uniform(0, END_S), self.reload)

    # ---- events

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (when, next(self.counter), what))

    def go(self, until: float) -> None:
        while self.heap and self.heap[0][0] <= until:
            self.now, _, what = heapq.heappop(self.heap)
            what()
        self.now = until

    def share(self, it: Replica, policy: Policy) -> Policy:
        """Return the policy that holds without a store."""
        return divide(policy, (Share(self.size, int(it.name.rstrip("x")[3:])),))

    def join(self, name: str) -> None:
        holder = LeaseHolder(name, f"{self.random.random()}", linger_s=self.linger_s)
        it = Replica(name, holder, Admission(self.policy, self.policy), self.policy)
        it.admission.adopt(self.share(it, self.policy), 0.0, self.policy)
        it.admission.lease(NOTHING, 0.0)
        it.rate = 1 + self.random.uniform(-2e-4, 2e-4) if self.faults else 1.0
        self.replicas.append(it)
        it.admission.wanting = lambda: self.renew_at(it, max(self.now, it.due - PERIOD_S + AT_ONCE_S))
        it.due = math.inf
        self.renew_at(it, self.now + self.random.uniform(0, PERIOD_S))
        self.at(self.now, lambda: self.arrive(it))
        if self.faults:
            self.at(self.now + self.random.expovariate(1 / 8), lambda: self.fault(it))

    def reload(self) -> None:
        """Write another policy; every replica reads it within three seconds, in any order."""
        self.policy = self.random.choice(self.policies)
        for it in self.replicas:
            self.at(self.now + self.random.uniform(0, 3), lambda it=it: self.adopt(it))

    def adopt(self, it: Replica) -> None:
        if it.dead:
            return
        if self.now < it.paused_until:
            self.at(it.paused_until, lambda: self.adopt(it))
            return
        self.former.append((self.now, it.policy))
        self.lapse(it)
        it.policy = self.policy
        it.admission.adopt(self.share(it, self.policy), it.clock(self.now), self.policy)

    def arrive(self, it: Replica) -> None:
        if it.dead or self.closed:
            return
        mean_s = 2.0 * sum(not each.dead for each in self.replicas) / (self.policy.capacity.slots * self.load)
        self.at(self.now + self.random.expovariate(1 / mean_s), lambda: self.arrive(it))
        if self.now < it.paused_until:
            return
        self.lapse(it)
        team, box = self.random.choice(("chat", "lab", "batch")), list[Ticket]()
        asked = it.admission.ask(
            team, PROMPT, OUTPUT, it.clock(self.now), lambda: self.granted(it, team, box), lambda _: None,
            self.random.randint(1, self.widest),
        )  # fmt: skip
        if isinstance(asked, Ticket):
            box.append(asked)

    def granted(self, it: Replica, team: str, box: list[Ticket]) -> None:
        assert it.static or it.clock(self.now) < it.admission.ceilings.until, "admitted under a lapsed lease"
        slots = it.admission.running - sum(each.slots for each in it.running)
        one = Running(team, box, self.now, not it.static and not it.shared_again, slots)
        it.running.append(one)
        self.at(self.now + self.random.expovariate(1 / self.hold_s), lambda: self.end(it, one))
        self.admitted += 1
        if one.fresh:  # of what a lower limit drains, an admission without a store replaces nothing
            self.check(team)

    def end(self, it: Replica, one: Running) -> None:
        if it.dead:
            return
        if self.now < it.paused_until:
            self.at(it.paused_until, lambda: self.end(it, one))
            return
        self.lapse(it)
        it.running.remove(one)
        it.admission.leave(one.ticket[0], it.clock(self.now), PROMPT, self.random.randint(0, 2 * OUTPUT))

    def fault(self, it: Replica) -> None:
        if it.dead or not self.faults:
            return
        kind = self.random.choice(("kill", "pause", "cut", "store"))
        if kind == "kill":
            it.dead, it.running = True, []  # the kernel closes its connections, and the engine aborts
            name = it.name if self.random.random() < 0.5 else f"{it.name}x"
            self.at(self.now + self.random.uniform(0.01, 3), lambda: self.join(name))
        elif kind == "pause":
            it.paused_until = self.now + self.random.uniform(0.1, 6)
        elif kind == "cut":
            it.cut_until = self.now + self.random.uniform(0.2, 8)
        elif self.random.random() < 0.5:
            self.run, self.table = f"run-{self.now}", LeaseTable()
            self.store_up_at = self.now + self.random.uniform(0.01, 3)
        else:
            self.step_s = max(10.0, self.step_s + self.random.choice((-1, 1)) * self.random.uniform(0.3, 60))
        self.at(self.now + self.random.expovariate(1 / 8), lambda: self.fault(it))

    # ---- renewal

    def renew_at(self, it: Replica, when: float) -> None:
        if when < it.due:
            it.due = when
            self.at(when, lambda: self.renew(it))

    def renew(self, it: Replica) -> None:
        if it.dead or self.now < it.due:
            return
        it.due = math.inf
        if self.now < it.paused_until:
            self.renew_at(it, it.paused_until)
            return
        self.renew_at(it, self.now + PERIOD_S)
        self.lapse(it)
        now = it.clock(self.now)
        if self.now < it.cut_until or self.now < self.store_up_at:  # no connection
            if now >= it.holder.until and not it.static:
                it.static = True
                it.admission.lease(None, now)
            return
        usage = replica_usage(it.admission, it.policy.capacity.slots, it.holder.counted)
        request, ceilings = it.holder.request(usage, self.run, "p", now, static=it.static)
        if not it.static:
            it.admission.lease(ceilings, now, answered=False)
        draw = self.random.random() if self.faults else 1.0
        for _ in range(2 if draw < 0.02 else 0 if draw < 0.04 else 1):
            self.at(self.now + self.delay(), lambda: self.serve(it, request))

    def delay(self) -> float:
        slow = self.faults and self.random.random() < 0.02
        return self.random.uniform(0.1, 4) if slow else self.random.uniform(0.0001, 0.01)

    def serve(self, it: Replica, request: LeaseRequest) -> None:
        if self.now < self.store_up_at or request.run != self.run:
            return  # the connection is gone
        reply = transition(self.table, request, int((self.now + self.step_s) * 1000))
        record = self.table.replicas.get(it.name)
        if reply.state == "ok" and record is not None:
            for key, held in record.claims.items():
                if held.lease > max(request.claims[key].keep, request.claims[key].use):
                    claims = [each.claims[key] for each in self.table.replicas.values() if key in each.claims]
                    assert sum(one.lease for one in claims) <= held.limit, f"a grant beyond the limit {key}"
        if not self.faults or self.random.random() > 0.02:
            self.at(self.now + self.delay(), lambda: self.take(it, reply, request))

    def take(self, it: Replica, reply: LeaseReply, request: LeaseRequest) -> None:
        if it.dead or self.now < it.cut_until:
            return
        if self.now < it.paused_until:
            self.at(it.paused_until, lambda: self.take(it, reply, request))
            return
        self.lapse(it)
        if it.holder.receive(reply, request.sequence):
            it.shared_again = (it.static or it.shared_again) and it.holder.calm
            it.static = False
            it.admission.serve_elsewhere(it.holder.peers(reply))
            it.admission.lease(it.holder.ceilings(), it.clock(self.now), answered=it.holder.settled)

    def lapse(self, it: Replica) -> None:
        """Requests that outlive their lease are orphans from then on."""
        if it.clock(self.now) >= it.holder.until:
            for one in it.running:
                one.fresh = False

    # ---- the bounds

    def most(self, limit: Callable[[Policy], int | None]) -> float:
        """Return the highest limit that a replica has now, or had lately: the store hears of a reload within one lease,
        and the others hear of it within another."""
        policies = [it.policy for it in self.replicas if not it.dead]
        policies += [policy for until, policy in self.former if until > self.now - 2 * TTL_S]
        limits = [limit(policy) for policy in policies]
        return math.inf if None in limits else max(each for each in limits if each is not None)

    def check(self, team: str) -> None:
        """Check every limit that a request of a team has to obey."""
        for it in self.replicas:
            if it.clock(self.now) >= it.holder.until:
                self.lapse(it)
        requests = [one for it in self.replicas for one in it.running if one.fresh]
        fresh = [one.team for one in requests for _ in range(one.slots)]
        # Those that joined first keep their lease when max_in_flight falls, and what runs at the others ends later.
        changed = max((until for until, policy in self.former if policy is not self.policy), default=0.0)
        begun = [one.team for it in self.replicas for one in it.running if one.fresh and one.since > changed]
        self.orphans = max(self.orphans, sum(len(it.running) for it in self.replicas) - len(requests))
        bounds = {
            "slots": (len(fresh), lambda policy: policy.capacity.slots),
            "tokens": ((PROMPT + OUTPUT) * len(requests), lambda policy: policy.capacity.tokens),
            "max_running": (fresh.count(team), lambda policy: policy.teams[team].max_running),
            "max_in_flight": (begun.count(team), lambda policy: policy.teams[team].max_in_flight),
        }
        if team != "chat":
            bounds["ceiling"] = len(fresh) - fresh.count("chat"), ceiling_of_low
        for name, (used, limit) in bounds.items():
            assert used <= (most := self.most(limit)), f"{name} of {team}: {used} of {most} at {self.now}"
        if self.strict:
            waiting = sum(it.admission.waiting for it in self.replicas if not it.dead)
            assert waiting <= self.policy.capacity.queue
            for team in ("chat", "lab"):
                admitted = sum(
                    each.in_flight - each.tentative
                    for it in self.replicas if not it.dead
                    for each in it.admission.active({}) if each.name == team
                )  # fmt: skip
                limit = self.policy.teams[team].max_in_flight
                assert limit is None or admitted <= limit, f"max_in_flight of {team}: {admitted} of {limit}"


def ceiling_of_low(policy: Policy) -> int | None:
    if (band := policy.bands.get("low")) is None or band.ceiling >= 1:
        return None
    return max(1, band.floor, math.floor(band.ceiling * policy.capacity.slots))


@pytest.mark.parametrize("block", range(10))
def test_no_more_is_in_flight_than_the_limits_and_orphans(block: int):
    """Random histories with every limit, and reloads. After the faults every slot is used again, and nobody waits for
    good."""
    admitted = orphans = 0
    for number in range(-(-HISTORIES // 10)):
        seed = block * 1_000_003 + number
        draw = random.Random(seed)
        policies = [a_policy(draw, draw.randint(6, 32)) for _ in range(draw.choice((1, 3)))]
        replicas, linger_s = draw.choice((1, 2, 3, 3, 5)), draw.choice((0.0, 0.0, 3.0))
        fleet = Fleet(seed, replicas, policies, linger_s=linger_s, widest=draw.choice((1, 12)))
        try:
            fleet.go(END_S)
            heal(fleet)
            fleet.go(END_S + 2 * TTL_S + fleet.linger_s + 2.0)
            # the last fault may just have ended; each replica has flooded its queue for seconds
            running = 0.0
            for _ in range(20):
                fleet.go(fleet.now + 0.1)
                running += sum(len(it.running) for it in fleet.replicas) / 20
            # where the backlog of a limited team fills the queue, others find only the headroom of their replica
            if fleet.widest == 1:
                assert running >= 2 / 3 * room(fleet.policy), f"{running} of {room(fleet.policy)}"
            drain(fleet)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        admitted, orphans = admitted + fleet.admitted, max(orphans, fleet.orphans)
    assert admitted > HISTORIES
    print(f"{admitted} admissions, at most {orphans} orphans")  # noqa: T201  # shown with -rP


def heal(fleet: Fleet) -> None:
    """End all faults, give every replica the same policy and more to do than there are slots."""
    fleet.faults, fleet.load = False, 4.0
    for it in fleet.replicas:
        it.cut_until = it.paused_until = 0.0
        fleet.adopt(it)
        fleet.renew_at(it, fleet.now)  # not when its pause would have ended
    heap, fleet.heap = fleet.heap, []
    for event in heap:
        fleet.at(max(fleet.now, event[0]), event[2])


def drain(fleet: Fleet) -> None:
    """Let nobody come, and requests be short: everybody who waits gets a turn."""
    fleet.closed, fleet.hold_s, until = True, 0.05, fleet.now + 400
    while waiting := sum(it.admission.waiting for it in fleet.replicas if not it.dead):
        assert fleet.now < until, f"{waiting} requests wait for good"
        fleet.go(fleet.now + 1.0)


def room(policy: Policy) -> float:
    """Return how many requests the flood may hold at the engines, if most come from the team with the least limit.

    A limit below the number of replicas changes hands in turns, and is idle meanwhile; of the tokens each replica may
    have some left that are too few for a request."""

    def used(limit: int | None) -> float:
        return 99 if limit is None else limit if limit > 5 else limit / 2

    teams = [min(used(team.max_running), used(team.max_in_flight) / 2) for team in policy.teams.values()]
    band = min(sum(teams[1:]), used(ceiling_of_low(policy)))
    tokens = (policy.capacity.tokens or 9999) - 5 * (PROMPT + OUTPUT - 1)
    return min(policy.capacity.slots, tokens // (PROMPT + OUTPUT), teams[0] + band, policy.capacity.queue)


@pytest.mark.parametrize("seed", range(10))
def test_queue_and_requests_of_teams_stay_within_their_limits(seed: int):
    """Without faults not even the queue ever holds more, at any instant."""
    draw = random.Random(seed)
    replicas, policies = draw.choice((2, 3, 5)), [a_policy(draw, draw.randint(6, 32))]
    fleet = Fleet(seed, replicas, policies, faults=False, widest=1 + 11 * (seed % 2))
    fleet.load = 3.0
    fleet.go(15.0)
    assert fleet.admitted > 5
    drain(fleet)


@pytest.mark.parametrize(
    ("team", "slots", "tokens"),
    [(Team(), 5, 10), (Team(max_running=8), 5, 10), (Team(band="low"), 5, 10), (Team(), 1, 700)],
)
def test_large_requests_of_two_replicas_take_turns(team: Team, slots: int, tokens: int):
    """Each wants five of eight slots, over and over: by its lease, by its team's limit or by its band's ceiling; or
    most of the tokens, of which one replica had all while it had such requests."""
    bands = {"default": Band(rank=0, max_wait_s=1e6), "low": Band(rank=1, ceiling=0.7, max_wait_s=1e6)}
    capacity = Capacity(slots=8, tokens=1000)
    pair, gone = Replicas(Policy(teams={"a": team}, bands=bands, capacity=capacity)), list[int]()
    running: list[tuple[int, list[Ticket]]] = []

    def goes(place: int, box: list[Ticket]) -> None:
        gone.append(place)
        running.append((place, box))

    for place in (0, 1):
        for _ in range(20):
            box: list[Ticket] = []
            asked = pair.all[place].ask("a", tokens, 0, pair.now, partial(goes, place, box), lambda _: None, slots)
            assert isinstance(asked, Ticket)
            box.append(asked)
    while len(gone) < 40 and pair.now < 300:
        pair.renew()
        assert sum(one.running for one in pair.all) == slots * len(running) <= 8
        ended, running[:] = list(running), []
        for place, box in ended:
            pair.all[place].leave(box[0], pair.now, tokens, 0)
    assert gone[:30].count(0) == pytest.approx(15, abs=2), gone


def test_a_wide_request_waits_for_a_better_band_elsewhere():
    bands = {"high": Band(rank=0, max_wait_s=1e6), "low": Band(rank=1, max_wait_s=1e6)}
    teams = {"a": Team(band="high"), "b": Team(band="low")}
    pair = Replicas(Policy(teams=teams, bands=bands, capacity=Capacity(slots=8)))
    running = pair.ask(0, "a", 40)
    pair.renew(4)
    pair.all[1].ask("b", 10, 10, pair.now, lambda: None, lambda _: None, 6)
    for _ in range(20):
        pair.renew()
        assert 8 == pair.running(0, "a")
        pair.all[0].leave(running.pop(0), pair.now, 10, 10)
    for ticket in running[:12]:
        pair.all[0].leave(ticket, pair.now, 10, 10)
    pair.renew(4)
    for ticket in running[12:]:
        pair.all[0].leave(ticket, pair.now, 10, 10)
    pair.renew(8)
    assert 1 == pair.running(1, "b")


@pytest.mark.parametrize("linger_s", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(2))
def test_slots_of_a_dead_replica_are_used_again(seed: int, linger_s: float):
    """Not before its lease has ended, and at the latest one period of every other replica after that and linger."""
    fleet = Fleet(seed, 3, [without_limits(24)], linger_s=linger_s, faults=False)
    fleet.load = 4.0
    fleet.go(10.0)
    assert 24 == sum(len(it.running) for it in fleet.replicas)
    dead = fleet.replicas[0]
    lost = len(dead.running)
    assert lost
    dead.dead, dead.running = True, []
    fleet.go(fleet.now + TTL_S + linger_s - PERIOD_S - 0.05)
    assert sum(len(it.running) for it in fleet.replicas) <= 24 - lost
    fleet.go(fleet.now + 3 * PERIOD_S + 0.1)
    assert sum(len(it.running) for it in fleet.replicas) >= 24 - 1, "one request may just have ended"


def test_a_replica_that_wakes_does_not_use_its_lease():
    """The lease ended while the process stood still, so nothing is admitted before the next answer."""
    admission = Admission(Policy(teams={"a": Team()}, capacity=Capacity(slots=4)))
    admission.lease(Ceilings({SLOTS: 4}, until=10.0), 9.0)
    asked = [admission.ask("a", 1, 1, now, lambda: None, lambda _: None) for now in (9.9, 10.0, 60.0)]
    assert [TicketState.RUNNING, TicketState.WAITING, TicketState.WAITING] == [one.state for one in asked]
    admission.leave(asked[0], 61.0)
    assert 0 == admission.running
    admission.lease(Ceilings({SLOTS: 1}, until=70.0), 62.0)
    assert 1 == admission.running
    admission.lease(None, 63.0)
    assert 2 == admission.running, "without a lease the policy holds"


def test_ceilings_of_a_lease_bound_tokens_and_teams():
    policy = Policy(teams={"a": Team(max_running=3), "b": Team()}, capacity=Capacity(slots=9, tokens=1000))
    admission = Admission(policy)
    admission.lease(Ceilings({SLOTS: 9, TOKENS: 100, RUNNING + "a": 1}, until=math.inf), 0.0)
    first = [admission.ask("a", 20, 0, 0.0, lambda: None, lambda _: None) for _ in range(2)]
    assert [TicketState.RUNNING, TicketState.WAITING] == [one.state for one in first]
    large = admission.ask("b", 5000, 0, 0.0, lambda: None, lambda _: None)
    assert TicketState.WAITING is large.state, "it needs the whole budget"
    assert large in admission.next_team().queue
    admission.leave(first[0], 1.0)
    admission.leave(first[1], 1.0)
    admission.lease(Ceilings({SLOTS: 9, TOKENS: 1000, RUNNING + "a": 1}, until=math.inf), 2.0)
    assert TicketState.RUNNING is large.state


def test_a_large_request_gets_the_tokens_that_it_needs():
    """Two replicas keep the budget in use; the third needs more than its part for its next request."""
    table, holders = LeaseTable(), [LeaseHolder(f"gw-{n}", "i") for n in range(3)]
    use = [0, 0, 0]
    for step in range(60):
        now = 100.0 + 0.2 * step
        for place, holder in enumerate(holders):
            tokens = Usage(use[place], 1000, 1000, 0) if place < 2 else Usage(0, 700, 1000, 0, large=700)
            limits = {SLOTS: Usage(1, 5, 30, 0), TOKENS: tokens}
            request, _ = holder.request(ReplicaUsage(limits, []), "run", "p", now)
            assert holder.receive(transition(table, request, round(now * 1000)), request.sequence)
            if place < 2:  # a tenth of what runs ends, and whatever fits begins
                use[place] = max(use[place] * 9 // 10, holder.ceilings().limits[TOKENS])
        if holders[2].ceilings().limits[TOKENS] >= 700:
            return
        use[:2] = [each * 9 // 10 for each in use[:2]]
    raise AssertionError(f"{holders[2].ceilings()} after 12 s")


def test_the_last_token_of_a_large_request_is_not_kept_as_a_rest():
    """Two replicas lease more tokens than they use, with what rounding left; the third lacks one for its request."""
    table, use = LeaseTable(), [30, 30, 0]
    holders = [LeaseHolder(f"gw-{n}", "i") for n in range(3)]
    for step in range(40):
        now = 100.0 + 0.2 * step
        for place, holder in enumerate(holders):
            leased = holder.ceilings().limits.get(TOKENS, 0)
            large = 10 if place == 2 and step >= 20 and leased < 10 else 0
            limits = {SLOTS: Usage(3, 9, 11, 0), TOKENS: Usage(use[place], 229, 229, 0, large)}
            request, _ = holder.request(ReplicaUsage(limits, []), "run", "p", now)
            if step == 20:  # as it was found after a replica had joined
                for name, tokens in (("gw-0", 110), ("gw-1", 110), ("gw-2", 9)):
                    table.replicas[name].claims[TOKENS].lease = tokens
                    holders[int(name[-1])]._grants[TOKENS] = Grant(tokens, tokens, 0, 0)
                request, _ = holder.request(ReplicaUsage(limits, []), "run", "p", now)
            assert holder.receive(transition(table, request, round(now * 1000)), request.sequence)
    assert holders[2].ceilings().limits[TOKENS] >= 10


def exchanged(table: LeaseTable, holder: LeaseHolder, limits: dict[str, Usage], now: float, run: str = "run") -> None:
    """Renew the lease of one replica without any delay and without requests of teams."""
    request, _ = holder.request(ReplicaUsage(limits, []), run, "p", now)
    assert holder.receive(transition(table, request, round(now * 1000)), request.sequence)


def test_a_restarted_store_believes_orphans_and_replaces_none():
    """A replica came back with requests that outlived its lease, so nothing is due to it; then the store is emptied."""
    table, back, other = LeaseTable(), LeaseHolder("gw-0", "i"), LeaseHolder("gw-1", "i")
    orphans = {SLOTS: Usage(3, 3, 4, 0)}
    for step in range(20):
        exchanged(table, other, {SLOTS: Usage(4 if step > 11 else 0, 4, 4, 0)}, 100.0 + 0.2 * step)
    exchanged(table, back, orphans, 104.0)
    assert 0 == back.ceilings().limits[SLOTS]
    table = LeaseTable()
    for step in range(5):
        exchanged(table, back, orphans, 104.2 + 0.2 * step, "another run")
        assert back.calm
        assert 0 == back.ceilings().limits[SLOTS]


def test_the_first_to_join_keep_their_lease_when_a_limit_falls():
    """A reload lowers max_in_flight below what waits at each; were all told to keep nothing, none of it would run."""
    table, waiting = LeaseTable(), (9, 14, 11)
    holders = [LeaseHolder(f"gw-{n}", "i") for n in range(3)]
    for step, limit in enumerate((40,) * 20 + (19,) * 5):
        for holder, count in zip(holders, waiting, strict=True):
            usage = Usage(count if step > 12 else 0, count, limit, 0)
            exchanged(table, holder, {SLOTS: Usage(0, 9, 9, 0), IN_FLIGHT + "chat": usage}, 100.0 + 0.2 * step)
    assert [9, 10, 0] == [each._grants[IN_FLIGHT + "chat"].lease for each in holders]


def test_headroom_below_the_number_of_replicas_goes_in_turns():
    """Nobody demands anything; a request that comes first finds one of the two, and not always at the same replica."""
    table, holders = LeaseTable(), [LeaseHolder(f"gw-{n}", "i") for n in range(5)]
    limits = {SLOTS: Usage(0, 0, 20, 0), CEILING + "low": Usage(0, 0, 2, 0)}
    found = set()
    for step in range(100):
        for holder in holders:
            exchanged(table, holder, limits, 100.0 + 0.2 * step)
        low = [holder.ceilings().limits[CEILING + "low"] for holder in holders]
        assert sum(low) <= 2
        if step > 20:
            found.add(tuple(low))
    assert len(found) > 1
    assert 2 == max(map(sum, found))


def renewed(table: LeaseTable, holder: LeaseHolder, admission: Admission, now: float) -> None:
    """Renew the lease of one replica without any delay."""
    usage = replica_usage(admission, admission.whole.capacity.slots, holder.counted)
    request, ceilings = holder.request(usage, "run", "p", now)
    admission.lease(ceilings, now, answered=False)
    reply = transition(table, request, round(now * 1000))
    assert holder.receive(reply, request.sequence)
    admission.serve_elsewhere(holder.peers(reply))
    admission.lease(holder.ceilings(), now, answered=holder.settled)


class Replicas:
    """Two or more replicas under leases, after the calm time."""

    def __init__(self, policy: Policy, count: int = 2) -> None:
        self.table, self.now, self.refused = LeaseTable(), 100.0, list[str]()
        self.holders = [LeaseHolder(f"gw-{n}", "i") for n in range(count)]
        self.all = [Admission(divide(policy, (Share(count, n),)), policy) for n in range(count)]
        for admission in self.all:
            admission.lease(NOTHING, self.now)
        self.renew(12)

    def renew(self, periods: int = 1) -> None:
        for _ in range(periods):
            self.now += PERIOD_S
            for place in range(len(self.all)):
                self.renew_at(place)

    def renew_at(self, place: int) -> None:
        renewed(self.table, self.holders[place], self.all[place], self.now)

    def ask(self, place: int, team: str, times: int = 1) -> list[Ticket]:
        asked = [
            self.all[place].ask(
                team, 10, 10, self.now, lambda: None, lambda refusal: self.refused.append(refusal.reason)
            )
            for _ in range(times)
        ]
        self.refused += [one.reason for one in asked if isinstance(one, Refusal)]
        return [one for one in asked if isinstance(one, Ticket)]

    def running(self, place: int, team: str) -> int:
        return next(one.running for one in self.all[place].standings() if one.team == team)


def test_requests_beyond_a_lease_of_max_in_flight_wait():
    """They are queued or refused by what the store leases, the oldest first, and never while it is calm."""
    pair = Replicas(Policy(teams={"a": Team(max_in_flight=5)}, capacity=Capacity(slots=20)))
    pair.ask(0, "a", 4)
    assert 0 == pair.running(0, "a")
    pair.renew()
    assert 4 == pair.running(0, "a")
    assert 4 == len(pair.ask(1, "a", 4))
    assert [] == pair.refused
    pair.renew(2)
    assert ["team_limit"] * 3 == pair.refused
    assert 1 == pair.running(1, "a")
    assert [] == pair.ask(1, "a", 9)[4:]
    assert 3 + 5 == len(pair.refused), "beyond the limit of all nothing waits for the store"
    pair.table = LeaseTable()
    pair.renew(3)
    assert 3 + 5 == len(pair.refused), "a store that is calm has not answered"


@pytest.mark.parametrize("limit", [None, 6])
def test_a_replica_that_joins_again_refuses_nothing(limit: int | None):
    """Its lease has expired and the other replica has all limits, most of which it returns when it renews next."""
    pair = Replicas(Policy(teams={"a": Team(max_in_flight=limit)}, capacity=Capacity(slots=8, queue=8)))
    for _ in range(15):
        pair.now += PERIOD_S
        pair.renew_at(0)
    for _ in range(3):  # it renews at once when a request begins to wait, the other one after a period
        pair.renew_at(1)
        pair.ask(1, "a")
        pair.now += AT_ONCE_S
    assert [] == pair.refused
    pair.renew(2)
    assert [] == pair.refused
    assert 3 == pair.running(1, "a")


def test_a_busy_replica_uses_the_whole_queue_but_for_a_reserve():
    policy = Policy(teams={"a": Team(), "b": Team()}, bands={"default": Band(rank=0, max_wait_s=1e6)},
                    capacity=Capacity(slots=2, queue=80))  # fmt: skip
    pair = Replicas(policy)
    for _ in range(6):
        pair.ask(0, "a", 40)
        pair.renew(2)
    assert 70 == pair.all[0].waiting, "a quarter of its equal share stays with the other"
    assert 10 == len(pair.ask(1, "b", 12))


def test_a_lapsed_replica_replaces_nothing_in_a_calm_store():
    """It wakes just after the store has restarted empty, and the others hold every slot."""
    table, holder = LeaseTable(), LeaseHolder("gw-0", "i")
    admission = Admission(without_limits(4))
    admission.lease(NOTHING, 0.0)
    for step in range(12):
        renewed(table, holder, admission, 100.0 + step * PERIOD_S)
    asked = [admission.ask("chat", 1, 1, 102.3, lambda: None, lambda _: None) for _ in range(3)]
    assert 3 == admission.running
    admission.ask("lab", 1, 1, 102.3, lambda: None, lambda _: None)
    admission.ask("lab", 1, 1, 102.3, lambda: None, lambda _: None)
    renewed(LeaseTable(), holder, admission, 110.0)
    for ticket in asked:
        assert isinstance(ticket, Ticket)
        admission.leave(ticket, 110.1)
    assert 1 == admission.running


def test_a_band_below_its_floor_gets_slots_at_any_replica():
    bands = {"high": Band(rank=0, max_wait_s=1e6), "low": Band(rank=1, floor=3, ceiling=0.5, max_wait_s=1e6)}
    pair = Replicas(
        Policy(teams={"a": Team(band="high"), "b": Team(band="low")}, bands=bands, capacity=Capacity(slots=8))
    )
    low = pair.ask(1, "b", 9)[:4]
    pair.renew(4)
    assert 4 == pair.running(1, "b"), "no more than its ceiling"
    running = pair.ask(0, "a", 30)[:4]
    pair.renew(4)
    assert 4 == pair.running(0, "a")
    for ticket in [*low, *running]:
        pair.all[ticket not in running].leave(ticket, pair.now, 10, 10)
    pair.renew(4)
    assert 5 == pair.running(0, "a")
    assert 3 == pair.running(1, "b"), "the floor, and no more while the better band wants all"


def test_a_replica_that_asks_later_gets_its_whole_part():
    """Of 4 slots among 3 replicas each has one. Nobody keeps the fourth while another lacks its own."""
    three = Replicas(Policy(teams={"a": Team()}, bands={"default": Band(rank=0, max_wait_s=1e6)},
                            capacity=Capacity(slots=4, queue=400)), 3)  # fmt: skip
    running = [three.ask(place, "a", 60) for place in (0, 1)]
    three.renew(12)
    assert 4 == sum(three.running(place, "a") for place in (0, 1))
    three.ask(2, "a", 60)
    for _ in range(12):
        three.renew()
        for place, tickets in enumerate(running):
            if three.running(place, "a"):
                three.all[place].leave(tickets.pop(0), three.now, 10, 10)
    assert 1 <= three.running(2, "a")


def test_tokens_between_two_renewals_count_at_the_others():
    """A request that is over before a second renewal is as much service as a long one."""
    pair = Replicas(Policy(teams={"a": Team()}, capacity=Capacity(slots=4)))
    pair.ask(1, "a")
    pair.renew()
    for _ in range(10):
        ticket = pair.ask(0, "a")[0]
        pair.renew()
        pair.all[0].leave(ticket, pair.now, 10, 10)
        pair.renew(3)
    assert 11 * (10 + 2 * 10) == pair.table.total["a"]


def test_the_clock_of_leases_runs_while_the_machine_is_suspended():
    assert time.clock_gettime(time.CLOCK_BOOTTIME) == pytest.approx(clock.now(), abs=5)


def test_teams_are_served_alike_over_replicas():
    """One team asks at both replicas, the other at one. With leases both get the same service, to the tokens of one
    period and of the requests at the engines."""
    policy = Policy(
        teams={"x": Team(), "y": Team()}, bands={"default": Band(rank=0, max_wait_s=1e6)}, capacity=Capacity(slots=12)
    )
    admissions, holders = [Admission(policy) for _ in range(2)], [LeaseHolder(f"gw-{n}", "i") for n in range(2)]
    for admission in admissions:
        admission.lease(NOTHING, 0.0)
    table, served, running = LeaseTable(), {"x": 0, "y": 0}, list[tuple[float, int, Ticket]]()
    places = {"x": (0,), "y": (0, 1)}
    hold_s, tokens = 1.0, 30

    def began(place: int, team: str, box: list[Ticket]) -> None:
        served[team] += tokens
        pending.append((place, box))

    pending: list[tuple[int, list[Ticket]]] = []
    for step in range(1200):
        now = 50.0 + step / 20
        while running and running[0][0] <= now:
            _, place, ticket = running.pop(0)
            admissions[place].leave(ticket, now, 10, 10)
        for team, at in places.items():
            for place in at:
                while sum(one.waiting for one in admissions[place].standings() if one.team == team) < 8:
                    box: list[Ticket] = []
                    ticket = admissions[place].ask(
                        team,
                        10,
                        10,
                        now,
                        lambda place=place, team=team, box=box: began(place, team, box),
                        lambda _: None,
                    )
                    assert isinstance(ticket, Ticket)
                    box.append(ticket)
        if step % 4 == 0:
            for place, holder in enumerate(holders):
                renewed(table, holder, admissions[place], now)
        running += [(now + hold_s, place, box[0]) for place, box in pending]
        pending.clear()
        assert len(running) <= 12
    per_period = 12 / hold_s * PERIOD_S * tokens
    assert served["x"] > 100 * tokens
    assert abs(served["x"] - served["y"]) <= per_period + 12 * tokens


# ---- turns


class Steady(Fleet):
    """Replicas without arrivals of their own. waits: in seconds, of the requests that are asked once."""

    waits: list[float]

    def arrive(self, it: Replica) -> None:
        pass

    def ask(self, it: Replica, again: bool) -> None:
        """Ask for a short request, and for the next one when it has ended."""
        box, since = list[Ticket](), self.now

        def goes() -> None:
            if not again:
                self.waits.append(self.now - since)
            self.at(self.now + self.random.uniform(0.03, 0.08), ends)

        def ends() -> None:
            it.admission.leave(box[0], it.clock(self.now), PROMPT, OUTPUT)
            if again:
                self.ask(it, True)

        asked = it.admission.ask("chat", PROMPT, OUTPUT, it.clock(self.now), goes, lambda _: None)
        assert isinstance(asked, Ticket)
        box.append(asked)


def test_one_request_beside_busy_replicas_gets_its_turn():
    """Its part of four slots is less than one. It waited for half a minute, while the others kept what rounding
    left."""
    fleet = Steady(7, 3, (without_limits(4),), faults=False)
    fleet.waits = []
    fleet.go(2.0)
    for it in fleet.replicas[::2]:
        for _ in range(4):
            fleet.ask(it, True)
    for _ in range(20):
        fleet.ask(fleet.replicas[1], False)
        fleet.go(fleet.now + 10)
    assert 20 == len(fleet.waits)
    assert max(fleet.waits) < 3 * TTL_S
