"""Reader of an engine's reply: tokens, timings, finish reason. Pure; fed with decoded objects, whole or one per
event.

Invariants: a figure that cannot be is no figure: it stays None, and `unreadable` says so. What is not reported stays
None. An object that has neither the shape of the route's answers nor that of an error is understood by nobody here, and
`shaped` stays False."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from stack.gateway.answers import TEXTS, UsageFields, is_json
from stack.gateway.outline import Outline
from stack.gateway.routes import find

MOST_CHOICES = 100_000  # of a reply; more than any request may ask for
FINISH_WORDS = 20  # different ones that are kept of one reply; engines know about ten
NOTHING, PROGRESS, CONTENT = 0, 1, 2  # of an event: neither; proof of a step without text to show; text or tool calls

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_use": "tool_calls",
    "COMPLETE": "stop",
    "STOP_SEQUENCE": "stop",
    "MAX_TOKENS": "length",
    "TOOL_CALL": "tool_calls",
    "ERROR": "error",
    "TIMEOUT": "error",
}
_GRAVEST = ("error", "abort", "repetition", "content_filter", "length", "tool_calls", "function_call", "stop")
_CODES = ("code", "status", "status_code")
_ERROR_TYPES = {
    "BadRequestError": 400, "invalid_request_error": 400, "NotFoundError": 404, "not_found_error": 404,
    "rate_limit_error": 429, "overloaded_error": 503,
}  # fmt: skip
_VERSION = re.compile(r"vllm-(\d+\.\d+[0-9A-Za-z.+]*)")
_DELTAS = (
    "content",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
    "text",
    "thinking",
    "partial_json",
)


_ABSENT = msgspec.Raw()
_WAITING = frozenset(("response.created", "response.queued", "response.in_progress"))
_TEXTS = frozenset((*_DELTAS, "arguments", "message", "output", "tool_plan"))


class Body(msgspec.Struct):
    """The fields of a reply or event that matter here; all others are skipped by the decoder, which is what makes it
    cheap. Those as bytes only show by their presence what kind of answer it is."""

    type: Any = None
    model: Any = None
    choices: Any = None
    usage: Any = None
    metrics: Any = None
    error: Any = None
    code: Any = None
    delta: Any = None
    response: Any = None
    message: Any = None
    status: Any = None
    stop_reason: Any = None
    finish_reason: Any = None
    incomplete_details: Any = None
    system_fingerprint: Any = None
    object: Any = None
    detail: Any = None
    errors: Any = None
    meta: Any = None
    output: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT
    results: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    answers: msgspec.Raw = _ABSENT
    scores: msgspec.Raw = _ABSENT
    embeddings: msgspec.Raw = _ABSENT


_AS_BYTES = frozenset(name for name, kind in Body.__annotations__.items() if kind == "msgspec.Raw")
BLANK = Body()  # an object without any field that is known
_decoder = msgspec.json.Decoder(Body)


def decode(data: bytes) -> Body | None:
    """A JSON object as Body; None for anything else. What a strict decoder refuses and clients read is read as well:
    NaN, halves of surrogate pairs, any depth."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        outline = Outline()
        outline.feed(data.removeprefix(b"\xef\xbb\xbf"))
        return _lenient(outline.text())


def _lenient(text: bytes) -> Body | None:
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    known = {name: fields[name] for name in Body.__struct_fields__ if name in fields}
    return Body(**{k: msgspec.Raw(json.dumps(v).encode()) if k in _AS_BYTES else v for k, v in known.items()})


class Reply:
    """Collects what the objects of one reply say. shaped: one of them was an answer of this route. unreadable: why the
    answer, or its usage, was not understood, as in the record. partly_read: some of it was beyond a bound."""

    __slots__ = (
        "_answer",
        "_finished",
        "_implausible",
        "_parts",
        "cached_tokens",
        "completion_tokens",
        "engine_queue_ms",
        "engine_ttft_ms",
        "engine_version",
        "error_code",
        "finish_reasons",
        "model",
        "partly_read",
        "prompt_tokens",
        "shaped",
        "shown_bytes",
        "shown_tokens",
        "text_bytes",
        "token_ids",
        "unreadable",
    )

    def __init__(self, route: str = "") -> None:
        self._answer = find(route).answer
        self._implausible = False  # a count that cannot be was among them
        self._parts: dict[str, int] = {}  # of a prompt that is reported in parts, the latest of each
        self.model: str | None = None
        self.engine_version: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.engine_queue_ms: float | None = None
        self.engine_ttft_ms: float | None = None
        self.finish_reasons: set[str] = set()
        self._finished: set[int | None] = set()  # choices that have a finish reason, at most MOST_CHOICES
        self.error_code: int | None = None
        self.shaped = False
        self.partly_read = False
        self.unreadable: str | None = None
        self.shown_tokens = 0  # of choices: one for each with text or a step, or those that it names
        self.shown_bytes = 0  # of their texts
        self.text_bytes = self.token_ids = 0  # of a whole reply without usable usage

    @property
    def finished(self) -> int:
        """Return the number of choices that have a finish reason."""
        return len(self._finished)

    @property
    def finish_reason(self) -> str | None:
        """One word for all choices: the gravest that occurred."""
        for word in _GRAVEST:
            if word in self.finish_reasons:
                return word
        return min(self.finish_reasons, default=None)

    def read(self, status: int, content_type: str, body: bytes, size: int, header: str | None = None) -> None:
        """Take in a whole reply, or the outline of a large one. size: bytes of the reply. header: with usage, of an
        answer in bytes."""
        if not is_json(content_type):
            if header is not None and (read := decode(header.encode("utf-8", "replace"))) is not None:
                self._note_usage(read.usage)
                self.model = read.model if isinstance(read.model, str) else None
            self.text_bytes = size if content_type in TEXTS else 0
            self.settle(content=False)
            return
        read = decode(body)
        if status >= 400:
            # an error of a balancer, in whatever form, is none of the engine's: there the status decides
            if read is not None and (read.error is not None or read.object == "error"):
                self.note(read)
            return
        if read is None and self._answer.lists and body[:1] == b"[" and body.rstrip()[-1:] == b"]":
            read = BLANK
            self.shaped = True
        if read is None:
            self.unreadable = self.unreadable or ("json" if body.strip() else "empty")
            return
        content = self.note(read) == CONTENT
        if not self.shaped and self.error_code is None:
            self.unreadable = self.unreadable or "shape"
        if not content and not self.partly_read and isinstance(read.choices, list):
            ids = [choice.get("token_ids") for choice in read.choices if isinstance(choice, dict)]
            self.token_ids = sum(len(each) for each in ids if isinstance(each, list))
        self.settle(content=content or self.token_ids > 0)
        if self.completion_tokens is None and content and not self.partly_read:
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # no estimate of odd ones
                texts = (read.choices, *(_plain(raw) for raw in (read.output, read.content, read.text)))
                self.text_bytes = sum(map(text_bytes, texts))

    def settle(self, *, content: bool) -> None:
        """Drop counts that cannot be, at the end of a reply. content: whether it had text or tool calls."""
        prompt = self.prompt_tokens
        if self.completion_tokens == 0 and (content or prompt is None):
            self.completion_tokens, self._implausible = None, True
        if self.cached_tokens is not None and prompt is not None and self.cached_tokens > prompt:
            self.cached_tokens, self.unreadable = None, self.unreadable or "usage"
        if prompt is None or (content and self.completion_tokens is None):
            if self._implausible:
                self.unreadable = self.unreadable or "usage"
            elif self.partly_read:
                self.unreadable = self.unreadable or "size"

    def note(self, body: Body) -> int:
        """Take in one object. Return CONTENT when it carries generated content (text, reasoning, tool calls; a bare
        role is none), PROGRESS when it shows a step of the engine all the same, else NOTHING."""
        if self.model is None and isinstance(body.model, str):
            self.model = body.model
        if isinstance(body.system_fingerprint, str) and (version := _VERSION.match(body.system_fingerprint)):
            self.engine_version = version[1]
        if body.usage is not None:
            self._note_usage(body.usage)
        self._note_metrics(body.metrics)
        if body.error:
            self._note_error(body.error)
        choices = body.choices
        if choices is None:
            return self._note_other(body)
        if isinstance(choices, list) and choices:
            self.shaped = self.shaped or "choices" in self._answer.keys
            return self._note_choices(choices)
        return NOTHING

    def _note_other(self, body: Body) -> int:
        """An object without choices: a typed event, an answer of another API, or an error in any spelling."""
        if isinstance(body.type, str) and (progress := self._note_typed(body)) is not None:
            return progress
        if isinstance(body.status, str):
            self._note_response(body.status, body.incomplete_details)
        failed = body.status == "error" or (isinstance(body.status, int) and body.status >= 400)
        if filled := max(_filled(getattr(body, name)) for name in self._answer.keys):
            self.shaped = True
            self._note_finish(body.finish_reason)
            if body.usage is None:
                self._note_usage(body.meta)
            return CONTENT if filled > 1 and self._answer.streams else NOTHING
        if self.error_code is None and (
            failed or body.object == "error" or any((body.detail, body.errors, body.message, body.code))
        ):
            self._note_error({"code": body.code or body.status, "type": body.type})
        return NOTHING

    def _note_choices(self, choices: list[Any]) -> int:
        noted = NOTHING
        for choice in choices:
            if isinstance(choice, dict):
                finish = choice.get("finish_reason")
                if finish and len(self._finished) < MOST_CHOICES:
                    index = choice.get("index")
                    self._finished.add(index if isinstance(index, int) else None)
                    self._note_finish(finish)
                part = choice.get("delta") or choice.get("message")
                shown = _named_tokens(choice) if choice.get("token_ids") or choice.get("logprobs") else 0
                if choice.get("text") or (isinstance(part, dict) and any(part.get(key) for key in _DELTAS)):
                    noted, shown = CONTENT, shown or 1
                    text = choice.get("text") or (part and part.get("content"))  # nearly always
                    self.shown_bytes += len(text.encode("utf-8", "replace")) if type(text) is str else text_bytes(part)
                elif not (finish is None and isinstance(part, dict) and part.get("role")):
                    noted, shown = noted or PROGRESS, shown or 1
                self.shown_tokens += shown
        return noted

    def _note_typed(self, body: Body) -> int | None:
        """Take in a typed event: its type says what it carries. None for the type of no event."""
        kind: str = body.type
        if kind == "error":
            if body.error is None:
                self._note_error({"code": body.code})
            return NOTHING
        if kind.startswith("response."):
            noted = self._note_response_event(kind, body)
        elif kind.startswith(("content_block_", "transcript.")):
            delta = body.delta
            has_text = any(delta.get(key) for key in _DELTAS) if isinstance(delta, dict) else bool(delta)
            noted = CONTENT if has_text else PROGRESS
        elif kind == "message":
            self._note_finish(body.stop_reason)
            return None
        elif kind.startswith(("content-", "tool-")):  # Cohere
            noted = CONTENT if text_bytes(body.delta) else PROGRESS
        elif kind == "message-end" and isinstance(body.delta, dict):
            self._note_finish(body.delta.get("finish_reason"))
            self._note_usage(body.delta.get("usage"))
            noted = PROGRESS
        elif kind in ("message_start", "message_delta", "message_stop", "ping"):
            noted = self._note_message_event(kind, body)
        else:
            return None
        self.shaped = self.shaped or noted != NOTHING
        return noted

    def _note_response_event(self, kind: str, body: Body) -> int:
        """Responses API. Of an event too large to be read only the type is known."""
        if isinstance(body.response, dict):
            self._note_inner(body.response)
        else:
            self._note_response(kind.removeprefix("response."), None)
        if kind in _WAITING:
            return NOTHING
        return CONTENT if kind.endswith(".delta") and body.delta else PROGRESS

    def _note_message_event(self, kind: str, body: Body) -> int:
        """Messages API."""
        if kind == "message_start" and isinstance(body.message, dict):
            self._note_inner(body.message)
            self.completion_tokens = None  # the head of a stream says 0 or 1 before anything is generated
        elif kind == "message_delta" and isinstance(body.delta, dict):
            self._note_finish(body.delta.get("stop_reason"))
        return PROGRESS if kind == "message_delta" else NOTHING

    def _note_inner(self, inner: dict[str, Any]) -> None:
        """The object that an event carries whole: a response, or the head of a message."""
        if self.model is None and isinstance(inner.get("model"), str):
            self.model = inner["model"]
        self._note_usage(inner.get("usage"))
        self._note_metrics(inner.get("metrics"))
        if inner.get("error") is not None:
            self._note_error(inner["error"])
        self._note_response(inner.get("status"), inner.get("incomplete_details"))

    def _note_response(self, status: Any, incomplete: Any) -> None:
        if status == "completed":
            self.finish_reasons.add("stop")
        elif status == "incomplete":
            self._note_finish(incomplete.get("reason") if isinstance(incomplete, dict) else "length")
        elif status in ("failed", "cancelled"):
            self.finish_reasons.add("error" if status == "failed" else "abort")

    def _note_finish(self, word: Any) -> None:
        if isinstance(word, str) and word and len(self.finish_reasons) < FINISH_WORDS:
            self.finish_reasons.add(_FINISH.get(word, word)[:32])

    def _note_usage(self, usage: Any) -> None:
        """Take the counts of a usage object and of those within it."""
        if not isinstance(usage, dict):
            self._implausible = self._implausible or usage is not None
            return
        fields = self._answer.usage
        self._note_counts(usage, fields)
        for name in fields.inner:
            if isinstance(inner := usage.get(name), dict):
                self._note_counts(inner, fields)

    def _note_counts(self, usage: dict[str, Any], fields: UsageFields) -> None:
        """Take the counts of one object; a prompt of no tokens cannot be."""
        prompt = self._prompt(usage, fields)
        if prompt:
            self.prompt_tokens = prompt
        elif prompt == 0:
            self._implausible = True
        if (output := self._count(usage, fields.output)) is not None:
            self.completion_tokens = output
        for name in fields.details:
            if isinstance(details := usage.get(name), dict) and details.get("cached_tokens") is not None:
                self.cached_tokens = self._count(details, ("cached_tokens",))
        if fields.read in usage and (read := self._count(usage, (fields.read,))) is not None:
            self.cached_tokens = read

    def _prompt(self, usage: dict[str, Any], fields: UsageFields) -> int | None:
        """Return the prompt's tokens; None where the object does not say."""
        if fields.fresh in usage and (fields.prompt[0] == fields.fresh or fields.prompt[0] not in usage):
            for name in (fields.fresh, fields.read, fields.written):
                if (part := self._count(usage, (name,))) or (part == 0 and name not in self._parts):
                    self._parts[name] = part
            return sum(self._parts.values())
        prompt = self._count(usage, fields.prompt)
        return self._count(usage, ("total_tokens",)) if prompt is None and fields.total else prompt

    def _count(self, usage: dict[str, Any], names: Iterable[str]) -> int | None:
        """Return the first of these counts that is there."""
        for name in names:
            value = usage.get(name)
            if isinstance(value, int | float) and type(value) is not bool and 0 <= value < 1e12 and value % 1 == 0:
                return int(value)
            self._implausible = self._implausible or value is not None
        return None

    def _note_metrics(self, metrics: Any) -> None:
        if isinstance(metrics, dict):
            self.engine_queue_ms = _milliseconds(metrics.get("queue_time_ms"), self.engine_queue_ms)
            self.engine_ttft_ms = _milliseconds(metrics.get("time_to_first_token_ms"), self.engine_ttft_ms)

    def _note_error(self, error: Any) -> None:
        """An error without a usable code counts as the engine's failure (500)."""
        code: Any = None
        if isinstance(error, dict):
            code = next((error[name] for name in _CODES if error.get(name) is not None), None)
            if type(code) is not int:
                code = _ERROR_TYPES.get(str(error.get("type")), code)
        if isinstance(code, str) and code.isdecimal() and len(code) == 3:
            code = int(code)
        self.error_code = code if isinstance(code, int) and 400 <= code < 600 else 500


def _filled(value: Any) -> int:
    """Return 0 for a field that is absent or null, 1 for an empty one, 2 for any other."""
    if not isinstance(value, msgspec.Raw):
        return 0 if value is None else 2
    begin = bytes(memoryview(value)[:2])
    return 0 if begin in (b"", b"nu") else 1 if begin in (b"[]", b'""') else 2


def _plain(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw) if raw else None


def _named_tokens(choice: dict[str, Any]) -> int:
    """Return the number of tokens that a choice names, beside its text or in place of it."""
    logprobs = choice.get("logprobs")
    named = [choice.get("token_ids")]
    if isinstance(logprobs, dict):
        named += [logprobs.get("content"), logprobs.get("tokens")]
    return max((len(each) for each in named if isinstance(each, list)), default=0)


def text_bytes(value: Any, key: str = "text", depth: int = 16) -> int:
    """Return the bytes of generated text inside a decoded answer, down to this depth."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace")) if key in _TEXTS else 0
    if isinstance(value, dict) and depth:
        return sum(text_bytes(inner, name, depth - 1) for name, inner in value.items())
    return sum(text_bytes(inner, key, depth - 1) for inner in value) if isinstance(value, list) and depth else 0


def _milliseconds(value: Any, otherwise: float | None) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e12 else otherwise
