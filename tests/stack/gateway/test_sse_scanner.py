"""The scanner reads a stream as it passes: same bytes out, whatever the chunking."""

from __future__ import annotations

import json
import time
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.gateway import sse
from stack.gateway.reply import FINISH_WORDS, Reply, decode
from stack.gateway.sse import EVENT_BYTES, Scanner


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


NAMED = {"system_fingerprint": "vllm-0.32.0-d92bc6a7"}


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return event(id="chatcmpl-1", model="tiny", choices=[choice], **({} if finish is None else NAMED))


ROLE = chunk(role="assistant", content="")
USAGE = event(
    id="chatcmpl-1",
    model="tiny",
    choices=[],
    usage={
        "prompt_tokens": 113,
        "total_tokens": 116,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 96},
    },
    **NAMED,
    metrics={"time_to_first_token_ms": 2.5, "queue_time_ms": 0.25},
)
DONE = b"data: [DONE]\n\n"
STREAM = (
    ROLE
    + chunk(content="né")
    + chunk(content="")
    + chunk(content="\U0001f600")
    + chunk("length", content="!")
    + USAGE
    + DONE
)
STRIPPED = STREAM.replace(USAGE, b"")


def scan(*chunks: bytes, strip: bool = True) -> tuple[bytes, Scanner]:
    """The chunks at times 1, 2, 3, ...; what came out, and the scanner."""
    scanner = Scanner(strip_usage=strip)
    out = [scanner.feed(part, float(at)) for at, part in enumerate(chunks, 1)]
    return b"".join(out) + scanner.close(float(len(chunks) + 1)), scanner


def test_role_and_empty_deltas_are_no_content():
    """The clock of the first token must not start at a chunk that carries none."""
    _, scanner = scan(ROLE, chunk(content=""), chunk(content="a"), chunk(content="b"), chunk("stop"), USAGE, DONE)
    assert (3.0, 4.0, 2) == (scanner.first_content, scanner.last_content, scanner.content_events)


def test_reply_says_usage_timings_version_and_finish():
    _, scanner = scan(STREAM)
    reply = scanner.reply
    assert (113, 96, 3) == (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens)
    assert (0.25, 2.5) == (reply.engine_queue_ms, reply.engine_ttft_ms)
    assert ("tiny", "0.32.0", "length", None) == (
        reply.model,
        reply.engine_version,
        reply.finish_reason,
        reply.error_code,
    )
    assert scanner.done


def test_everything_that_a_model_writes_is_content():
    """Reasoning, tool calls and refusals cost tokens like text does; so do the texts of the other APIs."""
    for written in (
        chunk(reasoning="hm"),
        chunk(reasoning_content="hm"),
        chunk(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}]),
        chunk(refusal="no"),
        event(choices=[{"index": 0, "text": " a", "logprobs": None, "finish_reason": None}]),
        event(type="response.output_text.delta", delta="a"),
        event(type="response.function_call_arguments.delta", delta="{"),
        event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    ):
        _, scanner = scan(ROLE, written)
        assert 2.0 == scanner.first_content, written


def test_what_only_looks_like_content_is_none():
    for other in (
        event(choices=[{"index": 0, "text": "", "finish_reason": None}]),
        chunk(tool_calls=[]),
        chunk(content=None),
        event(type="response.output_text.done", text="all of it"),
        event(type="response.created", response={"status": "in_progress", "usage": None}),
        b': {"choices":[{"text":"a","finish_reason":null}]}\n\n',
        b"data: \n\n",
        b"data: 7\n\n",
        b"data: {broken\n\n",
    ):
        _, scanner = scan(ROLE, other)
        assert scanner.first_content is None, other


def test_text_that_quotes_our_keywords_is_still_only_text():
    """A model that writes about streams must not confuse the reader of its stream."""
    for text in (
        '"finish_reason":"stop"',
        '"usage":{"prompt_tokens":1}',
        'data: {"error":{"code":503}}\n\n',
        "finish_reason",
        "usage",
        "error",
    ):
        _, scanner = scan(ROLE, chunk(content=text))
        assert (2.0, None, None, set()) == (
            scanner.first_content,
            scanner.reply.prompt_tokens,
            scanner.reply.error_code,
            scanner.reply.finish_reasons,
        )


def test_responses_api_tells_its_end_in_one_event():
    usage = {"input_tokens": 8, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2, "total_tokens": 10}
    ended = {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "usage": usage,
        "model": "tiny",
    }
    out, scanner = scan(b"event: response.incomplete\n" + event(type="response.incomplete", response=ended))
    reply = scanner.reply
    assert (8, 4, 2, "length", "tiny", True) == (
        reply.prompt_tokens,
        reply.cached_tokens,
        reply.completion_tokens,
        reply.finish_reason,
        reply.model,
        scanner.done,
    )
    assert out.startswith(b"event: response.incomplete\n")


def test_messages_api_counts_cached_tokens_into_the_prompt():
    """There, input_tokens leaves out what the cache held; a record counts the whole prompt."""
    _, scanner = scan(
        event(type="message_start", message={"model": "tiny", "usage": {"input_tokens": 100, "output_tokens": 0}}),
        event(
            type="message_delta",
            delta={"stop_reason": "max_tokens"},
            usage={
                "input_tokens": 4,
                "cache_read_input_tokens": 96,
                "cache_creation_input_tokens": 0,
                "output_tokens": 7,
            },
        ),
        event(type="message_stop"),
    )
    assert (100, 96, 7, "length", True) == (
        scanner.reply.prompt_tokens,
        scanner.reply.cached_tokens,
        scanner.reply.completion_tokens,
        scanner.reply.finish_reason,
        scanner.done,
    )


def test_the_head_of_a_message_says_nothing_of_its_output():
    """output_tokens is 0 there; a client that leaves behind it must not have a record of no tokens."""
    _, scanner = scan(
        event(type="message_start", message={"model": "tiny", "usage": {"input_tokens": 100, "output_tokens": 0}}),
        event(type="content_block_delta", delta={"type": "text_delta", "text": "a"}),
    )
    assert (100, None, 1) == (scanner.reply.prompt_tokens, scanner.reply.completion_tokens, scanner.content_events)


def test_error_inside_a_stream_is_seen_with_its_code():
    """vLLM refuses streams for load with status 200 and one such event."""
    for error, code in (
        ({"message": "busy", "code": 503}, 503),
        ({"message": "x", "code": "oops"}, 500),
        ("boom", 500),
    ):
        _, scanner = scan(event(error=error), DONE)
        assert code == scanner.reply.error_code


def test_n_choices_keep_the_gravest_finish():
    _, scanner = scan(chunk("stop", content="a"), chunk("length", content="b"), chunk("stop", content="c"))
    assert "length" == scanner.reply.finish_reason


def test_every_cut_gives_the_same_bytes_and_the_same_reading():
    """One cut at each byte, through UTF-8 letters and line ends alike."""
    for stream in (STREAM, STREAM.replace(b"\n", b"\r\n"), b": hello\n\n" + STREAM.replace(b"\n\n", b"\r\r")):
        want, whole = scan(stream)
        assert b"".join(part for part in stream.split(b"data: ") if b'"usage"' not in part) == want.replace(
            b"data: ", b""
        )
        for cut in range(1, len(stream)):
            out, scanner = scan(stream[:cut], stream[cut:])
            assert want == out
            assert (whole.events, whole.content_events, 3) == (
                scanner.events,
                scanner.content_events,
                scanner.reply.completion_tokens,
            )
            assert stream == scan(stream[:cut], stream[cut:], strip=False)[0]


def cut(stream: bytes, data: st.DataObject) -> list[bytes]:
    """The stream in drawn chunks; some are empty, as sockets give them never but callers may."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


_EVENTS = st.sampled_from(
        [ROLE, chunk(content="né"), chunk(content="\U0001f600", role="assistant"), chunk("stop"), USAGE, DONE,
            b": ping\n\n",
                           b"event: x\nid: 3\ndata: a\ndata: b\n\n", b"data: {}\r\n\r\n", b"\n", b"\r\n",
                           b"data: \xff\xfe\n\n"])  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(events=st.lists(_EVENTS, max_size=12), data=st.data())
def test_bytes_out_are_bytes_in_without_the_usage_event(events: list[bytes], data: st.DataObject):
    stream = b"".join(events)
    chunks = cut(stream, data)
    assert stream == scan(*chunks, strip=False)[0]
    assert b"".join(part for part in events if part != USAGE) == scan(*chunks)[0].replace(USAGE, b"")
    assert USAGE not in scan(*chunks)[0]


@settings(deadline=None, max_examples=200)
@given(chunks=st.lists(st.binary(max_size=60)))
def test_any_bytes_pass_unharmed(chunks: list[bytes]):
    assert b"".join(chunks) == scan(*chunks)[0]
    assert b"".join(chunks) == scan(*chunks, strip=False)[0]


def test_oversized_event_passes_in_bounded_memory():
    """The events after it are read again, wherever the chunks are cut."""
    big = b"data: " + b"x" * (EVENT_BYTES + 10) + b"\n\n"
    stream = big + chunk(content="a") + USAGE
    for size in (len(stream), 65536, 65537, 100_003):
        scanner = Scanner(strip_usage=True)
        out = b""
        for at in range(0, len(stream), size):
            out += scanner.feed(stream[at : at + size], 1.0)
            assert len(scanner._held) <= EVENT_BYTES
        assert stream.removesuffix(USAGE) == out + scanner.close(1.0)
        assert (True, 1, 3) == (scanner.reply.partly_read, scanner.content_events, scanner.reply.completion_tokens)


@pytest.mark.parametrize("ends", [b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r\n"])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_what_is_too_large_is_so_wherever_it_is_cut(ends: bytes, over: int):
    """Also where text is expected: the last events were plain, and this one begins and ends as they did."""
    plain = chunk(content="a").replace(b"\n\n", ends)
    last = chunk(content="x" * 60).replace(b"\n\n", ends)
    stream = plain * 3 + last
    with patch.object(sse, "EVENT_BYTES", len(last.removesuffix(b"\n")) + over):
        readings = []
        for at in range(len(plain) * 3, len(stream) + 1):
            scanner = Scanner()
            assert stream == scanner.feed(stream[:at], 1.0) + scanner.feed(stream[at:], 1.0) + scanner.close(1.0)
            readings.append(reading(scanner))
    assert [readings[0]] * len(readings) == readings


def test_a_last_event_without_its_blank_line_still_counts():
    out, scanner = scan(ROLE, USAGE.rstrip(b"\n"))
    assert (ROLE, 3) == (out, scanner.reply.completion_tokens)
    out, _ = scan(ROLE, b"data: {")
    assert ROLE + b"data: {" == out


def test_deep_nesting_and_huge_numbers_do_no_harm():
    deep = b'data: {"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"
    out, scanner = scan(
        deep, event(choices=[], usage={"prompt_tokens": -1, "completion_tokens": 10**30, "total_tokens": True})
    )
    assert (deep, None, None) == (out, scanner.reply.prompt_tokens, scanner.reply.completion_tokens)


def reading(scanner: Scanner) -> dict[str, Any]:
    """Everything that a scanner has read out of its stream, but for the times."""
    names = ("events", "content_events", "progress_events", "tokens", "done", "mid_event")
    return {name: getattr(scanner, name) for name in names} | {
        name: getattr(scanner.reply, name) for name in Reply.__slots__ if not name.startswith("shown")
    }


_PIECES = st.binary(max_size=5) | st.sampled_from(
    [b"\n", b"\n\n", b"\r", b"\r\n", b"\r\r", b"data: ", b"data:", b"data", b": ", b"event: x", b"[DONE]",
        b"\xef\xbb\xbf", b"\xc3", b"{}", DONE,
     b'{"choices":[],"usage":{"prompt_tokens":1}}', b'"content":"a"', b'"finish_reason":null', USAGE[:-2], ROLE[:-2]]
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(_PIECES, max_size=25),
    strip=st.booleans(),
    bound=st.sampled_from([3, 40, EVENT_BYTES]),
    data=st.data(),
)
def test_any_bytes_read_the_same_however_they_are_cut(
    pieces: list[bytes], strip: bool, bound: int, data: st.DataObject
):
    """The same bytes out, the same figures, and never more held than one event may have."""
    stream = b"".join(pieces)
    with patch.object(sse, "EVENT_BYTES", bound):
        want, whole = scan(stream, strip=strip)
        scanner, out = Scanner(strip_usage=strip), b""
        for part in cut(stream, data):
            out += scanner.feed(part, 1.0)
            assert len(scanner._held) <= bound
        assert want == out + scanner.close(1.0)
    assert reading(whole) == reading(scanner)
    assert strip or stream == want


_WORDS = st.text(st.sampled_from('ab"\\/\n\u2028é\U0001f600{}:,'), max_size=6) | st.sampled_from(
    ['"finish_reason":null', 'usage"', '"content":"a']
)
_CALLS = st.sampled_from([[], [{"index": 0, "function": {"arguments": "{"}}]])
_DELTA = st.fixed_dictionaries(
    {},
    optional={"role": st.just("assistant"), "content": st.none() | _WORDS, "reasoning": _WORDS, "tool_calls": _CALLS},
)
_CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "finish_reason": st.sampled_from([None, None, None, "stop", "length"])},
    optional={"delta": _DELTA, "text": _WORDS, "logprobs": st.just({"content": [{"token": "a"}]})},
)
_CHUNK = st.fixed_dictionaries(
    {"choices": st.lists(_CHOICE, max_size=3)},
    optional={
        "model": st.just("tiny"),
        "usage": st.sampled_from([None, {"completion_tokens": 7}]),
        "error": st.just({"code": 503, "message": "x"}),
        "system_fingerprint": st.sampled_from([None, "vllm-0.32.0-x"]),
    },
)


@settings(deadline=None, max_examples=150)
@given(chunks=st.lists(_CHUNK, max_size=8))
def test_events_read_by_their_bytes_say_what_their_json_says(chunks: list[dict[str, Any]]):
    """Most events are not decoded; for all that is counted, it must make no difference."""
    parts = [ROLE, *(event(**one) for one in chunks)]
    quick, one_by_one = reading(scan(b"".join(parts))[1]), reading(scan(*parts)[1])
    with patch.object(sse, "_plain_content", lambda event: None):
        assert reading(scan(b"".join(parts))[1]) == quick
        assert reading(scan(*parts)[1]) == one_by_one


@settings(deadline=None, max_examples=150)
@given(texts=st.lists(st.text('a"\\\n\r\u00e9 ', max_size=4), min_size=2, max_size=8), cut_at=st.integers(0, 300))
def test_repeated_event_is_read_the_same(texts: list[str], cut_at: int):
    """Like it around its text, that is; and one of them comes in two pieces."""
    parts = [
        ROLE,
        *(event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}]) for text in texts),
        DONE,
    ]
    cut_up = [*parts[:2], parts[2][:cut_at], parts[2][cut_at:], *parts[3:]]
    out, scanner = scan(*cut_up)
    assert b"".join(parts) == out
    assert (len(parts), sum(map(bool, texts))) == (scanner.events, scanner.content_events)


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n", b"\n\r", b"\r\n\r"])
def test_an_event_goes_out_with_its_blank_line(blank: bytes, strip: bool):
    """At once, also where a line feed may yet follow; that one goes where its event went."""
    one, usage = ROLE.replace(b"\n\n", blank), USAGE.replace(b"\n\n", blank)
    scanner = Scanner(strip_usage=strip)
    for _ in range(3):
        assert one == scanner.feed(one, 1.0)
        if blank.endswith(b"\r"):
            assert b"\n" == scanner.feed(b"\n", 1.0)
    assert (b"" if strip else usage) == scanner.feed(usage, 1.0)
    if blank.endswith(b"\r"):
        assert (b"" if strip else b"\n") == scanner.feed(b"\n", 1.0)
    assert (4, False) == (scanner.events, scanner.mid_event)


def test_usage_on_every_chunk_was_not_our_doing():
    """Asked for once by us, an engine tells it once; one that is set to tell it always would tell it without us too."""
    counted = event(
        model="tiny",
        choices=[{"index": 0, "delta": {"content": "a"}, "finish_reason": None}],
        usage={"prompt_tokens": 3},
    )
    assert ROLE + counted + USAGE + DONE == scan(ROLE + counted + USAGE + DONE)[0]
    assert ROLE + DONE == scan(ROLE + USAGE + DONE)[0]


@pytest.mark.parametrize(
    ("last", "strip", "torn"),
    [
        (b"data: {", True, True),
        (b"data: {", False, True),
        (b"", True, False),
        (b"", False, False),
        (USAGE[:-1], True, False),
        (USAGE[:-1], False, True),
    ],
)
def test_a_stream_that_ended_inside_an_event_says_so(last: bytes, strip: bool, torn: bool):
    """Whoever adds an event of his own must begin with a blank line then."""
    assert torn == scan(ROLE, last, strip=strip)[1].mid_event


def test_a_large_event_in_small_pieces_costs_what_it_weighs():
    """CPU time that grows with the square of the event would hold up every other stream: 16,000 pieces took five
    seconds once."""
    scanner, began = Scanner(strip_usage=True), time.process_time()
    for _ in range(EVENT_BYTES // 64):
        scanner.feed(b"x" * 64, 1.0)
    assert time.process_time() - began < 1.0


def test_the_model_is_read_also_when_the_first_event_names_none():
    assert "tiny" == scan(b": ping\n\n", chunk(content="a"), chunk(content="b"))[1].reply.model


_NAMES = st.sampled_from(
    ["code", "reason", "usage", "model", "status", "delta", "text", "finish_reason", "stop_reason", "cached_tokens",
        "prompt_tokens", "input_tokens",
     "cache_read_input_tokens", "prompt_tokens_details", "queue_time_ms", "incomplete_details", "error", "metrics",
     "choices", "response", "message",
     "system_fingerprint"]
)  # fmt: skip
_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["completed", "503", "٣٣٣", "vllm-0.1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=12,
)
_KINDS = st.sampled_from(
    [
        "response.completed",
        "response.x.delta",
        "message",
        "message_start",
        "message_delta",
        "content_block_delta",
        "error",
    ]
)


@settings(deadline=None, max_examples=200)
@given(fields=st.dictionaries(_NAMES, _ANYTHING, max_size=6), kind=st.none() | _KINDS | _ANYTHING)
def test_no_reply_is_too_odd_to_be_noted(fields: dict[str, Any], kind: Any):
    """Fields of any type and depth: what is not understood stays unknown, what is known stays in its type."""
    reply, text = Reply(), json.dumps(fields | {"type": kind}).encode()
    if (body := decode(text)) is not None:
        reply.note(body)
    reply.settle(content=True)
    assert all(
        type(value) in (int, type(None))
        for value in (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens, reply.error_code)
    )
    assert all(type(value) in (float, type(None)) for value in (reply.engine_queue_ms, reply.engine_ttft_ms))
    assert all(type(value) in (str, type(None)) for value in (reply.model, reply.engine_version, reply.finish_reason))


def test_an_engine_with_ever_new_finish_reasons_fills_no_memory():
    _, scanner = scan(*(chunk(f"word {number}") for number in range(100)))
    assert FINISH_WORDS == len(scanner.reply.finish_reasons)


@pytest.mark.parametrize("broken", [b"data: not json\n\n", b"data: {]\n\n", b"event: message\ndata: x\n\n"])
def test_an_event_that_is_no_json_makes_the_stream_unreadable(broken: bytes):
    """Clients end at such an event, but skip those of a name that they do not know."""
    assert "json" == scan(broken, chunk(content="a"), DONE)[1].reply.unreadable
    assert scan(b"event: x\n" + broken.removeprefix(b"event: message\n"), DONE)[1].reply.unreadable is None


def test_stream_is_done_at_its_end():
    assert (False, True) == (scan(chunk(content="a"))[1].done, scan(chunk(content="a"), DONE)[1].done)


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("others", [[], [b"\n"]])
def test_fields_beside_usage_stand_in_the_last_event(ends: bytes, others: list[bytes]):
    """As vLLM writes them where nobody asks for usage; each other event keeps its bytes."""
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    last, second = (event(id="a", system_fingerprint=None, choices=[choice | {"index": at}]) for at in (0, 1))
    usage = event(id="b", choices=[], usage={"prompt_tokens": 1}, metrics={}, system_fingerprint="f", x=[1], y=None)
    want = event(id="a", system_fingerprint="f", choices=[choice | {"index": 1}], x=[1])
    parts = [part.replace(b"\n", ends) for part in (ROLE, last, second, *others, usage, DONE)]
    out = b"".join([*parts[:2], want.replace(b"\n", ends), *parts[3:-2], parts[-1]])
    assert out == scan(*parts)[0]
    assert out == scan(b"".join(parts))[0]


def test_a_last_event_waits_for_the_next_alone():
    """Whoever ends a stream in between gets it out."""
    last, scanner = chunk("stop", content="a"), Scanner(strip_usage=True)
    assert b"" == scanner.feed(last, 1.0)
    assert last + ROLE == scanner.feed(ROLE, 2.0)
    scanner = Scanner(strip_usage=True)
    assert b"" == scanner.feed(last, 3.0)
    assert last == scanner.take_withheld()
    assert b"" == scanner.take_withheld() == scanner.close(4.0)
    assert last + ROLE[:9] == scan(last, ROLE[:9])[0]
    assert last == Scanner(strip_usage=True).feed(last + b": ping\n\n", 1.0)[: len(last)]
    for nothing in ({}, {"choices": None}):
        assert STRIPPED == scan(STREAM.replace(USAGE, event(usage={"prompt_tokens": 1}, **nothing)))[0]


def test_an_engine_with_a_finish_reason_in_each_event_streams():
    """Only the first event of each choice may be the last."""
    scanner, parts = Scanner(strip_usage=True), [chunk("stop", content=word) for word in "abc"]
    assert [b"", parts[0] + parts[1], parts[2]] == [scanner.feed(part, float(at)) for at, part in enumerate(parts)]
