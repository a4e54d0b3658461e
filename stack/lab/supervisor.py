"""Supervisor of the lab's processes: start in order, watch, stop by process group. Each lives in a group of its own;
the group, and nothing else, is ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from stack.lab.plan import PORTS, LabConfig, Process

_PR_SET_PDEATHSIG = 1
_STOP_GRACE_S = 15.0


class LabError(Exception):
    """The lab cannot go on; one sentence for the person who started it."""


@dataclass(slots=True)
class Running:
    """A started process and what was last seen of it. exited: its status, negative for a signal, None while it
    lives."""

    spec: Process
    process: asyncio.subprocess.Process
    log: Path
    healthy: bool = False
    was_healthy: bool = False
    exited: int | None = None

    @property
    def state(self) -> str:
        if self.exited is not None:
            return f"ended by signal {-self.exited}" if self.exited < 0 else f"ended with status {self.exited}"
        return "up" if self.healthy else "starting" if not self.was_healthy else "not answering"


def taken_ports(config: LabConfig, processes: Iterable[Process]) -> list[tuple[str, int]]:
    """The lab's own listeners whose port something else holds."""
    wanted = [name for process in processes for name in process.ports] + ["lab"]
    return [(name, config.port(name)) for name in wanted if not _free(config.port(name))]


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def refuse_taken_ports(config: LabConfig, processes: Iterable[Process]) -> None:
    """Raises LabError that names the first taken port and the way out."""
    if taken := taken_ports(config, processes):
        name, port = taken[0]
        others = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
        offset = next(o for o in range(1000, 50000, 1000) if all(_free(p + o) for p in PORTS.values()))
        raise LabError(
            f"port {port} for {name}{others} is taken; stop what listens there, or move all ports with --port-offset"
            f" {offset}"
        )


class Supervisor:
    """The processes of one lab."""

    def __init__(self, folder: Path) -> None:
        self.running: dict[str, Running] = {}
        self._folder = folder
        self._session: aiohttp.ClientSession | None = None

    async def start(self, spec: Process) -> None:
        """Start one process with its output in logs/NAME.log. Raises LabError when it cannot be started at all."""
        log = self._folder / "logs" / f"{spec.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **spec.env}
        with log.open("wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=env,
                    cwd=self._folder,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                raise LabError(f"{spec.name} cannot be started: {spec.argv[0]}: {error.strerror}") from error
        self.running[spec.name] = Running(spec, process, log)

    async def look(self) -> None:
        """Bring every process's state up to date."""
        await asyncio.gather(*(self._look(r) for r in self.running.values()))

    async def _look(self, running: Running) -> None:
        if running.exited is not None:
            return
        running.exited = running.process.returncode
        if running.exited is not None:
            running.healthy = False
            _signal_group(running, signal.SIGKILL)  # what it left behind, now: later its number may be somebody else's
            return
        if running.spec.health.startswith("tcp://"):
            running.healthy = await _accepts(running.spec.health.removeprefix("tcp://"))
            running.was_healthy |= running.healthy
            return
        self._session = self._session or aiohttp.ClientSession()
        try:
            async with self._session.get(running.spec.health, timeout=aiohttp.ClientTimeout(total=3)) as response:
                running.healthy = response.status < 300
        except (aiohttp.ClientError, TimeoutError):
            running.healthy = False
        running.was_healthy |= running.healthy

    async def wait_healthy(self, name: str) -> None:
        """Until the process answers. Raises LabError when any ends meanwhile, or when this one takes longer than its
        time."""
        running = self.running[name]
        deadline = time.monotonic() + running.spec.within_s
        while True:
            await self.look()
            for other in self.running.values():
                if other.exited is not None:
                    hint = f"its last words: {last_words(other.log)} (all of them: {other.log})"
                    raise LabError(f"{other.spec.name} {other.state} while the lab started; {hint}")
            if running.healthy:
                return
            if time.monotonic() > deadline:
                raise LabError(
                    f"{name} did not answer {running.spec.health} within {running.spec.within_s:.0f} s; see"
                    f" {running.log}"
                )
            await asyncio.sleep(0.25)

    async def end(self, name: str) -> None:
        """End one process at once, with its whole group, and forget it: nobody waits for it any more."""
        running = self.running.pop(name)
        if running.exited is None:
            _signal_group(running, signal.SIGKILL)
            await running.process.wait()

    async def stop(self) -> None:
        """End every process that was started here, last one first, and whatever each of them left behind in its
        group."""
        await self.look()  # an ended group is signalled once, when its end is first seen
        alive = [r for r in self.running.values() if r.exited is None]
        for running in reversed(alive):
            _signal_group(running, signal.SIGTERM)
        waits = [asyncio.create_task(r.process.wait()) for r in alive]
        if waits:
            await asyncio.wait(waits, timeout=_STOP_GRACE_S)
        for running in alive:
            _signal_group(running, signal.SIGKILL)
        await asyncio.gather(*waits)
        if self._session:
            await self._session.close()


async def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(3):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def last_words(log: Path, most: int = 300) -> str:
    """The last line of a log that says something, preferring one that names an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
    telling = [line for line in lines if "Error" in line or "error:" in line.lower()] or lines or ["nothing"]
    return telling[-1][-most:]


def _signal_group(running: Running, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(running.process.pid, number)


def _die_with_parent() -> None:
    """Linux: a lab that is killed outright takes its processes along."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
