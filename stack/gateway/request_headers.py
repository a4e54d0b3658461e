"""List of a client's request headers that engines get, and what pass_headers may add to it.

Invariant: no key of a client, and nothing that the gateway itself writes, is ever on it."""

from __future__ import annotations

import re
from collections.abc import Iterable

HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,60}")  # a token of RFC 9110
# Belong to one connection (RFC 9110, section 7.6.1), or are written anew.
HOP = frozenset(
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
_OURS = HOP | {
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
