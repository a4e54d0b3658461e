"""Checks for late first tokens: long prompts, prefix cache, API server."""

from __future__ import annotations

from alerts import thresholds
from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit
from stack.doctor.checks.case import (
    FAR_LONGER,
    STRETCHED,
    Case,
    CheckResult,
    Fact,
    check_result,
    p95_fact,
    steps_are_slow,
    ttft_p95,
)
from stack.doctor.checks.queue import check_kv_full, check_preempted, check_queue, queue_leads, waited
from stack.doctor.evidence import EngineSnapshot
from stack.doctor.prompt_work import (
    PROMPT_WORK,
    SMALL_STEP,
    many_steps_long,
    tokens_of_a_prompt_step,
    tokens_per_step,
)  # fmt: skip

# of those that began, so many more or fewer ended: the figures of both are then of nearly the same ones
SAME_REQUESTS = 0.1
LONG_PROMPT = Threshold(
    "long_prompt",
    256.0,
    Unit.TOKENS,
    "Of shorter prompts hardly a block is whole, so the cache could not hold what they share.",
    "16 blocks of 16 tokens, the block size of vLLM on GPUs.",
)

OUTSIDE = Threshold(
    "outside",
    0.5,
    Unit.RATIO,
    "Where queue and prefill are not half of the wait for a first token, most of it was before them.",
    "Judgement.",
)
MOSTLY_PREFILL = Threshold(
    "mostly_prefill",
    2 / 3,
    Unit.RATIO,
    "Where two thirds of a request's time go into its prompt, the prompt is too long, whatever is reused of it.",
    "Judgement.",
)
WORTH_IT = Threshold(
    "worth_it",
    0.1,
    Unit.RATIO,
    "What takes less than a tenth of a request's time is not worth a change while nobody waits for it.",
    "Judgement.",
)


def check_prefill(case: Case) -> CheckResult | None:
    """Find late first tokens of which computing prompts is the largest part: nothing is reused, or prompts are long."""
    figures = case.figures
    if figures.prefill is None or queue_leads(case) or check_api_server(case):
        return None
    name = _why_prefill(case)
    share = [
        Fact("of a request's time is prefill", part, Unit.RATIO)
        for area, part in figures.shares.items()
        if area == "prefill"
    ]
    late = ttft_p95(case)
    facts = (*late, Fact("prefill, mean", figures.prefill.mean, Unit.SECONDS), *share, *_reused(case))
    if any(fact.over for fact in late):
        return check_result(name, figures.requests, *facts, over=late[0].over)
    matters = figures.shares.get("prefill", 0.0) > WORTH_IT.value
    return (
        check_result(name, figures.requests, *facts, serious=False, over=0.5)
        if name != "prefill-bound" and matters
        else None
    )


def check_computed_anew(case: Case) -> CheckResult | None:
    """Find prompts that are computed in full where something other than their own prefill is late: a queue, or the gaps
    between tokens.

    vLLM counts the wait for a place in a step as queue time and the steps of others' prompts as decode time, so both
    lead where prompts are to blame. A cache that is off is an option and as serious as what it makes late; that prompts
    share nothing may be their nature and is a note."""
    figures, work = case.figures, tokens_per_step(case.figures)
    name = "cache-off" if figures.caching is False else "unique-prompts" if _nothing_reused(case) else ""
    if (
        not name
        or not _long_prompts(figures)
        or _pooling(figures)
        or work is None
        or work <= PROMPT_WORK.value
        or check_prefill(case)
    ):
        return None
    held_up = [found for check in (check_preempted, check_kv_full, check_queue) if (found := check(case))]
    if not held_up and not steps_are_slow(case):
        return None
    gaps = (
        [p95_fact("time between tokens p95", figures.between_tokens, case.at(thresholds.INTER_TOKEN_P95))]
        if figures.between_tokens
        else []
    )
    late = (*(waited(case) if held_up else ()), *gaps)
    serious = name == "cache-off" and (steps_are_slow(case) or any(found.serious for found in held_up))
    over = max(fact.over for fact in (*late, *(fact for found in held_up for fact in found.facts)))
    facts = (*late, Fact("computed prompt tokens per step, mean", work, Unit.TOKENS, PROMPT_WORK), *_reused(case))
    return check_result(name, figures.requests, *facts, serious=serious, over=over)


def check_small_steps(case: Case) -> CheckResult | None:
    """Find long prompts that are computed in many small steps."""
    figures, tokens = case.figures, tokens_of_a_prompt_step(case.figures)
    if not case.one or tokens is None or not 0 < tokens < SMALL_STEP.value or not many_steps_long(figures):
        return None
    late = (*ttft_p95(case), *(waited(case) if queue_leads(case) else ()))
    felt = any(fact.over for fact in late)
    small = Fact("prompt tokens per step, about", tokens, Unit.TOKENS, SMALL_STEP, least=True)
    return check_result(
        "small-steps", figures.requests, *dict.fromkeys(late), small, *_reused(case), serious=felt, over=small.over
    )


def _reused(case: Case) -> tuple[Fact, ...]:
    """Return how long prompts are and how much of them comes from the prefix cache."""
    figures, reused = case.figures, case.at(thresholds.CACHE_HITS_BEFORE)
    prompts = [Fact("prompt, mean", figures.prompt_length.mean, Unit.TOKENS)] if figures.prompt_length else []
    hits = (
        []
        if figures.hit_ratio is None
        else [Fact("of the prompt tokens found in the cache", figures.hit_ratio, Unit.RATIO, reused, least=True)]
    )
    return (*prompts, *hits, *([Fact("prefix caching", 0.0, Unit.FLAG)] if figures.caching is False else []))


def _long_prompts(figures: EngineSnapshot) -> bool:
    return figures.prompt_length is not None and figures.prompt_length.mean >= LONG_PROMPT.value


def check_api_server(case: Case) -> CheckResult | None:
    """Find late first tokens of which neither queue nor prefill is the cause. These two are counted when a request
    ends, first tokens as they come: only where as many end as begin do they speak of the same requests. A core that
    computes or stands still takes in nothing new, so up to the longest gap between tokens that wait is its own."""
    figures, first = case.figures, case.figures.ttft
    queue, prefill, steps, begun, ended = (
        figures.queue,
        figures.prefill,
        figures.between_tokens,
        figures.begun,
        figures.ended,
    )
    if first is None or queue is None or prefill is None or steps is None or not begun or not ended:
        return None
    if figures.waiting is None or figures.waiting.highest > 0 or abs(begun - ended) > SAME_REQUESTS * begun:
        return None
    before_s = first.mean - queue.mean - prefill.mean
    outside = Fact(
        "of the time to first token is neither queue nor prefill", before_s / first.mean, Unit.RATIO, OUTSIDE
    )
    if not outside.over or before_s <= steps.most or not any(fact.over for fact in ttft_p95(case)):
        return None
    means = (
        Fact(f"{name}, mean", spread.mean, Unit.SECONDS)
        for name, spread in (("queue time", queue), ("prefill", prefill))
    )
    return check_result("api-server-bound", figures.requests, *ttft_p95(case), outside, *means)


def check_reuse(case: Case) -> CheckResult | None:
    """Find prompts of which nothing is reused, beside a prefill that is too long."""
    figures, first = case.figures, check_prefill(case)
    if first is None or first.name != "prefill-bound" or figures.caching is False or not _nothing_reused(case):
        return None
    hits = Fact(
        "of the prompt tokens found in the cache",
        figures.hit_ratio or 0.0,
        Unit.RATIO,
        case.at(thresholds.CACHE_HITS_BEFORE),
        least=True,
    )
    return check_result("unique-prompts", figures.requests, hits, serious=False, over=0.5)


def _why_prefill(case: Case) -> str:
    """Name the cause of a long prefill: its amount where it is most of a request's time, else missing reuse first."""
    figures = case.figures
    long = _long_prompts(figures)
    if figures.caching is False and long and not _pooling(figures):
        return "cache-off"
    most = figures.shares.get("prefill", 0.0) > MOSTLY_PREFILL.value
    return "unique-prompts" if long and not most and _nothing_reused(case) else "prefill-bound"


def _nothing_reused(case: Case) -> bool:
    ratio = case.figures.hit_ratio
    return ratio is not None and ratio < case.at(thresholds.CACHE_HITS_BEFORE).value and not _pooling(case.figures)


def _pooling(figures: EngineSnapshot) -> bool:
    """Return True for embeddings and scores: nothing is generated, prompts share nothing, and some of these models have
    no prefix cache."""
    return figures.generation_tokens == 0 and figures.requests > 0


def check_head_of_line(case: Case) -> CheckResult | None:
    """Find a tail of latencies that a few long prompts explain: their own prefill is as long as the tail, or a good
    part of it. A long prompt's own first token is late anyhow: more must be late than are long."""
    figures = case.figures
    lengths = figures.prompt_length
    if lengths is None or lengths.at(99) < FAR_LONGER.value * max(lengths.at(50), 1.0):
        return None
    far = Fact("prompt length, p99 over median", lengths.at(99) / max(lengths.at(50), 1.0), Unit.NONE, FAR_LONGER)
    long = lengths.above(FAR_LONGER.value * lengths.at(50))
    for name, what, spread, threshold in (
        ("head-of-line-first", "time to first token", figures.ttft, thresholds.TTFT_P95),
        ("head-of-line", "time between tokens", figures.between_tokens, thresholds.INTER_TOKEN_P95),
    ):
        limit = case.at(threshold)
        if spread is None or spread.at(99) <= limit.value or spread.at(99) <= STRETCHED.value * spread.at_most(50):
            continue
        if figures.prefill and spread.at(99) > FAR_LONGER.value * figures.prefill.at_most(99):
            continue
        if spread is figures.ttft and spread.above(STRETCHED.value * spread.at_most(50)) <= 1.5 * long:
            continue
        tail = Fact(f"{what}, p99 over median", spread.at(99) / spread.at_most(50), Unit.NONE, STRETCHED)
        p99 = Fact(f"{what} p99", spread.at(99), Unit.SECONDS, limit)
        # one short pause in a hundred is not
        felt = spread.at(95) > limit.value or spread.at(99) > STRETCHED.value * limit.value
        return check_result(
            name,
            figures.requests,
            tail,
            p99,
            far,
            Fact("of the prompts are that long", long, Unit.RATIO),
            serious=felt,
            over=tail.over,
        )
    return None
