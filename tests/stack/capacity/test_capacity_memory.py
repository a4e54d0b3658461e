"""What stands beside the KV cache, and what a GPU and its slices really have."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.capacity.fit import default_seqs
from stack.capacity.gpus import GPUS, gpu_named, slices
from stack.capacity.kv import BadServing, Serving, cache
from stack.capacity.memory import default_batched_tokens, kv_budget, parts, weight_bytes
from stack.capacity.model import BadModel
from tests.support.model_configs import model

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "name", "mib"),
    [
        ("H200", "H200", 143_771),
        ("h100-80gb", "H100-80GB", 81_559),
        ("NVIDIA H100 80GB HBM3", "H100-80GB", 81_559),
        ("NVIDIA H100 NVL", "H100-NVL", 95_830),
        ("a100", "A100-80GB", 81_920),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 40_960),
        ("b200", "B200", 183_359),
        ("rtx 4090", "RTX-4090", 24_564),
        ("L40S", "L40S", 46_068),
    ],
)
def test_a_gpu_is_found_by_the_names_people_use(asked, name, mib):
    assert (name, mib * 2**20) == (gpu_named(asked).name, gpu_named(asked).memory_bytes)


@pytest.mark.parametrize("asked", ["H200/1g.18gb", "1g.18gb@H200", "h200/MIG-1g.18gb"])
def test_a_slice_is_smaller_than_its_name(asked):
    piece = gpu_named(asked)
    assert ("H200/1g.18gb", "H200", "1g.18gb", 7) == (piece.name, piece.of, piece.profile, piece.instances)
    assert 16.0 * GIB == piece.memory_bytes < 18e9


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("H20", "did you mean H200"),
        ("H200/1g.10gb", "did you mean H200/1g.18gb"),
        ("L4/1g.5gb", r"^L4 .*'1g\.5gb'; .*slices"),
        ("", "not known"),
    ],
)
def test_an_unknown_gpu_names_the_nearest(asked, told):
    with pytest.raises(ValueError, match=told):
        gpu_named(asked)


@pytest.mark.parametrize("whole", [found for found in GPUS if found.of is None], ids=lambda found: found.name)
def test_slices_fit_on_their_gpu(whole):
    pieces = slices(whole)
    assert whole.usable_bytes < whole.memory_bytes or whole.name == "MI300X"
    for piece in pieces:
        assert piece.instances * piece.memory_bytes <= whole.memory_bytes
        assert piece.instances * piece.flops <= whole.flops * 1.0001
        assert piece.bandwidth <= whole.bandwidth
        assert piece.memory_bytes < float((piece.profile or "").split(".")[1].removesuffix("gb")) * GIB
        assert piece.source
    assert list(pieces) == sorted(pieces, key=lambda piece: (piece.memory_bytes, piece.flops))
    assert whole.source


def test_every_name_is_found_again():
    assert list(GPUS) == [gpu_named(found.name) for found in GPUS]


def test_parts_and_what_is_left_are_as_another_planner_measured():
    """Llama-3.1-8B on an H100 at 0.9, vLLM 0.11: weights 14.99 GiB, cache 51.38 GiB; 0.32 takes its graphs off too, but
    activations fell."""
    found, serving, h100 = (
        model("Llama-3.1-8B-Instruct"),
        Serving(16_000, gpu_memory_utilization=0.9),
        gpu_named("H100"),
    )
    each = {part.name: part.bytes / GIB for part in parts(found, serving, h100)}
    assert 14.99 == pytest.approx(each["weights"], rel=0.005)
    assert 51.38 == pytest.approx(kv_budget(found, serving, h100, parts(found, serving, h100)) / GIB, rel=0.06)


def test_what_does_not_fit_leaves_less_than_nothing():
    """About 31 GB of weights on a 1g.10gb."""
    found, piece = replace(model("Llama-3.1-8B-Instruct"), weight_bytes=31e9), gpu_named("A100-80GB/1g.10gb")
    assert kv_budget(found, Serving(4096), piece, parts(found, Serving(4096), piece)) < 0
    assert 0 == cache(found, Serving(4096), -1.0).blocks


def test_only_weights_that_were_read_are_no_estimate():
    found = model("Llama-3.1-8B-Instruct")
    assert [True] * 4 == [part.estimated for part in parts(found, Serving(4096), gpu_named("H100"))]
    read = replace(found, weights_from="headers of 4 safetensors files")
    assert [False, True, True, True] == [part.estimated for part in parts(read, Serving(4096), gpu_named("H100"))]
    assert all(part.source for part in parts(found, Serving(4096), gpu_named("H100")))


def test_tensor_parallel_divides_all_but_what_is_copied():
    """Llama: all of it, up to its 8 KV heads. DeepSeek-V3: 1.03 billion parameters of down-projections and routers
    stand whole on each GPU."""
    llama = model("Llama-3.1-70B-Instruct")
    assert weight_bytes(llama, Serving(4096)) / 8 == pytest.approx(
        weight_bytes(llama, Serving(4096, tensor_parallel=8))
    )
    extra = weight_bytes(llama, Serving(4096, tensor_parallel=16)) - weight_bytes(llama, Serving(4096)) / 16
    assert 80 * 8192 * 8 * 256 * 2 / 16 == pytest.approx(extra), "each KV head stands on two GPUs"
    deep = model("DeepSeek-V3")
    extra = weight_bytes(deep, Serving(4096, tensor_parallel=8)) - weight_bytes(deep, Serving(4096)) / 8
    assert 1.03e9 * 7 / 8 == pytest.approx(extra, rel=0.02)


def test_the_stage_with_the_most_layers_holds_a_table_too():
    """Llama-3.1-70B on two stages: half the layers, and the embeddings or the output head."""
    llama = model("Llama-3.1-70B-Instruct")
    assert llama.weight_bytes is not None
    assert llama.weight_bytes / 2 == pytest.approx(weight_bytes(llama, Serving(4096, pipeline_parallel=2)))
    assert llama.weight_bytes / 3 < weight_bytes(llama, Serving(4096, pipeline_parallel=3))


@given(
    st.sampled_from(["Llama-3.1-70B-Instruct", "DeepSeek-V3", "Mixtral-8x7B-v0.1", "gemma-2-9b", "falcon-7b"]),
    st.integers(1, 16),
    st.integers(1, 8),
)
def test_more_gpus_never_hold_more_of_the_weights_each(name, split, stages):
    found = model(name)
    one = weight_bytes(found, Serving(4096, tensor_parallel=split, pipeline_parallel=stages))
    assert weight_bytes(found, Serving(4096, tensor_parallel=split + 1, pipeline_parallel=stages)) <= one * (1 + 1e-9)
    assert one <= weight_bytes(found, Serving(4096)) * (1 + 1e-9)


def test_slices_are_not_joined():
    with pytest.raises(BadServing, match=r"H200/3g\.71gb .*tensor_parallel 1"):
        parts(model("Llama-3.1-8B-Instruct"), Serving(4096, tensor_parallel=2), gpu_named("H200/3g.71gb"))


def test_unknown_weights_are_not_guessed():
    found = replace(model("Llama-3.1-8B-Instruct"), weight_bytes=None)
    with pytest.raises(BadModel, match=r"Llama-3\.1-8B-Instruct: .*weights"):
        parts(found, Serving(4096), gpu_named("H100"))


@pytest.mark.parametrize(
    ("name", "tokens"), [("B200", 16_384), ("H200", 8192), ("H100", 8192), ("A100", 2048), ("L4", 2048)]
)
def test_the_default_batch_depends_on_the_gpu(name, tokens):
    assert tokens == default_batched_tokens(gpu_named(name))


@pytest.mark.parametrize("piece", [each for each in GPUS if each.of], ids=lambda each: each.name)
def test_a_slice_has_the_defaults_of_its_whole_gpu(piece):
    """vLLM asks NVML for the memory of the GPU by its number, which is not that of the slice."""
    whole = gpu_named(piece.of)
    assert (default_batched_tokens(whole), default_seqs(whole)) == (default_batched_tokens(piece), default_seqs(piece))


TABLE = re.findall(
    r"^\| ([\w.-]+)[^|]*\| ([\d.]+) GiB \|(.*)\|$",
    (Path(__file__).parents[3] / "docs/guides/mig.md").read_text(),
    re.MULTILINE,
)
CONFIGS = {"Qwen2.5-7B": "Qwen2.5-7B-Instruct", "Llama-3.1-8B": "Llama-3.1-8B-Instruct"}


# of the first there is no config here
@pytest.mark.parametrize(("name", "weights", "cells"), TABLE[1:], ids=[name for name, *_ in TABLE[1:]])
def test_the_table_of_slices_is_what_is_reckoned(name, weights, cells):
    found = model(CONFIGS.get(name, name))
    for place, cell in zip(
        ("H100/1g.10gb", "H200/1g.18gb", "H100/3g.40gb", "H200/3g.71gb"), cells.split("|"), strict=True
    ):
        piece = gpu_named(place)
        serving = Serving(8192, max_num_batched_tokens=default_batched_tokens(piece), gpu_memory_utilization=0.9)
        left = kv_budget(found, serving, piece, parts(found, serving, piece))
        holds = math.floor(cache(found, serving, left).concurrency) if left > 0 else 0
        assert (f"{left / GIB:.1f} GiB, {holds}" if holds else "no") == cell.strip(), place
    assert float(weights) == pytest.approx(weight_bytes(found, Serving(8192)) / GIB, abs=0.06)
