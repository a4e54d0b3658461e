"""A gateway in this process before a fake engine, with the requests and answers of its tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from exporters.requests.record import RequestRecord, parse_line
from stack.gateway import GatewayConfig, Started, make_key, serve
from stack.gateway.config import LivenessConfig
from tests.support.wait import until

KEYS = {team: make_key(team) for team in ("demo", "batch")}


CHAT = "/v1/chat/completions"


ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


STREAM = ASK | {"stream": True}


REPLY = {
    "id": "chatcmpl-1",
    "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "abc"}, "finish_reason": "length"}],
    "system_fingerprint": "vllm-0.32.0-d92bc6a7",
    "usage": {
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
    "metrics": {"time_to_first_token_ms": 12.4775, "queue_time_ms": 0.0294},
}


Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def delta(finish: str | None = None, **what: Any) -> bytes:
    named = {"system_fingerprint": REPLY["system_fingerprint"]} if finish else {}
    return event(model="tiny", choices=[{"index": 0, "delta": what, "finish_reason": finish}], **named)


ROLE, TOKEN, LAST, DONE = (
    delta(role="assistant", content=""),
    delta(content="né "),
    delta("length", content="!"),
    b"data: [DONE]\n\n",
)


USAGE = event(
    model="tiny", choices=[], usage=REPLY["usage"], metrics=REPLY["metrics"], system_fingerprint="vllm-0.32.0-d92bc6a7"
)


@dataclass
class FakeEngine:
    """Answers with whatever a test says, and remembers what it was asked."""

    url: str = ""
    answer: Answer | None = None
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    hangups: int = 0
    peers: set[Any] = field(default_factory=set)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        # the gateway's own looks; an engine without models is not probed
        if request.path == "/health" or (
            request.path in ("/metrics", "/v1/models") and "X-Request-Id" not in request.headers
        ):
            return web.Response()
        self.asked.append((request.method, request.rel_url.raw_path_qs,
                           {k.lower(): v for k, v in request.headers.items()}, await request.read()))  # fmt: skip
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        try:
            return await self.answer(request) if self.answer else web.json_response(REPLY)
        except asyncio.CancelledError:
            self.hangups += 1
            raise


def events(*parts: bytes, pause_s: float = 0.0) -> Answer:
    """An event stream written in these parts."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(pause_s)
        return response

    return answer


def says(body: Any, status: int = 200, **headers: str) -> Answer:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return answer


async def never(request: web.BaseRequest) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def then_breaks(before: Answer | None) -> Answer:
    """Answers, or does not even begin to, and then resets the connection."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = await before(request) if before else web.Response()
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


async def listening(engine: FakeEngine) -> web.ServerRunner:
    """Lets a fake engine answer on a free port, until `cleanup`."""
    runner = web.ServerRunner(web.Server(engine.handle, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner


@dataclass
class Running:
    engine: FakeEngine
    started: Started
    session: aiohttp.ClientSession
    path: Path
    stop: asyncio.Event
    serving: asyncio.Task[None]

    def post(self, body: Any = ASK, route: str = CHAT, team: str = "demo", **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(
            self.started.url + route, data=data, headers={"Authorization": f"Bearer {KEYS[team][0]}"} | headers
        )

    async def records(self, count: int) -> list[RequestRecord]:
        """The log, once it has `count` lines; more would be as wrong as fewer."""
        await until(lambda: len(self._lines()) >= count, f"{count} records")
        lines = self._lines()
        assert count == len(lines)
        return [parse_line(line) for line in lines]

    def _lines(self) -> list[bytes]:
        """The last one may be on its way."""
        return [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    async def record(self) -> RequestRecord:
        return (await self.records(1))[0]

    async def figures(self) -> dict[tuple[str, ...], float]:
        """Own metrics by name and label values, labels in the order of the alphabet: outcome, status, team."""
        async with self.session.get(self.started.metrics_url + "/metrics") as answer:
            text = await answer.text()
        return {
            (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }


@contextlib.asynccontextmanager
async def gateway(
    tmp_path: Path, answer: Answer | None = None, policy: Any = None, **settings: Any
) -> AsyncIterator[Running]:
    """A gateway in front of a fake engine; every socket on a free port, all of it gone afterwards. policy: what
    teams.yaml says; teams share cached prefixes where it says nothing else, so that bodies pass as they are. Without
    probes unless settings say so: each one has a record, and a busy engine gets one at any time."""
    engine = FakeEngine(answer=answer)
    runner = await listening(engine)
    teams = tmp_path / "teams.yaml"
    policy = policy or {"teams": {team: {"keys": [hashed]} for team, (_, hashed) in KEYS.items()}}
    named = {name: {"cache_domain": "shared", **team} for name, team in policy.get("teams", {}).items()}
    teams.write_text(json.dumps(policy | {"teams": named}))
    config = GatewayConfig(
        **{
            "upstream": engine.url,
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "teams": str(teams),
            "requests_log": str(tmp_path / "requests.jsonl"),
            "liveness": LivenessConfig(probe=False),
        }
        | settings
    )
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(config, stop=stop, on_start=started.set_result))
    await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await runner.cleanup()
        await serving
    try:
        async with aiohttp.ClientSession() as session:
            yield Running(engine, started.result(), session, Path(config.requests_log), stop, serving)
    finally:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):  # a test may end it early
            await serving
        await runner.cleanup()


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Return what a server says until it closes, also where it resets because it left bytes of the client unread."""
    said = bytearray()
    try:
        while part := await asyncio.wait_for(reader.read(1 << 16), 30):
            said += part
    except ConnectionError:
        said += reader._buffer  # type: ignore[attr-defined]  # came before the reset, which would hide it
    return bytes(said)
