"""Plain requests beside a golden check, as users send them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import aiohttp


@contextlib.asynccontextmanager
async def company(url: str, count: int, model: str = "tiny") -> AsyncIterator[None]:
    """Keep `count` requests of different lengths running; they end before this does."""
    stop, all_sent = asyncio.Event(), asyncio.Event()

    async def keep_asking(session: aiohttp.ClientSession, number: int) -> None:
        for turn in itertools.count(number):
            if stop.is_set():
                return
            body = {"model": model, "prompt": "the cache of request " * (1 + turn * 5 % 11), "max_tokens": 4 + turn % 9}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert 200 == response.status
                await response.read()

    sent = itertools.count()
    trace = aiohttp.TraceConfig()

    async def note(*_: object) -> None:
        if next(sent) + 1 >= count:
            all_sent.set()

    trace.on_request_headers_sent.append(note)
    async with aiohttp.ClientSession(trace_configs=[trace]) as session:
        tasks = [asyncio.create_task(keep_asking(session, number)) for number in range(count)]
        try:
            if count:
                await asyncio.wait_for(all_sent.wait(), 60)
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)
