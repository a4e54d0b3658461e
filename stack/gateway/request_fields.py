"""Raw fields of a request body, decoded on demand as the engine's schema takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

LARGE_BYTES = 1 << 20  # larger values are looked at before they are taken apart
MOST_PIECES = 200_000  # fields and list items of one such value; about 300 bytes of memory each
MOST_TOKENS = 10**9  # more than any context: larger numbers are read as this one

STRING, LIST, OBJECT, NULL = b'"[{n'  # what values begin with
_TRUE = frozenset(("1", "true", "t", "yes", "y", "on"))

RawFields = Mapping[str, msgspec.Raw]

FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def count_pieces(data: bytes) -> int:
    """Commas and colons, and one: no fewer than the items or fields of this value, and about as many as it and all that
    it holds have.

    Those within strings are not counted, since text may hold anything; of more than MOST_PIECES strings all are
    counted, and no more."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quotation mark that is left begins or ends a string
    strings = bare.count(b'"') // 2
    if strings > MOST_PIECES:
        return strings
    between = b"".join(bare.split(b'"')[::2])
    return between.count(b",") + between.count(b":") + 1


def plain_value(value: msgspec.Raw | None) -> Any:
    """A string, number, boolean or null as such; None for anything else."""
    if value is None or memoryview(value)[0] in b"[{":
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return None


def is_true(value: Any) -> bool:
    """Return whether the engine's schema (pydantic) reads a value as true: 1 and "yes" are true as well.

    A stream must not escape accounting by its spelling."""
    return value == 1 if isinstance(value, bool | int | float) else isinstance(value, str) and value.lower() in _TRUE


def read_number(value: Any) -> int | None:
    """Return the integer that the engine's schema reads: 3.0, "3", " 3.0" and "1_000" are numbers as well.

    None for negative numbers and everything else."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            whole, _, rest = value.partition(".")
            value = -1 if rest.rstrip().strip("0") else int(whole)
        return min(int(value), MOST_TOKENS) if value >= 0 and value == int(value) else None
    except (ValueError, TypeError):
        return None
