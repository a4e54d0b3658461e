"""Values of a comparison: metrics, findings, verdicts, and their table rows.

Invariant: a difference is called one only where its interval and p, after Holm's correction, leave out chance. What is
too small to matter is `equivalent`, and what cannot be decided is `inconclusive`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from exporters.statistics import holm, ks_critical, ks_distance

Verdict = Literal["better", "worse", "equivalent", "inconclusive"]

MARGIN = 0.05
ALPHA = 0.05
MOST_APART = 0.1  # distance of two distributions of prompt lengths, or of two mixes, that is never blamed
SHARE = "share"  # a unit: 0 to 1, shown as %
NO_VERDICT = "shown without a verdict"


class BadComparison(ValueError):
    """Runs that cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """A figure and what a change of it means.

    margin: a change that does not matter: a share of the figure (ratio) or in its unit (difference). least: in the
    unit; a change that nobody would notice, however large it is as a share. Of a ratio, smaller values count as this
    one."""

    figure: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    scale: Literal["ratio", "difference"] = "ratio"
    margin: float = MARGIN
    least: float = 0.0

    @property
    def no_change(self) -> float:
        return 1.0 if self.scale == "ratio" else 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one metric.

    metric: as it was compared; where a value is 0 or less, a ratio becomes a difference. a, b: median over the runs of
    each variant (of differences the mean: most runs may have none). effect: b/a, or b-a, and low to high its 95 %
    interval. values: of each variant's runs, by time."""

    metric: ComparedMetric
    a: float | None = None
    b: float | None = None
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    verdict: Verdict = "inconclusive"
    why: str = "not measured"
    runs: tuple[int, int] = (0, 0)
    values: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    @property
    def has_verdict(self) -> bool:
        return not self.why.startswith(NO_VERDICT)

    @property
    def holds_no_change(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= self.metric.no_change <= self.high


@dataclass(frozen=True, slots=True)
class Check:
    """Something that spoils comparisons, and whether it did here."""

    name: str
    ok: bool
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Findings on b, compared with a. controlled: the runs were interleaved in one bench."""

    a: str
    b: str
    workload: str
    point: str
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    controlled: bool
    caveats: tuple[str, ...]


HEADLINE = (
    ComparedMetric("ttft_ms.p50", "TTFT p50", "ms", "lower"),
    ComparedMetric("tpot_ms.p50", "TPOT p50", "ms", "lower"),
    ComparedMetric("queue_ms.mean", "queue time", "ms", "lower", least=1.0),
    ComparedMetric("tokens_per_second", "output", "tokens/s", "higher"),
    ComparedMetric("hit_ratio", "cache hits", SHARE, "higher", "difference"),
    ComparedMetric("error_ratio", "errors", SHARE, "lower", "difference", 0.005),
    ComparedMetric("memory_peak_gb", "memory peak", "GB", "lower"),
)
UNREADABLE = ComparedMetric("unreadable_ratio", "unreadable answers", SHARE, "lower", "difference", 0.005)
# Figures without their statistic; what is not listed is shown as a ratio of which less is better.
_KNOWN = {
    "ttft_ms": ComparedMetric("", "TTFT", "ms", "lower"),
    "tpot_ms": ComparedMetric("", "TPOT", "ms", "lower"),
    "e2e_ms": ComparedMetric("", "end to end", "ms", "lower"),
    "qps": ComparedMetric("", "answers", "1/s", "higher"),
    "total_tokens_per_second": ComparedMetric("", "tokens in and out", "tokens/s", "higher"),
    "goodput_qps": ComparedMetric("", "goodput", "1/s", "higher"),
    "preemptions": ComparedMetric("", "preemptions", "", "lower", "difference", 0.0),
    "kv_peak_ratio": ComparedMetric("", "KV cache peak", SHARE, "lower", "difference"),
    "driver_memory_gb": ComparedMetric("", "memory by the driver", "GB", "lower"),
    "score": ComparedMetric("", "score", "", "higher"),
    "invalid_json_ratio": ComparedMetric("", "invalid JSON", SHARE, "lower", "difference", 0.005),
    "prompt_tokens": ComparedMetric("", "prompt tokens", "", "lower"),
    "completion_tokens": ComparedMetric("", "output tokens", "", "higher"),
} | {metric.figure: metric for metric in HEADLINE}


def metric_of(figure: str) -> ComparedMetric:
    """The metric of any figure, such as short:ttft_ms.p95."""
    kind, _, name = figure.rpartition(":")
    base, _, statistic = name.partition(".")
    known = _KNOWN.get(name)
    if known is None:
        known = _KNOWN.get(base, ComparedMetric("", base, "", "lower"))
        known = replace(known, title=f"{known.title} {statistic}".rstrip())
    return replace(known, figure=figure, title=f"{kind}: {known.title}" if kind else known.title)


# ---- verdicts -----------------------------------------------------------------------------------------------------


def corrected(findings: Sequence[Finding], eligible: Sequence[bool]) -> tuple[list[Finding], int]:
    """Return the findings with Holm's correction over the eligible ones that have a p, and how many those are."""
    family = [place for place, found in enumerate(findings) if eligible[place] and found.p is not None]
    ps = dict(zip(family, holm([findings[place].p or 0.0 for place in family]), strict=True))
    return [replace(found, p_holm=ps.get(place)) for place, found in enumerate(findings)], len(family)


def verdict_of(found: Finding) -> Verdict:
    """Return the verdict that an interval and a corrected p allow; both are there."""
    if within_margin(found):
        return "equivalent"
    if found.effect is None or found.p_holm is None or found.p_holm >= ALPHA or found.holds_no_change:
        return "inconclusive"
    return "better" if (found.effect > found.metric.no_change) is (found.metric.better == "higher") else "worse"


def within_margin(found: Finding) -> bool:
    """Return whether the whole interval is a change that does not matter.

    Up and down are alike: 5 % is 1/1.05 to 1.05."""
    metric, low, high = found.metric, found.low, found.high
    if low is None or high is None:
        return False
    if metric.scale == "difference":
        return max(abs(low), abs(high)) <= max(metric.margin, metric.least)
    if low <= 0:
        return False
    most = max(abs(math.log(low)), abs(math.log(high)))
    if most <= math.log1p(metric.margin):
        return True
    level = math.sqrt(max(found.a or 0.0, metric.least) * max(found.b or 0.0, metric.least))  # as the interval has them
    # half of the ratio above the level, half below
    return most < 100 and 2 * level * math.sinh(most / 2) <= metric.least


def length_distance(a: Sequence[float], b: Sequence[float]) -> tuple[float, bool]:
    """Return how far apart two distributions of lengths are, and whether that is little or chance (1 %)."""
    apart = ks_distance(a, b)
    return apart, apart <= max(MOST_APART, ks_critical(len(a), len(b)))


def unreadable_answers(a: tuple[int, int], b: tuple[int, int]) -> list[Finding]:
    """Return the row of answers that the gateway could not read; none without such an answer. a, b: their number, and
    that of all requests."""
    if not a[0] + b[0]:
        return []
    first, second = (bad / max(requests, 1) for bad, requests in (a, b))
    counts = ", and ".join(
        f"{bad:,} of {requests:,} requests ({percent_text(share)})"
        for (bad, requests), share in ((a, first), (b, second))
    )
    return [Finding(UNREADABLE, first, second, second - first, why=f"{NO_VERDICT}: {counts}")]


# ---- words --------------------------------------------------------------------------------------------------------


class ComparisonRow(NamedTuple):
    """A finding as texts, for any table."""

    metric: str
    a: str
    b: str
    change: str
    interval: str
    p: str
    verdict: str
    why: str


def table_rows(comparison: Comparison) -> list[ComparisonRow]:
    """Return a row for each finding; those without a verdict stand last. An empty text was not measured."""
    rows = []
    for found in comparison.findings:
        metric, p = found.metric, found.p_holm if found.p_holm is not None else found.p
        interval = interval_text(found) if found.low is not None else ""
        doubt = " (uncontrolled)" if found.verdict != "inconclusive" and not comparison.controlled else ""
        verdict = f"{found.verdict}{doubt}" if found.has_verdict else "no verdict"
        a, b, change = _value(metric, found.a), _value(metric, found.b), effect_text(metric, found.effect)
        rows.append(ComparisonRow(metric.title, a, b, change, interval, p_text(p), verdict, found.why))
    return rows


def verdict_counts(comparison: Comparison) -> Mapping[Verdict, int]:
    """Count the verdicts on the metrics that have one."""
    verdicts = [found.verdict for found in comparison.findings if found.has_verdict]
    return {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)}


def _value(metric: ComparedMetric, value: float | None) -> str:
    if value is None:
        return ""
    return percent_text(value) if metric.unit == SHARE else f"{number_text(value)} {metric.unit}".rstrip()


def effect_text(metric: ComparedMetric, effect: float | None) -> str:
    """Word a change: -12.3 %, 49 times, +2.0 points, +3 ms."""
    if effect is None:
        return ""
    if metric.scale == "ratio":
        return f"{number_text(effect)} times" if effect >= 2 else f"{(effect - 1) * 100:+.1f} %"
    if metric.unit == SHARE:
        return f"{effect * 100:+.1f} points"
    return f"{'+' if effect >= 0 else ''}{number_text(effect)} {metric.unit}".rstrip()


def interval_text(found: Finding) -> str:
    return f"{effect_text(found.metric, found.low)} to {effect_text(found.metric, found.high)}"


def margin_text(metric: ComparedMetric) -> str:
    if metric.scale == "ratio":
        least = f" or {number_text(metric.least)} {metric.unit}" if metric.least else ""
        return f"{percent_text(metric.margin)}{least}"
    most = max(metric.margin, metric.least)
    most, unit = (most * 100, "points") if metric.unit == SHARE else (most, metric.unit)
    return f"{number_text(most)} {unit}".rstrip()


def percent_text(share: float) -> str:
    return f"{number_text(share * 100)} %"


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def p_text(p: float | None) -> str:
    return "" if p is None else "<0.0001" if p < 0.0001 else f"{p:.2g}"
