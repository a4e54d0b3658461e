"""A fake engine that counts the requests in flight."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.support.gateway_scene import REPLY, FakeEngine

HOLD_S = 0.2


class CountingEngine(FakeEngine):
    """Holds each request for HOLD_S and counts those in flight."""

    def __init__(self) -> None:
        super().__init__(answer=self.hold)
        self.running = self.most = self.done = 0

    async def hold(self, request: web.BaseRequest) -> web.StreamResponse:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(HOLD_S)
        finally:
            self.running -= 1
        self.done += 1
        return web.json_response(REPLY)
