"""Outline of JSON text of any length, for a reply or an event that is too large to be kept.

Invariant: memory is bounded whatever comes. Fed with chunks cut anywhere. Text within the bounds comes out as it came
in; of more, deep values become null, long strings "...", and arrays end early."""

from __future__ import annotations

import re

DEPTH = 5  # containers inside each other that are kept; usage and finish reasons of every API stand above
STRING_BYTES = 1 << 10
ARRAY_BYTES = 32 << 10  # of an outermost array, which ends there; of each one inside, a quarter
MOST_BYTES = 256 << 10  # of a text that is kept as it is, and of an outline, which beyond that is given up

_KEPT = re.compile(rb'["{}\[\],]')
_PLAIN = rb'[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+"'  # what opens and closes nothing, and complete strings


def _nesting(depth: int) -> bytes:
    """Return the pattern of complete JSON values whose containers have at most this depth."""
    return _PLAIN if not depth else rb"%b|\[(?:%b)*+\]|\{(?:%b)*+\}" % (_PLAIN, *[_nesting(depth - 1)] * 2)


_SKIPPED = re.compile(rb"(?:%b)*+" % _nesting(3), re.DOTALL)  # in one call, however many values that is
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_QUOTE, _COMMA, _ARRAY, _OPEN = ord('"'), ord(","), ord("["), frozenset(b"{[")


class Outline:
    """One JSON text. lost: the outline itself became too large."""

    __slots__ = ("_depth", "_escaped", "_open", "_out", "_skip_to", "_string", "lost")

    def __init__(self) -> None:
        self.lost = False
        self._out = bytearray()
        # Kept containers: how long an array may become, 0 for an object; where it began; where its last element ended.
        self._open: list[tuple[int, int, int]] = []
        self._depth = 0
        self._skip_to: int | None = None  # nothing is kept until the depth is that again
        self._string: int | None = None  # where the open string began in the outline; -1 for one that is not kept
        self._escaped = False  # the last chunk ended in a backslash inside a string

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        at, end = 0, len(data)
        while at < end:
            if self._string is not None:
                at = self._in_string(data, at, self._string)
                continue
            if self._skip_to is not None:
                values = _SKIPPED.match(data, at)
                start = values.end() if values else at
            else:
                sign = _KEPT.search(data, at)
                start = sign.start() if sign else end
                self._out += data[at:start]
                self._shorten()
            at = start + 1
            if start < end:
                self._sign(data[start], skips=self._skip_to is not None)

    def text(self) -> bytes:
        """Return the outline of the complete text; empty where there is none."""
        return b"" if self.lost or self._depth or self._string is not None else bytes(self._out)

    def _sign(self, sign: int, *, skips: bool) -> None:
        out = self._out
        if sign == _QUOTE:
            self._string = -1 if skips else len(out)
        elif sign in _OPEN:
            self._depth += 1
            if not skips:
                self._begin(sign)
        elif sign != _COMMA:
            self._depth -= 1
            if not skips:
                out.append(sign)
                del self._open[-1:]
            elif self._depth == self._skip_to:
                self._skip_to = None
        elif not skips:  # the outline may have been cut before this very comma
            if self._open:
                self._open[-1] = *self._open[-1][:2], len(out)
            out.append(sign)

    def _begin(self, sign: int) -> None:
        """Begin a container, or write null for one that is too deep."""
        if self._depth > DEPTH:
            self._out += b"null"
            self._skip_to = self._depth - 1
            return
        self._out.append(sign)
        around = next((most for most, _, _ in reversed(self._open) if most), 4 * ARRAY_BYTES)
        self._open.append((around // 4 if sign == _ARRAY else 0, len(self._out), len(self._out)))

    def _in_string(self, data: bytes, at: int, began: int) -> int:
        """Read on in a string; return where its end, or the data's, is."""
        if self._escaped:
            begin, self._escaped = at + 1, False
        else:
            begin = at
        text = _TEXT.match(data, begin)
        stop = text.end() if text else begin
        if began >= 0 and len(self._out) - began <= STRING_BYTES + 1:
            self._out += (b'"' if len(self._out) == began else b"") + data[at : min(stop, at + STRING_BYTES + 1)]
        if stop >= len(data):
            return stop
        if data[stop] != _QUOTE:  # the backslash of a pair that is cut
            self._escaped = True
            if began >= 0 and len(self._out) - began <= STRING_BYTES + 1:
                self._out += b"\\"
            return stop + 1
        self._string = None
        if began >= 0:
            if len(self._out) - began > STRING_BYTES + 1:  # with the first quote
                self._out[began:] = b'"...'
            self._out.append(_QUOTE)
            self._shorten()
        return stop + 1

    def _shorten(self) -> None:
        """End the innermost array that is too long behind its last complete element."""
        size = len(self._out)
        for depth in range(len(self._open) - 1, -1, -1):
            most, begin, end = self._open[depth]
            if most and size - begin > most:
                del self._out[end:], self._open[depth:]
                self._out += b"]"
                self._skip_to = depth
                return
        if size > MOST_BYTES:
            self.lost, self._skip_to, self._out = True, -1, bytearray()


class Copy:
    """Copy of a reply for its reader: all of a small one, of larger JSON the outline. size: bytes so far."""

    __slots__ = ("_kept", "_outline", "_outlined", "size")

    def __init__(self, *, outlined: bool) -> None:
        self.size = 0
        self._outlined = outlined
        self._kept = bytearray()
        self._outline: Outline | None = None

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if self._outline is not None:
            self._outline.feed(data)
        elif self._outlined:
            self._kept += data
            if len(self._kept) > MOST_BYTES:
                self._outline = Outline()
                self._outline.feed(bytes(self._kept))
                self._kept.clear()

    @property
    def partial(self) -> bool:
        """Return whether some of it was not kept."""
        return self._outline is not None

    def text(self) -> bytes:
        """Return the text; of an outline that became too large nothing, and of broken JSON what no decoder takes."""
        if self._outline is None:
            return bytes(self._kept)
        return b"" if self._outline.lost else self._outline.text() or b"{"
