"""Errors by HTTP status on the captured pages of real engines: a day of normal traffic is silent on the real promtool,
and the same day with one failure in thirty is not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from alerts import printer
from alerts.registry import RECORDINGS, alerts
from exporters.catalogue import exposition_parser, promql_ast, vllm

GOLDEN = Path(__file__).parents[1] / "golden"
PAGES = {path.stem: exposition_parser.parse(path.read_text()) for path in sorted(GOLDEN.glob("*.prom"))}
SERVING = [name for name, page in PAGES.items() if page.of(vllm.HTTP_REQUESTS.name)]
BY_STATUS = ("VLLMHTTPErrorRatioHigh", "VLLMSuccessBudgetBurn", "VLLMSuccessBudgetSlowBurn")
RECORDED = {recording.record: recording.expr for recording in RECORDINGS}
STEP_S, DAY_S = 60, 86400
EVALUATED_S = 120
SHORT_S = 3600  # enough to fire


def rests_on(names: set[str]) -> set[str]:
    """Return these recorded series and those that they read in turn."""
    read = {name for record in names for name in promql_ast.names(RECORDED[record])} & RECORDED.keys()
    return names | (rests_on(read) if read else set())


def needed_rules() -> list[Mapping[str, object]]:
    """Return the groups of the printed rules, reduced to what the alerts by status need."""
    read = {name for alert in alerts() if alert.name in BY_STATUS for name in promql_ast.names(alert.expr)}
    wanted = {*BY_STATUS, *rests_on(read & RECORDED.keys())}
    groups = [group for _, text in printer.rule_files() for group in yaml.safe_load(text)["groups"]]
    narrowed = [
        {**group, "rules": [rule for rule in group["rules"] if rule.get("alert", rule.get("record")) in wanted]}
        for group in groups
    ]
    return [group for group in narrowed if group["rules"]]


def a_day(name: str, provoked_again: bool = False, failing: float = 0.0) -> dict[str, str]:
    """Return a page's series that count errors, over a day in which all that was captured comes again every minute, in
    a cluster that is named like the page.

    provoked_again: also the captured 5xx and rejections, which the captures provoked. failing: share of the good
    responses that comes as 5xx beside them."""
    steps, series, good = DAY_S // STEP_S, {}, 0.0
    for metric in (vllm.HTTP_REQUESTS, vllm.NUM_REQUESTS_RUNNING, vllm.ADMISSION_REJECTIONS):
        for labels, value in PAGES[name].of(metric.name):
            provoked = metric is vllm.ADMISSION_REJECTIONS or labels.get("status") == "5xx"
            grows = 0.0 if metric is vllm.NUM_REQUESTS_RUNNING or (provoked and not provoked_again) else value
            good += grows * (labels.get("status") == "2xx")
            series[series_name(name, metric.name, labels)] = f"{value:g}+{grows:g}x{steps}"
    if failing:
        labels = {"handler": "/v1/embeddings", "method": "POST", "status": "5xx"}
        series[series_name(name, vllm.HTTP_REQUESTS.name, labels)] = f"0+{good * failing:g}x{steps}"
    return series


def series_name(page: str, name: str, labels: Mapping[str, str]) -> str:
    scraped = {"cluster": page, "job": "vllm", "instance": "10.0.0.1:8000", **labels}
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in scraped.items()) + "}"


def promtool_says(part, folder: Path, series: Mapping[str, str], until_s: int = DAY_S) -> str:
    """Return what promtool finds if every alert by status is expected to be silent, every five minutes."""
    (folder / "rules.yaml").write_text(json.dumps({"groups": needed_rules()}))
    test = {
        "rule_files": [str(folder / "rules.yaml")],
        "evaluation_interval": f"{EVALUATED_S}s",
        "tests": [
            {
                "interval": f"{STEP_S}s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{at}s", "alertname": alert, "exp_alerts": []}
                    for alert in BY_STATUS
                    for at in range(0, until_s + 1, EVALUATED_S)
                ],
            }
        ],
    }
    (folder / "test.yaml").write_text(json.dumps(test))
    command = [part("promtool").path, "test", "rules", folder / "test.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_pages_of_every_release_have_responses():
    assert {"0.10.2", "0.20.2", "0.32.0"} == {name.split("-")[0] for name in SERVING}


@pytest.mark.prometheus
def test_a_day_of_normal_pages_is_silent(part, tmp_path):
    everything = {series: values for name in SERVING for series, values in a_day(name).items()}
    assert "" == promtool_says(part, tmp_path, everything)


@pytest.mark.prometheus
def test_rejections_by_the_engines_own_limit_are_silent(part, tmp_path):
    """98 of the 241 captured chats that ended with 2xx or 5xx are such rejections."""
    rejecting = a_day("0.32.0-reject-after-load", provoked_again=True)
    assert "" == promtool_says(part, tmp_path, rejecting, SHORT_S)


@pytest.mark.prometheus
def test_one_failure_in_thirty_fires_on_every_page(part, tmp_path):
    everything = {series: values for name in SERVING for series, values in a_day(name, failing=1 / 30).items()}
    said = promtool_says(part, tmp_path, everything, SHORT_S)
    assert set(BY_STATUS) == {alert for alert in BY_STATUS if f"alertname: {alert}" in said}
    assert all(f'cluster=\\"{name}\\"' in said or f'cluster="{name}"' in said for name in SERVING)
