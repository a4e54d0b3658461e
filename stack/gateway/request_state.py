"""State of one request in the gateway, and its record. Pure: times are put in by the data path."""

from __future__ import annotations

from dataclasses import dataclass, field

from exporters.requests.record import PROBE_TEAM, Outcome, RequestRecord, timestamp
from stack.gateway.ids import Trace
from stack.gateway.reasons import REASONS
from stack.gateway.reply import Reply

_FINISH = {"client_abort": "abort", "rejected": "rejected", "upstream_error": "error", "timeout": "error"}


@dataclass(slots=True)
class RequestState:
    """Filled in step by step; whatever step ends it, `record` makes a line of what is known. Times in seconds of one
    monotonic clock.

    probe: whether its team sends probes. named: whether the policy knows the model, so that what the reply calls it
    does not matter. tried: upstreams that failed before this one, and why. queued_s: waiting for admission, None before
    it is granted. first_token, token_s: when content was sent on first, and seconds per token behind it; streams only.
    client_wait_s: time in which the client did not read and its response had to wait.
    complete: the client has been sent the end of its answer. Whatever happens after that is no part of it: the official
    OpenAI client hangs up on [DONE] without waiting for the end of the connection's message.
    est_completion_tokens: an estimate of the output, set only where content was sent and its usage never came."""

    request_id: str
    trace: Trace
    route: str
    accepted: float
    team: str | None = None
    probe: bool = False
    priority: str | None = None
    model: str | None = None
    named: bool = False
    adapter: str | None = None
    est_prompt_tokens: int | None = None
    stream: bool | None = None
    n: int | None = None
    prompts: int = 1
    upstream: str | None = None
    prefill_engine: str | None = None
    decode_engine: str | None = None
    variant: str | None = None
    attempt: int | None = None
    tried: str | None = None
    queued_s: float | None = None
    first_token: float | None = None
    token_s: float | None = None
    content_events: int = 0
    est_completion_tokens: int | None = None
    client_wait_s: float = 0.0
    status: int | None = None
    retry_after_s: float | None = None
    complete: bool = False
    reason: str | None = None
    reply: Reply = field(default_factory=Reply)

    @property
    def outcome(self) -> Outcome:
        return REASONS[self.reason].outcome if self.reason else "ok"

    def ends(self, reason: str) -> None:
        """It ends here for this reason, unless it has ended already."""
        if not self.complete:
            self.reason = self.reason or reason


def record(x: RequestState, ended: float, unix_s: float) -> RequestRecord:
    """The line's content. What was not measured or not said is None."""
    reply, outcome = x.reply, x.outcome
    cached = reply.cached_tokens
    return RequestRecord(
        ts=timestamp(unix_s),
        request_id=x.request_id,
        trace_id=x.trace.trace_id,
        span_id=x.trace.span_id,
        parent_span_id=x.trace.parent_id,
        sampled=None if x.trace.sampled else False,
        team=PROBE_TEAM if x.probe else x.team,
        priority=x.priority,
        model=x.model if x.named else reply.model or x.model,
        adapter=x.adapter,
        route=x.route,
        upstream=x.upstream,
        prefill_engine=x.prefill_engine,
        decode_engine=x.decode_engine,
        variant=x.variant,
        engine_version=reply.engine_version,
        attempt=x.attempt,
        tried=x.tried,
        stream=x.stream,
        n=x.n,
        prompts=x.prompts if x.prompts > 1 else None,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=cached,
        completion_tokens=reply.completion_tokens,
        cache_hit=None if cached is None else cached > 0,
        queue_ms=_ms(x.queued_s),
        ttft_ms=None if x.first_token is None else _ms(x.first_token - x.accepted),
        tpot_ms=_ms(x.token_s) if (x.n or 1) == 1 else None,  # of several texts, all grow at once
        e2e_ms=_ms(ended - x.accepted),
        # of a pair they are the decode engine's alone: its queue time contains the transfer, its TTFT no prefill
        engine_queue_ms=None if x.prefill_engine else _round(reply.engine_queue_ms),
        engine_ttft_ms=None if x.prefill_engine else _round(reply.engine_ttft_ms),
        status=x.status,
        finish_reason=_finish_reason(x, outcome),
        outcome=outcome,
        reason=x.reason,
        unreadable=reply.unreadable,
        retry_after_s=x.retry_after_s,
        est_prompt_tokens=x.est_prompt_tokens,
        content_events=None if x.est_completion_tokens is None else x.content_events or None,
        est_completion_tokens=x.est_completion_tokens,
        client_wait_ms=None if x.status is None else _ms(x.client_wait_s),
    )


def _finish_reason(x: RequestState, outcome: Outcome) -> str | None:
    """The engine's where it finished. A client that hangs up behind the last token does not undo that; of several
    texts, others may have run on."""
    if outcome == "client_abort" and x.reply.finish_reason and (x.n or 1) * x.prompts == 1:
        return x.reply.finish_reason
    return _FINISH.get(outcome, x.reply.finish_reason)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds) * 1000, 3)


def _round(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)
