"""Random histories of a request log and of the process that reads it."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exporters import exposition
from exporters import ingest as logs_module
from exporters.catalogue import sidecar as sidecar_series
from exporters.catalogue.metric import Kind
from exporters.requests import checkpoint as checkpoint_module
from exporters.requests import tail as tail_module
from exporters.requests.record import RequestRecord
from exporters.scrape import Format
from exporters.sidecar import Sidecar
from exporters.sidecar_config import SidecarConfig
from tests.support.fault_table import Figures, line_of

# A small world reaches its edges sooner. What the tail rests on holds here too: a guard and a head are longer than a
# line.
SMALL = {
    "MAX_LINE_BYTES": 4000,
    "CHUNK_BYTES": 1500,
    "HEAD_BYTES": 150,
    "GUARD_BYTES": 300,
    "STEP_BYTES": 1000,
    "STEPS": 4,
}


RECORD = re.compile(rb'\{"request_id":"t-(\d+)"[^{}]*\}')


BEGINNING = b'{"request_id":'


class Killed(BaseException):
    """SIGKILL in the middle of a call: nothing after it happens."""


class StateDisk(checkpoint_module.CheckpointDisk):
    """A disk for the state on which the next calls of a kind fail, before or after they were done, or never return.

    plans: call -> (what happens, for how many calls). Nothing is really synced; a killed process loses nothing that it
    wrote."""

    def __init__(self) -> None:
        self.plans: dict[str, tuple[str, int]] = {}

    def _planned(self, call: str) -> str:
        what, times = self.plans.pop(call, ("", 0))
        if times > 1:
            self.plans[call] = what, times - 1
        return what

    def _act(self, call: str, do: Callable[[], object]) -> None:
        what = self._planned(call)
        if not what or what.endswith("after"):
            do()
        if what.startswith("kill"):
            raise Killed
        if what:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, fd: int, data: bytes) -> int:  # type: ignore[override]
        if "write" not in self.plans:
            return super().write(fd, data)
        super().write(fd, data[: len(data) // 2])
        self._act("write", lambda: super(StateDisk, self).write(fd, data[len(data) // 2 :]))
        return len(data)

    def sync(self, fd: int) -> None:
        self._act("sync", lambda: None)

    def rename(self, source: Path, target: Path) -> None:
        self._act("rename", lambda: super(StateDisk, self).rename(source, target))


class LogDisk(tail_module.TailDisk):
    """A disk for the log whose handles can go stale, and that can refuse to open."""

    def __init__(self) -> None:
        self.stale: set[int] = set()
        self.open_fds: set[int] = set()
        self.blocked = False

    def open(self, path: Path) -> int:
        if self.blocked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        fd = super().open(path)
        self.open_fds.add(fd)
        return fd

    def read(self, fd: int, offset: int, size: int) -> bytes:
        if fd in self.stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().read(fd, offset, size)

    def close(self, fd: int) -> None:
        self.open_fds.discard(fd)
        self.stale.discard(fd)
        super().close(fd)


def ids_in(data: bytes) -> set[int]:
    """Ids that a reader must find in a file: of whole lines, and of those in which one record broke off and another
    begins."""
    found = set()
    for piece in data[: data.rfind(b"\n") + 1].replace(b"\0", b"\n").split(b"\n"):
        if whole := RECORD.fullmatch(piece):
            found.add(int(whole[1]))
        elif (
            len(piece) <= SMALL["MAX_LINE_BYTES"]
            and (second := RECORD.fullmatch(piece, at := max(0, piece.rfind(BEGINNING))))
            and at
        ):
            found.add(int(second[1]))
            if first := RECORD.fullmatch(piece, 0, at):
                found.add(int(first[1]))
    return found


class Histories(RuleBasedStateMachine):
    """Whatever happens: the page shows exactly what is safe, never falls and never shows an id twice; and in the end
    every id is counted, but for those that nobody could have read.

    may_be_lost: cut away or deleted before they were read. at_risk: destroyed too, but read or being read; lost only by
    a SIGKILL before a commit.
    cut_unseen: the log was cut to a part of what was read, and no look since is safe on disk. Copied and cut again
    before that, it cannot be known
    again by its content: what was written in between may be lost, and is told. looked: whether there was a look
    since."""

    @initialize(appends=st.booleans())
    def start(self, appends: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.log = self.folder / "requests.jsonl"
        self.state = self.folder / "state"
        self.appends = appends
        self.at = 0  # where a writer that does not append writes next
        self.half = b""
        self.next_id = 1
        self.now = 0.0
        self.written: set[int] = set()
        self.may_be_lost: set[int] = set()
        self.at_risk: set[int] = set()
        self.counted: set[int] = set()
        self.committed: set[int] = set()
        self.counters: dict[tuple[str, ...], float] = {}
        self.cut_unseen = self.looked = False
        self.log_disk, self.state_disk = LogDisk(), StateDisk()
        self.writer = os.open(self.log, os.O_RDWR | os.O_CREAT)
        self.open_books()
        self.poll(0.05, None)
        self.commit()

    # --- the sidecar, as exporters/sidecar.py puts it together

    def open_books(self) -> None:
        sidecar = Sidecar(SidecarConfig(requests_log=(str(self.log),), gpu="off", state=str(self.state)))
        self.logs, self.ledger, self.checkpoint = sidecar.logs, sidecar.ledger, sidecar._checkpoint
        (self.tail,) = self.logs.tails
        self.tail.disk, self.checkpoint._disk = self.log_disk, self.state_disk
        fresh = self.ledger.window.fresh

        def noted(records: list[RequestRecord]) -> list[RequestRecord]:
            found = fresh(records)
            new = [int(record.request_id[2:]) for record in found]
            assert len(new) == len({*new} - self.counted), "an id was counted twice"
            self.counted.update(new)
            return found

        self.ledger.window.fresh = noted

    @rule(step_s=st.sampled_from([0.05, 0.05, 1.5, 7.0]), budget=st.sampled_from([None, None, 1]))
    def poll(self, step_s: float, budget: int | None) -> None:
        self.now += step_s
        logs_module.BATCH_BYTES = budget or 4 << 20
        with contextlib.suppress(OSError):
            self.logs.poll(self.tail, 0.0, self.now)
            self.looked = not self.log_disk.blocked

    @rule(meanwhile=st.booleans())
    def commit(self, meanwhile: bool = False) -> None:
        """As the sidecar commits. meanwhile: another line is counted while the state is being written."""
        counted, looked = set(self.counted), self.looked
        if (write := self.logs.begin_commit()) is None:
            return
        if meanwhile:
            self.write([0], 0, "", "poll")
        try:
            write()
        except OSError:
            self.ledger.failed()
        except Killed:
            self.reopen()
        else:
            self.ledger.succeeded()
            self.committed = counted
            self.at_risk -= counted
            self.cut_unseen &= not looked

    @rule(
        call=st.sampled_from(["write", "sync", "rename"]),
        what=st.sampled_from(["fail", "fail after", "kill", "kill after"]),
        times=st.sampled_from([1, 2, 3]),
        then=st.booleans(),
    )
    def break_disk(self, call: str, what: str, times: int, then: bool) -> None:
        self.state_disk.plans[call] = what, times
        if then:
            self.commit()

    @rule()
    def mend_disk(self) -> None:
        self.state_disk.plans.clear()

    @rule()
    def kill(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        """Everything in memory is gone; what the file of state holds is all that is known."""
        shown, read = self.committed, self.counted
        self.tail.close()
        self.checkpoint.close()
        self.open_books()
        kept = {int(name[2:]) for name in (*self.ledger.window.older, *self.ledger.window.newer)}
        assert shown <= kept <= read, "what was shown is kept, and nothing that was not read"
        self.may_be_lost |= self.at_risk - kept
        self.at_risk = set()
        self.committed, self.counted = kept, set(kept)

    # --- the log and who writes it

    def on_disk(self) -> set[int]:
        """Ids in files that a reader can come to, compressed ones too."""
        contents = {path: path.read_bytes() for path in self.folder.glob("requests.jsonl*")}
        return set().union(
            *(ids_in(gzip.decompress(data) if path.suffix == ".gz" else data) for path, data in contents.items())
        )

    def followed(self) -> dict[int, set[int]]:
        """Inodes that the tail holds open, with the ids in them."""
        fds = self.log_disk.open_fds - self.log_disk.stale
        return {os.fstat(fd).st_ino: ids_in(os.pread(fd, os.fstat(fd).st_size, 0)) for fd in fds}

    def destroy(self, act: Callable[[], None]) -> None:
        """Note what nobody can read any more afterwards, and what only this process of the sidecar can."""
        before = self.on_disk()
        act()
        gone = before - self.on_disk() - self.committed
        held = set().union(*self.followed().values()) | self.counted
        self.at_risk |= gone & held
        self.may_be_lost |= gone - held

    @rule(
        pads=st.lists(st.sampled_from([0, 0, 0, 9, 40]), min_size=1, max_size=6),
        torn=st.sampled_from([0, 0, 0, 1, 9, 70]),
        also=st.sampled_from(["", "", "", "bad", "long", "again"]),
        then=st.sampled_from(["", "poll", "commit"]),
    )
    def write(self, pads: list[int], torn: int, also: str, then: str) -> None:
        lines = [line_of(self.next_id + at, "t", pad) for at, pad in enumerate(pads)]
        self.next_id += len(pads)
        match also:
            case "bad":
                lines.insert(0, b'{"request_id":17}\n\xff{"no\n\n')
            case "long":
                lines.insert(0, b"%d " % self.next_id + b"x" * (2 * SMALL["MAX_LINE_BYTES"]) + b"\n")
            case "again":
                lines.insert(0, line_of(max(1, self.next_id - 3 * len(pads)), "t"))
        data = self.half + b"".join(lines)
        cut = max(0, len(data) - torn)
        self.put(data[:cut])
        self.half = data[cut:]
        if then:
            self.poll(0.05, None)
        if then == "commit":
            self.commit()

    def put(self, data: bytes) -> None:
        if self.appends:
            self.at = os.fstat(self.writer).st_size
        self.at += os.pwrite(self.writer, data, self.at)
        stat = os.fstat(self.writer)
        found = ids_in(os.pread(self.writer, stat.st_size, 0))
        if new := found - self.on_disk() - self.written:  # they stand where no reader can come anew
            held = stat.st_ino in self.followed()
            self.at_risk |= new if held else set()
            self.may_be_lost |= set() if held else new
        self.written |= found

    @rule(open_anew=st.sampled_from([True, True, False]))
    def rotate(self, open_anew: bool) -> None:
        self.destroy(self.shift)
        if self.log.exists():
            self.log.rename(self.folder / "requests.jsonl.1")
        if open_anew:
            self.open_anew()

    def shift(self) -> None:
        for older, newer, ending in ((3, 2, ""), (3, 2, ".gz"), (2, 1, ""), (2, 1, ".gz")):
            if (path := self.folder / f"requests.jsonl.{newer}{ending}").exists():
                path.rename(self.folder / f"requests.jsonl.{older}{ending}")

    @rule()
    def open_anew(self) -> None:
        """The writer follows its path; if it died in the middle of a line, that line stays torn."""
        os.close(self.writer)
        self.writer = os.open(self.log, os.O_RDWR | os.O_CREAT)
        self.half, self.at = b"", os.fstat(self.writer).st_size

    @precondition(lambda self: self.log.exists())
    @rule(looks=st.lists(st.sampled_from(["at nothing", "at a part", "at all"])))
    def copytruncate(self, looks: list[str]) -> None:
        self.destroy(self.shift)
        data = self.log.read_bytes()
        if self.cut_unseen:
            self.may_be_lost |= ids_in(data) - self.counted
        with (self.folder / "requests.jsonl.1").open("wb", buffering=0) as copy:
            for stage, start, end in (
                ("at nothing", 0, 0),
                ("at a part", 0, len(data) // 2),
                ("at all", len(data) // 2, len(data)),
            ):
                copy.write(data[start:end])
                if stage in looks:
                    self.poll(1.5, None)
        self.destroy(lambda: os.truncate(self.log, 0))

    @precondition(lambda self: self.log.exists())
    @rule(kind=st.sampled_from(["cut to nothing", "cut to a beginning", "delete"]), share=st.floats(0.05, 0.95))
    def lose(self, kind: str, share: float) -> None:
        if kind == "delete":
            self.destroy(self.log.unlink)
            self.open_anew()
        else:
            size = int(share * self.log.stat().st_size) if kind == "cut to a beginning" else 0
            self.destroy(lambda: os.truncate(self.log, size))
            self.cut_unseen, self.looked = bool(size), False
            self.half = b""  # behind another half it could make a whole line that nobody wrote

    @rule(number=st.sampled_from([1, 1, 2, 3]), looks=st.lists(st.sampled_from(["at nothing", "at a part", "at all"])))
    def compress(self, number: int, looks: list[str]) -> None:
        """As gzip does it: the compressed file grows, and the plain one is there until it is whole."""
        path = self.folder / f"requests.jsonl.{number}"
        packed = path.with_name(f"{path.name}.gz")
        if not path.exists() or packed.exists():
            return
        data = gzip.compress(path.read_bytes(), 1)
        with packed.open("wb", buffering=0) as file:
            for stage, start, end in (
                ("at nothing", 0, 0),
                ("at a part", 0, len(data) // 2),
                ("at all", len(data) // 2, len(data)),
            ):
                file.write(data[start:end])
                if stage in looks:
                    self.poll(1.5, None)
        self.destroy(path.unlink)

    @rule()
    def stale_handles(self) -> None:
        self.log_disk.stale |= self.log_disk.open_fds
        self.may_be_lost |= self.at_risk - self.counted  # a deleted file cannot be opened anew
        self.at_risk &= self.counted

    @rule()
    def poll_while_nothing_can_be_opened(self) -> None:
        self.log_disk.blocked = True
        self.poll(1.5, None)
        self.log_disk.blocked = False

    # --- what always holds

    @invariant()
    def the_page_shows_what_is_safe_and_never_falls(self) -> None:
        if not hasattr(self, "logs"):
            return
        text = exposition.page(self.logs.blocks(Format.TEXT))
        assert Figures.of(self.committed) == Figures.on_page(text, "t")
        counters = {
            (metric.name, *labels.values()): value
            for metric, labels, value in self.logs.samples()
            if metric.kind is Kind.COUNTER and metric is not sidecar_series.CHECKPOINT_COMMITS
        }
        fallen = {
            name: (before, counters.get(name))
            for name, before in self.counters.items()
            if counters.get(name, 0) < before
        }
        assert {} == fallen
        self.counters = counters

    def teardown(self) -> None:
        if not hasattr(self, "logs"):
            return
        try:
            self.heal_and_compare()
        finally:
            self.tail.close()
            self.checkpoint.close()
            os.close(self.writer)
            shutil.rmtree(self.folder)

    def heal_and_compare(self) -> None:
        self.state_disk.plans.clear()
        for _ in range(12):
            self.poll(3, None)
        self.commit()
        missing = self.written - self.may_be_lost - self.committed
        assert (set(), set()) == (missing, self.committed - {*range(1, self.next_id)}), f"missing {missing}"
        assert self.ledger.up
        before = set(self.committed)
        self.reopen()
        for _ in range(4):
            self.poll(3, None)
        self.commit()
        assert before == self.committed, "a restart brings nothing new"
        self.the_page_shows_what_is_safe_and_never_falls()
