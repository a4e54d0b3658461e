"""Drill traffic: requests to the lab's engine during a fault, through the gateway or past it. Loopback
only, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import aiohttp

from stack.drill.lab import DrillLab
from stack.lab.plan import MODEL
from stack.lab.supervisor import LabError

_TEXT = (
    "the of and to in is that for it with as was on be at by this request token cache queue metric model server prompt "
    "latency"
)
WORDS = _TEXT.split()
ENDS: dict[str, Any] = {"stop": [" ", "e", "a", "t"], "min_tokens": 4}  # a random model seldom says that it is done
SHARED = "You are the help desk of a small observatory. " + " ".join(WORDS) * 6

_rng = random.Random()  # noqa: S311


async def ask(
    lab: DrillLab,
    *,
    tokens: int = 24,
    prompt: str = SHARED,
    direct: bool = False,
    key: str | None = None,
    stream: bool = False,
    hang_up: bool = False,
    **more: Any,
) -> int:
    """One completion; the status of the answer, 0 where none came. hang_up: close the connection after the first token.

    direct: to the engine, past the gateway. Raises LabError for a request that this vLLM calls wrong: a drill that asks
    nothing proves nothing."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "stream": stream or hang_up,
        **more,
    }
    headers = {} if direct else {"Authorization": f"Bearer {key or lab.keys['demo']}"}
    try:
        async with lab.session.post(
            f"{lab.url('vllm' if direct else 'gateway')}/v1/completions", json=body, headers=headers
        ) as response:
            if hang_up:
                await response.content.readany()
                response.close()
            else:
                answer = await response.text()
                if response.status in (400, 404):
                    raise LabError(f"vLLM does not take what a drill asks: {answer[:300]}")
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        await asyncio.sleep(0.2)  # who asks again and again must not do so at once
        return 0


async def call_tool(lab: DrillLab) -> int:
    """One chat with a tool, sent to the engine past the gateway; the status of the answer, 0 where none came."""
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the"}], "max_tokens": 1, "tools": [tool]}
    try:
        async with lab.session.post(f"{lab.url('vllm')}/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return 0


async def good(lab: DrillLab) -> int:
    """A short chat as users have it: it shares its beginning with the others and ends by itself."""
    return await ask(lab, prompt=f"{SHARED} {some_words(8)}", stream=True, **ENDS)


async def short(lab: DrillLab) -> int:
    """The cheapest good request."""
    return await ask(lab, tokens=1, prompt="the")


def some_words(count: int) -> str:
    return " ".join(_rng.choices(WORDS, k=count))


async def many(count: int, at_once: int, make: Callable[[], Awaitable[Any]]) -> None:
    """Send that many requests, some at a time, until all are answered."""
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await make()

    await asyncio.gather(*(work() for _ in range(at_once)))


async def every(seconds: float, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """One more request each so many seconds, whether or not the others were answered; until cancelled."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(make())
            await asyncio.sleep(seconds)


async def crowd(size: int, make: Callable[[], Awaitable[Any]]) -> None:
    """So many clients, each of which asks again when it is answered; until cancelled."""

    async def client() -> None:
        while True:
            await make()

    await asyncio.gather(*(client() for _ in range(size)))


@contextlib.asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run the coroutines while the block lasts; then they are cancelled, and their connections closed. Raises what one
    of them ended with."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        while isinstance(end, ExceptionGroup):
            end = end.exceptions[0]
        if isinstance(end, Exception):
            raise end
