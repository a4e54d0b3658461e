"""What a request asks for, read without touching it; and the one change the gateway makes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

# Routes that make or read tokens: each POST to them leaves one record. Everything else under /v1 (models, render, count_tokens, ...) is
# only passed on and leaves none. Source: the routers of vLLM 0.32.
RECORDED = frozenset(
    f"/v1/{name}"
    for name in (
        "chat/completions", "chat/completions/batch", "completions", "responses", "embeddings", "messages", "audio/transcriptions",
        "audio/translations", "rerank", "score", "systemone",
    )
)  # fmt: skip
# Routes whose streams say that they are complete.
ENDING = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
# Routes whose streams tell their usage only when asked by stream_options.
_USAGE_ON_REQUEST = frozenset(("/v1/chat/completions", "/v1/completions"))


class _Asked(msgspec.Struct):
    model: Any = None
    stream: Any = None
    n: Any = None
    stream_options: Any = None


_TRUE = frozenset(("1", "true", "t", "yes", "y", "on"))

_asked = msgspec.json.Decoder(_Asked)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Ask:
    """body: what goes to the engine. usage_added: the usage event is ours, and the client must not see it.

    model, n: as asked, None where not said or not understood; stream None for a body that is not JSON."""

    body: bytes
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    usage_added: bool = False


def read(route: str, body: bytes) -> Ask:
    """The ask of a body. What cannot be read is passed on as it is: the engine knows better what is wrong with it."""
    try:
        asked = _asked.decode(body)
        stream = _truth(asked.stream)
        options = asked.stream_options if isinstance(asked.stream_options, dict) else {}
        add = stream and route in _USAGE_ON_REQUEST and not _truth(options.get("include_usage"))
        return Ask(
            body=_with_usage(body, options) if add else body,
            model=asked.model if isinstance(asked.model, str) else None,
            stream=stream,
            n=asked.n if type(asked.n) is int and 0 < asked.n < 10**6 else None,
            usage_added=add,
        )
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Ask(body=body)


def _truth(value: Any) -> bool:
    """As the engine's schema (pydantic) takes it: 1 and "yes" are true as well; a stream must not escape accounting by its spelling."""
    return value == 1 if isinstance(value, bool | int | float) else isinstance(value, str) and value.lower() in _TRUE


def _with_usage(body: bytes, options: dict[str, Any]) -> bytes:
    """The body with stream_options.include_usage; every other value keeps its bytes.

    continuous_usage_stats goes: without include_usage the engine ignores it, with it every chunk would change."""
    fields = _fields.decode(body)
    kept = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**kept, "include_usage": True}))
    return msgspec.json.encode(fields)
