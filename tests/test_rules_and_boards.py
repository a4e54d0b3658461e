"""Alerts, recordings and boards: whole, printed, linked in both directions, and accepted by the real promtool."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from alerts.families import ALERTS, RECORDINGS
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Links, Recording, Severity
from alerts.thresholds import Threshold
from dashboards.boards import BOARDS
from exporters.catalogue import EVERYTHING, expression
from exporters.catalogue.metric import Unit
from runbooks import book
from stack import bundle
from stack.gateway.reasons import REASONS

ROOT = Path(__file__).parent.parent
SAMPLES = {sample for metric in EVERYTHING for sample in metric.samples}
RECORDED = {recording.record for recording in RECORDINGS}
PANELS = {PanelRef(board.slug, panel.slug) for board in BOARDS for panel in board.panels}


def test_printed_files_match_their_source():
    """`vllm-watch render` was run after the last change."""
    assert [] == bundle.stale()


def test_a_stale_a_missing_and_an_orphaned_file_are_found_and_mended(tmp_path):
    bundle.write(tmp_path)
    assert [] == bundle.stale(tmp_path)
    page = tmp_path / "alerts/prometheus/page.yaml"
    page.write_text(page.read_text() + "#")
    (tmp_path / "dashboards/json/overview.json").unlink()
    (tmp_path / "dashboards/json/orphan.json").write_text("{}")
    assert 3 == len(bundle.stale(tmp_path))
    assert 3 == len(bundle.write(tmp_path))
    assert [] == bundle.stale(tmp_path)


@pytest.mark.parametrize("use", list(bundle.uses()), ids=lambda use: f"{use.place} {use.expr[:20]}")
def test_every_expression_asks_only_for_series_that_exist(use):
    assert expression.names(use.expr) <= SAMPLES | RECORDED


def test_every_alert_has_its_page_and_every_page_its_alert():
    assert [] == list(book.faults(alert.name for alert in ALERTS))


def test_faults_of_the_book_are_found(tmp_path):
    (tmp_path / "VLLMA.md").write_text("# VLLMB\n\n## Meaning\n")
    (tmp_path / "VLLMOrphan.md").write_text("x")
    told = list(book.faults(["VLLMA", "VLLMMissing"], tmp_path))
    assert "VLLMMissing has no page" in told
    assert "VLLMOrphan.md belongs to no alert" in told
    assert "VLLMA.md does not open with its name" in told
    assert 4 == len(told)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a.name)
def test_an_alert_points_at_a_panel_that_exists(alert):
    assert alert.panel in PANELS


@pytest.mark.parametrize("alert", [a for a in ALERTS if a.threshold], ids=lambda a: a.name)
def test_the_panel_draws_the_line_at_which_the_alert_fires_and_the_page_says_why(alert):
    panel = next(p for b in BOARDS for p in b.panels if PanelRef(b.slug, p.slug) == alert.panel)
    assert alert.threshold == panel.threshold
    assert str(alert.threshold) in alert.expr
    page = book.text(alert.name)
    assert alert.threshold.why in page
    assert alert.threshold.source in page


@pytest.mark.parametrize("name", book.names())
def test_queries_and_commands_of_a_page_are_sound(name):
    text = book.text(name)
    for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        assert expression.names(block.strip()) <= SAMPLES | RECORDED, block
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        assert 0 == subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode, block
    assert not re.search(r"\b(TODO|TBD)\b", text)


def test_a_reason_named_on_a_page_is_one_that_the_gateway_gives():
    named = set(re.findall(r"`((?:upstream|engine|prefill|decode|total|connect|body|client)_[a-z]+)`", " ".join(map(book.text, book.names()))))
    assert named
    assert named <= set(REASONS)


def test_panel_addresses_are_distinct_and_no_uid_is_anybody_elses():
    """vLLM and production-stack both ship the uid b281712d-...; importing one replaces the other."""
    ids = [(ref.uid, ref.panel_id) for ref in PANELS]
    assert len(set(ids)) == len(ids)
    assert all(ref.uid.startswith("vllm-watch-") and len(ref.uid) <= 40 for ref in PANELS)
    assert "http://g/d/vllm-watch-overview?viewPanel=" in PanelRef("overview", "ttft-p95").url("http://g/")


def good(**changes):
    given = {"name": "VLLMThing", "severity": Severity.WARNING, "expr": "up == 0", "hold": "1m", "summary": "It is so.",
             "description": "{{ $labels.instance }} is so.", "panel": PanelRef("overview", "x")}  # fmt: skip
    return given | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Thing"},
        {"name": "VLLM" + "A" * 40},
        {"summary": "{{ $labels.x }} is so."},
        {"summary": "No full stop"},
        {"description": "names no label"},
        {"hold": "soon"},
    ],
)
def test_an_alert_that_would_not_work_at_night_cannot_be_made(changes):
    with pytest.raises(ValueError, match=r"VLLM|Thing"):
        Alert(**good(**changes))


def test_links_can_lead_to_a_teams_own_addresses():
    rule = Alert(**good()).as_rule(Links("https://wiki/rb/", "https://grafana"))
    assert "https://wiki/rb/VLLMThing" == rule["annotations"]["runbook_url"]
    assert rule["annotations"]["dashboard_url"].startswith("https://grafana/d/vllm-watch-overview")


def test_a_threshold_needs_a_reason_and_a_record_its_shape():
    with pytest.raises(ValueError, match="reason"):
        Threshold(1, Unit.SECONDS, "", "x")
    with pytest.raises(ValueError, match="level:metric:operations"):
        Recording("vllm:a", "up")


@pytest.mark.prometheus
def test_promtool_accepts_every_rule_file(part):
    for path in sorted((ROOT / "alerts/prometheus").glob("*.yaml")):
        command = [part("promtool").path, "check", "rules", "--lint=all", "--lint-fatal", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr


WATCH = {"vllm": "10.0.0.1:8000", "sidecar": "10.0.0.2:9401"}


def case(name, series, fires_at, silent_at, labels):
    return pytest.param(name, series, fires_at, silent_at, labels, id=name)


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("name", "series", "fires_at", "silent_at", "labels"),
    [
        case("VLLMEngineDown", {'up{job="vllm",instance="a"}': "1x3 0x20"}, "6m", "4m", {"instance": "a", "job": "vllm"}),
        case("VLLMSidecarDown", {'up{job="sidecar",instance="s"}': "1x3 0x20"}, "7m", "5m", {"instance": "s", "job": "sidecar"}),
        case(
            "VLLMKVCacheNearlyFull",
            {'vllm:kv_cache_usage_perc{instance="a",model_name="m"}': "0.9x5 0.91x30"},
            "12m", "10m", {"instance": "a", "model_name": "m"},
        ),
        case(
            "VLLMQueueTimeHigh",
            {
                'vllm:request_queue_time_seconds_bucket{instance="a",model_name="m",le="5.0"}': "0+94x40",
                'vllm:request_queue_time_seconds_bucket{instance="a",model_name="m",le="10.0"}': "0+100x40",
                'vllm:request_queue_time_seconds_bucket{instance="a",model_name="m",le="+Inf"}': "0+100x40",
            },
            "7m", "5m", {"instance": "a", "model_name": "m"},
        ),
        case(
            "VLLMErrorRatioHigh",
            {
                'vllm_watch_requests_total{model_name="m",team="t",outcome="ok"}': "0+199x40",
                'vllm_watch_requests_total{model_name="m",team="t",outcome="timeout"}': "0+2x40",
            },
            "9m", "7m", {"model_name": "m"},
        ),
    ],
)  # fmt: skip
def test_an_alert_fires_just_past_its_edge_and_not_before(name, series, fires_at, silent_at, labels, part, tmp_path):
    alert = next(a for a in ALERTS if a.name == name)
    expected = [{"exp_labels": {"severity": str(alert.severity), "owner": alert.owner, **labels}}]
    assert promtool_says(part, tmp_path, series, name, fires_at, expected), f"{name} should fire at {fires_at}"
    assert promtool_says(part, tmp_path, series, name, silent_at, []), f"{name} should be silent at {silent_at}"


@pytest.mark.prometheus
@pytest.mark.parametrize("alert", [a for a in ALERTS if a.name != "VLLMWatchdog"], ids=lambda a: a.name)
def test_an_alert_is_silent_below_its_edge_when_idle_and_when_there_is_nothing(alert, part, tmp_path):
    """Idle counters stand still: 0/0 must be neither NaN nor an alert."""
    idle = {
        'up{job="vllm",instance="a"}': "1x40", 'up{job="sidecar",instance="s"}': "1x40",
        'vllm:kv_cache_usage_perc{instance="a",model_name="m"}': "0.9x40",
        'vllm:request_queue_time_seconds_bucket{instance="a",model_name="m",le="5.0"}': "7x40",
        'vllm:request_queue_time_seconds_bucket{instance="a",model_name="m",le="+Inf"}': "9x40",
        'vllm_watch_requests_total{model_name="m",team="t",outcome="ok"}': "5x40",
        'vllm_watch_requests_total{model_name="m",team="t",outcome="timeout"}': "3x40",
    }  # fmt: skip
    assert promtool_says(part, tmp_path, idle, alert.name, "30m", [])
    assert promtool_says(part, tmp_path, {}, alert.name, "30m", [])


@pytest.mark.prometheus
def test_a_few_failures_in_a_quiet_hour_wake_nobody(part, tmp_path):
    """Two of six requests failed: 33 %, and still only two."""
    series = {'vllm_watch_requests_total{model_name="m",team="t",outcome="ok"}': "0 4x40",
              'vllm_watch_requests_total{model_name="m",team="t",outcome="timeout"}': "0 2x40"}  # fmt: skip
    assert all(promtool_says(part, tmp_path, series, "VLLMErrorRatioHigh", f"{minute}m", []) for minute in (6, 8, 11))


@pytest.mark.prometheus
def test_the_watchdog_always_fires(part, tmp_path):
    assert promtool_says(part, tmp_path, {}, "VLLMWatchdog", "1m", [{"exp_labels": {"severity": "info", "owner": "serving"}}])


def promtool_says(part, folder, series, name, at, expected):
    """Whether the real promtool finds exactly these alerts; annotations are compared elsewhere, so they are taken from the rule."""
    rules = [str(path) for path in sorted((ROOT / "alerts/prometheus").glob("*.yaml"))]
    stripped = folder / "rules.yaml"
    groups = [g for rule in rules for g in yaml.safe_load(Path(rule).read_text())["groups"]]
    for group in groups:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    stripped.write_text(yaml.safe_dump({"groups": groups}))
    test = {
        "rule_files": [str(stripped)], "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m", "input_series": [{"series": s, "values": v} for s, v in series.items()],
            "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": expected}],
        }],
    }  # fmt: skip
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run([part("promtool").path, "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0
