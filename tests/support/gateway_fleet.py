"""Gateways as `lab up --gateways` starts them, behind a real HAProxy and with a real Valkey, before an engine that runs
already; and clients whose requests all have an id."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from exporters.catalogue import exposition_parser
from exporters.requests.record import RequestRecord, parse_line
from stack.lab import plan, supervisor
from stack.lab.up import prepare
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
WITHIN_S = 120.0
WORDS = "the cache of the server holds the blocks of every prompt that was computed before " * 8


class GatewayFleet:
    """Processes of some gateways, by the names of the lab's plan. keys: of each team."""

    def __init__(
        self, folder: Path, programs: Mapping[str, Path], engine: str, gateways: int, slots: int, offset: int
    ) -> None:
        folder.mkdir(exist_ok=True)
        every = {**dict.fromkeys(("prometheus", "alertmanager"), Path()), **programs}
        unprobed = {"liveness": {"probe": False}}  # a busy engine is probed at any time, and each probe has a record
        self.config = plan.LabConfig(
            folder, every, engine, offset, teams=("demo", "default"), gateways=gateways,
            more={"sidecar.yaml": {"patience_s": 3, "engine_interval_s": 1, "gpu": "off"}}
            | {f"gateway-{number}.yaml": unprobed for number in range(gateways)},
        )  # fmt: skip
        self.keys = prepare(self.config)
        with (folder / "teams.yaml").open("a") as teams:
            teams.write(f"capacity: {{slots: {slots}}}\n")
        names = {"valkey", "haproxy", *(n for each in self.config.replicas for n in (each.gateway, each.sidecar))}
        self._specs = {spec.name: spec for spec in plan.processes(self.config) if spec.name in names}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return self.config.url("gateway")

    async def __aenter__(self) -> GatewayFleet:
        try:
            for name in self._specs:
                self.start(name)
            for name in self._specs:
                await self.healthy(name)
        except BaseException:
            self.end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        spec = self._specs[name]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **spec.env}
        with (self.config.folder / f"{name}.out").open("ab") as log:
            self.running[name] = subprocess.Popen(
                spec.argv, stdout=log, stderr=log, env=env, cwd=self.config.folder,
                preexec_fn=supervisor._die_with_parent,
            )  # fmt: skip

    async def healthy(self, name: str) -> None:
        health = self._specs[name].health

        async def answers() -> bool:
            assert self.running[name].poll() is None, (self.config.folder / f"{name}.out").read_text()[-2000:]
            if health.startswith("tcp://"):
                return await supervisor._accepts(health.removeprefix("tcp://"))
            async with aiohttp.ClientSession() as session, session.get(health) as answer:
                return answer.status == 200

        await until(answers, f"{name} answers")

    async def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        self.running[name].send_signal(number)
        return await asyncio.to_thread(self.running[name].wait, 60)

    async def page(self, process: str) -> exposition_parser.Exposition:
        port = self.config.port(f"{process}-metrics" if process.startswith("gateway") else process)
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            return exposition_parser.parse(await answer.text())

    def records(self) -> list[list[RequestRecord]]:
        """Whole lines of each log."""
        logs = [each.log.read_bytes() for each in self.config.replicas]
        return [[parse_line(line) for line in log.splitlines(keepends=True) if line.endswith(b"\n")] for log in logs]


@dataclass
class FleetClients:
    """Clients of one team that ask until they are ended, and finish what they asked. failed: what went wrong, by id."""

    url: str
    key: str
    name: str
    tokens: int
    pause_s: float = 0.0
    answered: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _ending: bool = False

    def begin(self, number: int) -> None:
        self._tasks += [asyncio.create_task(self._client(len(self._tasks) + n)) for n in range(number)]

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _client(self, client: int) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"}) as session:
            for number in itertools.count():
                if self._ending:
                    return
                name = f"{self.name}-{client}-{number}"
                if problem := await self._ask(session, name, stream=bool(number % 2)):
                    self.failed[name] = problem
                else:
                    self.answered.add(name)
                await asyncio.sleep(self.pause_s)

    async def _ask(self, session: aiohttp.ClientSession, name: str, *, stream: bool) -> str:
        """Send one request; return what went wrong."""
        body = {"model": plan.MODEL, "messages": [{"role": "user", "content": f"{WORDS} {name}"}],
                "max_tokens": self.tokens, "ignore_eos": True, "stream": stream}  # fmt: skip
        try:
            async with session.post(
                f"{self.url}/v1/chat/completions", json=body, headers={"X-Request-Id": name}
            ) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return type(error).__name__
        if answer.status != 200:
            return f"{answer.status} {text[:200]}"
        if stream:
            return "" if text.rstrip().endswith("data: [DONE]") and '"error"' not in text else f"cut: {text[-200:]}"
        return "" if json.loads(text)["choices"] else "no choice"
