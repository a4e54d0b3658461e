"""Headline metrics in the terminal, from Prometheus' HTTP API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from exporters.catalogue import bounds, promql, sidecar, vllm
from exporters.net.alertmanager import firing_alerts
from exporters.net.prometheus import Prometheus, PrometheusError, QuerySeries, address

WINDOW = "1m"
TIMEOUT_S = 3.0
_FAILED = ('outcome=~"upstream_error|timeout"',)


class HeadlineValue(NamedTuple):
    """An answer. beyond: "<" or ">" where the value is a bound of the buckets that the true one lies beyond."""

    value: float
    beyond: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """One figure. unit: how it is shown: s, ratio, tok/s."""

    name: str
    expr: str
    unit: str

    def show(self, headline: HeadlineValue | None) -> str:
        if headline is None:
            return "no value"
        value = headline.value
        match self.unit:
            case "s" if headline.beyond:
                return bounds.format_bound(headline.beyond, value)
            case "s":
                return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.{0 if value >= 0.01 else 2}f} ms"
            case "ratio":
                return f"{value:.1%}"
            case _:
                return f"{value:,.0f} {self.unit}"


HEADLINES = (
    Headline("TTFT p95 (engine)", promql.bounded_quantile(0.95, vllm.TIME_TO_FIRST_TOKEN, WINDOW, by=()), "s"),
    Headline("TPOT p95 (client)", promql.bounded_quantile(0.95, sidecar.TPOT, WINDOW, by=()), "s"),
    # The mean: vLLM's first bound for queue time is 0.3 s by default, and below it no more is known of a p95.
    Headline("queue time, mean", promql.mean(vllm.REQUEST_QUEUE_TIME, WINDOW, by=()), "s"),
    Headline(
        "cache hit ratio", promql.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, WINDOW, by=()), "ratio"
    ),
    Headline(
        "error ratio (failed, not refused)",
        promql.share(sidecar.REQUESTS, sidecar.REQUESTS, WINDOW, by=(), part_where=_FAILED),
        "ratio",
    ),
    Headline("throughput", promql.per_second(vllm.GENERATION_TOKENS, WINDOW, by=()), "tok/s"),
)


def prometheus_client(url: str) -> Prometheus:
    return Prometheus(address(url), timeout_s=TIMEOUT_S)


async def read(prometheus: str) -> dict[str, HeadlineValue | None]:
    """Return the value of each headline; None where there is none, or Prometheus does not answer."""
    async with prometheus_client(prometheus) as client:
        return {headline.name: await _told(client, headline.expr) for headline in HEADLINES}


async def _told(client: Prometheus, expr: str) -> HeadlineValue | None:
    """Return the first value of an instant query, and whether it is a bound."""
    first = next(iter((await client.as_of(expr)).series), QuerySeries())
    value = float(first.value[1]) if first.value else math.nan
    return HeadlineValue(value, first.metric.get(promql.BOUND, "")) if math.isfinite(value) else None


async def targets(prometheus: str) -> Mapping[str, bool] | None:
    """Scrape job -> whether the last scrapes of all its targets succeeded; None when Prometheus does not answer."""
    found: dict[str, bool] = {}
    async with prometheus_client(prometheus) as client:
        try:
            for target in await client.targets():
                job = target.labels["job"]
                found[job] = target.health == "up" and found.get(job, True)
        except PrometheusError:
            return None
    return found


async def firing(alertmanager: str) -> list[str] | None:
    """The alerts that have arrived at Alertmanager; None when it does not answer."""
    try:
        return sorted({alert.name for alert in await firing_alerts(alertmanager, timeout_s=TIMEOUT_S)})
    except (OSError, ValueError):
        return None
