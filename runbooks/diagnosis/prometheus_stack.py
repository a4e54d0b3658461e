"""Diagnosis of alerts on Prometheus and Alertmanager: rules, scrapes and notifications."""

from __future__ import annotations

from exporters.catalogue import prometheus, promql, self_monitoring, vllm
from runbooks.diagnosis.row import BY_INSTANCE, DiagnosisRow, at, eq

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMRuleFailing": (
        DiagnosisRow(
            "many groups fail at once",
            "count by (instance) ("
            f"{promql.growth(self_monitoring.RULE_FAILURES, '15m', ('instance', 'rule_group'))} > 0) > 3",
            "Prometheus itself: its store, its memory, queries that run out of time",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "an engine is scraped by two jobs",
            f"count by (instance) (group by (job, instance) ({at(vllm.NUM_REQUESTS_RUNNING)})) > 1",
            "`found duplicate series`: one thing has two series where a rule expects one",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "two targets write the same series",
            f"increase({at(self_monitoring.SAMPLES_DUPLICATE)}[15m]) > 0",
            "the same: two targets with equal labels",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "groups take longer than their interval",
            f"{promql.current(self_monitoring.RULE_GROUP_DURATION, ('instance', 'rule_group'))} > "
            f"{promql.worst(self_monitoring.RULE_GROUP_INTERVAL, ('instance', 'rule_group'))}",
            "too many series, too little processor time or memory",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "a group of ours fails, and hardly another one",
            (
                promql.growth(self_monitoring.RULE_FAILURES, "15m", ("rule_group",), (eq("rule_group", ".*;vllm-.*"),))
                + " > 0 and on () "
                f"count({promql.growth(self_monitoring.RULE_FAILURES, '15m', ('rule_group',))} > 0) <= 3"
            ),
            "the error of step 2: most often series that match more than once, after a new target or label",
            "Mitigation 1, then 2",
        ),
    ),
    "VLLMScrapeNearLimit": (
        DiagnosisRow(
            "a page is above its limit",
            f"{at(prometheus.SCRAPE_SAMPLES_KEPT)} > ({at(prometheus.SAMPLE_LIMIT)} > 0)",
            "thrown away whole since then",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "pages were thrown away",
            f"increase({at(self_monitoring.SCRAPES_OVER_LIMIT)}[15m]) > 0",
            (
                "a page above its limit, of whichever job: its target counts as down, and says why on Prometheus' "
                "page Targets"
            ),
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the page comes near its limit",
            f"{at(prometheus.SCRAPE_SAMPLES_KEPT)} / ({at(prometheus.SAMPLE_LIMIT)} > 0) > 0.8 "
            f"and {at(prometheus.SCRAPE_SAMPLES_KEPT)} <= {at(prometheus.SAMPLE_LIMIT)}",
            "a new release, more adapters, ranks, models or teams; or a label without end",
            "Mitigation 1, then 2",
        ),
    ),
    "VLLMAlertmanagerUnreachable": (
        DiagnosisRow(
            "none is known",
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
            "it answers its scrape and not the alerts",
            f"{promql.growth(self_monitoring.NOTIFICATIONS_ERRORS, '10m', ('instance', 'alertmanager'))} > 0 "
            f"unless on () {at(prometheus.UP, eq('job', '.*alertmanager.*'))} == 0",
            "a wrong path prefix or scheme, a login that Prometheus does not have, or a proxy between",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "it refused alerts as malformed",
            f"{promql.growth(self_monitoring.ALERTMANAGER_INVALID, '15m', BY_INSTANCE)} > 0",
            "labels that it does not allow, from a rule or from `alert_relabel_configs`",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "it has been started several times lately",
            f"changes({at(prometheus.PROCESS_START, eq('job', '.*alertmanager.*'))}[1h]) >= 2",
            "it ends again and again: memory, disk, or its store",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "it takes alerts, and its notifications fail",
            f"{promql.growth(self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED, '15m', ('integration', 'reason'))} > 0",
            "the receiver, beside this alert: the way out of Alertmanager is broken too",
            "[VLLMNotificationsFailing](VLLMNotificationsFailing.md)",
        ),
    ),
    "VLLMNotificationsFailing": (
        DiagnosisRow(
            "refused (4xx)",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "clientError"),),
                )
                + " > 0"
            ),
            "the key or address was revoked or is wrong, or a channel is gone",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the service is broken (5xx)",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "serverError"),),
                )
                + " > 0"
            ),
            "an outage of the service that is notified",
            "Mitigation 1, then 3",
        ),
        DiagnosisRow(
            "no answer in time",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "contextDeadlineExceeded"),),
                )
                + " > 0"
            ),
            "DNS, a proxy, a firewall, or the service hangs",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "anything else",
            (
                promql.growth(
                    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED,
                    "15m",
                    ("instance", "integration"),
                    (eq("reason", "other"),),
                )
                + " > 0"
            ),
            "a secret that cannot be read, a template, or no connection",
            "Mitigation 2, then 3",
        ),
    ),
    "VLLMWatchdog": (
        DiagnosisRow(
            "Prometheus answers and does not have it",
            f"absent({at(prometheus.ALERTS, eq('alertname', 'VLLMWatchdog'), eq('alertstate', 'firing'))})",
            "our rule files are not loaded, or the last configuration was refused",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "Prometheus has it and cannot hand it over",
            f"min({at(self_monitoring.ALERTMANAGERS)}) < 1 "
            f"or {promql.growth(self_monitoring.NOTIFICATIONS_ERRORS, '10m', ('alertmanager',))} > 0",
            "the way between the two",
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
            "something is suppressed",
            f"{promql.current(self_monitoring.ALERTMANAGER_ALERTS, BY_INSTANCE, (eq('state', 'suppressed'),))} > 0",
            (
                "a silence that is too wide, if step 2 shows this alert among them; else only tickets that a page "
                "keeps back"
            ),
            "Mitigation 5",
        ),
        DiagnosisRow(
            "a configuration was not read",
            f"{at(self_monitoring.CONFIG_LOADED)} == 0 or {at(self_monitoring.ALERTMANAGER_CONFIG_LOADED)} == 0",
            "a mistake in it: the old one is in use, and a restart would fail",
            "Mitigation 2",
        ),
    ),
}
