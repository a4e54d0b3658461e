"""Whether one arm of an experiment is better than another, from their runs: better, worse, equivalent or inconclusive.

Law: the unit is the run, never the request. Requests of one run share its luck, and a test that counts each of them sees differences that are not
there (in half of all comparisons of an arm with itself, at 8 % between runs). A difference is called one only where chance, a smooth drift and the
number of metrics looked at do not explain it; what cannot be told is `inconclusive`, and what is too small to matter is `equivalent`.

Method: ordinary least squares of a figure's logarithm (of the plain figure for differences) on the arm and on a smooth drift over the order of the
runs (a line and a bend), Student's t with n - 4 degrees of freedom, Holm over the metrics that are judged. With runs interleaved in an order drawn at
random within each pair (`stack.tuning.turns`) the arm has next to nothing in common with such a drift, nor with a disturbance that returns every few
runs; a fixed A, B, B, A has a period of its own, and a check says so. The bend costs 2 in 100 findings where there is no drift, and saves a third of
them where it is bent. In sequential order (all of A, then all of B) drift and arm cannot be told apart: then no drift is fitted, and the verdict is
`uncontrolled`. How often it is wrong: `make bench-judge`."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import NormalDist, fmean, median, stdev
from typing import Literal, NamedTuple

from stack.bench.result import Run
from stack.tuning import stalls
from stack.tuning.least_squares import Estimate, arm_effect, design, dot, drift_terms, t_quantile
from stack.tuning.turns import resembled_period

Verdict = Literal["better", "worse", "equivalent", "inconclusive"]
Order = Literal["interleaved", "blocks", "sequential"]

LEAST_RUNS = 6  # of each arm: with fewer the interval at 8 % between runs is wider than most levers are strong
MARGIN = 0.05
ALPHA = 0.05
POWER = 0.8
UNKNOWN_SD = 0.08  # between runs, where nobody has measured it: the noisiest machine the method was tried on
LEAST_REQUESTS = 20  # in a run: of fewer, a p95 is the slowest one
MOST_FAILED = 0.02  # of an arm's requests: beyond it the latencies are those of survivors
MOST_WARMER = 0.1  # of hit ratio, between an arm's first run and its later ones
MOST_APART = 0.1  # Kolmogorov-Smirnov distance of prompt lengths that is never blamed, however many prompts there are
MOST_CORRELATED = 0.3  # arm with order, in runs that count as interleaved
SHARE = "share"  # a unit: 0 to 1, shown as %
NOT_JUDGED = "shown, not judged"
_TRAPS = ("cache", "mix")  # checks without which no difference is one of the arms


class BadComparison(ValueError):
    """Runs that cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure and what a change of it means. margin: a change that does not matter: a share of the figure (ratio) or in its unit (difference).
    least: in the unit; a change that nobody would notice, however large it is as a share. Of a ratio, smaller values count as this one."""

    figure: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    scale: Literal["ratio", "difference"] = "ratio"
    margin: float = MARGIN
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one metric. metric: as it was judged; where a value is 0 or less, a ratio becomes a difference. a, b: over the runs of each
    arm, their median (of differences their mean: most runs may have none). effect: b/a, or b-a, and low to high its 95 % interval. values: of each
    arm's runs, by time."""

    metric: Metric
    a: float | None
    b: float | None
    effect: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    verdict: Verdict
    why: str
    runs: tuple[int, int]
    values: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    @property
    def judged(self) -> bool:
        return self.why != NOT_JUDGED


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that spoils comparisons, and whether it did here."""

    name: str
    ok: bool
    what: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """What b did, compared with a. controlled: the runs were interleaved in one bench."""

    a: str
    b: str
    workload: str
    point: str
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    controlled: bool
    caveats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the runs do not say themselves. repeated: prompts repeat from run to run on purpose. shared_engine: both arms asked one engine,
    not restarted between them, so one cache; its runs must differ in seed or number, of which prompts are made. one_bench: False for benches that
    were saved apart. lengths: of each arm's prompts, in tokens."""

    repeated: bool = False
    shared_engine: bool = False
    one_bench: bool = True
    lengths: tuple[Sequence[float], Sequence[float]] | None = None


HEADLINE = (
    Metric("ttft_ms.p50", "TTFT p50", "ms", "lower"),
    Metric("tpot_ms.p50", "TPOT p50", "ms", "lower"),
    Metric("queue_ms.mean", "queue time", "ms", "lower", least=1.0),
    Metric("tokens_per_second", "output", "tokens/s", "higher"),
    Metric("hit_ratio", "cache hits", SHARE, "higher", "difference"),
    Metric("error_ratio", "errors", SHARE, "lower", "difference", 0.005),
    Metric("memory_peak_gb", "memory peak", "GB", "lower"),
)
# Figures without their statistic; what is not listed is shown as a ratio of which less is better.
_KNOWN = {
    "ttft_ms": Metric("", "TTFT", "ms", "lower"),
    "tpot_ms": Metric("", "TPOT", "ms", "lower"),
    "e2e_ms": Metric("", "end to end", "ms", "lower"),
    "qps": Metric("", "answers", "1/s", "higher"),
    "total_tokens_per_second": Metric("", "tokens in and out", "tokens/s", "higher"),
    "goodput_qps": Metric("", "goodput", "1/s", "higher"),
    "preemptions": Metric("", "preemptions", "", "lower", "difference", 0.0),
    "kv_peak_ratio": Metric("", "KV cache peak", SHARE, "lower", "difference"),
    "driver_memory_gb": Metric("", "memory by the driver", "GB", "lower"),
    "score": Metric("", "score", "", "higher"),
    "invalid_json_ratio": Metric("", "invalid JSON", SHARE, "lower", "difference", 0.005),
    "prompt_tokens": Metric("", "prompt tokens", "", "lower"),
    "completion_tokens": Metric("", "output tokens", "", "higher"),
} | {metric.figure: metric for metric in HEADLINE}


def metric_of(figure: str) -> Metric:
    """The metric of any figure, such as short:ttft_ms.p95."""
    kind, _, name = figure.rpartition(":")
    base, _, statistic = name.partition(".")
    known = _KNOWN.get(name)
    if known is None:
        known = _KNOWN.get(base, Metric("", base, "", "lower"))
        known = replace(known, title=f"{known.title} {statistic}".rstrip())
    return replace(known, figure=figure, title=f"{kind}: {known.title}" if kind else known.title)


# ---- several metrics ------------------------------------------------------------------------------------------------------


def holm(ps: Sequence[float]) -> list[float]:
    """Each p after Holm's correction, in the given order."""
    adjusted, most = [1.0] * len(ps), 0.0
    for done, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        most = max(most, min(1.0, ps[place] * (len(ps) - done)))
        adjusted[place] = most
    return adjusted


def smallest_effect(runs_per_arm: int, sd: float = UNKNOWN_SD, metrics: int = len(HEADLINE)) -> float | None:
    """The smallest true ratio (and its inverse) that is found in 80 % of experiments, if no other of that many metrics changed; None: six runs of
    each arm are the least for a verdict. Computed for A, B, B, A; an order drawn at random needs at most 4 % more. sd: of the figure's logarithm
    between runs of one arm, so 0.08 for 8 %."""
    if runs_per_arm < LEAST_RUNS:
        return None
    n = 2 * runs_per_arm
    terms, arm, _ = design(tuple(float(place % 4 in (1, 2)) for place in range(n)), tuple(map(float, range(n))), True)
    df = n - len(terms) - 1
    t, low, high = t_quantile(1 - ALPHA / metrics, df), 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _power(middle, t, df) < POWER else (low, middle)
    return math.exp(high * sd / math.sqrt(dot(arm, arm)))


def _power(effect: float, t: float, df: int) -> float:
    """How often an effect, in its standard errors, goes beyond t: the normal, averaged over what the standard error may be estimated at (chi)."""
    estimates = [step / 100 for step in range(1, 400)]
    weights = [math.exp((df - 1) * math.log(each) - df * (each * each - 1) / 2) for each in estimates]
    beyond = (weight * NormalDist().cdf(effect - t * each) for weight, each in zip(weights, estimates, strict=True))
    return sum(beyond) / sum(weights)


# ---- one metric -------------------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """One metric's values by run, with what the fit needs. logs: values are judged as logarithms."""

    metric: Metric
    values: list[float]
    of_b: list[bool]
    when: list[float]
    logs: bool

    def arm(self, b: bool) -> tuple[float, ...]:
        return tuple(value for value, of_b in zip(self.values, self.of_b, strict=True) if of_b is b)

    @property
    def scaled(self) -> list[float]:
        least = self.metric.least  # below it all is the same to everybody: 0.02 ms of queue and 0.2 are no tenfold
        return [math.log(max(value, least)) for value in self.values] if self.logs else self.values


def _sample(metric: Metric, runs: Sequence[tuple[Run, bool]], when: Sequence[float]) -> _Sample:
    found = [(run.figures[metric.figure], of_b, at) for (run, of_b), at in zip(runs, when, strict=True) if _has(run, metric.figure)]
    values = [value for value, _, _ in found]
    logs = metric.scale == "ratio" and all(value > 0 for value in values)
    if not logs and metric.scale == "ratio":
        metric = replace(metric, scale="difference", margin=metric.margin * abs(fmean(values)))
    return _Sample(metric, values, [of_b for _, of_b, _ in found], [at for _, _, at in found], logs)


def _has(run: Run, figure: str) -> bool:
    return math.isfinite(run.figures.get(figure, math.nan))


def _measured(sample: _Sample, names: tuple[str, str], drift: bool) -> tuple[Finding, Estimate | None]:
    """What was measured of a metric, its verdict still open."""
    a, b = sample.arm(False), sample.arm(True)
    middle = median if sample.metric.scale == "ratio" else fmean
    shown_a, shown_b = middle(a) if a else None, middle(b) if b else None
    empty = Finding(sample.metric, shown_a, shown_b, None, None, None, None, None, "inconclusive", "not measured", (len(a), len(b)), (a, b))
    if not (a and b):
        return replace(empty, why=f"not measured in {names[bool(a)]}" if a or b else "not measured"), None
    fitted = arm_effect(sample.scaled, sample.of_b, sample.when, drift)
    shown = math.exp if sample.logs else float
    low, high = map(shown, fitted.interval(ALPHA) or (math.nan, math.nan))
    found = replace(empty, effect=shown(fitted.value), p=fitted.p, why=NOT_JUDGED)
    return (found if math.isnan(low) else replace(found, low=low, high=high)), fitted


def _inside_margin(found: Finding, fitted: Estimate) -> bool:
    """Whether the whole interval is a change that does not matter. Both arms are alike in it: 5 % is 1/1.05 to 1.05."""
    metric, most = found.metric, max(map(abs, fitted.interval(ALPHA) or (math.inf,)))
    if metric.scale == "difference":
        return most <= max(metric.margin, metric.least)
    if most <= math.log1p(metric.margin):
        return True
    level = math.sqrt(max(found.a or 0.0, metric.least) * max(found.b or 0.0, metric.least))  # as the interval has them
    return most < 100 and 2 * level * math.sinh(most / 2) <= metric.least  # in the unit: half of the ratio above the level, half below


def _decide(found: Finding, fitted: Estimate, family: int, trap: str | None, least: int) -> tuple[Verdict, str]:
    """The verdict on a headline metric whose p is corrected, and why, in a sentence. least: runs of each arm."""
    fewest = min(found.runs)
    if fewest < least or found.p is None or found.p_holm is None or found.effect is None:
        return "inconclusive", f"too few runs: {fewest} of {least}"
    if trap is not None:
        return "inconclusive", f"no verdict, because {trap}"
    metric, interval = found.metric, f"{_effect(found.metric, found.low)} to {_effect(found.metric, found.high)}"
    no_matter = _margin(metric)
    if _inside_margin(found, fitted):
        if len({*found.values[0], *found.values[1]}) == 1:
            return "equivalent", "every run of both arms gave the same value"
        sure = "the difference is there but too small to matter: " if found.p_holm < ALPHA else ""
        return "equivalent", f"{sure}the interval {interval} lies within {no_matter}"
    if found.p_holm < ALPHA:
        verdict: Verdict = "better" if (fitted.value > 0) is (metric.better == "higher") else "worse"
        return verdict, f"{_effect(metric, found.effect)} ({interval}), p {_p_text(found.p_holm)} after Holm over {family} metrics"
    if found.p < ALPHA:
        return (
            "inconclusive",
            f"the interval {interval} leaves out no change, but among {family} metrics chance does that (p {_p_text(found.p_holm)} after Holm)",
        )
    return "inconclusive", f"the interval {interval} holds both no change and one beyond {no_matter}"


# ---- the judgement ----------------------------------------------------------------------------------------------------------


def judge(
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    setting: Setting = Setting(),
    metrics: Sequence[Metric] = HEADLINE,
    names: tuple[str, str] | None = None,
    excluded: Collection[int] = (),
) -> Judgement:
    """What the runs of b say beside those of a, all of one workload at one point. metrics: those to be judged; every other figure is shown.
    excluded: numbers of runs that the user leaves out. Raises BadComparison."""
    names = names or _names(a, b)
    workload, point = _one_load(a, b)
    sides = [[run for run in runs if run.cut is None and run.number not in excluded] for runs in (a, b)]
    whole = sorted(((run, of_b) for runs, of_b in zip(sides, (False, True), strict=True) for run in runs), key=lambda each: each[0].started_s)
    least = LEAST_RUNS - bool(excluded)  # so many are needed for precision, not for the method: a run that the user left out costs little of it
    when = _ranks([run.started_s for run, _ in whole])
    order = order_of(whole, when)
    samples = [_sample(metric, whole, when) for metric in metrics]
    checks: tuple[Check, ...] = (
        _check_order(whole, order, setting, names),
        _check_runs(a, b, names, excluded),
        _check_period(whole, when, order),
        _check_drift(samples, order),
        _check_cache(whole, setting, names),
        _check_mix(whole, setting, names),
        _check_answers(whole, names),
        _check_load(whole, names),
        _check_requests(whole, names),
    )
    findings = _judged([_measured(sample, names, order != "sequential") for sample in samples], _trap(checks), least)
    checks += (_check_stalls(samples, whole, order, names),)
    seen = {metric.figure for metric in metrics}
    others = [_sample(metric_of(name), whole, when) for name in sorted({name for run, _ in whole for name in run.figures} - seen)]
    shown = (_measured(sample, names, order != "sequential")[0] for sample in others)
    return Judgement(
        *names,
        workload,
        point,
        findings=(*findings, *shown),
        checks=checks,
        controlled=checks[0].ok,
        caveats=tuple(dict.fromkeys([*(check.what for check in checks if not check.ok), *(caveat for run, _ in whole for caveat in run.caveats)])),
    )


def _trap(checks: Sequence[Check]) -> str | None:
    """The check that leaves no verdict, in its words."""
    return next((check.what for check in checks if check.name in _TRAPS and not check.ok), None)


def _judged(measured: Sequence[tuple[Finding, Estimate | None]], trap: str | None, least: int) -> list[Finding]:
    """Holm's correction over what can get a verdict, then the verdicts."""
    family = [place for place, (found, _) in enumerate(measured) if found.p is not None and min(found.runs) >= least]
    corrected = dict(zip(family, holm([measured[place][0].p or 0.0 for place in family]), strict=True))
    findings = []
    for place, (found, fitted) in enumerate(measured):
        found = replace(found, p_holm=corrected.get(place))
        if fitted is not None:
            verdict, why = _decide(found, fitted, len(family), trap, least)
            found = replace(found, verdict=verdict, why=why)
        findings.append(found)
    return findings


def _names(a: Sequence[Run], b: Sequence[Run]) -> tuple[str, str]:
    first, second = (runs[0].arm if runs else side for side, runs in (("a", a), ("b", b)))
    return (first, second) if first != second else (f"{first} (a)", f"{second} (b)")


def _one_load(a: Sequence[Run], b: Sequence[Run]) -> tuple[str, str]:
    for side, runs in (("a", a), ("b", b)):
        if not runs:
            raise BadComparison(f"{side} has no runs; a comparison needs {LEAST_RUNS} of each arm")
        if len({run.arm for run in runs}) > 1:
            raise BadComparison(f"the runs of {side} are of several arms ({_list(run.arm for run in runs)}); give those of one")
    loads = {(run.workload, run.point) for run in (*a, *b)}
    if len(loads) > 1:
        raise BadComparison(f"the runs are of several loads ({_list(f'{workload} at {point}' for workload, point in loads)}); compare one at a time")
    return loads.pop()


def _list(words: Iterable[object]) -> str:
    return ", ".join(sorted(set(map(str, words))))


def _ranks(times: Sequence[float]) -> list[float]:
    """The place of each in the order of time; equal times share theirs."""
    ordered = sorted(times)
    return [(bisect_left(ordered, at) + bisect_right(ordered, at) - 1) / 2 for at in times]


def order_of(runs: Sequence[tuple[Run, bool]], when: Sequence[float]) -> Order:
    """How runs (and whether each is of b), sorted by time, are mixed. Interleaved: no arm runs for more than half of its runs in a row, and neither
    is late as a whole; then drifts of any slow shape fall on both."""
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
        arms = [b for _, b in group]
        mixed = len(set(arms)) > 1
        streak = 0 if mixed else streak + len(arms) if arms[0] is last else len(arms)
        last = None if mixed else arms[0]
        longest = max(longest, streak)
    return "interleaved" if longest <= max(2, fewest // 2) and abs(_correlation(of_b, when)) <= MOST_CORRELATED else "blocks"


def _correlation(of_b: Sequence[bool], when: Sequence[float]) -> float:
    share, middle = fmean(of_b), fmean(when)
    x, t = [b - share for b in of_b], [at - middle for at in when]
    return dot(x, t) / math.sqrt(dot(x, x) * dot(t, t)) if any(t) else 0.0


# ---- checks -----------------------------------------------------------------------------------------------------------------

_Runs = Sequence[tuple[Run, bool]]


def _arm(runs: _Runs, b: bool) -> list[Run]:
    return [run for run, of_b in runs if of_b is b]


def _check_order(runs: _Runs, order: Order, setting: Setting, names: tuple[str, str]) -> Check:
    if not setting.one_bench:
        what = "uncontrolled: sequential: the benches were run apart, and whatever else changed between them is in the difference"
    elif order == "sequential":
        what = "uncontrolled: sequential: one arm ran after the other, and a drift cannot be told from the change, so no drift was taken out"
    elif order == "blocks":
        letters = "".join("AB"[b] for _, b in runs)
        what = f"uncontrolled: in blocks ({letters}, A is {names[0]}): only a smooth drift is taken out; draw the order of each pair at random"
    else:
        return Check("order", True, "the runs of both arms were interleaved")
    return Check("order", False, what)


def _check_runs(a: Sequence[Run], b: Sequence[Run], names: tuple[str, str], excluded: Collection[int]) -> Check:
    mine = [(run, name) for name, runs in zip(names, (a, b), strict=True) for run in runs]
    cut = [f"run {run.number} of {name} ({run.cut})" for run, name in mine if run.cut is not None]
    left_out = [f"run {run.number} of {name}" for run, name in mine if run.cut is None and run.number in excluded]
    whole = [sum(run.cut is None and run.number not in excluded for run in runs) for runs in (a, b)]
    said = [f"left out because they broke off: {', '.join(cut)}"] if cut else []
    said += [f"excluded by the user: {', '.join(left_out)}"] if left_out else []
    if min(whole) < LEAST_RUNS - bool(left_out):
        said.append(f"{whole[0]} whole runs of {names[0]} and {whole[1]} of {names[1]}, where a verdict needs {LEAST_RUNS} of each")
    return Check("runs", not said, "; ".join(said) or f"all runs are whole: {whole[0]} of {names[0]}, {whole[1]} of {names[1]}")


def _check_period(runs: _Runs, when: Sequence[float], order: Order) -> Check:
    """Find an order that a disturbance of the machine can follow: then it falls on one arm and looks like the change."""
    if order != "interleaved" or len(runs) < 2 * (LEAST_RUNS - 1):
        return Check("period", True, "not checked: it takes interleaved runs, six of each arm")
    period = resembled_period(tuple(float(of_b) for _, of_b in runs), tuple(when))
    if period is None:
        return Check("period", True, "the order of the runs follows no period")
    said = f"the arms alternate with a period of {period:g} runs, so a disturbance that returns as often would look like the change"
    return Check("period", False, f"{said}; draw the order of each pair at random, as `vllm-watch tune` does")


def _check_stalls(samples: Sequence[_Sample], runs: _Runs, order: Order, names: tuple[str, str]) -> Check:
    """Name runs that lie off all others; they still count, since a stall may be what the change did."""
    ready = [sample for sample in samples if sample.logs and min(len(sample.arm(False)), len(sample.arm(True))) >= LEAST_RUNS - 1]
    if not ready:
        return Check("stalls", True, "not checked: it takes six runs of each arm")
    worst: dict[int, tuple[float, str]] = {}
    for sample in ready:
        there = [(run, of_b) for run, of_b in runs if _has(run, sample.metric.figure)]
        for at, apart in stalls.find(sample.scaled, sample.of_b, sample.when, order != "sequential", len(samples)):
            run, of_b = there[at]
            said = f"run {run.number} of {names[of_b]}: {sample.metric.title} was {_number(math.exp(apart))} times what the other runs predict"
            worst[run.number] = max(worst.get(run.number, (0.0, "")), (abs(apart), said))
    if not worst:
        return Check("stalls", True, "no run lies off the others of its arm")
    found = "; ".join(said for _, said in sorted(worst.values(), key=lambda each: (-round(each[0], 6), each[1])))
    numbers = " ".join(f"--exclude-run {number}" for number in sorted(worst))
    advice = f"repeat the experiment, or see what the other runs say with `vllm-watch compare FOLDER {numbers}`"
    return Check("stalls", False, f"{found}; nothing was left out here, so {advice}")


def _check_drift(samples: Sequence[_Sample], order: Order) -> Check:
    """What moved over the runs of one arm, as far as a line and a bend show it: the arms are taken out, in sequential order too."""
    ready = [sample for sample in samples if sample.logs and min(len(sample.arm(False)), len(sample.arm(True))) >= 3]
    seen = [(sample, *drift_terms(sample.scaled, sample.of_b, sample.when)) for sample in ready]
    sure = holm([term.p if term.p is not None else 1.0 for _, terms, _ in seen for term in terms])
    for sample, terms, apart in seen:
        p, sure = min(sure[: len(terms)], default=1.0), sure[len(terms) :]
        if p < ALPHA and apart > math.log1p(MARGIN):
            then = "which cannot be told from the change" if order == "sequential" else "which is taken out as far as it was smooth"
            what = f"{sample.metric.title} drifted by {_percent(math.expm1(apart))} over the runs (p {_p_text(p)}), {then}"
            return Check("drift", False, what)
    if not seen:
        return Check("drift", True, "not checked: it takes three runs of each arm")
    return Check("drift", True, f"no smooth drift of more than {_percent(MARGIN)} was seen")


def _check_cache(runs: _Runs, setting: Setting, names: tuple[str, str]) -> Check:
    if setting.repeated:
        return Check("cache", True, "prompts repeat from run to run on purpose, so the cache is warm for both")
    arms = _arm(runs, False), _arm(runs, True)
    for name, arm in zip(names, arms, strict=True):
        if len({run.seed for run in arm}) < len(arm):
            return Check(
                "cache", False, f"runs of {name} used the same seed, so later ones were answered from the prefix cache; give each run its own"
            )
    asked_a, asked_b = ({(run.seed, run.number) for run in arm} for arm in arms)
    if setting.shared_engine and asked_a & asked_b:
        return Check("cache", False, f"{names[1]} was asked what the same engine had been asked as {names[0]}; give each bench a seed of its own")
    for name, group in [("both arms", [run for run, _ in runs])] if setting.shared_engine else zip(names, arms, strict=True):
        hits = [run.figures["hit_ratio"] for run in group if _has(run, "hit_ratio")]
        if len(hits) > 1 and median(hits[1:]) - hits[0] > MOST_WARMER:
            risen = f"{_percent(hits[0])} in the first run of {name} and {_percent(median(hits[1:]))} in later ones"
            return Check("cache", False, f"cache hits rose from run to run: {risen}; prompts came back, so the cache was measured")
    if not any(_has(run, "hit_ratio") for run, _ in runs):
        return Check("cache", True, "every run had prompts of its own; hit ratios were not measured")
    return Check("cache", True, "every run had prompts of its own, and cache hits did not rise from run to run")


def _check_mix(runs: _Runs, setting: Setting, names: tuple[str, str]) -> Check:
    if setting.lengths is not None and all(setting.lengths):
        apart, chance = _distance(*setting.lengths), 1.63 * math.sqrt(sum(1 / len(each) for each in setting.lengths))  # 1 %: Smirnov
        if apart > max(MOST_APART, chance):
            return Check("mix", False, f"{names[0]} and {names[1]} got prompts of different lengths (distance {apart:.2f}, 0 is alike)")
        return Check("mix", True, f"prompts of both arms are alike in length (distance {apart:.2f})")
    return _check_work(runs, names, "mix", "prompt_tokens", "prompts")


def _check_answers(runs: _Runs, names: tuple[str, str]) -> Check:
    return _check_work(runs, names, "answers", "completion_tokens", "answers")


def _check_work(runs: _Runs, names: tuple[str, str], name: str, figure: str, title: str) -> Check:
    """Tokens per answer of the two arms, which should not differ by more than the margin."""
    each = [[run.figures[figure] / run.ok for run in _arm(runs, b) if _has(run, figure) and run.ok] for b in (False, True)]
    if not all(each):
        return Check(name, True, f"not checked: the lengths of {title} were not measured")
    a, b = map(median, each)
    alike = abs(a - b) <= MARGIN * max(a, b)
    said = f"{title} had {_number(a)} tokens in {names[0]} and {_number(b)} in {names[1]}"
    return Check(name, alike, said if alike else f"{said}, so the arms did different work")


def _check_load(runs: _Runs, names: tuple[str, str]) -> Check:
    said = []
    asked = [median([run.asked for run in _arm(runs, b)] or [0]) for b in (False, True)]
    if asked[0] != asked[1]:
        said.append(f"runs of {names[0]} asked {asked[0]:g} times, those of {names[1]} {asked[1]:g}")
    for name, arm in zip(names, (_arm(runs, False), _arm(runs, True)), strict=True):
        sent, failed = sum(run.asked for run in arm), sum(run.asked - run.ok for run in arm)
        if failed > MOST_FAILED * sent:
            said.append(f"{failed} of {sent} requests of {name} failed, so its latencies are those of the others")
    return Check("load", not said, "; ".join(said) or "both arms were asked the same number of times and answered")


def _check_requests(runs: _Runs, names: tuple[str, str]) -> Check:
    few = [(run.ok, run.number, names[b]) for run, b in runs if run.ok < LEAST_REQUESTS]
    if few:
        ok, number, name = min(few)
        return Check("requests", False, f"a p95 of fewer than {LEAST_REQUESTS} answers is the slowest one: run {number} of {name} had {ok}")
    return Check("requests", True, f"every run had {LEAST_REQUESTS} answers or more")


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Kolmogorov and Smirnov's: the largest gap between the shares at or below any length."""
    first, second = sorted(left), sorted(right)
    return max(abs(bisect_right(first, at) / len(first) - bisect_right(second, at) / len(second)) for at in {*first, *second})


# ---- gates and the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What b may do at most; None: not asked. max_p95_regression: 0.15 is 15 % more than a. max_error_rate: a share of b's requests."""

    max_p95_regression: float | None = None
    max_error_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Violation:
    """A limit that b broke, or that nothing was measured for (value None). sure: the whole 95 % interval is beyond the limit."""

    limit: str
    figure: str
    value: float | None
    most: float
    sure: bool
    what: str


def gates(judgement: Judgement, limits: Limits) -> list[Violation]:
    """The limits that b broke, by its point estimates, and those that cannot be told: a gate that measured nothing is not open."""
    broken = []
    if limits.max_p95_regression is not None:
        slowest = [each for each in judgement.findings if each.metric.figure.endswith(".p95") and each.metric.better == "lower"]
        told = [
            (each.metric.figure, each.effect - 1, each.low, each.high) for each in slowest if each.effect is not None and each.metric.scale == "ratio"
        ]
        broken += [
            _violation("max-p95-regression", figure, value, _beyond(low, 1), _beyond(high, 1), limits.max_p95_regression, "slower")
            for figure, value, low, high in told
            if value > limits.max_p95_regression
        ]
        if not told:
            broken.append(_untold("max-p95-regression", "p95", limits.max_p95_regression))
    if limits.max_error_rate is not None:
        found = next((each for each in judgement.findings if each.metric.figure == "error_ratio" and each.values[1]), None)
        if found is None:
            broken.append(_untold("max-error-rate", "error_ratio", limits.max_error_rate))
        elif (rate := fmean(found.values[1])) > limits.max_error_rate:
            low, high = _mean_interval(found.values[1])
            broken.append(
                _violation("max-error-rate", "error_ratio", rate, low, high, limits.max_error_rate, f"of the requests of {judgement.b} failed")
            )
    return broken


def _beyond(bound: float | None, origin: float) -> float | None:
    return None if bound is None else bound - origin


def _violation(limit: str, figure: str, value: float, low: float | None, high: float | None, most: float, does: str) -> Violation:
    sure = low is not None and low > most
    if low is None or high is None:
        trust = "too few runs for an interval"
    else:
        trust = f"the interval {_percent(low)} to {_percent(high)} {'is all beyond it' if sure else 'also holds what is allowed'}"
    return Violation(limit, figure, value, most, sure, f"{figure}: {_percent(value)} {does}, where {_percent(most)} is allowed; {trust}")


def _untold(limit: str, figure: str, most: float) -> Violation:
    return Violation(
        limit, figure, None, most, False, f"{limit}: {figure} was not measured in both arms, so the limit of {_percent(most)} cannot be checked"
    )


def _mean_interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    if len(values) < 2:
        return None, None
    reach = t_quantile(1 - ALPHA, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return max(0.0, fmean(values) - reach), min(1.0, fmean(values) + reach)


class Row(NamedTuple):
    """A finding as texts, for any table."""

    metric: str
    a: str
    b: str
    change: str
    interval: str
    p: str
    verdict: str
    why: str


def table(judgement: Judgement) -> list[Row]:
    """A row for each finding; what is not judged stands last. An empty text is something that was not measured."""
    rows = []
    for found in judgement.findings:
        metric, p = found.metric, found.p_holm if found.p_holm is not None else found.p
        interval = f"{_effect(metric, found.low)} to {_effect(metric, found.high)}" if found.low is not None else ""
        doubt = " (uncontrolled)" if found.verdict != "inconclusive" and not judgement.controlled else ""
        verdict = f"{found.verdict}{doubt}" if found.judged else "not judged"
        shown = (_value(metric, found.a), _value(metric, found.b), _effect(metric, found.effect), interval, _p_text(p), verdict, found.why)
        rows.append(Row(metric.title, *shown))
    return rows


def counts(judgement: Judgement) -> Mapping[Verdict, int]:
    """How many of the judged metrics got which verdict."""
    told: dict[Verdict, int] = {"better": 0, "worse": 0, "equivalent": 0, "inconclusive": 0}
    for found in judgement.findings:
        if found.judged:
            told[found.verdict] += 1
    return told


def _value(metric: Metric, value: float | None) -> str:
    if value is None:
        return ""
    return _percent(value) if metric.unit == SHARE else f"{_number(value)} {metric.unit}".rstrip()


def _effect(metric: Metric, effect: float | None) -> str:
    """A change in words: -12.3 %, 49 times, +2.0 points, +3 ms."""
    if effect is None:
        return ""
    if metric.scale == "ratio":
        return f"{_number(effect)} times" if effect >= 2 else f"{(effect - 1) * 100:+.1f} %"
    if metric.unit == SHARE:
        return f"{effect * 100:+.1f} points"
    return f"{'+' if effect >= 0 else ''}{_number(effect)} {metric.unit}".rstrip()


def _margin(metric: Metric) -> str:
    if metric.scale == "ratio":
        return _percent(metric.margin) if not metric.least else f"{_percent(metric.margin)} or {_number(metric.least)} {metric.unit}"
    most = max(metric.margin, metric.least)
    return f"{_number(most * 100)} points" if metric.unit == SHARE else f"{_number(most)} {metric.unit}".rstrip()


def _percent(share: float) -> str:
    return f"{_number(share * 100)} %"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _p_text(p: float | None) -> str:
    return "" if p is None else "<0.0001" if p < 0.0001 else f"{p:.2g}"
