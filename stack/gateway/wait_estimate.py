"""Expected wait of a request at admission, from the slots ahead of it and how long each is held. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stack.gateway.admission_state import TeamState
from stack.gateway.hold_time import HoldTime


@dataclass(slots=True)
class Room:
    """Slots of a gateway, and those in use. gone_s: after which a request of a better rank has gone or given up.
    leased: the limits grow with what waits."""

    slots: int
    running: int
    gone_s: float
    leased: bool


def expected_wait_s(
    it: TeamState, slots: int, queues: Mapping[int, Mapping[str, TeamState]], overall: HoldTime, now: float, room: Room
) -> float:
    """Return the expected wait of a further request of a team that wants so many slots. queues: by rank, the teams of
    it with somebody waiting.

    Those who go first, times how long a slot is held by each of their teams, divided by the slots that they share. Too
    low when higher bands send more meanwhile."""
    rank, own, ceiling, running = it.band.band.rank, it.waiting_slots + slots, it.band.most, it.running
    if room.leased:  # the lease of its band follows its requests
        ceiling = max(ceiling, math.floor(it.band.band.ceiling * room.slots))
    hold_s = it.hold.estimate(it.requests, overall, now)
    ahead, work_s, turns = float(own), 0.0, own / it.team.weight
    for above, queue in queues.items():
        if above >= rank:
            break
        for other in queue.values():
            count = other.waiting_slots
            ahead += count
            work_s += count * other.hold.expected_s
    if work_s:
        work_s = min(work_s, room.gone_s * room.slots)
    work_s += own * hold_s
    for other in queues[rank].values():
        if other is not it:
            first = turns * other.team.weight
            if first > (count := other.waiting_slots):
                first = count
            ahead += first
            work_s += first * other.hold.expected_s
    free = min(room.slots - room.running, ceiling - it.band.running)
    shared = _until(ahead, min(room.slots, ceiling), free, work_s / ahead)
    most = it.most
    if most is not None and room.leased:  # its lease follows its requests
        most = max(most, it.team.max_running or 1)
    return shared if most is None else max(shared, _until(own, most, most - running, hold_s))


def _until(turn: float, slots: int, free: int, hold_s: float) -> float:
    """Seconds until so many have found one of the slots, the free ones at once."""
    if free > 0:
        turn -= free
    return turn * hold_s / max(1, slots) if turn > 0 else 0.0
