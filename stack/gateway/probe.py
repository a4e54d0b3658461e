"""One-token probe of an engine: a completion that passes admission, and its record in the request log.

A probe proves that the engine core steps. It is nobody's request: its record has the team `__probe__`, so that the
log still equals the engine's counters and no team pays for it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Protocol

import aiohttp

from exporters.catalogue.exposition_parser import BadExposition
from exporters.engine.client import EngineClient
from exporters.net.bounded_read import read_bounded
from exporters.requests.record import PROBE_TEAM, Outcome, RequestRecord, fitting_line, timestamp
from stack.gateway.answers import FAILED, unreadable_head
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.policy import Upstream
from stack.gateway.reply import Reply
from stack.gateway.routes import find

OPEN_S = 60.0  # then the next one is sent: a connection may be dead although the engine is back
ANSWER_BYTES = 64 << 10
_ROUTE = "/v1/completions"
_REASONS = {"ok": None, "client_abort": "client_hangup", "rejected": "bad_request", "upstream_error": "engine_error"}


class ProbeLog(Protocol):
    """Request log as far as a probe uses it."""

    def accepted(self) -> None: ...
    def write(self, line: bytes) -> None: ...


class Prober:
    """Sends probes over the session of the health checks and records them."""

    def __init__(self, session: aiohttp.ClientSession, log: ProbeLog, metrics: GatewayMetrics) -> None:
        self._session = session
        self._log = log
        self._metrics = metrics
        self._models: dict[str, str] = {}  # by URL; read once, since a served name stays for the life of a process

    async def send(self, name: str, upstream: Upstream, headers: Mapping[str, str]) -> bool | None:
        """Return True for an answer with a token, False for none, and None where the engine cannot be probed.

        Cancelled or unanswered probes are recorded as requests whose client left, which is what the engine sees."""
        url = upstream.url.rstrip("/")
        if (model := upstream.model or self._models.get(url) or await self._served(url, headers)) is None:
            return False
        began, reply = time.monotonic(), Reply(_ROUTE)
        status: int | None = None
        outcome: Outcome = "client_abort"
        request_id = f"probe-{secrets.token_hex(8)}"
        self._log.accepted()
        self._metrics.began(PROBE_TEAM)
        try:
            async with self._session.post(
                url + _ROUTE,
                json={"model": model, "prompt": "1", "max_tokens": 1},
                # the session adds no header by itself
                headers={
                    "Accept-Encoding": "identity",
                    "Content-Type": "application/json",
                    **headers,
                    "X-Request-Id": request_id,
                },
                timeout=aiohttp.ClientTimeout(total=OPEN_S),
                allow_redirects=False,
            ) as response:
                body, status = await read_bounded(response, ANSWER_BYTES), response.status
            reply.unreadable = unreadable_head(find(_ROUTE).answer, status, response.content_type)
            if reply.unreadable is None:
                reply.read(status, response.content_type, body, len(body))
            if reply.unreadable in FAILED:
                outcome = "upstream_error"
                return False
            outcome = "ok" if status == 200 else "rejected" if status < 500 else "upstream_error"
            if status in (400, 404, 405, 422):  # no such model any more, or it makes no text
                self._models.pop(url, None)
                return None
            return status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        finally:
            self._record(name, model, request_id, reply, status, outcome, time.monotonic() - began)

    async def _served(self, url: str, headers: Mapping[str, str]) -> str | None:
        """Return the first served model's name; None where the engine does not say."""
        client = EngineClient(self._session, url, 2.0, options={"headers": headers, "allow_redirects": False})
        try:
            models = await client.models()
        except (aiohttp.ClientError, TimeoutError, OSError, BadExposition):
            return None
        if (name := next((model.id for model in models if model.parent is None), None)) is not None:
            self._models[url] = name
        return name

    def _record(
        self,
        name: str,
        model: str,
        request_id: str,
        reply: Reply,
        status: int | None,
        outcome: Outcome,
        elapsed_s: float,
    ) -> None:
        record = probe_record(name, model, _ROUTE, request_id, reply, status, outcome, elapsed_s)
        self._log.write(fitting_line(record))
        self._metrics.ended(PROBE_TEAM, outcome, status, record.reason)


def probe_record(
    upstream: str,
    model: str,
    route: str,
    request_id: str,
    reply: Reply,
    status: int | None,
    outcome: Outcome,
    elapsed_s: float,
) -> RequestRecord:
    """Return the record of a probe that ends now."""
    return RequestRecord(
        ts=timestamp(time.time()),
        request_id=request_id,
        team=PROBE_TEAM,
        model=reply.model or model,
        route=route,
        upstream=upstream,
        attempt=1,
        stream=False,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        completion_tokens=reply.completion_tokens,
        e2e_ms=round(elapsed_s * 1000, 3),
        status=status,
        finish_reason=reply.finish_reason or ("abort" if outcome == "client_abort" else None),
        outcome=outcome,
        reason=_REASONS[outcome],
        unreadable=reply.unreadable,
    )
