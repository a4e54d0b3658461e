"""Diagnosis of alerts on the gateway and the sidecar."""

from __future__ import annotations

from alerts import recorded
from exporters.catalogue import gateway, prometheus, promql, sidecar
from runbooks.diagnosis.row import BY_INSTANCE, BY_TEAM, INSTANCE, JOB, DiagnosisRow, at, eq, filled

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMGatewayDown": (
        DiagnosisRow(
            "records still come in",
            f"sum(increase({at(sidecar.LOG_LINES)}[2m])) > 0",
            "it serves; the metrics port, its address or the network to Prometheus is at fault",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "nobody listens",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} < 0.9",
            "the process ended, or does not start",
            "Mitigation 2, then 3",
        ),
        DiagnosisRow(
            "scrapes run into their time limit",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} >= 0.9",
            "it hangs or has no processor time, its host is gone, or packets are dropped",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "its event loop was late before",
            f"histogram_quantile(0.95, sum by (le) (rate({at(gateway.LOOP_LAG, JOB, part='_bucket')}[15m]))) > 0.25",
            "no processor time left: very many streams, or another program on its machine",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "it could not write its log before",
            f"max by (instance) (max_over_time({at(gateway.LOG_WAITING, JOB)}[30m])) > 0 "
            f"and max by (instance) (increase({at(gateway.LOG_ERRORS, JOB)}[30m])) > 0",
            "a full disk or lost permissions; started again it would refuse to start",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "it could not take `teams.yaml` over before",
            f"{promql.growth(gateway.RELOADS, '1d', BY_INSTANCE, (eq('result', 'failed'), JOB))} > 0",
            ("a mistake in the file: while it ran the former terms stayed in force; started again it refuses to start"),
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the engines are down as well",
            f"group by (job) ({at(prometheus.UP, eq('job', 'vllm.*'))}) "
            f"unless group by (job) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 1)",
            "the host or the network that they share",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMGatewayGone": (
        DiagnosisRow(
            "records still come in",
            f"sum(increase({at(sidecar.LOG_LINES)}[2m])) > 0",
            "it serves; only its target is lost",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the same address under another job",
            f"group by (job, instance) ({at(prometheus.UP)}) "
            f"and on (instance) last_over_time({at(prometheus.UP, JOB)}[1d]) "
            f"unless on (job, instance) last_over_time({at(prometheus.UP, JOB)}[1d])",
            "the job was renamed",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "it was down before it left",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 0",
            "it crashed or was evicted, and then removed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "it answered until it left",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 1",
            "evicted, scaled to nothing, deleted, or taken out of the configuration",
            "Mitigation 2, then 1",
        ),
        DiagnosisRow(
            "the sidecar left with it",
            f'last_over_time({recorded.JOBS}{{job="sidecar"}}[1d]) '
            f"unless group by (cluster, namespace, job) ({at(prometheus.UP)})",
            "they share a pod: its node or its claim is gone",
            "Mitigation 2",
        ),
    ),
    "VLLMSidecarDown": (
        DiagnosisRow(
            "nobody listens",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} < 0.9",
            "the process ended, or does not start",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "the scrape runs into its time limit",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} >= 0.9",
            "it hangs, has no processor time, or packets are dropped",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "it started several times within the hour",
            f"changes({at(sidecar.SIDECAR_START, INSTANCE)}[1h]) >= 2",
            "it is killed again and again: memory, or a health check without patience",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "it had megabytes of the log before it",
            f"max_over_time({at(sidecar.LOG_BYTES_BEHIND, INSTANCE)}[30m]) > 50e6",
            "a long log after a start, or a writer faster than the reader",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the gateway cannot write its log either",
            f"max by (instance) (increase({at(gateway.LOG_ERRORS)}[10m])) > 0",
            "the disk or the volume that both use",
            "[VLLMRequestLogUnwritable](VLLMRequestLogUnwritable.md)",
        ),
        DiagnosisRow(
            "no engine answers either",
            f"max({at(prometheus.UP, eq('job', 'vllm.*'))}) == 0",
            "the host or the network that they share",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMSidecarGone": (
        DiagnosisRow(
            "the gateway left with it",
            f'last_over_time({recorded.JOBS}{{job="gateway"}}[1d]) '
            f"unless group by (cluster, namespace, job) ({at(prometheus.UP)})",
            "they share a pod, and that is gone",
            "[VLLMGatewayGone](VLLMGatewayGone.md)",
        ),
        DiagnosisRow(
            "the same address under another job",
            f"group by (job, instance) ({at(prometheus.UP)}) "
            f"and on (instance) last_over_time({at(prometheus.UP, JOB)}[1d]) "
            f"unless on (job, instance) last_over_time({at(prometheus.UP, JOB)}[1d])",
            "the job was renamed",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "it was down before it left",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 0",
            "it crashed, and was then removed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "it answered until it left",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 1",
            "deleted, scaled to nothing, or taken out of the configuration",
            "Mitigation 1, then 2",
        ),
    ),
    "VLLMSidecarSourceFailing": (
        DiagnosisRow(
            "an engine that Prometheus cannot reach either",
            f"{at(sidecar.SOURCE_UP, eq('kind', 'engine'), INSTANCE, filled('source'))} == 0 "
            f"and on () {at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "the engine",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "an engine, and Prometheus reaches all of them",
            f"{at(sidecar.SOURCE_UP, eq('kind', 'engine'), INSTANCE, filled('source'))} == 0 "
            f"unless on () {at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            ("a wrong `url` in `engines`, no network from the sidecar, or a page that takes longer than `timeout_s`"),
            "Mitigation 3",
        ),
        DiagnosisRow(
            "something answers that is no engine's page",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "source", "reason"),
                    (eq("kind", "engine"), eq("reason", "http_4xx|bad_page"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            "a wrong port or path, or a proxy between that wants a login",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the log's file is not there, or is no file",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "source"),
                    (eq("kind", "log"), eq("reason", "os"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            (
                "it was rotated and nobody has asked since; or the gateway writes elsewhere; or a folder stands "
                "in its place"
            ),
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "permission is refused",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "kind", "source"),
                    (eq("reason", "permission"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            "owner, group or mode of the file or of a folder above it changed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the events file fails otherwise",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "source", "reason"),
                    (eq("kind", "events"), eq("reason", "os|timeout|other"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            "a full disk, a read-only volume, or another process that keeps its lock",
            "Mitigation 4",
        ),
    ),
    "VLLMCheckpointFailing": (
        DiagnosisRow(
            "it fails again and again, and permission is not the word",
            (
                f"{promql.current(sidecar.CHECKPOINT_UP, BY_INSTANCE, (INSTANCE,))} == 0 "
                "unless on (instance) "
                + promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    BY_INSTANCE,
                    (eq("kind", "checkpoint"), eq("reason", "permission"), INSTANCE),
                )
                + " > 0"
            ),
            "a full disk or quota, a volume that became read-only, a network file system that is gone",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "permission is refused",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    BY_INSTANCE,
                    (eq("kind", "checkpoint"), eq("reason", "permission"), INSTANCE),
                )
                + " > 0"
            ),
            "owner or mode of the folder changed, or the sidecar runs as somebody else",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the gateway cannot write its log either",
            f"{promql.current(sidecar.CHECKPOINT_UP, BY_INSTANCE, (INSTANCE,))} == 0 "
            f"and on () sum(increase({at(gateway.LOG_ERRORS)}[5m])) > 0",
            "the disk that both write to",
            "Mitigation 1, at once: there records are lost in the end",
        ),
    ),
    "VLLMSpansDropped": (
        DiagnosisRow(
            "the collector refuses",
            f"{promql.growth(sidecar.SPANS_DROPPED, '10m', BY_INSTANCE, (eq('reason', 'refused'), INSTANCE))} > 0",
            "a wrong path or key in `otlp`, or something that is no collector; or a rule of the collector's",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "it could not be had",
            (
                promql.growth(
                    sidecar.SPANS_DROPPED, "10m", BY_INSTANCE, (eq("reason", "timeout|unavailable"), INSTANCE)
                )
                + " > 0"
            ),
            "the collector is down or full, or the network between",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the queue is full while the collector takes spans",
            f"{promql.growth(sidecar.SPANS_DROPPED, '10m', BY_INSTANCE, (eq('reason', 'queue_full'), INSTANCE))} > 0",
            "more requests than one connection can carry, or a collector that answers slowly",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a defect of ours",
            f"{promql.growth(sidecar.SPANS_DROPPED, '10m', BY_INSTANCE, (eq('reason', 'defect'), INSTANCE))} > 0",
            "a record that this release cannot make a span of; the sidecar's log has the trace",
            "Mitigation 4",
        ),
    ),
    "VLLMTeamLabelOverflow": (
        DiagnosisRow(
            "many teams sent something within the hour",
            f"count({promql.growth(sidecar.REQUESTS, '1h', BY_TEAM, (INSTANCE,))} > 0) >= 40",
            "there are more teams than the limit",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "few of the teams with a place sent anything",
            f"count({promql.growth(sidecar.REQUESTS, '1h', BY_TEAM, (INSTANCE,))} > 0) < 40 "
            f"or (max({at(sidecar.TEAMS, INSTANCE)}) unless on () max({at(sidecar.REQUESTS, INSTANCE)}))",
            "names that are used once hold the places: a log whose writer puts users, keys or ids into `team`",
            "Mitigation 2",
        ),
    ),
}
