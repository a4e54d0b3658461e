"""Plan: concurrent requests per GPU, replicas for the traffic, cost. Pure.

Invariant: a value is arithmetic on known sizes, or is called a bound, or is absent. Only a measurement shows how fast
a GPU is with a model: what memory bandwidth and arithmetic allow is a bound, and the real GPU stays below it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from exporters.accounting.gpu_use import mig_fraction
from exporters.accounting.prices import Prices
from stack.capacity import gpus as gpu_models
from stack.capacity import kv, recommend
from stack.capacity.fit import DoesNotFit, default_seqs, gib, milli, placed, room
from stack.capacity.gpus import GpuModel
from stack.capacity.kv import BadServing, KvCapacity, Serving
from stack.capacity.memory import MemoryPart
from stack.capacity.model import ModelShape
from stack.capacity.recommend import Flag, ReplicaLimits, Tuning
from stack.capacity.throughput import flops_of, operations, plain, weights_read
from stack.capacity.traffic import P95_SIGMAS, BadTraffic, TrafficProfile, within
from stack.gateway.policy import Capacity

__all__ = [
    "DoesNotFit",
    "Limit",
    "Plan",
    "PlanCost",
    "PlanTargets",
    "TooSlow",
    "Tuning",
    "cache_shares",
    "plan",
    "replicas_for",
    "steady_rate",
]

CACHE_SHARE = Capacity().kv_usage  # beyond it the gateway lowers its slots, so a plan stays below
MEASURED_SHARE = 0.8  # of a measured rate: near its knee the queue grows without end
CACHE, SEQUENCES, BANDWIDTH, COMPUTE, MEASURED = (
    "KV cache",
    "max_num_seqs",
    "memory bandwidth",
    "compute",
    "measurement",
)
_STEPS = 4  # points at which a growing reply is looked at


class TooSlow(BadTraffic):
    """A target that this GPU cannot keep, whatever the load."""


@dataclass(frozen=True, slots=True)
class PlanTargets:
    """Targets: seconds that 95 of 100 requests keep to, and money for a thousand tokens of prompt and reply
    together."""

    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    cost_per_1k_tokens: float | None = None


NO_TARGETS, AS_IT_IS = PlanTargets(), Tuning()


@dataclass(frozen=True, slots=True)
class Limit:
    """Requests per second that one replica takes by one resource. bound: it is a roofline, and the real figure is
    lower."""

    name: str
    rate_per_s: float
    bound: bool
    why: str


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Money of the plan. per_1k_tokens: at this traffic. at_best: of a replica that is always full, below which nobody
    gets."""

    currency: str
    per_replica_hour: float
    per_hour: float | None = None
    per_1k_tokens: float | None = None
    at_best_per_1k_tokens: float | None = None
    api_per_1k_tokens: float | None = None
    api_per_hour: float | None = None
    break_even_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that follows. Bytes are per GPU. guaranteed: requests of max_model_len tokens, which vLLM calls
    maximum concurrency; expected: of the traffic's sizes while they grow; at_p95: if all had the 95th percentile of
    prompt and of reply. cache_share: of one replica's cache, on the average, if it had all of the traffic. replicas:
    None where the traffic or its times are not known."""

    shape: ModelShape
    serving: Serving
    gpu: GpuModel
    name: str
    parts: tuple[MemoryPart, ...]
    kv_bytes: float
    token_bytes: float
    cache: KvCapacity
    traffic: TrafficProfile | None
    targets: PlanTargets
    guaranteed: float
    expected: float | None
    at_p95: float | None
    cache_share: float | None
    limits: tuple[Limit, ...]
    replicas: int | None
    flags: tuple[Flag, ...]
    gateway: ReplicaLimits
    cost: PlanCost | None
    notes: tuple[str, ...]

    @property
    def binds(self) -> Limit | None:
        """Return the resource that is used up first; None where nobody knows how long a request holds its cache, which
        may then be the first."""
        if not self.measured and (self.traffic is None or self.traffic.time_s is None):
            return None
        return min(self.limits, key=lambda limit: limit.rate_per_s, default=None)

    @property
    def measured(self) -> bool:
        """Return whether somebody measured how fast a replica is; otherwise the replicas are the fewest that memory and
        rooflines allow."""
        return any(limit.name == MEASURED for limit in self.limits)

    @property
    def gpus(self) -> int:
        """GPUs or slices of one replica."""
        return self.serving.tensor_parallel * self.serving.pipeline_parallel

    @property
    def users_per_replica(self) -> float | None:
        """People that one replica takes, by what binds; None where nobody speaks of people, or times are not known."""
        if (
            self.traffic is None
            or not (self.traffic.users or self.traffic.think_s)
            or self.traffic.time_s is None
            or self.binds is None
        ):
            return None
        return self.binds.rate_per_s * (self.traffic.time_s + self.traffic.think_s)

    @property
    def command(self) -> str:
        return " ".join(
            (
                "vllm serve",
                shlex.quote(self.shape.folder or self.shape.name or "MODEL"),
                *(flag.words for flag in self.flags),
            )
        )


def plan(
    shape: ModelShape,
    serving: Serving,
    gpu: GpuModel,
    traffic: TrafficProfile | None = None,
    targets: PlanTargets = NO_TARGETS,
    tuning: Tuning = AS_IT_IS,
    prices: Prices | None = None,
    measured_per_s: float | None = None,
    name: str = "",
) -> Plan:
    """The plan for one kind of GPU. measured_per_s: requests a second at which one replica was seen to keep its
    targets; name: as clients ask for the model. Raises DoesNotFit, TooSlow, BadTraffic, BadServing, and BadModel where
    the weights are not known."""
    if (tuning.max_num_seqs or 0) > serving.max_num_batched_tokens:
        raise BadServing(
            f"max_num_seqs {tuning.max_num_seqs:,} is more than max_num_batched_tokens"
            f" {serving.max_num_batched_tokens:,}, and vLLM refuses that; set the one lower or the other higher"
        )
    parts, kv_bytes, cache = room(shape, serving, gpu)
    traffic = within(traffic, serving.max_model_len) if traffic else None
    hard = tuple(_impossible(shape, serving, gpu, traffic, targets, tuning))
    share = cache_shares(shape, serving, cache)
    held = _held(traffic, share) if traffic else None
    expected = held.time / held.share if held else None
    speed = list[Limit]()
    if traffic and held:
        speed += _bandwidth(shape, serving, gpu, held, targets)
        speed += _compute(shape, serving, gpu, traffic)
    if measured_per_s:
        speed.append(_measured(measured_per_s))
    most_seqs = tuning.max_num_seqs or min(default_seqs(gpu), serving.max_num_batched_tokens)
    seqs, why_seqs = _seqs(most_seqs, tuning, traffic, expected, speed)
    slots = seqs or max(1, min(most_seqs, math.floor(cache.concurrency)))
    limits = [*_memory_limits(traffic, held, most_seqs), *speed]
    rate = traffic.arrivals_per_s if traffic else None
    least = min((limit.rate_per_s for limit in limits), default=None)
    time_s = traffic.time_s if traffic else None
    replicas = None
    # without either there are bounds only of speed, and the cache may need more
    if rate and least and (measured_per_s or time_s):
        replicas = replicas_for(rate, least)
    its_name = name or shape.name
    notes = [*shape.notes]
    if traffic:
        notes += traffic.notes
    notes += hard
    notes += _notes(shape, traffic, measured_per_s)
    return Plan(
        shape,
        serving,
        gpu,
        its_name,
        parts,
        kv_bytes,
        kv.token_bytes(shape, serving),
        cache,
        traffic,
        targets,
        guaranteed=cache.concurrency,
        expected=expected,
        at_p95=1 / share(_p95(traffic)) if traffic else None,
        cache_share=rate * held.share if rate and held and time_s else None,
        limits=tuple(limits),
        replicas=replicas,
        flags=tuple(recommend.flags(serving, tuning, seqs, why_seqs, its_name)),
        gateway=recommend.gateway(serving, cache, traffic, share, slots, replicas or 1, its_name),
        cost=_cost(prices, gpu, serving, traffic, replicas, least, its_name) if prices else None,
        notes=tuple(notes),
    )


def _measured(per_s: float) -> Limit:
    """Return the limit of a replica that was measured."""
    why = (
        f"one replica was measured to keep its targets at {per_s:g} a second; {MEASURED_SHARE:.0%} of that, away from"
        " the knee"
    )
    return Limit(MEASURED, per_s * MEASURED_SHARE, False, why)


# ---- what requests hold


@dataclass(frozen=True, slots=True)
class _Held:
    """Means over all sizes of a request: the time that it is there, the share of the cache that it holds times that
    time, and the same of the square of the share. decode: tokens in the cache while a reply is made, summed over the
    tokens of that reply."""

    time: float
    share: float
    square: float
    decode: float


def cache_shares(shape: ModelShape, serving: Serving, cache: KvCapacity) -> Callable[[int], float]:
    """Return the share of one replica's cache that a request of so many tokens holds: at max_model_len, 1 / vLLM's
    maximum concurrency."""
    whole = cache.concurrency * kv.request_bytes(shape, serving, serving.max_model_len)
    known: dict[int, float] = {}

    def share(tokens: int) -> float:
        blocks = -(-max(1, tokens) // serving.block_size)
        if blocks not in known:
            known[blocks] = (
                kv.request_bytes(shape, serving, min(blocks * serving.block_size, serving.max_model_len)) / whole
            )
        return known[blocks]

    return share


def _held(traffic: TrafficProfile, share: Callable[[int], float]) -> _Held:
    """Over the life of a request: the prompt alone until the first token, then a reply that grows. Where the times are
    not known, all of its life is the reply, which makes it larger than it is."""
    ttft_s, tpot_s = (
        (0.0, 1.0) if traffic.ttft_s is None or traffic.tpot_s is None else (traffic.ttft_s, traffic.tpot_s)
    )
    times, shares, squares = [], [], []
    for prompt, output in traffic.sizes:
        steps = [(ttft_s, share(prompt))]
        steps += [
            (output * tpot_s / _STEPS, share(round(prompt + output * (step + 0.5) / _STEPS))) for step in range(_STEPS)
        ]
        times.append(sum(time for time, _ in steps))
        shares.append(sum(time * held for time, held in steps))
        squares.append(sum(time * held**2 for time, held in steps))
    decode = fmean(prompt * output + output**2 / 2 for prompt, output in traffic.sizes)
    return _Held(fmean(times), fmean(shares), fmean(squares), decode)


def _p95(traffic: TrafficProfile) -> int:
    return math.ceil(traffic.prompt_tokens.p95 + traffic.output_tokens.p95)


# ---- limits of one replica


def steady_rate(mean: float, square: float, most: float) -> float:
    """The rate at which requests that come by chance use more than `most` of something in 5 % of the time.

    mean, square: what one request holds times how long, and the same of the square of what it holds. At rate l the use
    has mean l x mean and variance l x square (Campbell's theorem for a Poisson stream); l x mean + 1.645 x sqrt(l x
    square) = most, solved for l, taking the sum as normal."""
    spread = P95_SIGMAS * math.sqrt(square)
    return ((math.sqrt(spread**2 + 4 * mean * most) - spread) / (2 * mean)) ** 2


def replicas_for(rate_per_s: float, one_per_s: float) -> int:
    """The fewest that take a rate, each its even part."""
    return max(1, math.ceil(rate_per_s / one_per_s - 1e-9))


def _seqs(
    most_seqs: int, tuning: Tuning, traffic: TrafficProfile | None, expected: float | None, speed: list[Limit]
) -> tuple[int | None, str]:
    """--max-num-seqs and its reason: no more than the cache holds, and than are there at once at the rate that speed
    allows."""
    if tuning.max_num_seqs:
        return tuning.max_num_seqs, "as given"
    if traffic is None or expected is None:
        return None, ""
    most = [
        (expected, "requests of this traffic that the cache holds"),
        (float(most_seqs), "vLLM's own choice for this GPU and batch"),
    ]
    if traffic.time_s:
        most += [
            (limit.rate_per_s * traffic.time_s, f"more at once than {limit.name} allows would wait inside the engine")
            for limit in speed
        ]
    seqs, why = min(most)
    return max(1, math.floor(seqs)), why


def _memory_limits(traffic: TrafficProfile | None, held: _Held | None, seqs: int) -> Iterator[Limit]:
    if traffic and held and traffic.time_s:
        rate = steady_rate(held.share, held.square, CACHE_SHARE)
        yield Limit(
            CACHE,
            rate,
            False,
            f"at most {CACHE_SHARE:.0%} of the cache in use, in 95 % of the time, with requests that come by chance",
        )
        if seqs < math.floor(held.time / held.share):
            rate = steady_rate(held.time / seqs, held.time / seqs**2, 1.0)
            yield Limit(
                SEQUENCES, rate, False, f"at most {seqs} requests at once (--max-num-seqs), in 95 % of the time"
            )


def _bandwidth(
    shape: ModelShape, serving: Serving, gpu: GpuModel, held: _Held, targets: PlanTargets
) -> Iterator[Limit]:
    """A step reads all weights once and the cache of every request in it, and may take as long as the target: (weights
    + batch x KV) / bandwidth."""
    weights, token_bytes, itl_s = weights_read(shape, serving), kv.token_bytes(shape, serving), targets.itl_p95_s
    if (
        weights
        and token_bytes
        and plain(shape)
        and itl_s
        and gpu.bandwidth
        and (spare := itl_s * gpu.bandwidth - weights) > 0
    ):
        why = (
            f"weights and the cache of every request that is being answered, read in {milli(itl_s)} at"
            f" {gpu.bandwidth / 1e12:.3g} TB/s"
        )
        yield Limit(BANDWIDTH, spare / (token_bytes * itl_s * held.decode), True, why)


def _compute(shape: ModelShape, serving: Serving, gpu: GpuModel, traffic: TrafficProfile) -> Iterator[Limit]:
    """All operations of a request, but for those of prompt tokens in the prefix cache."""
    prompt, output = traffic.prompt_tokens.mean * (1 - (traffic.cached_share or 0.0)), traffic.output_tokens.mean
    needed = operations(shape, prompt, output)
    if needed and gpu.flops:
        flops = flops_of(shape, serving, gpu)
        why = (
            f"{needed / 1e12:,.3g} TFLOP for a request of {prompt:,.0f} + {output:,.0f} tokens, at {flops / 1e12:,.0f}"
            " TFLOP/s"
        )
        yield Limit(COMPUTE, flops / needed, True, why)


def _impossible(
    shape: ModelShape,
    serving: Serving,
    gpu: GpuModel,
    traffic: TrafficProfile | None,
    targets: PlanTargets,
    tuning: Tuning,
) -> Iterator[str]:
    """Remarks about targets that are hard to keep. Raises TooSlow for those that no engine keeps on this GPU."""
    weights, itl_s, ttft_s = weights_read(shape, serving), targets.itl_p95_s, targets.ttft_p95_s
    if weights and itl_s and gpu.bandwidth and itl_s < (least_s := weights / gpu.bandwidth):
        what = (
            f"itl_p95: {milli(itl_s, 5)} cannot be: reading {gib(weights)} of weights once for every token takes"
            f" {placed(serving, gpu)} at least {milli(least_s, 5)} ({gpu.bandwidth / 1e12:.3g} TB/s)"
        )
        if not tuning.speculative:
            raise TooSlow(
                f"{what}; tensor parallelism, a smaller or quantized model, or speculative decoding get below that"
            )
        yield f"{what}, unless speculative decoding makes several tokens at once"
    prompt = traffic.prompt_tokens.p95 if traffic else 0.0
    needed = operations(shape, prompt, 0.0)
    if needed and ttft_s and gpu.flops:
        least_s = needed / flops_of(shape, serving, gpu)
        if least_s > ttft_s:
            what = (
                f"ttft_p95: {milli(ttft_s)} cannot be for {prompt:,.0f} prompt tokens (p95): {placed(serving, gpu)}"
                f" computes them in {milli(least_s)} at best"
            )
            if tuning.prefix_caching is False:
                raise TooSlow(f"{what}; shorter prompts, prefix caching, or more GPUs to a replica get below that")
            yield f"{what}, unless most of them are in the prefix cache"


# ---- cost


def replica_hour(prices: Prices, gpu: GpuModel, gpus: int) -> float:
    """An hour of all GPUs of a replica. A slice without a price of its own costs its share of the GPU's compute or of
    its memory, whichever is more, for nobody else can use the rest of it."""
    fraction = 1.0
    if gpu.profile and gpu.of:
        memory = gpu.bandwidth / gpu_models.gpu_named(gpu.of).bandwidth  # slices have bandwidth as they have memory
        fraction = max(mig_fraction(gpu.profile, gpu.of), memory)
    return prices.per_hour(gpu.of or gpu.name, fraction, gpu.profile) * gpus


def _cost(
    prices: Prices,
    gpu: GpuModel,
    serving: Serving,
    traffic: TrafficProfile | None,
    replicas: int | None,
    full_per_s: float | None,
    name: str,
) -> PlanCost:
    one = replica_hour(prices, gpu, serving.tensor_parallel * serving.pipeline_parallel)
    if traffic is None:
        return PlanCost(prices.currency, one)
    hour = one * replicas if replicas else None
    rate, prompt, output = traffic.arrivals_per_s, traffic.prompt_tokens.mean, traffic.output_tokens.mean
    api = prices.api_price(name)
    request = api.cost(prompt, prompt * (traffic.cached_share or 0.0), output) if api else None

    def per_1k(money: float | None, per_s: float | None) -> float | None:
        return money / (per_s * 3600 * (prompt + output)) * 1000 if money is not None and per_s else None

    return PlanCost(
        prices.currency, one, hour, per_1k(hour, rate), per_1k(one, full_per_s),
        api_per_1k_tokens=None if request is None else request / (prompt + output) * 1000,
        api_per_hour=None if request is None or not rate else request * rate * 3600,
        break_even_per_s=hour / 3600 / request if hour and request else None,
    )  # fmt: skip


# ---- what is said besides


def _notes(shape: ModelShape, traffic: TrafficProfile | None, measured_per_s: float | None) -> Iterator[str]:
    if traffic is None:
        yield "no traffic is given, so only the guaranteed concurrency is known; --traffic or --log say more"
        return
    if traffic.users and not traffic.think_s:
        yield (
            "no time to think is given, so each of these users asks again the moment a reply ends; --think says how"
            " long they read"
        )
    if traffic.missing:
        yield (
            f"not given: {', '.join(traffic.missing)}; without that, requests at once, replicas and their cost are not"
            " known"
        )
    if not measured_per_s:
        yield (
            "how many requests a second one replica answers within the targets is not known without a measurement"
            " (vllm-watch bench run); give it with --measured-rate. Until then the replicas are the fewest that memory"
            " and bounds allow"
        )
    if shape.moe:
        yield (
            "how many of its experts' weights a step reads depends on the batch, so there are no bounds by memory"
            " bandwidth and compute"
        )
