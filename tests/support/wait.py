"""Wait for a state, never for a time.

Both helpers poll a condition until it returns something true, and return that. When they give up, the error says what
they last saw: the last value, or the last error. The limit is generous on purpose: it only ends a test that would never
end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp

LIMIT_S = 60.0
waited: defaultdict[str, float] = defaultdict(float)  # seconds by condition; file_times.py reads and clears them
# Errors of a condition that may still come to hold.
NOT_YET = (OSError, AssertionError, LookupError, ValueError, aiohttp.ClientError, TimeoutError)


def eventually(
    condition: Callable[[], Any], what: str = "the condition", within_s: float = LIMIT_S, every_s: float = 0.02
) -> Any:
    """Poll a condition from a thread; return its first true value. Raises AssertionError with what was last seen."""
    with _limit(within_s, what) as give_up:
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
    with _limit(within_s, what) as give_up:
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


async def settled(read: Callable[[], Any], what: str = "the value", every_s: float = 0.1) -> Any:
    """Read a value, which may come from a coroutine function, until two readings in succession agree; return it."""
    former: Any = ...

    async def agrees() -> tuple[Any] | None:
        nonlocal former
        last, former = former, read()
        if inspect.isawaitable(former):
            former = await former
        return (former,) if last == former else None

    return (await until(agrees, f"{what} settles", every_s=every_s))[0]


async def turns(count: int = 4) -> None:
    """Run the event loop so often: what one task wrote to a socket of this process has been read by another."""
    for _ in range(count):
        await asyncio.sleep(0)


@contextlib.contextmanager
def _limit(within_s: float, what: str) -> Iterator[Callable[[Any], None]]:
    """Yield what raises AssertionError once the time is over; count the seconds of the block."""
    began = time.monotonic()

    def give_up(last: Any) -> None:
        if time.monotonic() > began + within_s:
            raise AssertionError(f"{what} did not hold within {within_s:.0f} s; last seen: {last!r}")

    try:
        yield give_up
    finally:
        waited[what] += time.monotonic() - began
