"""Workload of a bench, and values derived from it: classes, loads, requests, seconds, hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from exporters.requests.public_trace import BLOCK_TOKENS
from stack.bench.workload_lengths import Lengths, mean_length

METRICS = (
    "ttft_ms", "tpot_ms", "e2e_ms", "qps", "tokens_per_second", "total_tokens_per_second", "goodput_qps", "error_ratio",
    "queue_ms", "hit_ratio",
    "preemptions", "prompt_tokens", "completion_tokens", "kv_peak_ratio", "memory_peak_gb", "driver_memory_gb",
    "invalid_json_ratio", "score",
)  # fmt: skip
LEAST_REQUESTS = 20  # of a run that does not say how many
MOST_REQUESTS = 1_000_000
TEMPLATE_TOKENS = 64  # kept free for what a chat template adds


class LoadLevel(msgspec.Struct, frozen=True):
    """Load: requests at once, per second, or in a burst; none of them for a replay."""

    label: str
    concurrency: int | None = None
    rate_per_s: float | None = None
    burst: int | None = None


Several = int | tuple[int, ...]


class RequestClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Class of requests, reported separately. share: of all requests, as a weight. Missing fields are those of the
    workload."""

    share: float
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    shared_prefix_tokens: int | None = None
    prefix_groups: int | None = None


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bursts of `size` requests, every `every_s` seconds."""

    size: Several
    every_s: float = 10.0


class Logged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of a log: seconds after the first one, and its lengths. hash_ids: of the blocks of its prompt; prompts
    with the same leading ids have these blocks in common."""

    offset_s: float
    input_tokens: int
    output_tokens: int
    kind: str | None = None
    hash_ids: tuple[int, ...] = ()


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request log sent again. log: its file, from where the workload stands; its requests are put in when it is
    loaded, or stand in the file themselves. speed: 2 is twice as fast. block_tokens: of a hash id. left_out: lines of
    the log that do not say when they began or how long they were; left_out_why: messages for those that are invalid."""

    log: str | None = None
    speed: float = 1.0
    requests: tuple[Logged, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    left_out: int = 0
    left_out_why: str = ""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits that a good answer meets."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        return {name: limit for name in self.__struct_fields__ if (limit := getattr(self, name)) is not None}


NO_SLO = Slo()


def slo_of(texts: Iterable[str]) -> Slo:
    """Parse limits such as ttft_ms=500. Raises ValueError."""
    given: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            given[name] = float(number)
        except ValueError:
            given[name] = math.nan
        if name not in Slo.__struct_fields__ or not 0 < given[name] < math.inf:
            raise ValueError(
                f"{text!r} is no limit; write one of {', '.join(Slo.__struct_fields__)} such as ttft_ms=500"
            )
    return Slo(**given)


class Json(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Answers that must be JSON. structured: the engine enforces the schema; off, only instruction does.

    score: a command that reads an answer on its standard input and prints a number."""

    schema: dict[str, Any]
    structured: bool = True
    instruction: str = "Answer with one JSON object that fits this JSON schema, and with nothing else."
    score: tuple[str, ...] = ()


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests of a workload and their load. concurrency, rate, burst and replay each give loads; a workload may have
    several.

    input_tokens: the whole prompt, of which shared_prefix_tokens are the same in all requests of a group. requests: of
    a run; left out: see `requests_of`. rate: requests/s, with gaps of a gamma distribution of shape `burstiness` (1:
    Poisson, less: burstier). arrival: only repeats which of them it is. turns: of a conversation, each of which adds
    turn_tokens and the answer before. max_*: longer drawn lengths are cut to it.
    ignore_eos: answers have the requested length; without it, that or less. seed: fresh for each run, or one
    for all. cache: cold: nothing that is sent was seen before the run; warm: shared prefixes were; as_is: as cold, but
    the engine's cache is not emptied. expected_hit: hit ratio of `scenario`."""

    name: str
    about: str = ""
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    shared_prefix_tokens: int = 0
    prefix_groups: int = 1
    classes: dict[str, RequestClass] = {}
    turns: int = 1
    turn_tokens: Lengths | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    requests: int | None = None
    arrival: Literal["closed", "poisson", "burst", "replay"] | None = None
    concurrency: Several | None = None
    rate: float | tuple[float, ...] | None = None
    burstiness: float = 1.0
    burst: Burst | None = None
    replay: Replay | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    json: Json | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    timeout_s: float = 300.0
    warm_up: int = 4
    runs: int = 6
    order: Literal["interleaved", "sequential"] = "interleaved"
    seed: Literal["fresh", "fixed"] = "fresh"
    cache: Literal["cold", "warm", "as_is"] = "cold"
    slo: Slo = Slo()
    expected_hit: tuple[float, float] | None = None
    scenario: str = ""


class WorkloadFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File of workloads. metrics: those to print; none named: all."""

    workloads: tuple[Workload, ...]
    metrics: tuple[str, ...] = ()


# ---- derived values


def shapes(workload: Workload) -> dict[str | None, RequestClass]:
    """Return the complete classes of a workload; one without a name where there are none."""
    own = {
        name: getattr(workload, name)
        for name in ("input_tokens", "output_tokens", "shared_prefix_tokens", "prefix_groups")
    }
    if not workload.classes:
        return {None: RequestClass(share=1.0, **own)}
    missing = {
        kind: {name: value for name, value in own.items() if getattr(given, name) is None}
        for kind, given in workload.classes.items()
    }
    return {kind: msgspec.structs.replace(given, **missing[kind]) for kind, given in workload.classes.items()}


def points(workload: Workload) -> tuple[LoadLevel, ...]:
    """Return the loads of a workload, in the order of the file."""
    return (
        *(LoadLevel(f"c{n}", concurrency=int(n)) for n in _each(workload.concurrency)),
        *(LoadLevel(f"r{rate:g}", rate_per_s=rate) for rate in _each(workload.rate)),
        *(LoadLevel(f"b{n}", burst=int(n)) for n in _each(workload.burst.size if workload.burst else None)),
        *((LoadLevel("replay"),) if workload.replay else ()),
    )


def requests_of(workload: Workload, point: LoadLevel) -> int:
    """Return the number of requests of a run. Default: four for each concurrent one, those of 20 s, three bursts; 20 at
    least."""
    if workload.replay is not None:
        return min(workload.requests or len(workload.replay.requests), len(workload.replay.requests))
    if workload.requests is not None:
        return workload.requests
    enough = max(
        LEAST_REQUESTS, 4 * (point.concurrency or 0), math.ceil(20 * (point.rate_per_s or 0)), 3 * (point.burst or 0)
    )
    return math.ceil(enough / workload.turns) * workload.turns


def resolved(workload: Workload) -> dict[str, Any]:
    """Return a workload with its defaults, for bench.json; of a replayed log, the number of requests and their hash."""
    said: dict[str, Any] = msgspec.to_builtins(workload)
    if workload.replay is not None:
        said["replay"] |= {"requests": len(workload.replay.requests), "hash": _hash(said["replay"]["requests"])}
    return {name: value for name, value in said.items() if value not in (None, "", {}, [])}


def hash_of(workloads: Iterable[Workload]) -> str:
    """Return twelve digits that are the same for workloads with the same requests; descriptions and the number of runs
    do not count."""
    words = ("about", "scenario", "expected_hit", "runs", "order")
    return _hash(
        [{name: value for name, value in resolved(workload).items() if name not in words} for workload in workloads]
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:12]


def expected_seconds(workload: Workload, point: LoadLevel, ttft_s: float, tpot_s: float) -> float:
    """Estimate the duration of a run from the time of a first and each further token at that load."""
    n = requests_of(workload, point)
    if workload.replay is not None:
        sent = workload.replay.requests[:n]
        return sent[-1].offset_s / workload.replay.speed + ttft_s + sent[-1].output_tokens * tpot_s
    weights = [(shape.share, mean_length(shape.output_tokens or 1)) for shape in shapes(workload).values()]
    answer_s = ttft_s + tpot_s * sum(share * tokens for share, tokens in weights) / sum(share for share, _ in weights)
    if point.concurrency is not None:
        return math.ceil(n / min(point.concurrency, n)) * answer_s
    arriving_s = (
        n / point.rate_per_s
        if point.rate_per_s
        else (math.ceil(n / (point.burst or n)) - 1) * (workload.burst.every_s if workload.burst else 0)
    )
    return arriving_s + workload.turns * answer_s


def _each(several: float | tuple[float, ...] | None) -> tuple[float, ...]:
    return () if several is None else several if isinstance(several, tuple) else (several,)
