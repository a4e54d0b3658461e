"""Checks of several engines: once, or at an interval within a bound of tokens per hour."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from exporters.config import BadConfig
from exporters.engine.golden_state import GoldenResult
from stack.golden.baseline import Baseline, GoldenError
from stack.golden.check import MOST_RUNS

HOUR_S = 3600.0

Checker = Callable[[str], Awaitable[GoldenResult]]
OnResult = Callable[[GoldenResult], None]


def most_tokens(baseline: Baseline) -> int:
    """Return the tokens that one check may use, if its numbers differ and are asked for again."""
    return baseline.tokens * MOST_RUNS


@dataclass(slots=True)
class TokenBudget:
    """Bound of tokens within any hour. Times in seconds of one monotonic clock."""

    per_hour: int
    _spent: deque[tuple[float, int]] = field(default_factory=deque)

    def spend(self, now_s: float, tokens: int) -> None:
        self._spent.append((now_s, tokens))

    def wait_s(self, now_s: float, tokens: int) -> float:
        """Return the seconds until so many tokens may be used; they must not be more than the bound."""
        while self._spent and now_s - self._spent[0][0] >= HOUR_S:
            self._spent.popleft()
        used = sum(each for _, each in self._spent)
        for at_s, each in self._spent:
            if used + tokens <= self.per_hour:
                return 0.0
            used -= each
            if used + tokens <= self.per_hour:
                return at_s + HOUR_S - now_s
        return 0.0


def budget_of(baseline: Baseline, per_hour: int) -> TokenBudget:
    """Return the budget of scheduled checks. Raises GoldenError if not even one check fits."""
    if most_tokens(baseline) > per_hour:
        raise GoldenError(
            f"one check may use {most_tokens(baseline)} tokens, more than --tokens-per-hour {per_hour}; raise it, or"
            " record fewer prompts"
        )
    return TokenBudget(per_hour)


async def keep_checking(
    urls: Sequence[str],
    check: Checker,
    every_s: float,
    budget: TokenBudget,
    need: int,
    on_result: OnResult,
    on_error: Callable[[str], None],
    stop: asyncio.Event,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Check every engine once per interval until `stop` is set. A check that fails, or that has to wait for the budget,
    does not stop the others."""
    while not stop.is_set():
        due_s = clock() + every_s
        for url in _until(stop, urls):
            if (wait_s := budget.wait_s(clock(), need)) > 0:
                on_error(f"{url} is checked in {wait_s:.0f} s: the tokens of this hour are used")
                await sleep(stop, wait_s)
                if stop.is_set():
                    return
            try:
                result = await check(url)
                budget.spend(clock(), result.tokens)
                on_result(result)
            except GoldenError as error:
                budget.spend(clock(), error.tokens)
                on_error(str(error))
            except (BadConfig, OSError, ValueError) as error:  # of the result file, or of the client's configuration
                on_error(str(error))
        await sleep(stop, due_s - clock())


def _until(stop: asyncio.Event, urls: Sequence[str]) -> Iterator[str]:
    for url in urls:
        if stop.is_set():
            return
        yield url


async def sleep(stop: asyncio.Event, seconds: float) -> None:
    """Wait, at most until `stop` is set."""
    try:
        await asyncio.wait_for(stop.wait(), max(0.0, seconds))
    except TimeoutError:
        return
