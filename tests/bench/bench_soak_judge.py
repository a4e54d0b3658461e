"""What a soak is judged by: whether a figure stays flat, whether every request has its line, whether log, sidecar and
engine agree. Pure.

A leak is a slope that lasts. After the warm-up the slope is Theil and Sen's, the median of the slopes between all pairs
of samples: up to 29 % of them may lie anywhere (a burst, a pause) and it does not move. Beside it the median of the
last third is held against that of the first."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from exporters.accounting.reconciled import KINDS
from exporters.catalogue import reconciled as books
from exporters.catalogue.exposition_parser import Exposition
from exporters.requests.record import RequestRecord

_WARM_UP, _WARM_UP_S = 0.25, 60.0  # of a process's life, and at least this long
PAIRS_AT_MOST = 400  # samples, thinned out evenly beyond that: 80,000 pairs


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure may grow by over the time in which it is judged: a share of its median and so much beside it."""

    share: float
    more: float

    def allowed(self, median: float) -> float:
        return self.share * median + self.more


# 1.5 MiB: the ids of an hour's requests are remembered, and an allocator keeps what a burst took. Threads: a loop's
# pool has up to four threads more than there are cores, and makes one only when all others are busy, which may be late.
# Tasks: a gateway's swing with
# what is under way.
BOUNDS = {
    "memory, MiB": Bound(0.03, 1.5),
    "descriptors": Bound(0.0, 3.0),
    "threads": Bound(0.0, 3.0),
    "tasks": Bound(0.1, 3.0),
}


@dataclass(frozen=True, slots=True)
class Flat:
    """A figure over time. growth: by its slope over the judged time; later: the median of the last third less that of
    the first."""

    median: float
    per_hour: float
    growth: float
    later: float
    allowed: float

    @property
    def well(self) -> bool:
        return self.growth <= self.allowed and self.later <= self.allowed


def warm_up_s(lasted_s: float) -> float:
    """How much of a life is not judged: pools fill, and what is shown of the past has no past yet."""
    return max(_WARM_UP_S, _WARM_UP * lasted_s)


def flat(samples: Sequence[tuple[float, float]], bound: Bound) -> Flat | None:
    """(second, value) of one life of a process; None where hardly anything is left after the warm-up."""
    if not samples:
        return None
    began, ended = samples[0][0], samples[-1][0]
    judged = [one for one in samples if one[0] >= began + warm_up_s(ended - began)]
    if len(judged) < 9:
        return None
    values = [value for _, value in judged]
    third = len(values) // 3
    median, slope = statistics.median(values), theil_sen(judged)
    growth = slope * (judged[-1][0] - judged[0][0])
    return Flat(
        median,
        slope * 3600,
        growth,
        statistics.median(values[-third:]) - statistics.median(values[:third]),
        bound.allowed(median),
    )


def theil_sen(samples: Sequence[tuple[float, float]]) -> float:
    """Growth per second: the median over all pairs. Source: Sen, JASA 63 (1968) 1379."""
    thinned = samples[:: max(1, -(-len(samples) // PAIRS_AT_MOST))]
    return statistics.median((b - a) / (t - s) for (s, a), (t, b) in combinations(thinned, 2) if t > s)


@dataclass(frozen=True, slots=True)
class Accounts:
    """Every request against its lines. lost: sent and in no line; twice: in several; strange: lines of requests that
    the load did not send."""

    sent: int
    lines: int
    lost: tuple[str, ...]
    twice: tuple[str, ...]
    strange: int

    @property
    def well(self) -> bool:
        return not self.lost and not self.twice


def accounts(sent: Iterable[str], records: Iterable[RequestRecord]) -> Accounts:
    ids = list(sent)
    known, lines = set(ids), Counter(record.request_id for record in records)
    lost = tuple(one for one in ids if not lines[one])
    twice = tuple(one for one, count in lines.items() if count > 1)
    return Accounts(
        len(ids), lines.total(), lost, twice, sum(count for one, count in lines.items() if one not in known)
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict. allowed: what would have been well."""

    what: str
    found: str
    allowed: str
    well: bool


def equal(what: str, found: float, wanted: float, of: str) -> Check:
    return Check(what, f"{found:,.0f}", f"{wanted:,.0f}, {of}", round(found) == round(wanted))


def in_the_log(records: Sequence[RequestRecord]) -> dict[str, int]:
    """What the sidecar ought to have counted."""
    return {
        "requests": len(records),
        "prompt": sum(record.prompt_tokens or 0 for record in records),
        "completion": sum(record.completion_tokens or 0 for record in records),
    }


def reconciled(shown: Exposition, hang_ups: int) -> list[Check]:
    """logged + missing_in_log - extra_in_log + open = engine, for each kind; what is booked as missing is explained by
    clients who left at the last moment."""
    checks = []
    for kind in KINDS:
        parts = (books.LOGGED, books.ENGINE, books.MISSING_IN_LOG, books.EXTRA_IN_LOG, books.OPEN)
        logged, engine, missing_in_log, extra_in_log, open_ = (
            shown.total(metric.name, kind=kind) or 0.0 for metric in parts
        )
        told = (
            f"{logged:,.0f} logged + {missing_in_log:,.0f} missing_in_log - {extra_in_log:,.0f} extra_in_log +"
            f" {open_:,.0f} open"
        )
        adds_up = logged + missing_in_log - extra_in_log + open_ == engine
        checks.append(
            Check(f"engine = log, {kind}", told, f"{engine:,.0f}, the engine's; open 0", adds_up and not open_)
        )
    missing_in_log, extra_in_log = (
        shown.total(metric.name, kind="requests") or 0.0 for metric in (books.MISSING_IN_LOG, books.EXTRA_IN_LOG)
    )
    most = f"at most {hang_ups:,}, those whose client left"
    checks.append(Check("finished and not logged", f"{missing_in_log:,.0f} requests", most, missing_in_log <= hang_ups))
    checks.append(Check("logged and not finished", f"{extra_in_log:,.0f} requests", "0", extra_in_log == 0))
    return checks


def left_firing(firing: Iterable[str], expected: Mapping[str, str]) -> Check:
    """expected: alert -> why what was done here may well keep it firing."""
    unexpected = sorted(set(firing) - expected.keys())
    return Check(
        "alerts left firing", ", ".join(unexpected) or "none", "none but those that were asked for", not unexpected
    )
