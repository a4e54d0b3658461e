"""Metrics of the lab itself: which of its processes are up.

It lives in the lab's process, so that a process that is down is reported also when Prometheus itself is."""

from __future__ import annotations

from aiohttp import web

from exporters import exposition
from exporters.catalogue import sidecar
from exporters.exposition import Sample
from stack.lab.supervisor import Supervisor


def samples(supervisor: Supervisor) -> list[Sample]:
    rows: list[Sample] = []
    for name, running in supervisor.running.items():
        rows.append((sidecar.LAB_PROCESS_UP, {"process": name}, float(running.healthy)))
        rows.append((sidecar.LAB_PROCESS_RUNNING, {"process": name}, float(running.exited is None)))
    return rows


async def serve(supervisor: Supervisor, port: int) -> web.AppRunner:
    """Start serving on loopback; the caller cleans the runner up. Raises OSError when the port is taken."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=exposition.render(samples(supervisor)).encode(), headers={"Content-Type": exposition.CONTENT_TYPE}
        )

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner
