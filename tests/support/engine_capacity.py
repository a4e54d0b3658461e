"""Run by the engine's own Python: what vLLM itself computes for a list of cases on standard input; one JSON list comes
back.

A case says what each layer keeps; pages, groups, blocks and concurrency are vLLM's. Beside it, what vLLM reads from a
config.json."""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


def layer_spec(layer, case, block):
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        get_kv_quant_mode,
    )

    dtype = {"fp8": torch.uint8, "auto": torch.bfloat16}[case["cache_dtype"]]
    heads = max(1, layer["kv_heads"] // case["tensor_parallel"])
    common = {"block_size": block, "dtype": dtype, "kv_quant_mode": get_kv_quant_mode(case["cache_dtype"])}
    if layer["kind"] == "mla":
        return MLAAttentionSpec(num_kv_heads=1, max_tp_shards=1, head_size=layer["latent"], **common)
    if layer["kind"] == "window":
        sizes = {"num_kv_heads": heads, "head_size": layer["head_k"], "head_size_v": layer["head_v"]}
        return SlidingWindowSpec(sliding_window=layer["window"], **sizes, **common)
    if layer["kind"] == "state":
        mode = "align" if case["prefix_caching"] else "none"
        state = int(layer["state_bytes"] // case["tensor_parallel"])
        padded = case.get("state_page")
        return MambaSpec(
            block_size=block,
            shapes=((state,),),
            dtypes=(torch.uint8,),
            mamba_cache_mode=mode,
            page_size_padded=padded,
            num_prefill_checkpoint_blocks=layer["checkpoints"],
        )
    return FullAttentionSpec(num_kv_heads=heads, head_size=layer["head_k"], head_size_v=layer["head_v"], **common)


def settings(case):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=0,
        mamba_cache_mode="align" if case["prefix_caching"] else "none",
        block_size=case["block_size"],
        cache_dtype=case["cache_dtype"],
        mamba_page_size_padded=None,
    )
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(max_model_len=case["max_model_len"], original_max_model_len=case["max_model_len"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=case["tensor_parallel"]),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not case["hybrid_manager"]),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=case["in_flight"],
    )


def aligned(case):
    """The block and the padded state page that vLLM chooses for a model of attention and states."""
    import torch
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    first = next(layer for layer in case["layers"] if layer["kind"] == "full")
    state = int(max(layer["state_bytes"] for layer in case["layers"]) // case["tensor_parallel"])
    config = settings(case)
    heads = max(1, first["kv_heads"] // case["tensor_parallel"])
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        use_mla=False,
        architecture="x",
        get_num_kv_heads=lambda _: heads,
        get_head_size=lambda: first["head_k"],
    )
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: ((state,),),
        get_mamba_state_dtype_from_config=lambda _: (torch.uint8,),
    )
    backend = SimpleNamespace(
        customize_spec=lambda spec: spec, get_supported_kernel_block_sizes=lambda: [MultipleOf(16)]
    )
    ModelRegistry.resolve_model_cls = lambda *_, **__: (model, "x")

    class Bare(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, _):
            return [backend]

    import vllm.config.vllm

    vllm.config.vllm.set_current_vllm_config = lambda *_, **__: contextlib.nullcontext()
    Bare._align_hybrid_block_size(config, backend)
    return config.cache_config.block_size, config.cache_config.mamba_page_size_padded


def computed(case):
    from vllm.distributed.utils import get_pp_indices
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_capacity,
        get_kv_cache_configs,
    )

    block = case["block_size"]
    kinds = {layer["kind"] for layer in case["layers"]}
    if "state" in kinds and kinds - {"state", "none"}:
        block, case["state_page"] = aligned(case)
    stages = []
    for stage in range(case["pipeline_parallel"]):
        first, last = get_pp_indices(len(case["layers"]), stage, case["pipeline_parallel"])
        places = [place for place in range(first, last) if case["layers"][place]["kind"] != "none"]
        stages.append({f"layers.{place}": layer_spec(case["layers"][place], case, block) for place in places})
    config = settings(case)
    try:
        found = get_kv_cache_configs(config, stages, [int(case["kv_bytes"])] * len(stages))
    except ValueError as refused:
        return {"refused": str(refused)[:80]}
    tokens, concurrency = get_kv_cache_capacity(config, generate_scheduler_kv_cache_config(found))
    return {"blocks": found[0].num_blocks, "tokens": tokens, "concurrency": concurrency}


def opened(config):
    """A config.json as vLLM opens it, its part for text, and what vLLM's converter makes of both."""
    import vllm.config  # noqa: F401  first, because the next import alone runs in a circle
    from vllm.transformers_utils.config import get_config, get_hf_text_config
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    with tempfile.TemporaryDirectory() as folder:
        left_out = ("_source", "quantization_config", "auto_map")
        (Path(folder) / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if key not in left_out})
        )
        whole = get_config(folder, trust_remote_code=False, config_format="hf")
    text = get_hf_text_config(whole)
    return (
        whole,
        text,
        MODEL_ARCH_CONFIG_CONVERTORS.get(whole.model_type, ModelArchConfigConvertorBase)(whole, text).convert(),
    )


def longest(config, asked):
    """max_model_len as vLLM derives it for each --max-model-len that is asked for (None: no flag); None where vLLM
    refuses it."""
    from vllm.config.model import ModelConfig

    whole, text, arch = opened(config)
    its = SimpleNamespace(
        runner_type="generate",
        hf_config=whole,
        hf_text_config=text,
        model_arch_config=arch,
        disable_sliding_window=False,
        get_sliding_window=lambda: None,
        spec_target_max_model_len=None,
        encoder_config=None,
    )
    found = []
    for length in asked:
        try:
            found.append(ModelConfig.get_and_verify_max_len(its, length))
        except ValueError:
            found.append(None)
    return found


def caches_prefixes(architecture):
    """Whether vLLM switches prefix caching on by itself for a class of models."""
    from vllm import ModelRegistry
    from vllm.config.model import ModelConfig
    from vllm.model_executor.models.interfaces import has_inner_state, is_attention_free, is_hybrid

    model = ModelRegistry.models[architecture].load_model_cls()
    assert has_inner_state(model)
    kind = SimpleNamespace(
        pooler_config=None,
        is_hybrid=is_hybrid(model),
        is_attention_free=is_attention_free(model),
        is_encoder_decoder=False,
    )
    attention = ModelConfig.attn_type.fget(kind)
    return ModelConfig.is_prefix_caching_supported.fget(SimpleNamespace(pooler_config=None, attn_type=attention))


def understood(config):
    """What vLLM makes of a config.json: heads, head size, layers, window, and which layers have it."""
    _, text, arch = opened(config)
    return {
        "kv_heads": arch.total_num_kv_heads,
        "head_size": arch.head_size,
        "layers": arch.total_num_hidden_layers,
        "vocabulary": arch.vocab_size,
        "hidden": arch.hidden_size,
        "served_len": longest(config, [None])[0],
        "mla": arch.is_deepseek_mla,
        "window": getattr(text, "sliding_window", None),
        "layer_types": getattr(text, "layer_types", None),
        "parameters": parameters(text),
    }


def parameters(text):
    """How many the class of transformers has, built without memory; None where it has no class for text alone."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return sum(each.numel() for each in AutoModelForCausalLM.from_config(text).parameters())
    except Exception:
        return None


def family(model_type):
    """A family's configuration at its defaults, and what vLLM reads from it; None where transformers does not have
    it."""
    from transformers import AutoConfig

    try:
        config = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
        return {"config": config, "read": understood(config)}
    except Exception:
        return None


STATEFUL = {"jamba": ("jamba", "JambaForCausalLM"), "nemotron_h": ("nemotron_h", "NemotronHForCausalLM")}
STATEFUL |= {"qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"), "qwen3_5": ("qwen3_next", "Qwen3NextForCausalLM")}
STATEFUL["falcon_mamba"] = ("mamba", "MambaForCausalLM")


def state_bytes(config, tensor_parallel):
    """What vLLM's own model class says one layer's state takes on one GPU."""
    import importlib

    import torch
    from transformers import AutoConfig
    from vllm.v1.kv_cache_interface import MambaSpec

    module, name = STATEFUL[config["model_type"]]
    model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    whole = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "_source"})
    text = whole.get_text_config()
    told = getattr(text, "mamba_ssm_dtype", None) or getattr(text, "mamba_ssm_cache_dtype", None)
    told = told or ("float32" if config["model_type"] == "nemotron_h" else "auto")
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel),
        model_config=SimpleNamespace(hf_config=whole, hf_text_config=text, dtype=torch.bfloat16),
        cache_config=SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype=told, use_replayssm=False),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    shapes = model.get_mamba_state_shape_from_config(vllm_config)
    dtypes = model.get_mamba_state_dtype_from_config(vllm_config)
    return MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes).page_size_bytes


def main():
    asked, out = json.load(sys.stdin), sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        answer = {"cases": [computed(case) for case in asked["cases"]], "configs": {}}
        for name, config in asked["configs"].items():
            try:
                answer["configs"][name] = understood(config)
            except Exception as wrong:
                answer["configs"][name] = {"error": f"{type(wrong).__name__}: {wrong}"[:200]}
        answer["lengths"] = [longest(each["config"], each["asked"]) for each in asked["lengths"]]
        answer["caches_prefixes"] = {name: caches_prefixes(name) for name in asked["architectures"]}
        answer["families"] = {name: family(name) for name in asked["families"]}
        answer["states"] = {
            name: [state_bytes(config, split) for split in (1, 2)]
            for name, config in asked["configs"].items()
            if config["model_type"] in STATEFUL
        }
    json.dump(answer, out)


main()
