"""What other servers answer, read whole, but never without an end: whoever answers there may be anybody, or ill."""

from __future__ import annotations

import aiohttp

# the longest pages of engines have 65 kB; many adapters and ranks, or a thousand alerts, make some MB
MOST_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20


class ResponseTooLarge(aiohttp.ClientPayloadError):
    """An answer longer than anybody who is meant would give."""


async def read_bounded(response: aiohttp.ClientResponse, most: int | None = None) -> bytes:
    """The body, unpacked, of at most so many bytes (MOST_BYTES). Raises Endless, and aiohttp.ClientError and
    TimeoutError as the response does."""
    body, most = bytearray(), most or MOST_BYTES
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        body += piece
        if len(body) > most:
            raise ResponseTooLarge(
                f"it goes on after {f'{most >> 20} MiB' if most >= 1 << 20 else f'{most >> 10} KiB'}"
            )
    return bytes(body)
