"""The data path: one request in, the same request to the engine, its answer back byte for byte, one record left behind.

Laws: whatever happens, a POST to a token route leaves exactly one record. A client's key never reaches the engine. A client that leaves
takes its upstream connection with it, which makes the engine stop working for it. Bodies are never logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from exporters.request_log import fitting_line
from stack.gateway import ask as asks
from stack.gateway.config import Limits, Timeouts
from stack.gateway.exchange import Exchange, record
from stack.gateway.ids import request_id, trace
from stack.gateway.log import RequestLog
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.reasons import REASONS, judge
from stack.gateway.reply import INSPECT_BYTES, TAIL_BYTES, decode
from stack.gateway.sse import Scanner
from stack.gateway.teams import Teams

WHOLE_BYTES = 256 << 10  # a reply of known length up to this is read whole: one write, and a break in it is still an honest 502
ANSWER_S = 5.0  # for telling a client what went wrong; it may not be reading
_ENGINE_PAGES = ("/metrics", "/health")  # of the engine, without a key, as monitoring expects
# Belong to one connection (RFC 9110, section 7.6.1), or are written anew.
_HOP = frozenset(("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
                  "transfer-encoding", "upgrade"))  # fmt: skip
_NOT_SENT_ON = _HOP | {
    "host",
    "content-length",
    "expect",
    "accept-encoding",
    "authorization",
    "x-api-key",
    "api-key",
    "x-request-id",
    "traceparent",
}
_NOT_SENT_BACK = _HOP | {"x-request-id"}
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error"}

_log = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class Upstream:
    """One engine: its name in records and metrics, its address without a path, the headers that only it gets."""

    name: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)


class _End(Exception):
    """The exchange ends here for this reason of the vocabulary."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message or REASONS[reason].why


class Proxy:
    """Handles requests. `draining` refuses new ones, `cutting` names the end of those that are cancelled."""

    def __init__(
        self,
        upstream: Upstream,
        teams: Teams,
        log: RequestLog,
        metrics: GatewayMetrics,
        session: aiohttp.ClientSession,
        *,
        limits: Limits,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        new_hex: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        self.teams = teams
        self.draining = False
        self.cutting = False
        self.running = 0
        self._idle = asyncio.Event()
        self._upstream = upstream
        self._log = log
        self._metrics = metrics
        self._session = session
        self._limits = limits
        self._timeouts = timeouts
        self._clock = clock
        self._wall = wall
        self._new_hex = new_hex

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The handler of the server: decides what kind of request it is."""
        path = request.path
        if path == "/-/healthy":
            return web.Response(text="ok\n")
        engine_page = path in _ENGINE_PAGES and request.method in ("GET", "HEAD")
        if not engine_page and (not path.startswith("/v1/") or ".." in path.split("/")):
            return web.json_response(error_body(404, "not_found", f"{path[:100]} is not served here; see /v1/..."), status=404)
        x = Exchange(
            request_id=request_id(request.headers.get("X-Request-Id"), self._new_hex),
            trace=trace(request.headers.get("traceparent"), self._new_hex),
            route=path,
            accepted=self._clock(),
        )
        recorded = request.method == "POST" and path in asks.RECORDED
        if not engine_page:
            x.team = self._team(request.headers)
        return await self._run(request, x, recorded=recorded, open_to_all=engine_page)

    async def _run(self, request: web.BaseRequest, x: Exchange, *, recorded: bool, open_to_all: bool) -> web.StreamResponse:
        """Runs one exchange to its end, whatever that is, and writes its record."""
        self.running += 1
        self._idle.clear()
        if recorded:
            self._metrics.began(x.team)
        visit = _Visit(self, request, x)
        try:
            return await visit.run(open_to_all=open_to_all)
        except asyncio.CancelledError:
            x.ends("gateway_stopped" if self.cutting else "client_hangup")
            raise
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()
            if recorded:
                self._log.write(fitting_line(record(x, self._clock(), self._wall())))
                self._metrics.ended(x.team, x.outcome, x.status)

    async def until_idle(self, seconds: float) -> None:
        """Waits until no request runs, or the time is over."""
        if self.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    def _team(self, headers: CIMultiDictProxy[str]) -> str | None:
        return self.teams.of(sent_key(headers))


def sent_key(headers: CIMultiDictProxy[str]) -> str | None:
    """The API key of a request: a bearer token, or x-api-key as clients of the messages API send it."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or (headers.get("Authorization") or None)


class _Visit:
    """One exchange in motion: what `Proxy` shares, plus the request, its response and its timer."""

    def __init__(self, proxy: Proxy, request: web.BaseRequest, x: Exchange) -> None:
        self._proxy = proxy
        self._request = request
        self._x = x
        self._response: web.StreamResponse | None = None  # once its head has gone out
        self._timer = asyncio.timeout(None)
        self._mid_event = False  # whether the client has the beginning of an event whose end never came
        self._stage = "body_timeout"  # the reason, should time run out now
        self._due = 0.0

    async def run(self, *, open_to_all: bool) -> web.StreamResponse:
        x = self._x
        try:
            async with self._timer:
                return await self._steps(open_to_all)
        except _End as end:
            return await self._answer(end)
        except TimeoutError:
            return await self._answer(_End(self._stage))
        except ConnectionError:  # only writes to the client are left unguarded below
            x.ends("client_hangup")
        except Exception:
            _log.exception("request %s failed inside the gateway", x.request_id)
            return await self._answer(_End("gateway_error"))
        return self._response or web.Response()

    async def _steps(self, open_to_all: bool) -> web.StreamResponse:
        """Team, body, ask, (admission goes here), engine, answer: cheapest refusal first."""
        x, proxy = self._x, self._proxy
        if not open_to_all and x.team is None:
            raise _End("unknown_key" if sent_key(self._request.headers) else "no_key")
        if proxy.draining:
            raise _End("draining")
        self._allow("body_timeout", proxy._timeouts.body_s)
        # What needs no key gets no memory either: a body sent to it is not read.
        ask = asks.Ask(body=b"") if open_to_all else asks.read(x.route, await self._body())
        x.model, x.stream, x.n = ask.model, ask.stream, ask.n
        x.queued_s = 0.0  # nothing queues yet
        x.upstream, x.attempt = proxy._upstream.name, 1
        self._allow(*(("prefill_timeout", proxy._timeouts.prefill_s) if ask.stream else ("total_timeout", proxy._timeouts.total_s)))
        upstream = await self._asked(proxy._upstream, ask)
        try:
            if upstream.content_type == "text/event-stream":
                return await self._stream(upstream, strip_usage=ask.usage_added and upstream.status == 200)
            return await self._whole(upstream)
        finally:
            upstream.close()  # keeps the connection after a complete answer, cuts it otherwise

    def _allow(self, stage: str, seconds: float) -> None:
        """From now on, time runs out after `seconds`, and is then called `stage`."""
        self._stage = stage
        self._due = asyncio.get_running_loop().time() + seconds
        self._timer.reschedule(self._due)

    async def _body(self) -> bytes:
        """The whole request body. Raises _End when it is too large or broken."""
        request, limit = self._request, self._proxy._limits.body_bytes
        too_large = _End("body_too_large", f"the request body is larger than {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not request.can_read_body:
            return b""
        chunks, size = [], 0
        try:
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
        except (web.RequestPayloadError, aiohttp.ClientPayloadError, HttpProcessingError) as error:
            raise _End("bad_body") from error
        return b"".join(chunks)

    async def _asked(self, upstream: Upstream, ask: asks.Ask) -> aiohttp.ClientResponse:
        """The engine's answer, as soon as its head is there. Raises _End when none comes."""
        request = self._request
        try:
            return await self._proxy._session.request(
                request.method,
                URL(upstream.url + request.rel_url.raw_path_qs, encoded=True),
                data=ask.body or None,
                headers=self._headers(upstream),
                allow_redirects=False,
            )
        except aiohttp.ConnectionTimeoutError as error:
            raise _End("connect_timeout") from error
        except aiohttp.ClientConnectorError as error:
            raise _End("upstream_down", f"the engine behind this gateway cannot be reached ({error.os_error.strerror or 'no address'})") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _End("upstream_reset") from error

    def _headers(self, upstream: Upstream) -> CIMultiDict[str]:
        sent = self._request.headers
        headers = CIMultiDict(_without(sent, _NOT_SENT_ON))
        if not self._x.trace.continued:
            headers.popall("tracestate", None)  # belongs to a trace that we could not read
        headers["X-Request-Id"] = self._x.request_id
        headers["traceparent"] = self._x.trace.traceparent
        headers["Accept-Encoding"] = "identity"  # usage must be readable
        headers.update(upstream.headers)
        return headers

    def _begin(self, upstream: aiohttp.ClientResponse) -> CIMultiDict[str]:
        """The head to send back; from here on the status is known."""
        self._x.status = upstream.status
        if upstream.status in (429, 503) and (wait := upstream.headers.get("Retry-After", "")).isdecimal():
            self._x.retry_after_s = float(wait[:9])
        headers = CIMultiDict(_without(upstream.headers, _NOT_SENT_BACK))
        headers["X-Request-Id"] = self._x.request_id
        return headers

    async def _whole(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Passes a reply that is no event stream, and reads its usage from a copy that is bounded."""
        length = upstream.content_length
        if length is not None and length <= WHOLE_BYTES and self._request.method != "HEAD":
            try:
                body = await upstream.read()
            except (aiohttp.ClientError, OSError) as error:
                raise _End("upstream_reset") from error
            self._note(upstream, body, whole=True)
            return await self._finish(web.Response(status=upstream.status, reason=upstream.reason, headers=self._begin(upstream), body=body))
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=self._begin(upstream))
        await self._start(response)
        copy, whole = bytearray(), True
        while chunk := await _next(upstream):
            await self._write(response, chunk)
            copy += chunk
            if len(copy) > INSPECT_BYTES:
                whole = False
                del copy[:-TAIL_BYTES]
        self._note(upstream, bytes(copy), whole=whole)
        return await self._finish(response)

    def _note(self, upstream: aiohttp.ClientResponse, body: bytes, *, whole: bool) -> None:
        """Takes in a reply, or the last bytes of one too large to keep, and judges it."""
        x = self._x
        if upstream.content_type == "application/json":
            if not whole:
                x.reply.note_tail(body)
            elif (read := decode(body)) is not None:
                x.reply.note(read)
        x.reason = judge(upstream.status, x.reply.error_code, x.reply.finish_reasons)

    async def _stream(self, upstream: aiohttp.ClientResponse, *, strip_usage: bool) -> web.StreamResponse:
        """Passes an event stream chunk by chunk while the scanner reads along."""
        x, clock = self._x, self._proxy._clock
        scanner = Scanner(strip_usage=strip_usage)
        x.stream, x.reply = True, scanner.reply
        headers = self._begin(upstream)
        if strip_usage:
            headers.popall("Content-Length", None)  # the usage event will be missing
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        await self._start(response)
        seen = 0
        try:
            while chunk := await _next(upstream):
                ready = scanner.feed(chunk, clock())
                if ready:
                    await self._write(response, ready)
                if scanner.content_events != seen:
                    seen = scanner.content_events
                    self._content_came()
                if (scanner.done or scanner.reply.error_code is not None) and not x.complete:
                    x.reason, x.complete = judge(upstream.status, scanner.reply.error_code, scanner.reply.finish_reasons), True
            if rest := scanner.close(clock()):
                await self._write(response, rest)
        finally:
            self._mid_event = scanner.mid_event
            x.first_content, x.last_content, x.content_events = scanner.first_content, scanner.last_content, scanner.content_events
        x.reason = judge(upstream.status, x.reply.error_code, x.reply.finish_reasons)
        if x.reason is None and upstream.status == 200 and not scanner.done and not x.reply.finish_reasons and x.route in asks.ENDING:
            raise _End("upstream_reset", "the engine ended the stream before its end")
        return await self._finish(response)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Waits while the client does not read; should time run out meanwhile, it is the client's."""
        stage, self._stage = self._stage, "client_stalled"
        await response.write(data)
        self._stage = stage

    def _content_came(self) -> None:
        """Moves the deadline on. Not for every event: a timer costs more than it tells, so it may be late by a quarter."""
        allowed = self._proxy._timeouts.decode_s
        now = asyncio.get_running_loop().time()
        if self._stage != "decode_timeout" or self._due - now < allowed:
            self._allow("decode_timeout", allowed * 1.25)

    async def _start(self, response: web.StreamResponse) -> None:
        await response.prepare(self._request)
        self._response = response

    async def _finish(self, response: web.StreamResponse) -> web.StreamResponse:
        """Sends the end (and for a whole response everything), so that a client that leaves before it is on record."""
        self._stage = "client_stalled"
        await response.prepare(self._request)
        self._response = response
        await response.write_eof()
        return response

    async def _answer(self, end: _End) -> web.StreamResponse:
        """Tells the client why its request ended: as a status, as an event inside a stream, or by cutting what is neither."""
        self._x.ends(end.reason)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                if self._response is None:
                    return await self._finish(self._refusal(end))
                if self._x.complete:
                    return await self._finish(self._response)
                if self._response.content_type == "text/event-stream" and end.reason != "client_stalled":
                    apart = b"\n\n" if self._mid_event else b""  # so that our error event is one of its own
                    await self._response.write(apart + b"data: " + msgspec.json.encode(_error(end)) + b"\n\n")
                    return await self._finish(self._response)
        if self._request.transport is not None:  # a clean end would pass for a complete reply
            self._request.transport.abort()
        return self._response or web.Response()

    def _refusal(self, end: _End) -> web.Response:
        x = self._x
        x.status = REASONS[end.reason].status
        headers = {"X-Request-Id": x.request_id, "Content-Type": "application/json"}
        if x.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        answer = web.Response(status=x.status, headers=headers, body=msgspec.json.encode(_error(end)))
        if self._proxy.draining:
            answer.force_close()
        return answer


def _error(end: _End) -> dict[str, Any]:
    return error_body(REASONS[end.reason].status, end.reason, end.message)


def error_body(status: int, reason: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it; `code` is our reason."""
    return {"error": {"message": message, "type": _ERROR_TYPES.get(status, "server_error"), "param": None, "code": reason}}


async def _next(upstream: aiohttp.ClientResponse) -> bytes:
    """What has come from the engine; empty at the end. Raises _End when the connection breaks."""
    try:
        return await upstream.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise _End("upstream_reset", "the connection to the engine broke") from error


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> list[tuple[str, str]]:
    """Headers to pass on: without the dropped ones, and without those that Connection names."""
    named = ",".join(headers.getall("Connection", ()))
    if named and named.lower() not in ("keep-alive", "close"):
        dropped = dropped | {name.strip().lower() for name in named.split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]
