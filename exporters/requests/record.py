"""RequestRecord <-> one JSON line: what the gateway writes and everyone else reads.

Law: unknown is null, never 0; no prompt or reply text, ever; at most 1,000 bytes a line; an ordinary one has 600."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

import msgspec

MAX_LINE_BYTES = 1000
UNKNOWN_TEAM = "__unknown__"  # how a record without a team is counted

Outcome = Literal["ok", "client_abort", "rejected", "upstream_error", "timeout"]

# Held to when a line is read: more is a fault of who wrote it, and would spoil every sum that it is added to.
Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]
Texts = Annotated[int, msgspec.Meta(ge=0, lt=10**5)]  # multiplied with each other and with tokens, in sums of 64 bits
Measure = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One request that ended. Times in milliseconds (the field names are given), sizes in tokens.

    ts: when it ended, RFC 3339 UTC. queue_ms: waiting in the gateway. ttft_ms: accepted -> first content token sent on;
    null when not streaming. tpot_ms: (last token - first token) / (completion_tokens - 1). e2e_ms: accepted -> ended.
    engine_queue_ms: the engine has it -> it is first scheduled; engine_ttft_ms: first scheduled -> first token; both as
    the engine tells them.
    n: texts asked for of each prompt; prompts: how many prompts, left out where one; the engine counts n x prompts
    requests.
    parent_span_id: the client's span, null where the trace begins here. sampled: false where the client said that its
    trace is not kept.
    cache_hit: null unless the engine reports cached tokens. tried: upstreams that failed before, as name:reason.
    prompt_tokens, cached_tokens, completion_tokens: from the engine's usage only. Where no usage told
    completion_tokens, content_events is how many stream events with content were seen, and est_completion_tokens
    estimates the tokens in them; both stay null where no content was seen.
    est_prompt_tokens: the prompt as estimated before admission, in every record of an admitted request."""

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
    retry_after_s: Measure | None = None
    est_prompt_tokens: Count | None = None
    content_events: Count | None = None
    est_completion_tokens: Count | None = None


class BadLine(ValueError):
    """A line that is no request record. `reason` is one of json, type, range, size, torn: few enough to be a label.

    The message names fields and never quotes what they hold: a foreign log may hold prompts, and messages are
    logged."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


Scalar = str | int | float | bool | None

_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class FieldMapping:
    """Where one field of theirs goes. times: what makes their number ours, as (factor, divisor); unix: theirs is a unix
    time, not a text."""

    theirs: str
    ours: str
    times: tuple[int, int] = (1, 1)
    unix: bool = False

    def value(self, given: Any) -> Any:
        """Theirs in our unit. What is no number stays as it is, and is refused as what it is."""
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
    """What a foreign log calls our fields; made once, and it refuses what leads nowhere with a ValueError.

    names: their name -> ours. A dot leads into an object, unless a field has the whole name. Say the unit that theirs
    has, and nobody needs a
    factor: `latency: e2e_s` are seconds of what we keep as e2e_ms (s, ms, us or ns), `ended: ts_s` is a unix time.
    `ignore` drops a field that has a name of ours and another meaning. Where several lead to one of ours, the first
    that is there and not null is taken.
    values: our field -> their word -> ours; a word that is not listed stays as it is. What a line does not say stays
    unknown: an outcome is never guessed from a status."""

    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    leads: tuple[FieldMapping, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "leads", tuple(_lead(theirs, ours) for theirs, ours in self.names.items() if ours != IGNORE)
        )
        for ours, words in self.values.items():
            if ours not in _OURS:
                raise ValueError(f"field_values names {ours!r}, which no request record has{_nearest(ours, _OURS)}")
            for word in words.values():
                try:
                    msgspec.convert({"request_id": "", ours: word}, RequestRecord)
                except msgspec.ValidationError:
                    near = _nearest(f"{word}", get_args(Outcome)) if ours == "outcome" else ""
                    raise ValueError(f"field_values leads to {word!r}, which {ours} cannot be{near}") from None

    def __bool__(self) -> bool:
        return bool(self.names or self.values)

    def found(self, line: bytes) -> dict[str, tuple[str, Any]]:
        """What the line holds of ours: our field -> (their name, value). Raises what a decoder raises."""
        parts = _parts.decode(line)
        known = {
            name: (name, msgspec.json.decode(parts[name])) for name in _OURS if name in parts and name not in self.names
        }
        mapped: dict[str, tuple[str, Any]] = {}
        for lead in self.leads:
            if lead.ours not in mapped and (given := _at(parts, lead.theirs)) is not None:
                mapped[lead.ours] = lead.theirs, lead.value(given)
        return {ours: (theirs, self._word(ours, value)) for ours, (theirs, value) in (known | mapped).items()}

    def record(self, line: bytes) -> RequestRecord:
        return msgspec.convert({ours: value for ours, (_, value) in self.found(line).items()}, RequestRecord)

    def _word(self, ours: str, value: Any) -> Any:
        words = self.values.get(ours)
        return (
            words.get(value if isinstance(value, str) else _encoder.encode(value).decode(), value) if words else value
        )


def _lead(theirs: str, ours: str) -> FieldMapping:
    if ours in _OURS:
        return FieldMapping(theirs, ours)
    stem, _, unit = ours.rpartition("_")
    if unit in _PER_S:
        if stem == "ts":
            return FieldMapping(theirs, "ts", (1, _PER_S[unit]), unix=True)
        for its in ("ms", "s"):
            if f"{stem}_{its}" in _OURS:
                return FieldMapping(theirs, f"{stem}_{its}", (_PER_S[its], _PER_S[unit]))
    raise ValueError(f"field_names leads to {ours!r}, which no request record has{_nearest(ours, (*_OURS, IGNORE))}")


def _at(parts: Mapping[str, msgspec.Raw], name: str) -> Any:
    """The value of that name, or at that path; None where there is none."""
    if name in parts:
        return msgspec.json.decode(parts[name])
    head, _, rest = name.partition(".")
    if not rest or head not in parts:
        return None
    try:
        inner = _parts.decode(parts[head])
    except msgspec.ValidationError:  # no object
        return None
    return _at(inner, rest)


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, 1)
    return f"; did you mean {near[0]}?" if near else ""


_OURS = RequestRecord.__struct_fields__
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
    "variant",
    "tried",
    "priority",
    "request_id",
)
_LEAST_NEEDED = (
    "tried", "content_events", "engine_ttft_ms", "engine_queue_ms", "attempt", "variant", "engine_version", "upstream",
    "adapter",
    "retry_after_s", "priority", "parent_span_id", "span_id", "est_completion_tokens", "est_prompt_tokens",
)  # fmt: skip


def to_line(record: RequestRecord) -> bytes:
    """One JSON line with its newline; nulls are left out, which reads back the same.

    Raises BadLine("size") beyond 1,000 bytes: some field carries what a client sent, and the writer must cut it
    first."""
    line = _encoder.encode(record)
    if len(line) >= MAX_LINE_BYTES:
        raise BadLine(
            "size",
            f"record {record.request_id[:40]!r} has {len(line) + 1} bytes; a line holds at most {MAX_LINE_BYTES}",
        )
    return line + b"\n"


def fitting_line(record: RequestRecord) -> bytes:
    """to_line, with what clients may have written too long cut short, then the least needed figures left out.

    What our gateway writes always fits. Raises BadLine("size") when a team or reason alone is too long, which it never
    lets happen."""
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


def parse_line(line: bytes, names: FieldMap | Mapping[str, str] | None = None) -> RequestRecord:
    """A record from one line. names maps a foreign log's field names to ours (see Fields); fields that nobody knows are
    ignored.

    The short form of lab logs (no ts, no team) is accepted as it stands: ts and team stay None.
    Raises BadLine with a reason for what is no record."""
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
    return record


def parse_block(
    block: bytes, fields: FieldMap | None = None
) -> tuple[list[RequestRecord], list[tuple[bytes, BadLine]]]:
    """The records of whole lines, in their order, and the lines that are none.

    All at once while every line is a record; otherwise one by one, as parse_line does. Where a writer died in the
    middle of a line and another went on behind it, what follows the break is kept: the half is a bad line of reason
    torn."""
    if not fields:
        try:
            records = _decoder.decode_lines(block)
            for record in records:
                if (ts := record.ts) is not None:
                    _time(ts)
        except (*_DECODE_ERRORS, ValueError):
            pass
        else:
            # else two stand on one line, or one on two
            if len(records) == block.count(b"\n") + (block[-1:] not in (b"\n", b"")):
                return records, []
    return _one_by_one(block, fields)


def _one_by_one(block: bytes, fields: FieldMap | None) -> tuple[list[RequestRecord], list[tuple[bytes, BadLine]]]:
    records: list[RequestRecord] = []
    bad: list[tuple[bytes, BadLine]] = []
    for line in block.split(b"\n"):
        if line and not line.isspace() and line != _BOM:
            try:
                records.append(parse_line(line, fields))
            except BadLine as error:
                if error.reason != "json" or not (at := _second_beginning(line)):
                    bad.append((line, error))
                    continue
                more, worse = _halves(line, at, fields, error)
                records += more
                bad += worse
    return records, bad


def _halves(
    line: bytes, at: int, fields: FieldMap | None, error: BadLine
) -> tuple[list[RequestRecord], list[tuple[bytes, BadLine]]]:
    """A line that breaks off at `at`, where another record may begin. What is not one on its own is a bad line as a
    whole."""
    try:
        second = parse_line(line[at:], fields)
    except BadLine:
        return [], [(line, error)]
    try:  # only the newline was lost
        return [parse_line(line[:at], fields), second], []
    except BadLine as first:
        torn = BadLine("torn", "the line breaks off, and another record begins in the middle of it")
        return [second], [(line[:at], torn if first.reason == "json" else first)]


def _second_beginning(line: bytes) -> int:
    """Where another record begins in the line, 0 if nowhere. It begins as the line does, up to its first colon."""
    beginning = line[: line.find(b":") + 1]
    beginning = beginning[beginning.rfind(b"{") :]  # the line may have broken off within its first name
    return max(0, line.rfind(beginning)) if beginning else 0


def _bad(error: msgspec.ValidationError, line: bytes) -> BadLine:
    """A value that is refused, as a bad line; of reason json where the line breaks off behind it."""
    try:
        _well_formed.decode(line)
    except _DECODE_ERRORS as malformed:
        return BadLine("json", f"{malformed}")
    why = re.sub(r" '.*'", "", f"{error}", flags=re.DOTALL)
    return BadLine("range" if re.match(r"Expected `(int|float)` [<>]|.*out of range", why) else "type", why)


def estimated_tokens(record: RequestRecord) -> tuple[int | None, int | None]:
    """Return prompt and completion tokens that only an estimate tells; None for what usage told, or where no content
    was seen.

    Content proves that the prompt was computed, so without content its estimate is no work."""
    if record.completion_tokens is not None or record.est_completion_tokens is None:
        return None, None
    return record.est_prompt_tokens if record.prompt_tokens is None else None, record.est_completion_tokens


def ended_at(record: RequestRecord) -> float | None:
    """When the request ended, in unix seconds; None when the line does not say or says nonsense."""
    return None if record.ts is None else unix_seconds(record.ts)


def unix_seconds(ts: str) -> float | None:
    """An RFC 3339 time in unix seconds, UTC where it names no zone; None for what is none."""
    try:
        stamp = _time(ts)
    except ValueError:
        return None
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def timestamp(unix_s: float) -> str:
    """RFC 3339 UTC with milliseconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
