"""Self-monitoring alerts: gateway, sidecar, Prometheus and Alertmanager.

If one of them fails, other alerts can no longer fire, and their absence must not look like health."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import JOB, TARGET_POD, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, self_monitoring, ship, sidecar
from exporters.catalogue.prometheus import SAMPLE_LIMIT, SCRAPE_SAMPLES_KEPT, UP

_OUR_RULES = ('rule_group=~".*;vllm-.*"',)  # the label is file;group
# a missing GPU and a checkpoint that cannot be written have alerts of their own
_OTHER_KINDS = ('kind!~"gpu|checkpoint"',)

_FAILED = ('reason!="contextCanceled"',)  # a reload cancels notifications in flight, and sends them again


def alerts(s: Settings) -> tuple[Alert, ...]:
    five, ten, gateways = s.window("5m"), s.window("10m"), promql.series(UP, (s.gateway,))
    failed = self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED
    near, ours = s.at(thresholds.SCRAPE_NEAR_LIMIT), s.ours
    return (
        Alert(
            "VLLMGatewayDown",
            Severity.CRITICAL,
            f"group {by(JOB)} ({gateways}) unless group {by(JOB)} ({gateways} == 1)",
            hold="1m",
            summary="Gateway down: no gateway of job {{ $labels.job }} answers",
            description=(
                "No gateway of job {{ $labels.job }} has answered Prometheus for 1 min: its clients are not served,"
                " even if the engines are healthy. Check whether requests still pass (First five minutes, step 1):"
                " if they do,"
                " only its metrics port cannot be reached."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMGatewayReplicaDown",
            Severity.WARNING,
            f"{gateways} == 0 and {on(JOB)} {gateways} == 1",
            hold="5m",
            summary="Gateway replica down: {{ $labels.instance }} of job {{ $labels.job }}, others answer",
            description=(
                "The gateway {{ $labels.instance }} has not answered Prometheus for 5 min, and others of job"
                " {{ $labels.job }} do: clients are served with less reserve. With fixed shares, its part of every"
                " limit is unused. Check whether it still answers clients (First five minutes, step 1), then read the"
                " end of its log and start it again."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
            owner="platform",
        ),
        Alert(
            "VLLMGatewayGone",
            Severity.CRITICAL,
            recorded.lost_jobs(s, s.gateway),
            hold="3m",
            summary="Gateway targets lost: service discovery finds no gateway of job {{ $labels.job }}",
            description=(
                "Job {{ $labels.job }} had a gateway within the last day; service discovery has found none for 3"
                " min: its pod may be evicted or pending, and no other alert about it can fire. Check whether it"
                " still answers clients. If it was removed on purpose, silence this alert: it ends after a day."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMSidecarDown",
            Severity.WARNING,
            f"{promql.series(UP, (s.sidecar,))} == 0",
            hold="2m",
            summary="Sidecar down: {{ $labels.instance }} of job {{ $labels.job }}",
            description=(
                "The sidecar {{ $labels.instance }} has not answered Prometheus for 2 min: metrics per team, of the"
                " request log and of the GPUs are stale. Serving goes on. Check whether its process runs, read the"
                " end of its log, and start it again."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMSidecarGone",
            Severity.WARNING,
            recorded.lost_jobs(s, s.sidecar),
            hold="15m",
            summary="Sidecar targets lost: service discovery finds no sidecar of job {{ $labels.job }}",
            description=(
                "Job {{ $labels.job }} had a sidecar within the last day; service discovery has found none for 15"
                " min: metrics per team, of the request log and of the GPUs are missing, and no other alert about"
                " it can fire. Serving goes on. Check whether it runs. If it was removed on purpose, silence this"
                " alert: it ends after a day."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMSidecarSourceFailing",
            Severity.WARNING,
            f"{promql.current(sidecar.SOURCE_UP, (*TARGET_POD, 'kind', 'source'), _OTHER_KINDS)} == 0",
            hold="5m",
            summary="Sidecar source failing: {{ $labels.kind }} {{ $labels.source }} on {{ $labels.instance }}",
            description=(
                "The sidecar {{ $labels.instance }} has failed to read its {{ $labels.kind }} {{ $labels.source }}"
                " for 5 min: the metrics from it are stale. Check the reason (First five minutes, step 1), and read"
                " what the"
                " sidecar logged when the failure began (step 3)."
            ),
            panel=PanelRef("monitoring-health", "sources-up"),
        ),
        Alert(
            "VLLMCheckpointFailing",
            Severity.WARNING,
            f"{promql.current(sidecar.CHECKPOINT_UP, TARGET_POD)} == 0",
            hold="2m",
            summary="Sidecar cannot save its state: {{ $labels.instance }}",
            description=(
                "The sidecar {{ $labels.instance }} has failed to write its checkpoint for 2 min; metrics of the"
                " request log do not change until it can. Check free space and permissions where its state is kept,"
                " and read the error in its log (First five minutes, step 3)."
            ),
            panel=PanelRef("monitoring-health", "checkpoint"),
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMShipFailing",
            Severity.WARNING,
            f"{promql.current(ship.SHIP_UP, (*TARGET_POD, 'kind'))} == 0",
            hold="10m",
            summary="Shipper cannot write: {{ $labels.kind }} fails on {{ $labels.instance }}",
            description=(
                "The shipper {{ $labels.instance }} has failed to write to its {{ $labels.kind }} for 10 min: the data"
                " set lacks new requests. Nothing is lost while the request logs exist. Read the error in its log"
                " (First five minutes, step 2), and keep rotated logs until it writes again."
            ),
            panel=PanelRef("monitoring-health", "ship-up"),
            owner="platform",
        ),
        Alert(
            "VLLMDatasetDiffers",
            Severity.WARNING,
            f"{promql.current(ship.SHIP_UNEXPLAINED, (*TARGET_POD, 'kind', 'model_name'))} > 0",
            hold="15m",
            summary="Data set differs from counters: {{ $labels.kind }} of {{ $labels.model_name }}",
            description=(
                "On the last complete day, segments, sidecar and engines differ by {{ $value | humanize }}"
                " {{ $labels.kind }} of {{ $labels.model_name }} without a known cause, reports {{ $labels.instance }}."
                " Requests are not affected; reports from the data set may be wrong. Run vllm-watch ship verify for"
                " the sums (First five minutes, step 2)."
            ),
            panel=PanelRef("monitoring-health", "dataset-unexplained"),
            owner="platform",
        ),
        Alert(
            "VLLMSpansDropped",
            Severity.WARNING,
            f"{promql.growth(sidecar.SPANS_DROPPED, five, (*TARGET_POD, 'reason'))} > 0",
            hold="10m",
            summary="Trace spans dropped: {{ $labels.reason }} on {{ $labels.instance }}",
            description=(
                "The sidecar {{ $labels.instance }} dropped {{ $value | humanize }} spans within 5 min (reason:"
                " {{ $labels.reason }}), and has dropped some for 10 min: traces of these requests lack the"
                " gateway's span. Check that the collector answers at the configured OTLP endpoint (First five"
                " minutes, step"
                " 3)."
            ),
            panel=PanelRef("monitoring-health", "spans-dropped"),
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMRuleFailing",
            Severity.WARNING,
            f"{promql.growth(self_monitoring.RULE_FAILURES, five, (*TARGET_POD, 'rule_group'), _OUR_RULES)} > 0",
            hold="5m",
            summary="Rule evaluation failing: {{ $labels.rule_group }} on {{ $labels.instance }}",
            description=(
                "{{ $value | humanize }} evaluations of the group {{ $labels.rule_group }} have failed on"
                " Prometheus {{ $labels.instance }} within 5 min: its alerts cannot fire. Read the error of the"
                " failing rule at /rules of this Prometheus (First five minutes, step 2)."
            ),
            panel=PanelRef("monitoring-health", "rule-failures"),
            owner="platform",
        ),
        Alert(
            "VLLMScrapeNearLimit",
            Severity.WARNING,
            f"{promql.current(SCRAPE_SAMPLES_KEPT, TARGET_POD, (ours,))}"
            f" / ({promql.current(SAMPLE_LIMIT, TARGET_POD, (ours,))} > 0) > {near}"
            f" or {promql.growth(self_monitoring.SCRAPES_OVER_LIMIT, five, TARGET_POD)} > 0",
            hold="10m",
            summary="Scrape near sample_limit: {{ $labels.instance }} of job {{ $labels.job }}",
            description=(
                f"{{{{ $labels.instance }}}} of job {{{{ $labels.job }}}} has exposed more than {near.shown} of the"
                " samples that sample_limit allows for 10 min; above it Prometheus discards the whole scrape. If"
                " {{ $labels.instance }} is Prometheus itself, scrapes are already discarded. Compare the samples"
                " with a day ago (First five minutes, step 2), then raise sample_limit."
            ),
            panel=PanelRef("monitoring-health", "sample-limit"),
            owner="platform",
            threshold=near,
        ),
        Alert(
            "VLLMTeamLabelOverflow",
            Severity.WARNING,
            f"{promql.growth(sidecar.TEAMS_OVERFLOW, five, TARGET_POD)} > 0",
            hold="10m",
            summary="Team label overflow: sidecar {{ $labels.instance }}",
            description=(
                "The sidecar {{ $labels.instance }} counted {{ $value | humanize }} requests of teams beyond its"
                " limit within 5 min: dashboards and cost reports show them as team __other__. Check which teams"
                " have series of their own (First five minutes, step 3), then raise teams.limit in the sidecar's"
                " configuration."
            ),
            panel=PanelRef("monitoring-health", "folded"),
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMAlertmanagerUnreachable",
            Severity.WARNING,
            f"{promql.current(self_monitoring.ALERTMANAGERS, TARGET_POD)} < 1 "
            f"or {promql.growth(self_monitoring.NOTIFICATIONS_ERRORS, five, (*TARGET_POD, 'alertmanager'))} > 0",
            hold="2m",
            summary="Alertmanager unreachable: Prometheus {{ $labels.instance }}",
            description=(
                "Prometheus {{ $labels.instance }} has failed to send its alerts to Alertmanager for 2 min: they"
                " fire, but nobody is notified. Check that Alertmanager runs and answers on the host of Prometheus;"
                " watch the firing alerts by hand until it does."
            ),
            panel=PanelRef("monitoring-health", "alertmanagers"),
            owner="platform",
        ),
        Alert(
            "VLLMNotificationsFailing",
            Severity.WARNING,
            f"{promql.growth(failed, ten, (*TARGET_POD, 'integration'), _FAILED)} > 0",
            hold="1m",
            summary="Notifications failing: {{ $labels.integration }} of Alertmanager {{ $labels.instance }}",
            description=(
                "Alertmanager {{ $labels.instance }} failed to deliver {{ $value | humanize }} notifications by"
                " {{ $labels.integration }} within 10 min: alerts fire, but nobody is notified of them. Read the"
                " receiver's error in the Alertmanager log (First five minutes, step 3), and watch the firing alerts"
                " by hand"
                " until it is fixed."
            ),
            panel=PanelRef("monitoring-health", "alertmanager-notifications"),
            owner="platform",
        ),
        Alert(
            "VLLMWatchdog",
            Severity.INFO,
            "vector(1) > 0",
            hold="0s",
            summary="Watchdog: alerting works from end to end",
            description=(
                "This alert always fires. If it no longer arrives, Prometheus, Alertmanager or the path to its"
                " receiver is broken. Check that Prometheus runs and shows it as firing (First five minutes, step"
                " 1), then that"
                " Alertmanager has it."
            ),
            panel=PanelRef("overview", "firing-alerts"),
            owner="platform",
            always=True,
            muted_by=("VLLMNotificationsFailing",),
        ),
    )
