"""Addresses in settings, and the sockets that listen on them."""

from __future__ import annotations

import asyncio
import errno
import socket

from exporters.config import BadConfig

BACKLOG = 1024


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of '127.0.0.1:9401' or '[::1]:9401'; port 0 picks a free one. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address; write host:port, such as 127.0.0.1:9401")
    return host.strip("[]"), int(port)


async def bound_sockets(setting: str, address: str, shared_port: bool) -> list[socket.socket]:
    """Return listening sockets, one per address of the host name. Raises BadConfig."""
    host, port = split_address(address)
    made: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, where in dict.fromkeys(found):
            made.append(one := socket.socket(family, kind, protocol))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(where)
            one.listen(BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in made:
            one.close()
        if error.errno == errno.EADDRINUSE:
            message = f"{address} is taken by another program: stop it, or choose another with {setting}"
        else:
            message = f"{address} cannot be used: {error.strerror or error}; choose another with {setting}"
        raise BadConfig(f"{setting}: {message}") from None
    return made
