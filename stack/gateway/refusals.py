"""Error responses to clients: body and headers for each reason."""

from __future__ import annotations

from typing import Any

from stack.gateway.admission_state import Refusal
from stack.gateway.reasons import REASONS

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
}

RETRY_MESSAGES = {
    "team_limit": "team {team} has as many requests in flight as it may; send the next when one of them has ended",
    "queue_full": "the queue is full and team {team} has its share of it; retry after the time in Retry-After",
    "est_wait": "a request of team {team} would now wait longer than it may; try again later",
}


class RequestEnd(Exception):
    """The exchange ends here for this reason of the vocabulary."""

    def __init__(
        self, reason: str, message: str = "", retry_after_s: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status or REASONS[reason].status
        self.reason = reason
        self.message = message or REASONS[reason].why
        self.retry_after_s = retry_after_s


def refusal_end(refusal: Refusal, team: str) -> RequestEnd:
    return RequestEnd(refusal.reason, RETRY_MESSAGES[refusal.reason].format(team=team), refusal.retry_after_s)


def end_body(end: RequestEnd) -> dict[str, Any]:
    return error_body(end.status, end.reason, end.message)


def error_body(status: int, reason: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it; `code` is our reason."""
    return {
        "error": {"message": message, "type": _ERROR_TYPES.get(status, "server_error"), "param": None, "code": reason}
    }


def too_large_end(limit: int) -> RequestEnd:
    return RequestEnd("body_too_large", f"the request body is larger than {limit} bytes")
