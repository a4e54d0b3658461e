"""Durations, Markdown tables, foreign text, whole files: what every package writes and reads."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from exporters.text import format_duration, markdown_table, parse_duration, parse_window, printable, write_atomically


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (15, "15s"),
        (90, "1m30s"),
        (0.5, "500ms"),
        (5400, "1.5h"),
        (86400, "1d"),
        (604800, "1w"),
        (31536000, "1y"),
        (30, "30"),
        (0.25, "0.25"),
    ],
)
def test_durations_are_read_as_prometheus_and_grafana_write_them(seconds, text):
    assert seconds == parse_duration(text)


@pytest.mark.parametrize("text", ["", "s", "1x", "1m30", "-5s", "5 m", "\u0665s", "1s\n"])
def test_what_is_no_duration_is_told_with_examples(text):
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(text))} .* 15s, 5m or 1m30s$"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("0s", 0), ("2w", 1209600), ("1500ms", None), ("30", None), ("", None)],
)
def test_a_window_is_whole_seconds_with_a_unit(text, seconds):
    """PromQL takes no bare number as a range."""
    if seconds is None:
        with pytest.raises(ValueError, match="is no duration"):
            parse_window(text)
    else:
        assert seconds == parse_window(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (90, "90s"), (86400, "1d"), (604800, "1w"), (31536000, "365d")],
)
def test_a_duration_is_printed_in_the_largest_unit_without_rest(seconds, text):
    assert text == format_duration(seconds)
    assert seconds == parse_window(text)


def test_a_bar_does_not_end_a_cell():
    assert ["| a | b |", "| --- | --- |", r"| x\|y | 1 |"] == list(markdown_table(("a", "b"), [("x|y", 1)]))


def test_foreign_text_is_one_line_that_no_terminal_obeys():
    assert r"a\u001b[2J\u000aé\U000e0001" == printable("a\x1b[2J\né\U000e0001")


def test_replaced_file_is_whole_with_its_mode(tmp_path, monkeypatch):
    """A file is replaced whole and has its mode from the start."""
    path, seen = tmp_path / "keys", []
    real = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, target: seen.append(self.stat().st_mode & 0o777) or real(self, target)
    )
    old = os.umask(0o022)
    try:
        write_atomically(path, "secret", 0o400)
        assert (0o400, [0o400]) == (path.stat().st_mode & 0o777, seen)
        write_atomically(path, b"page")
        assert (0o644, b"page") == (path.stat().st_mode & 0o777, path.read_bytes())
    finally:
        os.umask(old)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "page"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"/page'$") as caught:
        write_atomically(path, "new")
    assert errno.ENOSPC == caught.value.errno
    assert [path] == list(tmp_path.iterdir())
    assert "old" == path.read_text()


def test_a_file_written_once_is_never_replaced(tmp_path):
    path = tmp_path / "2026-10.json"
    write_atomically(path, "first", 0o444, once=True)
    with pytest.raises(FileExistsError):
        write_atomically(path, "second", 0o444, once=True)
    assert ([path], "first", 0o444) == (list(tmp_path.iterdir()), path.read_text(), path.stat().st_mode & 0o777)
