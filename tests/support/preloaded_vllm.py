"""A process that has imported vLLM and forks real engines. tests/support/engines.py runs it by the engine's own Python.

Of the 17 s of CPU that `vllm serve` takes until it answers, 15 s are two processes' imports. Here they are paid once:
each line on standard input asks for one engine, {"argv": ..., "env": ..., "log": ..., "core": ...}, and is answered by
the number of its process, the leader of a group of its own. The engine runs vLLM's own command in the same two
processes; its engine core is forked too (vLLM's default as a library; its command for CPUs asks for a new interpreter).

Invariant: no thread runs and nothing of torch has been used when an engine is forked."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

MODULES = (
    "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
)  # fmt: skip
PR_SET_PDEATHSIG = 1


def become_engine(asked: dict[str, Any]) -> None:
    """Run `vllm serve` in this fork; never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.sched_setaffinity(0, {asked["core"]})
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, target)
    sys.argv = asked["argv"]
    importlib.import_module("vllm.entrypoints.cli.main").main()
    os._exit(0)


def main() -> None:
    """Import vLLM, say so, and fork an engine for each line."""
    for name in MODULES:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    importlib.import_module("vllm.v1.engine.utils").get_mp_context = lambda: fork  # type: ignore[attr-defined]
    if threading.active_count() > 1:
        raise SystemExit(f"vLLM's import started threads: {threading.enumerate()}")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what ends
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become_engine(asked)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
