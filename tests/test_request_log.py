"""Records and lines are two forms of the same thing, and a line never grows beyond its bound."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.request_log import MAX_LINE_BYTES, BadLine, RequestRecord, ended_at, fitting_line, parse_line, timestamp, to_line

FULL = RequestRecord(
    request_id="8f14e45fceea167a5a36dedd4bea2543", ts="2026-05-12T09:30:00.123Z", trace_id="0af7651916cd43dd8448eb211c80319c",
    span_id="b7ad6b7169203331", parent_span_id="00f067aa0ba902b7", sampled=False, team="demo", priority="default", model="tiny",
    adapter="sql", route="/v1/chat/completions",
    upstream="127.0.0.1:8001", variant="canary", engine_version="0.32.0", attempt=1, stream=True, n=1, prompt_tokens=113, cached_tokens=96,
    completion_tokens=24, cache_hit=True, queue_ms=0.0, ttft_ms=12.345, tpot_ms=1.5, e2e_ms=48.75, engine_queue_ms=0.01, engine_ttft_ms=2.266,
    status=200, finish_reason="length", outcome="ok",
)  # fmt: skip


def test_a_record_survives_its_line():
    assert FULL == parse_line(to_line(FULL))
    assert RequestRecord(request_id="x") == parse_line(to_line(RequestRecord(request_id="x")))
    assert b'{"request_id":"x"}\n' == to_line(RequestRecord(request_id="x"))


def test_the_lab_format_is_read_as_it_stands():
    line = (
        b'{"request_id":"r1","model":"m","prompt_tokens":9,"completion_tokens":3,"ttft_ms":10,"tpot_ms":2,"cache_hit":false,"finish_reason":"stop"}'
    )
    record = parse_line(line)
    assert (None, None, None, 9, False) == (record.ts, record.team, record.outcome, record.prompt_tokens, record.cache_hit)


def test_other_names_can_be_mapped():
    assert "r1" == parse_line(b'{"id":"r1","more":{"x":[1]}}', {"id": "request_id"}).request_id


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "json"),
        (b"{", "json"),
        (b'{"request_id":"\xff"}', "json"),
        (b"[]", "type"),
        (b"{}", "type"),
        (b'{"request_id":7}', "type"),
        (b'{"request_id":"x","outcome":"odd"}', "type"),
        (b'{"request_id":"x","ts":"yesterday"}', "type"),
        (b'{"request_id":"x","ttft_ms":-1}', "range"),
        (b'{"request_id":"x","prompt_tokens":2000000000000}', "range"),
    ],
)
def test_a_bad_line_says_what_kind_of_bad(line: bytes, reason: str):
    with pytest.raises(BadLine) as caught:
        parse_line(line)
    assert reason == caught.value.reason


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_a_bad_line(line: bytes):
    for names in (None, {"a": "request_id"}):
        reason = "record"
        try:
            parse_line(line, names)
        except BadLine as error:
            reason = error.reason
        assert reason in ("record", "json", "type", "range")


def test_deep_nesting_is_a_bad_line():
    for text in (b'{"x":' + b"[" * 200_000, b"[" * 200_000):
        with pytest.raises(BadLine):
            parse_line(text)


def test_to_line_refuses_what_is_too_long_and_fitting_line_cuts_it():
    """What a client may write without bound loses its end; numbers and ids of the trace stay."""
    long = msgspec.structs.replace(FULL, model="m" * 5000, request_id="\\" * 128, adapter="\x01" * 300, finish_reason="é" * 32)
    with pytest.raises(BadLine):
        to_line(long)
    line = fitting_line(long)
    assert len(line) <= MAX_LINE_BYTES
    record = parse_line(line)
    assert (FULL.trace_id, FULL.completion_tokens, "mmm") == (record.trace_id, record.completion_tokens, (record.model or "")[:3])
    assert to_line(FULL) == fitting_line(FULL)


def test_an_ordinary_record_is_not_cut():
    """With the longest names that are in use, an id as long as theirs, and every figure."""
    ordinary = msgspec.structs.replace(
        FULL, model="meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", adapter="customer-support-german-2026-10", tried="gpu-a:upstream_down",
        request_id="chatcmpl-8f14e45f-ceea-467a-b5a3-6dedd4bea254", upstream="vllm-prefill-7d9c6b5f4-x2k8p.inference.svc:8000",
        prompt_tokens=131072, cached_tokens=65536, completion_tokens=16384, queue_ms=123456.789, ttft_ms=123456.789, tpot_ms=123.456,
        e2e_ms=1234567.891, engine_queue_ms=12345.678, engine_ttft_ms=12345.678, est_prompt_tokens=131072, retry_after_s=120.0,
    )  # fmt: skip
    assert ordinary == parse_line(fitting_line(ordinary))


def test_the_worst_record_that_a_gateway_can_write_fits():
    big = 10**12 - 1
    numbers = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "est_prompt_tokens"), big)
    times = dict.fromkeys(("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "engine_queue_ms", "engine_ttft_ms"), 123456789.123)
    texts = dict.fromkeys(("request_id", "model", "adapter", "priority", "upstream", "variant", "engine_version", "finish_reason"), "\x01" * 200)
    worst = msgspec.structs.replace(FULL, **numbers, **times, **texts, team="t" * 40, route="/v1/audio/transcriptions", n=999999, retry_after_s=1e9,
                                    outcome="upstream_error", reason="gateway_stopped", cache_hit=False, stream=False)  # fmt: skip
    assert len(fitting_line(worst)) <= MAX_LINE_BYTES


def test_times_go_round():
    assert "2026-05-12T09:30:00.123Z" == timestamp(1778578200.123)
    assert ended_at(FULL) == pytest.approx(1778578200.123)
    assert ended_at(RequestRecord(request_id="x")) is None
    assert ended_at(RequestRecord(request_id="x", ts="2026-05-12T09:30:00+02:00")) == pytest.approx(1778578200.0 - 7200)
