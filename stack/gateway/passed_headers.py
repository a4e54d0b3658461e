"""Headers that pass through the gateway in each direction, and the client's key."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from multidict import CIMultiDict

from stack.gateway.request_headers import HOP
from stack.gateway.routes import RECORDED

if TYPE_CHECKING:
    from stack.gateway.client_request import ClientRequest
    from stack.gateway.teams import Teams
_NONE: frozenset[str] = frozenset()
_LONGEST_NAME = 128  # characters of an engine's name
# Who may read an answer in a browser is settled by cors of gateway.yaml: vLLM allows every origin unless it is started
# otherwise.
NOT_SENT_BACK = (
    HOP
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
