"""Baseline without an engine."""

from __future__ import annotations

import pytest

from stack.golden.baseline import Baseline, EngineIdentity, GoldenPrompt
from stack.golden.comparison import NoiseLimits, TokenNoise


@pytest.fixture
def baseline_of_one() -> Baseline:
    prompt = GoldenPrompt(
        name="one", text="ab", text_ids=(1, 2), ids=(1, 2), alone=(-1.0,), noise=TokenNoise((-1.0,), (0.0,), 1)
    )
    return Baseline(
        recorded="2026-11-26T00:00:00+00:00",
        route="/v1/completions",
        engine=EngineIdentity(model="tiny"),
        prompts=(prompt,),
        greedy=(),
        limits=NoiseLimits(0.0, 0.0, 0.0, 0.0, 0.0),
        levels=(1,),
        runs=12,
        tokens=30,
    )
