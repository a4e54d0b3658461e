"""Dashboards, panels and queries as plain values. Grafana and the built-in board read the same values.

Invariant: nothing here or in the boards knows Grafana's JSON (that is panels.py), and no board types a metric name or a
unit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from alerts.panel_ref import PanelRef
from alerts.registry import ALERTS
from alerts.thresholds import Threshold
from exporters.catalogue import promql_ast
from exporters.catalogue.metric import Unit
from exporters.catalogue.producers import Component, needed

RATE = "$__rate_interval"
COLUMNS = 24  # width of a board
ABSENT = -1.0  # value of a flag for what the host does not have, which is no fault
LEAST_RATE_S = 120  # rates of ranked panels span at least this long: one team's requests are few

_UNITS = {
    Unit.SECONDS: "s", Unit.BYTES: "bytes", Unit.JOULES: "joule", Unit.WATTS: "watt", Unit.CELSIUS: "celsius",
    Unit.HERTZ: "hertz",
    Unit.RATIO: "percentunit", Unit.TIMESTAMP: "dateTimeFromNow", Unit.FLAG: "bool_on_off", Unit.TOKENS: "suffix: tok",
    Unit.REQUESTS: "suffix: req", Unit.BLOCKS: "suffix: blocks",
}  # fmt: skip
_PER_SECOND = {
    Unit.TOKENS: "suffix: tok/s",
    Unit.REQUESTS: "reqps",
    Unit.BYTES: "Bps",
    Unit.JOULES: "watt",
    Unit.SECONDS: "percentunit",
}


def shown_unit(unit: Unit, per_second: bool = False) -> str:
    """Return how a unit of the catalogue is shown, by Grafana's name for it. Seconds per second are a share of the
    time."""
    return _PER_SECOND.get(unit, "cps") if per_second else _UNITS.get(unit, "short")


class Shape(StrEnum):
    LINES = "lines"
    STACK = "stack"  # areas on top of each other: parts of a whole
    NUMBER = "number"  # one large figure for each series, as of now
    TABLE = "table"  # one row for each set of labels, one column for each query, as of now; sorted by the first figure
    HEATMAP = "heatmap"  # a distribution over time, from buckets


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, how its lines (in a table: its column) are called, and in what unit they are shown. exemplars: its
    buckets carry traces."""

    expr: str
    legend: str = ""
    unit: str = "short"
    exemplars: bool = False

    @property
    def needs(self) -> frozenset[Component]:
        """Return what must run for this query to have an answer."""
        return needed(promql_ast.names(self.expr))


@dataclass(frozen=True, slots=True)
class Precondition:
    """Series without which a part of a dashboard stays empty, such as those of GPUs.

    expr: has an answer while the precondition is met. missing: the sentence that the dashboard says once, at its top,
    while it is not."""

    slug: str
    title: str
    expr: str
    missing: str

    @property
    def when_empty(self) -> str:
        """Text of each panel that needs it."""
        return f"No {self.title}; see the top of this dashboard."


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. slug never changes: links and annotations hang on it.

    means, good, act: what the figure is, what is healthy, what to do when it is not; together they are the description.
    detail: the slug of the board that explains it further. optional: why it is empty on a healthy stack, as a sentence
    that ends in the way to fill it, else ''. full_scale: a ratio's axis goes from 0 to 1; False where its values live
    near 0.
    bad_from: a figure of this size or more is red where no alert's threshold says so, such as one frozen engine;
    without either it is neutral. lowest_first: the lowest figure is the one to look at, so a table starts with it.
    ranked: one line for each of many, such as teams: the legend is a table sorted by the mean, and rates span
    LEAST_RATE_S or more.
    requires: what the dashboard says once for all panels that stay empty without it.
    Raises ValueError when a part of the description is missing."""

    slug: str
    title: str
    means: str
    good: str
    act: str
    queries: tuple[Query, ...]
    shape: Shape = Shape.LINES
    threshold: Threshold | None = None
    detail: str = ""
    optional: str = ""
    width: int = 8
    height: int = 7
    full_scale: bool = True
    bad_from: float | None = None
    lowest_first: bool = False
    ranked: bool = False
    requires: Precondition | None = None

    def __post_init__(self) -> None:
        PanelRef("x", self.slug)
        for name, text in (("means", self.means), ("good", self.good), ("act", self.act)):
            if not text.endswith("."):
                raise ValueError(f"panel {self.slug}: {name} is one or more sentences, not {text!r}")
        if not self.queries:
            raise ValueError(f"panel {self.slug} asks nothing")

    @property
    def limit(self) -> float | None:
        """From where on a figure is bad; None where nothing says so."""
        return self.threshold.value if self.threshold else self.bad_from

    @property
    def description(self) -> str:
        return f"{self.means}\n\n**Good:** {self.good}\n\n**Otherwise:** {self.act}"

    @property
    def unit(self) -> str:
        return self.queries[0].unit

    @property
    def needs(self) -> frozenset[Component]:
        """Return what must run for this panel to show anything: what its least demanding query needs."""
        return min((query.needs for query in self.queries), key=len)

    @property
    def when_empty(self) -> str:
        """Return the text of an empty panel."""
        if self.optional:
            return self.optional
        if self.requires:
            return self.requires.when_empty
        missing = sorted(part.value for part in self.needs - {Component.ENGINE, Component.SCRAPE})
        if missing:
            return f"Nothing here yet. This needs {' and '.join(missing)}, scraped by this Prometheus."
        return (
            "Nothing in this range: no request was served, no engine matches the variables above, "
            "or the data source's scrape interval is set shorter than the real one."
        )

    def alerts(self, board: str) -> tuple[str, ...]:
        """The alerts that point at this panel, or that fire at the line it draws."""
        ref = PanelRef(board, self.slug)
        drawn = self.threshold and self.threshold.name
        return tuple(
            a.name
            for a in ALERTS
            if a.panel == ref or (a.drawn and a.threshold is not None and a.threshold.name == drawn)
        )


@dataclass(frozen=True, slots=True)
class DashboardRow:
    """Panels under one heading; they wrap when the row is full. The first row of a board has no title and answers its
    question."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """One choice at the top of a board. kind: query (values from label_values), custom (fixed choices), text (free,
    such as a price)."""

    name: str
    label: str
    kind: str = "query"
    query: str = ""
    options: tuple[str, ...] = ()
    default: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: one question, answered in its top row. extra: variables of its own, beside the common ones that its
    queries use.

    recorded: it reads what our rules record and nothing else, choices and marks included, for a store that keeps
    nothing else.
    team: the only team that it reads, in every query, choice and mark; "" for all teams. It then links to no other
    dashboard and no runbook. Raises ValueError if a query reads more."""

    slug: str
    title: str
    question: str
    rows: tuple[DashboardRow, ...]
    extra: tuple[Variable, ...] = ()
    regions: bool = False  # tuning events as regions (event until settled) instead of lines
    recorded: bool = False
    team: str = ""

    def __post_init__(self) -> None:
        if self.team and not all(promql_ast.has_matcher(expr, "team", self.team) for expr in self.expressions):
            raise ValueError(f"dashboard {self.slug}: a query is not restricted to its team")

    @property
    def expressions(self) -> tuple[str, ...]:
        """Return every expression of its panels and preconditions."""
        asked = [query.expr for panel in self.panels for query in panel.queries]
        return (*asked, *(one.expr for one in self.preconditions))

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)

    @property
    def preconditions(self) -> tuple[Precondition, ...]:
        """Return what its panels require, each once, in their order."""
        return tuple(dict.fromkeys(panel.requires for panel in self.panels if panel.requires))

    def uses(self, variable: str) -> bool:
        """Return whether a query of this board reads a variable."""
        pattern = re.compile(rf"\$(?:{variable}\b|\{{{variable}[:}}])")
        return any(pattern.search(expr) for expr in self.expressions)


class Profile(StrEnum):
    """For whom boards are made."""

    FULL = "full"  # the whole stack; panels whose component is missing say so
    ENGINE = "engine"  # nothing but vLLM's own series: no sidecar, no gateway, none of our rules

    @property
    def components(self) -> frozenset[Component]:
        return frozenset({Component.ENGINE, Component.SCRAPE} if self is Profile.ENGINE else Component)


def only(board: Dashboard, components: frozenset[Component]) -> Dashboard | None:
    """The board as far as these components carry it; None when nothing is left of its first row, which answers its
    question."""
    rows = tuple(
        replace(row, panels=kept)
        for row in board.rows
        if (kept := tuple(filter(None, (_only(p, components) for p in row.panels))))
    )
    return replace(board, rows=rows) if rows and not rows[0].title else None


def _only(panel: Panel, components: frozenset[Component]) -> Panel | None:
    queries = tuple(query for query in panel.queries if query.needs <= components)
    return replace(panel, queries=queries) if queries else None
