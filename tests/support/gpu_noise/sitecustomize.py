"""Noise of a GPU for vLLM on the CPU: products of matrices are split at random places of the inner dimension, and the
partial sums are rounded, as kernels do that choose their split by the size of the batch. On PYTHONPATH of the engine
alone; GOLDEN_NOISE is mild (sums in float32, rounded once) or strong (each part rounded to the model's dtype)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TARGET = "vllm.model_executor.layers.utils"
PARTS = 4


def split_linear(x: Any, weight: Any, bias: Any) -> Any:
    """Return x weight^T + bias, summed in parts."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    strong = os.environ.get("GOLDEN_NOISE") == "strong"
    inner = x.shape[-1]
    cuts = sorted({0, inner, *torch.randint(1, inner, (PARTS - 1,)).tolist()})
    total = None
    for start, end in itertools.pairwise(cuts):
        part = x[..., start:end].float() @ weight[:, start:end].float().t()
        if strong:
            part = part.to(x.dtype).float()
        total = part if total is None else total + part
        if strong:
            total = total.to(x.dtype).float()
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype)


def patch(module: ModuleType) -> None:
    """Replace what chooses the kernel of a layer."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = split_linear

    module.dispatch_cpu_unquantized_gemm = dispatch  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader = spec.loader
        assert loader is not None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            patch(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("GOLDEN_NOISE"):
    sys.meta_path.insert(0, _Finder())
