"""Division of a full queue: which request is admitted, which one gives way, and that a flood keeps no other team
out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import aiohttp
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.requests.record import parse_line
from stack.gateway import make_key
from stack.gateway.admission_state import Refusal, Ticket, TicketState
from stack.gateway.policy import Band, Team
from stack.gateway.queue_share import Bound, Claim
from tests.support.admission_gate import Gate, gate
from tests.support.ports import free_port
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[3]
BANDS = {"high": Band(rank=0), "usual": Band(rank=1), "low": Band(rank=2)}
TEAMS = {
    "vip": Team(band="high"),
    "a": Team(band="usual"),
    "b": Team(band="usual"),
    "heavy": Team(band="usual", weight=3),
    "low": Team(band="low"),
}


def flooded(by: str, queue: int, **capacity: int) -> Gate:
    """One slot and the whole queue taken by one team."""
    it = gate(TEAMS, BANDS, slots=1, queue=queue, **capacity)
    it.lets(*(f"{by}.{at}" for at in range(queue + 1)))
    return it


def waiting(it: Gate) -> dict[str, int]:
    return dict(Counter(ticket.team.name for ticket in it.tickets.values() if ticket.state is TicketState.WAITING))


def ask_until_refused(it: Gate, team: str, most: int = 50) -> int:
    """Return how many requests of a team were admitted one after the other."""
    return next(at for at in range(most) if isinstance(it.ask(f"{team}.again{at}"), Refusal))


def test_a_team_below_its_share_of_a_full_queue_is_admitted():
    it = flooded("a", 4)
    it.lets("b.0", "b.1")
    assert {"a": 2, "b": 2} == waiting(it)
    assert {"a.4": "queue_full", "a.3": "queue_full"} == {
        name: refusal.reason for name, refusal in it.displaced.items()
    }
    assert ("queue_full", "queue_full") == (it.ask("b.2").reason, it.ask("a.retry").reason)
    assert ["a.0", "b.0", "a.1", "b.1", "a.2"] == it.order()


def test_largest_loan_for_its_weight_yields():
    """Beyond its unit, p has borrowed 1 of weight 1, q 4 of weight 3."""
    claims = {"new": Claim(1, 1, 0), "p": Claim(1, 1, 2), "q": Claim(1, 3, 5)}
    bound = Bound(7, unit=1, size=1, asker="new", claims=claims)
    assert (True, "q") == (bound.is_exceeded, bound.next_to_yield())


def test_shares_go_by_weight_after_one_place_for_each():
    it = flooded("a", 10)
    assert 7 == ask_until_refused(it, "heavy")
    assert {"a": 3, "heavy": 7} == waiting(it)


def test_better_band_leaves_each_team_one_place():
    """A better band is admitted and leaves each other team one place."""
    it = flooded("a", 4)
    it.lets("b.0")
    assert 2 == ask_until_refused(it, "vip")
    assert {"a": 1, "b": 1, "vip": 2} == waiting(it)


def test_a_worse_band_has_one_place_in_the_flood_of_a_better_one():
    it = flooded("vip", 4)
    assert 1 == ask_until_refused(it, "low")
    assert {"vip": 3, "low": 1} == waiting(it)
    assert "queue_full" == it.ask("vip.retry").reason


def test_a_team_that_is_alone_may_use_the_whole_queue():
    it = flooded("low", 16)
    assert ({"low": 16}, "queue_full") == (waiting(it), it.ask("low.17").reason)


def test_the_worst_band_gives_way_first():
    it = flooded("low", 6)
    it.lets("a.0", "a.1")
    it.lets("vip.0", "vip.1", "vip.2")
    assert {"low": 1, "a": 2, "vip": 3} == waiting(it)
    it.lets("vip.3")
    assert {"low": 1, "a": 1, "vip": 4} == waiting(it)


def test_short_queue_serves_the_better_bands():
    """A queue with fewer places than teams serves the better bands."""
    it = flooded("low", 1)
    it.lets("a.0")
    it.lets("vip.0")
    assert {"vip": 1} == waiting(it)
    assert {"queue_full"} == {it.ask(name).reason for name in ("low.x", "a.x", "b.x", "vip.x")}


def test_room_in_tokens_is_made_by_as_many_requests_as_it_takes():
    it = gate(TEAMS, BANDS, slots=1, queue=50, queue_tokens=100)
    it.lets("a.first", *(f"a.{at}" for at in range(10)), prompt=10)
    it.lets("b.0", prompt=35)
    assert ({"a": 6, "b": 1}, 95) == (waiting(it), it.admission.waiting_tokens)
    assert "queue_full" == it.ask("b.1", prompt=30).reason, "65 are beyond its half of 100"
    assert {"a": 6, "b": 1} == waiting(it), "a request that is refused takes no place from anybody"


def test_a_request_that_would_wait_too_long_takes_no_place():
    it = gate({team: Team(band="usual") for team in "abc"}, {"usual": Band(rank=1, max_wait_s=9.0)}, slots=1, queue=3)
    it.lets("a.0", "a.1")
    it.end("a.0", after=4.0)
    it.lets("a.2", "a.3", "b.0")
    assert Refusal("est_wait", 12.0) == it.ask("c.0")
    assert {"a": 2, "b": 1} == waiting(it)


def test_a_displaced_request_leaves_nothing_behind():
    it = flooded("a", 2)
    it.lets("b.0")
    assert it.displaced["a.2"].retry_after_s >= 1.0
    it.admission.leave(it.tickets["a.2"], it.now)
    it.order()
    assert (0, 0, 0, 0) == it.counts()


PLACES = st.tuples(
    st.sampled_from(("ask", "ask", "ask", "ask", "leave", "pass")), st.integers(0, 99), st.integers(0, 40)
)


@given(
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(1, 200)),
    st.lists(st.tuples(st.sampled_from((0.2, 1.0, 1.0, 5.0)), st.integers(0, 2)), min_size=1, max_size=6),
    st.lists(PLACES, max_size=100),
)
@settings(max_examples=300, deadline=None)
def test_no_sequence_of_requests_breaks_the_division(
    queue: int, queue_tokens: int | None, terms: list[tuple[float, int]], operations: Iterable[tuple[str, int, int]]
):
    """Counts stay within their bounds; whoever is refused has its share; whoever gives way could not take the place
    back."""
    teams = {f"t{at}": Team(band=f"b{rank}", weight=weight) for at, (weight, rank) in enumerate(terms)}
    bound = {} if queue_tokens is None else {"queue_tokens": queue_tokens}
    it = gate(teams, {f"b{rank}": Band(rank=rank, floor=rank % 2) for rank in range(3)}, slots=2, queue=queue, **bound)
    for number, (what, which, size) in enumerate(operations):
        team = f"t{which % len(teams)}"
        if what == "ask":
            _asks(it, f"{team}.{number}", size, teams)
        elif what == "leave" and it.tickets:
            it.end(sorted(it.tickets)[which % len(it.tickets)])
        assert it.admission.waiting == sum(waiting(it).values()) <= queue
        assert it.admission.waiting_tokens <= (10**9 if queue_tokens is None else queue_tokens)
        assert it.admission.running == it.admission.slots or not it.admission.waiting, "no slot stays free"
    for ticket in it.tickets.values():
        it.admission.leave(ticket, it.now)
    assert (0, 0, 0, 0) == it.counts()


def _asks(it: Gate, name: str, size: int, teams: Mapping[str, Team]) -> None:
    team, before, displaced = name.split(".")[0], waiting(it), set(it.displaced)
    asked = it.ask(name, prompt=size)
    given_way = set(it.displaced) - displaced
    if isinstance(asked, Refusal):
        assert (before, set()) == (waiting(it), given_way)
        tokens = it.admission._capacity.queue_tokens
        if tokens is None:
            assert before.get(team, 0) + 1 > _share(team, before, it.admission._capacity.queue, teams), (
                "a team below its share is refused"
            )
        return
    for other in given_way:
        retried = it.admission._yielding(
            Ticket(it.tickets[other].team, it.tickets[other].prompt, 0, 0.0, 0.0, lambda: None, lambda _: None)
        )
        assert not retried, "whoever gives way takes a place from somebody else by asking again"


def _share(team: str, held: Mapping[str, int], queue: int, teams: Mapping[str, Team]) -> float:
    """The rule of docs/guides/gateway.md: a place for each team that waits or asks, the remainder by rank, and within a
    rank by weight."""
    active = {*held, team}
    if len(active) > queue:
        return 0.0
    better = sum(held[other] - 1 for other in held if teams[other].band < teams[team].band)
    peers = [teams[other].weight for other in active if teams[other].band == teams[team].band]
    return 1 + max(0, queue - len(active) - better) * teams[team].weight / sum(peers) - 1e-9


def test_the_shares_of_a_bound_add_up_to_it():
    claims = {"a": Claim(0, 1.0, 3), "b": Claim(1, 1.0, 6), "c": Claim(1, 3.0, 1)}
    Bound(10, 1, 1, "c", claims)
    assert {"a": 8.0, "b": 2.25, "c": 4.75} == {name: claim.share for name, claim in claims.items()}


# ---- the expected wait, by the holding times of each team


def test_short_requests_do_not_lower_others_expected_wait():
    """Short requests of one team do not lower the expected wait of another."""
    it = gate(TEAMS, BANDS, slots=2, queue=500)
    it.lets("b.0", *(f"a.{at}" for at in range(101)))
    for at in range(100):
        it.end(f"a.{at}", after=0.05)
    it.end("b.0", after=25.0)
    it.lets(*(f"b.{at}" for at in range(1, 5)))
    assert 30.0 < it.admission.wait_s("b"), "four of its own, 30 s each on two slots"


def test_short_requests_of_a_team_do_not_hide_its_own_long_ones():
    """200 requests of 50 ms, and then only long ones: the estimate follows those that run, before the first of them has
    ended."""
    it = gate(TEAMS, BANDS, slots=4, queue=500)
    for at in range(200):
        it.lets(f"a.short{at}")
        it.end(f"a.short{at}", after=0.05)
    it.lets(*(f"a.{at}" for at in range(44)))
    before = it.admission.wait_s("a")
    it.now += 60.0
    it.lets("a.later")
    assert before < 1.0 < 5.0 < it.admission.wait_s("a")


def test_better_band_waiter_is_not_waited_for_longer():
    """Whoever waits in a better band is not waited for longer than it waits."""
    bands = {name: Band(rank=band.rank, max_wait_s=100.0 if name == "low" else 30.0) for name, band in BANDS.items()}
    it = gate(TEAMS, bands, slots=1, queue=500)
    it.lets(*(f"a.{at}" for at in range(5)))
    it.end("a.0", after=20.0)
    assert 30.0 + 20.0 == it.admission.wait_s("low"), (
        "three of 20 s are before it; those still waiting after 30 s leave"
    )


# ---- real processes


class SlowEngine:
    """A fake engine on loopback that holds each request for so many seconds. answered: by team, which is named in the
    body."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self.answered: Counter[str] = Counter()

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response()

    async def answer(self, request: web.Request) -> web.Response:
        team = (await request.json())["user"]
        await asyncio.sleep(self.hold_s)
        self.answered[team] += 1
        usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
        return web.json_response(
            {"model": "tiny", "choices": [{"index": 0, "text": "ab", "finish_reason": "length"}], "usage": usage}
        )


async def test_forty_connections_do_not_block_two_teams(tmp_path: Path):
    """Four slots, a queue of 16, and a flood that never waits: a gateway in a process of its own serves each of 20
    requests of two other teams."""
    keys = {team: make_key(team) for team in ("flood", "one", "two")}
    engine, port, listen = SlowEngine(0.1), free_port(), free_port()
    app = web.Application()
    app.add_routes([web.post("/v1/completions", engine.answer), web.get("/metrics", engine.metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    said = {
        "teams": {team: {"keys": [hashed]} for team, (_, hashed) in keys.items()},
        "capacity": {"slots": 4, "queue": 16},
    }
    (tmp_path / "teams.yaml").write_text(json.dumps(said))
    config = {
        "upstream": f"http://127.0.0.1:{port}",
        "listen": f"127.0.0.1:{listen}",
        "metrics_listen": "127.0.0.1:0",
        "teams": "teams.yaml",
        "requests_log": "requests.jsonl",
    }
    (tmp_path / "gateway.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", "gateway.yaml"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stdout=quiet, stderr=quiet
    )
    try:
        await until(lambda: _listens(listen), "the gateway listens")
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{listen}", connector=aiohttp.TCPConnector(limit=0)
        ) as session:
            flood, others = await _contend(session, {team: key for team, (key, _) in keys.items()})
    finally:
        process.terminate()
        await process.wait()
        await runner.cleanup()
    assert {"one": {200: 20}, "two": {200: 20}} == others
    assert (20, 20) == (engine.answered["one"], engine.answered["two"])
    assert {200, 429} == flood.keys(), "the flood is served as well, and refused where it asks for more"
    records = [parse_line(line) for line in (tmp_path / "requests.jsonl").read_bytes().splitlines()]
    assert {("flood", "queue_full")} == {(one.team, one.reason) for one in records if one.outcome == "rejected"}
    assert any(one.reason == "queue_full" and (one.queue_ms or 0) > 0 for one in records), (
        "some of the flood had waited, and gave way"
    )


async def _contend(
    session: aiohttp.ClientSession, keys: Mapping[str, str]
) -> tuple[Counter[int], dict[str, Counter[int]]]:
    """Statuses of the flood, and of 20 requests of each other team, which are sent four at a time while the flood goes
    on."""

    async def sent(team: str) -> int:
        body = {"model": "tiny", "prompt": "some text", "max_tokens": 2, "user": team}
        async with session.post(
            "/v1/completions", json=body, headers={"Authorization": f"Bearer {keys[team]}"}
        ) as answer:
            await answer.read()
            return answer.status

    statuses: Counter[int] = Counter()

    async def floods() -> None:
        while True:
            statuses[status := await sent("flood")] += 1
            if status == 429:
                await asyncio.sleep(0.01)

    async def four_at_a_time(team: str) -> Counter[int]:
        async def five() -> list[int]:
            return [await sent(team) for _ in range(5)]

        return Counter(chain.from_iterable(await asyncio.gather(*(five() for _ in range(4)))))

    flooding = [asyncio.create_task(floods()) for _ in range(40)]
    try:
        await until(lambda: statuses[429] > 0, "the flood fills the queue")
        one, two = await asyncio.gather(four_at_a_time("one"), four_at_a_time("two"))
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    return statuses, {"one": one, "two": two}


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
