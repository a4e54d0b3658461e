"""`make bench-golden`: false alarms of golden checks on a real vLLM for the CPU, what they find, and what they cost.

The CPU engine repeats every bit at every batch size, so its checks cannot show false alarms of noise. --noise gives it
the noise of a GPU: a sitecustomize module, seen by the engine alone, splits each product of matrices at random places
and rounds the partial sums (`mild`: in float32; `strong`: in the model's dtype). Damage is a copy of the model."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from exporters.engine.golden_state import GoldenResult
from stack.golden.baseline import Baseline
from stack.golden.check import check_engine
from stack.golden.prompts import DEFAULT_PROMPTS
from stack.golden.record import RecordPlan, record
from stack.lab import install
from tests.support.engines import Engine, Engines
from tests.support.golden_load import company
from tests.support.model_damage import KINDS

SIZES = (1, 2, 4, 8, 16, 32)
NOISE = Path(__file__).parents[1] / "support" / "gpu_noise"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def engines(folder: Path, model: Path, noise: str | None) -> Engines:
    """Return what starts engines of this model, with or without noise."""
    if noise:
        os.environ |= {"PYTHONPATH": str(NOISE), "GOLDEN_NOISE": noise}
    else:
        os.environ.pop("PYTHONPATH", None)
    engine = install.find("engine")
    assert engine is not None, "vllm-watch lab install"
    return Engines(folder, {"engine": engine.path, "model": model}, free_port)


async def checks(engine: Engine, baseline: Baseline, times: int) -> list[GoldenResult]:
    """Check an engine at every batch size in turn."""
    found = []
    for number in range(times):
        async with company(engine.spec.address, SIZES[number % len(SIZES)] - 1):
            found.append(await check_engine(engine.spec.address, baseline))
        if len(found) % len(SIZES) == 0:
            print(told("  so far", found), file=sys.stderr, flush=True)
    return found


def told(name: str, results: list[GoldenResult]) -> str:
    verdicts = Counter(f"{one.verdict}/{one.cause}" for one in results)
    tokens = sorted(one.tokens for one in results)
    seconds = sorted(one.seconds for one in results)
    middle = len(results) // 2
    z2, max_z = (max((getattr(one, name) or 0.0 for one in results), default=0.0) for name in ("z2", "max_z"))
    return (
        f"{name}: {len(results)} checks: {dict(verdicts)}; tokens {tokens[middle]} (most {tokens[-1]}), seconds"
        f" {seconds[middle]:.2f} (most {seconds[-1]:.2f}); largest Z2 {z2:.2f}, z {max_z:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", type=int, default=200)
    parser.add_argument("--noise", choices=("mild", "strong"))
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--damage", default="", help=f"kinds, with commas between them: {', '.join(KINDS)}")
    parser.add_argument("--damaged-checks", type=int, default=4)
    asked = parser.parse_args()
    model = install.find("model")
    assert model is not None, "vllm-watch lab install"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        healthy = engines(folder, model.path, asked.noise)
        try:
            engine = healthy.own("--max-num-seqs", "32", *(("--dtype", "bfloat16") if asked.noise else ())).up()
            began = time.monotonic()
            plan = RecordPlan(prompts=DEFAULT_PROMPTS, runs=asked.runs)
            baseline = asyncio.run(record(engine.spec.address, plan))
            print(f"recorded {baseline.runs} runs in {time.monotonic() - began:.0f} s; {baseline.limits}; bits"
                  f" {baseline.engine.logit_bits}; greedy varies: {baseline.greedy_varies}", flush=True)  # fmt: skip
            print(told("unchanged", asyncio.run(checks(engine, baseline, asked.checks))), flush=True)
        finally:
            healthy.end()
        for kind in filter(None, asked.damage.split(",")):
            python = install.find("engine").path.parent / "python"  # type: ignore[union-attr]
            script = Path(__file__).parents[1] / "support" / "model_damage.py"
            subprocess.run([python, script, kind, model.path, folder / kind], check=True)
            damaged = engines(folder, folder / kind, asked.noise)
            try:
                engine = damaged.own("--max-num-seqs", "32", *(("--dtype", "bfloat16") if asked.noise else ())).up()
                results = asyncio.run(checks(engine, baseline, asked.damaged_checks))
                print(told(kind, results), flush=True)
            finally:
                damaged.end()


if __name__ == "__main__":
    main()
