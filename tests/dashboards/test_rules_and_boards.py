"""Alerts, recordings and boards: whole, printed, linked in both directions. What alerts do stands in
test_alert_rules.py."""

from __future__ import annotations

import pytest

from alerts.panel_ref import PanelRef
from alerts.registry import ALERTS, RECORDINGS
from alerts.rules import LABELS_QUERY, Alert, Links, Recording, Severity
from alerts.thresholds import Threshold
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, promql_ast
from exporters.catalogue.metric import Unit
from runbooks import page as runbook_page
from runbooks import page_check
from stack import render

SAMPLES = {sample for metric in EVERYTHING for sample in metric.samples}
RECORDED = {recording.record for recording in RECORDINGS}
PANELS = {PanelRef(board.slug, panel.slug) for board in BOARDS for panel in board.panels}


@pytest.fixture(scope="module")
def printed():
    return list(render.files())


def test_printed_files_match_their_source(printed, monkeypatch):
    """`vllm-watch render` was run after the last change."""
    monkeypatch.setattr(render, "files", lambda: printed)
    assert [] == render.stale()


def test_stale_missing_and_orphaned_files_are_fixed(printed, tmp_path, monkeypatch):
    """A stale a missing and an orphaned file are found and fixed."""
    monkeypatch.setattr(render, "files", lambda: printed)
    render.write(tmp_path)
    assert [] == render.stale(tmp_path)
    page = tmp_path / "alerts/prometheus/page.yaml"
    page.write_text(page.read_text() + "#")
    (tmp_path / "dashboards/json/overview.json").unlink()
    (tmp_path / "dashboards/json/orphan.json").write_text("{}")
    assert 3 == len(render.stale(tmp_path))
    assert 3 == len(render.write(tmp_path))
    assert [] == render.stale(tmp_path)


def test_every_expression_asks_only_for_series_that_exist():
    uses = list(render.uses())
    assert len(uses) > 400
    unknown = [(use.place, name) for use in uses for name in promql_ast.names(use.expr) - SAMPLES - RECORDED]
    assert [] == unknown


def test_every_alert_has_its_page_and_every_page_its_alert():
    assert [] == list(page_check.faults(alert.name for alert in ALERTS))


def test_faults_of_the_book_are_found(tmp_path):
    (tmp_path / "VLLMA.md").write_text("# VLLMB\n\n## Meaning\n")
    (tmp_path / "VLLMOrphan.md").write_text("x")
    faults = list(page_check.faults(["VLLMA", "VLLMMissing"], tmp_path))
    assert ["VLLMMissing", "VLLMOrphan.md", *["VLLMA.md"] * 3] == [fault.split()[0] for fault in faults]
    assert "no page" in faults[0]
    assert "no alert" in faults[1]
    assert any("its name" in fault for fault in faults[2:])


def test_alerts_point_at_panels_that_exist():
    assert [] == [alert.panel for alert in ALERTS if alert.panel not in PANELS]


@pytest.mark.parametrize("alert", [a for a in ALERTS if a.threshold and a.drawn], ids=lambda a: a.name)
def test_panel_line_is_the_alert_threshold(alert):
    """The panel draws the line at which the alert fires and the page says why."""
    panel = next(p for b in BOARDS for p in b.panels if PanelRef(b.slug, p.slug) == alert.panel)
    assert alert.threshold == panel.threshold
    assert str(alert.threshold) in alert.expr
    page = runbook_page.text(alert.name)
    assert alert.threshold.why in page
    assert alert.threshold.source in page


def test_panel_addresses_and_uids_are_unique():
    """vLLM and production-stack both ship the uid b281712d-...; importing one replaces the other."""
    ids = [(ref.uid, ref.panel_id) for ref in PANELS]
    assert len(set(ids)) == len(ids)
    assert all(ref.uid.startswith("vllm-watch-") and len(ref.uid) <= 40 for ref in PANELS)
    assert "http://g/d/vllm-watch-overview?viewPanel=" in PanelRef("overview", "ttft-p95").url("http://g/")


def good(**changes):
    given = {"name": "VLLMThing", "severity": Severity.WARNING, "expr": "up == 0", "hold": "1m",
             "summary": "Thing down: {{ $labels.instance }}",
             "description": "{{ $labels.instance }} is so.", "panel": PanelRef("overview", "x")}  # fmt: skip
    return given | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Thing"},
        {"name": "VLLM" + "A" * 40},
        {"summary": "Names no label"},
        {"summary": "Thing down: {{ $labels.instance }}".ljust(121, "!")},
        {"description": "{{ $labels.instance }} is so.".rjust(401)},
        {"description": "names no label"},
        {"hold": "soon"},
    ],
)
def test_an_alert_that_would_not_work_at_night_cannot_be_made(changes):
    with pytest.raises(ValueError, match=r"VLLM|Thing"):
        Alert(**good(**changes))


def test_links_can_lead_to_a_teams_own_addresses():
    rule = Alert(**good()).as_rule(Links("https://wiki/rb/", "https://grafana"))
    assert f"https://wiki/rb/VLLMThing{LABELS_QUERY}" == rule["annotations"]["runbook_url"]
    assert rule["annotations"]["dashboard_url"].startswith("https://grafana/d/vllm-watch-overview")


def test_a_threshold_needs_a_reason_and_a_record_its_shape():
    with pytest.raises(ValueError, match="reason"):
        Threshold("x", 1, Unit.SECONDS, "", "x")
    with pytest.raises(ValueError, match="level:metric:operations"):
        Recording("vllm:a", "up", "targets that answered")
    with pytest.raises(ValueError, match="what it holds"):
        Recording("job:up:sum", "up", "")
