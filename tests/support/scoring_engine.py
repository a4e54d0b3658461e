"""Fake of an engine that answers prompt_logprobs: a real server on loopback that computes a function of the tokens.

Its defaults are those of vLLM 0.32 as tried; what other releases do is switched by name, from their sources. A letter
is a token, `bos` comes first, and a chat is rendered by `template`."""

from __future__ import annotations

import contextlib
import json
import math
import random
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

NAN_SAID = "Out of range float values are not JSON compliant"
MODEL = "tiny"


@dataclass
class ScoringEngine:
    """shift: added to the log-probability of (prompt, place). token_ids: whether return_token_ids is honoured.

    nan: answer of a request whose numbers are NaN: "400" (0.32), "500" (an exception while the answer is written) or
    "null". grid: logits are multiples of it."""

    bos: tuple[int, ...] = (1,)
    letter: Callable[[str], int] = ord
    template: str = "<user>{}<assistant>"
    shift: Callable[[tuple[int, ...], int], float] = lambda ids, place: 0.0
    model: str = MODEL
    root: str = "models/tiny"
    version: str = "0.32.0"
    dtype: str | None = None
    grid: float = 2**-7
    token_ids: bool = True
    tokenize: bool = True
    completions: bool = True
    chat: bool = True
    scores: bool = True
    max_logprobs: int = 20
    raw_logits: bool = False
    nan: str | None = None
    stuck: bool = False
    key: str | None = None
    garbage: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open_scores: int = 0
    most_scores: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve; the value is the URL."""
        server = TestServer(self.app())
        await server.start_server()
        try:
            yield str(server.make_url("")).rstrip("/")
        finally:
            await server.close()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes([web.get("/v1/models", self._models), web.get("/version", self._version),
                        web.get("/server_info", self._info)])  # fmt: skip
        for offered, path, handler in (
            (self.tokenize, "/tokenize", self._tokenize),
            (self.completions, "/v1/completions", self._complete),
            (self.chat, "/v1/chat/completions", self._complete),
        ):
            if offered:
                app.add_routes([web.post(path, handler)])
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.garbage and request.method == "POST":
            return web.Response(text="<html>hello</html>")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "root": self.root, "max_model_len": 4096}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _info(self, _: web.Request) -> web.Response:
        if self.dtype is None:
            return web.Response(status=404)
        return web.json_response({"vllm_config": {"model_config": {"dtype": f"torch.{self.dtype}"}}})

    def _ids(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            text = "".join(self.template.format(message["content"]) for message in body["messages"])
            return [*self.bos, *map(self.letter, text)]
        prompt = body["prompt"]
        return [*self.bos, *map(self.letter, prompt)] if isinstance(prompt, str) else prompt

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self._ids(await request.json())
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        k = body.get("prompt_logprobs")
        self.open_scores += k is not None
        self.most_scores = max(self.most_scores, self.open_scores)
        try:
            return self._answered(body, k)
        finally:
            self.open_scores -= k is not None

    def _answered(self, body: dict[str, Any], k: int | None) -> web.Response:
        ids, chat = self._ids(body), "messages" in body
        wanted = k if k is not None else body.get("logprobs")
        if (wanted or 0) > self.max_logprobs:
            said = f"Requested prompt logprobs of {wanted}, which is greater than max allowed: {self.max_logprobs}"
            return web.json_response({"error": {"message": said}}, status=400)
        if self.nan in ("400", "500") and wanted is not None:
            error = {"error": {"message": NAN_SAID, "code": 400}}
            return web.json_response(error, status=400) if self.nan == "400" else web.Response(status=500)
        count = body["max_tokens"]
        choice: dict[str, Any] = {"index": 0, "text": "x" * count, "finish_reason": "length"}
        answer: dict[str, Any] = {"model": self.model, "choices": [choice]}
        answer["usage"] = {"prompt_tokens": len(ids), "completion_tokens": count}
        top = answer if chat else choice
        if self.token_ids and body.get("return_token_ids"):
            top["prompt_token_ids"] = ids
        if k is not None and self.scores:
            top["prompt_logprobs"] = [None, *(self._entry(tuple(ids), place, k) for place in range(1, len(ids)))]
        if body.get("logprobs") is not None:
            choice["logprobs"] = self._greedy(tuple(ids), count, body["logprobs"])
        return web.Response(text=json.dumps(answer), content_type="application/json")

    def _entry(self, ids: tuple[int, ...], place: int, k: int) -> dict[str, Any]:
        rng = random.Random(zlib.crc32(repr((ids[:place], ids[place])).encode()))
        gap = self.grid * rng.randrange(1, max(2, int(4 / self.grid)))
        own = -0.7 - gap + (0.3 * rng.random() - 0.3) + self.shift(ids, place)
        if self.nan == "null":
            return {str(ids[place]): {"logprob": None, "rank": 7}}
        entry = {str(ids[place]): {"logprob": 3.5 if self.raw_logits else own, "rank": 7}}
        return entry | ({str(ids[place] + 1): {"logprob": min(own + gap, -1e-3), "rank": 1}} if k else {})

    def _greedy(self, ids: tuple[int, ...], count: int, k: int) -> dict[str, Any]:
        rng = random.Random(len(ids))
        tokens = [f"token_id:{7 if self.stuck else rng.randrange(100)}" for _ in range(count)]
        tops = [{token: math.log(0.8), "token_id:999": math.log(0.1)} if k > 1 else {token: -0.2} for token in tokens]
        return {"tokens": tokens, "top_logprobs": tops}
