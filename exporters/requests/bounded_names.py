"""Bounded set of external names that become labels."""

from __future__ import annotations

from collections.abc import Iterable

from exporters.requests.record import UNKNOWN_TEAM

UNKNOWN_MODEL = "__unknown__"


OTHER = "__other__"
MAX_NAME = 120


class BoundedNames:
    """At most `limit` names with their own series: configured ones first, then in order of appearance.

    A name keeps its series."""

    def __init__(self, configured: Iterable[str] = (), limit: int = 50) -> None:
        self._members = dict.fromkeys(configured)
        self._limit = max(limit, len(self._members))
        self.folded = 0  # requests counted as __other__

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def fold(self, name: str, may_claim: bool = True, times: int = 1) -> str:
        """Return the name to count under.

        may_claim: a new name may get its own series; times: number of requests."""
        if name in self._members:
            return name
        if name.startswith("__"):  # reserved names always exist and cannot be claimed
            return name if name in (UNKNOWN_TEAM, UNKNOWN_MODEL) else OTHER
        if may_claim and len(self._members) < self._limit:
            self._members[name] = None
            return name
        self.folded += times
        return OTHER

    def seat(self, name: str) -> None:
        """Restore a name from before a restart, even beyond the limit."""
        if not name.startswith("__"):
            self._members[name] = None
