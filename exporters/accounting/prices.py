"""Prices of GPU hours and of API tokens over time: prices.yaml, or `prices` in sidecar.yaml.

Invariant: every GPU has a price at every moment: that of the longest matching name, else the default `gpu_hour`."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

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


class PriceChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices from a moment on; a field that is omitted stays as it was before. Lists are replaced as a whole.

    valid_from: a date, or a date and time in whole minutes, in the zone of the prices where it has no offset."""

    valid_from: Any
    gpu_hour: float | None = None
    budget_per_1k_tokens: float | None = None
    gpus: tuple[GpuPrice, ...] | None = None
    api: tuple[ApiPrice, ...] | None = None

    def __post_init__(self) -> None:
        if moment_s(self.valid_from, UTC) % 60:
            raise ValueError(f"valid_from is {self.valid_from}; prices change at a whole minute")
        _above_zero("gpu_hour", () if self.gpu_hour is None else (self.gpu_hour,))
        if not self.changed_fields:
            raise ValueError(f"nothing changes at {self.valid_from}; name gpu_hour, gpus, api or budget_per_1k_tokens")

    @property
    def changed_fields(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("gpu_hour", "budget_per_1k_tokens", "gpus", "api")}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PriceVersion:
    """Prices between two changes. name: the date and a digest of the content. from_s: -inf for the first."""

    from_s: float
    name: str
    prices: Prices


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices and budget in one currency. Without a budget there is no budget alert.

    spread_idle: charge idle time to the teams by their usage of the same hour, instead of to __idle__. changes: later
    prices, in order of time. timezone: of `valid_from` without an offset, and of a bill unless it names another."""

    gpu_hour: float
    budget_per_1k_tokens: float | None = None
    currency: str = "USD"
    gpus: tuple[GpuPrice, ...] = ()
    api: tuple[ApiPrice, ...] = ()
    spread_idle: bool = False
    timezone: str = "UTC"
    changes: tuple[PriceChange, ...] = ()

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
        try:
            versions = self.versions()  # validates each version as prices of its own
        except (OSError, LookupError):
            raise ValueError(f"timezone {self.timezone!r} is unknown here; write it like Europe/Berlin") from None
        for earlier, later in itertools.pairwise(versions):
            if later.from_s <= earlier.from_s:
                raise ValueError(f"changes: {later.name} does not come after {earlier.name}; sort them by valid_from")

    def versions(self) -> tuple[PriceVersion, ...]:
        """Return the prices over time, the first valid since ever."""
        now = msgspec.structs.replace(self, changes=()) if self.changes else self
        found = [PriceVersion(-math.inf, f"base-{_digest(now)}", now)]
        for change in self.changes:
            at_s = moment_s(change.valid_from, self._zone())
            now = msgspec.structs.replace(now, **change.changed_fields)
            local = datetime.fromtimestamp(at_s, self._zone())
            named = local.strftime("%Y-%m-%dT%H:%M").removesuffix("T00:00")
            found.append(PriceVersion(at_s, f"{named}-{_digest(now)}", now))
        return tuple(found)

    def at(self, moment: float) -> Prices:
        """Return the prices that are valid at a moment, in unix seconds, without later changes."""
        if not self.changes:
            return self
        return next(each.prices for each in reversed(self.versions()) if each.from_s <= moment)

    def _zone(self) -> tzinfo:
        return UTC if self.timezone == "UTC" else ZoneInfo(self.timezone)

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


def moment_s(given: object, zone: tzinfo) -> float:
    """Return the unix seconds of a date or time, as text or as YAML reads it. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        moment = None
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime.combine(moment, time())
    if not isinstance(moment, datetime):
        raise ValueError(f"{given!r} is no date or time; write it like 2026-10-16 or 2026-10-16T12:00+02:00")
    return (moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp()


def _digest(prices: Prices) -> str:
    content = msgspec.structs.replace(prices, timezone="UTC") if prices.timezone != "UTC" else prices
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:8]
