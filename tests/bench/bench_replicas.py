"""Waiting time of a small team beside a flood of another one: through one gateway, and through three behind HAProxy
that share the same slots in a Valkey, before one real vLLM with few seats."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from exporters.statistics import quantile
from stack.gateway.lease import PERIOD_S
from stack.lab import install
from tests.support.engines import Engines
from tests.support.gateway_fleet import FleetClients, GatewayFleet
from tests.support.wait import until

SEATS, FLOOD, ASKED_EVERY_S = 4, 24, 0.2
FACTOR = 1.2  # of the wait behind one gateway, beside one period of the leases
OFFSET = 16000


@dataclass(frozen=True)
class Waits:
    """Waits of the small team, in milliseconds, and what the engine did meanwhile."""

    gateways: int
    requests: int
    p50_ms: float
    p99_ms: float
    flood_per_s: float
    failed: int


async def measured(programs: dict[str, Path], engine: str, gateways: int, for_s: float, folder: Path) -> Waits:
    """Flood the default team, ask now and then as the demo team, and read the waits from the logs."""
    async with GatewayFleet(folder, programs, engine, gateways, SEATS, OFFSET + 100 * gateways) as fleet:
        flood = FleetClients(fleet.url, fleet.keys["default"], "flood", tokens=48)
        demo = FleetClients(fleet.url, fleet.keys["demo"], "demo", tokens=4, pause_s=ASKED_EVERY_S)
        flood.begin(FLOOD)
        await until(lambda: len(flood.answered) > FLOOD, "the flood runs")
        before = len(flood.answered)
        demo.begin(2)
        await asyncio.sleep(for_s)
        flooded = len(flood.answered) - before
        await asyncio.gather(flood.end(), demo.end())
        waits = [
            record.queue_ms for log in fleet.records() for record in log
            if record.team == "demo" and record.queue_ms is not None
        ]  # fmt: skip
    return Waits(
        gateways, len(waits), quantile(waits, 0.5), quantile(waits, 0.99), flooded / for_s,
        len(flood.failed) + len(demo.failed),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    parts = {name: part.path for name in ("engine", "model", "valkey", "haproxy") if (part := install.find(name))}
    with tempfile.TemporaryDirectory() as place:
        engines = Engines(Path(place), parts, _free_port)
        try:
            engine = engines.own("--max-num-seqs", str(SEATS)).up().spec.address
            found = [
                asyncio.run(measured(parts, engine, number, asked.seconds, Path(place) / f"lab-{number}"))
                for number in (1, 3)
            ]
        finally:
            engines.end()
    one, three = found
    limit_ms = FACTOR * one.p99_ms + 1000 * PERIOD_S
    print(json.dumps([asdict(each) for each in found], indent=1))
    print(f"p99 of the wait: {one.p99_ms:.0f} ms through one, {three.p99_ms:.0f} ms through three;"
          f" limit {limit_ms:.0f} ms; {os.cpu_count()} cores")  # fmt: skip
    raise SystemExit(three.p99_ms > limit_ms)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
