"""The figures that operators live by, asked of a Prometheus over its HTTP API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from exporters.catalogue import ours, promql, vllm

WINDOW = "1m"
_FAILED = ('outcome=~"upstream_error|timeout"',)


@dataclass(frozen=True, slots=True)
class Headline:
    """One figure. unit: how it is shown: s, ratio, tok/s."""

    name: str
    expr: str
    unit: str

    def show(self, value: float | None) -> str:
        if value is None:
            return "no value"
        match self.unit:
            case "s":
                return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.{0 if value >= 0.01 else 2}f} ms"
            case "ratio":
                return f"{value:.1%}"
            case _:
                return f"{value:,.0f} {self.unit}"


HEADLINES = (
    Headline("TTFT p95 (engine)", promql.quantile(0.95, vllm.TIME_TO_FIRST_TOKEN, WINDOW, by=()), "s"),
    Headline("TPOT p95 (client)", promql.quantile(0.95, ours.TPOT, WINDOW, by=()), "s"),
    # The mean: vLLM's first bound for queue time is 0.3 s, and a p95 below it would be a guess.
    Headline("queue time, mean", promql.mean(vllm.REQUEST_QUEUE_TIME, WINDOW, by=()), "s"),
    Headline("cache hit ratio", promql.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, WINDOW, by=()), "ratio"),
    Headline("error ratio (failed, not refused)", promql.share(ours.REQUESTS, ours.REQUESTS, WINDOW, by=(), part_where=_FAILED), "ratio"),
    Headline("throughput", promql.per_second(vllm.GENERATION_TOKENS, WINDOW, by=()), "tok/s"),
)


async def query(session: aiohttp.ClientSession, prometheus: str, expr: str) -> float | None:
    """The first value of an instant query; None for an empty answer, NaN, or a Prometheus that does not answer."""
    try:
        async with session.get(f"{prometheus}/api/v1/query", params={"query": expr}, timeout=aiohttp.ClientTimeout(total=3)) as response:
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    rows = body.get("data", {}).get("result", []) if isinstance(body, dict) else []
    value = float(rows[0]["value"][1]) if rows else math.nan
    return value if math.isfinite(value) else None


async def read(session: aiohttp.ClientSession, prometheus: str) -> dict[str, float | None]:
    return {headline.name: await query(session, prometheus, headline.expr) for headline in HEADLINES}


async def targets(session: aiohttp.ClientSession, prometheus: str) -> Mapping[str, bool] | None:
    """Scrape job -> whether its last scrape succeeded; None when Prometheus does not answer."""
    try:
        async with session.get(f"{prometheus}/api/v1/targets", params={"state": "active"}, timeout=aiohttp.ClientTimeout(total=3)) as response:
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    active: list[dict[str, Any]] = body.get("data", {}).get("activeTargets", []) if isinstance(body, dict) else []
    return {target["labels"]["job"]: target["health"] == "up" for target in active}


async def firing(session: aiohttp.ClientSession, alertmanager: str) -> list[str] | None:
    """The alerts that have arrived at Alertmanager; None when it does not answer."""
    try:
        async with session.get(f"{alertmanager}/api/v2/alerts", timeout=aiohttp.ClientTimeout(total=3)) as response:
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    return sorted({alert["labels"]["alertname"] for alert in body}) if isinstance(body, list) else None
