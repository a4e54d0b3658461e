"""How often the judge is wrong: seeded experiments whose truth is known, judged as they are in use, with the naive
methods beside it.

    python tests/bench/bench_judge.py [--experiments 2000] [--seed 1]

An experiment is six runs of each variant. Between runs: lognormal noise of 0, 3 or 8 %, most of it common to the
latencies of a run, as on a real machine. Over the experiment: no drift, or 10 % as a line, half a sine, or a step in
the middle. `requests` draws each of the 300 requests of every run and takes TTFT from those. `each` draws all seven
headline figures apart, the most that chance can do: there Holm allows for 4.9 %, and what is measured lies around it.
`neighbour` makes a tenth of the runs half as long again. The order of the variants is drawn in each round, as in
`tune`.

A disturbance of the machine that returns every 2 to 8 runs (a sine of any phase) is judged in drawn order and in A B B
A. A stall makes one run of twelve take so many times as long; beside what is found with it stands what is found when
the runs that the check names are excluded.

Exit code 1 where of A/A experiments (drawn order, 8 % noise, 10 % drift or a periodic disturbance) more than 5 % call
any headline metric better or worse; for `each` and the disturbances, where the whole interval lies beyond 5 %."""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median

from exporters.statistics import two_sided_p
from stack.bench.result import Run
from stack.tuning import turns
from stack.tuning.comparison import Comparison
from stack.tuning.run_comparison import compare_runs, smallest_effect

RUNS, REQUESTS = 6, 300
DRAWN = "drawn"
INTERLEAVED, SEQUENTIAL = "ABBAABBAABBA", "AAAAAABBBBBB"
PERIODS, AMPLITUDES = range(2, 9), (0.1, 0.2, 0.3)
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


Judged = Callable[[World], Tally]


def show_alarms(of: Judged) -> list[World]:
    """Print false alarms by noise and drift; return where there are too many."""
    print(
        "A against A: how often any of 7 headline metrics is called a difference, and how often TTFT is called"
        " equivalent"
    )
    print(
        f"  {'drawn':9}{'noise':>6} "
        f" {'drift 10 %':11}{'false alarms':24}{'equivalent':>11}{'drift seen':>12}{'run named':>11}"
    )
    missed = []
    quiet = [World(noise, drift) for noise in (0.0, 0.03, NOISY) for drift in DRIFTS]
    hard = [World(NOISY, drift, kind=kind) for kind in ("each", "requests") for drift in ("line", "half sine")]
    for world in (*quiet, *hard, World(NOISY, "line", spikes=0.1)):
        told = of(world)
        least = between(told.alarms, told.of)[0] if world.kind == "each" else told.alarms / told.of
        missed += [world] if world.noise == NOISY and world.drift != "none" and least > LIMIT else []
        kind = "neighbour" if world.spikes else world.kind
        drifted = told.broken["drift"] / told.of
        print(
            f"  {kind:9}{world.noise:6.0%} "
            f" {world.drift:11}{shown(told.alarms, told.of):24}{told.share('equivalent'):11.1%}{drifted:12.1%}"
            f"{told.broken['stalls'] / told.of:11.1%}",
            flush=True,
        )
    return missed


def show_periods(of: Judged) -> list[World]:
    """Print false alarms under periodic disturbances, in a fixed and in drawn order; return where there are too
    many."""
    print(f"\nA against A, {NOISY:.0%} noise and a disturbance that returns every so many runs: false alarms")
    print(f"  {'order':14}{'amplitude':>10}" + "".join(f"{f'{period} runs':>8}" for period in PERIODS))
    missed: list[World] = []
    for order in (INTERLEAVED, DRAWN):
        for amplitude in AMPLITUDES:
            row = [of(World(NOISY, order=order, period=period, amplitude=amplitude)) for period in PERIODS]
            missed += [
                World(NOISY, period=period, amplitude=amplitude)
                for period, told in zip(PERIODS, row, strict=True)
                if order == DRAWN and between(told.alarms, told.of)[0] > LIMIT
            ]
            print(
                f"  {order:14}{amplitude:10.0%}" + "".join(f"{told.alarms / told.of:8.1%}" for told in row), flush=True
            )
    return missed


def show_stalls(of: Judged) -> None:
    """Print the cost of one stalled run, and the results without the runs that the check names."""
    print("\nOne run of twelve stalls, 10 % drift as a line; B is truly 10 % slower, or A against A (1.0)")
    print(
        f"  {'stall':>6}{'noise':>7}{'effect':>8}{'worse':>8}{'run named':>11}{'worse without it':>18}{'alarms':>8}{'alarms without it':>19}"  # noqa: E501
    )
    for noise in (0.03, NOISY):
        for stall in (1.0, 1.5, 2.0, 3.0):
            for effect in (1.1, 1.0):
                told = of(World(noise, "line", effect, stall=stall))
                found = f"{told.share('worse'):8.1%}{told.broken['stalls'] / told.of:11.1%}{told.excluded_ttft['worse'] / told.of:18.1%}"  # noqa: E501
                alarms = f"{told.alarms / told.of:8.1%}{told.excluded_alarms / told.of:19.1%}" if effect == 1.0 else ""
                print(f"  {stall:6g}{noise:7.0%}{effect:8g}{found}{alarms}", flush=True)


def show_power(of: Judged) -> None:
    """Print how often a true effect is found."""
    print("\nB is truly 10 % slower: how often TTFT is called worse (better would be wrong)")
    print(
        f"  {'drawn':9}{'noise':>6}  {'drift 10 %':11}{'worse':24}{'better':>8}{'p < 5 % before Holm':>21}   found in"
        " 80 %, if alone, by formula"
    )
    for world in [
        World(noise, drift, 1.1, kind=kind)
        for kind in ("runs", "requests")
        for noise in (0.0, 0.03, NOISY)
        for drift in ("line",)
    ]:
        told, smallest = of(world), smallest_effect(RUNS, world.noise) or math.nan
        alone = f"{told.share('better'):8.1%}{told.before_holm / told.of:21.1%}"
        formula = f"   {smallest - 1:+.1%}" if world.kind == "runs" else ""
        print(
            f"  {world.kind:9}{world.noise:6.0%} "
            f" {world.drift:11}{shown(told.ttft['worse'], told.of):24}{alone}{formula}",
            flush=True,
        )


def show_naive(of: Judged) -> None:
    """Print the false alarms of naive methods on the same runs."""
    print(
        "\nThe naive methods, A against A, TTFT alone (published: 5, 18, 48 to 51 % on pooled requests; 58 % in"
        " sequential order with drift)"
    )
    print(f"  {'method':40}{'noise':>6}  {'drift 10 %':11}{'false alarms':24}{'this judge':>11}")
    for noise in (0.0, 0.03, NOISY):
        told = of(World(noise, kind="requests"))
        print(
            f"  {'Mann-Whitney on pooled requests':40}{noise:6.0%} "
            f" {'none':11}{shown(told.mann_whitney, told.of):24}{told.alarms / told.of:11.1%}",
            flush=True,
        )
    for noise in (0.03, NOISY):
        told = of(World(noise, "line", order=SEQUENTIAL))
        beside = f"{told.alarms / told.of:11.1%}, of which called uncontrolled: {told.broken['order'] / told.of:.0%}"
        print(
            f"  {f'sequential {SEQUENTIAL}, t of run medians':40}{noise:6.0%} "
            f" {'line':11}{shown(told.plain_t, told.of):24}{beside}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()

    def of(world: World) -> Tally:
        return tally(world, asked.experiments, asked.seed)

    print(
        f"{asked.experiments} experiments a line, seed {asked.seed}; {RUNS} runs a variant, order drawn; shares with"
        " Wilson's 95 % interval\n"
    )
    missed = [*show_alarms(of), *show_periods(of)]
    show_stalls(of)
    show_power(of)
    show_naive(of)
    print(f"\n{time.monotonic() - began:.0f} s")
    for world in missed:
        print(f"missed: more than {LIMIT:.0%} false alarms in {world}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
