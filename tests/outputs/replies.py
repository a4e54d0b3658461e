"""Replies of the gateway, head and body: one case for each way a request ends that the gateway itself brings about."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from aiohttp import ClientResponse, web

from exporters.catalogue.gateway import RUNNING, WAITING
from exporters.net.listener import Listening
from exporters.scrape import Format
from stack.gateway.config import GatewayLimits, Timeouts
from tests.outputs.expositions import FORMATS, readable
from tests.support import gateway_scene as gateways
from tests.support.wait import until

REFUSED = {"demo": {"max_prompt_tokens": 60, "max_output_tokens": 20, "over_output": "refuse"},
           "batch": {"models": ["tiny"], "max_in_flight": 1, "band": "impatient"}}  # fmt: skip
LONG = gateways.ASK | {"messages": [{"role": "user", "content": "word " * 100}]}


def _policy(teams: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    plain = {team: {"keys": [hashed], "band": "default"} for team, (_, hashed) in gateways.KEYS.items()}
    return {"teams": {name: plain[name] | (teams or {}).get(name, {}) for name in plain},
            "bands": {"default": {"rank": 0}, "impatient": {"rank": 1, "max_wait_s": 0}}} | rest  # fmt: skip


def failure(code: int) -> dict[str, Any]:
    """Return an error body as vLLM writes it."""
    return {"error": {"message": "the engine says no", "type": "EngineError", "param": None, "code": code}}


async def hold_later_ones(request: web.BaseRequest) -> web.StreamResponse:
    """Answer what comes earlier; hold the rest."""
    if request.headers["X-Request-Id"].startswith("earlier"):
        return web.json_response(gateways.REPLY)
    return await gateways.never(request)


@dataclass(frozen=True)
class Case:
    """A request, and the gateway and engine that it meets. held: requests before it that stay in flight. earlier:
    requests before it that are answered. raw: bytes of a request head, sent as they are. draining: the gateway is
    stopping."""

    body: Any = None
    team: str = "demo"
    answer: Any = None
    policy: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    held: int = 0
    earlier: int = 0
    raw: bytes = b""
    draining: bool = False


def _then_silent(*parts: bytes) -> gateways.Answer:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(parts))
        return await gateways.never(request)

    return answer


async def _sign_in(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="<html>Sign in</html>", content_type="text/html")


_STREAM = gateways.events(gateways.ROLE, gateways.TOKEN, gateways.LAST, gateways.USAGE, gateways.DONE)
_USAGE_ASKED = gateways.STREAM | {"stream_options": {"include_usage": True}}
_ONE_SLOT = {"slots": 1}
_COUNTED = gateways.says(
    gateways.REPLY | {"usage": {"prompt_tokens": 125, "completion_tokens": 3, "total_tokens": 128}}
)
CASES: dict[str, Case] = {
    "admitted": Case(),
    "stream": Case(gateways.STREAM, answer=_STREAM),
    "stream_with_usage": Case(_USAGE_ASKED, answer=_STREAM),
    "stream_error_event": Case(gateways.STREAM, answer=gateways.events(gateways.ROLE, gateways.event(**failure(500)))),
    "no_key": Case(headers={"Authorization": ""}),
    "unknown_key": Case(headers={"Authorization": "Bearer none-of-ours"}),
    "two_keys": Case(headers={"x-api-key": gateways.KEYS["batch"][0]}),
    "expectation_failed": Case(raw=b"Expect: 200-ok\r\n"),
    "head_too_large": Case(raw=b"X: " + b"a" * 40_000 + b"\r\n"),
    "body_too_large": Case(b"x" * 2000, settings={"limits": GatewayLimits(body_bytes=1500)}),
    "bad_body": Case(b"{"),
    "bodies_full": Case(
        gateways.ASK | {"user": "x" * 150_000}, answer=gateways.never, policy=_policy(capacity=_ONE_SLOT), held=2,
        settings={"limits": GatewayLimits(body_bytes=200_000, bodies_bytes=400_000)},
    ),
    "uncountable": Case(gateways.ASK | {"n": 100_000}),
    "model_not_allowed": Case(gateways.ASK | {"model": "other"}, team="batch", policy=_policy(REFUSED)),
    "prompt_too_long": Case(LONG | {"user": "x" * 9000, "messages": LONG["messages"] * 30}, policy=_policy(REFUSED)),
    "prompt_over_limit": Case(
        LONG, answer=_COUNTED, policy=_policy({"demo": {"max_prompt_tokens": 60}}), earlier=1
    ),
    "output_too_long": Case(gateways.ASK | {"max_tokens": 21}, policy=_policy(REFUSED)),
    "too_many_outputs": Case(gateways.ASK | {"n": 3}, policy=_policy({"demo": {"max_running": 2}})),
    "too_many_logprobs": Case(
        gateways.ASK | {"logprobs": True, "top_logprobs": 20}, policy=_policy({"demo": {"max_logprobs": 5}})
    ),
    "context_too_long": Case(
        gateways.ASK | {"max_tokens": 41}, policy=_policy(models={"tiny": {"max_model_len": 40}})
    ),
    "team_limit": Case(team="batch", answer=gateways.never, policy=_policy(REFUSED), held=1),
    "queue_full": Case(answer=gateways.never, policy=_policy(capacity=_ONE_SLOT | {"queue": 0}), held=1),
    "est_wait": Case(
        answer=hold_later_ones, policy=_policy({"demo": {"band": "impatient"}}, capacity=_ONE_SLOT), earlier=1, held=1
    ),
    "queue_ttl": Case(
        answer=gateways.never, held=1,
        policy=_policy(capacity=_ONE_SLOT) | {"bands": {"default": {"rank": 0, "max_wait_s": 0.2}}},
    ),
    "draining": Case(answer=gateways.never, held=1, draining=True, settings={"timeouts": Timeouts(drain_s=0.2)}),
    "engine_busy": Case(answer=gateways.says(failure(429), 429)),
    "bad_request": Case(answer=gateways.says(failure(400), 400)),
    "upstream_auth": Case(answer=gateways.says(failure(401), 401)),
    "engine_error": Case(answer=gateways.says(failure(500), 500)),
    "unreadable_page": Case(answer=_sign_in),
    "unreadable_usage": Case(answer=gateways.says(gateways.REPLY | {"usage": {"prompt_tokens": 0}})),
    "engine_abort": Case(
        answer=gateways.says(gateways.REPLY | {"choices": [{"index": 0, "finish_reason": "abort"}]})
    ),
    "decode_timeout": Case(
        gateways.STREAM, answer=_then_silent(gateways.ROLE, gateways.TOKEN),
        settings={"timeouts": Timeouts(decode_s=0.2)},
    ),
    "body_timeout": Case(raw=b"Content-Length: 9\r\n", settings={"timeouts": Timeouts(body_s=0.2)}),
    "upstream_reset": Case(answer=gateways.then_breaks(None)),
    "upstream_down": Case(settings={"upstream": "http://127.0.0.1:9"}),
    "prefill_timeout": Case(gateways.STREAM, answer=gateways.never, settings={"timeouts": Timeouts(prefill_s=0.2)}),
    "total_timeout": Case(answer=gateways.never, settings={"timeouts": Timeouts(total_s=0.2)}),
}  # fmt: skip
ROUTES = ("/v1/models", "/health", "/nowhere", "/v1/nowhere")


def gateway(work: Path) -> dict[str, str]:
    """Return the reply to each case, head and body, with its line of the request log; and the gateway's exposition."""
    return asyncio.run(_replies(work))


async def _replies(work: Path) -> dict[str, str]:
    texts = {}
    for name, case in CASES.items():
        folder = work / f"gateway-{name}"
        folder.mkdir()
        async with gateways.gateway(folder, case.answer, dict(case.policy or _policy()), **case.settings) as running:
            texts[f"{name}.txt"] = await _reply(running, name, case)
            if name == "admitted":
                texts |= await _other_routes(running)
            if name == "stream_with_usage":
                for file, form in FORMATS.items():
                    texts[f"exposition/{file}"] = await _scraped(running, form)
    return texts


async def _reply(gateway: gateways.Running, name: str, case: Case) -> str:
    """Return the reply and the line of the request log."""
    for number in range(case.earlier):
        await _posted(gateway, case, f"earlier-{number}")
    tasks = []
    for number in range(case.held):
        tasks.append(asyncio.create_task(_posted(gateway, case, f"held-{number}")))
        await until(functools.partial(_in_flight, gateway, number + 1), "a request in flight")
    with open_listener() if case.draining else contextlib.nullcontext():
        if case.draining:
            gateway.stop.set()
        reply = await (_raw(gateway, case, name) if case.raw else _posted(gateway, case, f"recorded-{name}"))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    line = "" if name == "head_too_large" else await _logged(gateway, f"recorded-{name}")
    return f"{reply}\n\n-- request log\n{line}"


@contextlib.contextmanager
def open_listener() -> Iterator[None]:
    """Let a gateway that stops take new connections until the end of the block."""
    close, ended = Listening.close, asyncio.Event()

    async def close_later(listening: Listening) -> None:
        await ended.wait()
        await close(listening)

    with patch.object(Listening, "close", close_later):
        try:
            yield
        finally:
            ended.set()


async def _in_flight(gateway: gateways.Running, count: int) -> bool:
    found = await gateway.figures()
    return count <= sum(value for key, value in found.items() if key[0] in (RUNNING.name, WAITING.name))


async def _posted(gateway: gateways.Running, case: Case, request_id: str) -> str:
    headers = {"X-Request-Id": request_id} | dict(case.headers)
    body = gateways.ASK if case.body is None else case.body
    async with gateway.post(body, team=case.team, **headers) as answer:
        return await _head_and_body(answer)


async def _head_and_body(answer: ClientResponse) -> str:
    head = [f"HTTP/1.1 {answer.status} {answer.reason}"]
    head += [f"{name.decode()}: {value.decode()}" for name, value in answer.raw_headers]
    body = (await answer.read()).decode()
    with contextlib.suppress(ValueError):
        body = json.dumps(json.loads(body), indent=1, ensure_ascii=False)
    return "\n".join((*head, "", body))


async def _raw(gateway: gateways.Running, case: Case, name: str) -> str:
    url = urlsplit(gateway.started.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    key = gateways.KEYS[case.team][0]
    length = b"" if b"Content-Length" in case.raw else b"Content-Length: 2\r\n"
    writer.write(
        f"POST {gateways.CHAT} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        f"X-Request-Id: recorded-{name}\r\nContent-Type: application/json\r\n".encode() + case.raw
        + length + b"\r\n{}"
    )  # fmt: skip
    reply = bytearray()
    while not _complete(reply):  # the gateway reads on for a while before it closes
        part = await asyncio.wait_for(reader.read(1 << 16), 30)
        if not part:
            raise ConnectionError(f"{name}: the gateway closed after {bytes(reply)!r}")
        reply += part
    writer.close()
    return reply.decode().replace("\r\n", "\n")


def _complete(reply: bytes | bytearray) -> bool:
    head, end, body = bytes(reply).partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(end) and len(body) >= int(length[1] if length else 0)


async def _logged(gateway: gateways.Running, request_id: str) -> str:
    def lines() -> list[str]:
        return [line for line in gateway.path.read_text().splitlines(keepends=True) if request_id in line]

    await until(lambda: any(line.endswith("\n") for line in lines()), f"the log line of {request_id}")
    return "".join(lines())


async def _other_routes(gateway: gateways.Running) -> dict[str, str]:
    texts = {}
    for path in ROUTES:
        async with gateway.session.get(
            gateway.started.url + path,
            headers={"Authorization": f"Bearer {gateways.KEYS['demo'][0]}", "X-Request-Id": "recorded-route"},
        ) as answer:
            texts[f"GET{path.replace('/', '-')}.txt"] = await _head_and_body(answer)
    return texts


async def _scraped(gateway: gateways.Running, form: Format) -> str:
    """Return an exposition once the gateway has assessed its engine."""
    text = ""

    async def assessed() -> bool:
        nonlocal text
        where = gateway.started.metrics_url + "/metrics"
        async with gateway.session.get(where, headers={"Accept": form.value}) as answer:
            text = readable(await answer.read(), form)
        return 'evidence="no_work"' in text

    await until(assessed, "an engine without work")
    return text
