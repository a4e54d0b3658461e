"""KV cache arithmetic of vLLM 0.32: bytes per token, blocks, concurrency.

Computed as vLLM does it, step by step: a page per layer (v1/kv_cache_interface.py), layers of one kind in groups of
equal size that draw their blocks from one pool (v1/core/kv_cache_utils.py: get_kv_cache_groups,
get_kv_cache_config_from_groups, get_kv_cache_capacity), the smallest pipeline stage deciding for all. Units: bytes and
tokens of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

from stack.capacity.config_json import shown
from stack.capacity.model import Layer, ModelShape

# Bytes per value, and bytes of scales beside every head's keys and again beside its values (triton_attn.py,
# customize_spec).
CELLS: dict[str, tuple[float, int]] = {
    "float16": (2, 0),
    "bfloat16": (2, 0),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), (1, 0)),
    "int8_per_token_head": (1, 4),
    "fp8_per_token_head": (1, 4),
    "int4_per_token_head": (0.5, 4),
    **dict.fromkeys(("nvfp4", "nvfp4_4over6"), (0.5 + 1 / 16, 0)),  # torch_utils.py, nvfp4_kv_cache_full_dim
}
# a model's own type may also be the wide one (--dtype float32); vLLM takes no such cache type
SERVED = {**CELLS, "float32": (4, 0)}
# bytes per token of a packed latent, scales included (mla_attention.py)
BLOBS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


LARGEST = 10**9  # of a flag; more is a typing mistake


class BadServing(ValueError):
    """Flags that vLLM would not start with: one sentence that names the flag."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The flags of `vllm serve` that memory depends on, at the defaults of vLLM 0.32."""

    max_model_len: int
    cache_dtype: str = "auto"
    block_size: int = 16  # latent attention and some kernels take 32 to 128, which changes no more than the rounding
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    # of the API server on H100 and H200; 16384 from 160 GiB, 2048 below 70 GiB and on A100 (arg_utils.py)
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.92  # config/cache.py
    async_scheduling: bool = True  # one step more in flight, whose blocks of a window are not yet free
    prefix_caching: bool = True  # a state then keeps two blocks or three, not one
    hybrid_manager: bool = True  # without it (--disable-hybrid-kv-cache-manager) windows are kept whole

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "tensor_parallel", "pipeline_parallel", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
                raise BadServing(f"{name} should be a whole number from 1 to {LARGEST:,} and is {shown(value)}")
        if self.block_size % 16:
            raise BadServing(
                f"block_size should be a multiple of 16, as vLLM's kernels want it, and is {self.block_size}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise BadServing(
                f"gpu_memory_utilization should be above 0 and at most 1 and is {self.gpu_memory_utilization!r}"
            )
        if self.cache_dtype not in ("auto", *CELLS, *BLOBS):
            raise BadServing(
                f"the cache type {self.cache_dtype!r} is not computed here; known are auto,"
                f" {', '.join((*CELLS, *BLOBS))}"
            )

    @property
    def in_flight(self) -> int:
        """Tokens that are scheduled and not yet settled: one batch for every pipeline stage, and one more with
        asynchronous scheduling.

        Source: vLLM config/vllm.py, max_concurrent_batches of the V2 model runner, max_in_flight_tokens."""
        return (self.pipeline_parallel + self.async_scheduling) * self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Capacity of a number of bytes, in vLLM's own terms: num_gpu_blocks, kv_cache_size_tokens,
    kv_cache_max_concurrency.

    Not sure where layers keep a state: vLLM then chooses its block size from the attention backend, so the log has the
    last word."""

    bytes: float
    blocks: int
    tokens: int
    concurrency: float
    sure: bool


@dataclass(frozen=True, slots=True)
class LayerBlock:
    """Block of one layer: vLLM's KVCacheSpec."""

    kind: str  # full, mla, window, state
    tokens: int  # in a block
    bytes: float
    window: int | None = None
    checkpoints: int = 0  # of a state

    def blocks(self, tokens: int, serving: Serving) -> int:
        """Blocks that a request of so many tokens may hold.

        window: min(W - 1 + in flight, tokens) / block, and one more because a window need not begin with a block."""
        if self.kind == "state":
            return 2 + self.checkpoints if serving.prefix_caching else 1
        if self.window is not None:
            return ceil(min(_held(self, serving), tokens) / self.tokens) + 1
        return ceil(tokens / self.tokens)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one table of blocks, and the page of each."""

    places: tuple[int, ...]
    pages: tuple[LayerBlock, ...]


def token_bytes(shape: ModelShape, serving: Serving, tokens: int | None = None) -> float:
    """Return the bytes per GPU that the last token of a request of so many tokens costs (None: of max_model_len):
    layers that still grow at that length, with what padding to equal groups adds.

    layers x max(1, kv_heads / TP) x (head_k + head_v) x cell, or layers x latent x cell for MLA whatever the
    tensor-parallel size. A layer with a window costs as much as a full one until it holds all that it ever may, which
    is window - 1 + the tokens in flight, and nothing beyond."""
    groups = _groups(shape, serving)
    block = _largest_block(shape, serving, groups)
    length = serving.max_model_len if tokens is None else tokens
    growing = (group.pages[0] for group in groups if length <= _held(group.pages[0], serving))
    return sum(block / page.tokens for page in growing)  # divided at once: 1 / tokens is seldom exact


def token_costs(shape: ModelShape, serving: Serving) -> list[tuple[int, float]]:
    """Return what one token costs by length: (up to so many tokens of a request, bytes per GPU), the last one up to
    max_model_len."""
    ends = {_held(group.pages[0], serving) for group in _groups(shape, serving)}
    lengths = sorted({serving.max_model_len, *(int(end) for end in ends if 0 < end < serving.max_model_len)})
    return [(length, token_bytes(shape, serving, length)) for length in lengths]


def request_bytes(shape: ModelShape, serving: Serving, tokens: int) -> float:
    """Bytes per GPU that a request of so many tokens may hold: whole blocks, windows with the tokens in flight,
    states."""
    groups = _groups(shape, serving)
    return _request_blocks(groups, serving, tokens) * _largest_block(shape, serving, groups)


def cache(shape: ModelShape, serving: Serving, kv_bytes: float) -> KvCapacity:
    """Return the cache that vLLM makes of so many bytes per GPU; concurrency is of requests that fill max_model_len."""
    groups = _groups(shape, serving)
    each = _largest_block(shape, serving, groups)
    blocks = max(0, int(kv_bytes // each))
    concurrency = blocks / _request_blocks(groups, serving, serving.max_model_len)
    sure = not any(layer.kind == "state" for layer in shape.layers)
    return KvCapacity(float(kv_bytes), blocks, int(concurrency * serving.max_model_len), concurrency, sure)


def longest_context(shape: ModelShape, serving: Serving, kv_bytes: float) -> int:
    """The largest max_model_len that vLLM starts with on so many bytes per GPU; 0 when not one token fits.

    vLLM keeps one block back and refuses to start when one request of max_model_len does not fit into the rest."""
    low, high = 0, serving.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if starts(shape, replace(serving, max_model_len=middle), kv_bytes) else (low, middle - 1)
        )
    return low


def starts(shape: ModelShape, serving: Serving, kv_bytes: float) -> bool:
    """Return whether vLLM starts with so many bytes per GPU: one request of max_model_len and the block that it keeps
    back fit."""
    groups = _groups(shape, serving)
    each = _largest_block(shape, serving, groups)
    return (_request_blocks(groups, serving, serving.max_model_len) + 1) * each <= kv_bytes


def most_layers(shape: ModelShape, serving: Serving) -> int:
    """Layers of the largest pipeline stage."""
    return max(len(stage) for stage in _stages(shape, serving))


def _held(page: LayerBlock, serving: Serving) -> float:
    """Return the most tokens of a request that a layer keeps; 0 for a state."""
    if page.kind == "state":
        return 0
    return inf if page.window is None else page.window - 1 + serving.in_flight


def _request_blocks(groups: Sequence[LayerGroup], serving: Serving, tokens: int) -> int:
    return sum(max(page.blocks(tokens, serving) for page in group.pages) for group in groups)


def _largest_block(shape: ModelShape, serving: Serving, groups: Sequence[LayerGroup]) -> float:
    """Bytes of one block of the pool: those of the group with the most, on the pipeline stage where they are most."""
    return max(
        sum(page.bytes for place, page in zip(group.places, group.pages, strict=True) if place in stage)
        for stage in _stages(shape, serving)
        for group in groups
    )


def _stages(shape: ModelShape, serving: Serving) -> list[range]:
    """The layers of each pipeline stage, split as vLLM does it: what is left over goes to the stages before the last
    (get_pp_indices)."""
    number, stages = len(shape.layers), serving.pipeline_parallel
    if stages > number:
        raise BadServing(f"pipeline_parallel is {stages} and the model has {number} layers; take fewer stages")
    sizes = [number // stages] * stages
    for behind in range(2, number % stages + 2):
        sizes[-behind] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _page(layer: Layer, shape: ModelShape, serving: Serving) -> LayerBlock | None:
    """One layer's page; None for a layer that keeps nothing of its own."""
    named = shape.dtype if serving.cache_dtype == "auto" else serving.cache_dtype
    if layer.kind == "none":
        return None
    if layer.kind == "state":
        return LayerBlock(
            "state", serving.block_size, layer.state_bytes / serving.tensor_parallel, checkpoints=layer.checkpoints
        )
    heads, split = layer.kv_heads, serving.tensor_parallel
    if shape.heads % split:
        raise BadServing(
            f"tensor_parallel {split} does not divide the {shape.heads} attention heads of {shape.name}; vLLM"
            " refuses it"
        )
    if layer.kind == "mla":
        each = BLOBS[named] if named in BLOBS else layer.latent * SERVED[named][0] + 2 * SERVED[named][1]
        return LayerBlock("mla", serving.block_size, serving.block_size * each)
    if named in BLOBS:
        raise BadServing(f"the cache type {named} is for multi-head latent attention, which {shape.name} does not use")
    if heads % split and split % heads:
        raise BadServing(
            f"tensor_parallel {split} neither divides nor is a multiple of the {heads} KV heads of {shape.name}; vLLM"
            " refuses it"
        )
    cell, scale = SERVED[named]
    each = max(1, heads // split) * ((layer.head_k + layer.head_v) * cell + 2 * scale)
    if layer.kind == "window":
        return LayerBlock("window", serving.block_size, serving.block_size * each, layer.window)
    # a chunk too: vLLM keeps it whole by default
    return LayerBlock("full", serving.block_size, serving.block_size * each)


@lru_cache(maxsize=256)  # a plan asks for the same ones hundreds of times
def _groups(shape: ModelShape, serving: Serving) -> tuple[LayerGroup, ...]:
    """The layers in groups of one block table each: get_kv_cache_groups, for layouts that keep a layer's blocks
    together (all of CUDA's)."""
    pages = {
        place: page for place, layer in enumerate(shape.layers) if (page := _page(layer, shape, serving)) is not None
    }
    if not pages:
        raise BadServing(f"{shape.name} has no layer with a KV cache")
    pages = _aligned_states(pages, serving)
    if not serving.hybrid_manager and any(page.kind == "full" for page in pages.values()):
        pages = {
            place: replace(page, kind="full", window=None) if page.kind == "window" else page
            for place, page in pages.items()
        }
    if _alike(list(pages.values())):
        return (LayerGroup(tuple(pages), tuple(pages.values())),)
    return tuple(_equal_groups(_equal_pages(pages)))


def _alike(pages: Sequence[LayerBlock]) -> bool:
    """Return whether all layers need the same number of blocks, so that one table serves them: full ones, one window,
    or states of one size."""
    first = pages[0]
    if first.kind in ("full", "mla"):
        return all(page.kind in ("full", "mla") and page.tokens == first.tokens for page in pages)
    if first.kind == "window":
        return all(
            page.kind == "window" and page.window == first.window and page.tokens == first.tokens for page in pages
        )
    return all(page.kind == "state" and page.bytes == first.bytes for page in pages)


def _aligned_states(pages: dict[int, LayerBlock], serving: Serving) -> dict[int, LayerBlock]:
    """States padded to the page of attention, whose blocks grow until a state fits into one (platforms/interface.py,
    _align_hybrid_block_size)."""
    states = [page for page in pages.values() if page.kind == "state"]
    rest = [page for page in pages.values() if page.kind != "state"]
    if not states or not rest:
        return pages
    per_token = rest[0].bytes / rest[0].tokens
    step = max(serving.block_size, 128) if rest[0].kind == "mla" else serving.block_size
    tokens = max(serving.block_size, step * ceil(max(page.bytes for page in states) / (step * per_token)))
    return {
        place: replace(
            page, tokens=tokens, bytes=tokens * (per_token if page.kind == "state" else page.bytes / page.tokens)
        )
        for place, page in pages.items()
    }


def _equal_pages(pages: dict[int, LayerBlock]) -> dict[int, LayerBlock]:
    """Pages of equal bytes: smaller ones hold more tokens where that comes out even, else they are padded
    (unify_kv_cache_spec_page_size)."""
    largest = max(page.bytes for page in pages.values())
    return {
        place: replace(
            page,
            bytes=largest,
            tokens=page.tokens
            * (int(largest // page.bytes) if page.kind != "state" and not largest % page.bytes else 1),
        )
        for place, page in pages.items()
    }


def _equal_groups(pages: dict[int, LayerBlock]) -> list[LayerGroup]:
    """Groups of equal numbers of layers: as many as the rarest kind has, or the commonest where that is less than half
    more again."""
    buckets: dict[LayerBlock, list[int]] = {}
    for place, page in pages.items():
        buckets.setdefault(page, []).append(place)
    sizes = [len(places) for places in buckets.values()]
    size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
    groups = []
    for page, places in buckets.items():
        number = ceil(len(places) / size)
        groups += [LayerGroup(tuple(places[i::number]), (page,) * len(places[i::number])) for i in range(number)]
    return groups
