"""Alerts and recording rules as values.

Invariant: an Alert without a subject in its texts, or with a malformed duration, cannot be constructed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from alerts.panel_ref import PanelRef
from alerts.settings import Settings
from alerts.thresholds import Threshold
from exporters.catalogue import promql_ast

_ALERT = re.compile(r"VLLM[A-Z][A-Za-z]*")
_RECORD = re.compile(r"[a-z_]+:[a-z_0-9]+:[a-z0-9_]+")
_DURATION = re.compile(r"\d+(s|m|h|d)")
_LABEL_VALUE = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_OPTIONAL_LABEL = re.compile(r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}")
SUMMARY_LENGTH, DESCRIPTION_LENGTH = 120, 400  # characters of the template: a chat line, and a screen of a phone


class Severity(StrEnum):
    """Urgency of an alert, by what its reader does."""

    CRITICAL = "critical"  # gets up at night
    WARNING = "warning"  # finds it in the ticket queue by day
    INFO = "info"  # reads it beside something else; no notification


@dataclass(frozen=True, slots=True)
class Links:
    """Base addresses of runbooks and dashboards; without dashboards alerts have no link to one. The default is this
    machine, as in compose and the lab."""

    runbooks: str = "http://127.0.0.1:9402/runbooks"
    dashboards: str | None = "http://127.0.0.1:3000"

    def runbook(self, alert: str) -> str:
        return f"{self.runbooks.rstrip('/')}/{alert}"


# Query string of a runbook link: the page opens filled with the labels of the alert, and evaluated. Prometheus renders
# it with Go's text/template, whose urlquery escapes the values and whose range sorts the names.
LABELS_QUERY = (
    '?live=1{{ range $name, $value := $labels }}{{ if ne $name "__name__" }}&{{ $name }}={{ $value | urlquery }}'
    "{{ end }}{{ end }}"
)


@dataclass(frozen=True, slots=True)
class Alert:
    """Alerting rule.

    summary: title of at most 120 characters: subject, symptom, labels. description: at most 400 characters: value,
    window and first action. hold, keep_firing: durations such as 5m.
    threshold: the value that `expr` compares with. drawn: its panel shows the same quantity, so it draws the line.
    muted_by: alerts that explain this one; while one of them fires for the same labels, Alertmanager inhibits this one.
    always: fires at all times; its absence is the signal.
    Raises ValueError for a name, text or duration that would not work in a notification."""

    name: str
    severity: Severity
    expr: str
    hold: str  # Prometheus calls it `for`
    summary: str
    description: str
    panel: PanelRef
    owner: str = "serving"
    threshold: Threshold | None = None
    drawn: bool = True
    keep_firing: str | None = None
    muted_by: tuple[str, ...] = ()
    always: bool = False

    def __post_init__(self) -> None:
        if not _ALERT.fullmatch(self.name) or len(self.name) > 40:
            raise ValueError(f"{self.name!r}: an alert must be named VLLMSomething, with at most 40 letters")
        for text, longest in ((self.summary, SUMMARY_LENGTH), (self.description, DESCRIPTION_LENGTH)):
            if len(text) > longest:
                raise ValueError(f"{self.name}: {text!r} has {len(text)} characters; at most {longest}")
        if not self.always and "$labels." not in self.summary:
            raise ValueError(f"{self.name}: the summary must name its subject by a label: {{{{ $labels.instance }}}}")
        if not self.always and "$labels." not in self.description:
            raise ValueError(f"{self.name}: the description must name its subject by a label")
        if self.always and self.severity is not Severity.INFO:
            raise ValueError(f"{self.name}: an alert that always fires must not be {self.severity}")
        for duration in filter(None, (self.hold, self.keep_firing)):
            if not _DURATION.fullmatch(duration):
                raise ValueError(f"{self.name}: {duration!r} is not a duration such as 5m")

    @property
    def title(self) -> str:
        """Return the summary with label names in place of values, for lists and pages: `vLLM hung: {model_name}`."""
        text = _OPTIONAL_LABEL.sub(lambda found: found[2].replace("{{ . }}", f"{{{found[1]}}}"), self.summary)
        return _LABEL_VALUE.sub(r"{\1}", text)

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels for routing and inhibition. The watchdog has severity `none`, as in kube-prometheus-stack,
        whose InfoInhibitor would inhibit `info`."""
        return {"severity": "none" if self.always else str(self.severity), "owner": self.owner}

    def paced(self, settings: Settings) -> Alert:
        """Return the alert with its hold times divided by the pace of a drill."""
        keep = settings.window(self.keep_firing) if self.keep_firing else None
        return replace(self, hold=settings.window(self.hold), keep_firing=keep)

    def as_rule(self, links: Links) -> dict[str, Any]:
        """Return the rule in the format of Prometheus."""
        rule: dict[str, Any] = {"alert": self.name, "expr": promql_ast.pretty(self.expr), "for": self.hold}
        if self.keep_firing:
            rule["keep_firing_for"] = self.keep_firing
        rule["labels"] = self.labels
        rule["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{links.runbook(self.name)}{LABELS_QUERY}",
        }
        if links.dashboards:
            rule["annotations"]["dashboard_url"] = self.panel.url(links.dashboards)
        return rule


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording rule. record: level:metric:operations, with the window in the last part. meaning: what a sample of it
    holds, for the reference.

    Raises ValueError for another form of name, or for an empty meaning."""

    record: str
    expr: str
    meaning: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _RECORD.fullmatch(self.record):
            raise ValueError(f"{self.record!r}: a recorded series must be named level:metric:operations")
        if not self.meaning:
            raise ValueError(f"{self.record}: say what it holds")

    def as_rule(self) -> dict[str, Any]:
        return {"record": self.record, "expr": promql_ast.pretty(self.expr)} | (
            {"labels": dict(self.labels)} if self.labels else {}
        )
