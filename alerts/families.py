"""Every alert, grouped by what it watches, and the series recorded for them: functions of a deployment's settings."""

from __future__ import annotations

from alerts import cache, engine, gpu, latency, slo, traffic, watchers
from alerts.rules import Alert, Recording
from alerts.settings import SHIPPED, Settings
from exporters.catalogue import promql, vllm

_RECORDED_OVER = "5m"


def families(s: Settings = SHIPPED, objectives: slo.Objectives | None = None) -> dict[str, tuple[Alert, ...]]:
    """Alerts by family, with their waiting times at the settings' pace."""
    made = {
        "engine": engine.alerts(s), "slo": slo.alerts(objectives or slo.shipped(), s), "latency": latency.alerts(s), "cache": cache.alerts(s),
        "traffic": traffic.alerts(s), "gpu": gpu.alerts(s), "watchers": watchers.alerts(s),
    }  # fmt: skip
    return {family: tuple(alert.paced(s) for alert in alerts) for family, alerts in made.items()}


def alerts(s: Settings = SHIPPED, objectives: slo.Objectives | None = None) -> tuple[Alert, ...]:
    return tuple(alert for family in families(s, objectives).values() for alert in family)


def recordings(s: Settings = SHIPPED, objectives: slo.Objectives | None = None) -> tuple[Recording, ...]:
    """What the objectives rest on, and the figures that people ask for over long ranges."""
    window = s.window(_RECORDED_OVER)
    return (
        Recording("model_name:vllm_ttft_seconds:p95_5m", promql.quantile(0.95, vllm.TIME_TO_FIRST_TOKEN, window)),
        Recording("model_name:vllm_inter_token_latency_seconds:p95_5m", promql.quantile(0.95, vllm.INTER_TOKEN_LATENCY, window)),
        Recording("model_name:vllm_queue_time_seconds:p95_5m", promql.quantile(0.95, vllm.REQUEST_QUEUE_TIME, window)),
        Recording("model_name:vllm_prefix_cache_hits:ratio_5m", promql.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, window)),
        Recording("model_name:vllm_generation_tokens:rate5m", promql.per_second(vllm.GENERATION_TOKENS, window)),
        Recording("model_name:vllm_prompt_tokens:rate5m", promql.per_second(vllm.PROMPT_TOKENS, window)),
        *slo.recordings(objectives or slo.shipped(), s),
    )


ALERTS: tuple[Alert, ...] = alerts()
RECORDINGS: tuple[Recording, ...] = recordings()
