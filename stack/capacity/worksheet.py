"""Capacity worksheet: YAML with model, traffic, targets and tuning. Read, understood, and returned filled in.

Invariant: numbers may be written as people write them (8B, 16k, 500ms), and one that can be read in two ways is
refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import yaml

from stack.capacity.config_json import shown
from stack.capacity.traffic import BadTraffic, TrafficProfile, of_shape
from stack.config import BadConfig, YamlFile, meant
from stack.config import source as read_text
from stack.option import Opt

Cell = int | float | str | None


@dataclass(frozen=True, slots=True)
class Key:
    """Place of a value in the file: its part and, of its name, what else it is called there. read: its plain value from
    what is written; raises ValueError. written: what YAML may have there."""

    part: str
    read: Callable[[Any], Any]
    also: tuple[str, ...] = ()
    written: Any = Cell


# ---- numbers as people write them

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30}
_FEWEST_PARAMETERS = 10_000
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_NUMBER = r"([+-]?(?:\d+(?:[_,]\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"


def _split(text: str, units: str) -> tuple[float, str] | None:
    found = re.fullmatch(rf"\s*{_NUMBER}\s*({units})\s*", text)
    return (float(re.sub("[_,]", "", found[1])), found[2]) if found else None


def _finite(value: float, words: str) -> float:
    if math.isinf(value):
        raise ValueError("this is larger than any number that can be reckoned with")
    if not value > 0:
        raise ValueError(f"{value:g} should be {words}")
    return value


def count(value: int | float | str) -> float:
    """Parse a count: 8e9, "8B", "70b", "1.5 B" (all decimal). Raises ValueError."""
    split = _split(value, "[kKmMbBgGtT]?") if isinstance(value, str) else (float(value), "")
    if split is None:
        raise ValueError(f"{value!r} is no number; write it like 8e9 or 8B")
    return _finite(split[0] * _DECIMAL[split[1].lower()], "more than 0")


def parameters(value: int | float | str) -> float:
    """Parse the parameters of a model: as `count`, but no model has as few as 8, so that is a B forgotten. Raises
    ValueError."""
    number = count(value)
    if number < _FEWEST_PARAMETERS:
        raise ValueError(f"{value} is no language model's number of parameters; write 8e9 or 8B for 8 billion")
    return number


def tokens(value: int | float | str) -> int:
    """Tokens as vLLM's own options are written: 16k is 16,000 and 16K is 16,384. Raises ValueError."""
    split = _split(value, "[kKmM]?") if isinstance(value, str) else (float(value), "")
    if split is None:
        raise ValueError(f"{value!r} is no number of tokens; write it like 16384, 16K (the same) or 16k (16000)")
    number = _finite(split[0] * (_BINARY.get(split[1]) or _DECIMAL[split[1]]), "1 or more")
    if number != int(number):
        raise ValueError(f"{value} is no whole number of tokens")
    return int(number)


def seconds(value: int | float | str, most: float = math.inf) -> float:
    """0.5, "0.5s", "500ms". A bare number of more than `most` seconds is refused, for it was meant in another unit.
    Raises ValueError."""
    split = _split(value, "s|ms|us|min|") if isinstance(value, str) else (float(value), "")
    if split is None:
        raise ValueError(f"{value!r} is no time; write it like 0.5, 0.5s or 500ms")
    if not split[1] and split[0] > most:
        raise ValueError(f"{value} without a unit is seconds; write {value}ms or {value}s, whichever is meant")
    return _finite(split[0] * _SECONDS.get(split[1], 1.0), "more than 0")


def think(value: int | float | str) -> float:
    """Return a think time in seconds; 0 is allowed. Raises ValueError."""
    return 0.0 if value in (0, "0", "0s") else seconds(value)


def _share(value: int | float | str, least: float = 0.0) -> float:
    split = _split(value, "%|") if isinstance(value, str) else (float(value), "")
    if (
        split is None
        or not least <= (share := split[0] / (100 if split[1] else 1)) <= 1
        or (least == 0.0 and share < 0)
    ):
        raise ValueError(f"{value} should be from 0 to 1")
    return share


def _memory_share(value: int | float | str) -> float:
    share = _share(value)
    return _finite(share, "more than 0 and at most 1")


def _whole(value: int | float | str) -> int:
    if isinstance(value, str) or value != int(value) or value < 1:
        raise ValueError(f"{value} should be a whole number, 1 or more")
    return int(value)


def _money(value: int | float | str) -> float:
    split = _split(value.strip("$€£ "), "|[A-Z]{3}") if isinstance(value, str) else (float(value), "")
    if split is None:
        raise ValueError(f"{value!r} is no amount; write it like 0.002")
    return _finite(split[0], "more than 0")


def _yes(value: bool | str) -> bool:
    if isinstance(value, str):
        raise ValueError(f"{value!r} should be true or false")
    return value


def _speculative(value: str | dict[str, Any]) -> str:
    """The JSON object that --speculative-config takes."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if not isinstance(found, dict):
            raise ValueError
        return json.dumps(found, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(
            f"{shown(value)} should be an object, such as {{method: ngram, num_speculative_tokens: 3}}"
        ) from None


def _word(value: str) -> str:
    return value.strip()


# ---- the values


@dataclass(frozen=True, slots=True, kw_only=True)
class Worksheet:
    """The file as it is meant: plain numbers, seconds, shares; None is empty. Its parts and their keys are made from
    these fields, and so are options of the command, which go before the file.

    config: a model's folder or config.json, from where the worksheet stands. name: as clients ask for it. dtype: of the
    weights. Lengths are tokens of a request. A rate, or people and the time that they think; cached_share: of prompt
    tokens in the prefix cache, 0 to 1. ttft_p95, itl_p95: times to the first token and between tokens;
    cost_per_1k_tokens: money for a thousand tokens, prompt and output together. disaggregated: whether prefill and
    decode run on separate engines. The rest are options of `vllm serve`
    under their own names. gpu: as --gpu."""

    parameters: Annotated[float | None, Key("model", parameters)] = None
    dtype: Annotated[str | None, Key("model", _word, written=str | None)] = None
    config: Annotated[Path | None, Key("model", Path, written=str | None)] = None
    name: Annotated[
        str | None,
        Key("model", _word, written=str | None),
        Opt(
            name="--served-model-name", metavar="NAME", help="Model name in the request logs; other lines are ignored."
        ),
    ] = None
    p50_prompt_tokens: Annotated[float | None, Key("traffic", tokens)] = None
    p95_prompt_tokens: Annotated[float | None, Key("traffic", tokens)] = None
    p50_output_tokens: Annotated[float | None, Key("traffic", tokens)] = None
    p95_output_tokens: Annotated[float | None, Key("traffic", tokens)] = None
    requests_per_second: Annotated[
        float | None,
        Key("traffic", count, also=("rate_per_s",)),
        Opt(name="--rate", metavar="R", read=count, help="New requests per second."),
    ] = None
    concurrent_users: Annotated[
        float | None,
        Key("traffic", count, also=("users",)),
        Opt(name="--users", metavar="N", read=count, help="Concurrent users, instead of --rate."),
    ] = None
    think_time: Annotated[
        float | None,
        Key("traffic", think, also=("think_time_s",)),
        Opt(name="--think", metavar="TIME", read=think, help="Think time of a user between reply and next request."),
    ] = None
    cached_share: Annotated[float | None, Key("traffic", _share)] = None
    ttft_p95: Annotated[float | None, Key("targets", partial(seconds, most=60.0))] = None
    itl_p95: Annotated[float | None, Key("targets", partial(seconds, most=5.0))] = None
    cost_per_1k_tokens: Annotated[float | None, Key("targets", _money)] = None
    tensor_parallel_size: Annotated[
        int | None,
        msgspec.Meta(ge=1),
        Key("tuning", _whole),
        Opt(name="--tp", help="Tensor-parallel GPUs.  [default: 1]"),
    ] = None
    pipeline_parallel_size: Annotated[
        int | None,
        msgspec.Meta(ge=1),
        Key("tuning", _whole),
        Opt(name="--pp", help="Pipeline-parallel GPUs.  [default: 1]"),
    ] = None
    max_model_len: Annotated[
        int | None, Key("model", tokens), Opt(metavar="N", read=tokens, help="Context length.  [default: the model's]")
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        Key("tuning", _word, written=str | None),
        Opt(name="--kv-dtype", metavar="TYPE", help="Type of the KV cache: auto, fp8, ...  [default: auto]"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        msgspec.Meta(gt=0, le=1),
        Key("tuning", _memory_share),
        Opt(help="Share of GPU memory for vLLM.  [default: vLLM's own]"),
    ] = None
    enable_prefix_caching: Annotated[bool | None, Key("tuning", _yes, written=bool | str | None)] = None
    speculative_config: Annotated[str | None, Key("tuning", _speculative, written=str | dict[str, Any] | None)] = None
    disaggregated: Annotated[
        bool | None,
        Key("tuning", _yes, written=bool | str | None),
        Opt(help="Also count engines by role, with prefill and decode on separate ones."),
    ] = None
    block_size: Annotated[int | None, Key("tuning", _whole)] = None
    max_num_seqs: Annotated[
        int | None,
        msgspec.Meta(ge=1),
        Key("tuning", _whole),
        Opt(help="Concurrent requests.  [default: what the KV cache holds]"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Key("tuning", tokens),
        Opt(metavar="N", read=tokens, help="Token budget of a step.  [default: vLLM's own for the GPU]"),
    ] = None
    gpu: str | None = None

    def under(self, given: Worksheet) -> Worksheet:
        """Return the worksheet with the given values in place of its own. A rate or users that are given leave no other
        rate, nor users."""
        values = {field.name: getattr(given, field.name) for field in fields(given)}
        changed = {name: value for name, value in values.items() if value is not None}
        if given.requests_per_second or given.concurrent_users:
            changed |= {name: values[name] for name in ("requests_per_second", "concurrent_users")}
        return replace(self, **changed)

    def traffic(self) -> TrafficProfile | None:
        """Return the traffic of its lengths, rate and targets; None where it has no lengths at all. Raises BadTraffic
        for some of them only."""
        lengths = {name: getattr(self, name) for name in _LENGTHS}
        if not any(lengths.values()):
            return None
        half = [name for name in ("prompt", "output") if not any(lengths[f"{p}_{name}_tokens"] for p in ("p50", "p95"))]
        if half:
            raise BadTraffic(
                f"p50_{half[0]}_tokens and p95_{half[0]}_tokens are empty; without them nothing can be said of this"
                " traffic"
            )
        alone = [
            f"{name} is empty; the other percentile stands for it" for name, value in lengths.items() if value is None
        ]
        prompt, output = (
            [
                lengths[f"{p}_{name}_tokens"] or lengths[f"{q}_{name}_tokens"]
                for p, q in (("p50", "p95"), ("p95", "p50"))
            ]
            for name in ("prompt", "output")
        )
        shape = of_shape(prompt[0], prompt[1], output[0], output[1])
        if self.ttft_p95 and self.itl_p95:
            alone.append(
                "the targets stand for the times that requests take; an engine that is faster has fewer of them at once"
            )
        return TrafficProfile(
            shape.sizes, shape.prompt_tokens, shape.output_tokens, self.requests_per_second, self.ttft_p95,
            self.itl_p95, self.concurrent_users,
            self.think_time or 0.0, self.cached_share, "the worksheet's lengths; the targets as times",
            (*shape.notes, *alone),
        )  # fmt: skip


_KEYS: Mapping[str, Key] = {
    name: next(said for said in hint.__metadata__ if isinstance(said, Key))
    for name, hint in get_type_hints(Worksheet, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_ALSO = {other: name for name, key in _KEYS.items() for other in key.also}
_LENGTHS = tuple(f"{p}_{what}_tokens" for what in ("prompt", "output") for p in ("p50", "p95"))
_PART_OF = {each: key.part for name, key in _KEYS.items() for each in (name, *key.also)}
PARTS: Mapping[str, type[msgspec.Struct]] = {
    part: msgspec.defstruct(
        f"{part.title()}Part",
        [(each, _KEYS[_ALSO.get(each, each)].written, None) for each, of in _PART_OF.items() if of == part],
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
    for part in dict.fromkeys(_PART_OF.values())
}
# The file as it is written.
Form = msgspec.defstruct(
    "Form",
    [*((part, kind | None, None) for part, kind in PARTS.items()), ("gpu", str | None, None)],
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
)


# ---- reading


def read(path: Path) -> Worksheet:
    """The file, understood. Raises BadConfig, which names line and key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise BadConfig(f"{path} cannot be read: {why}") from error
    return parse(text, str(path), path.parent)


def parse(text: str, place: str = "worksheet", folder: Path = Path()) -> Worksheet:
    """Its text, understood. Raises BadConfig."""
    source = _indented(read_text(text, place))
    form = msgspec.structs.asdict(source.into(Form))
    values: dict[str, Any] = {"gpu": form["gpu"]}
    for key, name, value in _given(form):
        try:
            read_value = _KEYS[name].read(value)
        except ValueError as error:
            raise BadConfig(source.locate(f"{key}: {error}")) from None
        if values.setdefault(name, read_value) != read_value:
            raise BadConfig(source.locate(f"{key}: {value} is not what {name} says; keep one of them"))
    for what in ("prompt", "output"):
        low, high = values.get(f"p50_{what}_tokens"), values.get(f"p95_{what}_tokens")
        if low is not None and high is not None and high < low:
            raise BadConfig(
                source.locate(
                    f"traffic.p95_{what}_tokens: {high} is less than p50_{what}_tokens ({low}), which cannot be"
                )
            )
    if "concurrent_users" in values and "requests_per_second" in values:
        raise BadConfig(
            source.locate(
                "traffic.concurrent_users: the rate is given too, and one follows from the other; keep one of them"
            )
        )
    if (dtype := values.get("dtype")) is not None and dtype.lower() not in WEIGHT_BYTES:
        raise BadConfig(
            source.locate(f"model.dtype: {dtype!r} is no type of weights{meant(dtype.lower(), WEIGHT_BYTES)}")
        )
    if "config" in values:
        values["config"] = folder / values["config"]
    return Worksheet(**values)


def _indented(source: YamlFile) -> YamlFile:
    """Return the text of a copy that lost its indentation, so that every key stands at the left: no name occurs in two
    parts."""
    if not isinstance(source.data, dict) or not any(key in _PART_OF for key in source.data):
        return source
    data: dict[Any, Any] = {}
    for key, value in source.data.items():
        if key in _PART_OF:
            data[_PART_OF[key]] = (data.get(_PART_OF[key]) or {}) | {key: value}
        else:
            data[key] = {**value, **(data.get(key) or {})} if isinstance(value, dict) else data.get(key) or value
    return YamlFile(source.place, data, source.root)


# Bytes of one weight; 4-bit types bring a scale of 16 bits for every 128 weights (AWQ, GPTQ: a zero point too), or of 8
# bits for every 16 (NVFP4) or 32 (MXFP4).
WEIGHT_BYTES: Mapping[str, float] = {
    "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2, "float32": 4, "fp32": 4, "float": 4, "fp8": 1,
    "int8": 1,
    "int4": 0.5 + 2 / 128, "awq": 0.5 + 2.5 / 128, "gptq": 0.5 + 2.5 / 128, "nvfp4": 0.5 + 1 / 16, "fp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}  # fmt: skip


def _given(form: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every value that is not empty: where it stands, what we call it, and itself."""
    for part in PARTS:
        held = form[part]
        for key, value in (msgspec.structs.asdict(held) if held is not None else {}).items():
            if value is not None and value != "":
                yield f"{part}.{key}", _ALSO.get(key, key), value


# ---- filling in


@dataclass(frozen=True, slots=True)
class Entry:
    """Text for an empty value, None to leave it empty, and a remark that says where it is from."""

    value: str | None
    remark: str


def fill(text: str, entries: Mapping[str, Entry]) -> str:
    """The worksheet with its empty values filled in, by name; whatever else stands there stays, remarks and all."""
    source: YamlFile = read_text(text if "\n" in text.strip() else f"{text.strip()}\n#", "worksheet")
    edits = sorted(_edits(source.root, entries), key=lambda edit: -edit[0].start_mark.index)
    for node, entry, block in edits:
        start, end = node.start_mark.index, node.end_mark.index
        line_end = text.find("\n", end)
        line_end = len(text) if line_end < 0 else line_end
        alone = block and not text[end:line_end].strip()
        put = "" if entry.value is None else f" {entry.value}" if start == end else entry.value
        rest = text[line_end:] if alone else text[end:]
        if re.match(rf" {{{len(put) + 2},}}#", rest):
            rest = rest[len(put) :]  # so that remarks stay in their column
        text = text[:start] + put + (f"  # {entry.remark}" if alone else "") + rest
    return text


def _edits(root: yaml.Node | None, entries: Mapping[str, Entry]) -> Iterator[tuple[yaml.ScalarNode, Entry, bool]]:
    """Empty values that have an entry, and whether they stand on a line of their own."""
    for name, held in _pairs(root):
        for key, value in _pairs(held) if name in PARTS else [(name, held)]:
            entry = entries.get(_ALSO.get(key, key))
            if entry and isinstance(value, yaml.ScalarNode) and value.tag == "tag:yaml.org,2002:null":
                yield value, entry, not (isinstance(held, yaml.MappingNode) and held.flow_style)


def _pairs(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))


FORM = """\
model:
  parameters:
  dtype:
  max_model_len:
traffic:
  p50_prompt_tokens:
  p95_prompt_tokens:
  p50_output_tokens:
  p95_output_tokens:
targets:
  ttft_p95:
  itl_p95:
  cost_per_1k_tokens:
tuning:
  tensor_parallel_size:
  gpu_memory_utilization:
  enable_prefix_caching:
  speculative_config:
"""
