"""Loads of a bench with their throughput and latency: for `alerts derive`, and compared with an SLO for the report.

Invariant: a load is within the SLO where every limited latency was measured, its p95 is at most its limit, and no more
requests failed than may miss it; what was not measured is never within."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from alerts.derive import BenchLoad
from stack.bench.result import Bench, Run

MOST_MISSED = 0.05  # of the requests: the limits are for the p95, and a request that failed met none
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")

SloVerdict = Literal["within", "beyond", "not measured"]


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load of a variant, each value the median of its complete runs. at: requests at once, or per second.

    throughput: output tokens/s, or answers/s where tokens are unknown. p95_ms: by latency. error_ratio: 0 to 1."""

    at: float
    label: str
    throughput: float
    qps: float | None
    p95_ms: Mapping[str, float]
    error_ratio: float | None

    def verdict(self, slo: Mapping[str, float]) -> SloVerdict:
        """Return whether this load meets the limits in ms."""
        if self.exceeded(slo):
            return "beyond"
        return "within" if slo and slo.keys() <= self.p95_ms.keys() else "not measured"

    def exceeded(self, slo: Mapping[str, float]) -> tuple[str, ...]:
        """Return the names of the limits that it exceeds; error_ratio for too many failures."""
        over = tuple(name for name, limit in slo.items() if self.p95_ms.get(name, 0.0) > limit)
        return (*over, *(("error_ratio",) if slo and (self.error_ratio or 0.0) > MOST_MISSED else ()))


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Loads of one workload and one kind of load on one variant, the lowest first. unit: of their throughput."""

    workload: str
    kind: str
    variant: str
    unit: str
    points: tuple[LoadPoint, ...]

    @property
    def title(self) -> str:
        return f"{self.workload} ({self.kind})"

    def last_within(self, slo: Mapping[str, float]) -> LoadPoint | None:
        """Return the highest load up to which every load is within; None where the lowest one is not."""
        last = None
        for point in self.points:
            if point.verdict(slo) != "within":
                break
            last = point
        return last


def curves(bench: Bench) -> list[LoadCurve]:
    """Return the curve of each workload, kind of load and variant, in the order of the runs."""
    runs: dict[tuple[str, str, str], dict[tuple[float, str], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in bench.runs:
        load = _LOAD.fullmatch(run.point)
        if load and run.cut is None and any(f"{name}.p95" in run.figures for name in LATENCIES):
            kind = _KINDS[load["kind"]] + (f", at most {load['most']} at once" if load["most"] else "")
            runs[run.workload, kind, run.variant][float(load["at"]), run.point].append(run)
    found = []
    for (workload, kind, variant), loads in runs.items():
        figure = _throughput(run for each in loads.values() for run in each)
        if figure:
            points = [_point(at, label, figure, each) for (at, label), each in sorted(loads.items())]
            found.append(LoadCurve(workload, kind, variant, _UNITS[figure], tuple(points)))
    return found


def load_curves(bench: Bench, variant: str | None = None) -> dict[str, list[BenchLoad]]:
    """Return the loads of a bench by workload and kind of load. Raises ValueError where the variant is ambiguous."""
    variants = [each.name for each in bench.variants]
    if variant is None and len(variants) > 1:
        raise ValueError(f"the bench compares {', '.join(variants)}: say with --variant which of them is deployed")
    if variant is not None and variant not in variants:
        raise ValueError(f"the bench has no variant {variant}; it has {', '.join(variants)}")
    found = {
        curve.title: [
            BenchLoad(point.at, point.label, point.throughput, point.p95_ms["ttft_ms"] / 1000, _seconds(point))
            for point in curve.points
            if "ttft_ms" in point.p95_ms
        ]
        for curve in curves(bench)
        if variant in (None, curve.variant)
    }
    return {title: loads for title, loads in found.items() if loads}


def _seconds(point: LoadPoint) -> float | None:
    tpot_ms = point.p95_ms.get("tpot_ms")
    return None if tpot_ms is None else tpot_ms / 1000


_LOAD = re.compile(r"(?P<kind>[cr])(?P<at>[\d.]+(?:e[+-]?\d+)?)(?:-c(?P<most>\d+))?")
_KINDS = {"c": "at once", "r": "per second"}
_UNITS = {"tokens_per_second": "output tokens/s", "qps": "answers/s"}


def _throughput(runs: Iterable[Run]) -> str | None:
    """Return the figure of throughput that every run has."""
    known = [run.figures.keys() for run in runs]
    return next((figure for figure in _UNITS if all(figure in figures for figures in known)), None)


def _point(at: float, label: str, figure: str, runs: Sequence[Run]) -> LoadPoint:
    def middle(name: str) -> float | None:
        values = [run.figures[name] for run in runs if name in run.figures]
        return median(values) if values else None

    times = {name: middle(f"{name}.p95") for name in LATENCIES}
    return LoadPoint(
        at=at,
        label=label,
        throughput=middle(figure) or 0.0,
        qps=middle("qps"),
        p95_ms={name: value for name, value in times.items() if value is not None},
        error_ratio=middle("error_ratio"),
    )
