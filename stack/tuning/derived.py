"""Values derived from a bench for its report: medians over runs, hit bands, cost, starts, failures, and settings of
the variants. Pure.

Invariant: what was not measured is None, never 0; a run that was cut counts only where its variant has no complete
one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from exporters.accounting.prices import Prices
from exporters.events.log import TuningEvent
from exporters.requests.record import RequestRecord
from exporters.statistics import median_or_none
from stack.bench.result import STORED, Bench, BenchVariant, Run, run_of, without_secrets
from stack.bench.workload import METRICS
from stack.gateway.reasons import REASONS
from stack.tuning.comparison import SHARE, Comparison

ABSENT = "\u2013"  # a dash stands for what was not measured
_REFUSED = re.compile(r"(http|stream_error)_(429|503)")
_HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Input of a report. gpus: GPUs of each variant's engine; gpu_name: their model, which has a price."""

    bench: Bench
    records: Sequence[RequestRecord] = ()
    comparisons: Sequence[Comparison] = ()
    events: Sequence[TuningEvent] = ()
    prices: Prices | None = None
    gpus: float | None = None
    gpu_name: str | None = None
    of_run: Mapping[int, Sequence[RequestRecord]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bench", without_secrets(self.bench))
        of_run: dict[int, list[RequestRecord]] = {}
        for record in self.records:
            if (number := run_of(record)) is not None:
                of_run.setdefault(number, []).append(record)
        object.__setattr__(self, "of_run", of_run)

    @property
    def happened(self) -> list[TuningEvent]:
        """Return the newest record of each event that was written for the bench or fell into it, by time."""
        bench = self.bench
        newest = {event.id: event for event in self.events}.values()
        mine = (
            event
            for event in newest
            if event.id in bench.events or (event.at_s <= bench.ended_s and _end_s(event) >= bench.started_s)
        )
        return sorted(mine, key=lambda event: event.at_s)


def _end_s(event: TuningEvent) -> float:
    return math.inf if event.open else event.end_s or event.at_s


@dataclass(frozen=True, slots=True)
class RunGroup:
    """All runs of one workload at one load; kind: of one class of its requests only."""

    workload: str
    point: str
    runs: tuple[Run, ...]
    kind: str | None = None

    @property
    def title(self) -> str:
        return f"{self.workload}, {self.point}" + (f": {self.kind} requests" if self.kind else "")

    def counted(self, variant: str) -> list[Run]:
        """Return the complete runs of a variant, or those that were cut where there are no others."""
        mine = [run for run in self.runs if run.variant == variant]
        return [run for run in mine if run.cut is None] or mine

    def values(self, variant: str, figure: str) -> list[float]:
        return [value for run in self.counted(variant) if (value := finite(run.figures.get(figure))) is not None]


def groups(bench: Bench) -> list[RunGroup]:
    """Group runs by workload and load, in the order in which they were first run."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in bench.runs:
        found.setdefault((run.workload, run.point), []).append(run)
    return [RunGroup(workload, point, tuple(runs)) for (workload, point), runs in found.items()]


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# --- number formats


def rank(figure: str) -> tuple[bool, int, str]:
    """Return the sort key of a metric: all requests before their classes, then the order of METRICS."""
    kind, _, rest = figure.rpartition(":")
    metric = rest.partition(".")[0]
    return bool(kind), METRICS.index(metric) if metric in METRICS else len(METRICS), figure


def plain(value: float) -> str:
    """Format a number: three significant digits at least, thousands grouped, no exponent."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.12f}".rstrip("0").rstrip(".") if "e" in text else text


def written(value: float | None, unit: str = "") -> str:
    """Format a value with its unit; a dash where it is absent."""
    if finite(value) is None or value is None:
        return ABSENT
    return f"{plain(value * 100)} %" if unit == SHARE else f"{plain(value)} {unit}".rstrip()


# --- engines


def flags(arguments: Iterable[str]) -> dict[str, str]:
    """Parse options: `--a 1`, `--a=1` and `--a`; words before the first option are the command."""
    found: dict[str, str] = {}
    last = None
    for text in arguments:
        if text.startswith("--"):
            last, equals, value = text.partition("=")
            found[last] = value if equals else "set"
        elif last:
            found[last] = text if found[last] == "set" else f"{found[last]} {text}"
    return found


def settings(variants: Sequence[BenchVariant]) -> list[tuple[str, tuple[str, ...], bool]]:
    """Return (setting, its value in each variant, whether they differ) of options and cache configuration; those that
    differ first."""
    each = []
    for variant in variants:
        options = {} if variant.engine.arguments is None else flags(variant.engine.arguments)
        each.append(options | {f"cache: {name}": value for name, value in variant.engine.cache.items()})
    rows = []
    for name in sorted({name for options in each for name in options}):
        unknown = [
            ABSENT if variant.engine.arguments is None and name.startswith("--") else "not set" for variant in variants
        ]
        values = tuple(options.get(name, missing) for options, missing in zip(each, unknown, strict=True))
        rows.append((name, values, len(set(values)) > 1))
    return sorted(rows, key=lambda row: (not row[2], row[0]))


# --- totals over runs


def stability(runs: Iterable[Run]) -> tuple[int, Counter[str]]:
    """Count the requests that ended, and the failures among them by reason. Neither refusals nor requests that were
    stopped with the bench are failures."""
    failed: Counter[str] = Counter()
    ended = 0
    for run in runs:
        failed.update(
            {reason: count for reason, count in run.failed.items() if not refused(reason) and reason != "stopped"}
        )
        ended += run.ok
    return ended + failed.total(), failed


def refused(reason: str) -> bool:
    known = REASONS.get(reason)
    return known.outcome == "rejected" if known else reason == "rejected" or _REFUSED.fullmatch(reason) is not None


def by_reason(failed: Mapping[str, int]) -> str:
    """List failures by reason, the most frequent first."""
    ordered = sorted(
        ((reason, count) for reason, count in failed.items() if count), key=lambda pair: (-pair[1], pair[0])
    )
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


class Hit(msgspec.Struct, frozen=True, rename=STORED):
    """Hit ratio of a variant and the band that its workload expects. off: its prefix cache was off."""

    workload: str
    point: str
    variant: str
    measured: float | None
    low: float | None
    high: float | None
    expected: tuple[float, float]
    scenario: str
    off: bool

    @property
    def reading(self) -> str:
        if self.measured is None:
            return "not measured"
        if self.off:
            return "prefix caching is off"
        low, high = self.expected
        return (
            "below the band" if self.measured < low else "above the band" if self.measured > high else "within the band"
        )


def hits(bench: Bench) -> list[Hit]:
    """Return the hit ratios for workloads that have an expected band."""
    expected, scenarios = (
        bands(bench),
        {workload.get("name"): str(workload.get("scenario") or "") for workload in bench.workloads},
    )
    found = []
    for group in groups(bench):
        if group.workload not in expected:
            continue
        for variant in bench.variants:
            values = group.values(variant.name, "hit_ratio")
            off = variant.engine.cache.get("enable_prefix_caching") == "False"
            low, high = (min(values), max(values)) if values else (None, None)
            found.append(
                Hit(
                    group.workload,
                    group.point,
                    variant.name,
                    median_or_none(values),
                    low,
                    high,
                    expected[group.workload],
                    scenarios[group.workload],
                    off,
                )
            )
    return found


def bands(bench: Bench) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest expected hit ratio, for workloads that have them."""
    expected = {str(workload.get("name")): workload.get("expected_hit") for workload in bench.workloads}
    return {
        name: (float(band[0]), float(band[1]))
        for name, band in expected.items()
        if isinstance(band, Sequence) and len(band) == 2
    }


class TokenCost(msgspec.Struct, frozen=True, rename=STORED):
    """Cost of 1000 output tokens of one variant at one load, at its measured throughput, in the report's currency.

    own: of the GPU hours. api_output: bought, the output alone. api_whole: bought, with the prompts that belong to it.
    even_at: output tokens/s from which the GPU hours cost less than api_whole."""

    workload: str
    point: str
    variant: str
    tokens_per_second: float
    own: float
    api_output: float | None
    api_whole: float | None

    @property
    def times(self) -> float | None:
        """Own cost as a multiple of the API's price."""
        return self.own / self.api_whole if self.api_whole else None

    @property
    def even_at(self) -> float | None:
        return None if self.times is None else self.tokens_per_second * self.times


def costs(material: Material) -> list[TokenCost]:
    """Return the cost of each variant; empty without prices, number of GPUs, or throughput."""
    prices, gpus = material.prices, material.gpus
    if prices is None or not gpus:
        return []
    per_second = prices.per_hour(material.gpu_name) * gpus / _HOUR_S
    found = []
    for group in groups(material.bench):
        for variant in material.bench.variants:
            speed = median_or_none(group.values(variant.name, "tokens_per_second"))
            if not speed:
                continue
            api = prices.api_price(variant.engine.model)
            bought = [
                record
                for run in group.counted(variant.name)
                for record in material.of_run.get(run.number, ())
                if record.outcome == "ok"
            ]
            known = [
                (r.prompt_tokens, r.cached_tokens or 0, r.completion_tokens)
                for r in bought
                if r.prompt_tokens is not None and r.completion_tokens
            ]
            whole = None
            if api and known:
                prompt, cached, output = (sum(part or 0 for part in parts) for parts in zip(*known, strict=True))
                whole = api.cost(prompt, cached, output) / output * 1000
            found.append(
                TokenCost(
                    group.workload,
                    group.point,
                    variant.name,
                    speed,
                    per_second / speed * 1000,
                    api.output_per_1k if api else None,
                    whole,
                )
            )
    return found


def starts(variant: BenchVariant) -> dict[str, list[float]]:
    """Return the seconds of each start by kind, cold ones first."""
    ordered = sorted(variant.starts, key=lambda start: start.kind)
    return {kind: [start.seconds for start in found] for kind, found in groupby(ordered, key=lambda start: start.kind)}


def kinds(group: RunGroup) -> Iterator[str]:
    """Yield the request classes that a group's metrics name."""
    named = {figure.rpartition(":")[0] for run in group.runs for figure in run.figures}
    yield from sorted(named - {""})
