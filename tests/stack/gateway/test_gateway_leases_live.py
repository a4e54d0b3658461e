"""Gateway processes that share limits through a real store, before an engine that counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from test_gateway import ASK, CHAT, KEYS, REPLY, FakeEngine, listening
from test_gateway_store import real_store

ROOT = Path(__file__).parents[3]
SLOTS = 12


class CountingEngine(FakeEngine):
    """Holds each request for a while and counts those in flight."""

    def __init__(self) -> None:
        super().__init__(answer=self.hold)
        self.running = self.most = self.done = 0

    async def hold(self, request: web.BaseRequest) -> web.StreamResponse:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.3)
        finally:
            self.running -= 1
        self.done += 1
        return web.json_response(REPLY)


@contextlib.asynccontextmanager
async def gateway_process(
    folder: Path, engine: FakeEngine, store_url: str, index: int, port: int, metrics_port: int, replicas: int = 3
) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = started(folder, engine, store_url, index, port, metrics_port, replicas)
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{metrics_port}/-/healthy") as answer:
                        if answer.status == 200:
                            break
                assert process.poll() is None, (folder / "stderr").read_text()
                await asyncio.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def started(
    folder: Path, engine: FakeEngine, store_url: str, index: int, port: int, metrics_port: int, replicas: int
) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / "gateway.yaml").write_text(
        json.dumps(
            {
                "upstream": engine.url, "listen": f"127.0.0.1:{port}", "metrics_listen": f"127.0.0.1:{metrics_port}",
                "teams": str(folder.parent / "teams.yaml"),
                "sharing": {"replicas": replicas, "index": index, "name": f"gw-{index}", "store": {"url": store_url}},
            }
        )
    )  # fmt: skip
    words = [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", str(folder / "gateway.yaml")]
    with (folder / "stderr").open("ab") as log:
        return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)


async def metric(port: int, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"vllm_watch_gateway_{name} ")))


class Flood:
    """Clients of all gateways that ask again and again; statuses by port."""

    def __init__(self, ports: list[int], each: int) -> None:
        self.statuses: dict[int, list[int | str]] = {port: [] for port in ports}
        self._tasks = [asyncio.create_task(self._client(port, n)) for port in ports for n in range(each)]

    async def _client(self, port: int, number: int) -> None:
        key = KEYS["demo" if number % 2 else "batch"][0]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            while True:
                try:
                    async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=ASK) as answer:
                        await answer.read()
                        self.statuses[port].append(answer.status)
                except aiohttp.ClientError as error:
                    self.statuses[port].append(type(error).__name__)
                    await asyncio.sleep(0.1)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def eventually(condition: Callable[[], object], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def test_three_gateways_hold_the_limit_through_faults(part, free_port, tmp_path: Path):
    """A flood, kill -9 of one gateway, a stopped store, and one that comes back empty: the engine never has more than
    the slots and the requests of the lapsed leases, and nobody gets an error but the clients of the killed one."""
    engine = CountingEngine()
    runner = await listening(engine)
    (tmp_path / "teams.yaml").write_text(
        json.dumps(
            {
                "teams": {team: {"keys": [hashed], "cache_domain": "shared"} for team, (_, hashed) in KEYS.items()},
                "capacity": {"slots": SLOTS},
            }
        )
    )
    ports = [(free_port(), free_port()) for _ in range(3)]
    store_port = free_port()
    valkey = part("valkey").path
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        store = stack.enter_context(contextlib.ExitStack())
        url = store.enter_context(real_store(valkey, store_port, tmp_path)).url
        processes = [
            await stack.enter_async_context(gateway_process(tmp_path / f"gw-{n}", engine, url, n, *ports[n]))
            for n in range(3)
        ]
        # one gateway alone may use every slot
        flood = Flood([ports[0][0]], 20)
        await eventually(lambda: engine.running == SLOTS, 20, "all slots are in use at one gateway")
        await flood.end()
        await asyncio.sleep(1)
        engine.most = 0
        flood = Flood([port for port, _ in ports], 12)
        stack.push_async_callback(flood.end)
        await asyncio.sleep(4)
        assert SLOTS == engine.most
        assert [3.0] * 3 == [await metric(port, "lease_replicas") for _, port in ports]
        assert all(len(statuses) > 20 for statuses in flood.statuses.values()), "each gateway has its part"

        processes[2].send_signal(signal.SIGKILL)
        await asyncio.sleep(0.2)
        engine.most = 0
        await asyncio.sleep(4)
        assert SLOTS == engine.most, "the slots of the dead gateway are used again, and no more"
        assert [2.0] * 2 == [await metric(port, "lease_replicas") for _, port in ports[:2]]

        store.close()
        await asyncio.sleep(4)
        assert [1.0] * 2 == [await metric(port, "lease_lost") for _, port in ports[:2]]
        engine.most, done = 0, engine.done
        await asyncio.sleep(2)
        assert 2 * SLOTS // 3 == engine.most, "the fixed shares of two of three gateways"
        assert engine.done > done

        store.enter_context(real_store(valkey, store_port, tmp_path))
        engine.most = 0
        await asyncio.sleep(6)
        assert SLOTS == engine.most
        assert [0.0] * 2 == [await metric(port, "lease_lost") for _, port in ports[:2]]
        await flood.end()
        for port, _ in ports[:2]:
            assert {200} == set(flood.statuses[port])

        processes[0].terminate()
        assert 0 == await asyncio.to_thread(processes[0].wait, 30)
        await asyncio.sleep(0.5)
        assert 1.0 == await metric(ports[1][1], "lease_replicas"), "a gateway that stops returns its lease at once"


@pytest.mark.parametrize("fault", ["refused", "password", "type"])
async def test_a_store_that_fails_leaves_the_fixed_share(part, free_port, tmp_path: Path, fault: str):
    """Nobody listens, the password is wrong, the key is another program's: one sentence, and requests go on."""
    engine = CountingEngine()
    runner = await listening(engine)
    (tmp_path / "teams.yaml").write_text(
        json.dumps({"teams": {"demo": {"keys": [KEYS["demo"][1]]}}, "capacity": {"slots": SLOTS}})
    )
    ports, store_port = (free_port(), free_port()), free_port()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        if fault != "refused":
            options = ("--requirepass", "right") if fault == "password" else ()
            stack.enter_context(real_store(part("valkey").path, store_port, tmp_path, *options))
            await asyncio.sleep(0.5)
        if fault == "type":
            _, writer = await asyncio.open_connection("127.0.0.1", store_port)
            writer.write(b"SET vw:default:leases x\r\n")
            await writer.drain()
            writer.close()
        url = f"redis://127.0.0.1:{store_port}"
        await stack.enter_async_context(gateway_process(tmp_path / "gw", engine, url, 0, *ports))
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS['demo'][0]}"}) as session,
            session.post(f"http://127.0.0.1:{ports[0]}{CHAT}", json=ASK) as answer,
        ):
            assert 200 == answer.status
        assert 1.0 == await metric(ports[1], "lease_lost")
        said = (tmp_path / "gw/stderr").read_text()
        meaning = {
            "refused": "no connection: Connection refused",
            "password": "it wants a password; set sharing.store.password_file",
            "type": "the key vw:default:leases belongs to another program",
        }
        assert 1 == said.count(f"no lease from {url}, the fixed share of this gateway holds: {meaning[fault]}")
