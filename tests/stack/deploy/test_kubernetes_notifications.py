"""AlertmanagerConfig of `vllm-watch kubernetes export`, converted as the operator does and tried on the real amtool."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import export, registry, routing
from alerts.routing import DEADMAN, NOBODY, PAGE, RECEIVERS, TICKET
from alerts.rules import Links, Severity
from stack.deploy.kubernetes import files, notifications
from stack.deploy.kubernetes.options import ONCE, KubernetesOptions
from tests.support import operator_alertmanager

LINKS = Links("https://wiki.example.org/runbooks", "https://grafana.example.org")
ROUTED = KubernetesOptions(
    image="vllm-watch:0.1.0", rules=export.AlertOptions(links=LINKS), routes="slack", without=ONCE
)
BY_SEVERITY = {Severity.CRITICAL: PAGE, Severity.WARNING: TICKET, Severity.INFO: NOBODY}


def converted(receiver: str, strategy: str = "None") -> dict[str, Any]:
    options = KubernetesOptions(image="i", rules=ROUTED.rules, routes=receiver, without=ONCE)
    return operator_alertmanager.configuration(notifications.alertmanager_config(options), "vllm", strategy)


def amtool(part: Any, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([part("amtool").path, *arguments], capture_output=True, text=True, check=False, timeout=60)


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "alertmanager.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_amtool_accepts_what_the_operator_makes(receiver, part, tmp_path):
    done = amtool(part, "check-config", written(tmp_path, converted(receiver)))
    assert 0 == done.returncode, done.stdout + done.stderr
    assert f"{len(routing.inhibitions(registry.ALERTS, registry.RECORDINGS))} inhibit rules" in done.stdout


@pytest.mark.parametrize(
    ("alertname", "severity", "namespace", "receivers"),
    [
        ("VLLMEngineDown", "critical", "vllm", "vllm/vllm-watch/page"),
        ("VLLMTTFTBudgetBurn", "critical", "", "vllm/vllm-watch/page"),
        ("VLLMQueueGrowing", "warning", "other", "vllm/vllm-watch/ticket"),
        ("VLLMWatchdog", "none", "", "vllm/vllm-watch/deadman"),
        ("KubePodCrashLooping", "critical", "vllm", "null"),
    ],
)
def test_amtool_routes_our_alerts_alone(alertname, severity, namespace, receivers, part, tmp_path):
    """Without the strategy's matcher the first route takes alerts of ours by name, and leaves all others."""
    labels = [f"alertname={alertname}", f"severity={severity}", *([f"namespace={namespace}"] if namespace else [])]
    done = amtool(part, "config", "routes", "test", f"--config.file={written(tmp_path, converted('slack'))}", *labels)
    assert receivers == done.stdout.strip(), done.stderr


def test_the_default_strategy_hides_alerts_without_a_namespace(part, tmp_path):
    """The reason for the warning: an alert on a model is aggregated over namespaces."""
    path = written(tmp_path, converted("slack", "OnNamespace"))
    done = amtool(
        part, "config", "routes", "test", f"--config.file={path}", "alertname=VLLMTTFTBudgetBurn", "severity=critical"
    )
    assert "null" == done.stdout.strip()
    [said] = (text for text in files.warnings(ROUTED) if "alertmanager-config" in text)
    assert "alertmanagerConfigMatcherStrategy.type: None" in said
    assert f" of {len(registry.ALERTS)} alerts " in said


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_routes_and_inhibition_equal_the_plain_configuration(receiver):
    """Names of receivers, the first matcher and secrets are all that differs."""
    plain, made = yaml.safe_load(routing.configuration(receiver)), converted(receiver)
    [first] = made["route"]["routes"]
    assert [f'alertname=~"{notifications.OURS}"'] == first.pop("matchers")
    assert first.pop("continue") is True
    assert plain["route"] == without_prefix(first)
    assert plain["inhibit_rules"] == made["inhibit_rules"]
    assert [(each["name"], *sorted(set(each) - {"name"})) for each in plain["receivers"]] == [
        (each["name"].removeprefix("vllm/vllm-watch/"), *sorted(set(each) - {"name"})) for each in made["receivers"][1:]
    ]


def without_prefix(route: dict[str, Any]) -> dict[str, Any]:
    inner = {"routes": [without_prefix(each) for each in route["routes"]]} if "routes" in route else {}
    return {**route, "receiver": route["receiver"].removeprefix("vllm/vllm-watch/"), **inner}


def test_every_alert_is_taken_by_the_first_route():
    assert all(alert.name.startswith("VLLM") for alert in registry.ALERTS)
    assert {PAGE, TICKET, NOBODY, DEADMAN} == {each["name"] for each in routing.receivers_of("slack")}
    assert set(BY_SEVERITY) == set(Severity)


def test_the_secret_is_named_with_its_keys():
    steps = "\n".join(files.next_steps(Path("m"), ROUTED))
    assert (
        "secret generic vllm-watch-alertmanager --from-file=alertmanager_page --from-file=alertmanager_ticket" in steps
    )
    made = notifications.alertmanager_config(ROUTED)
    named = [each["slackConfigs"][0]["apiURL"] for each in made["spec"]["receivers"] if "slackConfigs" in each]
    assert [{"name": "vllm-watch-alertmanager", "key": key} for key in notifications.secret_keys(ROUTED)] == named


def test_what_is_no_matcher_is_refused():
    with pytest.raises(ValueError, match="is no matcher"):
        notifications._matchers(["severity"])
