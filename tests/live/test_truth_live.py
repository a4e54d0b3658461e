"""Percentiles by PromQL beside those of the request log, on a real vLLM: what `make bench-truth` does, in short."""

from __future__ import annotations

import os

import pytest

from exporters.native_histogram import SCHEMA
from tests.support.engines import Engines
from tests.support.truth_scene import (
    NATIVE,
    Answer,
    OpenAI,
    Row,
    Scene,
    Shape,
    measured,
    percentile,
    summary,
    table,
    team_of,
    written,
)

SHAPES = (Shape("short", 64, 24, 6), Shape("bursts", 64, 24, 40, every_s=2.0))
REQUESTS = 51  # no rank of a quantile is near a whole number
WIDTH = 2 ** (1 / 2**SCHEMA) - 1  # of a native bucket: no estimate in it can be further off


@pytest.mark.engine
def test_quantiles_agree_with_the_request_log(real_engines: Engines, part, tmp_path):
    engine = real_engines.shared().up()
    client = OpenAI()
    runs = [(client, shape, team_of(client, shape)) for shape in SHAPES]
    programs = {name: part(name).path for name in ("prometheus", "model")}
    core = max(os.sched_getaffinity(0))
    with Scene.running(
        tmp_path, engine.spec.address, {team: shape for _, shape, team in runs}, programs, core
    ) as scene:
        rows = list(measured(scene, runs, REQUESTS))
    told = f"{summary(rows)}\n\n{table(rows)}"
    assert 30 == len(rows), told
    assert [] == [row for row in rows if row.native.misses(row.log_ms, WIDTH)], told
    assert [] == [fault for row in rows for fault in row.faults if ": native" not in fault], told
    assert any(row.native.ms > 50 for row in rows), "where 2 % is more than what is near enough in any case"


# ---- the comparison itself

SMALL = {"native": Answer(1.4), "classic": Answer(1.0, "<"), "client_ms": None}


def row(**changed: object) -> Row:
    values: dict[str, object] = {
        "client": "c", "shape": "s", "time": "TTFT", "q": 0.95, "log_ms": 100.0, "below_ms": 99.0,
        "native": Answer(101.0), "classic": Answer(109.0),
        "coarse": Answer(150.0), "client_ms": 104.0, "added_ms": (1.0, 5.0),
    }  # fmt: skip
    return Row(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"native": Answer(102.1)}, ["c, s, TTFT p95: native 102.1 ms, the log 100 ms"]),
        ({"classic": Answer(89.9)}, ["c, s, TTFT p95: fine ladder 89.9 ms, the log 100 ms"]),
        ({**SMALL, "log_ms": 0.5}, []),
        ({**SMALL, "log_ms": 1.5}, ["c, s, TTFT p95: fine ladder < 1 ms, the log 1.5 ms"]),
        (
            {"client_ms": 109.0},
            ["c, s, TTFT p95: the client says 109 ms, PromQL 101 ms, and what the client adds is 1 to 5 ms"],
        ),
        ({"client_ms": 109.0, "added_ms": None}, []),
        (
            {"client_ms": 98.6},
            ["c, s, TTFT p95: the client says 98.6 ms, PromQL 101 ms, and what the client adds is 1 to 5 ms"],
        ),
        ({"client_ms": 98.6, "below_ms": 97.0}, []),
    ],
)
def test_what_is_beyond_its_limit_is_named(changed, expected):
    assert expected == list(row(**changed).faults)


def test_a_percentile_is_an_observation():
    assert [2, 4, 4] == [percentile([4, 1, 3, 2], q) for q in (0.5, 0.95, 0.99)]


def test_only_the_measured_block_of_the_page_is_written_anew():
    rows = [
        row(time=name, q=q)
        for name in ("TTFT", "TPOT", "end to end", "gateway queue", "engine queue")
        for q in (0.5, 0.95, 0.99)
    ]
    page = written("before <!-- measured: truth -->former<!-- end --> after", rows, "told")
    assert page.startswith("before <!-- measured: truth -->\ntold\n")
    assert page.endswith("<!-- end --> after")
    assert "100 / 101 / 109 / 150 / 104" in page
    assert "former" not in page
    assert page == written(page, rows, "told")
    assert NATIVE < WIDTH
