"""The clients of `make bench-soak`: good ones and all others, each request with an id of its own, so that its line can
be looked for.

Invariant: of every request whose head arrived whole, the log must hold one line, however it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from stack.drill.traffic import SHARED, WORDS
from stack.lab.plan import MODEL

AT_ONCE = 12  # under way at most, so that a slow engine gets fewer requests and not a longer queue
GIVE_UP_S = 600.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# How often each happens, in a hundred. The engine is one core: most are short.
MIX = {
    "chat": 28, "short": 24, "long prompt": 5, "long answer": 4, "several": 5, "batch of prompts": 3,
    "cut off by hand": 9, "left while waiting": 5,
    "unknown key": 3, "no key": 2, "wrong parameter": 3, "too long": 2, "unknown model": 2, "slow reader": 3,
    "slow body": 3, "torn body": 2,
}  # fmt: skip


@dataclass(slots=True)
class Load:
    """Sends until it is told to stop. sent: id -> kind, told before the first byte goes. ends: kind and how it ended ->
    how often."""

    gateway: str
    keys: Mapping[str, str]
    rng: random.Random
    pace_s: float = 0.5
    sent: dict[str, str] = field(default_factory=dict)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    stopping: bool = False

    async def run(self) -> None:
        """Until `stopping`, then until the last is answered; those under way end with it when it is cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=GIVE_UP_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            while not self.stopping:
                if len(tasks) < AT_ONCE:
                    kind = self.rng.choices(list(MIX), list(MIX.values()))[0]
                    tasks.add(task := group.create_task(self.one(session, kind)))
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(self.rng.uniform(0.5, 1.5) * self.pace_s)

    async def crowd(self, count: int) -> None:
        """So many at once, more than a team may have: most are refused, or wait."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=GIVE_UP_S)
        ) as session:
            await asyncio.gather(*(self.one(session, "crowd") for _ in range(count)))

    async def slow(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self.one(None, "slow body"))

    async def one(self, session: aiohttp.ClientSession | None, kind: str) -> None:
        number = len(self.sent)
        request_id = f"soak-{number:06d}"
        self.sent[request_id] = kind
        try:
            ended = await (
                self._by_hand(kind, request_id)
                if session is None or kind in _BY_HAND
                else self._asked(session, kind, request_id)
            )
        except (OSError, aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            ended = type(error).__name__
        self.ends[kind, ended] += 1

    def _head(self, kind: str, request_id: str) -> dict[str, str]:
        team = "experimental" if kind == "crowd" else self.rng.choice(sorted(self.keys))
        key = {"unknown key": "vw-nobody", "no key": None}.get(kind, self.keys[team])
        head = {"X-Request-Id": request_id, "Content-Type": "application/json"}
        return head | ({"Authorization": f"Bearer {key}"} if key else {})

    def _body(self, kind: str) -> tuple[str, dict[str, Any]]:
        """Route and body of a request."""
        question = self._words(self.rng.randint(4, 24))
        common: dict[str, Any] = {"model": MODEL, "max_tokens": self.rng.randint(8, 64), "temperature": 0.8}
        chat = common | {
            "messages": [{"role": "system", "content": SHARED}, {"role": "user", "content": question}],
            "stream": True,
        }
        plain = common | {"prompt": question}
        match kind:
            case "chat" | "slow reader":
                return CHAT, chat
            case "long prompt":
                return CHAT, chat | {"messages": [{"role": "user", "content": self._words(1500)}]}
            case "long answer" | "cut off by hand":
                return COMPLETIONS, plain | {"max_tokens": 400, "ignore_eos": True, "stream": True}
            case "left while waiting":
                return COMPLETIONS, plain | {"max_tokens": 400, "ignore_eos": True}
            case "several":
                return CHAT, chat | {"n": 3, "stream": self.rng.random() < 0.5}
            case "batch of prompts":
                return COMPLETIONS, plain | {"prompt": [question, self._words(6)], "n": 2}
            case "wrong parameter":
                return COMPLETIONS, plain | {"temperature": -1}
            case "too long":
                return COMPLETIONS, plain | {"prompt": "the cache " * 40_000}
            case "unknown model":
                return COMPLETIONS, plain | {"model": "nobody"}
            case _:
                return COMPLETIONS, plain

    def _words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))

    async def _asked(self, session: aiohttp.ClientSession, kind: str, request_id: str) -> str:
        route, body = self._body(kind)
        async with session.post(self.gateway + route, json=body, headers=self._head(kind, request_id)) as response:
            if kind == "cut off by hand":
                await response.content.readany()
                response.close()
                return "left"
            async for _ in response.content.iter_chunked(512):
                if kind == "slow reader":
                    await asyncio.sleep(0.2)
            return str(response.status)

    async def _by_hand(self, kind: str, request_id: str) -> str:
        """Over a bare connection: who leaves before the answer, or sends a body piece by piece, or half of one."""
        route, body = self._body(kind)
        data = json.dumps(body).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in self._head(kind, request_id).items())
        host, _, port = self.gateway.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(
                f"POST {route} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n{head}Content-Length:"
                f" {len(data)}\r\n\r\n".encode()
            )
            pieces = 6 if kind == "slow body" else 1
            size = -(-len(data) // pieces) if kind != "torn body" else len(data) // 2
            for at in range(0, size if kind == "torn body" else len(data), size):
                writer.write(data[at : at + size])
                await writer.drain()
                await asyncio.sleep(0.4 if kind != "left while waiting" else 0)
            if kind == "slow body":
                answer = await asyncio.wait_for(reader.read(), GIVE_UP_S)
                return answer[9:12].decode(errors="replace")
            await asyncio.sleep(self.rng.uniform(1.0, 2.0))
            return "left"
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


_BY_HAND = ("left while waiting", "slow body", "torn body")
