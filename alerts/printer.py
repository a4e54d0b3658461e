"""Rule files for Prometheus: one for each severity, and one for the recorded series."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from alerts import slo
from alerts.recorded import INTERVAL, SELDOM
from alerts.registry import families, recorded_families
from alerts.rules import Links, Severity
from alerts.settings import DEFAULTS, Settings

FILES = {Severity.CRITICAL: "page.yaml", Severity.WARNING: "ticket.yaml", Severity.INFO: "info.yaml"}
_HEADER = "# Printed by `vllm-watch render` from alerts/*.py. Change the source, print again, commit both.\n"


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rule group of Prometheus. every: evaluation interval such as 1m; empty for the default."""

    name: str
    rules: list[dict[str, Any]]
    every: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **({"interval": self.every} if self.every else {}), "rules": self.rules}


def rule_files(
    links: Links | None = None,
    settings: Settings = DEFAULTS,
    objectives: slo.Objectives | None = None,
    header: str = _HEADER,
) -> Iterator[tuple[str, str]]:
    """Yield file name and text of every rule file, recorded series first for the reader; Prometheus evaluates files
    concurrently."""
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
    settings: Settings = DEFAULTS, objectives: slo.Objectives | None = None, only: Container[str] | None = None
) -> Iterator[RuleGroup]:
    """Yield the groups of recording rules at the intervals that sums over them need (recorded.py).

    only: names of the series to include; None for all."""
    for family, each in recorded_families(settings, objectives).items():
        rules = [one.as_rule() for one in each if only is None or one.record in only]
        if rules:
            yield RuleGroup(
                f"vllm-recorded-{family}", rules, settings.window(SELDOM if family == "hours" else INTERVAL)
            )


class _Dumper(yaml.SafeDumper):
    """YAML with literal blocks for text of several lines, and without aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def rule_file(header: str, groups: Iterable[RuleGroup]) -> str:
    """Return groups of rules as the text of a rule file."""
    return header + as_yaml({"groups": [group.as_dict() for group in groups]})


def as_yaml(content: object) -> str:
    """Return YAML in the order given, with text of several lines as literal blocks."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)
