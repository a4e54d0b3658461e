"""Checks for requests that wait in the engine: for a slot, for KV blocks, for capacity."""

from __future__ import annotations

import math
from dataclasses import replace

from alerts import thresholds
from alerts.engine import QUEUE_FOR
from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit
from exporters.text import parse_window
from stack.doctor.checks.case import (
    FEW,
    LEAST_SECONDS,
    ROOM,
    Case,
    CheckResult,
    Fact,
    check_result,
    p95_fact,
    quarter_fewer,
    running_and_waiting,
    state_of,
    steps_are_slow,
    ttft_p95,
)
from stack.doctor.evidence import Gauge

LEAST_LOOKS = 5  # at which somebody waits; of fewer, one that falls between two batches decides what runs then
# what runs while others wait, of the most: so much is all places taken, the latter where the cache is nearly empty
FULL, FULL_WITH_ROOM = 0.95, 0.75
NEARLY_EMPTY = Threshold(
    "nearly_empty",
    0.3,
    Unit.RATIO,
    "Where less than a third of the cache was ever in use, nobody waits for room in it.",
    "Judgement.",
)


def check_preempted(case: Case) -> CheckResult | None:
    """Find preemptions. No latency is needed for this: long answers may preempt for minutes before one of them ends."""
    figures, rate = case.figures, case.at(thresholds.PREEMPTIONS)
    preempted = figures.preemptions or 0.0
    per_second = Fact("preemptions per second", preempted / figures.seconds, Unit.COUNT, rate)
    if not per_second.over or preempted < case.at(FEW).value or figures.seconds < LEAST_SECONDS:
        return None
    facts = (per_second, Fact("preemptions", preempted, Unit.COUNT), *_used(case), *running_and_waiting(figures))
    found = check_result("kv-bound", max(figures.requests, preempted), *facts, over=per_second.over)
    return replace(found, new=quarter_fewer(case))


def check_kv_full(case: Case) -> CheckResult | None:
    """Find a queue whose cause is a full KV cache."""
    figures = case.figures
    waits = figures.waiting is not None and figures.waiting.lowest > 0
    if check_preempted(case) or not waits or not queue_leads(case) or not any(fact.over for fact in _used(case)):
        return None
    return check_result("kv-full", figures.requests, *_used(case), *waited(case), serious=_queue_matters(case))


def _used(case: Case) -> tuple[Fact, ...]:
    kv = case.figures.kv
    return (
        (Fact("of the KV cache in use at its fullest", kv.highest, Unit.RATIO, case.at(thresholds.KV_CACHE_USAGE)),)
        if kv
        else ()
    )


def check_queue(case: Case) -> CheckResult | None:
    """Find a wait over its limit, or one that delays first tokens, unless the cause is a full cache, another
    finding."""
    figures = case.figures
    crowded, waiting = figures.crowded, figures.waiting
    if crowded is None or waiting is None or check_preempted(case) or check_kv_full(case) or not queue_leads(case):
        return None
    facts = waited(case)
    if not any(fact.over for fact in facts):
        return None
    name = _whose_queue(case, crowded)
    ran = Fact("running while others wait, mean", crowded.mean)
    room = [Fact("of the KV cache in use at its fullest", figures.kv.highest, Unit.RATIO)] if figures.kv else []
    found = check_result(
        name,
        max(figures.requests, waiting.lowest),
        *facts,
        *running_and_waiting(figures),
        ran,
        *room,
        serious=_queue_matters(case),
    )
    known = name == "queue-bound" and case.one
    return replace(found, old=crowded.highest, new=math.ceil(1.5 * crowded.highest)) if known else found


def _whose_queue(case: Case, crowded: Gauge) -> str:
    """Name the cause of a queue: the scheduler's places, when about as many run as ever while others wait, else the
    engine's capacity. Two scrapes may not decide it."""
    kv = case.figures.kv
    if steps_are_slow(case) or (kv and kv.highest > ROOM.value):
        return "queue-at-capacity"
    full = FULL_WITH_ROOM if kv and kv.highest < NEARLY_EMPTY.value else FULL
    if crowded.mean >= full * crowded.highest > 0 and crowded.looks != 1:
        return "queue-bound"
    return "queue-unclear" if crowded.looks is not None and crowded.looks < LEAST_LOOKS else "queue-at-capacity"


def queue_leads(case: Case) -> bool:
    """Return True if waiting takes more time than computing prompts. Before enough requests end, a standing queue
    leads."""
    figures = case.figures
    if figures.queue is None or state_of(figures) == "thin":
        return bool(_standing(case))
    return figures.prefill is None or figures.queue.total > figures.prefill.total


def _standing(case: Case) -> tuple[Fact, ...]:
    """Find a queue over its limit at every scrape, while tokens are made."""
    figures, length = case.figures, case.at(thresholds.QUEUE_LENGTH)
    if (
        figures.waiting is None
        or figures.waiting.lowest <= length.value
        or not figures.tokens
        or figures.seconds < LEAST_SECONDS
    ):
        return ()
    return (Fact("requests wait at every scrape, at least", figures.waiting.lowest, Unit.REQUESTS, length),)


def _queue_matters(case: Case) -> bool:
    """Return True if an alert would fire: a wait over its limit, or a queue that stands for ten minutes and grows
    (VLLMQueueGrowing).

    A queue that only stands is how a busy engine works while all waits are within their limits."""
    figures, length = case.figures, case.at(thresholds.QUEUE_LENGTH).value
    grows = (
        figures.seconds >= parse_window(QUEUE_FOR) and figures.queue_rise is not None and figures.queue_rise >= length
    )
    standing = _standing(case)
    return any(fact.over for fact in waited(case) if fact not in standing) or (grows and bool(standing))


def expected_wait(case: Case, queue: Gauge | None) -> tuple[Fact, ...]:
    """Return the wait by Little's law, for a queue whose waits nobody measured."""
    figures = case.figures
    if queue is None or figures.begun is None or figures.seconds < LEAST_SECONDS:
        return ()
    wait_s = queue.lowest * figures.seconds / max(figures.begun, 1.0)
    return (
        Fact(
            "expected wait (waiting / first tokens per second)",
            wait_s,
            Unit.SECONDS,
            case.at(thresholds.QUEUE_TIME_P95),
        ),
    )


def waited(case: Case) -> tuple[Fact, ...]:
    queue = case.figures.queue
    if queue is None or state_of(case.figures) == "thin":
        standing = _standing(case)
        return (*standing, *(expected_wait(case, case.figures.waiting) if standing else ()))
    times = (
        p95_fact("queue time p95", queue, case.at(thresholds.QUEUE_TIME_P95)),
        Fact("queue time, mean", queue.mean, Unit.SECONDS),
    )
    return (*times, *_standing(case), *ttft_p95(case))
