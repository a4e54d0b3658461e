"""What stands in a query when it is sent: intervals as Grafana rounds them, and values that cannot leave the string
they stand in.

The rounding table and the rate interval are those of Grafana's rangeutil.ts (roundInterval) and of its Prometheus data
source (calculateRateInterval); the escaping is that of prometheusSpecialRegexEscape, and closes the gap that it leaves
open for double quotes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboards.interpolate import ALL, MAX_POINTS, Range, fill
from exporters.catalogue import promql_ast

HOUR = Range(1_750_000_000, 1_750_003_600)


def of(seconds: float, points: int = 1, scrape_s: float = 0.001) -> Range:
    return Range(0, seconds, points, scrape_s)


@pytest.mark.parametrize(
    ("step_s", "seconds"),
    [
        (0.001, 0.009),
        (0.01, 0.01),
        (0.01, 0.0149),
        (0.02, 0.015),
        (0.05, 0.035),
        (0.1, 0.075),
        (0.2, 0.15),
        (0.5, 0.35),
        (1, 0.75),
        (1, 1.4),
        (2, 1.5),
        (5, 3.5),
        (10, 7.5),
        (15, 12.5),
        (20, 17.5),
        (30, 25),
        (30, 44.9),
        (60, 45),
        (120, 90),
        (300, 210),
        (600, 450),
        (900, 750),
        (1200, 1050),
        (1800, 1500),
        (3600, 2700),
        (7200, 5400),
        (10800, 9000),
        (21600, 16200),
        (43200, 32400),
        (86400, 86400),
        (604800, 604800),
        (2592000, 1814400),
        (31536000, 3628800),
    ],
)
def test_a_step_is_one_of_grafanas_round_figures(step_s, seconds):
    """A value at a limit belongs to the next figure."""
    assert step_s == of(seconds).step_s


@pytest.mark.parametrize(
    ("step_s", "rate_s", "range_s", "scrape_s"),
    [
        (15, 60, 300, 15),
        (15, 60, 3600, 15),
        (30, 120, 3600, 30),
        (120, 135, 86400, 15),
        (120, 150, 86400, 30),
        (60, 240, 3600, 60),
        (900, 915, 7 * 86400, 15),
        (5, 20, 900, 5),
    ],
)
def test_a_rate_sees_four_scrapes_and_a_step_more_than_its_own(step_s, rate_s, range_s, scrape_s):
    """$__rate_interval = max($__interval + scrape interval, 4 x scrape interval)."""
    over = Range(0, range_s, 600, scrape_s)
    assert (step_s, rate_s) == (over.step_s, over.rate_s)


@settings(deadline=None)
@given(
    st.floats(min_value=1, max_value=4e8),
    st.integers(min_value=1, max_value=100_000),
    st.sampled_from([1.0, 5.0, 15.0, 30.0, 60.0]),
)
def test_no_query_asks_for_more_points_than_prometheus_gives(seconds, points, scrape_s):
    over = of(seconds, points, scrape_s)
    assert over.step_s >= scrape_s
    assert over.seconds / over.step_s <= MAX_POINTS * (1 + 1e-9)
    assert over.rate_s >= 4 * scrape_s


def test_a_range_ends_after_it_starts():
    with pytest.raises(ValueError, match="time range"):
        Range(5, 5)


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        ("rate(x[60s])", "rate(x[$__rate_interval])"),
        ("rate(x[60s])", "rate(x[${__rate_interval}])"),
        ("max_over_time(x[15s])", "max_over_time(x[$__interval])"),
        ("increase(x[3600s]) / 3600 * 15000", "increase(x[$__range]) / $__range_s * $__interval_ms"),
        ("x / 3600000", "x / $__range_ms"),
        ('label_replace(x, "a", "$1-${2}", "b", "(.*)-(.*)")', 'label_replace(x, "a", "$1-${2}", "b", "(.*)-(.*)")'),
        ("x * 2.5", "x * $price"),
        ("x offset 1h", "x offset ${back}"),
    ],
)
def test_variables_of_grafana_and_plain_ones_are_filled_in(sent, held):
    assert sent == fill(held, {"price": "2.5", "back": "1h"}, HOUR)


def test_half_a_second_is_written_in_milliseconds():
    assert "rate(x[2s])" == fill("rate(x[$__rate_interval])", {}, of(300, 600, 0.5))
    assert "x[500ms]" == fill("x[$__interval]", {}, of(300, 600, 0.5))


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        (".*", [ALL]),
        (".*", ["a", ALL]),
        ("vllm-0", ["vllm-0"]),
        ("(a|b)", ["a", "b"]),
        (r"10\\.0\\.0\\.1:8000", ["10.0.0.1:8000"]),
        (r"(Qwen/Qwen3-8B|a\\+b)", ["Qwen/Qwen3-8B", "a+b"]),
        (r"\\$\\^\\*\\{\\}\\[\\]\\'\\+\\?\\.\\(\\)\\|", ["$^*{}[]'+?.()|"]),
        (r"a\\\\b", ["a\\b"]),
        (r"a\"b", ['a"b']),
        (r"a\nb", ["a\nb"]),
    ],
)
def test_what_is_chosen_becomes_a_regex_that_matches_just_that(pattern, chosen):
    assert f'x{{a=~"{pattern}"}}' == fill('x{a=~"$a"}', {"a": chosen}, HOUR)


HOSTILE = [
    'x"} or vector(1) #', "\\", '\\"', '\\\\"} or up #', "a|b", ".*", "$1", "$team", "${team}", "]", "}\n", "'", "`",
    "ü", '"', "(", ")",
]  # fmt: skip


def matcher_of(text: str) -> str:
    """The pattern of the one matcher in a query, as Prometheus would read it. Fails when the query is anything else."""
    ((name, matchers),) = promql_ast.selectors(text)
    ((label, op, pattern),) = matchers
    assert ("x", "team", "=~") == (name, label, op)
    return pattern


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_hostile_value_matches_itself_alone(value):
    """A hostile value stays in its string and matches itself alone."""
    pattern = matcher_of(fill('sum(x{team=~"$team"})', {"team": [value]}, HOUR))
    assert re.fullmatch(pattern, value)
    assert not re.fullmatch(pattern, value + "x")
    both = matcher_of(fill('sum(x{team=~"$team"})', {"team": [value, "other"]}, HOUR))
    assert re.fullmatch(both, value)
    assert re.fullmatch(both, "other")
    assert not re.fullmatch(both, "neither")


# promql_parser reads no surrogates, and Prometheus none either: label values are UTF-8.
@settings(deadline=None)  # the first parse on a loaded machine takes its time
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=1, max_size=3))
def test_any_label_value_survives_the_way_into_a_query_and_back(values):
    pattern = matcher_of(fill('x{team=~"$team"}', {"team": values}, HOUR))
    assert all(re.fullmatch(pattern, value) for value in values) or ALL in values


def test_value_like_a_variable_is_not_filled_again():
    """A value that looks like a variable is not filled in again."""
    assert r'x{team=~"\\$secret"}' == fill('x{team=~"$team"}', {"team": ["$secret"], "secret": ["s"]}, HOUR)


@pytest.mark.parametrize(
    "value",
    [
        "1h] or up[1h",
        "1 or vector(1)",
        'a"',
        "1)",
        "$__all",
        "a b",
        "1\n",
        "{}",
        "up",
        "",
        "x1",
        "1x",
        "inf",
        "1e9",
        ".5",
        "1.",
        "1.2.3",
        "0x10",
        "\u0663",
        "\uff12",
        "1\u0663",
        "-1",
    ],
)
def test_single_value_is_a_number_or_a_duration(value):
    """It would stand outside any string, where a word is a metric and Prometheus reads no digits but those of ASCII."""
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(value))} .* back\b"):
        fill("x offset $back", {"back": value}, HOUR)


def test_variable_without_a_value_is_an_error():
    """A variable without a value is an error and not an empty place."""
    with pytest.raises(KeyError, match="model"):
        fill('x{a=~"$model"}', {}, HOUR)
