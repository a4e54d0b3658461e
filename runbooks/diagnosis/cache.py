"""Diagnosis of alerts on the KV cache and the prefix cache."""

from __future__ import annotations

from exporters.catalogue import gateway, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_TEAM, ENGINE, INSTANCE, MODEL, DiagnosisRow, at, eq

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMKVCacheNearlyFull": (
        DiagnosisRow(
            "requests are preempted",
            f"{promql.growth(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} > 0",
            "running requests need more blocks than the cache has",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
            finding="kv-bound",
        ),
        DiagnosisRow(
            "no request waits and none is preempted",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) > 0.9 "
            "unless on (instance, model_name) ("
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ENGINE, (MODEL, INSTANCE))} > 0 "
            f"or {promql.growth(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} > 0)",
            "the load fits the engine; there is nothing to fix",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "requests wait, none is preempted",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ENGINE, (MODEL, INSTANCE))} > 0 "
            "unless on (instance, model_name) "
            f"{promql.growth(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} > 0",
            "cache memory is the limit; the engine admits no more than fits",
            "Mitigation 2, then 4",
            finding="kv-full",
        ),
        DiagnosisRow(
            "another engine of the model uses over 30 percentage points less of its cache",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) - on (model_name) "
            f"group_left () min by (model_name) ({at(vllm.KV_CACHE_USAGE, MODEL)}) > 0.3",
            "the routing sends the long requests to this engine",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "prompts are over 30 % longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "a changed template, more retrieved text, or longer chat histories",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the cache is over 5 % smaller than yesterday",
            f"{promql.worst(sidecar.KV_CAPACITY, ('model_name', 'upstream'), (MODEL,))} < 0.95 * "
            f"{promql.worst(sidecar.KV_CAPACITY, ('model_name', 'upstream'), (MODEL,), offset='1d')}",
            "a restart with other options, or with less free memory on the GPU",
            "Mitigation 5",
        ),
    ),
    "VLLMPreemptionsSustained": (
        DiagnosisRow(
            "the cache is full and requests wait",
            f"max by (instance, model_name) (max_over_time({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}[10m])) > "
            "0.9 and on (instance, model_name) "
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ENGINE, (MODEL, INSTANCE))} > 0",
            "running requests need more cache than this engine has",
            "Mitigation 1, then 3",
            finding="kv-bound",
        ),
        DiagnosisRow(
            "answers are over 30 % longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum "
            f"by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "a larger `max_tokens`, or longer answers of the model; answers grow after admission",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts are over 30 % longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "a changed template or more retrieved text",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "few requests are preempted, some of them more than three times",
            "histogram_quantile(0.99, sum by (instance, model_name, le) (rate("
            f"{at(vllm.REQUEST_NUM_PREEMPTIONS, MODEL, INSTANCE, part='_bucket')}[10m]))) > 3 "
            "and on (instance, model_name) "
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} / "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, (MODEL, INSTANCE))} < 0.5",
            "a few very long requests among short ones",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the cache is over 5 % smaller than yesterday",
            f"{promql.worst(sidecar.KV_CAPACITY, ('model_name', 'upstream'), (MODEL,))} < 0.95 * "
            f"{promql.worst(sidecar.KV_CAPACITY, ('model_name', 'upstream'), (MODEL,), offset='1d')}",
            "a restart with other options, or with less free memory on the GPU",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "cache use was never above 0.9 in ten minutes",
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '5m', ENGINE, (MODEL, INSTANCE))} > 0 "
            "unless on (instance, model_name) max by (instance, model_name) (max_over_time("
            f"{at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}[10m])) > 0.9",
            "a client resets the cache (development endpoint `/reset_prefix_cache`), or it fills between two scrapes",
            "Mitigation 5",
        ),
    ),
    "VLLMKVCacheThrashing": (
        DiagnosisRow(
            "over 30 % fewer tokens than an hour ago, with at least as many running requests",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, (MODEL, INSTANCE))} < 0.7 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, (MODEL, INSTANCE), offset='1h')} "
            "and on (instance, model_name) "
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '5m', ENGINE, (MODEL, INSTANCE))} >= sum by (instance, "
            f"model_name) (avg_over_time({at(vllm.NUM_REQUESTS_RUNNING, MODEL, INSTANCE)}[5m] offset 1h))",
            "the engine computes preempted requests again",
            "Mitigation 1, at once",
        ),
        DiagnosisRow(
            "more requests wait than run",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ENGINE, (MODEL, INSTANCE))} > "
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, ENGINE, (MODEL, INSTANCE))}",
            "demand exceeds what this engine can do",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "another engine of the model uses over 30 percentage points less of its cache",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) - on (model_name) "
            f"group_left () min by (model_name) ({at(vllm.KV_CACHE_USAGE, MODEL)}) > 0.3",
            "the routing sends this engine too many requests",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the gateway has not lowered its slots",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) > 0.95 "
            f"and on () sum({at(gateway.SLOTS)}) >= sum({at(gateway.SLOTS_LIMIT)})",
            "it cannot read this engine's metrics (its log says so), or requests bypass it",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the engine started within the last two hours",
            f"max by (instance) (time() - {at(prometheus.PROCESS_START, INSTANCE)}) < 7200",
            "new options, or a smaller cache than before",
            "[rollback](rollback.md)",
        ),
        DiagnosisRow(
            "fewer than 0.1 preemptions per finished request",
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} / "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, (MODEL, INSTANCE))} < 0.1",
            "the engine runs at its limit and still works",
            "Mitigation 4",
        ),
    ),
    "VLLMCacheHitsCollapsed": (
        DiagnosisRow(
            "an engine restarted within the last hour",
            f"sum by (instance, model_name) (resets({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1h])) > 0",
            "its cache is empty and fills with traffic",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the model has more engines than an hour ago",
            f"count by (model_name) (count by (instance, model_name) ({at(vllm.NUM_REQUESTS_RUNNING, MODEL)})) > "
            f"count by (model_name) (count by (instance, model_name) ({at(vllm.NUM_REQUESTS_RUNNING, MODEL)} "
            "offset 1h))",
            "the new engine's cache is empty; an engine cannot use the blocks of another",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "running requests use over 90 % of the cache",
            f"max by (model_name) (max_over_time({at(vllm.KV_CACHE_USAGE, MODEL)}[30m])) > 0.9",
            "cached blocks are evicted before another request needs them",
            "[VLLMKVCacheNearlyFull](VLLMKVCacheNearlyFull.md)",
        ),
        DiagnosisRow(
            "the hit ratios of two engines differ by more than 0.3",
            f"max by (model_name) (sum by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[30m])) "
            f"/ sum by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[30m]))) - min by "
            f"(model_name) (sum by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[30m])) / sum "
            f"by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[30m]))) > 0.3",
            "routing, or one engine with other options",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a team's cached share of prompt tokens is a third below its daily share",
            f"{promql.per_second(sidecar.TOKENS, '30m', BY_TEAM, (eq('type', 'cached'), MODEL))} / "
            f"{promql.per_second(sidecar.TOKENS, '30m', BY_TEAM, (eq('type', 'prompt'), MODEL))} < 0.67 * "
            f"{promql.per_second(sidecar.TOKENS, '1d', BY_TEAM, (eq('type', 'cached'), MODEL))} / "
            f"{promql.per_second(sidecar.TOKENS, '1d', BY_TEAM, (eq('type', 'prompt'), MODEL))}",
            "its template changed near the start: a date, a name, an id, or another order of tools",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a team sends over twice its daily share of the prompt tokens",
            f"{promql.per_second(sidecar.TOKENS, '30m', BY_TEAM, (eq('type', 'prompt'), MODEL))} / on () "
            f"group_left () sum(rate({at(sidecar.TOKENS, eq('type', 'prompt'), MODEL)}[30m])) > 2 * "
            f"{promql.per_second(sidecar.TOKENS, '1d', BY_TEAM, (eq('type', 'prompt'), MODEL))} / on () "
            f"group_left () sum(rate({at(sidecar.TOKENS, eq('type', 'prompt'), MODEL)}[1d]))",
            "new traffic without shared prefixes evicts the blocks of other traffic",
            "Mitigation 4",
        ),
    ),
    "VLLMAcceptanceLow": (
        DiagnosisRow(
            "acceptance is over 20 % lower than yesterday",
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, '30m', where=(MODEL,))} / "
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, '30m', where=(MODEL,))} < 0.8 * "
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, '30m', where=(MODEL,), offset='1d')} / "
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, '30m', where=(MODEL,), offset='1d')}",
            "other language, prose instead of code, higher temperature, or an adapter that the draft does not know",
            "Mitigation 1, then 4",
        ),
        DiagnosisRow(
            "the first drafted token is rejected in over half of the drafts",
            (
                promql.per_second(
                    vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS, "30m", where=(eq("position", "0"), MODEL)
                )
                + f" / {promql.per_second(vllm.SPEC_DECODE_NUM_DRAFTS, '30m', where=(MODEL,))} < 0.5"
            ),
            "the draft does not fit the model or its traffic",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the first drafted token is mostly accepted, a later one in under 20 % of the drafts",
            (
                promql.per_second(
                    vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS, "30m", ("model_name", "position"), (MODEL,)
                )
                + " / on (model_name) group_left () "
                f"{promql.per_second(vllm.SPEC_DECODE_NUM_DRAFTS, '30m', where=(MODEL,))} < 0.2 "
                "unless on (model_name) "
                + promql.per_second(
                    vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS, "30m", where=(eq("position", "0"), MODEL)
                )
                + f" / {promql.per_second(vllm.SPEC_DECODE_NUM_DRAFTS, '30m', where=(MODEL,))} < 0.5"
            ),
            "drafts are too long",
            "Mitigation 2",
            finding="speculative-decoding",
        ),
        DiagnosisRow(
            "more than 32 requests run on an engine",
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '30m', ENGINE, (MODEL,))} > 32",
            "in large batches compute, not memory, is the limit: rejected tokens cost time",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a change was recorded within the last day",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 86400",
            "another model, adapter, draft or release",
            "[rollback](rollback.md)",
        ),
    ),
}
