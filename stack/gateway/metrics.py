"""The gateway's own metrics, under the names of the catalogue; served on a port of their own."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from exporters.catalogue import gateway as names
from exporters.catalogue.metric import Metric
from exporters.request_log import UNKNOWN_TEAM, Outcome

LAG_EVERY_S = 0.1

T = TypeVar("T", Counter, Gauge, Histogram)


class GatewayMetrics:
    """One gateway's figures in a registry of their own, so that two gateways in one process (as in tests) do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._made(Counter, names.REQUESTS)
        self._inflight = self._made(Gauge, names.INFLIGHT)
        self._log_errors = self._made(Counter, names.LOG_ERRORS)
        self._log_lost = self._made(Counter, names.LOG_LOST)
        self._log_waiting = self._made(Gauge, names.LOG_WAITING)
        self._upstream_up = self._made(Gauge, names.UPSTREAM_UP)
        self._lag = self._made(Histogram, names.LOOP_LAG, buckets=names.LOOP_LAG_BOUNDS_S)

    def _made(self, kind: type[T], metric: Metric, **more: Any) -> T:
        return kind(metric.name.removesuffix("_total"), metric.meaning, metric.labels, registry=self.registry, **more)

    def began(self, team: str | None) -> None:
        self._inflight.labels(team or UNKNOWN_TEAM).inc()

    def ended(self, team: str | None, outcome: Outcome, status: int | None) -> None:
        """One request that left its record; status None is a client that left before it got one."""
        team = team or UNKNOWN_TEAM
        self._inflight.labels(team).dec()
        self._requests.labels(team, outcome, f"{status // 100}xx" if status else "none").inc()

    def upstream(self, name: str, up: bool) -> None:
        self._upstream_up.labels(name).set(up)

    def log_failed(self) -> None:
        self._log_errors.inc()

    def log_lost(self, lines: int) -> None:
        self._log_lost.inc(lines)

    def log_waiting(self, lines: int) -> None:
        self._log_waiting.set(lines)

    async def watch_loop(self) -> None:
        """Measures, until cancelled, how much later than asked the event loop wakes up: waiting that no request timer sees."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lag.observe(max(0.0, loop.time() - due))

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """/metrics and /-/healthy of the metrics port."""
        if request.path == "/metrics":
            return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
        if request.path == "/-/healthy":
            return web.Response(text="ok\n")
        return web.Response(status=404, text="see /metrics\n")
