"""Thresholds of a deployment, from its Prometheus, a saved bench and its targets.

Invariant: every number has its reason, and where the evidence is thin the default stays and the reason says what
was lacking. None is looser than what breaks a target; one that is looser than the default says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from alerts import thresholds
from alerts.labels import ENGINE
from alerts.recorded_use import LEAST_STEPS, RecordedUse, Subject
from alerts.settings import Settings
from alerts.slo import Objectives
from alerts.thresholds import Threshold
from exporters.statistics import quantile

LEAST_FINISHED = thresholds.COMPARED_AT_LEAST.value
LEAST_OBSERVED = 20  # in a step, or its p95 is its slowest request
LEAST_PREEMPTED = 3  # steps with preemptions: one burst falls into two
MISSED = 0.05  # of these steps are left out at the low end: the cache was full between two scrapes and seen half empty
NEVER_FULL = 0.5  # preemptions below it have another cause than a full cache, such as priorities
HEADROOM = 0.05  # of all blocks, below the onset: so that the alert fires before and not when
LEAST_POINTS = 4  # loads of a bench: less than two before and one behind a knee are a guess
NEAR_MOST = 0.9  # of the most throughput: from there on a higher load brings next to nothing
MUCH = 0.8  # of it: enough where the next load already waits, since runs differ by some percent
BENDS = 1.5  # times the TTFT at the knee that a higher load must take, or it was not the engine that was full
NEAR_BOUND = 0.25  # how far off, as a share, a bucket bound may be to be taken instead
KEPT = 95  # percent of the busy steps in which live traffic keeps to a latency


# ---- KV cache: the onset of preemptions


@dataclass(frozen=True, slots=True)
class Onset:
    """At which usage (0 to 1) preemptions begin. steps: in how many they were seen; lowest: the least usage of all of
    these."""

    usage: float
    steps: int
    lowest: float


def onset(steps: Iterable[tuple[float, bool]]) -> Onset | None:
    """From the highest usage of each step and whether anything was preempted in it; None where that was too seldom to
    tell."""
    full = sorted(usage for usage, preempted in steps if preempted)
    return Onset(full[math.floor(MISSED * len(full))], len(full), full[0]) if len(full) >= LEAST_PREEMPTED else None


# ---- a bench: the knee


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """One load of a bench, the median of its runs. at: how many at once, or per second; throughput: per second; times
    are p95s in seconds."""

    at: float
    label: str
    throughput: float
    ttft_s: float
    tpot_s: float | None = None


def knee(loads: Iterable[BenchLoad]) -> BenchLoad | str:
    """The lowest load at which the engine does nearly the most that it ever does, or much of it where the next load
    brings waiting instead: beyond it only waiting grows. Else why there is none to be seen."""
    points = sorted(loads, key=lambda load: load.at)
    if len({point.at for point in points}) < LEAST_POINTS:
        return f"it has {len(points)} loads, and a knee needs {LEAST_POINTS}"
    most = max(point.throughput for point in points)
    waits = [*(after.ttft_s >= BENDS * point.ttft_s for point, after in pairwise(points)), False]
    at = next(n for n, point in enumerate(points) if point.throughput >= (MUCH if waits[n] else NEAR_MOST) * most)
    found, highest = points[at], points[-1]
    if at == len(points) - 1:
        return f"throughput still grows at its highest load ({highest.label}): measure higher ones"
    if at == 0:
        return f"its lowest load ({found.label}) fills the engine already: measure lower ones"
    if highest.ttft_s < BENDS * found.ttft_s:
        return (
            f"throughput stops growing at {found.label} and TTFT does not rise: something before the engine was the"
            " limit"
        )
    return found


# ---- numbers


@dataclass(frozen=True, slots=True)
class Derived:
    """One threshold of this deployment. value: None where it stays as it was. why: in sentences; evidence: the figures
    that it rests on."""

    before: Threshold
    value: float | None
    why: str
    evidence: Mapping[str, float] = field(default_factory=dict)

    @property
    def threshold(self) -> Threshold:
        return self.before if self.value is None else self.before.at(self.value)


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Target of this deployment for one kind of latency, in seconds, infinite where nothing is promised; and who says
    so."""

    seconds: float
    source: str

    def __str__(self) -> str:
        return f"{self.seconds:g} s ({self.source})"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Targets of both kinds."""

    ttft: LatencyTarget
    inter_token: LatencyTarget


def targets(objectives: Objectives, ttft_s: float | None = None, inter_token_s: float | None = None) -> LatencyTargets:
    """Each of a worksheet where it says it, else the strictest objective of its kind."""

    def one(kind: str, own_s: float | None) -> LatencyTarget:
        if own_s is not None:
            return LatencyTarget(own_s, "the worksheet")
        within = (each.within_s for each in objectives.objectives if each.latency == kind and each.within_s)
        return LatencyTarget(min(within, default=math.inf), "the objectives")

    return LatencyTargets(one("ttft", ttft_s), one("inter_token", inter_token_s))


def derive(
    asked: RecordedUse, settings: Settings, aims: LatencyTargets, bench: Mapping[str, Sequence[BenchLoad]] | None = None
) -> list[Derived]:
    """All numbers that can be derived, those that stay included. bench: as `loads` gives it."""
    found = (
        _queue_length(asked, settings, aims.ttft), _kv_cache_usage(asked, settings),
        _latency(asked, settings.at(thresholds.TTFT_P95), aims.ttft, bench),
        _latency(asked, settings.at(thresholds.INTER_TOKEN_P95), aims.inter_token, bench),
    )  # fmt: skip
    return [replace(each, value=None) if each.value == each.before.value else each for each in found]


def _looser(value: float, before: Threshold) -> str:
    return f" This is looser than {before.shown}, which it was." if value > before.value else ""


def _queue_length(asked: RecordedUse, settings: Settings, ttft: LatencyTarget) -> Derived:
    """By Little's law a queue that is served at a rate is empty within the time limit if it is not longer than rate x
    limit."""
    before, limit = settings.at(thresholds.QUEUE_LENGTH), settings.at(thresholds.QUEUE_TIME_P95)
    if full := dict(_rates(asked, queued=True)):
        engine, rate = min(full.items(), key=lambda pair: pair[1])
        value = float(max(1, math.floor(rate * limit.value)))
        seen = (
            f"While requests waited, {_named(engine)} finished {rate:.3g} a second (the median; of {len(full)} such"
            " engines the slowest)"
        )
    elif lasted := max((len(_steps(asked, engine, queued=True)) for engine in asked.drained), default=0):
        lacked = (
            f"; {LEAST_STEPS} would tell"
            if lasted < LEAST_STEPS
            else f", in which fewer than {LEAST_FINISHED:g} requests finished"
        )
        return Derived(
            before,
            None,
            f"A queue lasted in {lasted} steps{' only' if lasted < LEAST_STEPS else ''}{lacked}.{_young(asked)}",
        )
    elif ever := dict(_rates(asked, queued=False)):
        engine, rate = min(ever.items(), key=lambda pair: pair[1])
        value = float(math.floor(rate * limit.value))
        if value <= before.value:
            return Derived(
                before,
                None,
                f"No queue lasted, and {rate:.3g} requests a second at the busiest are no measure of what an engine"
                " can do.",
            )
        seen = (
            f"No queue lasted; the slowest engine, {_named(engine)}, finished at least {rate:.3g} a second when it was"
            " busiest (95th percentile)"
        )
    else:
        busy = max((_steps(asked, engine, queued=False) for engine in asked.drained), key=len, default=[])
        few = (
            f"in {len(busy)} steps only; {LEAST_STEPS} would tell"
            if len(busy) < LEAST_STEPS
            else f"fewer than {LEAST_FINISHED:g}"
        )
        return Derived(before, None, f"There were too few requests: {few}.{_young(asked)}")
    drains = f"{value:g}" if rate * limit.value >= 1 else "not even one, and a queue is one request at least"
    why = f"{seen}: in queue_time_p95, {limit.shown}, that drains {drains}.{_looser(value, before)}"
    if limit.value > ttft.seconds:
        missed = f"Who waits so long has missed the TTFT target of {ttft}: set queue_time_p95 below it"
        if value > before.value:
            return Derived(
                before,
                None,
                f"{seen}: in queue_time_p95, {limit.shown}, that drains {drains}. {missed} for a number of your own.",
            )
        why += f" {missed} to hear sooner."
    return Derived(before, value, why, {"requests_per_second": rate, "limit_s": limit.value})


def _rates(asked: RecordedUse, queued: bool) -> Iterator[tuple[Subject, float]]:
    """Requests per second that an engine finishes: the median of the steps in which the queue was never empty, or a
    high one of all steps."""
    for engine in asked.drained:
        rates = _steps(asked, engine, queued)
        if len(rates) >= LEAST_STEPS and sum(rates) * asked.step_s >= LEAST_FINISHED:
            yield engine, median(rates) if queued else quantile(rates, KEPT / 100)


def _steps(asked: RecordedUse, engine: Subject, queued: bool) -> list[float]:
    """Requests per second of an engine's steps in which the queue was never empty, or of all in which requests
    finished."""
    queue = asked.queued.get(engine, {})
    return [rate for at, rate in asked.drained[engine].items() if (queue.get(at, 0.0) >= 1 if queued else rate > 0)]


def _young(asked: RecordedUse) -> str:
    """The way out where Prometheus holds much less than the window, whose steps are then too long."""
    since = min(
        (at for each in (asked.usage, asked.drained) for course in each.values() for at in course), default=asked.to_s
    )
    minutes = math.ceil((asked.to_s - since) / 60)
    if asked.step_s <= 60 or minutes * 60 > (asked.to_s - asked.from_s) / 2:
        return ""
    fits = (
        f"--window {minutes}m fits what is recorded"
        if minutes >= LEAST_STEPS
        else f"ask again when {LEAST_STEPS} min are recorded"
    )
    return f" Seen is the last {minutes} min of the window, in steps of {asked.step_s / 60:.3g} min: {fits}."


def _kv_cache_usage(asked: RecordedUse, settings: Settings) -> Derived:
    before, full = settings.at(thresholds.KV_CACHE_USAGE), settings.at(thresholds.KV_CACHE_FULL)
    steps = [
        (usage, asked.preempted.get(engine, {}).get(at, 0.0) > 0)
        for engine, course in asked.usage.items() for at, usage in course.items() if usage > 0
    ]  # fmt: skip
    preempted = sum(was for _, was in steps)
    if len(steps) < LEAST_STEPS:
        return Derived(
            before,
            None,
            f"The cache was in use in {len(steps)} steps only; {LEAST_STEPS} would say something.{_young(asked)}",
        )
    if found := onset(steps):
        seen = (
            f"Preemptions were seen in {found.steps} steps of {_duration(asked.step_s)}, from {found.usage:.0%} of the"
            " blocks on"
        )
        seen += (
            f" (and once at {found.lowest:.0%}, where a scrape came too late or too early)."
            if found.lowest < found.usage
            else "."
        )
        evidence = {"onset": found.usage, "steps_with_preemptions": float(found.steps)}
        if found.usage < NEVER_FULL:
            return Derived(
                before,
                None,
                f"{seen} A cache that is not half full does not preempt: look for priorities or shared blocks first.",
                evidence,
            )
        value = min(_down(found.usage - HEADROOM), full.value)
        cut = f" and not above kv_cache_full ({full.shown})" if value == full.value else ""
        return Derived(
            before,
            value,
            f"{seen} {HEADROOM * 100:g} points below that{cut} there is time to act.{_looser(value, before)}",
            evidence,
        )
    if preempted:
        return Derived(
            before,
            None,
            f"Preemptions were seen in {preempted} steps only; {LEAST_PREEMPTED} would tell where they begin.",
        )
    usages = sorted((usage for usage, _ in steps), reverse=True)
    # reached often, not once
    value, evidence = min(_down(usages[LEAST_STEPS - 1]), full.value), {"highest_usage": usages[0]}
    if value <= before.value:
        why = (
            f"No preemption was seen, and the cache was seldom fuller than {before.shown} (at most {usages[0]:.0%}):"
            " where they begin is not known."
        )
        return Derived(before, None, why, evidence)
    why = (
        f"No preemption was seen, and the cache was at {value:.0%} and more in {LEAST_STEPS} steps: below that nothing"
        " is wrong."
    )
    return Derived(before, value, why + _looser(value, before), evidence)


def _latency(
    asked: RecordedUse, before: Threshold, target: LatencyTarget, bench: Mapping[str, Sequence[BenchLoad]] | None
) -> Derived:
    """The p95 at the knee of a bench or, where that is more, what live traffic keeps to; never beyond the target."""
    bounds = asked.bounds.get(before.name, ())
    found = _at_knee(before.name, bench)
    if isinstance(found, str):
        if before.value <= target.seconds:
            return Derived(before, None, found)
        return Derived(
            before, _within(target.seconds, bounds), f"The target is {target}, which {before.shown} is beyond. {found}"
        )
    workload, load, seconds = found
    what = "TTFT" if before.name == thresholds.TTFT_P95.name else "time per token"
    knee_ = f"{load.label} of {workload}"
    why = (
        f"From {knee_} on the engine does nearly its most, and only waiting grows; its p95 {what} is {seconds:.3g} s"
        " there."
    )
    evidence = {"knee_load": load.at, "knee_s": seconds}
    kept, steps = _kept(asked, before.name)
    live = f"in {KEPT} % of {steps} busy steps"
    if kept > seconds:
        evidence["live_s"] = kept
    value, near = on_bound(max(seconds, kept), bounds)
    if value > target.seconds:
        value = _within(target.seconds, bounds)
        why = f"{target} is the target. At the knee ({knee_}) p95 {what} is {seconds:.3g} s"
        why += ", so this engine breaks the target before it is full." if seconds > target.seconds else "."
        return Derived(
            before,
            value,
            why + (f" Live traffic keeps to {kept:.3g} s only ({live})." if kept > target.seconds else ""),
            evidence,
        )
    if kept > seconds:
        why += f" Live traffic needs more, and keeps to {kept:.3g} s {live}: that counts."
    if near:
        why += f" {value:g} s is the nearest bucket bound, where the estimate is exact."
    else:
        why += " No bucket bound is near, so the alert's estimate is not exact."
    return Derived(before, value, why + _looser(value, before), evidence)


def _at_knee(name: str, bench: Mapping[str, Sequence[BenchLoad]] | None) -> tuple[str, BenchLoad, float] | str:
    """Workload, load and p95 in seconds where a bench has its knee, the fastest of several; else why there is none."""
    if bench is None:
        return "No bench was given, so where the engine's knee is was not measured."
    knees = {workload: knee(points) for workload, points in bench.items()}
    times = [
        (workload, found, seconds)
        for workload, found in knees.items()
        if isinstance(found, BenchLoad)
        and (seconds := found.ttft_s if name == thresholds.TTFT_P95.name else found.tpot_s) is not None
    ]
    if times:
        return min(times, key=lambda row: row[2])
    whys = [
        f"{workload}: {found if isinstance(found, str) else 'it has no times between tokens'}"
        for workload, found in knees.items()
    ]
    return f"The bench shows no knee ({'; '.join(whys) or 'no run with a concurrency or a rate came to its end'})."


def _kept(asked: RecordedUse, name: str) -> tuple[float, int]:
    """The p95 that live traffic keeps to in most of its busy steps, of the slowest model, and how many steps these
    were; 0 where they are too few."""
    kept = [(0.0, 0)]
    for model, course in asked.p95.get(name, {}).items():
        observed = asked.observed.get(name, {}).get(model, {})
        busy = [p95 for at, p95 in course.items() if observed.get(at, 0.0) >= LEAST_OBSERVED]
        if len(busy) >= LEAST_STEPS:
            kept.append((quantile(busy, KEPT / 100), len(busy)))
    return max(kept)


def on_bound(value: float, bounds: Sequence[float]) -> tuple[float, bool]:
    """The nearest bound, by ratio, if it is near; else the value to two digits. And whether it is a bound."""
    best = (
        min((bound for bound in bounds if bound > 0), key=lambda bound: abs(math.log(bound / value)), default=None)
        if value > 0
        else None
    )
    if best is not None and abs(math.log(best / value)) <= math.log1p(NEAR_BOUND):
        return best, True
    return float(f"{value:.2g}"), False


def _within(target_s: float, bounds: Sequence[float]) -> float:
    """The bound at a target or, if it is near, the one below; else the target."""
    below = max((bound for bound in bounds if bound <= target_s), default=0.0)
    return below if below * (1 + NEAR_BOUND) >= target_s else target_s


def _down(share: float) -> float:
    return math.floor(share * 100 + 1e-9) / 100


def _named(engine: Subject) -> str:
    labels = dict(zip(ENGINE, engine, strict=True))
    return f"{labels['model_name']} on {labels['instance']}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:g} min"
