"""Counters of requests and tokens that one engine and its log agree on, or do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from exporters.engine.view import EngineTotals
from exporters.requests.work import FinishedRequest

KINDS = ("requests", "prompt", "completion")
MISSING_CAUSES = ("no_usage", "unknown")
EXTRA_CAUSES = ("restart", "start", "unknown")


NOTHING = FinishedRequest()


class TokenPair(NamedTuple):
    """Tokens of prompts and of answers."""

    prompt: int = 0
    completion: int = 0


class CoreSnapshot(msgspec.Struct):
    """An engine core at the last look. Its unfinished tokens (worked on, in no finished request) are told from these
    levels on:

    idle_from: as they were when it was last idle. aborted_from: the same, or as they were at the first look at a core
    at work."""

    totals: EngineTotals
    idle_from: TokenPair = TokenPair()
    aborted_from: TokenPair = TokenPair()


class ReconciledEngine(msgspec.Struct):
    """An engine at the last look. cores: by model and rank. asked: what the log held of each model when the page was
    asked for."""

    looked_s: float
    started_s: float | None
    cores: dict[str, dict[str, CoreSnapshot]]
    asked: dict[str, FinishedRequest]
    names: dict[str, str] = {}


def _none(causes: Iterable[str]) -> dict[str, list[int]]:
    return {cause: [0] * len(KINDS) for cause in causes}


class ReconciledModel(msgspec.Struct):
    """What is kept of a model: counters since its first look, by cause where there are causes.

    skip: what the log held at the first look, by the names in it. suspected: by cause, the lines among which extra
    lines of that cause are.
    suspecting: by cause, what the log held when such lines may have begun; they may still come."""

    first_s: float
    skip: dict[str, FinishedRequest]
    logged: FinishedRequest = NOTHING
    engine: FinishedRequest = NOTHING
    missing_in_log: dict[str, list[int]] = msgspec.field(default_factory=lambda: _none(MISSING_CAUSES))
    extra_in_log: dict[str, list[int]] = msgspec.field(default_factory=lambda: _none(EXTRA_CAUSES))
    aborted: TokenPair = TokenPair()
    settled_s: float | None = None
    settled_missing: int = 0
    suspected: dict[str, FinishedRequest] = {}
    suspecting: dict[str, FinishedRequest] = {}

    def booked(self) -> list[int]:
        """The gap that is booked so far, by kind."""
        return [
            sum(c[k] for c in self.missing_in_log.values()) - sum(c[k] for c in self.extra_in_log.values())
            for k in range(len(KINDS))
        ]

    def book_missing_in_log(self, kind: int, amount: int) -> None:
        tokens_unknown = kind > 0 and self.logged.missing > self.settled_missing
        self.missing_in_log["no_usage" if tokens_unknown else "unknown"][kind] += amount

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
    """All that outlives the process. seen: by name in the log, what has been taken in. placed: name in the log ->
    model."""

    models: dict[str, ReconciledModel] = {}
    upstreams: dict[str, ReconciledEngine] = {}
    seen: dict[str, FinishedRequest] = {}
    placed: dict[str, str] = {}
