"""Chart data of a report for static/report.js: numbers, names and times. Pure.

Invariant: a request that is not drawn is counted in a note below its chart; totals are over all requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from exporters.events.log import TuningEvent
from exporters.requests.record import RequestRecord, ended_at
from exporters.statistics import median_or_none, quantiles
from stack.bench.result import Run
from stack.tuning.comparison import SHARE, metric_of
from stack.tuning.derived import Material, RunGroup, bands, finite, groups, kinds, rank
from stack.tuning.load_limit import curve_charts

MOST_POINTS = 3000
MOST_FAILED = 600
MOST_FIGURES = 6
SHARES = (*(n / 100 for n in range(100)), 0.995, 0.999, 1.0)  # of the requests, where a distribution is read
DOTS = (
    "ttft_ms.p50",
    "ttft_ms.p95",
    "tpot_ms.p50",
    "tokens_per_second",
    "hit_ratio",
    "queue_ms.mean",
    "memory_peak_gb",
    "e2e_ms.p50",
    "qps",
)
TIMES = ("ttft_ms", "tpot_ms", "e2e_ms")

Drawn = dict[str, Any]


def drawn(material: Material) -> Drawn:
    """Return the data of all charts. Times in unix milliseconds."""
    names = [variant.name for variant in material.bench.variants]
    whole = groups(material.bench)
    each = [one for group in whole for one in (group, *(replace(group, kind=kind) for kind in kinds(group)))]
    return {
        "variants": names,
        "shares": SHARES,
        "curves": curve_charts(material.bench, names),
        "groups": [_group(material, group, names) for group in each],
        "time": _time(material, names),
    }


def _group(material: Material, group: RunGroup, names: Sequence[str]) -> Drawn:
    return {
        "title": group.title,
        "spread": _spread(material, group, names),
        "dots": _dots(group, names, bands(material.bench).get(group.workload)),
    }


def _spread(material: Material, group: RunGroup, names: Sequence[str]) -> list[Drawn]:
    """Return the latency distribution of the answered requests of each variant, over all its counted runs."""
    found = []
    for metric in TIMES:
        curves = []
        for index, name in enumerate(names):
            records = [record for run in group.counted(name) for record in material.of_run.get(run.number, ())]
            values = [
                value
                for record in records
                if record.outcome == "ok"
                and group.kind in (None, record.team)
                and (value := getattr(record, metric)) is not None
            ]
            if values:
                at = [_short(value) for value in quantiles(values, SHARES)]
                curves.append({"variant": index, "count": len(values), "at": at})
        if curves:
            known = metric_of(metric)
            found.append({"title": known.title, "unit": known.unit, "curves": curves})
    return found


def _dots(group: RunGroup, names: Sequence[str], band: tuple[float, float] | None) -> list[Drawn]:
    """Return a dot for each run, in order: what moves with time and not with the variant is drift."""
    prefix = f"{group.kind}:" if group.kind else ""
    there = {figure for run in group.runs for figure, value in run.figures.items() if finite(value) is not None}
    of_requests = [
        figure for figure in sorted(there, key=rank) if figure.startswith(prefix) and (":" in figure) == bool(prefix)
    ]
    wanted = [prefix + figure for figure in DOTS if prefix + figure in there]
    found = []
    for figure in (wanted or of_requests)[:MOST_FIGURES]:
        known = metric_of(figure.removeprefix(prefix))
        scale = 100 if known.unit == SHARE else 1
        dots = [
            {
                "run": run.number,
                "variant": names.index(run.variant),
                "value": _short(value * scale),
                "cut": run.cut is not None,
            }
            for run in sorted(group.runs, key=lambda run: (run.started_s, run.number))
            if run.variant in names and (value := finite(run.figures.get(figure))) is not None
        ]
        middles = [median_or_none(group.values(name, figure)) for name in names]
        found.append({
            "title": known.title, "unit": "%" if known.unit == SHARE else known.unit, "dots": dots,
            "medians": [None if value is None else _short(value * scale) for value in middles],
            "band": [edge * 100 for edge in band] if band and figure.endswith("hit_ratio") else None,
        })  # fmt: skip
    return found


def _by_end(records: Iterable[RequestRecord]) -> list[tuple[float, RequestRecord]]:
    """Return the records that say when they ended, with that time."""
    found = []
    for record in records:
        ended_s = ended_at(record)
        if ended_s is not None:
            found.append((ended_s, record))
    return found


def _time(material: Material, names: Sequence[str]) -> Drawn:
    """Return every request by the time of its end, with runs and events."""
    bench = material.bench
    runs = [run for run in bench.runs if run.variant in names]
    timed = {run.number: _by_end(material.of_run.get(run.number, ())) for run in runs}
    streamed = any(record.ttft_ms is not None for found in timed.values() for _, record in found)
    metric = "ttft_ms" if streamed else "e2e_ms"
    good: dict[int, list[tuple[float, float]]] = {}
    bad = []
    for run in runs:
        good[run.number] = []
        for at_s, record in timed[run.number]:
            value = _measured(record, metric)
            if value is not None:
                good[run.number].append((at_s, value))
            if record.outcome not in (None, "ok"):
                bad.append((at_s, run, record))
    kept, every = _thinned(good)
    shown_bad = bad[:: math.ceil(len(bad) / MOST_FAILED) or 1]
    whole, shown = sum(map(len, good.values())), sum(map(len, kept.values()))
    notes = []
    if every > 1:
        notes.append(
            f"{shown:,} of {whole:,} answers are drawn: one in {every} of each run, in the order of their ends, and the"
            " run's slowest."
        )
    if len(shown_bad) < len(bad):
        notes.append(f"{len(shown_bad):,} of {len(bad):,} failed requests are marked.")
    if every > 1 or len(shown_bad) < len(bad):
        notes.append("Distributions and tables count all.")
    at_least = [run.started_s for run in runs] + [bench.started_s]
    at_most = [run.ended_s for run in runs] + [bench.ended_s]
    return {
        "title": metric_of(metric).title,
        "unit": "ms",
        "start": _ms(min(at_least)),
        "end": _ms(max(at_most)),
        "note": " ".join(notes),
        "points": [
            _points(index, [run for run in runs if run.variant == name], kept) for index, name in enumerate(names)
        ],
        "failed": [
            {
                "at": _ms(at_s),
                "variant": names.index(run.variant),
                "run": run.number,
                "why": record.reason or record.outcome,
            }
            for at_s, run, record in shown_bad
        ],
        "runs": [
            {
                "run": run.number,
                "variant": names.index(run.variant),
                "from": _ms(run.started_s),
                "to": _ms(run.ended_s),
                "cut": run.cut is not None,
            }
            for run in runs
        ],
        "events": [_event(f"E{number}", event, max(at_most)) for number, event in enumerate(material.happened, 1)],
    }


def _event(name: str, event: TuningEvent, ended_s: float) -> Drawn:
    """end: of a region; one that is open reaches to the end of the picture."""
    windows = [[_ms(window.start_s), _ms(window.end_s)] for window in (event.before, event.after) if window]
    end = ended_s if event.open else event.end_s
    return {
        "name": name,
        "at": _ms(event.at_s),
        "end": None if end is None else _ms(max(end, event.at_s)),
        "windows": windows,
    }


def _measured(record: RequestRecord, metric: str) -> float | None:
    value: float | None = getattr(record, metric)
    return value if record.outcome in (None, "ok") else None


def _thinned(good: dict[int, list[tuple[float, float]]]) -> tuple[dict[int, list[tuple[float, float]]], int]:
    """One in so many requests of each run, and its slowest; and how many."""
    every = math.ceil(sum(map(len, good.values())) / MOST_POINTS) or 1
    kept = {}
    for number, found in good.items():
        ordered = sorted(found)
        slowest = max(ordered, key=lambda one: one[1], default=None)
        kept[number] = [one for index, one in enumerate(ordered) if index % every == 0 or one is slowest]
    return kept, every


def _points(index: int, runs: Iterable[Run], kept: dict[int, list[tuple[float, float]]]) -> Drawn:
    points = [(run.number, at_s, value) for run in runs for at_s, value in kept.get(run.number, ())]
    return {
        "variant": index,
        "run": [run for run, _, _ in points],
        "at": [_ms(at_s) for _, at_s, _ in points],
        "value": [_short(v) for _, _, v in points],
    }


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _short(value: float) -> float:
    """Five digits are more than a screen shows."""
    return float(f"{value:.5g}")
