"""Records of one run, and the engine's counters around it -> figures. Pure.

What each figure means stands in result.py. What was not measured has no figure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from exporters.catalogue import vllm
from exporters.catalogue.exposition_parser import Exposition
from exporters.catalogue.metric import Metric
from exporters.requests.record import RequestRecord
from exporters.statistics import quantiles
from stack.bench.workload import Slo

GIB = 1 << 30
GB = 10**9
TIMES = ("ttft_ms", "tpot_ms", "e2e_ms")
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Startup:
    """What an engine's start-up log says of its memory, in bytes, and how many tokens its KV cache holds. used:
    weights, the peak of a forward pass, and whatever else is not the KV cache's. concurrency: how many requests of
    longest_tokens the cache holds at once."""

    used: float | None = None
    kv: float | None = None
    kv_tokens: int | None = None
    weights: float | None = None
    concurrency: float | None = None
    longest_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Around:
    """The engine's page before and after a run, the most of the KV cache that was in use meanwhile (0 to 1), and what
    the driver showed at most."""

    before: Exposition
    after: Exposition
    model: str
    kv_peak_ratio: float | None = None
    driver_bytes: float | None = None
    startup: Startup = Startup()


def met(slo: Slo, record: RequestRecord) -> bool:
    """Whether an answer keeps to all that is asked; a time that is not known keeps to nothing, but for the TPOT of a
    single token."""
    if record.outcome != "ok":
        return False
    tpot_ms = 0.0 if record.tpot_ms is None and record.completion_tokens == 1 else record.tpot_ms
    pairs = ((slo.ttft_ms, record.ttft_ms), (slo.tpot_ms, tpot_ms), (slo.e2e_ms, record.e2e_ms))
    return all(limit is None or (time is not None and time <= limit) for limit, time in pairs)


def figures(
    records: Sequence[RequestRecord], seconds: float, slo: Slo, around: Around | None = None
) -> dict[str, float]:
    """All figures of a run that took so long."""
    found: dict[str, float] = {}
    for kind in sorted({record.team for record in records if record.team}):
        its = [record for record in records if record.team == kind]
        found |= {f"{kind}:{name}": value for name, value in _of_requests(its, seconds, slo)}
    found |= dict(_of_requests(records, seconds, slo))
    if around:
        found |= dict(_of_engine(around))
    return found


def _of_requests(records: Sequence[RequestRecord], seconds: float, slo: Slo) -> Iterator[tuple[str, float]]:
    good = [record for record in records if record.outcome == "ok"]
    for name in TIMES:
        if values := [value for record in good if (value := getattr(record, name)) is not None]:
            yield f"{name}.mean", fmean(values)
            yield from zip(
                (f"{name}.{label}" for label in QUANTILES), quantiles(values, QUANTILES.values()), strict=True
            )
    if records:
        yield "error_ratio", 1 - len(good) / len(records)
    if seconds > 0:
        yield "qps", len(good) / seconds
        prompt, completion = (
            _known(getattr(record, name) for record in good) for name in ("prompt_tokens", "completion_tokens")
        )
        if completion is not None:
            yield "tokens_per_second", completion / seconds
            if prompt is not None:
                yield "total_tokens_per_second", (prompt + completion) / seconds
        if slo != Slo():
            yield "goodput_qps", sum(met(slo, record) for record in records) / seconds


def _known(values: Iterable[int | None]) -> int | None:
    """The sum, if every one of them is known."""
    found = list(values)
    return None if not found or None in found else sum(value for value in found if value is not None)


def _of_engine(around: Around) -> Iterator[tuple[str, float]]:
    grown = partial(_grown, around)
    queued, queued_s = grown(vllm.REQUEST_QUEUE_TIME, "_count"), grown(vllm.REQUEST_QUEUE_TIME, "_sum")
    if queued and queued_s is not None:
        yield "queue_ms.mean", 1000 * queued_s / queued
    asked, hit = grown(vllm.PREFIX_CACHE_QUERIES), grown(vllm.PREFIX_CACHE_HITS)
    if asked and hit is not None:
        yield "hit_ratio", hit / asked
    elif cache_labels(around.after).get("enable_prefix_caching") == "False":
        yield "hit_ratio", 0.0  # it is off: nothing can hit, and nothing is asked
    for name, metric in (
        ("preemptions", vllm.NUM_PREEMPTIONS),
        ("prompt_tokens", vllm.PROMPT_TOKENS),
        ("completion_tokens", vllm.GENERATION_TOKENS),
    ):
        if (value := grown(metric)) is not None:
            yield name, value
    if around.kv_peak_ratio is not None:
        yield "kv_peak_ratio", around.kv_peak_ratio
        if (used := around.startup.used) is not None and (kv := _kv_bytes(around)) is not None:
            yield "memory_peak_gb", (used + around.kv_peak_ratio * kv) / GB
    if around.driver_bytes is not None:
        yield "driver_memory_gb", around.driver_bytes / GB


def _kv_bytes(around: Around) -> float | None:
    """The whole KV cache. The page says it where it was set, the log where it was worked out."""
    try:
        return float(cache_labels(around.after).get("kv_cache_memory_bytes", ""))
    except ValueError:
        return around.startup.kv


def _grown(around: Around, metric: Metric, part: str = "") -> float | None:
    """How much a counter grew for the model, over all its engine cores; None where the page does not show it, or it
    fell."""
    before, after = (page.total(metric.name + part, model_name=around.model) for page in (around.before, around.after))
    return None if after is None or (grown := after - (before or 0.0)) < 0 else grown


def cache_labels(page: Exposition) -> Mapping[str, str]:
    """What the engine says of its cache: the labels of its first core."""
    return next((labels for labels, _ in page.of(vllm.CACHE_CONFIG_INFO.name)), {})


# "Actual usage is 15.1 GiB for consumed memory (weights + non-torch), 1.4 GiB for peak activation, and 0.5 GiB for
# CUDAGraph memory."
_USED = re.compile(r"Actual usage is (.*?memory)\b(?=\. )")
_PART = re.compile(r"([\d.]+) GiB for ")
# on GPUs; on CPUs
_KV = re.compile(
    r"Available KV cache memory: ([\d.]+) GiB|(?:Explicitly|Auto) set \(([\d.]+)/[\d.]+\) GiB for KV cache"
)
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_WEIGHTS = re.compile(r"Model loading took ([\d.]+) Gi?B")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")


def startup(log: str) -> Startup:
    """What vLLM said when it started. Of several workers the first one; what it did not say is None."""
    used, kv, tokens, weights, most = (each.search(log) for each in (_USED, _KV, _KV_TOKENS, _WEIGHTS, _CONCURRENCY))
    return Startup(
        used=sum(map(float, _PART.findall(used[1]))) * GIB if used else None,
        kv=float(kv[1] or kv[2]) * GIB if kv else None,
        kv_tokens=int(tokens[1].replace(",", "")) if tokens else None,
        weights=float(weights[1]) * GIB if weights else None,
        concurrency=float(most[2]) if most else None,
        longest_tokens=int(most[1].replace(",", "")) if most else None,
    )
