"""The driver of the recorded outputs, and what the recordings may hold. `make outputs` compares the outputs."""

from __future__ import annotations

import datetime
import gzip
import json
import re
import time
from pathlib import Path

import click
import pytest

from stack.cli import COMMANDS
from stack.gateway.reasons import REASONS
from tests.outputs import driver, scenes
from tests.outputs.normalise import Normaliser, canonical, objects, readable, with_references, without_assets
from tests.outputs.replies import CASES

MOST_BYTES = 4_000_000
# What runs until it is ended, changes this machine, or needs an engine; tests/live runs them.
NOT_RUN = {"bench run", "board", "gateway run", "lab install", "lab up", "render", "secrets", "sidecar run", "tune"}
PRIVATE = re.compile(
    r"/(?:root|home|tmp|work|Users|var/folders)/\w|vw-[a-z-]+-[A-Za-z0-9_-]{32}|glsa_\w|PRIVATE KEY|AKIA\w{8}"
)


def now(form: str, days: float = 0.0) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)).strftime(form)


# ---- recordings


def recordings() -> list[Path]:
    return [path for path in driver.RECORDED.rglob("*") if path.is_file()]


def test_recordings_are_small():
    assert MOST_BYTES > sum(path.stat().st_size for path in recordings())


@pytest.mark.parametrize("folder", [driver.RECORDED, driver.INPUTS])
def test_no_machine_path_and_no_secret_is_recorded(folder: Path):
    data = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts = {path: gzip.decompress(held) if path.suffix == ".gz" else held for path, held in data.items()}
    matches = {str(path): PRIVATE.search(text.decode(errors="replace")) for path, text in texts.items()}
    assert {} == {path: match[0] for path, match in matches.items() if match}


def test_each_recorded_part_is_in_the_manifest():
    assert set(driver.manifest()) == {path.name for path in driver.RECORDED.iterdir()}


def test_each_command_is_recorded():
    """Its help by introspection, its output by the manifest; what cannot end by itself is named here."""
    entries = [entry for part in driver.manifest().values() for entry in part.values()]
    lines = [line for entry in entries for line in (entry if isinstance(entry, list) else entry.get("run", ()))]
    for first in COMMANDS:
        for words in scenes.leaves(first, (str(first.name),)):
            name = " ".join(words)
            if name not in NOT_RUN and not is_group(words):
                assert any(re.search(rf"(?:^| ){words[-1]}\b", line) for line in lines if line.startswith(words[0])), (
                    name
                )


def test_commands_fail_among_mistakes_only():
    """A mistake in the manifest would be recorded as the output."""
    texts = {path.relative_to(driver.RECORDED): path.read_text() for path in driver.RECORDED.glob("*/*.txt")}
    runs = [(path, run) for path, text in texts.items() for run in text.split("$ vllm-watch ")[1:]]
    assert [] == [run for path, run in runs if path.parts[0] != "mistakes" and run.rstrip().endswith("(exit status 2)")]
    assert [] == [run for path, run in runs if path.parts[0] == "mistakes" and "(exit status " not in run]


def is_group(words: tuple[str, ...]) -> bool:
    command: click.Command | None = next(first for first in COMMANDS if first.name == words[0]).real()
    for word in words[1:]:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    return isinstance(command, click.Group)


def test_each_rejection_is_recorded():
    rejected = {name for name, reason in REASONS.items() if reason.outcome == "rejected"}
    assert rejected <= CASES.keys()


# ---- normalising


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at http://127.0.0.1:45123/metrics", "at http://127.0.0.1:<port>/metrics"),
        ("at http://127.0.0.1:9090", "at http://127.0.0.1:9090"),
        ("/some/folder/a.yaml", "./a.yaml"),
        ("/some/folder-of-others", "/some/folder-of-others"),
        ("sum 0.30000000000000004 1.5e-17", "sum 0.3 1.5e-17"),
        ("sum 2.0000000000000004e-05 2.0", "sum 2e-05 2.0"),
        ("2025-11-24T16:00:00Z", "2025-11-24T16:00:00Z"),
        ("1764000000.5", "1764000000.5"),
        ("key vw-chat-" + "k" * 32, "key vw-chat-<key>"),
        ("key vw-chat-" + "-" * 32 + " ", "key vw-chat-<key> "),
    ],
)
def test_what_differs_between_machines_is_replaced(text: str, expected: str):
    assert expected == Normaliser({"/some/folder": "."})(text)


@pytest.mark.parametrize("form", ["%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S.%f+00:00", "%s", "%s.25", "%s123"])
def test_times_of_the_run_are_replaced(form: str):
    text = str(int(time.time())).join(form.split("%s")) if "%s" in form else now(form)
    assert "a <now> b" == Normaliser({})(f"a {text} b")


def test_older_times_and_dates_stay():
    other = f"{now('%Y-%m-%d')} {now('%Y-%m-%dT%H:%M:%SZ', days=-30)}"
    assert other == Normaliser({})(other)


def test_rules_of_an_entry_apply_first():
    assert "took <varies>" == Normaliser({}, ((r"took [0-9.]+", "took <varies>"),))("took 0.12345678901234")


def test_objects_do_not_depend_on_their_formatting():
    a = objects("a.yaml", "kind: B\nmetadata: {name: b}\n---\nkind: A\nmetadata: {name: a}\n")
    b = objects("a.yaml", '---\n{"kind": "A", "metadata": {"name": "a"}}\n---\nmetadata:\n  name: b\nkind: B\n')
    assert canonical(a) == canonical(b)
    with pytest.raises(ValueError, match=r"a\.txt"):
        objects("a.txt", "x")


def test_an_embedded_document_is_named_or_parsed():
    board = {"title": "Overview", "panels": [1, 2]}
    value = {"data": {"a.json": json.dumps(board), "b.json": json.dumps({"title": "B"}), "c": "1\n2"}}
    assert {"data": {"a.json": "= boards/a.json", "b.json": {"title": "B"}, "c": ["1", "2"]}} == with_references(
        value, {canonical(board): "boards/a.json"}
    )


def test_what_fits_into_a_line_stands_in_one():
    assert '{"a": 1, "b": [2]}' == readable({"b": [2], "a": 1})
    assert ["{", ' "a": {"c": 2},', ' "b": [', f'  "{"x" * 100}",', "  3", " ]", "}"] == readable(
        {"b": ["x" * 100, 3], "a": {"c": 2}}
    ).splitlines()


def test_long_scripts_and_styles_are_hashed():
    page = (
        f"<style>{'x' * 3000}</style><p>text</p><script>let a = 1</script><script type='application/json'>{'1' * 3000}"
    )
    made = without_assets(page)
    assert re.fullmatch("<style>sha256 [0-9a-f]{16}</style>", made.partition("<p>")[0])
    assert page.partition("<p>")[2] == made.partition("<p>")[2]


# ---- comparing


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(driver, "RECORDED", tmp_path)
    driver.write("help", {"help/all/a.txt": "one\ntwo\n", "help/all/b.txt": "same\n"})
    return tmp_path


def test_a_change_is_one_readable_diff(recorded: Path):
    changed = {"help/all/a.txt": "one\nthree\n", "help/all/b.txt": "same\n"}
    assert ["-two", "+three"] == [
        line for line in driver.difference(driver.recorded("help"), changed)[3:] if line[0] in "+-"
    ]
    assert ["changed  help/all/a.txt (+1 -1)"] == driver.summary(driver.recorded("help"), changed)


def test_accepting_removes_what_is_gone(recorded: Path):
    made = {"help/all/a.txt": "one\ntwo\n", "help/all/c.txt": "new\n"}
    assert {"gone", "new"} == {line.split()[0] for line in driver.summary(driver.recorded("help"), made)}
    driver.write("help", made)
    assert made == driver.recorded("help")
    assert [] == driver.difference(driver.recorded("help"), made)


def test_clock_and_time_zone_do_not_show():
    """`make test` runs all parts a day ahead in another time zone; here is the part with the most dates."""
    setting = driver.Setting(days_ahead=1, timezone="Asia/Kathmandu")
    assert [] == driver.difference(driver.recorded("events"), driver.record("events", setting))
