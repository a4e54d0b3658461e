"""Lint of a dashboard's Grafana JSON: rules of grafana/dashboard-linter, mixtool and the catalogue, for every kind of
panel.

Invariant: rules read the printed text's own tree and the catalogue, never the model it came from, so that they also
check any dashboard. What a dashboard of the project may break stands in EXCEPTIONS with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dashboards.lint_dashboards import BOARD_RULES, SHELF_RULES
from dashboards.lint_exceptions import EXCEPTIONS
from dashboards.lint_model import AllowedFinding, LintedDashboard, LintFinding
from dashboards.lint_panels import PANEL_RULES
from dashboards.lint_queries import QUERY_RULES


def lint(boards: Iterable[Mapping[str, Any]], allowed: Sequence[AllowedFinding] = EXCEPTIONS) -> list[LintFinding]:
    """Return the findings of these dashboards that no exception allows; an exception that nothing needs any more is a
    finding as well."""
    found = list(findings(boards))
    unused = [one for one in allowed if not any(one.covers(finding) for finding in found)]
    kept = [finding for finding in found if not any(one.covers(finding) for one in allowed)]
    return kept + [
        LintFinding("unused-exception", one.place, f"no board breaks {one.rule} there any more: remove the exception")
        for one in unused
    ]


def findings(boards: Iterable[Mapping[str, Any]]) -> Iterator[LintFinding]:
    """Everything that breaks a rule, allowed or not; boards are Grafana dashboards as json.loads gives them."""
    read = [LintedDashboard(board) for board in boards]
    for board in read:
        for rule, of_board in BOARD_RULES.items():
            yield from (LintFinding(rule, place, message) for place, message in of_board(board))
        for panel in board.panels:
            for rule, of_panel in PANEL_RULES.items():
                yield from (LintFinding(rule, panel.place, message) for message in of_panel(panel))
        for query in board.queries:
            for rule, of_query in QUERY_RULES.items():
                yield from (LintFinding(rule, query.place, message) for message in of_query(query))
    for rule, of_all in SHELF_RULES.items():
        yield from (LintFinding(rule, place, message) for place, message in of_all(read))


RULES = (*BOARD_RULES, *PANEL_RULES, *QUERY_RULES, *SHELF_RULES)
