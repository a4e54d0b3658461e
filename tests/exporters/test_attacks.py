"""Hostile clients, logs, engines and addresses against our real processes: a gateway, a sidecar and a board on
loopback. The engine is a fake that keeps every byte that it is sent. What docs/internals/threats.md says of an attack
is shown here, or in the test that it names."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from exporters.catalogue import OURS, exposition_parser
from exporters.engine.client import EngineClient
from exporters.exposition import OPENMETRICS
from exporters.net.alertmanager import firing_alerts
from exporters.net.http_client import HttpClientConfig
from exporters.net.prometheus import Prometheus, address
from exporters.requests.record import parse_line
from stack import cli
from stack.bench import prompts, result
from stack.bench.engine_under_test import look
from stack.capacity import live_engine
from stack.doctor import report
from stack.doctor.diagnose import Diagnosis
from stack.gateway import make_key
from stack.lab import up
from stack.tuning import annotate, experiment
from tests.support import memory
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
KEY, HASH = make_key("demo")
TOKEN = "events-token-77aa"
CHAT = "/v1/chat/completions"
REPLY = json.dumps(
    {"model": "tiny", "choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
).encode()
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(REPLY), REPLY)
BODY_S, BODY_BYTES, TEAMS, LOOK_S = 0.3, 100_000, 50, 60.0
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) ")


class FakeEngine(socketserver.ThreadingTCPServer):
    """Keeps what it is sent, byte for byte, and answers with whatever bytes a test says. The gateway's and sidecar's
    own looks get 404."""

    allow_reuse_address = daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Asked)
        self.asked: list[bytes] = []
        self.answer = ANSWER
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


class _Asked(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while head := b"".join(iter(lambda: self.rfile.readline().replace(b"\r\n", b"\n").strip(b"\n") + b"\n", b"\n")):
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
            body = self.rfile.read(int(length[1])) if length else b""
            if head.startswith((b"GET /health ", b"GET /metrics ", b"GET /version ")):
                self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            self.server.asked.append(head + b"\n" + body)  # type: ignore[attr-defined]
            self.wfile.write(self.server.answer)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def scene(tmp_path_factory, free_port) -> Iterator[SimpleNamespace]:
    """Three processes of ours with one fake engine. ports: of gateway, figures, sidecar and board."""
    at = tmp_path_factory.mktemp("attacked")
    behind = FakeEngine()
    ports = {name: free_port() for name in ("gateway", "figures", "sidecar", "board")}
    listen = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    files: dict[str, Any] = {
        "teams.yaml": {"teams": {"demo": {"keys": [HASH]}}},
        "gateway.yaml": {"upstream": behind.url, "listen": listen["gateway"], "metrics_listen": listen["figures"],
            "teams": "teams.yaml",
                         "requests_log": "requests.jsonl", "limits": {"body_bytes": BODY_BYTES},
                         "timeouts": {"body_s": BODY_S}},
        "sidecar.yaml": {"listen": listen["sidecar"], "gpu": "off", "requests_log": [str(at / "foreign.jsonl")],
            "events": str(at / "events.jsonl"),
                         "events_token_file": str(at / "token"), "teams": {"limit": TEAMS}, "models_limit": TEAMS},
    }  # fmt: skip
    for name, content in files.items():
        (at / name).write_text(yaml.safe_dump(content))
    (at / "token").write_text(TOKEN)
    (at / "foreign.jsonl").touch()
    commands = {
        "gateway": ["gateway", "run", "--config", "gateway.yaml"],
        "sidecar": ["sidecar", "run", "--config", "sidecar.yaml"],
        "board": ["board", "--prometheus", "http://127.0.0.1:9", "--listen", listen["board"]],
    }
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}
    running = {}
    try:
        for name, command in commands.items():
            with (at / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "stack.cli", *command], stdout=log, stderr=log, cwd=at, env=env
                )
        for port in ports.values():
            eventually(
                lambda port=port: socket.create_connection(("127.0.0.1", port)).close() is None,
                within_s=60,
                what=f"an answer on {port}",
            )
        yield SimpleNamespace(at=at, engine=behind, running=running, ports=ports)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(60)
        behind.shutdown()
        behind.server_close()


@pytest.fixture(autouse=True)
def _quiet_engine(request: pytest.FixtureRequest) -> None:
    if "scene" in request.fixturenames:
        behind = request.getfixturevalue("scene").engine
        behind.asked.clear()
        behind.answer = ANSWER


def said(port: int, sent: bytes, enough: bytes | None = None, within_s: float = 60.0) -> bytes:
    """All that comes back until the other side closes, or until `enough` is in it."""
    out = b""
    with socket.create_connection(("127.0.0.1", port), within_s) as wire:
        wire.sendall(sent)
        try:
            while piece := wire.recv(1 << 16):
                out += piece
                if enough is not None and enough in out:
                    break
        except (TimeoutError, ConnectionError):
            pass
    return out


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def post(
    target: str = CHAT, body: bytes = b'{"model":"tiny"}', *more: bytes, key: str = KEY, framing: bytes | None = None
) -> bytes:
    head = [
        f"POST {target} HTTP/1.1".encode(),
        b"Host: x",
        b"Connection: close",
        f"Authorization: Bearer {key}".encode(),
        *more,
    ]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body) if framing is None else framing]) + b"\r\n\r\n" + body


def get(target: str, host: str = "localhost", *more: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close", *more, "", ""]).encode()


def page_of(scene: SimpleNamespace, name: str, accept: str = "text/plain") -> str:
    return said(scene.ports[name], get("/metrics", "localhost", f"Accept: {accept}")).partition(b"\r\n\r\n")[2].decode()


def records(scene: SimpleNamespace) -> list[bytes]:
    path = scene.at / "requests.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def record_of(scene: SimpleNamespace, answer: bytes) -> bytes:
    """The one line about the request with this answer."""
    named = re.search(rb"X-Request-Id: (.*?)\r\n", answer)
    assert named

    def mine() -> list[bytes]:
        return [line for line in records(scene) if parse_line(line).request_id == named[1].decode()]

    eventually(mine, what="a record")
    assert 1 == len(mine())
    return mine()[0]


# ---- what reaches the engine


@pytest.mark.parametrize("end", ["%0a", "%0A%0a", "%0d", "%00", "%2f%0a", "%e2%80%a8", "%0b", "/%0a"])
def test_a_path_with_what_cannot_be_printed_leads_past_no_record(scene, end):
    """The router of vLLM's server takes a path with a line break at its end for the path without it: no record, no
    limit, no slot."""
    assert 404 == status(said(scene.ports["gateway"], post(CHAT + end)))
    assert [] == scene.engine.asked


@pytest.mark.engine
def test_vllm_router_ends_a_path_at_a_line_break(part):
    """Why the gateway refuses it."""
    asked = (
        "from starlette.routing import compile_path as c; print(bool(c('/v1/models')[0].match('/v1/models' + chr(10))))"
    )
    assert (
        "True\n"
        == subprocess.run(
            [part("engine").path.with_name("python"), "-c", asked], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.parametrize(
    "target",
    ["/v1/%63hat/completions", "/v1/chat%2Fcompletions", CHAT + "%2f", CHAT + "//", "http://evil.example" + CHAT],
)
def test_a_recorded_route_goes_on_as_it_was_read(scene, target):
    """What is judged and what is sent cannot be two things; nor does a slash make the engine answer with a redirect to
    its own address."""
    answer = said(scene.ports["gateway"], post(target))
    assert 200 == status(answer)
    assert scene.engine.asked[0].startswith(b"POST /v1/chat/completions HTTP/1.1\nHost: 127.0.0.1:")
    assert CHAT == parse_line(record_of(scene, answer)).route


INNER = b"GET /v1/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5, 5",
        b"Content-Length: +5",
        b"Content-Length: 0x5",
        b"Content-Length: -5",
        b"Content-Length: 5 5",
        b"Content-Length: 99999999999999999999999",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"X: a\r\n Transfer-Encoding: chunked",
        b"X: a\nTransfer-Encoding: chunked",
        b"X: a\rTransfer-Encoding: chunked",
        b"X: a\0b",
        b"X-Request-Id: a\x0bb",
        b"X\xc3\xa4: a",
        b": a",
        b"no colon",
    ],
)
def test_ambiguous_request_reaches_no_engine(scene, framing):
    """What two servers could read in two ways is refused and reaches no engine."""
    answer = said(scene.ports["gateway"], post(CHAT, b"0\r\n\r\n" + INNER, framing=framing))
    assert (400, 1) == (status(answer), answer.count(b"HTTP/1."))
    assert [] == scene.engine.asked


def test_chunked_body_gets_a_length_and_no_trailers(scene):
    """A chunked body reaches the engine with a length and without its trailers."""
    chunks = b'9;ext="x"\r\n{"model":\r\n7\r\n"tiny"}\r\n0\r\nX-Evil: 1\r\n\r\n'
    assert 200 == status(said(scene.ports["gateway"], post(CHAT, chunks, framing=b"Transfer-Encoding: chunked")))
    (asked,) = scene.engine.asked
    head, _, body = asked.partition(b"\n\n")
    assert b'{"model":"tiny"}' == body
    assert (1, 0, 0) == (
        head.lower().count(b"content-length: 16"),
        head.lower().count(b"transfer-encoding"),
        head.count(b"X-Evil"),
    )


def test_a_body_with_a_request_in_it_stays_a_body(scene):
    body = json.dumps({"model": "tiny", "x": INNER.decode()}).encode()
    assert 1 == said(scene.ports["gateway"], post(CHAT, body)).count(b"HTTP/1.")
    assert [body] == [asked.partition(b"\n\n")[2] for asked in scene.engine.asked]


def test_requests_on_one_connection_use_own_keys(scene):
    """Two requests on one connection are two visits and each shows its own key."""
    second = post(CHAT, key="vw-demo-wrong")
    answer = said(scene.ports["gateway"], post().replace(b"Connection: close\r\n", b"") + second)
    assert [b"200", b"401"] == re.findall(rb"HTTP/1.1 (\d+)", answer)
    assert 1 == len(scene.engine.asked)


@pytest.mark.parametrize("name", ["gateway", "figures", "sidecar", "board"])
def test_no_listener_answers_what_stands_behind_an_upgrade(name, scene):
    """An h2c upgrade (RFC 7540, 3.2) asks a proxy and a server to disagree about where the next request begins."""
    upgrade = (
        b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade:"
        b" h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    )
    out = b""
    with socket.create_connection(("127.0.0.1", scene.ports[name]), 60) as wire:
        wire.sendall(upgrade + b"PRI * HTTP/2.0")
        while b"\r\n\r\n" not in out and (piece := wire.recv(1 << 16)):
            out += piece
        with contextlib.suppress(ConnectionError):
            wire.sendall(get("/-/healthy"))
            while piece := wire.recv(1 << 16):
                out += piece
    assert (1, 200) == (out.count(b"HTTP/1.1 "), status(out))
    assert b"connection: close" in out.lower()


def test_no_header_takes_away_what_only_we_say(scene):
    named = b"Connection: close, content-length, host, x-request-id, traceparent, accept-encoding"
    said(
        scene.ports["gateway"],
        post(CHAT, b'{"model":"tiny"}', named, b"X-Request-Id: mine", b"X-Api-Key: other", b"Cookie: a=b"),
    )
    head = scene.engine.asked[0].partition(b"\n\n")[0].lower()
    for kept in (
        b"content-length: 16",
        b"host: 127.0.0.1",
        b"x-request-id: mine",
        b"traceparent: 00-",
        b"accept-encoding: identity",
    ):
        assert 1 == head.count(b"\n" + kept)
    assert not [gone for gone in (b"authorization", b"x-api-key", b"cookie", KEY.lower().encode()) if gone in head]


# ---- large, slow and many


@pytest.mark.parametrize(
    ("want", "sent"),
    [
        (431, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (431, get("/v1/models", "x", "X-Long: " + "a" * 70_000)),
        (431, get("/v1/models", "x", *(f"X-{number}: a" for number in range(500)))),
        (413, post(CHAT, b"a" * 10, framing=b"Content-Length: %d" % (BODY_BYTES + 1))),
        (413, post(CHAT, (b"ffff\r\n" + b"a" * 0xFFFF + b"\r\n") * 3, framing=b"Transfer-Encoding: chunked")),
        (408, post(CHAT, b"1\r\na\r\n", framing=b"Transfer-Encoding: chunked")),
        (408, post(CHAT, b"a", framing=b"Content-Length: 9")),
    ],
    ids=("line", "header", "headers", "length", "chunks", "chunks-without-end", "body-without-end"),
)  # fmt: skip
def test_what_is_too_large_or_has_no_end_is_refused(want, sent, scene):
    # what is left of a body is still waited for a while, and thrown away
    assert want == status(said(scene.ports["gateway"], sent, enough=b"\r\n\r\n"))
    assert [] == scene.engine.asked


def is_open(wire: socket.socket) -> bool:
    wire.setblocking(False)
    try:
        while piece := wire.recv(1 << 16):
            del piece
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_who_holds_hundreds_of_half_requests_keeps_nobody_out(scene):
    halves = [
        b"",
        b"POST",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ",
        post(CHAT, b"", framing=b"Content-Length: 9"),
    ]
    wires = []
    try:
        for number in range(300):
            for name in ("gateway", "sidecar", "board"):
                wires.append(socket.create_connection(("127.0.0.1", scene.ports[name])))
                wires[-1].sendall(halves[number % 4])
        assert 200 == status(said(scene.ports["gateway"], post()))
        for name in ("figures", "sidecar", "board"):
            assert 200 == status(said(scene.ports[name], get("/-/healthy")))
        assert any(map(is_open, wires)), "the others were answered before these were cut"
    finally:
        for wire in wires:
            wire.close()


def test_wrong_keys_make_no_series_and_no_memory(scene):
    """Each is a key of its own; a broken teams.yaml and a reload come in between, and change nothing."""
    teams = scene.at / "teams.yaml"
    good = teams.read_text()

    def tried(first: int, count: int) -> int:
        many = b"".join(
            post(key=f"vw-demo-{number}").replace(b"Connection: close\r\n", b"")
            for number in range(first, first + count - 1)
        )
        return said(scene.ports["gateway"], many + post(key="last")).count(b"HTTP/1.1 401")

    assert 500 == tried(0, 500)
    before, series = memory.mib(scene.running["gateway"].pid), len(page_of(scene, "figures").splitlines())
    teams.write_text("teams: {demo: {keys: [" + KEY + "]}}\n")
    scene.running["gateway"].send_signal(signal.SIGHUP)
    assert 9500 == sum(tried(number, 500) for number in range(500, 10_000, 500))
    teams.write_text(good)
    assert memory.mib(scene.running["gateway"].pid) - before < 20
    assert abs(len(page_of(scene, "figures").splitlines()) - series) <= 2  # one for the reload that failed
    assert 200 == status(said(scene.ports["gateway"], post()))


# ---- logs and labels

HOSTILE = ('"}\n{"request_id":"forged"}', "a\r\nb", "\x1b[31mred", "nul\0", '\\" 1\nforged{x="', "__name__",
    "__other__", "\u2028\x85\u202e",
           "<script>alert(1)</script>", "{{ template }}", "$(id)", "%0a", "\U0001f4a5", "\uffff", "# EOF\n",
           "a" * 900)  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_record_is_always_one_line(scene, word):
    """Whatever a client or an engine writes a record is one line."""
    reply = json.dumps(
        {"model": word, "system_fingerprint": "vllm-" + word, "choices": [{"finish_reason": word}]}
    ).encode()
    scene.engine.answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(reply),
        reply,
    )
    printable = "".join(c for c in word if " " <= c <= "~").encode()
    headers = (b"X-Request-Id: " + printable, b"traceparent: " + printable, b"tracestate: " + printable)
    answer = said(scene.ports["gateway"], post(CHAT, json.dumps({"model": word}).encode(), *headers))
    assert (200, 1) == (status(answer), answer.count(b"HTTP/1."))
    line = record_of(scene, answer)
    record = parse_line(line)
    assert ("demo", CHAT) == (record.team, record.route)
    assert word.startswith(record.model)
    assert len(line) < 1000


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n", 1),
        ANSWER.replace(b"200 OK", b"200 OK\rX: 1"),
        ANSWER.replace(b"\r\n\r\n", b"\r\nX: a\0b\r\n\r\n", 1),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"\x16\x03\x01" * 100,
    ],
    ids=("two-lengths", "line-break", "nul", "upgrade", "tls"),
)
def test_ambiguous_answer_does_not_reach_the_client(scene, answer):
    """An answer that could be read in two ways does not reach the client."""
    scene.engine.answer = answer
    got = said(scene.ports["gateway"], post())
    assert (502, 1, 0) == (status(got), got.count(b"HTTP/1."), got.count(b"tiny"))


def foreign_lines() -> list[bytes]:
    """A log of somebody else, who writes what clients say."""
    line = {"ts": "2026-11-22T09:00:00.000Z", "outcome": "ok", "prompt_tokens": 3, "trace_id": '"} 1'}
    words = [
        json.dumps(
            line | {"request_id": f"h{n}", "team": w, "model": w, "finish_reason": w, "adapter": w, "route": w}
        ).encode()
        for n, w in enumerate(HOSTILE)
    ]
    words += [
        json.dumps(line | {"request_id": f"r{n}", "outcome": "rejected", "reason": f"{w}{n}", "team": "demo"}).encode()
        for n, w in enumerate(HOSTILE * 20)
    ]
    words += [
        json.dumps(line | {"request_id": f"t{n}", "team": f"t{n}", "model": f"m{n}"}).encode() for n in range(2000)
    ]
    odd = json.dumps(
        line | {"request_id": "o", "ts": "0001-01-01T00:00:00+14:00", "n": 10**30, "e2e_ms": 1e400}
    ).encode()
    bad = [
        b'{"request_id":"\xff\xfe","team":"\xff"}',
        b'{"team":"\\ud800"}',
        b"\0" * 100,
        b"[" * 9000,
        b'{"team":"' + b"a" * (1 << 20) + b'"}',
        odd,
    ]
    return words + bad


@pytest.mark.prometheus
def test_hostile_labels_leave_a_bounded_page(scene, part, tmp_path, free_port):
    """Read by prometheus_client, in both formats, and by a real Prometheus."""
    with (scene.at / "foreign.jsonl").open("ab") as log:
        log.write(b"\n".join(foreign_lines()) + b"\n")
    eventually(lambda: 'team="t30"' in page_of(scene, "sidecar"), what="the lines")
    for read, accept in ((text_families, "text/plain"), (openmetrics_families, OPENMETRICS)):
        samples = [sample for family in read(page_of(scene, "sidecar", accept)) for sample in family.samples]
        names = {label for sample in samples for label in sample.labels}
        assert names <= {label for metric in OURS for label in metric.labels} | {"le"}
        told = {
            label: {sample.labels[label] for sample in samples if label in sample.labels}
            for label in ("team", "model_name", "reason")
        }
        assert len(told["team"]) <= TEAMS + 2
        assert len(told["model_name"]) <= TEAMS + 2
        assert {word for word in HOSTILE if len(word) <= 120 and not word.startswith("__")} <= told["team"]
        assert not [sample.name for sample in samples if "forged" in sample.name]
    port = free_port()
    config = tmp_path / "prometheus.yml"
    jobs = [
        {
            "job_name": f"j{n}",
            "scrape_protocols": [protocol],
            "static_configs": [{"targets": [f"127.0.0.1:{scene.ports['sidecar']}"]}],
        }
        for n, protocol in enumerate(("PrometheusText0.0.4", "OpenMetricsText1.0.0"))
    ]
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": jobs})
    )
    command = [str(part("prometheus").path), f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/tsdb",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:

        def health() -> set[tuple[str, str]]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=60) as got:
                return {(one["health"], one["lastError"]) for one in json.load(got)["data"]["activeTargets"]}

        eventually(lambda: {("up", "")} == health(), what="a good scrape of each")
    finally:
        process.terminate()
        process.wait(60)


def test_text_logs_stay_one_line_each_and_hold_no_key(scene):
    for name in scene.running:
        lines = (scene.at / f"{name}.log").read_text().splitlines()
        assert lines
        assert [] == [line for line in lines if not LOG_LINE.match(line)]
    everything = (
        b"".join(path.read_bytes() for path in scene.at.glob("*.log"))
        + b"".join(records(scene))
        + page_of(scene, "figures").encode()
    )
    assert [False, False] == [secret.encode() in everything for secret in (KEY, TOKEN)]


def test_a_name_in_a_report_is_one_line_that_no_terminal_obeys(tmp_path):
    """A team of a foreign log in `cost`, a model of an engine's page in `doctor`."""
    word = "\x1b]0;title\x07\n9 forged"
    line = {
        "request_id": "1",
        "ts": "2026-11-22T09:00:00.000Z",
        "team": word,
        "model": "m",
        "outcome": "ok",
        "e2e_ms": 5000,
    }
    (tmp_path / "log").write_text(json.dumps(line))
    diagnosis = Diagnosis(model=word, state="idle", requests=0, seconds=1, findings=(), unsure=())
    for told in (
        CliRunner().invoke(cli.main, ["cost", "--log", f"{tmp_path}/log"]).output,
        report.as_text([diagnosis], "here"),
    ):
        assert "\\u001b]0;title\\u0007\\u000a9 forged" in told
        assert "\x1b" not in told


# ---- the board, its pages and the events

AWAY = ("..%2f..%2fetc%2fpasswd", "../../etc/passwd", "%2e%2e%2fREADME", "%252e%252e%252fetc%252fpasswd", "a%00b",
    "..%5c..%5cx", "%2fetc%2fpasswd",
        "tuning%0a", "tuning.md.md", "%3Cscript%3Ealert(1)%3C%2Fscript%3E", "%ff%fe", "a" * 7000)  # fmt: skip


@pytest.mark.parametrize("name", AWAY, ids=range(len(AWAY)))
def test_board_paths_reach_no_other_file_or_html(name, scene):
    """No address of the board leads to another file or becomes html."""
    for folder in ("/runbooks/", "/static/", "/d/", "/api/panel/vllm-watch-overview/", "/"):
        head, _, body = said(scene.ports["board"], get(folder + name)).partition(b"\r\n\r\n")
        assert 404 == status(head)
        assert b"script-src 'self';" in head
        assert b"X-Content-Type-Options: nosniff" in head
        assert b"root:" not in body
        assert b"text/plain" in head or b"<script" not in body


REBOUND = (
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil",
    "evil:127.0.0.1",
    "localhost, evil",
    "127.1",
    "2130706433",
    "",
)


@pytest.mark.parametrize("host", REBOUND)
def test_loopback_board_answers_no_foreign_name(host, scene):
    """A board on loopback answers under no name of somebody else."""
    for target in ("/", "/-/healthy", "/runbooks/", "http://localhost/"):
        assert 421 == status(said(scene.ports["board"], get(target, host)))


def test_two_hosts_are_no_request(scene):
    assert 400 == status(said(scene.ports["board"], get("/", "localhost", "Host: evil.example")))


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..%2f..%2fetc/passwd", ".", "*", "~root", "x" * 9000]
)
def test_the_runbook_command_knows_names_of_pages_and_no_paths(name):
    done = CliRunner().invoke(cli.main, ["runbook", name])
    assert done.exit_code in (0, 1, 2)  # a page that has the words, none, or several
    assert "Traceback" not in done.output
    assert "root:" not in done.output


def event(what: str, **more: Any) -> bytes:
    return post("/events", json.dumps({"what": what} | more).encode(), key=TOKEN)


@pytest.mark.parametrize(
    "sent",
    [
        event("a\nb"),
        event("\x1b]0;title\x07"),
        event("\u202eevil"),
        event("\0"),
        event("x" * 501),
        event("x", id="../../etc/passwd"),
        event("x", who="a\r\nb"),
        event("x", tags=["event:1"]),
        event("x", diff={"a\nb": ["1", "2"]}),
        event("x", at_s=1e400),
        event("x", path="/etc/x"),
    ],
    ids=range(11),
)
def test_dangerous_event_is_refused(sent, scene):
    """An event that would break a line a terminal or a path is refused."""
    lines = (scene.at / "events.jsonl").read_bytes() if (scene.at / "events.jsonl").exists() else b""
    assert 400 == status(said(scene.ports["sidecar"], sent))
    assert lines == ((scene.at / "events.jsonl").read_bytes() if (scene.at / "events.jsonl").exists() else b"")


def test_html_in_an_event_is_text_wherever_it_goes(scene):
    """The board draws with textContent and Grafana gets it escaped (test_board.py, test_events.py); here it stays
    JSON."""
    assert 201 == status(said(scene.ports["sidecar"], event("<img src=x onerror=alert(1)>")))
    answer = said(scene.ports["sidecar"], get("/events", "localhost", f"Authorization: Bearer {TOKEN}"))
    assert b"Content-Type: application/json" in answer
    assert "onerror" not in page_of(scene, "sidecar")


# ---- an engine that lies


async def looked(
    tmp_path: Path, free_port: Callable[[], int], way: bool = False, **pages: Callable[..., Any]
) -> tuple[str, str | None]:
    """What the sidecar's and the doctor's reader makes of an engine with these pages."""
    app = web.Application()
    app.add_routes([web.get(f"/{name}", answer) for name, answer in pages.items()])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
    (tmp_path / "secret").write_text("engine-secret")
    (tmp_path / "http.yml").write_text("authorization: {credentials_file: secret}\n")
    try:
        async with aiohttp.ClientSession() as session:
            return await EngineClient(
                session, f"http://127.0.0.1:{port}", LOOK_S, HttpClientConfig(tmp_path / "http.yml") if way else None
            ).scrape()
    finally:
        await runner.cleanup()


def page_says(text: str) -> Callable[[web.Request], Any]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    return answer


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b'"' + b"a" * (1 << 16))


async def test_a_version_without_an_end_is_not_kept(tmp_path, free_port):
    """It was read to its end once, however long that was."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert ("a 1\n", None) == await looked(tmp_path, free_port, metrics=page_says("a 1\n"), version=endless)
    assert loop.time() - began < LOOK_S, "it went on until the time was over"


ASKERS = {
    "runbook": lambda url: firing_alerts(url),
    "capacity": lambda url: live_engine.read(url),
    "bench": lambda url: look(url, None),
    "prompts": lambda url: tokenized(url),
    "lab": lambda url: served_model(url),
    "annotate": lambda url: asyncio.to_thread(annotate.SidecarLog(url, "token").close, "e1", 5.0),
    "experiment": lambda url: experiment.read_settings(
        url, result.BenchEngine(url=url, model="tiny", version="0.32.0")
    ),
    "board": lambda url: asked(url),
}


async def tokenized(url: str) -> object:
    async with aiohttp.ClientSession() as session:
        return await prompts.Remote(session, url, "tiny").ids("a")


async def served_model(url: str) -> object:
    async with aiohttp.ClientSession() as session:
        return await up._served_model(session, url)


async def asked(url: str) -> object:
    async with Prometheus(address(url)) as prometheus:
        return (await prometheus.as_of("up", 0.0)).error


@pytest.mark.parametrize("ask", ASKERS.values(), ids=ASKERS)
async def test_who_answers_without_an_end_fills_nobodys_memory(ask, free_port):
    """Anybody may sit at an address that was mistyped."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", page_says("a 1\n")),
            web.get("/version", page_says("{}")),
            web.route("*", "/{any:.*}", endless),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
    try:
        told = await ask(f"http://127.0.0.1:{port}")
    except (ValueError, OSError, up.LabError) as error:
        told = error
    finally:
        await runner.cleanup()
    assert re.search("goes on after 16 MiB|larger than 12 MiB|ResponseTooLarge", str(told)) or told == {
        "version": "0.32.0"
    }


@pytest.mark.parametrize(
    "version", ["0.9\n2026-11-22 09:00:00,000 INFO forged", "\x1b[2J", "x" * 65, 5, None, ["0.9"]], ids=range(6)
)
async def test_a_version_that_could_forge_a_line_is_none(version, tmp_path, free_port):
    told = page_says(json.dumps({"version": version}))
    assert ("a 1\n", None) == await looked(tmp_path, free_port, metrics=page_says("a 1\n"), version=told)


async def test_decompression_bomb_stops_at_the_bound(tmp_path, free_port):
    """What has come was copied for each piece once, and the sidecar answered nobody for eight seconds."""
    bomb = gzip.compress(bytes(64 << 20), 1)

    async def packed(_: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    before_s = time.thread_time()
    gzip.decompress(bomb)
    unpacked_s = time.thread_time()
    with pytest.raises(exposition_parser.BadExposition, match="goes on after"):
        await looked(tmp_path, free_port, metrics=packed)
    assert time.thread_time() - unpacked_s < 20 * (unpacked_s - before_s)


async def test_a_redirect_takes_no_secret_to_another_place(tmp_path, free_port):
    seen: list[str | None] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(text="a 1\n")

    app = web.Application()
    app.add_routes([web.get("/steal", elsewhere)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()

    async def away(_: web.Request) -> web.Response:
        raise web.HTTPFound(f"http://127.0.0.1:{port}/steal")

    try:
        await looked(tmp_path, free_port, way=True, metrics=away, version=away)
    finally:
        await runner.cleanup()
    assert {None} == set(seen)


@pytest.mark.parametrize(
    "line",
    [
        'a{b="' + '\\"' * 400_000 + '"} 1',
        'a{b="' + "\\" * 800_000 + '"} 1',
        "a{" + "b" * 800_000 + '="c"} 1',
        "a" + "{" * 800_000,
    ],
    ids=range(4),
)
def test_quadratic_line_is_refused_at_once(line):
    """A line that takes the square of its length to read is refused at once."""
    before_s = time.thread_time()
    with pytest.raises(exposition_parser.BadExposition, match="line 1"):
        exposition_parser.parse(line + "\n")
    assert time.thread_time() - before_s < 10, "its square would take minutes"
