"""Least squares of runs on a variant and a smooth drift over time, with Student's t. Pure arithmetic; no run is known here.

Source of the coefficient by residuals: Frisch, Waugh and Lovell; of the deleted residual: Cook and Weisberg, Residuals and Influence, 2.2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

Column = tuple[float, ...]


def two_sided_p(t: float, df: int) -> float:
    """How often chance alone goes as far from 0 as t: finite sums in cos(atan(t / sqrt(df))). Source: Abramowitz and Stegun 26.7.3, 26.7.4."""
    angle = math.atan2(abs(t), math.sqrt(df))
    odd = df % 2 == 1
    term = total = math.cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, df - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    bracket = math.sin(angle) * total if df > 1 else 0.0
    return min(max(1.0 - (2 / math.pi * (angle + bracket) if odd else bracket), 0.0), 1.0)


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, df: int) -> float:
    """The t between whose negative and itself lies that share: 0.95 and 10 give 2.228."""
    low, high = 0.0, 1.0
    while two_sided_p(high, df) > 1 - confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > 1 - confidence else (low, middle)
    return high


class Estimate(NamedTuple):
    """A coefficient, its standard error (None: too few runs for one) and degrees of freedom."""

    value: float
    error: float | None
    df: int

    @property
    def p(self) -> float | None:
        if self.error is None:
            return None
        return two_sided_p(self.value / self.error if self.error else math.copysign(math.inf, self.value) if self.value else 0.0, self.df)

    def interval(self, alpha: float) -> tuple[float, float] | None:
        if self.error is None:
            return None
        reach = t_quantile(1 - alpha, self.df) * self.error
        return self.value - reach, self.value + reach


def arm_effect(values: Sequence[float], of_b: Sequence[bool], when: Sequence[float], drift: bool = True) -> Estimate:
    """How much more the runs of b have than those of a, by least squares, with a drift over `when` taken out. There must be a run of each."""
    terms, column, _ = design(tuple(map(float, of_b)), tuple(when), drift)
    return _estimate(values, column, terms)


def drift_terms(values: Sequence[float], of_b: Sequence[bool], when: Sequence[float]) -> tuple[list[Estimate], float]:
    """The line and the bend of the drift with the arm taken out, and how far apart they make two runs at most."""
    terms, _, others = design(tuple(map(float, of_b)), tuple(when), True)
    found = [_estimate(values, free, rest) for free, rest in others]
    curve = [sum(part) for part in zip(*([one.value * at for at in term] for one, term in zip(found, terms[1:], strict=True)), strict=True)]
    return found, max(curve, default=0.0) - min(curve, default=0.0)


def _estimate(values: Sequence[float], column: Column, others: Sequence[Column]) -> Estimate:
    """The coefficient of a column that is free of the others (Frisch, Waugh and Lovell)."""
    free, weight, df = free_of(tuple(values), others), dot(column, column), len(values) - len(others) - 1
    value = dot(column, free) / weight
    left = sum((y - value * x) ** 2 for x, y in zip(column, free, strict=True))
    return Estimate(value, math.sqrt(left / df / weight) if df > 0 else None, df)


@lru_cache(maxsize=256)
def design(of_b: Column, when: Column, drift: bool) -> tuple[tuple[Column, ...], Column, list[tuple[Column, tuple[Column, ...]]]]:
    """The terms of the drift, the arm free of them, and each term but the constant free of all else, with that."""
    terms = _terms(when, drift)
    arm = free_of(of_b, terms)
    if dot(arm, arm) < 1e-9:  # the arm is nothing but an early or late time
        terms = _terms(when, False)
        arm = free_of(of_b, terms)
    alone = []
    for term in terms[1:]:
        others = tuple(other for other in terms if other is not term)
        others = (*others, free_of(of_b, others))
        alone.append((free_of(term, others), others))
    return terms, arm, alone


def _terms(when: Column, drift: bool) -> tuple[Column, ...]:
    """A constant, a line and a bend over time, each free of those before it; with few runs or one time, fewer of them."""
    terms: tuple[Column, ...] = ((1.0,) * len(when),)
    middle = fmean(when)
    for power in range(1, 1 + (min(2, (len(when) - 2) // 3, len(set(when)) - 1) if drift else 0)):
        terms = (*terms, free_of(tuple((at - middle) ** power for at in when), terms))
    return terms


def free_of(column: Column, others: Sequence[Column]) -> Column:
    """What is left of a column when columns that have nothing in common are taken out."""
    for other in others:
        share = dot(column, other) / dot(other, other)
        column = tuple(x - share * y for x, y in zip(column, other, strict=True))
    return column


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


class Deleted(NamedTuple):
    """A run's distance from the fit to all other runs, plain and in standard errors (Student's t)."""

    apart: float
    t: float


def deleted_residuals(values: Sequence[float], of_b: Sequence[bool], when: Sequence[float], drift: bool = True) -> tuple[list[Deleted], int]:
    """Return how far each run lies from the fit to all other runs, and the degrees of freedom of t (n - terms - 2).

    With residual r and leverage h of the fit to all runs: apart = r / (1 - h), t = r / sqrt(s^2 (1 - h)), s^2 = (SSE - r^2 / (1 - h)) / df. A run
    that decides a coefficient alone (h = 1) has 0. Where the others have no scatter, a run off their line has an infinite t."""
    terms, arm, _ = design(tuple(map(float, of_b)), tuple(when), drift)
    columns = (*terms, arm)
    left, df = free_of(tuple(values), columns), len(values) - len(columns) - 1
    weights = [dot(column, column) for column in columns]
    free = [1 - sum(column[at] ** 2 / weight for column, weight in zip(columns, weights, strict=True)) for at in range(len(values))]
    least = 1e-9 * max(map(abs, values), default=0.0)  # what rounding leaves
    squares = dot(left, left)
    return [_deleted(r if abs(r) > least else 0.0, share, squares, df) for r, share in zip(left, free, strict=True)], df


def _deleted(residual: float, free: float, squares: float, df: int) -> Deleted:
    if free < 1e-9 or df < 1 or not residual:
        return Deleted(0.0, 0.0)
    variance = (squares - residual * residual / free) / df
    t = residual / math.sqrt(variance * free) if variance > 1e-12 * squares else math.copysign(math.inf, residual)
    return Deleted(residual / free, t)
