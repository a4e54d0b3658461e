"""Guards of a canary: what the gateway knows of its engines, what alerts say of the error budget, and golden prompts.

Each is a function without arguments that returns sentences: reasons to stop the canary at once. A guard that cannot be
asked logs that and gives none."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
PLANNED = ("loading", "draining", "scaling")  # out of rotation, and no fault of the canary
FAST_BURNS = frozenset(f"VLLM{objective.name}BudgetBurn" for objective in default_objectives().objectives)

log = logging.getLogger("vllm_watch.canary")


@dataclass(frozen=True, slots=True)
class RotationGuard:
    """Asks the metrics listeners of the gateways whether they send the canary's engines requests. engines: by name."""

    gateways: Sequence[str]
    engines: Sequence[str]

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
            log.warning("%s cannot be asked about %s: %s", gateway, name, error or "timed out")
            return ""
        if status != 503 or any(f": {state} (" in text for state in PLANNED):
            return ""
        return f"the gateway takes it out of rotation: {text}"


@dataclass(slots=True)
class BudgetGuard:
    """Asks a Prometheus for firing alerts of the error budget's fast burn, at most every 15 s. models: of the canary;
    empty for all. steady: a monotonic clock."""

    address: Address
    models: Sequence[str]
    steady: Callable[[], float]
    _next_s: float = field(default=float("-inf"))

    def __call__(self) -> list[str]:
        if self.steady() < self._next_s:
            return []
        self._next_s = self.steady() + BURN_EVERY_S
        try:
            return asyncio.run(self._ask())
        except PrometheusError as error:
            log.warning("%s", error)
            return []

    async def _ask(self) -> list[str]:
        async with Prometheus(self.address, timeout_s=TIMEOUT_S) as prometheus:
            firing = [alert.labels for alert in await prometheus.alerts() if alert.state == "firing"]
        return [
            f"{labels['alertname']} fires for {labels.get('model_name', 'a model')}"
            for labels in firing
            if labels.get("alertname") in FAST_BURNS and self._concerns(labels)
        ]

    def _concerns(self, labels: Mapping[str, str]) -> bool:
        return not self.models or labels.get("model_name") in self.models


@dataclass(slots=True)
class GoldenGuard:
    """Checks the canary's engines against a baseline of golden prompts, at the start and then every 15 min.

    A check may take longer than a hung canary should have its share, so it runs in a thread of its own. Only `wrong`
    stops the canary: another release or dtype has other numbers. engines: URL and key by name. probe_log: gets a
    record for each request. steady: a monotonic clock."""

    baseline: Baseline
    engines: Mapping[str, tuple[str, str | None]]
    probe_log: Path | None
    steady: Callable[[], float]
    _next_s: float = field(default=float("-inf"))
    _checks: threading.Thread | None = None
    _wrong: dict[str, str] = field(default_factory=dict)

    def __call__(self) -> list[str]:
        idle = self._checks is None or not self._checks.is_alive()
        if idle and self.steady() >= self._next_s:
            self._next_s = self.steady() + GOLDEN_EVERY_S
            self._checks = threading.Thread(target=lambda: asyncio.run(self._check()), daemon=True)
            self._checks.start()
        return list(self._wrong.values())

    async def _check(self) -> None:
        for name, (url, key) in self.engines.items():
            try:
                found = await check_engine(url, self.baseline, key=key, probe_log=self.probe_log)
            except (GoldenError, OSError) as error:
                log.warning("golden prompts: %s", error)
                continue
            log.info("golden prompts: %s: %s: %s", name, found.verdict, found.sentence)
            if found.verdict is GoldenVerdict.WRONG:
                self._wrong[name] = f"golden prompts: {name} is wrong: {found.sentence}"
