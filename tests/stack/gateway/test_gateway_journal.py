"""The journal beside the request log: what a run that died left unrecorded, to the request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.catalogue import exposition_parser
from exporters.catalogue.gateway import LOG_LOST_BEFORE
from exporters.requests.tail import Tail
from stack.gateway import journal as journal_module
from stack.gateway.journal import REPORTED_S, SIZE, VERSION, Counts, Journal, Lost, missing
from stack.lab import supervisor
from tests.support.gateway_scene import ASK, CHAT, KEYS, REPLY, FakeEngine, listening, never
from tests.support.wait import until

ROOT = Path(__file__).parents[3]
NOW_S = 1_760_000_000.0


def stored(folder: Path, **counts: object) -> Path:
    """A journal as another run left it; the log that it belongs to."""
    path = folder / ".requests-jsonl.journal"
    path.write_bytes(msgspec.json.encode({"version": VERSION, **counts}).ljust(SIZE - 1) + b"\n")
    return folder / "requests.jsonl"


def found(log: Path, now_s: float = NOW_S) -> Lost:
    journal = Journal(log, clock=lambda: now_s)
    lost = journal.open()
    journal.close()
    return lost


def test_unwritten_records_are_reported_by_place(tmp_path: Path):
    """What was accepted and not written is told apart by where it was."""
    log = stored(tmp_path, accepted=100, made=90, dropped=5, written=60)
    assert Lost(25, 10, NOW_S) == found(log)
    assert Lost(25, 10, NOW_S) == found(log, NOW_S + 60), "a run that does nothing hands on what it found"
    assert Lost() == found(log, NOW_S + REPORTED_S)


def test_losses_of_a_crash_loop_add_up(tmp_path: Path):
    log = stored(tmp_path, accepted=4, made=3, lost=Lost(20, 2, NOW_S - 60))
    assert Lost(23, 3, NOW_S) == found(log)


def test_lines_that_were_written_after_the_last_copy_are_no_loss(tmp_path: Path):
    """The process died between a write to the log and the next copy of the counts; a line that broke off was not
    written."""
    log = tmp_path / "requests.jsonl"
    log.write_bytes(b"1\n2\n3\n4\n5\n{tor")
    info = log.stat()
    stored(tmp_path, accepted=6, made=4, written=3, end=6, inode=info.st_ino, device=info.st_dev)
    assert Lost(0, 1, NOW_S) == found(log)
    stored(tmp_path, accepted=6, made=4, written=3, end=6, inode=info.st_ino + 1, device=info.st_dev)
    assert Lost(1, 2, NOW_S) == found(log), "rotated in the same moment: nobody can tell, so it counts as lost"


@given(*[st.integers(0, 1000)] * 5)
def test_counts_are_never_negative_and_add_up(accepted: int, made: int, dropped: int, written: int, beyond: int):
    """No count is negative and together they are what was accepted."""
    waiting, in_flight = missing(Counts(accepted=accepted, made=made, dropped=dropped, written=written), beyond)
    assert min(waiting, in_flight) >= 0
    if written + beyond + dropped <= made <= accepted:
        assert accepted == written + beyond + dropped + waiting + in_flight


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", None),
        (b"\0" * SIZE, "is damaged"),
        (b'{"version":1,"accepted":12', "is damaged"),
        (b'{"version":1,"accepted":-3}', "is damaged"),
        (b'{"version":1,"accepted":3,"changed_s":1e300}', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b'{"version":2,"something":"else"}', "version 2 "),
        (json.dumps({"version": 2, "more": "x" * 4000}).encode(), "is damaged"),
    ],
)
def test_unusable_journal_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes, fault: str | None
):
    """A journal that cannot be used is one sentence and a new one begins."""
    log = tmp_path / "requests.jsonl"
    path = tmp_path / ".requests-jsonl.journal"
    path.write_bytes(data)
    assert Lost() == found(log)
    messages = [record.getMessage() for record in caplog.records]
    assert (0 if fault is None else 1) == len(messages)
    assert fault is None or fault in messages[0]
    assert SIZE == path.stat().st_size
    assert 0 == msgspec.json.decode(path.read_bytes(), type=Counts).accepted


def test_second_gateway_on_one_log_leaves_counts_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A second gateway on one log says so and leaves the first ones counts alone."""
    log = tmp_path / "requests.jsonl"
    first, second = Journal(log), Journal(log)
    first.open()
    first.accepted()
    second.open()
    second.accepted()
    second.accepted()
    second.close()
    first.close()
    assert ["another gateway" in record.getMessage() for record in caplog.records] == [True]
    assert 1 == msgspec.json.decode((tmp_path / ".requests-jsonl.journal").read_bytes(), type=Counts).accepted


def test_a_log_that_is_no_file_has_no_journal(tmp_path: Path):
    os.mkfifo(tmp_path / "requests.jsonl")
    assert Lost() == found(tmp_path / "requests.jsonl")
    assert ["requests.jsonl"] == os.listdir(tmp_path)


def test_a_disk_that_is_full_at_the_start_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module.os, "pwrite", full)
    journal = Journal(tmp_path / "requests.jsonl")
    assert Lost() == journal.open()
    journal.accepted()
    journal.close()
    assert [": No space left" in record.getMessage() for record in caplog.records] == [True]


def test_no_reader_of_logs_takes_the_journal_for_one(tmp_path: Path):
    log = stored(tmp_path, accepted=1)
    log.write_bytes(b"{}\n")
    for pattern in ("requests.jsonl", "*.jsonl", "requests*"):
        tail = Tail(tmp_path / pattern)
        assert [b"{}\n"] == tail.poll(NOW_S)
        tail.close()


# ---- a gateway process that is killed


def begin(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "stderr").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "stack.cli", "gateway", "run", "--config", folder / "gateway.yaml"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=supervisor._die_with_parent, stderr=said,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def process(folder: Path, engine: FakeEngine, ports: tuple[int, int]) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A gateway of its own, as people run it."""
    (folder / "teams.yaml").write_text(
        json.dumps({"teams": {team: {"keys": [hashed]} for team, (_, hashed) in KEYS.items()}})
    )
    listen, metrics_listen = (f"127.0.0.1:{port}" for port in ports)
    (folder / "gateway.yaml").write_text(
        json.dumps({"listen": listen, "metrics_listen": metrics_listen, "upstream": engine.url})
    )
    started = begin(folder)
    try:
        async with aiohttp.ClientSession() as session:

            async def healthy() -> bool:
                if started.poll() is not None:
                    pytest.fail((folder / "stderr").read_text())
                async with session.get(f"http://{listen}/-/healthy") as answer:
                    return answer.status == 200

            await until(healthy, "the gateway serves")
        yield started
    finally:
        started.kill()
        started.wait()


def counted(folder: Path) -> tuple[int, int]:
    """Accepted requests and made records, by the journal of a gateway that runs."""
    counts = msgspec.json.decode((folder / ".requests-jsonl.journal").read_bytes(), type=Counts)
    return counts.accepted, counts.made


async def lost(port: int) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        shown = exposition_parser.parse(await answer.text())
    return {state: shown.total(LOG_LOST_BEFORE.name, state=state) or 0.0 for state in ("waiting", "in_flight")}


async def test_kill_on_a_full_disk_reports_exact_losses(tmp_path: Path, free_port: Callable[[], int]):
    """The limit on the size of a file stands for the full disk: the log cannot grow, and what is there can be written
    in place."""
    engine, ports = FakeEngine(), (free_port(), free_port())
    runner = await listening(engine)
    url, log = f"http://127.0.0.1:{ports[0]}{CHAT}", tmp_path / "requests.jsonl"
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS['demo'][0]}"}) as session:

            async def ask(times: int) -> None:
                for _ in range(times):
                    async with session.post(url, json=ASK) as answer:
                        assert REPLY == await answer.json()

            async with process(tmp_path, engine, ports) as first:
                assert {"waiting": 0, "in_flight": 0} == await lost(ports[1])
                await ask(20)
                await until(lambda: log.read_bytes().count(b"\n") == 20, "the records")
                size = log.stat().st_size
                resource.prlimit(first.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
                await ask(57)
                engine.answer = never
                running = [asyncio.ensure_future(session.post(url, json=ASK)) for _ in range(3)]
                await until(lambda: len(engine.asked) == 20 + 57 + 3, "the engine having all of them")
                await until(lambda: (80, 77) == counted(tmp_path), "the journal having all of them")
                first.send_signal(signal.SIGKILL)
                first.wait()
                await asyncio.wait(running)
            assert 20 == log.read_bytes().count(b"\n")
            async with process(tmp_path, engine, ports) as second:
                assert {"waiting": 57, "in_flight": 3} == await lost(ports[1])
                engine.answer = None
                await ask(2)
                await until(lambda: log.read_bytes().count(b"\n") == 22, "the records")
                second.terminate()
                assert 0 == await asyncio.to_thread(second.wait, 60)
            async with process(tmp_path, engine, ports):
                assert {"waiting": 57, "in_flight": 3} == await lost(ports[1]), (
                    "the loss is shown for an hour, and the orderly run lost nothing"
                )
        told = [line for line in (tmp_path / "stderr").read_text().splitlines() if " accepted requests" in line]
        assert 1 == len(told)
        assert re.search(r"\b60 accepted requests.*\b57 records .*\b3 requests", told[0])
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("logged", [1, 200])
async def test_kill_under_load_reports_no_logged_record(tmp_path: Path, free_port: Callable[[], int], logged: int):
    """Whenever it happens. What was accepted in the last 10 ms may be missing from the report; what is in the log never
    is in it."""
    engine, ports = FakeEngine(), (free_port(), free_port())
    runner = await listening(engine)
    url, log, begun = f"http://127.0.0.1:{ports[0]}{CHAT}", tmp_path / "requests.jsonl", [0]
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS['demo'][0]}"}) as session:

            async def client() -> None:
                with contextlib.suppress(aiohttp.ClientError):
                    while True:
                        begun[0] += 1
                        async with session.post(url, json=ASK) as answer:
                            await answer.read()

            async with process(tmp_path, engine, ports) as first:
                clients = [asyncio.ensure_future(client()) for _ in range(8)]
                await until(lambda: log.read_bytes().count(b"\n") >= logged, f"{logged} records")
                first.send_signal(signal.SIGKILL)
                await asyncio.wait(clients)
            written = log.read_bytes().count(b"\n")
            async with process(tmp_path, engine, ports):
                told = await lost(ports[1])
        assert 0 < written
        assert written + sum(told.values()) <= begun[0]
    finally:
        await runner.cleanup()
