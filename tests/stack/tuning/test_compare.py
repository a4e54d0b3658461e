"""`compare` and `report` on benches that were saved: what they are called, what is refused, gates, and what is left of
a bench that broke off."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from exporters.events import log as events
from exporters.events.log import TuningEvent
from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.bench import result
from stack.bench.result import Bench, BenchEngine, BenchVariant, Run
from stack.cli import main
from tests.support.request_dataset import made_requests, make_dataset

T0 = 1_760_000_000.0
WORKLOAD: dict[str, Any] = {"name": "small", "input_tokens": 20, "concurrency": 4, "seed": "fresh", "cache": "cold"}


def saved(
    folder: Path,
    ttft_ms: float = 100.0,
    variants: tuple[str, ...] = ("tiny",),
    runs: int = 6,
    seed: int = 0,
    errors: float = 0.0,
    **more: Any,
) -> Path:
    """A bench by hand: each further variant is half as slow as the one before; runs take turns."""
    folder.mkdir(parents=True)
    rng = random.Random(f"{folder} {seed}")
    given = {"workloads": (WORKLOAD,), **more}
    found = []
    for number in range(runs * len(variants)):
        at = number % len(variants) if number // len(variants) % 2 == 0 else len(variants) - 1 - number % len(variants)
        slow = ttft_ms / 2**at * rng.uniform(0.99, 1.01)
        figures = {
            "ttft_ms.p50": slow,
            "ttft_ms.p95": 2 * slow,
            "tpot_ms.p50": 5 * rng.uniform(0.99, 1.01),
            "error_ratio": errors,
        }
        begun = T0 + 10 * number
        ok = round(100 * (1 - errors))
        found.append(
            Run(
                number=number + 1, variant=variants[at], workload="small", point="c4", started_s=begun,
                ended_s=begun + 9, seed=seed + number, asked=100,
                ok=ok, figures=figures,
            )
        )  # fmt: skip
    engines = [
        BenchVariant(name=variant, engine=BenchEngine(url=f"http://127.0.0.1:{8000 + at}", model="tiny", started_s=1.0))
        for at, variant in enumerate(variants)
    ]
    bench = Bench(
        id="b",
        title="t",
        tool="test",
        started_s=T0,
        ended_s=T0 + 1000,
        variants=tuple(engines),
        runs=tuple(found),
        workload_hash="h",
        **{"order": "interleaved" if len(variants) > 1 else "single", **given},
    )
    result.write(folder, bench)
    records = [
        RequestRecord(request_id=f"b-{run.number}-{n}", outcome="ok", variant=run.variant, prompt_tokens=20)
        for run in found
        for n in range(3)
    ]
    result.add_requests(folder, records)
    return folder


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def verdict(told: Result, figure: str = "ttft_ms.p50") -> tuple[str, str, str]:
    (judgement,) = json.loads(told.stdout)["judgements"]
    (found,) = [finding for finding in judgement["findings"] if finding["metric"]["figure"] == figure]
    return judgement["a"], judgement["b"], found["verdict"]


# --- two benches


def test_two_benches_compare_as_sequential(tmp_path):
    """Two benches are compared as sequential and called by their folders."""
    before, after = saved(tmp_path / "before"), saved(tmp_path / "after", 50.0, seed=100)
    told = call("compare", before, after, "--json")
    assert ("before", "after", "better") == verdict(told)
    (judgement,) = json.loads(told.stdout)["judgements"]
    assert not judgement["controlled"]
    assert any("uncontrolled: sequential" in caveat for caveat in judgement["caveats"])
    shown = call("compare", before, after)
    assert 1 == shown.output.count("uncontrolled: sequential: "), "once, as a check"


@pytest.mark.parametrize("given", ["", "bench.json"])
def test_folders_of_one_name_are_distinct(tmp_path, given):
    """Folders of one name are told apart by what is above them."""
    one, other = saved(tmp_path / "mon" / "base"), saved(tmp_path / "tue" / "base", seed=100)
    assert ("mon/base", "tue/base") == verdict(call("compare", one / given, other / given, "--json"))[:2]


def test_a_folder_may_be_given_as_a_point(tmp_path, monkeypatch):
    other = saved(tmp_path / "there", seed=100)
    monkeypatch.chdir(saved(tmp_path / "here"))
    assert ("here", "there") == verdict(call("compare", ".", other, "--json"))[:2]


def test_workloads_of_one_name_that_ask_otherwise_are_named(tmp_path):
    longer = {**WORKLOAD, "input_tokens": 999, "runs": 9, "concurrency": [4, 8]}
    told = call("compare", saved(tmp_path / "a"), saved(tmp_path / "b", seed=100, workloads=(longer,)))
    assert re.search(r"^note: .* small .*\binput_tokens$", told.output, re.M)


def test_the_same_seed_against_the_same_engine_is_a_trap(tmp_path):
    told = call("compare", saved(tmp_path / "a"), saved(tmp_path / "b", 50.0), "--json")
    assert ("a", "b", "inconclusive") == verdict(told)


# --- variants of one bench


def test_two_variants_of_one_bench_need_no_names(tmp_path):
    told = call("compare", saved(tmp_path / "o", variants=("off", "on")), "--json")
    assert ("off", "on", "better") == verdict(told)
    assert json.loads(told.stdout)["judgements"][0]["controlled"]


def test_a_bench_that_is_given_twice_is_one(tmp_path):
    folder = saved(tmp_path / "o", variants=("off", "on"))
    told = call("compare", folder, folder / ".." / "o", "--variant", "on", "off", "--json")
    assert ("on", "off", "worse") == verdict(told)
    assert json.loads(told.stdout)["judgements"][0]["controlled"]


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["three"], r"three .* a, b, c; .*--variant"),
        (["three", "--variant", "a", "x"], r"three .* variant x; .* a, b, c$"),
        (["one"], r"one .* tiny; .*--variant"),
        (["empty", "one"], "empty .*no runs: killed"),
        (["one", "empty"], "empty .*no runs: killed"),
        (["empty"], "empty .*no runs: killed"),
        (["one", "three", "empty"], "3 benches"),
        (["one", "elsewhere"], "one .*elsewhere .*in common"),
        (["one", "nothing"], r"nothing .*: nothing/bench\.json: .*`bench run`"),
        (["one", "torn"], r"torn/bench\.json .*: .*truncated"),
        (["one", "three", "--event", "e"], "--event .*--log .*--data"),
        ([], "--log .*--data .*--event .*--variant"),
        (["one", "three", "--max-p95-regression", "much"], "'--max-p95-regression': 'much' .* 15%"),
        (["one", "three", "--max-error-rate", "nan"], "'--max-error-rate': 'nan' .* 15%"),
        (["one", "three", "--max-error-rate", "-1%"], "'--max-error-rate': '-1%' .* 15%"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(tmp_path, monkeypatch, arguments, pattern):
    saved(tmp_path / "one")
    saved(tmp_path / "three", variants=("a", "b", "c"))
    saved(tmp_path / "empty", variants=(), runs=0, cut="killed")
    other = result.read(saved(tmp_path / "elsewhere"))
    text = (tmp_path / "elsewhere" / result.BENCH).read_text().replace('"c4"', '"c8"')
    assert other.runs
    (tmp_path / "elsewhere" / result.BENCH).write_text(text)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / result.BENCH).write_text('{"id": "b", "tit')
    monkeypatch.chdir(tmp_path)
    told = call("compare", *arguments)
    assert 2 == told.exit_code, told.output
    assert re.search(pattern, told.output.splitlines()[-1]), told.output


# --- gates


@pytest.mark.parametrize(
    ("gate", "status", "gates"),
    [
        (["--max-p95-regression", "15%"], 3, r"GATE max-p95-regression: ttft_ms\.p95: .* 15 % "),
        (["--max-p95-regression", "60"], 0, None),
        (["--max-error-rate", "0.5%"], 3, r"GATE max-error-rate: error_ratio: 2 % .* after .* 0\.5 % "),
        (["--max-error-rate", "2.5%"], 0, None),
        ([], 0, None),
    ],
)
def test_a_gate_that_is_not_kept_is_exit_status_3(tmp_path, gate, status, gates):
    folders = saved(tmp_path / "before", 100.0), saved(tmp_path / "after", 150.0, seed=100, errors=0.02)
    told = call("compare", *folders, *gate)
    lines = [line for line in told.output.splitlines() if line.startswith("GATE ")]
    assert (status, len(lines)) == (told.exit_code, int(gates is not None)), told.output
    assert gates is None or re.match(gates, lines[0])
    twin = call("compare", *folders, *gate, "--json")
    assert (status, status == 3) == (twin.exit_code, bool(json.loads(twin.stdout)["broken"]))


# --- live traffic


def log_of(path: Path, *variants: str | None) -> Path:
    records = [
        RequestRecord(
            request_id=f"r{at}", ts=timestamp(T0 + at * 20), model="m", variant=variants[at % len(variants)],
            outcome="ok", prompt_tokens=20,
            completion_tokens=5, ttft_ms=100.0, tpot_ms=5.0, e2e_ms=120.0, status=200,
        )
        for at in range(400)
    ]  # fmt: skip
    result.add_requests(path, records)
    return path / result.REQUESTS


def test_log_variants_and_events_are_consistent_with(tmp_path):
    """Variants and events of a log get at most consistent with."""
    log = log_of(tmp_path, "stable", "canary")
    told = call("compare", "--log", log, "--variant", "stable", "canary")
    assert 0 == told.exit_code, told.output
    assert re.search(r"canary .+ stable$", told.output.splitlines()[0].rstrip())
    events.append(tmp_path / "events.jsonl", TuningEvent(id="e1", at_s=T0 + 4000, kind="change", what="flipped"))
    told = call(
        "compare", "--log", log, "--event", "e1", "--events", tmp_path / "events.jsonl", "--window", "1h", "--json"
    )
    assert 0 == told.exit_code, told.output
    assert {"judgements", "broken"} == set(json.loads(told.stdout))


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ([], "--log .*--data, .*--event ID .*--variant A B"),
        (["--event", "e", "--variant", "a", "b"], "--log .*--data, .*--event ID .*--variant A B"),
        (["--event", "e"], "--event .*--events FILE"),
        (["--event", "e", "--events", "none.jsonl"], r"none\.jsonl"),
        (
            ["--event", "e", "--events", "events.jsonl"],
            r"events\.jsonl .* event e; `vllm-watch events --events events\.jsonl`",
        ),
    ],
)
def test_mistakes_about_live_traffic_are_one_sentence(tmp_path, monkeypatch, arguments, pattern):
    monkeypatch.chdir(tmp_path)
    events.append(tmp_path / "events.jsonl", TuningEvent(id="e1", at_s=T0, kind="change", what="flipped"))
    told = call("compare", "--log", log_of(tmp_path, None), *arguments)
    assert 2 == told.exit_code, told.output
    assert re.search(pattern, told.output.splitlines()[-1]), told.output
    assert "Traceback" not in told.output


# --- the report


@pytest.mark.parametrize(("variants", "runs"), [(("tiny",), 6), (("off", "on"), 6), (("a", "b", "c"), 2), ((), 0)])
def test_every_bench_has_a_report(tmp_path, variants, runs):
    folder = saved(tmp_path / "o", variants=variants, runs=runs, cut=None if runs else "it was stopped by hand")
    if not runs:
        (folder / result.REQUESTS).unlink()
    told = call("report", folder, "--lab", "-o", tmp_path / "page.html")
    assert 0 == told.exit_code, told.output
    assert 7 == sum(line.startswith(("pass ", "fail ", "not measured ")) for line in told.output.splitlines())
    assert {".html", ".md", ".csv", ".json"} == {path.suffix for path in tmp_path.glob("page.*")}


def test_a_report_reads_requests_from_a_data_set(tmp_path):
    """Those of the time of the bench: others of the data set are another story."""
    folder = saved(tmp_path / "o")
    bench = result.read(folder)
    of_bench = made_requests(50, start_s=bench.started_s + 1, step_s=(bench.ended_s - bench.started_s) / 60)
    before = made_requests(50, seed=2, start_s=bench.started_s - 90_000)
    log, data = tmp_path / "requests.jsonl", tmp_path / "data"
    log.write_bytes(b"".join(map(to_line, of_bench)))
    make_dataset(data, [*before, *of_bench])
    page = ("report", folder, "--lab", "-o", tmp_path / "page.html")
    plain, by_log, by_data = (call(*page, *more) for more in ((), ("--log", log), ("--data", data)))
    assert [0, 0, 0] == [told.exit_code for told in (plain, by_log, by_data)]
    assert plain.output != by_log.output == by_data.output


def test_variants_never_compared_are_compared_for_the_report(tmp_path):
    told = call("report", saved(tmp_path / "o", variants=("off", "on")))
    assert 0 == told.exit_code, told.output
    assert "better" in (tmp_path / "o" / "report.md").read_text()


@pytest.mark.parametrize("name", ["bench.html", "verdicts.html"])
def test_a_report_never_overwrites_what_it_is_of(tmp_path, name):
    folder = saved(tmp_path / "o")
    told = call("report", folder, "-o", folder / name)
    assert 2 == told.exit_code
    assert re.search(rf"/o/{name} .* {Path(name).stem}\.json .* -o$", told.output), told.output
    assert 6 == len(result.read(folder).runs)


def test_verdicts_that_are_none_are_one_sentence(tmp_path):
    folder = saved(tmp_path / "o")
    (folder / "verdicts.json").write_text("[{")
    told = call("report", folder)
    assert 2 == told.exit_code, told.output
    assert re.search(r"/o/verdicts\.json .*verdicts.*: .*truncated", told.output), told.output
