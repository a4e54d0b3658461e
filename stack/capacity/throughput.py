"""Throughput bounds: operations and bytes of a step against a GPU's rates."""

from __future__ import annotations

from stack.capacity.gpus import GpuModel
from stack.capacity.kv import Serving
from stack.capacity.model import ModelShape
from stack.capacity.worksheet import WEIGHT_BYTES


def operations(shape: ModelShape, prompt: float, output: float) -> float | None:
    """Floating-point operations for so many tokens, at least; None where they are not known.

    Two for each parameter and token. The embedding table is looked up and not multiplied, the output head works for the
    reply alone; attention, which comes on top, is left out."""
    if (parameters := active(shape)) is None:
        return None
    table = shape.vocabulary * shape.hidden
    body = max(0, parameters - table * (1 if shape.tied else 2))
    return 2 * (body * (prompt + output) + table * output)


def plain(shape: ModelShape) -> bool:
    """Return whether what a request holds is tokens times bytes: not with windows or states, which do not grow with
    every token."""
    return all(layer.kind in ("full", "mla", "none") for layer in shape.layers)


def active(shape: ModelShape) -> int | None:
    """Parameters that one token goes through; None for a mixture of experts, of which it takes a part that the shape
    does not tell."""
    return None if shape.moe else shape.parameters


def weights_read(shape: ModelShape, serving: Serving) -> float | None:
    """Bytes that each GPU reads at least to make a token; None where they are not known. Of an embedding table only
    single rows are read, unless it is the output head too. Stages of a pipeline work one after the other, so only
    tensor parallelism makes it less."""
    if shape.weight_bytes is None or active(shape) is None:
        return None
    table = 0.0 if shape.tied else shape.vocabulary * shape.hidden * WEIGHT_BYTES[shape.dtype]
    return max(0.0, shape.weight_bytes - table) / serving.tensor_parallel


def flops_of(shape: ModelShape, serving: Serving, gpu: GpuModel) -> float:
    """Dense operations a second of a replica; 8 bits may double them, 4 bits in floating point again."""
    kind = shape.quantization or ""
    return gpu.flops * (4 if "fp4" in kind else 2 if kind else 1) * serving.tensor_parallel * serving.pipeline_parallel
