"""Recommended `vllm serve` options and gateway limits from a plan, with reasons. Pure."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from stack.capacity.kv import KvCapacity, Serving
from stack.capacity.traffic import TrafficProfile
from stack.gateway.config import Timeouts
from stack.gateway.policy import BANDS, Capacity

QUEUE_WAIT_S = BANDS["default"].max_wait_s


@dataclass(frozen=True, slots=True)
class Tuning:
    """Options of the engine that memory does not depend on; None is vLLM's own choice."""

    prefix_caching: bool | None = None
    speculative: str | None = None
    max_num_seqs: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of `vllm serve`; value None: it stands alone."""

    option: str
    value: str | None
    why: str

    @property
    def words(self) -> str:
        """Return the option and its value, quoted for a shell."""
        return self.option if self.value is None else f"{self.option} {shlex.quote(self.value)}"


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Limits of all replicas together. yaml: the same as a piece of teams.yaml."""

    slots: int
    tokens: int
    queue: int | None
    max_model_len: int
    max_output_tokens: int | None
    yaml: str


def flags(serving: Serving, tuning: Tuning, seqs: int | None, why_seqs: str, name: str) -> Iterator[Flag]:
    """The options that a plan rests on. seqs: of --max-num-seqs; name: as clients ask for the model, "" where nobody
    said."""
    if name:
        yield Flag("--served-model-name", name, "as clients ask for it")
    yield Flag("--max-model-len", str(serving.max_model_len), "prompt and reply of one request together")
    yield Flag(
        "--gpu-memory-utilization",
        f"{serving.gpu_memory_utilization:g}",
        "the share of the GPU's memory that is reckoned with",
    )
    if seqs:
        yield Flag("--max-num-seqs", str(seqs), why_seqs)
    yield Flag(
        "--max-num-batched-tokens",
        str(serving.max_num_batched_tokens),
        "tokens of one step, of prompts and replies together",
    )
    for option, value, usual, why in (
        ("--tensor-parallel-size", serving.tensor_parallel, 1, "GPUs that share every layer"),
        ("--pipeline-parallel-size", serving.pipeline_parallel, 1, "GPUs that have layers of their own"),
        ("--dtype", tuning.dtype, None, "the worksheet's type, not the model's own"),
        ("--kv-cache-dtype", serving.cache_dtype, "auto", "bytes of the cache; check the quality"),
        ("--block-size", serving.block_size, 16, "tokens of one block of the cache"),
    ):
        if value != usual:
            yield Flag(option, str(value), why)
    if tuning.prefix_caching is not None:
        yield Flag(
            "--enable-prefix-caching" if tuning.prefix_caching else "--no-enable-prefix-caching", None, "as given"
        )
    if tuning.speculative:
        yield Flag(
            "--speculative-config", tuning.speculative, "as given; its own weights and cache are not reckoned with"
        )


def gateway(
    serving: Serving,
    cache: KvCapacity,
    traffic: TrafficProfile | None,
    share: Callable[[int], float],
    seqs: int,
    replicas: int,
    name: str,
) -> ReplicaLimits:
    """Return the recommended teams.yaml. share: of one replica's cache that a request of so many tokens holds; seqs:
    requests at once in one replica."""
    slots = replicas * seqs
    whole = round(traffic.prompt_tokens.mean + traffic.output_tokens.mean) if traffic else serving.max_model_len
    # else the longest request would wait for ever
    tokens = max(serving.max_model_len, math.floor(min(cache.tokens, whole / share(whole))))
    time_s = traffic.time_s if traffic else None
    queue = math.ceil(slots / time_s * QUEUE_WAIT_S) if time_s else None
    output = math.ceil(traffic.output_tokens.p95) if traffic else None
    lines = [
        "capacity:",
        f"  slots: {slots}  # {replicas} x {seqs} requests at once" + ("" if traffic else ", each as long as can be"),
        f"  tokens: {replicas * tokens}  # {replicas} x {tokens}, which the KV cache holds"
        + (" at this traffic's sizes" if traffic else ""),
    ]
    if queue:
        lines.append(
            f"  queue: {queue}  # what {slots} slots of {time_s:.3g} s take on in {QUEUE_WAIT_S:g} s, as long as the"
            " default band waits"
        )
    if slots < Capacity().min_slots:
        lines.append(f"  min_slots: {slots}  # there are no more")
    if slots < sum(band.floor for band in BANDS.values()):
        lines += ["bands:  # the defaults, without floors: there are fewer slots than those keep free"]
        lines += [f"  {band}: {_flow(msgspec.structs.replace(its, floor=0))}" for band, its in BANDS.items()]
    lines += ["models:", f"  {json.dumps(name or 'MODEL')}:", f"    max_model_len: {serving.max_model_len}"]
    if output:
        lines.append(
            f"# teams.NAME.max_output_tokens: {output} is p95 of this traffic; with over_output: clamp longer replies"
            " are cut there"
        )
    if (
        traffic
        and traffic.tpot_s
        and (reply_s := (traffic.ttft_s or 0.0) + serving.max_model_len * traffic.tpot_s) > Timeouts().total_s
    ):
        lines.append(
            f"# timeouts.total_s of gateway.yaml: above {reply_s:.0f}, or the longest replies without stream are"
            " cut off"
        )
    return ReplicaLimits(slots, replicas * tokens, queue, serving.max_model_len, output, "\n".join(lines) + "\n")


def _flow(band: msgspec.Struct) -> str:
    """Return the values that differ from the defaults, as a YAML mapping on one line."""
    said = {
        field.name: value
        for field in msgspec.structs.fields(band)
        if (value := getattr(band, field.name)) != field.default
    }
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in said.items()) + "}"
