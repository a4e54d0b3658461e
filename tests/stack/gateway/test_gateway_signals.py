"""Figures of engines: from their pages to slots, and the watcher that asks for them, against an engine on loopback and
a clock of its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.catalogue import exposition_parser, vllm
from stack.gateway import health
from stack.gateway.health import LONG_PAGE, OLD_S, PAGE_BYTES, HealthMonitor, MetricsPage
from stack.gateway.load_signals import API, ENGINE, Health, Sample, Slots, read, troubled
from stack.gateway.policy import Capacity, Upstream
from tests.support.wait import until

GOLDEN = Path(__file__).parents[2] / "golden"
PAGES = {path.stem: path.read_bytes() for path in sorted(GOLDEN.glob("*.prom"))}
HUNDRED = Capacity(slots=100, min_slots=4, waiting=5, kv_usage=0.9, stale_s=5.0)
CALM, QUEUES = (0.0, 0.5), (6.0, 0.5)


def told(capacity: Capacity, *figures: tuple[float, ...], in_flight: int = 1000) -> list[int]:
    """The slots after each of these samples of one engine, one a second."""
    slots, seen = Slots.full(capacity), []
    for at, figure in enumerate(figures):
        slots = slots.after({"a": Sample(float(at), *figure)}, in_flight, float(at))
        seen.append(slots.slots)
    return seen


# ---- from a page to a sample


@pytest.mark.parametrize(
    ("stem", "want"),
    [
        ("0.10.2-load-under-load", Sample(7.0, 8, 0.2525252525252525, 0)),
        ("0.20.2-preempt-under-load", Sample(7.0, 8, 0.9565217391304348, 33)),
        ("0.32.0-preempt-under-load", Sample(7.0, 1, 0.9565217391304348, 59)),
        ("0.32.0-before", Sample(7.0, 0, 0, 0)),
    ],
)
def test_a_captured_page_gives_its_figures(stem: str, want: Sample):
    assert want == read(PAGES[stem], 7.0)


@pytest.mark.parametrize("stem", PAGES)
def test_the_scan_reads_what_the_parser_of_whole_pages_reads(stem: str):
    whole = exposition_parser.parse(PAGES[stem].decode())
    want = [
        whole.total(metric.name) for metric in (vllm.NUM_REQUESTS_WAITING, vllm.KV_CACHE_USAGE, vllm.NUM_PREEMPTIONS)
    ]
    found = read(PAGES[stem], 0.0)
    assert found is not None
    assert want == [found.waiting, found.kv_usage, found.preempted]


def lines(*samples: str) -> bytes:
    return "".join(f"vllm:{sample}\n" for sample in samples).encode()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param(
            lines("num_requests_waiting 3", "kv_cache_usage_perc 0.5"),
            Sample(0, 3, 0.5, None),
            id="no-labels-no-preemptions",
        ),
        pytest.param(
            lines("num_requests_waiting 1e+01", "gpu_cache_usage_perc 0.5"), Sample(0, 10, 0.5), id="the-old-name"
        ),
        pytest.param(
            lines("gpu_cache_usage_perc 0.4", "kv_cache_usage_perc 0.5", "num_requests_waiting 3"),
            Sample(0, 3, 0.5),
            id="both-names",
        ),
        pytest.param(
            lines(
                *(
                    f'num_requests_waiting{{engine="{n}"}} {n}\nvllm:num_preemptions_total{{engine="{n}"}} {n}'
                    for n in (1, 4, 2)
                ),
                'kv_cache_usage_perc{engine="0"} 0.9',
                'kv_cache_usage_perc{engine="1"} 0.1',
            ),
            Sample(0, 4, 0.9, 7),
            id="the-worst-of-several-ranks",
        ),
        pytest.param(
            lines(
                "num_requests_waiting 9",
                'num_requests_waiting_by_reason{engine="0",reason="capacity"} 2',
                'num_requests_waiting_by_reason{engine="0",reason="deferred"} 7',
                "kv_cache_usage_perc 0",
            ),
            Sample(0, 2, 0.0),
            id="who-waits-for-an-adapter-does-not-wait-for-room",
        ),
        pytest.param(
            lines('num_requests_waiting{model_name="a} 9 {"} 3', "kv_cache_usage_perc 0"),
            Sample(0, 3, 0.0),
            id="a-brace-in-a-name",
        ),
        pytest.param(
            lines("num_requests_waiting_of_others 3", "kv_cache_usage_perc 0"),
            None,
            id="another-name-that-begins-alike",
        ),
        pytest.param(lines("num_requests_waiting 3"), None, id="no-cache"),
        pytest.param(lines("num_requests_waiting NaN", "kv_cache_usage_perc 0"), None, id="not-a-number"),
        pytest.param(lines("num_requests_waiting +Inf", "kv_cache_usage_perc 0"), None, id="no-end"),
        pytest.param(lines("num_requests_waiting many", "kv_cache_usage_perc 0"), None, id="a-word"),
        pytest.param(b"# TYPE vllm:num_requests_waiting gauge\n", None, id="declared-and-empty"),
        pytest.param(b"<html>sign in</html>", None, id="another-page"),
        pytest.param(b"", None, id="nothing"),
    ],
)
def test_a_page_gives_its_worst_figures_or_none(text: bytes, want: Sample | None):
    assert want == read(text, 0.0)


_NAMES = [
    name
    for metric in (vllm.NUM_REQUESTS_WAITING, vllm.NUM_REQUESTS_WAITING_BY_REASON, vllm.KV_CACHE_USAGE)
    for name in metric.names
]
_FRAGMENTS = [
    b"\n",
    b" ",
    b"{",
    b"}",
    b'"',
    b"0.5",
    b"1e309",
    b"NaN",
    b"\xff",
    b'reason="capacity"',
    *(name.encode() for name in _NAMES),
]


@given(st.lists(st.sampled_from(_FRAGMENTS), max_size=40).map(b"".join) | st.binary())
def test_page_values_are_numbers_or_absent(text: bytes):
    """Whatever a page holds its values are numbers or there are none."""
    found = read(text, 0.0)
    assert found is None or all(
        math.isfinite(value) for value in (found.waiting, found.kv_usage, found.preempted or 0.0)
    )


# ---- from samples to slots


@pytest.mark.parametrize(
    ("figures", "want"),
    [
        pytest.param((5, 0.9), 100, id="just-not"),
        pytest.param((6, 0.0), 75, id="queues"),
        pytest.param((0, 0.901), 75, id="cache-full"),
        pytest.param((0, 0.0, 9), 100, id="a-first-total-says-nothing"),
    ],
)
def test_one_sample_is_bad_just_beyond_the_edge(figures: tuple[float, ...], want: int):
    assert [want] == told(HUNDRED, figures, in_flight=100)


@pytest.mark.parametrize(
    ("totals", "want"),
    [
        pytest.param((3, 3), False, id="none"),
        pytest.param((3, 4), True, id="one-more"),
        pytest.param((3, 0), False, id="the-engine-restarted"),
        pytest.param((None, 4), False, id="unknown-before"),
        pytest.param((3, None), False, id="unknown-now"),
    ],
)
def test_a_preemption_is_trouble_when_it_is_new(totals: tuple[float | None, float | None], want: bool):
    before, now = (Sample(0, 0, 0, total) for total in totals)
    assert want is troubled(now, before, HUNDRED)


def test_the_slots_fall_by_quarters_and_rise_by_twentieths():
    """From 100: three quarters with each bad sample, 5 more with each calm one, and no further than to 100."""
    assert [75, 56, 42, 47, 52] == told(HUNDRED, QUEUES, QUEUES, QUEUES, CALM, CALM)
    assert [75, 80, 85, 90, 95, 100, 100] == told(HUNDRED, QUEUES, *[CALM] * 6)
    assert [7, 8, 9, 10, 10] == told(Capacity(slots=10), QUEUES, *[CALM] * 4)


@pytest.mark.parametrize(("in_flight", "want"), [(1000, 75), (100, 75), (40, 30), (5, 4), (0, 4)])
def test_the_slots_fall_from_what_is_in_flight(in_flight: int, want: int):
    """With 40 of 100 in use, 75 slots would be no change at all."""
    assert [want] == told(HUNDRED, QUEUES, in_flight=in_flight)


def test_a_sample_counts_once():
    once = Slots.full(HUNDRED).after({"a": Sample(1.0, *QUEUES)}, 100, 1.0)
    assert once == once.after({"a": Sample(1.0, *QUEUES)}, 100, 2.0)
    assert 56 == once.after({"a": Sample(2.0, *QUEUES)}, 100, 2.0).slots


def test_figures_that_are_too_old_count_for_nothing():
    """Stale is static, at once; and what was known of preemptions before is no longer compared with."""
    bad = Slots.full(HUNDRED).after({"a": Sample(1.0, *QUEUES, preempted=1)}, 100, 1.0)
    assert 75 == bad.after({"a": Sample(1.0, *QUEUES, preempted=1)}, 100, 6.0).slots
    stale = bad.after({"a": Sample(1.0, *QUEUES, preempted=1)}, 100, 6.1)
    assert Slots.full(HUNDRED) == stale
    assert 100 == stale.after({"a": Sample(7.0, *CALM, preempted=9)}, 100, 7.0).slots
    assert 100 == bad.after({}, 100, 1.1).slots


def test_the_worst_of_several_engines_counts():
    slots = Slots.full(HUNDRED).after({"a": Sample(1.0, *CALM), "b": Sample(1.1, *QUEUES)}, 100, 1.2)
    assert 75 == slots.slots
    slots = slots.after({"a": Sample(2.0, *CALM), "b": Sample(1.1, *QUEUES)}, 100, 2.0)
    assert 75 == slots.slots, "a is calm, and b has not said otherwise yet"
    slots = slots.after({"a": Sample(2.0, *CALM), "b": Sample(2.1, *CALM)}, 100, 2.1)
    assert 80 == slots.slots
    slots = slots.after({"a": Sample(3.0, *QUEUES), "b": Sample(3.1, *CALM)}, 100, 3.1)
    assert 60 == slots.slots
    slots = slots.after({"a": Sample(3.0, *QUEUES), "b": Sample(8.2, *CALM)}, 100, 8.2)
    assert 65 == slots.slots, "what a said is too old"


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.randoms(use_true_random=False))
def test_many_engines_move_the_slots_no_faster_than_one(engines: int, rounds: int, rng: Any):
    """Each reports once a second, one after the other and in any order; all are in trouble, then all are calm."""
    for figures in (QUEUES, CALM):
        slots, latest = Slots.full(HUNDRED), {}
        alone, start = Slots.full(HUNDRED), Slots.full(HUNDRED).slots
        if figures is CALM:
            slots = alone = Slots(HUNDRED, start := 20)
        for second in range(rounds):
            offsets = [number / engines for number in range(engines)]
            for name, offset in zip(
                rng.sample(range(engines), engines) if second == 0 else list(latest), offsets, strict=True
            ):
                latest[name] = Sample(second + offset, *figures)
                slots = slots.after({str(name): sample for name, sample in latest.items()}, 1000, second + offset)
            alone = alone.after({"a": Sample(float(second), *figures)}, 1000, float(second))
        assert abs(start - slots.slots) <= abs(start - alone.slots)
        assert slots.slots != start


_CAPACITIES = st.builds(Capacity, slots=st.integers(1, 400), min_slots=st.integers(1, 20), stale_s=st.floats(0.5, 10))
_FIGURES = st.tuples(
    st.sampled_from([0.0, 5.0, 6.0, 50.0]),
    st.sampled_from([0.0, 0.9, 0.95, 1.0]),
    st.sampled_from([None, 0.0, 1.0, 2.0]),
)
_STEPS = st.lists(
    st.tuples(
        st.floats(0.01, 8),
        st.dictionaries(st.sampled_from("abc"), _FIGURES, min_size=1),
        st.integers(0, 500),
        st.floats(0, 3),
    ),
    max_size=40,
)


def walk(
    capacity: Capacity, steps: Iterable[tuple[float, dict[str, tuple[Any, ...]], int, float]]
) -> list[tuple[Slots, dict[str, Sample], float]]:
    """The slots along a random history: of each step who reports what, with how much in flight, and how much later it
    is looked at."""
    slots, latest, now, seen = Slots.full(capacity), dict[str, Sample](), 0.0, []
    for wait, reports, in_flight, late in steps:
        now += wait
        latest |= {name: Sample(now, *figures) for name, figures in reports.items()}
        slots = slots.after(latest, in_flight, now + late)
        now += late
        seen.append((slots, dict(latest), now))
    return seen


@settings(deadline=None)
@given(_CAPACITIES, _STEPS)
def test_the_slots_stay_between_the_least_and_all(capacity: Capacity, steps: Any):
    for slots, _, _ in walk(capacity, steps):
        assert min(capacity.min_slots, capacity.slots) <= slots.slots <= capacity.slots


@settings(deadline=None)
@given(_CAPACITIES, _STEPS, st.integers(0, 500))
def test_a_look_at_nothing_new_changes_nothing(capacity: Capacity, steps: Any, in_flight: int):
    for slots, latest, now in walk(capacity, steps):
        assert slots == slots.after(latest, in_flight, now)


@settings(deadline=None)
@given(_CAPACITIES, _STEPS, st.integers(0, 500))
def test_without_fresh_figures_all_slots_are_there(capacity: Capacity, steps: Any, in_flight: int):
    for slots, latest, now in walk(capacity, steps):
        assert capacity.slots == slots.after(latest, in_flight, now + capacity.stale_s + 0.1).slots


@settings(deadline=None)
@given(_CAPACITIES, _STEPS)
def test_calm_gives_all_slots_back(capacity: Capacity, steps: Any):
    """Twenty calm samples of every engine, and one in which the last preemptions are compared."""
    *_, (slots, latest, now) = [(Slots.full(capacity), {"a": Sample(0, 0, 0)}, 0.0), *walk(capacity, steps)]
    for second in range(1, 23):
        latest = {name: Sample(now + second * 0.4, 0.0, 0.0, sample.preempted) for name, sample in latest.items()}
        slots = slots.after(latest, 1000, now + second * 0.4)
    assert capacity.slots == slots.slots


@settings(deadline=None)
@given(_CAPACITIES, _STEPS, st.integers(0, 500), st.integers(0, 500), _FIGURES, _FIGURES)
def test_more_trouble_never_gives_more_slots(capacity: Capacity, steps: Any, few: int, many: int, one: Any, other: Any):
    """Bad never raises, calm never lowers, a figure that is worse gives no more, and what is in flight beyond others
    takes nothing away."""
    few, many = sorted((few, many))
    better = tuple(a if a is None or b is None else min(a, b) for a, b in zip(one, other, strict=True))
    worse = tuple(a if a is None or b is None else max(a, b) for a, b in zip(one, other, strict=True))
    for before, latest, now in [(Slots.full(capacity), {}, 0.0), *walk(capacity, steps)]:
        after = {
            (figures, count): before.after(latest | {"a": Sample(now + 0.1, *figures)}, count, now + 0.1).slots
            for figures in (better, worse)
            for count in (few, many)
        }
        assert after[worse, few] <= after[better, few]
        assert after[worse, few] <= after[worse, many]
        calm = before.after(
            {name: Sample(now + 0.1, 0, 0) for name in latest} or {"a": Sample(now + 0.1, 0, 0)}, few, now + 0.1
        )
        assert before.slots <= calm.slots
        bad = before.after(
            {name: Sample(now + 0.1, 9, 1) for name in before.seen} or {"a": Sample(now + 0.1, 9, 1)}, many, now + 0.1
        )
        assert bad.slots <= before.slots


@pytest.mark.parametrize(("holds", "held_s"), [(20, 5.0), (60, 20.0), (90, 10.0)])
def test_overload_settles_near_engine_capacity(holds: int, held_s: float):
    """A made-up engine: one second in held_s each request ends, more wait than ever go, and what it cannot hold queues
    inside."""
    slots, there, seen = Slots.full(HUNDRED), 0.0, []
    for second in range(600):
        there = max(there * (1 - 1 / held_s), slots.slots)
        slots = slots.after(
            {"a": Sample(float(second), max(0.0, there - holds), min(1.0, there / holds) * 0.9)},
            int(there),
            float(second),
        )
        seen.append(there)
    mean = sum(seen[60:]) / len(seen[60:])
    assert 0.9 * holds <= mean <= holds + HUNDRED.waiting + 1
    assert max(seen[60:]) <= holds + HUNDRED.waiting + 5, "one step up beyond what may wait there"


# ---- worth asking or not


@pytest.mark.parametrize(
    ("begin", "said", "want"),
    [
        pytest.param(ENGINE, "", True, id="unknown"),
        pytest.param(ENGINE, "f", True, id="one-hiccup"),
        pytest.param(ENGINE, "fwf", True, id="two-apart"),
        pytest.param(ENGINE, "ff", False, id="two-in-a-row"),
        pytest.param(ENGINE, "s", False, id="refused"),
        pytest.param(ENGINE, "sf", False, id="refused-and-more"),
        pytest.param(ENGINE, "sw", True, id="one-good-is-enough"),
        pytest.param(API, "ff", True, id="api-two"),
        pytest.param(API, "ffwff", True, id="api-two-and-two"),
        pytest.param(API, "fff", False, id="api-three"),
        pytest.param(API, "fffw", True, id="api-answers"),
    ],
)
def test_who_is_worth_asking(begin: Health, said: str, want: bool):
    health = begin
    for word in said:
        health = health.worked() if word == "w" else health.failed(0.0, for_sure=word == "s")
    assert want is health.open(9.9)


def test_pause_ends_and_another_failure_begins_one():
    """A pause ends by itself and one more failure begins another."""
    health = API.failed(0.0).failed(0.0).failed(1.0)
    assert (False, True) == (health.open(10.9), health.open(11.0))
    assert (False, True) == (health.failed(12.0).open(21.9), health.worked().failed(12.0).open(12.0))
    assert not ENGINE.failed(0.0, for_sure=True).open(1e9), "an engine is down until it answers"


# ---- the watcher


class Time:
    """A clock that stands until it is moved, and the sleep that goes by it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._asleep: dict[asyncio.Future[None], float] = {}
        self._went_to_sleep = asyncio.Event()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        done = asyncio.get_running_loop().create_future()
        self._asleep[done] = self.now + seconds
        self._went_to_sleep.set()
        try:
            await done
        finally:
            self._asleep.pop(done, None)

    async def settle(self, sleepers: int = 1) -> None:
        """Until so many watchers have done all they had to do now. Each has two tasks: one asks, one assesses."""
        async with asyncio.timeout(30):
            while len(self._asleep) < 2 * sleepers:
                self._went_to_sleep.clear()
                await self._went_to_sleep.wait()

    async def go(self, seconds: int, sleepers: int = 1) -> None:
        for _ in range(seconds):
            await self.settle(sleepers)
            self.now += 1
            for done in [done for done, due in self._asleep.items() if due <= self.now]:
                del self._asleep[done]
                if not done.cancelled():
                    done.set_result(None)
            await self.settle(sleepers)


Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def http(body: bytes = b"", status: str = "200 OK", *more: str) -> bytes:
    return (
        "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *more, "", "")).encode()
        + body
    )


def figures(waiting: float = 0.0, kv_usage: float = 0.0) -> bytes:
    return http(lines(f"num_requests_waiting {waiting}", f"kv_cache_usage_perc {kv_usage}", "num_preemptions_total 0"))


WELL, CALM_PAGE = http(), figures()


async def hangs(writer: asyncio.StreamWriter) -> None:
    await writer.wait_closed()


@dataclass
class FakeEngine:
    """Answers in bytes, right or wrong, and remembers what it was asked."""

    port: int = 0
    health: Answer = WELL
    metrics: Answer = CALM_PAGE
    asked: list[str] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    server: asyncio.Server | None = None

    @property
    def upstream(self) -> Upstream:
        return Upstream(url=f"http://127.0.0.1:{self.port}")

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self.server is not None
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            self.heads.append(head)
            answer = self.health if path == "/health" else self.metrics
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        writer.close()


@dataclass
class Scene:
    engine: FakeEngine
    watch: HealthMonitor
    time: Time
    told: list[tuple[str, bool]]
    busy: bool = True

    def asked(self) -> dict[str, int]:
        """How often since the last time."""
        paths, self.engine.asked = self.engine.asked, []
        return {path: paths.count(path) for path in ("/health", "/metrics")}


@contextlib.asynccontextmanager
async def watching(engine: FakeEngine | None = None, *, headers: Any = None) -> AsyncIterator[Scene]:
    """One engine `a`, watched, and its first looks done."""
    engine = engine or FakeEngine()
    await engine.start()
    before = asyncio.all_tasks()
    async with aiohttp.ClientSession() as session:
        time, heard = Time(), list[tuple[str, bool]]()
        watch = HealthMonitor(
            session, lambda name, up: heard.append((name, up)), lambda: scene.busy, clock=time.clock, sleep=time.sleep
        )
        scene = Scene(engine, watch, time, heard)
        watch.follow({"a": engine.upstream}, headers)
        await time.settle()
        yield scene
        await watch.stop()
        assert not {task for task in asyncio.all_tasks() - before if task.get_name().startswith("watch")}
    engine.stop()


async def test_an_engine_is_read_and_found_well():
    async with watching(
        FakeEngine(metrics=http(PAGES["0.20.2-preempt-under-load"])), headers={"a": {"Authorization": "Bearer own"}}
    ) as it:
        assert Sample(1000.0, 8.0, 0.9565217391304348, 33.0) == it.watch.latest("a")
        assert {"a": it.watch.latest("a")} == it.watch.samples()
        assert it.watch.healthy("a")
        assert [("a", True)] == it.told
        assert all(
            b"Authorization: Bearer own\r\n" in head and b"Accept-Encoding: identity\r\n" in head
            for head in it.engine.heads
        )


async def test_scrape_every_second_busy_and_every_five_idle():
    """Values come every second while there are requests and every five otherwise."""
    async with watching() as it:
        assert {"/health": 1, "/metrics": 1} == it.asked()
        await it.time.go(10)
        assert {"/health": 2, "/metrics": 10} == it.asked()
        it.busy = False
        await it.time.go(10)
        assert {"/health": 2, "/metrics": 2} == it.asked()
        it.busy = True
        await it.time.go(1)
        assert 1 == it.asked()["/metrics"], "after a pause the first figures come within a second"
        assert [("a", True)] == it.told


async def test_the_page_of_an_engine_in_rotation_is_the_one_read_last():
    kind = "text/plain; version=9"
    async with watching(FakeEngine(metrics=http(b"one", "200 OK", f"Content-Type: {kind}"))) as it:
        assert MetricsPage(b"one", kind, 1000.0) == it.watch.page()
        it.engine.metrics = http(b"two")
        await it.time.go(1)
        assert MetricsPage(b"two", "text/plain", 1001.0) == it.watch.page()
        it.engine.metrics = http(status="500 x")
        await it.time.go(int(OLD_S))
        assert (1001.0, True) == ((page := it.watch.page()) and page.at, it.watch.any_in_rotation())
        await it.time.go(1)
        assert it.watch.page() is None, "too old"
        it.engine.metrics = http(b"three")
        await it.time.go(1)
        assert it.watch.page() is not None
        it.watch.failed("a")
        assert (None, False) == (it.watch.page(), it.watch.any_in_rotation())


async def test_a_long_page_is_looked_through_in_a_thread(monkeypatch):
    threads = []
    plain = health._figures
    monkeypatch.setattr(health, "_figures", lambda *page: (threads.append(threading.current_thread()), plain(*page))[1])
    async with watching(FakeEngine(metrics=figures(3))) as it:
        assert [threading.main_thread()] == threads
        it.engine.metrics = http(CALM_PAGE.partition(b"\r\n\r\n")[2] + b"# x\n" * LONG_PAGE)
        await it.time.go(1)
        await until(lambda: it.watch.latest("a") == Sample(1001.0, 0.0, 0.0, 0.0), "the long page is read")
        assert threading.main_thread() not in threads[1:]


async def test_a_sample_bears_the_time_of_its_answer():
    engine = FakeEngine()

    async def slowly(writer: asyncio.StreamWriter) -> None:
        it.time.now += 0.7
        writer.write(figures(waiting=3))

    async with watching(engine) as it:
        engine.metrics = slowly
        await it.time.go(1)
        assert Sample(1001.7, 3.0, 0.0, 0.0) == it.watch.latest("a")


@pytest.mark.parametrize(
    "bad", [http(status="503 Service Unavailable"), http(b"", "302 Found", "Location: /metrics")], ids=["503", "302"]
)
async def test_two_bad_answers_down_and_one_good_up(bad: bytes):
    """An engine goes down with two bad answers in a row and up with one good."""
    engine = FakeEngine(health=bad)
    async with watching(engine) as it:
        assert (True, []) == (it.watch.healthy("a"), it.told)
        await it.time.go(5)
        assert (False, [("a", False)]) == (it.watch.healthy("a"), it.told)
        it.asked()
        await it.time.go(3)
        assert 3 == it.asked()["/health"], "one that is down is asked every second"
        engine.health = http()
        await it.time.go(1)
        assert (True, [("a", False), ("a", True)]) == (it.watch.healthy("a"), it.told)


async def test_rejecting_engine_is_back_within_a_second(caplog: pytest.LogCaptureFixture):
    """An engine that refuses is down at once and back within a second."""
    async with watching() as it:
        it.engine.stop()
        await it.time.go(5)
        assert (False, [("a", True), ("a", False)]) == (it.watch.healthy("a"), it.told)
        assert f"a at http://127.0.0.1:{it.engine.port} is down: /health: Cannot connect" in caplog.text
        await it.engine.start()
        await it.time.go(1)
        assert (True, ("a", True)) == (it.watch.healthy("a"), it.told[-1])


async def test_hanging_engine_goes_down_but_not_by_its_page():
    """An engine that hangs goes down and its page alone does not take it down."""
    async with watching() as it:
        first, it.watch._timeout_s, it.busy = it.watch.latest("a"), 0.2, False
        it.engine.metrics = hangs
        await it.time.go(10)
        assert it.watch.healthy("a")
        assert first == it.watch.latest("a"), "no answer is no sample; the last one grows old"
        it.engine.health = hangs
        await it.time.go(5)
        assert it.watch.healthy("a")
        await it.time.go(5)
        assert not it.watch.healthy("a")


async def test_late_gateway_does_not_take_its_engine_down():
    """A gateway that wakes up late does not take its engine down."""
    engine = FakeEngine()

    async def while_the_gateway_sleeps(writer: asyncio.StreamWriter) -> None:
        it.time.now += 1.0
        await writer.wait_closed()

    async with watching(engine) as it:
        engine.health, it.watch._timeout_s = while_the_gateway_sleeps, 0.05
        await it.time.go(20)
        assert 3 <= it.asked()["/health"]
        assert (True, [("a", True)]) == (it.watch.healthy("a"), it.told)


GOOD = lines("num_requests_waiting 3", "kv_cache_usage_perc 0")


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + GOOD)
    while not writer.is_closing():
        writer.write(b"# no end\n" * 10_000)
        await writer.drain()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "endless": endless,
    "too-long": http(GOOD + b"#" * PAGE_BYTES),
    "less-than-announced": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + GOOD,
    "bad-chunk": CHUNKED + b"zz\r\n" + GOOD,
    "cut-short": CHUNKED + b"ff\r\n" + GOOD,
    "error": http(GOOD, "500 Internal Server Error"),
    "redirect": http(b"", "302 Found", "Location: /health"),
    "page-of-others": http(b"<html>sign in</html>"),
    "figure-of-words": http(lines("num_requests_waiting many", "kv_cache_usage_perc 0")),
    "packed-badly": http(b"\x1f\x8bnot gzip", "200 OK", "Content-Encoding: gzip"),
    "no-http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "header-without-end": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    "nothing": b"",
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_page_that_is_broken_is_no_sample_and_is_told_once(how: str, caplog: pytest.LogCaptureFixture):
    """Nor does the same as an answer of /health end the watching; and all is well when it is well again."""
    async with watching(FakeEngine(metrics=BROKEN[how], health=BROKEN[how])) as it:
        it.watch._timeout_s = 30.0
        await it.time.go(2 if how in ("endless", "too-long") else 6)
        assert it.watch.latest("a") is None
        assert 1 == caplog.text.count(f"a: http://127.0.0.1:{it.engine.port}/metrics cannot be read: ")
        assert (how in ("endless", "too-long")) == ("cannot be read: " in caplog.text and "after 4 MiB" in caplog.text)
        it.engine.metrics, it.engine.health = figures(waiting=2), http()
        await it.time.go(6)
        assert Sample(it.time.now, 2.0, 0.0, 0.0) == it.watch.latest("a")
        assert it.watch.healthy("a")


async def test_internal_errors_do_not_end_the_watching(caplog: pytest.LogCaptureFixture):
    """What goes wrong inside the gateway does not end the watching."""
    async with watching() as it:
        it.watch._tell = lambda name, up: {}[name]  # type: ignore[assignment]
        it.engine.health = http(status="500 Oops")
        await it.time.go(10)
        assert caplog.text.count("watching a failed") >= 1
        assert "KeyError: 'a'" in caplog.text
        assert it.time.now == it.watch.latest("a").at  # type: ignore[union-attr]


async def test_the_data_path_says_at_once_that_an_engine_is_gone():
    async with watching() as it:
        it.watch.failed("a")
        assert (False, [("a", True), ("a", False)]) == (it.watch.healthy("a"), it.told)
        it.watch.worked("a")
        assert (True, ("a", True)) == (it.watch.healthy("a"), it.told[-1])
        it.watch.failed("a")
        await it.time.go(1)
        assert (True, ("a", True)) == (it.watch.healthy("a"), it.told[-1]), "the next good probe brings it back"


async def test_foreign_service_is_never_probed():
    """A service of others is never asked and is left alone for a while."""
    async with watching() as it:
        it.watch.follow({"bought": Upstream(url=it.engine.upstream.url, kind="api")})
        it.asked()
        assert it.watch.healthy("bought")
        for _ in range(2):
            it.watch.failed("bought")
        assert it.watch.healthy("bought")
        it.watch.failed("bought")
        assert not it.watch.healthy("bought")
        it.time.now += 9.9
        assert not it.watch.healthy("bought")
        it.time.now += 0.1
        assert it.watch.healthy("bought")
        it.watch.worked("bought")
        assert [("bought", False), ("bought", True)] == it.told[1:]
        assert {"/health": 0, "/metrics": 0} == it.asked()


async def test_nothing_known_is_no_reason_not_to_ask():
    async with watching() as it:
        it.watch.failed("nobody")
        it.watch.worked("nobody")
        assert (True, None) == (it.watch.healthy("nobody"), it.watch.latest("nobody"))


async def test_another_policy_keeps_what_is_known_of_engines_that_stay():
    second = FakeEngine(metrics=figures(waiting=4))
    await second.start()
    async with watching() as it:
        it.watch.failed("a")
        known = it.watch.latest("a")
        it.watch.follow({"a": Upstream(url=it.engine.upstream.url, weight=2.0), "b": second.upstream})
        assert (False, known) == (it.watch.healthy("a"), it.watch.latest("a"))
        await it.time.settle(2)
        assert {"a", "b"} == it.watch.samples().keys()
        it.watch.follow({"a": second.upstream})
        await it.time.go(1)
        assert {"a": Sample(1000.0, 4.0, 0.0, 0.0)}.keys() == it.watch.samples().keys()
        assert 4.0 == it.watch.samples()["a"].waiting, "the same name at another address is another engine"
        it.asked()
        await it.time.go(3)
        assert {"/health": 0, "/metrics": 0} == it.asked(), "who left is not asked any more"
    second.stop()


async def test_stopping_ends_also_what_hangs():
    async with watching() as it:
        it.engine.metrics = it.engine.health = hangs
        it.time.now += 10
        it.watch.follow({"a": it.engine.upstream, "hangs": it.engine.upstream})
        async with asyncio.timeout(30):
            await it.watch.stop()
