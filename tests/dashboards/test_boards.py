"""Boards: what every one of them has, and what a profile leaves of them. Whether they return data is
test_panel_matrix.py."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from alerts import thresholds
from alerts.panel_ref import board_uid
from alerts.registry import alerts
from alerts.rules import Links
from alerts.settings import Overrides, Settings
from dashboards import annotations as marked
from dashboards import queries as query_builders
from dashboards import variables
from dashboards.boards.gateway import FAILED_TRY
from dashboards.grafana_json import to_json
from dashboards.interpolate import ALL, Range, fill
from dashboards.model import Dashboard, DashboardRow, Panel, Profile, Query, Shape
from dashboards.registry import BOARDS, boards
from exporters.catalogue import gateway, gpu, promql_ast, sidecar, vllm
from exporters.catalogue.producers import GROUPS, Component
from stack import cli
from stack.gateway.reasons import REASONS

ROOT = Path(__file__).parents[2]
SLUGS = [
    "overview",
    "latency",
    "kv-cache",
    "tuning-options",
    "prefill-decode",
    "teams",
    "cost",
    "gateway",
    "gpu",
    "tuning",
    "fleet",
    "fleet-weeks",
    "monitoring-health",
]


def printed(board, profile=Profile.FULL, **options):
    return json.loads(to_json(board, profile, **options))


def flat(dashboard):
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def panel(**changes):
    given = {"slug": "x", "title": "X", "means": "It is x.", "good": "Zero.", "act": "Look.",
             "queries": (Query("vllm:num_requests_running", "{{model_name}}", "short"),)}  # fmt: skip
    return Panel(**given | changes)


def board(*panels, **changes):
    return Dashboard(**{"slug": "b", "title": "B", "question": "Is it?", "rows": (DashboardRow("", panels),)} | changes)


def test_the_boards_that_are_shipped():
    assert SLUGS == [board.slug for board in BOARDS]


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.slug)
def test_a_board_prints_for_grafana_10_4_and_later(board):
    made = printed(board)
    assert 39 == made["schemaVersion"]
    assert board_uid(board.slug) == made["uid"]
    assert ["datasource", *(v.name for v in variables.of(board))] == [v["name"] for v in made["templating"]["list"]]
    assert all(v["allValue"] == ".*" for v in made["templating"]["list"] if v["type"] == "query"), (
        "a label that is missing must still match"
    )
    assert len(board.panels) + len(board.preconditions) == len([p for p in flat(made) if p["type"] != "row"])


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.slug)
def test_first_row_has_no_heading_and_links_exist(board):
    """A board's first row has no heading and its links lead to boards that exist."""
    assert "" == board.rows[0].title
    assert {p.detail for p in board.panels} - {""} <= set(SLUGS) - {board.slug}


def test_a_variable_that_no_query_reads_is_not_offered():
    assert [] == list(variables.of(board(panel())))
    rated = board(panel(queries=(query_builders.rate(vllm.PROMPT_TOKENS),)))
    assert ["cluster", "namespace", "job", "instance", "model_name"] == [v.name for v in variables.of(rated)]
    assert 'label_values(vllm:num_requests_running{cluster=~"$cluster"}, namespace)' == variables.of(rated)[1].query


def test_a_board_about_the_log_takes_its_choices_from_the_log():
    """A team may see the request log and no engine."""
    logged = board(panel(queries=(query_builders.rate(sidecar.REQUESTS, by=("team",)),)))
    assert ["cluster", "model_name", "team"] == [v.name for v in variables.of(logged)]
    assert (
        'label_values(vllm_watch_requests_total{cluster=~"$cluster", model_name=~"$model_name"}, team)'
        == variables.of(logged)[-1].query
    )
    mixed = board(
        panel(queries=(query_builders.rate(sidecar.REQUESTS, by=("team",)), query_builders.rate(vllm.PROMPT_TOKENS)))
    )
    assert variables.of(logged)[-1] == variables.of(mixed)[-1], "a choice among engines does not take teams away"


def test_matchers_follow_the_labels_that_a_series_has():
    assert all("job" not in matcher for matcher in query_builders.where(sidecar.REQUESTS)), (
        "the sidecar's scrape job is not the engine's"
    )
    assert not any("model_name" in matcher for matcher in query_builders.where(vllm.CACHE_CONFIG_INFO))
    assert any("model_name" in matcher for matcher in query_builders.where(vllm.NUM_REQUESTS_RUNNING))


def test_the_engines_namespace_silences_nobody_who_watches_them():
    """On Kubernetes Prometheus, exporters, sidecar and gateway run in namespaces of their own, and links between boards
    carry every choice."""
    for component, metrics in GROUPS:
        asked = {matcher.split("=~")[0] for metric in metrics for matcher in query_builders.where(metric)}
        assert ("namespace" in asked) is (component is Component.ENGINE), component


@pytest.mark.parametrize(
    ("metric", "told"),
    [(sidecar.REQUESTS, "the sidecar"), (gateway.REQUESTS, "the gateway"), (gpu.ENERGY, "the GPU host")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_empty_panel_says_which_component_is_missing(metric, told):
    empty = panel(queries=(query_builders.rate(metric, by=("model_name",)),))
    assert told in empty.when_empty
    (shown,) = printed(board(empty))["panels"]
    assert told in shown["fieldConfig"]["defaults"]["noValue"]


def test_panel_needs_meaning_good_and_action():
    """A panel without meaning good and what to do cannot be made."""
    for part in ("means", "good", "act"):
        with pytest.raises(ValueError, match=part):
            panel(**{part: "no sentence"})
    with pytest.raises(ValueError, match="asks nothing"):
        panel(queries=())


def test_engine_profile_uses_vllm_series_only():
    """The engine profile asks for nothing but vLLM's own series."""
    kept = boards(Profile.ENGINE)
    assert {"overview", "latency", "kv-cache", "tuning-options", "fleet"} <= {board.slug for board in kept}
    for one in kept:
        made = printed(one, Profile.ENGINE)
        asked = [t["expr"] for p in flat(made) for t in p.get("targets", ())] + [
            a["expr"] for a in made["annotations"]["list"] if "expr" in a
        ]
        names = set().union(*map(promql_ast.names, asked))
        assert not [name for name in names if name.startswith(("vllm_watch_", "ALERTS", "DCGM_"))]
        assert "team" not in [v["name"] for v in made["templating"]["list"]]
        assert all(p.detail in {"", *(b.slug for b in kept)} for p in one.panels), (
            "no link leads to a board that is left out"
        )


def test_the_full_profile_leaves_nothing_out():
    assert BOARDS == boards(Profile.FULL)


def test_a_mixed_panel_keeps_the_queries_that_the_engine_answers():
    mixed = board(panel(queries=(query_builders.rate(sidecar.REQUESTS), query_builders.rate(vllm.PROMPT_TOKENS))))
    (query,) = boards_only(mixed).panels[0].queries
    assert {Component.ENGINE} == query.needs


def boards_only(one):
    from dashboards.model import only

    return only(one, Profile.ENGINE.components)


def test_a_try_failed_when_its_reason_is_one_of_a_failure():
    """A canary is judged by it: neither a refusal, nor the client's mistake, nor a client that left, nor our own end is
    the engine's fault."""
    of_ours = {"gateway_stopped", "gateway_error"}
    failures = {name for name, reason in REASONS.items() if reason.outcome in ("upstream_error", "timeout")} - of_ours
    no_failures = {"ok", "engine_busy", "bad_request", *of_ours} | {
        name for name, reason in REASONS.items() if reason.outcome == "client_abort"
    }
    left_out = re.compile(FAILED_TRY.removeprefix('result!~"').removesuffix('"'))
    assert failures == {result for result in failures | no_failures if not left_out.fullmatch(result)}


def test_no_event_is_drawn_twice():
    """The sidecar records restarts too; the engine's own start time tells them everywhere."""
    one = replace(BOARDS[0])
    names = [mark.name for mark in marked.of(one)]
    assert len(names) == len(set(names))
    events = next(mark for mark in marked.of(one) if mark.name == "Tuning events")
    assert 'kind!="restart"' in events.expr
    assert events.expr.startswith("max by (kind) ("), "several sidecars may read one file"


def test_links_lead_to_a_teams_own_runbooks():
    made = printed(BOARDS[0], links=Links("https://wiki/rb"))
    urls = [link["url"] for p in made["panels"] for link in p.get("links", ()) if link["title"].startswith("Runbook")]
    assert "https://wiki/rb/VLLMErrorRatioHigh" in urls
    assert all(url.startswith("https://wiki/rb/") for url in urls)


def test_imported_is_editable_and_provisioned_is_not():
    """What is imported may be edited and what is provisioned not."""
    assert printed(BOARDS[0])["editable"]
    assert not printed(BOARDS[0], editable=False)["editable"]


def test_a_target_that_is_down_is_red():
    up = next(p for p in flat(printed(BOARDS[0])) if p["title"] == "Engines up")
    assert [("text", None), ("red", 0), ("green", 1)] == [
        (s["color"], s["value"]) for s in up["fieldConfig"]["defaults"]["thresholds"]["steps"]
    ]


def test_table_has_one_row_per_label_set():
    """A table has one row for each set of labels and each value its unit."""
    made = printed(
        board(
            panel(
                shape=Shape.TABLE,
                queries=(
                    Query("vllm:num_requests_running", "running", "short"),
                    Query("vllm:kv_cache_usage_perc", "KV", "percentunit"),
                ),
            )
        )
    )
    (table,) = made["panels"]
    assert ["merge", "organize"] == [t["id"] for t in table["transformations"]]
    assert {"Value #A": "running", "Value #B": "KV"} == table["transformations"][1]["options"]["renameByName"]
    assert "percentunit" == table["fieldConfig"]["overrides"][1]["properties"][0]["value"]
    assert all(t["instant"] and t["format"] == "table" for t in table["targets"])


def test_panels_wrap_and_closed_rows_hold_theirs():
    """Panels wrap at the width of a board and a closed row holds its own."""
    many = tuple(panel(slug=f"p{i}", width=10) for i in range(3))
    made = printed(board(rows=(DashboardRow("", many[:1]), DashboardRow("More", many[1:], collapsed=True)), slug="c"))
    assert [(0, 0), (0, 7)] == [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in made["panels"]]
    assert [(0, 8), (10, 8)] == [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in made["panels"][1]["panels"]]


def test_value_is_red_from_its_limit_on():
    """Green is a promise that somebody has to make; a frozen engine must never stand in it."""

    def steps(**changes):
        return [
            (s["color"], s["value"])
            for s in printed(board(panel(shape=Shape.NUMBER, **changes)))["panels"][0]["fieldConfig"]["defaults"][
                "thresholds"
            ]["steps"]
        ]

    assert [("text", None)] == steps()
    assert [("green", None), ("red", 1)] == steps(bad_from=1)
    assert [("green", None), ("red", thresholds.KV_CACHE_USAGE.value)] == steps(threshold=thresholds.KV_CACHE_USAGE)


def test_a_table_starts_with_the_row_to_look_at():
    for lowest_first, descending in ((False, True), (True, False)):
        (table,) = printed(board(panel(shape=Shape.TABLE, lowest_first=lowest_first, queries=(Query("up", "up"),))))[
            "panels"
        ]
        assert [{"displayName": "up", "desc": descending}] == table["options"]["sortBy"]


def test_an_empty_cell_is_a_dash_and_not_a_sentence():
    (table,) = printed(board(panel(shape=Shape.TABLE, queries=(Query("up", "up"),))))["panels"]
    assert {"id": "noValue", "value": "-"} in table["fieldConfig"]["overrides"][0]["properties"]


# ---- boards on the real promtool, where engines are many


def asked(board, slug, at=0, **chosen):
    """A query as it is sent, everything chosen but what is given."""
    (one,) = (each for each in BOARDS if each.slug == board)
    expr = next(each for each in one.panels if each.slug == slug).queries[at].expr
    return fill(expr, {name: [ALL] for name in variables.CHAIN} | chosen, Range(0, 3600))


def answered(part, folder, series, questions):
    """Samples a minute apart, asked after half an hour."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": "30m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for expr, samples in questions
        ],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    done = subprocess.run([part("promtool").path, "test", "rules", file], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.prometheus
def test_single_engine_keeps_its_share_of_the_total(part, tmp_path):
    """An engine that is chosen alone keeps its part in the whole."""
    series = [
        (f'vllm:num_requests_running{{job="v", instance="{at}", model_name="m"}}', f"{running}x40")
        for at, running in (("a", 1), ("b", 3))
    ]
    alone = asked("fleet", "balance-running", instance=["a"])
    answered(part, tmp_path, series, [(alone, [('{job="v", instance="a", model_name="m"}', 0.25)])])


@pytest.mark.prometheus
def test_engines_of_one_address_in_two_clusters_are_two(part, tmp_path):
    """vllm:8000 in each of them, as services are called alike everywhere; one of them has started again."""
    series = []
    for cluster, running, started in (("one", 2, "100x40"), ("two", 5, "100x20 900x20")):
        labels = f'cluster="{cluster}", job="v", instance="vllm:8000"'
        series += [
            (f'vllm:num_requests_running{{{labels}, model_name="m"}}', f"{running}x40"),
            (f"process_start_time_seconds{{{labels}}}", started),
        ]

    def each(one, two, more=""):
        return [
            (f'{{cluster="{cluster}", job="v", instance="vllm:8000"{more}}}', value)
            for cluster, value in (("one", one), ("two", two))
        ]

    model = ', model_name="m"'
    questions = [
        (asked("fleet", "worst-first", 2), each(2, 5, model)), (asked("fleet", "worst-first", 9), each(0, 1, model)),
        (asked("fleet", "restarts"), [("{}", 1)]), (asked("fleet", "engines"), [("{}", 2)]),
        (asked("fleet", "up-since"), each(1700, 900)),
    ]  # fmt: skip
    answered(part, tmp_path, series, questions)


@pytest.mark.prometheus
def test_monitoring_health_shows_ours_even_when_down(part, tmp_path):
    """The sidecar stopped ten minutes ago: its alert leads to this panel."""
    series = [
        ('up{job="vllm", instance="e:8000"}', "1x40"),
        ('vllm:num_requests_running{job="vllm", instance="e:8000"}', "1x40"),
        ('up{job="sidecar", instance="s:9401"}', "1x20 0x20"),
        ('vllm_watch_sidecar_info{job="sidecar", instance="s:9401"}', "1x20 stale"),
        ('up{job="shop", instance="shop:80"}', "0x40"), ('up{job="gateway", instance="g:8010"}', "1x40"),
        ('vllm_watch_gateway_log_waiting_requests{job="gateway", instance="g:8010"}', "0x40"),
    ]  # fmt: skip
    questions = [
        (asked("monitoring-health", "targets-up", 0), [('{job="vllm"}', 1)]),
        (asked("monitoring-health", "targets-up", 1), [('{job="gateway"}', 1), ('{job="sidecar"}', 0)]),
    ]
    answered(part, tmp_path, series, questions)


def test_the_lines_stand_where_a_deployment_puts_its_thresholds():
    """One number for the alert and the line; every other board stays as it is, and nothing but lines changes."""
    own = Settings(Overrides(thresholds={"ttft_p95": 5.0}))
    there = {panel.slug: panel for b in boards(settings=own) for panel in b.panels if b.slug == "overview"}
    assert 5.0 == there["ttft-p95"].limit
    assert there["ttft-p95"].alerts("overview"), "the panel still knows its alerts"
    assert thresholds.KV_CACHE_USAGE.value == there["kv-cache-usage"].limit
    assert "> 5" in next(a.expr for a in alerts(own) if a.name == "VLLMTTFTHigh")


def test_the_command_takes_the_thresholds_and_names_a_wrong_one(tmp_path):
    own = tmp_path / "thresholds.yaml"
    own.write_text("thresholds: {kv_cache_usage: 0.7}\n")
    done = CliRunner().invoke(
        cli.main, ["dashboards", "export", "--out", str(tmp_path / "boards"), "--thresholds", str(own)]
    )
    assert 0 == done.exit_code, done.output
    assert '"value": 0.7' in (tmp_path / "boards/overview.json").read_text()
    own.write_text("thresholds: {kv_cache_usag: 0.7}\n")
    done = CliRunner().invoke(
        cli.main, ["dashboards", "export", "--out", str(tmp_path / "boards"), "--thresholds", str(own)]
    )
    assert 2 == done.exit_code
    fault = r": thresholds\.kv_cache_usag .*thresholds\.kv_cache_usage\b"
    assert re.search(re.escape(str(own)) + fault, done.output)


def test_monitoring_health_opens_with_at_most_twelve_panels():
    (health,) = (one for one in BOARDS if one.slug == "monitoring-health")
    assert 12 >= sum(len(row.panels) for row in health.rows if not row.collapsed)


def test_titles_are_noun_phrases():
    """No question, no relative clause: 'Queue time, p95', not 'Who waits' or 'What the engine adds'."""
    titles = [title for board in BOARDS for row in board.rows for title in (row.title, *(p.title for p in row.panels))]
    wrong = re.compile(r"^(What|Who|Which|How|Is|Are|Where)\b|\?| that | who | which |\bown way\b")
    allowed = {"Requests running, and the most that fit"}
    assert [] == [title for title in titles if wrong.search(title) and title not in allowed]
