"""`vllm-watch alerts export`, `list` and `slo`: what they print is read by the real promtool and amtool, and a number
of one's own is everywhere."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from alerts import thresholds
from alerts.registry import ALERTS, RECORDINGS
from alerts.routing import RECEIVERS
from alerts.rules import LABELS_QUERY
from alerts.settings import Overrides
from exporters.catalogue import promql_ast
from stack import cli, config
from stack.lab.install import InstalledPart

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests/golden/0.32.0-before.prom"
SLO = ROOT / "alerts/slo.yaml"
RULES = ["info.yaml", "page.yaml", "recording.yaml", "ticket.yaml"]
ELSEWHERE = ("--runbook-base", "https://wiki.example/rb", "--dashboard-base", "https://grafana.example")


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.main, ["alerts", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def exported(folder: Path, *arguments: str | Path) -> Any:
    result = run("export", "--out", folder, "--json", *arguments)
    assert 0 == result.exit_code, result.output
    return json.loads(result.stdout)


def rules(path: Path) -> dict[str, dict[str, Any]]:
    """Rules of a file by name."""
    groups = yaml.safe_load(path.read_text())["groups"]
    return {rule.get("alert") or rule["record"]: rule for group in groups for rule in group["rules"]}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def promtool(part: Callable[[str], InstalledPart], *files: Path) -> None:
    command = [part("promtool").path, "check", "rules", "--lint=all", "--lint-fatal", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


# ---- export


def test_export_is_complete(tmp_path: Path) -> None:
    """Names tell them apart: a Prometheus that is given *.yaml sees rules only."""
    exported(tmp_path / "out")
    assert RULES == sorted(path.name for path in (tmp_path / "out").glob("*.yaml"))
    assert ["alertmanager.yml", "objectives.yml", "thresholds.yml"] == sorted(
        path.name for path in (tmp_path / "out").glob("*.yml")
    )
    found = [name for file in RULES for name in rules(tmp_path / "out" / file)]
    assert sorted([a.name for a in ALERTS] + [r.record for r in RECORDINGS]) == sorted(found)
    assert all(
        "vllm-watch alerts export (unchanged: " in path.read_text().splitlines()[0]
        for path in (tmp_path / "out").iterdir()
    )


@pytest.mark.prometheus
@pytest.mark.parametrize("receiver", RECEIVERS)
def test_promtool_and_amtool_accept_an_export(
    part: Callable[[str], InstalledPart], tmp_path: Path, receiver: str
) -> None:
    own = written(tmp_path / "own.yaml", "thresholds: {kv_cache_usage: 0.8}\nengine_job: 'llm-.*'\n")
    exported(tmp_path / "out", "--receiver", receiver, "--deadman", "--thresholds", own)
    promtool(part, *(tmp_path / "out").glob("*.yaml"))
    done = subprocess.run(
        [part("amtool").path, "check-config", tmp_path / "out/alertmanager.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_own_threshold_and_job_are_in_rules_and_list(tmp_path: Path) -> None:
    """A number and a job of one's own are in the rules and in the list."""
    own = written(tmp_path / "own.yaml", "thresholds: {kv_cache_usage: 0.8}\nengine_job: 'llm-.*'\n")
    exported(tmp_path / "out", "--thresholds", own)
    ticket = rules(tmp_path / "out/ticket.yaml")
    assert "> 0.8" in " ".join(ticket["VLLMKVCacheNearlyFull"]["expr"].split())
    assert 'job=~"llm-.*"' in ticket["VLLMEngineUnreachable"]["expr"]
    listed = json.loads(run("list", "--thresholds", own, "--json").stdout)
    number = next(row["threshold"] for row in listed["alerts"] if row["name"] == "VLLMKVCacheNearlyFull")
    assert ("kv_cache_usage", 0.8, 0.9, "80 %") == tuple(number[key] for key in ("name", "value", "default", "shown"))
    assert "kv_cache_usage = 0.8" in run("list", "--thresholds", own).stdout


def test_the_numbers_beside_an_export_give_the_same_export_again(tmp_path: Path) -> None:
    """They are the starting point for the next one, wherever they are read from."""
    own = written(tmp_path / "own.yaml", "thresholds: {kv_cache_usage: 0.8}\nsidecar_job: mine\n")
    exported(tmp_path / "one", "--thresholds", own)
    assert set(thresholds.ALL) == {
        thresholds.named(n) for n in config.load(tmp_path / "one/thresholds.yml", Overrides).thresholds
    }
    exported(
        tmp_path / "two", "--thresholds", tmp_path / "one/thresholds.yml", "--slo", tmp_path / "one/objectives.yml"
    )
    assert {path.name: path.read_text() for path in (tmp_path / "one").iterdir()} == {
        path.name: path.read_text() for path in (tmp_path / "two").iterdir()
    }


def test_edited_thresholds_are_used_and_kept(tmp_path: Path) -> None:
    """Numbers changed in place are used and kept when they are named."""
    exported(tmp_path)
    numbers = written(
        tmp_path / "thresholds.yml", re.sub(r"log_lag: 60\b", "log_lag: 90", (tmp_path / "thresholds.yml").read_text())
    )
    edited = numbers.read_text()
    refused = run("export", "--out", tmp_path)
    assert 2 == refused.exit_code
    assert f"--thresholds {numbers})" in refused.output
    exported(tmp_path, "--thresholds", numbers)
    assert edited == numbers.read_text()
    assert "> 90" in " ".join(rules(tmp_path / "ticket.yaml")["VLLMRequestLogLagging"]["expr"].split())


def test_second_export_changes_nothing(tmp_path: Path) -> None:
    """A second export changes nothing and an older one is named."""
    exported(tmp_path)
    run("slo", SLO, "--out", tmp_path)
    again = exported(tmp_path)
    assert {False} == {file["changed"] for file in again["files"]}
    assert [str(tmp_path / "slo.yaml")] == again["left_over"], "the same objectives would alert twice"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("page.yaml", "groups: []\n", "did not come from here"),
        ("alertmanager.yml", None, "was changed after it was printed"),
    ],
)
def test_foreign_or_edited_file_is_kept_unless_forced(tmp_path: Path, name: str, text: str | None, why: str) -> None:
    """A receiver that somebody has typed in is not lost by the next export; and half an export is never written."""
    if text is None:
        exported(tmp_path)
        text = (tmp_path / name).read_text() + "# our receiver\n"
    written(tmp_path / name, text)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    refused = run("export", "--out", tmp_path, *ELSEWHERE)
    assert (2, True) == (refused.exit_code, f"{tmp_path / name} {why}" in refused.output)
    assert before == {path: path.read_text() for path in tmp_path.iterdir()}
    assert 0 == run("export", "--out", tmp_path, "--force").exit_code
    assert text != (tmp_path / name).read_text()


def test_links_that_work_on_one_machine_alone_are_warned_of(tmp_path: Path) -> None:
    """On stderr, so that --json stays JSON, and in it."""
    result = run("export", "--out", tmp_path, "--json")
    told = json.loads(result.stdout)["warnings"]
    assert ["--runbook-base", "--dashboard-base"] == [re.findall(r"--\S+", warning)[0] for warning in told]
    assert all(warning in result.stderr for warning in told)
    assert [] == exported(tmp_path, *ELSEWHERE)["warnings"]
    assert (
        f"https://wiki.example/rb/VLLMEngineDown{LABELS_QUERY}"
        == rules(tmp_path / "page.yaml")["VLLMEngineDown"]["annotations"]["runbook_url"]
    )


def test_an_export_says_what_to_do_next(tmp_path: Path) -> None:
    told = " ".join(exported(tmp_path, "--receiver", "slack", "--secrets", "/etc/am")["next"])
    for word in (
        "promtool check rules",
        "amtool check-config",
        f"rule_files: [{tmp_path}/*.yaml]",
        "engine_job",
        "/etc/am/alertmanager_page",
    ):
        assert word in told
    assert "--receiver" in " ".join(exported(tmp_path / "none")["next"])
    assert "example.org" in " ".join(exported(tmp_path / "mail", "--receiver", "email")["next"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("thresholds: {kv_cache_usge: 0.8}", r"thresholds\.kv_cache_usge .*thresholds\.kv_cache_usage\b"),
        ("thresholds: {kv_cache_usage: 80}", r"kv_cache_usage: 80 .*\(0 to 1\)"),
        ("thresholds: {log_lag: 5, kv_cache_usage: high}", "thresholds.kv_cache_usage: Expected `float`, got `str`"),
        ("thresholds: {log_lag: .nan}", "log_lag: nan "),
        ("treshold: {log_lag: 5}", r"\btreshold .*\bthresholds\b"),
        ("thresholds: [log_lag]", "thresholds: Expected `object`, got `array`"),
        ("engine_job: 'vllm['", r"'vllm\[' .*regular expression"),
        ("thresholds: {", "invalid YAML"),
    ],
)
def test_a_mistake_in_the_numbers_is_one_sentence_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    own = written(tmp_path / "own.yaml", text)
    for command in (("export", "--out", tmp_path / "out"), ("list",)):
        result = run(*command, "--thresholds", own)
        assert 2 == result.exit_code
        assert str(own) in result.stderr
        assert re.search(fault, result.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("url", ["wiki.example", "ftp://wiki.example", "https://", "https://wiki/{{ .x }}"])
def test_what_is_no_web_address_is_refused(tmp_path: Path, url: str) -> None:
    """A template in it would be filled by Prometheus, and a name without https:// is no link."""
    result = run("export", "--out", tmp_path / "out", "--runbook-base", url)
    assert 2 == result.exit_code
    assert re.search(rf"{re.escape(url)} .*web address", result.stderr)


# ---- list


def test_the_list_names_every_alert_and_every_number() -> None:
    found = json.loads(run("list", "--json").stdout)
    assert [(a.name, a.labels["severity"], a.hold, a.title) for a in ALERTS] == [
        tuple(row[key] for key in ("name", "severity", "for", "summary")) for row in found["alerts"]
    ]
    assert [t.name for t in thresholds.ALL] == [row["name"] for row in found["thresholds"]]
    assert {"thresholds", "objectives"} == {row["threshold"]["set_in"] for row in found["alerts"] if row["threshold"]}
    shown = run("list").stdout
    for name in (*(a.name for a in ALERTS), *(t.name for t in thresholds.ALL)):
        assert f" {name} " in shown


# ---- objectives

CHAT = """\
period: 30d
objectives:
  - {name: Chat, latency: ttft, within_s: 1, objective: 0.95, why: Because., source: Us.}
"""


@pytest.mark.prometheus
def test_objectives_of_ones_own_become_rules_that_need_no_others(
    part: Callable[[str], InstalledPart], tmp_path: Path
) -> None:
    own = written(tmp_path / "own.yaml", CHAT)
    result = run("slo", own, "--page", PAGE, "--out", tmp_path / "out")
    assert 0 == result.exit_code, result.output
    found = rules(tmp_path / "out/slo.yaml")
    promtool(part, tmp_path / "out/slo.yaml")
    assert ["VLLMChatBudgetBurn", "VLLMChatBudgetSlowBurn"] == [name for name, rule in found.items() if "alert" in rule]
    read = set().union(*(promql_ast.names(rule["expr"]) for rule in found.values()))
    assert {name for name in read if not name.startswith("vllm")} == {
        name for name, rule in found.items() if "record" in rule
    }
    assert re.search("VLLMChatBudgetBurn .*runbook page", result.stderr)
    assert found == rules(written(tmp_path / "stdout.yaml", run("slo", own).stdout))
    groups = yaml.safe_load((tmp_path / "out/slo.yaml").read_text())["groups"]
    assert groups == json.loads(run("slo", own, "--json").stdout)["groups"]
    assert {"vllm-recorded-growth": "1m", "vllm-recorded-slo": "1m", "vllm-recorded-hours": "5m"} == {
        group["name"]: group["interval"] for group in groups if "interval" in group
    }


def test_own_objectives_replace_the_default_ones(tmp_path: Path) -> None:
    """Objectives of one's own stand in place of the default ones in an export."""
    own = written(tmp_path / "own.yaml", CHAT)
    told = exported(tmp_path / "out", "--slo", own, *ELSEWHERE)
    assert ["VLLMChatBudgetBurn", "VLLMChatBudgetSlowBurn"] == [warning.split()[0] for warning in told["warnings"]]
    page = rules(tmp_path / "out/page.yaml")
    assert "VLLMChatBudgetBurn" in page
    assert "VLLMTTFTBudgetBurn" not in page
    assert "VLLMChatBudgetSlowBurn" in (tmp_path / "out/alertmanager.yml").read_text(), (
        "the burn mutes the drain, as in the shipped ones"
    )
    assert (tmp_path / "out/objectives.yml").read_text().endswith(own.read_text())


@pytest.mark.parametrize(
    ("objective", "fault"),
    [
        (
            "{name: TTFT, latency: ttft, within: 2, objective: 0.99, why: x, source: y}",
            r"objectives\[0\]\.within .*within_s\b",
        ),
        ("{name: TTFT, latency: ttft, within_s: 2.5, objective: 99, why: x, source: y}", r"TTFT: objective 99 .*0\.99"),
        ("{name: TTFT, latency: tpot, within_s: 2.5, objective: 0.99, why: x, source: y}", "Invalid enum value 'tpot'"),
        ("{name: ttft, success: true, objective: 0.99, why: x, source: y}", "name 'ttft' .*capital"),
        ("{name: TTFT, latency: ttft, within_s: 2, objective: 0.99, why: x, source: y}", "no bucket bound"),
    ],
)
def test_objective_mistake_names_its_place(tmp_path: Path, objective: str, fault: str) -> None:
    """A mistake in the objectives is one sentence with its place."""
    own = written(tmp_path / "own.yaml", f"objectives: [{objective}]")
    result = run("slo", own, "--page", PAGE)
    assert 2 == result.exit_code
    assert str(own) in result.stderr
    assert re.search(fault, result.stderr)


def test_missing_bound_names_the_nearest(tmp_path: Path) -> None:
    """Prometheus would find no such bucket, and the objective would be silent for ever."""
    own = written(tmp_path / "own.yaml", CHAT.replace("within_s: 1,", "within_s: 2,"))
    result = run("slo", own, "--page", PAGE)
    assert re.search(rf"Chat: within_s 2 .*{re.escape(str(PAGE))}: .* 1 and 2\.5\b", result.stderr)
    other = written(tmp_path / "other.prom", "# TYPE up gauge\nup 1\n")
    assert f"Chat: {other} has no vllm:time_to_first_token_seconds_bucket" in run("slo", own, "--page", other).stderr
    assert 0 == run("slo", "--page", PAGE).exit_code, "the shipped ones fit"


# ---- help


@pytest.mark.parametrize("command", ["export", "list", "slo"])
def test_help_ends_with_an_example_that_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it asks a server, a captured page stands for it."""
    example = re.findall(r"Example:\s+vllm-watch alerts (.*)", run(command, "--help").stdout)[0]
    monkeypatch.chdir(tmp_path)
    words = example.replace("http://127.0.0.1:8000", str(PAGE)).split()
    assert 0 == run(*words).exit_code
