"""Runs that do not belong to the others: a stall, a noisy neighbour, an engine that was warming up.

One run that takes three times as long doubles or triples the estimated noise, so that a real effect is no longer found.
Such a run is named and never
dropped: a stall may be what the change did. Method: generalized extreme studentized deviate (Rosner, Technometrics 25,
1983) on the residuals of the fit that gives the verdict, for at most MOST runs, so that two stalls cannot hide each
other; Bonferroni over runs and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from exporters.statistics import deleted_residuals, two_sided_p

MOST = 2  # named at once; of more, the variance is the machine's
APART = math.log(1.25)  # from the fit to the other runs, as a logarithm: less would hardly hide an effect
LEVEL = 0.02  # for each of MOST steps: with twelve runs the second step of the method is somewhat too eager


def find(
    values: Sequence[float], of_b: Sequence[bool], when: Sequence[float], drift: bool, metrics: int
) -> list[tuple[int, float]]:
    """Return the runs whose values (logarithms) lie off the fit to all others, by place, and how far, the farthest
    first.

    metrics: how many are looked at in all, for the correction."""
    places: list[int] = list(range(len(values)))
    suspects: list[tuple[int, float]] = []
    sure = 0
    for _ in range(MOST):
        left = [values[at] for at in places]
        found, df = deleted_residuals(left, [of_b[at] for at in places], [when[at] for at in places], drift)
        if df < 2:
            break
        # ties, whatever the order of runs
        index = max(range(len(found)), key=lambda at: (round(abs(found[at][1]), 6), left[at], of_b[places[at]]))
        apart, t = found[index]
        suspects.append((places[index], apart))
        if abs(apart) > APART and two_sided_p(t, df) * len(places) * metrics < LEVEL:
            sure = len(suspects)
        del places[index]
    return suspects[:sure]
