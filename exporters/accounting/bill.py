"""Bill of a period: from a closed month, from Prometheus or from request logs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from exporters.accounting.billing_period import BillingPeriod, calendar_period, month_period
from exporters.accounting.closed_month import close_month, read_month
from exporters.accounting.cost import DEFAULT_SINCE_S, SourceTotals, parse_spread, spread_cost
from exporters.accounting.cost_from_log import CostSource, LogFiles, from_log, parse_gpus
from exporters.accounting.cost_from_prometheus import from_prometheus
from exporters.accounting.prices import Prices
from exporters.catalogue.ship import SHIP_BAD_LINES
from exporters.net.prometheus import Address
from exporters.requests.record import FieldMap


@dataclass(frozen=True, slots=True)
class BillRequest:
    """Request for a bill. Without a period: the last day, or all of the logs.

    data: requests of a data set instead of logs. fields: names of the logs' fields. spread: None takes spread_idle of
    the prices. timezone: None takes that of the prices. bills: folder of closed months."""

    prometheus: Address | None = None
    logs: tuple[Path, ...] = ()
    data: CostSource | None = None
    month: str | None = None
    from_text: str | None = None
    to_text: str | None = None
    since_s: float | None = None
    timezone: str | None = None
    prices: Prices | None = None
    fields: FieldMap | None = None
    spread: str | None = None
    gpus: tuple[str, ...] = ()
    cluster: str = ""
    bills: Path | None = None
    close: bool = False
    allow_bad_lines: bool = False

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.month, self.from_text, self.since_s)) > 1:
            raise ValueError("choose one of --month, --from and --since")
        if self.to_text is not None and self.from_text is None:
            raise ValueError("--to needs --from")
        if self.close and not (self.bills and self.month):
            raise ValueError("--close needs --month and --bills DIR, the folder of closed months")

    @property
    def zone_name(self) -> str:
        return self.timezone or (self.prices.timezone if self.prices else "UTC")

    @property
    def has_period(self) -> bool:
        return any(each is not None for each in (self.month, self.from_text, self.since_s))

    def period(self, now_s: float) -> BillingPeriod | None:
        """Return the period up to now; None: that of the logs. Raises ValueError."""
        if self.month is not None:
            return month_period(self.month, self.zone_name).until(now_s)
        if self.from_text is not None:
            return calendar_period(self.from_text, self.to_text, self.zone_name, now_s).until(now_s)
        if self.since_s is None and (self.logs or self.data):
            return None
        return BillingPeriod(now_s - (self.since_s or DEFAULT_SINCE_S), now_s, self.zone_name)


def make_bill(request: BillRequest, now_s: float) -> SourceTotals:
    """Return the totals of a period, closed if asked. Raises ValueError or OSError with a sentence."""
    if found := _closed(request):
        return found
    period, spread = request.period(now_s), request.spread
    if request.prometheus and period:
        found = asyncio.run(from_prometheus(request.prometheus, period, request.prices, request.cluster))
    elif request.logs or request.data:
        source = request.data or LogFiles(request.logs, request.fields)
        found = from_log(source, period, request.prices, parse_gpus(request.gpus), request.cluster)
    else:
        raise ValueError("name either --prometheus URL, --log FILE or --data LOCATION; the month is not closed")
    given = (
        ("idle",) if spread is None and request.prices and request.prices.spread_idle else parse_spread(spread or "")
    )
    spread_cost(found, given)
    if period and request.month and period.to_s >= now_s:
        found.notes.append(f"{request.month} is not over: this is the part until {period.show(period.to_s)}")
    if request.close and request.data:
        found.notes.append(f"a data set has no bad lines: see {SHIP_BAD_LINES.name} for those of its logs")
    if request.close and request.bills:
        found.notes.append(f"closed: {close_month(found, request.bills, now_s, request.allow_bad_lines)}")
    return found


def _closed(request: BillRequest) -> SourceTotals | None:
    """Return the closed month, if there is one. Raises ValueError where the request contradicts it."""
    found = read_month(request.bills, request.month) if request.bills and request.month else None
    if found is None:
        return None
    if request.close:
        raise ValueError(f"{request.month} is closed, and a closed month does not change; see {request.bills}")
    if request.timezone not in (None, found.period.timezone):
        raise ValueError(f"{request.month} was closed in {found.period.timezone}; name that, or no --timezone")
    if request.spread is not None and parse_spread(request.spread) != found.spread:
        raise ValueError(f"{request.month} was closed with --spread {','.join(found.spread) or 'of nothing'}")
    if request.prices and not found.price_versions.keys() <= {each.name for each in request.prices.versions()}:
        found.notes.append("the closed month keeps its prices; those of --prices are not used")
    return found
