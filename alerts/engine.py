"""Alerts on engines: unreachable, hung, restarting, slow to start, or with a growing queue."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE_POD, JOB, PLACE, TARGET, TARGET_POD, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import gateway, golden, promql, sidecar, vllm
from exporters.catalogue.prometheus import PROCESS_START, UP
from exporters.text import format_duration, parse_window

FROZEN_FOR = "3m"  # longer than a prefill takes
FROZEN_ALERT_FOR = "4m"  # below the 5 min after which vLLM ends an engine whose worker hangs
QUEUE_FOR = "10m"  # a queue that has grown for this long does not drain by itself
FETCHING = 'stage="in_progress"'  # requests whose KV cache another engine sends
_CHECKED_ENGINE = ("address", "model_name")  # of a golden check; instance is the sidecar that reports it
_GOLDEN_VERDICT, _NOT_SAME = (*TARGET_POD, *_CHECKED_ENGINE, "verdict", "cause"), ('verdict!="same"',)
_MISSED_CHECKS = 3  # intervals without a check: one may wait for the budget of tokens, and one may fail
_DEFERRED = ('reason="deferred"',)


def frozen(window: str, labels: tuple[str, ...], where: tuple[str, ...] = ()) -> str:
    """Return the engines that had requests during the whole window and processed no token; the value is the requests.

    An engine counts only if requests ran or waited at every scrape of the window, it was scraped at its beginning and
    is scraped now: an idle engine with its first request is not hung, nor is one that is gone. Prompt tokens count
    when a prefill is done, so the window must be longer than the longest prefill. A decode engine that runs nothing and
    fetches KV cache waits for another engine: VLLMKVTransferStuck has it."""
    running, waiting = vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING
    had_work = " + ".join(
        f"sum {by(labels)} (min_over_time({promql.series(gauge, where)}[{window}]))" for gauge in (running, waiting)
    )
    made = " + ".join(
        promql.per_second(made, window, labels, where) for made in (vllm.GENERATION_TOKENS, vllm.PROMPT_TOKENS)
    )
    began, here = promql.current(running, labels, where, offset=window), promql.current(running, labels, where)
    fetching = promql.series(vllm.NUM_REQUESTS_KV_FETCH_BY_STAGE, (*where, FETCHING))
    waits = f"{fetching} > 0 unless {on(labels)} {promql.series(running, where)} > 0"
    return f"{had_work} > 0 and {made} == 0 and {began} and {here} unless {on(labels)} ({waits})"


def _in_state(state: str) -> str:
    """Return the engines that a gateway or a sidecar sees in a state, by cluster and instance."""
    seen = " or ".join(
        promql.current(metric, ("cluster", "address"), (promql.equals("state", state),))
        for metric in (gateway.ENGINE_STATE, sidecar.ENGINE_STATE)
    )
    return f'(label_replace({seen}, "instance", "$1", "address", "(.+)") == 1)'


def _hung(s: Settings) -> str:
    """Return the engines that a gateway or a sidecar sees hung; the value is the requests that their own gauges have
    shown last, within an hour. Prometheus must scrape the engine at the address that they use."""
    engines = (
        f"sum {by(ENGINE_POD)} (last_over_time("
        f"{promql.series(vllm.NUM_REQUESTS_RUNNING, (s.engine,))}[{s.window('1h')}]))"
    )
    return f"{engines} and {on(('cluster', 'instance'))} {_in_state('hung')}"


def _model_down(s: Settings, loading: str) -> str:
    """Return the models of the last day that no engine answers for, although an engine should: one that served the
    model is down, or it was replaced by one of the job that has not answered within the time for a start.

    A model that was removed on purpose, together with its engines, is none of them."""
    up = promql.series(UP, (s.engine,))
    served = f"last_over_time({recorded.SERVED}[{s.window('1d')}])"
    new = f"{up} == 0 and last_over_time({up}[{s.window('1h')}] offset {loading}) unless {on(TARGET)} {served}"
    down = f"{served} and {on(TARGET)} {up} == 0"
    replaced = f"{served} unless {on(TARGET)} {up} and {on(JOB)} ({new})"
    model = (*PLACE, "model_name")
    here = promql.series(vllm.NUM_REQUESTS_RUNNING, (s.engine,))
    return f"group {by((*JOB, 'model_name'))} ({down} or {replaced}) unless {on(model)} {here}"


def alerts(s: Settings) -> tuple[Alert, ...]:
    up = promql.series(UP, (s.engine,))
    # an elastic engine that scales answers 503 on /metrics, and is not down
    not_scaling = f"unless {on(('cluster', 'instance'))} {_in_state('scaling')}"
    hour = s.window("1h")
    starts = promql.changes(PROCESS_START, hour, TARGET_POD, (s.engine,))
    resets = promql.resets(vllm.GENERATION_TOKENS, hour, TARGET_POD, (s.engine,))
    slow, again = s.at(thresholds.START_TIME), s.at(thresholds.RESTARTS)
    loading = s.window(format_duration(max(1, round(slow.value))))
    # Leaves out a new engine that loads its model: it was up within the window, or has been a target for longer than a
    # start takes. The hour before that start covers outages of Prometheus itself.
    known = (
        f"(max_over_time({up}[{max(hour, loading, key=parse_window)}]) == 1 or last_over_time({up}[{hour}] offset"
        f" {loading}))"
    )
    length = s.at(thresholds.QUEUE_LENGTH)
    ten = s.window(QUEUE_FOR)
    waiting = vllm.NUM_REQUESTS_WAITING
    return (
        Alert(
            "VLLMEngineDown",
            Severity.CRITICAL,
            f"group {by(JOB)} ({up} {not_scaling}) unless group {by(JOB)} ({up} == 1) and group {by(JOB)} {known}",
            hold="1m",
            summary="vLLM down: no engine of job {{ $labels.job }} answers",
            description=(
                "No engine of job {{ $labels.job }} has answered Prometheus for 1 min: users get connection errors,"
                " or only the network between Prometheus and the engines is down. Check /health of an engine: if it"
                " answers, only Prometheus cannot reach it; if not, read the end of its log."
            ),
            panel=PanelRef("overview", "engines-up"),
            threshold=slow,
            drawn=False,
        ),
        Alert(
            "VLLMModelDown",
            Severity.CRITICAL,
            _model_down(s, loading),
            hold="1m",
            summary="Model down: no engine of {{ $labels.model_name }} answers (job {{ $labels.job }})",
            description=(
                "No engine of job {{ $labels.job }} that served {{ $labels.model_name }} within the last day has"
                " answered for 1 min: requests for this model fail, also while other models of the job are served."
                " Read the end of the log of its engines; until one answers, send its requests to another model"
                " (Mitigation 3)."
            ),
            panel=PanelRef("overview", "engines-up"),
            threshold=slow,
            drawn=False,
            muted_by=("VLLMEngineDown",),
        ),
        Alert(
            "VLLMEngineUnreachable",
            Severity.WARNING,
            f"{up} == 0 and {known} {not_scaling}",
            hold="2m",
            summary="vLLM unreachable: {{ $labels.instance }} of job {{ $labels.job }} does not answer its scrape",
            description=(
                "{{ $labels.instance }} of job {{ $labels.job }} has not answered Prometheus for 2 min, although it"
                " did within the last hour or has had more time than a start takes. Its requests are lost, and the"
                " other engines of the job carry its load. Check whether the process runs, and read the end of its"
                " log."
            ),
            panel=PanelRef("overview", "engines-up"),
            threshold=slow,
            drawn=False,
            muted_by=("VLLMEngineDown", "VLLMRestartLoop"),
        ),
        Alert(
            "VLLMEngineGone",
            Severity.WARNING,
            recorded.lost_jobs(s, s.engine),
            hold="15m",
            summary="vLLM targets lost: service discovery finds no engine of job {{ $labels.job }}",
            description=(
                "Job {{ $labels.job }} had engines within the last day; service discovery has found none for 15"
                " min, so no other alert about them can fire. Check whether the engines still serve. If they were"
                " removed on purpose, silence this alert: it ends after a day."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMMetricsAbsent",
            Severity.WARNING,
            f"{up} == 1 unless {on(TARGET_POD)} {promql.series(vllm.NUM_REQUESTS_RUNNING, (s.engine,))}",
            hold="5m",
            summary="vLLM metrics missing: {{ $labels.instance }} of job {{ $labels.job }} exposes no vllm: series",
            description=(
                "{{ $labels.instance }} of job {{ $labels.job }} has answered its scrape for 5 min without any"
                " vllm: series: its panels are empty, and no other alert about it can fire. Check that the scrape"
                " address is the engine's own port and that vLLM runs without --disable-log-stats."
            ),
            panel=PanelRef("monitoring-health", "scrape-samples"),
            muted_by=("VLLMEngineDown",),
        ),
        Alert(
            "VLLMEngineFrozen",
            Severity.CRITICAL,
            f"{_hung(s)} or {frozen(s.window(FROZEN_ALERT_FOR), ENGINE_POD, (s.engine,))}",
            hold="0s",
            summary="vLLM hung: {{ $labels.model_name }} on {{ $labels.instance }} makes no progress",
            description=(
                "{{ $labels.model_name }} on {{ $labels.instance }} makes no progress: for 30 s by the gateway, 45 s by"
                " the sidecar or 4 min by its own metrics, which last showed {{ $value | humanize }} running requests."
                " Its /health may still return 200, so balancers keep sending to it. Save the stacks of its processes"
                " with py-spy (First five minutes, step 5), then restart this engine."
            ),
            panel=PanelRef("fleet", "frozen"),
            muted_by=("VLLMEngineDown",),
        ),
        Alert(
            "VLLMRestartLoop",
            Severity.CRITICAL,
            f"({starts} or {resets}) >= {again}",
            hold="0s",
            keep_firing="10m",
            summary="vLLM restart loop: {{ $labels.instance }} of job {{ $labels.job }}",
            description=(
                "{{ $labels.instance }} of job {{ $labels.job }} has restarted {{ $value | humanize }} times within"
                " the last hour; each restart loses its requests and its prefix cache. Read the last error in the"
                " log of the previous process: it names the cause, such as lack of memory or a failed worker."
            ),
            panel=PanelRef("fleet", "restarts"),
            threshold=again,
            drawn=False,
        ),
        Alert(
            "VLLMSlowStart",
            Severity.WARNING,
            f"min_over_time({recorded.AGE}[{hour}]) > {slow} "
            f"and max {by(TARGET_POD)} (time() - {promql.series(PROCESS_START, (s.engine,))}) < {s.seconds('1h')} "
            f"and {promql.lowest(UP, hour, TARGET_POD, (s.engine,))} == 0",  # else it was not scraped before
            hold="0s",
            summary="vLLM slow start: {{ $labels.instance }} of job {{ $labels.job }}",
            description=(
                "{{ $labels.instance }} of job {{ $labels.job }} first answered {{ $value | humanizeDuration }}"
                " after its process started, within the last hour: too late to replace a failed engine. Compare the"
                " load, compile and graph-capture times in its log with those of an earlier start."
            ),
            panel=PanelRef("fleet", "up-since"),
            threshold=slow,
            drawn=False,
            muted_by=("VLLMRestartLoop",),
        ),
        Alert(
            "VLLMQueueGrowing",
            Severity.WARNING,
            f"{promql.lowest(waiting, ten, ENGINE_POD)} > {length}"
            f" and {promql.rise(waiting, ten, ENGINE_POD)} >= {length}",
            hold="5m",
            keep_firing="5m",
            summary="Queue growing: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "At least {{ $value | humanize }} requests have waited for {{ $labels.model_name }} on"
                " {{ $labels.instance }} for 10 min, and the queue grows: more arrive than it finishes. Check"
                " whether other engines of the model have room, and send new requests there; if none has, pause"
                " batch work."
            ),
            panel=PanelRef("fleet", "waiting"),
            threshold=length,
            muted_by=("VLLMEngineDown", "VLLMEngineFrozen"),
        ),
        Alert(
            "VLLMRequestsDeferred",
            Severity.WARNING,
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING_BY_REASON, ten, ENGINE_POD, _DEFERRED)} > 0",
            hold="10m",
            summary="Requests deferred: {{ $labels.model_name }} on {{ $labels.instance }}",
            description=(
                "At least {{ $value | humanize }} requests for {{ $labels.model_name }} on {{ $labels.instance }}"
                " have waited for 10 min for an adapter slot, a grammar or a KV-cache transfer, not for free"
                " blocks. Check whether more LoRA adapters are in use than --max-loras admits at once (First five"
                " minutes, step"
                " 3)."
            ),
            panel=PanelRef("overview", "waiting-by-reason"),
            muted_by=("VLLMEngineDown", "VLLMEngineFrozen"),
        ),
        Alert(
            "VLLMGoldenDiffers",
            Severity.WARNING,
            f"{promql.current(golden.GOLDEN_VERDICT, _GOLDEN_VERDICT, _NOT_SAME)} == 1",
            hold="1m",
            summary="Golden prompts {{ $labels.verdict }}: {{ $labels.model_name }} on {{ $labels.address }}",
            description=(
                "{{ $labels.model_name }} on {{ $labels.address }} has been {{ $labels.verdict }} (cause:"
                " {{ $labels.cause }}) for 1 min by its last golden check: it does not compute what was recorded, and"
                " answers may be wrong. Take the engine out of the load balancer unless it was changed on purpose, then"
                " run vllm-watch golden check again (First five minutes, step 2)."
            ),
            panel=PanelRef("monitoring-health", "golden-verdict"),
        ),
        Alert(
            "VLLMGoldenStale",
            Severity.WARNING,
            f"max {by((*TARGET_POD, *_CHECKED_ENGINE))} (time() - {promql.series(golden.GOLDEN_CHECKED)})"
            f" > {_MISSED_CHECKS} * ({promql.current(golden.GOLDEN_INTERVAL, (*TARGET_POD, *_CHECKED_ENGINE))} > 0)",
            hold="5m",
            summary="Golden checks missing: {{ $labels.model_name }} on {{ $labels.address }}",
            description=(
                f"For 5 min more than {_MISSED_CHECKS} intervals have passed since the last complete golden check of"
                " {{ $labels.model_name }} on {{ $labels.address }}, {{ $value | humanizeDuration }}: damage would not"
                " be noticed. Check that vllm-watch golden check runs and reaches the engine, and read the error that"
                " it prints (First five minutes, step 2)."
            ),
            panel=PanelRef("monitoring-health", "golden-age"),
            owner="platform",
        ),
    )
