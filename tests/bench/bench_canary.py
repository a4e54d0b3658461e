"""How often the comparison of a canary is wrong when it is looked at every minute, and how long it takes: simulated
days whose truth is known, through the code that decides, with a t test that is repeated every minute beside it.

    python tests/bench/bench_canary.py [--days 400] [--seed 1] [--quick]

A minute has a Poisson number of requests by the time of day, of which the canary gets a share; the logarithm of each
has a deviation of 0.8. Level and drift of the day are common to both variants; the canary's own level wanders by the
noise, with a correlation of neighbouring minutes (0.6 unless said). Three latencies wander apart, the most that chance
can do. Errors are 0.5 % of the requests, in bursts of five.

Exit code 1 where more than 5 % of days without a difference (the whole Wilson interval) have a false alarm: any metric
called better or worse at any minute, or a canary that is rolled back. Lines beyond correlation 0.8 are known limits
and are shown only."""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from bench_judge import between, shown

from exporters.statistics import t_quantile
from stack.canary.decision import ENDS, CanaryStage, decide
from stack.canary.evidence import VALUES, CanaryEvidence, CanaryMinute, LogSums, assess
from stack.gateway.policy import Canary

DAY = 1440
SIGMA = 0.8
LIMIT = 0.05
FIRST_LOOK = 10  # of the repeated t test
BURST, ERRORS = 5, 0.005


@dataclass(frozen=True, slots=True)
class CanaryDay:
    """The truth. noise, correlation: of the canary's own level, by minute. effect: on every latency, as a ratio.

    rate: requests a minute, on average. swing: of rate and level over a day, as a share. drift: of the common level."""

    noise: float = 0.1
    correlation: float = 0.6
    effect: float = 1.0
    share: float = 0.2
    rate: float = 1000.0
    swing: float = 0.6
    drift: float = 0.3
    days: int = 1


def poisson(mean: float, rng: random.Random) -> int:
    if mean > 30:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    count, left = -1, 1.0
    end = math.exp(-mean)
    while left > end:
        count, left = count + 1, left * rng.random()
    return max(count, 0)


class World:
    """One canary and its traffic, minute after minute, at whatever share it is given."""

    def __init__(self, day: CanaryDay, rng: random.Random) -> None:
        self.day, self.rng = day, rng
        self.own = [rng.gauss(0, day.noise) for _ in VALUES]
        self.phase = rng.random() * 2 * math.pi

    def minute(self, at: int, share: float) -> CanaryMinute:
        day, rng = self.day, self.rng
        wave = math.sin(2 * math.pi * at / DAY + self.phase)
        rate = day.rate * (1 + day.swing * wave)
        canary, others = poisson(rate * share, rng), poisson(rate * (1 - share), rng)
        level = 0.5 * day.swing * wave + day.drift * at / DAY
        rest, rho = math.sqrt(1 - day.correlation**2), day.correlation
        sums = {}
        for place, figure in enumerate(VALUES):
            self.own[place] = rho * self.own[place] + rest * rng.gauss(0, day.noise)
            mine = level + self.own[place] + math.log(day.effect)
            sums[figure] = LogSums(
                canary, canary * mine + SIGMA * math.sqrt(canary) * rng.gauss(0, 1),
                others, others * level + SIGMA * math.sqrt(others) * rng.gauss(0, 1),
            )  # fmt: skip
        errors = [BURST * poisson(count * ERRORS / BURST, rng) for count in (canary, others)]
        return CanaryMinute(60.0 * at, (canary, others), (min(errors[0], canary), min(errors[1], others)), sums)


def repeated_t(values: tuple[int, float, float]) -> bool:
    """Whether Student's test of the blocks so far says p < 5 %."""
    n, total, squares = values
    if n < FIRST_LOOK:
        return False
    mean = total / n
    error = math.sqrt(max(squares - n * mean * mean, 1e-12) / (n - 1) / n)
    # the quantile of 100 degrees of freedom stands for more
    return abs(mean / error) > t_quantile(0.95, min(n - 1, 100))


def alarms(day: CanaryDay, rng: random.Random) -> tuple[bool, bool]:
    """Whether this comparison, and the repeated t test of one latency, called a difference at any minute of a day."""
    world, evidence, policy = World(day, rng), CanaryEvidence(), Canary(share=day.share)
    naive, ours, n, total, squares, before = False, False, 0, 0.0, 0.0, 0
    figure = next(iter(VALUES))
    for at in range(DAY * day.days):
        evidence.open = world.minute(at, day.share)
        evidence.close(policy, 0.0)
        ours = ours or any(each.finding.verdict in ("better", "worse") for each in assess(evidence, policy))
        ours = ours or evidence.failing(policy) is not None
        blocks = evidence.metrics[figure].blocks if figure in evidence.metrics else None
        if blocks is not None and blocks.n > before:
            before, n, total, squares = blocks.n, blocks.n, blocks.total, blocks.squares
            naive = naive or repeated_t((n, total, squares))
        if ours and naive:
            break
    return ours, naive


def run(day: CanaryDay, rng: random.Random, policy: Canary) -> tuple[str, int]:
    """The end of a canary whose share is what is decided, `hold` for none within the days; and its minute."""
    world, evidence, stage = World(day, rng), CanaryEvidence(), CanaryStage(policy.steps[0], 0.0, 0.0)
    for at in range(DAY * day.days):
        evidence.open = world.minute(at, stage.share)
        evidence.close(policy, stage.since_s + policy.settle_s)
        now_s = 60.0 * (at + 1)
        decision = decide(policy, evidence, (), stage, now_s)
        if decision.action in ENDS:
            return decision.action, at + 1
        if decision.action == "raise":
            evidence.at_another_share()
            stage = CanaryStage(decision.share, now_s, 0.0)
    return "hold", DAY * day.days


AA: dict[str, CanaryDay] = {
    "noise 5 %": CanaryDay(0.05),
    "noise 10 %": CanaryDay(),
    "noise 20 %": CanaryDay(0.2),
    "independent minutes": CanaryDay(correlation=0.0),
    "drift x 2 in a day": CanaryDay(drift=math.log(2)),
    "no day pattern": CanaryDay(swing=0.0, drift=0.0),
    "share 1 %, 50 requests/s": CanaryDay(share=0.01, rate=3000),
    "share 5 %, 1 request/s": CanaryDay(share=0.05, rate=60),
    "share 50 %": CanaryDay(share=0.5),
    "share 90 %": CanaryDay(share=0.9),
}
LIMITS: dict[str, CanaryDay] = {
    "correlation 0.8": CanaryDay(correlation=0.8),
    "correlation 0.9": CanaryDay(correlation=0.9),
}


def show_alarms(days: int, seed: int) -> Iterator[str]:
    """Print false alarms; yield the lines with too many."""
    print("A against A, looked at every minute of a day: any of 4 metrics called better or worse")
    print(f"  {'':26}{'this comparison':26}{'t test each minute, 1 metric':26}")
    for name, day in (AA | LIMITS).items():
        rng = random.Random(f"{seed} {day}")
        found = [alarms(day, rng) for _ in range(days)]
        ours, naive = sum(one for one, _ in found), sum(one for _, one in found)
        known = "   known limit" if name in LIMITS else ""
        print(f"  {name:26}{shown(ours, days):26}{shown(naive, days):26}{known}", flush=True)
        if name in AA and between(ours, days)[0] > LIMIT:
            yield name


def show_power(days: int, seed: int) -> Iterator[str]:
    """Print what becomes of canaries that are slower, and of equal ones; yield the lines with too many false ends."""
    print("\nShare raised as decided (5, 20, 50 %), 1,000 requests a minute, noise with correlation 0.6, two days")
    print(
        f"  {'noise':>6}{'truth':>7}  {'rolled back':24}{'median':>10}{'p90':>10}{'promoted':>10}{'undecided yet':>15}"
    )
    for noise in (0.05, 0.1, 0.2):
        for effect in (1.0, 1.1, 1.2, 1.5):
            day = CanaryDay(noise, effect=effect, days=2)
            rng = random.Random(f"{seed} power {day}")
            ends = [run(day, rng, Canary()) for _ in range(days)]
            back = sorted(at for action, at in ends if action == "roll_back")
            promoted, held = (sum(action == wanted for action, _ in ends) for wanted in ("promote", "hold"))
            times = (f"{median(back):7.0f} min", f"{back[int(0.9 * (len(back) - 1))]:7.0f} min") if back else ("", "")
            print(
                f"  {noise:6.0%}{effect - 1:+7.0%}  {shown(len(back), days):24}{times[0]:>10}{times[1]:>10}"
                f"{promoted / days:10.0%}{held / days:15.0%}",
                flush=True,
            )
            if effect == 1.0 and between(len(back), days)[0] > LIMIT:
                yield f"rising shares, noise {noise:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="40 days a line")
    asked = parser.parse_args()
    days = 40 if asked.quick else asked.days
    began = time.monotonic()
    print(f"{days} simulated days a line (power: a quarter), seed {asked.seed}; with Wilson's 95 % interval\n")
    missed = [*show_alarms(days, asked.seed), *show_power(max(days // 4, 10), asked.seed)]
    print(f"\n{time.monotonic() - began:.0f} s")
    for name in missed:
        print(f"missed: more than {LIMIT:.0%} false alarms: {name}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
