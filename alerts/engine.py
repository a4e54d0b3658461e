"""Engines: do they answer, do they work, do they stay up?"""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import ENGINE, JOB, TARGET, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, vllm
from exporters.catalogue.prometheus import PROCESS_START, UP
from exporters.text import format_duration, parse_window

# with the minute of waiting less than the five after which vLLM gives up a worker that hangs, and itself
FROZEN_FOR = "3m"
QUEUE_FOR = "10m"  # a queue that stands and grows for so long does not drain by itself
_DEFERRED = ('reason="deferred"',)


def frozen(window: str, labels: tuple[str, ...], where: tuple[str, ...] = ()) -> str:
    """The engines that had work all the time and made nothing of it.

    Work means that requests ran, or waited, in every scrape of the window, and that the engine was there when it began
    and is there now: one that was idle and has just been given its first request is not frozen, nor is one that is
    gone. Prompt tokens count when a prefill is done, so a window shorter than the longest prefill would call that
    frozen."""
    running, waiting = vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING
    had_work = " + ".join(
        f"sum {by(labels)} (min_over_time({promql.series(gauge, where)}[{window}]))" for gauge in (running, waiting)
    )
    made = " + ".join(
        promql.per_second(made, window, labels, where) for made in (vllm.GENERATION_TOKENS, vllm.PROMPT_TOKENS)
    )
    began, here = promql.current(running, labels, where, offset=window), promql.current(running, labels, where)
    return f"{had_work} > 0 and {made} == 0 and {began} and {here}"


def alerts(s: Settings) -> tuple[Alert, ...]:
    up = promql.series(UP, (s.engine,))
    hour = s.window("1h")
    starts = promql.changes(PROCESS_START, hour, TARGET, (s.engine,))
    resets = promql.resets(vllm.GENERATION_TOKENS, hour, TARGET, (s.engine,))
    slow, again = s.at(thresholds.START_TIME), s.at(thresholds.RESTARTS)
    loading = s.window(format_duration(max(1, round(slow.value))))
    # Not one that is new and loads its model: it was up of late, or is known for longer than a start takes. The hour
    # before that start is for times when Prometheus itself was away.
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
            f"group {by(JOB)} ({up}) unless group {by(JOB)} ({up} == 1) and group {by(JOB)} {known}",
            hold="1m",
            summary="No engine of a scrape job answers.",
            description=(
                "None of the engines of job {{ $labels.job }} has answered Prometheus for a minute: their users get"
                " connection errors, or the network between is gone."
            ),
            panel=PanelRef("overview", "engines-up"),
            threshold=slow,
            drawn=False,
        ),
        Alert(
            "VLLMEngineUnreachable",
            Severity.WARNING,
            f"{up} == 0 and {known}",
            hold="2m",
            summary="An engine does not answer its scrape.",
            description=(
                "{{ $labels.instance }} of job {{ $labels.job }} has not answered for two minutes though it did within"
                " the hour, or for longer than a start takes: requests that it had are lost, and the others of the job"
                " carry its load."
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
            summary="A scrape job of engines has no target any more.",
            description=(
                "Job {{ $labels.job }} had engines within the last day, and service discovery finds none now: nothing"
                " about them can alert."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMMetricsAbsent",
            Severity.WARNING,
            f"{up} == 1 unless {on(TARGET)} {promql.series(vllm.NUM_REQUESTS_RUNNING, (s.engine,))}",
            hold="5m",
            summary="An engine's target answers without vLLM's series.",
            description=(
                "{{ $labels.instance }} of job {{ $labels.job }} answers its scrape, but shows no vllm: series: every"
                " panel and every other alert about it is blind."
            ),
            panel=PanelRef("monitoring-health", "scrape-samples"),
            muted_by=("VLLMEngineDown",),
        ),
        Alert(
            "VLLMEngineFrozen",
            Severity.CRITICAL,
            frozen(s.window(FROZEN_FOR), ENGINE, (s.engine,)),
            hold="1m",
            summary="An engine is up and makes no tokens.",
            description=(
                "{{ $labels.model_name }} on {{ $labels.instance }} has had requests for three minutes and made no"
                " token of prompt or answer: health checks pass, and its users wait for ever."
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
            summary="An engine starts again and again.",
            description=(
                "{{ $labels.instance }} has started again {{ $value | humanize }} times within an hour; each time its"
                " requests are lost and its cache is cold."
            ),
            panel=PanelRef("fleet", "restarts"),
            threshold=again,
            drawn=False,
        ),
        Alert(
            "VLLMSlowStart",
            Severity.WARNING,
            f"min_over_time({recorded.AGE}[{hour}]) > {slow} "
            f"and max {by(TARGET)} (time() - {promql.series(PROCESS_START, (s.engine,))}) < {s.seconds('1h')} "
            f"and {promql.lowest(UP, hour, TARGET, (s.engine,))} == 0",  # or nobody had asked it before
            hold="0s",
            summary="An engine took long to start.",
            description=(
                "{{ $labels.instance }} answered only {{ $value | humanizeDuration }} after its process had started;"
                " help that comes so late is no help."
            ),
            panel=PanelRef("fleet", "up-since"),
            threshold=slow,
            drawn=False,
            muted_by=("VLLMRestartLoop",),
        ),
        Alert(
            "VLLMQueueGrowing",
            Severity.WARNING,
            f"{promql.lowest(waiting, ten, ENGINE)} > {length} and {promql.rise(waiting, ten, ENGINE)} >= {length}",
            hold="5m",
            keep_firing="5m",
            summary="An engine's queue grows.",
            description=(
                "{{ $value | humanize }} requests or more have waited for {{ $labels.model_name }} on {{"
                " $labels.instance }} for ten minutes, and they become more: more comes in than it finishes."
            ),
            panel=PanelRef("fleet", "waiting"),
            threshold=length,
            muted_by=("VLLMEngineDown", "VLLMEngineFrozen"),
        ),
        Alert(
            "VLLMRequestsDeferred",
            Severity.WARNING,
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING_BY_REASON, ten, ENGINE, _DEFERRED)} > 0",
            hold="10m",
            summary="Requests are held back for something other than room.",
            description=(
                "{{ $value | humanize }} requests for {{ $labels.model_name }} on {{ $labels.instance }} wait for an"
                " adapter slot, a grammar or a transfer of KV cache, not for room."
            ),
            panel=PanelRef("overview", "waiting-by-reason"),
            muted_by=("VLLMEngineDown", "VLLMEngineFrozen"),
        ),
    )
