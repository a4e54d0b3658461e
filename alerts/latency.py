"""Alerts on latency that inform or name a cause. Critical alerts on latency are those of the objectives (slo.py)."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE, MODEL, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, sidecar, vllm

_LATENCIES = {"time to first token": recorded.TTFT, "time between tokens": recorded.INTER_TOKEN}
FAMILIES = {  # of vLLM's --custom-histogram-buckets, each with one of its histograms
    "time_to_first_token": vllm.TIME_TO_FIRST_TOKEN,
    "inter_token_latency": vllm.INTER_TOKEN_LATENCY,
    "request_latency": vllm.E2E_REQUEST_LATENCY,
}
_CHANGES = ('kind=~"change|version|config"',)  # notes do not concern the engine, and a restart has an alert of its own


def alerts(s: Settings) -> tuple[Alert, ...]:
    queued, first, between, worse = (
        s.at(t)
        for t in (thresholds.QUEUE_TIME_P95, thresholds.TTFT_P95, thresholds.INTER_TOKEN_P95, thresholds.WORSE_BY)
    )
    since = f"time() - max({promql.series(sidecar.EVENT_TIME, _CHANGES)})"
    settled = f"{since} >= {s.seconds('30m')} and {since} <= {s.seconds('1h')}"
    return (
        Alert(
            "VLLMQueueTimeHigh",
            Severity.WARNING,
            f"max {by(ENGINE)} ({recorded.QUEUED}) > {queued}",
            hold="5m",
            keep_firing="5m",
            summary="Queue time high: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "The p95 queue time of {{ $labels.model_name }} on {{ $labels.instance }} is"
                " {{ $value | humanizeDuration }} over 5 min: one request in twenty waits that long or longer"
                " before it is scheduled. Check if requests wait now: if none does, the burst is over; if they do, ask"
                " the team that sends most to pause its batch work."
            ),
            panel=PanelRef("overview", "queue-time"),
            threshold=queued,
            muted_by=("VLLMEngineDown", "VLLMEngineFrozen"),
        ),
        Alert(
            "VLLMTTFTHigh",
            Severity.INFO,
            f"{recorded.quantile(0.95, recorded.TTFT, '10m', s)} > {first}",
            hold="5m",
            keep_firing="5m",
            summary="TTFT high: {{ $labels.model_name }}",
            description=(
                "The p95 time to first token of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over 10"
                " min: one request in twenty waits that long or longer. Check how much of it is queue time (First"
                " five minutes,"
                " step 3): a queue needs capacity, a long prefill needs shorter prompts or a warm prefix cache."
            ),
            panel=PanelRef("overview", "ttft-p95"),
            threshold=first,
            muted_by=("VLLMTTFTBudgetBurn",),
        ),
        Alert(
            "VLLMInterTokenLatencyHigh",
            Severity.INFO,
            f"{recorded.quantile(0.95, recorded.INTER_TOKEN, '10m', s)} > {between}",
            hold="5m",
            keep_firing="5m",
            summary="Inter-token latency high: {{ $labels.model_name }}",
            description=(
                "The p95 time between tokens of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over 10"
                " min, slower than people read. Compare running requests and KV-cache usage with an hour ago: a"
                " larger batch or longer contexts slow every step."
            ),
            panel=PanelRef("overview", "inter-token-latency"),
            threshold=between,
            muted_by=("VLLMInterTokenBudgetBurn",),
        ),
        Alert(
            "VLLMLatencyWorseThanLastWeek",
            Severity.INFO,
            _either(s, worse.value, "1h", "1w"),
            hold="15m",
            summary="Latency worse than last week: {{ $labels.figure }} of {{ $labels.model_name }}",
            description=(
                "The p95 {{ $labels.figure }} of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over"
                f" the last hour, more than {worse.shown} above the same hour of last week. Compare request rate"
                " and prompt lengths of the two hours before looking for a cause in the engine."
            ),
            panel=PanelRef("latency", "ttft-p95"),
            threshold=worse,
            drawn=False,
        ),
        Alert(
            "VLLMLatencyWorseSinceTuning",
            Severity.INFO,
            f"({_either(s, worse.value, '30m', '1h')}) and on () ({settled})",
            hold="0s",
            summary="Latency worse since the last change: {{ $labels.figure }} of {{ $labels.model_name }}",
            description=(
                "The p95 {{ $labels.figure }} of {{ $labels.model_name }} is {{ $value | humanizeDuration }} over"
                f" the last half hour, more than {worse.shown} above the half hour before the last change. Roll"
                " the change back if every engine has it, and try it on a canary first."
            ),
            panel=PanelRef("tuning", "ttft-after"),
            threshold=worse,
            drawn=False,
        ),
        Alert(
            "VLLMMixedHistogramBounds",
            Severity.INFO,
            " or ".join(
                f'label_replace({promql.mixed_bounds(metric, MODEL)}, "family", "{family}", "", "")'
                for family, metric in FAMILIES.items()
            ),
            hold="30m",
            summary="Histogram buckets differ: {{ $labels.family }} of {{ $labels.model_name }}",
            description=(
                "Engines of {{ $labels.model_name }} have differed in {{ $value | humanize }} bucket bounds of"
                " {{ $labels.family }} for 30 min: percentiles are estimated from the bounds that all of them"
                " share. Start all engines of the model with the same --custom-histogram-buckets."
            ),
            panel=PanelRef("latency", "mixed-bounds"),
            owner="platform",
        ),
    )


def _either(s: Settings, worse: float, window: str, offset: str) -> str:
    """Return the p95 latencies (s) that exceed those of `offset` ago by the share `worse`, if both windows have enough
    requests. The label `figure` names the latency."""
    least = s.at(thresholds.COMPARED_AT_LEAST)
    higher = (
        f"label_replace({recorded.p95(what, window, s)} > {1 + worse:.12g} * {recorded.p95(what, window, s, offset)},"
        f' "figure", "{name}", "", "")'
        for name, what in _LATENCIES.items()
    )
    enough = (f"{recorded.counted(recorded.FINISHED, window, s, then)} >= {least}" for then in ("", offset))
    return f"({' or '.join(higher)}) and {on(MODEL)} ({' and '.join(enough)})"
