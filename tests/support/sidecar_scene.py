"""A fake engine for the sidecar, and its exposition."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

GOLDEN = Path(__file__).parents[1] / "golden"


class FakeEngine:
    """Answers /metrics with a captured page and /version; can be told to fail."""

    def __init__(self) -> None:
        self.text = (GOLDEN / "0.32.0-before.prom").read_text()
        self.status = 200

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/version", self.version)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status, text=self.text)

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})


def values(text: str) -> dict[tuple[str, ...], float]:
    return {
        (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }
