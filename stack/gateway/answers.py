"""Forms of answers: media types, shape, and where usage stands. Copies of encoded answers.

Invariant: an answer is read, unreadable for a reason, or absent. Unreadable is never ok. What lies beyond a bound is
not read, which says nothing of the answer. Source: routers and response models of vLLM 0.32; API references of OpenAI,
Anthropic, Cohere and Jina."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from multidict import CIMultiDict

from exporters.requests.record import UNREADABLE

JSON, EVENTS, BYTES = "application/json", "text/event-stream", "application/octet-stream"
DECODED_BYTES = 16 << 20  # of one encoded answer; what follows is not read
PIECE_BYTES = 256 << 10
CODINGS = frozenset(("gzip", "x-gzip", "deflate"))
TEXTS = frozenset(("text/plain", "text/vtt", "text/srt", "application/x-subrip"))

# Of the values of a record's `unreadable`: those that fail the request, and those of answers that may be complete, for
# which no other upstream is asked.
FAILED = frozenset(UNREADABLE) - {"usage", "size"}
ASKED_ONCE = frozenset(("encoding", "size"))


@dataclass(frozen=True, slots=True)
class UsageFields:
    """Fields of a usage object: of several names the first that is present. Of several objects in one answer the latest
    count stands, since streams count upwards.

    details: objects with cached_tokens, which are part of the prompt. fresh: name of a prompt count that leaves out
    what `read` and `written` say. total: whether the total is the prompt where no other name is present. inner: objects
    within `usage`, or within `meta` where no `usage` is, that have counts. header: the response header that has it for
    answers in bytes."""

    prompt: tuple[str, ...] = ("prompt_tokens", "input_tokens")
    output: tuple[str, ...] = ("completion_tokens", "output_tokens")
    details: tuple[str, ...] = ("prompt_tokens_details", "input_tokens_details")
    fresh: str = "input_tokens"
    read: str = "cache_read_input_tokens"
    written: str = "cache_creation_input_tokens"
    total: bool = False
    inner: tuple[str, ...] = ()
    header: str = ""


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """keys: top-level fields, one of which each complete answer has. lists: whether it may be a bare list.
    streams: whether event streams may come. ends: whether a stream says that it is complete. media: types beside
    JSON."""

    keys: tuple[str, ...]
    lists: bool = False
    streams: bool = False
    ends: bool = False
    media: frozenset[str] = frozenset()
    usage: UsageFields = field(default_factory=UsageFields)


_IN_AND_OUT = UsageFields(("input_tokens",), ("output_tokens",))
_VECTOR_USAGE = UsageFields(total=True, header="metadata")
_UNITS = ("billed_units", "tokens")  # the second one stands
CHAT_ANSWER = RouteAnswer(("choices",), streams=True, ends=True)
RESPONSES_ANSWER = RouteAnswer(("output",), streams=True, ends=True, usage=_IN_AND_OUT)
MESSAGES_ANSWER = RouteAnswer(("content",), streams=True, ends=True, usage=_IN_AND_OUT)
COHERE_CHAT_ANSWER = RouteAnswer(
    ("finish_reason",),
    streams=True,
    ends=True,
    usage=UsageFields(("input_tokens",), ("output_tokens",), read="cached_tokens", inner=_UNITS),
)
VECTORS_ANSWER = RouteAnswer(("data",), media=frozenset((BYTES,)), usage=_VECTOR_USAGE)
COHERE_VECTORS_ANSWER = RouteAnswer(("embeddings",), usage=UsageFields(written="image_tokens", inner=_UNITS))
RERANK_ANSWER = RouteAnswer(("results", "data"), lists=True, usage=UsageFields(total=True, inner=_UNITS))
SCORES_ANSWER = RouteAnswer(("data", "results", "scores"), usage=UsageFields(total=True, inner=_UNITS))
AUDIO_ANSWER = RouteAnswer(("text", "choices"), streams=True, media=TEXTS)
QUESTIONS_ANSWER = RouteAnswer(("answers",))
OTHER_ANSWER = RouteAnswer(("choices", "output", "content", "data", "results", "text", "answers"), streams=True)


def unreadable_head(answer: RouteAnswer, status: int, content_type: str) -> str | None:
    """Return why an answer cannot be one of its route, by its head; None where it may be."""
    if 300 <= status < 400:
        return "redirect"
    known = is_json(content_type) or content_type in answer.media or (answer.streams and content_type == EVENTS)
    return None if known or status >= 400 else "content_type"


def is_json(content_type: str) -> bool:
    """Return whether a media type is read as JSON. Without one, the body decides."""
    return content_type in (JSON, "") or content_type.endswith("+json")


class DecodedCopy:
    """Decoder of an answer's Content-Encoding, for the reader only. unread: why no more is read: "encoding" (it cannot
    be decoded), "size" (beyond the bound), or "" behind the end; None before. ended: the encoded text is complete."""

    def __init__(self, codings: str) -> None:
        self._coding = codings.strip().lower()
        self.unread = None if self._coding in CODINGS else "encoding"
        self.ended = False
        self._left = DECODED_BYTES
        self._begin = b""
        self._inflate: zlib._Decompress | None = None

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next bytes decode to."""
        full = False
        while (data or full) and self.unread is None:
            if self._inflate is None:
                data = self._begin = self._begin + data
                if len(data) < 2:
                    return
                self._begin = b""
                if self.ended and data[:2] != b"\x1f\x8b":  # a gzip file may have more members
                    self.unread = ""
                    return
                self._inflate = zlib.decompressobj(self._wbits(data))
            try:
                piece = self._inflate.decompress(data, PIECE_BYTES)
            except zlib.error:
                self.unread = "" if self.ended else "encoding"
                return
            data, full = self._inflate.unconsumed_tail, len(piece) == PIECE_BYTES
            if self._inflate.eof:
                data, full, self.ended, self._inflate = self._inflate.unused_data, False, True, None
            self._left -= len(piece)
            self.unread = None if self._left >= 0 else "size"
            yield piece

    def _wbits(self, data: bytes) -> int:
        """Return zlib's parameter. Some servers call the bare form deflate, others the one with zlib's head."""
        headed = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2]) % 31 == 0
        return -zlib.MAX_WBITS if self._coding == "deflate" and not headed else 32 + zlib.MAX_WBITS


def coding_of(headers: CIMultiDict[str]) -> DecodedCopy | None:
    """Return the decoder of an answer; None for one that is not encoded."""
    if "Content-Encoding" not in headers:
        return None
    codings = ",".join(headers.getall("Content-Encoding"))
    return None if codings.strip().lower() in ("", "identity") else DecodedCopy(codings)
