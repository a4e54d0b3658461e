"""Every alert, grouped by what it watches, and the series recorded for them."""

from __future__ import annotations

from alerts import thresholds
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Recording, Severity
from exporters.catalogue import ours, promql, vllm
from exporters.catalogue.prometheus import UP

WHERE = ("instance", "model_name")
ENGINE_JOB = 'job=~"vllm.*"'  # scrape jobs whose name starts with vllm hold engines
SIDECAR_JOB = 'job="sidecar"'

ENGINE = (
    Alert(
        name="VLLMEngineDown",
        severity=Severity.CRITICAL,
        expr=f"{promql.series(UP, (ENGINE_JOB,))} == 0",
        hold="1m",
        summary="A vLLM engine does not answer its scrape.",
        description="{{ $labels.instance }} has not answered Prometheus for a minute: its users get connection errors, "
        "or the network between is gone.",
        panel=PanelRef("overview", "engines-up"),
    ),
    Alert(
        name="VLLMKVCacheNearlyFull",
        severity=Severity.WARNING,
        expr=f"{promql.worst(vllm.KV_CACHE_USAGE, WHERE)} > {thresholds.KV_CACHE_USAGE}",
        hold="5m",
        keep_firing="2m",
        summary="The KV cache of an engine is nearly full.",
        description="{{ $labels.model_name }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its KV-cache blocks; "
        "preemptions come next.",
        panel=PanelRef("overview", "kv-cache-usage"),
        threshold=thresholds.KV_CACHE_USAGE,
    ),
    Alert(
        name="VLLMQueueTimeHigh",
        severity=Severity.WARNING,
        expr=f"{promql.quantile(0.95, vllm.REQUEST_QUEUE_TIME, by=WHERE)} > {thresholds.QUEUE_TIME_P95}",
        hold="5m",
        keep_firing="5m",
        summary="Requests wait long in an engine's queue.",
        description="On {{ $labels.instance }} one request for {{ $labels.model_name }} in twenty waits {{ $value | humanizeDuration }} or longer "
        "before it is scheduled.",
        panel=PanelRef("overview", "queue-time"),
        threshold=thresholds.QUEUE_TIME_P95,
    ),
)

_FAILED = 'outcome=~"upstream_error|timeout"'
TRAFFIC = (
    Alert(
        name="VLLMErrorRatioHigh",
        severity=Severity.WARNING,
        expr=f"{promql.share(ours.REQUESTS, ours.REQUESTS, part_where=(_FAILED,))} > {thresholds.ERROR_RATIO} "
        f"and {promql.growth(ours.REQUESTS, where=(_FAILED,))} >= {thresholds.ERRORS_AT_LEAST}",
        hold="5m",
        keep_firing="5m",
        summary="Too many requests fail.",
        description="{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} end in an error or a timeout.",
        panel=PanelRef("overview", "error-ratio"),
        threshold=thresholds.ERROR_RATIO,
    ),
)

WATCHERS = (
    Alert(
        name="VLLMSidecarDown",
        severity=Severity.WARNING,
        expr=f"{promql.series(UP, (SIDECAR_JOB,))} == 0",
        hold="2m",
        summary="The sidecar exporter does not answer.",
        description="{{ $labels.instance }} does not answer: figures per team, from the request log and the GPU stand still. Serving goes on.",
        panel=PanelRef("watch", "targets-up"),
    ),
    Alert(
        name="VLLMWatchdog",
        severity=Severity.INFO,
        expr="vector(1) > 0",
        hold="0s",
        summary="Alerting works from end to end.",
        description="This alert always fires. When it stops arriving, Prometheus, Alertmanager or the way to you is broken.",
        panel=PanelRef("overview", "firing-alerts"),
    ),
)

RECORDINGS = (
    Recording("model_name:vllm_ttft_seconds:p95_5m", promql.quantile(0.95, vllm.TIME_TO_FIRST_TOKEN)),
    Recording("model_name:vllm_inter_token_latency_seconds:p95_5m", promql.quantile(0.95, vllm.INTER_TOKEN_LATENCY)),
    Recording("model_name:vllm_queue_time_seconds:p95_5m", promql.quantile(0.95, vllm.REQUEST_QUEUE_TIME)),
    Recording("model_name:vllm_prefix_cache_hits:ratio_5m", promql.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES)),
    Recording("model_name:vllm_generation_tokens:rate5m", promql.per_second(vllm.GENERATION_TOKENS)),
    Recording("model_name:vllm_prompt_tokens:rate5m", promql.per_second(vllm.PROMPT_TOKENS)),
)

FAMILIES: dict[str, tuple[Alert, ...]] = {"engine": ENGINE, "traffic": TRAFFIC, "watchers": WATCHERS}
ALERTS: tuple[Alert, ...] = tuple(alert for family in FAMILIES.values() for alert in family)
