"""Bill rows with the column names of FOCUS, the FinOps Open Cost and Usage Specification.

Source: FOCUS_Spec, dataset Cost and Usage, 1.2 to 1.4. ProviderName and PublisherName are those of 1.2; 1.4 has
ServiceProviderName, HostProviderName and InvoiceIssuerName instead. Own columns begin with x_."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from exporters.accounting.busy_hours import HOUR_S
from exporters.accounting.cost import CostPart, SourceTotals, TeamUse
from exporters.accounting.gpu_use import NOBODY

FocusRow = dict[str, Any]
_CURRENCY = re.compile(r"[A-Z]{3}")


def focus_rows(found: SourceTotals, issuer: str) -> list[FocusRow]:
    """Return a row for each day, price version, cluster, team and model. issuer: who charges the teams.

    Raises ValueError without cost: FOCUS has no row without an amount."""
    if "cost" not in found.known:
        raise ValueError("FOCUS rows need a cost, and prices are missing: give --prices FILE (docs/guides/cost.md)")
    if not _CURRENCY.fullmatch(found.currency or ""):
        raise ValueError(f"FOCUS needs an ISO 4217 currency such as EUR; prices.yaml has {found.currency!r}")
    return list(_rows(found, issuer))


def _rows(found: SourceTotals, issuer: str) -> Iterator[FocusRow]:
    for part, uses in found.ordered():
        for (team, model), use in sorted(uses.items()):
            yield _row(found, issuer, part, team, model, use)


def _row(found: SourceTotals, issuer: str, part: CostPart, team: str, model: str, use: TeamUse) -> FocusRow:
    hours = use.seconds / HOUR_S
    return {
        "AllocatedMethodId": None if team in NOBODY else found.method,
        "BilledCost": use.cost_allocation,
        "BillingAccountId": issuer,
        "BillingAccountName": issuer,
        "BillingCurrency": found.currency,
        "BillingPeriodEnd": _utc(found.period.whole().to_s),
        "BillingPeriodStart": _utc(found.period.from_s),
        "ChargeCategory": "Usage",
        "ChargeClass": None,
        "ChargeDescription": f"GPU time of {team} on {model}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": _utc(part.to_s),
        "ChargePeriodStart": _utc(part.from_s),
        "ConsumedQuantity": hours,
        "ConsumedUnit": "GPU-Hours",
        "ContractedCost": use.cost_allocation,
        "EffectiveCost": use.cost_allocation,
        "HostProviderName": issuer,
        "InvoiceIssuerName": issuer,
        "ListCost": use.cost_allocation,
        "PricingCategory": "Standard",
        "PricingQuantity": hours,
        "PricingUnit": "GPU-Hours",
        "ProviderName": issuer,
        "PublisherName": issuer,
        "ResourceId": f"{part.cluster}/{model}" if part.cluster else model,
        "ResourceName": model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "vLLM",
        "ServiceProviderName": issuer,
        "ServiceSubcategory": "Generative AI",
        "SubAccountId": team,
        "SubAccountName": team,
        "Tags": json.dumps({"cluster": part.cluster, "model": model, "team": team}, ensure_ascii=False),
        "x_AbortedCost": use.aborted_cost,
        "x_AbortedGpuHours": use.aborted_seconds / HOUR_S,
        "x_CachedTokens": use.cached_tokens,
        "x_Cluster": part.cluster,
        "x_CompletionTokens": use.completion_tokens,
        "x_Joules": use.joules if "joules" in found.known else None,
        "x_PriceVersion": part.price_version,
        "x_PromptTokens": use.prompt_tokens,
        "x_Spread": ",".join(found.spread) or None,
        "x_UsageCost": use.cost_usage,
    }


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
