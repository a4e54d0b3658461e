"""Plug-in of vLLM that makes its engine core fail, each fault while a file of its name is in the folder CORE_FAULTS.

deadlock: before its next step the core waits for a lock that another thread holds; the GIL is free, as in a deadlock of
two threads. blind: num_requests_running reads 0. vLLM loads it by the entry point that `install` writes."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

FOLDER = "CORE_FAULTS"
_lock = threading.Lock()


def install(folder: Path) -> dict[str, str]:
    """Install the plug-in there; return the environment of an engine that loads it. The faults are files of the same
    folder."""
    shutil.copy(__file__, folder)
    about = folder / "core_faults-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: core_faults\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ncore_faults = core_faults:register\n")
    return {FOLDER: str(folder), "PYTHONPATH": str(folder)}


def register() -> None:
    """Patch this process. vLLM calls it in each of its processes, in some several times."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    step, make_stats, folder = EngineCoreProc._process_engine_step, Scheduler.make_stats, Path(os.environ[FOLDER])
    if step.__module__ == __name__:
        return

    def step_behind_a_lock(core):
        if (folder / "deadlock").exists():
            _wait_for_lock(folder / "deadlock")
        return step(core)

    def make_blind_stats(*arguments, **more):
        stats = make_stats(*arguments, **more)
        if stats is not None and (folder / "blind").exists():
            stats.num_running_reqs = 0
        return stats

    EngineCoreProc._process_engine_step, Scheduler.make_stats = step_behind_a_lock, make_blind_stats


def _wait_for_lock(cause: Path) -> None:
    held = threading.Event()

    def hold() -> None:
        with _lock:
            held.set()
            while cause.exists():
                time.sleep(0.1)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    with _lock:
        pass
