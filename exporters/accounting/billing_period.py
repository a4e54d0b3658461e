"""Billing periods: months and days of the calendar in a time zone, cut at midnight and where prices change.

Invariant: the segments of a period follow each other without gap or overlap, so days sum to the period."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

from exporters.accounting.prices import Prices, PriceVersion, moment_s

_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


@dataclass(frozen=True, slots=True)
class BillingPeriod:
    """Time from from_s to before to_s, in unix seconds. month: like 2026-10, where it is one."""

    from_s: float
    to_s: float
    timezone: str = "UTC"
    month: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.from_s) and math.isfinite(self.to_s) and self.from_s < self.to_s):
            raise ValueError(f"the period ends ({self.show(self.to_s)}) before it starts ({self.show(self.from_s)})")

    @property
    def length_s(self) -> float:
        return self.to_s - self.from_s

    def show(self, moment: float) -> str:
        """Return a moment in RFC 3339, with the zone's offset at that time."""
        return datetime.fromtimestamp(moment, load_zone(self.timezone)).isoformat()

    def whole(self) -> BillingPeriod:
        """Return the whole month of a month that is not over; any other period as it is."""
        return month_period(self.month, self.timezone) if self.month else self

    def until(self, now_s: float) -> BillingPeriod:
        """Return the part of the period that is over. Raises ValueError if none is."""
        if now_s <= self.from_s:
            raise ValueError(f"the period starts at {self.show(self.from_s)}, which is in the future")
        return BillingPeriod(self.from_s, min(self.to_s, now_s), self.timezone, self.month)


@dataclass(frozen=True, slots=True)
class PriceSegment:
    """Part of one calendar day with one version of the prices; None without prices."""

    from_s: float
    to_s: float
    version: PriceVersion | None = None

    @property
    def prices(self) -> Prices | None:
        return self.version.prices if self.version else None


def load_zone(name: str) -> tzinfo:
    """Return a time zone by its IANA name. Raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise ValueError(
            f"time zone {name!r} is unknown here; write it like Europe/Berlin (names are those of the tzdata package)"
        ) from None


def month_period(text: str, timezone: str) -> BillingPeriod:
    """Return the calendar month of a text such as 2026-10. Raises ValueError."""
    if not (found := _MONTH.fullmatch(text)):
        raise ValueError(f"{text!r} is no month; write it like 2026-10")
    zone, year, month = load_zone(timezone), int(found[1]), int(found[2])
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    start, end = (datetime(*each, 1, tzinfo=zone).timestamp() for each in ((year, month), following))
    return BillingPeriod(start, end, timezone, text)


def calendar_period(from_text: str, to_text: str | None, timezone: str, now_s: float) -> BillingPeriod:
    """Return the period between two dates or times of the zone; the end is exclusive, by default now.

    Raises ValueError."""
    zone = load_zone(timezone)
    end = now_s if to_text is None else moment_s(to_text, zone)
    return BillingPeriod(moment_s(from_text, zone), end, timezone)


def midnights(period: BillingPeriod) -> Iterator[float]:
    """Yield the starts of the zone's days within the period; a day has 23 or 25 hours when clocks change."""
    zone = load_zone(period.timezone)
    day = datetime.fromtimestamp(period.from_s, zone).date()
    while True:
        day += timedelta(days=1)
        at_s = datetime.combine(day, time(), zone).timestamp()
        if at_s >= period.to_s:
            return
        if at_s > period.from_s:
            yield at_s


def segments(period: BillingPeriod, prices: Prices | None = None) -> list[PriceSegment]:
    """Return the segments of a period: its days, cut where prices change."""
    versions: Sequence[PriceVersion] = prices.versions() if prices else ()
    cuts = {each.from_s for each in versions if period.from_s < each.from_s < period.to_s}
    edges = [period.from_s, *sorted({*midnights(period), *cuts}), period.to_s]
    return [
        PriceSegment(start, end, next((each for each in reversed(versions) if each.from_s <= start), None))
        for start, end in itertools.pairwise(edges)
    ]
