"""The mutation run: the changes it makes, the draw, and what it calls killed and survived."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import mutants

SOURCE = '''"""A docstring stays."""


def clip(value: int, low: int, high: int) -> int:
    if not high or value <= low:
        value -= 1
    return min(value, high * 2)
'''


@pytest.fixture
def source(monkeypatch, tmp_path):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)

    def write(text: str) -> list[mutants.Mutant]:
        (tmp_path / "m.py").write_text(text)
        return mutants.mutants_of("m.py")

    return write


def test_each_kind_of_change(source):
    assert [
        ("if not high or value <= low:", "if (not (not high or value <= low)):"),
        ("if not high or value <= low:", "if (not high and value <= low):"),
        ("if not high or value <= low:", "if high or value <= low:"),
        ("if not high or value <= low:", "if not high or (value < low):"),
        ("if not high or value <= low:", "if not high or (value > low):"),
        ("value -= 1", "value += 1"),
        ("value -= 1", "pass"),
        ("value -= 1", "value -= 2"),
        ("return min(value, high * 2)", "return None"),
        ("return min(value, high * 2)", "return max(value, high * 2)"),
        ("return min(value, high * 2)", "return min(value, (high / 2))"),
        ("return min(value, high * 2)", "return min(value, high * 3)"),
    ] == [(mutant.line, mutant.mutated) for mutant in source(SOURCE)]


def test_an_edit_leaves_the_draw_of_other_lines(source):
    before = {mutant.key for mutant in mutants.draw(source(SOURCE), seed=1, count=6)}
    after = {mutant.key for mutant in mutants.draw(source("\n\n" + SOURCE), seed=1, count=6)}
    assert before == after
    assert before != {mutant.key for mutant in mutants.draw(source(SOURCE), seed=2, count=6)}


@pytest.fixture
def outcomes(tmp_path):
    """Results by changed line, from a process of its own: a fork of this one would already have imported the module."""

    def run(test: str, arguments: str, *only: str) -> dict[str, str]:
        (tmp_path / "m.py").write_text(SOURCE)
        (tmp_path / "test_m.py").write_text(f"import signal\nfrom m import clip\n\n\ndef test_clip():\n    {test}\n")
        script = (
            "import os, sys, pathlib, pytest\nfrom tests.bench import mutants\n"
            f"mutants.ROOT = pathlib.Path({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r})\n"
            "mutants.TESTS['m.py'] = ('test_m.py',)\n"
            "(mutants.ROOT / 'runs').mkdir()\n"
            f"chosen = [each for each in mutants.mutants_of('m.py') if each.mutated in {only} or not {only}]\n"
            f"outcomes = mutants.run(chosen, mutants.ROOT / 'runs', 2, {arguments})\n"
            "print({outcome.mutant.mutated: outcome.result for outcome in outcomes})\n"
            "try:\n    os.waitpid(-1, os.WNOHANG)\n    sys.exit('a mutant still runs')\n"
            "except ChildProcessError:\n    pass\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        return eval(ran.stdout)  # noqa: S307

    return run


def test_killed_and_survived(outcomes):
    results = outcomes("assert 8 == clip(9, 3, 4)", "60")
    assert "killed" == results["return None"]
    assert "killed" == results["return min(value, high * 3)"]
    assert "survived" == results["value -= 2"]


def test_a_mutant_that_computes_without_end_times_out(outcomes):
    test = "assert 8 == clip(9, 3, 4)\n    while clip(2, 3, 4) != 1:\n        pass"
    assert {"value -= 2": "timeout", "return None": "killed"} == outcomes(test, "2", "value -= 2", "return None")


def test_the_end_of_the_time_ends_the_run(outcomes):
    """A mutant that still runs then is none of the outcomes, and is ended."""
    assert {} == outcomes("signal.pause()", "60, seconds=0.5")


def test_every_listed_equivalent_mutant_still_exists():
    """A row is found by the text of its line, so an edit of that line must edit or remove the row."""
    listed = set(mutants.equivalents())
    existing = {mutant.key for module in {key[0] for key in listed} for mutant in mutants.mutants_of(module)}
    assert set() == listed - existing
