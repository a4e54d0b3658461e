"""Alertmanager configuration, generated: routes, receivers, inhibition, notification texts.

Invariants of inhibition (`inhibitions` raises for a violation):
- The source is at least as severe as the target. A ticket never inhibits a page.
- Both have the same subject. Every label that names the subject of the source is on the target, and `equal` holds
  exactly those: the target is about the same thing or a part of it, and an alert about another model, job or GPU
  differs in one of them. An engine job that is down therefore inhibits the symptoms of its own engines, and no
  objective: those have the model but not the job, and the only label in common, the cluster, would inhibit the pages
  of every other model in it.
- Alertmanager treats a label that both alerts lack as equal. That is intended for cluster and namespace, which many
  deployments do not have; the other labels of the subject must not be empty on the source.
Two exceptions. Reconciliation, for tickets only: while part of the log or of the engines of a cluster is not counted,
a difference between the two means nothing for any of its models. And the watchdog: it is inhibited while notifications
fail, so that the service that expects it alerts by a channel of its own. Not for webhooks, since its own receiver is
one: inhibited, it could not show that its receiver works again."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import yaml

from alerts import registry, slo
from alerts.labels import PLACE, TARGET, TARGET_POD
from alerts.rules import Alert, Recording, Severity
from alerts.settings import DEFAULTS, Settings
from exporters.catalogue import EVERYTHING, promql_ast

WATCHDOG, FAILING = "VLLMWatchdog", "VLLMNotificationsFailing"
RECONCILIATION = ("VLLMEngineExceedsLog", "VLLMLogExceedsEngine")
PAGE, TICKET, NOBODY, DEADMAN = "page", "ticket", "nobody", "deadman"  # receivers
SECRETS = "/run/secrets"
_GPU = ("uuid",)  # globally unique, whichever exporter reports it
_ORDER = (*TARGET, "model_name", "uuid")
_RANK = list(Severity)  # the most severe first
_LABELS = {sample: frozenset(metric.labels) | set(TARGET_POD) for metric in EVERYTHING for sample in metric.samples}

_HEADER = "# Printed by `vllm-watch render` from alerts/routing.py. For a file of your own: vllm-watch alerts export.\n"
_ROUTES = """
# Pages wait 10 s, so that alerts with one cause arrive together, and repeat every hour. Tickets wait a minute, in which
# a page may inhibit them, and repeat every 12 h. An alert with an unknown severity becomes a ticket. Severity info goes
# to nobody: it is read beside something else. The watchdog always fires; `deadman` is for a service that expects it
# and alerts you when it no longer arrives. Failing notifications are sent to the receivers of pages and of tickets,
# because one of them may be the one that fails.
"""
_MUTES = """
# While the source fires, targets with the same values of all labels in `equal` are inhibited; a label that both lack
# counts as the same.
"""
_WHY = {
    "job": "Nothing of this job answers: the last values of its members are stale.",
    "instance": "The same process: the source is the cause.",
    "model_name": "The same model: the source is more specific or more urgent.",
    "uuid": "The same GPU.",
    "cluster": "The log or the engines of this cluster are not fully counted, so their difference means nothing yet.",
}
_WHY_SILENT = "Notifications fail: the service that expects the watchdog alerts instead, by another channel."

_TITLE = (
    '{{ if eq .Status "resolved" }}resolved{{ else }}{{ .CommonLabels.severity }}{{ end }}'
    ": {{ .CommonLabels.alertname }}"
    "{{ with .CommonLabels.model_name }}, {{ . }}{{ end }}{{ with .CommonLabels.instance }}, {{ . }}{{ end }}"
)
# Annotations of several alerts differ by their labels, so each alert of the group is listed with its own. A list and
# then a line `Dashboard: ...` is no YAML, so Alertmanager leaves it a string in PagerDuty's details.
_TEXT = """\
{{ range .Alerts }}- {{ if eq .Status "resolved" }}resolved: {{ end }}{{ .Annotations.summary }}
  {{ .Annotations.description }}
  {{ .Annotations.runbook_url }}
{{ end }}Dashboard: {{ (index .Alerts 0).Annotations.dashboard_url }}
"""
# Link of a notification as a whole: the runbook of its first alert.
_FIRST = "{{ (index .Alerts 0).Annotations.%s_url }}"


@dataclass(frozen=True, slots=True)
class Receiver:
    """Kind of notification. secret: content of its files; make: path of the secret -> integration of Alertmanager."""

    secret: str
    make: Callable[[str], dict[str, Any]]


def _webhook(file: str) -> dict[str, Any]:
    return {"webhook_configs": [{"url_file": file}]}


def _slack(file: str) -> dict[str, Any]:
    shown = {"title": _TITLE, "title_link": _FIRST % "runbook", "text": _TEXT}
    return {"slack_configs": [{"api_url_file": file, "send_resolved": True, **shown}]}


def _pagerduty(file: str) -> dict[str, Any]:
    links = [{"href": _FIRST % name, "text": name} for name in ("runbook", "dashboard")]
    shown = {
        "description": _TITLE,
        "severity": '{{ or .CommonLabels.severity "error" }}',
        "links": links,
        "details": {"message": _TEXT},
    }
    return {"pagerduty_configs": [{"routing_key_file": file, **shown}]}


def _email(file: str) -> dict[str, Any]:
    account = {
        "smarthost": "smtp.example.org:587",
        "auth_username": "vllm-watch@example.org",
        "auth_password_file": file,
    }
    shown = {"headers": {"Subject": _TITLE}, "html": "", "text": _TEXT}
    return {
        "email_configs": [
            {"to": "oncall@example.org", "from": "vllm-watch@example.org", **account, "send_resolved": True, **shown}
        ]
    }


_ADDRESS = "the address to post to (Alertmanager 0.28 or later)"  # earlier releases reject url_file
RECEIVERS: Mapping[str, Receiver | None] = {
    "none": None,
    "webhook": Receiver(_ADDRESS, _webhook),
    "slack": Receiver("the URL of an incoming webhook", _slack),
    "pagerduty": Receiver("the integration key of a service (Events API v2)", _pagerduty),
    "email": Receiver("the password of auth_username", _email),
}


def printed_files() -> Iterator[tuple[str, str]]:
    """Yield name and text of the default configurations: one without notifications, and one for each receiver."""
    for receiver in RECEIVERS:
        yield "alertmanager.yml" if receiver == "none" else f"{receiver}.yml", configuration(receiver)


def configuration(
    receiver: str = "none",
    settings: Settings = DEFAULTS,
    objectives: slo.Objectives | None = None,
    *,
    secrets: str = SECRETS,
    deadman: bool = False,
    header: str = _HEADER,
) -> str:
    """Return a complete configuration. Configurations for two receivers differ in their receivers only."""
    rules = inhibitions(registry.alerts(settings, objectives), registry.recordings(settings, objectives))
    muting = "".join(f"  # {_why(rule)}\n{textwrap.indent(_yaml([rule]), '  ')}" for rule in rules)
    receivers = _yaml({"receivers": list(receivers_of(receiver, secrets, deadman))})
    about = _about(receiver, secrets, deadman)
    return f"{header}{_ROUTES}{_yaml({'route': route()})}{_MUTES}inhibit_rules:\n{muting}\n{about}{receivers}"


def _why(rule: Mapping[str, Any]) -> str:
    return _WHY_SILENT if WATCHDOG in rule["target_matchers"][0] else _WHY[rule["equal"][-1]]


def route() -> dict[str, Any]:
    """Return the route of all alerts, in the format of Alertmanager."""
    return {
        "receiver": TICKET,
        "group_by": ["alertname", "cluster", "model_name", "instance"],
        "group_wait": "1m",
        "group_interval": "5m",
        "repeat_interval": "12h",
        "routes": [
            {
                "matchers": [f'alertname="{WATCHDOG}"'],
                "receiver": DEADMAN,
                "group_wait": "0s",
                "group_interval": "1m",
                "repeat_interval": "5m",
            },
            *(
                {
                    "matchers": [f'alertname="{FAILING}"'],
                    "receiver": name,
                    "group_wait": "10s",
                    "repeat_interval": "1h",
                    "continue": name == PAGE,
                }
                for name in (PAGE, TICKET)
            ),
            {"matchers": [f'severity="{Severity.INFO}"'], "receiver": NOBODY},
            {
                "matchers": [f'severity="{Severity.CRITICAL}"'],
                "receiver": PAGE,
                "group_wait": "10s",
                "repeat_interval": "1h",
            },
        ],
    }


def receivers_of(receiver: str, secrets: str = SECRETS, deadman: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the receivers that the route names, in the format of Alertmanager."""
    chosen = RECEIVERS[receiver]
    for name in (PAGE, TICKET):
        yield {"name": name} | (chosen.make(secret_file(name, secrets)) if chosen else {})
    yield {"name": DEADMAN} | (_webhook(secret_file(DEADMAN, secrets)) if deadman else {})
    yield {"name": NOBODY}


def secret_file(receiver: str, folder: str = SECRETS) -> str:
    return f"{folder.rstrip('/')}/alertmanager_{receiver}"


def secret_files(receiver: str, secrets: str = SECRETS, deadman: bool = False) -> dict[str, str]:
    """Return the paths that a configuration reads, each with the content that it needs."""
    chosen = RECEIVERS[receiver]
    files = {secret_file(name, secrets): chosen.secret for name in (PAGE, TICKET)} if chosen else {}
    return files | ({secret_file(DEADMAN, secrets): _ADDRESS} if deadman else {})


def _about(receiver: str, secrets: str, deadman: bool) -> str:
    files = secret_files(receiver, secrets, deadman)
    if not files:
        return "# An empty receiver sends nothing: alerts are only shown in Alertmanager's own interface.\n"
    return "# Secrets are read from files, each time they are needed:\n" + "".join(
        f"#   {path}: {what}\n" for path, what in files.items()
    )


# ---- inhibition


def inhibitions(alerts: Iterable[Alert], recordings: Iterable[Recording]) -> list[dict[str, Any]]:
    """Return Alertmanager's inhibit_rules, with sources of the same targets in one rule. Raises ValueError for a
    violated invariant."""
    by_name, recorded = (
        {alert.name: alert for alert in alerts},
        {recording.record: recording for recording in recordings},
    )
    targets: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for alert in by_name.values():
        for source in alert.muted_by:
            if source in by_name:  # a deployment's own objectives may lack it
                targets.setdefault((source, _equal(by_name[source], alert, recorded)), []).append(alert.name)
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (source, equal), names in targets.items():
        alike.setdefault((equal, tuple(names)), []).append(source)
    return [_rule(sources, equal, names) for (equal, names), sources in alike.items()]


def _rule(sources: Iterable[str], equal: Iterable[str], targets: Iterable[str]) -> dict[str, Any]:
    targets = list(targets)
    required = [f'{label}!=""' for label in equal if label not in PLACE] + (
        ['integration!="webhook"'] if targets == [WATCHDOG] else []
    )
    return {"source_matchers": [_named(sources), *required], "target_matchers": [_named(targets)], "equal": list(equal)}


def _named(names: Iterable[str]) -> str:
    return f'alertname=~"{"|".join(names)}"'


def _equal(source: Alert, target: Alert, recorded: Mapping[str, Recording]) -> tuple[str, ...]:
    """Return the labels in which both must agree. Raises ValueError if these would not make them one subject."""
    if _RANK.index(source.severity) > _RANK.index(target.severity):
        raise ValueError(f"{target.name} ({target.severity}) must not be muted by {source.name} ({source.severity})")
    about, available = subject(source, recorded), subject(target, recorded)
    if about and about <= available:
        return tuple(label for label in _ORDER if label in about)
    if (target.name in RECONCILIATION and target.severity is not Severity.CRITICAL) or (source.name, target.name) == (
        FAILING,
        WATCHDOG,
    ):
        return ("cluster",)
    missing = ", ".join(sorted(about - available)) or "any subject"
    raise ValueError(
        f"{target.name} must not be muted by {source.name}: nothing says that they are about the same, as it lacks"
        f" {missing}"
    )


def subject(alert: Alert, recorded: Mapping[str, Recording]) -> Set[str]:
    """Return the labels that name the subject of an alert, from its expression. A GPU is named by its uuid alone."""

    def of(sample: str) -> Set[str]:
        if sample in recorded:
            return promql_ast.labels(recorded[sample].expr, of)
        return _LABELS[sample] | ({"le"} if sample.endswith("_bucket") else set())

    if alert.owner == "hardware":
        return set(_GPU)
    return promql_ast.labels(alert.expr, of) & set(_ORDER)


# ---- text


class _Readable(yaml.SafeDumper):
    """YAML with literal blocks for text of several lines, lists of strings on one line, and other lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
_Readable.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=all(isinstance(item, str) for item in items)
    ),
)


def _yaml(content: object) -> str:
    return yaml.dump(content, Dumper=_Readable, sort_keys=False, width=1000, allow_unicode=True)
