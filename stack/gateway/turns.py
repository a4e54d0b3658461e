"""Shares of the teams in what is no work of an engine: turns at one thread, and places for requests without a record.

Invariants of turns: a team has at most one piece of work in the thread while others wait. Work that nobody waits for
any more keeps its turn until the thread is done with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from stack.gateway.refusals import RETRY_MESSAGES, RequestEnd

MOST_WAITING = 256  # of a team; what is longer than SMALL_BYTES is held by the budget of bodies as well
MOST_UNRECORDED = 16  # requests of a team that leave no record, at the engines or on the way there
AGAIN_S = 1.0  # Retry-After of one more: they take milliseconds

T = TypeVar("T")


class Turns:
    """A thread that starts with its first work. A team of None is the gateway itself."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._busy = False
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # in the order of their turns

    async def run(self, team: str | None, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns, in this team's turn. Raises RequestEnd where too much of the team waits."""
        if self._busy:
            await self._turn(team)
        self._busy = True
        try:
            done = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except RuntimeError:  # the gateway stops
            self._pass_on()
            raise
        done.add_done_callback(lambda _: self._pass_on())
        return await asyncio.shield(done)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, team: str | None) -> None:
        queue = self._waiting.setdefault(team, deque())
        if len(queue) >= MOST_WAITING:
            raise RequestEnd("bodies_full", f"{MOST_WAITING} bodies of team {team} wait to be read; retry later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has just got its turn
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next team, which then waits behind the others."""
        while self._waiting:
            team, queue = next(iter(self._waiting.items()))
            del self._waiting[team]
            turn = queue.popleft()
            if queue:
                self._waiting[team] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


class UnrecordedRequests:
    """Requests that leave no record and take no slot, by team."""

    def __init__(self) -> None:
        self._count = Counter[str]()

    @contextlib.contextmanager
    def place(self, team: str) -> Iterator[None]:
        """Count one request of a team. Raises RequestEnd where it has as many as it may."""
        if self._count[team] >= MOST_UNRECORDED:
            raise RequestEnd("team_limit", RETRY_MESSAGES["team_limit"].format(team=team), AGAIN_S)
        self._count[team] += 1
        try:
            yield
        finally:
            self._count[team] -= 1
            if not self._count[team]:
                del self._count[team]
