"""Tables and text of a capacity study."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stack.capacity import kv, plan, plan_text, roles, worksheet
from stack.capacity.command import Study, WeightsOnly
from stack.capacity.fit import DoesNotFit, gib, milli, placed, usable
from stack.capacity.kv import Serving
from stack.capacity.model import ModelShape
from stack.capacity.plan import Plan, PlanCost, TooSlow
from stack.capacity.plan_text import target_kept
from stack.capacity.throughput import plain
from stack.capacity.traffic import TrafficProfile
from stack.capacity.worksheet import WEIGHT_BYTES, Entry

# ---- JSON and text


def as_json(found: Study | WeightsOnly) -> dict[str, Any]:
    """The answer as JSON; see docs/guides/capacity.md for the names."""
    if isinstance(found, WeightsOnly):
        weights = {
            "parameters": found.parameters,
            "dtype": found.dtype,
            "dtype_is_assumed": found.assumed,
            "bytes": found.weight_bytes,
        }
        gpus = [
            {"gpu": name, "usable_bytes": most, "weights_fit": found.weight_bytes < most}
            for name, most in found.gpus.items()
        ]
        return {"weights": weights, "gpus": gpus, "kv_cache": None, "refusal": found.refusal}
    refused = [
        {
            "gpu": gpu.name,
            "why": word(error),
            "what": getattr(error, "what", str(error)),
            "ways": list(getattr(error, "ways", ())),
        }
        for gpu, error in found.refused
    ]
    plans = [plan_text.as_json(each) | (_roles_json(each) if found.disaggregated else {}) for each in found.plans]
    return {"plans": plans, "refused": refused, "notes": list(found.notes)}


def _roles_json(it: Plan) -> dict[str, Any]:
    of_each = {
        str(each.role): {
            "engines_at_least": each.engines,
            "binds": each.binds.name if each.binds else None,
            "limits": [
                {"name": limit.name, "rate_per_s": limit.rate_per_s, "is_bound": limit.bound, "why": limit.why}
                for limit in each.limits
            ],
        }
        for each in roles.by_role(it)
    }
    return {"roles": of_each, "transferred_bytes_per_request": roles.transferred_bytes(it) or None}


def filled(found: Study) -> str:
    """The worksheet with what is known now in its empty places."""
    (it,) = found.plans
    traffic, per_1k = it.traffic, it.cost.per_1k_tokens if it.cost else None
    lengths: dict[str, Entry] = {}
    for name in ("prompt", "output"):
        for p in ("p50", "p95"):
            value = getattr(getattr(traffic, f"{name}_tokens"), p) if traffic else None
            lengths[f"{p}_{name}_tokens"] = Entry(
                None if value is None else f"{value:.0f}", f"from {traffic.source}" if traffic else "not known"
            )
    at_least = "" if it.measured else "at least "
    promise = "a promise, for you to make"
    spent = f"{at_least}{digits(per_1k)} {it.cost.currency} by this plan" if it.cost and per_1k else promise
    parameters, dtype = found.shape.parameters, found.shape.quantization or found.shape.dtype
    utilization = f"{it.serving.gpu_memory_utilization:g}"
    seqs = next(
        (Entry(flag.value, flag.why) for flag in it.flags if flag.option == "--max-num-seqs"),
        Entry(None, "vLLM's own choice"),
    )
    return worksheet.fill(found.text, {
        "parameters": Entry(f"{parameters:d}" if parameters else None,
            "counted from the model's shapes" if parameters else "cannot be counted"),
        "dtype": Entry(dtype if dtype in WEIGHT_BYTES else None,
            "from the model" if dtype in WEIGHT_BYTES else f"{dtype}, from the model"),
        "max_model_len": Entry(str(it.serving.max_model_len), "as asked, or what the model was made for"),
        **lengths,
        "requests_per_second": _pace(traffic),
        "ttft_p95": Entry(None, promise),
        "itl_p95": Entry(None, promise),
        "cost_per_1k_tokens": Entry(None, spent),
        "tensor_parallel_size": Entry(str(it.serving.tensor_parallel), f"fits {it.gpu.name}"),
        "pipeline_parallel_size": Entry(str(it.serving.pipeline_parallel), f"fits {it.gpu.name}"),
        "gpu_memory_utilization": Entry(utilization, "what this plan counts with"),
        "enable_prefix_caching": caching(it.serving, found.shape),
        "speculative_config": Entry(None, "none; adds weights and cache of its own"),
        "kv_cache_dtype": Entry(it.serving.cache_dtype, "what this plan counts with"),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": Entry(str(it.serving.max_num_batched_tokens), "what this plan counts with"),
    })  # fmt: skip


def _pace(traffic: TrafficProfile | None) -> Entry:
    """The rate, unless it follows from users: a worksheet has one of both."""
    if traffic is None or traffic.arrivals_per_s is None:
        return Entry(None, "not known")
    rate = f"{traffic.arrivals_per_s:.6g}"
    return (
        Entry(rate, "as asked, or as the log has it") if traffic.users is None else Entry(None, f"{rate} by its users")
    )


def word(error: DoesNotFit | TooSlow) -> str:
    return "too slow" if isinstance(error, TooSlow) else "does not fit"


def caching(serving: Serving, shape: ModelShape) -> Entry:
    why = (
        "as vLLM does; pays where prompts begin alike"
        if shape.attends
        else "vLLM leaves it off where layers keep states alone"
    )
    return Entry(
        "true" if serving.prefix_caching else "false", why if serving.prefix_caching is shape.attends else "as given"
    )


@dataclass(frozen=True, slots=True)
class CapacityTable:
    """A table with its title."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sheets(it: Plan, disaggregated: bool = False) -> Iterator[CapacityTable]:
    """One plan for a person. disaggregated: also with prefill and decode on separate engines."""
    yield _memory(it)
    yield _concurrency(it)
    if it.limits:
        yield _replicas(it)
    if disaggregated and it.traffic:
        yield _roles(it)
    if it.cost:
        yield _money(it, it.cost)
    yield CapacityTable(
        "vllm serve", ("option", "value", "why"), [(flag.option, flag.value or "", flag.why) for flag in it.flags]
    )


def _memory(it: Plan) -> CapacityTable:
    whole = usable(it.gpu)
    rows: list[tuple[str, ...]] = [
        (part.name, gib(part.bytes), "estimated" if part.estimated else "counted", part.source) for part in it.parts
    ]
    spare = whole - it.kv_bytes - sum(part.bytes for part in it.parts)
    held = f"{it.cache.blocks:,} blocks, {it.cache.tokens:,} tokens, {_token_costs(it)}"
    rows.append(("KV cache", gib(it.kv_bytes), "the rest", held))
    rows.append(("not used", gib(spare), "", f"--gpu-memory-utilization {it.serving.gpu_memory_utilization:g}"))
    rows.append(("all", gib(whole), "", it.gpu.source))
    number = "" if it.gpus == 1 else f", each of {it.gpus}"
    return CapacityTable(f"memory of {it.gpu.name}{number}: {it.name}", ("part", "per GPU", "", "source"), rows)


def _token_costs(it: Plan) -> str:
    """Bytes of one token; with windows, up to which length of a request."""
    *before, (_, last) = kv.token_costs(it.shape, it.serving)
    if not before:
        unfilled = any(layer.kind == "window" for layer in it.shape.layers)
        return f"{last:,.0f} bytes a token" + (
            f" (no window fills below {it.serving.max_model_len:,} tokens)" if unfilled else ""
        )
    return (
        ", ".join(f"{each:,.0f} bytes a token up to {length:,} tokens" for length, each in before)
        + f" of a request, {last:,.0f} beyond"
    )


def _concurrency(it: Plan) -> CapacityTable:
    traffic = it.traffic
    sure = "" if it.cache.sure else " (about)"
    rows: list[tuple[str, ...]] = [
        (
            "guaranteed",
            f"{it.guaranteed:,.2f}{sure}",
            f"each of {it.serving.max_model_len:,} tokens: vLLM's maximum concurrency",
        )
    ]
    if traffic and it.expected and it.at_p95:
        prompt, output = traffic.prompt_tokens, traffic.output_tokens
        rows.append(("at p95", f"{it.at_p95:,.1f}{sure}", f"each of {prompt.p95:,.0f} + {output.p95:,.0f} tokens"))
        mean = f"{prompt.mean:,.0f} + {output.mean:,.0f} tokens at the end on the average, less while the reply grows"
        rows.append(("expected", f"{it.expected:,.1f}{sure}", mean))
        if traffic.in_flight and traffic.time_s and traffic.resident_tokens and traffic.arrivals_per_s:
            time = f"{digits(traffic.arrivals_per_s)} a second x {traffic.time_s:.3g} s"
            rows.append(
                ("needed: requests", f"{traffic.in_flight:,.1f}", f"{time} (Little's law); times: {_times(it)}")
            )
            tokens = (
                f"{traffic.resident_tokens:,.0f} tokens in the cache, {it.cache_share or 0:.0%} of one replica's; bytes"
                " per GPU"
            )
            rows.append(
                ("needed: cache", gib(traffic.resident_tokens * it.token_bytes) if plain(it.shape) else "", tokens)
            )
    return CapacityTable("requests at once, one replica", ("", "requests", "what they are"), rows)


def _times(it: Plan) -> str:
    traffic = it.traffic
    return (
        ""
        if traffic is None or traffic.ttft_s is None or traffic.tpot_s is None
        else f"{milli(traffic.ttft_s)} + {milli(traffic.tpot_s)} a token"
    )


def _replicas(it: Plan) -> CapacityTable:
    binds, rate = it.binds, it.traffic.arrivals_per_s if it.traffic else None
    rows: list[tuple[str, ...]] = [
        (
            limit.name + (" (binds)" if limit is binds else ""),
            f"{'below ' if limit.bound else ''}{digits(limit.rate_per_s)}",
            str(plan.replicas_for(rate, limit.rate_per_s)) if rate and it.replicas else "",
            limit.why,
        )
        for limit in sorted(it.limits, key=lambda limit: limit.rate_per_s)
    ]
    if _people(it) and it.traffic:
        again = f"{milli(it.traffic.think_s)} after a reply" if it.traffic.think_s else "at once"
        why = f"people at work, each asking again {again}; by what binds"
        rows.append(("users", _people(it), "", why))
    more = "" if it.measured else "; more where the GPU is slower than its bounds"
    lacking = "" if it.traffic is None else f"not given: {', '.join(it.traffic.missing)}"
    rows.append(
        ("together", "", _count(it), lacking if it.replicas is None else f"the most that any of them asks for{more}")
    )
    return CapacityTable(
        "replicas: what one takes, requests a second", ("limit", "one replica", "replicas", "why"), rows
    )


def _roles(it: Plan) -> CapacityTable:
    rate = it.traffic.arrivals_per_s if it.traffic else None
    rows: list[tuple[str, ...]] = []
    for each in roles.by_role(it):
        rows += [
            (
                each.role,
                limit.name + (" (binds)" if limit is each.binds else ""),
                f"{'below ' if limit.bound else ''}{digits(limit.rate_per_s)}",
                str(plan.replicas_for(rate, limit.rate_per_s)) if rate else "",
                limit.why,
            )
            for limit in sorted(each.limits, key=lambda limit: limit.rate_per_s)
        ]
        engines = "unknown" if each.engines is None else f"at least {each.engines}"
        rows.append((each.role, "together", "", engines, "the most that any of its limits asks for"))
    moved = roles.transferred_bytes(it)
    every = f", {gib(moved * rate)} a second at {digits(rate)} requests a second" if rate else ""
    rows.append(("", "KV transfer", "", "", f"{gib(moved)} from prefill to decode for each request{every}"))
    return CapacityTable(
        "prefill and decode on separate engines: what one takes, requests a second",
        ("role", "limit", "one engine", "engines", "why"),
        rows,
    )


def _people(it: Plan) -> str:
    """Users that one replica takes, "" where nobody speaks of people."""
    users = it.users_per_replica
    return "" if users is None or it.binds is None else f"{'below ' if it.binds.bound else ''}{users:,.0f}"


def _count(it: Plan) -> str:
    return "unknown" if it.replicas is None else f"{'' if it.measured else 'at least '}{it.replicas}"


def _money(it: Plan, cost: PlanCost) -> CapacityTable:
    at_least, unit = "" if it.measured else "at least ", cost.currency
    listed = [
        ("one replica, an hour", cost.per_replica_hour, f"{it.gpus} x {it.gpu.name}", ""),
        ("all replicas, an hour", cost.per_hour, f"{it.replicas} of them", at_least),
        ("1K tokens of this traffic", cost.per_1k_tokens, "prompt and reply tokens together" + _kept(it), at_least),
        (
            "1K tokens at best",
            cost.at_best_per_1k_tokens,
            "a replica that is always as full as its limits allow; no plan gets below",
            "above ",
        ),
        ("1K tokens from the API", cost.api_per_1k_tokens, "the same tokens at the price in prices.yaml", ""),
        ("the API, an hour", cost.api_per_hour, "at this traffic", ""),
    ]
    rows: list[tuple[str, ...]] = [
        (name, f"{words}{digits(value, 2)} {unit}", why) for name, value, why, words in listed if value is not None
    ]
    if cost.break_even_per_s:
        rows.append(
            (
                "as dear as the API",
                f"{at_least}{digits(cost.break_even_per_s)} requests a second",
                "with more of them the GPUs are cheaper",
            )
        )
    return CapacityTable("cost", ("", "", "what it is"), rows)


def _kept(it: Plan) -> str:
    target = it.targets.cost_per_1k_tokens
    if target is None:
        return ""
    return (
        f"; target {digits(target)}: "
        + {True: "kept", False: "missed", None: "not missed as far as bounds tell"}[target_kept(it)]
    )


def comparison(found: Study) -> CapacityTable:
    """A row for each GPU or slice, the cheapest first where prices and replicas are known."""
    unit = next((each.cost.currency for each in found.plans if each.cost), "")
    money = (f"{unit} an hour", f"{unit} per 1K") if unit else ()
    people = ("users each",) if any(each.users_per_replica for each in found.plans) else ()
    head = ("GPU", "KV cache", "tokens", "guaranteed", "expected", "binds", "replicas", "GPUs", *people, *money)
    rows: list[tuple[str, ...]] = []
    for it in sorted(found.plans, key=lambda it: it.cost.per_hour if it.cost and it.cost.per_hour else 0.0):
        gpus = "" if it.replicas is None else str(-(-it.replicas * it.gpus // it.gpu.instances))
        spent = (digits(it.cost.per_hour, 2), digits(it.cost.per_1k_tokens)) if it.cost else ()
        rows.append((
            placed(it.serving, it.gpu), gib(it.kv_bytes), f"{it.cache.tokens:,}", f"{it.guaranteed:,.2f}",
            "" if it.expected is None else f"{it.expected:,.1f}", it.binds.name if it.binds else "",
            "" if it.replicas is None else _count(it), gpus, *(_people(it) for _ in people), *spent,
        ))  # fmt: skip
    rows += [(gpu.name, word(error), *[""] * (len(head) - 2)) for gpu, error in found.refused]
    return CapacityTable(f"{found.shape.name or 'the model'}: which GPU or slice", head, rows)


def conclusion(found: Study) -> str:
    """Return the conclusion of the comparison, where prices and replicas are known; else ""."""
    priced = [(it.cost.per_hour, it.cost.currency, it) for it in found.plans if it.cost and it.cost.per_hour]
    if not priced:
        return ""
    hour, unit, it = min(priced, key=lambda row: row[0])
    bound = "" if it.measured else "; at least, until --measured-rate says what one replica takes"
    return (
        f"Cheapest by your prices: {(it.replicas or 1) * it.gpus} x {it.gpu.name}, {digits(hour, 2)} {unit} an"
        f" hour{bound}"
    )


def digits(value: float | None, least: int = 0) -> str:
    """Three digits that count, never as a power of ten. least: how many behind the point at least."""
    if value is None or value <= 0:
        return "" if value is None else "0"
    return f"{value:,.{max(least, 2 - math.floor(math.log10(value)))}f}"
