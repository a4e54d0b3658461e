"""Diagnosis of alerts on engines that are down, stuck or restart."""

from __future__ import annotations

from exporters.catalogue import gateway, gpu, prometheus, promql, self_monitoring, sidecar, vllm
from runbooks.diagnosis.row import (
    BY_INSTANCE,
    BY_TEAM,
    EACH_OF_MODEL,
    ENGINE,
    HERE,
    INSTANCE,
    JOB,
    MODEL,
    DiagnosisRow,
    at,
    eq,
    no,
)

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMEngineDown": (
        DiagnosisRow(
            "the gateway reaches it at the address that Prometheus uses",
            f"label_replace({at(gateway.UPSTREAM_UP)} == 1, "
            '"instance", "$1", "address", "(.+)") and on (instance) '
            f"{at(prometheus.UP, JOB)} == 0",
            "name resolution, firewall or network policy between Prometheus and the engines; users are served",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "nobody listens",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} < 0.9",
            "the process ended, or still loads, or its name does not resolve",
            "Mitigation 2, then 3",
        ),
        DiagnosisRow(
            "scrapes run into their time limit",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} >= 0.9",
            "the API process hangs, the host is gone, or a firewall drops the packets",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "before it ended it had requests and made nothing for four minutes",
            f"max_over_time((min_over_time({at(vllm.NUM_REQUESTS_RUNNING, JOB)}[4m]) > 0 "
            f"and rate({at(vllm.GENERATION_TOKENS, JOB)}[4m]) == 0)[30m:1m])",
            "a worker or GPU hung, and vLLM gave up after its 300 s",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "it has not served within a day",
            f"{at(prometheus.UP, JOB)} == 0 unless on (job, instance) last_over_time("
            f"{at(vllm.NUM_REQUESTS_RUNNING, JOB)}[1d])",
            "a first start that still loads, options or a model that do not fit, or a wrong address",
            "Mitigation 2, then 5",
        ),
        DiagnosisRow(
            "something was changed within the hour",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 3600",
            "the change",
            "Mitigation 5",
        ),
    ),
    "VLLMEngineUnreachable": (
        DiagnosisRow(
            "nobody listens",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} < 0.9",
            "the process ended or still loads",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "it has not been up within the hour",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 unless max_over_time({at(prometheus.UP)}[1h]) == 1",
            "its start fails again and again, or takes longer than `start_time`",
            "Mitigation 2, with the log of step 5",
        ),
        DiagnosisRow(
            "the scrape runs into its time limit",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} >= 0.9",
            "its API process hangs or has no processor time, its host is gone, or packets are dropped",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "the gateway reaches it at this address",
            f"{at(gateway.UPSTREAM_UP, eq('address', '{{instance}}'))} == 1",
            "only the way from Prometheus is broken",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "scrapes were slow before they failed",
            f"max_over_time(({at(prometheus.SCRAPE_DURATION, INSTANCE)} "
            f"and {at(prometheus.UP, JOB, INSTANCE)} == 1)[30m:15s]) > 2",
            "its API process was overloaded: very many streams, or too few processors",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "before it ended it had requests and made nothing for four minutes",
            f"max_over_time((min_over_time({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}[4m]) > 0 "
            f"and rate({at(vllm.GENERATION_TOKENS, INSTANCE)}[4m]) == 0)[30m:1m])",
            "a worker or GPU hung, and vLLM gave up after its 300 s",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the others have queues now",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ('job',), (JOB,))} > 10",
            "they do not carry its load",
            "Mitigation 5",
        ),
    ),
    "VLLMEngineGone": (
        DiagnosisRow(
            "the same addresses under another job",
            f"group by (job, instance) ({at(prometheus.UP)}) "
            f"and on (instance) last_over_time({at(prometheus.UP, JOB)}[1d]) "
            f"unless on (job, instance) last_over_time({at(prometheus.UP, JOB)}[1d])",
            "the job was renamed",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the gateway reaches an engine at an address of this job",
            f"label_replace({at(gateway.UPSTREAM_UP)} == 1, "
            '"instance", "$1", "address", "(.+)") and on (instance) last_over_time('
            f"{at(prometheus.UP, JOB)}[1d])",
            "only discovery lost them",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "they were down before they left",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 0",
            "they crashed or were evicted, and then removed",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
        DiagnosisRow(
            "they answered until they left",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 1",
            "scaled to nothing, deleted, or taken out of the configuration",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "Prometheus itself started within two hours",
            f"time() - ({at(prometheus.PROCESS_START)} "
            f"and on (job, instance) {at(self_monitoring.HEAD_SERIES)}) < 7200",
            "it came up with another configuration",
            "Mitigation 3",
        ),
    ),
    "VLLMMetricsAbsent": (
        DiagnosisRow(
            "it is our gateway or sidecar",
            f"group by (job, instance) ({at(gateway.LOG_WAITING, INSTANCE)} or {at(sidecar.SIDECAR_INFO, INSTANCE)})",
            "a wrong port in the engines' scrape job, or a job for it whose name begins with vllm",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "vLLM's web server without vLLM's statistics",
            f"{at(prometheus.SCRAPE_SAMPLES, INSTANCE)} < 250 "
            f"and on (job, instance) {at(vllm.HTTP_REQUEST_DURATION_HIGHR, INSTANCE, part='_count')}",
            "`--disable-log-stats`",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a long page, and nothing of vLLM arrives",
            f"{at(prometheus.SCRAPE_SAMPLES, JOB, INSTANCE)} > 250 "
            f"unless on (job, instance) {at(vllm.NUM_REQUESTS_RUNNING)}",
            "series are dropped by `metric_relabel_configs`, or their names were escaped before they came",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a short page of another program",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 1 and {at(prometheus.SCRAPE_SAMPLES)} < 250 "
            f"unless on (job, instance) ({at(vllm.HTTP_REQUEST_DURATION_HIGHR, part='_count')} "
            f"or {at(gateway.LOG_WAITING)} or {at(sidecar.SIDECAR_INFO)})",
            "a router, a proxy or a balancer under a name that matches the engines' jobs",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "it showed them until something changed",
            f"last_over_time({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}[1d]) unless {at(vllm.NUM_REQUESTS_RUNNING)}",
            "a restart with other options or another image, or new relabelling",
            "[rollback](rollback.md)",
        ),
    ),
    "VLLMEngineFrozen": (
        DiagnosisRow(
            "it sleeps",
            (
                promql.current(
                    vllm.ENGINE_SLEEP_STATE, ("instance", "sleep_state"), (INSTANCE, no("sleep_state", "awake"))
                )
                + " == 1"
            ),
            "somebody put it to sleep, and nobody woke it",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "requests wait and none runs",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, BY_INSTANCE, (INSTANCE,))} > 0 "
            f"and {promql.current(vllm.NUM_REQUESTS_RUNNING, BY_INSTANCE, (INSTANCE,))} == 0",
            (
                "asleep or paused; else held back by an adapter or a KV transfer: see "
                "[VLLMRequestsDeferred](VLLMRequestsDeferred.md)"
            ),
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "requests run and the GPUs draw power",
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, BY_INSTANCE, (INSTANCE,))} > 0 "
            f"and on () avg(avg_over_time({at(gpu.POWER)}[3m])) / avg({at(gpu.POWER_LIMIT)}) > 0.6",
            "a prefill of more than three minutes with nothing beside it, and no freeze",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "requests run, GPUs are 100 % busy at low power",
            f"max by (instance, uuid) (min_over_time({at(gpu.UTILIZATION)}[3m])) > 0.95 "
            f"and on (instance, uuid) avg_over_time({at(gpu.POWER)}[3m]) / {at(gpu.POWER_LIMIT)} < 0.5 "
            f"and on () sum({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}) > 0",
            "GPUs that wait for each other in a collective, one of which does not come",
            "Mitigation 3; [interconnect](interconnect.md)",
        ),
        DiagnosisRow(
            "requests run and no GPU works, or none is seen",
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, BY_INSTANCE, (INSTANCE,))} > 0 "
            f"unless on () max(max_over_time({at(gpu.UTILIZATION)}[3m])) > 0.05",
            "the core or a worker waits on the host: a lock, a disk, a stopped process",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "an alert about a GPU fires",
            (
                at(
                    prometheus.ALERTS,
                    eq("alertname", "VLLMGPU(Missing|Xid|ECCErrors|NVLinkErrors)"),
                    eq("alertstate", "firing"),
                )
            ),
            "the GPU failed under it",
            "[VLLMGPUXid](VLLMGPUXid.md)",
        ),
    ),
    "VLLMRestartLoop": (
        DiagnosisRow(
            "its start time jumps back",
            f"resets({at(prometheus.PROCESS_START, JOB, INSTANCE)}[1h]) > 0",
            "no restart at all: the target is a balancer with several engines behind it",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "several engines of the job did the same",
            f"count by (job) (sum by (job, instance) (changes({at(prometheus.PROCESS_START, JOB)}[1h])) >= 2) > 1",
            "a rollout, or what all share: image, options, model, a dependency",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "one team had most of the requests that were cut",
            f"max({promql.growth(sidecar.REASONS, '1h', BY_TEAM, (eq('reason', 'engine_error|upstream_reset'),))}"
            f") / sum(increase({at(sidecar.REASONS, eq('reason', 'engine_error|upstream_reset'))}[1h])) > 0.8 "
            f"and count({promql.growth(sidecar.REQUESTS, '1h', BY_TEAM)} > 0) > 1",
            "a request of a shape that crashes it, sent again and again",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a GPU's memory was full before",
            f"max by (instance, uuid) (max_over_time({at(gpu.MEMORY_USED)}[1h])) / "
            f"{promql.worst(gpu.MEMORY_TOTAL, ('instance', 'uuid'))} > 0.98",
            "out of memory on the GPU",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "before it ended it had requests and made nothing for four minutes",
            f"max_over_time((min_over_time({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}[4m]) > 0 "
            f"and rate({at(vllm.GENERATION_TOKENS, INSTANCE)}[4m]) == 0)[1h:1m])",
            "it hung, and vLLM or a liveness probe ended it",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "something was changed within two hours",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 7200",
            "the change",
            "Mitigation 4",
        ),
    ),
    "VLLMSlowStart": (
        DiagnosisRow(
            "Prometheus started after the engine's process",
            f"max({at(prometheus.PROCESS_START)} and on (job, instance) {at(self_monitoring.HEAD_SERIES)}) > on "
            f"() min({at(prometheus.PROCESS_START, JOB, INSTANCE)})",
            "nobody looked before: the engine may have answered long ago",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "other engines of the job started slowly as well",
            f"count by (job) (min by (job, instance) (min_over_time((timestamp({at(prometheus.PROCESS_START, JOB)}"
            f") - {at(prometheus.PROCESS_START, JOB)})[1h:30s])) > 300 "
            f"and max by (job, instance) (time() - {at(prometheus.PROCESS_START, JOB)}) < 3600) > 1",
            "what they share: storage, network, a new image or model",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "another engine of the job started quickly within the hour",
            f"min by (job, instance) (min_over_time((timestamp({at(prometheus.PROCESS_START, JOB)}) - "
            f"{at(prometheus.PROCESS_START, JOB)})[1h:30s])) < 300",
            "this host: its disk, its empty cache, its processors",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a new version or configuration within two hours",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 7200",
            "the first start of a version compiles everything anew; the next one should be quicker",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the job has a queue now",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ('job',), (JOB,))} > 10",
            "load has not come down, or the new engine gets no share of it",
            "[VLLMQueueGrowing](VLLMQueueGrowing.md)",
        ),
    ),
    "VLLMQueueGrowing": (
        DiagnosisRow(
            "requests wait, and no token is made",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '5m', ENGINE, HERE)} > 0 "
            f"and {promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, HERE)} == 0",
            "the engine stands still",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "another engine does not answer",
            f"{at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "its share of the load comes here",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "an engine of the model has no queue",
            f"max by (model_name) ({promql.lowest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}) > 0 "
            f"and min by (model_name) ({promql.highest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}"
            ") == 0",
            "the balancer",
            "Mitigation 1",
            finding="queue-uneven",
        ),
        DiagnosisRow(
            "a fifth fewer finished than an hour ago, answers a third longer",
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE)} < 0.8 * "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE, offset='1h')} "
            f"and sum by (instance, model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_sum')}"
            "[10m])) / sum by (instance, model_name) (rate("
            f"{at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_count')}[10m])) > 1.33 * sum by (instance, "
            f"model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_sum')}[10m] offset 1h)) / sum "
            f"by (instance, model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_count')}[10m] "
            "offset 1h))",
            "longer answers hold their slots for longer",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a fifth fewer tokens made than an hour ago",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE)} < 0.8 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE, offset='1h')}",
            "the engine became slower, or computes longer prompts",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md#diagnosis)",
        ),
        DiagnosisRow(
            "as many finished as an hour ago or more, and the queue grows",
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE)} >= 0.8 * "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE, offset='1h')} "
            f"and sum by (instance, model_name) (deriv({at(vllm.NUM_REQUESTS_WAITING, *HERE)}[10m])) > 0",
            "demand",
            "Mitigation 2",
        ),
    ),
    "VLLMRequestsDeferred": (
        DiagnosisRow(
            "others wait for room too, or the cache is full",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'deferred'), *HERE))} > "
            "0 and on (instance, model_name) ("
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'capacity'), *HERE))} > "
            f"0 or max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) > 0.9)",
            "the engine is full, and their mark is older than that",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md)",
        ),
        DiagnosisRow(
            "adapters are in use",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'deferred'), *HERE))} > "
            "0 and on (instance) (abs(time() - "
            f"{at(vllm.LORA_REQUESTS_INFO, no('running_lora_adapters', ''), INSTANCE)}) < 60)",
            "more adapters are requested at once than `--max-loras` (default 1)",
            "Mitigation 1",
            finding="deferred-requests",
        ),
        DiagnosisRow(
            "a connector is asked for blocks",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'deferred'), *HERE))} > "
            "0 and on (instance) "
            f"{promql.per_second(vllm.EXTERNAL_PREFIX_CACHE_QUERIES, '10m', BY_INSTANCE, (INSTANCE,))} > 0",
            "slow or failing transfers, or a slow store",
            "Mitigation 2, then [interconnect.md](interconnect.md)",
        ),
        DiagnosisRow(
            "transfers over NIXL fail",
            f"sum by (instance) (increase({at(vllm.NIXL_NUM_FAILED_TRANSFERS, INSTANCE)}[10m]) + increase("
            f"{at(vllm.NIXL_NUM_FAILED_NOTIFICATIONS, INSTANCE)}[10m])) > 0",
            "the link, or the engine at its other end",
            "[interconnect.md](interconnect.md)",
        ),
        DiagnosisRow(
            "WebSocket sessions are open",
            f"{promql.current(vllm.WEBSOCKET_CONNECTIONS_ACTIVE, BY_INSTANCE, (INSTANCE,))} > 0",
            "sessions between two turns; nobody waits",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "none of these, and the cache has room",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'deferred'), *HERE))} > "
            f"0 and on (instance, model_name) max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) < "
            f"0.8 unless on (instance) ({at(vllm.LORA_REQUESTS_INFO, INSTANCE)} "
            f"or {at(vllm.WEBSOCKET_CONNECTIONS_ACTIVE, INSTANCE)} > 0 "
            f"or rate({at(vllm.EXTERNAL_PREFIX_CACHE_QUERIES, INSTANCE)}[10m]) > 0)",
            "grammars of structured outputs that take long to compile: large schemas, a new one for each request",
            "Mitigation 3",
        ),
    ),
}
