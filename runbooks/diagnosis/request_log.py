"""Diagnosis of alerts on the request log: lines that are missing, late or cannot be written."""

from __future__ import annotations

from exporters.catalogue import gateway, prometheus, promql, reconciled, sidecar, vllm
from runbooks.diagnosis.row import BY_INSTANCE, CLUSTER, INSTANCE, MODEL, PATH, DiagnosisRow, at, eq, no

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMEngineExceedsLog": (
        DiagnosisRow(
            "no sidecar compares, and the engine counts several requests for one HTTP request",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', (), (CLUSTER,))} > 1.05 * sum(increase("
            f"{at(vllm.HTTP_REQUESTS, eq('status', '2xx'), eq('method', 'POST'), eq('handler', '/v1/.*'), CLUSTER)}"
            f"[30m]) and on (job, instance) {at(vllm.NUM_REQUESTS_RUNNING)}) "
            f"unless on () {at(reconciled.SETTLED, CLUSTER)}",
            "`n` above 1, lists of prompts, batches",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "engines finished requests of a model that the log lacks, and all models in the log are names of engines",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(CLUSTER,))} > 10 "
            f"unless on (model_name) {promql.growth(sidecar.REQUESTS, '30m', where=(CLUSTER,))} > 0 "
            f"unless on () ({promql.growth(sidecar.REQUESTS, '30m', where=(eq('outcome', 'ok'), CLUSTER))} > 0 "
            f"unless on (model_name) {promql.current(vllm.NUM_REQUESTS_RUNNING)})",
            "all requests for this model bypass the gateway",
            "Mitigation 2; on purpose: Mitigation 6",
        ),
        DiagnosisRow(
            "engines answered more requests than the gateway forwarded",
            (
                "sum(increase("
                + at(
                    vllm.HTTP_REQUESTS,
                    eq("status", "2xx"),
                    eq("method", "POST"),
                    eq("handler", "/v1/(chat/completions|completions|responses|messages|embeddings)"),
                    CLUSTER,
                )
                + f"[30m]) and on (job, instance) {at(vllm.NUM_REQUESTS_RUNNING)}) > 10 + 1.05 * sum(increase("
                f"{at(gateway.REQUESTS, no('outcome', 'rejected'), CLUSTER)}[30m]))"
            ),
            "a client calls an engine directly",
            "Mitigation 2; on purpose: Mitigation 6",
        ),
        DiagnosisRow(
            "the gateway counted more requests than the log has",
            f"sum(increase({at(gateway.REQUESTS, CLUSTER)}[30m])) > 10 + 1.05 * sum(increase("
            f"{at(sidecar.REQUESTS, CLUSTER)}[30m]))",
            "a log that no sidecar reads",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a sidecar reports missing requests, and the gateway lost no record",
            f"{promql.growth(reconciled.MISSING_IN_LOG, '30m', where=(eq('kind', 'requests'), CLUSTER, MODEL))} > "
            f"3 unless on () (sum(increase({at(gateway.LOG_LOST, CLUSTER)}[1h])) > 0 "
            f"or sum({at(gateway.LOG_LOST_BEFORE, CLUSTER)}) > 0)",
            "clients bypass the gateway for this model; or this sidecar does not read the log of another gateway",
            "Mitigation 2, else 3",
        ),
        DiagnosisRow(
            "records are lost, or lines of the log are not records",
            f"sum(increase({at(gateway.LOG_LOST, CLUSTER)}[1h])) > 0 "
            f"or sum({at(gateway.LOG_LOST_BEFORE, CLUSTER)}) > 0 "
            f"or sum(increase({at(sidecar.LOG_BAD_LINES, CLUSTER)}[30m])) > 0",
            "a full disk, or a crash with records in memory; or two writers of one file, or different releases",
            "[VLLMRequestLogUnwritable](VLLMRequestLogUnwritable.md), else Mitigation 4",
        ),
        DiagnosisRow(
            "the sidecar was down for more than 15 minutes of the last hour",
            f"sum by (job, instance) (sum_over_time(({at(prometheus.UP, eq('job', 'sidecar'), CLUSTER)} == bool "
            "0)[1h:1m])) > 15",
            "records that were logged meanwhile are missing on its side",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "the log has records, and no gateway of ours is scraped",
            f"sum({at(sidecar.REQUESTS, CLUSTER)}) unless on () {at(gateway.REQUESTS, CLUSTER)}",
            "another gateway's log, which may leave requests out; the rows about our gateway do not apply",
            "Mitigation 2 if step 4 shows other addresses, else Mitigation 3",
        ),
    ),
    "VLLMLogExceedsEngine": (
        DiagnosisRow(
            "an engine does not answer its scrape, or answers without vLLM's series",
            f"{at(prometheus.UP, eq('job', 'vllm.*'), CLUSTER)} == 0 "
            f"or {at(prometheus.UP, eq('job', 'vllm.*'), CLUSTER)} == 1 "
            f"unless on (job, instance) {at(vllm.NUM_REQUESTS_RUNNING)}",
            "down for Prometheus but not for the gateway; `--disable-log-stats`; or another program at that address",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md), [VLLMMetricsAbsent](VLLMMetricsAbsent.md)",
        ),
        DiagnosisRow(
            "an engine answers again, and was down for more than 15 minutes of the last hour",
            f"sum by (job, instance) (sum_over_time(({at(prometheus.UP, eq('job', 'vllm.*'), CLUSTER)} == bool "
            f"0)[1h:1m])) > 15 and on (job, instance) {at(prometheus.UP)} == 1",
            "if it served meanwhile, the requests of that time are missing on its side",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a sidecar reads fewer engines than the gateway has upstreams",
            f"count(group by (source) ({at(sidecar.SOURCE_UP, eq('kind', 'engine'), CLUSTER)})) < count(group by "
            f"(upstream) ({at(gateway.UPSTREAM_UP, CLUSTER)}))",
            "an engine is missing under `engines` in `sidecar.yaml`",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a sidecar reports extra requests of unknown cause, and reads every upstream",
            (
                promql.growth(
                    reconciled.EXTRA_IN_LOG,
                    "30m",
                    where=(eq("cause", "unknown"), eq("kind", "requests"), CLUSTER, MODEL),
                )
                + " > 0 unless on () "
                f"count(group by (source) ({at(sidecar.SOURCE_UP, eq('kind', 'engine'), CLUSTER)})) "
                f"< count(group by (upstream) ({at(gateway.UPSTREAM_UP, CLUSTER)}))"
            ),
            "false records, or the same requests under new ids; or another service serves this model",
            "Mitigation 3, then 4",
        ),
        DiagnosisRow(
            "a gateway sends to an address that Prometheus does not scrape",
            f"label_replace({at(gateway.UPSTREAM_UP, CLUSTER)}, "
            '"instance", "$1", "address", "(.+)") unless on (instance) '
            f"{at(prometheus.UP, eq('job', 'vllm.*'))}",
            "an engine outside the scrape configuration; or a load balancer, or another name of a known engine",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the counters of the log fell within the hour",
            f"max by (instance) (resets({at(sidecar.LOG_LINES, CLUSTER)}[1h])) > 0",
            "a sidecar without `state` restarted after a rotation; Prometheus adds what it counts again as new",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "two sidecars read the same path",
            f"count by (path) ({at(sidecar.LOG_LAG, CLUSTER)}) > 1",
            "two sidecars of one host; on two hosts the same path may be two files",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the log has model names that no engine has",
            f"{promql.growth(sidecar.REQUESTS, '30m', where=(eq('outcome', 'ok'), CLUSTER))} > 10 "
            f"unless on (model_name) {promql.current(vllm.NUM_REQUESTS_RUNNING)}",
            "another service behind the gateway serves them; or adapters and aliases, which make no difference",
            "Mitigation 4",
        ),
    ),
    "VLLMRequestLogLagging": (
        DiagnosisRow(
            "unread bytes grow",
            f"{at(sidecar.LOG_BYTES_BEHIND, PATH)} > 65536 and deriv({at(sidecar.LOG_BYTES_BEHIND, PATH)}[10m]) > 0",
            "the sidecar does not keep up: no CPU time, or a slow file system",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the sidecar counts no line, and more than 1 MiB is unread",
            f"min_over_time({at(sidecar.LOG_BYTES_BEHIND, PATH, INSTANCE)}[5m]) > 1048576 "
            f"unless on (job, instance) {promql.growth(sidecar.LOG_LINES, '5m', ('job', 'instance'))} > 0",
            "reading fails or hangs, as on a remote file system; just after its start it reads first and counts later",
            "[VLLMSidecarSourceFailing](VLLMSidecarSourceFailing.md), else Mitigation 5",
        ),
        DiagnosisRow(
            "the sidecar started within the last 15 minutes",
            f"time() - {at(sidecar.SIDECAR_START)} < 900",
            "it reads the file from its beginning, so old records are its newest for a while",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the gateway wrote late",
            f"max by (instance) (max_over_time({at(gateway.LOG_WAITING)}[15m])) > 100 "
            f"or {promql.growth(gateway.LOG_ERRORS, '15m', BY_INSTANCE)} > 0",
            "the gateway's disk was full or slow",
            "[VLLMRequestLogUnwritable](VLLMRequestLogUnwritable.md)",
        ),
        DiagnosisRow(
            "nothing is unread, and the lag varies by less than 10 s",
            f"max_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) - min_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) < "
            f"10 and changes({at(sidecar.LOG_LAG, PATH)}[15m]) > 0 "
            f"and {at(sidecar.LOG_BYTES_BEHIND, PATH)} == 0",
            "the clocks of two hosts differ; or another program writes local time as UTC",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "nothing is unread, and the lag varies by 10 s or more",
            f"max_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) - min_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) "
            f">= 10 and {at(sidecar.LOG_BYTES_BEHIND, PATH)} == 0",
            "another program writes the start of a request as `ts`, or records are forwarded in batches",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the lag has not changed for 15 minutes",
            f"{at(sidecar.LOG_LAG, PATH)} > 60 and changes({at(sidecar.LOG_LAG, PATH)}[15m]) == 0",
            "an old value: no new record in this log, while the sidecar reads another log",
            "Mitigation 1",
        ),
    ),
    "VLLMGatewayNotSharing": (
        DiagnosisRow(
            "no gateway has a lease",
            f"min({at(gateway.LEASE_LOST)}) == 1",
            "the store is down, full, read-only, or its password changed",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "this gateway has no lease, and another has one",
            f"{at(gateway.LEASE_LOST, INSTANCE)} == 1 and on () min({at(gateway.LEASE_LOST)}) == 0",
            "this gateway cannot reach the store, or another one has its name",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "gateways have different policies",
            f"{at(gateway.LEASE_POLICIES, INSTANCE)} > 1 and on () min({at(gateway.LEASE_LOST)}) == 0",
            "a gateway has not read the latest teams.yaml",
            "Mitigation 3",
        ),
    ),
    "VLLMRequestLogUnwritable": (
        DiagnosisRow(
            "records are lost",
            f"{promql.growth(gateway.LOG_LOST, '5m', BY_INSTANCE, (INSTANCE,))} > 0",
            "writes have failed for long, and the memory for records is full",
            "Mitigation 1, at once",
        ),
        DiagnosisRow(
            "writes fail, and the sidecar cannot read the log either",
            f"{promql.growth(gateway.LOG_ERRORS, '2m', BY_INSTANCE, (INSTANCE,))} > 0 "
            f"and on () min({at(sidecar.SOURCE_UP, eq('kind', 'log'))}) == 0",
            "the volume is gone, or its permissions changed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "writes fail, and the sidecar reads the log",
            f"{promql.growth(gateway.LOG_ERRORS, '2m', BY_INSTANCE, (INSTANCE,))} > 0 "
            f"unless on () min({at(sidecar.SOURCE_UP, eq('kind', 'log'))}) == 0",
            "in most cases a full disk",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "writes succeed again, and no record waits",
            f"{promql.worst(gateway.LOG_WAITING, BY_INSTANCE, (INSTANCE,))} == 0 "
            f"unless on (instance) ({promql.growth(gateway.LOG_ERRORS, '2m', BY_INSTANCE, (INSTANCE,))} > 0 "
            f"or {promql.current(gateway.LOG_LOST_BEFORE, BY_INSTANCE, (INSTANCE,))} > 0)",
            "a short failure, such as a rotation or a disk that was full for a moment",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a gateway process that ended within the hour lost records",
            f"{promql.current(gateway.LOG_LOST_BEFORE, BY_INSTANCE, (INSTANCE,))} > 0",
            "the gateway was killed or ran out of memory, in most cases while its disk was full",
            "Mitigation 5",
        ),
    ),
}
