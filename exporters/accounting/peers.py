"""Client of the sidecars that read the logs of other gateways."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from exporters.accounting.fleet_log import SidecarTotals
from exporters.net.bounded_read import read_bounded
from exporters.net.http_client import HttpClientConfig, request_options

PATH = "/log-totals"
MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PeerClient:
    """Client of every sidecar that a URL's host name resolves to, such as all replicas of a headless Service."""

    session: aiohttp.ClientSession
    url: str
    timeout_s: float
    http_config: HttpClientConfig | None = None

    async def totals(self) -> list[SidecarTotals]:
        """Return the totals of each sidecar. Raises OSError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError and
        BadConfig if any of them cannot be had."""
        url = urlsplit(self.url)
        host, port = url.hostname or "", url.port or {"http": 80, "https": 443}[url.scheme]
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(where[0]) for family, *_, where in found if family == found[0][0])
        options: Mapping[str, Any] = request_options(self.http_config)
        options = {"server_hostname": host, **options} if url.scheme == "https" else options
        headers = {"Host": url.netloc, **options.get("headers", {})}
        return [
            await self._read(
                f"{url.scheme}://{f'[{at}]' if ':' in at else at}:{port}{PATH}", {**options, "headers": headers}
            )
            for at in addresses
        ]

    async def _read(self, url: str, options: Mapping[str, Any]) -> SidecarTotals:
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        async with self.session.get(url, timeout=limit, raise_for_status=True, **options) as answer:
            return msgspec.json.decode(await read_bounded(answer, MOST_BYTES), type=SidecarTotals)
