"""Engine that a bench measures: its identity, and its /metrics endpoint before, during and after a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from exporters.catalogue import exposition_parser, vllm
from exporters.catalogue.exposition_parser import Exposition
from exporters.engine import view as engine_view
from exporters.engine.client import EngineClient, served_names
from exporters.gpu.readings import GpuUnavailable
from exporters.gpu.source import GpuSource
from exporters.net.http_client import describe_error
from stack.bench import measurements, result
from stack.bench.load import BenchTarget
from stack.bench.measurements import Startup
from stack.bench.result import BenchEngine

LOOK_S = 10.0
FIRST_PEAK_S, PEAK_EVERY_S = 0.25, 2.0  # short runs have a peak too


class BadTarget(ValueError):
    """Engine that cannot be measured; the message has cause and remedy."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Engine under test. what: in the user's words; startup: from its start-up log."""

    name: str
    target: BenchTarget
    engine: BenchEngine
    what: str = ""
    startup: Startup = field(default_factory=Startup)

    @property
    def series(self) -> str:
        """Model name in the engine's metrics: an alias or an adapter is counted under the first name served."""
        return self.engine.series or self.engine.model

    @property
    def local(self) -> bool:
        return (urlsplit(self.target.url).hostname or "") in ("127.0.0.1", "localhost", "::1")


@contextlib.asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_S)) as session:
        yield session


async def look(url: str, model: str | None, key: str | None = None) -> tuple[BenchEngine, Exposition]:
    """Return the engine at an address, and its metrics. Raises BadTarget."""
    url = url.rstrip("/")
    if "@" in urlsplit(url).netloc:
        raise BadTarget(
            f"the address {result.without_login(url)} came with a login, which no request is sent with; give a key with"
            " --api-key-file"
        )
    async with http_session() as session:
        client = EngineClient(session, url, LOOK_S, key=key)
        try:
            models = await client.models()
        except aiohttp.ClientResponseError as error:
            hint = "; give the key with --api-key-file" if error.status in (401, 403) else ""
            raise BadTarget(f"{url}/v1/models answers {error.status}{hint}") from error
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BadTarget(
                f"no server answers at {url}/v1/models ({describe_error(error) or error or type(error).__name__}); is"
                " vLLM up, and is that its address?"
            ) from error
        served = {each.id: each for each in models}
        if not served:
            raise BadTarget(f"{url} serves no model")
        if model is not None and model not in served:
            raise BadTarget(f"{url} serves {', '.join(sorted(served))}, not {model}")
        name = model or next(iter(served))
        try:
            text, version = await client.scrape()
            found = exposition_parser.parse(text)
            view = engine_view.parse(text, version)
        except (aiohttp.ClientError, TimeoutError, exposition_parser.BadExposition) as error:
            raise BadTarget(
                f"{url}/metrics cannot be read ({error}); the bench needs vLLM's own page, so give the address of vLLM"
                " itself"
            ) from error
        return (
            BenchEngine(
                url=url,
                model=name,
                series=served_names(models).get(name),
                version=version,
                max_model_len=served[name].max_model_len,
                started_s=view.started_s,
                cache=dict(measurements.cache_labels(found)),
            ),
            found,
        )


@dataclass(slots=True)
class Peak:
    """Highest values observed during a run."""

    kv_ratio: float | None = None
    driver_bytes: float | None = None

    def observe(self, found: Exposition, model: str) -> None:
        values = [value for labels, value in found.of(vllm.KV_CACHE_USAGE.name) if labels.get("model_name") == model]
        if values:
            self.kv_ratio = max(self.kv_ratio or 0.0, *values)

    async def watch(self, subject: Subject, read: Callable[[], Any]) -> None:
        """Observe the engine until cancelled."""
        gpus = GpuSource() if subject.local else None
        pause_s = FIRST_PEAK_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PEAK_EVERY_S)
                with contextlib.suppress(BadTarget):
                    self.observe(await read(), subject.series)
                if gpus:
                    try:
                        read_gpus = await gpus.read(2.0)
                        used = [gpu.memory_used_bytes for gpu in read_gpus if gpu.memory_used_bytes is not None]
                        self.driver_bytes = max(self.driver_bytes or 0.0, sum(used)) if used else self.driver_bytes
                    except GpuUnavailable:
                        await gpus.close()
                        gpus = None
        finally:
            if gpus:
                await gpus.close()


async def empty_prefix_cache(session: aiohttp.ClientSession, subject: Subject) -> None:
    """Empty the prefix cache of an engine in development mode. Others do not offer it, and have no prompt of the run in
    it either way."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(f"{subject.target.url}/reset_prefix_cache"):
            pass


async def scrape(session: aiohttp.ClientSession, subject: Subject) -> Exposition:
    """Return the engine's metrics. Raises BadTarget."""
    try:
        body = await EngineClient(session, subject.target.url, LOOK_S).metrics()
        return exposition_parser.parse(body.decode("utf-8", "replace"))
    except (aiohttp.ClientError, TimeoutError, exposition_parser.BadExposition) as error:
        raise BadTarget(
            f"{subject.target.url}/metrics does not answer any more ({error or type(error).__name__})"
        ) from error


async def scrape_settled(
    session: aiohttp.ClientSession, subject: Subject, before: Exposition, answered: int
) -> Exposition:
    """Return the metrics once they count all answers; an engine's counters lag a moment behind them."""
    name = vllm.REQUEST_SUCCESS.name
    then = before.total(name, model_name=subject.series) or 0.0
    for _ in range(10):
        found = await scrape(session, subject)
        if (found.total(name, model_name=subject.series) or 0.0) - then >= answered:
            break
        await asyncio.sleep(0.1)
    return found


def has_restarted(before: Exposition, after: Exposition) -> bool:
    """Return True if the engine restarted, as far as it reports when it started."""
    started = [found.total(vllm.PROCESS_START_TIME.name) for found in (before, after)]
    return None not in started and started[0] != started[1]
