"""Simulated before/after experiments with a known effect."""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median

from exporters.statistics import two_sided_p
from stack.bench.result import Run
from stack.tuning import turns
from stack.tuning.comparison import Comparison
from stack.tuning.run_comparison import compare_runs

RUNS, REQUESTS = 6, 300


DRAWN = "drawn"


INTERLEAVED, SEQUENTIAL = "ABBAABBAABBA", "AAAAAABBBBBB"


LIMIT, NOISY, DRIFTING = 0.05, 0.08, 0.10


COMMON = 0.8  # of the variance between runs: what the latencies of a run share


# of the logarithm of TTFT between requests of a run; gives Mann and Whitney's test the false alarms that were published
SPREAD = 0.5


DRIFTS: dict[str, Callable[[float], float]] = {
    "none": lambda at: 0.0,
    "line": lambda at: at,
    "half sine": lambda at: math.sin(math.pi * at),
    "step": lambda at: float(at >= 0.5),
}


@dataclass(frozen=True, slots=True)
class World:
    """The truth of an experiment. noise: between runs. drift: how the machine gets slower by 10 %. effect: of variant B
    on every latency, as a ratio. kind: what is drawn, see above. spikes: how often a run meets a noisy neighbour and
    takes half as long again. period, amplitude: of a sine in the latencies, in runs and as a share. stall: how many
    times as long one run takes."""

    noise: float
    drift: str = "none"
    effect: float = 1.0
    order: str = DRAWN
    kind: str = "runs"
    spikes: float = 0.0
    period: int = 0
    amplitude: float = 0.0
    stall: float = 1.0


def experiment(world: World, rng: random.Random) -> tuple[list[Run], list[Run], tuple[list[float], list[float]]]:
    """Runs of A and of B, and for kind `requests` the logarithm of every request's TTFT of each."""
    variants: tuple[list[Run], list[Run]] = ([], [])
    pooled: tuple[list[float], list[float]] = ([], [])
    shared = 0.0 if world.kind == "each" else COMMON
    order = (
        [variant for round_ in turns.draw(RUNS, "AB", rng) for variant in round_]
        if world.order == DRAWN
        else world.order
    )
    phase, stalled = rng.random() * 2 * math.pi, rng.randrange(len(order))
    for place, letter in enumerate(order):
        of_b = letter == "B"
        slower = math.log1p(DRIFTING * DRIFTS[world.drift](place / (len(order) - 1))) + (
            math.log(world.effect) if of_b else 0.0
        )
        slower += (
            math.log1p(world.amplitude * math.sin(2 * math.pi * place / world.period + phase)) if world.period else 0.0
        )
        slower += math.log(world.stall) if place == stalled else 0.0
        slower += rng.gauss(0, world.noise * math.sqrt(shared)) + (
            math.log(1.5) if rng.random() < world.spikes else 0.0
        )
        ttft, tpot, queue, pace = (slower + rng.gauss(0, world.noise * math.sqrt(1 - shared)) for _ in range(4))
        if world.kind == "requests":
            seen = [rng.gauss(ttft, SPREAD) for _ in range(REQUESTS)]
            pooled[of_b].extend(seen)
            ttft = median(seen)
        variants[of_b].append(_run(place, letter, ttft, tpot, queue, pace, world, rng))
    return *variants, pooled


def _run(
    place: int, variant: str, ttft: float, tpot: float, queue: float, pace: float, world: World, rng: random.Random
) -> Run:
    failed, at = 0, rng.expovariate(0.9)
    while at < 1:  # 0.3 % of requests
        failed, at = failed + 1, at + rng.expovariate(0.9)
    if world.kind == "each":
        hits, errors, memory = (math.exp(rng.gauss(0, world.noise)) for _ in range(3))
    else:
        hits, errors, memory = 1 + rng.gauss(0, 0.02), failed / REQUESTS / 0.05, 1 + rng.gauss(0, 0.005)
    figures = {
        "ttft_ms.p50": 100 * math.exp(ttft),
        "tpot_ms.p50": 20 * math.exp(tpot),
        "queue_ms.mean": 50 * math.exp(queue),
        "tokens_per_second": 1000 * math.exp(-pace),
        "hit_ratio": 0.5 * hits,
        "error_ratio": 0.05 * errors,
        "memory_peak_gb": 60 * memory,
    }
    began = 100.0 * place
    counts = {"asked": REQUESTS, "ok": REQUESTS - failed}
    return Run(
        number=place,
        variant=variant,
        workload="w",
        point="c8",
        started_s=began,
        ended_s=began + 90,
        seed=place,
        figures=figures,
        **counts,
    )


def false_alarm(comparison: Comparison) -> bool:
    """Whether any headline metric was called a difference."""
    return any(found.verdict in ("better", "worse") for found in comparison.findings)


def mann_whitney_p(a: Sequence[float], b: Sequence[float]) -> float:
    """By the normal approximation, which is exact enough for thousands of values without ties."""
    n, m, ordered = len(a), len(b), sorted(a)
    off = sum(bisect_left(ordered, value) for value in b) - n * m / 2
    return 2 * NormalDist().cdf(-abs(off) / math.sqrt(n * m * (n + m + 1) / 12))


def plain_t_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Student's test of two samples, with neither drift nor order."""
    df = len(a) + len(b) - 2
    inside = sum((value - fmean(each)) ** 2 for each in (a, b) for value in each) / df
    return two_sided_p((fmean(b) - fmean(a)) / math.sqrt(inside * (1 / len(a) + 1 / len(b))), df)


@dataclass
class Tally:
    """Of so many experiments: those with a difference called, those in which TTFT alone would have been, those in which
    a naive method calls one, and the verdicts on TTFT."""

    of: int = 0
    alarms: int = 0
    before_holm: int = 0
    plain_t: int = 0
    mann_whitney: int = 0
    ttft: Counter[str] = field(default_factory=Counter)
    excluded_ttft: Counter[str] = field(default_factory=Counter)  # without the runs that the check of stalls names
    excluded_alarms: int = 0
    broken: Counter[str] = field(default_factory=Counter)  # checks that were not met

    def share(self, verdict: str) -> float:
        return self.ttft[verdict] / self.of


def tally(world: World, experiments: int, seed: int) -> Tally:
    rng, told = random.Random(f"{seed} {world}"), Tally(experiments)
    for _ in range(experiments):
        a, b, pooled = experiment(world, rng)
        comparison = compare_runs(a, b)
        told.alarms += false_alarm(comparison)
        told.ttft[comparison.findings[0].verdict] += 1
        told.before_holm += (comparison.findings[0].p or 0.0) < LIMIT
        told.broken.update(check.name for check in comparison.checks if not check.ok)
        named = {
            int(number)
            for check in comparison.checks
            if check.name == "stalls"
            for number in re.findall(r"--exclude-run (\d+)", check.what)
        }
        without = compare_runs(a, b, excluded=named) if named else comparison
        told.excluded_alarms += false_alarm(without)
        told.excluded_ttft[without.findings[0].verdict] += 1
        told.plain_t += world.order == SEQUENTIAL and plain_t_p(*comparison.findings[0].values) < LIMIT
        told.mann_whitney += world.kind == "requests" and mann_whitney_p(*pooled) < LIMIT
    return told


def between(found: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.959964, found / of
    middle, reach = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - reach) / (1 + z * z / of), (middle + reach) / (1 + z * z / of)


def shown(found: int, of: int) -> str:
    low, high = between(found, of)
    return f"{found / of:5.1%} ({low:.1%} to {high:.1%})"
