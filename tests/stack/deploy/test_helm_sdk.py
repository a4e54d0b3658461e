"""The chart in Helm's own engine (v4, `helm-python-sdk`): lint, rendering, and values that its schema refuses."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from stack.lab.install import InstalledPart
from tests.stack.deploy.test_helm import CHART, LINKED, SETS

if TYPE_CHECKING:
    from helm_python import Chart

INFO = 1  # of Helm's severities: 2 is a warning, 3 an error
NOTES = "templates/NOTES.txt"
RELEASE, NAMESPACE = "watch", "vllm"
each_set = pytest.mark.parametrize("given", [LINKED | given for given, _ in SETS.values()], ids=SETS)


@pytest.fixture(scope="session")
def loaded() -> Iterator[Chart]:
    """The committed chart in Helm. Imported here: each process imports every test file, and Helm is 85 MB of Go."""
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        yield chart


@pytest.fixture
def render(loaded: Chart) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Text of each template from Helm, by its path in the chart."""

    def rendered(given: dict[str, Any]) -> dict[str, str]:
        texts = loaded.render(given, name=RELEASE, namespace=NAMESPACE)
        return {path.removeprefix(f"{loaded.name}/"): text for path, text in texts.items()}

    return rendered


@pytest.fixture
def render_by_go(part: Callable[[str], InstalledPart]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Text of each template from our renderer, by its path in the chart."""

    def rendered(given: dict[str, Any]) -> dict[str, str]:
        command = [part("chart-renderer").path, CHART, RELEASE, NAMESPACE]
        done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
        texts: dict[str, str] = json.loads(done.stdout)
        return texts

    return rendered


def objects(texts: dict[str, str]) -> list[dict[str, Any]]:
    """Return the objects of all templates, by kind and name."""
    found = (yaml.load_all(text, yaml.CSafeLoader) for path, text in texts.items() if path != NOTES)
    return sorted(
        (each for documents in found for each in documents if each),
        key=lambda each: (each["kind"], each["metadata"]["name"]),
    )


@each_set
def test_lint_recommends_an_icon_only(given):
    from helm_python import chart

    report = chart.lint(CHART, given, namespace=NAMESPACE)
    assert (1, []) == (report["total_charts_linted"], report["errors"])
    assert [(INFO, "Chart.yaml")] == [(message["severity"], message["path"]) for message in report["messages"]]


@each_set
def test_helm_renders_what_our_renderer_does(given, render, render_by_go):
    expected, made = render(given), render_by_go(given)
    assert expected[NOTES].strip()
    assert expected[NOTES] == made[NOTES]
    assert objects(expected)
    assert objects(expected) == objects(made)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"gateway": {"enabled": "yes"}}, ["/gateway/enabled"]),
        ({"gateway": {"enable": True}}, ["/gateway", "enable"]),
        ({"gatway": {"enabled": True}}, ["", "gatway"]),
    ],
    ids=json.dumps,
)
def test_schema_refuses_a_wrong_value_with_its_place(given, named, render):
    """Helm names the object with the mistake, then the key that it does not know."""
    from helm_python import HelmValuesError

    with pytest.raises(HelmValuesError) as refused:
        render(LINKED | given)
    assert named == re.findall("'([^']*)'", str(refused.value).partition("- at ")[2])
