"""HTTP server of the dashboards: routes, authentication, queries of a panel."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from alerts.panel_ref import board_uid
from alerts.settings import DEFAULTS, Settings
from dashboards import annotations as noted
from dashboards import variables
from dashboards.interpolate import Range, fill
from dashboards.model import LEAST_RATE_S, Dashboard, Panel, Variable
from dashboards.registry import BOARDS, boards
from exporters import process
from exporters.net.addresses import split_address
from exporters.net.listener import listen
from exporters.net.listener_auth import ListenerAuth
from exporters.net.prometheus import DEFAULT_SCRAPE_S, Address, Prometheus, PrometheusError, QueryResult
from runbooks import lookup
from runbooks import page as runbook_pages
from stack import render
from stack.board import charts, marks, options, pages
from stack.board.request_pages import RequestPages
from stack.board.view import BadView, PanelView, lenient, parse
from stack.request_source import RequestSourceOptions

_FOR_EVER = "public, max-age=31536000, immutable"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": pages.LIVE_POLICY,
}
_TYPES = {"js": "text/javascript", "css": "text/css"}

# RFC 9110, section 7.2: an address of IPv6 in brackets, or a name; a port
_HOST = re.compile(r"(?:\[([^][]+)\]|([^][:]+))(?::\d*)?")

# A link to a runbook carries labels: at most so many, each of at most so many characters, as Prometheus names them.
LABELS, LABEL_BYTES = 32, 1024
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,127}")
EVALUATION_S = 5.0  # a page is shown after this time, whatever Prometheus has answered by then

_log = logging.getLogger("board")


def admitted(host: str, listen_host: str, allowed: Sequence[str] = ()) -> bool:
    """Return whether a request's Host is one of ours: loopback, the address that we listen on, or one that was allowed.

    A page of somebody else may have its name resolved to this machine and so read what is served here; its Host gives
    it away."""
    found = _HOST.fullmatch(host)
    name = (found[1] or found[2] or "").lower().rstrip(".") if found else ""
    if name == "localhost" or name in (one.lower() for one in (listen_host.strip("[]"), *allowed)):
        return bool(name)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class DashboardServer:
    """Answers questions about boards from a Prometheus.

    Invariant: a server of one team reads that team's dashboard only; it serves no runbook, because their queries read
    all teams."""

    prometheus: Prometheus
    boards: tuple[Dashboard, ...] = BOARDS
    settings: Settings = DEFAULTS  # of the pages; the boards bring their own lines
    requests: RequestPages | None = None

    @property
    def has_runbooks(self) -> bool:
        return not any(board.team for board in self.boards)

    def board(self, uid: str) -> Dashboard | None:
        return next((board for board in self.boards if board_uid(board.slug) == uid), None)

    async def panel(self, panel: Panel, view: PanelView) -> dict[str, Any]:
        """Return what a panel shows. Raises ValueError for choices that no query can have."""
        try:
            over = view.over(await self.prometheus.scrape_s())
        except PrometheusError as error:
            return charts.draw(
                panel, [QueryResult(error=str(error)) for _ in panel.queries], view.over(DEFAULT_SCRAPE_S)
            )
        instant = panel.shape in charts.INSTANT
        asked_over = replace(over, least_s=LEAST_RATE_S) if panel.ranked else over
        asked = [fill(query.expr, view.choices, asked_over) for query in panel.queries]
        answers = await asyncio.gather(
            *(
                self.prometheus.as_of(expr, view.end_s) if instant else self.prometheus.over_time(expr, over)
                for expr in asked
            )
        )
        return await asyncio.to_thread(charts.draw, panel, answers, over)

    async def annotations(self, board: Dashboard, view: PanelView) -> list[dict[str, Any]]:
        found, over = noted.of(board), view.over_marks()
        answers = await asyncio.gather(
            *(self.prometheus.over_time(fill(one.expr, view.choices, over), over) for one in found)
        )
        return [
            await asyncio.to_thread(marks.marks, one, answer, over) for one, answer in zip(found, answers, strict=True)
        ]

    async def variables(self, board: Dashboard, view: PanelView) -> list[dict[str, Any]]:
        """Every choice of a board. What one of them offers depends on what is chosen before it, not on what that one
        offers: all at once."""
        return list(await asyncio.gather(*(self._variable(variable, view) for variable in variables.of(board))))

    async def missing(self, board: Dashboard, view: PanelView) -> list[dict[str, Any]]:
        """The preconditions of a board that are not met in the shown range, each with the panels that stay empty
        without it."""
        over = view.over(DEFAULT_SCRAPE_S)
        answers = await asyncio.gather(
            *(self.prometheus.as_of(fill(one.expr, view.choices, over), view.end_s) for one in board.preconditions)
        )
        return [
            {
                "text": one.missing,
                "panels": [pages.panel_id(board, panel) for panel in board.panels if panel.requires == one],
            }
            for one, answer in zip(board.preconditions, answers, strict=True)
            if not answer.series and not answer.error
        ]

    async def _variable(self, variable: Variable, view: PanelView) -> dict[str, Any]:
        wrong = view.wrong.get(variable.name, "")
        if variable.kind != "query":
            return options.offered(variable, (), dict(view.choices), wrong)
        try:
            asked = options.question(variable, view, Range(view.start_s, view.end_s))
            values = await self.prometheus.label_values(asked.label, asked.series, view.start_s, view.end_s)
        except (PrometheusError, ValueError) as error:
            return options.offered(variable, (), dict(view.choices), str(error))
        return await asyncio.to_thread(options.offered, variable, values, dict(view.choices), wrong)


def application(
    desk: DashboardServer,
    listen_host: str = "127.0.0.1",
    allowed: Sequence[str] = (),
    now: Callable[[], float] = time.time,
) -> web.Application:
    """The routes. Everything is GET, nothing is kept, and no request can name a query."""
    api, books = DashboardApi(desk, now), Runbooks(desk.settings, desk.prometheus, now, desk.requests is not None)

    async def home(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"/d/{board_uid(desk.boards[0].slug)}")

    async def shell(request: web.Request) -> web.StreamResponse:
        return _html(
            pages.board_page(_board_of(desk, request), desk.boards, desk.has_runbooks, desk.requests is not None)
        )

    app = web.Application(middlewares=[_guard(listen_host, allowed)])
    app.add_routes([
        web.get("/", home), web.get("/d/{uid}", shell), web.get("/d/{uid}/{title}", shell),
        web.get("/api/panel/{uid}/{panel}", api.panel), web.get("/api/annotations/{uid}", api.annotations),
        web.get("/api/variables/{uid}", api.variables),
        web.get("/static/{name}", _static), web.get("/-/healthy", _healthy),
    ])  # fmt: skip
    if desk.requests:
        app.add_routes([web.get("/requests", desk.requests.listing), web.get("/requests/{id}", desk.requests.show)])
    if desk.has_runbooks:
        app.add_routes([
            web.get("/runbooks", books.index), web.get("/runbooks/", books.index),
            web.get("/runbooks/{name}", books.page),
        ])  # fmt: skip
    return app


def _guard(listen_host: str, allowed: Sequence[str]) -> Middleware:
    """Rejects requests for another host or from another origin, and adds our headers to the rest."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not admitted(request.headers.get("Host", ""), listen_host, allowed):
            refusal = (
                "This board answers only under its own address; to reach it under another name start it with"
                " --allow-host NAME.\n"
            )
            return web.Response(status=421, text=refusal, headers=_HEADERS)
        if request.path.startswith("/api/") and request.headers.get("Sec-Fetch-Site") == "cross-site":
            return web.Response(
                status=403, text="Figures are for the pages of this board, not for those of others.\n", headers=_HEADERS
            )
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(_HEADERS)
            raise
        response.headers.update(_HEADERS)
        return response

    return guard


@dataclass(frozen=True, slots=True)
class DashboardApi:
    """The figures of the boards, as JSON."""

    desk: DashboardServer
    now: Callable[[], float]

    async def panel(self, request: web.Request) -> web.StreamResponse:
        board = _board_of(self.desk, request)
        panel = _panel_of(board, request)
        return await _told(self.desk.panel(panel, self._view(request, board, parse)))

    async def annotations(self, request: web.Request) -> web.StreamResponse:
        board = _board_of(self.desk, request)
        return await _told(self.desk.annotations(board, self._view(request, board, parse)))

    async def variables(self, request: web.Request) -> web.StreamResponse:
        board = _board_of(self.desk, request)
        view = self._view(request, board, lenient)
        found, missing = await asyncio.gather(self.desk.variables(board, view), self.desk.missing(board, view))
        return _json(
            {
                "start": round(view.start_s * 1000),
                "end": round(view.end_s * 1000),
                "variables": found,
                "missing": missing,
            }
        )

    def _view(self, request: web.Request, board: Dashboard, read: Callable[..., PanelView]) -> PanelView:
        try:
            return read(request.query, board, self.now())
        except BadView as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from None


@dataclass(frozen=True, slots=True)
class Runbooks:
    """Runbook pages with the thresholds of the settings, filled and evaluated for the alert that a link names."""

    settings: Settings
    prometheus: Prometheus
    now: Callable[[], float]
    has_requests: bool = False

    async def index(self, _: web.Request) -> web.StreamResponse:
        return _html(await asyncio.to_thread(lambda: pages.runbook_index(render.pages(self.settings))))

    async def page(self, request: web.Request) -> web.StreamResponse:
        asked = request.match_info["name"]
        text = await asyncio.to_thread(render.page_text, asked.removesuffix(".md"), self.settings)
        if text is None:
            return _html(await asyncio.to_thread(lambda: pages.runbook_missing(asked, runbook_pages.pages())), 404)
        if asked.endswith(".md"):
            return web.Response(text=text)
        labels = labels_of(request.query)
        page = runbook_pages.parse(asked, runbook_pages.fill(text, labels))
        live = None
        if "live" in request.query:
            live = await lookup.evaluate(page, labels, self.prometheus, self.now(), self.settings, EVALUATION_S)
        return _html(await asyncio.to_thread(pages.runbook_page, page, labels, live, self.has_requests))


def labels_of(query: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of an alert from the query string of its runbook link. What is no label is ignored."""
    named = {name: value for name, value in query.items() if name != "live" and _LABEL.fullmatch(name)}
    return dict(list({name: value for name, value in named.items() if 0 < len(value) <= LABEL_BYTES}.items())[:LABELS])


async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    try:
        plain = pages.static(name)
    except KeyError:
        raise web.HTTPNotFound(text="There is no such file.\n") from None
    packed = "gzip" in request.headers.get("Accept-Encoding", "")
    body = await asyncio.to_thread(_packed, name) if packed else plain
    headers = {"Cache-Control": _FOR_EVER, "Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if packed else {})
    return web.Response(body=body, content_type=_TYPES[name.rsplit(".", 1)[1]], charset="utf-8", headers=headers)


async def _healthy(_: web.Request) -> web.StreamResponse:
    return web.Response(text="healthy\n")


def _board_of(desk: DashboardServer, request: web.Request) -> Dashboard:
    board = desk.board(request.match_info["uid"])
    if board is None:
        known = "\n".join(f"/d/{board_uid(one.slug)}  {one.title}" for one in desk.boards)
        raise web.HTTPNotFound(text=f"There is no board {request.match_info['uid'][:80]}. The boards are:\n{known}\n")
    return board


def _panel_of(board: Dashboard, request: web.Request) -> Panel:
    number = request.match_info["panel"]
    found = next((panel for panel in board.panels if str(pages.panel_id(board, panel)) == number), None)
    if found is None:
        raise web.HTTPNotFound(text=f"{board.title} has no panel {number[:20]}.\n")
    return found


async def _told(asked: Awaitable[Any]) -> web.Response:
    try:
        return _json(await asked)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"{error}\n") from None


def _json(content: Any) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html", headers={"Cache-Control": "no-cache"})


@cache
def _packed(name: str) -> bytes:
    return gzip.compress(pages.static(name), 6, mtime=0)


async def serve(
    where: Address,
    address: str,
    scrape_s: float | None,
    allowed: Sequence[str],
    stop: asyncio.Event,
    settings: Settings = DEFAULTS,
    web_config: Path | None = None,
    team: str | None = None,
    source: RequestSourceOptions | None = None,
    trace_url: str | None = None,
) -> None:
    """Serve until `stop`. team: serve only the dashboard of this team. source: of the requests to list.

    Raises BadConfig when the address is taken or web_config wrong. Prometheus may come and go meanwhile: panels say
    so."""
    guard = ListenerAuth(web_config, "--web-config")
    host, _ = split_address(address)
    async with Prometheus(where, scrape_s) as prometheus:
        requests = RequestPages(source, team, time.time, trace_url) if source else None
        desk = DashboardServer(prometheus, boards(settings=settings, team=team), settings, requests)
        runner = web.AppRunner(
            application(desk, host, allowed), access_log=None, handler_cancellation=True, shutdown_timeout=2
        )
        listening = await listen(runner, "--listen", address, guard, open_paths=("/-/healthy",))
        _log.info("boards at %s/ from Prometheus at %s", listening.url, where.shown)
        greeting = asyncio.create_task(_greet(prometheus))
        try:
            async with process.tidied():
                await stop.wait()
        finally:
            greeting.cancel()
            await listening.close()
            await runner.cleanup()


async def _greet(prometheus: Prometheus) -> None:
    try:
        await prometheus.scrape_s()
    except PrometheusError as error:
        _log.warning("%s Until then every panel says so.", error)
