"""A real prefill and a real decode engine behind a router's stand-in and the gateway: each request is one request,
whoever counts it, and the engine that stops is the one that is blamed.

ExampleConnector over a folder; NixlConnector over TCP where VLLM_WATCH_NIXL is a folder with nixl in it (`pip install
--target FOLDER nixl`, 241 MB), which is no part of the lab."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from exporters.accounting.join import Joiner
from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue.metric import EngineRole, Metric
from exporters.engine import view as engine_view
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from stack.lab import plan
from tests.support import pair_router
from tests.support.engines import Engine, Engines, engine_states
from tests.support.live_gateway import Gate, running
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

REQUESTS, OUTPUT = 4, 8
WORDS = 400  # of a prompt, which must fit into one step of the engine
PAIR = {"url": "{router}", "prefill_header": pair_router.PREFILL_HEADER, "decode_header": pair_router.DECODE_HEADER}
POLICY = {"teams": {"demo": {}}, "upstreams": {"pair": PAIR}}
# the gateway sends the two engines nothing but probes
WATCHED = {
    "teams": {"demo": {}},
    "upstreams": {"pair": PAIR, "prefill": {"url": "{prefill}"}, "decode": {"url": "{decode}"}},
    "models": {plan.MODEL: {"upstreams": ["pair"]}},
}
NIXL = os.environ.get("VLLM_WATCH_NIXL")
LIMITS = {"out_s": 8.0, "hung_s": 10.0}  # of liveness; a busy machine may keep the decode engine from a step for 4 s


@dataclass
class Pair:
    prefill: Engine
    decode: Engine
    gate: Gate

    def grown(self, metric: Metric, before: dict[str, exposition_parser.Exposition], **labels: str) -> list[float]:
        """Return the growth on the prefill and on the decode engine."""
        pages = zip((self.prefill, self.decode), before.values(), strict=True)
        return [
            sum(value for its, value in engine.shown().of(metric.name) if labels.items() <= its.items())
            - sum(value for its, value in then.of(metric.name) if labels.items() <= its.items())
            for engine, then in pages
        ]


@pytest.fixture(scope="module")
def pair(real_engines: Engines, free_port: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, shared = tmp_path_factory.mktemp("pair"), tmp_path_factory.mktemp("kv")

    def of(kv_role: str) -> Engine:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": kv_role,
            "kv_connector_extra_config": {"shared_storage_path": str(shared)},
        }
        return real_engines.own("--kv-transfer-config", json.dumps(transfer), "--max-num-batched-tokens", "8192")

    prefill, decode = of("kv_producer"), of("kv_consumer")
    prefill.up(), decode.up()
    with (
        pair_router.routing(prefill.spec.address, decode.spec.address) as router,
        running("pair", folder, POLICY, {"router": router}, (free_port(), free_port())) as gate,
    ):
        eventually(lambda: requests.get(f"{gate.url}/-/healthy", timeout=5).ok, what="the gateway being ready")
        yield Pair(prefill, decode, gate)


def ask(gate: Gate, prompt: str, name: str) -> requests.Response:
    """A stream of OUTPUT tokens."""
    return requests.post(
        f"{gate.url}/v1/completions",
        json={"model": plan.MODEL, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True},
        headers={"Authorization": f"Bearer {gate.keys['demo']}", "X-Request-Id": gate.offer(name)},
        timeout=120,
    )


def test_a_request_of_a_pair_is_one_request(pair: Pair) -> None:
    before = {name: engine.shown() for name, engine in (("prefill", pair.prefill), ("decode", pair.decode))}
    first = {name: engine_view.view(page) for name, page in before.items()}
    for number in range(REQUESTS):
        answer = ask(pair.gate, f"{number} " + "the cache " * WORDS, f"r{number}")
        assert answer.ok, answer.text
        assert pair_router.PREFILL_HEADER not in answer.headers
    records = pair.gate.records(pair.gate.offered)

    addresses = pair.prefill.spec.address, pair.decode.spec.address
    assert {addresses} == {(record.prefill_engine, record.decode_engine) for record in records}
    assert {None} == {record.engine_ttft_ms for record in records}
    assert None not in {record.ttft_ms for record in records}
    assert [REQUESTS, REQUESTS] == pair.grown(vllm.REQUEST_SUCCESS, before), "so a sum over both counts each twice"
    computed, _ = pair.grown(vllm.PROMPT_TOKENS_BY_SOURCE, before, source="local_compute")
    _, received = pair.grown(vllm.PROMPT_TOKENS_BY_SOURCE, before, source="external_kv_transfer")
    assert computed >= REQUESTS * WORDS
    assert 0.9 * computed < received <= computed, "all but the last block of each prompt"

    counters = RequestCounters(BoundedNames(), BoundedNames())
    joined = Joiner(counters, {"p": (), "d": ()}, {}, None, 2.0, {}, {"p": EngineRole.PREFILL, "d": EngineRole.DECODE})
    now = time.time()
    joined.settle(now - 20, now - 20, at_end=True)
    for name, role in (("p", "prefill"), ("d", "decode")):
        joined.on_scrape(name, first[role], now - 15, now - 15, now - 15, now - 15, counters.finished())
    for record in records:
        counters.add(record)
    for name, engine in (("p", pair.prefill), ("d", pair.decode)):
        joined.on_scrape(name, engine_view.view(engine.shown()), now, now, now, now, counters.finished())
    state = joined.reconciler.state().models[plan.MODEL]
    assert (REQUESTS, REQUESTS * OUTPUT) == (state.engine.requests, state.engine.completion_tokens)
    assert state.engine[:3] == (REQUESTS, sum(record.prompt_tokens or 0 for record in records), REQUESTS * OUTPUT)


# ---- the prefill engine stops


@pytest.mark.parametrize(
    "connector",
    ["folder", pytest.param("nixl", marks=pytest.mark.skipif(not NIXL, reason="VLLM_WATCH_NIXL is not set"))],
)
@pytest.mark.breaks_engine
def test_stopped_prefill_engine_is_blamed(
    real_engines: Engines, request: pytest.FixtureRequest, connector: str, free_port: Any, tmp_path: Any
) -> None:
    """It stops between prefill and transfer. A folder needs no engine to be read, so there the decode engine waits for
    nobody; and as a prompt of one token ends a consumer of ExampleConnector (0.32), no idle engine is probed there."""
    nixl = connector == "nixl"
    pair = _over_nixl(real_engines, free_port) if nixl else request.getfixturevalue("pair")
    urls = {"prefill": pair.prefill.spec.address, "decode": pair.decode.spec.address}
    seen: dict[str, set[tuple[str, str]]] = {name: set() for name in urls}
    core, stopped = pair.prefill.part("EngineCore"), threading.Event()

    def stop() -> None:
        os.kill(core, signal.SIGSTOP)
        stopped.set()

    def state() -> str:
        """The one of the prefill engine."""
        states = engine_states(gate.metrics_url)
        for name, found in seen.items():
            found.add(states[name])
        return states["prefill"][0]

    def out_of_rotation() -> bool:
        state()
        return not requests.get(f"{gate.metrics_url}/-/engine-ready?upstream=prefill", timeout=5).ok

    with (
        pair_router.routing(*urls.values(), between=stop) as router,
        running(
            "watched", tmp_path, WATCHED, {**urls, "router": router}, (free_port(), free_port()),
            LIMITS | ({} if nixl else {"idle_probe_s": None}),
        ) as gate,
    ):  # fmt: skip
        idle = ("idle", "no_work")
        eventually(lambda: {engine_states(gate.metrics_url)[name] for name in urls} == {idle}, what="idle engines")
        clients = [threading.Thread(target=ask, args=(gate, "who stops " * WORDS, "stuck"), daemon=True)]
        if not nixl:
            clients.insert(0, threading.Thread(target=_decode, args=(pair.prefill,), daemon=True))
            clients[0].start()
            # Stopped before it works, an engine looks idle.
            eventually(lambda: pair.prefill.figure(vllm.NUM_REQUESTS_RUNNING) == 1, what="work of the prefill engine")
        clients[-1].start()
        try:
            eventually(stopped.is_set, what="the prefill")
            eventually(out_of_rotation, what="a prefill engine out of rotation")
            eventually(lambda: state() == "hung", what="a prefill engine that counts as hung")
        finally:
            os.kill(core, signal.SIGCONT)
            for client in clients:
                client.join(60)
    assert ("hung", "probe_silent" if nixl else "steps_stopped") in seen["prefill"]
    assert {state for state, _ in seen["decode"]} <= {"healthy", "idle", "slow", "suspect"}
    assert not nixl or ("slow", "kv_fetch") in seen["decode"]


def _decode(engine: Engine) -> None:
    """A request of its own at one engine, long enough to run when the engine is stopped."""
    body = {"model": plan.MODEL, "prompt": "own work", "max_tokens": 4000, "ignore_eos": True}
    requests.post(f"{engine.spec.address}/v1/completions", json=body, timeout=120)


def _over_nixl(real_engines: Engines, free_port: Any) -> Pair:
    def of(kv_role: str) -> Engine:
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role}
        env = {
            "PYTHONPATH": str(NIXL),
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        return real_engines.own("--kv-transfer-config", json.dumps(transfer), "--max-num-batched-tokens", "8192", **env)

    prefill, decode = of("kv_producer"), of("kv_consumer")
    return Pair(prefill.up(), decode.up(), None)
