"""The monitoring mixin: dashboards, alerts and recording rules for those who build with jsonnet.

Invariant: with the default `_config` the mixin evaluates to the generated files that it imports; each field of
`_config` changes what the option of the same meaning changes in `dashboards export` and `alerts export`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from alerts import printer
from alerts.rules import Links
from alerts.settings import DEFAULTS, Settings

HEADER = "# Printed by `vllm-watch render` from dashboards/mixin.py. Change the source, print again, commit both.\n"
_TEXT = """{
  local mixin = self,
  local config = mixin._config,

  _config+:: {
    // Base URL of the runbooks.
    runbookBase: %(runbooks)s,
    // Base URL of Grafana, for dashboard_url of alerts.
    dashboardBase: %(dashboards)s,
    // Name and uid of the Prometheus data source that dashboards open with; null: Grafana's default.
    datasource: null,
    // Tags added to each dashboard.
    tags: [],
    // Labels added to each alert.
    alertLabels: {},
  },

  local rebased(text, default, base) =
    if std.startsWith(text, default)
    then std.rstripChars(base, '/') + std.substr(text, std.length(default), std.length(text))
    else text,

  local linked(value) =
    if std.isString(value) then rebased(value, %(runbooks)s, config.runbookBase)
    else if std.isArray(value) then std.map(linked, value)
    else if std.isObject(value) then std.mapWithKey(function(_, field) linked(field), value)
    else value,

  local opened(variable) =
    if variable.type != 'datasource' || config.datasource == null then variable
    else variable { current: { text: config.datasource.name, value: config.datasource.uid, selected: true } },

  local dashboard(board) =
    (if config.runbookBase == %(runbooks)s then board else linked(board)) {
      tags+: config.tags,
      templating+: { list: std.map(opened, super.list) },
    },

  local alert(rule) = rule {
    labels+: config.alertLabels,
    annotations+: {
      runbook_url: rebased(super.runbook_url, %(runbooks)s, config.runbookBase),
      dashboard_url: rebased(super.dashboard_url, %(dashboards)s, config.dashboardBase),
    },
  },

  local rules = import 'rules.libsonnet',
  local alerts = [group { rules: std.map(alert, super.rules) } for group in rules.alerts],

  grafanaDashboards+:: {
%(imported)s
  },
  prometheusAlerts+:: { groups+: alerts },
  prometheusRules+:: { groups+: rules.recorded },
}
"""


def text(slugs: Iterable[str], boards: str, links: Links, header: str = HEADER) -> str:
    """Return mixin.libsonnet. boards: folder of the dashboards' JSON, relative to it. links: those in the files."""
    imported = "\n".join(f"    '{slug}.json': dashboard(import '{boards}/{slug}.json')," for slug in slugs)
    return header + _TEXT % {
        "runbooks": json.dumps(links.runbooks.rstrip("/")),
        "dashboards": json.dumps((links.dashboards or "").rstrip("/")),
        "imported": imported,
    }


def rules(links: Links, settings: Settings = DEFAULTS, header: str = HEADER) -> str:
    """Return rules.libsonnet: the groups of all rule files. As JSON, since jsonnet 0.18 misreads YAML's text blocks."""
    files = {name: yaml.safe_load(file)["groups"] for name, file in printer.rule_files(links, settings, header="")}
    alerts: list[Any] = [group for name in printer.FILES.values() for group in files[name]]
    return (
        header
        + json.dumps({"alerts": alerts, "recorded": files["recording.yaml"]}, indent=1, ensure_ascii=False)
        + "\n"
    )


def folder(boards: Mapping[str, str], links: Links, settings: Settings, header: str) -> dict[str, str]:
    """Return the files of a mixin that needs nothing else: name and text. boards: JSON by slug."""
    files = {f"dashboards/{slug}.json": board for slug, board in boards.items()}
    return files | {
        "mixin.libsonnet": text(boards, "dashboards", links, header),
        "rules.libsonnet": rules(links, settings, header),
    }
