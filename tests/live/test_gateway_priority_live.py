"""Who goes first within a real vLLM that has priorities: as its clients like, or, through the gateway, as their bands
may. And what those that wait there are told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from exporters.catalogue import vllm
from tests.support.engines import Engine, Engines, get
from tests.support.live_gateway import CHAT, IDS, LONG, Gate, running
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

AHEAD: dict[str, dict[str, Any]] = {
    "body": {"extra_body": {"ignore_eos": True, "priority": -5}},
    "head": {"extra_headers": {"X-Vllm-Priority": "-5"}},
}  # fmt: skip
POLICY = {
    "teams": {"demo": {}, "later": {"band": "later"}},
    "bands": {"default": {"rank": 1}, "later": {"rank": 1, "engine_priority": 5}},
    "upstreams": {"engine": {"url": "{engine}"}},
}
WAITED = 400  # tokens of another request, which take about a second
TOKENS = 100  # the next one is served so much later that a busy client cannot take one for the other
Send = Callable[[str, dict[str, Any]], float]  # team, what is said besides -> when its answer was complete


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Iterator[Engine]:
    """One request at a time, so that all others wait."""
    found = real_engines.own("--max-num-seqs", "1", "--scheduling-policy", "priority").up()
    yield found
    found.end()


@pytest.fixture(scope="module")
def gate(engine: Engine, free_port: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with running(
        "gate", tmp_path_factory.mktemp("gate"), POLICY, {"engine": engine.spec.address}, (free_port(), free_port())
    ) as found:
        eventually(lambda: get(f"{found.url}/-/healthy"), within_s=30, what="the gateway being ready")
        yield found


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def served(engine: Engine, send: Send, *requests: tuple[str, dict[str, Any]]) -> list[int]:
    """The order in which requests, by number, are answered that arrive one after the other while the engine is busy."""
    with client(engine.spec.address) as holder, ThreadPoolExecutor() as pool:
        with holder.chat.completions.create(**LONG, stream=True) as held:
            next(held)
            ends = []
            for request in requests:
                ends.append(pool.submit(send, *request))
                eventually(
                    lambda: engine.waiting == len(ends) or any(end.done() for end in ends),
                    within_s=60,
                    what=f"{len(ends)} waiting requests",
                )
                assert [] == [end.result() for end in ends if end.done()], "answered while the engine had no room"
        times = [end.result(60) for end in ends]
    eventually(lambda: engine.running == 0, within_s=60, what="an idle engine")
    return sorted(range(len(times)), key=times.__getitem__)


def completed(url: str, key: str, said: dict[str, Any]) -> float:
    with client(url, key) as asking:
        answer, at = asking.chat.completions.create(**(CHAT | said | {"max_tokens": TOKENS})), time.monotonic()
    assert TOKENS == answer.usage.completion_tokens
    return at


@pytest.mark.parametrize("said", AHEAD.values(), ids=AHEAD)
def test_alone_a_vllm_obeys_whoever_asks_to_go_first(engine: Engine, said: dict[str, Any]):
    """What the gateway has to prevent; else the test below would prove nothing."""
    assert [1, 0] == served(engine, lambda _, more: completed(engine.spec.address, "none", more), ("", {}), ("", said))


@pytest.mark.parametrize("said", AHEAD.values(), ids=AHEAD)
def test_through_the_gateway_nobody_goes_before_its_band(engine: Engine, gate: Gate, said: dict[str, Any]):
    def send(team: str, more: dict[str, Any]) -> float:
        return completed(gate.url, gate.keys[team], more)

    eventually(lambda: engine.running == 0, within_s=60, what="an idle engine")
    assert [0, 1] == served(engine, send, ("demo", {}), ("demo", said))
    assert [1, 0] == served(engine, send, ("later", said), ("demo", {}))


def test_the_wait_in_the_engine_is_no_part_of_what_the_way_adds(engine: Engine, gate: Gate):
    """By the definitions of the engine itself, whose time to first token of one request begins when it is scheduled."""
    eventually(lambda: engine.running == 0, within_s=60, what="an idle engine")

    def streamed() -> None:
        with client(gate.url, gate.keys["demo"]) as asking:
            list(asking.chat.completions.create(**CHAT, stream=True, extra_headers={IDS: name}))

    name = gate.offer()
    with client(engine.spec.address) as holder, ThreadPoolExecutor() as pool:
        with holder.chat.completions.create(**LONG, stream=True) as held:
            next(held)
            answer = pool.submit(streamed)
            eventually(lambda: engine.waiting == 1, within_s=60, what="a waiting request")
            waits_s, made = time.monotonic(), engine.figure(vllm.GENERATION_TOKENS)
            eventually(lambda: engine.figure(vllm.GENERATION_TOKENS) > made + WAITED, "tokens of the other request")
            waited_ms = (time.monotonic() - waits_s) * 1000
        answer.result(60)
    (record,) = gate.records([name])
    assert waited_ms < record.engine_queue_ms
    assert record.ttft_ms > record.engine_queue_ms + record.engine_ttft_ms
    # a few milliseconds, on a machine at rest
    assert record.ttft_ms - record.engine_queue_ms - record.engine_ttft_ms < waited_ms
