"""The tuning loop against real vLLM engines, through the commands people call: what a flip did, what noise alone does,
and the books of it all.

Two engines on the CPU that stand side by side and differ in prefix caching alone. The last test kills one of them, so
it stays the last."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporters.catalogue import exposition_parser, vllm
from stack.bench import result
from stack.bench.result import Bench
from stack.tuning.comparison import HEADLINE
from tests.support.engines import CONTEXT, Engine, Engines, get
from tests.support.load_generator_pair import ROOT, command, ours, theirs
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

BLOCK = 32  # tokens of the engines' cache blocks
JSON = {
    "type": "object", "properties": {"severity": {"enum": ["low", "medium", "high"]}, "duplicate": {"type": "boolean"}},
    "required": ["severity", "duplicate"], "additionalProperties": False,
}  # fmt: skip
TALKS = {
    "workloads": [
        {"name": "talk", "endpoint": "chat", "shared_prefix_tokens": 100, "input_tokens": {"min": 150, "max": 300},
            "turns": 3, "turn_tokens": 40,
         "output_tokens": 12, "concurrency": [2], "requests": 12, "warm_up": 1},
        *(
            {"name": name, "endpoint": "chat", "input_tokens": {"min": 350, "max": 500}, "output_tokens": 120,
                "temperature": 1.0,
             "ignore_eos": False, "concurrency": [4], "requests": 8, "warm_up": 1,
             "json": {"schema": JSON, "structured": structured}}
            for name, structured in (("told", False), ("held", True))
        ),
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def engines(real_engines: Engines) -> Iterator[dict[str, Engine]]:
    """Both on one core; the other one is for the clients."""
    found = {"off": real_engines.own("--no-enable-prefix-caching"), "on": real_engines.shared()}
    yield {name: engine.up() for name, engine in found.items()}
    found["off"].end()


Tuned = tuple[subprocess.CompletedProcess[str], Path]


def tuned(folder: Path, experiment: Any, *options: object) -> Tuned:
    """What `vllm-watch tune` said, and the folder it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.yaml").write_text(json.dumps(experiment))
    done = command("tune", folder / "experiment.yaml", "--out", folder / "out", *options)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done, folder / "out"


def tuned_until(expected: Callable[[dict[str, Any]], bool], folder: Path, experiment: Any) -> Tuned:
    """The same, made once more where the verdicts are not as expected: with a machine that somebody else makes busy, or
    by the chance that a judge has, that may happen once. Twice it is a fault."""
    found = tuned(folder / "first", experiment)
    return found if expected(judged(found[1])) else tuned(folder / "again", experiment)


@pytest.fixture(scope="module")
def flipped(engines: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Prefix caching off and on, with a quarter of the shipped lengths."""
    variants = {
        name: {"url": engine.spec.address, "what": f"prefix caching {name}"} for name, engine in engines.items()
    }
    experiment = {"title": "Prefix caching", "workload": "shared-prefix", "scale": 0.25, "arms": variants}
    return tuned_until(
        lambda found: "better" == found["ttft_ms.p50"]["verdict"], tmp_path_factory.mktemp("flipped"), experiment
    )


def judged(folder: Path) -> dict[str, Any]:
    """The findings on the headline metrics, by figure."""
    (judgement,) = json.loads((folder / "verdicts.json").read_bytes())
    names = [metric.figure for metric in HEADLINE]
    return {found["metric"]["figure"]: found for found in judgement["findings"] if found["metric"]["figure"] in names}


def test_prefix_caching_is_better_and_the_cache_says_why(flipped):
    done, folder = flipped
    found, bench = judged(folder), result.read(folder)
    assert "better" == found["hit_ratio"]["verdict"], done.stdout
    # The shared prefix is a quarter of a second of prefill. Other work on the machine can hide that twice in a row;
    # then no verdict is right.
    assert found["ttft_ms.p50"]["verdict"] in ("better", "inconclusive"), done.stdout
    assert found["ttft_ms.p50"]["verdict"] == "inconclusive" or found["ttft_ms.p50"]["high"] < 1
    assert "equivalent" == found["error_ratio"]["verdict"]
    # Of 1,000 shared tokens whole blocks can be found again, by all but the first; the other three that start with it
    # may come too early.
    shared = 1000 // BLOCK * BLOCK
    for run in bench.runs:
        least, most = (times * shared / run.figures["prompt_tokens"] for times in (20 - 4, 20 - 1))
        hit = run.figures["hit_ratio"]
        assert 0 == hit if run.variant == "off" else least <= hit <= most
    assert re.search(r"cache hits +│ +0 % │ +\d\d\.?\d? % │ +\+\d\d\.\d points .* better", done.stdout)


def test_variants_took_turns_and_were_read_back(flipped):
    """The variants took turns and their configuration was read back."""
    done, folder = flipped
    bench = result.read(folder)
    ran = [run.variant for run in bench.runs]
    assert [{"off", "on"}] * 6 == [set(ran[at : at + 2]) for at in range(0, 12, 2)], "one run of each in every round"
    assert "off -> on, as the engines report it: cache_config.enable_prefix_caching False -> True" in done.stderr
    assert ["False", "True"] == [
        variant.engine.cache["enable_prefix_caching"]
        for variant in sorted(bench.variants, key=lambda variant: variant.name)
    ]
    assert (0.25, "interleaved", None) == (bench.scale, bench.order, bench.cut)
    assert "every length was multiplied by 0.25" in done.stdout


def test_a_saved_bench_is_compared_with_the_same_verdicts(flipped):
    _, folder = flipped
    done = command("compare", folder, "--json")
    assert json.loads((folder / "verdicts.json").read_bytes()) == json.loads(done.stdout)["judgements"], done.stderr
    assert 0 == command("compare", folder, "--max-error-rate", "0.5%").returncode


def test_a_gate_closes_for_each_p95_that_is_that_much_worse(flipped):
    """Which ones, and whether any, is for the machine to say: the first request of a prefix is no faster."""
    _, folder = flipped
    for pair in (("off", "on"), ("on", "off")):
        done = command("compare", folder, "--variant", *pair, "--max-p95-regression", "15%", "--json")
        told = json.loads(done.stdout)
        (judgement,) = told["judgements"]
        p95 = [each for each in judgement["findings"] if each["metric"]["figure"].endswith(".p95")]
        worse = {each["metric"]["figure"] for each in p95 if each["effect"] > 1.15}
        assert p95
        assert (3 if worse else 0, worse) == (done.returncode, {each["figure"] for each in told["broken"]})


def test_the_report_is_one_page_with_the_rows_of_the_lab(flipped):
    _, folder = flipped
    done = command("report", folder, "--lab")
    assert 0 == done.returncode, done.stderr
    assert re.search(r"^pass +Stability: 0 of 240 requests failed$", done.stdout, re.MULTILINE)
    assert re.search(r"^not measured +Cost: ", done.stdout, re.MULTILINE)
    text = (folder / "report.html").read_text()
    assert "Prefix caching" in text
    assert "better" in text
    assert {".html", ".md", ".csv", ".json"} == {path.suffix for path in folder.glob("report.*")}


def books(folder: Path, bench: Bench) -> list[tuple[int | None, ...]]:
    """By run: tokens of prompts and of answers as the records have them, then as the engine counted them."""
    records = list(result.requests(folder))
    rows = []
    for run in bench.runs:
        its = [record for record in records if result.run_of(record) == run.number]
        told = (sum(record.prompt_tokens or 0 for record in its), sum(record.completion_tokens or 0 for record in its))
        rows.append((*told, *(round(run.figures[name]) for name in ("prompt_tokens", "completion_tokens"))))
    return rows


def test_every_token_on_record_is_one_that_the_engine_counted(flipped):
    """Also that nobody else's are, such as those of the warm-up."""
    _, folder = flipped
    rows = books(folder, result.read(folder))
    assert [row[2:] for row in rows] == [row[:2] for row in rows]
    assert {20 * 16} == {row[1] for row in rows}


def test_times_are_the_engines_own_and_what_the_way_takes(flipped):
    """The engine's own TTFT of a request begins when it arrives there and ends when the token leaves."""
    _, folder = flipped
    records = list(result.requests(folder))
    assert 240 == len(records)
    assert all(0 < record.engine_ttft_ms < record.ttft_ms < record.e2e_ms for record in records)


def test_an_engine_beside_itself_is_neither_better_nor_worse(engines, tmp_path):
    """What is the same may be told apart by chance once in a hundred times or so: six metrics are judged, of which
    three vary, and those together. A second time it is no chance."""
    url = engines["on"].spec.address
    experiment = {
        "workload": "short-short",
        "only": ["c4"],
        "scale": 0.5,
        "same": True,
        "arms": {"a": {"url": url}, "b": {"url": url}},
    }
    done, folder = tuned_until(
        lambda found: not {"better", "worse"} & {each["verdict"] for each in found.values()}, tmp_path, experiment
    )
    found = judged(folder)
    assert {"equivalent", "inconclusive"} >= {each["verdict"] for each in found.values()}, done.stdout
    assert {"hit_ratio": "equivalent", "error_ratio": "equivalent"}.items() <= {
        name: each["verdict"] for name, each in found.items()
    }.items()
    (judgement,) = json.loads((folder / "verdicts.json").read_bytes())
    # A machine that is busy with something else drifts, or stalls a run; both are reported, and neither is a fault of
    # the comparison.
    assert [] == [
        check["what"] for check in judgement["checks"] if not check["ok"] and check["name"] not in ("drift", "stalls")
    ]


def test_chats_have_their_lengths_and_json_is_held_to_its_schema(engines, tmp_path):
    (tmp_path / "talks.yaml").write_text(json.dumps(TALKS))
    done = command(
        "bench",
        "run",
        tmp_path / "talks.yaml",
        "--engine",
        engines["on"].spec.address,
        "--runs",
        1,
        "--out",
        tmp_path / "out",
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    bench, records = result.read(tmp_path / "out"), list(result.requests(tmp_path / "out"))
    assert {"/v1/chat/completions"} == {record.route for record in records}
    assert [record.est_prompt_tokens for record in records] == [record.prompt_tokens for record in records]
    assert [()] * 3 == [run.caveats for run in bench.runs], (
        "one would say that a prompt had another length than was asked for"
    )
    assert all(row[:2] == row[2:] for row in books(tmp_path / "out", bench))
    talk, told, held = bench.runs
    assert {12} == {record.completion_tokens for record in records if result.run_of(record) == talk.number}
    # A conversation finds the whole blocks of its own history, and the first words of all.
    assert 0.4 < talk.figures["hit_ratio"] < 1
    unended = sum(record.finish_reason == "length" for record in records if result.run_of(record) == held.number)
    # A limit that only the end-of-text token exceeds cuts off a reply that is complete.
    assert held.figures["invalid_json_ratio"] <= unended / 8, "only what is cut off is no JSON"
    assert held.figures["invalid_json_ratio"] < told.figures["invalid_json_ratio"], (
        "what the model says unheld means nothing"
    )


def test_oversized_request_is_refused_before_sending(engines, tmp_path):
    """What the context cannot hold is refused before anything is sent."""
    engine = engines["on"]
    before = engine.figure(vllm.PROMPT_TOKENS)
    (tmp_path / "long.yaml").write_text(
        json.dumps({"workloads": [{"name": "long", "input_tokens": 40000, "output_tokens": 100, "concurrency": 1}]})
    )
    done = command("bench", "run", tmp_path / "long.yaml", "--engine", engine.spec.address, "--out", tmp_path / "out")
    assert 2 == done.returncode
    assert 1 == len(told := done.stderr.strip().splitlines()), done.stderr
    assert re.search(
        rf"long: 40,000 tokens of prompt and 100 of answer .* {CONTEXT:,}; --scale 0\.\d+ would make it fit$", told[0]
    ), told
    assert (before, False) == (engine.figure(vllm.PROMPT_TOKENS), (tmp_path / "out").exists())


def test_vllms_own_bench_measures_the_same(engines, tmp_path):
    """One of theirs after one of ours. `make bench-crosscheck` says how near they are; here each is noisy."""
    url = engines["off"].spec.address
    one = ours(url, tmp_path / "ours", 20, 1)
    other, file = theirs(url, tmp_path / "other", 20, 2)
    said = json.loads(file.read_bytes())
    # The same definitions: what we work out from their times is what they worked out, but for the microsecond to which
    # we round.
    assert {name: pytest.approx(said[theirs_], abs=1e-3) for name, theirs_ in SAID.items()} == {
        name: other.figures[name] for name in SAID
    }
    for name in ("ttft_ms.p50", "tpot_ms.p50", "tpot_ms.mean", "tokens_per_second"):
        assert 1 / NOISE <= other.figures[name] / one.figures[name] <= NOISE, name


# Two runs of either tool were 2 apart where everything had to share one core; on a quiet machine it is 1.3.
NOISE = 4.0
SAID = {
    "ttft_ms.mean": "mean_ttft_ms",
    "ttft_ms.p50": "median_ttft_ms",
    "ttft_ms.p99": "p99_ttft_ms",
    "tpot_ms.mean": "mean_tpot_ms",
    "tpot_ms.p50": "median_tpot_ms",
    "tpot_ms.p99": "p99_tpot_ms",
    "tokens_per_second": "output_throughput",
    "qps": "request_throughput",
    "total_tokens_per_second": "total_token_throughput",
}


@pytest.mark.breaks_engine
def test_an_engine_that_dies_half_way_leaves_what_was_measured(engines, tmp_path):
    engine, folder = engines["off"], tmp_path / "out"
    run = (
        "bench",
        "run",
        "short-short",
        "--only",
        "c4",
        "--scale",
        "0.5",
        "--runs",
        "3",
        "--requests",
        "240",
        "--engine",
        engine.spec.address,
    )
    argv = [sys.executable, "-m", "stack.cli", *run, "--out", str(folder)]
    process = subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        eventually((folder / "bench.json").exists, within_s=90, what="a whole run")
        answered = (
            exposition_parser.parse(get(f"{engine.spec.address}/metrics")).total(vllm.REQUEST_SUCCESS.name) or 0.0
        )
        eventually(
            lambda: engine.figure(vllm.REQUEST_SUCCESS) >= answered + 8, within_s=30, what="a second run on its way"
        )
        engine.kill()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert 1 == process.returncode, said
    bench = result.read(folder)
    whole, broken = bench.runs
    assert (240, 240, None) == (whole.asked, whole.ok, whole.cut)
    assert 8 <= broken.ok < 240
    assert f"{engine.spec.address} stopped answering after {broken.ok} of 240 requests" == broken.cut == bench.cut
    assert 1 == said.count("NOT WHOLE: ")
    kept = [record for record in result.requests(folder) if result.run_of(record) == broken.number]
    assert broken.ok == sum(record.outcome == "ok" for record in kept)
    assert {"connection_lost", "connect_failed"} <= set(broken.failed)
