"""Order of the runs of an experiment: drawn at random within each round, so that no disturbance of the machine can
follow it.

With a fixed order such as A B B A, a disturbance that returns every four runs (a cron job, a thermal cycle) slows one
variant only and looks like an effect. Few rounds can draw such an order by chance, so an order that a sine wave of any
period explains too well is drawn again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

from exporters.statistics import Axis, Column, dot, free_axis, run_design

Turns = tuple[tuple[str, ...], ...]

# Share of a variant's variance, drift taken out, that a sine wave may explain. With six rounds and no other noise a
# wave passes for an effect from 0.62 on (t 3.6 with 8 degrees of freedom, Holm over seven metrics). At 0.65, 30 of the
# 64 orders of six pairs remain; `make bench-judge` shows at most 5 % false alarms for periods of 2 to 8 runs. A lower
# limit leaves fewer orders, and each is then likelier to meet its own disturbance.
MOST_EXPLAINED = 0.65
_LONGEST = 24.0  # runs; slower waves are drift, which the fit takes out
_STEP = 0.25
_DRAWS = 200  # with two or three rounds every order resembles some wave; the last one drawn is taken then


def draw(rounds: int, variants: Sequence[str], rng: random.Random) -> Turns:
    """Return the order of the variants in each round, drawn at random, again where it resembles a wave."""
    turns: Turns = ()
    for _ in range(_DRAWS):
        turns = tuple(tuple(rng.sample(variants, len(variants))) for _ in range(rounds))
        if all(resembled_period(*_places(turns, variants[0], other)) is None for other in variants[1:]):
            break
    return turns


def _places(turns: Turns, first: str, other: str) -> tuple[Column, Column]:
    """Return, for the runs of two variants, which are of `other` (1.0) and their places among all runs."""
    mine = [
        (place, variant)
        for place, variant in enumerate(variant for round_ in turns for variant in round_)
        if variant in (first, other)
    ]
    return tuple(float(variant == other) for _, variant in mine), tuple(float(place) for place, _ in mine)


@lru_cache(maxsize=4096)
def resembled_period(of_b: Column, when: Column) -> float | None:
    """Return the period, in runs, of the sine wave that explains most of the order, or None where none explains more
    than MOST_EXPLAINED."""
    *drift, variant = run_design(of_b, when, True).axes
    if variant.weight < 1e-9:
        return None
    longest = min(_LONGEST, len(when))
    periods = [2 + _STEP * step for step in range(int((longest - 2) / _STEP) + 1)]
    explained, period = max(
        ((_explained(variant.column, when, period, drift) / variant.weight, -period) for period in periods),
        default=(0.0, 0.0),
    )
    return -period if explained > MOST_EXPLAINED else None


def _explained(variant: Column, when: Column, period: float, drift: Sequence[Axis]) -> float:
    """Return how much of the variant's sum of squares a wave of this period explains, whatever its phase; the drift is
    free of both."""
    found, axes = 0.0, list(drift)
    for wave in (math.cos, math.sin):
        axis = free_axis([wave(2 * math.pi * at / period) for at in when], axes)
        if axis.weight > 1e-6:
            found += dot(variant, axis.column) ** 2 / axis.weight
            axes.append(axis)
    return found
