"""Setup of long-running processes: event loop, allocator and garbage collection."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

TIDY_EVERY_S = 60.0
GARBAGE_AFTER = 50_000  # objects, not Python's 700: a batch of lines has thousands of live objects

# mallopt(3), by its numbers in malloc.h. Left alone, glibc makes an arena for each thread, up to eight for each core,
# and raises the size from which a block is mapped on its own with the largest that was freed, up to 32 MiB: what a
# burst took, in whichever thread, then stays for good. With the interpreter's lock one arena is enough. The two sizes
# are glibc's own to begin with;
# naming them keeps them there.
_ARENA_MAX = (-8, 1)
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 128 << 10), (-1, 128 << 10)


def runner(garbage_after: int = GARBAGE_AFTER, batches: bool = False) -> asyncio.Runner:
    """Return the runner of a long-running process. Call it after all imports and before any thread starts.

    An existing malloc arena stays. batches: the process regularly takes megabytes at a time, which would cost a
    tenth of its speed if mapped anew each time; `tidied` alone releases them."""
    if libc := _glibc():
        for number, value in (_ARENA_MAX,) if batches else (_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD):
            libc.mallopt(number, value)
    gc.freeze()  # loaded objects stay, so they need not be scanned
    gc.set_threshold(garbage_after)
    return asyncio.Runner(loop_factory=_fast_loop())


@contextlib.asynccontextmanager
async def tidied(every_s: float = TIDY_EVERY_S) -> AsyncIterator[None]:
    """Release memory periodically while the block runs.

    With little garbage, thresholds alone would leave it, and the interpreter's free lists, for hours; and free heap
    memory returns to the system only on request. It takes some milliseconds, so use it where no users wait: not in
    the gateway."""
    task = asyncio.create_task(_tidy(every_s), name="tidy")
    try:
        yield
    finally:
        task.cancel()


async def _tidy(every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        gc.collect()
        trim()


def trim() -> None:
    """Return free heap memory to the system, also from between used blocks."""
    if libc := _glibc():
        libc.malloc_trim(0)


def tasks(loop: asyncio.AbstractEventLoop) -> int:
    """Return the number of unfinished tasks of a loop, which only grows with a leak."""
    return len(asyncio.all_tasks(loop))


def _glibc() -> Any:
    """Return glibc; None on musl and macOS, which return memory on their own."""
    with contextlib.suppress(OSError):
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    return None


def _fast_loop() -> Callable[[], Any] | None:
    try:
        import uvloop
    except ImportError:  # slower, otherwise equal
        return None
    loop: Callable[[], Any] = uvloop.new_event_loop
    return loop
