"""Replay of a request log under an autoscaler: replica hours, and requests within a target. Pure.

All replicas are one pool of slots and KV cache with one queue, in order of arrival. A request takes the time that it
took in the log, without its wait, and holds the share of a cache that the worksheet's arithmetic gives it. Speed does
not depend on load here. The autoscaler decides as a HorizontalPodAutoscaler does on a sum with an AverageValue target.
Source: Kubernetes pkg/controller/podautoscaler (replica_calculator.go, horizontal.go)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from statistics import fmean

from exporters.requests.record import RequestRecord, ended_at
from stack.capacity.traffic import ServedRequest, request_s, served_request

SYNC_S = 15.0  # the controller's period, by default
TOLERANCE = 0.1  # the controller's default: no change while the load is within a tenth of the target


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Values of an autoscaler. slots: requests at once in one replica; target: saturation of a replica, 0 to 1; least,
    most: replicas. cold_start_s: until a new replica serves, and between two additions. calm_s: for so long the load
    must ask for fewer replicas before one is removed; smoothed_s: window of the means that it reads, and between two
    removals."""

    slots: int
    target: float
    least: int
    most: int
    cold_start_s: float
    calm_s: float
    smoothed_s: float

    def fixed(self, replicas: int) -> ScalingPolicy:
        """Return the policy of a Deployment that is never scaled."""
        return replace(self, least=replicas, most=replicas)

    def wanted(self, saturation: float, replicas: int) -> int:
        """Return the replicas that the controller asks for, within the limits. saturation: the sum of all replicas."""
        if abs(saturation / (self.target * replicas) - 1) > TOLERANCE:
            replicas = math.ceil(saturation / self.target - 1e-9)
        return min(max(replicas, self.least), self.most)


def saturation(running: float, waiting: float, cache: float, slots: int) -> float:
    """Return the replicas' worth of load: in slots or, if that is more, in KV cache with the queue at the same size.

    cache: shares of a replica's KV cache in use, summed."""
    held = running + waiting
    return max(held / slots, cache * held / running if running else 0.0)


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request of the log. arrived_s: unix time; time_s: in the engine; ttft_s: without waiting, 0 where the log does
    not have it; texts: replies at once, each in a slot; cache: share of one replica's KV cache, at its end."""

    arrived_s: float
    time_s: float
    ttft_s: float
    texts: int
    cache: float


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Outcome of one policy. hours: of replicas, those that start included; within: share of the requests whose time to
    the first token met the target, 0 to 1; longest_wait_s, most_waiting: in the queue; most: replicas at once."""

    hours: float
    within: float
    longest_wait_s: float
    most_waiting: int
    most: int
    added: int
    removed: int


def requests_of(
    records: Iterable[RequestRecord], model: str, share: Callable[[int], float] | None, ttft_s: float, tpot_s: float
) -> tuple[list[ReplayedRequest], int]:
    """Return the requests for a model in order of arrival, and the number of records that cannot be replayed.

    share: of one replica's cache that a request of so many tokens holds; None counts slots alone. ttft_s, tpot_s: for
    records without times."""
    found, others = list[ReplayedRequest](), 0
    for record in records:
        if model not in (record.model, record.adapter):
            continue
        served = served_request(record)
        if served is None or (ended := ended_at(record)) is None:
            others += 1
            continue
        found.append(_replayed(record, served, ended, share, ttft_s, tpot_s))
    return sorted(found, key=lambda each: each.arrived_s), others


def _replayed(
    record: RequestRecord,
    served: ServedRequest,
    ended: float,
    share: Callable[[int], float] | None,
    ttft_s: float,
    tpot_s: float,
) -> ReplayedRequest:
    wait_s = (record.queue_ms or 0.0) / 1000
    if record.e2e_ms is not None:
        time_s = max(0.0, record.e2e_ms / 1000 - wait_s)
    elif served.ttft_s is not None and served.decode_s is not None:
        time_s = served.ttft_s + served.decode_s
    else:
        time_s = request_s(ttft_s, served.output, tpot_s)
    cache = served.texts * share(served.prompt + served.output) if share else 0.0
    return ReplayedRequest(ended - time_s - wait_s, time_s, served.ttft_s or 0.0, served.texts, cache)


def replay(requests: Sequence[ReplayedRequest], policy: ScalingPolicy, within_s: float) -> ReplayResult:
    """Replay requests in order of arrival. Starts with the least replicas. Raises ValueError without requests.

    within_s: target of the time to the first token."""
    if not requests:
        raise ValueError("no request to replay")
    pool, scaler = _Pool(policy.slots, policy.least), _Scaler(policy, policy.least)
    now = requests[0].arrived_s
    for request in requests:
        while now <= request.arrived_s:
            now = scaler.sync(now, pool)
        pool.advance(request.arrived_s)
        pool.arrive(request)
    hours = scaler.replica_s / 3600
    while pool.queue:
        now = scaler.sync(now, pool)
    waits = pool.waits
    within = sum(wait_s + ttft_s <= within_s for wait_s, ttft_s in waits)
    return ReplayResult(
        hours,
        within / len(waits),
        max(wait_s for wait_s, _ in waits),
        pool.most_waiting,
        scaler.most,
        scaler.added,
        scaler.removed,
    )


@dataclass(slots=True)
class _Pool:
    """Engines as one: slots and caches of all, and the queue before them."""

    slots: int
    replicas: int
    running: int = 0
    waiting: int = 0
    cache: float = 0.0
    most_waiting: int = 0
    queue: deque[ReplayedRequest] = field(default_factory=deque)
    ends: list[tuple[float, int, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # of each request that started: wait, ttft

    def arrive(self, request: ReplayedRequest) -> None:
        self.queue.append(request)
        self.waiting += request.texts
        self._start(request.arrived_s)
        self.most_waiting = max(self.most_waiting, self.waiting)

    def advance(self, now: float) -> None:
        """End what ends until `now`, and start in its place what waits."""
        while self.ends and self.ends[0][0] <= now:
            at, texts, cache = heappop(self.ends)
            self.running -= texts
            self.cache -= cache
            self._start(at)

    def grow(self, now: float, replicas: int) -> None:
        self.replicas = replicas
        self._start(now)

    def _start(self, now: float) -> None:
        while self.queue and self._fits(self.queue[0]):
            request = self.queue.popleft()
            self.waiting -= request.texts
            self.running += request.texts
            self.cache += request.cache
            heappush(self.ends, (now + request.time_s, request.texts, request.cache))
            self.waits.append((now - request.arrived_s, request.ttft_s))

    def _fits(self, request: ReplayedRequest) -> bool:
        # one that is larger than all there is starts alone, as it would wait forever
        return not self.running or (
            self.running + request.texts <= self.replicas * self.slots
            and self.cache + request.cache <= self.replicas + 1e-9
        )


@dataclass(slots=True)
class _Scaler:
    """The controller, and the replicas that it made. replica_s: seconds of replicas so far."""

    policy: ScalingPolicy
    replicas: int
    replica_s: float = 0.0
    most: int = 0
    added: int = 0
    removed: int = 0
    starting: deque[float] = field(default_factory=deque)  # when each will serve
    samples: deque[tuple[float, int, int, float]] = field(default_factory=deque)
    wishes: deque[tuple[float, int]] = field(default_factory=deque)
    added_at: float = -math.inf
    removed_at: float = -math.inf

    def sync(self, now: float, pool: _Pool) -> float:
        """Look at the load once, and act; the time of the next look."""
        policy = self.policy
        pool.advance(now)
        while self.starting and self.starting[0] <= now:
            self.starting.popleft()
        self.samples.append((now, pool.running, pool.waiting, pool.cache))
        while self.samples[0][0] <= now - policy.smoothed_s:
            self.samples.popleft()
        running, waiting, cache = (fmean(column) for column in list(zip(*self.samples, strict=True))[1:])
        self.wishes.append((now, policy.wanted(saturation(running, waiting, cache, policy.slots), self.replicas)))
        while self.wishes[0][0] <= now - policy.calm_s:
            self.wishes.popleft()
        self._act(now)
        self.most = max(self.most, self.replicas)
        pool.grow(now, self.replicas - len(self.starting))
        self.replica_s += SYNC_S * self.replicas
        return now + SYNC_S

    def _act(self, now: float) -> None:
        policy = self.policy
        if self.wishes[-1][1] > self.replicas:
            if now - self.added_at >= policy.cold_start_s:
                self.replicas, self.added, self.added_at = self.replicas + 1, self.added + 1, now
                self.starting.append(now + policy.cold_start_s)
        elif max(wish for _, wish in self.wishes) < self.replicas and now - self.removed_at >= policy.smoothed_s:
            self.replicas, self.removed, self.removed_at = self.replicas - 1, self.removed + 1, now
            if self.starting:  # Kubernetes removes pods that are not ready first
                self.starting.pop()
