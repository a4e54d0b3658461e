"""Use of every limit at this gateway, as a lease is asked for. Pure, but for marking in admission what was claimed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from stack.gateway.admission import Admission
from stack.gateway.admission_state import TeamState
from stack.gateway.lease import ReplicaUsage, Usage
from stack.gateway.lease_store import CEILING, FLOOR, IN_FLIGHT, QUEUE, QUEUE_TOKENS, RUNNING, SLOTS, TOKENS, TeamClaim


def replica_usage(admission: Admission, slots: int, counted: Mapping[str, int]) -> ReplicaUsage:
    """Return what this gateway uses and needs. slots: of all gateways, as the engines allow them. counted: tokens
    charged to teams that the store knows; teams without requests and without further charges are left out."""
    whole, share = admission.whole, admission.capacity
    limits = dict(_next_usage(admission, slots))
    limits.update(_band_usage(admission, slots))
    teams, refused, refused_tokens = [], 0, 0
    for team in admission.active(counted):
        name, waiting = team.name, len(team.queue)
        running, wanted, in_flight = team.running, team.running + team.waiting_slots, team.in_flight
        terms, rank = whole.teams.get(name, team.team), team.band.band.rank
        if terms.max_running is not None:
            may_run = team.leased is None or team.requests < team.leased  # else it would keep others from running
            large = _large(admission, RUNNING + name, team if may_run else None, wide=True)
            part = team.team.max_running or 0
            limits[RUNNING + name] = Usage(running, wanted, terms.max_running, part, large, rank)
        if terms.max_in_flight is not None:
            admitted = in_flight - team.tentative
            limits[IN_FLIGHT + name] = Usage(admitted, in_flight, terms.max_in_flight, team.team.max_in_flight or 0)
        refused, refused_tokens = refused + team.refused, refused_tokens + team.refused_tokens
        teams.append(
            TeamClaim(
                name, rank, team.band.name, team.team.weight, team.charged, counted.get(name, 0),
                wanted, waiting + team.refused, team.waiting_tokens + team.refused_tokens,
            )
        )  # fmt: skip
        admission.claim(team)
    waiting = admission.waiting
    limits[QUEUE] = Usage(waiting, waiting + refused, whole.capacity.queue, share.queue)
    if (queue_tokens := whole.capacity.queue_tokens) is not None:
        used = admission.waiting_tokens
        limits[QUEUE_TOKENS] = Usage(used, used + refused_tokens, queue_tokens, share.queue_tokens or 0)
    return ReplicaUsage(limits, teams)


def _next_usage(admission: Admission, slots: int) -> Iterator[tuple[str, Usage]]:
    """Yield the use of slots and of the token budget, and what the next request needs where it does not fit the
    lease: of both, as it cannot go with one of them."""
    team, rank, tokens, budget = admission.next_team(), 0, 0, admission.whole.capacity.tokens
    used = admission.tokens if budget is None else min(admission.tokens, budget)
    if team is not None and budget is not None:
        tokens = min(next(iter(team.queue)).tokens, budget)
    leased = admission.ceilings.limits.get(TOKENS, 0) if admission.ceilings else 0
    large = _large(admission, SLOTS, team, wide=used + tokens <= leased or not tokens)
    if team is not None and large:
        by_floor = team.band.running + large <= team.band.floor
        rank = min(band.band.rank for band in admission.bands) if by_floor else team.band.band.rank
    wanted = admission.running + sum(band.waiting for band in admission.bands)
    yield SLOTS, Usage(admission.running, wanted, slots, admission.fitted, large, rank)
    if budget is not None:
        demand, part = min(budget, used + admission.waiting_tokens), admission.capacity.tokens or 0
        yield TOKENS, Usage(used, demand, budget, part, tokens if large else 0, rank)


def _large(admission: Admission, limit: str, team: TeamState | None, *, wide: bool) -> int:
    """Return the slots that the next request of a team needs, if it was the next at the latest renewal as well. wide: 0
    where that is one."""
    head = next(iter(team.queue), None) if team is not None else None
    former, admission.heads[limit] = admission.heads.get(limit), head
    need = 0 if team is None or head is not former or head is None else team.need
    return 0 if wide and need == 1 else need


def _band_usage(admission: Admission, slots: int) -> Iterator[tuple[str, Usage]]:
    """Yield the use of ceilings below 1 and of floors. A floor is a right to go first, and nothing holds it."""
    for band in admission.bands:
        terms = admission.whole.bands.get(band.name, band.band)
        demand = band.running + band.waiting
        if terms.floor:
            yield FLOOR + band.name, Usage(0, min(demand, terms.floor), terms.floor, band.band.floor)
        if terms.ceiling < 1:
            most = max(1, terms.floor, math.floor(terms.ceiling * slots))
            part = max(band.band.floor, math.floor(terms.ceiling * admission.fitted))
            large = _large(admission, CEILING + band.name, admission.next_of(band), wide=True)
            yield CEILING + band.name, Usage(band.running, demand, most, min(most, part), large, band.band.rank)
