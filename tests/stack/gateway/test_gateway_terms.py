"""The gateway under terms: who waits, who is refused and what it is told, which upstream answers, and that the books
balance afterwards.

A real gateway on loopback before fake engines. What happens when is agreed by hand-shakes: a desk answers when the test
says so, and the gateway's own page says who waits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import random
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from exporters.catalogue import vllm
from exporters.catalogue.gateway import (
    ATTEMPTS,
    INFLIGHT,
    REJECTED,
    RELOADS,
    REQUESTS,
    RUNNING,
    SLOTS,
    SLOTS_LIMIT,
    TOKENS,
    UPSTREAM_INFLIGHT,
    UPSTREAM_UP,
    WAITING,
)
from exporters.catalogue.metric import Metric
from exporters.net.listener import Listening
from exporters.requests.record import RequestRecord
from stack.gateway import health, large_bodies, make_key
from stack.gateway.config import GatewayLimits, Timeouts
from stack.gateway.policy import Policy, Upstream
from stack.gateway.routing import Router
from tests.support.gateway_scene import (
    ASK,
    CHAT,
    DONE,
    KEYS,
    LAST,
    REPLY,
    ROLE,
    STREAM,
    TOKEN,
    USAGE,
    Answer,
    FakeEngine,
    Running,
    event,
    events,
    gateway,
    listening,
    never,
    says,
    then_breaks,
)
from tests.support.wait import settled as unmoved
from tests.support.wait import turns, until

serving = importlib.import_module("stack.gateway.serve")  # the package has its function by that name
ALL = KEYS | {team: make_key(team) for team in ("chat", "night")}
ONE_SLOT = {"slots": 1}
WHOLE = ROLE + TOKEN + LAST + USAGE + DONE
SHOWN = WHOLE.replace(USAGE, b"")  # to a client that did not ask for usage
SOON_S = 30.0  # longer than anything here takes: only what hangs meets it


def policy(teams: Mapping[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """teams.yaml, with the keys of the teams of this file."""
    said = {team: {"keys": [ALL[team][1]], **(teams or {}).get(team, {})} for team in (*KEYS, *(teams or {}))}
    return {"teams": said, "bands": {"high": {"rank": 0}, "default": {"rank": 1}}} | sections


def impatient(max_wait_s: float) -> dict[str, Any]:
    return {"default": {"rank": 0, "max_wait_s": max_wait_s}}


@dataclass(frozen=True)
class Got:
    """What a client was given."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


async def ask(it: Running, name: str, body: Any = ASK, team: str = "demo", **headers: str) -> Got:
    """One request under this id, to its end."""
    async with it.post(body, **({"Authorization": f"Bearer {ALL[team][0]}", "X-Request-Id": name} | headers)) as answer:
        return Got(answer.status, answer.headers, await answer.read())


def asking(it: Running, name: str, body: Any = ASK, team: str = "demo") -> asyncio.Task[Got]:
    return asyncio.create_task(ask(it, name, body, team))


async def leave(client: asyncio.Task[Got]) -> None:
    """The client hangs up."""
    client.cancel()
    await asyncio.wait([client])


async def shows(it: Running, metric: Metric, want: float | None, *labels: str) -> None:
    """Returns once the page of the gateway says so; None is a series that is not there. labels: values, in the
    alphabetical order of their names."""

    async def equal() -> bool:
        found = (await it.figures()).get((metric.name, *labels))
        assert found == want, found
        return True

    await until(equal, f"{metric.name}{labels} is {want}")


async def waits(it: Running, count: int, team: str = "demo", band: str = "default") -> None:
    await shows(it, WAITING, count, band, team)


async def named(it: Running, count: int) -> dict[str, RequestRecord]:
    """The records by the ids of their requests."""
    return {record.request_id: record for record in await it.records(count)}


@dataclass
class Call:
    """A request that has come to a desk."""

    name: str
    said: asyncio.Future[Answer]

    def reply(self, answer: Answer | None = None) -> None:
        self.said.set_result(answer or says(REPLY))


@dataclass
class Desk:
    """Answers each request when the test says so."""

    calls: asyncio.Queue[Call] = field(default_factory=asyncio.Queue)
    names: list[str] = field(default_factory=list)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        call = Call(request.headers["X-Request-Id"], asyncio.get_running_loop().create_future())
        self.names.append(call.name)
        self.calls.put_nowait(call)
        return await (await call.said)(request)

    async def next(self) -> Call:
        return await asyncio.wait_for(self.calls.get(), SOON_S)


EVER = None  # what is never set


def scripted(*parts: bytes | asyncio.Event | None) -> Answer:
    """An event stream that goes on when its events are set."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await (response.write(part) if isinstance(part, bytes) else (part or asyncio.Event()).wait())
        return response

    return answer


@contextlib.asynccontextmanager
async def engines(**answers: Answer | FakeEngine | None) -> AsyncIterator[dict[str, FakeEngine]]:
    """Fake engines on loopback, by name."""
    async with contextlib.AsyncExitStack() as stack:
        found = {
            name: answer if isinstance(answer, FakeEngine) else FakeEngine(answer=answer)
            for name, answer in answers.items()
        }
        for engine in found.values():
            stack.push_async_callback((await listening(engine)).cleanup)
        yield found


def at(fleet: Mapping[str, FakeEngine], **more: Mapping[str, Any]) -> dict[str, Any]:
    """The upstreams of a policy. more: what else is said of one."""
    return {name: {"url": engine.url, **more.get(name, {})} for name, engine in fleet.items()}


A_THEN_B = {"tiny": {"upstreams": ["a"], "fallbacks": ["b"]}}


@contextlib.asynccontextmanager
async def pair(
    tmp_path: Path, a: Answer | None, b: Answer | None = None, teams: Any = None, more: Any = None,
    prefill_s: float = 30.0, **settings: Any,
) -> AsyncIterator[tuple[Running, FakeEngine, FakeEngine]]:  # fmt: skip
    """A gateway whose model tiny is served by engine a, and by b where a fails."""
    async with engines(a=a, b=b or events(WHOLE)) as fleet:
        said = policy(
            teams,
            models=A_THEN_B,
            upstreams=at(fleet, **(more or {})),
            bands={"default": {"rank": 1, "prefill_s": prefill_s}},
        )
        async with gateway(tmp_path, policy=said, **settings) as it:
            yield it, fleet["a"], fleet["b"]


# ---- whose turn it is


async def test_the_second_of_two_waits_until_the_first_has_ended(tmp_path: Path):
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT)) as it:
        first = asking(it, "first")
        call = await desk.next()
        second = asking(it, "second")
        await waits(it, 1)
        assert ["first"] == desk.names
        call.reply()
        assert 200 == (await first).status
        (await desk.next()).reply()
        assert 200 == (await second).status
        records = await named(it, 2)
        assert 0.0 == records["first"].queue_ms
        second_ms = records["second"].queue_ms
        assert second_ms is not None
        assert 0 < second_ms <= (records["second"].e2e_ms or 0)
        assert ("default", 2, "stable", 1, "ok") == (
            (one := records["second"]).priority,
            one.est_prompt_tokens,
            one.variant,
            one.attempt,
            one.outcome,
        )


async def test_a_higher_band_overtakes_those_who_wait(tmp_path: Path):
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy({"chat": {"band": "high"}}, capacity=ONE_SLOT)) as it:
        clients = [asking(it, "running")]
        call = await desk.next()
        for count, name in enumerate(("low-1", "low-2"), 1):
            clients.append(asking(it, name))
            await waits(it, count)
        clients.append(asking(it, "high", team="chat"))
        await waits(it, 1, "chat", "high")
        call.reply()
        for _ in range(3):
            (await desk.next()).reply()
        await asyncio.gather(*clients)
        assert ["running", "high", "low-1", "low-2"] == desk.names


async def test_teams_of_a_band_take_turns(tmp_path: Path):
    """Two teams of one band take turns however many wait of one."""
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT)) as it:
        clients = [asking(it, "batch-0", team="batch")]
        call = await desk.next()
        for team, count in (("batch", 1), ("batch", 2), ("batch", 3), ("demo", 1), ("demo", 2)):
            clients.append(asking(it, f"{team}-{count}", team=team))
            await waits(it, count, team)
        call.reply()
        for _ in range(5):
            (await desk.next()).reply()
        await asyncio.gather(*clients)
        assert ["batch-0", "demo-1", "batch-1", "demo-2", "batch-2", "batch-3"] == desk.names


async def test_the_output_that_a_team_may_not_have_takes_no_room(tmp_path: Path):
    """The budget of tokens is charged with the output that the engine will be asked for, not with what it could be
    without the team's limit."""
    desk = Desk()
    unlimited = {name: value for name, value in ASK.items() if name != "max_tokens"}
    async with gateway(tmp_path, desk.answer, policy({"demo": {"max_output_tokens": 4}})) as it:
        client = asking(it, "one", unlimited)
        call = await desk.next()
        await shows(it, TOKENS, 2 + 4)
        call.reply()
        await client
        await shows(it, TOKENS, 0)


# ---- refusals


def refused_for_now(got: Got, status: int, reason: str) -> float:
    """Checks an answer that asks its client to come back, and returns the seconds until then."""
    assert (status, reason, "true") == (got.status, got.error["code"], got.headers["X-Should-Retry"])
    assert {"message", "type", "param", "code"} == set(got.error)
    assert got.error["message"]
    wait_s = int(got.headers["Retry-After"])
    assert 1 <= wait_s <= 120
    assert 1000 * wait_s == int(got.headers["Retry-After-Ms"])
    return float(wait_s)


def on_record_as_refused(record: RequestRecord, status: int, reason: str, retry_after_s: float | None) -> None:
    assert ("rejected", reason, status, retry_after_s) == (
        record.outcome,
        record.reason,
        record.status,
        record.retry_after_s,
    )
    assert ("rejected", None, None, None) == (record.finish_reason, record.attempt, record.upstream, record.variant)


async def test_who_has_waited_too_long_is_told_when_to_come_back(tmp_path: Path):
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT, bands=impatient(0.1))) as it:
        first = asking(it, "first")
        call = await desk.next()
        wait_s = refused_for_now(await ask(it, "second"), 503, "queue_ttl")
        call.reply()
        await first
        record = (await named(it, 2))["second"]
        on_record_as_refused(record, 503, "queue_ttl", wait_s)
        assert record.queue_ms is not None
        assert record.queue_ms >= 100
        assert ["first"] == desk.names
        assert 1 == (await it.figures())[REJECTED.name, "queue_ttl", "demo"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("team_limit", policy({"demo": {"max_in_flight": 1}})),
        ("queue_full", policy(capacity=ONE_SLOT | {"queue": 0})),
        ("queue_full", policy(capacity=ONE_SLOT | {"queue_tokens": 4})),
        ("est_wait", policy(capacity=ONE_SLOT, bands=impatient(0))),
    ],
)
async def test_who_may_not_even_wait_is_told_when_to_come_back(tmp_path: Path, reason: str, said: Any):
    desk = Desk()
    async with gateway(tmp_path, desk.answer, said) as it:
        zeroth = asking(it, "zeroth")  # shows how long a slot is held, which a wait is estimated by
        (await desk.next()).reply()
        await zeroth
        first = asking(it, "first")
        call = await desk.next()
        got = await ask(it, "second")
        wait_s = refused_for_now(got, 429, reason)
        assert "rate_limit_error" == got.error["type"]
        call.reply()
        await first
        record = (await named(it, 3))["second"]
        on_record_as_refused(record, 429, reason, wait_s)
        assert ("demo", "default", 2) == (record.team, record.priority, record.est_prompt_tokens)
        assert ["zeroth", "first"] == desk.names


# 1,000 bytes: more than 60 tokens in any vocabulary
TOO_LONG = ASK | {"messages": [{"role": "user", "content": "word " * 200}]}
LONG = ASK | {"messages": [{"role": "user", "content": "word " * 100}]}
TERMS = policy(
    {"demo": {"max_prompt_tokens": 60, "max_output_tokens": 2, "over_output": "refuse"},
     "batch": {"models": ["tiny"], "max_running": 4, "max_logprobs": 0}},
    models={"tiny": {"max_model_len": 40, "aliases": ["gpt-4o-mini"], "adapters": ["tiny-sql"]}},
)  # fmt: skip


@pytest.mark.parametrize(
    ("team", "body", "status", "reason", "kind"),
    [
        ("demo", TOO_LONG, 400, "prompt_too_long", "invalid_request_error"),
        ("demo", ASK, 400, "output_too_long", "invalid_request_error"),
        ("batch", LONG, 400, "context_too_long", "invalid_request_error"),
        ("batch", ASK | {"max_tokens": 41}, 400, "context_too_long", "invalid_request_error"),
        ("batch", ASK | {"model": "other"}, 403, "model_not_allowed", "permission_error"),
        ("batch", ASK | {"model": "tiny-sql"}, 403, "model_not_allowed", "permission_error"),
        ("batch", {"messages": []}, 403, "model_not_allowed", "permission_error"),
        ("batch", b"x" * 2000, 413, "body_too_large", "invalid_request_error"),
        ("stranger", ASK, 401, "unknown_key", "authentication_error"),
        ("", ASK, 401, "no_key", "authentication_error"),
        ("batch", ASK | {"n": 5}, 400, "too_many_outputs", "invalid_request_error"),
        ("batch", ASK | {"logprobs": True}, 400, "too_many_logprobs", "invalid_request_error"),
    ],
)
async def test_what_would_be_refused_again_is_not_to_be_sent_again(
    tmp_path: Path, team: str, body: Any, status: int, reason: str, kind: str
):
    async with gateway(tmp_path, policy=TERMS, limits=GatewayLimits(body_bytes=1500)) as it:
        key = ALL[team][0] if team in ALL else team
        got = await ask(it, "one", body, Authorization=key and f"Bearer {key}")
        assert (status, reason, kind, "false") == (
            got.status,
            got.error["code"],
            got.error["type"],
            got.headers["X-Should-Retry"],
        )
        assert not {"Retry-After", "Retry-After-Ms"} & set(got.headers)
        on_record_as_refused(await it.record(), status, reason, None)
        assert [] == it.engine.asked


TEXT = {"model": "tiny", "prompt": "hello"}
TEXTS = {"model": "tiny", "prompt": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("terms", "path", "body", "reason"),
    [
        ({}, "/v1/completions", TEXTS | {"n": 100, "logprobs": 20, "prompt_logprobs": -1}, None),
        ({"max_running": 6}, "/v1/completions", TEXTS | {"n": 2}, None),
        ({"max_running": 5}, "/v1/completions", TEXTS | {"n": "2"}, "too_many_outputs"),
        ({"max_running": 5}, "/v1/completions", TEXTS | {"best_of": 2}, "too_many_outputs"),
        ({"max_running": 1, "max_outputs": 6}, "/v1/completions", TEXTS | {"n": 2}, None),
        ({"max_running": 9, "max_outputs": 5}, "/v1/completions", TEXTS | {"n": 2.0}, "too_many_outputs"),
        ({"max_outputs": 1}, "/v1/chat/completions", ASK | {"n": 2, "use_beam_search": True}, "too_many_outputs"),
        ({"max_outputs": 1}, "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 2}},
         "too_many_outputs"),
        ({"max_outputs": 1}, "/v1/chat/completions/batch", ASK | {"messages": [ASK["messages"]] * 2},
         "too_many_outputs"),
        ({"max_outputs": 1}, "/v1/embeddings", {"model": "tiny", "input": ["a", "b"]}, None),
        ({"max_outputs": 1}, "/v1/rerank", {"model": "tiny", "query": "q", "documents": ["a", "b"]}, None),
        ({"max_outputs": 1}, "/score", {"model": "tiny", "text_1": "q", "text_2": ["a", "b"]}, None),
        ({"max_outputs": 1}, "/generative_scoring", {"model": "tiny", "query": "q", "items": ["a", "b"]}, None),
        ({"max_logprobs": 5}, "/v1/completions", TEXT | {"logprobs": 5}, None),
        ({"max_logprobs": 5}, "/v1/completions", TEXT | {"logprobs": "6"}, "too_many_logprobs"),
        ({"max_logprobs": 5}, "/v1/completions", TEXT | {"logprobs": -1}, "too_many_logprobs"),
        ({"max_logprobs": 0}, "/v1/completions", TEXT | {"logprobs": 0}, "too_many_logprobs"),
        ({"max_logprobs": 0}, "/v1/completions", TEXT | {"logprobs": None, "prompt_logprobs": 5}, None),
        ({"max_prompt_logprobs": 0}, "/v1/completions", TEXT | {"logprobs": 5}, None),
        ({"max_prompt_logprobs": 0}, "/v1/completions", TEXT | {"logprobs": 0, "echo": 1}, "too_many_logprobs"),
        ({"max_prompt_logprobs": 1}, "/v1/completions", TEXT | {"prompt_logprobs": True}, None),
        ({"max_prompt_logprobs": 1}, "/v1/completions", TEXT | {"prompt_logprobs": 2}, "too_many_logprobs"),
    ],
)  # fmt: skip
async def test_outputs_and_logprobs_have_limits(
    tmp_path: Path, terms: dict[str, int], path: str, body: Any, reason: str | None
):
    async with gateway(tmp_path, policy=policy({"demo": terms})) as it:
        async with it.post(body, path, Authorization=f"Bearer {ALL['demo'][0]}") as got:
            answer = await got.json()
        assert (reason is None, reason) == (bool(it.engine.asked), answer.get("error", {}).get("code"))


def counted(tokens: int) -> Any:
    return REPLY | {"usage": {"prompt_tokens": tokens, "completion_tokens": 3, "total_tokens": tokens + 3}}


async def test_one_team_cannot_refuse_prompts_of_another(tmp_path: Path):
    """22 prompts of a team that are a token for each byte; another team's prompt of English text, within its limit, is
    served."""
    # 1,560 bytes, 360 tokens
    english = ASK | {"messages": [{"role": "user", "content": "the words of a usual text " * 60}]}
    async with gateway(tmp_path, says(counted(1600)), policy({"batch": {"max_prompt_tokens": 400}})) as it:
        dense = [await ask(it, f"dense{number}", english) for number in range(22)]
        assert {200} == {one.status for one in dense}
        it.engine.answer = says(counted(360))
        got = [await ask(it, f"english{number}", english, "batch") for number in range(3)]
        assert [200, 200, 200] == [one.status for one in got], got[0].body


async def test_prompt_limit_excess_is_charged_by_estimate(tmp_path: Path):
    """A prompt that may be too long goes to the engine, whose count decides. Once it counted too many, such prompts
    wait; others go on."""
    async with gateway(
        tmp_path, says(counted(125)), policy({"demo": {"max_prompt_tokens": 60}, "batch": {"max_prompt_tokens": 60}})
    ) as it:
        assert 200 == (await ask(it, "first", LONG)).status, "41 tokens at least, 126 by estimate"
        wait_s = refused_for_now(got := await ask(it, "second", LONG), 429, "prompt_over_limit")
        assert 40 <= wait_s <= 72
        assert "may send 60" in got.error["message"]
        assert (200, 200) == ((await ask(it, "short")).status, (await ask(it, "other", LONG, "batch")).status)
        on_record_as_refused((await named(it, 4))["second"], 429, "prompt_over_limit", wait_s)


async def test_early_disconnect_hides_no_overrun(tmp_path: Path):
    """A client that leaves before the count does not hide an overrun."""
    async with gateway(tmp_path, scripted(ROLE, TOKEN, EVER), policy({"demo": {"max_prompt_tokens": 60}})) as it:
        async with it.post(LONG | {"stream": True}, Authorization=f"Bearer {ALL['demo'][0]}") as answer:
            await answer.content.readuntil(TOKEN)
        await until(lambda: it.engine.hangups == 1, "the engine sees the client disconnect")
        refused_for_now(await ask(it, "second", LONG), 429, "prompt_over_limit")


@pytest.mark.parametrize("team", ["demo", "batch"])
async def test_a_limit_that_the_route_does_not_obey_refuses_nothing(tmp_path: Path, team: str):
    async with gateway(tmp_path, policy=TERMS) as it:
        got = await ask(
            it, "one", ASK | {"max_tokens": 9000, "max_completion_tokens": 2}, Authorization=f"Bearer {ALL[team][0]}"
        )
        assert 200 == got.status


# ---- clients that leave


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_waiting_client_that_leaves_frees_its_place(tmp_path: Path, body: Any):
    """A client that leaves while it waits frees its place at once."""
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT | {"queue": 1})) as it:
        first = asking(it, "first")
        call = await desk.next()
        second = asking(it, "second", body)
        await waits(it, 1)
        assert "queue_full" == (await ask(it, "refused")).error["code"]
        await leave(second)
        await waits(it, 0)
        third = asking(it, "third")
        await waits(it, 1)
        call.reply()
        (await desk.next()).reply()
        assert (200, 200) == ((await first).status, (await third).status)
        assert ["first", "third"] == desk.names
        record = (await named(it, 4))["second"]
        assert ("client_abort", "client_hangup", None, None, None) == (
            record.outcome, record.reason, record.status, record.attempt, record.upstream)  # fmt: skip
        assert (record.queue_ms or 0) > 0


@pytest.mark.parametrize("answer", [None, scripted(ROLE, TOKEN, EVER)])
async def test_a_client_that_leaves_while_it_runs_lets_the_next_one_go(tmp_path: Path, answer: Answer | None):
    """Nothing else happens to make room: the engine is rid of the first request, and its slot is free."""
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT)) as it:
        first = asking(it, "first", ASK if answer is None else STREAM)
        call = await desk.next()
        if answer is not None:
            call.reply(answer)
        second = asking(it, "second")
        await waits(it, 1)
        await leave(first)
        (await desk.next()).reply()
        assert 200 == (await second).status
        await until(lambda: it.engine.hangups == 1, "the engine sees the client disconnect")
        assert "client_abort" == (await named(it, 2))["first"].outcome


# ---- what the engine is asked for


@pytest.mark.parametrize(
    ("time", "body", "answer", "reason"),
    [
        ("prefill_s", STREAM, scripted(ROLE, EVER), "prefill_timeout"),
        ("decode_s", STREAM, scripted(ROLE, TOKEN, EVER), "decode_timeout"),
        ("total_s", ASK, never, "total_timeout"),
    ],
)
async def test_a_band_may_have_times_of_its_own(tmp_path: Path, time: str, body: Any, answer: Answer, reason: str):
    async with gateway(tmp_path, answer, policy(bands={"default": {"rank": 0, time: 0.1}})) as it:
        await ask(it, "one", body)
        assert ("timeout", reason) == ((record := await it.record()).outcome, record.reason)


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (b'{"model":"tiny","max_tokens":3 ,"seed":1.0}', b'{"model":"tiny","max_tokens":2,"seed":1.0}'),
        (b'{"model":"tiny","seed":1.0}', b'{"model":"tiny","seed":1.0,"max_completion_tokens":2}'),
        (b'{"model":"tiny","max_tokens":2 }', b'{"model":"tiny","max_tokens":2 }'),
        (
            b'{"model":"tiny","max_tokens":9,"max_completion_tokens":"8"}',
            b'{"model":"tiny","max_tokens":2,"max_completion_tokens":"2"}',
        ),
    ],
)
async def test_output_beyond_the_limit_of_a_team_is_not_asked_for(tmp_path: Path, said: bytes, sent: bytes):
    async with gateway(tmp_path, policy=policy({"demo": {"max_output_tokens": 2}})) as it:
        assert 200 == (await ask(it, "one", said)).status
        assert sent == it.engine.asked[0][3]


@pytest.mark.parametrize(
    ("name", "sent", "model", "adapter"),
    [
        ("tiny", "tiny", "tiny", None),
        ("gpt-4o-mini", "tiny", "tiny", None),
        ("tiny-sql", "tiny-sql", "tiny", "tiny-sql"),
        ("new", "new", "new", None),
    ],
)
async def test_an_alias_is_rewritten_and_an_adapter_is_not(
    tmp_path: Path, name: str, sent: str, model: str, adapter: str | None
):
    models = {"tiny": {"aliases": ["gpt-4o-mini"], "adapters": ["tiny-sql"]}}
    async with gateway(tmp_path, says(REPLY | {"model": sent}), policy(models=models)) as it:
        await ask(it, "one", ASK | {"model": name})
        assert ASK | {"model": sent} == json.loads(it.engine.asked[0][3])
        record = await it.record()
        assert (model, adapter, 200) == (record.model, record.adapter, record.status)


# ---- another upstream


def failure(code: int) -> dict[str, Any]:
    return {"error": {"message": "no", "type": "X", "param": None, "code": code}}


async def chunked_500(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(status=500, headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(json.dumps(failure(500)).encode())
    return response


# what is asked, how a fails, what that is called, client disconnects that a sees
FAILS: dict[str, tuple[Any, Answer | None, str, int]] = {
    "down": (STREAM, None, "upstream_down", 0),
    "500": (STREAM, says(failure(500), 500), "engine_error", 0),
    "500 in chunks": (STREAM, chunked_500, "engine_error", 0),
    "503": (STREAM, says(failure(503), 503), "engine_busy", 0),
    "an error event": (STREAM, scripted(event(**failure(500)), EVER), "engine_error", 1),
    "an error event behind the role": (STREAM, scripted(ROLE, event(**failure(503)), EVER), "engine_busy", 1),
    "an end before content": (STREAM, events(ROLE), "upstream_reset", 0),
    "a break": (STREAM, then_breaks(None), "upstream_reset", 0),
    "a break before content": (STREAM, then_breaks(events(ROLE)), "upstream_reset", 0),
    "silence": (STREAM, never, "prefill_timeout", 1),
    "silence behind the role": (STREAM, scripted(ROLE, EVER), "prefill_timeout", 1),
    "whole: down": (ASK, None, "upstream_down", 0),
    "whole: 500": (ASK, says(failure(500), 500), "engine_error", 0),
    "whole: 500 in chunks": (ASK, chunked_500, "engine_error", 0),
    "whole: 401": (ASK, says(failure(401), 401), "upstream_auth", 0),
    "whole: a break": (ASK, then_breaks(None), "upstream_reset", 0),
    "whole: given up": (ASK, says(REPLY | {"choices": [{"index": 0, "finish_reason": "abort"}]}), "engine_abort", 0),
}


@pytest.mark.parametrize("how", FAILS)
async def test_second_upstream_replaces_the_first(tmp_path: Path, how: str, free_port: Any):
    """One clean answer, one record, and the first upstream is rid of the request."""
    body, answer, reason, hangups = FAILS[how]
    nobody = {"a": {"url": f"http://127.0.0.1:{free_port()}"}} if answer is None else {}
    second = events(WHOLE) if body is STREAM else says(REPLY)
    async with pair(tmp_path, answer, second, None, nobody, 0.4 if "silence" in how else 30.0) as (it, a, b):
        got = await ask(it, "one", body)
        assert (200, SHOWN if body is STREAM else json.dumps(REPLY).encode()) == (got.status, got.body)
        record = await it.record()
        assert ("ok", 2, f"a:{reason}", "b", 200, 3) == (
            record.outcome,
            record.attempt,
            record.tried,
            record.upstream,
            record.status,
            record.completion_tokens,
        )
        assert (body is STREAM) == (record.ttft_ms is not None)
        assert (len(nobody) == 0, 1) == (len(a.asked) == 1, len(b.asked))
        await until(lambda: hangups <= a.hangups, "the first upstream sees the client disconnect")
        figures = await it.figures()
        assert {(reason, "a"): 1, ("ok", "b"): 1} == {
            name[1:3]: value for name, value in figures.items() if name[0] == ATTEMPTS.name
        }
        assert {0.0} == {value for name, value in figures.items() if name[0] in (UPSTREAM_INFLIGHT.name, RUNNING.name)}


async def test_fallbacks_go_in_order_and_last_failure_returns(tmp_path: Path):
    """Fallbacks are tried in their order and the last failure is the clients."""
    async with engines(a=then_breaks(None), b=says(failure(500), 500), c=says(failure(429), 429)) as fleet:
        said = policy(models={"tiny": {"upstreams": ["a"], "fallbacks": ["b", "c"]}}, upstreams=at(fleet))
        async with gateway(tmp_path, policy=said) as it:
            got = await ask(it, "one")
            assert (429, failure(429)) == (got.status, json.loads(got.body))
            record = await it.record()
            assert (3, "a:upstream_reset,b:engine_error", "c", "engine_busy") == (
                record.attempt,
                record.tried,
                record.upstream,
                record.reason,
            )


async def test_after_content_has_been_sent_there_is_no_second_upstream(tmp_path: Path):
    async with pair(tmp_path, then_breaks(events(ROLE, TOKEN, pause_s=0.02))) as (it, _, b):
        got = await ask(it, "one", STREAM)
        assert got.body.startswith(ROLE + TOKEN + b'data: {"error":')
        record = await it.record()
        assert ("upstream_error", "upstream_reset", 1, None, "a") == (
            record.outcome,
            record.reason,
            record.attempt,
            record.tried,
            record.upstream,
        )
        assert [] == b.asked


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_what_the_engine_calls_wrong_is_not_asked_elsewhere(tmp_path: Path, body: Any):
    async with pair(tmp_path, says(failure(400), 400)) as (it, _, b):
        got = await ask(it, "one", body)
        assert (400, failure(400)) == (got.status, json.loads(got.body))
        record = await it.record()
        assert ("bad_request", 1, None) == (record.reason, record.attempt, record.tried)
        assert [] == b.asked


async def test_an_error_event_that_says_400_passes_as_it_is(tmp_path: Path):
    wrong = ROLE + event(**failure(400)) + DONE
    async with pair(tmp_path, events(wrong)) as (it, _, b):
        assert wrong == (await ask(it, "one", STREAM)).body
        assert ("bad_request", 1) == ((record := await it.record()).reason, record.attempt)
        assert [] == b.asked


async def test_without_fallbacks_nothing_is_held_back(tmp_path: Path):
    """The client has the role before the engine has sent any content."""
    go_on = asyncio.Event()
    async with gateway(tmp_path, scripted(ROLE, go_on, TOKEN, LAST, USAGE, DONE)) as it, it.post(STREAM) as answer:
        assert ROLE == await asyncio.wait_for(answer.content.readexactly(len(ROLE)), SOON_S)
        go_on.set()
        assert TOKEN + LAST + DONE == await answer.read()


async def test_stream_with_fallbacks_passes_from_first_content(tmp_path: Path):
    """What was held is not held longer than that: the client has the first token before the engine has sent the
    second."""
    go_on = asyncio.Event()
    async with pair(tmp_path, scripted(ROLE, TOKEN, go_on, LAST, USAGE, DONE)) as (it, _, b), it.post(STREAM) as answer:
        assert ROLE + TOKEN == await asyncio.wait_for(answer.content.readexactly(len(ROLE + TOKEN)), SOON_S)
        go_on.set()
        assert LAST + DONE == await answer.read()
        assert [] == b.asked


async def test_disconnect_before_the_stream_has_no_status(tmp_path: Path):
    """The engine has said 200, but that was held back."""
    async with pair(tmp_path, scripted(ROLE, EVER)) as (it, a, b):
        client = asking(it, "one", STREAM)
        await until(lambda: len(a.asked) == 1, "the first upstream is asked")
        await turns(20)  # so that the head of its answer has come; should it not, the test proves less
        await leave(client)
        record = await it.record()
        assert ("client_abort", None, 1, "a") == (record.outcome, record.status, record.attempt, record.upstream)
        await until(lambda: a.hangups == 1, "the first upstream sees the client disconnect")
        assert [] == b.asked


async def test_an_engine_that_answers_500_is_not_up_for_that(tmp_path: Path):
    """A server whose engine has died still answers: /health with 503, and all requests with 500."""

    class Dead(FakeEngine):
        async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
            return web.Response(status=503) if request.path == "/health" else await super().handle(request)

    async with engines(a=Dead(answer=says(failure(500), 500)), b=None) as fleet:
        said = policy(models=A_THEN_B, upstreams=at(fleet))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(health, "EVERY_S", 0.02)
            patch.setattr(health, "IDLE_S", 0.02)
            async with gateway(tmp_path, policy=said) as it:
                await shows(it, UPSTREAM_UP, 0, fleet["a"].url[7:], "a")
                patch.setattr(health, "EVERY_S", 60.0)
                patch.setattr(health, "IDLE_S", 60.0)
                assert 200 == (await ask(it, "one")).status
                assert 0 == (await it.figures())[UPSTREAM_UP.name, fleet["a"].url[7:], "a"]


async def test_requests_that_leave_no_record_are_no_attempts_either(tmp_path: Path):
    """Or whoever looks at an engine's page through the gateway would dilute the shares by which two arms are
    compared."""
    async with gateway(tmp_path) as it:
        headers = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with it.session.get(it.started.url + "/v1/models", headers=headers) as answer:
            assert 200 == answer.status
        assert 1 == len(it.engine.asked)
        assert [] == [name for name in await it.figures() if name[0] in (ATTEMPTS.name, UPSTREAM_INFLIGHT.name)]


async def test_engine_pages_without_a_key_ask_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Shows(FakeEngine):
        looks = 0

        async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
            self.looks += 1
            page = {"body": b"a page", "headers": {"Content-Type": "text/plain; version=9"}}
            return web.Response(**page if request.path == "/metrics" else {})

    monkeypatch.setattr(health, "EVERY_S", 60.0)
    monkeypatch.setattr(health, "IDLE_S", 60.0)
    engine, said = Shows(), policy(upstreams={"a": {"url": "http://127.0.0.1:1"}})

    async def answers(it: Running, path: str, method: str = "GET") -> tuple[int, bytes, str | None]:
        async with it.session.request(method, it.started.url + path) as answer:
            assert "Age" not in answer.headers or 0 <= int(answer.headers["Age"]) < 60
            return answer.status, await answer.read(), answer.headers.get("Content-Type")

    async with gateway(tmp_path, policy=said) as it:

        async def down() -> bool:
            return (await answers(it, "/health"))[0] == 503

        await until(down, "the engine is known to be down")
        assert 503 == (await answers(it, "/metrics"))[0]
    async with engines(a=engine) as fleet, gateway(tmp_path, policy=policy(upstreams=at(fleet))) as it:

        async def read() -> bool:
            return (await answers(it, "/metrics"))[0] == 200

        await until(read, "the page has been read")
        looks = engine.looks
        for method, body in (("GET", b"a page"), ("HEAD", b"")) * 9:
            assert (200, body, "text/plain; version=9") == await answers(it, "/metrics", method)
            assert 200 == (await answers(it, "/health", method))[0]
        assert looks == engine.looks


async def test_a_page_that_nobody_reads_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Requests behind it wait until the client has taken it."""
    sent: list[health.MetricsPage] = []

    def page(self: health.HealthMonitor) -> health.MetricsPage:
        sent.append(health.MetricsPage(b"x" * (3 << 20), "text/plain", 0.0))
        return sent[-1]

    monkeypatch.setattr(health.HealthMonitor, "page", page)
    async with gateway(tmp_path) as it:
        wire = socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        wire.connect(("127.0.0.1", int(it.started.url.rpartition(":")[2])))
        _, writer = await asyncio.open_connection(sock=wire)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        await until(lambda: bool(sent), "the first page")
        for _ in range(9):
            async with it.session.get(it.started.url + "/health") as answer:
                await answer.read()
        assert 1 == len(sent)
        writer.transport.abort()


async def test_a_team_is_shown_the_models_that_it_may_ask_for(tmp_path: Path):
    """By all their names, whatever engine serves them; without models in the policy, what the engine shows."""
    models = {"big": {"aliases": ["gpt-4"], "adapters": ["sql"], "max_model_len": 4096}, "small": {}}
    async with gateway(tmp_path, None, policy(models=models, teams={"demo": {"models": ["big"]}})) as it:
        for team, shown in (
            ("demo", {"big": 4096, "gpt-4": 4096}),
            ("batch", {"big": 4096, "gpt-4": 4096, "sql": 4096, "small": None}),
        ):
            async with it.session.get(
                it.started.url + "/v1/models", headers={"Authorization": f"Bearer {KEYS[team][0]}"}
            ) as answer:
                page = await answer.json()
            assert shown == {one["id"]: one.get("max_model_len") for one in page["data"]}
            assert {"model"} == {one["object"] for one in page["data"]}
        assert [] == it.engine.asked


# ---- a service that somebody else runs


async def test_foreign_service_sees_no_key_of_ours(tmp_path: Path):
    """It is asked with its own key, by its own name for the model."""
    (tmp_path / "b.key").write_text("service-secret\n")
    teams, foreign = {"demo": {"fallback_api": True}}, {"kind": "api", "key_file": "b.key", "model": "tiny-large"}
    async with pair(
        tmp_path, says(failure(500), 500), says(REPLY | {"model": "tiny-large"}), teams, {"b": foreign}
    ) as (it, a, b):
        keys = {"x-api-key": ALL["demo"][0], "api-key": ALL["demo"][0]}
        assert 200 == (await ask(it, "one", **keys)).status
        assert 500 == (await ask(it, "two", team="batch")).status
        assert (2, 1) == (len(a.asked), len(b.asked))
        assert "Bearer service-secret" == b.asked[0][2]["authorization"]
        assert ASK | {"model": "tiny-large"} == json.loads(b.asked[0][3])
        assert ASK == json.loads(a.asked[0][3])
        assert not [asked for asked in a.asked if "authorization" in asked[2]]
        seen = str((a.asked, b.asked))
        assert not [team for team, (key, _) in ALL.items() if key in seen]
        records = await named(it, 2)
        assert ("tiny", "b", "a:engine_error", "ok") == (
            (one := records["one"]).model,
            one.upstream,
            one.tried,
            one.outcome,
        )
        assert ("a", None, "upstream_error") == ((two := records["two"]).upstream, two.tried, two.outcome)


# ---- priorities within an engine

LATER = {"high": {"rank": 0}, "default": {"rank": 1, "engine_priority": 5}}


async def test_nobody_jumps_the_queue_of_an_engine_by_head_or_body(tmp_path: Path):
    """vLLM takes a priority from either; what goes there is what the band may have, and a rank is nothing to choose."""
    sent = {"a": ("demo", {"priority": -9}), "b": ("demo", {}), "c": ("batch", {}), "d": ("batch", {"priority": 8})}
    async with gateway(tmp_path, policy=policy({"demo": {"band": "high"}}, bands=LATER)) as it:
        for name, (team, asked_for) in sent.items():
            assert (
                200
                == (
                    await ask(it, name, ASK | asked_for, team, **{"X-Vllm-Priority": "-9", "X-data-parallel-rank": "1"})
                ).status
            )
        seen = {asked[2]["x-request-id"]: asked for asked in it.engine.asked}
        assert {"a": 0, "b": None, "c": 5, "d": 8} == {name: json.loads(seen[name][3]).get("priority") for name in seen}
        assert {"a": None, "b": None, "c": "5", "d": "8"} == {
            name: seen[name][2].get("x-vllm-priority") for name in seen
        }
        assert not [asked for asked in it.engine.asked if "x-data-parallel-rank" in asked[2]]


async def test_a_foreign_service_hears_nothing_of_priorities(tmp_path: Path):
    """It would refuse a field that it does not know."""
    (tmp_path / "b.key").write_text("service-secret\n")
    async with engines(a=says(failure(500), 500), b=says(REPLY)) as fleet:
        said = policy(
            {"demo": {"fallback_api": True}},
            models=A_THEN_B,
            upstreams=at(fleet, b={"kind": "api", "key_file": "b.key"}),
            bands=LATER,
        )
        async with gateway(tmp_path, policy=said) as it:
            assert 200 == (await ask(it, "one")).status
        a, b = fleet["a"], fleet["b"]
        assert (ASK | {"priority": 5}, ASK) == (json.loads(a.asked[0][3]), json.loads(b.asked[0][3]))
        assert ("5", None) == (a.asked[0][2].get("x-vllm-priority"), b.asked[0][2].get("x-vllm-priority"))


# ---- a canary


async def test_canary_gets_its_share_and_is_sticky(tmp_path: Path):
    """A canary gets its share and a request always the same variant."""
    async with engines(old=None, new=None) as fleet:
        said = policy(upstreams=at(fleet, old={"weight": 95}, new={"weight": 5, "variant": "canary"}))
        async with gateway(tmp_path, policy=said) as it:
            bodies = [ASK | {"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(250)]
            await asyncio.gather(*(ask(it, f"{number}", body) for number, body in enumerate(bodies)))
            await asyncio.gather(*(ask(it, f"{number}-again", body) for number, body in enumerate(bodies[:100])))
            records = await named(it, 350)
            arms = [records[f"{number}"].variant for number in range(250)]
            assert 3 <= arms.count("canary") <= 23  # 12.5 expected, and three deviations of 3.4
            assert arms[:100] == [records[f"{number}-again"].variant for number in range(100)]
            assert {("canary", "new"), ("stable", "old")} == {
                (record.variant, record.upstream) for record in records.values()
            }
            assert Counter(record.upstream for record in records.values()) == {
                name: len(engine.asked) for name, engine in fleet.items()
            }


async def test_what_we_change_in_a_request_moves_it_to_no_other_arm(tmp_path: Path):
    """Nor does a new limit, or a new release of ours: it is drawn by what the client sent."""
    async with engines(old=None, new=None) as fleet:
        upstreams = at(fleet)
        router = Router(Policy(upstreams={name: Upstream(url=engine.url) for name, engine in fleet.items()}))
        async with gateway(tmp_path, policy=policy({"demo": {"max_output_tokens": 3}}, upstreams=upstreams)) as it:
            wanted = {}
            for number in range(40):
                said = ASK | {
                    "messages": [{"role": "user", "content": f"question {number}"}],
                    "stream": number % 2 == 0,
                }
                body = json.dumps(said).encode()
                await ask(it, f"{number}", body)
                choice = router.choose(None, None, router.sticky("demo", body), set(fleet))
                wanted[f"{number}"] = choice and choice.name
            assert {"old", "new"} == set(wanted.values())
            assert wanted == {name: record.upstream for name, record in (await named(it, 40)).items()}


# ---- new terms while it runs


async def reread(tmp_path: Path, it: Running, said: Any) -> None:
    (tmp_path / "teams.yaml").write_text(said if isinstance(said, str) else json.dumps(said))
    await it.started.reload()


async def test_new_policy_leaves_running_and_waiting_alone(tmp_path: Path):
    """New terms touch neither a stream that runs nor those who wait."""
    desk, go_on = Desk(), asyncio.Event()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT)) as it:
        stream = asking(it, "stream", STREAM)
        (await desk.next()).reply(scripted(ROLE, TOKEN, go_on, LAST, USAGE, DONE))
        waiting = [asking(it, "second"), asking(it, "third", team="batch")]
        await waits(it, 1)
        await waits(it, 1, "batch")
        without_batch = policy(capacity=ONE_SLOT)
        del without_batch["teams"]["batch"]
        await reread(tmp_path, it, without_batch)
        assert 401 == (await ask(it, "fourth", team="batch")).status
        assert {"default": 1, "batch": 1} == {
            "default": (figures := await it.figures())[WAITING.name, "default", "demo"],
            "batch": figures[WAITING.name, "default", "batch"],
        }
        go_on.set()
        assert (200, SHOWN) == ((got := await stream).status, got.body)
        for _ in range(2):
            (await desk.next()).reply()
        assert [200, 200] == [(await client).status for client in waiting]
        assert {"ok": 3, "rejected": 1} == Counter(record.outcome for record in await it.records(4))


async def test_new_terms_hold_for_whoever_comes_next(tmp_path: Path):
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT)) as it:
        clients = [asking(it, "first")]
        call = await desk.next()
        clients.append(asking(it, "second"))
        await waits(it, 1)
        await reread(
            tmp_path,
            it,
            policy(
                {"chat": {"band": "high"}, "batch": {"max_output_tokens": 2, "over_output": "refuse"}},
                capacity={"slots": 2},
            ),
        )
        second = await desk.next()  # at once, since there is a slot more
        assert "second" == second.name
        assert "output_too_long" == (await ask(it, "third", team="batch")).error["code"]
        clients.append(asking(it, "fourth", team="chat"))
        await waits(it, 1, "chat", "high")
        await shows(it, SLOTS_LIMIT, 2)
        for each in (call, second):
            each.reply()
        (await desk.next()).reply()
        assert [200, 200, 200] == [(await client).status for client in clients]
        await reread(tmp_path, it, policy(capacity=ONE_SLOT))
        await shows(it, SLOTS, 1)
        assert {("ok",): 2.0, ("failed",): 0.0} == {
            name[1:]: value for name, value in (await it.figures()).items() if name[0] == RELOADS.name
        }


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("teams: {demo: {band: gold}}", "teams.demo.band: 'gold' "),
        ("teams: [", "teams.yaml"),
        ("teams:\n  demo: {kays: []}", "kays"),
        (
            json.dumps(policy(upstreams={"a": {"url": "http://127.0.0.1:1", "key_file": "none.key"}})),
            "upstreams.a.key_file",
        ),
        ("teams: {}\nanchors: &a [*a]", "teams.yaml"),
        ("", "teams: "),
        ("# the rest is still to come\n", "teams: "),
        (None, "cannot be read"),
    ],
)
async def test_broken_file_changes_nothing(
    tmp_path: Path, broken: str | None, message: str, caplog: pytest.LogCaptureFixture
):
    """A file with a mistake changes nothing and is reported in one sentence."""
    async with gateway(tmp_path, policy=policy({"batch": {"models": ["tiny"]}}), anonymous_team="demo") as it:
        if broken is None:
            (tmp_path / "teams.yaml").unlink()
            (tmp_path / "teams.yaml").mkdir()
            with caplog.at_level(logging.INFO, "gateway"):
                await it.started.reload()
        else:
            with caplog.at_level(logging.INFO, "gateway"):
                await reread(tmp_path, it, broken)
        (only,) = (record for record in caplog.records if record.name == "gateway")
        assert logging.ERROR == only.levelno
        assert message in only.message
        assert "\n" not in only.message.strip()
        assert (200, 403) == (
            (await ask(it, "one")).status,
            (await ask(it, "two", ASK | {"model": "x"}, "batch")).status,
        )
        assert 1 == (await it.figures())[RELOADS.name, "failed"]


async def test_reloads_are_merged_and_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun, go_on, threads, plain = threading.Event(), threading.Event(), [], large_bodies.load_policy

    def slow(path: Path, text: str) -> Policy:
        threads.append(threading.current_thread())
        begun.set()
        go_on.wait(20)
        return plain(path, text)

    monkeypatch.setattr(large_bodies, "load_policy", slow)
    async with gateway(tmp_path, policy=policy()) as it:
        first = it.started.reload()
        await until(begun.is_set, "teams.yaml is being read")
        assert 200 == (await ask(it, "one")).status
        later = {it.started.reload() for _ in range(9)}
        go_on.set()
        await asyncio.gather(first, *later)
        assert (1, 2, 2) == (len(later), len(threads), (await it.figures())[RELOADS.name, "ok"])
        assert threading.main_thread() not in threads


async def test_team_removed_during_its_body_is_unknown(tmp_path: Path):
    """A team that goes while its request is still being sent is unknown."""
    async with gateway(tmp_path, policy=policy()) as it:
        host, port = it.started.url[7:].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['batch'][0]}\r\nContent-Length:"
            " 2\r\n\r\n{".encode()
        )
        await shows(it, INFLIGHT, 1, "batch")
        without_batch = policy()
        del without_batch["teams"]["batch"]
        await reread(tmp_path, it, without_batch)
        writer.write(b"}")
        assert b"401" == (await asyncio.wait_for(reader.readline(), SOON_S)).split()[1]
        writer.close()
        on_record_as_refused(await it.record(), 401, "unknown_key", None)
        assert [] == it.engine.asked


async def test_an_upstream_that_is_gone_leaves_the_page(tmp_path: Path):
    """Or the last thing known of it would stand there for ever, and it may have been down."""
    async with engines(a=None, b=None) as fleet, gateway(tmp_path, policy=policy(upstreams=at(fleet))) as it:
        await shows(it, UPSTREAM_UP, 1, fleet["a"].url[7:], "a")
        await reread(tmp_path, it, policy(upstreams=at({"b": fleet["b"]})))
        await shows(it, UPSTREAM_UP, None, fleet["a"].url[7:], "a")
        await shows(it, UPSTREAM_UP, 1, fleet["b"].url[7:], "b")


# ---- what the engines say of themselves


@dataclass
class Showing(FakeEngine):
    """An engine with a page of figures. waiting: requests that wait in it; None for a page that cannot be read."""

    waiting: int | None = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/metrics":
            return await super().handle(request)
        if self.waiting is None:
            return web.Response(status=500)
        figures = {vllm.NUM_REQUESTS_WAITING.name: self.waiting, vllm.KV_CACHE_USAGE.name: 0.5}
        return web.Response(text="".join(f'{name}{{engine="0"}} {value}\n' for name, value in figures.items()))


async def test_slots_follow_the_engines_figures_while_these_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module, name in ((serving, "LOOK_EVERY_S"), (health, "EVERY_S"), (health, "IDLE_S")):
        monkeypatch.setattr(module, name, 0.01)
    engine, desk = Showing(), Desk()
    engine.answer = desk.answer
    async with engines(a=engine) as fleet:
        capacity = {"slots": 6, "waiting": 5, "min_slots": 2, "stale_s": 2.0}
        async with gateway(tmp_path, policy=policy(capacity=capacity, upstreams=at(fleet))) as it:
            clients = [asking(it, str(number)) for number in range(4)]
            calls = [await desk.next() for _ in range(4)]
            await shows(it, SLOTS, 6)
            engine.waiting = 9
            await shows(it, SLOTS, 2)
            clients.append(asking(it, "fifth"))
            await waits(it, 1)
            await shows(it, SLOTS_LIMIT, 6)
            engine.waiting = 5
            calls.append(await desk.next())  # the fifth goes as soon as the engine is calm
            await shows(it, SLOTS, 6)
            engine.waiting = 6
            await shows(it, SLOTS, 2)
            engine.waiting = None
            await shows(it, SLOTS, 6)
            for call in calls:
                call.reply()
            assert {200} == {(await client).status for client in clients}


# ---- the end


async def test_running_and_waiting_end_in_peace_at_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The door is held open for a moment, so that somebody can still come in."""
    desk, shut = Desk(), asyncio.Event()
    close = Listening.close

    async def close_later(listening: Listening) -> None:
        async with asyncio.timeout(30):
            await shut.wait()
        await close(listening)

    monkeypatch.setattr(Listening, "close", close_later)
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT)) as it:
        clients = [asking(it, "runs")]
        call = await desk.next()
        clients.append(asking(it, "waits", STREAM))
        await waits(it, 1)
        it.stop.set()
        wait_s = refused_for_now(got := await ask(it, "late"), 503, "draining")
        assert "close" == got.headers["Connection"]
        shut.set()
        call.reply()
        (await desk.next()).reply(events(WHOLE))
        assert [(200, json.dumps(REPLY).encode()), (200, SHOWN)] == [
            ((got := await client).status, got.body) for client in clients
        ]
        records = await named(it, 3)
        on_record_as_refused(records["late"], 503, "draining", wait_s)
        assert ("ok", "ok") == (records["runs"].outcome, records["waits"].outcome)


async def test_waiting_at_the_end_of_draining_is_on_record(tmp_path: Path):
    """Who waits when the time for draining is over is on record."""
    desk = Desk()
    async with gateway(tmp_path, desk.answer, policy(capacity=ONE_SLOT), timeouts=Timeouts(drain_s=0.2)) as it:
        clients = [asking(it, "runs")]
        await desk.next()
        clients.append(asking(it, "waits"))
        await waits(it, 1)
        it.stop.set()
        records = await named(it, 2)
        assert {("upstream_error", "gateway_stopped")} == {
            (record.outcome, record.reason) for record in records.values()
        }
        await asyncio.wait(clients)
        assert ["runs"] == desk.names
        assert all(isinstance(client.exception(), aiohttp.ClientError) for client in clients)


# ---- slots are the engine's


async def test_slow_reader_holds_no_slot_after_the_engine_ended(tmp_path: Path):
    """A client that does not read holds no slot after the engine has ended."""
    async with gateway(tmp_path, events(ROLE, TOKEN * 5000, LAST, USAGE, DONE), policy(capacity=ONE_SLOT)) as it:
        slow = await it.post(STREAM)  # and of its body not a byte
        it.engine.answer = None
        assert 200 == (await ask(it, "second")).status
        assert (await slow.read()).endswith(LAST + DONE)


async def test_slot_is_free_with_the_last_event(tmp_path: Path):
    """The engine has done its work, whatever the line and the client still have to do."""
    async with gateway(tmp_path, scripted(ROLE, TOKEN, LAST, USAGE, DONE, EVER), policy(capacity=ONE_SLOT)) as it:
        answer = await it.post(STREAM, **{"X-Request-Id": "open"})
        await answer.content.readuntil(DONE)
        it.engine.answer = None
        assert 200 == (await ask(it, "second")).status
        answer.close()
        assert "ok" == (await named(it, 2))["open"].outcome


async def test_leaving_with_the_whole_answer_is_answered(tmp_path: Path):
    """Record, requests and attempts agree, though the connection was cut."""
    async with gateway(tmp_path, scripted(ROLE, TOKEN, LAST, USAGE, DONE, EVER)) as it:
        answer = await it.post(STREAM)
        await answer.content.readuntil(DONE)
        answer.close()
        assert ("ok", 200) == ((record := await it.record()).outcome, record.status)
        assert {"ok": 1} == {name[1]: value for name, value in (await it.figures()).items() if name[0] == ATTEMPTS.name}


# ---- the books

FATES: dict[str, Answer | None] = {
    "well": None,
    "stream": events(WHOLE),
    "slow": events(ROLE, TOKEN, TOKEN, LAST, USAGE, DONE, pause_s=0.02),
    "wrong": says(failure(400), 400),
    "broken": says(failure(500), 500),
    "busy": says(failure(503), 503, **{"Retry-After": "3"}),
    "reset": then_breaks(None),
    "torn": then_breaks(events(ROLE, TOKEN, pause_s=0.02)),
    "event": events(ROLE + event(**failure(500)) + DONE),
    "short": events(ROLE),
    "silent": never,
}
STREAMS = ("stream", "slow", "torn", "event", "short")


async def by_fate(request: web.BaseRequest) -> web.StreamResponse:
    fate = FATES[request.headers["X-Request-Id"].split("-")[1]]
    return await (fate or says(REPLY))(request)


@pytest.mark.parametrize("reloads", [0, 30])
async def test_whatever_befalls_two_hundred_requests_the_books_balance(tmp_path: Path, reloads: int):
    """Offered is the sum of all outcomes, one record each; nothing stays behind, and the page says what the records
    say.

    Also when the terms change all the time, and a team comes and goes."""
    rng = random.Random(20261121)
    teams = {
        "demo": {"band": "high", "max_in_flight": 12},
        "batch": {"max_prompt_tokens": 100, "max_running": 3},
        "chat": {"max_output_tokens": 4, "over_output": "refuse", "weight": 2.0},
        "night": {"band": "low", "models": ["tiny"]},
    }
    bands = {
        "high": {"rank": 0},
        "default": {"rank": 1, "max_wait_s": 2.0},
        "low": {"rank": 2, "ceiling": 0.5, "max_wait_s": 0.1},
    }
    given: dict[str, int] = {}
    left: set[str] = set()

    async def one(it: Running, number: int) -> None:
        fate, team = rng.choice(list(FATES)), rng.choice(list(teams))
        name, odd, patience_s = (
            f"{number}-{fate}",
            rng.random(),
            rng.uniform(0.0, 0.15) if rng.random() < 0.25 else None,
        )
        body: Any = (STREAM if fate in STREAMS else ASK) | {"model": rng.choice(("tiny", "solo"))}
        body = (
            b"x" * 5000
            if odd < 0.04
            else (
                body | {"max_tokens": 5} if odd < 0.1 else body | {"messages": LONG["messages"]} if odd < 0.16 else body
            )
        )
        headers = {"Authorization": "Bearer nobody"} if odd > 0.97 else {}
        await asyncio.sleep(rng.uniform(0, 1.0))
        try:
            async with asyncio.timeout(patience_s):
                given[name] = (await ask(it, name, body, team, **headers)).status
        except TimeoutError:
            left.add(name)

    async with engines(a=by_fate, b=None) as fleet:
        models = {"tiny": {"upstreams": ["a"], "fallbacks": ["b"]}, "solo": {"upstreams": ["a"]}}
        said = policy(
            teams,
            bands=bands,
            models=models,
            upstreams=at(fleet, b={"variant": "spare"}),
            capacity={"slots": 6, "queue": 20, "tokens": 500},
        )
        times, limits = Timeouts(prefill_s=0.2, total_s=0.2), GatewayLimits(body_bytes=4000)
        async with gateway(tmp_path, policy=said, timeouts=times, limits=limits) as it:
            await asyncio.gather(*(one(it, number) for number in range(200)), changing(tmp_path, it, said, reloads))
            figures = await settled(it)
            records = await it.records(int(sum(value for name, value in figures.items() if name[0] == REQUESTS.name)))

    ids = Counter(record.request_id for record in records)
    assert {1} == set(ids.values())
    assert set(given) <= set(ids) <= set(given) | left  # a client may leave before its request was even sent
    outcomes = Counter(record.outcome for record in records)
    assert {"ok", "client_abort", "rejected", "upstream_error", "timeout"} == set(outcomes)
    for record in records:
        if record.request_id in given:
            assert given[record.request_id] == record.status, record
            assert "client_abort" != record.outcome
        assert (record.outcome == "ok") == (record.reason is None)

    def page(metric: Metric) -> dict[tuple[str, ...], float]:
        return {name[1:]: value for name, value in figures.items() if name[0] == metric.name and value}

    for metric in (INFLIGHT, RUNNING, WAITING, TOKENS, UPSTREAM_INFLIGHT):
        assert {} == page(metric)
    unknown = "__unknown__"
    assert page(REQUESTS) == Counter(
        (r.outcome, f"{r.status // 100}xx" if r.status else "none", r.team or unknown) for r in records
    )
    assert page(REJECTED) == Counter((r.reason, r.team or unknown) for r in records if r.outcome == "rejected")
    tries = [
        (*reversed(tried.split(":")), "stable" if tried[0] == "a" else "spare")
        for r in records
        for tried in (r.tried or "").split(",")
        if tried
    ]
    tries += [(r.reason or "ok", r.upstream, r.variant) for r in records if r.upstream]
    assert page(ATTEMPTS) == Counter(tries)


async def changing(tmp_path: Path, it: Running, said: dict[str, Any], times: int) -> None:
    """New terms again and again: fewer slots, another band, a team less; and in the end those of the beginning."""
    fewer = said | {"capacity": said["capacity"] | {"slots": 2}}
    without = said | {
        "teams": {name: team | {"band": "low"} for name, team in said["teams"].items() if name != "batch"}
    }
    for number in range(times):
        await reread(tmp_path, it, (fewer, without, said)[number % 3])
        await asyncio.sleep(0.03)


async def settled(it: Running) -> dict[tuple[str, ...], float]:
    """The page, once nothing is in flight and nothing has changed for a while: of a client that left, the gateway may
    hear later."""

    async def counts() -> list[float]:
        figures = await it.figures()
        assert not any(value for name, value in figures.items() if name[0] == INFLIGHT.name)
        return [value for name, value in figures.items() if name[0] == REQUESTS.name]

    await unmoved(counts, "the count of requests")
    return await it.figures()
