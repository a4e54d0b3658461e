"""The gateway's data path against a fake engine on loopback: what the client sees, what the engine sees, and the one
record that is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from exporters.catalogue.gateway import GATEWAY, INFLIGHT, REQUESTS
from exporters.requests.phases import blame, phases_of
from exporters.requests.record import RequestRecord
from stack.config import BadConfig
from stack.gateway.config import GatewayConfig, GatewayLimits, Timeouts
from stack.gateway.lease_client import LeaseStore
from stack.gateway.reasons import REASONS, classify
from stack.gateway.sharing import Sharing
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
    USAGE,
    Answer,
    FakeEngine,
    Running,
    delta,
    event,
    events,
    everything,
    gateway,
    listening,
    never,
    says,
    then_breaks,
)
from tests.support.wait import until

PAUSE_S = 1.0


async def test_a_reply_passes_byte_for_byte_and_leaves_one_record(tmp_path: Path):
    async with gateway(tmp_path) as it:
        async with it.post(ASK | {"n": 1}, **{"X-Request-Id": "mine-1"}) as answer:
            assert (200, json.dumps(REPLY).encode(), "mine-1") == (
                answer.status,
                await answer.read(),
                answer.headers["X-Request-Id"],
            )
        record = await it.record()
        want = RequestRecord(
            request_id="mine-1", team="demo", priority="default", model="tiny", variant="stable", est_prompt_tokens=2,
            route=CHAT,
            upstream=it.engine.url[7:], engine_version="0.32.0", attempt=1, stream=False,
            n=1, prompt_tokens=12, cached_tokens=0, completion_tokens=3, cache_hit=False, queue_ms=0.0,
            engine_queue_ms=0.029,
            engine_ttft_ms=12.477, status=200, finish_reason="length", outcome="ok", client_wait_ms=0.0,
        )  # fmt: skip
        measured = ("ts", "trace_id", "span_id", "e2e_ms")
        assert want == msgspec.structs.replace(record, **dict.fromkeys(measured))
        assert all(getattr(record, name) is not None for name in measured)


@pytest.mark.parametrize("stream", [False, True])
async def test_record_names_both_engines_of_a_pair(tmp_path: Path, stream: bool):
    """As the router names them, and not to the client. The engine's times are the decode engine's alone: unknown."""
    named = {"x-prefill-engine": "10.0.0.1:8000", "x-decode-engine": "10.0.0.2:8000"}

    async def routed(request: web.BaseRequest) -> web.StreamResponse:
        if not stream:
            return web.json_response(REPLY, headers=named)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **named})
        await response.prepare(request)
        await response.write(TOKEN + LAST + USAGE + DONE)
        return response

    router = FakeEngine(answer=routed)
    runner = await listening(router)
    pair = {"url": router.url, "prefill_header": "X-Prefill-Engine", "decode_header": "x-decode-engine"}
    policy = {"teams": {"demo": {"keys": [KEYS["demo"][1]]}}, "upstreams": {"pair": pair}}
    async with gateway(tmp_path, policy=policy) as it:
        async with it.post(STREAM if stream else ASK) as answer:
            await answer.read()
            assert not [name for name in answer.headers if name.lower() in named]
        record = await it.record()
    await runner.cleanup()
    assert ("pair", *named.values()) == (record.upstream, record.prefill_engine, record.decode_engine)
    assert (None, None) == (record.engine_queue_ms, record.engine_ttft_ms)


async def test_stream_hides_usage_that_was_not_asked_for(tmp_path: Path):
    """A stream passes without the usage that the client did not ask for."""
    async with gateway(tmp_path, events(ROLE, TOKEN, TOKEN, LAST, USAGE, DONE, pause_s=0.02)) as it:
        async with it.post(STREAM) as answer:
            assert ROLE + TOKEN + TOKEN + LAST + DONE == await answer.read()
            assert "text/event-stream; charset=utf-8" == answer.headers["Content-Type"]
        record = await it.record()
        assert (12, 3, "length", "ok", True) == (
            record.prompt_tokens,
            record.completion_tokens,
            record.finish_reason,
            record.outcome,
            record.stream,
        )
        assert record.ttft_ms is not None
        assert record.tpot_ms is not None
        assert record.e2e_ms is not None
        assert 20 <= record.ttft_ms < record.e2e_ms  # the role-only chunk came 20 ms before the first token
        # two gaps of 20 ms between three tokens, and the machine's haste
        assert 10 <= record.tpot_ms <= record.e2e_ms / 2
        assert {"include_usage": True} == json.loads(it.engine.asked[0][3])["stream_options"]


async def test_a_client_that_asks_for_usage_gets_it(tmp_path: Path):
    body = json.dumps(STREAM | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}).encode()
    async with gateway(tmp_path, events(ROLE, TOKEN, LAST, USAGE, DONE)) as it:
        async with it.post(body) as answer:
            assert ROLE + TOKEN + LAST + USAGE + DONE == await answer.read()
        assert body == it.engine.asked[0][3]


async def test_a_slash_at_the_end_leads_past_nobody(tmp_path: Path):
    """The engine would answer it with a redirect to its own address, which clients follow."""
    async with gateway(tmp_path) as it:
        async with it.post(route=CHAT + "/?x=1") as answer:
            assert 200 == answer.status
        assert CHAT + "?x=1" == it.engine.asked[0][1]
        assert CHAT == (await it.record()).route


async def test_engine_gets_listed_headers_and_no_key(tmp_path: Path):
    """What only the list names passes: a router before the engine may obey any other."""
    (tmp_path / "key").write_text("engine-secret\n")
    more = ["X-Odd", "x-KEPT"]
    async with gateway(tmp_path, upstream_key_file=str(tmp_path / "key"), pass_headers=more) as it:
        names = ("TE", "x-api-key", "X-Prefiller-Host-Port", "X-Forwarded-For", "Endpoint-Load-Metrics-Format")
        headers = dict.fromkeys(names, "other") | {
            "Connection": "keep-alive, X-Odd",
            "X-Odd": "1",
            "X-Kept": "yes",
            "User-Agent": "me",
            "Anthropic-Beta": "b",
            "X-Session-Id": "s",
        }
        async with it.post(ASK, **headers) as answer:
            await answer.read()
        sent = it.engine.asked[0][2]
        assert ("Bearer engine-secret", "yes", "me") == (sent["authorization"], sent["x-kept"], sent["user-agent"])
        assert ("b", "s") == (sent["anthropic-beta"], sent["x-session-id"])
        assert not {"x-odd", *map(str.lower, names)} & set(sent)
        assert KEYS["demo"][0] not in str(it.engine.asked)


@pytest.mark.parametrize("name", ["Authorization", "x-request-id", "TE", "tracestate", "X-Vllm-Priority", "a b", ""])
def test_headers_of_the_gateway_cannot_be_passed(name: str):
    with pytest.raises(ValueError, match="pass_headers"):
        GatewayConfig(pass_headers=["X-Tenant", name])


async def test_without_an_engine_key_no_authorization_is_sent(tmp_path: Path):
    async with gateway(tmp_path) as it:
        async with it.post(Authorization="", **{"x-api-key": KEYS["batch"][0]}) as answer:
            assert 200 == answer.status
        assert "authorization" not in it.engine.asked[0][2]
        assert "batch" == (await it.record()).team


async def test_request_ids_and_traces_are_continued_or_made(tmp_path: Path):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with gateway(tmp_path) as it:
        for headers in (
            {"X-Request-Id": "abc", "traceparent": parent, "tracestate": "a=1"},
            {"X-Request-Id": "x" * 129, "traceparent": "00-0-0-0", "tracestate": "a=1"},
        ):
            async with it.post(ASK, **headers) as answer:
                await answer.read()
        first, second = await it.records(2)
        sent = [asked[2] for asked in it.engine.asked]
        assert ("abc", "0af7651916cd43dd8448eb211c80319c", "a=1") == (
            sent[0]["x-request-id"],
            first.trace_id,
            sent[0]["tracestate"],
        )
        assert f"00-{first.trace_id}-{first.span_id}-01" == sent[0]["traceparent"] != parent
        assert (32, 32) == (len(second.request_id), len(second.trace_id or ""))
        assert f"00-{second.trace_id}-{second.span_id}-01" == sent[1]["traceparent"]
        assert "tracestate" not in sent[1]
        assert second.request_id == sent[1]["x-request-id"]


@pytest.mark.parametrize(
    ("key", "reason"), [("Bearer vw-demo-wrong", "unknown_key"), ("", "no_key"), ("Basic abc", "unknown_key")]
)
async def test_stranger_is_refused_on_record(tmp_path: Path, key: str, reason: str):
    """A stranger is refused on record and never reaches the engine."""
    async with gateway(tmp_path) as it:
        async with it.post(Authorization=key) as answer:
            error = (await answer.json())["error"]
            assert (401, reason, "authentication_error", "Bearer") == (
                answer.status, error["code"], error["type"], answer.headers["WWW-Authenticate"])  # fmt: skip
        record = await it.record()
        assert (None, "rejected", reason, 401, "rejected") == (
            record.team,
            record.outcome,
            record.reason,
            record.status,
            record.finish_reason,
        )
        assert (None, None, None) == (record.attempt, record.upstream, record.queue_ms)
        assert [] == it.engine.asked
        assert 1.0 == (await it.figures())[REQUESTS.name, "rejected", "4xx", "__unknown__"]


async def test_keyless_requests_need_configuration(tmp_path: Path):
    """Keyless requests have a team only where that is configured."""
    async with gateway(tmp_path, anonymous_team="demo") as it:
        for key, status in (("", 200), ("Bearer wrong", 401)):
            async with it.post(Authorization=key) as answer:
                assert status == answer.status
        assert ["demo", None] == [record.team for record in await it.records(2)]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused_on_record(tmp_path: Path, chunked: bool):
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 1000

    async with gateway(tmp_path, limits=GatewayLimits(body_bytes=10_000)) as it:
        headers = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with it.session.post(
            it.started.url + CHAT, data=parts() if chunked else b"x" * 40_000, headers=headers
        ) as answer:
            assert (413, "body_too_large") == (answer.status, (await answer.json())["error"]["code"])
        assert ("rejected", "demo") == ((record := await it.record()).outcome, record.team)
        assert [] == it.engine.asked


async def test_a_client_that_waits_for_100_continue_gets_it(tmp_path: Path):
    async with gateway(tmp_path) as it:
        headers = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with it.session.post(it.started.url + CHAT, json=ASK, headers=headers, expect100=True) as answer:
            assert (200, REPLY) == (answer.status, await answer.json())


@pytest.mark.parametrize(
    ("status", "outcome", "reason"),
    [(400, "rejected", "bad_request"), (401, "upstream_error", "upstream_auth"), (404, "rejected", "bad_request"),
     (429, "rejected", "engine_busy"), (500, "upstream_error", "engine_error"), (503, "rejected", "engine_busy")],
)  # fmt: skip
async def test_the_engines_own_errors_pass_and_are_named(tmp_path: Path, status: int, outcome: str, reason: str):
    body = {"error": {"message": "no", "type": "X", "code": status}}
    async with gateway(tmp_path, says(body, status, **{"Retry-After": "7"})) as it:
        async with it.post(STREAM) as answer:
            assert (status, body, "7") == (answer.status, await answer.json(), answer.headers["Retry-After"])
        record = await it.record()
        assert (outcome, reason, status, 7.0 if status in (429, 503) else None) == (
            record.outcome, record.reason, record.status, record.retry_after_s)  # fmt: skip


@pytest.mark.parametrize(
    ("code", "outcome", "reason"), [(503, "rejected", "engine_busy"), (500, "upstream_error", "engine_error")]
)
async def test_an_error_inside_a_stream_with_status_200_is_no_success(
    tmp_path: Path, code: int, outcome: str, reason: str
):
    stream = event(error={"message": "queue full", "type": "x", "code": code}) + DONE
    async with gateway(tmp_path, events(stream)) as it:
        async with it.post(STREAM) as answer:
            assert (200, stream) == (answer.status, await answer.read())
        record = await it.record()
        assert (outcome, reason, 200, None) == (record.outcome, record.reason, record.status, record.ttft_ms)


async def test_missing_usage_is_null_and_not_zero(tmp_path: Path):
    async with gateway(tmp_path, events(ROLE, TOKEN, LAST, DONE)) as it:
        async with it.post(STREAM) as answer:
            await answer.read()
        record = await it.record()
        assert (None, None, None, None, None) == (
            record.prompt_tokens,
            record.completion_tokens,
            record.cached_tokens,
            record.cache_hit,
            record.tpot_ms,
        )
        assert ("ok", True) == (record.outcome, record.ttft_ms is not None)


async def test_several_choices_have_no_single_time_per_token(tmp_path: Path):
    async with gateway(
        tmp_path, events(ROLE, TOKEN, delta("stop", content="x"), TOKEN, LAST, USAGE, DONE, pause_s=0.01)
    ) as it:
        async with it.post(STREAM | {"n": 2}) as answer:
            await answer.read()
        record = await it.record()
        assert (2, 3, None, "length") == (record.n, record.completion_tokens, record.tpot_ms, record.finish_reason)


async def test_a_client_that_leaves_a_stream_stops_the_engine_at_once(tmp_path: Path):
    async with gateway(tmp_path, events(ROLE, TOKEN, *[TOKEN] * 1000, pause_s=0.01)) as it:
        answer = await it.post(STREAM)
        await answer.content.readany()
        answer.close()
        record = await it.record()
        assert ("client_abort", "client_hangup", "abort", 200) == (
            record.outcome,
            record.reason,
            record.finish_reason,
            record.status,
        )
        await until(lambda: it.engine.hangups == 1, "the engine sees the client disconnect")


async def test_stream_without_usage_is_marked_as_estimate(tmp_path: Path):
    """The client leaves before the usage event: its content events are on record, and no token count that would pass
    for the engine's."""
    async with gateway(tmp_path, events(ROLE, *[TOKEN] * 5, *[b": wait\n\n"] * 1000, pause_s=0.01)) as it:
        answer = await it.post(STREAM)
        seen = b""
        while seen.count(TOKEN) < 5:
            seen += await answer.content.readany()
        answer.close()
        record = await it.record()
        assert ("client_abort", None, None) == (record.outcome, record.prompt_tokens, record.completion_tokens)
        assert (5, 5) == (record.content_events, record.est_completion_tokens)
        assert (record.est_prompt_tokens or 0) > 0


async def test_missing_usage_is_estimated_from_the_team(tmp_path: Path):
    """With several tokens in an event (speculative decoding, --stream-interval), events alone would charge a part of
    the work."""
    usage = event(model="tiny", choices=[], usage={"prompt_tokens": 9, "completion_tokens": 150, "total_tokens": 159})
    async with gateway(tmp_path, events(ROLE, *[TOKEN] * 49, LAST, usage, DONE)) as it:
        for _ in range(80):
            async with it.post(STREAM) as answer:
                await answer.read()
        it.engine.answer = events(ROLE, *[TOKEN] * 4, LAST, DONE)
        async with it.post(STREAM) as answer:
            await answer.read()
        *paid, record = await it.records(81)
        assert (150, None, None) == (
            paid[-1].completion_tokens,
            paid[-1].content_events,
            paid[-1].est_completion_tokens,
        )
        assert 5 == record.content_events
        assert 13 <= (record.est_completion_tokens or 0) <= 15


@pytest.mark.parametrize(
    ("last", "outcome"),
    [(LAST + USAGE + DONE, "ok"), (event(error={"message": "queue full", "code": 503}), "rejected")],
)
async def test_leaving_after_the_end_is_no_abort(tmp_path: Path, last: bytes, outcome: str):
    """OpenAI's own client hangs up on [DONE] and on an error event, before the connection says that the answer is
    over."""
    async with gateway(tmp_path, events(ROLE + TOKEN + last, pause_s=8.0)) as it:
        answer = await it.post(STREAM)
        while not (await answer.content.readline()).startswith((b"data: [DONE]", b'data: {"error"')):
            pass
        answer.close()
        record = await it.record()
        assert (outcome, 200) == (record.outcome, record.status)
        assert record.e2e_ms is not None
        assert record.e2e_ms < 6000  # on record when the client left, not when the engine closed


async def test_leaving_before_a_reply_stops_the_engine(tmp_path: Path):
    """A client that leaves before a reply stops the engine too."""
    async with gateway(tmp_path, never) as it:
        asking = asyncio.ensure_future(it.post(ASK))
        await until(lambda: len(it.engine.asked) == 1, "the engine has the request")
        asking.cancel()
        record = await it.record()
        assert ("client_abort", None, 1) == (record.outcome, record.status, record.attempt)
        await until(lambda: it.engine.hangups == 1, "the engine sees the client disconnect")
        assert 1.0 == (await it.figures())[REQUESTS.name, "client_abort", "none", "demo"]


async def test_a_client_that_leaves_while_sending_is_on_record(tmp_path: Path):
    async with gateway(tmp_path) as it:
        host, port = it.started.url[7:].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['demo'][0]}\r\nContent-Length:"
            " 100\r\n\r\nabc".encode()
        )
        await writer.drain()

        async def in_flight() -> bool:
            return bool((await it.figures()).get((INFLIGHT.name, "demo")))

        await until(in_flight, "the request is in flight")
        writer.close()
        assert ("client_abort", "demo") == ((record := await it.record()).outcome, record.team)
        assert [] == it.engine.asked


async def test_an_engine_that_is_down_is_a_503_on_record(tmp_path: Path, free_port: Callable[[], int]):
    async with gateway(tmp_path, upstream=f"http://127.0.0.1:{free_port()}") as it:
        async with it.post() as answer:
            assert (503, "upstream_down", "true") == (
                answer.status,
                (await answer.json())["error"]["code"],
                answer.headers["X-Should-Retry"],
            )
            assert 4 <= int(answer.headers["Retry-After"]) <= 6
        assert ("upstream_error", "upstream_down", "error") == (
            (record := await it.record()).outcome,
            record.reason,
            record.finish_reason,
        )
        figures = await it.figures()
        assert [0.0] == [value for name, value in figures.items() if name[0].endswith("upstream_up")]


async def test_an_engine_that_breaks_before_its_answer_is_a_502(tmp_path: Path):
    async with gateway(tmp_path, then_breaks(None)) as it:
        async with it.post() as answer:
            assert (502, "upstream_reset") == (answer.status, (await answer.json())["error"]["code"])
        assert "upstream_error" == (await it.record()).outcome


@pytest.mark.parametrize(
    ("options", "torn"), [({}, b""), ({"stream_options": {"include_usage": True}}, TOKEN[:20] + b"\n\n")]
)
async def test_broken_stream_ends_with_an_error_event(tmp_path: Path, options: dict[str, Any], torn: bytes):
    """The error is an event of its own, also after half an event that was passed on already."""
    async with gateway(tmp_path, then_breaks(events(ROLE, TOKEN, TOKEN[:20], pause_s=0.02))) as it:
        async with it.post(STREAM | options) as answer:
            body = await answer.read()
        assert body.startswith(ROLE + TOKEN + torn + b'data: {"error":')
        assert "upstream_reset" == json.loads(body.split(b"data: ")[-1])["error"]["code"]
        record = await it.record()
        assert ("upstream_error", "upstream_reset", 200) == (record.outcome, record.reason, record.status)


async def test_a_long_reply_that_breaks_does_not_look_complete(tmp_path: Path):
    begun = asyncio.Event()

    async def half(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"data":[')
        await begun.wait()
        return response

    async with gateway(tmp_path, then_breaks(half)) as it:
        with pytest.raises(aiohttp.ClientError):  # noqa: PT012  # it may break in either
            async with it.post(ASK, "/v1/embeddings") as answer:
                begun.set()
                await answer.read()
        assert ("upstream_error", "upstream_reset") == ((record := await it.record()).outcome, record.reason)


@pytest.mark.parametrize(
    ("ask", "answer", "reason"),
    [(STREAM, never, "prefill_timeout"), (ASK, never, "total_timeout")],
)  # fmt: skip
async def test_an_engine_that_does_not_answer_in_time_is_a_504(tmp_path: Path, ask: Any, answer: Answer, reason: str):
    async with gateway(tmp_path, answer, timeouts=Timeouts(prefill_s=1, total_s=1)) as it:
        async with it.post(ask) as got:
            assert (504, reason) == (got.status, (await got.json())["error"]["code"])
        assert ("timeout", reason, 504) == ((record := await it.record()).outcome, record.reason, record.status)
        await until(lambda: it.engine.hangups == 1, "the engine sees the client disconnect")


async def test_role_chunks_and_comments_do_not_feed_the_prefill_clock(tmp_path: Path):
    async with gateway(
        tmp_path, events(ROLE, *[b": ping\n\n"] * 200, pause_s=0.02), timeouts=Timeouts(prefill_s=0.3)
    ) as it:
        async with it.post(STREAM) as answer:
            assert b"prefill_timeout" in await answer.read()
        assert "prefill_timeout" == (await it.record()).reason


async def test_a_stream_may_last_longer_than_any_gap(tmp_path: Path):
    parts = [ROLE, *[TOKEN] * 20, LAST, DONE]
    async with gateway(tmp_path, events(*parts, pause_s=0.1), timeouts=Timeouts(prefill_s=1.5, decode_s=1.5)) as it:
        async with it.post(STREAM) as answer:
            assert b"".join(parts) == await answer.read()
        assert "ok" == (await it.record()).outcome


async def test_stall_between_tokens_ends_with_an_error_event(tmp_path: Path):
    """A stall between tokens ends the stream with an error event."""
    async with gateway(
        tmp_path, events(ROLE, TOKEN, b": x\n\n", pause_s=2.0), timeouts=Timeouts(prefill_s=9, decode_s=0.2)
    ) as it:
        it.engine.answer = events(ROLE + TOKEN, DONE, pause_s=3.0)
        async with it.post(STREAM) as answer:
            assert b"decode_timeout" in await answer.read()
        assert ("timeout", "decode_timeout", 200) == (
            (record := await it.record()).outcome,
            record.reason,
            record.status,
        )


async def test_stall_within_an_event_separates_our_error(tmp_path: Path):
    """A stall in the middle of an event leaves our error an event of its own."""
    half = b'data: {"id":"1","choi'
    async with gateway(
        tmp_path, events(ROLE + TOKEN + half, DONE, pause_s=3.0), timeouts=Timeouts(prefill_s=9, decode_s=0.2)
    ) as it:
        async with it.post({**STREAM, "stream_options": {"include_usage": True}}) as answer:
            last = (await answer.read()).split(b"\n\n")[-2]
        assert last.startswith(b'data: {"error"')
        assert b"decode_timeout" in last


async def test_routes_that_make_no_tokens_pass_without_a_record(tmp_path: Path):
    async with gateway(tmp_path, says({"data": []})) as it:
        headers = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with it.session.get(it.started.url + "/v1/models?a=%20b&c", headers=headers) as answer:
            assert {"data": []} == await answer.json()
        async with it.session.get(it.started.url + "/v1/models") as answer:
            assert 401 == answer.status
        for path in ("/-/healthy", "/health"):
            async with it.session.get(it.started.url + path) as answer:
                assert 200 == answer.status
        assert ["/v1/models?a=%20b&c"] == [asked[1] for asked in it.engine.asked]
        async with it.post() as answer:
            await answer.read()
        await it.records(1)


async def test_an_encoded_path_does_not_slip_past_the_record(tmp_path: Path):
    """The engine decodes paths, so the gateway judges them decoded."""
    async with gateway(tmp_path) as it:
        for path in ("/v1/chat%2Fcompletions", "/v1/%63hat/completions"):
            host, port = it.started.url[7:].split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['demo'][0]}\r\nConnection: close\r\n"
            )
            writer.write(head.encode() + b"Content-Length: 2\r\n\r\n{}")
            assert b"200" == (await reader.read()).split()[1]
            writer.close()
        assert [CHAT, CHAT] == [record.route for record in await it.records(2)]


@pytest.mark.parametrize(
    "target",
    ["/sleep", "/v1/../sleep", "/v1/%2e%2e/sleep", "/V1/models", "http://127.0.0.1:1/sleep", "@127.0.0.1:1/v1/x"],
)
async def test_nothing_else_of_the_engine_can_be_reached(tmp_path: Path, target: str):
    async with gateway(tmp_path) as it:
        host, port = it.started.url[7:].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['demo'][0]}\r\nConnection: close\r\n\r\n".encode()  # noqa: E501
        )
        status = (await reader.read()).split()[1]
        writer.close()
        assert status in (b"404", b"400")
        assert [] == it.engine.asked


async def test_connections_to_the_engine_are_used_again(tmp_path: Path):
    """Three at most: the looks at its health and its figures may hold two."""
    async with gateway(tmp_path) as it:
        for answer in (says(REPLY), events(ROLE, TOKEN, LAST, USAGE, DONE), says(REPLY, 400)) * 3:
            it.engine.answer = answer
            async with it.post(STREAM) as got:
                await got.read()
        assert len(it.engine.peers) <= 3


async def test_two_teams_keep_their_own_records(tmp_path: Path):
    """Offered = the sum of all outcomes, one record each, and nothing stays in flight."""
    async with gateway(
        tmp_path, events(ROLE, TOKEN, LAST, USAGE, DONE, pause_s=0.005), limits=GatewayLimits(body_bytes=1000)
    ) as it:

        async def one(number: int) -> None:
            team = ("demo", "batch")[number % 2]
            headers = {"X-Request-Id": f"{team}-{number}"} | ({"Authorization": "Bearer x"} if number % 5 == 0 else {})
            body: Any = b"x" * 2000 if number % 7 == 0 else STREAM
            if number % 11 == 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(it.post(body, team=team, **headers), 0.003)
                return
            async with it.post(body, team=team, **headers) as answer:
                await answer.read()

        await asyncio.gather(*(one(number) for number in range(1, 61)))

        async def nothing_in_flight() -> dict[tuple[str, ...], float]:
            shown = await it.figures()
            return {} if any(value for name, value in shown.items() if name[0] == INFLIGHT.name) else shown

        figures = await until(nothing_in_flight, "nothing is in flight")
        offered = int(sum(value for name, value in figures.items() if name[0] == REQUESTS.name))
        records = await it.records(offered)
        assert 55 <= offered <= 60  # a client may leave before its request was even sent
        assert len({record.request_id for record in records}) == offered
        for record in records:
            assert record.team in (None, record.request_id.split("-")[0])
        by_outcome = {
            outcome: sum(record.outcome == outcome for record in records) for outcome in {r.outcome for r in records}
        }
        assert offered == sum(by_outcome.values())
        assert sum(1 for n in range(1, 61) if n % 11 and (n % 5 == 0 or n % 7 == 0)) <= by_outcome["rejected"]


async def test_large_replies_pass_and_their_usage_is_found_at_the_end(tmp_path: Path):
    vector = b"[" + b"0.25," * 2_000_000 + b"0.25]"
    body = (
        b'{"data":[{"embedding":'
        + vector
        + b'}],"model":"tiny","usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":0}}'
    )

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async with gateway(tmp_path, answer) as it:
        async with it.post({"model": "tiny", "input": "x"}, "/v1/embeddings") as got:
            assert body == await got.read()
        assert (9, "ok", "/v1/embeddings") == (
            (record := await it.record()).prompt_tokens,
            record.outcome,
            record.route,
        )


@pytest.mark.parametrize("stream", [True, False])
async def test_a_pause_of_the_client_is_on_record(tmp_path: Path, stream: bool):
    """A client that pauses and reads on: the wait is its own, and the phases sum to about the time that it measured."""

    async def flood(request: web.BaseRequest) -> web.StreamResponse:
        if not stream:
            return web.json_response(REPLY | {"padding": "x" * 20_000_000})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in (*[delta(content="x" * 100_000)] * 200, LAST, USAGE, DONE):
            await response.write(part)
        return response

    async with gateway(tmp_path, flood) as it:
        began = time.monotonic()
        async with it.post(STREAM if stream else ASK) as answer:
            await until(lambda: answer.content._protocol._reading_paused, "the client has as much as it holds")
            await asyncio.sleep(PAUSE_S)
            assert 20_000_000 < len(await answer.read())
            took_ms = (time.monotonic() - began) * 1000
        record = await it.record()
        assert "ok" == record.outcome
        assert 0.5 * PAUSE_S * 1000 < (record.client_wait_ms or 0) < took_ms
        shares = {(each.phase, each.cause): each.share for each in blame(record)}
        assert shares["delivery", "the client read slowly"] > 0.4 * PAUSE_S * 1000 / took_ms
        # What the client took to connect and to read what the gateway had sent is not in the record.
        assert sum(phase.length_ms for phase in phases_of(record)) == pytest.approx(took_ms, abs=0.5 * PAUSE_S * 1000)


async def test_slow_reader_holds_the_engine_back(tmp_path: Path):
    """A slow reader holds the engine back instead of filling memory."""
    written = 0

    async def flood(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        block = delta(content="x" * 100_000)
        for _ in range(1000):
            await response.write(block)
            written += len(block)
        return response

    async with gateway(tmp_path, flood, timeouts=Timeouts(decode_s=1.0)) as it:
        answer = await it.post(STREAM)
        record = await it.record()
        assert ("client_abort", "client_stalled") == (record.outcome, record.reason)
        assert 900 <= (record.client_wait_ms or 0) <= (record.e2e_ms or 0)
        assert written < 40_000_000  # of 100 MB: the rest is socket buffers
        answer.close()


async def test_draining_ends_streams_and_refuses_new_ones(tmp_path: Path):
    """Draining ends running streams in peace and refuses new ones."""
    go_on = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + TOKEN)
        await go_on.wait()
        await response.write(LAST + DONE)
        return response

    async with gateway(tmp_path, answer) as it:
        running = await it.post(STREAM)
        await running.content.readany()
        it.stop.set()

        async def closed() -> bool:
            try:
                async with it.post() as answer:
                    if answer.status != 503:
                        pytest.fail(f"a request was answered {answer.status}")
            except aiohttp.ClientConnectorError:
                return True
            return False

        await until(closed, "the gateway accepts no connections")
        go_on.set()
        assert (await running.read()).endswith(DONE)
        await until(lambda: b'"outcome":"ok"' in it.path.read_bytes(), "the record of the stream")


async def test_what_outlasts_the_drain_is_cut_and_on_record(tmp_path: Path):
    async with gateway(tmp_path, events(*[TOKEN] * 1000, pause_s=0.02), timeouts=Timeouts(drain_s=0.2)) as it:
        running = await it.post(STREAM)
        await running.content.readany()
        it.stop.set()
        record = await it.record()
        assert ("upstream_error", "gateway_stopped") == (record.outcome, record.reason)
        running.close()


async def test_own_metrics_are_the_catalogues(tmp_path: Path, free_port: Callable[[], int]):
    """With a store, though nobody listens there; without one there are no series of leases."""
    store = LeaseStore(url=f"redis://127.0.0.1:{free_port()}")
    async with gateway(tmp_path, sharing=Sharing(replicas=1, store=store)) as it:
        async with it.post() as answer:
            await answer.read()
        async with it.post(Authorization="Bearer wrong") as answer:
            await answer.read()
        await it.records(2)
        names = {name[0] for name in await it.figures()}
        native = {metric.name for metric in GATEWAY if metric.native}  # in protobuf only
        assert native == {sample for metric in GATEWAY for sample in metric.samples} - names
        assert set() == {name for name in names if name.startswith("vllm_watch_") and not name.endswith("_created")} - {
            sample for metric in GATEWAY for sample in metric.samples
        }


async def test_a_taken_port_is_told_in_one_sentence(tmp_path: Path):
    async with gateway(tmp_path) as it:
        taken = it.started.url[7:]
        with pytest.raises(BadConfig, match=rf"^listen: {taken} is taken"):
            async with gateway(tmp_path / "..", listen=taken, requests_log=str(tmp_path / "other.jsonl")):
                pass


def test_classified_reasons_are_in_the_vocabulary():
    """Every reason that a judgement names is in the vocabulary."""
    for status in range(200, 600):
        for error in (None, 400, 429, 500, 503):
            for finish in ((), ("abort",), ("error", "stop"), ("stop",)):
                reason = classify(status, error, finish)
                assert reason is None or reason in REASONS
    assert (None, "engine_abort", "engine_error") == (
        classify(200, None, ["stop"]),
        classify(200, None, ["abort"]),
        classify(200, None, ["error"]),
    )


async def raw(it: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(it.started.url.rpartition(":")[2]))


def framed(body: Any = ASK, *headers: str) -> bytes:
    """A request to the chat route as its bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [
        f"POST {CHAT} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {KEYS['demo'][0]}",
        f"Content-Length: {len(data)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(head).encode() + data


@pytest.mark.parametrize("behind", [framed() * 40, framed(b"a" * 2_000_000)[:1_000_000]], ids=["requests", "tail"])
async def test_a_disconnect_behind_pipelined_requests_frees_the_slot(tmp_path: Path, behind: bytes):
    """With as many behind it the server stops reading; the slot stayed taken until timeouts.total_s."""
    async with gateway(tmp_path, never) as it:
        _, writer = await raw(it)
        writer.write(framed() + behind)
        await until(lambda: bool(it.engine.asked), "the engine is asked")
        writer.transport.abort()
        await until(lambda: it.engine.hangups == 1, "the engine sees the disconnect")
        assert "client_hangup" == (await it.record()).reason
        assert 0 == (await it.figures())[("vllm_watch_gateway_running_requests", "default", "demo")]


async def test_an_engine_page_needs_no_body_read(tmp_path: Path):
    async with gateway(tmp_path, never) as it:
        reader, writer = await raw(it)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"a" * 500_000)
        assert b"HTTP/1.1 200" == (await asyncio.wait_for(reader.readline(), 30))[:12]
        writer.close()
        assert [] == it.engine.asked


@pytest.mark.parametrize("cut", [10, 200])
async def test_bytes_behind_an_upgrade_reach_no_engine(tmp_path: Path, cut: int):
    """The client's second request is cut where aiohttp would have gone on to read: its tail alone is a request that
    nobody sent."""
    async with gateway(tmp_path) as it:
        reader, writer = await raw(it)
        writer.write(
            framed(
                ASK, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"
            )
            + b"X" * cut
        )
        await until(lambda: bool(it.engine.asked), "the engine is asked")
        writer.write(framed(ASK | {"max_tokens": 99}))
        answer = await everything(reader)
        assert (1, 1) == (answer.count(b"HTTP/1.1 "), answer.count(b"HTTP/1.1 200"))
        assert 1 == len(it.engine.asked)
        writer.close()
