"""State of the reconciliation: counters of requests and tokens by engine and model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from exporters.engine.view import EngineTotals
from exporters.requests.work import FinishedRequest

KINDS = ("requests", "prompt", "completion")
MISSING_CAUSES = ("no_usage", "unreadable", "unknown")
EXTRA_CAUSES = ("restart", "start", "unknown")


NOTHING = FinishedRequest()


class TokenPair(NamedTuple):
    """Prompt and completion tokens."""

    prompt: int = 0
    completion: int = 0


class CoreSnapshot(msgspec.Struct):
    """Engine core at the last scrape. Its unfinished tokens (in no finished request) are relative to these levels:

    idle_from: values when it was last idle. aborted_from: the same, or values at the first scrape of a busy core."""

    totals: EngineTotals
    idle_from: TokenPair = TokenPair()
    aborted_from: TokenPair = TokenPair()


class ReconciledEngine(msgspec.Struct):
    """Engine at the last scrape. cores: by model and rank.

    logged_at_request: the log's counts by model at the scrape request."""

    looked_s: float
    started_s: float | None
    cores: dict[str, dict[str, CoreSnapshot]]
    logged_at_request: dict[str, FinishedRequest] = msgspec.field(name="asked")
    names: dict[str, str] = {}


def _none(causes: Iterable[str]) -> dict[str, list[int]]:
    return {cause: [0] * len(KINDS) for cause in causes}


class ReconciledModel(msgspec.Struct):
    """State of a model: counters since its first scrape, by cause where there are causes.

    skip: the log's counts at the first scrape, by name in it. settled_missing, settled_unreadable: the log's counts at
    the last exact comparison; of unreadable answers also how many were recorded as missing. suspected: by cause, the
    lines that may include extra lines of that cause. suspecting: by cause, the log's counts when such lines may have
    begun; more may come."""

    first_s: float
    skip: dict[str, FinishedRequest]
    logged: FinishedRequest = NOTHING
    engine: FinishedRequest = NOTHING
    missing_in_log: dict[str, list[int]] = msgspec.field(default_factory=lambda: _none(MISSING_CAUSES))
    extra_in_log: dict[str, list[int]] = msgspec.field(default_factory=lambda: _none(EXTRA_CAUSES))
    aborted: TokenPair = TokenPair()
    settled_s: float | None = None
    settled_missing: int = 0
    settled_unreadable: tuple[int, int] = (0, 0)
    suspected: dict[str, FinishedRequest] = {}
    suspecting: dict[str, FinishedRequest] = {}

    def __post_init__(self) -> None:
        self.missing_in_log = _none(MISSING_CAUSES) | self.missing_in_log  # an older state has fewer causes

    def booked(self) -> list[int]:
        """Recorded gap, by kind."""
        return [
            sum(c[k] for c in self.missing_in_log.values()) - sum(c[k] for c in self.extra_in_log.values())
            for k in range(len(KINDS))
        ]

    def book_missing_in_log(self, kind: int, amount: int) -> None:
        """Record missing work by cause. Unreadable answers explain at most as many requests."""
        causes, (settled, booked) = self.missing_in_log, self.settled_unreadable
        unreadable = self.logged.unreadable - settled
        if kind > 0 and self.logged.missing > self.settled_missing:
            causes["no_usage"][kind] += amount
            return
        part = (amount if unreadable else 0) if kind > 0 else min(amount, unreadable + booked - causes["unreadable"][0])
        causes["unreadable"][kind] += part
        causes["unknown"][kind] += amount - part

    def settle_exactly(self) -> None:
        """Settle all suspicions: the gap is known exactly."""
        self.suspected.clear()
        self.settled_missing = self.logged.missing
        self.settled_unreadable = self.logged.unreadable, self.missing_in_log["unreadable"][0]

    def book_extra_in_log(self, kind: int, amount: int) -> None:
        for cause in ("restart", "start"):
            lines = list(self.suspected.get(cause, NOTHING))
            part = min(amount, lines[kind])
            lines[kind] -= part
            amount -= part
            self.extra_in_log[cause][kind] += part
            if cause in self.suspected:
                self.suspected[cause] = FinishedRequest._make(lines)
        self.extra_in_log["unknown"][kind] += amount


class ReconciliationState(msgspec.Struct):
    """State that outlives the process.

    seen: counted log values by name in the log. placed: name in the log -> model."""

    models: dict[str, ReconciledModel] = {}
    upstreams: dict[str, ReconciledEngine] = {}
    seen: dict[str, FinishedRequest] = {}
    placed: dict[str, str] = {}
