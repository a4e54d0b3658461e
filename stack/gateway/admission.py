"""Admission: choice of the next request for the engines. Pure: without sockets and clocks; every call brings the
time.

Laws. A request waits, runs or is gone. It holds a slot for each text that it keeps at an engine, but no more than its
team could have while the floors of other bands are in use; every count is a sum over the requests in such a state. No
slot stays free while somebody may take it. A full queue is divided among the teams that use it (`queue_share.py`): a
request within its team's share is admitted, and one of a team that holds more gives way. Bands go by rank, except that
a band below its floor comes first; teams of one rank take turns by the service that they have had; within a team the
oldest request goes first. Nobody is overtaken for being large: who is next waits for room, and everybody behind with
him; where only the ceiling of his band has no room, his band waits alone. A floor is for requests that fit into it: a
wider one waits for its turn by rank, and until then others of its band may have the floor.

Service is counted in tokens, as by the virtual token counter: a prompt token counts once, an output token twice, a
log-probability a quarter, divided by the team's weight; a team that comes back after a pause starts beside the others,
so nobody saves up. The expected output is charged when a request goes, and put right when its real size is known.
Source: Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588, section 4; the lift is to the virtual
time of start-time fair queuing (Goyal et al. 1996), which is the counter of whom it was the turn last. Bands, ceilings
and floors: flow control of the Gateway API inference extension, but floors instead of ageing, which turns priorities
into first come first served."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from stack.gateway.admission_state import BandState, Refusal, Standing, TeamState, Ticket, TicketState
from stack.gateway.hold_time import HoldTime
from stack.gateway.lease import Ceilings
from stack.gateway.lease_store import CEILING, FLOOR, IN_FLIGHT, QUEUE, QUEUE_TOKENS, RUNNING, SLOTS, TOKENS
from stack.gateway.policy import Capacity, Policy
from stack.gateway.queue_share import yielding
from stack.gateway.wait_estimate import Room, expected_wait_s

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # what a token costs; source: the paper's own implementation
# that cost as much as one prompt token. Measured with vLLM 0.32 on a CPU: one keeps the API server for some 17 us, and
# a prompt token an engine for 50 to 100 us.
LOGPROBS_PER_TOKEN = 4
SOONEST_S, LATEST_S = 1.0, 120.0  # of Retry-After; those of OpenAI's library obey no wait beyond 120 s


class Admission:
    """All requests of one gateway. The policy can be exchanged at any time; admitted requests stay.

    whole: the policy of all gateways, of which `policy` is this one's share; its limits bound a lease."""

    def __init__(self, policy: Policy, whole: Policy | None = None) -> None:
        self._teams: dict[str, TeamState] = {}
        self._queues: dict[int, dict[str, TeamState]] = {}  # rank -> teams of it with somebody waiting
        self._level: dict[int, float] = {}  # rank -> the counter of whom it was the turn last
        self._hold = HoldTime()  # over all teams
        self._now = 0.0  # of the latest call
        self.running = self.waiting = self.tokens = self.waiting_tokens = 0
        self._capacity = policy.capacity
        self.slots = self.fitted = policy.capacity.slots
        self._expected = self.fitted  # slots by which waits are estimated: a lease grows with what waits
        self.ceilings: Ceilings | None = None
        self.queue, self.queue_tokens = policy.capacity.queue, policy.capacity.queue_tokens
        self.whole = policy
        self.wanting: Callable[[], None] = lambda: None  # called when a lease may not be enough
        self._bands: list[BandState] = []
        self._ranks: list[int] = []
        self.heads: dict[str, Ticket | None] = {}  # limit -> the request that was next at the latest renewal
        # rank -> seconds after which a request of a better rank has gone or given up
        self._gone_s: dict[int, float] = {}
        self._passes: tuple[bool, ...] = ()  # over the ranks: for bands below their floor, then for all
        self.adopt(policy, 0.0, whole)

    # ---- from outside

    def ask(
        self,
        team: str,
        prompt: int,
        output: int,
        now: float,
        granted: Callable[[], None],
        displaced: Callable[[Refusal], None],
        slots: int = 1,
        logprobs: tuple[int, int] = (0, 0),
    ) -> Ticket | Refusal:
        """Lets a request in, at once or to wait, or says why not. slots: how many it would like to hold. logprobs: of
        each prompt token and of each output token. Raises KeyError for a team that the policy does not have."""
        it, self._now = self._teams[team], now
        if it.max_in_flight is not None and it.in_flight >= it.max_in_flight:
            return self._over_limit(it)
        ticket = Ticket(it, prompt, output, now, now + it.band.band.max_wait_s, granted, displaced, slots, logprobs)
        if slots > 1:
            ticket.held = min(slots, it.widest)
        if self._goes_at_once(ticket):
            self._join(ticket)
            self._hand_on(now)
            return ticket
        wait_s = self.wait_s(team, ticket.held)
        leaving = self._yielding(ticket)
        if leaving is None:
            if self.ceilings is not None:
                it.refused, it.refused_tokens = it.refused + 1, it.refused_tokens + ticket.tokens
                self.wanting()
            return self._refusal("queue_full", wait_s)
        if wait_s > it.band.band.max_wait_s:
            return self._refusal("est_wait", wait_s)
        for each in leaving:
            self._displace(each, self._refusal("queue_full", self.wait_s(each.team.name)))
        if it.leased is not None and it.in_flight >= it.leased:
            ticket.tentative, it.tentative = True, it.tentative + 1
        self._join(ticket)
        self._hand_on(now)
        if ticket.state is TicketState.WAITING and (ticket.tentative or len(it.queue) == 1):
            self.wanting()
        return ticket

    def leave(self, ticket: Ticket, now: float, prompt: int | None = None, output: int | None = None) -> None:
        """End a request: a waiting one leaves the queue, a running one releases its slot. A second call has no
        effect.

        prompt, output: the tokens that it really had; None where nobody knows, and the expected ones stay charged. 0
        and 0 of one that got nothing, such as one that an engine refused."""
        state, ticket.state, team, self._now = ticket.state, TicketState.GONE, ticket.team, now
        if state is TicketState.WAITING:
            self._no_longer_waits(ticket)
        elif state is TicketState.RUNNING:
            stands = 0.0 if team.team.max_running is None else self._stands_beside(team)
            held = ticket.held
            self.running, self.tokens = self.running - held, self.tokens - ticket.tokens
            team.running, team.requests = team.running - held, team.requests - 1
            team.band.running -= held
            if stands > team.served:
                team.served = stands
            hold = team.hold
            hold.began = hold.began - ticket.began if team.requests else 0.0
            if ticket.restarts == team.restarts:  # else the counter no longer has what was charged
                prompt_tokens = ticket.prompt if prompt is None else prompt
                more = (
                    _cost(prompt_tokens, ticket.output if output is None else output, ticket.logprobs) - ticket.charged
                )
                team.served += more / team.team.weight
                team.charged += more
            if prompt != 0 or output != 0:  # who got nothing says nothing about how long a slot is held
                hold.learn(now - ticket.began, self._hold, now)
        if state is not TicketState.GONE:
            self._hand_on(now)

    def resize(self, slots: int, now: float) -> None:
        """Set how many slots there are, without a lease. Running requests stay."""
        self.fitted, self._now = slots, now
        self._set_ceilings()
        self._hand_on(now)

    def lease(self, ceilings: Ceilings | None, now: float, *, answered: bool = True) -> None:
        """Obey the ceilings of a lease, or those of the policy again. Running requests stay. answered: they are the
        store's answer to what was claimed, so tentative requests are admitted or refused; not while it is calm."""
        former, self.ceilings, self._now = self.ceilings, ceilings, now
        if former is None or ceilings is None or replace(ceilings, until=former.until) != former:
            self._set_ceilings()
        if answered:
            for team in self._teams.values():
                if team.tentative:
                    self._decide_tentative(team)
        self._hand_on(now)

    def active(self, counted: Mapping[str, int]) -> list[TeamState]:
        """Return the teams with requests, or with charges that the store has not counted."""
        return [
            team
            for team in self._teams.values()
            if team.running or team.queue or team.refused or team.charged != counted.get(team.name, 0)
        ]

    def claim(self, team: TeamState) -> None:
        """Record that the next request to the store has the present demand of a team."""
        team.refused = team.refused_tokens = 0
        if team.tentative:
            for ticket in team.queue:
                ticket.claimed = True

    @property
    def bands(self) -> list[BandState]:
        """The bands of the policy, and former ones with requests."""
        return self._bands

    def next_team(self) -> TeamState | None:
        """Return the team whose turn it is: of the lowest rank that is not empty, the team with the least service.

        A wide request whose turn it is by rank is not overtaken by the floor of its own band."""
        if not self.waiting:
            return None
        for below_floor in self._passes:
            for rank in self._ranks:
                if self._queues[rank] and (least := self._least(rank, below_floor)) is not None:
                    if below_floor and least.band.wide and (turn := self._next_by_rank()) and turn.band is least.band:
                        return turn
                    return least
        return None

    def next_of(self, band: BandState) -> TeamState | None:
        """Return the team of a band whose turn it is, whether or not the ceiling has room for its request."""
        teams = (team for team in self._queues[band.band.rank].values() if team.band is band and team.may_run)
        return min(teams, key=lambda team: team.served, default=None)

    def serve_elsewhere(self, charged: Mapping[str, int]) -> None:
        """Count what other replicas have charged to teams, as if it had been served here."""
        for name, tokens in charged.items():
            if (team := self._teams.get(name)) is not None:
                team.served += tokens / team.team.weight

    def adopt(self, policy: Policy, now: float, whole: Policy | None = None) -> None:
        """Exchange the policy. A team that it no longer has keeps its old terms until its last request is gone."""
        self.whole = whole or policy
        if policy.capacity != self._capacity:  # else they stay as the engines' figures have made them
            self._capacity, self.fitted = policy.capacity, policy.capacity.slots
        terms = {name: (it.team, it.band.band) for name, it in self._teams.items()}
        levels = {(band.name, band.band): band.level for band in self._bands}
        bands = {
            name: BandState(name, band, level=levels.get((name, band), 0.0)) for name, band in policy.bands.items()
        }
        former, self._teams = self._teams, {}
        for name, team in policy.teams.items():
            self._teams[name] = former.pop(name, TeamState(name, team, bands[team.band]))
            self._teams[name].team, self._teams[name].band = team, bands[team.band]
        for name, gone in former.items():
            if gone.in_flight:
                self._teams[name] = gone
                gone.band = bands.setdefault(gone.band.name, BandState(gone.band.name, gone.band.band))
        self._ranks = sorted({band.band.rank for band in bands.values()})
        waits_s = [(band.band.rank, band.band.max_wait_s) for band in bands.values()]
        self._gone_s = {
            rank: max((wait_s for above, wait_s in waits_s if above < rank), default=0.0) for rank in self._ranks
        }
        floors = [band.floor for terms in (policy, self.whole) for band in terms.bands.values()]
        self._passes = (True, False) if any([*floors, *(band.band.floor for band in bands.values())]) else (False,)
        self._queues = {rank: {} for rank in self._ranks}

        def changed(it: TeamState) -> bool:
            return (it.team, it.band.band) != terms.get(it.name, (it.team, it.band.band))

        for it in sorted(self._teams.values(), key=changed):  # those who stay first: the others begin beside them
            if changed(it):
                self._rebase(it)
            it.band.running, it.band.waiting = it.band.running + it.running, it.band.waiting + it.waiting_slots
            it.band.wide += sum(ticket.slots > 1 for ticket in it.queue)
            if it.queue:
                self._queues[it.band.band.rank][it.name] = it
        self._bands, self._now = list(bands.values()), now
        self._set_ceilings()
        self._hand_on(now)

    def wait_s(self, team: str, slots: int = 1) -> float:
        """Return the expected wait of a further request of a team, in seconds; 0 while nobody knows how long a slot is
        held."""
        it = self._teams[team]
        gone_s, leased = self._gone_s[it.band.band.rank], self.ceilings is not None
        return expected_wait_s(
            it, slots, self._queues, self._hold, self._now, Room(self._expected, self.running, gone_s, leased)
        )

    @property
    def capacity(self) -> Capacity:
        """The capacity of the policy in force. Its slots hold when every engine has room."""
        return self._capacity

    def at_limit(self, team: str) -> bool:
        """Return whether a team has max_in_flight requests, so that another one would be refused whatever it asks
        for."""
        it = self._teams.get(team)
        return it is not None and it.max_in_flight is not None and it.in_flight >= it.max_in_flight

    def standings(self) -> Iterator[Standing]:
        for team in self._teams.values():
            yield Standing(
                team.name, team.band.name, team.requests, team.running, len(team.queue), self.wait_s(team.name)
            )

    # ---- inside

    def _yielding(self, ticket: Ticket) -> list[Ticket] | None:
        """Return the waiting requests that give way to a request: none while the queue has room, None if the request
        has to be refused."""
        places, tokens = self.queue, self.queue_tokens
        if self.ceilings is not None:  # where a lease is lowered, what waits stays
            places, tokens = max(places, self.waiting), None if tokens is None else max(tokens, self.waiting_tokens)
        if self.waiting < places and (tokens is None or self.waiting_tokens + ticket.tokens <= tokens):
            return []
        teams = {team.name: team for queue in self._queues.values() for team in queue.values()}
        return yielding(ticket, teams | {ticket.team.name: ticket.team}, places, tokens)

    def _displace(self, ticket: Ticket, refusal: Refusal) -> None:
        self._no_longer_waits(ticket)
        ticket.state = TicketState.GONE
        ticket.displaced(refusal)

    def _decide_tentative(self, team: TeamState) -> None:
        """Admit the tentative requests of a team that max_in_flight has room for, the oldest first, and refuse the
        others that the store has answered."""
        limit = team.max_in_flight if team.leased is None else team.leased
        place = team.requests
        for ticket in list(team.queue):
            if ticket.tentative and (limit is None or place < limit):
                ticket.tentative, team.tentative = False, team.tentative - 1
            elif ticket.tentative and (ticket.claimed or team.leased is None):
                self._displace(ticket, self._over_limit(team))
                continue
            place += 1

    def _over_limit(self, team: TeamState) -> Refusal:
        hold_s = team.hold.estimate(team.requests, self._hold, self._now)
        return self._refusal("team_limit", hold_s / max(1, team.in_flight))

    def _refusal(self, reason: str, wait_s: float) -> Refusal:
        return Refusal(reason, min(LATEST_S, max(SOONEST_S, wait_s)))

    def _set_ceilings(self) -> None:
        """Set the limits in force: those of the policy, or those of the lease. A band may hold one slot at least, and
        never less than its floor."""
        capacity, ceilings = self._capacity, self.ceilings
        if ceilings is None:
            self.slots = self._expected = self.fitted
            self.queue, self.queue_tokens = capacity.queue, capacity.queue_tokens
            for band in self._bands:
                band.floor = band.band.floor
                band.most = max(1, band.floor, math.floor(band.band.ceiling * self.slots))
            for team in self._teams.values():
                team.most, team.max_in_flight, team.leased = team.team.max_running, team.team.max_in_flight, None
            self._set_widest()
            return
        limits, whole = ceilings.limits, self.whole
        self.slots = min(limits.get(SLOTS, 0), whole.capacity.slots)
        self._expected = max(self.slots, ceilings.due or self.fitted)
        self.queue = min(limits.get(QUEUE, capacity.queue), whole.capacity.queue)
        self.queue_tokens = (
            None
            if capacity.queue_tokens is None or whole.capacity.queue_tokens is None
            else min(limits.get(QUEUE_TOKENS, capacity.queue_tokens), whole.capacity.queue_tokens)
        )
        for band in self._bands:
            band.most = self.slots if band.band.ceiling >= 1 else limits.get(CEILING + band.name, 0)
            band.floor = min(limits.get(FLOOR + band.name, 0), band.most)
        for name, team in self._teams.items():
            terms = whole.teams.get(name, team.team)
            team.max_in_flight, team.leased, team.most = terms.max_in_flight, None, None
            if terms.max_in_flight is not None:  # what is beyond it is tentative, and may not run
                team.leased = min(limits.get(IN_FLIGHT + name, 0), terms.max_in_flight)
            if terms.max_running is not None:
                team.most = min(limits.get(RUNNING + name, 0), terms.max_running)
        self._set_widest()

    def _set_widest(self) -> None:
        """Set how many slots one request of each team may hold: what it could have at once while the floors of other
        bands are in use. With a lease it waits until that has as many."""
        whole = None if self.ceilings is None else self.ceilings.whole
        terms = {band.name: self.whole.bands.get(band.name, band.band) for band in self._bands}
        slots = self.slots if whole is None else whole.get(SLOTS, self.whole.capacity.slots)
        floors = {band.name: band.floor if whole is None else terms[band.name].floor for band in self._bands}
        others = slots - sum(floors.values())
        for name, team in self._teams.items():
            band, most = team.band, team.most
            ceiling = band.most if whole is None else whole.get(CEILING + band.name, slots)
            if whole is not None and most is not None:
                most = whole.get(RUNNING + name, self.whole.teams.get(name, team.team).max_running or 1)
            widest = min(ceiling, others + floors[band.name])
            team.widest = max(1, widest if most is None else min(widest, most))

    def _rebase(self, it: TeamState) -> None:
        """Let a team whose terms have changed start where the teams of its rank stand, and leave what it is still owed
        or owes behind.

        Counters of two ranks cannot be compared. Within a rank, a limit or a floor may have kept a team from its turn
        or given it more than its turn: once that is gone, the team would catch up at once while others wait, or wait
        until all others have caught up."""
        it.served = self._level_of(it)
        it.restarts += 1

    def _stands_beside(self, team: TeamState) -> float:
        """Return the least counter with which a team goes on that max_running has kept from its turns; 0 for any other.

        It has saved nothing up: else it would have all slots of its rank to itself until it has caught up, once there
        are few."""
        if team.may_run or not team.queue:
            return 0.0
        others = (other.served for other in self._queues[team.band.band.rank].values() if other.may_run)
        return min(others, default=self._level_of(team))

    def _level_of(self, it: TeamState) -> float:
        """Return the counter at which a team begins that comes back or comes anew.

        Ceilings may have given another band of the rank more than this one. The team then begins beside the waiting
        teams of its own band: at the level of the rank it would wait until all of them have caught up."""
        rank, band = it.band.band.rank, it.band
        level = self._level.get(rank, 0.0)
        beside = (team.served for team in self._queues[rank].values() if team.band is band and team.may_run)
        return max(band.level, min(level, min(beside, default=level)))

    def _fits(self, tokens: int) -> bool:
        """Return whether the token budget has room; a request too large for it goes alone, or it would never go."""
        if self._capacity.tokens is None:
            return True
        if self.ceilings is not None and (leased := self.ceilings.limits.get(TOKENS)) is not None:
            return self.tokens + min(tokens, self.whole.capacity.tokens or tokens) <= leased
        return not self.running or self.tokens + tokens <= self._capacity.tokens

    def _goes_at_once(self, ticket: Ticket) -> bool:
        """Nobody is before it and there is room: then the bounds of the queue are no matter."""
        team, held = ticket.team, ticket.held
        band, most = team.band, team.most
        room = self.running + held <= self.slots and band.running + held <= band.most
        room = room and (most is None or team.running + held <= most)
        room = room and (team.leased is None or team.requests < team.leased)
        room = room and (self.ceilings is None or self._now < self.ceilings.until)
        return room and not team.queue and self._fits(ticket.tokens) and self.next_team() is None

    def _join(self, ticket: Ticket) -> None:
        team = ticket.team
        rank = team.band.band.rank
        if not team.queue:
            team.served = max(team.served, self._level_of(team))
            self._queues[rank][team.name] = team
        team.queue[ticket] = None
        team.band.waiting += ticket.held
        team.waiting_slots += ticket.held
        if ticket.slots > 1:
            team.band.wide += 1
        team.waiting_tokens += ticket.tokens
        self.waiting, self.waiting_tokens = self.waiting + 1, self.waiting_tokens + ticket.tokens

    def _no_longer_waits(self, ticket: Ticket) -> None:
        team = ticket.team
        del team.queue[ticket]
        if ticket.tentative:
            ticket.tentative, team.tentative = False, team.tentative - 1
        team.band.waiting -= ticket.held
        team.waiting_slots -= ticket.held
        if ticket.slots > 1:
            team.band.wide -= 1
        team.waiting_tokens -= ticket.tokens
        self.waiting, self.waiting_tokens = self.waiting - 1, self.waiting_tokens - ticket.tokens
        if not team.queue:
            del self._queues[team.band.band.rank][team.name]

    def _hand_on(self, now: float) -> None:
        """Give slots to the next requests, while there are any."""
        if self.ceilings is not None and now >= self.ceilings.until:
            return
        while self.running < self.slots and (team := self.next_team()) is not None:
            ticket, band = next(iter(team.queue)), team.band
            held = team.need if band.wide else 1
            if self.running + held > self.slots or not self._fits(ticket.tokens):
                return
            self._raise_level(team)
            self._no_longer_waits(ticket)
            ticket.state, ticket.began, ticket.restarts = TicketState.RUNNING, now, team.restarts
            ticket.held, ticket.charged = held, _cost(ticket.prompt, ticket.output, ticket.logprobs)
            team.served += ticket.charged / team.team.weight
            team.charged += ticket.charged
            team.running, band.running, team.requests = team.running + held, band.running + held, team.requests + 1
            team.hold.began += now
            self.running, self.tokens = self.running + held, self.tokens + ticket.tokens
            ticket.granted()

    def _next_by_rank(self) -> TeamState | None:
        return next((team for rank in self._ranks if (team := self._least(rank, below_floor=False))), None)

    def _least(self, rank: int, below_floor: bool, passed: tuple[str, ...] = ()) -> TeamState | None:
        """Return the team of a rank with the least service, of those that may run a request.

        passed: bands whose next request is too wide for the rest of their ceiling."""
        least: TeamState | None = None
        for team in self._queues[rank].values():
            band, most = team.band, team.most
            has_room = band.running < (band.floor if below_floor else band.most) and (
                most is None or team.running < most
            )
            has_room = has_room and (least is None or team.served < least.served)
            if has_room and ((team.leased is None and not band.wide) or team.may_go(below_floor, passed)):
                least = team
        if least is None or not (band := least.band).wide or band.band.ceiling >= 1:
            return least
        if band.running + least.need <= band.most:
            return least
        return self._least(rank, below_floor, (*passed, band.name))

    def _raise_level(self, team: TeamState) -> None:
        """Raise the levels of a band and its rank to the counter of the team whose turn it is.

        A floor may have given a team more than its turns; the level then follows the team with the least, whose turn it
        would be."""
        band = team.band
        rank = band.band.rank
        if team.served > band.level:
            band.level = team.served
        if band.running < band.floor:
            team = self._least(rank, below_floor=False) or team
        if team.served > self._level.get(rank, 0.0):
            self._level[rank] = team.served


def _cost(prompt: int, output: int, logprobs: tuple[int, int]) -> int:
    cost = PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output
    of_prompt, of_output = logprobs
    return cost + (prompt * of_prompt + output * of_output) // LOGPROBS_PER_TOKEN if of_prompt or of_output else cost
