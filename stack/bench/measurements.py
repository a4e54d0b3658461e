"""Metrics of one run, from its records and the engine's counters around it. Pure.

result.py defines each metric. What was not measured is omitted."""

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
    """Memory of an engine in bytes, and tokens of its KV cache, from its start-up log. used: weights, the peak of a
    forward pass, and all else but the KV cache. concurrency: number of requests of longest_tokens that the cache
    holds."""

    used: float | None = None
    kv: float | None = None
    kv_tokens: int | None = None
    weights: float | None = None
    concurrency: float | None = None
    longest_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Around:
    """Metrics of the engine before and after a run, peak KV cache usage meanwhile (0 to 1), and peak memory by the
    driver."""

    before: Exposition
    after: Exposition
    model: str
    kv_peak_ratio: float | None = None
    driver_bytes: float | None = None
    startup: Startup = Startup()


def met(slo: Slo, record: RequestRecord) -> bool:
    """Return True if an answer meets all limits. An unknown time meets none, except the TPOT of a single token, and of
    tokens that arrived together or that the engine hid: no time between two of them is more than that since the first
    one."""
    if record.outcome != "ok":
        return False
    tpot_ms = 0.0 if record.completion_tokens == 1 and record.tpot_ms is None else record.tpot_ms
    if tpot_ms is None and record.ttft_ms is not None and record.e2e_ms is not None and record.completion_tokens:
        tpot_ms = record.e2e_ms - record.ttft_ms
    pairs = ((slo.ttft_ms, record.ttft_ms), (slo.tpot_ms, tpot_ms), (slo.e2e_ms, record.e2e_ms))
    return all(limit is None or (time is not None and time <= limit) for limit, time in pairs)


def arrived_together(record: RequestRecord) -> bool:
    """Return True for an answer of several tokens that all came in one read, so that no time between them is known."""
    several = (record.completion_tokens or 0) > 1
    return several and record.outcome == "ok" and record.ttft_ms is not None and record.tpot_ms is None


def without_tpot(records: Iterable[RequestRecord]) -> tuple[int, int]:
    """Return the answers of which TPOT is unknown because they came in one read, and all answers of several tokens.

    Where they are more than half, TPOT of the others would stand for a minority, and is omitted."""
    several = [r for r in records if r.outcome == "ok" and (r.completion_tokens or 0) > 1]
    return sum(map(arrived_together, several)), len(several)


def figures(
    records: Sequence[RequestRecord], seconds: float, slo: Slo, around: Around | None = None
) -> dict[str, float]:
    """Return all metrics of a run of this duration."""
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
    together, several = without_tpot(good)
    for name in TIMES:
        if name == "tpot_ms" and 2 * together > several:
            continue
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
    """Return the sum, or None if a value is unknown."""
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
    """Return the size of the KV cache: a label where it was configured, in the start-up log where it was computed."""
    try:
        return float(cache_labels(around.after).get("kv_cache_memory_bytes", ""))
    except ValueError:
        return around.startup.kv


def _grown(around: Around, metric: Metric, part: str = "") -> float | None:
    """Return the increase of a model's counter over all its engine cores; None where it is missing or fell."""
    before, after = (page.total(metric.name + part, model_name=around.model) for page in (around.before, around.after))
    return None if after is None or (grown := after - (before or 0.0)) < 0 else grown


def cache_labels(page: Exposition) -> Mapping[str, str]:
    """Return the labels of cache_config_info of the first engine core."""
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
    """Parse a start-up log of vLLM. Of several workers the first one counts; missing values are None."""
    used, kv, tokens, weights, most = (each.search(log) for each in (_USED, _KV, _KV_TOKENS, _WEIGHTS, _CONCURRENCY))
    return Startup(
        used=sum(map(float, _PART.findall(used[1]))) * GIB if used else None,
        kv=float(kv[1] or kv[2]) * GIB if kv else None,
        kv_tokens=int(tokens[1].replace(",", "")) if tokens else None,
        weights=float(weights[1]) * GIB if weights else None,
        concurrency=float(most[2]) if most else None,
        longest_tokens=int(most[1].replace(",", "")) if most else None,
    )
