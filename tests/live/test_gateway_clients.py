"""Official clients of three vendors' APIs, directly at a real vLLM and through the gateway: what they return and raise
is equal, and a refusal of the gateway raises what the client raises for that status at its vendor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest

from stack.lab import plan
from tests.support.engines import CONTEXT, Engine, Engines, get
from tests.support.live_gateway import LONG, Gate, running
from tests.support.official_clients import APIS, Api, Clients, outcome
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

POLICY = {
    "teams": {"demo": {}, "narrow": {"max_in_flight": 1}, "other": {"models": ["another"]}},
    "models": {plan.MODEL: {"max_model_len": CONTEXT}, "another": {}},
    "upstreams": {"one": {"url": "{one}"}},
}
OMIT = {"openai": openai.omit, "anthropic": anthropic.omit}
MISTAKES: dict[str, Callable[[Api], dict[str, Any]]] = {
    "model": lambda api: {"model": "none"},
    "type": lambda api: {"temperature": "hot"},
    "range": lambda api: {"temperature": -3},
    "output": lambda api: {api.limit: CONTEXT + 1},
    "prompt": lambda api: api.filled("cache " * 40_000),  # by its bytes it could fit, so the engine refuses it
    "text": lambda api: api.filled("cache " * 400_000),
    "missing": lambda api: {api.prompt: OMIT[api.library]},
    "number": lambda api: {api.prompt: 5},
}
# Fields that a method has not, and those that LiteLLM looks at itself.
OWN = {"missing", "number"}
UNFIT = {"count": {"type", "range", "output"}, "litellm-openai": OWN, "litellm-anthropic": OWN}
STREAMS = [(name, stream) for name in APIS for stream in (False, True) if name != "count" or not stream]
# Of a reason: the team or key, the text, and the classes that the libraries have for such a refusal of their vendors.
LIBRARIES = ("openai", "anthropic", "litellm-openai", "litellm-anthropic")
REFUSALS = {
    "unknown_key": ("vw-demo-wrong", "a", ["AuthenticationError"] * 4),
    "model_not_allowed": ("other", "a", ["PermissionDeniedError"] * 2 + ["APIError", "APIConnectionError"]),
    "team_limit": ("narrow", "a", ["RateLimitError"] * 4),
    "body_too_large": (
        "demo", "a" * (33 << 20), ["APIStatusError", "ContentTooLargeError", "APIError", "BadRequestError"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Engine:
    return real_engines.shared().up()


@pytest.fixture(scope="module")
def gate(engine: Engine, free_port: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder, ports = tmp_path_factory.mktemp("clients"), (free_port(), free_port())
    with running("clients", folder, POLICY, {"one": engine.spec.address}, ports) as gate:
        eventually(lambda: get(f"{gate.url}/-/healthy"), within_s=30, what="the gateway being ready")
        yield gate


def of(gate: Gate, team: str) -> Clients:
    return Clients(gate.url, gate.keys.get(team, team), plan.MODEL)


@pytest.fixture
def both(engine: Engine, gate: Gate) -> tuple[Clients, Clients]:
    return Clients(engine.spec.address, "none", plan.MODEL), of(gate, "demo")


def compare(
    both: tuple[Clients, Clients], name: str, stream: bool, **change: Any
) -> tuple[type[Exception] | None, Any]:
    """Return what a call comes to, which is the same directly and through the gateway."""
    body = change | ({"stream": True} if stream else {})
    direct, through = (outcome(lambda at=at: at.call(name, **body)) for at in both)
    assert direct == through
    return direct


@pytest.mark.parametrize(("name", "stream"), STREAMS)
def test_text_is_that_of_the_engine(both: tuple[Clients, Clients], name: str, stream: bool):
    error, text = compare(both, name, stream, temperature=0)
    assert (None, True) == (error, bool(text))


@pytest.mark.parametrize(
    ("name", "stream", "mistake"),
    [(*call, mistake) for call in STREAMS for mistake in MISTAKES if mistake not in UNFIT.get(call[0], ())],
)
def test_an_error_is_that_of_the_engine(both: tuple[Clients, Clients], name: str, stream: bool, mistake: str):
    error, status = compare(both, name, stream, **MISTAKES[mistake](APIS[name]))
    assert APIS[name].library == getattr(error, "__module__", "").partition(".")[0]
    assert status == (404 if mistake == "model" else 400)


def test_an_unknown_response_is_not_found(both: tuple[Clients, Clients]):
    found = [outcome(lambda at=at: at.client("openai").responses.retrieve("resp_none")) for at in both]
    assert 2 * [(openai.NotFoundError, 404)] == found


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_refusal_is_that_of_the_vendor(gate: Gate, reason: str):
    team, text, classes = REFUSALS[reason]
    clients, expected = of(gate, team), dict(zip(LIBRARIES, classes, strict=True))
    with ExitStack() as stack:
        if reason == "team_limit":
            next(iter(stack.enter_context(clients.call("chat", **LONG, stream=True))))
        for name, stream in STREAMS:
            if (reason, name) == ("team_limit", "count"):
                continue  # takes no slot
            body = APIS[name].filled(text) | ({"stream": True} if stream else {})
            error, _ = outcome(lambda name=name, body=body: clients.call(name, **body))
            key = name if name in expected else APIS[name].library
            assert (key, expected[key]) == (key, getattr(error, "__name__", ""))
