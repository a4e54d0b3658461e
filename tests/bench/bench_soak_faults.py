"""What happens to the lab during a soak, each of it short, fixed when it is over, and by a schedule that its seed
decides.

What the drills do to a lab is done by their own code (stack/drill/faults.py)."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from stack.drill.faults import folder_instead_of, stopped
from stack.drill.lab import DrillLab
from stack.drill.monitoring_faults import full_disk
from tests.bench.bench_soak_load import Load

LIMITED_TO = 2
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{",
    b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    b"\0" * 4096,
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"",
)


@dataclass(slots=True)
class Scene:
    """Where faults happen. archive: takes the log of a process that is about to be started again. answers: waits until
    it answers.

    kept: numbers of rotated files."""

    lab: DrillLab
    load: Load
    rng: random.Random
    archive: Callable[[str], None]
    answers: Callable[[DrillLab, str], Awaitable[None]]
    kept: Iterator[int] = field(default_factory=lambda: count(1))

    async def started_again(self, name: str, away_s: float) -> None:
        """SIGKILL, a while without it, and a new process."""
        await self.lab.end(name)
        self.archive(name)
        await asyncio.sleep(away_s)
        await self.lab.launch(name)
        await self.answers(self.lab, name)


Fault = Callable[[Scene], Awaitable[None]]


async def sidecar_killed(scene: Scene) -> None:
    await scene.started_again("sidecar", scene.rng.uniform(0.5, 5.0))


async def prometheus_killed(scene: Scene) -> None:
    await scene.started_again("prometheus", scene.rng.uniform(0.5, 3.0))


async def collector_away(scene: Scene) -> None:
    """Where the lab has one."""
    if scene.lab.config.with_collector:
        await scene.started_again("otelcol", scene.rng.uniform(3.0, 10.0))


async def log_renamed(scene: Scene) -> None:
    log = scene.lab.config.requests_log
    if log.exists():
        log.rename(log.with_name(f"{log.name}.{next(scene.kept)}"))


async def log_copied_and_cut(scene: Scene) -> None:
    """copytruncate; the gateway stands still between the copy and the cut, else what it writes there would be lost, as
    with any program."""
    log = scene.lab.config.requests_log
    with stopped(scene.lab.pid("gateway")):
        await asyncio.sleep(0.05)
        if log.exists():
            shutil.copyfile(log, log.with_name(f"{log.name}.{next(scene.kept)}"))
            os.truncate(log, 0)


async def engine_pauses(scene: Scene) -> None:
    """With its API server: connections are taken by the kernel, and nobody answers."""
    with stopped(scene.lab.pid("vllm")):
        await asyncio.sleep(scene.rng.uniform(1.0, 6.0))


async def teams_read_again(scene: Scene) -> None:
    """New limits, and now and then a file with a mistake, after which the former ones stay."""
    path = scene.lab.config.folder / "teams.yaml"
    before = path.read_text()
    limited(path, scene.rng.randint(LIMITED_TO, 2 * LIMITED_TO))
    broken = scene.rng.random() < 0.3
    if broken:
        path.write_text("teams: [")
    os.kill(scene.lab.pid("gateway"), signal.SIGHUP)
    await asyncio.sleep(1.0)
    if broken:
        path.write_text(before)


def limited(path: Path, in_flight: int) -> None:
    """One team may have so many requests under way; more of them are refused."""
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    content["teams"]["experimental"]["max_in_flight"] = in_flight
    path.write_text(yaml.safe_dump(content))


async def garbage(scene: Scene) -> None:
    """Bytes that are no request, to everything of ours that listens."""
    for name in ("gateway", "gateway-metrics", "sidecar", "board"):
        for words in GARBAGE:
            _, writer = await asyncio.open_connection("127.0.0.1", scene.lab.config.port(name))
            writer.write(words)
            await asyncio.sleep(0.02)
            writer.close()


async def slow_clients(scene: Scene) -> None:
    """Connections that say nothing, and bodies that come in pieces."""
    idle = [await asyncio.open_connection("127.0.0.1", scene.lab.config.port("gateway")) for _ in range(20)]
    await scene.load.slow(6)
    for _, writer in idle:
        writer.close()


async def crowd(scene: Scene) -> None:
    await scene.load.crowd(24)


async def log_disk_full(scene: Scene) -> None:
    with full_disk(scene.lab.pid("gateway")):
        await asyncio.sleep(scene.rng.uniform(2.0, 6.0))


async def state_disk_full(scene: Scene) -> None:
    with full_disk(scene.lab.pid("sidecar")):
        await asyncio.sleep(scene.rng.uniform(2.0, 6.0))


async def log_is_a_folder(scene: Scene) -> None:
    with folder_instead_of(scene.lab.config.requests_log):
        await asyncio.sleep(scene.rng.uniform(1.0, 4.0))


# A process that is killed begins its figures anew, so these happen in the first part of a soak; the life that is judged
# is the one after it.
RESTARTS: tuple[Fault, ...] = (sidecar_killed, prometheus_killed, collector_away)
OTHERS: tuple[Fault, ...] = (
    log_renamed, log_copied_and_cut, engine_pauses, teams_read_again, garbage, slow_clients, crowd, log_disk_full,
    state_disk_full, log_is_a_folder,
)  # fmt: skip
RESTARTS_WITHIN = 0.3  # of the whole


def schedule(for_s: float, every_s: float, rng: random.Random) -> list[tuple[float, Fault]]:
    """When what happens, in seconds since the start: each kind in turn, in an order that is drawn anew each time round.
    First the restarts."""
    found: list[tuple[float, Fault]] = []
    due: dict[bool, list[Fault]] = {True: rng.sample(RESTARTS, len(RESTARTS)), False: []}
    at = every_s / 2
    while at < for_s:
        early = at < RESTARTS_WITHIN * for_s
        if not due[early]:
            kinds = (*RESTARTS, *OTHERS) if early else OTHERS
            due[early] = rng.sample(kinds, len(kinds))
        found.append((at, due[early].pop()))
        at += rng.uniform(0.7, 1.3) * every_s
    return found
