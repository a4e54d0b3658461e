"""Comparison of a running engine's KV cache with the worksheet's arithmetic.

Invariant: both sides speak of one configuration. What the engine reports (block size, data type, longest
request) is taken from it, and where a plan had it otherwise that is said; so a difference is one of arithmetic or of
memory, never of options. What a release does not tell is absent, never 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from exporters.catalogue import vllm
from exporters.net.http_client import HttpClientConfig
from stack.bench.measurements import Startup
from stack.capacity import kv, memory
from stack.capacity.kv import BadServing, Serving
from stack.capacity.live_engine import (
    BLOCKS,
    BY_BLOCKS,
    NOT_ASKED,
    TOKENS,
    BadLive,
    EngineReport,
    Served,
    read,
    read_report,
    usage_series,
    whole_number,
    yes_or_no,
)
from stack.capacity.model import ModelShape

OTHER_MODEL = 0.2  # a model of another name whose blocks take so much more or less is another model
_VAST = float(1 << 62)  # bytes: so many blocks that what is left over of the last one does not matter


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """One figure as we reckon it and as the engine reports it; None: not known, never 0. source: where `reported` comes
    from."""

    name: str
    unit: str
    predicted: float | None
    reported: float | None
    source: str

    @property
    def difference(self) -> float | None:
        """By which share of the reported figure ours is higher; below 0 where it is lower."""
        return self.predicted / self.reported - 1 if self.predicted is not None and self.reported else None


@dataclass(frozen=True, slots=True)
class Verifier:
    """Values that an engine reported. serving: as it runs; figures: predicted and reported; in_use: what is used right
    now; said: what that means."""

    model: str
    version: str | None
    serving: Serving
    figures: tuple[ComparedValue, ...]
    in_use: tuple[ComparedValue, ...] = ()
    said: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, float | None, float | None, float | None, str]]:
        """Figure, predicted, reported, difference as a share, source of what is reported."""
        return [
            (each.name, each.predicted, each.reported, each.difference, each.source)
            for each in (*self.figures, *self.in_use)
        ]


async def verify(
    url: str,
    shape: ModelShape,
    serving: Serving | None = None,
    log: str | None = None,
    key: str | None = None,
    kv_bytes: float | None = None,
    way: HttpClientConfig | None = None,
) -> Verifier:
    """A look at an engine, compared with what we reckon. serving: for what the engine does not tell, such as tensor
    parallelism; log: the text of its start-up log; kv_bytes: what a plan expects to be left for the KV cache of a GPU.
    Raises BadLive."""
    text, served = await read(url, key, way)
    return compare(text, log, shape, serving, served, kv_bytes)


# ---- the comparison


def compare(
    text: str,
    log: str | None,
    shape: ModelShape,
    serving: Serving | None = None,
    served: Served = NOT_ASKED,
    kv_bytes: float | None = None,
) -> Verifier:
    """Compare /metrics and a start-up log with the prediction for this shape. Pure. Arguments as in `loop`; raises
    BadLive."""
    report, notes = read_report(text, log, served.place)
    shape, ours, differs = _as_run(report, shape, serving, served)
    pool = _pool(report, shape, ours, kv_bytes)
    figures = tuple(_figures(report, shape, ours, pool, kv_bytes))
    silent = ("the log shows no start of an engine; is it vLLM's, from the first line on?",)
    notes += (*differs, *_other_model(report, shape, served, figures), *_other_start(report))
    if report.by_hand and kv_bytes is not None:
        notes += (
            (
                f"its KV cache memory was set by hand ({report.kv_bytes[1]}), so it is not compared with the plan's"
                f" {kv_bytes / 2**30:,.2f} GiB"
            ),
        )
    notes += silent if log is not None and report.log == Startup() and not report.said else ()
    in_use = tuple(_in_use(report, shape, ours))
    return Verifier(
        report.model or next(iter(served.names), ""),
        served.version,
        ours,
        figures,
        in_use,
        (*notes, *_meaning(report, shape, ours, figures)),
    )


def _as_run(
    report: EngineReport, shape: ModelShape, plan: Serving | None, served: Served
) -> tuple[ModelShape, Serving, tuple[str, ...]]:
    """Shape and options as the engine runs them, and where a plan had them otherwise."""
    longest = served.max_model_len or report.longest
    block, dtype, utilization = (
        whole_number(report.labels.get("block_size")),
        report.labels.get("cache_dtype"),
        report.label("gpu_memory_utilization"),
    )
    parallel = {
        name: whole_number(report.said.get(f"{name}_size")) for name in ("tensor_parallel", "pipeline_parallel")
    }
    says = {
        "max_model_len": longest,
        "block_size": block,
        "cache_dtype": dtype or report.said.get("kv_cache_dtype"),
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": whole_number(report.said.get("max_num_batched_tokens")),
        "async_scheduling": yes_or_no(report.said.get("async_scheduling")),
        "prefix_caching": yes_or_no(report.labels.get("enable_prefix_caching")),
        **parallel,
    }
    known = {name: value for name, value in says.items() if value is not None}
    try:
        as_run = replace(plan or Serving(longest or shape.served_len, prefix_caching=shape.attends), **known)  # type: ignore[arg-type]  # each value is of its field's type
    except BadServing as error:
        raise BadLive(f"what {served.place} or the log says of its options cannot be reckoned with: {error}") from error
    differs = [
        f"{name} {value}, not {getattr(plan, name)}"
        for name, value in known.items()
        if plan and getattr(plan, name) != value
    ]
    notes = (
        [f"the engine runs with {'; '.join(differs)} as assumed: the figures are for how it runs"] if differs else []
    )
    if longest is None and plan is None:
        notes.append(
            f"nothing says how long its requests may be; {as_run.max_model_len:,} tokens, which vLLM takes for this"
            " model, are assumed"
        )
    if "max_num_batched_tokens" not in known and any(layer.kind in ("window", "chunked") for layer in shape.layers):
        notes.append(
            "its windows also hold what is in flight, up to max_num_batched_tokens, which the page does not tell:"
            f" {as_run.max_num_batched_tokens:,} are assumed; its start-up log would say"
        )
    if (run := report.said.get("dtype")) and run != shape.dtype:
        notes.append(f"it runs in {run}, the config says {shape.dtype}")
        shape = replace(shape, dtype=run)
    return shape, as_run, tuple(notes)


def _pool(report: EngineReport, shape: ModelShape, serving: Serving, kv_bytes: float | None) -> kv.KvCapacity | None:
    """The cache as we reckon it: of the bytes that the engine has, else of the blocks that it was given, else of the
    bytes that were planned."""
    reported, _ = report.kv_bytes
    blocks, _ = report.blocks
    if reported is not None:
        return kv.cache(shape, serving, reported)
    if blocks is not None:
        return kv.cache(shape, serving, (blocks + 0.5) * block_bytes(shape, serving))
    return None if kv_bytes is None else kv.cache(shape, serving, kv_bytes)


def block_bytes(shape: ModelShape, serving: Serving) -> float:
    """Bytes per GPU of one of the blocks that vLLM counts."""
    return _VAST / kv.cache(shape, serving, _VAST).blocks


def _figures(
    report: EngineReport, shape: ModelShape, serving: Serving, pool: kv.KvCapacity | None, kv_bytes: float | None
) -> Iterator[ComparedValue]:
    """Return the values that the engine reports, each beside the prediction where ours follows from something else."""
    reported, whence = report.kv_bytes
    tokens, tokens_from = report.tokens(_alike(shape))
    at_once, at_once_from = report.concurrency
    blocks, blocks_from = report.blocks
    weights = None if shape.weight_bytes is None else memory.weight_bytes(shape, serving)
    each = kv.request_bytes(shape, serving, serving.max_model_len) / serving.max_model_len
    independent = pool is not None and (reported is not None or tokens_from != BY_BLOCKS)
    found = [
        ComparedValue("weights", "bytes", weights, report.log.weights, "start-up log"),
        ComparedValue("KV cache memory", "bytes", None if report.by_hand else kv_bytes, reported, whence),
        ComparedValue(BLOCKS, "blocks", pool.blocks if pool and reported is not None else None, blocks, blocks_from),
        ComparedValue(TOKENS, "tokens", pool.tokens if pool and independent else None, tokens, tokens_from),
        ComparedValue(
            "longest requests at once", "requests", pool.concurrency if pool else None, at_once, at_once_from
        ),
        ComparedValue(
            "bytes per token of the longest request",
            "bytes",
            each,
            reported / tokens if reported and tokens else None,
            f"{whence} / tokens",
        ),
    ]
    if kv_bytes is not None and not report.by_hand:
        found.append(
            ComparedValue(
                "KV cache tokens as planned", "tokens", kv.cache(shape, serving, kv_bytes).tokens, tokens, tokens_from
            )
        )
    yield from (figure for figure in found if figure.reported is not None)


def _alike(shape: ModelShape) -> bool:
    """Return whether every layer keeps every token."""
    return {layer.kind for layer in shape.layers if layer.kind != "none"} <= {"full", "mla"}


def _other_model(
    report: EngineReport, shape: ModelShape, served: Served, figures: tuple[ComparedValue, ...]
) -> tuple[str, ...]:
    """Return whether this is another model's engine: by its name, which may be an alias, and by the bytes of its
    blocks. Raises BadLive where both say so.

    Blocks and not tokens: how many tokens a block is worth depends on windows and on what is in flight, too."""
    names = [name for name in (*served.names, report.said.get("model"), report.model) if name]
    if not shape.name or not names or any(_same(shape.name, name) for name in names):
        return ()
    off = next((figure for figure in figures if figure.name == BLOCKS and figure.difference is not None), None)
    if off is None or any(layer.kind == "state" for layer in shape.layers):
        return (f"it serves {names[0]}, the config is of {shape.name}: check that this is the same model",)
    if abs(off.difference or 0.0) <= OTHER_MODEL:
        return (f"it serves {names[0]}, the config is of {shape.name}; their caches are alike",)
    raise BadLive(
        f"{served.place} serves {names[0]}, and the config is of {shape.name}: another model, or in another data type"
        f" (its memory is {off.reported:,.0f} blocks there, and {off.predicted:,.0f} as reckoned); give the config.json"
        " of what is served, or its start-up log"
    )


def _same(one: str, other: str) -> bool:
    """Return whether two names or paths end alike."""
    ends = [name.rstrip("/").removesuffix("/config.json").rpartition("/")[2].lower() for name in (one, other)]
    return ends[0] == ends[1]


def _other_start(report: EngineReport) -> Iterator[str]:
    tokens, logged = report.label("kv_cache_size_tokens"), report.log.kv_tokens
    if tokens is not None and logged is not None and abs(tokens - logged) > 1:
        yield (
            f"the log reports {logged:,} tokens, the page of {tokens:,.0f}: the log is of another start, and the page"
            " counts"
        )


# ---- what is in use


@dataclass(frozen=True, slots=True)
class _Use:
    """Current use of one engine core. blocks: without the one that vLLM keeps for itself."""

    share: float
    blocks: float | None
    running: float | None
    preempted: float | None


def _use(report: EngineReport) -> _Use | None:
    share = report.gauge(usage_series(report.found))
    if share is None or share > 1:
        return None
    blocks, _ = report.blocks
    return _Use(
        share,
        round(share * (blocks - 1)) if blocks else None,
        report.gauge(vllm.NUM_REQUESTS_RUNNING.name),
        report.gauge(vllm.NUM_PREEMPTIONS.name),
    )


def _in_use(report: EngineReport, shape: ModelShape, serving: Serving) -> Iterator[ComparedValue]:
    use = _use(report)
    if use is None:
        return
    size = serving.block_size if _alike(shape) else None
    usage, running, preempted = (
        f"page: {name}"
        for name in (usage_series(report.found), vllm.NUM_REQUESTS_RUNNING.name, vllm.NUM_PREEMPTIONS.name)
    )
    found = (
        ComparedValue("in use", "share", None, use.share, usage),
        ComparedValue("blocks in use", "blocks", None, use.blocks, f"{usage} x (num_gpu_blocks - 1)"),
        ComparedValue(
            "bytes in use",
            "bytes",
            None,
            _times(use.blocks, block_bytes(shape, serving)),
            "blocks in use x our bytes of a block",
        ),
        ComparedValue("tokens in use at most", "tokens", None, _times(use.blocks, size), "blocks in use x block_size"),
        ComparedValue("requests running", "requests", None, use.running, running),
        ComparedValue("preemptions since the start", "count", None, use.preempted, preempted),
    )
    yield from (figure for figure in found if figure.reported is not None)


def _times(one: float | None, other: float | None) -> float | None:
    return one * other if one is not None and other is not None else None


def _meaning(
    report: EngineReport, shape: ModelShape, serving: Serving, figures: tuple[ComparedValue, ...]
) -> Iterator[str]:
    tokens = next((figure for figure in figures if figure.name == TOKENS), None)
    if tokens and tokens.predicted and tokens.reported:
        off = tokens.reported / tokens.predicted - 1
        how = "as reckoned" if abs(off) < 0.0005 else f"{abs(off):.1%} {'less' if off < 0 else 'more'} than reckoned"
        yield f"the engine's cache holds {tokens.reported:,.0f} tokens, {how}"
    use = _use(report)
    if use is None:
        return
    longest, _ = report.concurrency
    if use.running and use.blocks:
        room = use.running / use.share if use.share else 0.0
        worst = (
            f"; the {longest:,.2f} that vLLM reports are of {serving.max_model_len:,} tokens each" if longest else ""
        )
        size = f", blocks for {use.blocks * serving.block_size / use.running:,.0f} tokens each" if _alike(shape) else ""
        yield (
            f"{use.running:,.0f} running requests hold {use.share:.0%} of the cache{size}: it has room for some"
            f" {room:,.1f} such requests{worst}"
        )
    elif use.running == 0:
        yield "no request is running, so nothing can be said of what requests need"
    if use.preempted:
        yield (
            f"{use.preempted:,.0f} times since its start a running request lost its blocks and was computed again: the"
            " cache was promised to more requests than it holds"
        )
