"""Requests: who fails, who is refused, who gives up, and whether the log and the engines tell the same story."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE, MODEL, TARGET, TEAM, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import attributed, gateway, promql, reconciled, sidecar, vllm
from exporters.catalogue.metric import Metric

_OK = ('outcome="ok"',)
_ALL = ("cluster",)  # all models together: an adapter or an alias has another name in the log than at the engine
_MONEY = ("cluster", "currency")
_ALL_THE_TIME = ('basis="allocation"',)
_REACHED = ('outcome!="rejected"',)  # what an engine may have seen
_BY_POLICY = ('outcome="rejected"', 'reason!~"engine_busy|bad_request"')  # refused by us, not by the engine
_CUT_OFF = ('finished_reason="length"',)
_REQUESTS = 'kind="requests"'
# what an engine finished and took with it, or before anybody looked, is nobody's fault
_UNEXPLAINED = 'cause!~"restart|start"'


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
    finished = recorded.FINISHED_IN_ALL
    failed = recorded.requests(s, sidecar.FAILED)
    reached, ok = (f"sum {by(_ALL)} ({recorded.LOGGED_IN_ALL}{{{', '.join(where)}}})" for where in (_REACHED, _OK))
    cut_off = recorded.share(recorded.BY_REASON, recorded.FINISHED, "30m", s, _CUT_OFF)
    cut_often = f"sum {by(MODEL)} ({recorded.counted(recorded.BY_REASON, '30m', s, where=_CUT_OFF)}) >= {few}"
    spent = f"{promql.current(sidecar.GPU_COST, _MONEY)} / 3600"
    attributed_cost = promql.per_second(attributed.COST, hour, _MONEY, _ALL_THE_TIME)
    tokens = " + ".join(
        promql.per_second(made, hour, ("cluster",)) for made in (vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS)
    )
    unread = promql.lowest(sidecar.LOG_BYTES_BEHIND, five, (*TARGET, "path"))
    behind = promql.worst(sidecar.LOG_LAG, (*TARGET, "path"))
    return (
        Alert(
            "VLLMErrorRatioHigh",
            Severity.WARNING,
            f"{promql.per(failed, recorded.requests(s))} > {errors} and {failed} >= {few}",
            hold="5m",
            keep_firing="5m",
            summary="Too many requests fail.",
            description=(
                "{{ $value | humanizePercentage }} of the requests for {{ $labels.model_name }} end in an error or a"
                " timeout."
            ),
            panel=PanelRef("overview", "error-ratio"),
            threshold=errors,
            muted_by=("VLLMSuccessBudgetBurn",),
        ),
        Alert(
            "VLLMEngineRejecting",
            Severity.WARNING,
            f"{promql.growth(vllm.ADMISSION_REJECTIONS, five, ENGINE)} >= {refusals}",
            hold="2m",
            keep_firing="5m",
            summary="An engine refuses requests by its own limit.",
            description=(
                "{{ $labels.instance }} has refused {{ $value | humanize }} requests for {{ $labels.model_name }}"
                " within five minutes; a refused stream looks like HTTP 200 to who only counts statuses."
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
            summary="A team has many requests refused.",
            description=(
                "{{ $value | humanizePercentage }} of the requests of team {{ $labels.team }} are refused by the"
                " gateway."
            ),
            panel=PanelRef("teams", "refused"),
            threshold=refused,
            drawn=False,
        ),
        Alert(
            "VLLMClientHangupsRising",
            Severity.WARNING,
            _hangups(s),
            hold="5m",
            keep_firing="5m",
            summary="Clients give up waiting.",
            description=(
                "{{ $value | humanizePercentage }} of the clients of {{ $labels.model_name }} close the connection"
                " before their answer is complete."
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
            summary="Many answers end at their length limit.",
            description=(
                "{{ $value | humanizePercentage }} of the answers of {{ $labels.model_name }} are cut off by max_tokens"
                " or the context length."
            ),
            panel=PanelRef("tuning-options", "finish-reasons"),
            threshold=cut,
            drawn=False,
        ),
        Alert(
            "VLLMEngineExceedsLog",
            Severity.WARNING,
            _booked(s, reconciled.MISSING_IN_LOG, reconciled.ENGINE, _more(s, finished, reached)),
            hold="15m",
            summary="Engines finish requests that nobody logged.",
            description=(
                "The engines{{ with $labels.cluster }} of {{ . }}{{ end }} finished {{ $value | humanize }} more"
                " requests{{ with $labels.model_name }} for {{ . }}{{ end }} in half an hour than the request log"
                " knows: somebody passes by the gateway, or records are lost."
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
            _booked(s, reconciled.EXTRA_IN_LOG, reconciled.LOGGED, _more(s, ok, finished), _UNEXPLAINED),
            hold="15m",
            summary="The log holds requests that no engine finished.",
            description=(
                "The request log{{ with $labels.cluster }} of {{ . }}{{ end }} has {{ $value | humanize }} more good"
                " requests{{ with $labels.model_name }} for {{ . }}{{ end }} in half an hour than the engines finished:"
                " an engine is not watched, or records were written twice."
            ),
            panel=PanelRef("monitoring-health", "extra-in-log"),
            threshold=s.at(thresholds.BOOKS_DIFFER),
            drawn=False,
            muted_by=("VLLMEngineDown", "VLLMEngineUnreachable", "VLLMEngineGone"),
        ),
        Alert(
            "VLLMRequestLogLagging",
            Severity.WARNING,
            f"{behind} > {lag} and {on(TARGET)} {promql.growth(sidecar.LOG_LINES, five, TARGET)} > 0 or {unread} >"
            f" {s.at(thresholds.LOG_UNREAD)}",
            hold="5m",
            summary="Request records are counted late.",
            description=(
                "{{ $labels.instance }} counts the records of {{ $labels.path }} more than a minute late, or cannot"
                " keep up with them: figures per team are that late."
            ),
            panel=PanelRef("monitoring-health", "log-lag"),
            threshold=lag,
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMRequestLogUnwritable",
            Severity.WARNING,
            f"{promql.growth(gateway.LOG_ERRORS, five, TARGET)} > 0 or {promql.growth(gateway.LOG_LOST, five, TARGET)}"
            f" > 0 or {promql.current(gateway.LOG_LOST_BEFORE, TARGET)} > 0",
            hold="1m",
            summary="The gateway cannot write its request log, or a crash lost records.",
            description=(
                "{{ $labels.instance }} failed to write request records: they wait in memory, and are lost when there"
                " are too many. Or it ended within the last hour without writing the records of requests that it had"
                " accepted."
            ),
            panel=PanelRef("monitoring-health", "gateway-log"),
            muted_by=("VLLMGatewayDown",),
        ),
        Alert(
            "VLLMCostOverBudget",
            Severity.WARNING,
            f"({attributed_cost} or {spent} unless {on(_ALL)} {attributed_cost}) / {on(_ALL)} group_left () (({tokens})"
            f" > 0) * 1000 > {on(_MONEY)} {promql.current(sidecar.COST_BUDGET, _MONEY)}",
            hold="1h",
            summary="A thousand tokens cost more than the budget.",
            description=(
                'A thousand tokens cost {{ $value | printf "%.3g" }} {{ $labels.currency }} over the last hour, '
                "cards that stood idle included."
            ),
            panel=PanelRef("cost", "cost-per-1k"),
        ),
    )


def _hangups(s: Settings) -> str:
    """The share of clients that left: from the request log, and where a model has none, from requests whose first token
    was made and whose end never came. Those that still run are no hang-ups, so all of them are taken off, which makes
    that half slow to fire and never hasty."""
    ratio, few = s.at(thresholds.HANGUP_RATIO), s.at(thresholds.ERRORS_AT_LEAST)
    left, everyone = (recorded.requests(s, where) for where in (recorded.HUNG_UP, ()))
    usually = promql.per(*(recorded.requests(s, where, "1d") for where in (recorded.HUNG_UP, ())))
    logged = f"({promql.per(left, everyone)} > {ratio}) > 2 * ({usually}) and {left} >= {few}"
    begun, ended = (
        recorded.observed(recorded.TTFT),
        promql.observation_count(vllm.E2E_REQUEST_LATENCY, s.window("5m"), MODEL),
    )
    open_ended = f"({begun} - {ended} - {promql.current(vllm.NUM_REQUESTS_RUNNING, MODEL)})"
    missing_in_log = f"{promql.per(open_ended, begun)} > {ratio} and {open_ended} >= {few}"
    return f"({logged}) or ({missing_in_log}) unless {on(MODEL)} {everyone}"


def _booked(s: Settings, amiss: Metric, whole: Metric, otherwise: str, *where: str) -> str:
    """How many requests a sidecar booked as amiss within half an hour, by model, where they are more than a share of
    the whole; where no sidecar compares the log with engines, what Prometheus can compare."""
    half, each = s.window(recorded.BOOKS), (_REQUESTS,)
    counted = promql.growth(amiss, half, MODEL, (*each, *where))
    much = f"{counted} > {s.at(thresholds.BOOKS_DIFFER)} * ({promql.growth(whole, half, MODEL, each)})"
    return (
        f"({counted} >= {s.at(thresholds.BOOKS_DIFFER_AT_LEAST)} and {much}) or ({otherwise}) unless {on(_ALL)}"
        f" {promql.series(reconciled.SETTLED)}"
    )


def _more(s: Settings, these: str, those: str) -> str:
    """By how many requests one count is ahead of the other, where it is ahead by more than what is under way
    explains."""
    ahead = f"({these} - {those})"
    return (
        f"{ahead} >= {s.at(thresholds.LOG_DIFFERS_AT_LEAST)} and {ahead} > {s.at(thresholds.LOG_DIFFERS)} * ({these})"
    )
