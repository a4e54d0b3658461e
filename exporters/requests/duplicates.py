"""Recognition of repeated lines: a request is counted once by every reader of request logs.

Invariant: two lines are the same request if request_id and span_id are equal. Ids are remembered within a window."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from exporters.requests.record import RequestRecord

WINDOW = 200_000  # remembered requests: at most this many, at least half
SPAN_CHARS = 16  # of a span id; before another one stands a NUL, so that "ab" and "c" are not "a" and "bc"
OUR_CHARS = 48  # length of our gateway's request_id and span_id in hexadecimal
KEY_CHARS = 200  # longer ids, which clients may send, are stored as a digest


class RecentRequests:
    """Recently counted requests in two generations: when the newer one is full, the older one is dropped."""

    def __init__(self, limit: int = WINDOW) -> None:
        self._half = max(1, limit // 2)
        self.older: set[bytes] = set()
        self.newer: set[bytes] = set()
        self.added: list[bytes] = []  # since the last commit, in order of arrival

    def __len__(self) -> int:
        return len(self.older) + len(self.newer)

    def fresh(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """Return the new records, and remember them."""
        keys = _known(
            [
                r.request_id
                if (span := r.span_id) is None
                else r.request_id + (span if len(span) == SPAN_CHARS else f"\0{span}")
                for r in records
            ]
        )
        unique = set(keys)
        if len(unique) == len(keys) and self.newer.isdisjoint(unique) and self.older.isdisjoint(unique):
            self._add(keys)
            return records
        found = []
        for key, record in zip(keys, records, strict=True):
            if key not in self.newer and key not in self.older:
                self._add((key,))
                found.append(record)
        return found

    def restore(self, keys: Iterable[bytes]) -> None:
        """Restore the remembered requests of before a restart, in order."""
        self._add(list(keys))
        self.added.clear()

    def _add(self, keys: Sequence[bytes]) -> None:
        self.added += keys
        while keys:  # each generation has exactly half, so unordered stored ids restore the same two
            room = self._half - len(self.newer)
            self.newer.update(keys[:room])
            keys = keys[room:]
            if len(self.newer) >= self._half:
                self.older, self.newer = self.newer, set()


def repeats_note(repeats: int, lines: int) -> str:
    """Return a sentence on lines that repeat an id, of all lines read; what to do about it if they are most of them."""
    text = f"{repeats:,} of {lines:,} lines repeat the request_id (with span_id) of an earlier line; each counts once"
    if mostly_repeats(repeats, lines):
        text += ". If they are different requests, the log has no id of its own for each: map another field to"
        text += " request_id with field_names"
    return text


def mostly_repeats(repeats: int, lines: int) -> bool:
    """Return True if most lines share an id with an earlier one, and there are enough of them to say so."""
    return repeats > max(2, lines / 2)


def _known(ids: Sequence[str]) -> list[bytes]:
    """Return ids as stored: those of our gateway as binary numbers, in half the memory."""
    if ids and set(map(len, ids)) == {OUR_CHARS} and (numbers := _number("".join(ids))) is not None:
        return [numbers[at : at + OUR_CHARS // 2] for at in range(0, len(numbers), OUR_CHARS // 2)]
    return [(_number(one) if len(one) == OUR_CHARS else None) or _kept(one) for one in ids]


def _number(text: str) -> bytes | None:
    """Return the bytes of lower-case hexadecimal digits; None for other text, which could map to the same bytes."""
    with contextlib.suppress(ValueError):
        if (number := bytes.fromhex(text)).hex() == text:
            return number
    return None


def _kept(one: str) -> bytes:
    return one.encode() if len(one) <= KEY_CHARS else blake2b(one.encode(), digest_size=16).hexdigest().encode()
