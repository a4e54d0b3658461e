"""The benchmark of the gateway measures what it says and refuses what it cannot know; no timing is judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_gateway import COLUMNS, Bench, Contender, Sample, Sizes, judged
from bench_gateway_load import Shape, answers
from bench_gateway_stub import JSON_REPLY, events, reply

ROOT = Path(__file__).parents[2]
NOBODY: Any = None  # where a process would be
GATEWAY, FLOOR, DIRECT = (Contender(name, "", 0, NOBODY) for name in ("gateway", "floor", "direct"))


def sample(p50_ms: float = 1.0, load: float = 0.2, stub: float = 0.2, cpu_us: float = 1000.0) -> Sample:
    return Sample(
        p50_ms=p50_ms, p99_ms=2 * p50_ms, per_s=100.0, cpu_us=cpu_us, events=66, load_share=load, stub_share=stub
    )


def bench(**changed: tuple[Sample, Sample]) -> Bench:
    """Three rounds, all alike; the gateway adds 0.2 ms, and costs what bare aiohttp costs, unless a measure is changed
    (direct, gateway)."""
    measures = {
        "json": (sample(), sample(1.2)),
        "sse": (sample(), sample(1.2)),
        "json at once": (sample(load=0.5, stub=0.3), sample()),
    }
    measures |= {f"streams {number}": (sample(1280.0), sample(1290.0)) for number in (128, 256, 512)}
    floor = {measure: ours for measure, (_, ours) in measures.items()}
    measures |= {name.replace("_", " "): pair for name, pair in changed.items()}
    made = Bench(Sizes(rounds=3), DIRECT, [GATEWAY, FLOOR], (0, 1))
    for measure, pair in measures.items():
        for who, it in zip((DIRECT, GATEWAY, FLOOR), (*pair, floor[measure]), strict=True):
            made.samples[who.name, measure] = [it] * 3
    return made


def missed(made: Bench) -> list[str]:
    return [f"{goal.text}, {goal.wanted}" for goal in judged(made, GATEWAY, FLOOR) if goal.limit and not goal.met]


def test_quick_run_has_every_value_and_log_line(tmp_path):
    """A quick run has every value and one log line for each request."""
    out = tmp_path / "figures.json"
    command = [sys.executable, "tests/bench/bench_gateway.py", "--quick", "--json", out]
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
    told = json.loads(out.read_text())
    assert ["vllm-watch gateway", "bare aiohttp (floor)"] == list(told["contenders"])
    for contender in told["contenders"].values():
        assert set(COLUMNS) == set(contender["figures"])
        assert all(figure["refused"] or math.isfinite(figure["median"]) for figure in contender["figures"].values())
        assert contender["requests"] > 0
        assert 0 == contender["failed"]
        assert contender["rss_mb"] > 0
    assert told["contenders"]["vllm-watch gateway"]["requests"] == told["log_lines"]
    assert "left out: Starlette with httpx, LiteLLM" in done.stdout


def test_added_latency_is_over_direct_of_the_same_round():
    made = bench()
    made.samples["direct", "json"] = [sample(1.0), sample(2.0), sample(3.0)]
    made.samples["gateway", "json"] = [sample(1.2), sample(2.5), sample(3.1)]
    added = made.figures(GATEWAY)["json_added_p50_ms"]
    assert pytest.approx((0.2, 0.1, 0.5)) == (added.median, added.low, added.high)


def test_within_all_limits_nothing_is_missed():
    assert [] == missed(bench())
    aims = [goal.wanted for goal in judged(bench(), GATEWAY, FLOOR) if not goal.met]
    assert ["at most 0.7 wanted", "1000 wanted"] == aims


@pytest.mark.parametrize(
    ("measure", "pair", "said"),
    [
        ("json_at_once", (sample(), sample(cpu_us=1260.0)), "CPU per JSON request: 1.26"),
        ("streams_256", (sample(1280.0), sample(1290.0, cpu_us=1010.0)), "CPU per streamed event: 1.01"),
        ("streams_512", (sample(1280.0), sample(1345.0)), "streams held at 5% longer: 256, bare aiohttp 512"),
        ("json_at_once", (sample(), sample(load=0.9)), "CPU per JSON request: refused: load busy"),
    ],
)
def test_a_missed_limit_is_named_and_what_is_refused_is_missed(measure, pair, said):
    assert [said] == [text[: len(said)] for text in missed(bench(**{measure: pair}))]


def test_one_request_at_a_time_uses_stub_and_load():
    """They wait for each other; with many at once a busy core is the limit of what is measured, and the figure is
    refused."""
    busy = (sample(load=0.5, stub=0.5), sample(load=0.5, stub=0.5))
    assert "" == bench(json=busy).figures(GATEWAY)["json_added_p50_ms"].refused
    assert "refused: load busy 100%" == bench(json_at_once=busy).figures(GATEWAY)["json_per_s"].refused


def test_the_stub_answers_as_long_as_it_says():
    assert 1024 == len(reply())
    assert Shape(64).events == len(events(64)) == 66


def test_an_answer_with_something_missing_is_a_failure():
    whole = b"".join(events(3))
    check = answers(Shape(3), reply())
    assert check(whole)
    assert not check(whole.replace(events(3)[1], b""))
    assert not check(whole.replace(b"200 OK", b"502 Bad Gateway"))
    assert answers(Shape(), reply())(JSON_REPLY)
    assert not answers(Shape(), reply())(JSON_REPLY[:-1])
