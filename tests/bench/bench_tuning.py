"""`make bench-tuning`: two flips on engines that the experiment starts anew for each turn, six runs of each variant,
and the verdicts.

Prefix caching off and on, with the shared-prefix workload; chunked prefill off and on, with head-of-line. Both have a
quarter of their lengths, so the long prompts of the second have 5,000 tokens. Chunked prefill is two settings: off, a
step has room for the whole context, as vLLM demands; on, for 512 tokens. Everything has one core: where each process of
a vLLM has a core of its own, they wait for each other by giving it away and taking it again."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.bench_gateway import processor

ROOT = Path(__file__).parents[2]
SCALE = 0.25
CONTEXT = 8192  # of the second: what a step must have room for where nothing is chunked
EXPERIMENTS: dict[str, Any] = {
    "prefix-caching": {
        "title": "Prefix caching",
        "workload": "shared-prefix",
        "scale": SCALE,
        "arms": {"off": {"lab": ["--no-enable-prefix-caching"]}, "on": {"lab": ["--enable-prefix-caching"]}},
    },
    "chunked-prefill": {
        "title": "Chunked prefill",
        "workload": "head-of-line",
        "scale": SCALE,
        "also": ["short:ttft_ms.p95", "short:tpot_ms.p50", "short:tpot_ms.p95", "short:e2e_ms.p95", "long:ttft_ms.p50"],
        "arms": {
            "off": {
                "lab": [
                    "--max-model-len",
                    f"{CONTEXT}",
                    "--no-enable-chunked-prefill",
                    "--max-num-batched-tokens",
                    f"{CONTEXT}",
                ]
            },
            "on": {
                "lab": ["--max-model-len", f"{CONTEXT}", "--enable-chunked-prefill", "--max-num-batched-tokens", "512"]
            },
        },
    },
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench_tuning", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}; all of them unless said"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one run of each variant, which shows that it works and judges nothing"
    )
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.experiments if name not in EXPERIMENTS]:
        parser.error(f"no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}")
    wanted, runs = chosen.experiments or list(EXPERIMENTS), ("--runs", "1") if chosen.quick else ()
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # for all that is started from here
    print(f"{processor()}; all on core {core}; load average before: {os.getloadavg()[0]:.2f}", flush=True)
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            file, began = Path(folder) / f"{name}.yaml", time.monotonic()
            file.write_text(json.dumps(EXPERIMENTS[name]))
            argv = [sys.executable, "-m", "stack.cli", "tune", str(file), "--out", f"{folder}/out", *runs]
            subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
            print(f"{name}: {time.monotonic() - began:.0f} s\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
