"""Workers of one gateway: their configurations, and a real supervisor whose workers die, reload and stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import aiohttp
import pytest
from aiohttp import web

from stack.config import BadConfig
from stack.gateway.config import GatewayConfig
from stack.gateway.lease_client import LeaseStore
from stack.gateway.sharing import Sharing
from stack.gateway.workers import worker_config
from tests.support.counting_engine import CountingEngine
from tests.support.gateway_scene import ASK, CHAT, KEYS, REPLY, FakeEngine, listening
from tests.support.ports import free_offset
from tests.support.wait import until

ROOT = Path(__file__).parents[3]
WORKERS, SLOTS = 3, 12


def test_each_worker_has_its_files_ports_and_share():
    config = GatewayConfig(requests_log="/log/requests.jsonl", metrics_listen="[::1]:8010")
    second = worker_config(config, 1, 4, "host")
    assert ("/log/requests-1.jsonl", "[::1]:8011") == (second.requests_log, second.metrics_listen)
    assert Sharing(replicas=4, index=1) == second.sharing


def test_workers_of_replicas_are_replicas():
    """N workers of each of R replicas are R x N replicas, each with a place and a name of its own."""
    store = LeaseStore(url="redis://127.0.0.1:6379")
    config = GatewayConfig(sharing=Sharing(replicas=3, index="hostname", store=store))
    places = [worker_config(config, index, 2, f"gateway-{k}").sharing for k in range(3) for index in range(2)]
    assert [(6, n) for n in range(6)] == [(one.replicas, one.index) for one in places if one]
    assert 6 == len({one.name for one in places if one})
    rounded = worker_config(GatewayConfig(sharing=Sharing(replicas=3)), 1, 2, "host").sharing
    assert Sharing(replicas=6) == rounded


def test_a_list_of_replicas_is_refused():
    with pytest.raises(BadConfig, match=r"^sharing: --workers .*sharing\.replicas"):
        worker_config(GatewayConfig(sharing=Sharing(replicas_dns="gateway")), 0, 2, "host")


def started(words: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)


def first_port() -> int:
    """Return a port for the metrics of the first worker; the next ones are free for the others."""
    return 100 + free_offset(range(100, 100 + WORKERS))


@contextlib.asynccontextmanager
async def gateway(folder: Path, engine: FakeEngine, port: int, metrics_port: int) -> AsyncIterator[subprocess.Popen]:
    """A supervisor with its workers, all of which serve; it leaves no worker behind."""
    config = {"upstream": engine.url, "listen": f"127.0.0.1:{port}", "metrics_listen": f"127.0.0.1:{metrics_port}"}
    (folder / "gateway.yaml").write_text(json.dumps(config))
    words = [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", str(folder / "gateway.yaml")]
    with (folder / "stderr").open("wb") as log:
        process = started([*words, "--workers", str(WORKERS)], log)
    try:
        for number in range(WORKERS):
            await serving(process, metrics_port + number, folder)
        yield process
    finally:
        process.kill()
        process.wait()


async def serving(process: subprocess.Popen, port: int, folder: Path) -> None:
    async with aiohttp.ClientSession() as session:

        async def healthy() -> bool:
            if process.poll() is not None:
                pytest.fail((folder / "stderr").read_text())
            async with session.get(f"http://127.0.0.1:{port}/-/healthy") as answer:
                return answer.status == 200

        await until(healthy, "the worker serves")


def refused(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def pids(process: subprocess.Popen) -> list[int]:
    """Workers of a supervisor, in the order of their start."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


class Clients:
    """Clients that ask again and again, each request with an id and a connection of its own."""

    def __init__(self, port: int, number: int) -> None:
        self.statuses: dict[str, int | str] = {}
        self._tasks = [asyncio.create_task(self._ask(port, client)) for client in range(number)]

    async def _ask(self, port: int, client: int) -> None:
        headers = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(force_close=True)) as session:
            for number in range(10**6):
                name = f"c{client}-{number}"
                try:
                    async with session.post(
                        f"http://127.0.0.1:{port}{CHAT}", json=ASK, headers={"X-Request-Id": name}
                    ) as answer:
                        await answer.read()
                        self.statuses[name] = answer.status
                except aiohttp.ClientError as error:
                    self.statuses[name] = type(error).__name__

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def logged(folder: Path) -> list[set[str]]:
    """Ids in the log of each worker."""
    logs = [folder / f"requests-{number}.jsonl" for number in range(WORKERS)]
    return [{json.loads(line)["request_id"] for line in log.read_text().splitlines()} for log in logs]


async def test_a_killed_worker_takes_only_its_own_requests(free_port, tmp_path: Path):
    """Under load one of three workers is killed: the others serve on, it comes back, the limit holds at the engine,
    metrics and logs add up, SIGHUP reaches all of them, and SIGTERM cuts nothing."""
    engine = CountingEngine()
    runner = await listening(engine)
    teams = {"teams": {"demo": {"keys": [KEYS["demo"][1]]}}, "capacity": {"slots": SLOTS}}
    (tmp_path / "teams.yaml").write_text(json.dumps(teams))
    port = free_port()
    metrics_port = first_port()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        process = await stack.enter_async_context(gateway(tmp_path, engine, port, metrics_port))
        clients = Clients(port, 30)
        stack.push_async_callback(clients.end)
        await until(lambda: engine.done > 60 and all(logged(tmp_path)), what="each worker serves requests")
        assert SLOTS >= engine.most, "shares add up to the limit"
        before = pids(process)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: len(pids(process)) == WORKERS and pids(process) != before, what="it starts again")
        await serving(process, metrics_port + 1, tmp_path)
        done = engine.done
        await until(lambda: engine.done > done + 60, what="all serve again")
        failed = {name for name, status in clients.statuses.items() if status != 200}
        assert {"ServerDisconnectedError", "ClientOSError", "ClientConnectorError"} >= {
            clients.statuses[name] for name in failed
        }
        assert len(failed) <= 30
        assert not failed & (logged(tmp_path)[0] | logged(tmp_path)[2]), "no request of another worker has failed"

        (tmp_path / "teams.yaml").write_text(json.dumps(teams | {"capacity": {"slots": 2 * SLOTS}}))
        process.send_signal(signal.SIGHUP)
        await until(lambda: engine.most > SLOTS, what="every worker has read teams.yaml again")
        await clients.end()
        process.terminate()
        assert 0 == await asyncio.to_thread(process.wait, 60)
    ids = logged(tmp_path)
    assert sum(map(len, ids)) == len(set().union(*ids)), "each request is in one log"
    answered = {name for name, status in clients.statuses.items() if status == 200}
    lost = answered - set().union(*ids)
    assert len(lost) <= SLOTS, "only records of the last 50 ms of the killed worker are lost"
    assert "worker 1" in (tmp_path / "stderr").read_text()


async def test_a_stopped_gateway_cuts_no_request_and_its_workers_end(free_port, tmp_path: Path):
    """The kernel may give every connection to one worker, whose share of the slots is enough for all."""
    release, running = asyncio.Event(), 0

    async def hold(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal running
        running += 1
        await release.wait()
        return web.json_response(REPLY)

    engine = FakeEngine(answer=hold)
    runner = await listening(engine)
    (tmp_path / "teams.yaml").write_text(
        json.dumps({"teams": {"demo": {"keys": [KEYS["demo"][1]]}}, "capacity": {"slots": 6 * WORKERS}})
    )
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        process = await stack.enter_async_context(gateway(tmp_path, engine, port, first_port()))
        headers = {"Authorization": f"Bearer {KEYS['demo'][0]}"}
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))

        async def ask() -> int:
            async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=ASK) as answer:
                return answer.status

        asked = [asyncio.create_task(ask()) for _ in range(6)]
        await until(lambda: running == 6, what="all are at the engine")
        process.terminate()
        await until(lambda: refused(port), what="no worker accepts a connection")
        release.set()
        assert [200] * 6 == await asyncio.gather(*asked)
        assert 0 == await asyncio.to_thread(process.wait, 60)


async def test_what_cannot_start_ends_with_one_reason(free_port, tmp_path: Path):
    port = free_port()
    (tmp_path / "teams.yaml").write_text(json.dumps({"teams": {"demo": {"keys": [KEYS["demo"][1]]}}}))
    config = {"upstream": "http://127.0.0.1:1", "listen": f"127.0.0.1:{port}", "metrics_listen": "127.0.0.1:0"}

    def run(**changed: object) -> tuple[int, str]:
        (tmp_path / "gateway.yaml").write_text(json.dumps(config | changed))
        words = [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", str(tmp_path / "gateway.yaml")]
        done = subprocess.run([*words, "--workers", "2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    other = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    code, said = await asyncio.to_thread(run)
    assert (1, 1) == (code, said.count(f"listen: 127.0.0.1:{port} cannot be used"))
    other.close()
    code, said = await asyncio.to_thread(run, requests_log="/nowhere/requests.jsonl")
    assert 1 == code
    assert "cannot be written" in said
    assert "the gateway ends" in said
