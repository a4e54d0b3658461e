"""What `make bench-sidecar` compares with, and what stands for a collector. Run as `bench_sidecar_peers.py KIND PORT
[LOG]`.

client_python: the same families with the library that most exporters use, counted from the same log by json.loads and
cached children.
collector: takes OTLP over HTTP and counts the spans, not the metrics; GET says how many."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from exporters.catalogue import bounds, sidecar

# For mtail: requests, tokens and one histogram, a third of what the sidecar counts. Its fields come in the order in
# which our gateway writes them.
MTAIL = f"""counter requests by team, model, outcome
counter prompt_tokens by team, model
counter cached_tokens by team, model
counter completion_tokens by team, model
histogram ttft_ms by team, model buckets {", ".join(f"{bound * 1000:g}" for bound in bounds.TTFT_S)}
/"team":"(?P<team>[^"]*)".*"model":"(?P<model>[^"]*)"/ {{
  /"outcome":"(?P<outcome>[^"]*)"/ {{
    requests[$team][$model][$outcome]++
  }}
  /"prompt_tokens":(?P<n>\\d+)/ {{
    prompt_tokens[$team][$model] += $n
  }}
  /"cached_tokens":(?P<n>\\d+)/ {{
    cached_tokens[$team][$model] += $n
  }}
  /"completion_tokens":(?P<n>\\d+)/ {{
    completion_tokens[$team][$model] += $n
  }}
  /"ttft_ms":(?P<ms>\\d+\\.?\\d*)/ {{
    ttft_ms[$team][$model] = $ms
  }}
}}
"""


_TIMES = {
    "ttft_ms": (sidecar.TTFT, bounds.TTFT_S), "tpot_ms": (sidecar.TPOT, bounds.OUR_TPOT_S),
    "e2e_ms": (sidecar.E2E, bounds.OUR_REQUEST_S),
    "queue_ms": (sidecar.QUEUE, bounds.OUR_REQUEST_S), "engine_queue_ms": (sidecar.ENGINE_QUEUE, bounds.OUR_REQUEST_S),
}  # fmt: skip
_TOKENS = {"prompt_tokens": "prompt", "cached_tokens": "cached", "completion_tokens": "completion"}


class ClientPython:
    """The families of a row of ours."""

    def __init__(self, log: Path) -> None:
        import prometheus_client

        prometheus_client.disable_created_metrics()
        self.registry = registry = prometheus_client.CollectorRegistry()
        counters, times = (
            (sidecar.REQUESTS, sidecar.REASONS, sidecar.FINISHES, sidecar.TOKENS, sidecar.CACHE_LOOKUPS),
            dict(_TIMES.values()),
        )
        times[sidecar.TTFT_OVERHEAD] = bounds.TTFT_S
        self._families: dict[str, Any] = {
            m.name: prometheus_client.Counter(m.name, m.meaning, m.labels, registry=registry) for m in counters
        }
        for m, limits in times.items():
            self._families[m.name] = prometheus_client.Histogram(
                m.name, m.meaning, m.labels, buckets=limits, registry=registry
            )
        self._lines = prometheus_client.Counter(sidecar.LOG_LINES.name, sidecar.LOG_LINES.meaning, registry=registry)
        self._children: dict[tuple[object, ...], Any] = {}
        self._log, self._rest = log, b""

    async def follow(self) -> None:
        while True:
            if self._log.exists():
                with self._log.open("rb") as file:
                    while True:
                        text = self._rest + file.read(1 << 18)
                        whole, newline, self._rest = text.rpartition(b"\n")
                        for line in whole.splitlines():
                            self._count(json.loads(line))
                        await asyncio.sleep(0 if newline else 0.05)
            await asyncio.sleep(0.05)

    def _count(self, record: dict[str, Any]) -> None:
        self._lines.inc()
        who = {"model_name": record["model"], "team": record["team"]}
        self._child(sidecar.REQUESTS, who, outcome=record["outcome"]).inc()
        self._child(sidecar.FINISHES, who, finish_reason=record["finish_reason"]).inc()
        if (reason := record.get("reason")) is not None:
            self._child(sidecar.REASONS, who, outcome=record["outcome"], reason=reason).inc()
        if (hit := record.get("cache_hit")) is not None:
            self._child(sidecar.CACHE_LOOKUPS, who, result="hit" if hit else "miss").inc()
        for field, kind in _TOKENS.items():
            if (tokens := record.get(field)) is not None:
                self._child(sidecar.TOKENS, who, type=kind).inc(tokens)
        for field, (metric, _) in _TIMES.items():
            if (ms := record.get(field)) is not None:
                self._child(metric, who).observe(ms / 1000)
        if (engine_ms := record.get("engine_ttft_ms")) is not None:
            self._child(sidecar.TTFT_OVERHEAD, who).observe(
                (record["ttft_ms"] - record["engine_queue_ms"] - engine_ms) / 1000
            )

    def _child(self, metric: Any, who: dict[str, str], **more: str) -> Any:
        key = (metric.name, *who.values(), *more.values())
        if (child := self._children.get(key)) is None:
            child = self._children[key] = self._families[metric.name].labels(**who, **more)
        return child

    async def metrics(self, _: web.Request) -> web.Response:
        from prometheus_client import generate_latest

        return web.Response(body=generate_latest(self.registry))


class Collector:
    def __init__(self) -> None:
        self.spans = 0

    async def export(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

        resources = TracesData.FromString(await request.read()).resource_spans
        self.spans += sum(len(scope.spans) for resource in resources for scope in resource.scope_spans)
        return web.Response(content_type="application/x-protobuf")

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(content_type="application/x-protobuf")

    async def told(self, _: web.Request) -> web.Response:
        return web.Response(text=str(self.spans))


async def main(kind: str, port: int, *log: str) -> None:
    app = web.Application(client_max_size=1 << 24)
    if kind == "collector":
        collector = Collector()
        app.add_routes(
            [
                web.post("/v1/traces", collector.export),
                web.post("/v1/metrics", collector.metrics),
                web.get("/", collector.told),
            ]
        )
    else:
        peer = ClientPython(Path(*log))
        following = asyncio.create_task(peer.follow())
        following.add_done_callback(lambda task: sys.exit(f"{task.exception()!r}") if not task.cancelled() else None)
        app.add_routes([web.get("/metrics", peer.metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
