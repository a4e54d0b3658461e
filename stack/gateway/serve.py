"""Runs the gateway: two listening sockets, the log, the watchers, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stack.config import BadConfig, load
from stack.gateway.client import KEEPALIVE_S, Client
from stack.gateway.config import GatewayConfig, Timeouts, address, rooted
from stack.gateway.log import RequestLog
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.proxy import Proxy
from stack.gateway.signals import Slots
from stack.gateway.teams import changes
from stack.gateway.terms import load_terms
from stack.gateway.watch import Watch

LOOK_EVERY_S = 0.25  # at the engines' figures, which come once a second
HEADER_BYTES = 32 << 10
GARBAGE_AFTER = 20_000  # objects, not Python's 700: a stream in flight holds about a hundred, and none of them is garbage
CUT_S = 2.0

_log = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class Started:
    """Where the gateway listens, ports resolved; its request log, for rotation by signal; and how to read teams.yaml anew."""

    url: str
    metrics_url: str
    log: RequestLog
    reload: Callable[[], None]


def run(config: GatewayConfig | Path) -> int:
    """Runs until SIGTERM or SIGINT; the exit code. A configuration file may be given by its path."""
    try:
        if isinstance(config, Path):
            config = rooted(load(config, GatewayConfig), config.resolve().parent)
        gc.freeze()  # what is loaded by now stays, and need not be looked through again and again
        gc.set_threshold(GARBAGE_AFTER)
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            runner.run(_until_signal(config))
    except BadConfig as error:
        _log.error("%s", error)
        return 1
    return 0


async def serve(config: GatewayConfig, *, stop: asyncio.Event, on_start: Callable[[Started], None] = lambda _: None) -> None:
    """Serves until `stop`, then drains: takes nothing new and lets running requests end. Raises BadConfig for what cannot start."""
    terms = load_terms(config)
    metrics = GatewayMetrics()
    log = RequestLog(Path(config.requests_log), metrics, config.limits.log_bytes)
    log.open()
    try:
        async with _watching_client(config.timeouts) as session, contextlib.AsyncExitStack() as stack:
            client = stack.enter_context(contextlib.closing(Client(config.timeouts.connect_s)))

            def tell(name: str, up: bool) -> None:
                if (address := proxy.terms.addresses.get(name)) is not None:  # it may have gone with a reload
                    metrics.upstream(name, address, up)

            watch = Watch(session, tell, lambda: proxy.running > 0)
            proxy = Proxy(terms, log, metrics, client, watch, limits=config.limits, timeouts=config.timeouts, engine_pages=config.engine_pages)
            metrics.watches(proxy.admission)
            metrics_url = await stack.enter_async_context(
                _listening("metrics_listen", config.metrics_listen, web.Server(metrics.page, access_log=None, logger=_http_log()))
            )
            server = web.Server(proxy.handle, handler_cancellation=True, access_log=None, logger=_http_log(), auto_decompress=False,
                                max_line_size=HEADER_BYTES, max_field_size=HEADER_BYTES)  # fmt: skip
            runner = web.ServerRunner(server, shutdown_timeout=CUT_S)
            url = await _listen(runner, "listen", config.listen)
            watch.follow(terms.upstreams, terms.headers)
            watchers = [asyncio.create_task(metrics.watch_loop()), asyncio.create_task(_fit_slots(proxy))]
            places = ", ".join(upstream.url for upstream in terms.upstreams.values())
            _log.info("gateway on %s in front of %s; metrics on %s; %d teams", url, places, metrics_url, len(terms.policy.teams))
            on_start(Started(url, metrics_url, log, lambda: _reload(config, proxy, metrics)))
            try:
                await stop.wait()
            finally:
                await _drain(proxy, runner, server, config.timeouts.drain_s)
                for watcher in watchers:
                    watcher.cancel()
                await watch.stop()
    finally:
        await log.stop()


def _reload(config: GatewayConfig, proxy: Proxy, metrics: GatewayMetrics) -> None:
    """teams.yaml anew; with a mistake in it, everything stays as it is. Streams that run are not touched."""
    try:
        terms = load_terms(config)
    except BadConfig as error:
        _log.error("%s; the terms of before stay in force", error)
        metrics.reloaded(False)
        return
    former = proxy.terms
    told = changes(former.policy, terms.policy)
    proxy.adopt(terms)
    metrics.forget(former.addresses.items() - terms.addresses.items())
    proxy.watch.follow(terms.upstreams, terms.headers)
    metrics.reloaded(True)
    _log.info("teams.yaml was read again: %s", "; ".join(told) or "nothing in it is different")


async def _fit_slots(proxy: Proxy) -> None:
    """Fewer slots while an engine has too much, more when it is calm again; until cancelled."""
    slots = Slots.full(proxy.terms.policy.capacity)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if slots.capacity != proxy.terms.policy.capacity:
            slots = Slots.full(proxy.terms.policy.capacity)
        slots = slots.after(proxy.watch.samples(), proxy.admission.running, proxy.now())
        if slots.slots != proxy.admission.slots:
            proxy.admission.resize(slots.slots, proxy.now())


async def _drain(proxy: Proxy, runner: web.ServerRunner, server: web.Server, drain_s: float) -> None:
    """No new connections, none kept idle, running requests end by themselves or are cut."""
    proxy.draining = True
    for site in list(runner.sites):
        await site.stop()
    server.pre_shutdown()
    await proxy.until_idle(drain_s)
    if proxy.running:
        _log.warning("%d requests are cut: they did not end within timeouts.drain_s (%g s)", proxy.running, drain_s)
    proxy.cutting = True
    for connection in server.connections:
        connection.force_close()
    await proxy.until_idle(CUT_S)
    await runner.cleanup()


async def _until_signal(config: GatewayConfig) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def started(it: Started) -> None:
        def hang_up() -> None:
            it.log.reopen()
            it.reload()

        loop.add_signal_handler(signal.SIGHUP, hang_up)

    await serve(config, stop=stop, on_start=started)


def _watching_client(timeouts: Timeouts) -> aiohttp.ClientSession:
    """The client of the watchers: adds nothing of its own, keeps no cookies, has no limit of connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        auto_decompress=False,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )


def _http_log() -> logging.Logger:
    """The log of a server without the complaints of its parser: they quote what they cannot read, and that may be a key or a prompt."""
    log = logging.getLogger("gateway.http")
    log.addFilter(_no_complaint)  # once, however often it is added
    return log


def _no_complaint(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


@contextlib.asynccontextmanager
async def _listening(what: str, listen: str, server: web.Server) -> AsyncIterator[str]:
    runner = web.ServerRunner(server, shutdown_timeout=CUT_S)
    try:
        yield await _listen(runner, what, listen)
    finally:
        await runner.cleanup()


async def _listen(runner: web.ServerRunner, what: str, listen: str) -> str:
    """Starts listening; the URL. Raises BadConfig that names the setting and the way out."""
    host, port = address(listen)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        if error.errno == errno.EADDRINUSE:
            raise BadConfig(f"{what}: {listen} is taken by another program; stop that one or set another port") from error
        raise BadConfig(f"{what}: cannot listen on {listen}: {error.strerror or error}") from error
    bound = runner.addresses[0]
    return f"http://{'[' + bound[0] + ']' if ':' in bound[0] else bound[0]}:{bound[1]}"


def _fast_loop() -> Callable[[], Any] | None:
    try:
        import uvloop
    except ImportError:  # slower, the same otherwise
        return None
    loop: Callable[[], Any] = uvloop.new_event_loop
    return loop
