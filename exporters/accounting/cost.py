"""Usage and cost of teams and models over a period: rows, their total, and how cost is set and spread. Pure.

Invariant: the total is the sum of the rows, also per day and price version. Idle, unattributed and unclaimed aborted
work have their own rows. Aborted work claimed by a record is in its team's row, with a column for its part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from exporters.accounting.billing_period import BillingPeriod, PriceSegment
from exporters.accounting.busy_hours import HOUR_S
from exporters.accounting.gpu_use import ABORTED, IDLE, NOBODY, UNATTRIBUTED
from exporters.accounting.prices import Prices
from exporters.requests.record import nearest

BY = ("team", "model", "cluster", "price")
DEFAULT_BY = "team,model,cluster"
SPREADABLE = {"idle": IDLE, "aborted": ABORTED, "unattributed": UNATTRIBUTED}
SHARED = "the split between teams is an estimate; every total is exact"
NO_PRICES = "prices are missing, so no cost is shown: give --prices FILE (docs/guides/cost.md)"
RECORDED = "recorded"  # price version of cost that a sidecar booked at the prices of the moment
DEFAULT_SINCE_S = 86_400.0
JOULES_PER_KWH = 3.6e6


@dataclass(slots=True)
class TeamUse:
    """Usage of one model by one team. Seconds of a full GPU; cost in the report's currency.

    aborted_seconds, aborted_cost: parts of seconds and of cost_usage spent on aborted requests. est_...: tokens of
    requests without usage; not in other values. unreadable_requests: answers that could not be read."""

    seconds: float = 0.0
    aborted_seconds: float = 0.0
    cost_allocation: float = 0.0
    cost_usage: float = 0.0
    aborted_cost: float = 0.0
    joules: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    completion_tokens: float = 0.0
    est_prompt_tokens: float = 0.0
    est_completion_tokens: float = 0.0
    unreadable_requests: float = 0.0
    api_cost: float = 0.0

    def add(self, other: TeamUse) -> None:
        for each in fields(TeamUse):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.completion_tokens

    def set_aborted_cost(self) -> None:
        """Set the aborted part of the cost, by time."""
        self.aborted_cost = self.cost_usage * self.aborted_seconds / self.seconds if self.seconds else 0.0


Uses = defaultdict[tuple[str, str], TeamUse]  # by team and model


def new_uses() -> Uses:
    return defaultdict(TeamUse)


@dataclass(frozen=True, slots=True, order=True)
class CostPart:
    """Part of a bill: at most one calendar day, of one cluster, with one version of the prices."""

    from_s: float
    to_s: float
    cluster: str = ""
    price_version: str | None = None


@dataclass(slots=True)
class SourceTotals:
    """Totals from one source, by part.

    method: how shared GPU time is split, in FOCUS rows. known: which of cost, api, joules, estimates and unreadable it
    has. notes: assumptions. price_versions: content of each version by name. spread: rows whose cost others carry.
    lines, bad_lines: of the request logs, as far as the source has them."""

    source: str
    period: BillingPeriod
    currency: str | None = None
    method: str = "computed-tokens"
    parts: defaultdict[CostPart, Uses] = field(default_factory=lambda: defaultdict(new_uses))
    known: set[str] = field(default_factory=set)
    price_versions: dict[str, Any] = field(default_factory=dict)
    spread: tuple[str, ...] = ()
    lines: float = 0.0
    bad_lines: float = 0.0
    notes: list[str] = field(default_factory=lambda: [SHARED])

    @property
    def uses(self) -> Uses:
        """Return the usage of the whole period."""
        found = new_uses()
        for _, uses in self.ordered():
            for key, use in sorted(uses.items()):
                found[key].add(use)
        return found

    def ordered(self) -> list[tuple[CostPart, Uses]]:
        """Return the parts in order of time: sums are the same each time, to the last bit."""
        return sorted(self.parts.items(), key=lambda item: (item[0].from_s, item[0].cluster))


def part_of(segment: PriceSegment, cluster: str, version: str | None = None) -> CostPart:
    name = segment.version.name if segment.version else version
    return CostPart(segment.from_s, segment.to_s, cluster, name)


# ---- the report


def parse_by(text: str) -> str:
    """Return the names of --by in the order of BY. Raises ValueError."""
    if not (names := _parse_names("--by", text, BY)):
        raise ValueError(f"--by is empty; it takes any of {', '.join(BY)}, separated by commas")
    return ",".join(names)


def _parse_names(option: str, text: str, allowed: Collection[str]) -> tuple[str, ...]:
    named = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := next((word for word in named if word not in allowed), None):
        raise ValueError(
            f"{option} takes any of {', '.join(allowed)}, separated by commas, not {unknown!r}"
            f"{nearest(unknown, allowed)}"
        )
    return tuple(word for word in allowed if word in named)


def report(found: SourceTotals, by: str = DEFAULT_BY, daily: bool = False) -> dict[str, Any]:
    """Return the rows and their total, largest first and unowned ones last; None: not available from the source.

    by: names of BY. What it does not name is summed; a row names all clusters and price versions that it covers.
    daily: rows for each calendar day."""
    names = by.split(",")
    total = TeamUse()
    for _, use in sorted(found.uses.items()):
        total.add(use)
    rows: list[dict[str, Any]] = []
    for parts in _groups(found, names, daily):
        grouped = new_uses()
        for part in parts:
            for (team, model), use in sorted(found.parts[part].items()):
                grouped[team if "team" in names else "", model if "model" in names else ""].add(use)
        place = {
            "period_start": found.period.show(min(part.from_s for part in parts)),
            "period_end": found.period.show(max(part.to_s for part in parts)),
            "cluster": ",".join(sorted({part.cluster for part in parts})),
            "price_version": ",".join(dict.fromkeys(part.price_version or "" for part in parts)) or None,
        }
        ordered = sorted(grouped.items(), key=lambda row: (row[0][0] in NOBODY, -row[1].seconds, row[0]))
        rows += [
            {name: value for name, value in (("team", team), ("model", model)) if name in names}
            | place
            | figures(use, total, found.known)
            for (team, model), use in ordered
        ]
    return {
        "source": found.source, "from_s": found.period.from_s, "to_s": found.period.to_s,
        "period_start": found.period.show(found.period.from_s), "period_end": found.period.show(found.period.to_s),
        "timezone": found.period.timezone, "month": found.period.month, "by": by, "currency": found.currency,
        "spread": list(found.spread), "price_versions": found.price_versions,
        "rows": rows, "total": figures(total, total, found.known), "notes": found.notes,
    }  # fmt: skip


def _groups(found: SourceTotals, names: Collection[str], daily: bool) -> list[list[CostPart]]:
    """Return the parts that share rows, in order of time."""
    groups: dict[tuple[Any, ...], list[CostPart]] = {}
    for part, _ in found.ordered():
        key = (
            found.period.show(part.from_s)[:10] if daily else None,
            part.cluster if "cluster" in names else None,
            part.price_version if "price" in names else None,
        )
        groups.setdefault(key, []).append(part)
    return list(groups.values())


def figures(use: TeamUse, total: TeamUse, known: Collection[str]) -> dict[str, float | None]:
    """Return the values of a row; None: not available."""
    cost, usage = (use.cost_allocation, use.cost_usage) if "cost" in known else (None, None)
    return {
        "gpu_hours": use.seconds / HOUR_S,
        "aborted_gpu_hours": use.aborted_seconds / HOUR_S,
        "share": use.seconds / total.seconds if total.seconds else 0.0,
        "cost_allocation": cost,
        "cost_usage": usage,
        "aborted_cost": use.aborted_cost if "cost" in known else None,
        "allocation_per_1k_tokens": _per_1k(cost, use.tokens),
        "usage_per_1k_tokens": _per_1k(usage, use.tokens),
        "joules": use.joules if "joules" in known else None,
        "prompt_tokens": use.prompt_tokens,
        "cached_tokens": use.cached_tokens,
        "completion_tokens": use.completion_tokens,
        "est_prompt_tokens": use.est_prompt_tokens if "estimates" in known else None,
        "est_completion_tokens": use.est_completion_tokens if "estimates" in known else None,
        "unreadable_requests": use.unreadable_requests if "unreadable" in known else None,
        "api_cost": use.api_cost if "api" in known else None,
    }


def _per_1k(cost: float | None, tokens: float) -> float | None:
    return 1000 * cost / tokens if cost is not None and tokens else None


# ---- cost


def parse_spread(text: str) -> tuple[str, ...]:
    """Parse --spread: any of idle, aborted, unattributed, separated by commas. Raises ValueError."""
    return _parse_names("--spread", text, SPREADABLE)


def spread_cost(found: SourceTotals, spread: Collection[str]) -> None:
    """Spread the cost of these rows over the other users of the model on the same day, by usage.

    What nobody used on that day stays in its row. The total does not change."""
    wanted = {SPREADABLE[word] for word in spread}
    for uses in found.parts.values():
        for model in {model for _, model in uses}:
            _spread_model({team: use for (team, of), use in uses.items() if of == model}, wanted)
    found.spread = tuple(word for word in SPREADABLE if word in spread)
    if not found.spread:
        return
    if "cost" not in found.known:
        found.notes.append("nothing is spread without prices")
        return
    found.notes.append(
        f"{' and '.join(found.spread)} cost is spread over the users of the model on the same day, by usage (spread);"
        " what nobody used on a day stays in its row"
    )


def _spread_model(by_team: Mapping[str, TeamUse], wanted: Collection[str]) -> None:
    users = {team: use.cost_usage for team, use in by_team.items() if team not in wanted and use.cost_usage > 0}
    total = sum(users.values())
    for team in wanted & by_team.keys() if users else ():
        amount = by_team[team].cost_allocation
        for user, cost in users.items():
            by_team[user].cost_allocation += amount * cost / total
        by_team[team].cost_allocation = 0.0


def add_price_versions(found: SourceTotals, segments: Iterable[PriceSegment]) -> None:
    """Record which prices a bill was made with."""
    for segment in segments:
        if segment.version:
            found.price_versions[segment.version.name] = msgspec.to_builtins(segment.version.prices)


def add_api_cost(found: SourceTotals, uses: Uses, prices: Prices) -> None:
    """Set the cost of the same tokens at API prices; without a price of a model it stays 0."""
    for (team, model), use in uses.items():
        if team not in NOBODY and (price := prices.api_price(model)):
            prompt, completion = (
                use.prompt_tokens + use.est_prompt_tokens,
                use.completion_tokens + use.est_completion_tokens,
            )
            use.api_cost = price.cost(prompt, use.cached_tokens, completion)
            found.known.add("api")
