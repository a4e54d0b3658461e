"""The laws of the tuning matrix, over all of its rows, and of what is answered before there is traffic."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from exporters.catalogue import EVERYTHING, promql_ast
from runbooks import diagnosis, search
from runbooks import page as runbook_page
from stack.bench import workload_file
from stack.bench.workload import METRICS
from stack.cli import COMMANDS
from stack.doctor import advice as workload_advice
from stack.doctor import symptoms
from stack.doctor.matrix import symptom
from stack.doctor.matrix.symptom import AREAS, Symptom
from stack.doctor.symptoms import ROWS
from stack.root import ROOT
from stack.tuning import experiment
from stack.tuning.derived import flags

GOLDEN = Path(__file__).parents[2] / "golden"
OPTIONS = frozenset((GOLDEN / "vllm-options-0.32.txt").read_text().split())
PAGES = {page.name for page in runbook_page.pages()}
SAMPLES = {sample for metric in EVERYTHING for sample in metric.samples}
OF_THE_DOCTOR = {"client-disconnects", "refusals", "inter_token_p95"}
FIGURES = {*METRICS, *OF_THE_DOCTOR}
LEVERS = [row for row in ROWS if row.area != "quality"]
RALPH, CHATBOT, RAG, CODEBASE = "agent-loop", "support-chat", "rag", "same-codebase"  # workloads of scenarios
DISAGGREGATED = re.compile(r"(?i)disaggregat|kv-transfer|prefill and decode in separate")


def over(rows: Sequence[Symptom]) -> Callable[[Callable[[Symptom], None]], Callable[[], None]]:
    """Make one test of a check of a row; a failure names the row."""

    def of(check: Callable[[Symptom], None]) -> Callable[[], None]:
        def test() -> None:
            for row in rows:
                try:
                    check(row)
                except AssertionError as error:
                    error.add_note(f"row: {row.name}")
                    raise

        test.__doc__ = check.__doc__
        return test

    return of


each_row, each_lever = over(ROWS), over(LEVERS)


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


# ---- the laws


@each_lever
def test_a_lever_is_one_lever(row):
    """Two options at once, and nobody knows which one it was."""
    assert row.lever
    assert len(options(row.lever)) <= 1, row.lever
    assert row.second
    assert row.risk


@each_lever
def test_disaggregated_prefill_is_never_the_first_step(row):
    assert not DISAGGREGATED.search(row.lever)


def test_disaggregated_prefill_is_a_second_option():
    """Disaggregated prefill is a second option where long prefills are in the way."""
    assert {"head-of-line", "head-of-line-first", "prefill-bound"} == {
        row.name for row in ROWS if DISAGGREGATED.search(row.second)
    }


def test_quality_has_no_lever_and_leads_to_its_page():
    (quality,) = (row for row in ROWS if row.area == "quality")
    assert ("", "", None) == (quality.lever, quality.second, quality.proof)
    assert "quality" in quality.pages


def test_every_area_has_a_row_and_every_row_a_name_of_its_own():
    assert set(AREAS) == {row.area for row in ROWS}
    assert len(ROWS) == len({row.name for row in ROWS})


@pytest.mark.parametrize(
    ("symptom", "names"),
    [
        ("high time to first token", {"queue-bound", "prefill-bound", "cache-off"}),
        ("slow streaming", {"decode-bound", "decode-at-batch", "slow-streaming"}),
        ("out of memory under a burst", {"kv-bound", "kv-full"}),
        ("requests wait while the GPU is busy", {"queue-at-capacity", "one-team"}),
        ("prefix caching gives no gain", {"unique-prompts"}),
        ("speculative decoding disappoints", {"speculative-decoding"}),
    ],
)
def test_the_rows_that_operators_know_are_here(symptom, names):
    assert names <= {row.name for row in ROWS}, symptom


@each_row
def test_evidence_uses_existing_series_safely(row):
    """The evidence of a row asks for series that exist and divides by nothing that may be zero."""
    assert row.asks
    for ask in row.asks:
        assert promql_ast.names(ask)
        assert set() == promql_ast.names(ask) - SAMPLES, ask


@each_row
def test_every_option_in_a_row_is_one_of_vllm(row):
    text = " ".join((row.symptom, row.cause, row.lever, row.second, row.risk, row.dated))
    assert set() == options(text) - OPTIONS


@each_row
def test_a_row_leads_to_pages_that_are_there(row):
    assert row.pages
    assert set() == set(row.pages) - PAGES


@each_row
def test_outdated_words_stand_in_corrections_only(row):
    """No word that is out of date stands outside of what corrects it."""
    text = " ".join((row.symptom, row.cause, row.lever, row.second, row.risk))
    assert not re.search(
        r"cache_hit_tokens|swap|--enable-chunked-prefill|gpu_cache_usage|time_per_output_token_seconds", text
    )


# ---- how to know that it worked


@each_lever
def test_options_name_what_must_move_and_what_must_not(row):
    """A option has a value that must move and one that must not."""
    assert row.proof.figure in FIGURES
    assert row.proof.keeps in METRICS
    assert row.proof.figure != row.proof.keeps
    if not row.proof.experiment:  # then live traffic must show both
        assert row.proof.figure in symptom.LIVE | OF_THE_DOCTOR
        assert row.proof.keeps in symptom.LIVE


@each_lever
def test_its_commands_are_ours_with_options_that_they_have(row):
    real = {command.name: command.real() for command in COMMANDS}
    commands = row.proof.commands(row.name)
    assert "annotate" in {command.split()[1] for command in commands}
    assert commands[-1].split()[1] == ("compare" if row.proof.figure in symptom.LIVE else "doctor")
    for command in commands:
        known = {option for parameter in real[command.split()[1]].params for option in parameter.opts}
        assert set() == options(re.sub(r"'[^']*'|\"[^\"]*\"", "", command)) - known, command


@pytest.mark.parametrize("row", [row for row in LEVERS if row.proof.experiment], ids=lambda row: row.name)
def test_an_experiment_is_read_by_tune_and_pulls_the_lever_alone(row, tmp_path):
    (path := tmp_path / "lever.yaml").write_text(row.proof.experiment.file())
    its, suite = experiment.load(path)
    first, second = (flags(variant.argv) for variant in its.variants.values())
    changed = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    assert 1 == len({re.sub(r"^--no-", "--", name) for name in changed})
    assert options(row.lever) == {name for name in changed if not name.startswith("--no-")}
    assert row.proof.figure in suite.metrics or row.proof.figure in METRICS


# ---- the page


def test_the_page_is_printed_from_the_matrix_and_has_every_row():
    text = symptoms.page()
    assert text == (ROOT / "runbooks/tuning.md").read_text()
    assert [f"### {row.name}" for area in AREAS for row in ROWS if row.area == area] == re.findall(
        r"^### .*$", text, re.MULTILINE
    )


def test_those_who_search_find_the_page():
    assert "tuning.md" in (runbook_page.text("incident-flow") or "")
    assert "tuning" == search.find("tuning", runbook_page.pages()).pages[0].name


def test_a_wrong_name_of_a_row_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"'kv-bond'.* kv-bound"):
        symptoms.row("kv-bond")


# ---- before there is traffic


def test_both_tables_are_whole():
    assert 6 == len(workload_advice.WORKLOADS)
    assert {RALPH, CHATBOT, RAG, CODEBASE} == {one.bench.name for one in workload_advice.SCENARIOS}
    assert ["ttft", "itl", "context", "throughput", "adapters"] == [goal.name for goal in workload_advice.GOALS]


@pytest.mark.parametrize("one", [*workload_advice.WORKLOADS, *workload_advice.GOALS], ids=lambda one: one.name)
def test_advice_is_one_option_at_a_time(one):
    """Advice is one option and never disaggregated prefill first."""
    assert len(options(one.lever)) <= 1
    assert not DISAGGREGATED.search(one.lever)
    assert set() == options(one.lever + one.second) - OPTIONS
    assert symptoms.row(one.row)


@pytest.mark.parametrize("one", workload_advice.WORKLOADS, ids=lambda one: one.name)
def test_measurements_use_default_workloads(one):
    """What is to be measured is measured by a default workload."""
    for bench in one.benches:
        assert workload_file.load(bench)
    assert {measure.split(":")[-1].split(".")[0] for measure in one.measure} <= set(METRICS)


@pytest.mark.parametrize(
    ("bench", "band"), [(RALPH, (0.70, 0.95)), (CHATBOT, (0.30, 0.60)), (RAG, (0.0, 0.15)), (CODEBASE, (0.80, 0.99))]
)
def test_a_band_is_that_of_the_workload_that_measures_it(bench, band):
    (scenario,) = (one for one in workload_advice.SCENARIOS if one.bench.name == bench)
    assert band == scenario.expected_hit


@pytest.mark.parametrize(
    ("words", "workloads", "scenarios"),
    [
        ("rag", [], [RAG]),
        ("ralph", ["ralph-loop"], [RALPH]),
        ("strict json", ["strict-json"], []),
        ("Tool calls", ["strict-json"], []),
        ("chatbot for tenants", [], [CHATBOT]),
        ("many short queries", ["short-queries"], []),
        ("coding assistant", ["interactive-coding"], []),
        ("long documents beside short code", ["long-among-short"], []),
        ("code completion", ["interactive-coding"], []),
        ("Repeated analysis on the same codebase", ["long-context-edits"], [CODEBASE]),
        ("Long repository context + small edits", ["long-context-edits"], [CODEBASE]),
        ("Mixed long-doc summarization and short coding", ["long-among-short"], []),
        ("Interactive coding assistant", ["interactive-coding"], []),
        ("Strict JSON / tool output", ["strict-json"], []),
        ("Ralph-loop capstone", ["ralph-loop"], [RALPH]),
        ("Multi-tenant chatbot with shared system prompt", [], [CHATBOT]),
        ("RAG with new chunks each time", [], [RAG]),
        ("repository context with small edits", ["long-context-edits"], [CODEBASE]),
    ],
)
def test_free_words_find_their_rows(words, workloads, scenarios):
    advice, found = workload_advice.meant(words)
    assert workloads == [one.name for one in advice]
    assert scenarios == [one.bench.name for one in found]


def test_unknown_words_get_the_nearest_names():
    """Words that nobody knows are answered with the nearest names."""
    with pytest.raises(ValueError, match=r" rag, ralph$"):
        workload_advice.meant("rga")
    with pytest.raises(ValueError, match=r"long-context-edits, .* rag, codebase"):
        workload_advice.meant("zzzzzz")


def test_rows_shared_with_runbooks_are_on_their_page():
    """And leads there from a row that exists."""
    asked = [(alert, row) for alert, rows in diagnosis.ROWS.items() for row in rows if row.finding]
    assert asked
    for alert, row in asked:
        section = symptoms.page().split(f"### {symptoms.row(row.finding).name}\n")[1].split("\n### ")[0]
        assert f"[{alert}]({alert}.md), where {row.what} " in section
