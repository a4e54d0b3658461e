"""Scenarios of admission on a virtual clock: our policy beside first come first served, team by team. Printed into
docs/internals/admission.md.

    python tests/support/admission_scenarios.py            the table
    python tests/support/admission_scenarios.py --write    the table, into the page

The same arrivals for both, from one seed; nothing here reads a clock, so every figure is exact and comes out the same
anywhere."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from stack.gateway.admission import Admission
from stack.gateway.policy import Band, Capacity, Policy, Team
from tests.support.admission_sim import ANYBODY, Arrival, End, Simulation, percentile

PAGE = Path(__file__).resolve().parents[2] / "docs/internals/admission.md"
BEGIN, END = "<!-- printed: scenarios -->", "<!-- end -->"
SLOTS, SEED, MINUTES = 32, 11, 4
TEAMS = {"demo": Team(band="demo"), "chat": Team(), "docs": Team(), "nightly": Team(band="experimental")}
OURS = Policy(
    teams=TEAMS,
    bands={"demo": Band(rank=0, max_wait_s=15.0), "default": Band(rank=1, max_wait_s=60.0),
           "experimental": Band(rank=2, ceiling=0.8, floor=2, max_wait_s=120.0)},
    capacity=Capacity(slots=SLOTS),
)  # fmt: skip
# One queue for all, as long as clients wait for the longest of ours.
FIRST_COME = Policy(
    teams={ANYBODY: Team(band="all")}, bands={"all": Band(rank=0, max_wait_s=120.0)}, capacity=Capacity(slots=SLOTS)
)


@dataclass(frozen=True, slots=True)
class Asks:
    """How a team asks: requests a second from one time to another, how long each holds a slot on the average, and its
    tokens. once: all at the first moment instead, so many."""

    rate: float = 0.0
    holds_s: float = 5.0
    prompt: int = 500
    output: int = 150
    from_s: float = 0.0
    once: int = 0

    def arrivals(self, team: str, rng: random.Random) -> Iterator[Arrival]:
        at = self.from_s
        for _ in range(self.once):
            yield self._one(team, at, rng)
        while self.rate and (at := at + rng.expovariate(self.rate)) < MINUTES * 60:
            yield self._one(team, at, rng)

    def _one(self, team: str, at: float, rng: random.Random) -> Arrival:
        size = rng.uniform(0.5, 1.5)
        return Arrival(at, team, round(self.prompt * size), round(self.output * size), self.holds_s * size)


@dataclass(frozen=True, slots=True)
class Scenario:
    """teams: how each asks. slots: how many there are from each of these seconds on."""

    name: str
    what: str
    teams: Mapping[str, Asks]
    slots: tuple[tuple[float, int], ...] = ()

    def run(self, policy: Policy) -> Simulation:
        """The same arrivals whatever the policy."""
        rng = random.Random(SEED)
        arrivals = sorted(
            chain.from_iterable(asks.arrivals(team, rng) for team, asks in self.teams.items()), key=lambda one: one.at
        )
        due = list(self.slots)

        def look(admission: Admission, now: float) -> None:
            while due and now >= due[0][0]:
                admission.resize(due.pop(0)[1], now)

        simulation = Simulation(policy, look)
        simulation.run(arrivals)
        return simulation


_USUAL = {"demo": Asks(0.7), "chat": Asks(1.2), "docs": Asks(0.6), "nightly": Asks(1.5)}  # two thirds of the slots
# by a quarter of what runs, every five seconds
_SHRINKS = tuple((60.0 + 5 * step, slots) for step, slots in enumerate((24, 18, 13, 9, 6)))
_GROWS = tuple((110.0 + step, 6 + step * 2) for step in range(14))  # by a twentieth of the limit a second, at least
SCENARIOS = (
    Scenario(
        "flood of one team",
        "chat sends 300 requests of 12 s at second 10",
        {**_USUAL, "chat": Asks(0.2, 12.0, from_s=10.0, once=300)},
    ),
    Scenario(
        "mixed lengths",
        "docs sends 6,000 tokens for an answer of 900, 25 s each, and chat 300 for 60, 2 s each; together more than"
        " there is",
        {"demo": Asks(0.7), "chat": Asks(6.0, 2.0, 300, 60), "docs": Asks(1.2, 25.0, 6000, 900), "nightly": Asks(0.5)},
    ),
    Scenario(
        "failing engine",
        "one of two engines is gone from second 60 to 120, with half of the slots",
        _USUAL,
        ((60.0, 16), (120.0, SLOTS)),
    ),
    Scenario(
        "slot shrink",
        "the cache is full from second 60 on: slots fall to 6, and come back from second 110",
        _USUAL,
        (*_SHRINKS, *_GROWS),
    ),
)


def table() -> Iterator[str]:
    """The lines of the table, as Markdown. Waits are those of requests that were served."""
    head = ("scenario", "team", "sent", "p50", "p95", "served", "refused", "FCFS p50", "p95", "served", "refused")
    for row in (head, ("---",) * 2 + ("---:",) * 9, *chain.from_iterable(map(_rows, SCENARIOS))):
        yield "| " + " | ".join(row) + " |"


def _rows(scenario: Scenario) -> Iterator[Sequence[str]]:
    ours, theirs = scenario.run(OURS), scenario.run(FIRST_COME)
    for team in scenario.teams:
        mine = _figures(ours, team)
        yield (
            scenario.name,
            team,
            str(sum(1 for one in ours.ended if one.arrival.team == team)),
            *mine,
            *_figures(theirs, team),
        )


def _figures(simulation: Simulation, team: str) -> tuple[str, str, str, str]:
    waits = simulation.waits(team)
    refused = sum(
        one.end in (End.REFUSED, End.DISPLACED, End.WAITED_TOO_LONG)
        for one in simulation.ended
        if one.arrival.team == team
    )
    half, most = (f"{percentile(waits, share):.1f}" if waits else "" for share in (0.5, 0.95))
    return half, most, str(len(waits)), str(refused)


def printed(page: str) -> str:
    """The page with the table as the simulation gives it now."""
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(printed(PAGE.read_text()))
    else:
        sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    main()
