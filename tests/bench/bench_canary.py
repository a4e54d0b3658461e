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
from statistics import median

from stack.gateway.policy import Canary
from tests.support.canary_days import CanaryDay, alarms, run
from tests.support.simulated_experiments import between, shown

LIMIT = 0.05


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
