"""A fake of vLLM's HTTP side for the tests of the bench: a real server on loopback whose answers a test decides. It
counts as vLLM does, and knows
nothing of models: a letter is a token, and each turn of a chat costs two more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

MODEL = "tiny"
TEMPLATE = 2  # tokens for each message of a chat


class FakeEngine:
    """behave: what becomes of a request: ok, http_500, http_429, error_event, cut, hang, empty. Counters are those of a
    real page."""

    def __init__(self) -> None:
        self.behave: Callable[[int], str] = lambda _: "ok"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.sent_at: list[float] = []
        self.now = self.most = self.answered = self.prompt_tokens = self.completion_tokens = self.queries = (
            self.hits
        ) = 0
        self.caching = "True"
        self.first_s = 0.0
        self.gap_s = 0.0
        self.settings: dict[str, Any] | None = None
        self.context = 4096
        self.aliases: tuple[str, ...] = ()
        self.key: str | None = None
        self.died = False
        self.resets = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes([
            web.get("/v1/models", self._models), web.get("/version", self._version), web.get("/metrics", self._metrics),
            web.get("/server_info", self._info), web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.post("/v1/completions", self._answer), web.post("/v1/chat/completions", self._answer),
            web.post("/reset_prefix_cache", self._reset),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.died:
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError
        if self.key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": name, "root": MODEL, "max_model_len": self.context} for name in (MODEL, *self.aliases)]}
        )

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _reset(self, _: web.Request) -> web.Response:
        self.resets += 1
        return web.Response()

    async def _info(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.settings is None else web.json_response({"vllm_config": self.settings})

    async def _metrics(self, _: web.Request) -> web.Response:
        series = f'{{engine="0",model_name="{MODEL}"}}'
        lines = [
            f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}} {self.answered}',
            f"vllm:prompt_tokens_total{series} {self.prompt_tokens}",
            f"vllm:generation_tokens_total{series} {self.completion_tokens}",
            f"vllm:prefix_cache_queries_total{series} {self.queries}",
            f"vllm:prefix_cache_hits_total{series} {self.hits}",
            f"vllm:request_queue_time_seconds_count{series} {self.answered}",
            f"vllm:request_queue_time_seconds_sum{series} {0.25 * self.answered}",
            f"vllm:num_preemptions_total{series} 0",
            f"vllm:kv_cache_usage_perc{series} 0.5",
            (
                f'vllm:cache_config_info{{enable_prefix_caching="{self.caching}",kv_cache_memory_bytes="8000000000",engine="0"}} 1'  # noqa: E501
            ),
            "process_start_time_seconds 1000",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if "messages" in asked:
            return web.json_response({"count": chat_tokens(asked["messages"])})
        return web.json_response({"tokens": [ord(letter) for letter in asked["prompt"]]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": "".join(map(chr, (await request.json())["tokens"]))})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.sent_at.append(asyncio.get_running_loop().time())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._behaves(self.behave(number), request, body)
        finally:
            self.now -= 1

    async def _behaves(self, how: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if how.startswith("http_"):
            return web.json_response(
                {"error": {"message": f"refused by the test, {how}", "code": int(how[5:])}}, status=int(how[5:])
            )
        if how == "die":
            self.died = True
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError
        prompt = len(body["prompt"]) if "prompt" in body else chat_tokens(body["messages"])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        if how == "hang":
            await asyncio.sleep(60)
        if how == "error_event":
            await answer.write(b'data: {"error":{"message":"queue is full","code":503}}\n\ndata: [DONE]\n\n')
            return answer
        await asyncio.sleep(self.first_s)
        for at in range(body["max_tokens"]):
            if how == "cut" and at == 1:
                assert request.transport is not None
                request.transport.abort()
                return answer
            text = "" if how == "empty" and at == 0 else "w"
            choice = {"index": 0, "text": text} if "prompt" in body else {"index": 0, "delta": {"content": text}}
            await answer.write(
                b"data: "
                + json.dumps({"model": MODEL, "choices": [choice | {"finish_reason": None}]}).encode()
                + b"\n\n"
            )
            await asyncio.sleep(self.gap_s)
        tokens = body["max_tokens"]
        self.answered += 1
        self.prompt_tokens += prompt
        self.completion_tokens += tokens
        self.queries += prompt if self.caching == "True" else 0
        self.hits += prompt // 2 if self.caching == "True" else 0
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return answer


def chat_tokens(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) + TEMPLATE for message in messages)
