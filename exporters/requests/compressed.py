"""Compressed files, unpacked forward in bounded steps.

Invariant: one call unpacks a bounded number of bytes, and no more is kept than the last caller may ask for again."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from exporters.requests.positions import HEAD_BYTES, PACKED

RAW_BYTES = 1 << 16
RATIO_AT_MOST = 1000  # maximum of deflate is 1032; request logs reach 30
XZ_MEMORY_BYTES = 80 << 20  # `xz -9` needs 65 MiB


class Damaged(ValueError):
    """Unreadable compressed file: broken, hostile, or of a format that this Python lacks."""


class Decompressor(Protocol):
    """The interface that bz2, lzma and compression.zstd share."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """Adapter of zlib's decompressor to the common interface."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        out = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.needs_input = not self._inner.unconsumed_tail and len(out) < max_length
        return out


def _of(module: str, name: str, *args: object) -> Decompressor:
    """Return a decompressor of the standard library, loaded only where a file needs it."""
    try:
        made: Any = getattr(importlib.import_module(module), name)
    except ImportError:
        raise Damaged(f"this Python lacks the module {module}") from None
    return made(*args)  # type: ignore[no-any-return]


def _lz4() -> Decompressor:
    raise Damaged("lz4 is not read; compress rotated logs with gzip, bzip2, xz or, from Python 3.14 on, zstd")


_FORMATS: dict[bytes, Callable[[], Decompressor]] = {
    b"\x1f\x8b": _Gzip,
    b"BZh": lambda: _of("bz2", "BZ2Decompressor"),
    b"\xfd7zXZ\x00": lambda: _of("lzma", "LZMADecompressor", 1, XZ_MEMORY_BYTES),  # 1: FORMAT_XZ
    b"\x28\xb5\x2f\xfd": lambda: _of("compression.zstd", "ZstdDecompressor"),
    b"\x04\x22\x4d\x18": _lz4,
}


class Unpacked:
    """The content of a compressed file. read: bytes of the file itself by offset and size, fewer at its end.

    The file may still be growing: `exhausted` until more of it is there, `complete` when its last member has ended.
    Unpacking goes forward only; `read` answers for what was kept and for the first HEAD_BYTES. Every call may raise
    Damaged, and what `read` raises."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._raw = read
        self._input = b""
        self._inner: Decompressor | None = None
        self._kept = bytearray()
        self.raw_end = 0  # bytes read from the file
        self.end = 0  # bytes unpacked
        self.head = b""
        self.exhausted = False
        self.complete = False

    def read(self, offset: int, size: int) -> bytes:
        """Return unpacked bytes, and keep those from `offset` on. What is not kept any more is not there."""
        if offset + size <= len(self.head):
            return self.head[offset : offset + size]
        self.advance(offset, offset + size, size)
        start = offset - (self.end - len(self._kept))
        return bytes(self._kept[start : start + size]) if start >= 0 else b""

    def advance(self, keep_from: int, until: int, at_most: int) -> int:
        """Unpack up to `until`, at most `at_most` bytes, and drop those before `keep_from`.

        Return the number unpacked."""
        before = self.end
        self._forget(keep_from)
        self.exhausted = False
        while (room := min(until - self.end, before + at_most - self.end)) > 0 and not self.exhausted:
            out = self._step(min(room, RAW_BYTES))
            self.head += out[: HEAD_BYTES - len(self.head)]
            self._kept += out
            self.end += len(out)
            if self.end > RATIO_AT_MOST * self.raw_end + (1 << 20):
                raise Damaged(f"it unpacks to more than {RATIO_AT_MOST} times its size")
            self._forget(keep_from)
        return self.end - before

    def _forget(self, keep_from: int) -> None:
        del self._kept[: max(0, keep_from - (self.end - len(self._kept)))]

    def _step(self, room: int) -> bytes:
        """Return the next bytes, at most `room`; none where more input is needed first."""
        if not self._input and (self._inner is None or self._inner.needs_input):
            self._input = self._raw(self.raw_end, RAW_BYTES)
            self.raw_end += len(self._input)
            self.exhausted = not self._input
            if self.exhausted:
                return b""
        if (inner := self._inner or self._begin()) is None:
            return b""
        data, self._input = self._input, b""
        try:
            out = inner.decompress(data, room)
        except Exception as error:  # zlib, lzma and zstd each have an error class of their own
            raise Damaged(str(error)) from error
        self._inner = inner
        if inner.eof:  # another member may follow
            self._input, self._inner, self.complete = inner.unused_data, None, True
        return out

    def _begin(self) -> Decompressor | None:
        """Return a decompressor for the next member; None where there is none.

        Padding is skipped. Anything else behind the last member is ignored, as gzip does."""
        self._input = self._input.lstrip(b"\0") if self.complete else self._input
        if len(self._input) < max(map(len, PACKED)):
            more = self._raw(self.raw_end, RAW_BYTES)
            self._input, self.raw_end = self._input + more, self.raw_end + len(more)
        new = next((make for magic, make in _FORMATS.items() if self._input.startswith(magic)), None)
        if new is None:
            self.exhausted = True
            return None
        self.complete = False
        return new()
