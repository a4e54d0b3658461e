"""Parameter count of a model, and bytes by quantization or file size.

Counted are the matrices; norms and biases are left out, which is below 0.1 % of any model of use. Source of the shapes:
vLLM 0.32, model_executor/models."""

from __future__ import annotations

import json
import math
import operator
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stack.capacity.config_json import HIDDEN, BadModel, ConfigFields, shown

SIZES = {"F64": 8, "F32": 4}  # types that vLLM casts to two bytes; all others stay as they are
FEWEST = 2 / 8  # bytes of a parameter in the smallest types that a checkpoint may have
LARGEST_HEADER = 100 * 2**20  # of a safetensors file; the format's own limit
TOWER = re.compile("vis(?:ion|ual)|audio")  # has layers of its own, numbered for themselves
PART = re.compile(r"-\d+-of-(\d+)\.")
OTHER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(slots=True)
class Count:
    """Parameters by how they are stored and divided."""

    embeddings: int = 0  # and the output head; hardly any quantization touches them
    attention: int = 0  # projections, and what stands in their place in layers with a state
    linear: int = 0  # of feed-forward blocks that every token goes through
    experts: int = 0
    kept: int = 0  # routers and state matrices, never quantized
    replicated: int = 0  # of all these: held whole by every GPU of a tensor-parallel group

    @property
    def total(self) -> int:
        return self.embeddings + self.attention + self.linear + self.experts + self.kept


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes per parameter of a quantized checkpoint; None where a kind keeps the model's own type."""

    method: str
    attention: float | None
    linear: float | None
    experts: float | None
    notes: tuple[str, ...] = ()

    @classmethod
    def evenly(cls, method: str, each: float) -> Stored:
        """All kinds alike."""
        return cls(method, each, each, each)


def attention(fields: ConfigFields, heads: int, kv_heads: int, head_k: int, head_v: int) -> int:
    """Parameters of one layer's query, key, value and output projections; a gated output doubles the queries
    (Qwen3-Next)."""
    hidden = fields.whole(*HIDDEN)
    queries = heads * head_k * (2 if fields.switch("attn_output_gate") else 1)
    return hidden * (queries + kv_heads * (head_k + head_v) + heads * head_v)


def latent_attention(fields: ConfigFields, heads: int) -> tuple[int, int]:
    """Parameters of one layer of multi-head latent attention, and those among them that every GPU holds (the two
    down-projections)."""
    hidden, rank = fields.whole("hidden_size"), fields.whole("kv_lora_rank")
    nope, rope, value = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim"), fields.whole("v_head_dim")
    low = fields.count("q_lora_rank")
    down = hidden * (low + rank + rope)
    up = (low or hidden) * heads * (nope + rope) + rank * heads * (nope + value) + heads * value * hidden
    return down + up, down


def mamba1(fields: ConfigFields) -> int:
    """Parameters of one Mamba mixer (Jamba, Falcon-Mamba)."""
    hidden, inner, state, rank = fields.whole("hidden_size"), *mamba1_sizes(fields)
    return inner * (3 * hidden + 2 * rank + 3 * state + fields.whole("mamba_d_conv", "conv_kernel", default=4))


def mamba1_sizes(fields: ConfigFields) -> tuple[int, int, int]:
    """Inner width, state width, rank of the time step."""
    hidden = fields.whole("hidden_size")
    inner = (
        fields.whole("mamba_expand") * hidden
        if fields.get("mamba_expand") is not None
        else fields.whole("intermediate_size")
    )
    rank = fields.get("mamba_dt_rank", fields.get("time_step_rank"))
    return inner, fields.whole("mamba_d_state", "state_size"), rank if isinstance(rank, int) else -(-hidden // 16)


def mamba2(fields: ConfigFields) -> int:
    """Parameters of one Mamba-2 mixer (Nemotron-H)."""
    hidden, inner, conv, heads = fields.whole("hidden_size"), *mamba2_sizes(fields)
    return hidden * (2 * inner + conv - inner + heads) + conv * fields.whole("conv_kernel", default=4) + inner * hidden


def mamba2_sizes(fields: ConfigFields) -> tuple[int, int, int]:
    """Inner width, width of the convolution, heads."""
    heads = fields.whole("mamba_num_heads", "num_heads")
    inner = heads * fields.whole("mamba_head_dim", "head_dim")
    return inner, inner + 2 * fields.whole("n_groups") * fields.whole("ssm_state_size", "state_size"), heads


def delta_net(fields: ConfigFields) -> int:
    """Parameters of one gated delta net (Qwen3-Next, Qwen3.5)."""
    hidden = fields.whole("hidden_size")
    keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    value_heads = fields.whole("linear_num_value_heads")
    values = value_heads * fields.whole("linear_value_head_dim")
    kernel = fields.whole("linear_conv_kernel_dim")
    return hidden * (2 * keys + 2 * values + 2 * value_heads) + (2 * keys + values) * kernel + values * hidden


def stored(quantization: Mapping[str, Any], layers: int, where: str = "config.json") -> Stored | None:
    """Return how a quantization_config stores the matrices of a model of so many layers; None where that is not known
    here. Raises BadModel.

    Scales: fp8 one float32 per 128 x 128 block; awq and gptq a float16 and a zero point per group; mxfp4 one byte per
    32; nvfp4 one byte per 16; bitsandbytes one float32 per 64, or one byte where the scales are quantized again."""
    found = (
        _compressed(quantization, where)
        if _method(quantization) == "compressed-tensors"
        else _plainly(quantization, where)
    )
    return replace(found, attention=None) if found and _spares_attention(quantization, layers) else found


def _method(quantization: Mapping[str, Any]) -> str:
    """Its name; ModelOpt has one for several types, distinguished by quant_algo (vLLM modelopt.py,
    override_quantization_method)."""
    method = str(quantization.get("quant_method", "")).lower().replace("_", "-")
    nested = quantization.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quantization).get("quant_algo")
    if method != "modelopt" or algorithm == "FP8":
        return method
    return "modelopt-fp4" if "FP4" in str(algorithm).upper() else f"modelopt {algorithm}"


def _plainly(quantization: Mapping[str, Any], where: str) -> Stored | None:
    method, group = _method(quantization), quantization.get("group_size")
    group = group if isinstance(group, int) and group > 0 else None
    if method in ("fp8", "fbgemm-fp8", "modelopt", "ptpc-fp8"):
        return Stored.evenly(method, 1 + 4 / 128**2)
    if method in ("awq", "gptq", "auto-round", "awq-marlin", "gptq-marlin"):
        bits = _bits(quantization.get("bits", quantization.get("w_bit", 4)), where)
        return Stored.evenly(method, bits / 8 + ((2 + bits / 8) / group if group else 0))
    if method in ("mxfp4", "gpt-oss-mxfp4"):
        return Stored(
            method,
            None,
            None,
            0.5 + 1 / 32,
            ("vLLM's kernels may pad the experts' matrices: gpt-oss was measured 7 % above this count",),
        )
    if method in ("modelopt-fp4", "nvfp4"):
        return Stored.evenly(method, 0.5 + 1 / 16)
    if method == "bitsandbytes":
        four = 0.5 + (1 / 64 + 4 / (64 * 256) if quantization.get("bnb_4bit_use_double_quant") else 4 / 64)
        return Stored.evenly(method, four if quantization.get("load_in_4bit") else 1.0)
    return None


def _bits(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= 8:
        raise BadModel(f"{where}: quantization_config: bits should lie between 2 and 8 and is {shown(value)}")
    return value


def _compressed(quantization: Mapping[str, Any], where: str) -> Stored | None:
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    scheme = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(scheme, Mapping) or (isinstance(groups, Mapping) and len(groups) > 1):
        return None  # several groups store several kinds
    bits, group = _bits(scheme.get("num_bits"), where), scheme.get("group_size")
    scale = (
        (1 if scheme.get("type") == "float" and bits == 4 else 2) / group if isinstance(group, int) and group > 0 else 0
    )
    return Stored.evenly("compressed-tensors", bits / 8 + scale)


def _spares_attention(quantization: Mapping[str, Any], layers: int) -> bool:
    """Return whether attention is left in the model's own type: by one pattern for all layers, or by a name for half of
    them and more."""
    left = (
        quantization.get(name) for name in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
    )
    names = [name for listed in left if isinstance(listed, list) for name in listed if isinstance(name, str)]
    own = [name for name in names if "self_attn" in name and not TOWER.search(name)]
    numbers = {found[1] for name in own if (found := OTHER_LAYER.search(name))}
    return any("*" in name or "." not in name for name in own) or len(numbers) * 2 >= layers


def counted_bytes(count: Count, cell: float, how: Stored | None) -> float:
    """Bytes of these parameters in memory; cell is the size of the model's own type."""
    attention, linear, experts = (
        cell if each is None else each
        for each in ((how.attention, how.linear, how.experts) if how else (None, None, None))
    )
    return (
        (count.embeddings + count.kept) * cell
        + count.attention * attention
        + count.linear * linear
        + count.experts * experts
    )


def file_bytes(folder: Path, layers: int) -> tuple[float, str] | None:
    """Return the memory of the weights in a model's folder, and its source; None where there are none.

    The headers of the safetensors files are read (8 bytes and the length that they give), never the tensors. Layers
    beyond the model's own
    are left out: vLLM loads them only for speculative decoding. Float32 is counted at the two bytes that vLLM casts it
    to."""
    index = folder / "model.safetensors.index.json"
    wanted = None
    if index.is_file():
        listed = read_json(index)
        names = listed.get("weight_map", {})
        wanted = sorted({str(name) for name in names.values()}) if isinstance(names, Mapping) else None
        present = wanted is not None and all((folder / name).is_file() for name in wanted)
        total = listed.get("metadata", {}).get("total_size") if isinstance(listed.get("metadata"), Mapping) else None
        if not present and isinstance(total, int | float) and math.isfinite(total) and total > 0:
            return float(total), f"total_size in {index.name}"
    files = (
        [folder / name for name in wanted]
        if wanted
        else sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    )
    if files and all(path.is_file() for path in files):
        _whole(files)
        return float(
            sum(_tensor_bytes(path, layers) for path in files)
        ), f"headers of {len(files)} safetensors file{'s' if len(files) > 1 else ''}"
    binaries = sorted(folder.glob("pytorch_model*.bin"))
    _whole(binaries)
    return (float(sum(path.stat().st_size for path in binaries)), "sizes of the .bin files") if binaries else None


def _whole(files: list[Path]) -> None:
    """Raises BadModel where files say by their names that there should be more of them."""
    for path in files:
        if (part := PART.search(path.name)) and int(part[1]) != len(files):
            raise BadModel(f"{path}: of {int(part[1])} such files {len(files)} are here; is the download complete?")


def _tensor_bytes(path: Path, layers: int) -> int:
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= LARGEST_HEADER:
            raise BadModel(f"{path}: this is not a safetensors file; is the download complete?")
        try:
            tensors = {name: tensor for name, tensor in json.loads(file.read(length)).items() if name != "__metadata__"}
            return sum(
                _loaded(name, tensor["dtype"], tensor["data_offsets"], layers) for name, tensor in tensors.items()
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise BadModel(f"{path}: the header cannot be read; is the download complete?") from None


def _loaded(name: str, dtype: str, offsets: list[int], layers: int) -> int:
    """Bytes that one tensor takes once vLLM has loaded it."""
    layer = OTHER_LAYER.search(name)
    if layer and int(layer[1]) >= layers and not TOWER.search(name):
        return 0
    size = operator.index(offsets[1]) - operator.index(offsets[0])
    if size < 0:
        raise ValueError(f"{name} ends before it begins")
    return size * 2 // SIZES[dtype] if dtype in SIZES and "scale" not in name else size


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        raise BadModel(f"{path}: this cannot be read as JSON; is the download complete?") from None
    if not isinstance(value, dict):
        raise BadModel(f"{path}: this should be a JSON object and is a {type(value).__name__}; give a model's own file")
    return value
