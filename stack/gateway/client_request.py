"""Requests of clients and the responses to them, on a connection of HTTP/1.1.

Invariants: a response is framed once, by its length, in chunks, or by the end of the connection; what a handler left
unfinished never looks complete. No header breaks a line."""

from __future__ import annotations

import asyncio
import json
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Protocol

from multidict import CIMultiDict
from yarl import URL

_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_NO_BODY: Final = frozenset((100, 101, 102, 103, 204, 304))


class BrokenBody(Exception):
    """The framing of a request's body is invalid."""


class BadRequestTarget(Exception):
    """A request target that is neither a path nor a URL."""


class RequestConnection(Protocol):
    """Connection of a request, as the request sees it."""

    @property
    def task(self) -> asyncio.Task[None]:
        """Return the task of the running request."""

    def writable(self) -> asyncio.Transport:
        """Return the transport. Raises ConnectionResetError if the client is gone."""

    full: bool  # the client does not read what was sent to it

    async def drain(self) -> None:
        """Wait while the client does not read. Raises ConnectionResetError if it is gone."""

    def taken(self) -> None:
        """Note that the handler took a part of its body."""

    def cut(self) -> None:
        """Abort the connection."""


class ClientRequest:
    """Request whose head is complete; its body may still come.

    path: decoded. query: as sent, with its question mark, or empty. persistent: whether the client keeps the
    connection open after the response. chunks: whether it understands a response in chunks. response: as soon as its
    head is sent."""

    __slots__ = (
        "_connection",
        "_pieces",
        "_waiter",
        "body_bytes",
        "broken",
        "chunks",
        "complete",
        "content_length",
        "headers",
        "method",
        "path",
        "persistent",
        "query",
        "response",
    )

    def __init__(
        self,
        connection: RequestConnection,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        *,
        chunks: bool,
        persistent: bool,
    ) -> None:
        self._connection = connection
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.body_bytes = 0  # that have come and were not taken
        self.broken = False
        self.chunks = chunks
        self.complete = False
        length = headers.get("Content-Length")
        self.content_length = None if length is None else int(length)
        self.headers = headers
        self.method = method
        self.path, self.query = read_target(method, target)
        self.persistent = persistent
        self.response: Response | None = None

    @property
    def task(self) -> asyncio.Task[None]:
        """Return the task that handles the request."""
        return self._connection.task

    @property
    def transport(self) -> asyncio.Transport:
        """Return the connection's transport. Raises ConnectionResetError if the client is gone."""
        return self._connection.writable()

    @property
    def owes_body(self) -> bool:
        """Return whether more of the body may come."""
        return not self.complete and not self.broken

    async def body_piece(self) -> bytes:
        """Return what has come of the body since the last call; empty at its end. Raises BrokenBody."""
        while not self._pieces and not self.complete:
            if self.broken:
                raise BrokenBody
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_body()

    def take_body(self) -> bytes:
        """Return what has come of the body and was not taken."""
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces, self.body_bytes = [], 0
        self._connection.taken()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def expect_body(self) -> None:
        """Tell a client that waits for it to send the body."""
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def held_back(self) -> bool:
        """Return whether `drain` has to wait for the client."""
        return self._connection.full

    async def drain(self) -> None:
        """Wait while the client does not read. Raises ConnectionResetError if it is gone."""
        await self._connection.drain()

    def abort(self) -> None:
        """Cut the connection, so that the response never looks complete."""
        self._connection.cut()

    # ---- the connection

    def got(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.body_bytes += len(piece)
        self._wake()

    def ends(self) -> None:
        self.complete = True
        self._wake()

    def breaks(self) -> None:
        """The framing of the body is invalid; nothing more comes."""
        self.broken = True
        self._wake()

    def discard(self) -> None:
        """Drop the body: nobody will read it."""
        self._pieces, self.body_bytes = [], 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Response:
    """Response to one request. body: the whole of it, or None for one that is written piece by piece.

    With `closes` the connection ends behind it."""

    __slots__ = ("_chunked", "_empty", "_request", "body", "closes", "ended", "headers", "reason", "status")

    def __init__(
        self,
        status: int = 200,
        headers: CIMultiDict[str] | dict[str, str] | None = None,
        body: bytes | None = None,
        reason: str | None = None,
    ) -> None:
        self.status = status
        self.reason = _REASONS.get(status, "") if reason is None else reason
        self.headers = headers if type(headers) is CIMultiDict else CIMultiDict(headers or ())
        self.body = body
        self.closes = False
        self.ended = False
        self._chunked = False
        self._empty = False
        self._request: ClientRequest | None = None  # from `start` on

    @property
    def started(self) -> bool:
        return self._request is not None

    @property
    def framed_by_length(self) -> bool:
        """Return whether the response promises its length."""
        return "Content-Length" in self.headers

    @property
    def content_type(self) -> str:
        """Return the content type without parameters, in lower case; empty where none is given."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def send(self, request: ClientRequest) -> None:
        """Send head, body and end at once. Raises ConnectionResetError if the client is gone."""
        self.put_whole(request)
        await request.drain()

    def put_whole(self, request: ClientRequest) -> None:
        """Send head, body and end, and do not wait. Raises ConnectionResetError if the client is gone."""
        body = self.body or b""
        head = self._head(request, len(body))
        request.transport.write(head if self._empty else head + body)
        self.ended = True

    def start(self, request: ClientRequest) -> None:
        """Send the head of a response that is written piece by piece. Raises ConnectionResetError."""
        request.transport.write(self._head(request, None))

    def put(self, data: bytes) -> None:
        """Send a piece. Raises ConnectionResetError if the client is gone."""
        if self._request is None or self.ended:
            raise RuntimeError("the response is not open")
        if data and not self._empty:
            self._request.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """Send the end. Raises ConnectionResetError if the client is gone."""
        if self.ended or self._request is None:
            return
        if self._chunked:
            self._request.transport.write(b"0\r\n\r\n")
        self.ended = True

    def _head(self, request: ClientRequest, size: int | None) -> bytes:
        """Return the head for this request. size: of the body, None if it is not known."""
        headers = self.headers
        self._frame(request, size)
        if "Date" not in headers:
            headers["Date"] = http_date(int(time.time()))
        self.closes = self.closes or not request.persistent
        if self.closes:
            if request.chunks:
                headers["Connection"] = "close"
        elif not request.chunks:
            headers["Connection"] = "keep-alive"
        lines = [f"HTTP/1.{int(request.chunks)} {self.status} {self.reason}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1 or "\0" in head:
            raise ValueError("a header with a line break in it")
        self._request, request.response = request, self
        return f"{head}\r\n\r\n".encode("utf-8", "surrogateescape")

    def _frame(self, request: ClientRequest, size: int | None) -> None:
        """Set the headers that frame the body."""
        status, headers = self.status, self.headers
        self._empty = status in _NO_BODY or request.method == "HEAD"
        if status in _NO_BODY and status != 304:
            headers.popall("Content-Length", None)
        elif size is not None and (size or "Content-Length" not in headers):
            headers["Content-Length"] = str(size)
        elif not self._empty and "Content-Length" not in headers:
            self._chunked = request.chunks
            if self._chunked:
                headers["Transfer-Encoding"] = "chunked"
            else:
                self.closes = True
        if size != 0 and not self._empty and "Content-Type" not in headers:
            headers["Content-Type"] = "application/octet-stream"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with this value as JSON."""
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Response(status, kind | (headers or {}), json.dumps(value).encode())


def text_response(text: str, status: int = 200, headers: CIMultiDict[str] | None = None) -> Response:
    """Return a response with this text."""
    response = Response(status, headers, text.encode())
    response.headers["Content-Type"] = "text/plain; charset=utf-8"
    return response


def read_target(method: str, target: str) -> tuple[str, str]:
    """Return the decoded path and the query, with its question mark, of a request target. Raises BadRequestTarget."""
    if target[:1] == "/" and target.isascii() and "%" not in target and "#" not in target:
        path, mark, query = target.partition("?")
        return path, mark + query
    if target == "*" and method == "OPTIONS":
        return target, ""
    try:
        if target[:1] == "/":
            path, _, query = target.partition("#")[0].partition("?")
            url = URL.build(path=path, query_string=query, encoded=True)
        elif method == "CONNECT":
            url = URL.build(authority=target, encoded=True)
        else:
            url = URL(target, encoded=True)
        if target[:1] != "/" and url.raw_host is None:
            raise BadRequestTarget
    except ValueError as error:
        raise BadRequestTarget from error
    return url.path, url.raw_path_qs[len(url.raw_path) :]


@lru_cache(maxsize=1)
def http_date(second: int) -> str:
    """Return a time as HTTP writes it (RFC 9110, 5.6.7); made once a second."""
    return formatdate(second, usegmt=True)
