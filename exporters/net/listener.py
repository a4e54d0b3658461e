"""HTTP listener of all servers: TLS and auth from a web configuration file, and limits for clients.

aiohttp bounds the size of a request head but not its time, and no numbers. So connections are accepted here one by
one, with the current TLS settings, and each is an aiohttp connection with a timer on its heads. A complete request
and its response pass through no further layer, except the auth check if configured."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, cast

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from exporters.net.addresses import bound_sockets
from exporters.net.listener_auth import ListenerAuth, TooMany
from exporters.net.unreadable_request import refusal_of

# deadline of a head after the connection, or after its first byte on a kept connection
HEAD_S = 10.0
HANDSHAKE_S = 10.0
GOODBYE_S = 2.0  # wait for the peer's TLS close
CONNECTIONS = 512  # concurrent, for metrics and dashboards
CLIENTS = 10_000  # concurrent, for the gateway's clients; fewer if descriptors are scarce
DESCRIPTORS = 65_536  # requested limit
KEPT_BACK = 256  # reserved for files, engines and the other listeners
ACCEPT_AGAIN_S = 0.2
LOOK_AGAIN_S = 0.05  # pause after a search without result: it takes milliseconds at 10,000 connections
# at the limit, this fraction of connections is closed at a time, so that a flood does not cost a search per connection
ROOM_SHARE = 16
# pipelined requests; aiohttp stops reading at 32 and then misses a disconnect
PIPELINED = 4
PIPELINED_BYTES = 64 << 10  # pipelined body bytes; aiohttp stops reading at twice as many
# time over these limits before the connection is cut, so that short requests pass in any number
PIPELINED_S = 0.5
TELL_EVERY_S = 60.0
# request key: authenticated by the listener
AUTHENTICATED: Any = getattr(web, "RequestKey", lambda name, _: name)("vllm_watch.let_in", bool)

log = logging.getLogger("vllm_watch.listener")

# Reasons for a rejection before the request is handled; label values.
REASONS = (
    "login",
    "logins_waiting",
    "slow_head",
    "handshake",
    "gave_way",
    "full",
    "pipelined",
    "head_too_large",
    "bad_request_line",
    "bad_framing",
)


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def clients_at_most() -> int:
    """Return the limit of client connections, and raise the soft limit of descriptors where allowed.

    Each client connection may need one to an engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(32, min(CLIENTS, (max(soft, wanted) - KEPT_BACK) // 2))


def new_rejections() -> Counter[str]:
    """Return a counter of rejections with all reasons at 0, so that the first rejection is an increase."""
    return Counter(dict.fromkeys(REASONS, 0))


class ServedConnection(Protocol):
    """Connection of a client, as the listener sees it; an asyncio.Protocol.

    welcome: the task of its TLS handshake. It calls Listening.gone when it is lost."""

    welcome: asyncio.Task[None] | None

    @property
    def idle(self) -> bool:
        """Return True if every request was answered and no further data arrived."""

    @property
    def silent(self) -> bool:
        """Return True while a head, or before it a handshake, is incomplete."""

    def cut(self) -> None:
        """Close at once, without a TLS close: a client that is slow with a head may be slow with that too."""


class Listening:
    """One listening address of a server. url: as clients write it, with the resolved port."""

    def __init__(
        self,
        connection: Callable[[Listening], ServedConnection],
        protection: ListenerAuth,
        most: int,
        rejected: Counter[str],
    ) -> None:
        """connection: makes the protocol of an accepted connection."""
        self.url = ""
        self.rejected = rejected
        self._connection = connection
        self._protection = protection
        self._most = most
        self._open: dict[ServedConnection, None] = {}  # open connections in the order of acceptance
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepted: dict[ServedConnection, socket.socket] = {}  # whose welcome has not begun
        self._tell_at = self._look_at = 0.0

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)
        host, port, *_ = sockets[0].getsockname()
        scheme = "https" if self._protection.context() else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        for each in sockets:
            self._watch(each)

    async def close(self) -> None:
        """Stop accepting connections. Open connections belong to the server."""
        loop, closing, self._sockets = asyncio.get_running_loop(), self._sockets, []
        for each in closing:
            loop.remove_reader(each)
            each.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def gone(self, connection: ServedConnection) -> None:
        self._open.pop(connection, None)

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._sockets:  # not closed in the meantime
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. Called by the event loop, because a cancelled await of sock_accept may lose one."""
        loop = asyncio.get_running_loop()
        try:
            wire, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # already gone
            return
        except OSError as error:  # out of descriptors
            self._tell("cannot accept a connection: %s", error.strerror)
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_AGAIN_S, self._watch, listener)
            return
        if len(self._open) >= self._most and not self._make_room():
            self._tell("%d connections are open and all are busy: new ones are closed", self._most)
            self.rejected["full"] += 1
            wire.close()
            return
        wire.setblocking(False)
        connection = self._connection(self)
        self._open[connection] = None
        self._accepted[connection] = wire
        connection.welcome = self._do(self._welcome(connection, wire))
        connection.welcome.add_done_callback(lambda _: self._close_unwelcomed(connection))

    def _close_unwelcomed(self, connection: ServedConnection) -> None:
        """Close a connection whose welcome was cancelled before it began; its client would wait for ever."""
        if (wire := self._accepted.pop(connection, None)) is not None:
            wire.close()
            self.gone(connection)

    def _make_room(self) -> bool:
        """Close the oldest idle connections, else the oldest with an incomplete head. Return True if any was closed.

        A silent client cannot keep others out: it would have to open the maximum number of connections while another
        client's head is in flight."""
        now, share = asyncio.get_running_loop().time(), -(-self._most // ROOM_SHARE)
        if now < self._look_at:
            return False
        found = list(itertools.islice((one for one in self._open if one.idle), share))
        found = found or list(itertools.islice((one for one in self._open if one.silent), share))
        for one in found:
            one.cut()
            self.gone(one)
        self.rejected["gave_way"] += len(found)
        self._look_at = now if found else now + LOOK_AGAIN_S
        return bool(found)

    async def _welcome(self, connection: ServedConnection, wire: socket.socket) -> None:
        self._accepted.pop(connection, None)
        try:
            context = self._protection.context()
            waits = (
                {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": GOODBYE_S}
                if context
                else {}
            )
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: cast(asyncio.Protocol, connection), wire, **cast(Any, waits)
            )
        except (OSError, ssl.SSLError):  # failed or late TLS handshake
            self.rejected["handshake"] += 1
            self.gone(connection)
        except BaseException:
            self.gone(connection)
            raise

    def _tell(self, what: str, about: object) -> None:
        if (now := asyncio.get_running_loop().time()) >= self._tell_at:
            self._tell_at = now + TELL_EVERY_S
            log.warning("%s: " + what, self.url, about)


class _Connection(web.RequestHandler):
    """aiohttp connection that is cut when a head takes too long.

    It reads two aiohttp internals: the number of complete heads, and what start() waits for."""

    def __init__(self, listening: Listening, server: web.Server) -> None:
        made: dict[str, Any] = {**server._kwargs, "logger": _http_log()}
        super().__init__(server, loop=asyncio.get_running_loop(), **made)
        self.welcome: asyncio.Task[None] | None = None
        self._listening = listening
        self._late: asyncio.TimerHandle | None = None
        self._answered = 0
        # index of the last accepted request; nothing after it is parsed as a request
        self._last_body: StreamReader | None = None
        self._overrun: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Return True if every request was answered and no further data arrived.

        A connection that still owes the body of an answered request is idle: aiohttp waits 10 s for such a body and
        discards it."""
        return self._answered == self._request_count > 0 and self._late is None

    @property
    def silent(self) -> bool:
        """Return True while a head, or before it a handshake, is incomplete."""
        return self._request_count == 0 or self._late is not None

    def _awaits(self) -> bool:
        return (waiter := self._waiter) is not None and not waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late = self._loop.call_later(HEAD_S, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self._last_body is not None and self._last_body.is_eof():
            return  # discarded, but read to notice a disconnect
        heads = self._request_count
        super().data_received(data)
        if self._request_count != heads:
            if self._late is not None:
                self._late.cancel()
                self._late = None
            self._end_behind_last(self._request_count - heads)
        elif self._late is None and self._awaits():
            self._late = self._loop.call_later(HEAD_S, self._too_slow)
        if self._overrun is None and self._messages and self._is_overrun():
            self._overrun = self._loop.call_later(PIPELINED_S, self._check_overrun, self._answered)

    def _make_error_handler(self, fault: Any) -> Handler:
        """Return the handler of a request that the parser rejected."""
        status, reason, sentence = refusal_of(fault.exc)
        self._listening.rejected[reason] += 1

        async def refuse(request: web.BaseRequest) -> web.StreamResponse:
            refusal = web.Response(status=status, text=f"{sentence}\n")
            refusal.force_close()
            return refusal

        return refuse

    def _end_behind_last(self, new: int) -> None:
        """Close the connection after the first of the `new` requests that must end it; discard what follows."""
        queued = self._messages
        for at in range(len(queued) - new, len(queued)):
            message, body = queued[at]
            if _ends_connection(message):
                if isinstance(message, RawRequestMessage):
                    queued[at] = message._replace(should_close=True), body
                elif (open_body := self._body_before(at)) is not None:
                    # The previous request's body is broken: that request is rejected, no other is left to answer.
                    self._listening.rejected[refusal_of(message.exc)[1]] += 1
                    open_body.set_exception(web.RequestPayloadError("invalid body framing"))
                    self.close()
                self._last_body, self._message_tail = body, b""
                self._request_count -= len(queued) - at - 1
                while len(queued) > at + 1:
                    queued.pop()
                return

    def _body_before(self, at: int) -> StreamReader | None:
        """Return the body of the request before this queue index, if it is incomplete."""
        running = self._current_request
        body = self._messages[at - 1][1] if at else running.content if running is not None else None
        return None if body is None or body.is_eof() else body

    def _is_overrun(self) -> bool:
        """Return True if more data waits behind one request than is kept; aiohttp then stops reading.

        A paused reader misses a disconnect."""
        queued = self._messages
        # runs next; otherwise the running one is no longer queued
        first = self._waiter is not None or len(queued) == self._request_count
        if len(queued) - first > PIPELINED:
            return True
        return (
            len(queued) > first
            and sum(body.total_bytes for _, body in itertools.islice(queued, first, None)) > PIPELINED_BYTES
        )

    def _check_overrun(self, answered: int) -> None:
        """Cut the connection if it is still overrun and has answered nothing since `answered` was recorded."""
        self._overrun = None
        if not self._is_overrun():
            return
        if answered == self._answered:
            self._listening.rejected["pipelined"] += 1
            self.cut()
        else:
            self._overrun = self._loop.call_later(PIPELINED_S, self._check_overrun, self._answered)

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Count a response: aiohttp calls this once per response, after it is written."""
        self._answered += 1
        super().log_access(request, response, time)

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._late, self._overrun):
            if timer is not None:
                timer.cancel()
        self._listening.gone(self)
        super().connection_lost(exc)

    def _too_slow(self) -> None:
        self._listening.rejected["slow_head"] += 1
        self.cut()

    def cut(self) -> None:
        """Close at once, without a TLS close: a client that is slow with a head may be slow with that too."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()
        elif self.welcome is not None:  # still in its handshake
            self.welcome.cancel()


def _ends_connection(message: Any) -> bool:
    """Return True if data after this request cannot be parsed reliably.

    With Upgrade (RFC 9110, 7.8) or CONNECT another protocol may follow: aiohttp drops the bytes that came with the
    head and continues in their middle. HTTP/1.0 has no chunks, so a proxy on the path may see another end of the
    body (RFC 9112, 6.1). An unparsable request has no known end."""
    if not isinstance(message, RawRequestMessage):
        return True
    return (
        "Upgrade" in message.headers
        or message.method == "CONNECT"
        or (message.chunked and message.version < HttpVersion11)
    )


async def listen(
    runner: web.BaseRunner,
    setting: str,
    address: str,
    protection: ListenerAuth | None = None,
    *,
    most: int = CONNECTIONS,
    open_paths: Sequence[str] = (),
    own_login: Callable[[str], bool] | None = None,
    rejected: Counter[str] | None = None,
    shared_port: bool = False,
) -> Listening:
    """Start `runner` and listen; on failure the runner is cleaned up. Raises BadConfig with the setting and a fix.

    most: maximum connections. open_paths: need no auth, for probes. own_login: True for paths whose handler
    authenticates requests that the listener does not; it finds AUTHENTICATED in others. rejected: counter by reason
    (new_rejections()). shared_port: other processes of this user may listen on the port, too."""
    try:
        rejected = new_rejections() if rejected is None else rejected
        protection = protection or ListenerAuth(None)
        await runner.setup()
        server = cast(web.Server, runner.server)
        if protection.path is not None and not protection.tls_only:
            server.request_handler = _guarded(
                server.request_handler, protection, frozenset(open_paths), own_login, rejected
            )
        return await accept(
            lambda listening: _Connection(listening, server), setting, address, protection, most, rejected, shared_port
        )
    except BaseException:
        await runner.cleanup()
        raise


async def accept(
    connection: Callable[[Listening], ServedConnection],
    setting: str,
    address: str,
    protection: ListenerAuth,
    most: int,
    rejected: Counter[str],
    shared_port: bool = False,
) -> Listening:
    """Listen and make a protocol for each connection. Raises BadConfig with the setting and a fix.

    shared_port: other processes of this user may listen on the port, too."""
    listening = Listening(connection, protection, most, rejected)
    listening.begin(await bound_sockets(setting, address, shared_port))
    return listening


def _guarded(
    handler: Handler,
    protection: ListenerAuth,
    open_paths: frozenset[str],
    own_login: Callable[[str], bool] | None,
    rejected: Counter[str],
) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path in open_paths or not protection.logins:
            return await handler(request)
        if len(request.headers.getall("Authorization", ())) > 1:
            rejected["login"] += 1
            return web.Response(status=400, text="The request has two Authorization headers; send one.\n")
        try:
            if await protection.authenticate(request.headers.get("Authorization", ""), request.remote or ""):
                request[AUTHENTICATED] = True
                return await handler(request)
        except TooMany:
            rejected["logins_waiting"] += 1
            return web.Response(
                status=503, headers={"Retry-After": "1"}, text="Too many logins are being checked; retry later.\n"
            )
        if own_login is not None and own_login(request.path):
            return await handler(request)
        rejected["login"] += 1
        refusal = web.Response(status=401, text="Authentication required: credentials are missing or wrong.\n")
        for challenge in protection.challenges():
            refusal.headers.add("WWW-Authenticate", challenge)
        return refusal

    return handle


def _http_log() -> logging.Logger:
    """Return the server's log without parser messages, which quote input: it may be a key or a prompt."""
    http = logging.getLogger("vllm_watch.http")
    http.addFilter(_no_complaint)  # idempotent
    return http


def _no_complaint(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))
