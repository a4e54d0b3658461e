"""Error messages about bodies: those of bodies that the gateway cannot read, and those of engines without our fields.

Our own give the place of the mistake, never content: that may be a prompt or a key."""

from __future__ import annotations

import re

import msgspec

from stack.gateway.request_fields import MOST_FIELDS

_KINDS = {"[": "an array", '"': "a string", "t": "a boolean", "f": "a boolean", "n": "null"}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any = msgspec.json.Decoder(msgspec.Raw)
# Errors of vLLM's request models about the body as a whole, which they describe by the number of its fields: a field is
# missing, or the body is wrong. Source: vLLM 0.32, exception_handling/handlers/validation.py.
_COUNTED = re.compile(
    rb"(\{'type': '(?:missing', 'loc': 'body(?:\.[A-Z]\w*)*\.[a-z]\w*|\w+', 'loc': 'body(?:\.[A-Z]\w*)*)', 'msg': "
    rb"[^{}]{0,500}?'input': '<dict of )(\d+)(?= items>')"
)


def describe(body: bytes, content_type: str) -> str:
    """Return what is wrong with a body that should be a JSON object."""
    if not body.strip():
        return "the body is empty; send a JSON object"
    if content_type and not _is_json(content_type) and body.lstrip()[:1] != b"{":
        return (
            f"the content type is {content_type[:60]!r}; this route takes a JSON object with Content-Type:"
            " application/json"
        )
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"the body is not UTF-8: byte {error.start} ({_line(body, error.start)})"
    try:
        _any.decode(body)
        if (first := body.lstrip()[:1].decode()) != "{":
            return f"the body is {_KINDS.get(first, 'a number')}; send a JSON object"
        _fields.decode(body)
    except RecursionError:
        return "the body is nested too deeply"
    except (msgspec.MsgspecError, ValueError) as error:
        return _not_json(body, str(error))
    return f"the body or its sampling_params has more than {MOST_FIELDS:,} fields, or those have more than 2 MiB"


def without_ours(error: bytes, fields: int, ours: int) -> bytes:
    """Return an engine's validation error without the fields that the gateway added to the body. fields: of the body as
    the engine got it, which may add some before it looks; ours: how many of them were added."""
    return _COUNTED.sub(
        lambda found: found[1] + (b"%d" % (count - ours) if (count := int(found[2])) >= fields else found[2]), error
    )


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind.endswith("+json") or kind == "application/json"


def _not_json(body: bytes, error: str) -> str:
    """Return the sentence for a decoder's message, such as 'JSON is malformed: invalid character (byte 12)'."""
    place = re.search(r"\(byte (\d+)\)", error)
    if place is None:
        if "truncated" not in error:
            return "the body is not JSON"
        return (
            f"the body is not JSON: it ends within a value, at byte {len(body)}, or an escape in it is half of a"
            " surrogate pair"
        )
    cause = error[: place.start()].removeprefix("JSON is malformed:").strip()
    return f"the body is not JSON: {cause} at byte {place[1]} ({_line(body, int(place[1]))})"


def _line(body: bytes, at: int) -> str:
    line, start = body.count(b"\n", 0, at) + 1, body.rfind(b"\n", 0, at) + 1
    return f"line {line}, column {at - start + 1}"
