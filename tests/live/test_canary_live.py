"""A canary in front of real vLLMs: one with a single seat is rolled back, an engine beside itself is good, and one that
hangs loses its share.

Gateway and `vllm-watch canary --act` are processes; the times of the policy are seconds where a deployment has minutes
and a day."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporters.catalogue import vllm
from exporters.events import log as events
from stack.drill.faults import stopped
from stack.gateway import make_key
from stack.lab import plan
from tests.support.engines import Engine, Engines, get
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
KEY, HASH = make_key("demo")
CLIENTS = 6
OUT_S = 5.0  # until a silent engine leaves rotation
HUNG_S = 6 * OUT_S

_log = logging.getLogger("canary")


@dataclass
class Rollout:
    """A gateway with two variants, and the controller."""

    folder: Path
    gateway: subprocess.Popen[bytes]
    url: str
    metrics_url: str

    def share(self) -> float:
        share: float = yaml.safe_load((self.folder / "teams.yaml").read_text())["canary"]["share"]
        return share

    def steps(self) -> list[str]:
        found = events.read(self.folder / "events.jsonl")[0]
        return [tag.removeprefix("step=") for event in found for tag in event.tags if tag.startswith("step=")]

    def said(self) -> str:
        return (self.folder / "canary.log").read_text()

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """While several clients read short streams, each prompt another one."""
        done = threading.Event()
        clients = [threading.Thread(target=self._ask, args=(number, done), daemon=True) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            done.set()
            for client in clients:
                client.join(30)

    def _ask(self, number: int, done: threading.Event) -> None:
        at = 0
        while not done.is_set():
            at += 1
            body = {"model": plan.MODEL, "prompt": f"{number} {at}", "max_tokens": 12, "stream": True}
            request = urllib.request.Request(
                self.url + "/v1/completions", json.dumps(body | {"ignore_eos": True}).encode(),
                {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
            )  # fmt: skip
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()

    @contextlib.contextmanager
    def controlled(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [
            sys.executable, "-m", "stack.cli", "canary", "teams.yaml", "--log", "requests.jsonl", "--act",
            "--reload", f"kill -HUP {self.gateway.pid}", "--gateway", self.metrics_url, "--events", "events.jsonl",
        ]  # fmt: skip
        with (self.folder / "canary.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def rollout(free_port: Callable[[], int], tmp_path: Path) -> Iterator[Callable[..., Rollout]]:
    running: list[subprocess.Popen[bytes]] = []

    def begin(stable: Engine, canary: Engine, policy: dict[str, Any], out_s: float = 4 * OUT_S) -> Rollout:
        ports = free_port(), free_port()
        teams = {
            "teams": {"demo": {"keys": [HASH]}},
            "upstreams": {
                "old": {"url": stable.spec.address},
                "new": {"url": canary.spec.address, "variant": "canary"},
            },
            "canary": {"share": 0.0, "block_s": 0.1, "block_requests": 2, "settle_s": 1.0, "step_s": 2.0} | policy,
        }
        (tmp_path / "teams.yaml").write_text(yaml.safe_dump(teams, sort_keys=False))
        listen = {
            "listen": f"127.0.0.1:{ports[0]}",
            "metrics_listen": f"127.0.0.1:{ports[1]}",
            "liveness": {"out_s": out_s, "hung_s": 3 * out_s},
        }
        (tmp_path / "gateway.yaml").write_text(json.dumps(listen))
        (tmp_path / "requests.jsonl").touch()
        with (tmp_path / "gateway.log").open("wb") as log:
            gateway = subprocess.Popen(
                [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", str(tmp_path / "gateway.yaml")],
                stdout=log, stderr=log, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        running.append(gateway)
        made = Rollout(tmp_path, gateway, *(f"http://127.0.0.1:{port}" for port in ports))
        eventually(lambda: get(made.metrics_url + "/-/healthy"), within_s=30, what="the gateway")
        return made

    yield begin
    for gateway in running:
        gateway.terminate()
        gateway.wait(30)


@pytest.fixture(scope="module")
def engines(real_engines: Engines) -> Iterator[tuple[Engine, Engine]]:
    """The usual one, and one with a single seat."""
    usual, narrow = real_engines.shared(), real_engines.own("--max-num-seqs", "1")
    yield usual.up(), narrow.up()
    narrow.end()


def test_a_canary_with_fewer_seats_is_rolled_back(engines, rollout):
    run = rollout(*engines, {"steps": [0.4], "decide_s": 300.0, "limit_s": 600.0})
    with run.loaded(), run.controlled() as controller:
        assert 3 == controller.wait(120), run.said()
    _log.info("rolled back: %s", run.said().splitlines()[-1])
    assert ["start", "roll_back"] == run.steps()
    assert 0.0 == run.share()
    slower = events.read(run.folder / "events.jsonl")[0][-1].what
    assert re.search(r"\+\d|\d times", slower), "a quarter more is +25 %, from twice on it is so many times"
    assert "The canary was stopped" in (run.folder / "canary-report.html").read_text()


def test_an_engine_beside_itself_is_good(engines, rollout):
    """The margin is wide, since a tenth of a second of a busy CPU stands for a minute of a GPU."""
    policy = {"steps": [0.3, 0.5], "alpha": 0.001, "tolerance": 1.0, "margin": 0.6, "decide_s": 10.0, "limit_s": 300.0}
    run = rollout(engines[0], engines[0], policy)
    with run.loaded(), run.controlled() as controller:
        assert 0 == controller.wait(360), run.said()
    _log.info("good: %s", run.said().splitlines()[-1])
    assert ["start", "raise", "promote"] == run.steps()
    assert 0.5 == run.share()


@pytest.mark.breaks_engine
def test_a_hung_canary_loses_its_share(engines, rollout):
    """Its core is stopped. Too few requests make a block, so that nothing but the guard acts."""
    run = rollout(*engines, {"steps": [0.2], "block_requests": 100000}, out_s=OUT_S)
    answered = engines[1].figure(vllm.REQUEST_SUCCESS)
    with run.loaded(), run.controlled() as controller:
        eventually(lambda: run.share() == 0.2, what="the first step")
        eventually(lambda: engines[1].figure(vllm.REQUEST_SUCCESS) > answered, what="requests at the canary")
        with stopped(engines[1].part("EngineCore")):
            eventually(lambda: run.share() == 0.0, within_s=HUNG_S, what="a canary without a share")
            assert 3 == controller.wait(30), run.said()
    assert ["start", "roll_back"] == run.steps()
    assert "out of rotation" in events.read(run.folder / "events.jsonl")[0][-1].what
