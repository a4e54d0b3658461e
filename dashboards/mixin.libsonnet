# Printed by `vllm-watch render` from dashboards/mixin.py. Change the source, print again, commit both.
{
  local mixin = self,
  local config = mixin._config,

  _config+:: {
    // Base URL of the runbooks.
    runbookBase: "http://127.0.0.1:9402/runbooks",
    // Base URL of Grafana, for dashboard_url of alerts.
    dashboardBase: "http://127.0.0.1:3000",
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
    if std.isString(value) then rebased(value, "http://127.0.0.1:9402/runbooks", config.runbookBase)
    else if std.isArray(value) then std.map(linked, value)
    else if std.isObject(value) then std.mapWithKey(function(_, field) linked(field), value)
    else value,

  local opened(variable) =
    if variable.type != 'datasource' || config.datasource == null then variable
    else variable { current: { text: config.datasource.name, value: config.datasource.uid, selected: true } },

  local dashboard(board) =
    (if config.runbookBase == "http://127.0.0.1:9402/runbooks" then board else linked(board)) {
      tags+: config.tags,
      templating+: { list: std.map(opened, super.list) },
    },

  local alert(rule) = rule {
    labels+: config.alertLabels,
    annotations+: {
      runbook_url: rebased(super.runbook_url, "http://127.0.0.1:9402/runbooks", config.runbookBase),
      dashboard_url: rebased(super.dashboard_url, "http://127.0.0.1:3000", config.dashboardBase),
    },
  },

  local rules = import 'rules.libsonnet',
  local alerts = [group { rules: std.map(alert, super.rules) } for group in rules.alerts],

  grafanaDashboards+:: {
    'overview.json': dashboard(import 'json/overview.json'),
    'latency.json': dashboard(import 'json/latency.json'),
    'kv-cache.json': dashboard(import 'json/kv-cache.json'),
    'tuning-options.json': dashboard(import 'json/tuning-options.json'),
    'prefill-decode.json': dashboard(import 'json/prefill-decode.json'),
    'teams.json': dashboard(import 'json/teams.json'),
    'cost.json': dashboard(import 'json/cost.json'),
    'gateway.json': dashboard(import 'json/gateway.json'),
    'gpu.json': dashboard(import 'json/gpu.json'),
    'tuning.json': dashboard(import 'json/tuning.json'),
    'fleet.json': dashboard(import 'json/fleet.json'),
    'fleet-weeks.json': dashboard(import 'json/fleet-weeks.json'),
    'monitoring-health.json': dashboard(import 'json/monitoring-health.json'),
  },
  prometheusAlerts+:: { groups+: alerts },
  prometheusRules+:: { groups+: rules.recorded },
}
