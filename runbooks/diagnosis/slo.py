"""Diagnosis of alerts on error budgets that burn."""

from __future__ import annotations

from exporters.catalogue import gpu, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_INSTANCE, BY_TEAM, MODEL, DiagnosisRow, at, eq, no

_BY_STATUS = (
    'cluster_namespace_job_instance_pod_model_name:vllm_http_ended:increase5m{model_name=~"{{model_name}}"} > 0'
)
ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMTTFTBudgetBurn": (
        DiagnosisRow(
            "an engine does not answer its scrape",
            f"{at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "the other engines carry its load",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "requests spend more time in the queue than in prefill",
            f"sum by (model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m]))",
            "more requests arrive than the engines finish",
            "Mitigation 1, then [VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "prefill takes longer than the queue, and prompts are 1.5 times as long as a day ago",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) "
            f"and sum by (model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[10m])) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[10m])) > 1.5 * sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[10m] offset 1d)) / sum by "
            f"(model_name) (rate({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[10m] offset 1d))",
            "a prompt template grew, or a new client sends long prompts",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "prefill takes longer than the queue, and the prefix-cache hit ratio is below 70 % of the day's",
            f"sum by (model_name) (rate({at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) > sum by "
            f"(model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m])) "
            f"and sum by (model_name) (rate({at(vllm.PREFIX_CACHE_HITS, MODEL)}[10m])) / (sum by (model_name) "
            f"(rate({at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[10m])) > 0) < 0.7 * sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_HITS, MODEL)}[1d])) / (sum by (model_name) (rate("
            f"{at(vllm.PREFIX_CACHE_QUERIES, MODEL)}[1d])) > 0)",
            "the prompt prefix changed, requests go to other engines than before, or an engine restarted",
            "[VLLMCacheHitsCollapsed](VLLMCacheHitsCollapsed.md)",
        ),
        DiagnosisRow(
            "the mean TTFT of one engine is more than twice that of the fastest",
            "max by (model_name) (sum by (model_name, instance) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by (model_name, instance) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0)) > 2 * min by (model_name) (sum by "
            f"(model_name, instance) (rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by "
            f"(model_name, instance) (rate({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0))",
            "that engine or its GPU is slow, or the load balancer sends it more requests",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "more than a third of the time to first token is neither queue nor prefill",
            f"sum by (model_name) (rate({at(vllm.REQUEST_QUEUE_TIME, MODEL, part='_sum')}[10m]) + rate("
            f"{at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_sum')}[10m])) / sum by (model_name) (rate("
            f"{at(vllm.REQUEST_PREFILL_TIME, MODEL, part='_count')}[10m])) < 0.67 * sum by (model_name) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_sum')}[10m])) / (sum by (model_name) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[10m])) > 0)",
            "tokenization and chat templates use the API server's CPU, or a queue grew in the last minutes (step 3)",
            "Mitigation 6",
        ),
    ),
    "VLLMTTFTBudgetSlowBurn": (
        DiagnosisRow(
            "the last hour is within the objective",
            'sum_over_time(cluster_model_name:vllm_slo_ttft_bad:increase5m{model_name=~"{{model_name}}"}[1h]) / '
            '(sum_over_time(cluster_model_name:vllm_slo_ttft_all:increase5m{model_name=~"{{model_name}}"}[1h]) > '
            "0) <= 0.01",
            "the incident is over, or it repeats at busy hours",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the day had over 20 % more requests than the same day last week",
            f"sum by (model_name) (increase({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[1d])) > 1.2 * "
            f"sum by (model_name) (increase({at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_count')}[1d] offset 1w))",
            "traffic grew and capacity did not",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "prompts are over 20 % longer than on the same day last week",
            f"sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d])) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d])) > 1.2 * sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d] offset 1w)) / sum "
            f"by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d] offset 1w))",
            "a prompt template, a tool list or the retrieved text grew",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the median TTFT is under 0.5 s and the 99th percentile above 2.5 s",
            "histogram_quantile(0.5, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[1d]))) < 0.5 "
            "and histogram_quantile(0.99, sum by (model_name, le) (rate("
            f"{at(vllm.TIME_TO_FIRST_TOKEN, MODEL, part='_bucket')}[1d]))) > 2.5",
            "a few long prompts delay the requests that wait behind them",
            "Mitigation 3",
            finding="head-of-line-first",
        ),
        DiagnosisRow(
            "preemptions exceed 5 % of the finished requests",
            f"{promql.growth(vllm.NUM_PREEMPTIONS, '1d', where=(MODEL,))} > 0.05 * "
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1d', where=(MODEL,))}",
            "the KV cache is too small for this traffic",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
        ),
        DiagnosisRow(
            "a configuration or version changed within three days",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            "259200",
            "the change, if the curve of step 3 rises at its time",
            "[rollback.md](rollback.md)",
        ),
    ),
    "VLLMInterTokenBudgetBurn": (
        DiagnosisRow(
            "fewer than 20 requests finished within the hour",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '1h', where=(MODEL,))} < 20",
            "a few long answers can decide the 6 h window, which needs 50 finished requests",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "requests are preempted, more than one in ten seconds",
            f"{promql.per_second(vllm.NUM_PREEMPTIONS, '10m', BY_INSTANCE, (MODEL,))} > 0.1",
            "the KV cache is full; each preempted answer has one gap of seconds",
            "[VLLMPreemptionsSustained](VLLMPreemptionsSustained.md)",
        ),
        DiagnosisRow(
            "a GPU is throttled by heat or a power brake for over 10 % of the time",
            f"max by (instance, uuid) (rate({at(gpu.THROTTLE, no('reason', 'sw_power_cap|sync_boost'))}[10m])) > 0.1",
            "that GPU, if it serves this model",
            "[VLLMGPUThrottled](VLLMGPUThrottled.md)",
        ),
        DiagnosisRow(
            "an engine step carries more than four times as many tokens as requests run",
            f"sum by (instance) (rate({at(vllm.ITERATION_TOKENS, MODEL, part='_sum')}[10m])) / (sum by (instance) "
            f"(rate({at(vllm.ITERATION_TOKENS, MODEL, part='_count')}[10m])) > 0) > 4 * "
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '10m', BY_INSTANCE, (MODEL,))}",
            "prefill of long prompts shares the steps and makes them long; drafting alone may reach this factor",
            "Mitigation 3, then 5",
            finding="prefill-interference",
        ),
        DiagnosisRow(
            "1.5 times as many requests run as an hour ago",
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '10m', BY_INSTANCE, (MODEL,))} > 1.5 * sum by (instance) "
            f"(avg_over_time({at(vllm.NUM_REQUESTS_RUNNING, MODEL)}[10m] offset 1h))",
            "the batch grew: each step serves more requests and takes longer",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the mean gap of one engine is more than twice that of the fastest",
            "max by (model_name) (sum by (model_name, instance) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_sum')}[10m])) / (sum by (model_name, instance) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[10m])) > 0)) > 2 * min by (model_name) (sum by "
            f"(model_name, instance) (rate({at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_sum')}[10m])) / (sum by "
            f"(model_name, instance) (rate({at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[10m])) > 0))",
            "a slow link between GPUs, another process on the GPU, or other options on that host",
            "Mitigation 4, then [interconnect.md](interconnect.md)",
        ),
    ),
    "VLLMInterTokenBudgetSlowBurn": (
        DiagnosisRow(
            "the last hour is within the objective",
            'sum_over_time(cluster_model_name:vllm_slo_inter_token_bad:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "/ "
            '(sum_over_time(cluster_model_name:vllm_slo_inter_token_all:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "> 0) <= 0.01",
            "the incident is over, or it happens only at busy hours",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "each gap brings more than 1.5 tokens",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '1d', where=(MODEL,))} / (sum by (model_name) (rate("
            f"{at(vllm.INTER_TOKEN_LATENCY, MODEL, part='_count')}[1d])) > 0) > 1.5",
            "speculative decoding is on: gaps are longer by design",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "fewer than 40 % of the drafted tokens are accepted",
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, '1d', where=(MODEL,))} / ("
            f"{promql.per_second(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, '1d', where=(MODEL,))} > 0) < 0.4",
            "the drafts no longer fit the traffic and lengthen every step",
            "[VLLMAcceptanceLow](VLLMAcceptanceLow.md)",
        ),
        DiagnosisRow(
            "over 20 % more requests run than a week ago",
            f"{promql.average(vllm.NUM_REQUESTS_RUNNING, '1d', where=(MODEL,))} > 1.2 * sum by (model_name) "
            f"(avg_over_time({at(vllm.NUM_REQUESTS_RUNNING, MODEL)}[1d] offset 1w))",
            "traffic grew: batches are larger and steps longer",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "prompt and answer together are over 20 % longer than a week ago",
            f"(sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d])) + sum by "
            f"(model_name) (increase({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[1d]))) / sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d])) > 1.2 * (sum by "
            f"(model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_sum')}[1d] offset 1w)) + sum "
            f"by (model_name) (increase({at(vllm.REQUEST_GENERATION_TOKENS, MODEL, part='_sum')}[1d] offset 1w))) "
            f"/ sum by (model_name) (increase({at(vllm.REQUEST_PROMPT_TOKENS, MODEL, part='_count')}[1d] offset "
            "1w))",
            "each step reads more KV cache, and prefill takes a larger part of the steps",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "a configuration or version changed within three days",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            "259200",
            "the change, if the share of long gaps rises at its time",
            "[rollback.md](rollback.md)",
        ),
    ),
    "VLLMSuccessBudgetBurn": (
        DiagnosisRow(
            "the model has no request log",
            _BY_STATUS,
            "the ratio is the share of HTTP 5xx, which is coarse; the other rows need a log",
            "[VLLMHTTPErrorRatioHigh](VLLMHTTPErrorRatioHigh.md)",
        ),
        DiagnosisRow(
            "the reason is `upstream_down`, `upstream_reset` or `connect_timeout`",
            (
                promql.per_second(
                    sidecar.REASONS, "10m", where=(eq("reason", "upstream_down|upstream_reset|connect_timeout"), MODEL)
                )
                + " >= 0.2 * "
                f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
                "> 0"
            ),
            "an engine crashed, restarts or cannot be reached; a crashed core ends its server within a second",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "the reason is `engine_error` or `engine_abort`",
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('reason', 'engine_error|engine_abort'), MODEL))}"
            " >= 0.2 * "
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
            "> 0",
            "the engine answers 5xx or breaks off: one kind of request, a release, or a load balancer without engines",
            "Mitigation 2, then 4",
        ),
        DiagnosisRow(
            "the reason is `prefill_timeout` or `total_timeout`",
            (
                promql.per_second(sidecar.REASONS, "10m", where=(eq("reason", "prefill_timeout|total_timeout"), MODEL))
                + " >= 0.2 * "
                f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
                "> 0"
            ),
            "requests exceed the gateway's limits (default: 600 s to the first token, 1800 s without stream)",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "the reason is `decode_timeout`",
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('reason', 'decode_timeout'), MODEL))} >= 0.2 * "
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
            "> 0",
            "an engine stopped in the middle of answers",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the reason is `upstream_auth`",
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('reason', 'upstream_auth'), MODEL))} >= 0.2 * "
            f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
            "> 0",
            "the engine's key was changed and the gateway's was not",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the reason is `gateway_stopped` or `gateway_error`",
            (
                promql.per_second(sidecar.REASONS, "10m", where=(eq("reason", "gateway_stopped|gateway_error"), MODEL))
                + " >= 0.2 * "
                f"{promql.per_second(sidecar.REASONS, '10m', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} "
                "> 0"
            ),
            "a gateway restart cut requests that did not end in time, or the gateway has a defect",
            "Mitigation 3",
        ),
    ),
    "VLLMSuccessBudgetSlowBurn": (
        DiagnosisRow(
            "the model has no request log",
            _BY_STATUS,
            "the ratio is the share of HTTP 5xx, which is coarse; the other rows need a log",
            "[VLLMHTTPErrorRatioHigh](VLLMHTTPErrorRatioHigh.md)",
        ),
        DiagnosisRow(
            "the last hour is within the objective",
            'sum_over_time(cluster_model_name:vllm_slo_success_bad:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "/ "
            '(sum_over_time(cluster_model_name:vllm_slo_success_all:increase5m{model_name=~"{{model_name}}"}[1h]) '
            "> 0) <= 0.005",
            "an incident that is over, or single bursts",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "an engine restarted within three days",
            f"sum by (instance) (changes({at(prometheus.PROCESS_START, eq('job', 'vllm.*'))}[3d])) > 0",
            "each restart fails the requests in flight",
            "Mitigation 2; if one restarts three times an hour: [VLLMRestartLoop](VLLMRestartLoop.md)",
        ),
        DiagnosisRow(
            "one team has over half of the failures and under half of the requests",
            f"{promql.growth(sidecar.REQUESTS, '1d', BY_TEAM, (eq('outcome', 'upstream_error|timeout'), MODEL))} "
            f"> scalar(sum(increase({at(sidecar.REQUESTS, eq('outcome', 'upstream_error|timeout'), MODEL)}[1d]))) "
            f"/ 2 and {promql.growth(sidecar.REQUESTS, '1d', BY_TEAM, (MODEL,))} < scalar(sum(increase("
            f"{at(sidecar.REQUESTS, MODEL)}[1d]))) / 2",
            "its kind of request: length, adapter, schema, or no stream",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "over half of the failures have the reason `total_timeout`",
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('reason', 'total_timeout'), MODEL))} > 0.5 * "
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('outcome', 'upstream_error|timeout'), MODEL))}",
            "clients request long answers without stream",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "at least a fifth of the failures have the reason `body_timeout`",
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('reason', 'body_timeout'), MODEL))} >= 0.2 * "
            f"{promql.growth(sidecar.REASONS, '1d', where=(eq('outcome', 'upstream_error|timeout'), MODEL))} > 0",
            "clients upload slowly or send large images or documents; the service is not the cause",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "a configuration or version changed within three days",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < "
            "259200",
            "the change, if the line of step 3 rises at its time",
            "[rollback.md](rollback.md)",
        ),
    ),
}
