"""Alerts and recordings -> rule files for Prometheus, one for each thing a reader does, and one for the recorded
series."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from alerts import slo
from alerts.recorded import INTERVAL, SELDOM
from alerts.registry import families, recorded_families
from alerts.rules import Links, Severity
from alerts.settings import SHIPPED, Settings

FILES = {Severity.CRITICAL: "page.yaml", Severity.WARNING: "ticket.yaml", Severity.INFO: "info.yaml"}
_HEADER = "# Printed by `vllm-watch render` from alerts/*.py. Change the source, print again, commit both.\n"


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """A group of rules as Prometheus reads them. every: how often, where that is not as often as everything else."""

    name: str
    rules: list[dict[str, Any]]
    every: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **({"interval": self.every} if self.every else {}), "rules": self.rules}


def rule_files(
    links: Links | None = None,
    settings: Settings = SHIPPED,
    objectives: slo.Objectives | None = None,
    header: str = _HEADER,
) -> Iterator[tuple[str, str]]:
    """File name and text of every rule file. Recorded series come first: Prometheus evaluates files side by side, but a
    reader follows."""
    links = links or Links()
    yield "recording.yaml", rule_file(header, recorded_groups(settings, objectives))
    for severity, name in FILES.items():
        chosen = {
            f: [a.as_rule(links) for a in alerts if a.severity is severity]
            for f, alerts in families(settings, objectives).items()
        }
        yield (
            name,
            rule_file(
                header, (RuleGroup(f"vllm-{severity}-{family}", rules) for family, rules in chosen.items() if rules)
            ),
        )


def recorded_groups(
    settings: Settings = SHIPPED, objectives: slo.Objectives | None = None, only: Container[str] | None = None
) -> Iterator[RuleGroup]:
    """Groups of recorded series, at the intervals that sums over them rest on (recorded.py). only: these series."""
    for family, each in recorded_families(settings, objectives).items():
        rules = [one.as_rule() for one in each if only is None or one.record in only]
        if rules:
            yield RuleGroup(
                f"vllm-recorded-{family}", rules, settings.window(SELDOM if family == "hours" else INTERVAL)
            )


class _Dumper(yaml.SafeDumper):
    """Text of several lines stands as it is read, after a bar; what stands twice is written twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def rule_file(header: str, groups: Iterable[RuleGroup]) -> str:
    """Groups of rules as text."""
    return header + as_yaml({"groups": [group.as_dict() for group in groups]})


def as_yaml(content: object) -> str:
    """YAML as it is printed everywhere: in the order given, text of several lines as it is read."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)
