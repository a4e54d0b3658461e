"""The benchmark of shipping measures what it says; no timing is judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_quick_run_ships_every_line():
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests/support", ROOT / "tests/bench")))
    done = subprocess.run(
        [sys.executable, "tests/bench/bench_data.py", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert "20,000 lines of " in done.stdout
    assert "\n60,000: " in done.stdout
    assert "% of the floor" in done.stdout
