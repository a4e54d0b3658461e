"""Gates on a comparison: limits that b may not break, for an exit status.

Invariant: a gate that measured nothing is not open."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from exporters.statistics import mean_design
from stack.tuning.comparison import ALPHA, Comparison, percent_text


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of b; None: not asked.

    max_p95_regression: 0.15 is 15 % more than a. max_error_rate: a share of b's requests."""

    max_p95_regression: float | None = None
    max_error_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Violation:
    """A limit that b broke, or that nothing was measured for (value None).

    sure: the whole 95 % interval is beyond the limit."""

    limit: str
    figure: str
    value: float | None
    most: float
    sure: bool
    what: str


def gates(comparison: Comparison, limits: Limits) -> list[Violation]:
    """Return the limits that b broke, by its point estimates, and those that cannot be checked."""
    broken = []
    if (most := limits.max_p95_regression) is not None:
        slowest = [
            each
            for each in comparison.findings
            if each.metric.figure.endswith(".p95") and each.metric.better == "lower"
        ]
        measured = [each for each in slowest if each.effect is not None and each.metric.scale == "ratio"]
        for each in measured:
            if (slower := (each.effect or 0.0) - 1) > most:
                interval = None if each.low is None or each.high is None else (each.low - 1, each.high - 1)
                broken.append(_violation("max-p95-regression", each.metric.figure, slower, interval, most, "slower"))
        if not measured:
            broken.append(_not_measured("max-p95-regression", "p95", most))
    if (most := limits.max_error_rate) is not None:
        rates = next(
            (each.values[1] for each in comparison.findings if each.metric.figure == "error_ratio" and each.values[1]),
            None,
        )
        if rates is None:
            broken.append(_not_measured("max-error-rate", "error_ratio", most))
        elif fmean(rates) > most:
            interval = mean_design(len(rates)).estimate(rates).interval(ALPHA)
            within = interval and (max(0.0, interval[0]), min(1.0, interval[1]))
            does = f"of the requests of {comparison.b} failed"
            broken.append(_violation("max-error-rate", "error_ratio", fmean(rates), within, most, does))
    return broken


def _violation(
    limit: str, figure: str, value: float, interval: tuple[float, float] | None, most: float, does: str
) -> Violation:
    sure = interval is not None and interval[0] > most
    if interval is None:
        trust = "too few runs for an interval"
    else:
        reach = " to ".join(map(percent_text, interval))
        trust = f"the interval {reach} {'is all beyond it' if sure else 'also holds what is allowed'}"
    what = f"{figure}: {percent_text(value)} {does}, where {percent_text(most)} is allowed; {trust}"
    return Violation(limit, figure, value, most, sure, what)


def _not_measured(limit: str, figure: str, most: float) -> Violation:
    what = (
        f"{limit}: {figure} was not measured in both variants, so the limit of {percent_text(most)} cannot be checked"
    )
    return Violation(limit, figure, None, most, False, what)
