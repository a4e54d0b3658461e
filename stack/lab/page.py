"""The lab's own small server: which of its processes are up, as metrics, and the runbooks that alert links lead to.

It lives in the lab's process, so that what is down is told also when Prometheus itself is."""

from __future__ import annotations

from aiohttp import web

from exporters import exposition
from exporters.catalogue import ours
from exporters.exposition import Sample
from runbooks import book
from stack.lab.supervisor import Supervisor


def samples(supervisor: Supervisor) -> list[Sample]:
    rows: list[Sample] = []
    for name, running in supervisor.running.items():
        rows.append((ours.LAB_PROCESS_UP, {"process": name}, float(running.healthy)))
        rows.append((ours.LAB_PROCESS_RUNNING, {"process": name}, float(running.exited is None)))
    return rows


async def serve(supervisor: Supervisor, port: int) -> web.AppRunner:
    """Start serving on loopback; the caller cleans the runner up. Raises OSError when the port is taken."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=exposition.render(samples(supervisor)).encode(), headers={"Content-Type": exposition.CONTENT_TYPE})

    async def runbook(request: web.Request) -> web.Response:
        text = book.text(request.match_info["name"].removesuffix(".md"))
        if text is None:
            return web.Response(status=404, text="There is no page of that name. The pages are:\n" + "\n".join(book.names()) + "\n")
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/runbooks/{name}", runbook)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner
