"""`metrics check` on real pages, and on pages that went wrong on the way."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporters.catalogue import EVERYTHING, exposition_parser
from exporters.compat import check
from stack import cli, render
from stack.cli.metrics import known_release

GOLDEN = Path(__file__).parents[2] / "golden"
PAGES = sorted(GOLDEN.glob("*.prom"))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_captured_page_breaks_no_panel_or_rule(path):
    """A captured page has no unknown family and breaks no panel or rule."""
    report = check.check(exposition_parser.parse(path.read_text()), EVERYTHING, render.uses())
    assert () == report.unknown
    assert () == tuple(b for b in report.broken if not b.use.optional)
    assert not report.fails


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_the_release_is_narrowed_down_to_the_right_one(path):
    since, before = check.check(exposition_parser.parse(path.read_text()), EVERYTHING).releases
    release = re.match(r"\d+\.\d+\.\d+", path.name)[0]
    assert check.key(since) <= check.key(release)
    assert before is None or check.key(release) < check.key(before)


def escaped(text: str) -> str:
    """What prometheus_client 0.23 and later make of vLLM's names for Prometheus 2: samples lose the colon, metadata
    keeps it."""
    return re.sub(r"^vllm:", "vllm_", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_an_escaped_page_is_recognised_and_the_way_out_is_told(path, tmp_path):
    file = tmp_path / "escaped.prom"
    file.write_text(escaped(path.read_text()))
    result = CliRunner().invoke(cli.main, ["metrics", "check", str(file)])
    assert 1 == result.exit_code
    assert "PrometheusText0.0.4" in result.output
    assert not [line for line in result.output.splitlines() if line.startswith("unknown ")]


def test_an_unknown_family_fails(tmp_path):
    file = tmp_path / "page.prom"
    file.write_text((GOLDEN / "0.32.0-before.prom").read_text() + "# TYPE vllm:brand_new gauge\nvllm:brand_new 1\n")
    result = CliRunner().invoke(cli.main, ["metrics", "check", str(file)])
    assert 1 == result.exit_code
    assert "unknown   vllm:brand_new" in result.output


def test_a_missing_family_names_the_panels_it_breaks(tmp_path):
    file = tmp_path / "page.prom"
    file.write_text(
        re.sub(r"^.*time_to_first_token.*\n", "", (GOLDEN / "0.32.0-before.prom").read_text(), flags=re.MULTILINE)
    )
    result = CliRunner().invoke(cli.main, ["metrics", "check", str(file), "--json"])
    report = json.loads(result.output)["page"]
    assert 1 == result.exit_code
    assert "panel overview/ttft-p95" in {b["place"] for b in report["broken"]}


def test_old_names_alone_are_told_as_renamed():
    text = re.sub(
        r"^.*vllm:(kv_cache_usage_perc).*\n", "", (GOLDEN / "0.10.2-before.prom").read_text(), flags=re.MULTILINE
    )
    report = check.check(exposition_parser.parse(text), EVERYTHING, render.uses())
    assert (("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),) == report.renamed
    assert not report.fails


DASHBOARD = {
    "panels": [
        {"title": "hits", "targets": [{"refId": "A", "expr": "sum(rate(vllm:cache_hit_tokens_total[5m]))"}]},
        {
            "type": "row",
            "panels": [{"title": "ttft", "targets": [{"refId": "B", "expr": "vllm:num_requests_running"}]}],
        },
    ]
}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_our_dashboards_pass_the_check(path):
    """Our own boards are in order when they are checked like anybodys."""
    boards = sorted((GOLDEN.parent.parent / "dashboards/json").rglob("*.json"))
    result = CliRunner().invoke(
        cli.main, ["metrics", "check", str(path), *(word for board in boards for word in ("--dashboard", str(board)))]
    )
    assert (0, True) == (result.exit_code, len(boards) > 10), result.output
    assert "empty     " in result.output
    panel = {
        "title": "x",
        "fieldConfig": {"defaults": {"noValue": "-"}},
        "targets": [{"expr": "vllm:corrupted_requests_total"}],
    }
    theirs = check.uses_of_dashboard(json.dumps({"panels": [panel]}), "mine.json")
    assert [""] == [use.optional for use in theirs], "of somebody else's panel nobody knows that"


def test_own_dashboard_is_checked_for_unknown_names(tmp_path):
    """The name cache_hit_tokens_total is in circulation and was never in any release."""
    board = tmp_path / "mine.json"
    board.write_text(json.dumps(DASHBOARD))
    result = CliRunner().invoke(cli.main, ["metrics", "check", "--dashboard", str(board)])
    assert 1 == result.exit_code
    assert "vllm:cache_hit_tokens_total (mine.json: hits / A): use vllm:" in result.output
    assert "num_requests_running" not in result.output


@pytest.mark.parametrize(
    ("content", "cause"),
    [("{", "mine.json, line 1: invalid JSON"), ("[]", "list of panels"), ('{"panels": 3}', "list of panels")],
)
def test_a_file_that_is_no_dashboard_is_refused_by_name(content, cause, tmp_path):
    board = tmp_path / "mine.json"
    board.write_text(content)
    result = CliRunner().invoke(cli.main, ["metrics", "check", "--dashboard", str(board)])
    assert 2 == result.exit_code
    assert cause in result.output
    assert "mine.json" in result.output


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("http://127.0.0.1:1", "does not answer"),
        ("/nowhere/page", "No such file"),
        (__file__, "line 1 is "),
        ("localhost:8000", " http://localhost:8000"),
    ],
)
def test_a_target_that_is_no_page_is_refused_with_its_cause(target, cause):
    result = CliRunner().invoke(cli.main, ["metrics", "check", target])
    assert 2 == result.exit_code
    assert cause in result.output


MESSY = {
    "templating": {
        "list": [{"name": "m", "type": "query", "query": {"query": "label_values(vllm:gone_forever, model_name)"}}]
    },
    "annotations": {"list": [{"name": "a", "expr": "vllm:also_gone > 0", "datasource": {"type": "prometheus"}}]},
    "rows": [{"panels": [{"title": "old row", "targets": [{"refId": "A", "expr": "vllm:third_gone"}]}]}],
    "panels": [
        {"title": "logs", "datasource": {"type": "loki"}, "targets": [{"expr": '{app="x"} |= "vllm:in_a_log"'}]},
        {"title": "broken", "targets": [{"refId": "B", "expr": "sum(rate("}]},
        {
            "title": "fine",
            "targets": [{"refId": "C", "expr": "$op(rate(vllm:${metric}_total{$filters}[$w] offset $off))"}],
        },
    ],
}


def test_variables_annotations_and_rows_are_read(tmp_path):
    """Variables annotations and rows are read and what cannot be is named and passed over."""
    board = tmp_path / "mine.json"
    board.write_text(json.dumps(MESSY))
    result = CliRunner().invoke(cli.main, ["metrics", "check", "--dashboard", str(board)])
    assert 1 == result.exit_code
    for told in (
        "vllm:gone_forever (mine.json: variable m)",
        "vllm:also_gone (mine.json: annotation a)",
        "vllm:third_gone (mine.json: old row / A)",
    ):
        assert f"no release has {told}" in result.output
    assert "unread    mine.json: broken / B: not PromQL" in result.output
    assert "in_a_log" not in result.output
    assert "fine" not in result.output


def test_renamed_series_is_reported_with_its_new_name(tmp_path):
    """A renamed series in one's own dashboard is told with its new name."""
    board = tmp_path / "mine.json"
    queries = [
        "vllm:gpu_cache_usage_perc",
        "rate(vllm:time_per_output_token_seconds_sum[5m])",
        "vllm:num_request_running",
    ]
    board.write_text(
        json.dumps(
            {"panels": [{"title": str(i), "targets": [{"refId": "A", "expr": expr}]} for i, expr in enumerate(queries)]}
        )
    )
    result = CliRunner().invoke(
        cli.main, ["metrics", "check", str(GOLDEN / "0.32.0-before.prom"), "--dashboard", str(board)]
    )
    assert 1 == result.exit_code
    assert "misses vllm:gpu_cache_usage_perc (now vllm:kv_cache_usage_perc)" in result.output
    assert "(now vllm:inter_token_latency_seconds_sum)" in result.output
    assert "vllm:num_request_running (mine.json: 2 / A): use vllm:num_requests_running" in result.output


def test_a_page_of_somebody_else_does_not_pass(tmp_path):
    file = tmp_path / "page"
    file.write_text("# TYPE node_load1 gauge\nnode_load1 1\nvllm_router_requests_total 3\n")
    result = CliRunner().invoke(cli.main, ["metrics", "check", str(file)])
    assert 1 == result.exit_code
    assert "only 2 others" in result.output
    assert "escaped" not in result.output


def test_a_release_that_cannot_be_read_is_no_release():
    assert "0.32.0" == known_release(None, "0.32.0+cpu")
    assert known_release(None, "dev") is None
    assert CliRunner().invoke(cli.main, ["metrics", "check", str(PAGES[0]), "--release", "dev"]).exit_code == 2


def test_the_catalogue_is_printed_and_searched():
    result = CliRunner().invoke(cli.main, ["metrics", "list", "--json", "preempt"])
    names = {entry["name"] for entry in json.loads(result.output)}
    assert "vllm:num_preemptions_total" in names
    assert "vllm:prompt_tokens_total" not in names
    assert "vllm:time_to_first_token_seconds" in CliRunner().invoke(cli.main, ["metrics", "list"]).output
