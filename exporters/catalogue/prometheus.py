"""The few series that Prometheus itself makes for every target and every rule, and the one that its clients share."""

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_TARGET = ("instance", "job")
UP = Metric(
    "up", Kind.GAUGE, Unit.FLAG, "1 when the last scrape of a target succeeded.", labels=_TARGET, across=Across.MIN
)
SCRAPE_DURATION = Metric(
    "scrape_duration_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "How long the last scrape of a target took.",
    labels=_TARGET,
    across=Across.MAX,
)
SCRAPE_SAMPLES = Metric(
    "scrape_samples_scraped",
    Kind.GAUGE,
    Unit.COUNT,
    "Samples that the last scrape of a target brought.",
    labels=_TARGET,
)
SCRAPE_SAMPLES_KEPT = Metric(
    "scrape_samples_post_metric_relabeling",
    Kind.GAUGE,
    Unit.COUNT,
    "Samples of the last scrape of a target that its job's metric_relabel_configs left: what sample_limit is held"
    " against.",
    labels=_TARGET,
)
SAMPLE_LIMIT = Metric(
    "scrape_sample_limit",
    Kind.GAUGE,
    Unit.COUNT,
    "The sample_limit of a target's job; 0 where it has none.",
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
    "When the process behind a target started.",
    labels=_TARGET,
    across=Across.MAX,
    notes=("Our sidecar does not show it, and vLLM not with several API servers.",),
)

SCRAPE = (UP, SCRAPE_DURATION, SCRAPE_SAMPLES, SCRAPE_SAMPLES_KEPT, SAMPLE_LIMIT)
PROMETHEUS = (*SCRAPE, ALERTS, PROCESS_START)
