"""Real files of three load generators: each is read, and the same load of the same engine gets the same verdict.

How the files in tests/golden/load-generators were made, on 2026-11-26: a vLLM 0.32.0 on the CPU with the lab's tiny
random model, on one core, with `--max-num-seqs 4 --no-enable-prefix-caching`; the tools, one after the other, on the
other core of the same machine, which other programs used as well. Prompts of 64 tokens and answers of 16, by chat, at
1, 4 and 16 requests at once with guidellm, 1 and 4 with vLLM, and 1 with AIPerf. The engine takes four, so 16 wait in
its queue. The tools ran minutes apart, AIPerf with another start of the engine, so figures differ and only verdicts are
compared.

    vllm bench serve --backend openai-chat --random-input-len 64 --random-output-len 16 --random-range-ratio 0
        --ignore-eos --max-concurrency N --num-warmups 2 --save-result --save-detailed
    guidellm run --profile '{"kind": "concurrent", "streams": [1, 4, 16]}' --constraint kind=max_requests,count=32
        --data kind=synthetic_text,prompt_tokens=64,output_tokens=16
        --metrics '{"kind": "generative", "sample_size": 0}'
    aiperf profile --endpoint-type chat --streaming --isl 64 --osl 16 --extra-inputs ignore_eos:true --concurrency N

Afterwards texts, paths, addresses, host names and ids of requests and workers were removed, and of guidellm's file all
parts of a request but its times and tokens, and all metrics but the number of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from stack.bench.importer import imported, parse
from stack.bench.load_curve import LoadCurve, curves
from stack.bench.result import BadBench
from stack.bench.workload import NO_SLO, Slo

FOLDER = Path(__file__).parents[2] / "golden" / "load-generators"
VLLM = [FOLDER / "vllm-0.32.0" / f"concurrency-{load}.json" for load in (1, 4)]
GUIDELLM = [FOLDER / "guidellm-0.8.1" / "concurrency.json"]
AIPERF = [FOLDER / "aiperf-0.13.0" / f"concurrency-{load}" / "profile_export.jsonl" for load in (1,)]
TOOLS = {"vllm bench serve": VLLM, "guidellm": GUIDELLM, "AIPerf": AIPERF}
each_tool = pytest.mark.parametrize("tool", TOOLS)


def curve_of(tool: str, slo: Slo = NO_SLO) -> LoadCurve:
    (curve,) = curves(imported(TOOLS[tool], slo)[0])
    return curve


def guidellm_report() -> dict:
    return json.loads(GUIDELLM[0].read_text())


# ---- verdicts


WITHIN, BEYOND = "within", "beyond"


@pytest.mark.parametrize(
    ("slo", "verdicts"),
    [
        (Slo(ttft_ms=400.0), {"c1": WITHIN, "c4": WITHIN, "c16": BEYOND}),
        (Slo(e2e_ms=600.0), {"c1": WITHIN, "c4": WITHIN, "c16": BEYOND}),
        (Slo(ttft_ms=400.0, tpot_ms=300.0), {"c1": WITHIN, "c4": WITHIN, "c16": BEYOND}),
        (Slo(ttft_ms=60_000.0), {"c1": WITHIN, "c4": WITHIN, "c16": WITHIN}),
        (Slo(tpot_ms=0.01), {"c1": BEYOND, "c4": BEYOND, "c16": BEYOND}),
    ],
    ids=str,
)
@each_tool
def test_the_same_loads_get_the_same_verdicts(tool: str, slo: Slo, verdicts: Mapping[str, str]):
    """The last load within is the highest that this tool measured and that is within."""
    curve = curve_of(tool, slo)
    measured = [point.label for point in curve.points]
    assert {label: verdicts[label] for label in measured} == {
        point.label: point.verdict(slo.limits) for point in curve.points
    }
    last = curve.last_within(slo.limits)
    assert [label for label in measured if verdicts[label] == WITHIN][-1:] == ([last.label] if last else [])


@each_tool
def test_every_request_and_the_model_are_read(tool: str):
    bench, records = imported(TOOLS[tool])
    assert (tool, "tiny") == (bench.tool, bench.variants[0].engine.model)
    assert len(records) == sum(run.asked for run in bench.runs) == sum(run.ok for run in bench.runs) >= 16
    assert {16} == {record.completion_tokens for record in records}
    assert all(record.ttft_ms and record.tpot_ms and record.e2e_ms and record.ts for record in records)


# ---- figures


def test_times_are_those_of_guidellm_itself():
    """Its time between tokens ends with the last token, ours a little later with the answer."""
    _, records = imported(GUIDELLM)
    own = [each for benchmark in guidellm_report()["benchmarks"] for each in benchmark["requests"]["successful"]]
    assert [each["time_to_first_token_ms"] for each in own] == pytest.approx(
        [record.ttft_ms for record in records], abs=0.01
    )
    assert [1000 * each["request_latency"] for each in own] == pytest.approx(
        [record.e2e_ms for record in records], abs=0.01
    )
    for record, each in zip(records, own, strict=True):
        assert record.tpot_ms is not None
        assert 0 <= record.tpot_ms - each["inter_token_latency_ms"] < 5


def test_times_to_first_token_are_those_of_aiperf_itself():
    for run, path in zip(imported(AIPERF)[0].runs, AIPERF, strict=True):
        own = json.loads(path.with_name("profile_export_aiperf.json").read_text())["time_to_first_token"]
        assert run.figures["ttft_ms.p50"] == pytest.approx(own["p50"], rel=0.01)
        assert run.figures["ttft_ms.p95"] == pytest.approx(own["p95"], rel=0.01)


def test_guidellms_own_slo_holds_where_none_is_given():
    report = guidellm_report()
    for benchmark in report["benchmarks"]:
        benchmark["config"]["slo"] = {"ttft_ms": 400.0, "e2el_ms": 9000.0}
    bench, _ = parse([("a.json", json.dumps(report))])
    assert {"ttft_ms": 400.0, "e2e_ms": 9000.0} == bench.slo
    assert "goodput_qps" in bench.runs[0].figures
    assert {"tpot_ms": 1.0} == parse([("a.json", json.dumps(report))], Slo(tpot_ms=1.0))[0].slo


def test_requests_in_flight_at_the_end_are_a_caveat_of_their_run():
    report = guidellm_report()
    report["benchmarks"][2]["metrics"]["request_totals"]["incomplete"] = 7
    first, _, third = parse([("a.json", json.dumps(report))])[0].runs
    (caveat,) = set(third.caveats) - set(first.caveats)
    assert re.search(r"\b7 requests .*\bc16\b", caveat)


def test_warm_up_and_failures_of_guidellm():
    report = guidellm_report()
    first = report["benchmarks"][0]
    ends = sorted(each["info"]["timings"]["request_end"] for each in first["requests"]["successful"])
    first["start_time"] = (ends[3] + ends[4]) / 2
    failed = first["requests"]["successful"].pop()
    first["requests"]["errored"].append({**failed, "info": {**failed["info"], "error": "ReadTimeout('')"}})
    first["metrics"]["request_totals"] |= {"successful": len(ends) - 1, "errored": 1}
    bench, _records = parse([("a.json", json.dumps(report))])
    assert (len(ends) - 4, {"timeout": 1}) == (bench.runs[0].asked, bench.runs[0].failed)


# ---- bad input


@pytest.mark.parametrize("path", [VLLM[0], GUIDELLM[0], AIPERF[0]], ids=("vllm", "guidellm", "aiperf"))
def test_a_file_that_is_cut_off_is_one_sentence(path: Path):
    text = path.read_text()
    for end in (1, len(text) // 2, len(text) - 3):
        with pytest.raises(BadBench, match=r"^a\.json .*JSON: .*--save-detailed.*$"):
            parse([("a.json", text[:end])])


def changed(**metadata: object) -> dict:
    report = guidellm_report()
    return {**report, "metadata": {**report["metadata"], **metadata}}


def without(*place: str | int) -> dict:
    report: dict = guidellm_report()
    *way, last = place
    inner = report
    for step in way:
        inner = inner[step]
    del inner[last]
    return report


def thinned() -> dict:
    report = guidellm_report()
    report["benchmarks"][0]["config"]["sample_size"] = 10
    del report["benchmarks"][0]["requests"]["successful"][10:]
    return report


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (changed(version=1, guidellm_version="0.6.1"), r"version 1 .*guidellm 0\.6\.1.*version 2 .*guidellm 0\.7"),
        (without("metadata", "guidellm_version"), r"no metadata\.guidellm_version"),
        ({**guidellm_report(), "benchmarks": []}, "no benchmark"),
        (without("benchmarks", 1, "start_time"), r"guidellm 0\.8\.1: .*`start_time`.*`\$\.benchmarks\[1\]`"),
        (
            without("benchmarks", 0, "config", "strategy"),
            r"guidellm 0\.8\.1: .*`strategy`.*`\$\.benchmarks\[0\]\.config`",
        ),
        (thinned(), r"\b10 .*\b\d+ answers.*\bsample_size 10\b"),
    ],
    ids=("version", "no version", "empty", "no time", "no load", "sampled"),
)
def test_another_report_of_guidellm_is_one_sentence(report: dict, fault: str):
    with pytest.raises(BadBench, match=rf"^a\.json .*{fault}.*$"):
        parse([("a.json", json.dumps(report))])


def test_a_load_without_a_request_is_one_sentence():
    report = guidellm_report()
    report["benchmarks"][1]["requests"]["successful"] = []
    report["benchmarks"][1]["metrics"]["request_totals"]["successful"] = 0
    with pytest.raises(BadBench, match=r"no request .*\bc4\b"):
        parse([("a.json", json.dumps(report))])


def test_files_of_two_tools_are_refused():
    with pytest.raises(BadBench, match=r"concurrency\.json .* tools;"):
        imported([VLLM[0], *GUIDELLM])


def test_a_summary_of_aiperf_is_not_its_export():
    with pytest.raises(BadBench, match=r"summary of AIPerf.*profile_export\.jsonl"):
        imported([AIPERF[0].with_name("profile_export_aiperf.json")])
