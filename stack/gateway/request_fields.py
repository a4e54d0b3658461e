"""Raw fields of a request body, decoded on demand as the engine's schema takes them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

LARGE_BYTES = 1 << 20  # larger values are looked at before they are taken apart
MOST_PIECES = 200_000  # fields and list items of one such value; about 300 bytes of memory each
LONGEST_NUMBER = 64 << 10  # bytes, zeros and white space included; longer ones would be read on the event loop
MOST_FIELDS = 1_000  # of an object that is changed for an engine, which takes time for each; APIs have some 60
MOST_TOKENS = 10**9  # more than any context: larger numbers are read as this one

STRING, LIST, OBJECT, NULL = b'"[{n'  # what values begin with
INT64 = range(-(2**63), 2**63)
_TRUE = frozenset(("1", "true", "t", "yes", "y", "on"))
_FALSE = frozenset(("0", "false", "f", "no", "n", "off"))

_SIGNS = (b",", b":", b"[", b"{")
_DIGITS = re.compile(r"\d+(?:_\d+)*", re.ASCII)
MOST_DIGITS = 9_000  # and underscores; pydantic reads 4,300 digits
# White space of Unicode.
_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

RawFields = Mapping[str, msgspec.Raw]

FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def begins_as_object(text: bytes) -> bool:
    """Return whether a text may be a JSON object: a file of some megabytes has many a byte that looks like a comma."""
    return text[:64].lstrip()[:1] in (b"{", b"")


def is_dense(data: bytes, most: int) -> bool:
    """Return whether a value has more than `most` pieces, found without taking it apart. Takes 5 us a KiB at most."""
    return sum(map(data.count, _SIGNS)) > most and count_pieces(data, most) > most


def count_pieces(data: bytes, most: int = MOST_PIECES) -> int:
    """Commas, colons and opening brackets, and one: no fewer than the items or fields of this value, and about as many
    as it and all that it holds have.

    Those within strings are not counted, since text may hold anything; of more than `most` strings all are counted, and
    no more."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quotation mark that is left begins or ends a string
    strings = bare.count(b'"') // 2
    if strings > most:
        return strings
    return sum(map(b"".join(bare.split(b'"')[::2]).count, _SIGNS)) + 1


def join_large(parts: Sequence[bytes | memoryview | msgspec.Raw]) -> bytes:
    """Return these bytes as one, copied by the MiB: one call for 32 MiB holds the interpreter's lock for 25 ms."""
    whole = io.BytesIO()
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), LARGE_BYTES):
            whole.write(view[at : at + LARGE_BYTES])
    return whole.getvalue()


def plain_value(value: msgspec.Raw | None) -> Any:
    """A string, number, boolean or null as such; None for anything else."""
    if value is None or memoryview(value)[0] in b"[{":
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return None


def is_null(value: msgspec.Raw | None) -> bool:
    """Return whether a field is absent or null."""
    return value is None or memoryview(value)[0] == NULL


def is_true(value: Any) -> bool:
    """Return whether the engine's schema (pydantic) reads a value as true: 1 and "yes" are true as well.

    A stream must not escape accounting by its spelling."""
    return value == 1 if isinstance(value, bool | int | float) else isinstance(value, str) and value.lower() in _TRUE


def is_boolean(value: msgspec.Raw | None) -> bool:
    """Return whether a field of the engine's schema takes this value for a boolean; it takes null and an absent one."""
    if is_null(value):
        return True
    plain = plain_value(value)
    return plain.lower() in _TRUE | _FALSE if isinstance(plain, str) else plain in (0, 1)


def read_number(value: Any) -> int | None:
    """Return the number of tokens or texts that the engine's schema reads, at most MOST_TOKENS.

    None for negative numbers and everything else."""
    number = read_integer(value)
    return None if number is None or number < 0 else min(number, MOST_TOKENS)


def read_integer(value: Any) -> int | None:
    """Return the integer that the engine's schema reads: 3.0, "3", " 3.0", "1_000" and true are integers as well.

    None for everything else."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return _written_integer(value)
        if isinstance(value, float):
            return int(value) if value.is_integer() and abs(value) < INT64.stop else None
        return int(value)
    except (ValueError, TypeError):
        return None


def spelled_like(value: Any, number: int) -> Any:
    """Return a number or boolean in the type of the value that it replaces: an engine that refuses the one refuses the
    other."""
    kind = type(value)
    return kind(number) if kind in (str, float, int) else number


def _written_integer(text: str) -> int | None:
    """Return the integer in a string as pydantic reads it, where zeros may stand before a sign: of "0-5" it is -5.

    Source: pydantic-core, input/shared.rs. Raises ValueError for more digits than Python reads."""
    whole, point, zeros = text.strip(_SPACE).partition(".")
    plain = whole.removeprefix("+")
    if (point and (not zeros or zeros.strip("0"))) or plain.endswith("_") or (plain is not whole and plain[:1] == "-"):
        return None
    digits = plain.lstrip("0_") if plain[:1] == "0" else plain
    if not digits and plain:
        return 0
    sign, digits = digits[: digits.startswith("-")], digits.removeprefix("-")
    if sign:
        if not digits or (plain[0] == "-" and digits[0] == "_"):
            return None
        digits = digits.lstrip("0_") or "0"
    return int(sign + digits) if len(digits) <= MOST_DIGITS and _DIGITS.fullmatch(digits) else None
