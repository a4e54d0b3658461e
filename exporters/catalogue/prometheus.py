"""Series that Prometheus makes for every target and rule, and the one that client libraries share."""

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_TARGET = ("instance", "job")
UP = Metric(
    "up", Kind.GAUGE, Unit.FLAG, "1 when the last scrape of a target succeeded.", labels=_TARGET, across=Across.MIN
)
SCRAPE_DURATION = Metric(
    "scrape_duration_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "Duration of the target's last scrape.",
    labels=_TARGET,
    across=Across.MAX,
)
SCRAPE_SAMPLES = Metric(
    "scrape_samples_scraped", Kind.GAUGE, Unit.COUNT, "Samples in the target's last scrape.", labels=_TARGET
)
SCRAPE_SAMPLES_KEPT = Metric(
    "scrape_samples_post_metric_relabeling",
    Kind.GAUGE,
    Unit.COUNT,
    "Samples of the target's last scrape after metric_relabel_configs. sample_limit applies to this value.",
    labels=_TARGET,
)
SAMPLE_LIMIT = Metric(
    "scrape_sample_limit",
    Kind.GAUGE,
    Unit.COUNT,
    "The sample_limit of the target's job; 0 without a limit.",
    labels=_TARGET,
    across=Across.MAX,
    needs="--enable-feature=extra-scrape-metrics on Prometheus",
)
ALERTS = Metric(
    "ALERTS",
    Kind.GAUGE,
    Unit.FLAG,
    "1 for every alert that is pending or firing.",
    labels=("alertname", "alertstate", "severity"),
)
PROCESS_START = Metric(
    "process_start_time_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Start time of the target's process.",
    labels=_TARGET,
    across=Across.MAX,
    notes=("Not exposed by the sidecar, nor by vLLM with several API servers.",),
)

SCRAPE = (UP, SCRAPE_DURATION, SCRAPE_SAMPLES, SCRAPE_SAMPLES_KEPT, SAMPLE_LIMIT)
PROMETHEUS = (*SCRAPE, ALERTS, PROCESS_START)
