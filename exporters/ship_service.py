"""Service of `vllm-watch ship run`: the shipper in a thread, its /metrics, and the daily comparison with the counters.

Invariant: a failure of the store or of the comparison is counted and retried. A second writer ends the process."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from exporters import process, scrape
from exporters.accounting.conservation import DayBalance, balance_day
from exporters.catalogue import ship as series
from exporters.dataset.catalog import open_store
from exporters.dataset.parquet import range_sums
from exporters.dataset.ship import Shipper
from exporters.dataset.ship_config import ShipConfig
from exporters.exposition import Sample
from exporters.net.listener import listen
from exporters.net.listener_auth import ListenerAuth
from exporters.net.prometheus import address_from

VERIFY_S = 600.0
SETTLED_S = 3600.0  # after midnight; by then late requests are logged, sealed and stored

log = logging.getLogger("vllm_watch.ship")


class ShipService:
    """Shipper of one configuration, until `stop` is set. Raises BadConfig, BadDataset, OSError."""

    def __init__(self, config: ShipConfig) -> None:
        self.config = config
        self.shipper = Shipper(config)
        self._stop = threading.Event()
        self._verified: dict[str, list[DayBalance]] = {}
        self._verified_s = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Serve and ship. On `stop` everything that was read is sealed and stored."""
        runner = web.AppRunner(self._application(), access_log=None)
        where = self.config.web_config
        listening = await listen(
            runner,
            "listen",
            self.config.listen,
            ListenerAuth(None if where is None else Path(where)),
            open_paths=("/-/healthy",),
        )
        shipping = asyncio.create_task(asyncio.to_thread(self.shipper.run, self._stop))
        verifying = asyncio.create_task(self._verify())
        stopping = asyncio.create_task(stop.wait())
        try:
            log.info("serving %s/metrics", listening.url)
            async with process.tidied():
                await asyncio.wait((shipping, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            verifying.cancel()
            stopping.cancel()
            await asyncio.gather(verifying, stopping, return_exceptions=True)
            await listening.close()
            await runner.cleanup()
            try:
                await shipping
            finally:
                self.shipper.close()

    async def _verify(self) -> None:
        """Compare the last complete day, once it is settled."""
        if not self.config.prometheus:
            return
        while True:
            day = (datetime.fromtimestamp(time.time() - SETTLED_S, UTC).date() - timedelta(days=1)).isoformat()
            if day not in self._verified:
                try:
                    self._verified = {day: await verify(self.config, day)}
                    self._verified_s = time.time()
                except Exception as error:  # the next attempt follows
                    log.warning("the data set of %s cannot be compared: %s", day, error)
            await asyncio.sleep(VERIFY_S)

    def samples(self) -> Iterator[Sample]:
        yield from self.shipper.samples()
        largest: defaultdict[tuple[str, str], float] = defaultdict(float)
        for balances in self._verified.values():
            for one in balances:
                largest[one.kind, one.model] = max(largest[one.kind, one.model], one.unexplained)
        for (kind, model), value in largest.items():
            yield series.SHIP_UNEXPLAINED, {"kind": kind, "model_name": model}, value
        if self._verified_s:
            yield series.SHIP_VERIFIED, {}, self._verified_s

    def _application(self) -> web.Application:
        async def metrics(request: web.Request) -> web.Response:
            page, content_type = scrape.answer(self.samples(), request.headers.get("Accept", ""))
            return web.Response(body=page, headers={"Content-Type": content_type})

        async def healthy(_: web.Request) -> web.Response:
            return web.Response(text="healthy\n")

        app = web.Application()
        app.add_routes([web.get("/metrics", metrics), web.get("/-/healthy", healthy)])
        return app


async def verify(config: ShipConfig, day: str) -> list[DayBalance]:
    """Return the balances of a day of this cluster. Raises ValueError, BadDataset, StoreError, BadConfig."""
    where = address_from(config.prometheus or "", http_config=Path(config.http_config) if config.http_config else None)
    store = open_store(config.dataset, config.s3)
    sums = functools.partial(range_sums, store, Path(config.state) / "cache")
    return await balance_day(store, where, day, (config.cluster,), config.cluster, sums)
