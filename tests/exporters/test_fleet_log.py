"""Reconciliation of the logs of two gateways, by two sidecars of which one has the engines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from exporters.accounting.fleet_log import FleetLog, SidecarTotals, TeamWork
from exporters.catalogue import reconciled, sidecar
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord
from exporters.requests.work import FinishedRequest, Work
from exporters.sidecar import Sidecar
from exporters.sidecar_config import EngineTarget, PeerTarget, SidecarConfig
from exporters.sidecar_listener import application
from tests.support.sidecar_scene import FakeEngine, values
from tests.support.wait import until

MODEL = "m"


def engine_text(requests: int, prompt: int, completion: int) -> str:
    """/metrics of an engine that has finished this much, for one model."""
    who = f'{{engine="0",model_name="{MODEL}"'
    return f"""
process_start_time_seconds 1.7e9
vllm:num_requests_running{who}}} 0
vllm:num_requests_waiting{who}}} 0
vllm:request_success_total{who},finished_reason="stop"}} {requests}
vllm:request_prompt_tokens_sum{who}}} {prompt}
vllm:request_prompt_tokens_count{who}}} {requests}
vllm:request_generation_tokens_sum{who}}} {completion}
vllm:request_generation_tokens_count{who}}} {requests}
vllm:prompt_tokens_total{who}}} {prompt}
vllm:generation_tokens_total{who}}} {completion}
"""


def line(number: int, gateway: int) -> str:
    record = {"request_id": f"g{gateway}-{number}", "team": f"team-{gateway}", "model": MODEL, "outcome": "ok",
              "prompt_tokens": 100, "completion_tokens": 10, "e2e_ms": 5.0}  # fmt: skip
    return json.dumps(record) + "\n"


@contextlib.asynccontextmanager
async def served(config: SidecarConfig, port: int) -> AsyncIterator[Sidecar]:
    """A sidecar with its listener."""
    it = Sidecar(config)
    runner = web.AppRunner(application(it))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield it
    finally:
        await runner.cleanup()


def requests_of(it: Sidecar, name: str) -> float:
    return sum(
        value for (metric, *labels), value in values(it.page()).items() if metric == name and "kind=requests" in labels
    )


def total(it: Sidecar, name: str) -> float:
    return sum(value for (metric, *_), value in values(it.page()).items() if metric == name)


async def test_the_logs_of_two_gateways_equal_the_engine(free_port, tmp_path: Path, monkeypatch):
    """Neither log alone equals the engine. Their sum does, through restarts of both sidecars; a request that is in
    neither log is missing, and nothing is settled while a peer does not answer."""
    monkeypatch.setattr("exporters.sidecar.SETTLE_S", 0.1)
    monkeypatch.setattr("exporters.sidecar.PEERS_S", 0.1)
    engine = FakeEngine()
    engine.text = engine_text(0, 0, 0)
    url = await engine.start()
    logs = [tmp_path / f"requests-{number}.jsonl" for number in range(2)]
    for log in logs:
        log.touch()
    ports = [free_port(), free_port()]
    peer = SidecarConfig(requests_log=(str(logs[1]),), gpu="off", state=str(tmp_path / "peer.state"))
    central = SidecarConfig(
        requests_log=(str(logs[0]),), gpu="off", state=str(tmp_path / "central.state"), patience_s=0.5,
        engines=(EngineTarget("e", url),), engine_interval_s=0.1,
        peers=(PeerTarget(f"http://127.0.0.1:{ports[1]}"),),
    )  # fmt: skip
    requests = 0

    def serve(by: tuple[int, int], unlogged: int = 0) -> None:
        nonlocal requests
        for gateway, number in enumerate(by):
            with logs[gateway].open("a") as log:
                log.writelines(line(requests + n, gateway) for n in range(number))
            requests += number
        requests += unlogged
        engine.text = engine_text(requests, 100 * requests, 10 * requests)

    missing, extra = reconciled.MISSING_IN_LOG.name, reconciled.EXTRA_IN_LOG.name
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.runner.cleanup)
        async with served(central, ports[0]) as it:
            async with served(peer, ports[1]):
                await until(lambda: total(it, reconciled.SETTLED.name) > 0)
                serve((30, 20))
                await until(lambda: requests_of(it, reconciled.LOGGED.name) == 50)
                await until(lambda: requests_of(it, reconciled.ENGINE.name) == 50)
                serve((3, 5), unlogged=7)
                await until(lambda: requests_of(it, missing) == 7)
                assert 0 == requests_of(it, extra)
                tokens = {team: it.accounts._traffic.work()[MODEL, team].prompt_tokens for team in ("team-0", "team-1")}
                assert {"team-0": 3300, "team-1": 2500} == tokens
            serve((0, 4))
            await until(lambda: requests_of(it, reconciled.ENGINE.name) == requests)
            await until(lambda: requests_of(it, reconciled.OPEN.name) == 4)
            settle, settled_at = it.settle, []
            it.settle = lambda now_s: (settled_at.append(now_s), settle(now_s))
            await until(lambda: settled_at and settled_at[-1] > settled_at[0] + 1.5, what="three times the patience")
            assert 4 == requests_of(it, reconciled.OPEN.name), "a gateway that does not answer has not lost its lines"
            settled = total(it, reconciled.SETTLED.name)
        async with served(central, ports[0]) as it:
            await until(lambda: it.ready)
            assert (7, settled) == (requests_of(it, missing), total(it, reconciled.SETTLED.name))
            async with served(peer, ports[1]) as other:
                await until(lambda: requests_of(it, reconciled.OPEN.name) == 0)
                await until(lambda: total(it, reconciled.SETTLED.name) > settled + 0.2)
                assert (7, 0) == (requests_of(it, missing), requests_of(it, extra))
                teams = {
                    labels: value
                    for page in (it.page(), other.page())
                    for (name, *labels), value in values(page).items()
                    if name == sidecar.REQUESTS.name and "outcome=ok" in labels
                    for labels in [next(each for each in labels if each.startswith("team="))]
                }
                assert {"team=team-0": 33, "team=team-1": 29} == teams, "each sidecar shows its own requests only"
                assert 0 == sum(metric == reconciled.ENGINE.name for metric, *_ in values(other.page()))


async def test_a_peer_without_a_state_says_why(tmp_path: Path, free_port):
    port = free_port()
    async with (
        served(SidecarConfig(gpu="off"), port),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/log-totals") as answer,
    ):
        assert 404 == answer.status
        assert "`state`" in await answer.text()


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"peers": [{"url": "gateway-1:9401"}]}, "peers: url 'gateway-1:9401' .*http://gateway-1:9401"),
        ({"peers": [{"url": "http://gateway-1:9401"}]}, "engines and state"),
    ],
)
def test_peers_in_the_wrong_place_are_refused(settings, values):
    with pytest.raises(msgspec.ValidationError, match=values):
        msgspec.convert(settings, SidecarConfig)


def test_one_file_serves_a_stateful_set():
    """The first one has the engines, every other one only its log."""
    settings = {
        "engines": [{"name": "e", "url": "http://e:8000"}], "peers": [{"url": "http://gateway:9401"}], "state": "s",
        "requests_log": ["requests.jsonl"], "central": "hostname",
    }  # fmt: skip
    config = msgspec.convert(settings, SidecarConfig)
    assert config == config.on("vllm-watch-gateway-0")
    other = config.on("vllm-watch-gateway-10")
    assert ((), (), "off", ("requests.jsonl",), "s") == (
        other.engines, other.peers, other.gpu, other.requests_log, other.state
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"central: .*'host'"):
        config.on("host")


def counters(records: int) -> RequestCounters:
    own = RequestCounters(BoundedNames(), BoundedNames())
    own.add_all(
        [
            RequestRecord(
                request_id=f"r{n}", team="t", model=MODEL, outcome="ok", prompt_tokens=10, completion_tokens=1
            )
            for n in range(records)
        ]
    )
    return own


def totals(log_id: str, requests: int) -> SidecarTotals:
    work = Work(10.0 * requests, 0.0, float(requests))
    finished = {MODEL: FinishedRequest(requests, 10 * requests, requests)}
    return SidecarTotals(log_id, True, None, finished, (TeamWork(MODEL, "t", work, Work()),))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.booleans())))
def test_totals_never_fall_and_count_each_log_once(received: list[tuple[str, int, bool]]):
    """Peers answer in any order, repeatedly, from other addresses and after restarts; the sidecar restarts, too."""
    fleet = FleetLog(counters(5))
    most: dict[str, int] = {}
    for log_id, requests, restart in received:
        fleet.receive(msgspec.json.decode(msgspec.json.encode(totals(log_id, requests)), type=SidecarTotals))
        fleet.receive(fleet.own_totals(at_end=True))
        most[log_id] = max(most.get(log_id, 0), requests)
        if restart:
            fleet = FleetLog(counters(5), fleet.provider().state())
        expected = 5 + sum(most.values())
        assert (expected, 10 * expected) == fleet.finished()[MODEL][:2]
        assert Work(10.0 * expected, 0.0, expected) == fleet.work()[MODEL, "t"]
