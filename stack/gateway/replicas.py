"""Reading of the list of gateway replicas: a number, a file or DNS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from stack.config import BadConfig
from stack.gateway.name_lookup import NameLookup
from stack.gateway.sharing import LOOK_S, NOTHING, WHOLE, Share, ShareWindow, Sharing, listed_share, numbered_share

_log = logging.getLogger("gateway")


def read_names(path: Path) -> list[str]:
    """Return the names in a file of replicas, one a line; # begins a comment. Raises BadConfig."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise BadConfig(f"sharing.replicas_file: {path} cannot be read: {why}") from error
    return [name for line in lines if (name := line.partition("#")[0].strip())]


class ReplicaList:
    """Shares of this replica as the list of replicas changes. A list that cannot be read leaves the last one in
    force."""

    def __init__(self, sharing: Sharing | None, now: Callable[[], float], hostname: str | None = None) -> None:
        """Raises BadConfig for a host name without the index."""
        self._now = now
        self._hostname = hostname or socket.gethostname()
        self._failed = ""
        self._lookups: dict[str, NameLookup] = {}
        self._listed: tuple[Sharing, ShareWindow] | None = None
        self.shares: tuple[Share, ...] = (WHOLE,)
        if sharing is not None:
            try:
                fixed = numbered_share(sharing, self._hostname)
            except ValueError as error:
                raise BadConfig(str(error)) from error
            if fixed is None:
                self._listed = sharing, ShareWindow(now())
                self.shares = (NOTHING,)
            else:
                self.shares = (fixed,)

    async def until_listed(self, stop: asyncio.Event) -> bool:
        """Wait until every list of the window has this replica; then the others have seen it, too. Return False if
        `stop` comes first."""
        if self._listed is None:
            return True
        said = await self._look(*self._listed)
        _log.info("%s; the gateway listens when the other replicas have seen it", said)
        while NOTHING in self.shares and not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
            await self._look(*self._listed)
        return not stop.is_set()

    async def follow(self, changed: Callable[[tuple[Share, ...]], None]) -> None:
        """Read the list again and again, and report other shares, until cancelled."""
        while self._listed is not None:
            await asyncio.sleep(LOOK_S)
            before, said = self.shares, await self._look(*self._listed)
            if self.shares != before:
                _log.info("%s", said)
                changed(self.shares)

    async def _look(self, sharing: Sharing, window: ShareWindow) -> str:
        """Read the list once; return it in a sentence."""
        try:
            names, own, source = await self._names(sharing)
        except (OSError, BadConfig) as error:
            if str(error) != self._failed:
                _log.warning("%s; the last list of replicas stays in force", error)
            self._failed = str(error)
            said = "the list of replicas cannot be read"
        else:
            self._failed = ""
            share = listed_share(names, own)
            window.see(share, self._now())
            said = (
                f"{source} lists {share.replicas} replicas, this one at place {share.index}"
                if share.replicas
                else f"{source} does not list this replica ({', '.join(own) or 'without an address'})"
            )
        self.shares = window.shares(self._now())
        return said

    async def _names(self, sharing: Sharing) -> tuple[list[str], list[str], str]:
        """Return the listed names, those of this replica, and their source. Raises OSError and BadConfig."""
        if (path := sharing.replicas_file) is not None:
            return await asyncio.to_thread(read_names, Path(path)), [sharing.name or self._hostname], path
        host = sharing.replicas_dns or ""
        lookups = [self._lookups.setdefault(name, NameLookup(name)) for name in (host, self._hostname)]
        try:
            async with asyncio.timeout(LOOK_S):
                listed, own = [await each.addresses() for each in lookups]
        except OSError as error:
            why = str(error) or f"no answer within {LOOK_S:g} s"
            raise OSError(f"sharing.replicas_dns: {host} or {self._hostname} cannot be resolved: {why}") from error
        return sorted(set(listed)), sorted(set(own)), host
