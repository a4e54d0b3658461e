"""Teams behind one gateway and one real vLLM: no team learns from the prefix cache or the response store what another
has sent, and no spelling of a prompt passes a limit. One engine of its own, which stores responses."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from exporters.requests.record import RequestRecord, parse_line
from stack.lab import plan
from tests.support.engines import Engine, Engines
from tests.support.gateway_scene import KEYS, Running, gateway
from tests.support.wait import until

pytestmark = pytest.mark.engine

CHAT, TEXT, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
TOKENS = 800  # about, of a prompt that is looked for in the cache
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Engine:
    return real_engines.shared(VLLM_ENABLE_RESPONSES_API_STORE="1").up()


def teams(**terms: dict[str, Any]) -> dict[str, Any]:
    """A policy in which every team has a cache domain of its own, unless its terms say otherwise."""
    return {"teams": {name: {"keys": [KEYS[name][1]], "cache_domain": None, **terms.get(name, {})} for name in KEYS}}


def secret_text() -> str:
    """A long text that no test has used yet, from its first word on."""
    return f"case {next(_numbers)} of the server: " + "the cache of the request " * (TOKENS // 5)


def body(route: str, text: str) -> dict[str, Any]:
    talk = [{"role": "user", "content": text}]
    fields = {CHAT: {"messages": talk, "max_tokens": 2}, TEXT: {"prompt": text, "max_tokens": 2},
              RESPONSES: {"input": text, "max_output_tokens": 2},
              MESSAGES: {"messages": talk, "max_tokens": 2}}  # fmt: skip
    return {"model": plan.MODEL, **fields[route]}


def post(it: Running, fields: dict[str, Any], route: str, team: str = "demo", **headers: str) -> Any:
    """One request; vLLM reads no body that does not say it is JSON."""
    return it.post(fields, route, team, **{"Content-Type": "application/json"}, **headers)


async def asked(it: Running, route: str, team: str, fields: dict[str, Any]) -> RequestRecord:
    """The record of one more request, after the answer."""
    name = f"isolation-{next(_numbers)}"
    async with post(it, fields, route, team, **{"X-Request-Id": name}) as answer:
        assert 200 == answer.status, await answer.text()

    def recorded() -> list[RequestRecord]:
        return [record for record in map(parse_line, it._lines()) if record.request_id == name]

    (found,) = await until(recorded, "the record")
    return found


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("domain", [None, "trusted"])
async def test_only_a_shared_domain_shows_what_another_team_has_sent(
    tmp_path: Path, engine: Engine, route: str, domain: str | None
):
    """Without a salt cached_tokens tells which text another team has sent. Its own prompts a team finds in either
    case."""
    policy, sent = teams(demo={"cache_domain": domain}, batch={"cache_domain": domain}), body(route, secret_text())
    async with gateway(tmp_path, policy=policy, upstream=engine.spec.address) as it:
        first, again, other = [await asked(it, route, team, sent) for team in ("demo", "demo", "batch")]
    assert min(one.prompt_tokens or 0 for one in (first, again, other)) > TOKENS / 2
    assert not first.cached_tokens
    assert (again.cached_tokens or 0) > 0.9 * (again.prompt_tokens or 0)
    if domain:
        assert other.cached_tokens == again.cached_tokens
    else:
        assert not other.cached_tokens


async def test_a_clients_own_salt_still_separates_its_users(tmp_path: Path, engine: Engine):
    sent = body(CHAT, secret_text())
    async with gateway(tmp_path, policy=teams(), upstream=engine.spec.address) as it:
        await asked(it, CHAT, "demo", sent | {"cache_salt": "user-1"})
        cached = [
            (await asked(it, CHAT, "demo", sent | more)).cached_tokens
            for more in ({"cache_salt": "user-1"}, {"cache_salt": "user-2"}, {})
        ]
    assert (cached[0] or 0) > TOKENS / 2
    assert not any(cached[1:])


async def test_a_stored_response_is_found_by_its_team_alone(tmp_path: Path, engine: Engine):
    async with gateway(tmp_path, policy=teams(), upstream=engine.spec.address) as it:

        async def use(team: str, name: str, method: str = "GET", end: str = "") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {KEYS[team][0]}"}
            async with it.session.request(
                method, f"{it.started.url}{RESPONSES}/{name}{end}", headers=headers
            ) as answer:
                return answer.status, await answer.json()

        async with post(it, body(RESPONSES, "the secret of demo"), RESPONSES) as answer:
            assert 200 == answer.status, await answer.text()
            mine = await answer.json()
        name = mine["id"]
        status, found = await use("demo", name)
        assert (200, mine["output"]) == (status, found["output"])
        assert 404 == (await use("batch", name))[0]
        # of the engine, which knows the response: what has ended cannot be cancelled
        assert (400, 404) == (
            (await use("demo", name, "POST", "/cancel"))[0],
            (await use("batch", name, "POST", "/cancel"))[0],
        )
        turn = body(RESPONSES, "go on") | {"previous_response_id": name}
        async with post(it, turn, RESPONSES) as mine_on, post(it, turn, RESPONSES, "batch") as theirs_on:
            assert (200, 404) == (mine_on.status, theirs_on.status)
        async with post(it, body(RESPONSES, "put in its place") | {"request_id": name}, RESPONSES, "batch") as chosen:
            assert (200, True) == (chosen.status, (await chosen.json())["id"] != name)
        assert mine["output"] == (await use("demo", name))[1]["output"]


async def test_one_request_id_of_two_teams_does_no_harm(tmp_path: Path, engine: Engine):
    """vLLM adds random characters to the id of each request; what a body says of it loses against the header, which is
    always there."""
    async with gateway(tmp_path, policy=teams(), upstream=engine.spec.address) as it:
        sent = body(CHAT, "the cache") | {"request_id": "the-same", "max_tokens": 50, "ignore_eos": True}

        async def one(team: str) -> tuple[int, int]:
            async with post(it, sent, CHAT, team, **{"X-Request-Id": "the-same"}) as answer:
                return answer.status, (await answer.json())["usage"]["completion_tokens"]

        assert [(200, 50)] * 4 == await asyncio.gather(*map(one, ("demo", "batch") * 2))


LIMITED = {"demo": {"max_prompt_tokens": 100}}
LONG = [100] * 20_000
PAST: dict[str, tuple[str, dict[str, Any]]] = {
    "kv_transfer_params of chat": (CHAT, {"kv_transfer_params": {"prompt_token_ids": LONG}}),
    "kv_transfer_params of messages": (MESSAGES, {"kv_transfer_params": {"prompt_token_ids": LONG}}),
    "kv_transfer_params of responses": (RESPONSES, {"kv_transfer_params": {"prompt_token_ids": LONG}}),
    "floats": (TEXT, {"prompt": [[100.0] * 20_000]}),
    "numeric strings": (TEXT, {"prompt": [["100"] * 20_000]}),
    "strings after a number": (TEXT, {"prompt": [100, *["100"] * 1000]}),
    "floats, flat": (TEXT, {"prompt": [100.0] * 1000}),
    "a role": (CHAT, {"messages": [{"role": "poet " * 20_000, "content": "a"}]}),
    "many empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 2000}),
}


@pytest.mark.parametrize("name", PAST)
async def test_no_spelling_takes_a_prompt_past_the_limit_of_its_team(tmp_path: Path, engine: Engine, name: str):
    route, more = PAST[name]
    async with gateway(tmp_path, policy=teams(**LIMITED), upstream=engine.spec.address) as it:
        async with post(it, body(route, "hi") | more, route) as answer:
            assert (400, True) == (
                answer.status,
                (await answer.json())["error"]["code"] in ("prompt_too_long", "uncountable"),
            )
        async with post(it, body(route, "hi"), route) as answer:
            assert 200 == answer.status


async def test_the_engine_obeys_what_only_a_router_may_send(tmp_path: Path, engine: Engine):
    """The reason for the refusal: vLLM takes the ids, and not the message, for the prompt."""
    async with gateway(tmp_path, policy=teams(batch={"kv_transfer": True}), upstream=engine.spec.address) as it:
        for route in (CHAT, MESSAGES, RESPONSES):
            record = await asked(
                it, route, "batch", body(route, "hi") | {"kv_transfer_params": {"prompt_token_ids": [100] * 300}}
            )
            assert 300 == record.prompt_tokens, route


async def test_prompt_ids_count_alike_in_record_and_engine(tmp_path: Path, engine: Engine):
    """A prompt is one to record and engine however its ids are written."""
    async with gateway(tmp_path, policy=teams(), upstream=engine.spec.address) as it:
        for prompt, prompts in (
            ([100.0] * 1000, 1),
            ([[100, 7], [8.0]], 2),
            ([7, "8"], 1),
            (["7", "8"], 2),
            ([[True, "3"]], 1),
        ):
            record = await asked(it, TEXT, "demo", body(TEXT, "") | {"prompt": prompt})
            assert prompts == (record.prompts or 1)
