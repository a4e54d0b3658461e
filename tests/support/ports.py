"""Loopback ports for servers that a test starts: chosen by the kernel and held until the test session ends.

A held port is bound by this process with SO_REUSEADDR and does not listen. Linux gives it to nobody who asks for any
port and to no outgoing connection, while a server that sets SO_REUSEADDR, as nearly all do, may bind it and listen.
Nobody answers there until then."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

_held: list[socket.socket] = []


def free_port() -> int:
    """Return a loopback port that is held for a server of the caller."""
    return _hold(0)


def free_offset(ports: Iterable[int]) -> int:
    """Return an offset that makes each of the ports a free one below the ephemeral range, and hold all of them."""
    wanted = sorted(set(ports))
    choice = random.Random()
    for _ in range(200):
        offset, before = choice.randrange(100, 32_700 - wanted[-1]), len(_held)
        try:
            for port in wanted:
                _refuse_taken(port + offset)
                _hold(port + offset)
        except OSError:
            for taken in _held[before:]:
                taken.close()
            del _held[before:]
        else:
            return offset
    raise OSError("no offset leaves all ports free")


def _refuse_taken(port: int) -> None:
    """Raise OSError for a port that anybody has, a holder in another process included."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def _hold(port: int) -> int:
    holder = socket.socket()
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        raise
    _held.append(holder)
    number: int = holder.getsockname()[1]
    return number
