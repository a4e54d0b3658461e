"""HTTP interface of the tuning events: POST /events, POST /events/ID/close, GET /events?since=SECONDS.

Invariants: every read and write needs the token or a login of the listener; without a configured token all requests
are rejected. After a 200 or 201 the event is in the file."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from exporters.events import log as events
from exporters.net.listener import AUTHENTICATED

MAX_BODY_BYTES = 16 << 10
BODY_WITHIN_S = 5.0

log = logging.getLogger("vllm_watch.sidecar")

Handler = Callable[[web.Request], Awaitable[web.Response]]


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a close request, which may be empty. end_s: unix seconds; None means now."""

    end_s: float | None = None


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def routes(path: Path | None, token_file: Path | None, clock: Callable[[], float] = time.time) -> list[web.RouteDef]:
    """Return the routes. `path`: the events file. `token_file`: holds one word and is read at each request."""
    handlers = _EventHandlers(path, token_file, clock)
    return [
        web.get("/events", handlers.guarded(handlers.list_events)),
        web.post("/events", handlers.guarded(handlers.add)),
        web.post("/events/{id}/close", handlers.guarded(handlers.close)),
    ]


@dataclass(frozen=True, slots=True)
class _EventHandlers:
    """Handlers of the routes. `guarded` checks the token and turns errors into responses."""

    path: Path | None
    token_file: Path | None
    clock: Callable[[], float]

    def guarded(self, handle: Callable[[web.Request, Path], Awaitable[web.Response]]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            try:
                _authorize(request, self.token_file)
                if self.path is None:
                    raise _Refused(
                        HTTPStatus.NOT_FOUND, "events are disabled: set `events` in the sidecar's configuration"
                    )
                return await handle(request, self.path)
            except _Refused as error:
                return _error(error.status, error)
            except events.UnknownEvent as error:
                return _error(HTTPStatus.NOT_FOUND, error)
            except events.Conflict as error:
                return _error(HTTPStatus.CONFLICT, error)
            except UnicodeDecodeError:
                return _error(HTTPStatus.BAD_REQUEST, "the body is no UTF-8 text")
            except ValueError as error:  # includes msgspec's errors
                return _error(HTTPStatus.BAD_REQUEST, error)
            except OSError as error:
                log.warning("cannot store events: %s", error)
                return _error(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"cannot access the events file, nothing was written: {error.strerror or error}",
                )

        return answer

    async def add(self, request: web.Request, path: Path) -> web.Response:
        event = msgspec.json.decode(await _body(request), type=events.NewEvent).event(self.clock())
        return _recorded(*await asyncio.to_thread(events.record, path, event), HTTPStatus.CREATED)

    async def close(self, request: web.Request, path: Path) -> web.Response:
        requested_end_s = msgspec.json.decode(await _body(request) or b"{}", type=End).end_s
        end_s = events.checked_time(self.clock() if requested_end_s is None else requested_end_s, self.clock())
        return _recorded(*await asyncio.to_thread(events.close, path, request.match_info["id"], end_s), HTTPStatus.OK)

    async def list_events(self, request: web.Request, path: Path) -> web.Response:
        since = request.query.get("since", "0")
        try:
            since_s = float(since)
        except ValueError:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"since={since[:40]} is no unix time in seconds") from None
        found, bad = await asyncio.to_thread(events.read, path)
        return _json(HTTPStatus.OK, {"events": events.since(found, since_s), "bad_lines": bad})


def owns(path: str) -> bool:
    """Return True for paths of this module, which check the token themselves.

    One Authorization header cannot hold both a login and a token."""
    return path == "/events" or path.startswith("/events/")


def _authorize(request: web.Request, token_file: Path | None) -> None:
    if token_file is None:
        raise _Refused(
            HTTPStatus.FORBIDDEN, "no access to events: set `events_token_file` in the sidecar's configuration"
        )
    try:
        token = token_file.read_bytes().strip()
    except OSError as error:
        log.warning("cannot read events_token_file, so all event requests are rejected: %s", error)
        token = b""
    if not token:
        raise _Refused(HTTPStatus.FORBIDDEN, "no access to events: the file in `events_token_file` holds no token")
    if request.get(AUTHENTICATED):
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token):
        raise _Refused(
            HTTPStatus.UNAUTHORIZED, "the token is missing or not the one in the sidecar's `events_token_file`"
        )


async def _body(request: web.Request) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.content.iter_chunked(4096):
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an event has at most {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise _Refused(HTTPStatus.REQUEST_TIMEOUT, f"the event was not received within {BODY_WITHIN_S:g} s") from None
    return body


def _recorded(event: events.TuningEvent, written: bool, first: HTTPStatus) -> web.Response:
    return _json(first if written else HTTPStatus.OK, {"event": event, "written": written})


def _error(status: HTTPStatus, why: object) -> web.Response:
    return _json(
        status, {"error": str(why)}, {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else {}
    )


def _json(status: HTTPStatus, content: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(content), content_type="application/json", headers=headers
    )
