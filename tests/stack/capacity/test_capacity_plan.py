"""Traffic, worksheet and plan: how many requests fit, how many replicas are needed, what binds, what does not fit and
what would."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.accounting.prices import ApiPrice, GpuPrice, Prices
from exporters.requests.record import RequestRecord, timestamp
from stack.capacity import fit, kv, model, recommend, roles, throughput, worksheet
from stack.capacity import gpus as gpu_models
from stack.capacity.fit import DoesNotFit
from stack.capacity.kv import BadServing, Serving
from stack.capacity.plan import (
    CACHE_SHARE,
    MEASURED_SHARE,
    Plan,
    PlanTargets,
    TooSlow,
    plan,
    replica_hour,
    replicas_for,
    steady_rate,
)
from stack.capacity.plan_text import as_json
from stack.capacity.traffic import (
    BadTraffic,
    in_flight,
    of_log,
    of_shape,
    rate_of_users,
    request_s,
    resident_tokens,
    within,
)
from stack.config import BadConfig
from stack.gateway import check

GIB = 2**30
CONFIGS = Path(__file__).parents[2] / "golden/configs"


def shape_of(name: str) -> model.ModelShape:
    return model.shape(json.loads((CONFIGS / f"{name}.json").read_text()), name)


LLAMA = shape_of("Llama-3.1-8B-Instruct")
H200, H100 = gpu_models.gpu_named("H200"), gpu_models.gpu_named("H100")
EIGHT = replace(of_shape(1500, 1500, 300, 300), rate_per_s=8.0, ttft_s=0.4, tpot_s=0.025)
T0 = 1_760_000_400.0


# ---- formulas


def test_littles_law_for_requests_and_tokens():
    """8 a second, 1,500 tokens in and 300 out, 0.4 s to the first and 25 ms for each: 63 in flight, 103,800 tokens,
    12.7 GiB of an 8B's cache."""
    assert pytest.approx(7.9) == request_s(0.4, 300, 0.025)
    assert pytest.approx(63.2) == in_flight(8, 0.4, 300, 0.025)
    assert pytest.approx(103_800) == resident_tokens(8, 1500, 0.4, 300, 0.025)
    assert 12.7 == round(resident_tokens(8, 1500, 0.4, 300, 0.025) * kv.token_bytes(LLAMA, Serving(8192)) / GIB, 1)


def test_traffic_says_the_same_as_the_formulas():
    assert (pytest.approx(7.9), pytest.approx(63.2), pytest.approx(103_800)) == (
        EIGHT.time_s,
        EIGHT.in_flight,
        EIGHT.resident_tokens,
    )


def test_users_who_think_make_a_rate():
    """100 people, 7.9 s for a reply and 32.1 s to read it: 2.5 requests a second, of which 19.75 are there at once."""
    assert pytest.approx(2.5) == rate_of_users(100, 32.1, 7.9)
    traffic = replace(EIGHT, rate_per_s=None, users=100.0, think_s=32.1)
    assert (pytest.approx(2.5), pytest.approx(19.75)) == (traffic.arrivals_per_s, traffic.in_flight)


def test_users_who_do_not_think_are_all_there_at_once():
    assert pytest.approx(100) == replace(EIGHT, rate_per_s=None, users=100.0).in_flight


def test_what_is_not_given_is_named_and_no_figure_is_made_up():
    traffic = of_shape(1500, 1500, 300, 300)
    assert ("requests_per_second or concurrent_users", "ttft_p95", "itl_p95") == traffic.missing
    assert (None, None, None, None) == (
        traffic.time_s,
        traffic.arrivals_per_s,
        traffic.in_flight,
        traffic.resident_tokens,
    )


@given(st.floats(1e-4, 1e4), st.floats(1e-6, 10.0), st.floats(0.01, 100.0))
def test_steady_rate_has_the_requested_p95(mean, square, most):
    """At the steady rate the 95th percentile is what was asked."""
    rate = steady_rate(mean, square, most)
    assert pytest.approx(most, rel=1e-6) == rate * mean + 1.6448536 * math.sqrt(rate * square)


def test_the_steady_rate_holds_in_a_simulation():
    """Requests that come by chance, each for 10 s with 1 of 50 places: more than 50 are there in about 5 % of the
    looks."""
    rng, places, hold_s = random.Random(7), 50, 10.0
    rate = steady_rate(hold_s / places, hold_s / places**2, 1.0)
    over = looks = 0
    ends: list[float] = []
    now = 0.0
    while looks < 40_000:
        now += rng.expovariate(rate)
        ends = [end for end in ends if end > now]
        looks, over = looks + 1, over + (len(ends) > places)
        ends.append(now + hold_s)
    assert 0.02 < over / looks < 0.07


lengths = st.tuples(st.integers(1, 4000), st.floats(1.0, 8.0)).map(lambda pair: (pair[0], pair[0] * pair[1]))


@given(lengths, lengths, st.floats(0.01, 100), st.floats(0, 10), st.floats(0.001, 0.2))
def test_more_requests_or_longer_ones_never_need_less(prompt, output, rate, ttft_s, tpot_s):
    def needs(factor: float, rate_per_s: float) -> tuple[float, float]:
        shape = of_shape(*(factor * length for length in (*prompt, *output)))
        traffic = replace(shape, rate_per_s=rate_per_s, ttft_s=ttft_s, tpot_s=tpot_s)
        assert traffic.in_flight is not None
        assert traffic.resident_tokens is not None
        return traffic.in_flight, traffic.resident_tokens

    here = needs(1, rate)
    for more in (needs(2, rate), needs(1, 2 * rate)):
        assert all(large >= small for large, small in zip(more, here, strict=True))


@given(lengths, lengths)
def test_a_shape_has_the_percentiles_that_were_given(prompt, output):
    traffic = of_shape(*prompt, *output)
    prompts = [p for p, _ in traffic.sizes]
    for share, length in zip((0.5, 0.95), prompt, strict=True):
        assert sum(p <= math.ceil(length) for p in prompts) / len(prompts) >= share - 0.05
        assert sum(p >= math.floor(length) for p in prompts) / len(prompts) >= 1 - share - 0.05
    assert min(prompts) <= traffic.prompt_tokens.mean <= max(prompts)


# ---- traffic that cannot be


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ((1500, 1000, 300, 300), r"p95_prompt_tokens: 1000 .*p50_prompt_tokens \(1500\)"),
        ((1500, 1500, 300, 200), r"p95_output_tokens: 200 .*p50_output_tokens \(300\)"),
        ((0, 1500, 300, 300), "p50_prompt_tokens: 0 .*1 or more"),
        ((-5, 1500, 300, 300), "p50_prompt_tokens: -5 .*1 or more"),
        ((1500, math.nan, 300, 300), "p95_prompt_tokens: nan .*1 or more"),
        ((1500, 1500, 300, math.inf), "p95_output_tokens: inf .*1 or more"),
    ],
)
def test_lengths_that_cannot_be_are_refused(given, facts):
    with pytest.raises(BadTraffic, match=facts):
        of_shape(*given)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s: 0 .*more than 0"),
        ({"rate_per_s": math.nan}, "rate_per_s: nan .*more than 0"),
        ({"tpot_s": -1.0}, "tpot_s: -1 .*more than 0"),
        ({"ttft_s": -0.1}, r"ttft_s: -0\.1 .*0 or more"),
        ({"users": 5.0}, "users: .*rate"),
        ({"cached_share": 1.5}, r"cached_share: 1\.5 .*0 to 1"),
    ],
)
def test_rates_and_times_that_cannot_be_are_refused(change, facts):
    with pytest.raises(BadTraffic, match=facts):
        replace(EIGHT, **change)


def test_lengths_beyond_the_longest_request_are_refused_or_cut():
    with pytest.raises(BadTraffic, match=r"p95_output_tokens: 9,000 .*max_model_len \(8,192\)"):
        within(of_shape(100, 100, 9000, 9000), 8192)
    shape = of_shape(2000, 6000, 300, 900)
    cut = within(shape, 8192)
    assert max(prompt + output for prompt, output in cut.sizes) <= 8192
    too_long = [prompt + output > 8192 for prompt, output in shape.sizes]
    assert cut.notes[-1].startswith(f"{sum(too_long) / len(too_long):.1%} of the requests")
    assert EIGHT == within(EIGHT, 8192)


# ---- a request log


def record(ended_s: float = 0.0, **more: object) -> RequestRecord:
    said = {
        "outcome": "ok",
        "prompt_tokens": 1000,
        "completion_tokens": 100,
        "ttft_ms": 500.0,
        "tpot_ms": 20.0,
        "model": "chat",
        **more,
    }
    return RequestRecord(request_id="r", ts=timestamp(T0 + ended_s), **said)  # type: ignore[arg-type]


def test_log_gives_lengths_times_and_busiest_minute():
    """Two minutes of one a second, then one of three."""
    found = of_log([record(second) for second in (*range(120), *(120 + third / 3 for third in range(181)))], "log")
    assert (pytest.approx(3.0, rel=0.02), 0.5, pytest.approx(0.02)) == (found.rate_per_s, found.ttft_s, found.tpot_s)
    assert (1000, 1000, 1000) == (found.prompt_tokens.p50, found.prompt_tokens.p95, found.prompt_tokens.mean)
    assert "busiest minute" in found.source


def test_waiting_in_the_gateway_is_no_time_in_the_engine():
    assert 0.2 == of_log([record(queue_ms=300.0)], "log").ttft_s


def test_slow_tokens_count_by_how_many_they_are():
    """The mean time of a request is what Little's law needs: 900 fast tokens and 100 slow ones, not one fast and one
    slow request."""
    found = of_log([record(completion_tokens=900, tpot_ms=10.0), record(completion_tokens=100, tpot_ms=110.0)], "log")
    assert pytest.approx(0.02) == found.tpot_s


def test_what_did_not_end_well_counts_nowhere_and_is_told():
    found = of_log(
        [
            record(),
            record(outcome="rejected", completion_tokens=None),
            record(outcome="client_abort", completion_tokens=3),
        ],
        "log",
    )
    assert ((1000, 100),) == found.sizes
    assert found.notes[0].startswith("2 further requests")


def test_a_record_of_several_texts_is_several_requests():
    found = of_log(
        [record(n=3, completion_tokens=300), record(prompts=2, prompt_tokens=100, completion_tokens=20)], "log"
    )
    assert {(1000, 100): 3, (50, 10): 2} == {size: found.sizes.count(size) for size in set(found.sizes)}


def test_short_lab_logs_have_no_rate():
    """The short form of lab logs has lengths and times but no rate."""
    found = of_log(
        [
            RequestRecord(
                request_id="a", prompt_tokens=1842, completion_tokens=419, ttft_ms=820, tpot_ms=34, finish_reason="stop"
            )
        ],
        "log",
    )
    assert (((1842, 419),), None, 0.82) == (found.sizes, found.rate_per_s, found.ttft_s)
    assert "has no times" in found.source


def test_a_log_of_several_models_is_not_mixed():
    both = [record(), record(model="code", prompt_tokens=9000)]
    with pytest.raises(BadTraffic, match=r"chat, code; .*--served-model-name"):
        of_log(both, "log")
    assert 9000 == of_log(both, "log", "code").prompt_tokens.p95
    with pytest.raises(BadTraffic, match=r"for cod .*completion_tokens"):
        of_log(both, "log", "cod")


def test_a_long_log_is_stood_for_by_few_sizes():
    rng = random.Random(3)
    sizes = [(round(rng.lognormvariate(6, 1)) + 1, round(rng.lognormvariate(5, 1)) + 1) for _ in range(20_000)]
    found = of_log([record(prompt_tokens=p, completion_tokens=o) for p, o in sizes], "log")
    exact = replace(found, sizes=tuple(sizes), rate_per_s=1.0)
    assert 1000 == len(found.sizes)
    for lengths, values in ((found.prompt_tokens, [p for p, _ in sizes]), (found.output_tokens, [o for _, o in sizes])):
        ordered = sorted(values)
        assert (ordered[9_999], ordered[18_999], sum(values) / 20_000) == (lengths.p50, lengths.p95, lengths.mean)
    assert pytest.approx(exact.resident_tokens, rel=0.02) == replace(found, rate_per_s=1.0).resident_tokens


def test_prefix_hits_are_counted_where_the_engine_reported_them():
    found = of_log([record(cached_tokens=600), record(cached_tokens=0), record()], "log")
    assert 0.3 == found.cached_share


# ---- the worksheet

FLAT = "\n".join(line.strip() for line in worksheet.FORM.splitlines())  # as a copy without indentation has it


@pytest.mark.parametrize("text", [worksheet.FORM, FLAT, "", "model:\ntraffic: {}\n"])
def test_an_empty_worksheet_says_nothing(text):
    assert worksheet.Worksheet() == worksheet.parse(text)
    assert worksheet.parse(text).traffic() is None


@pytest.mark.parametrize("indent", ["  ", ""])
def test_a_worksheet_is_read_as_people_write_it(indent):
    form = worksheet.parse(f"""\
model:
{indent}parameters: 8B
{indent}dtype: bf16
{indent}max_model_len: 16K
traffic:
{indent}p50_prompt_tokens: 1.5k
{indent}p95_prompt_tokens: 6000
{indent}p50_output_tokens: 300
{indent}p95_output_tokens: 900
{indent}users: 200
{indent}think_time: 30s
targets:
{indent}ttft_p95: 500ms
{indent}itl_p95: 0.025
{indent}cost_per_1k_tokens: $0.002
tuning:
{indent}tensor_parallel_size: 2
{indent}gpu_memory_utilization: 90%
{indent}enable_prefix_caching: true
{indent}speculative_config: {{method: ngram}}
""")
    assert (8e9, "bf16", 16384, 1500, 200, 30.0) == (
        form.parameters, form.dtype, form.max_model_len, form.p50_prompt_tokens, form.concurrent_users, form.think_time,
    )  # fmt: skip
    assert (0.5, 0.025, 0.002, 2, 0.9, True, '{"method": "ngram"}') == (
        form.ttft_p95,
        form.itl_p95,
        form.cost_per_1k_tokens,
        form.tensor_parallel_size,
        form.gpu_memory_utilization,
        form.enable_prefix_caching,
        form.speculative_config,
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8e9", 8e9),
        (8e9, 8e9),
        (8_000_000_000, 8e9),
        ("70b", 70e9),
        ("1.5 B", 1.5e9),
        ("350M", 350e6),
        ("8,000", 8000.0),
    ],
)
def test_numbers_of_parameters(text, number):
    assert number == worksheet.count(text)


@pytest.mark.parametrize(("text", "number"), [("16k", 16_000), ("16K", 16_384), (16384, 16384), ("25.6k", 25_600)])
def test_tokens_are_written_as_for_vllm(text, number):
    assert number == worksheet.tokens(text)


@pytest.mark.parametrize(
    ("text", "number"), [("500ms", 0.5), ("0.5s", 0.5), (0.5, 0.5), ("0.5", 0.5), ("2 min", 120.0)]
)
def test_times(text, number):
    assert number == worksheet.seconds(text)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("model:\n  parameters: 8B\n  max_model_lenn: 8192\n", r"line 3: model\.max_model_lenn .*mean max_model_len\?"),
        ("modell:\n  parameters: 8B\n", r"line 1: modell .*mean model\?"),
        ("model:\n  parameters: eight\n", r"line 2: model\.parameters: 'eight' .*8e9 or 8B"),
        ("model:\n  parameters: 8\n", r"line 2: model\.parameters: 8 .*8e9 or 8B"),
        ("model:\n  parameters: .inf\n", r"line 2: model\.parameters: .*larger"),
        ("tuning:\n  speculative_config: ngram\n", r"line 2: tuning\.speculative_config: 'ngram' .*{method: ngram"),
        ("tuning:\n  speculative_config: {a: .nan}\n", r"line 2: tuning\.speculative_config: {'a': nan} .*{method: "),
        ("model:\n  parameters: -8B\n", r"line 2: model\.parameters: -8e\+09 .*more than 0"),
        ("model:\n  dtype: bfloat1\n", r"line 2: model\.dtype: 'bfloat1' .*mean bfloat16\?"),
        (
            "traffic:\n  p50_prompt_tokens: 9\n  p95_prompt_tokens: 8\n",
            r"line 3: traffic\.p95_prompt_tokens: 8 .*p50_prompt_tokens \(9\)",
        ),
        ("traffic:\n  p50_prompt_tokens: .nan\n", r"line 2: traffic\.p50_prompt_tokens: nan .*1 or more"),
        ("traffic:\n  p50_prompt_tokens: 0\n", r"line 2: traffic\.p50_prompt_tokens: 0 .*1 or more"),
        (
            "traffic:\n  requests_per_second: 2\n  rate_per_s: 3\n",
            r"line 3: traffic\.rate_per_s: 3 .*requests_per_second",
        ),
        ("traffic:\n  requests_per_second: 2\n  users: 3\n", r"traffic\.concurrent_users: .*rate"),
        ("traffic:\n  cached_share: 3\n", r"line 2: traffic\.cached_share: 3 .*0 to 1"),
        ("targets:\n  ttft_p95: 500\n", r"line 2: targets\.ttft_p95: 500 .*500ms or 500s"),
        ("targets:\n  itl_p95: fast\n", r"line 2: targets\.itl_p95: 'fast' .*0\.5s or 500ms"),
        ("tuning:\n  tensor_parallel_size: 0\n", r"line 2: tuning\.tensor_parallel_size: 0 .*1 or more"),
        ("tuning:\n  gpu_memory_utilization: 1.2\n", r"line 2: tuning\.gpu_memory_utilization: 1\.2 .*0 to 1"),
        ("tuning:\n  gpu_memory_utilization: 0\n", r"line 2: tuning\.gpu_memory_utilization: 0 .*more than 0"),
        ("tuning:\n  enable_prefix_caching: yes\n", r"line 2: tuning\.enable_prefix_caching: 'yes' .*true"),
    ],
)
def test_a_mistake_in_the_worksheet_is_told_with_its_line(text, facts):
    with pytest.raises(BadConfig, match=facts):
        worksheet.parse(text, "w.yaml")


def test_half_of_the_lengths_is_not_enough():
    """Half of the lengths is not enough and one percentile stands for the other."""
    with pytest.raises(BadTraffic, match="p50_output_tokens and p95_output_tokens are empty"):
        worksheet.Worksheet(p50_prompt_tokens=100.0).traffic()
    traffic = worksheet.Worksheet(p50_prompt_tokens=100.0, p95_output_tokens=50.0).traffic()
    assert traffic is not None
    assert ((100, 50),) == traffic.sizes
    assert any("p95_prompt_tokens is empty" in note for note in traffic.notes)


ENTRIES = {
    "parameters": worksheet.Entry("8029995008", "counted"),
    "ttft_p95": worksheet.Entry(None, "yours"),
    "dtype": worksheet.Entry("x", "never"),
}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        (
            "model:\n  parameters:   # ask Kim\n  dtype: bf16 # said\ntargets:\n  ttft_p95:\n",
            "model:\n  parameters: 8029995008   # ask Kim\n  dtype: bf16 # said\ntargets:\n  ttft_p95:  # yours\n",
        ),
        (
            "model:\nparameters:\ntargets:\nttft_p95:",
            "model:\nparameters: 8029995008  # counted\ntargets:\nttft_p95:  # yours",
        ),
        ("model: {parameters: , dtype: bf16}\n", "model: {parameters: 8029995008 , dtype: bf16}\n"),
        ("model:\n  parameters: null\n", "model:\n  parameters: 8029995008  # counted\n"),
    ],
)
def test_only_what_is_empty_is_filled_in(text, filled):
    assert filled == worksheet.fill(text, ENTRIES)


@given(
    st.sets(st.sampled_from(["parameters", "p50_prompt_tokens", "tensor_parallel_size", "max_model_len"])),
    st.integers(10_000, 2**20),
)
def test_filled_worksheet_says_what_was_filled_in(names, value):
    """A filled worksheet is a worksheet that says what was filled in."""
    form = worksheet.parse(worksheet.fill(worksheet.FORM, {name: worksheet.Entry(str(value), "so") for name in names}))
    assert dict.fromkeys(names, value) == {
        name: getattr(form, name) for name in names if getattr(form, name) is not None
    }
    assert all(getattr(form, name) is None for name in ("dtype", "ttft_p95"))


# ---- does it fit

CODER = shape_of("DeepSeek-V2-Lite")  # the shape of DeepSeek-Coder-V2-Lite
QWEN = shape_of("Qwen3-30B-A3B")  # the shape of Qwen3-Coder-30B-A3B


def refusal(shape: model.ModelShape, gpu: str, **serving: object) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as refused:
        plan(shape, Serving(**{"max_model_len": 16384, **serving}), gpu_models.gpu_named(gpu))  # type: ignore[arg-type]
    return refused.value


def test_31_gigabytes_do_not_fit_a_slice_of_10():
    """Thirty one gigabytes of weights do not go into a slice of ten."""
    refused = refusal(CODER, "H100/1g.10gb")
    for fact in ("DeepSeek-V2-Lite", "H100-80GB/1g.10gb", "weights 29.26 GiB"):
        assert fact in refused.what
    assert refused.ways[0].startswith("H100-80GB/3g.40gb, ")
    assert not [way for way in refused.ways if "--tensor-parallel-size" in way], "one GPU is enough"
    smaller = [
        each
        for each in gpu_models.slices(H100)
        if each.memory_bytes < gpu_models.gpu_named("H100/3g.40gb").memory_bytes
    ]
    assert smaller
    assert not [each.name for each in smaller if fit.fits(CODER, Serving(16384), each)]
    assert plan(CODER, Serving(16384), gpu_models.gpu_named("H100/3g.40gb")).guaranteed >= 1


def test_61_gigabytes_fit_a_slice_of_40_in_8_bits_only():
    """Sixty one gigabytes do not go into a slice of forty unless in eight bits."""
    refused = refusal(QWEN, "H100/3g.40gb", max_model_len=32768)
    assert "weights 56.87 GiB" in refused.what
    (eight,) = [way for way in refused.ways if way.startswith("weights in fp8")]
    assert "about 29.01 GiB" in eight
    assert plan(fit.quantized(QWEN, "fp8"), Serving(32768), gpu_models.gpu_named("H100/3g.40gb")).guaranteed >= 1


def test_too_long_context_names_the_longest():
    """The longest is the longest: one token more and vLLM does not start."""
    refused = refusal(LLAMA, "L4", max_model_len=131_072)
    assert "max_model_len 131,072: " in refused.what
    assert "16.00 GiB" in refused.what
    (way,) = [way for way in refused.ways if way.startswith("--max-model-len")]
    longest = int(way.split()[1])
    assert fit.fits(LLAMA, Serving(longest, max_num_batched_tokens=2048), gpu_models.gpu_named("L4"))
    assert not fit.fits(LLAMA, Serving(longest + 1, max_num_batched_tokens=2048), gpu_models.gpu_named("L4"))


def test_a_cache_in_eight_bits_is_offered_where_it_is_enough():
    most = fit.longest(LLAMA, Serving(131_072), gpu_models.gpu_named("A10"))
    refused = refusal(LLAMA, "A10", max_model_len=int(most * 1.8))
    assert "--kv-cache-dtype fp8 (check the quality)" in refused.ways
    assert "--kv-cache-dtype fp8 (check the quality)" not in refusal(LLAMA, "A10", max_model_len=int(most * 2.2)).ways


def test_a_model_is_not_split_over_slices():
    refused = refusal(LLAMA, "H200/1g.18gb", tensor_parallel=2)
    assert refused.what.startswith("H200/1g.18gb ")
    assert "MIG slice" in refused.what
    assert "2 whole H200 with --tensor-parallel-size 2" in refused.ways


def test_a_share_below_vllms_own_is_raised_first():
    refused = refusal(LLAMA, "H200", gpu_memory_utilization=0.1)
    assert any(way.startswith("--gpu-memory-utilization 0.92") for way in refused.ways)
    assert not [way for way in refusal(LLAMA, "A10", max_model_len=131_072).ways if "utilization" in way]


def test_several_gpus_are_named_where_one_is_too_small():
    assert (
        "2 whole H100-80GB with --tensor-parallel-size 2"
        in refusal(shape_of("Llama-3.1-70B-Instruct"), "H100", max_model_len=8192).ways
    )


def test_what_nothing_holds_alone_is_said_so():
    huge = replace(LLAMA, parameters=10**13, weight_bytes=2e13)
    refused = refusal(huge, "L4")
    assert () == refused.ways
    assert fit.NO_WAY in str(refused)


@given(
    st.sampled_from([each.name for each in gpu_models.GPUS]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["auto", "fp8"]),
    st.integers(64, 131_072),
)
def test_a_plan_and_its_refusal_never_disagree(gpu, tensor_parallel, cache_dtype, length):
    """Whatever fits has a plan with at least one request; whatever does not names longer lengths never."""
    serving, it = Serving(length, cache_dtype, tensor_parallel=tensor_parallel), gpu_models.gpu_named(gpu)
    assert fit.fits(LLAMA, serving, it) == _plans(LLAMA, serving, it)


def _plans(shape: model.ModelShape, serving: Serving, gpu: gpu_models.GpuModel) -> bool:
    try:
        return plan(shape, serving, gpu).guaranteed >= 1
    except DoesNotFit:
        return False


# ---- how many

NAMES = (
    "Llama-3.1-8B-Instruct",
    "Qwen2.5-7B-Instruct",
    "DeepSeek-V2-Lite",
    "gemma-3-1b-it",
    "gpt-oss-20b",
    "Mistral-7B-v0.1",
)
EVERY = {name: shape_of(name) for name in NAMES}
each_model = st.sampled_from(NAMES)


def test_guaranteed_is_five_times_too_careful_for_this_traffic():
    """The worst case of 8,192 tokens beside what 8 requests a second of 1,500 + 300 tokens really hold."""
    it = plan(LLAMA, Serving(8192), H200, EIGHT)
    assert it.expected is not None
    assert 5.0 == round(it.expected / it.guaranteed, 1)
    assert pytest.approx(63.2 / it.expected, rel=0.01) == it.cache_share


def test_a_published_gpu_of_forty_thousand_tokens():
    """4.91 GiB at 131,072 bytes a token: 0.31 of a request of 131,072 tokens, and 15.7 of 2,560."""
    cache = kv.cache(LLAMA, Serving(131_072), 4.91 * GIB)
    assert pytest.approx(40_208, abs=32) == cache.tokens
    assert 0.31 == round(cache.concurrency, 2)
    assert 15.7 == round(
        cache.concurrency
        * kv.request_bytes(LLAMA, Serving(131_072), 131_072)
        / kv.request_bytes(LLAMA, Serving(131_072), 2560),
        1,
    )


@given(each_model, st.integers(1, 3000), st.floats(1, 2.5), st.integers(1, 1000), st.floats(1, 4), st.booleans())
def test_guaranteed_is_never_more_than_expected(name, prompt, prompt_spread, output, output_spread, timed):
    """Requests that go into max_model_len hold no more than those that fill it."""
    traffic = of_shape(prompt, prompt * prompt_spread, output, output * output_spread)
    it = plan(EVERY[name], Serving(16_384), H200, replace(traffic, ttft_s=1.0, tpot_s=0.03) if timed else traffic)
    assert it.expected is not None
    assert it.at_p95 is not None
    assert it.guaranteed <= it.at_p95 * (1 + 1e-9)
    assert it.guaranteed <= it.expected * (1 + 1e-9)


@given(each_model, st.floats(0.1, 500), st.floats(1.01, 4), st.integers(50, 1500), st.integers(10, 500))
def test_replicas_are_enough_and_grow_with_the_traffic(name, rate, factor, prompt, output):
    def planned(rate_per_s: float, longer: float = 1) -> Plan:
        traffic = replace(
            of_shape(prompt * longer, 2 * prompt * longer, output * longer, 2 * output * longer), rate_per_s=rate_per_s
        )
        return plan(
            EVERY[name], Serving(16_384), H200, replace(traffic, ttft_s=0.5, tpot_s=0.03), PlanTargets(0.5, 0.03)
        )

    it = planned(rate)
    assert it.replicas is not None
    assert it.binds is not None
    assert it.cache_share is not None
    assert rate / it.replicas <= it.binds.rate_per_s * (1 + 1e-6)
    assert it.cache_share / it.replicas <= CACHE_SHARE
    assert it.replicas == 1 or rate / (it.replicas - 1) > it.binds.rate_per_s
    assert it.replicas <= (planned(rate * factor).replicas or 0)
    assert it.replicas <= (planned(rate, factor).replicas or 0)


def test_cache_binds_long_and_speed_binds_many_requests():
    """The cache binds where requests are long and the speed where they are many."""
    long = replace(of_shape(30_000, 30_000, 300, 300), rate_per_s=1.0, ttft_s=5.0, tpot_s=0.05)
    assert "KV cache" == _binds(
        plan(LLAMA, Serving(32_768), gpu_models.gpu_named("L40S"), long, PlanTargets(itl_p95_s=0.05))
    )
    slow = replace(of_shape(4000, 4000, 50, 50), rate_per_s=1.0, ttft_s=0.5, tpot_s=0.02)
    assert "compute" == _binds(plan(LLAMA, Serving(8192), H200, slow))
    decode = replace(of_shape(10, 10, 2000, 2000), rate_per_s=1.0, ttft_s=0.1, tpot_s=0.0055)
    assert "memory bandwidth" == _binds(plan(LLAMA, Serving(8192), H100, decode, PlanTargets(itl_p95_s=0.0055)))


def _binds(it: Plan) -> str | None:
    return it.binds.name if it.binds else None


def test_replicas_are_a_minimum_without_measurement():
    """Without a measurement the replicas are the fewest and with one they are known."""
    guess, known = (
        plan(LLAMA, Serving(8192), H200, replace(EIGHT, rate_per_s=80.0), measured_per_s=rate) for rate in (None, 10.0)
    )
    assert (False, True) == (guess.measured, known.measured)
    assert (80 / (10 * MEASURED_SHARE), "measurement") == (known.replicas, _binds(known))
    assert [True, False] == [any("--measured-rate" in note for note in it.notes) for it in (guess, known)]
    assert [True, False] == [as_json(it)["replicas"]["at_least"] for it in (guess, known)]


def test_without_a_rate_or_times_nothing_is_said_of_replicas():
    for traffic in (replace(EIGHT, rate_per_s=None), replace(EIGHT, tpot_s=None), None):
        it = plan(LLAMA, Serving(8192), H200, traffic, prices=Prices(gpu_hour=2.0))
        assert (None, None) == (it.replicas, it.cost and it.cost.per_hour)
    assert any(
        "not given: requests_per_second or concurrent_users" in note
        for note in plan(LLAMA, Serving(8192), H200, of_shape(9, 9, 9, 9)).notes
    )


def test_nothing_binds_where_the_cache_may_fill_first():
    """Compute alone is a limit without times, and the cache is not reckoned."""
    it = plan(LLAMA, Serving(8192), H200, replace(EIGHT, tpot_s=None))
    assert (["compute"], None) == ([limit.name for limit in it.limits], it.binds)


def test_of_a_mixture_of_experts_no_speed_is_guessed():
    it = plan(QWEN, Serving(8192), H200, EIGHT, PlanTargets(itl_p95_s=1e-6))
    assert ["KV cache"] == [limit.name for limit in it.limits]
    assert any("experts" in note for note in it.notes)


def test_users_that_one_replica_takes():
    """What binds, times the time of a request and of thinking."""
    it = plan(LLAMA, Serving(8192), H200, replace(EIGHT, rate_per_s=None, users=100.0, think_s=32.1))
    assert it.binds is not None
    assert pytest.approx(it.binds.rate_per_s * 40) == it.users_per_replica
    assert it.users_per_replica == plan(LLAMA, Serving(8192), H200, replace(EIGHT, think_s=32.1)).users_per_replica, (
        "how many there are is not asked"
    )
    hasty = plan(LLAMA, Serving(8192), H200, replace(EIGHT, rate_per_s=None, users=100.0))
    assert [False, True] == [any("--think" in note for note in each.notes) for each in (it, hasty)]


def test_embeddings_leave_out_the_table():
    """Llama 3.1 8B: 8.03e9 parameters, of which 128,256 x 4,096 are the table and as many the head."""
    table = 128_256 * 4096
    assert 2 * (8_029_995_008 - 2 * table) == throughput.operations(LLAMA, 1, 0)
    assert 2 * (8_029_995_008 - table) == throughput.operations(LLAMA, 0, 1)
    assert throughput.operations(QWEN, 1, 1) is None


# ---- targets that cannot be


def test_a_token_cannot_come_faster_than_its_weights_are_read():
    with pytest.raises(TooSlow, match=r"itl_p95: 1 ms .*13\.98 GiB of weights .*H100-80GB .*4\.4804 ms \(3\.35 TB/s\)"):
        plan(LLAMA, Serving(8192), H100, targets=PlanTargets(itl_p95_s=0.001))
    plan(LLAMA, Serving(8192), H100, targets=PlanTargets(itl_p95_s=0.0045))
    plan(LLAMA, Serving(8192, tensor_parallel=8), H100, targets=PlanTargets(itl_p95_s=0.001))
    speculative = plan(
        LLAMA, Serving(8192), H100, targets=PlanTargets(itl_p95_s=0.001), tuning=recommend.Tuning(speculative="{}")
    )
    assert any("unless speculative decoding" in note for note in speculative.notes)


def test_prompt_reading_is_bound_by_compute():
    """A prompt cannot be read faster than it is computed unless it is cached."""
    long = of_shape(100_000, 100_000, 10, 10)
    with pytest.raises(TooSlow, match=r"ttft_p95: 100 ms .*100,000 prompt tokens \(p95\): H100-80GB .*1\.41 s"):
        plan(LLAMA, Serving(131_072), H100, long, PlanTargets(ttft_p95_s=0.1), recommend.Tuning(prefix_caching=False))
    notes = plan(LLAMA, Serving(131_072), H100, long, PlanTargets(0.1)).notes
    assert any("1.41 s" in note and "prefix cache" in note for note in notes)


# ---- cost

PRICES = Prices(gpu_hour=2.0, gpus=(GpuPrice("H200", 4.2, {"1g.18gb": 0.5}),), api=(ApiPrice("chat", 0.001, 0.004),))


@pytest.mark.parametrize(
    ("gpu", "gpus", "hour"),
    [
        ("H200", 1, 4.2),
        ("H200", 4, 16.8),
        ("L4", 1, 2.0),
        ("H200/1g.18gb", 1, 0.5),
        ("H200/1g.35gb", 1, 4.2 / 4),
        ("H200/2g.35gb", 1, 4.2 * 2 / 7),
        ("H200/3g.71gb", 1, 2.1),
        ("H200/7g.141gb", 1, 4.2),
    ],
)
def test_what_a_replica_costs(gpu, gpus, hour):
    """A slice without a price costs the larger of its shares of compute and of memory."""
    assert pytest.approx(hour) == replica_hour(PRICES, gpu_models.gpu_named(gpu), gpus)


def test_cost_of_this_traffic_beside_the_api():
    """10 requests a second of 1,800 tokens on 3 replicas at 4.2 an hour; the API takes 0.0027 for each."""
    it = plan(
        LLAMA,
        Serving(8192),
        H200,
        replace(EIGHT, rate_per_s=10.0),
        PlanTargets(cost_per_1k_tokens=0.001),
        prices=PRICES,
        measured_per_s=5.0,
        name="chat",
    )
    cost = it.cost
    assert cost is not None
    assert (3, pytest.approx(12.6)) == (it.replicas, cost.per_hour)
    assert pytest.approx(12.6 / (10 * 3600 * 1800) * 1000) == cost.per_1k_tokens
    assert pytest.approx(0.0027 / 1.8) == cost.api_per_1k_tokens
    assert pytest.approx(0.0027 * 36_000) == cost.api_per_hour
    assert pytest.approx(12.6 / 3600 / 0.0027) == cost.break_even_per_s
    assert as_json(it)["cost"]["target_kept"] is True


def test_bound_on_cost_can_miss_but_not_meet_a_target():
    """A cost that is a bound can miss a target but not keep it."""
    missed, open_ = (
        plan(LLAMA, Serving(8192), H200, EIGHT, PlanTargets(cost_per_1k_tokens=target), prices=PRICES)
        for target in (1e-9, 1.0)
    )
    assert (False, None) == (as_json(missed)["cost"]["target_kept"], as_json(open_)["cost"]["target_kept"])


# ---- flags and the gateway


def test_the_flags_are_those_that_were_reckoned_with():
    serving = Serving(8192, "fp8", tensor_parallel=2, max_num_batched_tokens=4096, gpu_memory_utilization=0.9)
    tuning = recommend.Tuning(prefix_caching=False, speculative='{"method": "ngram"}', max_num_seqs=64)
    it = plan(LLAMA, serving, H200, EIGHT, tuning=tuning, name="chat")
    assert (
        "vllm serve Llama-3.1-8B-Instruct --served-model-name chat --max-model-len 8192 --gpu-memory-utilization 0.9"
        " --max-num-seqs 64 "
        "--max-num-batched-tokens 4096 --tensor-parallel-size 2 --kv-cache-dtype fp8 --no-enable-prefix-caching "
        """--speculative-config '{"method": "ngram"}'"""
    ) == it.command


def test_requests_at_once_are_no_more_than_the_tokens_of_a_step():
    """vLLM refuses max_num_seqs beyond max_num_batched_tokens, and lowers its own choice."""
    with pytest.raises(BadServing, match=r"max_num_seqs 200 .*max_num_batched_tokens 100"):
        plan(LLAMA, Serving(8192, max_num_batched_tokens=100), H200, EIGHT, tuning=recommend.Tuning(max_num_seqs=200))
    it = plan(LLAMA, Serving(1024, max_num_batched_tokens=20), H200, of_shape(10, 10, 10, 10))
    assert ("--max-num-seqs", "20") in [(flag.option, flag.value) for flag in it.flags]
    assert 20 == plan(LLAMA, Serving(1024, max_num_batched_tokens=20), H200).gateway.slots


def test_a_folder_is_served_by_its_path_under_its_name():
    """The path as a shell takes it, and the name that the gateway's limits are for."""
    it = plan(replace(LLAMA, folder="my models/Llama"), Serving(8192), H200)
    assert it.command.startswith("vllm serve 'my models/Llama' --served-model-name Llama-3.1-8B-Instruct ")
    assert '"Llama-3.1-8B-Instruct":' in it.gateway.yaml


def test_concurrency_is_bound_by_cache_and_speed():
    """No more requests at once than the cache holds nor than speed allows."""
    by_cache = plan(LLAMA, Serving(8192), gpu_models.gpu_named("L40S"), replace(EIGHT, rate_per_s=1.0, tpot_s=0.1))
    assert by_cache.expected is not None
    assert ("--max-num-seqs", str(int(by_cache.expected))) in [(flag.option, flag.value) for flag in by_cache.flags]
    by_speed = plan(LLAMA, Serving(8192), H200, EIGHT, measured_per_s=10.0)
    assert 63 == by_speed.gateway.slots, "8 a second, 7.9 s each"


@pytest.mark.parametrize(
    ("shape", "gpu", "length", "traffic", "name"),
    [
        (LLAMA, "H200", 8192, EIGHT, "chat"),
        (LLAMA, "H200", 8192, None, "chat"),
        (shape_of("gpt2"), "B200", 1024, None, "gpt2"),  # the cache holds more than vLLM takes at once
        (LLAMA, "A10", 16_000, None, ""),  # one slot: fewer than the shipped bands keep free
        (
            LLAMA,
            "A10",
            16_000,
            replace(of_shape(12_000, 12_000, 900, 900), rate_per_s=1.0, ttft_s=2.0, tpot_s=0.2),
            'odd: "name" # it',
        ),
        (QWEN, "H200", 32_768, replace(of_shape(2000, 9000, 300, 900), rate_per_s=3.0, ttft_s=2.0, tpot_s=0.2), "code"),
        (shape_of("gemma-3-1b-it"), "L4", 32_768, replace(EIGHT, rate_per_s=500.0), "small"),
        (shape_of("Nemotron-H-56B-Base-8K"), "B200", 8192, EIGHT, "hybrid"),
    ],
)
def test_the_gateway_takes_the_limits(tmp_path, shape, gpu, length, traffic, name):
    it = plan(shape, Serving(length), gpu_models.gpu_named(gpu), traffic, name=name)
    path = tmp_path / "teams.yaml"
    path.write_text(it.gateway.yaml)
    found = check.check(path)
    assert [] == found["mistakes"]
    capacity = found["capacity"]
    assert capacity["slots"] <= (it.replicas or 1) * fit.default_seqs(it.gpu)
    assert (it.gateway.slots, it.gateway.tokens, it.gateway.queue or 1024) == (
        capacity["slots"],
        capacity["tokens"],
        capacity["queue"],
    )
    assert [(name or shape.name, length)] == [(each["model"], each["max_model_len"]) for each in found["models"]]
    assert length <= capacity["tokens"] <= it.cache.tokens * (it.replicas or 1)


@given(each_model, st.integers(10, 5000), st.integers(10, 2000))
def test_requests_within_the_token_budget_fit_the_cache(name, prompt, output):
    """As many of this size as the budget lets in at once hold at most the cache."""
    shape, serving = EVERY[name], Serving(8192)
    it = plan(shape, serving, gpu_models.gpu_named("L40S"), of_shape(prompt, prompt, output, output))
    number = it.gateway.tokens // (prompt + output)
    assert number * kv.request_bytes(shape, serving, prompt + output) <= it.kv_bytes * (1 + 1e-9)


# ---- the twin in JSON


def test_the_twin_has_only_numbers_that_json_has():
    for traffic in (EIGHT, None, of_shape(9, 99, 9, 99)):
        json.dumps(as_json(plan(LLAMA, Serving(8192), H200, traffic, prices=PRICES)), allow_nan=False)


def test_replicas_do_not_grow_by_rounding():
    assert 3 == replicas_for(0.3, 0.1)
    assert 4 == replicas_for(0.3001, 0.1)


# ---- prefill and decode on separate engines


def test_each_role_has_limits_of_its_own():
    """A prefill engine computes prompts alone, a decode engine holds and extends replies: the one is short of compute,
    the other of cache."""
    it = plan(LLAMA, Serving(8192), H100, replace(EIGHT, rate_per_s=40.0), PlanTargets(0.4, 0.025))
    prefill, decode = roles.by_role(it)
    assert ("prefill", "decode") == (prefill.role, decode.role)
    rates = {(each.role, limit.name): limit.rate_per_s for each in (prefill, decode) for limit in each.limits}
    flops = throughput.flops_of(LLAMA, it.serving, H100)
    assert pytest.approx(flops / throughput.operations(LLAMA, 1500, 0)) == rates["prefill", "compute"]
    assert pytest.approx(flops / throughput.operations(LLAMA, 0, 300)) == rates["decode", "compute"]
    both = {limit.name: limit.rate_per_s for limit in it.limits}
    assert both["memory bandwidth"] == rates["decode", "memory bandwidth"], "only replies are bound by it"
    assert both["KV cache"] < rates["decode", "KV cache"] < rates["prefill", "KV cache"]
    assert prefill.engines == replicas_for(40.0, min(limit.rate_per_s for limit in prefill.limits))
    assert decode.engines == replicas_for(40.0, min(limit.rate_per_s for limit in decode.limits))


def test_the_cache_of_each_prompt_crosses_the_link():
    """1,500 tokens are 94 blocks of 16, each of 2 MiB; on two GPUs each holds half of it."""
    moved = roles.transferred_bytes(plan(LLAMA, Serving(8192), H100, EIGHT))
    assert 94 * 16 * 131_072 == moved
    assert moved == roles.transferred_bytes(plan(LLAMA, Serving(8192, tensor_parallel=2), H100, EIGHT))


def test_what_is_not_known_of_a_role_is_no_engine():
    assert () == roles.by_role(plan(LLAMA, Serving(8192), H100))
    no_rate = plan(LLAMA, Serving(8192), H100, replace(EIGHT, rate_per_s=None))
    assert [None, None] == [each.engines for each in roles.by_role(no_rate)]
