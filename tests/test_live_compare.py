"""What live traffic says about a change: the statistics by simulation, strata, caveats, and what it refuses to say.

`PYTHONPATH=. python tests/test_live_compare.py 500` measures how often the comparison is wrong, and how often it finds what is there."""

from __future__ import annotations

import gzip
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.request_log import RequestRecord, timestamp, to_line
from stack.tuning import live
from stack.tuning.judge import BadComparison, Finding, Judgement, Metric
from stack.tuning.live import DAY_S, HOUR_S, WEEK_S, Log, Seen, around_event, between_variants, blocks_of, consistent, kept, windowed

EVENT_S = 1_778_590_800.0  # 2026-05-12T13:00:00Z
TEAMS = (("chat", 400, 0.5, 0.3), ("search", 1500, 0.3, 0.6), ("agents", 6000, 0.2, 0.8))  # median prompt, share of the traffic, share in cache
FEW = tuple(figure for figure in live.FIGURES if figure.judged and figure.metric.figure != "engine_queue_ms")


# ---- traffic as it may be -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """days: of history, each `period_s` before the next. correlation: of a minute with the next one; noise: of minutes; of_day: of days as a whole;
    diurnal: of latency over the day. After the event: longer prompts, a new team, more traffic, `ttft` times the TTFT. canary: share of that variant,
    which has the `ttft` then."""

    days: int = 4
    period_s: float = DAY_S
    hours: float = 4.0
    per_minute: float = 5.0
    correlation: float = 0.8
    noise: float = 0.1
    of_day: float = 0.05
    diurnal: float = 0.3
    longer: float = 1.0
    new_team: bool = False
    more: float = 1.0
    ttft: float = 1.0
    canary: float = 0.0


def traffic(rng: Random, world: World) -> Log:
    log = Log()
    phase = rng.uniform(0, 2 * math.pi)
    reach, fresh = round(world.hours * 60) + 3, math.sqrt(1 - world.correlation**2)
    for day in range(world.days + 1):
        of_day, shared, own = rng.gauss(0, world.of_day), rng.gauss(0, 1), rng.gauss(0, 1)
        for minute in range(-reach, reach + 1):
            shared, own = world.correlation * shared + fresh * rng.gauss(0, 1), world.correlation * own + fresh * rng.gauss(0, 1)
            at = EVENT_S - day * world.period_s + 60 * minute
            sun = math.sin(2 * math.pi * at / DAY_S + phase)
            slow = of_day + world.noise * shared + world.diurnal * sun
            after = day == 0 and minute >= 0
            mean = world.per_minute * (1 + 0.5 * sun) * (world.more if after else 1.0)
            teams = rng.choices(TEAMS, [team[2] for team in TEAMS], k=max(0, round(rng.gauss(mean, math.sqrt(mean)))))
            if after and world.new_team:
                teams += [("lawyers", 3000, 0.0, 0.1)] * round(world.per_minute / 5)
            for team in teams:
                _ask(log, rng, world, at + rng.uniform(0, 60), after, slow, world.noise * own, team)
    return log


def _ask(log: Log, rng: Random, world: World, at: float, after: bool, slow: float, own: float, team: tuple[str, int, float, float]) -> None:
    name, tokens, _, hits = team
    prompt = max(1, round(tokens * (world.longer if after else 1.0) * math.exp(rng.gauss(0, 0.8))))
    cached = round(prompt * hits) if rng.random() < 0.7 else 0
    answer = max(2, round(150 * math.exp(rng.gauss(0, 0.7))))
    variant = "canary" if rng.random() < world.canary else "stable"
    changed = variant == "canary" if world.canary else after
    ttft = (world.ttft if changed else 1.0) * (40 + 0.1 * (prompt - cached)) * math.exp(slow + rng.gauss(0, 0.3))
    tpot = 25 * math.exp(0.5 * slow + 0.5 * own + rng.gauss(0, 0.15))
    queue = 0.0 if rng.random() < 0.5 else rng.expovariate(0.05) * math.exp(3 * own)
    ok = rng.random() > 0.01 * math.exp(5 * own)
    ended = at + (ttft + tpot * answer) / 1000
    log.first_s, log.last_s = min(log.first_s, ended), max(log.last_s, ended)
    log.seen.append(
        Seen(
            at, ended, "m", name, variant, "e1", "ok" if ok else "upstream_error", prompt, cached, answer, queue, None,
            ttft if ok else None, tpot if ok else None, ttft + tpot * answer,
        )
    )  # fmt: skip


def simulate(count: int, world: World, seed: int = 0, resamples: int = 300) -> Counter[str]:
    """In how many of so many comparisons a metric was called better or worse; `any`: at least one was."""
    called: Counter[str] = Counter()
    for n in range(count):
        log = traffic(Random(f"{seed}-{n}"), world)
        if world.canary:
            told = between_variants(log, "stable", "canary", figures=FEW, resamples=resamples, seed=n)
        else:
            told = around_event(log, EVENT_S, world.hours * HOUR_S, figures=FEW, resamples=resamples, seed=n)
        found = [each.metric.figure for each in told.findings if each.verdict in ("better", "worse")]
        called.update(found)
        called["any"] += bool(found)
    return called


WORLDS = {
    "nothing changed; 4 days before": World(),
    "nothing changed; 1 week before": World(days=1, period_s=WEEK_S),
    "nothing changed; no history": World(days=0),
    "nothing changed; 4 days; minutes correlate at 0.9": World(correlation=0.9),
    "prompts 1.5 times as long and a new team; 4 days": World(longer=1.5, new_team=True),
    "prompts 1.5 times as long and a new team; no history": World(days=0, longer=1.5, new_team=True),
    "TTFT +15 %; 4 days": World(ttft=1.15),
    "TTFT +15 %; 4 days; minutes 5 % apart": World(ttft=1.15, noise=0.05),
    "TTFT +15 %; no history": World(days=0, ttft=1.15),
    "canary of 20 %; nothing changed": World(days=0, canary=0.2),
    "canary of 20 %; TTFT +15 %": World(days=0, canary=0.2, ttft=1.15),
}


if __name__ == "__main__":
    how_many, wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 500, sys.argv[2] if len(sys.argv) > 2 else ""
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    for title, world in WORLDS.items():
        if wanted in title:
            called = simulate(how_many, world, first)
            sys.stdout.write(f"{title}: called a change in {called['any']} of {how_many}: {dict(called)}\n")
            sys.stdout.flush()
