"""The log against the engine: a world whose truth is known, and what the reconciliation makes of what it is shown."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.accounting import reconciliation
from exporters.accounting.reconciled import (
    EXTRA_CAUSES,
    KINDS,
    MISSING_CAUSES,
    ReconciledModel,
    ReconciliationState,
    TokenPair,
)
from exporters.accounting.reconciliation import NEAR_AT_LEAST_LINES, NEAR_AT_LEAST_S, Reconciler
from exporters.catalogue import reconciled
from exporters.engine.view import EngineCore, EngineTotals, EngineView
from exporters.requests.work import FinishedRequest

TICK_S = 0.1
LOOK_EVERY_S = 5.0
SETTLED_S = 45.0  # patience, a look, and some
MODEL = "base"
NOTHING = FinishedRequest()
NOTHING_BOOKED = tuple({cause: [0] * 3 for cause in causes} for causes in (MISSING_CAUSES, EXTRA_CAUSES))


@dataclass(slots=True)
class Request:
    """One request of the world. lines: how often the log tells it. name: what the log calls its model."""

    n: int = 1
    prompt: int = 10
    completion: int = 20
    lines: int = 1
    usage: bool = True
    readable: bool = True
    name: str = MODEL
    finished: bool = False
    counted: bool = False  # by a page that was read, after the first one
    before_start: bool = False
    lines_at: list[float] = field(default_factory=list)

    @property
    def work(self) -> FinishedRequest:
        if not self.readable:
            return FinishedRequest(unreadable=self.n)
        tokens = (self.prompt * self.n, self.completion * self.n) if self.usage else (0, 0)
        return FinishedRequest(self.n, *tokens, missing=0 if self.usage else 1)

    @property
    def true_work(self) -> tuple[int, int, int]:
        return self.n, self.prompt * self.n, self.completion * self.n


@dataclass(slots=True)
class Process:
    """A vLLM server with two ranks while it lives."""

    started_s: float
    totals: dict[str, EngineTotals] = field(default_factory=lambda: {"0": EngineTotals(), "1": EngineTotals()})
    running: dict[str, int] = field(default_factory=lambda: {"0": 0, "1": 0})
    new: list[Request] = field(default_factory=list)  # finished since the last look

    def add(self, rank: str, **figures: int) -> None:
        self.totals[rank] = self.totals[rank].plus(EngineTotals(**figures))

    def view(self) -> EngineView:
        cores = {(MODEL, rank): EngineCore(self.totals[rank], self.running[rank], 0) for rank in self.totals}
        return EngineView(version=None, started_s=self.started_s, growing={}, caches=(), cores=cores)


class World:
    """Engines, a log and a sidecar on a virtual clock."""

    def __init__(self, engines: int = 2, aliases: dict[str, str] | None = None, late_s: float | None = None) -> None:
        self.now_s, self.late_s, self.aliases = 1000.0, late_s, aliases or {}
        self.processes: dict[str, Process | None] = {f"e{at}": Process(self.now_s - 50) for at in range(engines)}
        self.log: dict[str, FinishedRequest] = {}
        self.requests: list[Request] = []
        self.first_look_s: float | None = None
        self.read_at_s = self.first_read_s = self.now_s  # when the log was read; the state that the first look had
        self.based: set[str] = set()
        self.reading, self.caught_up = True, False
        self.read: dict[str, FinishedRequest] = {}
        self.sidecar: Reconciler | None = Reconciler(self.aliases, upstreams=self.processes)
        self.names: dict[str, str] | None = {}
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self.next_look_s = self.now_s

    def at(self, when_s: float, what) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), what))

    def ask(
        self,
        request: Request,
        upstream: str = "e0",
        rank: str = "0",
        lasts_s: float = 1.0,
        late_s: float = 0.1,
        aborts: bool = False,
    ) -> None:
        """A request begins. late_s: from the engine's end to the line. An engine that dies takes what runs with it."""
        process = self.processes[upstream]
        if process is None:
            return
        self.requests.append(request)
        process.running[rank] += request.n
        process.add(rank, prompt_tokens=request.prompt * request.n)

        def end() -> None:
            if self.processes[upstream] is not process:
                return
            process.running[rank] -= request.n
            process.add(rank, completion_tokens=request.completion * request.n)
            if aborts:
                return
            request.finished = True
            process.new.append(request)
            requests, prompt, completion = request.true_work
            process.add(rank, requests=requests, request_prompt_tokens=prompt, request_completion_tokens=completion)
            for _ in range(request.lines):
                self.at(self.now_s + late_s, line)

        def line() -> None:
            self.log[request.name] = self.log.get(request.name, FinishedRequest()).plus(request.work)
            request.lines_at.append(self.now_s)

        self.at(self.now_s + lasts_s, end)

    def kill(self, upstream: str) -> None:
        self.processes[upstream] = None

    def start(self, upstream: str) -> None:
        if self.processes[upstream] is None:
            self.processes[upstream] = Process(self.now_s)

    def restart_sidecar(self, away_s: float) -> None:
        """Stored, away, and back from what was stored."""
        stored = msgspec.msgpack.encode(self.sidecar.state())
        self.sidecar = None
        self.run(away_s)
        self.sidecar = Reconciler(
            self.aliases, msgspec.msgpack.decode(stored, type=ReconciliationState), self.processes
        )
        self.next_look_s, self.caught_up = self.now_s, False

    def run(self, seconds: float, every_tick=None) -> None:
        for _ in range(round(seconds / TICK_S)):
            self._tick()
            if every_tick:
                every_tick()

    def _tick(self) -> None:
        if self.sidecar and self.reading:
            self.read, self.read_at_s = dict(self.log), self.now_s
        if self.sidecar:
            self.sidecar.settle(self.now_s, self.read, at_end=self.reading)
            self.caught_up |= self.reading
        asked_s, asked = self.now_s, dict(self.read)
        due = self.sidecar is not None and self.now_s >= self.next_look_s
        self._happen(self.now_s + TICK_S / 2)
        if due:  # the page comes half a tick after it was asked for
            self.next_look_s = asked_s + LOOK_EVERY_S
            for upstream, process in self.processes.items():
                self._look(upstream, process, asked_s, asked)
        self._happen(self.now_s + TICK_S / 2)

    def _happen(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
        self.now_s = until_s

    def _look(self, upstream: str, process: Process | None, asked_s: float, asked: dict[str, FinishedRequest]) -> None:
        if process is None:
            self.sidecar.on_failure(upstream)
            return
        if self.caught_up:  # else the log is behind, and the look does not count
            if self.first_look_s is None:
                self.first_look_s = asked_s
                self.first_read_s = min(self.read_at_s, asked_s)  # later lines count, whenever their requests ended
            based = upstream in self.based or process.started_s > self.first_look_s
            for request in process.new:
                request.counted, request.before_start = based, not based
            self.based.add(upstream)
            process.new.clear()
        self.sidecar.look(upstream, process.view(), asked_s, asked, 5.0, self.late_s)
        if self.sidecar.names_due(upstream, self.now_s):
            self.sidecar.record_names(upstream, self.names, self.now_s)

    def taken(self, request: Request) -> int:
        return sum(at_s > self.first_read_s for at_s in request.lines_at)

    def truth(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Missing and extra in the log by cause, as they are in the end."""
        missing_in_log = {cause: [0, 0, 0] for cause in MISSING_CAUSES}
        extra_in_log = {cause: [0, 0, 0] for cause in EXTRA_CAUSES}
        for request in self.requests:
            if not request.finished:
                continue
            work = request.true_work
            beyond = request.counted - self.taken(request)
            if beyond > 0:
                _add(missing_in_log["unknown"], work, beyond)
            if beyond < 0:
                cause = "start" if request.before_start else "unknown" if request.counted else "restart"
                _add(extra_in_log[cause], work, -beyond)
            if request.counted and not request.readable:
                _add(missing_in_log["unreadable"], work, min(1, self.taken(request)))
            elif request.counted and not request.usage:
                _add(missing_in_log["no_usage"], (0, *work[1:]), min(1, self.taken(request)))
        return missing_in_log, extra_in_log

    def told(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        model = self.sidecar.state().models[MODEL]
        return model.missing_in_log, model.extra_in_log


def _add(total: list[int], work: tuple[int, ...], times: int) -> None:
    for kind, amount in enumerate(work):
        total[kind] += amount * times


def _sum(causes: dict[str, list[int]], kind: int) -> int:
    return sum(amounts[kind] for amounts in causes.values())


def values(sidecar: Reconciler) -> dict[tuple[str, ...], float]:
    return {(metric.name, *sorted(labels.values())): value for metric, labels, value in sidecar.samples()}


def the_law_holds(sidecar: Reconciler) -> None:
    found: dict[str, dict[str, int]] = {}
    for metric, labels, value in sidecar.samples():
        if "kind" in labels:
            of_kind = found.setdefault(labels["model_name"] + labels["kind"], {})
            of_kind[metric.name] = of_kind.get(metric.name, 0) + value
    for kind in found.values():
        engine_side = kind[reconciled.ENGINE.name]
        assert engine_side == (
            kind[reconciled.LOGGED.name]
            + kind[reconciled.MISSING_IN_LOG.name]
            - kind[reconciled.EXTRA_IN_LOG.name]
            + kind[reconciled.OPEN.name]
        )
        assert all(isinstance(value, int) for value in kind.values())


REQUESTS = st.builds(
    Request,
    n=st.sampled_from([1, 1, 2, 4]),
    prompt=st.integers(0, 3000),
    completion=st.integers(0, 800),
    lines=st.sampled_from([1, 1, 1, 0, 2]),
)
STEPS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.1, 12)),
    st.tuples(
        st.just("ask"),
        REQUESTS,
        st.sampled_from(["e0", "e1"]),
        st.sampled_from(["0", "1"]),
        st.floats(0, 20),
        st.one_of(st.floats(0.05, 0.8), st.floats(0.05, 29)),
        st.booleans(),
    ),
    st.tuples(st.just("kill"), st.sampled_from(["e0", "e1"])),
    st.tuples(st.just("start"), st.sampled_from(["e0", "e1"])),
    st.tuples(st.just("sidecar"), st.floats(0.1, 90)),
    st.tuples(st.just("stall"), st.floats(0.1, 20)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_bookings_are_sure_and_complete_in_the_end(steps):
    """Whatever happens, nothing is booked that is not so; once all is quiet, the gap is known to the last token."""
    world = World()

    def sure() -> None:
        what_is_booked_is_sure(world)

    for step in steps:
        take(world, step, sure)
    for upstream in world.processes:
        world.start(upstream)
    world.run(22, sure)
    world.run(2 * SETTLED_S, sure)
    the_law_holds(world.sidecar)
    (missing_in_log, extra_in_log), (true_missing, true_extra) = world.told(), world.truth()
    for kind in range(len(KINDS)):
        gap = _sum(true_missing, kind) - _sum(true_extra, kind)
        assert gap == _sum(missing_in_log, kind) - _sum(extra_in_log, kind)
        assert (
            0
            == world.sidecar.state().models[MODEL].engine[kind] - world.sidecar.state().models[MODEL].logged[kind] - gap
        )


def take(world: World, step: tuple, every_tick) -> None:
    """One of STEPS."""
    match step:
        case "wait", seconds:
            world.run(seconds, every_tick)
        case "ask", request, upstream, rank, lasts_s, late_s, aborts:
            world.ask(replace(request, lines_at=[]), upstream, rank, lasts_s, late_s, aborts)
        case "kill", upstream:
            world.kill(upstream)
        case "start", upstream:
            world.start(upstream)
        case "sidecar", away_s:
            world.restart_sidecar(away_s)
        case "stall", seconds:
            world.reading = False
            world.run(seconds, every_tick)
            world.reading = True


def what_is_booked_is_sure(world: World) -> None:
    if world.sidecar and world.sidecar.state().models:
        (missing_in_log, extra_in_log), (true_missing, true_extra) = world.told(), so_far(world)
        for kind in range(len(KINDS)):
            assert _sum(missing_in_log, kind) <= true_missing[kind]
            assert _sum(extra_in_log, kind) <= true_extra[kind]


def so_far(world: World) -> tuple[list[int], list[int]]:
    """The most that can be missing_in_log and extra_in_log by now, by kind: lines that will never come, and lines too
    many."""
    missing_in_log, extra_in_log = [0, 0, 0], [0, 0, 0]
    for request in world.requests:
        if request.finished:
            _add(missing_in_log, request.true_work, max(0, request.counted - request.lines))
            _add(extra_in_log, request.true_work, max(0, world.taken(request) - request.counted))
    return missing_in_log, extra_in_log


def quiet(world: World) -> World:
    for upstream in world.processes:
        world.start(upstream)
    world.run(SETTLED_S)
    the_law_holds(world.sidecar)
    return world


def seeded(world: World, seconds: float, per_second: float, seed: int = 1, **fates) -> None:
    """Mixed load: n of 1 to 4, two engines, two ranks; some are aborted. fates: chances of lines=0, lines=2,
    usage=False, readable=False."""
    rng = random.Random(seed)
    for _ in range(round(seconds / TICK_S)):
        for _ in range(_poisson(rng, per_second * TICK_S)):
            lines = 0 if rng.random() < fates.get("none", 0) else 2 if rng.random() < fates.get("twice", 0) else 1
            request = Request(
                rng.choice((1, 1, 1, 2, 4)),
                rng.randint(1, 4000),
                rng.randint(1, 900),
                lines,
                rng.random() >= fates.get("no_usage", 0),
                "unreadable" not in fates or rng.random() >= fates["unreadable"],
            )
            slow_s = fates.get("slow_s", 0) * (rng.random() < fates.get("slow", 0))
            world.ask(
                request,
                rng.choice(list(world.processes)),
                rng.choice("01"),
                rng.expovariate(1 / 2.0),
                0.1 + slow_s,
                aborts=rng.random() < 0.05,
            )
        world.run(TICK_S)


def _poisson(rng: random.Random, mean: float) -> int:
    count, left = 0, rng.expovariate(1)
    while left < mean:
        count, left = count + 1, left + rng.expovariate(1)
    return count


@pytest.mark.parametrize(
    ("fates", "sidecar_away_s"),
    [
        ({}, 0),
        ({"none": 0.1}, 0),
        ({"twice": 0.1}, 0),
        ({"none": 0.1}, 70),
        ({"twice": 0.1}, 70),
        ({"no_usage": 0.2}, 0),
        ({"unreadable": 0.2}, 0),
        ({"unreadable": 0.2}, 70),
        ({"slow": 0.03, "slow_s": 25}, 0),
    ],
    ids=str,
)
def test_every_cause_is_exact_once_all_is_quiet(fates, sidecar_away_s):
    """Missing and extra in the log, by cause and kind, to the token; also when the sidecar was away and came back to
    its state."""
    world = World()
    world.run(SETTLED_S)  # what the first look leaves open is settled first
    seeded(world, 30, 5, **fates)
    if sidecar_away_s:
        world.restart_sidecar(sidecar_away_s)
        seeded(world, 20, 5, seed=2, **fates)
    quiet(world)
    assert world.truth() == world.told()
    assert bool(fates) == any(map(any, (*world.told()[0].values(), *world.told()[1].values()))) or "slow" in fates
    assert 0 == sum(value for (name, *_), value in values(world.sidecar).items() if name == reconciled.OPEN.name)


def test_what_a_restart_swallowed_is_told_as_that():
    """Finished after the last look, logged, and then the process was gone: extra in the log, and no more than that."""
    world = World()
    world.run(SETTLED_S)
    seeded(world, 33, 10)
    world.kill("e1")
    seeded(world, 12, 10, seed=2)
    world.start("e1")
    seeded(world, 20, 10, seed=3)
    quiet(world)
    missing_in_log, extra_in_log = world.told()
    assert world.truth() == (missing_in_log, extra_in_log)
    assert all(extra_in_log["restart"])
    assert not any(map(any, (*missing_in_log.values(), extra_in_log["start"], extra_in_log["unknown"])))


def test_work_before_the_first_scrape_is_reported_so():
    """What was done before the first look and logged after it is told as that."""
    world = World()
    world.ask(Request(n=3), lasts_s=0.01, late_s=20)
    quiet(world)
    assert world.truth() == world.told()
    assert [3, 30, 60] == world.told()[1]["start"]


def test_a_restart_while_the_sidecar_was_away_is_bridged():
    world = World()
    world.run(SETTLED_S)
    seeded(world, 20, 5)
    stored = msgspec.msgpack.encode(world.sidecar.state())
    world.sidecar = None
    seeded(world, 10, 5, seed=2)
    world.kill("e0")
    world.run(3)
    world.start("e0")
    seeded(world, 10, 5, seed=3)
    world.sidecar = Reconciler(
        state=msgspec.msgpack.decode(stored, type=ReconciliationState), upstreams=world.processes
    )
    quiet(world)
    assert world.truth() == world.told()
    assert world.told()[1]["restart"][0] > 0
    assert 4000 > len(stored)


def test_no_phantom_is_booked_while_an_engine_does_not_answer():
    """What it finished cannot be seen; it may still come."""
    world = World()
    world.run(SETTLED_S)
    process, world.processes["e1"] = world.processes["e1"], None  # alive, and out of the sidecar's reach
    process.add("0", requests=7, request_prompt_tokens=70, request_completion_tokens=140)
    world.log[MODEL] = FinishedRequest(7, 70, 140)
    world.run(4 * SETTLED_S)
    assert not any(map(any, world.told()[1].values()))
    assert -7 == values(world.sidecar)[reconciled.OPEN.name, MODEL, "requests"]
    settled = values(world.sidecar)[reconciled.SETTLED.name, MODEL]
    world.processes["e1"] = process
    world.run(SETTLED_S)
    assert not any(map(any, world.told()[1].values()))
    assert 0 == values(world.sidecar)[reconciled.OPEN.name, MODEL, "requests"]
    assert settled + 3 * SETTLED_S < values(world.sidecar)[reconciled.SETTLED.name, MODEL]


def test_unseen_engine_may_have_done_logged_work():
    """Until every configured engine has answered once, what is logged and not seen is not extra."""
    world = World()
    hidden, world.processes["e1"] = world.processes["e1"], None
    world.run(SETTLED_S)
    world.log[MODEL] = FinishedRequest(7, 70, 140)
    world.run(2 * SETTLED_S)
    assert not any(map(any, world.told()[1].values()))
    hidden.add("0", requests=7, request_prompt_tokens=70, request_completion_tokens=140)
    world.processes["e1"] = hidden
    world.run(SETTLED_S)
    assert [7, 70, 140] == world.told()[1]["start"], "what it had done before its first look is not known"


def test_one_slow_reader_on_an_idle_engine_is_waited_for():
    world = World()
    world.run(SETTLED_S)
    world.ask(Request(), late_s=29)
    world.run(28)
    assert 1 == values(world.sidecar)[reconciled.OPEN.name, MODEL, "requests"]
    quiet(world)
    assert NOTHING_BOOKED == world.told()


def test_a_second_restart_soon_after_the_first_is_a_restart_too():
    """The line of what it swallowed comes late, when the first restart would have been settled."""
    world = World(engines=1)
    world.run(SETTLED_S)
    for late_s in (0.1, 29):
        due_s = world.next_look_s
        world.run(due_s - world.now_s + 2 * TICK_S)  # just after a look, so that the next one comes too late
        world.ask(Request(), lasts_s=1, late_s=late_s)
        world.run(2)
        world.kill("e0")
        world.run(6)
        world.start("e0")
        world.run(12)
    world.run(10)
    quiet(world)
    assert world.truth() == world.told()
    assert [2, 20, 40] == world.told()[1]["restart"]


def test_two_percent_unlogged_traffic_is_found():
    """Two percent of the traffic beside the log are found within two minutes and while it runs."""
    world = World()
    seeded(world, 60, 20)
    began_s, found_s = world.now_s, None
    assert 0 == world.told()[0]["unknown"][0]
    for second in range(180):
        seeded(world, 1, 20, seed=100 + second, none=0.02)
        if found_s is None and world.told()[0]["unknown"][0]:
            found_s = world.now_s - began_s
    assert found_s is not None
    assert found_s <= 120
    quiet(world)
    assert world.truth() == world.told()


@pytest.mark.parametrize(("slow", "slow_s", "late_s"), [(0.05, 10, None), (0.05, 10, 0.6), (0.5, 15, 7.6)])
def test_slow_readers_are_not_taken_for_missing_lines(slow, slow_s, late_s):
    """Some take seconds to read an answer that the engine has long finished: 10, or 150, of them linger at any
    moment."""
    world = World(late_s=late_s)
    for at in range(4):  # busy, idle and busy again: what lingers comes and goes
        seeded(world, 60, 20, seed=at, slow=slow, slow_s=slow_s)
        world.run(20)
    quiet(world)
    assert NOTHING_BOOKED == world.told()


def test_busy_hours_book_only_restart_losses():
    """Six hours at 100 requests a second, lines 100 ms late, aborts, n > 1, an engine killed every hour and away for 20
    seconds."""
    rng, sidecar = random.Random(7), Reconciler(upstreams=["e0"])
    # by tick: six hours have 216,000
    drawn = [sum(rng.choice((1, 1, 1, 2)) for _ in range(_poisson(rng, 8))) for _ in range(4096)]
    engine, started_s, logged, asked, since_page, swallowed, back_tick = 0, -100.0, 0, 0, 0, 0, -1

    def log(count: int) -> dict[str, FinishedRequest]:
        return {MODEL: FinishedRequest(count, count * 300, count * 120)}

    for tick in range(216_000 + 600):
        now_s = tick * TICK_S
        if tick % 36_000 == 35_877:  # between two looks
            swallowed, since_page, back_tick = swallowed + since_page, 0, tick + 200
        if tick == back_tick:
            engine, started_s = 0, now_s
        up = tick >= back_tick
        # a minute of peace before, so that the start is settled
        count = drawn[rng.getrandbits(12)] if up and 600 < tick < 216_000 else 0
        engine += count
        since_page += count
        if tick % 50 == 0:
            asked = logged
        if tick % 50 == 1 and up:
            totals = EngineTotals(engine, engine * 300, engine * 120, engine * 310, engine * 125)
            sidecar.look(
                "e0",
                EngineView(None, started_s, {}, (), cores={(MODEL, "0"): EngineCore(totals, 10, 0)}),
                now_s - TICK_S,
                log(asked),
                5.0,
            )
            since_page = 0
        elif tick % 50 == 1:
            sidecar.on_failure("e0")
        logged += count  # read in the next tick
        if tick % 10 == 0 or tick % 50 == 2:
            sidecar.settle(now_s + TICK_S, log(logged), at_end=True)
    model = sidecar.state().models[MODEL]
    the_law_holds(sidecar)
    assert logged > 2_000_000
    assert NOTHING_BOOKED[0] == model.missing_in_log
    assert {
        "restart": [swallowed, swallowed * 300, swallowed * 120],
        "start": [0] * 3,
        "unknown": [0] * 3,
    } == model.extra_in_log


def core(requests: int = 0, prompt: int = 0, completion: int = 0, **more: int) -> EngineCore:
    """A core that has finished this much, and worked on `more`."""
    running = more.pop("running", 0)
    level = {"prompt_tokens": prompt, "completion_tokens": completion} | more
    return EngineCore(EngineTotals(requests, prompt, completion, **level), running, 0)


def view(cores: dict[tuple[str, str], EngineCore], started_s: float | None = 1.0) -> EngineView:
    return EngineView(None, started_s, {}, (), cores=cores)


def caught_up(**options) -> Reconciler:
    sidecar = Reconciler(**options)
    sidecar.settle(0.0, {}, at_end=True)
    return sidecar


def test_aborted_work_is_told_once_the_engine_is_idle():
    """In flight and aborted look alike until nothing is in flight. What was aborted before the first look is none of
    ours."""
    sidecar = caught_up()
    looks = [
        (core(2, 20, 40, prompt_tokens=100, completion_tokens=70), (0, 0), (80, 30)),  # before us; not known to be idle
        (core(2, 20, 40, prompt_tokens=100, completion_tokens=70), (0, 0), (0, 0)),
        (core(2, 20, 40, prompt_tokens=150, completion_tokens=75, running=1), (0, 0), (50, 5)),
        (core(2, 20, 40, prompt_tokens=150, completion_tokens=90), (0, 0), (50, 20)),  # idle, but it grew: look again
        (core(2, 20, 40, prompt_tokens=150, completion_tokens=90), (50, 20), (0, 0)),
        (core(2, 20, 40, prompt_tokens=150, completion_tokens=90), (50, 20), (0, 0)),
        (core(1, 7, 7, prompt_tokens=9, completion_tokens=8), (50, 20), (2, 1)),  # another process
        (core(1, 7, 7, prompt_tokens=9, completion_tokens=8), (52, 21), (0, 0)),
    ]
    for at, (seen, aborted, unfinished) in enumerate(looks):
        sidecar.look("e", view({(MODEL, "0"): seen}, started_s=None), 5.0 * at, {})
        assert (aborted, unfinished) == (sidecar.aborted(MODEL), sidecar.unfinished(MODEL)), at
        assert unfinished == tuple(
            values(sidecar)[reconciled.UNFINISHED.name, MODEL, kind] for kind in TokenPair._fields
        )


def test_growth_is_taken_core_by_core_before_it_is_summed():
    """One core began anew and counts from 0; the other's growth is not swallowed by it."""
    sidecar = caught_up()
    sidecar.look("e", view({(MODEL, "0"): core(100, 1000, 2000), (MODEL, "1"): core(10, 100, 200)}), 1.0, {})
    sidecar.look("e", view({(MODEL, "0"): core(130, 1300, 2600), (MODEL, "1"): core(11, 110, 220)}), 6.0, {})
    assert (31, 310, 620) == sidecar.state().models[MODEL].engine[:3]
    sidecar.look("e", view({(MODEL, "0"): core(4, 40, 80), (MODEL, "1"): core(12, 120, 240)}, started_s=9.0), 11.0, {})
    assert (47, 470, 940) == sidecar.state().models[MODEL].engine[:3]
    sidecar.look("e", view({(MODEL, "0"): core(5, 50, 100)}, started_s=9.0), 16.0, {})  # a page that lacks a core once
    sidecar.look("e", view({(MODEL, "0"): core(5, 50, 100), (MODEL, "1"): core(13, 130, 260)}, started_s=9.0), 21.0, {})
    assert (49, 490, 980) == sidecar.state().models[MODEL].engine[:3]


@pytest.mark.parametrize(
    ("aliases", "told"), [({"lora": MODEL, "chat": MODEL}, {}), ({}, {"lora": MODEL, "chat": MODEL, MODEL: MODEL})]
)
def test_adapters_and_other_names_count_for_their_model(aliases, told):
    world = World(aliases=aliases)
    world.names = told
    for name in ("lora", MODEL, "chat", "elsewhere"):
        world.ask(Request(name=name), lasts_s=10)
        if name == "elsewhere":
            world.processes["e0"].running["0"] -= 1
    quiet(world)
    assert 3 == world.sidecar.state().models[MODEL].logged.requests
    assert [1, 10, 20] == world.told()[0]["unknown"], "a name that no engine has"


def test_late_name_brings_all_its_counts():
    """An adapter is loaded and used before the engine was asked again: nothing is booked until it was."""
    world = World()
    world.run(SETTLED_S)
    world.names = None  # it does not say
    world.ask(Request(name="lora"))
    world.run(40)
    assert not any(map(any, world.told()[0].values()))
    world.names = {"lora": MODEL}
    quiet(world)
    assert 1 == world.sidecar.state().models[MODEL].logged.requests
    assert not any(map(any, (*world.told()[0].values(), *world.told()[1].values())))


def test_engine_without_names_is_compared():
    """An engine that never tells its names is compared nevertheless."""
    world = World()
    world.names = None
    world.run(SETTLED_S)
    world.ask(Request(name="lora"))
    world.run(2 * SETTLED_S)
    quiet(world)
    assert [1, 10, 20] == world.told()[0]["unknown"]


def test_names_are_asked_at_start_restart_and_new_name():
    """Names are asked for at first after a restart for a new name and once a minute."""
    sidecar = caught_up()
    assert not sidecar.names_due("e", 0.0), "there was no look that counts"
    sidecar.look("e", view({(MODEL, "0"): core()}), 1.0, {})
    assert sidecar.names_due("e", 1.0)
    sidecar.record_names("e", {MODEL: MODEL}, 1.0)
    assert not sidecar.names_due("e", 2.0)
    sidecar.settle(3.0, {"new": FinishedRequest(1)}, at_end=True)
    assert sidecar.names_due("e", 4.0)
    sidecar.record_names("e", {MODEL: MODEL}, 4.0)
    assert not sidecar.names_due("e", 60.0)
    assert sidecar.names_due("e", 64.0)
    sidecar.record_names("e", None, 64.0)
    assert sidecar.names_due("e", 65.0), "it failed; try again"
    sidecar.record_names("e", {}, 65.0)
    sidecar.look("e", view({(MODEL, "0"): core()}, started_s=60.0), 66.0, {})
    assert sidecar.names_due("e", 66.0), "it restarted"


def test_what_a_log_held_before_the_first_look_is_none_of_ours():
    """An old log is read at the start, and a look during that does not count."""
    sidecar = Reconciler()
    old, page = {MODEL: FinishedRequest(500, 5000, 9000)}, view({(MODEL, "0"): core(700, 7000, 9999)})
    sidecar.settle(1.0, {MODEL: FinishedRequest(100, 1000, 2000)}, at_end=False)
    sidecar.look("e", page, 1.5, {MODEL: FinishedRequest(100, 1000, 2000)})
    assert {} == sidecar.state().models
    sidecar.settle(2.0, old, at_end=True)
    sidecar.look("e", page, 1.9, {MODEL: FinishedRequest(400, 4000, 8000)})  # asked for before the log was read
    sidecar.look("e", page, 3.0, old)
    sidecar.settle(60.0, old, at_end=True)
    sidecar.settle(100.0, old, at_end=True)
    assert (0, 0, 0) == sidecar.state().models[MODEL].logged[:3]
    assert 60.0 == sidecar.state().models[MODEL].settled_s


def test_lines_read_during_a_scrape_accuse_no_one():
    """They may be of requests that finished after the page was made, twice in a row."""
    sidecar = caught_up()
    for at in range(1, 20):
        asked = {MODEL: FinishedRequest(at, at, at)}
        sidecar.settle(5.0 * at, asked, at_end=True)
        sidecar.settle(5.0 * at + 0.4, {MODEL: FinishedRequest(at + 1, at + 1, at + 1)}, at_end=True)
        sidecar.look("e", view({(MODEL, "0"): core(at, at, at, running=1)}), 5.0 * at, asked)
        sidecar.settle(5.0 * at + 0.6, {MODEL: FinishedRequest(at + 1, at + 1, at + 1)}, at_end=True)
    assert 18 == sidecar.state().models[MODEL].engine.requests
    assert not any(map(any, sidecar.state().models[MODEL].extra_in_log.values()))


def test_a_percentile_beyond_all_buckets_does_not_wait_for_ever():
    sidecar = caught_up()
    sidecar.look("e", view({(MODEL, "0"): core()}), 1.0, {}, e2e_p99_s=float("inf"), late_s=float("inf"))
    sidecar.settle(2.0, {}, at_end=True)
    sidecar.settle(3700.0, {}, at_end=True)
    assert 2.0 == sidecar.state().models[MODEL].settled_s


def test_all_series_are_shown_and_causes_start_at_0():
    """All series of the catalogue are shown and causes start at 0."""
    world = World()
    world.run(SETTLED_S)
    assert {metric.name for metric in reconciled.RECONCILED} == {
        metric.name for metric, _, _ in world.sidecar.samples()
    }
    for metric, labels, _ in world.sidecar.samples():
        assert sorted(metric.labels) == sorted(labels)
    told = {
        (metric.name, labels["cause"]): value for metric, labels, value in world.sidecar.samples() if "cause" in labels
    }
    assert {(reconciled.MISSING_IN_LOG.name, cause): 0 for cause in MISSING_CAUSES} | {
        (reconciled.EXTRA_IN_LOG.name, cause): 0 for cause in EXTRA_CAUSES
    } == told


def test_attribution_is_given_tokens_that_nobody_answers_for():
    world = World()
    world.run(SETTLED_S)
    world.ask(Request(lines=0))
    world.ask(Request(usage=False, prompt=1, completion=2))
    quiet(world)
    assert TokenPair(11, 22) == world.sidecar.missing_in_log(MODEL)
    assert TokenPair() == world.sidecar.missing_in_log("never seen") == world.sidecar.aborted("never seen")


# ---- bookings of one model


def test_suspected_lines_are_booked_once():
    """What the log has beyond the engine was that of a restart, as far as its suspected lines go."""
    model = ReconciledModel(0.0, {}, suspected={"restart": FinishedRequest(3, 30, 60)})
    model.book_extra_in_log(0, 2)
    model.book_extra_in_log(0, 2)
    assert ([3, 0, 0], [1, 0, 0]) == (model.extra_in_log["restart"], model.extra_in_log["unknown"])
    assert FinishedRequest(0, 30, 60) == model.suspected["restart"]


def test_tokens_without_usage_are_booked_as_such():
    model = ReconciledModel(0.0, {}, logged=FinishedRequest(1, 0, 0, missing=1))
    model.book_missing_in_log(1, 5)
    model.settled_missing = 1
    model.book_missing_in_log(1, 7)
    assert (5, 7) == (model.missing_in_log["no_usage"][1], model.missing_in_log["unknown"][1])


def test_unreadable_answers_explain_at_most_as_many():
    model = ReconciledModel(0.0, {}, logged=FinishedRequest(unreadable=3), missing_in_log={"unknown": [0] * 3})
    model.book_missing_in_log(0, 2)
    model.book_missing_in_log(0, 2)
    model.book_missing_in_log(1, 5)
    assert ([3, 5, 0], [1, 0, 0]) == (model.missing_in_log["unreadable"], model.missing_in_log["unknown"])
    model.settle_exactly()
    for kind in (0, 1):
        model.book_missing_in_log(kind, 7)
    assert [8, 7, 0] == model.missing_in_log["unknown"]


@pytest.mark.parametrize(("lines", "missing"), [(NEAR_AT_LEAST_LINES, 2), (NEAR_AT_LEAST_LINES - 1, 0)])
def test_near_comparison_needs_lines(lines, missing):
    model, watch = ReconciledModel(0.0, {}), reconciliation._Watch()
    watch.near.extend([(0.0, FinishedRequest(2, 0, 0), 0), (NEAR_AT_LEAST_S, FinishedRequest(3, 0, 0), lines)])
    Reconciler._settle_near(None, model, watch)
    assert missing == model.missing_in_log["unknown"][0]


@pytest.mark.parametrize(("middle", "kept"), [((1.0, 1), 3), ((0.5, 0), 2), ((0.5, 1), 3), ((1.0, 0), 3)])
def test_near_comparison_keeps_a_full_window(middle, kept):
    """The oldest look goes only when time and lines since the next one are enough without it."""
    model, watch = ReconciledModel(0.0, {}), reconciliation._Watch()
    last = (NEAR_AT_LEAST_S + 0.5, NOTHING, NEAR_AT_LEAST_LINES)
    watch.near.extend([(0.0, NOTHING, 0), (middle[0], NOTHING, middle[1]), last])
    Reconciler._settle_near(None, model, watch)
    assert kept == len(watch.near)
