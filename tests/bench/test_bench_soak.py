"""The soak finds what leaks and what is lost; a whole one, with its real engine, is `make bench-soak`."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import aiohttp
import bench_soak_judge as judge
import pytest
from aiohttp import web
from bench_soak import EXPECTED, Life, figures
from bench_soak import main as soak
from bench_soak_faults import OTHERS, RESTARTS, RESTARTS_WITHIN, schedule
from bench_soak_judge import BOUNDS, KINDS, accounts, flat, in_the_log, left_firing, theil_sen
from bench_soak_liveness import StateWatch
from bench_soak_liveness import judged as judged_liveness
from bench_soak_load import MIX, Load
from test_gateway import KEYS, gateway

from alerts.registry import ALERTS
from exporters.catalogue import reconciled
from exporters.catalogue.exposition_parser import Exposition
from exporters.requests.record import RequestRecord, parse_block

MEMORY = BOUNDS["memory, MiB"]
HOUR_S = 3600


def life(
    grows_per_hour: float, noise: float = 0.0, for_s: int = HOUR_S, begins: float = 60.0
) -> list[tuple[float, float]]:
    rng = random.Random(1)
    return [(at, begins + grows_per_hour * at / HOUR_S + rng.uniform(-noise, noise)) for at in range(0, for_s, 5)]


def judged(samples: list[tuple[float, float]], bound: judge.Bound = MEMORY) -> judge.Flat:
    found = flat(samples, bound)
    assert found is not None, "there is enough to judge"
    return found


@pytest.mark.parametrize(
    ("grows_per_hour", "noise", "well"),
    [(0.0, 0.0, True), (0.0, 5.0, True), (3.0, 1.0, True), (8.0, 1.0, False), (8.0, 5.0, False), (-9.0, 1.0, True)],
)
def test_a_leak_is_told_from_noise(grows_per_hour, noise, well):
    """60 MiB may grow by 3 % and 1.5 MiB in the three quarters that are judged."""
    found = judged(life(grows_per_hour, noise))
    assert well == found.well
    assert abs(found.per_hour - grows_per_hour) < 1.5


def test_what_a_process_takes_while_it_warms_up_is_no_leak():
    samples = [(at, 60.0 if at > 800 else 20.0 + at / 20) for at in range(0, HOUR_S, 5)]
    assert judged(samples).well


def test_a_burst_moves_no_slope_and_a_level_that_stays_is_found():
    burst = [(at, value + (40.0 if 1800 < at < 2400 else 0.0)) for at, value in life(0.0, 0.1)]
    assert judged(burst).well
    stays = [(at, value + (40.0 if at > 2700 else 0.0)) for at, value in life(0.0, 0.1)]
    assert not judged(stays).well


def test_slow_leaks_are_leaks():
    """One descriptor in ten minutes or a task in five is a leak."""
    leaks = [(float(at), 30.0 + at // 600) for at in range(0, HOUR_S, 5)]
    assert not judged(leaks, BOUNDS["descriptors"]).well
    leaks = [(float(at), 30.0 + at // 300) for at in range(0, HOUR_S, 5)]
    assert not judged(leaks, BOUNDS["tasks"]).well


def test_a_life_too_short_is_not_judged():
    assert flat(life(0.0, for_s=90), MEMORY) is None
    assert flat([], MEMORY) is None


def test_a_slope_is_the_median_over_all_pairs():
    assert 2.0 == theil_sen([(0, 0.0), (1, 2.0), (2, 4.0), (3, 60.0), (4, 8.0)])


def test_figures_are_those_of_this_process():
    found = figures(os.getpid())
    assert 10 < found["memory, MiB"] < found["RSS, MiB"]
    assert found["descriptors"] >= 3
    assert found["threads"] >= 1


def test_the_longest_life_is_judged():
    short = Life(1, [(0.0, {"threads": 1.0}), (60.0, {"threads": 90.0})])
    long = Life(2, [(float(at), {"threads": 4.0}) for at in range(100, 1000, 5)])
    assert long is max((short, long), key=lambda one: one.lasted_s)
    assert (found := long.flat("threads")) is not None
    assert found.well


def test_every_request_has_one_line_or_is_named():
    records = [RequestRecord(request_id=one) for one in ("a", "b", "b", "of nobody")]
    books = accounts(["a", "b", "c"], records)
    assert (("c",), ("b",), 1, False) == (books.lost, books.twice, books.strange, books.well)
    assert accounts(["a"], [RequestRecord(request_id="a")]).well


def test_tokens_of_the_log_are_added_up():
    records = [
        RequestRecord(request_id="a", prompt_tokens=3, completion_tokens=2),
        RequestRecord(request_id="b", prompt_tokens=4),
    ]
    assert {"requests": 2, "prompt": 7, "completion": 2} == in_the_log(records)


def books(
    engine: float, logged: float, missing_in_log: float = 0.0, extra_in_log: float = 0.0, open_: float = 0.0
) -> Exposition:
    rows = {
        reconciled.ENGINE: engine,
        reconciled.LOGGED: logged,
        reconciled.MISSING_IN_LOG: missing_in_log,
        reconciled.EXTRA_IN_LOG: extra_in_log,
        reconciled.OPEN: open_,
    }
    return Exposition({metric.name: [({"kind": kind}, value) for kind in KINDS] for metric, value in rows.items()})


@pytest.mark.parametrize(
    ("page", "failed"),
    [
        (books(100, 100), []),
        (books(100, 98, missing_in_log=2), []),
        (books(100, 90, missing_in_log=10), ["finished and not logged"]),
        (books(100, 101, extra_in_log=1), ["logged and not finished"]),
        (books(100, 99), ["engine = log, requests", "engine = log, prompt", "engine = log, completion"]),
        (books(100, 99, open_=1), ["engine = log, requests", "engine = log, prompt", "engine = log, completion"]),
    ],
)
def test_the_books_close_and_what_is_missing_has_a_reason(page, failed):
    assert failed == [check.what for check in judge.reconciled(page, hang_ups=3) if not check.well]


def test_an_alert_that_nothing_here_asks_for_is_named():
    assert left_firing(["VLLMWatchdog"], EXPECTED).well
    found = left_firing(["VLLMWatchdog", "VLLMEngineFrozen"], EXPECTED)
    assert (False, "VLLMEngineFrozen") == (found.well, found.found)
    assert EXPECTED.keys() <= {alert.name for alert in ALERTS}


def test_schedule_follows_its_seed():
    """A schedule is the same for the same seed and restarts come early."""
    planned = schedule(3600, 30, random.Random(7))
    assert planned == schedule(3600, 30, random.Random(7))
    assert planned != schedule(3600, 30, random.Random(8))
    assert {*RESTARTS, *OTHERS} == {fault for _, fault in planned}
    assert max(at for at, fault in planned if fault in RESTARTS) < RESTARTS_WITHIN * 3600
    assert set(RESTARTS) <= {fault for _, fault in schedule(180, 8, random.Random(1))}


def test_a_soak_that_cannot_show_a_leak_is_refused(capsys):
    with pytest.raises(SystemExit):
        soak(["--for", "20s"])
    assert "too short to see a leak; take 120s or more" in capsys.readouterr().err


async def answers(request: web.BaseRequest) -> web.StreamResponse:
    """As an engine does: a stream where one is asked for, a little later, and a refusal of what is wrong."""
    asked: dict[str, Any] = await request.json()
    if asked["temperature"] < 0:
        return web.json_response({"error": {"message": "no", "code": 400}}, status=400)
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    await asyncio.sleep(0.05)
    if not asked.get("stream"):
        return web.json_response({"choices": [{"index": 0, "text": "well", "finish_reason": "stop"}], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    text = {"choices": [{"index": 0, "text": "well", "finish_reason": "stop"}]}
    for piece in (json.dumps(text), json.dumps({"choices": [], "usage": usage}), "[DONE]"):
        await response.write(f"data: {piece}\n\n".encode())
        await asyncio.sleep(0.05)
    return response


async def test_each_kind_of_client_leaves_exactly_one_line(tmp_path):
    async with gateway(tmp_path, answers) as running:
        keys = {"demo": KEYS["demo"][0], "experimental": KEYS["batch"][0]}
        load = Load(running.started.url, keys, random.Random(3))
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(load.one(session, kind) for kind in (*MIX, "crowd")))
        async with asyncio.timeout(30):
            while len(lines := parse_block(running.path.read_bytes())[0]) < len(MIX) + 1:
                await asyncio.sleep(0.05)
    assert accounts(load.sent, lines).well
    assert Counter((*MIX, "crowd")) == Counter(load.sent.values())
    ended = dict(load.ends.keys())
    assert ("200", "401", "left", "200") == tuple(
        ended[kind] for kind in ("chat", "unknown key", "torn body", "slow body")
    )


@pytest.mark.parametrize(
    ("seen", "log", "well"),
    [
        (("gateway", "suspect", "steps_stopped"), "down: suspect (steps_stopped)", [True, True]),
        (("gateway", "hung", "steps_stopped"), "one at http://e is hung: no progress for 30 s", [False, False]),
        (("sidecar", "hung", "steps_stopped"), "", [False, True]),
        (None, "", [False, True]),
    ],
)
def test_healthy_engine_that_is_called_hung_fails_the_soak(seen, log, well):
    """And a phase in which nothing was seen proves nothing."""
    watch = StateWatch(lab=None, lasted_s={"load": 60.0})
    if seen:
        watch.seen_s[("load", *seen)] = 5.0
    assert well == [check.well for check in judged_liveness(watch, log)]
