"""Simulated days of a canary."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from exporters.statistics import t_quantile
from stack.canary.decision import ENDS, CanaryStage, decide
from stack.canary.evidence import VALUES, CanaryEvidence, CanaryMinute, LogSums, assess
from stack.gateway.policy import Canary

DAY = 1440


SIGMA = 0.8


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
