"""`make bench-truth`: percentiles by PromQL beside those of the request log and of three clients, on a real vLLM.

Each client sends each shape as a team of its own through the gateway, so that a team's series hold the requests of one
run and nothing else. The queries are those that panels are made of; where they are to read classic buckets, the metric
is one without a native form. Method and results: docs/internals/percentiles.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stack.lab import install
from tests.bench.bench_gateway import ROOT, environment, processor
from tests.support.engines import started
from tests.support.load_generator_pair import engine_parts
from tests.support.ports import free_port
from tests.support.truth_scene import (
    Client,
    Guidellm,
    OpenAI,
    Scene,
    Shape,
    VllmBench,
    measured,
    summary,
    table,
    team_of,
    written,
)

PAGE = ROOT / "docs/internals/percentiles.md"
REQUESTS = 511  # of each client and shape; no quantile's rank is a whole number, so none lies between two requests
GUIDELLM = ("torch==2.13.0+cpu", "guidellm==0.8.1")  # the engine's torch: any other build brings CUDA libraries along


SHAPES = (
    Shape("short", 64, 32, 8),
    Shape("long prompt", 2048, 16, 4),
    Shape("long output", 64, 256, 8),
    Shape("bursts", 64, 32, 40, every_s=2.0),
)


# ---- clients


# ---- the comparison


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a few requests of the openai client; its figures mean little"
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each client and shape")
    parser.add_argument(
        "--only", action="append", choices=("openai", "vllm", "guidellm"), help="this client, repeatable"
    )
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the log and the clients' files there")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started
    names = options.only or (["openai"] if options.quick else ["vllm", "guidellm", "openai"])
    cores = sorted(os.sched_getaffinity(0))
    programs = engine_parts() | {"prometheus": install.install(("prometheus",), lambda _: None)["prometheus"].path}
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-truth-", dir="/var/tmp"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        clients: list[Client] = [OpenAI()] * ("openai" in names)
        if "vllm" in names:
            clients.insert(0, VllmBench(programs["engine"], folder))
        if "guidellm" in names:
            clients.insert(0, Guidellm(environment("guidellm", GUIDELLM).with_name("guidellm"), folder))
        engine = started(folder, programs, free_port(), cores[0])
        stack.callback(engine.end)
        engine.up()
        os.sched_setaffinity(0, {cores[-1]})
        runs = [(client, shape, team_of(client, shape)) for client in clients for shape in SHAPES]
        scene = stack.enter_context(
            Scene.running(folder, engine.spec.address, {team: shape for _, shape, team in runs}, programs, cores[-1])
        )
        rows = list(measured(scene, runs, 61 if options.quick else options.requests))
    told = (
        f"{processor()}, {time.strftime('%Y-%m-%d', time.gmtime())}; {options.requests} requests of each client and"
        " shape."
    )
    print(f"{told}\n\n{summary(rows)}\n\n{table(rows)}\n")
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), rows, told))
    faults = [fault for row in rows for fault in row.faults]
    print("\n".join(faults))
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
