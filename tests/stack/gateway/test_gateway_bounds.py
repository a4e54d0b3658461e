"""What a client may make the gateway hold, pass on, or write down: nothing without a bound, and nothing that is on no
record."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.catalogue.gateway import INFLIGHT
from exporters.requests.record import fitting_line, parse_line
from stack.gateway import request_body as token_requests
from stack.gateway import request_fields, routes
from stack.gateway.body_budget import PARTS, BodyBudget
from stack.gateway.config import GatewayConfig, GatewayLimits
from stack.gateway.handler import RequestHandler
from stack.gateway.ids import trace
from stack.gateway.large_bodies import LARGE_BYTES
from stack.gateway.request_state import RequestState, record
from stack.gateway.routes import plain, refusal
from tests.support.gateway_scene import (
    ASK,
    CHAT,
    KEYS,
    ROLE,
    STREAM,
    TOKEN,
    Running,
    events,
    everything,
    gateway,
    never,
    says,
)
from tests.support.wait import turns, until

# ---- paths


@pytest.mark.parametrize(
    "path",
    [
        "/v1/./chat/completions",
        "/v1//chat/completions",
        "/v1/chat/completions;a=b",
        "/v1/%252e/chat/completions",
        "/v1/chat%255ccompletions",
        "/v1/..%5cv1/chat/completions",
        "/v1/%2e%2e/v1/chat/completions",
        "/v1/%2fmodels",
    ],
)
async def test_ambiguous_path_is_not_served(tmp_path: Path, path: str):
    """A path that a proxy could read in another way is not served."""
    async with gateway(tmp_path) as it:
        # no client tidies the path up
        reader, writer = await asyncio.open_connection("127.0.0.1", int(it.started.url.rpartition(":")[2]))
        body = json.dumps(ASK).encode()
        key = KEYS["demo"][0]
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\nConnection:"
            b" close\r\n\r\n%b" % (path.encode(), key.encode(), len(body), body)
        )
        assert b"HTTP/1.1 404" == (await reader.read()).partition(b" Not")[0]
        writer.close()
        assert [] == it.engine.asked


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/responses/resp_1-a.b:c", "/v1/models/org/name", "/v1/models/na\u00efve"]
)
def test_a_plain_path_is_one(path: str):
    assert plain(path)


@pytest.mark.parametrize("path", ["", "/", "/v1/", "v1/models", "/v1/a\n", "//v1/models", "/v1/./models"])
def test_what_is_no_plain_path_is_none(path: str):
    assert not plain(path)


@pytest.mark.parametrize(
    ("method", "path", "served"),
    [
        ("GET", "/v1/models", True),
        ("GET", "/v1/responses/r1", True),
        ("POST", "/v1/responses/r1/cancel", True),
        ("POST", "/v1/messages/count_tokens", True),
        ("POST", "/v1/chat/completions/render", True),
        ("POST", "/v1/completions/derender", True),
        ("POST", "/v1/load_lora_adapter", False),
        ("POST", "/v1/unload_lora_adapter", False),
        ("POST", "/v1/classify", False),
        ("POST", "/v1/responses/r1/cancel/x", False),
        ("POST", "/tokenize", True),
        ("POST", "/detokenize", True),
        ("GET", "/version", True),
        ("GET", "/tokenizer_info", True),
        ("POST", "/cohere/v2/chat/render", True),
        ("GET", "/server_info", False),
        ("GET", "/v1/realtime", False),
        ("POST", "/invocations", False),
        ("POST", "/inference/v1/abort_requests", False),
        ("GET", "/pooling", False),
        ("GET", "/v1", False),
        ("POST", "/v2/models", False),
        ("GET", "/x/v1/models", False),
        ("DELETE", "/v1/responses/r1", False),
        ("PUT", "/v1/chat/completions", False),
    ],
)
def test_what_leaves_no_record_must_cost_the_engine_nothing(method: str, path: str, served: bool):
    assert served is (refusal(method, path, frozenset()) is None)
    assert refusal(method, path, frozenset((path,))) is None


async def test_who_may_not_load_an_adapter_is_told_what_opens_that(tmp_path: Path):
    async with gateway(tmp_path) as it:
        async with it.post({"lora_name": "a", "lora_path": "/etc"}, route="/v1/load_lora_adapter") as answer:
            assert (404, True) == (
                answer.status,
                "also_pass in gateway.yaml" in (await answer.json())["error"]["message"],
            )
        assert [] == it.engine.asked
    async with gateway(tmp_path, also_pass=["/v1/load_lora_adapter"]) as it:
        async with it.post({"lora_name": "a", "lora_path": "/etc"}, route="/v1/load_lora_adapter") as answer:
            assert 200 == answer.status
        assert ["/v1/load_lora_adapter"] == [path for _, path, _, _ in it.engine.asked]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/pooling", "/v1/../x", "sleep", ""])
def test_only_routes_without_a_record_are_opened_by_name(route: str):
    with pytest.raises(ValueError, match="also_pass"):
        GatewayConfig(also_pass=[route])


# ---- what can be counted


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, {"n": token_requests.MOST_N + 1}),
        ("/v1/completions", {"prompt": "a", "best_of": "16_385"}),
        ("/v1/completions", {"n": 10**30}),
        ("/v1/completions", {"prompt": [[1]] * 10, "n": 10_000}),
        ("/v1/embeddings", {"input": ["a"] * (token_requests.MOST_TEXTS + 1)}),
        ("/v1/embeddings", {"input": ["a"] * 3, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"], "documents": ["c"] * 9}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/v1/responses", {"input": "a", "background": "yes"}),
    ],
)
async def test_what_no_record_could_count_is_refused_on_record(tmp_path: Path, route: str, body: Any):
    async with gateway(tmp_path) as it:
        async with it.post({"model": "tiny", **body}, route=route) as answer:
            assert (400, "uncountable") == (answer.status, (await answer.json())["error"]["code"])
        assert ("rejected", "uncountable", "demo") == ((found := await it.record()).outcome, found.reason, found.team)
        assert [] == it.engine.asked


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_transfer_fields_need_a_permission(tmp_path: Path, route: str, field: str):
    """vLLM takes kv_transfer_params.prompt_token_ids for the prompt, whatever the messages say."""
    teams = {
        "demo": {"keys": [KEYS["demo"][1]]},
        "batch": {"keys": [KEYS["batch"][1]], "kv_transfer": True, "max_prompt_tokens": 100},
    }
    body = {
        "model": "tiny",
        "max_tokens": 5,
        "input": "a",
        "prompt": "a",
        "messages": [{"role": "user", "content": "a"}],
    }
    async with gateway(tmp_path, policy={"teams": teams}) as it:
        async with it.post(body | {field: {"prompt_token_ids": [7] * 20_000}}, route=route) as answer:
            assert (400, "uncountable") == (answer.status, (await answer.json())["error"]["code"])
        assert ("rejected", "uncountable") == ((found := await it.record()).outcome, found.reason)
        assert [] == it.engine.asked
        async with it.post(body | {field: {"prompt_token_ids": [7] * 50}}, route=route, team="batch") as answer:
            assert 200 == answer.status
        if field == "kv_transfer_params":
            async with it.post(body | {field: {"prompt_token_ids": [7] * 101}}, route=route, team="batch") as answer:
                assert "prompt_too_long" == (await answer.json())["error"]["code"]
        async with it.post(body | {field: None}, route=route) as answer:
            assert 200 == answer.status


async def test_requests_of_a_probing_team_are_recorded_as_probes(tmp_path: Path):
    teams = {"demo": {"keys": [KEYS["demo"][1]]}, "batch": {"keys": [KEYS["batch"][1]], "probe": True}}
    body = {"model": "tiny", "max_tokens": 5, "prompt": [1, 2, 3]}
    async with gateway(tmp_path, policy={"teams": teams}) as it:
        async with it.post(body, route="/v1/completions", team="batch") as answer:
            assert 200 == answer.status
        assert ("__probe__", "default", "ok") == ((found := await it.record()).team, found.priority, found.outcome)


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
async def test_a_field_that_a_route_does_not_have_changes_no_account(tmp_path: Path, route: str):
    """Else one that says n: 500,000 would be a line that no reader takes, and on nobody's bill."""
    reply = {"usage": {"input_tokens": 3, "output_tokens": 2}, "content": ["a"], "output": ["a"], "data": ["a"]}
    async with gateway(tmp_path, says(reply)) as it:
        async with it.post(
            {"model": "tiny", "max_tokens": 5, "input": "a", "messages": [], "n": "500_000", "best_of": 9}, route=route
        ) as answer:
            assert 200 == answer.status
        assert (None, None, "ok") == ((found := await it.record()).n, found.prompts, found.outcome)


CSV = '"Smith","Ann","12 Main St",Berlin\\\n' * 40


@pytest.mark.parametrize(
    ("route", "field"), [("/v1/embeddings", "input"), ("/v1/rerank", "documents"), ("/v1/completions", "prompt")]
)
@pytest.mark.parametrize("text", [CSV, json.dumps({"tags": ["a", "b"] * 100}) * 3, '"Well," he said: "Yes", ' * 100])
def test_punctuation_in_large_texts_makes_no_prompts_of_them(route: str, field: str, text: str):
    body = json.dumps({"model": "tiny", field: [text] * 1000}).encode()
    assert len(body) > request_fields.LARGE_BYTES
    assert body.count(b'",') > token_requests.MOST_TEXTS
    assert (1000, "") == ((ask := token_requests.read(route, body)).prompts, ask.uncountable)


@pytest.mark.parametrize(
    ("route", "field", "one"),
    [
        ("/v1/chat/completions/batch", "messages", [{"role": "user", "content": "a, b: c"}] * 5),
        ("/v1/rerank", "documents", {"content": [{"type": "text", "text": "a"}]}),
        ("/v1/embeddings", "input", [{"role": "user", "content": "a"}]),
    ],
)
def test_a_large_batch_has_as_many_prompts_as_it_has_items(route: str, field: str, one: Any):
    body = json.dumps({"model": "tiny", field: [one] * 50_000}).encode()
    assert request_fields.count_pieces(body) > request_fields.MOST_PIECES
    assert (50_000, "") == ((ask := token_requests.read(route, body)).prompts, ask.uncountable)


@pytest.mark.parametrize(
    ("route", "field", "items"),
    [("embeddings", b"input", items) for items in (b'""', b'"" ', b'"\\\\"', b"[1]", b"[] ")]
    + [("rerank", b"documents", items) for items in (b"null", b'{"":""}')],
)
def test_too_many_texts_are_found_in_any_spelling(route: str, field: bytes, items: bytes):
    """More texts than a record can count are found however they are written."""
    body = b'{"%b":[%b]}' % (field, b",".join([items] * 400_000))
    assert len(body) > request_fields.LARGE_BYTES
    assert token_requests.read(f"/v1/{route}", body).uncountable


NUMBERS = (
    st.integers(-5, 10**7)
    | st.sampled_from([16_384, 16_385, 99_999, 100_000, 10**30])
    | st.none()
    | st.text(max_size=3)
)


@given(
    st.sampled_from(sorted(routes.RECORDED)),
    NUMBERS,
    NUMBERS,
    st.integers(0, 3) | st.sampled_from([99_999, 100_000, 150_000]),
)
def test_whatever_is_asked_for_its_record_can_be_read(route: str, n: Any, best_of: Any, prompts: int):
    ask = token_requests.read(
        route,
        json.dumps({"n": n, "best_of": best_of, "prompt": [[1]] * prompts, "input": ["a"] * min(prompts, 10)}).encode(),
    )
    x = RequestState(request_id="a", trace=trace(None, lambda size: "a" * size), route=route, accepted=0.0)
    x.n, x.prompts = ask.n, min(ask.prompts, token_requests.MOST_TEXTS)
    line = fitting_line(record(x, 1.0, 1e9))
    assert x.n == parse_line(line).n
    assert ask.uncountable or (ask.n or 1) * ask.prompts <= token_requests.MOST_TEXTS


# ---- bodies


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=60))
def test_team_and_total_stay_within_the_budget(steps: list[tuple[str, int]]):
    """No team holds more than its part and all no more than the whole."""
    bodies, held = BodyBudget(100), []
    for team, size in steps:
        if bodies.take(team, size):
            held.append((team, size))
        elif held:
            bodies.give(*held.pop(0))
        each = Counter[str]()
        for one, bytes_ in held:
            each[one] += bytes_
        assert each.total() == bodies.held <= 100
        assert max(each.values(), default=0) <= 100 // PARTS
    for one in held:
        bodies.give(*one)
    assert (0, {}) == (bodies.held, bodies._of)


async def parts(size: int) -> AsyncIterator[bytes]:
    """A body that never comes to its end."""
    for _ in range(size // 10_000):
        yield b" " * 10_000
    await asyncio.Event().wait()


def sending(it: Running, size: int, team: str = "demo") -> asyncio.Task[None]:
    async def send() -> None:
        headers = {"Authorization": f"Bearer {KEYS[team][0]}"}
        async with it.session.post(it.started.url + CHAT, data=parts(size), headers=headers):
            pass

    return asyncio.create_task(send())


async def posted(it: Running, body: Any = ASK, team: str = "demo") -> None:
    async with it.post(body, team=team):
        pass


def budget() -> BodyBudget:
    """Of the one gateway that runs."""
    gc.collect()  # of those before it
    (found,) = (one for one in gc.get_objects() if isinstance(one, BodyBudget) and one._most == 2_000_000)
    return found


def handlers() -> dict[int, RequestHandler]:
    """Return the request handlers that exist in this process, by identity."""
    return {id(one): one for one in gc.get_objects() if isinstance(one, RequestHandler)}


async def test_one_team_cannot_fill_the_memory_with_bodies(tmp_path: Path):
    """What is beyond its part is refused, others go on, and what is given up is free again."""
    large = json.dumps(ASK | {"user": "x" * 300_000}).encode()
    async with gateway(tmp_path, limits=GatewayLimits(body_bytes=1_000_000, bodies_bytes=2_000_000)) as it:
        held = [sending(it, 400_000) for _ in range(2)]
        bodies = budget()
        await until(lambda: bodies.held == 800_000, "what two clients have sent")
        async with it.post(large) as answer:
            assert (503, "bodies_full", True) == (
                answer.status,
                (await answer.json())["error"]["code"],
                "Retry-After" in answer.headers,
            )
        async with it.post(large, team="batch") as answer:
            assert 200 == answer.status
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until(lambda: not bodies.held, "what two clients gave up")
        async with it.post(large) as answer:
            assert 200 == answer.status


@pytest.mark.parametrize(("teams", "room"), [(("demo", "batch"), 10), (("demo",), 20)])
async def test_waiting_requests_are_counted_at_once(tmp_path: Path, teams: tuple[str, ...], room: int):
    """And a team that has no other beside it may have all of it."""
    body = json.dumps(ASK | {"user": "x" * 99_000}).encode()
    policy = {
        "teams": {team: {"keys": [KEYS[team][1]]} for team in teams},
        "bands": {"default": {"rank": 1}},
        "capacity": {"slots": 1},
    }
    async with gateway(
        tmp_path, never, policy, limits=GatewayLimits(body_bytes=1_000_000, bodies_bytes=2_000_000)
    ) as it:
        bodies, clients = budget(), [asyncio.create_task(posted(it))]
        await until(lambda: 1 == len(it.engine.asked), "one request at the engine")
        for count in range(1, room + 1):
            clients.append(asyncio.create_task(posted(it, body)))
            await until(lambda count=count: bodies.held == count * len(body), f"{count} that wait")
        async with it.post(body) as answer:
            assert (503, "bodies_full") == (answer.status, (await answer.json())["error"]["code"])
        # a small one has a place still, also when its body comes after its head
        clients.append(asyncio.create_task(posted(it)))
        clients.append(sending(it, 10_000))

        async def all_there() -> bool:
            figures = await it.figures()
            return room + 3 == sum(value for name, value in figures.items() if name[0] == INFLIGHT.name)

        await until(all_there, "the small ones wait as well")
        assert [] == [one for one in clients if one.done()]
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await until(lambda: not bodies.held, "what all gave up")


async def test_what_an_engine_has_read_is_not_held_until_it_answers(tmp_path: Path):
    """An answer that is no stream may take minutes to begin; images of a megabyte for each must not close the gate
    meanwhile."""
    body = json.dumps(ASK | {"user": "x" * 300_000}).encode()
    async with gateway(tmp_path, never, limits=GatewayLimits(body_bytes=1_000_000, bodies_bytes=2_000_000)) as it:
        bodies, earlier, clients = budget(), handlers(), []
        for count in range(1, 21):
            clients.append(asyncio.create_task(posted(it, body)))
            await until(
                lambda count=count: count == len(it.engine.asked) and not bodies.held, f"{count} requests at the engine"
            )
        held = [one for key, one in handlers().items() if key not in earlier]
        assert {b""} == {one._ask.body + b"".join(map(bytes, one._ask.fields.values())) for one in held}
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def test_a_body_is_let_go_when_nothing_can_be_sent_again(tmp_path: Path):
    """A stream may last an hour; what asked for it was read by the engine in its first second."""
    large = json.dumps(STREAM | {"user": "x" * 300_000}).encode()
    earlier = handlers()  # tests before this one in the process may have left some in cycles
    async with gateway(
        tmp_path, events(ROLE + TOKEN, b"", pause_s=30.0), limits=GatewayLimits(body_bytes=1_000_000)
    ) as it:
        for _ in range(20):  # of 300 kB each, where 2 MB may be held
            answer = await it.post(large)
            assert 200 == answer.status
            await answer.content.readany()
        held = [one for key, one in handlers().items() if key not in earlier]
        assert 20 == len(held)
        assert {(b"", 0)} == {
            (one._ask.body + b"".join(map(bytes, one._ask.fields.values())), one._taken) for one in held
        }


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        ({"body_bytes": 10, "bodies_bytes": 19}, r"at least 2 .*limits\.body_bytes"),
        ({"bodies_bytes": 0}, "bodies_bytes .*more than 0"),
    ],
)
def test_a_budget_that_no_body_fits_into_is_refused(limits: dict[str, int], fault: str):
    with pytest.raises(ValueError, match=fault):
        GatewayConfig(limits=GatewayLimits(**limits))
    assert 4 << 25 == GatewayLimits().all_bodies_bytes


# ---- large bodies and the streams of others


@pytest.mark.parametrize("step", ["read", "sent"])
async def test_a_stream_goes_on_while_a_large_body_is_worked_on(tmp_path: Path, monkeypatch, step: str):
    """Each step on the body is made to take until the stream has gone on; the figures of a real process:
    tests/bench/bench_gateway_bodies.py."""
    begun, went_on = threading.Event(), threading.Event()
    kind, name = (token_requests, "read") if step == "read" else (token_requests.TokenRequest, step)
    done, plain_step = [], token_requests.read if step == "read" else token_requests.TokenRequest.sent.fget  # type: ignore[attr-defined]

    def slow(*arguments: Any) -> Any:
        if len(arguments[1] if step == "read" else arguments[0].body) > LARGE_BYTES:
            begun.set()
            done.append(went_on.wait(20))  # stands for work that keeps its thread
        return plain_step(*arguments)

    monkeypatch.setattr(kind, name, slow if step == "read" else property(slow))
    async with gateway(tmp_path, events(ROLE, *[TOKEN] * 400, pause_s=0.005)) as it:
        async with it.post(STREAM) as stream:
            await stream.content.readany()
            large = asyncio.create_task(
                posted(it, {"model": "tiny", "messages": [{"role": "user", "content": "a" * 2 * LARGE_BYTES}]}, "batch")
            )
            await until(begun.is_set, "the work on the large body has begun")
            for _ in range(3):
                await stream.content.readany()
            went_on.set()
            await until(lambda: len(it.engine.asked) > 1, "the large body is at the engine")
            large.cancel()
        assert {True} == set(done)


async def test_a_team_at_its_limit_is_refused_before_its_body_is_read(tmp_path: Path):
    policy = {"teams": {team: {"keys": [hashed], "max_in_flight": 1} for team, (_, hashed) in KEYS.items()}}
    async with gateway(tmp_path, never, policy) as it:
        first = asyncio.create_task(posted(it))
        await until(lambda: bool(it.engine.asked), "the first request runs")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(it.started.url.rpartition(":")[2]))
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['demo'][0]}\r\nContent-Length:"
            " 30000000\r\n\r\n".encode()
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert b"HTTP/1.1 429" == head[:12]
        assert b"\r\nRetry-After: " in head
        assert ("team_limit", "demo", "default") == ((found := await it.record()).reason, found.team, found.priority)
        writer.close()
        first.cancel()


# ---- one sentence for each mistake

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("fault", "body", "kind"),
    [
        ("is empty", b"", None),
        ("is empty", b" \r\n", None),
        (r"JSON: .*\bbyte 24 \(line 2, column 7\)", b'{"user":"s3cret",\n "n": +1}', None),
        (r"JSON: .*':' .*\bbyte 10 \(line 1, column 11\)", b'{"s3cret" "a"}', None),
        (r"JSON: it ends .*\bbyte 15,", b'{"user":"s3cret', None),
        ("unicode escape", b'{"s3cret\\ud8g0":"user"}', None),
        (r"UTF-8: byte 8 \(line 1, column 9\)", b'{"s3cret\xff":1}', None),
        (r"UTF-8: byte 0\b", '{"user":"s3cret"'.encode("utf-16"), None),
        (r"an array\b", b'["s3cret"]', None),
        (r"a string\b", b'"s3cret"', None),
        (r"a number\b", b"12", None),
        (r"is null\b", b"null", None),
        ("nested too deeply", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        ("more than 1,000 fields", b"{" + b",".join(b'"f%d":1' % at for at in range(1_001)) + b"}", None),
        (
            "'application/x-www-form-urlencoded'; .*application/json",
            b"user=s3cret",
            "application/x-www-form-urlencoded",
        ),
        (
            "'multipart/form-data; boundary=b'; .*application/json",
            b"--b\r\n\r\ns3cret",
            "multipart/form-data; boundary=b",
        ),
    ],
)
async def test_bad_body_is_named_without_its_content(tmp_path: Path, fault: str, body: bytes, kind: str | None):
    """A bad body is named with its place and without its content."""
    async with gateway(tmp_path) as it:
        async with it.post(body, **{"Content-Type": kind or "application/json"}) as answer:
            error = (await answer.json())["error"]
        assert (400, "bad_body", "false") == (answer.status, error["code"], answer.headers["X-Should-Retry"])
        assert re.search(fault, error["message"])
        assert SECRET not in error["message"]
        assert "bad_body" == (await it.record()).reason
        assert [] == it.engine.asked


@pytest.mark.parametrize("coding", ["gzip", "identity, BR", "deflate,"])
async def test_encoded_body_is_refused_by_its_encoding(tmp_path: Path, coding: str):
    async with gateway(tmp_path) as it:
        for route in (CHAT, CHAT + "/render"):
            async with it.post(
                gzip.compress(json.dumps(ASK).encode()), route, **{"Content-Encoding": coding}
            ) as answer:
                assert (415, "identity") == (answer.status, answer.headers["Accept-Encoding"])
        assert [] == it.engine.asked
        async with it.post(ASK, **{"Content-Encoding": "identity"}) as answer:
            assert 200 == answer.status


async def sent(it: Running, *headers: str) -> tuple[int, str]:
    """Status and code of the answer to a chat request with just these headers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(it.started.url.rpartition(":")[2]))
    body = json.dumps(ASK).encode()
    head = [f"POST {CHAT} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", *headers, "", ""]
    writer.write("\r\n".join(head).encode() + body)
    answer = await everything(reader)
    writer.close()
    status, found = int(answer.split(b" ", 2)[1]), json.loads(answer.partition(b"\r\n\r\n")[2])
    return status, found.get("error", {}).get("code", "")


@pytest.mark.parametrize(
    ("want", "headers"),
    [
        ((400, "two_keys"), ["Authorization: Bearer {demo}", "Authorization: Bearer {batch}"]),
        ((400, "two_keys"), ["Authorization: Bearer {demo}", "authorization: Bearer {demo}"]),
        ((400, "two_keys"), ["Authorization: Bearer {demo}", "x-api-key: {batch}"]),
        ((400, "two_keys"), ["x-api-key: {demo}", "X-Api-Key: {batch}"]),
        ((200, ""), ["Authorization: Bearer {demo}", "x-api-key: {demo}"]),
        ((200, ""), ["Authorization: Bearer {demo}", "x-api-key: other"]),
        ((400, "two_keys"), ["Authorization: Bearer other", "x-api-key: {demo}"]),
        ((200, ""), ["Authorization: Basic YTpi", "x-api-key: {demo}"]),
        ((417, "expectation_failed"), ["Authorization: Bearer {demo}", "Expect: 200-ok"]),
        ((417, "expectation_failed"), ["Authorization: Bearer {demo}", "Expect: 100-continue, x"]),
    ],
)
async def test_two_keys_and_unknown_expectations_are_refused(tmp_path: Path, want: tuple[int, str], headers: list[str]):
    """Of two keys a proxy may check the one and the gateway the other; the refusal is on no team's record."""
    keys = {team: key for team, (key, _) in KEYS.items()}
    async with gateway(tmp_path) as it:
        assert want == await sent(it, *(header.format(**keys) for header in headers))
        record = await it.record()
        assert (want[1] or None, None if want[0] == 400 else "demo") == (record.reason, record.team)
        assert (want[0] == 200) == bool(it.engine.asked)


async def test_a_body_that_breaks_its_framing_is_refused_at_once(tmp_path: Path):
    """The request waited for timeouts.body_s, for a body of which no more could be read."""
    async with gateway(tmp_path) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(it.started.url.rpartition(":")[2]))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['demo'][0]}\r\nTransfer-Encoding:"
            " chunked\r\n\r\n"
        )
        writer.write(head.encode() + b"2\r\n{}\r\n")
        await turns(20)  # so that the gateway reads the two parts one after the other
        writer.write(b"no length\r\n")
        answer = await everything(reader)
        assert (1, b" 400 ", True) == (answer.count(b"HTTP/1.1 "), answer[8:13], b"framing" in answer)
        assert "bad_body" == (await it.record()).reason
        writer.close()
