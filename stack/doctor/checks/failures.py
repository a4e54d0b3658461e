"""Checks for a hung engine, failed and rejected requests."""

from __future__ import annotations

from alerts import thresholds
from alerts.engine import FROZEN_FOR
from exporters.catalogue.metric import Unit
from exporters.text import parse_window
from stack.doctor.checks.case import ENOUGH, FEW, Case, CheckResult, Fact, check_result, sent_by
from stack.gateway.reasons import REASONS

# the prefill of 100,000 tokens at 10,000 a second takes ten, and nothing else may be made meanwhile
LEAST_STILL_S = 15.0
REFUSED_FOR_LOAD = ("team_limit", "queue_full", "est_wait", "queue_ttl")  # of the gateway, for load
_ITS_OWN = tuple(
    name
    for name, reason in REASONS.items()
    if reason.outcome == "rejected" and name not in (*REFUSED_FOR_LOAD, "engine_busy", "draining")
)


def seconds_still(case: Case) -> float | None:
    """Return the seconds, up to the end, in which requests ran or waited and no token was made; None where that is not
    known."""
    figures = case.figures
    if (
        figures.running is None
        or figures.waiting is None
        or figures.prompt_tokens is None
        or figures.generation_tokens is None
    ):
        return None
    if sent_by(case.gateway) > 0 and not figures.tokens:  # of which the engine's own page may not know
        return figures.seconds
    if figures.still_s is not None or figures.tokens or figures.running.lowest + figures.waiting.lowest <= 0:
        return figures.still_s
    return figures.seconds


def check_frozen(case: Case) -> CheckResult | None:
    """Find an engine that has work and makes no progress, up to the end. Several requests are better evidence than
    one, which may be a long prefill. The state by the gateway or the sidecar is better evidence than both."""
    figures, still_s = case.figures, seconds_still(case)
    if figures.hung:
        fact = Fact(f"engines in state hung ({', '.join(sorted(set(figures.hung)))})", len(figures.hung), Unit.COUNT)
        return check_result("frozen-engine", ENOUGH, fact, over=1.0)
    if case.one and figures.waits_on_purpose:
        return None
    if still_s is None or still_s < LEAST_STILL_S or figures.running is None or figures.waiting is None:
        return None
    sent = sent_by(case.gateway)
    held = max(1.0, figures.running.lowest + figures.waiting.lowest, sent)
    return check_result(
        "frozen-engine",
        _certainty(held, still_s),
        Fact("requests that run or wait, at least", held, Unit.REQUESTS),
        *[Fact("requests that the gateway has there, at least", sent, Unit.REQUESTS)] * bool(sent),
        Fact("tokens made", 0.0, Unit.TOKENS),
        Fact("for the last", still_s, Unit.SECONDS),
        *[Fact("tokens before that", figures.tokens, Unit.TOKENS)] * bool(figures.tokens),
        over=1.0,
    )


def _certainty(requests: float, still_s: float) -> float:
    """Return the amount of evidence, of ENOUGH, in requests that stand still for so many seconds."""
    return min(1.0, requests * still_s / parse_window(FROZEN_FOR)) * ENOUGH


def check_silent(case: Case) -> CheckResult | None:
    """Find an engine that answered the first scrape and then no other."""
    silent_s = case.figures.silent_s
    if silent_s is None or silent_s < LEAST_STILL_S:
        return None
    held = case.figures.running.highest if case.figures.running else 0.0
    facts = (
        Fact("the page does not answer for the last", silent_s, Unit.SECONDS),
        Fact("requests that ran before, at most", held, Unit.REQUESTS),
    )
    return check_result("frozen-api-server", _certainty(max(1.0, held), silent_s), *facts, over=1.0)


def check_errors(case: Case) -> CheckResult | None:
    """Find errors, as clients saw them, else by the engine and its HTTP answers, rejections left out."""
    if case.clients:
        failed = sum(case.clients.outcomes.get(outcome, 0.0) for outcome in ("upstream_error", "timeout"))
        whole = case.clients.requests
    else:
        figures = case.figures
        answered = figures.http.get("5xx", 0.0) - sum(figures.rejections.values())
        failed = max(figures.finished.get("error", 0.0), answered)
        whole = max(sum(figures.finished.values()), sum(figures.http.values()))
    limit, few = case.at(thresholds.ERROR_RATIO), case.at(FEW)
    if not whole or failed < few.value or failed / whole <= limit.value:
        return None
    return check_result(
        "errors",
        whole,
        Fact("of the requests fail", failed / whole, Unit.RATIO, limit),
        Fact("failed", failed, Unit.REQUESTS),
    )


def check_client_errors(case: Case) -> CheckResult | None:
    limit, few = case.at(thresholds.REFUSAL_RATIO), case.at(FEW)
    if case.clients and case.clients.reasons:
        wrong, whole = sum(case.clients.reasons.get(reason, 0.0) for reason in _ITS_OWN), case.clients.requests
    else:
        wrong, whole = case.figures.http.get("4xx", 0.0), sum(case.figures.http.values())
    if not whole or wrong < few.value or wrong / whole <= limit.value:
        return None
    facts = (
        Fact("of the requests are refused for what they say", wrong / whole, Unit.RATIO, limit),
        Fact("refused", wrong, Unit.REQUESTS),
    )
    return check_result("wrong-requests", whole, *facts, serious=False)


def check_rejections(case: Case) -> CheckResult | None:
    limit = case.limit_of(thresholds.ENGINE_REFUSALS)
    refused = sum(case.figures.rejections.values())
    if refused < limit.value:
        return None
    by_reason = [
        Fact(f"by {reason}", count, Unit.REQUESTS) for reason, count in sorted(case.figures.rejections.items()) if count
    ]
    return check_result(
        "rejections",
        refused + case.figures.requests,
        Fact("refused by the engine", refused, Unit.REQUESTS, limit),
        *by_reason,
    )


def check_deferred(case: Case) -> CheckResult | None:
    deferred = case.figures.deferred
    if deferred is None or deferred.lowest <= 0:
        return None
    held = Fact("held back at every scrape, at least", deferred.lowest, Unit.REQUESTS)
    return check_result("deferred-requests", case.figures.requests + deferred.lowest, held, serious=False, over=0.5)
