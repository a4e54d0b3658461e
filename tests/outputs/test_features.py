"""No feature leaves the list of features without a line of the changelog that names it."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stack.root import ROOT
from tests.outputs.features import features

LIST = "tests/outputs/recorded/features/all/features.txt"
CHANGELOG = "CHANGELOG.md"
PARENTS = {"option": "command", "argument": "command", "panel": "dashboard", "label": "metric"}  # else the same kind


@dataclass(frozen=True)
class Change:
    """Commit, or the uncommitted changes: lines that left the list, and lines added to the changelog."""

    name: str
    removed: frozenset[str]
    added_changelog: str


def unexplained(removed: Iterable[str], added_changelog: str) -> list[str]:
    """Return the removed lines of which no line of the changelog has the name, or that of a parent removed too."""
    gone = frozenset(removed)
    return sorted(line for line in gone if not any(_named(one, added_changelog) for one in (line, *_above(line, gone))))


def _above(line: str, gone: frozenset[str]) -> list[str]:
    kind, _, name = line.partition(" ")
    above = (f"{PARENTS.get(kind, kind)} {name[: sign.start()]}" for sign in re.finditer(r"[ /.\[]", name))
    return [one for one in above if one in gone]


def _named(feature: str, changelog: str) -> bool:
    """Return True if one line has every word of the name. A plain word alone counts between backticks only."""
    words = feature.split()[1:]
    patterns = [rf"(?<![\w./-]){re.escape(word)}(?![\w/\[-]|\.[\w*])" for word in words]
    if len(words) == 1 and words[0].isalpha() and words[0].islower():
        changelog = "\n".join(" ".join(re.findall(r"`([^`]+)`", line)) for line in changelog.splitlines())
    return any(all(re.search(pattern, line) for pattern in patterns) for line in changelog.splitlines())


def changes(root: Path) -> list[Change]:
    """Return the changes of a repository that touch the list or the changelog, uncommitted ones first.

    The oldest commit of a shallow clone removes nothing: git shows all of its files as new."""
    patches = git(root, "log", "-p", "-U0", "--no-renames", "--format=%x00%h", "--", LIST, CHANGELOG).split("\0")[1:]
    uncommitted = git(root, "diff", "-U0", "--no-renames", "HEAD", "--", LIST, CHANGELOG)
    return [_change(f"uncommitted\n{uncommitted}"), *map(_change, patches)]


def _change(patch: str) -> Change:
    name, *files = patch.split("\ndiff --git ")
    hunks = {file.partition("\n")[0].split(" b/")[-1]: file.partition("\n@@")[2].splitlines() for file in files}
    came, went = ({line[1:] for line in hunks.get(LIST, ()) if line.startswith(sign)} for sign in "+-")
    added = "\n".join(line[1:] for line in hunks.get(CHANGELOG, ()) if line.startswith("+"))
    return Change(name.strip(), frozenset(went - came), added)


def git(root: Path, *words: str) -> str:
    """Run git without settings of the user, and without the repository of a hook that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "safe.directory=*", "-c", "user.name=A", "-c", "user.email=a@example.com", *words]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout


# ---- the repository


def test_the_list_has_every_feature():
    listed = (ROOT / LIST).read_text().splitlines()
    now = features()
    assert listed == now, "\n".join(difflib.unified_diff(listed, now, LIST, "the code", lineterm="", n=0))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git history")
def test_the_changelog_names_removed_features():
    missing = {change.name: unexplained(change.removed, change.added_changelog) for change in changes(ROOT)}
    assert {} == {commit: lines for commit, lines in missing.items() if lines}


# ---- the rule


@pytest.mark.parametrize(
    ("removed", "changelog", "left"),
    [
        ([], "", []),
        (["alert VLLMDown"], "", ["alert VLLMDown"]),
        (["alert VLLMDown", "runbook VLLMDown"], "- VLLMDown is gone.", []),
        (["alert VLLMDown"], "- VLLMDownAgain is new.", ["alert VLLMDown"]),
        (["option cost --by"], "- `vllm-watch cost --by` is gone.", []),
        (["option cost --by"], "- `vllm-watch cost --by-team` is new.", ["option cost --by"]),
        (["option cost --by"], "- `cost` is faster.\n- `report --by` is new.", ["option cost --by"]),
        (["command cost"], "- Cost of scrapes.", ["command cost"]),
        (["command cost", "option cost --by", "argument cost FILE"], "- `vllm-watch cost` is gone.", []),
        (["option cost --by"], "- `vllm-watch cost` is faster.", ["option cost --by"]),
        (["command lab", "command lab up", "option lab up --port"], "- `vllm-watch lab` is gone.", []),
        (["dashboard gpu", "panel gpu/heat"], "- The dashboard `gpu` is gone.", []),
        (["panel gpu/heat"], "- The dashboard `gpu` has no heat.", ["panel gpu/heat"]),
        (["metric up_total", "label up_total job"], "- up_total is gone.", []),
        (["label up_total job"], "- The label `job` of `up_total` is gone.", []),
        (["config ship.s3", "config ship.s3.url", "config ship.s3.sets[].a"], "- `ship.s3` is gone.", []),
        (["config ship.s3"], "- `ship.s3.url` and `ship.s3[].x` are new.", ["config ship.s3"]),
        (["config teams.teams.*.keys"], "- teams.teams.*.keys is gone.", []),
        (["endpoint board GET /runs/{id}"], "- `board` without `GET /runs/{id}`.", []),
    ],
)  # fmt: skip
def test_removed_features_that_no_line_names(removed, changelog, left):
    assert left == unexplained(removed, changelog)


def write(root: Path, listed: Iterable[str], changelog: Iterable[str]) -> None:
    for name, lines in ((LIST, listed), (CHANGELOG, changelog)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("".join(f"{line}\n" for line in lines))


def commit(root: Path, subject: str) -> None:
    git(root, "add", ".")
    git(root, "commit", "--message", subject)


@pytest.fixture
def repository(tmp_path):
    """Repository whose commits add four lines, remove one with and one without a reason, and move one."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init")
    write(root, ["alert A", "alert B", "alert C", "alert D"], ["- old"])
    commit(root, "first")
    write(root, ["alert A", "alert C", "alert D"], ["- old", "- B is gone."])
    commit(root, "with")
    write(root, ["alert C", "alert D"], ["- old", "- B is gone."])
    commit(root, "without")
    write(root, ["alert D", "alert C"], ["- old", "- B is gone."])
    commit(root, "moved")
    return root


def test_changes_are_read_commit_by_commit(repository):
    read = [(sorted(change.removed), change.added_changelog) for change in changes(repository)]
    assert [([], ""), ([], ""), (["alert A"], ""), (["alert B"], "- B is gone."), ([], "- old")] == read


def test_uncommitted_changes_are_read(repository):
    write(repository, ["alert C", "alert E"], ["- old", "- D is gone."])
    uncommitted = changes(repository)[0]
    assert (frozenset({"alert D"}), "- D is gone.") == (uncommitted.removed, uncommitted.added_changelog)


def test_a_shallow_clone_has_no_removed_lines(repository, tmp_path):
    git(tmp_path, "clone", "--depth=1", repository.as_uri(), "clone")
    assert [frozenset(), frozenset()] == [change.removed for change in changes(tmp_path / "clone")]
