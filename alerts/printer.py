"""Alerts and recordings -> rule files for Prometheus, one for each thing a reader does, and one for the recorded series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from alerts.families import FAMILIES, RECORDINGS
from alerts.rules import Links, Severity

FILES = {Severity.CRITICAL: "page.yaml", Severity.WARNING: "ticket.yaml", Severity.INFO: "info.yaml"}
_HEADER = "# Printed by `vllm-watch render` from alerts/*.py. Change the source, print again, commit both.\n"


def rule_files(links: Links | None = None) -> Iterator[tuple[str, str]]:
    """File name and text of every rule file."""
    links = links or Links()
    for severity, name in FILES.items():
        chosen = {family: [a.as_rule(links) for a in alerts if a.severity is severity] for family, alerts in FAMILIES.items()}
        yield name, _file((f"vllm-{severity}-{family}", rules) for family, rules in chosen.items() if rules)
    yield "recording.yaml", _file([("vllm-recorded", [recording.as_rule() for recording in RECORDINGS])])


def _file(groups: Iterable[tuple[str, list[dict[str, Any]]]]) -> str:
    content = {"groups": [{"name": name, "rules": rules} for name, rules in groups]}
    return _HEADER + yaml.safe_dump(content, sort_keys=False, width=140, allow_unicode=True)
