"""Spans of requests, derived from request log records. Pure; the rest of `exporters/tracing/` sends them.

The gateway created the ids and forwarded them, so a span created afterwards is the parent of the engine's own
`llm_request`.

Names follow the GenAI conventions (Development; github.com/open-telemetry/semantic-conventions-genai, which has no
release to pin, so no schema_url is set) and the stable HTTP ones; `gen_ai.latency.*` is what vLLM calls these values
on its span; values known only here are below `vllm_watch.`, in the unit that the name ends in."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import NamedTuple

import msgspec

from exporters.requests.record import RequestRecord, ended_at

TEXT_CHARS = 256  # per attribute: lines of foreign logs may have 1 MiB, and the queue must stay small

Value = str | bool | int | float | list[str]

# Of routes without the versions in them.
_OPERATIONS = {
    **dict.fromkeys(("chat/completions", "chat/completions/batch", "responses", "messages", "cohere/chat"), "chat"),
    **dict.fromkeys(("completions", "inference/generate"), "text_completion"),
    **dict.fromkeys(("embeddings", "embed"), "embeddings"),
}
_VERSION = re.compile(r"v\d+")
_MOST_NS = 2**63
_TEXTS = tuple(f.name for f in msgspec.structs.fields(RequestRecord) if str in getattr(f.type, "__args__", (f.type,)))


class Span(NamedTuple):
    """Record with valid span data: ids as bytes, times in unix nanoseconds.

    The record's end has millisecond precision."""

    record: RequestRecord
    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    start_ns: int
    end_ns: int


def span_of(record: RequestRecord) -> Span | None:
    """Return the span of a record; None if it lacks ids or times, as in logs of other gateways."""
    trace_id, span_id, ended = _id(record.trace_id, 16), _id(record.span_id, 8), ended_at(record)
    if trace_id is None or span_id is None or ended is None or record.e2e_ms is None:
        return None
    end_ns = round(ended * 1e6) * 1000  # a float of unix seconds has microsecond precision
    start_ns = end_ns - round(record.e2e_ms * 1e6)
    return (
        Span(_cut(record), trace_id, span_id, _id(record.parent_span_id, 8), start_ns, end_ns)
        if 0 < start_ns <= end_ns < _MOST_NS
        else None
    )


def _cut(record: RequestRecord) -> RequestRecord:
    """Return the record with long texts truncated; our gateway never writes such texts."""
    long = {
        name: text[:TEXT_CHARS]
        for name in _TEXTS
        if (text := getattr(record, name)) is not None and len(text) > TEXT_CHARS
    }
    return msgspec.structs.replace(record, **long) if long else record


def _id(text: str | None, size: int) -> bytes | None:
    """Return the bytes of a W3C trace or span id; None if all zeros or invalid."""
    if text is None or len(text) != 2 * size:
        return None
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == size and any(found) else None


def failure(record: RequestRecord) -> str | None:
    """Return `error.type` of a failed request; None for any other.

    Rejections and client disconnects are not failures here, as in the error ratio: the conventions leave the status
    of a server span unset for client errors, and let applications with more knowledge than the HTTP status decide
    (HTTP spans, Status). Otherwise tools that count spans with `error.type` would count policy. Their outcome and
    reason are in attributes of ours."""
    if record.outcome is None:
        failed = (record.status or 0) >= 500 or record.finish_reason == "error"
    else:
        failed = record.outcome in ("upstream_error", "timeout")
    return (record.reason or "_OTHER") if failed else None


def operation(route: str | None) -> str:
    """Return the conventions' operation name of a route; else the route's first word, such as rerank or audio."""
    words = [word for word in (route or "").split("/") if word and not _VERSION.fullmatch(word)]
    return _OPERATIONS.get("/".join(words), words[0] if words else "request")


# Attributes from fields of the record, and from its times in seconds.
_FIELDS = {
    "gen_ai.request.model": "model", "gen_ai.request.stream": "stream",
    "gen_ai.usage.input_tokens": "prompt_tokens", "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "url.path": "route",
    "vllm_watch.request_id": "request_id", "vllm_watch.team": "team", "vllm_watch.priority": "priority",
    "vllm_watch.adapter": "adapter",
    "vllm_watch.upstream": "upstream", "vllm_watch.prefill_engine": "prefill_engine",
    "vllm_watch.decode_engine": "decode_engine", "vllm_watch.variant": "variant",
    "vllm_watch.engine_version": "engine_version",
    "vllm_watch.attempt": "attempt", "vllm_watch.tried": "tried", "vllm_watch.outcome": "outcome",
    "vllm_watch.reason": "reason", "vllm_watch.unreadable": "unreadable",
    "vllm_watch.est_prompt_tokens": "est_prompt_tokens", "vllm_watch.est_completion_tokens": "est_completion_tokens",
    "vllm_watch.content_events": "content_events", "vllm_watch.retry_after_s": "retry_after_s",
}  # fmt: skip
_TIMES = {
    "gen_ai.response.time_to_first_chunk": "ttft_ms",
    "gen_ai.latency.time_to_first_token": "ttft_ms",
    "gen_ai.latency.e2e": "e2e_ms",
    "vllm_watch.queue_s": "queue_ms",
    "vllm_watch.tpot_s": "tpot_ms",
    "vllm_watch.engine_queue_s": "engine_queue_ms",
    "vllm_watch.engine_ttft_s": "engine_ttft_ms",
}
_fields, _times = attrgetter(*_FIELDS.values()), attrgetter(*_TIMES.values())


def attributes(record: RequestRecord) -> dict[str, Value]:
    """Return the attributes of a request. Missing values are omitted, never reported as 0."""
    found: dict[str, Value] = {"gen_ai.operation.name": operation(record.route), "gen_ai.provider.name": "vllm"}
    found.update({name: value for name, value in zip(_FIELDS, _fields(record), strict=True) if value is not None})
    found.update({name: ms / 1000 for name, ms in zip(_TIMES, _times(record), strict=True) if ms is not None})
    if record.n is not None and record.n != 1:
        found["gen_ai.request.choice.count"] = record.n
    if record.finish_reason and record.outcome in ("ok", None):  # otherwise it comes from the gateway, not the engine
        found["gen_ai.response.finish_reasons"] = [record.finish_reason]
    if record.status is not None and 100 <= record.status <= 599:
        found["http.response.status_code"] = record.status
    if (wrong := failure(record)) is not None:
        found["error.type"] = wrong
    return found
