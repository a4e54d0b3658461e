"""What an engine says of its KV cache beside what we reckon: recorded pages of three releases, start-up logs, and real
engines of several models."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from stack.capacity import live_engine, memory, model, verify
from stack.capacity.kv import Serving
from stack.capacity.live_engine import BadLive, Served
from stack.capacity.model import ModelShape
from stack.capacity.verify import Verifier, compare
from tests.support import engine_sizes
from tests.support.engines import Engines
from tests.support.load_generator_pair import forked

GOLDEN = Path(__file__).parents[1] / "golden"
GIB = 1 << 30
TINY: dict[str, Any] = {  # the lab's model, of which all recorded pages are
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


def tiny(name: str = "tiny") -> ModelShape:
    return model.shape(TINY, name)


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.prom").read_text()


def told(loop: Verifier) -> dict[str, tuple[float | None, float | None, str]]:
    return {name: (ours, theirs, source) for name, ours, theirs, _, source in loop.rows()}


# ---- recorded pages


def test_page_of_0_32_agrees_with_the_calculation():
    """1 GiB at 512 bytes a token, 2 layers x 2 heads x (32 + 32) x 2 bytes; no log is needed to know how long a request
    may be."""
    found = compare(golden("0.32.0-before"), None, tiny())
    assert (512, 128) == (found.serving.max_model_len, found.serving.block_size)
    assert {
        "page: kv_cache_memory_bytes": (None, GIB),
        "page: num_gpu_blocks": (16384, 16384),
        "page: kv_cache_size_tokens": (2097152, 2097152),
        "page: kv_cache_max_concurrency": (4096, 4096),
        "page: kv_cache_memory_bytes / tokens": (512, 512),
    } == {figure.source: (figure.predicted, figure.reported) for figure in found.figures}
    assert any("2,097,152 tokens" in sentence for sentence in found.said)


@pytest.mark.parametrize("release", ["0.10.2-load-under-load", "0.20.2-preempt-under-load"])
def test_what_a_release_does_not_tell_is_absent(release):
    """Neither tells tokens; blocks that were set by hand follow from no memory, so there is nothing to compare, and
    nothing is said to agree."""
    report = compare(golden(release), None, tiny(), served=Served(max_model_len=512))
    found = told(report)
    blocks = 100 if "0.10" in release else 24
    assert (None, blocks) == found["KV cache blocks"][:2]
    assert (None, 32 * blocks, "page: num_gpu_blocks x block_size") == found["KV cache tokens"]
    assert ["KV cache blocks", "KV cache tokens"] == [figure.name for figure in report.figures]


def test_blocks_set_by_hand_still_tell_their_tokens():
    """24 blocks of 32 tokens are 1.5 requests of 512; the gibibyte of the page is not what they take."""
    figures = compare(golden("0.32.0-preempt-under-load"), None, tiny()).figures
    assert {"blocks": (None, 24), "tokens": (768, 768), "requests": (1.5, 1.5)} == {
        figure.unit: (figure.predicted, figure.reported) for figure in figures
    }


@pytest.mark.parametrize(
    ("page", "share", "blocks", "each", "room"),
    [("0.10.2-load-under-load", 0.2525, 25, 200, "15.8"), ("0.20.2-preempt-under-load", 0.9565, 22, 176, "4.2")],
)
def test_what_is_in_use_is_told_in_blocks_bytes_and_tokens(page, share, blocks, each, room):
    """vLLM keeps one block for itself; the share is of the others."""
    found = compare(golden(page), None, tiny(), served=Served(max_model_len=512))
    rows = told(found)
    assert pytest.approx(share, abs=1e-4) == rows["in use"][1]
    assert (blocks, blocks * 32, pytest.approx(blocks * 32 * 512)) == tuple(
        rows[f"{what} in use{more}"][1] for what, more in _USED
    )
    need = re.compile(rf"4 running requests .*\b{share:.0%} .*\b{each} tokens .*\b{room} such requests")
    assert any(map(need.fullmatch, found.said))


_USED = (("blocks", ""), ("tokens", " at most"), ("bytes", ""))


def test_worst_case_and_preemptions_are_explained():
    """The worst case is told apart from what runs and preemptions are explained."""
    said = " ".join(compare(golden("0.32.0-preempt-under-load"), None, tiny()).said)
    assert re.search(r"\b4\.2 such requests; .*\b1\.50 .*\b512 tokens", said)
    assert "59 times" in said
    idle = " ".join(compare(golden("0.32.0-before"), None, tiny()).said)
    assert "no request" in idle
    assert "such requests" not in idle


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.prom")), ids=lambda path: path.stem)
def test_every_recorded_page_is_read(path):
    found = compare(path.read_text(), None, tiny(), served=Served(max_model_len=512))
    assert "tiny" == found.model
    assert all(abs(off) < 1e-9 for *_, off, _ in found.rows() if off is not None)


# ---- plans and logs


def test_unfollowed_plan_is_said_and_engine_counts():
    """A plan that was not followed is said and the engine counts."""
    plan = Serving(4096, block_size=16, gpu_memory_utilization=0.8)
    by_hand = compare(golden("0.32.0-before"), None, tiny(), plan, kv_bytes=1.1 * GIB)
    assert any(re.search(r"by hand \(page: kv_cache_memory_bytes\), .* 1\.10 GiB$", each) for each in by_hand.said)
    assert (None, GIB) == told(by_hand)["KV cache memory"][:2]
    assert ["KV cache tokens"] == [figure.name for figure in by_hand.figures if figure.unit == "tokens"]
    measured = re.sub(r'kv_cache_memory_bytes="[^"]*"', 'kv_cache_memory_bytes="None"', golden("0.32.0-before"))
    found = compare(measured, "Available KV cache memory: 1.00 GiB\n", tiny(), plan, kv_bytes=1.1 * GIB)
    options = re.compile(
        r".*max_model_len 512, \w+ 4096; block_size 128, \w+ 16; gpu_memory_utilization 0\.92, \w+ 0\.8 as assumed: .*"
    )
    assert any(map(options.fullmatch, found.said))
    rows = {name: off for name, _, _, off, _ in found.rows()}
    assert pytest.approx(0.1) == rows["KV cache memory"]
    as_run, as_planned = (figure.difference for figure in found.figures if figure.unit == "tokens")
    assert (0, pytest.approx(0.1, abs=1e-4)) == (as_run, as_planned)


def log(version: str = "0.32.0", tokens: str = "40,208", **options: object) -> str:
    """The start of an engine on a GPU, in the words of vLLM."""
    told = {
        "model": "'meta-llama/Llama-3.1-8B'",
        "dtype": "torch.bfloat16",
        "max_seq_len": 131072,
        "tensor_parallel_size": 1,
        **options,
    }
    return (
        "INFO [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=8192.\nINFO [core.py:133]"
        f" Initializing a V1 LLM engine (v{version}) with config:"
        f" {', '.join(f'{k}={v}' for k, v in told.items())}\nINFO [gpu_model_runner.py:5150] Model loading took 14.99"
        " GiB memory and 3.2 seconds\nINFO [gpu_worker.py:760] Available KV cache memory: 4.91 GiB\nINFO"
        f" [kv_cache_utils.py:2327] GPU KV cache size: {tokens} tokens\nINFO [kv_cache_utils.py:2333] Maximum"
        " concurrency for 131,072 tokens per request: 0.31x\n"
    )


LLAMA = json.loads((GOLDEN / "configs" / "Llama-3.1-8B-Instruct.json").read_text())
# shows no cache_config_info
RUST = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="llama"} 0\n'


def test_the_log_alone_is_enough():
    """4.91 GiB at 131,072 bytes a token, a sample that a planner published: 40,208 tokens."""
    found = compare(RUST, log(), model.shape(LLAMA, "Llama-3.1-8B"))
    rows = {figure.name: figure for figure in found.figures}
    assert pytest.approx(0, abs=1e-3) == rows["KV cache tokens"].difference
    assert (40208, "start-up log") == (rows["KV cache tokens"].reported, rows["KV cache tokens"].source)
    assert (pytest.approx(4.91 * GIB), "start-up log, to 0.01 GiB") == (
        rows["KV cache memory"].reported,
        rows["KV cache memory"].source,
    )
    (token_bytes,) = [figure.reported for figure in found.figures if figure.source.endswith(" / tokens")]
    assert pytest.approx(131_072, rel=1e-3) == token_bytes
    assert pytest.approx(0, abs=0.01) == rows["weights"].difference
    assert 131072 == found.serving.max_model_len


def test_the_log_tells_how_the_engine_was_split():
    """Half the heads on each of two GPUs: half the bytes a token, twice the tokens."""
    found = compare(RUST, log(tokens="80,416", tensor_parallel_size=2), model.shape(LLAMA))
    assert 2 == found.serving.tensor_parallel
    assert pytest.approx(0, abs=1e-3) == {figure.name: figure.difference for figure in found.figures}["KV cache tokens"]


def test_of_several_starts_the_last_one_counts():
    found = compare(RUST, log(tokens="80,416", tensor_parallel_size=2) + log(), model.shape(LLAMA))
    assert (1, 40208) == (found.serving.tensor_parallel, told(found)["KV cache tokens"][1])


def test_a_log_of_another_start_is_told_and_the_page_counts():
    found = compare(
        golden("0.32.0-before"),
        "CPU KV cache size: 4,096 tokens, Maximum concurrency for 512 tokens per request: 8.00x",
        tiny(),
    )
    assert any(
        "4,096 tokens" in sentence and "2,097,152" in sentence and "another start" in sentence
        for sentence in found.said
    )
    assert 2097152 == told(found)["KV cache tokens"][1]


def test_a_log_of_something_else_is_told():
    with_log, without = (set(compare(golden("0.32.0-before"), text, tiny()).said) for text in ("hello\nworld\n", None))
    (note,) = with_log - without
    assert "no start" in note


def test_the_share_in_the_sentence_is_of_what_was_reckoned():
    """Half of the tokens is 50 % less, though ours are 100 % more than theirs."""
    page = golden("0.32.0-before").replace('kv_cache_size_tokens="2097152"', 'kv_cache_size_tokens="1048576"')
    half = page.replace('kv_cache_max_concurrency="4096.0"', 'kv_cache_max_concurrency="2048.0"')
    assert any("1,048,576 tokens, 50.0% less" in sentence for sentence in compare(half, None, tiny()).said)


@pytest.mark.parametrize("usage", ["NaN", "+Inf", "-1", "5"])
def test_a_usage_that_cannot_be_is_none(usage):
    page = re.sub(
        r"(vllm:(?:kv_cache_usage_perc|num_requests_running)\{[^}]*\}) \S+", rf"\1 {usage}", golden("0.32.0-before")
    )
    assert usage in page
    assert not {"in use", "blocks in use", "bytes in use"} & {
        figure.name for figure in compare(page, None, tiny()).in_use
    }


def test_options_that_cannot_be_are_told_with_their_place():
    with pytest.raises(BadLive, match=r"the page .*block_size .*\b16\b.* 17$"):
        compare(golden("0.32.0-before").replace('block_size="128"', 'block_size="17"'), None, tiny())


def test_weights_of_a_stage_are_those_of_its_fullest_gpu():
    """Not an even share of all: a pipeline stage holds the embeddings or the output head too."""
    llama = model.shape(LLAMA)
    found = compare(RUST, log(tokens="80,416", tensor_parallel_size=2, pipeline_parallel_size=3), llama)
    (weights,) = [figure for figure in found.figures if figure.name == "weights"]
    assert memory.weight_bytes(llama, Serving(131_072, tensor_parallel=2, pipeline_parallel=3)) == weights.predicted
    assert weights.predicted > llama.weight_bytes / 6


def test_windows_depend_on_what_no_page_tells():
    shape = model.shape(TINY | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64})
    said = " ".join(compare(golden("0.32.0-before"), None, shape).said)
    assert re.search(r"max_num_batched_tokens, .*: 8,192 .*start-up log", said)
    options = (
        "Chunked prefill is enabled with max_num_batched_tokens=2048.\nInitializing a V1 LLM engine (v0.32.0) with"
        " config: device_config=cpu\n"
    )
    known = compare(golden("0.32.0-before"), options, shape)
    assert (2048, False) == (known.serving.max_num_batched_tokens, known.serving.async_scheduling)
    assert "max_num_batched_tokens" not in " ".join(known.said)


def test_of_several_cores_the_fullest_is_looked_at():
    page = golden("0.32.0-preempt-under-load")
    lines = [
        line
        for line in page.splitlines()
        if line.startswith(("vllm:cache_config_info{", "vllm:num_requests_running{", "vllm:kv_cache_usage_perc{"))
    ]
    second = [re.sub(r" [\d.]+$", " 1.0", line.replace('engine="0"', 'engine="1"')) for line in lines]
    found = compare("\n".join([*lines, *second, ""]), None, tiny())
    assert any(re.fullmatch("2 engine cores .*, 1", sentence) for sentence in found.said)
    assert (1.0, 1.0) == (told(found)["in use"][1], told(found)["requests running"][1])


# ---- what cannot be compared

BIG = replace(tiny("Llama-3.1-8B"), layers=tiny().layers * 16)


@pytest.mark.parametrize(
    ("page", "shape", "facts"),
    [
        ("# TYPE up gauge\nup 1\n", tiny(), "http://host:8000 .*no series"),
        ("<html>", tiny(), "http://host:8000: .*'<html>'"),
        ("", tiny(), "http://host:8000: no samples"),
        (RUST, tiny(), "http://host:8000 .*vllm:cache_config_info .*start-up log"),
        (golden("0.32.0-before"), BIG, r"org/Tiny, .*Llama-3\.1-8B: .*16,384 blocks .*1,024 .*config\.json"),
    ],
)
def test_what_cannot_be_compared_is_told_in_a_sentence(page, shape, facts):
    with pytest.raises(BadLive, match=facts):
        compare(page, None, shape, served=Served("http://host:8000", names=("org/Tiny", "tiny"), max_model_len=512))


def test_another_name_for_a_like_cache_is_a_note():
    said = compare(golden("0.32.0-before"), None, tiny("/models/llama"), served=Served(names=("org/Tiny",))).said
    assert any(re.fullmatch("it serves org/Tiny, .*/models/llama; .*alike", sentence) for sentence in said)
    assert not [
        each
        for each in compare(golden("0.32.0-before"), None, tiny("org/Tiny/")).said
        if "serves" in each and "alike" in each
    ]


# ---- the reader


@pytest.fixture
async def served(free_port) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A server that answers as vLLM does, with a recorded page; what its /v1/models says can be changed."""
    says: dict[str, Any] = {
        "models": {
            "data": [
                {"id": "tiny", "root": "org/tiny", "max_model_len": 512},
                {"id": "adapter", "root": "x", "parent": "tiny"},
            ]
        },
        "status": 200,
        "page": golden("0.32.0-before"),
        "keys": [],
    }

    async def models(request: web.Request) -> web.Response:
        says["keys"].append(request.headers.get("Authorization"))
        return web.json_response(says["models"], status=says["status"])

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=says["page"], status=404 if says["page"] is None else 200)

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/metrics", page), web.get("/version", version)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}", says
    await runner.cleanup()


async def test_an_engine_is_read_by_any_of_its_addresses(served):
    url, says = served
    for end in ("", "/", "/metrics", "/v1"):
        found = await verify.verify(url + end, tiny(), key="secret")
        assert ("0.32.0", 512, 2097152) == (
            found.version,
            found.serving.max_model_len,
            told(found)["KV cache tokens"][0],
        )
    assert {"Bearer secret"} == set(says["keys"])
    _, about = await live_engine.read(url)
    assert Served(url, "0.32.0", ("org/tiny", "tiny"), 512) == about, "an adapter is no model of its own"


async def test_without_a_list_of_models_the_page_is_enough(served):
    url, says = served
    says |= {"status": 404, "models": "not found"}
    assert 512 == (await verify.verify(url, tiny())).serving.max_model_len


@pytest.mark.parametrize(
    ("change", "facts"),
    [({"status": 401}, "/v1/models .*401; .*--api-key-file"), ({"page": None}, "/metrics .*404; .*vLLM")],
)
async def test_an_engine_that_says_no_is_told_in_a_sentence(served, change, facts):
    url, says = served
    says |= change
    with pytest.raises(BadLive, match=facts):
        await verify.verify(url, tiny())


@pytest.mark.parametrize(
    ("url", "facts"),
    [
        ("http://127.0.0.1:9", r" http://127\.0\.0\.1:9/metrics \("),
        ("http://me:secret@127.0.0.1:9", r"http://127\.0\.0\.1:9 .*login.*--api-key-file"),
        ("nonsense", r"^'nonsense' .*http://127\.0\.0\.1:8000$"),
        ("me:secret@127.0.0.1:9", r"^[^']*no address .*http://127\.0\.0\.1:8000$"),
        ("ftp://x", "^'ftp://x' .*no address"),
        ("http://", "^'http:' .*no address"),
        ("", "^'' .*no address"),
    ],
)
async def test_where_no_engine_answers_that_is_said(url, facts):
    with pytest.raises(BadLive, match=facts) as refused:
        await live_engine.read(url)
    assert "secret" not in str(refused.value)


# ---- real engines

SMALL = {
    "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
GROUPED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SMALL,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
GEMMA = {
    "model_type": "gemma3_text",
    **SMALL,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 512,
    "query_pre_attn_scalar": 32,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    **SMALL,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **SMALL, "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 64, "n_routed_experts": 2,
    "n_shared_experts": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 3,
}  # fmt: skip
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", **SMALL, "num_hidden_layers": 6,
    "hybrid_override_pattern": "M-M*M-",
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_head_dim": 32, "head_dim": 32, "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "expand": 2, "mlp_hidden_act": "relu2",
}  # fmt: skip
CASES: Mapping[str, Mapping[str, Any]] = {
    "grouped": {
        "config": GROUPED,
        "options": {"block_size": 32, "max_model_len": 1000, "kv_cache_memory_bytes": 50_000_000},
    },
    "float32": {
        "config": GROUPED,
        "options": {"dtype": "float32", "max_model_len": 2000, "kv_cache_memory_bytes": 40_000_000},
    },
    "windows": {
        "config": {
            "architectures": ["Gemma3ForCausalLM"],
            **GEMMA,
            "num_hidden_layers": 13,
            "sliding_window_pattern": 6,
        },
        "options": {
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_batched_tokens": 1024,
            "kv_cache_memory_bytes": 40_000_000,
        },
    },
    "window": {
        "config": MISTRAL | {"sliding_window": 256},
        "options": {
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_batched_tokens": 1024,
            "kv_cache_memory_bytes": 40_000_000,
        },
    },
    "latent": {"config": LATENT, "options": {"max_model_len": 2000, "kv_cache_memory_bytes": 40_000_000}},
    "states": {
        "config": NEMOTRON,
        "options": {"max_model_len": 4096, "enable_prefix_caching": True, "kv_cache_memory_bytes": 200_000_000},
    },
}


@pytest.fixture(scope="module")
def sizes(part, tmp_path_factory) -> dict[str, tuple[Path, str, str]]:
    """Of each case: the model's folder, the page of its engine, its start-up log."""
    folder = tmp_path_factory.mktemp("sizes")
    (folder / "cases.json").write_text(json.dumps(CASES))
    said = forked([engine_sizes.__file__, folder / "cases.json", folder], {}, part("engine").path, folder)
    logs = dict(each.split("\n", 1) for each in said.split(engine_sizes.MARK)[1:])
    assert CASES.keys() == logs.keys(), said[-3000:]
    return {name: (folder / name, (folder / f"{name}.prom").read_text(), logs[name]) for name in CASES}


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_a_real_engine_says_what_we_reckon(sizes, name):
    """Blocks, tokens and concurrency to the last one, where 2 % would do; page and log say the same."""
    folder, page, started = sizes[name]
    found = compare(page, started, model.read(folder))
    rows = {figure.name: figure for figure in found.figures}
    assert {"blocks": 0.0, "tokens": 0.0, "requests": 0.0} == {
        figure.unit: figure.difference for figure in found.figures if figure.unit != "bytes"
    }
    (token_bytes,) = [figure for figure in found.figures if figure.source.endswith(" / tokens")]
    assert pytest.approx(0, abs=0.02) == token_bytes.difference
    assert CASES[name]["options"]["max_model_len"] == found.serving.max_model_len
    assert ("float32" if name == "float32" else "bfloat16") in started.partition("dtype=torch.")[2][:8]
    assert (
        int(re.search(r"KV cache size: ([\d,]+) tokens", started)[1].replace(",", ""))
        == rows["KV cache tokens"].reported
    )


@pytest.mark.engine
def test_a_served_engine_is_compared_by_its_address(real_engines: Engines, part):
    """The lab's own: 1 GiB, 32K context, blocks of 32 tokens."""
    engine = real_engines.shared().up()
    found = asyncio.run(verify.verify(engine.spec.address, model.read(part("model").path), log=engine.log.read_text()))
    assert {"blocks": (65536, 65536), "tokens": (2097152, 2097152), "requests": (64, 64)} == {
        figure.unit: (figure.predicted, figure.reported) for figure in found.figures if figure.unit != "bytes"
    }
    assert ("0.32.0", "tiny") == (found.version, found.model)
    assert not [each for each in found.said if "as assumed" in each or "another start" in each]
