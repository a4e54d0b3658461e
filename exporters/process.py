"""How each of our processes that run for weeks begins and keeps its memory: which event loop, which allocator, when
garbage is looked for."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

TIDY_EVERY_S = 60.0
GARBAGE_AFTER = 50_000  # objects, not Python's 700: a batch of lines has thousands, and none of them is garbage

# mallopt(3), by its numbers in malloc.h. Left alone, glibc makes an arena for each thread, up to eight for each core,
# and raises the size from which a block is mapped on its own with the largest that was freed, up to 32 MiB: what a
# burst took, in whichever thread, then stays for good. With the interpreter's lock one arena is enough. The two sizes
# are glibc's own to begin with;
# naming them keeps them there.
_ARENA_MAX = (-8, 1)
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 128 << 10), (-1, 128 << 10)


def runner(garbage_after: int = GARBAGE_AFTER, batches: bool = False) -> asyncio.Runner:
    """Runs what lasts. Call it when all is imported and nothing has made a thread: an arena that is there stays.

    batches: it takes megabytes at a time as a matter of course, which mapped anew each time would cost it a tenth of
    its pace; `tidied` alone gives them back."""
    if libc := _glibc():
        for number, value in (_ARENA_MAX,) if batches else (_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD):
            libc.mallopt(number, value)
    gc.freeze()  # what is loaded by now stays, and need not be looked through again and again
    gc.set_threshold(garbage_after)
    return asyncio.Runner(loop_factory=_fast_loop())


@contextlib.asynccontextmanager
async def tidied(every_s: float = TIDY_EVERY_S) -> AsyncIterator[None]:
    """Gives memory back now and then, while the block lasts.

    Little garbage is made, so its number alone would let it, and the interpreter's lists of freed tuples, lie for
    hours; and what a heap has free below its end goes back to the system only when it is asked for. It takes some
    milliseconds, so it is for those that answer no users: not the gateway."""
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
    """What is free on the heap goes back to the system, also from between what is in use."""
    if libc := _glibc():
        libc.malloc_trim(0)


def tasks(loop: asyncio.AbstractEventLoop) -> int:
    """Tasks of a loop that have not ended: a figure that only a leak lets grow without end."""
    return len(asyncio.all_tasks(loop))


def _glibc() -> Any:
    """None where there is another: musl and macOS give memory back in their own way."""
    with contextlib.suppress(OSError):
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    return None


def _fast_loop() -> Callable[[], Any] | None:
    try:
        import uvloop
    except ImportError:  # slower, the same otherwise
        return None
    loop: Callable[[], Any] = uvloop.new_event_loop
    return loop
