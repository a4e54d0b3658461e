"""Golden prompts on a real vLLM: an unchanged engine under load, and copies of its model with one thing changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporters.catalogue import vllm
from exporters.engine.golden_state import GoldenCause, GoldenResult, GoldenVerdict
from exporters.requests.read import read_records
from exporters.requests.record import PROBE_TEAM
from stack.golden.baseline import Baseline
from stack.golden.check import check_engine
from stack.golden.prompts import DEFAULT_PROMPTS
from stack.golden.record import RecordPlan, record
from tests.support.engines import Engine, Engines, get
from tests.support.golden_load import company
from tests.support.live_gateway import running
from tests.support.model_damage import KINDS, damage
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

COMPANY = (0, 1, 3, 15)  # requests beside a check; `make bench-golden` does 200


@pytest.fixture(scope="module")
def copies(part: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the changed models, by kind."""
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        damage(kind, part("model").path, folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def baseline(real_engines: Engines) -> Baseline:
    engine = real_engines.shared().up()
    half = msgspec.structs.replace(DEFAULT_PROMPTS, prompts=DEFAULT_PROMPTS.prompts[::2])
    plan = RecordPlan(prompts=half, runs=12, levels=(1, 4, 16))
    return asyncio.run(record(engine.spec.address, plan))


def checked(engine: Engine, baseline: Baseline, **more: Any) -> GoldenResult:
    return asyncio.run(check_engine(engine.spec.address, baseline, **more))


def test_unchanged_engine_raises_no_alarm_under_load(real_engines, baseline, tmp_path):
    """Its noise is zero at every batch size, so each difference would be an alarm."""
    assert 0 == baseline.limits.least_sd
    engine, log = real_engines.shared().up(), tmp_path / "probes.jsonl"

    async def under_load() -> list[GoldenResult]:
        found = []
        for count in COMPANY:
            async with company(engine.spec.address, count):
                found.append(await check_engine(engine.spec.address, baseline))
        return found

    results = asyncio.run(under_load())
    assert {(GoldenVerdict.SAME, GoldenCause.NONE)} == {(found.verdict, found.cause) for found in results}
    names = (vllm.REQUEST_SUCCESS, vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS)
    before = [engine.figure(metric) for metric in names]
    alone = checked(engine, baseline, probe_log=log)
    after = [engine.figure(metric) for metric in names]
    records = list(read_records([log]))
    assert {PROBE_TEAM} == {one.team for one in records}
    logged = (
        len(records), sum(one.prompt_tokens or 0 for one in records), sum(one.completion_tokens or 0 for one in records)
    )  # fmt: skip
    assert [now - then for then, now in zip(before, after, strict=True)] == list(logged), "the log equals the engine"
    assert logged[1] + logged[2] == alone.tokens <= 2000


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("flip", GoldenCause.NUMERIC),
        ("dtype", GoldenCause.DTYPE),
        ("template", GoldenCause.TEMPLATE),
        ("tokenizer", GoldenCause.TOKENIZER),
        ("nan", GoldenCause.NOT_FINITE),
    ],
)
def test_damage_is_found_and_named(kind, cause, baseline, changed_engines, tmp_path):
    found = checked(changed_engines(kind), baseline, probe_log=tmp_path / "probes.jsonl")
    assert (GoldenVerdict.WRONG, cause) == (found.verdict, found.cause), found.sentence


@pytest.fixture(scope="module")
def changed_engines(real_engines, copies, part, free_port, tmp_path_factory, baseline):
    """Engines of the changed models, two at a time: while one is checked the next one starts."""
    folder, asked = tmp_path_factory.mktemp("changed"), ("flip", "dtype", "template", "tokenizer", "nan")
    started: dict[str, Engine] = {}
    makers = {
        kind: Engines(folder, {"engine": part("engine").path, "model": copies.get(kind, part("model").path)}, free_port)
        for kind in asked
    }

    def begin(kind: str) -> None:
        if kind not in started:
            started[kind] = makers[kind].own(*(("--dtype", "float32") if kind == "dtype" else ()))

    def get(kind: str) -> Engine:
        for done in asked[: asked.index(kind)]:
            if done in started:
                started[done].end()
        for ahead in asked[asked.index(kind) : asked.index(kind) + 2]:
            begin(ahead)
        return started[kind].up()

    yield get
    for maker in makers.values():
        maker.end()


def test_check_through_the_gateway_is_a_probe_of_nobody(real_engines, baseline, free_port, tmp_path):
    """A team with `probe` has a key like others; its requests are in the log as probes."""
    engine = real_engines.shared().up()
    policy = {"teams": {"demo": {}, "checks": {"probe": True}}, "upstreams": {"one": {"url": "{one}"}}}
    ports = free_port(), free_port()
    with running("golden", tmp_path, policy, {"one": engine.spec.address}, ports) as gate:
        eventually(lambda: get(f"{gate.url}/-/ready") == "ready\n", within_s=30, what="a ready gateway")
        found = asyncio.run(check_engine(gate.url, baseline, key=gate.keys["checks"]))
        assert GoldenVerdict.SAME is found.verdict, found.sentence
        eventually(lambda: found.requests == len(gate.lines()), "all records")
        records = gate.lines()
    assert {(PROBE_TEAM, "tiny", "ok")} == {(one.team, one.model, one.outcome) for one in records}
    assert found.tokens == sum((one.prompt_tokens or 0) + (one.completion_tokens or 0) for one in records)
