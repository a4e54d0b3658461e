"""Answers of engines are read, unreadable for a reason, or absent: what the record, the counter and the client get."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.requests.record import UNREADABLE, RequestRecord
from stack.gateway.answers import DECODED_BYTES, OTHER_ANSWER, DecodedCopy, unreadable_head
from stack.gateway.config import Timeouts
from stack.gateway.form_body import form_models
from stack.gateway.outline import MOST_BYTES, STRING_BYTES, Outline
from stack.gateway.reply import CONTENT, NOTHING, PROGRESS, Reply, decode
from stack.gateway.routes import RECORDED, find
from stack.gateway.sse import EVENT_BYTES, Scanner
from stack.gateway.upstream_client import HEAD_BYTES
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
    gateway,
    listening,
    says,
)  # fmt: skip

SSE = "text/event-stream"
EMPTY = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
USED = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def raw(body: bytes, kind: str | None = "application/json", status: int = 200, **headers: str) -> Answer:
    """Return an engine that answers with these bytes. kind: the content type, None for none."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = web.StreamResponse(status=status, headers=named | ({"Content-Type": kind} if kind else {}))
        if not kind:
            response.headers.popall("Content-Type", None)
        await response.prepare(request)
        for at in range(0, len(body), 60_000):
            await response.write(body[at : at + 60_000])
        return response

    return answer


def usage_event(usage: Any, **more: Any) -> bytes:
    return event(model="tiny", choices=[], usage=usage, **more)


def typed(kind: str, **fields: Any) -> bytes:
    """Return an event of the responses or the messages API."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.dumps({"type": kind} | fields).encode())


def response_end(size: int, kind: str = "completed", **more: Any) -> bytes:
    """Return the last event of a responses stream, with a tool description of so many letters."""
    usage = {"input_tokens": 6, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 3}
    reply = {"id": "r", "tools": [{"description": "d" * size}], "status": kind, "output": [], "usage": usage} | more
    return typed(f"response.{kind}", response=reply)


RESPONSE = typed("response.created", response={"id": "r"}) + typed("response.output_text.delta", delta="a") * 3
MESSAGE = typed("message_start", message={"model": "tiny", "usage": {"input_tokens": 10, "output_tokens": 1}})
BLOCK = typed("content_block_delta", delta={"type": "text_delta", "text": "hello"})
ENDED = typed("message_stop")


def message_delta(**usage: int) -> bytes:
    return typed("message_delta", delta={"stop_reason": "end_turn"}, usage=usage)


def chat(usage: Any = USED, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "choices": REPLY["choices"], "usage": usage} | more


def large(**members: Any) -> bytes:
    """Return a chat reply of more than 8 MiB whose members stand in this order."""
    return json.dumps({"model": "tiny"} | members).encode()


LOGPROBS = [{"5": {"logprob": -1.5, "decoded_token": 'a"]}{[\\' * 10}}] * 90_000
SECRET_USAGE = {"usage": {"prompt_tokens": 99, "completion_tokens": 88}}


@dataclass(frozen=True)
class Case:
    """An answer and its record. unread: the reason; failed: whether the outcome is upstream_error. tokens: prompt,
    cached, completion. estimated: whether the output is an estimate."""

    answer: Answer
    unread: str | None = None
    failed: bool = False
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    route: str = CHAT
    stream: bool = False
    reason: str | None = None
    estimated: bool = False


def sse(*parts: bytes, **more: Any) -> Case:
    return Case(raw(b"".join(parts), SSE), stream=True, **more)


def failed(answer: Answer, unread: str, **more: Any) -> Case:
    return Case(answer, unread, failed=True, reason="engine_error", **more)


def _in_two(body: bytes) -> Answer:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Encoding": "deflate"})
        await response.prepare(request)
        for piece in (body[:1], body[1:]):
            await response.write(piece)
            await asyncio.sleep(0.05)
        return response

    return answer


V1 = "/v1/"
CASES: dict[str, Case] = {
    # kind 1: what is no answer of the route
    "307": failed(raw(b"", "text/plain", 307, Location="https://llm.example/"), "redirect"),
    "301 with a JSON body": failed(raw(json.dumps(chat()).encode(), status=301), "redirect"),
    "304": failed(raw(b"", None, 304), "redirect"),
    "a redirect of a stream": failed(raw(ROLE + LAST + DONE, SSE, 302), "redirect", stream=True),
    "a sign-in page": failed(raw(b"<html>", "text/html"), "content_type"),
    "a page for a stream": failed(raw(b"<html>", "text/html; charset=utf-8"), "content_type", stream=True),
    "text for chat": failed(raw(json.dumps(chat()).encode(), "text/plain"), "content_type"),
    "a stream for embeddings": failed(raw(ROLE + DONE, SSE), "content_type", route=V1 + "embeddings"),
    "bytes for chat": failed(raw(b"\0\1", "application/octet-stream"), "content_type"),
    "a page of 1 MiB": failed(raw(b"<p>" * 400_000, "text/html"), "content_type"),
    "half of a JSON body": failed(raw(b'{"choices":[{'), "json"),
    "a page called JSON": failed(raw(b"<html>Sign in</html>"), "json"),
    "a large page called JSON": failed(raw(b"<p>{</p>" * 100_000), "json"),
    "an array": failed(raw(b"[1]"), "json"),
    "no body": failed(raw(b""), "empty"),
    "204": failed(raw(b"", None, 204), "empty"),
    "another API's JSON": failed(says({"message_id": 1, "done": True}), "shape"),
    "no choice": failed(says({"choices": [], "usage": USED}), "shape", tokens=(7, None, 3)),
    "choices null": failed(says({"choices": None}), "shape"),
    "embeddings for rerank's": failed(says({"choices": [1]}), "shape", route=V1 + "rerank"),
    "an event that is no JSON": failed(raw(ROLE + b"data: {oops\n\n" + LAST + DONE, SSE), "json", stream=True,
                                       estimated=True),
    "a stream of nothing but its end": failed(raw(DONE, SSE), "empty", stream=True),
    "a stream of another API": failed(raw(event(token="a") + DONE, SSE), "shape", stream=True),
    "another JSON type": Case(raw(json.dumps(chat()).encode(), "application/vnd.api+json"), tokens=(7, None, 3)),
    "201": Case(raw(json.dumps(chat()).encode(), status=201), tokens=(7, None, 3)),
    "a stream of a transcript": sse(
        event(object="transcription.chunk", choices=[{"delta": {"content": "a"}, "finish_reason": "stop"}]),
        usage_event(USED), DONE, route=V1 + "audio/transcriptions", tokens=(7, None, 3)),
    "a byte order mark": Case(raw(b"\xef\xbb\xbf" + json.dumps(chat()).encode()), tokens=(7, None, 3)),
    "half a surrogate pair": Case(
        raw(json.dumps(chat(id="x")).encode().replace(b'"x"', b'"\\ud83d"')), tokens=(7, None, 3)),
    "a half in each event": sse(ROLE, delta(content="a").replace(b'"a"', b'"\\ud83d"'),
                                delta(content="a").replace(b'"a"', b'"\\ude00"'), LAST, usage_event(USED), DONE,
                                tokens=(7, None, 3)),
    "minus infinity": Case(says(chat(logprob=float("-inf"))), tokens=(7, None, 3)),
    "deep metadata": Case(raw(json.dumps(chat(a=0)).encode().replace(b'"a": 0', b'"a": ' + b"[" * 3000 + b"]" * 3000)),
                          tokens=(7, None, 3)),
    "deep content": Case(raw(json.dumps(chat(None, a=0)).encode().replace(
        b'"content": "abc"', b'"content": "abc", "x": ' + b"[" * 700 + b"]" * 700)), estimated=True),
    "bytes that are no UTF-8": failed(raw(b'{"choices": [{"message": {"content": "\xff"}}]}'), "json"),
    "bytes in an output": Case(raw(b'{"output": [{"content": [{"text": "a\xff"}]}], "status": "completed"}'),
                               route=V1 + "responses"),
    "an error that is empty": Case(says(chat(error={})), tokens=(7, None, 3)),
    "rerank in a list": Case(says([{"score": 0.9, "index": 0}]), route=V1 + "rerank"),
    "scores": Case(says({"scores": [[0.1]], "usage": {"prompt_tokens": 5}}), route=V1 + "score",
                   tokens=(5, None, None)),
    "a transcript": Case(raw(b"hello there", "text/plain"), route=V1 + "audio/transcriptions", estimated=True),
    "an event of no known field": failed(raw(ROLE + TOKEN + event(Message="no") + LAST + DONE, SSE), "shape",
                                         stream=True, estimated=True),
    "an empty object": sse(ROLE, b"data: {}\n\n", LAST, usage_event(USED), DONE, tokens=(7, None, 3)),
    "an odd type": sse(ROLE, event(type=[], choices=[{"delta": {}}]), LAST, usage_event(USED), DONE,
                       tokens=(7, None, 3)),
    "broken JSON in a named event": failed(
        raw(RESPONSE + b'event: response.output_text.delta\ndata: {"type":"resp\n\n' + response_end(1), SSE), "json",
        stream=True, route=V1 + "responses", tokens=(6, 2, 3)),
    # errors in any spelling
    "problem details": sse(ROLE, event(type="about:blank", title="x", status=503), DONE, reason="engine_busy"),
    "error field": sse(TOKEN, b'error: {"code":500}\n\n', DONE, failed=True, reason="engine_error", estimated=True),
    "old error": Case(says({"object": "error", "message": "no", "code": 400}), failed=True, reason="bad_request"),
    "detail": Case(says({"detail": "Not authenticated"}), failed=True, reason="engine_error"),
    "errors": Case(says({"errors": [{"message": "no"}]}), failed=True, reason="engine_error"),
    "message and code": Case(says({"code": 429, "message": "busy"}), failed=True, reason="engine_busy"),
    "old error event": sse(event(object="error", message="too long", code=400), DONE, reason="bad_request"),
    "detail event": sse(event(detail="boom"), DONE, failed=True, reason="engine_error"),
    "named error event": sse(b'event: error\ndata: {"reason": "boom"}\n\n', DONE, failed=True, reason="engine_error"),
    "error event in text": sse(TOKEN, b"event: error\ndata: boom\n\n", failed=True, reason="engine_error",
                               estimated=True),
    "overloaded": sse(MESSAGE, typed("error", error={"type": "overloaded_error"}), route=V1 + "messages",
                      reason="engine_busy", tokens=(10, None, None)),
    "status in an error": sse(event(error={"status": 503}), DONE, reason="engine_busy"),
    # kind 2: a bound says nothing of the answer
    "an end of 1.1 MB": sse(RESPONSE, response_end(1_100_000), route=V1 + "responses", tokens=(6, 2, 3)),
    "an incomplete end of 3 MB": sse(
        RESPONSE, response_end(3_000_000, "incomplete", incomplete_details={"reason": "max_output_tokens"}),
        route=V1 + "responses", tokens=(6, 2, 3)),
    "a failed end of 1.1 MB": sse(RESPONSE, response_end(1_100_000, "failed"), route=V1 + "responses",
                                  tokens=(6, 2, 3), failed=True, reason="engine_error"),
    "an end whose usage is beyond": sse(
        RESPONSE, response_end(0, **{f"m{at}": "x" * 900 for at in range(1400)}), unread="size", estimated=True,
        route=V1 + "responses"),
    "a chat event of 2 MB": sse(ROLE, delta(content="a" * 2_000_000), LAST, usage_event(USED), DONE,
                                tokens=(7, None, 3)),
    "usage before 9 MB": Case(raw(large(choices=REPLY["choices"], usage=USED, prompt_logprobs=LOGPROBS)),
                              tokens=(7, None, 3)),
    "usage behind 9 MB": Case(raw(large(prompt_logprobs=LOGPROBS, choices=REPLY["choices"], usage=USED)),
                              tokens=(7, None, 3)),
    "usage inside and outside of 9 MB": Case(
        raw(large(metadata=SECRET_USAGE, prompt_logprobs=LOGPROBS, usage=USED, choices=REPLY["choices"],
                  more=SECRET_USAGE)), tokens=(7, None, 3)),
    "one string of 9 MB": Case(
        raw(large(choices=[{"message": {"content": 'x"usage":{"prompt_tokens":9}' * 330_000}}], usage=USED)),
        tokens=(7, None, 3)),
    "1,000 vectors": Case(
        raw(large(usage={"prompt_tokens": 512, "total_tokens": 512}, data=[{"embedding": [0.0123] * 1000}] * 1000)),
        route=V1 + "embeddings", tokens=(512, None, None)),
    "8 choices of 1 MB": Case(
        raw(large(choices=[REPLY["choices"][0] | {"logprobs": {"content": LOGPROBS[:9000]}}] * 8, usage=USED)),
        tokens=(7, None, 3)),
    "9 MB without usage": Case(raw(large(choices=REPLY["choices"], logprobs=LOGPROBS)), unread="size"),
    "vectors as bytes": Case(
        raw(b"\0" * 64, "application/octet-stream", metadata='{"usage": {"prompt_tokens": 10}, "model": "tiny"}'),
        route=V1 + "embeddings", tokens=(10, None, None)),
    "1 MB of vectors with a large header": Case(
        raw(b"\0" * 1_000_000, "application/octet-stream",
            metadata=json.dumps({"data": [{"shape": [1024], "start": 0}] * 3000, "usage": {"total_tokens": 9}})),
        route=V1 + "embeddings", tokens=(9, None, None)),
    "vectors as bare bytes": Case(raw(b"\0" * 64, "application/octet-stream"), route=V1 + "embeddings"),
    # kind 3: an encoding that nobody asked for
    "gzip": Case(raw(gzip.compress(json.dumps(chat()).encode()), Content_Encoding="gzip"), tokens=(7, None, 3)),
    "deflate": Case(raw(zlib.compress(json.dumps(chat()).encode()), Content_Encoding="Deflate"), tokens=(7, None, 3)),
    "bare deflate": Case(raw(zlib.compress(json.dumps(chat()).encode(), wbits=-15), Content_Encoding="deflate"),
                         tokens=(7, None, 3)),
    "gzip in two members": Case(
        raw(b"".join(map(gzip.compress, (b'{"choices":[{"message":{}}],', b'"usage":{"prompt_tokens":7}}'))),
            Content_Encoding="x-gzip"), tokens=(7, None, None)),
    "two headers": failed(raw(gzip.compress(gzip.compress(b"{}")), Content_Encoding="gzip, gzip"), "encoding"),
    "one byte, and the rest": Case(_in_two(zlib.compress(json.dumps(chat()).encode())), tokens=(7, None, 3)),
    "identity": Case(raw(json.dumps(chat()).encode(), Content_Encoding="identity"), tokens=(7, None, 3)),
    "gzip of 9 MB": Case(raw(gzip.compress(large(prompt_logprobs=LOGPROBS, choices=REPLY["choices"], usage=USED), 1),
                             Content_Encoding="gzip"), tokens=(7, None, 3)),
    "gzip of 20 MB": Case(raw(gzip.compress(large(choices=REPLY["choices"], a="x" * 20_000_000, usage=USED), 1),
                              Content_Encoding="gzip"), "size"),
    "a gzip stream": Case(raw(gzip.compress(ROLE + TOKEN + LAST + USAGE + DONE), SSE, Content_Encoding="gzip"),
                          stream=True, tokens=(12, 0, 3)),
    "brotli": failed(raw(b"\x0b\x02\x80", Content_Encoding="br"), "encoding"),
    "a zstd stream": failed(raw(b"(\xb5/\xfd", SSE, Content_Encoding="zstd"), "encoding", stream=True),
    "damaged gzip": failed(raw(b"\x1f\x8bnot gzip at all", Content_Encoding="gzip"), "encoding"),
    "half of gzip": failed(raw(gzip.compress(json.dumps(chat()).encode())[:-20], Content_Encoding="gzip"), "encoding"),
    "a page in gzip": failed(raw(gzip.compress(b"<p>"), "text/html", Content_Encoding="gzip"), "content_type"),
    # kind 4: usage that cannot be
    "zero usage": Case(says(chat(EMPTY)), "usage", estimated=True),
    "zero usage of a stream": sse(ROLE, TOKEN, LAST, usage_event(EMPTY), DONE, unread="usage", estimated=True),
    "no output beside content": Case(says(chat(USED | {"completion_tokens": 0})), "usage", tokens=(7, None, None),
                                     estimated=True),
    "words for counts": Case(says(chat({"prompt_tokens": "7", "completion_tokens": "3"})), "usage", estimated=True),
    "whole floats": Case(says(chat({"prompt_tokens": 7.0, "completion_tokens": 3.0})), tokens=(7, None, 3)),
    "broken floats": Case(says(chat({"prompt_tokens": 7.5, "completion_tokens": 3})), "usage", tokens=(None, None, 3)),
    "negative counts": Case(says(chat({"prompt_tokens": -7, "completion_tokens": 3})), "usage", tokens=(None, None, 3)),
    "usage in a list": Case(says(chat([7, 3])), "usage", estimated=True),
    "no usage": Case(says(chat(None)), estimated=True),
    "cached beyond the prompt": Case(
        says(chat(USED | {"prompt_tokens_details": {"cached_tokens": 8}})), "usage", tokens=(7, None, 3)),
    "cached beyond in a stream": sse(
        ROLE, LAST, usage_event({"prompt_tokens": 7, "completion_tokens": 1, "cache_read_input_tokens": 70}), DONE,
        unread="usage", tokens=(7, None, 1)),
    "zero vectors": Case(says({"data": [{}], "usage": EMPTY}), "usage", route=V1 + "embeddings"),
    "zero input of a message": sse(
        typed("message_start", message={"usage": {"input_tokens": 0}}), BLOCK, message_delta(output_tokens=4), ENDED,
        route=V1 + "messages", unread="usage", tokens=(None, None, 4)),
    "vectors without output": Case(
        says({"data": [{}], "usage": {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}}),
        route=V1 + "embeddings", tokens=(5, None, 0)),
    "rerank of 0.10": Case(says({"results": [{}], "usage": {"total_tokens": 56}}), route=V1 + "rerank",
                           tokens=(56, None, None)),
    "rerank of Jina": Case(
        says({"results": [{}], "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": 56}}}),
        route=V1 + "rerank", tokens=(56, None, None)),
    "all in message_delta": sse(
        typed("message_start", message={"usage": {"input_tokens": 0, "output_tokens": 0}}), BLOCK,
        message_delta(input_tokens=4522, cache_creation_input_tokens=4511, output_tokens=5), ENDED,
        route=V1 + "messages", tokens=(9033, None, 5)),
    "cache parts in message_start only": sse(
        typed("message_start", message={"usage": {"input_tokens": 10, "cache_read_input_tokens": 90}}), BLOCK,
        message_delta(input_tokens=0, output_tokens=5), ENDED, route=V1 + "messages", tokens=(100, 90, 5)),
    "tokens of OpenAI's transcripts": Case(
        says({"text": "a", "usage": {"type": "tokens", "input_tokens": 14, "output_tokens": 45}}),
        route=V1 + "audio/transcriptions", tokens=(14, None, 45)),
    "usage on every event": sse(
        *(event(model="tiny", choices=[{"delta": {"content": "x"}}],
                usage={"prompt_tokens": 7, "completion_tokens": at}) for at in range(3)), LAST, DONE,
        tokens=(7, None, 2)),
}  # fmt: skip


def reading(record: RequestRecord) -> tuple[Any, ...]:
    tokens = record.prompt_tokens, record.cached_tokens, record.completion_tokens
    return record.unreadable, record.reason, tokens, bool(record.est_completion_tokens)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(auto_decompress=False, max_field_size=HEAD_BYTES)


@pytest.mark.parametrize("name", CASES)
async def test_an_answer_is_read_or_said_to_be_unreadable(tmp_path: Path, name: str):
    """Bytes and status pass as they came; record and counter agree, and every series is there from the first answer."""
    case = CASES[name]
    ask = STREAM if case.stream else ASK
    async with gateway(tmp_path, case.answer) as it, _session() as session:
        replies = []
        for base in (it.engine.url, it.started.url):
            headers = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
            async with session.post(base + case.route, json=ask, headers=headers, allow_redirects=False) as got:
                replies.append((got.status, await got.read()))
        direct, through = replies
        record = await it.record()
        assert (case.unread, case.reason, case.tokens, case.estimated) == reading(record)
        assert case.failed <= (record.outcome != "ok")
        assert direct == through if b'"choices":[],' not in direct[1] else direct[0] == through[0]
        counted = {key[1]: value for key, value in (await it.figures()).items() if "unreadable" in key[0] and key[1:]}
        assert {reason: float(reason == case.unread) for reason in UNREADABLE} == counted


# ---- another engine, the client, the probe


@asynccontextmanager
async def with_fallback(tmp_path: Path, first: Answer) -> AsyncIterator[tuple[Running, FakeEngine]]:
    """Yield a gateway before an engine that answers so, and the fallback, which answers well."""
    engine, other = FakeEngine(answer=first), FakeEngine()
    runners = [await listening(each) for each in (engine, other)]
    policy = {
        "teams": {team: {"keys": [hashed]} for team, (_, hashed) in KEYS.items()},
        "models": {"tiny": {"upstreams": ["first"], "fallbacks": ["other"]}},
        "upstreams": {"first": {"url": engine.url}, "other": {"url": other.url}},
    }
    try:
        async with gateway(tmp_path, policy=policy) as it:
            yield it, other
    finally:
        for runner in runners:
            await runner.cleanup()


MOVED = {
    "redirect": raw(b"", None, 302), "content_type": raw(b"<html>" * 200_000, "text/html"),
    "json": raw(b"{"), "empty": raw(b""), "shape": says({"ok": True}),
    "events": raw(b"data: {oops\n\n" + DONE, SSE), "nothing": raw(DONE, SSE), "other": raw(event(a=1) + DONE, SSE),
    "error": raw(event(detail="boom"), SSE), "gzip": raw(gzip.compress(b'{"a": 1}'), Content_Encoding="gzip"),
}  # fmt: skip
KEPT = {
    "gzip": (raw(gzip.compress(ROLE + LAST + USAGE + DONE), SSE, Content_Encoding="gzip"), None, None),
    "brotli": (raw(b"\x0b\x02\x80", Content_Encoding="br"), "engine_error", "encoding"),
    "zstd": (raw(b"(\xb5/\xfd" * 9, SSE, Content_Encoding="zstd"), "engine_error", "encoding"),
    "damaged": (raw(gzip.compress(ROLE)[:20] + b"\xff" * 90, SSE, Content_Encoding="gzip"), "engine_error", "encoding"),
    "large": (raw(RESPONSE + response_end(2_000_000), SSE), None, None),
    "head": (raw(b"{}", x_long="x" * (HEAD_BYTES + 9)), "engine_error", "size"),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
async def test_an_unreadable_answer_moves_to_the_fallback(tmp_path: Path, name: str):
    async with with_fallback(tmp_path, MOVED[name]) as (it, other):
        async with it.post(STREAM) as got:
            assert REPLY == await got.json()
        record = await it.record()
        assert ("ok", "first:engine_error", None) == (record.outcome, record.tried, record.unreadable)
        figures = await it.figures()
        assert (name != "error") == sum(value for key, value in figures.items() if "gateway_unreadable" in key[0])
        assert 1 == len(other.asked)


@pytest.mark.parametrize("name", KEPT)
async def test_what_may_be_a_complete_answer_is_asked_for_once(tmp_path: Path, name: str):
    answer, reason, unread = KEPT[name]
    route, key = "/v1/responses" if name == "large" else CHAT, {"Authorization": f"Bearer {KEYS['demo'][0]}"}
    async with with_fallback(tmp_path, answer) as (it, other), _session() as session:
        async with session.post(it.started.url + route, json=STREAM | {"input": "a"}, headers=key) as got:
            assert (502 if name == "head" else 200) == got.status
            await got.read()
        record = await it.record()
        assert ([], 1, reason, unread) == (other.asked, record.attempt, record.reason, record.unreadable)


@pytest.mark.parametrize("late", [False, True])
async def test_no_text_of_ours_gets_into_an_encoded_stream(tmp_path: Path, late: bool):
    """A break and a time-out end such a stream by its connection."""
    compress = zlib.compressobj(wbits=31)
    begin = compress.compress(ROLE + TOKEN) + compress.flush(zlib.Z_SYNC_FLUSH)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": SSE, "Content-Encoding": "gzip"})
        await response.prepare(request)
        await response.write(begin)
        if late:
            await asyncio.Event().wait()
        request.transport.abort()  # type: ignore[union-attr]
        return response

    timeouts = Timeouts(decode_s=0.2) if late else Timeouts()
    async with gateway(tmp_path, answer, timeouts=timeouts) as it, _session() as session:
        got, key = bytearray(), {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with session.post(it.started.url + CHAT, json=STREAM, headers=key) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await _read_into(got, response)
        assert begin == got
        record = await it.record()
        assert ("decode_timeout" if late else "upstream_reset", 1) == (record.reason, record.content_events)


async def _read_into(got: bytearray, response: aiohttp.ClientResponse) -> None:
    async for piece in response.content.iter_any():
        got += piece


STEPS = (
    'vllm:num_requests_running{model_name="m"} 1\nvllm:num_requests_waiting{model_name="m"} 0\n'
    'vllm:generation_tokens_total{model_name="m"} '
)


@pytest.mark.parametrize(("moves", "total_s", "reason"), [(True, 60.0, None), (False, 60.0, "decode_timeout"),
                                                          (True, 4.0, "decode_timeout")])  # fmt: skip
async def test_a_silent_stream_lives_while_its_engine_steps(
    tmp_path: Path, moves: bool, total_s: float, reason: str | None
):
    """A parser holds a tool call back: the engine's own counters speak for it, for as long as a reply may take.

    The gateway reads them each second, so a stall of 1.5 s does no harm."""
    steps = 0

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal steps
        if request.path == "/metrics":
            steps += moves
            return web.Response(text=f"{STEPS}{steps}\n")
        if request.method != "POST":
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": SSE})
        await response.prepare(request)
        await response.write(ROLE + TOKEN)
        await asyncio.sleep(6)
        await response.write(LAST + USAGE + DONE)
        return response

    engine = FakeEngine()
    engine.handle = handle  # type: ignore[method-assign]
    runner = await listening(engine)
    timeouts = Timeouts(decode_s=2.5, total_s=total_s)
    try:
        async with gateway(tmp_path, upstream=engine.url, timeouts=timeouts) as it:
            async with it.post(STREAM) as got:
                await got.read()
            assert reason == (await it.record()).reason
    finally:
        await runner.cleanup()


# ---- times


def scanned(*parts: bytes | float, route: str = CHAT) -> Scanner:
    """Return what was read of these events; a number is a pause in seconds."""
    scanner, now = Scanner(route), 100.0
    for part in parts:
        if isinstance(part, float):
            now += part
        else:
            scanner.feed(part, now)
    scanner.close(now)
    return scanner


NO_TEXT = event(model="tiny", choices=[{"index": 0, "text": "", "finish_reason": None}])
CALL = delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])


@pytest.mark.parametrize(
    ("tokens", "token_ms", "parts"),
    [
        (21, 20.0, [ROLE, *[TOKEN, 0.02] * 20, TOKEN, LAST]),  # an event a token
        (16, 10.0, [TOKEN, 0.08, TOKEN, NO_TEXT]),  # eight tokens an event, and none before the first
        (21, 20.0, [ROLE, TOKEN, *[0.08, TOKEN] * 5]),  # four tokens an event, of which the last were in one
        (1020, 3.3, [ROLE, 2.9827, *[TOKEN, 0.02] * 19, TOKEN, LAST]),  # reasoning left out
        (1020, None, [2.9827, *[TOKEN, 0.02] * 19, TOKEN]),  # and no event before it
        (301, 20.0, [ROLE, TOKEN, 6.0, CALL, LAST]),  # a buffered tool call
        (60, 100.0, [ROLE, *[TOKEN, 0.1] * 9, 5.0, LAST]),  # what comes behind the text is left out
        (31, 10.0, [NO_TEXT, *[0.01, NO_TEXT] * 30]),  # no text at all
        (40, None, [ROLE, 0.3, LAST.replace(b"!", b"")]),
        (1, None, [ROLE, TOKEN, 0.1, TOKEN]),
        (None, None, [ROLE, TOKEN, 0.1, TOKEN]),
    ],
)
def test_time_per_token_is_possible_or_unknown(tokens: int | None, token_ms: float | None, parts: list[bytes | float]):
    """Where an engine hides tokens, a time over the visible events would be a fraction of the engine's own."""
    got = scanned(*parts).token_s(tokens)
    assert token_ms == (None if got is None else pytest.approx(got * 1000, rel=0.03))


@pytest.mark.parametrize(
    ("first_ms", "parts"),
    [
        (50, [ROLE, 0.05, TOKEN]),
        (50, [ROLE, 0.05, NO_TEXT, 0.1, NO_TEXT, LAST.replace(b"!", b"")]),
        (150, [ROLE, 0.05, NO_TEXT, 0.1, TOKEN]),
        (50, [ROLE, 0.05, ROLE, 0.1, ROLE]),
        (None, [ROLE, 0.05, DONE]),
        (70, [typed("response.created"), 0.07, typed("response.output_item.added"), 0.1,
              typed("response.completed", response={})]),
    ],
)  # fmt: skip
def test_a_stream_without_text_has_a_first_token(first_ms: int | None, parts: list[bytes | float]):
    first = scanned(*parts).first_token
    assert first_ms == (None if first is None else round((first - 100) * 1000))


async def test_bytes_that_cannot_be_read_are_no_silence(tmp_path: Path):
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": SSE, "Content-Encoding": "br"})
        await response.prepare(request)
        for _ in range(10):
            await response.write(b"\x0b\x02\x80")
            await asyncio.sleep(0.2)
        return response

    async with gateway(tmp_path, answer, timeouts=Timeouts(decode_s=1.5, prefill_s=1.5)) as it, _session() as session:
        key = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with session.post(it.started.url + CHAT, json=STREAM, headers=key) as got:
            assert b"\x0b\x02\x80" * 10 == await got.read()
        assert ("engine_error", "encoding") == ((record := await it.record()).reason, record.unreadable)


async def test_progress_without_text_moves_every_time_limit(tmp_path: Path):
    """Token-ids-only clients: nothing of it is text, and nothing of it is silence."""
    slow = [NO_TEXT] * 10

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": SSE})
        await response.prepare(request)
        for part in slow:
            await response.write(part)
            await asyncio.sleep(0.2)
        await response.write(usage_event(USED) + DONE)
        return response

    async with gateway(tmp_path, answer, timeouts=Timeouts(decode_s=1.5, prefill_s=1.5)) as it:
        async with it.post(STREAM, "/v1/completions") as got:
            await got.read()
        record = await it.record()
        assert ("ok", True, True) == (record.outcome, record.ttft_ms is not None, (record.tpot_ms or 0) > 100)


# ---- the parts


def test_every_recorded_route_has_its_answer():
    """The one of vLLM 0.33 whose models are not at hand takes any shape."""
    assert ["/v1/decisions"] == [route for route in RECORDED if find(route).answer is OTHER_ANSWER]
    assert unreadable_head(OTHER_ANSWER, 200, "text/html") is not None
    assert unreadable_head(find(CHAT).answer, 200, "") is None is unreadable_head(find(CHAT).answer, 500, "text/html")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4) | st.sampled_from(['"', "\\", '\\"', "]}{["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(value=st.dictionaries(st.text(max_size=3), _JSON, max_size=4), data=st.data())
def test_an_outline_is_the_text_within_its_bounds(value: dict[str, Any], data: st.DataObject):
    """However it is cut: values deeper than the bound are null, all others stand."""

    def bounded(inner: Any, depth: int) -> Any:
        if not isinstance(inner, list | dict):
            return inner
        if depth > 5:
            return None
        items = inner.items() if isinstance(inner, dict) else enumerate(inner)
        kept = {key: bounded(each, depth + 1) for key, each in items}
        return kept if isinstance(inner, dict) else list(kept.values())

    text, outline = json.dumps(value).encode(), Outline()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        outline.feed(text[begin:end])
    assert bounded(value, 1) == json.loads(outline.text())


def test_a_long_string_of_an_outline_is_cut():
    text = json.dumps({"a": "x" * STRING_BYTES, "b": "x" * (STRING_BYTES + 1)}).encode()
    for size in (len(text), 1024, 7, 1):
        outline = Outline()
        for at in range(0, len(text), size):
            outline.feed(text[at : at + size])
        assert {"a": "x" * STRING_BYTES, "b": "..."} == json.loads(outline.text())


@pytest.mark.parametrize("unit", [b"[", b'{"a":', b'"\\', b"1,", b'"a":1,', b'["' + b"x" * 2000 + b'"],', b"]"])
def test_an_outline_never_holds_more_than_its_bound(unit: bytes):
    for begin in (b"[", b'{"a":[', b'{"x":{'):
        outline, piece = Outline(), unit * (100_000 // len(unit))
        outline.feed(begin)
        for _ in range(30):
            outline.feed(piece)
            assert len(outline._out) <= MOST_BYTES + 2 * len(piece)
            assert len(outline._open) <= 5
    assert b"" == outline.text() or outline.lost


def test_a_decoded_copy_ends_at_its_bound():
    """64 MiB of zeros in 64 KiB: the reader gets no more than the bound and one piece."""
    copy, size = DecodedCopy("gzip"), 0
    packed = gzip.compress(bytes(4 * DECODED_BYTES))
    for at in range(0, len(packed), 1000):
        size += sum(map(len, copy.pieces(packed[at : at + 1000])))
    assert ("size", True) == (copy.unread, size <= DECODED_BYTES + (256 << 10))


@pytest.mark.parametrize("behind", [b"x" * 9000, b"\x1fgarbage", b"\x1f\x8bgarbage", b"\0"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_stands_behind_an_encoded_text_is_left_alone(coding: str, behind: bytes):
    """However it is cut, and without holding it."""
    packed = (gzip.compress if coding == "gzip" else zlib.compress)(b"a" * 500) + behind
    for size in (1, 2, 7, len(packed)):
        copy = DecodedCopy(coding)
        text = b"".join(b"".join(copy.pieces(packed[at : at + size])) for at in range(0, len(packed), size))
        assert (b"a" * 500, True) == (text, copy.ended)
        assert copy.unread in (None, "")


def test_large_events_are_read_however_they_are_cut():
    stream = RESPONSE + response_end(EVENT_BYTES + 9)
    for size in (1 << 16, 70_001, len(stream)):
        scanner = Scanner("/v1/responses", strip_usage=True)
        out = b"".join(scanner.feed(stream[at : at + size], 1.0) for at in range(0, len(stream), size))
        assert (stream, True, 3) == (out + scanner.close(1.0), scanner.done, scanner.reply.completion_tokens)


def part(name: str, value: str = "whisper", **more: str) -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"' + "".join(f'; {key}="{it}"' for key, it in more.items())
    return f"--b\r\n{head}\r\n\r\n{value}\r\n".encode()


@pytest.mark.parametrize(
    ("models", "form"),
    [
        ({"whisper"}, part("model") + part("file", "x" * 9000, filename="a.wav")),
        ({"whisper"}, part("file", 'name="model"\r\n\r\nother', filename="a.wav") + part("model")),
        ({"whisper"}, part("prompt", "a") + part("MODEL", "no") + part("model").replace(b'"model"', b"model")),
        ({"a", "whisper"}, part("model", "a") + part("model")),
        ({"whisper"}, part("model").replace(b"name=", b"name = ")),
        ({"whisper"}, b"\r\n" + part("model").replace(b"Content-Disp", b"content-disp")),
        (set(), part("file", filename="model")),
        (set(), b"model=whisper"),
        (set(), b""),
    ],
)
def test_the_model_of_a_form_is_read(models: set[str], form: bytes):
    assert models == form_models(form + b"--b--\r\n")


async def test_an_upload_of_two_models_is_refused(tmp_path: Path):
    """The engine would take one of them, and the team may be allowed the other."""
    async with gateway(tmp_path) as it:
        form = part("model", "a") + part("model", "b") + b"--b--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        async with it.post(form, "/v1/audio/transcriptions", **kind) as got:
            assert (400, "uncountable") == (got.status, (await got.json())["error"]["code"])
        assert [] == it.engine.asked


@pytest.mark.parametrize(
    ("noted", "fields"),
    [
        (CONTENT, {"choices": [{"delta": {"reasoning": "a"}}]}),
        (CONTENT, {"choices": [{"message": {"tool_calls": [{}]}}]}),
        (PROGRESS, {"choices": [{"delta": {}}]}),
        (PROGRESS, {"choices": [{"delta": {"role": "assistant"}, "finish_reason": "stop"}]}),
        (NOTHING, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        (NOTHING, {"choices": [], "usage": USED}),
        (PROGRESS, {"type": "content_block_start"}),
        (NOTHING, {"type": "ping"}),
        (CONTENT, {"type": "transcript.text.delta", "delta": "a"}),
    ],
)
def test_an_event_shows_text_a_step_or_nothing(noted: int, fields: dict[str, Any]):
    body = decode(json.dumps(fields).encode())
    assert body is not None
    assert noted == Reply(CHAT).note(body)
