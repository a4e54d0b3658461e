"""Increase of counters from their samples: restarts, gaps, and series that begin."""

from __future__ import annotations

from exporters.accounting.counter_growth import CounterGrowth
from exporters.net.prometheus import QuerySeries

OWN = frozenset({"team"})


def line(team: str, *values: float, begin_s: float = 0.0, instance: str = "a") -> QuerySeries:
    points = [(begin_s + 300 * number, repr(value)) for number, value in enumerate(values)]
    return QuerySeries({"team": team, "instance": instance}, points)


def start(team: str, value: float, instance: str = "a") -> QuerySeries:
    return QuerySeries({"team": team, "instance": instance}, value=(0.0, repr(value)))


def grown(growth: CounterGrowth, *series: QuerySeries) -> dict[str, float]:
    return {labels["team"]: amount for labels, amount in growth.add(series)}


def test_adjacent_segments_share_a_sample():
    growth = CounterGrowth(OWN)
    growth.start([start("red", 10.0)])
    assert {"red": 5.0} == grown(growth, line("red", 10.0, 12.0, 15.0))
    assert {"red": 4.0} == grown(growth, line("red", 15.0, 19.0, begin_s=600.0))


def test_a_counter_that_falls_restarted():
    growth = CounterGrowth(OWN)
    growth.start([start("red", 10.0)])
    assert {"red": 2.0 + 3.0} == grown(growth, line("red", 10.0, 12.0, 1.0, 3.0))


def test_a_gap_is_bridged():
    """Whatever was counted while Prometheus did not look lands where it looks again."""
    growth = CounterGrowth(OWN)
    growth.start([start("red", 10.0)])
    assert {} == grown(growth)
    assert {"red": 40.0} == grown(growth, line("red", 50.0, begin_s=9000.0))


def test_a_team_that_joins_a_known_sidecar_counts_from_0():
    growth = CounterGrowth(OWN)
    growth.start([start("red", 10.0)])
    assert {"red": 1.0, "blue": 7.0} == grown(growth, line("red", 10.0, 11.0), line("blue", 2.0, 7.0, begin_s=300.0))


def test_a_sidecar_that_is_new_does_not():
    """Nobody knows when it counted what its first samples hold; a later series of it is new."""
    growth = CounterGrowth(OWN)
    found = grown(growth, line("red", 100.0, 101.0, instance="b"), line("blue", 3.0, 4.0, begin_s=300.0, instance="b"))
    assert {"red": 1.0, "blue": 4.0} == found
