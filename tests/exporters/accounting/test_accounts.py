"""Readings of engines and GPUs in the books: who owns a GPU, whose its time was, and what outlives a restart."""

from __future__ import annotations

import pytest

from exporters.accounting.prices import GpuPrice, PriceChange, Prices
from exporters.catalogue.metric import EngineRole
from exporters.engine import view as engine_view
from exporters.engine.view import EngineView
from exporters.gpu.readings import GpuReading, MigReading
from exporters.requests.record import RequestRecord, timestamp
from exporters.requests.store import CounterStore
from exporters.sidecar_config import EngineTarget
from tests.support import engine_pair
from tests.support.joined_accounts import NOON, Books, view


def card(uuid: str, joules: float | None = None, **about) -> GpuReading:
    return GpuReading(
        uuid, name="NVIDIA H200", energy_joules=joules, energy_method="counter" if joules is not None else None, **about
    )


def test_single_engine_has_all_gpus_shared_by_tokens():
    """An engine alone has all GPUs and its teams share the time by their tokens."""
    books = Books()
    books.accounts.on_gpus([card("GPU-a"), card("GPU-b")], books.now)
    books.look(view())
    books.log(a=(0, 300), b=(0, 100))
    books.look(view(2, 0, 400, running=1))
    books.look(view(2, 0, 400))
    assert {("GPU-a",): 10.0, ("GPU-b",): 10.0} == books.figures("gpu_allocated_seconds_total", "uuid")
    by_team = books.figures("gpu_seconds_total", "team")
    pending = books.figures("gpu_pending_seconds")[()]
    assert 20 == pytest.approx(sum(by_team.values()) + pending)
    assert 10 == by_team["__idle__",], "half of each interval at one end of which it ran, on two GPUs"
    assert 3 * by_team["b",] == pytest.approx(by_team["a",])
    cost = books.figures("cost_total", "basis", "team")
    assert 0.001 * by_team["a",] == pytest.approx(cost["allocation", "a"]) == pytest.approx(cost["usage", "a"])


def test_named_gpus_go_to_their_engine():
    """Named GPUs go to their engine and what nobody names is on the bill all the same."""
    books = Books({"one": ("GPU-a",), "two": ("GPU-b",)})
    for _ in range(3):
        books.accounts.on_gpus([card("GPU-a"), card("GPU-b"), card("GPU-c")], books.now)
        books.look(view(), "one", 0)
        books.look(view(model="n"), "two", 5)
    allocated = books.figures("gpu_allocated_seconds_total", "model_name", "uuid")
    assert {("m", "GPU-a"): 10.0, ("n", "GPU-b"): 10.0} == {k: v for k, v in allocated.items() if k[1] != "GPU-c"}
    assert ("__none__", "GPU-c") in allocated
    assert books.figures("cost_total", "model_name", "team")["__none__", "__unattributed__"] > 0


def test_several_engines_without_named_gpus_have_none():
    """Of several engines without named GPUs none is taken to have one."""
    books = Books({"one": (), "two": ()})
    for _ in range(2):
        books.accounts.on_gpus([card("GPU-a")], books.now)
        books.look(view(), "one")
    assert {"__none__"} == {model for model, _ in books.figures("gpu_allocated_seconds_total", "model_name", "uuid")}


def test_mig_instance_has_its_share_of_cost_and_energy():
    """A MIG instance costs its part and has its part of the GPUs energy."""

    def reading(joules: float) -> GpuReading:
        halves = [
            MigReading("GPU-a", 1, "MIG-1", "3g.71gb", graphics_ratio=0.9),
            MigReading("GPU-a", 2, "MIG-2", "4g.71gb", graphics_ratio=0.1),
        ]
        return card("GPU-a", joules, mig=True, instances=tuple(halves))

    books = Books({"one": ("MIG-1",), "two": ("MIG-2",)})
    for step in range(3):
        books.accounts.on_gpus([reading(1000.0 * step)], books.now)
        books.look(view(), "one", 0)
        books.look(view(model="n"), "two", 7)
    assert {("MIG-1",): pytest.approx(14 * 3 / 7), ("MIG-2",): pytest.approx(14 * 4 / 7)} == books.figures(
        "gpu_allocated_seconds_total", "uuid"
    )
    joules = books.figures("energy_joules_total", "model_name")
    assert 2000 == pytest.approx(sum(joules.values()))
    assert 27 / 4 == pytest.approx(joules["m",] / joules["n",]), "3/7 at 90 %, 4/7 at 10 %"


def test_a_driver_that_was_loaded_anew_takes_no_joule_back():
    books = Books()
    for joules in (500.0, 800.0, 50.0, 60.0):
        books.accounts.on_gpus([card("GPU-a", joules)], books.now)
        books.look(view())
    assert 360 == pytest.approx(sum(books.figures("energy_joules_total", "team").values()))


def test_silent_engine_keeps_costing_with_unknown_work():
    """While an engine is silent its GPUs go on costing and what they did is unknown."""
    books = Books()
    books.accounts.on_gpus([card("GPU-a")], books.now)
    books.look(view())
    for _ in range(3):
        books.now += 5
        books.accounts.on_failure("e", books.now, books.now)
    books.look(view())
    assert 20 == books.figures("gpu_allocated_seconds_total")[()]
    assert 20 == books.figures("gpu_seconds_total", "team", "method")["__unattributed__", "unknown"]


def test_a_clock_that_is_put_right_costs_no_gpu_time():
    books = Books()
    books.accounts.on_gpus([card("GPU-a")], 100)
    for clock_s, jump_s in enumerate((0, 0, 3e7, 0, -3e7, 0), 100):
        books.look(view(), after_s=1 + jump_s, clock_s=clock_s)
    assert 5 == pytest.approx(books.figures("gpu_allocated_seconds_total")[()])


def test_gpu_time_of_an_unserving_engine_is_nobodys():
    """The time of a GPU whose engine serves nothing is nobodys and is told."""
    books = Books()
    books.accounts.on_gpus([card("GPU-a")], books.now)
    empty = EngineView("0.32.0", NOON - 100, {}, ())
    for seen in (view(), empty):
        books.look(seen)
    books.accounts.on_failure("e", books.now + 5, books.now + 5)
    books.look(view(), after_s=10)
    assert {("m",): 5.0, ("__none__",): 10.0} == books.figures("gpu_allocated_seconds_total", "model_name")


def test_restart_keeps_sums_and_bills_no_gap():
    """A restart goes on with the same sums and bills nobody for the time between."""
    books = Books()
    ledger = CounterStore(books.traffic)
    ledger.accounts += books.accounts.state_providers()
    books.accounts.on_gpus([card("GPU-a", 0.0)], books.now)
    books.look(view())
    books.log(a=(10, 90))
    books.accounts.on_gpus([card("GPU-a", 700.0)], books.now)
    books.look(view(1, 10, 90, running=1))
    ledger.commit({})
    names = (
        "gpu_allocated_seconds_total",
        "gpu_seconds_total",
        "cost_total",
        "energy_joules_total",
        "reconcile_engine_total",
        "reconcile_logged_total",
    )
    before = {name: books.figures(name) for name in names}
    again = Books(stored=ledger._shown.accounts, traffic=books.traffic)
    assert before == {name: again.figures(name) for name in names}
    again.now = books.now + 600
    again.accounts.on_gpus([card("GPU-a", 9000.0)], again.now)
    again.look(view(1, 10, 90), after_s=0)
    assert before["gpu_allocated_seconds_total"] == again.figures("gpu_allocated_seconds_total")
    assert before["energy_joules_total"] == again.figures("energy_joules_total")
    assert 1 == again.figures("reconcile_engine_total", "kind")["requests",]


def test_both_ways_to_share_an_hour_are_shown():
    """The two ways to share an hour are laid side by side when it is over."""
    import asyncio

    books = Books()
    books.accounts.on_gpus([card("GPU-a")], books.now)
    books.look(view())
    hour = (int(books.now // 3600) + 1) * 3600.0
    books.now = hour
    about = {"model": "m", "outcome": "ok", "prompt_tokens": 0}
    records = [
        RequestRecord(
            request_id="1", team="a", completion_tokens=10, ts=timestamp(hour + 40), e2e_ms=30_000.0, **about
        ),
        RequestRecord(
            request_id="2", team="b", completion_tokens=30, ts=timestamp(hour + 70), e2e_ms=10_000.0, **about
        ),
    ]
    books.traffic.add_all(records)
    books.look(view(2, 0, 40, running=1), after_s=75)
    books.accounts.on_requests(records, books.now)
    books.look(view(2, 0, 40), after_s=5)
    asyncio.run(books.accounts.compare_hour(hour + 3600 + 1200))
    differences = books.figures("share_difference_ratio", "team")
    assert {("a",): pytest.approx(0.5), ("b",): pytest.approx(-0.5)} == differences, (
        "3/4 and 1/4 of the time, 1/4 and 3/4 of the tokens"
    )


def test_gpus_that_nobody_sees_are_billed_by_their_number():
    """On Kubernetes the sidecar sees no GPU: the number and the name in its configuration are enough for a bill."""
    target = EngineTarget("e", "http://127.0.0.1:8000", gpu_count=2, gpu_name="H100")
    books = Books({"e": target.claimed_gpus}, Prices(gpu_hour=1.0, gpus=(GpuPrice("H100", 3.6),)))
    books.look(view())
    books.log(a=(0, 300), b=(0, 100))
    books.look(view(2, 0, 400, running=1))
    books.look(view(2, 0, 400))
    by_team = books.figures("gpu_seconds_total", "team")
    pending = books.figures("gpu_pending_seconds")[()]
    assert 20 == pytest.approx(sum(by_team.values()) + pending)
    assert {(): 20.0} == books.figures("gpu_allocated_seconds_total")
    assert 0.001 * by_team["a",] == pytest.approx(books.figures("cost_total", "basis", "team")["allocation", "a"])


@pytest.mark.parametrize("more", [{"gpus": ("GPU-a",), "gpu_count": 1}, {"gpu_count": -1}, {"gpu_name": "a/b"}])
def test_gpus_are_named_or_counted(more):
    with pytest.raises(ValueError, match=r"'e': .*\bgpus\b.*gpu_count.*gpu_name"):
        EngineTarget("e", "http://127.0.0.1:8000", **more)


def test_cost_is_booked_at_the_price_of_the_moment():
    """25 seconds at the old price, 25 at the new one."""
    change = PriceChange(timestamp(NOON + 40), gpu_hour=7.2)
    books = Books({"e": ("GPU-a",)}, Prices(gpu_hour=3.6, currency="EUR", changes=(change,)))
    for after_s in (5, 25, 25):
        books.look(view(), after_s=after_s)
    assert pytest.approx(0.025 + 0.050) == sum(books.figures("cost_total").values())


def test_request_of_a_prefill_decode_pair_is_reconciled_once():
    """With the pages of a real pair: the log has 8 requests, and so has each engine."""
    books = Books({"p": (), "d": ()}, roles={"p": EngineRole.PREFILL, "d": EngineRole.DECODE})
    for step in engine_pair.STEPS[:2]:
        if step == "after":
            for number in range(engine_pair.REQUESTS):
                books.traffic.add(engine_pair.record(number))
        for name, role in (("p", EngineRole.PREFILL), ("d", EngineRole.DECODE)):
            books.look(engine_view.parse(engine_pair.text(role, step)), name)
    for _ in range(20):
        books.look(engine_view.parse(engine_pair.text(EngineRole.DECODE, "after")), "d")
    engine = books.figures("reconcile_engine_total", "kind")
    assert {
        ("requests",): engine_pair.REQUESTS,
        ("prompt",): engine_pair.REQUESTS * engine_pair.PROMPT,
        ("completion",): engine_pair.REQUESTS * engine_pair.COMPLETION,
    } == engine
    assert engine == books.figures("reconcile_logged_total", "kind")
    assert {0.0} == set(books.figures("missing_in_log_total", "kind", "cause").values())
