"""Writer of responses to the client: replies, event streams, rejections.

Invariants: another upstream may be tried only while the client has been sent nothing, so a reply that may still be
replaced is held until its first content. What runs for every token has no layer too many."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

import msgspec
from multidict import CIMultiDict

from stack.gateway import request_body as token_requests
from stack.gateway.admission import LATEST_S
from stack.gateway.admission_state import Ticket
from stack.gateway.answers import ASKED_ONCE, EVENTS, FAILED, DecodedCopy, coding_of, is_json
from stack.gateway.bad_body import without_ours
from stack.gateway.client_request import ClientRequest, Response
from stack.gateway.deadline import Deadline
from stack.gateway.outline import Copy
from stack.gateway.passed_headers import NOT_SENT_BACK, headers_without
from stack.gateway.policy import Band
from stack.gateway.reasons import FAILOVER, NOTHING_DONE, RETRYABLE, classify
from stack.gateway.refusals import RequestEnd, error_body, error_events
from stack.gateway.reply import Reply
from stack.gateway.request_state import RequestState
from stack.gateway.routes import find
from stack.gateway.services import Services
from stack.gateway.sse import Scanner
from stack.gateway.upstream_client import BrokenConnection, UpstreamResponse

HELD_BYTES = 1 << 20  # of a stream that has no content yet and may still be asked for elsewhere
RETRY_AFTER_S = 5  # where nobody knows better: an engine that is down is probed as often
# a reply of known length up to this is read whole: one write, and a break in it is still an honest 502
WHOLE_BYTES = 256 << 10
# of a stream that its client has not taken yet, beyond which the engine has to wait; twice what the transport calls
# full
AHEAD_BYTES = 128 << 10
Feed = Callable[[bytes, float], bytes]
ANSWER_S = 5.0  # for telling a client what went wrong; it may not be reading
READ_ON_S = 5.0  # for the rest of a reply whose client has left: its usage stands behind the text, and all is computed
SLICE_BYTES = 64 << 10  # of a reply that is read at once, 5 ms at most; then others get their turn


class ResponseWriter:
    """The client's side of one request: its deadline, its slot, its body, and how an answer or a refusal is written.

    A base class of RequestHandler and no object of its own, so that a request costs one object."""

    _fields = _ours = 0  # of the body as the engine got it: all fields, and those that we added

    def __init__(
        self, services: Services, request: ClientRequest, x: RequestState, task: asyncio.Task[None], *, admitted: bool
    ) -> None:
        self._services = services
        self._terms = services.life.terms
        self._request = request
        self._x = x
        self._admitted = admitted
        self._ask = token_requests.TokenRequest(body=b"")
        self._ticket: Ticket | None = None
        self._response: Response | None = None  # once its head has gone out
        self._task = task
        self._timer = Deadline(task)
        self._taken = 0  # bytes of its body, of those that may be held
        self._mid_event = False  # whether the client has the beginning of an event whose end never came
        self._stage = "body_timeout"  # the reason, should time run out now
        self._movable = False  # whether another engine may answer instead, until the client has been sent something
        self._scanner: Scanner | None = None  # of the stream of this attempt
        self._latest: float | None = None  # sign of life in that stream which moved the deadline
        self._attempt_began = 0.0
        self._sticky = b""

    def release_slot(self) -> None:
        """The slot, as soon as the engine has no more work with this request; and what its size has taught."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        x, estimator, reply = self._x, self._services.estimator, self._x.reply
        reply.settle(content=x.content_events > 0)
        prompt, output, shown = reply.prompt_tokens, reply.completion_tokens, None
        if output is None and (shown := self.estimated_output()) is not None:
            output = max(ticket.output, shown)  # more may have been made than was shown
        if x.reason in NOTHING_DONE and prompt is None and output is None:
            prompt = output = 0
        self._services.admission.leave(ticket, self._services.now(), prompt, output)
        if reply.prompt_tokens is not None:
            estimator.learn(x.model, self._ask, reply.prompt_tokens, x.team)
        # A client that leaves before the count comes has had content all the same; then the estimate stands for it.
        counted = x.est_prompt_tokens if reply.prompt_tokens is None and shown else reply.prompt_tokens
        limit = self._terms.team(x.team or "").max_prompt_tokens
        if counted is not None and limit is not None and counted > limit:
            estimator.note_overrun(x.model, x.team, self._services.now())
        if reply.completion_tokens is not None and x.team is not None:
            estimator.learn_output(x.team, self._ask, reply.completion_tokens)
            if self._scanner is not None:
                estimator.learn_events(x.team, x.model, self._scanner.tokens, reply.completion_tokens)

    def _settle_slot(self) -> None:
        """Release the slot, unless the client does not read and the budget of bytes has no room for what it has not
        read: then the slot is held until it has."""
        if self._ticket is None or not self._request.held_back:
            self.release_slot()
            return
        unread = self._request.transport.get_write_buffer_size()
        if self._services.bodies.take(self._x.team, unread, alone=len(self._terms.policy.teams) == 1):
            self._taken += unread
            self.release_slot()

    def estimated_output(self) -> int | None:
        """Return the tokens that the client has been sent, of an answer without usage; None for none."""
        x, estimator, scanner = self._x, self._services.estimator, self._scanner
        if scanner is None:
            return x.reply.token_ids or estimator.text(x.model, x.team, x.reply.text_bytes)
        text_bytes = estimator.generated_bytes(self._ask, scanner.text_bytes)
        return estimator.completion(x.team, x.model, scanner.tokens, text_bytes)

    def release_body(self) -> None:
        """The body, as soon as nothing can be sent again; what its size has taught stays."""
        if not self._ask.body and not self._taken:
            return
        self._ask = msgspec.structs.replace(self._ask, body=b"", fields={})
        self._services.bodies.give(self._x.team, self._taken)
        self._taken = 0

    def _band(self) -> Band | None:
        return self._terms.band(self._x.team) if self._admitted and self._x.team is not None else None

    def _allow(self, stage: str, seconds: float) -> None:
        """From now on, time runs out after `seconds`, and is then called `stage`."""
        self._stage = stage
        self._timer.after(seconds)

    def _begin(self, upstream: UpstreamResponse) -> CIMultiDict[str]:
        """The head to send back."""
        if upstream.status in (429, 503) and (wait := upstream.headers.get("Retry-After", "")).isdecimal():
            self._x.retry_after_s = float(wait[:9])
        headers = CIMultiDict(headers_without(upstream.headers, NOT_SENT_BACK))
        headers["X-Request-Id"] = self._x.request_id
        return headers

    async def _whole(self, upstream: UpstreamResponse, *, held: bool) -> None:
        """Passes a reply that is no event stream, and reads its usage from a copy, of a large one from its outline."""
        x, length, coding = self._x, upstream.content_length, coding_of(upstream.headers)
        body, complete = b"", length is not None and length <= WHOLE_BYTES and self._request.method != "HEAD"
        if complete or (held and length is None):
            body, complete = await _up_to(upstream, WHOLE_BYTES)
        headers = self._begin(upstream)
        if complete:
            if coding is None:
                if upstream.status == 400 and self._ours:
                    body = without_ours(body, self._fields, self._ours)
                self._note(upstream, body, len(body))
            else:
                await self._note_decoded(upstream, body, coding)
            if held and x.reason in FAILOVER and x.reply.unreadable not in ASKED_ONCE:
                raise RequestEnd(x.reason or "")
            await self._finish(Response(upstream.status, headers, body, upstream.reason))
            return
        if held and (reason := self._reason(upstream, x.reply)) in FAILOVER:
            raise RequestEnd(reason or "")
        response = Response(upstream.status, headers, reason=upstream.reason)
        self._start(response)
        copy = Copy(outlined=is_json(upstream.content_type))
        try:
            while chunk := body or await _next(upstream):
                body = b""
                await self._add(copy, chunk, coding)
                await self._write(response, chunk)
        except (ConnectionError, asyncio.CancelledError):
            await self._read_on(upstream, copy, coding)
            raise
        self._note_copy(upstream, copy, coding)
        await self._finish(response)

    async def _read_on(self, upstream: UpstreamResponse, copy: Copy, coding: DecodedCopy | None) -> None:
        """Read the rest of a reply for its usage: the client may have left with all of the text."""
        if self._services.life.cutting or not self._admitted or self._x.reply.unreadable is not None:
            return  # nobody waits for it, so the engine stops
        with contextlib.suppress(TimeoutError, RequestEnd):
            async with asyncio.timeout(READ_ON_S):
                while chunk := await _next(upstream):
                    await self._add(copy, chunk, coding)
                self._note_copy(upstream, copy, coding)

    async def _add(self, copy: Copy, data: bytes, coding: DecodedCopy | None) -> None:
        """Add a part of a reply that is read, in slices: others get their turn. When cancelled, all of it is added."""
        if not self._admitted or self._x.reply.unreadable is not None:
            return
        slices = (data[at : at + SLICE_BYTES] for at in range(0, len(data), SLICE_BYTES))
        pieces = slices if coding is None else coding.pieces(data)
        try:
            for piece in pieces:
                copy.add(piece)
                if len(data) > SLICE_BYTES or coding is not None:
                    await asyncio.sleep(0)
        finally:
            for piece in pieces:
                copy.add(piece)

    async def _note_decoded(self, upstream: UpstreamResponse, body: bytes, coding: DecodedCopy) -> None:
        """Add an encoded reply. Little of it may be much when decoded."""
        copy = Copy(outlined=is_json(upstream.content_type))
        await self._add(copy, body, coding)
        self._note_copy(upstream, copy, coding)

    def _note_copy(self, upstream: UpstreamResponse, copy: Copy, coding: DecodedCopy | None) -> None:
        self._x.reply.partly_read = copy.partial
        self._note(upstream, copy.text(), copy.size, coding)

    def _note(self, upstream: UpstreamResponse, body: bytes, size: int, coding: DecodedCopy | None = None) -> None:
        """Add a reply, or what was read of it, and classify it. size: its bytes."""
        x, reply = self._x, self._x.reply
        if coding is not None and coding.unread == "size":
            reply.partly_read, body = True, b""
        if not self._admitted or reply.unreadable is not None:
            pass
        elif coding is not None and not (coding.ended or coding.unread == "size"):
            reply.unreadable = "encoding"
        elif reply.partly_read and not body:
            reply.settle(content=False)
        else:
            name = find(x.route).answer.usage.header
            header = upstream.headers.get(name) if name else None
            reply.read(upstream.status, upstream.content_type, body, size, header)
        x.reason = self._reason(upstream, reply)

    def _reason(self, upstream: UpstreamResponse, reply: Reply) -> str | None:
        """Return the reason that an answer amounts to; an unreadable one is an error of the engine."""
        reason = classify(upstream.status, reply.error_code, reply.finish_reasons)
        return "engine_error" if reason is None and reply.unreadable in FAILED else reason

    async def _stream(self, upstream: UpstreamResponse, *, strip_usage: bool, held: bool) -> None:
        """Passes an event stream while the scanner reads along; from its first content on, when it is held until
        then."""
        x, clock, coding = self._x, self._services.now, coding_of(upstream.headers)
        strip_usage = strip_usage and coding is None  # nothing is taken out of an encoded stream
        self._scanner = scanner = Scanner(x.route, strip_usage=strip_usage)
        x.stream, x.reply = True, scanner.reply
        feed = scanner.feed if coding is None else _reading(coding, scanner)
        headers = self._begin(upstream)
        headers["X-Accel-Buffering"] = "no"  # nginx, and what follows it, would hold events back
        if strip_usage:
            headers.popall("Content-Length", None)  # the usage event will be missing
        response = Response(upstream.status, headers, reason=upstream.reason)
        try:
            if held:
                waiting = await self._held(upstream, scanner, feed, coding)
            else:  # an engine sends the head of a stream before it has computed anything
                waiting = feed(await _next(upstream), clock()) if self._movable else b""
            self._start(response)
            if waiting:
                await self._write(response, waiting)
            self._seen(upstream, scanner)
            if not response.framed_by_length:
                take = self._taker(upstream, scanner, feed)
                while await _pumped(upstream, take):
                    await self._drained()
            else:
                while chunk := await _next(upstream):
                    await self._write(response, feed(chunk, clock()))
                    self._seen(upstream, scanner)
            if rest := scanner.close(clock()):
                await self._write(response, rest)
        finally:
            self._mid_event = scanner.mid_event
            x.first_token, x.content_events = scanner.first_token, scanner.content_events
            x.token_s = scanner.token_s(x.reply.completion_tokens)
        self._require_end(upstream, scanner, coding)
        x.reason = self._reason(upstream, x.reply)
        await self._finish(response)

    def _require_end(self, upstream: UpstreamResponse, scanner: Scanner, coding: DecodedCopy | None) -> None:
        """Raise RequestEnd for a stream that has ended without its end, as far as the end could be read."""
        if coding is not None and (coding.unread or not (coding.ended or scanner.done)):
            scanner.pass_unread(coding.unread or "encoding", 0.0)
        elif reason := self._breaks_off(upstream, scanner):
            raise RequestEnd(reason, "the engine ended the stream before its end")

    async def _held(
        self, upstream: UpstreamResponse, scanner: Scanner, feed: Feed, coding: DecodedCopy | None
    ) -> bytes:
        """The beginning of a stream, as soon as it has brought what a client waits for. Raises RequestEnd for one that
        failed before it did."""
        waiting = bytearray()
        if coding is not None and coding.unread:
            return b""
        while chunk := await _next(upstream):
            waiting += feed(chunk, self._services.now())
            if (coding is not None and coding.unread) or not self._worth_holding(upstream, scanner, waiting):
                return bytes(waiting)
        if coding is not None and not coding.ended:
            return bytes(waiting)
        waiting += scanner.close(self._services.now())
        self._worth_holding(upstream, scanner, waiting, ended=True)
        return bytes(waiting)

    def _taker(self, upstream: UpstreamResponse, scanner: Scanner, feed: Feed) -> Callable[[bytes], bool]:
        """Return the function that handles each piece of a stream and returns whether there may be more. It runs for
        every token.

        Writes to the client in the very call, as the server's own writer does, which has to be awaited."""
        transport, chunked = self._request.transport, self._request.chunks
        reply, clock, moved = scanner.reply, self._services.now, self._decode_s() / 4
        write, is_closing, ahead = transport.write, transport.is_closing, transport.get_write_buffer_size
        move_at = 0.0

        def take(chunk: bytes) -> bool:
            nonlocal move_at
            now = clock()
            if ready := feed(chunk, now):
                if is_closing():
                    raise ConnectionResetError("the client is gone")
                write(b"%x\r\n%b\r\n" % (len(ready), ready) if chunked else ready)
            if (
                (now >= move_at and now in (scanner.last_content, scanner.last_progress))
                or scanner.done
                or reply.error_code is not None
            ):
                self._seen(upstream, scanner)
                move_at = now + moved
            return ahead() < AHEAD_BYTES

        return take

    def _seen(self, upstream: UpstreamResponse, scanner: Scanner) -> None:
        """Note the progress of the stream, which moves the deadline on; with its last word the engine has no more work
        with it."""
        x, latest = self._x, scanner.latest
        x.content_events = scanner.content_events
        if latest != self._latest:
            self._latest = latest
            self._allow("decode_timeout", self._decode_s() * 1.25)
        if scanner.done or scanner.reply.error_code is not None:  # whatever the line and the client still have to do
            if not x.complete:
                if not scanner.reply.shaped:
                    self._breaks_off(upstream, scanner)
                x.reason, x.complete = self._reason(upstream, scanner.reply), True
            self._settle_slot()

    async def _drained(self) -> None:
        """Waits while the client does not read; should time run out meanwhile, it is the client's."""
        if not self._request.held_back:
            return
        stage, self._stage, began = self._stage, "client_stalled", self._services.now()
        try:
            await self._request.drain()
        finally:
            self._x.client_wait_s += self._services.now() - began
        self._stage = stage

    def _breaks_off(self, upstream: UpstreamResponse, scanner: Scanner) -> str:
        """Return the reason of a stream that has ended without its end; empty for any other. One in which nothing was
        an answer is unreadable."""
        reply = scanner.reply
        finished = reply.finish_reasons and (self._ask.outputs < 2 or reply.finished >= self._ask.outputs)
        said = self._reason(upstream, reply) or scanner.done or finished
        if not said and upstream.status == 200 and find(self._x.route).answer.ends:
            return "upstream_reset"
        if self._admitted and upstream.status < 300 and not reply.shaped and reply.error_code is None:
            reply.unreadable = reply.unreadable or ("shape" if scanner.objects else "empty")
        return ""

    def _worth_holding(
        self, upstream: UpstreamResponse, scanner: Scanner, waiting: bytearray, *, ended: bool = False
    ) -> bool:
        """Return whether a held stream still has brought nothing that a client waits for. Raises RequestEnd for one
        that failed before it did."""
        breaks = self._breaks_off(upstream, scanner) if ended or scanner.done else ""
        reason = self._reason(upstream, scanner.reply) or breaks
        if reason in FAILOVER and not scanner.content_events:
            raise RequestEnd(reason)
        brought = scanner.content_events or scanner.progress_events
        return not (brought or scanner.done or reason or len(waiting) > HELD_BYTES)

    async def _write(self, response: Response, data: bytes) -> None:
        """Sends a piece, and waits while the client does not read."""
        response.put(data)
        await self._drained()

    def _decode_s(self) -> float:
        """Return how long content may stay away. Not every event moves that deadline, because a timer costs too much:
        it may be late by a quarter."""
        band = self._band()
        return (band and band.decode_s) or self._services.timeouts.decode_s

    def _start(self, response: Response) -> None:
        self._x.status = response.status
        self.release_body()
        self._services.mark(self._request, response)
        response.start(self._request)
        self._response = response

    async def _finish(self, response: Response) -> None:
        """Sends the end (and for a whole response everything), so that a client that leaves before it is on record."""
        self._stage = "client_stalled"
        self._x.status = response.status
        if response.started:  # its body is gone, and what the client has not read may stand in its place
            response.end()
        else:
            self.release_body()
            self._services.mark(self._request, response)
            response.put_whole(self._request)
            self._response = response
        self._settle_slot()
        await self._drained()
        self.release_slot()

    async def _answer(self, end: RequestEnd) -> None:
        """Report to the client why its request ended: as a status, as an event inside a stream, or by cutting what is
        neither."""
        self._x.ends(end.reason)
        self.release_slot()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                if self._response is None:
                    await self._finish(self._refusal(end))
                    return
                endless = not self._response.framed_by_length  # into a promised length no more fits
                if endless and self._scanner is not None and (withheld := self._scanner.take_withheld()):
                    self._response.put(withheld)
                if self._x.complete and endless:
                    await self._finish(self._response)
                    return
                text = endless and "Content-Encoding" not in self._response.headers
                if self._response.content_type == EVENTS and text and end.reason != "client_stalled":
                    apart = b"\n\n" if self._mid_event else b""  # so that our error event is one of its own
                    self._response.put(apart + error_events(find(self._x.route).dialect, end, self._x.request_id))
                    await self._finish(self._response)
                    return
        self._request.abort()  # a clean end would pass for a complete reply

    def _refusal(self, end: RequestEnd) -> Response:
        x, status = self._x, end.status
        headers = {"X-Request-Id": x.request_id, "Content-Type": "application/json"}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        elif status == 415:
            headers["Accept-Encoding"] = "identity"
        if end.reason in RETRYABLE:
            x.retry_after_s = float(self._retry_after_s(end))
            headers |= {
                "Retry-After": f"{x.retry_after_s:.0f}",
                "Retry-After-Ms": f"{x.retry_after_s * 1000:.0f}",
                "X-Should-Retry": "true",
            }
        elif status < 500:
            headers["X-Should-Retry"] = "false"
        body = error_body(find(x.route).dialect, end, x.request_id)
        answer = Response(status, headers, msgspec.json.encode(body))
        answer.closes = self._services.life.draining
        return answer

    def _retry_after_s(self, end: RequestEnd) -> int:
        """Seconds, at most what clients obey."""
        wait_s = end.retry_after_s
        if wait_s is None and end.reason == "queue_ttl" and self._x.team in self._terms.policy.teams:
            wait_s = self._services.admission.wait_s(self._x.team or "")
        return min(int(LATEST_S), max(1, math.ceil((wait_s or RETRY_AFTER_S) * self._services.jitter())))


async def _next(upstream: UpstreamResponse) -> bytes:
    """Return the next bytes of the engine; empty at the end. Raises RequestEnd when the connection breaks."""
    try:
        return await upstream.chunk()
    except BrokenConnection as error:
        raise RequestEnd("upstream_reset", str(error)) from error


def _reading(coding: DecodedCopy, scanner: Scanner) -> Feed:
    """Return a function that passes bytes on as they are and lets the scanner read what they decode to."""

    def feed(data: bytes, now: float) -> bytes:
        for piece in coding.pieces(data):
            scanner.feed(piece, now)
        if coding.unread:
            scanner.pass_unread(coding.unread, now)
        return data

    return feed


async def _up_to(upstream: UpstreamResponse, most: int) -> tuple[bytes, bool]:
    """Return the begin of a body, with little more than `most` bytes, and whether it is all. Raises RequestEnd."""
    body = piece = await _next(upstream)
    while piece and len(body) <= most:
        body += (piece := await _next(upstream))
    return body, not piece


async def _pumped(upstream: UpstreamResponse, take: Callable[[bytes], bool]) -> bool:
    """Gives to `take` what comes from the engine; whether there may be more. Raises RequestEnd when the connection
    breaks."""
    try:
        return await upstream.pump(take)
    except BrokenConnection as error:
        raise RequestEnd("upstream_reset", str(error)) from error
