"""Gateway processes that share limits through a real store, before an engine that counts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from stack.gateway.config import Timeouts
from stack.gateway.lease_client import LeaseClient, LeaseStore
from stack.gateway.sharing import Sharing
from tests.support.counting_engine import HOLD_S, CountingEngine
from tests.support.gateway_scene import ASK, CHAT, KEYS, FakeEngine, gateway, listening
from tests.support.lease_store import connected, http_server, real_store
from tests.support.wait import until

ROOT = Path(__file__).parents[3]
SLOTS = 12
OUTAGE_S = float(os.environ.get("VLLM_WATCH_OUTAGE_S", "1"))


@contextlib.asynccontextmanager
async def gateway_process(
    folder: Path, engine: FakeEngine, store_url: str, index: int, port: int, metrics_port: int, replicas: int = 3
) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = started(folder, engine, store_url, index, port, metrics_port, replicas)
    try:
        async with aiohttp.ClientSession() as session:

            async def healthy() -> bool:
                if process.poll() is not None:
                    pytest.fail((folder / "stderr").read_text())
                async with session.get(f"http://127.0.0.1:{metrics_port}/-/healthy") as answer:
                    return answer.status == 200

            await until(healthy, "the gateway serves")
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
    """Clients of all gateways that ask again and again, each until it gets no answer; statuses by port."""

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
                    return

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Relay:
    """A relay between one gateway and the store. cut: it holds back everything, on open and on new connections."""

    def __init__(self, port: int, store_port: int) -> None:
        self.url, self._port, self._store_port = f"redis://127.0.0.1:{port}", port, store_port
        self._open = asyncio.Event()
        self._open.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", self._port) as server:
            yield self
            server.close()

    def cut(self, yes: bool) -> None:
        self._open.clear() if yes else self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_store, to_store = await asyncio.open_connection("127.0.0.1", self._store_port)
            with contextlib.closing(to_store):
                await asyncio.wait(
                    [asyncio.create_task(self._pass(*ends)) for ends in ((reader, to_store), (from_store, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)


def write_teams(folder: Path, slots: int) -> None:
    teams = {team: {"keys": [hashed], "cache_domain": "shared"} for team, (_, hashed) in KEYS.items()}
    (folder / "teams.yaml").write_text(json.dumps({"teams": teams, "capacity": {"slots": slots}}))


@dataclass
class Fleet:
    """Three gateways before one counting engine. ports: of requests and of metrics."""

    engine: CountingEngine
    processes: list[subprocess.Popen[bytes]]
    ports: list[tuple[int, int]]
    flood: Flood

    async def until_metrics(self, name: str, values: dict[int, float]) -> None:
        """Return once a metric has these values, by the number of the gateway."""

        async def equal() -> bool:
            return values == {number: await metric(self.ports[number][1], name) for number in values}

        await until(equal, f"{name} is {values}")

    async def turnover(self, rounds: int) -> None:
        """Return after so many rounds, each of as many answers as there are slots."""
        done = self.engine.done
        await until(lambda: self.engine.done >= done + rounds * SLOTS, f"{rounds} rounds of requests")

    async def most(self, rounds: int = 4) -> int:
        """Return the most requests that are at the engine at once, over so many rounds."""
        self.engine.most = self.engine.running
        await self.turnover(rounds)
        return self.engine.most

    async def most_when_full(self, slots: int = SLOTS, rounds: int = 4) -> int:
        """Wait until all slots are in use, which takes a few renewals after the leases have changed, then for so many
        rounds; return the most requests that were at the engine at once since the call."""
        self.engine.most = self.engine.running
        await until(lambda: self.engine.running == slots, f"all {slots} slots are in use")
        await self.turnover(rounds)
        return self.engine.most


@contextlib.asynccontextmanager
async def flooded_fleet(folder: Path, store_urls: list[str], free_port: Callable[[], int]) -> AsyncIterator[Fleet]:
    engine = CountingEngine()
    runner = await listening(engine)
    write_teams(folder, SLOTS)
    ports = [(free_port(), free_port()) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        processes = [
            await stack.enter_async_context(gateway_process(folder / f"gw-{n}", engine, store_urls[n], n, *ports[n]))
            for n in range(3)
        ]
        # one gateway alone may use every slot
        flood = Flood([ports[0][0]], 20)
        await until(lambda: engine.running == SLOTS, "all slots are in use at one gateway")
        await flood.end()
        await until(lambda: not engine.running, "nothing runs")
        flood = Flood([port for port, _ in ports], 12)
        stack.push_async_callback(flood.end)
        fleet = Fleet(engine, processes, ports, flood)
        await fleet.until_metrics("lease_replicas", dict.fromkeys(range(3), 3.0))
        assert SLOTS == await fleet.most_when_full()
        await until(lambda: all(len(each) > 8 for each in flood.statuses.values()), "each gateway has its part")
        yield fleet


async def test_three_gateways_hold_the_limit_through_faults(part, free_port, tmp_path: Path):
    """A flood, kill -9 of one gateway, a stopped store, and one that comes back empty: the engine never has more than
    the slots and the requests of the lapsed leases, and nobody gets an error but the clients of the killed one."""
    store_port, valkey = free_port(), part("valkey").path
    with contextlib.ExitStack() as store:
        url = store.enter_context(real_store(valkey, store_port, tmp_path)).url
        async with flooded_fleet(tmp_path, [url] * 3, free_port) as fleet:
            fleet.engine.most = 0
            fleet.processes[2].send_signal(signal.SIGKILL)
            await fleet.until_metrics("lease_replicas", {0: 2.0, 1: 2.0})
            assert SLOTS == max(fleet.engine.most, await fleet.most_when_full()), "the slots of the dead one are used"

            store.close()
            await fleet.until_metrics("lease_lost", {0: 1.0, 1: 1.0})
            await fleet.turnover(round(OUTAGE_S / HOLD_S))
            assert 2 * SLOTS // 3 == await fleet.most(), "the fixed shares of two of three gateways"

            fleet.engine.most = 0
            store.enter_context(real_store(valkey, store_port, tmp_path))
            await fleet.until_metrics("lease_lost", {0: 0.0, 1: 0.0})
            assert SLOTS == max(fleet.engine.most, await fleet.most_when_full())
            await fleet.flood.end()
            for port, _ in fleet.ports[:2]:
                assert {200} == set(fleet.flood.statuses[port])

            fleet.processes[0].terminate()
            assert 0 == await asyncio.to_thread(fleet.processes[0].wait, 60)
            await fleet.until_metrics("lease_replicas", {1: 1.0})


async def test_partition_pause_and_reload_hold_the_limit(part, free_port, tmp_path: Path):
    """One gateway is cut off from the store, then stands still beyond its lease; then all get fewer slots, and more,
    one after the other. The engine has no more than the slots, and the share of the one that is cut off."""
    store_port = free_port()
    with real_store(part("valkey").path, store_port, tmp_path):
        async with contextlib.AsyncExitStack() as stack:
            relays = [await stack.enter_async_context(Relay(free_port(), store_port).running()) for _ in range(3)]
            fleet = await stack.enter_async_context(flooded_fleet(tmp_path, [relay.url for relay in relays], free_port))
            all_of_them = dict.fromkeys(range(3), 3.0)
            fleet.engine.most = 0
            relays[1].cut(True)
            await fleet.until_metrics("lease_lost", {0: 0.0, 1: 1.0, 2: 0.0})
            await fleet.until_metrics("lease_replicas", {0: 2.0, 2: 2.0})
            await fleet.turnover(2)
            assert SLOTS <= fleet.engine.most <= SLOTS + SLOTS // 3
            relays[1].cut(False)
            await fleet.until_metrics("lease_lost", dict.fromkeys(range(3), 0.0))
            await fleet.until_metrics("lease_replicas", all_of_them)
            await fleet.turnover(2)  # what was admitted without a lease ends
            assert SLOTS == await fleet.most_when_full()

            fleet.engine.most = 0
            fleet.processes[1].send_signal(signal.SIGSTOP)
            await fleet.until_metrics("lease_replicas", {0: 2.0, 2: 2.0})
            assert SLOTS == max(fleet.engine.most, await fleet.most_when_full()), "its slots are used by the others"
            fleet.engine.most = 0
            fleet.processes[1].send_signal(signal.SIGCONT)
            await fleet.until_metrics("lease_replicas", all_of_them)
            await fleet.turnover(1)
            # a request that was admitted just before the stop, and sent after it, is an orphan
            assert SLOTS + SLOTS // 3 >= fleet.engine.most
            assert SLOTS == await fleet.most_when_full(), "it does not use the lease that has lapsed"

            for slots, order in ((SLOTS // 2, (1, 0, 2)), (SLOTS, (2, 0, 1))):
                write_teams(tmp_path, slots)
                for number in order:
                    fleet.processes[number].send_signal(signal.SIGHUP)
                    assert SLOTS >= await fleet.most(1)
                await until(lambda slots=slots: fleet.engine.running == slots, f"all {slots} slots are in use")
                await fleet.turnover(2)
                assert slots == await fleet.most_when_full(slots, rounds=2)
            await fleet.flood.end()
            for statuses in fleet.flood.statuses.values():
                assert {200, 429} >= set(statuses), "after the pause a wait may be estimated too long"


async def test_a_gateway_that_stops_before_it_joins_stays_unready(tmp_path: Path):
    """A load balancer would send requests until the drain, and see them refused."""
    held = list[asyncio.StreamWriter]()
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    store = LeaseStore(url=f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    sharing, timeouts = Sharing(replicas=3, index=0, name="gw-0", store=store), Timeouts(accept_grace_s=3600.0)
    async with gateway(tmp_path, sharing=sharing, timeouts=timeouts) as it:
        it.stop.set()
        try:
            await until(lambda: held, "it asks the store")
            silent.close()
            for each in held:
                each.close()

            async def lost() -> bool:
                return (await it.figures())[("vllm_watch_gateway_lease_lost",)] == 1.0

            await until(lost, "its fixed share holds")
            async with it.session.get(f"{it.started.url}/-/ready") as answer:
                assert (503, "stopping\n") == (answer.status, await answer.text())
        finally:
            it.serving.cancel()


MEANINGS = {
    "refused": f"no connection: {os.strerror(errno.ECONNREFUSED)}",
    "password": r".*; set sharing\.store\.password_file",
    "type": r".*vw:default:leases belongs to .*sharing\.store\.fleet",
    "full": ".*maxmemory",
    "read-only": ".*read-only replica",
    "cluster": ".*cluster is down",
    "http": ".*protocol of Valkey",
    "tls": "no answer .*1 s; .*redis:// or valkey://",
}
OPTIONS = {
    "password": ("--requirepass", "right"),
    "full": ("--maxmemory", "1"),
    "read-only": ("--replicaof", "127.0.0.1", "1"),
    "cluster": ("--cluster-enabled", "yes"),
}


@pytest.mark.parametrize("fault", MEANINGS)
async def test_a_store_that_fails_leaves_the_fixed_share(
    part, free_port, tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch, fault: str
):
    """One sentence in the log, the metric of the alert, and requests go on. Every second fault is one of Redis."""
    if fault != "tls":  # nothing but this one is told by the time that it takes
        monkeypatch.setattr(LeaseClient.__init__, "__defaults__", (30.0,))
    port = free_port()
    url = f"{'rediss' if fault == 'tls' else 'redis'}://127.0.0.1:{port}"
    program = part("redis" if list(MEANINGS).index(fault) % 2 else "valkey").path
    async with contextlib.AsyncExitStack() as stack:
        if fault == "http":
            await stack.enter_async_context(http_server(port))
        elif fault != "refused":
            options = OPTIONS.get(fault, ()) + (("--cluster-port", str(free_port())) if fault == "cluster" else ())
            stack.enter_context(real_store(program, port, tmp_path, *options))
            password = "right" if fault == "password" else None
            async with connected(LeaseStore(url=f"redis://127.0.0.1:{port}"), password) as client:
                if fault == "type":
                    await client._call(b"SET", b"vw:default:leases", b"x")
        sharing = Sharing(replicas=3, index=0, name="gw-0", store=LeaseStore(url=url))
        it = await stack.enter_async_context(gateway(tmp_path, sharing=sharing))
        async with it.post(ASK) as answer:
            assert 200 == answer.status
        assert 1.0 == (await it.figures())[("vllm_watch_gateway_lease_lost",)]
    said = [
        record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("gateway", "WARNING")
    ]
    (warning,) = said
    assert re.fullmatch(f"no lease from {url}, .*fixed share .*: {MEANINGS[fault]}.*", warning)
