"""A process that lasts gives freed memory back, seen on real processes; what they would keep otherwise is measured
beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Threads take and free at once; then one large block is freed, after which glibc would take such sizes from its heap;
# then many, with a little left above them so that the heap cannot shrink from its end.
BURSTS = """
import ctypes, sys, threading
from tests.support import memory
if sys.argv[1] == "ours":
    from exporters import process
    process.runner()
if sys.argv[1] == "batches":
    from exporters import process
    process.runner(batches=True)

def burst(size, count):
    blocks = [bytearray(size) for _ in range(count)]
    together.wait()
    del blocks

together = threading.Barrier(6)
threads = [threading.Thread(target=burst, args=(64 << 10, 50)) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
before = memory.mib()
large = bytearray(16 << 20)
del large
blocks = [bytearray(1 << 20) for _ in range(40)]
above = [bytearray(1000) for _ in range(100)]
del blocks
if sys.argv[1] == "batches":
    process.trim()
kept = memory.mib() - before
sys.stdout.write(f"{kept:.1f}\\n")
sys.stdout.flush()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""


def after_bursts(whose: str) -> tuple[float, int]:
    """MiB that a process keeps of 40 that it freed, and how many arenas it has."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BURSTS, whose], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    kept, _, arenas = done.stdout.partition("\n")
    return float(kept), arenas.count("<heap nr=")


def test_what_is_freed_goes_back_and_threads_share_an_arena():
    kept_mib, arenas = after_bursts("ours")
    assert kept_mib < 2
    assert 1 == arenas


def test_tidying_returns_memory():
    """Who takes much at a time gives it back when it is tidied."""
    kept_mib, arenas = after_bursts("batches")
    assert kept_mib < 2
    assert 1 == arenas


def test_left_alone_it_stays_in_an_arena_for_each_thread():
    """Else the test above would prove nothing."""
    kept_mib, arenas = after_bursts("untouched")
    assert kept_mib > 30
    assert arenas > 1


def test_garbage_goes_and_what_was_loaded_is_not_looked_through():
    """In a process of its own: the tests' must stay as it is."""
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=60, check=True)
    assert ["1", "0", "True", "True"] == done.stdout.split()


GARBAGE = """
import asyncio, gc, weakref
from exporters import process
from tests.support.wait import until

class Ring:
    def __init__(self):
        self.ring = self

async def main():
    ring = weakref.ref(Ring())
    before = ring() is not None
    async with process.tidied(0.05):
        await until(lambda: ring() is None, "the ring is collected")
        after, frozen = ring() is not None, gc.get_freeze_count() > 1000
    await asyncio.sleep(0)
    print(int(before), int(after), frozen, process.tasks(asyncio.get_running_loop()) == 1)

with process.runner() as runner:
    runner.run(main())
"""
