"""Start and orderly end of the gateway: listeners, log, health probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from exporters import process
from exporters.engine.probe_endpoints import ENGINE_PROBES
from exporters.net.listener import Listening, accept, clients_at_most, listen
from stack.config import BadConfig, load
from stack.gateway import clock
from stack.gateway.client_connection import ClientServer
from stack.gateway.config import GatewayConfig, Timeouts, protection, rooted, upstream_tls
from stack.gateway.health import GAP_S, HealthMonitor
from stack.gateway.lease_renewal import LeaseRenewal, lease_renewal
from stack.gateway.load_signals import Slots
from stack.gateway.log import RequestLog
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.probe import Prober
from stack.gateway.proxy import Proxy
from stack.gateway.replicas import ReplicaList
from stack.gateway.runtime_policy import load_terms, settled_text
from stack.gateway.services import Services, make_services
from stack.gateway.sharing import Share, part_of, share_mistakes
from stack.gateway.teams import changes
from stack.gateway.upstream_client import KEEPALIVE_S, UpstreamClient

LOOK_EVERY_S = 0.25  # at the engines' figures, which come once a second
HEADER_BYTES = 32 << 10
# objects, not Python's 700: a stream in flight holds about a hundred, and none of them is garbage
GARBAGE_AFTER = 20_000
CUT_S = 2.0
SWITCH_S = 0.001  # after which a thread gives the interpreter's lock to the event loop, not Python's 5 ms

_log = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class Started:
    """Running gateway: its addresses, ports resolved; its request log, for rotation by signal; and how to read
    teams.yaml anew, which ends when the new terms hold."""

    url: str
    metrics_url: str
    log: RequestLog
    reload: Callable[[], asyncio.Task[None]]


def run(config: GatewayConfig | Path, *, shared_port: bool = False) -> int:
    """Runs until SIGTERM or SIGINT; the exit code. A configuration file may be given by its path. shared_port: other
    workers listen on the same port."""
    try:
        if isinstance(config, Path):
            config = rooted(load(config, GatewayConfig), config.resolve().parent)
        sys.setswitchinterval(SWITCH_S)
        with process.runner(GARBAGE_AFTER) as runner:
            runner.run(_until_signal(config, shared_port))
    except BadConfig as error:
        _log.error("%s", error)
        return 1
    return 0


async def serve(
    config: GatewayConfig,
    *,
    stop: asyncio.Event,
    on_start: Callable[[Started], None] = lambda _: None,
    shared_port: bool = False,
) -> None:
    """Serves until `stop`, then drains: takes nothing new and lets running requests end. Raises BadConfig for what
    cannot start."""
    terms = load_terms(config)
    tls = upstream_tls(config)
    replicas = ReplicaList(config.sharing, clock.now)
    if not await replicas.until_listed(stop):
        return
    metrics = GatewayMetrics()
    log = RequestLog(Path(config.requests_log), metrics, config.limits.log_bytes)
    log.open()
    try:
        async with _watching_client(config.timeouts, tls) as session, contextlib.AsyncExitStack() as stack:
            client = stack.enter_context(contextlib.closing(UpstreamClient(config.timeouts.connect_s, tls=tls)))

            def tell(name: str, up: bool) -> None:
                if (address := shared.life.terms.addresses.get(name)) is not None:  # it may have gone with a reload
                    metrics.upstream(name, address, up)

            prober = Prober(session, log, metrics)
            watch = HealthMonitor(
                session,
                tell,
                lambda: proxy.running > 0,
                send_probe=prober.send if config.liveness.probe else None,
                limits=config.liveness.limits(GAP_S),
                on_hung=config.liveness.on_hung,
                clock=clock.now,
            )
            shared = make_services(
                terms, replicas.shares, metrics, client, watch, config.limits, config.timeouts, config.cors
            )
            proxy = Proxy(shared, log, engine_pages=config.engine_pages, also_pass=config.also_pass)
            metrics.watches(shared.admission)
            metrics.shows_engines(
                lambda: [
                    (name, shared.life.terms.addresses.get(name, name), liveness, watch.healthy(name))
                    for name, liveness in watch.liveness().items()
                ]
            )
            metrics_url = await stack.enter_async_context(_figures(config, metrics))
            server = ClientServer(proxy.handle)
            guard = protection(config.web_config, "web_config", tls_only=True)
            listening = await accept(
                server.connection,
                "listen",
                config.listen,
                guard,
                clients_at_most(),
                metrics.rejected["clients"],
                shared_port=shared_port,
            )
            url = listening.url
            watch.follow(terms.upstreams, terms.headers)
            leases = lease_renewal(config.sharing, shared)
            following = replicas.follow(lambda shares: _share(shared, shares))
            loops = [metrics.watch_loop(), _fit_slots(shared, leases), following, *([leases.run()] if leases else ())]
            watchers = [asyncio.create_task(each) for each in loops]
            places = ", ".join(upstream.url for upstream in terms.upstreams.values())
            _log.info(
                "gateway on %s in front of %s; metrics on %s; %d teams",
                url,
                places,
                metrics_url,
                len(terms.policy.teams),
            )
            on_start(Started(url, metrics_url, log, _Reloads(config, shared).begin))
            try:
                await stop.wait()
                shared.life.stopping = True
                if config.timeouts.accept_grace_s:
                    await asyncio.sleep(config.timeouts.accept_grace_s)
            finally:
                await _drain(proxy, listening, server, config.timeouts.drain_s)
                for watcher in watchers:
                    watcher.cancel()
                await watch.stop()
                if leases is not None:
                    await leases.leave()
    finally:
        await log.stop()


class _Reloads:
    """Readings of teams.yaml, one after the other."""

    def __init__(self, config: GatewayConfig, shared: Services) -> None:
        self._config = config
        self._shared = shared
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None]:
        """Return the task of a reading that begins from now on; all who ask while one runs share the next."""
        self._next = self._next or asyncio.create_task(self._read(), name="reload")
        return self._next

    async def _read(self) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])
        self._running, self._next = self._next, None
        await _reload(self._config, self._shared)


async def _reload(config: GatewayConfig, shared: Services) -> None:
    """teams.yaml anew; with a mistake in it, everything stays as it is. Streams that run are not touched, nor do they
    wait for it."""
    metrics = shared.metrics
    try:
        text = await asyncio.to_thread(settled_text, path := Path(config.teams))
        policy = await shared.large.policy(path, text)
        terms = await asyncio.to_thread(load_terms, config, policy, text=text, former=shared.life.terms)
    except BadConfig as error:
        _log.error("%s; the terms of before stay in force", error)
        metrics.reloaded(False)
        return
    former = shared.life.terms
    changed = changes(former.policy, terms.policy)
    shared.adopt(terms)
    metrics.forget(former.addresses.items() - terms.addresses.items())
    shared.watch.follow(terms.upstreams, terms.headers)
    metrics.reloaded(True)
    _log.info("teams.yaml was read again: %s", "; ".join(changed) or "nothing in it is different")


def _share(shared: Services, shares: tuple[Share, ...]) -> None:
    """Divide the limits anew after a change of the list of replicas."""
    for sentence in share_mistakes(shared.life.terms.policy, max(share.replicas for share in shares)):
        _log.warning("%s", sentence)
    shared.share(shares)


async def _fit_slots(shared: Services, leases: LeaseRenewal | None) -> None:
    """Fewer slots while an engine has too much, more when it is calm again; until cancelled.

    Where a store leases them, these are the slots of all gateways, by the requests of all."""
    slots = Slots.full(shared.admission.capacity)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        capacity = shared.life.terms.policy.capacity if leases else shared.admission.capacity
        if slots.capacity != capacity:
            slots = Slots.full(capacity)
        running = shared.admission.running + (leases.busy if leases else 0)
        slots = slots.after(shared.watch.samples(), running, shared.now())
        fitted = slots.slots
        if leases is not None:
            leases.slots, fitted = fitted, part_of(shared.life.shares, fitted)
        if fitted != shared.admission.fitted:
            shared.admission.resize(fitted, shared.now())


async def _drain(proxy: Proxy, listening: Listening, server: ClientServer, drain_s: float) -> None:
    """No new connections, none kept idle, running requests end by themselves or are cut."""
    life = proxy.services.life
    life.draining = True
    await listening.close()
    server.finish()
    await proxy.until_idle(drain_s)
    if proxy.running:
        _log.warning("%d requests are cut: they did not end within timeouts.drain_s (%g s)", proxy.running, drain_s)
    life.cutting = True
    server.cancel()
    await proxy.until_idle(CUT_S)
    proxy.services.large.close()
    await server.close(CUT_S)


async def _until_signal(config: GatewayConfig, shared_port: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def started(it: Started) -> None:
        def hang_up() -> None:
            it.log.reopen()
            it.reload()

        loop.add_signal_handler(signal.SIGHUP, hang_up)

    await serve(config, stop=stop, on_start=started, shared_port=shared_port)


def _watching_client(timeouts: Timeouts, tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """The client of the watchers: adds nothing of its own, keeps no cookies, has no limit of connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        auto_decompress=False,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )


@contextlib.asynccontextmanager
async def _figures(config: GatewayConfig, metrics: GatewayMetrics) -> AsyncIterator[str]:
    """The listener of /metrics while the gateway runs; its URL."""
    runner = web.ServerRunner(web.Server(metrics.page, access_log=None), shutdown_timeout=CUT_S)
    guard = protection(config.metrics_web_config, "metrics_web_config")
    listening = await listen(
        runner,
        "metrics_listen",
        config.metrics_listen,
        guard,
        open_paths=("/-/healthy", *ENGINE_PROBES),
        rejected=metrics.rejected["figures"],
    )
    try:
        yield listening.url
    finally:
        await listening.close()
        await runner.cleanup()
