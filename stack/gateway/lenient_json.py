"""JSON that Python's parser takes, and so vLLM, and a strict decoder does not: UTF-16, UTF-32, a byte order mark, NaN,
Infinity, and escapes of lone surrogates.

Invariants: `restore` gives the engine the numbers, escapes and encoding that `to_strict` has replaced. The marks in
their place are random, so that no client can write one. Time and memory are bounded by MOST_MARKS."""

from __future__ import annotations

import json
import re
import secrets

MOST_MARKS = 5_000  # NaN, Infinity and escapes of surrogates of a body; each takes two microseconds
_WORDS = ("NaN", "-Infinity", "Infinity")
# In a string: what is no escape of a surrogate, a pair, and a lone one.
_OTHER = r'[^"\\]++|\\[^u]|\\u[^dD]|\\u[dD][0-7]'
_PAIR = r"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(rf'((?:{_OTHER}|"|{_PAIR})++)|\\u([dD][89a-fA-F][0-9a-fA-F]{{2}})', re.DOTALL)
# The first group is a run of what stays, strings included; a string without an end is one token, so that no byte is
# looked at more than twice.
_TOKEN = re.compile(
    rf'((?:[^"NI-]++|"(?:{_OTHER}|{_PAIR})*+"|-(?!I))++)|"(?:[^"\\]++|\\.)*+"?|-?[NI][A-Za-z]*+', re.DOTALL
)


def to_strict(body: bytes) -> tuple[bytes, str]:
    """Return a body in UTF-8 as a strict decoder reads it, and how to restore it: its encoding and the mark.

    Raises ValueError for any other body."""
    encoding = json.detect_encoding(body)
    text = body.decode(encoding)
    marks = sum(map(text.count, ("NaN", "Infinity", r"\ud", r"\uD")))
    if text[:64].lstrip()[:1] not in ("{", "") or marks > MOST_MARKS or not (marks or encoding != "utf-8"):
        raise ValueError("not lenient JSON")
    mark = f"1e{secrets.randbits(96):029d}"

    def strict(token: re.Match[str]) -> str:
        if token[1]:
            return token[1]
        return _LONE.sub(marked, token[0]) if token[0][0] == '"' else f"{mark}{_WORDS.index(token[0])}"

    def marked(part: re.Match[str]) -> str:
        return part[1] or f"{mark}x{part[2]}"

    return _TOKEN.sub(strict, text).encode(), f"{encoding} {mark}"


def has_surrogate(text: str, respelled: str) -> bool:
    """Return whether a text of a body had a lone surrogate, which vLLM refuses in its own fields."""
    return bool(respelled) and respelled.partition(" ")[2] in text


def restore(body: bytes, respelled: str) -> bytes:
    """Return a body with what `to_strict` has replaced."""
    encoding, mark = respelled.split(" ")
    text = body.decode()
    for at, word in enumerate(_WORDS):
        text = text.replace(f"{mark}{at}", word)
    return text.replace(f"{mark}x", "\\u").encode(encoding)
