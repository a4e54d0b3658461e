"""Isolation of teams that share an engine: cache salts, ids of stored responses, and the secret that both are made
with. The engine is a fake."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.config import BadConfig
from stack.gateway import isolation
from stack.gateway.check import warnings
from stack.gateway.config import GatewayConfig
from stack.gateway.isolation import SECRET_FILE, Isolation, isolation_of, read_secret
from stack.gateway.policy import Policy, Team
from stack.gateway.runtime_policy import load_terms
from stack.gateway.teams import mistakes
from tests.support.gateway_scene import ASK, CHAT, KEYS, REPLY, gateway, says

SECRET = b"0123456789abcdef"
APART: dict[str, Any] = {
    "teams": {team: {"keys": [hashed], "cache_domain": None} for team, (_, hashed) in KEYS.items()}
}
ALONE: dict[str, Any] = {"teams": {"demo": {"keys": [KEYS["demo"][1]], "cache_domain": None}}}
RESPONSES = "/v1/responses"
OTHERS = (
    "chat/completions/batch",
    "completions",
    "messages",
    "embeddings",
    "rerank",
    "score",
    "systemone",
    "decisions",
)
ROUTES = [CHAT, RESPONSES, *(f"/v1/{name}" for name in OTHERS)]
# vLLM's own check: a non-empty string of at most 128 characters without @ / \ NUL
ACCEPTED = re.compile(r"[^@/\\\0]{1,128}")


def made(tmp_path: Path, **teams: str | None) -> Isolation:
    """The keys of teams by name, each with its cache domain."""
    path = tmp_path / SECRET_FILE
    path.write_bytes(SECRET)
    return isolation_of(Policy(teams={name: Team(cache_domain=domain) for name, domain in teams.items()}), path)


def body_of(it: Any, index: int = -1) -> dict[str, Any]:
    """What the engine was asked."""
    found: dict[str, Any] = json.loads(it.engine.asked[index][3])
    return found


# ---- salts


def test_a_salt_is_of_one_domain_and_one_salt_of_the_client(tmp_path: Path):
    """A domain that is named like a team is another one; teams of one domain have the same salts."""
    keys = made(tmp_path, a=None, b=None, c="a", d="a", e="b")
    own = [None, "x", "y", "team:a", "\ud800"]
    salts = {(team, one): keys.salt(team, one) for team, one in product("abcde", own)}
    assert all(salts["c", one] == salts["d", one] for one in own)
    assert 4 * len(own) == len(set(salts.values()))
    assert all(salt is not None and ACCEPTED.fullmatch(salt) for salt in salts.values())


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_no_two_parts_of_a_message_are_one(one: tuple[str, str], other: tuple[str, str]):
    keys = Isolation(
        SECRET, {name: f"team:{name}".replace("\0", "").encode("utf-8", "surrogatepass") for name, _ in (one, other)}
    )
    same = (keys.domains[one[0]], one[1]) == (keys.domains[other[0]], other[1])
    assert same == (keys.salt(*one) == keys.salt(*other))


def test_another_secret_gives_other_salts_and_ids(tmp_path: Path):
    keys, others = made(tmp_path, a=None, b=None), Isolation(b"another secret of theirs", {"a": b"team:a"})
    assert keys.salt("a", None) != others.salt("a", None)
    assert not others.owns("a", keys.response_id("a", "0" * 32) or "")


@pytest.mark.parametrize("teams", [{}, {"a": None}, {"a": "x"}, {"a": "x", "b": "x"}])
def test_one_domain_needs_no_salt(tmp_path: Path, teams: dict[str, str | None]):
    assert made(tmp_path, **teams).salt("a", "own") is None


def test_one_team_needs_no_secret(tmp_path: Path):
    keys = isolation_of(Policy(teams={"a": Team()}), tmp_path / SECRET_FILE)
    assert (None, True, []) == (keys.response_id("a", "0" * 32), keys.owns("a", "anything"), list(tmp_path.iterdir()))


@pytest.mark.parametrize("route", ROUTES)
async def test_the_engine_gets_the_salt_of_the_team_on_every_route(tmp_path: Path, route: str):
    body = {
        "model": "tiny",
        "max_tokens": 5,
        "input": "a",
        "prompt": "a",
        "messages": [{"role": "user", "content": "a"}],
    }
    body = {name: value for name, value in body.items() if not (route == "/v1/embeddings" and name == "messages")}
    async with gateway(tmp_path, policy=APART) as it:
        seen = {}
        for team, own in product(KEYS, (None, "mine", "other")):
            async with it.post(body | ({"cache_salt": own} if own else {}), route=route, team=team) as answer:
                assert 200 == answer.status
            seen[team, own] = body_of(it)["cache_salt"]
            assert body == {
                name: value for name, value in body_of(it).items() if name not in ("cache_salt", "request_id")
            }
    assert len(seen) == len(set(seen.values()))
    assert all(ACCEPTED.fullmatch(salt) for salt in seen.values())
    assert not {"mine", "other"} & set(seen.values())


@pytest.mark.parametrize("own", ["x" * 128, None, "é", "x" * 129, "a@b/c", "a\\b", "a\0", "", 5, ["x"], True])
async def test_no_spelling_keeps_a_clients_salt_as_it_is(tmp_path: Path, own: Any):
    """vLLM refuses the last eight, and what is sent for them: as it is where no engine takes it, else a salt of the
    team, since an older vLLM takes strings that a later one refuses."""
    async with gateway(tmp_path, policy=APART) as it:
        salts = []
        for team in KEYS:
            async with it.post(ASK | {"cache_salt": own}, team=team) as answer:
                assert 200 == answer.status
            salts.append(body_of(it)["cache_salt"])
        refused = isinstance(own, str) and (len(own) > 128 or bool(set("@/\\\0") & set(own)))
        if (own and not isinstance(own, str)) or own == "":
            assert [own] * len(KEYS) == salts
        else:
            assert len(KEYS) == len(set(salts))
            assert all(refused != bool(ACCEPTED.fullmatch(salt)) for salt in salts)
        async with it.post(b'{"model":"tiny","cache_salt":"x","cache\\u005fsalt":"y"}') as answer:
            assert 200 == answer.status
        assert ["model", "cache_salt"] == [*body_of(it)]


@pytest.mark.parametrize("route", ROUTES)
async def test_with_one_team_the_very_bytes_pass(tmp_path: Path, route: str):
    body = b'{ "model":"tiny", "cache_salt":"mine", "request_id":"resp_mine", "max_tokens":5 }'
    async with gateway(tmp_path, policy=ALONE) as it:
        async with it.post(body, route=route) as answer:
            assert 200 == answer.status
        assert body == it.engine.asked[0][3]
    assert not (tmp_path / SECRET_FILE).exists()


async def test_a_foreign_service_hears_nothing_of_salts_and_ids(tmp_path: Path):
    """It would refuse a field that it does not know."""
    (tmp_path / "b.key").write_text("service-secret\n")
    async with gateway(tmp_path, says({"error": "x"}, 500), ALONE) as a, gateway(tmp_path, says(REPLY), ALONE) as b:
        upstreams = {"a": {"url": a.engine.url}, "b": {"url": b.engine.url, "kind": "api", "key_file": "b.key"}}
        teams = {name: team | {"fallback_api": True} for name, team in APART["teams"].items()}
        said = {"teams": teams, "upstreams": upstreams, "models": {"tiny": {"upstreams": ["a"], "fallbacks": ["b"]}}}
        async with (
            gateway(tmp_path, policy=said) as it,
            it.post({"model": "tiny", "input": "a"}, route=RESPONSES) as answer,
        ):
            assert 200 == answer.status
        assert {"cache_salt", "request_id"} <= body_of(a).keys()
        assert {"model": "tiny", "input": "a"} == body_of(b)


# ---- stored responses


@pytest.mark.parametrize("theirs", [{}, {"request_id": "resp_of_somebody"}])
async def test_a_stored_response_has_an_id_that_only_its_team_can_use(tmp_path: Path, theirs: dict[str, str]):
    """Nobody chooses an id, since an engine would put a new response in place of another team's."""
    async with gateway(tmp_path, policy=APART) as it:
        async with it.post({"model": "tiny", "input": "a", **theirs}, route=RESPONSES) as answer:
            assert 200 == answer.status
        name = body_of(it)["request_id"]
        assert re.fullmatch("resp_[0-9a-f]{64}", name)

        async def use(team: str, response: str) -> list[int]:
            headers = {"Authorization": f"Bearer {KEYS[team][0]}"}
            url = f"{it.started.url}{RESPONSES}/{response}"
            turn = {"model": "tiny", "input": "b", "previous_response_id": response}
            asked = (
                it.session.get(url, headers=headers),
                it.session.post(url + "/cancel", headers=headers),
                it.post(turn, RESPONSES, team),
            )
            return [(await one).status for one in asked]

        assert [200] * 3 == await use("demo", name)
        before = len(it.engine.asked)
        tampered = name[:-1] + ("0" if name[-1] != "0" else "1")
        for team, response in (
            ("batch", name),
            ("demo", "resp_of_somebody"),
            ("demo", tampered),
            ("demo", name.upper()),
        ):
            assert [404] * 3 == await use(team, response)
        assert before == len(it.engine.asked)
        found = (await it.records(6))[-1]
        assert ("rejected", "bad_request", 404) == (found.outcome, found.reason, found.status)


async def test_every_response_gets_another_id(tmp_path: Path):
    async with gateway(tmp_path, policy=APART) as it:
        for _ in range(5):
            async with it.post({"model": "tiny", "input": "a"}, route=RESPONSES) as answer:
                assert 200 == answer.status
        assert 5 == len({body_of(it, index)["request_id"] for index in range(5)})


async def test_a_rendered_response_is_no_stored_one(tmp_path: Path):
    async with (
        gateway(tmp_path, policy=APART) as it,
        it.post({"model": "tiny", "input": "a"}, route=RESPONSES + "/render") as answer,
    ):
        assert 200 == answer.status


async def test_unreadable_body_passes_no_model_list(tmp_path: Path):
    """The model in it would be asked for unchecked."""
    body = b'{"model":"secret","a":NaN'
    limited = {
        "teams": {"demo": {"keys": [KEYS["demo"][1]], "models": ["tiny"]}, "batch": {"keys": [KEYS["batch"][1]]}}
    }
    async with gateway(tmp_path, policy=limited) as it:
        async with it.post(body, route=CHAT + "/render") as answer:
            assert (400, "bad_body") == (answer.status, (await answer.json())["error"]["code"])
        for other in (b'{"model":"secret","a":NaN}', '{"model":"secret"}'.encode("utf-16")):
            async with it.post(other, route=CHAT + "/render") as answer:
                assert "model_not_allowed" == (await answer.json())["error"]["code"]
        assert [] == it.engine.asked
        async with it.post(b"", route=RESPONSES + "/resp_1/cancel") as answer:
            assert 404 == answer.status  # nobody's
        async with it.session.get(
            it.started.url + "/v1/models", headers={"Authorization": f"Bearer {KEYS['demo'][0]}"}
        ) as answer:
            assert 200 == answer.status
        async with it.post(body, route=CHAT + "/render", team="batch") as answer:
            assert 200 == answer.status


# ---- the secret


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / SECRET_FILE
    secret = read_secret(path)
    assert (0o600, secret, [SECRET_FILE]) == (
        stat.S_IMODE(path.stat().st_mode),
        read_secret(path),
        os.listdir(tmp_path),
    )
    assert len(secret) >= 32


def test_of_two_replicas_that_make_the_secret_one_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / SECRET_FILE
    link = os.link

    def late(source: str, target: Path) -> None:
        target.write_bytes(SECRET)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert SECRET == read_secret(path)


def test_where_no_secret_can_be_made_the_process_has_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """One line says so, which does not hold it."""
    path = tmp_path / "no such folder" / SECRET_FILE
    with caplog.at_level(logging.WARNING, "gateway"):
        secrets = {read_secret(path) for _ in range(3)}
    assert 1 == len(secrets) == len(caplog.records)
    assert f"secret_file: {path} cannot be made" in caplog.text
    assert isolation._THIS_PROCESS.hex() not in caplog.text


@pytest.mark.parametrize("text", [b"", b"short", b"  \n"])
def test_a_file_without_a_secret_stops_the_start(tmp_path: Path, text: bytes):
    path = tmp_path / SECRET_FILE
    path.write_bytes(text)
    with pytest.raises(BadConfig, match="holds fewer than 16 bytes"):
        read_secret(path)


def test_the_secret_is_where_the_file_says_or_beside_the_teams(tmp_path: Path):
    (tmp_path / "teams.yaml").write_text("teams: {a: {}, b: {}}\n")
    config = {"upstream": "http://x:1", "teams": str(tmp_path / "teams.yaml")}
    one = load_terms(GatewayConfig(**config)).isolation
    two = load_terms(GatewayConfig(**config, secret_file=str(tmp_path / "other"))).isolation
    assert (one.secret, two.secret) == tuple((tmp_path / name).read_bytes().strip() for name in (SECRET_FILE, "other"))
    assert one.secret != two.secret


def test_a_domain_has_a_plain_name_and_more_than_one_team():
    policy = Policy(teams={"a": Team(cache_domain="A b"), "b": Team(cache_domain="lonely", keys=["x"]),
            "c": Team(cache_domain="pair"),
                           "d": Team(cache_domain="pair")})  # fmt: skip
    (mistake,) = (sentence for sentence in mistakes(policy) if "cache_domain" in sentence)
    assert re.match(r"teams\.a\.cache_domain: 'A b' .*\b1 to 40 of a-z 0-9 _ - ", mistake)
    assert ["teams.a.cache_domain", "teams.b.cache_domain"] == [
        one.partition(":")[0] for one in warnings(policy) if "cache_domain" in one
    ]
