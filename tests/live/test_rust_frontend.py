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


@pytest.fixture(scope="module")
def used(engine, gate) -> Engine:
    """The engine once it has counted a request, since an idle one does not show all families."""
    before = counts(engine)
    gate.caller()(lambda client: client.chat.completions.create(**CHAT))
    eventually(lambda: more(before, 1, 1, 0, 12) == counts(engine), "a request that is counted")
    return engine


def counts(engine: Engine) -> tuple[float, ...]:
    """First tokens, ended requests, aborted ones among them, generated tokens."""
    shown = engine.shown()
    found = (
        shown.total(vllm.TIME_TO_FIRST_TOKEN.name + "_count"),
        shown.total(vllm.E2E_REQUEST_LATENCY.name + "_count"),
        shown.total(vllm.REQUEST_SUCCESS.name, finished_reason="abort"),
        shown.total(vllm.GENERATION_TOKENS.name),
    )
    return tuple(value or 0.0 for value in found)


def more(before: tuple[float, ...], *added: float) -> tuple[float, ...]:
    """The counts after these were added to the first of them."""
    return tuple(count + value for count, value in zip(before, added, strict=False))


def test_frontend_and_engine_are_healthy_and_of_one_release(engine, part):
    assert "" == get(engine.spec.health)
    version = json.loads(get(f"{engine.spec.address}/version"))
    assert {"version": part("engine").version, "rust_frontend_version": part("vllm-rs").version} == version


def test_exposition_is_open_metrics(used):
    """Whatever is asked for, and every family of requests and tokens is in it."""
    with urllib.request.urlopen(f"{used.spec.address}/metrics", timeout=30) as answer:
        kind, text = answer.headers["Content-Type"], answer.read().decode()
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    shown = exposition_parser.parse(text)
    needed = (vllm.NUM_REQUESTS_RUNNING, vllm.KV_CACHE_USAGE, vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS)
    assert [] == [metric.name for metric in needed if shown.total(metric.name) is None]


def test_requests_through_the_gateway_leave_true_records(used, gate):
    before, caller = counts(used), gate.caller()
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
    eventually(lambda: more(before, 2, 2, 0, 24) == counts(used), "the engine's count of both requests")


def test_aborted_request_is_counted_as_finished(used, gate):
    """The Python frontend of the same release counts its tokens only."""
    before, caller = counts(used), gate.caller()
    with caller.client() as client, client.chat.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        eventually(lambda: more(before, 1) == counts(used)[:1], "its first token")
    assert "client_abort" == caller.record().outcome
    eventually(lambda: more(before, 1, 1, 1) == counts(used)[:3], "one aborted request at the engine")
    eventually(lambda: 0 == used.running, "an idle engine")
