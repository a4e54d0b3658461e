"""Choice of the SDK's exporters by the configured protocol."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING

from exporters.tracing.collector import Observe, connection
from exporters.tracing.config import OtlpConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter


def span_exporter(config: OtlpConfig, version: str, observe: Observe) -> SpanExporter:
    """Return the SDK's span exporter for this configuration. Raises as `connection`."""
    made: SpanExporter = _transport(config).span_exporter(connection(config, version), observe)
    return made


def metric_exporter(config: OtlpConfig, version: str, observe: Observe) -> MetricExporter:
    """Return the SDK's metric exporter for this configuration. Raises as `connection`."""
    made: MetricExporter = _transport(config).metric_exporter(connection(config, version), observe)
    return made


def _transport(config: OtlpConfig) -> ModuleType:
    """Import the exporters of the configured protocol, and no others: gRPC alone costs 12 MiB."""
    # They log every retry; CollectorState logs every change.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    if config.protocol == "grpc":
        from exporters.tracing import over_grpc

        return over_grpc
    from exporters.tracing import over_http

    return over_http
