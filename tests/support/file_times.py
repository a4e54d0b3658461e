"""Where a test run spends its time: set-up, call, tear-down and CPU of each file, what it waited for, what it started.

The hooks, which tests/conftest.py imports, append one JSON line a test to the file that VLLM_WATCH_TIMES names.
`python -m tests.support.file_times FILE` prints the ten slowest files, with `--all` every file. CPU is that of the test
process and of the processes that it waited for; a shared engine ends later and is not in it. Waits are those of
tests/support/wait.py; parts are those that the fixture `part` gave."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import wait

TIMES = os.environ.pop("VLLM_WATCH_TIMES", "")  # not for test runs that a test starts
parts_used: set[str] = set()  # by the test that runs


@dataclass
class FileTimes:
    """Seconds of one file's tests."""

    tests: int = 0
    setup: float = 0.0
    call: float = 0.0
    teardown: float = 0.0
    cpu_s: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)
    parts: set[str] = field(default_factory=set)

    @property
    def total_s(self) -> float:
        return self.setup + self.call + self.teardown


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the CPU and the waits of one test with its fixtures."""
    before = sum(os.times()[:4])
    wait.waited.clear()
    parts_used.clear()
    item.user_properties.append(("before", before))
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add what was measured to the report of the tear-down, which xdist hands to the process that writes."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "teardown":
        before = dict(item.user_properties)["before"]
        measured = sum(os.times()[:4]) - before, dict(wait.waited), sorted(parts_used)
        report.user_properties.append(("times", measured))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the line of one phase of a test; only the process that xdist's workers report to does."""
    if TIMES and "PYTEST_XDIST_WORKER" not in os.environ:
        line = [report.nodeid, report.when, report.duration, dict(report.user_properties).get("times")]
        with Path(TIMES).open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> dict[str, FileTimes]:
    """Return the times of each file."""
    files: dict[str, FileTimes] = defaultdict(FileTimes)
    for line in path.read_text().splitlines():
        node, when, seconds, measured = json.loads(line)
        times = files[node.partition("::")[0]]
        setattr(times, when, getattr(times, when) + seconds)
        if measured:
            times.tests += 1
            times.cpu_s += measured[0]
            times.waits.update(measured[1])
            times.parts.update(measured[2])
    return files


def table(files: dict[str, FileTimes], rows: int | None) -> str:
    """Return the slowest files as a Markdown table."""
    slowest = sorted(files.items(), key=lambda item: -item[1].total_s)[:rows]
    lines = ["| file | tests | set-up s | call s | tear-down s | CPU s | waited for | parts |", "|---|" + "---|" * 7]
    for name, times in slowest:
        waits = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in times.waits.most_common(3) if seconds >= 1)
        phases = f"{times.setup:.1f} | {times.call:.1f} | {times.teardown:.1f} | {times.cpu_s:.1f}"
        lines.append(f"| {name} | {times.tests} | {phases} | {waits} | {', '.join(sorted(times.parts))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table of one file of times."""
    path = Path(sys.argv[1])
    sys.stdout.write(table(read(path), None if "--all" in sys.argv else 10) + "\n")


if __name__ == "__main__":
    main()
