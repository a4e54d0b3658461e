"""The doctor, run as people run it but for its times (tests/support/at_test_pace.py), at the side of a real vLLM that
has the trouble just then, or none."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from exporters.catalogue import vllm
from stack.drill.faults import stopped
from tests.support.engines import Engine, Engines
from tests.support.situation_load import Clients, Load, core_of
from tests.support.wait import until

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
CROWD = Clients(60, (40, 120), (50, 100))  # the lab's engine runs 16 of them at once
FEW = Clients(4, (100, 300), (20, 80), shared=64, pause_s=0.4)
LONG = Clients(4, (40, 120), (2000, 3000))


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Engine:
    return real_engines.shared().up()


@pytest.fixture(scope="module")
def stoppable(real_engines: Engines) -> Engine:
    """An engine that nobody else gets."""
    return real_engines.own().up()


async def produces(engine: Engine) -> None:
    """Return once the engine has produced a token from now on."""
    before = engine.figure(vllm.GENERATION_TOKENS)
    await until(lambda: engine.figure(vllm.GENERATION_TOKENS) > before, "another token")


@asynccontextmanager
async def under(clients: Clients, engine: Engine) -> AsyncIterator[None]:
    """The engine under this load already; idle afterwards."""
    load = Load(engine.spec.address, {}, f"{os.getpid()} {clients}")
    try:
        load.start([clients])
        if clients is FEW:
            await produces(engine)
        else:
            await until(lambda: engine.running >= min(clients.number, 16), "the whole load")
        yield
    finally:
        await load.stop()
    await until(lambda: engine.running == 0, "an idle engine")


class Look:
    """`vllm-watch doctor URL --json`, which has taken its first look."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def begun(cls, engine: Engine, seconds: int, *options: object) -> Look:
        argv = ["-m", "tests.support.at_test_pace", "doctor", engine.spec.address, "--for", f"{seconds}s", "--json"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            *map(str, options),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        line = await asyncio.wait_for(process.stderr.readline(), 60)
        assert line.startswith(b"looking for "), line + await process.stderr.read()
        return cls(process)

    async def told(self) -> tuple[int | None, Mapping[str, Any]]:
        """Exit status, and what it said."""
        said, complaints = await asyncio.wait_for(self._process.communicate(), 60)
        assert said, complaints.decode()
        return self._process.returncode, json.loads(said)


def names(said: Mapping[str, Any]) -> list[str]:
    return [finding["finding"] for finding in said["findings"]]


async def test_a_crowd_is_bound_by_the_queue(engine, tmp_path):
    """The deployment's own limit stands in a file, since this engine is quick enough for the shipped one."""
    (tmp_path / "thresholds.yaml").write_text(json.dumps({"thresholds": {"queue_time_p95": 0.5}}))
    async with under(CROWD, engine):
        status, said = await (await Look.begun(engine, 6, "--thresholds", tmp_path / "thresholds.yaml")).told()
    assert (1, "queue-bound") == (status, names(said)[0]), said


async def test_of_an_engine_that_is_well_nothing_is_found(engine):
    async with under(FEW, engine):
        status, said = await (await Look.begun(engine, 6)).told()
    assert (0, []) == (status, names(said)), said


@pytest.mark.breaks_engine
async def test_a_core_that_stands_still_is_never_fine(stoppable):
    """It is found where it stood still long enough before the end, and where it stood still at the first look already,
    while its page answers. A look that ends sooner was too short to tell it from a long prefill."""
    async with under(LONG, stoppable):
        long = await Look.begun(stoppable, 16)
        short = await Look.begun(stoppable, 5)
        await produces(stoppable)
        with stopped(core_of(stoppable)):
            late = await Look.begun(stoppable, 9)
            (status, said), *found = [await look.told() for look in (short, long, late)]
    assert (3, [], True) == (status, names(said), said["undecided"]), said
    assert [(1, "frozen-engine")] * 2 == [(status, names(said)[0]) for status, said in found], found


@pytest.mark.breaks_engine
async def test_hanging_api_server_is_found(stoppable):
    """An api server that stops answering within the look is found."""
    async with under(LONG, stoppable):
        look = await Look.begun(stoppable, 6)
        with stopped(stoppable.process.pid):
            status, said = await look.told()
    assert (1, "frozen-engine", "frozen-api-server") == (status, names(said)[0], said["findings"][0]["row"]), said
