"""Cost of a data set, as DuckDB sums it, beside the cost of the same records one by one."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from exporters.accounting import cost, cost_from_data
from exporters.accounting.billing_period import BillingPeriod
from exporters.accounting.cost_from_log import from_log
from exporters.accounting.prices import PriceChange, Prices
from exporters.requests.record import RequestRecord, to_line
from stack.request_source import data_cost
from tests.support.request_dataset import START_S, made_requests, make_dataset

DAY_S = 86_400.0
PRICES = Prices(gpu_hour=3.6, currency="EUR", changes=(PriceChange("2025-11-25T13:37:00", gpu_hour=2.0),))


def long_requests(seed: int) -> list[RequestRecord]:
    """Records over three days, some of which ran for most of a day, or for no time at all."""
    rng, found = random.Random(seed), []
    for one in made_requests(400, seed, step_s=650.0):
        if one.e2e_ms is not None and rng.random() < 0.3:
            one = msgspec.structs.replace(one, e2e_ms=rng.choice((0.0, 5.5, rng.uniform(0, 8e7), 8e7)))
        found.append(msgspec.structs.replace(one, team=rng.choice((one.team, "", f"t{rng.randrange(50)}"))))
    untimed = [msgspec.structs.replace(one, request_id=f"u{one.request_id}", ts=None) for one in found[:9]]
    return found + untimed


def both(folder: Path, records: list[RequestRecord], period: BillingPeriod | None) -> tuple[cost.SourceTotals, ...]:
    log = folder / "requests.jsonl"
    log.write_bytes(b"".join(map(to_line, records)))
    make_dataset(folder / "data", records)
    times = (period.from_s, period.to_s) if period else (None, None)
    data = data_cost(str(folder / "data"), *times)
    return tuple(from_log(source, period, PRICES, {"": 2.0}) for source in ([log], data))


PERIODS = [
    None,
    BillingPeriod(START_S, START_S + 4 * DAY_S),
    BillingPeriod(START_S + 40_000.123, START_S + 2 * DAY_S + 0.5, "Asia/Kathmandu"),
    BillingPeriod(START_S + DAY_S, START_S + DAY_S + 1800, "America/New_York"),
]


@pytest.mark.parametrize(("seed", "period"), list(enumerate(PERIODS)), ids=str)
def test_equal_to_the_log(tmp_path: Path, period: BillingPeriod | None, seed: int):
    one, other = both(tmp_path, long_requests(seed), period)
    assert one.period == other.period
    assert one.parts.keys() == other.parts.keys()
    for part, uses in one.parts.items():
        assert uses.keys() == other.parts[part].keys()
        for key, use in uses.items():
            for name in cost.TeamUse.__slots__:
                theirs = getattr(other.parts[part][key], name)
                assert getattr(use, name) == pytest.approx(theirs, rel=1e-9, abs=1e-4), (part, key, name)
    if period is None:
        assert any("without ts or e2e_ms" in note for note in other.notes)
        assert one.notes == other.notes


def test_names_that_need_wide_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As with a million teams: 64 bits cannot hold model, moment and team."""
    monkeypatch.setattr(cost_from_data, "_BIGINT_BITS", 1)
    one, other = both(tmp_path, long_requests(7), PERIODS[1])
    assert one.uses.keys() == other.uses.keys()
    for key, use in one.uses.items():
        assert use.seconds == pytest.approx(other.uses[key].seconds, rel=1e-9, abs=1e-4)


def test_a_data_set_without_a_time(tmp_path: Path):
    make_dataset(tmp_path, [RequestRecord(request_id="1", team="a", model="m")])
    with pytest.raises(ValueError, match=r"\(ts and e2e_ms\)"):
        from_log(data_cost(str(tmp_path)))
