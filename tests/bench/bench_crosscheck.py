"""`make bench-crosscheck`: our figures beside those of `vllm bench serve`, on one engine and one shape, in turns.

Each round is two runs, of ours and of theirs, in the order A, B, B, A, ... The engine has one core and no prefix cache,
both clients have the other core. What each measured is compared like two variants of an experiment: a difference
between the tools would be called better or worse."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from exporters.catalogue import exposition_parser, vllm
from stack.bench.result import Run
from stack.tuning.comparison import metric_of
from stack.tuning.run_comparison import compare_runs
from tests.bench.bench_gateway import processor
from tests.support.engines import get, started
from tests.support.load_generator_pair import AT_ONCE, INPUT, OUTPUT, engine_parts, ours, theirs
from tests.support.ports import free_port

ROUNDS = 6  # the least for a verdict
TTFT, ENGINE = vllm.TIME_TO_FIRST_TOKEN.name, "engine_ttft_ms.mean"
FIGURES = (
    "ttft_ms.mean",
    "ttft_ms.p50",
    "tpot_ms.mean",
    "tpot_ms.p50",
    "e2e_ms.p50",
    "tokens_per_second",
    "qps",
    ENGINE,
)


class Counted(NamedTuple):
    """What the engine has counted by now, warm-ups too: tokens of prompts, and its own TTFT by number and sum."""

    prompt_tokens: float
    first: float
    first_s: float

    @classmethod
    def at(cls, url: str) -> Counted:
        found = exposition_parser.parse(get(f"{url}/metrics"))
        return cls(*(found.total(name) or 0.0 for name in (vllm.PROMPT_TOKENS.name, f"{TTFT}_count", f"{TTFT}_sum")))


def turns(url: str, folder: Path, rounds: int, requests: int) -> tuple[list[Run], list[Run]]:
    found: dict[str, list[Run]] = {"ours": [], "theirs": []}
    for round_ in range(rounds):
        for name in ("ours", "theirs") if round_ % 2 == 0 else ("theirs", "ours"):
            began, seed, before = time.time(), 1000 + 2 * round_ + (name == "theirs"), Counted.at(url)
            here = folder / f"{name}-{round_}"
            run = ours(url, here, requests, seed) if name == "ours" else theirs(url, here, requests, seed)[0]
            tokens, first, first_s = (after - then for after, then in zip(Counted.at(url), before, strict=True))
            figures = {**run.figures, ENGINE: 1000 * first_s / first}
            found[name].append(
                msgspec.structs.replace(
                    run,
                    variant=name,
                    workload="short-short",
                    seed=seed,
                    started_s=began,
                    ended_s=time.time(),
                    figures=figures,
                )
            )
            told = ", ".join(f"{figure} {figures[figure]:.4g}" for figure in FIGURES)
            print(f"{name}: {told}; the engine read {tokens / first:.1f} tokens a prompt", flush=True)
    return found["ours"], found["theirs"]


def main(arguments: Sequence[str]) -> None:
    cores, quick = sorted(os.sched_getaffinity(0)), "--quick" in arguments
    rounds, requests = (2, 12) if quick else (ROUNDS, 40)
    print(
        f"{processor()}; engine on core {cores[0]}, clients on core {cores[-1]}; load average before:"
        f" {os.getloadavg()[0]:.2f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = started(Path(folder), engine_parts(), free_port(), cores[0], "--no-enable-prefix-caching")
        try:
            engine.up()
            os.sched_setaffinity(0, {cores[-1]})
            a, b = turns(engine.spec.address, Path(folder), rounds, requests)
        finally:
            engine.end()
    found = compare_runs(a, b, metrics=tuple(map(metric_of, FIGURES)))
    print(f"\n{INPUT} tokens in, {OUTPUT} out, {AT_ONCE} at once, {requests} requests a run, {rounds} runs of each")
    print(
        "\n| | ours: median (lowest to highest) | theirs | theirs / ours | 95 % interval | verdict"
        " |\n|---|---|---|---|---|---|"
    )
    for one in found.findings[: len(FIGURES)]:
        shown = " | ".join(f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})" for values in one.values)
        ratio, low, high = (f"{value:.3f}" if value is not None else "" for value in (one.effect, one.low, one.high))
        print(f"| {one.metric.figure} | {shown} | {ratio} | {low} to {high} | {one.verdict} |")
    for check in found.checks:
        print(f"{check.name}: {check.what}")
    raise SystemExit(any(one.verdict in ("better", "worse") for one in found.findings[: len(FIGURES)]))


if __name__ == "__main__":
    main(sys.argv[1:])
