"""JSON that Python's parser takes, and so vLLM, and a strict decoder does not: UTF-16, UTF-32, a byte order mark, NaN,
Infinity, and halves of surrogate pairs.

Invariant: `restored` gives the engine what `readable` was given, but for white space and the form of such halves."""

from __future__ import annotations

import json
import re

# Numbers that stand for those that JSON does not have. No client sends their digits by chance.
_MARKS = {word: b"1e9073145826094172853%d" % at for at, word in enumerate((b"NaN", b"-Infinity", b"Infinity"))}
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|NaN|-?Infinity', re.DOTALL)
_ESCAPE = re.compile(
    rb"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_SIGNS = (b"NaN", b"Infinity", rb"\ud", rb"\uD")


def readable(body: bytes) -> tuple[bytes, str]:
    """Return a body in UTF-8 as a strict decoder reads it, and its own encoding. Raises ValueError if it is not of this
    kind."""
    encoding = json.detect_encoding(body)
    text = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass") if encoding != "utf-8" else body
    if text[:64].lstrip()[:1] != b"{" or (text is body and not any(sign in text for sign in _SIGNS)):
        raise ValueError("no other spelling of JSON")
    return _TOKEN.sub(_strict, text), encoding


def restored(body: bytes, encoding: str) -> bytes:
    """Return a body with the numbers and the encoding that `readable` has replaced."""
    for word, mark in _MARKS.items():
        body = body.replace(mark, word)
    return body if encoding == "utf-8" else body.decode("utf-8", "surrogatepass").encode(encoding, "surrogatepass")


def _strict(token: re.Match[bytes]) -> bytes:
    """Return the same token, halves of surrogate pairs as their bytes, which decoders skip."""
    word = token[0]
    return _MARKS[word] if word[:1] != b'"' else _ESCAPE.sub(_half_as_bytes, word) if rb"\u" in word else word


def _half_as_bytes(escape: re.Match[bytes]) -> bytes:
    return chr(int(escape[1], 16)).encode("utf-8", "surrogatepass") if escape[1] else escape[0]
