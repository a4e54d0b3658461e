"""A model's shape: published models as their config.json describes them, weights from files, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.capacity.families import FAMILIES, REFINED_WEB
from stack.capacity.model import BadModel, ModelShape, read, shape
from tests.support.model_configs import NAMES, REFUSED, config, model

MB = 10**6


def layers(found: ModelShape) -> dict[str, int]:
    """How many layers of each kind."""
    return {
        kind: number
        for kind in ("full", "window", "chunked", "mla", "state", "none")
        if (number := sum(x.kind == kind for x in found.layers))
    }


PUBLISHED = {  # parameters in billions, as the model GPUs, papers or counted checkpoints give them
    "Llama-2-7b": 6.74,
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.1-70B-Instruct": 70.6,
    "Qwen2.5-7B-Instruct": 7.62,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-Next-80B-A3B": 79.7,
    "Mistral-7B-v0.1": 7.24,
    "Mixtral-8x7B-v0.1": 46.7,
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-V3": 671.0,
    "Kimi-K2-Instruct": 1026.0,
    "gemma-2-9b": 9.24,
    "gemma-3-1b-it": 1.0,
    "gemma-3-27b": 27.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "falcon-7b": 6.92,
    "gpt_bigcode-santacoder": 1.12,
    "starcoder2-7b": 7.17,
    "Phi-3-mini-4k-instruct": 3.82,
    "Jamba-v0.1": 51.6,
    "Nemotron-H-56B-Base-8K": 56.3,
    "Nemotron-3-Nano-30B-A3B": 31.6,
    "gpt2": 0.124,
    "Llama-4-Scout-17B-16E-FP8": 107.8,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_within_one_percent(name):
    """Counted parameters are within a hundredth of the published ones."""
    counted = model(name).parameters
    assert counted is not None
    assert PUBLISHED[name] == pytest.approx(counted / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Llama-3.1-8B-Instruct", {"full": 32}),
        ("DeepSeek-V3", {"mla": 61}),
        ("Mistral-7B-v0.1", {"window": 32}),
        ("Phi-3-mini-4k-instruct", {"window": 32}),
        ("gemma-2-9b", {"full": 21, "window": 21}),
        ("gemma-3-27b", {"full": 10, "window": 52}),
        ("gpt-oss-20b", {"full": 12, "window": 12}),
        ("Llama-4-Scout-17B-16E-FP8", {"full": 12, "chunked": 36}),
        ("Jamba-v0.1", {"full": 4, "state": 28}),
        ("Qwen3-Next-80B-A3B", {"full": 12, "state": 36}),
        ("Nemotron-H-56B-Base-8K", {"full": 10, "state": 54, "none": 54}),
        ("gemma-4-26B-A4B", {"full": 5, "window": 25}),
    ],
)
def test_each_layer_keeps_what_its_kind_keeps(name, kinds):
    assert kinds == layers(model(name))


def test_one_head_of_keys_for_all_queries():
    """Multi-query attention is said by a switch, not by a number; without it, old configurations mean one KV head per
    query head."""
    assert {1} == {layer.kv_heads for layer in model("falcon-7b").layers}
    assert {1} == {layer.kv_heads for layer in model("gpt_bigcode-santacoder").layers}
    assert {16} == {layer.kv_heads for layer in shape(config("gpt_bigcode-santacoder") | {"multi_query": False}).layers}
    assert {32} == {layer.kv_heads for layer in model("Llama-2-7b").layers}


def test_a_family_fills_in_what_published_files_leave_out():
    """Gemma 3 publishes neither vocabulary nor context; Mistral's window is 4096 unless the file says null."""
    gemma = model("gemma-3-27b")
    assert (262_208, 131_072) == (gemma.vocabulary, gemma.max_positions)
    without = {key: value for key, value in config("Mistral-7B-v0.1").items() if key != "sliding_window"}
    assert {4096} == {layer.window for layer in shape(without).layers}
    assert {"full": 32} == layers(shape(without | {"sliding_window": None}))
    assert {"full": 32} == layers(shape(without | {"sliding_window": 0}))


def test_a_window_that_is_switched_off_is_none():
    """Qwen2 files name a window that the model does not use."""
    qwen = config("Qwen2.5-7B-Instruct")
    assert {"full": 28} == layers(shape(qwen | {"sliding_window": 4096, "use_sliding_window": False}))
    assert {"full": 28} == layers(
        shape({key: value for key, value in qwen.items() if key != "use_sliding_window"} | {"sliding_window": 4096})
    )
    assert {"full": 14, "window": 14} == layers(
        shape(qwen | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 14, "layer_types": None})
    )


def test_layers_that_share_the_cache_of_others_keep_nothing():
    gemma = config("gemma-4-26B-A4B")
    gemma["text_config"]["num_kv_shared_layers"] = 10
    assert {"full": 3, "window": 17, "none": 10} == layers(shape(gemma))


@pytest.mark.parametrize(
    ("quantization", "gib"),
    [
        (None, 14.96),
        ({"quant_method": "fp8"}, 8.46),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 5.33),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8.61),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 5.61),
        ({"quant_method": "modelopt_fp4"}, 5.61),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 5.61),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, 5.61),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.46),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int", "group_size": None}}},
            },
            8.46,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            5.61,
        ),
    ],
)
def test_weights_follow_the_quantization_and_embeddings_do_not(quantization, gib):
    """Llama-3.1-8B: 6.98 billion parameters in the layers, 1.05 in the embeddings and the output head, which stay at
    two bytes."""
    found = shape(config("Llama-3.1-8B-Instruct") | {"quantization_config": quantization})
    assert found.weight_bytes is not None
    assert gib == pytest.approx(found.weight_bytes / 2**30, abs=0.01)


@pytest.mark.parametrize(
    ("name", "quantization", "published_gb"),
    [
        ("Llama-3.1-8B-Instruct", {"quant_method": "awq", "bits": 4, "group_size": 128}, 5.73),
        ("Llama-3.1-70B-Instruct", {"quant_method": "awq", "bits": 4, "group_size": 128}, 39.77),
        ("Mixtral-8x7B-v0.1", {"quant_method": "awq", "bits": 4, "group_size": 128}, 24.65),
        ("Qwen3-30B-A3B", {"quant_method": "gptq", "bits": 4, "group_size": 128}, 16.9),
        ("Llama-3.1-70B-Instruct", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 42.7),
        ("gpt-oss-120b", None, 65.2),
    ],
)
def test_quantized_checkpoints_have_published_sizes(name, quantization, published_gb):
    """Quantized checkpoints are as large as their published files."""
    found = shape(config(name) | ({"quantization_config": quantization} if quantization else {}))
    assert published_gb == pytest.approx(found.weight_bytes / 1e9, rel=0.01)


EXPERTS_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}


@pytest.mark.parametrize(
    ("left", "spared"),
    [
        (["re:.*self_attn.*", "lm_head"], True),
        (["self_attn"], True),
        ([f"model.layers.{place}.self_attn.o_proj" for place in range(48)], True),
        (["model.layers.0.self_attn.o_proj"], False),
        (["re:vision_model.*self_attn"], False),
        (["lm_head"], False),
        ([5, None], False),
    ],
)
def test_unquantized_attention_counts_whole(left, spared):
    """Qwen3-30B-A3B: 48 layers of 18.9 million parameters in attention, at two bytes instead of 4.5 bits."""
    small, mixed = (
        shape(config("Qwen3-30B-A3B") | {"quantization_config": EXPERTS_ALONE | {"ignore": names}}).weight_bytes
        for names in ([], left)
    )
    attention = 48 * 2048 * (32 * 128 * 2 + 4 * 128 * 2)
    assert (attention * (2 - 0.5625) if spared else 0) == pytest.approx(mixed - small)


def test_only_the_experts_of_gpt_oss_are_small():
    """19.1 billion in experts at 4.25 bits, the rest at 16: 12.8 GiB; the file is 13.8 GB."""
    found = model("gpt-oss-20b")
    assert 13.76e9 == pytest.approx(found.weight_bytes, rel=0.01)
    assert any("pad" in note for note in found.notes)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
        },
    ],
)
def test_a_quantization_of_several_types_gives_no_weight_figure(quantization):
    assert shape(config("Llama-3.1-8B-Instruct") | {"quantization_config": quantization}).weight_bytes is None


def test_an_unknown_quantization_gives_no_weight_figure():
    found = shape(config("Llama-3.1-8B-Instruct") | {"quantization_config": {"quant_method": "novel"}})
    assert found.weight_bytes is None
    assert any("'novel'" in note for note in found.notes)


def test_float32_is_served_in_two_bytes():
    """Float32 is served in two bytes and a missing type is said."""
    llama = config("Llama-3.1-8B-Instruct")
    wide = shape(llama | {"torch_dtype": "float32"})
    assert "bfloat16" == wide.dtype
    assert wide.weight_bytes == model("Llama-3.1-8B-Instruct").weight_bytes
    del llama["torch_dtype"]
    assert any("no dtype" in note for note in shape(llama).notes)


def test_what_was_assumed_is_noted():
    assert any("tower" in note for note in model("gemma-3-27b").notes)
    assert any("chunked" in note for note in model("Llama-4-Scout-17B-16E-FP8").notes)
    assert any("KV cache size" in note for note in model("Jamba-v0.1").notes)
    assert () == model("Llama-3.1-8B-Instruct").notes


def safetensors(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """A file with a true header and no tensors behind it: reading the header alone must do."""
    header, place = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [place, place + size]}
        place += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config("gpt2") | changes))
    return tmp_path


def test_weights_are_read_from_the_headers(tmp_path):
    """Float32 is cast to two bytes; a thirteenth layer of a model of twelve is only for speculative decoding."""
    tensors = {
        "h.0": ("BF16", 100 * MB),
        "head": ("F32", 40 * MB),
        "layers.12.x": ("BF16", 500 * MB),
        "vision_tower.layers.30.x": ("BF16", 3 * MB),
    }
    safetensors(folder(tmp_path) / "model.safetensors", tensors)
    found = read(tmp_path)
    assert 123 * MB == found.weight_bytes
    assert "headers of 1 safetensors file" == found.weights_from
    assert tmp_path.name == found.name


def test_shards_are_added_up_and_copies_beside_them_are_not(tmp_path):
    folder(tmp_path)
    for shard in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        safetensors(tmp_path / shard, {shard: ("F8_E4M3", 70 * MB), f"{shard}.weight_scale_inv": ("F32", 4 * MB)})
    index = {
        "metadata": {"total_size": 99 * MB},
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert 148 * MB == read(tmp_path).weight_bytes


def test_an_index_alone_is_enough(tmp_path):
    index = {"metadata": {"total_size": 99 * MB}, "weight_map": {"a": "model-1.safetensors"}}
    (folder(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (99.0 * MB, "total_size in model.safetensors.index.json") == (
        (found := read(tmp_path)).weight_bytes,
        found.weights_from,
    )


@pytest.mark.parametrize("total", ["Infinity", "NaN", "[1]", '"9"'])
def test_an_index_that_tells_no_size_leaves_the_count(tmp_path, total):
    (folder(tmp_path) / "model.safetensors.index.json").write_text(
        f'{{"metadata": {{"total_size": {total}}}, "weight_map": {{"a": "x"}}}}'
    )
    assert "counted from config.json" == read(tmp_path).weights_from


@pytest.mark.parametrize("name", ["model-00001-of-00004.safetensors", "pytorch_model-00001-of-00004.bin"])
def test_a_download_that_is_not_complete_is_no_smaller_model(tmp_path, name):
    safetensors(folder(tmp_path) / name, {"h.0": ("BF16", 100 * MB)})
    with pytest.raises(BadModel, match=rf"{name}: .*\b4 .*\b1 "):
        read(tmp_path)


def test_weights_that_are_too_few_for_the_model_are_not_taken(tmp_path):
    """Such as an adapter that lies in the folder alone: 124 million parameters take 31 MB at two bits each."""
    safetensors(folder(tmp_path) / "adapter_model.safetensors", {"a": ("BF16", 30 * MB)})
    with pytest.raises(BadModel, match=r"30,000,000 bytes .*124,318,464 parameters"):
        read(tmp_path)


def test_a_model_is_named_by_its_folder_or_by_its_own_file(tmp_path):
    named = folder(tmp_path) / "chat-7b.json"
    named.write_text(json.dumps(config("gpt2")))
    assert ["chat-7b", tmp_path.name, tmp_path.name] == [
        read(path).name for path in (named, tmp_path / "config.json", tmp_path)
    ]
    named.write_text(json.dumps(config("gpt2") | {"n_layer": "x"}))
    with pytest.raises(BadModel, match=r"chat-7b\.json: n_layer .*'x'"):
        read(named)
    named.write_text("[" * 100_000)
    with pytest.raises(BadModel, match=r"chat-7b\.json: .*JSON;"):
        read(named)


@pytest.mark.parametrize(
    ("name", "changes", "longest"),
    [
        ("Llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        ("Llama-2-7b", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ("Llama-2-7b", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ("Llama-2-7b", {"rope_scaling": {"type": "linear", "factor": None}}, 4096),
        ("Llama-2-7b", {"rope_scaling": "linear"}, 4096),
        ("Llama-2-7b", {"model_max_length": 131_072}, 131_072),
        ("Llama-2-7b", {"seq_length": 2048}, 2048),
        ("gemma-3-27b", {}, 131_072),
        ("DeepSeek-V3", {}, 163_840),
    ],
)
def test_the_longest_context_is_what_vllm_takes(name, changes, longest):
    assert longest == shape(config(name) | changes).max_positions


@pytest.mark.parametrize(
    ("name", "changes", "served", "longest"),
    [("falcon-40b", {}, 2048, 0), ("falcon-mamba-7b", {}, 2048, 0), ("Phi-3-mini-128k-instruct", {}, 4096, 131_072)],
)
def test_default_length_follows_vllm(name, changes, served, longest):
    """2,048 where no field names a length, and any other with the flag; LongRoPE at its length before scaling."""
    found = shape(config(name) | changes)
    assert (served, longest) == (found.served_len, found.max_positions)


def test_falcon_40b_has_eight_kv_heads():
    """Its file says so by n_head_kv; that it is no multi-query model, vLLM tells by its width."""
    found = model("falcon-40b")
    assert {8} == {layer.kv_heads for layer in found.layers}
    assert (60, 128, 64) == (len(found.layers), found.heads, found.layers[0].head_k)
    assert found.parameters == pytest.approx(41.3e9, rel=0.01)


def test_a_file_alone_is_counted(tmp_path):
    found = read(folder(tmp_path) / "config.json")
    assert "counted from config.json" == found.weights_from
    assert 0.124e9 * 2 == pytest.approx(found.weight_bytes, rel=0.01)


def test_a_folder_that_is_no_model_says_so(tmp_path):
    with pytest.raises(BadModel, match="no such file"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadModel, match=r"adapter_config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{ no")
    with pytest.raises(BadModel, match=r"config\.json: .*JSON;"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadModel, match="is a list"):
        read(tmp_path)
    (folder(tmp_path) / "model.safetensors").write_bytes(b"<html>")
    with pytest.raises(BadModel, match="not a safetensors"):
        read(tmp_path)
    safetensors(tmp_path / "model.safetensors", {"a": ("BF16", -100 * MB)})
    with pytest.raises(BadModel, match=r"model\.safetensors: .*header"):
        read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 9) + b'{"a": {}}')
    with pytest.raises(BadModel, match=r"model\.safetensors: .*header"):
        read(tmp_path)


LLAMA = config("Llama-3.1-8B-Instruct")


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"model_type": "flux"}, "architecture 'flux'"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "bert"}, "bert .*no KV cache"),
        ({"model_type": "t5"}, "t5 .*encoder .*states"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32 .*index"),
        ({"_class_name": "FluxPipeline"}, "diffusion pipeline"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .*1 and 2,000 .* 0;"),
        ({"num_hidden_layers": 1e9}, r"num_hidden_layers .*1 and 2,000 .* 1000000000\.0;"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers .*whole number .*'32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers .*whole number .*True"),
        ({"num_hidden_layers": 31.5}, r"num_hidden_layers .*1 and 2,000 .* 31\.5;"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers .*whole number .*nan"),
        ({"hidden_size": -4096}, "hidden_size .*1 and 100,000,000 .* -4096;"),
        ({"hidden_size": [4096]}, r"hidden_size .*whole number .*\[4096\]"),
        ({"hidden_size": 4097, "head_dim": None}, "32 attention heads .*hidden_size 4097, .*head_dim"),
        ({"num_key_value_heads": 64}, "64 KV heads .*32 attention heads"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types .*31 entries .*32 layers"),
        ({"layer_types": ["ring_attention"] * 32}, "layer_types .*'ring_attention'"),
        ({"layer_types": "full"}, "layer_types .*list of words"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"quantization_config": {"quant_method": "awq", "bits": "four"}}, "bits .*2 and 8 .*'four'"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"a": {"weights": {"num_bits": -4}}},
                }
            },
            "bits .*2 and 8 .* -4",
        ),
        ({"quantization_config": "fp8"}, "quantization_config .*object .*'fp8'"),
        ({"num_experts": 8, "mlp_only_layers": 5}, "mlp_only_layers .*numbers .* 5"),
        ({"hidden_size": 10**400}, r"hidden_size .*1 and 100,000,000 .* 10{39}\.\.\.;"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_sentence(changes, facts):
    with pytest.raises(BadModel, match=facts) as refused:
        shape(LLAMA | changes, "m")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "told"), [({}, "this is empty"), ([1, 2], "is a list"), ("x", "is a str"), (None, "is a NoneType")]
)
def test_what_is_no_configuration_is_refused(value, told):
    with pytest.raises(BadModel, match=told):
        shape(value)


def test_a_sparse_index_is_refused_by_name():
    with pytest.raises(BadModel, match=r"DeepSeek-V3\.2/config\.json: deepseek_v32 .*index"):
        model("DeepSeek-V3.2")


@given(
    st.dictionaries(
        st.sampled_from(sorted(LLAMA)),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text())),
    )
)
def test_nonsense_gives_a_shape_or_one_sentence(changes):
    """Nonsense in any field gives a shape that could be or one sentence."""
    found = attempt(LLAMA | changes)
    if isinstance(found, str):
        assert "\n" not in found
    else:
        assert found.layers
        assert found.hidden > 0
        assert all(layer.kv_heads > 0 for layer in found.layers if layer.kind == "full")


def attempt(configuration: dict[str, Any]) -> ModelShape | str:
    """The shape, or the sentence that refuses it."""
    try:
        return shape(configuration)
    except BadModel as refused:
        return str(refused)


def test_every_published_model_is_read_or_refused():
    assert len(NAMES) - len(REFUSED) >= 12
    assert all(config(name)["_source"].startswith("https://") for name in NAMES)
    assert {name for name in NAMES if name not in REFUSED} == {
        model(name).name for name in NAMES if name not in REFUSED
    }


def test_families_are_named_as_transformers_names_them():
    assert all(name == name.lower() for name in FAMILIES if name not in REFINED_WEB)
