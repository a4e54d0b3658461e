"""Check of FOCUS rows: the columns of Cost and Usage, their values and their conditional rules, as data.

Source: FOCUS_Spec, specification/datasets/cost_and_usage, 1.2 and the draft after 1.4. The packaged focus-validator
knows 1.0 only and ends with 0 after "Validation failed"."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence

MANDATORY = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodStart", "BillingPeriodEnd",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodStart", "ChargePeriodEnd", "ContractedCost",
    "EffectiveCost", "HostProviderName", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
    "ServiceCategory", "ServiceName", "ServiceProviderName",
)  # fmt: skip
MANDATORY_1_2 = ("ProviderName", "PublisherName")
NULLABLE = {"BillingAccountName", "ChargeClass", "ChargeDescription", "PricingQuantity", "PricingUnit"}
OTHERS = {
    "AllocatedMethodId", "ChargeFrequency", "ConsumedQuantity", "ConsumedUnit", "ContractedUnitPrice", "ListUnitPrice",
    "PricingCategory", "ResourceId", "ResourceName", "ResourceType", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags",
}  # fmt: skip
# null with a tax; not null with usage or a purchase, unless it corrects an earlier charge
PRICED = ("ContractedUnitPrice", "ListUnitPrice", "PricingCategory", "PricingQuantity", "SkuId", "SkuPriceId")
TOGETHER = (  # both null, or neither
    ("PricingQuantity", "PricingUnit"), ("ConsumedQuantity", "ConsumedUnit"), ("ResourceId", "ResourceType"),
    ("SubAccountId", "SubAccountName"), ("SkuId", "SkuMeter"),
)  # fmt: skip
ONLY_WITH = (("ResourceName", "ResourceId"), ("SkuPriceDetails", "SkuPriceId"))
TAG_PREFIX = "vllm-watch/"  # all tags are the provider's
SKU_PROPERTIES = (
    "CoreCount|DiskMaxIops|DiskSpace|DiskType|GpuCount|InstanceType|InstanceSeries|MemorySize|NetworkMaxIops"
    "|NetworkMaxThroughput|OperatingSystem|Redundancy|StorageClass|x_.+"
)
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
    **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), r"\d+(\.\d+)?([eE]-?\d+)?"),
}


def find_problems(rows: Sequence[Mapping[str, str]]) -> list[str]:
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
        value = {name: row.get(name, "") for name in (*MANDATORY, *OTHERS)}
        found += [f"{place}: {problem}" for rule in (_nulls, _products, _keys) for problem in rule(value)]
    return [*found, *_contradictions(rows)]


def _nulls(value: Mapping[str, str]) -> Iterator[str]:
    category = value["ChargeCategory"]
    required = category in ("Usage", "Purchase") and value["ChargeClass"] != "Correction"
    for name in (*PRICED, "ConsumedQuantity") if category == "Usage" else PRICED:
        if not value[name] and required:
            yield f"{name} is empty in {category}"
        if value[name] and category == "Tax":
            yield f"{name} in Tax"
    for one, other in TOGETHER:
        if bool(value[one]) != bool(value[other]):
            yield f"only one of {one} and {other} is empty"
    for name, other in ONLY_WITH:
        if value[name] and not value[other]:
            yield f"{name} without {other}"
    if value["ResourceName"] and value["ResourceName"] == value["ResourceId"]:
        yield "ResourceName repeats ResourceId"


def _products(value: Mapping[str, str]) -> Iterator[str]:
    for kind in ("List", "Contracted"):
        price, quantity, cost = (value[name] for name in (f"{kind}UnitPrice", "PricingQuantity", f"{kind}Cost"))
        if price and quantity and cost and value["ChargeClass"] != "Correction":
            if not math.isclose(float(price) * float(quantity), float(cost), rel_tol=1e-9, abs_tol=1e-12):
                yield f"{kind}UnitPrice x PricingQuantity is not {kind}Cost"
        elif not price and cost != value["BilledCost"]:
            yield f"{kind}Cost without a unit price is not BilledCost"


def _keys(value: Mapping[str, str]) -> Iterator[str]:
    for name, keys in (("Tags", f"{TAG_PREFIX}.+"), ("SkuPriceDetails", SKU_PROPERTIES)):
        for key, each in json.loads(value[name] or "{}", object_pairs_hook=list):
            if not re.fullmatch(keys, key) or isinstance(each, list) or each == "":
                yield f"{name} has {key!r}: {each!r}"


def _contradictions(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield SKU prices with two SKUs, or with two unit prices at the same time."""
    for names, of in (
        (("SkuPriceId",), "SkuId"), (("SkuPriceId", "ChargePeriodStart"), "ListUnitPrice"), (("SkuId",), "SkuMeter"),
    ):  # fmt: skip
        known: dict[tuple[str, ...], str] = {}
        for row in rows:
            key = tuple(row.get(name, "") for name in names)
            if key[0] and known.setdefault(key, row.get(of, "")) != row.get(of, ""):
                yield f"{' '.join(key)}: two values of {of}"
