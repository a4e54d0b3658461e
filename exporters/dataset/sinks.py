"""Recipes for systems that receive request lines directly, with request_id as the key. Pure.

Delivery is at least once everywhere: a line may arrive twice, and the key identifies it. Segments are the record; a
sink is a copy of it."""

from __future__ import annotations

from collections.abc import Callable

from exporters.dataset import columns
from exporters.dataset.engine_sql import CLICKHOUSE_TYPES

_VECTOR = """# vector.yaml: follows the log with its rotated files, and keeps its position
data_dir: /var/lib/vector
sources:
  requests:
    type: file
    include: [/var/log/vllm-watch/requests.jsonl]
    fingerprint: {strategy: checksum}
transforms:
  parsed:
    type: remap
    inputs: [requests]
    source: |
      . = parse_json!(string!(.message))
sinks:
"""


def clickhouse() -> str:
    """Return a table that keeps one row for each request, and the sink."""
    keyed = ("request_id", "span_id")
    rows = ",\n  ".join(
        f"{c.name} {CLICKHOUSE_TYPES[c.type]}" if c.name in keyed else f"{c.name} Nullable({CLICKHOUSE_TYPES[c.type]})"
        for c in columns.OF_RECORD
    )
    return (
        "-- One row for each request: query with FINAL, or SELECT ... LIMIT 1 BY request_id, span_id.\n"
        f"CREATE TABLE IF NOT EXISTS requests (\n  {rows}\n)\n"
        "ENGINE = ReplacingMergeTree\nPARTITION BY toDate(assumeNotNull(ts))\nORDER BY (request_id, span_id);\n\n"
        + _VECTOR
        + "  clickhouse:\n    type: clickhouse\n    inputs: [parsed]\n    endpoint: http://127.0.0.1:8123\n"
        "    table: requests\n    skip_unknown_fields: true\n    date_time_best_effort: true\n"
    )


def kafka() -> str:
    """Return a compacted topic keyed by request, and the sink."""
    return (
        "# Compaction keeps the newest line of a request_id.\n"
        "#   kafka-topics.sh --create --topic vllm-requests --partitions 12 --config cleanup.policy=compact,delete\n"
        + _VECTOR
        + "  kafka:\n    type: kafka\n    inputs: [parsed]\n    bootstrap_servers: 127.0.0.1:9092\n"
        "    topic: vllm-requests\n    key_field: request_id\n    encoding: {codec: json}\n"
        "    librdkafka_options: {enable.idempotence: 'true', acks: all}\n"
    )


def nats() -> str:
    """Return a stream that drops a repeated request within its window, and the sink."""
    return (
        "# JetStream drops a message whose Nats-Msg-Id it has seen within --dupe-window. It has span_id, as clients\n"
        "# may send a request_id twice.\n"
        "#   nats stream add VLLM_REQUESTS --subjects 'vllm.requests' --storage file --dupe-window 1h --defaults\n"
        + _VECTOR
        + "  nats:\n    type: nats\n    inputs: [parsed]\n    url: nats://127.0.0.1:4222\n    subject: vllm.requests\n"
        "    encoding: {codec: json}\n    jetstream:\n      enabled: true\n"
        "      headers: {message_id: '{{ request_id }}-{{ span_id }}'}\n"
    )


def loki() -> str:
    """Return the sink, with the id as structured metadata: as a label it would make a stream of each request."""
    return (
        "# request_id is structured metadata, never a label. Loki drops a line that repeats one of the same time.\n"
        + _VECTOR
        + "  loki:\n    type: loki\n    inputs: [parsed]\n    endpoint: http://127.0.0.1:3100\n"
        "    labels: {job: vllm-requests, team: '{{ team }}', model: '{{ model }}', outcome: '{{ outcome }}'}\n"
        "    structured_metadata: {request_id: '{{ request_id }}', trace_id: '{{ trace_id }}'}\n"
        "    encoding: {codec: json}\n    remove_timestamp: false\n"
    )


SINKS: dict[str, Callable[[], str]] = {"clickhouse": clickhouse, "kafka": kafka, "nats": nats, "loki": loki}
