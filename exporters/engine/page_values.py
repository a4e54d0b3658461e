"""Single values of a /metrics page, found without parsing the whole page.

Of a page of 63 kB a few values take 0.1 ms; the parser of whole pages takes 37."""

from __future__ import annotations

import re

from exporters.catalogue import vllm
from exporters.catalogue.metric import Kind, Metric
from exporters.engine.liveness import StepValues


def finders(metric: Metric, labels: str = r"(?:\{.*\})?") -> list[re.Pattern[bytes]]:
    """Return a pattern of the values for each name that the metric has had; of a histogram, of its count."""
    part = "_count" if metric.kind is Kind.HISTOGRAM else ""
    return [re.compile(f"\n{re.escape(name + part)}{labels} (\\S+)".encode()) for name in metric.names]


def texts(page: bytes, *patterns: re.Pattern[bytes]) -> list[bytes]:
    """Return the values under the first name that is there: releases that renamed a metric showed it under both names
    for a while."""
    return next((found for pattern in patterns if (found := pattern.findall(page))), [])


def numbers(page: bytes, *patterns: re.Pattern[bytes]) -> list[float]:
    """Return the same as numbers. Raises ValueError."""
    return list(map(float, texts(page, *patterns)))


# Each step of decoding moves the first two; a chunk of a prefill moves only the cache usage and the last two, which not
# every engine has. The others move when a request begins or ends.
_MOVING = [
    finders(metric)
    for metric in (
        vllm.ITERATION_TOKENS,
        vllm.GENERATION_TOKENS,
        vllm.PROMPT_TOKENS,
        vllm.PREFIX_CACHE_QUERIES,
        vllm.REQUEST_SUCCESS,
        vllm.KV_CACHE_USAGE,
        vllm.NUM_REQUESTS_RUNNING,
        vllm.NUM_REQUESTS_WAITING,
        vllm.ESTIMATED_FLOPS_PER_GPU,
        vllm.LORA_REQUESTS_INFO,
    )
]
_RUNNING, _WAITING = finders(vllm.NUM_REQUESTS_RUNNING), finders(vllm.NUM_REQUESTS_WAITING)
_GENERATED = finders(vllm.GENERATION_TOKENS)
_IN_PROGRESS, _TO_START = (
    finders(vllm.NUM_REQUESTS_KV_FETCH_BY_STAGE, rf'\{{(?>.*?stage="{stage}").*\}}')
    for stage in ("in_progress", "waiting_to_start")
)
_AWAKE = finders(vllm.ENGINE_SLEEP_STATE, r'\{(?>.*?sleep_state="awake").*\}')


def step_values(page: bytes) -> StepValues | None:
    """Return the values that move with steps; None for a page without values of vLLM, or with something that is no
    number in their place."""
    page = b"\n" + page
    try:
        running, waiting = numbers(page, *_RUNNING), numbers(page, *_WAITING)
        in_progress, to_start = sum(numbers(page, *_IN_PROGRESS)), sum(numbers(page, *_TO_START))
        produced, awake = numbers(page, *_GENERATED), numbers(page, *_AWAKE)
    except ValueError:
        return None
    if not running:
        return None
    return StepValues(
        counters=tuple(text for patterns in _MOVING for text in texts(page, *patterns)),
        running=sum(running),
        waiting=sum(waiting),
        fetching=in_progress + to_start if in_progress else 0.0,  # those to start wait for those in progress
        produced=sum(produced) > 0,
        asleep=bool(awake) and not any(awake),
    )
