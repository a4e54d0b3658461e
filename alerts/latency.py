"""Latency: what users wait for. The objectives page (slo.py); what stands here informs, or names a cause."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE, MODEL, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, sidecar, vllm

_FIGURES = {"time to first token": recorded.TTFT, "time between tokens": recorded.INTER_TOKEN}
FAMILIES = {  # of vLLM's --custom-histogram-buckets, each by one of its histograms
    "time_to_first_token": vllm.TIME_TO_FIRST_TOKEN,
    "inter_token_latency": vllm.INTER_TOKEN_LATENCY,
    "request_latency": vllm.E2E_REQUEST_LATENCY,
}
_CHANGES = ('kind=~"change|version|config"',)  # a note says nothing about the engine, and a restart has its own alert


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
            summary="Requests wait long in an engine's queue.",
            description=(
                "On {{ $labels.instance }} one request for {{ $labels.model_name }} in twenty waits {{ $value |"
                " humanizeDuration }} or longer before it is scheduled."
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
            summary="The first token is late.",
            description=(
                "One request for {{ $labels.model_name }} in twenty waits {{ $value | humanizeDuration }} or longer for"
                " its first token."
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
            summary="Answers come slower than people read.",
            description=(
                "One gap between tokens of {{ $labels.model_name }} in twenty is {{ $value | humanizeDuration }} or"
                " longer."
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
            summary="Latency is worse than at this hour a week ago.",
            description=(
                "The p95 {{ $labels.figure }} of {{ $labels.model_name }} is {{ $value | humanizeDuration }}, worse"
                " than in the same hour of last week by more than the share that calls for a look."
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
            summary="Latency is worse since the last tuning event.",
            description=(
                "The p95 {{ $labels.figure }} of {{ $labels.model_name }} is {{ $value | humanizeDuration }}, worse"
                " than in the half hour before the last change. If the change went to every engine at once, take it"
                " back and try it on a canary."
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
            summary="Engines of one model have different histogram buckets.",
            description=(
                "Engines of {{ $labels.model_name }} differ in {{ $value | humanize }} bucket bounds of {{"
                " $labels.family }}: its percentiles are read at the bounds that all of them have. Start them with the"
                " same --custom-histogram-buckets."
            ),
            panel=PanelRef("latency", "mixed-bounds"),
            owner="platform",
        ),
    )


def _either(s: Settings, worse: float, window: str, offset: str) -> str:
    """p95s that are worse than `offset` ago by a share, each called by the label `figure`, as far as both windows hold
    enough requests."""
    least = s.at(thresholds.COMPARED_AT_LEAST)
    higher = (
        f"label_replace({recorded.p95(what, window, s)} > {1 + worse:.12g} * {recorded.p95(what, window, s, offset)},"
        f' "figure", "{called}", "", "")'
        for called, what in _FIGURES.items()
    )
    enough = (f"{recorded.counted(recorded.FINISHED, window, s, then)} >= {least}" for then in ("", offset))
    return f"({' or '.join(higher)}) and {on(MODEL)} ({' and '.join(enough)})"
