"""Budget of request bytes in memory, from the first byte until an engine has them.

Invariant: where there are several teams none holds more than a part of it, so that one key with large bodies leaves
room for others. No clock, no waiting."""

from __future__ import annotations

PARTS = 2  # of which a team may hold one


class BodyBudget:
    """A budget in bytes. Every user returns what it took."""

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most
        self._of: dict[str | None, int] = {}

    def take(self, team: str | None, size: int, *, alone: bool = False) -> bool:
        """Return whether so many bytes more may be held by a team; they are, then. alone: there is no other to leave
        room for."""
        mine = self._of.get(team, 0) + size
        if self.held + size > self._most or (not alone and mine > self._most // PARTS):
            return False
        self.held += size
        self._of[team] = mine
        return True

    @property
    def roomy(self) -> bool:
        """Return whether half of it is free, so that bodies may be kept for another attempt."""
        return 2 * self.held <= self._most

    def give(self, team: str | None, size: int) -> None:
        self.held -= size
        if left := self._of.pop(team, 0) - size:
            self._of[team] = left
