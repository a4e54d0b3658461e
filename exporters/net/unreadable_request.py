"""Refusals of requests that are no valid HTTP."""

from __future__ import annotations

from typing import NamedTuple

from aiohttp.http_exceptions import BadStatusLine, HttpProcessingError, InvalidURLError, LineTooLong


class UnreadableRequest(NamedTuple):
    """Refusal of a request that a parser rejected.

    The parser's own message quotes input, which may be a key or a prompt."""

    status: int
    reason: str
    sentence: str


HEAD_TOO_LARGE = UnreadableRequest(
    431, "head_too_large", "The request line or a header is too long, or there are too many headers."
)
BAD_REQUEST_LINE = UnreadableRequest(
    400, "bad_request_line", "The first line is no HTTP request line; TLS and HTTP/2 clients need another address."
)
BAD_TARGET = UnreadableRequest(400, "bad_request_line", "The request target is neither a path nor a URL.")
BAD_FRAMING = UnreadableRequest(
    400, "bad_framing", "The headers or the body framing (Content-Length, Transfer-Encoding, chunks) violate HTTP."
)
_UNREADABLE: dict[type[HttpProcessingError], UnreadableRequest] = {
    LineTooLong: HEAD_TOO_LARGE,
    BadStatusLine: BAD_REQUEST_LINE,
    InvalidURLError: BAD_TARGET,
}


def refusal_of(error: BaseException) -> UnreadableRequest:
    """Return status, reason and message for input that the parser rejected."""
    if "Too many headers" in str(error.args[:1]):
        return HEAD_TOO_LARGE
    return next((found for kind, found in _UNREADABLE.items() if isinstance(error, kind)), BAD_FRAMING)
