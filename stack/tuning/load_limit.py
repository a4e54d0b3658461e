"""Latency against throughput in a report: the load up to which an SLO is met, as chart data, table and sentences. Pure.

Invariant: loads are assessed as they were measured; nothing is interpolated, and no load beyond the highest one is
called within. Finding the limit, by more loads around it, is the job of the load generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from stack.bench.load_curve import LATENCIES, MOST_MISSED, LoadCurve, LoadPoint, curves
from stack.bench.result import Bench
from stack.tuning.comparison import SHARE, metric_of
from stack.tuning.derived import plain, written
from stack.tuning.report_blocks import Block, Cell, Pictures, Row, Table, Text

_MARKS = {"within": "pass", "beyond": "fail", "not measured": "not measured"}
_SIGNS = {"within": "✓", "beyond": "✗", "not measured": "~"}


def shown_curves(bench: Bench) -> list[LoadCurve]:
    """Return the curves that show something: of several loads, or of one that an SLO assesses."""
    return [curve for curve in curves(bench) if bench.slo or len(curve.points) > 1]


def curve_charts(bench: Bench, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the charts of each workload and kind of load: a line for each variant in the order of its loads."""
    found = []
    for (title, unit), several in groupby(shown_curves(bench), key=lambda curve: (curve.title, curve.unit)):
        mine = [curve for curve in several if curve.variant in names]
        charts = [_chart(mine, name, unit, bench.slo, names) for name in LATENCIES]
        if drawn := [chart for chart in charts if chart["lines"]]:
            found.append({"title": title, "charts": drawn})
    return found


def _chart(
    mine: Sequence[LoadCurve], latency: str, unit: str, slo: Mapping[str, float], names: Sequence[str]
) -> dict[str, Any]:
    lines = []
    for curve in mine:
        points = [point for point in curve.points if latency in point.p95_ms]
        if points:
            last = curve.last_within(slo)
            lines.append({
                "variant": names.index(curve.variant),
                "throughput": [float(f"{point.throughput:.5g}") for point in points],
                "latency": [float(f"{point.p95_ms[latency]:.5g}") for point in points],
                "load": [point.label for point in points],
                "beyond": [point.verdict(slo) == "beyond" for point in points],
                "last": points.index(last) if last in points else None,
            })  # fmt: skip
    return {"title": f"{metric_of(latency).title} p95", "unit": "ms", "throughput": unit, "slo": slo.get(latency),
            "lines": lines}  # fmt: skip


def curve_blocks(bench: Bench) -> Iterator[Block]:
    """Yield a sentence for each curve, the charts, and a row for each load."""
    found = shown_curves(bench)
    if not found:
        return
    if bench.slo:
        yield from (Text(sentence) for curve in found for sentence in _sentences(curve, bench.slo))
    else:
        yield Text("No SLO is known, so no load is assessed: give one with --limit, such as --limit ttft_ms=500.")
    yield Pictures("curves")
    yield Table(("load", "variant", "throughput", "answers/s", *map(_limited(bench.slo), LATENCIES), "failed", "SLO"),
                tuple(_row(curve, point, bench.slo) for curve in found for point in curve.points))  # fmt: skip


def curve_data(bench: Bench) -> list[dict[str, Any]]:
    """Return the curves and their last loads within the SLO, for the JSON form."""
    return [
        {
            "workload": curve.workload, "kind": curve.kind, "variant": curve.variant, "unit": curve.unit,
            "slo": dict(bench.slo), "last_within": last.label if (last := curve.last_within(bench.slo)) else None,
            "points": [
                {"load": each.label, "throughput": each.throughput, "qps": each.qps, "p95_ms": dict(each.p95_ms),
                 "error_ratio": each.error_ratio, "slo": each.verdict(bench.slo)}
                for each in curve.points
            ],
        }
        for curve in shown_curves(bench)
    ]  # fmt: skip


def _limited(slo: Mapping[str, float]) -> Any:
    def head(latency: str) -> str:
        limit = f", at most {written(slo[latency], 'ms')}" if latency in slo else ""
        return f"{metric_of(latency).title} p95{limit}"

    return head


def _row(curve: LoadCurve, point: LoadPoint, slo: Mapping[str, float]) -> Row:
    verdict = point.verdict(slo)
    over = point.exceeded(slo)
    last = ", the last" if point == curve.last_within(slo) else ""
    return (
        f"{curve.workload}, {point.label}",
        curve.variant,
        written(point.throughput, curve.unit),
        written(point.qps),
        *(_value(written(point.p95_ms.get(name), "ms"), name in over) for name in LATENCIES),
        _value(written(point.error_ratio, SHARE), "error_ratio" in over),
        Cell(f"{_SIGNS[verdict]} {verdict}{last}", _MARKS[verdict]) if slo else Cell(written(None)),
    )


def _value(text: str, over: bool) -> Cell:
    return Cell(text, "worse" if over else "")


def _sentences(curve: LoadCurve, slo: Mapping[str, float]) -> Iterator[str]:
    """Yield the limit of one curve, and what there is to doubt about it."""
    subject = f"{curve.variant}, {curve.title}"
    last = curve.last_within(slo)
    after = curve.points[curve.points.index(last) + 1 if last else 0 :]
    if last is None:
        yield f"{subject}: no load is known to be within the SLO; {_why(after[0], slo)}."
    elif not after:
        yield (
            f"{subject}: every load is within the SLO, up to {last.label} with {_rate(curve, last)}; the limit is not"
            " reached, so measure higher loads."
        )
    else:
        yield (
            f"{subject}: the last load within the SLO is {last.label} with {_rate(curve, last)}; {_why(after[0], slo)}."
        )
    again = [point.label for point in after[1:] if point.verdict(slo) == "within"]
    if again:
        yield (
            f"{subject}: {', '.join(again)} within the SLO again above it, so runs vary around the limit; repeat these"
            " loads."
        )


def _rate(curve: LoadCurve, point: LoadPoint) -> str:
    return written(point.throughput, curve.unit)


def _why(point: LoadPoint, slo: Mapping[str, float]) -> str:
    over = point.exceeded(slo)
    if not over:
        missing = [f"{metric_of(name).title} p95" for name in slo if name not in point.p95_ms]
        return f"{' and '.join(missing)} of {point.label} {'was' if len(missing) == 1 else 'were'} not measured"
    return f"{point.label} exceeds it with " + " and ".join(
        f"{plain(100 * (point.error_ratio or 0.0))} % failed requests, at most {plain(100 * MOST_MISSED)} % may"
        if name == "error_ratio"
        else f"{metric_of(name).title} p95 {written(point.p95_ms[name], 'ms')}, at most {written(slo[name], 'ms')}"
        for name in over
    )
