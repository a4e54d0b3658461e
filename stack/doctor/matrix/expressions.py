"""PromQL that several rows of the tuning matrix show."""

from __future__ import annotations

from exporters.catalogue import promql, vllm
from exporters.catalogue.metric import Metric


def percentile(percent: int, metric: Metric, window: str = promql.WINDOW) -> str:
    """Return the query of a percentile of a histogram."""
    return promql.quantile(percent / 100, metric, window)


WAITING = promql.lowest(vllm.NUM_REQUESTS_WAITING, by=promql.EACH)
RUNNING = promql.average(vllm.NUM_REQUESTS_RUNNING, by=promql.EACH)
KV_USAGE = promql.worst(vllm.KV_CACHE_USAGE, promql.EACH)
QUEUE_TIME, PREFILL_TIME = promql.mean(vllm.REQUEST_QUEUE_TIME), promql.mean(vllm.REQUEST_PREFILL_TIME)
TTFT, TOKEN_GAPS = percentile(95, vllm.TIME_TO_FIRST_TOKEN), percentile(95, vllm.INTER_TOKEN_LATENCY)
HITS = promql.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES)
PROMPTS = promql.mean(vllm.REQUEST_PROMPT_TOKENS)
ACCEPTED = promql.share(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, vllm.SPEC_DECODE_NUM_DRAFT_TOKENS)
FAR_LONGER = f"{percentile(99, vllm.REQUEST_PROMPT_TOKENS)} / ({percentile(50, vllm.REQUEST_PROMPT_TOKENS)} > 0)"
