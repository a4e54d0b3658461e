"""Reader of guidellm's benchmarks.json. Each of its benchmarks is a run of one load.

Its `time_per_output_token_ms` counts the first token in, and its `inter_token_latency_ms` ends with the last token, so
TPOT is computed from the times of each request. Requests that were in flight when a benchmark ended are not counted.
Source of the names: guidellm 0.8 benchmark/schemas/report.py and schemas/base/request_stats.py, report version 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from exporters.requests.record import RequestRecord, timestamp
from stack.bench.imported_run import VARIANT, ImportedRun, load_name, measured_run, milliseconds, outcome_of, tpot_ms
from stack.bench.result import BadBench, request_id
from stack.bench.workload import Slo

TOOL, WORKLOAD = "guidellm", "guidellm"
VERSION = 2  # of its report
SAME_PROMPTS = (
    "guidellm sends the same prompts again unless its seed changes: after another run, the prefix cache may have held"
    " them"
)
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


class GuidellmTimings(msgspec.Struct, frozen=True):
    """Unix seconds of one request."""

    request_start: _Seconds | None = None
    first_token_iteration: _Seconds | None = None
    request_end: _Seconds | None = None
    resolve_end: _Seconds | None = None


class GuidellmRequestInfo(msgspec.Struct, frozen=True):
    timings: GuidellmTimings
    error: str | None = None


class GuidellmRequest(msgspec.Struct, frozen=True):
    info: GuidellmRequestInfo
    prompt_tokens: _Tokens | None = None
    cached_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None


class GuidellmRequests(msgspec.Struct, frozen=True):
    successful: list[GuidellmRequest]
    errored: list[GuidellmRequest]
    incomplete: list[GuidellmRequest]


class GuidellmTotals(msgspec.Struct, frozen=True):
    successful: int
    errored: int
    incomplete: int


class GuidellmMetrics(msgspec.Struct, frozen=True):
    request_totals: GuidellmTotals


class GuidellmStrategy(msgspec.Struct, frozen=True):
    """type_: synchronous, concurrent, throughput, constant, poisson or trace."""

    type_: str
    streams: int | None = None
    rate: float | None = None
    max_concurrency: int | None = None


class GuidellmSlo(msgspec.Struct, frozen=True):
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


class GuidellmConfig(msgspec.Struct, frozen=True):
    strategy: GuidellmStrategy
    sample_size: int | None = None
    slo: GuidellmSlo | None = None
    backend: dict[str, Any] = {}


class GuidellmWarning(msgspec.Struct, frozen=True):
    message: str


class GuidellmBenchmark(msgspec.Struct, frozen=True):
    config: GuidellmConfig
    metrics: GuidellmMetrics
    requests: GuidellmRequests
    start_time: _Seconds
    end_time: _Seconds
    warnings: list[GuidellmWarning] = []


def is_guidellm(document: Any) -> bool:
    """Return True for a report of guidellm, of any version."""
    return isinstance(document, dict) and "benchmarks" in document


def benchmarks_of(place: str, document: Mapping[str, Any]) -> list[GuidellmBenchmark]:
    """Parse a report. Raises BadBench."""
    metadata = document.get("metadata")
    about = metadata if isinstance(metadata, dict) else {}
    if "guidellm_version" not in about:
        raise BadBench(f"{place} has benchmarks and no metadata.guidellm_version, so it is no report of guidellm")
    if about.get("version") != VERSION:
        raise BadBench(
            f"{place} is a report of version {about.get('version')} by guidellm {about['guidellm_version']}, and"
            f" version {VERSION} is read; measure again with guidellm 0.7 or later"
        )
    try:
        found = msgspec.convert(document["benchmarks"], list[GuidellmBenchmark])
    except msgspec.ValidationError as error:
        where = str(error).replace("`$[", "`$.benchmarks[")
        raise BadBench(f"{place} is no whole report of guidellm {about['guidellm_version']}: {where}") from error
    if not found:
        raise BadBench(f"{place} holds no benchmark: none of guidellm's loads ended; run it again")
    return found


def slo_of(benchmark: GuidellmBenchmark) -> Slo:
    """Return the objectives that guidellm was given."""
    own = benchmark.config.slo or GuidellmSlo()
    return Slo(ttft_ms=own.ttft_ms, tpot_ms=own.tpot_ms, e2e_ms=own.e2el_ms)


def guidellm_run(place: str, benchmark: GuidellmBenchmark, bench: str, number: int, slo: Slo) -> ImportedRun:
    """Return one benchmark as a run. Raises BadBench."""
    requests, totals = benchmark.requests, benchmark.metrics.request_totals
    kept, all_of_them = len(requests.successful), totals.successful
    if kept < all_of_them:
        raise BadBench(
            f"{place} holds {kept} of the {all_of_them} answers of a load, because of sample_size"
            f" {benchmark.config.sample_size}; run guidellm without it"
        )
    records = list(_records(benchmark, bench, number))
    point = _point(benchmark.config.strategy)
    if not records:
        raise BadBench(f"{place} holds no request that ended at the load {point}; give it more time")
    return measured_run(
        number, WORKLOAD, point, (benchmark.start_time, benchmark.end_time), records, slo, tuple(_caveats(benchmark))
    ), records


def workload_of(benchmark: GuidellmBenchmark) -> dict[str, Any]:
    """Return the workload that a benchmark describes, by the mean lengths of its answers."""
    about: dict[str, Any] = {"name": WORKLOAD, "load": _point(benchmark.config.strategy)}
    for name, key in (("input_tokens", "prompt_tokens"), ("output_tokens", "output_tokens")):
        lengths = [count for each in benchmark.requests.successful if (count := getattr(each, key)) is not None]
        if lengths:
            about[name] = round(sum(lengths) / len(lengths))
    return about


def model_of(benchmark: GuidellmBenchmark) -> str:
    model = benchmark.config.backend.get("model")
    return model if isinstance(model, str) else ""


def _point(strategy: GuidellmStrategy) -> str:
    match strategy.type_:
        case "synchronous":
            return "c1"
        case "concurrent":
            return load_name(None, strategy.streams)
        case _:
            return load_name(strategy.rate, None)


def _caveats(benchmark: GuidellmBenchmark) -> Iterator[str]:
    yield SAME_PROMPTS
    if unfinished := benchmark.metrics.request_totals.incomplete:
        yield (
            f"{unfinished} requests were in flight when the time of the load {_point(benchmark.config.strategy)} was"
            " over and are not counted, so percentiles may lack the slowest"
        )
    yield from (f"guidellm: {each.message}" for each in benchmark.warnings)


def _records(benchmark: GuidellmBenchmark, bench: str, number: int) -> Iterator[RequestRecord]:
    """Yield what ended within the measured time, without warm-up and cool-down."""
    ended = [(each, False) for each in benchmark.requests.successful]
    ended += [(each, True) for each in benchmark.requests.errored]
    for at, (each, failed) in enumerate(ended):
        times = each.info.timings
        end = times.request_end if times.request_end is not None else times.resolve_end
        start = times.request_start if times.request_start is not None else end
        if end is None or start is None or end < benchmark.start_time or start > benchmark.end_time:
            continue
        about = RequestRecord(
            request_id=request_id(bench, number, at),
            ts=timestamp(end),
            model=model_of(benchmark) or None,
            variant=VARIANT,
            prompt_tokens=each.prompt_tokens,
        )
        if failed:
            outcome, reason = outcome_of(each.info.error or "failed")
            yield msgspec.structs.replace(about, outcome=outcome, reason=reason)
            continue
        first, took_ms = times.first_token_iteration, milliseconds(end - start)
        ttft_ms = None if first is None else milliseconds(first - start)
        yield msgspec.structs.replace(
            about,
            cached_tokens=each.cached_tokens,
            completion_tokens=each.output_tokens,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms(ttft_ms, took_ms, each.output_tokens),
            e2e_ms=took_ms,
            outcome="ok",
        )
