"""What a request asks for, in tokens, read without touching it; and the changes that the gateway makes to it.

Laws: a body is decoded once, into its top-level fields as bytes; text is measured where it lies and never becomes
Python objects. What the engine's schema (pydantic) would understand is understood here too, so that nothing escapes
accounting or a limit by its spelling. Nothing
raises: of what cannot be read nothing is known, which stream None tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

# Routes that make or read tokens: each POST to them leaves one record. Everything else under /v1 (models, render,
# count_tokens, ...) is only passed on and leaves none. Source: the routers of vLLM 0.32.
RECORDED = frozenset(
    f"/v1/{name}"
    for name in (
        "chat/completions", "chat/completions/batch", "completions", "responses", "embeddings", "messages",
        "audio/transcriptions",
        "audio/translations", "rerank", "score", "systemone",
    )
)  # fmt: skip
# Routes whose streams say that they are complete.
ENDING = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
# Routes whose streams tell their usage only when asked by stream_options.
_USAGE_ON_REQUEST = frozenset(("/v1/chat/completions", "/v1/completions"))

LARGE_BYTES = 1 << 20  # larger values are looked at before they are taken apart
MOST_PIECES = 200_000  # fields and list items of one such value; about 300 bytes of memory each
MOST_ITEMS = 1_000_000  # of a list that is counted, about 50 bytes each for as long as that takes
MOST_TOKENS = 10**9  # more than any context: larger numbers are read as this one
MOST_N = 16_384  # texts of one prompt: what vLLM makes (VLLM_MAX_N_SEQUENCES, as shipped)
MOST_TEXTS = 99_999  # of all prompts together: what a record can say
# up to these, what a chat template adds to each is less than an estimate is worth; beyond them each adds
FEW_MESSAGES = 16
MESSAGE_BYTES = 16  # about the four tokens of a role and its marks
_DEEPEST = 3  # parts within the content of parts: a tool's result is the deepest that any API has


@dataclass(frozen=True, slots=True)
class _Route:
    """How a route says what it wants.

    prompt: fields of text, parts, messages or token ids. each: those whose list items are prompts of their own;
    one_each: an engine reads only one of them. ids: those of them that take token ids. chats: those in which a list of
    objects is one conversation. named: objects each field of which is a prompt. against: fields that the engine reads
    once with every prompt of the others. whole: fields that go into the prompt as their JSON, with every prompt. maybe:
    those that may, as the chat template likes. media: fields of images, sounds or embeddings.
    quoting: media in messages of any role but user may become text. aside: all of whole and maybe.
    limit: fields that limit the output, the one that counts first; unsaid: the
    limit of a body without them, None for what the context has left. has_priority: whether the body may name the
    priority of its request; has_n: how many texts it wants.
    Source: the request models of vLLM 0.32 (entrypoints/**/protocol.py)."""

    prompt: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    one_each: bool = False
    ids: tuple[str, ...] = ()
    chats: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    maybe: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    quoting: bool = False
    aside: frozenset[str] = frozenset()
    limit: tuple[str, ...] = ()
    unsaid: int | None = None
    has_priority: bool = True
    has_n: bool = False


# Fields that limit the output on some route of some engine. Which of them it obeys has changed: 0.10 takes
# max_completion_tokens on any route, unless it is 0, later ones max_output_tokens as well. So every one is held to a
# team's limit on every route that makes
# text.
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_CHAT_LIMIT = ("max_completion_tokens", "max_tokens")
_SCORED = ("documents", "items", "text_2", "data_2")
_TEMPLATE = ("chat_template", "chat_template_kwargs")
_SCORED_WITH = (*_TEMPLATE, "instruction")
_GIVEN, _ASIDE = ("tools", "functions", "documents"), ("response_format", "tool_choice", *_TEMPLATE)
_ROUTES = {
    "/v1/chat/completions": _Route(("messages",), whole=_GIVEN, maybe=_ASIDE, limit=_CHAT_LIMIT, has_n=True),
    "/v1/chat/completions/batch": _Route(
        ("messages",), each=("messages",), whole=_GIVEN, maybe=_ASIDE, limit=_CHAT_LIMIT, has_n=True
    ),
    "/v1/completions": _Route(
        ("prompt",),
        each=("prompt", "prompt_embeds"),
        ids=("prompt",),
        against=("suffix",),
        media=("prompt_embeds",),
        limit=("max_tokens",),
        unsaid=16,
        has_n=True,
    ),
    "/v1/responses": _Route(
        ("instructions", "input"),
        whole=("tools",),
        maybe=("previous_input_messages", "tool_choice", "text", *_TEMPLATE),
        limit=("max_output_tokens",),
    ),
    "/v1/messages": _Route(
        ("system", "messages"),
        whole=("tools",),
        maybe=("tool_choice", "output_config", *_TEMPLATE),
        quoting=True,
        limit=("max_tokens",),
        has_priority=False,
    ),
    "/v1/embeddings": _Route(
        ("input", "messages"),
        each=("input", "messages"),
        one_each=True,
        ids=("input",),
        chats=("input", "messages"),
        maybe=_TEMPLATE,
        unsaid=0,
    ),
    "/v1/rerank": _Route(("documents",), each=("documents",), against=("query",), maybe=_SCORED_WITH, unsaid=0),
    "/v1/score": _Route(
        _SCORED, each=_SCORED, one_each=True, against=("queries", "text_1", "data_1"), maybe=_SCORED_WITH, unsaid=0
    ),
    "/v1/systemone": _Route(
        ("questions",),
        each=("questions",),
        named=("questions",),
        against=("instructions",),
        whole=("state",),
        maybe=("chat_template_kwargs",),
        media=("images", "audio", "videos"),
        unsaid=1,
    ),
}
_ROUTES = {route: replace(how, aside=frozenset(how.whole + how.maybe)) for route, how in _ROUTES.items()}
_OTHER = _Route()
UPLOADS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))  # forms with a file, no JSON

# Contents of the fields of a message, of a part of one, or of an item of the responses API: more of these, media, or
# nothing that any prompt has. Every other field may be text (or JSON that becomes text), since a chat template can
# print what it likes.
_MORE, _TEXT, _MEDIA, _ROLE, _NOTHING, _MAYBE = range(6)
_HOLDS = {
    name: holds
    for names, holds in (
        ("content output summary", _MORE),
        (
            (
                "image_url image_pil image_embeds audio_url input_audio audio_embeds video_url video_embeds source file"
                " file_data file_id file_url"
            ),
            _MEDIA,
        ),
        (
            "text reasoning reasoning_content thinking refusal tool_calls function_call arguments input tools tool",
            _TEXT,
        ),
        ("role", _ROLE),
        ("type cache_control signature encrypted_content annotations logprobs", _NOTHING),
    )
    for name in names.split()
}
# any other may be text of any length
_ROLES = frozenset((b'"user"', b'"assistant"', b'"system"', b'"developer"', b'"tool"'))
# Fields by which a router in front of engines hands over what another engine has computed. vLLM 0.32 takes
# kv_transfer_params.prompt_token_ids for the prompt in place of the messages.
TRANSFERS = ("kv_transfer_params", "ec_transfer_params")

_STRING, _LIST, _OBJECT, _NULL = b'"[{n'  # what values begin with
_TRUE = frozenset(("1", "true", "t", "yes", "y", "on"))

_Fields = Mapping[str, msgspec.Raw]
# a list of strings
_TEXTS = re.compile(rb'\[\s*+(?:"(?:[^"\\]++|\\.)*+"\s*+,\s*+)*+"(?:[^"\\]++|\\.)*+"\s*+\]', re.DOTALL)
_OBJECTS = re.compile(rb"\[\s*+(?:\[\s*+)?+\{")  # a list that begins with an object, or with a list that does

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_values = msgspec.json.Decoder(list[msgspec.Raw])
# The fields that may well be large.
_vast = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Vast",
        [
            (name, msgspec.Raw, msgspec.Raw())
            for name in sorted(
                {"logit_bias", *TRANSFERS}.union(
                    *(r.prompt + r.against + r.whole + r.maybe + r.media for r in _ROUTES.values())
                )
            )
        ],
    )
)


class TokenRequest(msgspec.Struct, frozen=True):
    """body: as it came; `sent` is what goes to the engine. usage_added: the usage event is ours, and the client must
    not see it.

    model, n: as asked, None where not said or not understood; stream None for a body that is not JSON, of which nothing
    else is known either. Whoever holds clients to limits refuses such a body: the engine's parser, Python's, also takes
    NaN, UTF-16 and half a surrogate pair.
    max_tokens: the limit of each text to make, None for as much as the context has left. prompts: how many there are.
    outputs: texts to make of them in all (n, or best_of where that is more, of each), 0 on routes that make none.
    prompt_bytes: UTF-8 text that becomes prompt, about, since escapes are counted and not decoded. maybe_bytes: so many
    of them at most are of fields that some chat templates leave out. prompt_ids: prompt given as token ids, in tokens.
    media: images, sounds, videos, files. truncates: the engine may cut the prompt to what fits.
    limit: the field that limits the output. uncountable: why no record could count what is asked for, else empty.
    transfer: the first of TRANSFERS that it has, else empty.
    fields: the body's, each value as it came or as it was changed. edited: whether any was."""

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
    fields: _Fields = {}
    edited: bool = False

    @property
    def sent(self) -> bytes:
        """Return the body for the engine, which is encoded here, once for all changes.

        Every other field keeps its place and the bytes of its value; of one given twice the last stays, which is the
        one that the engine would see; white space between fields goes."""
        return msgspec.json.encode(self.fields) if self.edited else self.body

    def renamed(self, model: str | None) -> TokenRequest:
        """The same for an engine that knows the model by this name; None leaves it as it is."""
        return (
            self
            if model is None or model == self.model or not self.fields
            else self._with({"model": model}, model=model)
        )

    def limited(self, max_output: int | None) -> TokenRequest:
        """The same with at most this many tokens for each text, written where the client wrote its limit; None leaves
        it as it is.

        Whatever is not plainly a limit within `max_output` is replaced by it, also what the engine would refuse: a
        limit must hold. So is each other field that some engine takes for one."""
        if max_output is None or self.limit is None or not self.fields:
            return self
        beyond = [name for name in _LIMITS if _said(self.fields, name) and not _within(self.fields[name], max_output)]
        if (self.max_tokens is None or self.max_tokens > max_output) and self.limit not in beyond:
            beyond.append(self.limit)
        known = max_output if self.limit in beyond else self.max_tokens
        return self._with(dict.fromkeys(beyond, max_output), max_tokens=known) if beyond else self

    def priority(self, best: int) -> int:
        """What it may have of the engine's priorities, where smaller is sooner: what it asks for, but none before
        `best`."""
        asked = self.fields.get("priority")
        return best if asked is None else max(best, _number(_plain(asked)) or 0)

    def ranked(self, route: str, priority: int) -> TokenRequest:
        """The same with this priority, where the body says another, or none and it is not the engine's own 0."""
        if not self.fields or not _ROUTES.get(route, _OTHER).has_priority:
            return self
        asked = self.fields.get("priority")
        as_it_is = not priority if asked is None else bytes(asked) == b"%d" % priority
        return self if as_it_is else self._with({"priority": priority})

    def salted(self, salt: str) -> TokenRequest:
        """Return the same with this cache_salt in place of the client's own."""
        return self._with({"cache_salt": salt}) if self.fields else self

    def identified(self, request_id: str) -> TokenRequest:
        """Return the same with this id, by which an engine stores the response."""
        return self._with({"request_id": request_id}) if self.fields else self

    def text(self, name: str) -> str | None:
        """Return the value of a field that is a string; None for any other."""
        value = _plain(self.fields.get(name))
        return value if isinstance(value, str) else None

    def _with(self, changed: Mapping[str, str | int], **known: Any) -> TokenRequest:
        fields = {**self.fields, **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changed.items()}}
        return msgspec.structs.replace(self, fields=fields, edited=True, **known)


def read(route: str, body: bytes) -> TokenRequest:
    """The ask of a body; with stream None of one that cannot be read."""
    try:
        # a file of some megabytes, say, in which many a byte looks like a comma
        if body[:64].lstrip()[:1] not in (b"{", b""):
            raise ValueError("no object")
        dense = (
            len(body) > LARGE_BYTES
            and body.count(b",") + body.count(b":") > MOST_PIECES
            and _pieces(body) > MOST_PIECES
        )
        if dense and _too_many_fields(body):
            return TokenRequest(body=body)
        return _ask(route, body, _fields.decode(body), dense)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return TokenRequest(body=body, media=1 if route in UPLOADS else 0)


def _ask(route: str, body: bytes, fields: dict[str, msgspec.Raw], dense: bool) -> TokenRequest:
    how = _ROUTES.get(route, _OTHER)
    model, stream = _plain(fields.get("model")), _truth(_plain(fields.get("stream")))
    n, best_of = (_number(_plain(fields.get(name))) or 0 for name in ("n", "best_of")) if how.has_n else (0, 0)
    limit, max_tokens = _limit(how, fields)
    size = _Size(dense, how.quoting)
    prompts = size.add_prompt(how, fields)
    if TRANSFERS[0] in fields:
        size.add_transferred(fields)
    options = _options(fields) if stream and route in _USAGE_ON_REQUEST else None
    if add := options is not None and not _truth(_plain(options.get("include_usage"))):
        fields["stream_options"] = _with_usage(options)
    return TokenRequest(
        body=body,
        model=model if isinstance(model, str) else None,
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
        truncates="truncate_prompt_tokens" in fields or _plain(fields.get("truncation")) == "auto",
        limit=limit,
        uncountable=_uncountable(route, how, fields, max(n, best_of), prompts),
        transfer=_transfer(fields),
        fields=fields,
        edited=add,
    )


def _transfer(fields: _Fields) -> str:
    """Return the first of TRANSFERS that a body has; empty where it has none."""
    for name in TRANSFERS:
        if name in fields and memoryview(fields[name])[0] != _NULL:
            return name
    return ""


def _uncountable(route: str, how: _Route, fields: _Fields, texts: int, prompts: int) -> str:
    """Why no record could count what is asked for; empty where one can."""
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
    if route == "/v1/responses" and _truth(_plain(fields.get("background"))):
        return "with background the engine works on when its answer is over, in nobody's slot; leave it out"
    return ""


def _too_many_fields(body: bytes) -> bool:
    """Whether the top level of a body may hold more fields than any honest one, found without making any of them."""
    return (
        body.count(b":") - sum(bytes(value).count(b":") for value in msgspec.structs.astuple(_vast.decode(body)))
        > MOST_PIECES
    )


def _pieces(data: bytes) -> int:
    """Commas and colons, and one: no fewer than the items or fields of this value, and about as many as it and all that
    it holds have.

    Those within strings are not counted, since text may hold anything; of more than MOST_PIECES strings all are
    counted, and no more."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quotation mark that is left begins or ends a string
    strings = bare.count(b'"') // 2
    if strings > MOST_PIECES:
        return strings
    between = b"".join(bare.split(b'"')[::2])
    return between.count(b",") + between.count(b":") + 1


def _items_of(value: msgspec.Raw, pieces: int) -> int:
    """The items of a list of so many pieces; beyond what may be looked at no fewer than it has."""
    return len(_values.decode(value)) if bytes(value).count(b",") < MOST_ITEMS else pieces


def _plain(value: msgspec.Raw | None) -> Any:
    """A string, number, boolean or null as such; None for anything else."""
    if value is None or memoryview(value)[0] in b"[{":
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return None


def _truth(value: Any) -> bool:
    """As the engine's schema (pydantic) takes it: 1 and "yes" are true as well; a stream must not escape accounting by
    its spelling."""
    return value == 1 if isinstance(value, bool | int | float) else isinstance(value, str) and value.lower() in _TRUE


def _number(value: Any) -> int | None:
    """As the engine's schema takes it: 3.0, "3", " 3.0" and "1_000" are numbers as well. None for less than 0 and all
    else."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            whole, _, rest = value.partition(".")
            value = -1 if rest.rstrip().strip("0") else int(whole)
        return min(int(value), MOST_TOKENS) if value >= 0 and value == int(value) else None
    except (ValueError, TypeError):
        return None


def _limit(how: _Route, fields: _Fields) -> tuple[str | None, int | None]:
    """The field that limits the output on this route, and the limit. None: as much as the context has left.

    A null counts as not said, except that it lifts the limit of a route that has one."""
    if not how.limit:
        return None, how.unsaid
    if (name := next((name for name in how.limit if _said(fields, name)), None)) is not None:
        return name, _number(_plain(fields[name]))
    return how.limit[0], None if any(name in fields for name in how.limit) else how.unsaid


def _said(fields: _Fields, name: str) -> bool:
    """Whether a limit is said: null is none, nor is a max_completion_tokens of 0 for vLLM 0.10."""
    if name not in fields or memoryview(fields[name])[0] == _NULL:
        return False
    return name != "max_completion_tokens" or _number(_plain(fields[name])) != 0


def _within(value: msgspec.Raw, most: int) -> bool:
    number = _number(_plain(value))
    return number is not None and number <= most


def _options(fields: _Fields) -> _Fields:
    value = fields.get("stream_options")
    return _fields.decode(value) if value is not None and memoryview(value)[0] == _OBJECT else {}


def _with_usage(options: _Fields) -> msgspec.Raw:
    """stream_options with include_usage; every other value keeps its bytes.

    continuous_usage_stats goes: without include_usage the engine ignores it, with it every chunk would change."""
    kept = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
    return msgspec.Raw(msgspec.json.encode({**kept, "include_usage": True}))


class _Size:
    """Adds up what values hold: texts, token ids, media. dense: the body has more than MOST_PIECES, so look before
    taking it apart."""

    __slots__ = ("bytes", "dense", "ids", "maybe", "media", "quoting", "texts")

    def __init__(self, dense: bool, quoting: bool = False) -> None:
        self.bytes = self.ids = self.maybe = self.media = 0
        self.texts: list[msgspec.Raw] = []
        self.dense = dense
        self.quoting = quoting

    def add_prompt(self, how: _Route, fields: _Fields) -> int:
        """Adds all that becomes prompt, and returns how many prompts that is."""
        counts = {name: self._add_prompts(how, name, fields[name]) for name in how.prompt if name in fields}
        for name in how.media:
            if name in fields:
                counts[name] = _Size(self.dense).add(fields[name])
                self.media += counts[name]
        prompts = max(1, sum(counts.get(name, 0) for name in how.each))
        for name in how.against:
            if name in fields:
                one = _Size(self.dense)
                self.bytes += (prompts if one.add(fields[name]) == 1 else 1) * one.text_bytes()
        if not how.aside.isdisjoint(fields):
            self._add_aside(how, fields, prompts)
        return prompts

    def _add_aside(self, how: _Route, fields: _Fields, prompts: int) -> None:
        """Add the fields that go into each prompt as their JSON."""
        shared = _Size(self.dense) if prompts > 1 else self
        for name in how.aside & fields.keys():
            shared.add_text(fields[name])
            self.maybe += prompts * len(bytes(fields[name])) if name in how.maybe else 0
        if shared is not self:
            self.bytes += prompts * shared.text_bytes()

    def add_transferred(self, fields: _Fields) -> None:
        """Count the token ids that an engine takes in place of the messages, where those are the longer prompt."""
        try:
            ids = _fields.decode(fields[TRANSFERS[0]])["prompt_token_ids"]
        except (KeyError, msgspec.MsgspecError, ValueError, RecursionError):
            return
        count = bytes(ids).count(b",") + 1
        if 4 * count >= self.text_bytes():
            self.ids, self.bytes, self.texts = count, 0, []

    def _add_prompts(self, how: _Route, name: str, value: msgspec.Raw) -> int:
        """Add a field of the prompt, and return how many prompts that is."""
        if name in how.ids and memoryview(value)[0] == _LIST and (ids := self._token_ids(value)) is not None:
            self.ids += ids[0]
            return ids[1]
        if name in how.named and memoryview(value)[0] == _OBJECT:
            self.add_text(value)
            return len(_fields.decode(value))
        prompts = self.add(value)
        return 1 if prompts and name in how.chats and _begins_with_object(value) else prompts

    def _token_ids(self, value: msgspec.Raw) -> tuple[int, int] | None:
        """Return tokens and prompts of a list that the engine's schema reads as token ids, or as several lists of such;
        None for any other list.

        The schema (pydantic) takes each number, boolean or numeric string for an id, unless all items are strings,
        which are texts. What holds anything else beside numbers is refused by the engine, so commas tell how many ids
        there are."""
        data = bytes(value)
        if _OBJECTS.match(data):
            return None
        if b'"' in data and (
            _TEXTS.fullmatch(data) if self.dense else {memoryview(one)[0] for one in _values.decode(value)} == {_STRING}
        ):
            return None
        if not data[1:-1].strip():
            return 0, 0
        return data.count(b",") + 1, max(1, data.count(b"[") - 1)

    def add(self, value: msgspec.Raw, depth: int = 0) -> int:
        """Adds one value, and returns how many prompts it would be; of a list too long to be taken apart, no fewer than
        there are."""
        first = memoryview(value)[0]
        if first == _STRING:
            self.texts.append(value)
            self.bytes -= 2
            return 1
        try:
            if first in b"[{" and (depth > _DEEPEST or self.dense):
                pieces = _pieces(bytes(value))
                if depth > _DEEPEST or pieces > MOST_PIECES:
                    prompts = _items_of(value, pieces) if first == _LIST and not depth else 1
                    self.add_text(value)
                    return prompts
            if first == _LIST:
                return self._add_list(value, depth)
            if first == _OBJECT:
                self._add_item(_fields.decode(value), depth)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.add_text(value)
        return 0 if first == _NULL else 1

    def _add_list(self, value: msgspec.Raw, depth: int) -> int:
        try:
            items = _items.decode(value)
        except msgspec.ValidationError:
            values = _values.decode(value)
            for one in values:
                self.add(one, depth + 1)
            return len(values)
        if (many := len(items) - FEW_MESSAGES) > 0:
            self.bytes += MESSAGE_BYTES * many
            self.maybe += MESSAGE_BYTES * many
        for item in items:
            self._add_item(item, depth)
        return len(items)

    def _add_item(self, item: _Fields, depth: int) -> None:
        media = 0
        quoted = self.quoting and "role" in item and _plain(item["role"]) != "user"
        for name, value in item.items():
            holds = _HOLDS.get(name, _MAYBE)
            if holds == _MORE and not quoted:
                self.add(value, depth + 1)
            elif holds <= _TEXT:
                self.add_text(value)
            elif holds == _MEDIA:
                media = media or int(memoryview(value)[0] != _NULL)
            elif holds == _MAYBE or (holds == _ROLE and bytes(value) not in _ROLES):
                self.add_text(value)
                self.maybe += len(bytes(value))
        self.media += media

    def add_text(self, value: msgspec.Raw) -> None:
        """A string, or anything else as the JSON that it is; null is nothing."""
        first = memoryview(value)[0]
        if first != _NULL:
            self.texts.append(value)
            self.bytes -= 2 if first == _STRING else 0

    def text_bytes(self) -> int:
        """UTF-8 bytes of all texts, about, since they are not decoded: an escape counts for the one byte that most of
        them stand for, and \\uXXXX for three where escapes are many, which is text beyond ASCII that a client has
        escaped."""
        data = b"".join(self.texts)
        escapes = data.count(b"\\")
        if escapes > len(data) // 12:
            escapes += 2 * data.count(b"\\u")
        return self.bytes + len(data) - escapes


def _begins_with_object(value: msgspec.Raw) -> bool:
    """Return whether a list begins with an object."""
    return bytes(memoryview(value)[1:64]).lstrip()[:1] == b"{"
