"""Input and result of a check, and the values and limits that several checks share.

Confidence, 0 to 1, is sqrt(amount) x (0.5 + 0.5 x over). amount: requests that the finding rests on, of ENOUGH, at most
1. over: 1 - threshold / value, so 0 at the threshold, 0.5 at twice of it. Just over it on plenty of evidence is 0.5: it
may be noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from alerts import thresholds
from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit
from stack.doctor.evidence import Clients, EngineSnapshot, GatewayEvidence, Spread

LEAST_REQUESTS = 10  # with fewer, one of them decides every figure
LEAST_LATE = 3  # beyond a limit; the p95 of a dozen requests is one of them, and after a start the first ones are slow
LEAST_SECONDS = 5.0
ENOUGH = thresholds.COMPARED_AT_LEAST.value
FEW = thresholds.ERRORS_AT_LEAST
_PER = 300.0  # seconds in which the thresholds of counts are meant

# Thresholds that no alert has.
FAR_LONGER = Threshold(
    "far_longer",
    4.0,
    Unit.NONE,
    "Prompts four times as long as the median take four times as long or more to compute; twice is ordinary.",
    "Judgement; the seeds of head-of-line blocking are files of 20,000 tokens among prompts of some hundred.",
)
STRETCHED = Threshold(
    "stretched",
    5.0,
    Unit.NONE,
    "A p99 of five times the median is no ordinary spread between steps or prompts of like length.",
    "Judgement; in recorded pages of an engine that is well it is 1 to 3.",
)
ROOM = Threshold(
    "room",
    0.8,
    Unit.RATIO,
    "Above it more sequences bring preemptions instead of speed.",
    "runbooks/VLLMQueueTimeHigh.md",
)

State = Literal["idle", "thin", "busy"]


@dataclass(frozen=True, slots=True)
class Fact:
    """Value, and the threshold it was compared with, if any. least: the threshold is a minimum. between: bounds of the
    value, where no more is known."""

    what: str
    value: float
    unit: Unit = Unit.NONE
    limit: Threshold | None = None
    least: bool = False
    between: tuple[float, float] | None = None

    @property
    def over(self) -> float:
        """0 at the limit, towards 1 the further the value is on the wrong side of it; 0 on the right one."""
        if self.limit is None:
            return 0.0
        larger, smaller = (self.limit.value, self.value) if self.least else (self.value, self.limit.value)
        return 1 - smaller / larger if larger > smaller else 0.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check. amount: number of requests behind it. over: of the fact that decides. old, new: as in a
    finding."""

    name: str
    serious: bool
    amount: float
    over: float
    facts: tuple[Fact, ...]
    old: float | None = None
    new: float | None = None

    @property
    def confidence(self) -> float:
        return math.sqrt(min(1.0, self.amount / ENOUGH)) * (0.5 + 0.5 * min(1.0, self.over))


@dataclass(frozen=True, slots=True)
class Case:
    """Input of a check. one: the values are of a single engine, so that its running requests show its places."""

    figures: EngineSnapshot
    at: Callable[[Threshold], Threshold]
    clients: Clients | None = None
    gateway: GatewayEvidence | None = None
    one: bool = True

    def limit_of(self, threshold: Threshold) -> Threshold:
        """Return a threshold of a count, which is for five minutes, scaled to a longer time."""
        limit = self.at(threshold)
        return replace(limit, value=limit.value * max(1.0, self.figures.seconds / _PER))


def state_of(figures: EngineSnapshot) -> State:
    if not figures.work and not figures.hung:
        return "idle"
    return "thin" if figures.requests < LEAST_REQUESTS or figures.seconds < LEAST_SECONDS else "busy"


def check_result(
    name: str, amount: float, *facts: Fact, serious: bool = True, over: float | None = None
) -> CheckResult:
    """Return a result. over: default is the largest of the facts."""
    return CheckResult(
        name, serious, amount, max((fact.over for fact in facts), default=0.0) if over is None else over, facts
    )


def sent_by(gate: GatewayEvidence | None) -> float:
    """Return the requests that the gateway always had at these engines, whatever their own metrics show."""
    return gate.running.lowest if gate and gate.running and gate.only else 0.0


def quarter_fewer(case: Case) -> float | None:
    """Return a quarter less than the running requests."""
    running = case.figures.running
    return max(1, math.floor(0.75 * running.highest)) if running and running.highest >= 1 and case.one else None


def steps_are_slow(case: Case) -> bool:
    return bool((gaps := case.figures.between_tokens) and gaps.at(95) > case.at(thresholds.INTER_TOKEN_P95).value)


def ttft_p95(case: Case) -> tuple[Fact, ...]:
    first = case.figures.ttft
    return (p95_fact("time to first token p95", first, case.at(thresholds.TTFT_P95)),) if first else ()


def p95_fact(what: str, spread: Spread, limit: Threshold) -> Fact:
    """Return the p95, compared with its limit only where more than one or two values are beyond that."""
    known = limit if round(spread.above(limit.value) * spread.count) >= LEAST_LATE else None
    return Fact(what, spread.at(95), Unit.SECONDS, known, between=spread.around(95))


def running_and_waiting(figures: EngineSnapshot) -> tuple[Fact, ...]:
    running, waiting = figures.running, figures.waiting
    facts = [Fact("running, at most", running.highest, Unit.REQUESTS)] if running else []
    return (*facts, *([Fact("waiting, at most", waiting.highest, Unit.REQUESTS)] if waiting else []))
