"""The jsonnet mixin equals the generated files, and its `_config` does what the options of the exports do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from alerts import printer
from alerts.rules import Links
from dashboards.grafana_json import to_json
from dashboards.publish_plan import with_datasource
from dashboards.registry import BOARDS
from stack import cli
from stack.lab.install import InstalledPart
from stack.root import ROOT

SHOWN = "{ dashboards: m.grafanaDashboards, alerts: m.prometheusAlerts, rules: m.prometheusRules }"
ELSEWHERE = Links("https://wiki.example.org/vllm", "https://grafana.example.org")


@pytest.fixture(scope="module")
def evaluate(part: Callable[[str], InstalledPart]) -> Callable[..., Any]:
    """Evaluate a mixin with jsonnet; returns its dashboards, alerts and recording rules."""
    program = part("jsonnet").path

    def evaluated(folder: Path, config: str = "{}") -> Any:
        code = f"local m = (import 'mixin.libsonnet') + {{ _config+:: {config} }}; {SHOWN}"
        done = subprocess.run([program, "-e", code], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return evaluated


def groups(*names: str, links: Links | None = None) -> list[Any]:
    files = dict(printer.rule_files(links))
    return [group for name in names for group in yaml.safe_load(files[name])["groups"]]


ALERT_FILES = tuple(printer.FILES.values())


def test_mixin_equals_the_generated_files(evaluate: Callable[..., Any]) -> None:
    found = evaluate(ROOT / "dashboards")
    assert {path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards/json").glob("*.json")} == found[
        "dashboards"
    ]
    generated = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "alerts/prometheus").glob("*.yaml")}
    assert generated.pop("recording.yaml") == found["rules"]
    assert [group for name in ALERT_FILES for group in generated.pop(name)["groups"]] == found["alerts"]["groups"]
    assert {} == generated


@pytest.fixture(scope="module")
def configured(evaluate: Callable[..., Any]) -> Any:
    """The mixin with every option. A trailing slash of an address changes nothing."""
    return evaluate(
        ROOT / "dashboards",
        f"""{{ runbookBase: '{ELSEWHERE.runbooks}/', dashboardBase: '{ELSEWHERE.dashboards}',
        datasource: {{ name: 'Mimir', uid: 'abc' }}, tags: ['ai'], alertLabels: {{ team: 'ml' }} }}""",
    )


def test_config_does_what_the_options_of_the_exports_do(configured: Any) -> None:
    found = configured
    for board in BOARDS:
        wanted = with_datasource(json.loads(to_json(board, links=ELSEWHERE)), "Mimir", "abc")
        wanted["tags"].append("ai")
        assert wanted == found["dashboards"][f"{board.slug}.json"]
    alerts = groups(*ALERT_FILES, links=ELSEWHERE)
    for group in alerts:
        for rule in group["rules"]:
            rule["labels"]["team"] = "ml"
    assert alerts == found["alerts"]["groups"]
    assert groups("recording.yaml") == found["rules"]["groups"]


def test_exported_mixin_needs_nothing_else(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    """A second export replaces the first; the options become the defaults of `_config`."""
    command = ["dashboards", "export", "--format", "mixin", "--out", str(tmp_path)]
    for _ in range(2):
        done = CliRunner().invoke(cli.main, [*command, "--runbook-base", ELSEWHERE.runbooks])
        assert 0 == done.exit_code, done.output
    found = evaluate(tmp_path)
    assert groups(*ALERT_FILES, links=Links(ELSEWHERE.runbooks)) == found["alerts"]["groups"]
    assert {f"{board.slug}.json" for board in BOARDS} == set(found["dashboards"])
    assert json.loads(to_json(BOARDS[0], links=ELSEWHERE)) == found["dashboards"][f"{BOARDS[0].slug}.json"]


@pytest.mark.prometheus
def test_promtool_accepts_the_rules_of_the_mixin(
    configured: Any, part: Callable[[str], InstalledPart], tmp_path: Path
) -> None:
    for name in ("alerts", "rules"):
        (tmp_path / f"{name}.json").write_text(json.dumps(configured[name]))
    done = subprocess.run(
        [part("promtool").path, "check", "rules", *sorted(tmp_path.glob("*.json"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
