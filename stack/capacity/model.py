"""Shape of a model from config.json: layers, KV heads, parameters, experts.

Which layers see a window, share a cache or keep a state is decided as vLLM 0.32 and the configuration classes of
transformers that it uses decide it (model_executor/models, transformers_utils/model_arch_config_convertor.py). A family
that is not in FAMILIES is refused: a guess would look like a figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stack.capacity import weights
from stack.capacity.config_json import HIDDEN, BadModel, ConfigFields, shown
from stack.capacity.context import context
from stack.capacity.families import (
    CROSS,
    DTYPES,
    ENCODERS,
    FAMILIES,
    KINDS,
    MAMBA2,
    REFINED_WEB,
    SPARSE,
    Kind,
    ModelClass,
)

__all__ = ["BadModel", "Layer", "ModelShape", "read", "shape"]
READ_THE_LOG = "read the line 'GPU KV cache size' of vLLM's start-up log instead"


@dataclass(frozen=True, slots=True)
class Layer:
    """State that one layer keeps: keys and values for every token, for the last tokens only, or a state for every
    request."""

    kind: Kind
    kv_heads: int = 0
    head_k: int = 0
    head_v: int = 0
    window: int | None = None  # tokens; of a sliding window or of a chunk
    latent: int = 0  # mla: kv_lora_rank + qk_rope_head_dim values per token, whatever the number of heads
    state_bytes: float = 0.0  # state: of the whole model, so divided by the tensor-parallel size
    checkpoints: int = 0  # state: blocks that prefix caching keeps of a request beside the two of every state


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All that memory is computed from; the notes say what was assumed."""

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    hidden: int
    vocabulary: int
    max_positions: int  # the longest max_model_len that vLLM takes; 0 where it takes any
    dtype: str  # in which vLLM computes: float32 is served as bfloat16
    parameters: int | None
    weight_bytes: float | None  # in memory, over all GPUs, without what tensor parallelism copies
    quantization: str | None
    notes: tuple[str, ...] = ()
    weights_from: str = "counted from config.json"
    heads: int = 0  # of the queries; 0 where no layer attends
    tied: bool = False  # input embeddings and output head are one matrix
    moe: bool = False
    multimodal: bool = False
    replicated: int = 0  # parameters that every GPU of a tensor-parallel group holds whole
    default_len: int = 0  # max_model_len without the flag, where that is not max_positions
    folder: str = ""  # with the model's files, as it was given; "" where there was a config.json alone

    @property
    def served_len(self) -> int:
        """max_model_len where nobody sets it."""
        return self.default_len or self.max_positions

    @property
    def attends(self) -> bool:
        """Return whether any layer has keys and values. Of models of states alone vLLM leaves prefix caching off
        (config/model.py, is_prefix_caching_supported), so a request holds one block of a state and not two."""
        return any(layer.kind not in ("state", "none") for layer in self.layers)


ENCODERS |= {"clip", "siglip", "siglip_vision_model", "vit", "wav2vec2", "dinov2"}


def shape(config: Mapping[str, Any], name: str = "", where: str = "") -> ModelShape:
    """The shape that a config.json describes; where: how a mistake names that file. Raises BadModel."""
    where = where or (f"{name}/config.json" if name else "config.json")
    text = _text(config, where)
    model_type = _model_type(config, text, where)
    family = FAMILIES[model_type]
    fields = ConfigFields(where, text, family.defaults)
    layers = _layers(fields, model_type, family)
    lengths = context(fields, model_type)
    count = _count(fields, model_type, family, layers, tied := _tied(config, text, family))
    dtype, notes = _dtype(config, text, where)
    quantization = (
        config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config")
    )
    if quantization and not isinstance(quantization, Mapping):
        raise BadModel(
            f"{where}: quantization_config should be an object and is {shown(quantization)}; take config.json as it was"
            " published"
        )
    how = weights.stored(quantization, len(layers), where) if quantization else None
    unknown = bool(quantization) and how is None
    method = how.method if how else str(quantization.get("quant_method")) if quantization else None
    multimodal = any(isinstance(config.get(part), Mapping) for part in ("vision_config", "audio_config"))
    if multimodal:
        notes += ("the tower for images or sound is not in the counted parameters; a folder with the weights has it",)
    if unknown:
        notes += (f"the storage format of {method!r} is not known; give a folder with the weights",)
    architectures = config.get("architectures")
    return ModelShape(
        name=name or str(config.get("_name_or_path") or model_type),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else model_type,
        layers=layers,
        hidden=fields.whole(*HIDDEN),
        vocabulary=fields.whole("vocab_size"),
        max_positions=lengths.longest or 0,
        default_len=lengths.default,
        dtype=dtype,
        parameters=count.total,
        weight_bytes=None if unknown else weights.counted_bytes(count, DTYPES[dtype], how),
        quantization=method,
        notes=notes + _assumed(layers) + (how.notes if how else ()),
        heads=_heads(fields)[0] if any(layer.kind not in ("state", "none") for layer in layers) else 0,
        tied=tied,
        moe=count.experts > 0,
        multimodal=multimodal,
        replicated=count.replicated,
    )


def _assumed(layers: tuple[Layer, ...]) -> tuple[str, ...]:
    """Return notes on what the kinds of layers leave open."""
    kinds = {layer.kind for layer in layers}
    notes: tuple[str, ...] = ()
    if {"chunked", "full"} <= kinds:
        notes += (
            (
                "vLLM keeps chunked layers whole unless VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1 is set;"
                " computed so here"
            ),
        )
    if "state" in kinds:
        notes += (
            (
                f"layers with a state make vLLM choose its block size from the backend: {READ_THE_LOG} before relying"
                " on the figure"
            ),
        )
    return notes


def read(path: Path) -> ModelShape:
    """The shape of a model's folder, or of a config.json alone; a folder's own files say what the weights take. Raises
    BadModel.

    The name is that of the folder, or of the file where it is called otherwise than config.json."""
    folder, file = (path, path / "config.json") if path.is_dir() else (path.parent, path)
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise BadModel(
                f"{folder}: this is an adapter (adapter_config.json); give the folder of the model that it adapts"
            )
        name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
        raise BadModel(
            f"{file}: there is no such file; give a model's folder or its config.json"
            + (
                f". Of a model on Hugging Face: hf download {name[0]} config.json --local-dir {path.name}"
                if name
                else ""
            )
        )
    found = shape(
        weights.read_json(file), folder.resolve().name if file.name == "config.json" else file.stem, str(file)
    )
    if not path.is_dir():
        return found
    found = replace(found, folder=str(path))
    measured = weights.file_bytes(folder, len(found.layers))
    if measured is None:
        return found
    size, source = measured
    if "headers" not in source and any("float32" in note for note in found.notes):
        size /= 2
    if size < (found.parameters or 0) * weights.FEWEST:
        raise BadModel(
            f"{folder}: its weights are {size:,.0f} bytes ({source}), too few for the {found.parameters:,} parameters"
            " of its config.json; is the download complete?"
        )
    kept = tuple(note for note in found.notes if "a folder with the weights" not in note)
    return replace(found, weight_bytes=size, weights_from=source, notes=kept)


def _text(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The part of the configuration that describes the language model; raises BadModel for what is no language
    model."""
    if not isinstance(config, Mapping):
        raise BadModel(
            f"{where}: this should be a JSON object and is a {type(config).__name__}; give a model's own config.json"
        )
    if not config:
        raise BadModel(f"{where}: this is empty; give the config.json that lies beside the model's weights")
    if "_class_name" in config or "_diffusers_version" in config:
        raise BadModel(f"{where}: this is a diffusion pipeline, which keeps no KV cache; give a language model")
    for nested in ("text_config", "language_config", "llm_config"):
        if isinstance(inner := config.get(nested), Mapping):
            return inner
    return config


def _model_type(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> str:
    """The family that this configuration names; raises BadModel where it is not known here."""
    found = text.get("model_type") or config.get("model_type")
    if not isinstance(found, str):
        raise BadModel(
            f"{where}: model_type is missing, so the architecture is not known; give the model's whole config.json"
        )
    if found in ENCODERS:
        raise BadModel(f"{where}: {found} is an encoder and keeps no KV cache; give a model that generates text")
    if found in CROSS or config.get("is_encoder_decoder") is True:
        raise BadModel(
            f"{where}: {found} has an encoder whose states are cached too, which is not computed here; {READ_THE_LOG}"
        )
    if found in SPARSE or text.get("index_topk") is not None:
        raise BadModel(
            f"{where}: {found} keeps an index beside its KV cache, which is not computed here; {READ_THE_LOG}"
        )
    if found not in FAMILIES:
        raise BadModel(f"{where}: the architecture {found!r} is not known here; {READ_THE_LOG}")
    return found


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """The type that vLLM computes in, and what was assumed."""
    named = next(
        (str(level[key]) for level in (text, config) for key in ("dtype", "torch_dtype") if level.get(key)), None
    )
    if named is None:
        return "bfloat16", ("config.json names no dtype; bfloat16 assumed",)
    named = named.removeprefix("torch.")
    if named in ("float32", "float"):
        return "bfloat16", ("the model is stored as float32; vLLM serves it as bfloat16 unless --dtype says otherwise",)
    if named not in DTYPES:
        raise BadModel(f"{where}: dtype {shown(named)} is not one that vLLM computes in (float16, bfloat16, float32)")
    return ("float16" if named == "half" else named), ()


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], family: ModelClass) -> bool:
    for level in (text, config):
        if isinstance(level.get("tie_word_embeddings"), bool):
            return bool(level["tie_word_embeddings"])
    return family.tied


def _heads(fields: ConfigFields) -> tuple[int, int, int]:
    """Query heads, KV heads and the size of a head."""
    heads = fields.whole("num_attention_heads", "n_head", "n_heads", largest=10_000)
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
    # Falcon-40B, recognised by its width in RWConfig
    grouped = fields.get("model_type") in REFINED_WEB and fields.whole(*HIDDEN) == 8192
    one = fields.switch("multi_query") and not (grouped or fields.switch("new_decoder_architecture"))
    kv_heads = 1 if one else fields.whole(*names, default=heads, largest=10_000)
    if kv_heads > heads:
        raise BadModel(
            f"{fields.where}: {kv_heads} KV heads for {heads} attention heads cannot be; one of the two fields is wrong"
        )
    hidden = fields.whole(*HIDDEN)
    if fields.get("kv_lora_rank") is not None:
        return heads, kv_heads, 0  # a latent has no heads; what it is projected to is read where it is counted
    named = [key for key in ("head_dim", "attention_head_dim", "hidden_size_per_head") if fields.get(key) is not None]
    if not named and hidden % heads:
        raise BadModel(
            f"{fields.where}: {heads} attention heads do not divide hidden_size {hidden}, and head_dim is missing"
        )
    return heads, kv_heads, fields.whole(*named, largest=10_000) if named else hidden // heads


def _layers(fields: ConfigFields, model_type: str, family: ModelClass) -> tuple[Layer, ...]:
    """One Layer per block of the model, in order."""
    number = fields.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers", largest=2000)
    if model_type in ("mamba", "mamba2", "falcon_mamba"):
        return (_state(fields, model_type),) * number
    if fields.get("per_layer_config"):
        raise BadModel(
            f"{fields.where}: its layers differ from one another (per_layer_config), which is not computed here;"
            f" {READ_THE_LOG}"
        )
    _, kv_heads, size = _heads(fields)
    if fields.get("kv_lora_rank") is not None:
        return (Layer("mla", 1, latent=fields.whole("kv_lora_rank") + fields.whole("qk_rope_head_dim")),) * number
    kinds = _kinds(fields, model_type, family, number)
    window = _window(fields, family, kinds)
    chunk = fields.whole("attention_chunk_size", default=8192) if "chunked" in kinds else None
    shared = number - fields.count("num_kv_shared_layers")
    layers = []
    for place, kind in enumerate(kinds):
        if kind == "none" or place >= shared:
            layers.append(Layer("none"))
        elif kind == "state":
            layers.append(_state(fields, model_type))
        elif kind == "full" and model_type == "gemma4_text":
            wide = fields.whole("global_head_dim")
            layers.append(Layer("full", fields.whole("num_global_key_value_heads", default=kv_heads), wide, wide))
        else:
            limit = window if kind == "window" else chunk if kind == "chunked" else None
            layers.append(Layer(kind, kv_heads, size, size, limit))
    return tuple(layers)


def _kinds(fields: ConfigFields, model_type: str, family: ModelClass, number: int) -> tuple[Kind, ...]:
    """Return the kind of each layer: as config.json lists it, else as the family's own rule has it."""
    if model_type == "nemotron_h":
        return _nemotron_kinds(fields, number)
    if model_type == "jamba":
        period, offset = fields.whole("attn_layer_period"), fields.count("attn_layer_offset")
        return tuple("full" if place % period == offset else "state" for place in range(number))
    listed = fields.names("layer_types", number)
    if listed is not None and model_type != "gpt_oss":
        return _listed_kinds(fields, listed)
    if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return _mostly("state", fields.whole("full_attention_interval", default=4), number)
    if model_type == "llama4_text":
        return _mostly("chunked", 4, number)
    return _windowed_kinds(fields, family, number)


def _mostly(kind: Kind, every: int, number: int, first: int = 0) -> tuple[Kind, ...]:
    """Layers of one kind from `first` on, but for each `every`th of all, which attends to everything."""
    return tuple(kind if place >= first and (place + 1) % every else "full" for place in range(number))


def _nemotron_kinds(fields: ConfigFields, number: int) -> tuple[Kind, ...]:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != number or set(pattern) - set("M*E-"):
        raise BadModel(
            f"{fields.where}: hybrid_override_pattern should be {number} letters out of M * E -; take the whole"
            " config.json"
        )
    named: dict[str, Kind] = {"M": "state", "*": "full"}
    return tuple(named.get(letter, "none") for letter in pattern)


def _listed_kinds(fields: ConfigFields, listed: Sequence[str]) -> tuple[Kind, ...]:
    unknown = sorted(set(listed) - set(KINDS))
    if unknown:
        raise BadModel(f"{fields.where}: layer_types names {unknown[0]!r}, which is not known here; {READ_THE_LOG}")
    return tuple(KINDS[word] for word in listed)


def _windowed_kinds(fields: ConfigFields, family: ModelClass, number: int) -> tuple[Kind, ...]:
    """Layers of a model that may have a sliding window; all are full where it is off."""
    used = fields.get("use_sliding_window")
    if not fields.get("sliding_window") or used is False:
        first = number
    elif used is True:
        first = fields.count("max_window_layers")
    else:
        first = 0
    every = fields.whole("sliding_window_pattern", default=family.every) if family.every else number + 1
    return _mostly("window", every, number, first)


def _window(fields: ConfigFields, family: ModelClass, kinds: tuple[Kind, ...]) -> int | None:
    return fields.whole("sliding_window") + family.wider if "window" in kinds else None


def _state(fields: ConfigFields, model_type: str) -> Layer:
    """A layer with a state. Mamba 2 keeps one more block, for the checkpoint within a prefill (vLLM mamba_mixer2.py,
    get_kv_cache_spec)."""
    return Layer("state", state_bytes=_state_bytes(fields, model_type), checkpoints=int(model_type in MAMBA2))


def _state_bytes(fields: ConfigFields, model_type: str) -> float:
    """Bytes of one layer's state for one request: the last inputs of the convolution, and the recurrent state.

    Source: vLLM model_executor/layers/mamba/mamba_utils.py. The convolution keeps the model's type (2 bytes), the state
    the type that the configuration names, else float32 for Nemotron-H and the model's own type for the others."""
    named = (
        fields.get("mamba_ssm_dtype")
        or fields.get("mamba_ssm_cache_dtype")
        or ("float32" if model_type == "nemotron_h" else "bfloat16")
    )
    cell = DTYPES.get(str(named), 2)
    kernel = fields.whole("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", default=4) - 1
    if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        heads, key, value = (
            fields.whole("linear_num_value_heads"),
            fields.whole("linear_key_head_dim"),
            fields.whole("linear_value_head_dim"),
        )
        return (
            2 * fields.whole("linear_num_key_heads") * key + heads * value
        ) * kernel * 2 + heads * key * value * cell
    if model_type in MAMBA2:
        inner, conv, _ = weights.mamba2_sizes(fields)
        return conv * kernel * 2 + inner * fields.whole("ssm_state_size", "state_size") * cell
    inner, state, _ = weights.mamba1_sizes(fields)
    return inner * kernel * 2 + inner * state * cell


def _count(
    fields: ConfigFields, model_type: str, family: ModelClass, layers: tuple[Layer, ...], tied: bool
) -> weights.Count:
    """The model's parameters."""
    hidden, vocabulary = fields.whole(*HIDDEN), fields.whole("vocab_size")
    count = weights.Count(embeddings=vocabulary * hidden * (1 if tied else 2))
    if family.learned:
        count.embeddings += context(fields, model_type).default * hidden
    # Gemma 4: a small table of its own for every layer, and its projections
    if own := fields.count("hidden_size_per_layer_input"):
        count.embeddings += fields.whole("vocab_size_per_layer_input", default=vocabulary) * own * len(layers)
        count.linear += 3 * hidden * own * len(layers)
    stateful = [layer.kind == "state" for layer in layers]
    heads, _, size = _heads(fields) if not all(stateful) else (0, 0, 0)
    for place, layer in enumerate(layers):
        if layer.kind == "state":
            count.attention += _mixer(fields, model_type)
        elif layer.kind == "mla":
            whole, copied = weights.latent_attention(fields, heads)
            count.attention += whole
            count.replicated += copied
        elif model_type != "nemotron_h" or layer.kind == "full":
            # a shared cache leaves queries and output
            k, v = (layer.head_k, layer.head_v) if layer.kind != "none" else (size, size)
            count.attention += weights.attention(fields, heads, layer.kv_heads, k, v)
        _feed_forward(fields, model_type, family, place, layer, count)
    return count


def _mixer(fields: ConfigFields, model_type: str) -> int:
    if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return weights.delta_net(fields)
    return weights.mamba2(fields) if model_type in ("nemotron_h", "mamba2") else weights.mamba1(fields)


def _feed_forward(
    fields: ConfigFields, model_type: str, family: ModelClass, place: int, layer: Layer, count: weights.Count
) -> None:
    """Adds one layer's feed-forward block: a dense one, or a router with its experts."""
    if model_type in ("mamba", "mamba2", "falcon_mamba"):
        return
    hidden = fields.whole(*HIDDEN)
    letter = fields.get("hybrid_override_pattern")[place] if model_type == "nemotron_h" else ""
    if letter in ("M", "*"):
        return
    inner = fields.whole("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", default=4 * hidden)
    experts = fields.count("num_experts", "num_local_experts", "n_routed_experts")
    routed = experts > 0 and _is_routed(fields, model_type, place, letter)
    if not routed or model_type == "gemma4_text":
        dense = fields.whole("intermediate_size_mlp", default=inner) if model_type == "llama4_text" else inner
        twice = fields.switch("use_double_wide_mlp") and layer.kind == "none"
        count.linear += family.matrices * hidden * dense * (2 if twice else 1)
    if not routed:
        return
    each = fields.whole("moe_intermediate_size", default=inner)
    shared = fields.count("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = shared or fields.count("n_shared_experts") * each or (inner if model_type == "llama4_text" else 0)
    count.experts += experts * family.matrices * hidden * each
    count.linear += family.matrices * hidden * shared
    count.kept += hidden * experts
    count.replicated += hidden * experts


def _is_routed(fields: ConfigFields, model_type: str, place: int, letter: str) -> bool:
    """Return whether this layer has experts; the rules are those of the models' own classes."""
    if model_type == "nemotron_h":
        return letter == "E"
    if model_type == "jamba":
        return place % fields.whole("expert_layer_period") == fields.count("expert_layer_offset")
    if model_type == "llama4_text":
        return (place + 1) % fields.whole("interleave_moe_layer_step", default=1) == 0
    if (listed := fields.names("mlp_layer_types", fields.whole("num_hidden_layers"))) is not None:
        return listed[place] == "sparse"
    if fields.get("first_k_dense_replace") is not None:
        return place >= fields.count("first_k_dense_replace") and place % fields.whole("moe_layer_freq", default=1) == 0
    return (
        place not in fields.places("mlp_only_layers")
        and (place + 1) % fields.whole("decoder_sparse_step", default=1) == 0
    )
