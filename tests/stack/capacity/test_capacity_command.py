"""`vllm-watch capacity`: what it prints, its twin in JSON, its exit codes, and every example of its page."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.capacity import worksheet
from stack.cli import main

HERE = Path(__file__).parents[2]
CONFIGS = HERE / "golden/configs"
PAGE = (HERE.parent / "docs/guides/capacity.md").read_text()
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)]
PRICES = (
    "gpu_hour: 2.0\ngpus: [{name: H200, gpu_hour: 4.2}]\napi: [{model: '*', input_per_1k: 0.0002, output_per_1k:"
    " 0.0008}]\n"
)
SHAPE = """\
traffic: {p50_prompt_tokens: 1500, p95_prompt_tokens: 1500, p50_output_tokens: 300, p95_output_tokens: 300}
targets: {ttft_p95: 400ms, itl_p95: 25ms}
model: {max_model_len: 8192}
"""
TINY = {  # the lab's model, which the recorded page is of
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
}  # fmt: skip


TRACES = {
    "AzureLLMInferenceTrace_conv.csv": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:16:59.9799600,100,1\n"),
    "BurstGPT_1.csv": "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,472,18\n6,ChatGPT,10,2\n",
    "conversation_trace.jsonl": '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n',
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a model, a worksheet, a request log and prices."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(CONFIGS / "Llama-3.1-8B-Instruct.json", tmp_path / "config.json")
    (sheet,) = [block for block in BLOCKS if block.startswith("model:")]
    (tmp_path / "worksheet.yaml").write_text(sheet)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "shape.yaml").write_text(SHAPE)
    (tmp_path / "prices.yaml").write_text(PRICES)
    lines = [
        RequestRecord(
            request_id=f"{n}",
            ts=timestamp(1_760_000_000 + n),
            model="chat",
            outcome="ok",
            prompt_tokens=1000 + n,
            completion_tokens=200,
            ttft_ms=400.0,
            tpot_ms=20.0,
        )
        for n in range(300)
    ]
    (tmp_path / "requests.jsonl").write_bytes(b"".join(map(to_line, lines)))
    return tmp_path


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["capacity", *map(str, words)], catch_exceptions=False)
    return done.exit_code, done.output


def told(*words: object) -> dict:
    status, output = run(*words, "--json")
    assert 0 == status, output
    found: dict = json.loads(output)
    return found


# ---- one GPU


def test_one_gpu_is_told_with_everything_that_follows(folder):
    status, output = run(
        "--model", "config.json", "--gpu", "H200", "--traffic", "shape.yaml", "--rate", 8, "--prices", "prices.yaml"
    )
    assert 0 == status
    for words in (
        "131,072 bytes", "maximum concurrency", "63.2", "12.67 GiB", "103,800 tokens", "compute (binds)", "at least 1",
        "vllm serve ", "--max-model-len 8192", "capacity:\n  slots:", "--measured-rate",
    ):  # fmt: skip
        assert words in output, words


def test_the_twin_in_json_has_stable_names(folder):
    found = told(
        "--model", "config.json", "--gpu", "H200", "--traffic", "shape.yaml", "--rate", 8, "--prices", "prices.yaml"
    )
    assert {"plans", "refused", "notes"} == set(found)
    (plan,) = found["plans"]
    assert {
        "model", "gpu", "serving", "memory", "kv_cache", "concurrency", "traffic", "targets", "limits", "binds",
        "replicas", "cost", "vllm",
        "gateway", "notes",
    } == set(plan)  # fmt: skip
    assert {"name", "bytes", "estimated", "source"} == set(plan["memory"][0])
    assert {"bytes", "bytes_per_token", "token_costs", "blocks", "tokens", "sure"} == set(plan["kv_cache"])
    assert {"guaranteed", "expected", "at_p95"} == set(plan["concurrency"])
    assert {"count", "at_least", "gpus", "users_per_replica"} == set(plan["replicas"])
    assert {
        "currency", "per_replica_hour", "per_hour", "per_1k_tokens", "at_best_per_1k_tokens", "api_per_1k_tokens",
        "api_per_hour",
        "break_even_per_s", "at_least", "target_kept",
    } == set(plan["cost"])  # fmt: skip
    assert (131072, pytest.approx(103_800), pytest.approx(63.2), pytest.approx(7.9)) == (
        plan["kv_cache"]["bytes_per_token"],
        plan["traffic"]["resident_tokens"],
        plan["traffic"]["in_flight"],
        plan["traffic"]["request_s"],
    )


@pytest.mark.parametrize(("flag", "length"), [((), 2048), (("--max-model-len", 8192), 8192)])
def test_falcon_40b_is_planned_although_its_file_names_no_length(folder, flag, length):
    shutil.copy(CONFIGS / "falcon-40b.json", "falcon-40b.json")
    (plan,) = told("--model", "falcon-40b.json", "--gpu", "H200", *flag)["plans"]
    assert (length, None, 2048) == (
        plan["serving"]["max_model_len"],
        plan["model"]["max_positions"],
        plan["model"]["default_max_model_len"],
    )
    assert 60 * 8 * 2 * 64 * 2 == plan["kv_cache"]["bytes_per_token"]


def test_states_take_one_block_without_prefix_caching(folder):
    """vLLM leaves it off for Falcon-Mamba; with it a request holds two blocks, and half as many fit."""
    shutil.copy(CONFIGS / "falcon-mamba-7b.json", "falcon-mamba-7b.json")
    (folder / "on.yaml").write_text("tuning: {enable_prefix_caching: true}\n")
    off, on = (
        told("--model", "falcon-mamba-7b.json", "--gpu", "H200", *more)["plans"][0]
        for more in ((), ("--traffic", "on.yaml"))
    )
    assert [False, True] == [each["serving"]["prefix_caching"] for each in (off, on)]
    assert (
        off["kv_cache"]["blocks"]
        == on["kv_cache"]["blocks"]
        == off["concurrency"]["guaranteed"]
        == 2 * on["concurrency"]["guaranteed"]
    )
    assert off["kv_cache"]["tokens"] == 2 * on["kv_cache"]["tokens"]
    status, text = run("--model", "falcon-mamba-7b.json", "--gpu", "H200", "--traffic", "worksheet.yaml", "--fill")
    assert "enable_prefix_caching: false" in text, (status, text)


def test_the_table_says_where_windows_fill(folder):
    shutil.copy(CONFIGS / "gemma-2-9b.json", "gemma-2-9b.json")
    said = (
        run("--model", "gemma-2-9b.json", "--gpu", "H200", "--max-num-batched-tokens", batch)[1]
        for batch in (8192, 2048)
    )
    short, long = (" ".join(re.sub("[│ ]+", " ", text).split()) for text in said)  # a cell may be broken into lines
    assert re.search(r"344,064 bytes a token \([^)]*8,192 tokens\)", short)
    assert "172,032" not in short
    assert re.search(r"344,064 bytes a token .*8,191 tokens .*172,032", long)


def test_memory_adds_up_to_the_gpu(folder):
    (plan,) = told("--model", "config.json", "--gpu", "H200")["plans"]
    whole = sum(part["bytes"] for part in plan["memory"]) + plan["kv_cache"]["bytes"]
    assert pytest.approx(plan["serving"]["gpu_memory_utilization"] * plan["gpu"]["usable_bytes"]) == whole


def test_options_override_the_log(folder):
    """A log says lengths times and rate and options go before it."""
    words = ("--model", "config.json", "--gpu", "H200", "--max-model-len", "8K")
    (plan,) = told(*words, "--log", "requests.jsonl")["plans"]
    assert (1149, 1284, 200, 1.0, 0.4, 0.02) == (
        plan["traffic"]["prompt_tokens"]["p50"],
        plan["traffic"]["prompt_tokens"]["p95"],
        plan["traffic"]["output_tokens"]["mean"],
        plan["traffic"]["rate_per_s"],
        plan["traffic"]["ttft_s"],
        pytest.approx(plan["traffic"]["tpot_s"]),
    )
    (plan,) = told(*words, "--log", "requests.jsonl", "--rate", 50)["plans"]
    assert 50 == plan["traffic"]["rate_per_s"]
    (plan,) = told(*words, "--log", "requests.jsonl", "--users", 100, "--think", "20s")["plans"]
    assert pytest.approx(100 / 24.4) == plan["traffic"]["rate_per_s"]


def test_what_was_measured_goes_before_targets(folder):
    (plan,) = told("--model", "config.json", "--gpu", "H200", "--traffic", "shape.yaml", "--log", "requests.jsonl")[
        "plans"
    ]
    assert (0.4, pytest.approx(0.02), 0.025) == (
        plan["traffic"]["ttft_s"],
        plan["traffic"]["tpot_s"],
        plan["targets"]["itl_p95_s"],
    )


def test_lines_that_are_no_records_are_told(folder):
    with (folder / "requests.jsonl").open("ab") as file:
        file.write(b"nonsense\n")
    (plan,) = told("--model", "config.json", "--gpu", "H200", "--max-model-len", "8K", "--log", "requests.jsonl")[
        "plans"
    ]
    assert any(note.startswith("1 bad line (json): requests.jsonl:") for note in plan["notes"])


def test_a_public_trace_is_a_log(folder):
    rows = "".join(f"2023-11-16 18:17:{at:02d}.9799600,{100 + at},{at + 1}\n" for at in range(31))
    (folder / "trace.csv").write_text(f"{TRACES['AzureLLMInferenceTrace_conv.csv']}{rows}18:17,1\n")
    (plan,) = told("--model", "config.json", "--gpu", "H200", "--max-model-len", "8K", "--log", "trace.csv")["plans"]
    prompt, output = plan["traffic"]["prompt_tokens"], plan["traffic"]["output_tokens"]
    assert (114, 129, 15, 30) == (prompt["p50"], prompt["p95"], output["p50"], output["p95"])
    assert pytest.approx(32 / 31) == plan["traffic"]["rate_per_s"]
    assert any("1 bad line" in note and "trace.csv:34:" in note for note in plan["notes"])


def test_log_fills_lengths_and_uses_worksheet_targets(folder):
    """A log needs no lengths in the worksheet and lends its targets."""
    (folder / "lab.jsonl").write_text('{"request_id": "a", "prompt_tokens": 1842, "completion_tokens": 419}\n')
    (folder / "half.yaml").write_text(
        "traffic: {p50_prompt_tokens: 5}\ntargets: {ttft_p95: 400ms, itl_p95: 25ms}\nmodel: {max_model_len: 8192}\n"
    )
    (plan,) = told("--model", "config.json", "--gpu", "H200", "--traffic", "half.yaml", "--log", "lab.jsonl")["plans"]
    traffic = plan["traffic"]
    assert (1842, 0.4, 0.025, None) == (
        traffic["prompt_tokens"]["p50"],
        traffic["ttft_s"],
        traffic["tpot_s"],
        traffic["rate_per_s"],
    )
    assert any("all times" in note for note in plan["notes"])


def test_people_who_do_not_think_may_be_given(folder):
    (plan,) = told("--model", "config.json", "--gpu", "H200", "--traffic", "shape.yaml", "--users", 79, "--think", 0)[
        "plans"
    ]
    assert pytest.approx(10) == plan["traffic"]["rate_per_s"]


def test_another_type_than_the_models_own_is_an_option_too(folder):
    (folder / "half.yaml").write_text("model: {dtype: float16, max_model_len: 8192}\n")
    (plan,) = told("--model", "config.json", "--gpu", "H200", "--traffic", "half.yaml")["plans"]
    assert "--dtype float16" in plan["vllm"]["command"]


def test_a_file_of_another_name_names_the_model(folder):
    (plan,) = told("--model", "tiny.json", "--gpu", "L4")["plans"]
    assert ("tiny", True) == (
        plan["model"]["name"],
        plan["vllm"]["command"].startswith("vllm serve tiny --served-model-name tiny "),
    )


def test_a_refusal_names_each_way_on_a_line_of_its_own(folder):
    _, output = run("--model", CONFIGS / "DeepSeek-V2-Lite.json", "--gpu", "H100/1g.10gb", "--max-model-len", 16384)
    what, near, other = output.splitlines()
    assert re.match(r"refused: DeepSeek-V2-Lite .*H100-80GB/1g\.10gb: .*--gpu-memory-utilization 0\.92", what)
    assert ["29.26", "2.73", "8.97", "9.75", "23.01"] == re.findall(r"([-\d.]+) GiB", what)
    assert re.match(r"    what fits: H100-80GB/3g\.40gb, .*max_model_len 16,384$", near)
    assert re.match(r"    what fits: A100-40GB, .*\(39\.25 GiB\)$", other)


def test_without_a_rate_it_is_said_what_is_missing(folder):
    status, output = run("--model", "config.json", "--gpu", "H200", "--traffic", "shape.yaml")
    assert 0 == status
    assert "not given: requests_per_second or concurrent_users" in output
    assert "unknown" in output


def test_without_targets_nothing_binds(folder):
    """Without targets nothing binds and what is missing stands beside."""
    (folder / "aimless.yaml").write_text(re.sub("targets:.*\n", "", SHAPE))
    _, output = run("--model", "config.json", "--gpu", "H200", "--traffic", "aimless.yaml", "--rate", 8)
    assert "(binds)" not in output
    (row,) = [line for line in output.splitlines() if line.startswith("│ together")]
    assert ["together", "", "unknown", "not given: ttft_p95, itl_p95"] == [
        cell.strip() for cell in row.split("│")[1:-1]
    ]


def test_how_many_users_fit_is_told(folder):
    words = ("--model", "config.json", "--gpu", "H200", "--traffic", "shape.yaml", "--think", "30s")
    (plan,) = told(*words)["plans"]
    assert re.search(rf"│ users +│ below {plan['replicas']['users_per_replica']:,.0f} ", run(*words)[1])
    assert "users each" in run(*words, "--gpu", "H100")[1]


def test_times_of_another_model_are_no_measurement_of_this_one(folder):
    words = ("--model", "config.json", "--gpu", "H200", "--max-model-len", "8K", "--log", "requests.jsonl")
    assert re.search(rf"^note: .*\bof chat: .*\b{folder.name}\b", run(*words)[1], re.MULTILINE)
    assert "of chat" not in run(*words, "--served-model-name", "chat")[1], "then somebody said that it is"


def test_a_refusal_says_on_how_many_gpus(folder):
    _, output = run("--model", CONFIGS / "DeepSeek-V3.json", "--gpu", "L4", "--tp", 8)
    assert "does not fit 8 x L4: " in output
    (folder / "hasty.yaml").write_text(SHAPE.replace("25ms", "0.1ms"))
    assert (
        "takes 2 x H200 at least"
        in run("--model", "config.json", "--gpu", "H200", "--tp", 2, "--traffic", "hasty.yaml")[1]
    )
    _, output = run("--model", "config.json", "--gpu", "H200", "--gpu", "H100", "--tp", 2)
    assert ["2 x H200", "2 x H100-80GB"] == [
        line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")
    ]


def test_a_slice_may_be_written_with_a_blank(folder):
    (plan,) = told("--model", "tiny.json", "--gpu", "H100 1g.10gb")["plans"]
    assert "H100-80GB/1g.10gb" == plan["gpu"]["name"]


def test_a_cost_target_is_told_in_digits(folder):
    (folder / "cheap.yaml").write_text(SHAPE.replace("itl_p95: 25ms", "itl_p95: 25ms, cost_per_1k_tokens: 0.00001"))
    _, output = run(
        "--model", "config.json", "--gpu", "H200", "--traffic", "cheap.yaml", "--rate", 8, "--prices", "prices.yaml"
    )
    assert "target 0.0000100: missed" in output


# ---- several GPUs


def test_gpus_and_slices_are_compared_by_cost(folder):
    status, output = run(
        "--model",
        "config.json",
        "--gpu",
        "H200",
        "--slices",
        "--traffic",
        "shape.yaml",
        "--rate",
        80,
        "--prices",
        "prices.yaml",
    )
    assert 0 == status
    assert re.match(r"Cheapest .*: 5 x H200/3g\.71gb, 10\.50 USD .*--measured-rate", output), output[:200]
    rows = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")]
    assert {"H200", "H200/1g.35gb"} <= set(rows)
    assert ("H200/3g.71gb", "H200/1g.18gb") == (rows[0], rows[-1]), "the cheapest is first, what does not fit is last"
    assert "refused: " in output
    assert "what fits: H200/1g.35gb, " in output


def test_gpu_that_is_too_slow_has_its_row(folder):
    """A GPU that is too slow has its row and the others theirs."""
    status, output = run("--model", "config.json", "--gpu", "L4", "--gpu", "H200", "--traffic", "shape.yaml", "--json")
    assert 0 == status
    found = json.loads(output)
    assert ["H200"] == [plan["gpu"]["name"] for plan in found["plans"]]
    assert [("L4", "too slow", [])] == [(each["gpu"], each["why"], each["ways"]) for each in found["refused"]]
    assert 1 == run("--model", "config.json", "--gpu", "L4", "--traffic", "shape.yaml")[0]


@pytest.mark.parametrize(
    ("model", "gpu", "length", "weights", "way"),
    [
        ("DeepSeek-V2-Lite", "H100/1g.10gb", 16384, "29.26 GiB", "what fits: H100-80GB/3g.40gb, "),
        ("Qwen3-30B-A3B", "H100/3g.40gb", 32768, "56.87 GiB", "weights in fp8"),
    ],
)
def test_model_too_big_for_its_slice_is_refused(model, gpu, length, weights, way):
    """A model that is too big for its slice is refused with what fits."""
    status, output = run("--model", CONFIGS / f"{model}.json", "--gpu", gpu, "--max-model-len", length)
    assert 1 == status
    assert f"weights {weights}" in output
    assert way in output
    assert "vllm serve" not in output, "no figure that looks true"


# ---- the worksheet


@pytest.mark.parametrize("said", ["8e9", "8B", "8000000000"])
def test_parameters_alone_give_the_weights_and_ask_for_the_rest(folder, said):
    (folder / "few.yaml").write_text(f"model:\n  parameters: {said}\n")
    status, output = run("--traffic", "few.yaml", "--gpu", "H200", "--gpu", "H200/1g.18gb")
    assert 1 == status
    assert "16.0 GB = 14.90 GiB" in output
    assert "(bfloat16, assumed)" in output
    assert re.search(r"^refused: .*KV cache .*config\.json with --model", output, re.MULTILINE)
    assert ["128.54", "14.72"] == re.findall(r"^H200.*: .* ([\d.]+) GiB", output, re.MULTILINE)
    assert re.findall(r"^(H200.*): .*too much", output, re.MULTILINE) == ["H200/1g.18gb"]
    _, half = run("--traffic", "few.yaml", "--gpu", "H200/1g.18gb", "--gpu-memory-utilization", "0.46")
    assert "vLLM may use 7.36 GiB" in half
    status, output = run("--traffic", "few.yaml", "--gpu", "H200", "--gpu", "H200/1g.18gb", "--json")
    found = json.loads(output)
    assert (1, None, 16e9) == (status, found["kv_cache"], found["weights"]["bytes"])
    assert [True, False] == [each["weights_fit"] for each in found["gpus"]]


ONE_BY_ONE = {
    "parameters": "8B", "dtype": "bfloat16", "max_model_len": "8192", "p50_prompt_tokens": "1500",
    "p95_prompt_tokens": "4000",
    "p50_output_tokens": "300", "p95_output_tokens": "700", "ttft_p95": "500ms", "itl_p95": "25ms",
    "cost_per_1k_tokens": "0.002",
    "tensor_parallel_size": "2", "gpu_memory_utilization": "0.9", "enable_prefix_caching": "true",
    "speculative_config": "{method: ngram}",
}  # fmt: skip


@pytest.mark.parametrize("key", re.findall(r"^  (\w+):", worksheet.FORM, re.MULTILINE))
def test_flat_form_gives_a_plan_or_one_sentence(folder, key):
    """Half of the lengths is a mistake; whatever else stands alone is enough for a plan without traffic."""
    flat = "\n".join(line.strip() for line in worksheet.FORM.splitlines()).replace(
        f"{key}:", f"{key}: {ONE_BY_ONE[key]}"
    )
    (folder / "flat.yaml").write_text(flat)
    status, output = run("--traffic", "flat.yaml", "--model", "config.json", "--gpu", "H200")
    if key.endswith("_tokens") and key.startswith("p"):
        assert (2, True) == (status, output.startswith("Error: p50_")), output
    else:
        assert (0, True) == (status, "guaranteed concurrency" in output), output


def test_an_empty_form_without_a_model_asks_for_one(folder):
    (folder / "empty.yaml").write_text(worksheet.FORM)
    status, output = run("--traffic", "empty.yaml")
    assert (2, 1) == (status, output.count("\n")), output
    assert re.match("Error: .*--model DIR .*`parameters`", output)


def test_a_worksheet_names_model_and_gpu_itself(folder):
    (folder / "all.yaml").write_text("model: {config: config.json, max_model_len: 8192, name: chat}\ngpu: H200\n")
    (plan,) = told("--traffic", "all.yaml")["plans"]
    assert ("chat", "H200", 8192) == (plan["model"]["name"], plan["gpu"]["name"], plan["serving"]["max_model_len"])


def test_the_worksheet_comes_back_filled_in_and_is_one_again(folder):
    status, output = run(
        "--model",
        "config.json",
        "--gpu",
        "H200",
        "--traffic",
        "worksheet.yaml",
        "--rate",
        8,
        "--prices",
        "prices.yaml",
        "--fill",
    )
    assert 0 == status
    form = worksheet.parse(output)
    assert (8029995008, "bfloat16", 8192, 8.0, 1, 0.92, True) == (
        form.parameters,
        form.dtype,
        form.max_model_len,
        form.requests_per_second,
        form.tensor_parallel_size,
        form.gpu_memory_utilization,
        form.enable_prefix_caching,
    )
    assert form.cost_per_1k_tokens is None
    assert "8K is 8192, 8k is 8000\n" in output, "remarks stay"
    assert 0 == run("--model", "config.json", "--gpu", "H200", "--traffic", _written(folder, output))[0]


def test_filled_values_have_reasons(folder):
    """What is filled in has its true reason and remarks stay in their column."""
    (folder / "columns.yaml").write_text(
        SHAPE + "tuning:\n  max_num_seqs:\n  kv_cache_dtype:              # of the cache\n"
    )
    _, output = run("--model", "config.json", "--gpu", "H200", "--traffic", "columns.yaml", "--rate", 8, "--fill")
    assert re.search(r"max_num_seqs: \d+  # .*\bcompute\b", output)
    assert "  kv_cache_dtype: auto         # of the cache\n" in output


def _written(folder: Path, text: str) -> Path:
    (folder / "again.yaml").write_text(text)
    return folder / "again.yaml"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_whatever_is_filled_in_can_be_read_again(folder, name):
    (folder / "small.yaml").write_text(
        SHAPE.replace("1500", "500").replace("8192", "") + "tuning: {enable_prefix_caching: , max_num_seqs: }\n"
    )
    words = (
        "--model",
        CONFIGS / f"{name}.json",
        "--gpu",
        "B200",
        "--tp",
        8 if name in ("DeepSeek-V3", "Kimi-K2-Instruct") else 1,
    )
    more = ("--max-model-len", 1024, "--users", 50, "--think", "20s")
    status, output = run(*words, "--traffic", "small.yaml", *more, "--fill")
    if name == "DeepSeek-V3.2":
        assert (2, True) == (status, "deepseek_v32" in output)
        return
    assert 0 == status, output
    assert 0 == run(*words, "--traffic", _written(folder, output), *more)[0]
    assert 1024 == worksheet.parse(output).max_model_len


def test_the_bare_form_is_filled_in_from_a_log(folder):
    status, output = run(
        "--model", "config.json", "--gpu", "H200", "--log", "requests.jsonl", "--max-model-len", "8K", "--fill"
    )
    assert 0 == status
    form = worksheet.parse(output)
    assert (1149, 1284, 200, 200) == (
        form.p50_prompt_tokens,
        form.p95_prompt_tokens,
        form.p50_output_tokens,
        form.p95_output_tokens,
    )


def test_the_type_of_the_weights_is_taken_from_the_worksheet(folder):
    (folder / "eight.yaml").write_text("model: {dtype: fp8, parameters: 70B}\n")
    found = told("--model", "config.json", "--gpu", "H200", "--traffic", "eight.yaml")
    (plan,) = found["plans"]
    assert ("fp8", pytest.approx(9.08e9, rel=0.01)) == (plan["model"]["quantization"], plan["model"]["weight_bytes"])
    assert any(re.search(r"\b70e9 parameters.* 8\.03e9", note) for note in found["notes"])


@pytest.mark.parametrize("size", ["24GB", "24 gb", "24GiB"])
def test_memory_size_is_a_gpu_without_bounds_of_time(folder, size):
    """Only its memory is known, so no bound on a time follows from it."""
    found = told("--model", "config.json", "--gpu", size, "--max-model-len", "8192", "--traffic", "shape.yaml")
    (plan,) = found["plans"]
    assert "24GB" == plan["gpu"]["name"]
    assert int(24 * 0.915 * 2**30) == plan["gpu"]["usable_bytes"]
    assert not [note for note in (*found["notes"], *plan["notes"]) if "TB/s" in note]


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--model", "config.json"), "--gpu is missing: .*H200/1g.18gb"),
        (("--model", "config.json", "--gpu", "H300"), "'H300' .*did you mean H200 or H100-80GB"),
        (("--model", "config.json", "--gpu", "H200/1g.10gb"), "H200 .*'1g.10gb'; did you mean H200/1g.18gb"),
        (("--model", "config.json", "--gpu", "FOO"), "'FOO' .*A100-40GB, A100-80GB, H100-80GB"),
        (("--model", "nothing.json", "--gpu", "H200"), "nothing.json: .*no such file"),
        (
            ("--model", "meta-llama/Llama-3.1-8B", "--gpu", "H200"),
            "hf download meta-llama/Llama-3.1-8B config.json --local-dir Llama-3.1-8B",
        ),
        (
            ("--model", "config.json", "--gpu", "H200", "--max-model-len", "200k"),
            "max_model_len 200,000 .*131,072 positions",
        ),
        (
            ("--model", "config.json", "--gpu", "H200", "--max-model-len", "long"),
            "'--max-model-len': 'long' .*16384, 16K",
        ),
        (
            ("--model", "config.json", "--gpu", "H200", "--kv-dtype", "fp7"),
            "cache type 'fp7' .*auto, float16, bfloat16",
        ),
        (("--model", "config.json", "--gpu", "H200", "--tp", "3"), "tensor_parallel 3 .*32 attention heads"),
        (("--model", "config.json", "--gpu", "H200", "--tp", "0"), "Invalid value for '--tp'"),
        (("--model", "config.json", "--gpu", "H200", "--rate", "-1"), "'--rate': -1 .*more than 0"),
        (("--model", "config.json", "--gpu", "H200", "--rate", "8"), "no lengths: .*--log"),
        (("--model", "config.json", "--gpu", "H200", "--traffic", "prices.yaml"), "prices.yaml, line 1: gpu_hour "),
        (("--model", "config.json", "--gpu", "H200", "--log", "prices.yaml"), "prices.yaml: .*prompt_tokens"),
        (("--model", "config.json", "--gpu", "H200", "--log", "shape.yaml", "--log", "./shape.yaml"), "--log .*twice"),
        (("--model", "config.json", "--gpu", "H200", "--prices", "shape.yaml"), "shape.yaml"),
        (("--model", "config.json", "--gpu", "H200", "--engine-log", "x"), "belong to --live URL"),
        (
            ("--model", "config.json", "--gpu", "H200", "--max-num-seqs", "10000"),
            "max_num_seqs 10,000 .*max_num_batched_tokens 8,192",
        ),
        (("--model", "config.json", "--live", "nowhere"), "'nowhere' .*http://127.0.0.1:8000"),
        (("--model", "config.json", "--gpu", "H200", "--fill", "--json"), "choose --fill or --json"),
        (("--model", "config.json", "--gpu", "H200", "--gpu", "H100", "--fill"), "--fill takes one --gpu"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_figure(folder, words, facts):
    status, output = run(*words)
    assert 2 == status
    assert re.search(facts, output), output
    assert "GiB" not in output


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (
            {"p95_output_tokens: 300": "p95_output_tokens: 20"},
            r"traffic\.p95_output_tokens: 20 .*p50_output_tokens \(300\)",
        ),
        ({"300": "9000"}, r"p95_output_tokens: 9,000 .*max_model_len \(8,192\)"),
        ({"1500": "-1"}, r"traffic\.p50_prompt_tokens: -1 .*1 or more"),
        ({"25ms": ".nan"}, r"targets\.itl_p95: nan .*more than 0"),
        ({"25ms": "2ms"}, r"itl_p95: 2 ms .*13\.98 GiB of weights .*H200 "),
        ({"25ms": "3.125ms"}, r"itl_p95: 3\.125 ms .* 3\.1269 ms"),
    ],
)
def test_impossible_traffic_is_refused(folder, change, facts):
    text = SHAPE
    for old, new in change.items():
        text = text.replace(old, new)
    (folder / "wrong.yaml").write_text(text)
    status, output = run("--model", "config.json", "--gpu", "H200", "--traffic", "wrong.yaml", "--rate", 8)
    assert status in (1, 2)
    assert re.search(facts, output), output
    assert "slots" not in output


# ---- an engine, and the page


class _Recorded(BaseHTTPRequestHandler):
    """A page captured from vLLM 0.32."""

    def do_GET(self) -> None:
        known = {
            "/metrics": (HERE / "golden/0.32.0-before.prom").read_bytes(),
            "/version": b'{"version": "0.32.0"}',
            "/v1/models": b'{"data": []}',
        }
        body = known.get(self.path)
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Recorded)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_running_engine_is_compared_with_what_is_reckoned(folder, engine):
    status, output = run("--model", "tiny.json", "--live", engine)
    assert 0 == status
    assert "tiny, vLLM 0.32.0: " in output
    (found,) = [
        figure
        for figure in told("--model", "tiny.json", "--live", engine)["live"]["figures"]
        if figure["name"] == "KV cache tokens"
    ]
    assert {"name", "unit", "predicted", "reported", "difference", "source"} == set(found)
    assert (2097152, 2097152, 0) == (found["predicted"], found["reported"], found["difference"])


def test_figures_of_an_engine_have_their_units(folder, engine):
    _, output = run("--model", "tiny.json", "--gpu", "L4", "--live", engine)
    rows = {
        row[0]: row[1:4]
        for line in output.splitlines()
        if line.startswith("│")
        for row in [[cell.strip() for cell in line.split("│")[1:]]]
    }
    assert ["", "1.00 GiB", ""] == rows["KV cache memory"]
    assert ["2,097,152", "2,097,152", "+0.00%"] == rows["KV cache tokens"]
    assert ["", "0.0%", ""] == rows["in use"]
    assert re.search(r"by hand \(page: kv_cache_memory_bytes\).* [\d.]+ GiB$", output, re.MULTILINE)


def test_a_plan_and_an_engine_are_told_together(folder, engine):
    found = told("--model", "tiny.json", "--gpu", "L4", "--live", engine)
    assert (["L4"], "0.32.0") == ([plan["gpu"]["name"] for plan in found["plans"]], found["live"]["version"])


def test_where_no_engine_answers_that_is_said(folder):
    status, output = run("--model", "config.json", "--live", "http://127.0.0.1:9")
    assert 2 == status
    assert " http://127.0.0.1:9/metrics (" in output


def commands(text: str) -> list[str]:
    return [
        line.split("  #")[0].strip() for line in text.splitlines() if line.strip().startswith("vllm-watch capacity")
    ]


def test_every_example_of_the_page_and_of_the_help_runs(folder, engine):
    shown = [line.partition("Example:")[2].strip() for line in run("--help")[1].splitlines() if "Example:" in line]
    examples = [*shown, *(line for block in BLOCKS for line in commands(block))]
    assert len(examples) >= 7
    for trace, text in TRACES.items():
        (folder / trace).write_text(text)
    for example in examples:
        words = shlex.split(example)[2:]
        if "--live" in words:
            words = ["--model", "tiny.json", "--live", engine]
        status, output = run(*words)
        assert 0 == status, f"{example}\n{output}"


def test_the_page_shows_every_key_that_a_worksheet_may_have():
    (sheet,) = [block for block in BLOCKS if block.startswith("model:")]
    keys = set(re.findall(r"^  (\w+):", sheet, re.MULTILINE))
    fields = {name for part in worksheet.PARTS.values() for name in part.__struct_fields__}
    assert fields - {"rate_per_s", "users", "think_time_s"} == keys


def test_engines_by_role_are_counted_where_asked(folder):
    """By option or by worksheet; without, nothing is said of roles."""
    plan = ("--model", "config.json", "--gpu", "H100", "--rate", "8", "--traffic")
    assert "roles" not in told(*plan, "shape.yaml")["plans"][0]
    (folder / "apart.yaml").write_text(f"{SHAPE}tuning: {{disaggregated: true}}\n")
    found = [told(*plan, *words)["plans"][0]["roles"] for words in (("shape.yaml", "--disaggregated"), ("apart.yaml",))]
    assert found[0] == found[1]
    assert {"prefill", "decode"} == found[0].keys()
    assert "separate engines" in run(*plan, "apart.yaml")[1]
