"""Check if a model fits a GPU, and the single changes that would make it fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from stack.capacity import gpus, kv, memory
from stack.capacity.gpus import GIB, GpuModel
from stack.capacity.kv import BadServing, KvCapacity, Serving
from stack.capacity.memory import MemoryPart, default_batched_tokens
from stack.capacity.model import ModelShape
from stack.capacity.worksheet import WEIGHT_BYTES


def milli(time_s: float, figures: int = 3) -> str:
    return f"{time_s * 1000:.{figures}g} ms" if time_s < 1 else f"{time_s:,.{figures}g} s"


NO_WAY = "no single change that we know; make two, such as quantized weights on several GPUs"
USUAL_SHARE = Serving(1).gpu_memory_utilization


class DoesNotFit(ValueError):
    """Requirement that is too large for the GPU, and by how much. ways: changes of which each one alone makes it
    fit."""

    def __init__(self, what: str, ways: tuple[str, ...]) -> None:
        super().__init__(f"{what}. What fits: {'; '.join(ways or (NO_WAY,))}")
        self.what, self.ways = what, ways


def room(shape: ModelShape, serving: Serving, gpu: GpuModel) -> tuple[tuple[MemoryPart, ...], float, KvCapacity]:
    """Return the memory beside the cache, the bytes left for the cache, and what they hold. Raises DoesNotFit with what
    would."""
    name, where = shape.name or "the model", placed(serving, gpu)
    if gpu.profile and serving.tensor_parallel * serving.pipeline_parallel > 1:
        raise DoesNotFit(
            f"{gpu.name} is a MIG slice, and a model cannot be split over slices", ways(shape, serving, gpu)
        )
    its_parts = memory.parts(shape, serving, gpu)
    spare = memory.kv_budget(shape, serving, gpu, its_parts)
    if spare <= 0:
        whole, largest = sum(part.bytes for part in its_parts), max(its_parts, key=lambda part: part.bytes)
        what = (
            f"{name} does not fit {where}: {largest.name} {gib(largest.bytes)} and {gib(whole - largest.bytes)}"
            f" besides, per GPU, and vLLM may use {gib(whole + spare)} of {gib(usable(gpu))} (--gpu-memory-utilization"
            f" {serving.gpu_memory_utilization:g}): {gib(-spare)} too much"
        )
        raise DoesNotFit(what, ways(shape, serving, gpu))
    cache = kv.cache(shape, serving, spare)
    if not kv.starts(shape, serving, spare):
        one = kv.request_bytes(shape, serving, serving.max_model_len)
        what = (
            f"vLLM does not start {name} on {where} with max_model_len {serving.max_model_len:,}: one such request"
            f" takes {gib(one)} of KV cache per GPU, and {gib(spare)} are left for it ({cache.concurrency:.2f} of one"
            " request)"
        )
        raise DoesNotFit(what, ways(shape, serving, gpu))
    return its_parts, spare, cache


def placed(serving: Serving, gpu: GpuModel) -> str:
    """The GPU, or so many of it."""
    number = serving.tensor_parallel * serving.pipeline_parallel
    return f"{number} x {gpu.name}" if number > 1 else gpu.name


def fits(shape: ModelShape, serving: Serving, gpu: GpuModel) -> bool:
    """Return whether vLLM starts: the weights fit, and one request of max_model_len."""
    if gpu.profile and serving.tensor_parallel * serving.pipeline_parallel > 1:
        return False
    try:
        return kv.starts(shape, serving, left(shape, serving, gpu))
    except BadServing:  # heads that cannot be divided so
        return False


def left(shape: ModelShape, serving: Serving, gpu: GpuModel) -> float:
    """Bytes per GPU for the KV cache."""
    return memory.kv_budget(shape, serving, gpu, memory.parts(shape, serving, gpu))


def quantized(shape: ModelShape, dtype: str) -> ModelShape:
    """Return the model with weights of this type, approximately: embeddings and the last layer stay as they are, as in
    nearly all such files."""
    parameters = shape.parameters or 0
    kept = min(parameters, (1 if shape.tied else 2) * shape.vocabulary * shape.hidden)
    weights = (parameters - kept) * WEIGHT_BYTES[dtype] + kept * WEIGHT_BYTES[shape.dtype]
    return replace(
        shape,
        weight_bytes=weights,
        weights_from=f"parameters at {dtype}, embeddings at {shape.dtype}",
        quantization=dtype,
    )


def ways(shape: ModelShape, serving: Serving, gpu: GpuModel) -> tuple[str, ...]:
    """Changes of which each one alone makes it fit; the nearest hardware first."""
    return tuple(way for way in _changes(shape, serving, gpu) if way)


def _least_split(shape: ModelShape, serving: Serving, gpu: GpuModel, whole: GpuModel) -> int:
    """Return the least number of whole GPUs, more than now, over which the model fits; 0 where none does."""
    for wide in (2, 4, 8):
        split = replace(serving, tensor_parallel=wide)
        if wide > serving.tensor_parallel and fits(shape, _on(split, gpu, whole), whole):
            return wide
    return 0


def _smaller_weights(shape: ModelShape, serving: Serving, gpu: GpuModel) -> str | None:
    for dtype in ("fp8", "int4"):
        small = quantized(shape, dtype)
        if fits(small, serving, gpu):
            return f"weights in {dtype}, about {gib(small.weight_bytes or 0)} in all (check the quality)"
    return None


def _changes(shape: ModelShape, serving: Serving, gpu: GpuModel) -> Iterator[str | None]:
    alone = replace(serving, tensor_parallel=1, pipeline_parallel=1) if gpu.profile else serving
    whole = gpus.whole(gpu)
    number = alone.tensor_parallel * alone.pipeline_parallel
    many = f"{number} x " if number > 1 else ""
    near = _smallest(shape, alone, gpu, (*gpus.slices(whole), whole))
    if near:
        which = "its smallest slice that does" if near.profile else "the whole GPU"
        yield f"{many}{near.name}, {which} with max_model_len {serving.max_model_len:,}"
    other = _smallest(shape, alone, gpu, (each for each in gpus.GPUS if each.profile is None))
    if other and other != near:
        yield f"{many}{other.name}, the smallest whole GPU that does ({gib(usable(other))})"
    if serving.gpu_memory_utilization < USUAL_SHARE and fits(
        shape, replace(alone, gpu_memory_utilization=USUAL_SHARE), gpu
    ):
        yield f"--gpu-memory-utilization {USUAL_SHARE:g}, as vLLM has it"
    one_is_enough = near is not None and number == 1 and not (gpu.profile and serving.tensor_parallel > 1)
    split = _least_split(shape, alone, gpu, whole)
    if split and not one_is_enough:
        yield f"{split} whole {whole.name} with --tensor-parallel-size {split}"
    if shape.parameters and shape.quantization is None:
        yield _smaller_weights(shape, alone, gpu)
    if alone.cache_dtype == "auto" and fits(shape, replace(alone, cache_dtype="fp8"), gpu):
        yield "--kv-cache-dtype fp8 (check the quality)"
    most = longest(shape, alone, gpu)
    yield f"--max-model-len {most} or less" if most else None


def longest(shape: ModelShape, serving: Serving, gpu: GpuModel) -> int:
    """The longest max_model_len up to this one with which vLLM starts; 0 where there is none."""
    return kv.longest_context(shape, serving, max(0.0, left(shape, serving, gpu)))


def _smallest(shape: ModelShape, serving: Serving, gpu: GpuModel, among: Iterable[GpuModel]) -> GpuModel | None:
    ordered = sorted(among, key=lambda each: (usable(each), each.flops))
    return next((each for each in ordered if fits(shape, _on(serving, gpu, each), each)), None)


# ---- vLLM's own choices


def default_seqs(gpu: GpuModel) -> int:
    """--max-num-seqs of `vllm serve` where nobody sets it. For a slice as for its whole GPU; source: see
    default_batched_tokens."""
    whole = gpus.whole(gpu)
    return 1024 if usable(whole) >= 70 * GIB and "A100" not in whole.name else 256


def usable(gpu: GpuModel) -> int:
    """Bytes of which gpu_memory_utilization is a share: what CUDA reports."""
    return gpu.usable_bytes or gpu.memory_bytes


def _on(serving: Serving, gpu: GpuModel, other: GpuModel) -> Serving:
    """Return the plan on another GPU, where vLLM chooses another batch; what a person chose stays."""
    chosen = serving.max_num_batched_tokens != default_batched_tokens(gpu)
    return serving if chosen else replace(serving, max_num_batched_tokens=default_batched_tokens(other))


def gib(number: float) -> str:
    return f"{number / GIB:,.2f} GiB"
