"""Errors to clients, as the official client of each API raises them."""

from __future__ import annotations

from typing import Any

import msgspec

from stack.gateway.admission_state import Refusal
from stack.gateway.reasons import REASONS
from stack.gateway.routes import Dialect

# By status: types of OpenAI and of Anthropic. Source: their API references and clients, and vLLM's own errors.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    417: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
}

_CODES = {404: "not_found", 405: "method_not_allowed"}
RETRY_MESSAGES = {
    "team_limit": "team {team} has as many requests in flight as it may; send the next when one of them has ended",
    "queue_full": "the queue is full and team {team} has its share of it; retry after the time in Retry-After",
    "est_wait": "a request of team {team} would now wait longer than it may; try again later",
}


class RequestEnd(Exception):
    """The exchange ends here for this reason of the vocabulary."""

    def __init__(
        self,
        reason: str,
        message: str = "",
        retry_after_s: float | None = None,
        status: int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param  # field of the request
        self.status = status or REASONS[reason].status
        self.reason = reason
        self.message = message or REASONS[reason].why
        self.retry_after_s = retry_after_s


def refusal_end(refusal: Refusal, team: str) -> RequestEnd:
    return RequestEnd(refusal.reason, RETRY_MESSAGES[refusal.reason].format(team=team), refusal.retry_after_s)


def error_body(dialect: Dialect, end: RequestEnd, request_id: str) -> dict[str, Any]:
    """Return the body of an error. `code` is our reason, except for 404 and 405."""
    openai, anthropic = _TYPES.get(end.status, ("server_error", "api_error"))
    code = _CODES.get(end.status, end.reason)
    if dialect == "anthropic":
        error = {"type": anthropic, "message": end.message, "code": code}
        return {"type": "error", "error": error, "request_id": request_id}
    if dialect == "cohere":
        return {"message": end.message, "id": request_id, "code": code}
    return {"error": {"message": end.message, "type": openai, "param": end.param, "code": code}}


def error_events(dialect: Dialect, end: RequestEnd, request_id: str) -> bytes:
    """Return the events by which a stream that has begun ends in an error."""
    body = error_body(dialect, end, request_id)
    if dialect == "cohere":
        ending = {"finish_reason": "ERROR", "error": end.message}
        return b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode({"type": "message-end", "delta": ending})
    if dialect == "responses":
        body |= {**body["error"], "type": "error", "sequence_number": 0}
    name = b"" if dialect == "openai" else b"event: error\n"
    return name + b"data: %b\n\n" % msgspec.json.encode(body)


def too_large_end(limit: int) -> RequestEnd:
    return RequestEnd("body_too_large", f"the request body is larger than {limit} bytes")
