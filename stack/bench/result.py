"""Result folder of a bench: bench.json (what was run, against what, every run's values) and requests.jsonl (a record
for each request).

Invariant: a run that broke off is kept and marked; missing values are omitted, never reported as 0.

A metric's name is `metric.statistic`, with the class of requests before it where a workload has classes: `ttft_ms.p50`,
`short:ttft_ms.p95`, `qps`.
Of requests: ttft_ms (sent -> first token with content), tpot_ms ((e2e - ttft) / (tokens - 1), of answers with two
tokens or more), e2e_ms; each as mean, p50, p95, p99. Of the run: qps (answers/s), tokens_per_second (output),
total_tokens_per_second, goodput_qps (answers that met the slo), error_ratio. Of the engine's own counters, over the
run: queue_ms.mean, hit_ratio, preemptions, prompt_tokens, completion_tokens, kv_peak_ratio, memory_peak_gb (weights +
profiled peak + most KV blocks in use), driver_memory_gb. Of answers that must be JSON: invalid_json_ratio, and
score.mean where a command gives each a score."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from exporters.requests.read import ReadReport, read_records
from exporters.requests.record import BadLine, RequestRecord, to_line
from exporters.text import write_atomically

FORMAT = 1
HIDDEN = "(hidden)"
_SECRET = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)
_INSIDE = re.compile(
    r"((?:--[\w-]*|\b\w*)(?:key|token|secret|password)=|--[\w-]*(?:key|token|secret|password)\s+)[^\s;|&]+",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/@\s]+@")
BENCH, REQUESTS = "bench.json", "requests.jsonl"


class BadBench(ValueError):
    """Folder without a bench; the message names it and the cause."""


class BenchEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Engine, as it describes itself. series: model name in its metrics, where known; cache: labels of its
    cache_config_info; arguments: of its command line, where known."""

    url: str
    model: str
    series: str | None = None
    version: str | None = None
    max_model_len: int | None = None
    started_s: float | None = None
    cache: Mapping[str, str] = {}
    arguments: tuple[str, ...] | None = None


STORED = {"variant": "arm", "variants": "arms"}  # names in bench.json, experiments and reports


class Start(msgspec.Struct, frozen=True):
    """Seconds from the start of an engine until it answered. warm: it had been started before with the same model."""

    kind: Literal["cold", "warm"]
    seconds: float


class BenchVariant(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration under test. what: in the user's words."""

    name: str
    engine: BenchEngine
    what: str = ""
    starts: tuple[Start, ...] = ()


class Run(msgspec.Struct, frozen=True, kw_only=True, rename=STORED):
    """One pass of one workload at one load against one variant: the unit of all statistics. Times in unix seconds.

    point: the load, such as c8 (eight at once) or r2.5 (2.5 requests/s). failed: by reason. cut: why it is
    incomplete."""

    number: int
    variant: str
    workload: str
    point: str
    started_s: float
    ended_s: float
    seed: int
    asked: int
    ok: int
    failed: Mapping[str, int] = {}
    figures: Mapping[str, float] = {}
    caveats: tuple[str, ...] = ()
    cut: str | None = None


class Bench(msgspec.Struct, frozen=True, kw_only=True, rename=STORED):
    """Complete bench. order: of the runs of several variants; interleaved: drawn at random in each round. seed:
    prompts, lengths and that order follow from it; None in older files. events: ids of the tuning events that were
    written for it. cut: why it is incomplete."""

    id: str
    title: str
    tool: str
    started_s: float
    ended_s: float
    variants: tuple[BenchVariant, ...]
    runs: tuple[Run, ...]
    workloads: tuple[Mapping[str, Any], ...]
    workload_hash: str
    order: Literal["single", "interleaved", "sequential"] = "single"
    seed: int | None = None
    scale: float = 1.0
    slo: Mapping[str, float] = {}
    hardware: str = ""
    caveats: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    cut: str | None = None
    format: int = FORMAT


def request_id(bench: str, run: int, number: int) -> str:
    """Return the id of a request, which contains its run."""
    return f"{bench}-{run}-{number}"


def run_of(record: RequestRecord) -> int | None:
    """Return the run of a record; None for a record of something else."""
    parts = record.request_id.rsplit("-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else None


def without_secrets(bench: Bench) -> Bench:
    """Remove keys, tokens and logins, since benches and reports are passed on."""
    variants = tuple(
        msgspec.structs.replace(
            variant,
            engine=msgspec.structs.replace(
                variant.engine,
                url=without_login(variant.engine.url),
                arguments=None if variant.engine.arguments is None else masked(variant.engine.arguments),
            ),
        )
        for variant in bench.variants
    )
    return msgspec.structs.replace(bench, variants=variants)


def without_login(url: str) -> str:
    """Return the address without its login."""
    return url.replace(f"{urlsplit(url).netloc.rpartition('@')[0]}@", "", 1) if "@" in url else url


def is_secret(name: str) -> bool:
    """Return True if the name of an option or variable is that of a secret."""
    return _SECRET.search(name) is not None


def masked(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command line without keys, tokens and logins: in options, in variables before it, and in a line for a
    shell."""
    shown, hide = [], False
    for text in arguments:
        name, equals, _ = text.partition("=")
        secret = is_secret(name) and (
            text.startswith("-") or (equals != "" and name.isidentifier() and " " not in text)
        )
        clear = _LOGIN.sub("://", _INSIDE.sub(rf"\1{HIDDEN}", text))
        shown.append(
            f"{name}={HIDDEN}" if secret and equals else HIDDEN if hide and not text.startswith("--") else clear
        )
        # vLLM takes several keys after one --api-key
        hide = (secret and not equals) or (hide and not text.startswith("--"))
    return tuple(shown)


def write(folder: Path, bench: Bench) -> None:
    """Write or replace bench.json, without secrets; its requests are beside it already. Raises OSError."""
    write_atomically(folder / BENCH, msgspec.json.format(msgspec.json.encode(without_secrets(bench)), indent=1) + b"\n")


def add_requests(folder: Path, records: Sequence[RequestRecord]) -> None:
    """Append records, whose team is their class of requests. Raises OSError."""
    with (folder / REQUESTS).open("ab") as file:
        file.write(b"".join(to_line(record) for record in records))


def read(folder: Path) -> Bench:
    """Read a bench. Raises BadBench."""
    path = folder / BENCH if folder.is_dir() else folder
    try:
        bench = msgspec.json.decode(path.read_bytes(), type=Bench)
    except OSError as error:
        raise BadBench(
            f"{folder} holds no bench: {path}: {error.strerror}; give a folder of `bench run` or `tune` in which"
            " at least one run ended"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadBench(f"{path} is no bench of ours: {error}") from error
    if bench.format != FORMAT:
        raise BadBench(f"{path} has format {bench.format}, this release reads {FORMAT}")
    return bench


def requests(folder: Path) -> Iterator[RequestRecord]:
    """Yield the records of a bench. Raises OSError, and BadLine for an invalid line."""
    report = ReadReport()
    yield from read_records([folder / REQUESTS], report, ended_lines_only=True)
    for reason in report.counts:
        raise BadLine(reason, "; ".join(report.notes))
