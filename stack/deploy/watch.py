"""First start of compose.watch.yml: engines of VLLM_WATCH_ENGINE_URL for the sidecar and Prometheus.

The compose service `init` runs this module. It writes the sidecar's configuration and Prometheus' targets anew at each
start, and reports for each engine whether it answers. An engine that does not answer is no error: monitoring starts
without it. An invalid URL is one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from exporters.catalogue import promql
from exporters.catalogue.metric import EngineRole
from exporters.engine.client import scrape_engine
from exporters.sidecar_config import SidecarConfig
from exporters.text import write_atomically
from stack import config
from stack.config import BadConfig
from stack.deploy import init

VARIABLE = "VLLM_WATCH_ENGINE_URL"
TARGETS = Path("/var/lib/vllm-watch/targets/vllm.json")
HOST = "host.docker.internal"  # this host, as a container reaches it
TIMEOUT_S = 5.0
_URL = re.compile(r"(?P<scheme>https?)://(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\])(?::(?P<port>\d{1,5}))?/?")
_WITH_ROLE = re.compile(r"([A-Za-z]+)=(.*)")
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|0\.0\.0\.0|\[::1?\]")


@dataclass(frozen=True, slots=True)
class WatchedEngine:
    """One engine. name: host and port as the user wrote them; address: host and port as a container reaches them; role:
    in disaggregated serving, for the sidecar and as a label of Prometheus' target."""

    name: str
    scheme: str
    address: str
    role: EngineRole | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    @property
    def is_on_this_host(self) -> bool:
        return self.address.startswith(f"{HOST}:")


def parse_engine(text: str) -> WatchedEngine:
    """Parse the URL of an engine, or ROLE=URL. Raises BadConfig."""
    with_role = _WITH_ROLE.fullmatch(text)
    role, url = with_role.groups() if with_role else ("", text)
    if role not in ("", *EngineRole):
        raise BadConfig(f"{VARIABLE}: {role!r} is no role; write {' or '.join(EngineRole)} before `=`, or no role")
    found = _URL.fullmatch(url)
    if not found or not 0 < int(found["port"] or 1) < 65536:
        without_login = re.sub(r"//[^/]*@", "//", url)
        raise BadConfig(
            f"{VARIABLE}: {without_login!r} is not the URL of an engine; write scheme, host and port without login and"
            " path, like http://localhost:8000"
        )
    port = found["port"] or {"http": "80", "https": "443"}[found["scheme"]]
    host = HOST if _LOOPBACK.fullmatch(found["host"]) else found["host"]
    name = f"{found['host']}:{port}"
    return WatchedEngine(name, found["scheme"], f"{host}:{port}", EngineRole(role) if role else None)


def parse_engines(value: str) -> tuple[WatchedEngine, ...]:
    """Parse URLs separated by commas or white space; each engine once. Raises BadConfig."""
    engines: dict[str, WatchedEngine] = {}
    for text in filter(None, re.split(r"[\s,]+", value)):
        engine = parse_engine(text)
        engines.setdefault(engine.address, engine)
    if not engines:
        raise BadConfig(f"{VARIABLE} is not set; set it to the URL of your vLLM, like http://localhost:8000")
    return tuple(engines.values())


def scrape_targets(engines: Sequence[WatchedEngine]) -> str:
    """Return the targets as Prometheus reads them (file_sd_configs)."""
    return json.dumps(
        [
            {
                "targets": [engine.address],
                "labels": {"__scheme__": engine.scheme, "instance": engine.name, **_role_of(engine)},
            }
            for engine in engines
        ],
        indent=1,
    )


def _role_of(engine: WatchedEngine) -> dict[str, str]:
    """Return the role as the sidecar's configuration and Prometheus' target both write it."""
    return {promql.ROLE: str(engine.role)} if engine.role else {}


def sidecar_yaml(template: Path, engines: Sequence[WatchedEngine]) -> str:
    """Return the sidecar's configuration with these engines. Raises BadConfig and OSError."""
    config.load(template, SidecarConfig)
    listed = [{"name": engine.name, "url": engine.url, **_role_of(engine)} for engine in engines]
    return yaml.safe_dump((yaml.safe_load(template.read_text()) or {}) | {"engines": listed}, sort_keys=False)


async def describe(engine: WatchedEngine, timeout_s: float = TIMEOUT_S) -> str:
    """Return one sentence: the engine's version, or why it does not answer and the fix."""
    try:
        text, version = await scrape_engine(engine.url, timeout_s)
    except OSError as error:
        bound = (
            "; a container reaches this host by its network address: vLLM must listen on 0.0.0.0, and the firewall must"
            " admit Docker's networks"
        )
        return f"{engine.name}: {error}{bound if engine.is_on_this_host else ''}; monitoring starts without it"
    if "\nvllm:" not in text:
        return f"{engine.name}: {engine.url}/metrics has no series of vLLM; is this the URL of a vLLM server?"
    return f"{engine.name}: answers, vLLM {version or 'of unknown version'}"


async def _describe_all(engines: Sequence[WatchedEngine]) -> list[str]:
    return await asyncio.gather(*map(describe, engines))


def main(
    environment: Mapping[str, str],
    folder: Path = init.FOLDER,
    template: Path = init.SIDECAR_TEMPLATE,
    sidecar: Path = init.SIDECAR,
    targets: Path = TARGETS,
) -> int:
    """Write the files, report the engines, and return the exit status."""
    try:
        engines = parse_engines(environment.get(VARIABLE, ""))
        init.make_password(folder)
        write_atomically(sidecar, sidecar_yaml(template, engines))
        write_atomically(targets, scrape_targets(engines), 0o644)
    except (OSError, BadConfig) as error:
        logging.getLogger("vllm_watch.init").error("%s", error)
        return 1
    sys.stdout.writelines(f"{line}\n" for line in asyncio.run(_describe_all(engines)))
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
