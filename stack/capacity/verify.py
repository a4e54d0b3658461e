"""A running engine's own word about its KV cache, beside what our arithmetic makes of the same configuration.

Law: both sides speak of one configuration. What the engine tells of itself (block size, data type, longest request) is
taken from it, and where a plan had it otherwise that is said; so a difference is one of arithmetic or of memory, never
of options. What a release does not tell is absent, never 0."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import aiohttp

from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue.exposition_parser import Exposition
from exporters.engine.client import EngineClient, ModelCard
from exporters.net.http_client import HttpClientConfig, describe_error
from stack.bench.measurements import Startup, startup
from stack.bench.result import without_login
from stack.capacity import kv, memory
from stack.capacity.kv import BadServing, Serving
from stack.capacity.model import ModelShape

READ_S = 10.0
OTHER_MODEL = 0.2  # a model of another name whose blocks take so much more or less is another model
_VAST = float(1 << 62)  # bytes: so many blocks that what is left over of the last one does not matter
_MODELS = "/v1/models"
_BLOCKS, _TOKENS, _BY_BLOCKS = "KV cache blocks", "KV cache tokens", "page: num_gpu_blocks x block_size"


class BadLive(ValueError):
    """An engine that nothing can be compared with; one sentence with the way out."""


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """One figure as we reckon it and as the engine tells it; None: not known, never 0. source: where `reported` comes
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
    """What an engine said of itself. serving: as it runs; figures: predicted and reported; in_use: what is used right
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


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine says besides its page. names: those that it answers to, and where its model came from;
    max_model_len: of its longest request."""

    place: str = "the page"
    version: str | None = None
    names: tuple[str, ...] = ()
    max_model_len: int | None = None


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
    parallelism; log: the text of its start-up log; kv_bytes: what a plan expects to be left for the KV cache of a card.
    Raises BadLive."""
    text, served = await read(url, key, way)
    return compare(text, log, shape, serving, served, kv_bytes)


# ---- the reader


async def read(url: str, key: str | None = None, way: HttpClientConfig | None = None) -> tuple[str, Served]:
    """An engine's page and what it serves. Raises BadLive, and BadConfig for a file of `way`."""
    base = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    if not re.match(r"https?://[\w\[]", base):
        named = "what stands there" if "@" in base else repr(base)  # a login is shown nowhere
        raise BadLive(f"{named} is no address of an engine; write it like http://127.0.0.1:8000")
    if (shown := without_login(base)) != base:
        raise BadLive(
            f"the address {shown} came with a login, which no request is sent with; give a key with --api-key-file"
        )
    try:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(session, base, READ_S, way, key)
            text, version = await client.scrape()
            cards = await _models(client)
    except aiohttp.ClientResponseError as error:
        raise BadLive(f"{base}/metrics answers {error.status}; give the address of vLLM itself") from error
    except exposition_parser.BadExposition as error:
        raise BadLive(str(error)) from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        told = describe_error(error) or error or type(error).__name__
        raise BadLive(f"no engine answers at {base}/metrics ({told}); is vLLM up, and is that its address?") from error
    models = [card for card in cards if card.parent is None]  # the others are adapters
    names = dict.fromkeys(name for card in models for name in (card.root, card.id) if name)
    return text, Served(base, version, tuple(names), next((card.max_model_len for card in models), None))


async def _models(client: EngineClient) -> list[ModelCard]:
    """The models that it lists; none where it lists none. Raises BadLive where it wants a key."""
    try:
        return await client.models()
    except exposition_parser.BadExposition:
        return []
    except aiohttp.ClientResponseError as error:
        if error.status in (401, 403):
            raise BadLive(f"{client.url}{_MODELS} answers {error.status}; give the key with --api-key-file") from error
        return []


# ---- what was said


@dataclass(frozen=True, slots=True)
class _Told:
    """All that page and log say of one engine core; None where they do not. sources: by field, where it stands."""

    model: str
    engine: str
    labels: Mapping[str, str]
    log: Startup
    said: Mapping[str, str]  # configuration in the log
    found: Exposition

    def label(self, name: str) -> float | None:
        """A number above 0; nothing that is read here can be less."""
        value = _number(self.labels.get(name))
        return value if value is not None and value > 0 else None

    def first(self, *told: tuple[float | None, str]) -> tuple[float | None, str]:
        """The first that is known, and where it comes from."""
        return next(((value, source) for value, source in told if value is not None), (None, ""))

    @property
    def override(self) -> bool:
        """Whether blocks were counted by hand, so that memory says nothing about them."""
        return self.label("num_gpu_blocks_override") is not None

    @property
    def by_hand(self) -> bool:
        """Whether the cache's bytes were set and not measured: the page tells them only then."""
        return self.kv_bytes[1].startswith("page")

    @property
    def kv_bytes(self) -> tuple[float | None, str]:
        if self.override:
            return None, ""
        return self.first(
            (self.label("kv_cache_memory_bytes"), "page: kv_cache_memory_bytes"),
            (self.label("cpu_kvcache_space_bytes"), "page: cpu_kvcache_space_bytes"),
            (self.log.kv, "start-up log, to 0.01 GiB"),
        )

    @property
    def blocks(self) -> tuple[float | None, str]:
        return self.label("num_gpu_blocks"), "page: num_gpu_blocks"

    def tokens(self, alike: bool) -> tuple[float | None, str]:
        """alike: all layers keep every token, so that blocks can be counted in tokens."""
        blocks, size = self.label("num_gpu_blocks"), self.label("block_size")
        return self.first(
            (self.label("kv_cache_size_tokens"), "page: kv_cache_size_tokens"),
            (self.log.kv_tokens, "start-up log"),
            (blocks * size if alike and blocks and size else None, _BY_BLOCKS),
        )

    @property
    def concurrency(self) -> tuple[float | None, str]:
        return self.first(
            (self.label("kv_cache_max_concurrency"), "page: kv_cache_max_concurrency"),
            (self.log.concurrency, "start-up log, to 0.01"),
        )

    @property
    def longest(self) -> int | None:
        """The longest request, as far as page or log say it: tokens and concurrency are each other times it, rounded
        down."""
        tokens, at_once = self.label("kv_cache_size_tokens"), self.label("kv_cache_max_concurrency")
        if tokens and at_once and at_once >= 1:
            return math.ceil(tokens / at_once - 1e-6)
        return self.log.longest_tokens or _whole(self.said.get("max_seq_len"))

    def gauge(self, metric: str) -> float | None:
        """Of this engine core."""
        values = [
            value
            for labels, value in self.found.of(metric)
            if labels.get("engine", "") == self.engine and math.isfinite(value) and value >= 0
        ]
        return sum(values) if values else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _yes(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")


# "Initializing a V1 LLM engine (v0.32.0) with config: model='...', dtype=torch.bfloat16, max_seq_len=32768,
# tensor_parallel_size=1, ..."
_STARTS = re.compile(r"Initializing a V1 LLM engine")
_OPTION = re.compile(
    r"\b(model|dtype|max_seq_len|tensor_parallel_size|pipeline_parallel_size|kv_cache_dtype|device_config)=(?:torch\.)?'?([^,'\s]+)"
)
_ASYNC = re.compile(r"'async_scheduling': (True|False)")
_BATCHED = re.compile(r"max_num_batched_tokens[=:' ]+(\d+)")


def _start(log: str) -> tuple[Startup, dict[str, str]]:
    """What the last start in a log says of memory, and of its configuration."""
    at = [found.start() for found in _STARTS.finditer(log)]
    last = log[at[-1] :] if at else log
    said = dict(reversed(_OPTION.findall(last.partition("\n")[0]))) if at else {}
    before = log[at[-2] if len(at) > 1 else 0 :]  # options and batch are told before the engine is
    if batched := _BATCHED.findall(before):
        said["max_num_batched_tokens"] = batched[-1]
    # the CPU build never does
    if chosen := ["False"] if said.get("device_config") == "cpu" else _ASYNC.findall(before):
        said["async_scheduling"] = chosen[-1]
    return startup(last), said


def _told(text: str, log: str | None, place: str) -> tuple[_Told, tuple[str, ...]]:
    """The engine core that is used most, and what is to be said of the others. Raises BadLive."""
    try:
        found = exposition_parser.parse(text)
    except exposition_parser.BadExposition as error:
        raise BadLive(f"{place}: {error}") from error
    if not any(name.startswith("vllm:") for name in found.families()):
        raise BadLive(
            f"{place} shows no series of vLLM; give the address of vLLM itself, not of a gateway or an exporter"
        )
    memory, said = _start(log or "")
    cores = {labels.get("engine", ""): labels for labels, _ in found.of(vllm.CACHE_CONFIG_INFO.name)}
    if not cores and memory == Startup():
        raise BadLive(
            f"{place} does not show {vllm.CACHE_CONFIG_INFO.name} (the Rust frontend does not, nor does an engine that"
            " is still starting): give its start-up log, or ask again when it is up"
        )
    models = {
        labels.get("engine", ""): labels.get("model_name", "") for labels, _ in found.of(vllm.NUM_REQUESTS_RUNNING.name)
    }
    every = [_Told(models.get(core, ""), core, labels, memory, said, found) for core, labels in cores.items()] or [
        _Told(next(iter(models.values()), ""), next(iter(models), ""), {}, memory, said, found)
    ]
    fullest = max(every, key=lambda core: core.gauge(_usage(found)) or 0.0)
    notes = (
        (
            f"{len(every)} engine cores (data-parallel ranks) answer there; the figures are of the one in use most,"
            f" {fullest.engine}"
        ),
    )
    return fullest, notes if len(every) > 1 else ()


def _usage(found: Exposition) -> str:
    """Under which name this page shows how much of the cache is in use."""
    return next((name for name in vllm.KV_CACHE_USAGE.names if name in found), vllm.KV_CACHE_USAGE.name)


# ---- the comparison


def compare(
    text: str,
    log: str | None,
    shape: ModelShape,
    serving: Serving | None = None,
    served: Served = Served(),
    kv_bytes: float | None = None,
) -> Verifier:
    """What a page and a start-up log say, beside what we reckon for this shape. Pure. Arguments as in `loop`; raises
    BadLive."""
    told, notes = _told(text, log, served.place)
    shape, ours, differs = _as_run(told, shape, serving, served)
    pool = _pool(told, shape, ours, kv_bytes)
    figures = tuple(_figures(told, shape, ours, pool, kv_bytes))
    silent = ("the log tells nothing of an engine's start; is it vLLM's, from the first line on?",)
    notes += (*differs, *_other_model(told, shape, served, figures), *_other_start(told))
    if told.by_hand and kv_bytes is not None:
        notes += (
            (
                f"its KV cache memory was set by hand ({told.kv_bytes[1]}), so it is not compared with the plan's"
                f" {kv_bytes / 2**30:,.2f} GiB"
            ),
        )
    notes += silent if log is not None and told.log == Startup() and not told.said else ()
    in_use = tuple(_in_use(told, shape, ours))
    return Verifier(
        told.model or next(iter(served.names), ""),
        served.version,
        ours,
        figures,
        in_use,
        (*notes, *_meaning(told, shape, ours, figures)),
    )


def _as_run(
    told: _Told, shape: ModelShape, plan: Serving | None, served: Served
) -> tuple[ModelShape, Serving, tuple[str, ...]]:
    """Shape and options as the engine runs them, and where a plan had them otherwise."""
    longest = served.max_model_len or told.longest
    block, dtype, utilization = (
        _whole(told.labels.get("block_size")),
        told.labels.get("cache_dtype"),
        told.label("gpu_memory_utilization"),
    )
    parallel = {name: _whole(told.said.get(f"{name}_size")) for name in ("tensor_parallel", "pipeline_parallel")}
    says = {
        "max_model_len": longest,
        "block_size": block,
        "cache_dtype": dtype or told.said.get("kv_cache_dtype"),
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": _whole(told.said.get("max_num_batched_tokens")),
        "async_scheduling": _yes(told.said.get("async_scheduling")),
        "prefix_caching": _yes(told.labels.get("enable_prefix_caching")),
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
    if (run := told.said.get("dtype")) and run != shape.dtype:
        notes.append(f"it runs in {run}, the config says {shape.dtype}")
        shape = replace(shape, dtype=run)
    return shape, as_run, tuple(notes)


def _pool(told: _Told, shape: ModelShape, serving: Serving, kv_bytes: float | None) -> kv.KvCapacity | None:
    """The cache as we reckon it: of the bytes that the engine has, else of the blocks that it was given, else of the
    bytes that were planned."""
    reported, _ = told.kv_bytes
    blocks, _ = told.blocks
    if reported is not None:
        return kv.cache(shape, serving, reported)
    if blocks is not None:
        return kv.cache(shape, serving, (blocks + 0.5) * block_bytes(shape, serving))
    return None if kv_bytes is None else kv.cache(shape, serving, kv_bytes)


def block_bytes(shape: ModelShape, serving: Serving) -> float:
    """Bytes per GPU of one of the blocks that vLLM counts."""
    return _VAST / kv.cache(shape, serving, _VAST).blocks


def _figures(
    told: _Told, shape: ModelShape, serving: Serving, pool: kv.KvCapacity | None, kv_bytes: float | None
) -> Iterator[ComparedValue]:
    """What the engine reports, each beside ours where ours follows from something else."""
    reported, whence = told.kv_bytes
    tokens, tokens_from = told.tokens(_alike(shape))
    at_once, at_once_from = told.concurrency
    blocks, blocks_from = told.blocks
    weights = None if shape.weight_bytes is None else memory.weight_bytes(shape, serving)
    each = kv.request_bytes(shape, serving, serving.max_model_len) / serving.max_model_len
    independent = pool is not None and (reported is not None or tokens_from != _BY_BLOCKS)
    found = [
        ComparedValue("weights", "bytes", weights, told.log.weights, "start-up log"),
        ComparedValue("KV cache memory", "bytes", None if told.by_hand else kv_bytes, reported, whence),
        ComparedValue(_BLOCKS, "blocks", pool.blocks if pool and reported is not None else None, blocks, blocks_from),
        ComparedValue(_TOKENS, "tokens", pool.tokens if pool and independent else None, tokens, tokens_from),
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
    if kv_bytes is not None and not told.by_hand:
        found.append(
            ComparedValue(
                "KV cache tokens as planned", "tokens", kv.cache(shape, serving, kv_bytes).tokens, tokens, tokens_from
            )
        )
    yield from (figure for figure in found if figure.reported is not None)


def _alike(shape: ModelShape) -> bool:
    """Whether every layer keeps every token."""
    return {layer.kind for layer in shape.layers if layer.kind != "none"} <= {"full", "mla"}


def _other_model(told: _Told, shape: ModelShape, served: Served, figures: tuple[ComparedValue, ...]) -> tuple[str, ...]:
    """Whether this is another model's engine: by its name, which may be an alias, and by the bytes of its blocks.
    Raises BadLive where both say so.

    Blocks and not tokens: how many tokens a block is worth depends on windows and on what is in flight, too."""
    names = [name for name in (*served.names, told.said.get("model"), told.model) if name]
    if not shape.name or not names or any(_same(shape.name, name) for name in names):
        return ()
    off = next((figure for figure in figures if figure.name == _BLOCKS and figure.difference is not None), None)
    if off is None or any(layer.kind == "state" for layer in shape.layers):
        return (
            f"it serves {names[0]}, the config is of {shape.name}: nothing here tells whether that is the same model",
        )
    if abs(off.difference or 0.0) <= OTHER_MODEL:
        return (f"it serves {names[0]}, the config is of {shape.name}; their caches are alike",)
    raise BadLive(
        f"{served.place} serves {names[0]}, and the config is of {shape.name}: another model, or in another data type"
        f" (its memory is {off.reported:,.0f} blocks there, and {off.predicted:,.0f} as reckoned); give the config.json"
        " of what is served, or its start-up log"
    )


def _same(one: str, other: str) -> bool:
    """Whether two names or paths end alike."""
    ends = [name.rstrip("/").removesuffix("/config.json").rpartition("/")[2].lower() for name in (one, other)]
    return ends[0] == ends[1]


def _other_start(told: _Told) -> Iterator[str]:
    tokens, logged = told.label("kv_cache_size_tokens"), told.log.kv_tokens
    if tokens is not None and logged is not None and abs(tokens - logged) > 1:
        yield (
            f"the log tells of {logged:,} tokens, the page of {tokens:,.0f}: the log is of another start, and the page"
            " counts"
        )


# ---- what is in use


@dataclass(frozen=True, slots=True)
class _Use:
    """Of one engine core, now. blocks: without the one that vLLM keeps for itself."""

    share: float
    blocks: float | None
    running: float | None
    preempted: float | None


def _use(told: _Told) -> _Use | None:
    share = told.gauge(_usage(told.found))
    if share is None or share > 1:
        return None
    blocks, _ = told.blocks
    return _Use(
        share,
        round(share * (blocks - 1)) if blocks else None,
        told.gauge(vllm.NUM_REQUESTS_RUNNING.name),
        told.gauge(vllm.NUM_PREEMPTIONS.name),
    )


def _in_use(told: _Told, shape: ModelShape, serving: Serving) -> Iterator[ComparedValue]:
    use = _use(told)
    if use is None:
        return
    size = serving.block_size if _alike(shape) else None
    usage, running, preempted = (
        f"page: {name}" for name in (_usage(told.found), vllm.NUM_REQUESTS_RUNNING.name, vllm.NUM_PREEMPTIONS.name)
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


def _meaning(told: _Told, shape: ModelShape, serving: Serving, figures: tuple[ComparedValue, ...]) -> Iterator[str]:
    tokens = next((figure for figure in figures if figure.name == _TOKENS), None)
    if tokens and tokens.predicted and tokens.reported:
        off = tokens.reported / tokens.predicted - 1
        how = "as reckoned" if abs(off) < 0.0005 else f"{abs(off):.1%} {'less' if off < 0 else 'more'} than reckoned"
        yield f"the engine's cache holds {tokens.reported:,.0f} tokens, {how}"
    use = _use(told)
    if use is None:
        return
    longest, _ = told.concurrency
    if use.running and use.blocks:
        room = use.running / use.share if use.share else 0.0
        worst = f"; the {longest:,.2f} that vLLM tells are of {serving.max_model_len:,} tokens each" if longest else ""
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
