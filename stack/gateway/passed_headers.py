"""Headers that pass through the gateway in each direction, and the client's key."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from multidict import CIMultiDict

from stack.gateway.routes import RECORDED

if TYPE_CHECKING:
    from stack.gateway.client_request import ClientRequest
    from stack.gateway.teams import Teams
_LONGEST_NAME = 128  # characters of an engine's name
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
NOT_SENT_ON = _HOP | {
    "host",
    "content-length",
    "expect",
    "accept-encoding",
    "authorization",
    "x-api-key",
    "api-key",
    "x-request-id",
    "traceparent",
    # settled here, and not by the client: vLLM obeys both
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
NOT_SENT_ON_ANEW = NOT_SENT_ON | {"tracestate"}
# Who may read an answer in a browser is settled by cors of gateway.yaml: vLLM allows every origin unless it is started
# otherwise.
NOT_SENT_BACK = (
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


def sent_key(headers: CIMultiDict[str]) -> str | None:
    """The API key of a request: a bearer token, or x-api-key as clients of the messages API send it."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or (headers.get("Authorization") or None)


def has_two_keys(headers: CIMultiDict[str], teams: Teams) -> bool:
    """Return whether a request shows keys of which a proxy on the path may check the one and the gateway the other.

    An x-api-key of no team beside a bearer token is of some other service, and no matter."""
    sent, others = headers.getall("Authorization", []), headers.getall("x-api-key", [])
    if len(sent) > 1 or len(others) > 1:
        return True
    if not sent or not others or sent[0][:7].lower() != "bearer ":
        return False
    other = teams.of(others[0])
    return other is not None and other != teams.of(sent[0][7:].strip())


def reason_for_no_team(headers: CIMultiDict[str], teams: Teams) -> str:
    """Return the reason for which a request has no team."""
    if has_two_keys(headers, teams):
        return "two_keys"
    return "unknown_key" if sent_key(headers) else "no_key"


def upstream_path(request: ClientRequest, route: str) -> str:
    """The path as we read it, so that the engine reads it alike, and the query as it came."""
    return (route if route in RECORDED else quote(route)) + request.query


def headers_without(headers: CIMultiDict[str], dropped: frozenset[str]) -> list[tuple[str, str]]:
    """Headers to pass on: without the dropped ones, and without those that Connection names."""
    if "Connection" in headers:
        named = ",".join(headers.getall("Connection"))
        if named.lower() not in ("keep-alive", "close"):
            dropped = dropped | {name.strip().lower() for name in named.split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


def take_engine_name(headers: CIMultiDict[str], name: str | None) -> str | None:
    """Remove the response header in which a router names an engine, and return its value; None where there is none."""
    values = [] if name is None else headers.popall(name, [])
    return values[0][:_LONGEST_NAME] if values and values[0].isprintable() else None
