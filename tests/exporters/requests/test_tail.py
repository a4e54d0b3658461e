"""The tail: every case of its fault table by name, and random histories of writing, rotation, cuts and crashes against
a plain model.

VLLM_WATCH_TAIL_HISTORIES=10000 python -m pytest tests/exporters/requests/test_tail.py -k histories    for more of
them."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import re
from collections import Counter
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from exporters.requests import positions as positions_module
from exporters.requests.positions import CHUNK_BYTES, GUARD_BYTES, HEAD_BYTES, MAX_LINE_BYTES, STEPS, take
from exporters.requests.tail import LOGGED_AT_MOST, OPEN_AT_MOST, REASONS, Stat, Tail, TailDisk
from tests.support.tailed_log import add, again, drained, lines_of, polled, stored

HISTORIES = int(os.environ.get("VLLM_WATCH_TAIL_HISTORIES", "200"))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "requests.jsonl"


def copytruncate(path: Path, copy: Path) -> None:
    copy.write_bytes(path.read_bytes())
    os.truncate(path, 0)


@pytest.fixture
def rotated(path) -> Path:
    return path.with_name("requests.jsonl.1")


# --- the fault table


def test_case_1_half_a_line_waits_for_its_newline(path):
    path.write_bytes(b"one\ntw")
    tail = Tail(path)
    assert [b"one"] == polled(tail, 0)
    assert 4 == tail.positions()[0].offset
    tail = again(tail)
    assert [] == polled(tail, 1)
    add(path, "o")
    assert [b"two"] == polled(tail, 2)


def test_case_2_a_renamed_file_is_read_while_its_writer_keeps_it(path, rotated):
    add(path, 1)
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    path.rename(rotated)
    add(path, "new")
    add(rotated, 2)
    assert [b"2", b"new"] == polled(tail, 1)
    for second in range(2, 20):  # each late line prolongs the stay
        add(rotated, second)
        assert [f"{second}".encode()] == polled(tail, second)
    assert [] == drained(tail, 20)
    assert 1 == len(tail._followed)
    add(rotated, "very late")
    assert [b"very late"] == polled(tail, 60), "and what grows after it was let go is opened again"


def test_case_3_many_renames_each_with_late_lines(path):
    numbers = count()
    tail, got = Tail(path), []
    for turn in range(100):
        add(path, *(next(numbers) for _ in range(20)))
        got += polled(tail, turn / 16)
        late = path.with_name(f"requests.jsonl.{turn}")
        path.rename(late)
        add(path, *(next(numbers) for _ in range(5)))
        add(late, *(next(numbers) for _ in range(20)))
    got += drained(tail, 10)
    assert list(range(4500)) == sorted(int(line) for line in got)


def test_case_4_two_renames_between_reads(path, rotated):
    add(path, 1)
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    add(path, 2)
    path.rename(path.with_name("requests.jsonl.2"))
    add(rotated, 3)
    add(path, 4)
    assert {b"2", b"3", b"4"} == set(drained(tail))
    assert not tail.faults


@pytest.mark.parametrize("lines", [1, 2, 3], ids=["shorter", "as long", "longer"])
def test_case_5_cut_and_grown_again_to_any_length(path, lines):
    add(path, "a" * 20, "b" * 20)
    tail = Tail(path)
    assert 2 == len(polled(tail, 0))
    os.truncate(path, 0)
    new = [f"{number:020}" for number in range(lines)]
    add(path, *new)
    assert [line.encode() for line in new] == polled(tail, 1)
    assert [] == polled(tail, 2)
    assert {"cut": 1} == tail.faults, "what was written before the cut and not read is lost, and that is told"


@pytest.mark.parametrize("killed", [False, True], ids=["live", "after a SIGKILL"])
def test_case_6_copytruncate_with_unread_lines_in_the_copy(path, rotated, killed):
    add(path, 1)
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    add(path, 2, 3)
    copytruncate(path, rotated)
    add(path, 4)
    tail = again(tail) if killed else tail
    assert {b"2", b"3", b"4"} == set(drained(tail, 1))
    copytruncate(path, path.with_name("requests.jsonl.0"))
    add(path, 5)
    assert [b"5"] == drained(tail, 40)
    assert not tail.faults


def test_case_7_lines_written_while_nobody_read(path):
    add(path, 1)
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    add(path, *range(2, 52))
    assert [f"{n}".encode() for n in range(2, 52)] == polled(again(tail), 1)


def test_case_8_two_rotations_while_nobody_read(path, rotated):
    add(path, 1)
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    add(path, 2)
    path.rename(path.with_name("requests.jsonl.2"))
    add(rotated, 3)
    add(path, 4)
    tail = again(tail)
    assert {b"2", b"3", b"4"} == set(drained(tail))
    assert not tail.faults
    assert [] == drained(again(tail))


def test_case_9_an_inode_that_is_used_again():
    disk = FakeDisk()
    disk.append("log", b"1\n2\n")
    tail = Tail(Path("/x/log"), disk=disk)
    assert [b"1", b"2"] == polled(tail, 0)
    before = disk.named["log"].number
    positions = stored(tail)
    tail.close()
    del disk.named["log"]
    disk.append("log", b"5\n6\n7\n")
    assert before == disk.named["log"].number
    tail = Tail(Path("/x/log"), positions, disk=disk)
    assert [b"5", b"6", b"7"] == polled(tail, 0)
    assert {"cut": 1} == tail.faults


def test_case_10_killed_between_any_two_polls(path):
    """What was handed out after the last commit is handed out again, and nothing else."""
    numbers = count()
    tail, committed, positions = Tail(path), [], ()
    for turn in range(120):
        add(path, *(next(numbers) for _ in range(7)))
        if turn % 20 == 19:
            path.rename(path.with_name(f"requests.jsonl.{turn}"))
        lines = polled(tail, turn)
        if turn % 3:
            committed += lines
            positions = stored(tail)
        else:
            tail.close()
            tail = Tail(path, positions)
    committed += drained(tail, 200)
    assert list(range(840)) == sorted(int(line) for line in committed)


def test_case_11_overlong_line_is_skipped_over_a_restart(path):
    """Case 11 a line beyond the limit is skipped whole also over a restart."""
    path.write_bytes(b"a\n" + b"x" * (3 * MAX_LINE_BYTES))
    tail = Tail(path)
    assert [b"a"] == [line for second in range(9) for line in polled(tail, second)]
    positions = stored(tail)
    assert positions[0].skipping
    tail = again(tail)
    add(path, "", "b")
    assert [b"b"] == drained(tail)
    assert not tail.faults, "it was counted where it was found"
    whole = Tail(path)
    assert [b"a", b"b"] == drained(whole)
    assert {"long": 1} == whole.faults


def test_a_line_at_the_limit_is_whole(path):
    path.write_bytes(b"x" * (MAX_LINE_BYTES - 1) + b"\n" + b"y" * MAX_LINE_BYTES + b"\nz\n")
    tail = Tail(path)
    assert [MAX_LINE_BYTES - 1, MAX_LINE_BYTES, 1] == [len(line) for line in drained(tail)]
    assert not tail.faults


def test_case_12_nul_hole_after_a_cut(path, rotated):
    """Case 12 a hole of NUL bytes after a cut under a writer that does not append."""
    with path.open("wb", buffering=0) as writer:
        writer.write(b"1" * (2 * MAX_LINE_BYTES // 3) + b"\n2\n")
        tail = Tail(path)
        assert 2 == len(drained(tail))
        copytruncate(path, rotated)
        writer.write(b"3\n")
        assert [b"3"] == drained(tail, 40)
        writer.seek(9 * MAX_LINE_BYTES, os.SEEK_CUR)
        assert [] == drained(tail, 80)
        writer.write(b"4\n")
        assert [b"4"] == drained(tail, 120)
    assert {"nul"} == set(tail.faults)


def test_trailing_nul_bytes_wait(path):
    """NUL bytes at the end wait since the file may only seem that long."""
    path.write_bytes(b"1\n" + b"\0" * 2)
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    path.write_bytes(b"1\n2\n")
    assert [b"2"] == polled(tail, 1)


def test_case_13_a_compressed_copy_is_left_out(path, rotated):
    add(path, 1)
    tail = Tail(path)
    polled(tail, 0)
    path.rename(rotated)
    rotated.with_name("requests.jsonl.1.gz").write_bytes(gzip.compress(rotated.read_bytes()))
    rotated.unlink()
    add(path, 2)
    assert [b"2"] == drained(tail)
    assert not tail.faults, "nothing is lost"
    assert [] == drained(again(tail))


def test_case_14_a_symlink_that_is_swapped(path, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    add(one, 1)
    add(two, 3)
    path.symlink_to(one)
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    add(one, 2)
    (tmp_path / "swap").symlink_to(two)
    (tmp_path / "swap").replace(path)
    assert [b"2", b"3"] == drained(tail)
    assert 1 == tail.rotations


def test_case_15_positions_hold_no_content(path):
    """Case 15 positions are stored by who counts and hold no content."""
    add(path, "SECRET-request")
    tail = Tail(path)
    polled(tail, 0)
    assert b"SECRET" not in msgspec.msgpack.encode(tail.positions())


def test_case_16_the_same_line_twice_is_handed_out_twice(path):
    add(path, 1, 1)
    assert [b"1", b"1"] == polled(Tail(path), 0)


def test_case_17_what_a_line_says_is_not_the_tails_business(path):
    path.write_bytes(b"\xff\xfe{not json\r\n{}\r\n\n  \n\r\n")
    assert [b"\xff\xfe{not json", b"{}"] == polled(Tail(path), 0)


def test_case_18_a_stale_handle_is_opened_anew():
    disk = FakeDisk()
    disk.append("log", b"1\n")
    tail = Tail(Path("/x/log"), disk=disk)
    assert [b"1"] == polled(tail, 0)
    disk.stale |= set(disk.fds)
    disk.append("log", b"2\n")
    assert [b"2"] == polled(tail, 1)
    disk.stale |= set(disk.fds)
    with pytest.raises(OSError, match="Stale"):
        polled(tail, 2)
    assert [] == polled(tail, 3)


def test_changed_device_number_is_no_new_file():
    """A device number that changes over a restart is no new file."""
    disk = FakeDisk()
    disk.append("log", b"1\n")
    disk.append("log.1", b"0\n")
    tail = Tail(Path("/x/log"), disk=disk)
    polled(tail, 0)
    disk.append("log", b"2\n")
    disk.device = 99
    tail = again(tail, disk=disk)
    assert [b"2"] == drained(tail)
    assert not tail.faults


def test_case_19_half_line_of_a_dead_writer(path, rotated):
    """Case 19 half a line of a writer that died ends in one bad line or is told."""
    path.write_bytes(b'{"id":1}\n{"id"')
    tail = Tail(path)
    assert [b'{"id":1}'] == polled(tail, 0)
    add(path, '{"id":3}')
    assert [b'{"id"{"id":3}'] == polled(tail, 1)
    with path.open("ab") as file:
        file.write(b"half")
    path.rename(rotated)
    add(path, '{"id":4}')
    assert [b'{"id":4}'] == drained(tail, 2)
    assert {"torn": 1} == tail.faults


def test_a_writer_that_cuts_its_own_half_line_away_is_no_cut(path):
    """So the gateway fixes its log after a write that failed in the middle."""
    path.write_bytes(b"1\n2\nhal")
    tail = Tail(path)
    assert [b"1", b"2"] == polled(tail, 0)
    os.truncate(path, 4)
    assert [] == polled(tail, 1)
    add(path, 3)
    assert [b"3"] == polled(tail, 2)
    assert not tail.faults
    assert 0 == tail.rotations


def test_case_20_times_of_files_are_only_a_hint(path, rotated):
    add(path, 1)
    tail = Tail(path)
    polled(tail, 0)
    path.rename(rotated)
    add(path, 2)
    os.utime(rotated, (2e9, 2e9))
    os.utime(path, (0, 0))
    assert [b"2"] == drained(again(tail))


# --- beyond the table


@given(st.lists(st.binary(max_size=30).map(lambda b: b"x" + b.translate(None, b"\n\0") + b"x"), max_size=20), st.data())
def test_lines_come_out_whole_and_once_however_they_were_written(lines, data):
    disk = FakeDisk()
    tail, got = Tail(Path("/x/log"), disk=disk), []
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        disk.append("log", whole[start:end])
        got += polled(tail, 0)
    assert lines == got


def test_file_moved_away_and_back_is_not_reread(path, tmp_path):
    """A file that was moved away and back is read on and not again."""
    away = tmp_path / "away"
    add(path, 1, 2)
    tail = Tail(path)
    assert [b"1", b"2"] == polled(tail, 0)
    path.rename(away)
    assert [] == polled(tail, 1)
    assert [] == polled(tail, 10)
    add(away, 3)
    assert [b"3"] == polled(tail, 20), "without a successor the old file is followed on"
    away.rename(path)
    assert [] == polled(tail, 21)
    path.rename(away)
    add(path, 4)
    assert [b"4"] == polled(tail, 22)
    path.unlink()
    away.rename(path)
    assert [] == polled(tail, 23)
    assert 2 == tail.rotations


def test_what_is_no_regular_file_is_refused_and_never_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="regular file"):
        Tail(path).poll(0)


def test_a_file_that_comes_later_is_found_at_once(path):
    tail = Tail(path)
    assert [] == polled(tail, 0)
    assert not tail.found
    add(path, "x")
    assert [b"x"] == polled(tail, 0.02)
    assert tail.found


def test_a_poll_ends_soon_after_its_budget_and_the_next_goes_on(path):
    add(path, *(f"{n:0599}" for n in range(2000)))
    tail = Tail(path)
    assert 436 == len(polled(tail, 0, budget_bytes=1)), "one chunk"
    assert 436 == len(polled(tail, 0, budget_bytes=CHUNK_BYTES - 1024))
    assert 2000 - 872 == len(polled(tail, 0))
    assert 0 == tail.unread_bytes()


def test_what_is_not_handed_out_yet_is_unread(path):
    path.write_bytes(b"1\n22")
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    assert 2 == tail.unread_bytes()


def test_file_that_lost_its_end_continues_at_last_mark(path):
    """A file that lost its end in a crash of the machine is read on from the last mark."""
    tail, numbers = Tail(path), [f"{n:08} {'x' * 400}" for n in range(2000)]
    for start in range(0, 2000, 50):
        add(path, *numbers[start : start + 50])
        assert 50 == len(polled(tail, start))
    size = path.stat().st_size
    os.truncate(path, size - 100_000)
    with path.open("ab") as file:
        file.write(b"\0" * 40_000)
    add(path, "after")
    tail = again(tail)
    lines = drained(tail)
    assert b"after" in lines
    twice = [line for line in lines if line.decode() in numbers]
    assert len(twice) * 409 <= 2 * positions_module.STEP_BYTES, "no more than the distance of two marks"
    assert {"reread": 1, "nul": 1} == tail.faults


def test_marks_are_few_however_long_the_file_is(path):
    tail = Tail(path)
    for turn in range(300):
        add(path, *(f"{turn} {n} {'x' * 1000}" for n in range(100)))
        polled(tail, turn)
    assert len(tail.positions()[0].marks) <= STEPS + 1
    assert len(msgspec.msgpack.encode(tail.positions())) < 4000


def test_a_copy_beside_a_file_is_not_read(path):
    add(path, 1, 2)
    tail = Tail(path)
    polled(tail, 0)
    path.with_name("requests.jsonl.bak").write_bytes(path.read_bytes())
    path.rename(path.with_name("requests.jsonl.1"))
    add(path, 3)
    assert [b"3"] == drained(tail)
    assert [] == drained(again(tail))


def test_a_copy_that_turns_up_late_still_gives_its_unread_lines(path, rotated, tmp_path):
    add(path, 1)
    tail = Tail(path)
    polled(tail, 0)
    add(path, 2)
    copytruncate(path, tmp_path / "elsewhere")
    add(path, 3)
    assert [b"3"] == drained(tail)
    (tmp_path / "elsewhere").rename(rotated)
    assert [b"2"] == drained(tail, 40)


def test_rotated_files_count_as_read_only_at_first(path, rotated):
    """Rotated files are taken as read at the very first look only."""
    add(rotated, "old")
    add(path, 1)
    tail = Tail(path)
    assert [b"1"] == drained(tail)
    assert [] == drained(again(tail))


def test_rotated_file_growth_is_read_with_its_half_line(path, rotated):
    """What a rotated file gets after the first look is read with its half line."""
    rotated.write_bytes(b"old\nha")
    add(path, 1)
    tail = Tail(path)
    assert [b"1"] == drained(tail)
    add(rotated, "lf")
    assert [b"half"] == drained(tail, 40)


def test_compressed_log_is_an_error_not_a_fault(path):
    """A compressed log is an error and never counted as a fault."""
    path.write_bytes(gzip.compress(b"1\n"))
    tail = Tail(path)
    for second in range(3):
        with pytest.raises(OSError, match="not compressed"):
            tail.poll(second)
    assert not tail.faults


def test_folder_scan_once_a_second_or_on_a_new_path(path, rotated):
    """The folder is looked through once a second and when the path leads elsewhere."""

    class Counting(TailDisk):
        looks = 0

        def names(self, folder: Path) -> list[str]:
            self.looks += 1
            return super().names(folder)

    disk = Counting()
    tail = Tail(path, disk=disk)
    for step in range(100):
        tail.poll(step / 50)
    assert 2 == disk.looks, "also while there is no file"
    add(path, 1)
    assert [b"1"] == polled(tail, 2.0)
    path.rename(rotated)
    add(path, 2)
    assert [b"2"] == polled(tail, 2.1)
    assert 4 == disk.looks


def test_lines_that_end_alike_are_told_apart_by_the_beginning(path):
    long_end = "x" * (2 * GUARD_BYTES)
    add(path, "a" + long_end)
    tail = Tail(path)
    assert 1 == len(polled(tail, 0))
    os.truncate(path, 0)
    add(path, "b" + long_end)
    assert [f"b{long_end}".encode()] == polled(tail, 1)


def test_copytruncate_while_not_reading_is_read_on(path, rotated):
    """A file that was cut to its beginning and moved aside while nobody read is read on."""
    add(path, "a" * HEAD_BYTES, "b")
    tail = Tail(path)
    assert 2 == len(polled(tail, 0))
    os.truncate(path, HEAD_BYTES + 1)
    add(path, "c")
    path.rename(rotated)
    add(path, "d")
    assert {b"c", b"d"} <= set(drained(again(tail)))


def test_files_beginning_with_a_hole_are_distinct(path, rotated):
    """Files that begin with a hole are not taken for copies of each other."""
    hole = b"\0" * HEAD_BYTES
    path.write_bytes(hole + b"1\n")
    tail = Tail(path)
    assert [b"1"] == polled(tail, 0)
    path.rename(path.with_name("requests.jsonl.2"))
    rotated.write_bytes(hole + b"\0\0" + b"2\n")
    path.write_bytes(hole + b"\0\0\0\0" + b"3\n")
    assert {b"2", b"3"} == set(drained(again(tail)))


def test_files_beginning_with_a_blank_line_are_distinct(path, rotated):
    """Files that begin with a blank line are not taken for copies of each other."""
    tail = Tail(path)
    for line in ("", "a" * 100):
        add(path, line)
        tail.poll(0)
    path.rename(path.with_name("requests.jsonl.2"))
    add(rotated, "", "b" * 100)
    add(path, "", "c")
    assert {b"b" * 100, b"c"} == set(drained(again(tail)))


def test_rename_between_look_and_open_reads_once():
    """A path that is renamed between a look and the opening is read once."""

    class Renaming(FakeDisk):
        opened = 0

        def open(self, path: Path) -> int:
            self.opened += 1
            if self.opened == 2:  # the first one was the look
                self.named["log.1"] = self.named.pop("log")
                self.append("log", b"2\n")
            return super().open(path)

    disk = Renaming()
    disk.append("log", b"1\n")
    tail = Tail(Path("/x/log"), disk=disk)
    assert [b"1", b"2"] == drained(tail)


def test_a_file_that_was_let_go_keeps_one_mark(path, rotated):
    add(path, *("x" * 999 for _ in range(500)))
    tail = Tail(path)
    assert 500 == len(polled(tail, 0))
    assert 2 == len(tail.positions()[0].marks)
    path.rename(rotated)
    add(path, "new")
    assert [b"new"] == drained(tail)
    assert [1, 1] == [len(position.marks) for position in tail.positions()]


def test_missing_file_at_start_is_reported(path):
    """A file that is gone at a start is told and the new one read."""
    add(path, 1)
    tail = Tail(path)
    polled(tail, 0)
    path.unlink()
    path.with_name("hold-the-inode").touch()
    add(path, 2)
    tail = again(tail)
    assert [b"2"] == drained(tail)
    assert 1 == tail.faults["gone"] + tail.faults["cut"]


@pytest.mark.parametrize(
    ("pattern", "moved"),
    [
        ("../old/requests.jsonl.*", ["../old/requests.jsonl.2", "../old/requests.jsonl.1"]),
        ("requests-*.jsonl*", ["requests-2026-11-26.jsonl", "requests-2026-11-27.jsonl.gz"]),
        ("../*/[0-9]*/r.gz", ["../2026/11/r.gz", "../2026/12/r.gz"]),
        (None, ["../old/requests.jsonl.1", "../old/requests.jsonl.2"]),
    ],
)
def test_rotated_files_are_found_by_their_pattern(tmp_path, pattern, moved):
    """In other folders and under other names, while the reader was stopped; without the pattern they are reported."""
    path = tmp_path / "log" / "requests.jsonl"
    path.parent.mkdir()
    add(path, *range(40))
    tail = Tail(path, rotated=pattern)
    polled(tail, 0)
    for number, name in enumerate(moved):
        add(path, *range(100 * number + 100, 100 * number + 140))
        seen, tail = tail.positions(), Tail(path, tail.positions(), rotated=pattern)
        target = path.parent / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(path.read_bytes()) if name.endswith("gz") else path.read_bytes())
        path.unlink()
    add(path, 900)
    found = [int(line) for second in range(10) for line in polled(tail, second)]
    expected = [*range(100, 140), *range(200, 240), 900] if pattern else [900]
    assert (expected, pattern is None) == (sorted(found), tail.faults["gone"] + tail.faults["cut"] == 1)
    assert seen[0].offset


def test_missing_bytes_are_reported(path, caplog):
    """As far as they were seen before the reader ended."""
    add(path, 1)
    tail = Tail(path)
    polled(tail, 0)
    add(path, "unread")
    known = tail.positions()
    path.rename(path.with_name("elsewhere"))
    add(path, "new")
    polled(Tail(path, known), 0)
    assert f" {len('unread') + 1} bytes" in caplog.text


def test_a_deleted_file_is_read_to_its_end(path):
    with path.open("ab", buffering=0) as writer:
        writer.write(b"1\n")
        tail = Tail(path)
        polled(tail, 0)
        writer.write(b"2\n")
        path.unlink()
        writer.write(b"3\n")
        assert [b"2", b"3"] == polled(tail, 1)
        assert not tail.found


def test_pattern_follows_present_and_later_files(tmp_path):
    """A pattern follows every file that fits also those that come later."""
    add(tmp_path / "requests-a.jsonl", "a1")
    add(tmp_path / "other.jsonl", "no")
    tail = Tail(tmp_path / "requests*.jsonl")
    assert [b"a1"] == polled(tail, 0)
    add(tmp_path / "requests-b.jsonl", "b1")
    add(tmp_path / "requests-a.jsonl", "a2")
    (tmp_path / "requests-a.jsonl").rename(tmp_path / "requests-a.jsonl-20260512")
    assert {b"a2", b"b1"} == set(drained(tail, 1))
    assert [] == drained(again(tail))


def test_two_names_of_one_file_are_read_once(tmp_path):
    add(tmp_path / "requests-a.jsonl", 1)
    (tmp_path / "requests-now.jsonl").symlink_to(tmp_path / "requests-a.jsonl")
    assert [b"1"] == drained(Tail(tmp_path / "requests*.jsonl"))


def test_a_cut_from_a_hole_to_a_longer_hole_is_seen(path, rotated):
    """As a writer without O_APPEND leaves it at each copytruncate; the line before the cut comes once though its copy
    is new."""
    hole = 2 * MAX_LINE_BYTES
    path.write_bytes(b"\0" * hole + b"1\n")
    tail = Tail(path)
    assert [b"1"] == drained(tail)
    copytruncate(path, rotated)
    path.write_bytes(b"\0" * (hole + 2) + b"2\n")
    assert [b"2"] == drained(tail, 40)


@pytest.mark.parametrize(
    "copy", ["requests.jsonl.1", "requests.jsonl.2"], ids=["with the inode of the hole", "with a new inode"]
)
def test_position_in_a_hole_fits_no_other_holed_file(path, rotated, copy):
    """A reading that ended in a hole is not taken for that of another file with a hole."""
    hole = b"\0" * (2 * MAX_LINE_BYTES)
    rotated.write_bytes(hole + b"half")
    path.write_bytes(hole + b"1\n")
    tail = Tail(path, ())
    assert [b"1"] == drained(tail)
    if copy != rotated.name:
        rotated.rename(path.with_name("hold-the-inode"))
    copytruncate(path, path.with_name(copy))
    assert [] == drained(again(tail))


def test_a_name_with_brackets_is_a_name(tmp_path):
    add(tmp_path / "log[1].jsonl", 1)
    assert [b"1"] == polled(Tail(tmp_path / "log[1].jsonl"), 0)


def test_few_files_are_held_open(tmp_path):
    for number in range(3 * OPEN_AT_MOST):
        add(tmp_path / f"requests-{number:04}.jsonl", number)
    tail = Tail(tmp_path / "requests*.jsonl")
    assert 3 * OPEN_AT_MOST == len(drained(tail))
    assert len(tail._followed) <= OPEN_AT_MOST
    for number in range(3 * OPEN_AT_MOST):
        add(tmp_path / f"requests-{number:04}.jsonl", f"{number} more")
    assert 3 * OPEN_AT_MOST == len(drained(tail, 60))


def test_an_unreadable_path_is_an_error_and_read_on_later():
    disk = FakeDisk()
    disk.append("log", b"1\n")
    tail = Tail(Path("/x/log"), disk=disk)
    polled(tail, 0)
    tail = again(tail, disk=disk)
    disk.blocked = True
    for second in range(3):
        with pytest.raises(PermissionError):
            polled(tail, second)
    disk.append("log", b"2\n")
    disk.blocked = False
    assert [b"2"] == polled(tail, 3)
    assert not tail.faults


def test_faults_are_told_without_what_the_lines_hold(path, caplog):
    path.write_bytes(b"SECRET\n" + b"\0" * 9 + b"SECRET\n" + b"SECRET" * MAX_LINE_BYTES + b"\n")
    tail = Tail(path)
    with caplog.at_level(logging.WARNING):
        drained(tail)
        os.truncate(path, 0)
        drained(tail, 40)
    assert {"nul", "long", "cut"} == set(tail.faults) <= set(REASONS)
    assert "(long)" in caplog.text
    assert "SECRET" not in caplog.text


@given(st.binary(max_size=60).map(lambda data: data.replace(b"\x07", b"\n").replace(b"\x08", b"\0")), st.booleans())
def test_taking_never_goes_beyond_the_last_newline(data, skipping):
    taken = take(data, skipping)
    assert b"\0" not in taken.block
    assert taken.block == b"" or (taken.block.endswith(b"\n") and lines_of(taken.block))
    assert taken.used in (0, len(data), data.rfind(b"\n") + 1, data.rfind(b"\0") + 1)
    assert not taken.skipping or (skipping and b"\n" not in data)


# --- random histories


class Inode:
    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytearray()


class FakeDisk(TailDisk):
    """A folder in memory that gives out the lowest free inode at once, lies about times, and can refuse."""

    def __init__(self) -> None:
        self.named: dict[str, Inode] = {}
        self.fds: dict[int, Inode] = {}
        self.writer: Inode | None = None
        self.stale: set[int] = set()
        self.blocked = False
        self.device = 1
        self._numbers = count(3)

    def create(self, name: str) -> Inode:
        taken = {inode.number for inode in (*self.named.values(), *self.fds.values(), *filter(None, [self.writer]))}
        self.named[name] = Inode(next(number for number in count(1) if number not in taken))
        return self.named[name]

    def append(self, name: str, data: bytes) -> None:
        (self.named.get(name) or self.create(name)).data.extend(data)

    def names(self, folder: Path) -> list[str]:
        return list(self.named)

    def stat(self, path: Path) -> Stat:
        if path.name not in self.named:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        inode = self.named[path.name]
        return Stat((self.device, inode.number), len(inode.data), True, -inode.number)

    def open(self, path: Path) -> int:
        if path.name not in self.named:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        if self.blocked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        fd = next(self._numbers)
        self.fds[fd] = self.named[path.name]
        return fd

    def fstat(self, fd: int) -> Stat:
        inode = self.fds[fd]
        return Stat((self.device, inode.number), len(inode.data), True, 0)

    def read(self, fd: int, offset: int, size: int) -> bytes:
        if fd in self.stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return bytes(self.fds[fd].data[offset : offset + size])

    def close(self, fd: int) -> None:
        del self.fds[fd]
        self.stale.discard(fd)


BEGINNING = re.compile(rb"(\d{6});(\d{6});")  # id and size of a line


def line_of(number: int, size: int) -> bytes:
    """With its id all over, as a line of ours is shorter than a guard: behind a hole nothing else tells two files
    apart."""
    return b"%06d;%06d;%s!\n" % (number, size, (b"%06d" % number * (size // 6 + 1))[:size])


def id_of(line: bytes) -> list[int]:
    """The id of a line that is whole; of others nothing."""
    match = BEGINNING.match(line)
    return [int(match[1])] if match and len(line) == match.end() + int(match[2]) + 1 and line.endswith(b"!") else []


def ids(data: bytes | bytearray) -> set[int]:
    """Ids of the whole lines in a file."""
    return {number for piece in re.findall(rb"[^\n\0]+", data[: data.rfind(b"\n") + 1]) for number in id_of(piece)}


class Histories(RuleBasedStateMachine):
    """Whatever happens, each id is read exactly once, except where its last copy was destroyed before a commit (it may
    be lost) or where a file was cut to a beginning that stays (what it held may come again, and what was not read of it
    may be lost)."""

    @initialize(appends=st.booleans())
    def start(self, appends: bool) -> None:
        self.disk = FakeDisk()
        self.appends = appends
        self.at = 0  # where a writer that does not append writes next
        self.half = b""
        self.cut_short: Inode | None = None
        self.next_id = 0
        self.now = 0.0
        self.written: set[int] = set()
        self.may_be_lost: set[int] = set()
        self.may_come_again: set[int] = set()
        self.counts: Counter[int] = Counter()
        self.disk.writer = self.disk.create("log")
        self.tail = Tail(Path("/x/log"), disk=self.disk)
        self.read(None)
        self.commit()

    def on_disk(self) -> set[int]:
        return set().union(*(ids(inode.data) for inode in self.disk.named.values()))

    def destroy(self, act) -> None:
        before = self.on_disk()
        act()
        self.may_be_lost |= {number for number in before - self.on_disk() if not self.committed[number]}

    def put(self, data: bytes) -> None:
        inode = self.disk.writer
        if self.appends:
            self.at = len(inode.data)
        inode.data.extend(b"\0" * (self.at - len(inode.data)))
        inode.data[self.at : self.at + len(data)] = data
        self.at += len(data)

    @rule(
        sizes=st.lists(st.sampled_from([0, 0, 40, 700, 3000, 7000, 9000]), min_size=1, max_size=5),
        torn=st.sampled_from([0, 0, 0, 1, 9]),
        then=st.sampled_from(["", "poll", "commit"]),
    )
    def write(self, sizes: list[int], torn: int, then: str) -> None:
        data = self.half + b"".join(line_of(self.next_id + at, size) for at, size in enumerate(sizes))
        # longer than the limit
        self.may_be_lost |= {self.next_id + at for at, size in enumerate(sizes) if size == 9000}
        self.next_id += len(sizes)
        cut = len(data) - torn
        self.put(data[:cut])
        self.half = data[cut:]
        self.note()
        if then:
            self.poll(0.05, None)
        if then == "commit":
            self.commit()

    def note(self) -> None:
        """Which lines have become whole, and which of them stand where no reader can come anew."""
        found = ids(self.disk.writer.data)
        self.may_be_lost |= (found - self.written) - self.on_disk()
        self.written |= found

    @rule(open_anew=st.sampled_from([True, True, False]))
    def rotate(self, open_anew: bool) -> None:
        self.destroy(self.shift)
        if "log" in self.disk.named:
            self.disk.named["log.1"] = self.disk.named.pop("log")
        if open_anew:
            self.open_anew()

    def shift(self) -> None:
        for older, newer in (("log.3", "log.2"), ("log.2", "log.1")):
            if newer in self.disk.named:
                self.disk.named[older] = self.disk.named.pop(newer)

    @rule()
    def open_anew(self) -> None:
        """The writer follows its path; if it died in the middle of a line, that line stays torn."""
        self.disk.writer = self.disk.named.get("log") or self.disk.create("log")
        self.half, self.at = b"", len(self.disk.writer.data)

    @precondition(lambda self: "log" in self.disk.named)
    @rule(looks=st.lists(st.sampled_from(["at nothing", "at a part", "at all"])))
    def copytruncate(self, looks: list[str]) -> None:
        """As logrotate does it: the copy grows in large pieces, and a poll may come before any of them.

        While a copy that begins with a hole grows, nothing tells it from a new file; there a poll may read lines
        twice."""
        self.destroy(self.shift)
        data = self.disk.named["log"].data
        copy = self.disk.create("log.1").data
        for stage, size in (("at nothing", 0), ("at a part", max(HEAD_BYTES, len(data) // 2)), ("at all", len(data))):
            copy[:] = data[:size]
            if stage in looks and not data.startswith(b"\0"):
                self.poll(1.5, None)
        data.clear()

    @precondition(lambda self: "log" in self.disk.named)
    @rule(kind=st.sampled_from(["cut to nothing", "cut to a beginning", "delete"]), share=st.floats(0.05, 0.95))
    def lose(self, kind: str, share: float) -> None:
        live = self.disk.named["log"]
        before = ids(live.data)

        def act() -> None:
            if kind == "delete":
                del self.disk.named["log"]
            else:
                del live.data[int(share * len(live.data)) if kind == "cut to a beginning" else 0 :]

        self.destroy(act)
        # behind what was read it is as if nothing had been, and a copy is not looked into
        if kind == "cut to a beginning":
            self.cut_short = live
            self.may_be_lost |= {number for number in before - ids(live.data) if not self.committed[number]}
            # what was cut away may stand in a copy
            self.may_come_again |= before | {int(match[1]) for match in BEGINNING.finditer(bytes(live.data))}
        elif kind == "delete":
            self.open_anew()

    @precondition(lambda self: "log" in self.disk.named)
    @rule()
    def copy(self) -> None:
        """A copy beside it; one of lines that nobody has read yet, or whose beginning nobody has, cannot be told from a
        log."""
        live = self.disk.named["log"]
        if (
            live is not self.cut_short
            and (found := ids(live.data))
            and self.committed[min(found)]
            and live.data.startswith(b"%06d;" % min(found))
        ):

            def act() -> None:
                self.disk.named.pop("log.copy", None)
                self.disk.create("log.copy").data.extend(live.data)

            self.destroy(act)

    @rule(step_s=st.sampled_from([0.05, 0.05, 1.5, 7.0]), budget=st.sampled_from([None, None, 1]))
    def poll(self, step_s: float, budget: int | None) -> None:
        self.now += step_s
        self.read(budget)

    def read(self, budget: int | None) -> None:
        try:
            lines = polled(self.tail, self.now) if budget is None else polled(self.tail, self.now, budget_bytes=budget)
        except OSError:
            return
        self.counts.update(number for line in lines for number in id_of(line))

    @rule()
    def commit(self) -> None:
        self.positions = stored(self.tail)
        self.committed = Counter(self.counts)

    @rule(committed=st.booleans())
    def kill(self, committed: bool) -> None:
        if committed:
            self.commit()
        self.tail.close()
        self.tail = Tail(Path("/x/log"), self.positions, disk=self.disk)
        self.counts = Counter(self.committed)

    @rule()
    def stale_handles(self) -> None:
        self.disk.stale |= set(self.disk.fds)

    @rule()
    def poll_while_nothing_can_be_opened(self) -> None:
        self.disk.blocked = True
        self.poll(1.5, None)
        self.disk.blocked = False

    def teardown(self) -> None:
        if not hasattr(self, "tail"):
            return
        for _ in range(12):
            self.now += 3
            self.read(None)
        missing = {number for number in self.written - self.may_be_lost if not self.counts[number]}
        again = {number for number, times in self.counts.items() if times > 1} - self.may_come_again
        assert (set(), set()) == (missing, again), f"missing {missing}, twice {again}"
        assert set(self.tail.faults) <= set(REASONS)
        assert len(self.tail._followed) <= OPEN_AT_MOST


def test_random_histories_are_read_exactly_once(caplog, monkeypatch):
    """With small limits, so that short files have what else only long ones have."""
    for name, size in {"CHUNK_BYTES": 2048, "STEP_BYTES": 4096, "MAX_LINE_BYTES": 8192}.items():
        monkeypatch.setattr(positions_module, name, size)
    caplog.set_level(logging.ERROR, "vllm_watch.tail")
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=HISTORIES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_reading_is_in_large_pieces(path):
    """A call to the system for each 256 KiB, and a few more for each poll."""

    class Counting(TailDisk):
        calls = 0

        def read(self, fd: int, offset: int, size: int) -> bytes:
            Counting.calls += 1
            return super().read(fd, offset, size)

    add(path, *("x" * 400 for _ in range(20_000)))
    assert 20_000 == len(drained(Tail(path, disk=Counting())))
    assert Counting.calls < 2 * path.stat().st_size / CHUNK_BYTES + 200
    assert GUARD_BYTES > 1000


def test_unreadable_folder_is_an_error_until_it_is_readable(path):
    class Locked(TailDisk):
        locked = True

        def names(self, folder: Path) -> list[str]:
            if self.locked:
                raise OSError(errno.EIO, "input/output error")
            return super().names(folder)

    add(path, "a")
    disk = Locked()
    tail = Tail(path, (), disk=disk)
    with pytest.raises(OSError, match="input/output error"):
        tail.poll(0.0)
    disk.locked = False
    assert [b"a"] == polled(tail, 0.1)


def test_one_kind_of_fault_is_logged_a_few_times(path, caplog):
    tail = Tail(path)
    for _ in range(LOGGED_AT_MOST + 3):
        tail._tell(REASONS[0], "requests.jsonl", "odd")
    assert (LOGGED_AT_MOST, LOGGED_AT_MOST + 3) == (len(caplog.records), tail.faults[REASONS[0]])


def test_size_of_a_file_that_cannot_be_asked_is_what_was_read(path):
    class Gone(TailDisk):
        gone = False

        def fstat(self, fd: int) -> Stat:
            if self.gone:
                raise OSError(errno.ESTALE, "stale file handle")
            return super().fstat(fd)

    add(path, "a")
    disk = Gone()
    tail = Tail(path, (), disk=disk)
    assert [b"a"] == polled(tail, 0.0)
    disk.gone = True
    assert 2 == tail._size(tail._followed[0])
