"""A dashboard's JSON as its lint rules read it: dashboards, panels, queries, variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from exporters.catalogue import EVERYTHING, promql_ast
from exporters.catalogue.metric import Metric
from exporters.catalogue.producers import Component, needed
from exporters.catalogue.promql import ROLE
from exporters.catalogue.promql_ast import BadExpression, SelectorUse
from exporters.catalogue.promql_lint import METRICS

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SILENT_TYPES = ("row", "text")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:[:.][^}]*)?\}|([A-Za-z_]\w*))|\[\[(\w+)\]\]")
# what a scrape adds; cluster, namespace and role only where the operator does
_TARGET = frozenset({"cluster", "namespace", "job", "instance", ROLE})
_EVERY_LABEL = frozenset(label for metric in EVERYTHING for label in metric.labels) | _TARGET | {"le"}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Finding and its place: board uid, panel title, query letter."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class AllowedFinding:
    """A finding that is meant. place may hold `*`. Raises ValueError when it gives no reason."""

    rule: str
    place: str
    why: str

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError(f"{self.rule} at {self.place} is allowed without a reason")

    def covers(self, finding: LintFinding) -> bool:
        return self.rule == finding.rule and fnmatchcase(finding.place, self.place)


@dataclass(frozen=True, eq=False)
class LintedQuery:
    """One piece of PromQL: a panel's target, or an annotation (panel is None)."""

    place: str
    text: str
    legend: str
    raw: Mapping[str, Any]
    board: LintedDashboard
    panel: LintedPanel | None = None

    @cached_property
    def reads(self) -> list[SelectorUse]:
        """Its selectors; none when it does not parse, which one rule reports."""
        try:
            return promql_ast.reads(self.text)
        except BadExpression:
            return []

    @property
    def series(self) -> Iterator[tuple[SelectorUse, Metric]]:
        """Its selectors of series that the catalogue knows; another rule reports the rest."""
        return ((read, METRICS[read.name]) for read in self.reads if read.name in METRICS)


@dataclass(frozen=True, eq=False)
class LintedPanel:
    board: LintedDashboard
    raw: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.raw.get("type", ""))

    @property
    def place(self) -> str:
        return f"{self.board.uid}/{self.raw.get('title') or self.raw.get('id')}"

    @property
    def asks(self) -> bool:
        return self.kind not in SILENT_TYPES

    @property
    def targets(self) -> Sequence[Mapping[str, Any]]:
        return self.raw.get("targets") or ()

    @cached_property
    def queries(self) -> tuple[LintedQuery, ...]:
        return tuple(
            LintedQuery(
                f"{self.place}/{target.get('refId', '?')}",
                target.get("expr", ""),
                target.get("legendFormat", ""),
                target,
                self.board,
                self,
            )
            for target in self.targets
        )

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.raw.get("fieldConfig", {}).get("defaults", {})  # type: ignore[no-any-return]

    def configured(self, name: str) -> Iterator[Any]:
        """A field option's values: the default, and what overrides set."""
        if name in self.defaults:
            yield self.defaults[name]
        for override in self.raw.get("fieldConfig", {}).get("overrides", ()):
            yield from (given["value"] for given in override["properties"] if given["id"] == name)

    @property
    def links(self) -> Iterator[Mapping[str, Any]]:
        yield from self.raw.get("links", ())
        for links in self.configured("links"):
            yield from links


@dataclass(frozen=True, eq=False)
class LintedDashboard:
    raw: Mapping[str, Any]

    @property
    def uid(self) -> str:
        return str(self.raw.get("uid", ""))

    @cached_property
    def panels(self) -> tuple[LintedPanel, ...]:
        """All panels, row headings and what is folded below them included."""
        flat = (panel for top in self.raw.get("panels", ()) for panel in (top, *top.get("panels", ())))
        return tuple(LintedPanel(self, panel) for panel in flat)

    @property
    def variables(self) -> Sequence[Mapping[str, Any]]:
        return self.raw.get("templating", {}).get("list", ())  # type: ignore[no-any-return]

    @property
    def annotations(self) -> Sequence[Mapping[str, Any]]:
        return self.raw.get("annotations", {}).get("list", ())  # type: ignore[no-any-return]

    @cached_property
    def marks(self) -> tuple[LintedQuery, ...]:
        """Annotations that ask Prometheus."""
        asking = [a for a in self.annotations if "expr" in a]
        return tuple(
            LintedQuery(f"{self.uid}/annotation {a.get('name')}", a["expr"], a.get("titleFormat", ""), a, self)
            for a in asking
        )

    @cached_property
    def queries(self) -> tuple[LintedQuery, ...]:
        return (*(query for panel in self.panels for query in panel.queries), *self.marks)

    def at(self, *parts: object) -> str:
        return "/".join(map(str, (self.uid, *parts)))


Messages = Iterator[str]
PlacedMessages = Iterator[tuple[str, str]]


def variables_in(text: str) -> set[str]:
    """The variables in a text, Grafana's own ones left out."""
    names = {found[1] or found[2] or found[3] for found in VARIABLE.finditer(text)}
    return {name for name in names if not name.startswith("__")}


def labels_of(sample: str) -> frozenset[str]:
    """Return the labels that a series can be grouped by. An alert's labels are those of whatever it watches."""
    metric = METRICS.get(sample)
    if metric is None or Component.RULES in needed([sample]):
        return _EVERY_LABEL
    return frozenset(metric.labels) | _TARGET | ({"le"} if sample.endswith("_bucket") else set())


def ask_safely(question: Callable[[str], list[Any]], text: str) -> list[Any]:
    try:
        return question(text)
    except BadExpression:
        return []
