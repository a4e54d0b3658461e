"""The export for grafana.com: what its importer replaces, and what a dashboard's page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dashboards import grafana_com
from dashboards.grafana_json import to_json
from dashboards.registry import BOARDS
from stack import cli

WIKI = "https://wiki.example.org/vllm"


def export(folder: Path, *more: str) -> Result:
    command = ["dashboards", "export", "--format", "grafana.com", "--out", str(folder), *more]
    return CliRunner().invoke(cli.main, command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("upload")
    done = export(made, "--runbook-base", WIKI)
    assert 0 == done.exit_code, done.output
    return made


def imported(text: str, answers: dict[str, str]) -> Any:
    """Return the dashboard as Grafana's importer makes it: each ${NAME} of an input becomes the answer."""
    content = json.loads(text)
    named = {one["name"] for one in content.pop("__inputs")}
    assert named == set(answers)
    content.pop("__requires"), content.pop("__elements")
    replaced = re.sub(r"\$\{(\w+)\}", lambda m: answers.get(m[1], m[0]), json.dumps(content))
    return json.loads(replaced)


def test_each_dashboard_has_its_json_and_its_description(folder: Path) -> None:
    expected = {f"{board.slug}.{kind}" for board in BOARDS for kind in ("json", "md")}
    assert expected == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.slug)
def test_import_only_chooses_the_data_source(folder: Path, board: Any) -> None:
    """Apart from that the dashboard is the one of the plain export, whose panels read the variable."""
    found = imported((folder / f"{board.slug}.json").read_text(), {grafana_com.INPUT: "uid-1"})
    chosen = [one for one in found["templating"]["list"] if one["type"] == "datasource"]
    assert ["uid-1"] == [one["current"]["value"] for one in chosen]
    plain = json.loads((folder / f"{board.slug}.json").read_text())
    sources = set(re.findall(r'"uid": "(\$\{\w+\})"', json.dumps(plain["panels"])))
    assert {"${datasource}"} == sources
    for one in chosen:
        one["current"] = {}
    from alerts.rules import Links

    assert json.loads(to_json(board, links=Links(runbooks=WIKI))) == found


def test_required_panel_types_are_those_used(folder: Path) -> None:
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        used = set(
            re.findall(r'"type": "(timeseries|stat|table|heatmap|text|bargauge|gauge)"', json.dumps(content["panels"]))
        )
        required = {one["id"] for one in content["__requires"] if one["type"] == "panel"}
        assert used == required, path.name
        assert None is content["id"]


def test_description_names_needs_and_every_panel(folder: Path) -> None:
    for board in BOARDS:
        text = (folder / f"{board.slug}.md").read_text()
        assert text.splitlines()[1:4] == [f"# {board.title}", "", board.question]
        assert [] == [p.title for row in board.rows for p in row.panels if f"- **{p.title}**: {p.means}" not in text]
    assert "- the gateway (vllm-watch gateway run)" in (folder / "gateway.md").read_text()
    assert "gateway run" not in (folder / "kv-cache.md").read_text()


def test_nothing_leads_to_this_machine(folder: Path) -> None:
    assert [] == [path.name for path in folder.iterdir() if "127.0.0.1" in path.read_text()]


def test_upload_needs_an_address_for_runbooks(tmp_path: Path) -> None:
    done = export(tmp_path)
    assert 2 == done.exit_code
    assert "--format grafana.com needs --runbook-base" in done.output


def test_only_our_files_are_replaced(tmp_path: Path) -> None:
    """A second export replaces the first; a description that somebody wrote stays."""
    assert 0 == export(tmp_path, "--runbook-base", WIKI).exit_code
    assert 0 == export(tmp_path, "--runbook-base", "https://other.example.org").exit_code
    (tmp_path / "overview.md").write_text("# Mine\n")
    assert 2 == export(tmp_path, "--runbook-base", WIKI).exit_code
    assert "# Mine\n" == (tmp_path / "overview.md").read_text()
