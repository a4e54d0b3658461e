"""Months and days of a calendar, in zones whose clocks change, cut where prices change."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.accounting.billing_period import BillingPeriod, calendar_period, midnights, month_period, segments
from exporters.accounting.prices import PriceChange, Prices

PRICES = Prices(gpu_hour=2.0, timezone="Europe/Berlin", changes=(PriceChange("2026-10-16T12:00", gpu_hour=3.0),))


@pytest.mark.parametrize(
    ("month", "zone", "hours"),
    [
        ("2026-10", "Europe/Berlin", 31 * 24 + 1), ("2026-03", "Europe/Berlin", 31 * 24 - 1),
        ("2026-11", "America/New_York", 30 * 24 + 1), ("2026-12", "Asia/Kolkata", 31 * 24),
        ("2028-02", "UTC", 29 * 24),
    ],
)  # fmt: skip
def test_months_have_the_hours_of_their_zone(month, zone, hours):
    assert hours * 3600 == month_period(month, zone).length_s


def test_a_month_starts_at_local_midnight():
    period = month_period("2026-10", "Europe/Berlin")
    assert ("2026-10-01T00:00:00+02:00", "2026-11-01T00:00:00+01:00") == (
        period.show(period.from_s),
        period.show(period.to_s),
    )


def test_days_start_at_midnight_also_where_it_is_skipped():
    """In Cairo clocks went from 00:00 to 01:00 on 2025-04-25."""
    found = list(midnights(month_period("2025-04", "Africa/Cairo")))
    assert [86_400.0] * 23 + [82_800.0] + [86_400.0] * 4 == [
        after - before for before, after in itertools.pairwise(found)
    ]
    assert 23 * 3600 == calendar_period("2025-04-25", "2025-04-26", "Africa/Cairo", 0).length_s


def test_a_price_change_cuts_a_day():
    cut = segments(calendar_period("2026-10-16", "2026-10-17", "Europe/Berlin", 0), PRICES)
    assert [(12.0, 2.0), (12.0, 3.0)] == [((each.to_s - each.from_s) / 3600, each.prices.gpu_hour) for each in cut]


@given(
    st.integers(1_600_000_000, 1_900_000_000),
    st.integers(1, 100 * 86_400),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]),
)
def test_segments_follow_each_other(start, length, zone):
    period = BillingPeriod(start, start + length, zone)
    cut = segments(period, PRICES)
    assert (period.from_s, period.to_s) == (cut[0].from_s, cut[-1].to_s)
    assert all(one.to_s == other.from_s for one, other in itertools.pairwise(cut))
    assert all(0 < each.to_s - each.from_s <= 25 * 3600 for each in cut)


def test_a_running_month_ends_now():
    period = month_period("2026-10", "UTC")
    assert period.from_s + 60 == period.until(period.from_s + 60).to_s
    assert period == period.until(period.to_s + 60)
    with pytest.raises(ValueError, match="in the future"):
        period.until(period.from_s)
