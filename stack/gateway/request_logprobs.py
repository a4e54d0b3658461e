"""Log-probabilities that a request asks for, by field, as the request models of vLLM 0.10 to 0.32 read them.

Invariant: what an engine may compute is counted, in whatever field and spelling; what it refuses may count as none.
Source: entrypoints/**/protocol.py, to_sampling_params of each; sampling_params.py; beam_search/online.py."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import msgspec

from stack.gateway.body_forms import BodyForm
from stack.gateway.request_fields import LONGEST_NUMBER, RawFields, is_null, is_true, plain_value, read_integer

ALL_LOGPROBS = 100_000  # of one token: about as many as a vocabulary has
_INCLUDED = "message.output_text.logprobs"
_NO_MARKS = bytes(set(range(256)) - set(b",]"))


def read_logprobs(form: BodyForm, fields: RawFields, n: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the field that asks for most log-probabilities of each token of output, and how many, and that of the
    prompt; an empty name for none.

    The token's own is one of them. n: texts of each prompt, the width of a beam search."""
    top = _count(fields, form.top_logprobs)
    if "logprobs" in form.logprobs and form.top_logprobs != "logprobs":  # a boolean, beside which the number stands
        top = max(1, top) if is_true(plain_value(fields.get("logprobs"))) else 0
    elif "include" in form.logprobs:
        top = max(1, top) if _included(fields.get("include")) else 0
    output = {form.top_logprobs or "logprobs": top, "logprob_token_ids": _longest(fields.get("logprob_token_ids"))}
    if is_true(plain_value(fields.get("use_beam_search"))):
        output["use_beam_search"] = 2 * n + 1
    prompt = {
        "prompt_logprobs": _count(fields, "prompt_logprobs"),
        "prompt_logprob_token_ids": _longest(fields.get("prompt_logprob_token_ids")),
    }
    if is_null(fields.get("prompt_logprobs")) and is_true(plain_value(fields.get("echo"))):
        # in a chat without top_logprobs, too: its default of 0 asks for the token's own
        prompt["echo"] = max(_count(fields, form.top_logprobs), form.top_logprobs == "top_logprobs")
    return _most(form, output), _most(form, prompt)


def _most(form: BodyForm, asked: Mapping[str, int]) -> tuple[str, int]:
    name = max(form.logprobs & asked.keys(), key=lambda name: (asked[name], name), default="")
    return name, asked.get(name, 0)


def _count(fields: RawFields, name: str) -> int:
    """Return the number in a field and one for the token itself; 0 for no number, and for one that is refused."""
    value = fields.get(name)
    if value is None or is_null(value):
        return 0
    if memoryview(value).nbytes > LONGEST_NUMBER:
        return ALL_LOGPROBS
    number = read_integer(plain_value(value))
    if number is None or number < -1:
        return 0
    return ALL_LOGPROBS if number == -1 else min(number + 1, ALL_LOGPROBS)


def _longest(value: msgspec.Raw | None) -> int:
    """Return the length of a list, or of the longest list in it, and one for the token itself; 0 for an empty one.

    No row becomes an object: there may be millions."""
    data = bytes(value or b"null")
    if is_null(value) or not data.strip(b"[], \t\r\n"):
        return 0
    marks = data.translate(None, _NO_MARKS).replace(b"],", b"]")
    return 2 + bisect_left(range(ALL_LOGPROBS - 2), True, key=lambda commas: b"," * (commas + 1) not in marks)


def _included(value: msgspec.Raw | None) -> bool:
    """Return whether the field `include` of /v1/responses asks for log-probabilities."""
    if value is None or memoryview(value).nbytes > LONGEST_NUMBER:
        return value is not None
    names = msgspec.json.decode(value)
    return isinstance(names, list) and _INCLUDED in names
