"""Diagnosis of alerts on the KV cache and the prefix cache."""

from __future__ import annotations

from exporters.catalogue import gateway, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_TEAM, ENGINE, INSTANCE, MODEL, DiagnosisRow, at, eq

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMKVCacheNearlyFull": (
        DiagnosisRow(
            "requests are preempted",
            f"{promql.growth(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} > 0",
            "more is promised than fits; the forecast has come true",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
            finding="kv-bound",
        ),
        DiagnosisRow(
            "nobody waits, nobody is preempted",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) > 0.9 "
            "unless on (instance, model_name) ("
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ENGINE, (MODEL, INSTANCE))} > 0 "
            f"or {promql.growth(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} > 0)",
            "the engine is used well",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "requests wait, none is preempted",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ENGINE, (MODEL, INSTANCE))} > 0 "
            "unless on (instance, model_name) "
            f"{promql.growth(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} > 0",
            "memory is the limit, and admission still holds",
            "Mitigation 2, then 4",
            finding="kv-full",
        ),
        DiagnosisRow(
            "another engine of the model has much more room",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) - on (model_name) "
            f"group_left () min by (model_name) ({at(vllm.KV_CACHE_USAGE, MODEL)}) > 0.3",
            "routing gives this one the long requests",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "prompts are a third longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "a changed template, more retrieved text, growing chat histories",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the cache is smaller than yesterday",
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
            "more is asked for than this engine holds",
            "Mitigation 1, then 3",
            finding="kv-bound",
        ),
        DiagnosisRow(
            "answers are a third longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum "
            f"by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "a larger `max_tokens`, or the model rambles; answers grow after admission, which no admission sees",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts are a third longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "a changed template or more retrieved text",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "few requests, each many times",
            "histogram_quantile(0.99, sum by (instance, model_name, le) (rate("
            f"{at(vllm.REQUEST_NUM_PREEMPTIONS, MODEL, INSTANCE, part='_bucket')}[10m]))) > 3 "
            "and on (instance, model_name) "
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} / "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, (MODEL, INSTANCE))} < 0.5",
            "some very long requests among short ones",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the cache is smaller than yesterday",
            f"{promql.worst(sidecar.KV_CAPACITY, ('model_name', 'upstream'), (MODEL,))} < 0.95 * "
            f"{promql.worst(sidecar.KV_CAPACITY, ('model_name', 'upstream'), (MODEL,), offset='1d')}",
            "a restart with other options, or with less free memory on the GPU",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the cache was never full",
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '5m', ENGINE, (MODEL, INSTANCE))} > 0 "
            "unless on (instance, model_name) max by (instance, model_name) (max_over_time("
            f"{at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}[10m])) > 0.9",
            (
                "somebody resets the cache under running requests (`/reset_prefix_cache` of the development "
                "endpoints), or it fills between two scrapes"
            ),
            "Mitigation 5",
        ),
    ),
    "VLLMKVCacheThrashing": (
        DiagnosisRow(
            "work fell while as many run",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, (MODEL, INSTANCE))} < 0.7 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, (MODEL, INSTANCE), offset='1h')} "
            "and on (instance, model_name) "
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '5m', ENGINE, (MODEL, INSTANCE))} >= sum by (instance, "
            f"model_name) (avg_over_time({at(vllm.NUM_REQUESTS_RUNNING, MODEL, INSTANCE)}[5m] offset 1h))",
            "it thrashes: work is repeated",
            "Mitigation 1, at once",
        ),
        DiagnosisRow(
            "more wait than run",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ENGINE, (MODEL, INSTANCE))} > "
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, ENGINE, (MODEL, INSTANCE))}",
            "more is asked for than this engine can do at all",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "another engine of the model has much more room",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) - on (model_name) "
            f"group_left () min by (model_name) ({at(vllm.KV_CACHE_USAGE, MODEL)}) > 0.3",
            "routing",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the gateway holds nobody back",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) > 0.95 "
            f"and on () sum({at(gateway.SLOTS)}) >= sum({at(gateway.SLOTS_LIMIT)})",
            (
                "it lowers its slots by itself above `kv_usage` (default 0.9) and after each preemption: it "
                "cannot read this engine's figures (its log says so), or requests pass by it"
            ),
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the engine started within the last two hours",
            f"max by (instance) (time() - {at(prometheus.PROCESS_START, INSTANCE)}) < 7200",
            "new options, or a smaller cache than before",
            "[rollback](rollback.md)",
        ),
        DiagnosisRow(
            "hardly anybody is preempted",
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '10m', ENGINE, (MODEL, INSTANCE))} / "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, (MODEL, INSTANCE))} < 0.1",
            "a full engine at its edge, which works",
            "Mitigation 4",
        ),
    ),
    "VLLMCacheHitsCollapsed": (
        DiagnosisRow(
            "an engine began again within the hour",
            f"sum by (instance, model_name) (resets({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1h])) > 0",
            "its cache is cold and fills with traffic",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "an engine is new",
            f"count by (model_name) (count by (instance, model_name) ({at(vllm.NUM_REQUESTS_RUNNING, MODEL)})) > "
            f"count by (model_name) (count by (instance, model_name) ({at(vllm.NUM_REQUESTS_RUNNING, MODEL)} "
            "offset 1h))",
            "its cache is cold, and what one engine has computed does not help another",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "running requests fill the cache",
            f"max by (model_name) (max_over_time({at(vllm.KV_CACHE_USAGE, MODEL)}[30m])) > 0.9",
            "blocks are evicted before anyone asks for them again",
            "[VLLMKVCacheNearlyFull](VLLMKVCacheNearlyFull.md)",
        ),
        DiagnosisRow(
            "one engine hits, another does not",
            f"max by (model_name) (sum by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[30m])) "
            f"/ sum by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[30m]))) - min by "
            f"(model_name) (sum by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[30m])) / sum "
            f"by (instance, model_name) (rate({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[30m]))) > 0.3",
            "routing, or one engine with other options",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a team's prompts hit a third less than over its day",
            f"{promql.per_second(sidecar.TOKENS, '30m', BY_TEAM, (eq('type', 'cached'), MODEL))} / "
            f"{promql.per_second(sidecar.TOKENS, '30m', BY_TEAM, (eq('type', 'prompt'), MODEL))} < 0.67 * "
            f"{promql.per_second(sidecar.TOKENS, '1d', BY_TEAM, (eq('type', 'cached'), MODEL))} / "
            f"{promql.per_second(sidecar.TOKENS, '1d', BY_TEAM, (eq('type', 'prompt'), MODEL))}",
            "its template changed near the start: a date, a name, an id, another order of tools",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a team sends twice its share of the day",
            f"{promql.per_second(sidecar.TOKENS, '30m', BY_TEAM, (eq('type', 'prompt'), MODEL))} / on () "
            f"group_left () sum(rate({at(sidecar.TOKENS, eq('type', 'prompt'), MODEL)}[30m])) > 2 * "
            f"{promql.per_second(sidecar.TOKENS, '1d', BY_TEAM, (eq('type', 'prompt'), MODEL))} / on () "
            f"group_left () sum(rate({at(sidecar.TOKENS, eq('type', 'prompt'), MODEL)}[1d]))",
            "other traffic, which shares nothing and evicts what others share",
            "Mitigation 4",
        ),
    ),
    "VLLMAcceptanceLow": (
        DiagnosisRow(
            "it was a fifth higher yesterday",
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, '30m', where=(MODEL,))} / "
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, '30m', where=(MODEL,))} < 0.8 * "
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, '30m', where=(MODEL,), offset='1d')} / "
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, '30m', where=(MODEL,), offset='1d')}",
            (
                "other traffic: another language, prose instead of code, a higher temperature, an adapter that "
                "the draft does not know"
            ),
            "Mitigation 1, then 4",
        ),
        DiagnosisRow(
            "the first token is often wrong",
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
            "the first is mostly right, late ones hardly ever",
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
            "more than 32 requests run at once",
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '30m', ENGINE, (MODEL,))} > 32",
            (
                "with five tokens a draft that is about 200 tokens a step, where arithmetic and no longer memory "
                "is the limit of current GPUs: drafts are not free any more"
            ),
            "Mitigation 3",
        ),
        DiagnosisRow(
            "something was changed within the day",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 86400",
            "another model, adapter, draft or release",
            "[rollback](rollback.md)",
        ),
    ),
}
