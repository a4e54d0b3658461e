"""Lease of one gateway replica: what it asks the store for, and the ceilings that its admission obeys. Pure.

Rules. A ceiling is lowered before the request is sent, so that a returned slot is free when the store reads of it, and
a lost message wastes slots but never doubles them. A lease ends `MARGIN_S` before the store forgets it, counted
from before the request was sent. Only the answer to the latest request counts. A lapsed replica admits nothing and
reports what still runs. It then joins anew: for at most one ttl the others may hold what is due to it. To wait does no
harm, so until then its queue has the share that it has without a store, and no answer refuses anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from stack.gateway.lease_store import QUEUE, QUEUE_TOKENS, SLOTS, Grant, LeaseReply, LeaseRequest, LimitClaim, TeamClaim

TTL_S, MARGIN_S, PERIOD_S = 2.0, 0.5, 0.2
AT_ONCE_S = 0.05  # the least time between two requests
NO_GRANT = Grant(0, 0, 0)


class Usage(msgspec.Struct, frozen=True):
    """Use of one limit at this replica. demand: use, and what waits. limit: of all replicas. part: the share that holds
    without a store. large, rank: of the next request, as in LimitClaim."""

    use: int
    demand: int
    limit: int
    part: int
    large: int = 0
    rank: int = 0


class ReplicaUsage(msgspec.Struct, frozen=True):
    """Use at this replica. limits: by the keys of claims. teams: those with requests, and with charges that the store
    has not counted."""

    limits: dict[str, Usage]
    teams: list[TeamClaim]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Limits by the keys of claims, until a time: nothing is admitted from then on. A limit that is missing has not
    been asked for. due: slots that come to this replica as others return them. whole: the limits of all replicas."""

    limits: Mapping[str, int]
    until: float
    due: int = 0
    whole: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class LeaseHolder:
    """State of the lease between two requests."""

    name: str
    incarnation: str
    linger_s: float = 0.0
    epoch: int = 0
    until: float = -math.inf
    live: int = 0
    busy: int = 0
    policies: int = 1
    calm: bool = False
    taken: bool = False
    _lapsed: bool = True  # when the latest request was sent
    _sequence: int = 0
    _sent: float = 0.0
    _complete_at: float = -math.inf  # by this time the others have returned what is due here
    _parts: dict[str, int] = field(default_factory=dict)  # of the queue, without a store
    _run: str = ""
    _request: LeaseRequest | None = None
    _grants: dict[str, Grant] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)  # charged to teams, as the store has answered
    _charged: dict[str, int] = field(default_factory=dict)  # at the latest request
    _total: dict[str, tuple[int, int]] = field(default_factory=dict)  # of all and of ours, at the latest answer

    def request(
        self, usage: ReplicaUsage, run: str, policy: str, now: float, *, static: bool = False, bye: bool = False
    ) -> tuple[LeaseRequest, Ceilings]:
        """Return the next request, and the ceilings that hold from now on. static: the shares without a store are in
        force."""
        if run != self._run:  # totals of another run say nothing
            self._run = run
            self._total.clear()
        self._sequence += 1
        self._sent = now
        valid = now < self.until and not bye
        self._lapsed = not valid and not static
        self._parts = {key: use.part for key, use in usage.limits.items() if key in (QUEUE, QUEUE_TOKENS)}
        if not valid:
            self._complete_at = math.inf
        grants, self._grants, claims = self._grants, {}, {}
        for key, use in usage.limits.items():
            grant = grants.get(key, NO_GRANT)
            if valid:
                keep = max(use.use, min(grant.due, use.demand + grant.spare))
                lowered = grant if grant.lease <= keep else msgspec.structs.replace(grant, lease=keep)
            else:
                keep = max(use.use, use.part if static else 0)
                lowered = Grant(keep, 0, 0, keep, grant.limit)
            claims[key] = LimitClaim(use.use, keep, use.demand, use.limit, use.large, use.rank)
            self._grants[key] = lowered
        self._charged = {team.name: team.served for team in usage.teams}
        self._request = request = LeaseRequest(
            name=self.name, incarnation=self.incarnation, sequence=self._sequence, epoch=self.epoch, run=run,
            ttl_ms=round(TTL_S * 1000), linger_ms=round(self.linger_s * 1000), policy=policy,
            claims=claims, teams=usage.teams, bye=bye,
        )  # fmt: skip
        if bye:
            self.until = -math.inf
        return request, self.ceilings()

    def receive(self, reply: LeaseReply, sequence: int) -> bool:
        """Take over the answer to the request of that sequence. Return False where it changes nothing."""
        request = self._request
        if request is None or sequence != self._sequence or reply.state != "ok":
            self.taken = reply.state == "taken"
            return False
        self.taken, self.live, self.busy = False, reply.live, reply.busy
        self.policies, self.calm = reply.policies, reply.calm
        if reply.epoch != self.epoch:  # what was charged without a lease is in no total
            self.epoch = reply.epoch
            self._total.clear()
        self.counted |= self._charged
        if reply.calm and self._lapsed:  # the store believes what runs; what ends may not be replaced
            return True
        if reply.calm:  # it believes what runs, also beyond what was due before: what ends there may not be replaced
            now = self._grants
            self._grants = {
                key: msgspec.structs.replace(grant, lease=min(grant.lease, now.get(key, NO_GRANT).due))
                for key, grant in reply.grants.items()
            }
        else:
            self._grants = reply.grants
            complete = all(grant.lease >= grant.fair + grant.spare for grant in reply.grants.values())
            self._complete_at = min(self._complete_at, self._sent + (0.0 if complete else TTL_S))
        if not request.bye:
            self.until = self._sent + TTL_S - MARGIN_S
        return True

    def peers(self, reply: LeaseReply) -> dict[str, int]:
        """Return what the other replicas have charged to each team since the last answer; call once after
        `receive`.

        Only a team that was in the last request, too, counts: what others served while it had no request here is no
        debt here."""
        request, before = self._request, self._total
        if request is None:
            return {}
        named = list(zip((team.name for team in request.teams), reply.total, strict=True))
        self._total = {name: (total, self._charged[name]) for name, total in named}
        new: dict[str, int] = {}
        for name, total in named:
            if name in before:
                was, ours = before[name]
                new[name] = max(0, total - was - (self._charged[name] - ours))
        return new

    def ceilings(self) -> Ceilings:
        """Return the ceilings of the present lease: no more than what is due, so that requests beyond it are not
        replaced when they end."""
        slots = self._grants.get(SLOTS, NO_GRANT)
        limits = {key: grant.due for key, grant in self._grants.items()}
        if self._sent < self._complete_at:
            limits |= {key: max(limits[key], part) for key, part in self._parts.items()}
        whole = {key: grant.limit for key, grant in self._grants.items() if grant.limit}
        return Ceilings(limits, self.until, slots.fair + slots.spare, whole)

    @property
    def settled(self) -> bool:
        """Return whether the latest answer decides: the store was not calm, and this replica has joined."""
        return not self.calm and self._sent >= self._complete_at
