"""Prices of GPU hours and of API tokens: prices.yaml, or `prices` in sidecar.yaml.

Invariant: every GPU has a price: that of the longest matching name, else the default `gpu_hour`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

ANY_MODEL = "*"
_PROFILE = re.compile(r"\d+g\.\d+gb(\+.*)?")


class GpuPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Price per hour of a GPU whose name contains `name`, case-insensitive.

    mig: of an instance, by profile such as 1g.10gb."""

    name: str
    gpu_hour: float
    mig: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError(
                "name is a part of the GPU's name, such as H100; the default for all others is gpu_hour beside gpus"
            )
        _above_zero("gpu_hour", (self.gpu_hour,))
        _above_zero("mig", self.mig.values())
        for profile in self.mig:
            if not _PROFILE.fullmatch(profile):
                raise ValueError(
                    f"mig has {profile!r}, which is no MIG profile; write it like 1g.10gb, as `nvidia-smi -L` shows it"
                )


class ApiPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Price per thousand tokens of a served model (or any other: "*") from an API.

    Cached input costs as much as other input unless set."""

    model: str
    input_per_1k: float
    output_per_1k: float
    cached_input_per_1k: float | None = None

    def __post_init__(self) -> None:
        for name in ("input_per_1k", "output_per_1k", "cached_input_per_1k"):
            price = getattr(self, name)
            if price is not None and not (price >= 0 and math.isfinite(price)):
                raise ValueError(f"{name} is {price}; a price must not be negative")

    def cost(self, prompt_tokens: float, cached_tokens: float, completion_tokens: float) -> float:
        """Return the cost of tokens; cached ones are part of the prompt."""
        cached_price = self.input_per_1k if self.cached_input_per_1k is None else self.cached_input_per_1k
        computed = max(0.0, prompt_tokens - cached_tokens)
        return (
            computed * self.input_per_1k + cached_tokens * cached_price + completion_tokens * self.output_per_1k
        ) / 1000


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices and budget in one currency. Without a budget there is no budget alert.

    spread_idle: charge idle time to the teams by their usage of the same hour, instead of to __idle__."""

    gpu_hour: float
    budget_per_1k_tokens: float | None = None
    currency: str = "USD"
    gpus: tuple[GpuPrice, ...] = ()
    api: tuple[ApiPrice, ...] = ()
    spread_idle: bool = False

    def __post_init__(self) -> None:
        if not (self.gpu_hour > 0 and math.isfinite(self.gpu_hour)) or (
            self.budget_per_1k_tokens is not None and self.budget_per_1k_tokens <= 0
        ):
            raise ValueError("prices must be greater than 0; omit `prices` if there are none")
        if not self.currency:
            raise ValueError("currency is empty; write it like USD or EUR")
        for name, listed in (("gpus", [g.name.lower() for g in self.gpus]), ("api", [a.model for a in self.api])):
            if twice := next((one for one in listed if listed.count(one) > 1), None):
                raise ValueError(f"{name} has {twice!r} twice; keep one price for it")

    def per_hour(self, name: str | None, fraction: float = 1.0, profile: str | None = None) -> float:
        """Return the hourly price of a GPU, or of a MIG instance: its profile's, else its fraction of the GPU's."""
        known = max(
            (g for g in self.gpus if g.name.lower() in (name or "").lower()), key=lambda g: len(g.name), default=None
        )
        if known and profile and profile in known.mig:
            return known.mig[profile]
        return (known.gpu_hour if known else self.gpu_hour) * fraction

    def api_price(self, model: str) -> ApiPrice | None:
        """Return the price of this model, else that of any model."""
        return next((a for wanted in (model, ANY_MODEL) for a in self.api if a.model == wanted), None)


def _above_zero(name: str, prices: Iterable[float]) -> None:
    if not all(price > 0 and math.isfinite(price) for price in prices):
        raise ValueError(f"{name}: a price must be greater than 0")
