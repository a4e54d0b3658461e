"""Reading of large and of dense bodies, and of a large teams.yaml, so that streams continue.

A body that is short, or has few pieces, is read on the event loop. A longer one with few pieces is read in a thread, in
calls that hold the interpreter lock for a millisecond a MiB. All others are read in a process of its own
(`module_command`): dense ones, huge ones, those that only Python's parser reads, and what is wrong with one. Thread and
process are shared by the teams in turn.

Invariant: what that process reads is what this one would have read; this one does where no process can be had."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from exporters import process
from stack.config import BadConfig
from stack.gateway import request_body as token_requests
from stack.gateway.bad_body import describe
from stack.gateway.body_forms import OTHER_BODY
from stack.gateway.policy import Policy
from stack.gateway.request_fields import begins_as_object, is_dense
from stack.gateway.routes import find
from stack.gateway.teams import load_policy
from stack.gateway.turns import Turns
from vllm_watch import module_command

# Of the worst bodies, reading takes 0.1 ms a KiB or 0.3 us a piece, and finding out that one is dense 5 us a KiB.
FREE_BYTES = 4 << 10
CHEAP_PIECES = 3_000  # the tools of an agent have some thousand
LARGE_BYTES = 64 << 10  # worth the change of threads, 0.1 ms
HUGE_BYTES = 1 << 20  # one call of the decoder takes 1 ms a MiB, and there are several
SHORT_BYTES = 1 << 10  # a value up to this is sent back as it is, a longer one by its place in the body
MOST_MISSES = 16  # values that are not in the body as they are (of a name given twice, or respelled); each costs a pass
PROCESS_S = 30.0  # for one body; the densest of 32 MiB takes 0.4 s
IDLE_S = 300.0  # without work the process ends, and its 45 MiB are free
NICE = 5  # streams go first where cores are few
COMMAND = module_command("stack.gateway.large_bodies")

T = TypeVar("T")

_log = logging.getLogger("gateway")


class LargeBodies:
    """One thread and one process, which start with their first work: two would hold twice the memory."""

    def __init__(self) -> None:
        self._in_thread = Turns("large-body")
        self._in_process = Turns("body-process")  # a thread that waits for the process
        self._process: _Process | None = None

    async def run(self, team: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns; for a body of more than LARGE_BYTES it runs in the thread."""
        return work(*arguments) if size <= LARGE_BYTES else await self._in_thread.run(team, work, *arguments)

    async def read(self, team: str, route: str, body: bytes) -> token_requests.TokenRequest:
        """Return what `request_body.read` makes of a body. Raises RequestEnd where too many bodies of its team wait."""
        if len(body) <= HUGE_BYTES:
            ask = await self.run(team, len(body), _read_if_cheap, route, body)
            if ask is not None:
                return ask
        return await self._in_process.run(team, self._read_apart, route, body)

    async def describe(self, team: str, body: bytes, content_type: str) -> str:
        """Return what is wrong with a body. Raises RequestEnd where too many bodies of its team wait."""
        if len(body) <= FREE_BYTES:
            return describe(body, content_type)
        return await self._in_process.run(team, self._describe_apart, body, content_type)

    async def policy(self, path: Path, text: str) -> Policy:
        """Return what `load_policy` makes of a file's text; in the thread of the process. Raises BadConfig."""
        return await self._in_process.run(None, self._policy_apart, path, text)

    def close(self) -> None:
        self._in_thread.close()
        self._in_process.close()
        if self._process is not None:
            self._process.kill()

    def _read_apart(self, route: str, body: bytes) -> token_requests.TokenRequest:
        answer = self._asked(_Work("read", route, len(body)), body)
        return (
            token_requests.read(route, body)
            if answer is None
            else _restored(msgspec.msgpack.decode(answer, type=_Read), body, route)
        )

    def _describe_apart(self, body: bytes, content_type: str) -> str:
        answer = self._asked(_Work("describe", content_type, len(body)), body)
        return describe(body, content_type) if answer is None else answer.decode()

    def _policy_apart(self, path: Path, text: str) -> Policy:
        data, answer = text.encode(), None
        if len(data) > LARGE_BYTES:  # a smaller one is sooner read than a process is started
            answer = self._asked(_Work("policy", str(path), len(data)), data)
        read = _read_policy(path, text) if answer is None else msgspec.msgpack.decode(answer, type=_ReadPolicy)
        if read.policy is None:
            raise BadConfig(read.mistake)
        return read.policy

    def _asked(self, work: _Work, body: bytes) -> bytes | None:
        """Return the process's answer, or None if there is none; one that ended since the last body is started anew."""
        if (kept := self._process) is not None:
            with contextlib.suppress(OSError):
                return self._answer(kept, work, body)
        try:
            return self._answer(_Process(), work, body)
        except OSError as error:
            _log.warning(
                "large bodies are read in the gateway's own process, where they delay streams: the process for them"
                " failed: %s",
                error,
            )
            return None

    def _answer(self, reader: _Process, work: _Work, body: bytes) -> bytes:
        """Return what this process answers, and keep the process. Raises OSError for one that does not; it is gone
        then."""
        self._process = reader
        try:
            return reader.ask(work, body)
        except OSError:
            self._process = None
            reader.kill()
            raise


class _Work(msgspec.Struct, frozen=True, array_like=True):
    """Work on the `size` bytes that follow. argument: the route, the content type, or the path of teams.yaml."""

    what: str
    argument: str
    size: int


class _Read(msgspec.Struct, frozen=True, array_like=True):
    """An Ask without its body. known: its other attributes. fields: name and value, or the value's place in the
    body."""

    known: dict[str, str | int | bool | list[str] | None]
    fields: list[tuple[str, bytes | tuple[int, int]]]


class _ReadPolicy(msgspec.Struct, frozen=True):
    """A policy, or the mistake in its file."""

    policy: Policy | None = None
    mistake: str = ""


def _read_policy(path: Path, text: str) -> _ReadPolicy:
    try:
        return _ReadPolicy(load_policy(path, text))
    except BadConfig as error:
        return _ReadPolicy(mistake=str(error))


def _read_if_cheap(route: str, body: bytes) -> token_requests.TokenRequest | None:
    """Return the request in a body; None for one that is dense, or not JSON as a strict decoder reads it."""
    if len(body) <= FREE_BYTES:
        return token_requests.read(route, body)
    if begins_as_object(body) and is_dense(body, CHEAP_PIECES):
        return None
    ask = token_requests.read(route, body, False)
    return ask if ask.stream is not None or ask.media else None


def _taken_apart(ask: token_requests.TokenRequest, body: bytes) -> _Read:
    fields: list[tuple[str, bytes | tuple[int, int]]] = []
    start = misses = 0
    for name, raw in ask.fields.items():
        value = bytes(raw)
        # behind the one before, so that all of them are found in one pass; else as bytes
        place = -1 if len(value) <= SHORT_BYTES or misses > MOST_MISSES else body.find(value, start)
        misses += place < 0 and len(value) > SHORT_BYTES
        start = max(start, place + len(value)) if place >= 0 else start
        fields.append((name, value if place < 0 else (place, start)))
    return _Read(
        {name: value for name, value in msgspec.structs.asdict(ask).items() if name not in ("body", "fields", "form")},
        fields,
    )


def _restored(read: _Read, body: bytes, route: str) -> token_requests.TokenRequest:
    """Return the Ask; the values of its fields are views of the body."""
    whole = memoryview(body)
    fields = {name: msgspec.Raw(whole[at[0] : at[1]] if isinstance(at, tuple) else at) for name, at in read.fields}
    known: dict[str, Any] = {**read.known, "added": tuple(cast("list[str]", read.known["added"]))}
    form = find(route).body if fields else None  # of an unreadable body nothing is known
    return token_requests.TokenRequest(body=body, fields=fields, form=form or OTHER_BODY, **known)


class _Process:
    """The process in which bodies are read. It ends with the connection to it. Every call may raise OSError."""

    def __init__(self) -> None:
        self._wire, far = socket.socketpair()
        with far:
            self._wire.settimeout(PROCESS_S)
            none = subprocess.DEVNULL
            try:
                self._program = subprocess.Popen(
                    COMMAND, stdin=far.fileno(), stdout=none, stderr=none, start_new_session=True
                )
            except OSError:
                self._wire.close()
                raise

    def ask(self, work: _Work, body: bytes) -> bytes:
        _send(self._wire, msgspec.msgpack.encode(work))
        self._wire.sendall(body)
        return _received(self._wire)

    def kill(self) -> None:
        self._wire.close()
        self._program.kill()
        self._program.wait()


def _send(wire: socket.socket, data: bytes) -> None:
    wire.sendall(len(data).to_bytes(4, "big") + data)


def _received(wire: socket.socket) -> bytes:
    return bytes(_exactly(wire, int.from_bytes(_exactly(wire, 4), "big")))


def _exactly(wire: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        more = wire.recv_into(view[got:])
        if not more:
            raise ConnectionResetError("it ended")
        got += more
    return data


def serve(wire: socket.socket) -> None:
    """Answer one body after the other until the other side closes, or sends none for IDLE_S."""
    with contextlib.suppress(OSError):
        while True:
            wire.settimeout(IDLE_S)
            work = msgspec.msgpack.decode(_received(wire), type=_Work)
            wire.settimeout(PROCESS_S)
            body = bytes(_exactly(wire, work.size))
            if work.what == "read":
                answer = msgspec.msgpack.encode(_taken_apart(token_requests.read(work.argument, body), body))
            elif work.what == "describe":
                answer = describe(body, work.argument).encode()
            else:
                answer = msgspec.msgpack.encode(_read_policy(Path(work.argument), body.decode()))
            del body
            _send(wire, answer)
            process.trim()


if __name__ == "__main__":
    os.nice(NICE)
    serve(socket.socket(fileno=0))
