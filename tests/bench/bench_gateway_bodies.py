"""Delay of one team's stream while another team sends large bodies through a real gateway process.

An engine stand-in streams an event each 5 ms with the time at which it was sent; the delay of an event is the time from
there until the client has it. The same stream without the gateway is read beside it, so that what the machine's other
work costs is told apart.

Run: python tests/bench/bench_gateway_bodies.py [MIB] [COUNT]"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop
import yaml

from stack.gateway import make_key
from tests.support.wait import eventually

EVERY_S = 0.005
ROOT = Path(__file__).parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Bodies of about `size` bytes that are read in different ways."""

    def chat(content: object, count: int = 1) -> tuple[str, bytes]:
        return (
            CHAT,
            json.dumps(
                {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": content}] * count}
            ).encode(),
        )

    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * (size // 4)}}]
    return {
        "one text": chat("word " * (size // 5)),
        "escaped text": chat("é" * (size // 6)),
        "image": chat(image),
        "many messages": chat("word " * 50, size // 300),
        "token ids": (
            COMPLETIONS,
            json.dumps({"model": "tiny", "max_tokens": 5, "prompt": [12345] * (size // 7)}).encode(),
        ),
        "many prompts": (
            COMPLETIONS,
            json.dumps(
                {"model": "tiny", "max_tokens": 5, "prompt": ["hello world, a: b " * 20] * (size // 385)}
            ).encode(),
        ),
        "dense": (CHAT, json.dumps({"model": "tiny", "messages": [{"a": 1, "b": [1, 2, 3]}] * (size // 27)}).encode()),
    }


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one connection: a stream for a body that wants one, else a short reply."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            body, first = b"", b""
            while length:
                piece = await reader.read(min(length, 1 << 20))
                first, length = first or piece, length - len(piece)
            body = first[:300]
            if b'"stream":true' in body.replace(b" ", b""):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
                while True:
                    event = {
                        "model": "tiny",
                        "at": time.monotonic(),
                        "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}],
                    }
                    writer.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
                    await writer.drain()
                    await asyncio.sleep(EVERY_S)
            reply = b'{"usage":{"prompt_tokens":5,"completion_tokens":2}}'
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(reply), reply)
            )
    writer.close()


def run_engine(port: int) -> None:
    async def serve() -> None:
        async with await asyncio.start_server(engine, "127.0.0.1", port, limit=1 << 20) as server:
            await server.serve_forever()

    uvloop.run(serve())


def request(route: str, key: str, body: bytes) -> bytes:
    head = (
        f"POST {route} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type:"
        f" application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read_stream(
    port: int,
    key: str,
    found: multiprocessing.Queue[list[tuple[float, float]]],
    stop: multiprocessing.synchronize.Event,
) -> None:
    """Read events until `stop`, and put (time, delay) of each in seconds."""
    delays: list[tuple[float, float]] = []
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.sendall(request(CHAT, key, b'{"model":"tiny","stream":true,"messages":[]}'))
        held = b""
        while not stop.is_set():
            held += wire.recv(1 << 16)
            now = time.monotonic()
            *events, held = held.split(b"\n\n")
            delays += [
                (now, now - json.loads(event[event.index(b'{"model') : event.rindex(b"}") + 1])["at"])
                for event in events
                if b'"at"' in event
            ]
    found.put(delays)


def send(port: int, key: str, route: str, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 60) as wire:
        wire.sendall(request(route, key, body))
        assert b" 200 " in wire.recv(1 << 16)[:20]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def shown(delays: list[float]) -> str:
    ms = sorted(1000 * delay for delay in delays)
    at = {
        name: ms[min(len(ms) - 1, int(share * len(ms)))]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
    }
    shares = "  ".join(f"{name} {value:6.1f}" for name, value in at.items())
    return f"{shares}  max {ms[-1]:6.1f} ms  over 50 ms: {sum(one > 50 for one in ms)} of {len(ms)}"


def main(mib: int, count: int) -> None:
    keys = {team: make_key(team) for team in ("stream", "large")}
    ports = [free_port() for _ in range(3)]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        at = Path(folder)
        (at / "teams.yaml").write_text(
            yaml.safe_dump({"teams": {team: {"keys": [hashed]} for team, (_, hashed) in keys.items()}})
        )
        (at / "gateway.yaml").write_text(
            yaml.safe_dump(
                {
                    "upstream": f"http://127.0.0.1:{ports[0]}",
                    "listen": f"127.0.0.1:{ports[1]}",
                    "metrics_listen": f"127.0.0.1:{ports[2]}",
                }
            )
        )
        behind = context.Process(target=run_engine, args=(ports[0],), daemon=True)
        behind.start()
        stack.callback(behind.terminate)
        eventually(ports[0])
        running = subprocess.Popen(
            [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", "gateway.yaml"],
            cwd=at,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
            stderr=subprocess.DEVNULL,
        )
        stack.callback(running.wait)
        stack.callback(running.terminate)
        eventually(ports[1])
        for name, (route, body) in ({"nothing": ("", b"")} | bodies((mib << 20) - (1 << 16))).items():
            stop, through, direct = context.Event(), context.Queue(), context.Queue()
            readers = [context.Process(target=read_stream, args=(port, keys["stream"][0], found, stop), daemon=True)
                       for port, found in ((ports[1], through), (ports[0], direct))]  # fmt: skip
            for one in readers:
                one.start()
            time.sleep(1.5)
            began = time.monotonic()
            for _ in range(count):
                if body:
                    send(ports[1], keys["large"][0], route, body)
                time.sleep(0.3)
            ended = time.monotonic()
            stop.set()
            for label, found in (("through the gateway", through), ("direct", direct)):
                print(
                    f"{name:14} {label:20}"
                    f" {shown([delay for when, delay in found.get(timeout=60) if began <= when <= ended])}",
                    flush=True,
                )
            for one in readers:
                one.join()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:] + ["32", "5"][len(sys.argv) - 1 :]))
