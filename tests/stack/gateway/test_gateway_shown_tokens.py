"""Tokens that a client has read are on its bill and in its turns, whatever shaped the answer and whenever it left."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from exporters.catalogue.gateway import WAITING
from stack.gateway import request_body, response_writer
from stack.gateway.admission import Admission
from stack.gateway.admission_state import Ticket
from stack.gateway.body_budget import BodyBudget
from stack.gateway.client_request import ClientRequest
from stack.gateway.config import GatewayLimits
from tests.support.gateway_scene import (
    ASK,
    CHAT,
    DONE,
    KEYS,
    LAST,
    REPLY,
    ROLE,
    STREAM,
    TOKEN,
    Running,
    delta,
    event,
    events,
    gateway,
)
from tests.support.wait import until

COMPLETIONS, TOKENS_ROUTE = "/v1/completions", "/inference/v1/generate"
EXPECTED = 1024  # tokens of output that a team without earlier answers is expected to want
WORDS = "word " * 60
LARGE = REPLY | {
    "choices": [{"message": {"role": "assistant", "content": WORDS}, "finish_reason": "length",
                 "logprobs": {"content": [{"token": "x" * 4000}] * 2000}}],
    "usage": {"prompt_tokens": 90, "completion_tokens": 2000},
}  # fmt: skip


def text(content: str, **more: Any) -> bytes:
    return event(model="tiny", choices=[{"index": 0, "text": content, "finish_reason": None, **more}])


Left = list[tuple[int, int | None]]  # expected output of a request that ended, and what it was charged


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    seen: Left = []
    leave = Admission.leave

    def spy(self: Admission, ticket: Ticket, now: float, prompt: int | None = None, output: int | None = None) -> None:
        seen.append((ticket.output, output))
        leave(self, ticket, now, prompt, output)

    monkeypatch.setattr(Admission, "leave", spy)
    return seen


@pytest.mark.parametrize(
    ("shown", "least", "most"),
    [
        ([TOKEN] * 5, 5, 5),
        ([text(WORDS), text(WORDS)], 100, 160),
        ([text("", token_ids=[7])] * 40, 40, 40),
        ([text("", token_ids=[7, 8, 9])] * 4 + [text("a", token_ids=[7, 8])], 14, 14),
        ([text("")] * 30 + [text("a")] * 3, 33, 33),
        ([text("a b c", logprobs={"tokens": ["a", " b", " c"]})] * 4, 12, 12),
        ([event(model="tiny", choices=[{"index": n, "delta": {"content": "a"}} for n in range(3)])] * 4, 12, 12),
        ([event(type="content_block_delta", delta={"type": "text_delta", "text": "a"})] * 6, 6, 6),
    ],
    ids=["tokens", "stream-interval", "no-text", "merged", "held-back", "logprobs", "choices", "messages"],
)
async def test_tokens_shown_are_billed(tmp_path: Path, left: Left, shown: list[bytes], least: int, most: int):
    """The client leaves when it has read so much, before any usage."""
    async with gateway(tmp_path, events(ROLE, *shown, *[b": wait\n\n"] * 1000, pause_s=0.002)) as it:
        answer = await it.post(STREAM)
        read = b""
        while read.count(b"data:") <= len(shown):
            read += await answer.content.readany()
        answer.close()
        record = await it.record()
    assert ("client_abort", None) == (record.outcome, record.completion_tokens)
    assert least <= (record.est_completion_tokens or 0) <= most
    assert [(3, max(3, record.est_completion_tokens or 0))] == left, "its turns are charged no less than expected"


@pytest.mark.parametrize(
    ("prompt", "route", "shown", "least", "most"),
    [
        (WORDS, COMPLETIONS, [text(WORDS), text("a")], 2, 2),
        ([5] * 60, COMPLETIONS, [text(WORDS), text("a")], 2, 2),
        ("a", COMPLETIONS, [text("a"), text(WORDS)], 60, 80),
        ("a", CHAT, [ROLE, delta(content=WORDS)], 60, 80),
    ],
    ids=["text", "ids", "more", "chat"],
)
async def test_repeated_prompt_is_no_output(
    tmp_path: Path, prompt: Any, route: str, shown: list[bytes], least: int, most: int
):
    """`echo` puts the prompt into the first event. What comes beside it is output."""
    body = ASK | {"prompt": prompt, "stream": True, "echo": True}
    async with gateway(tmp_path, events(*shown)) as it:
        async with it.post(body, route) as answer:
            await answer.read()
        assert least <= ((await it.record()).est_completion_tokens or 0) <= most


async def test_unread_output_stays_charged(tmp_path: Path, left: Left):
    """A client that leaves before the first token is charged what it was expected to want."""
    async with gateway(tmp_path, events(ROLE, *[b": wait\n\n"] * 1000, pause_s=0.01)) as it:
        answer = await it.post({name: value for name, value in STREAM.items() if name != "max_tokens"})
        await answer.content.readany()
        answer.close()
        assert (await it.record()).est_completion_tokens is None
    assert [(EXPECTED, None)] == left


async def asks(it: Running, body: Any, team: str = "demo") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose client reads only what it asks for, with this request sent on it."""
    host, port = it.started.url[7:].split(":")
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    wire.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=wire, limit=1 << 20)
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[team][0]}\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    return reader, writer


@pytest.mark.parametrize("coded", [False, True])
async def test_usage_behind_the_text_is_read(tmp_path: Path, left: Left, coded: bool):
    """A client that has the text of a large reply and leaves pays by the usage that stands behind it."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.json_response(LARGE)
        if coded:
            response.enable_compression(web.ContentCoding.deflate)
        return response

    async with gateway(tmp_path, answer) as it:
        reader, writer = await asks(it, ASK)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2000)
        writer.transport.abort()
        record = await it.record()
    assert (90, 2000, None) == (record.prompt_tokens, record.completion_tokens, record.est_completion_tokens)
    assert [(3, 2000)] == left


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("room", [False, True])
async def test_slow_readers_hold_slots_beyond_the_budget(tmp_path: Path, room: bool, stream: bool):
    """A slot is free as soon as the engine is, as long as what clients have not read fits the budget of bytes."""
    padding = "x" * 200_000

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if not stream:
            return web.json_response(REPLY | {"padding": padding})
        return await events(ROLE, delta(content=padding) + LAST + DONE)(request)

    bands = {"default": {"rank": 1}}
    policy = {"teams": {name: {"keys": [KEYS[name][1]]} for name in KEYS}, "bands": bands,
        "capacity": {"slots": 1, "min_slots": 1}}  # fmt: skip
    limits = GatewayLimits(body_bytes=32 << 10, bodies_bytes=(64 << 20) if room else 64 << 10)
    async with gateway(tmp_path, answer, policy, limits=limits) as it:

        async def waits() -> bool:
            figures = await it.figures()
            return 1 == sum(value for name, value in figures.items() if name[0] == WAITING.name)

        (reader, first), (_, second) = [await asks(it, STREAM if stream else ASK, team) for team in KEYS]
        if not room:
            await until(waits, "a request that waits")
            assert 1 == len(it.engine.asked)
            await reader.readuntil(b"[DONE]" if stream else padding[:100].encode() + b'"}')
        await until(lambda: len(it.engine.asked) == 2, "the second request at the engine")
        first.transport.abort()
        second.transport.abort()
        await it.records(2)


async def test_an_unread_end_of_a_stream_stays_on_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Until its client has read it, though nothing waits for the client before the stream has ended."""
    monkeypatch.setattr(response_writer, "AHEAD_BYTES", 1 << 30)
    take, drain = BodyBudget.take, ClientRequest.drain
    budgets: list[BodyBudget] = []
    waiting: list[ClientRequest] = []

    def takes(self: BodyBudget, team: str | None, size: int, *, alone: bool = False) -> bool:
        budgets.append(self)
        return take(self, team, size, alone=alone)

    async def drains(self: ClientRequest) -> None:
        waiting.append(self)
        await drain(self)

    monkeypatch.setattr(BodyBudget, "take", takes)
    monkeypatch.setattr(ClientRequest, "drain", drains)
    async with gateway(tmp_path, events(ROLE, delta(content="x" * 5_000_000) + LAST + DONE)) as it:
        reader, writer = await asks(it, STREAM)
        await until(lambda: bool(waiting), "the end of the stream")
        assert 0 < budgets[0].held
        await reader.readexactly(5_000_000)
        await reader.readuntil(b"\r\n0\r\n\r\n")
        await it.record()
        assert 0 == budgets[0].held
        writer.close()


@pytest.mark.parametrize(
    ("route", "said", "sent"),
    [
        (CHAT, 300, 1), (CHAT, "7", "1"), (COMPLETIONS, 2.0, 1.0), (COMPLETIONS, 1, 1), (CHAT, 0, 0), (CHAT, "x", "x"),
        (CHAT, None, None),
    ],
)  # fmt: skip
def test_each_token_gets_an_event(route: str, said: Any, sent: Any):
    """What an engine refuses goes on as it is."""
    body = {"model": "tiny", "stream": True, "messages": [], "prompt": "x", "stream_interval": said}
    ask = request_body.read(route, json.dumps(body).encode())
    assert sent == json.loads(ask.sent)["stream_interval"]
    settings = {"max_tokens": 5, "stream_interval": said}
    inner = {"model": "tiny", "stream": True, "token_ids": [1], "sampling_params": settings}
    limited = request_body.read(TOKENS_ROUTE, json.dumps(inner).encode()).limited(3)
    assert {"max_tokens": 3, "stream_interval": sent} == json.loads(limited.sent)["sampling_params"]
