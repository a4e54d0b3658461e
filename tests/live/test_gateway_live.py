"""The gateway between the official OpenAI client and a real vLLM: what clients see, what the engine does for them, and
the books of the whole file.

Two engines on the CPU: the second takes few requests at once and is killed towards the end, so the order of the tests
matters. Gateways are processes, as people run them. Whatever a client sends bears an id of its own, retries too, so
that the last test can set side by side what was offered, what is on record and what the engines counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import socket
import struct
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from exporters.accounting import cost
from exporters.accounting.cost_from_log import from_log
from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue.gateway import REQUESTS
from exporters.catalogue.metric import Metric
from exporters.requests.record import RequestRecord
from stack.lab import plan
from tests.support.engines import CONTEXT, Engine, Engines, get
from tests.support.live_gateway import CHAT, GATES, IDS, LIMITED, LONG, SOON_S, Ask, Caller, Gate, running
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

TEXT: dict[str, Any] = {
    "model": plan.MODEL,
    "prompt": "the cache",
    "max_tokens": 12,
    "extra_body": {"ignore_eos": True},
}
STREAM: dict[str, Any] = {"stream": True}

PLACES = {"one": "one", "stable": "one", "canary": "one", "two": "two"}  # upstream -> engine


# ---- the engines


@pytest.fixture(scope="module")
def engines(real_engines: Engines) -> Iterator[dict[str, Engine]]:
    found = {
        "one": real_engines.shared(),
        "two": real_engines.own("--max-num-seqs", str(LIMITED), "--max-num-queued-reqs", str(LIMITED)),
    }
    yield {name: engine.up() for name, engine in found.items()}
    found["two"].end()


@pytest.fixture(scope="module")
def gates(
    engines: dict[str, Engine],
    before: dict[str, exposition_parser.Exposition],
    free_port: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Gate]]:
    urls = {name: engine.spec.address for name, engine in engines.items()}
    with contextlib.ExitStack() as stack:
        found = {
            name: stack.enter_context(
                running(name, tmp_path_factory.mktemp(name), policy, urls, (free_port(), free_port()))
            )
            for name, policy in GATES.items()
        }
        for name, gate in found.items():
            eventually(lambda gate=gate: get(f"{gate.url}/-/healthy"), within_s=30, what=f"gateway {name} being ready")
        yield found


@pytest.fixture
def terms(gates: dict[str, Gate]) -> Gate:
    return gates["terms"]


each_way_once = pytest.mark.parametrize(("way", "stream"), [("sync", False), ("async", True)])


@pytest.fixture(params=["sync", "async"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ask(terms: Gate, way: str) -> Caller:
    return terms.caller(way=way)


@pytest.fixture(scope="module")
def before(engines: dict[str, Engine]) -> dict[str, exposition_parser.Exposition]:
    """What each engine had counted before the first request of this file."""
    return {name: engine.shown() for name, engine in engines.items()}


# ---- the gateways


@pytest.fixture
def one(engines: dict[str, Engine]) -> Engine:
    return engines["one"]


@pytest.fixture
def two(engines: dict[str, Engine]) -> Engine:
    return engines["two"]


# ---- what clients see


def test_a_reply_and_its_record(ask: Caller):
    got = ask(lambda client: client.chat.completions.create(**CHAT))
    record = ask.record()
    assert record.request_id == got._request_id
    assert (12, "length", "assistant") == (
        got.usage.completion_tokens,
        got.choices[0].finish_reason,
        got.choices[0].message.role,
    )
    assert ("demo", "ok", 200, got.usage.prompt_tokens, 12, "length", False, "one", plan.MODEL) == (
        record.team,
        record.outcome,
        record.status,
        record.prompt_tokens,
        record.completion_tokens,
        record.finish_reason,
        record.stream,
        record.upstream,
        record.model,
    )
    assert None not in (record.engine_version, record.cached_tokens, record.engine_queue_ms, record.engine_ttft_ms)
    assert (None, None) == (record.ttft_ms, record.tpot_ms)


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": {"include_usage": True}}]
)
def test_a_stream_has_the_usage_that_was_asked_for_and_no_other(ask: Caller, options: dict[str, Any]):
    *chunks, last = ask(lambda client: client.chat.completions.create(**CHAT | STREAM | options))
    asked = bool(options and options["stream_options"]["include_usage"])
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert [asked, not asked] == [last.usage is not None, bool(last.choices)]
    assert "length" == (chunks[-1] if asked else last).choices[0].finish_reason
    record = ask.record()
    assert ("ok", 12, "length", True) == (record.outcome, record.completion_tokens, record.finish_reason, record.stream)
    assert not asked or (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        record.prompt_tokens,
        record.completion_tokens,
    )
    assert 0 < (record.ttft_ms or 0) < (record.e2e_ms or 0)
    assert record.tpot_ms is None or record.tpot_ms > 0  # null when a stalled machine delivers all tokens in one read


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(ask: Caller, stream: bool):
    got = ask(lambda client: client.completions.create(**TEXT, stream=stream))
    chunks = got if stream else [got]
    assert "".join(chunk.choices[0].text for chunk in chunks)
    assert (stream, "ok", 12, "length", "/v1/completions") == (
        (record := ask.record()).stream,
        record.outcome,
        record.completion_tokens,
        chunks[-1].choices[0].finish_reason,
        record.route,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_several_prompts(ask: Caller, stream: bool):
    """The usage counts each prompt once, whatever n is, and all texts; time per token is no figure of several texts
    that grow at once."""
    got = ask(
        lambda client: client.completions.create(
            **TEXT | {"prompt": ["the cache", "a queue of"], "n": 2}, stream=stream
        )
    )
    assert {0, 1, 2, 3} == {choice.index for chunk in (got if stream else [got]) for choice in chunk.choices}
    record = ask.record()
    single = ask(lambda client: client.completions.create(**TEXT))
    other = ask(lambda client: client.completions.create(**TEXT | {"prompt": "a queue of"}))
    assert ("ok", 2, 2, 4 * 12, single.usage.prompt_tokens + other.usage.prompt_tokens, None) == (
        record.outcome,
        record.n,
        record.prompts,
        record.completion_tokens,
        record.prompt_tokens,
        record.tpot_ms,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_three_answers_to_one_chat(ask: Caller, stream: bool):
    got = ask(lambda client: client.chat.completions.create(**CHAT, n=3, stream=stream))
    finished = [
        (choice.index, choice.finish_reason)
        for chunk in (got if stream else [got])
        for choice in chunk.choices
        if choice.finish_reason
    ]
    assert [(index, "length") for index in range(3)] == sorted(finished)
    assert (3, 3 * 12, None) == ((record := ask.record()).n, record.completion_tokens, record.tpot_ms)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@each_way_once
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_is_called(ask: Caller, choice: Any, stream: bool):
    """The engine holds the random model to the tool's schema, once or several times; in a stream the pieces of a call
    are content like any other."""
    body = {name: value for name, value in CHAT.items() if name != "extra_body"} | {
        "max_tokens": 1000,
        "tools": [WEATHER],
        "tool_choice": choice,
    }
    got = ask(lambda client: client.chat.completions.create(**body, stream=stream))
    said = [choice.delta for chunk in got for choice in chunk.choices] if stream else [got.choices[0].message]
    calls = [call for each in said for call in each.tool_calls or ()]
    assert {"weather"} == {call.function.name for call in calls if call.function.name}
    first = [call for call in calls if call.index == 0] if stream else calls[:1]
    assert json.loads("".join(call.function.arguments or "" for call in first))["city"] in ("Oslo", "Rome")
    record = ask.record()
    assert ("ok", stream, stream) == (record.outcome, record.stream, record.ttft_ms is not None)
    assert (got[-1] if stream else got).choices[0].finish_reason == record.finish_reason
    assert 0 < (record.completion_tokens or 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_may_be_left_alone(ask: Caller, stream: bool):
    ask(lambda client: client.chat.completions.create(**CHAT, tools=[WEATHER], tool_choice="auto", stream=stream))
    assert ("ok", 12) == ((record := ask.record()).outcome, record.completion_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_come_with_every_token(ask: Caller, stream: bool):
    got = ask(lambda client: client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=stream))
    said = [choice.logprobs for chunk in (got if stream else [got]) for choice in chunk.choices if choice.logprobs]
    assert [2] * 12 == [len(token.top_logprobs) for each in said for token in each.content]
    assert ("ok", 12) == ((record := ask.record()).outcome, record.completion_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api(ask: Caller, stream: bool):
    body = {"model": plan.MODEL, "input": "the cache", "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
    got = ask(lambda client: client.responses.create(**body, stream=stream))
    answer = got[-1].response if stream else got
    assert ("incomplete", "max_output_tokens") == (answer.status, answer.incomplete_details.reason)
    record = ask.record()
    assert ("ok", answer.usage.input_tokens, 12, "length", stream, "/v1/responses", stream) == (
        record.outcome,
        record.prompt_tokens,
        record.completion_tokens,
        record.finish_reason,
        record.stream,
        record.route,
        record.ttft_ms is not None,
    )
    if stream:
        assert answer.output_text == "".join(event.delta for event in got if event.type == "response.output_text.delta")


def test_models_are_listed_and_leave_no_record(ask: Caller):
    """Those of the policy, whatever one engine knows of them."""
    assert [plan.MODEL, "another"] == [model.id for model in ask(lambda client: client.models.list()).data]
    assert {} == ask.sent


# ---- errors are the client's own


@dataclass(frozen=True)
class Wrong:
    """What is asked wrongly, and what the client makes of the answer. code: what the answer calls it; that of the
    engine is the status."""

    error: type[openai.APIStatusError]
    reason: str
    code: str
    body: dict[str, Any] = field(default_factory=dict)
    team: str = "demo"
    said: str = ""


MANY_WORDS = [{"role": "user", "content": "cache " * 40000}]  # the engine counts 40,000; by bytes it could be 20,000
MISTAKES = {
    "key": Wrong(openai.AuthenticationError, "unknown_key", "unknown_key", team="vw-demo-wrong"),
    "another team's model": Wrong(openai.PermissionDeniedError, "model_not_allowed", "model_not_allowed", team="other"),
    "no such model": Wrong(openai.NotFoundError, "bad_request", "404", {"model": "none"}, said="`none` does not exist"),
    "the team's prompts": Wrong(
        openai.BadRequestError, "prompt_too_long", "prompt_too_long", {"messages": MANY_WORDS}, team="short"
    ),
    "the team's output": Wrong(openai.BadRequestError, "output_too_long", "output_too_long", team="brief"),
    "the context, for sure": Wrong(
        openai.BadRequestError, "context_too_long", "context_too_long", {"messages": MANY_WORDS * 2}
    ),
    "the context, with the output": Wrong(
        openai.BadRequestError, "context_too_long", "context_too_long", {"max_tokens": CONTEXT + 1}
    ),
    "the context, by the engine's count": Wrong(
        openai.BadRequestError, "bad_request", "400", {"messages": MANY_WORDS}, said="maximum context length"
    ),
    "a parameter": Wrong(
        openai.BadRequestError, "bad_request", "400", {"temperature": -3}, said="temperature must be non-negative"
    ),
}


@each_way_once
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_once_and_by_its_class(terms: Gate, way: str, name: str, stream: bool):
    """A client that would try twice more does not, because the same would be refused again. One record each."""
    wrong = MISTAKES[name]
    ask = terms.caller(wrong.team, way, retries=2)
    with pytest.raises(openai.APIStatusError) as told:
        ask(lambda client: client.chat.completions.create(**CHAT | wrong.body, stream=stream))
    record = ask.record()
    assert (wrong.error, wrong.code) == (type(told.value), told.value.code)
    assert wrong.said in told.value.message
    assert record.request_id == told.value.request_id
    assert ("rejected", wrong.reason, told.value.status_code, "rejected") == (
        record.outcome,
        record.reason,
        record.status,
        record.finish_reason,
    )
    assert (wrong.reason == "bad_request") == (record.upstream is not None)


def test_what_the_engine_does_not_serve_is_refused_by_it(ask: Caller):
    """A model of texts has no embeddings."""
    with pytest.raises(openai.NotFoundError):
        ask(lambda client: client.embeddings.create(model=plan.MODEL, input="x"))
    assert ("rejected", "bad_request", 404, "one") == (
        (record := ask.record()).outcome,
        record.reason,
        record.status,
        record.upstream,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_output_is_limited_to_what_the_team_may_have(terms: Gate, way: str, stream: bool):
    ask = terms.caller("clamped", way)
    ask(lambda client: client.chat.completions.create(**LONG, stream=stream))
    assert ("ok", 4, "length") == ((record := ask.record()).outcome, record.completion_tokens, record.finish_reason)


def test_client_retries_as_told_and_gets_its_answer(terms: Gate, way: str, one: Engine):
    """The team may have one request in flight, and has one. The client's own retries do the rest, once that has
    ended."""
    first, once, ask = terms.caller("narrow"), terms.caller("narrow", way), terms.caller("narrow", way, retries=2)
    with first.client() as client, ThreadPoolExecutor() as pool:
        stream = client.chat.completions.create(**LONG, stream=True)
        next(stream)
        with pytest.raises(openai.RateLimitError) as told:
            once(lambda client: client.chat.completions.create(**CHAT))
        assert ("team_limit", str(int(once.record().retry_after_s or 0))) == (
            told.value.code,
            told.value.response.headers["Retry-After"],
        )
        answer = pool.submit(ask, lambda client: client.chat.completions.create(**CHAT))
        eventually(lambda: ask.records(), what="the refusal being on record")
        stream.close()
        assert 12 == answer.result(60).usage.completion_tokens
    *refused, served = ask.records()
    at = list(ask.sent.values())
    assert {("rejected", "team_limit", 429)} == {(record.outcome, record.reason, record.status) for record in refused}
    assert ("ok", 200) == (served.outcome, served.status)
    assert 1 <= (refused[0].retry_after_s or 0) <= at[1] - at[0]
    eventually(lambda: one.running == 0, within_s=SOON_S)


# ---- clients that leave


Begun = Callable[[], object]


def closes_its_stream(gate: Gate, begun: Begun) -> str:
    caller = gate.caller()
    with caller.client() as client:
        stream = client.chat.completions.create(**LONG, stream=True)
        for _ in range(4):
            next(stream)
        begun()
        stream.close()
    return next(iter(caller.sent))


def goes_in_the_middle_of_its_stream(gate: Gate, begun: Begun) -> str:
    async def reading(client: openai.AsyncOpenAI) -> None:
        async for _ in await client.chat.completions.create(**LONG | STREAM):
            pass

    return left(gate, begun, reading)


def goes_before_its_reply(gate: Gate, begun: Begun) -> str:
    async def waiting(client: openai.AsyncOpenAI) -> None:
        await client.chat.completions.create(**LONG)

    return left(gate, begun, waiting)


def left(gate: Gate, begun: Begun, does: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> str:
    """A task that is cancelled once the engine is at it."""
    caller = gate.caller(way="async")

    async def case() -> None:
        async with caller.async_client() as client:
            task = asyncio.ensure_future(does(client))
            await asyncio.to_thread(begun)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(case())
    return next(iter(caller.sent))


def resets_its_connection(gate: Gate, begun: Begun) -> str:
    """A machine that is gone: no farewell, and whatever is still on the way to it is thrown away."""
    host, port = gate.url[7:].split(":")
    name = gate.offer()
    body = json.dumps(
        {field: value for field, value in (LONG | STREAM | LONG["extra_body"]).items() if field != "extra_body"}
    ).encode()
    headers = {
        "Host": host,
        "Authorization": f"Bearer {gate.keys['demo']}",
        "Content-Type": "application/json",
        "Content-Length": len(body),
        IDS: name,
    }
    head = "".join(f"{field}: {value}\r\n" for field, value in headers.items())
    with socket.create_connection((host, int(port)), timeout=SOON_S) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
        seen = b""
        while seen.count(b"data: ") < 4:
            seen += (got := connection.recv(4096))
            assert got, seen
        begun()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return name


@pytest.mark.parametrize(
    "leaves", [closes_its_stream, goes_in_the_middle_of_its_stream, goes_before_its_reply, resets_its_connection]
)
def test_a_client_that_leaves_takes_its_request_with_it(terms: Gate, one: Engine, leaves: Callable[[Gate, Begun], str]):
    eventually(lambda: one.running == 0, within_s=SOON_S, what="an idle engine")
    before, made = one.abandoned, one.figure(vllm.GENERATION_TOKENS)
    name = leaves(
        terms, lambda: eventually(lambda: one.figure(vllm.GENERATION_TOKENS) > made, within_s=SOON_S, what="tokens")
    )
    (record,) = terms.records([name])
    assert ("client_abort", "client_hangup", "abort") == (record.outcome, record.reason, record.finish_reason)
    eventually(lambda: one.running == 0, within_s=SOON_S, what="the engine being idle again")
    assert before + 1 == one.abandoned
    assert one.figure(vllm.GENERATION_TOKENS) - made < LONG["max_tokens"] / 2


@pytest.mark.parametrize("route", ["chat", "messages"])
def test_early_disconnect_is_charged_to_its_team(terms: Gate, one: Engine, route: str):
    """All but the end of an answer without a token on the bill: what it got is on record as an estimate, and `cost`
    charges it to the team."""
    eventually(lambda: one.running == 0, within_s=SOON_S, what="an idle engine")
    made = one.figure(vllm.GENERATION_TOKENS)
    name, read = terms.offer(), 60
    body = {"model": plan.MODEL, "messages": CHAT["messages"], "max_tokens": 30000, "stream": True, "ignore_eos": True}
    body["temperature"] = 0  # /v1/messages takes no ignore_eos, and a drawn end-of-text token would end the answer
    mark = b'"content":"' if route == "chat" else b"text_delta"
    request = urllib.request.Request(
        f"{terms.url}/v1/{'chat/completions' if route == 'chat' else 'messages'}", json.dumps(body).encode(),
        {"Authorization": f"Bearer {terms.keys['leaver']}", "Content-Type": "application/json", IDS: name},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=SOON_S) as answer:
        seen = sum(mark in answer.readline() for _ in range(4 * read))
    (record,) = terms.records([name])
    assert ("client_abort", None) == (record.outcome, record.completion_tokens)
    eventually(lambda: one.running == 0, within_s=SOON_S, what="the engine being idle again")
    worked = one.figure(vllm.GENERATION_TOKENS) - made
    # The team has no other streams: what they had hidden (reasoning, tool calls) would be in the tokens per event that
    # are learned.
    assert 0 < seen - 2 <= (record.est_completion_tokens or 0) <= 1.1 * worked
    assert (record.prompt_tokens or record.est_prompt_tokens or 0) > 0
    told = cost.report(from_log([terms.log]), "team")
    leaver = next(row for row in told["rows"] if row["team"] == "leaver")
    assert 0 < (record.e2e_ms or 0) / 3.6e6 <= leaver["aborted_gpu_hours"] * 1.001
    lines = [one for one in terms.lines() if one.team == "leaver"]
    assert sum(one.est_completion_tokens or 0 for one in lines) == leaver["est_completion_tokens"]
    assert sum(one.completion_tokens or 0 for one in lines) == leaver["completion_tokens"], (
        "estimates are in no exact figure"
    )


def test_a_reply_that_takes_too_long_is_broken_off(terms: Gate, one: Engine):
    before, ask = one.abandoned, terms.caller("hurried")
    with pytest.raises(openai.InternalServerError) as told:
        ask(lambda client: client.chat.completions.create(**LONG))
    assert (504, "total_timeout") == (told.value.status_code, told.value.code)
    assert ("timeout", "total_timeout", 504) == ((record := ask.record()).outcome, record.reason, record.status)
    eventually(lambda: one.running == 0, within_s=SOON_S, what="the engine being idle again")
    assert before + 1 == one.abandoned


# ---- many at once


def at_once(gate: Gate, asks: Mapping[str, Ask], most: int) -> dict[str, Any]:
    """What became of each request, by its id: what the client returned, of a stream the list of its events, or what it
    raised."""
    caller, room = gate.caller(way="async"), asyncio.Semaphore(most)

    async def each(client: openai.AsyncOpenAI, ask: Ask) -> Any:
        async with room:
            got = await ask(client)
            return [event async for event in got] if isinstance(got, openai.AsyncStream) else got

    async def case() -> list[Any]:
        async with caller.async_client() as client:
            return await asyncio.gather(*(each(client, ask) for ask in asks.values()), return_exceptions=True)

    found = dict(zip(asks, asyncio.run(case()), strict=True))
    assert set(asks) == set(caller.sent)
    return found


def chat(name: str, body: dict[str, Any]) -> Ask:
    return lambda client: client.chat.completions.create(**body, extra_headers={IDS: name})


def within(n: int, share: float, sure: float = 0.999) -> tuple[int, int]:
    """The interval of a binomial count that is left with this certainty in the middle."""
    chances = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
    sums = list(itertools.accumulate(chances))
    return next(k for k in range(n + 1) if sums[k] > (1 - sure) / 2), next(
        k for k in range(n + 1) if sums[k] >= (1 + sure) / 2
    )


def variants(gate: Gate, prompts: list[str], mark: str) -> dict[str, str | None]:
    """The arm that answered each prompt."""
    bodies = {
        f"{mark}-{prompt}".replace(" ", "-"): CHAT
        | {"max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
        for prompt in prompts
    }
    got = at_once(gate, {name: chat(name, body) for name, body in bodies.items()}, most=12)
    assert {1} == {answer.usage.completion_tokens for answer in got.values()}
    records = gate.records(bodies)
    assert {("ok", 1)} == {(record.outcome, record.attempt) for record in records}
    return {prompt: record.variant for prompt, record in zip(prompts, records, strict=True)}


def test_canary_share_is_sticky(gates: dict[str, Gate]):
    """A canary gets its five percent and the same request the same variant."""
    prompts = [f"request {number}" for number in range(200)]
    first = variants(gates["canary"], prompts, "first")
    low, high = within(len(prompts), 0.05)
    assert {"stable", "canary"} == set(first.values())
    assert low <= Counter(first.values())["canary"] <= high
    random.Random(1).shuffle(prompts)
    assert first == variants(gates["canary"], prompts, "second")


# ---- an engine that has no room


@pytest.fixture
def full(gates: dict[str, Gate], two: Engine) -> Iterator[None]:
    """The second engine has as many requests as it takes."""
    assert two.last is None, "the tests of this file run in their order"
    with gates["limited"].caller().client() as client:
        streams = [client.chat.completions.create(**LONG, stream=True) for _ in range(LIMITED)]
        for stream in streams:
            next(stream)
        yield
        for stream in streams:
            stream.close()
    eventually(lambda: two.running == 0, within_s=SOON_S, what="the engine being idle again")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("stream", [False, True])
def test_full_engine_rejects_on_record(gates: dict[str, Gate], two: Engine, way: str, stream: bool):
    """An engine without room refuses and is on record as refusing."""
    before, ask = two.figure(vllm.ADMISSION_REJECTIONS), gates["limited"].caller(way=way)
    with pytest.raises(openai.InternalServerError, match="busy") as told:
        ask(lambda client: client.chat.completions.create(**CHAT, stream=stream))
    record = ask.record()
    assert (503, 503, "rejected", "engine_busy", "two") == (
        told.value.status_code,
        record.status,
        record.outcome,
        record.reason,
        record.upstream,
    )
    assert before + 1 == two.figure(vllm.ADMISSION_REJECTIONS)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("stream", [False, True])
def test_where_another_engine_has_room_it_answers_instead(gates: dict[str, Gate], way: str, stream: bool):
    ask = gates["spare"].caller(way=way)
    got = ask(lambda client: client.chat.completions.create(**CHAT, stream=stream))
    assert "length" == (got[-1] if stream else got).choices[0].finish_reason
    assert ("ok", 2, "one", "two:engine_busy", 12) == (
        (record := ask.record()).outcome,
        record.attempt,
        record.upstream,
        record.tried,
        record.completion_tokens,
    )


# One request of more prompts than the engine takes: it looks for room once before it answers, and again for each
# prompt.
CROWD = TEXT | STREAM | {"prompt": ["the cache", "a queue of", "the server"][: LIMITED + 1]}


def test_a_refusal_inside_of_a_stream_is_a_refusal(gates: dict[str, Gate], two: Engine, way: str):
    """The status was 200, and the client hears of it from an event."""
    eventually(lambda: two.running == 0, within_s=SOON_S, what="an idle engine")
    ask = gates["limited"].caller(way=way)
    with pytest.raises(openai.APIError, match="busy") as told:
        ask(lambda client: client.completions.create(**CROWD))
    assert (openai.APIError, "503") == (type(told.value), told.value.code)
    assert ("rejected", "engine_busy", 200, "two") == (
        (record := ask.record()).outcome,
        record.reason,
        record.status,
        record.upstream,
    )


def test_in_stream_rejection_fails_over(gates: dict[str, Gate], two: Engine, way: str):
    """The head of the stream has waited for content."""
    eventually(lambda: two.running == 0, within_s=SOON_S, what="an idle engine")
    ask = gates["spare"].caller(way=way)
    chunks = ask(lambda client: client.completions.create(**CROWD))
    assert {0, 1, 2} == {chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason}
    assert ("ok", 2, "one", "two:engine_busy", 3 * 12) == (
        (record := ask.record()).outcome,
        record.attempt,
        record.upstream,
        record.tried,
        record.completion_tokens,
    )


def test_rush_is_served_or_rejected_on_record(gates: dict[str, Gate], two: Engine):
    """vLLM looks twice: what passes the first look together may be refused at the second, when status 200 has been sent
    already."""
    before, gate = two.figure(vllm.ADMISSION_REJECTIONS), gates["limited"]
    asks = {f"rush-{number}": chat(f"rush-{number}", CHAT | STREAM | {"max_tokens": 300}) for number in range(20)}
    seen: Counter[str | None] = Counter()
    for name, got in at_once(gate, asks, most=len(asks)).items():
        (record,) = gate.records([name])
        if isinstance(got, list):
            assert ("ok", 200, 300) == (record.outcome, record.status, record.completion_tokens)
        else:
            assert isinstance(got, openai.APIError)
            assert "busy" in got.message
            status = got.status_code if isinstance(got, openai.APIStatusError) else 200
            assert ("rejected", "engine_busy", status, "two") == (
                record.outcome,
                record.reason,
                record.status,
                record.upstream,
            )
        seen[record.outcome] += 1
    assert {"ok", "rejected"} == set(seen)
    assert before + seen["rejected"] == two.figure(vllm.ADMISSION_REJECTIONS)


# ---- an engine that dies


@pytest.mark.breaks_engine
def test_engine_killed_in_a_stream_ends_it_with_an_error(gates: dict[str, Gate], two: Engine):
    """An engine that is killed in a stream ends it with an error."""
    ask = gates["limited"].caller()
    with ask.client() as client:
        stream = client.chat.completions.create(**LONG, stream=True)
        for _ in range(4):
            next(stream)
        two.kill()
        with pytest.raises(openai.APIError) as told:
            list(stream)
    record = ask.record()
    # from an event of the stream, whose status was 200
    assert (openai.APIError, "upstream_reset") == (type(told.value), told.value.code)
    assert ("upstream_error", "upstream_reset", 200, "error") == (
        record.outcome,
        record.reason,
        record.status,
        record.finish_reason,
    )
    assert record.ttft_ms is not None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.breaks_engine
def test_while_the_engine_is_down_clients_are_told_to_come_back(
    gates: dict[str, Gate], two: Engine, way: str, stream: bool
):
    two.kill()
    ask = gates["limited"].caller(way=way)
    with pytest.raises(openai.InternalServerError) as told:
        ask(lambda client: client.chat.completions.create(**CHAT, stream=stream))
    record, headers = ask.record(), told.value.response.headers
    assert (503, "upstream_down", "true") == (told.value.status_code, told.value.code, headers["X-Should-Retry"])
    assert ("upstream_error", "upstream_down", 503, float(headers["Retry-After"])) == (
        record.outcome, record.reason, record.status, record.retry_after_s)  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.breaks_engine
def test_another_engine_answers_for_a_dead_one(gates: dict[str, Gate], two: Engine, way: str, stream: bool):
    """While the engine is down another answers if there is one."""
    two.kill()
    ask = gates["spare"].caller(way=way)
    ask(lambda client: client.chat.completions.create(**CHAT, stream=stream))
    assert ("ok", 2, "one", "two:upstream_down", 12) == (
        (record := ask.record()).outcome,
        record.attempt,
        record.upstream,
        record.tried,
        record.completion_tokens,
    )


# ---- the books


def test_offered_requests_and_engine_tokens_agree(
    gates: dict[str, Gate], engines: dict[str, Engine], before: dict[str, exposition_parser.Exposition]
):
    """Over all that this file has sent.

    request_prompt_tokens and request_generation_tokens are counted when a text is finished: what was broken off or
    refused leaves nothing in them, and no usage of it was told, so both sides speak of the same requests.
    prompt_tokens_total and generation_tokens_total are counted while the engine works, of what was broken off too, so
    they are larger by as much as nobody was told. The engine counts every text of a request as one of its own, so with
    n texts each prompt counts n times there and once in the usage."""
    eventually(lambda: engines["one"].running == 0, within_s=SOON_S, what="an idle engine")
    records: list[RequestRecord] = []
    for gate in gates.values():
        eventually(lambda gate=gate: len(gate.lines()) >= len(gate.offered), what=f"the records of {gate.name}")
        lines = gate.lines()
        assert Counter(gate.offered) == Counter(record.request_id for record in lines)
        assert len(lines) == exposition_parser.parse(get(f"{gate.metrics_url}/metrics")).total(REQUESTS.name)
        records += lines
    outcomes = Counter(record.outcome for record in records)
    assert {"ok", "client_abort", "rejected", "upstream_error", "timeout"} == set(outcomes), (
        "this test needs those before it"
    )
    assert sum(len(gate.offered) for gate in gates.values()) == sum(outcomes.values())

    for name, engine in engines.items():
        here = [record for record in records if record.upstream and PLACES[record.upstream] == name]
        finished = [record for record in here if record.outcome == "ok"]
        told = (
            sum((record.prompt_tokens or 0) * (record.n or 1) for record in finished),
            sum(record.completion_tokens or 0 for record in finished),
        )

        def counted(metric: Metric, part: str = "", engine: Engine = engine, name: str = name) -> float:
            return engine.figure(metric, part) - (before[name].total(metric.name + part) or 0.0)

        assert told == (counted(vllm.REQUEST_PROMPT_TOKENS, "_sum"), counted(vllm.REQUEST_GENERATION_TOKENS, "_sum")), (
            name
        )
        assert counted(vllm.PROMPT_TOKENS) > told[0]
        assert counted(vllm.GENERATION_TOKENS) > told[1]
        # What found the engine dead never began. Of a crowd that was refused, those who had room may have begun and
        # were then broken off.
        broken_off = sum(
            record.outcome in ("client_abort", "timeout", "upstream_error") and record.reason != "upstream_down"
            for record in here
        )
        crowds = [
            record
            for record in records
            if record.route == "/v1/completions" and "engine_busy" in f"{record.reason} {record.tried}"
        ]
        abandoned = counted(vllm.TIME_TO_FIRST_TOKEN, "_count") - counted(vllm.E2E_REQUEST_LATENCY, "_count")
        assert broken_off <= abandoned <= broken_off + (LIMITED * len(crowds) if name == "two" else 0), name
