"""Estimators of what an engine's steps compute, from counters alone. Pure.

vLLM shows neither the size of a step nor which steps held prompt tokens: a prompt is counted as a whole, when its first token comes. So these are
means over all steps that gave a token. Where nobody is answered, steps that compute prompts give none and are missing from the count."""

from __future__ import annotations

from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit
from stack.doctor.evidence import Figures

PROMPT_WORK = Threshold(
    "prompt_work", 64.0, Unit.TOKENS,
    "With so many prompt tokens in the mean step, computing prompts and not reading weights is a good part of what the engine does.",
    "Arithmetic: a GPU reads its weights in the time in which it computes some 200 to 300 tokens (H100: 989 TFLOP/s over 3.35 TB/s), so 64 are "
    "a quarter of a step. Recorded engines that queue for places have 1 to 51.",
)  # fmt: skip


def computed_tokens(figures: Figures) -> float | None:
    """Return the prompt tokens that were computed: those that were not found in the cache."""
    return None if figures.prompt_tokens is None else max(figures.prompt_tokens - (figures.hits or 0.0), 0.0)


def tokens_per_step(figures: Figures) -> float | None:
    """Return the computed prompt tokens per step that gave a token, in the mean.

    Without the engine's histogram of steps: each step gives every request that is answered one gap between tokens."""
    computed, steps = computed_tokens(figures), figures.steps
    if not steps and figures.between_tokens and figures.running and figures.running.mean > 0:
        steps = figures.between_tokens.count / figures.running.mean
    return computed / steps if steps and computed is not None else None
