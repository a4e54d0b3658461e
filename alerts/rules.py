"""Alerts and recording rules as values. What an alert must have, it cannot be made without."""

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


class Severity(StrEnum):
    """What the reader does."""

    CRITICAL = "critical"  # gets up
    WARNING = "warning"  # finds it in the ticket queue
    INFO = "info"  # reads it beside something else; routed to no one


@dataclass(frozen=True, slots=True)
class Links:
    """Where pages and panels are served; no dashboards, no link to one. The default is this machine, as in compose and
    the lab."""

    runbooks: str = "http://127.0.0.1:9402/runbooks"
    dashboards: str | None = "http://127.0.0.1:3000"

    def runbook(self, alert: str) -> str:
        return f"{self.runbooks.rstrip('/')}/{alert}"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. summary is static, description names this instance by its labels.

    threshold: the number it compares with; drawn: whether its panel shows the same quantity, so that the line belongs
    there.
    muted_by: alerts that say more about the same thing; while one of them fires for the same labels, Alertmanager keeps
    this one back.
    always: it fires at all times, and its silence is what tells.
    Raises ValueError for what would not work at night."""

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
            raise ValueError(f"{self.name!r}: an alert is called VLLMSomething, in at most 40 letters")
        if "{{" in self.summary or not self.summary.endswith("."):
            raise ValueError(f"{self.name}: the summary is one fixed sentence, so that alerts group under it")
        if "{{" not in self.description and self.severity is not Severity.INFO:
            raise ValueError(f"{self.name}: the description names the instance by a label")
        if self.always and self.severity is not Severity.INFO:
            raise ValueError(f"{self.name}: what always fires must not be {self.severity}")
        for duration in filter(None, (self.hold, self.keep_firing)):
            if not _DURATION.fullmatch(duration):
                raise ValueError(f"{self.name}: {duration!r} is no duration such as 5m")

    @property
    def labels(self) -> dict[str, str]:
        """What routing and muting go by. What always fires must not be muted, and kube-prometheus-stack mutes all that
        says `info` by its InfoInhibitor; so its label is `none`, as on the Watchdog there."""
        return {"severity": "none" if self.always else str(self.severity), "owner": self.owner}

    def paced(self, settings: Settings) -> Alert:
        """The same with its waiting times at the pace of a drill."""
        keep = settings.window(self.keep_firing) if self.keep_firing else None
        return replace(self, hold=settings.window(self.hold), keep_firing=keep)

    def as_rule(self, links: Links) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        rule: dict[str, Any] = {"alert": self.name, "expr": promql_ast.pretty(self.expr), "for": self.hold}
        if self.keep_firing:
            rule["keep_firing_for"] = self.keep_firing
        rule["labels"] = self.labels
        rule["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": links.runbook(self.name),
        }
        if links.dashboards:
            rule["annotations"]["dashboard_url"] = self.panel.url(links.dashboards)
        return rule


@dataclass(frozen=True, slots=True)
class Recording:
    """A series computed ahead. record: level:metric:operations, with the window in the last part. meaning: what a
    sample of it holds, for docs/alerts.md.

    Raises ValueError for another name, or for none of a meaning."""

    record: str
    expr: str
    meaning: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _RECORD.fullmatch(self.record):
            raise ValueError(f"{self.record!r}: a recorded series is called level:metric:operations")
        if not self.meaning:
            raise ValueError(f"{self.record}: say what it holds")

    def as_rule(self) -> dict[str, Any]:
        return {"record": self.record, "expr": promql_ast.pretty(self.expr)} | (
            {"labels": dict(self.labels)} if self.labels else {}
        )
