"""One request on its way: what it asks for, whether and when it may, which engine answers, and how the answer goes back
byte for byte.

Laws: a client's key never reaches the engine. A client that leaves takes its upstream connection with it, which makes
the engine stop working for it. Another upstream is tried only while the client has been sent nothing. Bodies are never
logged."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy

from stack.gateway import request_body as token_requests
from stack.gateway.admission import LATEST_S, Refusal, Ticket
from stack.gateway.large_bodies import LARGE_BYTES
from stack.gateway.policy import Band
from stack.gateway.reasons import FAILOVER, NOTHING_DONE, REASONS, RETRYABLE, classify
from stack.gateway.reply import INSPECT_BYTES, TAIL_BYTES, Reply, decode
from stack.gateway.request_state import RequestState
from stack.gateway.routing import RequestedModel, UpstreamChoice, may_ask, name_at
from stack.gateway.services import Services
from stack.gateway.sse import Scanner
from stack.gateway.upstream_client import BrokenConnection, Unreachable, UpstreamResponse

if TYPE_CHECKING:
    from stack.gateway.teams import Teams

HELD_BYTES = 1 << 20  # of a stream that has no content yet and may still be asked for elsewhere
SMALL_BYTES = 16 << 10  # a body up to this costs no more than its connection does, and is not counted
RETRY_AFTER_S = 5  # where nobody knows better: an engine that is down is probed as often
# a reply of known length up to this is read whole: one write, and a break in it is still an honest 502
WHOLE_BYTES = 256 << 10
# of a stream that its client has not taken yet, beyond which the engine has to wait; twice what the transport calls
# full
AHEAD_BYTES = 128 << 10
ANSWER_S = 5.0  # for telling a client what went wrong; it may not be reading
# Belong to one connection (RFC 9110, section 7.6.1), or are written anew.
_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
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
    # settled here, and not by whoever asks: vLLM takes both for orders
    "x-vllm-priority",
    "x-data-parallel-rank",
    # between a browser and us
    "origin",
    "access-control-request-method",
    "access-control-request-headers",
    # of the client's account with somebody else
    "cookie",
    "openai-organization",
    "openai-project",
}
_NOT_SENT_ON_ANEW = _NOT_SENT_ON | {"tracestate"}
# Who may read an answer in a browser is settled by cors of gateway.yaml: vLLM allows every origin unless it is told
# otherwise.
_NOT_SENT_BACK = (
    _HOP
    | {"x-request-id"}
    | {
        f"access-control-{name}"
        for name in (
            "allow-origin",
            "allow-credentials",
            "allow-headers",
            "allow-methods",
            "allow-private-network",
            "expose-headers",
            "max-age",
        )
    }
)
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
}

_WHY_LATER = {
    "team_limit": "team {team} has as many requests in flight as it may; send the next when one of them has ended",
    "queue_full": "the queue is full and team {team} has its share of it; retry after the time in Retry-After",
    "est_wait": "a request of team {team} would now wait longer than it may; try again later",
}

_RESPONSES = "/v1/responses"
_STORED = re.compile(_RESPONSES + "/(?!render$)([^/]+)")  # a path that names a stored response
_SENT = operator.attrgetter("sent")  # of an Ask: encodes what has changed

_log = logging.getLogger("gateway")


class _End(Exception):
    """The exchange ends here for this reason of the vocabulary."""

    def __init__(
        self, reason: str, message: str = "", retry_after_s: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status or REASONS[reason].status
        self.reason = reason
        self.message = message or REASONS[reason].why
        self.retry_after_s = retry_after_s


def sent_key(headers: CIMultiDictProxy[str]) -> str | None:
    """The API key of a request: a bearer token, or x-api-key as clients of the messages API send it."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or (headers.get("Authorization") or None)


def has_two_keys(headers: CIMultiDictProxy[str], teams: Teams) -> bool:
    """Return whether a request shows keys of which a proxy on the path may check the one and the gateway the other.

    An x-api-key of no team beside a bearer token is of some other service, and no matter."""
    sent, others = headers.getall("Authorization", []), headers.getall("x-api-key", [])
    if len(sent) > 1 or len(others) > 1:
        return True
    if not sent or not others or sent[0][:7].lower() != "bearer ":
        return False
    other = teams.of(others[0])
    return other is not None and other != teams.of(sent[0][7:].strip())


def _why_nobody(headers: CIMultiDictProxy[str], teams: Teams) -> str:
    """Return the reason for which a request has no team."""
    if has_two_keys(headers, teams):
        return "two_keys"
    return "unknown_key" if sent_key(headers) else "no_key"


class RequestHandler:
    """One exchange in motion: what all share, plus the request, its response and its timer. admitted: whether it takes
    a slot of an engine."""

    def __init__(self, services: Services, request: web.BaseRequest, x: RequestState, *, admitted: bool) -> None:
        self._services = services
        self._terms = services.life.terms
        self._request = request
        self._x = x
        self._admitted = admitted
        self._ask = token_requests.TokenRequest(body=b"")
        self._asked = RequestedModel(None)
        self._ticket: Ticket | None = None
        self._response: web.StreamResponse | None = None  # once its head has gone out
        self._timer = asyncio.timeout(None)
        self._taken = 0  # bytes of its body, of those that may be held
        self._mid_event = False  # whether the client has the beginning of an event whose end never came
        self._stage = "body_timeout"  # the reason, should time run out now

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
        """Team, body, terms, admission, engine, answer: cheapest refusal first."""
        x, services = self._x, self._services
        if not open_to_all and x.team is None:
            raise _End(_why_nobody(self._request.headers, self._terms.teams))
        if self._request.headers.get("Expect", "100-continue").lower() != "100-continue":
            raise _End("expectation_failed")
        if services.life.draining:
            raise _End("draining")
        if (
            x.team is not None
            and x.route == "/v1/models"
            and self._request.method == "GET"
            and self._terms.policy.models
        ):
            return await self._finish(
                web.json_response(
                    self._terms.listing(x.team, services.unix_s()), headers={"X-Request-Id": x.request_id}
                )
            )
        # What needs no key gets no memory either: a body sent to it is not read. With one half read a disconnect would
        # pass unnoticed.
        if open_to_all and not self._request.content.is_eof():
            raise _End(
                "body_too_large", f"{self._request.method} {x.route} takes no body; send the request without one"
            )
        self._ask = token_requests.TokenRequest(
            body=b"" if open_to_all else await self._body()
        )  # the one place that holds it, and lets go of it in time
        sticky = self._terms.router.sticky(x.team, self._ask.body)
        if not self._admitted or x.team is None:
            self._asked = await self._passed_on(x.team)
        else:
            await self._read()
            await self._enforce_policy(x.team)
            await self._wait_for_slot(x.team)
        return await self._answered(self._choice(sticky))

    async def _passed_on(self, team: str | None) -> RequestedModel:
        """The model of a request that leaves no record: a team with a list of models meets the engines of those only.

        Raises _End for a body that names another one."""
        if team is None:
            return RequestedModel(None)
        if (stored := _STORED.match(self._x.route)) is not None:
            self._owned(stored[1])
        if (terms := self._terms.team(team)).models is None:
            return RequestedModel(None)
        names, ask = self._terms.names, await self._services.large.read(self._x.route, self._ask.body)
        if ask.stream is None and ask.body:  # it may name a model that only the engine can read
            raise _End(
                "bad_body", await self._services.large.describe(ask.body, self._request.headers.get("Content-Type", ""))
            )
        if (named := ask.model) is None:
            return names.of(next(iter(names.visible(terms)), None))
        if not may_ask(terms, asked := names.of(named)):
            raise _End("model_not_allowed", f"team {team} may not ask for model {named[:100]!r}")
        return asked

    async def _read(self) -> None:
        """What is asked for, by whom, and how much that may be."""
        x, services = self._x, self._services
        body = self._ask.body
        self._ask = ask = (
            token_requests.read(x.route, body) if len(body) <= LARGE_BYTES else await services.large.read(x.route, body)
        )
        del body
        self._asked = asked = self._terms.names.of(ask.model)
        x.priority = self._terms.team(x.team or "").band
        x.model, x.named, x.adapter = asked.model or ask.model, asked.model is not None, asked.adapter
        x.stream, x.n, x.prompts = ask.stream, ask.n, min(ask.prompts, token_requests.MOST_TEXTS)
        x.est_prompt_tokens = services.estimator.prompt(x.model, ask, x.team)

    async def _enforce_policy(self, team: str) -> None:
        """Limits the output to what the team may have. Raises _End for what the team or model does not allow."""
        x, ask, terms = self._x, self._ask, self._terms.team(team)
        # the engine may read more than we do: it would escape every limit
        if ask.stream is None and self._x.route not in token_requests.UPLOADS:
            raise _End(
                "bad_body", await self._services.large.describe(ask.body, self._request.headers.get("Content-Type", ""))
            )
        if ask.uncountable:
            raise _End("uncountable", ask.uncountable)
        if ask.transfer and not terms.kv_transfer:
            raise _End(
                "uncountable",
                f"team {team} may not send {ask.transfer}: leave it out, or set kv_transfer in teams.yaml",
            )
        if not may_ask(terms, self._asked):
            raise _End(
                "model_not_allowed", f"team {team} may not ask for model {(ask.model or 'without a name')[:100]!r}"
            )
        if x.route == _RESPONSES:
            self._owned(ask.text("previous_response_id"))
        prompt, most = x.est_prompt_tokens or 0, terms.max_output_tokens
        if terms.max_prompt_tokens is not None:
            self._limit_prompt(team, prompt, terms.max_prompt_tokens)
        if most is not None and ask.max_tokens is not None and ask.max_tokens > most and terms.over_output == "refuse":
            raise _End(
                "output_too_long", f"{ask.max_tokens} tokens of output are asked for; team {team} may have {most}"
            )
        model = self._terms.policy.models.get(self._asked.model or "")
        context = model.max_model_len if model else None
        self._ask = ask.limited(most)
        # without a limit of its own it wants what the context has left
        wanted = (self._ask.max_tokens or 0) if ask.max_tokens else 0
        # The engine counts exactly and refuses by itself; here only what is too long for sure is kept from the queue.
        if context is not None and self._services.estimator.at_least(prompt, ask) + wanted > context:
            raise _End(
                "context_too_long",
                f"prompt (about {prompt} tokens) and output ({wanted}) are longer than the context of {context} tokens",
            )

    def _limit_prompt(self, team: str, prompt: int, limit: int) -> None:
        """Raise _End for a prompt that is certainly too long for its team, or that probably is while the team has just
        sent one that was."""
        estimator, now = self._services.estimator, self._services.now()
        if (certain := estimator.certain(self._ask)) > limit:
            raise _End("prompt_too_long", f"the prompt has at least {certain} tokens; team {team} may send {limit}")
        if prompt > limit and (wait_s := estimator.strict_s(self._x.model, team, now)):
            why = (
                f"the prompt has about {prompt} tokens; team {team} may send {limit}, and the engine has just counted"
                f" more; retry in {wait_s:.0f} s"
            )
            raise _End("prompt_over_limit", why, wait_s)

    async def _wait_for_slot(self, team: str) -> None:
        """Returns when it is this request's turn. Raises _End when it is refused; the timer ends a wait that is too
        long."""
        x, services = self._x, self._services
        if team not in services.life.terms.policy.teams:  # no longer: its body took time to come
            raise _End("unknown_key")
        turn: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        began, output = services.now(), services.estimator.output(team, self._ask)

        def decided(refusal: Refusal | None = None) -> None:
            if not turn.done():
                turn.set_result(refusal)

        asked = services.admission.ask(team, x.est_prompt_tokens or 0, output, began, decided, decided)
        if isinstance(asked, Refusal):
            raise _refused(asked, team)
        self._ticket, x.queued_s = asked, 0.0
        if not turn.done():
            self._allow("queue_ttl", asked.deadline - began)
            try:
                refusal = await turn
            finally:
                x.queued_s = services.now() - began
            if refusal is not None:  # the request gave way to one of another team
                raise _refused(refusal, team)

    def release_slot(self) -> None:
        """The slot, as soon as the engine has no more work with this request; and what its size has taught."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        x, estimator, reply = self._x, self._services.estimator, self._x.reply
        prompt, output = (
            reply.prompt_tokens,
            reply.completion_tokens if reply.completion_tokens is not None else (x.content_events or None),
        )
        if x.reason in NOTHING_DONE and prompt is None and output is None:
            prompt = output = 0
        self._services.admission.leave(ticket, self._services.now(), prompt, output)
        if reply.prompt_tokens is not None:
            estimator.learn(x.model, self._ask, reply.prompt_tokens, x.team)
        # A client that leaves before the count comes has had content all the same; then the estimate stands for it.
        counted = x.est_prompt_tokens if reply.prompt_tokens is None and x.content_events else reply.prompt_tokens
        limit = self._terms.team(x.team or "").max_prompt_tokens
        if counted is not None and limit is not None and counted > limit:
            estimator.note_overrun(x.model, x.team, self._services.now())
        if reply.completion_tokens is not None and x.team is not None:
            estimator.learn_output(x.team, self._ask, reply.completion_tokens)
            estimator.learn_events(x.team, x.model, x.content_events, reply.completion_tokens)

    def release_body(self) -> None:
        """The body, as soon as nothing can be sent again; what its size has taught stays."""
        self._ask = msgspec.structs.replace(self._ask, body=b"", fields={})
        self._services.bodies.give(self._x.team, self._taken)
        self._taken = 0

    # ---- the engine

    def _choice(self, sticky: bytes) -> UpstreamChoice:
        choice = self._terms.router.choose(self._asked.model, self._x.est_prompt_tokens, sticky, self._services.healthy)
        if choice is None:
            raise _End("upstream_down", "no engine serves this")
        return choice

    async def _answered(self, choice: UpstreamChoice) -> web.StreamResponse:
        """The answer of the upstream that was chosen, or of the first of its fallbacks that does better."""
        x, metrics = self._x, self._services.metrics
        others = (
            self._terms.router.fallbacks(self._asked.model, choice, self._terms.team(x.team or ""), x.est_prompt_tokens)
            if self._ticket
            else []
        )
        if self._timer.when() is not None:
            self._timer.reschedule(None)
        tries = [choice, *others]
        for x.attempt, each in enumerate(tries, 1):
            x.upstream, x.variant, result = each.name, each.upstream.variant, ""
            if self._admitted:
                metrics.sent(each.name, each.upstream.variant)
            try:
                answer = await self._tried(each, held=x.attempt < len(tries))
                result = "ok"
                return answer
            except _End as end:
                result = end.reason
                if each is tries[-1] or self._response is not None or end.reason not in FAILOVER:
                    raise
                x.tried = ",".join(filter(None, (x.tried, f"{each.name}:{end.reason}")))
                x.reply, x.reason, x.content_events, x.retry_after_s = Reply(), None, 0, None
            finally:
                if self._admitted:  # in the words of the record
                    metrics.answered(
                        each.name,
                        each.upstream.variant,
                        x.reason or ("ok" if x.complete else result or self._services.life.cut_by),
                    )
        raise AssertionError("there is always one upstream")

    async def _tried(self, choice: UpstreamChoice, *, held: bool) -> web.StreamResponse:
        """One try, with its own time. held: until it has brought content nothing goes to the client, so that another
        one can be tried."""
        stage, allowed = self._first_stage()
        try:
            async with asyncio.timeout(None) as self._timer:
                self._allow(stage, allowed)
                upstream = await self._sent(choice, last=not held)
                try:
                    if upstream.content_type == "text/event-stream" and not upstream.bodiless:
                        return await self._stream(
                            upstream, strip_usage=self._ask.usage_added and upstream.status == 200, held=held
                        )
                    return await self._whole(upstream, held=held)
                finally:
                    upstream.close()  # keeps the connection after a complete answer, cuts it otherwise
        except TimeoutError:
            raise _End(self._stage) from None

    def _first_stage(self) -> tuple[str, float]:
        timeouts, band = self._services.timeouts, self._band()
        if self._ask.stream:
            return "prefill_timeout", (band and band.prefill_s) or timeouts.prefill_s
        return "total_timeout", (band and band.total_s) or timeouts.total_s

    def _band(self) -> Band | None:
        return self._terms.band(self._x.team) if self._admitted and self._x.team is not None else None

    def _allow(self, stage: str, seconds: float) -> None:
        """From now on, time runs out after `seconds`, and is then called `stage`."""
        self._stage = stage
        self._timer.reschedule(asyncio.get_running_loop().time() + seconds)

    async def _body(self) -> bytes:
        """The whole request body. Raises _End when it is too large or broken."""
        request, limit = self._request, self._services.limits.body_bytes
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        # it came along with its head, as nearly always
        if request.content.is_eof() and request.content.exception() is None:
            body = request.content.read_nowait()
            self._hold(len(body))
            return body
        if self._admitted:
            self._refuse_at_limit(self._x.team or "")
        self._allow("body_timeout", self._services.timeouts.body_s)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not request.can_read_body:
            return b""
        whole, size = io.BytesIO(), 0  # grows in place: to join 32 MiB of pieces takes up to 40 ms
        try:
            async for chunk in request.content.iter_any():
                size += len(chunk)
                self._hold(size)
                whole.write(chunk)
        except (web.RequestPayloadError, aiohttp.ClientPayloadError, HttpProcessingError) as error:
            raise _End(
                "bad_body", "the body broke HTTP's own framing (chunks, length, encoding) before it was complete"
            ) from error
        return whole.getvalue()

    def _refuse_at_limit(self, team: str) -> None:
        """Raise _End for a team that may send nothing more now; its body need not come, nor be read."""
        admission, x = self._services.admission, self._x
        if admission.at_limit(team):
            x.priority = self._terms.team(team).band
            raise _End("team_limit", _WHY_LATER["team_limit"].format(team=team), admission.wait_s(team))

    def _hold(self, size: int) -> None:
        """Its body has so many bytes by now. Raises _End for more than one may have, or than are left to be held."""
        if size > (limit := self._services.limits.body_bytes):
            raise _too_large(limit)
        if size > SMALL_BYTES:
            if not self._services.bodies.take(
                self._x.team, size - self._taken, alone=len(self._terms.policy.teams) == 1
            ):
                raise _End("bodies_full")
            self._taken = size

    def _isolated(self, ask: token_requests.TokenRequest) -> token_requests.TokenRequest:
        """Return the same with the cache salt and the response id of its team, where several teams share the
        engines."""
        team, isolation = self._x.team or "", self._terms.isolation
        if (salt := isolation.salt(team, ask.text("cache_salt"))) is not None:
            ask = ask.salted(salt)
        if (
            self._x.route == _RESPONSES
            and (name := isolation.response_id(team, self._services.new_hex(16))) is not None
        ):
            ask = ask.identified(name)
        return ask

    def _owned(self, response_id: str | None) -> None:
        """Raise _End for a stored response of another team, which is as unknown as one that no engine has."""
        if response_id is not None and not self._terms.isolation.owns(self._x.team or "", response_id):
            raise _End("bad_request", f"response {response_id[:100]!r} is not known", status=404)

    async def _sent(self, choice: UpstreamChoice, *, last: bool) -> UpstreamResponse:
        """The engine's answer, as soon as its head is there. last: nobody else will be asked. Raises _End when none
        comes."""
        request, watch = self._request, self._services.watch
        ask, headers = self._ask.renamed(name_at(choice.upstream, self._asked)), self._headers(choice)
        if (band := self._band()) and choice.upstream.kind == "engine":
            ask = self._isolated(ask).ranked(self._x.route, priority := ask.priority(band.engine_priority))
            # for routes without the field, from vLLM 0.32 on
            headers += [("X-Vllm-Priority", str(priority))] if priority else []
        body = ask.sent if len(ask.body) <= LARGE_BYTES else await self._services.large.run(len(ask.body), _SENT, ask)
        sending = self._services.client.send(
            choice.upstream.url,
            request.method,
            _path(request, self._x.route),
            headers,
            body,
            self.release_body if last else None,
        )
        del ask, body
        try:
            answer = await sending
        except Unreachable as error:
            watch.failed(choice.name)
            if error.late:
                raise _End("connect_timeout") from error
            raise _End("upstream_down", f"the engine behind this gateway cannot be reached ({error})") from error
        except BrokenConnection as error:
            raise _End("upstream_reset") from error
        if answer.status < 500:
            watch.worked(choice.name)
        return answer

    def _headers(self, choice: UpstreamChoice) -> list[tuple[str, str]]:
        """What the engine is told: what the client said about its request, and what only we say."""
        x = self._x
        # The state of a trace that we could not read belongs to none that goes on.
        kept = _without(self._request.headers, _NOT_SENT_ON if x.trace.continued else _NOT_SENT_ON_ANEW)
        # usage must be readable
        ours = [("X-Request-Id", x.request_id), ("traceparent", x.trace.traceparent), ("Accept-Encoding", "identity")]
        return kept + ours + list(self._terms.headers.get(choice.name, {}).items())

    def _begin(self, upstream: UpstreamResponse) -> CIMultiDict[str]:
        """The head to send back."""
        if upstream.status in (429, 503) and (wait := upstream.headers.get("Retry-After", "")).isdecimal():
            self._x.retry_after_s = float(wait[:9])
        headers = CIMultiDict(_without(upstream.headers, _NOT_SENT_BACK))
        headers["X-Request-Id"] = self._x.request_id
        return headers

    async def _whole(self, upstream: UpstreamResponse, *, held: bool) -> web.StreamResponse:
        """Passes a reply that is no event stream, and reads its usage from a copy that is bounded."""
        length = upstream.content_length
        if length is not None and length <= WHOLE_BYTES and self._request.method != "HEAD":
            try:
                body = await upstream.read()
            except BrokenConnection as error:
                raise _End("upstream_reset") from error
            headers = self._begin(upstream)
            self._note(upstream, body, whole=True)
            if held and self._x.reason in FAILOVER:
                raise _End(self._x.reason or "")
            self.release_slot()
            return await self._finish(
                web.Response(status=upstream.status, reason=upstream.reason, headers=headers, body=body)
            )
        if held and (reason := classify(upstream.status, None, ())) in FAILOVER:
            raise _End(reason or "")
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
        self.release_slot()
        return await self._finish(response)

    def _note(self, upstream: UpstreamResponse, body: bytes, *, whole: bool) -> None:
        """Takes in a reply, or the last bytes of one too large to keep, and judges it."""
        x = self._x
        if upstream.content_type == "application/json":
            if not whole:
                x.reply.note_tail(body)
            elif (read := decode(body)) is not None:
                x.reply.note(read)
        x.reason = classify(upstream.status, x.reply.error_code, x.reply.finish_reasons)

    async def _stream(self, upstream: UpstreamResponse, *, strip_usage: bool, held: bool) -> web.StreamResponse:
        """Passes an event stream while the scanner reads along; from its first content on, when it is held until
        then."""
        x, clock = self._x, self._services.now
        scanner = Scanner(strip_usage=strip_usage)
        x.stream, x.reply = True, scanner.reply
        headers = self._begin(upstream)
        if strip_usage:
            headers.popall("Content-Length", None)  # the usage event will be missing
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        try:
            waiting = await self._held(upstream, scanner) if held else b""
            await self._start(response)
            if waiting:
                await self._write(response, waiting)
            self._seen(upstream, scanner)
            if response.content_length is None:
                take = self._taker(upstream, scanner)
                while await _pumped(upstream, take):
                    await self._drained()
            else:
                while chunk := await _next(upstream):
                    await self._write(response, scanner.feed(chunk, clock()))
                    self._seen(upstream, scanner)
            if rest := scanner.close(clock()):
                await self._write(response, rest)
        finally:
            self._mid_event = scanner.mid_event
            x.first_content, x.last_content, x.content_events = (
                scanner.first_content,
                scanner.last_content,
                scanner.content_events,
            )
        x.reason = classify(upstream.status, x.reply.error_code, x.reply.finish_reasons)
        if self._breaks_off(upstream, scanner):
            raise _End("upstream_reset", "the engine ended the stream before its end")
        self.release_slot()
        return await self._finish(response)

    async def _held(self, upstream: UpstreamResponse, scanner: Scanner) -> bytes:
        """The beginning of a stream, as soon as it has brought what a client waits for. Raises _End for one that failed
        before it did."""
        waiting = bytearray()
        while chunk := await _next(upstream):
            waiting += scanner.feed(chunk, self._services.now())
            if not self._worth_holding(upstream, scanner, waiting):
                return bytes(waiting)
        waiting += scanner.close(self._services.now())
        self._worth_holding(upstream, scanner, waiting, ended=True)
        return bytes(waiting)

    def _taker(self, upstream: UpstreamResponse, scanner: Scanner) -> Callable[[bytes], bool]:
        """What is done with each piece of a stream; whether there may be more. It runs for every token, so it has no
        layer too many.

        Writes to the client in the very call, as the server's own writer does, which has to be awaited."""
        transport, chunked = self._request.transport, self._request.version >= HttpVersion11
        if transport is None:
            raise ConnectionResetError("the client is gone")
        feed, reply, clock, moved = scanner.feed, scanner.reply, self._services.now, self._decode_s() / 4
        write, is_closing, ahead = transport.write, transport.is_closing, transport.get_write_buffer_size
        move_at = 0.0

        def take(chunk: bytes) -> bool:
            nonlocal move_at
            now = clock()
            if ready := feed(chunk, now):
                if is_closing():
                    raise ConnectionResetError("the client is gone")
                write(b"%x\r\n%b\r\n" % (len(ready), ready) if chunked else ready)
            if (now >= move_at and scanner.last_content == now) or scanner.done or reply.error_code is not None:
                self._seen(upstream, scanner)
                move_at = now + moved
            return ahead() < AHEAD_BYTES

        return take

    def _seen(self, upstream: UpstreamResponse, scanner: Scanner) -> None:
        """What the stream has brought so far: content moves the deadline on; with its last word the engine has no more
        work with it."""
        x = self._x
        if scanner.content_events != x.content_events:
            x.content_events = scanner.content_events
            self._allow("decode_timeout", self._decode_s() * 1.25)
        if scanner.done or scanner.reply.error_code is not None:  # whatever the line and the client still have to do
            self.release_slot()
            if not x.complete:
                x.reason, x.complete = (
                    classify(upstream.status, scanner.reply.error_code, scanner.reply.finish_reasons),
                    True,
                )

    async def _drained(self) -> None:
        """Waits while the client does not read; should time run out meanwhile, it is the client's."""
        stage, self._stage = self._stage, "client_stalled"
        await self._request.writer.drain()
        self._stage = stage

    def _breaks_off(self, upstream: UpstreamResponse, scanner: Scanner) -> bool:
        """Whether a stream has ended without its end."""
        said = (
            classify(upstream.status, scanner.reply.error_code, scanner.reply.finish_reasons)
            or scanner.done
            or scanner.reply.finish_reasons
        )
        return not said and upstream.status == 200 and self._x.route in token_requests.ENDING

    def _worth_holding(
        self, upstream: UpstreamResponse, scanner: Scanner, waiting: bytearray, *, ended: bool = False
    ) -> bool:
        """Whether a held stream still has brought nothing that a client waits for. Raises _End for one that failed
        before it did."""
        reason = classify(upstream.status, scanner.reply.error_code, scanner.reply.finish_reasons)
        if ended and reason is None and self._breaks_off(upstream, scanner):
            reason = "upstream_reset"
        if reason in FAILOVER and not scanner.content_events:
            raise _End(reason or "")
        return not (scanner.content_events or scanner.done or reason or len(waiting) > HELD_BYTES)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Waits while the client does not read; should time run out meanwhile, it is the client's."""
        stage, self._stage = self._stage, "client_stalled"
        await response.write(data)
        self._stage = stage

    def _decode_s(self) -> float:
        """How long content may stay away. Not every event moves that deadline, for a timer costs more than it tells: it
        may be late by a quarter."""
        band = self._band()
        return (band and band.decode_s) or self._services.timeouts.decode_s

    async def _start(self, response: web.StreamResponse) -> None:
        self._x.status = response.status
        if response.content_length is None and self._request.version < HttpVersion11:
            # the end of the connection is how it ends; the server would keep it open for who asks for that
            response.force_close()
        self.release_body()
        self._services.mark(self._request, response)
        await response.prepare(self._request)
        self._response = response

    async def _finish(self, response: web.StreamResponse) -> web.StreamResponse:
        """Sends the end (and for a whole response everything), so that a client that leaves before it is on record."""
        self._stage = "client_stalled"
        self._x.status = response.status
        self.release_body()
        if not response.prepared:
            self._services.mark(self._request, response)
        await response.prepare(self._request)
        self._response = response
        await response.write_eof()
        return response

    async def _answer(self, end: _End) -> web.StreamResponse:
        """Tells the client why its request ended: as a status, as an event inside a stream, or by cutting what is
        neither."""
        self._x.ends(end.reason)
        self.release_slot()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                if self._response is None:
                    return await self._finish(self._refusal(end))
                endless = self._response.content_length is None  # into a promised length no more fits
                if self._x.complete and endless:
                    return await self._finish(self._response)
                if self._response.content_type == "text/event-stream" and endless and end.reason != "client_stalled":
                    apart = b"\n\n" if self._mid_event else b""  # so that our error event is one of its own
                    await self._response.write(apart + b"data: " + msgspec.json.encode(_error(end)) + b"\n\n")
                    return await self._finish(self._response)
        if self._request.transport is not None:  # a clean end would pass for a complete reply
            self._request.transport.abort()
        return self._response or web.Response()

    def _refusal(self, end: _End) -> web.Response:
        x, status = self._x, end.status
        headers = {"X-Request-Id": x.request_id, "Content-Type": "application/json"}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if end.reason in RETRYABLE:
            x.retry_after_s = float(self._retry_after_s(end))
            headers |= {
                "Retry-After": f"{x.retry_after_s:.0f}",
                "Retry-After-Ms": f"{x.retry_after_s * 1000:.0f}",
                "X-Should-Retry": "true",
            }
        elif status < 500:
            headers["X-Should-Retry"] = "false"
        answer = web.Response(status=status, headers=headers, body=msgspec.json.encode(_error(end)))
        if self._services.life.draining:
            answer.force_close()
        return answer

    def _retry_after_s(self, end: _End) -> int:
        """Seconds, at most what clients obey."""
        wait_s = end.retry_after_s
        if wait_s is None and end.reason == "queue_ttl" and self._x.team in self._terms.policy.teams:
            wait_s = self._services.admission.wait_s(self._x.team or "")
        return min(int(LATEST_S), max(1, math.ceil((wait_s or RETRY_AFTER_S) * self._services.jitter())))


def _refused(refusal: Refusal, team: str) -> _End:
    return _End(refusal.reason, _WHY_LATER[refusal.reason].format(team=team), refusal.retry_after_s)


def _error(end: _End) -> dict[str, Any]:
    return error_body(end.status, end.reason, end.message)


def error_body(status: int, reason: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it; `code` is our reason."""
    return {
        "error": {"message": message, "type": _ERROR_TYPES.get(status, "server_error"), "param": None, "code": reason}
    }


async def _next(upstream: UpstreamResponse) -> bytes:
    """What has come from the engine; empty at the end. Raises _End when the connection breaks."""
    try:
        return await upstream.chunk()
    except BrokenConnection as error:
        raise _End("upstream_reset", str(error)) from error


async def _pumped(upstream: UpstreamResponse, take: Callable[[bytes], bool]) -> bool:
    """Gives to `take` what comes from the engine; whether there may be more. Raises _End when the connection breaks."""
    try:
        return await upstream.pump(take)
    except BrokenConnection as error:
        raise _End("upstream_reset", str(error)) from error


def _too_large(limit: int) -> _End:
    return _End("body_too_large", f"the request body is larger than {limit} bytes")


def _path(request: web.BaseRequest, route: str) -> str:
    """The path as we read it, so that the engine reads it alike, and the query as it came."""
    _, mark, query = request.rel_url.raw_path_qs.partition("?")
    return quote(route) + mark + query


def _without(headers: CIMultiDict[str] | CIMultiDictProxy[str], dropped: frozenset[str]) -> list[tuple[str, str]]:
    """Headers to pass on: without the dropped ones, and without those that Connection names."""
    named = ",".join(headers.getall("Connection", ()))
    if named and named.lower() not in ("keep-alive", "close"):
        dropped = dropped | {name.strip().lower() for name in named.split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]
