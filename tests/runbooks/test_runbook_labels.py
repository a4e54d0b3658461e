"""Every placeholder of an alert's page is a label that the alert can have, so that its commands can be filled."""

from __future__ import annotations

import pytest

from alerts.lint import RuleSet
from alerts.registry import ALERTS, RECORDINGS
from alerts.rules import Alert
from exporters.catalogue import promql_ast
from runbooks import page

RULES = RuleSet(ALERTS, RECORDINGS)


def unfilled(alert: Alert, text: str) -> set[str]:
    """Return the placeholders of a page that no result of the alert has a label for."""
    return set(page.placeholders(text)) - promql_ast.some_labels(alert.expr, RULES.labels_of)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_placeholders_are_labels_of_the_alert(alert: Alert) -> None:
    assert set() == unfilled(alert, page.text(alert.name) or "")


def test_missing_label_is_found() -> None:
    """An alert on a whole job has no single pod."""
    down = next(alert for alert in ALERTS if alert.name == "VLLMEngineDown")
    assert {"pod"} == unfilled(down, "kubectl -n {{namespace}} logs {{pod}}")
