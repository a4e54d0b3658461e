"""Diagnosis of alerts on the gateway and the sidecar."""

from __future__ import annotations

from alerts import recorded
from exporters.catalogue import gateway, prometheus, promql, ship, sidecar
from runbooks.diagnosis.row import BY_INSTANCE, BY_REASON, BY_TEAM, INSTANCE, JOB, DiagnosisRow, at, eq, filled

_ROUTE = (INSTANCE, filled("route"))

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMGatewayDown": (
        DiagnosisRow(
            "the sidecar still reads new log records",
            f"sum(increase({at(sidecar.LOG_LINES)}[2m])) > 0",
            "the gateway serves its clients; the metrics port, its address or the network to Prometheus fails",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "scrapes fail at once: nothing listens on the metrics port",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} < 0.9",
            "the process ended or does not start",
            "Mitigation 2, then 3",
        ),
        DiagnosisRow(
            "scrapes run into the scrape timeout",
            f"{at(prometheus.UP, JOB)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB)} >= 0.9",
            "the process hangs or gets no CPU time, its host is down, or packets are dropped",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the p95 of the event loop lag was above 250 ms before",
            f"histogram_quantile(0.95, sum by (le) (rate({at(gateway.LOOP_LAG, JOB, part='_bucket')}[15m]))) > 0.25",
            "no CPU time left: very many streams, or another program on the host",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "the gateway could not write its request log before",
            f"max by (instance) (max_over_time({at(gateway.LOG_WAITING, JOB)}[30m])) > 0 "
            f"and max by (instance) (increase({at(gateway.LOG_ERRORS, JOB)}[30m])) > 0",
            "a full disk or missing permissions; after a restart the gateway would refuse to start",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a reload of `teams.yaml` failed within the last day",
            f"{promql.growth(gateway.RELOADS, '1d', BY_INSTANCE, (eq('result', 'failed'), JOB))} > 0",
            "a mistake in the file: the former limits stayed in force; after a restart the gateway refuses to start",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "all engines of a job are down as well",
            f"group by (job) ({at(prometheus.UP, eq('job', 'vllm.*'))}) "
            f"unless group by (job) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 1)",
            "a fault of the host or the network that they share",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMGatewayReplicaDown": (
        DiagnosisRow(
            "scrapes fail at once: nothing listens on the metrics port",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB, INSTANCE)} < 0.9",
            "the process ended or does not start",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "scrapes run into the scrape timeout",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION, JOB, INSTANCE)} >= 0.9",
            "the process hangs, its host is down, or packets are dropped",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the other gateways still count its lease",
            f"max({at(gateway.LEASE_REPLICAS)}) >= count({at(prometheus.UP, JOB)})",
            "it works, and only its metrics port, its address or the network to Prometheus fails",
            "Mitigation 4",
        ),
    ),
    "VLLMGatewayGone": (
        DiagnosisRow(
            "the sidecar still reads new log records",
            f"sum(increase({at(sidecar.LOG_LINES)}[2m])) > 0",
            "the gateway serves its clients; only its scrape target is lost",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the same address is scraped under another job",
            f"group by (job, instance) ({at(prometheus.UP)}) "
            f"and on (instance) last_over_time({at(prometheus.UP, JOB)}[1d]) "
            f"unless on (job, instance) last_over_time({at(prometheus.UP, JOB)}[1d])",
            "the job was renamed",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the last scrape of the target failed",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 0",
            "the gateway crashed or was evicted, and was then removed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the last scrape of the target succeeded",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 1",
            "evicted, scaled to zero, deleted, or removed from the scrape configuration",
            "Mitigation 2, then 1",
        ),
        DiagnosisRow(
            "the target of the sidecar is lost as well",
            f'last_over_time({recorded.JOBS}{{job="sidecar"}}[1d]) '
            f"unless group by (cluster, namespace, job) ({at(prometheus.UP)})",
            "both run in one pod: its node or its volume claim is gone",
            "Mitigation 2",
        ),
    ),
    "VLLMResponsesUnreadable": (
        DiagnosisRow(
            "responses are redirects, or have a media type that the route never has",
            f"{promql.growth(gateway.UNREADABLE, '10m', BY_REASON, (eq('reason', 'redirect|content_type'), *_ROUTE))}"
            " > 0",
            "the address leads to a login page, to TLS, or to another service",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "responses have an encoding that cannot be decoded",
            f"{promql.growth(gateway.UNREADABLE, '10m', BY_REASON, (eq('reason', 'encoding'), *_ROUTE))} > 0",
            "a proxy before the engine compresses responses without being asked, or damages them",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "responses are not JSON, lack the route's fields, or are empty",
            f"{promql.growth(gateway.UNREADABLE, '10m', BY_REASON, (eq('reason', 'json|shape|empty'), *_ROUTE))} > 0",
            "another program, a release of vLLM with other fields, or a proxy that cuts responses",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "token counts are impossible",
            f"{promql.growth(gateway.UNREADABLE, '10m', BY_REASON, (eq('reason', 'usage'), *_ROUTE))} > 0",
            "a defect of this release of the engine, or a proxy that rewrites responses",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "one upstream of several fails with `engine_error`",
            f"count({promql.growth(gateway.ATTEMPTS, '10m', ('upstream',), (eq('result', 'engine_error'), INSTANCE))}"
            f" > 0) == 1 and on () count(group by (upstream) ({at(gateway.UPSTREAM_UP, INSTANCE)})) > 1",
            "this engine, or what is between the gateway and it; the others can serve meanwhile",
            "Mitigation 5, then the row above that holds",
        ),
    ),
    "VLLMSidecarDown": (
        DiagnosisRow(
            "the scrape fails at once: nothing listens on the port",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} < 0.9",
            "the process ended or does not start",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "the scrape runs into the scrape timeout",
            f"{at(prometheus.UP, JOB, INSTANCE)} == 0 and {at(prometheus.SCRAPE_DURATION)} >= 0.9",
            "the process hangs or gets no CPU time, or packets are dropped",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the sidecar started several times within the hour",
            f"changes({at(sidecar.SIDECAR_START, INSTANCE)}[1h]) >= 2",
            "it is killed repeatedly: out of memory, or a health check with too short a timeout",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "more than 50 MB of the log were unread",
            f"max_over_time({at(sidecar.LOG_BYTES_BEHIND, INSTANCE)}[30m]) > 50e6",
            "a long log after a start, or records are written faster than they are read",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the gateway cannot write its log either",
            f"max by (instance) (increase({at(gateway.LOG_ERRORS)}[10m])) > 0",
            "a fault of the disk or the volume that both use",
            "[VLLMRequestLogUnwritable](VLLMRequestLogUnwritable.md)",
        ),
        DiagnosisRow(
            "no engine answers Prometheus either",
            f"max({at(prometheus.UP, eq('job', 'vllm.*'))}) == 0",
            "a fault of the host or the network that they share",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMSidecarGone": (
        DiagnosisRow(
            "the target of the gateway is lost as well",
            f'last_over_time({recorded.JOBS}{{job="gateway"}}[1d]) '
            f"unless group by (cluster, namespace, job) ({at(prometheus.UP)})",
            "both run in one pod, and the pod is gone",
            "[VLLMGatewayGone](VLLMGatewayGone.md)",
        ),
        DiagnosisRow(
            "the same address is scraped under another job",
            f"group by (job, instance) ({at(prometheus.UP)}) "
            f"and on (instance) last_over_time({at(prometheus.UP, JOB)}[1d]) "
            f"unless on (job, instance) last_over_time({at(prometheus.UP, JOB)}[1d])",
            "the job was renamed",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the last scrape of the target failed",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 0",
            "the sidecar crashed and was then removed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the last scrape of the target succeeded",
            f"last_over_time({at(prometheus.UP, JOB)}[1d]) == 1",
            "deleted, scaled to zero, or removed from the scrape configuration",
            "Mitigation 1, then 2",
        ),
    ),
    "VLLMSidecarSourceFailing": (
        DiagnosisRow(
            "an engine fails, and Prometheus cannot reach an engine either",
            f"{at(sidecar.SOURCE_UP, eq('kind', 'engine'), INSTANCE, filled('source'))} == 0 "
            f"and on () {at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "the engine is down or cannot be reached",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "an engine fails, and Prometheus reaches all engines",
            f"{at(sidecar.SOURCE_UP, eq('kind', 'engine'), INSTANCE, filled('source'))} == 0 "
            f"unless on () {at(prometheus.UP, eq('job', 'vllm.*'))} == 0",
            "a wrong `url` in `engines`, no network from the sidecar, or a scrape slower than `timeout_s`",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the address answers, but not with the metrics of an engine",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "source", "reason"),
                    (eq("kind", "engine"), eq("reason", "http_4xx|bad_page"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            "a wrong port or path, or a proxy in between that requires a login",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the log file is missing, or is not a regular file",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "source"),
                    (eq("kind", "log"), eq("reason", "os"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            "rotated, and no request since; or the gateway writes to another path; or a directory has that name",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "permission is denied",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "kind", "source"),
                    (eq("reason", "permission"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            "owner, group or mode of the file or of a parent directory changed",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the events file fails for another reason",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    ("instance", "source", "reason"),
                    (eq("kind", "events"), eq("reason", "os|timeout|other"), INSTANCE, filled("source")),
                )
                + " > 0"
            ),
            "a full disk, a read-only volume, or another process that keeps the file locked",
            "Mitigation 4",
        ),
    ),
    "VLLMCheckpointFailing": (
        DiagnosisRow(
            "writes keep failing, and permission is not the reason",
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
            "a full disk or quota, a volume that became read-only, or a network file system that is gone",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "permission is denied",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "10m",
                    BY_INSTANCE,
                    (eq("kind", "checkpoint"), eq("reason", "permission"), INSTANCE),
                )
                + " > 0"
            ),
            "owner or mode of the directory changed, or the sidecar runs as another user",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the gateway cannot write its log either",
            f"{promql.current(sidecar.CHECKPOINT_UP, BY_INSTANCE, (INSTANCE,))} == 0 "
            f"and on () sum(increase({at(gateway.LOG_ERRORS)}[5m])) > 0",
            "a fault of the disk that both write to",
            "Mitigation 1 at once: the gateway loses records when its memory is used up",
        ),
    ),
    "VLLMShipFailing": (
        DiagnosisRow(
            "the store fails, the disk does not",
            f"{at(ship.SHIP_UP, eq('kind', 'store'), INSTANCE)} == 0"
            f" unless on (instance) {at(ship.SHIP_UP, eq('kind', 'disk'), INSTANCE)} == 0",
            "the store is down, its credentials expired, or the network fails",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the disk fails",
            f"{at(ship.SHIP_UP, eq('kind', 'disk'), INSTANCE)} == 0",
            "the disk of `state` is full or read-only, or the request log cannot be read",
            "Mitigation 2",
        ),
    ),
    "VLLMDatasetDiffers": (
        DiagnosisRow(
            "segments wait for the store or their manifest",
            f"{at(ship.SHIP_WAITING, INSTANCE)} > 0",
            "the store fails or is slow: the day is not complete in the data set yet",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the shipper has not read its log to the end",
            f"{at(ship.SHIP_UNREAD, INSTANCE)} > 0",
            "the log grows faster than it is read, or the spool is full",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the sidecar missed lines of a log, or read some again",
            f"sum(increase({at(sidecar.LOG_FAULTS)}[2d])) > 0",
            "a log was truncated or damaged, and its two readers did not see the same lines",
            "Mitigation 2",
        ),
    ),
    "VLLMSpansDropped": (
        DiagnosisRow(
            "the collector rejects spans",
            f"{promql.growth(sidecar.SPANS_DROPPED, '10m', BY_INSTANCE, (eq('reason', 'refused'), INSTANCE))} > 0",
            "a wrong path or key in `otlp`, an endpoint that is not a collector, or a rule of the collector",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the collector does not accept spans in time",
            (
                promql.growth(
                    sidecar.SPANS_DROPPED, "10m", BY_INSTANCE, (eq("reason", "timeout|unavailable"), INSTANCE)
                )
                + " > 0"
            ),
            "the collector is down or full, or the network in between fails",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the queue is full while the collector accepts spans",
            f"{promql.growth(sidecar.SPANS_DROPPED, '10m', BY_INSTANCE, (eq('reason', 'queue_full'), INSTANCE))} > 0",
            "more requests than one connection can carry, or a slow collector",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "the sidecar cannot convert a record to a span",
            f"{promql.growth(sidecar.SPANS_DROPPED, '10m', BY_INSTANCE, (eq('reason', 'defect'), INSTANCE))} > 0",
            "a fault of this release of the sidecar; its log has the traceback",
            "Mitigation 4",
        ),
    ),
    "VLLMTeamLabelOverflow": (
        DiagnosisRow(
            "40 teams or more sent requests within the hour",
            f"count({promql.growth(sidecar.REQUESTS, '1h', BY_TEAM, (INSTANCE,))} > 0) >= 40",
            "there are more teams than the limit",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "fewer than 40 of the teams with series of their own sent requests",
            f"count({promql.growth(sidecar.REQUESTS, '1h', BY_TEAM, (INSTANCE,))} > 0) < 40 "
            f"or (max({at(sidecar.TEAMS, INSTANCE)}) unless on () max({at(sidecar.REQUESTS, INSTANCE)}))",
            "names used only once fill the table: the writer of the log puts users, keys or IDs into `team`",
            "Mitigation 2",
        ),
    ),
}
