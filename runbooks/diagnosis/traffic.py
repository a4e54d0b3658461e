"""Diagnosis of alerts on requests that are refused, cut off or fail, and what they cost."""

from __future__ import annotations

from exporters.catalogue import attributed, gateway, gpu, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import (
    BY_CLUSTER,
    BY_REASON,
    BY_TEAM,
    CLUSTER,
    ENGINE,
    INSTANCE,
    MODEL,
    TEAM,
    DiagnosisRow,
    at,
    eq,
)

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMErrorRatioHigh": (
        DiagnosisRow(
            "no connection, or it broke",
            "sum by (reason) ("
            f"{at(sidecar.REASONS, eq('reason', 'upstream_down|connect_timeout|upstream_reset'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'upstream_down|connect_timeout|upstream_reset'), MODEL)} offset "
            f"10m or {at(sidecar.REASONS, eq('reason', 'upstream_down|connect_timeout|upstream_reset'), MODEL)} * "
            "0)) > 0",
            "an engine is down, restarts, or the network between",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
        DiagnosisRow(
            "the engine answers with errors",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'engine_error|engine_abort'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'engine_error|engine_abort'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'engine_error|engine_abort'), MODEL)} * 0)) > 0",
            "it fails on some requests, or somebody stops or pauses it",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "timeouts of the engine",
            "sum by (reason) ("
            f"{at(sidecar.REASONS, eq('reason', 'prefill_timeout|decode_timeout|total_timeout'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'prefill_timeout|decode_timeout|total_timeout'), MODEL)} offset "
            f"10m or {at(sidecar.REASONS, eq('reason', 'prefill_timeout|decode_timeout|total_timeout'), MODEL)} * "
            "0)) > 0",
            "requests take longer than the gateway waits: it is full, or it stands still",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md), [VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the engine does not accept the gateway's key",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'upstream_auth'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'upstream_auth'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'upstream_auth'), MODEL)} * 0)) > 0",
            "`--api-key` of the engine and `upstream_key_file` of the gateway differ",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the gateway stopped, or failed itself",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'gateway_stopped|gateway_error'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'gateway_stopped|gateway_error'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'gateway_stopped|gateway_error'), MODEL)} * 0)) > 0",
            "a restart that cut what still ran, or a defect; its log has the traceback",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "clients are slow to send",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'body_timeout'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'body_timeout'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'body_timeout'), MODEL)} * 0)) > 0",
            "a client's upload took longer than `timeouts.body_s`: its network, not the service",
            "Mitigation 3",
        ),
    ),
    "VLLMEngineRejecting": (
        DiagnosisRow(
            "it makes no token",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, (MODEL, INSTANCE))} == 0",
            "it stands still, and its queue filled up to the limit",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the cache is full",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) > 0.9 "
            "and on (instance, model_name) "
            f"{promql.growth(vllm.ADMISSION_REJECTIONS, '5m', ENGINE, (MODEL, INSTANCE))} > 0",
            "the limit does its work: more is asked for than fits",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "nobody waits and the cache has room",
            (
                promql.growth(
                    vllm.ADMISSION_REJECTIONS, "5m", ENGINE, (eq("reason", "max_num_queued_reqs"), MODEL, INSTANCE)
                )
                + " > 0 and on (instance, model_name) ("
                f"{promql.highest(vllm.NUM_REQUESTS_WAITING, '5m', ENGINE, (MODEL, INSTANCE))} == 0 "
                f"and max by (instance, model_name) (max_over_time({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}[5m])) < "
                "0.8)"
            ),
            "the limit is below what the engine can do; it counts running requests too",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "tokens are the limit",
            (
                promql.growth(
                    vllm.ADMISSION_REJECTIONS, "5m", ENGINE, (eq("reason", "max_num_queued_tokens"), MODEL, INSTANCE)
                )
                + " > 0"
            ),
            "long prompts arrive faster than they are prefilled",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "another engine of the model refuses nothing",
            f"count by (model_name) ({promql.growth(vllm.ADMISSION_REJECTIONS, '5m', ENGINE, (MODEL,))} == 0) > 0",
            "uneven routing",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "most of the refused are of one team",
            f"{promql.per_second(sidecar.REASONS, '5m', BY_TEAM, (eq('reason', 'engine_busy'), MODEL))} / on () "
            f"group_left () sum(rate({at(sidecar.REASONS, eq('reason', 'engine_busy'), MODEL)}[5m])) > 0.6",
            "a burst, or a client that sends again without waiting",
            "Mitigation 1",
        ),
    ),
    "VLLMGatewayRejecting": (
        DiagnosisRow(
            "unknown keys since `teams.yaml` was read again",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'unknown_key'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'unknown_key'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'unknown_key'), TEAM)} * 0)) > 0 "
            f"and on () (sum(increase({at(gateway.RELOADS, eq('result', 'ok'))}[1h])) > 0 "
            f"or min(time() - {at(prometheus.PROCESS_START, eq('job', 'gateway'))}) < 3600)",
            "a team's hash is missing from it",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "no key, or one that no team has",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'no_key|unknown_key'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'no_key|unknown_key'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'no_key|unknown_key'), TEAM)} * 0)) > 0",
            (
                "a client with an old key, one of another service, or the engine's key; a health check that "
                "posts, a proxy that drops the header, or an unknown client"
            ),
            "Mitigation 1",
        ),
        DiagnosisRow(
            "bodies are too large or broken",
            "sum by (reason) ("
            f"{at(sidecar.REASONS, eq('reason', 'body_too_large|bad_body|uncountable|bodies_full'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'body_too_large|bad_body|uncountable|bodies_full'), TEAM)} offset "
            f"10m or {at(sidecar.REASONS, eq('reason', 'body_too_large|bad_body|uncountable|bodies_full'), TEAM)} "
            "* 0)) > 0",
            (
                "images or documents inside the request; a body that is no JSON, or a client or proxy that breaks "
                "off or announces another length than it sends; more texts in one request than can be counted; "
                "`bodies_full`: many large ones wait at once"
            ),
            "Mitigation 3, or 1",
        ),
        DiagnosisRow(
            "the team's terms do not allow it",
            (
                "sum by (reason) ("
                + at(
                    sidecar.REASONS,
                    eq(
                        "reason", "model_not_allowed|prompt_too_long|prompt_over_limit|output_too_long|context_too_long"
                    ),
                    TEAM,
                )
                + " - ("
                + at(
                    sidecar.REASONS,
                    eq(
                        "reason", "model_not_allowed|prompt_too_long|prompt_over_limit|output_too_long|context_too_long"
                    ),
                    TEAM,
                )
                + " offset 10m or "
                + at(
                    sidecar.REASONS,
                    eq(
                        "reason", "model_not_allowed|prompt_too_long|prompt_over_limit|output_too_long|context_too_long"
                    ),
                    TEAM,
                )
                + " * 0)) > 0"
            ),
            "a client that asks for another model or for more than before, or terms that were changed",
            "Mitigation 1, or 3",
        ),
        DiagnosisRow(
            "it has reached a limit of its own: too many in flight, or it waits beside free slots",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'team_limit'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'team_limit'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'team_limit'), TEAM)} * 0)) > 0 "
            f"or (sum by (reason) ({at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} * 0)) > 0 "
            f"and on () sum(avg_over_time({at(gateway.RUNNING)}[5m])) < 0.9 * sum(avg_over_time("
            f"{at(gateway.SLOTS)}[5m])))",
            (
                "`max_in_flight`, `max_running`, the `ceiling` of its band, or `tokens` of the capacity; often a "
                "client that does not wait after a refusal"
            ),
            "Mitigation 1, then 4",
            finding="rejections-by-team-limit",
        ),
        DiagnosisRow(
            "it waits too long, and slots were lowered",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} * 0)) > 0 "
            f"and on () sum({at(gateway.SLOTS)}) < sum({at(gateway.SLOTS_LIMIT)})",
            "an engine queues, preempts or has a full cache, and the gateway holds back",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md), [VLLMKVCacheThrashing](VLLMKVCacheThrashing.md)",
        ),
        DiagnosisRow(
            "it waits too long, all slots are open and taken",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} * 0)) > 0 "
            f"and on () sum(avg_over_time({at(gateway.RUNNING)}[5m])) >= 0.9 * sum(avg_over_time("
            f"{at(gateway.SLOTS)}[5m])) unless on () sum({at(gateway.SLOTS)}) < sum({at(gateway.SLOTS_LIMIT)})",
            "more is asked for than there is, or others go first",
            "Mitigation 5",
            finding="rejections-by-gateway",
        ),
        DiagnosisRow(
            "the gateway is stopping",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'draining'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'draining'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'draining'), TEAM)} * 0)) > 0",
            "a restart, or one after the other",
            "Mitigation 6",
        ),
    ),
    "VLLMClientHangupsRising": (
        DiagnosisRow(
            "the first token comes late",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[5m]))) > 2.5",
            "a queue, or long prefills; those who left after waiting are in this figure only if they got a token",
            "[VLLMTTFTHigh](VLLMTTFTHigh.md), [VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "tokens come slowly",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[5m]))) > 0.1",
            "a large batch, preemptions, a slow GPU",
            "[VLLMInterTokenLatencyHigh](VLLMInterTokenLatencyHigh.md)",
        ),
        DiagnosisRow(
            "requests run and nothing is made",
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, where=(MODEL,))} > 0 "
            f"unless on (model_name) {promql.per_second(vllm.GENERATION_TOKENS, '2m', where=(MODEL,))} > 0",
            "an engine stands still",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "nearly all are of one team",
            f"{promql.per_second(sidecar.REQUESTS, '5m', BY_TEAM, (eq('outcome', 'client_abort'), MODEL))} / on "
            f"() group_left () sum(rate({at(sidecar.REQUESTS, eq('outcome', 'client_abort'), MODEL)}[5m])) > 0.8",
            "a new release of its client, its timeout, its proxy",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "clients stop reading",
            f"{promql.per_second(sidecar.REASONS, '5m', BY_REASON, (eq('reason', 'client_stalled'), MODEL))} > 0",
            "a client or proxy that cannot keep up with the stream",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "answers are half as long again as yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m])) > 1.5 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum "
            f"by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "people stop an answer that rambles; a stop button is a client disconnect too",
            "Mitigation 3",
        ),
    ),
    "VLLMAnswersCutOff": (
        DiagnosisRow(
            "nearly all answers, to the last",
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '30m', where=(eq('finished_reason', 'length'), MODEL))} / "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,))} > 0.95",
            "a load test that asks for a fixed length",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "nearly all are of one team",
            f"{promql.per_second(sidecar.FINISHES, '30m', BY_TEAM, (eq('finish_reason', 'length'), MODEL))} / on "
            f"() group_left () sum(rate({at(sidecar.FINISHES, eq('finish_reason', 'length'), MODEL)}[30m])) > 0.8",
            "its client's `max_tokens`",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "`max_tokens` is less than twice what answers need",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.REQUEST_PARAMS_MAX_TOKENS, MODEL, part='_bucket')}[30m]))) < 2 * histogram_quantile(0.5, "
            f"sum by (model_name, le) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_bucket')}[30m])))",
            "the limit is too small for these answers",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts are a third longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "prompts leave no room for the answer; see step 3",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "answers are a third longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum "
            f"by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "the model rambles or does not stop: template, generation config, quantization, adapter",
            "Mitigation 3",
        ),
    ),
    "VLLMCostOverBudget": (
        DiagnosisRow(
            "half as many tokens as over the day",
            f"{promql.per_second(vllm.PROMPT_TOKENS, '1h', BY_CLUSTER, (CLUSTER,))} + "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '1h', BY_CLUSTER, (CLUSTER,))} < 0.5 * ("
            f"{promql.per_second(vllm.PROMPT_TOKENS, '1d', BY_CLUSTER, (CLUSTER,))} + "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '1d', BY_CLUSTER, (CLUSTER,))})",
            "night, a weekend, or clients that do not come through",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "an engine ran nothing for an hour",
            f"{promql.highest(vllm.NUM_REQUESTS_RUNNING, '1h', ENGINE, (CLUSTER,))} == 0",
            "more engines than the load needs, or one that gets no traffic",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a GPU did nothing for an hour",
            f"max by (uuid) (max_over_time({at(gpu.UTILIZATION, CLUSTER)}[1h])) < 0.05",
            "no engine uses it, or its engine is gone",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "there are more GPUs than yesterday, or the price changed",
            f"{promql.current(sidecar.GPU_COST, ('cluster', 'currency'), (CLUSTER,))} > 1.05 * "
            f"{promql.current(sidecar.GPU_COST, ('cluster', 'currency'), (CLUSTER,), offset='1d')}",
            "new hosts, or a new price in `sidecar.yaml`",
            "Mitigation 2, then 4",
        ),
        DiagnosisRow(
            "more than half of it is idle",
            (
                promql.per_second(
                    attributed.COST, "1h", BY_CLUSTER, (eq("basis", "allocation"), eq("team", "__idle__"), CLUSTER)
                )
                + " > 0.5 * "
                f"{promql.per_second(attributed.COST, '1h', BY_CLUSTER, (eq('basis', 'allocation'), CLUSTER))}"
            ),
            "too many GPUs for this load",
            "Mitigation 1 or 2",
        ),
        DiagnosisRow(
            "two sidecars tell of one GPU",
            f"count by (cluster, uuid) ({at(gpu.INFO, CLUSTER)}) > 1",
            "its cost is counted twice",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "an engine does not answer its scrape",
            f"{at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "its tokens are missing, its GPUs are not",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
    ),
}
