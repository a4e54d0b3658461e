"""Reasons of failure and rejection: the values of the field `reason`, and their HTTP status.

Invariant: a reason belongs to exactly one outcome, so that counting by reason and counting by outcome agree. An ok
request has none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from exporters.requests.record import Outcome


@dataclass(frozen=True, slots=True)
class Reason:
    """outcome: which of the five ends it is. status: what our own answer carries; 0 where the engine or nobody
    answers."""

    outcome: Outcome
    status: int
    why: str


REASONS: dict[str, Reason] = {
    # refused before the engine was asked
    "no_key": Reason("rejected", 401, "the request carried no API key"),
    "unknown_key": Reason("rejected", 401, "the API key belongs to no team"),
    "two_keys": Reason(
        "rejected",
        400,
        "the request carries two API keys; send one, as a bearer token in Authorization or in x-api-key",
    ),
    "expectation_failed": Reason(
        "rejected", 417, "the request carries an Expect other than 100-continue; send it without"
    ),
    "body_too_large": Reason("rejected", 413, "the body is larger than limits.body_bytes"),
    "bad_body": Reason(
        "rejected", 400, "the body broke HTTP's own framing before it was complete, or is no JSON object in UTF-8"
    ),
    "bodies_full": Reason(
        "rejected",
        503,
        "as many bytes of requests are held as limits.bodies_bytes lets all, or half of it one of several teams; or too"
        " many bodies of the team wait to be read",
    ),
    "uncountable": Reason(
        "rejected",
        400,
        "it asks for what cannot be counted: too many texts, work after the answer, a prompt in a transfer field",
    ),
    "draining": Reason("rejected", 503, "the gateway is stopping and takes nothing new"),
    # refused by the terms of its team or model: the same request would be refused again, but for prompt_over_limit
    "model_not_allowed": Reason("rejected", 403, "the team may not ask for this model"),
    "prompt_too_long": Reason("rejected", 400, "the prompt is longer than the team's max_prompt_tokens"),
    "prompt_over_limit": Reason(
        "rejected", 429, "the prompt is probably longer than max_prompt_tokens, and the team has just sent a longer one"
    ),
    "output_too_long": Reason("rejected", 400, "more output is asked for than the team's max_output_tokens"),
    "too_many_outputs": Reason("rejected", 400, "more texts are asked for than the team's max_outputs or max_running"),
    "too_many_logprobs": Reason(
        "rejected", 400, "more log-probabilities are asked for than the team's max_logprobs or max_prompt_logprobs"
    ),
    "context_too_long": Reason("rejected", 400, "prompt and output together are longer than the model's context"),
    # refused for load: later it may go through
    "team_limit": Reason("rejected", 429, "the team has as many requests in flight as it may"),
    "queue_full": Reason("rejected", 429, "the queue is full, and the team has its share of it"),
    "est_wait": Reason("rejected", 429, "it would wait longer than its band may"),
    "queue_ttl": Reason("rejected", 503, "it waited as long as its band may"),
    # refused by the engine, by status 429 or 503 or by an error event inside a 200 stream
    "engine_busy": Reason("rejected", 0, "the engine refused it for load"),
    # refused by the engine for what it says; the client's mistake, so it must not count as a failure of the service
    "bad_request": Reason("rejected", 0, "the engine called the request wrong: 4xx, parameters, length, model name"),
    # the engine answered with an error
    "upstream_auth": Reason("upstream_error", 0, "the engine did not accept the gateway's own key: 401 or 403"),
    "engine_error": Reason("upstream_error", 0, "the engine failed: 5xx, an error event, or finish_reason error"),
    "engine_abort": Reason("upstream_error", 0, "the engine gave the request up: finish_reason abort"),
    # the engine did not answer
    "upstream_down": Reason("upstream_error", 503, "no connection to the engine"),
    "upstream_reset": Reason(
        "upstream_error", 502, "the connection to the engine broke, or a stream ended without its end"
    ),
    "engine_hung": Reason("upstream_error", 503, "the engine made no progress, and nothing of the answer had come"),
    "gateway_stopped": Reason("upstream_error", 0, "cut when the time for draining was over"),
    "gateway_error": Reason("upstream_error", 500, "a defect of the gateway itself; its log has the traceback"),
    # time
    "body_timeout": Reason("timeout", 408, "the client took too long to send its body"),
    "connect_timeout": Reason("timeout", 504, "the engine did not accept a connection in time"),
    "prefill_timeout": Reason("timeout", 504, "no content token in time"),
    "decode_timeout": Reason("timeout", 504, "too long between two content tokens"),
    "total_timeout": Reason("timeout", 504, "a reply without stream took too long"),
    # the client left
    "client_hangup": Reason("client_abort", 0, "the client closed its connection"),
    "client_stalled": Reason("client_abort", 0, "the client stopped reading its stream"),
}

_BUSY = (429, 503)


def classify(status: int, error_code: int | None, finish_reasons: Collection[str]) -> str | None:
    """The reason that an engine's complete answer amounts to; None for ok.

    vLLM refuses some streams with status 200 and one error event, so what stands inside counts like a status."""
    if status == 503 and error_code is None:  # no error body of vLLM's: a balancer without an engine behind it
        return "engine_error"
    code = status if status >= 400 else error_code
    if code is not None:
        if code in _BUSY:
            return "engine_busy"
        if code in (401, 403):
            return "upstream_auth"
        return "bad_request" if 400 <= code < 500 else "engine_error"
    if "error" in finish_reasons:
        return "engine_error"
    return "engine_abort" if "abort" in finish_reasons else None


# Of ours: worth another try after a while.
RETRYABLE = frozenset(
    (
        "team_limit",
        "prompt_over_limit",
        "queue_full",
        "est_wait",
        "queue_ttl",
        "bodies_full",
        "draining",
        "upstream_down",
    )
)
# What another upstream might do better, as long as the client has been sent nothing.
FAILOVER = frozenset(
    (
        "upstream_down",
        "connect_timeout",
        "upstream_reset",
        "upstream_auth",
        "engine_error",
        "engine_abort",
        "engine_busy",
        "prefill_timeout",
        "engine_hung",
    )
)
# An engine has done no work for these, as far as no tokens say otherwise: they are not charged to the team.
NOTHING_DONE = frozenset(("bad_request", "engine_busy", "upstream_auth", "upstream_down", "connect_timeout"))
