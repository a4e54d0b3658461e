"""Wait of one team's stream beside what another team, or nobody's key, does to a real gateway process.

An engine stand-in streams an event each 5 ms with the time at which it was sent; the wait of an event is the time from
there until the client has it. The same stream without the gateway is read beside it, so that what the machine's other
work costs is known. teams.yaml has 1,000 teams and 5,000 keys. A second gateway runs on asyncio's own loop, where
every callback goes through one function: there the longest CPU time of one callback is measured under the same load
(time of its thread, so that neither other processes nor waits for the interpreter's lock count).

Limit: the 99th percentile of the wait is at most twice that of an idle gateway in the same run, or 20 ms.

Run: python tests/bench/bench_gateway_bodies.py [--seconds 4] [--only NAME] [--checkout FOLDER]"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import yaml

from exporters import process
from stack.gateway import make_key
from stack.gateway.serve import run
from tests.support.dense_bodies import CHAT, dense
from tests.support.wait import eventually

EVERY_S = 0.005
LIMIT_MS = 20.0
ROOT = Path(__file__).parents[2]
COMPLETIONS = "/v1/completions"
PAGE = (ROOT / "tests/golden/0.32.0-reject-after-load.prom").read_bytes()
REPLY = b'{"choices":[{}],"results":[],"data":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
LARGE_REPLY = b'{"choices":[{"text":"' + b"a" * (32 << 20) + b'"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}'


@dataclass(frozen=True)
class Row:
    """A load. connections: how many send one request after the other; rate: requests a second of all together, None for
    as many as can be. reads: bytes a second that each client takes of a reply. reloads: reload all the time."""

    name: str
    route: str = ""
    body: bytes = b""
    connections: int = 12
    rate: float | None = None
    reads: int | None = None
    keyed: bool = True
    reloads: bool = False

    def request(self, key: str) -> bytes:
        method = "POST" if self.body else "GET"
        login = f"Authorization: Bearer {key}\r\n" if self.keyed else ""
        head = f"{method} {self.route} HTTP/1.1\r\nHost: x\r\n{login}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


def of_size(size: int) -> dict[str, tuple[str, bytes]]:
    """Bodies of about `size` bytes that are read in different ways."""

    def chat(content: object, count: int = 1) -> tuple[str, bytes]:
        messages = [{"role": "user", "content": content}] * count
        return CHAT, json.dumps({"model": "tiny", "max_tokens": 5, "messages": messages}).encode()

    def completions(prompt: object) -> tuple[str, bytes]:
        return COMPLETIONS, json.dumps({"model": "tiny", "max_tokens": 5, "prompt": prompt}).encode()

    return {
        "one text": chat("word " * (size // 5)),
        "image": chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * (size // 4)}}]),
        "many messages": chat("word " * 50, size // 300),
        "token ids": completions([12345] * (size // 7)),
        "dense": (CHAT, json.dumps({"model": "tiny", "messages": [{"a": 1, "b": [1, 2, 3]}] * (size // 27)}).encode()),
    }


def rows() -> list[Row]:
    found = [Row("idle", connections=0)]
    for name, (route, body) in dense(255 << 10).items():
        found += [Row(f"{name}, 255 KiB, 20/s", route, body, rate=20), Row(f"{name}, 255 KiB, 12 at once", route, body)]
    for size in (64 << 10, 1 << 20, 4 << 20, 32 << 20):
        shown = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        at_once = 12 if size < 1 << 20 else 2
        for name, (route, body) in of_size(size - (1 << 10)).items():
            found.append(Row(f"{name}, {shown}, {at_once} at once", route, body, connections=at_once))
    # the last makes the engine write 32 MiB, which its clients read slowly
    return [
        *found,
        Row("GET /v1/models", "/v1/models"),
        Row("GET /version, passed on", "/version"),
        Row("POST /tokenize, passed on", "/tokenize", b'{"model":"tiny","prompt":"a"}'),
        Row("/metrics without a key", "/metrics", keyed=False),
        Row("/health without a key", "/health", keyed=False),
        Row("reloads", connections=0, reloads=True),
        Row("slow readers of 32 MiB", CHAT, b'{"model":"tiny","messages":[],"user":"large"}', reads=1 << 20),
        Row("idle again", connections=0),
    ]


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one connection: a stream for a body that wants one, else a page or a reply."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length, body = int((head.partition(b"content-length:")[2].split(b"\r\n") or [b"0"])[0] or 0), b""
            while length:
                piece = await reader.read(min(length, 1 << 20))
                body, length = body or piece, length - len(piece)
            if b'"stream":true,"user":"wait"' in body[:300]:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
                while True:
                    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
                    event = {"model": "tiny", "at": time.monotonic(), "choices": [choice]}
                    writer.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
                    await writer.drain()
                    await asyncio.sleep(EVERY_S)
            reply, kind = (LARGE_REPLY if b'"user":"large"' in body else REPLY), b"application/json"
            if head.startswith(b"get /metrics "):
                reply, kind = PAGE, b"text/plain; version=0.0.4"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(reply)))
            for at in range(0, len(reply), 1 << 20):
                writer.write(reply[at : at + (1 << 20)])
                await writer.drain()
    writer.close()


def run_engine(port: int) -> None:
    async def serve() -> None:
        async with await asyncio.start_server(engine, "127.0.0.1", port, limit=1 << 20) as server:
            await server.serve_forever()

    uvloop.run(serve())


# The tests are of this checkout, whichever the gateway is of.
WATCHED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import tests
sys.path.pop(0)
from tests.bench.bench_gateway_bodies import run_watched
run_watched()
"""


def run_watched() -> None:
    """Run a gateway that tells the longest CPU time of one callback since the last SIGUSR1, and of one collection of
    garbage, which is a part of some callback, in longest.json."""
    config = Path("gateway.yaml")
    longest: list[Any] = [0.0, "", 0.0, 0.0]
    plain = asyncio.Handle._run  # type: ignore[attr-defined]

    def timed(self: Any) -> None:
        began = time.thread_time()
        plain(self)
        if (took := time.thread_time() - began) > longest[0]:
            owner = getattr(self._callback, "__self__", None)
            coroutine = owner.get_coro() if isinstance(owner, asyncio.Task) else self._callback
            longest[:2] = took, getattr(coroutine, "__qualname__", repr(coroutine))

    def collected(phase: str, _: object) -> None:
        longest[2] = time.thread_time() if phase == "start" else longest[2]
        if phase == "stop" and (took := time.thread_time() - longest[2]) > longest[3]:
            longest[3] = took

    gc.callbacks.append(collected)

    def tell(*_: object) -> None:
        (at := config.with_name("longest.new")).write_text(json.dumps(longest))
        at.rename(config.with_name("longest.json"))
        longest[:] = 0.0, "", 0.0, 0.0

    asyncio.Handle._run = timed  # type: ignore[attr-defined]
    process._fast_loop = lambda: None
    signal.signal(signal.SIGUSR1, tell)
    run(config)


def read_stream(port: int, key: str, found: Any, stop: Any) -> None:
    """Read events until `stop`, and put (time, wait) of each in seconds."""
    waits: list[tuple[float, float]] = []
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.sendall(Row("", CHAT, b'{"model":"tiny","stream":true,"user":"wait","messages":[]}').request(key))
        held, begun = b"", ""
        while not stop.is_set():
            held += wire.recv(1 << 16)
            if not begun:
                found.put(begun := "begun")
            now = time.monotonic()
            *events, held = held.split(b"\n\n")
            waits += [
                (now, now - json.loads(event[event.index(b'{"model') : event.rindex(b"}") + 1])["at"])
                for event in events
                if b'"at"' in event
            ]
    found.put(waits)


def send_all(port: int, key: str, row: Row, found: Any, stop: Any) -> None:
    """Send a row's requests until `stop`, and put how often each status came."""
    statuses = collections.Counter[str]()
    request, pause = row.request(key), row.connections / row.rate if row.rate else 0.0

    def client(number: int) -> None:
        wire: socket.socket | None = None
        stop.wait(number * pause / row.connections)
        while not stop.is_set():
            began = time.monotonic()
            try:
                wire = wire or socket.create_connection(("127.0.0.1", port), 60)
                wire.sendall(request)
                status, kept = answered(wire, row.reads, stop)
            except OSError as error:
                status, kept = type(error).__name__, False
            statuses[status] += 1
            wire = wire if kept else None
            stop.wait(max(0.0, began + pause - time.monotonic()) if row.rate else 0.0)

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(row.connections)]
    for one in clients:
        one.start()
    found.put("begun")
    for one in clients:
        one.join(90)
    found.put(dict(statuses))


def answered(wire: socket.socket, reads: int | None, stop: Any) -> tuple[str, bool]:
    """Read one reply; return its status and whether the connection may be used again."""
    head = b""
    while b"\r\n\r\n" not in head:
        if not (piece := wire.recv(4096 if reads else 1 << 18)):
            raise ConnectionResetError
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    left = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0) - len(body)
    while left > 0 and not stop.is_set():
        if not (piece := wire.recv(min(left, reads // 50 if reads else 1 << 18))):
            raise ConnectionResetError
        left -= len(piece)
        if reads:
            stop.wait(len(piece) / reads)
    return head[9:12].decode(), left <= 0 and b"connection: close" not in head.lower()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextlib.contextmanager
def beside(context: Any, target: Any, *arguments: Any) -> Any:
    """Run a function that takes a queue and an event in a process; once it has begun, yield a function that stops it
    for its result."""
    found, stop = context.Queue(), context.Event()
    one = context.Process(target=target, args=(*arguments, found, stop), daemon=True)
    one.start()
    assert found.get(timeout=60) == "begun"

    def result() -> Any:
        stop.set()
        return found.get(timeout=120)

    yield result
    one.join(10)
    one.terminate()


def loaded(
    context: Any, port: int, pid: int, key: str, row: Row, seconds: float
) -> tuple[float, float, dict[str, int]]:
    """Put a row's load on a gateway; return when it was on, and what came of it."""
    with beside(context, send_all, port, key, row) as sent:
        time.sleep(0.3)
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if row.reloads:
                os.kill(pid, signal.SIGHUP)
            time.sleep(0.05)
        return began, time.monotonic(), sent()


def quantiles(found: list[tuple[float, float]], began: float, ended: float) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum of the waits in a time, in milliseconds."""
    ms = sorted(1000 * wait for when, wait in found if began <= when <= ended) or [float("nan")]
    return ms[len(ms) // 2], ms[min(len(ms) - 1, int(0.99 * len(ms)))], ms[-1]


def gateways(
    folder: Path, checkout: Path, upstream: int, stack: contextlib.ExitStack
) -> tuple[list[str], list[tuple[int, int, Path]]]:
    """Start one gateway as it is and one that is watched; return the keys of two teams, and port, process and folder of
    each."""
    keys = [make_key(team) for team in ("stream", "load")]
    teams = {f"team-{at}": {"keys": [make_key("x")[1] for _ in range(5)]} for at in range(998)}
    teams |= {name: {"keys": [hashed]} for name, (_, hashed) in zip(("stream", "load"), keys, strict=True)}
    started = []
    plain = ["-m", "stack.cli", "gateway", "run", "--config", "gateway.yaml"]
    for name, command in (("plain", plain), ("watched", ["-c", WATCHED])):
        (at := folder / name).mkdir()
        listen, figures = free_port(), free_port()
        (at / "teams.yaml").write_text(yaml.safe_dump({"teams": teams}))
        places = {"listen": f"127.0.0.1:{listen}", "metrics_listen": f"127.0.0.1:{figures}"}
        config = {"upstream": f"http://127.0.0.1:{upstream}", "liveness": {"probe": False}, **places}
        (at / "gateway.yaml").write_text(yaml.safe_dump(config))
        running = subprocess.Popen(
            [sys.executable, *command], cwd=at, stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin"},
        )  # fmt: skip
        stack.callback(running.wait)
        stack.callback(running.terminate)
        eventually(lambda listen=listen: socket.create_connection(("127.0.0.1", listen)).close() or True, "it listens")
        started.append((listen, running.pid, at))
    return [key for key, _ in keys], started


def main(seconds: float, only: str, checkout: Path) -> int:
    context = multiprocessing.get_context("spawn")
    results = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        upstream = free_port()
        behind = context.Process(target=run_engine, args=(upstream,), daemon=True)
        behind.start()
        stack.callback(behind.terminate)
        keys, ((port, pid, _), (watched, watched_pid, at)) = gateways(Path(folder), checkout, upstream, stack)
        for row in rows():
            if only not in row.name and not row.name.startswith("idle"):
                continue
            with (
                beside(context, read_stream, port, keys[0]) as through,
                beside(context, read_stream, upstream, "") as direct,
            ):
                began, ended, statuses = loaded(context, port, pid, keys[1], row, seconds)
                waits, floor = (quantiles(found(), began, ended) for found in (through, direct))
            os.kill(watched_pid, signal.SIGUSR1)
            loaded(context, watched, watched_pid, keys[1], row, seconds / 2)
            (report := at / "longest.json").unlink(missing_ok=True)
            os.kill(watched_pid, signal.SIGUSR1)
            longest = json.loads(eventually(report.read_text, "the longest callback"))
            results.append((row.name, waits, floor, longest, statuses))
            print(results[-1], file=sys.stderr, flush=True)
    limit = max(LIMIT_MS, 2 * max(waits[1] for name, waits, *_ in results if name.startswith("idle")))
    print(f"p99 of the wait at most {limit:.1f} ms\n")
    print("| beside | p50 | p99 | max | | direct p99 | longest callback | longest collection | replies |")
    print("|" + "---|" * 9)
    for name, waits, floor, (took, what, _, gced), statuses in results:
        judged = "ok" if waits[1] <= limit else "over"
        shown = " ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        figures = " | ".join(f"{ms:.1f} ms" for ms in waits)
        callback = f"{1000 * took:.1f} ms {what} | {1000 * gced:.1f} ms"
        print(f"| {name} | {figures} | {judged} | {floor[1]:.1f} ms | {callback} | {shown} |")
    return int(any(waits[1] > limit for _, waits, *_ in results))


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--only", default="", help="rows whose name has this in it")
    options.add_argument("--checkout", type=Path, default=ROOT, help="of the gateway, to compare")
    given = options.parse_args()
    sys.exit(main(given.seconds, given.only, given.checkout))
