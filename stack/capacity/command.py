"""Input of `vllm-watch capacity`: options, worksheet, model files and request logs into plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from exporters.accounting.prices import Prices
from exporters.requests.public_trace import read_requests
from exporters.requests.read import ReadReport
from exporters.requests.record import RequestRecord
from stack import config
from stack.capacity import gpus as gpu_models
from stack.capacity import model, plan, worksheet
from stack.capacity.fit import DoesNotFit, quantized, usable
from stack.capacity.gpus import GpuModel
from stack.capacity.kv import Serving
from stack.capacity.memory import default_batched_tokens
from stack.capacity.model import ModelShape
from stack.capacity.plan import Plan, PlanTargets, TooSlow, Tuning
from stack.capacity.traffic import BadTraffic, TrafficProfile, of_log
from stack.capacity.worksheet import WEIGHT_BYTES, Worksheet
from stack.option import Opt
from stack.request_source import data_reader

_FULL_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """The options. values: those that a worksheet may have too; what is given goes before it."""

    model: Annotated[Path | None, Opt(help="Model folder or config.json.")] = None
    gpus: Annotated[
        tuple[str, ...],
        Opt(name="--gpu", metavar="NAME", help="GPU, such as H200, H200/1g.18gb or 24GB; repeatable to compare."),
    ] = ()
    slices: Annotated[bool, Opt(help="Compare each GPU with its MIG profiles.")] = False
    worksheet: Annotated[
        Path | None,
        Opt(name="--traffic", metavar="YAML", file=True, help="Capacity worksheet; any of its values may be empty."),
    ] = None
    logs: Annotated[
        tuple[Path, ...],
        Opt(name="--log", file=True, help="Request log, for measured lengths, times and rate; repeatable."),
    ] = ()
    data: Annotated[
        str | None,
        Opt(metavar="LOCATION", help="Data set of `ship` to read instead of --log: folder or s3://bucket/prefix."),
    ] = None
    values: Worksheet = field(default_factory=Worksheet)
    measured_per_s: Annotated[
        float | None,
        Opt(
            name="--measured-rate",
            metavar="R",
            read=worksheet.count,
            help="Measured request rate at which one replica met its targets.",
        ),
    ] = None
    prices: Annotated[Path | None, Opt(file=True, help="prices.yaml; see docs/guides/cost.md.")] = None


@dataclass(frozen=True, slots=True)
class Study:
    """The answer. serving: on the first GPU; plans: of the GPUs that it fits, in the order in which they were named;
    refused: why not, by GPU;
    text: of the worksheet. disaggregated: whether to count engines by role."""

    shape: ModelShape
    serving: Serving
    plans: tuple[Plan, ...]
    refused: tuple[tuple[GpuModel, DoesNotFit | TooSlow], ...]
    text: str
    notes: tuple[str, ...] = ()
    disaggregated: bool = False


@dataclass(frozen=True, slots=True)
class WeightsOnly:
    """All that a number of parameters says. GPUs: by name, the bytes that vLLM may use of it."""

    parameters: float
    dtype: str
    assumed: bool
    weight_bytes: float
    gpus: Mapping[str, float]

    @property
    def refusal(self) -> str:
        return (
            "the KV cache is not reckoned: it depends on layers, KV heads and head size, which the number of parameters"
            " does not tell; name the model's config.json with --model, or as `config:` in the worksheet"
        )


def study(asked: CapacityOptions, somewhere: bool = True) -> Study | WeightsOnly:
    """Reads the files and reckons. somewhere: a GPU must be named. Raises BadConfig, BadModel, BadTraffic, ValueError
    and OSError, each with a sentence for the caller."""
    form = (worksheet.read(asked.worksheet) if asked.worksheet else Worksheet()).under(asked.values)
    named = asked.gpus or ((form.gpu,) if form.gpu else ())
    where = asked.model or form.config
    if where is None:
        return _weights_only(form, named)
    read = model.read(where)
    shape, notes = _typed(read, form)
    dtype = shape.dtype if shape.dtype != read.dtype else None
    if not named and somewhere:
        raise ValueError("--gpu is missing: name a GPU or slice, such as H200 or H200/1g.18gb; several are compared")
    wanted = tuple(
        dict.fromkeys(each for name in named for each in _with_slices(gpu_models.gpu_named(name), asked.slices))
    )
    prices = config.load(asked.prices, Prices).at(time.time()) if asked.prices else None
    traffic = _traffic(asked, form, shape)
    plans: list[Plan] = []
    refused: list[tuple[GpuModel, DoesNotFit | TooSlow]] = []
    for gpu in wanted:
        try:
            plans.append(
                plan.plan(
                    shape,
                    _serving(form, shape, gpu),
                    gpu,
                    traffic,
                    PlanTargets(form.ttft_p95, form.itl_p95, form.cost_per_1k_tokens),
                    Tuning(form.enable_prefix_caching, form.speculative_config, form.max_num_seqs, dtype),
                    prices,
                    asked.measured_per_s,
                    form.name or "",
                )
            )
        except (DoesNotFit, TooSlow) as error:
            refused.append((gpu, error))
    text = asked.worksheet.read_text(encoding="utf-8") if asked.worksheet else worksheet.FORM
    serving = _serving(form, shape, next(iter(wanted), None))
    return Study(shape, serving, tuple(plans), tuple(refused), text, notes, bool(form.disaggregated))


def _with_slices(gpu: GpuModel, slices: bool) -> tuple[GpuModel, ...]:
    return (*gpu_models.slices(gpu), gpu) if slices and gpu.profile is None else (gpu,)


def _weights_only(form: Worksheet, named: tuple[str, ...]) -> WeightsOnly:
    if form.parameters is None:
        raise ValueError("no model is named: give --model DIR or config.json, or at least `parameters` in a worksheet")
    dtype = (form.dtype or "bfloat16").lower()
    share = form.gpu_memory_utilization or Serving(1).gpu_memory_utilization
    may_use = {each.name: usable(each) * share for each in map(gpu_models.gpu_named, named)}
    return WeightsOnly(form.parameters, dtype, form.dtype is None, form.parameters * WEIGHT_BYTES[dtype], may_use)


def _typed(shape: ModelShape, form: Worksheet) -> tuple[ModelShape, tuple[str, ...]]:
    """The model with its weights in the worksheet's type, and what is odd about that."""
    notes = []
    if form.parameters and shape.parameters and abs(form.parameters / shape.parameters - 1) > 0.1:
        notes.append(
            f"the worksheet says {form.parameters / 1e9:.3g}e9 parameters; reckoned with are the model's"
            f" {shape.parameters / 1e9:.3g}e9"
        )
    dtype = _FULL_NAMES.get((form.dtype or shape.dtype).lower(), (form.dtype or shape.dtype).lower())
    if dtype in (shape.dtype, shape.quantization):
        return shape, tuple(notes)
    if dtype == "float16" and shape.quantization is None:
        return replace(shape, dtype=dtype), tuple(notes)
    if dtype in _FULL_NAMES.values() or shape.quantization is not None or not shape.parameters:
        notes.append(
            f"the worksheet says {form.dtype}; reckoned with are weights in {shape.quantization or shape.dtype}, as"
            " vLLM serves this model"
        )
        return shape, tuple(notes)
    notes.append(
        f"weights are reckoned in {dtype}, as the worksheet says: take such a checkpoint, or --quantization where vLLM"
        " converts by itself"
    )
    return quantized(shape, dtype), tuple(notes)


def _serving(form: Worksheet, shape: ModelShape, gpu: GpuModel | None) -> Serving:
    length = form.max_model_len or shape.served_len
    if length > shape.max_positions > 0:
        raise ValueError(
            f"max_model_len {length:,} is more than the {shape.max_positions:,} positions that"
            f" {shape.name or 'the model'} was made for"
        )
    usual = Serving(length)
    share = form.gpu_memory_utilization or usual.gpu_memory_utilization
    batched = default_batched_tokens(gpu) if gpu else usual.max_num_batched_tokens
    return Serving(
        length,
        form.kv_cache_dtype or usual.cache_dtype,
        form.block_size or usual.block_size,
        form.tensor_parallel_size or 1,
        form.pipeline_parallel_size or 1,
        form.max_num_batched_tokens or batched,
        share,
        prefix_caching=shape.attends if form.enable_prefix_caching is None else form.enable_prefix_caching,
    )


def _traffic(asked: CapacityOptions, form: Worksheet, shape: ModelShape) -> TrafficProfile | None:
    """Return the traffic of the logs, else of the worksheet. Measured values go before targets, and options before
    both."""
    found = _logged(asked, form, shape) if asked.logs or asked.data else form.traffic()
    rate, users = form.requests_per_second, form.concurrent_users
    if found is None:
        if rate or users:
            raise BadTraffic(
                "a rate or users are given and no lengths: fill in p50 and p95 of prompt and output tokens, or name a"
                " --log"
            )
        return None
    return replace(
        found, rate_per_s=rate or (None if users else found.rate_per_s), users=users, think_s=form.think_time or 0.0,
        cached_share=form.cached_share if form.cached_share is not None else found.cached_share,
    )  # fmt: skip


def _logged(asked: CapacityOptions, form: Worksheet, shape: ModelShape) -> TrafficProfile:
    """Return the traffic of the logs; the worksheet's targets replace times that the logs lack."""
    if len({path.resolve() for path in asked.logs}) != len(asked.logs):
        raise ValueError("--log lists a file twice; it would be counted twice")
    if asked.logs and asked.data:
        raise ValueError("choose --log or --data")
    report = ReadReport()
    models: set[str] = set()
    name = asked.data or ", ".join(path.name for path in asked.logs)
    found = of_log(_records(asked.logs, report, models, asked.data), name, asked.values.name)
    notes = [
        f"the log is of {name}: if that is another model than {shape.name}, or ran on another GPU, its TTFT and TPOT"
        " say nothing of this plan"
        for name in models
        if not (
            form.name or found.ttft_s is found.tpot_s is None or name.rpartition("/")[2].lower() == shape.name.lower()
        )
    ]
    notes += report.notes
    ttft_s = form.ttft_p95 if found.ttft_s is None else found.ttft_s
    tpot_s = form.itl_p95 if found.tpot_s is None else found.tpot_s
    if (ttft_s, tpot_s) != (found.ttft_s, found.tpot_s):
        notes.append("the log does not have all times; targets of the worksheet stand for them")
    return replace(found, ttft_s=ttft_s, tpot_s=tpot_s, notes=(*found.notes, *notes))


def _records(
    logs: Sequence[Path], report: ReadReport, models: set[str], data: str | None = None
) -> Iterator[RequestRecord]:
    """Yield the records of all logs, or of a data set, and add their models to `models`."""
    for record in data_reader(data)(report) if data else read_requests(logs, report):
        if record.model:
            models.add(record.model)
        yield record
