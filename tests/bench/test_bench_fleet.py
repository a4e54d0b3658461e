"""The growth curve measures what it says; no timing is judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench_fleet import PLANS, QUICK, RAW, READ, RECORDED, Found, blocks, fit, kept, laws, p95, report
from bench_fleet_page import FAULTS, Pages, Size, lines, targets

from exporters.catalogue import exposition_parser, sidecar, vllm

ROOT = Path(__file__).parents[2]
SMALL = Size(engines=3, teams=4, models=2)


@pytest.mark.prometheus
def test_a_quick_run_has_every_figure(part, tmp_path):
    """Real promtool and Prometheus: a history is built, pages are scraped, rules are timed and every query of the
    boards is asked."""
    for name in ("prometheus", "promtool"):
        part(name)
    out = tmp_path / "found.json"
    command = [sys.executable, "tests/bench/bench_fleet.py", "--quick", "--json", out]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    found = kept(out)[QUICK.size.engines]
    assert QUICK == found.plan
    figures = [value for value in asdict(found).values() if isinstance(value, int | float)]
    assert all(math.isfinite(value) and value > 0 for value in figures), found
    assert {*RAW, RECORDED} == found.queries_ms.keys()
    assert found.series > len(lines(QUICK.size)), "all pages were scraped, and rules recorded"
    assert report([found]) in done.stdout


def test_fleet_has_its_pages_and_series():
    """A fleet has a page for each engine and series for each team and GPU."""
    every = lines(SMALL)
    assert {("vllm", f"vllm-{number}:8000") for number in range(3)} == {
        place for place in targets(every) if place[0] == "vllm"
    }
    assert Counter(f"team-{number}" for number in range(4)).keys() == {
        line.labels["team"] for line in every if line.name == sidecar.REQUESTS.name
    }
    assert {"model-0", "model-1"} == {
        line.labels["model_name"] for line in every if line.name == vllm.NUM_REQUESTS_RUNNING.name
    }
    assert {"uuid-0", "uuid-1", "uuid-2"} == {line.labels["uuid"] for line in every if "uuid" in line.labels}
    assert len(every) == len({(line.name, *sorted(line.labels.items())) for line in every}), "no series stands twice"


def test_a_fleet_grows_by_the_same_for_each_engine():
    four, five, six = (len(lines(replace(SMALL, engines=engines))) for engines in (4, 5, 6))
    assert 0 < six - five == five - four


def test_no_card_of_a_fleet_reports_errors():
    """Each would be an alert, and writing the texts of thousands takes longer than all rules together."""
    of_cards = [line for line in lines(SMALL) if line.name in FAULTS]
    assert FAULTS == {line.name for line in of_cards}
    assert {0.0} == {line.grows for line in of_cards}


def test_counters_of_a_page_grow_from_look_to_look():
    at = [1000.0]
    pages = Pages(Size(1, 1, 1), zero_s=1000.0, now=lambda: at[0])
    path = "/vllm/vllm-0:8000"
    first = exposition_parser.parse(pages.bodies[path].decode())
    at[0] += 5.0
    pages.refresh()
    second = exposition_parser.parse(pages.bodies[path].decode())
    assert (second.total(vllm.PROMPT_TOKENS.name) or 0) > (first.total(vllm.PROMPT_TOKENS.name) or 0) > 0
    assert first.total(vllm.NUM_REQUESTS_RUNNING.name) == second.total(vllm.NUM_REQUESTS_RUNNING.name)


def test_the_history_holds_what_rules_and_boards_read():
    assert {vllm.NUM_REQUESTS_RUNNING.name, sidecar.REQUESTS.name, f"{vllm.TIME_TO_FIRST_TOKEN.name}_bucket"} <= READ
    assert not {name for name in READ if "$" in name}


def test_blocks_end_where_those_of_prometheus_end():
    assert [(7000, 7200), (7200, 14400), (14400, 15000)] == list(blocks(7000, 15000))


def test_a_line_is_found_and_what_it_misses_is_said():
    law = fit([(0, 10.0), (10, 30.0), (20, 50.0)])
    assert (10.0, 2.0, 0.0) == (law.at_none, law.per_one, law.off)
    assert 20.0 == law.reaches(50.0)
    assert 0.0 < fit([(0, 0.0), (1, 2.0), (2, 2.0)]).off <= 0.5
    with pytest.raises(ValueError, match="two different places"):
        fit([(1, 1.0), (1, 2.0)])


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0], 1.0), ([float(number) for number in range(1, 101)], 95.0), ([3.0, 1.0, 2.0], 3.0)]
)
def test_the_95th_percentile_is_a_value_that_was_seen(values, expected):
    assert expected == p95(values)


def test_fleet_report_has_columns_and_fits():
    """The report has a column for each size and the lines through them."""
    every = [
        Found(
            plan,
            series=1000 * plan.size.engines,
            rss_mib=50.0 + plan.size.engines,
            queries_ms={"overview": [1.0, 2.0]},
            rules_worst="vllm-x",
        )
        for plan in PLANS
    ]
    told = report(every)
    assert told.startswith(
        "| engines x teams x models | 1 x 2 x 1 | 5 x 5 x 2 | 20 x 10 x 3 | 200 x 50 x 5 |\n|---|---:|---:|---:|---:|\n"
    )
    assert "RSS = 50.0 + 1.000 for each 1,000 series (MiB); off by 0% of the largest at most" in list(laws(every))


def test_what_was_found_is_read_again_as_it_was(tmp_path):
    found = Found(QUICK, series=7, queries_ms={"overview": [1.0]})
    (tmp_path / "found.json").write_text(json.dumps([asdict(found)]))
    assert {QUICK.size.engines: found} == kept(tmp_path / "found.json")
    assert {} == kept(tmp_path / "none.json") == kept(None)
