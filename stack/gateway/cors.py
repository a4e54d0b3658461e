"""Cross-origin requests (CORS, Fetch standard): web pages that may use the gateway from a browser. Pure.

Invariant: an answer that any origin may read ("*") never allows credentials."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

import msgspec
from multidict import MultiDict

_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, 5.6.2
# settings with an example of each
_NAMES = {"allowed_methods": "POST", "allowed_headers": "X-Request-Id", "exposed_headers": "X-Request-Id"}
MOST_AGE_S = 86_400  # as long as any browser keeps the answer to a preflight


class Cors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rules for pages of other origins.

    allowed_origins: origins exactly as browsers send them (https://chat.example.com, http://localhost:3000), or "*"
    alone for any.
    allowed_methods, allowed_headers: for preflights; a header may end in * to cover all that begin so. exposed_headers:
    of an answer, which a script may read. allow_credentials: cookies and HTTP logins; keys in Authorization or
    x-api-key do not need it. max_age_s: a browser may reuse the answer to a preflight."""

    allowed_origins: tuple[str, ...]
    allowed_methods: tuple[str, ...] = ("GET", "POST")
    allowed_headers: tuple[str, ...] = (
        "Authorization",
        "Content-Type",
        "X-Api-Key",
        "X-Request-Id",
        "Traceparent",
        "Tracestate",
        "X-Stainless-*",
        "Anthropic-*",
        "OpenAI-*",
    )
    exposed_headers: tuple[str, ...] = ("X-Request-Id", "Retry-After", "Retry-After-Ms", "X-Should-Retry")
    allow_credentials: bool = False
    max_age_s: int = 600

    def __post_init__(self) -> None:
        """Refuse values that cannot work or that open more than they say."""
        if not self.allowed_origins:
            raise ValueError(
                "cors.allowed_origins is empty; list origins such as https://chat.example.com, or leave cors out"
            )
        if self.any_origin and len(self.allowed_origins) > 1:
            raise ValueError(
                "cors.allowed_origins has '*' beside other origins; keep '*' alone, or list the origins without it"
            )
        if self.any_origin and self.allow_credentials:
            raise ValueError(
                "cors.allow_credentials would let every web page act for every visitor of it with the origin '*'; list"
                " the origins"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors.allowed_origins: {origin!r} is no origin; write it like https://chat.example.com, without a"
                    " path"
                )
        for setting, example in _NAMES.items():
            for word in getattr(self, setting):
                if not _TOKEN.fullmatch(word) or (setting != "allowed_headers" and "*" in word):
                    raise ValueError(f"cors.{setting}: {word!r} is no name that HTTP knows; write it like {example}")
        if not 0 <= self.max_age_s <= MOST_AGE_S:
            raise ValueError(f"cors.max_age_s should be from 0 to {MOST_AGE_S}, not {self.max_age_s}")

    @property
    def any_origin(self) -> bool:
        return "*" in self.allowed_origins

    def allows(self, origin: str) -> bool:
        return self.any_origin or origin in self.allowed_origins

    def preflight(self, headers: Mapping[str, str]) -> tuple[int, MultiDict[str], str]:
        """Return status, headers and body for a preflight; a refusal has a sentence and no headers that allow
        anything."""
        answer = MultiDict({"Vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"})
        origin, method = headers.get("Origin", ""), headers.get("Access-Control-Request-Method", "")
        asked = [name.strip() for name in headers.get("Access-Control-Request-Headers", "").split(",") if name.strip()]
        if not self.allows(origin):
            return 403, answer, f"origin {origin[:100]!r} is not in cors.allowed_origins of the gateway\n"
        if method not in self.allowed_methods:
            return 403, answer, f"method {method[:20]!r} is not in cors.allowed_methods of the gateway\n"
        if unknown := next((name for name in asked if not self._allows_header(name)), None):
            return 403, answer, f"header {unknown[:100]!r} is not in cors.allowed_headers of the gateway\n"
        answer["Access-Control-Allow-Methods"] = ", ".join(self.allowed_methods)
        if asked:
            answer["Access-Control-Allow-Headers"] = ", ".join(asked)
        answer["Access-Control-Max-Age"] = str(self.max_age_s)
        self._allow(origin, answer)
        return 204, answer, ""

    def mark(self, origin: str | None, answer: MultiDict[str]) -> None:
        """Add to an answer's headers what lets a page of this origin read it. Caches have to keep the answers of
        origins apart."""
        answer.add("Vary", "Origin")
        if origin is not None and self.allows(origin):
            self._allow(origin, answer)
            if self.exposed_headers:
                answer["Access-Control-Expose-Headers"] = ", ".join(self.exposed_headers)

    def _allow(self, origin: str, answer: MutableMapping[str, str]) -> None:
        answer["Access-Control-Allow-Origin"] = "*" if self.any_origin else origin
        if self.allow_credentials:
            answer["Access-Control-Allow-Credentials"] = "true"

    def _allows_header(self, name: str) -> bool:
        return bool(_TOKEN.fullmatch(name)) and any(
            _covers(allowed.lower(), name.lower()) for allowed in self.allowed_headers
        )


def _covers(allowed: str, name: str) -> bool:
    return name.startswith(allowed[:-1]) if allowed.endswith("*") else name == allowed


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers
