"""Faults of GPUs, reported by stand-ins for nvidia-smi and dcgm-exporter."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from exporters import exposition
from exporters.catalogue.metric import Metric
from stack.drill.faults import Fault, fault, prometheus_yml, rewrite, served
from stack.drill.lab import GPUS, DrillLab
from stack.drill.traffic import meanwhile


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
            lab.write_gpus(**{"clocks_event_reasons_counters.hw_thermal_slowdown": held_us})
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
            about = {"UUID": GPUS[1]["uuid"], "gpu": "1", "hostname": "stand-in"}
            return web.Response(text=exposition.render((metric, about, figure) for metric in metrics))

        async with served("GET", "/metrics", page) as url:
            with prometheus_yml(lab) as content:
                content["scrape_configs"].append(
                    {"job_name": "dcgm", "static_configs": [{"targets": [url.removeprefix("http://")]}]}
                )
                rewrite(lab, content)
                yield

    return tell


@contextlib.contextmanager
def _second_card(lab: DrillLab, **says: object) -> Iterator[None]:
    lab.write_gpus(**says)
    try:
        yield
    finally:
        lab.write_gpus()
