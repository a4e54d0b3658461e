"""Bounded reads of HTTP responses. Upstreams are untrusted."""

from __future__ import annotations

import aiohttp

# the largest engine scrapes have 65 kB; many adapters and ranks, or a thousand alerts, a few MB
MOST_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20


class ResponseTooLarge(aiohttp.ClientPayloadError):
    """Response body over the size limit."""


async def read_bounded(response: aiohttp.ClientResponse, most: int | None = None) -> bytes:
    """Return the decompressed body of at most `most` bytes (default MOST_BYTES).

    Raises ResponseTooLarge, and aiohttp.ClientError and TimeoutError as the response does."""
    body, most = bytearray(), most or MOST_BYTES
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        body += piece
        if len(body) > most:
            raise ResponseTooLarge(
                f"it goes on after {f'{most >> 20} MiB' if most >= 1 << 20 else f'{most >> 10} KiB'}"
            )
    return bytes(body)
