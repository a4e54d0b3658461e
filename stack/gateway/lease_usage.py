"""Use of every limit at this gateway, as a lease is asked for. Pure, but for marking in admission what was claimed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from stack.gateway.admission import Admission
from stack.gateway.lease import ReplicaUsage, Usage
from stack.gateway.lease_store import CEILING, FLOOR, IN_FLIGHT, QUEUE, QUEUE_TOKENS, RUNNING, SLOTS, TOKENS, TeamClaim


def replica_usage(admission: Admission, slots: int, counted: Mapping[str, int]) -> ReplicaUsage:
    """Return what this gateway uses and needs. slots: of all gateways, as the engines allow them. counted: tokens
    charged to teams that the store knows; teams without requests and without further charges are left out."""
    whole, share = admission.whole, admission.capacity
    wanted = admission.running + sum(band.waiting for band in admission.bands)
    limits = {SLOTS: Usage(admission.running, wanted, slots, admission.fitted)}
    if (tokens := whole.capacity.tokens) is not None:
        limits[TOKENS] = _token_usage(admission, tokens, share.tokens or 0)
    limits.update(_band_usage(admission, slots))
    teams, refused, refused_tokens = [], 0, 0
    for team in admission.active(counted):
        name, waiting = team.name, len(team.queue)
        running, wanted, in_flight = team.running, team.running + team.waiting_slots, team.in_flight
        terms = whole.teams.get(name, team.team)
        if terms.max_running is not None:
            limits[RUNNING + name] = Usage(running, wanted, terms.max_running, team.team.max_running or 0)
        if terms.max_in_flight is not None:
            admitted = in_flight - team.tentative
            limits[IN_FLIGHT + name] = Usage(admitted, in_flight, terms.max_in_flight, team.team.max_in_flight or 0)
        refused, refused_tokens = refused + team.refused, refused_tokens + team.refused_tokens
        teams.append(
            TeamClaim(
                name, team.band.band.rank, team.band.name, team.team.weight, team.charged, counted.get(name, 0),
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


def _token_usage(admission: Admission, budget: int, part: int) -> Usage:
    """Return the use of the token budget, and the size of the next request where that does not fit the lease."""
    used, following = min(admission.tokens, budget), min(admission.next_tokens(), budget)
    leased = admission.ceilings.limits.get(TOKENS, 0) if admission.ceilings else 0
    large = following if used + following > leased else 0
    return Usage(used, min(budget, used + admission.waiting_tokens), budget, part, large)


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
            yield CEILING + band.name, Usage(band.running, demand, most, min(most, part))
