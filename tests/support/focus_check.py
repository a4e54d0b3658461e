"""Check of FOCUS rows: the mandatory columns of Cost and Usage and their values, as data.

Source: FOCUS_Spec, specification/datasets/cost_and_usage, 1.2 and the draft after 1.4. The packaged focus-validator
knows 1.0 only and ends with 0 after "Validation failed"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MANDATORY = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodStart", "BillingPeriodEnd",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodStart", "ChargePeriodEnd", "ContractedCost",
    "EffectiveCost", "HostProviderName", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
    "ServiceCategory", "ServiceName", "ServiceProviderName",
)  # fmt: skip
MANDATORY_1_2 = ("ProviderName", "PublisherName")
NULLABLE = {"BillingAccountName", "ChargeClass", "ChargeDescription", "PricingQuantity", "PricingUnit"}
OTHERS = {
    "AllocatedMethodId", "ChargeFrequency", "ConsumedQuantity", "ConsumedUnit", "PricingCategory", "ResourceId",
    "ResourceName", "ResourceType", "ServiceSubcategory", "SubAccountId", "SubAccountName", "Tags",
}  # fmt: skip
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
_NUMBER = r"-?\d+(\.\d+)?([eE]-?\d+)?"
VALUES = {
    **dict.fromkeys(("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd"), _TIME),
    **dict.fromkeys(
        ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "PricingQuantity", "ConsumedQuantity"), _NUMBER
    ),
    "BillingCurrency": "AUD|CAD|CHF|CNY|EUR|GBP|INR|JPY|SEK|USD",
    "ChargeCategory": "Usage|Purchase|Tax|Credit|Adjustment",
    "ChargeClass": "Correction",
    "ChargeFrequency": "One-Time|Recurring|Usage-Based",
    "PricingCategory": "Standard|Dynamic|Committed|Other",
    "PricingUnit": r"(\d+ )?[A-Z][A-Za-z]*(-Hours)?|Hours",
    "ConsumedUnit": r"(\d+ )?[A-Z][A-Za-z]*(-Hours)?|Hours",
    "ServiceCategory": "AI and Machine Learning",
    "ServiceSubcategory": "Generative AI",
    "Tags": r"\{.*\}",
}


def find_problems(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Return what is wrong with rows that a CSV reader gave; null is an empty field."""
    found = []
    for number, row in enumerate(rows):
        place = f"row {number}"
        found += [f"{place}: {name} is missing" for name in (*MANDATORY, *MANDATORY_1_2) if name not in row]
        found += [
            f"{place}: {name} is empty" for name in MANDATORY if name not in NULLABLE and row.get(name, "-") == ""
        ]
        found += [
            f"{place}: {name} is {row[name]!r}"
            for name, pattern in VALUES.items()
            if row.get(name) and not re.fullmatch(pattern, row[name])
        ]
        unknown = set(row) - {*MANDATORY, *MANDATORY_1_2, *OTHERS}
        found += [f"{place}: {name} is no column of FOCUS" for name in unknown if not name.startswith("x_")]
        for kind in ("BillingPeriod", "ChargePeriod"):
            if row.get(f"{kind}Start", "") >= row.get(f"{kind}End", "~"):
                found.append(f"{place}: {kind}End is not after its start")
        if not row.get("BillingPeriodStart", "") <= row.get("ChargePeriodStart", "") or not (
            row.get("ChargePeriodEnd", "") <= row.get("BillingPeriodEnd", "~")
        ):
            found.append(f"{place}: the charge is outside of its billing period")
    return found
