"""Alerts on KV cache, prefix cache and speculative decoding: causes of slowness before an engine is full."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE_POD, MODEL
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, vllm


def alerts(s: Settings) -> tuple[Alert, ...]:
    """Return the cache alerts for a deployment."""
    five, half = (s.window(w) for w in ("5m", "30m"))
    nearly, full, preempted, left, before, accepted = (
        s.at(t)
        for t in (
            thresholds.KV_CACHE_USAGE, thresholds.KV_CACHE_FULL, thresholds.PREEMPTIONS, thresholds.CACHE_HITS_LEFT,
            thresholds.CACHE_HITS_BEFORE, thresholds.ACCEPTANCE,
        )
    )  # fmt: skip
    usage, preemptions = (
        promql.worst(vllm.KV_CACHE_USAGE, ENGINE_POD),
        promql.per_second(vllm.NUM_PREEMPTIONS, five, ENGINE_POD),
    )
    hits, hits_of_a_day = (recorded.share(recorded.HITS, recorded.LOOKUPS, window, s) for window in ("30m", "1d"))
    return (
        Alert(
            "VLLMKVCacheNearlyFull",
            Severity.WARNING,
            f"{usage} > {nearly}",
            hold="5m",
            keep_firing="2m",
            summary="KV cache nearly full: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.model_name }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its"
                f" KV-cache blocks, above {nearly.shown} for 5 min; when no block is free, vLLM preempts requests."
                " Check whether requests wait or are preempted: if so, pause batch work; if not, look again in 10"
                " min."
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
            summary="Preemptions sustained: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                '{{ $value | printf "%.3g" }} requests per second for {{ $labels.model_name }} on'
                " {{ $labels.instance }} have lost their KV-cache blocks for 10 min and are computed again. Check"
                " the preemptions per finished request (First five minutes, step 1): above 0.5 pause batch work, or"
                " move load"
                " to another engine."
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
            summary="KV cache thrashing: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.model_name }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its"
                " KV-cache blocks and has preempted running requests for 5 min: work is computed twice. Take load"
                " off this engine: ask the team that sends most to pause, batch work first."
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
            summary="Prefix cache hits collapsed: {{ $labels.model_name }}",
            description=(
                "{{ $value | humanizePercentage }} of the prompt tokens of {{ $labels.model_name }} came from the"
                f" prefix cache over 30 min, less than {left.shown} of the ratio over the last day; the rest is"
                " computed again. Check whether an engine restarted or joined (First five minutes, step 2), then"
                " whether a"
                " prompt template or the routing changed."
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
            summary="Speculative decoding inefficient: {{ $labels.model_name }}",
            description=(
                "{{ $value | humanizePercentage }} of the tokens drafted for {{ $labels.model_name }} were accepted"
                " over 30 min: drafting and verifying cost about what they save. Check the acceptance by position"
                " and the batch size (First five minutes, steps 1 and 3) before turning speculation off."
            ),
            panel=PanelRef("tuning-options", "acceptance-ratio"),
            threshold=accepted,
            drawn=False,
        ),
    )
