"""A real prefill and a real decode engine (ExampleConnector over a folder) behind a router's stand-in and the gateway:
each request is one request, whoever counts it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pair_router
import pytest
import requests
from engines import Engine, Engines
from test_gateway_live import Gate, running

from exporters.accounting.join import Joiner
from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue.metric import EngineRole, Metric
from exporters.engine import view as engine_view
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from stack.lab import plan

pytestmark = pytest.mark.engine

REQUESTS, OUTPUT = 4, 8
WORDS = 400  # of a prompt, which must fit into one step of the engine
POLICY = {
    "teams": {"demo": {}},
    "upstreams": {
        "pair": {
            "url": "{router}",
            "prefill_header": pair_router.PREFILL_HEADER,
            "decode_header": pair_router.DECODE_HEADER,
        }
    },
}


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
def pair(
    real_engines: Engines, free_port: Any, eventually: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
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


def test_a_request_of_a_pair_is_one_request(pair: Pair) -> None:
    before = {name: engine.shown() for name, engine in (("prefill", pair.prefill), ("decode", pair.decode))}
    first = {name: engine_view.view(page) for name, page in before.items()}
    for number in range(REQUESTS):
        answer = requests.post(
            f"{pair.gate.url}/v1/completions",
            json={
                "model": plan.MODEL,
                "prompt": f"{number} " + "the cache " * WORDS,
                "max_tokens": OUTPUT,
                "ignore_eos": True,
                "stream": True,
            },
            headers={
                "Authorization": f"Bearer {pair.gate.keys['demo']}",
                "X-Request-Id": pair.gate.offer(f"r{number}"),
            },
            timeout=60,
        )
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
