"""Background requests of the lab: streams with a shared prefix, short completions, one long prompt.

It is bounded: a few requests a second, each of at most 96 tokens, and it ends with the lab."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_TEXT = (
    "the of and to in is that for it with as was on be at by this request token cache queue metric model server prompt "
    "latency"
)
_WORDS = _TEXT.split()
_SHARED = "You are the help desk of a small observatory. " + " ".join(_WORDS) * 6
PACE_S = 0.4


@dataclass(slots=True)
class LabWorkload:
    """Sends until cancelled. keys: team -> API key. model: the served name. rng: so that a test can repeat it."""

    gateway: str
    keys: Mapping[str, str]
    model: str
    rng: random.Random = field(default_factory=random.Random)
    sent: int = 0
    failed: int = 0

    async def run(self) -> None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            asyncio.TaskGroup() as group,
        ):
            while True:
                group.create_task(self._one(session))
                await asyncio.sleep(self.rng.uniform(0.5, 1.5) * PACE_S)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        team = self.rng.choice(sorted(self.keys))
        route, body = self.shape()
        self.sent += 1
        try:
            headers = {"Authorization": f"Bearer {self.keys[team]}"}
            async with session.post(f"{self.gateway}{route}", json=body, headers=headers) as response:
                await response.read()
                self.failed += response.status >= 400
        except (aiohttp.ClientError, TimeoutError):
            self.failed += 1

    def shape(self) -> tuple[str, dict[str, Any]]:
        """The route and body of the next request."""
        question = " ".join(self.rng.choices(_WORDS, k=self.rng.randint(4, 24)))
        common: dict[str, Any] = {"model": self.model, "max_tokens": self.rng.randint(16, 96), "temperature": 0.8}
        match self.rng.random():
            case p if p < 0.6:
                messages = [{"role": "system", "content": _SHARED}, {"role": "user", "content": question}]
                return "/v1/chat/completions", {**common, "messages": messages, "stream": True}
            case p if p < 0.9:
                return "/v1/completions", {**common, "prompt": question}
            case _:
                return "/v1/chat/completions", {
                    **common,
                    "messages": [{"role": "user", "content": f"{question} " * 40}],
                    "stream": True,
                }
