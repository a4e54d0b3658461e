"""Paths that the gateway serves: recorded ones, passed ones, and their spellings."""

from __future__ import annotations

import re

# POST to these asks an engine for what costs it no tokens: prompts shown or counted, an answer broken off. Every other
# POST that leaves no record may cost them, or change the engine: it is served only where it is named. Source: the
# routers of vLLM 0.32.
_PASSED = re.compile(
    r"/v1/(?:(?:chat/completions|completions|messages|responses)/render|(?:chat/completions|completions)/derender|messages/count_tokens"
    r"|responses/[^/]+/cancel)"
)
READS = frozenset(("GET", "HEAD", "OPTIONS"))


def plain(path: str) -> bool:
    """Return whether a decoded path under /v1 can be read in one way only.

    An engine's router takes a path with a line break at its end for one without. A proxy before an engine may merge
    slashes, resolve dots, decode
    once more, or cut parameters off: then the request would get to a recorded route, on no record."""
    if not path.startswith("/v1/") or not path.isprintable() or any(sign in path for sign in "\\;%"):
        return False
    return not {"", ".", ".."} & set(path.split("/")[1:])


def passed(method: str, path: str, also: frozenset[str]) -> bool:
    """Return whether a request that leaves no record is passed on. also: paths beside the known ones."""
    return method in READS or path in also or bool(_PASSED.fullmatch(path))
