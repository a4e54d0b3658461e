"""Headers that pass through the gateway in each direction, and the client's key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

from multidict import CIMultiDict

from stack.gateway.routes import RECORDED

if TYPE_CHECKING:
    from stack.gateway.client_request import ClientRequest
    from stack.gateway.teams import Teams
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,60}")  # a token of RFC 9110
_NONE: frozenset[str] = frozenset()
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
# Written by the gateway, or the client's own key: pass_headers cannot open these.
_OURS = _HOP | {
    "host",
    "content-length",
    "content-encoding",
    "expect",
    "accept-encoding",
    "authorization",
    "x-api-key",
    "api-key",
    "x-request-id",
    "traceparent",
    "tracestate",
    # settled here, and not by the client: vLLM obeys both
    "x-vllm-priority",
    "x-data-parallel-rank",
}
# What vLLM 0.10 to 0.33 reads of a request, and what the APIs of OpenAI and Anthropic define, which a service of kind
# api may read. Others could choose an adapter, an engine or an address, where a proxy or a router before the engine
# obeys them. Source: raw_request.headers in vllm/entrypoints, without endpoint-load-metrics-format, which shows the
# load of all teams.
_PASSED = frozenset(
    (
        "accept",
        "accept-language",
        "content-type",
        "user-agent",
        "x-session-id",
        "openai-beta",
        "anthropic-version",
        "anthropic-beta",
    )
)
PassedHeaders = tuple[frozenset[str], frozenset[str]]


def passed_headers(more: Iterable[str]) -> PassedHeaders:
    """Return the names of a client's headers that engines get: of a request that begins a trace, and of one that goes
    on with one, whose state passes too."""
    names = _PASSED.union(name.lower() for name in more)
    return names, names | {"tracestate"}


def header_mistake(name: str) -> str | None:
    """Return why a header of clients cannot be passed to engines; None if it can."""
    if not HEADER.fullmatch(name):
        return f"{name[:60]!r} is no name of a header; write it like X-Tenant"
    if name.lower() in _OURS:
        return f"{name} is of one connection, a key, or written by the gateway itself; leave it out"
    return None


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


def headers_among(headers: CIMultiDict[str], passed: frozenset[str]) -> list[tuple[str, str]]:
    """Headers of a request to pass on: those of this list, without those that Connection names."""
    if "Connection" in headers:
        passed = passed - _of_connection(headers)
    return [(name, value) for name, value in headers.items() if name.lower() in passed]


def headers_without(headers: CIMultiDict[str], dropped: frozenset[str]) -> list[tuple[str, str]]:
    """Headers of a response to pass on: without the dropped ones, and without those that Connection names."""
    if "Connection" in headers:
        dropped = dropped | _of_connection(headers)
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


def _of_connection(headers: CIMultiDict[str]) -> frozenset[str]:
    """Return the names of headers that are of this connection by its own word."""
    named = ",".join(headers.getall("Connection")).lower()
    return _NONE if named in ("keep-alive", "close") else frozenset(map(str.strip, named.split(",")))


def take_engine_name(headers: CIMultiDict[str], name: str | None) -> str | None:
    """Remove the response header in which a router names an engine, and return its value; None where there is none."""
    values = [] if name is None else headers.popall(name, [])
    return values[0][:_LONGEST_NAME] if values and values[0].isprintable() else None
