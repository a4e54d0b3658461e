"""Request ids and W3C trace context: validated or generated. Pure; `new_hex` brings the randomness."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

_PRINTABLE = re.compile(r"[!-~]{1,128}")
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def request_id(sent: str | None, new_hex: Callable[[int], str]) -> str:
    """The client's id when it is 1 to 128 printable ASCII characters without spaces; otherwise 32 hex digits of our
    own."""
    return sent if sent is not None and _PRINTABLE.fullmatch(sent) else new_hex(16)


class Trace(msgspec.Struct, frozen=True):
    """span_id is the gateway's own span: child of the client's (parent_id, None where the trace begins here), parent of
    the engine's."""

    trace_id: str
    span_id: str
    flags: str
    parent_id: str | None = None

    @property
    def continued(self) -> bool:
        return self.parent_id is not None

    @property
    def sampled(self) -> bool:
        """Return whether its spans are to be kept. Source: W3C Trace Context, section 3.2.2.5.1."""
        return bool(int(self.flags, 16) & 1)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def trace(sent: str | None, new_hex: Callable[[int], str]) -> Trace:
    """A span in the client's trace, or in a new sampled one. Source of the format: W3C Trace Context, section 3.2."""
    found = _TRACEPARENT.fullmatch(sent.strip()) if sent else None
    if found and not (found[1] == "00" and found[5]):
        return Trace(found[2], new_hex(8), found[4], found[3])
    return Trace(new_hex(16), new_hex(8), "01")
