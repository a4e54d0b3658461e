"""Liveness of one engine as the gateway sees it: collects the evidence of three sides, and assesses it once a second.

Pure but for what `assess` ends: attempts that have brought nothing when the engine leaves rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from exporters.engine.liveness import DEFAULT_LIMITS, Endpoint, Evidence, Liveness, LivenessLimits, StepValues

FRESH_S = 8.0  # older values of /metrics show no silence


class EngineAttempt(Protocol):
    """A request at an engine. request_id: as in its record. outputs: pieces of output so far. silent_since: since when
    it has received none. prompt_tokens: estimated. blocking: it keeps the engine from stepping, such as loading an
    adapter. abandon: tries another engine where one may."""

    @property
    def request_id(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def silent_since(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def blocking(self) -> bool: ...
    def abandon(self) -> None: ...


@dataclass(slots=True, eq=False)
class EngineLiveness:
    """Evidence on one engine, and its liveness.

    steps, steps_at: of the latest readable scrape, and its time. ended_outputs: of attempts that have ended. probes:
    whether a probe can be sent. probe_since, last_probe: when the open one and the latest one were sent. stepped_at:
    when the engine's own counters were last seen to move. late: a timeout of ours ended too late to prove anything."""

    liveness: Liveness
    limits: LivenessLimits = DEFAULT_LIMITS
    probes: bool = False
    endpoint: Endpoint = Endpoint.UNREAD
    steps: StepValues | None = None
    read_at: float = 0.0
    steps_at: float = 0.0
    stepped_at: float = -math.inf
    paused: bool = False
    late: bool = False
    attempts: set[EngineAttempt] = field(default_factory=set)
    ended_outputs: int = 0
    probe_since: float | None = None
    probe_answers: int = 0
    last_probe: float = 0.0

    def scraped(self, endpoint: Endpoint, now: float, steps: StepValues | None = None) -> None:
        """Note the result of a scrape."""
        self.endpoint, self.read_at = endpoint, now
        if steps is not None:
            if self.steps is not None and steps.counters != self.steps.counters:
                self.stepped_at = now
            self.steps, self.steps_at = steps, now

    def ended(self, attempt: EngineAttempt, *, answered: bool) -> None:
        """Note the end of an attempt. answered: by a complete reply."""
        self.attempts.discard(attempt)
        self.ended_outputs += attempt.outputs + answered

    def evidence(self, now: float) -> Evidence:
        attempts, read = self.attempts, now - self.read_at <= FRESH_S
        return Evidence(
            at=now,
            endpoint=self.endpoint if read else Endpoint.UNREAD,
            steps=self.steps,
            steps_at=self.steps_at,
            requests=len(attempts),
            outputs=self.ended_outputs + sum(each.outputs for each in attempts),
            silent_s=max((now - each.silent_since for each in attempts), default=0.0),
            prefill_tokens=max((each.prompt_tokens for each in attempts if not each.outputs), default=0),
            probes=self.probes,
            probe_since=self.probe_since,
            probe_answers=self.probe_answers,
            paused=self.paused,
            planned=any(each.blocking for each in attempts),
            late=self.late or (not read and self.endpoint is not Endpoint.UNREAD),
        )

    def assess(self, now: float) -> Liveness:
        """Return the liveness as it was before this look; move requests away when the engine leaves rotation."""
        before = self.liveness
        self.liveness = before.after(self.evidence(now), self.limits)
        self.late = False
        if not self.liveness.in_rotation:
            for attempt in [each for each in self.attempts if not each.outputs]:
                attempt.abandon()
        return before

    def wants_probe(self, now: float) -> bool:
        return self.probes and self.probe_since is None and self.liveness.wants_probe(now, self.last_probe, self.limits)
