"""Faults of an engine: dead, hung, restarted, slow, late, out of cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from aiohttp import web

from exporters import exposition
from exporters.catalogue import sidecar, vllm
from exporters.events import log
from stack.drill.faults import an_hour, fault, prometheus_yml, rewrite, scrape_job, served, stopped
from stack.drill.lab import DrillLab, until
from stack.drill.traffic import ask, call_tool, crowd, every, good, many, meanwhile, short, some_words
from stack.lab.plan import MODEL

LONG = 20_000  # tokens: more than a drill lasts
EVER: dict[str, Any] = {"ignore_eos": True}


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


@fault
async def target_is_no_engine(lab: DrillLab) -> AsyncIterator[None]:
    """The engines' scrape job gets the gateway's metrics port as a target, as a typing error would have it."""
    with prometheus_yml(lab) as content:
        scrape_job(content, "vllm")["static_configs"][0]["targets"].append(
            f"127.0.0.1:{lab.config.port('gateway-metrics')}"
        )
        rewrite(lab, content)
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

    async with served("GET", "/metrics", page) as url:
        with prometheus_yml(lab) as content:
            scrape_job(content, "vllm")["static_configs"][0]["targets"].append(url.removeprefix("http://"))
            rewrite(lab, content)
            yield


@fault
async def core_frozen(lab: DrillLab) -> AsyncIterator[None]:
    """The engine core is stopped while it works; its API server goes on answering health checks and scrapes."""
    async with meanwhile(crowd(2, partial(ask, lab, tokens=LONG, direct=True, **EVER))):
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


@fault
async def more_asked_than_answered(lab: DrillLab) -> AsyncIterator[None]:
    """Sixteen clients, one slot, and an engine that needs a second or more for each of them."""
    async with meanwhile(crowd(16, partial(ask, lab, tokens=100, direct=True, **EVER)), pulses(lab, 0.4, 0.05)):
        yield


@fault
async def queue_without_end(lab: DrillLab) -> AsyncIterator[None]:
    """Two requests a second, one slot, and an engine that needs many seconds for each of them."""
    async with meanwhile(every(0.5, partial(ask, lab, tokens=2000, direct=True, **EVER)), pulses(lab, 0.4, 0.05)):
        yield


@fault
async def slow_decoding(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(crowd(4, partial(ask, lab, tokens=LONG, direct=True, **EVER)), pulses(lab, 0.2, 0.02)):
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
    async with meanwhile(crowd(8, partial(ask, lab, tokens=LONG, direct=True, **EVER)), pulses(lab, 0.2, 0.003)):
        await asyncio.sleep(5)
    yield
    await many(40, 16, partial(ask, lab, tokens=1000, direct=True, **EVER))


@fault
async def failed_requests(lab: DrillLab) -> AsyncIterator[None]:
    """Some requests run into the gateway's time limit, out of a hundred; then nobody asks any more."""
    await _a_hundred_good(lab)
    with stopped(lab.core()):
        await many(12, 12, partial(short, lab))
    yield
    await many(2400, 16, partial(short, lab))


@fault
async def tool_calls_fail(lab: DrillLab) -> AsyncIterator[None]:
    """The engine's tool parser raises, so that vLLM answers chats with tools by HTTP 500. Gateway and sidecar are no
    targets: the engine is watched alone, as where there is no request log."""
    with prometheus_yml(lab) as content:
        content["scrape_configs"] = [
            job for job in content["scrape_configs"] if job["job_name"] not in ("gateway", "sidecar")
        ]
        rewrite(lab, content)
        usual = partial(ask, lab, tokens=1, prompt="the", direct=True)
        async with meanwhile(every(0.4, usual), every(0.4, partial(call_tool, lab))):
            yield


@fault
async def slower_since_a_change(lab: DrillLab) -> AsyncIterator[None]:
    """An hour as usual, a change on record, and from then on an engine that is slower."""
    async with meanwhile(every(0.1, partial(good, lab))):
        await asyncio.sleep(an_hour(lab))
        lab.breaks_now()
        log.append(
            lab.config.events,
            log.TuningEvent(at_s=time.time(), kind="change", what="drill: a change that makes it slower"),
        )
        async with meanwhile(pulses(lab, 0.4, 0.2)):
            yield


@fault
async def cache_too_small(lab: DrillLab) -> AsyncIterator[None]:
    """A cache of 768 tokens, and as many answers of 250 at once as it takes. Slow, so that the cache is the only thing
    that is busy."""

    async def one() -> int:
        return await ask(lab, tokens=250, prompt=some_words(6), direct=True, **EVER)

    async with meanwhile(crowd(24, one), pulses(lab, 0.2, 0.1)):
        yield


@fault
async def prompts_no_longer_alike(lab: DrillLab) -> AsyncIterator[None]:
    """An hour of prompts that share their beginning, then prompts that share nothing."""

    async def unlike() -> int:
        return await ask(lab, tokens=2, prompt=some_words(60), direct=True)

    async with meanwhile(every(0.1, partial(good, lab))):
        await asyncio.sleep(an_hour(lab))
    lab.breaks_now()
    async with meanwhile(every(0.2, unlike)):
        yield


@fault
async def nothing_to_guess(lab: DrillLab) -> AsyncIterator[None]:
    """Prompts that repeat themselves make the engine draft; answers at random are never what was drafted."""

    async def one() -> int:
        return await ask(lab, tokens=64, prompt=f"{some_words(6)} " * 8, direct=True, temperature=2.0, **EVER)

    async with meanwhile(crowd(2, one)):
        yield
