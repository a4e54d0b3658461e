"""A hung vLLM behind a gateway: SIGSTOP of the core while it decodes and while it is idle, SIGSTOP of the API server,
and a gateway that was stopped itself.

The gateway is a process with its default limits: 10 s until an engine leaves rotation, 30 s until it counts as hung."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import Engine, Engines, get

from exporters.requests.record import PROBE_TEAM, parse_line
from stack.gateway import make_key
from stack.lab import plan

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
KEY, HASH = make_key("demo")
OUT_S = 15.0

_log = logging.getLogger("liveness")


@dataclass
class Watched:
    engine: Engine
    gateway: subprocess.Popen[bytes]
    url: str
    metrics_url: str
    log: Path

    def state(self) -> tuple[str, str]:
        line = next(line for line in get(self.metrics_url + "/metrics").splitlines() if "engine_state{" in line)
        labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
        return labels["state"].strip('"'), labels["evidence"].strip('"')

    def answers(self, path: str) -> bool:
        try:
            get(self.metrics_url + path)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return False
            raise
        return True

    def until(self, path: str, answer: bool, within_s: float) -> float:
        """Seconds until a probe endpoint answers so."""
        began = time.monotonic()
        while self.answers(path) is not answer:
            assert time.monotonic() - began < within_s, f"{path} after {within_s} s: {self.state()}"
            time.sleep(0.1)
        return time.monotonic() - began

    def core(self) -> int:
        """The process of the engine core."""
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                pid = int(status.parts[2])
                if os.getpgid(pid) == self.engine.process.pid and b"EngineCore" in status.read_bytes():
                    return pid
        raise AssertionError("the engine has no core")

    @contextlib.contextmanager
    def decoding(self, tokens: int = 20000) -> Iterator[None]:
        """While a client reads a long stream."""
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(
                {"model": plan.MODEL, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
            ).encode(),
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        answer = urllib.request.urlopen(request, timeout=120)
        answer.readline()
        done = threading.Event()

        def read() -> None:
            with contextlib.suppress(Exception):
                while not done.is_set() and answer.read(4096):
                    pass

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            done.set()
            reader.join(30)
            answer.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def watched(real_engines: Engines, free_port, tmp_path_factory) -> Iterator[Watched]:
    engine, folder = real_engines.shared().up(), tmp_path_factory.mktemp("liveness")
    ports = free_port(), free_port()
    (folder / "teams.yaml").write_text(json.dumps({"teams": {"demo": {"keys": [HASH]}}}))
    (folder / "gateway.yaml").write_text(
        json.dumps({
            "upstream": engine.spec.address,
            "listen": f"127.0.0.1:{ports[0]}",
            "metrics_listen": f"127.0.0.1:{ports[1]}",
        })
    )  # fmt: skip
    with (folder / "log").open("wb") as log:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", str(folder / "gateway.yaml")],
            stdout=log, stderr=log, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    url, metrics_url = (f"http://127.0.0.1:{port}" for port in ports)
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            get(metrics_url + "/-/healthy")
            break
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    yield Watched(engine, gateway, url, metrics_url, folder / "requests.jsonl")
    gateway.terminate()
    gateway.wait(30)


def test_core_that_stops_while_it_decodes(watched: Watched):
    with watched.decoding():
        watched.until("/-/engine-ready", True, 10)
        with stopped(watched.core()):
            out_s = watched.until("/-/engine-ready", False, OUT_S)
            out_state = watched.state()
            hung_s = out_s + watched.until("/-/engine-live", False, 45)
            hung_state = watched.state()
        back_s = watched.until("/-/engine-ready", True, 15)
    _log.info("decoding: out %.1f s %s, hung %.1f s %s, back %.1f s", out_s, out_state, hung_s, hung_state, back_s)
    assert ("suspect", "steps_stopped") == out_state
    assert ("hung", "steps_stopped") == hung_state


def test_core_that_stops_while_it_is_idle(watched: Watched):
    watched.until("/-/engine-ready", True, 30)
    deadline = time.monotonic() + 30
    while watched.state()[0] != "idle":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with stopped(watched.core()):
        out_s = watched.until("/-/engine-ready", False, OUT_S + 2)  # two seconds for two busy cores
        state = watched.state()
    back_s = watched.until("/-/engine-ready", True, 15)
    _log.info("idle: out %.1f s %s, back %.1f s", out_s, state, back_s)
    assert "probe_silent" == state[1]


def test_stopped_api_server(watched: Watched):
    with watched.decoding():
        with stopped(watched.engine.process.pid):
            out_s = watched.until("/-/engine-ready", False, OUT_S)
            state = watched.state()
        back_s = watched.until("/-/engine-ready", True, 15)
    _log.info("API server: out %.1f s %s, back %.1f s", out_s, state, back_s)


def test_gateway_that_was_stopped_itself_blames_nobody(watched: Watched):
    with watched.decoding():
        watched.until("/-/engine-ready", True, 15)
        with stopped(watched.gateway.pid):
            time.sleep(12)  # longer than the limit; the pause under test, in which nothing can be polled
        for _ in range(30):
            assert watched.state()[0] not in ("suspect", "hung")
            assert watched.answers("/-/engine-ready")
            time.sleep(0.1)


def test_probes_are_on_record_and_belong_to_no_team(watched: Watched):
    lines = watched.log.read_bytes().splitlines(keepends=True)
    records = [parse_line(line) for line in lines if line.endswith(b"\n")]
    probes = [record for record in records if record.team == PROBE_TEAM]
    assert {"ok"} <= {record.outcome for record in probes} <= {"ok", "client_abort"}
    assert {1} == {record.completion_tokens for record in probes if record.outcome == "ok"}
