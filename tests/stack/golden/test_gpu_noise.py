"""Noise limits of golden checks on log-probabilities that a real GPU computed (tests/golden/gpu-noise)."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stack.golden.comparison import LogprobDifference, compare, is_beyond, learn, logit_bits
from stack.golden.verdict import LARGE_MEAN

CAPTURED = Path(__file__).parents[2] / "golden" / "gpu-noise" / "h100-bfloat16.json.gz"


@pytest.fixture(scope="module")
def captured() -> Any:
    return msgspec.json.decode(gzip.decompress(CAPTURED.read_bytes()))


@pytest.fixture(scope="module")
def learned(captured):
    return learn({int(size): runs for size, runs in captured["levels"].items()})


@pytest.fixture(scope="module")
def found(captured, learned):
    """Differences of the changed models, by name."""
    noise, limits = learned
    return {name: compare(noise, limits.least_sd, each["runs"]) for name, each in captured["variants"].items()}


def test_unchanged_gpu_is_no_alarm_at_any_batch_size(captured, learned):
    noise, limits = learned
    results = [compare(noise, limits.least_sd, check["runs"]) for check in captured["checks"]]
    assert {1, 2, 4, 8, 16, 32} == {check["size"] for check in captured["checks"]}
    assert limits.least_sd > 0, "a GPU is not exact"
    assert not [result for result in results if is_beyond(result, limits)]


def beyond(found: dict[str, LogprobDifference], learned: Any) -> set[str]:
    return {name for name, each in found.items() if is_beyond(each, learned[1])}


def test_damage_beyond_noise_is_found(found, learned):
    """A matrix library that rounds otherwise is noise. One weight, even the largest of its layer, is hidden by it, as
    the guide says."""
    assert {"blas-cublaslt", "flip-largest"} == found.keys() - beyond(found, learned)


def test_another_kernel_is_a_smaller_change_than_rounded_weights(found):
    """Where vLLM's release explains a difference, its size tells rounding from other weights."""
    assert found["attention-eager"].mean_abs < LARGE_MEAN
    assert found["float16"].mean_abs < LARGE_MEAN
    assert min(found["int8"].mean_abs, found["int4"].mean_abs) > LARGE_MEAN


def test_grid_of_logits_names_the_dtype(captured):
    bits = {name: logit_bits(each["gaps"]) for name, each in captured["variants"].items()}
    same = logit_bits(captured["gaps"])
    assert same is not None
    assert (None, True) == (bits["float32"], (bits["float16"] or 0) >= same + 2)
    assert all(abs((bits[name] or 0) - same) <= 1 for name in bits.keys() - {"float16", "float32"})
