"""Alerts on requests: failed, rejected, abandoned or truncated; on differences between log and engines; and on cost."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE_POD, MODEL, TARGET_POD, TEAM, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import attributed, gateway, promql, reconciled, sidecar, vllm
from exporters.catalogue.metric import Metric

_OK = ('outcome="ok"',)
_ALL = ("cluster",)  # all models together: an adapter or alias has another name in the log than on the engine
_MONEY = ("cluster", "currency")
_ALLOCATION = ('basis="allocation"',)
_REACHED = ('outcome!="rejected"',)  # requests that reached an engine
_BY_POLICY = ('outcome="rejected"', 'reason!~"engine_busy|bad_request"')  # rejected by the gateway, not by the engine
_TRUNCATED = ('finished_reason="length"',)
_BROKEN = ('reason!="size"',)  # a response that is too long to be read is intact
_REQUESTS = 'kind="requests"'
# counts lost with a restarted engine, or before the sidecar started, are no fault
_UNEXPLAINED = 'cause!~"restart|start"'


_CANARY = ("cluster", "variant")


def alerts(s: Settings) -> tuple[Alert, ...]:
    five, hour = (s.window(w) for w in ("5m", "1h"))
    errors, refusals, refused, cut, lag = (
        s.at(t)
        for t in (
            thresholds.ERROR_RATIO,
            thresholds.ENGINE_REFUSALS,
            thresholds.REFUSAL_RATIO,
            thresholds.CUT_OFF,
            thresholds.LOG_LAG,
        )
    )
    few = s.at(thresholds.ERRORS_AT_LEAST)
    finished = recorded.FINISHED_TOTAL
    failed = recorded.requests(s, sidecar.FAILED)
    by_status = (recorded.HTTP_FAILED + recorded.OVER, recorded.HTTP_ENDED + recorded.OVER)
    reached, ok = (f"sum {by(_ALL)} ({recorded.LOGGED_TOTAL}{{{', '.join(where)}}})" for where in (_REACHED, _OK))
    cut_off = recorded.share(recorded.BY_REASON, recorded.FINISHED, "30m", s, _TRUNCATED)
    cut_often = f"sum {by(MODEL)} ({recorded.counted(recorded.BY_REASON, '30m', s, where=_TRUNCATED)}) >= {few}"
    spent = f"{promql.current(sidecar.GPU_COST, _MONEY)} / 3600"
    attributed_cost = promql.per_second(attributed.COST, hour, _MONEY, _ALLOCATION)
    tokens = " + ".join(
        promql.per_second(made, hour, ("cluster",)) for made in (vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS)
    )
    unread = promql.lowest(sidecar.LOG_BYTES_BEHIND, five, (*TARGET_POD, "path"))
    behind = promql.worst(sidecar.LOG_LAG, (*TARGET_POD, "path"))
    return (
        Alert(
            "VLLMErrorRatioHigh",
            Severity.WARNING,
            f"{promql.per(failed, recorded.requests(s))} > {errors} and {failed} >= {few}",
            hold="5m",
            keep_firing="5m",
            summary="Error ratio high: {{ $labels.model_name }}",
            description=(
                "{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} ended in an error"
                " or a timeout over 5 min. Check the failure reason and the team in the request log (First five"
                " minutes, step"
                " 1), then whether every engine answers."
            ),
            panel=PanelRef("overview", "error-ratio"),
            threshold=errors,
            muted_by=("VLLMSuccessBudgetBurn",),
        ),
        Alert(
            "VLLMHTTPErrorRatioHigh",
            Severity.WARNING,
            f"{promql.per(*by_status)} > {errors} and {by_status[0]} >= {few}",
            hold="5m",
            keep_firing="5m",
            summary="HTTP error ratio high: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.instance }} answered {{ $value | humanizePercentage }} of the requests for"
                " {{ $labels.model_name }} with HTTP 5xx over 5 min. Coarse, as the model has no request log: rejected"
                " and failed streams have status 200. Read the newest errors in the engine's log (First five"
                " minutes, step 1); if"
                " only this engine fails, take it out of the load balancer."
            ),
            panel=PanelRef("overview", "error-ratio"),
            threshold=errors,
            muted_by=("VLLMSuccessBudgetBurn",),
        ),
        Alert(
            "VLLMEngineRejecting",
            Severity.WARNING,
            f"{promql.growth(vllm.ADMISSION_REJECTIONS, five, ENGINE_POD)} >= {refusals}",
            hold="2m",
            keep_firing="5m",
            summary="Engine rejects requests: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.instance }} has rejected {{ $value | humanize }} requests for {{ $labels.model_name }}"
                " within 5 min by its own queue limit; a rejected stream still has HTTP status 200. Check whether"
                " other engines of the model have room, and ask the largest sender to pause batch work."
            ),
            panel=PanelRef("tuning-options", "refused"),
            threshold=refusals,
            drawn=False,
            muted_by=("VLLMEngineDown", "VLLMEngineFrozen"),
        ),
        Alert(
            "VLLMGatewayRejecting",
            Severity.WARNING,
            f"{promql.share(sidecar.REASONS, sidecar.REQUESTS, five, TEAM, _BY_POLICY)} > {refused} "
            f"and {promql.growth(sidecar.REASONS, five, TEAM, _BY_POLICY)} >= {few}",
            hold="5m",
            keep_firing="5m",
            summary="Gateway rejects requests: team {{ $labels.team }}",
            description=(
                "The gateway rejected {{ $value | humanizePercentage }} of the requests of team {{ $labels.team }}"
                " over 5 min. Check the reason (First five minutes, step 1): it distinguishes a limit that is too"
                " low from a"
                " client that does not back off or sends a wrong key."
            ),
            panel=PanelRef("teams", "refused"),
            threshold=refused,
            drawn=False,
        ),
        Alert(
            "VLLMClientHangupsRising",
            Severity.WARNING,
            _disconnects(s),
            hold="5m",
            keep_firing="5m",
            summary="Client disconnects rising: {{ $labels.model_name }}",
            description=(
                "{{ $value | humanizePercentage }} of the clients of {{ $labels.model_name }} closed the connection"
                " over 5 min before their response was complete. Check after how many seconds they left (First five"
                " minutes,"
                " step 1): one age for all is a client timeout, many ages are people who stopped waiting."
            ),
            panel=PanelRef("teams", "outcomes"),
            threshold=s.at(thresholds.HANGUP_RATIO),
            drawn=False,
        ),
        Alert(
            "VLLMAnswersCutOff",
            Severity.INFO,
            f"{cut_off} > {cut} and {cut_often}",
            hold="15m",
            summary="Outputs truncated: {{ $labels.model_name }}",
            description=(
                "{{ $value | humanizePercentage }} of the outputs of {{ $labels.model_name }} were cut off by"
                " max_tokens or the context length over 30 min. Find the team they belong to (First five minutes,"
                " step 1), and"
                " compare its max_tokens with the length of its outputs."
            ),
            panel=PanelRef("tuning-options", "finish-reasons"),
            threshold=cut,
            drawn=False,
        ),
        Alert(
            "VLLMEngineExceedsLog",
            Severity.WARNING,
            _reconciled(s, reconciled.MISSING_IN_LOG, reconciled.ENGINE, _excess(s, finished, reached)),
            hold="15m",
            summary=(
                "Request log incomplete{{ with $labels.model_name }}: {{ . }}{{ end }}{{ with $labels.cluster }} in"
                " {{ . }}{{ end }}"
            ),
            description=(
                "The engines{{ with $labels.cluster }} of {{ . }}{{ end }} finished {{ $value | humanize }} more"
                " requests{{ with $labels.model_name }} for {{ . }}{{ end }} within 30 min than the request log"
                " contains: clients bypass the gateway, or records are lost. Check which model and cause the"
                " sidecar reports (First five minutes, step 1)."
            ),
            panel=PanelRef("monitoring-health", "missing-in-log"),
            threshold=s.at(thresholds.BOOKS_DIFFER),
            drawn=False,
            muted_by=(
                "VLLMSidecarDown",
                "VLLMSidecarGone",
                "VLLMRequestLogUnwritable",
                "VLLMRequestLogLagging",
                "VLLMCheckpointFailing",
            ),
        ),
        Alert(
            "VLLMLogExceedsEngine",
            Severity.WARNING,
            _reconciled(s, reconciled.EXTRA_IN_LOG, reconciled.LOGGED, _excess(s, ok, finished), _UNEXPLAINED),
            hold="15m",
            summary=(
                "Request log exceeds engines{{ with $labels.model_name }}: {{ . }}{{ end }}"
                "{{ with $labels.cluster }} in {{ . }}{{ end }}"
            ),
            description=(
                "The request log{{ with $labels.cluster }} of {{ . }}{{ end }} contains {{ $value | humanize }}"
                " more successful requests{{ with $labels.model_name }} for {{ . }}{{ end }} within 30 min than the"
                " engines finished: an engine is not scraped, or records were written twice. Compare the engines"
                " that the gateway uses with those that Prometheus scrapes."
            ),
            panel=PanelRef("monitoring-health", "extra-in-log"),
            threshold=s.at(thresholds.BOOKS_DIFFER),
            drawn=False,
            muted_by=("VLLMEngineDown", "VLLMEngineUnreachable", "VLLMEngineGone"),
        ),
        Alert(
            "VLLMRequestLogLagging",
            Severity.WARNING,
            f"{behind} > {lag} and {on(TARGET_POD)} {promql.growth(sidecar.LOG_LINES, five, TARGET_POD)} > 0"
            f" or {unread} > {s.at(thresholds.LOG_UNREAD)}",
            hold="5m",
            summary="Request log lagging: {{ $labels.path }} on {{ $labels.instance }}",
            description=(
                "For 5 min, {{ $labels.instance }} has counted the records of {{ $labels.path }} more than"
                f" {lag.shown} late or left part of the file unread: metrics per team are as late. Check whether"
                " the lag still grows (First five minutes, step 1); if it shrinks, wait until the sidecar has caught"
                " up."
            ),
            panel=PanelRef("monitoring-health", "log-lag"),
            threshold=lag,
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMRequestLogUnwritable",
            Severity.WARNING,
            f"{promql.growth(gateway.LOG_ERRORS, five, TARGET_POD)} > 0"
            f" or {promql.growth(gateway.LOG_LOST, five, TARGET_POD)} > 0"
            f" or {promql.current(gateway.LOG_LOST_BEFORE, TARGET_POD)} > 0",
            hold="1m",
            summary="Request log not writable: gateway {{ $labels.instance }}",
            description=(
                "The gateway {{ $labels.instance }} failed to write request records within 5 min: they wait in"
                " memory, and are lost when there are too many. Or it ended within the last hour without writing"
                " the records of accepted requests. Check free space, inodes and permissions on the disk of the"
                " request log."
            ),
            panel=PanelRef("monitoring-health", "gateway-log"),
            muted_by=("VLLMGatewayDown",),
        ),
        Alert(
            "VLLMResponsesUnreadable",
            Severity.WARNING,
            f"{promql.growth(gateway.UNREADABLE, five, (*TARGET_POD, 'route', 'reason'), _BROKEN)} > 0",
            hold="5m",
            keep_firing="5m",
            summary="Responses unreadable ({{ $labels.reason }}): {{ $labels.route }} on {{ $labels.instance }}",
            description=(
                "The gateway {{ $labels.instance }} could not read {{ $value | humanize }} responses of engines to"
                " {{ $labels.route }} within 5 min (reason: {{ $labels.reason }}), and it has gone on for 5 min. Their"
                " requests failed, or their token counts are unknown. Find the engine in the request log (Do this"
                " first, step 2), then ask it directly (step 3)."
            ),
            panel=PanelRef("gateway", "unreadable"),
        ),
        Alert(
            "VLLMGatewayNotSharing",
            Severity.WARNING,
            f"{promql.current(gateway.LEASE_LOST, TARGET_POD)} > 0"
            f" or {promql.current(gateway.LEASE_POLICIES, TARGET_POD)} > 1",
            hold="1m",
            summary="Gateway not sharing limits: {{ $labels.instance }}",
            description=(
                "The gateway {{ $labels.instance }} has had no lease from its Valkey or Redis for 1 min and admits"
                " within a fixed share of every limit, so slots may stay unused. Or gateways have different policies."
                " Read the line `no lease from` or `policies differ` in its log."
            ),
            panel=PanelRef("gateway", "leases"),
            muted_by=("VLLMGatewayDown",),
            owner="platform",
        ),
        Alert(
            "VLLMCostOverBudget",
            Severity.WARNING,
            f"({attributed_cost} or {spent} unless {on(_ALL)} {attributed_cost}) / {on(_ALL)} group_left () (({tokens})"
            f" > 0) * 1000 > {on(_MONEY)} {promql.current(sidecar.COST_BUDGET, _MONEY)}",
            hold="1h",
            summary=(
                "Cost over budget: {{ $labels.currency }} per 1,000 tokens{{ with $labels.cluster }} in cluster"
                " {{ . }}{{ end }}"
            ),
            description=(
                '1,000 tokens have cost {{ $value | printf "%.3g" }} {{ $labels.currency }} over the last hour,'
                " idle GPUs included, which is more than the configured budget. Check how much of the cost is idle"
                " time (team __idle__; First five minutes, step 1) before changing anything: it falls with more load"
                " or fewer"
                " GPUs."
            ),
            panel=PanelRef("cost", "cost-per-1k"),
        ),
        Alert(
            "VLLMCanaryRolledBack",
            Severity.WARNING,
            _canary_ended(s, "roll_back"),
            hold="1m",
            summary="Canary rolled back: variant {{ $labels.variant }}",
            description=(
                "vllm-watch canary stopped variant {{ $labels.variant }} within the last day ({{ $value |"
                " humanizeDuration }} ago), or advises to: it was worse than the other engines, failed, or hung. Read"
                " the reason in its newest event (First five minutes, step 1), and check that its share is 0."
            ),
            panel=PanelRef("gateway", "canary-steps"),
        ),
        Alert(
            "VLLMCanaryUndecided",
            Severity.WARNING,
            f"{_canary_ended(s, 'undecided|interrupted')} or time() - ({_canary('start|raise')}) > {s.seconds('8d')}",
            hold="1m",
            summary="Canary without a verdict: variant {{ $labels.variant }}",
            description=(
                "vllm-watch canary ended without a verdict on variant {{ $labels.variant }} within the last day, or has"
                " not acted within the last week (last act: {{ $value | humanizeDuration }} ago): too little traffic,"
                " teams.yaml changed meanwhile, or the command no longer runs. Read the newest event (First five"
                " minutes, step 1), and decide on the share by hand."
            ),
            panel=PanelRef("gateway", "canary-steps"),
        ),
    )


def _canary_ended(s: Settings, steps: str) -> str:
    """Return the age of a canary's newest act, where it is one of the steps and younger than a day."""
    return f"time() - ({_canary(steps)}) < {s.seconds('1d')}"


def _canary(steps: str) -> str:
    where = (f'step=~"{steps}"',)
    return f"{promql.current(sidecar.CANARY_TIME, _CANARY, where)} > 0"


def _disconnects(s: Settings) -> str:
    """Return the share of clients that disconnected: from the request log, and for a model without one, from requests
    that made a first token and never ended. All running requests are subtracted from those, so this half may fire late
    but not falsely."""
    ratio, few = s.at(thresholds.HANGUP_RATIO), s.at(thresholds.ERRORS_AT_LEAST)
    disconnected, requests = (recorded.requests(s, where) for where in (recorded.DISCONNECTED, ()))
    usually = promql.per(*(recorded.requests(s, where, "1d") for where in (recorded.DISCONNECTED, ())))
    logged = f"({promql.per(disconnected, requests)} > {ratio}) > 2 * ({usually}) and {disconnected} >= {few}"
    begun, ended = (
        recorded.observed(recorded.TTFT),
        promql.observation_count(vllm.E2E_REQUEST_LATENCY, s.window("5m"), MODEL),
    )
    open_ended = f"({begun} - {ended} - {promql.current(vllm.NUM_REQUESTS_RUNNING, MODEL)})"
    missing_in_log = f"{promql.per(open_ended, begun)} > {ratio} and {open_ended} >= {few}"
    return f"({logged}) or ({missing_in_log}) unless {on(MODEL)} {requests}"


def _reconciled(s: Settings, difference: Metric, total: Metric, fallback: str, *where: str) -> str:
    """Return the requests that a sidecar counted as different within 30 min, by model, if they exceed a share of the
    total. `fallback` is the comparison within Prometheus, for deployments without a sidecar that reconciles."""
    half, each = s.window(recorded.RECONCILE_OVER), (_REQUESTS,)
    counted = promql.growth(difference, half, MODEL, (*each, *where))
    much = f"{counted} > {s.at(thresholds.BOOKS_DIFFER)} * ({promql.growth(total, half, MODEL, each)})"
    return (
        f"({counted} >= {s.at(thresholds.BOOKS_DIFFER_AT_LEAST)} and {much}) or ({fallback}) unless {on(_ALL)}"
        f" {promql.series(reconciled.SETTLED)}"
    )


def _excess(s: Settings, larger: str, smaller: str) -> str:
    """Return by how many requests one count exceeds the other, if requests in flight do not explain it."""
    ahead = f"({larger} - {smaller})"
    return (
        f"{ahead} >= {s.at(thresholds.LOG_DIFFERS_AT_LEAST)} and {ahead} > {s.at(thresholds.LOG_DIFFERS)} * ({larger})"
    )
