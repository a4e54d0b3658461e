"""Hung and scaling engines behind a gateway: rotation, moved requests, probes and their records.

The engines are fakes on loopback whose core a test stops; a real vLLM is in tests/live/test_liveness_live.py."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import msgspec
import pytest
from aiohttp import web

from exporters.engine.liveness import Endpoint, EngineState, Liveness, StepValues
from exporters.requests.record import PROBE_TEAM, RequestRecord, parse_line
from stack.gateway import GatewayConfig, Started, health, make_key, serve
from stack.gateway.config import LivenessConfig
from stack.gateway.engine_liveness import EngineLiveness, busy_s
from stack.gateway.load_signals import ENGINE
from stack.gateway.policy import Upstream
from stack.gateway.request_body import TokenRequest
from tests.support import gateway_scene as scene
from tests.support.wait import LIMIT_S, until

KEY, HASH = make_key("demo")
LOOK_S = 0.25


class QuickLiveness(LivenessConfig, frozen=True, kw_only=True):
    """Limits of a quarter of the least that a configuration may have; looks come four times as often too."""

    out_s: float = 0.5
    hung_s: float = 1.0
    idle_probe_s: float | None = 0.25

    def __post_init__(self) -> None:
        pass


QUICK = QuickLiveness()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "EVERY_S", LOOK_S)
    monkeypatch.setattr(importlib.import_module("stack.gateway.serve"), "GAP_S", 2 * LOOK_S)  # the module


@dataclass
class FakeCore:
    """A fake of vLLM with a core that can be stopped: its API server goes on, as in every measured hang.

    shown: number of running requests on /metrics where it is not the true one. scaling: `True` while elastic expert
    parallelism scales, `False` on a retired rank. This is a stand-in for the middleware of vLLM 0.33, built from
    vllm/entrypoints/serve/elastic_ep/middleware.py and api_router.py: 503 on every path but /health and
    /is_scaling_elastic_ep. sent: the prefill engine has sent its KV cache, for which prompts that begin with "fetch"
    wait."""

    url: str = ""
    running: int = 0
    steps: int = 1
    shown: int | None = None
    scaling: bool | None = None
    moves: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    fetching: int = 0
    asked: list[str] = field(default_factory=list)
    scrapes: int = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/is_scaling_elastic_ep" and request.method == "POST":
            return web.json_response({"is_scaling_elastic_ep": bool(self.scaling), "phase": "idle", "epoch": None})
        if self.scaling is not None:
            why = "The model is currently scaling. Please try again later."
            return web.json_response({"error": why}, status=503)
        if request.path == "/metrics":
            self.scrapes += 1
            running, labels = self.running if self.shown is None else self.shown, '{engine="0",model_name="tiny"}'
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total")
            values = (running, self.fetching, 0.5, self.steps)
            page = "".join(f"vllm:{name}{labels} {value}\n" for name, value in zip(names, values, strict=True))
            stage = labels.replace("}", ',stage="in_progress"}')
            return web.Response(text=f"{page}vllm:num_requests_kv_fetch_by_stage{stage} {self.fetching}\n")
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny", "root": "tiny"}]})
        if request.path != "/v1/completions":
            return web.Response(status=404)
        if request.headers.get("Content-Type") != "application/json":
            return web.json_response({"detail": "Unsupported Media Type"}, status=415)
        body = json.loads(await request.read())
        self.asked.append(body["prompt"])
        if body["prompt"].startswith("fetch"):
            self.fetching += 1
            await self.sent.wait()
            self.fetching -= 1
        self.running += 1
        try:
            return await self._complete(request, body)
        finally:
            self.running -= 1

    async def _complete(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            await self.moves.wait()
            self.steps += 1
            choice = {"index": 0, "text": "a", "finish_reason": "length"}
            return web.json_response({"model": "tiny", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)  # before anything is computed, as Starlette does
        for _ in range(body["max_tokens"]):
            await self.moves.wait()
            self.steps += 1
            choice = {"index": 0, "text": "a", "finish_reason": None}
            await response.write(b"data: " + json.dumps({"model": "tiny", "choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0.01)
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return response


@dataclass
class Fleet:
    cores: dict[str, FakeCore]
    started: Started
    session: aiohttp.ClientSession
    log: Path

    async def states(self) -> dict[str, tuple[str, str]]:
        """State and evidence of each engine, by the gateway's own metrics."""
        async with self.session.get(self.started.metrics_url + "/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if "gateway_engine_state{" in line]
        found = {}
        for line in lines:
            labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
            found[labels["upstream"].strip('"')] = labels["state"].strip('"'), labels["evidence"].strip('"')
        assert len(lines) == len(found), "an engine has one state at a time"
        return found

    async def until(self, name: str, *states: str, evidence: str | None = None) -> None:
        """Return once an engine is in one of the states, for this evidence."""

        async def reached() -> bool:
            state, found = (await self.states())[name]
            assert state in states, state
            return evidence in (None, found)

        await until(reached, f"{name} is {' or '.join(states)}")

    async def stream(self, prompt: str = "hello", tokens: int = 3) -> str:
        """The text that a client gets."""
        async with self.session.post(
            self.started.url + "/v1/completions",
            json={"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True},
            headers={"Authorization": f"Bearer {KEY}"},
        ) as answer:
            return (await answer.read()).decode()

    async def last_at(self, upstream: str) -> RequestRecord:
        """The latest record of a client's request, as soon as it is one of this engine."""

        def last() -> RequestRecord | None:
            record = [record for record in self.records() if record.team == "demo"][-1]
            return record if record.upstream == upstream else None

        return await until(last, f"the last record is one of {upstream}")

    def records(self) -> list[RequestRecord]:
        return [parse_line(line) for line in self.log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


@contextlib.asynccontextmanager
async def fleet(tmp_path: Path, *names: str, liveness: LivenessConfig = QUICK) -> AsyncIterator[Fleet]:
    """A gateway in front of fake engines with these names, all of which step."""
    cores, runners = {name: FakeCore() for name in names}, []
    for core in cores.values():
        core.moves.set()
        runner = web.ServerRunner(web.Server(core.handle, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        core.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    teams = tmp_path / "teams.yaml"
    teams.write_text(
        json.dumps({
            "teams": {"demo": {"keys": [HASH]}},
            "upstreams": {name: {"url": core.url} for name, core in cores.items()},
        })
    )  # fmt: skip
    log = tmp_path / "requests.jsonl"
    config = GatewayConfig(
        listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", teams=str(teams), requests_log=str(log), liveness=liveness
    )
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(config, stop=stop, on_start=started.set_result))
    try:
        async with aiohttp.ClientSession() as session:
            yield Fleet(cores, await asyncio.wait_for(started, 30), session, log)
    finally:
        stop.set()
        for core in cores.values():
            core.moves.set(), core.sent.set()
        await serving
        for runner in runners:
            await runner.cleanup()


async def test_request_without_content_moves_to_another_engine(tmp_path: Path):
    async with fleet(tmp_path, "one", "two") as it:
        prompt = ""
        for number in range(100):  # until one is drawn for this engine
            await it.stream(prompt := f"prompt {number}")
            if prompt in it.cores["one"].asked:
                break
        it.cores["one"].moves.clear()
        waiting = asyncio.create_task(it.stream(prompt))
        await it.until("one", "suspect", evidence="steps_stopped")
        assert "data: [DONE]" in await asyncio.wait_for(waiting, LIMIT_S)
        moved = await it.last_at("two")
        assert ("two", 2, "one:engine_hung", "ok") == (moved.upstream, moved.attempt, moved.tried, moved.outcome)
        assert "data: [DONE]" in await it.stream(prompt), "new requests go elsewhere"
        assert 2 == it.cores["one"].asked.count(prompt)
        await it.until("one", "hung")
        it.cores["one"].moves.set()
        await it.until("one", "healthy", "idle")
        await it.stream(prompt)
        await it.last_at("one")


async def test_core_that_hangs_while_its_gauge_reads_0_is_found(tmp_path: Path):
    saved = tmp_path / "saved.json"
    hook = ["sh", "-c", f"cat > {saved}.part; mv {saved}.part {saved}"]
    async with fleet(tmp_path, "one", liveness=msgspec.structs.replace(QUICK, on_hung=hook)) as it:
        await it.stream()
        it.cores["one"].moves.clear()
        it.cores["one"].shown = 0
        waiting = asyncio.create_task(it.stream())
        await it.until("one", "hung", evidence="output_stopped")
        for path, status in (("engine-ready", 503), ("engine-live", 503), ("engine-live?upstream=two", 404)):
            async with it.session.get(f"{it.started.metrics_url}/-/{path}") as answer:
                assert status == answer.status
        await until(saved.exists, "the hook has saved the evidence")
        evidence = json.loads(saved.read_text())
        assert ("one", "output_stopped", 1) == (evidence["upstream"], evidence["evidence"], len(evidence["requests"]))
        it.cores["one"].moves.set()
        assert "data: [DONE]" in await asyncio.wait_for(waiting, LIMIT_S), "without another engine the request waits"
        await it.until("one", "healthy", "idle")


async def test_core_that_hangs_while_idle_is_found_by_a_probe(tmp_path: Path):
    async with fleet(tmp_path, "one") as it:
        it.cores["one"].moves.clear()
        it.cores["one"].shown = 0
        await it.until("one", "suspect", evidence="probe_silent")
        it.cores["one"].moves.set()
        await it.until("one", "idle")
        probe = (await until(it.records, "the record of a probe"))[0]
        assert (PROBE_TEAM, "tiny", "one", 1, "ok") == (
            probe.team,
            probe.model,
            probe.upstream,
            probe.completion_tokens,
            probe.outcome,
        )


@pytest.mark.parametrize("probe", [True, False])
async def test_decode_engine_that_fetches_kv_stays_in_rotation(tmp_path: Path, probe: bool):
    """Twice the limit without a token, and nobody calls it suspect or hung."""
    async with fleet(tmp_path, "one", liveness=msgspec.structs.replace(QUICK, probe=probe)) as it:
        await it.stream()
        waiting = asyncio.create_task(it.stream("fetch"))
        await it.until("one", "slow", evidence="kv_fetch")
        last, seen = it.cores["one"].scrapes + 2 * QUICK.hung_s / LOOK_S, set[str]()

        async def looked_often() -> bool:
            seen.add((await it.states())["one"][0])
            return it.cores["one"].scrapes >= last

        await until(looked_often, "the gateway looks at it for twice the limit")
        assert seen <= {"slow", "healthy"}
        assert "data: [DONE]" in await it.stream(), "it serves others meanwhile"
        it.cores["one"].sent.set()
        assert "data: [DONE]" in await asyncio.wait_for(waiting, LIMIT_S)


@pytest.mark.parametrize(("scaling", "evidence"), [(True, "elastic_ep"), (False, "retired_rank")])
async def test_scaling_engine_and_retired_rank_leave_rotation(tmp_path: Path, scaling: bool, evidence: str):
    async with fleet(tmp_path, "one", "two") as it:
        it.cores["one"].scaling = scaling
        await it.until("one", "scaling", evidence=evidence)
        for number in range(8):
            assert "data: [DONE]" in await it.stream(f"prompt {number}")
        assert not it.cores["one"].asked or {"1"} == set(it.cores["one"].asked), "probes only"
        it.cores["one"].scaling = None
        await it.until("one", "idle", "healthy")


@pytest.mark.parametrize(("state", "paused"), [(EngineState.SUSPECT, True), (EngineState.HEALTHY, False)])
async def test_late_answer_does_not_pause_an_engine_that_went_on(state: EngineState, paused: bool):
    """The engine made progress while it was asked whether it is paused."""
    monitor, engine = object.__new__(health.HealthMonitor), Mock(paused=False)
    engine.liveness.state = EngineState.SUSPECT

    async def late() -> bool:
        engine.liveness.state = state
        return True

    monitor._client = lambda it: Mock(paused=late)  # type: ignore[method-assign]
    await monitor._ask_whether_paused(Mock(), engine)
    assert paused is engine.paused


@pytest.mark.parametrize(("busy_s", "failures"), [(0.0, 1), (60.0, 0)])
async def test_silent_health_of_a_busy_engine_is_no_failure(busy_s: float, failures: int):
    monitor, engine = object.__new__(health.HealthMonitor), EngineLiveness(Liveness.unknown(0.0), left_s=busy_s)
    monitor._clock, monitor._timeout_s = (lambda: 5.0), 2.0
    monitor._client = lambda it: Mock(health=AsyncMock(side_effect=TimeoutError))  # type: ignore[method-assign]
    watched = health._Watched("one", Upstream(url=""), {}, ENGINE, engine=engine)
    await monitor._probe(watched)
    assert failures == watched.health.failures


def test_answered_probe_outweighs_an_older_scrape_of_a_sleep():
    """The probe was open during the sleep, and its answer is seen before the next scrape."""
    engine, asleep = EngineLiveness(Liveness.unknown(0.0), probes=True), StepValues((), asleep=True)

    def state(now: float) -> EngineState:
        engine.assess(now)
        return engine.liveness.state

    engine.scraped(Endpoint.READ, 0.5, asleep)
    assert EngineState.DRAINING is state(1.0)
    engine.probe_answers += 1
    assert [EngineState.IDLE] * 2 == [state(2.0), state(3.0)]
    engine.scraped(Endpoint.READ, 3.5, asleep)
    assert EngineState.DRAINING is state(4.0)


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "seconds"),
    [
        ({}, 400_000, 0.0),
        ({"max_tokens": 4096, "n": 400, "outputs": 400}, 100, 0.0),
        ({"prompt_logprobs": 21}, 30_000, 31.5),
        ({"logprobs": 21, "outputs": 4, "max_tokens": 500}, 30_000, 2.1),
        ({"logprobs": 21, "outputs": 4, "max_tokens": 500, "stream": True}, 30_000, 0.0),
        ({"logprobs": 10}, 100, 0.512),
        ({"outputs": 0, "prompts": 16_384}, 100_000, 32.968),
        ({"outputs": 16_384}, 100, 32.7682),
        ({}, 8_000_000, 16.002),
    ],
)
def test_busy_time_covers_what_blocks_an_api_server(fields: dict[str, Any], prompt_tokens: int, seconds: float):
    assert seconds == pytest.approx(busy_s(TokenRequest(b"", **fields), prompt_tokens))


@pytest.mark.parametrize("leave", [False, True])
def test_logprobs_keep_an_engine_in_rotation_for_their_time(leave: bool):
    """Four requests silence the API server for what they ask, whether or not their clients wait for it."""
    look = {"outputs": 0, "busy_s": 31.5, "silent_since": 0.0, "prompt_tokens": 1, "blocking": False}
    open_ones = [Mock(**look) for _ in range(4)]
    engine = EngineLiveness(Liveness.unknown(0.0), attempts=set(open_ones))
    for now in range(1, 200):
        engine.scraped(Endpoint.SILENT, now)
        if leave and open_ones:
            engine.ended(open_ones.pop(), answered=False)
        engine.assess(now)
        assert (now < 126, now < 136) == (engine.busy(now), engine.liveness.in_rotation)
    engine.scraped(Endpoint.READ, 200.0, StepValues((b"1",)))
    for each in open_ones:
        engine.ended(each, answered=True)
    assert 0.0 == engine.evidence(200.0).busy_s


@pytest.mark.parametrize(("answer", "left"), [(scene.says({"error": {"code": 400}}, 400), False),
                                              (scene.then_breaks(None), True)], ids=["refused", "broken"])  # fmt: skip
async def test_what_an_engine_refused_keeps_it_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: scene.Answer, left: bool
):
    """Else one refused request a second would explain any silence."""
    ended, seen = EngineLiveness.ended, []

    def spy(self: EngineLiveness, attempt: Any, *, answered: bool) -> None:
        ended(self, attempt, answered=answered)
        seen.append(self.left_s > 0)

    monkeypatch.setattr(EngineLiveness, "ended", spy)
    async with scene.gateway(tmp_path, answer) as it:
        async with it.post(scene.ASK | {"prompt_logprobs": -1}) as got:
            await got.read()
        await it.record()
    assert [left] == seen


async def test_gateway_without_probes_sends_none(tmp_path: Path):
    async with fleet(tmp_path, "one", liveness=msgspec.structs.replace(QUICK, probe=False)) as it:
        waiting = asyncio.create_task(it.stream())
        it.cores["one"].moves.clear()
        await it.until("one", "suspect")
        assert ["hello"] == it.cores["one"].asked
        it.cores["one"].moves.set()
        await waiting


@pytest.mark.parametrize("wrong", [{"out_s": 1.0}, {"out_s": 40.0}, {"idle_probe_s": 0.1}])
def test_impossible_limits_are_refused(wrong: dict[str, float]):
    with pytest.raises(ValueError, match="liveness"):
        LivenessConfig(**wrong)
