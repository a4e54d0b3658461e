"""GenAI metrics of request records: the OpenTelemetry names for what the gateway measured.

Units, bucket bounds and attributes are those of the semantic conventions for generative AI metrics (Development;
repository open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-metrics.md). They count the same records as
the series of the sidecar's own /metrics endpoint, from the start of the process on; the SDK aggregates and exports
them every minute (`OTEL_METRIC_EXPORT_INTERVAL`).

Invariant: the number of attribute sets is bounded. A model or error without a series of its own in the counters is
counted as `__other__` or `_OTHER`, a team is no attribute, and beyond 2,000 sets the SDK counts under
`otel.metric.overflow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from exporters.requests.bounded_names import OTHER, BoundedNames
from exporters.requests.counters import REASONS_LIMIT
from exporters.requests.record import RequestRecord, ended_at
from exporters.tracing.collector import SERVICE, SHUTDOWN_FLUSH_S, CollectorState, Observe
from exporters.tracing.config import OtlpConfig
from exporters.tracing.spans import failure, operation
from exporters.tracing.transport import metric_exporter

_TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKEN_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
_OPERATIONS_LIMIT = 20  # the log of another gateway may have any route
_ADAPTERS_LIMIT = 50
_OTHER_ERROR = "_OTHER"  # the conventions' fallback


class GenAiMetrics:
    """Records GenAI metrics. Call `start` and `stop` once each."""

    def __init__(
        self,
        config: OtlpConfig,
        version: str,
        since_s: float,
        models: BoundedNames,
        make_exporter: Callable[[OtlpConfig, str, Observe], MetricExporter] = metric_exporter,
    ) -> None:
        """since_s: unix seconds; earlier records are skipped, as for spans.

        models: the counters' table of models, filled by the counters. Raises as `collector.connection`."""
        self._since_s, self._version, self._models = since_s, version, models
        self._operations, self._adapters = BoundedNames((), _OPERATIONS_LIMIT), BoundedNames((), _ADAPTERS_LIMIT)
        self._errors = BoundedNames((_OTHER_ERROR,), REASONS_LIMIT)
        self._collector = CollectorState(config.endpoint, "metrics", "the next export holds what this one did")
        self._exporter = make_exporter(config, version, self._collector.observe)

    def start(self) -> None:
        """Create the instruments and start the SDK's export thread."""
        reader = PeriodicExportingMetricReader(self._exporter)
        self._provider = MeterProvider(
            [reader], Resource.create({"service.name": SERVICE}), AlwaysOffExemplarFilter(), shutdown_on_exit=False
        )
        histogram = self._provider.get_meter("vllm-watch", self._version).create_histogram
        self._duration = histogram(
            "gen_ai.server.request.duration",
            "s",
            "Generative AI server request duration such as time-to-last byte or last output token.",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS,
        )
        self._ttft = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to generate first token for successful responses.",
            explicit_bucket_boundaries_advisory=_TTFT_BOUNDS,
        )
        self._tpot = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token generated after the first token for successful responses.",
            explicit_bucket_boundaries_advisory=_TPOT_BOUNDS,
        )
        self._tokens = histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=_TOKEN_BOUNDS,
        )

    def stop(self) -> None:
        """Export once more if that is quick; wait at most SHUTDOWN_FLUSH_S."""
        self._provider.shutdown(SHUTDOWN_FLUSH_S * 1000)

    def add_all(self, records: Iterable[RequestRecord]) -> None:
        """Record the values of each record; missing values are omitted, never recorded as 0.

        Costs 6 us per value, whatever the collector does."""
        for record in records:
            if (ended := ended_at(record)) is None or ended >= self._since_s:
                self._add(record)

    def _add(self, record: RequestRecord) -> None:
        attributes = self._attributes(record)
        if record.e2e_ms is not None:
            error = self._error(record)
            self._duration.record(
                record.e2e_ms / 1000, attributes if error is None else {**attributes, "error.type": error}
            )
        if record.ttft_ms is not None:
            self._ttft.record(record.ttft_ms / 1000, attributes)
        if record.tpot_ms is not None:
            self._tpot.record(record.tpot_ms / 1000, attributes)
        if record.prompt_tokens is not None:
            self._tokens.record(record.prompt_tokens, {**attributes, "gen_ai.token.type": "input"})
        if record.completion_tokens is not None:
            self._tokens.record(record.completion_tokens, {**attributes, "gen_ai.token.type": "output"})

    def _attributes(self, record: RequestRecord) -> dict[str, str]:
        attributes = {
            "gen_ai.operation.name": self._operations.fold(operation(record.route)),
            "gen_ai.provider.name": "vllm",
        }
        if record.model is not None:
            model = record.model if record.model in self._models else OTHER
            attributes["gen_ai.request.model"] = model
            if record.outcome in ("ok", None):  # vLLM reports the adapter's name, if one was requested
                attributes["gen_ai.response.model"] = (
                    model if record.adapter is None else self._adapters.fold(record.adapter)
                )
        return attributes

    def _error(self, record: RequestRecord) -> str | None:
        """Return error.type.

        A rejected request has one here and none on its span: a histogram has no outcome to identify it by."""
        error = (record.reason or _OTHER_ERROR) if record.outcome == "rejected" else failure(record)
        if error is None:
            return None
        return error if self._errors.fold(error) == error else _OTHER_ERROR
