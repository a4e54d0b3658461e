"""The gateway's HTTP client against engines of bare bytes, hostile and broken ones among them, on asyncio's own loop
and on uvloop.

Every case ends with all connections closed, no task left and no complaint of the loop. The last part goes through the
whole gateway."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import re
import socket
import ssl
import struct
import subprocess
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.gateway import upstream_client as module
from stack.gateway.config import Timeouts
from stack.gateway.handler import RequestHandler
from stack.gateway.upstream_client import (
    COPY_BYTES,
    HEAD_BYTES,
    HELD_BYTES,
    BrokenConnection,
    Origin,
    Unreachable,
    UpstreamClient,
    UpstreamResponse,
    origin_of,
)
from tests.support.gateway_scene import ASK, CHAT, DONE, KEYS, LAST, ROLE, STREAM, TOKEN, Running, everything, gateway
from tests.support.wait import settled, turns, until

SOON_S = 30.0  # longer than anything here takes: only what hangs meets it
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Speak = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@contextlib.contextmanager
def running(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[Run]:
    """A loop that is held to leave nothing behind."""
    complaints: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        yield lambda case: runner.run(asyncio.wait_for(case, SOON_S))
        gc.collect(1)  # an exception that nobody retrieved is reported when its future is freed
        runner.run(turns())
        assert set() == asyncio.all_tasks(loop)
        assert [] == complaints


def on_each_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The same test on either loop; to stand next to the test, under all other marks."""

    @pytest.mark.parametrize("loop", LOOPS)
    def each(loop: str, **given: Any) -> None:
        with running(LOOPS[loop]) as run:
            run(test(**given))

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    each.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])
    each.__name__, each.__doc__ = test.__name__, test.__doc__
    return each


@dataclass
class Engine:
    """Speaks bytes as a test says them. asked: requests as they came. connections: how many were made. open: how many
    are open now."""

    speak: Speak
    url: str = ""
    asked: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    server: asyncio.Server | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                self.asked.append(head + (await reader.readexactly(int(length[1])) if length else b""))
                await self.speak(self.asked[-1], writer)
        self.open -= 1


def says(*parts: bytes, then: str = "waits") -> Speak:
    """Each part for a read of its own. then: whether the connection is left open, closed or reset."""

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        for part in filter(None, parts):
            if writer.is_closing():
                return
            writer.write(part)
            await turns()
        if then == "closes":
            writer.close()
        if then == "resets":
            reset(writer)

    return speak


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def first(*speaks: Speak) -> Speak:
    """One way of speaking for each request, the last one for all that follow."""
    left = list(speaks)

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, writer)

    return speak


@contextlib.asynccontextmanager
async def engine(speak: Speak, keep_s: float = 3.0, **how: Any) -> AsyncIterator[tuple[Engine, UpstreamClient]]:
    """An engine, and a client that is closed in the end; no connection may stay."""
    it = Engine(speak)
    it.server = await asyncio.start_server(it.handle, "127.0.0.1", 0, **how)
    it.url = f"http{'s' if how else ''}://127.0.0.1:{it.server.sockets[0].getsockname()[1]}"
    client = UpstreamClient(2.0, keep_s)
    try:
        yield it, client
        client.close()
        await until(lambda: it.open == 0, "the client has closed its connections")
    finally:
        client.close()
        it.server.close()


async def read(answer: UpstreamResponse) -> bytes:
    return await answer.read()


async def chunks(answer: UpstreamResponse) -> bytes:
    parts = []
    while part := await answer.chunk():
        parts.append(part)
    return b"".join(parts)


async def pumped(answer: UpstreamResponse) -> bytes:
    """Whoever takes it says at every second piece that it has had enough."""
    parts: list[bytes] = []

    def take(part: bytes) -> bool:
        parts.append(part)
        return len(parts) % 2 == 1

    while await answer.pump(take):
        await asyncio.sleep(0)
    return b"".join(parts)


WAYS = (read, chunks, pumped)


async def asked(
    it: Engine,
    client: UpstreamClient,
    method: str = "POST",
    way: Callable[[UpstreamResponse], Awaitable[bytes]] = read,
    body: bytes = b"{}",
    url: str = "",
) -> tuple[int, bytes]:
    """Status and body of one answer, its connection given back."""
    answer = await client.send(url or it.url, method, "/v1/x", [], body)
    try:
        return answer.status, await way(answer)
    finally:
        answer.close()


# What is sent


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("http://10.0.0.1:8001", Origin("10.0.0.1", 8001, False, "", "10.0.0.1:8001")),
        ("http://engine", Origin("engine", 80, False, "", "engine")),
        ("https://engine/", Origin("engine", 443, True, "", "engine")),
        ("https://engine:8443/base/", Origin("engine", 8443, True, "/base", "engine:8443")),
        ("http://[::1]:8001/a/b", Origin("::1", 8001, False, "/a/b", "[::1]:8001")),
        ("http://user:secret@Engine:80", Origin("engine", 80, False, "", "Engine:80")),
    ],
)
def test_a_url_says_where_to_go(url: str, want: Origin):
    assert want == origin_of(url)


async def test_endless_answer_is_read_to_the_bound():
    """Of an answer without an end no more is read than was asked for."""

    async def endless(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"10000\r\n" + b"a" * 65536 + b"\r\n")
                await writer.drain()

    async with engine(endless) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"")
        assert b"a" * 100_000 == await answer.read(100_000)
        answer.close()


@pytest.mark.parametrize(
    ("path", "method", "body", "want"),
    [
        ("", "POST", b"{}", b"POST /v1/x?a=%20 HTTP/1.1\r\nHost: HOST\r\nODD\r\nContent-Length: 2\r\n\r\n{}"),
        ("/", "POST", b"", b"POST /v1/x?a=%20 HTTP/1.1\r\nHost: HOST\r\nODD\r\nContent-Length: 0\r\n\r\n"),
        ("/base/", "GET", b"", b"GET /base/v1/x?a=%20 HTTP/1.1\r\nHost: HOST\r\nODD\r\n\r\n"),
        ("/base", "DELETE", b"", b"DELETE /base/v1/x?a=%20 HTTP/1.1\r\nHost: HOST\r\nODD\r\nContent-Length: 0\r\n\r\n"),
    ],
)
@on_each_loop
async def test_a_request_goes_out_as_it_was_given(path: str, method: str, body: bytes, want: bytes):
    """Headers in their order and spelling, bytes that are no UTF-8 as they came; nothing is added but Host and
    Content-Length."""
    async with engine(says(OK)) as (it, client):
        headers = [("x-a", "1"), ("X-A", "café"), ("X-B", b"\xff\xfe".decode("utf-8", "surrogateescape"))]
        answer = await client.send(it.url + path, method, "/v1/x?a=%20", headers, body)
        answer.close()
        odd = b"x-a: 1\r\nX-A: caf\xc3\xa9\r\nX-B: \xff\xfe"
        assert [want.replace(b"HOST", it.url[7:].encode()).replace(b"ODD", odd)] == it.asked


@pytest.mark.parametrize(
    ("method", "target", "header"),
    [
        ("POST", "/x", ("X-A", "1\r\nAuthorization: Bearer other")),
        ("POST", "/x", ("X-A", "1\n 2")),
        ("POST", "/x", ("X-A", "1\r2")),
        ("POST", "/x", ("X-A", "1\0")),
        ("POST", "/x", ("X-A\r\nX-B", "1")),
        ("POST", "/x HTTP/1.1\r\nX-B: 1\r\n\r\nGET /y", ("X-A", "1")),
        ("POST\n", "/x", ("X-A", "1")),
    ],
)
@on_each_loop
async def test_nothing_smuggles_a_line_into_a_request(method: str, target: str, header: tuple[str, str]):
    async with engine(says(OK)) as (it, client):
        with pytest.raises(ValueError, match="line break"):
            await client.send(it.url, method, target, [header], b"{}")
        assert 0 == it.connections


# Fails without `request = ...encode(...)` before a connection is taken: the one that was kept is lost and stays open.
@on_each_loop
async def test_a_header_that_cannot_be_written_costs_no_connection():
    async with engine(says(OK)) as (it, client):
        assert (200, b"ok") == await asked(it, client)
        with pytest.raises(ValueError, match="surrogates"):
            await client.send(it.url, "POST", "/x", [("X-A", "\ud800")], b"{}")
        assert (200, b"ok") == await asked(it, client)
        assert 1 == it.connections


# What comes back

# Whole answers: bytes, what the engine does then, status, body, whether the connection is used again.
ANSWERS: dict[str, tuple[bytes, str, int, bytes, bool]] = {
    "a length": (OK, "waits", 200, b"ok", True),
    "no body": (HEAD + b"Content-Length: 0\r\n\r\n", "waits", 200, b"", True),
    "chunks": (CHUNKED + b"2\r\nok\r\n1;x=y\r\n!\r\n0\r\n\r\n", "waits", 200, b"ok!", True),
    "trailers": (CHUNKED + b"2\r\nok\r\n0\r\nX-Trailer: 1\r\nX-Other:\r\n\r\n", "waits", 200, b"ok", True),
    "until it closes": (HEAD + b"\r\nok", "closes", 200, b"ok", False),
    "until it closes, and nothing came": (HEAD + b"\r\n", "closes", 200, b"", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "waits", 200, b"ok", False),
    "HTTP/1.0 that keeps": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", "waits", 200,
        b"ok", True),
    "a length, then it closes": (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", "closes", 200, b"ok",
        False),
    "a length, and it says it will close": (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", "waits", 200,
        b"ok", False),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "waits", 204, b"", True),
    "204 with a body": (b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nEVIL", "waits", 204, b"", False),
    "304 with the length of what is not sent": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\n", "waits", 304,
        b"", True),
    "after 100 and 103": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Early: 1\r\n\r\n" + OK, "waits",
        200, b"ok", True),
    "a second answer at once": (OK + b"HTTP/1.1 500 Evil\r\nX-Evil: 1\r\nContent-Length: 4\r\n\r\nEVIL", "waits", 200,
        b"ok", False),
    "a second answer, after chunks": (CHUNKED + b"2\r\nok\r\n0\r\n\r\n" + OK, "waits", 200, b"ok", False),
    "the first letter of a second answer": (OK + b"H", "waits", 200, b"ok", False),
    "100 Continue after the answer": (OK + b"HTTP/1.1 100 Continue\r\n\r\n", "waits", 200, b"ok", False),
    "more than it said": (HEAD + b"Content-Length: 2\r\n\r\nokEVIL", "waits", 200, b"ok", False),
    "more than it said, and it closes": (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nokEVIL", "closes", 200,
        b"ok", False),
    "an upgrade that it only talks about": (
        HEAD + b"Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\nok", "waits", 200, b"ok", True),
    "odd but whole": (b"HTTP/1.1 999\r\nx-empty:\r\nContent-Length: 2\r\n\r\nok", "waits", 999, b"ok", True),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@on_each_loop
async def test_an_answer_is_read_to_its_end_and_no_further(name: str):
    """The next one has nothing of it: a connection on which more came is not used again."""
    sent, then, status, body, reused = ANSWERS[name]
    other = b"HTTP/1.1 201 Created\r\nX-Next: 1\r\nContent-Length: 4\r\n\r\nnext"
    for way in WAYS:
        async with engine(first(says(sent, then=then), says(other))) as (it, client):
            assert (status, body) == await asked(it, client, way=way)
            answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
            assert (201, "Created", [("X-Next", "1"), ("Content-Length", "4")]) == (
                answer.status,
                answer.reason,
                list(answer.headers.items()),
            )
            assert b"next" == await way(answer)
            answer.close()
            assert (1 if reused else 2) == it.connections


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Content-Length: 4\r\n\r\n",
        CHUNKED,
        HEAD + b"\r\n",
        HEAD + b"Content-Length: 0\r\n\r\n",
        # These fail without `if not answer.bodiless` before `answer.got`.
        HEAD + b"Content-Length: 4\r\n\r\nEVIL",
        CHUNKED + b"4\r\nEVIL\r\n0\r\n\r\n",
        HEAD + b"\r\n" + OK,
    ],
)
@on_each_loop
async def test_the_answer_to_head_has_no_body_whatever_comes(sent: bytes):
    """Sent on, its bytes would be the next answer to whoever asked. Nor is its connection used again, though it was
    before."""
    for way in WAYS:
        async with engine(first(says(OK), says(sent), says(OK))) as (it, client):
            assert (200, b"ok") == await asked(it, client)
            assert (200, b"") == await asked(it, client, "HEAD", way, b"")
            assert (200, b"ok") == await asked(it, client)
            assert 2 == it.connections


# What is no answer, and what the error says.
NO_ANSWERS: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"220 smtp.example ESMTP\r\n", "Expected HTTP"),
    "a body alone": (b"ok\r\n\r\n", "Expected HTTP"),
    "HTTP/3": (b"HTTP/3.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "Invalid HTTP version"),
    "a status of two digits": (b"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nok", "status"),
    "a status of four": (b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok", "status"),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok!", "Content-Length"),
    "one length twice": (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok", "Content-Length"),
    "a list of lengths": (HEAD + b"Content-Length: 2, 2\r\n\r\nok", "Content-Length"),
    "a length below 0": (HEAD + b"Content-Length: -2\r\n\r\nok", "Content-Length"),
    "a length with a sign": (HEAD + b"Content-Length: +2\r\n\r\nok", "Content-Length"),
    "a length in hex": (HEAD + b"Content-Length: 0x2\r\n\r\nok", "Content-Length"),
    "a length of nothing": (HEAD + b"Content-Length:\r\n\r\nok", "Content-Length"),
    "a length beyond 64 bits": (HEAD + b"Content-Length: 99999999999999999999\r\n\r\nok", "Content-Length"),
    "a length and chunks": (
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "Content-Length",
    ),
    "chunks and a length": (
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "Content-Length",
    ),
    "a space before the colon": (HEAD + b"Content-Length : 2\r\n\r\nok", "header"),
    "a header on two lines": (HEAD + b"X-A: 1\r\n 2\r\nContent-Length: 2\r\n\r\nok", "whitespace"),
    "a header without a name": (HEAD + b": 1\r\nContent-Length: 2\r\n\r\nok", "header"),
    "a header without a colon": (HEAD + b"X-A\r\nContent-Length: 2\r\n\r\nok", "header"),
    "a bare CR in a header": (HEAD + b"X-A: 1\rX-B: 2\r\nContent-Length: 2\r\n\r\nok", "header"),
    "a NUL in a header": (HEAD + b"X-A: 1\0\r\nContent-Length: 2\r\n\r\nok", "header"),
    "lines that end in LF": (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", "CR"),
    "too many headers": (HEAD + b"X-A: 1\r\n" * (HEAD_BYTES // 4 + 1) + b"\r\n", "longer than"),
    "too large a header": (HEAD + b"X-A: " + b"x" * HEAD_BYTES + b"\r\nContent-Length: 2\r\n\r\nok", "longer than"),
    # These fail without the check of what comes before an answer: the body of the first would be the beginning of the
    # second's.
    "a body before the answer": (b"HTTP/1.1 104 Odd\r\nContent-Length: 4\r\n\r\nEVIL" + OK, "104"),
    "chunks before the answer": (
        b"HTTP/1.1 104 Odd\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nEVIL\r\n0\r\n\r\n" + OK,
        "104",
    ),
    "a status below 100": (b"HTTP/1.1 099 Odd\r\nContent-Length: 4\r\n\r\nEVIL" + OK, "99"),
    "no status at all": (b"HTTP/1.1 000 Odd\r\n\r\n", "status 0"),
    "an upgrade": (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" + OK, "101"),
    # These fail without the check of the transfer coding: gzip would go on to the client without its name.
    "another transfer coding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\nok", "gzip"),
    "another transfer coding in chunks": (
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "gzip",
    ),
    "chunks inside another transfer coding": (
        HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "gzip",
    ),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
@on_each_loop
async def test_what_is_no_answer_is_refused_and_its_connection_cut(name: str):
    sent, why = NO_ANSWERS[name]
    async with engine(first(says(sent), says(OK))) as (it, client):
        with pytest.raises(BrokenConnection, match=why):
            await asked(it, client)
        await until(lambda: it.open == 0, "the connection is cut")
        assert (200, b"ok") == await asked(it, client)
        assert 2 == it.connections


# Broken in the middle: what comes, and what of the body came with it.
TORN: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "half a head": (HEAD + b"Content-Le", b""),
    "only what comes before an answer": (b"HTTP/1.1 100 Continue\r\n\r\n", b""),
    "less than it said": (HEAD + b"Content-Length: 5\r\n\r\nok", b"ok"),
    "half a chunk": (CHUNKED + b"5\r\nok", b"ok"),
    "no last chunk": (CHUNKED + b"2\r\nok\r\n", b"ok"),
    "half the end of the last chunk": (CHUNKED + b"2\r\nok\r\n0\r\n\r", b"ok"),
    "half a trailer": (CHUNKED + b"2\r\nok\r\n0\r\nX-A: 1\r\n", b"ok"),
}
MALFORMED: dict[str, tuple[bytes, bytes]] = {
    "a chunk that is no number": (CHUNKED + b"2\r\nok\r\nzz\r\n", b"ok"),
    "a chunk with a sign": (CHUNKED + b"2\r\nok\r\n+2\r\nok\r\n", b"ok"),
    "a chunk beyond 64 bits": (CHUNKED + b"2\r\nok\r\n10000000000000002\r\nok\r\n", b"ok"),
    "a chunk longer than it said": (CHUNKED + b"2\r\nokEVIL\r\n0\r\n\r\n", b"ok"),
    "chunks whose lines end in LF": (CHUNKED + b"2\r\nok\r\n2\nok\n0\n\n", b"ok"),
    "a length in a trailer": (CHUNKED + b"2\r\nok\r\n0\r\nContent-Length: 7\r\n\r\n", b"ok"),
    "too many trailers": (CHUNKED + b"2\r\nok\r\n0\r\n" + b"X-A: 1\r\n" * (HEAD_BYTES // 4 + 1) + b"\r\n", b"ok"),
}


async def taken(
    it: Engine, client: UpstreamClient, way: Callable[[UpstreamResponse], Awaitable[bytes]], got: list[bytes]
) -> None:
    """Takes an answer in one of the ways; what has come stays in `got`, also when it breaks."""
    answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
    try:
        if way is pumped:
            while await answer.pump(lambda part: got.append(part) is None):
                pass
        else:
            while part := await (answer.read() if way is read else answer.chunk()):
                got.append(part)
    finally:
        answer.close()


@pytest.mark.parametrize(
    ("sent", "body", "then"),
    [pytest.param(*torn, then, id=f"{name}, {then}") for name, torn in TORN.items() for then in ("closes", "resets")]
    + [pytest.param(*torn, "waits", id=name) for name, torn in MALFORMED.items()]
    + [pytest.param(HEAD + b"\r\nok", b"ok", "resets", id="a reset where closing would be the end")],
)
@on_each_loop
async def test_an_answer_that_is_cut_short_never_looks_complete(sent: bytes, body: bytes, then: str):
    """What came of it can still be had, but for `read`, which is for whole ones."""
    for way in WAYS:
        async with engine(first(says(sent, then=then), says(OK))) as (it, client):
            got: list[bytes] = []
            with pytest.raises(BrokenConnection):
                await taken(it, client, way, got)
            assert (b"" if way is read else body) == b"".join(got)
            assert (200, b"ok") == await asked(it, client)
            assert 2 == it.connections


# Fail without the bound on bytes that bring no body: the parser keeps what it reads of a line, and copies it with every
# read.
@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 O", HEAD + b"X", HEAD + b"X-A: ", CHUNKED + b"2\r\nok\r\n0\r\nX-A: "],
                         ids=["reason", "name", "value", "trailer"])  # fmt: skip
@on_each_loop
async def test_a_line_without_an_end_is_not_read_for_ever(begin: bytes):
    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        for _ in range(64):
            writer.write(b"x" * (64 << 10))
            await writer.drain()

    async with engine(speak) as (it, client):
        with pytest.raises(BrokenConnection, match="longer than"):
            await asked(it, client)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        (b" OK", "OK"),
        (b"", ""),
        (b" Not  Really", "Not  Really"),
        # These fail while a reason is read as Latin-1, and with whatever is in it: the server sends UTF-8, and refuses
        # what is no text.
        (" déjà vu".encode(), "déjà vu"),
        (b" O\0K\x1b", ""),
        (b" \xff", ""),
    ],
)
@on_each_loop
async def test_a_reason_is_text_or_nothing(line: bytes, want: str):
    async with engine(says(b"HTTP/1.1 200" + line + b"\r\nContent-Length: 2\r\n\r\nok")) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        assert want == answer.reason
        answer.close()


@on_each_loop
async def test_what_a_head_says_can_be_asked():
    head = (
        b"Content-Type: Text/Event-Stream ; charset=utf-8\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nX-A:"
        b" caf\xc3\xa9\r\nX-B: \xff\r\n"
    )
    async with engine(says(HEAD + head + b"Content-Length: 2\r\n\r\nok")) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        assert ("text/event-stream", 2, False) == (answer.content_type, answer.content_length, answer.until_close)
        assert (["a=1", "b=2"], "café", "\udcff") == (
            answer.headers.getall("Set-Cookie"),
            answer.headers["x-a"],
            answer.headers["X-B"],
        )
        answer.close()
    async with engine(says(HEAD + b"\r\nok", then="closes")) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        assert ("", None, True) == (answer.content_type, answer.content_length, answer.until_close)
        answer.close()


# Cut anywhere


@dataclass
class Line:
    """One loop, engine and client for the many small cases of a property; the engine sends `parts`, each for a read of
    its own."""

    run: Run
    it: Engine
    client: UpstreamClient
    parts: Sequence[bytes] = ()
    then: str = "waits"

    async def speak(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        await says(*self.parts, then=self.then)(request, writer)

    async def seen(self, way: Callable[[UpstreamResponse], Awaitable[bytes]]) -> tuple[Any, ...]:
        """All that can be told of an answer, and whether it was the end of its connection."""
        self.client.close()
        try:
            answer = await self.client.send(self.it.url, "POST", "/v1/x", [], b"{}")
        except BrokenConnection as error:
            return (str(error),)
        head = answer.status, answer.reason, list(answer.headers.items())
        try:
            return *head, await way(answer)
        except BrokenConnection as error:
            return *head, str(error)
        finally:
            answer.close()

    def all_seen(self, *parts: bytes, then: str) -> list[tuple[Any, ...]]:
        self.parts, self.then = parts, then

        async def case() -> list[tuple[Any, ...]]:
            return [await self.seen(way) for way in WAYS]

        return list(self.run(case()))


@pytest.fixture(scope="module")
def line() -> Iterator[Line]:
    with running(asyncio.new_event_loop) as run:
        opened = engine(lambda request, writer: it.speak(request, writer))
        it = Line(run, *run(opened.__aenter__()))
        yield it
        run(opened.__aexit__(None, None, None))


@pytest.mark.parametrize("name", [*ANSWERS, *NO_ANSWERS, *TORN, *MALFORMED])
def test_an_answer_in_single_bytes_is_the_same(line: Line, name: str):
    """What broken ones had brought by then may differ, and so may the word for it; that they are broken may not."""
    sent, then = ANSWERS[name][:2] if name in ANSWERS else ((NO_ANSWERS | TORN | MALFORMED)[name][0], "closes")
    if len(sent) > 1000:
        sent = sent[:200]  # it has to end somewhere; broken it is either way
    whole = line.all_seen(sent, then=then)
    cut = line.all_seen(*(sent[at : at + 1] for at in range(len(sent))), then=then)
    if name in ANSWERS:
        assert whole == cut
        assert ANSWERS[name][3] == whole[0][3]
    else:
        assert all(isinstance(seen[-1], str) for seen in whole + cut)


_BYTES = st.binary(max_size=30) | st.sampled_from([b"\r\n", b"0\r\n\r\n", OK, b"\r\n\r\n", b"data: x\n\n" * 5])


@st.composite
def _answers(draw: st.DrawFn) -> tuple[bytes, str, bytes]:
    """An answer, what the engine does after it, and its body."""
    pieces = draw(st.lists(_BYTES.filter(bool), max_size=5))
    body = b"".join(pieces)
    before = b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\n" * draw(st.integers(0, 2))
    headers = b"".join(
        b"X-%d: %s\r\n" % (at, value)
        for at, value in enumerate(draw(st.lists(st.sampled_from([b"", b"1", b"caf\xc3\xa9", b" a b "]))))
    )
    match draw(st.sampled_from(["length", "chunked", "close"])):
        case "length":
            return before + HEAD + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body, "waits", body
        case "chunked":
            framed = b"".join(
                b"%x%s\r\n%s\r\n" % (len(piece), draw(st.sampled_from([b"", b";a=b"])), piece) for piece in pieces
            )
            trailers = b"X-Trailer: 1\r\n" * draw(st.integers(0, 2))
            return (
                before
                + HEAD
                + headers
                + b"Transfer-Encoding: chunked\r\n\r\n"
                + framed
                + b"0\r\n"
                + trailers
                + b"\r\n",
                "waits",
                body,
            )
        case _:
            return before + HEAD + headers + b"\r\n" + body, "closes", body


@settings(deadline=None, max_examples=50)
@given(answer=_answers(), data=st.data())
def test_wherever_an_answer_is_cut_it_is_the_same(line: Line, answer: tuple[bytes, str, bytes], data: st.DataObject):
    """Read whole, in chunks or pumped, and by someone who keeps asking for a pause."""
    sent, then, body = answer
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=10)))
    whole = line.all_seen(sent, then=then)
    cut = line.all_seen(*(sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)), then=then)
    assert {body} == {seen[-1] for seen in whole}
    assert whole == cut


@settings(deadline=None, max_examples=50)
@given(answer=_answers(), data=st.data())
def test_whatever_is_missing_at_the_end_is_missed(line: Line, answer: tuple[bytes, str, bytes], data: st.DataObject):
    """But for a body that ends with its connection, of which nobody can tell."""
    sent, then, body = answer
    missing = data.draw(st.integers(1, len(sent)))
    torn = line.all_seen(sent[:-missing], then="closes")
    if then == "closes" and missing <= len(body):
        assert {body[:-missing]} == {seen[-1] for seen in torn}
    else:
        assert all(isinstance(seen[-1], str) for seen in torn)


_FRAGMENTS = st.binary(max_size=5) | st.sampled_from(
    [HEAD, OK, b"\r\n", b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n", b"2\r\nok\r\n", b"0\r\n\r\n",
     b"HTTP/1.1 100 Continue\r\n\r\n", b"X-A:", b" 1", b"\0", b"ok", b"HTTP/1.1 204 No\r\n"]
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(bytes_=st.lists(_FRAGMENTS, max_size=8))
def test_any_bytes_are_an_answer_or_broken(line: Line, bytes_: list[bytes]):
    """And leave the next answer alone."""
    line.all_seen(*bytes_, then="closes")
    assert {(200, "OK", (("Content-Length", "2"),), b"ok")} == {
        (*seen[:2], tuple(seen[2]), seen[3]) for seen in line.all_seen(OK, then="waits")
    }


# Connections


@on_each_loop
async def test_the_connection_used_last_is_used_next():
    """So that those of a burst grow old and go."""
    ports: list[int] = []

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        ports.append(writer.get_extra_info("peername")[1])
        writer.write(OK)

    async with engine(speak) as (it, client):
        answers = [await client.send(it.url, "POST", "/v1/x", [], b"{}") for _ in range(3)]
        for answer in answers:
            await answer.read()
            answer.close()
        for _ in range(4):
            await asked(it, client)
        assert [ports[2]] * 4 == ports[3:]
        assert 3 == it.connections


@on_each_loop
async def test_a_connection_is_kept_for_one_origin_and_base():
    async with engine(says(OK)) as (it, client):
        for url in (it.url, it.url + "/base", it.url + "/", it.url + "/base/"):
            await asked(it, client, url=url)
        assert 2 == it.connections


@on_each_loop
async def test_connection_idle_too_long_is_closed():
    """A connection that was idle for too long is closed and not used."""
    async with engine(says(OK), keep_s=0.05) as (it, client):
        await asked(it, client)
        time.sleep(0.06)  # noqa: ASYNC251  # the loop has no chance to close it
        await asked(it, client)
        assert 2 == it.connections
        await until(lambda: it.open == 0, "idle connections are closed")
        await asked(it, client)
        assert 3 == it.connections


@pytest.mark.parametrize("what", ["closes", "resets"])
@on_each_loop
async def test_request_is_sent_again_if_its_kept_connection_closes(what: str):
    """On a new connection and once, if it was a kept one and no byte of an answer came. Servers close idle connections,
    and uvicorn closes one behind a 500."""
    begun, answered = b"", Counter[asyncio.StreamWriter]()

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        answered[writer] += 1
        if b"never" not in request and answered[writer] == 1:
            writer.write(OK)
        elif begun or what == "closes":
            writer.write(begun)
            writer.close()
        else:
            reset(writer)

    async with engine(speak) as (it, client):
        for number in (1, 2, 3):
            assert (200, b"ok") == await asked(it, client)
            assert number == it.connections
        large = b"x" * (COPY_BYTES + 1)  # not held for it, so on a new connection
        (await client.send(it.url, "POST", "/", [], large, lambda: None)).close()
        assert (4, 6) == (it.connections, len(it.asked))
        with pytest.raises(BrokenConnection):
            await asked(it, client, body=b"never")
        assert (5, 8) == (it.connections, len(it.asked))
        await asked(it, client)
        begun = b"H"
        with pytest.raises(BrokenConnection):
            await asked(it, client)
        assert (6, 11) == (it.connections, len(it.asked))


@pytest.mark.parametrize("what", ["closes", "resets", "speaks"])
@on_each_loop
async def test_connection_with_activity_is_not_reused(what: str):
    """Closed or reset by the engine, or with bytes that nobody asked for: they would be taken for the next answer."""
    writers: list[asyncio.StreamWriter] = []

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(OK)

    async with engine(speak) as (it, client):
        await asked(it, client)
        if what == "speaks":
            writers[0].write(b"HTTP/1.1 500 Evil\r\nContent-Length: 4\r\n\r\nEVIL")
        elif what == "resets":
            reset(writers[0])
        else:
            writers[0].close()
        await until(lambda: it.open == 0, "both ends are closed")
        assert (200, b"ok") == await asked(it, client)
        assert 2 == it.connections


@pytest.mark.parametrize("way", WAYS)
@on_each_loop
async def test_early_second_answer_goes_nowhere(way: Callable[[UpstreamResponse], Awaitable[bytes]]):
    """A second answer that comes before the first is closed goes nowhere."""
    async with engine(says(OK, b"HTTP/1.1 500 Evil\r\nContent-Length: 4\r\n\r\nEVIL")) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        await until(lambda: it.open == 0, "the connection is cut")
        assert b"ok" == await way(answer)
        answer.close()
        assert (200, b"ok") == await asked(it, client)
        assert 2 == it.connections


# Fails without a look at what is still to be sent: the next request would come after megabytes that an engine has no
# use for.
@on_each_loop
async def test_connection_with_half_a_request_is_not_reused():
    """An engine may answer before it has read everything, and then read no more."""
    got: list[bytes] = []

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await held.wait()
        writer.close()

    held = asyncio.Event()
    server = await asyncio.start_server(early, "127.0.0.1", 0, limit=1024)
    client = UpstreamClient(2.0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(2):
        answer = await client.send(url, "POST", "/v1/x", [], b"x" * 20 * MIB)
        assert b"ok" == await answer.read()
        answer.close()
    assert 2 == len(got)
    held.set()
    client.close()
    server.close()
    await turns()


@pytest.mark.parametrize("left", ["head", "body", "paused", "unread", "read in half"])
@on_each_loop
async def test_leaving_an_answer_closes_its_connection(left: str):
    """Which makes the engine stop; the next request has a connection of its own."""
    begun = {"head": b"HTTP/1.1 200 O", "paused": CHUNKED + b"40000\r\n" + b"x" * (128 << 10)}
    async with engine(first(says(begun.get(left, CHUNKED + b"2\r\nok\r\n")), says(OK))) as (it, client):

        async def user() -> None:
            answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
            try:
                if left == "body":
                    await answer.pump(lambda part: True)
                if left == "paused":
                    await answer.pump(lambda part: False)
                if left == "read in half":
                    await answer.read()
                await asyncio.Event().wait()
            finally:
                answer.close()

        using = asyncio.create_task(user())
        await until(lambda: len(it.asked) == 1, "the engine is asked")
        await turns(20)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        await until(lambda: it.open == 0, "the engine sees the client disconnect")
        assert (200, b"ok") == await asked(it, client)
        assert 2 == it.connections


@on_each_loop
async def test_who_leaves_at_any_moment_leaves_nothing_behind():
    """Cancelled after so many turns of the loop, while connecting or anywhere in an answer; a complete one leaves a
    connection that works."""
    async with engine(says(HEAD, b"Content-Length: 4\r\n", b"\r\n", b"ok", b"ok")) as (it, client):
        done = 0
        for moment in range(60):
            using = asyncio.create_task(asked(it, client, way=WAYS[moment % 3]))
            for _ in range(moment):
                await asyncio.sleep(0)
            using.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert (200, b"okok") == await using
                done += 1
        assert 0 < done < 60
        assert (200, b"okok") == await asked(it, client)


@on_each_loop
async def test_answer_outliving_its_client_is_closed():
    """Fails while `close` leaves its timer behind: what is given back later is then never closed."""
    async with engine(says(OK), keep_s=0.05) as (it, client):
        await asked(it, client)  # there is a timer now
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        client.close()
        assert b"ok" == await answer.read()
        answer.close()
        await until(lambda: it.open == 0, "it is closed")


# Taking


@on_each_loop
async def test_what_comes_is_given_in_the_very_call_that_received_it():
    """In one piece for each read, however many chunks it had; what had come before the pump began comes first."""
    taken = asyncio.Semaphore(0)

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        for part in (CHUNKED + b"1\r\na\r\n1\r\nb\r\n", b"1\r\nc\r\n1\r\nd\r\n", b"1\r\ne\r\n", b"0\r\n\r\n"):
            writer.write(part)
            await taken.acquire()

    async with engine(speak) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        assert b"ab" == await answer.chunk()
        taken.release()
        got: list[bytes] = []

        def take(part: bytes) -> bool:
            got.append(part)
            taken.release()
            return True

        assert not await answer.pump(take)
        assert [b"cd", b"e"] == got
        taken.release()
        answer.close()


@on_each_loop
async def test_nothing_is_given_after_a_no_until_it_is_asked_for():
    async with engine(says(CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n", b"1\r\nc\r\n0\r\n\r\n")) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        got: list[bytes] = []

        def take(part: bytes) -> bool:
            got.append(part)
            return False

        await answer.pump(take)
        await turns(20)
        assert 1 == len(got)
        while await answer.pump(take):
            pass
        assert b"abc" == b"".join(got)
        answer.close()
        await asked(it, client)
        assert 1 == it.connections


@pytest.mark.parametrize("framing", [HEAD + b"Content-Length: 2\r\n\r\nok", CHUNKED + b"2\r\nok\r\n0\r\n\r\n"])
@pytest.mark.parametrize("more", [True, False])
@on_each_loop
async def test_a_no_at_the_end_is_the_end(framing: bytes, more: bool):
    """The last piece and the end in one read: nothing is left to wait for, and the connection is good for another
    request."""
    async with engine(says(framing)) as (it, client):
        for _ in range(2):
            answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
            got: list[bytes] = []
            while await answer.pump(lambda part, got=got: got.append(part) or more):
                pass
            assert b"ok" == b"".join(got)
            answer.close()
        assert 1 == it.connections


@pytest.mark.parametrize("held", [True, False])
@on_each_loop
async def test_an_error_of_who_takes_is_raised_where_it_waits(held: bool):
    """And nowhere else: the loop hears nothing of it, and what comes later is given to nobody."""
    async with engine(first(says(CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n"), says(OK))) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        if held:
            await turns(20)
        calls = 0

        def take(part: bytes) -> bool:
            nonlocal calls
            calls += 1
            raise ConnectionResetError("gone")

        with pytest.raises(ConnectionResetError, match=r"^gone$"):
            await answer.pump(take)
        await turns(20)
        answer.close()
        assert 1 == calls
        await until(lambda: it.open == 0, "the connection is cut")
        assert (200, b"ok") == await asked(it, client)


@on_each_loop
async def test_an_error_of_who_takes_that_nobody_waits_for_is_nobodys():
    """Whoever pumped is cancelled, and before it knows, another piece comes."""
    go = asyncio.Event()

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await go.wait()
        writer.write(b"1\r\na\r\n")

    def take(part: bytes) -> bool:
        raise ConnectionResetError("the client is gone")

    async with engine(speak) as (it, client):
        for turn in range(4):
            go.clear()
            answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
            pumping = asyncio.create_task(answer.pump(take))
            await turns()
            go.set()
            await turns(turn)
            pumping.cancel()
            with pytest.raises((asyncio.CancelledError, ConnectionResetError)):
                await pumping
            answer.close()


# Fails without `_go_on` in `chunk`: it waits for what is paused.
@on_each_loop
async def test_the_rest_of_a_body_can_be_had_in_another_way():
    async with engine(says(CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n", b"1\r\nc\r\n0\r\n\r\n")) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        assert b"a" == await answer.chunk()
        got: list[bytes] = []
        await answer.pump(lambda part: bool(got.append(part)))
        assert b"bc" == b"".join(got) + await asyncio.wait_for(answer.read(), 30)
        answer.close()


@pytest.mark.parametrize("how", ["nobody asks", "one chunk", "pump until no"])
@on_each_loop
async def test_an_engine_waits_for_whoever_does_not_take(how: str):
    """It has 64 MiB to say, in chunks of 1 KiB; what is held of them is bounded, and goes on where it stopped."""
    block = (b"400\r\n" + b"x" * 1024 + b"\r\n") * 64
    sent = 0

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(CHUNKED)
        for _ in range(1024):
            writer.write(block)
            await writer.drain()
            sent += 64 << 10
        writer.write(b"0\r\n\r\n")

    async with engine(speak) as (it, client):
        answer = await client.send(it.url, "POST", "/v1/x", [], b"{}")
        gc.collect(1)
        tracemalloc.start()
        try:
            taken: list[int] = []
            if how == "one chunk":
                taken.append(len(await answer.chunk()))
            while how == "pump until no" and not taken:
                await answer.pump(lambda part: bool(taken.append(len(part))))
            assert await settled(lambda: sent, "what is sent") < 32 * MIB
            assert tracemalloc.get_traced_memory()[1] < 8 * HELD_BYTES  # a read, its chunks, and what is held
        finally:
            tracemalloc.stop()
        while await answer.pump(lambda part: taken.append(len(part)) is None):
            pass
        assert 64 * MIB == sum(taken)
        answer.close()


# Who is not there


async def refused(url: str, connect_s: float = 2.0) -> Unreachable:
    client = UpstreamClient(connect_s)
    with pytest.raises(Unreachable) as caught:
        await client.send(url, "POST", "/v1/x", [], b"{}")
    return caught.value


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1:PORT", "refused|Connect call failed"),
        ("[::1]:PORT", "refused|Connect call failed|address|unreachable"),
        ("a." * 200 + "x:PORT", "not known|resolution"),  # too long for a question to the network
        ("a..b:PORT", "label"),  # fails without `UnicodeError` beside `OSError`
    ],
)
@on_each_loop
async def test_an_engine_that_is_not_there_is_told_with_the_reason(free_port: Callable[[], int], host: str, why: str):
    error = await refused("http://" + host.replace("PORT", str(free_port())))
    assert re.search(why, str(error))
    assert not error.late


# Fails without `str(error)`: the error of several addresses has no strerror, and was called "no address".
async def test_engine_absent_at_both_addresses_is_reported(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
):
    """On asyncio's own loop; uvloop asks the system for addresses in a way of its own, and has one error for all of
    them."""
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def both(host: str, port: int, **more: Any) -> Any:
        return await real("127.0.0.1", port, **more) + await real("127.0.0.2", port, **more)

    monkeypatch.setattr(loop, "getaddrinfo", both)
    assert re.search("127.0.0.1.*127.0.0.2", str(await refused(f"http://localhost:{free_port()}")))


@on_each_loop
async def test_an_engine_that_does_not_accept_in_time_is_late():
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # its queue is full
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(full.getsockname())
        error = await refused(f"http://127.0.0.1:{full.getsockname()[1]}", connect_s=0.1)
        assert (True, "no connection within 0.1 s") == (error.late, str(error))


@pytest.mark.parametrize("what", ["closes", "resets", "greets"])
@on_each_loop
async def test_a_door_that_shuts_at_once_is_no_answer(what: str):
    """As a port that is forwarded to nobody, or to another protocol. Told apart from an engine only by what happens,
    and never waited for."""

    async def door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if what == "resets":
            reset(writer)
        if what == "greets":
            writer.write(b"220 hello\r\n")
        writer.close()

    server = await asyncio.start_server(door, "127.0.0.1", 0)
    client = UpstreamClient(2.0)
    for _ in range(20):
        with pytest.raises((BrokenConnection, Unreachable)):
            await client.send(
                f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "POST", "/v1/x", [], b"x" * 100_000
            )
    server.close()
    await turns()


@on_each_loop
async def test_it_speaks_to_an_engine_on_ipv6():
    it = Engine(says(OK))
    try:
        server = await asyncio.start_server(it.handle, "::1", 0)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    client = UpstreamClient(2.0)
    url = f"http://[::1]:{server.sockets[0].getsockname()[1]}"
    assert (200, b"ok") == await asked(it, client, url=url)
    assert f"\r\nHost: {url[7:]}\r\n".encode() in it.asked[0]
    client.close()
    server.close()
    await until(lambda: it.open == 0, "the connection is closed")


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of 127.0.0.1, signed by nobody but itself."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", "/CN=engine",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", path.with_suffix(".crt")],
        check=True, capture_output=True,
    )  # fmt: skip
    with path.open("ab") as both:
        both.write(path.with_suffix(".crt").read_bytes())
    return path


@pytest.fixture
def secured(certificate: Path) -> ssl.SSLContext:
    """How the engine speaks TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def trusting(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As an operator does it, by the environment."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    module._trusted.cache_clear()
    yield
    module._trusted.cache_clear()


# Fails while the reason is the name of the error, which is the same for every certificate that is not trusted.
@on_each_loop
async def test_a_certificate_that_nobody_signed_is_not_trusted(secured: ssl.SSLContext):
    async with engine(says(OK), ssl=secured) as (it, _):
        error = await refused(it.url)
        assert ("self-signed certificate", False) == (str(error), error.late)
        assert [] == it.asked


@pytest.mark.parametrize("way", WAYS)
@on_each_loop
async def test_tls_with_a_certificate_that_is_trusted(
    trusting: None, secured: ssl.SSLContext, way: Callable[[UpstreamResponse], Awaitable[bytes]]
):
    """With all of a stream's ways, one connection for many requests, and more than fits into one record."""
    body = b"".join(b"%x\r\n%s\r\n" % (size, b"x" * size) for size in (1, 40_000, 300_000))
    parts = [CHUNKED + body[at : at + 30_000] for at in (0,)] + [
        body[at : at + 30_000] for at in range(30_000, len(body), 30_000)
    ]
    async with engine(says(*parts, b"0\r\n\r\n"), ssl=secured) as (it, client):
        for _ in range(3):
            assert (200, b"x" * 340_001) == await asked(it, client, way=way)
        assert 1 == it.connections


@pytest.mark.parametrize("over_tls", [False, True])
@on_each_loop
async def test_a_request_is_out_when_the_engine_has_taken_all_of_it(
    trusting: None, secured: ssl.SSLContext, over_tls: bool
):
    """Not before, and not only with the answer. The next request on the connection is not reported, since it may be
    sent again, and none over TLS, where nobody can know."""
    takes, answers, out = asyncio.Event(), asyncio.Event(), Counter[str]()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                await takes.wait()
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2]))
                await answers.wait()
                writer.write(OK)

    server = await asyncio.start_server(slow, "127.0.0.1", 0, ssl=secured if over_tls else None)
    client, url = UpstreamClient(2.0), f"http{'s' * over_tls}://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def sent(name: str, size: int) -> asyncio.Task[UpstreamResponse]:
        return asyncio.create_task(client.send(url, "POST", "/", [], b"x" * size, lambda: out.update([name])))

    first_one = sent("first", 20 << 20)
    await turns(200)
    assert {} == out
    takes.set()
    if not over_tls:
        await until(lambda: out == {"first": 1}, "the first is out")
        assert not first_one.done()
    answers.set()
    (await first_one).close()
    (await sent("second", 5)).close()
    assert ({} if over_tls else {"first": 1}) == out
    client.close()
    server.close()


@on_each_loop
async def test_a_certificate_for_another_name_is_not_trusted(trusting: None, secured: ssl.SSLContext):
    async with engine(says(OK), ssl=secured) as (it, _):
        error = await refused(it.url.replace("127.0.0.1", "localhost"))
        assert re.search(r"mismatch|VERIFY_FAILED", str(error))


@pytest.mark.parametrize("then", ["closes", "resets"])
@on_each_loop
async def test_an_answer_that_is_cut_short_inside_tls_is_broken(trusting: None, secured: ssl.SSLContext, then: str):
    async with engine(says(HEAD + b"Content-Length: 5\r\n\r\nok", then=then), ssl=secured) as (it, client):
        with pytest.raises(BrokenConnection):
            await asked(it, client)


# Fails without words for a handshake that is cut short, whose error has none: it was called "no address".
@pytest.mark.parametrize("says_", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["closes", "speaks no TLS"])
@on_each_loop
async def test_a_port_without_tls_is_told_so(says_: bytes):
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(says_)
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    error = await refused(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert re.search("WRONG_VERSION|reset|hung up|EOF|closed", str(error))
    assert not error.late
    server.close()
    await turns()


@on_each_loop
async def test_who_leaves_while_connecting_leaves_no_connection():
    """To an engine that accepts and then says nothing of TLS."""
    accepted, ended = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = UpstreamClient(5.0)
    sending = asyncio.create_task(client.send(url, "POST", "/v1/x", [], b"{}"))
    await until(accepted.is_set, "the engine accepts the connection")
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await until(ended.is_set, "the engine sees the client disconnect")
    ended.clear()
    assert (await refused(url, connect_s=0.05)).late
    await until(ended.is_set, "the engine sees the late client disconnect")
    server.close()


# Through the whole gateway: what a client of it sees when its engine is odd. (Ordinary streams and replies:
# test_gateway.py and its neighbours.)


@contextlib.asynccontextmanager
async def in_front_of(speak: Speak, tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Engine, Running]]:
    """A gateway before such an engine; `speak` sees only what came through the gateway."""

    async def but_for_looks(request: bytes, writer: asyncio.StreamWriter) -> None:
        await (speak if b"x-request-id" in request.lower() else says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))(
            request, writer
        )

    it = Engine(but_for_looks)
    server = await asyncio.start_server(it.handle, "127.0.0.1", 0)
    it.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with gateway(tmp_path, upstream=it.url, **more) as running:
            yield it, running
    finally:
        server.close()


def request_of(method: str = "POST", body: Any = STREAM, version: str = "1.1", more: str = "") -> bytes:
    data = json.dumps(body).encode() if method == "POST" else b""
    head = (
        f"{method} {CHAT} HTTP/{version}\r\nHost: x\r\nAuthorization: Bearer {KEYS['demo'][0]}\r\n{more}Content-Length:"
        f" {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def connected(it: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = it.started.url[7:].split(":")
    return await asyncio.open_connection(host, int(port))


async def said(it: Running, *requests: bytes) -> bytes:
    """Return all that the gateway sends on one connection until it closes it; the next request goes out when it has
    sent something. Raises TimeoutError while it does not close."""
    reader, writer = await connected(it)
    got = b""
    for request in requests:
        writer.write(request)
        got += await asyncio.wait_for(reader.read(1), SOON_S)
    got += await everything(reader)
    writer.close()
    return got


EVENTS = HEAD + b"Content-Type: text/event-stream\r\n"
SAID = ROLE + TOKEN + LAST + DONE
CLOSE = "Connection: close\r\n"
ASKED = STREAM | {"stream_options": {"include_usage": True}}  # so that nothing is stripped, and a length stays


# Fails while the answer to HEAD is given a body: a hostile engine writes the next answer of that connection.
@pytest.mark.parametrize(
    "sent", [HEAD + b"\r\n" + OK, HEAD + b"Content-Length: 4\r\n\r\nEVIL", EVENTS + b"\r\n" + SAID, EVENTS + b"\r\n"]
)
async def test_nothing_follows_the_head_that_a_client_asked_for(tmp_path: Path, sent: bytes):
    async with in_front_of(says(sent, then="closes"), tmp_path) as (_, it):
        got = await said(it, request_of("HEAD", more=CLOSE))
        assert b"" == got.partition(b"\r\n\r\n")[2]
        assert got.startswith(b"HTTP/1.1 200 ")


# Fails while a stream that was complete for its reader ends cleanly: the client waits for the rest of the length it was
# promised.
async def test_unmet_length_ends_with_the_connection(tmp_path: Path):
    """Though its last event was seen, and it is on record as what it was: answered."""
    async with in_front_of(says(EVENTS + b"Content-Length: 5000\r\n\r\n" + SAID, then="closes"), tmp_path) as (_, it):
        assert (await said(it, request_of(body=ASKED))).endswith(SAID)
        assert "ok" == (await it.record()).outcome


# The second fails while the server is left to decide: it keeps the connection, and the client waits for an end that
# never comes.
@pytest.mark.parametrize("more", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
async def test_a_client_of_http_1_0_knows_the_end_by_the_connection(tmp_path: Path, more: str, kind: bytes):
    async with in_front_of(says(HEAD + b"Content-Type: " + kind + b"\r\n\r\n" + SAID, then="closes"), tmp_path) as (
        _,
        it,
    ):
        head, _, body = (await said(it, request_of(body=ASKED, version="1.0", more=more))).partition(b"\r\n\r\n")
        assert SAID == body
        assert b"transfer-encoding" not in head.lower()


# Fails while a reason may hold anything: the server refuses to send it, and the gateway calls that a defect of its own.
async def test_an_odd_reason_is_no_defect_of_the_gateway(tmp_path: Path):
    async with (
        in_front_of(says(b"HTTP/1.1 200 O\0K\r\nContent-Length: 2\r\n\r\n{}"), tmp_path) as (_, it),
        it.post() as answer,
    ):
        assert (200, b"{}") == (answer.status, await answer.read())


async def test_a_stream_with_a_length_keeps_it_and_its_connection(tmp_path: Path):
    stream = EVENTS + b"Content-Length: %d\r\n\r\n" % len(SAID)
    async with in_front_of(says(stream + SAID[:100], SAID[100:]), tmp_path) as (_, it):
        got = await said(it, request_of(body=ASKED), request_of(body=ASKED, more=CLOSE))
        assert [SAID, SAID] == [part.partition(b"\r\n\r\n")[2] for part in re.split(rb"(?=HTTP/1.1 200 OK)", got)[1:]]
        assert 2 == got.lower().count(b"content-length: %d\r\n" % len(SAID))
        assert ["ok", "ok"] == [record.outcome for record in await it.records(2)]


async def test_a_client_that_wants_no_more_is_obeyed(tmp_path: Path):
    async with in_front_of(
        says(EVENTS + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(SAID), SAID)), tmp_path
    ) as (_, it):
        got = await said(it, request_of(body=ASKED, more=CLOSE))
        assert got.endswith(b"%x\r\n%s\r\n0\r\n\r\n" % (len(SAID), SAID))
        assert b"connection: close" in got.lower()


# what the engine has said when the client leaves, to what, and the status on record
LEFT: dict[str, tuple[bytes, Any, int | None]] = {
    "before the head": (b"", STREAM, None),
    "in the head": (b"HTTP/1.1 200 OK\r\nContent-", STREAM, None),
    "in a short reply": (HEAD + b"Content-Length: 5000\r\n\r\n{", ASK, None),
    "in a long reply": (HEAD + b"Content-Length: 5000000\r\n\r\n{", ASK, 200),
    "in a reply of no length": (HEAD + b"\r\n{", ASK, 200),
    "in a stream before its content": (EVENTS + b"\r\n" + ROLE, STREAM, 200),
    "in the middle of an event": (EVENTS + b"\r\n" + ROLE + TOKEN + TOKEN[:20], STREAM, 200),
    "in a stream of known length": (EVENTS + b"Content-Length: 5000\r\n\r\n" + ROLE + TOKEN, ASKED, 200),
}


@pytest.mark.parametrize("politely", [True, False])
async def test_disconnect_at_any_stage_leaves_one_record(tmp_path: Path, politely: bool):
    """All at once, each on its own connection, with a reset or a goodbye."""

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        stage = re.search(rb'"user": ?"([^"]+)"', request)
        await says(LEFT[stage[1].decode()][0] if stage else OK)(request, writer)

    async with in_front_of(speak, tmp_path) as (engine_, it):
        clients = []
        for stage, (_, body, _) in LEFT.items():
            clients.append((await connected(it))[1])
            clients[-1].write(
                request_of(body=body | {"user": stage}, more=f"X-Request-Id: {stage.replace(' ', '-')}\r\n")
            )
        await until(
            lambda: len(LEFT) == sum(b'"user"' in request for request in engine_.asked), "the engine is asked by all"
        )
        await turns(100)
        open_before = engine_.open
        for client in clients:
            client.close() if politely else reset(client)
        records = {record.request_id: record for record in await it.records(len(LEFT))}
        assert {(name.replace(" ", "-"), "client_abort", status) for name, (_, _, status) in LEFT.items()} == {
            (record.request_id, record.outcome, record.status) for record in records.values()
        }
        await until(lambda: engine_.open <= open_before - len(LEFT), "the engine sees all of them hang up")


async def test_content_may_pause_as_long_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Streams whose last content comes at different moments of the deadline that is not moved for every event; then
    nothing but comments."""
    decode_s, last_at, deadlines = 2.0, dict[str, float](), dict[str, float]()
    allow = RequestHandler._allow

    def noted(visit: RequestHandler, stage: str, seconds: float) -> None:
        deadlines[visit._x.request_id] = time.monotonic() + seconds
        allow(visit, stage, seconds)

    monkeypatch.setattr(RequestHandler, "_allow", noted)

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        name = re.search(rb"(?i)x-request-id: (\d+)", request)[1].decode()
        writer.write(EVENTS + b"\r\n" + ROLE)
        for _ in range(int(name)):
            last_at[name] = time.monotonic()
            writer.write(TOKEN)
            await asyncio.sleep(0.034)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b": still here\n\n")
                await writer.drain()
                await asyncio.sleep(0.1)

    async with in_front_of(speak, tmp_path, timeouts=Timeouts(decode_s=decode_s)) as (_, it):

        async def waited(name: str) -> float:
            async with it.post(ASKED, **{"X-Request-Id": name}) as answer:
                assert b"decode_timeout" in await answer.read()
            return time.monotonic() - last_at[name]

        times = await asyncio.gather(*(waited(str(count)) for count in range(1, 13)))
        assert decode_s <= min(times)
        late = [deadlines[name] - last_at[name] for name in last_at]
        assert decode_s <= min(late)
        assert max(late) < 2 * decode_s
        assert {"decode_timeout"} == {record.reason for record in await it.records(12)}


async def test_times_of_content_are_those_of_its_arrival(tmp_path: Path):
    """Also of events that are known by the one before; what is no content moves neither end."""
    sent, seen = list[float](), list[float]()  # by the engine, and tokens by the client

    async def speak(request: bytes, writer: asyncio.StreamWriter) -> None:
        usage = b'data: {"model":"tiny","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":5}}\n\n'
        for part, pause_s in (
            (EVENTS + b"\r\n" + ROLE, 0.1),
            *[(TOKEN, 0.04)] * 4,
            (TOKEN + b": x\n\n", 0.1),
            (b": y\n\n", 0.1),
            (LAST[:30], 0.0),
        ):
            sent.append(time.monotonic())
            writer.write(part)
            if part.startswith(TOKEN):
                await until(lambda: len(seen) == len(sent) - 1, "the client has the token")
            await asyncio.sleep(pause_s)
        writer.write(LAST[30:].replace(b'"content":"!"', b"") + usage + DONE)
        writer.close()

    async with in_front_of(speak, tmp_path) as (_, it):
        began = time.monotonic()
        got = b""
        async with it.post(STREAM) as answer:
            while part := await answer.content.readany():
                got += part
                seen += [time.monotonic()] * (got.count(TOKEN) - len(seen))
        assert b"usage" not in got
        record = await it.record()
        rounded_ms = 1
        assert (sent[1] - sent[0]) * 1000 - rounded_ms <= record.ttft_ms <= (seen[0] - began) * 1000 + rounded_ms
        gaps_ms = 4 * record.tpot_ms  # between 5 tokens
        assert (sent[5] - seen[0]) * 1000 - rounded_ms <= gaps_ms <= (seen[4] - sent[1]) * 1000 + rounded_ms
