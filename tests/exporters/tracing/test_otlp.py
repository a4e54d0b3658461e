"""Spans of request records: what one says, which are sent, and what a collector that is slow, gone or unwilling costs.
Nothing but a counter."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client.parser import text_string_to_metric_families

from exporters.requests.record import RequestRecord, parse_line, timestamp, to_line
from exporters.sidecar import Sidecar
from exporters.sidecar_config import SidecarConfig
from exporters.tracing import collector as collector_module
from exporters.tracing import span_queue
from exporters.tracing.collector import Attempt, innermost
from exporters.tracing.config import OtlpConfig
from exporters.tracing.sdk_spans import SpanFactory
from exporters.tracing.span_queue import SpanQueue, kept
from exporters.tracing.spans import Span, attributes, failure, operation, span_of
from exporters.tracing.transport import span_exporter
from stack import config
from stack.lab import plan
from tests.support import memory
from tests.support.real_collector import http_server
from tests.support.wait import eventually, until

ROOT = Path(__file__).parents[3]
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FULL = RequestRecord(
    request_id="abc", ts="2026-05-12T09:30:01.500Z", trace_id=TRACE, span_id=SPAN, team="search", priority="high",
    model="qwen", adapter="sql",
    route="/v1/chat/completions", upstream="gpu-1", variant="canary", engine_version="0.32.0", attempt=2,
    tried="gpu-0:upstream_down", stream=True,
    n=2, prompt_tokens=100, cached_tokens=64, completion_tokens=20, cache_hit=True, queue_ms=4.0, ttft_ms=120.0,
    tpot_ms=8.0, e2e_ms=1250.0,
    engine_queue_ms=1.0, engine_ttft_ms=100.0, status=200, finish_reason="stop", outcome="ok", retry_after_s=None,
    est_prompt_tokens=90,
)  # fmt: skip
ENDED_S = 1778578201.5
NEVER = OtlpConfig(endpoint="http://127.0.0.1:1")  # for those who bring their own exporter


def record(**changes: object) -> RequestRecord:
    return msgspec.structs.replace(FULL, **changes)


def numbered(number: int, **changes: object) -> RequestRecord:
    """A record of a trace of its own, told by its number."""
    return record(request_id=str(number), trace_id=f"{number + 1:032x}", span_id=f"{number + 1:016x}", **changes)


def decoded(body: bytes) -> list:
    """The spans of a request, as OpenTelemetry's own messages read it."""
    return [
        span
        for r in ExportTraceServiceRequest.FromString(body).resource_spans
        for s in r.scope_spans
        for span in s.spans
    ]


def encoded(*spans: Span, factory: SpanFactory | None = None, version: str = "9") -> bytes:
    """The body of an export request, as the SDK's exporters make it."""
    factory = factory or SpanFactory("vllm-watch-gateway", version)
    return encode_spans([factory.make(span) for span in spans]).SerializeToString()


def plain(attributes) -> dict[str, object]:
    """Attributes of a decoded span as plain values."""
    found = {}
    for attribute in attributes:
        field = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, field)
        found[attribute.key] = [item.string_value for item in value.values] if field == "array_value" else value
    return found


# --- what a span says


def test_span_times_follow_the_record():
    """A span ends when the record says and began as long before as the request took."""
    span = span_of(FULL)
    assert span is not None
    assert (TRACE, SPAN, None) == (span.trace_id.hex(), span.span_id.hex(), span.parent_id)
    assert (1778578200_250_000_000, 1778578201_500_000_000) == (span.start_ns, span.end_ns)


def test_client_trace_continues_below_its_span():
    """A trace that a client began goes on below the client's span."""
    parent = "00f067aa0ba902b7"
    (span,) = decoded(encoded(span_of(record(parent_span_id=parent))))
    assert (parent, SPAN) == (span.parent_span_id.hex(), span.span_id.hex())
    (first,) = decoded(encoded(span_of(FULL)))
    assert b"" == first.parent_span_id


@pytest.mark.parametrize(
    "lacking",
    [
        {"trace_id": None},
        {"trace_id": "0" * 32},
        {"trace_id": TRACE[:-1]},
        {"trace_id": TRACE[:-1] + "x"},
        {"trace_id": "ab " * 10 + "ab"},
        {"span_id": None},
        {"span_id": "0" * 16},
        {"span_id": SPAN + "00"},
        {"ts": None},
        {"e2e_ms": None},
        {"ts": "1969-12-31T23:59:59Z"},
        {"e2e_ms": 9e11, "ts": "1980-01-01T00:00:00Z"},
        {"ts": "9999-01-01T00:00:00Z"},
    ],
    ids=str,
)
def test_a_record_without_ids_or_times_makes_no_span(lacking):
    assert span_of(record(**lacking)) is None


def test_attributes_use_the_usual_names():
    """Everything that is known is an attribute under the name that others look for."""
    assert {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "qwen",
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 2, "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.12,
        "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 20, "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.latency.time_to_first_token": 0.12, "gen_ai.latency.e2e": 1.25,
        "url.path": "/v1/chat/completions", "http.response.status_code": 200,
        "vllm_watch.request_id": "abc", "vllm_watch.team": "search", "vllm_watch.priority": "high",
        "vllm_watch.adapter": "sql",
        "vllm_watch.upstream": "gpu-1", "vllm_watch.variant": "canary", "vllm_watch.engine_version": "0.32.0",
        "vllm_watch.attempt": 2,
        "vllm_watch.tried": "gpu-0:upstream_down", "vllm_watch.outcome": "ok", "vllm_watch.queue_s": 0.004,
        "vllm_watch.tpot_s": 0.008,
        "vllm_watch.engine_queue_s": 0.001, "vllm_watch.engine_ttft_s": 0.1, "vllm_watch.est_prompt_tokens": 90,
    } == attributes(FULL)  # fmt: skip


def test_what_a_record_does_not_say_is_absent_and_never_0():
    assert {
        "gen_ai.operation.name": "request",
        "gen_ai.provider.name": "vllm",
        "vllm_watch.request_id": "a",
    } == attributes(RequestRecord(request_id="a"))


@pytest.mark.parametrize(
    ("ended", "error"),
    [
        ({"outcome": "ok"}, None),
        ({"outcome": "upstream_error", "reason": "upstream_reset", "status": 502}, "upstream_reset"),
        # a stream that broke after its 200
        ({"outcome": "upstream_error", "reason": "engine_error", "status": 200}, "engine_error"),
        # our key, our failure
        ({"outcome": "upstream_error", "reason": "upstream_auth", "status": 401}, "upstream_auth"),
        ({"outcome": "timeout", "reason": "prefill_timeout", "status": 504}, "prefill_timeout"),
        ({"outcome": "timeout", "reason": None}, "_OTHER"),
        ({"outcome": "rejected", "reason": "team_limit", "status": 429}, None),
        ({"outcome": "rejected", "reason": "queue_ttl", "status": 503}, None),  # policy at work, whatever the status
        ({"outcome": "client_abort", "reason": "client_hangup", "status": None}, None),
        ({"outcome": None, "status": 500}, "_OTHER"),
        ({"outcome": None, "finish_reason": "error"}, "_OTHER"),
        ({"outcome": None, "status": 404}, None),
    ],
)
def test_only_failures_have_error_type_and_status(ended, error):
    """As the error ratio counts: a refusal and a client disconnect are no failures."""
    failed = record(**ended)
    assert error == failure(failed)
    (span,) = decoded(encoded(span_of(failed)))
    assert (2 if error else 0) == span.status.code
    assert error == plain(span.attributes).get("error.type")


def test_finish_reason_only_from_the_engine():
    """The gateway writes abort, error and rejected itself."""
    assert "gen_ai.response.finish_reasons" not in attributes(record(outcome="client_abort", finish_reason="abort"))


@pytest.mark.parametrize(
    ("route", "word"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/responses", "chat"),
        ("/v1/messages", "chat"),
        ("/cohere/v2/chat", "chat"),
        ("/inference/v1/generate", "text_completion"),
        ("/v2/embed", "embeddings"),
        ("/v2/rerank", "rerank"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/responses/resp_123/cancel", "responses"),
        ("/tokenize", "tokenize"),
        ("", "request"),
        (None, "request"),
    ],
)
def test_a_route_has_a_word_and_no_id_in_it(route, word):
    assert word == operation(route)


def test_span_name_has_operation_and_model():
    """A span is named after what was asked of which model and is the gateways."""
    request = ExportTraceServiceRequest.FromString(encoded(span_of(FULL), span_of(record(model=None)), version="9.9"))
    (resource,) = request.resource_spans
    (scope,) = resource.scope_spans
    assert {"service.name": "vllm-watch-gateway", "telemetry.sdk.language": "python"}.items() <= plain(
        resource.resource.attributes
    ).items()
    assert ("vllm-watch", "9.9") == (scope.scope.name, scope.scope.version)
    assert ["chat qwen", "chat"] == [span.name for span in scope.spans]
    assert {2} == {span.kind for span in scope.spans}, "SERVER"


def lines() -> st.SearchStrategy[bytes]:
    """Lines that the log accepts, of any gateway: ids and times, and every other field absent or at whatever may stand
    there."""
    texts, real = st.text(max_size=300), st.floats(0, 1e12, exclude_max=True)
    by_type = {str: texts, int: st.integers(0, 10**12 - 1), float: real, bool: st.booleans()}

    def values(field: msgspec.structs.FieldInfo) -> st.SearchStrategy[object]:
        told = {getattr(kind, "__origin__", kind) for kind in getattr(field.type, "__args__", (field.type,))}
        kinds = [kind for kind in by_type if kind in told]
        return (
            by_type[kinds[0]]
            if kinds
            else st.sampled_from(["ok", "client_abort", "rejected", "upstream_error", "timeout"])
        )

    ended = st.datetimes().map(lambda t: f"{t.isoformat()}Z")
    needed = {"request_id": texts, "trace_id": st.just(TRACE), "span_id": st.just(SPAN), "ts": ended, "e2e_ms": real}
    optional = {f.name: values(f) for f in msgspec.structs.fields(RequestRecord) if f.name not in needed}
    optional |= {
        "status": st.integers(-(2**63), 2**64 - 1),
        "n": st.integers(0, 10**5 - 1),
        "prompts": st.integers(0, 10**5 - 1),
        "cached_tokens": st.just(0),  # never more than the prompt
    }
    return st.fixed_dictionaries(needed, optional=optional).map(lambda found: json.dumps(found).encode())


@settings(max_examples=40)
@given(st.lists(lines(), max_size=5))
def test_whatever_the_log_accepts_arrives_as_it_was(many):
    """One tracer makes all spans: nothing of one request may be left in the next."""
    spans = [span for line in many if (span := span_of(parse_line(line)))]
    factory = SpanFactory("vllm-watch-gateway", "9")
    for _ in range(2):
        arrived = decoded(encoded(*spans, factory=factory))
        assert [attributes(span.record) for span in spans] == [plain(span.attributes) for span in arrived]
        assert [(s.trace_id, s.span_id, s.start_ns, s.end_ns) for s in spans] == [
            (a.trace_id, a.span_id, a.start_time_unix_nano, a.end_time_unix_nano) for a in arrived
        ]


def test_texts_of_a_mebibyte_are_cut_before_they_are_queued():
    """The queue is bounded in spans; so that it is bounded in bytes as well, a span is."""
    span = span_of(record(model="m" * (1 << 20), team="t" * 257))
    assert ("m" * 256, "t" * 256) == (span.record.model, span.record.team)


def test_encoding_keeps_nothing_of_what_it_encoded():
    """protobuf keeps what a message was given where no tool of Python's looks: 11 MiB of these once."""
    factory, spans = (
        SpanFactory("vllm-watch-gateway", "9"),
        [span_of(record(team=f"team {number}")) for number in range(250)],
    )
    for _ in range(4):
        encoded(*spans, factory=factory)
    before = memory.mib()
    for _ in range(40):
        encoded(*spans, factory=factory)
    assert memory.mib() - before < 2


# --- which are sent


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, False),
        ({"outcome": "timeout"}, True),
        ({"ttft_ms": 2500.0}, True),
        ({"ttft_ms": 2499.9}, False),
        ({"e2e_ms": 60_000.0}, True),
        ({"ttft_ms": None}, False),
        ({"outcome": "timeout", "sampled": False}, False),  # what its client does not keep has no trace to be in
        ({"outcome": "rejected"}, False),  # a storm of refusals is no reason for a storm of spans
    ],
)
def test_failed_and_slow_requests_are_sent_whatever_the_share(changes, sent):
    assert sent == kept(span_of(record(**changes)), OtlpConfig(endpoint="http://c:4318", sample=0))


@pytest.mark.parametrize(
    ("trace_id", "share", "sent"),
    [
        ("f" * 16 + "0" * 16, 0.0, False),
        ("0" * 16 + "3fffffffffffffff", 0.25, True),  # a quarter of 2**64, of the lower half of the id
        ("0" * 15 + "14000000000000000", 0.25, False),
        ("f" * 32, 0.999, False),
        ("f" * 32, 1.0, True),
    ],
)
def test_the_share_goes_by_the_trace_id_as_in_the_sdks_sampler(trace_id, share, sent):
    """`trace_id & 0xffffffffffffffff < round(rate * 2**64)`, which is TraceIdRatioBased of opentelemetry-sdk 1.45."""
    assert sent == kept(span_of(record(trace_id=trace_id)), OtlpConfig(endpoint="http://c:4318", sample=share))


@given(st.integers(1, 2**128 - 1), st.floats(0, 1), st.floats(0, 1))
def test_a_trace_of_a_small_share_is_in_every_larger_one(trace_id, one, other):
    span = span_of(record(trace_id=f"{trace_id:032x}"))
    small, large = (kept(span, OtlpConfig(endpoint="http://c:4318", sample=share)) for share in sorted((one, other)))
    assert small <= large


# --- the queue and its thread


class Collector(SpanExporter):
    """Stands for the SDK's exporter: accepts, refuses, or cannot reach its collector, as it is told."""

    def __init__(self) -> None:
        self.spans: list = []
        self.tries = 0
        self.attempt: Attempt | Exception = Attempt()

    def __call__(self, config: OtlpConfig, version: str, observe) -> Collector:
        self.observe = observe
        return self

    def export(self, spans) -> SpanExportResult:
        self.tries += 1
        if isinstance(self.attempt, Exception):
            raise self.attempt
        if self.attempt.reason is None:
            self.spans += decoded(encode_spans(spans).SerializeToString())
        self.observe(self.attempt)
        return SpanExportResult.FAILURE if self.attempt.reason else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass

    @property
    def ids(self) -> list[str]:
        return [str(plain(span.attributes)["vllm_watch.request_id"]) for span in self.spans]


@pytest.fixture
def hasty(monkeypatch):
    """Waits short enough for a test."""
    monkeypatch.setattr(span_queue, "LINGER_S", 0.01)
    monkeypatch.setattr(span_queue, "RETRY_S", 0.02)


@pytest.fixture
def started(hasty):
    """Starts spans that go to a collector of the test; stops them after it."""
    with contextlib.ExitStack() as stack:

        def start(send: Collector, since_s: float = 0.0, rules: OtlpConfig = NEVER) -> SpanQueue:
            spans = SpanQueue(rules, "9", since_s, send)
            spans.start()
            stack.callback(spans.stop)
            return spans

        yield start


def test_a_record_makes_one_span_or_says_why_it_makes_none(started):
    collector = Collector()
    spans = started(collector, since_s=ENDED_S, rules=OtlpConfig(endpoint="http://c:4318", sample=0.5))
    spans.add(numbered(1))
    spans.add(numbered(2, ts="2026-05-12T09:30:01.499Z"))  # was counted by the sidecar that ran before
    spans.add(record(trace_id="f" * 32))
    spans.add(record(trace_id=None))
    eventually(lambda: collector.ids == ["1"] and spans.sent == 1)
    assert {"history": 1, "incomplete": 1, "sampled": 1} == spans.left_out
    assert 0 == spans.waiting == sum(spans.dropped.values())


def test_absent_collector_drops_the_oldest(started, monkeypatch, caplog):
    """Ten fit: the oldest are dropped and counted by why they wait; when the collector is back, the rest arrives."""
    monkeypatch.setattr(span_queue, "QUEUE_LIMIT", 10)
    monkeypatch.setattr(span_queue, "BATCH", 4)
    collector = Collector()
    collector.attempt = Attempt("unavailable", "Connection refused")
    spans = started(collector)
    with caplog.at_level(logging.INFO, "vllm_watch.otlp"):
        spans.add(numbered(0))
        eventually(lambda: collector.tries > 0)
        for number in range(1, 101):
            spans.add(numbered(number))
        assert (90, 11) == (spans.dropped["unavailable"], spans.waiting)
        collector.attempt = Attempt("timeout", "no answer within 5 s")
        eventually(lambda: spans._collector.reason == "timeout")
        spans.add(numbered(101))
        assert 1 == spans.dropped["timeout"]
        collector.attempt = Attempt()
        eventually(lambda: spans.sent == 11)
    assert ["0", *map(str, range(92, 102))] == collector.ids, "what was under way, then the newest ten"
    assert (0, 0) == (spans.waiting, spans.dropped["queue_full"])
    # each change once, however many tries, and whichever of the reasons
    stopped, resumed = (entry.getMessage() for entry in caplog.records)
    assert re.fullmatch(
        r"http://127\.0\.0\.1:1 .* spans \(unavailable\); up to 10 wait, .*: Connection refused", stopped
    )
    assert "http://127.0.0.1:1 accepts spans again" == resumed


def test_overflow_differs_from_an_absent_collector(monkeypatch):
    """Never started: nothing is taken out of the queue."""
    monkeypatch.setattr(span_queue, "QUEUE_LIMIT", 3)
    spans = SpanQueue(NEVER, "9", 0, Collector())
    for number in range(5):
        spans.add(numbered(number))
    assert (2, 3) == (spans.dropped["queue_full"], spans.waiting)


def test_refused_batch_is_counted_and_next_is_sent(started, caplog):
    """What the collector refuses is lost and counted and the next is tried."""
    collector = Collector()
    collector.attempt = Attempt("refused", "HTTP status 401 to /v1/traces")
    spans = started(collector)
    for number in range(3):
        spans.add(numbered(number))
        eventually(lambda: spans.dropped["refused"] == number + 1 and not spans.waiting)  # noqa: B023
    assert 1 == caplog.text.count("HTTP status 401"), "told once"
    collector.attempt = Attempt(None, "too old", rejected=1)
    spans.add(numbered(3))
    eventually(lambda: spans.dropped["refused"] == 4)
    collector.attempt = Attempt()
    spans.add(numbered(4))
    eventually(lambda: spans.sent == 1)


def test_a_defect_of_ours_costs_a_batch_and_not_the_thread(started, caplog):
    collector = Collector()
    collector.attempt = ZeroDivisionError("a defect")
    spans = started(collector)
    spans.add(numbered(1))
    eventually(lambda: spans.dropped["defect"] == 1)
    collector.attempt = Attempt()
    spans.add(numbered(2))
    eventually(lambda: ["2"] == collector.ids)


def test_the_last_spans_are_sent_when_the_sidecar_stops(monkeypatch):
    monkeypatch.setattr(span_queue, "LINGER_S", 60.0)
    monkeypatch.setattr(span_queue, "BATCH", 4)
    collector = Collector()
    spans = SpanQueue(NEVER, "9", 0, collector)
    for number in range(3):
        spans.add(numbered(number))
    spans.start()
    spans.stop()
    assert ["0", "1", "2"] == collector.ids


def test_stopping_does_not_wait_for_a_silent_collector(hasty, monkeypatch, caplog):
    """Stopping does not wait for a collector that does not answer."""
    monkeypatch.setattr(span_queue, "SHUTDOWN_FLUSH_S", 0.1)
    never, ended = threading.Event(), []
    collector = Collector()
    collector.export = lambda _: (never.wait(60), ended.append(1))
    spans = SpanQueue(NEVER, "9", 0, collector)
    spans.start()
    spans.add(numbered(1))
    eventually(lambda: spans._in_flight == 1)
    spans.stop()
    assert not ended
    assert ["1 spans "] == [message[:8] for message in caplog.messages]
    never.set()


# --- over the wire


PROTOBUF = {"Content-Type": "application/x-protobuf"}


def export(endpoint: str, *records: RequestRecord, **options: object) -> Attempt:
    """Return the last attempt of one export call of the SDK's exporter."""
    return attempts_of(endpoint, *records, **options)[-1]


def attempts_of(endpoint: str, *records: RequestRecord, **options: object) -> list[Attempt]:
    attempts: list[Attempt] = []
    exporter = span_exporter(OtlpConfig(endpoint=endpoint, **options), "9", attempts.append)
    factory = SpanFactory("vllm-watch-gateway", "9")
    exporter.export([factory.make(span_of(one)) for one in records or (FULL,)])
    exporter.shutdown()
    return attempts


@pytest.mark.parametrize(
    ("suffix", "path"),
    [("", "/v1/traces"), ("/", "/v1/traces"), ("/v1/traces", "/v1/traces"), ("/otlp", "/otlp/v1/traces")],
)
def test_request_has_protocol_path_and_file_headers(suffix, path, tmp_path):
    """A request goes to the path of the protocol with the headers of the file."""
    (tmp_path / "headers").write_text("# of the vendor\nX-Key: s3cret value\n\nContent-Type: text/plain\n")
    with http_server(lambda _: (200, PROTOBUF, b"")) as (address, got):
        assert Attempt() == export(address + suffix, headers_file=str(tmp_path / "headers"))
    ((sent_to, headers, body),) = got
    assert (path, ["chat qwen"]) == (sent_to, [span.name for span in decoded(body)])
    assert ("s3cret value", "application/x-protobuf", "vllm-watch/9") == (
        headers["x-key"],
        headers["content-type"],
        headers["user-agent"],
    )


def test_compression_is_applied_where_it_is_configured():
    with http_server(lambda _: (200, PROTOBUF, b"")) as (address, got):
        assert Attempt() == export(address, compression="gzip")
    ((_, headers, body),) = got
    assert "gzip" == headers["content-encoding"]
    assert ["chat qwen"] == [span.name for span in decoded(gzip.decompress(body))]


@pytest.mark.parametrize(
    ("status", "headers", "reason", "after_s"),
    [
        (503, {"Retry-After": "7"}, "unavailable", 7),
        (429, {"Retry-After": "100000"}, "unavailable", 60),
        (502, {"Retry-After": "Wed, 21 Oct 2150 07:28:00 GMT"}, "unavailable", 0),
        (504, {"Retry-After": "9"}, "unavailable", 9),
        (500, {}, "refused", 0),
        (401, {}, "refused", 0),
        (301, {"Location": "http://127.0.0.1:1/"}, "refused", 0),
        (304, {}, "refused", 0),
    ],
)
def test_an_answer_means_later_or_never_as_the_protocol_says(status, headers, reason, after_s):
    with http_server(lambda _: (status, headers, b"")) as (address, _):
        attempt = export(address)
    assert (reason, after_s) == (attempt.reason, attempt.retry_after_s)
    assert str(status) in attempt.detail


def test_the_sdk_retries_a_collector_that_is_full_for_a_moment():
    answers = iter([503, 200])
    with http_server(lambda _: (next(answers), PROTOBUF, b"")) as (address, got):
        assert Attempt() == export(address)
    assert 2 == len(got)


def test_partially_refused_spans_are_counted():
    """What a collector refuses of a request that it accepts is counted."""
    answer = ExportTraceServiceResponse(
        partial_success={"rejected_spans": 1, "error_message": "too old"}
    ).SerializeToString()
    with http_server(lambda _: (200, PROTOBUF, answer)) as (address, _):
        assert Attempt(None, "too old", rejected=1) == export(address)


@pytest.mark.parametrize("headers", [{"Content-Type": "text/html"}, PROTOBUF])
def test_a_200_that_is_no_protobuf_is_a_200(headers):
    with http_server(lambda _: (200, headers, b"<html>")) as (address, _):
        assert Attempt() == export(address)


def test_silent_collector_is_waited_for_as_asked(monkeypatch):
    """A collector that does not answer is waited for no longer than asked."""
    monkeypatch.setattr(collector_module, "EXPORT_TIMEOUT_S", 0.05)
    release = threading.Event()
    with http_server(lambda _: (release.wait(60), (200, {}, b""))[1]) as (address, _):
        assert Attempt("timeout", "no answer within 0.05 s") == export(address)
        release.set()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_closed_port_and_unknown_name_are_retryable(protocol, free_port, monkeypatch):
    """A port where nobody listens and a name that is none mean later."""
    monkeypatch.setattr(collector_module, "EXPORT_TIMEOUT_S", 5.0)
    for host in ("127.0.0.1", "nowhere..invalid"):
        assert "unavailable" == export(f"http://{host}:{free_port()}", protocol=protocol).reason


def test_http_error_on_a_grpc_port_names_it():
    """A port that usually speaks gRPC is named when HTTP fails on it."""
    assert re.search("; 4317 .*gRPC$", export("http://nowhere..invalid:4317").detail)


def test_untrusted_certificate_sends_nothing():
    """A plain server behind https: the handshake fails before any span leaves."""
    with http_server(lambda _: (200, {}, b"")) as (address, got):
        assert "SSL" in attempts_of(address.replace("http:", "https:"))[0].detail
    assert [] == got


@pytest.mark.parametrize(("protocol", "attempts"), [("http", 2), ("grpc", 1)])
def test_a_retry_without_time_is_not_reported(protocol, attempts, free_port, monkeypatch):
    """The SDK waits almost until the end of an export's time, then asks once more."""
    monkeypatch.setattr(collector_module, "EXPORT_TIMEOUT_S", 2.0)
    found: list[Attempt] = []
    config_ = OtlpConfig(endpoint=f"http://127.0.0.1:{free_port()}", protocol=protocol)
    exporter, span = (
        span_exporter(config_, "9", found.append),
        SpanFactory("vllm-watch-gateway", "9").make(span_of(FULL)),
    )
    end = time.time() + 1.99
    monkeypatch.setattr("random.uniform", lambda *_: end - time.time())
    exporter.export([span])
    exporter.shutdown()
    assert ["unavailable"] * attempts == [attempt.reason for attempt in found]


def test_a_connection_is_kept_for_the_next_export():
    """With TLS a new one would cost a handshake for each batch."""
    clients = set()
    with http_server(lambda handler: (clients.add(handler.client_address), (200, PROTOBUF, b""))[1], "HTTP/1.1") as (
        address,
        got,
    ):
        exporter = span_exporter(OtlpConfig(endpoint=address), "9", lambda _: None)
        factory = SpanFactory("vllm-watch-gateway", "9")
        for _ in range(3):
            exporter.export([factory.make(span_of(FULL))])
        exporter.shutdown()
    assert (1, 3) == (len(clients), len(got))


def test_environment_proxy_is_not_used(monkeypatch):
    """No proxy of the environment is between us and the collector."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http_server(lambda _: (200, PROTOBUF, b"")) as (address, _):
        assert Attempt() == export(address)


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("trouble", "reason"), [("silent", "timeout"), ("tls", "unavailable"), ("absent", "unavailable")]
)
def test_collector_in_trouble_logs_one_line(protocol, trouble, reason, free_port, hasty, monkeypatch, caplog):
    """Nothing waits: 500 records are taken in at once while it is so, and the end is soon."""
    monkeypatch.setattr(span_queue, "QUEUE_LIMIT", 100)
    monkeypatch.setattr(span_queue, "BATCH", 10)
    monkeypatch.setattr(span_queue, "SHUTDOWN_FLUSH_S", 0.2)
    monkeypatch.setattr(collector_module, "EXPORT_TIMEOUT_S", 0.5 if trouble == "silent" else 30)
    with (
        caplog.at_level(logging.INFO),
        silent_server() as silent,
        http_server(lambda _: (200, {}, b"")) as (plain_server, got),
    ):
        server = {
            "silent": f"http://{silent}",
            "tls": plain_server.replace("http", "https"),
            "absent": f"http://127.0.0.1:{free_port()}",
        }
        spans, attempts = SpanQueue(OtlpConfig(endpoint=server[trouble], protocol=protocol), "9", 0), []
        observe = spans._collector.observe
        spans._collector.observe = lambda attempt: (attempts.append(attempt), observe(attempt))
        spans.start()
        spans.add(numbered(0))
        # gRPC reports a silent one as unavailable as well, in turns
        eventually(lambda: spans._collector.reason == reason)
        for number in range(1, 501):
            spans.add(numbered(number))
        assert (400, 101) == (spans.dropped["timeout"] + spans.dropped["unavailable"], spans.waiting)
        so_far = len(attempts)
        eventually(lambda: len(attempts) >= so_far + 2, what="further attempts")
        spans.stop()
    assert [] == got
    line, end = (entry.getMessage() for entry in caplog.records)
    assert re.match(rf"{server[trouble]} .* spans \({reason}\); up to 100 wait, ", line)
    assert end.startswith("101 spans ")


def test_the_innermost_error_ends_a_circle_too():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert innermost(one) in (one, other)


# --- configuration


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{endpont: http://c:4318}", r"\.endpont .* endpoint\?"),
        ("{}", r"\.endpoint is missing"),
        ("{endpoint: 'otelcol:4318'}", ": endpoint 'otelcol:4318' .*collector address; .*http://127.0.0.1:4318"),
        ("{endpoint: 'http://otel col:4318'}", ": endpoint 'http://otel col:4318' .*collector address; "),
        ("{endpoint: 'http://otelcol'}", ": endpoint 'http://otelcol' .*no port; .*http://127.0.0.1:4318"),
        ("{endpoint: 'http://otelcol:99999'}", ": endpoint 'http://otelcol:99999' .* 65535"),
        (
            "{endpoint: 'http://otelcol:4317/v1/traces', protocol: grpc}",
            ": endpoint 'http://otelcol:4317/v1/traces' .*gRPC.*http://127.0.0.1:4317",
        ),
        ("{endpoint: 'https://me:secret@c.example'}", ": endpoint 'c.example' .* headers_file"),
        ("{endpoint: 'http://c:4318', protocol: htp}", r"\.protocol: .*'htp'; .* http\?"),
        ("{endpoint: 'http://c:4318', sample: 10}", ": sample .* 0 to 1, not 10"),
        ("{endpoint: 'http://c:4318', slow_ttft_s: 0}", ": slow_ttft_s .* 0 seconds"),
        ("{endpoint: 'http://c:4318', sample: .nan}", ": sample .* 0 to 1, not nan"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_no_secret(text, values):
    with pytest.raises(config.BadConfig, match=rf"^sidecar\.yaml: otlp{values}") as caught:
        config.parse(f"otlp: {text}", SidecarConfig, "sidecar.yaml")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (None, " .*: No such file"),
        (b"a: b\nsecret\n", ", line 2: .*`name: value`"),
        (b"a: \xff", " .* ASCII text"),
        (b"key: a\x00b", ", line 1: .*`name: value`"),
    ],
)
def test_bad_headers_file_is_reported_and_not_quoted(content, values, tmp_path):
    """A headers file that cannot be used is told before anything starts and not quoted."""
    path = tmp_path / "headers"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"otlp\.headers_file: {path}{values}") as caught:
        Sidecar(SidecarConfig(otlp=OtlpConfig(endpoint="http://c:4318", headers_file=str(path))))
    assert "secret" not in str(caught.value)


def test_lab_and_compose_send_to_their_collector(tmp_path):
    """The lab and the compose file send to the collector that is there."""
    programs = {name: tmp_path / name for name in ("engine", "model", "prometheus", "alertmanager", "otelcol")}
    texts = dict(plan.files(plan.LabConfig(tmp_path, programs, port_offset=70)))
    lab, receiver = (
        yaml.safe_load(texts["sidecar.yaml"])["otlp"],
        yaml.safe_load(texts["otelcol.yaml"])["receivers"]["otlp"]["protocols"]["http"],
    )
    assert f"http://{receiver['endpoint']}" == lab["endpoint"] == "http://127.0.0.1:4388"
    alone = plan.LabConfig(tmp_path, {name: path for name, path in programs.items() if name != "otelcol"})
    assert "otlp" not in yaml.safe_load(dict(plan.files(alone))["sidecar.yaml"])

    deploy, services = ROOT / "stack/deploy", yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    shipped = config.load(deploy / "sidecar.yaml", SidecarConfig).otlp
    assert OtlpConfig(endpoint="http://otelcol:4318") == shipped, "and its defaults are those of the code"
    listens = yaml.safe_load((deploy / "otelcol/config.yaml").read_text())["receivers"]["otlp"]["protocols"]["http"][
        "endpoint"
    ]
    assert "0.0.0.0:4318" == listens
    assert set(services["sidecar"]["networks"]) & set(services["otelcol"]["networks"])


# --- the sidecar


def values(text: str) -> dict[tuple[str, ...], float]:
    return {
        (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }


def series(sidecar: Sidecar) -> dict[str, float]:
    """The span series of its page, without what they have in common."""
    return {
        " ".join(name).removeprefix("vllm_watch_spans_"): value
        for name, value in values(sidecar.page()).items()
        if "_spans_" in name[0]
    }


def test_sidecar_without_otlp_loads_nothing_for_it():
    """Without a collector in its configuration a sidecar makes no spans and loads nothing for it."""
    assert {} == series(Sidecar(SidecarConfig()))
    assert set() == loaded("")


@pytest.mark.parametrize(
    ("otlp", "parts"),
    [
        ("endpoint='http://c:4318'", {"opentelemetry", "requests"}),
        ("endpoint='http://c:4318', metrics=True", {"opentelemetry", "requests", "exporters.tracing.genai_metrics"}),
        ("endpoint='http://c:4317', protocol='grpc'", {"opentelemetry", "grpc"}),
    ],
)
def test_sidecar_loads_the_configured_protocol_only(otlp, parts):
    """A sidecar loads the protocol and the signals that are configured."""
    assert parts == loaded(f"otlp=OtlpConfig({otlp})")


def loaded(config: str) -> set[str]:
    """What of the SDK a sidecar with this configuration has loaded."""
    code = (
        "import sys; from exporters.sidecar import Sidecar; from exporters.sidecar_config import SidecarConfig;"
        "from exporters.tracing.config import OtlpConfig;"
        f"Sidecar(SidecarConfig({config}));"
        "print(*{'grpc', 'requests', 'opentelemetry', 'exporters.tracing.genai_metrics'} & set(sys.modules))"
    )
    return set(
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_every_series_stands_at_0_before_its_first_event():
    """A series that is born at 1 never grew: the first dropped span would be on no board."""
    reasons = {"dropped": span_queue.DROPPED, "left_out": span_queue.LEFT_OUT}
    names = [
        "sent_total",
        "waiting",
        *(f"{name}_total reason={why}" for name, several in reasons.items() for why in several),
    ]
    assert dict.fromkeys(names, 0.0) == series(Sidecar(SidecarConfig(otlp=NEVER)))


def now_line(number: int) -> bytes:
    return to_line(numbered(number, ts=timestamp(time.time() + 1), tried=None, est_prompt_tokens=None))


async def test_counted_line_makes_one_span(tmp_path, hasty):
    """Over a rotation, with a line that arrives in two halves, and a log from before the start."""
    log = tmp_path / "requests.jsonl"
    log.write_bytes(
        b"".join(to_line(numbered(number, ts=timestamp(time.time() - 5), tried=None)) for number in range(1000, 1100))
    )
    with http_server(lambda _: (200, PROTOBUF, b"")) as (address, got):
        sidecar = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off", otlp=OtlpConfig(endpoint=address)))
        await sidecar.start()
        try:
            await until(lambda: sidecar.ledger.committed_lines == 100)
            line = now_line(1)
            with log.open("ab", buffering=0) as writer:
                writer.write(line[:50])
                await until(lambda: sidecar.logs.tails[0].unread_bytes() == 50)
                writer.write(line[50:])
                log.rename(tmp_path / "requests.jsonl.1")
                writer.write(now_line(2))
                log.write_bytes(now_line(3))
                await until(lambda: sidecar.ledger.committed_lines == 103)
            await until(lambda: sidecar.spans.sent == 3)
            assert 100 == series(sidecar)["left_out_total reason=history"]
        finally:
            await sidecar.stop()
    assert ["1", "2", "3"] == sorted(
        str(plain(s.attributes)["vllm_watch.request_id"]) for _, _, body in got for s in decoded(body)
    )


async def test_hanging_collector_delays_neither_log_nor_page(tmp_path, hasty, monkeypatch):
    """It takes connections and never answers, while many times what the queue holds comes in."""
    monkeypatch.setattr(span_queue, "QUEUE_LIMIT", 600)
    monkeypatch.setattr(span_queue, "SHUTDOWN_FLUSH_S", 0.1)
    monkeypatch.setattr(collector_module, "EXPORT_TIMEOUT_S", 60)
    log = tmp_path / "requests.jsonl"
    log.touch()
    release = threading.Event()
    with http_server(lambda _: (release.wait(60), (200, {}, b""))[1]) as (address, got):
        sidecar = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off", otlp=OtlpConfig(endpoint=address)))
        await sidecar.start()
        try:
            with log.open("ab", buffering=0) as writer:
                writer.write(now_line(0))
                await until(lambda: got)
                writer.write(b"".join(map(now_line, range(1, 3001))))
            await until(lambda: sidecar.ledger.committed_lines == 3001)
            found = values(sidecar.page())
            assert 3001 == found["vllm_watch_log_lines_total",]
            assert 2400 == found["vllm_watch_spans_dropped_total", "reason=queue_full"]
            assert 601 == found["vllm_watch_spans_waiting",]
            assert 1 == len(got), "one request under way, no more"
        finally:
            release.set()
            await sidecar.stop()


# --- a real collector


def as_json(value: object) -> object:
    """As OTLP writes a value in JSON: 64-bit numbers as text."""
    if isinstance(value, list):
        return {"values": [{"stringValue": item} for item in value]}
    return str(value) if type(value) is int else value


def engine_span() -> dict:
    """The span of a vLLM 0.32 as it was captured, moved below ours."""
    samples = json.loads((Path(__file__).parents[2] / "golden/span-samples.json").read_text())
    captured = next(sample for sample in samples if sample["span"]["name"] == "llm_request")
    start = round((ENDED_S - 1.2) * 1e9)
    moved = {
        "traceId": TRACE,
        "parentSpanId": SPAN,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + 10**9),
        "kind": 2,
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "vllm"}}]}
    return {
        "resourceSpans": [
            {"resource": resource, "scopeSpans": [{"scope": captured["scope"], "spans": [captured["span"] | moved]}]}
        ]
    }


def post_json(address: str, content: dict) -> int:
    request = urllib.request.Request(
        f"http://{address}/v1/traces", json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.status)


@pytest.mark.collector
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_gateway_and_engine_spans_form_one_trace(protocol, collector, hasty):
    """A span of a record and that of the engine become one trace at a real collector."""
    spans = SpanQueue(OtlpConfig(endpoint=f"http://{getattr(collector, protocol)}", protocol=protocol), "9", 0)
    spans.start()
    try:
        eventually(lambda: 200 == post_json(collector.http, engine_span()), what="the engine's span at the collector")
        spans.add(FULL)
        spans.add(numbered(7, outcome="timeout", reason="decode_timeout", status=504))
        eventually(lambda: spans.sent == 2 and len(collector.arrived.spans()) == 3, what="three spans at the store")
    finally:
        spans.stop()
    assert {"queue_full": 0, "refused": 0, "defect": 0} == {
        why: spans.dropped[why] for why in ("queue_full", "refused", "defect")
    }
    found = {
        span["name"] + (f" {span['traceId'][:4]}" if span["traceId"] != TRACE else ""): span
        for span in collector.arrived.spans()
    }
    ours, engines, failed = found["chat qwen"], found["llm_request"], found["chat qwen 0000"]
    assert (TRACE, TRACE, ours["spanId"]) == (ours["traceId"], engines["traceId"], engines["parentSpanId"])
    assert (
        int(ours["startTimeUnixNano"])
        < int(engines["startTimeUnixNano"])
        < int(engines["endTimeUnixNano"])
        < int(ours["endTimeUnixNano"])
    )
    assert ("vllm-watch-gateway", "vllm") == (ours["service"], engines["service"])
    assert ({}, 2) == (ours["status"], failed["status"]["code"])
    assert "decode_timeout" == failed["attributes"]["error.type"]
    assert {name: as_json(value) for name, value in attributes(FULL).items()} == ours["attributes"]


@pytest.mark.collector
async def test_a_collector_that_died_and_came_back_gets_what_waited(collector, tmp_path, hasty):
    """The page says how many are lost by then; the log is counted all the while."""
    log = tmp_path / "requests.jsonl"
    log.touch()
    sidecar = Sidecar(
        SidecarConfig(requests_log=(str(log),), gpu="off", otlp=OtlpConfig(endpoint=f"http://{collector.http}"))
    )
    await sidecar.start()
    try:
        with log.open("ab", buffering=0) as writer:
            writer.write(now_line(0))
            await until(lambda: series(sidecar)["sent_total"] == 1)
            collector.end()
            extra = span_queue.QUEUE_LIMIT + span_queue.BATCH + 100
            writer.write(now_line(1))
            await until(lambda: sidecar.spans._collector.reason == "unavailable")
            writer.write(b"".join(map(now_line, range(2, extra + 2))))
            await until(lambda: sidecar.ledger.committed_lines == extra + 2)
            found = series(sidecar)
            assert span_queue.BATCH + 100 == found["dropped_total reason=unavailable"]
            assert span_queue.QUEUE_LIMIT + 1 == found["waiting"]
            collector.start()
            await until(lambda: series(sidecar)["waiting"] == 0)
            assert span_queue.QUEUE_LIMIT + 2 == series(sidecar)["sent_total"]
            await until(lambda: len(collector.arrived.spans()) == span_queue.QUEUE_LIMIT + 2)
    finally:
        await sidecar.stop()
