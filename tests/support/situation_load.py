"""Clients and loads of a labelled situation."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from stack.lab import plan
from tests.support.engines import Engine

WORDS = range(100, 300)  # token ids that prompts are made of


@dataclass(frozen=True, slots=True)
class Clients:
    """So many clients that each ask again once they were answered. prompt, output: tokens, least and most. shared:
    tokens that all prompts begin with. pause_s: between two requests, on average. hang_up: pieces of the answer after
    which the stream is closed, least and most."""

    number: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0
    pause_s: float = 0.0
    hang_up: tuple[int, int] | None = None
    team: str = "demo"
    model: str = plan.MODEL


class Load:
    """Clients at work until they are stopped."""

    def __init__(self, url: str, keys: Mapping[str, str], seed: str) -> None:
        self._url, self._keys, self._seed = url, keys, seed
        self._tasks: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    def start(self, groups: Sequence[Clients]) -> None:
        for at, group in enumerate(groups):
            shared = random.Random(f"{self._seed}/{at}").choices(WORDS, k=group.shared)
            for number in range(group.number):
                self._tasks.append(
                    asyncio.create_task(self._client(group, shared, random.Random(f"{self._seed}/{at}/{number}")))
                )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        for wrong in (each for each in ended if not isinstance(each, asyncio.CancelledError) and each is not None):
            raise RuntimeError("a client failed") from wrong

    async def _client(self, group: Clients, shared: list[int], rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0, 0.2 + group.pause_s))
        while True:
            length = rng.randint(*group.prompt)
            body = {
                "model": group.model,
                "prompt": [*shared, *rng.choices(WORDS, k=length - len(shared))],
                "max_tokens": rng.randint(*group.output),
                "ignore_eos": True,
                "temperature": 1.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                await self._ask(body, group.team, rng.randint(*group.hang_up) if group.hang_up else None)
            except (aiohttp.ClientError, OSError):  # refused while the engine starts again
                await asyncio.sleep(0.5)
            await asyncio.sleep(rng.uniform(0.5, 1.5) * group.pause_s)

    async def _ask(self, body: Mapping[str, Any], team: str, pieces: int | None) -> None:
        headers = {"Authorization": f"Bearer {self._keys[team]}"} if self._keys else {}
        async with self._session.post(f"{self._url}/v1/completions", json=body, headers=headers) as answer:
            async for line in answer.content:
                if pieces is not None and line.startswith(b"data:"):
                    pieces -= 1
                    if pieces < 0:
                        answer.close()
                        return


def core_of(engine: Engine) -> int:
    """The process that schedules and computes; the one that answers HTTP is another."""
    (found,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/comm")
        if path.read_text().startswith("VLLM::EngineCor") and os.getpgid(int(path.parent.name)) == engine.process.pid
    )
    return found
