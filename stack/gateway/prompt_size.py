"""Size of a prompt, added up from the raw fields of a body: texts, token ids, media."""

from __future__ import annotations

import re

import msgspec

from stack.gateway.body_forms import BodyForm
from stack.gateway.request_fields import (
    FIELDS_DECODER,
    LIST,
    MOST_PIECES,
    NULL,
    OBJECT,
    STRING,
    RawFields,
    count_pieces,
    plain_value,
)

MOST_ITEMS = 1_000_000  # of a list that is counted, about 50 bytes each for as long as that takes
# up to these, what a chat template adds to each is less than an estimate is worth; beyond them each adds
FEW_MESSAGES = 16
MESSAGE_BYTES = 16  # about the four tokens of a role and its marks
_DEEPEST = 3  # parts within the content of parts: a tool's result is the deepest that any API has

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
# a list of strings
_TEXTS = re.compile(rb'\[\s*+(?:"(?:[^"\\]++|\\.)*+"\s*+,\s*+)*+"(?:[^"\\]++|\\.)*+"\s*+\]', re.DOTALL)
_OBJECTS = re.compile(rb"\[\s*+(?:\[\s*+)?+\{")  # a list that begins with an object, or with a list that does
_items = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_values = msgspec.json.Decoder(list[msgspec.Raw])


def _items_of(value: msgspec.Raw, pieces: int) -> int:
    """The items of a list of so many pieces; beyond what may be looked at no fewer than it has."""
    return len(_values.decode(value)) if bytes(value).count(b",") < MOST_ITEMS else pieces


class PromptSize:
    """Adds up what values hold: texts, token ids, media. dense: the body has more than MOST_PIECES, so look before
    taking it apart."""

    __slots__ = ("bytes", "dense", "ids", "maybe", "media", "quoting", "texts")

    def __init__(self, dense: bool, quoting: bool = False) -> None:
        self.bytes = self.ids = self.maybe = self.media = 0
        self.texts: list[msgspec.Raw] = []
        self.dense = dense
        self.quoting = quoting

    def add_prompt(self, how: BodyForm, fields: RawFields) -> int:
        """Adds all that becomes prompt, and returns how many prompts that is."""
        counts = {name: self._add_prompts(how, name, fields[name]) for name in how.prompt if name in fields}
        for name in how.media:
            if name in fields:
                counts[name] = PromptSize(self.dense).add(fields[name])
                self.media += counts[name]
        prompts = max(1, sum(counts.get(name, 0) for name in how.each))
        for name in how.against:
            if name in fields:
                one = PromptSize(self.dense)
                times = prompts if one._add_prompts(how, name, fields[name]) == 1 else 1
                self.bytes += times * one.text_bytes()
                self.ids += times * one.ids
        if not how.aside.isdisjoint(fields):
            self._add_aside(how, fields, prompts)
        return prompts

    def _add_aside(self, how: BodyForm, fields: RawFields, prompts: int) -> None:
        """Add the fields that go into each prompt as their JSON."""
        shared = PromptSize(self.dense) if prompts > 1 else self
        for name in how.aside & fields.keys():
            shared.add_text(fields[name])
            self.maybe += prompts * len(bytes(fields[name])) if name in how.maybe else 0
        if shared is not self:
            self.bytes += prompts * shared.text_bytes()

    def add_transferred(self, fields: RawFields) -> None:
        """Count the token ids that an engine takes in place of the messages, where those are the longer prompt."""
        try:
            ids = FIELDS_DECODER.decode(fields[TRANSFERS[0]])["prompt_token_ids"]
        except (KeyError, msgspec.MsgspecError, ValueError, RecursionError):
            return
        count = bytes(ids).count(b",") + 1
        if 4 * count >= self.text_bytes():
            self.ids, self.bytes, self.texts = count, 0, []

    def _add_prompts(self, how: BodyForm, name: str, value: msgspec.Raw) -> int:
        """Add a field of the prompt, and return how many prompts that is."""
        if name in how.ids and memoryview(value)[0] == LIST:
            ids = self._token_ids(value, numbers=name in how.numbers)
            if ids is not None:
                self.ids += ids[0]
                return ids[1]
        if name in how.named and memoryview(value)[0] == OBJECT:
            self.add_text(value)
            return len(FIELDS_DECODER.decode(value))
        prompts = self.add(value)
        return 1 if prompts and name in how.chats and _begins_with_object(value) else prompts

    def _token_ids(self, value: msgspec.Raw, *, numbers: bool) -> tuple[int, int] | None:
        """Return tokens and prompts of a list that the engine's schema reads as token ids, or as several lists of such;
        None for any other list.

        The schema (pydantic) takes each number, boolean or numeric string for an id, unless all items are strings,
        which are texts where the schema has texts (not `numbers`). What holds anything else beside numbers is refused
        by the engine, so commas tell how many ids there are."""
        data = bytes(value)
        if _OBJECTS.match(data):
            return None
        if (
            not numbers
            and b'"' in data
            and (
                _TEXTS.fullmatch(data)
                if self.dense
                else {memoryview(one)[0] for one in _values.decode(value)} == {STRING}
            )
        ):
            return None
        if not data[1:-1].strip():
            return 0, 0
        return data.count(b",") + 1, max(1, data.count(b"[") - 1)

    def add(self, value: msgspec.Raw, depth: int = 0) -> int:
        """Adds one value, and returns how many prompts it would be; of a list too long to be taken apart, no fewer than
        there are."""
        first = memoryview(value)[0]
        if first == STRING:
            self.texts.append(value)
            self.bytes -= 2
            return 1
        try:
            if first in b"[{" and (depth > _DEEPEST or self.dense):
                pieces = count_pieces(bytes(value))
                if depth > _DEEPEST or pieces > MOST_PIECES:
                    prompts = _items_of(value, pieces) if first == LIST and not depth else 1
                    self.add_text(value)
                    return prompts
            if first == LIST:
                return self._add_list(value, depth)
            if first == OBJECT:
                self._add_item(FIELDS_DECODER.decode(value), depth)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.add_text(value)
        return 0 if first == NULL else 1

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

    def _add_item(self, item: RawFields, depth: int) -> None:
        media = 0
        quoted = self.quoting and "role" in item and plain_value(item["role"]) != "user"
        for name, value in item.items():
            holds = _HOLDS.get(name, _MAYBE)
            if holds == _MORE and not quoted:
                self.add(value, depth + 1)
            elif holds <= _TEXT:
                self.add_text(value)
            elif holds == _MEDIA:
                media = media or int(memoryview(value)[0] != NULL)
            elif holds == _MAYBE or (holds == _ROLE and bytes(value) not in _ROLES):
                self.add_text(value)
                self.maybe += len(bytes(value))
        self.media += media

    def add_text(self, value: msgspec.Raw) -> None:
        """A string, or anything else as the JSON that it is; null is nothing."""
        first = memoryview(value)[0]
        if first != NULL:
            self.texts.append(value)
            self.bytes -= 2 if first == STRING else 0

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
