"""KV cache, prefix cache, speculation: what makes an engine slow before it is full."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE, MODEL
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, vllm


def alerts(s: Settings) -> tuple[Alert, ...]:
    five, half = (s.window(w) for w in ("5m", "30m"))
    nearly, full, preempted, left, before, accepted = (
        s.at(t)
        for t in (
            thresholds.KV_CACHE_USAGE, thresholds.KV_CACHE_FULL, thresholds.PREEMPTIONS, thresholds.CACHE_HITS_LEFT,
            thresholds.CACHE_HITS_BEFORE, thresholds.ACCEPTANCE,
        )
    )  # fmt: skip
    usage, preemptions = (
        promql.worst(vllm.KV_CACHE_USAGE, ENGINE),
        promql.per_second(vllm.NUM_PREEMPTIONS, five, ENGINE),
    )
    hits, hits_of_a_day = (recorded.share(recorded.HITS, recorded.LOOKUPS, window, s) for window in ("30m", "1d"))
    return (
        Alert(
            "VLLMKVCacheNearlyFull",
            Severity.WARNING,
            f"{usage} > {nearly}",
            hold="5m",
            keep_firing="2m",
            summary="The KV cache of an engine is nearly full.",
            description=(
                "{{ $labels.model_name }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its"
                " KV-cache blocks; preemptions come next."
            ),
            panel=PanelRef("overview", "kv-cache-usage"),
            threshold=nearly,
            muted_by=("VLLMEngineDown", "VLLMKVCacheThrashing"),
        ),
        Alert(
            "VLLMPreemptionsSustained",
            Severity.WARNING,
            f"{preemptions} > {preempted}",
            hold="10m",
            keep_firing="5m",
            summary="An engine keeps throwing work away.",
            description=(
                '{{ $value | printf "%.3g" }} requests per second for {{ $labels.model_name }} on {{ $labels.instance'
                " }} lose their blocks and are computed again."
            ),
            panel=PanelRef("kv-cache", "preemptions"),
            threshold=preempted,
            muted_by=("VLLMEngineDown", "VLLMKVCacheThrashing"),
        ),
        Alert(
            "VLLMKVCacheThrashing",
            Severity.WARNING,
            f"{usage} > {full} and {preemptions} > 0",
            hold="5m",
            keep_firing="5m",
            summary="The KV cache is full and requests are preempted.",
            description=(
                "{{ $labels.model_name }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its"
                " KV-cache blocks and takes blocks from running requests."
            ),
            panel=PanelRef("kv-cache", "kv-usage"),
            threshold=full,
            drawn=False,
            muted_by=("VLLMEngineDown",),
        ),
        Alert(
            "VLLMCacheHitsCollapsed",
            Severity.WARNING,
            f"{hits} < {left} * ({hits_of_a_day} > {before}) "
            f"and {recorded.counted(recorded.FINISHED, '30m', s)} >= {s.at(thresholds.COMPARED_AT_LEAST)}",
            hold="10m",
            summary="The prefix cache helps much less than it did.",
            description=(
                "{{ $value | humanizePercentage }} of the prompt tokens of {{ $labels.model_name }} come from the"
                " prefix cache, less than half of what it was over the day: the rest is computed again."
            ),
            panel=PanelRef("kv-cache", "hit-ratio"),
            threshold=left,
            drawn=False,
        ),
        Alert(
            "VLLMAcceptanceLow",
            Severity.INFO,
            f"{promql.share(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, half, MODEL)} <"
            f" {accepted}",
            hold="10m",
            summary="Speculative decoding is seldom right.",
            description=(
                "{{ $value | humanizePercentage }} of the tokens drafted for {{ $labels.model_name }} are accepted;"
                " drafting costs more than it brings."
            ),
            panel=PanelRef("tuning-options", "acceptance-ratio"),
            threshold=accepted,
            drawn=False,
        ),
    )
