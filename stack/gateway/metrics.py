"""Metrics of the gateway itself, on a port of their own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client import Metric as ClientMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from exporters import process, scrape
from exporters.catalogue import gateway as names
from exporters.catalogue.metric import Kind, Metric, Unit
from exporters.engine.probe_endpoints import ENGINE_PROBES, WatchedEngine, probe_response
from exporters.exposition import Distribution, Sample
from exporters.native_histogram import BucketCounts, observed_ms
from exporters.net.listener import new_rejections
from exporters.requests.record import UNKNOWN_TEAM, UNREADABLE, Outcome
from exporters.scrape import Format
from stack.gateway.admission import Admission
from stack.gateway.journal import REPORTED_S, Lost
from stack.gateway.policy import Policy, policy_hash

LAG_EVERY_S = 0.1

T = TypeVar("T", Counter, Gauge)


class GatewayMetrics:
    """One gateway's figures in a registry of their own, so that two gateways in one process (as in tests) do not
    meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counted(names.REQUESTS)
        self._inflight = self._counted(names.INFLIGHT)
        self._log_errors = self._made(Counter, names.LOG_ERRORS)
        self._log_lost = self._made(Counter, names.LOG_LOST)
        self._log_waiting = self._made(Gauge, names.LOG_WAITING)
        self._log_lost_before = self._made(Gauge, names.LOG_LOST_BEFORE)
        self._upstream_up = self._made(Gauge, names.UPSTREAM_UP)
        self._rejected = self._counted(names.REJECTED)
        self._unreadable = self._counted(names.UNREADABLE)
        self._answered_routes: set[str] = set()
        self._upstream_inflight = self._counted(names.UPSTREAM_INFLIGHT)
        self._attempts = self._counted(names.ATTEMPTS)
        self._reloads = self._made(Counter, names.RELOADS)
        for result in ("ok", "failed"):  # so that the first one of them is a rise
            self._reloads.labels(result)
        self.rejected = {listener: new_rejections() for listener in ("clients", "figures")}
        self.registry.register(_TurnedAway(self.rejected))
        self._lag = _LoopLag()
        self.registry.register(self._lag)
        self._tasks = self._made(Gauge, names.TASKS)
        self._engine_states: Callable[[], Iterable[WatchedEngine]] = tuple

    def _made(self, kind: type[T], metric: Metric, **more: Any) -> T:
        return kind(metric.name.removesuffix("_total"), metric.meaning, metric.labels, registry=self.registry, **more)

    def _counted(self, metric: Metric) -> _Counted:
        counted = _Counted(metric)
        self.registry.register(counted)
        return counted

    def began(self, team: str | None) -> None:
        self._inflight.add(1, team or UNKNOWN_TEAM)

    def watches(self, admission: Admission) -> None:
        """Shows from now on how admission stands, looked at when the page is asked for."""
        self.registry.register(_Standing(admission))

    def shows_engines(self, states: Callable[[], Iterable[WatchedEngine]]) -> None:
        """Show from now on the state of each engine: its name, its address, its liveness, whether it is in rotation."""
        self._engine_states = states
        self.registry.register(_EngineStates(states))

    def ended(self, team: str | None, outcome: Outcome, status: int | None, reason: str | None) -> None:
        """One request that left its record; status None is a client that left before it got one."""
        team = team or UNKNOWN_TEAM
        self._inflight.add(-1, team)
        if outcome == "rejected":
            self._rejected.add(1, team, reason or "")
        self._requests.add(1, team, outcome, f"{status // 100}xx" if status else "none")

    def sent(self, upstream: str, variant: str) -> None:
        """A try at an upstream begins."""
        self._upstream_inflight.add(1, upstream, variant)

    def answered(self, upstream: str, variant: str, result: str) -> None:
        """It has ended: ok, or with a reason of the vocabulary."""
        self._upstream_inflight.add(-1, upstream, variant)
        self._attempts.add(1, upstream, variant, result)

    def unreadable(self, route: str, reason: str | None) -> None:
        """An attempt has ended. reason: why its answer was not understood, if it was not."""
        if route not in self._answered_routes:  # so that the first one of each is a rise
            self._answered_routes.add(route)
            for each in UNREADABLE:
                self._unreadable.add(0, route, each)
        if reason is not None:
            self._unreadable.add(1, route, reason)

    def reloaded(self, well: bool) -> None:
        self._reloads.labels("ok" if well else "failed").inc()

    def upstream(self, name: str, address: str, up: bool) -> None:
        self._upstream_up.labels(name, address).set(up)

    def forget(self, upstreams: Iterable[tuple[str, str]]) -> None:
        """These, by name and address, are not ours any more; whether they are up is not for us to say."""
        for name, address in upstreams:
            with contextlib.suppress(KeyError):
                self._upstream_up.remove(name, address)

    def leases(self) -> None:
        """Show from now on whether a store leases the limits."""
        self._lease_lost = self._made(Gauge, names.LEASE_LOST)
        self._lease_replicas = self._made(Gauge, names.LEASE_REPLICAS)
        self._lease_policies = self._made(Gauge, names.LEASE_POLICIES)

    def leased(self, leased: bool, replicas: int, policies: int) -> None:
        """Show how the limits are shared: by the store, and with whom."""
        self._lease_lost.set(not leased)
        self._lease_replicas.set(replicas)
        self._lease_policies.set(policies)

    def log_failed(self) -> None:
        self._log_errors.inc()

    def log_lost(self, lines: int) -> None:
        self._log_lost.inc(lines)

    def log_waiting(self, lines: int) -> None:
        self._log_waiting.set(lines)

    def log_lost_before(self, lost: Lost) -> None:
        """Show what earlier runs lost, until an hour after it was found."""

        def shown(requests: int) -> float:
            return requests if time.time() - lost.found_s < REPORTED_S else 0.0

        for state, requests in (("waiting", lost.waiting), ("in_flight", lost.in_flight)):
            self._log_lost_before.labels(state).set_function(partial(shown, requests))

    async def watch_loop(self) -> None:
        """Measures, until cancelled, how much later than asked the event loop wakes up: waiting that no request timer
        sees."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def answer(self, accept: str) -> tuple[bytes, str]:
        """Return the page in the format that an Accept header prefers, and its content type. Only protobuf carries
        native histograms."""
        if scrape.negotiate(accept) is not Format.PROTOBUF:
            return generate_latest(self.registry), CONTENT_TYPE_LATEST
        return scrape.answer(
            (*_samples(self.registry.collect()), (names.LOOP_LAG, {}, self._lag.distribution())), accept
        )

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """/metrics and /-/healthy of the metrics port."""
        if request.path == "/metrics":
            self._tasks.set(process.tasks(asyncio.get_running_loop()))
            body, content_type = self.answer(request.headers.get("Accept", ""))
            return web.Response(body=body, headers={"Content-Type": content_type})
        if request.path == "/-/healthy":
            return web.Response(text="ok\n")
        if request.path in ENGINE_PROBES:
            return probe_response(request, list(self._engine_states()))
        return web.Response(status=404, text="see /metrics\n")


class _Counted(Collector):
    """Counter or gauge of the request path: an addition to a dictionary, where the library takes a lock for each. It is
    changed and read in the event loop only."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, amount: int, *labels: str) -> None:
        values = self._values
        values[labels] = values.get(labels, 0) + amount

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        metric = self._metric
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name.removesuffix("_total"), metric.meaning, labels=metric.labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class _LoopLag(Collector):
    """Histogram of the event loop's lag, in both forms; the library's own has classic buckets only."""

    def __init__(self) -> None:
        self._counts = [0] * (len(names.LOOP_LAG_BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._native = BucketCounts()

    def observe(self, lag_s: float) -> None:
        self._counts[bisect_left(names.LOOP_LAG_BOUNDS_S, lag_s)] += 1
        self._sum_s += lag_s
        self._native.add(observed_ms(((lag_s * 1000,),)))

    def distribution(self) -> Distribution:
        """Return the histogram as a value."""
        return Distribution(names.LOOP_LAG_BOUNDS_S, tuple(self._counts), self._sum_s, (), self._native.snapshot())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = map(floatToGoString, (*names.LOOP_LAG_BOUNDS_S, math.inf))
        family = HistogramMetricFamily(names.LOOP_LAG.name, names.LOOP_LAG.meaning)
        family.add_metric((), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)
        yield family


def _samples(families: Iterable[ClientMetric]) -> Iterator[Sample]:
    """Yield the counters and gauges of client_python's families as samples of ours."""
    for family in families:
        if family.type in ("counter", "gauge"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            metric = Metric(name, Kind(family.type), Unit.NONE, family.documentation)
            yield from ((metric, sample.labels, sample.value) for sample in family.samples if sample.name == name)


class _Standing(Collector):
    """Collector of the state of admission."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._hashed: tuple[Policy, str] | None = None

    def _hash(self, policy: Policy) -> str:
        if self._hashed is None or self._hashed[0] is not policy:
            self._hashed = policy, policy_hash(policy)
        return self._hashed[1]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        admission = self._admission
        info = _gauge(names.POLICY_INFO)
        info.add_metric((self._hash(admission.whole),), 1)
        yield info
        shown = (names.RUNNING, names.SLOTS_HELD, names.WAITING, names.WAIT_ESTIMATE)
        families = [_gauge(metric) for metric in shown]
        for one in admission.standings():
            for family, value in zip(families, (one.running, one.slots, one.waiting, one.wait_s), strict=True):
                family.add_metric((one.team, one.band), value)
        yield from families
        for metric, value in (
            (names.SLOTS, admission.slots),
            (names.SLOTS_LIMIT, admission.capacity.slots),
            (names.TOKENS, admission.tokens),
        ):
            family = _gauge(metric)
            family.add_metric((), value)
            yield family


class _EngineStates(Collector):
    """Collector of the states of engines: one series each, so that a state that has passed is not exposed."""

    def __init__(self, states: Callable[[], Iterable[WatchedEngine]]) -> None:
        self._states = states

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = _gauge(names.ENGINE_STATE)
        for name, address, liveness, _ in self._states():
            family.add_metric((name, address, liveness.state, liveness.cause), 1)
        yield family


class _TurnedAway(Collector):
    """Collector of the connections that the listeners rejected."""

    def __init__(self, counted: Mapping[str, Mapping[str, int]]) -> None:
        self._counted = counted

    def collect(self) -> Iterator[CounterMetricFamily]:
        metric = names.LISTENER_REJECTED
        family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.meaning, labels=metric.labels)
        for listener, reasons in self._counted.items():
            for reason, times in reasons.items():
                family.add_metric((listener, reason), times)
        yield family


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)
