"""Leases in a real Valkey and a real redis-server: the script equals the pure transition, and what a store that fails
is called."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stack.config import BadConfig, parse
from stack.deploy import certificates
from stack.gateway.config import GatewayConfig
from stack.gateway.lease_client import RIGHTS, SCRIPT, LeaseClient, LeaseStore, StoreLost
from stack.gateway.lease_store import LeaseReply, LeaseRequest, LeaseTable, LimitClaim, TeamClaim, transition
from tests.support.lease_store import connected, http_server, real_store
from tests.support.wait import until

HISTORIES = int(os.environ.get("VLLM_WATCH_HISTORIES", "300"))
KEY = b"vw:default:leases"


@pytest.fixture(params=["valkey", "redis"])
def program(request: pytest.FixtureRequest, part: Callable) -> Path:
    return part(request.param).path


def a_request(draw: random.Random, run: str, sent: dict[str, tuple[int, int]]) -> LeaseRequest:
    """Some request of one of three replicas; mostly the next of its sequence and with its epoch."""
    name = draw.choice(("a", "b", "c"))
    sequence, epoch = sent.get(name, (0, 0))

    def claim(limit: int) -> LimitClaim:
        use = draw.randint(0, limit)
        return LimitClaim(
            use, use + draw.choice((0, 0, 1, 5)), use + draw.choice((0, 1, 7, 30)), limit,
            draw.choice((0, 0, 0, 3, limit)), draw.choice((0, 0, 1, 2)),
        )  # fmt: skip

    teams = [
        TeamClaim(
            team, rank, band, weight, draw.randint(0, 5000), draw.randint(0, 500), draw.randint(0, 30),
            draw.choice((0, 0, 3, 40)), draw.choice((0, 0, 70, 900)),
        )
        for team, rank, band, weight in (
            ("x", 0, "top", 1.0), ("y", 1, "low", 2.5), ("z", 1, "low", 0.3), ("w", 1, "else", 1.0)
        )
        if draw.random() < 0.7
    ]  # fmt: skip
    claims = {"s": claim(draw.choice((8, 20))), "q": claim(draw.choice((2, 50)))}
    optional = {"t": (1000,), "k": (2000, 10), "o:low": (2, 5), "c:low": (6, 15), "c:top": (1,)}
    optional |= {f"{kind}{team.name}": (3, 9, 40) for team in teams for kind in ("r:", "f:")}
    claims |= {key: claim(draw.choice(limits)) for key, limits in optional.items() if draw.random() < 0.6}
    request = LeaseRequest(
        name=name, incarnation=draw.choice(("i", "i", "i", "i", "j")), sequence=sequence + draw.choice((0, 1, 1, 1, 1)),
        epoch=epoch, run=run if draw.random() < 0.97 else "other", ttl_ms=2000, linger_ms=draw.choice((0, 0, 3000)),
        policy=draw.choice(("p", "p", "q")), claims=claims, teams=teams, bye=draw.random() < 0.03,
    )  # fmt: skip
    sent[name] = (request.sequence, epoch)
    return request


async def test_the_script_equals_the_pure_transition(program: Path, free_port, tmp_path: Path):
    """Random histories, request by request: the same answers, numbers and refusals."""
    with real_store(program, free_port(), tmp_path) as store:
        async with connected(LeaseStore(url=store.url)) as client:
            for history in range(-(-HISTORIES // 10)):
                draw, table, sent = random.Random(history), LeaseTable(), {}
                await client._call(b"DEL", KEY)
                now = 1_700_000_000_000
                for step in range(30):
                    now += draw.choice((50, 200, 200, 400, 700, 2500, -300))
                    request = a_request(draw, client.run, sent)
                    expected = transition(table, request, now)
                    body = msgspec.msgpack.encode(request)
                    raw = await client._call(b"EVAL", SCRIPT, b"1", KEY, body, str(now).encode())
                    assert isinstance(raw, bytes)
                    answer = msgspec.msgpack.decode(raw, type=LeaseReply)
                    assert expected == answer, f"history {history}, step {step}: {request}"
                    if answer.state == "ok":
                        sent[request.name] = (request.sequence, answer.epoch)


async def test_the_store_holds_no_more_than_live_replicas(program: Path, free_port, tmp_path: Path):
    """Of 200 replicas that ask once and vanish, those of the last seconds are left; the key ends by itself."""
    with real_store(program, free_port(), tmp_path) as store:
        async with connected(LeaseStore(url=store.url)) as client:
            now = 1_700_000_000_000
            for number in range(200):
                now += 400
                request = a_request(random.Random(number), client.run, {})
                request = msgspec.structs.replace(request, name=f"r{number}", linger_ms=0, bye=False, run=client.run)
                body = msgspec.msgpack.encode(request)
                await client._call(b"EVAL", SCRIPT, b"1", KEY, body, str(now).encode())
            fields = await client._call(b"HLEN", KEY)
            assert isinstance(fields, bytes)
            assert int(fields) <= 1 + 4 + 7, "meta, four teams, and replicas of two seconds"
            left = await client._call(b"PTTL", KEY)
            assert isinstance(left, bytes)
            assert 0 < int(left) <= 86_400_000


async def _lost(store: LeaseStore, password: str | None = None, call_s: float = 5.0) -> str:
    async def ask() -> None:
        async with connected(store, password, call_s) as client:
            await client.renew(a_request(random.Random(1), client.run, {}))

    with pytest.raises(StoreLost) as lost:
        await ask()
    return str(lost.value)


async def test_a_store_that_fails_is_named(program: Path, free_port, tmp_path: Path):
    """Wrong password, foreign key, full store, read-only replica, no such database: one sentence with the fix."""
    with real_store(program, free_port(), tmp_path, "--requirepass", "right") as store:
        url = LeaseStore(url=store.url)
        assert "correct sharing.store.password_file" in await _lost(url, "wrong")
        assert (await _lost(url)).endswith("; set sharing.store.password_file")
        assert "no such database" in await _lost(LeaseStore(url=f"{store.url}/99"), "right")
        async with connected(url, "right") as client:
            await client._call(b"SET", KEY, b"x")
            assert "vw:default:leases belongs to" in await _lost(url, "right")
            await client._call(b"DEL", KEY)
            await client._call(b"HSET", KEY, b"!", b"not ours")
            assert "vw:default:leases holds no" in await _lost(url, "right")
            await client._call(b"DEL", KEY)
            await client._call(b"ACL", b"SETUSER", b"gw", b"on", b">secret", b"~vw:*", b"+info")
            assert RIGHTS in await _lost(LeaseStore(url=store.url, user="gw", password_file="x"), "secret")
            await client._call(b"ACL", b"SETUSER", b"gw", *RIGHTS.encode().split())
            async with connected(LeaseStore(url=store.url, user="gw", password_file="x"), "secret") as limited:
                assert "ok" == (await limited.renew(a_request(random.Random(2), limited.run, {}))).state
            await client._call(b"CONFIG", b"SET", b"maxmemory", b"1")
            assert "maxmemory" in await _lost(url, "right")
            await client._call(b"CONFIG", b"SET", b"maxmemory", b"0")
            await client._call(b"REPLICAOF", b"127.0.0.1", str(free_port()).encode())
            await client._call(b"SCRIPT", b"FLUSH")
            assert "read-only replica" in await _lost(url, "right")
    assert "no connection" in str(await _refused(free_port()))


async def _refused(port: int) -> StoreLost:
    client = LeaseClient(LeaseStore(url=f"redis://127.0.0.1:{port}"), None, lambda: None)
    with pytest.raises(StoreLost) as lost:
        await client.connect()
    return lost.value


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1, its authority, and another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    now = datetime.now(UTC)
    signer, other = certificates.authority(now), certificates.authority(now)
    pair = certificates.leaf(signer, ("127.0.0.1",), now)
    for name, text in (("ca", signer.certificate), ("other", other.certificate), ("cert", pair.certificate)):
        (folder / f"{name}.pem").write_text(text)
    (folder / "key.pem").write_text(pair.key)
    return folder


async def test_a_store_with_tls(program: Path, free_port, certified: Path, tmp_path: Path):
    """TLS, a password in a file, a user of an ACL and a database: right, and each of them wrong."""
    port, plain = free_port(), free_port()
    options = [f"--tls-{name}-file={certified / file}" for name, file in
               (("cert", "cert.pem"), ("key", "key.pem"), ("ca-cert", "ca.pem"))]  # fmt: skip
    words = [word for option in options for word in option.split("=", 1)]
    words += ["--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "root"]
    for user in (f"gateway on >secret ~vw:* {RIGHTS} +select", f"few on >secret ~vw:* {RIGHTS}"):
        words += ["--user", *user.split()]
    ca = str(certified / "ca.pem")
    right = LeaseStore(url=f"rediss://127.0.0.1:{port}/3", user="gateway", password_file="x", ca_file=ca)
    replace = msgspec.structs.replace
    with real_store(program, plain, tmp_path, *words):
        async with connected(right, "secret") as client:
            assert "ok" == (await client.renew(a_request(random.Random(2), client.run, {}))).state
        async with connected(replace(right, user=None), "root") as client:
            assert b"1" == await client._call(b"EXISTS", KEY)
            await client._call(b"SELECT", b"0")
            assert b"0" == await client._call(b"EXISTS", KEY)
        wrong = {
            "not accepted": replace(right, ca_file=str(certified / "other.pem")),
            "valid for 'localhost'": replace(right, url=f"rediss://localhost:{port}/3"),
            "rediss:// or valkeys://": replace(right, url=f"redis://127.0.0.1:{port}/3"),
            "no such database": replace(right, url=f"rediss://127.0.0.1:{port}/99"),
            "correct sharing.store.password_file": replace(right, user="gatewax"),
        }
        for says, store in wrong.items():
            assert says.lower() in (await _lost(store, "secret")).lower()
        without = replace(right, url=f"rediss://127.0.0.1:{plain}/3")
        assert re.match(r"no answer .*\b0\.5 s; .*\bredis:// ", await _lost(without, "secret", 0.5))
        assert "user is wrong" in await _lost(right, "secrets")
        assert f"grant {RIGHTS} +select ~vw:*" in await _lost(replace(right, user="few"), "secret")
        assert "; set sharing.store.password_file" in await _lost(right)


@contextlib.asynccontextmanager
async def silent_server(port: int) -> AsyncIterator[None]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


async def test_what_is_no_store_is_named(free_port):
    """An HTTP server, a server that says nothing, and a host that does not exist."""
    port = free_port()
    async with http_server(port):
        assert "protocol of Valkey" in str(await _refused(port))
    port = free_port()
    async with silent_server(port):
        client = LeaseClient(LeaseStore(url=f"redis://127.0.0.1:{port}"), None, lambda: None, call_s=0.2)
        with pytest.raises(StoreLost, match=r"no answer within 0\.2 s"):
            await client.connect()
    client = LeaseClient(LeaseStore(url=f"redis://localhost:{free_port()}"), None, lambda: None)
    with pytest.raises(StoreLost, match=r"^no connection: .*refused"):
        await client.connect()
    client = LeaseClient(LeaseStore(url="redis://no-such-host.invalid"), None, lambda: None)
    with pytest.raises(StoreLost, match=r"^no (connection: [A-Z][a-z ]+|answer within 1 s)$"):
        await client.connect()


async def test_a_cluster_is_named(program: Path, free_port, tmp_path: Path):
    """The key is on another node, or on none."""
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as servers:
        for port in ports:
            (tmp_path / str(port)).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "500")
            servers.enter_context(real_store(program, port, tmp_path / str(port), *options))
        stores = [LeaseStore(url=f"redis://127.0.0.1:{port}") for port in ports]
        async with connected(stores[0]) as first, connected(stores[1]) as second:
            assert "cluster is down" in await _lost(stores[0])
            slot = await first._call(b"CLUSTER", b"KEYSLOT", KEY)
            assert isinstance(slot, bytes)
            await second._call(b"CLUSTER", b"ADDSLOTS", slot)
            others = [b"%d" % number for number in range(16384) if number != int(slot)]
            await first._call(b"CLUSTER", b"ADDSLOTS", *others)
            bus = next(word for word in _words(await second._call(b"CLUSTER", b"NODES")) if "@" in word)
            await first._call(
                b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % ports[1], bus.split("@")[1].split(",")[0].encode()
            )

            async def named() -> bool:
                said = await _lost(stores[0])
                assert "another node" in said, said
                return True

            await until(named, "the store names the cluster")


def _words(value: object) -> list[str]:
    return value.decode().split() if isinstance(value, bytes) else []


async def test_a_primary_without_replicas_is_named(program: Path, free_port, tmp_path: Path):
    with real_store(program, free_port(), tmp_path, "--min-replicas-to-write", "1") as store:
        said = await _lost(LeaseStore(url=store.url))
        assert "(min-replicas-to-write)" in said


@pytest.mark.parametrize(
    ("store", "fault"),
    [
        ("{url: 'http://h:1'}", r"sharing\.store\.url: 'http://h:1' .*redis://127\.0\.0\.1:6379/0"),
        ("{url: 'redis://:secret@h:1'}", r"sharing\.store\.url .*user and password_file"),
        ("{url: 'redis://h:1/x'}", r"sharing\.store\.url: 'redis://h:1/x' "),
        ("{url: 'redis://h', user: a}", r"sharing\.store\.user .*password_file"),
        ("{url: 'redis://h', linger_s: -1}", r"sharing\.store\.linger_s .*0 to 86400, not -1"),
        ("{url: 'redis://h', fleet: 'a b'}", r"sharing\.store\.fleet: 'a b' .*- and _"),
    ],
)
def test_a_mistake_in_the_store_is_named(store: str, fault: str):
    with pytest.raises(BadConfig) as wrong:
        parse(f"sharing: {{replicas: 2, store: {store}}}", GatewayConfig, "gateway.yaml")
    assert re.search(fault, str(wrong.value))
    assert "secret" not in str(wrong.value)


async def test_a_name_without_an_answer_holds_up_one_thread_only(monkeypatch):
    """Calls that find the look-up still running wait for the same one."""
    asked, answer = [], threading.Event()

    def slow(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        answer.wait(10)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    client = LeaseClient(LeaseStore(url="redis://store.example:6379"), None, lambda: None, call_s=0.05)
    for _ in range(5):
        with pytest.raises(StoreLost, match="no answer within"):
            await client.connect()
    assert ["store.example"] == asked
    answer.set()
    patient = LeaseClient(LeaseStore(url="redis://store.example:6379"), None, lambda: None)
    with pytest.raises(StoreLost, match="no connection"):
        await patient.connect()
