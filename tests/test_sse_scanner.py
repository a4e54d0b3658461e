"""The scanner reads a stream as it passes: same bytes out, whatever the chunking."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stack.gateway.sse import EVENT_BYTES, Scanner


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    return event(id="chatcmpl-1", model="tiny", choices=[{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}])


ROLE = chunk(role="assistant", content="")
USAGE = event(
    id="chatcmpl-1",
    model="tiny",
    choices=[],
    usage={"prompt_tokens": 113, "total_tokens": 116, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 96}},
    system_fingerprint="vllm-0.32.0-d92bc6a7",
    metrics={"time_to_first_token_ms": 2.5, "queue_time_ms": 0.25},
)
DONE = b"data: [DONE]\n\n"
STREAM = ROLE + chunk(content="né") + chunk(content="") + chunk(content="\U0001f600") + chunk("length", content="!") + USAGE + DONE
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
    assert ("tiny", "0.32.0", "length", None) == (reply.model, reply.engine_version, reply.finish_reason, reply.error_code)
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
    for text in ('"finish_reason":"stop"', '"usage":{"prompt_tokens":1}', 'data: {"error":{"code":503}}\n\n', "finish_reason", "usage", "error"):
        _, scanner = scan(ROLE, chunk(content=text))
        assert (2.0, None, None, set()) == (
            scanner.first_content,
            scanner.reply.prompt_tokens,
            scanner.reply.error_code,
            scanner.reply.finish_reasons,
        )


def test_responses_api_tells_its_end_in_one_event():
    usage = {"input_tokens": 8, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2, "total_tokens": 10}
    ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": usage, "model": "tiny"}
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
            usage={"input_tokens": 4, "cache_read_input_tokens": 96, "cache_creation_input_tokens": 0, "output_tokens": 7},
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


def test_error_inside_a_stream_is_seen_with_its_code():
    """vLLM refuses streams for load with status 200 and one such event."""
    for error, code in (({"message": "busy", "code": 503}, 503), ({"message": "x", "code": "oops"}, 500), ("boom", 500)):
        _, scanner = scan(event(error=error), DONE)
        assert code == scanner.reply.error_code


def test_n_choices_keep_the_gravest_finish():
    _, scanner = scan(chunk("stop", content="a"), chunk("length", content="b"), chunk("stop", content="c"))
    assert "length" == scanner.reply.finish_reason


def test_every_cut_gives_the_same_bytes_and_the_same_reading():
    """One cut at each byte, through UTF-8 letters and line ends alike."""
    for stream in (STREAM, STREAM.replace(b"\n", b"\r\n"), b": hello\n\n" + STREAM.replace(b"\n\n", b"\r\r")):
        want, whole = scan(stream)
        assert b"".join(part for part in stream.split(b"data: ") if b'"usage"' not in part) == want.replace(b"data: ", b"")
        for cut in range(1, len(stream)):
            out, scanner = scan(stream[:cut], stream[cut:])
            assert want == out
            assert (whole.events, whole.content_events, 3) == (scanner.events, scanner.content_events, scanner.reply.completion_tokens)
            assert stream == scan(stream[:cut], stream[cut:], strip=False)[0]


_EVENTS = st.sampled_from([ROLE, chunk(content="né"), chunk(content="\U0001f600", role="assistant"), chunk("stop"), USAGE, DONE, b": ping\n\n",
                           b"event: x\nid: 3\ndata: a\ndata: b\n\n", b"data: {}\r\n\r\n", b"\n", b"\r\n", b"data: \xff\xfe\n\n"])  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(events=st.lists(_EVENTS, max_size=12), data=st.data())
def test_bytes_out_are_bytes_in_without_the_usage_event(events: list[bytes], data: st.DataObject):
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert stream == scan(*chunks, strip=False)[0]
    assert b"".join(part for part in events if part != USAGE) == scan(*chunks)[0].replace(USAGE, b"")
    assert USAGE not in scan(*chunks)[0]


@settings(deadline=None, max_examples=200)
@given(chunks=st.lists(st.binary(max_size=60)))
def test_any_bytes_pass_unharmed(chunks: list[bytes]):
    assert b"".join(chunks) == scan(*chunks)[0]
    assert b"".join(chunks) == scan(*chunks, strip=False)[0]


def test_an_event_beyond_the_bound_passes_unread_in_bounded_memory():
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
        assert (1, 1, 3) == (scanner.unread_events, scanner.content_events, scanner.reply.completion_tokens)


def test_a_last_event_without_its_blank_line_still_counts():
    out, scanner = scan(ROLE, USAGE.rstrip(b"\n"))
    assert (ROLE, 3) == (out, scanner.reply.completion_tokens)
    out, _ = scan(ROLE, b"data: {")
    assert ROLE + b"data: {" == out


def test_deep_nesting_and_huge_numbers_do_no_harm():
    deep = b'data: {"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"
    out, scanner = scan(deep, event(choices=[], usage={"prompt_tokens": -1, "completion_tokens": 10**30, "total_tokens": True}))
    assert (deep, None, None) == (out, scanner.reply.prompt_tokens, scanner.reply.completion_tokens)
