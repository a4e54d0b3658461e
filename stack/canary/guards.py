"""Guards of a canary: what the gateway knows of its engines, what alerts say of the error budget, and golden prompts.

Each is a function without arguments that returns sentences: reasons to stop the canary at once. A guard that cannot be
asked logs that and gives none."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from alerts.slo import default_objectives
from exporters.engine.golden_state import GoldenVerdict
from exporters.engine.probe_endpoints import ENGINE_READY
from exporters.net.bounded_read import read_bounded
from exporters.net.prometheus import Address, Prometheus, PrometheusError
from stack.golden.baseline import Baseline, GoldenError
from stack.golden.check import check_engine

TIMEOUT_S = 3.0
BURN_EVERY_S = 15.0
GOLDEN_EVERY_S = 900.0
LOADING = "loading"  # before the canary was ready
PLANNED = (LOADING, "draining", "scaling")  # out of rotation, and no fault of the canary
FAST_BURNS = frozenset(f"VLLM{objective.name}BudgetBurn" for objective in default_objectives().objectives)

log = logging.getLogger("vllm_watch.canary")


@dataclass(slots=True)
class RotationGuard:
    """Asks the metrics listeners of the gateways whether they send the canary's engines requests. engines: by name."""

    gateways: Sequence[str]
    engines: Sequence[str]
    _ready: set[str] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)

    def __call__(self) -> list[str]:
        return asyncio.run(self._ask())

    async def _ask(self) -> list[str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            asked = [self._one(session, gateway, name) for gateway in self.gateways for name in self.engines]
            return [sentence for sentence in await asyncio.gather(*asked) if sentence]

    async def _one(self, session: aiohttp.ClientSession, gateway: str, name: str) -> str:
        url = gateway.rstrip("/") + ENGINE_READY
        try:
            async with session.get(url, params={"upstream": name}) as response:
                status, text = response.status, (await read_bounded(response)).decode("utf-8", "replace").strip()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._warn(f"{gateway} cannot be asked about {name}: {error or 'timed out'}")
            return ""
        if status == 200:
            self._ready.add(name)
        elif status != 503:
            self._warn(
                f"{gateway} answers {status} about {name}, so a hang is not noticed; --gateway is metrics_listen of a"
                " gateway that has read this teams.yaml"
            )
        elif (f": {LOADING} (" in text and name in self._ready) or not any(f": {state} (" in text for state in PLANNED):
            return f"the gateway takes it out of rotation: {text}"
        return ""

    def _warn(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("%s", sentence)


@dataclass(slots=True)
class BackgroundGuard:
    """Asks again and again in a thread, because an answer may take longer than a hung canary should have its share.

    ask: returns the reasons. steady: a monotonic clock."""

    ask: Callable[[], Coroutine[Any, Any, list[str]]]
    every_s: float
    steady: Callable[[], float]
    _next_s: float = field(default=float("-inf"))
    _thread: threading.Thread | None = None
    _reasons: list[str] = field(default_factory=list)

    def __call__(self) -> list[str]:
        if (self._thread is None or not self._thread.is_alive()) and self.steady() >= self._next_s:
            self._next_s = self.steady() + self.every_s
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self._reasons

    def _run(self) -> None:
        self._reasons = asyncio.run(self.ask())

    def wait(self) -> None:
        """Wait until the present question is answered."""
        if self._thread is not None:
            self._thread.join()


@dataclass(frozen=True, slots=True)
class BudgetQuery:
    """Asks a Prometheus for firing alerts of the error budget's fast burn. models: that the canary serves too; None for
    all."""

    address: Address
    models: Collection[str] | None

    async def __call__(self) -> list[str]:
        try:
            async with Prometheus(self.address, timeout_s=TIMEOUT_S) as prometheus:
                firing = [alert.labels for alert in await prometheus.alerts() if alert.state == "firing"]
        except PrometheusError as error:
            log.warning("%s", error)
            return []
        return [
            f"{labels['alertname']} fires for {labels.get('model_name', 'a model')}"
            for labels in firing
            if labels.get("alertname") in FAST_BURNS
            and (self.models is None or labels.get("model_name") in self.models)
        ]


@dataclass(frozen=True, slots=True)
class GoldenQuery:
    """Checks the canary's engines against a baseline of golden prompts. Only `wrong` is a reason to stop.

    engines: URL and key by name. probe_log: gets a record for each request."""

    baseline: Baseline
    engines: Mapping[str, tuple[str, str | None]]
    probe_log: Path | None

    async def __call__(self) -> list[str]:
        reasons = []
        for name, (url, key) in self.engines.items():
            try:
                found = await check_engine(url, self.baseline, key=key, probe_log=self.probe_log)
            except (GoldenError, OSError) as error:
                log.warning("golden prompts: %s", error)
                continue
            log.info("golden prompts: %s: %s: %s", name, found.verdict, found.sentence)
            if found.verdict is GoldenVerdict.WRONG:
                reasons.append(f"golden prompts: {name} is wrong ({found.cause}): {found.sentence}")
        return reasons
