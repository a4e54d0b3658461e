"""RequestRecord <-> one JSON line: what the gateway writes and everyone else reads.

Law: unknown is null, never 0; no prompt or reply text, ever; at most 1,000 bytes a line; an ordinary one has 600."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

MAX_LINE_BYTES = 1000
UNKNOWN_TEAM = "__unknown__"  # how a record without a team is counted

Outcome = Literal["ok", "client_abort", "rejected", "upstream_error", "timeout"]


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request that ended. Times in milliseconds (the field names are given), sizes in tokens.

    ts: when it ended, RFC 3339 UTC. queue_ms: waiting in the gateway. ttft_ms: accepted -> first content token sent on; null when
    not streaming. tpot_ms: (last token - first token) / (completion_tokens - 1). e2e_ms: accepted -> ended.
    parent_span_id: the client's span, null where the trace begins here. sampled: false where the client said that its trace is not kept.
    cache_hit: null unless the engine reports cached tokens. tried: upstreams that failed before, as name:reason."""

    request_id: str
    ts: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    parent_span_id: str | None = None
    sampled: bool | None = None
    team: str | None = None
    priority: str | None = None
    model: str | None = None
    adapter: str | None = None
    route: str | None = None
    upstream: str | None = None
    variant: str | None = None
    engine_version: str | None = None
    attempt: int | None = None
    tried: str | None = None
    stream: bool | None = None
    n: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    cache_hit: bool | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    engine_queue_ms: float | None = None
    engine_ttft_ms: float | None = None
    status: int | None = None
    finish_reason: str | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    retry_after_s: float | None = None
    est_prompt_tokens: int | None = None


class BadLine(ValueError):
    """A line that is no request record. `reason` is one of json, type, range, size: few enough to be a label.

    The message names fields and never quotes what they hold: a foreign log may hold prompts, and messages are logged."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RequestRecord)
_any = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NONNEGATIVE = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "engine_queue_ms", "engine_ttft_ms",
    "retry_after_s", "est_prompt_tokens", "n", "attempt",
)  # fmt: skip

_FREE_TEXT = ("model", "adapter", "finish_reason", "engine_version", "upstream", "variant", "tried", "priority", "request_id")
_LEAST_NEEDED = (
    "tried", "est_prompt_tokens", "engine_ttft_ms", "engine_queue_ms", "attempt", "n", "variant", "engine_version", "upstream", "adapter",
    "retry_after_s", "priority", "parent_span_id", "span_id",
)  # fmt: skip


def to_line(record: RequestRecord) -> bytes:
    """One JSON line with its newline; nulls are left out, which reads back the same.

    Raises BadLine("size") beyond 1,000 bytes: some field carries what a client sent, and the writer must cut it first."""
    line = _encoder.encode(record)
    if len(line) >= MAX_LINE_BYTES:
        raise BadLine("size", f"record {record.request_id[:40]!r} has {len(line) + 1} bytes; a line holds at most {MAX_LINE_BYTES}")
    return line + b"\n"


def fitting_line(record: RequestRecord) -> bytes:
    """to_line, with what clients may have written too long cut short, then the least needed figures left out.

    What our gateway writes always fits. Raises BadLine("size") when a team or reason alone is too long, which it never lets happen."""
    try:
        return to_line(record)
    except BadLine:
        pass
    for limit in (128, 64):
        record = msgspec.structs.replace(record, **{name: _cut(getattr(record, name), limit) for name in _FREE_TEXT})
        with contextlib.suppress(BadLine):
            return to_line(record)
    for name in _LEAST_NEEDED:
        record = msgspec.structs.replace(record, **{name: None})
        with contextlib.suppress(BadLine):
            return to_line(record)
    return to_line(msgspec.structs.replace(record, **{name: _cut(getattr(record, name), 34) for name in _FREE_TEXT}))


def _cut(text: str | None, limit: int) -> str | None:
    """The text, or its beginning in at most `limit` bytes of JSON, which may write one character in six."""
    while text and (size := len(_encoder.encode(text))) > limit:
        text = text[: len(text) * limit // size - 1] if len(text) > 1 else ""
    return text


def parse_line(line: bytes, names: Mapping[str, str] | None = None) -> RequestRecord:
    """A record from one line. names maps a foreign log's field names to ours; fields that nobody knows are ignored.

    The short form of lab logs (no ts, no team) is accepted as it stands: ts and team stay None.
    Raises BadLine with a reason for what is no record."""
    try:
        record = _decoder.decode(_renamed(line, names) if names else line)
    except msgspec.ValidationError as error:
        raise BadLine("type", re.sub(r" '.*'", "", f"{error}", flags=re.DOTALL)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("json", f"{error}") from error
    for name in _NONNEGATIVE:
        value = getattr(record, name)
        if value is not None and not 0 <= value < 1e12:
            raise BadLine("range", f"{name} is {value}; it must be 0 or more and finite")
    if record.ts is not None and ended_at(record) is None:
        raise BadLine("type", "ts is no RFC 3339 time such as 2026-05-12T09:30:00.123Z")
    return record


def ended_at(record: RequestRecord) -> float | None:
    """When the request ended, in unix seconds; None when the line does not say or says nonsense."""
    if record.ts is None:
        return None
    try:
        stamp = datetime.fromisoformat(record.ts)
    except ValueError:
        return None
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def timestamp(unix_s: float) -> str:
    """RFC 3339 UTC with milliseconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _renamed(line: bytes, names: Mapping[str, str]) -> bytes:
    return _encoder.encode({names.get(name, name): value for name, value in _any.decode(line).items()})
