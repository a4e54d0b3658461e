"""Repeated checks: interval, budget of tokens, failures."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from exporters.engine.golden_state import GoldenCause, GoldenResult, GoldenVerdict
from stack.golden import schedule
from stack.golden.baseline import Baseline, EngineIdentity, GoldenError, GoldenPrompt
from stack.golden.comparison import NoiseLimits, TokenNoise
from stack.golden.schedule import HOUR_S, TokenBudget


def result(url: str, tokens: int = 10) -> GoldenResult:
    return GoldenResult(
        address=url,
        model="tiny",
        verdict=GoldenVerdict.SAME,
        cause=GoldenCause.NONE,
        sentence="",
        at_s=0.0,
        tokens=tokens,
    )


def test_budget_waits_for_the_oldest_checks_of_the_hour():
    budget = TokenBudget(100)
    assert 0 == budget.wait_s(0, 100)
    budget.spend(0, 60)
    budget.spend(600, 30)
    assert 0 == budget.wait_s(700, 10)
    assert HOUR_S - 700 == budget.wait_s(700, 20)
    assert HOUR_S + 600 - 700 == budget.wait_s(700, 80)
    assert 0 == budget.wait_s(HOUR_S, 70)
    assert 0 == budget.wait_s(HOUR_S + 600, 100)


def test_failure_of_one_engine_stops_no_other():
    checked, said, stop, failure = [], [], asyncio.Event(), GoldenError("down: refused")
    failure.tokens, budget = 400, TokenBudget(1000)

    async def check(url: str) -> GoldenResult:
        checked.append(url)
        if url == "down":
            raise failure
        if len(checked) == 4:
            stop.set()
        return result(url)

    async def run() -> list[GoldenResult]:
        found: list[GoldenResult] = []
        await asyncio.wait_for(
            schedule.keep_checking(("down", "up"), check, 0.01, budget, 10, found.append, said.append, stop), 60
        )
        return found

    found = asyncio.run(run())
    assert ["down", "up"] * 2 == checked
    assert ["up", "up"] == [one.address for one in found]
    assert ["down: refused"] * 2 == said
    assert budget.wait_s(time.monotonic(), 200) > 0, "tokens of a failed check count"


def test_check_waits_for_its_tokens_and_ends_when_stopped():
    said, stop = [], asyncio.Event()

    async def check(url: str) -> GoldenResult:
        return result(url, tokens=90)

    async def run() -> list[GoldenResult]:
        found: list[GoldenResult] = []

        def on_error(line: str) -> None:
            said.append(line)
            stop.set()

        budget = TokenBudget(100)
        await asyncio.wait_for(
            schedule.keep_checking(("one",), check, 0.01, budget, 50, found.append, on_error, stop, lambda: 0.0), 60
        )
        return found

    assert 1 == len(asyncio.run(run()))
    assert re.match(r"one .*\b3600 s: .*tokens", said[0])


def test_bound_below_one_check_is_refused(baseline_of_one):
    with pytest.raises(
        GoldenError, match=rf"\b{schedule.most_tokens(baseline_of_one)} tokens, .*--tokens-per-hour 100;"
    ):
        schedule.budget_of(baseline_of_one, 100)


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
