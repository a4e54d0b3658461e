"""Leases of gateway replicas on a virtual clock: random joins, deaths, partitions, pauses, slow and repeated messages,
restarts of the store and steps of its clock.

`VLLM_WATCH_HISTORIES` sets the number of random histories; `make bench-faults` runs 10,000."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from stack.gateway.admission import Admission, Ticket, TicketState
from stack.gateway.lease import PERIOD_S, TTL_S, Ceilings, LeaseHolder, ReplicaUsage, TeamUsage, Usage
from stack.gateway.lease_store import LeaseReply, LeaseRequest, LeaseTable, transition
from stack.gateway.policy import Band, Capacity, Policy, Team

HISTORIES = int(os.environ.get("VLLM_WATCH_HISTORIES", "300"))
TEAMS = {"chat": (0, 1.0), "lab": (1, 2.0), "batch": (1, 1.0)}  # rank, weight
END_S = 20.0
NOTHING = Ceilings(0, None, {}, -math.inf)


@dataclass
class Running:
    team: str
    end: float
    tokens: int
    until: float  # of the lease under which it was admitted; renewed while that lease goes on


@dataclass
class Replica:
    """One gateway without sockets: requests wait, run and end."""

    name: str
    holder: LeaseHolder
    ceilings: Ceilings = NOTHING
    waiting: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TEAMS, 0))
    running: list[Running] = field(default_factory=list)
    orphans: int = 0  # of `running`, the first so many were admitted under a lease that has lapsed
    dead: bool = False
    paused_until: float = 0.0
    cut_until: float = 0.0
    rate: float = 1.0  # of its clock

    def clock(self, now: float) -> float:
        return now * self.rate


class Fleet:
    """Replicas and one store under faults. Checks the bound at every admission."""

    def __init__(self, seed: int, replicas: int, capacity: int, *, linger_s: float = 0.0, tokens: int | None = None,
                 limits: dict[str, int] | None = None, faults: bool = True) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.capacity, self.tokens, self.limits, self.faults = capacity, tokens, limits or {}, faults
        self.linger_s, self.load = linger_s, 1.3
        self.now, self.counter = 0.0, itertools.count()
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.table, self.run, self.step_s, self.store_up_at = LeaseTable(), "run-0", 1_000.0, 0.0
        self.admitted = self.most = 0
        self.idle_slot_s = 0.0
        self.replicas: list[Replica] = []
        for number in range(replicas):
            self.join(f"gw-{number}")

    # ---- events

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (when, next(self.counter), what))

    def go(self, until: float) -> None:
        while self.heap and self.heap[0][0] <= until:
            self.now, _, what = heapq.heappop(self.heap)
            what()
        self.now = until

    def join(self, name: str) -> None:
        holder = LeaseHolder(name, f"{self.random.random()}", linger_s=self.linger_s)
        it = Replica(name, holder, rate=1 + self.random.uniform(-2e-4, 2e-4) if self.faults else 1.0)
        self.replicas.append(it)
        self.at(self.now + self.random.uniform(0, PERIOD_S), lambda: self.renew(it))
        self.at(self.now, lambda: self.arrive(it))
        if self.faults:
            self.at(self.now + self.random.expovariate(1 / 8), lambda: self.fault(it))

    def arrive(self, it: Replica) -> None:
        if it.dead:
            return
        it.waiting[self.random.choice(list(TEAMS))] += 1
        self.admit(it)
        mean_s = 2.0 * sum(not each.dead for each in self.replicas) / (self.capacity * self.load)
        self.at(self.now + self.random.expovariate(1 / mean_s), lambda: self.arrive(it))

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

    # ---- one replica

    def usage(self, it: Replica) -> ReplicaUsage:
        of = {team: [r for r in it.running if r.team == team] for team in TEAMS}
        teams = tuple(
            TeamUsage(
                team, *TEAMS[team], charged=0, demand=len(of[team]) + it.waiting[team],
                running=Usage(len(of[team]), len(of[team]) + it.waiting[team], self.limits[team], 0)
                if team in self.limits else None,
            )
            for team in TEAMS if of[team] or it.waiting[team]
        )  # fmt: skip
        waiting = sum(it.waiting.values())
        used = sum(r.tokens for r in it.running)
        tokens = None
        if self.tokens is not None:
            tokens = Usage(used, used + 10 * waiting, self.tokens, 0)
        return ReplicaUsage(Usage(len(it.running), len(it.running) + waiting, self.capacity, 0), tokens, teams)

    def renew(self, it: Replica) -> None:
        if it.dead:
            return
        if self.now < it.paused_until:
            self.at(it.paused_until, lambda: self.renew(it))
            return
        self.at(self.now + PERIOD_S, lambda: self.renew(it))
        self.lapse(it)
        run = self.run if self.now >= it.cut_until else it.holder._run
        request, it.ceilings = it.holder.request(self.usage(it), run, "p", it.clock(self.now))
        draw = self.random.random() if self.faults else 1.0
        times = 2 if draw < 0.02 else 0 if draw < 0.04 else 1
        for _ in range(times if self.now >= it.cut_until else 0):
            self.at(self.now + self.delay(), lambda: self.serve(it, request))

    def delay(self) -> float:
        slow = self.faults and self.random.random() < 0.02
        return self.random.uniform(0.1, 4) if slow else self.random.uniform(0.0001, 0.01)

    def serve(self, it: Replica, request: LeaseRequest) -> None:
        if self.now < self.store_up_at or request.run != self.run:
            return  # the connection is gone
        reply = transition(self.table, request, int((self.now + self.step_s) * 1000))
        record = self.table.replicas.get(it.name)
        if (
            reply.state == "ok"
            and record is not None
            and record.slots.lease > max(request.slots.keep, request.slots.use)
        ):
            leased = sum(each.slots.lease for each in self.table.replicas.values())
            assert leased <= self.capacity, "a grant beyond the capacity"
        if not self.faults or self.random.random() > 0.02:
            self.at(self.now + self.delay(), lambda: self.take(it, reply, request))

    def take(self, it: Replica, reply: LeaseReply, request: LeaseRequest) -> None:
        if it.dead or self.now < it.cut_until:
            return
        if self.now < it.paused_until:
            self.at(it.paused_until, lambda: self.take(it, reply, request))
            return
        if it.holder.incarnation != request.incarnation:
            return
        self.lapse(it)
        if it.holder.receive(reply, request.sequence):
            it.ceilings = it.holder.ceilings()
        self.admit(it)

    def lapse(self, it: Replica) -> None:
        """Requests that outlive their lease are orphans from then on."""
        if it.clock(self.now) >= it.ceilings.until:
            it.orphans = len(it.running)

    def admit(self, it: Replica) -> None:
        if it.dead or self.now < it.paused_until:
            return
        self.lapse(it)
        for team in TEAMS:
            while it.waiting[team] and self.room(it, team):
                it.waiting[team] -= 1
                hold_s = self.random.expovariate(1 / 2.0)
                one = Running(team, self.now + hold_s, 10, it.ceilings.until)
                it.running.append(one)
                self.at(one.end, lambda one=one: self.end(it, one))
                self.admitted += 1
                self.check()

    def room(self, it: Replica, team: str) -> bool:
        c = it.ceilings
        own = sum(r.team == team for r in it.running)
        return (
            it.clock(self.now) < c.until
            and len(it.running) < c.slots
            and (team not in self.limits or own < c.teams.get(team, 0))
            and (c.tokens is None or sum(r.tokens for r in it.running) + 10 <= c.tokens)
        )

    def end(self, it: Replica, one: Running) -> None:
        if it.dead or one not in it.running:
            return
        place = next(place for place, each in enumerate(it.running) if each is one)
        self.lapse(it)
        del it.running[place]
        it.orphans -= place < it.orphans
        self.admit(it)

    # ---- the bound

    def check(self) -> None:
        fresh = orphans = 0
        of_team = dict.fromkeys(TEAMS, 0)
        for it in self.replicas:
            lapsed = len(it.running) if it.clock(self.now) >= it.ceilings.until else it.orphans
            orphans += lapsed
            fresh += len(it.running) - lapsed
            for one in it.running[lapsed:]:
                of_team[one.team] += 1
        self.most = max(self.most, fresh + orphans)
        assert fresh + orphans <= self.capacity + orphans, f"{fresh} of {self.capacity} at {self.now}"
        for team, limit in self.limits.items():
            assert of_team[team] <= limit, f"{team}: {of_team[team]} of {limit} at {self.now}"
        if self.tokens is not None:
            assert 10 * fresh <= self.tokens


@pytest.mark.parametrize("block", range(10))
def test_no_more_is_in_flight_than_the_limit_and_orphans(block: int):
    """Random histories. After the faults every slot is used again."""
    admitted = 0
    for number in range(-(-HISTORIES // 10)):
        seed = block * 1_000_003 + number
        draw = random.Random(seed)
        limits = {"chat": draw.randint(1, 12)} if draw.random() < 0.5 else {}
        tokens = draw.choice((None, None, 10 * draw.randint(8, 40)))
        fleet = Fleet(
            seed, draw.choice((1, 2, 3, 3, 5)), draw.randint(6, 32), linger_s=draw.choice((0.0, 0.0, 3.0)),
            tokens=tokens, limits=limits,
        )  # fmt: skip
        try:
            fleet.go(END_S)
            fleet.faults = False
            for it in fleet.replicas:
                it.cut_until = it.paused_until = 0.0
            fleet.load = 4.0
            heap, fleet.heap = fleet.heap, []
            for event in heap:
                fleet.at(max(fleet.now, event[0]), event[2])
            fleet.go(END_S + 2 * TTL_S + fleet.linger_s + 4.0)
            # the last fault may just have ended; each replica has flooded its queue for seconds
            running = sum(len(it.running) for it in fleet.replicas)
            room = min(fleet.capacity, (tokens or math.inf) // 10)
            assert running >= 0.7 * room, f"{running} of {room}"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        admitted += fleet.admitted
    assert admitted > HISTORIES


@pytest.mark.parametrize("linger_s", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_slots_of_a_dead_replica_are_used_again(seed: int, linger_s: float):
    """Not before its lease has ended, and at the latest one period of every other replica after that and linger."""
    fleet = Fleet(seed, 3, 24, linger_s=linger_s, faults=False)
    fleet.load = 4.0
    fleet.go(10.0)
    assert fleet.capacity == sum(len(it.running) for it in fleet.replicas)
    dead = fleet.replicas[0]
    lost = len(dead.running)
    assert lost
    dead.dead, dead.running, dead.orphans = True, [], 0
    fleet.go(fleet.now + TTL_S + linger_s - PERIOD_S - 0.05)
    assert sum(len(it.running) for it in fleet.replicas) <= fleet.capacity - lost
    fleet.go(fleet.now + 3 * PERIOD_S + 0.1)
    assert sum(len(it.running) for it in fleet.replicas) >= fleet.capacity - 1, "one request may just have ended"


def test_a_replica_that_wakes_does_not_use_its_lease():
    """The lease ended while the process stood still, so nothing is admitted before the next answer."""
    admission = Admission(Policy(teams={"a": Team()}, capacity=Capacity(slots=4)))
    admission.lease(Ceilings(4, None, {}, until=10.0), 9.0)
    asked = [admission.ask("a", 1, 1, now, lambda: None, lambda _: None) for now in (9.9, 10.0, 60.0)]
    assert [TicketState.RUNNING, TicketState.WAITING, TicketState.WAITING] == [one.state for one in asked]
    admission.leave(asked[0], 61.0)
    assert 0 == admission.running
    admission.lease(Ceilings(1, None, {}, until=70.0), 62.0)
    assert 1 == admission.running
    admission.lease(None, 63.0)
    assert 2 == admission.running, "without a lease the policy holds"


def test_ceilings_of_a_lease_bound_tokens_and_teams():
    policy = Policy(teams={"a": Team(max_running=3), "b": Team()}, capacity=Capacity(slots=9, tokens=1000))
    admission = Admission(policy)
    admission.whole_tokens = 1000
    admission.lease(Ceilings(9, 100, {"a": 1}, until=math.inf), 0.0)
    first = [admission.ask("a", 20, 0, 0.0, lambda: None, lambda _: None) for _ in range(2)]
    assert [TicketState.RUNNING, TicketState.WAITING] == [one.state for one in first]
    large = admission.ask("b", 5000, 0, 0.0, lambda: None, lambda _: None)
    assert TicketState.WAITING is large.state, "it needs the whole budget"
    assert 5000 == admission.next_tokens()
    admission.leave(first[0], 1.0)
    admission.leave(first[1], 1.0)
    admission.lease(Ceilings(9, 1000, {"a": 1}, until=math.inf), 2.0)
    assert TicketState.RUNNING is large.state


def test_a_large_request_gets_the_tokens_that_it_needs():
    """Two replicas keep the budget in use; the third needs more than its part for its next request."""
    table, holders = LeaseTable(), [LeaseHolder(f"gw-{n}", "i") for n in range(3)]
    use = [0, 0, 0]
    for step in range(60):
        now = 100.0 + 0.2 * step
        for place, holder in enumerate(holders):
            tokens = Usage(use[place], 1000, 1000, 0) if place < 2 else Usage(0, 700, 1000, 0, large=700)
            slots = Usage(1, 5, 30, 0)
            request, _ = holder.request(ReplicaUsage(slots, tokens, ()), "run", "p", now)
            assert holder.receive(transition(table, request, round(now * 1000)), request.sequence)
            if place < 2:  # a tenth of what runs ends, and whatever fits begins
                use[place] = max(use[place] * 9 // 10, holder.ceilings().tokens or 0)
        if (holders[2].ceilings().tokens or 0) >= 700:
            return
        use[:2] = [each * 9 // 10 for each in use[:2]]
    raise AssertionError(f"{holders[2].ceilings()} after 12 s")


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
                admission = admissions[place]
                teams = tuple(
                    TeamUsage(team.name, 0, 1.0, team.charged, team.in_flight, None) for team in admission.active({})
                )
                slots = Usage(admission.running, admission.running + admission.waiting, 12, 0)
                request, ceilings = holder.request(ReplicaUsage(slots, None, teams), "run", "p", now)
                admission.lease(ceilings, now)
                reply = transition(table, request, round(now * 1000))
                assert holder.receive(reply, request.sequence)
                admission.serve_elsewhere(holder.peers(reply))
                admission.lease(holder.ceilings(), now)
        running += [(now + hold_s, place, box[0]) for place, box in pending]
        pending.clear()
        assert len(running) <= 12
    per_period = 12 / hold_s * PERIOD_S * tokens
    assert served["x"] > 100 * tokens
    assert abs(served["x"] - served["y"]) <= per_period + 12 * tokens
