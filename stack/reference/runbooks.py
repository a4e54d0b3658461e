"""docs/reference/runbooks.md: runbooks by symptom and by alert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alerts.registry import ALERTS
from alerts.rules import Alert
from runbooks import page as runbook_page
from stack.reference import alerts, use
from stack.reference.markdown import PRINTED, table, to

# What somebody says or sees -> pages that are worth opening, the likeliest first. A test wants every page named at
# least once.
SYMPTOMS: Mapping[str, tuple[str, ...]] = {
    "nothing answers": (
        "VLLMEngineDown", "VLLMModelDown", "VLLMGatewayDown", "VLLMGatewayGone", "VLLMEngineGone", "VLLMRestartLoop",
    ),
    "it is up and makes no tokens": ("VLLMEngineFrozen", "VLLMEngineUnreachable", "VLLMMetricsAbsent"),
    "it takes long to start, or starts again and again": ("VLLMSlowStart", "VLLMRestartLoop"),
    "slow before the first word": (
        "VLLMTTFTBudgetBurn", "VLLMTTFTBudgetSlowBurn", "VLLMTTFTHigh", "VLLMQueueTimeHigh", "VLLMQueueGrowing",
        "VLLMCacheHitsCollapsed", "VLLMKVTransferSlow",
    ),
    "slow between words, answers stutter": (
        "VLLMInterTokenBudgetBurn", "VLLMInterTokenBudgetSlowBurn", "VLLMInterTokenLatencyHigh",
        "VLLMPreemptionsSustained", "VLLMGPUThrottled",
        "interconnect",
    ),
    "slower than before": ("VLLMLatencyWorseSinceTuning", "VLLMLatencyWorseThanLastWeek", "rollback", "tuning"),
    "requests wait, are held back or refused": (
        "VLLMGatewayRejecting", "VLLMEngineRejecting", "VLLMQueueGrowing", "VLLMRequestsDeferred",
    ),
    "requests wait for KV cache of a prefill engine, or prompts are computed again": (
        "VLLMKVTransferStuck", "VLLMKVTransfersFailing", "VLLMKVTransferSlow", "VLLMKVBlocksExpired",
    ),
    "errors and timeouts": ("VLLMSuccessBudgetBurn", "VLLMSuccessBudgetSlowBurn", "VLLMErrorRatioHigh",
        "VLLMHTTPErrorRatioHigh", "VLLMResponsesUnreadable", "incident-flow"),
    "clients give up": ("VLLMClientHangupsRising", "VLLMTTFTHigh"),
    "answers are cut off, or became worse": ("VLLMAnswersCutOff", "VLLMGoldenDiffers", "quality", "VLLMGoldenStale"),
    "out of memory, the cache is full": (
        "VLLMKVCacheNearlyFull", "VLLMKVCacheThrashing", "VLLMPreemptionsSustained", "VLLMGPUMemoryNearlyFull",
    ),
    "speculation does not pay": ("VLLMAcceptanceLow", "tuning"),
    "a GPU is hot, slow, gone or broken": (
        "VLLMGPUHot", "VLLMGPUThrottled", "VLLMGPUMissing", "VLLMGPUXid", "VLLMGPUECCErrors", "VLLMGPUNVLinkErrors",
        "interconnect",
    ),
    "it costs too much": ("VLLMCostOverBudget", "tuning"),
    "the figures do not add up": (
        "VLLMEngineExceedsLog", "VLLMLogExceedsEngine", "VLLMRequestLogLagging", "VLLMRequestLogUnwritable",
        "VLLMMixedHistogramBounds",
    ),
    "no alerts, empty panels, the watchers themselves": (
        "VLLMWatchdog", "VLLMAlertmanagerUnreachable", "VLLMNotificationsFailing", "VLLMRuleFailing", "VLLMSidecarDown",
        "VLLMSidecarGone",
        "VLLMSidecarSourceFailing", "VLLMCheckpointFailing", "VLLMSpansDropped", "VLLMScrapeNearLimit",
        "VLLMTeamLabelOverflow",
    ),
    "the data set of requests lacks some, or differs from the counters": ("VLLMShipFailing", "VLLMDatasetDiffers"),
    "several gateways do not share their limits, or one of them is down": (
        "VLLMGatewayNotSharing", "VLLMGatewayReplicaDown",
    ),
    "a canary was stopped, or has no verdict": ("VLLMCanaryRolledBack", "VLLMCanaryUndecided", "canary"),
    "several alerts at once, or none that names the cause": ("incident-flow",),
    "something is about to change, or has to be taken back": ("edit-teams", "canary", "rollback"),
}  # fmt: skip


def page() -> str:
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield from (
        "# Runbooks",
        "",
        PRINTED.format(
            source="`runbooks/*.md`, `alerts/*.py`, `stack/drill/drills.py`; of symptoms `stack/reference/runbooks.py`"
        ),
        "",
    )
    yield from (
        (
            "`vllm-watch runbook WORDS` finds a page by the name of an alert or by words, and `--live` fills in the"
            " numbers of now."
        ),
        "`vllm-watch board` serves them at `/runbooks/NAME`. Every page of an alert has the same headings: "
        + ", ".join(runbook_page.HEADINGS)
        + ".",
        "",
    )
    yield from ("## By what somebody says", "")
    yield from table(
        ("symptom", "pages"), ((symptom, ", ".join(map(_link, names))) for symptom, names in SYMPTOMS.items())
    )
    yield from ("## By alert", "")
    yield from table(("page", "severity", "panel", "drill"), map(_row, sorted(ALERTS, key=lambda alert: alert.name)))
    yield from ("## Pages without an alert", "")
    yield from table(
        ("page", "what it is for"),
        ((_link(page.name), _one_line(page)) for page in runbook_page.pages() if not page.is_alert),
    )
    yield "Test status: [runbooks (reference)](../internals/test-status.md#runbooks-reference)."


def _link(name: str) -> str:
    return f"[{name}](../../runbooks/{name}.md)"


def _row(alert: Alert) -> tuple[str, str, str, str]:
    board, panel = use.board_of(alert), use.panel_of(alert)
    shown = to(f"Panels of {board.title}", alerts.BOARDS_PAGE, f"{board.title}: {panel.title}")
    return _link(alert.name), to(alert.name, "alerts.md", str(alert.severity)), shown, alerts.drill(alert) or "none"


def _one_line(page: runbook_page.RunbookPage) -> str:
    return f"{page.title}. {page.gist}" if page.title.lower() != page.name else page.gist
