"""Estimators of what an engine's steps compute, from counters alone. Pure.

vLLM shows neither the size of a step nor which steps held prompt tokens: a prompt is counted as a whole, when its first
token comes. So these are means over all steps that gave a token. Where nobody is answered, steps that compute prompts
give none and are missing from the count."""

from __future__ import annotations

from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit
from stack.doctor.evidence import EngineSnapshot

PROMPT_WORK = Threshold(
    "prompt_work",
    64.0,
    Unit.TOKENS,
    "With so many prompt tokens in the mean step, computing prompts and not reading weights is a good part of what the"
    " engine does.",
    "Arithmetic: a GPU reads its weights in the time in which it computes some 200 to 300 tokens (H100: 989 TFLOP/s"
    " over 3.35 TB/s), so 64 are a quarter of a step. Recorded engines that queue for places have 1 to 51.",
)

LONG_STEP = Threshold(
    "long_step",
    256.0,
    Unit.TOKENS,
    "A step that computes so many prompt tokens takes longer for them than for reading the weights, so they are what"
    " lengthens it.",
    "The same arithmetic. Recorded engines whose steps are long for the number of answers alone stay below 160.",
)
SMALL_STEP = Threshold(
    "small_step",
    512.0,
    Unit.TOKENS,
    "A step of so few tokens leaves a GPU's arithmetic idle while it reads the weights, and a long prompt pays for that"
    " dozens of times.",
    "Twice the tokens at which reading and computing take equally long; vLLM's own default is 2,048 or more. Recorded"
    " on a CPU, once each: 15 prompts of 20,000 tokens in a minute with steps of 256, 20 with steps of 2,048.",
)
LONG_FOR_STEPS = Threshold(
    "long_for_steps",
    4096.0,
    Unit.TOKENS,
    "A prompt that would take one or two steps of the default size gains little from larger ones.",
    "Twice vLLM's smallest default of --max-num-batched-tokens.",
)
# of the time prompts are computed while others are answered, at least; else gaps between tokens do not tell of steps
# with prompts
OVERLAP = 0.5
UNEVEN = 2.0  # times the median gap; steps of one kind are of nearly one length
LEAST_SHARE = 0.05  # of the gaps; a p95 over its limit says that there are so many


def computed_tokens(figures: EngineSnapshot) -> float | None:
    """Return the prompt tokens that were computed: those that were not found in the cache."""
    return None if figures.prompt_tokens is None else max(figures.prompt_tokens - (figures.hits or 0.0), 0.0)


def tokens_per_step(figures: EngineSnapshot) -> float | None:
    """Return the computed prompt tokens per step that gave a token, in the mean.

    Without the engine's histogram of steps: each step gives every request that is answered one gap between tokens."""
    computed, steps = computed_tokens(figures), figures.steps
    if not steps and figures.between_tokens and figures.running and figures.running.mean > 0:
        steps = figures.between_tokens.count / figures.running.mean
    return computed / steps if steps and computed is not None else None


def tokens_per_long_step(figures: EngineSnapshot, limit_s: float) -> float | None:
    """Return the prompt tokens in the mean step that is longer than a limit, if all of them were computed in those.
    None where gaps are even and mostly short, so that prompts do not explain long steps, or where it is unknown."""
    gaps, work = figures.between_tokens, tokens_per_step(figures)
    if gaps is None or work is None:
        return None
    long = max(gaps.above(limit_s), LEAST_SHARE)
    uneven = gaps.at(95) >= UNEVEN * gaps.at_most(50)
    mostly_prompts = figures.running is not None and work > figures.running.mean
    return work / long if uneven or (long >= 0.5 and mostly_prompts) else None


def tokens_of_a_prompt_step(figures: EngineSnapshot) -> float | None:
    """Return about how many tokens of prompts a step computes while any are computed. Of one engine alone.

    Tokens of prompts x seconds of a step / seconds in which prompts are computed. A step is as long as the gap that it
    makes between the tokens of others; None unless others are answered most of that time. Requests whose prefills
    overlap share steps, and each counts its part."""
    gaps, prefill, computed, steps = figures.between_tokens, figures.prefill, computed_tokens(figures), figures.steps
    if gaps is None or prefill is None or computed is None or not steps or prefill.total <= 0:
        return None
    in_prefill_s, answering_s = (min(part, figures.seconds) for part in (prefill.total, steps * gaps.mean))
    if in_prefill_s + answering_s < (1 + OVERLAP) * figures.seconds:
        return None
    return computed * gaps.mean_of_time / prefill.total


def step_matters(figures: EngineSnapshot) -> bool:
    """Return True if small steps would matter and are unknown: prompts are long, and nobody is answered beside them."""
    return many_steps_long(figures) and tokens_of_a_prompt_step(figures) is None


def many_steps_long(figures: EngineSnapshot) -> bool:
    """Return whether what is computed of the mean prompt takes more than one or two steps of the default size."""
    return (
        figures.prompt_length is not None
        and figures.prompt_length.mean * (1 - (figures.hit_ratio or 0.0)) >= LONG_FOR_STEPS.value
    )
