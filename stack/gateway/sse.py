"""Scanner of server-sent event streams: content times, usage, end.

Invariant: what goes out is what came in, byte for byte; only a usage event that the gateway itself asked for is left
out, and what it has beside usage stands in the last event, as in an answer without usage.
Memory is bounded: of an event beyond 1 MiB the outline is read. Fed with chunks cut anywhere; knows no socket and no
clock."""

from __future__ import annotations

import re

import msgspec

from stack.gateway.outline import Outline
from stack.gateway.reply import BLANK, CONTENT, NOTHING, PROGRESS, Body, Reply, decode, text_bytes
from stack.gateway.request_fields import FIELDS_DECODER, is_null

EVENT_BYTES = 1 << 20
_BACKSLASH = ord("\\")

# Kinds of events: usage alone, with a finish reason, without data, any other.
PLAIN, USAGE, FINISH, NO_DATA = range(4)
_OF_USAGE = frozenset(("usage", "metrics", "choices"))  # an engine sends none of them without include_usage

# A blank line ends an event; a line ends in LF, CRLF or CR. The look-ahead keeps CRLF from being read as two line ends.
_BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_NAME = re.compile(rb"(?:^|[\r\n])event: ?([a-z_.]+)")
_DATA = re.compile(rb"(?:^|[\r\n])data:")
# Tokens per event with content. Speculative decoding and --stream-interval put several into one; beyond MANY, tokens
# that no event shows are as likely.
SEVERAL, MANY = 2, 8
NAME_BYTES = 4 << 10  # of a large event, in which its name and the begin of its data must stand
_ENDS = frozenset(("response.completed", "response.incomplete", "response.failed", "message_stop", "message-end"))
# Inside a JSON string every quote has a backslash before it, so these can only be keys of the object itself.
_SOME_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"[^"]')


class Scanner:
    """One stream. `reply` holds what it said; times are whatever clock `feed` is given.

    strip_usage: hold incomplete events back (a client can do nothing with half an event), and an event with a finish
    reason until the next one comes; drop the event with usage and no choices.

    first_textless: when an event with a choice and without text came, be it with the role only. first_progress,
    last_progress, progress_events: of events that prove a step of the engine and have no text. text_bytes: of all
    text."""

    __slots__ = (
        "_after", "_before", "_big", "_carriage", "_cut", "_forced", "_head", "_held", "_lf", "_more_tokens", "_name",
        "_searched", "_strip", "_tail", "_withheld", "content_events", "done", "events", "first_content",
        "first_progress", "first_textless", "last_content", "last_progress", "objects", "progress_events", "reply",
        "text_bytes",
    )  # fmt: skip

    def __init__(self, route: str = "", *, strip_usage: bool = False) -> None:
        self.reply = Reply(route)
        self.events = self.objects = 0
        self.content_events = self.progress_events = self.text_bytes = 0
        self._more_tokens = 0  # beyond one for each event with content
        self.first_textless: float | None = None
        self.first_content: float | None = None
        self.last_content: float | None = None
        self.first_progress: float | None = None
        self.last_progress: float | None = None
        self.done = False  # [DONE] or the last event of the other APIs was seen
        self._strip = strip_usage
        self._held = bytearray()  # the event that is not complete yet
        # a complete event with a finish reason, and comments behind it, until the next event comes
        self._withheld = b""
        self._searched = 0  # up to here _held has no blank line
        self._carriage = False  # a CR was seen, so line ends need the slower search
        self._big: Outline | None = None  # of an event beyond EVENT_BYTES that has not ended
        self._head: bytearray | None = None  # of that event, until its name and the begin of its data were looked for
        self._cut = False  # its end never came
        self._name = b""  # of that event
        self._tail = b""  # its last bytes: a blank line may be cut
        # the last event ended in CR: should its LF still come, this is what goes out for it
        self._lf: bytes | None = None
        self._forced = False  # the engine reports usage without a request for it
        # The last plain event before and after its text. The next one is nearly always the same around another text.
        self._before = self._after = b""

    @property
    def first_token(self) -> float | None:
        """Return when the first content came; of a stream without any, the first sign of a step."""
        return self.first_progress if self.first_content is None else self.first_content

    @property
    def tokens(self) -> int:
        """Return the tokens that events have shown, at least: one for each with content, one for each choice without
        text, and all that an event names. Of a stream without any of these, the events that prove a step."""
        return self.content_events + self._more_tokens or self.progress_events

    @property
    def latest(self) -> float | None:
        """Return when the latest sign of a step came."""
        return max(self.last_content or 0.0, self.last_progress or 0.0) or None

    def pass_unread(self, reason: str, now: float) -> None:
        """Note bytes that cannot be read, or are beyond a bound: their flow is a sign of life."""
        self.last_progress = now
        if reason == "encoding":
            self.reply.unreadable = reason
        else:
            self.reply.partly_read = True

    def hides(self, tokens: int) -> bool:
        """Return whether events with content are far fewer than tokens."""
        return tokens > SEVERAL * self.content_events

    def token_s(self, tokens: int | None) -> float | None:
        """Return the seconds per token behind the first: (last - first event) / (tokens - 1), with the engine's count.

        Events with content stand for the tokens. Where they are far fewer, tokens may have been hidden before them, and
        the first event of any kind counts; without one the time is not known. Nor is it for one token, for one event,
        and for events that all arrived in one read."""
        first, last, events = self.first_content, self.last_content, self.content_events + self.progress_events
        if tokens is not None and self.hides(tokens):
            before, behind = self.first_textless, self.last_progress
            if before is not None and (first is None or before <= first):
                first, last = before, max(last or before, behind or before)
            elif tokens > MANY * self.content_events:
                return None
            elif self.content_events:  # the first event had several, too
                tokens += 1 - round(tokens / self.content_events)
        if tokens is None or tokens < 2 or events < 2 or first is None or last is None or last <= first:
            return None
        return (last - first) / (tokens - 1)

    @property
    def mid_event(self) -> bool:
        """Return whether the client has been given the beginning of an event without its end."""
        return self._cut or self._big is not None or (bool(self._held) and not self._strip)

    def feed(self, chunk: bytes, now: float) -> bytes:
        """The bytes to send on for this chunk."""
        self._carriage = self._carriage or b"\r" in chunk
        if self._lf is not None and chunk:  # the client was not kept waiting for it
            lf, self._lf = self._lf, None
            if chunk.startswith(b"\n"):
                if self._withheld:
                    self._withheld += lf
                    lf = b""
                return lf + self.feed(chunk[1:], now)
        if self._big is None:
            # one whole event, as nearly always
            if not self._held and not self._carriage and chunk.find(b"\n\n") == len(chunk) - 2 >= 0:
                kind = self._event(chunk, now)
                return self._pass_event(chunk, kind) if self._strip and (kind or self._withheld) else chunk
            return self._scan(chunk, now)
        past = self._end_of_big(chunk, self._big, now)
        return chunk if self._big is not None else chunk[:past] + self._scan(chunk[past:], now)

    def close(self, now: float) -> bytes:
        """Return the bytes held back, when the stream has ended; an event without its blank line still counts."""
        if self._big is not None:
            self._finish_big(self._big, now)
            self._cut = True
        left, unreadable = bytes(self._held), self.reply.unreadable
        if not self._strip:
            if left:
                self._event(left, now)
            self.reply.unreadable = unreadable  # an event that was cut is no broken JSON
            return b""
        kind = self._event(left, now) if left else NO_DATA
        ready = self._pass_event(left, kind) + self.take_withheld()
        self._strip, self.reply.unreadable = False, unreadable  # from here on the client has everything
        if kind == USAGE:
            self._held = bytearray()
        return ready

    def take_withheld(self) -> bytes:
        """Return the complete event that is held back, which no other follows."""
        withheld, self._withheld = self._withheld, b""
        return withheld

    def _pass_event(self, event: bytes, kind: int) -> bytes:
        """Return what goes out for a complete event."""
        if kind == NO_DATA and self._withheld and not event.strip(b"\r\n"):
            self._withheld += event
            return b""
        before = self.take_withheld()
        if kind == FINISH:
            self._withheld = event
            return before
        return (
            before + event
            if kind != USAGE
            else _with_other_fields(before, event) + event[: -len(event.lstrip(b"\r\n"))]
        )

    def _scan(self, chunk: bytes, now: float) -> bytes:
        if self._held:
            self._held += chunk
            data: bytes | bytearray = self._held
        else:
            data = chunk
        ready, at, end = bytearray(), 0, self._boundary(data, self._searched)
        while end > 0:
            event = bytes(data[at:end])
            kind = self._event(event, now)
            if self._strip:
                ready += self._pass_event(event, kind)
                if kind == USAGE:
                    self._lf = self._lf and b""  # goes where its event went
            at, end = end, self._boundary(data, end)
        if data is chunk:
            self._held += data[at:]
        else:
            del self._held[:at]
        self._searched = max(0, len(self._held) - 3)
        if len(self._held) > EVENT_BYTES:
            ready += self.take_withheld() + self._held
            self._begin_big(bytes(self._held))
            self._tail, self._held, self._searched = bytes(self._held[-3:]), bytearray(), 0
        return bytes(ready) if self._strip else chunk

    def _begin_big(self, begin: bytes) -> Outline:
        self.events += 1
        outline = Outline()
        self._big, self._head = outline, bytearray()
        self._feed_big(outline, begin)
        return outline

    def _feed_big(self, outline: Outline, data: bytes, *, ended: bool = False) -> None:
        """Read on in a large event, once its head is there; of one without data in its head only the name is read."""
        if self._head is None:
            outline.feed(data)
            return
        self._head += data
        if len(self._head) >= NAME_BYTES or ended:
            event, self._head = bytes(self._head), None
            name, begin = (sign.search(event[:NAME_BYTES]) for sign in (_NAME, _DATA))
            self._name = name[1] if name else b""
            outline.lost = begin is None
            outline.feed(event[begin.end() :] if begin else b"")

    def _end_of_big(self, chunk: bytes, outline: Outline, now: float) -> int:
        window = self._tail + chunk
        end = self._boundary(window, 0)
        if end < 0:
            self._tail = window[-3:]
            self._feed_big(outline, chunk)
            return len(chunk)
        past = max(0, end - len(self._tail))
        self._feed_big(outline, chunk[:past])
        self._finish_big(outline, now)
        return past

    def _finish_big(self, outline: Outline, now: float) -> None:
        """Take in a large event. Its name says how the stream ended, whatever else could be read."""
        if self._head is not None:
            self._feed_big(outline, b"", ended=True)
        self._big, self._tail = None, b""
        body = decode(outline.text())
        if body is None:
            self.reply.partly_read = True
        self._note(body or Body(type=self._name.decode() or None), now, empty=body is None)

    def _boundary(self, data: bytes | bytearray, start: int) -> int:
        """Return where the event that begins at or before `start` ends; -1 when that has not come yet."""
        if not self._carriage:
            at = data.find(b"\n\n", start)
            return at + 2 if at >= 0 else -1
        found = _BLANK.search(data, start)
        if found is None:
            return -1
        if found.end() == len(data) and found[0].endswith(b"\r"):
            self._lf = b"\n"
        return found.end()

    def _event(self, event: bytes, now: float) -> int:
        """Take in one event, and return its kind."""
        self.events += 1
        # Whether the LF of a last CRLF is here yet hangs on where the chunks are cut, so it is not counted.
        if len(event) - event.endswith(b"\r\n") > EVENT_BYTES:
            self.events -= 1
            self._finish_big(self._begin_big(event), now)
            return PLAIN
        before, after = self._before, self._after
        if before and event.startswith(before) and event.endswith(after):
            text = event[len(before) : -len(after)]
            # it ends neither string nor line
            if text and b'"' not in text and b"\n" not in text and b"\r" not in text and text[-1] != _BACKSLASH:
                self.content_events += 1
                self.text_bytes += len(text)
                self.last_content = now
                return PLAIN
        if self.reply.model is not None and (found := _plain_content(event)) is not None:
            self._content(now)
            begin = found.end() - 1
            end = event.find(b'"', begin)
            self.text_bytes += end - begin
            if event[end - 1] != _BACKSLASH:
                self._before, self._after = event[:begin], event[end:]
            return PLAIN
        return self._decoded(event, now)

    def _decoded(self, event: bytes, now: float) -> int:
        data = _data(event.removeprefix(b"\xef\xbb\xbf") if self.events == 1 else event)
        if not data:
            if event.startswith(b"error:"):  # of older llama.cpp
                self.reply.note(Body(error=True))
                return PLAIN
            return NO_DATA
        if data == b"[DONE]":
            self.done = True
            return PLAIN
        body = decode(data)
        name = _NAME.search(event) if b"event:" in event else None
        if name is not None and name[1] == b"error" and (body is None or body.error is None):
            body = Body(error=data if body is None else {"code": body.code, "type": body.type})
        if body is None:
            # clients skip events of a name that they do not know
            if name is None or name[1].startswith((b"message", b"response.", b"content_block_")):
                self.reply.unreadable = self.reply.unreadable or "json"
            return PLAIN
        return self._note(body, now, empty=data.strip() == b"{}")

    def _note(self, body: Body, now: float, *, empty: bool = False) -> int:
        """Take in the object of an event, and return its kind. empty: it has no field at all."""
        self.objects += 1
        finished = self.reply.finished
        choices = body.choices
        shown, shown_bytes = self.reply.shown_tokens, self.reply.shown_bytes
        noted = self.reply.note(body)
        if noted == NOTHING and choices and self.first_textless is not None:
            noted = PROGRESS  # some engines repeat the role in every event
        self._more_tokens += self.reply.shown_tokens - shown
        if noted == CONTENT:
            self._content(now)
            self._more_tokens -= 1 if choices else 0
            self.text_bytes += self.reply.shown_bytes - shown_bytes if choices else text_bytes(body.delta)
        elif self.first_textless is None and (choices or noted == PROGRESS):
            self.first_textless = now
        if noted == PROGRESS:
            self.progress_events += 1
            self.last_progress = now
            if self.first_progress is None:
                self.first_progress = now
        if noted == NOTHING and body == BLANK and not empty:
            self.reply.unreadable = self.reply.unreadable or "shape"
        self.done = self.done or (isinstance(body.type, str) and body.type in _ENDS)
        others = (choices, body.error, body.type, body.delta)
        usage_alone = body.usage is not None and not any(others)
        # so by --enable-force-include-usage, on every chunk
        self._forced = self._forced or (body.usage is not None and not usage_alone)
        if usage_alone and not self._forced:
            return USAGE
        return FINISH if self.reply.finished > finished else PLAIN

    def _content(self, now: float) -> None:
        self.content_events += 1
        self.last_content = now
        if self.first_content is None:
            self.first_content = now


def _plain_content(event: bytes) -> re.Match[bytes] | None:
    """Match a chunk of one choice that has text and nothing else worth decoding, up to the first letter of that text;
    most events are such."""
    unfinished = event.count(b'"finish_reason":null')
    plain = (
        unfinished == 1
        and event.startswith(b"data:")
        and event.find(b"\n", 0, len(event) - 2) < 0  # one line: nothing of it is a comment
        and b"\r" not in event
        and event.count(b'finish_reason"') == unfinished
        and b'usage"' not in event
        and b'error"' not in event
        and b'system_fingerprint":"' not in event
        and b'token_ids":[' not in event
        and b'logprobs":{' not in event
    )
    return _SOME_TEXT.search(event) if plain else None


def _data(event: bytes) -> bytes:
    """The data of an event: its `data` lines joined; comments and other fields say nothing."""
    lines = [
        line[6:] if line.startswith(b"data: ") else line[5:] for line in event.splitlines() if line.startswith(b"data:")
    ]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


def _with_other_fields(last: bytes, usage: bytes) -> bytes:
    """Return the event with the finish reason with those fields of the usage event that it lacks, beside usage: an
    engine writes them into the event that is the last of all. They are lost without such an event, and if its data is
    on several lines."""
    if not last:
        return last
    try:
        data = _data(last)
        fields, others = FIELDS_DECODER.decode(data), FIELDS_DECODER.decode(_data(usage))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return last
    new = {
        name: value
        for name, value in others.items()
        if name not in _OF_USAGE and not is_null(value) and is_null(fields.get(name))
    }
    return last.replace(data, msgspec.json.encode({**fields, **new}), 1) if new else last
