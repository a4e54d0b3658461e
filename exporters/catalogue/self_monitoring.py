"""What the watchers say about themselves: Prometheus, Alertmanager and the OpenTelemetry collector.

Only the families that a board of ours reads. Names, kinds and labels are those of pages of Prometheus 3.5.3,
Alertmanager 0.33.1 and otelcol 0.152.0, read from the running programs."""

from exporters.catalogue.metric import Across, Kind, Metric, Unit

# Prometheus: does it evaluate, store and tell?
RULE_FAILURES = Metric(
    "prometheus_rule_evaluation_failures_total", Kind.COUNTER, Unit.COUNT,
    "Evaluations of a rule that failed; an alert whose rule fails cannot fire.", labels=("rule_group",),
    notes=("rule_group holds the file's path and the group's name, joined by a semicolon.",),
)  # fmt: skip
RULE_ITERATIONS_MISSED = Metric(
    "prometheus_rule_group_iterations_missed_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Evaluations of a group that were left out because the one before took longer than the interval.",
    labels=("rule_group",),
)
RULE_GROUP_DURATION = Metric(
    "prometheus_rule_group_last_duration_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "How long the last evaluation of a group took.",
    labels=("rule_group",),
    across=Across.MAX,
)
RULE_GROUP_INTERVAL = Metric(
    "prometheus_rule_group_interval_seconds", Kind.GAUGE, Unit.SECONDS, "How often a group is evaluated.",
    labels=("rule_group",), across=Across.MIN,
)  # fmt: skip
ALERTMANAGERS = Metric(
    "prometheus_notifications_alertmanagers_discovered",
    Kind.GAUGE,
    Unit.COUNT,
    "Alertmanagers that Prometheus knows and sends to.",
    labels=(),
    across=Across.MIN,
)
NOTIFICATIONS_ERRORS = Metric(
    "prometheus_notifications_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Alerts that an Alertmanager did not take.",
    labels=("alertmanager",),
)
NOTIFICATIONS_DROPPED = Metric(
    "prometheus_notifications_dropped_total", Kind.COUNTER, Unit.COUNT,
    "Alerts that Prometheus gave up on: no Alertmanager took them, or the queue was full.", labels=(),
)  # fmt: skip
HEAD_SERIES = Metric(
    "prometheus_tsdb_head_series",
    Kind.GAUGE,
    Unit.COUNT,
    "Series in memory; Prometheus' own memory follows this number.",
    labels=(),
)
SAMPLES_APPENDED = Metric(
    "prometheus_tsdb_head_samples_appended_total", Kind.COUNTER, Unit.COUNT, "Samples stored.", labels=("type",),
)  # fmt: skip
SAMPLES_OUT_OF_ORDER = Metric(
    "prometheus_target_scrapes_sample_out_of_order_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Scraped samples refused because newer ones were stored.",
    labels=(),
)
SAMPLES_DUPLICATE = Metric(
    "prometheus_target_scrapes_sample_duplicate_timestamp_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Scraped samples refused because another value stands at the same time: two targets share their labels, or a page"
    " repeats a series.",
    labels=(),
)
SCRAPES_OVER_LIMIT = Metric(
    "prometheus_target_scrapes_exceeded_sample_limit_total", Kind.COUNTER, Unit.COUNT,
    "Scrapes thrown away whole because the page held more samples than sample_limit allows.", labels=(),
)  # fmt: skip
CONFIG_LOADED = Metric(
    "prometheus_config_last_reload_successful",
    Kind.GAUGE,
    Unit.FLAG,
    "1 when the last reading of the configuration succeeded.",
    labels=(),
    across=Across.MIN,
)
PROMETHEUS_SERVER: tuple[Metric, ...] = (
    RULE_FAILURES, RULE_ITERATIONS_MISSED, RULE_GROUP_DURATION, RULE_GROUP_INTERVAL, ALERTMANAGERS,
    NOTIFICATIONS_ERRORS, NOTIFICATIONS_DROPPED,
    HEAD_SERIES, SAMPLES_APPENDED, SAMPLES_OUT_OF_ORDER, SAMPLES_DUPLICATE, SCRAPES_OVER_LIMIT, CONFIG_LOADED,
)  # fmt: skip

# Alertmanager: do alerts reach anyone?
ALERTMANAGER_ALERTS = Metric(
    "alertmanager_alerts",
    Kind.GAUGE,
    Unit.COUNT,
    "Alerts that Alertmanager holds, by state: active, suppressed, unprocessed.",
    labels=("state",),
    across=Across.MAX,
    notes=("Members of a cluster hold the same alerts, so the highest counts and not the sum.",),
)
ALERTMANAGER_INVALID = Metric(
    "alertmanager_alerts_invalid_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Alerts that Alertmanager received and refused as malformed.",
    labels=("version",),
)
ALERTMANAGER_NOTIFICATIONS = Metric(
    "alertmanager_notifications_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Notifications that Alertmanager tried to send, by way: webhook, email and so on.",
    labels=("integration",),
    notes=("Ways that nobody configured are shown too and stay 0.",),
)
ALERTMANAGER_NOTIFICATIONS_FAILED = Metric(
    "alertmanager_notifications_failed_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Notifications that did not arrive, by way and reason.",
    labels=("integration", "reason"),
    notes=ALERTMANAGER_NOTIFICATIONS.notes,
)
ALERTMANAGER_CONFIG_LOADED = Metric(
    "alertmanager_config_last_reload_successful",
    Kind.GAUGE,
    Unit.FLAG,
    "1 when the last reading of the configuration succeeded.",
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
# leaves the suffix out unless this is false. Both spellings are one quantity, so the bare one stands as a former name.
_BARE = "The name ends in _total only with without_type_suffix: false."
_FIRST = "Absent until the first span arrives."
SPANS_ACCEPTED = Metric(
    "otelcol_receiver_accepted_spans_total", Kind.COUNTER, Unit.ITEMS, "Spans that the collector took.",
    labels=("receiver", "transport"), formerly=("otelcol_receiver_accepted_spans",), notes=(_BARE, _FIRST),
)  # fmt: skip
SPANS_REFUSED = Metric(
    "otelcol_receiver_refused_spans_total", Kind.COUNTER, Unit.ITEMS,
    "Spans that the collector sent back because the pipeline was full; the memory limiter does that first.",
    labels=("receiver", "transport"), formerly=("otelcol_receiver_refused_spans",), notes=(_BARE, _FIRST),
)  # fmt: skip
SPANS_SENT = Metric(
    "otelcol_exporter_sent_spans_total", Kind.COUNTER, Unit.ITEMS, "Spans that arrived at the trace store.",
    labels=("exporter",), formerly=("otelcol_exporter_sent_spans",),
    notes=(_BARE, _FIRST, "Exporters over HTTP and gRPC add the server's address and path as labels."),
)  # fmt: skip
SPANS_SEND_FAILED = Metric(
    "otelcol_exporter_send_failed_spans_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Spans that were given up after the last retry.",
    labels=("exporter",),
    formerly=("otelcol_exporter_send_failed_spans",),
    notes=(_BARE, "Absent until spans are given up for the first time."),
)
EXPORT_QUEUE = Metric(
    "otelcol_exporter_queue_size",
    Kind.GAUGE,
    Unit.ITEMS,
    "Batches that wait to be sent.",
    labels=("data_type", "exporter"),
    notes=("Exporters without a sending queue, such as debug, do not show it.",),
)
EXPORT_QUEUE_CAPACITY = Metric(
    "otelcol_exporter_queue_capacity",
    Kind.GAUGE,
    Unit.ITEMS,
    "Batches that may wait to be sent; more are thrown away.",
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
