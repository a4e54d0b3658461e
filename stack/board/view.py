"""What the address of a page asks for: a time range and choices, written as Grafana writes them, so that one link fits both.

`/d/vllm-watch-overview?var-model_name=llama&from=now-1h&to=now&viewPanel=17`"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from dashboards import variables
from dashboards.interpolate import ALL, Range
from dashboards.model import Board, Variable

LONGEST_S = 90 * 86400.0
_SHORTEST_S = 10.0
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_RELATIVE = re.compile(r"now(?:-(\d{1,9})([smhdw]))?")
_POINTS = (100, 2000)
_MOST_CHOICES, _LONGEST_CHOICE = 200, 300

Choices = dict[str, str | Sequence[str]]


class BadView(ValueError):
    """An address that cannot be shown; one sentence for who typed it."""


class Parameters(Protocol):
    """The parameters of an address; a name may come more than once."""

    def get(self, key: str, default: str, /) -> str: ...
    def getall(self, key: str, default: list[str], /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class View:
    """Time in unix seconds. points: how many a panel has room for."""

    start_s: float
    end_s: float
    choices: Mapping[str, str | Sequence[str]]
    points: int = 600

    def over(self, scrape_s: float) -> Range:
        """The range of a panel's queries, its ends on multiples of the step as Grafana aligns them: what is drawn does not jitter."""
        loose = Range(self.start_s, self.end_s, self.points, scrape_s)
        step = loose.step_s
        start, end = (at // step * step for at in (self.start_s, self.end_s))
        return Range(start, max(end, start + step), self.points, scrape_s)


def parse(parameters: Parameters, board: Board, now_s: float) -> View:
    """The view that an address asks for. Raises BadView."""
    start, end = span(parameters.get("from", "now-1h"), parameters.get("to", "now"), now_s)
    points = parameters.get("points", "600")
    if not re.fullmatch(r"\d{1,5}", points):
        raise BadView(f"points={points[:20]} is no number")
    return View(start, end, dict(_choices(parameters, board)), min(max(int(points), _POINTS[0]), _POINTS[1]))


def span(start: str, end: str, now_s: float) -> tuple[float, float]:
    """Unix seconds of a range. Raises BadView when it is empty, longer than 90 days, or not readable."""
    start_s, end_s = moment(start, now_s), moment(end, now_s)
    if end_s - start_s < _SHORTEST_S:
        raise BadView(f"from={start[:40]} to={end[:40]}: a range is at least {_SHORTEST_S:.0f} s long and ends after it starts")
    if end_s - start_s > LONGEST_S:
        raise BadView(f"from={start[:40]} to={end[:40]}: a range is at most {LONGEST_S / 86400:.0f} days long")
    return start_s, end_s


def moment(text: str, now_s: float) -> float:
    """Unix seconds of `now`, `now-6h`, milliseconds, or ISO 8601 (UTC where it names no zone). Raises BadView."""
    if found := _RELATIVE.fullmatch(text):
        return now_s - int(found[1] or 0) * _UNIT_S[found[2] or "s"]
    if re.fullmatch(r"\d{10,14}", text):
        return int(text) / 1000
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadView(f"{text[:40]!r} is no time; write now-1h, 2026-03-01T12:00:00Z, or milliseconds since 1970") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _choices(parameters: Parameters, board: Board) -> Choices:
    chosen: Choices = {}
    for variable in variables.of(board):
        values = [value for value in parameters.getall(f"var-{variable.name}", []) if value]
        if len(values) > _MOST_CHOICES or any(len(value) > _LONGEST_CHOICE for value in values):
            raise BadView(f"var-{variable.name}: at most {_MOST_CHOICES} values of at most {_LONGEST_CHOICE} letters")
        chosen[variable.name] = _many(values) if variable.kind == "query" else _one(variable, values)
    return chosen


def _many(values: list[str]) -> list[str]:
    return [ALL] if not values or {ALL, "All"} & set(values) else list(dict.fromkeys(values))


def _one(variable: Variable, values: list[str]) -> str:
    value = values[0] if values else variable.default or (variable.options or ("",))[0]
    if variable.kind == "custom" and value not in variable.options:
        raise BadView(f"var-{variable.name}={value}: choose one of {', '.join(variable.options)}")
    if variable.kind == "text" and not re.fullmatch(r"[\w.]*", value):
        raise BadView(f"var-{variable.name}: letters, digits and dots only")
    return value
