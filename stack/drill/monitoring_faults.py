"""Faults of the monitoring: sidecar, Prometheus, Alertmanager, span receiver."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import AsyncIterator, Iterator
from functools import partial

import yaml
from aiohttp import web

from alerts import routing
from stack.drill.faults import fault, folder_instead_of, served
from stack.drill.lab import DrillLab
from stack.drill.traffic import every, meanwhile, short


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
    async with served("POST", "/v1/traces", never) as url:
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
    async with served("POST", "/deadman", never) as url:
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
