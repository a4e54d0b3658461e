"""The KV cache: bytes, blocks, tokens and concurrency as vLLM 0.32 has them; compared with vLLM's own code where the
engine is installed."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stack.capacity import kv
from stack.capacity.families import FAMILIES
from stack.capacity.kv import (
    BadServing,
    LayerBlock,
    Serving,
    cache,
    longest_context,
    request_bytes,
    starts,
    token_bytes,
    token_costs,
)
from stack.capacity.model import BadModel, Layer, ModelShape, shape
from tests.support.engines import run_by_engine
from tests.support.model_configs import NAMES, REFUSED, config, model

GIB = 2**30
MODELS = [name for name in NAMES if name not in REFUSED]


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("Llama-3.1-8B-Instruct", 131_072),
        ("Qwen2.5-7B-Instruct", 57_344),
        ("Llama-3.1-70B-Instruct", 327_680),
        ("Llama-2-7b", 524_288),
        ("DeepSeek-V3", 70_272),
        ("Qwen3-30B-A3B", 98_304),
        ("falcon-7b", 8_192),
    ],
)
def test_bytes_of_one_token_are_the_published_ones(name, each):
    assert each == token_bytes(model(name), Serving(4096))
    assert each / 2 == token_bytes(model(name), Serving(4096, cache_dtype="fp8"))


def test_a_latent_saves_what_heads_would_cost():
    """DeepSeek-V3 with 128 heads of keys (128 + 64) and values (128) instead of one latent: 4.77 MiB a token, 57 times
    as much."""
    found = model("DeepSeek-V3")
    heads = replace(found, layers=(Layer("full", 128, 192, 128),) * 61)
    assert 61 * 128 * (192 + 128) * 2 == token_bytes(heads, Serving(4096))
    assert 3_997_696 == 61 * 128 * (128 + 128) * 2, "the figure often printed counts 128 values for a key"


def test_a_long_sequence_takes_four_gibibytes():
    """32 layers, 32 KV heads of 128, fp16, 8192 tokens."""
    assert 4 * GIB == request_bytes(model("Llama-2-7b"), Serving(8192), 8192)


def test_more_gpus_than_kv_heads_save_nothing():
    """Llama-3.1-70B has 8: 40,960 bytes a token on each of 8 GPUs, and on each of 16."""
    found = model("Llama-3.1-70B-Instruct")
    assert [40_960, 40_960] == [token_bytes(found, Serving(4096, tensor_parallel=size)) for size in (8, 16)]


def test_a_latent_is_whole_on_every_gpu():
    found = model("DeepSeek-V3")
    assert {70_272} == {token_bytes(found, Serving(4096, tensor_parallel=size)) for size in (1, 2, 8)}


def test_the_sample_of_another_planner_comes_out_the_same():
    """kvplan's: 4.91 GiB at 131,072 bytes a token hold 40,208 tokens, 0.31 requests of the full context."""
    found = cache(model("Llama-3.1-8B-Instruct"), Serving(131_072), 4.91 * GIB)
    assert (40_208, 2513) == (found.tokens, found.blocks)
    assert 0.31 == pytest.approx(found.concurrency, abs=0.005)
    assert found.sure


def test_a_window_holds_the_tokens_in_flight_too():
    """Window 1024 at 8,192 tokens a batch: 577 blocks with one batch in flight; with asynchronous scheduling two are,
    so 1,089."""
    layers = (Layer("full", 1, 64, 64), Layer("window", 1, 64, 64, window=1024))
    found = ModelShape("m", "m", layers, 64, 100, 131_072, "bfloat16", 1, 1.0, None, heads=1)
    page = 16 * 128 * 2
    sync = Serving(131_072, async_scheduling=False)
    assert (8192 + 577) * page == request_bytes(found, sync, 131_072)
    assert (8192 + 1089) * page == request_bytes(found, replace(sync, async_scheduling=True), 131_072)
    assert 2 * 8192 * page == request_bytes(found, replace(sync, hybrid_manager=False), 131_072)


def test_a_window_grows_until_it_is_full():
    found = model("Mistral-7B-v0.1")
    assert 131_072 == token_bytes(found, Serving(4096))
    assert 0 == token_bytes(found, Serving(32_768))


def test_partly_filled_window_costs_as_full():
    """Gemma 2: 21 of 42 layers see 4,096 tokens; with 2 x 2,048 in flight such a layer holds 8,191, so at 8,000 every
    layer still grows."""
    found, each = model("gemma-2-9b"), 8 * 512 * 2
    serving = Serving(8192, max_num_batched_tokens=2048)
    assert 42 * each == token_bytes(found, serving, 8000) == token_bytes(found, replace(serving, max_model_len=8000))
    assert 21 * each == token_bytes(found, serving)
    assert [(8191, 42 * each), (8192, 21 * each)] == token_costs(found, serving)
    assert [(8000, 42 * each)] == token_costs(found, replace(serving, max_model_len=8000))


@given(st.sampled_from(MODELS), st.integers(64, 100_000), st.sampled_from([512, 2048]))
def test_costs_of_all_tokens_add_up_to_what_a_request_holds(name, length, batched):
    """Up to the whole blocks, of which each group rounds up one, and a window one more."""
    serving = Serving(length, max_num_batched_tokens=batched)
    costs = token_costs(SHAPES[name], serving)
    starts_at = [0, *(end for end, _ in costs)]
    whole = sum((end - start) * each for start, (end, each) in zip(starts_at, costs, strict=False))
    held, first = request_bytes(SHAPES[name], serving, length), request_bytes(SHAPES[name], serving, 1)
    assert held - 2 * first <= whole <= held


def test_a_state_costs_a_request_and_not_a_token():
    """Jamba: four layers attend. The state's block holds 160 tokens of attention, and the figure is not sure."""
    found = model("Jamba-v0.1")
    assert 4 * 8 * 256 * 2 == token_bytes(found, Serving(4096))
    assert not cache(found, Serving(4096), 10 * GIB).sure
    once, twice = (request_bytes(found, Serving(4096, prefix_caching=kept), 1) for kept in (False, True))
    assert once < twice


def test_a_model_of_states_alone_costs_the_same_at_any_length():
    mamba = {
        "model_type": "mamba",
        "hidden_size": 2560,
        "intermediate_size": 5120,
        "num_hidden_layers": 64,
        "state_size": 16,
    }
    found = shape(mamba | {"conv_kernel": 4, "time_step_rank": 160, "vocab_size": 50_280})
    serving = Serving(100_000)
    assert request_bytes(found, serving, 1) == request_bytes(found, serving, 100_000)
    assert 0 == token_bytes(found, serving)
    assert not cache(found, serving, GIB).sure


def test_the_largest_stage_decides():
    """80 layers on 3 stages: 26, 27 and 27 would be one way; vLLM keeps the last one small: 27, 27, 26."""
    found = model("Llama-3.1-70B-Instruct")
    assert 27 * 8 * 256 * 2 == token_bytes(found, Serving(4096, pipeline_parallel=3))
    assert 20 * 8 * 256 * 2 == token_bytes(found, Serving(4096, pipeline_parallel=4))


def test_the_longest_context_is_where_vllm_would_start():
    """One block is kept back, and one request must fit into the rest."""
    found, serving = model("Llama-3.1-8B-Instruct"), Serving(131_072)
    longest = longest_context(found, serving, 2 * GIB)
    assert (16_384 - 16) == longest
    assert starts(found, replace(serving, max_model_len=longest), 2 * GIB)
    assert not starts(found, replace(serving, max_model_len=longest + 1), 2 * GIB)
    assert 0 == longest_context(found, serving, 0.0)
    assert 131_072 == longest_context(found, serving, 100 * GIB)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"max_model_len": 0}, "max_model_len .*1 to 1,000,000,000 .* 0$"),
        ({"block_size": 24}, "block_size .*multiple of 16.* 24$"),
        ({"max_num_batched_tokens": 10**12}, "max_num_batched_tokens .*1 to 1,000,000,000 .* 1000000000000$"),
        ({"gpu_memory_utilization": 92}, "gpu_memory_utilization .*at most 1 .* 92$"),
        ({"cache_dtype": "fp3"}, "cache type 'fp3' .*auto, float16"),
        ({"tensor_parallel": 2.0}, r"tensor_parallel .* 2\.0$"),
    ],
)
def test_flags_that_cannot_be_are_refused(changes, facts):
    with pytest.raises(BadServing, match=facts):
        Serving(**({"max_model_len": 4096} | changes))


def test_what_does_not_divide_is_refused_as_vllm_refuses_it():
    with pytest.raises(BadServing, match=r"tensor_parallel 3 .*32 attention heads"):
        token_bytes(model("Llama-3.1-8B-Instruct"), Serving(4096, tensor_parallel=3))
    with pytest.raises(BadServing, match=r"tensor_parallel 5 .*128 attention heads .*DeepSeek-V3"):
        token_bytes(model("DeepSeek-V3"), Serving(4096, tensor_parallel=5))
    with pytest.raises(BadServing, match=r"tensor_parallel 12 .*8 KV heads"):
        token_bytes(replace(model("Llama-3.1-8B-Instruct"), heads=36), Serving(4096, tensor_parallel=12))
    with pytest.raises(BadServing, match=r"pipeline_parallel .*40 .*32 layers"):
        cache(model("Llama-3.1-8B-Instruct"), Serving(4096, pipeline_parallel=40), GIB)
    with pytest.raises(BadServing, match=r"fp8_ds_mla .*latent attention"):
        token_bytes(model("Llama-3.1-8B-Instruct"), Serving(4096, cache_dtype="fp8_ds_mla"))


def test_a_model_served_wide_keeps_wide_keys():
    """--dtype float32 doubles the cache; no cache type does."""
    assert 262_144 == token_bytes(replace(model("Llama-3.1-8B-Instruct"), dtype="float32"), Serving(4096))
    with pytest.raises(BadServing, match="float32"):
        Serving(4096, cache_dtype="float32")


def test_scales_are_counted_where_a_head_has_its_own():
    """Eight heads, four bytes for the keys and four for the values of each."""
    assert 32 * 8 * (256 + 8) == token_bytes(
        model("Llama-3.1-8B-Instruct"), Serving(4096, cache_dtype="fp8_per_token_head")
    )
    assert 32 * 8 * (128 + 8) == token_bytes(
        model("Llama-3.1-8B-Instruct"), Serving(4096, cache_dtype="int4_per_token_head")
    )
    assert 61 * (576 + 8) == token_bytes(model("DeepSeek-V3"), Serving(4096, cache_dtype="fp8_per_token_head"))
    assert 61 * 656 == token_bytes(model("DeepSeek-V3"), Serving(4096, cache_dtype="fp8_ds_mla"))


servings = st.builds(
    Serving,
    max_model_len=st.integers(1, 200_000),
    cache_dtype=st.sampled_from(["auto", "fp8"]),
    block_size=st.sampled_from([16, 32, 64]),
    pipeline_parallel=st.integers(1, 4),
    max_num_batched_tokens=st.sampled_from([512, 2048, 8192]),
    async_scheduling=st.booleans(),
    prefix_caching=st.booleans(),
)
SHAPES = {name: model(name) for name in MODELS}


@given(st.sampled_from(MODELS), servings, st.integers(1, 200_000), st.integers(0, 5000))
def test_more_tokens_never_take_less(name, serving, tokens, more):
    assert request_bytes(SHAPES[name], serving, tokens) <= request_bytes(SHAPES[name], serving, tokens + more)


@given(st.sampled_from(MODELS), servings, st.sampled_from([1, 2, 4, 8]), st.integers(1, 50_000))
def test_more_gpus_never_take_more_of_each(name, serving, split, tokens):
    found = SHAPES[name]
    assume(found.heads % (2 * split) == 0)
    one, two = replace(serving, tensor_parallel=split), replace(serving, tensor_parallel=2 * split)
    assert token_bytes(found, two) <= token_bytes(found, one)
    if all(layer.kind != "state" for layer in found.layers):  # a state's block may hold fewer tokens, and more blocks
        assert request_bytes(found, two, tokens) <= request_bytes(found, one, tokens)


@given(st.sampled_from(MODELS), servings, st.floats(0, 200 * GIB))
def test_concurrency_counts_full_length_requests(name, serving, kv_bytes):
    """Blocks fit and a request of full length is what concurrency counts."""
    found = cache(SHAPES[name], serving, kv_bytes)
    whole = request_bytes(SHAPES[name], serving, serving.max_model_len)
    assert found.concurrency * whole <= kv_bytes * (1 + 1e-9)
    assert found.tokens == int(found.concurrency * serving.max_model_len)
    assert cache(SHAPES[name], serving, kv_bytes + GIB).blocks >= found.blocks
    if starts(SHAPES[name], serving, kv_bytes):
        assert found.concurrency >= 1


def cases() -> list[tuple[ModelShape, Serving, int]]:
    """Every model as it would be served, then split three ways at fp8, then with the switches turned, then with too
    little memory."""
    found = []
    for name in MODELS:
        made, context = SHAPES[name], SHAPES[name].max_positions or 131_072
        split = 2 if made.heads % 2 == 0 else 1
        short = Serving(
            min(context, 4096),
            tensor_parallel=split,
            pipeline_parallel=3,
            cache_dtype="fp8",
            max_num_batched_tokens=2048,
        )
        states = any(layer.kind == "state" for layer in made.layers)
        turned = Serving(min(context, 50_000), prefix_caching=False, hybrid_manager=states, async_scheduling=False)
        found += [(made, Serving(min(context, 32_768)), 30 * GIB), (made, short, 11 * GIB), (made, turned, 70 * GIB)]
        found.append((made, Serving(min(context, 131_072), block_size=64), GIB // 2))
    return found


STATES_ALONE, HYBRID = (
    ("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"),
    ("JambaForCausalLM", "NemotronHForCausalLM"),
)
ROPE = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "long_factor": [1.0] * 64, "short_factor": [1.0] * 64}
    },
    "a longer key": {"seq_length": 8192},
    "a shorter key": {"seq_length": 1024},
    "Cohere's word": {"model_max_length": 131_072},
}
ROPE["longrope with its own length"] = ROPE["longrope"] | {"original_max_position_embeddings": 1024}
ROPE["both names"] = ROPE["linear"] | {"rope_parameters": ROPE["dynamic"]["rope_parameters"]}


def length_cases() -> dict[str, tuple[dict, list[int]]]:
    """Configurations, and the lengths that are asked for: just below and above what is derived, and far above."""
    llama = config("Llama-2-7b")
    given = {name: config(name) for name in MODELS}
    given |= {f"Llama-2-7b, {name}": llama | changes for name, changes in ROPE.items()}
    given |= {
        f"{name} without a length": {key: value for key, value in config(name).items() if key not in LENGTH_KEYS}
        for name in WITHOUT
    }
    phi = config("Phi-3-mini-128k-instruct")
    given["Phi-3, class's own length"] = {
        key: value for key, value in phi.items() if key != "original_max_position_embeddings"
    }
    return {
        name: (each, [1, *((longest, longest + 1) if (longest := shape(each).max_positions) else ()), 3_000_000])
        for name, each in given.items()
    }


LENGTH_KEYS = ("max_position_embeddings", "n_positions")
WITHOUT = [
    "Llama-2-7b",
    "Mistral-7B-v0.1",
    "gemma-2-9b",
    "gpt2",
    "falcon-7b",
    "starcoder2-7b",
    "DeepSeek-V3",
    "Jamba-v0.1",
    "gpt-oss-20b",
]
LENGTHS = length_cases()


@pytest.fixture(scope="module")
def told(part, tmp_path_factory) -> dict:
    """What vLLM's own functions say to all cases and configurations, from one run of the engine's Python."""
    asked = [
        {
            **asdict(serving),
            "layers": [asdict(layer) | ({"kind": "full"} if layer.kind == "chunked" else {}) for layer in made.layers],
            "in_flight": serving.in_flight,
            "kv_bytes": kv_bytes,
        }
        for made, serving, kv_bytes in cases()
    ]
    configs = {name: config(name) for name in MODELS}
    lengths = [{"config": given, "asked": [None, *flags]} for given, flags in LENGTHS.values()]
    questions = {
        "cases": asked,
        "configs": configs,
        "families": sorted(FAMILIES),
        "lengths": lengths,
        "architectures": [*STATES_ALONE, *HYBRID],
    }
    folder = tmp_path_factory.mktemp("capacity")
    return run_by_engine(part("engine").path, "engine_capacity.py", questions, folder)


@pytest.mark.engine
def test_blocks_tokens_and_concurrency_are_those_of_vllm(told):
    """Exactly: same blocks, same tokens, same concurrency, and the same refusals."""
    compared = refused = 0
    for (made, serving, kv_bytes), theirs in zip(cases(), told["cases"], strict=True):
        if "refused" in theirs:
            refused += 1
            assert not starts(made, serving, kv_bytes), (made.name, serving, theirs)
            continue
        ours = cache(made, serving, kv_bytes)
        compared += 1
        assert theirs == {"blocks": ours.blocks, "tokens": ours.tokens, "concurrency": ours.concurrency}, (
            made.name,
            serving,
        )
        assert starts(made, serving, kv_bytes)
    assert compared > 50
    assert refused > 10


@pytest.mark.engine
@pytest.mark.parametrize("name", LENGTHS)
def test_default_and_longest_context_are_those_of_vllm(told, name):
    """vLLM's own get_and_verify_max_len, without the flag and with lengths around what we derive."""
    theirs = dict(zip(LENGTHS, told["lengths"], strict=True))[name]
    given, flags = LENGTHS[name]
    ours = shape(given)
    taken = [length if length <= ours.max_positions or not ours.max_positions else None for length in flags]
    assert [ours.served_len, *taken] == theirs


@pytest.mark.engine
def test_prefix_caching_is_on_by_default_where_vllm_has_it_on(told):
    assert {**dict.fromkeys(STATES_ALONE, False), **dict.fromkeys(HYBRID, True)} == told["caches_prefixes"]
    assert not SHAPES["falcon-mamba-7b"].attends
    assert SHAPES["Jamba-v0.1"].attends


@pytest.mark.engine
def test_every_family_has_the_length_of_its_class(told):
    compared = {
        name
        for name, theirs in told["families"].items()
        if theirs is not None and name not in NOT_AT_DEFAULTS and agreed(name, theirs)
    }
    assert len(compared) > 40


def agreed(name: str, theirs: dict) -> bool:
    """Compare a family's length without any field that names one."""
    without = {key: value for key, value in theirs["config"].items() if key not in LENGTH_KEYS}
    assert theirs["read"]["served_len"] == shape(without, name).served_len, name
    return True


WORDS = {
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "full_attention": "full",
}
WORDS |= {"mlp": "none", "moe": "none"}


def agrees(ours: ModelShape, theirs: dict) -> None:
    """Layers, heads, windows and parameters are those that vLLM and transformers read from the same config.json."""
    assert (len(ours.layers), ours.vocabulary, ours.hidden) == (
        theirs["layers"],
        theirs["vocabulary"],
        theirs["hidden"],
    )
    attending = [layer for layer in ours.layers if layer.kind in ("full", "window", "chunked")]
    if theirs["mla"]:
        assert {theirs["head_size"]} == {layer.latent for layer in ours.layers}
    elif attending:
        assert theirs["kv_heads"] == max(layer.kv_heads for layer in attending)
        assert theirs["head_size"] == max(layer.head_k for layer in attending)
        if theirs["layer_types"]:
            assert [WORDS[word] for word in theirs["layer_types"]] == [layer.kind for layer in ours.layers]
        elif theirs["window"]:
            assert {("window", theirs["window"])} == {(layer.kind, layer.window) for layer in ours.layers}
    if theirs["parameters"] is not None:
        assert theirs["parameters"] == pytest.approx(ours.parameters, rel=0.005)


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_read_as_vllm_reads_it(told, name):
    assert "error" not in told["configs"][name], told["configs"][name]
    agrees(SHAPES[name], told["configs"][name])


NOT_AT_DEFAULTS = {
    "gemma4_text": "its class gives layers of their own; published files name global_head_dim",
    "glm4_moe": "its class names no head_dim that divides; published files do",
    "nemotron_h": "its class lists four layers; published files have a pattern",
}


@pytest.mark.engine
def test_a_family_at_its_defaults_is_read_as_vllm_reads_it(told):
    compared = set()
    for name, theirs in told["families"].items():
        if theirs is None:
            continue
        if name in NOT_AT_DEFAULTS:
            with pytest.raises(BadModel):
                shape(theirs["config"], name)
            continue
        agrees(shape(theirs["config"], name), theirs["read"])
        compared.add(name)
    assert len(compared) > 40, set(FAMILIES) - compared


@pytest.mark.engine
def test_states_are_as_large_as_vllms_model_classes_make_them(told):
    assert len(told["states"]) >= 4
    for name, (whole, half) in told["states"].items():
        ours = max(layer.state_bytes for layer in SHAPES[name].layers)
        assert (ours, ours / 2) == (whole, half), name


@pytest.mark.parametrize(
    ("other", "alike"),
    [({}, True), ({"kind": "full"}, False), ({"window": 32}, False), ({"tokens": 32}, False)],
    ids=str,
)
def test_windows_share_a_table_only_where_they_agree(other, alike):
    page = LayerBlock("window", 16, 1024.0, window=64)
    assert alike is kv._alike([page, replace(page, **other)])
