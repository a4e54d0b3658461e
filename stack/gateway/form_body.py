"""Reader of the one field that matters of a form with a file: its model. Nothing is decoded or copied but that."""

from __future__ import annotations

import re

MOST_PARTS, HEAD_BYTES, VALUE_BYTES = 64, 4 << 10, 1 << 10
_NAMED = re.compile(rb'(?m)^(?i:content-disposition):[^\r\n]*;[ \t]*(?i:name)[ \t]*=[ \t]*"?model"?[ \t]*(?:;|\r?$)')


def form_models(body: bytes) -> set[str]:
    """Return the models that the parts of a multipart/form-data body name. Of one with more than MOST_PARTS parts the
    rest is not read."""
    body_at = len(body) - len(body.lstrip(b"\r\n")) if body[:1] in (b"\r", b"\n") else 0
    line_end = body.find(b"\r\n", body_at, body_at + 256)
    if not body.startswith(b"--", body_at) or line_end < 0:
        return set()
    delimiter, models = b"\r\n" + body[body_at:line_end].rstrip(), set()
    at = line_end + 2
    for _ in range(MOST_PARTS):
        head_end = body.find(b"\r\n\r\n", at, at + HEAD_BYTES)
        end = body.find(delimiter, at if head_end < 0 else head_end + 2)
        if end < 0:
            break
        if head_end >= 0 and _NAMED.search(body, at, head_end) and end - head_end - 4 <= VALUE_BYTES:
            models.add(body[head_end + 4 : end].decode("utf-8", "replace"))
        at = end + len(delimiter) + 2
    return models
