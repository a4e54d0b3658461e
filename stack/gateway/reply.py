"""Reader of an engine's reply: tokens, timings, finish reason. Pure; fed with decoded objects, whole or one per
event.

Knows chat and text completions, embeddings, the responses API and the messages API. Unknown shapes are no error: what
is not said stays None."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

INSPECT_BYTES = 8 << 20  # a larger reply is not decoded; its usage is looked for near its end
TAIL_BYTES = 4096
FINISH_WORDS = 20  # different ones that are kept of one reply; engines know about ten

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_use": "tool_calls",
}
_GRAVEST = ("error", "abort", "repetition", "content_filter", "length", "tool_calls", "function_call", "stop")
_USAGES = (
    ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
    ("input_tokens", "output_tokens", "input_tokens_details"),
)
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


class Body(msgspec.Struct):
    """The fields of a reply or event that matter here; all others are skipped by the decoder, which is what makes it
    cheap."""

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
    incomplete_details: Any = None
    system_fingerprint: Any = None


_decoder = msgspec.json.Decoder(Body)


def decode(data: bytes) -> Body | None:
    """A JSON object as Body; None for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Reply:
    """Collects what the objects of one reply say. The latest word on a figure counts, since streams count upwards."""

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "engine_queue_ms",
        "engine_ttft_ms",
        "engine_version",
        "error_code",
        "finish_reasons",
        "model",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.model: str | None = None
        self.engine_version: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.engine_queue_ms: float | None = None
        self.engine_ttft_ms: float | None = None
        self.finish_reasons: set[str] = set()
        self.error_code: int | None = None

    @property
    def finish_reason(self) -> str | None:
        """One word for all choices: the gravest that occurred."""
        for word in _GRAVEST:
            if word in self.finish_reasons:
                return word
        return min(self.finish_reasons, default=None)

    def note(self, body: Body) -> bool:
        """Takes in one object; True when it carries generated content (text, reasoning, tool calls; a bare role does
        not count)."""
        if self.model is None and isinstance(body.model, str):
            self.model = body.model
        if isinstance(body.system_fingerprint, str) and (found := _VERSION.match(body.system_fingerprint)):
            self.engine_version = found[1]
        self._note_usage(body.usage)
        self._note_metrics(body.metrics)
        if body.error is not None:
            self._note_error(body.error)
        if isinstance(body.type, str) and (body.choices is None):
            return self._note_typed(body)
        if isinstance(body.status, str) and body.choices is None:
            self._note_response(body.status, body.incomplete_details)
        return self._note_choices(body.choices)

    def note_tail(self, tail: bytes) -> None:
        """Takes the usage out of the end of a reply too large to decode, such as many embeddings."""
        at = tail.rfind(b'"usage":')
        if at < 0:
            return
        try:
            usage, _ = json.JSONDecoder().raw_decode(tail[at + 8 :].decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            return
        self._note_usage(usage)

    def _note_choices(self, choices: Any) -> bool:
        content = False
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._note_finish(choice.get("finish_reason"))
                delta = choice.get("delta")
                content = (
                    content
                    or bool(choice.get("text"))
                    or (isinstance(delta, dict) and any(delta.get(key) for key in _DELTAS))
                )
        return content

    def _note_typed(self, body: Body) -> bool:
        """Responses API ("response.*") and messages API; their kinds of event say what they carry."""
        kind: str = body.type
        if kind == "error":
            if body.error is None:
                self._note_error({"code": body.code})
        elif kind.startswith("response."):
            if kind.endswith(".delta"):
                return bool(body.delta)
            if isinstance(body.response, dict):
                self._note_inner(body.response)
        elif kind == "content_block_delta":
            return isinstance(body.delta, dict) and any(body.delta.get(key) for key in _DELTAS)
        elif kind == "message_start" and isinstance(body.message, dict):
            self._note_inner(body.message)
            self.completion_tokens = None  # the head of a stream says 0 or 1 before anything is generated
        elif kind == "message_delta" and isinstance(body.delta, dict):
            self._note_finish(body.delta.get("stop_reason"))
        elif kind == "message":
            self._note_finish(body.stop_reason)
        return False

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
        if not isinstance(usage, dict):
            return
        get = usage.get
        for prompt, completion, details in _USAGES:
            if prompt in usage or completion in usage or details in usage:
                self.prompt_tokens = _count(get(prompt), self.prompt_tokens)
                self.completion_tokens = _count(get(completion), self.completion_tokens)
                if isinstance(part := get(details), dict):
                    self.cached_tokens = _count(part.get("cached_tokens"), self.cached_tokens)
        if "prompt_tokens" not in usage or "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
            self._note_split_prompt(usage)

    def _note_split_prompt(self, usage: dict[str, Any]) -> None:
        """The messages API counts cached and newly cached prompt tokens apart from input_tokens; a record counts the
        whole prompt."""
        fresh, read, made = (
            _count(usage.get(f"{name}input_tokens"), None) for name in ("", "cache_read_", "cache_creation_")
        )
        if read is not None:
            self.cached_tokens = read
        if fresh is not None and (read or made):
            self.prompt_tokens = fresh + (read or 0) + (made or 0)

    def _note_metrics(self, metrics: Any) -> None:
        if isinstance(metrics, dict):
            self.engine_queue_ms = _milliseconds(metrics.get("queue_time_ms"), self.engine_queue_ms)
            self.engine_ttft_ms = _milliseconds(metrics.get("time_to_first_token_ms"), self.engine_ttft_ms)

    def _note_error(self, error: Any) -> None:
        """An error without a usable code counts as the engine's failure (500)."""
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, str) and code.isdecimal() and len(code) == 3:
            code = int(code)
        self.error_code = code if isinstance(code, int) and 400 <= code < 600 else 500


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if type(value) is int and 0 <= value < 10**12 else otherwise


def _milliseconds(value: Any, otherwise: float | None) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e12 else otherwise
