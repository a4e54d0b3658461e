"""`make bench-runner`: what the load that the bench makes costs itself, against a stub that costs next to nothing.

The stub has one core, the runner the other. One figure for requests (one event each), one for events (long streams).
Method: docs/guides/tuning.md."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence

import uvloop

from stack.bench.load import BenchTarget, LoadRun, Prepared
from stack.bench.workload_plan import PlannedRequest, Segment
from tests.bench.bench_gateway import module, processor, running
from tests.support.ports import free_port

ROUNDS = 5
AIMS = {"requests": 5_000, "events": 100_000}  # per second on one core
# how many requests, tokens of each, how many at once
SHAPES = {"requests": (20_000, 1, 32), "events": (2_000, 200, 32)}


def asks(count: int, tokens: int) -> list[Prepared]:
    body = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"tokens=%d gap_ms=0"}]}' % tokens
    found = []
    for number in range(count):
        ask = PlannedRequest(number=number, kind=None, segments=(Segment("run:0:0:prompt", 250),), output_tokens=tokens)
        found.append(Prepared(ask, f"bench-0-{number}", "/v1/chat/completions", body, 250))
    return found


async def once(url: str, count: int, tokens: int, at_once: int) -> tuple[float, float]:
    """Seconds of wall and of CPU that so many requests took."""
    prepared, load = asks(count, tokens), LoadRun(BenchTarget(url, "tiny"))
    wall, cpu = time.perf_counter(), time.process_time()
    await load.send(prepared, at_once)
    took = time.perf_counter() - wall, time.process_time() - cpu
    wrong = [done.record.reason for done in load.done if done.record.outcome != "ok"]
    if wrong or len(load.done) != count:
        raise SystemExit(f"{len(wrong)} of {count} requests failed: {set(wrong)}")
    return took


def main(arguments: Sequence[str]) -> None:
    cores, quick = sorted(os.sched_getaffinity(0)), "--quick" in arguments
    port = free_port()
    print(
        f"{processor()}; core {cores[-1]} for the runner, core {cores[0]} for the stub; load average before:"
        f" {os.getloadavg()[0]:.2f}"
    )
    print("\n| | per second of wall | per second of CPU | us of CPU each | aim, per second |\n|---|---|---|---|---|")
    with running(module("bench_gateway_stub", port), port, cores[0]):
        os.sched_setaffinity(0, {cores[-1]})
        for name, (count, tokens, at_once) in SHAPES.items():
            count //= 50 if quick else 1
            took = [
                uvloop.run(once(f"http://127.0.0.1:{port}", count, tokens, at_once))
                for _ in range(1 if quick else ROUNDS)
            ]
            wall, cpu = (statistics.median(each[at] for each in took) for at in (0, 1))
            things = count * (tokens if name == "events" else 1)
            print(
                f"| {name} | {things / wall:,.0f} | {things / cpu:,.0f} | {1e6 * cpu / things:.1f} | {AIMS[name]:,} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
