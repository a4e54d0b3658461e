"""The reader of whole request logs: order, compression, bounds, bad lines."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
from pathlib import Path

import pytest

from exporters.accounting.cost_from_log import from_log
from exporters.requests import read
from exporters.requests.read import ReadReport, read_records
from exporters.requests.record import FieldMap, RequestRecord, to_line
from stack.capacity import command
from stack.doctor.collect import records_of
from stack.tuning.samples import read_samples


def lines(*names: str) -> bytes:
    return b"".join(
        to_line(RequestRecord(request_id=name, ts="2026-05-12T09:30:00Z", e2e_ms=1000.0, model="m")) for name in names
    )


def names(*paths: Path, bad: ReadReport | None = None, **how) -> list[str]:
    return [record.request_id for record in read_records(paths, bad, **how)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_rotated_and_compressed_files_are_read_in_their_order(tmp_path, pack):
    """A file is recognised by its content; a rotated file often has no ending of its own."""
    old, new = tmp_path / "requests.jsonl.1", tmp_path / "requests.jsonl"
    old.write_bytes(pack(lines("a", "b")))
    new.write_bytes(lines("c"))
    assert ["a", "b", "c"] == names(old, new)


def test_bad_lines_are_counted_by_reason_and_cost_no_other(tmp_path):
    path, bad = tmp_path / "log", ReadReport()
    path.write_bytes(lines("a") + b"nonsense\n" + b'{"request_id":3}\n' + b"more nonsense\n" + b"\0\0\0" + lines("b"))
    assert ["a", "b"] == names(path, bad=bad)
    assert ({"json": 2, "type": 1}, 3) == (dict(bad.counts), bad.total)
    assert "nonsense" not in str(bad.places["json"])


@pytest.mark.parametrize("chunk_bytes", [1, 50, 1 << 20])
def test_bad_lines_have_their_number(tmp_path, monkeypatch, chunk_bytes):
    """File, number and allowed values, also behind zero bytes, blank and long lines."""
    monkeypatch.setattr(read, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(read, "MAX_LINE_BYTES", 300)
    path, bad = tmp_path / "log", ReadReport()
    wrong = b'{"request_id":"x","outcome":"fine"}\n'
    path.write_bytes(lines("a") + b"\n\n" + wrong + b"\0" * 9 + lines("b") + b"y" * 5000 + b"\n" + wrong + lines("a"))
    assert ["a", "b"] == names(path, bad=bad)
    ((message, places),) = bad.places["type"].items()
    assert ([f"{path}:4", f"{path}:7"], 1, 2) == (places, bad.repeats, bad.records)
    assert "ok, client_abort, rejected" in message


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 1 << 20])
def test_chunks_of_any_size_make_the_same_lines(tmp_path, monkeypatch, chunk_bytes):
    """A line longer than the limit is one bad line, however many chunks it has; the lines beside it are kept."""
    monkeypatch.setattr(read, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(read, "MAX_LINE_BYTES", 200)
    path, bad = tmp_path / "log", ReadReport()
    path.write_bytes(lines("a", "b") + b"x" * 5000 + b"\n" + lines("c") + b"y" * 5000)
    assert ["a", "b", "c"] == names(path, bad=bad)
    assert 2 == bad.total
    assert chunk_bytes > 5000 or {"long": 2} == dict(bad.counts)


def test_last_line_without_newline(tmp_path):
    """A last line without newline is read unless only ended ones count."""
    path = tmp_path / "log"
    path.write_bytes(lines("a", "b")[:-1])
    assert ["a", "b"] == names(path)
    assert ["a"] == names(path, ended_lines_only=True)


def test_foreign_names_and_progress_in_bytes(tmp_path):
    """Foreign names are mapped and progress counts the bytes of the file."""
    path, seen = tmp_path / "log.gz", []
    path.write_bytes(gzip.compress(b'{"id":"a"}\n{"id":"b"}\n'))
    assert ["a", "b"] == names(path, fields=FieldMap({"id": "request_id"}), progress=seen.append)
    assert path.stat().st_size == sum(seen)


def test_an_error_names_its_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        names(tmp_path / "nowhere")
    path = tmp_path / "torn.gz"
    path.write_bytes(gzip.compress(lines(*map(str, range(200))))[:-9])
    with pytest.raises(OSError, match=r"/torn\.gz") as caught:
        names(path)
    assert errno.EBADMSG == caught.value.errno


def test_every_offline_reader_takes_a_compressed_log(tmp_path):
    """cost, capacity and doctor read .xz as any other; they took its bytes for bad lines when each had a reader of its
    own."""
    path = tmp_path / "log.xz"
    path.write_bytes(lzma.compress(lines("a", "b")))
    assert [1.0] == [use.seconds for use in from_log([path]).uses.values()]
    assert 2 == len(records_of([path]))
    assert 2 == len(read_samples([path]).samples)
    with pytest.raises(command.BadTraffic, match=r"^log: no request .*prompt_tokens and completion_tokens"):
        command.of_log(read_records([path]), "log")
