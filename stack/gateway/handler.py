"""Handling of one request: body, admission, choice of engine, retries.

Invariants: a client's key never reaches the engine. A client that leaves takes its upstream connection with it, which
makes the engine stop working for it. Another upstream is tried only while the client has been sent nothing. Bodies are
never logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import re
from typing import NoReturn

from stack.gateway import request_body as token_requests
from stack.gateway.admission_state import Refusal
from stack.gateway.answers import ASKED_ONCE, EVENTS, FAILED, JSON, unreadable_head
from stack.gateway.body_reader import BodyReader
from stack.gateway.client_request import Response
from stack.gateway.deadline import Deadline
from stack.gateway.engine_liveness import busy_s
from stack.gateway.ids import request_id
from stack.gateway.large_bodies import FREE_BYTES, LARGE_BYTES
from stack.gateway.passed_headers import headers_among, reason_for_no_team, take_engine_name, upstream_path
from stack.gateway.policy import Team
from stack.gateway.reasons import FAILOVER
from stack.gateway.refusals import RequestEnd, refusal_end
from stack.gateway.reply import Reply
from stack.gateway.request_logprobs import ALL_LOGPROBS
from stack.gateway.routes import ROUTES, find
from stack.gateway.routing import RequestedModel, UpstreamChoice, may_ask, name_at
from stack.gateway.upstream_client import BrokenConnection, HeadTooLong, Unreachable, UpstreamResponse

_RESPONSES = "/v1/responses"
_STORED = re.compile(_RESPONSES + "/(?!render$)([^/]+)")  # a path that names a stored response
_SENT = operator.attrgetter("sent")  # of an Ask: encodes what has changed

# prompt tokens that fill one step of an engine: max_num_batched_tokens of vLLM's server on an H100 or H200 (0.32,
# EngineArgs.get_batch_defaults; 2,048 on smaller GPUs, 16,384 on larger ones)
STEP_TOKENS = 8192
_log = logging.getLogger("gateway")


def wanted_slots(ask: token_requests.TokenRequest, prompt: int) -> int:
    """Return the slots that a request would like to hold: one for each text to make. Where it makes none, as many as
    the steps that its prompt fills, since an engine takes its prompts in any order."""
    return max(1, ask.outputs if ask.form.limit else -(-prompt // STEP_TOKENS))


class RequestHandler(BodyReader):
    """One request, from its head to the choice of an engine and the attempts to get an answer of it."""

    _asked = RequestedModel(None)

    async def run(self) -> None:
        x = self._x
        try:
            with self._timer:
                await self._steps()
        except RequestEnd as end:
            await self._answer(end)
        except TimeoutError:
            await self._answer(RequestEnd(self._stage))
        except ConnectionError:  # only writes to the client are left unguarded below
            x.ends("client_hangup")
        except Exception:
            _log.exception("request %s failed inside the gateway", x.request_id)
            await self._answer(RequestEnd("gateway_error"))

    async def _steps(self) -> None:
        """Team, body, terms, admission, engine, answer: cheapest refusal first."""
        x, services = self._x, self._services
        if (team := x.team) is None:
            raise RequestEnd(reason_for_no_team(self._request.headers, self._terms.teams))
        if self._request.headers.get("Expect", "100-continue").lower() != "100-continue":
            raise RequestEnd("expectation_failed")
        if services.life.draining:
            raise RequestEnd("draining")
        if x.route == "/v1/models" and self._request.method == "GET" and self._terms.policy.models:
            head = {"Content-Type": "application/json; charset=utf-8", "X-Request-Id": x.request_id}
            await self._finish(Response(200, head, self._terms.listing(team, services.unix_s())))
            return
        # the one place that holds it, and lets go of it in time
        self._ask = token_requests.TokenRequest(body=await self._body())
        self._sticky = sticky = self._terms.router.sticky(team, self._ask.body)
        if not self._admitted:
            with services.unrecorded.place(team):
                self._asked = await self._passed_on(team)
                await self._answered(self._choice(sticky))
            return
        await self._read()
        await self._enforce_policy(team)
        await self._wait_for_slot(team)
        await self._answered(self._choice(sticky))

    async def _passed_on(self, team: str) -> RequestedModel:
        """The model of a request that leaves no record: a team with a list of models meets the engines of those only.

        Raises RequestEnd for a body that names another one."""
        if (stored := _STORED.match(self._x.route)) is not None:
            self._owned(stored[1])
        if (terms := self._terms.team(team)).models is None:
            return RequestedModel(None)
        names, ask = self._terms.names, await self._services.large.read(team, self._x.route, self._ask.body)
        if ask.stream is None and ask.body:  # it may name a model that only the engine can read
            await self._refuse_unreadable(team, ask.body)
        if (named := ask.model) is None:
            return names.of(next(iter(names.visible(terms)), None))
        if not may_ask(terms, asked := names.of(named)):
            raise RequestEnd("model_not_allowed", f"team {team} may not ask for model {named[:100]!r}")
        return asked

    async def _refuse_unreadable(self, team: str, body: bytes) -> NoReturn:
        kind = self._request.headers.get("Content-Type", "")
        raise RequestEnd("bad_body", await self._services.large.describe(team, body, kind))

    async def _read(self) -> None:
        """Read the request, its team, and what that team may have."""
        x, services = self._x, self._services
        body = self._ask.body
        self._ask = ask = (
            token_requests.read(x.route, body)
            if len(body) <= FREE_BYTES
            else await services.large.read(x.team or "", x.route, body)
        )
        if ask.respelled:  # its fields may be a copy
            self._hold(2 * len(body))
        del body
        if "request_id" in ask.fields and "X-Request-Id" not in self._request.headers:
            x.request_id = request_id(ask.text("request_id"), lambda size: x.request_id)
        self._asked = asked = self._terms.names.of(ask.model)
        x.priority = self._terms.team(x.team or "").band
        x.model, x.named, x.adapter = asked.model or ask.model, asked.model is not None, asked.adapter
        x.stream, x.n, x.prompts = ask.stream, ask.n, min(ask.prompts, token_requests.MOST_TEXTS)
        x.est_prompt_tokens = services.estimator.prompt(x.model, ask, x.team)

    async def _enforce_policy(self, team: str) -> None:
        """Limits the output to what the team may have. Raises RequestEnd for what the team or model does not allow."""
        x, ask, terms = self._x, self._ask, self._terms.team(team)
        # the engine may read more than we do: it would escape every limit
        if ask.stream is None and not ask.media:
            await self._refuse_unreadable(team, ask.body)
        if ask.uncountable:
            raise RequestEnd("uncountable", ask.uncountable)
        if ask.transfer and not terms.kv_transfer:
            raise RequestEnd(
                "uncountable",
                f"team {team} may not send {ask.transfer}: leave it out, or set kv_transfer in teams.yaml",
            )
        if not may_ask(terms, self._asked):
            raise RequestEnd(
                "model_not_allowed", f"team {team} may not ask for model {(ask.model or 'without a name')[:100]!r}"
            )
        if x.route == _RESPONSES:
            self._owned(ask.text("previous_response_id") or None)  # vLLM takes an empty one for none
        prompt, most = x.est_prompt_tokens or 0, terms.max_output_tokens
        if terms.max_prompt_tokens is not None:
            self._limit_prompt(team, prompt, terms.max_prompt_tokens)
        if most is not None and terms.over_output == "refuse" and (ask.max_tokens or 0) > most:
            raise RequestEnd(
                "output_too_long", f"{ask.max_tokens} tokens of output are asked for; team {team} may have {most}"
            )
        self._apply_limits(team, terms)
        model = self._terms.policy.models.get(self._asked.model or "")
        context = model.max_model_len if model else None
        # without a limit of its own it wants what the context has left
        wanted = (self._ask.max_tokens or 0) if ask.max_tokens else 0
        # The engine counts exactly and refuses by itself; here only what is too long for sure is kept from the queue.
        if context is None or (least := self._services.estimator.at_least(prompt, ask)) + wanted <= context:
            return
        if least > context:  # in OpenAI's words, by which LiteLLM goes on to a model with a longer context
            why = f"This model's maximum context length is {context} tokens; the prompt has at least {least}"
        else:
            why = (
                f"prompt (about {prompt} tokens) and output ({wanted}) are longer than the context of {context} tokens"
            )
        raise RequestEnd("context_too_long", why)

    def _limit_outputs(self, team: str, terms: Team) -> None:
        """Raise RequestEnd for more texts or log-probabilities than the team may ask for."""
        ask, most = self._ask, terms.most_outputs
        if most is not None and ask.outputs > most and ask.limit is not None:
            key = "max_running" if terms.max_outputs is None else "max_outputs"
            raise RequestEnd(
                "too_many_outputs",
                f"{ask.outputs} texts are asked for; team {team} may have {most} of one request ({key}): send several"
                " requests, or set max_outputs in teams.yaml",
            )
        if not (ask.logprobs or ask.prompt_logprobs):
            return
        for key, limit, name, count in (
            ("max_logprobs", terms.max_logprobs, ask.logprobs_by, ask.logprobs),
            ("max_prompt_logprobs", terms.max_prompt_logprobs, ask.prompt_logprobs_by, ask.prompt_logprobs),
        ):
            if limit is None or count <= (limit and limit + 1):
                continue
            number = "all" if count >= ALL_LOGPROBS else count - 1
            raise RequestEnd(
                "too_many_logprobs",
                f"{name} asks for {number} log-probabilities of each token beside its own; team {team} may have"
                f" {limit or 'none at all'} ({key} in teams.yaml)",
            )

    def _apply_limits(self, team: str, terms: Team) -> None:
        """Limit the output. Raises RequestEnd for a limit or a priority that cannot be read, and for too many texts or
        log-probabilities."""
        ask, max_output = self._ask, terms.max_output_tokens
        if ask.outputs > 1 or ask.logprobs or ask.prompt_logprobs:
            self._limit_outputs(team, terms)
        try:
            self._ask = ask if max_output is None else ask.limited(max_output)
            if "priority" in self._ask.fields and (band := self._band()) is not None:
                self._ask.require_priority(band.engine_priority)
        except ValueError as error:
            raise RequestEnd("bad_body", str(error)) from None

    def _limit_prompt(self, team: str, prompt: int, limit: int) -> None:
        """Raise RequestEnd for a prompt that is certainly too long for its team, or that probably is while the team has
        just sent one that was."""
        estimator, now = self._services.estimator, self._services.now()
        if (certain := estimator.certain(self._ask)) > limit:
            raise RequestEnd(
                "prompt_too_long", f"the prompt has at least {certain} tokens; team {team} may send {limit}"
            )
        if prompt > limit and (wait_s := estimator.strict_s(self._x.model, team, now)):
            why = (
                f"the prompt has about {prompt} tokens; team {team} may send {limit}, and the engine has just counted"
                f" more; retry in {wait_s:.0f} s"
            )
            raise RequestEnd("prompt_over_limit", why, wait_s)

    async def _wait_for_slot(self, team: str) -> None:
        """Returns when it is this request's turn. Raises RequestEnd when it is refused; the timer ends a wait that is
        too long."""
        x, services = self._x, self._services
        if team not in services.life.terms.policy.teams:  # no longer: its body took time to come
            raise RequestEnd("unknown_key")
        turn: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        ask, prompt = self._ask, x.est_prompt_tokens or 0
        began, output = services.now(), services.estimator.output(team, ask)

        def decided(refusal: Refusal | None = None) -> None:
            if not turn.done():
                turn.set_result(refusal)

        slots, logprobs = wanted_slots(ask, prompt), (ask.prompt_logprobs, ask.logprobs)
        asked = services.admission.ask(team, prompt, output, began, decided, decided, slots, logprobs)
        if isinstance(asked, Refusal):
            raise refusal_end(asked, team)
        self._ticket, x.queued_s = asked, 0.0
        if not turn.done():
            self._allow("queue_ttl", asked.deadline - began)
            try:
                refusal = await turn
            finally:
                x.queued_s = services.now() - began
            if refusal is not None:  # the request gave way to one of another team
                raise refusal_end(refusal, team)

    # ---- the engine

    def _choice(self, sticky: bytes) -> UpstreamChoice:
        choice = self._terms.router.choose(self._asked.model, self._x.est_prompt_tokens, sticky, self._services.healthy)
        if choice is None:
            raise RequestEnd("upstream_down", "no engine serves this")
        return choice

    async def _answered(self, choice: UpstreamChoice) -> None:
        """The answer of the upstream that was chosen, or of the first of its fallbacks that does better."""
        x, metrics = self._x, self._services.metrics
        others = (
            self._terms.router.fallbacks(self._asked.model, choice, self._terms.team(x.team or ""), x.est_prompt_tokens)
            if self._ticket
            else []
        )
        self._timer.clear()
        tries = [choice, *others]
        for x.attempt, each in enumerate(tries, 1):
            if x.attempt > 1:
                x.reply, x.reason, x.content_events, x.retry_after_s = Reply(x.route), None, 0, None
            self._movable = self._may_move(each)
            x.upstream, x.variant, result = each.name, each.upstream.variant, ""
            if self._admitted:
                metrics.sent(each.name, each.upstream.variant)
            try:
                await self._tried(each, held=x.attempt < len(tries))
                result = "ok"
                return
            except RequestEnd as end:
                result = end.reason
                if end.reason == "engine_hung" and (other := self._elsewhere(each.name)) is not None:
                    tries.insert(x.attempt, other)
                once = end.reason not in FAILOVER or x.reply.unreadable in ASKED_ONCE
                if each is tries[-1] or self._response is not None or once:
                    raise
                x.tried = ",".join(filter(None, (x.tried, f"{each.name}:{end.reason}")))
            finally:
                if self._admitted:  # in the words of the record
                    metrics.answered(
                        each.name,
                        each.upstream.variant,
                        x.reason or ("ok" if x.complete else result or self._services.life.cut_by),
                    )
                    metrics.unreadable(x.route, x.reply.unreadable)
        raise AssertionError("there is always one upstream")

    async def _tried(self, choice: UpstreamChoice, *, held: bool) -> None:
        """One try, with its own time. held: until it has brought content nothing goes to the client, so that another
        one can be tried."""
        stage, allowed = self._first_stage()
        answered = False
        try:
            with Deadline(self._task, self._more_s) as self._timer:
                self._allow(stage, allowed)
                self._begin_attempt(choice)
                upstream = await self._sent(choice, last=not held and not self._movable)
                try:
                    readable = self._x.reply.unreadable is None
                    if upstream.content_type == EVENTS and readable and not upstream.bodiless:
                        await self._stream(
                            upstream, strip_usage=self._ask.usage_added and upstream.status == 200, held=held
                        )
                    else:
                        await self._whole(upstream, held=held)
                    answered = upstream.status == 200 and self._x.reply.unreadable not in FAILED
                finally:
                    upstream.close()  # keeps the connection after a complete answer, cuts it otherwise
        except TimeoutError:
            raise RequestEnd(self._stage) from None
        finally:
            self._end_attempt(choice, answered=answered)

    def _more_s(self) -> float:
        """Return the time that a silent stream gets once more, because its engine's own counters have moved: a parser
        may hold tokens back. It lasts no longer than a reply without stream may."""
        services, decode_s = self._services, self._decode_s()
        now = services.now()
        moves = services.watch.step_s(self._x.upstream or "") <= decode_s
        band = self._band()
        total_s = (band and band.total_s) or services.timeouts.total_s
        started = (
            self._stage == "prefill_timeout" and self._scanner is not None and self._scanner.first_textless is not None
        )
        waits = (started or self._stage == "decode_timeout") and now - self.silent_since < total_s
        return decode_s if moves and waits else 0.0

    def _begin_attempt(self, choice: UpstreamChoice) -> None:
        """Let the watch of the engine see what this attempt receives."""
        self._scanner, self._latest, self._attempt_began = None, None, self._services.now()
        if self._admitted or self.blocking:
            self._services.watch.began(choice.name, self)

    def _end_attempt(self, choice: UpstreamChoice, *, answered: bool) -> None:
        if self._scanner is not None:
            self._x.reply.settle(content=self._scanner.content_events > 0)
        if self._admitted or self.blocking:
            self._services.watch.ended(choice.name, self, answered=answered)

    def _may_move(self, choice: UpstreamChoice) -> bool:
        """Return whether another engine may answer in place of this one: one serves the model, and there is room to
        keep the body."""
        return (
            self._ticket is not None
            and self._services.bodies.roomy
            and self._terms.router.has_other(self._asked.model, choice.name)
        )

    def _elsewhere(self, name: str) -> UpstreamChoice | None:
        """Return another engine in rotation for this request."""
        if not self._movable or self._response is not None or not self._ask.body:
            return None
        choice = self._terms.router.choose(
            self._asked.model, self._x.est_prompt_tokens, self._sticky, self._services.healthy, {name}
        )
        return None if choice is None or choice.last_resort else choice

    # ---- what the watch of an engine sees of an attempt

    @property
    def request_id(self) -> str:
        return self._x.request_id

    @property
    def outputs(self) -> int:
        return 0 if self._scanner is None else self._scanner.content_events + self._scanner.progress_events

    @property
    def silent_since(self) -> float:
        last = None if self._scanner is None else self._scanner.latest
        return self._attempt_began if last is None else last

    @property
    def prompt_tokens(self) -> int:
        return self._x.est_prompt_tokens or 0

    @property
    def busy_s(self) -> float:
        answered = self._response is not None and not self._ask.stream  # be it with a refusal: then all is done
        return 0.0 if answered else busy_s(self._ask, self.prompt_tokens)

    @property
    def blocking(self) -> bool:
        """Loading an adapter keeps the engine from stepping."""
        return not self._admitted and self._x.route.endswith("_lora_adapter")

    def abandon(self) -> None:
        """Give the engine up, if another one can answer and the client has been sent nothing."""
        if self._stage == "engine_hung" or self._elsewhere(self._x.upstream or "") is None:
            return
        with contextlib.suppress(RuntimeError):  # its time runs out at this very moment
            self._allow("engine_hung", 0.0)

    def _first_stage(self) -> tuple[str, float]:
        timeouts, band = self._services.timeouts, self._band()
        if self._ask.stream:
            return "prefill_timeout", (band and band.prefill_s) or timeouts.prefill_s
        return "total_timeout", (band and band.total_s) or timeouts.total_s

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
        """Raise RequestEnd for a stored response of another team, which is as unknown as one that no engine has."""
        if response_id is not None and not self._terms.isolation.owns(self._x.team or "", response_id):
            why = f"Response with id {response_id[:100]!r} not found."
            raise RequestEnd("bad_request", why, status=404, param="response_id")

    async def _sent(self, choice: UpstreamChoice, *, last: bool) -> UpstreamResponse:
        """The engine's answer, as soon as its head is there. last: nobody else will be asked. Raises RequestEnd when
        none comes."""
        request, watch = self._request, self._services.watch
        ask, headers = self._ask.renamed(name_at(choice.upstream, self._asked)), self._headers(choice)
        if (band := self._band()) and choice.upstream.kind == "engine":
            priority = ask.priority(band.engine_priority)
            ask = self._isolated(ask).ranked(band.engine_priority)
            # for routes without the field, from vLLM 0.32 on
            headers += [("X-Vllm-Priority", str(priority))] if priority else []
        self._fields, self._ours = len(ask.fields), len(ask.added)
        large, size = self._services.large, len(ask.body)
        body = ask.sent if size <= LARGE_BYTES else await large.run(self._x.team or "", size, _SENT, ask)
        sending = self._services.client.send(
            choice.upstream.url,
            request.method,
            upstream_path(request, self._x.route),
            headers,
            body,
            self.release_body if last else None,
            resend=self._admitted or (self._x.route in ROUTES and not find(self._x.route).refused),
        )
        del ask, body
        try:
            answer = await sending
        except Unreachable as error:
            watch.failed(choice.name)
            if error.late:
                raise RequestEnd("connect_timeout") from error
            raise RequestEnd("upstream_down", f"the engine behind this gateway cannot be reached ({error})") from error
        except HeadTooLong as error:
            self._x.reply.unreadable = "size"
            raise RequestEnd("engine_error", str(error), status=502) from error
        except BrokenConnection as error:
            raise RequestEnd("upstream_reset") from error
        self._x.prefill_engine = take_engine_name(answer.headers, choice.upstream.prefill_header)
        self._x.decode_engine = take_engine_name(answer.headers, choice.upstream.decode_header)
        if self._admitted and (answer.status != 200 or answer.content_type != JSON):
            self._x.reply.unreadable = unreadable_head(find(self._x.route).answer, answer.status, answer.content_type)
        if answer.status < 500 and self._x.reply.unreadable is None:
            watch.worked(choice.name)
        return answer

    def _headers(self, choice: UpstreamChoice) -> list[tuple[str, str]]:
        """Return the headers for the engine: those of the client about its request, and our own."""
        x = self._x
        # The state of a trace that we could not read belongs to none that goes on.
        kept = headers_among(self._request.headers, self._terms.passed[x.trace.continued])
        # usage must be readable
        ours = [("traceparent", x.trace.traceparent), ("Accept-Encoding", "identity")]
        # where nothing is recorded, an engine takes the id of the body
        if self._admitted or self._request.method != "POST" or "X-Request-Id" in self._request.headers:
            ours.append(("X-Request-Id", x.request_id))
        return kept + ours + list(self._terms.headers.get(choice.name, {}).items())
