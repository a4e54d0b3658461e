"""Clients that leave streams of a real vLLM one token before the end, whatever field of the request shapes the stream:
what they have read is on their bill, and it is what the engine has counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from exporters.catalogue import vllm
from exporters.requests.record import RequestRecord
from stack.lab import plan
from tests.support.engines import Engine, Engines
from tests.support.gateway_scene import Running, gateway
from tests.support.wait import until

pytestmark = pytest.mark.engine

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
READ = 200  # tokens
# fields by which an event says what it holds
EXACT = ("return_token_ids", "logprobs", '"include_usage": true, "continuous_usage_stats"')
TALK = [{"role": "user", "content": "the cache of the server"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "ignore_eos": True},
    TEXT: {"prompt": "the cache of the server " * 20, "ignore_eos": True},
    # neither takes ignore_eos, and the latter no seed: the most probable tokens of this model never end
    RESPONSES: {"input": "the cache of the server", "temperature": 0},
    MESSAGES: {"messages": TALK, "max_tokens": 30000, "temperature": 0},
}
HELD_BACK = "~" * 20_000  # the engine shows no text that might be the beginning of a stop string
SHAPES: list[tuple[str, dict[str, Any]]] = [
    *((route, {}) for route in BODIES),
    *((route, more) for route in (CHAT, TEXT) for more in (
        {"stream_interval": READ}, {"stream_interval": "7"}, {"return_token_ids": True}, {"n": 3},
        {"stop": [HELD_BACK], "return_token_ids": True}, {"stop": "~" * 40},
        {"stream_options": {"include_usage": True}}, {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"min_tokens": READ},
        {"include_reasoning": False}, {"return_tokens_as_token_ids": True},
    )),
    (CHAT, {"logprobs": True, "top_logprobs": 20}), (TEXT, {"logprobs": 20}), (TEXT, {"echo": True}),
    (TEXT, {"stop": [HELD_BACK]}),
    (TEXT, {"prompt": ["the cache", "of the server"]}), (MESSAGES, {"stop_sequences": ["~" * 40]}),
    (RESPONSES, {"stop": ["~" * 40]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Engine:
    return real_engines.shared().up()


LOOK_S = 0.1  # each look at the engine's page takes time of the core that computes


async def made(engine: Engine) -> float:
    return await asyncio.to_thread(engine.figure, vllm.GENERATION_TOKENS)


async def idle(engine: Engine) -> None:
    await until(lambda: asyncio.to_thread(lambda: engine.running == 0), "an idle engine", every_s=LOOK_S)


async def left(it: Running, engine: Engine, route: str, more: dict[str, Any]) -> tuple[RequestRecord, float, float]:
    """The record of a client that leaves once the engine has made so many tokens, how many those were when it left, and
    how many in all."""
    await idle(engine)
    before = await made(engine)
    body = {"model": plan.MODEL, "stream": True, "temperature": 1, "seed": 1} | BODIES[route] | more
    body |= {} if route == MESSAGES else {"max_output_tokens" if route == RESPONSES else "max_tokens": 30000}
    answer = await it.post(body, route, **{"Content-Type": "application/json"})
    assert 200 == answer.status, await answer.text()
    reading = asyncio.create_task(answer.content.read())

    async def read() -> float | None:
        if reading.done():
            pytest.fail("the stream has ended")
        return tokens if (tokens := await made(engine) - before) >= READ else None

    tokens = await until(read, f"{READ} tokens", every_s=LOOK_S)
    reading.cancel()
    answer.close()
    record = await it.record()
    await idle(engine)
    return record, tokens, await made(engine) - before


@pytest.mark.parametrize(("route", "more"), SHAPES, ids=lambda value: json.dumps(value)[:40])
async def test_tokens_of_any_stream_are_billed(tmp_path: Path, engine: Engine, route: str, more: dict[str, Any]):
    """As many as the engine made by then, but for those that are on their way. An engine with a busy server puts two
    or three tokens into an event, which only finished streams of a team can teach."""
    async with gateway(tmp_path, upstream=engine.spec.address) as it:
        record, read, in_all = await left(it, engine, route, more)
    billed = record.completion_tokens or record.est_completion_tokens or 0
    assert "client_abort" == record.outcome
    least = 0.9 if any(name in json.dumps(more) for name in EXACT) else 0.4
    assert least * read <= billed <= 1.1 * in_all + 3, (read, in_all)
    assert record.prompt_tokens or record.est_prompt_tokens
