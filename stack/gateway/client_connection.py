"""HTTP/1.1 server for clients of the gateway, on httptools.

aiohttp's server makes several objects and wakes two tasks for a request, which is half of what the gateway costs for
one (docs/internals/benchmark-gateway.md). Invariants: what two servers could read in two ways is refused; behind a
request whose end is not certain nothing is read as another. Requests of a connection are answered one by one, in order.
A client that leaves cancels its handler. What is held of a connection is bounded, and so is the time for a head."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, cast

import httptools
from multidict import CIMultiDict

from exporters.net import listener
from exporters.net.listener import Listening
from exporters.net.unreadable_request import (
    BAD_FRAMING,
    BAD_REQUEST_LINE,
    BAD_TARGET,
    HEAD_TOO_LARGE,
    UnreadableRequest,
)
from stack.gateway.client_request import BadRequestTarget, ClientRequest, text_response

LINE_BYTES = 32 << 10  # of a request line, and of a header
HEAD_BYTES = 128 << 10  # of a head, and of chunk sizes and trailers without any byte of a body between them
HEADERS = 128
# of bytes that may hold many requests; each costs a kilobyte, and no more are parsed than wait
SLICE_BYTES = 4 << 10
PARTS = 1_000  # of bodies in chunks, which may have a byte each, that are parsed before others have their turn
QUEUED = 32  # requests that wait behind one; then nothing more is read until half of them are answered
BODY_BYTES = 256 << 10  # that nobody has taken; then nothing more is read
KEEPALIVE_S = 3630.0  # of an idle connection: longer than a proxy keeps it
LINGER_S = 10.0  # wait for the rest of a body that nobody reads; a connection that is cut may lose its response
_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding"))
# Headers that may occur once; Content-Type also twice with one value. Two servers could pick different values.
_ONCE: Final = _FRAMING | {b"content-type", b"host"}
_LINE_ERRORS = ("Invalid HTTP version", "Expected ", "Pause on PRI/Upgrade")  # of the parser, about the first line

_log = logging.getLogger("gateway.http")


class _Rejected(Exception):
    """A head that the parser takes and we do not."""

    def __init__(self, refusal: UnreadableRequest) -> None:
        self.refusal = refusal


class _Over(Exception):
    """Bytes behind the last request of a connection."""


class ClientServer:
    """Connections of clients, and the handler of their requests, which sends a response to each."""

    def __init__(self, handle: Callable[[ClientRequest], Awaitable[None]]) -> None:
        self.handle = handle
        self.connections: set[ClientConnection] = set()
        self.closing = False
        self._empty = asyncio.Event()

    def connection(self, listening: Listening) -> ClientConnection:
        """Return the protocol of an accepted connection."""
        return ClientConnection(self, listening)

    def finish(self) -> None:
        """Close idle connections now, and each of the others behind its running request."""
        self.closing = True
        for connection in list(self.connections):
            connection.finish()

    def cancel(self) -> None:
        """Cancel what runs. What was sent still goes out."""
        for connection in list(self.connections):
            connection.cancel()

    async def close(self, seconds: float) -> None:
        """Wait until all connections have ended; cut them after so long."""
        if self.connections:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        for connection in list(self.connections):
            connection.cut()

    def gone(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()


class ClientConnection(asyncio.Protocol):
    """One connection. The parser calls the methods on_*."""

    def __init__(self, server: ClientServer, listening: Listening) -> None:
        self.welcome: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._listening = listening
        self._rejected: Counter[str] = listening.rejected
        self._wire: asyncio.Transport | None = None
        self._lost = False
        self._parser = httptools.HttpRequestParser(self)
        # the head that is being read
        self._in_head = False
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0  # parsed since the beginning of a head, or since the last byte of a body
        self._bodyless = True  # whether what is being parsed has no byte of a body
        # requests, in order: the running one, those that wait, and the one whose body is being read, if any
        self._running: ClientRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._queue: deque[ClientRequest | UnreadableRequest] = deque()
        self._reading: ClientRequest | None = None
        self._left = 0  # bytes of its body, where its length is known
        self._parts = 0  # of all bodies so far
        self._restart = b""  # head for the body behind an upgrade
        self._restarting = False
        self._last = False  # no request follows the one that was read last
        self._deaf = False  # what comes is dropped; it is read to notice a disconnect
        self._tail = b""  # not parsed yet
        self._heads = self._answered = 0
        self._finishing = False
        self._closes = False  # the latest response says so
        self._read_paused = False
        self._drained: asyncio.Future[None] | None = None  # while the client does not read
        self.full = False  # the client does not read what was sent to it
        self._late: asyncio.TimerHandle | None = None
        self._overrun: asyncio.TimerHandle | None = None
        self._lingering: ClientRequest | None = None  # answered; the rest of its body is dropped
        self._linger: asyncio.TimerHandle | None = None
        self._keepalive: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # ---- the listener

    @property
    def idle(self) -> bool:
        return self._answered == self._heads > 0 and self._late is None

    @property
    def silent(self) -> bool:
        return self._heads == 0 or self._late is not None

    def cut(self) -> None:
        if self._wire is not None:
            self._wire.abort()
        elif self.welcome is not None:  # still in its handshake
            self.welcome.cancel()

    # ---- the server

    def finish(self) -> None:
        """Take no more requests; close behind the running one."""
        self._finishing = self._last = True
        self._queue.clear()
        if self._running is None:
            self._close()
        elif self._reading is not self._running:
            self._reading, self._deaf = None, True

    def cancel(self) -> None:
        """Cancel what runs. What was sent still goes out."""
        if self._task is not None:
            self._task.cancel()
        self._close()

    # ---- the handler

    @property
    def task(self) -> asyncio.Task[None]:
        """Return the task of the running request."""
        if self._task is None:
            raise RuntimeError("no request runs")
        return self._task

    def writable(self) -> asyncio.Transport:
        """Return the transport. Raises ConnectionResetError if the client is gone."""
        wire = self._wire
        if wire is None or wire.is_closing():
            raise ConnectionResetError("the client is gone")
        return wire

    async def drain(self) -> None:
        """Wait while the client does not read. Raises ConnectionResetError if it is gone."""
        if self.full:
            self.writable()
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await self._drained

    def taken(self) -> None:
        """Note that the handler took a part of its body."""
        if self._read_paused and not self._tail:
            self._go_on()

    # ---- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = wire = cast(asyncio.Transport, transport)
        plain = wire.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.connections.add(self)
        self._late = self._loop.call_later(listener.HEAD_S, self._too_slow)
        self._idle_since = self._loop.time()
        self._keepalive = self._loop.call_later(KEEPALIVE_S, self._look_idle)
        if self._server.closing:
            self.finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = self._deaf = True
        for timer in (self._late, self._overrun, self._linger, self._keepalive):
            if timer is not None:
                timer.cancel()
        self._queue.clear()
        self._tail = b""
        self._listening.gone(self)
        self._server.gone(self)
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(ConnectionResetError("the client is gone"))
            self._drained.exception()  # its waiter may be cancelled first
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        heads = self._heads
        if self._tail:
            self._tail += data
        elif len(data) <= SLICE_BYTES:
            self._feed(data)
        else:
            self._feed_slices(data)
        if self._late is not None and self._heads != heads:
            self._late.cancel()
            self._late = None
        if self._running is None:
            if self._queue:
                self._next()
            elif self._late is None:
                self._late = self._loop.call_later(listener.HEAD_S, self._too_slow)
        if self._queue:
            self._bound()

    def _feed_slices(self, data: bytes) -> None:
        """Parse as many requests as may wait, and as many parts of bodies as may be parsed at once; keep the rest."""
        view, at, most = memoryview(data), 0, self._parts + PARTS
        while at < len(data) and not self._deaf:
            if len(self._queue) >= QUEUED or self._parts > most:
                self._tail = data[at:]
                self._pause()
                if self._parts > most:
                    self._loop.call_soon(self._go_on)
                return
            size = SLICE_BYTES if self._reading is None else max(SLICE_BYTES, self._left)
            self._feed(view[at : at + size])
            at += size

    def _feed(self, data: bytes | memoryview) -> None:
        self._bodyless, behind = True, None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            behind = upgrade.args[0]
        except httptools.HttpParserError as error:
            self._broken(error)
        if behind is not None:
            self._on_upgrade(data[behind:])
        elif self._in_head or self._reading is not None:
            self._head_bytes = self._head_bytes + len(data) if self._bodyless else 0
            if self._head_bytes > HEAD_BYTES:
                self._refuse(HEAD_TOO_LARGE if self._in_head else BAD_FRAMING)

    def _on_upgrade(self, rest: bytes | memoryview) -> None:
        """Go on behind a head with Upgrade. The parser takes what follows for another protocol, but it is the body.

        The upgrade is declined (RFC 9110, 7.8). A new parser reads the body, by a head with the same framing."""
        restart, self._restart = self._restart, b""
        if not restart:
            self._deaf = True
            return
        self._parser, self._restarting = httptools.HttpRequestParser(self), True
        try:
            self._parser.feed_data(restart)
        except httptools.HttpParserError as error:
            self._broken(error)
        self._restarting = False
        if self._reading is not None:
            self._feed(rest)

    def _broken(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
        if isinstance(cause, _Rejected):
            self._refuse(cause.refusal)
        elif isinstance(cause, _Over) or (self._last and self._reading is None and not self._in_head):
            self._deaf = True  # it came behind the last request
        elif cause is not None:
            raise cause
        elif self._reading is not None or self._headers:
            self._refuse(BAD_FRAMING)
        elif isinstance(error, httptools.HttpParserInvalidURLError):
            self._refuse(BAD_TARGET)
        elif isinstance(error, httptools.HttpParserInvalidMethodError) or str(error).startswith(_LINE_ERRORS):
            self._refuse(BAD_REQUEST_LINE)
        else:
            self._refuse(BAD_FRAMING)

    def _refuse(self, refusal: UnreadableRequest) -> None:
        """End the connection behind what cannot be read: a broken body ends its own request, anything else gets a
        response of its own."""
        self._deaf = self._last = True
        self._in_head = False
        self._rejected[refusal.reason] += 1
        reading, self._reading = self._reading, None
        if reading is None:
            self._heads += 1
            self._queue.append(refusal)
            return
        reading.breaks()
        if reading is self._lingering:
            self._after(reading)

    # ---- requests

    def _next(self) -> None:
        """Begin the next request."""
        first = self._queue.popleft()
        if isinstance(first, ClientRequest):
            self._running = first
            self._task = self._loop.create_task(self._serve(first))
            return
        self._answered += 1
        with contextlib.suppress(ConnectionError):
            request = ClientRequest(self, "GET", "/", CIMultiDict(), chunks=True, persistent=False)
            text_response(f"{first.sentence}\n", first.status).put_whole(request)
        self._close()

    async def _serve(self, request: ClientRequest) -> None:
        try:
            await self._server.handle(request)
        except ConnectionError:
            pass
        except Exception:
            _log.exception("a request failed inside the gateway")
            if request.response is None:
                response = text_response("500 Internal Server Error\n", 500)
                response.closes = True
                with contextlib.suppress(ConnectionError):
                    await response.send(request)
        finally:
            self._task = None
            self._served(request)

    def _served(self, request: ClientRequest) -> None:
        """Go on behind a request whose handler has ended."""
        self._answered += 1
        response, request.response = request.response, None  # else both wait for the collector
        wire = self._wire
        if self._lost or wire is None or wire.is_closing():
            return
        self._closes = response is not None and response.closes
        if response is None or not response.ended:
            self.cut()
        elif request.owes_body:
            request.discard()
            self._lingering = request
            self._linger = self._loop.call_later(LINGER_S, self._close)
            self._go_on()
        else:
            self._after(request)

    def _after(self, request: ClientRequest) -> None:
        """Go on behind a request that is over, and whose body has come or never will."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = self._lingering = None
        self._running = None
        if request.broken or self._finishing or self._closes:
            self._close()
            return
        if self._tail or self._read_paused:
            self._go_on()
        if self._queue:
            self._next()
            return
        self._idle_since = self._loop.time()
        if self._in_head and self._late is None:
            self._late = self._loop.call_later(listener.HEAD_S, self._too_slow)

    def _go_on(self) -> None:
        """Parse what was kept, and read on, as far as there is room."""
        if len(self._queue) > QUEUED // 2:
            return
        if tail := self._tail:
            self._tail = b""
            self._feed_slices(tail)
        held = sum(each.body_bytes for each in self._queue if isinstance(each, ClientRequest))
        if self._running is not None:
            held += self._running.body_bytes
        if self._read_paused and not self._tail and held <= BODY_BYTES and not self._lost:
            self._read_paused = False
            cast(asyncio.Transport, self._wire).resume_reading()
        if self._queue:
            self._bound()

    def _pause(self) -> None:
        if not self._read_paused and self._wire is not None:
            self._read_paused = True
            self._wire.pause_reading()

    def _close(self) -> None:
        """Close behind what was sent."""
        self._deaf = True
        self._queue.clear()
        self._tail = b""
        if self._wire is not None:
            self._wire.close()

    # ---- timers

    def _bound(self) -> None:
        if self._overrun is None and self._is_overrun():
            self._overrun = self._loop.call_later(listener.PIPELINED_S, self._check_overrun, self._answered)

    def _is_overrun(self) -> bool:
        """Return whether more waits behind one request than is kept: nothing more may be read, and a disconnect would
        pass unnoticed."""
        bodies = sum(each.body_bytes for each in self._queue if isinstance(each, ClientRequest))
        return len(self._queue) > listener.PIPELINED or bodies > listener.PIPELINED_BYTES

    def _check_overrun(self, answered: int) -> None:
        """Cut the connection if it is still overrun and has answered nothing since `answered` was recorded."""
        self._overrun = None
        if not self._is_overrun():
            return
        if answered == self._answered:
            self._rejected["pipelined"] += 1
            self.cut()
        else:
            self._bound()

    def _too_slow(self) -> None:
        self._rejected["slow_head"] += 1
        self.cut()

    def _look_idle(self) -> None:
        """Close a connection that has been idle for too long."""
        left = KEEPALIVE_S
        if self._running is None:
            left += self._idle_since - self._loop.time()
        if left <= 0:
            self._close()
        else:
            self._keepalive = self._loop.call_later(left, self._look_idle)

    # ---- the parser

    def on_message_begin(self) -> None:
        if self._restarting:
            return
        if self._last:
            raise _Over
        self._in_head, self._target, self._headers, self._head_bytes = True, b"", [], 0

    def on_url(self, piece: bytes) -> None:
        if not self._restarting:
            self._target += piece
            if len(self._target) > LINE_BYTES:
                raise _Rejected(HEAD_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer, or the head of a body behind an upgrade
            return
        if len(name) + len(value) > LINE_BYTES or len(self._headers) >= HEADERS:
            raise _Rejected(HEAD_TOO_LARGE)
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._restarting:
            return
        parser, raw = self._parser, self._headers
        method, chunks = parser.get_method().decode("latin-1"), parser.get_http_version() >= "1.1"
        names = [name.lower() for name, _ in raw]
        unusual = len(set(names)) != len(names) or b"transfer-encoding" in names
        if (unusual and _is_ambiguous(raw)) or (chunks and b"host" not in names):
            raise _Rejected(BAD_FRAMING)
        # the parser leaves white space at the end of a value (RFC 9110, 5.5)
        headers = CIMultiDict(
            [(name.decode("latin-1"), value.rstrip(b" \t").decode("utf-8", "surrogateescape")) for name, value in raw]
        )
        # With Upgrade or CONNECT another protocol may follow. HTTP/1.0 has no chunks, so a proxy on the path may see
        # another end of the body (RFC 9112, 6.1).
        certain = b"upgrade" not in names and method != "CONNECT" and (chunks or b"transfer-encoding" not in names)
        target, persistent = self._target.decode("utf-8", "surrogateescape"), certain and parser.should_keep_alive()
        try:
            request = ClientRequest(self, method, target, headers, chunks=chunks, persistent=persistent)
        except BadRequestTarget:
            raise _Rejected(BAD_TARGET) from None
        self._last, self._in_head, self._head_bytes = not persistent, False, 0
        self._heads += 1
        self._left = request.content_length or 0
        self._reading = request
        self._queue.append(request)
        if parser.should_upgrade() and method != "CONNECT":
            framing = [b"%b: %b\r\n" % line for line, name in zip(raw, names, strict=True) if name in _FRAMING]
            if framing:
                self._restart = b"POST / HTTP/1.1\r\nHost: x\r\n%b\r\n" % b"".join(framing)

    def on_body(self, piece: bytes) -> None:
        self._bodyless = False
        self._left -= len(piece)
        self._parts += 1
        reading = self._reading
        if reading is not None and reading is not self._lingering:
            reading.got(piece)
            if reading.body_bytes > BODY_BYTES:
                self._pause()

    def on_message_complete(self) -> None:
        if self._restart:
            return
        reading, self._reading = self._reading, None
        if self._last:
            self._deaf = True
        if reading is not None:
            reading.ends()
            if reading is self._lingering:
                self._after(reading)


def _is_ambiguous(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether two servers could read two values of a header, or see two ends of the body: a Transfer-Encoding is
    chunked and nothing else (the parser also takes lists that end so)."""
    for name in _ONCE:
        values = [value for each, value in headers if each.lower() == name]
        if len(values) > 1 and (name != b"content-type" or len(set(values)) > 1):
            return True
        if values and name == b"transfer-encoding" and values[0].strip(b" \t").lower() != b"chunked":
            return True
    return False
