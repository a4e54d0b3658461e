"""Services that all requests share, as a frozen value."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from stack.gateway import clock
from stack.gateway.admission import Admission
from stack.gateway.body_budget import BodyBudget
from stack.gateway.client_request import ClientRequest, Response
from stack.gateway.config import GatewayLimits, Timeouts
from stack.gateway.cors import Cors
from stack.gateway.estimate import Estimator
from stack.gateway.health import HealthMonitor
from stack.gateway.large_bodies import LargeBodies
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.runtime_policy import RuntimePolicy
from stack.gateway.sharing import WHOLE, Share, divide
from stack.gateway.turns import UnrecordedRequests
from stack.gateway.upstream_client import UpstreamClient

JITTER = 0.8, 1.2  # of Retry-After, so that they do not come back all at once


@dataclass(slots=True)
class Lifecycle:
    """State that changes while the gateway runs. shares: of the limits, where replicas divide them. joined: its limits
    are known; stopping: a load balancer may send nothing more; draining: new requests are refused; cutting: running
    ones are cancelled."""

    terms: RuntimePolicy
    shares: tuple[Share, ...] = (WHOLE,)
    joined: bool = True
    stopping: bool = False
    draining: bool = False
    cutting: bool = False

    @property
    def ready(self) -> bool:
        """Return whether a load balancer may send new requests."""
        return self.joined and not self.stopping

    @property
    def cut_by(self) -> str:
        """The reason of a request that is cancelled now."""
        return "gateway_stopped" if self.cutting else "client_hangup"


@dataclass(frozen=True, slots=True)
class Services:
    """Shared by all requests. now: the clock by which admission counts; unix_s: wall clock; jitter: factor of
    Retry-After."""

    life: Lifecycle
    admission: Admission
    client: UpstreamClient
    estimator: Estimator
    bodies: BodyBudget
    large: LargeBodies
    unrecorded: UnrecordedRequests
    watch: HealthMonitor
    metrics: GatewayMetrics
    limits: GatewayLimits
    timeouts: Timeouts
    cors: Cors | None
    now: Callable[[], float]
    unix_s: Callable[[], float]
    new_hex: Callable[[int], str]
    jitter: Callable[[], float]

    @property
    def healthy(self) -> Healthy:
        return Healthy(self.watch)

    def adopt(self, terms: RuntimePolicy) -> None:
        """Apply a new policy to requests from now on. Waiting requests keep their place under it."""
        self.life.terms = terms
        self.admission.adopt(divide(terms.policy, self.life.shares), self.now(), terms.policy)

    def share(self, shares: tuple[Share, ...]) -> None:
        """Divide the limits anew. Running requests stay."""
        self.life.shares = shares
        self.adopt(self.life.terms)

    def mark(self, request: ClientRequest, answer: Response) -> None:
        """Add CORS headers where the configuration allows the origin. Call before the headers are sent."""
        if self.cors is not None:
            self.cors.mark(request.headers.get("Origin"), answer.headers)


@dataclass(frozen=True, slots=True)
class Healthy:
    """Lazy set of healthy upstreams."""

    watch: HealthMonitor

    def __contains__(self, name: object) -> bool:
        return self.watch.healthy(str(name))


def make_services(
    terms: RuntimePolicy,
    shares: tuple[Share, ...],
    metrics: GatewayMetrics,
    client: UpstreamClient,
    watch: HealthMonitor,
    limits: GatewayLimits,
    timeouts: Timeouts,
    cors: Cors | None,
) -> Services:
    """Return the services with the real clocks and randomness."""
    return Services(
        Lifecycle(terms, shares), Admission(divide(terms.policy, shares), terms.policy), client, Estimator(),
        BodyBudget(limits.all_bodies_bytes), LargeBodies(), UnrecordedRequests(), watch, metrics, limits,
        timeouts, cors, now=clock.now, unix_s=time.time,
        new_hex=_hex_of(random.Random(secrets.token_bytes(32))),  # noqa: S311  # ids are no secrets
        jitter=lambda: random.uniform(*JITTER),  # noqa: S311  # no secret
    )  # fmt: skip


def _hex_of(source: random.Random) -> Callable[[int], str]:
    """Return a generator of ids: `size` random bytes in hex. A system call for each id would cost more than the rest of
    it."""
    bits = source.getrandbits
    return lambda size: f"{bits(8 * size):0{2 * size}x}"
