"""The data path: who asks, and for what kind of thing; every request in is one visit, and every visit to a token route one record.

Law: whatever happens, a POST to a token route leaves exactly one record, and what it was admitted to is given back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Collection

from aiohttp import web
from multidict import CIMultiDictProxy

from exporters.request_log import fitting_line
from stack.gateway import ask as asks
from stack.gateway import routes
from stack.gateway.admission import Admission
from stack.gateway.bodies import Bodies
from stack.gateway.client import Client
from stack.gateway.config import Limits, Timeouts
from stack.gateway.cors import Cors, is_preflight
from stack.gateway.estimate import Estimator
from stack.gateway.exchange import Exchange, record
from stack.gateway.ids import request_id, trace
from stack.gateway.large import LargeBodies
from stack.gateway.log import RequestLog
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.terms import Terms
from stack.gateway.visit import Visit, error_body, has_two_keys, sent_key
from stack.gateway.watch import Watch

_ENGINE_PAGES = ("/metrics", "/health")  # of the engine, without a key, as monitoring expects
JITTER = 0.8, 1.2  # of what refused clients are told, so that they do not come back all at once


class Proxy:
    """Handles requests. `draining` refuses new ones, `cutting` names the end of those that are cancelled."""

    def __init__(
        self,
        terms: Terms,
        log: RequestLog,
        metrics: GatewayMetrics,
        client: Client,
        watch: Watch,
        *,
        limits: Limits,
        timeouts: Timeouts,
        engine_pages: bool = True,
        also_pass: Collection[str] = (),
        cors: Cors | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        new_hex: Callable[[int], str] | None = None,
        jitter: Callable[[], float] = lambda: random.uniform(*JITTER),  # noqa: S311  # no secret
    ) -> None:
        self.terms = terms
        self.admission = Admission(terms.policy)
        self.client = client
        self.estimator = Estimator()
        self.bodies = Bodies(limits.all_bodies_bytes)
        self.large = LargeBodies()
        self.watch = watch
        self.healthy = _Healthy(watch)
        self.draining = False
        self.cutting = False
        self.running = 0
        self._idle = asyncio.Event()
        self._log = log
        self._metrics = metrics
        self._limits = limits
        self._timeouts = timeouts
        self._engine_pages = _ENGINE_PAGES if engine_pages else ()
        self._also_pass = frozenset(also_pass)
        self._cors = cors
        self._clock = clock
        self._wall = wall
        self._new_hex = new_hex or _hex_of(random.Random(secrets.token_bytes(32)))  # noqa: S311  # ids are no secrets
        self._jitter = jitter

    def now(self) -> float:
        """The time by which admission counts."""
        return self._clock()

    def unix_s(self) -> float:
        return self._wall()

    def adopt(self, terms: Terms) -> None:
        """New terms for all who come from now on. Who waits keeps its place under the new ones."""
        self.terms = terms
        self.admission.adopt(terms.policy, self._clock())

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The handler of the server: decides what kind of request it is."""
        if self._cors is not None and is_preflight(request.method, request.headers):
            status, headers, text = self._cors.preflight(request.headers)
            return web.Response(status=status, headers=headers, text=text or None)
        path = request.path.rstrip("/")  # with a slash at its end, the engine would send the client on, to an address past the gateway
        if path == "/-/healthy":
            return web.Response(text="ok\n")
        engine_page = path in self._engine_pages and request.method in ("GET", "HEAD")
        recorded = request.method == "POST" and path in asks.RECORDED
        if not engine_page and not routes.plain(path):
            return self._not_served(request, f"{path[:100]} is not served here; see /v1/...")
        if not engine_page and not recorded and not routes.passed(request.method, path, self._also_pass):
            why = f"{request.method} {path[:100]} is not served here: it would be on no record; also_pass in gateway.yaml opens it"
            return self._not_served(request, why)
        x = Exchange(
            request_id=request_id(request.headers.get("X-Request-Id"), self._new_hex),
            trace=trace(request.headers.get("traceparent"), self._new_hex),
            route=path,
            accepted=self._clock(),
        )
        if not engine_page:
            x.team = self._team(request.headers)
        return await self._run(request, x, recorded=recorded, open_to_all=engine_page)

    async def _run(self, request: web.BaseRequest, x: Exchange, *, recorded: bool, open_to_all: bool) -> web.StreamResponse:
        """Runs one exchange to its end, whatever that is, and writes its record."""
        self.running += 1
        self._idle.clear()
        if recorded:
            self._log.accepted()
            self._metrics.began(x.team)
        visit = Visit(self, request, x, admitted=recorded)
        try:
            return await visit.run(open_to_all=open_to_all)
        except asyncio.CancelledError:
            x.ends(self.cut_by)
            raise
        finally:
            visit.give_back()
            visit.let_go()
            self.running -= 1
            if not self.running:
                self._idle.set()
            if recorded:
                if x.content_events and x.reply.completion_tokens is None:
                    x.est_completion_tokens = self.estimator.completion(x.team, x.model, x.content_events)
                self._log.write(fitting_line(record(x, self._clock(), self._wall())))
                self._metrics.ended(x.team, x.outcome, x.status, x.reason)

    @property
    def cut_by(self) -> str:
        """The reason of a request that is cancelled now."""
        return "gateway_stopped" if self.cutting else "client_hangup"

    async def until_idle(self, seconds: float) -> None:
        """Waits until no request runs, or the time is over."""
        if self.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    def mark(self, request: web.BaseRequest, answer: web.StreamResponse) -> None:
        """Let the page that asked read the answer, where cors allows it. The headers must not have gone out."""
        if self._cors is not None:
            self._cors.mark(request.headers.get("Origin"), answer.headers)

    def _not_served(self, request: web.BaseRequest, why: str) -> web.Response:
        answer = web.json_response(error_body(404, "not_found", why), status=404)
        self.mark(request, answer)
        return answer

    def _team(self, headers: CIMultiDictProxy[str]) -> str | None:
        teams = self.terms.teams
        return None if has_two_keys(headers, teams) else teams.of(sent_key(headers))


def _hex_of(source: random.Random) -> Callable[[int], str]:
    """Makes ids, of so many bytes in hex. Asking the system for each costs more than all else about an id."""
    bits = source.getrandbits
    return lambda size: f"{bits(8 * size):0{2 * size}x}"


class _Healthy:
    """The upstreams worth asking, as a set that is never made."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __contains__(self, name: object) -> bool:
        return self._watch.healthy(str(name))
