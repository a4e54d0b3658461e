"""Thread for work on large bodies, so that streams go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

LARGE_BYTES = 256 << 10  # worth the change of threads, 0.1 ms: reading costs 2 ms a MiB, up to 15 ms of the worst, in which no stream moves

T = TypeVar("T")


class LargeBodies:
    """One thread, which starts with the first large body: two would take turns at the interpreter lock, and hold twice the memory."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-body")

    async def run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns; for a body of more than LARGE_BYTES it runs in the thread."""
        if size <= LARGE_BYTES:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
