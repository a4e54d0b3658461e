"""Results of other benchmark tools become a bench of ours, and what they do not say stays unsaid."""

from __future__ import annotations

import json

import pytest

from exporters.requests.record import ended_at
from stack.bench import result
from stack.bench.importer import imported, parse
from stack.bench.result import BadBench
from stack.bench.workload import Slo

# Written by `vllm bench serve --save-result --save-detailed` of vLLM 0.32 against a server that refused the fourth
# request; figures shortened.
VLLM = {
    "date": "20261122-032129", "endpoint_type": "vllm", "backend": "vllm", "label": None, "model_id": "tiny",
    "tokenizer_id": "tiny",
    "num_prompts": 6, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2, "duration": 0.17832936700142454,
    "completed": 5, "failed": 1,
    "total_input_tokens": 80, "total_output_tokens": 30, "request_throughput": 28.038006774061273,
    "request_goodput": None,
    "output_throughput": 168.22804064436764, "total_token_throughput": 616.836149029348,
    "input_lens": [16, 16, 16, 16, 16, 16],
    "output_lens": [6, 6, 6, 0, 6, 6],
    "ttfts": [0.02851684000052046, 0.028255903991521336, 0.036572356009855866, 0.0, 0.02738255499571096,
        0.02758227700542193],
    "itls": [
        [0.004325278001488186, 0.004496356996241957, 0.0060412880120566115, 0.0027674619923345745,
            0.0045761960063828155],
        [0.00429841699951794, 0.004501546005485579, 0.006008798998664133, 0.0028083070064894855, 0.004528166988166049],
        [0.005287341991788708, 0.00459192501148209, 0.004744108999148011, 0.0044411339913494885, 0.004549246004899032],
        [],
        [0.0037205700064077973, 0.0047004069929244, 0.004516164000960998, 0.004464797995751724, 0.0074210419988958165],
        [0.004192710999632254, 0.004294109006877989, 0.0061638269980903715, 0.0045152529928600416,
            0.0042950409988407046],
    ],
    "latencies": [0.050723421009024605, 0.05040113998984452, 0.060186112008523196, 0.0, 0.0522055359906517,
        0.05104321800172329],
    "start_times": [73250.01307721, 73250.013294756, 73250.069078836, 73250.073034324, 73250.087852754,
        73250.134285332],
    "queue_times": [0.0001464529923396185, 0.0003247960121370852, 0.05609931898652576, 0.060047663006116636,
        0.07486006199906114, 0.12128416],
    "generated_texts": [" a a a a a a", " a a a a a a", " a a a a a a", "", " a a a a a a", " a a a a a a"],
    "errors": ["", "", "", "Internal Server Error", "", ""], "max_output_tokens_per_s": 30.0,
    "max_concurrent_requests": 5, "rtfx": 0.0,
    "mean_ttft_ms": 29.66198640060611, "median_ttft_ms": 28.255903991521336, "std_ttft_ms": 3.4803055858142407,
    "p95_ttft_ms": 34.961252807988785, "p99_ttft_ms": 36.25013536948245, "mean_tpot_ms": 4.649979799869469,
    "median_tpot_ms": 4.692188199260272,
    "std_tpot_ms": 0.19920462607362027, "p95_tpot_ms": 4.916227199137211, "p99_tpot_ms": 4.95492239901796,
}  # fmt: skip
# what is left out without --save-detailed
DETAIL = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")

# From AIPerf's own page, "Working with Profile Export Files", and of the same shape.
AIPERF = [
    {
        "metadata": {"session_num": 45, "request_start_ns": 1759813207532900363, "request_end_ns": 1759813207838764604,
            "was_cancelled": False,
                     "benchmark_phase": "profiling", "cancellation_time_ns": None},
        "metrics": {
            "input_sequence_length": {"value": 550, "unit": "tokens"},
            "time_to_first_token": {"value": 255.88656799999998, "unit": "ms"},
            "request_latency": {"value": 297.52522799999997, "unit": "ms"},
            "output_sequence_length": {"value": 9, "unit": "tokens"},
            "inter_chunk_latency": {"value": [4.898437, 5.316006], "unit": "ms"},
            "inter_token_latency": {"value": 5.2048325, "unit": "ms"},
        },
        "error": None,
    },
    {
        "metadata": {"session_num": 80, "request_start_ns": 1759813208119147826, "request_end_ns": 1759813208119772754,
            "was_cancelled": True,
                     "benchmark_phase": "profiling", "cancellation_time_ns": 1759813208119772754},
        "metrics": {"error_isl": {"value": 550, "unit": "tokens"}},
        "error": {"code": 499, "type": "RequestCancellationError",
            "message": "Request was cancelled after 0.000 seconds"},
    },
    {
        "metadata": {"request_start_ns": 1759813208000000000, "request_end_ns": 1759813209000000000,
            "benchmark_phase": "profiling"},
        "metrics": {},
        "error": {"code": 503, "type": "HTTPError", "message": "words of a prompt"},
    },
    {"metadata": {"request_start_ns": 1, "request_end_ns": 2, "benchmark_phase": "warmup"}, "metrics": {},
        "error": None},
]  # fmt: skip


def vllm(*without, **other) -> str:
    return json.dumps({name: value for name, value in {**VLLM, **other}.items() if name not in without})


def lines(records) -> str:
    return "\n".join(map(json.dumps, records)) + "\n"


def test_a_result_of_vllm_is_a_run_with_its_requests():
    bench, records = parse([("a.json", vllm())])
    (run,) = bench.runs
    assert ("vllm bench serve", "a.json", "tiny", "c2") == (
        bench.tool,
        bench.title,
        bench.variants[0].engine.model,
        run.point,
    )
    assert (6, 5, {"failed": 1}) == (run.asked, run.ok, run.failed)
    first = records[0]
    assert (16, 6, 28.517, 50.723, "ok") == (
        first.prompt_tokens,
        first.completion_tokens,
        first.ttft_ms,
        first.e2e_ms,
        first.outcome,
    )
    assert first.tpot_ms == pytest.approx((50.723421 - 28.516840) / 5, abs=0.001)
    assert {1} == {result.run_of(record) for record in records}
    failed = records[3]
    assert ("upstream_error", "failed", None, None, None) == (
        failed.outcome,
        failed.reason,
        failed.ttft_ms,
        failed.e2e_ms,
        failed.completion_tokens,
    )


def test_figures_are_those_that_vllm_works_out_itself():
    """Its medians and percentiles are numpy's; ours, from the single requests, are the same to a microsecond."""
    figures = parse([("a.json", vllm())])[0].runs[0].figures
    for ours, theirs in (("ttft_ms", "ttft_ms"), ("tpot_ms", "tpot_ms")):
        for label, word in (("mean", "mean"), ("p50", "median"), ("p95", "p95"), ("p99", "p99")):
            assert figures[f"{ours}.{label}"] == pytest.approx(VLLM[f"{word}_{theirs}"], abs=1e-3)
    assert figures["qps"] == pytest.approx(VLLM["request_throughput"])
    assert figures["tokens_per_second"] == pytest.approx(VLLM["output_throughput"])
    assert figures["total_tokens_per_second"] == pytest.approx(VLLM["total_token_throughput"])
    assert figures["error_ratio"] == pytest.approx(1 / 6)
    assert "hit_ratio" not in figures
    assert "goodput_qps" not in figures


def test_a_release_without_latencies_adds_up_its_tokens():
    before, after = (parse([("a.json", text)])[1] for text in (vllm("latencies"), vllm()))
    assert [record.e2e_ms for record in after] == [record.e2e_ms for record in before]


def test_requests_end_where_they_did():
    bench, records = parse([("a.json", vllm())])
    run = bench.runs[0]
    assert run.ended_s - run.started_s == pytest.approx(VLLM["duration"])
    assert "2026-11-22T03:21:28.872Z" == records[0].ts
    assert all(run.started_s <= ended_at(record) <= run.ended_s + 0.001 for record in records if record.ts)


def test_a_slo_counts_good_answers():
    assert 4 / VLLM["duration"] == pytest.approx(
        parse([("a.json", vllm())], Slo(ttft_ms=30.0))[0].runs[0].figures["goodput_qps"]
    )


def test_without_detail_there_are_figures_and_no_requests():
    bench, records = parse([("a.json", vllm(*DETAIL))])
    (run,) = bench.runs
    assert [] == records
    assert (6, 5, {"unknown": 1}) == (run.asked, run.ok, run.failed)
    assert VLLM["p95_ttft_ms"] == run.figures["ttft_ms.p95"]
    assert "e2e_ms.p50" not in run.figures
    assert any("--save-detailed" in caveat for caveat in run.caveats)


def test_appended_results_are_runs_of_one_bench(tmp_path):
    """Appended results and several files are runs of one bench."""
    (tmp_path / "a.json").write_text(vllm() + "\n" + vllm(date="20261122-040000"))
    (tmp_path / "b.json").write_text(
        vllm(date="20261122-050000", errors=["", "", "", "Traceback ...\nTimeoutError", "", ""])
    )
    bench, records = imported([tmp_path / "a.json", tmp_path / "b.json"])
    assert [1, 2, 3] == [run.number for run in bench.runs]
    assert 18 == len({record.request_id for record in records})
    assert {"timeout": 1} == bench.runs[2].failed
    assert 1 == len(bench.workloads)
    assert bench.workload_hash == parse([("c.json", vllm(date="20261123-000000"))])[0].workload_hash
    assert bench.workload_hash != parse([("c.json", vllm(max_concurrency=4))])[0].workload_hash


def test_a_summary_of_a_sweep_has_all_its_runs():
    """`vllm bench sweep` writes a list of its results."""
    bench, _ = parse([("summary.json", f"[{vllm(max_concurrency=1)}, {vllm(max_concurrency=8)}]")])
    assert ["c1", "c8"] == [run.point for run in bench.runs]


def test_an_import_is_written_and_read_like_a_bench_of_ours(tmp_path):
    bench, records = parse([("a.json", vllm())])
    result.write(tmp_path, bench)
    result.add_requests(tmp_path, records)
    assert bench == result.read(tmp_path)
    assert records == list(result.requests(tmp_path))


@pytest.mark.parametrize(
    ("other", "point"),
    [
        ({"request_rate": 2.5, "max_concurrency": None}, "r2.5"),
        ({"request_rate": 2.5}, "r2.5-c2"),
        ({"max_concurrency": None}, "all-at-once"),
    ],
)
def test_the_load_is_named(other, point):
    assert point == parse([("a.json", vllm(**other))])[0].runs[0].point


def test_what_is_unknown_stays_unknown():
    """Python writes NaN where a mean is of nothing; a date may be missing, and a failure may have no words."""
    text = vllm("date", "failed", errors=[""] * 6).replace('"p99_tpot_ms": 4.95492239901796', '"p99_tpot_ms": NaN')
    bench, records = parse([("a.json", text)])
    assert ("upstream_error", "failed") == (records[3].outcome, records[3].reason)
    assert (0, VLLM["duration"]) == (bench.runs[0].started_s, bench.runs[0].ended_s), "when it ran is not known"
    assert sum("when it ran" in caveat for caveat in bench.runs[0].caveats) == 1
    assert (
        "tpot_ms.p99"
        not in parse([("a.json", json.dumps({**json.loads(vllm(*DETAIL)), "p99_tpot_ms": float("nan")}))])[0]
        .runs[0]
        .figures
    )


def test_an_export_of_aiperf_is_a_run_without_its_warm_up():
    bench, records = parse([("profile_export.jsonl", lines(AIPERF))])
    (run,) = bench.runs
    assert ("AIPerf", 3, 1, {"cancelled": 1, "http_503": 1}) == (bench.tool, run.asked, run.ok, run.failed)
    first = records[0]
    assert (550, 9, 255.887, 297.525) == (first.prompt_tokens, first.completion_tokens, first.ttft_ms, first.e2e_ms)
    assert first.tpot_ms == pytest.approx(5.205, abs=0.001)
    assert run.ended_s - run.started_s == pytest.approx(1.4671, abs=0.001)
    assert "words" not in repr(records)


SUMMARY = {
    "input_config": {
        "models": {"items": [{"name": "tiny"}]},
        "phases": [{"name": "warmup", "concurrency": 1}, {"name": "profiling", "concurrency": 8, "rate": 2.5}],
    }
}


def test_the_summary_beside_an_export_names_model_and_load(tmp_path):
    for load in ("a", "b"):
        (tmp_path / load).mkdir()
        (tmp_path / load / "profile_export.jsonl").write_text(lines(AIPERF))
    (tmp_path / "a" / "profile_export_aiperf.json").write_text(json.dumps(SUMMARY))
    bench, _ = imported([tmp_path / load / "profile_export.jsonl" for load in ("a", "b")])
    assert ["r2.5-c8", "unknown"] == [run.point for run in bench.runs]
    assert ("tiny", "a/profile_export.jsonl, b/profile_export.jsonl") == (bench.variants[0].engine.model, bench.title)
    assert ["no profile_export_aiperf.json" in " ".join(run.caveats) for run in bench.runs] == [False, True]
    (tmp_path / "a" / "profile_export_aiperf.json").write_text("{")
    with pytest.raises(BadBench, match=r"profile_export_aiperf\.json .*profile_export\.jsonl .*summary"):
        imported([tmp_path / "a" / "profile_export.jsonl"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty.*--save-detailed.*AIPerf.*guidellm"),
        ("{", "no whole JSON: .*--save-detailed.*AIPerf.*guidellm"),
        (vllm()[:700], "no whole JSON: .*--save-detailed.*AIPerf.*guidellm"),
        ("[]", r"no result .*\(duration, completed and model_id\).*\(metadata and metrics.*\(benchmarks\)"),
        ('{"results": {"harness": {}}}', r"no result .*\(duration, .*\(metadata .*\(benchmarks\)"),
        ('{"benchmarks": []}', r"benchmarks .*\bno metadata\.guidellm_version"),
        ('{"schema_version": "1.4", "input_config": {}}', r"summary of AIPerf.*profile_export\.jsonl"),
        (vllm(total_input_sequences=3), "pooling or embeddings"),
        (vllm(duration=-1), r"vllm bench serve: .*`float` >= 0.*`\$\.duration`"),
        (vllm(ttfts=["x"] * 6), r"vllm bench serve: .*`float`, .*`str`.*`\$\.ttfts\[0\]`"),
        (vllm(ttfts=[0.1]), "contradicts itself: 6 input_lens, 6 output_lens, 1 ttfts, "),
        (vllm(completed=6), r"contradicts itself: completed .*\b6, .*\b5 "),
        (lines([{"metadata": {}, "metrics": {}}]), r"profile_export\.jsonl .*: .*required field"),
        (lines(AIPERF[3:]), r"no request .*\bprofiling"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(text, fault):
    with pytest.raises(BadBench, match=rf"^a\.json .*{fault}.*$"):
        parse([("a.json", text)])


def test_results_that_do_not_belong_together_are_refused(tmp_path):
    for name, text, kind in (("b.json", vllm(model_id="other"), "models"), ("b.jsonl", lines(AIPERF), "tools")):
        with pytest.raises(BadBench, match=f"different {kind}") as caught:
            parse([("a.json", vllm()), (name, text)])
        assert str(caught.value).startswith(f"a.json and {name} ")
    with pytest.raises(BadBench, match=r"gone\.json .*: No such file"):
        imported([tmp_path / "gone.json"])
