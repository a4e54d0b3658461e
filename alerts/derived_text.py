"""Derived thresholds as text: the overlay file, and the report for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from alerts.derive import Derived
from alerts.recorded_use import RecordedUse
from alerts.settings import Settings

_HEADER = """\
# Thresholds of this deployment, derived from {source}, {start} to {end}.
# They are read by: vllm-watch alerts export --out rules --thresholds THIS_FILE
"""


def overlay(asked: RecordedUse, settings: Settings, found: Sequence[Derived]) -> str:
    """The numbers as a file for --thresholds, each with its reason; what stays is a comment. Numbers and jobs that were
    given before are kept."""
    start, end = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%MZ") for at in (asked.from_s, asked.to_s))
    lines: list[str] = []
    derived = {each.before.name: each for each in found if each.value is not None}
    for name, each in derived.items():
        lines += [
            *_comment(f"{each.threshold.shown}; before: {each.before.shown}. {each.why}", "  # "),
            f"  {name}: {each.value:.12g}",
        ]
    given = {name: value for name, value in settings.overlay.thresholds.items() if name not in derived}
    lines += [f"  {name}: {value:.12g}  # as it was given" for name, value in given.items()]
    text = (
        _HEADER.format(source=asked.source, start=start, end=end)
        + "\n".join(["thresholds:", *lines] if lines else ["thresholds: {}"])
        + "\n"
    )
    for each in found:
        if each.value is None:
            text += "\n".join(_comment(f"{each.before.name} stays at {each.before.shown}: {each.why}", "# ")) + "\n"
    default = type(settings.overlay)()
    jobs = ("engine_job", "gateway_job", "sidecar_job")
    return text + "".join(
        f"{job}: '{own}'\n" for job in jobs if (own := getattr(settings.overlay, job)) != getattr(default, job)
    )


def _comment(text: str, prefix: str) -> Iterator[str]:
    return (prefix + line for line in textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def as_json(asked: RecordedUse, found: Sequence[Derived]) -> dict[str, Any]:
    """Return the derivation for a program."""
    return {
        "source": asked.source,
        "from_s": asked.from_s,
        "to_s": asked.to_s,
        "step_s": asked.step_s,
        "thresholds": {each.before.name: each.value for each in found if each.value is not None},
        "numbers": [
            {
                "name": each.before.name,
                "value": each.threshold.value,
                "before": each.before.value,
                "unit": str(each.before.unit),
                "shown": each.threshold.shown,
                "derived": each.value is not None,
                "why": each.why,
                "evidence": dict(each.evidence),
            }
            for each in found
        ],
    }
