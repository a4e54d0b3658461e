"""Requests of several slots: what they hold, who goes next beside them, and that they take the engine from nobody."""

from __future__ import annotations

from itertools import chain

import pytest

from stack.gateway.admission_state import TicketState
from stack.gateway.handler import wanted_slots
from stack.gateway.policy import Band, Capacity, Policy, Team
from stack.gateway.request_body import read
from tests.support.admission_gate import Gate, gate
from tests.support.admission_sim import Arrival, Engine, Simulation, percentile

BANDS = {"high": Band(rank=0, max_wait_s=1e6), "low": Band(rank=2, ceiling=0.5, max_wait_s=1e6)}
TEAMS = {"vip": Team(band="high"), "few": Team(band="high", max_running=4), "low": Team(band="low"),
         "peer": Team(band="low")}  # fmt: skip


def of(route: str, body: bytes, prompt: int = 0) -> int:
    return wanted_slots(read(route, body), prompt)


@pytest.mark.parametrize(
    ("route", "body", "prompt", "slots"),
    [
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}]}', 99_999, 1),
        ("/v1/chat/completions", b'{"messages": [], "n": 4}', 9, 4),
        ("/v1/completions", b'{"prompt": "x", "n": 2, "best_of": 5}', 1, 5),
        ("/v1/completions", b'{"prompt": ["x", "y", "z"], "n": 2}', 3, 6),
        ("/v1/completions", b'{"prompt": []}', 0, 1),
        ("/v1/embeddings", b'{"input": ["x", "y"]}', 8192, 1),
        ("/v1/embeddings", b'{"input": "x"}', 8193, 2),
        ("/rerank", b'{"query": "x", "documents": ["y"]}', 60_000, 8),
        ("/generative_scoring", b'{"query": "x", "items": ["y", "z"]}', 10, 1),
        ("/v1/audio/transcriptions", b"", 0, 1),
    ],
)
def test_slots_of_a_request(route: str, body: bytes, prompt: int, slots: int):
    assert slots == of(route, body, prompt)


def held(it: Gate, name: str) -> int:
    return it.tickets[name].held if it.tickets[name].state is TicketState.RUNNING else 0


@pytest.mark.parametrize(
    ("team", "floor", "slots"), [("vip", 0, 8), ("vip", 2, 6), ("few", 0, 4), ("low", 0, 4), ("low", 2, 4)]
)
def test_a_request_holds_no_more_than_its_team_may(team: str, floor: int, slots: int):
    """Its max_running, the ceiling of its band, and the slots that no floor of another band takes."""
    it = gate(TEAMS, BANDS | {"low": Band(rank=2, ceiling=0.5, floor=floor)}, slots=8)
    it.lets(f"{team}.0", slots=400)
    assert slots == held(it, f"{team}.0") == it.admission.running
    it.end(f"{team}.0")
    assert 0 == it.admission.running


def test_who_is_next_waits_for_all_of_his_slots():
    it = gate(TEAMS, BANDS, slots=8)
    it.lets("vip.0", slots=5)
    it.lets("vip.1", slots=4)
    it.lets("low", "few")
    assert ["vip.0", "few"] == it.gone, "few has had nothing yet; low is behind vip"
    assert ["vip.1", "low"] == it.end("vip.0")


def test_a_team_at_its_max_running_stops_no_other_team():
    it = gate(TEAMS, BANDS, slots=8)
    it.lets("few.0")
    it.lets("few.1", slots=4)
    it.lets("few.2", "vip", "low")
    assert ["few.0", "vip", "low"] == it.gone
    assert ["few.1"] == it.end("few.0")
    assert ["few.2"] == it.end("few.1")


def test_a_band_at_its_ceiling_waits_without_the_others():
    """Nobody of its own band overtakes the request that is too wide for the rest of the ceiling."""
    it = gate(TEAMS, BANDS, slots=8)
    it.lets("low.0")
    it.lets("low.1", slots=4)
    it.lets("peer.0", "peer.1", "vip")
    assert ["low.0", "peer.0", "vip"] == it.gone, "peer has had nothing yet, then it is the turn of low"
    it.end("low.0")
    assert ["low.1"] == it.end("peer.0")
    assert ["peer.1"] == it.end("low.1")


def test_a_floor_is_for_requests_that_fit_into_it():
    """A wide request of a worse band does not go before a better one; others of its band have the floor meanwhile."""
    bands = BANDS | {"low": Band(rank=2, ceiling=0.5, floor=2)}
    it = gate(TEAMS, bands, slots=8)
    it.lets(*(f"vip.{at}" for at in range(10)))
    it.lets("low.wide", slots=3)
    it.lets("peer.0", "peer.1", "peer.2")
    assert ["peer.0"] == it.end("vip.0")
    assert ["peer.1"] == it.end("vip.1")
    assert ["vip.8"] == it.end("vip.2")
    assert ["vip.9"] == it.end("vip.3")
    for name in ("vip.4", "peer.0"):
        assert [] == it.end(name), "by rank it is the turn of the wide one, and the floor of its band is no way past it"
    assert ["low.wide"] == it.end("vip.5")
    assert ["peer.2"] == it.end("peer.1")


def test_a_wait_counts_slots():
    it = gate({"a": Team(band="high"), "b": Team(band="high")}, BANDS, slots=4)
    it.lets("a.0")
    it.end("a.0", after=8.0)
    it.lets("a.1", slots=4)
    it.lets("a.2", slots=4)
    assert 10.0 == it.admission.wait_s("a"), "four slots ahead and its own, of four that are held for 8 s"
    assert 16.0 == it.admission.wait_s("a", 4)


def test_logprobs_have_a_price():
    """So that a team of two of equal tokens takes its turns by them, and gets back what it was not sent."""
    it = gate(slots=1)
    it.lets("a.0", prompt=100, output=100, logprobs=(21, 20))  # 100 + 200 + 4100 / 4
    assert 1325 == it.tickets["a.0"].charged
    it.end("a.0", prompt=99, output=10)
    team = it.tickets["a.0"].team
    assert 99 + 20 + (99 * 21 + 10 * 20) // 4 == team.charged == team.served


FLOORS = (0, 2)
SHAPES = {
    "n": (b'{"messages": [], "n": 4}', "/v1/chat/completions", 0, 4),
    "prompts": (b'{"prompt": ["x", "x", "x", "x", "x", "x"]}', "/v1/completions", None, 6),
    "best_of": (b'{"prompt": "x", "best_of": 6}', "/v1/completions", None, 6),
    "embeddings": (b'{"input": "x"}', "/v1/embeddings", None, 6),
}


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize(("body", "route", "max_running", "texts"), SHAPES.values(), ids=SHAPES)
def test_a_flood_of_texts_leaves_a_better_band_its_engine(
    body: bytes, route: str, max_running: int | None, texts: int, floor: int
):
    """An engine of eight seats: a better band takes about as long as alone, which it did not while a request held one
    slot."""
    bands = {"demo": Band(rank=0), "low": Band(rank=2, ceiling=0.8, floor=floor, max_wait_s=1e6)}
    policy = Policy(
        teams={"demo": Team(band="demo"), "big": Team(band="low", max_running=4 if max_running == 0 else None)},
        bands=bands,
        capacity=Capacity(slots=8),
    )
    demo = [Arrival(1.0 + 0.7 * at, "demo", 10, 10, 0.2) for at in range(300)]
    flood = [Arrival(0.01 * at, "big", 10, 10, 3.0, texts=texts, slots=of(route, body, 48_000)) for at in range(200)]

    def slowest_s(*arrivals: list[Arrival]) -> float:
        simulation = Simulation(policy, engine=Engine(8))
        simulation.run(sorted(chain(*arrivals), key=lambda one: one.at))
        assert sum(map(len, arrivals)) == len(simulation.ended)
        return percentile(sorted(one.took_s for one in simulation.ended if one.arrival.team == "demo"), 0.99)

    alone_s = slowest_s(demo)
    assert slowest_s(demo, flood) <= 2 * alone_s
    assert slowest_s(demo, [Arrival(one.at, "big", 10, 10, 3.0, texts=texts) for one in flood]) > 5 * alone_s
