"""A gateway's admission under simulated load, on a virtual clock: no engine, no socket, a million requests in a minute.

An engine is as many slots as there are, each held for as long as a request takes; that is what vLLM looks like from outside while its batch is
not full. Every request ends in exactly one way."""

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

from stack.gateway.admission import Admission, Refusal, State, Ticket
from stack.gateway.policy import Band, Capacity, Policy, Team


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: when, in seconds. holds_s: how long the engine needs. patience_s: after which the client has left, wherever its request is then."""

    at: float
    team: str
    prompt: int
    output: int
    holds_s: float
    patience_s: float = float("inf")


class End(Enum):
    DONE = auto()
    REFUSED = auto()
    WAITED_TOO_LONG = auto()
    LEFT_WAITING = auto()
    LEFT_RUNNING = auto()


@dataclass(frozen=True, slots=True)
class Ended:
    """The one record of a request: how it ended, and how long it waited, in seconds."""

    arrival: Arrival
    end: End
    waited_s: float
    reason: str = ""


@dataclass
class Simulation:
    """look is called after every event with the admission and the time."""

    policy: Policy
    look: Callable[[Admission, float], None] = lambda admission, now: None
    ended: list[Ended] = field(default_factory=list)

    def run(self, arrivals: Iterable[Arrival]) -> Admission:
        admission, clock = Admission(self.policy), itertools.count()
        events: list[tuple[float, int, Callable[[float], None]]] = []

        def at(when: float, what: Callable[[float], None]) -> None:
            heapq.heappush(events, (when, next(clock), what))

        def arrives(arrival: Arrival) -> Callable[[float], None]:
            def visit(now: float) -> None:
                holder: list[Ticket] = []

                def granted() -> None:
                    at(self.now, begins)

                def begins(now: float) -> None:
                    if holder[0].state is State.RUNNING:
                        at(now + arrival.holds_s, ends(End.DONE))

                def ends(how: End) -> Callable[[float], None]:
                    def over(now: float) -> None:
                        ticket = holder[0]
                        if ticket.state is State.GONE:
                            return
                        waits = ticket.state is State.WAITING
                        if how is End.WAITED_TOO_LONG and not waits:
                            return
                        end = End.LEFT_WAITING if how is End.LEFT_RUNNING and waits else how
                        waited_s = (now if waits else ticket.began) - arrival.at
                        admission.leave(ticket, now, arrival.prompt, arrival.output if end is End.DONE else None)
                        self.ended.append(Ended(arrival, end, waited_s))

                    return over

                asked = admission.ask(arrival.team if arrival.team in self.policy.teams else ANYBODY, arrival.prompt, arrival.output, now, granted)
                if isinstance(asked, Refusal):
                    self.ended.append(Ended(arrival, End.REFUSED, 0.0, asked.reason))
                    return
                holder.append(asked)
                at(asked.deadline, ends(End.WAITED_TOO_LONG))
                if arrival.patience_s < float("inf"):
                    at(now + arrival.patience_s, ends(End.LEFT_RUNNING))

            return visit

        coming = iter(arrivals)
        following = next(coming, None)
        while following or events:
            if following and (not events or following.at <= events[0][0]):
                when, what = following.at, arrives(following)
                following = next(coming, None)
            else:
                when, _, what = heapq.heappop(events)
            now = self.now = when
            what(now)
            self.look(admission, now)
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
    teams={"demo": Team(band="demo"), "replay": Team(band="replay"), "small": Team(), "flood": Team(), "nightly": Team(band="experimental")},
    bands={"demo": Band(rank=0, max_wait_s=30.0), "replay": Band(rank=0, max_wait_s=60.0), "default": Band(rank=1, ceiling=0.9, max_wait_s=600.0),
           "experimental": Band(rank=2, ceiling=0.8, floor=2, max_wait_s=1200.0)},
    capacity=Capacity(slots=SLOTS),
)  # fmt: skip
FIFO = Policy(teams={ANYBODY: Team(band="all")}, bands={"all": Band(rank=0, max_wait_s=3600.0)}, capacity=Capacity(slots=SLOTS))
_STEADY = {"demo": 0.7, "replay": 0.4, "small": 0.2, "nightly": 1.8}  # requests a second, each about five seconds long


def flooded(seed: int, minutes: float = MINUTES) -> Iterator[Arrival]:
    """Four teams ask steadily for half of the slots; ten seconds in, a fifth dumps 300 requests of sixteen seconds: more than there is time for."""
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
        cells = "".join(f"{percentile(waits[team], 0.5):13.1f}{percentile(waits[team], 0.99):8.1f}" for team in FAIR.teams)
        yield f"{name:24}{sum(run.use for run in runs) / len(runs):7.3f}{cells}"


class Flood:
    """The flood under a policy. use: the share of slots that were held, from the flood until the last request came, 0 to 1."""

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
        f"team-{at}": Team(band=("demo", "default", "experimental")[at % 3], weight=1 + at % 4, max_running=(None, 8)[at % 2],
                           max_in_flight=(30, 12)[at % 5 == 0])
        for at in range(10)
    },
    bands={"demo": Band(rank=0, max_wait_s=15.0), "default": Band(rank=1, max_wait_s=30.0),
           "experimental": Band(rank=2, ceiling=0.8, floor=2, max_wait_s=8.0)},
    capacity=Capacity(slots=SLOTS, tokens=40_000, queue=45),
)  # fmt: skip


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
