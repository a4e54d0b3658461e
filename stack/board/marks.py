"""Annotations over all charts, from the same queries as Grafana's.

Source: Grafana's packages/grafana-prometheus, annotations.ts: samples above zero and at most one step apart are one
region, the step being 60 s where the annotation names none; with useValueForTime each value is a time in
milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dashboards.annotations import Annotation
from dashboards.interpolate import Range
from exporters.net.prometheus import QueryResult, QuerySeries
from stack.board.charts import figure, legend

MOST = 200

Mark = dict[str, Any]


def marks(annotation: Annotation, answer: QueryResult, over: Range) -> dict[str, Any]:
    """The marks within the range, oldest first: from, to (milliseconds; equal for a line) and title. over: what was
    asked, see View.over_marks."""
    read = _at_values if annotation.at_value else _regions
    found = {
        (mark["from"], mark["to"], mark["title"]): mark
        for series in answer.series
        for mark in read(annotation, series, over)
    }
    latest = sorted(found.values(), key=lambda mark: (mark["from"], mark["title"]))[-MOST:]
    note = f"the latest {MOST} of {len(found)}" if len(found) > MOST else ""
    return {"name": annotation.name, "colour": annotation.colour, "marks": latest, "error": answer.error, "note": note}


def _at_values(annotation: Annotation, series: QuerySeries, over: Range) -> Iterator[Mark]:
    title = legend(annotation.title, series.metric)
    for text in {text for _, text in series.values}:
        at = figure(text)
        if at is not None and over.start_s * 1000 <= at <= over.end_s * 1000:
            yield {"from": round(at), "to": round(at), "title": title}


def _regions(annotation: Annotation, series: QuerySeries, over: Range) -> Iterator[Mark]:
    title = legend(annotation.title, series.metric)
    times = [at_s for at_s, text in series.values if (figure(text) or 0) > 0]
    begin = None
    for at_s, following in zip(times, [*times[1:], None], strict=True):
        begin = at_s if begin is None else begin
        if following is None or following - at_s > over.step_s + 0.002:  # steps and times are sent in milliseconds
            yield {"from": round(begin * 1000), "to": round(at_s * 1000), "title": title}
            begin = None
