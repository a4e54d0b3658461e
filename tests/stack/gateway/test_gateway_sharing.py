"""Limits that replicas divide: their shares never add up to more than a limit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from exporters.catalogue.gateway import RUNNING, WAITING
from stack import cli
from stack.config import BadConfig, parse
from stack.gateway import replicas
from stack.gateway.config import GatewayConfig
from stack.gateway.name_lookup import NameLookup
from stack.gateway.policy import Band, Capacity, Policy, Team
from stack.gateway.replicas import ReplicaList
from stack.gateway.sharing import (
    HOLD_S,
    LOOK_S,
    NOTHING,
    WHOLE,
    Share,
    ShareWindow,
    Sharing,
    divide,
    limits,
    listed_share,
    share_mistakes,
)  # fmt: skip
from tests.support.gateway_scene import ASK, KEYS, REPLY, FakeEngine, gateway, listening
from tests.support.wait import until

LIMIT = st.integers(0, 10_000)


@given(LIMIT, st.lists(st.booleans(), min_size=1, max_size=40))
def test_shares_add_up_to_at_most_the_limit(limit: int, indexed: list[bool]):
    """Replicas with and without an index, side by side."""
    count = len(indexed)
    shares = [Share(count, index if known else None).of(limit) for index, known in enumerate(indexed)]
    assert sum(shares) <= limit
    assert sum(Share(count, index).of(limit) for index in range(count)) == limit
    assert max(shares) - min(shares) <= 1


@given(st.integers(1, 30), st.lists(st.tuples(LIMIT, LIMIT, LIMIT), max_size=5), LIMIT, LIMIT)
def test_every_limit_of_a_policy_is_divided(count: int, rows: list[tuple[int, int, int]], slots: int, queue: int):
    """Floors fit into the slots of each replica, as they fit into the slots of all."""
    policy = Policy(
        teams={f"t{place}": Team(max_running=row[0], max_in_flight=row[1]) for place, row in enumerate(rows)},
        bands={f"b{place}": Band(rank=0, floor=row[2]) for place, row in enumerate(rows)},
        capacity=Capacity(slots=slots + sum(row[2] for row in rows), tokens=queue, queue=queue, queue_tokens=slots),
    )
    parts = [divide(policy, (Share(count, index),)) for index in range(count)]
    for place, limit in limits(policy):
        each = [dict(limits(part)).get(place, 0) for part in parts]
        assert sum(each) <= limit, place
        if "max_in_flight" not in place:  # of a team without a slot, nothing is in flight
            assert sum(each) == limit, place
    for part in parts:
        assert sum(band.floor for band in part.bands.values()) <= part.capacity.slots
        assert all(team.max_in_flight == 0 for team in part.teams.values() if team.max_running == 0)


def test_one_replica_has_the_policy_as_it_is():
    policy = Policy(teams={"a": Team(max_running=3)})
    assert divide(policy, (WHOLE,)) is policy


@given(st.data())
def test_shares_add_up_while_replicas_come_and_go(data: st.DataObject):
    """Replicas join and leave; each reads the list every `LOOK_S`, some time after the others, and late."""
    names = [f"r{number}" for number in range(data.draw(st.integers(2, 5)))]
    limit = data.draw(st.integers(1, 50))
    events: list[tuple[float, tuple[str, ...]]] = [(0.0, tuple(names[:1]))]
    for _ in range(data.draw(st.integers(1, 6))):
        gap_s = data.draw(st.floats(2 * LOOK_S, 4 * HOLD_S))
        present = data.draw(st.sets(st.sampled_from(names), min_size=1))
        events.append((events[-1][0] + gap_s, tuple(sorted(present))))
    end = events[-1][0] + 2 * HOLD_S
    looks = sorted(
        (start + step * LOOK_S, name)
        for name in names
        for start in (data.draw(st.floats(0, LOOK_S - 0.01)),)
        for step in range(int(end / LOOK_S))
    )
    windows = {name: ShareWindow(0.0) for name in names}
    late_s = {name: data.draw(st.floats(0, HOLD_S - 2 * LOOK_S)) for name in names}
    most = 0
    for now, looking in looks:
        listed = [present for at, present in events if at <= now - late_s[looking]] or [()]
        windows[looking].see(listed_share(listed[-1], (looking,)), now)
        total = sum(min(share.of(limit) for share in window.shares(now)) for window in windows.values())
        most = max(most, total)
        assert total <= limit
    last = events[-1][1]
    after = end + 2 * HOLD_S
    shares = [window.shares(after) for window in windows.values()]
    assert sum(share.of(limit) for each in shares for share in each) == limit, "no share is lost for good"
    assert len(last) == sum(each != (NOTHING,) for each in shares)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sharing: {}", r"sharing .*\breplicas, replicas_file and replicas_dns, .*\bnone\b"),
        ("sharing: {replicas: 2, replicas_dns: gw}", "not replicas and replicas_dns$"),
        ("sharing: {replicas: 0}", r"sharing\.replicas .*\b1 or more, not 0$"),
        ("sharing: {replicas: 2, index: 2}", r"sharing\.index .*\b0 to 1, not 2$"),
        ("sharing: {replicas_dns: gw, index: 0}", r"sharing\.index .*\breplicas; replicas_dns "),
        ("sharing: {replicas: 2, name: a}", r"sharing\.name .*\breplicas_file and store$"),
        ("sharing: {replica: 2}", r"sharing\.replica .*\breplicas\?"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(text: str, fault: str):
    with pytest.raises(BadConfig, match=fault):
        parse(text, GatewayConfig, "gateway.yaml")


def test_the_index_comes_from_a_host_name():
    sharing = Sharing(replicas=3, index="hostname")
    assert (Share(3, 2),) == ReplicaList(sharing, lambda: 0.0, "gateway-2").shares
    with pytest.raises(BadConfig, match=r"sharing\.index: .*'gateway-3' .*\b0 to 2\b"):
        ReplicaList(sharing, lambda: 0.0, "gateway-3")


def test_fewer_slots_than_replicas_are_a_mistake():
    policy = Policy(capacity=Capacity(slots=2))
    assert [] == list(share_mistakes(policy, 2))
    (mistake,) = share_mistakes(policy, 3)
    assert re.match(r"capacity\.slots: 2 .*\b3 replicas\b", mistake)


async def test_a_file_of_names_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A replica waits until it is listed, takes less at once and more later; a file that is gone changes nothing."""
    monkeypatch.setattr(replicas, "LOOK_S", 0.01)
    looks, real = itertools.count(), ReplicaList._names
    last = 0

    async def names(it: ReplicaList, sharing: Sharing) -> tuple[list[str], list[str], str]:
        nonlocal last
        last = next(looks)
        return await real(it, sharing)

    async def looked() -> None:
        before = last
        await until(lambda: last >= before + 3, "the list is read and taken")

    monkeypatch.setattr(ReplicaList, "_names", names)
    file, now = tmp_path / "replicas", [0.0]
    file.write_text("b\n")
    it = ReplicaList(Sharing(replicas_file=str(file), name="a"), lambda: now[0])
    waiting = asyncio.create_task(it.until_listed(asyncio.Event()))
    await looked()
    file.write_text("b\na  # the first by name\n\n")
    await looked()
    assert not waiting.done(), "the others may not have seen it"
    now[0] += HOLD_S + 1
    assert await asyncio.wait_for(waiting, 10)
    assert (Share(2, 0),) == it.shares

    seen: list[tuple[Share, ...]] = []
    following = asyncio.create_task(it.follow(seen.append))
    try:
        for content, after_s in (("a\nb\nc", 1.0), (None, 2.0), ("a", HOLD_S + 3)):
            if content is None:
                file.unlink()
            else:  # at once: a list without the own name is another one
                (tmp_path / "new").write_text(content)
                (tmp_path / "new").rename(file)
            now[0] += after_s
            await looked()
        now[0] += HOLD_S + 1
        await looked()
    finally:
        following.cancel()
    assert [Share(2, 0), Share(3, 0)] == sorted(seen[0], key=lambda share: share.replicas)
    assert (Share(1, 0),) == seen[-1]


async def test_an_unlisted_replica_stops_on_request(tmp_path: Path):
    (tmp_path / "replicas").write_text("b")
    stop = asyncio.Event()
    it = ReplicaList(Sharing(replicas_file=str(tmp_path / "replicas"), name="a"), lambda: 0.0)
    waiting = asyncio.create_task(it.until_listed(stop))
    stop.set()
    assert not await asyncio.wait_for(waiting, 10)


async def test_addresses_of_a_host_name_are_replicas(monkeypatch: pytest.MonkeyPatch):
    """Real resolver: localhost is this machine, so it is listed under a name that resolves to the same address."""
    monkeypatch.setattr(replicas, "LOOK_S", 0.2)
    now = [0.0]
    it = ReplicaList(Sharing(replicas_dns="localhost"), lambda: now[0], "localhost")
    waiting = asyncio.create_task(it.until_listed(asyncio.Event()))
    await until(lambda: it.shares != (NOTHING,), "the list of replicas is read")
    now[0] += HOLD_S + 1
    assert await asyncio.wait_for(waiting, 10)
    assert 1 == len(it.shares)
    assert 0 == it.shares[0].index


async def test_a_resolver_that_hangs_holds_up_no_other_name(monkeypatch: pytest.MonkeyPatch):
    """Each look at the list waits for the look-up that runs; the threads of the event loop stay free for engines."""
    asked, answer = list[str](), threading.Event()
    real = socket.getaddrinfo

    def hanging(host: str, *more: object, **rest: object) -> object:
        if host != "gateways.example":
            return real(host, *more, **rest)  # type: ignore[arg-type]
        asked.append(threading.current_thread().name)
        answer.wait(10)
        return real("127.0.0.1", None)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(replicas, "LOOK_S", 0.01)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    it, stop = ReplicaList(Sharing(replicas_dns="gateways.example"), lambda: 0.0, "localhost"), asyncio.Event()
    waiting = asyncio.create_task(it.until_listed(stop))
    await until(lambda: bool(asked), "the look-up hangs")
    assert await asyncio.wait_for(asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80), 30)
    assert ["name-lookup"] == asked
    answer.set()
    stop.set()
    assert not await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
async def test_a_name_that_is_none_is_an_error_like_any_other(host: str):
    with pytest.raises(OSError, match="label"):
        await NameLookup(host).addresses()


async def test_two_gateways_hold_no_more_than_the_slots(tmp_path: Path):
    """Seen by the engine: a flood of both gets as many slots as there are, 3 and 2 of 5."""
    running = most = 0
    engine = FakeEngine()
    enough = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.wait_for(enough.wait(), 30)
        finally:
            running -= 1
        return web.json_response(REPLY)

    engine.answer = answer
    runner = await listening(engine)
    policy = {
        "teams": {team: {"keys": [hashed]} for team, (_, hashed) in KEYS.items()},
        "capacity": {"slots": 5, "min_slots": 1},
    }
    async with contextlib.AsyncExitStack() as stack:
        both = []
        for index in range(2):
            (tmp_path / str(index)).mkdir()
            sharing = Sharing(replicas=2, index=index)
            both.append(
                await stack.enter_async_context(
                    gateway(tmp_path / str(index), policy=policy, upstream=engine.url, sharing=sharing)
                )
            )
        asked = [asyncio.create_task(_status(it)) for it in both for _ in range(10)]
        waiting = [asyncio.create_task(_queued(it)) for it in both]
        assert 15 == sum(await asyncio.gather(*waiting)), "every other request waits at its gateway"
        await until(lambda: running == 5, "all slots are in use")
        assert 5 == most
        enough.set()
        assert [200] * 20 == await asyncio.gather(*asked)
    await runner.cleanup()
    assert 5 == most


async def _queued(it) -> int:
    """Return how many requests wait at a gateway, once it has got all ten."""

    async def counts() -> tuple[float, float] | None:
        figures = await it.figures()
        running, waiting = (
            sum(value for name, value in figures.items() if name[0] == metric.name) for metric in (RUNNING, WAITING)
        )
        return (running, waiting) if running + waiting == 10 else None

    return int((await until(counts, "the gateway has ten requests"))[1])


async def _status(it) -> int:
    async with it.post(ASK) as answer:
        await answer.read()
        return int(answer.status)


def test_check_shows_the_share_of_each_replica(tmp_path: Path):
    (tmp_path / "teams.yaml").write_text(
        "teams: {a: {keys: [], max_running: 2, max_in_flight: 9}}\n"
        "bands: {default: {rank: 0, floor: 4}}\ncapacity: {slots: 11, tokens: 1000}\n"
    )
    gateway_yaml = tmp_path / "gateway.yaml"
    gateway_yaml.write_text("upstream: http://h:1\nsharing: {replicas: 3, index: 0}\n")
    said = CliRunner().invoke(cli.main, ["gateway", "check", str(gateway_yaml)])
    assert 0 == said.exit_code, said.output
    assert " 3 replicas\n  limit  " in said.output
    report = json.loads(CliRunner().invoke(cli.main, ["gateway", "check", str(gateway_yaml), "--json"]).stdout)
    shares = [
        ("capacity.slots", 11, [4, 4, 3], "2 x 4, 3"),
        ("capacity.tokens", 1000, [334, 333, 333], "334, 2 x 333"),
        ("capacity.queue", 1024, [342, 341, 341], "342, 2 x 341"),
        ("bands.default.floor", 4, [2, 1, 1], "2, 2 x 1"),
        ("teams.a.max_running", 2, [1, 1, 0], "2 x 1, 0"),
        ("teams.a.max_in_flight", 9, [3, 3, 0], "2 x 3, 0"),
    ]
    assert [share[:3] for share in shares] == [tuple(row.values()) for row in report["replica_shares"]]
    for limit, of_all, _, cell in shares:
        assert re.search(rf"^  {limit} +{of_all} +{cell}$", said.output, re.MULTILINE)
    assert re.search(r"teams\.a\.max_running: 2 .*\b3 replicas\b.*\bshare of 0\b", said.output)
    gateway_yaml.write_text("upstream: http://h:1\nsharing: {replicas_file: names}\n")
    said = CliRunner().invoke(cli.main, ["gateway", "check", str(gateway_yaml)])
    assert "sharing.replicas_file: " in said.output
    assert 1 == said.exit_code
    (tmp_path / "names").write_text("\n".join("abcdefghijkl"))
    said = CliRunner().invoke(cli.main, ["gateway", "check", str(gateway_yaml)])
    assert re.search(r"capacity\.slots: 11 .*\b12 replicas\b", said.output)


def test_paths_are_relative_to_the_configuration(tmp_path: Path):
    from stack.gateway.config import rooted

    config = rooted(msgspec.convert({"sharing": {"replicas_file": "names"}}, GatewayConfig), tmp_path)
    assert config.sharing is not None
    assert str(tmp_path / "names") == config.sharing.replicas_file
