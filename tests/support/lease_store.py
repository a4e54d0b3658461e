"""A real Valkey or Redis for shared admission."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from stack.gateway.lease_client import LeaseClient, LeaseStore, StoreLost
from tests.support.wait import until


@dataclass
class RealStore:
    """A server on loopback without a disk."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@contextlib.contextmanager
def real_store(program: Path, port: int, folder: Path, *options: str) -> Iterator[RealStore]:
    words = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with (folder / "store.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        yield RealStore(port, process)
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def connected(store: LeaseStore, password: str | None = None, call_s: float = 5.0) -> AsyncIterator[LeaseClient]:
    """A client, as soon as the server answers."""
    client = LeaseClient(store, store.tls(), lambda: password, call_s=call_s)

    async def connects() -> bool:
        try:
            await client.connect()
        except StoreLost as error:
            if "Connection refused" in str(error) or "loading" in str(error):
                return False
            raise
        return True

    try:
        await until(connects, "the store answers")
        yield client
    finally:
        client.abort()


@contextlib.asynccontextmanager
async def http_server(port: int) -> AsyncIterator[None]:
    runner = web.ServerRunner(web.Server(lambda _: web.Response()))  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()
