"""Statistics of an experiment's runs: effect, interval and verdict of each metric.

Invariant: the unit is the run, never the request. Requests of one run share its luck, and a test that counts each of
them sees differences that are not there (in half of all comparisons of a variant with itself, at 8 % between runs).

Method: ordinary least squares of a metric's logarithm (of the plain value for differences) on the variant and on a
smooth drift over the order of the runs (a line and a bend), Student's t with n - 4 degrees of freedom, Holm over the
metrics that get a verdict. With runs interleaved in an order drawn at random within each pair (`stack.tuning.turns`)
the variant has next to nothing in common with such a drift, nor with a disturbance that returns every few runs; a fixed
A, B, B, A has a period of its own, and a check reports it. The bend costs 2 in 100 findings where there is no drift,
and saves a third of them where it is bent. In sequential order (all of A, then all of B) drift and variant cannot be
separated: then no drift is fitted, and the verdict is `uncontrolled`. How often it is wrong: `make bench-judge`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import correlation, fmean, median
from typing import Literal, NamedTuple

from exporters.statistics import detectable_effect, drift_terms, holm, ranks, run_design, variant_effect
from stack.bench.result import Run
from stack.tuning import stalls
from stack.tuning.comparison import (
    ALPHA,
    HEADLINE,
    MARGIN,
    NO_VERDICT,
    BadComparison,
    Check,
    ComparedMetric,
    Comparison,
    Finding,
    corrected,
    effect_text,
    interval_text,
    length_distance,
    margin_text,
    metric_of,
    number_text,
    p_text,
    percent_text,
    verdict_of,
)
from stack.tuning.turns import resembled_period

Order = Literal["interleaved", "blocks", "sequential"]

LEAST_RUNS = 6  # of each variant: with fewer the interval at 8 % between runs is wider than most levers are strong
POWER = 0.8
UNKNOWN_SD = 0.08  # between runs, where nobody has measured it: the noisiest machine the method was tried on
LEAST_REQUESTS = 20  # in a run: of fewer, a p95 is the slowest one
MOST_FAILED = 0.02  # of a variant's requests: beyond it the latencies are those of survivors
MOST_WARMER = 0.1  # of hit ratio, between a variant's first run and its later ones
MOST_CORRELATED = 0.3  # variant with order, in runs that count as interleaved
_TRAPS = ("cache", "mix")  # checks without which no difference is one of the variants


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts about the runs that they do not record themselves.

    repeated: prompts repeat from run to run on purpose. shared_engine: both variants asked one engine, not restarted
    between them, so one cache; its runs must differ in seed or number, of which prompts are made. one_bench: False for
    benches that were saved apart. lengths: of each variant's prompts, in tokens."""

    repeated: bool = False
    shared_engine: bool = False
    one_bench: bool = True
    lengths: tuple[Sequence[float], Sequence[float]] | None = None


def smallest_effect(runs_per_variant: int, sd: float = UNKNOWN_SD, metrics: int = len(HEADLINE)) -> float | None:
    """Return the smallest true ratio (and its inverse) that 80 % of experiments find, if no other of that many metrics
    changed.

    None: six runs of each variant are the least for a verdict. Computed for A, B, B, A; an order drawn at random needs
    at most 4 % more. sd: of the metric's logarithm between runs of one variant, so 0.08 for 8 %."""
    if runs_per_variant < LEAST_RUNS:
        return None
    n = 2 * runs_per_variant
    design = run_design(tuple(float(place % 4 in (1, 2)) for place in range(n)), tuple(map(float, range(n))), True)
    return math.exp(detectable_effect(design.df, ALPHA / metrics, POWER) * sd / math.sqrt(design.effect.weight))


# ---- one metric -----------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """Values of one metric by run, with what the fit needs. logs: values are compared as logarithms."""

    metric: ComparedMetric
    values: list[float]
    of_b: list[bool]
    when: list[float]
    logs: bool

    def values_of(self, b: bool) -> tuple[float, ...]:
        return tuple(value for value, of_b in zip(self.values, self.of_b, strict=True) if of_b is b)

    @property
    def fewest(self) -> int:
        return min(sum(self.of_b), len(self.of_b) - sum(self.of_b))

    @property
    def scaled(self) -> list[float]:
        least = self.metric.least  # below it all is the same to everybody: 0.02 ms of queue and 0.2 are no tenfold
        return [math.log(max(value, least)) for value in self.values] if self.logs else self.values


def _sample(metric: ComparedMetric, runs: Sequence[tuple[Run, bool]], when: Sequence[float]) -> _Sample:
    found = [
        (run.figures[metric.figure], of_b, at)
        for (run, of_b), at in zip(runs, when, strict=True)
        if _has(run, metric.figure)
    ]
    values = [value for value, _, _ in found]
    logs = metric.scale == "ratio" and all(value > 0 for value in values)
    if not logs and metric.scale == "ratio":
        metric = replace(metric, scale="difference", margin=metric.margin * abs(fmean(values)))
    return _Sample(metric, values, [of_b for _, of_b, _ in found], [at for _, _, at in found], logs)


def _has(run: Run, figure: str) -> bool:
    return math.isfinite(run.figures.get(figure, math.nan))


def _measured(sample: _Sample, names: tuple[str, str], drift: bool) -> Finding:
    """Return what was measured of a metric, its verdict still open."""
    a, b = sample.values_of(False), sample.values_of(True)
    middle = median if sample.metric.scale == "ratio" else fmean
    shown_a, shown_b = middle(a) if a else None, middle(b) if b else None
    found = Finding(sample.metric, shown_a, shown_b, runs=(len(a), len(b)), values=(a, b))
    if not (a and b):
        return replace(found, why=f"not measured in {names[bool(a)]}") if a or b else found
    fitted = variant_effect(sample.scaled, sample.of_b, sample.when, drift)
    shown = math.exp if sample.logs else float
    low, high = map(shown, fitted.interval(ALPHA) or (math.nan, math.nan))
    found = replace(found, effect=shown(fitted.value), p=fitted.p, why=NO_VERDICT)
    return found if math.isnan(low) else replace(found, low=low, high=high)


def _decided(found: Finding, family: int, trap: str | None, least: int) -> Finding:
    """Return a finding whose p is corrected with its verdict, and why, in a sentence. least: runs of each variant."""
    if found.effect is None:
        return found
    if min(found.runs) < least or found.p is None or found.p_holm is None:
        return replace(found, why=f"too few runs with this figure: {min(found.runs)} of {least}")
    if trap is not None:
        return replace(found, why=f"no verdict, because {trap}")
    metric, interval, verdict = found.metric, interval_text(found), verdict_of(found)
    if verdict == "equivalent" and len({*found.values[0], *found.values[1]}) == 1:
        why = "every run of both variants gave the same value"
    elif verdict == "equivalent":
        sure = "the difference is there but too small to matter: " if found.p_holm < ALPHA else ""
        why = f"{sure}the interval {interval} lies within {margin_text(metric)}"
    elif verdict != "inconclusive":
        size = f"{effect_text(metric, found.effect)} ({interval})"
        why = f"{size}, p {p_text(found.p_holm)} after Holm over {family} metrics"
    elif found.p < ALPHA:
        chance = f"among {family} metrics chance does that (p {p_text(found.p_holm)} after Holm)"
        why = f"the interval {interval} leaves out no change, but {chance}"
    else:
        why = f"the interval {interval} holds both no change and one beyond {margin_text(metric)}"
    return replace(found, verdict=verdict, why=why)


# ---- the comparison -------------------------------------------------------------------------------------------------


def compare_runs(
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    setting: Setting = Setting(),
    metrics: Sequence[ComparedMetric] = HEADLINE,
    names: tuple[str, str] | None = None,
    excluded: Collection[int] = (),
) -> Comparison:
    """Compare the runs of b with those of a, all of one workload at one point.

    metrics: those that get a verdict; every other figure is shown. excluded: numbers of runs that the user leaves out.
    Raises BadComparison."""
    names = names or _names(a, b)
    workload, point = _one_load(a, b)
    runs = sorted(
        (
            (run, of_b)
            for side, of_b in ((a, False), (b, True))
            for run in side
            if run.cut is None and run.number not in excluded
        ),
        key=lambda pair: pair[0].started_s,
    )
    # So many are needed for precision, not for the method: a run that the user left out costs little of it.
    least = LEAST_RUNS - bool(excluded)
    when = ranks([run.started_s for run, _ in runs])
    order = order_of(runs, when)
    drift = order != "sequential"
    samples = [_sample(metric, runs, when) for metric in metrics]
    checks: tuple[Check, ...] = (
        _check_order(runs, order, setting, names),
        _check_runs(a, b, names, excluded),
        _check_period(runs, when, order),
        _check_drift(samples, order),
        _check_cache(runs, setting, names),
        _check_mix(runs, setting, names),
        _check_work(runs, names, "answers", "completion_tokens", "answers"),
        _check_load(runs, names),
        _check_requests(runs, names),
    )
    trap = next((check.what for check in checks if check.name in _TRAPS and not check.ok), None)
    measured = [_measured(sample, names, drift) for sample in samples]
    findings, family = corrected(measured, [min(found.runs) >= least for found in measured])
    checks += (_check_stalls(samples, runs, order, names),)
    decided = [_decided(found, family, trap, least) for found in findings]
    compared = {metric.figure for metric in metrics}
    without_verdict = [
        _measured(_sample(metric_of(name), runs, when), names, drift)
        for name in sorted({name for run, _ in runs for name in run.figures} - compared)
    ]
    caveats = [check.what for check in checks if not check.ok]
    caveats += [caveat for run, _ in runs for caveat in run.caveats]
    return Comparison(
        *names, workload, point, (*decided, *without_verdict), checks, checks[0].ok, tuple(dict.fromkeys(caveats))
    )


def _names(a: Sequence[Run], b: Sequence[Run]) -> tuple[str, str]:
    first, second = (runs[0].variant if runs else side for side, runs in (("a", a), ("b", b)))
    return (first, second) if first != second else (f"{first} (a)", f"{second} (b)")


def _one_load(a: Sequence[Run], b: Sequence[Run]) -> tuple[str, str]:
    for side, runs in (("a", a), ("b", b)):
        if not runs:
            raise BadComparison(f"{side} has no runs; a comparison needs {LEAST_RUNS} of each variant")
        if len({run.variant for run in runs}) > 1:
            raise BadComparison(
                f"the runs of {side} are of several variants ({_list(run.variant for run in runs)}); give those of one"
            )
    loads = {(run.workload, run.point) for run in (*a, *b)}
    if len(loads) > 1:
        several = _list(f"{workload} at {point}" for workload, point in loads)
        raise BadComparison(f"the runs are of several loads ({several}); compare one at a time")
    return loads.pop()


def _list(words: Iterable[object]) -> str:
    return ", ".join(sorted(set(map(str, words))))


def order_of(runs: Sequence[tuple[Run, bool]], when: Sequence[float]) -> Order:
    """Classify how runs (and whether each is of b), sorted by time, are mixed.

    Interleaved: no variant runs for more than half of its runs in a row, and neither is late as a whole; then drifts of
    any slow shape fall on both."""
    of_b = [b for _, b in runs]
    fewest = min(sum(of_b), len(of_b) - sum(of_b))
    if fewest == 0:
        return "sequential"
    late_a, late_b = ([at for at, b in zip(when, of_b, strict=True) if b is which] for which in (False, True))
    if max(late_a) < min(late_b) or max(late_b) < min(late_a):
        return "sequential"
    longest = streak = 0
    last: bool | None = None
    for _, group in groupby(zip(when, of_b, strict=True), key=lambda each: each[0]):
        variants = [b for _, b in group]
        mixed = len(set(variants)) > 1
        streak = 0 if mixed else streak + len(variants) if variants[0] is last else len(variants)
        last = None if mixed else variants[0]
        longest = max(longest, streak)
    even = len(set(when)) == 1 or abs(correlation(of_b, when)) <= MOST_CORRELATED
    return "interleaved" if longest <= max(2, fewest // 2) and even else "blocks"


# ---- checks ---------------------------------------------------------------------------------------------------------

_Runs = Sequence[tuple[Run, bool]]


def _runs_of(runs: _Runs, b: bool) -> list[Run]:
    return [run for run, of_b in runs if of_b is b]


def _check_order(runs: _Runs, order: Order, setting: Setting, names: tuple[str, str]) -> Check:
    if not setting.one_bench:
        what = (
            "uncontrolled: sequential: the benches were run apart, and whatever else changed between them is in the"
            " difference"
        )
    elif order == "sequential":
        what = (
            "uncontrolled: sequential: one variant ran after the other, and a drift cannot be separated from the"
            " change, so no drift was taken out"
        )
    elif order == "blocks":
        letters = "".join("AB"[b] for _, b in runs)
        advice = "only a smooth drift is taken out; draw the order of each pair at random"
        what = f"uncontrolled: in blocks ({letters}, A is {names[0]}): {advice}"
    else:
        return Check("order", True, "the runs of both variants were interleaved")
    return Check("order", False, what)


def _check_runs(a: Sequence[Run], b: Sequence[Run], names: tuple[str, str], excluded: Collection[int]) -> Check:
    mine = [(run, name) for name, runs in zip(names, (a, b), strict=True) for run in runs]
    cut = [f"run {run.number} of {name} ({run.cut})" for run, name in mine if run.cut is not None]
    left_out = [f"run {run.number} of {name}" for run, name in mine if run.cut is None and run.number in excluded]
    whole = [sum(run.cut is None and run.number not in excluded for run in runs) for runs in (a, b)]
    said = [f"left out because they broke off: {', '.join(cut)}"] if cut else []
    said += [f"excluded by the user: {', '.join(left_out)}"] if left_out else []
    if min(whole) < LEAST_RUNS - bool(left_out):
        said.append(
            f"{whole[0]} whole runs of {names[0]} and {whole[1]} of {names[1]}, where a verdict needs {LEAST_RUNS} of"
            " each"
        )
    return Check(
        "runs", not said, "; ".join(said) or f"all runs are whole: {whole[0]} of {names[0]}, {whole[1]} of {names[1]}"
    )


def _check_period(runs: _Runs, when: Sequence[float], order: Order) -> Check:
    """Find an order that a disturbance of the machine can follow: then it falls on one variant and looks like the
    change."""
    if order != "interleaved" or len(runs) < 2 * (LEAST_RUNS - 1):
        return Check("period", True, "not checked: it takes interleaved runs, six of each variant")
    period = resembled_period(tuple(float(of_b) for _, of_b in runs), tuple(when))
    if period is None:
        return Check("period", True, "the order of the runs follows no period")
    said = f"the variants alternate with a period of {period:g} runs"
    said += ", so a disturbance that returns as often would look like the change"
    return Check("period", False, f"{said}; draw the order of each pair at random, as `vllm-watch tune` does")


def _check_stalls(samples: Sequence[_Sample], runs: _Runs, order: Order, names: tuple[str, str]) -> Check:
    """Name runs that lie off all others; they still count, since a stall may be what the change did."""
    ready = [sample for sample in samples if sample.logs and sample.fewest >= LEAST_RUNS - 1]
    if not ready:
        return Check("stalls", True, "not checked: it takes six runs of each variant")
    worst: dict[int, tuple[float, str]] = {}
    for sample in ready:
        there = [(run, of_b) for run, of_b in runs if _has(run, sample.metric.figure)]
        for at, apart in stalls.find(sample.scaled, sample.of_b, sample.when, order != "sequential", len(samples)):
            run, of_b = there[at]
            said = f"run {run.number} of {names[of_b]}: {sample.metric.title} was {number_text(math.exp(apart))} times"
            said += " what the other runs predict"
            worst[run.number] = max(worst.get(run.number, (0.0, "")), (abs(apart), said))
    if not worst:
        return Check("stalls", True, "no run lies off the others of its variant")
    found = "; ".join(said for _, said in sorted(worst.values(), key=lambda each: (-round(each[0], 6), each[1])))
    numbers = " ".join(f"--exclude-run {number}" for number in sorted(worst))
    advice = f"repeat the experiment, or see what the other runs say with `vllm-watch compare FOLDER {numbers}`"
    return Check("stalls", False, f"{found}; nothing was left out here, so {advice}")


def _check_drift(samples: Sequence[_Sample], order: Order) -> Check:
    """Find what moved over the runs of one variant, as far as a line and a bend show it.

    The variants are taken out, in sequential order too."""
    ready = [sample for sample in samples if sample.logs and sample.fewest >= 3]
    seen = [(sample, *drift_terms(sample.scaled, sample.of_b, sample.when)) for sample in ready]
    sure = holm([term.p if term.p is not None else 1.0 for _, terms, _ in seen for term in terms])
    for sample, terms, apart in seen:
        p, sure = min(sure[: len(terms)], default=1.0), sure[len(terms) :]
        if p < ALPHA and apart > math.log1p(MARGIN):
            smooth = "which is taken out as far as it was smooth"
            then = "which cannot be separated from the change" if order == "sequential" else smooth
            size = f"{percent_text(math.expm1(apart))} over the runs (p {p_text(p)})"
            return Check("drift", False, f"{sample.metric.title} drifted by {size}, {then}")
    if not seen:
        return Check("drift", True, "not checked: it takes three runs of each variant")
    return Check("drift", True, f"no smooth drift of more than {percent_text(MARGIN)} was seen")


def _check_cache(runs: _Runs, setting: Setting, names: tuple[str, str]) -> Check:
    if setting.repeated:
        return Check("cache", True, "prompts repeat from run to run on purpose, so the cache is warm for both")
    variants = _runs_of(runs, False), _runs_of(runs, True)
    for name, variant in zip(names, variants, strict=True):
        if len({run.seed for run in variant}) < len(variant):
            why = "so later ones were answered from the prefix cache; give each run its own"
            return Check("cache", False, f"runs of {name} used the same seed, {why}")
    asked_a, asked_b = ({(run.seed, run.number) for run in variant} for variant in variants)
    if setting.shared_engine and asked_a & asked_b:
        why = f"what the same engine had been asked as {names[0]}; give each bench a seed of its own"
        return Check("cache", False, f"{names[1]} was asked {why}")
    together = [("both variants", [run for run, _ in runs])]
    for name, group in together if setting.shared_engine else zip(names, variants, strict=True):
        hits = [run.figures["hit_ratio"] for run in group if _has(run, "hit_ratio")]
        if len(hits) > 1 and median(hits[1:]) - hits[0] > MOST_WARMER:
            risen = f"{percent_text(hits[0])} in the first run of {name}"
            risen += (
                f" and {percent_text(median(hits[1:]))} in later ones; prompts came back, so the cache was measured"
            )
            return Check("cache", False, f"cache hits rose from run to run: {risen}")
    if not any(_has(run, "hit_ratio") for run, _ in runs):
        return Check("cache", True, "every run had prompts of its own; hit ratios were not measured")
    return Check("cache", True, "every run had prompts of its own, and cache hits did not rise from run to run")


def _check_mix(runs: _Runs, setting: Setting, names: tuple[str, str]) -> Check:
    if setting.lengths is not None and all(setting.lengths):
        apart, alike = length_distance(*setting.lengths)
        if not alike:
            return Check(
                "mix",
                False,
                f"{names[0]} and {names[1]} got prompts of different lengths (distance {apart:.2f}, 0 is alike)",
            )
        return Check("mix", True, f"prompts of both variants are alike in length (distance {apart:.2f})")
    return _check_work(runs, names, "mix", "prompt_tokens", "prompts")


def _check_work(runs: _Runs, names: tuple[str, str], name: str, figure: str, title: str) -> Check:
    """Tokens per answer of the two variants, which should not differ by more than the margin."""
    each = [
        [run.figures[figure] / run.ok for run in _runs_of(runs, b) if _has(run, figure) and run.ok]
        for b in (False, True)
    ]
    if not all(each):
        return Check(name, True, f"not checked: the lengths of {title} were not measured")
    a, b = map(median, each)
    alike = abs(a - b) <= MARGIN * max(a, b)
    said = f"{title} had {number_text(a)} tokens in {names[0]} and {number_text(b)} in {names[1]}"
    return Check(name, alike, said if alike else f"{said}, so the variants did different work")


def _check_load(runs: _Runs, names: tuple[str, str]) -> Check:
    said = []
    asked = [median([run.asked for run in _runs_of(runs, b)] or [0]) for b in (False, True)]
    if asked[0] != asked[1]:
        said.append(f"runs of {names[0]} asked {asked[0]:g} times, those of {names[1]} {asked[1]:g}")
    for name, variant in zip(names, (_runs_of(runs, False), _runs_of(runs, True)), strict=True):
        sent, failed = sum(run.asked for run in variant), sum(run.asked - run.ok for run in variant)
        if failed > MOST_FAILED * sent:
            said.append(f"{failed} of {sent} requests of {name} failed, so its latencies are those of the others")
    return Check("load", not said, "; ".join(said) or "both variants were asked the same number of times and answered")


def _check_requests(runs: _Runs, names: tuple[str, str]) -> Check:
    few = [(run.ok, run.number, names[b]) for run, b in runs if run.ok < LEAST_REQUESTS]
    if few:
        ok, number, name = min(few)
        return Check(
            "requests",
            False,
            f"a p95 of fewer than {LEAST_REQUESTS} answers is the slowest one: run {number} of {name} had {ok}",
        )
    return Check("requests", True, f"every run had {LEAST_REQUESTS} answers or more")
