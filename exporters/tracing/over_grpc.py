"""OTLP over gRPC: the SDK's exporters with a client that reports each request."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

from exporters.tracing.collector import Attempt, Connection, Observe

# OTLP specification, "OTLP/gRPC Response". RESOURCE_EXHAUSTED is not among them: mostly the request is too large for
# the collector.
_RETRIED = frozenset(
    grpc.StatusCode[name]
    for name in ("ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED", "OUT_OF_RANGE", "UNAVAILABLE")
)
# Without these a channel to a collector that was away for long waits two minutes before its next attempt.
_RECONNECT = (("grpc.min_reconnect_backoff_ms", 1000), ("grpc.max_reconnect_backoff_ms", 5000))


class _ReportingClient:
    """Client of a collector service that reports each attempt."""

    def __init__(self, client: Any, observe: Observe, connection: Connection) -> None:
        self._client, self._observe, self._connection = client, observe, connection

    def Export(self, **call: Any) -> Any:  # noqa: N802 (the name in the service definition)
        try:
            response = self._client.Export(**call)
        except grpc.RpcError as error:
            if call["timeout"] >= self._connection.least_s:
                self._observe(self._failure(error))
            raise
        partial = response.partial_success
        rejected = partial.rejected_spans if hasattr(partial, "rejected_spans") else partial.rejected_data_points
        self._observe(Attempt(None, partial.error_message[:200], max(0, rejected)))
        return response

    def _failure(self, error: Any) -> Attempt:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Attempt("timeout", f"no answer within {self._connection.timeout_s:g} s")
        return Attempt("unavailable" if code in _RETRIED else "refused", f"{code.name}: {error.details()}")


def _reporting_exporter(base: Any, connection: Connection, observe: Observe) -> Any:
    class ReportingExporter(base):  # type: ignore[misc]
        def _initialize_channel_and_stub(self) -> None:
            """Put the reporting client over the stub of each new channel: the exporter has no other place for an
            interceptor."""
            super()._initialize_channel_and_stub()
            self._client: Any = _ReportingClient(self._client, observe, connection)

    url = urlsplit(connection.endpoint)
    return ReportingExporter(
        endpoint=f"{url.scheme}://{url.netloc}" if url.port is not None else f"{url.scheme}://{url.netloc}:443",
        insecure=url.scheme == "http",
        credentials=_credentials(connection) if url.scheme == "https" else None,
        headers=dict(connection.headers),
        timeout=connection.timeout_s,
        compression=grpc.Compression.Gzip if connection.gzip else grpc.Compression.NoCompression,
        channel_options=(
            *_RECONNECT,
            ("grpc.enable_http_proxy", 0),
            ("grpc.primary_user_agent", connection.user_agent),
        ),
        retryable_error_codes=_RETRIED,
    )


def _credentials(connection: Connection) -> grpc.ChannelCredentials:
    """Return the authorities to trust: the configured ones, else those of the system, else those that gRPC brings."""
    authorities = connection.ca_file or ssl.get_default_verify_paths().cafile
    return grpc.ssl_channel_credentials(Path(authorities).read_bytes() if authorities else None)


def span_exporter(connection: Connection, observe: Observe) -> OTLPSpanExporter:
    exporter: OTLPSpanExporter = _reporting_exporter(OTLPSpanExporter, connection, observe)
    return exporter


def metric_exporter(connection: Connection, observe: Observe) -> OTLPMetricExporter:
    exporter: OTLPMetricExporter = _reporting_exporter(OTLPMetricExporter, connection, observe)
    return exporter
