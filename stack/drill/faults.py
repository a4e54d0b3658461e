"""What can go wrong, one function for each: entering the block makes it so, leaving it takes it away again.

A process that was killed is started again when the block ends as planned; where it ends otherwise, the lab mends itself
before the next drill. What would outlive us (a stopped process, a moved file) is taken back in any case."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from alerts import routing
from exporters import exposition
from exporters.catalogue import sidecar, vllm
from exporters.catalogue.metric import Metric
from exporters.events import log
from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.drill.lab import CARDS, DrillLab, until
from stack.drill.traffic import ask, crowd, every, good, many, meanwhile, short, some_words
from stack.lab.plan import MODEL

Fault = Callable[[DrillLab], AbstractAsyncContextManager[None]]
fault = contextlib.asynccontextmanager

LONG = 20_000  # tokens: more than a drill lasts
_EVER: dict[str, Any] = {"ignore_eos": True}


def _an_hour(lab: DrillLab) -> float:
    """Seconds that an hour of the rules takes at the drill's pace, and a little more: days are added up from full
    hours."""
    return lab.config.settings.seconds("1h") + 3 * lab.config.beat.scrape_s


# --- engines


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is there and does nothing: SIGSTOP, and SIGCONT whatever happens."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@fault
async def engine_killed(lab: DrillLab) -> AsyncIterator[None]:
    await lab.end("vllm")
    yield
    await lab.start("vllm")


@fault
async def engine_hangs(lab: DrillLab) -> AsyncIterator[None]:
    """The API server is stopped: connections are taken by the kernel, and nobody answers."""
    with stopped(lab.pid("vllm")):
        yield


def left_discovery(job: str, process: str | None = None) -> Fault:
    """Return a fault that takes all targets of a scrape job away, after an hour in which they were recorded. process:
    ended meanwhile."""

    @fault
    async def leave(lab: DrillLab) -> AsyncIterator[None]:
        await asyncio.sleep(_an_hour(lab))
        lab.breaks_now()
        with _prometheus_yml(lab) as content:
            _job(content, job)["static_configs"] = []
            _rewrite(lab, content)
            if process:
                await lab.end(process)
            yield
            if process:
                await lab.start(process)

    return leave


@fault
async def target_is_no_engine(lab: DrillLab) -> AsyncIterator[None]:
    """The engines' scrape job gets the gateway's metrics port as a target, as a typing error would have it."""
    with _prometheus_yml(lab) as content:
        _job(content, "vllm")["static_configs"][0]["targets"].append(f"127.0.0.1:{lab.config.port('gateway-metrics')}")
        _rewrite(lab, content)
        yield


@fault
async def engine_with_other_bounds(lab: DrillLab) -> AsyncIterator[None]:
    """A stand-in for a second engine of the model that was started with bucket bounds of its own."""

    async def page(_: web.Request) -> web.Response:
        about = {"engine": "0", "model_name": MODEL}
        latency = exposition.Distribution((0.1, 1.0), (1, 0, 0), 0.05)
        return web.Response(
            text=exposition.render(
                [(vllm.NUM_REQUESTS_RUNNING, about, 0.0), (vllm.E2E_REQUEST_LATENCY, about, latency)]
            )
        )

    async with _served("GET", "/metrics", page) as url:
        with _prometheus_yml(lab) as content:
            _job(content, "vllm")["static_configs"][0]["targets"].append(url.removeprefix("http://"))
            _rewrite(lab, content)
            yield


@fault
async def core_frozen(lab: DrillLab) -> AsyncIterator[None]:
    """The engine core is stopped while it works; its API server goes on answering health checks and scrapes."""
    async with meanwhile(crowd(2, partial(ask, lab, tokens=LONG, direct=True, **_EVER))):
        await _until_it_runs(lab)
        with stopped(lab.core()):
            yield


@fault
async def engine_restarts(lab: DrillLab) -> AsyncIterator[None]:
    for _ in range(3):
        await asyncio.sleep(3 * lab.config.beat.scrape_s)  # so that Prometheus sees each of them, the first too
        await lab.end("vllm")
        await lab.start("vllm")
    yield


@fault
async def engine_starts_slowly(lab: DrillLab) -> AsyncIterator[None]:
    """It stands still for a while before it loads, as with weights that come from far away."""
    await lab.end("vllm")
    await lab.launch("vllm")
    with stopped(lab.pid("vllm")):
        await asyncio.sleep(80)
    await lab.answers("vllm")
    yield


async def _until_it_runs(lab: DrillLab) -> None:
    async def runs() -> bool:
        return await lab.at_the_engine(vllm.NUM_REQUESTS_RUNNING.name) > 0

    await until(runs, 30)


async def pulses(lab: DrillLab, stopped_s: float, runs_s: float) -> None:
    """The engine core stops and goes on again and again, which makes it slow without making it idle; until
    cancelled."""
    core = lab.core()
    while True:
        with stopped(core):
            await asyncio.sleep(stopped_s)
        await asyncio.sleep(runs_s)


# --- latency


@fault
async def more_asked_than_answered(lab: DrillLab) -> AsyncIterator[None]:
    """Sixteen clients, one slot, and an engine that needs a second or more for each of them."""
    async with meanwhile(crowd(16, partial(ask, lab, tokens=100, direct=True, **_EVER)), pulses(lab, 0.4, 0.05)):
        yield


@fault
async def queue_without_end(lab: DrillLab) -> AsyncIterator[None]:
    """Two requests a second, one slot, and an engine that needs many seconds for each of them."""
    async with meanwhile(every(0.5, partial(ask, lab, tokens=2000, direct=True, **_EVER)), pulses(lab, 0.4, 0.05)):
        yield


@fault
async def slow_decoding(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(crowd(4, partial(ask, lab, tokens=LONG, direct=True, **_EVER)), pulses(lab, 0.2, 0.02)):
        yield


async def _a_hundred_good(lab: DrillLab) -> None:
    """Short requests, all well, and then it breaks. Prometheus sees the first before the others come: what a counter
    begins with is no growth."""

    async def seen() -> bool:
        return bool(await lab.query(f"sum({sidecar.REQUESTS.name})"))

    await short(lab)
    await until(seen, 30)
    await many(100, 4, partial(short, lab))
    lab.breaks_now()


@fault
async def late_first_tokens(lab: DrillLab) -> AsyncIterator[None]:
    """Some requests wait more than 2.5 s for their first token, out of a hundred; then nobody asks any more."""
    await _a_hundred_good(lab)
    async with asyncio.TaskGroup() as group:
        with stopped(lab.core()):
            for _ in range(12):
                group.create_task(ask(lab, tokens=1, direct=True))
            await asyncio.sleep(3.2)
    yield
    await many(1600, 16, partial(ask, lab, tokens=1, prompt="the", direct=True))


@fault
async def late_tokens(lab: DrillLab) -> AsyncIterator[None]:
    """After a hundred good requests the gaps between tokens are too long for a few seconds; then nobody asks any
    more."""
    await _a_hundred_good(lab)
    async with meanwhile(crowd(8, partial(ask, lab, tokens=LONG, direct=True, **_EVER)), pulses(lab, 0.2, 0.003)):
        await asyncio.sleep(5)
    yield
    await many(40, 16, partial(ask, lab, tokens=1000, direct=True, **_EVER))


@fault
async def failed_requests(lab: DrillLab) -> AsyncIterator[None]:
    """Some requests run into the gateway's time limit, out of a hundred; then nobody asks any more."""
    await _a_hundred_good(lab)
    with stopped(lab.core()):
        await many(12, 12, partial(short, lab))
    yield
    await many(2400, 16, partial(short, lab))


@fault
async def slower_since_a_change(lab: DrillLab) -> AsyncIterator[None]:
    """An hour as usual, a change on record, and from then on an engine that is slower."""
    async with meanwhile(every(0.1, partial(good, lab))):
        await asyncio.sleep(_an_hour(lab))
        lab.breaks_now()
        log.append(
            lab.config.events,
            log.TuningEvent(at_s=time.time(), kind="change", what="drill: a change that makes it slower"),
        )
        async with meanwhile(pulses(lab, 0.4, 0.2)):
            yield


# --- cache


@fault
async def cache_too_small(lab: DrillLab) -> AsyncIterator[None]:
    """A cache of 768 tokens, and as many answers of 250 at once as it takes. Slow, so that the cache is the only thing
    that is busy."""

    async def one() -> int:
        return await ask(lab, tokens=250, prompt=some_words(6), direct=True, **_EVER)

    async with meanwhile(crowd(24, one), pulses(lab, 0.2, 0.1)):
        yield


@fault
async def prompts_no_longer_alike(lab: DrillLab) -> AsyncIterator[None]:
    """An hour of prompts that share their beginning, then prompts that share nothing."""

    async def unlike() -> int:
        return await ask(lab, tokens=2, prompt=some_words(60), direct=True)

    async with meanwhile(every(0.1, partial(good, lab))):
        await asyncio.sleep(_an_hour(lab))
    lab.breaks_now()
    async with meanwhile(every(0.2, unlike)):
        yield


@fault
async def nothing_to_guess(lab: DrillLab) -> AsyncIterator[None]:
    """Prompts that repeat themselves make the engine draft; answers at random are never what was drafted."""

    async def one() -> int:
        return await ask(lab, tokens=64, prompt=f"{some_words(6)} " * 8, direct=True, temperature=2.0, **_EVER)

    async with meanwhile(crowd(2, one)):
        yield


# --- requests


@fault
async def requests_time_out(lab: DrillLab) -> AsyncIterator[None]:
    """The engine core is stopped; the gateway gives up on each request after its time limit."""
    with stopped(lab.core()):
        async with meanwhile(every(0.5, partial(short, lab))):
            yield


@fault
async def more_than_the_engine_takes(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(crowd(16, partial(ask, lab, tokens=200, **_EVER))):
        yield


@fault
async def wrong_key(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(every(0.25, partial(ask, lab, key="sk-of-nobody"))):
        yield


@fault
async def clients_hang_up(lab: DrillLab) -> AsyncIterator[None]:
    """First an hour of clients who wait for their answers: what is unusual needs something usual before it."""
    async with meanwhile(every(0.2, partial(short, lab))):
        await asyncio.sleep(_an_hour(lab))
    lab.breaks_now()
    async with meanwhile(every(0.25, partial(ask, lab, tokens=LONG, hang_up=True, **_EVER))):
        yield


@fault
async def limit_too_short(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(every(0.2, partial(ask, lab, tokens=2, **_EVER))):
        yield


@fault
async def past_the_gateway(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(every(0.2, partial(ask, lab, tokens=4, direct=True))):
        yield


@fault
async def forged_records(lab: DrillLab) -> AsyncIterator[None]:
    """Good requests in the log that no engine has seen."""
    async with meanwhile(_append(lab, 0.2, 0.0)):
        yield


@fault
async def records_come_late(lab: DrillLab) -> AsyncIterator[None]:
    """Records of requests that ended two minutes before they are written."""
    async with meanwhile(_append(lab, 0.5, 120.0)):
        yield


@fault
async def more_teams_than_seats(lab: DrillLab) -> AsyncIterator[None]:
    """Records of more teams than the sidecar gives series of their own; it keeps the first of them for good."""
    async with meanwhile(_append(lab, 0.05, 0.0, teams=tuple(f"drill-{number}" for number in range(80)))):
        yield


async def _append(lab: DrillLab, every_s: float, late_s: float, teams: Sequence[str] = ("demo",)) -> None:
    number = 0
    while True:
        number += 1
        record = RequestRecord(
            request_id=f"drill-{number}",
            ts=timestamp(time.time() - late_s),
            team=teams[number % len(teams)],
            model=MODEL,
            prompt_tokens=1,
            completion_tokens=1,
            status=200,
            finish_reason="length",
            outcome="ok",
        )
        with lab.config.requests_log.open("ab") as file:
            file.write(to_line(record))
        await asyncio.sleep(every_s)


@fault
async def log_is_no_file(lab: DrillLab) -> AsyncIterator[None]:
    """The request log's path leads to a folder; the gateway has something to write all the time."""
    with folder_instead_of(lab.config.requests_log):
        async with meanwhile(every(0.5, partial(short, lab))):
            yield


@fault
async def hardly_any_traffic(lab: DrillLab) -> AsyncIterator[None]:
    """Two cards at 3.6 an hour make a token every now and then."""
    async with meanwhile(every(2.0, partial(ask, lab, tokens=8, prompt="the"))):
        yield
    await many(200, 4, partial(good, lab))


@contextlib.contextmanager
def folder_instead_of(path: Path) -> Iterator[None]:
    aside = path.with_suffix(".aside")
    path.touch()
    path.rename(aside)
    path.mkdir()
    try:
        yield
    finally:
        path.rmdir()
        aside.rename(path)


# --- cards


@fault
async def card_lost(lab: DrillLab) -> AsyncIterator[None]:
    with _second_card(lab, lost=True):
        yield


@fault
async def card_hot(lab: DrillLab) -> AsyncIterator[None]:
    with _second_card(lab, **{"temperature.gpu": 91}):
        yield


@fault
async def card_held_down(lab: DrillLab) -> AsyncIterator[None]:
    """Half of the time at lower clocks, because of heat."""

    async def heat() -> None:
        began = time.monotonic()
        while True:
            held_us = round((time.monotonic() - began) * 0.5e6)
            lab.cards(**{"clocks_event_reasons_counters.hw_thermal_slowdown": held_us})
            await asyncio.sleep(0.5)

    with _second_card(lab):
        async with meanwhile(heat()):
            yield


@fault
async def card_memory_errors(lab: DrillLab) -> AsyncIterator[None]:
    with _second_card(lab, **{"ecc.errors.uncorrected.aggregate.total": 2}):
        yield


@fault
async def card_memory_full(lab: DrillLab) -> AsyncIterator[None]:
    with _second_card(lab, **{"memory.used": 79500, "memory.free": 500}):
        yield


def dcgm_tells(*metrics: Metric, value: float = 0.0, per_s: float = 0.0) -> Fault:
    """A fault that brings a stand-in for NVIDIA's dcgm-exporter, whose figures begin at `value` and grow by `per_s`
    each second."""

    @fault
    async def tell(lab: DrillLab) -> AsyncIterator[None]:
        began = time.monotonic()

        async def page(_: web.Request) -> web.Response:
            figure = value + per_s * (time.monotonic() - began)
            about = {"UUID": CARDS[1]["uuid"], "gpu": "1", "hostname": "stand-in"}
            return web.Response(text=exposition.render((metric, about, figure) for metric in metrics))

        async with _served("GET", "/metrics", page) as url:
            with _prometheus_yml(lab) as content:
                content["scrape_configs"].append(
                    {"job_name": "dcgm", "static_configs": [{"targets": [url.removeprefix("http://")]}]}
                )
                _rewrite(lab, content)
                yield

    return tell


@contextlib.asynccontextmanager
async def _served(
    method: str, path: str, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[str]:
    """A stand-in that answers on one path; its address."""
    app = web.Application()
    app.router.add_route(method, path, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def _second_card(lab: DrillLab, **says: object) -> Iterator[None]:
    lab.cards(**says)
    try:
        yield
    finally:
        lab.cards()


# --- those who watch


def killed(name: str) -> Fault:
    """A fault that kills one process of the lab and starts it again."""

    @fault
    async def kill(lab: DrillLab) -> AsyncIterator[None]:
        await lab.end(name)
        yield
        await lab.start(name)

    return kill


@fault
async def events_unreadable(lab: DrillLab) -> AsyncIterator[None]:
    with folder_instead_of(lab.config.events):
        yield


@fault
async def state_unwritable(lab: DrillLab) -> AsyncIterator[None]:
    """The sidecar may make no file longer, as on a full disk, and has something to keep all the time."""
    with full_disk(lab.pid("sidecar")):
        async with meanwhile(every(0.5, partial(short, lab))):
            yield


@contextlib.contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Every write of a process fails. Linux. One that has ended meanwhile needs nothing back."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


@fault
async def spans_refused(lab: DrillLab) -> AsyncIterator[None]:
    """A stand-in for a collector that wants no span; the sidecar is started again with its address, and without it in
    the end."""

    async def never(_: web.Request) -> web.Response:
        return web.Response(status=400)

    path = lab.config.folder / "sidecar.yaml"
    before = path.read_text()
    async with _served("POST", "/v1/traces", never) as url:
        try:
            path.write_text(json.dumps({**yaml.safe_load(before), "otlp": {"endpoint": url}}))  # JSON is YAML
            await lab.end("sidecar")
            await lab.start("sidecar")
            async with meanwhile(every(0.5, partial(short, lab))):
                yield
        finally:
            path.write_text(before)
        await lab.end("sidecar")
        await lab.start("sidecar")


@fault
async def notifications_refused(lab: DrillLab) -> AsyncIterator[None]:
    """The watchdog gets a receiver that refuses everything. Alertmanager is started again with it, and without it in
    the end."""

    async def never(_: web.Request) -> web.Response:
        return web.Response(status=403)

    path = lab.config.folder / "alertmanager.yml"
    before = path.read_text()
    async with _served("POST", "/deadman", never) as url:
        content = yaml.safe_load(before)
        for route in content["route"]["routes"]:
            route["group_interval"] = "2s"
        for receiver in content["receivers"]:
            if receiver["name"] == routing.DEADMAN:
                receiver["webhook_configs"] = [{"url": f"{url}/deadman"}]
        try:
            path.write_text(json.dumps(content))  # JSON is YAML
            await lab.end("alertmanager")
            await lab.start("alertmanager")
            yield
        finally:
            path.write_text(before)
        await lab.end("alertmanager")
        await lab.start("alertmanager")


@fault
async def rule_that_cannot_be(lab: DrillLab) -> AsyncIterator[None]:
    """A rule that matches many series with many, which Prometheus finds out only when it evaluates it."""
    path = lab.config.folder / "rules" / "drill.yaml"
    path.write_text(
        yaml.safe_dump(
            {"groups": [{"name": "vllm-drill", "rules": [{"record": "drill:up:broken", "expr": "up * on () up"}]}]}
        )
    )
    lab.reload_prometheus()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lab.reload_prometheus()


@contextlib.contextmanager
def _prometheus_yml(lab: DrillLab) -> Iterator[dict[str, Any]]:
    path = lab.config.folder / "prometheus.yml"
    before = path.read_text()
    try:
        yield yaml.safe_load(before)
    finally:
        path.write_text(before)
        lab.reload_prometheus()


def _job(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a scrape job of a configuration."""
    return next(job for job in content["scrape_configs"] if job["job_name"] == name)


def _rewrite(lab: DrillLab, content: object) -> None:
    (lab.config.folder / "prometheus.yml").write_text(json.dumps(content))  # JSON is YAML
    lab.reload_prometheus()
