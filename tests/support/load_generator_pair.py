"""Our load generator and that of vLLM on one engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stack.bench import result
from stack.bench.result import Run
from stack.lab import install, plan
from tests.support.engines import PreloadedVllm, lab_engine

ROOT = Path(__file__).parents[2]


INPUT, OUTPUT, AT_ONCE = 128, 64, 4  # short-short c4


WARM_UP = 4  # requests, as many as ours sends before it counts


def command(*arguments: object, within_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """`vllm-watch` as people call it."""
    argv = [sys.executable, "-m", "stack.cli", *map(str, arguments)]
    return subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=within_s, check=False
    )


def engine_parts() -> dict[str, Path]:
    """The engine's own program and the model's folder."""
    return {name: part.path for name, part in install.install(("engine", "model"), lambda _: None).items()}


def ours(url: str, folder: Path, requests: int, seed: int) -> Run:
    """One run of our own."""
    shape = ("short-short", "--only", f"c{AT_ONCE}", "--runs", 1, "--requests", requests)
    done = command("bench", "run", *shape, "--engine", url, "--seed", seed, "--out", folder)
    assert 0 == done.returncode, done.stdout + done.stderr
    return result.read(folder).runs[0]


def forked(argv: Sequence[object], env: Mapping[str, str], engine: Path, folder: Path) -> str:
    """Run vLLM's command, or a Python script, in a process that has imported vLLM; return what it printed."""
    output, nothing = folder / "output", Path(os.devnull)
    output.touch()
    spec = lab_engine(folder, {"engine": engine, "model": folder}, plan.PORTS["vllm"])
    process = PreloadedVllm.of(spec).fork([*map(str, argv)], env, os.sched_getaffinity(0), (nothing, output, output))
    process.wait(300)
    return output.read_text()


def theirs(url: str, folder: Path, requests: int, seed: int) -> tuple[Run, Path]:
    """One run of `vllm bench serve`, taken in as `vllm-watch bench import` does, and the file it wrote."""
    folder.mkdir(parents=True)
    programs = engine_parts()
    argv = [
        programs["engine"], "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions", "--base-url", url,
        "--model", plan.MODEL,
        "--tokenizer", programs["model"], "--dataset-name", "random", "--random-input-len", INPUT,
        "--random-output-len", OUTPUT,
        "--random-range-ratio", 0, "--ignore-eos", "--temperature", 0, "--num-prompts", requests, "--max-concurrency",
        AT_ONCE,
        "--num-warmups", WARM_UP, "--seed", seed, "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "theirs.json",
    ]  # fmt: skip
    complaints = forked(argv, {"HF_HUB_OFFLINE": "1"}, programs["engine"], folder)
    assert (folder / "theirs.json").exists(), complaints
    done = command("bench", "import", folder / "theirs.json", "--out", folder / "taken-in")
    assert 0 == done.returncode, done.stdout + done.stderr
    return result.read(folder / "taken-in").runs[0], folder / "theirs.json"
