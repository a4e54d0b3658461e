"""The instructor's sheet: what it says of names, blocks, bytes and options holds, and every task has something to type
and something to ask."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from alerts.registry import ALERTS
from exporters.catalogue import EVERYTHING, NEVER_EXISTED, RETIRED, VLLM
from exporters.catalogue import exposition_parser as scrape
from stack.bench.workload import points
from stack.bench.workload_file import included, load
from stack.capacity.kv import LayerBlock, Serving, token_bytes
from stack.lab.plan import MODEL, PORTS, LabConfig, processes
from stack.root import ROOT
from tests.support.model_configs import config, model

SHEET = (ROOT / "docs/lab-instructor.md").read_text()
GOLDEN = sorted((Path(__file__).parents[2] / "golden").glob("*.prom"))
TASKS = re.split(r"^### ", SHEET.split("## Tasks")[1].split("## Pass criteria")[0], flags=re.MULTILINE)[1:]


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table behind these words, head and rule left out."""
    lines = SHEET.split(heading, 1)[1].splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("|"))
    last = next(at for at, line in enumerate([*lines, ""]) if at > first and not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first + 2 : last]]


def named(text: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", text))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_old_names_are_on_no_captured_page(path):
    """Names that older notes use are on no captured page and those in their place are."""
    families = scrape.parse(path.read_text())
    assert not families.of("vllm:cache_hit_tokens_total")
    assert not families.of("vllm:num_preemptions")
    assert not families.of("vllm:num_requests_swapped")
    for name in (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
    ):
        assert families.of(name), name


def test_sheet_names_are_in_the_catalogue_or_marked():
    """Every name of the sheet is in the catalogue or said to be wrong."""
    samples = {sample for metric in EVERYTHING for sample in (*metric.samples, metric.name)}
    wrong = named(" ".join(row[0] for row in rows("## Corrections to older course notes")))
    assert named(SHEET) - samples - wrong == set()
    assert "vllm:cache_hit_tokens_total" in NEVER_EXISTED
    assert "vllm:num_requests_swapped" in {metric.name for metric in RETIRED}
    assert {"vllm:num_preemptions_total"} <= {metric.name for metric in VLLM}


@pytest.mark.parametrize(("tokens", "blocks"), [(512, 32), (1024, 64), (128, 8)])
def test_blocks_of_sixteen_tokens_are_as_many_as_the_sheet_says(tokens, blocks):
    assert blocks == LayerBlock("full", 16, 1.0).blocks(tokens, Serving(max_model_len=4096))
    row = next(row for row in rows("## Corrections to older course notes") if "blocks of 16" in row[0])
    assert str(blocks) in re.findall(r"\d+", row[1])


@pytest.mark.parametrize("row", rows("KV cache of one token"), ids=lambda row: row[0])
def test_bytes_of_a_token_are_the_old_formulas_and_vllms(row):
    name, _, formula, bytes_each, times = row
    hidden, layers = config(name)["hidden_size"], config(name)["num_hidden_layers"]
    assert int(formula.replace(",", "")) == layers * 2 * hidden * 2
    assert int(bytes_each.replace(",", "")) == token_bytes(model(name), Serving(max_model_len=4096))
    assert times == f"{round(layers * 4 * hidden / token_bytes(model(name), Serving(max_model_len=4096)))}"


def test_an_option_of_the_sheet_is_one_of_vllms():
    options = (Path(__file__).parents[2] / "golden/vllm-options-0.32.txt").read_text().split()
    for option in (
        "--no-enable-prefix-caching",
        "--enable-prefix-caching",
        "--no-enable-chunked-prefill",
        "--max-num-seqs",
    ):
        assert option in options
        assert option in SHEET


def test_the_labs_slots_model_and_ports_are_those_of_the_sheet():
    engine = next(
        processes(
            LabConfig(Path("lab"), {name: Path(name) for name in ("engine", "model", "alertmanager", "prometheus")})
        )
    )
    assert "16" == engine.argv[engine.argv.index("--max-num-seqs") + 1]
    assert "`--max-num-seqs 16`" in SHEET
    assert f"model_name={MODEL}" in SHEET
    ports = {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", SHEET)}
    assert ports <= set(PORTS.values())


def test_every_workload_and_load_of_the_sheet_is_included():
    asked = re.findall(r"bench run (\S+) (.*)", SHEET)
    assert len(asked) >= 4
    for name, options in asked:
        loads = {point.label for each in load(included()[name]).workloads for point in points(each)}
        assert set(re.findall(r"--only (\S+)", options)) <= loads, name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.splitlines()[0])
def test_tasks_have_commands_and_answered_questions(task):
    """Every task has something to type and questions with answers."""
    assert "```sh" in task
    questions = re.findall(r"^- \*([^*]+)\*(.*(?:\n  .*)*)", task, re.MULTILINE)
    assert len(questions) >= 2
    assert all(question.endswith("?") and len(answer.split()) > 5 for question, answer in questions)


def test_timetable_has_every_task_in_full_hours():
    """Every task is in the timetable in order and an hour is full."""
    table = rows("## Before the class")
    assert [re.search(r"\[(.+?)\]", row[1])[1] for row in table] == [task.splitlines()[0] for task in TASKS]
    ends = [tuple(map(int, row[0].split(" to "))) for row in table]
    assert 60 == ends[-1][1]
    assert all(before[1] == after[0] for before, after in pairwise(ends))


def test_every_criterion_says_how_to_check_it():
    for criterion, how, good in rows("## Pass criteria"):
        assert "`" in how or "same" in how, criterion
        assert good


def test_alerts_of_the_sheet_are_alerts():
    assert set(re.findall(r"\bVLLM[A-Z]\w+", SHEET)) <= {alert.name for alert in ALERTS}
