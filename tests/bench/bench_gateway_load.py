"""The clients of `make bench-gateway`: connections that send one request after the other, each as soon as the last is
answered in full.

Lean, because it shares its core with the stub: bytes are kept and looked at when the answer is whole. Every answer is
checked."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

CONNECT_AT_ONCE = 64  # a listening socket of aiohttp holds 128 that wait
GIVE_UP_S = 180.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"
_PROMPT = "The same prompt for everyone, about as long as a short question with its instructions. " * 10

Check = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked for: 0 tokens is a reply without stream, gap_ms 0 a stream that comes at once."""

    tokens: int = 0
    gap_ms: int = 0

    @property
    def events(self) -> int:
        """Tokens, usage and [DONE]."""
        return self.tokens + 2 if self.tokens else 0

    def request(self, port: int, key: str) -> bytes:
        ask = {
            "model": "tiny",
            "max_tokens": 64,
            "messages": [{"role": "user", "content": f"tokens={self.tokens} gap_ms={self.gap_ms} {_PROMPT}"}],
        }
        if self.tokens:
            ask |= {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(ask, separators=(",", ":")).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer"
            f" {key}\r\nContent-Type: application/json\r\n"
        )
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Load:
    """What came of it. took_s: one of each good answer. busy_s: CPU of this process meanwhile."""

    wall_s: float = 0.0
    busy_s: float = 0.0
    asked: int = 0
    took_s: list[float] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return self.asked - len(self.took_s)


async def drive(
    port: int, request: bytes, check: Check, connections: int, *, seconds: float | None = None, each: int | None = None
) -> Load:
    """Asks over so many connections, all beginning at once, for so long or so many times each. Connecting is not
    timed."""
    loop, load = asyncio.get_running_loop(), Load()
    callers: list[Caller] = []
    for begin in range(0, connections, CONNECT_AT_ONCE):
        count = min(CONNECT_AT_ONCE, connections - begin)
        made = await asyncio.gather(
            *(loop.create_connection(lambda: Caller(load, request, check), "127.0.0.1", port) for _ in range(count))
        )
        callers += [caller for _, caller in made]
    gc.collect()
    gc.disable()
    try:
        busy, began = time.process_time(), time.perf_counter()
        for caller in callers:
            caller.begin(None if seconds is None else began + seconds, each)
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.gather(*(caller.ended for caller in callers))
        load.wall_s, load.busy_s = time.perf_counter() - began, time.process_time() - busy
    finally:
        gc.enable()
        for caller in callers:
            caller.close()
    return load


class Caller(asyncio.Protocol):
    """One connection. `ended` is done when its last answer is in, or the connection is lost, which leaves an answer
    missing."""

    def __init__(self, load: Load, request: bytes, check: Check) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._load = load
        self._request = request
        self._check = check
        self._until: float | None = None
        self._left: int | None = None
        self._parts: list[bytes] = []
        self._missing: int | None = None  # bytes still to come; None before the head is read, -1 for a chunked body
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def begin(self, until: float | None, left: int | None) -> None:
        self._until, self._left = until, left
        self._ask()

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing is None:
            self._read_head()
        elif self._missing > 0:
            self._missing -= len(data)
        if self._missing == 0 or (self._missing == -1 and self._ends(data)):
            self._answered(time.perf_counter())

    def _read_head(self) -> None:
        whole = b"".join(self._parts)
        end = whole.find(b"\r\n\r\n") + 4
        if end >= 4:
            length = _LENGTH.search(whole, 0, end)
            self._missing = int(length[1]) - (len(whole) - end) if length else -1

    def _ends(self, data: bytes) -> bool:
        return data.endswith(_END) or (len(data) < len(_END) and b"".join(self._parts[-len(_END) :]).endswith(_END))

    def _answered(self, now: float) -> None:
        if self._check(b"".join(self._parts)):
            self._load.took_s.append(now - self._began)
        if self._left is not None:
            self._left -= 1
        if self._left == 0 or (self._until is not None and now >= self._until):
            self.ended.set_result(None)
        else:
            self._ask()

    def _ask(self) -> None:
        self._parts, self._missing = [], None
        self._load.asked += 1
        self._began = time.perf_counter()
        self._transport.write(self._request)  # type: ignore[attr-defined]


def answers(shape: Shape, body: bytes | None) -> Check:
    """Whether an answer is whole: this very body, or every event of the stream. Without a body, one that was written
    anew but lacks nothing."""
    ok = b"HTTP/1.1 200"
    if not shape.tokens:
        return lambda told: told.startswith(ok) and (told.endswith(body) if body else b'"usage"' in told)
    if body:
        return lambda told: told.startswith(ok) and told.count(b"data: ") == shape.events and b"data: [DONE]" in told
    return lambda told: told.startswith(ok) and told.count(b"data: ") >= shape.tokens and b"data: [DONE]" in told
