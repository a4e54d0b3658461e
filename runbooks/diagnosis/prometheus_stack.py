"""Diagnosis of alerts on Prometheus and Alertmanager: rules, scrapes and notifications."""

from __future__ import annotations

from exporters.catalogue import prometheus, promql, self_monitoring, vllm
from runbooks.diagnosis.row import BY_INSTANCE, DiagnosisRow, at, eq

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMRuleFailing": (
        DiagnosisRow(
            "more than three groups fail at once",
            "count by (instance) ("
            f"{promql.growth(self_monitoring.RULE_FAILURES, '15m', ('instance', 'rule_group'))} > 0) > 3",
            "Prometheus itself: its storage, its memory, or query timeouts",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "two jobs scrape the same engine",
            f"count by (instance) (group by (job, instance) ({at(vllm.NUM_REQUESTS_RUNNING)})) > 1",
            "`found duplicate series`: there are two series where a rule expects one",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "two targets write the same series",
            f"increase({at(self_monitoring.SAMPLES_DUPLICATE)}[15m]) > 0",
            "`found duplicate series` as well: two targets have equal labels",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a group takes longer than its interval",
            f"{promql.current(self_monitoring.RULE_GROUP_DURATION, ('instance', 'rule_group'))} > "
            f"{promql.worst(self_monitoring.RULE_GROUP_INTERVAL, ('instance', 'rule_group'))}",
            "too many series, or too little CPU time or memory",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a group of ours fails, and at most three groups in all",
            (
                promql.growth(self_monitoring.RULE_FAILURES, "15m", ("rule_group",), (eq("rule_group", ".*;vllm-.*"),))
                + " > 0 and on () "
                f"count({promql.growth(self_monitoring.RULE_FAILURES, '15m', ('rule_group',))} > 0) <= 3"
            ),
            "the error of step 2: most often series that match more than once after a new target or label",
            "Mitigation 1, then 2",
        ),
    ),
    "VLLMScrapeNearLimit": (
        DiagnosisRow(
            "a scrape is above its limit",
            f"{at(prometheus.SCRAPE_SAMPLES_KEPT)} > ({at(prometheus.SAMPLE_LIMIT)} > 0)",
            "Prometheus has discarded the whole scrape since then",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "Prometheus discarded scrapes",
            f"increase({at(self_monitoring.SCRAPES_OVER_LIMIT)}[15m]) > 0",
            "a scrape of any job above its limit: the target counts as down; /targets of Prometheus gives the reason",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a scrape has more than 80 % of its limit",
            f"{at(prometheus.SCRAPE_SAMPLES_KEPT)} / ({at(prometheus.SAMPLE_LIMIT)} > 0) > 0.8 "
            f"and {at(prometheus.SCRAPE_SAMPLES_KEPT)} <= {at(prometheus.SAMPLE_LIMIT)}",
            "a new release, more adapters, ranks, models or teams; or a label with unbounded values",
            "Mitigation 1, then 2",
        ),
    ),
    "VLLMAlertmanagerUnreachable": (
        DiagnosisRow(
            "Prometheus knows no Alertmanager",
            f"{at(self_monitoring.ALERTMANAGERS)} < 1",
            "no `alerting` block, or service discovery finds none",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "Alertmanager does not answer its own scrape",
            f"{at(prometheus.UP, eq('job', '.*alertmanager.*'))} == 0",
            "its process ended or hangs",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "Alertmanager answers its scrape and does not accept alerts",
            f"{promql.growth(self_monitoring.NOTIFICATIONS_ERRORS, '10m', ('instance', 'alertmanager'))} > 0 "
            f"unless on () {at(prometheus.UP, eq('job', '.*alertmanager.*'))} == 0",
            "a wrong path prefix or scheme, missing credentials of Prometheus, or a proxy in between",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "Alertmanager rejected alerts as malformed",
            f"{promql.growth(self_monitoring.ALERTMANAGER_INVALID, '15m', BY_INSTANCE)} > 0",
            "labels that it does not allow, from a rule or from `alert_relabel_configs`",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "Alertmanager started several times within the hour",
            f"changes({at(prometheus.PROCESS_START, eq('job', '.*alertmanager.*'))}[1h]) >= 2",
            "it ends repeatedly: memory, disk, or its storage",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "Alertmanager accepts alerts, and its notifications fail",
            f"{promql.growth(self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED, '15m', ('integration', 'reason'))} > 0",
            "a second fault: the receiver does not accept notifications of Alertmanager",
            "[VLLMNotificationsFailing](VLLMNotificationsFailing.md)",
        ),
    ),
    "VLLMNotificationsFailing": (
        DiagnosisRow(
            "the service rejects notifications (4xx)",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "clientError"),),
                )
                + " > 0"
            ),
            "the key or address is wrong or was revoked, or a channel is gone",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the service answers with errors (5xx)",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "serverError"),),
                )
                + " > 0"
            ),
            "an outage of the service that receives the notifications",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "the service does not answer in time",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "contextDeadlineExceeded"),),
                )
                + " > 0"
            ),
            "a fault of DNS, a proxy or a firewall, or the service hangs",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "notifications fail for another reason",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "other"),),
                )
                + " > 0"
            ),
            "a secret that cannot be read, a faulty template, or no connection",
            "Mitigation 2, then 3",
        ),
    ),
    "VLLMWatchdog": (
        DiagnosisRow(
            "Prometheus answers, and the alert does not fire there",
            f"absent({at(prometheus.ALERTS, eq('alertname', 'VLLMWatchdog'), eq('alertstate', 'firing'))})",
            "our rule files are not loaded, or Prometheus rejected its last configuration",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "Prometheus cannot send alerts to Alertmanager",
            f"min({at(self_monitoring.ALERTMANAGERS)}) < 1 "
            f"or {promql.growth(self_monitoring.NOTIFICATIONS_ERRORS, '10m', ('alertmanager',))} > 0",
            "the connection between the two fails, or Alertmanager is down",
            "[VLLMAlertmanagerUnreachable](VLLMAlertmanagerUnreachable.md)",
        ),
        DiagnosisRow(
            "notifications fail",
            f"{promql.growth(self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED, '30m', ('integration', 'reason'))} > 0",
            "the receiver's address, its secret, a proxy, or the service itself",
            "[VLLMNotificationsFailing](VLLMNotificationsFailing.md)",
        ),
        DiagnosisRow(
            "Alertmanager has sent nothing for half an hour",
            f"{promql.growth(self_monitoring.ALERTMANAGER_NOTIFICATIONS, '30m', BY_INSTANCE)} == 0",
            "no receiver is configured, or none for this alert",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "Alertmanager suppresses an alert",
            f"{promql.current(self_monitoring.ALERTMANAGER_ALERTS, BY_INSTANCE, (eq('state', 'suppressed'),))} > 0",
            "this alert in step 2: a silence that is too wide; otherwise only tickets that a page inhibits",
            "Mitigation 5",
        ),
        DiagnosisRow(
            "a configuration was not loaded",
            f"{at(self_monitoring.CONFIG_LOADED)} == 0 or {at(self_monitoring.ALERTMANAGER_CONFIG_LOADED)} == 0",
            "a mistake in it: the old one is in use, and a restart would fail",
            "Mitigation 2",
        ),
    ),
}
