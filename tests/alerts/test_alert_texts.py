"""Texts of alerts: a title with labels, and a description that ends in the first action."""

from __future__ import annotations

import re

import pytest

from alerts.registry import ALERTS
from alerts.rules import Alert

ACTIONS = (
    "Ask", "Check", "Compare", "Find", "Read", "Roll", "Run", "Save", "Start", "Take",
)  # fmt: skip
# words that docs/glossary.md replaces, or that only this project used
REPLACED = (
    "board", "books", "card", "cards", "figure", "figures", "hang-up", "hang-ups", "mend", "shipped", "stranger",
    "tell", "tells", "told", "turned away", "let in", "thrown away",
)  # fmt: skip
_TEMPLATE = re.compile(r"\{\{.*?\}\}")
WITH_LABELS = [alert for alert in ALERTS if not alert.always]


def words(text: str) -> str:
    """The text without its templates."""
    return _TEMPLATE.sub("", text)


def has_first_action(description: str) -> bool:
    return any(re.match(rf"({'|'.join(ACTIONS)})\b", sentence) for sentence in re.split(r"(?<=\.) ", description))


def replaced_words(text: str) -> list[str]:
    return [word for word in REPLACED if re.search(rf"\b{word}\b", words(text), re.IGNORECASE)]


@pytest.mark.parametrize("alert", WITH_LABELS, ids=lambda alert: alert.name)
def test_summary_names_subject_and_labels(alert: Alert) -> None:
    """A notification shows little else: `subject and symptom: labels`."""
    assert re.match(r"[A-Z]|vLLM ", alert.summary)
    assert ":" in words(alert.summary)
    assert "$labels." in alert.summary


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_description_has_first_action(alert: Alert) -> None:
    assert has_first_action(alert.description), alert.description


@pytest.mark.parametrize("alert", WITH_LABELS, ids=lambda alert: alert.name)
def test_description_says_since_when(alert: Alert) -> None:
    """A window or a hold: `over 5 min`, `for 3 min`, `within the last hour`, or the windows of an objective."""
    period = r"\d+ min|(last|half) (complete )?(hour|day|week)|last half hour|\d[hd] or \d[hd]|\d+ s late"
    assert re.search(period, alert.description), alert.description


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_texts_hold_no_replaced_words(alert: Alert) -> None:
    assert [] == replaced_words(f"{alert.summary} {alert.description}")


@pytest.mark.parametrize(
    ("summary", "title"),
    [
        ("vLLM hung: {{ $labels.model_name }} on {{ $labels.instance }}", "vLLM hung: {model_name} on {instance}"),
        ("Log late{{ with $labels.cluster }} in {{ . }}{{ end }}", "Log late in {cluster}"),
    ],
)
def test_title_shows_label_names(summary: str, title: str) -> None:
    alert = WITH_LABELS[0]
    assert (
        title
        == Alert(alert.name, alert.severity, alert.expr, alert.hold, summary, alert.description, alert.panel).title
    )


def test_checks_of_texts_find_faults() -> None:
    assert not has_first_action("An engine is up and makes no tokens. Its users wait, and check again.")
    assert ["card", "told"] == replaced_words("A card is hot, and {{ $labels.figure }} was told.")
