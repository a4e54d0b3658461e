"""Look-up of a host name in a thread of its own.

The event loop has few threads for look-ups: a name that gets no answer, as of a stopped container or with a resolver
that hangs, would hold up the names of engines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading


class NameLookup:
    """Addresses of one host name. At most one look-up runs: a call that finds it running waits for the same one."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._running: asyncio.Future[list[str]] | None = None

    async def addresses(self) -> list[str]:
        """Return the addresses in the resolver's order. Raises OSError."""
        self._running = self._running or _look_up(self.host)
        running = self._running
        try:
            return await asyncio.shield(running)
        finally:
            if running.done():  # one that outlasts the call is awaited by the next
                self._running = None


def _look_up(host: str) -> asyncio.Future[list[str]]:
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()
    found.add_done_callback(lambda done: done.cancelled() or done.exception())  # its call may have ended

    def tell(addresses: list[str], error: OSError | None) -> None:
        if found.done():
            return
        if error is None:
            found.set_result(addresses)
        else:
            found.set_exception(error)

    def work() -> None:
        addresses: list[str] = []
        failure: OSError | None = None
        try:
            addresses = [str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except OSError as error:
            failure = error
        except UnicodeError as error:  # an empty or too long label
            failure = OSError(str(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, addresses, failure)

    threading.Thread(target=work, name="name-lookup", daemon=True).start()
    return found
