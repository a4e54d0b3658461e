"""Diagnosis of alerts on engines that are down, stuck or restart."""

from __future__ import annotations

from alerts import recorded
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

_SERVED = f"last_over_time({recorded.SERVED}{{{JOB}, {MODEL}}}[1d])"  # engines of the model within the day


def _hung(evidence: str) -> str:
    """Return the engine, where a gateway or a sidecar says that it is hung by this evidence."""
    here = ('address=~"{{instance}}"', eq("state", "hung"), eq("evidence", evidence))
    seen = (
        f"max by (address, evidence) ({at(metric, *here)})" for metric in (gateway.ENGINE_STATE, sidecar.ENGINE_STATE)
    )
    return f"({' or '.join(seen)}) == 1"


ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMEngineDown": (
        DiagnosisRow(
            "the gateway reaches the engine at the address that Prometheus uses",
            f"label_replace({at(gateway.UPSTREAM_UP)} == 1, "
            '"instance", "$1", "address", "(.+)") and on (instance) '
            f"{at(prometheus.UP, JOB)} == 0",
            "name resolution, a firewall or a network policy blocks only Prometheus; users are served",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the scrape fails at once",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} < 0.9",
            "the process ended or is still loading, or its name does not resolve",
            "Mitigation 2, then 3",
        ),
        DiagnosisRow(
            "scrapes time out",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} >= 0.9",
            "the API process hangs, the host is down, or a firewall drops the packets",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "requests ran for four minutes without a token before the engine ended",
            f"max_over_time((min_over_time({at(vllm.NUM_REQUESTS_RUNNING, JOB)}[4m]) > 0 "
            f"and rate({at(vllm.GENERATION_TOKENS, JOB)}[4m]) == 0)[30m:1m])",
            "a worker or GPU hung, and vLLM ended the engine after 300 s",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the engine has not served within a day",
            f"{at(prometheus.UP, JOB)} == 0 unless on (job, instance) last_over_time("
            f"{at(vllm.NUM_REQUESTS_RUNNING, JOB)}[1d])",
            "a first start is still loading, options or model do not fit, or the address is wrong",
            "Mitigation 2, then 5",
        ),
        DiagnosisRow(
            "something was changed within the hour",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 3600",
            "the change",
            "Mitigation 5",
        ),
    ),
    "VLLMModelDown": (
        DiagnosisRow(
            "an engine that served the model is down",
            f"{_SERVED} and on (job, instance) {at(prometheus.UP, JOB)} == 0",
            "its process ended, or it loads again",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the engines that served it are gone, and a new one of the job does not answer",
            f"({at(prometheus.UP, JOB)} == 0 unless on (job, instance) last_over_time({recorded.SERVED}[1d])) and on"
            f" (job) ({_SERVED} unless on (job, instance) {at(prometheus.UP, JOB)})",
            "the new engine cannot start: image, options, memory or weights",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "no engine of the job answers",
            f"group by (job) ({at(prometheus.UP, JOB)}) unless group by (job) ({at(prometheus.UP, JOB)} == 1)",
            "the fault is not in this model alone",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
        DiagnosisRow(
            "something was changed within the hour",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 3600",
            "the change",
            "Mitigation 2",
        ),
    ),
    "VLLMEngineUnreachable": (
        DiagnosisRow(
            "the scrape fails at once",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} < 0.9",
            "the process ended or is still loading",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the engine has not been up within the hour",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 unless max_over_time({at(prometheus.UP)}[1h]) == 1",
            "every start fails, or the start takes longer than `start_time`",
            "Mitigation 2, with the log of step 5",
        ),
        DiagnosisRow(
            "the scrape times out",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} >= 0.9",
            "the API process hangs or gets no CPU time, the host is down, or packets are dropped",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "the gateway reaches the engine at this address",
            f"{at(gateway.UPSTREAM_UP, eq('address', '{{instance}}'))} == 1",
            "only Prometheus cannot reach the engine; users are served",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "scrapes were slow before they failed",
            f"max_over_time(({at(prometheus.SCRAPE_DURATION, INSTANCE)} "
            f"and {at(prometheus.UP, JOB, INSTANCE)} == 1)[30m:15s]) > 2",
            "the API process was overloaded: very many streams, or too few CPUs",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "requests ran for four minutes without a token before the engine ended",
            f"max_over_time((min_over_time({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}[4m]) > 0 "
            f"and rate({at(vllm.GENERATION_TOKENS, INSTANCE)}[4m]) == 0)[30m:1m])",
            "a worker or GPU hung, and vLLM ended the engine after 300 s",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "the other engines have queues now",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ('job',), (JOB,))} > 10",
            "they cannot carry its load",
            "Mitigation 5",
        ),
    ),
    "VLLMEngineGone": (
        DiagnosisRow(
            "the same addresses are scraped under another job",
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
            "only service discovery lost the engines",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the engines were down before they left discovery",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 0",
            "they crashed or were evicted, and were then removed",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
        DiagnosisRow(
            "the engines answered until they left discovery",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 1",
            "they were scaled to zero, deleted, or removed from the configuration",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "Prometheus started within two hours",
            f"time() - ({at(prometheus.PROCESS_START)} "
            f"and on (job, instance) {at(self_monitoring.HEAD_SERIES)}) < 7200",
            "Prometheus started with another configuration",
            "Mitigation 3",
        ),
    ),
    "VLLMMetricsAbsent": (
        DiagnosisRow(
            "the target is our gateway or sidecar",
            f"group by (job, instance) ({at(gateway.LOG_WAITING, INSTANCE)} or {at(sidecar.SIDECAR_INFO, INSTANCE)})",
            "a wrong port in the engines' scrape job, or a job for this program whose name begins with vllm",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the scrape has vLLM's HTTP series and none of its statistics",
            f"{at(prometheus.SCRAPE_SAMPLES, INSTANCE)} < 250 "
            f"and on (job, instance) {at(vllm.HTTP_REQUEST_DURATION_HIGHR, INSTANCE, part='_count')}",
            "`--disable-log-stats`",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the scrape has more than 250 samples and no series of vLLM",
            f"{at(prometheus.SCRAPE_SAMPLES, JOB, INSTANCE)} > 250 "
            f"unless on (job, instance) {at(vllm.NUM_REQUESTS_RUNNING)}",
            "`metric_relabel_configs` drops the series, or their names were escaped before the scrape",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the scrape has fewer than 250 samples of another program",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 1 and {at(prometheus.SCRAPE_SAMPLES)} < 250 "
            f"unless on (job, instance) ({at(vllm.HTTP_REQUEST_DURATION_HIGHR, part='_count')} "
            f"or {at(gateway.LOG_WAITING)} or {at(sidecar.SIDECAR_INFO)})",
            "a router, proxy or load balancer in a job whose name matches the engines' pattern",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the engine exposed the series within the last day",
            f"last_over_time({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}[1d]) unless {at(vllm.NUM_REQUESTS_RUNNING)}",
            "a restart with other options or another image, or new relabelling",
            "[rollback](rollback.md)",
        ),
    ),
    "VLLMEngineFrozen": (
        DiagnosisRow(
            "the engine accepts connections and answers none",
            _hung("api_silent"),
            "the API server is stopped or blocked; the core behind it may still compute",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the engine hung with requests (steps_stopped, output_stopped), or idle or fetching KV (probe_silent)",
            _hung("steps_stopped|output_stopped|probe_silent"),
            "the core or a worker stands still; the stacks of step 5 tell which",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the engine sleeps",
            (
                promql.current(
                    vllm.ENGINE_SLEEP_STATE, ("instance", "sleep_state"), (INSTANCE, no("sleep_state", "awake"))
                )
                + " == 1"
            ),
            "it was put to sleep and not woken up",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "requests wait and none runs",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, BY_INSTANCE, (INSTANCE,))} > 0 "
            f"and {promql.current(vllm.NUM_REQUESTS_RUNNING, BY_INSTANCE, (INSTANCE,))} == 0",
            (
                "asleep or paused; else adapters or KV transfers defer requests: see "
                "[VLLMRequestsDeferred](VLLMRequestsDeferred.md)"
            ),
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "requests run, and the GPUs draw more than 60 % of their power limit",
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, BY_INSTANCE, (INSTANCE,))} > 0 "
            f"and on () avg(avg_over_time({at(gpu.POWER)}[3m])) / avg({at(gpu.POWER_LIMIT)}) > 0.6",
            "one prefill runs alone for more than three minutes; the engine is not hung",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "requests run, and a GPU is busy at less than half of its power limit",
            f"max by (instance, uuid) (min_over_time({at(gpu.UTILIZATION)}[3m])) > 0.95 "
            f"and on (instance, uuid) avg_over_time({at(gpu.POWER)}[3m]) / {at(gpu.POWER_LIMIT)} < 0.5 "
            f"and on () sum({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}) > 0",
            "the GPUs wait in a collective for one GPU that does not join",
            "Mitigation 3; [interconnect](interconnect.md)",
        ),
        DiagnosisRow(
            "requests run, and no GPU works or none is visible",
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
            "the GPU failed",
            "[VLLMGPUXid](VLLMGPUXid.md)",
        ),
    ),
    "VLLMRestartLoop": (
        DiagnosisRow(
            "the start time jumps back",
            f"resets({at(prometheus.PROCESS_START, JOB, INSTANCE)}[1h]) > 0",
            "no restart: the target is a load balancer with several engines behind it",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "several engines of the job restarted",
            f"count by (job) (sum by (job, instance) (changes({at(prometheus.PROCESS_START, JOB)}[1h])) >= 2) > 1",
            "a rollout, or something that they share: image, options, model, a dependency",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "one team had more than 80 % of the interrupted requests",
            f"max({promql.growth(sidecar.REASONS, '1h', BY_TEAM, (eq('reason', 'engine_error|upstream_reset'),))}"
            f") / sum(increase({at(sidecar.REASONS, eq('reason', 'engine_error|upstream_reset'))}[1h])) > 0.8 "
            f"and count({promql.growth(sidecar.REQUESTS, '1h', BY_TEAM)} > 0) > 1",
            "requests of one shape crash the engine and are sent again",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the memory of a GPU was full within the hour",
            f"max by (instance, uuid) (max_over_time({at(gpu.MEMORY_USED)}[1h])) / "
            f"{promql.worst(gpu.MEMORY_TOTAL, ('instance', 'uuid'))} > 0.98",
            "the engine ran out of GPU memory",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "requests ran for four minutes without a token before the engine ended",
            f"max_over_time((min_over_time({at(vllm.NUM_REQUESTS_RUNNING, INSTANCE)}[4m]) > 0 "
            f"and rate({at(vllm.GENERATION_TOKENS, INSTANCE)}[4m]) == 0)[1h:1m])",
            "the engine hung, and vLLM or a liveness probe ended it",
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
            "Prometheus did not scrape before: the engine may have answered long ago",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "other engines of the job started slowly, too",
            f"count by (job) (min by (job, instance) (min_over_time((timestamp({at(prometheus.PROCESS_START, JOB)}"
            f") - {at(prometheus.PROCESS_START, JOB)})[1h:30s])) > 300 "
            f"and max by (job, instance) (time() - {at(prometheus.PROCESS_START, JOB)}) < 3600) > 1",
            "something that they share: storage, network, a new image or model",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "another engine of the job started quickly within the hour",
            f"min by (job, instance) (min_over_time((timestamp({at(prometheus.PROCESS_START, JOB)}) - "
            f"{at(prometheus.PROCESS_START, JOB)})[1h:30s])) < 300",
            "this host: its disk, its empty cache, its CPUs",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the version or configuration changed within two hours",
            f"time() - {promql.current(sidecar.EVENT_TIME, ('kind',), (eq('kind', 'change|version|config'),))} < 7200",
            "the first start of a version compiles everything; the next start should be faster",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the job has a queue now",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING, ('job',), (JOB,))} > 10",
            "load is still high, or the new engine gets no share of it",
            "[VLLMQueueGrowing](VLLMQueueGrowing.md)",
        ),
    ),
    "VLLMQueueGrowing": (
        DiagnosisRow(
            "requests wait and no tokens are generated",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '5m', ENGINE, HERE)} > 0 "
            f"and {promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE, HERE)} == 0",
            "the engine is hung",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
        DiagnosisRow(
            "another engine does not answer",
            f"{at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "this engine gets its share of the load",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "an engine of the model has no queue",
            f"max by (model_name) ({promql.lowest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}) > 0 "
            f"and min by (model_name) ({promql.highest(vllm.NUM_REQUESTS_WAITING, '5m', EACH_OF_MODEL, (MODEL,))}"
            ") == 0",
            "the load balancer distributes requests unevenly",
            "Mitigation 1",
            finding="queue-uneven",
        ),
        DiagnosisRow(
            "20 % fewer requests finish than an hour ago, and answers are a third longer",
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE)} < 0.8 * "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE, offset='1h')} "
            f"and sum by (instance, model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_sum')}"
            "[10m])) / sum by (instance, model_name) (rate("
            f"{at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_count')}[10m])) > 1.33 * sum by (instance, "
            f"model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_sum')}[10m] offset 1h)) / sum "
            f"by (instance, model_name) (rate({at(vllm.REQUEST_GENERATION_TOKENS, *HERE, part='_count')}[10m] "
            "offset 1h))",
            "longer answers occupy their slots longer",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "20 % fewer tokens are generated than an hour ago",
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE)} < 0.8 * "
            f"{promql.per_second(vllm.GENERATION_TOKENS, '10m', ENGINE, HERE, offset='1h')}",
            "the engine became slower, or computes longer prompts",
            "[VLLMQueueTimeHigh](VLLMQueueTimeHigh.md#diagnosis)",
        ),
        DiagnosisRow(
            "at least 80 % as many requests finish as an hour ago, and the queue grows",
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE)} >= 0.8 * "
            f"{promql.per_second(vllm.REQUEST_SUCCESS, '10m', ENGINE, HERE, offset='1h')} "
            f"and sum by (instance, model_name) (deriv({at(vllm.NUM_REQUESTS_WAITING, *HERE)}[10m])) > 0",
            "demand: more requests arrive than the engine can finish",
            "Mitigation 2",
        ),
    ),
    "VLLMRequestsDeferred": (
        DiagnosisRow(
            "other requests wait for capacity, or the cache is full",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'deferred'), *HERE))} > "
            "0 and on (instance, model_name) ("
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'capacity'), *HERE))} > "
            f"0 or max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) > 0.9)",
            "the engine is full, and the deferred state is out of date",
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
            "a KV connector is queried for blocks",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'deferred'), *HERE))} > "
            "0 and on (instance) "
            f"{promql.per_second(vllm.EXTERNAL_PREFIX_CACHE_QUERIES, '10m', BY_INSTANCE, (INSTANCE,))} > 0",
            "slow or failing transfers, or a slow store",
            "Mitigation 2, then [interconnect.md](interconnect.md)",
        ),
        DiagnosisRow(
            "NIXL transfers fail",
            f"sum by (instance) (increase({at(vllm.NIXL_NUM_FAILED_TRANSFERS, INSTANCE)}[10m]) + increase("
            f"{at(vllm.NIXL_NUM_FAILED_NOTIFICATIONS, INSTANCE)}[10m])) > 0",
            "the link, or the engine at its other end",
            "[interconnect.md](interconnect.md)",
        ),
        DiagnosisRow(
            "WebSocket sessions are open",
            f"{promql.current(vllm.WEBSOCKET_CONNECTIONS_ACTIVE, BY_INSTANCE, (INSTANCE,))} > 0",
            "sessions are idle between two turns; no user waits",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "none of these, and the cache has room",
            f"{promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, ENGINE, (eq('reason', 'deferred'), *HERE))} > "
            f"0 and on (instance, model_name) max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, *HERE)}) < "
            f"0.8 unless on (instance) ({at(vllm.LORA_REQUESTS_INFO, INSTANCE)} "
            f"or {at(vllm.WEBSOCKET_CONNECTIONS_ACTIVE, INSTANCE)} > 0 "
            f"or rate({at(vllm.EXTERNAL_PREFIX_CACHE_QUERIES, INSTANCE)}[10m]) > 0)",
            "grammars of structured outputs compile slowly: large schemas, or a new schema for each request",
            "Mitigation 3",
        ),
    ),
}
