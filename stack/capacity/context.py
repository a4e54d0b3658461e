"""Longest request of a model, as vLLM 0.32 derives max_model_len.

Source: vllm/config/model.py, _get_and_verify_max_len; transformers_utils/model_arch_config_convertor.py,
derive_max_model_len_and_key; the configuration classes of transformers 5 for what a file leaves out.
`tests/support/engine_capacity.py` runs that code on the same files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stack.capacity.config_json import LARGEST, ConfigFields

ASSUMED = 2048  # vLLM's own guess where no field names a length
_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# max_position_embeddings where the file has none: the default of the model's configuration class.
_BY_CLASS: dict[str, int] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), 1024),
    **dict.fromkeys(
        (
            "deepseek_v2",
            "falcon",
            "gpt_neox",
            "gptj",
            "granite",
            "granitemoe",
            "llama",
            "olmo",
            "olmo2",
            "olmo3",
            "opt",
            "phi",
        ),
        2048,
    ),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2", "nemotron", "nemotron_h", "olmoe", "phi3", "stablelm", "starcoder2"), 4096
    ),
    **dict.fromkeys(("cohere", "cohere2", "gemma", "gemma2"), 8192),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), 32_768),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "smollm3"), 32_768),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), 128_000),
    **dict.fromkeys(
        ("gemma3_text", "gemma4_text", "glm4", "glm4_moe", "gpt_oss", "llama4_text", "mistral", "mixtral", "phimoe"),
        131_072,
    ),
    "minimax_m2": 196_608,
    "glm4_moe_lite": 202_752,
    **dict.fromkeys(("jamba", "ministral3"), 262_144),
    "seed_oss": 524_288,
}
# Their classes name no length, so vLLM assumes one and takes any that --max-model-len names.
_UNBOUNDED = {"bloom", "mamba", "mamba2", "falcon_mamba", "RefinedWeb", "RefinedWebModel"}
# their factor is in the length
_SCALED_ALREADY = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}


class Context(NamedTuple):
    """default: max_model_len without the flag. longest: the most that the flag may name; None where vLLM takes any."""

    default: int
    longest: int | None


def context(fields: ConfigFields, model_type: str) -> Context:
    """Return the lengths that vLLM takes for a configuration. Raises BadModel where a field is no length, or is missing
    and its class not known."""
    named = [fields.whole(key) for key in _KEYS if fields.get(key) is not None]
    alias = "n_positions" if model_type in ("gpt2", "gpt_bigcode", "gptj") else "max_position_embeddings"
    # null is refused by the class
    if model_type in _BY_CLASS and all(fields.get(key, "") == "" for key in ("max_position_embeddings", alias)):
        named.append(_BY_CLASS[model_type])
    if not named and model_type not in _UNBOUNDED:
        fields.whole(_KEYS[0])  # raises
    # Cohere's word stands above the others
    derived = fields.whole("model_max_length", default=min(named, default=ASSUMED))
    ropes = list(_ropes(fields))
    if "gemma3" not in model_type:
        derived = int(derived * _factor(ropes))
    return Context(_without_flag(fields, model_type, derived, ropes), derived if named else None)


def _without_flag(fields: ConfigFields, model_type: str, derived: int, ropes: list[Mapping[str, Any]]) -> int:
    """Return the length before scaling for LongRoPE, whose factors for long requests would harm short ones, else the
    derived one."""
    # Phi-3's class reads its older words as LongRoPE
    also = {"su", "longrope"} | ({"yarn"} if model_type == "phi3" else set())
    if not any(_type(rope) in also for rope in ropes):
        return derived
    return fields.whole("original_max_position_embeddings", default=4096 if model_type == "phi3" else derived)


def _ropes(fields: ConfigFields) -> Iterator[Mapping[str, Any]]:
    """The parameters of rotary positions, one mapping for each type of layer where they differ. The older name goes
    first, as in transformers."""
    found = next(
        (rope for key in ("rope_scaling", "rope_parameters") if isinstance(rope := fields.get(key), Mapping) and rope),
        {},
    )
    nested = [each for each in found.values() if isinstance(each, Mapping)]
    yield from nested or ([found] if found else [])


def _type(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type"))


def _factor(ropes: list[Mapping[str, Any]]) -> float:
    """The factor by which positions are scaled beyond the named length; vLLM takes the last one."""
    factors = [rope["factor"] for rope in ropes if _type(rope) not in _SCALED_ALREADY and "factor" in rope]
    factor = factors[-1] if factors else None
    return (
        factor if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 <= factor <= LARGEST else 1.0
    )
