"""Alerts and recordings -> rule files for Prometheus, one for each thing a reader does, and one for the recorded series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from alerts import slo
from alerts.families import families, recorded_families
from alerts.rules import Links, Severity
from alerts.settings import SHIPPED, Settings

FILES = {Severity.CRITICAL: "page.yaml", Severity.WARNING: "ticket.yaml", Severity.INFO: "info.yaml"}
_HEADER = "# Printed by `vllm-watch render` from alerts/*.py. Change the source, print again, commit both.\n"


def rule_files(
    links: Links | None = None, settings: Settings = SHIPPED, objectives: slo.Objectives | None = None, header: str = _HEADER
) -> Iterator[tuple[str, str]]:
    """File name and text of every rule file. Recorded series come first: Prometheus evaluates files side by side, but a reader follows."""
    links = links or Links()
    recorded = recorded_families(settings, objectives)
    yield "recording.yaml", rule_file(header, ((f"vllm-recorded-{family}", [one.as_rule() for one in each]) for family, each in recorded.items()))
    for severity, name in FILES.items():
        chosen = {f: [a.as_rule(links) for a in alerts if a.severity is severity] for f, alerts in families(settings, objectives).items()}
        yield name, rule_file(header, ((f"vllm-{severity}-{family}", rules) for family, rules in chosen.items() if rules))


class _Dumper(yaml.SafeDumper):
    """Text of several lines stands as it is read, after a bar."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)  # fmt: skip


def rule_file(header: str, groups: Iterable[tuple[str, list[dict[str, Any]]]]) -> str:
    """Groups of rules by name, as text."""
    content = {"groups": [{"name": name, "rules": rules} for name, rules in groups]}
    return header + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)
