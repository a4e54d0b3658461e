"""A gateway's admission under simulated load, on a virtual clock: no engine, no socket, a million requests in a minute.

An engine is as many slots as there are, each held for as long as a request takes; that is what vLLM looks like from
outside while its batch is not full. Every request ends in exactly one way."""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from stack.gateway.admission import Admission
from stack.gateway.admission_state import Refusal, Ticket, TicketState
from stack.gateway.policy import Band, Capacity, Policy, Team


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: when, in seconds. holds_s: how long the engine needs. patience_s: after which the client has left, wherever
    its request is then. texts: how many the engine makes, each as long as that. slots: how many it asks for."""

    at: float
    team: str
    prompt: int
    output: int
    holds_s: float
    patience_s: float = float("inf")
    texts: int = 1
    slots: int = 1


class End(Enum):
    DONE = auto()
    REFUSED = auto()
    WAITED_TOO_LONG = auto()
    DISPLACED = auto()
    LEFT_WAITING = auto()
    LEFT_RUNNING = auto()


@dataclass(frozen=True, slots=True)
class Ended:
    """The one record of a request: how it ended, and how long it waited for a slot and took in all, in seconds."""

    arrival: Arrival
    end: End
    waited_s: float
    reason: str = ""
    took_s: float = 0.0


class Clock:
    """The virtual time, and what is still to come: in order of time, and at one time in the order in which it was
    told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self._order), what))


class Engine:
    """An engine that makes so many texts at once, and others first come, first served."""

    def __init__(self, seats: int) -> None:
        self._free_at = [0.0] * seats

    def until(self, texts: int, holds_s: float, now: float) -> float:
        """Return when the last text of a request that comes now has been made."""
        made_at = now
        for _ in range(texts):
            made_at = max(now, self._free_at[0]) + holds_s
            heapq.heapreplace(self._free_at, made_at)
        return made_at


class Visit:
    """One request and its client, from the arrival to the end, which goes to `ended`."""

    __slots__ = ("_admission", "_arrival", "_clock", "_ended", "_engine", "_ticket")

    _ticket: Ticket

    def __init__(
        self, arrival: Arrival, admission: Admission, clock: Clock, ended: list[Ended], engine: Engine | None = None
    ) -> None:
        self._arrival, self._admission, self._clock, self._ended = arrival, admission, clock, ended
        self._engine = engine

    def arrives(self, now: float, team: str) -> None:
        arrival = self._arrival
        asked = self._admission.ask(
            team, arrival.prompt, arrival.output, now, self._granted, self._displaced, arrival.slots
        )
        if isinstance(asked, Refusal):
            self._ended.append(Ended(arrival, End.REFUSED, 0.0, asked.reason))
            return
        self._ticket = asked
        self._clock.at(asked.deadline, self._waited_too_long)
        if arrival.patience_s < float("inf"):
            self._clock.at(now + arrival.patience_s, self._leaves)

    def _granted(self) -> None:
        self._clock.at(self._clock.now, self._begins)

    def _displaced(self, refusal: Refusal) -> None:
        self._ended.append(Ended(self._arrival, End.DISPLACED, self._clock.now - self._arrival.at, refusal.reason))

    def _begins(self, now: float) -> None:
        if self._ticket.state is TicketState.RUNNING:
            holds_s = self._arrival.holds_s
            made_at = now + holds_s if self._engine is None else self._engine.until(self._arrival.texts, holds_s, now)
            self._clock.at(made_at, self._done)

    def _done(self, now: float) -> None:
        if self._ticket.state is not TicketState.GONE:
            self._over(End.DONE, now)

    def _waited_too_long(self, now: float) -> None:
        if self._ticket.state is TicketState.WAITING:
            self._over(End.WAITED_TOO_LONG, now)

    def _leaves(self, now: float) -> None:
        if self._ticket.state is not TicketState.GONE:
            self._over(End.LEFT_WAITING if self._ticket.state is TicketState.WAITING else End.LEFT_RUNNING, now)

    def _over(self, end: End, now: float) -> None:
        arrival, ticket = self._arrival, self._ticket
        waited_s = (now if ticket.state is TicketState.WAITING else ticket.began) - arrival.at
        self._admission.leave(ticket, now, arrival.prompt, arrival.output if end is End.DONE else None)
        self._ended.append(Ended(arrival, end, waited_s, took_s=now - arrival.at))


@dataclass
class Simulation:
    """look is called after every event with the admission and the time. engine: None for one that never queues."""

    policy: Policy
    look: Callable[[Admission, float], None] = lambda admission, now: None
    ended: list[Ended] = field(default_factory=list)
    engine: Engine | None = None

    def run(self, arrivals: Iterable[Arrival]) -> Admission:
        admission, clock = Admission(self.policy), Clock()
        coming = iter(arrivals)
        following = next(coming, None)
        while following or clock.events:
            if following and (not clock.events or following.at <= clock.events[0][0]):
                arrival, following = following, next(coming, None)
                clock.now = arrival.at
                Visit(arrival, admission, clock, self.ended, self.engine).arrives(
                    clock.now, arrival.team if arrival.team in self.policy.teams else ANYBODY
                )
            else:
                clock.now, _, what = heapq.heappop(clock.events)
                what(clock.now)
            self.look(admission, clock.now)
        return admission

    def waits(self, team: str) -> list[float]:
        """How long those of a team waited that got through, in order."""
        return sorted(one.waited_s for one in self.ended if one.arrival.team == team and one.end is End.DONE)


def percentile(ordered: list[float], share: float) -> float:
    """The value below which a share (0 to 1) lies: the nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---- one team floods the others

SLOTS, MINUTES, FLOOD, FLOOD_AT_S = 32, 4, 300, 10.0
ANYBODY = "anybody"  # the team of those that a policy does not tell apart
FAIR = Policy(
    teams={"demo": Team(band="demo"), "replay": Team(band="replay"), "small": Team(), "flood": Team(),
        "nightly": Team(band="experimental")},
    bands={"demo": Band(rank=0, max_wait_s=30.0), "replay": Band(rank=0, max_wait_s=60.0),
        "default": Band(rank=1, ceiling=0.9, max_wait_s=600.0),
           "experimental": Band(rank=2, ceiling=0.8, floor=2, max_wait_s=1200.0)},
    capacity=Capacity(slots=SLOTS),
)  # fmt: skip
FIFO = Policy(
    teams={ANYBODY: Team(band="all")}, bands={"all": Band(rank=0, max_wait_s=3600.0)}, capacity=Capacity(slots=SLOTS)
)
_STEADY = {"demo": 0.7, "replay": 0.4, "small": 0.2, "nightly": 1.8}  # requests a second, each about five seconds long


def flooded(seed: int, minutes: float = MINUTES) -> Iterator[Arrival]:
    """Four teams ask steadily for half of the slots; ten seconds in, a fifth dumps 300 requests of sixteen seconds:
    more than there is time for."""
    rng = random.Random(seed)
    steady = [_some(rng, FLOOD_AT_S, "flood", 16.0) for _ in range(FLOOD)]
    for team, rate in _STEADY.items():
        at = rng.expovariate(rate)
        while at < minutes * 60:
            steady.append(_some(rng, at, team, 5.0))
            at += rng.expovariate(rate)
    yield from sorted(steady, key=lambda arrival: arrival.at)


def _some(rng: random.Random, at: float, team: str, mean_s: float) -> Arrival:
    holds_s = min(mean_s * 4, rng.lognormvariate(0, 0.6) * mean_s * 0.835)  # the mean of this is mean_s
    return Arrival(at, team, rng.randint(50, 1500), max(1, int(holds_s * 30)), holds_s)


def table(seeds: Iterable[int] = range(5)) -> Iterator[str]:
    """What each team waited for in the flood, in seconds: our policy beside first come first served."""
    seeds = tuple(seeds)
    yield f"{'':24}{'use':>7}" + "".join(f"{team + ' p50':>13}{'p99':>8}" for team in FAIR.teams)
    for name, policy in (("bands and tokens", FAIR), ("first come first served", FIFO)):
        runs = [Flood(policy, seed) for seed in seeds]
        waits = {team: sorted(wait for run in runs for wait in run.waits(team)) for team in FAIR.teams}
        cells = "".join(
            f"{percentile(waits[team], 0.5):13.1f}{percentile(waits[team], 0.99):8.1f}" for team in FAIR.teams
        )
        yield f"{name:24}{sum(run.use for run in runs) / len(runs):7.3f}{cells}"


class Flood:
    """The flood under a policy. use: the share of slots that were held, from the flood until the last request came, 0
    to 1."""

    def __init__(self, policy: Policy, seed: int, minutes: float = MINUTES) -> None:
        self._busy_s, self._running, self._last, self._until = 0.0, 0, FLOOD_AT_S, minutes * 60
        simulation = Simulation(policy, self._look)
        simulation.run(flooded(seed, minutes))
        self.waits = simulation.waits
        self.ended = simulation.ended
        self.use = self._busy_s / (SLOTS * (self._until - FLOOD_AT_S))

    def _look(self, admission: Admission, now: float) -> None:
        if now > self._last:
            self._busy_s += self._running * max(0.0, min(now, self._until) - self._last)
            self._last = now
        self._running = admission.running


# ---- many


def busy(requests: int, seed: int = 0) -> Iterator[Arrival]:
    """Ten teams that ask for nearly half as much again as there is, with clients that lose patience."""
    rng, at = random.Random(seed), 0.0
    for _ in range(requests):
        at += rng.expovariate(SLOTS * 1.4 / 5.0)
        arrival = _some(rng, at, f"team-{rng.randint(0, 9)}", 5.0)
        yield replace(arrival, patience_s=rng.expovariate(1 / 40.0)) if rng.random() < 0.3 else arrival


BUSY = Policy(
    teams={
        f"team-{at}": Team(
            band=("demo", "default", "experimental")[at % 3],
            weight=1 + at % 4,
            max_running=(None, 8)[at % 2],
            max_in_flight=(30, 12)[at % 5 == 0],
        )
        for at in range(10)
    },
    bands={
        "demo": Band(rank=0, max_wait_s=15.0),
        "default": Band(rank=1, max_wait_s=30.0),
        "experimental": Band(rank=2, ceiling=0.8, floor=2, max_wait_s=8.0),
    },
    capacity=Capacity(slots=SLOTS, tokens=40_000, queue=45),
)


def main() -> None:
    """`make bench-admission`: the table of the flood, and a million requests."""
    sys.stdout.write("\n".join(table()) + "\n")
    requests, began = 1_000_000, time.process_time()
    simulation = Simulation(BUSY)
    admission = simulation.run(busy(requests))
    took_s = time.process_time() - began
    ends = Counter(one.end.name.lower() for one in simulation.ended)
    left = admission.running, admission.waiting, admission.tokens, admission.waiting_tokens
    sys.stdout.write(f"{requests:,} requests, {took_s / requests * 1e6:.1f} us each, simulation included: " + ", ".join(
        f"{count:,} {end}" for end, count in ends.most_common()) + "\n")  # fmt: skip
    if sum(ends.values()) != requests or any(left):
        raise SystemExit(f"{sum(ends.values()):,} records of {requests:,} requests; left behind: {left}")


if __name__ == "__main__":
    main()
