"""Division of the limits of teams.yaml among gateway replicas. Pure.

Invariant: while every replica sees a list of replicas before it is replaced, and within `HOLD_S` of its change, the
shares of all replicas never add up to more than a limit. A lower share holds at once. A higher one holds when every
list of the last `HOLD_S` allows it, and a list without the replica allows nothing.

A replica with an index gets limit / replicas, and one more if its index is below the remainder, so that the shares add
up to the limit. A replica without an index gets limit / replicas rounded down."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from stack.gateway.lease_client import LeaseStore
from stack.gateway.policy import Band, Policy, Team

LOOK_S = 5.0  # between two reads of the list of replicas
HOLD_S = 3 * LOOK_S  # a read may fail or be slow; caches of a cluster's DNS keep an entry for up to 5 s


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replicas that serve the same teams.yaml. One of these names them: replicas (a number), replicas_file (a name a
    line), replicas_dns (a host name with one address for each replica).

    index: of this replica, from 0 to replicas - 1; `hostname` is the number at the end of the host name, as in a
    StatefulSet. Without it every share is rounded down. name: of this replica in replicas_file and in the store; null
    for the host name. store: leases the limits; the shares hold while it is lost."""

    replicas: int | None = None
    replicas_file: str | None = None
    replicas_dns: str | None = None
    index: int | Literal["hostname"] | None = None
    name: str | None = None
    store: LeaseStore | None = None

    def __post_init__(self) -> None:
        """Refuses values that cannot work; msgspec names the place."""
        named = [one for one in ("replicas", "replicas_file", "replicas_dns") if getattr(self, one) is not None]
        if len(named) != 1:
            given = " and ".join(named) or "none of them"
            raise ValueError(f"sharing needs one of replicas, replicas_file and replicas_dns, not {given}")
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"sharing.replicas should be 1 or more, not {self.replicas}")
        if self.index is not None and self.replicas is None:
            raise ValueError(f"sharing.index is only for replicas; {named[0]} itself gives each replica its place")
        if isinstance(self.index, int) and not 0 <= self.index < (self.replicas or 0):
            raise ValueError(f"sharing.index should be 0 to {(self.replicas or 0) - 1}, not {self.index}")
        if self.name is not None and self.replicas_file is None and self.store is None:
            raise ValueError("sharing.name is only for replicas_file and store")


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one replica. replicas 0: the replica is not in the list and gets nothing. index None: rounded down."""

    replicas: int
    index: int | None = None

    def of(self, limit: int) -> int:
        if not self.replicas:
            return 0
        return (limit + (self.replicas - 1 - self.index if self.index is not None else 0)) // self.replicas


WHOLE, NOTHING = Share(1), Share(0)


def listed_share(names: Sequence[str], own: Sequence[str]) -> Share:
    """Return the share of the replica that is listed under one of its own names."""
    ordered = sorted(set(names))
    place = next((place for place, name in enumerate(ordered) if name in own), None)
    return NOTHING if place is None else Share(len(ordered), place)


def numbered_share(sharing: Sharing, hostname: str) -> Share | None:
    """Return the share where the file has the number of replicas, None otherwise. Raises ValueError for a host name
    without the index."""
    if sharing.replicas is None:
        return None
    if sharing.index != "hostname":
        return Share(sharing.replicas, sharing.index)
    ordinal = re.search(r"(\d+)$", hostname)
    if ordinal is None or int(ordinal[1]) >= sharing.replicas:
        raise ValueError(
            f"sharing.index: the host name {hostname!r} does not end in a number from 0 to {sharing.replicas - 1};"
            " write the index itself"
        )
    return Share(sharing.replicas, int(ordinal[1]))


class ShareWindow:
    """Shares by the lists of the last `HOLD_S` seconds, from the start on."""

    def __init__(self, now: float) -> None:
        self._since: list[tuple[float, Share]] = [(now, NOTHING)]

    def see(self, share: Share, now: float) -> None:
        """Record the share by the list that was just read."""
        if share != self._since[-1][1]:
            self._since.append((now, share))

    def shares(self, now: float) -> tuple[Share, ...]:
        """Return every share that held within the last `HOLD_S`; none of them may be exceeded."""
        while len(self._since) > 1 and self._since[1][0] < now - HOLD_S:
            del self._since[0]
        return tuple(dict.fromkeys(share for _, share in self._since))


def part_of(shares: Sequence[Share], limit: int) -> int:
    """Return the part of a limit that all of the shares allow."""
    return min(share.of(limit) for share in shares)


def divide(policy: Policy, shares: Sequence[Share]) -> Policy:
    """Return the policy with the part of every limit that all of the shares allow.

    Floors are divided by their running sum, so that they fit into the slots of each replica. A team whose share of
    max_running is 0 gets no max_in_flight either: its requests are rejected at once instead of waiting in vain."""
    if tuple(shares) == (WHOLE,):
        return policy

    part = partial(part_of, shares)

    def optional(limit: int | None) -> int | None:
        return None if limit is None else part(limit)

    def of_team(team: Team) -> Team:
        running, in_flight = optional(team.max_running), optional(team.max_in_flight)
        return msgspec.structs.replace(team, max_running=running, max_in_flight=0 if running == 0 else in_flight)

    bands: dict[str, Band] = {}
    floors = 0
    for name, band in policy.bands.items():
        before, floors = part(floors), floors + band.floor
        bands[name] = msgspec.structs.replace(band, floor=part(floors) - before)
    capacity = policy.capacity
    return msgspec.structs.replace(
        policy,
        teams={name: of_team(team) for name, team in policy.teams.items()},
        bands=bands,
        capacity=msgspec.structs.replace(
            capacity,
            slots=part(capacity.slots),
            tokens=optional(capacity.tokens),
            queue=part(capacity.queue),
            queue_tokens=optional(capacity.queue_tokens),
            min_slots=max(1, part(capacity.min_slots)),
        ),
    )


def limits(policy: Policy) -> Iterator[tuple[str, int]]:
    """Yield the limits that replicas divide, by dotted place."""
    for place in ("slots", "tokens", "queue", "queue_tokens"):
        if (limit := getattr(policy.capacity, place)) is not None:
            yield f"capacity.{place}", limit
    for name, band in policy.bands.items():
        if band.floor:
            yield f"bands.{name}.floor", band.floor
    for name, team in policy.teams.items():
        for place in ("max_running", "max_in_flight"):
            if (limit := getattr(team, place)) is not None:
                yield f"teams.{name}.{place}", limit


def share_mistakes(policy: Policy, replicas: int) -> Iterator[str]:
    """Yield what cannot be divided among so many replicas: sentences, each of which begins with a dotted place."""
    if (slots := policy.capacity.slots) < replicas:
        yield (
            f"capacity.slots: {slots} is less than the {replicas} replicas that share it; raise it or run fewer"
            " replicas"
        )


def share_warnings(policy: Policy, replicas: int) -> Iterator[str]:
    """Yield limits of teams of which some replica gets nothing."""
    for place, limit in limits(policy):
        if place.startswith("teams.") and limit < replicas:
            yield (
                f"{place}: {limit} is less than the {replicas} replicas that share it, so a replica with a share of 0"
                " rejects this team"
            )
