"""Diagnosis of alerts on latencies."""

from __future__ import annotations

from exporters.catalogue import gateway, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_TEAM, EACH_OF_MODEL, ENGINE, HERE, MODEL, DiagnosisRow, at, eq

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMQueueTimeHigh": (
        DiagnosisRow(
            "cache use above 0.9",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) > 0.9",
            "memory is the limit; more slots would make it worse",
            "[VLLMKVCacheNearlyFull](VLLMKVCacheNearlyFull.md)",
        ),
        DiagnosisRow(
            "requests wait, the number that runs does not move, the cache has room",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 0 "
            f"and {promql.highest(vllm.NUM_REQUESTS_RUNNING, '10m', ENGINE, HERE)} == "
            f"{promql.lowest(vllm.NUM_REQUESTS_RUNNING, '10m', ENGINE, HERE)} "
            f"and max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) < 0.8",
            "the limit of slots",
            "Mitigation 5",
            finding="queue-bound",
        ),
        DiagnosisRow(
            "requests wait, steps carry four times as many tokens as requests run, the cache has room",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 0 "
            f"and sum by (instance, model_name) (rate({at(vllm.ITERATION_TOKENS, *HERE, part='_sum')}[10m])) / "
            f"(sum by (instance, model_name) (rate({at(vllm.ITERATION_TOKENS, *HERE, part='_count')}[10m])) > 0) "
            f"> 4 * {promql.average(vllm.NUM_REQUESTS_RUNNING, '10m', ENGINE, HERE)} "
            f"and max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) < 0.8",
            "long prompts take the tokens of each step, the rest stands behind them",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "requests wait, and a fifth fewer tokens are made than an hour ago",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 0 "
            f"and {promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE)} < 0.8 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE, offset='1h')}",
            "the engine became slower: clocks, a neighbour, an option, longer prompts",
            "[VLLMInterTokenLatencyHigh](VLLMInterTokenLatencyHigh.md)",
        ),
        DiagnosisRow(
            "another engine of this model has no queue",
            f"max by (model_name) ({promql.lowest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}) > 0 "
            f"and min by (model_name) ({promql.highest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}"
            ") == 0",
            "the balancer: sticky sessions, weights, long-lived connections",
            "Mitigation 1",
            finding="queue-uneven",
        ),
        DiagnosisRow(
            "more than five wait here all the time, and the gateway holds nobody back",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '10m', ENGINE, HERE)} > 5 "
            f"and on () sum({at(gateway.SLOTS)}) >= sum({at(gateway.SLOTS_LIMIT)})",
            (
                "it cannot read this engine's figures (its log says so), `waiting` of its capacity is set higher, "
                "or requests pass by it"
            ),
            "Mitigation 6",
        ),
        DiagnosisRow(
            "a team has twice as much under way as its mean of the hour",
            f"{promql.current(gateway.INFLIGHT, BY_TEAM)} > 2 * {promql.average(gateway.INFLIGHT, '1h', BY_TEAM)} "
            f"and {promql.current(gateway.INFLIGHT, BY_TEAM)} > 10",
            "a burst: a batch job, a retry loop",
            "Mitigation 2",
        ),
    ),
    "VLLMTTFTHigh": (
        DiagnosisRow(
            "the budget burns as well",
            f"{at(prometheus.ALERTS, eq('alertname', 'VLLMTTFTBudgetBurn'), eq('alertstate', 'firing'), MODEL)}",
            "an incident",
            "[VLLMTTFTBudgetBurn](VLLMTTFTBudgetBurn.md)",
        ),
        DiagnosisRow(
            "queue is more than half",
            f"sum by (model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m]))",
            "more comes in than is finished",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "an engine started within a quarter of an hour",
            f"time() - {at(prometheus.PROCESS_START, eq('job', 'vllm.*'))} < 900",
            "cold caches, first compilations",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "streams are fast, the engine's figure is not",
            f"histogram_quantile(0.95, sum by (model_name, le) (rate({at(sidecar.TTFT, MODEL, part='_bucket')}"
            "[10m]))) < 2.5 and on (model_name) histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[10m]))) > 2.5",
            "batch requests without stream",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prefill is more than half, and the longest twentieth of prompts is ten times the median",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) "
            "and histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_bucket')}[10m]))) > 10 * histogram_quantile(0.5, sum "
            f"by (model_name, le) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_bucket')}[10m])))",
            "a few long prompts",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "clients wait half a second longer than the engine takes",
            f"sum by (model_name) (rate({at(sidecar.TTFT, MODEL, part='_sum')}[10m])) / (sum by (model_name) "
            f"(rate({at(sidecar.TTFT, MODEL, part='_count')}[10m])) > 0) - on (model_name) sum by (model_name) "
            f"(rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by (model_name) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0) > 0.5",
            "the way in front of the engine: gateway, network, slow uploads",
            "Mitigation 4",
        ),
    ),
    "VLLMInterTokenLatencyHigh": (
        DiagnosisRow(
            "the budget burns as well",
            f"{at(prometheus.ALERTS, eq('alertname', 'VLLMInterTokenBudgetBurn'), eq('alertstate', 'firing'), MODEL)}",
            "an incident",
            "[VLLMInterTokenBudgetBurn](VLLMInterTokenBudgetBurn.md)",
        ),
        DiagnosisRow(
            "the median is long as well",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[10m]))) > 0.075",
            "every step: a large batch, long contexts, slow clocks",
            "Mitigation 1; [VLLMGPUThrottled](VLLMGPUThrottled.md) if it fires",
        ),
        DiagnosisRow(
            "the median is short, and requests are preempted",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[10m]))) <= 0.075 "
            f"and {promql.per_second(vllm.NUM_PREEMPTIONS, '10m', where=(MODEL,))} > 0",
            "each preempted answer stops for seconds",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
        ),
        DiagnosisRow(
            "the median is short, nobody is preempted, and more prompt tokens than answer tokens are computed",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[10m]))) <= 0.075 "
            f"and {promql.per_second(vllm.NUM_PREEMPTIONS, '10m', where=(MODEL,))} == 0 "
            f"and sum by (model_name) (rate({at(vllm.ITERATION_TOKENS, MODEL, part='_sum')}[10m])) > 2 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', where=(MODEL,))}",
            "steps that carry chunks of long prompts are long",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a gap brings well over one token",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', where=(MODEL,))} / (sum by (model_name) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[10m])) > 0) > 1.5",
            "speculative decoding: fewer, longer gaps",
            "Mitigation 3",
        ),
    ),
    "VLLMLatencyWorseThanLastWeek": (
        DiagnosisRow(
            "first tokens under 0.1 s and gaps under 25 ms all the same",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[1h]))) < 0.1 "
            "and histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[1h]))) < 0.025",
            "a difference that nobody feels, partly a matter of buckets",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a fifth more requests",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,))} > 1.2 * "
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,), offset='1w')}",
            "growth, or another kind of day",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts a fifth longer",
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h])) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h])) > 1.2 * sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h] offset 1w)) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h] offset 1w))",
            "a template, tools or retrieval grew",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the prefix cache hits a quarter less",
            f"sum by (model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[1h])) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1h])) > 0) < 0.75 * sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_HITS, MODEL)}[1h] offset 1w)) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1h] offset 1w)) > 0)",
            "what prompts begin with has changed, or a restart",
            "[VLLMCacheHitsCollapsed](VLLMCacheHitsCollapsed.md)",
        ),
        DiagnosisRow(
            "fewer engines of this model",
            f"count by (model_name) ({promql.current(vllm.NUM_REQUESTS_RUNNING, EACH_OF_MODEL, (MODEL,))}) < "
            "count by (model_name) ("
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, EACH_OF_MODEL, (MODEL,), offset='1w')})",
            "one is down, or was taken away",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "a change within the week, and neither more requests nor longer prompts",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            f"604800 unless on () ({promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,))} > 1.2 * "
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,), offset='1w')} "
            f"or sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h])) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h])) > 1.2 * sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1h] offset 1w)) / "
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1h] offset "
            "1w)))",
            "the release or option",
            "Mitigation 4",
        ),
    ),
    "VLLMLatencyWorseSinceTuning": (
        DiagnosisRow(
            "two or more changes within an hour and a half",
            f"sum(increase({at(sidecar.EVENTS, eq('kind', 'change|version|config'))}[90m])) > 1.5",
            "their effects cannot be separated",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "requests differ by a fifth",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,))} / ("
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,), offset='1h')} > 0) > 1.2 "
            f"or {promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,))} / ("
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,), offset='1h')} > 0) < 0.8",
            "another load: no comparison",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts a fifth longer",
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.2 * sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1h)) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1h))",
            "another load: no comparison",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the hit ratio is a fifth below what it was",
            f"sum by (model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[10m])) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[10m])) > 0) < 0.8 * sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_HITS, MODEL)}[30m] offset 1h)) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[30m] offset 1h)) > 0)",
            "the restart emptied the cache",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "gaps between tokens longer, first tokens earlier",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[30m]))) > 1.15 * histogram_quantile(0.95, sum "
            f"by (model_name, le) (rate({at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[30m] offset 1h))) "
            "and histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[30m]))) < histogram_quantile(0.95, sum by "
            f"(model_name, le) (rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[30m] offset 1h)))",
            "a trade, as a larger `--max-num-batched-tokens` or `--max-num-seqs` makes it",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "both worse, at a like number of requests",
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
            "engines of several releases",
            f"count(count by (version) ({at(sidecar.ENGINE_INFO)})) > 1",
            "a rollout that is under way or stopped half-way, between releases with other default bounds",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "one release",
            f"count(count by (version) ({at(sidecar.ENGINE_INFO)})) == 1",
            "some engines were started with `--custom-histogram-buckets`, others without or with another list",
            "Mitigation 2",
        ),
    ),
}
