"""Liveness of one engine as the gateway sees it: collects the evidence of three sides, and assesses it once a second.

Pure but for what `assess` ends: attempts that have brought nothing when the engine leaves rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from exporters.engine.liveness import DEFAULT_LIMITS, Endpoint, Evidence, Liveness, LivenessLimits, StepValues
from stack.gateway.estimate import OUTPUT_TOKENS

if TYPE_CHECKING:
    from stack.gateway.request_body import TokenRequest

FRESH_S = 8.0  # older values of /metrics show no silence
# An API server that makes an answer answers nobody else. Measured with vLLM 0.32 on a fast machine: 17 us for each
# log-probability, whether of 4 requests at once or of one; here with room for a slow one.
LOGPROB_S = 50e-6
# To fan out, collect and encode a text or a vector, and to check and tokenize a token of a prompt: by source. What
# needs less than HEAVY_S counts as nothing, so that many usual requests delay no verdict.
TEXT_S, TOKEN_S, HEAVY_S = 2e-3, 2e-6, 1.0


def busy_s(ask: TokenRequest, prompt_tokens: int) -> float:
    """Return for how long at most a request may keep the API server of its engine from answering anybody.

    The log-probabilities of a stream come one token at a time, and keep nobody waiting."""
    output = 0 if ask.stream else ask.outputs * (OUTPUT_TOKENS if ask.max_tokens is None else ask.max_tokens)
    heavy = max(ask.outputs, ask.prompts) * TEXT_S + prompt_tokens * TOKEN_S
    logprobs = prompt_tokens * ask.prompt_logprobs + output * ask.logprobs
    return logprobs * LOGPROB_S + (heavy if heavy >= HEAVY_S else 0.0)


class EngineAttempt(Protocol):
    """A request at an engine. request_id: as in its record. outputs: pieces of output so far. silent_since: since when
    it has received none. prompt_tokens: estimated. busy_s: as the function of this name estimates it. blocking: it
    keeps the engine from stepping, such as loading an adapter. abandon: tries another engine where one may."""

    @property
    def request_id(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def silent_since(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def blocking(self) -> bool: ...
    def abandon(self) -> None: ...


@dataclass(slots=True, eq=False)
class EngineLiveness:
    """Evidence on one engine, and its liveness.

    steps, steps_at: of the latest readable scrape, and its time. ended_outputs: of attempts that have ended. probes:
    whether a probe can be sent. probe_since, last_probe: when the open one and the latest one were sent. stepped_at:
    when the engine's own counters were last seen to move. late: a timeout of ours ended too late to prove anything.
    left_s: busy_s of attempts that have ended without an answer since steps_at: an API server that is busy notices no
    client that has left."""

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
    left_s: float = 0.0

    def scraped(self, endpoint: Endpoint, now: float, steps: StepValues | None = None) -> None:
        """Note the result of a scrape."""
        self.endpoint, self.read_at = endpoint, now
        if steps is not None:
            self.left_s = 0.0
            if self.steps is not None and steps.counters != self.steps.counters:
                self.stepped_at = now
            self.steps, self.steps_at = steps, now

    def ended(self, attempt: EngineAttempt, *, answered: bool) -> None:
        """Note the end of an attempt. answered: by a complete reply."""
        self.attempts.discard(attempt)
        self.left_s += 0.0 if answered else attempt.busy_s
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
            busy_s=self._busy_s(),
            probes=self.probes,
            probe_since=self.probe_since,
            probe_answers=self.probe_answers,
            paused=self.paused,
            planned=any(each.blocking for each in attempts),
            late=self.late or (not read and self.endpoint is not Endpoint.UNREAD),
        )

    def busy(self, now: float) -> bool:
        """Return whether what the engine was sent explains that it answers nobody."""
        return now - self.liveness.quiet_since < min(self._busy_s(), self.limits.planned_s)

    def _busy_s(self) -> float:
        return self.left_s + sum(each.busy_s for each in self.attempts)

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
