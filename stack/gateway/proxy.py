"""Entry of every request: authentication, route, and hand-over to the handler.

Invariant: whatever happens, a POST to a token route leaves exactly one record, and what it was admitted to is given
back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from multidict import CIMultiDict

from exporters.requests.record import fitting_line
from stack.gateway import routes
from stack.gateway.client_request import ClientRequest, Response, json_response, text_response
from stack.gateway.cors import is_preflight
from stack.gateway.handler import RequestHandler
from stack.gateway.ids import request_id, trace
from stack.gateway.log import RequestLog
from stack.gateway.passed_headers import has_two_keys, sent_key
from stack.gateway.refusals import RequestEnd, error_body
from stack.gateway.reply import Reply
from stack.gateway.request_state import RequestState, record
from stack.gateway.services import Services

_ENGINE_PAGES = ("/metrics", "/health")  # of the engine, without a key, as monitoring expects


class Proxy:
    """Handles requests, and counts those that run."""

    def __init__(
        self, services: Services, log: RequestLog, *, engine_pages: bool = True, also_pass: Collection[str] = ()
    ) -> None:
        self.services = services
        self.running = 0
        self._idle = asyncio.Event()
        self._log = log
        self._engine_pages = _ENGINE_PAGES if engine_pages else ()
        self._also_pass = frozenset(also_pass)

    async def handle(self, request: ClientRequest) -> None:
        """Answer a request: the handler of the server."""
        if (response := await self._handled(request)) is not None:
            await response.send(request)

    async def _handled(self, request: ClientRequest) -> Response | None:
        """Decide what kind of request it is. Return the response, or None where it was sent."""
        cors = self.services.cors
        if cors is not None and is_preflight(request.method, request.headers):
            status, headers, text = cors.preflight(request.headers)
            return text_response(text, status, CIMultiDict(headers)) if text else Response(status, CIMultiDict(headers))
        # with a slash at its end, the engine would send the client on, to an address past the gateway
        path = request.path.rstrip("/")
        if path == "/-/healthy":
            return text_response("ok\n")
        if path == "/-/ready":
            ready = self.services.life.ready
            return text_response("ready\n" if ready else "stopping\n", 200 if ready else 503)
        if path in self._engine_pages and request.method in ("GET", "HEAD"):
            return await self._engine_page(request, path)
        recorded = request.method == "POST" and path in routes.RECORDED
        if not recorded:
            refused = routes.refusal(request.method, path, self._also_pass)
            if refused is None and not routes.plain(path):
                refused = 404, "it can be read in more than one way"
            if refused is not None:
                return self._not_served(request, path, *refused)
        x = RequestState(
            request_id=request_id(request.headers.get("X-Request-Id"), self.services.new_hex),
            trace=trace(request.headers.get("traceparent"), self.services.new_hex),
            route=path,
            accepted=self.services.now(),
            reply=Reply(path),
        )
        x.team = self._team(request.headers)
        x.probe = x.team is not None and self.services.life.terms.team(x.team).probe
        await self._run(request, x, recorded=recorded)
        return None

    async def _run(self, request: ClientRequest, x: RequestState, *, recorded: bool) -> None:
        """Runs one exchange to its end, whatever that is, and writes its record."""
        self.running += 1
        self._idle.clear()
        if recorded:
            self._log.accepted()
            self.services.metrics.began(x.team)
        visit = RequestHandler(self.services, request, x, request.task, admitted=recorded)
        try:
            await visit.run()
        except asyncio.CancelledError:
            x.ends(self.services.life.cut_by)
            raise
        finally:
            visit.release_slot()
            visit.release_body()
            self.running -= 1
            if not self.running:
                self._idle.set()
            if recorded:
                if x.reply.completion_tokens is None:
                    x.est_completion_tokens = visit.estimated_output()
                self._log.write(fitting_line(record(x, self.services.now(), self.services.unix_s())))
                self.services.metrics.ended(x.team, x.outcome, x.status, x.reason)

    async def until_idle(self, seconds: float) -> None:
        """Waits until no request runs, or the time is over."""
        if self.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    async def _engine_page(self, request: ClientRequest, path: str) -> Response | None:
        """Answer from what the watch knows: without a key nobody makes an engine work. None where it was sent."""
        services = self.services
        if path == "/health":
            well = services.watch.any_in_rotation() and not services.life.draining
            return text_response("" if well else "no engine is in rotation\n", 200 if well else 503)
        if (page := services.watch.page()) is None:
            return text_response("no /metrics of an engine in rotation has been read\n", 503)
        head = {"Content-Type": page.content_type, "Age": f"{services.now() - page.at:.0f}"}
        answer = Response(200, {**head, "Content-Length": str(len(page.text))})
        services.mark(request, answer)
        answer.start(request)
        answer.put(page.text)  # not copied behind the head: many may read it slowly
        answer.end()
        await request.drain()  # else requests behind it would be answered without end, and nobody reads
        return None

    def _not_served(self, request: ClientRequest, path: str, status: int, why: str) -> Response:
        end = RequestEnd("bad_request", f"{request.method} {path[:100]} is not served here: {why}", status=status)
        headers = {"Allow": ", ".join(sorted(routes.find(path).methods))} if status == 405 else None
        name = request_id(request.headers.get("X-Request-Id"), self.services.new_hex)
        answer = json_response(error_body(routes.find(path).dialect, end, name), status, headers)
        self.services.mark(request, answer)
        return answer

    def _team(self, headers: CIMultiDict[str]) -> str | None:
        teams = self.services.life.terms.teams
        return None if has_two_keys(headers, teams) else teams.of(sent_key(headers))
