"""Printed HAProxy configuration in a real HAProxy: what it takes, where requests go, and what a drained, refused or
missing gateway does to clients."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stack.config import BadConfig
from stack.deploy.haproxy import LoadBalancer, configuration
from tests.support.authority import Authority
from tests.support.wait import until

ROOT = Path(__file__).parents[3]
FALL = 2  # failed checks until a gateway gets no requests, as the configuration says


@dataclass
class FakeGateway:
    """Answers with its name, and its readiness as a test says. Holds a request while `hold` is cleared."""

    name: str
    port: int = 0
    ready: bool = True
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    gone: int = 0
    checks: int = 0
    held: int = 0
    runner: web.ServerRunner | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/-/ready":
            self.checks += 1
            return web.Response(status=200 if self.ready else 503)
        self.held += 1
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.gone += 1
            raise
        return web.Response(text=self.name)

    async def start(self) -> None:
        self.hold.set()
        self.runner = web.ServerRunner(web.Server(self.handle, handler_cancellation=True), shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        assert self.runner is not None
        await self.runner.cleanup()


def started(program: Path, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "haproxy.log").open("wb") as log:
        return subprocess.Popen([program, "-f", folder / "haproxy.cfg", "-db"], stdout=log, stderr=log)


@contextlib.asynccontextmanager
async def haproxy(program: Path, folder: Path, balancer: LoadBalancer) -> AsyncIterator[str]:
    """A running HAProxy; its URL. It answers as soon as it has checked every gateway once."""
    (folder / "haproxy.cfg").write_text(configuration(balancer))
    process = started(program, folder)
    url = f"http://{balancer.listen}"
    try:
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                if process.poll() is not None:
                    pytest.fail((folder / "haproxy.log").read_text())
                async with session.get(url):
                    return True

            await until(answers, "HAProxy answers")
        yield url
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def fleet(part: Callable, free_port: Callable[[], int], folder: Path, **options: Any) -> AsyncIterator[Any]:
    """Three fake gateways behind a real HAProxy, and a session for its clients."""
    gateways = [FakeGateway(f"g{number}") for number in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for gateway in gateways:
            await gateway.start()
            stack.push_async_callback(gateway.stop)
        addresses = [f"127.0.0.1:{gateway.port}" for gateway in gateways]
        balancer = LoadBalancer(gateways=addresses, listen=f"127.0.0.1:{free_port()}", **options)
        url = await stack.enter_async_context(haproxy(part("haproxy").path, folder, balancer))
        yield gateways, url, await stack.enter_async_context(aiohttp.ClientSession())


async def ask(session: aiohttp.ClientSession, url: str, key: str = "") -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with session.post(f"{url}/v1/completions", data=b"x" * 1000, headers=headers) as answer:
        assert 200 == answer.status
        return await answer.text()


def test_haproxy_takes_every_option(part, tmp_path: Path):
    authority, pem = Authority(tmp_path), tmp_path / "site.pem"
    pair = authority.pair("site")
    pem.write_text(pair.cert.read_text() + pair.key.read_text())
    for number, balancer in enumerate(
        (
            LoadBalancer(gateways=["127.0.0.1:1", "[::1]:2"]),
            LoadBalancer(gateways=["gateway-0:8000", "gateway-1.example:8000"], by_team=True),
            LoadBalancer(
                gateways=["127.0.0.1:1"], certificate=str(pem), ca_file=str(authority.ca),
                metrics_listen="127.0.0.1:8405",
            ),
        )
    ):  # fmt: skip
        file = tmp_path / f"{number}.cfg"
        file.write_text(configuration(balancer))
        done = subprocess.run([part("haproxy").path, "-c", "-f", file], capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr
        assert "WARNING" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gateways": []}, "no gateway "),
        ({"gateways": ["a:1", "a:1"]}, "a:1 is named twice"),
        ({"gateways": ["a:1\n    server x y:1"]}, "is no address"),
        ({"gateways": ["a:70000"]}, "is no address"),
        ({"gateways": ["a:1"], "ca_file": "ca.pem verify none"}, "use another path"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], said: str):
    with pytest.raises(BadConfig, match=said):
        LoadBalancer(**options)


async def test_the_gateway_with_the_fewest_connections_is_next(part, free_port, tmp_path: Path):
    async with fleet(part, free_port, tmp_path) as (gateways, url, session):
        before = [gateway.held for gateway in gateways]
        for gateway in gateways:
            gateway.hold.clear()

        def new() -> list[int]:
            return [gateway.held - held for gateway, held in zip(gateways, before, strict=True)]

        held = []
        for number in range(1, 4):  # one after the other: its threads may choose at the same moment
            held.append(asyncio.create_task(ask(session, url)))
            await until(lambda number=number: sum(new()) == number, "a gateway has the request")
        assert [1, 1, 1] == new()
        gateways[2].hold.set()
        done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        assert ["g2"] == [task.result() for task in done]
        assert ["g2"] * 5 == [await ask(session, url) for _ in range(5)]
        for gateway in gateways:
            gateway.hold.set()
        await asyncio.gather(*held)


async def test_requests_of_a_key_stay_together_and_move_alone(part, free_port, tmp_path: Path):
    async with fleet(part, free_port, tmp_path, by_team=True) as (gateways, url, session):
        keys = [f"vw_team{number}_secret" for number in range(20)]
        before = {key: await ask(session, url, key) for key in keys}
        assert before == {key: await ask(session, url, key) for key in keys}
        assert 3 == len(set(before.values()))
        await gateways[0].stop()
        after = {key: await ask(session, url, key) for key in keys}
        stayed = {key for key, name in before.items() if name != "g0"}
        assert {key: before[key] for key in stayed} == {key: after[key] for key in stayed}
        assert "g0" not in after.values()


async def test_a_drained_and_a_refused_gateway_cost_no_request(part, free_port, tmp_path: Path):
    async with fleet(part, free_port, tmp_path) as (gateways, url, session):
        gateways[0].ready = False
        last = gateways[0].checks + FALL + 2  # the last one that counts has been answered before
        await until(lambda: gateways[0].checks >= last, "HAProxy has seen as many failed checks as it wants")
        answers = Counter([await ask(session, url) for _ in range(30)])
        assert {"g1", "g2"} == set(answers), "a gateway that is not ready gets no new requests"
        await gateways[1].stop()
        assert {"g2": 30} == Counter([await ask(session, url) for _ in range(30)]), "refused connections go elsewhere"
        gateways[0].ready = True

        async def back() -> bool:
            return await ask(session, url) == "g0"

        await until(back, "it gets requests again")


async def test_a_client_that_leaves_is_noticed_by_the_gateway(part, free_port, tmp_path: Path):
    async with fleet(part, free_port, tmp_path) as (gateways, url, session):
        for gateway in gateways:
            gateway.hold.clear()
        before = sum(gateway.held for gateway in gateways)
        client = asyncio.create_task(ask(session, url))
        await until(lambda: sum(gateway.held for gateway in gateways) > before, "a gateway has the request")
        client.cancel()
        await until(lambda: any(gateway.gone for gateway in gateways), "the gateway sees the client disconnect")


async def test_without_a_gateway_clients_get_an_error_to_retry(part, free_port, tmp_path: Path):
    balancer = LoadBalancer(gateways=[f"127.0.0.1:{free_port()}"], listen=f"127.0.0.1:{free_port()}")
    async with (
        haproxy(part("haproxy").path, tmp_path, balancer) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", data=b"{}") as answer,
    ):
        assert (503, "2") == (answer.status, answer.headers["Retry-After"])
        assert "no_gateway" == (await answer.json())["error"]["code"]


def test_the_command_prints_the_configuration():
    words = ["gateway", "haproxy", "10.0.0.5:8000", "10.0.0.6:8000", "--listen", "0.0.0.0:8000", "--by-team"]
    done = subprocess.run(
        [sys.executable, "-m", "stack.cli", *words], capture_output=True, text=True, check=True, cwd=ROOT
    )
    balancer = LoadBalancer(gateways=["10.0.0.5:8000", "10.0.0.6:8000"], listen="0.0.0.0:8000", by_team=True)
    assert configuration(balancer) == done.stdout
