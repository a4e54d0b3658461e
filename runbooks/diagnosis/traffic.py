"""Diagnosis of alerts on requests that are refused, cut off or fail, and what they cost."""

from __future__ import annotations

from exporters.catalogue import attributed, gateway, gpu, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import (
    BY_CLUSTER,
    BY_INSTANCE,
    BY_REASON,
    BY_TEAM,
    CLUSTER,
    ENGINE,
    INSTANCE,
    MODEL,
    TEAM,
    VARIANT,
    DiagnosisRow,
    at,
    eq,
)

_5XX = promql.growth(vllm.HTTP_REQUESTS, "10m", BY_INSTANCE, (*vllm.HTTP_INFERENCE, *vllm.HTTP_FAILED))
_5XX_HERE = promql.growth(
    vllm.HTTP_REQUESTS, "10m", ("instance", "handler"), (*vllm.HTTP_INFERENCE, *vllm.HTTP_FAILED, INSTANCE)
)
_ENGINES = f"group by (instance) ({at(vllm.NUM_REQUESTS_RUNNING, MODEL)})"
_FAILED = promql.growth(
    gateway.ATTEMPTS, "1h", ("variant",), (VARIANT, 'result!~"ok|engine_busy|bad_request|(client|gateway)_.*"')
)
_HUNG = f"{at(gateway.ENGINE_STATE, eq('state', 'suspect|hung'))} == 1"
_REFUSED_TERMS = (  # reasons
    "model_not_allowed|prompt_too_long|prompt_over_limit|output_too_long|context_too_long"
    "|too_many_outputs|too_many_logprobs"
)
_STOPPED = at(sidecar.CANARY_TIME, VARIANT, eq("step", "roll_back"))

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMHTTPErrorRatioHigh": (
        DiagnosisRow(
            "the engine rejects requests by its own limit",
            f"{promql.growth(vllm.ADMISSION_REJECTIONS, '10m', ENGINE, (MODEL, INSTANCE))} > 0",
            "it is full; some of the rejections are the 5xx, although most are subtracted",
            "[VLLMEngineRejecting](VLLMEngineRejecting.md)",
        ),
        DiagnosisRow(
            "the engine restarted within half an hour",
            f"{promql.changes(prometheus.PROCESS_START, '30m', BY_INSTANCE, (INSTANCE,))} > 0",
            "it crashed, and each crash fails the requests in flight",
            "[VLLMRestartLoop](VLLMRestartLoop.md)",
        ),
        DiagnosisRow(
            "the engine counts errors of its own",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '10m', ENGINE, (eq('finished_reason', 'error'), MODEL, INSTANCE))}"
            " > 0",
            "generation itself fails, as on a failed transfer of KV cache; not the API server",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "another engine of the model has no 5xx",
            f"count({_ENGINES} unless on (instance) {_5XX} > 0) > 0",
            "this engine alone, or the requests that only it gets",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "every engine of the model, and there are several, has 5xx",
            f"count({_ENGINES} and on (instance) {_5XX} > 0) == count({_ENGINES}) > 1",
            "a release, an option of all engines, or one kind of request",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "one route alone has 5xx",
            f"count by (instance) ({_5XX_HERE} > 0) == 1",
            "one kind of request fails; the traceback names the part, such as a tool parser",
            "Mitigation 1, then 3",
        ),
    ),
    "VLLMErrorRatioHigh": (
        DiagnosisRow(
            "the gateway could not connect, or the connection broke",
            "sum by (reason) ("
            f"{at(sidecar.REASONS, eq('reason', 'upstream_down|connect_timeout|upstream_reset'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'upstream_down|connect_timeout|upstream_reset'), MODEL)} offset "
            f"10m or {at(sidecar.REASONS, eq('reason', 'upstream_down|connect_timeout|upstream_reset'), MODEL)} * "
            "0)) > 0",
            "an engine is down or restarts, or the network between them fails",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
        DiagnosisRow(
            "the engine answers with errors",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'engine_error|engine_abort'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'engine_error|engine_abort'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'engine_error|engine_abort'), MODEL)} * 0)) > 0",
            "it fails on some requests, or somebody stops or pauses it",
            "Mitigation 1, then 2; [VLLMResponsesUnreadable](VLLMResponsesUnreadable.md) if that fires, too",
        ),
        DiagnosisRow(
            "requests exceed the gateway's time limits",
            "sum by (reason) ("
            f"{at(sidecar.REASONS, eq('reason', 'prefill_timeout|decode_timeout|total_timeout'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'prefill_timeout|decode_timeout|total_timeout'), MODEL)} offset "
            f"10m or {at(sidecar.REASONS, eq('reason', 'prefill_timeout|decode_timeout|total_timeout'), MODEL)} * "
            "0)) > 0",
            "the engine is full, or it hangs",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md), [VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the engine rejects the gateway's key",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'upstream_auth'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'upstream_auth'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'upstream_auth'), MODEL)} * 0)) > 0",
            "`--api-key` of the engine and `upstream_key_file` of the gateway differ",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the gateway stopped or had an internal error",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'gateway_stopped|gateway_error'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'gateway_stopped|gateway_error'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'gateway_stopped|gateway_error'), MODEL)} * 0)) > 0",
            "a restart cut requests in flight, or the gateway has a defect; its log has the traceback",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "clients send their request bodies too slowly",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'body_timeout'), MODEL)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'body_timeout'), MODEL)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'body_timeout'), MODEL)} * 0)) > 0",
            "an upload took longer than `timeouts.body_s`: the client's network, not the service",
            "Mitigation 3",
        ),
    ),
    "VLLMEngineRejecting": (
        DiagnosisRow(
            "the engine generates no tokens",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, (MODEL, INSTANCE))} == 0",
            "it hangs, and its queue filled up to the limit",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the KV cache is over 90 % full",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}) > 0.9 "
            "and on (instance, model_name) "
            f"{promql.growth(vllm.ADMISSION_REJECTIONS, '5m', ENGINE, (MODEL, INSTANCE))} > 0",
            "the limit works as intended: more is requested than fits",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "no request waits and the KV cache has room",
            (
                promql.growth(
                    vllm.ADMISSION_REJECTIONS, "5m", ENGINE, (eq("reason", "max_num_queued_reqs"), MODEL, INSTANCE)
                )
                + " > 0 and on (instance, model_name) ("
                f"{promql.highest(vllm.NUM_REQUESTS_WAITING, '5m', ENGINE, (MODEL, INSTANCE))} == 0 "
                f"and max by (instance, model_name) (max_over_time({at(vllm.KV_CACHE_USAGE, MODEL, INSTANCE)}[5m])) < "
                "0.8)"
            ),
            "the limit is below what the engine can serve; it counts running requests, too",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the limit on queued tokens rejects requests",
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
            "another engine of the model rejects no requests",
            f"count by (model_name) ({promql.growth(vllm.ADMISSION_REJECTIONS, '5m', ENGINE, (MODEL,))} == 0) > 0",
            "requests are routed unevenly",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "over 60 % of the rejected requests are of one team",
            f"{promql.per_second(sidecar.REASONS, '5m', BY_TEAM, (eq('reason', 'engine_busy'), MODEL))} / on () "
            f"group_left () sum(rate({at(sidecar.REASONS, eq('reason', 'engine_busy'), MODEL)}[5m])) > 0.6",
            "a burst, or a client that retries without waiting",
            "Mitigation 1",
        ),
    ),
    "VLLMGatewayRejecting": (
        DiagnosisRow(
            "keys are unknown since `teams.yaml` was last read",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'unknown_key'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'unknown_key'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'unknown_key'), TEAM)} * 0)) > 0 "
            f"and on () (sum(increase({at(gateway.RELOADS, eq('result', 'ok'))}[1h])) > 0 "
            f"or min(time() - {at(prometheus.PROCESS_START, eq('job', 'gateway'))}) < 3600)",
            "a team's key hash is missing from `teams.yaml`",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "requests have no key, or a key that no team has",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'no_key|unknown_key'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'no_key|unknown_key'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'no_key|unknown_key'), TEAM)} * 0)) > 0",
            "a wrong key, a health check that posts, a proxy that drops the header, or an unknown client",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "request bodies are too large or invalid",
            "sum by (reason) ("
            f"{at(sidecar.REASONS, eq('reason', 'body_too_large|bad_body|uncountable|bodies_full'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'body_too_large|bad_body|uncountable|bodies_full'), TEAM)} offset "
            f"10m or {at(sidecar.REASONS, eq('reason', 'body_too_large|bad_body|uncountable|bodies_full'), TEAM)} "
            "* 0)) > 0",
            "images or documents in the body, invalid JSON, a wrong length, or many large bodies at once",
            "Mitigation 3, or 1",
        ),
        DiagnosisRow(
            "the team's limits do not allow the request",
            (
                "sum by (reason) ("
                + at(sidecar.REASONS, eq("reason", _REFUSED_TERMS), TEAM)
                + " - ("
                + at(sidecar.REASONS, eq("reason", _REFUSED_TERMS), TEAM)
                + " offset 10m or "
                + at(sidecar.REASONS, eq("reason", _REFUSED_TERMS), TEAM)
                + " * 0)) > 0"
            ),
            "the client requests another model or more than before, or the limits were changed",
            "Mitigation 1, or 3",
        ),
        DiagnosisRow(
            "the team is at a limit of its own, or it waits while slots are free",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'team_limit'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'team_limit'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'team_limit'), TEAM)} * 0)) > 0 "
            f"or (sum by (reason) ({at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} * 0)) > 0 "
            f"and on () sum(avg_over_time({at(gateway.SLOTS_HELD)}[5m])) < 0.9 * sum(avg_over_time("
            f"{at(gateway.SLOTS)}[5m])))",
            "`max_in_flight`, `max_running`, band `ceiling` or capacity `tokens`; often a client without back-off",
            "Mitigation 1, then 4",
            finding="rejections-by-team-limit",
        ),
        DiagnosisRow(
            "requests wait too long, and the gateway has lowered its slots",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} * 0)) > 0 "
            f"and on () sum({at(gateway.SLOTS)}) < sum({at(gateway.SLOTS_LIMIT)})",
            "an engine queues, preempts or has a full cache, and the gateway holds back requests",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md), [VLLMKVCacheThrashing](VLLMKVCacheThrashing.md)",
        ),
        DiagnosisRow(
            "requests wait too long, and all slots are open and in use",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'queue_full|est_wait|queue_ttl'), TEAM)} * 0)) > 0 "
            f"and on () sum(avg_over_time({at(gateway.SLOTS_HELD)}[5m])) >= 0.9 * sum(avg_over_time("
            f"{at(gateway.SLOTS)}[5m])) unless on () sum({at(gateway.SLOTS)}) < sum({at(gateway.SLOTS_LIMIT)})",
            "more is requested than the engines can serve, or other teams go first",
            "Mitigation 5",
            finding="rejections-by-gateway",
        ),
        DiagnosisRow(
            "the gateway is shutting down",
            f"sum by (reason) ({at(sidecar.REASONS, eq('reason', 'draining'), TEAM)} - ("
            f"{at(sidecar.REASONS, eq('reason', 'draining'), TEAM)} offset 10m "
            f"or {at(sidecar.REASONS, eq('reason', 'draining'), TEAM)} * 0)) > 0",
            "a restart, or repeated restarts",
            "Mitigation 6",
        ),
    ),
    "VLLMClientHangupsRising": (
        DiagnosisRow(
            "the 95th percentile of TTFT is above 2.5 s",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[5m]))) > 2.5",
            "a queue or long prefills; clients that left before the first token are not in this value",
            "[VLLMTTFTHigh](VLLMTTFTHigh.md), [VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "the 95th percentile of the gaps between tokens is above 0.1 s",
            "histogram_quantile(0.95, sum by (model_name, le) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_bucket')}[5m]))) > 0.1",
            "a large batch, preemptions or a slow GPU",
            "[VLLMInterTokenLatencyHigh](VLLMInterTokenLatencyHigh.md)",
        ),
        DiagnosisRow(
            "requests run and no tokens are generated",
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, where=(MODEL,))} > 0 "
            f"unless on (model_name) {promql.per_second(vllm.GENERATION_TOKENS, '2m', where=(MODEL,))} > 0",
            "an engine hangs",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "over 80 % of the disconnects are of one team",
            f"{promql.per_second(sidecar.REQUESTS, '5m', BY_TEAM, (eq('outcome', 'client_abort'), MODEL))} / on "
            f"() group_left () sum(rate({at(sidecar.REQUESTS, eq('outcome', 'client_abort'), MODEL)}[5m])) > 0.8",
            "a new release of its client, its timeout, or its proxy",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "clients stop reading the stream (`client_stalled`)",
            f"{promql.per_second(sidecar.REASONS, '5m', BY_REASON, (eq('reason', 'client_stalled'), MODEL))} > 0",
            "a client or proxy cannot keep up with the stream",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "answers are 1.5 times as long as yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m])) > 1.5 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum "
            f"by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "people stop long answers; a stop button is a client disconnect, too",
            "Mitigation 3",
        ),
    ),
    "VLLMAnswersCutOff": (
        DiagnosisRow(
            "over 95 % of the answers are cut off",
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '30m', where=(eq('finished_reason', 'length'), MODEL))} / "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '30m', where=(MODEL,))} > 0.95",
            "a load test that requests a fixed length",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "over 80 % of the cut-off answers are of one team",
            f"{promql.per_second(sidecar.FINISHES, '30m', BY_TEAM, (eq('finish_reason', 'length'), MODEL))} / on "
            f"() group_left () sum(rate({at(sidecar.FINISHES, eq('finish_reason', 'length'), MODEL)}[30m])) > 0.8",
            "its client's `max_tokens`",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the median `max_tokens` is less than twice the median answer",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.REQUEST_PARAMS_MAX_TOKENS, MODEL, part='_bucket')}[30m]))) < 2 * histogram_quantile(0.5, "
            f"sum by (model_name, le) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_bucket')}[30m])))",
            "the limit is too small for these answers",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "prompts are over 30 % longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "prompts leave no room for the answer (step 3)",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "answers are over 30 % longer than yesterday",
            f"sum by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m])) > 1.3 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[30m] offset 1d)) / sum "
            f"by (model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_count')}[30m] offset 1d))",
            "the model does not stop: chat template, generation config, quantization or adapter",
            "Mitigation 3",
        ),
    ),
    "VLLMCostOverBudget": (
        DiagnosisRow(
            "the last hour had less than half the token rate of the day",
            f"{promql.per_second(vllm.PROMPT_TOKENS, '1h', BY_CLUSTER, (CLUSTER,))} + "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '1h', BY_CLUSTER, (CLUSTER,))} < 0.5 * ("
            f"{promql.per_second(vllm.PROMPT_TOKENS, '1d', BY_CLUSTER, (CLUSTER,))} + "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '1d', BY_CLUSTER, (CLUSTER,))})",
            "night, a weekend, or clients whose requests do not arrive",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "an engine ran no request for an hour",
            f"{promql.highest(vllm.NUM_REQUESTS_RUNNING, '1h', ENGINE, (CLUSTER,))} == 0",
            "more engines than the load needs, or an engine that gets no traffic",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a GPU was under 5 % busy for an hour",
            f"max by (uuid) (max_over_time({at(gpu.UTILIZATION, CLUSTER)}[1h])) < 0.05",
            "no engine uses it, or its engine is gone",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the GPUs cost over 5 % more per hour than yesterday",
            f"{promql.current(sidecar.GPU_COST, ('cluster', 'currency'), (CLUSTER,))} > 1.05 * "
            f"{promql.current(sidecar.GPU_COST, ('cluster', 'currency'), (CLUSTER,), offset='1d')}",
            "new hosts, or a new price in `sidecar.yaml`",
            "Mitigation 2, then 4",
        ),
        DiagnosisRow(
            "over half of the cost is idle time (`__idle__`)",
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
            "two sidecars report the same GPU",
            f"count by (cluster, uuid) ({at(gpu.INFO, CLUSTER)}) > 1",
            "its cost is counted twice",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "an engine does not answer its scrape",
            f"{at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "its tokens are missing, its GPUs still cost",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
    ),
    "VLLMCanaryRolledBack": (
        DiagnosisRow(
            "an engine hangs, or is out of rotation",
            _HUNG,
            "the canary's engine stopped making progress",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "attempts at the canary failed within the hour",
            f"{_FAILED} > 0",
            "the canary answers with errors",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "neither: the canary answered, and was slower",
            f"{_STOPPED} > 0 unless on (variant) ({_FAILED} > 0) unless on () ({_HUNG})",
            "the new version or configuration is slower, or has less capacity for its share",
            "Mitigation 2",
        ),
    ),
    "VLLMCanaryUndecided": (
        DiagnosisRow(
            "the time is over",
            f"{at(sidecar.CANARY_TIME, VARIANT, eq('step', 'undecided'))} > 0",
            "too few requests at the canary's share, or latencies vary too much",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "it was interrupted",
            f"{at(sidecar.CANARY_TIME, VARIANT, eq('step', 'interrupted'))} > 0",
            "somebody changed the canary or an upstream in teams.yaml",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "it never ended",
            f"{at(sidecar.CANARY_TIME, VARIANT, eq('step', 'start|raise'))} > 0",
            "vllm-watch canary no longer runs, or cannot read the request log",
            "Mitigation 3",
        ),
    ),
}
