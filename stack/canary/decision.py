"""Decision on a canary: what its share should be next, from the evidence, the guards and the time.

Pure. Invariant: a guard or `worse` sets the share to 0 at any time; a higher share needs every metric to be not worse;
`better` and `equivalent` need decide_s as well, since a canary may differ at other hours of the day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from stack.canary.evidence import CanaryEvidence, MetricAssessment, assess
from stack.gateway.policy import Canary
from stack.tuning.comparison import Finding, effect_text, interval_text

Action = Literal["start", "hold", "raise", "roll_back", "promote", "undecided"]
ENDS: tuple[Action, ...] = ("roll_back", "promote", "undecided")


class CanaryDecision(NamedTuple):
    """Next act. share: what the canary should have, 0 to 1. why: a sentence without a full stop, with values."""

    action: Action
    share: float
    why: str


class CanaryStage(NamedTuple):
    """Present share, since when the canary has it, and since when the canary runs, in unix seconds."""

    share: float
    since_s: float
    started_s: float


def decide(
    policy: Canary, evidence: CanaryEvidence, guards: Sequence[str], stage: CanaryStage, now_s: float
) -> CanaryDecision:
    """Return the next act. guards: sentences of those that say the canary has to stop."""
    found = assess(evidence, policy)
    failing = evidence.failing(policy)
    if stop := [*guards, *([failing] if failing else ())]:
        return CanaryDecision("roll_back", 0.0, "; ".join(stop))
    if worse := [each.finding for each in found if each.finding.verdict == "worse"]:
        return CanaryDecision("roll_back", 0.0, "; ".join(map(worded, worse)))
    ran_s = now_s - stage.started_s
    required = [each for each in found if each.required]
    if ran_s >= policy.decide_s and required and all(_good(each.finding) for each in required):
        share = stage.share if policy.final is None else policy.final
        return CanaryDecision("promote", share, "; ".join(worded(each.finding) for each in required))
    if ran_s >= policy.limit_s:
        open_ = [each.finding for each in required if not _good(each.finding)]
        return CanaryDecision("undecided", 0.0, "; ".join(map(worded, open_)) or "no metric has enough requests")
    higher = next((step for step in policy.steps if step > stage.share), None)
    if higher is None or now_s - stage.since_s < policy.settle_s + policy.step_s:
        return CanaryDecision(
            "hold", stage.share, "the last step is reached" if higher is None else "the step is not over"
        )
    if late := [each for each in required if not _tolerable(each, policy)]:
        return CanaryDecision("hold", stage.share, "not clear yet: " + "; ".join(worded(each.finding) for each in late))
    if not required:
        return CanaryDecision("hold", stage.share, "no metric has enough requests yet")
    return CanaryDecision("raise", higher, "not worse: " + "; ".join(worded(each.finding) for each in required))


def _good(finding: Finding) -> bool:
    return finding.verdict in ("better", "equivalent")


def _tolerable(assessment: MetricAssessment, policy: Canary) -> bool:
    return assessment.worst is not None and assessment.worst <= 1 + policy.tolerance


def worded(finding: Finding) -> str:
    """Return a finding in words: TTFT +31.2 % (+20.1 % to +43.3 %, 24 blocks)."""
    if finding.metric.unit == "share":
        return f"{finding.metric.title}: {finding.why}"
    if finding.low is None:
        return f"{finding.metric.title}: {finding.why}"
    change = effect_text(finding.metric, finding.effect)
    return f"{finding.metric.title} {change} ({interval_text(finding)}, {finding.runs[0]} blocks)"
