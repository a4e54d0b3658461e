"""Time range and variables of an address, in Grafana's format.

`/d/vllm-watch-overview?var-model_name=llama&from=now-1h&to=now&viewPanel=17`"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

from dashboards import variables
from dashboards.interpolate import ALL, MAX_POINTS, Range
from dashboards.model import Dashboard, Variable
from exporters.text import parse_duration

LONGEST_S = 90 * 86400.0
_SHORTEST_S = 10.0
_RELATIVE = re.compile(r"now(?:-(\d{1,9}[smhdw]))?", re.ASCII)
_POINTS = (100, 2000)
_MARK_STEP_S = 60.0  # Grafana's, for annotations that name no step
_MOST_CHOICES, _LONGEST_CHOICE = 200, 300

Choices = dict[str, str | Sequence[str]]


class BadView(ValueError):
    """An address that cannot be shown; one sentence for who typed it."""


class Parameters(Protocol):
    """The parameters of an address; a name may come more than once."""

    def get(self, key: str, default: str, /) -> str: ...
    def getall(self, key: str, default: list[str], /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class PanelView:
    """Time in unix seconds. points: how many a panel has room for. wrong: a sentence for each choice where a default
    stands instead."""

    start_s: float
    end_s: float
    choices: Mapping[str, str | Sequence[str]]
    points: int = 600
    wrong: Mapping[str, str] = field(default_factory=dict)

    def over(self, scrape_s: float) -> Range:
        """The range of a panel's queries, its ends on multiples of the step as Grafana aligns them: what is drawn does
        not jitter."""
        loose = Range(self.start_s, self.end_s, self.points, scrape_s)
        step = loose.step_s
        start, end = (at // step * step for at in (self.start_s, self.end_s))
        return Range(start, max(end, start + step), self.points, scrape_s)

    def over_marks(self) -> Range:
        """The range of annotations: as fine as may be, so that an alert of two minutes is there also in a week."""
        return replace(self, points=MAX_POINTS).over(
            max(_MARK_STEP_S, math.ceil((self.end_s - self.start_s) / MAX_POINTS))
        )


def parse(parameters: Parameters, board: Dashboard, now_s: float) -> PanelView:
    """The view that an address asks for. Raises BadView."""
    view = lenient(parameters, board, now_s)
    for message in view.wrong.values():
        raise BadView(message)
    return view


def lenient(parameters: Parameters, board: Dashboard, now_s: float) -> PanelView:
    """Return the view with the default wherever a choice is wrong, so that a page can offer the right ones. Raises
    BadView for a wrong time."""
    start, end = span(parameters.get("from", "now-1h"), parameters.get("to", "now"), now_s)
    points = parameters.get("points", "600")
    if not re.fullmatch(r"\d{1,5}", points):
        raise BadView(f"points={points[:20]} is no number")
    choices, wrong = _choices(parameters, board)
    return PanelView(start, end, choices, min(max(int(points), _POINTS[0]), _POINTS[1]), wrong)


def span(start: str, end: str, now_s: float) -> tuple[float, float]:
    """Unix seconds of a range. Raises BadView when it is empty, longer than 90 days, or not readable."""
    start_s, end_s = moment(start, now_s), moment(end, now_s)
    if end_s - start_s < _SHORTEST_S:
        raise BadView(
            f"from={start[:40]} to={end[:40]}: a range is at least {_SHORTEST_S:.0f} s long and ends after it starts"
        )
    if end_s - start_s > LONGEST_S:
        raise BadView(f"from={start[:40]} to={end[:40]}: a range is at most {LONGEST_S / 86400:.0f} days long")
    return start_s, end_s


def moment(text: str, now_s: float) -> float:
    """Unix seconds of `now`, `now-6h`, milliseconds, or ISO 8601 (UTC where it names no zone). Raises BadView."""
    if found := _RELATIVE.fullmatch(text):
        return now_s - parse_duration(found[1] or "0")
    if re.fullmatch(r"\d{10,14}", text):
        return int(text) / 1000
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadView(
            f"{text[:40]!r} is no time; write now-1h, 2026-03-01T12:00:00Z, or milliseconds since 1970"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _choices(parameters: Parameters, board: Dashboard) -> tuple[Choices, dict[str, str]]:
    chosen: Choices = {}
    wrong: dict[str, str] = {}
    for variable in variables.of(board):
        read = _many if variable.kind == "query" else _one
        try:
            chosen[variable.name] = read(
                variable, [value for value in parameters.getall(f"var-{variable.name}", []) if value]
            )
        except BadView as error:
            chosen[variable.name] = read(variable, [])
            wrong[variable.name] = str(error)
    return chosen, wrong


def _many(variable: Variable, values: list[str]) -> list[str]:
    if len(values) > _MOST_CHOICES or any(len(value) > _LONGEST_CHOICE for value in values):
        raise BadView(f"var-{variable.name}: at most {_MOST_CHOICES} values of at most {_LONGEST_CHOICE} letters")
    return [ALL] if not values or {ALL, "All"} & set(values) else list(dict.fromkeys(values))


def _one(variable: Variable, values: list[str]) -> str:
    if not values:
        return variable.default or (variable.options or ("",))[0]
    value = values[0]
    if variable.kind == "custom" and value not in variable.options:
        raise BadView(
            f"var-{variable.name}: {value[:40]!r} is not on offer; choose one of {', '.join(variable.options)}"
        )
    if variable.kind == "text" and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        raise BadView(
            f"var-{variable.name}: {value[:40]!r} is no number; write one such as {variable.default or '2.5'}"
        )
    return value
