"""Table of drills: the fault of each alert, or the reason why there is none. Drills of one engine run in the order of
this table."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from exporters.catalogue import dcgm
from stack.drill import engine_faults as engines
from stack.drill import faults
from stack.drill import gpu_faults as gpus
from stack.drill import monitoring_faults as monitoring
from stack.drill import request_faults as requests
from stack.drill.faults import Fault
from stack.drill.lab import DrillEngine

QUICK = 15  # 5m become 20 s: ten scrapes
QUICKER = 60  # for alerts whose shortest window is half an hour


@dataclass(frozen=True, slots=True)
class Drill:
    """Drill of one alert. what: the fault in one phrase. users: whether a few requests run beside it all the time.

    Times in seconds. seen_at_prometheus: the fault keeps the alert from Alertmanager; it arrives when the fault is
    over.
    always: the alert fires while all is well, and the fault silences it."""

    alert: str
    what: str
    fault: Fault
    engine: DrillEngine = DrillEngine.USUAL
    pace: int = QUICK
    users: bool = False
    fires_within_s: float = 180.0
    resolves_within_s: float = 240.0
    seen_at_prometheus: bool = False
    always: bool = False


DRILLS: tuple[Drill, ...] = (
    # Those who watch, and the way in
    Drill("VLLMWatchdog", "Prometheus is killed, and the alert that always fires falls silent",
        faults.killed("prometheus"), always=True),
    # Before the gateway is killed: a killed gateway reports lost records of running requests for an hour, and this
    # alert then fires already.
    Drill("VLLMRequestLogUnwritable", "the request log becomes a folder while requests go on", requests.log_is_no_file),
    Drill("VLLMGatewayDown", "the gateway is killed", faults.killed("gateway"), users=True),
    Drill("VLLMGatewayGone", "the gateway is killed, and its target leaves discovery",
        faults.left_discovery("gateway", "gateway"), pace=QUICKER),
    Drill("VLLMSidecarGone", "the sidecar's job loses its only target", faults.left_discovery("sidecar"), pace=QUICKER),
    Drill("VLLMSidecarDown", "the sidecar is killed", faults.killed("sidecar"), users=True),
    Drill("VLLMAlertmanagerUnreachable", "Alertmanager is killed", faults.killed("alertmanager"),
        seen_at_prometheus=True),
    Drill("VLLMNotificationsFailing", "the receiver of Alertmanager refuses", monitoring.notifications_refused),
    Drill("VLLMRuleFailing", "a rule that matches many series with many is loaded", monitoring.rule_that_cannot_be),
    Drill("VLLMSidecarSourceFailing", "the events file becomes a folder", monitoring.events_unreadable),
    Drill("VLLMCheckpointFailing", "the sidecar can write nothing, as on a full disk", monitoring.state_unwritable),
    Drill("VLLMSpansDropped", "what takes the spans of requests refuses every one", monitoring.spans_refused),
    Drill("VLLMRequestLogLagging", "records are written two minutes after their requests ended",
        requests.records_come_late),
    Drill("VLLMLogExceedsEngine", "records of requests that never were are written to the log", requests.forged_records,
        pace=QUICKER),
    Drill("VLLMEngineExceedsLog", "clients ask the engine past the gateway", requests.past_the_gateway, pace=QUICKER,
        users=True),
    Drill("VLLMTeamLabelOverflow", "records of eighty teams are written to the log", requests.more_teams_than_seats),
    # GPUs, which are stand-ins
    Drill("VLLMGPUMissing", "a stand-in GPU falls off the bus", gpus.card_lost),
    Drill("VLLMGPUHot", "a stand-in GPU is at 91 degrees", gpus.card_hot),
    Drill("VLLMGPUThrottled", "a stand-in GPU is held down half of the time by heat", gpus.card_held_down),
    Drill("VLLMGPUECCErrors", "a stand-in GPU counts uncorrected memory errors", gpus.card_memory_errors,
        pace=QUICKER),
    Drill("VLLMGPUMemoryNearlyFull", "a stand-in GPU has 99 % of its memory in use", gpus.card_memory_full),
    Drill("VLLMGPUXid", "a stand-in dcgm-exporter reports XID 79", gpus.dcgm_tells(dcgm.XID_ERRORS.metric, value=79)),
    Drill(
        "VLLMGPUNVLinkErrors", "a stand-in dcgm-exporter counts ten damaged packets a second",
        gpus.dcgm_tells(dcgm.NVLINK_CRC.metric, dcgm.NVLINK_REPLAY.metric, per_s=10), pace=QUICKER,
    ),
    Drill("VLLMCostOverBudget", "two stand-in GPUs make a few tokens a second", requests.hardly_any_traffic,
        pace=QUICKER),
    # Requests
    Drill("VLLMGatewayRejecting", "clients come with a wrong key", requests.wrong_key, users=True),
    Drill("VLLMResponsesUnreadable", "a login page answers at the engine's address", requests.login_page),
    Drill("VLLMClientHangupsRising", "clients hang up after the first token", requests.clients_hang_up, pace=QUICKER),
    Drill("VLLMAnswersCutOff", "answers are limited to two tokens", requests.limit_too_short, pace=QUICKER, users=True),
    Drill("VLLMErrorRatioHigh", "the engine core is stopped, and requests time out", requests.requests_time_out),
    Drill("VLLMSuccessBudgetBurn", "twelve requests time out", engines.failed_requests),
    Drill("VLLMSuccessBudgetSlowBurn", "twelve requests time out", engines.failed_requests, pace=QUICKER),
    # Latency
    Drill("VLLMTTFTBudgetBurn", "twelve first tokens take more than 2.5 s", engines.late_first_tokens),
    Drill("VLLMTTFTBudgetSlowBurn", "twelve first tokens take more than 2.5 s", engines.late_first_tokens,
        pace=QUICKER),
    Drill("VLLMInterTokenLatencyHigh", "the engine core stops and goes on all the time", engines.slow_decoding),
    Drill("VLLMInterTokenBudgetBurn", "gaps of 0.2 s between tokens for a while", engines.late_tokens),
    Drill("VLLMInterTokenBudgetSlowBurn", "gaps of 0.2 s between tokens for a while", engines.late_tokens,
        pace=QUICKER),
    Drill(
        "VLLMLatencyWorseSinceTuning", "a change is put on record, and the engine core stops and goes on from then on",
        engines.slower_since_a_change, pace=QUICKER,
    ),
    Drill("VLLMCacheHitsCollapsed", "prompts no longer share their beginning", engines.prompts_no_longer_alike,
        pace=QUICKER),
    # Engines
    Drill("VLLMMetricsAbsent", "a target of the engines' job is no engine", engines.target_is_no_engine),
    Drill("VLLMMixedHistogramBounds", "a second engine of the model shows other bounds",
        engines.engine_with_other_bounds, pace=QUICKER),
    Drill("VLLMEngineGone", "the engines' job loses its only target", faults.left_discovery("vllm"), pace=QUICKER),
    Drill("VLLMEngineFrozen", "the engine core is stopped while it works", engines.core_frozen),
    Drill("VLLMEngineUnreachable", "the API server hangs", engines.engine_hangs, users=True),
    Drill("VLLMEngineDown", "the engine is killed", engines.engine_killed, users=True),
    Drill("VLLMModelDown", "the only engine of a model is killed", engines.engine_killed, users=True),
    Drill("VLLMSlowStart", "the engine stands still for 80 s as it starts", engines.engine_starts_slowly,
        fires_within_s=300, resolves_within_s=300),
    Drill("VLLMRestartLoop", "the engine is killed three times", engines.engine_restarts, pace=10, fires_within_s=600,
        resolves_within_s=600),
    # Engines of their own
    Drill("VLLMQueueTimeHigh", "sixteen clients share the one slot of a slow engine", engines.more_asked_than_answered,
        DrillEngine.ONE_SLOT),
    Drill("VLLMTTFTHigh", "sixteen clients share the one slot of a slow engine", engines.more_asked_than_answered,
        DrillEngine.ONE_SLOT),
    Drill("VLLMQueueGrowing", "more requests come than the one slot of a slow engine answers",
        engines.queue_without_end,
        DrillEngine.ONE_SLOT),
    Drill(
        "VLLMKVCacheNearlyFull", "a cache of 768 tokens, and 24 clients with long answers", engines.cache_too_small,
        DrillEngine.SMALL_CACHE,
        fires_within_s=400,
    ),
    Drill("VLLMPreemptionsSustained", "a cache of 768 tokens, and 24 clients with long answers",
        engines.cache_too_small,
        DrillEngine.SMALL_CACHE),
    Drill("VLLMKVCacheThrashing", "a cache of 768 tokens, and 24 clients with long answers", engines.cache_too_small,
        DrillEngine.SMALL_CACHE),
    Drill("VLLMEngineRejecting", "sixteen clients, and an engine that takes four", requests.more_than_the_engine_takes,
        DrillEngine.SHORT_QUEUE),
    Drill("VLLMAcceptanceLow", "n-grams are drafted for answers at random", engines.nothing_to_guess,
        DrillEngine.GUESSING, pace=QUICKER),
    Drill("VLLMHTTPErrorRatioHigh", "the engine's tool parser fails, and there is no request log",
        engines.tool_calls_fail, DrillEngine.FAILING),
)  # fmt: skip

FAST = (
    "VLLMRequestLogUnwritable",
    "VLLMGatewayDown",
    "VLLMSidecarDown",
    "VLLMGPUMissing",
    "VLLMEngineFrozen",
    "VLLMEngineUnreachable",
)

WHY_NOT = {
    "VLLMShipFailing": "the lab ships no logs; tests/exporters/dataset/test_ship.py lets a store and a disk fail",
    **dict.fromkeys(
        ("VLLMGoldenDiffers", "VLLMGoldenStale"),
        "the lab checks no golden prompts; tests/live/test_golden_live.py checks damaged copies of its model",
    ),
    "VLLMDatasetDiffers": (
        "a complete day has to pass first; tests/exporters/accounting/test_conservation.py compares a recorded one"
    ),
    **dict.fromkeys(
        ("VLLMCanaryRolledBack", "VLLMCanaryUndecided"),
        "the lab has one engine; tests/live/test_canary_live.py rolls a canary back",
    ),
    "VLLMScrapeNearLimit": (
        "no page of the lab's comes near its sample_limit; one that does is in tests/stack/deploy/test_fleet.py"
    ),
    "VLLMGatewayReplicaDown": (
        "the lab of a drill has one gateway; tests/support/alert_cases.py has one of two down, and a rolling restart"
    ),
    "VLLMGatewayNotSharing": (
        "the lab has one gateway and no store; tests/stack/gateway/test_gateway_leases_live.py stops one"
    ),
    **dict.fromkeys(
        ("VLLMKVBlocksExpired", "VLLMKVTransferSlow", "VLLMKVTransferStuck", "VLLMKVTransfersFailing"),
        "it needs a prefill and a decode engine, and the lab has one engine that does both",
    ),
    "VLLMLatencyWorseThanLastWeek": "it compares with a week ago, and the lab has no such past",
    "VLLMRequestsDeferred": (
        "it needs adapters or a transfer of KV cache between engines, which the lab's tiny model does not have"
    ),
}


def chosen(names: Iterable[str]) -> tuple[Drill, ...]:
    """The drills of these alerts, in the order of the table; `all` and `fast` are names too, VLLM and capitals may be
    left out.

    Raises ValueError for what is no alert, and for an alert that has no drill, with the reason."""
    wanted = {alert for name in names for alert in _meant(name)}
    return tuple(drill for drill in DRILLS if drill.alert in wanted)


def _meant(name: str) -> tuple[str, ...]:
    known = {drill.alert: "" for drill in DRILLS} | WHY_NOT
    groups = {"all": tuple(drill.alert for drill in DRILLS), "fast": FAST}
    if found := groups.get(name.lower()):
        return found
    for alert, why_not in known.items():
        if name.lower() in (alert.lower(), alert.lower().removeprefix("vllm")):
            if why_not:
                raise ValueError(f"{alert} has no drill here: {why_not}")
            return (alert,)
    near = difflib.get_close_matches(name, [*known, *groups], n=1)
    raise ValueError(
        f"{name} is no alert" + (f"; did you mean {near[0]}?" if near else "; see vllm-watch drill --list")
    )
