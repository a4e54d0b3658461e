"""All alerts by family, and the recording rules that they need, as functions of a deployment's settings."""

from __future__ import annotations

from alerts import cache, engine, fleet, gpu, latency, recorded, self_monitoring, slo, traffic, transfers
from alerts.rules import Alert, Recording
from alerts.settings import DEFAULTS, Settings
from exporters.catalogue import promql, vllm


def families(s: Settings = DEFAULTS, objectives: slo.Objectives | None = None) -> dict[str, tuple[Alert, ...]]:
    """Return the alerts by family, with hold times divided by the pace of the settings."""
    made = {
        "engine": engine.alerts(s), "slo": slo.alerts(objectives or slo.default_objectives(), s),
        "transfers": transfers.alerts(s),
        "latency": latency.alerts(s), "cache": cache.alerts(s),
        "traffic": traffic.alerts(s), "gpu": gpu.alerts(s), "watchers": self_monitoring.alerts(s),
    }  # fmt: skip
    return {family: tuple(alert.paced(s) for alert in alerts) for family, alerts in made.items()}


def alerts(s: Settings = DEFAULTS, objectives: slo.Objectives | None = None) -> tuple[Alert, ...]:
    return tuple(alert for family in families(s, objectives).values() for alert in family)


def recordings(s: Settings = DEFAULTS, objectives: slo.Objectives | None = None) -> tuple[Recording, ...]:
    return tuple(recording for group in recorded_families(s, objectives).values() for recording in group)


def recorded_families(
    s: Settings = DEFAULTS, objectives: slo.Objectives | None = None
) -> dict[str, tuple[Recording, ...]]:
    """Return the recording rules by family: growth, objectives, hourly growth of both, values for long ranges by model
    (figures), and by fleet."""
    objectives = objectives or slo.default_objectives()
    growth, promised = tuple(recorded.recordings(s)), tuple(slo.recordings(objectives, s))
    of_fleet = tuple(fleet.recordings(s))
    by_hour = recorded.hours(s, (*growth, *promised, *of_fleet), (*slo.recorded_names(objectives), *fleet.COUNTED))
    return {"growth": growth, "slo": promised, "hours": tuple(by_hour), "figures": _figures(s), "fleet": of_fleet}


def _figures(s: Settings) -> tuple[Recording, ...]:
    window = s.window(recorded.OVER)
    return (
        Recording("model_name:vllm_ttft_seconds:p95_5m", _p95(recorded.TTFT), recorded.TTFT_P95),
        Recording(
            "model_name:vllm_inter_token_latency_seconds:p95_5m", _p95(recorded.INTER_TOKEN), recorded.INTER_TOKEN_P95
        ),
        Recording(
            "model_name:vllm_prefix_cache_hits:ratio_5m",
            promql.per(*(f"sum by (model_name) ({what}{recorded.OVER})" for what in _RATIO)),
            "share of looked up prompt tokens that were found",
        ),
        Recording(
            "model_name:vllm_generation_tokens:rate5m",
            promql.per_second(vllm.GENERATION_TOKENS, window),
            recorded.GENERATED,
        ),
        Recording(
            "model_name:vllm_prompt_tokens:rate5m", promql.per_second(vllm.PROMPT_TOKENS, window), recorded.PROMPTED
        ),
    )


_RATIO = (recorded.HITS, recorded.LOOKUPS)


def _p95(buckets: str) -> str:
    return f"histogram_quantile(0.95, sum by (model_name, le) ({buckets}{recorded.OVER})) >= 0"


ALERTS: tuple[Alert, ...] = alerts()
RECORDINGS: tuple[Recording, ...] = recordings()
