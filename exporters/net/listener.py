"""Listens, for every server of ours: TLS and logins by a web configuration file, and bounds for those who are slow,
large or many.

aiohttp bounds the size of a head and not its time, and nothing at all in number. So connections are accepted here, one
by one, with the TLS settings that are in force at that moment, and each is aiohttp's own with a watch on its heads. A
request that has come, and its answer, pass no further layer, but for the check of the login where there are logins."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, cast

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadStatusLine, HttpProcessingError, InvalidURLError, LineTooLong

from exporters.config import BadConfig
from exporters.net.listener_auth import ListenerAuth, TooMany

# a head is complete that long after the connection, or after its own first byte where the connection was kept
HEAD_S = 10.0
HANDSHAKE_S = 10.0
GOODBYE_S = 2.0  # the other side confirms the end of TLS
CONNECTIONS = 512  # at once, for figures and boards
CLIENTS = 10_000  # at once, for the gateway's clients; less where descriptors are few
DESCRIPTORS = 65_536  # asked for, where the system lets us
KEPT_BACK = 256  # descriptors for files, engines and the other listeners
BACKLOG = 1024
ACCEPT_AGAIN_S = 0.2
LOOK_AGAIN_S = 0.05  # for somebody to cut, where nobody was found: at 10,000 connections a look takes milliseconds
# at the bound, one of so many connections gives way at a time, so that a flood does not cost a look for each of its
# connections
ROOM_SHARE = 16
# requests that may wait behind a running one; aiohttp stops reading at 32, and then notices no disconnect
PIPELINED = 4
PIPELINED_BYTES = 64 << 10  # of their bodies; aiohttp stops reading at twice as many
# a request may run that long with more behind it: short requests get through, however many come at once
PIPELINED_S = 0.5
TELL_EVERY_S = 60.0
# in a request whose login the listener knows
AUTHENTICATED: Any = getattr(web, "RequestKey", lambda name, _: name)("vllm_watch.let_in", bool)

log = logging.getLogger("vllm_watch.listener")

# Why somebody was turned away before the server itself was asked; a word of it is a label.
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

_HEAD_TOO_LARGE = (
    431,
    "head_too_large",
    "The request line or a header is too long, or there are too many headers; send less.",
)
# What the parser refuses: status, reason and sentence. Its own sentence quotes what it could not read, which may be a
# key or a prompt.
_UNREADABLE: dict[type[HttpProcessingError], tuple[int, str, str]] = {
    LineTooLong: _HEAD_TOO_LARGE,
    BadStatusLine: (
        400,
        "bad_request_line",
        "The first line is no request line of HTTP; a client that speaks TLS or HTTP/2 needs another address.",
    ),
    InvalidURLError: (400, "bad_request_line", "The target in the request line is no path and no URL."),
}
_BAD_FRAMING = (
    400,
    "bad_framing",
    "The headers or the framing of the body (Content-Length, Transfer-Encoding, chunks) break the rules of HTTP.",
)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def split_address(text: str) -> tuple[str, int]:
    """host and port of '127.0.0.1:9401' or '[::1]:9401'; port 0 picks a free one. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address; write host:port, such as 127.0.0.1:9401")
    return host.strip("[]"), int(port)


def clients_at_most() -> int:
    """Connections of clients, each of which may need one to an engine; as many descriptors as the system gives without
    asking are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(32, min(CLIENTS, (max(soft, wanted) - KEPT_BACK) // 2))


def new_rejections() -> Counter[str]:
    """How many were turned away, by reason; all of them from the start on, so that the first one is a rise."""
    return Counter(dict.fromkeys(REASONS, 0))


class Listening:
    """One address on which a server answers. url: as clients write it, the port resolved."""

    def __init__(self, server: web.Server, protection: ListenerAuth, most: int, rejected: Counter[str]) -> None:
        self.url = ""
        self.rejected = rejected
        self._server = server
        self._protection = protection
        self._most = most
        self._open: dict[_Connection, None] = {}  # from accepting to closing, in the order of accepting
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._made = {**server._kwargs, "logger": _http_log()}
        self._tell_at = self._look_at = 0.0

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)
        host, port, *_ = sockets[0].getsockname()
        scheme = "https" if self._protection.context() else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        for each in sockets:
            self._watch(each)

    async def close(self) -> None:
        """Takes no new connection. Those that are there belong to the server."""
        loop, closing, self._sockets = asyncio.get_running_loop(), self._sockets, []
        for each in closing:
            loop.remove_reader(each)
            each.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def gone(self, connection: _Connection) -> None:
        self._open.pop(connection, None)

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._sockets:  # and was not closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Takes one connection. Called by the event loop: an await of sock_accept that is cancelled may lose one that
        was just taken."""
        loop = asyncio.get_running_loop()
        try:
            wire, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # it went away meanwhile
            return
        except OSError as error:  # no descriptor is left
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
        connection = _Connection(self, self._server, loop, self._made)
        self._open[connection] = None
        connection.welcome = self._do(self._welcome(connection, wire))

    def _make_room(self) -> bool:
        """Cuts the oldest connections on which nobody asks anything, or else the oldest that owe a head; whether there
        were any.

        Who says nothing keeps nobody out: one would have to open as many connections as there may be while another's
        head is on its way."""
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

    async def _welcome(self, connection: _Connection, wire: socket.socket) -> None:
        try:
            context = self._protection.context()
            waits = (
                {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": GOODBYE_S}
                if context
                else {}
            )
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, wire, **cast(Any, waits))
        except (OSError, ssl.SSLError):  # no TLS, not the right one, or not in time
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
    """aiohttp's connection, cut when a head takes too long. Of aiohttp's own it reads: how many heads were complete,
    and what start() waits for."""

    def __init__(
        self, listening: Listening, server: web.Server, loop: asyncio.AbstractEventLoop, made: dict[str, Any]
    ) -> None:
        super().__init__(server, loop=loop, **made)
        self.welcome: asyncio.Task[None] | None = None
        self._listening = listening
        self._late: asyncio.TimerHandle | None = None
        self._answered = 0
        # of the last request that is accepted; nothing behind it is read as one
        self._last_body: StreamReader | None = None
        self._overrun: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Return whether every request was answered and nothing of another has come.

        A connection that still owes the body of an answered request is idle: aiohttp waits 10 s for such a body, to
        throw it away."""
        return self._answered == self._request_count > 0 and self._late is None

    @property
    def silent(self) -> bool:
        """Whether a head, or before it a handshake, is due and not complete."""
        return self._request_count == 0 or self._late is not None

    def _awaits(self) -> bool:
        return (waiter := self._waiter) is not None and not waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late = self._loop.call_later(HEAD_S, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self._last_body is not None and self._last_body.is_eof():
            return  # dropped, but read: a disconnect is noticed
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
        """Return the handler of a request that the parser refused."""
        status, reason, sentence = _unreadable(fault.exc)
        self._listening.rejected[reason] += 1

        async def refuse(request: web.BaseRequest) -> web.StreamResponse:
            refusal = web.Response(status=status, text=f"{sentence}\n")
            refusal.force_close()
            return refusal

        return refuse

    def _end_behind_last(self, new: int) -> None:
        """Close the connection after the first of the `new` requests that has to end it, and drop what was read behind
        that one."""
        queued = self._messages
        for at in range(len(queued) - new, len(queued)):
            message, body = queued[at]
            if _ends_connection(message):
                if isinstance(message, RawRequestMessage):
                    queued[at] = message._replace(should_close=True), body
                elif (open_body := self._body_before(at)) is not None:
                    # It broke off the body of the request before: that one is refused, and there is no other to answer.
                    self._listening.rejected[_unreadable(message.exc)[1]] += 1
                    open_body.set_exception(web.RequestPayloadError("the body broke HTTP's framing"))
                    self.close()
                self._last_body, self._message_tail = body, b""
                self._request_count -= len(queued) - at - 1
                while len(queued) > at + 1:
                    queued.pop()
                return

    def _body_before(self, at: int) -> StreamReader | None:
        """Return the body of the request before the one that is queued at this place, if it is not complete."""
        running = self._current_request
        body = self._messages[at - 1][1] if at else running.content if running is not None else None
        return None if body is None or body.is_eof() else body

    def _is_overrun(self) -> bool:
        """Return whether more waits behind one request than is kept; aiohttp stops reading, and then misses a
        disconnect."""
        queued = self._messages
        # runs next; otherwise one runs that is no longer queued
        first = self._waiter is not None or len(queued) == self._request_count
        if len(queued) - first > PIPELINED:
            return True
        return (
            len(queued) > first
            and sum(body.total_bytes for _, body in itertools.islice(queued, first, None)) > PIPELINED_BYTES
        )

    def _check_overrun(self, answered: int) -> None:
        """Cut the connection if it is still overrun and has answered nothing since `answered` was noted."""
        self._overrun = None
        if not self._is_overrun():
            return
        if answered == self._answered:
            self._listening.rejected["pipelined"] += 1
            self.cut()
        else:
            self._overrun = self._loop.call_later(PIPELINED_S, self._check_overrun, self._answered)

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Count the answer: aiohttp calls this once for each, when all of it is written."""
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
        """Closes at once, without the goodbye of TLS: who is slow with a head may be slow with that too."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()
        elif self.welcome is not None:  # it is still in its handshake
            self.welcome.cancel()


def _unreadable(error: BaseException) -> tuple[int, str, str]:
    """Return status, reason and sentence for what the parser refused."""
    if "Too many headers" in str(error.args[:1]):
        return _HEAD_TOO_LARGE
    return next((found for kind, found in _UNREADABLE.items() if isinstance(error, kind)), _BAD_FRAMING)


def _ends_connection(message: Any) -> bool:
    """Return whether nothing after this request on its connection can be read with certainty.

    With Upgrade (RFC 9110, 7.8) or CONNECT another protocol may follow: aiohttp drops the bytes that came with the head
    and reads on in their middle. HTTP/1.0 knows no chunks, so a proxy on the path may see another end of the body (RFC
    9112, 6.1). What could not be parsed has no known end."""
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
) -> Listening:
    """Starts `runner` and listens; on any failure the runner is cleaned up. Raises BadConfig that names the setting and
    the way out.

    most: connections at once. open_paths: answered without a login, for probes. own_login: whether the handler of a
    path looks for a login of its own where the listener knows none; it finds LET_IN in the request where it does.
    turned_away: what to count in, by reason (nobody_yet())."""
    try:
        rejected = new_rejections() if rejected is None else rejected
        protection = protection or ListenerAuth(None)
        await runner.setup()
        server = cast(web.Server, runner.server)
        if protection.path is not None and not protection.tls_only:
            server.request_handler = _guarded(
                server.request_handler, protection, frozenset(open_paths), own_login, rejected
            )
        listening = Listening(server, protection, most, rejected)
        listening.begin(await _bound(setting, address))
    except BaseException:
        await runner.cleanup()
        raise
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
                status=503, headers={"Retry-After": "1"}, text="Too many logins are being checked; come again.\n"
            )
        if own_login is not None and own_login(request.path):
            return await handler(request)
        rejected["login"] += 1
        refusal = web.Response(
            status=401, text="This needs a login, and what came with the request is none that is known here.\n"
        )
        for challenge in protection.challenges():
            refusal.headers.add("WWW-Authenticate", challenge)
        return refusal

    return handle


async def _bound(setting: str, address: str) -> list[socket.socket]:
    """Sockets that listen, one for each address of the host's name. Raises BadConfig."""
    host, port = split_address(address)
    made: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, where in dict.fromkeys(found):
            made.append(one := socket.socket(family, kind, protocol))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(where)
            one.listen(BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in made:
            one.close()
        if error.errno == errno.EADDRINUSE:
            told = (
                f"{address} is taken by another program and cannot be used: stop that one, or choose another with"
                f" {setting}"
            )
        else:
            told = f"{address} cannot be used: {error.strerror or error}; choose another with {setting}"
        raise BadConfig(f"{setting}: {told}") from None
    return made


def _http_log() -> logging.Logger:
    """The log of a server without the complaints of its parser, of head or body: they quote what they cannot read,
    which may be a key or a prompt."""
    http = logging.getLogger("vllm_watch.http")
    http.addFilter(_no_complaint)  # once, however often it is added
    return http


def _no_complaint(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))
