"""Text of a plan."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stack.capacity import kv
from stack.capacity.fit import usable
from stack.capacity.plan import Plan
from stack.capacity.traffic import TrafficProfile


def as_json(it: Plan) -> dict[str, Any]:
    """Everything, with units in the names: bytes per GPU, seconds, tokens, shares from 0 to 1. Unknown is null."""
    shape, gpu = it.shape, it.gpu
    return {
        "model": {
            "name": it.name, "architecture": shape.architecture, "parameters": shape.parameters,
            "weight_bytes": shape.weight_bytes,
            "dtype": shape.dtype, "quantization": shape.quantization, "max_positions": shape.max_positions or None,
            "default_max_model_len": shape.served_len,
        },
        "gpu": {
            "name": gpu.name, "memory_bytes": gpu.memory_bytes, "usable_bytes": usable(gpu),
            "mig_profile": gpu.profile,
            "per_gpu": gpu.instances, "gpus_per_replica": it.gpus, "source": gpu.source,
        },
        "serving": _fields(it.serving),
        "memory": [{"name": part.name, "bytes": part.bytes, "estimated": part.estimated, "source": part.source}
            for part in it.parts],
        "kv_cache": {
            "bytes": it.kv_bytes, "bytes_per_token": it.token_bytes,
            "token_costs": [{"up_to_tokens": length, "bytes": each} for length,
                each in kv.token_costs(it.shape, it.serving)],
            "blocks": it.cache.blocks, "tokens": it.cache.tokens, "sure": it.cache.sure,
        },
        "concurrency": {"guaranteed": it.guaranteed, "expected": it.expected, "at_p95": it.at_p95},
        "traffic": None if it.traffic is None
            else _traffic(it.traffic) | {"share_of_one_replicas_cache": it.cache_share},
        "targets": _fields(it.targets),
        "limits": [{"name": limit.name, "rate_per_s": limit.rate_per_s, "is_bound": limit.bound, "why": limit.why}
            for limit in it.limits],
        "binds": it.binds.name if it.binds else None,
        "replicas": {
            "count": it.replicas, "at_least": not it.measured, "gpus": it.replicas and it.replicas * it.gpus,
            "users_per_replica": it.users_per_replica,
        },
        "cost": None if it.cost is None
            else _fields(it.cost) | {"at_least": not it.measured, "target_kept": target_kept(it)},
        "vllm": {"command": it.command, "flags": [_fields(flag) for flag in it.flags]},
        "gateway": _fields(it.gateway),
        "notes": list(it.notes),
    }  # fmt: skip


def target_kept(it: Plan) -> bool | None:
    """Return whether the cost is within its target; None where a bound does not tell."""
    target, cost = it.targets.cost_per_1k_tokens, it.cost.per_1k_tokens if it.cost else None
    if target is None or cost is None or (cost <= target and not it.measured):
        return None
    return cost <= target


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _traffic(traffic: TrafficProfile) -> dict[str, Any]:
    return {
        "source": traffic.source, "rate_per_s": traffic.arrivals_per_s, "prompt_tokens": _fields(traffic.prompt_tokens),
        "output_tokens": _fields(traffic.output_tokens), "ttft_s": traffic.ttft_s, "tpot_s": traffic.tpot_s,
        "request_s": traffic.time_s,
        "users": traffic.users, "think_s": traffic.think_s, "cached_share": traffic.cached_share,
        "in_flight": traffic.in_flight,
        "resident_tokens": traffic.resident_tokens, "missing": list(traffic.missing),
    }  # fmt: skip
