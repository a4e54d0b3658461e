"""The course page and the student's sheet: steps, criteria, workloads and experiments exist; the sheet has blanks."""

from __future__ import annotations

import re

import pytest

from stack.bench import workload_file
from stack.root import ROOT
from stack.tuning import experiment
from stack.tuning.lab_rows import CRITERIA

COURSE = (ROOT / "docs/course.md").read_text()
SHEET = (ROOT / "docs/lab-student.md").read_text()
STEPS = re.split(r"^## ", SHEET, flags=re.MULTILINE)[1:]
EXPERIMENTS = dict(re.findall(r"<!-- file: (\S+) as experiment -->\n```yaml\n(.*?)```", SHEET, re.DOTALL))


def test_sheet_has_six_steps_and_the_criteria():
    assert [*"123456"] == [step[0] for step in STEPS[:6]]
    assert "Pass criteria" == STEPS[6].splitlines()[0]


@pytest.mark.parametrize("step", STEPS[:6], ids=lambda step: step.splitlines()[0])
def test_step_has_commands_and_blanks_instead_of_answers(step):
    """Questions and table cells are blank; nothing that students measure stands there."""
    assert "```" in step
    questions = re.findall(r"^- (.+\?) ?(.*)$", step, re.MULTILINE)
    assert questions
    assert {"____"} == {answer for _, answer in questions}
    cells = [line.strip("|").split("|")[1:] for line in step.splitlines() if line.startswith("|")]
    assert all("____" in cell for row in cells[2:] for cell in row)


def test_criteria_are_those_of_the_report():
    """Both pages name the rows of `report --lab`, in its order."""
    for text in (STEPS[6], COURSE.split("## Criteria")[1].split("## ")[0]):
        rows = [line.strip("|").split("|")[0].strip() for line in text.splitlines() if line.startswith("|")]
        assert list(CRITERIA) == rows[2:]


def test_workloads_of_the_course_are_included():
    options = COURSE.split("## Tuning options")[1].split("## Policies")[0]
    tables = options + COURSE.split("## Steps")[1].split("## Criteria")[0]
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", tables))
    assert len(named) >= 10
    for name in named:
        assert workload_file.load(name).workloads  # raises BadConfig for an unknown one


@pytest.mark.parametrize(("name", "option"), [
    ("student-caching.yaml", "prefix-caching"), ("student-chunked.yaml", "chunked-prefill"),
])  # fmt: skip
def test_experiments_turn_one_option_off_and_on(tmp_path, name, option):
    path = tmp_path / name
    path.write_text(EXPERIMENTS[name])
    read, workloads = experiment.load(path)
    assert ["off", "on"] == list(read.variants)
    assert f"--no-enable-{option}" in read.variants["off"].lab
    assert f"--enable-{option}" in read.variants["on"].lab
    assert 1 == len(workloads.workloads)
