"""Movable time limit of a task, cheaper than asyncio.timeout.

A request has two, and each quarter of a stream's time between tokens moves one. Invariant: a deadline that is moved
back keeps its timer, which looks again when it fires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class Deadline:
    """Time limit for a `with` block in this task; none until `after` sets it. The block then raises TimeoutError.

    more_s: called when the time is over; returns the seconds that are granted once more, 0 for none."""

    __slots__ = ("_cancelling", "_expired", "_loop", "_more_s", "_task", "_timer", "_timer_at", "_when")

    def __init__(self, task: asyncio.Task[None], more_s: Callable[[], float] | None = None) -> None:
        self._task = task
        self._more_s = more_s
        self._loop = task.get_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._when = 0.0
        self._cancelling = 0
        self._expired = False

    def after(self, seconds: float) -> None:
        """Set the deadline, or move it."""
        self._when = when = self._loop.time() + seconds
        if self._timer is None:
            self._start(when)
        elif when < self._timer_at:
            self._timer.cancel()
            self._start(when)

    def clear(self) -> None:
        """Remove the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> Deadline:
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        self._more_s = None  # it refers to who holds this; a cycle would wait for the collector
        # another cancellation goes before ours, as in asyncio.timeout
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _start(self, when: float) -> None:
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._loop.time() < self._when:
            self._start(self._when)
        elif self._more_s is not None and (more_s := self._more_s()) > 0:
            self.after(more_s)
        else:
            self._expired = True
            self._task.cancel()
