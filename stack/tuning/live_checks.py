"""Checks of live traffic: what may be mistaken for an effect of a change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from exporters.requests.record import timestamp
from stack.tuning.comparison import MOST_APART, Check, length_distance
from stack.tuning.samples import RequestSample, SampleLog
from stack.tuning.series import BLOCK_S, LEAST_REQUESTS, Placed, SamplesByBlock, by_prompt

MOST_LOAD = 1.25  # times as many requests that are not blamed
LEAST_COMPARED = 0.8  # of the traffic that should be in strata of both sides
LEAST_SHARED = 0.9  # of the blocks in which both variants should have traffic


def left_out(log: SampleLog) -> list[str]:
    """Word what a log holds that no comparison can use."""
    said = []
    if log.untimed:
        said.append(f"{log.untimed:,} records without ts are left out")
    said += log.report.notes
    if log.share < 1:
        said.append(f"the log is large: one request in {1 / log.share:g} was looked at, drawn by lot")
    return said


def baseline(count: int, period: str) -> Check:
    if not count:
        what = (
            "the log holds no such hours of a day or week before: a straight line through both sides stands in for the "
            "course of the day, and a bend in it is taken for an effect"
        )
        return Check("baseline", False, what)
    same = "the same hours of the week" if period == "week" else "the same hours of the day, on other days of the week"
    than = f"{count} {period}{'s' if count > 1 else ''} before, and the hours right before the event"
    rest = "; a course of its own that this day took after the event is taken for an effect"
    return Check("baseline", True, f"held against {same}, {than}{rest}")


def other_events(others: Sequence[float], event_at_s: float, marks: Sequence[float], reach_s: float) -> Check:
    elsewhere = (at for at in others if abs(at - event_at_s) > 1)
    inside = sorted(at for at in elsewhere if any(abs(at - mark) <= reach_s for mark in marks))
    if inside:
        what = f"{len(inside)} other events lie in the hours compared, the first at {timestamp(inside[0])}"
        return Check("other events", False, what)
    return Check("other events", True, "no other event is known in the hours compared")


def mix(a: Sequence[RequestSample], b: Sequence[RequestSample], names: tuple[str, str]) -> list[Check]:
    """Compare prompt lengths (Kolmogorov and Smirnov) and the shares of teams and models.

    Strata take both out, as far as they go."""
    first, second = ([sample.prompt_tokens for sample in side if sample.prompt_tokens is not None] for side in (a, b))
    if first and second:
        apart, alike = length_distance(first, second)
        middle = f"{median(first):g} {names[0]} and {median(second):g} {names[1]}"
        differ = "are alike" if alike else "differ"
        mix = Check("mix", alike, f"prompts {differ} in length (median {middle}; distance {apart:.2f}, 0 is alike)")
    else:
        mix = Check("mix", False, "the log does not tell the lengths of prompts, so they may differ")
    shares = [Counter((sample.team, sample.model) for sample in side) for side in (a, b)]
    sizes = max(len(a), 1), max(len(b), 1)
    apart = sum(abs(shares[0][who] / sizes[0] - shares[1][who] / sizes[1]) for who in {*shares[0], *shares[1]}) / 2
    alike = apart <= MOST_APART + math.sqrt(1 / sizes[0] + 1 / sizes[1])
    kind = f"{'like' if alike else 'other'} shares of {names[0]} and {names[1]}"
    what = f"teams and models have {kind} (distance {apart:.2f}, 0 is alike)"
    return [mix, Check("teams", alike, what)]


def compared(placed: SamplesByBlock) -> Check:
    """Compute how much of the traffic is in strata that every side has."""
    strata = placed.strata(by_prompt).values()
    sizes = [placed.counts({at: list(minutes.values()) for at, minutes in places.items()}) for places in strata]
    share = sum(count.total() for count in sizes if min(count.values()) >= LEAST_REQUESTS) / len(placed.requests)
    like = "have their like (team, model, length of prompt) on every side"
    return Check(
        "compared", share >= LEAST_COMPARED, f"{share * 100:.0f} % of the requests {like}; the rest is left out"
    )


def load(load: float | None, of: str) -> Check:
    if load is None:
        return Check("load", False, "the log does not name engines, so the load on each may differ")
    return Check("load", 1 / MOST_LOAD <= load <= MOST_LOAD, f"{load:.2g} times as many requests {of}")


def same_time(variants: Sequence[Placed], names: tuple[str, str]) -> Check:
    first, second = ({position.block for position, _ in variant} for variant in variants)
    share = len(first & second) / len(first | second)
    blocks = f"{share * 100:.0f} % of the blocks of {BLOCK_S / 60:.0f} minutes"
    return Check("same time", share >= LEAST_SHARED, f"{names[0]} and {names[1]} both had traffic in {blocks}")


def steady(variants: Sequence[Placed], b: str) -> Check:
    """Check that b's share of the requests stays: by the hour, within ten points and what chance does."""
    hours = [Counter(position.block // 6 for position, _ in variant) for variant in variants]
    whole = len(variants[1]) / sum(map(len, variants))
    shares = []
    for hour in {*hours[0], *hours[1]}:
        count = hours[0][hour] + hours[1][hour]
        if count >= LEAST_REQUESTS:
            shares.append((hours[1][hour] / count, 3 * math.sqrt(whole * (1 - whole) / count)))
    steady = all(abs(share - whole) <= MOST_APART + chance for share, chance in shares)
    span = "not known by the hour"
    if shares:
        span = f"{min(shares)[0] * 100:.0f} to {max(shares)[0] * 100:.0f} % of an hour"
    return Check("steady share", steady, f"{b} got {whole * 100:.0f} % of the requests ({span})")
