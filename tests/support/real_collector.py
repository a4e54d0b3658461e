"""A real OpenTelemetry collector as a process, and HTTP servers that stand for one or for the store behind it."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml


@contextlib.contextmanager
def http_server(answer, protocol: str = "HTTP/1.0") -> Iterator[tuple[str, list]]:
    """A server whose answer to a body is `answer(handler)`: status, headers, content. Yields its address and what it
    was sent."""
    got: list = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            status, headers, content = answer(self)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def plain_json(attributes: list[dict]) -> dict[str, object]:
    return {a["key"]: next(iter(a["value"].values())) for a in attributes}


class Arrived:
    """Stands for a trace store behind the collector: keeps what it exports as OTLP JSON."""

    def __init__(self, requests: list) -> None:
        self._requests = requests

    def spans(self) -> list[dict]:
        return [
            {
                **span,
                "service": plain_json(r["resource"]["attributes"])["service.name"],
                "attributes": plain_json(span["attributes"]),
            }
            for r in self._of("/v1/traces", "resourceSpans")
            for s in r["scopeSpans"]
            for span in s["spans"]
        ]

    def metrics(self) -> dict[str, dict]:
        """What each metric said last, by name."""
        return {
            m["name"]: m
            for r in self._of("/v1/metrics", "resourceMetrics")
            for s in r["scopeMetrics"]
            for m in s["metrics"]
        }

    def metric_resources(self) -> list[dict[str, object]]:
        return [plain_json(r["resource"]["attributes"]) for r in self._of("/v1/metrics", "resourceMetrics")]

    def _of(self, to: str, what: str) -> list[dict]:
        bodies = [
            gzip.decompress(b) if headers.get("content-encoding") == "gzip" else b
            for path, headers, b in self._requests
            if path == to
        ]
        return [one for body in bodies for one in json.loads(body)[what]]


class RealCollector:
    """The collector as a process that can be ended and started again on its ports; what it takes goes to a trace
    store of the test."""

    def __init__(self, program: Path, folder: Path, store: str, port) -> None:
        self.http, self.grpc = (f"127.0.0.1:{port()}" for _ in range(2))
        self._command = [program, "--config", folder / "otelcol.yaml"]
        self._log = folder / "otelcol.log"
        self._process: subprocess.Popen | None = None
        (folder / "otelcol.yaml").write_text(
            yaml.safe_dump(
                {
                    "receivers": {
                        "otlp": {"protocols": {"grpc": {"endpoint": self.grpc}, "http": {"endpoint": self.http}}}
                    },
                    "exporters": {"otlp_http": {"endpoint": store, "encoding": "json"}},
                    "service": {
                        "pipelines": {
                            signal: {"receivers": ["otlp"], "exporters": ["otlp_http"]}
                            for signal in ("traces", "metrics")
                        },
                        "telemetry": {"metrics": {"level": "none"}},
                    },
                }
            )
        )

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def end(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(20)
