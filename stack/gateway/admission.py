"""Who goes to the engines next. Pure: it knows no socket and no clock, every call brings the time.

Laws. A request waits, runs or is gone, and every count is the number of requests in such a state. No slot stays free while somebody may take it.
Bands go by rank, except that a band below its floor comes first; teams of one rank take turns by the service that they have had; within a team
whoever came first goes first. Nobody is overtaken for being large: who is next waits for room, and everybody behind with him.

Service is counted in tokens, as by the virtual token counter: a prompt token counts once, an output token twice, divided by the team's weight;
whoever comes back after a pause starts where the others stand, so nobody saves up. The expected output is charged when a request goes, and put
right when its real size is known. Source: Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588, section 4; the lift is to
the virtual time of start-time fair queuing (Goyal et al. 1996), which is the counter of whom it was the turn last. Bands, ceilings and floors:
flow control of the Gateway API inference extension, but floors instead of ageing, which turns priorities into first come first served."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from stack.gateway.policy import Band, Policy, Team

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # what a token costs; source: the paper's own implementation
SOONEST_S, LATEST_S = 1.0, 120.0  # what a refused client is told; those of OpenAI's library obey no wait beyond 120 s
_MEMORY = 0.1  # how much the last request counts for the mean time that a slot is held


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that was let in. prompt, output: expected tokens. deadline: until when it may wait.

    granted is called when its turn has come, from within whatever call made room; before that call returns, it runs."""

    team: _Team
    prompt: int
    output: int
    asked: float
    deadline: float
    granted: Callable[[], None]
    state: State = State.WAITING
    began: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    @property
    def band(self) -> str:
        return self.team.band.name


@dataclass(frozen=True, slots=True)
class Refusal:
    """reason: of the vocabulary of reasons.py. retry_after_s: when it is worth another try, from 1 to 120 s."""

    reason: str
    retry_after_s: float


@dataclass(slots=True)
class _Band:
    name: str
    band: Band
    running: int = 0
    waiting: int = 0


@dataclass(slots=True)
class _Team:
    name: str
    team: Team
    band: _Band
    served: float = 0.0
    running: int = 0
    queue: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)  # leaves from the middle cost no more than from the front

    @property
    def in_flight(self) -> int:
        return self.running + len(self.queue)

    @property
    def may_run(self) -> bool:
        return self.team.max_running is None or self.running < self.team.max_running


@dataclass(frozen=True, slots=True)
class Standing:
    """One team as it stands: requests that run and wait, the band, and how long a further one would wait, in seconds."""

    team: str
    band: str
    running: int
    waiting: int
    wait_s: float


class Admission:
    """All requests of one gateway. The policy can be exchanged at any time; requests that were let in stay."""

    def __init__(self, policy: Policy) -> None:
        self._teams: dict[str, _Team] = {}
        self._queues: dict[int, dict[str, _Team]] = {}  # rank -> teams of it with somebody waiting
        self._level: dict[int, float] = {}  # rank -> the counter of whom it was the turn last
        self._hold_s: float | None = None  # how long a slot is held, on the average
        self.running = self.waiting = self.tokens = self.waiting_tokens = 0
        self._capacity = policy.capacity
        self.slots = policy.capacity.slots
        self._ranks: list[int] = []
        self._passes: tuple[bool, ...] = ()  # over the ranks: for bands below their floor, then for all
        self.adopt(policy, 0.0)

    # ---- from outside

    def ask(self, team: str, prompt: int, output: int, now: float, granted: Callable[[], None]) -> Ticket | Refusal:
        """Lets a request in, at once or to wait, or says why not. Raises KeyError for a team that the policy does not have."""
        it, capacity = self._teams[team], self._capacity
        if it.team.max_in_flight is not None and it.in_flight >= it.team.max_in_flight:
            return self._refusal("team_limit", (self._hold_s or 0.0) / max(1, it.in_flight))
        ticket = Ticket(it, prompt, output, now, now + it.band.band.max_wait_s, granted)
        if self._goes_at_once(ticket):
            self._join(ticket)
            self._hand_on(now)
            return ticket
        wait_s = self.wait_s(team)
        if self.waiting >= capacity.queue or (capacity.queue_tokens is not None and self.waiting_tokens + ticket.tokens > capacity.queue_tokens):
            return self._refusal("queue_full", wait_s)
        if wait_s > it.band.band.max_wait_s:
            return self._refusal("est_wait", wait_s)
        self._join(ticket)
        self._hand_on(now)
        return ticket

    def leave(self, ticket: Ticket, now: float, prompt: int | None = None, output: int | None = None) -> None:
        """It is over, however it was: a request that waited no longer does, one that ran gives back what it held. Twice is once.

        prompt, output: the tokens that it really had; None where nobody knows, and the expected ones stay charged. 0 and 0 of one that got nothing,
        such as one that an engine refused."""
        state, ticket.state, team = ticket.state, State.GONE, ticket.team
        if state is State.WAITING:
            self._no_longer_waits(ticket)
        elif state is State.RUNNING:
            self.running, self.tokens = self.running - 1, self.tokens - ticket.tokens
            team.running, team.band.running = team.running - 1, team.band.running - 1
            team.served += (_cost(_or(prompt, ticket.prompt), _or(output, ticket.output)) - _cost(ticket.prompt, ticket.output)) / team.team.weight
            held_s = now - ticket.began
            if prompt != 0 or output != 0:  # who got nothing says nothing about how long a slot is held
                self._hold_s = held_s if self._hold_s is None else self._hold_s + _MEMORY * (held_s - self._hold_s)
        if state is not State.GONE:
            self._hand_on(now)

    def resize(self, slots: int, now: float) -> None:
        """How many requests may be at the engines at once, from now on. Whoever is there stays."""
        self.slots = slots
        self._hand_on(now)

    def adopt(self, policy: Policy, now: float) -> None:
        """Exchange the policy. A team that it no longer has keeps its old terms until its last request is gone."""
        if policy.capacity != self._capacity:  # else they stay as the engines' figures have made them
            self._capacity, self.slots = policy.capacity, policy.capacity.slots
        bands = {name: _Band(name, band) for name, band in policy.bands.items()}
        former, self._teams = self._teams, {}
        for name, team in policy.teams.items():
            self._teams[name] = former.pop(name, _Team(name, team, bands[team.band]))
            self._teams[name].team, self._teams[name].band = team, bands[team.band]
        for name, gone in former.items():
            if gone.in_flight:
                self._teams[name] = gone
                gone.band = bands.setdefault(gone.band.name, _Band(gone.band.name, gone.band.band))
        self._ranks = sorted({band.band.rank for band in bands.values()})
        self._passes = (True, False) if any(band.band.floor for band in bands.values()) else (False,)
        self._queues = {rank: {} for rank in self._ranks}
        for it in self._teams.values():
            it.band.running, it.band.waiting = it.band.running + it.running, it.band.waiting + len(it.queue)
            if it.queue:
                self._queues[it.band.band.rank][it.name] = it
        self._hand_on(now)

    def wait_s(self, team: str) -> float:
        """How long a further request of a team would wait, in seconds; 0 while nobody knows how long a slot is held.

        Those who go first, times how long a slot is held, divided by the slots that they share. Too low when higher bands send more meanwhile."""
        it = self._teams[team]
        rank, own, ceiling = it.band.band.rank, len(it.queue), self._ceiling(it.band)
        turns = (own + 1) / it.team.weight
        higher = sum(len(other.queue) for above in self._ranks if above < rank for other in self._queues[above].values())
        peers = sum(min(len(other.queue), turns * other.team.weight) for other in self._queues[rank].values() if other is not it)
        free = min(self.slots - self.running, ceiling - it.band.running)
        shared = self._until(higher + peers + own + 1, min(self.slots, ceiling), free)
        most = it.team.max_running
        return shared if most is None else max(shared, self._until(own + 1, most, most - it.running))

    @property
    def slots_limit(self) -> int:
        """The slots when every engine has room."""
        return self._capacity.slots

    def standings(self) -> Iterator[Standing]:
        for team in self._teams.values():
            yield Standing(team.name, team.band.name, team.running, len(team.queue), self.wait_s(team.name))

    # ---- inside

    def _until(self, turn: float, slots: int, free: int) -> float:
        """Seconds until so many have found one of the slots, the free ones at once."""
        return max(0.0, turn - max(0, free)) * (self._hold_s or 0.0) / max(1, slots)

    def _refusal(self, reason: str, wait_s: float) -> Refusal:
        return Refusal(reason, min(LATEST_S, max(SOONEST_S, wait_s)))

    def _ceiling(self, band: _Band) -> int:
        """How many of the present slots a band may hold: at least one, and never less than its floor."""
        return max(1, band.band.floor, math.floor(band.band.ceiling * self.slots))

    def _fits(self, tokens: int) -> bool:
        """Whether the token budget has room; a request too large for it goes alone, or it would never go."""
        return self._capacity.tokens is None or not self.running or self.tokens + tokens <= self._capacity.tokens

    def _goes_at_once(self, ticket: Ticket) -> bool:
        """Nobody is before it and there is room: then the bounds of the queue are no matter."""
        team = ticket.team
        room = self.running < self.slots and team.may_run and team.band.running < self._ceiling(team.band)
        return room and not team.queue and self._fits(ticket.tokens) and self._next() is None

    def _join(self, ticket: Ticket) -> None:
        team = ticket.team
        rank = team.band.band.rank
        if not team.queue:
            team.served = max(team.served, self._level.get(rank, 0.0))
            self._queues[rank][team.name] = team
        team.queue[ticket] = None
        team.band.waiting += 1
        self.waiting, self.waiting_tokens = self.waiting + 1, self.waiting_tokens + ticket.tokens

    def _no_longer_waits(self, ticket: Ticket) -> None:
        team = ticket.team
        del team.queue[ticket]
        team.band.waiting -= 1
        self.waiting, self.waiting_tokens = self.waiting - 1, self.waiting_tokens - ticket.tokens
        if not team.queue:
            del self._queues[team.band.band.rank][team.name]

    def _hand_on(self, now: float) -> None:
        """Slots to whoever is next, while there are any."""
        while self.running < self.slots and (team := self._next()) is not None:
            ticket = next(iter(team.queue))
            if not self._fits(ticket.tokens):
                return
            rank = team.band.band.rank
            self._level[rank] = max(self._level.get(rank, 0.0), team.served)
            self._no_longer_waits(ticket)
            ticket.state, ticket.began = State.RUNNING, now
            team.served += _cost(ticket.prompt, ticket.output) / team.team.weight
            team.running, team.band.running = team.running + 1, team.band.running + 1
            self.running, self.tokens = self.running + 1, self.tokens + ticket.tokens
            ticket.granted()

    def _next(self) -> _Team | None:
        """Whose turn it is: of the lowest rank that has anybody, the team with the least service."""
        if not self.waiting:
            return None
        for below_floor in self._passes:
            for rank in self._ranks:
                least: _Team | None = None
                for team in self._queues[rank].values():
                    room = team.band.band.floor if below_floor else self._ceiling(team.band)
                    if team.band.running < room and team.may_run and (least is None or team.served < least.served):
                        least = team
                if least is not None:
                    return least
        return None


def _cost(prompt: int, output: int) -> float:
    return PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
