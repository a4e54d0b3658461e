"""The doctor, run as people run it, at the side of a real vLLM that has the trouble just then, or none."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Engine, Engines
from tests.support.situation_load import Clients, Load, core_of
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
FOR_S = 8
CROWD = Clients(60, (40, 120), (100, 200))  # the lab's engine runs 16 of them at once
FEW = Clients(4, (100, 300), (20, 80), shared=64, pause_s=0.4)
LONG = Clients(4, (40, 120), (2000, 3000))


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Engine:
    return real_engines.shared().up()


@asynccontextmanager
async def under(clients: Clients, engine: Engine) -> AsyncIterator[None]:
    """The engine under this load for a while already; idle afterwards."""
    load = Load(engine.spec.address, {}, f"{os.getpid()} {clients}")
    try:
        load.start([clients])
        await asyncio.sleep(5)
        yield
    finally:
        await load.stop()
    eventually(lambda: engine.running == 0, within_s=60, what="an idle engine")


@asynccontextmanager
async def stopped_after(seconds: float, process: int) -> AsyncIterator[None]:
    """Stop a process so many seconds after the block began; it goes on when that ends."""

    async def stop() -> None:
        await asyncio.sleep(seconds)
        os.kill(process, signal.SIGSTOP)

    task = asyncio.create_task(stop())
    try:
        yield
    finally:
        task.cancel()
        os.kill(process, signal.SIGCONT)


async def told(engine: Engine, *options: object) -> tuple[int | None, Mapping[str, Any]]:
    """Exit status of `vllm-watch doctor URL --json`, and what it said."""
    argv = ["-m", "stack.cli", "doctor", engine.spec.address, "--for", f"{FOR_S}s", "--json", *map(str, options)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complaints = await asyncio.wait_for(process.communicate(), 60)
    assert said, complaints.decode()
    return process.returncode, json.loads(said)


def names(said: Mapping[str, Any]) -> list[str]:
    return [finding["finding"] for finding in said["findings"]]


async def test_a_crowd_is_bound_by_the_queue(engine, tmp_path):
    """The deployment's own limit stands in a file, since this engine is quick enough for the shipped one."""
    (tmp_path / "thresholds.yaml").write_text(json.dumps({"thresholds": {"queue_time_p95": 0.5}}))
    async with under(CROWD, engine):
        status, said = await told(engine, "--thresholds", tmp_path / "thresholds.yaml")
    assert (1, "queue-bound") == (status, names(said)[0]), said


async def test_of_an_engine_that_is_well_nothing_is_found(engine):
    async with under(FEW, engine):
        status, said = await told(engine)
    assert (0, []) == (status, names(said)), said


async def test_stalled_core_is_found_while_its_page_answers(engine):
    """A core that stands still is found while its page answers."""
    async with under(LONG, engine):
        core = core_of(engine)
        os.kill(core, signal.SIGSTOP)
        try:
            status, said = await told(engine, "--for", "16s")  # less may be one long prefill
        finally:
            os.kill(core, signal.SIGCONT)
    assert (1, "frozen-engine") == (status, names(said)[0]), said


async def test_a_core_that_stops_within_the_look_is_never_fine(engine):
    """Long enough before the end it is found; shortly before it the look was too short to tell it from a long
    prefill."""
    async with under(LONG, engine), stopped_after(10, core_of(engine)):
        status, said = await told(engine, "--for", "30s")
    assert (1, "frozen-engine") == (status, names(said)[0]), said
    async with under(LONG, engine), stopped_after(10, core_of(engine)):
        status, said = await told(engine, "--for", "20s")
    assert (3, [], True) == (status, names(said), said["undecided"]), said


async def test_hanging_api_server_is_found(engine):
    """An api server that stops answering within the look is found."""
    async with under(LONG, engine), stopped_after(5, engine.process.pid):
        status, said = await told(engine, "--for", "10s")
    assert (1, "frozen-engine", "frozen-api-server") == (status, names(said)[0], said["findings"][0]["row"]), said
