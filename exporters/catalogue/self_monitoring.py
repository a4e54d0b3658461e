"""Series of the monitoring components: Prometheus, Alertmanager and the OpenTelemetry collector.

Only the families that a dashboard reads. Names, kinds and labels were read from running programs: Prometheus 3.5.3,
Alertmanager 0.33.1 and otelcol 0.152.0."""

from exporters.catalogue.metric import Across, Kind, Metric, Unit

# Prometheus: rule evaluation, storage, notifications
RULE_FAILURES = Metric(
    "prometheus_rule_evaluation_failures_total", Kind.COUNTER, Unit.COUNT,
    "Failed rule evaluations; an alert whose rule fails cannot fire.", labels=("rule_group",),
    notes=("rule_group holds the file's path and the group's name, joined by a semicolon.",),
)  # fmt: skip
RULE_ITERATIONS_MISSED = Metric(
    "prometheus_rule_group_iterations_missed_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Skipped evaluations of a rule group because the previous one took longer than the interval.",
    labels=("rule_group",),
)
RULE_GROUP_DURATION = Metric(
    "prometheus_rule_group_last_duration_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "Duration of the rule group's last evaluation.",
    labels=("rule_group",),
    across=Across.MAX,
)
RULE_GROUP_INTERVAL = Metric(
    "prometheus_rule_group_interval_seconds", Kind.GAUGE, Unit.SECONDS, "Evaluation interval of the rule group.",
    labels=("rule_group",), across=Across.MIN,
)  # fmt: skip
ALERTMANAGERS = Metric(
    "prometheus_notifications_alertmanagers_discovered",
    Kind.GAUGE,
    Unit.COUNT,
    "Discovered Alertmanagers that Prometheus sends to.",
    labels=(),
    across=Across.MIN,
)
NOTIFICATIONS_ERRORS = Metric(
    "prometheus_notifications_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Alerts that failed to send to an Alertmanager.",
    labels=("alertmanager",),
)
NOTIFICATIONS_DROPPED = Metric(
    "prometheus_notifications_dropped_total", Kind.COUNTER, Unit.COUNT,
    "Alerts dropped by Prometheus: no Alertmanager accepted them, or the queue was full.", labels=(),
)  # fmt: skip
HEAD_SERIES = Metric(
    "prometheus_tsdb_head_series",
    Kind.GAUGE,
    Unit.COUNT,
    "Series in memory; Prometheus' memory use follows this value.",
    labels=(),
)
SAMPLES_APPENDED = Metric(
    "prometheus_tsdb_head_samples_appended_total", Kind.COUNTER, Unit.COUNT, "Samples stored.", labels=("type",),
)  # fmt: skip
SAMPLES_OUT_OF_ORDER = Metric(
    "prometheus_target_scrapes_sample_out_of_order_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Scraped samples rejected because newer ones were stored.",
    labels=(),
)
SAMPLES_DUPLICATE = Metric(
    "prometheus_target_scrapes_sample_duplicate_timestamp_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Scraped samples rejected because another value has the same timestamp: two targets share their labels, or a"
    " target repeats a series.",
    labels=(),
)
SCRAPES_OVER_LIMIT = Metric(
    "prometheus_target_scrapes_exceeded_sample_limit_total", Kind.COUNTER, Unit.COUNT,
    "Scrapes discarded because they held more samples than sample_limit allows.", labels=(),
)  # fmt: skip
CONFIG_LOADED = Metric(
    "prometheus_config_last_reload_successful",
    Kind.GAUGE,
    Unit.FLAG,
    "1 if the last configuration reload succeeded.",
    labels=(),
    across=Across.MIN,
)
PROMETHEUS_SERVER: tuple[Metric, ...] = (
    RULE_FAILURES, RULE_ITERATIONS_MISSED, RULE_GROUP_DURATION, RULE_GROUP_INTERVAL, ALERTMANAGERS,
    NOTIFICATIONS_ERRORS, NOTIFICATIONS_DROPPED,
    HEAD_SERIES, SAMPLES_APPENDED, SAMPLES_OUT_OF_ORDER, SAMPLES_DUPLICATE, SCRAPES_OVER_LIMIT, CONFIG_LOADED,
)  # fmt: skip

# Alertmanager: delivery of alerts
ALERTMANAGER_ALERTS = Metric(
    "alertmanager_alerts",
    Kind.GAUGE,
    Unit.COUNT,
    "Alerts that Alertmanager holds, by state: active, suppressed, unprocessed.",
    labels=("state",),
    across=Across.MAX,
    notes=("Cluster members hold the same alerts: use the maximum, not the sum.",),
)
ALERTMANAGER_INVALID = Metric(
    "alertmanager_alerts_invalid_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Alerts received and rejected as malformed.",
    labels=("version",),
)
ALERTMANAGER_NOTIFICATIONS = Metric(
    "alertmanager_notifications_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Notifications that Alertmanager attempted, by integration: webhook, email and so on.",
    labels=("integration",),
    notes=("Integrations that are not configured are exposed too and stay 0.",),
)
ALERTMANAGER_NOTIFICATIONS_FAILED = Metric(
    "alertmanager_notifications_failed_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Failed notifications, by integration and reason.",
    labels=("integration", "reason"),
    notes=ALERTMANAGER_NOTIFICATIONS.notes,
)
ALERTMANAGER_CONFIG_LOADED = Metric(
    "alertmanager_config_last_reload_successful",
    Kind.GAUGE,
    Unit.FLAG,
    "1 if the last configuration reload succeeded.",
    labels=(),
    across=Across.MIN,
)
ALERTMANAGER: tuple[Metric, ...] = (
    ALERTMANAGER_ALERTS,
    ALERTMANAGER_INVALID,
    ALERTMANAGER_NOTIFICATIONS,
    ALERTMANAGER_NOTIFICATIONS_FAILED,
    ALERTMANAGER_CONFIG_LOADED,
)

# The collector. Its counters end in _total or not, depending on `without_type_suffix` of its metrics reader: 0.152.0
# leaves the suffix out unless this is false. Both names mean one quantity, so the bare one is listed as a former name.
_BARE = "The name ends in _total only with without_type_suffix: false."
_FIRST = "Absent until the first span arrives."
SPANS_ACCEPTED = Metric(
    "otelcol_receiver_accepted_spans_total", Kind.COUNTER, Unit.ITEMS, "Spans accepted by the collector.",
    labels=("receiver", "transport"), formerly=("otelcol_receiver_accepted_spans",), notes=(_BARE, _FIRST),
)  # fmt: skip
SPANS_REFUSED = Metric(
    "otelcol_receiver_refused_spans_total", Kind.COUNTER, Unit.ITEMS,
    "Spans refused because the pipeline was full, usually by the memory limiter.",
    labels=("receiver", "transport"), formerly=("otelcol_receiver_refused_spans",), notes=(_BARE, _FIRST),
)  # fmt: skip
SPANS_SENT = Metric(
    "otelcol_exporter_sent_spans_total", Kind.COUNTER, Unit.ITEMS, "Spans delivered to the trace store.",
    labels=("exporter",), formerly=("otelcol_exporter_sent_spans",),
    notes=(_BARE, _FIRST, "Exporters over HTTP and gRPC add the server's address and path as labels."),
)  # fmt: skip
SPANS_SEND_FAILED = Metric(
    "otelcol_exporter_send_failed_spans_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Spans dropped after the last retry.",
    labels=("exporter",),
    formerly=("otelcol_exporter_send_failed_spans",),
    notes=(_BARE, "Absent until spans are first dropped."),
)
EXPORT_QUEUE = Metric(
    "otelcol_exporter_queue_size",
    Kind.GAUGE,
    Unit.ITEMS,
    "Batches in the sending queue.",
    labels=("data_type", "exporter"),
    notes=("Exporters without a sending queue, such as debug, do not expose it.",),
)
EXPORT_QUEUE_CAPACITY = Metric(
    "otelcol_exporter_queue_capacity",
    Kind.GAUGE,
    Unit.ITEMS,
    "Capacity of the sending queue in batches; further ones are dropped.",
    labels=("data_type", "exporter"),
    notes=EXPORT_QUEUE.notes,
)
COLLECTOR: tuple[Metric, ...] = (
    SPANS_ACCEPTED,
    SPANS_REFUSED,
    SPANS_SENT,
    SPANS_SEND_FAILED,
    EXPORT_QUEUE,
    EXPORT_QUEUE_CAPACITY,
)
