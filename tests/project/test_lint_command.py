"""`vllm-watch lint`, the command that judges what we ship and dashboards of others."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from dashboards.grafana_json import to_json
from dashboards.registry import BOARDS
from stack.cli import main


def lint(*files: Path):
    return CliRunner().invoke(main, ["lint", *map(str, files)])


def test_what_is_shipped_is_in_order():
    result = lint()
    assert (0, "OK\n") == (result.exit_code, result.stdout), result.output


def test_a_fault_of_another_dashboard_is_named_with_its_rule(tmp_path):
    board = json.loads(to_json(BOARDS[0]))
    board["refresh"] = "1s"
    (tmp_path / "wrapped.json").write_text(json.dumps({"dashboard": board, "meta": {}}))
    result = lint(tmp_path / "wrapped.json")
    assert 1 == result.exit_code
    (fault,) = [line for line in result.stdout.splitlines() if line.endswith(" 30 s [board-refresh]")]
    assert fault.startswith(f"{board['uid']}: refresh is '1s'")


def test_a_file_that_is_no_dashboard_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("text")
    for name, told in (("list.json", "is no dashboard"), ("text.json", "is no JSON")):
        result = lint(tmp_path / name)
        assert 2 == result.exit_code
        assert told in result.output
