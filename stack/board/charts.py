"""Chart data of a panel from Prometheus' results; static/draw.js draws it.

The only module that uses plotly, of which only the JavaScript file is read: its Python is never imported, because that
takes longer than the page."""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboards.interpolate import Range
from dashboards.model import Panel, Query, Shape
from dashboards.variables import CHAIN
from exporters.catalogue.promql import BOUND
from exporters.net.prometheus import QueryResult, QuerySeries

MOST_SERIES = 40
MOST_ROWS = 200
INSTANT = (Shape.NUMBER, Shape.TABLE)
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_BEYOND, _AROUND = ("<", ">"), {"at least": "low", "at most": "high"}  # values of the label bound
_FIRST = ("alertname", "severity", *CHAIN)  # columns of a table that come first

ChartData = dict[str, Any]


def plotly_js() -> bytes:
    """The script that draws, from plotly's wheel. Raises FileNotFoundError when the installation lacks it."""
    file = importlib.metadata.distribution("plotly").locate_file("plotly/package_data/plotly.min.js")
    return Path(str(file)).read_bytes()


def draw(panel: Panel, answers: Sequence[QueryResult], over: Range) -> ChartData:
    """Return what a panel shows. answers: one for each query. Times are milliseconds; a value that is no number (NaN,
    infinite, absent) is null.

    errors: errors of Prometheus. note: its warnings, and what was left out. empty: the
    sentence shown where there is no data."""
    shapes = {
        Shape.LINES: _lines,
        Shape.STACK: _lines,
        Shape.NUMBER: _numbers,
        Shape.TABLE: _table,
        Shape.HEATMAP: _heatmap,
    }
    drawn = shapes[panel.shape](panel, answers, over)
    drawn |= {"shape": str(panel.shape), "start": _ms(over.start_s), "end": _ms(over.end_s), "step": _ms(over.step_s)}
    drawn["errors"] = list(dict.fromkeys(answer.error for answer in answers if answer.error))
    notes = dict.fromkeys(note for answer in answers for note in answer.notes)
    drawn["note"] = "; ".join(filter(None, (drawn["note"], *(f"Prometheus says: {note}" for note in notes))))
    drawn["empty"] = "" if drawn.pop("any") or drawn["errors"] else panel.when_empty
    return drawn


def legend(pattern: str, labels: Mapping[str, str]) -> str:
    """Return the legend of a series: `{{label}}` filled in. A series without any such label shows all its labels."""
    name = " ".join(_LABEL.sub(lambda found: labels.get(found[1], ""), pattern).split())
    rest = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()) if key != "__name__")
    return name or rest or "all"


def figure(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _lines(panel: Panel, answers: Sequence[QueryResult], over: Range) -> ChartData:
    found = [
        {"name": legend(query.legend, labels), "unit": query.unit}
        | _with_bounds({bound: on_grid(series, over) for bound, series in parts.items()})
        for query, labels, parts in _by_bound(panel, answers)
    ]
    found = [one for one in found if any(value is not None for value in one["values"])]
    kept, note = _most(found, lambda one: max(value for value in one["values"] if value is not None))
    # what happened comes before what never did
    kept.sort(key=lambda one: (not any(one["values"]), _natural(one["name"])))
    return {"series": kept, "note": note, "any": bool(found)}


def _with_bounds(parts: Mapping[str, list[float | None]]) -> ChartData:
    """Values at each step, of a quantile and of the bounds returned beside it or instead of it
    (promql.bounded_quantile).

    marks: "<" or ">" where the value is a bound that the quantile lies beyond. low, high: the bounds of the bucket that
    the quantile lies in."""
    values = list(parts.get("", [None] * len(next(iter(parts.values())))))
    marks: list[str | None] = [None] * len(values)
    for mark in _BEYOND:
        for index, value in enumerate(parts.get(mark, ())):
            if value is not None and values[index] is None:
                values[index], marks[index] = value, mark
    marked = {"marks": marks} if any(marks) else {}
    return {"values": values} | marked | {key: parts[bound] for bound, key in _AROUND.items() if bound in parts}


def on_grid(series: QuerySeries, over: Range) -> list[float | None]:
    """The values of a range query at every step, null where there is none."""
    size = _size(over)
    values: list[float | None] = [None] * size
    for at_s, text in series.values:
        index = round((at_s - over.start_s) / over.step_s)
        if 0 <= index < size:
            values[index] = figure(text)
    return values


def _size(over: Range) -> int:
    return int(over.seconds / over.step_s + 1e-6) + 1


def _numbers(panel: Panel, answers: Sequence[QueryResult], over: Range) -> ChartData:
    found = []
    for query, labels, parts in _by_bound(panel, answers):
        point = _with_bounds(
            {bound: [figure(series.value[1])] if series.value else [None] for bound, series in parts.items()}
        )
        if point["values"][0] is not None:
            found.append(
                {"name": legend(query.legend, labels), "unit": query.unit, "value": point["values"][0]} | point
            )
    kept, note = _most(found, lambda one: one["value"])
    return {"series": kept, "note": note, "any": bool(found)}


def _table(panel: Panel, answers: Sequence[QueryResult], over: Range) -> ChartData:
    """One row for each set of labels; the one to look at, by its first figure, on top."""
    rows: dict[frozenset[tuple[str, str]], list[float | None]] = {}
    for index, (query_answer) in enumerate(answers):
        for series in query_answer.series:
            key = frozenset((name, value) for name, value in series.metric.items() if name != "__name__")
            value = figure(series.value[1]) if series.value else None
            if value is not None:
                rows.setdefault(key, [None] * len(answers))[index] = value
    labels = sorted(
        {name for key in rows for name, _ in key},
        key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name),
    )
    columns: list[ChartData] = [{"label": name} for name in labels]
    columns += [
        {"name": " ".join(_LABEL.sub("", query.legend).split()) or "value", "unit": query.unit}
        for query in panel.queries
    ]
    whole = [(dict(key), values) for key, values in rows.items()]
    sign = 1 if panel.lowest_first else -1
    whole.sort(key=lambda row: ([(value is None, sign * (value or 0)) for value in row[1]], sorted(row[0].items())))
    note = f"the first {MOST_ROWS} of {len(whole)} rows" if len(whole) > MOST_ROWS else ""
    cells = [[*(key.get(name, "") for name in labels), *values] for key, values in whole[:MOST_ROWS]]
    return {"columns": columns, "rows": cells, "note": note, "any": bool(whole)}


def _heatmap(panel: Panel, answers: Sequence[QueryResult], over: Range) -> ChartData:
    """Prometheus' buckets hold all that is at most `le`; a cell shows what lies between two bounds. The last bound is
    null: infinity."""
    cumulative: dict[float, list[float | None]] = {}
    for _, series in _each(panel, answers):
        try:
            bound = float(series.metric["le"])
        except (KeyError, ValueError):
            continue
        values = on_grid(series, over)
        cumulative[bound] = (
            [_plus(a, b) for a, b in zip(cumulative[bound], values, strict=True)] if bound in cumulative else values
        )
    bounds = sorted(cumulative)
    # the highest so far: bounds come and go when engines are updated, and a missing one holds nobody back
    below = [0.0] * _size(over)
    cells = []
    for bound in bounds:
        here = cumulative[bound]
        # Rates of buckets are estimates of their own, so that a lower one may lie a little above its neighbour.
        cells.append([None if b is None else max(0.0, b - a) for a, b in zip(below, here, strict=True)])
        below = [a if b is None else max(a, b) for a, b in zip(below, here, strict=True)]
    used = [index for index, row in enumerate(cells) if any(row)]
    shown = slice(max(used[0] - 1, 0), used[-1] + 2) if used else slice(0, 0)
    return {
        "bounds": [bound if math.isfinite(bound) else None for bound in bounds[shown]],
        "cells": cells[shown],
        "note": "",
        "any": bool(used),
    }


def _plus(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b


def _each(panel: Panel, answers: Sequence[QueryResult]) -> Iterable[tuple[Query, QuerySeries]]:
    for query, answer in zip(panel.queries, answers, strict=True):
        for series in answer.series:
            yield query, series


def _by_bound(
    panel: Panel, answers: Sequence[QueryResult]
) -> Iterable[tuple[Query, dict[str, str], dict[str, QuerySeries]]]:
    """Series that differ in nothing but their bound, together."""
    for query, answer in zip(panel.queries, answers, strict=True):
        together: dict[frozenset[tuple[str, str]], dict[str, QuerySeries]] = {}
        for series in answer.series:
            bare = frozenset((name, value) for name, value in series.metric.items() if name != BOUND)
            together.setdefault(bare, {})[series.metric.get(BOUND, "")] = series
        yield from ((query, dict(labels), parts) for labels, parts in together.items())


def _most(found: list[ChartData], weight: Any) -> tuple[list[ChartData], str]:
    """Return at most MOST_SERIES series, the highest ones, and a sentence if others were left out."""
    if len(found) <= MOST_SERIES:
        return sorted(found, key=lambda one: _natural(one["name"])), ""
    kept = sorted(found, key=weight, reverse=True)[:MOST_SERIES]
    return kept, f"the highest {MOST_SERIES} of {len(found)} series; narrow the choices above to see others"


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """vllm-2 before vllm-10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
