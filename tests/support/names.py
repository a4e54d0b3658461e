"""A tiny name server, engines behind it, and a Prometheus that finds them by DNS: `unshare --net --mount python
tests/support/names.py PROMETHEUS FOLDER`.

It brings the loopback of its own network up, puts a resolv.conf over the real one (within its own mounts only) and says
which engines Prometheus takes for up, as JSON."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

A, SRV, IN = 1, 33, 1
WITHIN_S = 60


def labels(name: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in name.rstrip(".").split(".")) + b"\0"


def asked(query: bytes) -> tuple[str, int, int]:
    """Name and type that a query asks for, and where its question ends."""
    parts, at = [], 12
    while length := query[at]:
        parts.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(parts), struct.unpack_from("!H", query, at + 1)[0], at + 5


def answer(query: bytes, zone: dict[tuple[str, int], list[bytes]]) -> bytes:
    """The records of the zone, or none with the code for no such name."""
    name, kind, end = asked(query)
    records = zone.get((name, kind), [])
    code = 0 if any(known == name for known, _ in zone) else 3
    head = struct.pack("!HHHHHH", struct.unpack_from("!H", query)[0], 0x8580 | code, 1, len(records), 0, 0)
    return (
        head
        + query[12:end]
        + b"".join(b"\xc0\x0c" + struct.pack("!HHIH", kind, IN, 30, len(data)) + data for data in records)
    )


def serve_names(zone: dict[tuple[str, int], list[bytes]]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        while True:
            query, sender = server.recvfrom(4096)
            server.sendto(answer(query, zone), sender)


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 1\n")

    def log_message(self, *_: object) -> None:
        pass


def srv(port: int, target: str) -> bytes:
    return struct.pack("!HHH", 0, 0, port) + labels(target)


def up(base: str) -> list[str]:
    try:
        rows = json.load(urllib.request.urlopen(f"{base}/api/v1/query?query=up==1", timeout=2))["data"]["result"]
    except OSError:
        return []
    return sorted(row["metric"]["instance"] for row in rows)


def main(prometheus: str, folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that Prometheus ends with us
    config = json.loads((folder / "names.json").read_text())
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--bind", folder / "resolv.conf", "/etc/resolv.conf"], check=True)
    zone = {
        (config["srv"], SRV): [srv(8001, "vllm-0.test"), srv(8002, "vllm-1.test")],
        (config["a"], A): [socket.inet_aton("127.0.0.1")],
        ("vllm-0.test", A): [socket.inet_aton("127.0.0.1")], ("vllm-1.test", A): [socket.inet_aton("127.0.0.1")],
    }  # fmt: skip
    threading.Thread(target=serve_names, args=(zone,), daemon=True).start()
    for port in (8000, 8001, 8002):
        threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", port), Page).serve_forever, daemon=True).start()
    command = [
        prometheus,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--web.listen-address=127.0.0.1:9090",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + WITHIN_S
        while len(found := up("http://127.0.0.1:9090")) < 3 and time.monotonic() < until:
            time.sleep(0.2)
        sys.stdout.write(json.dumps(found))
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
