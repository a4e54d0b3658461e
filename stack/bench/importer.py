"""Importer of results of other benchmark tools: of `vllm bench serve` (--save-result) and of AIPerf
(profile_export.jsonl).

Invariant: missing values are omitted, and every doubt about a value is a caveat of the run.
Source of the names: vLLM 0.32 benchmarks/serve.py, AIPerf 0.13 "Working with Profile Export Files". vLLM's
`latencies` are durations of requests; releases without it have the TTFT and the ITLs, which add up to it. Neither
tool records the engine."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from exporters.requests.record import Outcome, RequestRecord, timestamp
from stack.bench.measurements import figures
from stack.bench.result import BadBench, Bench, BenchEngine, BenchVariant, Run, request_id
from stack.bench.workload import Slo

VARIANT, WORKLOAD = "imported", "vllm-bench-serve"
NO_SLO = Slo()
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
_SAME_PROMPTS = (
    "vllm bench serve sends the same prompts again unless --seed changes: after another run, the prefix cache may have"
    " held them"
)
_NO_ZONE = "the times are those of the clock where it ran, read as UTC, since the file names no zone"
_NO_DETAIL = "the file holds no single requests; with --save-detailed it would"


class VllmResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result file of `vllm bench serve`. Lists have an item for each request, with --save-detailed."""

    duration: _Seconds
    completed: int
    model_id: str
    failed: int | None = None
    date: str | None = None
    num_prompts: int | None = None
    request_rate: float | str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None
    input_lens: list[_Tokens] | None = None
    output_lens: list[_Tokens] | None = None
    ttfts: list[_Seconds] | None = None
    itls: list[list[_Seconds]] | None = None
    latencies: list[_Seconds] | None = None
    start_times: list[_Seconds] | None = None
    errors: list[str | None] | None = None


class AiperfValue(msgspec.Struct, frozen=True):
    value: Any = None
    unit: str | None = None


class AiperfAbout(msgspec.Struct, frozen=True):
    request_start_ns: int
    request_end_ns: int
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


class AiperfError(msgspec.Struct, frozen=True):
    code: int | None = None
    type: str | None = None


class AiperfRecord(msgspec.Struct, frozen=True):
    """Line of AIPerf's profile_export.jsonl."""

    metadata: AiperfAbout
    metrics: dict[str, AiperfValue] = {}
    error: AiperfError | None = None


_Read = tuple[Run, list[RequestRecord]]


def imported(paths: Sequence[Path], slo: Slo = NO_SLO) -> tuple[Bench, list[RequestRecord]]:
    """Read files as one bench of one variant, each result a run. Raises BadBench."""
    texts = []
    for path in paths:
        try:
            texts.append((path.name, path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise BadBench(f"{path} cannot be read: {why}") from error
    return parse(texts, slo)


def parse(texts: Sequence[tuple[str, str]], slo: Slo = NO_SLO) -> tuple[Bench, list[RequestRecord]]:
    """Parse names and texts of files as one bench. Raises BadBench."""
    name = "import-" + hashlib.sha256("\0".join(text for _, text in texts).encode()).hexdigest()[:12]
    read: list[_Read] = []
    about: list[dict[str, Any]] = []
    models: dict[str, str] = {}
    tools: set[str] = set()
    for place, text in texts:
        documents = _documents(place, text)
        if isinstance(documents[0], dict) and {"metadata", "metrics"} <= documents[0].keys():
            tools.add("AIPerf")
            models.setdefault("", place)
            read.append(_aiperf(place, documents, name, len(read) + 1, slo))
            about.append({"name": "aiperf", "requests": read[-1][0].asked})
            continue
        for document in documents:
            tools.add("vllm bench serve")
            found = _vllm(place, document)
            models.setdefault(found.model_id, place)
            read.append(_vllm_run(place, found, dict(_vllm_figures(document)), name, len(read) + 1, slo))
            about.append(_vllm_workload(found))
    if len(models) > 1 or len(tools) > 1:
        what = "models" if len(tools) == 1 else "tools"
        raise BadBench(
            f"{' and '.join(models.values())} are results of different {what}; import them one by one and compare"
            " the two"
        )
    runs = [run for run, _ in read]
    workloads = [one for at, one in enumerate(about) if one not in about[:at]]
    bench = Bench(
        id=name,
        title=", ".join(place for place, _ in texts),
        tool=tools.pop(),
        started_s=min(run.started_s for run in runs),
        ended_s=max(run.ended_s for run in runs),
        variants=(BenchVariant(name=VARIANT, engine=BenchEngine(url="", model=next(iter(models)))),),
        runs=tuple(runs),
        workloads=tuple(workloads),
        workload_hash=hashlib.sha256(msgspec.json.encode(workloads, order="deterministic")).hexdigest()[:12],
        slo={limit: value for limit in ("ttft_ms", "tpot_ms", "e2e_ms") if (value := getattr(slo, limit)) is not None},
        caveats=("imported: what the engine itself counted, and how it was started, is not known",),
    )
    return bench, [record for _, records in read for record in records]


def _documents(place: str, text: str) -> list[Any]:
    """Return the JSON values of a file: one, or one for each line. NaN and Infinity, which Python writes, are
    unknown."""
    decoder, found, at = json.JSONDecoder(parse_constant=lambda _: None), [], 0
    text = text.strip().removeprefix("\ufeff")
    try:
        while at < len(text):
            value, end = decoder.raw_decode(text, at)
            found.append(value)
            at = end + len(text[end:]) - len(text[end:].lstrip())
    except (ValueError, RecursionError) as error:
        raise BadBench(
            f"{place} is no JSON: {error}; give what `vllm bench serve --save-result --save-detailed` wrote"
        ) from error
    if not found:
        raise BadBench(f"{place} is empty; give what `vllm bench serve --save-result --save-detailed` wrote")
    return found


# ---- vllm bench serve


def _vllm(place: str, document: Any) -> VllmResult:
    """Raises BadBench."""
    given = document if isinstance(document, dict) else {}
    if not {"duration", "completed", "model_id"} <= given.keys():
        raise BadBench(
            f"{place} is no result of vllm bench serve (duration, completed and model_id) nor of AIPerf (metadata and"
            " metrics on each line)"
        )
    if "total_input_sequences" in given:
        raise BadBench(
            f"{place} is a result of pooling or embeddings, which give no tokens; a bench here is of answers"
        )
    try:
        found = msgspec.convert(given, VllmResult)
    except msgspec.ValidationError as error:
        raise BadBench(f"{place} is no whole result of vllm bench serve: {error}") from error
    lengths = {name: len(value) for name in _LISTS if (value := getattr(found, name)) is not None}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise BadBench(f"{place} contradicts itself: {counts}; each request should have one of each")
    return found


_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors")


def _vllm_run(place: str, found: VllmResult, theirs: Mapping[str, float], bench: str, number: int, slo: Slo) -> _Read:
    ended_s, caveats = _when(found.date), [_SAME_PROMPTS, _NO_ZONE]
    if ended_s is None:
        ended_s, caveats = found.duration, [_SAME_PROMPTS, "the file does not say when it ran"]
    started_s = max(0.0, ended_s - found.duration)
    records = list(_vllm_records(found, bench, number, started_s))
    if not records:
        caveats.append(_NO_DETAIL)
    failed = Counter(record.reason or "unknown" for record in records if record.outcome != "ok")
    if not records and found.failed:
        failed["unknown"] = found.failed
    run = Run(
        number=number,
        variant=VARIANT,
        workload=WORKLOAD,
        point=_point(found),
        started_s=started_s,
        ended_s=ended_s,
        seed=0,
        asked=len(records) or found.completed + (found.failed or 0),
        ok=len(records) - failed.total() if records else found.completed,
        failed=dict(failed),
        figures={**theirs, **(figures(records, found.duration, slo) if records else {})},
        caveats=tuple(caveats),
    )
    if records and run.ok != found.completed:
        raise BadBench(
            f"{place} contradicts itself: completed is {found.completed}, and {run.ok} of its requests have no error"
        )
    return run, records


def _when(date: str | None) -> float | None:
    """Parse the end of a run, such as 20260512-093000, local time."""
    try:
        return datetime.strptime(date or "", "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _point(found: VllmResult) -> str:
    rate = (
        found.request_rate
        if isinstance(found.request_rate, float | int) and math.isfinite(found.request_rate)
        else None
    )
    parts = ([f"r{rate:g}"] if rate else []) + ([f"c{found.max_concurrency}"] if found.max_concurrency else [])
    return "-".join(parts) or "all-at-once"


def _vllm_workload(found: VllmResult) -> dict[str, Any]:
    """Return the workload that a file describes; its totals count answers only, so that mean lengths distinguish
    shapes."""
    said = {name: getattr(found, name) for name in ("num_prompts", "request_rate", "burstiness", "max_concurrency")}
    for name, total in (("input_tokens", found.total_input_tokens), ("output_tokens", found.total_output_tokens)):
        said[name] = round(total / found.completed) if total is not None and found.completed else None
    return {"name": WORKLOAD} | {name: value for name, value in said.items() if value is not None}


def _vllm_records(found: VllmResult, bench: str, number: int, started_s: float) -> Iterator[RequestRecord]:
    """Yield nothing without --save-detailed: then there are latencies at most, and not what failed."""
    if found.ttfts is None or found.errors is None:
        return
    first_s = min((start for start in found.start_times or () if start), default=None)
    for at, (ttft_s, error) in enumerate(zip(found.ttfts, found.errors, strict=True)):
        about = RequestRecord(
            request_id=request_id(bench, number, at),
            model=found.model_id,
            variant=VARIANT,
            prompt_tokens=found.input_lens[at] if found.input_lens else None,
        )
        # it failed with an empty reason
        silent = not error and ttft_s == 0 and found.output_lens is not None and found.output_lens[at] == 0
        outcome, reason = _outcome("failed" if silent else error)
        if outcome != "ok":
            yield msgspec.structs.replace(about, outcome=outcome, reason=reason)
            continue
        took_s = _took_s(found, at, ttft_s)
        tokens = found.output_lens[at] if found.output_lens else None
        start_s = found.start_times[at] if found.start_times else None
        ts = tpot_ms = None
        if took_s is not None and start_s and first_s is not None:
            ts = timestamp(started_s + start_s - first_s + took_s)
        if took_s is not None and tokens and tokens > 1:
            tpot_ms = _ms((took_s - ttft_s) / (tokens - 1))
        yield msgspec.structs.replace(
            about,
            ts=ts,
            completion_tokens=tokens,
            ttft_ms=_ms(ttft_s),
            tpot_ms=tpot_ms,
            e2e_ms=None if took_s is None else _ms(took_s),
            outcome=outcome,
            reason=reason,
        )


def _took_s(found: VllmResult, at: int, ttft_s: float) -> float | None:
    """Return the seconds of a whole request, added up of its tokens where they are not given."""
    if found.latencies:
        return found.latencies[at]
    return ttft_s + sum(found.itls[at]) if found.itls else None


def _outcome(error: str | None) -> tuple[Outcome, str | None]:
    """Return outcome and reason of an error, which is a traceback; its quotations are dropped."""
    if not error:
        return "ok", None
    if "Timeout" in error:
        return "timeout", "timeout"
    lost = any(
        name in error
        for name in ("ServerDisconnected", "ConnectionReset", "ClientConnector", "ClientPayloadError", "ClientOSError")
    )
    return "upstream_error", "connection_lost" if lost else "failed"


def _vllm_figures(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the metrics that the file contains; where there are requests, our own replace them."""
    names = {
        "qps": "request_throughput",
        "tokens_per_second": "output_throughput",
        "total_tokens_per_second": "total_token_throughput",
        "goodput_qps": "request_goodput",
    }
    for ours, theirs in (("ttft_ms", "ttft_ms"), ("tpot_ms", "tpot_ms"), ("e2e_ms", "e2el_ms")):
        names |= {f"{ours}.{label}": f"{word}_{theirs}" for label, word in _STATISTICS.items()}
    for ours, theirs in names.items():
        if isinstance(value := document.get(theirs), float | int) and math.isfinite(value):
            yield ours, float(value)
    if (failed := document.get("failed")) is not None and document["completed"] + failed:
        yield "error_ratio", failed / (document["completed"] + failed)


_STATISTICS = {"mean": "mean", "p50": "median", "p95": "p95", "p99": "p99"}


# ---- AIPerf


_MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}


def _aiperf(place: str, documents: Sequence[Any], bench: str, number: int, slo: Slo) -> _Read:
    """Parse a profile_export.jsonl, without its warm-up. Raises BadBench."""
    try:
        lines = [
            line
            for line in msgspec.convert(documents, list[AiperfRecord])
            if line.metadata.benchmark_phase == "profiling"
        ]
        records = [_aiperf_record(line, request_id(bench, number, at)) for at, line in enumerate(lines)]
    except msgspec.ValidationError as error:
        raise BadBench(f"{place} is no whole profile_export.jsonl of AIPerf: {error}") from error
    if not records:
        raise BadBench(f"{place} holds no request of the phase profiling")
    started_s, ended_s = (
        min(line.metadata.request_start_ns for line in lines) / 1e9,
        max(line.metadata.request_end_ns for line in lines) / 1e9,
    )
    failed = Counter(record.reason or "unknown" for record in records if record.outcome != "ok")
    run = Run(
        number=number,
        variant=VARIANT,
        workload="aiperf",
        point="unknown",
        started_s=started_s,
        ended_s=ended_s,
        seed=0,
        asked=len(records),
        ok=len(records) - failed.total(),
        failed=dict(failed),
        figures=figures(records, ended_s - started_s, slo),
        caveats=(
            "AIPerf sends the same prompts in each of its runs: after the first, the prefix cache may have held them",
        ),
    )
    return run, records


def _aiperf_record(line: AiperfRecord, name: str) -> RequestRecord:
    """Convert a line to a record. Its inter-token latency is our TPOT, computed again for one definition."""
    ttft_ms, took_ms = (_aiperf_ms(line, metric) for metric in ("time_to_first_token", "request_latency"))
    prompt, tokens = (_aiperf_tokens(line, metric) for metric in ("input_sequence_length", "output_sequence_length"))
    outcome, reason = _aiperf_outcome(line)
    return RequestRecord(
        request_id=name,
        ts=timestamp(line.metadata.request_end_ns / 1e9),
        variant=VARIANT,
        prompt_tokens=prompt,
        completion_tokens=tokens,
        ttft_ms=ttft_ms,
        tpot_ms=(
            round((took_ms - ttft_ms) / (tokens - 1), 3)
            if took_ms is not None and ttft_ms is not None and tokens and tokens > 1
            else None
        ),
        e2e_ms=took_ms,
        status=line.error.code if line.error else None,
        outcome=outcome,
        reason=reason,
    )


def _aiperf_outcome(line: AiperfRecord) -> tuple[Outcome, str | None]:
    if line.metadata.was_cancelled:
        return "client_abort", "cancelled"
    if line.error is None:
        return "ok", None
    return (
        ("timeout", "timeout")
        if "Timeout" in (line.error.type or "")
        else ("upstream_error", f"http_{line.error.code}" if line.error.code else "failed")
    )


def _aiperf_ms(line: AiperfRecord, metric: str) -> float | None:
    found = line.metrics.get(metric)
    if found is None or not isinstance(found.value, float | int) or not found.value >= 0 or found.unit not in _MS:
        return None
    return round(found.value * _MS[found.unit], 3)


def _aiperf_tokens(line: AiperfRecord, metric: str) -> int | None:
    found = line.metrics.get(metric)
    return int(found.value) if found is not None and isinstance(found.value, float | int) and found.value >= 0 else None


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
