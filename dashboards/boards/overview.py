"""Dashboard Overview: availability, alerts, TTFT, TPOT, errors; then trends."""

from __future__ import annotations

from alerts import thresholds
from dashboards import queries
from dashboards.boards.latency import TWO_SIDES
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import promql, sidecar, vllm
from exporters.catalogue.metric import Unit
from exporters.catalogue.prometheus import UP

# An engine that was seen within it and does not answer now is down, not unknown: while Prometheus still tries it, and
# once it does not any more. The latter is short, because a replaced pod was meant to go.
_TRIED_WITHIN, _GONE_WITHIN = "1d", "1h"


def _refused_by_the_engine() -> Query:
    """Refusals among all that asked; vLLM counts finished and refused requests apart."""
    refused = promql.per_second(vllm.ADMISSION_REJECTIONS, RATE, where=queries.where(vllm.ADMISSION_REJECTIONS))
    finished = promql.per_second(vllm.REQUEST_SUCCESS, RATE, where=queries.where(vllm.REQUEST_SUCCESS))
    return Query(promql.per(refused, f"({refused} + {finished})"), "engine {{model_name}}", shown_unit(Unit.RATIO))


def _failed_by_status() -> Query:
    """Responses with HTTP 5xx among those with 2xx and 5xx, as vLLM's API server counts them. They have no model; that
    comes from the same engine."""
    target, engine = queries.ENGINE, (*queries.ENGINE, "model_name")

    def answered(where: tuple[str, ...]) -> str:
        narrowed = queries.where(vllm.HTTP_REQUESTS, *vllm.HTTP_INFERENCE, *where)
        grown = promql.per_second(vllm.HTTP_REQUESTS, RATE, target, narrowed)
        of_model = promql.with_labels_of(
            grown, vllm.NUM_REQUESTS_RUNNING, engine, target, queries.where(vllm.NUM_REQUESTS_RUNNING)
        )
        return f"sum by (model_name) ({of_model})"

    failed, ended = answered(vllm.HTTP_FAILED), answered(vllm.HTTP_ENDED)
    return Query(promql.per(f"({failed} or {ended} * 0)", ended), "HTTP 5xx {{model_name}}", shown_unit(Unit.RATIO))


def _unknown() -> Query:
    """Requests of no served model. They belong to none that could be chosen, so only the cluster narrows them."""
    place = tuple(matcher for matcher in queries.where(sidecar.REASONS) if matcher.startswith("cluster"))
    expr = promql.per_second(sidecar.REASONS, RATE, ("reason",), (*place, *queries.UNKNOWN))
    return Query(expr, "{{reason}}", shown_unit(Unit.REQUESTS, per_second=True))


def _engines() -> Query:
    """Targets that showed an engine's series: also those that do not answer any more, and those that are no targets any
    more."""
    place = queries.where(vllm.NUM_REQUESTS_RUNNING)
    engine = tuple(matcher for matcher in place if "model_name" not in matcher)
    tried, gone = (
        f"last_over_time({promql.series(vllm.NUM_REQUESTS_RUNNING, place)}[{within}])"
        for within in (_TRIED_WITHIN, _GONE_WITHIN)
    )
    reports = f"{promql.series(UP, engine)} and on (job, instance) {tried}"
    absent = f"group by (job, instance) ({gone}) * 0"
    return Query(f"{reports} or on (job, instance) ({absent})", "{{instance}}", shown_unit(Unit.FLAG))


BOARD = Dashboard(
    slug="overview",
    title="vLLM / Overview",
    question="Are requests served within their targets now, and if not, which part is slow or failing?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "engines-up",
                    "Engines up",
                    "yes while Prometheus reaches an engine; every target that showed vLLM's series within the last day"
                    " is here. One that is no target any more, such as a replaced pod, stays no for an hour.",
                    "All yes.",
                    "Open the runbook; the Fleet board shows restarts and engines that are up and frozen.",
                    (_engines(),),
                    Shape.NUMBER,
                    detail="fleet",
                    width=5,
                    height=5,
                ),
                Panel(
                    "firing-alerts",
                    "Firing alerts",
                    "Our alerts that fire right now; the watchdog always does, which shows that alerting works.",
                    "VLLMWatchdog alone.",
                    "Open the runbook of the alert: its link is in the notification and under /runbooks/.",
                    (queries.firing(("alertname", "severity")),),
                    Shape.TABLE,
                    detail="monitoring-health",
                    width=7,
                    height=5,
                ),
                Panel(
                    "ttft-now",
                    "TTFT p95",
                    "Time to first token of the last minutes; one request in twenty takes longer.",
                    "Under 2 s for chat.",
                    "See the trend below, then queue time.",
                    (queries.stat_p95(vllm.TIME_TO_FIRST_TOKEN),),
                    Shape.NUMBER,
                    threshold=thresholds.TTFT_P95,
                    detail="latency",
                    width=4,
                    height=5,
                ),
                Panel(
                    "tpot-now",
                    "TPOT p95",
                    "Time per output token, the mean of each finished request; one request in twenty is slower.",
                    "50 ms is twenty tokens a second.",
                    "See the trend below, then running requests and preemptions.",
                    (queries.stat_p95(vllm.REQUEST_TIME_PER_OUTPUT_TOKEN),),
                    Shape.NUMBER,
                    detail="latency",
                    optional="vLLM has this series since 0.11; older engines have inter-token latency.",
                    width=4,
                    height=5,
                ),
                Panel(
                    "error-ratio-now",
                    "Error ratio",
                    "Share of requests that ended in an error or timeout, as the engine counts it.",
                    "Zero, and under 0.5 % at any time.",
                    "Open the runbook; the Teams dashboard shows route, reason and team.",
                    (
                        queries.share(
                            vllm.REQUEST_SUCCESS, vllm.REQUEST_SUCCESS, part_only=('finished_reason="error"',)
                        ),
                    ),
                    Shape.NUMBER,
                    threshold=thresholds.ERROR_RATIO,
                    detail="teams",
                    width=4,
                    height=5,
                ),
            ),
        ),
        DashboardRow(
            "Latency, queue and cache",
            (
                Panel(
                    "ttft-p95",
                    "Time to first token, p95",
                    "From a request's arrival at the engine to its first token; one request in twenty takes longer. A"
                    " request that never gets a first token adds no sample, so a stalled engine looks quiet here.",
                    "Under the dashed line; for chat, under 2 s.",
                    "Look at queue time first: if it rises with it, the engine is full; if not, prompts grew or the"
                    " cache stopped hitting.",
                    (queries.p95(vllm.TIME_TO_FIRST_TOKEN),),
                    threshold=thresholds.TTFT_P95,
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "tpot",
                    "Time per output token, mean of requests, p95",
                    "For each finished request the mean time per token after the first; one request in twenty is"
                    f" slower on average. {TWO_SIDES}",
                    "Close to inter-token latency.",
                    "Far above it, some requests are starved or preempted: see preemptions on the KV cache board.",
                    (
                        queries.p95(vllm.REQUEST_TIME_PER_OUTPUT_TOKEN, called="engine"),
                        queries.p95(sidecar.TPOT, called="client"),
                    ),
                    detail="latency",
                    optional=(
                        "vLLM shows this since 0.11, and the sidecar from the request log; older engines have"
                        " inter-token latency."
                    ),
                    width=6,
                ),
                Panel(
                    "queue-time",
                    "Queue time, mean and p95",
                    "Waiting in the engine until first scheduled. vLLM's first bound is 0.3 s: below it the p95 is"
                    " shown as < 300 ms, and the mean says more.",
                    "Near zero.",
                    "When it grows, the engine is full: admit less, cap outputs, or add a replica.",
                    (
                        queries.mean(vllm.REQUEST_QUEUE_TIME, called="mean"),
                        queries.p95(vllm.REQUEST_QUEUE_TIME, called="p95"),
                    ),
                    threshold=thresholds.QUEUE_TIME_P95,
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "cache-hit-ratio",
                    "Prefix cache hit ratio",
                    "Share of looked-up prompt tokens that were found in the prefix cache. Absent while nothing is"
                    " asked.",
                    "Depends on how much your prompts share; what matters is that it does not fall.",
                    "After a sudden fall look for a changed template, a timestamp early in the prompt, or a new way of"
                    " routing.",
                    (queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES),),
                    detail="kv-cache",
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Errors and rejections",
            (
                Panel(
                    "error-ratio",
                    "Error ratio",
                    "Share of requests that ended in an error or timeout: as the request log knows it, as the engine"
                    " counts it, and by HTTP status. Refusals are policy and stand apart; the engine does not count"
                    " clients that hung up. HTTP 5xx is coarse: it misses streams that fail after their start, and"
                    f" contains rejections by the engine's own limit. {TWO_SIDES}",
                    "Zero, and under 0.5 % at any time.",
                    "Open the runbook; the Teams board says which route, which reason and whose requests.",
                    (
                        queries.share(
                            sidecar.REQUESTS,
                            sidecar.REQUESTS,
                            called="log",
                            part_only=sidecar.FAILED,
                            only=queries.KNOWN,
                        ),
                        queries.share(
                            vllm.REQUEST_SUCCESS,
                            vllm.REQUEST_SUCCESS,
                            called="engine",
                            part_only=('finished_reason="error"',),
                        ),
                        _failed_by_status(),
                    ),
                    threshold=thresholds.ERROR_RATIO,
                    detail="teams",
                    full_scale=False,
                ),
                Panel(
                    "rejection-ratio",
                    "Rejection ratio",
                    "Share of requests that were refused: by the gateway for a team's limits, as the log knows it, and"
                    " by the engine's own queue limit. Requests with an unknown key or model stand apart, below."
                    f" {TWO_SIDES}",
                    "Zero, or what your admission policy means to refuse.",
                    "Open the Teams board: it says which team and for which reason.",
                    (
                        queries.share(
                            sidecar.REQUESTS,
                            sidecar.REQUESTS,
                            called="log",
                            part_only=('outcome="rejected"',),
                            only=queries.KNOWN,
                        ),
                        _refused_by_the_engine(),
                    ),
                    detail="teams",
                    full_scale=False,
                ),
                Panel(
                    "unknown",
                    "Unknown key or model",
                    "Requests per second that no team or served model stands behind, by reason. They are in no ratio"
                    " above. A served model counts here too where the sidecar's table of names is full.",
                    "Next to none.",
                    "unknown_key, no_key: somebody's client has a wrong key, or tries keys. bad_request: a client asks"
                    " for a model that no engine serves; the Teams board says whose.",
                    (_unknown(),),
                    detail="teams",
                    optional=(
                        "No request with an unknown key or model in this range, or no sidecar reads a request log."
                    ),
                    width=8,
                ),
            ),
        ),
        DashboardRow(
            "Requests",
            (
                Panel(
                    "inter-token-latency",
                    "Inter-token latency, p95",
                    "Gap between two outputs of a running request: the pace at which users read. Below 10 ms, the first"
                    " bound of vLLM's histogram, it is shown as < 10 ms.",
                    "Steady; 50 ms is twenty tokens a second, faster than anyone reads.",
                    "It grows with the batch: compare with running requests. Spikes while long prompts arrive mean"
                    " head-of-line blocking.",
                    (queries.p95(vllm.INTER_TOKEN_LATENCY),),
                    threshold=thresholds.INTER_TOKEN_P95,
                    detail="latency",
                ),
                Panel(
                    "queue-depth",
                    "Requests running and waiting",
                    "Running requests share each step of the engine; waiting ones are accepted and not scheduled yet.",
                    "Nobody waits for longer than a moment.",
                    "If running stands at max_num_seqs times the number of engines, the configuration is the limit; if"
                    " it stands below it, the KV cache is.",
                    (
                        queries.now(vllm.NUM_REQUESTS_RUNNING, called="running"),
                        queries.now(vllm.NUM_REQUESTS_WAITING, called="waiting"),
                    ),
                    detail="kv-cache",
                ),
                Panel(
                    "waiting-by-reason",
                    "Waiting, by reason",
                    "capacity waits for room in the batch or the KV cache; deferred is held back by LoRA limits or a KV"
                    " transfer.",
                    "Zero; only capacity says that the engine is full.",
                    "Capacity: see queue time and KV cache. Deferred: see adapters and transfers on the Tuning options"
                    " dashboard.",
                    (queries.now(vllm.NUM_REQUESTS_WAITING_BY_REASON, by=("model_name", "reason")),),
                    Shape.STACK,
                    detail="tuning-options",
                    optional=(
                        "vLLM says by which reason requests wait since 0.20; the engines here are older, or none is"
                        " scraped."
                    ),
                ),
            ),
        ),
        DashboardRow(
            "Throughput and KV cache",
            (
                Panel(
                    "generation-throughput",
                    "Generation throughput",
                    "Tokens generated per second, all engines of a model together.",
                    "Follows demand; under load it stays level while queue time is low.",
                    "A fall while requests run means slower steps: see inter-token latency, preemptions and the GPU's"
                    " clocks.",
                    (queries.rate(vllm.GENERATION_TOKENS),),
                    detail="latency",
                ),
                Panel(
                    "prompt-throughput",
                    "Prompt throughput",
                    "Prompt tokens taken in per second, those found in the prefix cache included.",
                    "Follows demand.",
                    "A jump without more requests means longer prompts: see prompt lengths on the Latency board.",
                    (queries.rate(vllm.PROMPT_TOKENS),),
                    detail="latency",
                ),
                Panel(
                    "kv-cache-usage",
                    "KV cache use, fullest engine",
                    "Share of KV-cache blocks in use on the fullest engine of a model.",
                    "Under 90 %; high use alone is efficient.",
                    "Full while requests wait: preemption, which is work computed twice, is close. See preemptions on"
                    " the KV cache board; shorten contexts or add memory.",
                    (queries.worst(vllm.KV_CACHE_USAGE),),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="kv-cache",
                ),
            ),
        ),
    ),
)
