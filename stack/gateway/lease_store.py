"""Transition of the store that leases slots, tokens and limits of teams to gateway replicas. Pure.

`lease.lua` runs the same transition within Valkey or Redis; tests compare both, step by step, on random histories. All
times are milliseconds of the store's clock. Every value of a message is an integer, and every sum runs in the order of
the replicas' names, so that both languages compute the same floating-point numbers.

Invariant: no grant makes the leases of all replicas exceed a limit. A lease that has expired counts for a further
`linger_ms`; a replica that comes back after its expiry holds no more than the requests that still run.

Rules. A name in use by another incarnation is refused, and a request that is not newer than the last one changes
nothing. After a restart of the store, a step of its clock or a pause it is calm for one ttl: all leases are extended,
nothing is granted, and the ceilings that replicas report are believed. Where capacity falls below what is leased, the
reply is the lease less the excess, so that requests that end are not replaced."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import msgspec

PAUSE_MS = 500  # without any call: the store or every replica has stood still
SPARE_FROM = 4  # of a team's limit for each replica; below it, headroom would sit where nobody asks


class LimitClaim(msgspec.Struct, frozen=True, array_like=True):
    """LimitClaim of one replica on a limit. use: held by running requests. keep: its present ceiling. demand: use, and
    what waits. limit: as this replica sees it. large: what the next request needs beyond use, where that does not fit
    its ceiling."""

    use: int
    keep: int
    demand: int
    limit: int
    large: int = 0


class TeamClaim(msgspec.Struct, frozen=True, array_like=True):
    """LimitClaim of one team. running: on max_running; its limit is -1 where the team has none. served: tokens charged
    since the epoch began, in the units of admission."""

    name: str
    rank: int
    weight: float
    served: int
    running: LimitClaim


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Message of one replica. incarnation: random at start. epoch: 0 before the first lease. run: run id of the
    server. tokens: null without a token budget. bye: the replica drains."""

    name: str
    incarnation: str
    sequence: int
    epoch: int
    run: str
    ttl_ms: int
    linger_ms: int
    policy: str
    slots: LimitClaim
    tokens: LimitClaim | None
    teams: list[TeamClaim]
    bye: bool = False


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Lease of one limit. fair: the part of this replica. spare: headroom beyond demand."""

    lease: int
    fair: int
    spare: int


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the store. live: replicas with a lease. busy: slots in use at the others. total: tokens charged to
    each team at all replicas. policies: different policies of live replicas."""

    state: Literal["ok", "late", "taken"]
    epoch: int = 0
    calm: bool = False
    live: int = 0
    busy: int = 0
    policies: int = 0
    slots: Grant = Grant(0, 0, 0)
    tokens: Grant = Grant(0, 0, 0)
    teams: list[Grant] = []
    total: list[int] = []


@dataclass(slots=True, order=True)
class Held:
    """Lease of one limit as the store counts it: the ceiling, and the claim that it rests on."""

    lease: int
    demand: int
    limit: int
    large: int = 0
    since: int = 0  # when `large` first did not fit


@dataclass(slots=True)
class TeamLease:
    """Lease of one team: its place among the teams, tokens charged, and the lease of max_running."""

    rank: int
    weight: float
    served: int
    running: Held


@dataclass(slots=True)
class ReplicaLease:
    """Record of one replica."""

    incarnation: str
    sequence: int
    epoch: int
    expiry: int
    linger: int
    policy: str
    use: int
    slots: Held
    tokens: Held | None
    teams: dict[str, TeamLease]


@dataclass(slots=True)
class LeaseTable:
    """Content of the store. last: time of the last call; -1 before the first."""

    run: str = ""
    last: int = -1
    calm: int = 0
    epoch: int = 0
    replicas: dict[str, ReplicaLease] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)


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
    if table.run != rq.run or table.last < 0 or now < table.last or now - table.last > PAUSE_MS:
        table.run, table.calm = rq.run, now + rq.ttl_ms
        table.epoch = max(table.epoch, now)
        for each in table.replicas.values():
            each.expiry = now + rq.ttl_ms
    table.last = now


class _Call:
    """One request that counts. names: of all replicas; live: of those with a lease, and this one."""

    def __init__(self, table: LeaseTable, rq: LeaseRequest, mine: ReplicaLease | None, now: int) -> None:
        self.table, self.rq, self.mine, self.now = table, rq, mine, now
        self.others = [(name, table.replicas[name]) for name in sorted(table.replicas) if name != rq.name]
        self.live = sorted([rq.name, *(name for name, each in self.others if now <= each.expiry)])
        self.held = mine is not None and mine.epoch == rq.epoch and now <= mine.expiry
        self.calm = now < table.calm
        self.turn = now // rq.ttl_ms
        if not self.held:
            table.epoch += 1

    def answer(self) -> LeaseReply:
        """Write the record of this replica and return its grants."""
        rq, table, mine = self.rq, self.table, self.mine
        before = [(name, each.slots) for name, each in self.others]
        slots, slots_grant = self.settle(rq.slots, mine.slots if mine else None, before, self.slot_parts())
        tokens, tokens_grant = None, Grant(0, 0, 0)
        if rq.tokens is not None:
            before = [(name, each.tokens) for name, each in self.others if each.tokens is not None]
            tokens, tokens_grant = self.settle(rq.tokens, mine.tokens if mine else None, before, None)
        grants = [self.settle_team(team) for team in rq.teams]
        policies = {rq.policy, *(each.policy for _, each in self.others if self.now <= each.expiry)}
        record = ReplicaLease(
            rq.incarnation, rq.sequence, mine.epoch if mine and self.held else table.epoch, self.now + rq.ttl_ms,
            rq.linger_ms, rq.policy, rq.slots.use, slots, tokens,
            {team.name: TeamLease(team.rank, team.weight, team.served if self.held else 0, held)
             for team, (held, _) in zip(rq.teams, grants, strict=True)},
        )  # fmt: skip
        table.replicas[rq.name] = record
        if rq.bye and not rq.slots.use:
            del table.replicas[rq.name]
        return LeaseReply(
            state="ok", epoch=record.epoch, calm=self.calm, live=len(self.live),
            busy=sum(each.use for _, each in self.others), policies=len(policies),
            slots=slots_grant, tokens=tokens_grant, teams=[grant for _, grant in grants],
            total=[table.total[team.name] for team in rq.teams],
        )  # fmt: skip

    def settle_team(self, team: TeamClaim) -> tuple[Held, Grant]:
        """Count what was charged to a team, and return its lease where it has a limit."""
        before = self.mine.teams.get(team.name) if self.mine else None
        charged = team.served - before.served if before and self.held else 0
        self.table.total[team.name] = self.table.total.get(team.name, 0) + charged
        if team.running.limit < 0:
            return Held(0, team.running.demand, -1), Grant(-1, 0, 0)
        others = [(name, each.teams[team.name].running) for name, each in self.others if team.name in each.teams]
        return self.settle(
            team.running, before.running if before else None, others, None, spare_from=SPARE_FROM * len(self.live)
        )

    def settle(
        self,
        claim: LimitClaim,
        before: Held | None,
        others: list[tuple[str, Held]],
        parts: dict[str, float] | None,
        spare_from: int = 0,
    ) -> tuple[Held, Grant]:
        """Return the new lease of one limit, and the grant. parts: due to the live replicas; None for those by demand.

        spare_from: headroom is granted from this limit on."""
        rq, name = self.rq, self.rq.name
        since = (before.since if before and before.large else self.now) if claim.large else 0
        mine = Held(self.base(claim, before), claim.demand, claim.limit, claim.use + claim.large if since else 0, since)
        everyone = sorted([(name, mine), *((other, held) for other, held in others if held.limit >= 0)])
        live = [(other, held) for other, held in everyone if other in self.live]
        limit = min(held.limit for _, held in live)
        free = limit - sum(held.lease for _, held in everyone)
        demand = sum(held.demand for _, held in live)
        large = min(((held.since, other, held.large) for other, held in live if held.large), default=None)
        if parts is None:
            parts = demanded_parts(live, limit, demand, large)
        fair = portion(parts, name, self.turn)
        spare = max(0, limit - demand) // len(self.live) if limit >= spare_from else 0
        grant = 0 if self.calm or rq.bye else max(0, min(free, fair + spare - mine.lease))
        lease = max(0, mine.lease + grant + min(0, free))
        mine.lease += grant
        return mine, Grant(lease, fair, spare)

    def base(self, claim: LimitClaim, before: Held | None) -> int:
        """Return what this replica holds of a limit before any grant."""
        if self.held:
            return max(claim.use, min(claim.keep, before.lease)) if before else claim.use
        return max(claim.use, claim.keep) if self.calm else claim.use

    def slot_parts(self) -> dict[str, float]:
        """Return the slots due to each live replica: by rank, then by weighted max-min over the demand of teams, and of
        each team the part of its demand that is at this replica."""
        rows: list[tuple[str, str, int, float, int]] = []
        left = float(self.rq.slots.limit)
        for name in self.live:
            if name == self.rq.name:
                rows += [(name, team.name, team.rank, team.weight, team.running.demand) for team in self.rq.teams]
            else:
                record = self.table.replicas[name]
                left = min(left, float(record.slots.limit))
                rows += [
                    (name, team, each.rank, each.weight, each.running.demand)
                    for team, each in sorted(record.teams.items())
                ]
        wanted: dict[str, list[float]] = {}  # team -> rank, weight, demand of all
        for _, team, place, weight, demand in rows:
            if demand > 0:
                wanted.setdefault(team, [place, weight, 0])[2] += demand
        peers: dict[float, float] = {}
        order = sorted(wanted, key=lambda team: (wanted[team][0], wanted[team][2] / wanted[team][1], team))
        for team in order:
            peers[wanted[team][0]] = peers.get(wanted[team][0], 0.0) + wanted[team][1]
        due: dict[str, float] = {}
        for team in order:
            rank, weight, wish = wanted[team]
            due[team] = min(wish, left * weight / peers[rank])
            left, peers[rank] = left - due[team], peers[rank] - weight
        parts = dict.fromkeys(self.live, 0.0)
        for name, team, _, _, demand in rows:
            if demand > 0:
                parts[name] += due[team] * demand / wanted[team][2]
        return parts


def demanded_parts(
    live: list[tuple[str, Held]], limit: int, demand: int, large: tuple[int, str, int] | None
) -> dict[str, float]:
    """Return the parts of a limit by demand. large: since when which replica needs so much for its next request; it
    gets that first."""
    reserved = min(limit, large[2]) if large else 0
    owner = large[1] if large else ""
    rest = limit - reserved
    wanted = demand - sum(held.demand for name, held in live if name == owner)
    return {
        name: float(reserved)
        if name == owner
        else float(held.demand)
        if wanted <= rest
        else rest * held.demand / wanted
        for name, held in live
    }


def portion(parts: dict[str, float], own: str, turn: int) -> int:
    """Return the whole number due to one replica. What rounding leaves goes to those with a fraction, in turns: where
    a limit is smaller than the number of replicas, each gets its turn."""
    whole = {name: math.floor(part + 1e-9) for name, part in parts.items()}
    exact = 0.0
    for part in parts.values():  # not sum(), which newer releases of Python compensate
        exact += part
    left = math.floor(exact + 1e-9) - sum(whole.values())
    with_rest = [name for name in parts if parts[name] - whole[name] > 1e-9]
    if own not in with_rest:
        return whole[own]
    place = (with_rest.index(own) + turn) % len(with_rest)
    return whole[own] + (1 if place < left else 0)
