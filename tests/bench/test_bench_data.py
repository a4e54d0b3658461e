"""The benchmark of shipping measures what it says; no timing is judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed(script: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests/support", ROOT / "tests/bench")))
    done = subprocess.run(
        [sys.executable, f"tests/bench/{script}", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_a_quick_run_ships_every_line():
    shown = printed("bench_data.py")
    assert "20,000 lines of " in shown
    assert "\n60,000: " in shown
    assert "% of the floor" in shown


def test_a_quick_run_asks_the_commands_and_both_engines():
    shown = printed("bench_data_queries.py")
    assert "requests --slowest ttft" in shown
    assert "one GROUP BY" in shown
    assert "view phases" in shown
