"""Diagnosis of alerts on latencies."""

from __future__ import annotations

from exporters.catalogue import gateway, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_TEAM, EACH_OF_MODEL, ENGINE, HERE, MODEL, DiagnosisRow, at, eq

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMQueueTimeHigh": (
        DiagnosisRow(
            "cache use is above 0.9",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) > 0.9",
            "memory is the limit; more running requests would make it worse",
            "[VLLMKVCacheNearlyFull](VLLMKVCacheNearlyFull.md)",
        ),
        DiagnosisRow(
            "requests wait, the number of running requests is constant, cache use is below 0.8",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 0 "
            f"and {promql.highest(vllm.NUM_REQUESTS_RUNNING, '10m', ENGINE, HERE)} == "
            f"{promql.lowest(vllm.NUM_REQUESTS_RUNNING, '10m', ENGINE, HERE)} "
            f"and max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) < 0.8",
            "the limit of running requests, `--max-num-seqs`",
            "Mitigation 5",
            finding="queue-bound",
        ),
        DiagnosisRow(
            "requests wait, steps have over four tokens per running request, cache use is below 0.8",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 0 "
            f"and sum by (instance, model_name) (rate({at(vllm.ITERATION_TOKENS, *HERE, part='_sum')}[10m])) / "
            f"(sum by (instance, model_name) (rate({at(vllm.ITERATION_TOKENS, *HERE, part='_count')}[10m])) > 0) "
            f"> 4 * {promql.average(vllm.NUM_REQUESTS_RUNNING, '10m', ENGINE, HERE)} "
            f"and max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) < 0.8",
            "long prompts use the tokens of each step; other requests wait behind them",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "requests wait, and the engine generates over 20 % fewer tokens than an hour ago",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 0 "
            f"and {promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE)} < 0.8 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE, offset='1h')}",
            "a slower engine: GPU clocks, another process on the machine, an option, longer prompts",
            "[VLLMInterTokenLatencyHigh](VLLMInterTokenLatencyHigh.md)",
        ),
        DiagnosisRow(
            "another engine of this model has no queue",
            f"max by (model_name) ({promql.lowest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}) > 0 "
            f"and min by (model_name) ({promql.highest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}"
            ") == 0",
            "the load balancer: sticky sessions, weights, long-lived connections",
            "Mitigation 1",
            finding="queue-uneven",
        ),
        DiagnosisRow(
            "more than five requests wait all the time, and the gateway has not lowered its slots",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 5 "
            f"and on () sum({at(gateway.SLOTS)}) >= sum({at(gateway.SLOTS_LIMIT)})",
            "it cannot read this engine's metrics (see its log), its `waiting` is set higher, or requests bypass it",
            "Mitigation 6",
        ),
        DiagnosisRow(
            "a team has over twice its hourly average of requests in flight",
            f"{promql.current(gateway.INFLIGHT, BY_TEAM)} > 2 * {promql.average(gateway.INFLIGHT, '1h', BY_TEAM)} "
            f"and {promql.current(gateway.INFLIGHT, BY_TEAM)} > 10",
            "a burst: a batch job or a retry loop",
            "Mitigation 2",
        ),
    ),
    "VLLMTTFTHigh": (
        DiagnosisRow(
            "VLLMTTFTBudgetBurn fires as well",
            f"{at(prometheus.ALERTS, eq('alertname', 'VLLMTTFTBudgetBurn'), eq('alertstate', 'firing'), MODEL)}",
            "an incident: the error budget is being spent",
            "[VLLMTTFTBudgetBurn](VLLMTTFTBudgetBurn.md)",
        ),
        DiagnosisRow(
            "queue time is more than half of queue and prefill time",
            f"sum by (model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m]))",
            "more requests arrive than the engines finish",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "an engine started within the last 15 minutes",
            f"time() - {at(prometheus.PROCESS_START, eq('job', 'vllm.*'))} < 900",
            "empty caches and first compilations",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "streams are below 2.5 s at the client, the engine's p95 is above",
            f"histogram_quantile(0.95, sum by (model_name, le) (rate({at(sidecar.TTFT, MODEL, part='_bucket')}"
            "[10m]))) < 2.5 and on (model_name) histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[10m]))) > 2.5",
            "batch requests without streaming",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prefill time is more than half, and the p95 prompt is over ten times the median",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) "
            "and histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_bucket')}[10m]))) > 10 * histogram_quantile(0.5, sum "
            f"by (model_name, le) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_bucket')}[10m])))",
            "a few long prompts",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "clients measure over 0.5 s more than the engine",
            f"sum by (model_name) (rate({at(sidecar.TTFT, MODEL, part='_sum')}[10m])) / (sum by (model_name) "
            f"(rate({at(sidecar.TTFT, MODEL, part='_count')}[10m])) > 0) - on (model_name) sum by (model_name) "
            f"(rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by (model_name) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0) > 0.5",
            "delay in front of the engine: gateway, network, slow uploads",
            "Mitigation 4",
        ),
    ),
    "VLLMInterTokenLatencyHigh": (
        DiagnosisRow(
            "VLLMInterTokenBudgetBurn fires as well",
            f"{at(prometheus.ALERTS, eq('alertname', 'VLLMInterTokenBudgetBurn'), eq('alertstate', 'firing'), MODEL)}",
            "an incident: the error budget is being spent",
            "[VLLMInterTokenBudgetBurn](VLLMInterTokenBudgetBurn.md)",
        ),
        DiagnosisRow(
            "the median is above 75 ms as well",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[10m]))) > 0.075",
            "every step is slow: a large batch, long contexts, low GPU clocks",
            "Mitigation 1; [VLLMGPUThrottled](VLLMGPUThrottled.md) if it fires",
        ),
        DiagnosisRow(
            "the median is at most 75 ms, and requests are preempted",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[10m]))) <= 0.075 "
            f"and {promql.per_second(vllm.NUM_PREEMPTIONS, '10m', where=(MODEL,))} > 0",
            "each preempted answer pauses for seconds",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
        ),
        DiagnosisRow(
            "the median is at most 75 ms, no preemptions, more prompt tokens than answer tokens computed",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[10m]))) <= 0.075 "
            f"and {promql.per_second(vllm.NUM_PREEMPTIONS, '10m', where=(MODEL,))} == 0 "
            f"and sum by (model_name) (rate({at(vllm.ITERATION_TOKENS, MODEL, part='_sum')}[10m])) > 2 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', where=(MODEL,))}",
            "steps with chunks of long prompts are slow",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a gap brings over 1.5 tokens on average",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', where=(MODEL,))} / (sum by (model_name) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[10m])) > 0) > 1.5",
            "speculative decoding: fewer and longer gaps",
            "Mitigation 3",
        ),
    ),
    "VLLMLatencyWorseThanLastWeek": (
        DiagnosisRow(
            "p95 is still below 0.1 s to the first token and below 25 ms between tokens",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[1h]))) < 0.1 "
            "and histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[1h]))) < 0.025",
            "a difference that users do not notice, partly an effect of bucket bounds",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "over 20 % more requests than a week ago",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,))} > 1.2 * "
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,), offset='1w')}",
            "growth, or a different kind of day",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts are over 20 % longer than a week ago",
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h])) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h])) > 1.2 * sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h] offset 1w)) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h] offset 1w))",
            "a longer template, more tools or more retrieved text",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the prefix-cache hit ratio is over 25 % lower than a week ago",
            f"sum by (model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[1h])) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1h])) > 0) < 0.75 * sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_HITS, MODEL)}[1h] offset 1w)) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1h] offset 1w)) > 0)",
            "the start of the prompts has changed, or an engine restarted",
            "[VLLMCacheHitsCollapsed](VLLMCacheHitsCollapsed.md)",
        ),
        DiagnosisRow(
            "the model has fewer engines than a week ago",
            f"count by (model_name) ({promql.current(vllm.NUM_REQUESTS_RUNNING, EACH_OF_MODEL, (MODEL,))}) < "
            "count by (model_name) ("
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, EACH_OF_MODEL, (MODEL,), offset='1w')})",
            "an engine is down or was removed",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "a change within the week, without 20 % more requests or longer prompts",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            f"604800 unless on () ({promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,))} > 1.2 * "
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,), offset='1w')} "
            f"or sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h])) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h])) > 1.2 * sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h] offset 1w)) / "
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h] offset "
            "1w)))",
            "the new release or option",
            "Mitigation 4",
        ),
    ),
    "VLLMLatencyWorseSinceTuning": (
        DiagnosisRow(
            "two or more changes within 90 minutes",
            f"sum(increase({at(sidecar.EVENTS, eq('kind', 'change|version|config'))}[90m])) > 1.5",
            "their effects cannot be separated",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "over 20 % more or fewer requests than an hour ago",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,))} / ("
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,), offset='1h')} > 0) > 1.2 "
            f"or {promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,))} / ("
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,), offset='1h')} > 0) < 0.8",
            "different load: the comparison is not valid",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts are over 20 % longer than an hour ago",
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.2 * sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1h)) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1h))",
            "different load: the comparison is not valid",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the prefix-cache hit ratio is over 20 % lower than an hour ago",
            f"sum by (model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[10m])) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[10m])) > 0) < 0.8 * sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_HITS, MODEL)}[30m] offset 1h)) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[30m] offset 1h)) > 0)",
            "the restart emptied the cache",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "time between tokens rose by over 15 %, time to first token fell",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[30m]))) > 1.15 * histogram_quantile(0.95, sum "
            f"by (model_name, le) (rate({at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[30m] offset 1h))) "
            "and histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[30m]))) < histogram_quantile(0.95, sum by "
            f"(model_name, le) (rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[30m] offset 1h)))",
            "a trade-off of a larger `--max-num-batched-tokens` or `--max-num-seqs`",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "both rose by over 15 %, with at most 20 % more requests",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[30m]))) > 1.15 * histogram_quantile(0.95, sum "
            f"by (model_name, le) (rate({at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[30m] offset 1h))) "
            "and histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[30m]))) > 1.15 * histogram_quantile(0.95, sum "
            f"by (model_name, le) (rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[30m] offset 1h))) "
            f"and {promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,))} <= 1.2 * "
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,), offset='1h')}",
            "the change",
            "[rollback.md](rollback.md)",
        ),
    ),
    "VLLMMixedHistogramBounds": (
        DiagnosisRow(
            "engines run different releases",
            f"count(count by (version) ({at(sidecar.ENGINE_INFO)})) > 1",
            "a rollout in progress or stopped half-way, between releases with different default bounds",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "all engines run the same release",
            f"count(count by (version) ({at(sidecar.ENGINE_INFO)})) == 1",
            "some engines have `--custom-histogram-buckets`, others have none or another list",
            "Mitigation 2",
        ),
    ),
}
