"""Request spans and GenAI metrics, sent to an OpenTelemetry collector by the OpenTelemetry SDK and its OTLP exporters.

OpenTelemetry is imported in this package only, and only where the configuration has `otlp`: the SDK costs memory and
start-up time."""
