"""Wait for a state, never for a time.

Both helpers poll a condition until it returns something true, and return that. When they give up, the error says what
they last saw: the last value, or the last error. The limit is generous on purpose: it only ends a test that would never
end."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import aiohttp

LIMIT_S = 60.0
# Errors of a condition that may still come to hold.
NOT_YET = (OSError, AssertionError, LookupError, ValueError, aiohttp.ClientError, TimeoutError)


def eventually(
    condition: Callable[[], Any], what: str = "the condition", within_s: float = LIMIT_S, every_s: float = 0.02
) -> Any:
    """Poll a condition from a thread; return its first true value. Raises AssertionError with what was last seen."""
    give_up = _limit(within_s, what)
    while True:
        last: Any
        try:
            if last := condition():
                return last
        except NOT_YET as error:
            last = error
        give_up(last)
        time.sleep(every_s)


async def until(
    condition: Callable[[], Any], what: str = "the condition", within_s: float = LIMIT_S, every_s: float = 0.01
) -> Any:
    """Poll a condition, which may be a coroutine function, from a coroutine; otherwise as `eventually`."""
    give_up = _limit(within_s, what)
    while True:
        last: Any
        try:
            last = condition()
            if last := (await last if inspect.isawaitable(last) else last):
                return last
        except NOT_YET as error:
            last = error
        give_up(last)
        await asyncio.sleep(every_s)


def _limit(within_s: float, what: str) -> Callable[[Any], None]:
    deadline = time.monotonic() + within_s

    def give_up(last: Any) -> None:
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not hold within {within_s:.0f} s; last seen: {last!r}")

    return give_up
