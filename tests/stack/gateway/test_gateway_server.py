"""The gateway's own HTTP/1.1 server: what it reads as a request, however the bytes are cut, and what it bounds. The
handler of a request stands in for the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from exporters.net import listener
from exporters.net.addresses import split_address
from exporters.net.listener import Listening, accept, new_rejections
from exporters.net.listener_auth import ListenerAuth
from stack.gateway import client_connection
from stack.gateway.client_connection import HEAD_BYTES, HEADERS, LINE_BYTES, QUEUED, ClientConnection, ClientServer
from stack.gateway.client_request import BrokenBody, ClientRequest, Response, read_target, text_response
from tests.support.gateway_scene import everything
from tests.support.wait import turns, until

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")
Seen = tuple[str, str, str, tuple[tuple[str, str], ...], bytes | None]


@pytest.fixture
def event_loop_policy():
    """What the gateway runs on."""
    return uvloop.EventLoopPolicy()


class FakeWire(asyncio.Transport):
    """A transport without a socket: keeps what is written, and calls the protocol as a socket's does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = b""
        self.closed = self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def setsockopt(self, *_: int) -> None:
        pass

    def write(self, data: Any) -> None:
        self.out += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Reader:
    """Handler that reads each request to its end and answers with its number."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    async def __call__(self, request: ClientRequest) -> None:
        body: bytes | None = b""
        try:
            while piece := await request.body_piece():
                body += piece  # type: ignore[operator]
        except BrokenBody:
            body = None
        self.seen.append((request.method, request.path, request.query, tuple(request.headers.items()), body))
        await text_response(f"{len(self.seen)}\n", 400 if body is None else 200).send(request)


def read(*pieces: bytes) -> tuple[list[Seen], bytes, bool, Counter[str]]:
    """What the handler saw of these bytes, what was answered, whether the connection is closed, and what was counted.

    Of what is still missing at the end nothing is known, so a request without its end is left out."""
    handler, rejected = Reader(), new_rejections()

    async def run() -> tuple[bytes, bool]:
        server = ClientServer(handler)
        listening = Listening(server.connection, ListenerAuth(None), 9, rejected)
        connection, wire = ClientConnection(server, listening), FakeWire()
        connection.connection_made(wire)
        for piece in pieces:
            if not wire.closed:
                connection.data_received(piece)
            await settled(connection)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        return wire.out, wire.closed

    out, closed = asyncio.run(run())
    return handler.seen, re.sub(rb"Date: [^\r]*", b"Date:", out), closed, +rejected


async def settled(connection: ClientConnection) -> None:
    """Return when nothing can go on without more bytes."""
    before = None
    while before != (before := (connection._answered, len(connection._queue))):
        await turns()


def request(
    method: str = "POST", target: str = "/a", body: bytes = b"", *more: str, version: str = "1.1", host: bool = True
) -> bytes:
    lines = [f"{method} {target} HTTP/{version}", *(["Host: x"] if host else []), *more]
    if body and not any(line.lower().startswith("transfer-encoding") for line in more):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


CHUNKS = b'3;ext="x"\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\nX-Trailer: 1\r\n\r\n'
CHUNKED = request("POST", "/c", CHUNKS, "Transfer-Encoding: chunked")
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
STREAMS = {
    "one": request(body=b"abc"),
    "several": request("GET") + request(body=b"abc") + CHUNKED + request("GET", "/last?x=1"),
    "last": request("GET", "/a", b"", "Connection: close") + request("GET", "/never"),
    "old": request("GET", version="1.0") + request("GET", "/never"),
    "old-kept": request("GET", "/a", b"", "Connection: keep-alive", version="1.0") * 2,
    "old-chunks": request("POST", "/a", CHUNKS, "Transfer-Encoding: chunked", "Connection: keep-alive", version="1.0")
    + request("GET", "/never"),
    "h2c": request("GET", "/a", b"", *H2C) + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + request("GET", "/never"),
    "h2c-body": request("POST", "/a", b"abc", *H2C) + request("GET", "/never"),
    "h2c-chunks": request("POST", "/a", CHUNKS, "Transfer-Encoding: chunked", *H2C) + request("GET", "/never"),
    "h2c-bad-chunks": request("POST", "/a", b"zz\r\n", "Transfer-Encoding: chunked", *H2C) + request("GET", "/never"),
    "upgrade-alone": request("POST", "/a", b"abc", "Upgrade: h2c") + request("GET", "/never"),
    "connect": request("CONNECT", "x:1") + request("GET", "/never"),
    "no-host": request("GET") + request("GET", "/never", host=False) + request("GET", "/never"),
    "two-hosts": request("GET", "/never", b"", "Host: y"),
    "two-lengths": request("POST", "/never", b"abc", "Content-Length: 3"),
    "two-types": request("GET", "/never", b"", "Content-Type: a", "Content-Type: b"),
    "same-twice": request("GET", "/a", b"", *["Content-Type: a", "User-Agent: a"] * 2, "User-Agent: b")
    + request("GET"),
    "length-and-chunks": request("POST", "/never", CHUNKS, "Transfer-Encoding: chunked", "Content-Length: 3"),
    "bad-chunk": request()
    + request("POST", "/b", b"3\r\nabcX", "Transfer-Encoding: chunked")
    + request("GET", "/never"),
    "bad-size": request("POST", "/b", b"-3\r\nabc", "Transfer-Encoding: chunked") + request("GET", "/never"),
    "coded": request("POST", "/never", CHUNKS, "Transfer-Encoding: gzip, chunked") + request("GET", "/never"),
    "list": request("POST", "/never", CHUNKS, "Transfer-Encoding: ,chunked"),
    "chunked-twice": request("POST", "/never", CHUNKS, *["Transfer-Encoding: chunked"] * 2),
    "capitals": request("POST", "/a", CHUNKS, "Transfer-Encoding:\t CHUNKED") + request("GET"),
    "tls": b"\x16\x03\x01\x02\x00\x01" + request("GET", "/never"),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "target": request("GET", "never") + request("GET", "/never"),
    "absolute": request("GET", "http://evil.example/a?b=/c"),
    "encoded": request("GET", "/a%2fb%20c%e2%82%ac%ff?x=%2f#y"),
    "line-breaks": b"\r\n\r\n" + request("GET") + b"\r\n" + request("GET"),
    "folded": request("GET", "/never", b"", "X: a\r\n b"),
    "nul": request("GET", "/never", b"", "X: a\0b"),
    "long-body": request(body=b"a" * 20_000) + request("GET") + request(body=b"b" * 9_000),
    "many": request("GET") * 40,
    "body-is-request": request(body=request("GET", "/never")) + request("GET"),
    "latin": request("GET", "/a", b"", "X-Name: \u00fc  \t"),
}
REFUSED = {
    "coded": "bad_framing", "list": "bad_framing", "chunked-twice": "bad_framing", "two-types": "bad_framing",
    "no-host": "bad_framing", "two-hosts": "bad_framing", "two-lengths": "bad_framing",
    "length-and-chunks": "bad_framing", "bad-chunk": "bad_framing", "bad-size": "bad_framing",
    "h2c-bad-chunks": "bad_framing", "tls": "bad_request_line", "http2": "bad_request_line",
    "target": "bad_request_line", "folded": "bad_framing", "nul": "bad_framing",
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_bytes_are_the_same_requests_in_single_bytes(name: str):
    whole = read(STREAMS[name])
    assert whole == read(*(STREAMS[name][at : at + 1] for at in range(len(STREAMS[name]))))
    assert not [path for _, path, *_ in whole[0] if "never" in path]
    assert {REFUSED[name]: 1} if name in REFUSED else {} == whole[3]


@settings(deadline=None, max_examples=150)
@given(names=st.lists(st.sampled_from(sorted(STREAMS)), min_size=1, max_size=3), data=st.data())
def test_wherever_the_bytes_are_cut_they_are_the_same_requests(names: list[str], data: st.DataObject):
    stream = b"".join(STREAMS[name] for name in names)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    assert read(stream) == read(*(stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)))


def mutated(draw: st.DrawFn) -> bytes:
    """Streams with a few bytes changed, removed, doubled or put in."""
    stream = bytearray(b"".join(STREAMS[name] for name in draw(st.lists(st.sampled_from(sorted(STREAMS)), max_size=2))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(stream)))
        end = draw(st.integers(at, min(len(stream), at + 8)))
        stream[at:end] = draw(
            st.sampled_from(
                [b"", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b"\0", b",", bytes(stream[at:end]) * 2]
            )
            | st.binary(max_size=3)
        )
    return bytes(stream)


MUTATED = st.composite(mutated)()


@settings(deadline=None, max_examples=300)
@given(stream=MUTATED | st.binary(max_size=60), data=st.data())
@example(stream=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\0", data=None)
def test_any_bytes_are_the_same_requests_or_refusals(stream: bytes, data: st.DataObject | None):
    """Nothing raises; each response is whole; where the bytes are cut makes no difference."""
    seen, out, closed, rejected = read(stream)
    cut = data.draw(st.integers(0, len(stream))) if data is not None and stream else 0
    assert (seen, out, closed) == read(stream[:cut], stream[cut:])[:3] if cut else True
    assert out.count(b"HTTP/1.") == len(seen) + (rejected.total() - sum(one[4] is None for one in seen))
    assert rejected.total() <= 1
    assert closed or not rejected


class _Nothing:
    """The protocol that aiohttp's parser wants."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def reference(stream: bytes) -> list[tuple[str, bytes | None]]:
    """Method and body of the requests that aiohttp's parser finds, up to the first that it refuses."""
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(
            _Nothing(),  # type: ignore[arg-type]
            loop,
            1 << 20,
            max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
            max_headers=HEADERS,
            auto_decompress=False,
        )
        found: list[Any] = []
        with contextlib.suppress(HttpProcessingError):
            for at in range(len(stream)):  # byte by byte: of one piece it would return nothing at an error
                found += parser.feed_data(stream[at : at + 1])[0]
        return [
            (message.method, b"".join(getattr(body, "_buffer", ())))
            for message, body in found
            if body.is_eof() and not body.exception()
        ]
    finally:
        loop.close()


@settings(deadline=None, max_examples=300)
@given(stream=MUTATED)
def test_no_request_is_read_that_another_parser_does_not_find(stream: bytes):
    """aiohttp's parser is the reference. Where another protocol may follow it reads on, and we do not."""
    assume(not re.search(rb"(?i)upgrade|connect |HTTP/1.0|user-agent", stream))
    ours = [(method, body) for method, _, _, _, body in read(stream)[0] if body is not None]
    assert ours == reference(stream)[: len(ours)]


# ---- limits


@contextlib.asynccontextmanager
async def serving(handle: Callable[[ClientRequest], Awaitable[None]], **settings_: Any) -> AsyncIterator[Listening]:
    server = ClientServer(handle)
    listening = await accept(
        server.connection, "listen", "127.0.0.1:0", ListenerAuth(None), settings_.get("most", 100), new_rejections()
    )
    try:
        yield listening
    finally:
        await listening.close()
        server.finish()
        server.cancel()
        await server.close(0.5)


async def connected(it: Listening) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*split_address(it.url.partition("://")[2]))


async def exchanged(it: Listening, *sent: bytes) -> bytes:
    """Return all that the server sends until it closes; raises TimeoutError while it does not."""
    reader, writer = await connected(it)
    with contextlib.suppress(ConnectionError):
        for piece in sent:
            writer.write(piece)
            await writer.drain()
    out = await everything(reader)
    writer.close()
    return out


@pytest.mark.parametrize(
    ("want", "reason", "sent"),
    [
        (431, "head_too_large", b"GET /" + b"SECRET" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (431, "head_too_large", request("GET", "/", b"", "X: " + "SECRET" * 9000)),
        (431, "head_too_large", request("GET", "/", b"", "X" * 40_000 + ": SECRET")),
        (431, "head_too_large", request("GET", "/", b"", *["X-SECRET: a"] * 300)),
        (431, "head_too_large", request("GET", "/", b"", *["X-SECRET: " + "a" * 9000] * 20)),
        (431, "head_too_large", b"GET / HTTP/1.1\r\nX: " + b"SECRET" * HEAD_BYTES),
        (400, "bad_request_line", b"SECRET / HTTP/1.1\r\n\r\n"),
        (400, "bad_request_line", b"GET / HTTP/9.9SECRET\r\n\r\n"),
        (400, "bad_request_line", b"GET / SECRET/1.1\r\n\r\n"),
        (400, "bad_framing", b"GET / HTTP/1.1\r\nHost: x\r\nSECRET\r\n\r\n"),
    ],
)
async def test_what_cannot_be_read_is_refused_counted_and_not_echoed(want: int, reason: str, sent: bytes):
    async with serving(Reader()) as it:
        out = await exchanged(it, sent + request("GET"))
        assert (1, b" %d " % want) == (out.count(b"HTTP/1."), out[8:13])
        assert b"SECRET" not in out
        assert {reason: 1} == +it.rejected


async def test_trailers_without_an_end_are_not_kept():
    async with serving(Reader()) as it:
        sent = request("POST", "/a", b"1\r\na\r\n0\r\nX: ", "Transfer-Encoding: chunked") + b"a" * 2 * HEAD_BYTES
        assert b"HTTP/1.1 400" in await exchanged(it, sent)
        assert {"bad_framing": 1} == +it.rejected


@pytest.mark.parametrize("sent", [b"", b"GET", b"\r\n\r\n", request("GET")[:-2], request("GET") + b"GET"])
async def test_a_head_has_its_time(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "HEAD_S", 0.5)
    async with serving(Reader()) as it:
        assert (await exchanged(it, sent)).count(b"HTTP/1.1 200") == (len(sent) > len(request("GET")))
        assert {"slow_head": 1} == +it.rejected


async def test_idle_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_connection, "KEEPALIVE_S", 1.0)
    async with serving(Reader()) as it:
        assert b"1\n" == (await exchanged(it, request("GET"))).partition(b"\r\n\r\n")[2]
        assert {} == +it.rejected


async def test_many_requests_of_one_connection_are_answered_in_order():
    async with serving(handler := Reader()) as it:
        sent = b"".join(request("GET", f"/{number}") for number in range(2000)) + request(
            "GET", "/", b"", "Connection: close"
        )
        assert [b"%d" % number for number in range(1, 2002)] == re.findall(rb"\n(\d+)\n", await exchanged(it, sent))
        assert [f"/{number}" for number in range(2000)] == [path for _, path, *_ in handler.seen][:-1]


def test_of_many_requests_few_are_parsed_before_their_turn():
    """A megabyte of small requests would be a hundred megabytes of objects."""

    async def run() -> None:
        server = ClientServer(lambda _: asyncio.sleep(60))
        connection, wire = (
            server.connection(Listening(server.connection, ListenerAuth(None), 9, new_rejections())),
            FakeWire(),
        )
        connection.connection_made(wire)
        connection.data_received(request("GET") * 30_000)
        assert len(connection._queue) < QUEUED + client_connection.SLICE_BYTES // len(request("GET")) + 1
        assert wire.paused
        connection.connection_lost(None)

    asyncio.run(run())


def test_chunks_of_a_byte_are_parsed_in_turns():
    """A socket brings 43,000 of them at once, which take 30 ms of the loop."""

    async def run() -> None:
        got = []

        async def reads(asked: ClientRequest) -> None:
            while piece := await asked.body_piece():
                got.append(piece)
            await Response(200, body=b"").send(asked)

        server = ClientServer(reads)
        connection, wire = (
            server.connection(Listening(server.connection, ListenerAuth(None), 9, new_rejections())),
            FakeWire(),
        )
        connection.connection_made(wire)
        most = client_connection.PARTS + client_connection.SLICE_BYTES // len(b"1\r\na\r\n") + 1
        former, body = 0, b"1\r\na\r\n" * 43_000 + b"0\r\n\r\n"
        connection.data_received(request("POST", "/", body, "Transfer-Encoding: chunked"))
        while connection._running is not None:
            assert connection._parts - former <= most
            former = connection._parts
            await asyncio.sleep(0)
        assert b"a" * 43_000 == b"".join(got)
        assert max(map(len, got)) <= 2 * most
        connection.connection_lost(None)

    asyncio.run(run())


BEHIND = {
    "requests": request("GET") * 100,
    "six": request("GET") * 6,
    "body": request("POST", "/", b"a" * 2_000_000),
    "half-body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"a" * 2_000_000,
    "tail": request("GET", "/a", b"", *H2C) + b"a" * 2_000_000,
}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
async def test_disconnect_cancels_the_running_request(behind: bytes):
    running, ended = asyncio.Event(), asyncio.Event()

    async def slow(_: ClientRequest) -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with serving(slow) as it:
        _, writer = await connected(it)
        writer.write(request("GET") + behind)
        await asyncio.wait_for(running.wait(), 30)
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 30)


async def test_too_much_behind_a_running_request_closes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "PIPELINED_S", 0.05)
    async with serving(lambda _: asyncio.sleep(60)) as it:
        assert b"" == await exchanged(it, request("GET") + BEHIND["six"])
        assert {"pipelined": 1} == +it.rejected


async def test_refused_request_may_send_its_body_and_the_next_request():
    """The response would be lost in a connection that is cut while its client still sends."""

    async def refuse(asked: ClientRequest) -> None:
        await Response(413).send(asked)

    async with serving(refuse) as it:
        body = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"
        out = await exchanged(it, body, *[b"a" * 300_000] * 10, request("GET", "/", b"", "Connection: close"))
        assert (2, 0) == (out.count(b"HTTP/1.1 413"), (+it.rejected).total())


async def test_owed_body_ends_with_the_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_connection, "LINGER_S", 0.05)

    async def refuse(asked: ClientRequest) -> None:
        await Response(413).send(asked)

    async with serving(refuse) as it:
        out = await exchanged(it, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        assert 1 == out.count(b"HTTP/1.1 413")


async def test_a_body_that_nobody_reads_is_not_held():
    """A client that sends faster than the handler reads has to wait."""
    go = asyncio.Event()
    held: list[int] = []

    async def late(asked: ClientRequest) -> None:
        await go.wait()
        size = 0
        while piece := await asked.body_piece():
            held.append(len(piece))
            size += len(piece)
        await text_response(f"{size}").send(asked)

    async with serving(late) as it:
        reader, writer = await connected(it)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 30000000\r\n\r\n")
        writer.write(b"a" * 30_000_000)
        await until(lambda: any(one._read_paused for one in it._open), "the client has to wait")  # type: ignore[attr-defined]
        go.set()
        assert (await reader.read()).endswith(b"30000000")
        assert held[0] < 2 * client_connection.BODY_BYTES
        writer.close()


@pytest.mark.parametrize("fault", [ValueError("SECRET"), ConnectionResetError()])
async def test_a_handler_that_fails_leaves_no_open_response(fault: Exception, caplog: pytest.LogCaptureFixture):
    async def fails(asked: ClientRequest) -> None:
        if asked.path == "/begun":
            Response(headers={"Content-Type": "text/plain"}).start(asked)
        raise fault

    async with serving(fails) as it:
        begun = await exchanged(it, request("GET", "/begun") + request("GET"))
        assert (1, 0) == (begun.count(b"HTTP/1.1 200"), begun.count(b"0\r\n\r\n"))
        other = await exchanged(it, request("GET") + request("GET"))
        assert (isinstance(fault, ValueError), 0) == (b"HTTP/1.1 500" in other, other.count(b"SECRET"))


@pytest.mark.parametrize(
    ("response", "method", "version", "want"),
    [
        (Response(200, {"Content-Type": "a"}, b"abc"), "GET", "1.1", b"Content-Type: a\r\nContent-Length: 3\r\n|abc"),
        (Response(200, {"Content-Length": "3"}, b""), "HEAD", "1.1", b"Content-Length: 3\r\n|"),
        (Response(204, {"Content-Length": "0"}), "GET", "1.1", b"|"),
        (Response(304, {"Content-Length": "3"}), "GET", "1.1", b"Content-Length: 3\r\n|"),
        (Response(404), "GET", "1.1", b"Content-Length: 0\r\n|"),
    ],
)
async def test_a_response_is_framed_for_its_request(response: Response, method: str, version: str, want: bytes):
    async with serving(lambda asked: response.send(asked)) as it:
        out = await exchanged(it, request(method, "/", b"", "Connection: close", version=version))
        head, _, body = out.partition(b"\r\n\r\n")
        kept = [line for line in head.split(b"\r\n")[1:] if not line.startswith((b"Date", b"Connection"))]
        assert want == b"".join(line + b"\r\n" for line in kept) + b"|" + body


async def test_a_response_goes_out_before_its_connection_is_cut():
    """A server that is closed waits for clients that still read, also if others have left before."""

    async def large(asked: ClientRequest) -> None:
        Response(200, {"Content-Type": "a"}, b"a" * 20_000_000).put_whole(asked)

    server = ClientServer(large)
    it = await accept(server.connection, "listen", "127.0.0.1:0", ListenerAuth(None), 9, new_rejections())
    assert 20_000_000 < len(await exchanged(it, request("GET", "/", b"", "Connection: close")))
    reader, writer = await connected(it)
    writer.write(request("GET"))
    await reader.readuntil(b"\r\n\r\n")
    await it.close()
    server.finish()
    closing = asyncio.create_task(server.close(5))
    await asyncio.sleep(0)
    assert 20_000_000 == len(await reader.read())
    await closing
    writer.close()


async def test_no_header_breaks_a_line():
    async def odd(asked: ClientRequest) -> None:
        await Response(200, {"X": "a\r\nSet-Cookie: b"}, b"").send(asked)

    async with serving(odd) as it:
        out = await exchanged(it, request("GET"))
        assert (b"500", 0) == (out[9:12], out.count(b"Set-Cookie"))


@pytest.mark.parametrize(
    ("target", "want"),
    [
        ("/a?b?c", ("/a", "?b?c")),
        ("/a#b", ("/a", "")),
        ("/a%2fb", ("/a/b", "")),
        ("/%e2%82%ac?%20", ("/\u20ac", "?%20")),
        ("http://h/a?b", ("/a", "?b")),
        ("http://h", ("/", "")),
    ],
)
def test_a_target_is_path_and_query(target: str, want: tuple[str, str]):
    assert want == read_target("GET", target)
