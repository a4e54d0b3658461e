"""Overview: are users served well right now, and if not, where does it hurt?"""

from __future__ import annotations

from alerts import thresholds
from dashboards.panels import RATE, Board, Panel, Query, Shape, grafana_unit
from exporters.catalogue import ours, promql, vllm
from exporters.catalogue.metric import Metric, Unit
from exporters.catalogue.prometheus import ALERTS, UP

WHERE = ('job=~"$job"', 'instance=~"$instance"', 'model_name=~"$model_name"')
_MODEL = ('model_name=~"$model_name"',)
_FIRING = ('alertstate="firing"',)
_JOBS = ('job=~"vllm.*|sidecar|gateway"',)
_SECONDS = grafana_unit(Unit.SECONDS)
_RATIO = grafana_unit(Unit.RATIO)


def _p95(metric: Metric) -> tuple[Query, ...]:
    return (Query(promql.quantile(0.95, metric, RATE, where=WHERE), "{{model_name}}"),)


def _rate(metric: Metric) -> tuple[Query, ...]:
    return (Query(promql.per_second(metric, RATE, where=WHERE), "{{model_name}}"),)


BOARD = Board(
    slug="overview",
    title="vLLM / Overview",
    question="Are users served well right now, and if not, where does it hurt?",
    variables=(
        ("job", f"label_values({vllm.NUM_REQUESTS_RUNNING.name}, job)"),
        ("instance", f'label_values({vllm.NUM_REQUESTS_RUNNING.name}{{job=~"$job"}}, instance)'),
        ("model_name", f'label_values({vllm.NUM_REQUESTS_RUNNING.name}{{job=~"$job", instance=~"$instance"}}, model_name)'),
    ),
    rows=(
        (
            Panel("ttft-p95", "Time to first token, p95", "From a request's arrival at the engine to its first token, for one in twenty the "
                  "time is longer. Rises first when prompts grow or the queue fills: compare with queue time beside it.",
                  _SECONDS, _p95(vllm.TIME_TO_FIRST_TOKEN), threshold=thresholds.TTFT_P95),
            Panel("inter-token-latency", "Inter-token latency, p95", "Gap between two outputs of a running request: the pace at which users read. "
                  "Below 10 ms the first bucket of vLLM's histogram hides the true value.",
                  _SECONDS, _p95(vllm.INTER_TOKEN_LATENCY)),
            Panel("queue-time", "Queue time, p95", "Waiting in the engine until first scheduled. Near zero is healthy; when it grows, admit less or "
                  "add capacity. "
                  "vLLM's first bound is 0.3 s, so values below it are estimates.",
                  _SECONDS, _p95(vllm.REQUEST_QUEUE_TIME), threshold=thresholds.QUEUE_TIME_P95),
        ),
        (
            Panel("generation-throughput", "Generation throughput", "Tokens generated per second, all engines together.",
                  grafana_unit(Unit.TOKENS, per_second=True), _rate(vllm.GENERATION_TOKENS)),
            Panel("prompt-throughput", "Prompt throughput", "Prompt tokens taken in per second, those found in the prefix cache included.",
                  grafana_unit(Unit.TOKENS, per_second=True), _rate(vllm.PROMPT_TOKENS)),
            Panel("cache-hit-ratio", "Prefix cache hit ratio", "Share of looked-up prompt tokens found in the prefix cache. What is good depends on "
                  "how much your prompts share; a sudden fall means that templates or routing changed. Empty while nothing is asked.",
                  _RATIO, (Query(promql.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, RATE, where=WHERE), "{{model_name}}"),)),
        ),
        (
            Panel("queue-depth", "Requests running and waiting", "Running requests share each step of the engine; waiting ones are not scheduled. "
                  "Waiting above zero for long means that the engine is full.",
                  grafana_unit(Unit.REQUESTS), (
                      Query(promql.current(vllm.NUM_REQUESTS_RUNNING, where=WHERE), "running {{model_name}}"),
                      Query(promql.current(vllm.NUM_REQUESTS_WAITING, where=WHERE), "waiting {{model_name}}"),
                  )),
            Panel("kv-cache-usage", "KV cache use, fullest engine", "Share of KV-cache blocks in use on the fullest engine of a model. "
                  "Full while requests wait means preemption: work computed twice.",
                  _RATIO, (Query(promql.worst(vllm.KV_CACHE_USAGE, where=WHERE), "{{model_name}}"),), threshold=thresholds.KV_CACHE_USAGE),
            Panel("error-ratio", "Error ratio", "Share of requests that ended in an error or timeout, from the request log. Refusals are policy "
                  "and not "
                  "counted here. Needs the gateway's log and the sidecar.",
                  _RATIO, (Query(promql.share(ours.REQUESTS, ours.REQUESTS, RATE, part_where=('outcome=~"upstream_error|timeout"',), where=_MODEL),
                                 "{{model_name}}"),), threshold=thresholds.ERROR_RATIO, optional="needs the sidecar",
                  full_scale=False),
        ),
        (
            Panel("engines-up", "Targets up", "1 while Prometheus reaches an engine or the sidecar.", grafana_unit(Unit.FLAG),
                  (Query(promql.series(UP, _JOBS), "{{job}} {{instance}}"),),
                  shape=Shape.NUMBER, width=12, height=5),
            Panel("firing-alerts", "Firing alerts", "What fires right now; the watchdog always does.", "short",
                  (Query(f"count by (alertname, severity) ({promql.series(ALERTS, _FIRING)})", "{{alertname}}"),),
                  shape=Shape.TABLE, width=12, height=5, optional="needs our rules"),
        ),
    ),
)  # fmt: skip
