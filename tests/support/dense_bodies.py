"""Request bodies that are expensive to read for their size, for tests and benchmarks."""

from __future__ import annotations

CHAT = "/v1/chat/completions"


def filled(start: str, piece: str, end: str, size: int) -> bytes:
    return (start + ",".join([piece] * ((size - len(start) - len(end)) // (len(piece) + 1))) + end).encode()


def dense(size: int) -> dict[str, tuple[str, bytes]]:
    """Bodies of at most `size` bytes with as many pieces as fit."""
    names = ",".join(f'"{at:x}":1' for at in range(size // 10))
    chat, ends = '{"model":"tiny","messages":[', "]}"
    return {
        "documents": ("/v1/rerank", filled('{"model":"m","query":"x","documents":[', '"a"', ends, size)),
        "messages": (CHAT, filled(chat, "{}", ends, size)),
        "numbers": (CHAT, filled(chat, "1", ends, size)),
        "parts": (CHAT, filled(chat + '{"content":[', '{"content":[{"content":[{}]}]}', "]}]}", size)),
        "nested": (CHAT, filled(chat, "[" * 400 + "]" * 400, ends, size)),
        "options": (CHAT, f'{{"stream":true,"messages":[],"stream_options":{{{names}}}}}'.encode()),
        "settings": ("/inference/v1/generate", f'{{"token_ids":[1],"sampling_params":{{{names}}}}}'.encode()),
        "fields": (CHAT, f"{{{names}}}".encode()),
        "lenient": (CHAT, filled('{"x":NaN,"messages":[', "-1", ends, size)),
        "utf-16": (CHAT, filled(chat, "1", ends, size // 2).decode().encode("utf-16")),
        "broken": (CHAT, filled(chat, "{}", "]", size)),
        "unrecorded": ("/tokenize", filled(chat, "{}", ends, size)),
    }
