"""`make bench-admission ARGS=--leases`: what a store of leases costs one gateway.

Two figures, on a real Valkey. CPU of the renewals with 100 active teams, as a share of a core, in this process and
without requests: with one renewal a period, and with a team that begins to wait all the time. Throughput of one gateway
with a store and without, both before the stub of `make bench-gateway`, one after the other in each round."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop

from stack.gateway import clock
from stack.gateway.admission import Admission
from stack.gateway.admission_state import Ticket
from stack.gateway.lease import AT_ONCE_S
from stack.gateway.lease_client import LeaseStore
from stack.gateway.lease_renewal import LeaseRenewal
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.policy import Capacity, Policy, Team
from stack.lab import install
from tests.bench.bench_gateway import (
    CONCURRENT,
    Bench,
    Contender,
    Sizes,
    _gateway,
    figure_of,
    module,
    processor,
    running,
)
from tests.bench.bench_gateway_load import Shape
from tests.support.ports import free_port

TEAMS = 100
CPU_MOST, LOSS_MOST = 0.01, 0.02


def services_of(policy: Policy) -> Any:
    """The part of the services that a renewal uses."""
    life = SimpleNamespace(terms=SimpleNamespace(policy=policy), shares=(), draining=False)
    return SimpleNamespace(admission=Admission(policy), life=life, metrics=GatewayMetrics(), now=clock.now)


async def renewal_cpu(url: str, seconds: float, *, limits: bool, waking: bool) -> tuple[float, float]:
    """Return the share of a core, and the renewals a second. Every team has requests that run and that wait.

    limits: each team has max_running and max_in_flight. waking: a team begins to wait whenever a renewal may begin."""
    team = Team(max_running=2, max_in_flight=8) if limits else Team()
    policy = Policy(teams={f"team-{n}": team for n in range(TEAMS)}, capacity=Capacity(slots=TEAMS, tokens=100_000))
    services = services_of(policy)
    fleet = f"{limits}-{waking}"  # the gateway before this one may still hold what its requests use
    renewal = LeaseRenewal(LeaseStore(url=url, fleet=fleet), "bench", services)
    renewals = 0
    exchange = renewal._client.renew

    async def counted(request: Any) -> Any:
        nonlocal renewals
        renewals += 1
        return await exchange(request)

    renewal._client.renew = counted  # type: ignore[method-assign]
    task = asyncio.create_task(renewal.run())
    tickets = [
        services.admission.ask(name, 100, 100, clock.now(), lambda: None, lambda _: None)
        for name in policy.teams for _ in range(3)
    ]  # fmt: skip
    assert all(isinstance(one, Ticket) for one in tickets)
    while services.admission.running < TEAMS:  # the store is calm at first
        await asyncio.sleep(0.05)
    renewals, before, began = 0, time.process_time(), time.monotonic()
    while time.monotonic() < began + seconds:
        if waking:
            services.admission.wanting()
        await asyncio.sleep(AT_ONCE_S / 2)
    wall_s = time.monotonic() - began
    cpu = (time.process_time() - before) / wall_s
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await renewal.leave()
    return cpu, renewals / wall_s


async def idle_cpu(seconds: float) -> float:
    """Return the share of a core that the measuring loop itself takes."""
    before, began = time.process_time(), time.monotonic()
    while time.monotonic() < began + seconds:
        await asyncio.sleep(AT_ONCE_S / 2)
    return (time.process_time() - before) / (time.monotonic() - began)


def renewals_cost(url: str, seconds: float) -> bool:
    idle = uvloop.run(idle_cpu(seconds))
    print(f"| {TEAMS} active teams | renewals/s | CPU of one core | us a renewal |\n|---|---|---|---|")
    kept = True
    for limits in (False, True):
        for waking in (False, True):
            cpu, rate = uvloop.run(renewal_cpu(url, seconds, limits=limits, waking=waking))
            cpu = max(0.0, cpu - idle)
            name = ("with" if limits else "without") + " limits of teams" + (", a team begins to wait" * waking)
            print(f"| {name} | {rate:.1f} | {cpu:.2%} | {cpu / rate * 1e6:.0f} |", flush=True)
            kept = kept and (waking or cpu <= CPU_MOST)
    return kept


async def throughput(bench: Bench) -> None:
    for turn in range(bench.sizes.rounds):
        for contender in bench.contenders[:: -1 if turn % 2 else 1]:
            await bench._timed("json at once", contender, Shape(), CONCURRENT)


def store_cost(url: str, sizes: Sizes) -> bool:
    """Print the loss of throughput and the added CPU for each request, pair by pair."""
    cores = sorted(os.sched_getaffinity(0))
    core, other = cores[-1], cores[0]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        port = free_port()
        stub = Contender("direct", "", port, stack.enter_context(running(module("bench_gateway_stub", port), port)))
        contenders = []
        for kind, more in (("local", {}), ("shared", {"sharing": {"replicas": 1, "store": {"url": url}}})):
            (folder := Path(name) / kind).mkdir()
            contender = stack.enter_context(_gateway(folder, f"http://127.0.0.1:{port}", core, **more))
            contender.name = kind
            contenders.append(contender)
        time.sleep(3)  # the store is calm at first
        os.sched_setaffinity(0, {other})
        bench = Bench(sizes, stub, contenders, (core, other))
        uvloop.run(throughput(bench))
    local, shared = (bench.samples[kind, "json at once"] for kind in ("local", "shared"))
    loss = figure_of([1 - ours.per_s / was.per_s for was, ours in zip(local, shared, strict=True)])
    added = figure_of([ours.cpu_us / was.cpu_us - 1 for was, ours in zip(local, shared, strict=True)])
    for name, samples in (("local", local), ("shared", shared)):
        rates, cpu = figure_of([it.per_s for it in samples]), figure_of([it.cpu_us for it in samples])
        print(f"{name}: {rates.text('.0f')} requests/s, {cpu.text('.0f')} us CPU a request")
    print(f"throughput lost: {loss.text('.1%')}; CPU a request more: {added.text('.1%')}")
    return loss.median <= LOSS_MOST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    parser.add_argument("--only", choices=("renewals", "throughput"))
    options = parser.parse_args()
    part = install.find("valkey")
    if part is None:
        raise SystemExit("valkey is not installed; vllm-watch lab install valkey")
    print(processor())
    port = free_port()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        words = [part.path, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with running(words, port):
            url, kept = f"redis://127.0.0.1:{port}", []
            if options.only != "throughput":
                kept.append(renewals_cost(url, 1.0 if options.quick else 6.0))
            if options.only != "renewals":
                kept.append(
                    store_cost(url, Sizes(rounds=2, seconds=0.3) if options.quick else Sizes(rounds=60, seconds=0.5))
                )
    if not options.quick and not all(kept):
        raise SystemExit(f"missed: renewals {CPU_MOST:.0%} of a core, throughput {LOSS_MOST:.0%} less")


if __name__ == "__main__":
    main()
