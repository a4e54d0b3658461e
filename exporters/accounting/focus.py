"""Bill rows with the column names of FOCUS, the FinOps Open Cost and Usage Specification.

Source: FOCUS_Spec, dataset Cost and Usage, 1.2 to 1.4. ProviderName and PublisherName are those of 1.2; 1.4 has
ServiceProviderName, HostProviderName and InvoiceIssuerName instead. Own columns begin with x_.

Invariant: unit price x PricingQuantity is the cost. The unit price is the mean of the model's GPUs, and spreading does
not change it: PricingQuantity includes the hours that a team carries, ConsumedQuantity does not."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from exporters.accounting.busy_hours import HOUR_S
from exporters.accounting.cost import CostPart, SourceTotals, TeamUse
from exporters.accounting.gpu_use import NOBODY

FocusRow = dict[str, Any]
TAG_PREFIX = "vllm-watch/"
_CURRENCY = re.compile(r"[A-Z]{3}")


def focus_rows(found: SourceTotals, issuer: str) -> list[FocusRow]:
    """Return a row for each day, price version, cluster, team and model. issuer: who charges the teams.

    Raises ValueError without cost: FOCUS has no row without an amount."""
    if "cost" not in found.known:
        raise ValueError("FOCUS rows need a cost, and prices are missing: give --prices FILE (docs/guides/cost.md)")
    if not _CURRENCY.fullmatch(found.currency or ""):
        raise ValueError(f"FOCUS needs an ISO 4217 currency such as EUR; prices.yaml has {found.currency!r}")
    if not issuer.strip():
        raise ValueError("FOCUS needs the name of an issuer, and --issuer is empty; omit it or name who charges")
    return list(_rows(found, issuer))


def _rows(found: SourceTotals, issuer: str) -> Iterator[FocusRow]:
    of_bill = found.uses.values()
    for part, uses in found.ordered():
        of_models: defaultdict[str, list[TeamUse]] = defaultdict(list)
        for (_, model), use in uses.items():
            of_models[model].append(use)
        for (team, model), use in sorted(uses.items()):
            price = _hour_price(of_models[model], uses.values(), of_bill)
            yield _row(found, issuer, part, team, model, use, price)


def _hour_price(*groups: Iterable[TeamUse]) -> float | None:
    """Return the mean price of a GPU hour in the first group that has GPU time; None if none has."""
    for group in groups:
        if seconds := sum(use.seconds for use in group):
            price = sum(use.cost_allocation for use in group) / seconds * HOUR_S
            return float(f"{price:.12g}")  # 2.0, where the sums make it 1.9999999999999998
    return None


def _row(
    found: SourceTotals, issuer: str, part: CostPart, team: str, model: str, use: TeamUse, price: float | None
) -> FocusRow:
    hours, period = use.seconds / HOUR_S, found.period.whole()
    resource = f"{part.cluster}/{model}" if part.cluster else model
    tags = {
        f"{TAG_PREFIX}{key}": name
        for key, name in (("cluster", part.cluster), ("model", model), ("team", team))
        if name and not name.startswith("__")
    }
    return {
        "AllocatedMethodId": None if team in NOBODY else found.method,
        "BilledCost": use.cost_allocation,
        "BillingAccountId": issuer,
        "BillingAccountName": issuer,
        "BillingCurrency": found.currency,
        "BillingPeriodEnd": _utc(math.ceil(period.to_s)),
        "BillingPeriodStart": _utc(math.floor(period.from_s)),
        "ChargeCategory": "Usage",
        "ChargeClass": None,
        "ChargeDescription": f"GPU time of {team} on {model}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": _utc(math.ceil(part.to_s)),
        "ChargePeriodStart": _utc(math.floor(part.from_s)),
        "ConsumedQuantity": hours,
        "ConsumedUnit": "GPU-Hours",
        "ContractedCost": use.cost_allocation,
        "ContractedUnitPrice": price,
        "EffectiveCost": use.cost_allocation,
        "HostProviderName": issuer,
        "InvoiceIssuerName": issuer,
        "ListCost": use.cost_allocation,
        "ListUnitPrice": price,
        "PricingCategory": "Standard",
        "PricingQuantity": use.cost_allocation / price if price else hours,
        "PricingUnit": "GPU-Hours",
        "ProviderName": issuer,
        "PublisherName": issuer,
        "ResourceId": resource,
        "ResourceName": model if part.cluster else None,  # never a copy of ResourceId
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "vLLM",
        "ServiceProviderName": issuer,
        "ServiceSubcategory": "Generative AI",
        "SkuId": f"gpu-hour/{resource}",
        "SkuMeter": "GPU Time",
        "SkuPriceDetails": '{"GpuCount": 1}',
        "SkuPriceId": f"gpu-hour/{resource}",
        "SubAccountId": team,
        "SubAccountName": team,
        "Tags": json.dumps(tags, ensure_ascii=False) if tags else None,
        "x_AbortedCost": use.aborted_cost,
        "x_AbortedGpuHours": use.aborted_seconds / HOUR_S,
        "x_CachedTokens": use.cached_tokens,
        "x_Cluster": part.cluster or None,
        "x_CompletionTokens": use.completion_tokens,
        "x_Joules": use.joules if "joules" in found.known else None,
        "x_PriceVersion": part.price_version,
        "x_PromptTokens": use.prompt_tokens,
        "x_Spread": ",".join(found.spread) or None,
        "x_UsageCost": use.cost_usage,
    }


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
