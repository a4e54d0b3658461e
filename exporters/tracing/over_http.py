"""OTLP over HTTP: the SDK's exporters on a session that reports each request."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from exporters.tracing.collector import MAX_RETRY_AFTER_S, Attempt, Connection, Observe, innermost

_RETRIED_STATUS = (429, 502, 503, 504)  # OTLP specification, "Retryable Response Codes"; the SDK retries the same
_MAX_RESPONSE_BYTES = 1 << 16


class _ReportingSession(requests.Session):
    """Session that reports each attempt, reads a bounded response, and takes no proxy or login from the environment."""

    def __init__(self, observe: Observe, path: str, connection: Connection) -> None:
        super().__init__()
        self.trust_env = False
        self._observe, self._path, self._connection = observe, path, connection

    def request(self, method: str, url: str, **options: Any) -> requests.Response:  # type: ignore[override]
        try:
            response = super().request(method, url, **(options | {"stream": True}))
            content = response.raw.read(_MAX_RESPONSE_BYTES, decode_content=True)
        except Exception as error:
            if options["timeout"] >= self._connection.least_s:
                self._observe(self._failure(error, url))
            raise
        response.close()  # a connection whose response was read to its end is back in the pool by now
        self._observe(self._outcome(response, content))
        return response

    def _failure(self, error: Exception, url: str) -> Attempt:
        cause = innermost(error)
        if isinstance(cause, TimeoutError):
            return Attempt("timeout", f"no answer within {self._connection.timeout_s:g} s")
        hint = "; 4317 is usually the port for gRPC" if urlsplit(url).port == 4317 else ""
        return Attempt("unavailable", f"{type(cause).__name__}: {cause}{hint}")

    def _outcome(self, response: requests.Response, content: bytes) -> Attempt:
        if response.status_code in _RETRIED_STATUS:
            after = response.headers.get("Retry-After", "")
            wait_s = min(float(after), MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0
            return Attempt("unavailable", f"HTTP status {response.status_code}", retry_after_s=wait_s)
        if not 200 <= response.status_code < 300:
            return Attempt("refused", f"HTTP status {response.status_code} to {self._path}")
        is_protobuf = response.headers.get("Content-Type", "").startswith("application/x-protobuf")
        return Attempt(None, *_rejected(self._path, content)) if is_protobuf else Attempt()


def _rejected(path: str, content: bytes) -> tuple[str, int]:
    """Return why the collector refused some items of a request that it accepted, and how many."""
    try:
        if path.endswith("metrics"):
            metrics = ExportMetricsServiceResponse.FromString(content).partial_success
            return metrics.error_message[:200], max(0, metrics.rejected_data_points)
        spans = ExportTraceServiceResponse.FromString(content).partial_success
        return spans.error_message[:200], max(0, spans.rejected_spans)
    except Exception:  # no protobuf; the status says that it was accepted
        return "", 0


def _options(connection: Connection, observe: Observe, path: str) -> dict[str, Any]:
    # Without a file, requests uses its own CA bundle, which lacks an organization's CA.
    system = ssl.get_default_verify_paths()
    authorities = connection.ca_file or system.cafile or system.capath
    return {
        "endpoint": connection.endpoint + path,
        "certificate_file": str(authorities) if authorities else None,
        "headers": {"user-agent": connection.user_agent, **connection.headers},
        "timeout": connection.timeout_s,
        "compression": Compression.Gzip if connection.gzip else Compression.NoCompression,
        "session": _ReportingSession(observe, path, connection),
    }


def span_exporter(connection: Connection, observe: Observe) -> OTLPSpanExporter:
    return OTLPSpanExporter(**_options(connection, observe, "/v1/traces"))


def metric_exporter(connection: Connection, observe: Observe) -> OTLPMetricExporter:
    return OTLPMetricExporter(**_options(connection, observe, "/v1/metrics"))
