"""Boards into a Grafana: as files, and through both of its APIs. The Grafana is FakeGrafana (its docstring says what it
stands on)."""

from __future__ import annotations

import functools
import http.server
import json
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from alerts.panel_ref import board_uid
from alerts.registry import ALERTS
from dashboards import data_sources, grafana_client, publish_plan
from dashboards.model import Profile
from dashboards.publish_plan import Changes, Create, Difference, Existing, Refuse, Skip, Update
from dashboards.registry import BOARDS, boards
from stack import cli
from stack.cli import dashboards as commands
from tests.support.fake_grafana import EDITOR, LOGIN, VIEWER, FakeGrafana, Stored, source
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SECRETS = (EDITOR, VIEWER, "correct horse", "Y29ycmVjdCBob3JzZQ")
UIDS = [board_uid(board.slug) for board in BOARDS[:2]]
FIRST = UIDS[0]
APIS = ("10.4.0", "13.2.0")  # the older and the newer one; which of them a release gets has a test of its own


PRINTED = functools.cache(commands.printed_boards)  # printing boards takes longer than pushing them


def two(*arguments: Any) -> dict[str, str]:
    """Two boards stand for all of them, except where a test is about all of them."""
    return dict(list(PRINTED(*arguments).items())[:2])


@pytest.fixture(autouse=True)
def _ground(monkeypatch):
    """urllib heeds the proxies of the environment, which would not find our loopback."""
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setattr(commands, "printed_boards", two)


@pytest.fixture
def every_board(_ground, monkeypatch):
    monkeypatch.setattr(commands, "printed_boards", PRINTED)


def run(*arguments: str | Path, token: str | None = EDITOR) -> Result:
    """The real command; no secret is ever in what it prints."""
    result = CliRunner().invoke(cli.main, ["dashboards", *map(str, arguments)], env={"GRAFANA_TOKEN": token})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not [secret for secret in SECRETS if secret in result.output]
    return result


def push(fake: FakeGrafana, *more: str | Path, token: str | None = EDITOR) -> Result:
    return run("push", "--grafana", fake.url, *more, token=token)


def report(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(result.stdout)
    return told


@pytest.fixture(params=APIS)
def each(request) -> Iterator[FakeGrafana]:
    with FakeGrafana(request.param) as fake:
        fake.alerts = [alert.name for alert in ALERTS]
        yield fake


@pytest.fixture
def fake() -> Iterator[FakeGrafana]:
    with FakeGrafana() as one:
        one.alerts = [alert.name for alert in ALERTS]
        yield one


@pytest.fixture
def newer() -> Iterator[FakeGrafana]:
    with FakeGrafana("13.2.0") as one:
        one.alerts = [alert.name for alert in ALERTS]
        yield one


# ---- deciding

PANEL = {
    "id": 1,
    "title": "Queue",
    "type": "timeseries",
    "gridPos": {"x": 0, "y": 0, "w": 8, "h": 7},
    "targets": [{"expr": "a", "refId": "A"}],
}
BOARD = {
    "uid": "vllm-watch-x",
    "title": "X",
    "tags": ["vllm-watch"],
    "schemaVersion": 39,
    "id": None,
    "version": 1,
    "panels": [PANEL],
}


def other(**changed: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(BOARD)), **changed}


@pytest.mark.parametrize(
    ("expected", "existing", "force"),
    [
        (Create(), None, False),
        (Skip(), Existing(BOARD), False),
        (
            Skip(),
            Existing(
                other(schemaVersion=42, version=9, id=4, timepicker={"time_options": ["5m"]}, preload=False, links=[])
            ),
            False,
        ),
        (Update(Changes(changed=(Difference("", "title", "Y", "X"),))), Existing(other(title="Y")), False),
        (Skip(), Existing(BOARD, managed="a provisioned file"), False),
    ],
    ids=["absent", "equal", "equal but for what Grafana adds", "another title", "equal and provisioned"],
)
def test_what_to_do_about_a_board(expected, existing, force):
    assert expected == publish_plan.plan(existing, BOARD, force)


def test_a_foreign_board_under_our_uid_is_refused_until_forced():
    existing = Existing(other(tags=["theirs"], title="Their board"))
    refused = publish_plan.plan(existing, BOARD)
    assert isinstance(refused, Refuse)
    assert "'Their board'" in refused.why
    assert "--force" in refused.why
    assert isinstance(publish_plan.plan(existing, BOARD, force=True), Update)


def test_a_provisioned_board_is_refused_even_when_forced():
    """Grafana answers 400 to whoever saves it; the file is the place to change."""
    decided = publish_plan.plan(
        Existing(other(title="Y"), managed="Grafana reads it from a provisioned file"), BOARD, force=True
    )
    assert isinstance(decided, Refuse)
    assert "change it there" in decided.why


def test_differences_are_named_by_panel_and_field():
    changed = {
        **PANEL,
        "targets": [{"expr": "b", "refId": "A"}],
        "thresholds": {"steps": [{"color": "green", "value": None}]},
    }
    gone = {"id": 3, "title": "Gone", "type": "stat"}
    new = {"id": 2, "title": "New", "type": "stat"}
    row = {"id": 9, "title": "More", "type": "row", "collapsed": True}
    was = other(panels=[PANEL, {**row, "panels": [gone]}])
    now = other(panels=[changed, {**row, "panels": [new]}], refresh="30s")
    expected = Changes(
        added=("New",),
        removed=("Gone",),
        changed=(
            Difference("", "refresh", None, "30s"),
            Difference("Queue", "targets[0].expr", "a", "b"),
            Difference("Queue", "thresholds", None, {"steps": [{"color": "green"}]}),
        ),
    )
    assert expected == publish_plan.differences(was, now)


def test_order_is_nothing_but_place_is_something():
    """Grafana sorts panels as it stores them; a panel that moves into a row has changed."""
    second = {**PANEL, "id": 2, "title": "Second"}
    assert not publish_plan.differences(other(panels=[PANEL, second]), other(panels=[second, PANEL]))
    row = {"id": 9, "title": "More", "type": "row", "collapsed": True}
    moved = publish_plan.differences(
        other(panels=[PANEL, {**row, "panels": []}]), other(panels=[{**row, "panels": [PANEL]}])
    )
    assert (Difference("Queue", "in row", None, "More"),) == moved.changed


def test_the_scrape_interval_is_read_from_samples():
    """The median: a late scrape, a restart or a young engine does not make it another interval."""
    assert 30 == data_sources.interval_s(
        [{"values": [[0, "1"], [30, "1"], [60, "1"], [90, "1"], [300, "1"], [330.5, "1"]]}]
    )
    assert data_sources.interval_s([{"values": [[0, "1"]]}, {}]) is None


@pytest.mark.parametrize(
    ("expected", "text"), [(15, "15s"), (60, "1m"), (30, ">30s"), (0.5, "500ms"), (20, "20"), (None, "$interval")]
)
def test_durations_as_grafana_writes_them(expected, text):
    assert expected == data_sources.duration_s(text)


# ---- export


@pytest.mark.usefixtures("every_board")
def test_import_export_writes_every_board(tmp_path):
    """Export for import writes every board ready for the dialog."""
    result = run("export", "--out", tmp_path / "out", "--runbook-base", "https://wiki.example/vllm")
    assert 0 == result.exit_code
    assert {f"{board.slug}.json" for board in boards()} == {path.name for path in (tmp_path / "out").iterdir()}
    board = json.loads((tmp_path / "out" / "overview.json").read_text())
    assert (True, None, ["vllm-watch"]) == (board["editable"], board["id"], board["tags"])
    assert "__inputs" not in board
    assert {"name": "datasource", "type": "datasource", "current": {}}.items() <= board["templating"]["list"][0].items()
    assert "https://wiki.example/vllm/" in json.dumps(board)


def test_provisioning_export_writes_the_provider(tmp_path):
    """Export for provisioning writes the provider and says what to mount where."""
    result = run("export", "--out", tmp_path, "--format", "provisioning", "--path", "/boards: all")
    (one,) = yaml.safe_load((tmp_path / "vllm-watch.yaml").read_text())["providers"]
    assert ("vLLM", "vllm-watch", "/boards: all", False) == (
        one["folder"],
        one["folderUid"],
        one["options"]["path"],
        one["allowUiUpdates"],
    )
    assert json.loads((tmp_path / "overview.json").read_text())["editable"] is False
    assert f"mount {tmp_path} at /boards: all" in result.output
    assert "/etc/grafana/provisioning/dashboards/vllm-watch.yaml" in result.output
    assert "timeInterval" in result.output


def test_provider_names_the_folder_without_a_path(tmp_path):
    """The provider names the folder itself where no path is given."""
    run("export", "--out", tmp_path, "--format", "provisioning")
    (one,) = yaml.safe_load((tmp_path / "vllm-watch.yaml").read_text())["providers"]
    assert str(tmp_path.resolve()) == one["options"]["path"]


def test_a_second_export_changes_nothing(tmp_path):
    run("export", "--out", tmp_path, "--format", "provisioning")
    again = json.loads(run("export", "--out", tmp_path, "--format", "provisioning", "--json").stdout)
    assert {False} == {file["changed"] for file in again["files"]}
    assert [] == again["left_over"]


@pytest.mark.parametrize("foreign", ['{"title": "mine", "tags": []}', "[1]", "no JSON", b"\xff"])
def test_export_overwrites_no_foreign_file(tmp_path, foreign):
    """Nothing else is written either: half an export helps nobody."""
    mine = tmp_path / "overview.json"
    mine.write_bytes(foreign if isinstance(foreign, bytes) else foreign.encode())
    before = mine.read_bytes()
    refused = run("export", "--out", tmp_path, "--format", "provisioning")
    assert 2 == refused.exit_code
    assert str(mine) in refused.output
    assert "--force" in refused.output
    assert [mine] == list(tmp_path.iterdir())
    assert before == mine.read_bytes()
    assert 0 == run("export", "--out", tmp_path, "--force").exit_code
    assert before != mine.read_bytes()


def test_export_names_boards_of_an_earlier_export(tmp_path):
    """Export names boards of an earlier export and leaves foreign ones alone."""
    (tmp_path / "old.json").write_text('{"tags": ["vllm-watch"]}')
    (tmp_path / "theirs.json").write_text('{"tags": ["node"]}')
    result = run("export", "--out", tmp_path)
    assert f"remove it: {tmp_path / 'old.json'}\n" in result.output
    assert "theirs.json" not in result.output


def test_runbook_link_target_is_mentioned(tmp_path):
    """The default is this machine, which is right on this machine alone."""
    assert "--runbook-base" in run("export", "--out", tmp_path).output
    assert "--runbook-base" not in run("export", "--out", tmp_path, "--runbook-base", "https://wiki.example").output


@pytest.mark.usefixtures("every_board")
def test_the_engine_profile_holds_its_boards_alone(tmp_path):
    run("export", "--out", tmp_path, "--profile", "engine")
    assert {f"{board.slug}.json" for board in boards(Profile.ENGINE)} == {path.name for path in tmp_path.iterdir()}


def test_a_path_without_provisioning_is_a_wrong_option(tmp_path):
    assert 2 == run("export", "--out", tmp_path, "--path", "/x").exit_code


# ---- push


def test_first_push_makes_folder_and_boards(each):
    """A first push makes the folder and every board and prints where they are."""
    result = push(each)
    assert 0 == result.exit_code, result.output
    assert {"vllm-watch": "vLLM"} == each.folders
    assert set(UIDS) == set(each.boards)
    assert {"vllm-watch"} == {board.folder for board in each.boards.values()}
    assert all(board.notes["grafana.app/message"].startswith("vllm-watch ") for board in each.boards.values())
    assert all(f"{each.url}/d/{uid}" in result.output for uid in UIDS)
    assert "warning" not in result.output


def test_a_second_push_writes_nothing(each):
    push(each)
    each.writes.clear()
    result = push(each)
    assert 0 == result.exit_code
    assert [] == each.writes
    assert len(UIDS) == result.output.count("unchanged ")


@pytest.mark.usefixtures("every_board")
@pytest.mark.parametrize("profile", ["full", "engine"])
@pytest.mark.parametrize("version", ["10.4.0", "12.4.1"])
def test_boards_survive_a_push_and_pull(version, profile):
    """What Grafana 12 makes of our JSON as it stores it must not look like a change, or each push would save each board
    again."""
    with FakeGrafana(version) as fake:
        assert 0 == push(fake, "--profile", profile).exit_code
        assert {board_uid(board.slug) for board in boards(Profile(profile))} == set(fake.boards)
        fake.writes.clear()
        push(fake, "--profile", profile)
        assert [] == fake.writes


def test_dry_run_shows_the_difference_by_panel(each):
    """A dry run writes nothing and shows the difference by panel."""
    first = push(each, "--dry-run")
    assert "would be created" in first.output
    assert [] == each.writes
    push(each)
    each.writes.clear()
    spec = each.boards[FIRST].spec
    edited = next(panel for panel in spec["panels"] if panel["type"] == "stat")
    edited["title"], name = "Edited by hand", edited["title"]
    removed = next(panel for panel in spec["panels"] if panel["type"] == "timeseries")
    spec["panels"].remove(removed)
    spec["panels"].append({**removed, "id": 77, "title": "Theirs"})
    spec["time"] = {"from": "now-6h", "to": "now"}
    result = push(each, "--dry-run")
    assert "would be updated" in result.output
    assert f'~ panel {name}: title: "Edited by hand" -> "{name}"' in result.output
    assert f"+ panel {removed['title']}" in result.output
    assert "- panel Theirs" in result.output
    assert '~ board: time.from: "now-6h" -> "now-1h"' in result.output
    assert [] == each.writes


def test_a_change_made_by_hand_is_taken_back(each):
    push(each)
    each.boards[FIRST].spec["title"] = "Edited"
    told = report(push(each, "--json"))
    assert ["updated"] + ["unchanged"] * (len(UIDS) - 1) == [board["action"] for board in told["boards"]]
    assert boards()[0].title == each.boards[FIRST].spec["title"]
    assert 2 == each.boards[FIRST].version


def test_a_board_stays_in_the_folder_that_someone_moved_it_to(each):
    """Also at the root: nobody's order is undone silently, and an update without a folder would move it there."""
    push(each)
    for folder in ("elsewhere", ""):
        each.folders["elsewhere"] = "Elsewhere"
        each.boards[FIRST].folder, each.boards[FIRST].spec["title"] = folder, "Edited"
        result = push(each)
        assert 0 == result.exit_code, result.output
        assert folder == each.boards[FIRST].folder
        assert f"(stays in folder {folder or 'the root'})" in result.output


def test_foreign_board_under_our_uid_is_refused(each):
    """A foreign board under our uid is refused and the others are pushed."""
    each.boards[FIRST] = Stored({"title": "Theirs", "tags": ["x"], "panels": []})
    refused = push(each)
    assert 1 == refused.exit_code
    assert "refused" in refused.output
    assert "Theirs" == each.boards[FIRST].spec["title"]
    assert set(UIDS) == set(each.boards)
    assert 0 == push(each, "--force").exit_code
    assert "Theirs" != each.boards[FIRST].spec["title"]


def test_a_provisioned_board_is_explained_and_never_written(each):
    each.boards[FIRST] = Stored(
        {"title": "Ours, older", "tags": ["vllm-watch"], "panels": []}, provisioned="vllm/overview.json"
    )
    result = push(each, "--force")
    assert 1 == result.exit_code
    assert "provisioned file (vllm/overview.json)" in result.output
    assert "Ours, older" == each.boards[FIRST].spec["title"]


@pytest.mark.parametrize(
    ("expected", "version", "more"),
    [
        ("api/dashboards", "10.4.0", ()),
        ("api/dashboards", "11.6.0", ()),
        ("dashboard.grafana.app/v1beta1", "12.4.1", ()),
        ("dashboard.grafana.app/v1", "13.2.0", ()),
        ("api/dashboards", "13.2.0", ("--api", "older")),
    ],
)
def test_the_newest_stable_api_that_is_offered_is_used(expected, version, more):
    with FakeGrafana(version) as fake:
        told = report(push(fake, "--json", *more))
        assert (version, expected) == (told["version"], told["api"])
        wanted = "/api/dashboards/" if expected == "api/dashboards" else f"/apis/{expected}/namespaces/default/"
        assert {True} == {
            wanted in seen
            for seen in fake.seen
            if UIDS[0] in seen or (seen.startswith("POST") and "folders" not in seen)
        }


def test_an_api_that_is_not_there_cannot_be_asked_for(fake):
    result = push(fake, "--api", "newer")
    assert 2 == result.exit_code
    assert "Grafana 10.4.0" in result.output


def test_the_namespace_of_another_organisation_is_used():
    with FakeGrafana("12.4.1", namespace="stacks-42") as fake:
        assert 0 == push(fake).exit_code
        assert any("/namespaces/stacks-42/" in path for _, path in fake.writes)


def test_hidden_namespace_asks_for_the_organisation():
    """A server that does not tell its namespace is asked for its organisation."""
    with FakeGrafana("12.4.1", namespace="org-3") as fake:
        fake.tells_namespace, fake.organisation = False, 3
        assert 0 == push(fake).exit_code
        assert any("/namespaces/org-3/" in path for _, path in fake.writes)


def test_an_update_brings_back_what_others_noted(newer):
    """Annotations of other tools stay; managedFields do not travel."""
    push(newer)
    newer.boards[FIRST].notes["example.com/owner"] = "them"
    newer.boards[FIRST].spec["title"] = "Edited"
    push(newer)
    assert "them" == newer.boards[FIRST].notes["example.com/owner"]
    assert "managedFields" not in newer.bodies[-1]["metadata"]
    assert not {"id", "uid", "version"} & set(newer.bodies[-1]["spec"])


def test_folder_is_found_by_title_or_uid(fake):
    """A folder is found by title or uid and made only when needed."""
    fake.folders = {"abc": "Serving"}
    push(fake, "--folder", "Serving")
    assert {"abc": "Serving"} == fake.folders
    assert "abc" == fake.boards[FIRST].folder
    fake.boards.clear()
    push(fake, "--folder", "abc")
    assert {"abc": "Serving"} == fake.folders
    push(fake)
    assert {"abc": "Serving"} == fake.folders, "every board is there already, so no folder is needed"


def test_our_folder_may_be_renamed_in_grafana(fake):
    push(fake)
    fake.folders["vllm-watch"] = "Language models"
    fake.boards.clear()
    assert 0 == push(fake).exit_code
    assert {"vllm-watch": "Language models"} == fake.folders


@pytest.mark.parametrize("named", ["\u904b\u7528", "Platform engineering production, all clusters in the US", "ops-1"])
def test_no_two_titles_meet_in_one_folder(fake, named):
    """Rights hang on folders: a board must never land in another one because of how its title is written."""
    for title in ("\u76e3\u8996", "Platform engineering production, all clusters in the EU", "Ops 1"):
        push(fake, "--folder", title)
        fake.boards.clear()
    assert 0 == push(fake, "--folder", named).exit_code
    assert named == fake.folders[fake.boards[FIRST].folder]


def test_a_board_that_may_not_be_read_stops_no_other(each):
    each.hidden = {FIRST}
    result = push(each)
    assert 1 == result.exit_code
    assert "dashboards:read" in result.output
    assert set(UIDS) - {FIRST} == set(each.boards)


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_somebody_saving_meanwhile_is_not_undone(each, more):
    push(each)
    each.boards[FIRST].spec["title"] = "Edited"

    def save() -> None:
        each.boards[FIRST].version += 1

    each.before_write = save
    result = push(each, *more)
    assert 1 == result.exit_code
    assert "somebody saved" in result.output
    assert "Edited" == each.boards[FIRST].spec["title"]
    assert 1 == len([path for method, path in each.writes[len(UIDS) + 1 :]]), "no write is tried twice"


def test_a_name_that_is_taken_is_explained(fake):
    fake.folders["vllm-watch"] = "vLLM"
    fake.boards["theirs"] = Stored({"title": boards()[0].title, "panels": []}, folder="vllm-watch")
    result = push(fake)
    assert 1 == result.exit_code
    assert f"called {boards()[0].title!r} " in result.output
    assert "another --folder" in result.output


# ---- data source


def test_the_boards_open_with_the_data_source_that_was_named(fake):
    fake.sources.append(source("other", "Other Prometheus", "15s"))
    push(fake, "--datasource", "Other Prometheus")
    expected = {"text": "Other Prometheus", "value": "other", "selected": True}
    assert expected == fake.boards[FIRST].spec["templating"]["list"][0]["current"]
    fake.writes.clear()
    push(fake, "--datasource", "other")
    assert [] == fake.writes, "by name or by uid is the same"


def test_unknown_data_source_lists_the_existing(fake):
    """An unknown data source is told with those that there are."""
    fake.sources.append(source("loki", "Logs", None, kind="loki"))
    result = push(fake, "--datasource", "Logs")
    assert 2 == result.exit_code
    assert re.search(r"\bLogs\b.*: Prometheus$", result.output, re.MULTILINE)
    assert [] == fake.writes


@pytest.mark.parametrize(
    ("intervals", "harm", "believed", "real"),
    [
        (["15s", "60s"], "stay empty", "15s", 60),
        (["15s", "30s"], "stay empty", None, 30),
        (["60s", "15s"], "coarser", "1m", 15),
        (None, None, "30s", 30),
        (None, None, None, 15),
    ],
    ids=["too short", "unset is 15s", "too long", "equal", "unset and right"],
)
def test_a_wrong_time_interval_is_told_with_what_goes_wrong(intervals, harm, believed, real):
    with FakeGrafana(time_interval=believed, scraped_every_s=real) as fake:
        fake.alerts = [alert.name for alert in ALERTS]
        warnings = report(push(fake, "--json"))["warnings"]
        assert bool(intervals) == bool(warnings)
        if intervals:
            assert intervals == re.findall(r"every (\d+s)", warnings[0])
            assert harm in warnings[0]
            assert warnings[0].endswith(f"timeInterval to {real}s")


def test_rules_that_are_not_loaded_are_named(fake):
    missing = fake.alerts.pop()
    (warning,) = report(push(fake, "--json"))["warnings"]
    assert f"missing: {missing}" in warning
    fake.alerts.clear()
    (warning,) = report(push(fake, "--json"))["warnings"]
    assert f"none of our {len(ALERTS)} alerts" in warning
    assert "rule_files" in warning


def test_engine_profile_is_advised_without_a_sidecar(fake):
    """Without the sidecar the engine profile is advised and then not asked for."""
    fake.has_sidecar = False
    (warning,) = report(push(fake, "--json"))["warnings"]
    assert "--profile engine" in warning
    assert [] == report(push(fake, "--json", "--profile", "engine"))["warnings"]


def test_a_prometheus_without_vllm_is_told(fake):
    fake.has_engine = False
    (warning,) = report(push(fake, "--json"))["warnings"]
    assert warning.startswith("Prometheus ")
    assert "no series of" in warning


def test_what_cannot_be_checked_is_said_and_stops_nothing(fake):
    fake.proxied = False
    result = push(fake)
    assert 0 == result.exit_code
    assert 3 == result.output.count("could not check")
    assert "datasources:query" in result.output
    assert set(UIDS) == set(fake.boards)


def test_grafana_without_prometheus_gets_a_warning(fake):
    """A Grafana without a Prometheus gets boards and a warning."""
    fake.sources = [source("loki", "Logs", None, kind="loki")]
    (warning,) = report(push(fake, "--json"))["warnings"]
    assert "Connections > Data sources" in warning
    assert set(UIDS) == set(fake.boards)


def test_who_may_not_list_data_sources_still_gets_the_checks(fake):
    """An Editor may query but not list; the settings of the front end name them."""
    fake.scraped_every_s = 60
    told = report(push(fake, "--json", "--dry-run", token=VIEWER))
    assert "Prometheus" == told["data_source"]
    assert ["15s", "60s"] == re.findall(r"every (\d+s)", told["warnings"][0])


@pytest.mark.prometheus
def test_the_checks_read_a_real_prometheus(part, free_port, tmp_path):
    """Scraped every second, which no timeInterval says; with our rules; with an engine's page and without a sidecar."""
    (tmp_path / "rules").symlink_to(ROOT / "alerts" / "prometheus")
    with answering(
        200, (GOLDEN / "0.32.0-before.prom").read_bytes(), **{"Content-Type": "text/plain; version=0.0.4"}
    ) as engine:
        jobs = f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ['{engine}']}}]}}]"
        config = (
            f"global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nrule_files: ['{tmp_path}/rules/*.yaml']\n{jobs}\n"
        )
        (tmp_path / "prometheus.yml").write_text(config)
        port = free_port()
        command = [
            part("prometheus").path,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
        ]
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"])
        try:
            with FakeGrafana() as fake:
                fake.prometheus = f"http://127.0.0.1:{port}"
                client, one = (
                    grafana_client.GrafanaClient(fake.url, f"Bearer {EDITOR}"),
                    data_sources.DataSource("prom", "Prometheus", 15.0),
                )
                warnings: list[str] = []

                def told() -> bool:
                    warnings[:] = data_sources.look(client, one)
                    return ["15s", "1s"] == re.findall(r"every (\d+s)", warnings[0])

                eventually(told, what="the interval in samples of Prometheus")
                assert 2 == len(warnings), warnings
                assert "the sidecar:" in warnings[1]
        finally:
            process.terminate()
            process.wait(60)


# ---- who asks


def test_a_token_comes_from_a_file_before_the_environment(fake, tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{EDITOR}\n")
    assert 0 == push(fake, "--token-file", file, token="glsa_wrong").exit_code


def test_a_password_comes_from_a_file(fake, tmp_path):
    file = tmp_path / "user"
    file.write_text(f"{LOGIN}\n")
    assert 0 == push(fake, "--user-file", file, token=None).exit_code


def test_there_is_no_option_that_takes_a_secret():
    """What stands in the command line can be read by everyone on the machine."""
    options = {option for parameter in commands.dashboards_push.params for option in parameter.opts}
    assert not options & {"--token", "--password", "--user", "--api-key"}


@pytest.mark.parametrize(("expected", "token"), [("accept this token", "glsa_old"), ("set GRAFANA_TOKEN", None)])
def test_a_wrong_or_missing_token_is_told_with_where_to_get_one(fake, expected, token):
    result = push(fake, token=token)
    assert 2 == result.exit_code
    assert expected in result.output
    assert "Service accounts" in result.output
    assert "glsa_old" not in result.output


def test_a_missing_permission_is_named(each):
    each.folders["vllm-watch"] = "vLLM"
    result = push(each, token=VIEWER)
    assert 1 == result.exit_code
    assert "the permission dashboards:create" in result.output
    each.folders.clear()
    assert "folders:create" in push(each, token=VIEWER).output


@pytest.mark.parametrize(
    ("expected", "option", "text"),
    [
        ("is empty", "--token-file", "\n"),
        ("one word;", "--token-file", "sec ret"),
        ("no line user:password", "--user-file", "secret"),
    ],
)
def test_a_file_that_holds_no_secret_is_told_without_its_content(fake, tmp_path, expected, option, text):
    file = tmp_path / "file"
    file.write_text(text)
    result = push(fake, option, file)
    assert 2 == result.exit_code
    assert str(file) in result.output
    assert expected in result.output
    assert "secret" not in result.output
    assert [] == fake.seen


def test_a_file_that_is_not_there_is_named(fake, tmp_path):
    result = push(fake, "--token-file", tmp_path / "none")
    assert 2 == result.exit_code
    assert f"{tmp_path / 'none'}: No such file" in result.output


# ---- what is no Grafana


@contextmanager
def answering(status: int, body: bytes = b"", tls: ssl.SSLContext | None = None, **headers: str) -> Iterator[str]:
    """A server that answers everything the same way; its host and port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value.format(path=self.path))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("expected", "status", "body", "headers"),
    [
        ("is no Grafana: /api/health answers 200 and no JSON", 200, b"<html>Welcome", {}),
        ("is no Grafana: /api/health answers 404 and no JSON", 404, b"not found", {}),
        ("is no Grafana: /api/health answers 200", 200, b'{"status": "ok"}', {}),
        ("is no Grafana: /api/health answers 200", 200, b"[]", {}),
        ("database is failing", 503, b'{"database": "failing", "version": "12.0.0"}', {}),
        ("answers 502 to GET /api/health", 502, b"<html>Bad gateway", {}),
        (
            "name that address: --grafana https://grafana.example/g\n",
            301,
            b"",
            {"Location": "https://grafana.example/g{path}"},
        ),
        ("set GRAFANA_TOKEN, or name a --token-file", 302, b"", {"Location": "/login"}),
        (
            "to https://sso.example/start: name the address",
            302,
            b"",
            {"Location": "https://sso.example/start?state=abc"},
        ),
        ("TLS: write https://", 400, b"Client sent an HTTP request to an HTTPS server.\n", {}),
    ],
    ids=[
        "a page",
        "nothing there",
        "another API",
        "a list",
        "sick",
        "proxy",
        "moved",
        "login",
        "single sign-on",
        "TLS",
    ],
)
def test_what_is_no_grafana_is_told_in_one_sentence(expected, status, body, headers):
    with answering(status, body, **headers) as place:
        result = run("push", "--grafana", f"http://{place}", token=None)
    assert 2 == result.exit_code
    assert expected in result.output
    assert 1 == result.output.count("\n")


def test_nobody_there(free_port):
    url = f"http://127.0.0.1:{free_port()}"
    result = run("push", "--grafana", url)
    assert 2 == result.exit_code
    assert re.search(rf"{url} .*: Connection refused;", result.output)


def test_an_answer_that_does_not_come_ends_the_wait():
    """A listening socket that nobody serves, and a short patience."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = grafana_client.GrafanaClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(grafana_client.GrafanaTrouble, match=r"within 0\.05 s\b"):
            client.ask("GET", "/api/health")


def test_tls_that_cannot_be_trusted_is_told_with_the_way_out(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", key, "-out",
            certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering(200, tls=context) as place:
        result = run("push", "--grafana", f"https://{place}")
    assert 2 == result.exit_code
    assert "cannot be trusted" in result.output
    assert "SSL_CERT_FILE" in result.output


def test_https_to_a_plain_server_is_told(fake):
    result = run("push", "--grafana", fake.url.replace("http:", "https:"))
    assert 2 == result.exit_code
    assert "plain HTTP write" in result.output


@pytest.mark.parametrize(
    ("expected", "url"),
    [
        ("is no address", "127.0.0.1:3000"),
        ("is no address", "file:///etc/passwd"),
        ("--user-file", "http://admin:s3cret@127.0.0.1:3000"),
    ],
)
def test_an_address_that_cannot_be_one(expected, url):
    result = run("push", "--grafana", url)
    assert 2 == result.exit_code
    assert expected in result.output
    assert "s3cret" not in result.output


def test_a_grafana_below_a_path_keeps_its_path():
    assert "http://h:3000/grafana" == grafana_client.address("http://h:3000/grafana/")


def test_the_report_is_plain_json(fake):
    told = report(push(fake, "--json", "--dry-run"))
    assert (True, "vllm-watch", False) == (told["dry"], told["folder"]["uid"], told["folder"]["exists"])
    assert ["created"] * len(UIDS) == [board["action"] for board in told["boards"]]
    assert asdict(Changes()) == {key: tuple(value) for key, value in told["boards"][0]["changes"].items()}
