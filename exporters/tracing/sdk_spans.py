"""Spans of the OpenTelemetry SDK, made after the fact from request records."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from exporters.tracing.spans import Span, attributes

_ERROR = Status(StatusCode.ERROR)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _RecordedIds(IdGenerator):
    """Id generator that returns the ids sent to the engine by the gateway."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _LastEnded(SpanProcessor):
    """Keeps the span that ended last."""

    last: ReadableSpan

    def on_end(self, span: ReadableSpan) -> None:
        self.last = span


class SpanFactory:
    """Factory of SDK spans with a tracer of its own. For one thread."""

    def __init__(self, service: str, version: str) -> None:
        self._ids, self._ended = _RecordedIds(), _LastEnded()
        provider = TracerProvider(
            ALWAYS_ON, Resource.create({"service.name": service}), shutdown_on_exit=False, id_generator=self._ids
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("vllm-watch", version)

    def make(self, request: Span) -> ReadableSpan:
        """Return the ended span of a request, with the ids and times of its record."""
        found = attributes(request.record)
        self._ids.trace_id, self._ids.span_id = int.from_bytes(request.trace_id), int.from_bytes(request.span_id)
        parent = trace.INVALID_SPAN
        if request.parent_id:
            parent = NonRecordingSpan(
                SpanContext(self._ids.trace_id, int.from_bytes(request.parent_id), True, _SAMPLED)
            )
        span = self._tracer.start_span(
            f"{found['gen_ai.operation.name']} {request.record.model or ''}".rstrip(),
            trace.set_span_in_context(parent, Context()),
            SpanKind.SERVER,
            found,
            start_time=request.start_ns,
        )
        if "error.type" in found:
            span.set_status(_ERROR)
        span.end(request.end_ns)
        return self._ended.last
