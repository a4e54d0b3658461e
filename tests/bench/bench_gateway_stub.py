"""The engine of `make bench-gateway`: as cheap as it can be, so that what is measured is what stands before it.

Answers every POST as the prompt says. Without `"stream":true`: JSON of 1 KB. With it `tokens=N` content events, one
with usage and [DONE], each
in a write of its own: at once after `gap_ms=0`, else one at each gap. GET gives /health and a captured /metrics page of
a calm vLLM 0.32."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from functools import lru_cache
from pathlib import Path

import uvloop

TICK_S = 0.001  # streams whose next event falls into the same tick get it together
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAMED = re.compile(rb'"stream": ?true')  # with or without the space: a proxy may write the request anew
_PACE = re.compile(rb"tokens=(\d+) gap_ms=(\d+)")
_USAGE = {
    "prompt_tokens": 250,
    "total_tokens": 314,
    "completion_tokens": 64,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_CAPTURED = Path(__file__).parents[1] / "golden/0.32.0-after-probe.prom"


def reply() -> bytes:
    """The JSON body, shaped as vLLM 0.32 writes it."""

    def body(content: str) -> bytes:
        message = {"role": "assistant", "content": content}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
        return _compact(_named("chat.completion") | {"choices": [choice], "usage": _USAGE, "prompt_logprobs": None})

    return body("w" * (1024 - len(body(""))))


@lru_cache
def events(tokens: int) -> tuple[bytes, ...]:
    """The events of a stream, each framed as a chunk; the first with the head before it, the last with the end behind
    it."""
    first = [{"role": "assistant", "content": "word "}] + [{"content": "word "}] * (tokens - 1)
    choices = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None} for delta in first
    ]
    choices[-1]["finish_reason"] = "length"
    bodies = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": _USAGE}]
    datas = [_compact(_named("chat.completion.chunk") | body) for body in bodies] + [b"[DONE]"]
    chunks = [_chunk(b"data: " + data + b"\n\n") for data in datas]
    return (STREAM_HEAD + chunks[0], *chunks[1:-1], chunks[-1] + END)


def _named(kind: str) -> dict[str, object]:
    return {"id": "chatcmpl-9d0b6c5f3a6e4c1f8a7b2d3e4f5a6b7c", "object": kind, "created": 1795255200, "model": "tiny"}


def _compact(body: dict[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, kind: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


JSON_REPLY = whole(reply(), "application/json")


class Clock:
    """One timer for all streams: a slot of a wheel for each tick, in which streams stand until their next event is
    due."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, list[Connection]] = {}
        self._done = int(loop.time() / TICK_S)
        self._tick()

    def later(self, connection: Connection, gap_s: float) -> None:
        """Sends this connection's next event after the gap, and so on."""
        self._slots.setdefault(int((self._loop.time() + gap_s) / TICK_S), []).append(connection)

    def _tick(self) -> None:
        now = self._loop.time()
        while self._done < int(now / TICK_S):
            for connection in self._slots.pop(self._done, ()):
                if connection.next_event():
                    self._slots.setdefault(self._done + connection.gap_ticks, []).append(connection)
            self._done += 1
        self._loop.call_at((self._done + 1) * TICK_S, self._tick)


class Connection(asyncio.Protocol):
    """One connection with one request after the other; nobody pipelines."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked = b""
        self._events: tuple[bytes, ...] = ()
        self._sent = 0
        self._fd = -1
        self.gap_ticks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._fd = transport.get_extra_info("socket").fileno()

    def connection_lost(self, error: Exception | None) -> None:
        self._fd, self._events = -1, ()

    def data_received(self, data: bytes) -> None:
        self._asked += data
        head = self._asked.find(b"\r\n\r\n") + 4
        if head < 4:
            return
        length = _LENGTH.search(self._asked, 0, head)
        if len(self._asked) - head < (int(length[1]) if length else 0):
            return
        asked, self._asked = self._asked, b""
        if asked.startswith(b"GET "):
            page = _CAPTURED.read_bytes() if b"/metrics" in asked[:40] else b""
            self._send(whole(page, "text/plain; version=0.0.4; charset=utf-8"))
        elif _STREAMED.search(asked, head):
            self._stream(asked)
        else:
            self._send(JSON_REPLY)

    def _stream(self, asked: bytes) -> None:
        pace = _PACE.search(asked)
        assert pace is not None, "a streamed request says tokens=N gap_ms=M"
        self._events, self._sent, gap_s = events(int(pace[1])), 0, int(pace[2]) / 1000
        self.gap_ticks = round(gap_s / TICK_S)
        if gap_s:
            self._clock.later(self, gap_s)
        else:
            for event in self._events:
                self._send(event)

    def next_event(self) -> bool:
        """Sends what is due now; whether there is more. What follows the last token comes with it."""
        left = len(self._events) - self._sent
        if left <= 0:
            return False
        for event in self._events[self._sent : self._sent + (3 if left <= 3 else 1)]:
            self._send(event)
            self._sent += 1
        return left > 3

    def _send(self, data: bytes) -> None:
        """Straight to the socket, where the transport would collect events into one write. A socket's buffer holds a
        whole answer."""
        try:
            sent = os.write(self._fd, data)
        except BlockingIOError:
            sent = 0
        except OSError:  # the other side is gone
            self._events, sent = (), len(data)
        if sent < len(data):
            print("the stub cannot send: a socket's buffer does not hold a whole answer", file=sys.stderr)
            os._exit(1)


async def main(port: int) -> None:
    loop = asyncio.get_running_loop()
    clock = Clock(loop)
    server = await loop.create_server(lambda: Connection(clock), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
