"""Alerts on differences between log and engines where two gateways have a log and a sidecar each, on the real
promtool."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from alerts import printer
from tests.support import alert_cases as cases
from tests.support.alert_cases import grows

pytestmark = pytest.mark.prometheus

COMPARED = ("VLLMEngineExceedsLog", "VLLMLogExceedsEngine")
MINUTES = 90
OTHER = {**cases.SIDECAR, "instance": "10.0.0.8:9401"}


def at_other(series: cases.Series) -> cases.Series:
    """Return the series as of the second sidecar."""
    here, there = (f'instance="{one["instance"]}"' for one in (cases.SIDECAR, OTHER))
    assert all(here in name for name in series)
    return {name.replace(here, there): values for name, values in series.items()}


def compared(missing: str = "0x90") -> cases.Series:
    """Return the comparison of both logs with the engines, by the first sidecar."""
    return cases.books(missing_in_log=missing, extra_in_log="0x90", engine=grows((90, 50)), log=grows((90, 50)))


ENGINE = cases.finished(stop=grows((90, 50)))
HALF, OTHER_HALF = cases.outcomes(ok=grows((90, 30))), at_other(cases.outcomes(ok=grows((90, 20))))
SCENES: dict[str, tuple[Mapping[str, str], str]] = {
    "the second gateway serves the rest": ({**ENGINE, **HALF, **OTHER_HALF, **compared()}, ""),
    "the second sidecar is silent, and nothing is settled": ({**ENGINE, **HALF, **compared()}, ""),
    "requests bypass both": (
        {**ENGINE, **HALF, **OTHER_HALF, **compared(missing=grows((40, 0), (50, 1)))},
        "VLLMEngineExceedsLog",
    ),
    "no sidecar compares, and both logs have all": ({**ENGINE, **HALF, **OTHER_HALF}, ""),
    "no sidecar compares, and one log is missing": ({**ENGINE, **HALF}, "VLLMEngineExceedsLog"),
}


def test_an_alert_fires_for_the_fleet_and_never_for_one_log(part, tmp_path: Path):
    """One promtool for all scenes; it names those that fail."""
    groups = [
        {**group, "rules": [rule for rule in group["rules"] if "record" in rule or rule["alert"] in COMPARED]}
        for _, text in printer.rule_files()
        for group in yaml.safe_load(text)["groups"]
    ]
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps({"groups": [group for group in groups if group["rules"]]}))
    scenes = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": f"{MINUTES}m",
                    "exp_samples": [{"labels": f'{{alertname="{expected}"}}', "value": 1}] if expected else [],
                }
            ],
        }
        for name, (series, expected) in SCENES.items()
    ]
    test = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": scenes}
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    done = subprocess.run(
        [part("promtool").path, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
