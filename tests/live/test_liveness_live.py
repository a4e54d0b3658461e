"""A real vLLM behind a gateway: one that hangs (core, worker or API server stopped, a deadlock), and one that restarts,
sleeps, or has a gateway that was stopped itself.

The gateway is a process whose limits are half of the default ones: 5 s until an engine leaves rotation, 15 s until it
counts as hung, and a probe of an idle engine every 2 s.
The engine is one of its own: its worker is a process, as on GPUs, and a plug-in can make its core fail."""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue import gateway as gateway_metrics
from exporters.requests.record import PROBE_TEAM, parse_line
from stack.drill.faults import stopped
from stack.gateway import make_key
from stack.lab import plan, supervisor
from tests.support import core_faults
from tests.support.engines import Engine, Engines, engine_states, get
from tests.support.wait import eventually

pytestmark = [pytest.mark.engine, pytest.mark.prometheus]

ROOT = Path(__file__).parents[2]
KEY, HASH = make_key("demo")
LIMITS = {"out_s": 5.0, "hung_s": 15.0, "idle_probe_s": 2.0}
OUT_S = 3 * LIMITS["out_s"]  # two of them for a busy machine
HUNG_S = 3 * LIMITS["hung_s"]

_log = logging.getLogger("liveness")


@dataclass
class Watched:
    """engine_env: of the process. faults: folder of the files of the plug-in."""

    engines: Engines
    engine: Engine
    engine_env: dict[str, str]
    faults: Path
    gateway: subprocess.Popen[bytes]
    url: str
    metrics_url: str
    log: Path

    def state(self) -> tuple[str, str]:
        (state,) = engine_states(self.metrics_url).values()
        return state

    def answers(self, path: str) -> bool:
        try:
            get(self.metrics_url + path)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return False
            raise
        return True

    def until(self, path: str, answer: bool, within_s: float = 60.0) -> float:
        """Seconds until a probe endpoint answers so."""
        began = time.monotonic()
        eventually(lambda: self.answers(path) is answer, f"{path} being {answer}", within_s)
        return time.monotonic() - began

    def until_idle(self) -> None:
        self.until("/-/engine-ready", True)
        eventually(lambda: self.state()[0] == "idle", "an idle engine")

    def turns(self) -> float:
        """Turns of the gateway's event loop that it has timed, ten a second."""
        page = exposition_parser.parse(get(self.metrics_url + "/metrics"))
        found = page.total(gateway_metrics.LOOP_LAG.name + "_count")
        assert found is not None
        return found

    def outlast(self, seconds: float) -> None:
        """Return when the gateway's event loop has run for so long."""
        end = self.turns() + 10 * seconds
        eventually(lambda: self.turns() >= end, f"{seconds} s of the gateway", within_s=60 + seconds)

    def hang(self, way: str) -> AbstractContextManager[None]:
        if way == "deadlock":
            return self.fault("deadlock")
        return stopped(self.engine.process.pid if way == "API server" else self.engine.part(way))

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        (self.faults / name).touch()
        try:
            yield
        finally:
            (self.faults / name).unlink()

    def post(self, path: str) -> None:
        """Ask the engine for something that only development mode has."""
        urllib.request.urlopen(urllib.request.Request(self.engine.spec.address + path, method="POST"), timeout=30)

    def ask(self, **more: object) -> urllib.request.Request:
        body = json.dumps({"model": plan.MODEL, "prompt": "a", **more}).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        return urllib.request.Request(self.url + "/v1/completions", body, headers)

    @contextlib.contextmanager
    def decoding(self, tokens: int = 20000) -> Iterator[None]:
        """While a client reads a long stream."""
        answer = urllib.request.urlopen(self.ask(max_tokens=tokens, stream=True, ignore_eos=True), timeout=120)
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
    def seen(self) -> Iterator[set[tuple[str, str]]]:
        """States and evidence from here on, complete when the block ends."""
        found: set[tuple[str, str]] = set()
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.2):
                with contextlib.suppress(OSError):
                    found.add(self.state())

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield found
        finally:
            done.set()
            looking.join(30)


@pytest.fixture(scope="module")
def watched(real_engines: Engines, free_port, tmp_path_factory) -> Iterator[Watched]:
    folder, faults = tmp_path_factory.mktemp("liveness"), tmp_path_factory.mktemp("faults")
    env = core_faults.install(faults) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    engine = real_engines.own(**env)
    ports = free_port(), free_port()
    (folder / "teams.yaml").write_text(json.dumps({"teams": {"demo": {"keys": [HASH]}}}))
    (folder / "gateway.yaml").write_text(
        json.dumps({
            "upstream": engine.spec.address,
            "listen": f"127.0.0.1:{ports[0]}",
            "metrics_listen": f"127.0.0.1:{ports[1]}",
            "liveness": LIMITS,
        })
    )  # fmt: skip
    with (folder / "log").open("wb") as log:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", str(folder / "gateway.yaml")],
            stdout=log, stderr=log, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=supervisor._die_with_parent,
        )  # fmt: skip
    url, metrics_url = (f"http://127.0.0.1:{port}" for port in ports)
    engine.up()
    yield Watched(real_engines, engine, env, faults, gateway, url, metrics_url, folder / "requests.jsonl")
    gateway.terminate()
    gateway.wait(30)


@pytest.fixture(scope="module")
def alerts(watched: Watched, part, free_port, tmp_path_factory) -> Iterator[str]:
    """Alerts of a real Prometheus that scrapes engine and gateway as the lab's does, but each second."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    targets = {"vllm": watched.engine.spec.address, "gateway": watched.metrics_url}
    (folder / "prometheus.yml").write_text(
        json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "alerts/prometheus/page.yaml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
                for job, url in targets.items()
            ],
        })
    )  # fmt: skip
    with (folder / "log").open("wb") as log:
        prometheus = subprocess.Popen(
            [
                part("prometheus").path, f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log, preexec_fn=supervisor._die_with_parent,
        )  # fmt: skip
    eventually(lambda: get(f"http://127.0.0.1:{port}/-/ready"), what="a ready Prometheus")
    yield f"http://127.0.0.1:{port}/api/v1/alerts"
    prometheus.terminate()
    prometheus.wait(30)


def firing(alerts: str) -> set[str]:
    found = json.loads(get(alerts))["data"]["alerts"]
    return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}


# ---- hung


@pytest.mark.parametrize("way", ["EngineCore", "Worker", "deadlock", "API server"])
def test_engine_that_hangs_while_it_decodes(watched: Watched, way: str):
    with watched.decoding():
        watched.until("/-/engine-ready", True)
        with watched.hang(way):
            out_s = watched.until("/-/engine-ready", False, OUT_S)
            # Of a silent API server the steps stop first: the gateway waits 2 s for an answer.
            state = ("suspect", "api_silent" if way == "API server" else "steps_stopped")
            eventually(lambda: watched.state() == state, f"{state}, and not {watched.state()}")
        back_s = watched.until("/-/engine-ready", True)
    _log.info("decoding, %s: out %.1f s, back %.1f s", way, out_s, back_s)


@pytest.mark.parametrize("way", ["Worker", "deadlock"])
def test_engine_that_hangs_while_it_is_idle(watched: Watched, way: str):
    """A core that is stopped while idle is in test_prefill_decode_live.py."""
    watched.until_idle()
    with watched.hang(way):
        out_s = watched.until("/-/engine-ready", False, OUT_S + LIMITS["idle_probe_s"])
        state = watched.state()
    back_s = watched.until("/-/engine-ready", True)
    _log.info("idle, %s: out %.1f s %s, back %.1f s", way, out_s, state, back_s)
    assert ("suspect", "probe_silent") == state


def test_deadlock_pages_although_the_running_gauge_reads_0(watched: Watched, alerts: str):
    """Published failure: the gauge read 0 throughout a hang."""
    with watched.decoding(), watched.fault("blind"):
        watched.until("/-/engine-ready", True)
        eventually(lambda: watched.engine.figure(vllm.NUM_REQUESTS_RUNNING) == 0, what="a running gauge of 0")
        with watched.hang("deadlock"):
            out_s = watched.until("/-/engine-ready", False, OUT_S)
            out_state = watched.state()
            hung_s = out_s + watched.until("/-/engine-live", False, HUNG_S)
            hung_state = watched.state()
            eventually(lambda: "VLLMEngineFrozen" in firing(alerts), what="VLLMEngineFrozen")
        back_s = watched.until("/-/engine-ready", True)
    _log.info("gauge 0: out %.1f s %s, hung %.1f s %s, back %.1f s", out_s, out_state, hung_s, hung_state, back_s)
    assert ("suspect", "output_stopped") == out_state
    assert ("hung", "output_stopped") == hung_state
    eventually(lambda: "VLLMEngineFrozen" not in firing(alerts), what="the end of VLLMEngineFrozen")


# ---- not hung


def test_sleep_and_pause_are_planned(watched: Watched):
    """On a CPU a sleep frees no memory; the scheduler stands still as elsewhere."""
    for begin, end, evidence in (("/sleep?level=1", "/wake_up", "asleep"), ("/pause?mode=keep", "/resume", "paused")):
        with watched.seen() as seen:
            watched.post(begin)
            watched.until("/-/engine-ready", False)
            watched.outlast(LIMITS["out_s"])
            watched.post(end)
            watched.until_idle()
        _log.info("%s: %s", begin, seen)
        assert "hung" not in {state for state, _ in seen}
        assert ("draining", evidence) in seen
    with watched.seen() as afterwards:
        watched.outlast(2)
    assert "draining" not in {state for state, _ in afterwards}, "what was paused is so no more"


def test_gateway_that_was_stopped_itself_blames_nobody(watched: Watched):
    with watched.decoding():
        watched.until("/-/engine-ready", True)
        with stopped(watched.gateway.pid):
            time.sleep(LIMITS["out_s"] + 1)  # the pause under test, in which nothing can be polled
        with watched.seen() as seen:
            watched.outlast(3)
    assert "hung" not in {state for state, _ in seen}, "suspect alone may be an engine that a busy machine starves"


def test_probes_are_on_record_and_belong_to_no_team(watched: Watched):
    lines = watched.log.read_bytes().splitlines(keepends=True)
    records = [parse_line(line) for line in lines if line.endswith(b"\n")]
    probes = [record for record in records if record.team == PROBE_TEAM]
    assert {"ok"} <= {record.outcome for record in probes} <= {"ok", "client_abort"}
    assert {1} == {record.completion_tokens for record in probes if record.outcome == "ok"}


def test_restarts_are_no_hang(watched: Watched):
    """By SIGTERM and by SIGKILL; `make bench-soak ARGS=--liveness` has twenty. With its worker in the core an engine
    starts sooner."""
    env = watched.engine_env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with watched.seen() as seen:
        for number in (signal.SIGTERM, signal.SIGKILL):
            watched.engine.end(number)
            # The next engine may be up sooner than the gateway looks again.
            eventually(lambda: watched.state() == ("loading", "refused"), "the gateway sees that the engine is gone")
            watched.engine = watched.engines.again(watched.engine, **env).up()
            urllib.request.urlopen(watched.ask(max_tokens=2), timeout=60).close()
            watched.until_idle()
    _log.info("restarts: %s", seen)
    assert {state for state, _ in seen} <= {"healthy", "idle", "slow", "loading", "suspect"}
