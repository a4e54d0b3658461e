"""A process that has imported vLLM and forks real engines. tests/support/engines.py runs it by the engine's own Python.

Of the 17 s of CPU that `vllm serve` takes until it answers, 15 s are two processes' imports. Here they are paid once:
each line on standard input asks for one process, {"argv": ..., "env": ..., "core": ..., "files": [input, output,
errors]}, and is answered by its number; it leads a group of its own. argv is that of vLLM's own command, or a Python
script with its arguments. An engine has the same processes as on a shell; its core and its workers are forked too,
which is vLLM's default as a library, while its command for CPUs asks for new interpreters.

Invariant: no thread runs and nothing of torch has been used when an engine is forked."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from typing import Any

MODULES = (
    "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.multiproc_executor",    "vllm.model_executor.models.llama",
)  # fmt: skip
PR_SET_PDEATHSIG = 1


def become(asked: dict[str, Any]) -> None:
    """Run `vllm` or a script in this fork; never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.sched_setaffinity(0, asked["core"])
    for target, (path, mode) in enumerate(
        zip(asked["files"], (os.O_RDONLY, *[os.O_WRONLY | os.O_APPEND] * 2), strict=True)
    ):
        os.dup2(os.open(path, mode), target)
    os.environ.update(asked["env"])
    sys.path[1:1] = filter(None, asked["env"].get("PYTHONPATH", "").split(":"))
    importlib.invalidate_caches()
    sys.argv = asked["argv"]
    if sys.argv[0].endswith(".py"):
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        importlib.import_module("vllm.entrypoints.cli.main").main()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Import vLLM, say so, and fork a process for each line."""
    for name in MODULES:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        if "get_mp_context" in vars(module):
            module.get_mp_context = lambda: fork  # type: ignore[attr-defined]
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
            become(asked)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
