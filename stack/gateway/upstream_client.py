"""HTTP/1.1 client to the engines, on httptools, with a connection pool.

aiohttp's client, which the watchers use, wakes a task for every piece of a body; for a stream of tokens that is most of
what a gateway costs (docs/internals/benchmark-gateway.md). Invariants: nothing is followed, unpacked or added but Host
and Content-Length. A connection is used again only after a complete answer that said so; if such a connection closes
at once without a byte, the request is sent once more. What is held of an answer that nobody takes is bounded."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

# under the 5 s after which vLLM's server closes an idle connection, or we would reuse one that is closing
KEEPALIVE_S = 3.0
# of an answer, names and values: embeddings as bytes list each input in a header, with some 100 bytes
HEAD_BYTES = 1 << 20
# of a body that is sent in one piece with its head, and kept to be sent again; a larger one gets a new connection
COPY_BYTES = 64 << 10
RESEND_S = 1.0  # in which a kept connection may close that was idle, or had an error before, as uvicorn does
_TOO_LONG = f"the head of the engine's answer is longer than {HEAD_BYTES} bytes, which are not read"
HELD_BYTES = 256 << 10  # of a body, beyond which the engine has to wait
_BEFORE = 100, 102, 103  # may come before the answer; the parser knows that they have no body
Take = Callable[[bytes], bool]
_log = logging.getLogger("gateway")


class Unreachable(Exception):
    """No connection; the message says why. late: because it took too long."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class BrokenConnection(Exception):
    """A connection that ended before its answer, or an answer that is no HTTP."""


class ClosedWithoutResponse(BrokenConnection):
    """A connection that ended without a byte of an answer."""


class HeadTooLong(BrokenConnection):
    """An answer with more headers than are read."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Destination of a URL. base: prefix of its paths. named: its Host header."""

    host: str
    port: int
    tls: bool
    base: str
    named: str


@lru_cache(maxsize=256)
def origin_of(url: str) -> Origin:
    """Reads an http or https URL. Raises ValueError for a port that is none."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Origin(
        parts.hostname or "",
        parts.port or (443 if tls else 80),
        tls,
        parts.path.rstrip("/"),
        parts.netloc.rpartition("@")[2],
    )


class UpstreamClient:
    """Connections to any number of engines, as many as are needed at once; those that are idle are kept for
    `keep_s`."""

    def __init__(self, connect_s: float, keep_s: float = KEEPALIVE_S, tls: ssl.SSLContext | None = None) -> None:
        """tls: of engines with https; without it those that the system trusts."""
        self._tls = tls
        self._connect_s = connect_s
        self._keep_s = keep_s
        self._idle: dict[Origin, list[_Connection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    async def send(
        self,
        url: str,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]],
        body: bytes,
        written: Callable[[], None] | None = None,
        resend: bool = True,
    ) -> UpstreamResponse:
        """The head of the answer, as soon as it is there. target: path and query, below the URL's own path. written:
        called when the system has taken the whole request, which may be long before its answer; from then on nothing
        here holds the body. It is not called over TLS, nor on a kept connection. resend: once more, if that closes.

        Raises Unreachable, BrokenConnection, and ValueError for a header that would not stay one line."""
        origin = origin_of(url)
        lines = [
            f"{method} {origin.base}{target} HTTP/1.1",
            f"Host: {origin.named}",
            *[f"{name}: {value}" for name, value in headers],
        ]
        if body or method not in ("GET", "HEAD"):
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1 or "\0" in head:
            raise ValueError("a header with a line break in it")
        request = [f"{head}\r\n\r\n".encode("utf-8", "surrogateescape"), body]
        if len(body) <= COPY_BYTES:
            request = [b"".join(request)]
        written = None if origin.tls else written  # unknown: encrypted data lie in a buffer below the one that is seen
        kept = self._kept(origin) if len(body) <= COPY_BYTES else None
        answer = (kept or await self._connected(origin)).ask(request, method, None if kept else written)
        began, body, request = asyncio.get_running_loop().time(), b"", request if kept else []
        try:
            try:
                await answer.begun
            except ClosedWithoutResponse:
                if kept is None or not resend or asyncio.get_running_loop().time() - began > RESEND_S:
                    raise
                _log.info("%s closed a kept connection without a response; the request is sent again", origin.named)
                answer = (await self._connected(origin)).ask(request, method, written)
                await answer.begun
        except BaseException:
            answer.close()
            raise
        return answer

    def _kept(self, origin: Origin) -> _Connection | None:
        idle, now = self._idle.get(origin), asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()
            if connection.usable and now - connection.idle_since < self._keep_s:
                return connection
            connection.cut()
        return None

    async def _connected(self, origin: Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                transport, connection = await loop.create_connection(
                    lambda: _Connection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=(self._tls or _trusted()) if origin.tls else None,
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_s:g} s", late=True) from None
        except (OSError, UnicodeError) as error:  # the second for a name that cannot be one
            raise Unreachable(_why(error)) from error
        # so that a host that vanished is noticed
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def keep(self, connection: _Connection) -> None:
        """Takes a connection back that is ready for another request."""
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(self._keep_s, self._sweep)

    def _sweep(self) -> None:
        """Closes what has been idle for too long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for origin, idle in list(self._idle.items()):
            self._idle[origin] = young = [it for it in idle if it.usable and now - it.idle_since < self._keep_s]
            for connection in set(idle) - set(young):
                connection.cut()
            if not young:
                del self._idle[origin]
        self._sweeping = loop.call_later(self._keep_s, self._sweep) if self._idle else None

    def close(self) -> None:
        """Closes what is idle; what is in use belongs to its user."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for idle in self._idle.values():
            for connection in idle:
                connection.cut()
        self._idle.clear()


@lru_cache(maxsize=1)
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()


def _why(error: Exception) -> str:
    """In words. Not every error has the same ones: of a certificate, of TLS, of the system; and one that has none is a
    handshake cut short."""
    words = (getattr(error, name, None) for name in ("verify_message", "reason", "strerror"))
    return next(filter(None, words), None) or str(error) or "it hung up"


class _Connection(asyncio.Protocol):
    """One connection with at most one request at a time. The parser calls the methods without underscore."""

    def __init__(self, client: UpstreamClient, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._client = client
        self._wire: asyncio.Transport  # from connection_made on
        self._lost = False
        self._answer: UpstreamResponse | None = None
        self._written: Callable[[], None] | None = None  # whom to tell when the request is out
        self._pieces: list[bytes] = []  # of the body, out of the bytes that are being parsed
        self._reason = b""
        self._head: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._bodiless_bytes = 0  # that have come since any of a body did
        self._ended = False  # the answer is complete; the connection may not be asked before this is forgotten
        self._reusable = False
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)

    @property
    def usable(self) -> bool:
        return not self._lost and not self._wire.is_closing()

    def ask(self, request: list[bytes], method: str, written: Callable[[], None] | None) -> UpstreamResponse:
        self._answer = answer = UpstreamResponse(self, bodiless=method == "HEAD")
        self._reason, self._head, self._head_bytes, self._bodiless_bytes, self._ended = b"", [], 0, 0, False
        self._written = written
        for piece in request:
            self._wire.write(piece)
        if not self._wire.get_write_buffer_size():
            self.resume_writing()
        return answer

    def cut(self) -> None:
        if not self._lost:
            self._wire.abort()

    def pause(self) -> None:
        if self.usable:
            self._wire.pause_reading()

    def resume(self) -> None:
        if self.usable:
            self._wire.resume_reading()

    def release(self) -> None:
        """The answer needs its connection no more."""
        self._answer = self._written = None
        if self._ended and self._reusable and self.usable and not self._wire.get_write_buffer_size():
            self.idle_since = asyncio.get_running_loop().time()
            self._client.keep(self)
        else:
            self.cut()

    # ---- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._wire.set_write_buffer_limits(high=0)  # so that the call below means that nothing is left

    def resume_writing(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written()

    def data_received(self, data: bytes) -> None:
        answer, pieces = self._answer, self._pieces
        if answer is None or self._ended:  # nobody asked
            self._reusable = False
            self.cut()
            return
        broken: Exception | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, BrokenConnection) as error:
            cause = error.__context__ or error
            broken = (
                cause
                if isinstance(cause, HeadTooLong)
                else BrokenConnection(f"the engine's answer is no HTTP: {cause}")
            )
            self._reusable = False
        if pieces:
            self._bodiless_bytes = 0
            if not answer.bodiless:
                answer.got(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()
        elif (grown := self._bodiless_bytes + len(data)) <= HEAD_BYTES:
            self._bodiless_bytes = grown
        else:  # a line of a head, or of trailers, that does not end; the parser would keep it all
            broken = broken or HeadTooLong(_TOO_LONG)
        if self._ended:  # before what broke: that came after it
            answer.ends(None)
        elif broken is not None:
            answer.ends(broken)
            self.cut()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost, answer = True, self._answer
        if answer is not None and not self._ended:
            whole = error is None and answer.until_close
            kind = BrokenConnection if self._bodiless_bytes or answer.status else ClosedWithoutResponse
            answer.ends(None if whole else kind("the connection to the engine broke"))

    # ---- the parser

    def on_message_begin(self) -> None:
        if self._ended:  # of a second answer nothing may reach who asked for the first
            raise BrokenConnection("more than one answer")

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES:
            raise HeadTooLong(_TOO_LONG)
        self._head.append((name, value))

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None:
            return
        if status in _BEFORE:
            self._reason, self._head = b"", []
            return
        if status < 200:
            raise BrokenConnection(f"nobody asked for status {status}")
        answer.starts(status, self._reason, self._head)
        self._head = []  # what comes now are trailers
        if answer.bodiless:  # the parser does not know, and would wait for a body
            self._ended, self._reusable = True, False

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status:
            self._reusable = not self._ended and self._parser.should_keep_alive()
            self._ended = True


class UpstreamResponse:
    """Response of an engine. Its body goes one of three ways: `read` as a whole, `chunk` by chunk, or `pump`ed into a
    function."""

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_held",
        "_paused",
        "_take",
        "_waiter",
        "begun",
        "bodiless",
        "content_type",
        "headers",
        "reason",
        "status",
    )

    def __init__(self, connection: _Connection, *, bodiless: bool) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bodiless = bodiless
        self.status = 0
        self.reason = ""
        self.content_type = ""  # without parameters, in lower case
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._connection: _Connection | None = connection
        self._held = bytearray()
        self._take: Take | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._ended = False
        self._error: Exception | None = None

    @property
    def content_length(self) -> int | None:
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    @property
    def until_close(self) -> bool:
        """Return whether the end of the connection is how this body ends."""
        return self.status > 0 and "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers

    async def read(self, most: int | None = None) -> bytes:
        """The whole body, or as much of it. Raises Broken."""
        if self._ended and self._error is None:  # it came along with its head, as nearly always
            held, self._held = bytes(self._held[:most]), bytearray()
            return held
        whole = bytearray()
        while (most is None or len(whole) < most) and (chunk := await self.chunk()):
            whole += chunk
        return bytes(whole[:most])

    async def chunk(self) -> bytes:
        """Return the next bytes of the body; empty at the end. Raises Broken."""
        while not self._held and not self._ended:
            self._go_on()
            await self._change()
        if self._held:
            held, self._held = bytes(self._held), bytearray()
            self._go_on()
            return held
        if self._error is not None:
            raise self._error
        return b""

    async def pump(self, take: Take) -> bool:
        """Gives to `take` whatever comes, as it comes, until that says False or raises, or the body ends; whether more
        may come. Raises Broken."""
        if self._held:
            held, self._held = bytes(self._held), bytearray()
            if not take(held):
                return True
        if not self._ended:
            self._take = take
            self._go_on()
            try:
                await self._change()
            finally:
                self._take = None
        if self._error is not None and not self._held:
            raise self._error
        return bool(self._held) or not self._ended

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Keeps the connection after a complete answer, cuts it otherwise."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._take = None
            self._go_on(connection)
            connection.release()

    # ---- the connection

    def starts(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = CIMultiDict(
            [(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in headers]
        )
        if (coding := self.headers.get("Transfer-Encoding", "chunked")).lower() != "chunked":
            raise BrokenConnection(f"nobody asked for the transfer coding {coding[:40]!r}")
        self.content_type = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        text = reason.decode("utf-8", "surrogateescape")
        self.status, self.reason = status, text if text.isprintable() else ""
        if not self.begun.done():
            self.begun.set_result(None)

    def got(self, data: bytes) -> None:
        if self._take is None:
            self._held += data
            if len(self._held) > HELD_BYTES and self._connection is not None:
                self._paused = True
                self._connection.pause()
            self._changed()
            return
        take, self._take = self._take, None
        try:
            if take(data):
                self._take = take
                return
        except Exception as error:  # raised where the pump is awaited
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
        if self._connection is not None:
            self._paused = True
            self._connection.pause()
        self._changed()

    def ends(self, error: Exception | None) -> None:
        self._ended, self._error = True, self._error or error
        if not self.begun.done():
            self.begun.set_exception(error or BrokenConnection("no answer"))
        self._changed()

    def _changed(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _go_on(self, connection: _Connection | None = None) -> None:
        if self._paused:
            self._paused = False
            if (connection := connection or self._connection) is not None:
                connection.resume()
