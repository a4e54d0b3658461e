"""Diagnosis of alerts on the request log: lines that are missing, late or cannot be written."""

from __future__ import annotations

from exporters.catalogue import gateway, prometheus, promql, reconciled, sidecar, vllm
from runbooks.diagnosis.row import BY_INSTANCE, CLUSTER, INSTANCE, MODEL, PATH, DiagnosisRow, at, eq, no

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMEngineExceedsLog": (
        DiagnosisRow(
            "no sidecar compares, and the engine counts several for one",
            f"sum(increase({at(vllm.REQUEST_SUCCESS, CLUSTER)}[30m])) > 1.05 * sum(increase("
            f"{at(vllm.HTTP_REQUESTS, eq('status', '2xx'), eq('method', 'POST'), eq('handler', '/v1/.*'), CLUSTER)}"
            f"[30m]) and on (job, instance) {at(vllm.NUM_REQUESTS_RUNNING)}) "
            f"unless on () {at(reconciled.SETTLED, CLUSTER)}",
            "`n` above 1, lists of prompts, batches",
            "Mitigation 1",
        ),
        DiagnosisRow(
            (
                "engines finished requests of a model that is not in the log, and the log has no name that is not "
                "an engine's"
            ),
            f"{promql.growth(vllm.REQUEST_SUCCESS, '30m', where=(CLUSTER,))} > 10 "
            f"unless on (model_name) {promql.growth(sidecar.REQUESTS, '30m', where=(CLUSTER,))} > 0 "
            f"unless on () ({promql.growth(sidecar.REQUESTS, '30m', where=(eq('outcome', 'ok'), CLUSTER))} > 0 "
            f"unless on (model_name) {promql.current(vllm.NUM_REQUESTS_RUNNING)})",
            "the whole model is asked past the gateway",
            "Mitigation 2; on purpose: Mitigation 6",
        ),
        DiagnosisRow(
            "engines answered more than the gateway passed on",
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
            "somebody calls an engine directly",
            "Mitigation 2; on purpose: Mitigation 6",
        ),
        DiagnosisRow(
            "the gateway passed on more than the log has",
            f"sum(increase({at(gateway.REQUESTS, CLUSTER)}[30m])) > 10 + 1.05 * sum(increase("
            f"{at(sidecar.REQUESTS, CLUSTER)}[30m]))",
            "a log that no sidecar reads",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a sidecar booked it, and the gateway lost no record and answers for every other model",
            f"{promql.growth(reconciled.MISSING_IN_LOG, '30m', where=(eq('kind', 'requests'), CLUSTER, MODEL))} > "
            f"3 unless on () (sum(increase({at(gateway.LOG_LOST, CLUSTER)}[1h])) > 0 "
            f"or sum({at(gateway.LOG_LOST_BEFORE, CLUSTER)}) > 0)",
            (
                "somebody asks for this model past the gateway; or another gateway writes a log that this sidecar "
                "does not read"
            ),
            "Mitigation 2, else 3",
        ),
        DiagnosisRow(
            "records are lost, or lines of the log are no records",
            f"sum(increase({at(gateway.LOG_LOST, CLUSTER)}[1h])) > 0 "
            f"or sum({at(gateway.LOG_LOST_BEFORE, CLUSTER)}) > 0 "
            f"or sum(increase({at(sidecar.LOG_BAD_LINES, CLUSTER)}[30m])) > 0",
            (
                "the gateway's disk was full for long, or it died with records in memory; or two writers in one "
                "file, or another release of writer or reader"
            ),
            "[VLLMRequestLogUnwritable](VLLMRequestLogUnwritable.md), else Mitigation 4",
        ),
        DiagnosisRow(
            "the sidecar was away for more than a quarter of the last hour",
            f"sum by (job, instance) (sum_over_time(({at(prometheus.UP, eq('job', 'sidecar'), CLUSTER)} == bool "
            "0)[1h:1m])) > 15",
            "what came into the log meanwhile is missing on its side",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "there is a log, and no gateway of ours is scraped",
            f"sum({at(sidecar.REQUESTS, CLUSTER)}) unless on () {at(gateway.REQUESTS, CLUSTER)}",
            "the log of another gateway, which may leave requests out; the rows that ask ours cannot tell",
            "Mitigation 2 if step 4 shows other addresses, else Mitigation 3",
        ),
    ),
    "VLLMLogExceedsEngine": (
        DiagnosisRow(
            "an engine does not answer its scrape, or answers without vLLM's series",
            f"{at(prometheus.UP, eq('job', 'vllm.*'), CLUSTER)} == 0 "
            f"or {at(prometheus.UP, eq('job', 'vllm.*'), CLUSTER)} == 1 "
            f"unless on (job, instance) {at(vllm.NUM_REQUESTS_RUNNING)}",
            (
                "it is down for Prometheus and not for the gateway; `--disable-log-stats`; or another program at "
                "that address"
            ),
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md), [VLLMMetricsAbsent](VLLMMetricsAbsent.md)",
        ),
        DiagnosisRow(
            "an engine answers again, and did not for more than a quarter of the last hour",
            f"sum by (job, instance) (sum_over_time(({at(prometheus.UP, eq('job', 'vllm.*'), CLUSTER)} == bool "
            f"0)[1h:1m])) > 15 and on (job, instance) {at(prometheus.UP)} == 1",
            "if it served meanwhile, what it finished then is missing on its side",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a sidecar looks at fewer engines than the gateway has upstreams",
            f"count(group by (source) ({at(sidecar.SOURCE_UP, eq('kind', 'engine'), CLUSTER)})) < count(group by "
            f"(upstream) ({at(gateway.UPSTREAM_UP, CLUSTER)}))",
            "an engine that is missing under `engines` in `sidecar.yaml`",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "a sidecar booked it, and looks at every upstream",
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
            (
                "somebody writes records that are none, or the same requests under new ids; or another service "
                "answers for this model"
            ),
            "Mitigation 3, then 4",
        ),
        DiagnosisRow(
            "a gateway sends to an address that nobody scrapes",
            f"label_replace({at(gateway.UPSTREAM_UP, CLUSTER)}, "
            '"instance", "$1", "address", "(.+)") unless on (instance) '
            f"{at(prometheus.UP, eq('job', 'vllm.*'))}",
            "an engine outside the scrape configuration; or a balancer, or another name of a known engine",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the log's counters fell within the hour",
            f"max by (instance) (resets({at(sidecar.LOG_LINES, CLUSTER)}[1h])) > 0",
            (
                "a sidecar without `state` started again after the log was rotated: it counts from the file that "
                "is there, and Prometheus takes that for new"
            ),
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a path is read by two sidecars",
            f"count by (path) ({at(sidecar.LOG_LAG, CLUSTER)}) > 1",
            "two sidecars of one host; on two hosts the same path may be two files",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the log has names that no engine has",
            f"{promql.growth(sidecar.REQUESTS, '30m', where=(eq('outcome', 'ok'), CLUSTER))} > 10 "
            f"unless on (model_name) {promql.current(vllm.NUM_REQUESTS_RUNNING)}",
            (
                "another service answers them behind the gateway; or they are adapters and aliases, which make no "
                "difference"
            ),
            "Mitigation 4",
        ),
    ),
    "VLLMRequestLogLagging": (
        DiagnosisRow(
            "unread bytes grow",
            f"{at(sidecar.LOG_BYTES_BEHIND, PATH)} > 65536 and deriv({at(sidecar.LOG_BYTES_BEHIND, PATH)}[10m]) > 0",
            "the sidecar does not keep up: no processor time, or a slow file system",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the sidecar counts no line, and a mebibyte or more stands unread",
            f"min_over_time({at(sidecar.LOG_BYTES_BEHIND, PATH, INSTANCE)}[5m]) > 1048576 "
            f"unless on (job, instance) {promql.growth(sidecar.LOG_LINES, '5m', ('job', 'instance'))} > 0",
            (
                "its reading fails or hangs, as on a file system of another host; just after its start it reads "
                "first and counts then"
            ),
            "[VLLMSidecarSourceFailing](VLLMSidecarSourceFailing.md), else Mitigation 5",
        ),
        DiagnosisRow(
            "the sidecar started within a quarter of an hour",
            f"time() - {at(sidecar.SIDECAR_START)} < 900",
            "it reads the file from its beginning, so old records are its newest for a while",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the gateway wrote late",
            f"max by (instance) (max_over_time({at(gateway.LOG_WAITING)}[15m])) > 100 "
            f"or {promql.growth(gateway.LOG_ERRORS, '15m', BY_INSTANCE)} > 0",
            "its disk was full or slow",
            "[VLLMRequestLogUnwritable](VLLMRequestLogUnwritable.md)",
        ),
        DiagnosisRow(
            "nothing is unread, and the lag stands at about one value",
            f"max_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) - min_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) < "
            f"10 and changes({at(sidecar.LOG_LAG, PATH)}[15m]) > 0 "
            f"and {at(sidecar.LOG_BYTES_BEHIND, PATH)} == 0",
            "clocks of two hosts that differ; or a foreign log that writes local time as if it were UTC",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "nothing is unread, and the lag jumps about",
            f"max_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) - min_over_time({at(sidecar.LOG_LAG, PATH)}[15m]) "
            f">= 10 and {at(sidecar.LOG_BYTES_BEHIND, PATH)} == 0",
            "a foreign log whose `ts` is the beginning of a request, or records that are forwarded in batches",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the lag has not moved for a quarter of an hour",
            f"{at(sidecar.LOG_LAG, PATH)} > 60 and changes({at(sidecar.LOG_LAG, PATH)}[15m]) == 0",
            "no record came into this log, while another log of the same sidecar is busy: it is an old figure",
            "Mitigation 1",
        ),
    ),
    "VLLMRequestLogUnwritable": (
        DiagnosisRow(
            "records are lost",
            f"{promql.growth(gateway.LOG_LOST, '5m', BY_INSTANCE, (INSTANCE,))} > 0",
            "it has failed for long, and the memory is used up",
            "Mitigation 1, at once",
        ),
        DiagnosisRow(
            "it fails, and the sidecar cannot read the log either",
            f"{promql.growth(gateway.LOG_ERRORS, '2m', BY_INSTANCE, (INSTANCE,))} > 0 "
            f"and on () min({at(sidecar.SOURCE_UP, eq('kind', 'log'))}) == 0",
            "the volume is gone, or its permissions changed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "it fails, and the sidecar reads well",
            f"{promql.growth(gateway.LOG_ERRORS, '2m', BY_INSTANCE, (INSTANCE,))} > 0 "
            f"unless on () min({at(sidecar.SOURCE_UP, eq('kind', 'log'))}) == 0",
            "a full disk, mostly",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "it does not fail any more, and nothing waits",
            f"{promql.worst(gateway.LOG_WAITING, BY_INSTANCE, (INSTANCE,))} == 0 "
            f"unless on (instance) ({promql.growth(gateway.LOG_ERRORS, '2m', BY_INSTANCE, (INSTANCE,))} > 0 "
            f"or {promql.current(gateway.LOG_LOST_BEFORE, BY_INSTANCE, (INSTANCE,))} > 0)",
            "it was short, such as a rotation or a disk that was full for a moment",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a run that ended within the hour lost records",
            f"{promql.current(gateway.LOG_LOST_BEFORE, BY_INSTANCE, (INSTANCE,))} > 0",
            "the gateway was killed or ran out of memory, mostly while its disk was full",
            "Mitigation 5",
        ),
    ),
}
