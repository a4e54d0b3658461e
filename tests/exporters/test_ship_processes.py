"""Random histories of real shipper processes: SIGKILL, SIGTERM, rotation, a store that is absent at the first start, is
full, conflicts or fails before or after it stored. Each row is in the data set once.

VLLM_WATCH_SHIP_PROCESSES=20 python -m pytest tests/exporters/test_ship_processes.py    for more of them"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from exporters.dataset.objects import S3Access
from exporters.dataset.query import RequestSource, open_requests
from tests.support import s3_standin
from tests.support.installed import ROOT
from tests.support.ports import free_port
from tests.support.s3_standin import S3Standin
from tests.support.wait import eventually

HISTORIES = int(os.environ.get("VLLM_WATCH_SHIP_PROCESSES", "2"))
S3_FAULTS = (
    "409 <Code>ConditionalRequestConflict</Code>", "507 <Code>XMinioStorageFull</Code>", "503 <Code>SlowDown</Code>",
    "500", "stored then 500", "stored then cut", "late",
)  # fmt: skip
STEPS = ("write", "write", "write", "rotate", "truncate", "kill", "kill", "end", "fault", "fault", "wait")


class ShipHistory:
    """One log, one shipper at a time, and a store: a folder, or a stand-in of S3."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.folder, self.log = random.Random(seed), folder, folder / "requests.jsonl"
        self.rows = self.files = 0
        self.standin = S3Standin() if seed % 2 else None
        self.data = folder / "data"
        self.process: subprocess.Popen[bytes] | None = None
        config: dict[str, object] = {
            "dataset": str(self.data), "cluster": "c", "writer": "w", "requests_log": ["requests.jsonl"],
            "state": "state", "listen": f"127.0.0.1:{free_port()}", "seal_s": 0.3,
        }  # fmt: skip
        self.s3 = None
        if self.standin:
            keys = f"aws_access_key_id = {s3_standin.ACCESS_KEY}\naws_secret_access_key = {s3_standin.SECRET_KEY}\n"
            (folder / "keys").write_text(f"[default]\n{keys}")
            s3 = {"endpoint": self.standin.endpoint, "region": s3_standin.REGION, "retry_s": 1.0}
            config |= {"dataset": "s3://logs/d", "s3": s3 | {"credentials_file": "keys"}}
            self.s3 = S3Access(**s3, credentials_file=str(folder / "keys"))  # type: ignore[arg-type]
        self.location = str(config["dataset"])
        (folder / "ship.yaml").write_text(json.dumps(config))
        self.break_store()

    def run(self, steps: int) -> None:
        try:
            self.write()
            self.start()
            # what is rotated before anybody looked is history
            eventually(lambda: "serving" in (self.folder / "out").read_text(), what="the first look at the log")
            for _ in range(steps):
                getattr(self, self.rng.choice(STEPS))()
            self.heal()
            self.start()
            eventually(lambda: self.stored() == Counter(f"r{n}" for n in range(self.rows)), what="each row once")
            self.end(start=False)
            assert self.stored() == Counter(f"r{n}" for n in range(self.rows))
            assert not (self.standin and self.standin.rejected)
        finally:
            if self.process:
                self.process.kill()
                self.process.wait()
            if self.standin:
                self.standin.close()

    def start(self) -> None:
        if self.process:
            self.check()
            return
        command = [sys.executable, "-m", "stack.cli", "ship", "run", "--config", "ship.yaml"]
        with (self.folder / "out").open("ab") as out:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, env=environment)

    def check(self) -> None:
        assert self.process
        assert self.process.poll() is None, (self.folder / "out").read_text()

    # --- steps

    def write(self) -> None:
        row = {"ts": "2026-11-26T10:00:00.000Z", "team": "a", "model": "m", "outcome": "ok", "prompt_tokens": 5}
        with self.log.open("a") as log:
            for _ in range(self.rng.randrange(1, 30)):
                log.write(json.dumps({"request_id": f"r{self.rows}", **row}) + "\n")
                self.rows += 1

    def rotate(self) -> None:
        self.files += 1
        self.log.rename(f"{self.log}.{self.files}")
        self.write()

    def truncate(self) -> None:
        self.files += 1
        shutil.copy(self.log, f"{self.log}.{self.files}")
        os.truncate(self.log, 0)
        self.write()

    def kill(self) -> None:
        self.stop(signal.SIGKILL)
        self.start()

    def end(self, start: bool = True) -> None:
        self.stop(signal.SIGTERM)
        if start:
            self.start()

    def stop(self, number: signal.Signals) -> None:
        """End the process; its exit status says nothing where it is still starting."""
        self.check()
        assert self.process
        self.process.send_signal(number)
        self.process.wait(60)
        self.process = None

    def wait(self) -> None:
        time.sleep(self.rng.uniform(0.1, 1.5))

    def fault(self) -> None:
        self.heal() if self.rng.random() < 0.5 else self.break_store()

    def break_store(self) -> None:
        if self.standin:
            times, where = self.rng.randrange(1, 9), self.rng.choice(("", "writers/", "manifests/", "parquet"))
            self.standin.faults += [("PUT", where, self.rng.choice(S3_FAULTS))] * times
        elif not self.data.is_file():  # a file in its place: nothing can be read or written below it
            if self.data.exists():
                self.data.rename(self.folder / "away")
            self.data.touch()

    def heal(self) -> None:
        if self.standin:
            self.standin.faults.clear()
        elif self.data.is_file():
            self.data.unlink()
            if (away := self.folder / "away").exists():
                away.rename(self.data)

    def stored(self) -> Counter[str]:
        source = RequestSource(location=self.location, s3=self.s3, cache=self.folder / "cache")
        with open_requests(source) as data:
            return Counter(record.request_id for record in data.records())


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_processes_ship_each_row_once(tmp_path: Path, seed: int) -> None:
    ShipHistory(tmp_path, seed).run(steps=20)
