"""RequestRecord: fields, limits (1,000 bytes a line), and its JSON line.

Invariant: unknown is null, never 0; no prompt or reply text; at most 1,000 bytes per line, typically 600."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

import msgspec

MAX_LINE_BYTES = 1000
UNKNOWN_TEAM = "__unknown__"  # team of records without one
PROBE_TEAM = "__probe__"  # team of the gateway's own probes of engines

Outcome = Literal["ok", "client_abort", "rejected", "upstream_error", "timeout"]
# Words of RequestRecord.unreadable. Requests fail (upstream_error) with all but the last two.
UNREADABLE = ("redirect", "content_type", "encoding", "json", "shape", "empty", "usage", "size")

# Limits checked on reading: larger values are writer errors and would distort every sum.
Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]
Texts = Annotated[int, msgspec.Meta(ge=0, lt=10**5)]  # multiplied with each other and with tokens in 64-bit sums
Measure = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One finished request. Times in milliseconds (the field names are fixed), sizes in tokens.

    ts: end time, RFC 3339 UTC. queue_ms: wait in the gateway. ttft_ms: accepted -> first content token forwarded; null
    when not streaming. tpot_ms: (last token - first token) / (completion_tokens - 1). e2e_ms: accepted -> ended.
    engine_queue_ms: received by the engine -> first scheduled; engine_ttft_ms: first scheduled -> first token; both as
    reported by the engine, and null for a prefill/decode pair, of which the decode engine reports its own part only.

    client_wait_ms: time in which the client did not read and the response had to wait; null where no response was sent.

    n: texts requested per prompt; prompts: number of prompts, omitted if one; the engine counts n x prompts requests.
    parent_span_id: the client's span, null if the trace starts here. sampled: false if the client's trace is not
    sampled. prefill_engine, decode_engine: the engines behind a prefill/decode router, as it names them. cache_hit:
    null unless the engine reports cached tokens. tried: upstreams that failed before, as name:reason.

    prompt_tokens, cached_tokens, completion_tokens: from the engine's usage only; cached tokens are part of the prompt.
    Without completion_tokens in the usage, est_completion_tokens estimates the tokens of the content, and
    content_events is the number of stream events with content; both stay null without content. est_prompt_tokens: the
    prompt as estimated before admission, in every record of an admitted request.

    unreadable: why the upstream's answer could not be read; null: it was read, or there was none. redirect,
    content_type, encoding, json, shape, empty: the request failed (engine_error). usage: token counts that cannot be,
    taken as unknown. size: part of the answer is beyond what the gateway reads. Both leave the outcome as it is."""

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
    prefill_engine: str | None = None
    decode_engine: str | None = None
    variant: str | None = None
    engine_version: str | None = None
    attempt: Count | None = None
    tried: str | None = None
    stream: bool | None = None
    n: Texts | None = None
    prompts: Texts | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    completion_tokens: Count | None = None
    cache_hit: bool | None = None
    queue_ms: Measure | None = None
    ttft_ms: Measure | None = None
    tpot_ms: Measure | None = None
    e2e_ms: Measure | None = None
    engine_queue_ms: Measure | None = None
    engine_ttft_ms: Measure | None = None
    status: int | None = None
    finish_reason: str | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    unreadable: str | None = None
    retry_after_s: Measure | None = None
    est_prompt_tokens: Count | None = None
    content_events: Count | None = None
    est_completion_tokens: Count | None = None
    client_wait_ms: Measure | None = None


class BadLine(ValueError):
    """Line that is not a request record. `reason` is json, type, range, size or torn, for use as a label.

    record: the rest of a record whose impossible values are taken as unknown. offset: of the line in its block. The
    message names fields and never quotes their content: foreign logs may hold prompts, and messages are logged."""

    def __init__(self, reason: str, why: str, record: RequestRecord | None = None) -> None:
        super().__init__(why)
        self.reason, self.record, self.offset = reason, record, 0


Scalar = str | int | float | bool | None

_FRESH, _WRITTEN, _ = _PROMPT_PARTS = "prompt_fresh_tokens", "prompt_written_tokens", "cached_tokens"
_START = "start_ts"  # start of a request, from which ts is computed
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class FieldMapping:
    """Target field and unit conversion of a foreign field.

    times: conversion as (factor, divisor); unix: the foreign value is a unix time, not text."""

    foreign_name: str
    ours: str
    times: tuple[int, int] = (1, 1)
    unix: bool = False

    def value(self, given: Any) -> Any:
        """Convert a foreign value to our unit. A value that is no number is returned as is, and rejected later."""
        if type(given) not in (int, float):
            return given
        factor, divisor = self.times
        with contextlib.suppress(ValueError, OverflowError, OSError):
            if self.unix:
                return timestamp(given / divisor)
            return given if factor == divisor else given * factor / divisor
        return given


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Mapping from the fields of a foreign log to ours. Raises ValueError for a mapping without a target.

    names: foreign name -> ours. A dot leads into an object, unless a field has the full name. With a unit no factor
    is needed: `latency: e2e_s` means seconds for e2e_ms (s, ms, us or ns), `ended: ts_s` a unix time. `ignore` drops
    a field that has one of our names with another meaning. If several map to one field, the first one present and
    not null is used. values: our field -> foreign word -> our word; unlisted words are kept. Missing values stay
    unknown: an outcome is never guessed from a status. prompt_fresh_tokens, prompt_written_tokens: input without cache
    reads, and cache writes apart from it; prompt_tokens is then their sum with cached_tokens. start_ts, start_ts_s:
    start of the request; ts is then that time and e2e_ms, and unknown without e2e_ms."""

    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    leads: tuple[FieldMapping, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "leads",
            tuple(_lead(foreign_name, ours) for foreign_name, ours in self.names.items() if ours != IGNORE),
        )
        targets = {lead.ours for lead in self.leads}
        if _FRESH in targets and "prompt_tokens" in targets:
            raise ValueError(f"field_names maps to prompt_tokens and to {_FRESH}, a part of it; keep one of them")
        if _WRITTEN in targets and _FRESH not in targets:
            raise ValueError(f"field_names maps to {_WRITTEN} without {_FRESH}; map the rest of the prompt too")
        for ours, words in self.values.items():
            if ours not in _OURS:
                raise ValueError(f"field_values names {ours!r}, which no request record has{nearest(ours, _OURS)}")
            for word in words.values():
                try:
                    msgspec.convert({"request_id": "", ours: word}, RequestRecord)
                except msgspec.ValidationError:
                    near = nearest(f"{word}", get_args(Outcome)) if ours == "outcome" else ""
                    raise ValueError(f"field_values maps to {word!r}, which is no valid {ours}{near}") from None

    def __bool__(self) -> bool:
        return bool(self.names or self.values)

    def extract(self, line: bytes) -> dict[str, tuple[str, Any]]:
        """Return our fields in a line, and parts of prompt_tokens: our name -> (foreign name, value).

        Raises what a decoder raises."""
        parts = _parts.decode(line)
        known = {
            name: (name, msgspec.json.decode(parts[name])) for name in _OURS if name in parts and name not in self.names
        }
        mapped: dict[str, tuple[str, Any]] = {}
        for lead in self.leads:
            if lead.ours not in mapped and (given := _at(parts, lead.foreign_name)) is not None:
                mapped[lead.ours] = lead.foreign_name, lead.value(given)
        found = known | mapped
        if _FRESH in found:
            found["prompt_tokens"] = _sum_prompt([found[name] for name in _PROMPT_PARTS if name in found])
        if _START in found and "ts" not in found:
            found["ts"] = _end(found[_START], found.get("e2e_ms"))
        return {ours: (foreign_name, self._word(ours, value)) for ours, (foreign_name, value) in found.items()}

    def record(self, line: bytes) -> RequestRecord:
        return msgspec.convert({ours: value for ours, (_, value) in self.extract(line).items()}, RequestRecord)

    def _word(self, ours: str, value: Any) -> Any:
        words = self.values.get(ours)
        return (
            words.get(value if isinstance(value, str) else _encoder.encode(value).decode(), value) if words else value
        )


def _sum_prompt(parts: Iterable[tuple[str, Any]]) -> tuple[str, Any]:
    """Return the foreign names and the sum of a prompt's parts; the first part that is no count, which is rejected."""
    known, total = [part for part in parts if part[1] is not None], 0
    for name, value in known:
        try:
            total += msgspec.convert(value, Count)
        except msgspec.ValidationError:
            return name, value
    return " + ".join(name for name, _ in known), total


def _end(start: tuple[str, Any], e2e: tuple[str, Any] | None) -> tuple[str, Any]:
    """Return the foreign names and the end time; None without a duration, and a start that is no time as it is."""
    (name, given), (other, e2e_ms) = start, e2e or ("", None)
    start_s = unix_seconds(given) if isinstance(given, str) else None
    if start_s is None:
        return name, given
    if not isinstance(e2e_ms, (int, float)):
        return name, None
    try:
        return f"{name} + {other}", timestamp(start_s + e2e_ms / 1000)
    except (ValueError, OverflowError, OSError):
        return name, None


def _lead(foreign_name: str, ours: str) -> FieldMapping:
    if ours in _OURS or ours in _PROMPT_PARTS or ours == _START:
        return FieldMapping(foreign_name, ours)
    stem, _, unit = ours.rpartition("_")
    if unit in _PER_S:
        if stem in ("ts", _START):
            return FieldMapping(foreign_name, stem, (1, _PER_S[unit]), unix=True)
        for target_unit in ("ms", "s"):
            if f"{stem}_{target_unit}" in _OURS:
                return FieldMapping(foreign_name, f"{stem}_{target_unit}", (_PER_S[target_unit], _PER_S[unit]))
    raise ValueError(f"field_names maps to {ours!r}, which no request record has{nearest(ours, _TARGETS)}")


def _at(parts: Mapping[str, msgspec.Raw], name: str) -> Any:
    """Return the value of a name or a path; None if missing."""
    if name in parts:
        return msgspec.json.decode(parts[name])
    head, _, rest = name.partition(".")
    if not rest or head not in parts:
        return None
    try:
        inner = _parts.decode(parts[head])
    except msgspec.ValidationError:  # not an object
        return None
    return _at(inner, rest)


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest valid word, or nothing."""
    near = difflib.get_close_matches(word, words, 1)
    return f"; did you mean {near[0]}?" if near else ""


_OURS = RequestRecord.__struct_fields__
_TARGETS = (*_OURS, *_PROMPT_PARTS, _START, IGNORE)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RequestRecord)
_well_formed = msgspec.json.Decoder(msgspec.Raw)
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_time = datetime.fromisoformat
_BOM = b"\xef\xbb\xbf"
_FREE_TEXT = (
    "model",
    "adapter",
    "finish_reason",
    "engine_version",
    "upstream",
    "prefill_engine",
    "decode_engine",
    "variant",
    "tried",
    "priority",
    "request_id",
)
_LEAST_NEEDED = (
    "tried", "content_events", "client_wait_ms", "engine_ttft_ms", "engine_queue_ms", "attempt", "variant",
    "engine_version", "upstream", "decode_engine", "prefill_engine", "adapter",
    "retry_after_s", "priority", "parent_span_id", "span_id", "est_completion_tokens", "est_prompt_tokens",
)  # fmt: skip


def to_line(record: RequestRecord) -> bytes:
    """Encode a record as one JSON line with newline; nulls are omitted, which decodes the same.

    Raises BadLine("size") beyond 1,000 bytes: some field contains client text that the writer must truncate first."""
    line = _encoder.encode(record)
    if len(line) >= MAX_LINE_BYTES:
        raise BadLine(
            "size",
            f"record {record.request_id[:40]!r} has {len(line) + 1} bytes; a line holds at most {MAX_LINE_BYTES}",
        )
    return line + b"\n"


def fitting_line(record: RequestRecord) -> bytes:
    """Encode a record, truncating long client text first, then omitting the least needed fields.

    Records of our gateway always fit. Raises BadLine("size") if a team or reason alone is too long, which the
    gateway prevents."""
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
    """Truncate text to `limit` bytes of JSON, which may use six bytes for one character."""
    while text and (size := len(_encoder.encode(text))) > limit:
        text = text[: len(text) * limit // size - 1] if len(text) > 1 else ""
    return text


def parse_line(line: bytes, names: FieldMap | Mapping[str, str] | None = None) -> RequestRecord:
    """Parse one line. Raises BadLine with a reason.

    names maps a foreign log's field names to ours (see FieldMap); unknown fields are ignored. Lines of lab logs
    without ts and team are accepted: both stay None."""
    line = line.removeprefix(_BOM)
    fields = names if isinstance(names, FieldMap) else FieldMap(names) if names else None
    try:
        record = fields.record(line) if fields else _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise _bad(error, line) from error
    except _DECODE_ERRORS as error:
        raise BadLine("json", f"{error}") from error
    if record.ts is not None and ended_at(record) is None:
        raise BadLine("type", "ts is no RFC 3339 time such as 2026-05-12T09:30:00.123Z")
    if record.cached_tokens and _exceeds_prompt(record):
        raise BadLine(
            "range",
            "cached_tokens is more than prompt_tokens, which includes it, so both are taken as unknown; a log that has"
            f" them apart needs field_names: {{their_name: {_FRESH}}}",
            msgspec.structs.replace(
                record, prompt_tokens=None, cached_tokens=None, unreadable=record.unreadable or "usage"
            ),
        )
    return record


def _exceeds_prompt(record: RequestRecord) -> bool:
    return record.prompt_tokens is not None and (record.cached_tokens or 0) > record.prompt_tokens


def parse_block(
    block: bytes, fields: FieldMap | None = None
) -> tuple[list[RequestRecord], list[tuple[bytes, BadLine]]]:
    """Parse complete lines into records, in order, and invalid lines.

    All at once while every line is valid; otherwise one by one, like parse_line. Where a writer died inside a line
    and another continued, the part after the break is kept: the first part is a bad line of reason torn."""
    if not fields:
        try:
            records = _decoder.decode_lines(block)
            for record in records:
                if (ts := record.ts) is not None:
                    _time(ts)
                if record.cached_tokens and _exceeds_prompt(record):
                    raise ValueError
        except (*_DECODE_ERRORS, ValueError):
            pass
        else:
            # otherwise two records share a line, or one is split
            if len(records) == block.count(b"\n") + (block[-1:] not in (b"\n", b"")):
                return records, []
    return _one_by_one(block, fields)


def _one_by_one(block: bytes, fields: FieldMap | None) -> tuple[list[RequestRecord], list[tuple[bytes, BadLine]]]:
    records: list[RequestRecord] = []
    bad: list[tuple[bytes, BadLine]] = []
    offset = 0
    for line in block.split(b"\n"):
        if line and not line.isspace() and line != _BOM:
            found, error = _parsed(line, fields)
            more, worse = [found] if found else [], [(line, error)] if error else []
            if error and error.reason == "json" and (at := _second_beginning(line)):
                more, worse = _halves(line, at, fields, error)
            for _, each in worse:
                each.offset = offset
            records += more
            bad += worse
        offset += len(line) + 1
    return records, bad


def _parsed(line: bytes, fields: FieldMap | None) -> tuple[RequestRecord | None, BadLine | None]:
    try:
        return parse_line(line, fields), None
    except BadLine as error:
        return error.record, error


def _halves(
    line: bytes, at: int, fields: FieldMap | None, error: BadLine
) -> tuple[list[RequestRecord], list[tuple[bytes, BadLine]]]:
    """Split a line that breaks off at `at`, where another record may begin.

    A part that is no record makes the line invalid as a whole."""
    second, worse = _parsed(line[at:], fields)
    if second is None:
        return [], [(line, error)]
    first, bad = _parsed(line[:at], fields)  # only the newline is missing if it is a record
    if bad and bad.reason == "json":
        bad = BadLine("torn", "the line breaks off, and another record begins inside it")
    parts = ((line[:at], bad), (line[at:], worse))
    return [one for one in (first, second) if one], [(part, why) for part, why in parts if why]


def _second_beginning(line: bytes) -> int:
    """Return the offset of a second record in the line, 0 if none. It begins like the line, up to its first colon."""
    beginning = line[: line.find(b":") + 1]
    beginning = beginning[beginning.rfind(b"{") :]  # the line may break off inside its first name
    return max(0, line.rfind(beginning)) if beginning else 0


def _bad(error: msgspec.ValidationError, line: bytes) -> BadLine:
    """Return a rejected value as BadLine; reason json if the line breaks off after it."""
    try:
        _well_formed.decode(line)
    except _DECODE_ERRORS as malformed:
        return BadLine("json", f"{malformed}")
    why = re.sub(r" '.*'", "", f"{error}", flags=re.DOTALL)
    if why.startswith("Invalid enum value"):
        why += f"; allowed: {', '.join(get_args(Outcome))} (field_values maps other words)"
    return BadLine("range" if re.match(r"Expected `(int|float)` [<>]|.*out of range", why) else "type", why)


def estimated_tokens(record: RequestRecord) -> tuple[int | None, int | None]:
    """Return estimated prompt and completion tokens; None for values that usage reports.

    Content, or an answer that was delivered without being read, proves that the prompt was computed; otherwise the
    estimate is no work. As dataset.views.ESTIMATED."""
    completion = None if record.completion_tokens is not None else record.est_completion_tokens
    computed = completion is not None or (record.unreadable is not None and record.outcome == "ok")
    return record.est_prompt_tokens if computed and record.prompt_tokens is None else None, completion


def ended_at(record: RequestRecord) -> float | None:
    """Return the end time in unix seconds; None if missing or invalid."""
    return None if record.ts is None else unix_seconds(record.ts)


def unix_seconds(ts: str) -> float | None:
    """Return an RFC 3339 time in unix seconds, UTC by default; None if invalid."""
    try:
        stamp = _time(ts)
    except ValueError:
        return None
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def timestamp(unix_s: float) -> str:
    """Format a time as RFC 3339 UTC with milliseconds."""
    whole = math.floor(unix_s)
    micro = round((unix_s - whole) * 1e6)
    return f"{_second(whole + micro // 1_000_000)}.{micro % 1_000_000 // 1000:03d}Z"


@lru_cache(maxsize=4)
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().removesuffix("+00:00")
