"""Capacity by role where prefill and decode run on separate engines. Pure.

Each role has limits of its own: a prefill engine computes prompts and holds them until they are fetched, a decode
engine holds and extends replies. The KV cache of every prompt crosses the link between the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from exporters.catalogue.metric import EngineRole
from stack.capacity import kv
from stack.capacity.fit import milli
from stack.capacity.plan import (
    BANDWIDTH,
    CACHE,
    CACHE_SHARE,
    COMPUTE,
    Limit,
    Plan,
    cache_shares,
    replicas_for,
    steady_rate,
)
from stack.capacity.throughput import flops_of, operations
from stack.capacity.traffic import TrafficProfile

_STEPS = 4  # points at which a growing reply is looked at, as in plan.py


@dataclass(frozen=True, slots=True)
class RoleCapacity:
    """Engines of one role. limits: requests per second that one engine takes. engines: the fewest for the traffic; None
    where its rate is not known, or no limit is."""

    role: EngineRole
    limits: tuple[Limit, ...]
    engines: int | None

    @property
    def binds(self) -> Limit | None:
        return min(self.limits, key=lambda limit: limit.rate_per_s, default=None)


def by_role(it: Plan) -> tuple[RoleCapacity, ...]:
    """Return the capacity of each role; empty without traffic."""
    if (traffic := it.traffic) is None:
        return ()
    limits = {EngineRole.PREFILL: _prefill(it, traffic), EngineRole.DECODE: _decode(it, traffic)}
    return tuple(_capacity(role, tuple(found), traffic.arrivals_per_s) for role, found in limits.items())


def transferred_bytes(it: Plan) -> float:
    """Return the mean bytes of KV cache that one request moves from prefill to decode, over all GPUs of an engine; 0
    without traffic."""
    if it.traffic is None:
        return 0.0
    each = fmean(kv.request_bytes(it.shape, it.serving, prompt) for prompt, _ in it.traffic.sizes)
    return each * it.gpus


def _capacity(role: EngineRole, limits: tuple[Limit, ...], rate: float | None) -> RoleCapacity:
    least = min((limit.rate_per_s for limit in limits), default=None)
    return RoleCapacity(role, limits, replicas_for(rate, least) if rate and least else None)


def _prefill(it: Plan, traffic: TrafficProfile) -> Iterator[Limit]:
    prompt = traffic.prompt_tokens.mean * (1 - (traffic.cached_share or 0.0))
    yield from _compute(it, prompt, 0.0)
    if traffic.ttft_s:
        share = cache_shares(it.shape, it.serving, it.cache)
        held = [[(traffic.ttft_s, share(prompt))] for prompt, _ in traffic.sizes]
        yield _cache(held, f"the blocks of a prompt for {milli(traffic.ttft_s)}, until they are fetched")


def _decode(it: Plan, traffic: TrafficProfile) -> Iterator[Limit]:
    yield from _compute(it, 0.0, traffic.output_tokens.mean)
    yield from (limit for limit in it.limits if limit.name == BANDWIDTH)
    if traffic.tpot_s:
        share = cache_shares(it.shape, it.serving, it.cache)
        held = [
            [
                (output * traffic.tpot_s / _STEPS, share(round(prompt + output * (step + 0.5) / _STEPS)))
                for step in range(_STEPS)
            ]
            for prompt, output in traffic.sizes
        ]
        yield _cache(held, "prompt and reply while the reply grows")


def _compute(it: Plan, prompt: float, output: float) -> Iterator[Limit]:
    needed = operations(it.shape, prompt, output)
    if needed and it.gpu.flops:
        flops = flops_of(it.shape, it.serving, it.gpu)
        why = f"{needed / 1e12:,.3g} TFLOP for {prompt or output:,.0f} tokens, at {flops / 1e12:,.0f} TFLOP/s"
        yield Limit(COMPUTE, flops / needed, True, why)


def _cache(held: Sequence[Sequence[tuple[float, float]]], what: str) -> Limit:
    """Return the limit by the KV cache. held: by request, seconds and the share of the cache that it holds."""
    mean = fmean(sum(time * share for time, share in each) for each in held)
    square = fmean(sum(time * share**2 for time, share in each) for each in held)
    return Limit(CACHE, steady_rate(mean, square, CACHE_SHARE), False, what)
