"""Transition of the store that leases limits to gateway replicas. Pure.

`lease.lua` runs the same transition within Valkey or Redis; tests compare both, step by step, on random histories. All
times are milliseconds of the store's clock. Every value of a message is an integer, and every sum runs in the order of
the replicas' names, so that both languages compute the same floating-point numbers.

Invariant: no grant makes the leases of all replicas exceed a limit. A lease that has expired counts for a further
`linger_ms`; a replica that comes back after its expiry holds no more than what it still uses.

Rules. A name in use by another incarnation is refused, and a request that is not newer than the last one changes
nothing. After a restart of the store, a step of its clock or a pause it is calm for one ttl, unless every replica has
returned its lease: all leases are extended, nothing is granted, and the ceilings that replicas report are believed.
Where more is leased than the limit, as after a reload or when a replica comes back with what it still uses, the reply
is the lease less the excess, so that requests that end are not replaced. Requests in flight also wait, and would never
end so: of max_in_flight, those that joined first keep their lease, and the others get what that leaves.

Every limit is a claim with a key: slots and the token budget, length and tokens of the queue, max_running and
max_in_flight of a team, ceiling and floor of a band. What is due to a replica is the part of its demand; slots and the
queue are divided by teams first, as admission does it within one gateway. A request that needs several units gets them
at one replica: the best rank first, then the one that has waited longest. All limits go by that order, so no two
replicas wait for each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

PAUSE_MS = 500  # without any call: the store or every replica has stood still
SPARE_FROM = 4  # of a team's limit for each replica; below it, headroom would sit where nobody asks
RESERVE = 4  # a live replica always has one such part of its equal share of the queue
SLOTS, TOKENS, QUEUE, QUEUE_TOKENS = "s", "t", "q", "k"
# with the name of a team or band
RUNNING, IN_FLIGHT, CEILING, FLOOR = "r:", "f:", "c:", "o:"


class LimitClaim(msgspec.Struct, frozen=True, array_like=True):
    """Claim of one replica on a limit. use: held by requests. keep: its present ceiling. demand: use, and what waits.
    limit: as this replica sees it. large: what the next request needs beyond use, where it waits for several units or
    does not fit the ceiling; rank: of its band. A request that has just become the next has none, so that it does not
    take over the turn of the one before."""

    use: int
    keep: int
    demand: int
    limit: int
    large: int = 0
    rank: int = 0


class TeamClaim(msgspec.Struct, frozen=True, array_like=True):
    """Demand of one team. served: tokens charged since the gateway started, in the units of admission; counted: as many
    of them has the store answered. demand: slots that its requests hold and wait for. queued, queued_tokens: what it
    has and wants in the queue."""

    name: str
    rank: int
    band: str
    weight: float
    served: int
    counted: int
    demand: int
    queued: int
    queued_tokens: int


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Message of one replica. incarnation: random at start. epoch: 0 before the first lease. run: run id of the
    server. claims: by key. teams: those with requests. bye: the replica drains."""

    name: str
    incarnation: str
    sequence: int
    epoch: int
    run: str
    ttl_ms: int
    linger_ms: int
    policy: str
    claims: dict[str, LimitClaim]
    teams: list[TeamClaim]
    bye: bool = False


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Lease of one limit. fair: the part of this replica. spare: headroom beyond demand. rest: 1 where rounding leaves
    one more, which the replica may keep and not ask for: slots that change hands are idle for two periods. limit: of
    all replicas, the lowest that one has read."""

    lease: int
    fair: int
    spare: int
    rest: int = 0
    limit: int = 0

    @property
    def due(self) -> int:
        """Return what of the lease may be used: what the replica holds beyond it is not replaced when it ends."""
        return min(self.lease, self.fair + self.spare + self.rest)


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the store. live: replicas with a lease. busy: slots in use at the others. grants: by key, as claimed.
    total: tokens charged to each team at all replicas. policies: different policies of live replicas."""

    state: Literal["ok", "late", "taken"]
    epoch: int = 0
    calm: bool = False
    live: int = 0
    busy: int = 0
    policies: int = 0
    grants: dict[str, Grant] = {}
    total: list[int] = []


@dataclass(slots=True)
class Held:
    """Lease of one limit as the store counts it: the ceiling, and the claim that it rests on."""

    lease: int
    demand: int
    limit: int
    large: int = 0
    since: int = 0  # when `large` first did not fit
    rank: int = 0


@dataclass(slots=True)
class ReplicaLease:
    """Record of one replica. use: slots in use."""

    incarnation: str
    sequence: int
    epoch: int
    expiry: int
    linger: int
    policy: str
    use: int
    claims: dict[str, Held]
    teams: list[TeamClaim]


@dataclass(slots=True)
class LeaseTable:
    """Content of the store. last: time of the last call; -1 before the first."""

    run: str = ""
    last: int = -1
    calm: int = 0
    epoch: int = 0
    replicas: dict[str, ReplicaLease] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class TeamDemand:
    """Demand of one team at all replicas. demand: as far as the team's own limit allows it. group: with the others of
    its group it has a floor and a ceiling."""

    rank: int
    weight: float
    group: str
    total: int
    demand: float


def transition(table: LeaseTable, rq: LeaseRequest, now: int) -> LeaseReply:
    """Apply one request and return the answer to it."""
    _calm_down(table, rq, now)
    mine = table.replicas.get(rq.name)
    if mine is not None and mine.incarnation != rq.incarnation:
        if now <= mine.expiry:
            return LeaseReply(state="taken")
        mine = None
    if mine is not None and rq.sequence <= mine.sequence:
        return LeaseReply(state="late")
    for name, each in list(table.replicas.items()):
        if name != rq.name and now > each.expiry + each.linger:
            del table.replicas[name]
    return _Call(table, rq, mine, now).answer()


def _calm_down(table: LeaseTable, rq: LeaseRequest, now: int) -> None:
    """Begin a calm time after a restart, a step of the clock or a pause."""
    stood_still = table.replicas and (now < table.last or now - table.last > PAUSE_MS)
    if table.run != rq.run or table.last < 0 or stood_still:
        table.run, table.calm = rq.run, now + rq.ttl_ms
        table.epoch = max(table.epoch, now)
        for each in table.replicas.values():
            each.expiry = now + rq.ttl_ms
    table.last = now


class _Call:
    """One request that counts. names: of all replicas, this one among them; live: of those with a lease, and this
    one."""

    def __init__(self, table: LeaseTable, rq: LeaseRequest, mine: ReplicaLease | None, now: int) -> None:
        self.table, self.rq, self.mine, self.now = table, rq, mine, now
        self.names = sorted({*table.replicas, rq.name})
        others = {name: table.replicas[name] for name in self.names if name != rq.name}
        self.claims = {name: each.claims for name, each in others.items()}
        self.teams = {name: each.teams for name, each in others.items()} | {rq.name: rq.teams}
        self.others = list(others.values())
        self.live = [name for name in self.names if name == rq.name or now <= others[name].expiry]
        self.held = mine is not None and mine.epoch == rq.epoch and now <= mine.expiry
        self.calm = now < table.calm
        self.turn = now // rq.ttl_ms
        if not self.held:
            table.epoch += 1

    def answer(self) -> LeaseReply:
        """Write the record of this replica and return its grants."""
        rq, table = self.rq, self.table
        self.claims[rq.name] = {key: self.based(key, claim) for key, claim in rq.claims.items()}
        grants = {key: self.settle(key) for key in rq.claims}
        self.count_served()
        policies = {rq.policy, *(each.policy for each in self.others if self.now <= each.expiry)}
        record = ReplicaLease(
            rq.incarnation, rq.sequence, self.joined(rq.name), self.now + rq.ttl_ms, rq.linger_ms,
            rq.policy, rq.claims[SLOTS].use, self.claims[rq.name], rq.teams,
        )  # fmt: skip
        table.replicas[rq.name] = record
        if rq.bye and not record.use:
            del table.replicas[rq.name]
        return LeaseReply(
            state="ok", epoch=record.epoch, calm=self.calm, live=len(self.live),
            busy=sum(each.use for each in self.others), policies=len(policies), grants=grants,
            total=[table.total.get(team.name, 0) for team in rq.teams],
        )  # fmt: skip

    def count_served(self) -> None:
        """Add what was charged to each team since the last request that had it. After a lapse nothing is added."""
        if self.mine is None or not self.held:
            return
        before = {team.name: team.served for team in self.mine.teams}
        for team in self.rq.teams:
            if charged := team.served - before.get(team.name, team.counted):
                self.table.total[team.name] = self.table.total.get(team.name, 0) + charged

    def based(self, key: str, claim: LimitClaim) -> Held:
        """Return what this replica holds of a limit before any grant."""
        before = self.mine.claims.get(key) if self.mine else None
        if self.held:
            base = max(claim.use, min(claim.keep, before.lease)) if before else claim.use
        else:
            base = max(claim.use, claim.keep) if self.calm else claim.use
        since = (before.since if before and before.large else self.now) if claim.large else 0
        large = claim.use + claim.large if since else 0
        return Held(base, claim.demand, claim.limit, large, since, claim.rank)

    def settle(self, key: str) -> Grant:
        """Lease one limit to this replica."""
        mine = self.claims[self.rq.name][key]
        everyone = [(name, held) for name in self.names if (held := self.claims[name].get(key)) is not None]
        live = [(name, held) for name, held in everyone if name in self.live]
        limit = min(held.limit for _, held in live)
        free = limit - sum(held.lease for _, held in everyone)
        reserve = limit // (RESERVE * len(self.live)) if key in (QUEUE, QUEUE_TOKENS) else 0
        divided = limit - reserve * len(self.live)
        parts = self.parts_by_team(key, divided) if key in (SLOTS, QUEUE, QUEUE_TOKENS) else demanded_parts(live, limit)
        fair, rest, due = portion(parts, self.rq.name, self.turn)
        if any(lacks(held, parts, name, limit, self.turn) for name, held in live):
            rest = 0  # another replica may have joined, or needs the last unit, after the rest was leased
        frugal = key[:2] in (RUNNING, IN_FLIGHT) and limit < SPARE_FROM * len(self.live)
        spare = 0 if frugal else max(reserve, self.headroom(limit - due))
        grant = 0 if self.calm or self.rq.bye else max(0, min(free, fair + spare - mine.lease))
        if free < 0 and key.startswith(IN_FLIGHT):
            before = sum(held.lease for name, held in everyone if self.joined(name) < self.joined(self.rq.name))
            lease = max(0, min(mine.lease, limit - before))
        else:
            lease = max(0, mine.lease + grant + min(0, free))
        mine.lease += grant
        return Grant(lease, fair, spare, rest, limit)

    def joined(self, name: str) -> int:
        """Return the epoch of a replica, which is later the later it joined."""
        if name == self.rq.name:
            return self.mine.epoch if self.mine and self.held else self.table.epoch
        return self.table.replicas[name].epoch

    def headroom(self, left: float) -> int:
        """Return the part of this replica in what nobody demands. The rest goes round in turns, so that a limit below
        the number of replicas is not closed to a request that comes first."""
        count = len(self.live)
        whole = math.floor(max(0.0, left) + 1e-9)
        return whole // count + ((self.live.index(self.rq.name) + self.turn) % count < whole % count)

    def parts_by_team(self, key: str, limit: int) -> Mapping[str, float]:
        """Return the parts of slots or the queue due to the live replicas: of each team's due the part of its demand
        that is at this replica."""
        rows = [(name, team, _demand_of(key, team)) for name in self.live for team in self.teams[name]]
        wanted: dict[str, TeamDemand] = {}
        for _, team, demand in rows:
            if demand > 0:
                group = team.band if key == SLOTS else team.name
                wanted.setdefault(team.name, TeamDemand(team.rank, team.weight, group, 0, 0)).total += demand
        for name, each in wanted.items():
            each.demand = min(each.total, self.least(RUNNING + name, each.total) if key == SLOTS else each.total)
        due = due_by_team(float(limit), wanted, self.bounds(key, limit, wanted))
        held = [(name, self.claims[name][SLOTS]) for name in self.live] if key == SLOTS else []
        rank, _, owner, large = first_large(held)
        parts, better = dict.fromkeys(self.live, 0.0), dict.fromkeys(self.live, 0.0)
        for name, team, demand in rows:
            if demand > 0:
                part = due[team.name] * demand / wanted[team.name].total
                parts[name] += part
                if team.rank < rank:
                    better[name] += part
        return reserve(parts, better, owner, min(limit, large), limit) if large else parts

    def bounds(self, key: str, limit: int, wanted: Mapping[str, TeamDemand]) -> dict[str, tuple[float, float]]:
        """Return floor and ceiling of each group of teams: those of its band, and one place of the queue."""
        groups = {each.group for each in wanted.values()}
        if key == SLOTS:
            return {name: (self.least(FLOOR + name, 0), self.least(CEILING + name, limit)) for name in groups}
        unit = 1.0 if key == QUEUE else limit / max(1, self.rq.claims[QUEUE].limit)
        return dict.fromkeys(groups, (unit, float(limit)))

    def least(self, key: str, otherwise: int) -> int:
        """Return a limit as the live replica with the lowest one sees it."""
        return min((held.limit for name in self.live if (held := self.claims[name].get(key))), default=otherwise)


def _demand_of(key: str, team: TeamClaim) -> int:
    return team.demand if key == SLOTS else team.queued if key == QUEUE else team.queued_tokens


def due_by_team(
    left: float, wanted: Mapping[str, TeamDemand], bounds: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Return what is due to each team: the floors of all groups, then by rank, no group beyond its ceiling.

    bounds: floor and ceiling of a group."""
    due = dict.fromkeys(wanted, 0.0)
    groups: dict[tuple[int, str], list[str]] = {}
    for name, each in wanted.items():
        groups.setdefault((each.rank, each.group), []).append(name)
    given = {}
    for place in sorted(groups):
        before = left
        left = max_min(min(left, bounds[place[1]][0]), left, groups[place], wanted, due)
        given[place] = before - left
    for rank in sorted({rank for rank, _ in groups}):
        capped = dict(due)
        for place in sorted(groups):
            if place[0] == rank:
                max_min(bounds[place[1]][1] - given[place], 0.0, groups[place], wanted, capped)
        teams = [name for place in sorted(groups) if place[0] == rank for name in groups[place]]
        left = max_min(left, left, teams, wanted, due, capped)
    return due


def max_min(
    divided: float,
    left: float,
    teams: Sequence[str],
    wanted: Mapping[str, TeamDemand],
    due: dict[str, float],
    most: Mapping[str, float] | None = None,
) -> float:
    """Add to what is due to teams by weighted max-min, and return what is left.

    most: up to which a team gets something, null for its demand."""

    def lacking(team: str) -> float:
        return (wanted[team].demand if most is None else most[team]) - due[team]

    order = sorted(teams, key=lambda team: (lacking(team) / wanted[team].weight, team))
    weights = 0.0
    for team in order:
        weights += wanted[team].weight
    for team in order:
        more = max(0.0, min(lacking(team), divided * wanted[team].weight / weights))
        due[team] += more
        divided, left, weights = divided - more, left - more, weights - wanted[team].weight
    return left


def first_large(live: Sequence[tuple[str, Held]]) -> tuple[int, int, str, int]:
    """Return rank, time, replica and size of the large request whose turn it is: of the best rank, the one that has
    waited longest. Without one the size is 0."""
    return min(((held.rank, held.since, name, held.large) for name, held in live if held.large), default=(0, 0, "", 0))


def reserve(
    parts: Mapping[str, float], better: Mapping[str, float], owner: str, large: int, limit: int
) -> Mapping[str, float]:
    """Return the parts of slots with a large request first, if what is due to better ranks elsewhere leaves it room.

    better: of each part, what is due to better ranks."""
    others, rest = 0.0, 0.0
    for name, part in parts.items():
        if name != owner:
            others, rest = others + better[name], rest + part - better[name]
    left = limit - others - large
    if left < 0 or parts[owner] >= large:
        return parts
    kept = 1.0 if rest <= left else left / rest
    return {
        name: float(large) if name == owner else better[name] + (part - better[name]) * kept
        for name, part in parts.items()
    }


def demanded_parts(live: Sequence[tuple[str, Held]], limit: int) -> dict[str, float]:
    """Return the parts of a limit by demand. The replica whose turn it is with a large request gets that first."""
    _, _, owner, large = first_large(live)
    reserved = min(limit, large)
    rest = limit - reserved
    wanted = sum(held.demand for name, held in live if name != owner)
    return {
        name: float(reserved)
        if name == owner
        else float(held.demand)
        if wanted <= rest
        else rest * held.demand / wanted
        for name, held in live
    }


def lacks(held: Held, parts: Mapping[str, float], name: str, limit: int, turn: int) -> bool:
    """Return whether a replica has nothing where it should have one, also by its turn, or less than its large request
    needs."""
    if held.lease < 1 <= held.demand and name in parts and portion(parts, name, turn)[0] >= 1:
        return True
    return held.lease < min(held.large, limit) <= parts.get(name, 0.0) + 1e-9


def portion(parts: Mapping[str, float], own: str, turn: int) -> tuple[int, int, float]:
    """Return the whole number due to one replica, the rest that it may keep, and the sum of all parts. What rounding
    leaves goes to those with a fraction, in turns: where a limit is smaller than the number of replicas, each gets its
    turn, and nobody keeps a rest."""
    whole = {name: math.floor(part + 1e-9) for name, part in parts.items()}
    exact = 0.0
    for part in parts.values():  # not sum(), which newer releases of Python compensate
        exact += part
    left = math.floor(exact + 1e-9) - sum(whole.values())
    with_rest = [name for name in parts if parts[name] - whole[name] > 1e-9]
    if own not in with_rest:
        return whole[own], 0, exact
    place = (with_rest.index(own) + turn) % len(with_rest)
    if place < left:
        return whole[own] + 1, 0, exact
    return whole[own], min(1, whole[own]), exact
