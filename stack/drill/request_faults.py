"""Faults of requests and their log: rejected, cut off, forged, late, too many teams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from aiohttp import web

from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.drill.engine_faults import EVER, LONG
from stack.drill.faults import an_hour, fault, folder_instead_of, served, stopped
from stack.drill.lab import DrillLab
from stack.drill.traffic import ask, crowd, every, good, many, meanwhile, short
from stack.lab.plan import MODEL


@fault
async def requests_time_out(lab: DrillLab) -> AsyncIterator[None]:
    """The engine core is stopped; the gateway gives up on each request after its time limit."""
    with stopped(lab.core()):
        async with meanwhile(every(0.5, partial(short, lab))):
            yield


@fault
async def more_than_the_engine_takes(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(crowd(16, partial(ask, lab, tokens=200, **EVER))):
        yield


@fault
async def wrong_key(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(every(0.25, partial(ask, lab, key="sk-of-nobody"))):
        yield


@fault
async def login_page(lab: DrillLab) -> AsyncIterator[None]:
    """A login proxy takes the engine's address: it seems healthy, and answers everything by a page."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<h1>Log in</h1>", content_type="text/html")

    await lab.end("vllm")
    async with served("*", "/{path:.*}", page, lab.config.port("vllm")), meanwhile(every(0.5, partial(short, lab))):
        yield
    await lab.start("vllm")


@fault
async def clients_hang_up(lab: DrillLab) -> AsyncIterator[None]:
    """First an hour of clients who wait for their answers: what is unusual needs something usual before it."""
    async with meanwhile(every(0.2, partial(short, lab))):
        await asyncio.sleep(an_hour(lab))
    lab.breaks_now()
    async with meanwhile(every(0.25, partial(ask, lab, tokens=LONG, hang_up=True, **EVER))):
        yield


@fault
async def limit_too_short(lab: DrillLab) -> AsyncIterator[None]:
    async with meanwhile(every(0.2, partial(ask, lab, tokens=2, **EVER))):
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
    """Two GPUs at 3.6 an hour make a token every now and then."""
    async with meanwhile(every(2.0, partial(ask, lab, tokens=8, prompt="the"))):
        yield
    await many(200, 4, partial(good, lab))
