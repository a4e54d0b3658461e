"""Endpoints about single engines for probes of Kubernetes and load balancers, on gateway and sidecar.

Invariant: an engine that is not known is 404, never 503, so that a wrong name restarts nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from aiohttp import web

from exporters.engine.liveness import Liveness

ENGINE_READY, ENGINE_LIVE = ENGINE_PROBES = ("/-/engine-ready", "/-/engine-live")
WatchedEngine = tuple[str, str, Liveness, bool]  # name, host:port, liveness, whether it should get requests


def probe_response(request: web.BaseRequest, engines: Sequence[WatchedEngine]) -> web.Response:
    """Answer 200 or 503 for the engine with this `upstream` or `address`. Without either, for the only one."""
    wanted = request.query.get("upstream"), request.query.get("address")
    known = [one for one in engines if wanted == (None, None) or {one[0], one[1]} & set(wanted)]
    if len(known) != 1:
        names = ", ".join(name for name, *_ in engines)
        return web.Response(status=404, text=f"name one engine: ?upstream=NAME or ?address=HOST:PORT of {names}\n")
    name, _, liveness, ready = known[0]
    well = ready if request.path == ENGINE_READY else liveness.live
    return web.Response(status=200 if well else 503, text=f"{name}: {liveness.state} ({liveness.cause})\n")


def probe_routes(engines: Callable[[], Iterable[WatchedEngine]]) -> list[web.RouteDef]:
    """Return the routes of both endpoints."""

    async def answer(request: web.Request) -> web.Response:
        return probe_response(request, list(engines()))

    return [web.get(path, answer) for path in ENGINE_PROBES]
