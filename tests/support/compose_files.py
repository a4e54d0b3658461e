"""The compose files and what docker compose makes of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stack.lab.install import InstalledPart

ROOT = Path(__file__).parents[2]


DEPLOY = ROOT / "stack/deploy"


BASE, CPU, WATCH = ROOT / "docker-compose.yml", DEPLOY / "compose.cpu.yml", DEPLOY / "compose.watch.yml"


REPLICAS = DEPLOY / "compose.replicas.yml"


class Reset(yaml.SafeLoader):
    """YAML that knows compose's tag for taking something away."""


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), Reset)  # noqa: S506  a SafeLoader with one harmless tag


def resolved(part: Callable[[str], InstalledPart], variables: Mapping[str, str], *overlays: Path) -> Any:
    files = [word for file in (BASE, *overlays) for word in ("--file", str(file))]
    told = subprocess.run(
        [part("compose").path, *files, "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(told.stdout)


READY = {
    "docker": 'case "$1" in compose) echo 2.40.3;; *) echo 28.5.2;; esac',
    "nvidia-smi": "echo 580.82.07",
    "nvidia-container-runtime-hook": "true",
}


SECURE, SECURE_STANDINS = DEPLOY / "compose.secure.yml", ROOT / "tests/support/compose_standins/secure.yml"
