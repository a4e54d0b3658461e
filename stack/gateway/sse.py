"""Reads a server-sent event stream as it passes by: where content begins and ends, and what it says about itself.

Law: what goes out is what came in, byte for byte; only a usage event that the gateway itself asked for is left out.
Memory is bounded: an event beyond 1 MiB is passed on unread. Fed with chunks cut anywhere; knows no socket and no clock."""

from __future__ import annotations

import re

from stack.gateway.reply import Reply, decode

EVENT_BYTES = 1 << 20

# A blank line ends an event; a line ends in LF, CRLF or CR. The look-ahead keeps CRLF from being read as two line ends.
_BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
# Inside a JSON string every quote has a backslash before it, so these can only be keys of the object itself.
_SOME_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"[^"]')


class Scanner:
    """One stream. `reply` holds what it said; times are whatever clock `feed` is given.

    strip_usage: hold incomplete events back (a client can do nothing with half an event), drop the event with usage and no choices."""

    __slots__ = (
        "_big", "_bom", "_carriage", "_held", "_searched", "_strip", "_tail",
        "content_events", "done", "events", "first_content", "last_content", "reply", "unread_events",
    )  # fmt: skip

    def __init__(self, *, strip_usage: bool = False) -> None:
        self.reply = Reply()
        self.events = 0
        self.unread_events = 0  # too large, or not JSON
        self.content_events = 0
        self.first_content: float | None = None
        self.last_content: float | None = None
        self.done = False  # [DONE] or the last event of the other APIs was seen
        self._strip = strip_usage
        self._held = bytearray()  # the event that is not complete yet
        self._searched = 0  # up to here _held has no blank line
        self._carriage = False  # a CR was seen, so line ends need the slower search
        self._big = False  # inside an event beyond EVENT_BYTES
        self._tail = b""  # the last bytes of that event: a blank line may be cut
        self._bom = True  # a byte order mark may still come

    @property
    def mid_event(self) -> bool:
        """Whether the client has been given the beginning of an event without its end."""
        return self._big or (bool(self._held) and not self._strip)

    def feed(self, chunk: bytes, now: float) -> bytes:
        """The bytes to send on for this chunk."""
        self._carriage = self._carriage or b"\r" in chunk
        if not self._big:
            if not self._held and not self._carriage and chunk.find(b"\n\n") == len(chunk) - 2 >= 0:  # one whole event, as nearly always
                return b"" if self._event(chunk, now) and self._strip else chunk
            return self._scan(chunk, now)
        past = self._end_of_big(chunk)
        return chunk if self._big else chunk[:past] + self._scan(chunk[past:], now)

    def close(self, now: float) -> bytes:
        """What was held back, when the stream has ended; an event without its blank line still counts."""
        left, self._held = bytes(self._held), bytearray()
        if not left or self._event(left, now) or not self._strip:
            return b""
        return left

    def _scan(self, chunk: bytes, now: float) -> bytes:
        if self._held:
            self._held += chunk
            data: bytes | bytearray = self._held
        else:
            data = chunk
        at, dropped, end = 0, [], self._boundary(data, self._searched)
        while end > 0:
            event = bytes(data[at:end])
            if self._event(event, now) and self._strip:
                dropped.append((end - len(event.lstrip(b"\r\n")), end))
            at, end = end, self._boundary(data, end)
        ready = _without(data, at, dropped)
        self._held = bytearray(data[at:])
        self._searched = max(0, len(self._held) - 3)
        if len(self._held) > EVENT_BYTES:
            ready += self._held
            self._big, self._tail, self._held, self._searched = True, bytes(self._held[-3:]), bytearray(), 0
            self.unread_events += 1
        return ready if self._strip else chunk

    def _end_of_big(self, chunk: bytes) -> int:
        window = self._tail + chunk
        end = self._boundary(window, 0)
        if end < 0:
            self._tail = window[-3:]
            return len(chunk)
        self._big, past = False, max(0, end - len(self._tail))
        self._tail = b""
        return past

    def _boundary(self, data: bytes | bytearray, start: int) -> int:
        """Where the event that begins before `start` ends; -1 when that has not come yet."""
        if not self._carriage:
            at = data.find(b"\n\n", start)
            return at + 2 if at >= 0 else -1
        found = _BLANK.search(data, start)
        if found is None or (found.end() == len(data) and data[-1] == 13):  # after a last CR the LF may still come
            return -1
        return found.end()

    def _event(self, event: bytes, now: float) -> bool:
        """Takes in one event; True when it is the usage event, which has no choices."""
        self.events += 1
        if len(event) > EVENT_BYTES:
            self.unread_events += 1
            return False
        if self.events > 1 and _plain_content(event):
            self._content(now)
            return False
        data = _data(event.removeprefix(b"\xef\xbb\xbf") if self._bom else event)
        self._bom = False
        if not data:
            return False
        if data == b"[DONE]":
            self.done = True
            return False
        body = decode(data)
        if body is None:
            self.unread_events += 1
            return False
        if self.reply.note(body):
            self._content(now)
        self.done = self.done or body.type in ("response.completed", "response.incomplete", "response.failed", "message_stop")
        return body.choices == [] and body.usage is not None

    def _content(self, now: float) -> None:
        self.content_events += 1
        self.last_content = now
        if self.first_content is None:
            self.first_content = now


def _plain_content(event: bytes) -> bool:
    """Whether bytes alone show a chunk that has text and nothing else worth decoding; most events are such."""
    unfinished = event.count(b'"finish_reason":null')
    return (
        unfinished > 0
        and event.startswith(b"data:")
        and event.find(b"\n", 0, len(event) - 2) < 0  # one line: nothing of it is a comment
        and event.count(b'finish_reason"') == unfinished
        and b'usage"' not in event
        and b'error"' not in event
        and b'system_fingerprint":"' not in event
        and _SOME_TEXT.search(event) is not None
    )


def _data(event: bytes) -> bytes:
    """The data of an event: its `data` lines joined; comments and other fields say nothing."""
    lines = [line[6:] if line.startswith(b"data: ") else line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


def _without(data: bytes | bytearray, end: int, dropped: list[tuple[int, int]]) -> bytes:
    """data[:end] without the dropped ranges."""
    kept, at = bytearray(), 0
    for start, stop in dropped:
        kept += data[at:start]
        at = stop
    return bytes(kept + data[at:end]) if dropped else bytes(data[:end])
