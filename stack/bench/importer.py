"""Importer of results of other benchmark tools: of `vllm bench serve` (--save-result), of AIPerf (profile_export.jsonl,
with the profile_export_aiperf.json beside it for the load) and of guidellm (benchmarks.json).

Invariant: missing values are omitted, and every doubt about a value is a caveat of the run.
Source of the names: vLLM 0.32 benchmarks/serve.py, AIPerf 0.13 "Working with Profile Export Files" and
common/models/export_models.py. vLLM's `latencies` are durations of requests; releases without it have the TTFT and the
ITLs, which add up to it. None of the tools records the engine."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from exporters.requests.record import Outcome, RequestRecord, timestamp
from stack.bench import from_guidellm
from stack.bench.imported_run import VARIANT, ImportedRun, load_name, measured_run, milliseconds, outcome_of, tpot_ms
from stack.bench.measurements import figures
from stack.bench.result import BadBench, Bench, BenchEngine, BenchVariant, Run, request_id
from stack.bench.workload import NO_SLO, Slo

WORKLOAD = "vllm-bench-serve"
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
_SAME_PROMPTS = (
    "vllm bench serve sends the same prompts again unless --seed changes: after another run, the prefix cache may have"
    " held them"
)
_NO_ZONE = "the times are those of the clock where it ran, read as UTC, since the file names no zone"
_NO_DETAIL = "the file holds no single requests; with --save-detailed it would"
_EXPORT, _SUMMARY = "profile_export.jsonl", "profile_export_aiperf.json"  # of AIPerf
_NO_LOAD = f"the load is unknown, because no {_SUMMARY} was beside the file"
_AIPERF_PROMPTS = (
    "AIPerf sends the same prompts in each of its runs: after the first, the prefix cache may have held them"
)


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


class AiperfPhase(msgspec.Struct, frozen=True):
    """Phase of AIPerf's configuration. rate: requests/s."""

    name: str = ""
    concurrency: int | None = None
    rate: float | None = None


class AiperfSummary(msgspec.Struct, frozen=True):
    """Part of AIPerf's profile_export_aiperf.json that its profile_export.jsonl lacks."""

    phases: list[AiperfPhase] = []
    model: str = ""


class ImportedFile(NamedTuple):
    """File of a tool. beside: text of AIPerf's summary in the same folder."""

    place: str
    text: str
    beside: str = ""


class ToolRuns(NamedTuple):
    """Runs of one file. slo: the limits that the tool itself was given."""

    tool: str
    model: str
    runs: list[ImportedRun]
    workloads: list[dict[str, Any]]
    slo: Slo


def imported(paths: Sequence[Path], slo: Slo = NO_SLO) -> tuple[Bench, list[RequestRecord]]:
    """Read files as one bench of one variant, each result a run. Raises BadBench."""
    names = [path.name for path in paths]
    texts = []
    for path in paths:
        place = path.name if names.count(path.name) == 1 else "/".join(path.parts[-2:])
        texts.append(ImportedFile(place, _text(path), _beside(path)))
    return parse(texts, slo)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise BadBench(f"{path} cannot be read: {why}") from error


def _beside(path: Path) -> str:
    """Return AIPerf's summary of an export; its name follows --profile-export-prefix."""
    if path.suffix != ".jsonl":
        return ""
    summary = path.with_name(_SUMMARY) if path.name == _EXPORT else path.with_suffix(".json")
    return _text(summary) if summary.exists() else ""


def parse(texts: Sequence[ImportedFile | tuple[str, str]], slo: Slo = NO_SLO) -> tuple[Bench, list[RequestRecord]]:
    """Parse files as one bench. Without an SLO it is the one that the tool was given. Raises BadBench."""
    files = [ImportedFile(*each) for each in texts]
    name = "import-" + hashlib.sha256("\0".join(file.text + file.beside for file in files).encode()).hexdigest()[:12]
    read: list[ToolRuns] = []
    count = 0
    for file in files:
        read.append(_runs_of(file, name, count + 1, slo))
        count += len(read[-1].runs)
    _refuse_mixture(files, read)
    slo = next((each.slo for each in read if each.slo != NO_SLO), slo)
    runs = [run for each in read for run, _ in each.runs]
    about = [workload for each in read for workload in each.workloads]
    workloads = [one for at, one in enumerate(about) if one not in about[:at]]
    model = next((each.model for each in read if each.model), "")
    bench = Bench(
        id=name,
        title=", ".join(file.place for file in files),
        tool=read[0].tool,
        started_s=min(run.started_s for run in runs),
        ended_s=max(run.ended_s for run in runs),
        variants=(BenchVariant(name=VARIANT, engine=BenchEngine(url="", model=model)),),
        runs=tuple(runs),
        workloads=tuple(workloads),
        workload_hash=hashlib.sha256(msgspec.json.encode(workloads, order="deterministic")).hexdigest()[:12],
        slo=slo.limits,
        caveats=("imported: what the engine itself counted, and how it was started, is not known",),
    )
    return bench, [record for each in read for _, records in each.runs for record in records]


def _refuse_mixture(files: Sequence[ImportedFile], read: Sequence[ToolRuns]) -> None:
    """Raises BadBench for files of several tools or models."""
    for what in ("tool", "model"):
        first: dict[str, str] = {}
        for file, each in zip(files, read, strict=True):
            if value := getattr(each, what):
                first.setdefault(value, file.place)
        if len(first) > 1:
            raise BadBench(
                f"{' and '.join(first.values())} are results of different {what}s; import them one by one and"
                " compare the two"
            )


def _runs_of(file: ImportedFile, bench: str, number: int, slo: Slo) -> ToolRuns:
    """Parse one file. number: of its first run. Raises BadBench."""
    documents = _documents(file.place, file.text)
    first = documents[0]
    if from_guidellm.is_guidellm(first):
        return _of_guidellm(file.place, first, bench, number, slo)
    if isinstance(first, dict) and {"metadata", "metrics"} <= first.keys():
        about = _aiperf_summary(file)
        run = _aiperf(file.place, documents, about, bench, number, slo)
        workload = {"name": "aiperf", "requests": run[0].asked, "load": run[0].point}
        return ToolRuns("AIPerf", about.model, [run], [workload], slo)
    results = [_vllm(file.place, document) for document in documents]
    runs = [
        _vllm_run(file.place, found, dict(_vllm_figures(document)), bench, number + at, slo)
        for at, (found, document) in enumerate(zip(results, documents, strict=True))
    ]
    if len({found.model_id for found in results}) > 1:
        raise BadBench(f"{file.place} holds results of different models; import each model from a file of its own")
    return ToolRuns("vllm bench serve", results[0].model_id, runs, [_vllm_workload(found) for found in results], slo)


def _of_guidellm(place: str, document: Mapping[str, Any], bench: str, number: int, slo: Slo) -> ToolRuns:
    found = from_guidellm.benchmarks_of(place, document)
    slo = from_guidellm.slo_of(found[0]) if slo == NO_SLO else slo
    runs = [from_guidellm.guidellm_run(place, each, bench, number + at, slo) for at, each in enumerate(found)]
    workloads = [from_guidellm.workload_of(each) for each in found]
    return ToolRuns(from_guidellm.TOOL, from_guidellm.model_of(found[0]), runs, workloads, slo)


def _documents(place: str, text: str) -> list[Any]:
    """Return the JSON values of a file: one, or one for each line. NaN and Infinity, which Python writes, are
    unknown."""
    decoder, found, at = json.JSONDecoder(parse_constant=lambda _: None), [], 0
    text = text.strip().removeprefix("\ufeff")
    try:
        while at < len(text):
            value, end = decoder.raw_decode(text, at)
            found += value if isinstance(value, list) and value else [value]  # summary.json of `vllm bench sweep`
            at = end + len(text[end:]) - len(text[end:].lstrip())
    except (ValueError, RecursionError) as error:
        raise BadBench(f"{place} is no whole JSON: {error}; give the file as {_TOOLS} wrote it") from error
    if not found:
        raise BadBench(f"{place} is empty; give the file as {_TOOLS} wrote it")
    return found


_TOOLS = "`vllm bench serve --save-result --save-detailed`, AIPerf or guidellm"


# ---- vllm bench serve


def _vllm(place: str, document: Any) -> VllmResult:
    """Raises BadBench."""
    given = document if isinstance(document, dict) else {}
    if "input_config" in given:
        raise BadBench(f"{place} is a summary of AIPerf without its requests; give the {_EXPORT} in the same folder")
    if not {"duration", "completed", "model_id"} <= given.keys():
        raise BadBench(
            f"{place} is no result of vllm bench serve (duration, completed and model_id), of AIPerf (metadata and"
            " metrics on each line) or of guidellm (benchmarks)"
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


def _vllm_run(
    place: str, found: VllmResult, theirs: Mapping[str, float], bench: str, number: int, slo: Slo
) -> ImportedRun:
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
    rate = found.request_rate
    known = isinstance(rate, float | int) and math.isfinite(rate)
    return load_name(float(rate or 0) if known else None, found.max_concurrency)


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
        outcome, reason = outcome_of("failed" if silent else error)
        if outcome != "ok":
            yield msgspec.structs.replace(about, outcome=outcome, reason=reason)
            continue
        took_s = _took_s(found, at, ttft_s)
        tokens = found.output_lens[at] if found.output_lens else None
        start_s = found.start_times[at] if found.start_times else None
        ts = None
        if took_s is not None and start_s and first_s is not None:
            ts = timestamp(started_s + start_s - first_s + took_s)
        took_ms = None if took_s is None else milliseconds(took_s)
        yield msgspec.structs.replace(
            about,
            ts=ts,
            completion_tokens=tokens,
            ttft_ms=milliseconds(ttft_s),
            tpot_ms=tpot_ms(milliseconds(ttft_s), took_ms, tokens),
            e2e_ms=took_ms,
            outcome=outcome,
            reason=reason,
        )


def _took_s(found: VllmResult, at: int, ttft_s: float) -> float | None:
    """Return the seconds of a whole request, added up of its tokens where they are not given."""
    if found.latencies:
        return found.latencies[at]
    return ttft_s + sum(found.itls[at]) if found.itls else None


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


def _aiperf_summary(file: ImportedFile) -> AiperfSummary:
    """Parse the summary beside an export; empty where there is none. Raises BadBench."""
    if not file.beside:
        return AiperfSummary()
    try:
        given = msgspec.json.decode(file.beside, type=dict[str, Any]).get("input_config") or {}
        models = [each.get("name") for each in given.get("models", {}).get("items", ())]
        return AiperfSummary(
            msgspec.convert(given.get("phases", []), list[AiperfPhase]), ", ".join(filter(None, models))
        )
    except (msgspec.MsgspecError, AttributeError) as error:
        raise BadBench(f"the {_SUMMARY} beside {file.place} is no summary of AIPerf: {error}") from error


def _aiperf(
    place: str, documents: Sequence[Any], about: AiperfSummary, bench: str, number: int, slo: Slo
) -> ImportedRun:
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
    between_s = (
        min(line.metadata.request_start_ns for line in lines) / 1e9,
        max(line.metadata.request_end_ns for line in lines) / 1e9,
    )
    phase = next((each for each in about.phases if each.name == "profiling"), None)
    point = load_name(phase.rate, phase.concurrency) if phase else "unknown"
    caveats = (_AIPERF_PROMPTS, *(() if phase else (_NO_LOAD,)))
    return measured_run(number, "aiperf", point, between_s, records, slo, caveats), records


def _aiperf_record(line: AiperfRecord, name: str) -> RequestRecord:
    """Convert a line to a record. Its inter-token latency is our TPOT, computed again for one definition."""
    ttft_ms, took_ms = (_aiperf_ms(line, metric) for metric in ("time_to_first_token", "request_latency"))
    prompt = _aiperf_tokens(line, "usage_prompt_tokens", "input_sequence_length")
    tokens = _aiperf_tokens(line, "usage_completion_tokens", "output_sequence_length")
    outcome, reason = _aiperf_outcome(line)
    return RequestRecord(
        request_id=name,
        ts=timestamp(line.metadata.request_end_ns / 1e9),
        variant=VARIANT,
        prompt_tokens=prompt,
        completion_tokens=tokens,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms(ttft_ms, took_ms, tokens),
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


def _aiperf_tokens(line: AiperfRecord, *metrics: str) -> int | None:
    """Return the first count that there is: the engine's own, else that of AIPerf's tokenizer."""
    values = (line.metrics[metric].value for metric in metrics if metric in line.metrics)
    return next((int(value) for value in values if isinstance(value, float | int) and value >= 0), None)
