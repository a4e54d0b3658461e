"""HTTP listener of the sidecar: /metrics, health, probes of engines, totals of the log, events."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
from aiohttp import web

from exporters import process
from exporters.accounting import peers
from exporters.engine.probe_endpoints import ENGINE_PROBES, probe_routes
from exporters.events import http
from exporters.net.listener import listen
from exporters.net.listener_auth import ListenerAuth
from exporters.sidecar import Sidecar
from exporters.sidecar_config import OPEN_PATHS

log = logging.getLogger("vllm_watch.sidecar")


def application(sidecar: Sidecar) -> web.Application:
    """Return the web application: /metrics, /-/healthy, /-/ready, probes of engines, /log-totals and /events.

    healthy: the process responds. ready: every source was read once. engine-ready, engine-live: of one engine.
    /log-totals: for the sidecar of another gateway that has the engines. /events needs the token."""

    async def metrics(request: web.Request) -> web.Response:
        page, content_type = sidecar.answer(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def ready(_: web.Request) -> web.Response:
        return (
            web.Response(text="ready\n")
            if sidecar.ready
            else web.Response(status=503, text="not every source was read yet\n")
        )

    async def log_totals(_: web.Request) -> web.Response:
        if sidecar.config.state is None:
            return web.Response(status=404, text="without `state` in the configuration a restart would count twice\n")
        if not sidecar.ledger.complete:
            return web.Response(status=503, text="the logs are not read to their end yet\n")
        body = msgspec.json.encode(sidecar.fleet_log.own_totals(sidecar.logs.at_end))
        return web.Response(body=body, content_type="application/json")

    async def start(_: web.Application) -> None:
        await sidecar.start()

    async def stop(_: web.Application) -> None:
        await sidecar.stop()

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/-/healthy", healthy), web.get("/-/ready", ready),
                    web.get(peers.PATH, log_totals), *probe_routes(sidecar.engines)])  # fmt: skip
    kept, token = sidecar.config.events, sidecar.config.events_token_file
    app.add_routes(http.routes(Path(kept) if kept else None, Path(token) if token else None))
    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    return app


async def serve(sidecar: Sidecar, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises BadConfig if the address is in use or web_config is invalid."""
    runner = web.AppRunner(application(sidecar), access_log=None)
    where = sidecar.config.web_config
    guard = ListenerAuth(None if where is None else Path(where))
    listening = await listen(runner, "listen", sidecar.config.listen, guard, open_paths=(*OPEN_PATHS, *ENGINE_PROBES),
                             own_login=http.owns, rejected=sidecar.rejected)  # fmt: skip
    try:
        log.info("serving %s/metrics", listening.url)
        async with process.tidied():
            await stop.wait()
    finally:
        await listening.close()
        await runner.cleanup()
