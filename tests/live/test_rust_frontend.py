"""vLLM's Rust frontend before the CPU engine: another HTTP server, other counting of requests that are aborted."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from exporters.catalogue import exposition_parser, vllm
from stack.lab import plan
from tests.support.engines import Engine, Engines, get
from tests.support.live_gateway import CHAT, LONG, Gate, running
from tests.support.wait import eventually

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(part, real_engines: Engines) -> Engine:
    return real_engines.with_rust_frontend(part("vllm-rs").path).up()


@pytest.fixture(scope="module")
def gate(engine, free_port, tmp_path_factory) -> Iterator[Gate]:
    policy = {"teams": {"demo": {}}, "upstreams": {"one": {"url": "{one}"}}}
    ports, folder = (free_port(), free_port()), tmp_path_factory.mktemp("rust")
    with running("rust", folder, policy, {"one": engine.spec.address}, ports) as found:
        eventually(lambda: get(f"{found.url}/-/ready") == "ready\n", "a ready gateway")
        yield found


def aborted(engine: Engine) -> float:
    return engine.shown().total(vllm.REQUEST_SUCCESS.name, finished_reason="abort") or 0.0


def test_frontend_and_engine_are_of_one_release(engine, part):
    version = json.loads(get(f"{engine.spec.address}/version"))
    assert {"version": part("engine").version, "rust_frontend_version": part("vllm-rs").version} == version


def test_exposition_is_open_metrics(engine, gate):
    """Whatever is asked for, and after a request every family of requests and tokens is in it."""
    gate.caller()(lambda client: client.chat.completions.create(**CHAT))
    with urllib.request.urlopen(f"{engine.spec.address}/metrics", timeout=30) as answer:
        kind, text = answer.headers["Content-Type"], answer.read().decode()
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    shown = exposition_parser.parse(text)
    needed = (vllm.NUM_REQUESTS_RUNNING, vllm.KV_CACHE_USAGE, vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS)
    assert [] == [metric.name for metric in needed if shown.total(metric.name) is None]


def test_requests_through_the_gateway_leave_true_records(engine, gate):
    before = engine.figure(vllm.GENERATION_TOKENS)
    caller = gate.caller()
    whole = caller(lambda client: client.chat.completions.create(**CHAT))
    one = caller.record()
    assert ("ok", "length", whole.usage.prompt_tokens, 12) == (
        one.outcome, one.finish_reason, one.prompt_tokens, one.completion_tokens,
    )  # fmt: skip
    events = caller(lambda client: client.chat.completions.create(**CHAT, stream=True))
    other = caller.record()
    assert plan.MODEL == events[0].model
    assert ("ok", one.prompt_tokens, 12) == (other.outcome, other.prompt_tokens, other.completion_tokens)
    assert 0 < other.ttft_ms <= other.e2e_ms
    eventually(lambda: 24 == engine.figure(vllm.GENERATION_TOKENS) - before, "the engine's count of both answers")


def test_aborted_request_is_counted_as_finished(engine, gate):
    """The Python frontend of the same release counts its tokens only."""
    before = aborted(engine)
    with gate.caller().client() as client, client.chat.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: 1 == aborted(engine) - before, "one aborted request at the engine")
    assert 0 == engine.running
