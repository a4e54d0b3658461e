"""Reader of a request body: model, prompt size, limits; and the gateway's changes to it.

Invariants: a body is decoded once, into its top-level fields as bytes; text is measured where it lies and never becomes
Python objects. What the engine's schema (pydantic) would understand is understood here too, so that nothing escapes
accounting or a limit by its spelling. Reading never raises: of an unreadable body nothing is known, and stream is
None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stack.gateway.body_forms import LIMITS, OTHER_BODY, BodyForm
from stack.gateway.form_body import form_models
from stack.gateway.lenient_json import has_surrogate, restore, to_strict
from stack.gateway.prompt_size import TRANSFERS, PromptSize
from stack.gateway.request_fields import (
    FIELDS_DECODER,
    INT64,
    LARGE_BYTES,
    LONGEST_NUMBER,
    MOST_FIELDS,
    MOST_PIECES,
    OBJECT,
    RawFields,
    begins_as_object,
    is_boolean,
    is_dense,
    is_null,
    is_true,
    join_large,
    plain_value,
    read_integer,
    read_number,
    spelled_like,
)
from stack.gateway.request_logprobs import read_logprobs
from stack.gateway.routes import ROUTES, find

_CONTINUOUS = "continuous_usage_stats"
MOST_SETTINGS = 2 << 20  # bytes of sampling_params, which are written anew on the event loop; a whole vocabulary has 1
MOST_N = 16_384  # texts of one prompt: what vLLM makes (the default of VLLM_MAX_N_SEQUENCES)
MOST_TEXTS = 99_999  # of all prompts together: what a record can say
_CUTS = frozenset(("truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query"))
_FORMS = [route.body for route in ROUTES.values() if route.body is not None]
_LARGE = {name for how in _FORMS for name in how.prompt + how.against + how.whole + how.maybe + how.media}
# The fields that may well be large.
_vast = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Vast", [(name, msgspec.Raw, msgspec.Raw()) for name in sorted({"logit_bias", *TRANSFERS} | _LARGE)]
    )
)


class TokenRequest(msgspec.Struct, frozen=True):
    """body: as it came; `sent` is what goes to the engine. usage_added: the usage event is ours, and the client must
    not see it.

    model, n: as asked, None where not said or not understood; stream None for a body that is not JSON, of which nothing
    else is known either.
    max_tokens: the limit of each text to make, None for as much as the context has left. prompts: how many there are.
    outputs: texts to make of them in all (n, or best_of where that is more, of each), 0 on routes that make none.
    prompt_bytes: UTF-8 text that becomes prompt, about, since escapes are counted and not decoded. maybe_bytes: so many
    of them at most are of fields that some chat templates leave out. prompt_ids: prompt given as token ids, in tokens.
    media: images, sounds, videos, files. truncates: the engine may cut the prompt to what fits.
    limit: the field that limits the output. uncountable: why no record could count what is asked for, else empty.
    transfer: the first of TRANSFERS that it has, on a route that makes text; else empty.
    echoes: whether the answer repeats the prompt.
    form: how it is read. fields: the body's, each value as it came or as it was changed, and those that were added.
    edited: whether any was changed. respelled: how to restore a body that no strict decoder reads, else
    empty.
    logprobs, prompt_logprobs: log-probabilities of each token of output, and of the prompt, its own included;
    logprobs_by, prompt_logprobs_by: the fields that ask for them."""

    body: bytes
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    usage_added: bool = False
    max_tokens: int | None = None
    outputs: int = 1
    prompts: int = 1
    prompt_bytes: int = 0
    maybe_bytes: int = 0
    prompt_ids: int = 0
    media: int = 0
    truncates: bool = False
    limit: str | None = None
    uncountable: str = ""
    transfer: str = ""
    echoes: bool = False
    form: BodyForm = OTHER_BODY
    fields: RawFields = {}
    added: tuple[str, ...] = ()
    edited: bool = False
    respelled: str = ""
    logprobs: int = 0
    prompt_logprobs: int = 0
    logprobs_by: str = ""
    prompt_logprobs_by: str = ""

    @property
    def sent(self) -> bytes:
        """Return the body for the engine, which is encoded here, once for all changes.

        Added fields stand behind the others, which keep every byte. Where a value was changed, the white space between
        fields goes, and of a field given twice the last stays, which is the one that the engine would see."""
        if not (self.edited or self.added):
            return self.body
        if self.respelled:
            return restore(msgspec.json.encode(self.fields), self.respelled)
        large = len(self.body) > LARGE_BYTES
        if self.edited:
            if not large:
                return msgspec.json.encode(self.fields)
            parts = [
                part for name, value in self.fields.items() for part in (b",", msgspec.json.encode(name), b":", value)
            ]
            return join_large([b"{", *parts[1:], b"}"])
        more, end = msgspec.json.encode({name: self.fields[name] for name in self.added})[1:], self.body.rindex(b"}")
        return join_large([memoryview(self.body)[:end], b",", more]) if large else self.body[:end] + b"," + more

    def renamed(self, model: str | None) -> TokenRequest:
        """Return the body for an engine that knows the model by this name; None leaves it as it is."""
        return (
            self
            if model is None or model == self.model or not self.fields
            else self._with({"model": model}, model=model)
        )

    def limited(self, max_output: int) -> TokenRequest:
        """Return the body with at most this many tokens for each text, written where the client wrote its limit.

        Whatever an engine may take for a larger limit is replaced, in each field that some engine takes for one. Raises
        ValueError where no number can be read in the field of this route: vLLM refuses that, and another engine may
        take it for no limit."""
        if self.limit is None or not self.fields:
            return self
        fields, around = _limits(self.form, self.fields), self.form.within
        if around and not _is_object(self.fields.get(around)):
            return self  # the engine refuses it
        changed = _lowered(self, fields, max_output)
        if not _said(fields, self.limit):
            if self.form.limit_required:
                raise ValueError(f"{self.limit} is missing; send an integer of at least 0")
            if self.max_tokens is None or self.max_tokens > max_output:
                changed[self.limit] = max_output
        known = max_output if self.limit in changed else self.max_tokens
        if around and changed:
            changed = {around: {**fields, **changed}}
        return self._with(changed, max_tokens=known) if changed else self

    def priority(self, best: int) -> int:
        """Return the priority for the engine, where smaller is sooner: what it asks for, but none before `best`."""
        if "priority" not in self.fields or not self.form.has_priority:
            return best
        asked = read_integer(plain_value(self.fields["priority"]))
        return best if asked is None or asked not in INT64 else max(best, asked)

    def require_priority(self, best: int) -> None:
        """Raise ValueError for a priority that vLLM refuses, and another engine may take for sooner than `best`."""
        if self.form.has_priority:
            value = self.fields["priority"]
            long = memoryview(value).nbytes > LONGEST_NUMBER
            asked = None if long else read_integer(plain_value(value))
            if long or (best if asked is None else asked < INT64.start):
                raise ValueError("priority is not a 64-bit integer")

    def ranked(self, best: int) -> TokenRequest:
        """Return the body with this priority, where the body asks for a sooner one, or for none and `best` is not the
        engine's default of 0."""
        if not self.fields or not self.form.has_priority:
            return self
        if "priority" not in self.fields:
            return self._with({"priority": best}) if best else self
        asked = read_integer(value := plain_value(self.fields["priority"]))
        sooner = asked is not None and INT64.start <= asked < best
        return self._with({"priority": spelled_like(value, best)}) if sooner else self

    def salted(self, salt: str) -> TokenRequest:
        """Return the same with this cache_salt in place of the client's own, unless the engine refuses that."""
        refused = "cache_salt" in self.fields and (
            not self._is_text("cache_salt", null=True) or self.text("cache_salt") == ""
        )
        return self._with({"cache_salt": salt}) if self.fields and self.form.has_salt and not refused else self

    def identified(self, request_id: str) -> TokenRequest:
        """Return the same with this id, by which an engine stores the response."""
        return self._with({"request_id": request_id}) if self.fields and self._is_text("request_id") else self

    def text(self, name: str) -> str | None:
        """Return the value of a field that is a string; None for any other, and for one with a lone surrogate."""
        value = plain_value(self.fields.get(name))
        return value if isinstance(value, str) and not has_surrogate(value, self.respelled) else None

    def _is_text(self, name: str, *, null: bool = False) -> bool:
        """Return whether a field is absent or a string, or null where the engine takes that; it refuses any other."""
        value = self.fields.get(name)
        return value is None or self.text(name) is not None or (null and is_null(value))

    def _with(self, changed: Mapping[str, Any], **known: Any) -> TokenRequest:
        fields, added, edited = dict(self.fields), self.added, self.edited
        for name, value in changed.items():
            if name not in fields:
                added += (name,)
            elif name not in added:
                edited = True
            fields[name] = msgspec.Raw(msgspec.json.encode(value))
        return msgspec.structs.replace(self, fields=fields, added=added, edited=edited, **known)


def read(route: str, body: bytes, lenient: bool = True) -> TokenRequest:
    """Return the request in a body; stream is None if it cannot be read. lenient: read what Python's parser reads."""
    try:
        return _read(route, body, body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        form = find(route).body
        if form is not None and form.form:
            return _upload(body)
    try:
        return _read(route, body, *to_strict(body)) if lenient else TokenRequest(body=body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return TokenRequest(body=body)


def _read(route: str, body: bytes, text: bytes, respelled: str = "") -> TokenRequest:
    """Return the request in a body that is this text in UTF-8. Raises what the decoders raise."""
    if text[:1] != b"{" and not begins_as_object(text):
        raise ValueError("no object")
    dense = len(text) > LARGE_BYTES and is_dense(text, MOST_PIECES)
    if dense and _too_many_fields(text):
        return TokenRequest(body=body)
    if len(fields := FIELDS_DECODER.decode(text)) > MOST_FIELDS:
        return TokenRequest(body=body)
    ask = _ask(route, body, fields, dense, respelled)
    if ask.form.within and (settings := fields.get(ask.form.within)) is not None:
        large = memoryview(settings).nbytes > MOST_SETTINGS
        if large or len(_object(fields, ask.form.within)) > MOST_FIELDS:
            return TokenRequest(body=body)
    return ask


def _upload(body: bytes) -> TokenRequest:
    """The ask of a form with a file, of which the model alone is read."""
    models = form_models(body)
    several = "the form names several models; leave one" if len(models) > 1 else ""
    return TokenRequest(body=body, media=1, model=min(models, default=None), uncountable=several)


def _ask(route: str, body: bytes, fields: dict[str, msgspec.Raw], dense: bool, respelled: str) -> TokenRequest:
    how = find(route).body or OTHER_BODY
    model, stream = plain_value(fields.get("model")), is_true(plain_value(fields.get("stream")))
    settings = _limits(how, fields)
    n, best_of = (_number(settings, "n"), _number(settings, "best_of")) if how.has_n else (0, 0)
    limit, max_tokens = _limit(how, settings)
    of_output = of_prompt = "", 0
    if not how.logprobs.isdisjoint(settings):
        of_output, of_prompt = read_logprobs(how, settings, max(n, 1))
    size = PromptSize(dense, how.quoting)
    prompts = size.add_prompt(how, fields)
    if TRANSFERS[0] in fields:
        size.add_transferred(fields)
    spread = stream and "stream_interval" in settings and how.usage_option and _spread(how, fields, settings)
    options = _usage_options(fields) if stream and how.usage_option else None
    new = "stream_options" not in fields
    if add := options is not None and not is_true(plain_value(options.get("include_usage"))):
        fields["stream_options"] = _with_usage(options)
    return TokenRequest(
        body=body,
        model=model if isinstance(model, str) and not has_surrogate(model, respelled) else None,
        stream=stream,
        n=n if 0 < n <= MOST_N else None,
        usage_added=add,
        max_tokens=max_tokens,
        outputs=0 if how.unsaid == 0 else max(n, best_of, 1) * prompts,
        prompts=prompts,
        prompt_bytes=size.text_bytes(),
        maybe_bytes=size.maybe,
        prompt_ids=size.ids,
        media=size.media,
        truncates=_truncates(how, fields),
        limit=limit,
        uncountable=_uncountable(route, how, fields, max(n, best_of), prompts),
        transfer=_transfer(fields, settings) if how.limit else "",
        echoes="echo" in fields and is_true(plain_value(fields["echo"])),
        form=how,
        fields=fields,
        added=("stream_options",) if add and new else (),
        edited=(add and not new) or spread,
        respelled=respelled,
        logprobs=of_output[1],
        prompt_logprobs=of_prompt[1],
        logprobs_by=of_output[0],
        prompt_logprobs_by=of_prompt[0],
    )


def _limits(how: BodyForm, fields: RawFields) -> RawFields:
    """Return the fields among which the limit stands: those of the body, or of an object in it."""
    return _object(fields, how.within) if how.within else fields


def _spread(how: BodyForm, fields: dict[str, msgspec.Raw], settings: RawFields) -> bool:
    """Write a stream_interval of several tokens as 1, so that each event shows its tokens; return whether it was."""
    number = _tokens(settings["stream_interval"])
    if number is None or number < 2:
        return False
    each = {"stream_interval": spelled_like(plain_value(settings["stream_interval"]), 1)}
    value = {how.within: {**settings, **each}} if how.within else each
    fields.update((name, msgspec.Raw(msgspec.json.encode(one))) for name, one in value.items())
    return True


def _lowered(ask: TokenRequest, fields: RawFields, max_output: int) -> dict[str, Any]:
    """Return the limits that are above this one, each lowered to it. Raises ValueError where the route's own cannot be
    read."""
    lowered: dict[str, Any] = {}
    for name in LIMITS:
        if name in fields and _said(fields, name):
            number = ask.max_tokens if name == ask.limit else _tokens(fields[name])
            if number is None and name in ask.form.limit:
                raise ValueError(f"{name} is not an integer of at least 0")
            if number is None:
                lowered[name] = max_output
            elif number > max_output:
                lowered[name] = spelled_like(plain_value(fields[name]), max_output)
    return lowered


def _transfer(fields: RawFields, settings: RawFields) -> str:
    """Return the first of TRANSFERS that a body has; empty where it has none. vLLM takes them among the extra arguments
    of sampling, too."""
    places = [fields]
    for around, name in ((fields, "vllm_xargs"), (settings, "extra_args")):
        if name in around:
            places.append(_object(around, name))
    for place in places:
        for name in TRANSFERS:
            if name in place and not is_null(place[name]):
                return name
    return ""


def _truncates(how: BodyForm, fields: RawFields) -> bool:
    """Return whether the engine may cut a prompt to what fits."""
    if not _CUTS.isdisjoint(fields) and any(plain_value(fields.get(name)) not in (None, 0) for name in _CUTS):
        return True
    return plain_value(fields.get("truncation")) == "auto" or (
        how.cuts and plain_value(fields.get("truncate")) != "NONE"
    )


def _uncountable(route: str, how: BodyForm, fields: RawFields, texts: int, prompts: int) -> str:
    """Return why no record could count the request; empty where one can."""
    if texts > MOST_N or max(texts, 1) * prompts > MOST_TEXTS:
        return (
            f"{texts or 1} texts of each of {prompts} prompts are asked for; at most {MOST_N} of one, and {MOST_TEXTS}"
            " in all"
        )
    if (
        how.one_each
        and len(several := [name for name in how.each if bytes(fields.get(name, b"null")) not in (b"null", b"[]")]) > 1
    ):
        return f"{several[0]} and {several[1]} are both given, and an engine reads one of them; leave one out"
    if route == "/v1/responses" and is_true(plain_value(fields.get("background"))):
        return "with background the engine works on when its answer is over, in nobody's slot; leave it out"
    return ""


def _too_many_fields(body: bytes) -> bool:
    """Return whether the top level of a body may hold more fields than any honest one, found without making any of
    them."""
    return (
        body.count(b":") - sum(bytes(value).count(b":") for value in msgspec.structs.astuple(_vast.decode(body)))
        > MOST_PIECES
    )


def _limit(how: BodyForm, fields: RawFields) -> tuple[str | None, int | None]:
    """The field that limits the output on this route, and the limit. None: as much as the context has left.

    A null counts as not said, except that it lifts the limit of a route that has one."""
    if not how.limit:
        return None, how.unsaid
    for name in how.limit:
        if _said(fields, name):
            return name, _tokens(fields[name])
    unset = (name for name in how.limit if is_null(fields.get(name)))
    return next(unset, how.limit[-1]), None if any(name in fields for name in how.limit) else how.unsaid


def _number(fields: RawFields, name: str) -> int:
    """Return the number in a field; 0 where there is none."""
    return (read_number(plain_value(fields[name])) or 0) if name in fields else 0


def _said(fields: RawFields, name: str) -> bool:
    """Return whether a limit is set: null is none, nor is a max_completion_tokens of 0 for vLLM 0.10."""
    if name not in fields or is_null(fields[name]):
        return False
    return name != "max_completion_tokens" or _tokens(fields[name]) != 0


def _tokens(value: msgspec.Raw) -> int | None:
    """Return the number in a field that limits the output; None for one beyond LONGEST_NUMBER."""
    return None if memoryview(value).nbytes > LONGEST_NUMBER else read_number(plain_value(value))


def _object(fields: RawFields, name: str) -> RawFields:
    """Return the fields of an object in a field; none for any other value."""
    value = fields.get(name)
    return FIELDS_DECODER.decode(value) if value is not None and _is_object(value) else {}


def _is_object(value: msgspec.Raw | None) -> bool:
    return value is not None and memoryview(value)[0] == OBJECT


def _usage_options(fields: RawFields) -> RawFields | None:
    """Return the stream_options of a body; None where the engine refuses them."""
    value = fields.get("stream_options")
    if not is_null(value) and not _is_object(value):
        return None
    options = _object(fields, "stream_options")
    return options if all(is_boolean(options.get(name)) for name in ("include_usage", _CONTINUOUS)) else None


def _with_usage(options: RawFields) -> msgspec.Raw:
    """stream_options with include_usage; every other value keeps its bytes.

    continuous_usage_stats goes: without include_usage the engine ignores it, with it every chunk would change."""
    kept = {name: value for name, value in options.items() if name != _CONTINUOUS}
    usage = spelled_like(plain_value(options.get("include_usage")), True)
    return msgspec.Raw(msgspec.json.encode({**kept, "include_usage": usage}))
