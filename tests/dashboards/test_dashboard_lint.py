"""Every rule of the linter finds a board that breaks just that rule, and the boards that are shipped break none."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from alerts.registry import RECORDINGS
from dashboards import lint, lint_model, queries
from dashboards.grafana_json import to_json
from dashboards.lint import RULES
from dashboards.lint_exceptions import EXCEPTIONS
from dashboards.lint_model import AllowedFinding
from dashboards.model import RATE, Profile
from dashboards.registry import boards
from exporters.catalogue import promql, sidecar, vllm

PRINTED = Path(__file__).parents[2] / "dashboards/json"
SOURCE = vllm.NUM_REQUESTS_RUNNING.name
WHERE = queries.where(vllm.GENERATION_TOKENS)
TOKENS = promql.per_second(vllm.GENERATION_TOKENS, RATE, where=WHERE)
OURS = "/d/vllm-watch-small?${__url_time_range}&var-job=${job}"
CHAIN = ("cluster", "namespace", "job", "instance", "model_name")


def shipped():
    return [json.loads(path.read_text()) for path in sorted(PRINTED.glob("*.json"))]


def test_the_shipped_boards_break_no_rule_that_has_no_reason():
    assert [] == lint.lint(shipped())


def test_the_boards_for_an_engine_alone_break_none_either():
    """An exception may be needed by the full boards only."""
    alone = [json.loads(to_json(board, Profile.ENGINE)) for board in boards(Profile.ENGINE)]
    assert [] == [finding for finding in lint.lint(alone) if finding.rule != "unused-exception"]


# ---- a small board that is right


def variable(name, parents):
    narrowed = ", ".join(f'{parent}=~"${parent}"' for parent in parents)
    query = f"label_values({SOURCE}{{{narrowed}}}, {name})" if narrowed else f"label_values({SOURCE}, {name})"
    return {"name": name, "label": name, "type": "query", "datasource": lint_model.DATASOURCE,
        "query": {"query": query, "refId": name},
            "definition": query, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"value": ["$__all"]}}  # fmt: skip


def target(expr, legend="{{model_name}}", form="time_series", ref="A"):
    instant = form == "table"
    return {
        "refId": ref,
        "expr": expr,
        "legendFormat": legend,
        "datasource": lint_model.DATASOURCE,
        "format": form,
        "instant": instant,
        "range": not instant,
    }


def panel(number, kind, title, asked):
    defaults = {
        "unit": "s",
        "noValue": "Nothing yet.",
        "thresholds": {"steps": [{"color": "green", "value": None}, {"color": "#f00", "value": 1}]},
    }
    return {
        "id": number, "type": kind, "title": title, "description": "What it is.", "pluginVersion": "10.4.0",
        "datasource": lint_model.DATASOURCE,
        "gridPos": {"x": 8 * (number % 3), "y": 7 * (number // 3), "w": 8, "h": 7}, "targets": [asked],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "links": [{"title": "More", "url": OURS if number == 0 else "https://example.org/page"}],
    }  # fmt: skip


GOOD = {
    "uid": "vllm-watch-small", "title": "Small", "schemaVersion": 39, "tags": ["vllm-watch"], "editable": True,
    "refresh": "30s", "id": None,
    "links": [{"title": "All", "type": "dashboards", "tags": ["vllm-watch"], "keepTime": True, "includeVars": True}],
    "templating": {"list": [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
        *(variable(name, CHAIN[:at]) for at, name in enumerate(CHAIN)),
    ]},
    "annotations": {"list": [
        {"name": "Events", "datasource": lint_model.DATASOURCE, "expr": f"{promql.series(sidecar.EVENT_TIME)} * 1000",
                              "titleFormat": "{{kind}}"}]},
    "panels": [
        panel(0, "timeseries", "Tokens", target(TOKENS)) | {"id": 9},
        panel(1, "heatmap", "Time to first token",
            target(queries.heat(vllm.TIME_TO_FIRST_TOKEN).expr, "{{le}}", "heatmap")),
        panel(2, "timeseries", "Time to first token, p95", target(queries.p95(vllm.TIME_TO_FIRST_TOKEN).expr)),
        panel(3, "table", "Hits",
            target(queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES).expr, "hits", "table")),
    ],
}  # fmt: skip


def test_the_small_board_is_right():
    assert [] == lint.lint([GOOD], ())


def wrong(*where_and_value):
    """The small board with another value somewhere; where: keys and positions."""
    *where, last, value = where_and_value
    board = copy.deepcopy(GOOD)
    inside = board
    for key in where:
        inside = inside[key]
    inside[last] = value
    return board


def asks(expr, legend="{{model_name}}"):
    """The small board whose first panel asks something else."""
    return wrong("panels", 0, "targets", [target(expr, legend)])


def offers(query):
    """The small board whose choice of models comes from another query."""
    board = wrong("templating", "list", 5, "definition", query)
    board["templating"]["list"][5]["query"] = {"query": query, "refId": "x"}
    return board


def with_variable(**more):
    return wrong(
        "templating",
        "list",
        [*GOOD["templating"]["list"], {"name": "x", "label": "X", "type": "custom", "query": "a,b"} | more],
    )


def with_panels(*panels):
    return wrong("panels", [*GOOD["panels"], *panels])


def with_mark(**mark):
    return wrong(
        "annotations",
        "list",
        [*GOOD["annotations"]["list"], {"name": "More", "datasource": lint_model.DATASOURCE} | mark],
    )


def by_model(inner):
    return f"sum by (model_name) ({inner})"


def selector(sample, where=WHERE):
    return f"{sample}{{{', '.join(where)}}}"


DEFAULTS = ("panels", 0, "fieldConfig", "defaults")
BUCKET = selector(vllm.TIME_TO_FIRST_TOKEN.samples[0])
COUNTER = selector(vllm.GENERATION_TOKENS.name)
RUNNING = selector(vllm.NUM_REQUESTS_RUNNING.name)
USAGE = selector(vllm.KV_CACHE_USAGE.name)

CASES = [
    ("board-identity", wrong("panels", 0, "links", []) | {"uid": "vllm-overview"}),
    ("board-identity", wrong("panels", 0, "links", []) | {"uid": "x" * 41}),
    ("board-identity", wrong("title", "")),
    ("board-tags", wrong("tags", ["vllm"])),
    ("board-schema-version", wrong("schemaVersion", 42)),
    ("board-editable", wrong("editable", False)),
    ("board-refresh", wrong("refresh", "10s")),
    ("board-refresh", wrong("refresh", "often")),
    ("board-size", with_panels(
        *(panel(number, "timeseries", f"P{number}", target(TOKENS)) for number in range(10, 27)))),
    ("board-links", wrong("links", 0, "tags", [])),
    ("board-links", wrong("links", 0, "keepTime", False)),
    ("board-links", wrong("links", [{"title": "x", "type": "link", "url": "nowhere"}])),
    ("board-links", wrong("links", [{"title": "x", "type": "mail"}])),
    ("legacy-keys", wrong("__inputs", [])),
    ("legacy-keys", wrong("timepicker", {"time_options": []})),
    ("legacy-keys", wrong("panels", 0, "span", 4)),
    ("legacy-keys", wrong("panels", 1, "targets", 0, "intervalFactor", 2)),
    ("legacy-keys", wrong("templating", "list", 1, "useTags", False)),
    ("json-nulls", wrong(*DEFAULTS, "decimals", None)),
    ("panel-ids", wrong("panels", 1, "id", 2)),
    ("panel-ids", wrong("panels", 1, "id", 0)),
    ("panel-grid", wrong("panels", 1, "gridPos", "x", 7)),
    ("panel-grid", wrong("panels", 2, "gridPos", "w", 9)),
    ("panel-grid", with_panels(
        {"type": "row", "id": 50, "title": "open", "collapsed": False, "gridPos": {"x": 0, "y": 50, "w": 24, "h": 1},
                                "panels": [panel(51, "timeseries", "t", target(TOKENS))]})),
    ("template-datasource", wrong("templating", "list", 0, "label", "Source")),
    ("template-datasource", wrong("templating", "list", 0, "current", {"value": "edx8memhpd9tsa"})),
    ("template-choices", wrong("templating", "list", 5, "refresh", 1)),
    ("template-choices", wrong("templating", "list", 5, "allValue", "")),
    ("template-choices", wrong("templating", "list", 5, "datasource", {"type": "prometheus", "uid": "prometheus"})),
    ("template-choices", wrong("templating", "list", 5, "label", "")),
    ("template-label-values", offers("label_values(model_name)")),
    ("template-label-values", offers("label_values(some_other_exporter, model_name)")),
    ("template-label-values", offers(f"label_values({SOURCE}, model_name)")),
    ("template-label-values", offers(GOOD["templating"]["list"][5]["definition"].replace("model_name)", "team)"))),
    ("template-label-values", offers(GOOD["templating"]["list"][5]["definition"].replace("{", '{engine=~"$later", '))),
    ("template-label-values", offers("query_result(up)")),
    ("template-label-values", wrong("templating", "list", 5, "definition", "old")),
    ("template-unused", with_variable()),
    ("annotations", with_mark(name="Events", expr="ALERTS")),
    ("annotations", with_mark(expr=promql.series(sidecar.EVENT_TIME))),
    ("annotations", with_mark(target={"type": "tags", "tags": ["vllm", "tuning"]})),
    ("annotations", with_mark(expr="ALERTS", datasource={"type": "prometheus", "uid": "prometheus"})),
    ("panel-type", wrong("panels", 0, "type", "graph")),
    ("panel-type", wrong("panels", 0, "type", "someones-plugin-panel")),
    ("panel-type", wrong("panels", 1, "pluginVersion", "")),
    ("panel-title-description", wrong("panels", 0, "title", "")),
    ("panel-title-description", wrong("panels", 1, "description", "")),
    ("panel-unit", wrong(*DEFAULTS, "unit", "furlong")),
    ("panel-unit", wrong("panels", 1, "fieldConfig", "defaults", "unit", "")),
    ("panel-unit", wrong("panels", 3, "fieldConfig", "overrides",
        [{"matcher": {}, "properties": [{"id": "unit", "value": "percent"}]}])),
    ("panel-no-value", wrong(*DEFAULTS, "noValue", "")),
    ("panel-no-targets", wrong("panels", 1, "targets", [])),
    ("panel-no-targets", wrong("panels", 0, "targets", [target(TOKENS), target(TOKENS)])),
    ("panel-datasource", wrong("panels", 1, "datasource", {"type": "prometheus", "uid": "prometheus"})),
    ("panel-datasource", wrong("panels", 1, "targets", 0, "datasource", "${datasource}")),
    ("panel-format", wrong("panels", 3, "targets", 0, "format", "time_series")),
    ("panel-format", wrong("panels", 3, "targets", 0, "range", True)),
    ("panel-format", wrong("panels", 1, "targets", 0, "format", "time_series")),
    ("panel-format", wrong("panels", 0, "targets", 0, "format", "table")),
    ("panel-thresholds", wrong(*DEFAULTS, "thresholds", "steps", 0, "color", "mauve")),
    ("panel-thresholds", wrong(*DEFAULTS, "thresholds", "steps", 0, "value", 0)),
    ("panel-thresholds", wrong(*DEFAULTS, "thresholds", "steps",
        [{"color": "red", "value": None}] + [{"color": "red", "value": 1}] * 2)),
    ("panel-links", wrong("panels", 0, "links", 0, "url", "d/vllm-watch-small")),
    ("panel-links", wrong("panels", 0, "links", 0, "title", "")),
    ("panel-links", wrong(*DEFAULTS, "links", [{"title": "x", "url": "/d/vllm-watch-small?var-team=${team}"}])),
    ("panel-percentile", wrong("panels", 2, "title", "Time to first token, p99")),
    ("panel-percentile", wrong("panels", 2, "title", "Time to first token")),
    ("panel-percentile", wrong("panels", 0, "title", "Tokens, p95")),
    ("panel-percentile", wrong("panels", 2, "targets", 0, "legendFormat", "p99 {{model_name}}")),
    ("query-promql", asks("sum by (model_name) (")),
    ("query-series", asks(by_model(f"rate({selector('some_other_exporter_total')}[{RATE}])"))),
    ("query-series", asks(RECORDINGS[0].record)),
    ("query-variables", asks(f"{TOKENS} * $price")),
    ("query-matchers", asks(promql.per_second(vllm.GENERATION_TOKENS, RATE))),
    ("query-matchers", asks(promql.per_second(vllm.GENERATION_TOKENS, RATE, where=(*WHERE, 'engine="$instance"')))),
    ("query-rate-interval", asks(TOKENS.replace(RATE, "5m"))),
    ("query-rate-interval", asks(TOKENS.replace(RATE, "$__interval").replace("rate", "increase"))),
    ("query-rate-interval", asks(TOKENS.replace(RATE, "$__range"))),
    ("query-raw-counter", asks(by_model(COUNTER))),
    ("query-raw-counter", asks(by_model(f"max_over_time({COUNTER}[1h])"))),
    ("query-rate-of-gauge", asks(by_model(f"rate({RUNNING}[{RATE}])"))),
    ("query-rate-of-gauge", asks(f"rate({by_model(f'rate({COUNTER}[{RATE}])')}[1h:])")),
    ("query-buckets", asks(by_model(f"rate({BUCKET}[{RATE}])"))),
    ("query-labels", wrong("panels", 2, "targets", 0, "expr",
        f"histogram_quantile(0.95, {by_model(f'rate({BUCKET}[{RATE}])')})")),
    ("query-labels", asks(f"sum by (model_name, team) (rate({COUNTER}[{RATE}]))")),
    ("query-labels", asks(f"{TOKENS} * on (model_name, instance) {by_model(RUNNING)}")),
    ("query-legend", asks(TOKENS, "{{instance}}")),
    ("query-division", asks(f"{TOKENS} / {by_model(RUNNING)}")),
    ("query-sum", asks(by_model(USAGE))),
    ("query-made-up", asks(f"{TOKENS} or vector(0)", "all")),
    ("boards-links", wrong("panels", 0, "links", 0, "url", "/d/vllm-watch-gone")),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "board"), CASES, ids=[f"{rule}-{at}" for at, (rule, _) in enumerate(CASES)])
def test_a_board_that_breaks_one_rule_is_told_by_that_rule_alone(rule, board):
    assert {rule} == {finding.rule for finding in lint.lint([board], ())}


def test_every_rule_has_its_case():
    covered = {rule for rule, _ in CASES}
    assert set(RULES) - {"boards-unlike"} == covered


@pytest.mark.parametrize("other", [{"uid": "vllm-watch-other"}, {"title": "Other"}])
def test_two_boards_share_neither_uid_nor_title(other):
    """The same uid in two files makes provisioning flip between them."""
    assert ["boards-unlike"] == [finding.rule for finding in lint.lint([GOOD, GOOD | other], ())]


def test_choices_that_only_narrow_others_down_are_used():
    """A board of one model's figures that never asks for its cluster still needs it to find the model."""
    assert {"cluster", "job"} <= {v["name"] for v in GOOD["templating"]["list"]}
    assert not [f for f in lint.findings([GOOD]) if f.rule == "template-unused"]


def test_a_board_without_the_variables_of_an_engine_is_told():
    """dashboard-linter's template-job and template-instance."""
    board = wrong("templating", "list", [v for v in GOOD["templating"]["list"] if v["name"] != "job"])
    assert "query-variables" in {finding.rule for finding in lint.lint([board], ())}


@pytest.mark.parametrize(
    "expr",
    [
        promql.share(
            vllm.REQUEST_SUCCESS, vllm.REQUEST_SUCCESS, RATE, part_where=('finished_reason="error"',), where=WHERE
        ),
        promql.mean(vllm.TIME_TO_FIRST_TOKEN, RATE, where=WHERE),
        promql.worst(vllm.KV_CACHE_USAGE, where=WHERE),
        f"count by (model_name) ({USAGE} > 0.9)",
        by_model(f"{USAGE} > bool 0.9"),
        f"{TOKENS} and {by_model(f'rate({COUNTER}[{RATE}])')} > 0",
        f"{TOKENS} unless on (model_name) {COUNTER}",
    ],
)
def test_what_the_catalogue_itself_asks_breaks_no_rule(expr):
    assert [] == lint.lint([asks(expr)], ())


def test_an_instant_figure_may_cover_the_whole_range():
    board = wrong("panels", 3, "targets", 0, "expr", promql.growth(vllm.GENERATION_TOKENS, "$__range", where=WHERE))
    assert [] == lint.lint([board], ())


# ---- exceptions


def test_an_exception_hides_its_finding_and_nothing_else():
    """Patterns are over board uid, panel title and query letter."""
    both = wrong("panels", 0, "links", 0, "title", "") | {"refresh": "1s"}
    assert ["board-refresh"] == [
        f.rule for f in lint.lint([both], (AllowedFinding("panel-links", "vllm-watch-small/Tok*", "a test"),))
    ]


def test_an_exception_that_nothing_needs_is_a_finding():
    assert ["unused-exception"] == [f.rule for f in lint.lint([GOOD], (AllowedFinding("panel-links", "*", "a test"),))]


def test_an_exception_without_a_reason_cannot_be_made():
    with pytest.raises(ValueError, match="without a reason"):
        AllowedFinding("panel-links", "*", " ")


def test_exceptions_name_rules_that_there_are():
    assert {one.rule for one in EXCEPTIONS} <= set(RULES)
