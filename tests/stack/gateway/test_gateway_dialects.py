"""Errors in the dialect of each API: a stream that breaks in its middle raises in every official client."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from stack.gateway.config import Timeouts
from tests.support.gateway_scene import CHAT, KEYS, ROLE, STREAM, TOKEN, Answer, event, events, gateway, then_breaks
from tests.support.official_clients import APIS, Clients, outcome


def typed(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + event(type=kind, **fields)


def response(number: int, kind: str, **fields: Any) -> bytes:
    return typed(f"response.{kind}", sequence_number=number, output_index=0, **fields)


MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": []}
HEAD = {"id": "r", "object": "response", "created_at": 1, "model": "tiny", "output": [], "status": "in_progress"}
DELTA = {"item_id": "m", "content_index": 0, "logprobs": []}
PART = {"type": "output_text", "text": "", "annotations": []}
BEGINNINGS = {
    CHAT: ROLE + TOKEN,
    "/v1/completions": event(id="c", model="tiny", choices=[{"index": 0, "text": "a", "finish_reason": None}]),
    "/v1/responses": response(0, "created", response=HEAD) + response(1, "output_item.added", item=MESSAGE)
    + response(2, "content_part.added", part=PART, **DELTA) + response(3, "output_text.delta", delta="a", **DELTA),
    "/v1/messages": typed("message_start", message=MESSAGE | {"model": "tiny", "usage": {"input_tokens": 3}})
    + typed("content_block_start", index=0, content_block={"type": "text", "text": ""})
    + typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    "/cohere/v2/chat": event(type="content-delta", index=0, delta={"message": {"content": {"text": "a"}}}),
}  # fmt: skip


def begun(pause_s: float) -> Answer:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return await events(BEGINNINGS[request.path], pause_s=pause_s)(request)

    return answer


FAULTS = {
    "reset": (then_breaks(begun(0.02)), "upstream_reset"),
    "early end": (begun(0.0), "upstream_reset"),
    "stall": (begun(60.0), "decode_timeout"),
}
HELPERS = {"responses.stream": "responses", "messages.stream": "messages"}


def read(clients: Clients, reader: str) -> Iterator[Any]:
    """Yield the events of a stream, as a client or its helper of that name reads them."""
    if reader not in HELPERS:
        yield from clients.call(reader, stream=True)
        return
    api = APIS[HELPERS[reader]]
    method = getattr(clients.client(api.library), HELPERS[reader]).stream
    limit = {"max_tokens": 12} if api.library == "anthropic" else {}
    with method(model="tiny", **api.filled("a"), **limit) as stream:
        yield from stream


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", [name for name in APIS if name != "count"] + [*HELPERS])
async def test_a_broken_stream_raises(tmp_path: Path, reader: str, fault: str):
    answer, reason = FAULTS[fault]
    timeouts = Timeouts(decode_s=0.3) if fault == "stall" else Timeouts()
    library = APIS[HELPERS.get(reader, reader)].library
    base = importlib.import_module("anthropic" if library == "anthropic" else "openai").APIError
    async with gateway(tmp_path, answer, timeouts=timeouts) as it:
        clients = Clients(it.started.url, KEYS["demo"][0], "tiny")
        error, _ = await asyncio.to_thread(outcome, lambda: read(clients, reader))
        assert reason == (await it.record()).reason
        assert base in getattr(error, "__mro__", ())


@pytest.mark.parametrize(("choices", "reason"), [(1, "upstream_reset"), (2, None)])
async def test_a_stream_ends_with_its_last_choice(tmp_path: Path, choices: int, reason: str | None):
    """Some engines send no [DONE]; then each choice needs its finish reason."""
    ends = [event(choices=[{"index": n, "delta": {"content": "a"}, "finish_reason": "stop"}]) for n in range(choices)]
    async with gateway(tmp_path, events(*ends)) as it, it.post(STREAM | {"n": 2}) as got:
        assert (reason is not None) is (b'"error"' in await got.read())
        assert reason == (await it.record()).reason


OPENAI = {"error": {"message": "", "type": "authentication_error", "param": None, "code": "unknown_key"}}
ANTHROPIC = {
    "type": "error",
    "error": {"type": "authentication_error", "message": "", "code": "unknown_key"},
    "request_id": "mine",
}
BODIES = {
    CHAT: OPENAI,
    "/v1/responses": OPENAI,
    "/v1/embeddings": OPENAI,
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": ANTHROPIC,
    "/cohere/v2/chat": {"message": "", "id": "mine", "code": "unknown_key"},
}


@pytest.mark.parametrize("route", BODIES)
async def test_an_error_has_the_form_of_its_api(tmp_path: Path, route: str):
    async with (
        gateway(tmp_path) as it,
        it.post({}, route, Authorization="Bearer no", **{"X-Request-Id": "mine"}) as got,
    ):
        body = await got.json()
        (body.get("error") or body)["message"] = ""
        assert (401, BODIES[route]) == (got.status, body)


CUT = {"type": "server_error", "message": "", "param": None, "code": "upstream_reset"}
ENDINGS = {
    CHAT: [{"error": CUT}],
    "/v1/responses": ["event: error", CUT | {"type": "error", "sequence_number": 0, "error": CUT}],
    "/v1/messages": [
        "event: error", {"type": "error", "request_id": "mine",
                         "error": {"type": "api_error", "message": "", "code": "upstream_reset"}}],
    "/cohere/v2/chat": [{"type": "message-end", "delta": {"finish_reason": "ERROR", "error": ""}}, "data: [DONE]"],
}  # fmt: skip


@pytest.mark.parametrize("route", ENDINGS)
async def test_a_broken_stream_ends_in_the_form_of_its_api(tmp_path: Path, route: str):
    async with gateway(tmp_path, begun(0.0)) as it, it.post(STREAM, route, **{"X-Request-Id": "mine"}) as got:
        ending = (await got.read()).removeprefix(BEGINNINGS[route]).decode()
        lines = re.sub(r'"(message|error)":"[^"]*"', r'"\1":""', ending).splitlines()
        assert ENDINGS[route] == [json.loads(line[6:]) if line[6:7] == "{" else line for line in lines if line]
