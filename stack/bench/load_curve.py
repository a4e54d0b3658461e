"""Loads of a bench with their throughput and latency, in the form that `alerts derive` reads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from alerts.derive import BenchLoad
from stack.bench.result import Bench


def load_curves(bench: Bench, variant: str | None = None) -> dict[str, list[BenchLoad]]:
    """Return the loads of a bench by workload and kind of load. Raises ValueError where the variant is ambiguous."""
    variants = [each.name for each in bench.variants]
    if variant is None and len(variants) > 1:
        raise ValueError(f"the bench compares {', '.join(variants)}: say with --variant which of them is deployed")
    if variant is not None and variant not in variants:
        raise ValueError(f"the bench has no variant {variant}; it has {', '.join(variants)}")
    runs: dict[tuple[str, str, str], list[Mapping[str, float]]] = defaultdict(list)
    for run in bench.runs:
        kind = _LOAD.fullmatch(run.point)
        if (
            kind
            and run.cut is None
            and run.variant == (variant or run.variant)
            and {"ttft_ms.p95", _done(run.figures)} <= run.figures.keys()
        ):
            runs[run.workload, kind[1], kind[2]].append(run.figures)
    found: dict[str, list[BenchLoad]] = defaultdict(list)
    for (workload, kind_, number), figures in runs.items():
        times = {
            name: [each[f"{name}_ms.p95"] / 1000 for each in figures if f"{name}_ms.p95" in each]
            for name in ("ttft", "tpot")
        }
        throughput, tpot_s = (
            median(each[_done(each)] for each in figures),
            median(times["tpot"]) if times["tpot"] else None,
        )
        found[f"{workload} ({_KINDS[kind_]})"].append(
            BenchLoad(float(number), kind_ + number, throughput, median(times["ttft"]), tpot_s)
        )
    return dict(found)


_LOAD = re.compile(r"([cr])([\d.]+(?:e[+-]?\d+)?)")
_KINDS = {"c": "at once", "r": "per second"}


def _done(figures: Mapping[str, float]) -> str:
    return "tokens_per_second" if "tokens_per_second" in figures else "qps"
