"""The benchmark of the sidecar measures what it says; no timing is judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_sidecar import QUICK, TOLD, Bench, Told, engine_page, growth, lines_total, missed, mtail_requests, p99
from bench_sidecar_lines import Lines

from exporters.catalogue import exposition_parser
from exporters.requests.record import parse_block
from stack.lab import install

ROOT = Path(__file__).parents[2]


def bench(**found: list[float]) -> Bench:
    return Bench(QUICK, Path(), 0, 0, 0, None, found)


def test_a_quick_run_has_every_figure_and_every_line_is_counted(tmp_path):
    """A page that does not come to the lines that were written, or spans that do not arrive, end the run."""
    out = tmp_path / "figures.json"
    command = [sys.executable, "tests/bench/bench_sidecar.py", "--quick", "--json", out]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    told = json.loads(out.read_text())["found"]
    without = set() if install.find("mtail") else {"mtail", "mtail cpu"}
    assert (TOLD.keys() | growth(QUICK).keys()) - without == told.keys()
    assert all(len(values) == 1 and math.isfinite(values[0]) and values[0] >= 0 for values in told.values())
    assert bool(without) == ("left out: mtail" in done.stdout)


def test_a_short_soak_loses_nothing(tmp_path):
    out = subprocess.run(
        [sys.executable, "tests/bench/bench_sidecar.py", "--quick", "--soak", "30000"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "30,000 lines written, 30,000 counted" in out.stdout, out.stdout + out.stderr


def test_spans_in_numbers_all_arrive():
    out = subprocess.run(
        [sys.executable, "tests/bench/bench_sidecar.py", "--quick", "--spans", "5000"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert out.stdout.count("5,000 spans, "), out.stdout + out.stderr


def test_lines_are_records_of_all_rows_with_ids_of_their_own():
    lines = Lines(teams=3, models=2, count=60)
    records, bad = parse_block(lines.text(1) + lines.text(2))
    assert [] == bad
    assert 120 == len({record.request_id for record in records})
    assert 6 == len({(record.team, record.model) for record in records})
    assert 500 < len(lines.text(1)) / 60 < 650


def test_lines_can_have_ended_at_any_time():
    records, _ = parse_block(Lines(1, count=2).text(1, at_s=1_800_000_000.5))
    assert ["2027-01-15T08:00:00.500Z"] * 2 == [record.ts for record in records]


def test_engine_page_has_its_number_of_samples():
    """The page of an engine has as many samples as it is to have."""
    first, second = exposition_parser.parse(engine_page(5000)), exposition_parser.parse(engine_page(5000, grown=1))
    count = sum(len(rows) for rows in first.samples.values())
    assert 4500 < count < 5500
    assert all(
        second.total(name) > first.total(name)
        for name in ("vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count")
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"ingest": [300_000.0], "rss": [120.0]}, []),
        (
            {"ingest": [299_000.0, 310_000.0, 250_000.0]},
            ["ingest, lines/s is 299,000 (250,000 to 310,000), the limit 300,000"],
        ),
        ({"scrape p99": [15.1]}, ["scrape, p99 ms is 15.10 (15.10 to 15.10), the limit 15.00"]),
        ({"mtail": [1.0], "fresh p50": [1e9]}, []),
    ],
)
def test_a_missed_limit_is_named_and_what_has_none_is_not_judged(found: dict[str, Any], said: list[str]):
    assert said == missed(bench(**found))


def test_each_limit_looks_into_its_own_direction():
    """An aim is never easier than what must be."""
    limited = [told for told in TOLD.values() if told.must is not None and told.aim is not None]
    assert limited
    assert all((told.aim > told.must) == told.least for told in limited)
    assert isinstance(TOLD["ingest"], Told)


def test_99_of_100_are_below_p99_and_a_single_value_is_its_own():
    assert 100 == p99(list(range(1, 101)))
    assert 7 == p99([7])


def test_what_a_page_has_counted_is_read_off_it():
    assert 12 == lines_total(b"# HELP x\nvllm_watch_log_lines_total 12.0\nvllm_watch_log_lines_total_of_another 5\n")
    assert 0 == lines_total(b"")
    assert 5 == mtail_requests(
        b'requests{model="a",outcome="ok",prog="p",team="t"} 2\nrequests{model="b"} 3\nother{} 9\n'
    )
