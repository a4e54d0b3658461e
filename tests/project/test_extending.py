"""The page on extending: its changes are made in a copy of the tree, printed, and held to the tests that guard them;
and each of them is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stack.root import ROOT

PAGE = (ROOT / "docs/internals/extending.md").read_text()
COPIED = ("alerts", "dashboards", "docs", "exporters", "runbooks", "stack", "tests", "vllm_watch", "pyproject.toml")
_BLOCK = re.compile(r"^(`{3,})diff\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
ALERT = "VLLMLabRestarting"


def changes() -> list[tuple[str, str, str]]:
    """Path, text that goes and text that comes, of each change of the page. A file that is not there yet has nothing
    that goes."""
    found = []
    for _, block in _BLOCK.findall(PAGE):
        for path, lines in re.findall(r"^--- (\S+)\n(.*?)(?=^--- \S+\n|\Z)", block, re.DOTALL | re.MULTILINE):
            old = "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] in " -")
            new = "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] in " +")
            found.append((path, old, new))
    return found


CHANGES = changes()


def copy(to: Path) -> Path:
    """The tree as it stands, without recordings; with what Python has compiled of it, since its processes would do that
    again."""
    to.mkdir(exist_ok=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("situations", "golden", "*.pyc.*"))
        else:
            shutil.copy(ROOT / name, to / name)
    (to / "tests/golden").symlink_to(ROOT / "tests/golden")
    return to


def make(tree: Path, without: tuple[str, ...] = ()) -> None:
    """The page's changes, those to some files left out."""
    for path, old, new in CHANGES:
        if path in without:
            continue
        file = tree / path
        text = file.read_text() if old else ""
        assert not old or text.count(old) == 1, f"{path} does not hold this once:\n{old}"
        file.write_text(text.replace(old, new) if old else new)


def started(tree: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.Popen(
        [sys.executable, *words], cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def running_tests(tree: Path, *names: str) -> subprocess.Popen[str]:
    where = {path.name: path.relative_to(tree).as_posix() for path in (tree / "tests").rglob("test_*.py")}
    found = (f"{where[file]}{mark}{rest}" for file, mark, rest in (name.partition("::") for name in names))
    return started(tree, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *found)


HOUSE, RULES, CASES = "test_rules_and_boards.py", "test_alert_lint.py", "test_alert_rules.py"
PAGES = f"{HOUSE}::test_every_alert_has_its_page_and_every_page_its_alert"
PANEL = f"{HOUSE}::test_alerts_point_at_panels_that_exist"
INDEX = "test_reference.py::test_runbook_index_names_every_page"
CASE, DRILL = (f"{CASES}::test_every_alert_has_its_case", "test_drills.py::test_alerts_and_drills_match")
GUARDS = (
    PAGES, INDEX, CASE, DRILL,
    f"{HOUSE}::test_printed_files_match_their_source",
    f"{RULES}::test_the_shipped_rules_break_none",
    f"{CASES}::test_metrics_of_alerts_stand_in_their_cases[{ALERT}]",
    f"{CASES}::test_a_case_bears_the_labels_of_a_real_scrape[{ALERT}]",
    "test_dashboard_lint.py::test_the_shipped_boards_break_no_rule_that_has_no_reason",
    f"test_runbook_pages.py::test_a_page_can_be_read_at_night[{ALERT}]",
    f"test_runbook_pages.py::test_page_links_the_panel_and_names_the_severity[{ALERT}]",
    f"test_runbook_pages.py::test_queries_and_conditions_use_existing_series[{ALERT}]",
)  # fmt: skip

# Files whose changes are left out together, and the tests that then fail, each with these words.
NEEDED = (
    (("dashboards/boards/monitoring_health.py",), {PANEL: "PanelRef(board='monitoring-health', panel='lab-restarts')"}),
    (("runbooks/VLLMLabRestarting.md",), {PAGES: f"{ALERT} has no page"}),
    (
        ("stack/reference/runbooks.py", "tests/support/alert_cases.py", "stack/drill/drills.py"),
        {INDEX: "runbooks.py, SYMPTOMS", CASE: f"'{ALERT}'", DRILL: f"'{ALERT}'"},
    ),
)


def test_every_change_names_a_file_and_an_effect():
    """Every change of the page names a file and something that comes."""
    assert len(CHANGES) >= 8
    assert all(new and new != old for _, old, new in CHANGES)
    assert {path for files, _ in NEEDED for path in files} <= {path for path, _, _ in CHANGES}


def test_all_changes_render_and_pass_the_guards(tmp_path):
    """With all changes of the page the tree prints and its guards hold."""
    tree = copy(tmp_path)
    make(tree)
    printed = started(tree, "-m", "stack.cli", "render")
    told = printed.communicate()[0]
    assert 0 == printed.returncode, told
    for path in (
        "alerts/prometheus/info.yaml",
        "dashboards/json/monitoring-health.json",
        f"runbooks/{ALERT}.md",
        "docs/reference/metrics.md",
        "docs/reference/alerts.md",
    ):
        assert f"printed: {path}" in told
    assert "lab_restarts_total" in (tree / "dashboards/json/monitoring-health.json").read_text()
    guards = running_tests(tree, *GUARDS)
    told = guards.communicate()[0]
    assert 0 == guards.returncode, told[-4000:]


def test_without_a_step_the_test_that_guards_it_says_so(tmp_path):
    """Side by side, since each loads the whole tree. What is printed is as it was: that it is stale is another
    test's."""
    running = []
    for number, (without, fails) in enumerate(NEEDED):
        tree = copy(tmp_path / str(number))
        make(tree, without)
        running.append((running_tests(tree, *fails), fails))
    for process, fails in running:
        told = process.communicate()[0]
        assert 0 != process.returncode, fails
        for test, words in fails.items():
            assert words in told, f"{test} does not say {words}: {told[-2000:]}"


PARTS = ["metric", "panel", "alert", "page", "case", "drill", "dashboard", "workload", "command"]


@pytest.mark.parametrize("part", PARTS)
def test_the_page_tells_of_each_thing_that_one_may_add(part):
    assert re.search(rf"(^## .*\b{part}\b)|(^\| an? {part} )", PAGE, re.MULTILINE | re.IGNORECASE)
