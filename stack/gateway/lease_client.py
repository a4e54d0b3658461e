"""Connection to the Valkey or Redis that leases limits to gateway replicas.

The protocol (RESP2) is written here: four reply types and five commands take half the CPU of a client library, and one
rule that libraries broke matters most. Any failure, time limit or cancellation aborts the connection, so that no reply
is ever read as the answer to another command. One command runs at a time, with a time limit."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import ssl
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from exporters.net.http_client import client_ssl_context
from exporters.net.listener_auth import describe_tls_error
from stack.gateway.lease_store import LeaseReply, LeaseRequest
from stack.gateway.name_lookup import NameLookup

T = TypeVar("T")

CALL_S = 1.0  # for connection and reply together; a lease lasts longer
REPLY_BYTES = 1 << 20
DEFAULT_PORT = 6379
SCRIPT = files("stack.gateway").joinpath("lease.lua").read_bytes()
_SHA = hashlib.sha1(SCRIPT).hexdigest().encode()  # noqa: S324  # the server's name for a script
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
RIGHTS = "+eval +evalsha +info +time +hgetall +hset +hdel +pexpire"


class LeaseStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Valkey or Redis. url: redis:// or valkey://HOST:PORT/DATABASE, with TLS rediss:// or valkeys://.

    password_file: holds the password. user: of an ACL. ca_file: the authority that signed the server's certificate,
    where the system does not trust it. fleet: name of the gateways that share limits; its key is vw:FLEET:leases.
    linger_s: how long the slots of a gateway that has vanished stay reserved after its lease; see
    docs/guides/gateway.md."""

    url: str
    user: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    fleet: str = "default"
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuses values that cannot work; msgspec names the place."""
        if "@" in self.url:
            raise ValueError("sharing.store.url has a user or a password in it; use user and password_file")
        try:
            url = urlsplit(self.url)
            usable = url.scheme in _SCHEMES and url.hostname and url.port != 0 and not url.query and not url.fragment
        except ValueError:
            usable = None
        if not usable or not (url.path.strip("/") or "0").isdecimal():
            raise ValueError(f"sharing.store.url: {self.url!r} is no store; write it like redis://127.0.0.1:6379/0")
        if self.user is not None and self.password_file is None:
            raise ValueError("sharing.store.user needs a password_file")
        if not self.linger_s >= 0 or self.linger_s > 86_400:
            raise ValueError(f"sharing.store.linger_s should be 0 to 86400, not {self.linger_s:g}")
        if not self.fleet.isascii() or not self.fleet.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"sharing.store.fleet: {self.fleet!r} should be letters, digits, - and _")

    @property
    def address(self) -> tuple[str, int]:
        url = urlsplit(self.url)
        return url.hostname or "", url.port or DEFAULT_PORT

    @property
    def database(self) -> int:
        return int(urlsplit(self.url).path.strip("/") or "0")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings; None without TLS. Raises BadConfig."""
        if not _SCHEMES[urlsplit(self.url).scheme]:
            return None
        return client_ssl_context(None if self.ca_file is None else Path(self.ca_file), "sharing.store")


class StoreLost(Exception):
    """The store gave no lease; the message is for the operator."""


class _ErrorReply(Exception):
    """Error that the server answered."""


class LeaseClient:
    """Client of one store. run: run id of the server, read at each connect."""

    def __init__(
        self, store: LeaseStore, tls: ssl.SSLContext | None, password: Callable[[], str | None], call_s: float = CALL_S
    ) -> None:
        self._store, self._tls, self._password, self._call_s = store, tls, password, call_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lookup = NameLookup(store.address[0])
        self._key = f"vw:{store.fleet}:leases".encode()
        self.run = ""

    async def connect(self) -> None:
        """Open the connection, unless it is open. Raises StoreLost."""
        if self._streams is None:
            await self._limited(self._connect)

    async def renew(self, request: LeaseRequest) -> LeaseReply:
        """Send one request over the open connection. Raises StoreLost."""
        body = msgspec.msgpack.encode(request)

        async def call() -> LeaseReply:
            try:
                reply = await self._call(b"EVALSHA", _SHA, b"1", self._key, body)
            except _ErrorReply as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
                reply = await self._call(b"EVAL", SCRIPT, b"1", self._key, body)
            return msgspec.msgpack.decode(reply if isinstance(reply, bytes) else b"", type=LeaseReply)

        return await self._limited(call)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _limited(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run a call within its time limit; abort the connection unless it succeeds."""
        done = False
        try:
            async with asyncio.timeout(self._call_s):
                result = await call()
            done = True
        except TimeoutError:
            hint = "; a server without TLS needs redis:// or valkey://" if self._tls and not self.run else ""
            raise StoreLost(f"no answer within {self._call_s:g} s{hint}") from None
        except _ErrorReply as error:
            raise StoreLost(meaning_of(str(error), self._store)) from None
        except (OSError, EOFError, ValueError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StoreLost(_why(error, perhaps_tls=self._tls is None and not self.run)) from error
        finally:
            if not done:
                self.abort()
        return result

    async def _connect(self) -> None:
        host, port = self._store.address
        addresses = await self._lookup.addresses()
        for place, address in enumerate(addresses, 1):
            try:
                self._streams = await asyncio.open_connection(
                    address, port, ssl=self._tls, server_hostname=host if self._tls else None, limit=64 << 10
                )
                break
            except OSError:
                if place == len(addresses):
                    raise
        if (password := self._password()) is not None:
            names = (self._store.user.encode(),) if self._store.user else ()
            await self._call(b"AUTH", *names, password.encode())
        if self._store.database:
            await self._call(b"SELECT", str(self._store.database).encode())
        info = await self._call(b"INFO", b"server")
        run = next((line[7:] for line in _text(info).splitlines() if line.startswith("run_id:")), "")
        if not run:
            raise ValueError("it is no Valkey or Redis: INFO has no run_id")
        self.run = run

    async def _call(self, *words: bytes) -> object:
        """Send one command and read its reply. Raises _ErrorReply, OSError, EOFError and ValueError."""
        if self._streams is None:
            raise ConnectionError("the connection is closed")
        reader, writer = self._streams
        writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        await writer.drain()
        line = (await reader.readuntil(b"\r\n"))[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise _ErrorReply(rest.decode("utf-8", "replace"))
        if kind in b"+:" and kind:
            return rest
        if kind != b"$" or not rest.isdigit() or int(rest) > REPLY_BYTES:
            raise ValueError("it does not speak the protocol of Valkey and Redis")
        return (await reader.readexactly(int(rest) + 2))[:-2]


def meaning_of(error: str, store: LeaseStore) -> str:
    """Return what an error of the server means, and what to do, in one sentence. The server's text is shortened: it may
    repeat what was sent."""
    key, rights = f"vw:{store.fleet}:leases", RIGHTS + (" +select" if store.database else "")
    for sign, meaning in (
        ("WRONGPASS", "the password or the user is wrong; correct sharing.store.password_file"),
        ("NOAUTH", "it wants a password; set sharing.store.password_file"),
        ("called without any password configured", "it has no password; remove sharing.store.password_file"),
        ("NOPERM", f"the user may not run the script; grant {rights} ~vw:*"),
        ("ACL failure", f"the user may not run the script; grant {rights} ~vw:*"),
        ("WRONGTYPE", f"the key {key} belongs to another program; choose another sharing.store.fleet"),
        ("OOM", "its memory is full; give it more maxmemory, or an instance of its own"),
        ("READONLY", "it is a read-only replica; use the address of the primary"),
        ("NOREPLICAS", "too few replicas are connected to it (min-replicas-to-write)"),
        ("MOVED", "it is a cluster and the key is on another node; use a server that is no cluster"),
        ("CLUSTERDOWN", "its cluster is down; use a server that is no cluster"),
        ("DB index is out of range", "it has no such database; correct the number in sharing.store.url"),
        ("LOADING", "it is loading its data"),
        ("user_script", f"the key {key} holds no leases; choose another sharing.store.fleet"),
    ):
        if sign in error:
            return meaning
    return f"it answered {error.split(' ')[0][:40]!r}"


def _why(error: BaseException, *, perhaps_tls: bool) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
            return "it does not speak TLS at this port; write redis:// or valkey://, or correct the port"
        return f"TLS failed: {describe_tls_error(error)}"
    if isinstance(error, EOFError | ConnectionResetError):
        return "it closed the connection" + ("; a server with TLS needs rediss:// or valkeys://" if perhaps_tls else "")
    if isinstance(error, OSError):
        number = error.errno or next(map(int, re.findall(r"\[Errno (\d+)\]", str(error))), 0)  # of several addresses
        return f"no connection: {os.strerror(number) if number > 0 else error.strerror or error}"
    if isinstance(error, msgspec.MsgspecError):
        return "its answer is no lease"
    return str(error)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
