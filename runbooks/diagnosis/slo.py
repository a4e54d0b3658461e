"""Diagnosis of alerts on error budgets that burn."""

from __future__ import annotations

from exporters.catalogue import gpu, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_INSTANCE, BY_TEAM, MODEL, DiagnosisRow, at, eq, no

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMTTFTBudgetBurn": (
        DiagnosisRow(
            "an engine does not answer",
            f"{at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "the others carry its load",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "more time in the queue than in prefill",
            f"sum by (model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m]))",
            "more comes in than the engines finish",
            "Mitigation 1, then [VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "more in prefill, and prompts are half as long again as a day ago",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) "
            f"and sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[10m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[10m])) > 1.5 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[10m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[10m] offset 1d))",
            "a template grew, or a new sender",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "more in prefill, and the prefix cache hits less than over the day",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) "
            f"and sum by (model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[10m])) / (sum by (model_name) "
            f"(rate({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[10m])) > 0) < 0.7 * sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_HITS, MODEL)}[1d])) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1d])) > 0)",
            "a changed prefix, lost affinity, or a restart",
            "[VLLMCacheHitsCollapsed](VLLMCacheHitsCollapsed.md)",
        ),
        DiagnosisRow(
            "one engine is more than twice as slow as the fastest",
            "max by (model_name) (sum by (model_name, instance) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by (model_name, instance) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0)) > 2 * min by (model_name) (sum by "
            f"(model_name, instance) (rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by "
            f"(model_name, instance) (rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0))",
            "that engine or its GPU, or a balancer that loads it more",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a third of the time is neither queue nor prefill",
            f"sum by (model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m]) + rate("
            f"{at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) / sum by (model_name) (rate("
            f"{at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_count')}[10m])) < 0.67 * sum by (model_name) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by (model_name) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0)",
            (
                "tokenising and chat templates: the API server's CPU; or a queue that grew within the last "
                "minutes, see step 3"
            ),
            "Mitigation 6",
        ),
    ),
    "VLLMTTFTBudgetSlowBurn": (
        DiagnosisRow(
            "the last hour is within the promise",
            'sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m{model_name=~"{{model_name}}"}[1h]) / '
            '(sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m{model_name=~"{{model_name}}"}[1h]) > '
            "0) <= 0.01",
            "it is over, or it comes back at the busy hours",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a fifth more requests than on this day of last week",
            f"sum by (model_name) (increase({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[1d])) > 1.2 * "
            f"sum by (model_name) (increase({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[1d] offset 1w))",
            "growth; capacity did not grow with it",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "prompts a fifth longer than on this day of last week",
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d])) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d])) > 1.2 * sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d] offset 1w)) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d] offset 1w))",
            "a template, a tool list or retrieval grew",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the median is under half a second, the 99th percentile far above",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[1d]))) < 0.5 "
            "and histogram_quantile(0.99, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[1d]))) > 2.5",
            "a few long prompts, and those that wait behind them",
            "Mitigation 3",
            finding="head-of-line-first",
        ),
        DiagnosisRow(
            "one request in twenty was preempted",
            f"{promql.growth(vllm.NUM_PREEMPTIONS, '1d', where=(MODEL,))} > 0.05 * "
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1d', where=(MODEL,))}",
            "the cache is too small for this traffic",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
        ),
        DiagnosisRow(
            "something changed within three days",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            "259200",
            "the change, if the step in the curve stands at its time",
            "[rollback.md](rollback.md)",
        ),
    ),
    "VLLMInterTokenBudgetBurn": (
        DiagnosisRow(
            "fewer than twenty answers finished within the hour",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,))} < 20",
            "the slow pair of windows: of its fifty or more in six hours, a handful of long ones may decide",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "preemptions go on",
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '10m', BY_INSTANCE, (MODEL,))} > 0.1",
            "the cache is full: each preempted answer has one gap of seconds",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
        ),
        DiagnosisRow(
            "clocks are held down by heat or a power brake",
            f"max by (instance, uuid) (rate({at(gpu.THROTTLE, no('reason', 'sw_power_cap|sync_boost'))}[10m])) > 0.1",
            "the GPU, if it is one of this model",
            "[VLLMGPUThrottled](VLLMGPUThrottled.md)",
        ),
        DiagnosisRow(
            "steps carry four times as many tokens as requests run",
            f"sum by (instance) (rate({at(vllm.ITERATION_TOKENS, MODEL, part='_sum')}[10m])) / (sum by (instance) "
            f"(rate({at(vllm.ITERATION_TOKENS, MODEL, part='_count')}[10m])) > 0) > 4 * "
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '10m', BY_INSTANCE, (MODEL,))}",
            ("prefill of long prompts shares the steps and makes them long (drafting alone may reach this factor too)"),
            "Mitigation 3, then 5",
            finding="prefill-interference",
        ),
        DiagnosisRow(
            "half as many requests again run as an hour ago",
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '10m', BY_INSTANCE, (MODEL,))} > 1.5 * sum by (instance) "
            f"(avg_over_time({at(vllm.NUM_REQUESTS_RUNNING, MODEL)}[10m] offset 1h))",
            "the batch grew; each step serves more and takes longer",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "one engine's gaps are twice those of the fastest",
            "max by (model_name) (sum by (model_name, instance) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_sum')}[10m])) / (sum by (model_name, instance) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[10m])) > 0)) > 2 * min by (model_name) (sum by "
            f"(model_name, instance) (rate({at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_sum')}[10m])) / (sum by "
            f"(model_name, instance) (rate({at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[10m])) > 0))",
            "that host: a slow link between GPUs, a neighbour on the GPU, other options",
            "Mitigation 4, then [interconnect.md](interconnect.md)",
        ),
    ),
    "VLLMInterTokenBudgetSlowBurn": (
        DiagnosisRow(
            "the last hour is within the promise",
            'sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "/ "
            '(sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "> 0) <= 0.01",
            "it is over, or bound to busy hours",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a gap brings well over one token",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '1d', where=(MODEL,))} / (sum by (model_name) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[1d])) > 0) > 1.5",
            "speculative decoding: gaps are longer by design",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "fewer than two fifths of the drafted tokens are accepted",
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, '1d', where=(MODEL,))} / ("
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, '1d', where=(MODEL,))} > 0) < 0.4",
            "drafts no longer fit the traffic and lengthen every step",
            "[VLLMAcceptanceLow](VLLMAcceptanceLow.md)",
        ),
        DiagnosisRow(
            "a fifth more requests run than a week ago",
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '1d', where=(MODEL,))} > 1.2 * sum by (model_name) "
            f"(avg_over_time({at(vllm.NUM_REQUESTS_RUNNING, MODEL)}[1d] offset 1w))",
            "growth: larger batches, longer steps",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "prompts and answers together are a fifth longer than a week ago",
            f"(sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d])) + sum by "
            f"(model_name) (increase({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[1d]))) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d])) > 1.2 * (sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d] offset 1w)) + sum "
            f"by (model_name) (increase({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[1d] offset 1w))) "
            f"/ sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d] offset "
            "1w))",
            "each step reads more cache; prefill takes more of the steps",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "something changed within three days",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            "259200",
            "the change, if the curve steps at its time",
            "[rollback.md](rollback.md)",
        ),
    ),
    "VLLMSuccessBudgetBurn": (
        DiagnosisRow(
            "`upstream_down`, `upstream_reset`, `connect_timeout`",
            (
                promql.per_second(
                    sidecar.REASONS, "10m", where=(eq("reason", "upstream_down|upstream_reset|connect_timeout"), MODEL)
                )
                + " >= 0.2 * "
                f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
                "> 0"
            ),
            (
                "an engine died, restarts, or cannot be reached; a dying core takes its whole server with it "
                "within a second"
            ),
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "`engine_error`, `engine_abort`",
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('reason', 'engine_error|engine_abort'), MODEL))}"
            " >= 0.2 * "
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
            "> 0",
            (
                "the engine answers 5xx or breaks off: one request shape, or a release; a 503 without a body of "
                "vLLM's is a balancer with nobody behind it"
            ),
            "Mitigation 2, then 4",
        ),
        DiagnosisRow(
            "`prefill_timeout`, `total_timeout`",
            (
                promql.per_second(sidecar.REASONS, "10m", where=(eq("reason", "prefill_timeout|total_timeout"), MODEL))
                + " >= 0.2 * "
                f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
                "> 0"
            ),
            (
                "requests wait longer than the gateway does (600 s to the first token, 1800 s without stream, by "
                "default)"
            ),
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "`decode_timeout`",
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('reason', 'decode_timeout'), MODEL))} >= 0.2 * "
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
            "> 0",
            "an engine stopped in the middle of answers",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "`upstream_auth`",
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('reason', 'upstream_auth'), MODEL))} >= 0.2 * "
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
            "> 0",
            "the engine's key was changed and the gateway's was not",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "`gateway_stopped`, `gateway_error`",
            (
                promql.per_second(sidecar.REASONS, "10m", where=(eq("reason", "gateway_stopped|gateway_error"), MODEL))
                + " >= 0.2 * "
                f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
                "> 0"
            ),
            "the gateway was restarted and cut what did not end in time, or has a defect",
            "Mitigation 3",
        ),
    ),
    "VLLMSuccessBudgetSlowBurn": (
        DiagnosisRow(
            "the last hour is within the promise",
            'sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "/ "
            '(sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "> 0) <= 0.005",
            "an incident that is over, or bursts",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "engines have started again within three days",
            f"sum by (instance) (changes({at(prometheus.PROCESS_START, eq('job', 'vllm.*'))}[3d])) > 0",
            "each restart fails what it was working on",
            "Mitigation 2; three within an hour: [VLLMRestartLoop](VLLMRestartLoop.md)",
        ),
        DiagnosisRow(
            "one team has more than half of the failures, and less than half of the requests",
            f"{promql.growth(sidecar.REQUESTS, '1d', BY_TEAM, (eq('outcome', 'upstream_error|timeout'), MODEL))} "
            f"> scalar(sum(increase({at(sidecar.REQUESTS, eq('outcome', 'upstream_error|timeout'), MODEL)}[1d]))) "
            f"/ 2 and {promql.growth(sidecar.REQUESTS, '1d', BY_TEAM, (MODEL,))} < scalar(sum(increase("
            f"{at(sidecar.REQUESTS, MODEL)}[1d]))) / 2",
            "its request shape: length, adapter, schema, no stream",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "`total_timeout` leads",
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('reason', 'total_timeout'), MODEL))} > 0.5 * "
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('outcome', 'upstream_error|timeout'), MODEL))}",
            "long replies asked for without stream",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "`body_timeout` makes a fifth",
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('reason', 'body_timeout'), MODEL))} >= 0.2 * "
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} > 0",
            "clients on slow lines, large images or documents: not the service",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "a new release or option within three days",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            "259200",
            "the change, if the line of step 3 rises at its time",
            "[rollback.md](rollback.md)",
        ),
    ),
}
