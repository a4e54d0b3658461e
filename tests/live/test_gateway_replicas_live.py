"""Three gateways behind HAProxy before one real vLLM with few seats: what clients see while gateways are replaced one
after the other, the store is lost, and one gateway dies; and whether the logs of all equal the engine to the token."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporters.catalogue import reconciled, vllm
from exporters.catalogue.gateway import LEASE_LOST, LEASE_REPLICAS
from stack.lab import plan
from tests.support.engines import Engine, Engines
from tests.support.gateway_fleet import FleetClients, GatewayFleet
from tests.support.ports import free_offset
from tests.support.wait import until

pytestmark = pytest.mark.engine

GATEWAYS = ("gateway-0", "gateway-1", "gateway-2")
SEATS = 4
COUNTED = (vllm.PROMPT_TOKENS, vllm.PREFIX_CACHE_HITS, vllm.GENERATION_TOKENS)


@pytest.fixture(scope="module")
def engine(real_engines: Engines) -> Iterator[Engine]:
    found = real_engines.own("--max-num-seqs", str(SEATS)).up()
    yield found
    found.end()


async def test_new_gateways_and_a_lost_store_fail_no_request(engine: Engine, part: Any, free_port: Any, tmp_path: Path):
    """And then a gateway is killed: only requests fail that it had."""
    programs = {name: part(name).path for name in ("valkey", "haproxy")}
    before = [engine.figure(metric) for metric in COUNTED]
    fleet = GatewayFleet(
        tmp_path / "lab", programs, engine.spec.address, len(GATEWAYS), SEATS, free_offset(plan.PORTS.values())
    )
    async with fleet:
        await until(lambda: leases(fleet, 3), "all gateways have a lease")
        await until(lambda: settled(fleet), "the first sidecar compares all logs with the engine")
        clients = FleetClients(fleet.url, fleet.keys["default"], "r", tokens=8)
        clients.begin(9)
        await until(lambda: all(len(log) > 5 for log in fleet.records()), "every gateway serves requests")

        for number, name in enumerate(GATEWAYS):
            assert 0 == await fleet.stop(name)
            served = len(fleet.records()[number])
            fleet.start(name)
            await fleet.healthy(name)
            await until(lambda: len(fleet.records()[number]) > served + 2, f"{name} serves again")  # noqa: B023
        assert {} == clients.failed

        await fleet.stop("valkey", signal.SIGKILL)
        await until(lambda: lost(fleet, 1), "every gateway has lost its lease")
        answered = len(clients.answered)
        await until(lambda: len(clients.answered) > answered + 10, "fixed shares serve on")
        fleet.start("valkey")
        await until(lambda: lost(fleet, 0), "every gateway has a lease again")
        answered = len(clients.answered)
        await until(lambda: len(clients.answered) > answered + 10, "leases serve on")
        await clients.end()
        assert {} == clients.failed

        await until(lambda: sum(map(len, fleet.records())) >= len(clients.answered), "the last records are written")
        records = [record for log in fleet.records() for record in log]
        assert clients.answered == {record.request_id for record in records}
        assert len(records) == len(clients.answered), "each request is in one log, once"
        counted = [
            sum(getattr(record, name) or 0 for record in records)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        ]
        assert [engine.figure(metric) - was for metric, was in zip(COUNTED, before, strict=True)] == counted
        await until(lambda: reconciles(fleet, len(records)), "the sidecar has compared all logs with the engine")

        clients = FleetClients(fleet.url, fleet.keys["default"], "k", tokens=24)
        clients.begin(9)
        await until(lambda: len(clients.answered) > 12, "requests of after that")
        await fleet.stop("gateway-1", signal.SIGKILL)
        dead = {record.request_id for record in fleet.records()[1]}
        answered = len(clients.answered)
        await until(lambda: len(clients.answered) > answered + 15, "the others serve on")
        await clients.end()
        others = {record.request_id for log in (fleet.records()[0], fleet.records()[2]) for record in log}
        assert len(clients.failed) <= SEATS + 9
        assert not set(clients.failed) & others, "no request of another gateway has failed"
        assert not set(clients.failed) & dead


async def lost(fleet: GatewayFleet, flag: float) -> bool:
    """Return whether every gateway says so."""
    return all([(await fleet.page(name)).total(LEASE_LOST.name) == flag for name in GATEWAYS])


async def leases(fleet: GatewayFleet, replicas: float) -> bool:
    return all([(await fleet.page(name)).total(LEASE_REPLICAS.name) == replicas for name in GATEWAYS])


async def settled(fleet: GatewayFleet) -> bool:
    return bool((await fleet.page("sidecar")).total(reconciled.SETTLED.name))


async def reconciles(fleet: GatewayFleet, requests: int) -> bool:
    """Return whether the first sidecar has settled all requests, and found no difference."""
    page, peer = await fleet.page("sidecar"), await fleet.page("sidecar-1")
    assert not peer.total(reconciled.ENGINE.name)
    of = {
        metric: page.total(metric.name, kind="requests")
        for metric in (reconciled.LOGGED, reconciled.ENGINE, reconciled.MISSING_IN_LOG, reconciled.EXTRA_IN_LOG)
    }
    assert (0, 0) == (of[reconciled.MISSING_IN_LOG] or 0, of[reconciled.EXTRA_IN_LOG] or 0)
    return of[reconciled.LOGGED] == requests == of[reconciled.ENGINE]
