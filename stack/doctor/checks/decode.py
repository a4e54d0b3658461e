"""Checks for slow or pausing answers: prompts of others, the step itself, drafts that are not accepted."""

from __future__ import annotations

from dataclasses import replace

from alerts import thresholds
from exporters.catalogue.metric import Unit
from stack.doctor.checks.case import (
    STRETCHED,
    Case,
    CheckResult,
    Fact,
    check_result,
    p95_fact,
    quarter_fewer,
    running_and_waiting,
)
from stack.doctor.checks.prefill import check_head_of_line, check_prefill, check_small_steps
from stack.doctor.evidence import EngineSnapshot, Spread
from stack.doctor.prompt_work import LONG_STEP, tokens_per_long_step  # fmt: skip

MANY_AT_ONCE = 32.0  # of these drafts and weights share a step so often that reading them is not what it waits for


def _slow_answers(case: Case) -> Spread | None:
    """Return the pace of answers where it is over its limit and most of a request's time goes into it."""
    figures, pace = case.figures, pace_of(case.figures)
    if pace is None or pace.at(95) <= case.at(thresholds.INTER_TOKEN_P95).value:
        return None
    share = figures.shares.get("decode")
    return None if share is not None and share < max(figures.shares.values()) else pace


def _prompts_in_gaps(case: Case) -> Fact | None:
    """Return how many prompt tokens the steps over the limit compute, where those are what makes them long."""
    tokens = tokens_per_long_step(case.figures, case.at(thresholds.INTER_TOKEN_P95).value)
    fact = (
        Fact("computed prompt tokens per step over that limit, about", tokens, Unit.TOKENS, LONG_STEP)
        if tokens is not None
        else None
    )
    return fact if fact and fact.over else None


def check_interference(case: Case) -> CheckResult | None:
    """Find gaps between tokens that are long because the steps between them compute prompts, unless those prompts are a
    finding already."""
    figures, prompts, first = case.figures, _prompts_in_gaps(case), check_prefill(case)
    if figures.between_tokens is None or prompts is None or _slow_answers(case) is None:
        return None
    if check_head_of_line(case) or check_small_steps(case) or (first and first.serious):
        return None
    late = p95_fact("time between tokens p95", figures.between_tokens, case.at(thresholds.INTER_TOKEN_P95))
    median = Fact("the same, median", figures.between_tokens.at(50), Unit.SECONDS)
    return check_result(
        "prefill-interference", figures.requests, late, median, prompts, *running_and_waiting(figures), over=late.over
    )


def check_decode(case: Case) -> CheckResult | None:
    figures, pace = case.figures, _slow_answers(case)
    limit, share = case.at(thresholds.INTER_TOKEN_P95), case.figures.shares.get("decode")
    if pace is None or _prompts_in_gaps(case):
        return None
    if pace.at(95) > STRETCHED.value * pace.at_most(50) and (check_head_of_line(case) or check_prefill(case)):
        return None  # steps are long when they hold prompts, and those are a finding already
    facts = (
        Fact("time per token p95" if figures.drafts else "time between tokens p95", pace.at(95), Unit.SECONDS, limit),
        Fact("the same, mean", pace.mean, Unit.SECONDS),
        *([] if share is None else [Fact("of a request's time is decode", share, Unit.RATIO)]),
        *running_and_waiting(figures),
    )
    many = figures.running is not None and figures.running.mean > MANY_AT_ONCE
    found = check_result(
        "decode-at-batch" if many else "decode-drafted" if figures.drafts else "decode-bound", figures.requests, *facts
    )
    return replace(found, new=quarter_fewer(case)) if many else found


def pace_of(figures: EngineSnapshot) -> Spread | None:
    """Return the time between tokens. With drafts a gap is a step of several tokens, so that only the mean of each
    request counts, which 0.10 does not show."""
    return figures.per_token if figures.drafts and figures.per_token else figures.between_tokens


def check_drafts(case: Case) -> CheckResult | None:
    figures, limit = case.figures, case.at(thresholds.ACCEPTANCE)
    if figures.acceptance is None or figures.acceptance >= limit.value:
        return None
    facts = (
        Fact("of the drafted tokens accepted", figures.acceptance, Unit.RATIO, limit, least=True),
        Fact("drafted", figures.drafted or 0.0, Unit.TOKENS),
    )
    return check_result("speculative-decoding", figures.requests, *facts, serious=False)
