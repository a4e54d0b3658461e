"""Users of each series: panels, alerts and recorded series, also indirect ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from alerts.registry import ALERTS, RECORDINGS
from alerts.rules import Alert
from dashboards.model import Dashboard, Panel
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, promql_ast
from exporters.catalogue.metric import Metric


@dataclass(frozen=True, slots=True)
class ExpressionUse:
    """Inputs of an expression: samples of the catalogue, and the recorded series on the way to them."""

    samples: frozenset[str]
    recorded: frozenset[str]


_RECORDED: Mapping[str, str] = {recording.record: recording.expr for recording in RECORDINGS}


@lru_cache(4096)
def read(expr: str) -> ExpressionUse:
    """Return the inputs of an expression, resolved."""
    samples, recorded = set[str](), set[str]()
    for name in promql_ast.names(expr):
        if name in _RECORDED:
            below = read(_RECORDED[name])
            recorded |= {name, *below.recorded}
            samples |= below.samples
        else:
            samples.add(name)
    return ExpressionUse(frozenset(samples), frozenset(recorded))


def recorded_in(expr: str) -> list[str]:
    """The recorded series that stand in an expression itself, by name."""
    return sorted(promql_ast.names(expr) & _RECORDED.keys())


def panels(metric: Metric) -> list[tuple[Dashboard, Panel]]:
    """The panels whose queries name a series, in the order of the boards. What they read of recorded series is said of
    those."""
    own = set(metric.samples)
    return [
        (board, panel)
        for board in BOARDS
        for panel in board.panels
        if any(own & promql_ast.names(query.expr) for query in panel.queries)
    ]


def alerts(metric: Metric) -> list[Alert]:
    own = set(metric.samples)
    return [alert for alert in ALERTS if own & read(alert.expr).samples]


def metrics(expr: str) -> list[Metric]:
    """The families that an expression reads, each under its present name, by name."""
    samples = read(expr).samples
    found = [metric for metric in EVERYTHING if samples & set(metric.samples)]
    former = {name for metric in found for name in metric.formerly}
    return sorted((metric for metric in found if metric.name not in former), key=lambda metric: metric.name)


def readers(record: str) -> Iterator[str]:
    """Alerts whose rules read a recorded series, itself or through another one."""
    yield from (alert.name for alert in ALERTS if record in read(alert.expr).recorded)


def boards_with(record: str) -> list[Dashboard]:
    """Boards that read a recorded series itself."""
    return [
        board
        for board in BOARDS
        if any(record in promql_ast.names(query.expr) for panel in board.panels for query in panel.queries)
    ]


def panel_of(alert: Alert) -> Panel:
    """The panel that an alert leads to. Raises ValueError where no board has it."""
    for panel in board_of(alert).panels:
        if panel.slug == alert.panel.panel:
            return panel
    raise ValueError(f"{alert.name} leads to {alert.panel}, which is on no board; add the panel first")


def board_of(alert: Alert) -> Dashboard:
    """The board of that panel. Raises ValueError where there is none."""
    for board in BOARDS:
        if board.slug == alert.panel.board:
            return board
    raise ValueError(f"{alert.name} leads to {alert.panel}, whose board there is not; add the board first")
