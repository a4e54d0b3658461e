"""Those who watch: when one of them is gone, the others fall silent, and silence must not look like health."""

from __future__ import annotations

from alerts import recorded, thresholds
from alerts.labels import JOB, TARGET, by
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import promql, self_monitoring, sidecar
from exporters.catalogue.prometheus import SAMPLE_LIMIT, SCRAPE_SAMPLES_KEPT, UP

_OUR_RULES = ('rule_group=~".*;vllm-.*"',)  # the label is file;group
# a card that is gone has its own alert, and so has a state that cannot be written
_OTHERS = ('kind!~"gpu|checkpoint"',)

_REFUSED = ('reason!="contextCanceled"',)  # a reload cancels what is being sent, and sends it again


def alerts(s: Settings) -> tuple[Alert, ...]:
    five, ten, gateways = s.window("5m"), s.window("10m"), promql.series(UP, (s.gateway,))
    failed = self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED
    near, mine = s.at(thresholds.SCRAPE_NEAR_LIMIT), s.ours
    return (
        Alert(
            "VLLMGatewayDown",
            Severity.CRITICAL,
            f"group {by(JOB)} ({gateways}) unless group {by(JOB)} ({gateways} == 1)",
            hold="1m",
            summary="No gateway answers.",
            description=(
                "None of the gateways of job {{ $labels.job }} has answered for a minute: who comes through it is not"
                " served, however well the engines are."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMGatewayGone",
            Severity.CRITICAL,
            recorded.lost_jobs(s, s.gateway),
            hold="3m",
            summary="A scrape job of gateways has no target any more.",
            description=(
                "Job {{ $labels.job }} had a gateway within the last day, and service discovery has found none for"
                " three minutes: its pod may be evicted or pending, and nothing else about it can alert. If it was"
                " removed on purpose, silence this alert: it ends after a day."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMSidecarDown",
            Severity.WARNING,
            f"{promql.series(UP, (s.sidecar,))} == 0",
            hold="2m",
            summary="The sidecar exporter does not answer.",
            description=(
                "{{ $labels.instance }} does not answer: figures per team, from the request log and the GPU stand"
                " still. Serving goes on."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMSidecarGone",
            Severity.WARNING,
            recorded.lost_jobs(s, s.sidecar),
            hold="15m",
            summary="A scrape job of sidecars has no target any more.",
            description=(
                "Job {{ $labels.job }} had a sidecar within the last day, and service discovery has found none for a"
                " quarter of an hour: metrics per team, from the request log and the GPU stand still, and nothing else"
                " about it can alert. Serving goes on."
            ),
            panel=PanelRef("monitoring-health", "targets-up"),
        ),
        Alert(
            "VLLMSidecarSourceFailing",
            Severity.WARNING,
            f"{promql.current(sidecar.SOURCE_UP, (*TARGET, 'kind', 'source'), _OTHERS)} == 0",
            hold="5m",
            summary="The sidecar cannot read one of its sources.",
            description=(
                "The sidecar {{ $labels.instance }} cannot read its {{ $labels.kind }} {{ $labels.source }}: what it"
                " shows of it stands still."
            ),
            panel=PanelRef("monitoring-health", "sources-up"),
        ),
        Alert(
            "VLLMCheckpointFailing",
            Severity.WARNING,
            f"{promql.current(sidecar.CHECKPOINT_UP, TARGET)} == 0",
            hold="2m",
            summary="The sidecar cannot save what it counted.",
            description=(
                "The sidecar {{ $labels.instance }} cannot write its state: what it shows of the request log stands"
                " still until it can."
            ),
            panel=PanelRef("monitoring-health", "checkpoint"),
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMSpansDropped",
            Severity.WARNING,
            f"{promql.growth(sidecar.SPANS_DROPPED, five, (*TARGET, 'reason'))} > 0",
            hold="10m",
            summary="Spans of requests are lost.",
            description=(
                "The sidecar {{ $labels.instance }} has lost {{ $value | humanize }} spans within five minutes ({{"
                " $labels.reason }}): traces of these requests lack the gateway's part."
            ),
            panel=PanelRef("monitoring-health", "spans-dropped"),
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMRuleFailing",
            Severity.WARNING,
            f"{promql.growth(self_monitoring.RULE_FAILURES, five, (*TARGET, 'rule_group'), _OUR_RULES)} > 0",
            hold="5m",
            summary="A rule cannot be evaluated.",
            description=(
                "Evaluations of the group {{ $labels.rule_group }} fail at {{ $labels.instance }}: its alerts cannot"
                " fire."
            ),
            panel=PanelRef("monitoring-health", "rule-failures"),
            owner="platform",
        ),
        Alert(
            "VLLMScrapeNearLimit",
            Severity.WARNING,
            f"{promql.current(SCRAPE_SAMPLES_KEPT, TARGET, (mine,))} / ({promql.current(SAMPLE_LIMIT, TARGET, (mine,))}"
            f" > 0) > {near} or {promql.growth(self_monitoring.SCRAPES_OVER_LIMIT, five, TARGET)} > 0",
            hold="10m",
            summary="A page has nearly as many samples as its job lets in.",
            description=(
                "{{ $labels.instance }} of job {{ $labels.job }} shows nearly as many samples as sample_limit lets in;"
                " above it the whole page is thrown away. Where this is Prometheus itself, that has begun."
            ),
            panel=PanelRef("monitoring-health", "sample-limit"),
            owner="platform",
            threshold=near,
        ),
        Alert(
            "VLLMTeamLabelOverflow",
            Severity.WARNING,
            f"{promql.growth(sidecar.TEAMS_OVERFLOW, five, TARGET)} > 0",
            hold="10m",
            summary="There are more teams than have series of their own.",
            description=(
                "The sidecar {{ $labels.instance }} has counted {{ $value | humanize }} requests of teams beyond its"
                " limit within five minutes: they are under __other__, on every board and bill."
            ),
            panel=PanelRef("monitoring-health", "folded"),
            muted_by=("VLLMSidecarDown",),
        ),
        Alert(
            "VLLMAlertmanagerUnreachable",
            Severity.WARNING,
            f"{promql.current(self_monitoring.ALERTMANAGERS, TARGET)} < 1 "
            f"or {promql.growth(self_monitoring.NOTIFICATIONS_ERRORS, five, (*TARGET, 'alertmanager'))} > 0",
            hold="2m",
            summary="Prometheus cannot reach Alertmanager.",
            description=(
                "Prometheus {{ $labels.instance }} cannot hand its alerts to Alertmanager: they fire, and nobody is"
                " told."
            ),
            panel=PanelRef("monitoring-health", "alertmanagers"),
            owner="platform",
        ),
        Alert(
            "VLLMNotificationsFailing",
            Severity.WARNING,
            f"{promql.growth(failed, ten, (*TARGET, 'integration'), _REFUSED)} > 0",
            hold="1m",
            summary="Alertmanager cannot deliver notifications.",
            description=(
                "Alertmanager {{ $labels.instance }} failed to deliver {{ $value | humanize }} notifications by {{"
                " $labels.integration }} within ten minutes: alerts fire, and who should act on them does not hear"
                " of it."
            ),
            panel=PanelRef("monitoring-health", "alertmanager-notifications"),
            owner="platform",
        ),
        Alert(
            "VLLMWatchdog",
            Severity.INFO,
            "vector(1) > 0",
            hold="0s",
            summary="Alerting works from end to end.",
            description=(
                "This alert always fires. When it stops arriving, Prometheus, Alertmanager or the way to you is broken."
            ),
            panel=PanelRef("overview", "firing-alerts"),
            owner="platform",
            always=True,
            muted_by=("VLLMNotificationsFailing",),
        ),
    )
