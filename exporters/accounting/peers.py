"""Client of the sidecars that read the logs of other gateways."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from exporters.accounting.fleet_log import LogTotals
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

    async def totals(self) -> list[LogTotals]:
        """Return the totals of each sidecar. Raises OSError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError and
        BadConfig if any of them cannot be had."""
        url = URL(self.url) / PATH.lstrip("/")
        host = url.host or ""
        found = await asyncio.get_running_loop().getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(where[0]) for family, *_, where in found if family == found[0][0])
        options: Mapping[str, Any] = request_options(self.http_config)
        options = {"server_hostname": host, **options} if url.scheme == "https" else options
        headers = {"Host": url.authority, **options.get("headers", {})}
        return [await self._read(url.with_host(address), {**options, "headers": headers}) for address in addresses]

    async def _read(self, url: URL, options: Mapping[str, Any]) -> LogTotals:
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        async with self.session.get(url, timeout=limit, raise_for_status=True, **options) as answer:
            return msgspec.json.decode(await read_bounded(answer, MOST_BYTES), type=LogTotals)
