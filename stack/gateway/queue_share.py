"""Division of a full queue among the teams that use it.

Each team that has requests waiting, or that asks now, owns one unit (one place, or the tokens of an average place). The
remainder goes to the best rank first, and within a rank by weight; what a team does not use, others may borrow until
somebody asks for it within a share of its own.

Invariants. A request within its team's share is admitted, as long as no fewer units exist than teams. Units are taken
from a team only by a better rank, and only while fewer units exist than teams. A team whose request has just given way
cannot take a place from anybody, so two clients that retry at once do not displace each other in turns. Source: max-min
fairness, with the ranks of teams.yaml as strict priorities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

from stack.gateway.admission_state import TeamState, Ticket


@dataclass(slots=True)
class Claim:
    """Use of the queue by one team. held: what its waiting requests take. share: what it may always have; see
    `Bound`."""

    rank: int
    weight: float
    held: float
    share: float = 0.0


class Bound:
    """One bound of the queue, and one request of `size` that asks for room within it. claims: of all teams that wait,
    and of the asking team."""

    def __init__(self, limit: float, unit: float, size: float, asker: str, claims: Mapping[str, Claim]) -> None:
        self._unit, self._claims, self._asker = unit, claims, asker
        self._lacking = sum(claim.held for claim in claims.values()) + size - limit
        self._after = claims[asker].held + size
        self._divide(limit)

    def _divide(self, limit: float) -> None:
        rest = max(0.0, limit - self._unit * len(self._claims))
        for _, group in groupby(
            sorted(self._claims.values(), key=lambda claim: claim.rank), key=lambda claim: claim.rank
        ):
            peers = list(group)
            weight = sum(claim.weight for claim in peers)
            for claim in peers:
                claim.share = self._unit + rest * claim.weight / weight
            rest = max(0.0, rest - sum(max(0.0, claim.held - self._unit) for claim in peers))

    @property
    def is_exceeded(self) -> bool:
        """True while requests still have to give way before this one fits."""
        return self._lacking > 0

    def next_to_yield(self) -> str | None:
        """Return the team whose newest request gives way next, or None if the request has to be refused.

        It is the team with the most, for its weight, in the worst rank that has borrowed anything."""
        yielding = [
            (self._order(claim), name)
            for name, claim in self._claims.items()
            if name != self._asker and self._yields(claim)
        ]
        return max(yielding)[1] if yielding else None

    def release(self, team: str, size: float) -> None:
        """Take what a request that gives way has held off its team's claim."""
        self._claims[team].held -= size
        self._lacking -= size

    def _order(self, claim: Claim) -> tuple[bool, int, float]:
        return claim.held > self._unit, claim.rank, (claim.held - self._unit) / claim.weight

    def _yields(self, claim: Claim) -> bool:
        """Return whether a team gives way: a worse rank down to its unit, the same rank to a share, a better rank to a
        unit only."""
        asker = self._claims[self._asker]
        if claim.rank > asker.rank:
            return claim.held > self._unit or (claim.held > 0 and self._after <= self._unit)
        return claim.held > claim.share and self._after <= (asker.share if claim.rank == asker.rank else self._unit)


def yielding(ticket: Ticket, teams: Mapping[str, TeamState], places: int, tokens: int | None) -> list[Ticket] | None:
    """Return the waiting requests that give way to a request in a full queue, None if the request has to be refused.

    teams: those that wait, and that of the request."""

    def bound(limit: float, unit: float, size: float, held: Callable[[TeamState], int]) -> Bound:
        claims = {name: Claim(team.band.band.rank, team.team.weight, held(team)) for name, team in teams.items()}
        return Bound(limit, unit, size, ticket.team.name, claims)

    in_places = bound(places, 1, 1, lambda team: len(team.queue))
    in_tokens = (
        None
        if tokens is None
        else bound(tokens, tokens / max(1, places), ticket.tokens, lambda team: team.waiting_tokens)
    )
    newest = {name: reversed(team.queue) for name, team in teams.items()}
    chosen: list[Ticket] = []
    while (
        exceeded := next((one for one in (in_places, in_tokens) if one is not None and one.is_exceeded), None)
    ) is not None:
        if (name := exceeded.next_to_yield()) is None:
            return None
        chosen.append(each := next(newest[name]))
        in_places.release(name, 1)
        if in_tokens is not None:
            in_tokens.release(name, each.tokens)
    return chosen
