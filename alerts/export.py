"""Export of alerts for an existing Prometheus and Alertmanager, with own thresholds, links and objectives.

In an exported folder *.yaml are rule files, and *.yml are for Alertmanager and for the next export."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from alerts import managed_files, printer, registry, routing, slo, thresholds
from alerts.managed_files import marked, unmarked
from alerts.printer import RuleGroup
from alerts.rules import Links, Recording
from alerts.settings import DEFAULTS, Overrides, Settings
from alerts.slo import Objectives
from alerts.thresholds import Threshold
from exporters import config
from exporters.catalogue import promql_ast
from exporters.catalogue.exposition_parser import Exposition

SHIPPED_OBJECTIVES = slo.SHIPPED_FILE
_COMMAND = "vllm-watch alerts export"
_SLO_COMMAND = "vllm-watch alerts slo"
_NUMBERS = """\
# Every number as these rules have it. For numbers of your own write the same with only the lines that differ, or change
# this file, and export again with --thresholds. Jobs are regular expressions that match the whole name of a scrape job.
"""


@dataclass(frozen=True, slots=True)
class AlertOptions:
    """Options of an export. thresholds, slo: files of the deployment, None for the defaults; reading them raises
    BadConfig for a mistake. secrets: folder from which Alertmanager reads secrets."""

    thresholds: Path | None = None
    slo: Path | None = None
    links: Links = field(default_factory=Links)
    receiver: str = "none"
    secrets: str = routing.SECRETS
    deadman: bool = False

    @property
    def settings(self) -> Settings:
        return Settings(config.load(self.thresholds, Overrides)) if self.thresholds else DEFAULTS

    @property
    def objectives(self) -> Objectives | None:
        return objectives(self.slo) if self.slo else None


def objectives(path: Path) -> Objectives:
    """A deployment's own objectives. Raises BadConfig."""
    return config.load(path, Objectives)


def links(runbooks: str | None, dashboards: str | None) -> Links:
    """Return the base addresses of runbooks and dashboards. Raises ValueError for text that is not a web address."""
    given = {name: _address(url) for name, url in (("runbooks", runbooks), ("dashboards", dashboards)) if url}
    return Links(**given)


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c in url for c in " \"'{}"):
        raise ValueError(f"{url} is no web address; write it like https://wiki.example.org/runbooks")
    return url


def warnings(where: Links) -> Iterator[str]:
    """Yield a warning for each base address that works on this machine only."""
    for what, url, option in (
        ("runbook", where.runbooks, "--runbook-base"),
        ("dashboard", where.dashboards, "--dashboard-base"),
    ):
        if url and is_loopback(url):
            yield (
                f"{what} links lead to {url}, which is right on that machine alone: give {option} URL for everybody"
                " else"
            )


def is_loopback(url: str) -> bool:
    """Return whether an address leads to the machine of the user who opens it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


# ---- files


def files(wanted: AlertOptions) -> dict[str, str]:
    """Return name and text of every exported file."""
    settings, promised = wanted.settings, wanted.objectives
    alertmanager = routing.configuration(
        wanted.receiver, settings, promised, secrets=wanted.secrets, deadman=wanted.deadman, header=""
    )
    rest = {
        "alertmanager.yml": alertmanager.lstrip(), "thresholds.yml": numbers(settings),
        "objectives.yml": unmarked((wanted.slo or SHIPPED_OBJECTIVES).read_text(encoding="utf-8")),
    }  # fmt: skip
    rules = dict(printer.rule_files(wanted.links, settings, promised, header=""))
    return {name: marked(text, _COMMAND) for name, text in (rules | rest).items()}


def write(folder: Path, wanted: AlertOptions, force: bool = False) -> tuple[dict[Path, bool], list[Path]]:
    """Export; whether each file changed, and rule files of an earlier export. A file that was read from there stays as
    it is.

    Raises NotOurs before anything is written, and OSError."""
    read = {path.resolve() for path in (wanted.thresholds, wanted.slo) if path}
    printed = {name: text for name, text in files(wanted).items() if (folder / name).resolve() not in read}
    return managed_files.write(folder, printed, foreign, force), managed_files.left_over(
        folder, printed, foreign, "*.yaml"
    )


def foreign(path: Path) -> str:
    """Return why a file is not ours, and whether it must be named as an option."""
    why, option = (
        managed_files.changed_since(path),
        {"thresholds.yml": "--thresholds", "objectives.yml": "--slo"}.get(path.name),
    )
    return f"{why} (to use it, give {option} {path})" if why and option else why


def numbers(settings: Settings) -> str:
    """thresholds.yml with everything in it: what --thresholds reads."""
    lines = [f"  {used.name}: {used}  # {_shown(used)}" for used in map(settings.at, thresholds.ALL)]
    overlay = settings.overlay
    jobs = [f"{job}: {json.dumps(getattr(overlay, job))}" for job in ("engine_job", "gateway_job", "sidecar_job")]
    return _NUMBERS + "\n".join(["thresholds:", *lines, *jobs]) + "\n"


def _shown(used: Threshold) -> str:
    default = thresholds.named(used.name)
    return used.shown + (f"; default: {default}" if default.value != used.value else "")


def next_steps(folder: Path, wanted: AlertOptions) -> Iterator[str]:
    """Yield the next steps after an export, one command or sentence each."""
    jobs = wanted.settings.overlay
    yield f"promtool check rules {folder}/*.yaml && amtool check-config {folder}/alertmanager.yml"
    yield f"in prometheus.yml: rule_files: [{folder.resolve()}/*.yaml]; then reload it (SIGHUP, or POST /-/reload)"
    yield (
        f"name scrape jobs so that they match: engines {jobs.engine_job}, gateways {jobs.gateway_job}, sidecars"
        f" {jobs.sidecar_job}; or set engine_job, gateway_job and sidecar_job in a file for --thresholds"
    )
    if wanted.receiver == "none":
        yield (
            "alertmanager.yml notifies nobody yet: --receiver webhook, slack, pagerduty or email; or take its route and"
            " inhibit_rules into your own"
        )
    if wanted.receiver == "email":
        yield (
            "replace the addresses at example.org in alertmanager.yml; an export does not overwrite it then, unless"
            " forced"
        )
    for path, what in routing.secret_files(wanted.receiver, wanted.secrets, wanted.deadman).items():
        yield f"{path} must hold {what}, readable by Alertmanager's user"


# ---- the list


def rows(settings: Settings = DEFAULTS) -> Iterator[dict[str, Any]]:
    """Yield a row for each alert."""
    own = {threshold.name for threshold in thresholds.ALL}
    for alert in registry.alerts(settings):
        yield {
            "name": alert.name,
            "severity": alert.labels["severity"],
            "for": alert.hold,
            "summary": alert.title,
            "panel": f"{alert.panel.board}/{alert.panel.panel}",
            "threshold": _row(alert.threshold, own) if alert.threshold else None,
            "muted_by": list(alert.muted_by),
        }


def number_rows(settings: Settings = DEFAULTS) -> Iterator[dict[str, Any]]:
    """Yield a row for each threshold that a deployment may set."""
    yield from ({**_row(used, {used.name}), "why": used.why} for used in map(settings.at, thresholds.ALL))


def _row(used: Threshold, own: set[str]) -> dict[str, Any]:
    """Return a threshold as a row. set_in: the file in which a deployment overrides it."""
    default = thresholds.named(used.name).value if used.name in own else used.value
    set_in = "thresholds" if used.name in own else "objectives"
    return {
        "name": used.name,
        "value": used.value,
        "unit": str(used.unit),
        "shown": used.shown,
        "default": default,
        "set_in": set_in,
    }


# ---- objectives


def misses(file: Objectives, page: Exposition, place: str) -> Iterator[str]:
    """Yield a sentence for each latency objective whose bound is no bucket bound of this /metrics exposition."""
    for objective in file.objectives:
        if objective.within_s is None:
            continue
        alone = msgspec.structs.replace(file, objectives=(objective,))
        asked = {
            name
            for recording in _rests_on(alone)
            for name in promql_ast.names(recording.expr)
            if name.endswith("_bucket")
        }
        bounds = sorted({float(labels["le"]) for name in asked for labels, _ in page.of(name) if "le" in labels})
        if not bounds:
            yield f"{objective.name}: {place} has no {' or '.join(sorted(asked))}; is it the page of a vLLM engine?"
        elif objective.within_s not in bounds:
            below, above = (
                max((b for b in bounds if b < objective.within_s), default=None),
                min(b for b in bounds if b > objective.within_s),
            )
            near = " and ".join(f"{bound:g}" for bound in (below, above) if bound is not None and bound != float("inf"))
            yield (
                f"{objective.name}: within_s {objective.within_s:g} is no bucket bound of {place}: nothing would be"
                f" counted; the nearest are {near}"
            )


def slo_groups(file: Objectives, where: Links) -> list[RuleGroup]:
    """Return rule groups with the alerts of these objectives and all recording rules that they need."""
    asked = slo.alerts(file, DEFAULTS)
    recorded = printer.recorded_groups(DEFAULTS, file, {recording.record for recording in _rests_on(file)})
    return [*recorded, RuleGroup("vllm-slo-alerts", [alert.as_rule(where) for alert in asked])]


def _rests_on(file: Objectives) -> list[Recording]:
    """Return the recording rules that the alerts need, directly or through others, in order of evaluation."""
    known = {recording.record: recording for recording in registry.recordings(DEFAULTS, file)}
    found: set[str] = set()
    todo = [alert.expr for alert in slo.alerts(file, DEFAULTS)]
    while todo:
        new = (promql_ast.names(todo.pop()) & known.keys()) - found
        found |= new
        todo += [known[name].expr for name in new]
    return [recording for name, recording in known.items() if name in found]


def slo_file(groups: list[RuleGroup]) -> dict[str, str]:
    """Return these groups as one rule file."""
    return {"slo.yaml": marked(printer.rule_file("", groups), _SLO_COMMAND)}


def without_page(file: Objectives | None) -> Iterator[str]:
    """Yield a sentence for each alert of a non-default objective: it has no runbook of ours."""
    known = {alert.name for alert in registry.ALERTS}
    for alert in slo.alerts(file, DEFAULTS) if file else ():
        if alert.name not in known:
            yield f"{alert.name} has no runbook page of ours: write one where its link leads"
