"""The log of events over HTTP: POST /events, POST /events/ID/close, GET /events?since=SECONDS.

Laws: nobody reads or writes without the token, or a login that the listener knows; where no token is configured, nobody
does at all. Who is told 200 or 201 finds the event in the file."""

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
    """The body of a close, which may be empty. end_s: unix seconds; None is now."""

    end_s: float | None = None


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def routes(path: Path | None, token_file: Path | None, clock: Callable[[], float] = time.time) -> list[web.RouteDef]:
    """path: the file of events. token_file: holds one word; it is read at each request, so that a new one holds at
    once."""
    desk = _Desk(path, token_file, clock)
    return [
        web.get("/events", desk.guarded(desk.listed)),
        web.post("/events", desk.guarded(desk.add)),
        web.post("/events/{id}/close", desk.guarded(desk.close)),
    ]


@dataclass(frozen=True, slots=True)
class _Desk:
    """Where events are handed in and asked for. Whoever is not let in, or asks for what cannot be, is told so by
    `guarded`."""

    path: Path | None
    token_file: Path | None
    clock: Callable[[], float]

    def guarded(self, handle: Callable[[web.Request, Path], Awaitable[web.Response]]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            try:
                _enter(request, self.token_file)
                if self.path is None:
                    raise _Refused(
                        HTTPStatus.NOT_FOUND, "this sidecar keeps no events: set `events` in its configuration"
                    )
                return await handle(request, self.path)
            except _Refused as error:
                return _error(error.status, error)
            except events.UnknownEvent as error:
                return _error(HTTPStatus.NOT_FOUND, error)
            except events.Conflict as error:
                return _error(HTTPStatus.CONFLICT, error)
            except UnicodeDecodeError:
                return _error(HTTPStatus.BAD_REQUEST, "what was sent is no UTF-8 text")
            except ValueError as error:  # msgspec's are
                return _error(HTTPStatus.BAD_REQUEST, error)
            except OSError as error:
                log.warning("events that were sent cannot be kept: %s", error)
                return _error(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"the events cannot be reached, nothing was written: {error.strerror or error}",
                )

        return answer

    async def add(self, request: web.Request, path: Path) -> web.Response:
        event = msgspec.json.decode(await _body(request), type=events.NewEvent).event(self.clock())
        return _recorded(*await asyncio.to_thread(events.record, path, event), HTTPStatus.CREATED)

    async def close(self, request: web.Request, path: Path) -> web.Response:
        told = msgspec.json.decode(await _body(request) or b"{}", type=End).end_s
        end_s = events.happened(self.clock() if told is None else told, self.clock())
        return _recorded(*await asyncio.to_thread(events.close, path, request.match_info["id"], end_s), HTTPStatus.OK)

    async def listed(self, request: web.Request, path: Path) -> web.Response:
        since = request.query.get("since", "0")
        try:
            since_s = float(since)
        except ValueError:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"since={since[:40]} is no number of seconds since 1970") from None
        found, bad = await asyncio.to_thread(events.read, path)
        return _json(HTTPStatus.OK, {"events": events.since(found, since_s), "bad_lines": bad})


def owns(path: str) -> bool:
    """Whether a path is one of these, and so looks at the token by itself: one header cannot hold both a login and a
    token."""
    return path == "/events" or path.startswith("/events/")


def _enter(request: web.Request, token_file: Path | None) -> None:
    if token_file is None:
        raise _Refused(
            HTTPStatus.FORBIDDEN,
            "events are not open to others: set `events_token_file` in the sidecar's configuration",
        )
    try:
        token = token_file.read_bytes().strip()
    except OSError as error:
        log.warning("events_token_file cannot be read, so nobody is let in: %s", error)
        token = b""
    if not token:
        raise _Refused(
            HTTPStatus.FORBIDDEN,
            "events are not open to others: the file that `events_token_file` names holds no token",
        )
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
        raise _Refused(HTTPStatus.REQUEST_TIMEOUT, f"the event did not come within {BODY_WITHIN_S:g} s") from None
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
