"""JSON that Python's parser takes, and so vLLM, and a strict decoder does not: UTF-16, UTF-32, a byte order mark, NaN,
Infinity, and halves of surrogate pairs.

Invariant: `restored` gives the engine the numbers, halves and encoding that `readable` has replaced."""

from __future__ import annotations

import json
import re

_MARK = "1e9073145826094172853"  # no client sends these digits by chance
_WORDS = {word: f"{_MARK}{at}" for at, word in enumerate(("NaN", "-Infinity", "Infinity"))}
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|NaN|-?Infinity', re.DOTALL)
_ESCAPE = re.compile(
    r"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.|([\ud800-\udfff])"
)
_HALF = re.compile(rf"{_MARK}x([0-9a-fA-F]{{4}})")
_SIGNS = (b"NaN", b"Infinity", rb"\ud", rb"\uD", b"\xed")  # the last begins half a pair in UTF-8


def readable(body: bytes) -> tuple[bytes, str]:
    """Return a body in UTF-8 as a strict decoder reads it, and its own encoding. Raises ValueError if it is not of this
    kind."""
    encoding = json.detect_encoding(body)
    if encoding == "utf-8" and not any(sign in body for sign in _SIGNS):
        raise ValueError("a strict decoder reads no less")
    text = body.decode(encoding, "surrogatepass")
    if text[:64].lstrip()[:1] != "{":
        raise ValueError("no object")
    return _TOKEN.sub(_strict, text).encode(), encoding


def has_half(text: str) -> bool:
    """Return whether a text of a readable body has half of a surrogate pair, which vLLM refuses in its own fields."""
    return _HALF.search(text) is not None


def restored(body: bytes, encoding: str) -> bytes:
    """Return a body with what `readable` has replaced; halves of pairs are escapes."""
    text = body.decode()
    for word, mark in _WORDS.items():
        text = text.replace(mark, word)
    return _HALF.sub(r"\\u\1", text).encode(encoding)


def _strict(token: re.Match[str]) -> str:
    word = token[0]
    return _WORDS[word] if word[0] != '"' else _ESCAPE.sub(_marked, word)


def _marked(escape: re.Match[str]) -> str:
    """Return the mark of half a pair; any other escape as it is."""
    half = escape[1] or (escape[2] and f"{ord(escape[2]):x}")
    return f"{_MARK}x{half}" if half else escape[0]
