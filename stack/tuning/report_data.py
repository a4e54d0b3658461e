"""A bench as CSV and JSON, with every digit."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from exporters.statistics import median_or_none
from stack.bench.result import STORED, Bench, Run
from stack.tuning.comparison import SHARE, metric_of
from stack.tuning.derived import Material, RunGroup, costs, finite, groups, hits, rank, settings, stability, starts
from stack.tuning.lab_rows import LabRow
from stack.tuning.load_limit import curve_data

COLUMNS = (
    "bench",
    "run",
    STORED["variant"],
    "workload",
    "point",
    "started",
    "ended",
    "seed",
    "asked",
    "ok",
    "failed",
    "cut",
    "figure",
    "value",
    "unit",
)


def as_csv(bench: Bench) -> str:
    """One row for each run and figure, with every digit; a run without figures has one row without."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in bench.runs:
        fixed: tuple[object, ...] = (
            bench.id,
            run.number,
            run.variant,
            run.workload,
            run.point,
            _stamp(run.started_s),
            _stamp(run.ended_s),
            run.seed,
        )
        fixed += (run.asked, run.ok, sum(run.failed.values()), run.cut or "")
        figures: Iterable[tuple[object, ...]] = (
            (name, run.figures[name], _unit(name)) for name in sorted(run.figures, key=rank)
        )
        for figure in figures if run.figures else (("", "", ""),):
            writer.writerow((*fixed, *figure))
    return text.getvalue()


def _unit(figure: str) -> str:
    unit = metric_of(figure).unit
    return "ratio" if unit == SHARE else unit


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_json(material: Material, lab: Sequence[LabRow] = ()) -> str:
    """The bench, its comparisons, and what the report worked out."""
    content = {
        "bench": material.bench,
        "judgements": material.comparisons,
        "events": material.happened,
        "lab": lab,
        "derived": {
            "figures": [_derived(group, material.bench) for group in groups(material.bench)],
            "curves": curve_data(material.bench),
            "hits": [msgspec.to_builtins(hit) | {"reading": hit.reading} for hit in hits(material.bench)],
            "costs": [
                msgspec.to_builtins(cost) | {"times": cost.times, "even_at": cost.even_at} for cost in costs(material)
            ],
            "currency": material.prices.currency if material.prices else None,
            "starts": {variant.name: starts(variant) for variant in material.bench.variants},
            "stability": {
                variant.name: _counts(run for run in material.bench.runs if run.variant == variant.name)
                for variant in material.bench.variants
            },
            "differences": {name: values for name, values, differs in settings(material.bench.variants) if differs},
        },
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"


def _derived(group: RunGroup, bench: Bench) -> Mapping[str, Any]:
    names = sorted(
        {figure for run in group.runs for figure, value in run.figures.items() if finite(value) is not None}, key=rank
    )
    medians = {
        variant.name: {name: median_or_none(group.values(variant.name, name)) for name in names}
        for variant in bench.variants
    }
    return {"workload": group.workload, "point": group.point, "medians": medians}


def _counts(runs: Iterable[Run]) -> Mapping[str, Any]:
    ended, failed = stability(runs)
    return {"ended": ended, "failed": failed}
