"""Alerts on KV transfers between prefill and decode engines: stuck, failing, slow, or never fetched."""

from __future__ import annotations

from alerts import thresholds
from alerts.engine import FETCHING
from alerts.labels import ENGINE_POD, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, vllm

# two scrapes even where they are a minute apart; the longest prefill takes no transfer, so this is no wait for one
STUCK_FOR = "2m"
OVER = "10m"
_RECEIVED = ('source="external_kv_transfer"',)
_FAILED = (vllm.NIXL_NUM_FAILED_TRANSFERS, vllm.MOONCAKE_NUM_FAILED_TRANSFERS, vllm.MOONCAKE_NUM_FAILED_RECVS)
_EXPIRED = (vllm.NIXL_NUM_KV_EXPIRED_REQS, vllm.MOONCAKE_NUM_KV_EXPIRED_REQS)
_TIMES = (vllm.NIXL_XFER_TIME, vllm.MOONCAKE_XFER_TIME)


def stuck(window: str) -> str:
    """Return the decode engines that fetched KV cache during the whole window and received none of it.

    Nothing else shows it: the engine serves other requests, and no failure is counted while it waits."""
    fetching = promql.lowest(vllm.NUM_REQUESTS_KV_FETCH_BY_STAGE, window, ENGINE_POD, (FETCHING,))
    received = promql.growth(vllm.PROMPT_TOKENS_BY_SOURCE, window, ENGINE_POD, _RECEIVED)
    return f"{fetching} > 0 unless {on(ENGINE_POD)} {received} > 0"


def alerts(s: Settings) -> tuple[Alert, ...]:
    ten, failed, slow = s.window(OVER), s.at(thresholds.KV_TRANSFERS_FAILED), s.at(thresholds.KV_TRANSFER_P95)
    least = s.at(thresholds.KV_TRANSFERS_COMPARED)

    def any_of(*conditions: str) -> str:
        return " or ".join(f"({condition})" for condition in conditions)

    return (
        Alert(
            "VLLMKVTransferStuck",
            Severity.CRITICAL,
            stuck(s.window(STUCK_FOR)),
            hold="0s",
            summary="KV transfer stuck: {{ $labels.model_name }} on {{ $labels.instance }} receives no KV cache",
            description=(
                "{{ $value | humanize }} or more requests for {{ $labels.model_name }} on {{ $labels.instance }} have"
                " waited for their KV cache for 2 min and none has arrived. Their clients wait, while this engine"
                " serves others. Find the prefill engine that makes no progress (First five minutes, step 2): it holds"
                " the blocks and is the likely cause. Do not restart this engine first."
            ),
            panel=PanelRef("prefill-decode", "fetch-stage"),
            muted_by=("VLLMEngineDown",),
        ),
        Alert(
            "VLLMKVTransfersFailing",
            Severity.WARNING,
            any_of(*(f"{promql.growth(metric, ten, ENGINE_POD)} >= {failed}" for metric in _FAILED)),
            hold="0s",
            keep_firing="10m",
            summary="KV transfers failing: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "{{ $value | humanize }} KV transfers of {{ $labels.model_name }} on {{ $labels.instance }} failed over"
                " 10 min: each costs a second prefill or the request. Read the log of this engine for the peer's"
                " address, then check whether that engine runs and is reachable."
            ),
            panel=PanelRef("prefill-decode", "transfer-failures"),
            threshold=failed,
            drawn=False,
            muted_by=("VLLMEngineDown",),
        ),
        Alert(
            "VLLMKVTransferSlow",
            Severity.WARNING,
            any_of(
                *(
                    f"{promql.quantile(0.95, metric, ten, ENGINE_POD)} > {slow}"
                    f" and {promql.observation_count(metric, ten, ENGINE_POD)} >= {least}"
                    for metric in _TIMES
                )
            ),
            hold="5m",
            keep_firing="5m",
            summary="KV transfers slow: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "The p95 time of a KV transfer of {{ $labels.model_name }} on {{ $labels.instance }} is"
                " {{ $value | humanizeDuration }} over 10 min; the client waits for it before the first token. Compare"
                " the bandwidth with what the link carries: near it the link is full, far below it look at the"
                " transport that NIXL chose."
            ),
            panel=PanelRef("prefill-decode", "transfer-time"),
            threshold=slow,
            muted_by=("VLLMEngineDown", "VLLMKVTransferStuck"),
        ),
        Alert(
            "VLLMKVBlocksExpired",
            Severity.WARNING,
            any_of(*(f"{promql.growth(metric, ten, ENGINE_POD)} >= {failed}" for metric in _EXPIRED)),
            hold="0s",
            keep_firing="10m",
            summary="KV blocks expired: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "{{ $value | humanize }} finished prefills of {{ $labels.model_name }} on {{ $labels.instance }} were"
                " never fetched over 10 min: their blocks were held until the lease ended, and the prompts are computed"
                " again. Check whether decode engines wait or are down, and whether the router drops requests between"
                " its two calls."
            ),
            panel=PanelRef("prefill-decode", "transfer-failures"),
            threshold=failed,
            drawn=False,
            muted_by=("VLLMEngineDown",),
        ),
    )
