"""One log and six readers: sidecar, ship, requests, cost, compare and capacity count the same requests, tokens,
repeats and bad lines."""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.accounting.cost_from_log import LogFiles, from_log
from exporters.catalogue import ship as ship_series
from exporters.catalogue import sidecar as sidecar_series
from exporters.dataset.layout import total
from exporters.dataset.query import RequestSource, open_requests
from exporters.dataset.ship import Shipper
from exporters.dataset.ship_config import ShipConfig
from exporters.requests.read import ReadReport, read_records
from exporters.requests.record import RequestRecord, timestamp
from exporters.sidecar import Sidecar
from exporters.sidecar_config import SidecarConfig
from stack.capacity import command
from stack.tuning.samples import RequestSample, read_samples

START_S = 1_764_000_000.0
IDS = (
    "r{}", "{:032x}", "{:048x}", "é{}", "{}" + "x" * 300, 'a\n"{}', "chatcmpl-{}", "\U0001f600{}", "{} ",
)  # fmt: skip
SPANS = (None, "{:016x}", "s", "")
BAD = (b"nonsense", b'{"request_id":3}', b'{"request_id":"b","n":-1}', b'{"request_id":"b","outcome":"fine"}', b"[]")

STEPS = st.one_of(
    st.tuples(st.just("new"), st.sampled_from(IDS), st.sampled_from(SPANS)),
    st.tuples(st.just("repeat"), st.integers(0, 50)),
    st.tuples(st.just("bad"), st.sampled_from(BAD)),
    st.tuples(st.just("torn"), st.integers(3, 20)),
    st.tuples(st.just("excess")),
    st.tuples(st.just("rotate"), st.booleans()),
    st.tuples(st.just("read"), st.booleans()),
)


class Scene:
    """A log that is written and rotated while a sidecar and a shipper read it, and what it holds.

    seen: prompt and completion tokens by request_id and span_id."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "requests.jsonl"
        self.log.touch()
        self.files: list[Path] = []
        self.numbers, self.now_s, self.repeats, self.bad = count(), 0.0, 0, 0
        self.seen: dict[tuple[str, str | None], tuple[int, int]] = {}
        self.lines: list[bytes] = []
        self.open()

    def open(self) -> None:
        state = str(self.folder / "state")
        self.sidecar = Sidecar(SidecarConfig(requests_log=(str(self.log),), gpu="off", state=state))
        self.shipper = Shipper(
            ShipConfig(
                dataset=str(self.folder / "data"), cluster="c", writer="w", requests_log=(str(self.log),),
                state=str(self.folder / "ship"),
            ),
            ticks=lambda: self.now_s,
        )  # fmt: skip

    def close(self) -> None:
        self.sidecar.logs.tails[0].close()
        assert self.sidecar._checkpoint
        self.sidecar._checkpoint.close()
        self.shipper.close()

    def read(self, killed: bool) -> None:
        """Let both read to the end; killed: they lose what they have not committed."""
        (tail,) = self.sidecar.logs.tails
        for _ in range(5):  # an archive waits for another
            self.now_s += 2
            while self.sidecar.logs.poll(tail, 0.0, self.now_s):
                pass
            while self.shipper.step():
                pass
        if killed:
            self.close()
            self.open()
        else:
            if write := self.sidecar.logs.begin_commit():
                write()
                self.sidecar.ledger.succeeded()
            self.shipper.step(last=True)

    def act(self, step: tuple) -> None:
        match step:
            case ("new", name, span):
                number = next(self.numbers)
                self.write((name.format(number), span and span.format(number)), number + 1)
            case ("repeat", back) if self.lines:
                line = self.lines[-1 - back % len(self.lines)]
                self.append(line)
                self.repeats += 1
                self.bad += b"cached_tokens" in line
            case ("bad", line):
                self.append(line + b"\n")
                self.bad += 1
            case ("torn", length):  # its writer died, and another goes on in the same line
                self.append(b'{"request_id":"torn","ts":"2025-11'[: 15 + length])
                self.write((f"t{next(self.numbers)}", None), 7)
                self.bad += 1
            case ("excess",):
                self.write((f"e{next(self.numbers)}", None), 0, prompt_tokens=5, cached_tokens=9)
                self.bad += 1
            case ("rotate", packed) if self.log.stat().st_size:
                self.read(killed=False)
                old = self.log.with_name(f"{self.log.name}.{len(self.files)}" + ".gz" * packed)
                if packed:
                    old.write_bytes(gzip.compress(self.log.read_bytes()))
                    self.log.unlink()
                else:
                    self.log.rename(old)
                self.files.append(old)
                self.log.touch()
                # files are known by their content: one that begins with a line of another would be its copy
                self.write((f"f{next(self.numbers)}", None), 1)
            case ("read", killed):
                self.read(killed)

    def write(self, key: tuple[str, str | None], tokens: int, **more: int) -> None:
        record = {"request_id": key[0], "ts": timestamp(START_S + len(self.lines)), "e2e_ms": 10, "model": "m"}
        made = 1 + 3 * len(self.lines) % 11
        record |= {"team": "t", "outcome": "ok", "prompt_tokens": tokens, "completion_tokens": made, **more}
        line = msgspec.json.encode(record | ({} if key[1] is None else {"span_id": key[1]})) + b"\n"
        self.append(line)
        self.lines.append(line)
        self.seen[key] = (tokens, made)

    def append(self, data: bytes) -> None:
        with self.log.open("ab") as file:
            file.write(data)

    # --- what each reader found: requests, prompt and completion tokens, repeats, bad lines

    def found(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        paths = [*self.files, self.log]
        values = {(metric, *labels.values()): value for metric, labels, value in self.sidecar.logs.samples()}
        rows = {(metric, *labels.values()): value for metric, labels, value in self.sidecar.ledger.traffic.samples()}
        bad = sum(value for (metric, *_), value in values.items() if metric is sidecar_series.LOG_BAD_LINES)
        requests = sum(value for (metric, *_), value in rows.items() if metric is sidecar_series.REQUESTS)
        tokens = [
            sum(value for (metric, *names), value in rows.items() if metric is sidecar_series.TOKENS and kind in names)
            for kind in ("prompt", "completion")
        ]
        yield "sidecar", (requests, *tokens, values[sidecar_series.LOG_DUPLICATES, str(self.log)], bad)
        sums, shipped = total(self.shipper.state.last.sealed.values()), {}
        for metric, labels, value in self.shipper.samples():
            shipped.setdefault(metric, {})[(*labels.values(),)] = value
        repeats, bad_lines = (
            sum(shipped.get(metric, {}).values())
            for metric in (ship_series.SHIP_DUPLICATES, ship_series.SHIP_BAD_LINES)
        )
        yield "ship", (sums.requests, sums.prompt_tokens, sums.completion_tokens, repeats, bad_lines)
        with open_requests(RequestSource(logs=(self.log,))) as data:
            (row,) = data.select("SELECT count(*), sum(prompt_tokens), sum(completion_tokens) FROM requests")[1]
            totals = data.totals
        yield (
            "requests",
            (*(float(value or 0) for value in row), sum(totals.repeats.values()), sum(totals.bad.values())),
        )
        with contextlib.suppress(ValueError):  # none with a time
            bill = from_log(LogFiles(paths))
            report = LogFiles(paths).covered()[2]
            assert (report.records + report.total, report.total) == (bill.lines, bill.bad_lines)
            uses = bill.uses.values()
            tokens = [sum(use.prompt_tokens for use in uses), sum(use.completion_tokens for use in uses)]
            yield "cost", (report.records, *tokens, report.repeats, report.total)
        log = read_samples(paths)
        yield "compare", (len(log.samples), *_tokens(log.samples), log.report.repeats, log.report.total)
        report = ReadReport()
        records = list(command._records(paths, report, set()))
        yield "capacity", (len(records), *_tokens(records), report.repeats, report.total)


def _tokens(records: Sequence[RequestRecord] | Sequence[RequestSample]) -> list[int]:
    return [sum(one.prompt_tokens or 0 for one in records), sum(one.completion_tokens or 0 for one in records)]


@settings(max_examples=int(os.environ.get("VLLM_WATCH_HISTORIES", "25")), deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=30))
def test_all_readers_count_the_same(steps):
    """Repeats, torn lines, rotation, compression, restarts and odd ids."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        try:
            for step in steps:
                scene.act(step)
            scene.read(killed=False)
            tokens = [sum(each) for each in zip((0, 0), *scene.seen.values(), strict=True)]
            expected = (len(scene.seen), *tokens, scene.repeats, scene.bad)
            found = dict(scene.found())
            assert found == dict.fromkeys(found, expected)
        finally:
            scene.close()


def test_ids_are_compared_apart(tmp_path):
    """Neither the end of an id nor the beginning of a span is taken for the other."""
    log = tmp_path / "log"
    log.write_text('{"request_id":"ab","span_id":"c"}\n{"request_id":"a","span_id":"bc"}\n{"request_id":"abc"}\n')
    assert 3 == len(list(read_records([log])))


@pytest.mark.parametrize("end", ["", "\n"])
def test_last_line_needs_no_newline(tmp_path, end):
    log = tmp_path / "log"
    log.write_text('{"request_id":"a"}\n{"request_id":"b"}' + end)
    with open_requests(RequestSource(logs=(log,))) as data:
        assert [(2,)] == data.select("SELECT count(*) FROM requests")[1]
    assert 2 == len(list(read_records([log])))
