"""Model families by name, and defaults that their config.json omits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["full", "window", "chunked", "mla", "state", "none"]
MAMBA2 = ("nemotron_h", "mamba2")


@dataclass(frozen=True, slots=True)
class ModelClass:
    """Properties that the model's class implies and config.json does not state."""

    matrices: int = 3  # of a feed-forward block: 3 with a gate, 2 without
    tied: bool = False
    # one layer in so many sees everything, the others a window; 0: the window, if there is one, holds for all
    every: int = 0
    learned: bool = False  # positions are a table of their own, not turned into the queries
    wider: int = 0  # tokens that vLLM's window has beyond the configured one
    defaults: Mapping[str, Any] = field(default_factory=dict)


GATED, GATED_TIED, PLAIN, PLAIN_TIED = (
    ModelClass(),
    ModelClass(tied=True),
    ModelClass(matrices=2),
    ModelClass(matrices=2, tied=True),
)
LEARNED = ModelClass(matrices=2, tied=True, learned=True)
# Defaults here and below: transformers' configuration classes, for fields that published files leave out.
QWEN = ModelClass(defaults={"use_sliding_window": False})
QWEN_GATED = ModelClass(defaults={"use_sliding_window": False, "attn_output_gate": True})
GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
# Falcon's files as they were first published; vLLM reads them with a class of its own (RWConfig)
REFINED_WEB = ("RefinedWeb", "RefinedWebModel")
FAMILIES: dict[str, ModelClass] = {
    **dict.fromkeys(
        ("llama", "ministral3", "mixtral", "granite", "granitemoe", "olmo", "olmo2", "olmoe", "phi3", "phimoe"), GATED
    ),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), QWEN),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), QWEN),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN_GATED),
    **dict.fromkeys(
        (
            "deepseek",
            "deepseek_v2",
            "deepseek_v3",
            "kimi_k2",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "seed_oss",
            "minimax_m2",
        ),
        GATED,
    ),
    **dict.fromkeys(("internlm2", "internlm3", "stablelm", "jamba", "llama4_text"), GATED),
    **dict.fromkeys(("gemma", "cohere"), GATED_TIED),
    "smollm3": ModelClass(tied=True, defaults={"use_sliding_window": False}),
    **dict.fromkeys(("gpt_neox", "gptj", "phi", "nemotron", "nemotron_h"), PLAIN),
    **dict.fromkeys(("bloom", "starcoder2"), PLAIN_TIED),
    **dict.fromkeys(("gpt2", "opt"), LEARNED),
    **dict.fromkeys(("mamba", "mamba2"), GATED_TIED),
    "falcon_mamba": GATED,
    "mistral": ModelClass(defaults={"sliding_window": 4096}),
    "falcon": ModelClass(matrices=2, tied=True, defaults={"multi_query": True}),
    **dict.fromkeys(REFINED_WEB, ModelClass(matrices=2, tied=True, defaults={"multi_query": True, "n_head_kv": 1})),
    "gpt_bigcode": ModelClass(matrices=2, tied=True, learned=True, defaults={"multi_query": True}),
    "gpt_oss": ModelClass(every=2, defaults={"sliding_window": 128}),
    "olmo3": ModelClass(every=4, defaults={"sliding_window": 4096}),
    "gemma2": ModelClass(tied=True, every=2, defaults={"sliding_window": 4096}),
    "gemma3_text": ModelClass(tied=True, every=6, defaults=GEMMA3),
    "gemma4_text": ModelClass(tied=True, defaults={"global_head_dim": 512}),
    "cohere2": ModelClass(tied=True, every=4, wider=1),
}
ENCODERS = {
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "albert",
    "electra",
    "deberta",
    "deberta-v2",
    "mpnet",
    "modernbert",
    "nomic_bert",
}
CROSS = {"t5", "mt5", "bart", "mbart", "whisper", "marian", "pegasus", "m2m_100", "mllama"}
SPARSE = {"deepseek_v32", "deepseek_v4", "deepseek_v41", "glm_moe_dsa"}
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "half": 2, "float": 4}
KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
}
