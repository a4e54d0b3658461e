"""Faults of processes, as context managers: entering injects the fault, leaving undoes it.

A process that was killed is started again when the block ends as planned; where it ends otherwise, the lab is repaired
before the next drill. What would outlive us (a stopped process, a moved file) is taken back in any case. Here stand
those of any process; faults by subject stand in the modules beside this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from stack.drill.lab import DrillLab

Fault = Callable[[DrillLab], AbstractAsyncContextManager[None]]
fault = contextlib.asynccontextmanager


def an_hour(lab: DrillLab) -> float:
    """Seconds that an hour of the rules takes at the drill's pace, and a little more: days are added up from full
    hours."""
    return lab.config.settings.seconds("1h") + 3 * lab.config.beat.scrape_s


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is there and does nothing: SIGSTOP, and SIGCONT whatever happens."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def left_discovery(job: str, process: str | None = None) -> Fault:
    """Return a fault that takes all targets of a scrape job away, after an hour in which they were recorded. process:
    ended meanwhile."""

    @fault
    async def leave(lab: DrillLab) -> AsyncIterator[None]:
        await asyncio.sleep(an_hour(lab))
        lab.breaks_now()
        with prometheus_yml(lab) as content:
            scrape_job(content, job)["static_configs"] = []
            rewrite(lab, content)
            if process:
                await lab.end(process)
            yield
            if process:
                await lab.start(process)

    return leave


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


@contextlib.asynccontextmanager
async def served(
    method: str, path: str, answer: Callable[[web.Request], Awaitable[web.Response]], port: int = 0
) -> AsyncIterator[str]:
    """A stand-in that answers on one path; its address. port: 0 for any free one."""
    app = web.Application()
    app.router.add_route(method, path, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# --- those who watch


def killed(name: str) -> Fault:
    """A fault that kills one process of the lab and starts it again."""

    @fault
    async def kill(lab: DrillLab) -> AsyncIterator[None]:
        await lab.end(name)
        yield
        await lab.start(name)

    return kill


@contextlib.contextmanager
def prometheus_yml(lab: DrillLab) -> Iterator[dict[str, Any]]:
    path = lab.config.folder / "prometheus.yml"
    before = path.read_text()
    try:
        yield yaml.safe_load(before)
    finally:
        path.write_text(before)
        lab.reload_prometheus()


def scrape_job(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a scrape job of a configuration."""
    return next(job for job in content["scrape_configs"] if job["job_name"] == name)


def rewrite(lab: DrillLab, content: object) -> None:
    (lab.config.folder / "prometheus.yml").write_text(json.dumps(content))  # JSON is YAML
    lab.reload_prometheus()
