"""The fault table: things that happen to a request log, done to a real file before any reader of logs.

Every line carries an id as prompt_tokens and a square of it as completion_tokens. What a reader counted is right when
number, sum and squares are
those of the ids that were written: lost, doubled and invented ones change them.
A case is a function of a log and its reader. What it must leave behind on our page stands beside it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exporters.catalogue import sidecar
from exporters.requests.record import timestamp
from tests.support.ports import free_port
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("VLLM_WATCH_KILLS", "3"))  # of the storm; `make bench-faults` has 23
SEED = int(os.environ.get("VLLM_WATCH_SEED", "24"))  # of the storm with archives
MODULUS = 1_000_003
POLL_S = 0.05  # how often a reader looks; ours, and the others are told to


def square(number: int) -> int:
    return number * number % MODULUS


@dataclass(frozen=True, slots=True)
class Figures:
    """How many ids, their sum, and the sum of their squares: two sets of ids that agree in all three are the same
    set."""

    count: int = 0
    total: int = 0
    squares: int = 0

    @classmethod
    def of(cls, ids: Iterable[int]) -> Figures:
        ids = list(ids)
        return cls(len(ids), sum(ids), sum(map(square, ids)))

    @classmethod
    def on_page(cls, text: str, team: str) -> Figures:
        """What our page shows of one team."""
        values = values_on(text)
        kinds = (
            f'{sidecar.TOKENS.name}{{model_name="m",team="{team}",type="{kind}"}}' for kind in ("prompt", "completion")
        )
        return cls(
            *(
                int(values.get(name, 0))
                for name in (f'{sidecar.REQUESTS.name}{{model_name="m",outcome="ok",team="{team}"}}', *kinds)
            )
        )


def values_on(text: str) -> dict[str, float]:
    """The value of each series of a page, by name and labels as they are written there."""
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    }


def line_of(number: int, team: str, pad: int = 0, ts: str | None = None) -> bytes:
    record = {"request_id": f"{team}-{number}", "team": team, "model": "m", "outcome": "ok"}
    record |= (
        {"prompt_tokens": number, "completion_tokens": square(number)}
        | ({"pad": "x" * pad} if pad else {})
        | ({"ts": ts} if ts else {})
    )
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


# --- who writes


class Log:
    """A log and what happens to it. `ids` is the truth: those of all whole lines that a reader had a chance to read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "requests.jsonl"
        self.team = folder.name
        self.ids: list[int] = []
        self._next = 0
        self.path.touch()

    @property
    def truth(self) -> Figures:
        return Figures.of(self.ids)

    def lines(self, count: int, **about: object) -> bytes:
        """New lines, which are part of the truth from now on."""
        new = range(self._next + 1, self._next + count + 1)
        self._next += count
        self.ids += new
        return b"".join(line_of(number, self.team, **about) for number in new)  # type: ignore[arg-type]

    def add(self, count: int, path: Path | None = None) -> None:
        self.put(self.lines(count), path)

    def put(self, data: bytes, path: Path | None = None) -> None:
        """Append in one call, as a server does that opens its log with O_APPEND."""
        with (path or self.path).open("ab", buffering=0) as file:
            file.write(data)

    def beside(self, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{ending}")

    def rotate(self, ending: str = "1") -> Path:
        """Rename, as logrotate does with `create`; the file that is now rotated."""
        self.path.rename(self.beside(ending))
        self.path.touch()
        return self.beside(ending)

    def copytruncate(self, ending: str = "1") -> None:
        shutil.copyfile(self.path, self.beside(ending))
        os.truncate(self.path, 0)

    def compress(self, plain: Path) -> None:
        """As gzip does: the compressed file is whole before the plain one goes."""
        plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes(), 1))
        plain.unlink()


# --- who reads


class Reader:
    """A reader of logs in a process of its own. patience_s: how long its counts may stand still and be wrong before
    they are final."""

    name = ""
    patience_s = 60.0

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, log: Log) -> list[str | Path]:
        raise NotImplementedError

    def counts(self, log: Log) -> Figures:
        raise NotImplementedError

    def fill_disk(self, room_bytes: int) -> None:
        """From now on only so much more can be written where the reader keeps its state, if it keeps one."""

    def free_disk(self) -> None:
        """There is room again."""

    def page(self, timeout_s: float = 30.0) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def start(self, log: Log) -> None:
        """Begin to read, or go on; returns when it answers and has looked at the log once."""
        self.begin(log)
        ended = lambda: self.process is None or self.process.poll() is not None  # noqa: E731
        eventually(
            lambda: self._answers() or ended(), f"an answer of {self.name}; {self.root / self.name}.log says why"
        )
        assert not ended(), f"{self.name} ended; {self.root / self.name}.log says why"
        self.look()

    def look(self) -> None:
        """Return when the reader has looked at all logs since the call. Of other programs nobody can see it."""
        time.sleep(8 * POLL_S)

    def fail_to_keep(self) -> None:
        """Return when the reader has failed to keep its state since the call, if it keeps one."""
        time.sleep(8 * POLL_S)

    def begin(self, log: Log) -> None:
        """Start it where it does not run, and wait for nothing."""
        if self.process is None:
            with (self.root / f"{self.name}.log").open("ab") as output:
                self.process = subprocess.Popen(self.command(log), cwd=ROOT, stdout=output, stderr=output)

    def _answers(self) -> bool:
        try:
            self.page()
        except (OSError, http.client.HTTPException):
            return False
        return True

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile happens between two looks."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def settle(self, log: Log) -> Figures:
        """The counts when they are right and stay so, or when they have not moved for so long that they will not."""
        last, moved = Figures(), time.monotonic()
        while time.monotonic() - moved < self.patience_s:
            found = self.counts(log)
            if found == log.truth:
                self.look()
                if self.counts(log) == log.truth:
                    return found
            if found != last:
                last, moved = found, time.monotonic()
            time.sleep(0.05)
        return last

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None


class Sidecar(Reader):
    """Ours: one process that reads the logs of all cases, each with a team of its own, and keeps its state in one file.

    While it runs it is scraped without a pause, over every restart and SIGKILL. fell: counters that were lower than
    before, as (before, after)."""

    name = "vllm-watch"

    def __init__(self, root: Path, teams: Iterable[str]) -> None:
        super().__init__(root)
        self.state = root / "state" / "sidecar.state"
        self.config = root / "sidecar.yaml"
        self.beat = Log(root / "beat")
        self.logs: dict[str, Log] = {}  # those that it was started for, by team
        logs = [str(root / team / "requests.jsonl") for team in (*teams, self.beat.team)]
        told = {"listen": f"127.0.0.1:{self.port}", "requests_log": logs, "gpu": "off", "state": str(self.state)}
        self.config.write_text(json.dumps(told))
        self.scrapes = 0
        self.fell: dict[str, tuple[float, float]] = {}
        self._watched: list[dict[str, float]] | None = None
        self._over = threading.Event()
        self._scraper = threading.Thread(target=self._scrape, daemon=True)

    def command(self, log: Log) -> list[str | Path]:
        return [sys.executable, "-m", "stack.cli", "sidecar", "run", "--config", self.config]

    def start(self, log: Log) -> None:
        self.logs.setdefault(log.team, log)
        super().start(log)
        if not self._scraper.is_alive():
            self._scraper.start()

    def look(self) -> None:
        """Logs are read in turn: between two lines of one log, each of them one after the other, all were."""
        for _ in range(2):
            self.beat.add(1)
            eventually(lambda: self.counts(self.beat) == self.beat.truth, "a look at the logs")

    def fail_to_keep(self) -> None:
        before = self._failures()
        eventually(lambda: self._failures() > before, "a failure to keep the state")

    def _failures(self) -> float:
        failures = f'{sidecar.SOURCE_ERRORS.name}{{kind="checkpoint",reason="os",source="{self.state}"}}'
        return values_on(self.page()).get(failures, 0.0)

    def counts(self, log: Log) -> Figures:
        return Figures.on_page(self.page(), log.team)

    def fill_disk(self, room_bytes: int) -> None:
        """A limit on the size of files: what is beyond is refused by the kernel in the middle of a write, and a new
        file has no room at all."""
        limit = self.state.stat().st_size + room_bytes if room_bytes else 16
        self._limit(limit)

    def free_disk(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def close(self) -> None:
        self._over.set()
        self.stop()
        if self._scraper.is_alive():
            self._scraper.join()

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[dict[str, float]]]:
        """Every page that is scraped meanwhile."""
        self._watched = pages = []
        try:
            yield pages
        finally:
            self._watched = None

    def _limit(self, size: int) -> None:
        assert self.process
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def _scrape(self) -> None:
        counters: dict[str, float] = {}
        while not self._over.wait(POLL_S):
            try:
                values = values_on(self.page(30))
            except (OSError, http.client.HTTPException):
                continue
            self.scrapes += 1
            if (pages := self._watched) is not None:
                pages.append(values)
            now = {name: value for name, value in values.items() if name.startswith(_KEPT)}
            self.fell |= {
                name: (before, now.get(name, 0.0)) for name, before in counters.items() if now.get(name, 0.0) < before
            }
            counters |= now


# Counters that outlive the process.
_KEPT = tuple(
    metric.name
    for metric in (
        sidecar.REQUESTS,
        sidecar.TOKENS,
        sidecar.LOG_LINES,
        sidecar.LOG_BAD_LINES,
        sidecar.LOG_DUPLICATES,
        sidecar.LOG_UNTIMED,
        sidecar.LOG_AHEAD,
        sidecar.LOG_FAULTS,
        sidecar.LOG_ROTATIONS,
    )
)


class Mtail(Reader):
    """mtail with a program that takes the ids out of the lines by a regular expression and counts each.

    Its counters die with it. What it showed last before it was stopped or killed is added, as Prometheus' `increase`
    does over a restart."""

    name = "mtail"
    patience_s = 4.0
    PROGRAM = (
        'counter seen by id\n/"prompt_tokens":\\s*(?P<id>\\d+),"completion_tokens":\\s*\\d+/ {\n  seen[$id]++\n}\n'
    )

    def __init__(self, root: Path, program: Path) -> None:
        super().__init__(root)
        self.program = program
        self._before: Counter[int] = Counter()

    def command(self, log: Log) -> list[str | Path]:
        progs = self.root / "progs"
        progs.mkdir(exist_ok=True)
        (progs / "ids.mtail").write_text(self.PROGRAM)
        every = f"{POLL_S}s"
        place = ["-address", "127.0.0.1", "-port", str(self.port), "-log_dir", self.root]
        return [
            self.program,
            "-progs",
            progs,
            "-logs",
            log.path,
            *place,  # type: ignore[list-item]
            "-poll_interval",
            every,
            "-poll_log_interval",
            every,
        ]

    def counts(self, log: Log) -> Figures:
        return Figures.of(self.ids().elements())

    def ids(self) -> Counter[int]:
        shown = re.findall(r'^seen\{id="(\d+)".*\} (\d+)$', self.page(), re.MULTILINE) if self.process else []
        return self._before + Counter({int(number): int(times) for number, times in shown})

    def _end(self, number: int) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._before = self.ids()
        super()._end(number)


# --- what happens


@dataclass(frozen=True)
class Case:
    """faults, bad, duplicates: what our page must say of it besides the counts, by reason. rotations: how often the log
    was seen to be replaced."""

    number: int
    title: str
    act: Callable[[Log, Reader], None]
    faults: Mapping[str, int] = field(default_factory=dict)
    bad: Mapping[str, int] = field(default_factory=dict)
    duplicates: int = 0

    @property
    def team(self) -> str:
        return f"case-{self.number}"


CASES: list[Case] = []


def case(title: str, **leaves: object) -> Callable[[Callable[[Log, Reader], None]], Callable[[Log, Reader], None]]:
    def enter(act: Callable[[Log, Reader], None]) -> Callable[[Log, Reader], None]:
        CASES.append(Case(len(CASES) + 1, title, act, **leaves))  # type: ignore[arg-type]
        return act

    return enter


@case("half a line, the rest later")
def half_a_line(log: Log, reader: Reader) -> None:
    for _ in range(3):
        data = log.lines(2)
        log.put(data[:-30])
        reader.look()
        log.put(data[-30:])


@case("rename; the writer keeps the old file for a second")
def renamed_with_a_late_writer(log: Log, reader: Reader) -> None:
    log.add(100)
    reader.settle(log)
    old = log.rotate()
    log.add(10)
    for _ in range(5):
        log.add(5, old)
        reader.look()


@case("a rename every 60 ms, each with late lines")
def renamed_all_the_time(log: Log, reader: Reader) -> None:
    for turn in range(20):
        log.add(20)
        old = log.rotate(f"{turn:02}")
        log.add(5)
        time.sleep(0.03)
        log.add(20, old)
        time.sleep(0.03)


@case("two renames between two looks")
def renamed_twice_between_looks(log: Log, reader: Reader) -> None:
    log.add(4)
    reader.settle(log)
    with reader.paused():
        log.add(2)
        log.rotate("2")
        log.add(3)
        log.rotate("1")
        log.add(4)


@case("copytruncate; grown beyond the old place before the next look")
def cut_and_grown_again(log: Log, reader: Reader) -> None:
    log.add(100)
    reader.settle(log)
    with reader.paused():
        log.copytruncate()
        log.add(300)


@case("copytruncate with unread lines in the copy")
def cut_with_unread_lines(log: Log, reader: Reader) -> None:
    log.add(10)
    reader.settle(log)
    with reader.paused():
        log.add(20)
        log.copytruncate()
        log.add(5)


@case("SIGKILL and a restart; lines written meanwhile")
def restarted(log: Log, reader: Reader) -> None:
    log.add(110)
    reader.settle(log)
    reader.kill()
    log.add(50)
    reader.start(log)


@case("a restart over two rotations")
def restarted_over_two_rotations(log: Log, reader: Reader) -> None:
    log.add(4)
    reader.settle(log)
    reader.kill()
    log.add(3)
    log.rotate("2")
    log.add(5)
    log.rotate("1")
    log.add(2)
    reader.start(log)


@case("deleted while nobody read; the new file has the old one's inode", faults={"cut": 1})
def inode_used_again(log: Log, reader: Reader) -> None:
    log.add(5)
    reader.settle(log)
    reader.kill()
    spare = log.beside("spare")  # a file system gives a free inode to whoever asks first; so nobody else can
    spare.hardlink_to(log.path)
    log.path.unlink()
    os.truncate(spare, 0)
    spare.rename(log.path)
    log.add(12)
    reader.start(log)


@case("a storm of SIGKILLs and six renames under 20,000 lines")
def killed_again_and_again(log: Log, reader: Reader) -> None:
    chance = random.Random(10)
    over = threading.Event()

    def write() -> None:
        for turn in range(1000):
            log.add(20)
            if turn % 160 == 150:
                old = log.rotate(f"{turn:04}")
                log.add(20)
                log.add(20, old)
            over.wait(KILLS * 0.0015)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(KILLS):
        time.sleep(chance.uniform(0, 1.5))  # also before it answers
        reader.kill()
        reader.begin(log)
    over.set()
    writer.join()
    reader.start(log)


@case("a line beyond the limit of 1 MiB, in pieces", faults={"long": 1}, bad={"long": 1})
def a_long_line(log: Log, reader: Reader) -> None:
    log.add(3)
    for _ in range(3):
        log.put(b"x" * (1 << 20))
        reader.look()
    log.put(b"\n" + log.lines(3))


@case("a hole of NUL bytes after a cut under a writer that does not append", faults={"nul": 1})
def a_hole(log: Log, reader: Reader) -> None:
    with log.path.open("wb", buffering=0) as writer:
        writer.write(log.lines(50))
        reader.settle(log)
        log.copytruncate()
        reader.look()
        writer.write(log.lines(10))
        reader.settle(log)
        writer.write(log.lines(5))


@case("a rotated file is compressed after it was read")
def compressed(log: Log, reader: Reader) -> None:
    log.add(10)
    reader.settle(log)
    old = log.rotate()
    log.add(5)
    log.add(5, old)
    reader.settle(log)
    log.compress(old)
    log.add(5)


@case("a symbolic link is swapped, as Kubernetes does with ..data")
def link_swapped(log: Log, reader: Reader) -> None:
    folder = log.path.parent
    log.path.unlink()
    for name in ("..1", "..2"):
        (folder / name).mkdir()
        (folder / name / "requests.jsonl").touch()
    (folder / "..data").symlink_to("..1")
    log.path.symlink_to("..data/requests.jsonl")
    reader.look()
    log.add(10)
    reader.settle(log)
    with reader.paused():
        log.add(7)
        (folder / "..next").symlink_to("..2")
        (folder / "..next").rename(folder / "..data")
        log.add(9)


@case("the disk is full where the state is kept, then no longer")
def disk_full(log: Log, reader: Reader) -> None:
    log.add(20)
    reader.settle(log)
    reader.fill_disk(40)  # room for a part of a commit
    log.add(10)
    reader.fail_to_keep()
    reader.fill_disk(0)
    for _ in range(2):
        log.add(15)
        reader.fail_to_keep()
    reader.free_disk()


@case("the same lines again, at once, rotated and over a restart", duplicates=60)
def the_same_lines_again(log: Log, reader: Reader) -> None:
    data = log.lines(20)
    log.put(data + data)
    log.rotate()
    log.put(data)
    reader.settle(log)
    reader.kill()
    log.put(log.lines(5) + data)
    reader.start(log)


@case("lines that are no record, between others that have more than is known", bad={"json": 4, "type": 4, "range": 2})
def bad_lines(log: Log, reader: Reader) -> None:
    bad = [
        b"not json",
        b'{"request_id":',
        b"\xff\xfe{}",
        b"[" * 2000,
        b"[]",
        b"{}",
        b'{"request_id":7}',
        b'{"request_id":"x","team":["y"]}',
    ]
    bad += [b'{"request_id":"x","prompt_tokens":-5}', b'{"request_id":"x","prompt_tokens":1000000000000}']
    for line in bad:
        log.put(log.lines(2, pad=30) + line + b"\r\n\r\n  \n" + log.lines(1).replace(b"\n", b"\r\n"))


@case("a file system that shows sizes before bytes, and a file put back from a copy")
def network_file_system(log: Log, reader: Reader) -> None:
    log.add(10)
    reader.settle(log)
    for _ in range(3):
        data, size = log.lines(5), log.path.stat().st_size
        os.truncate(log.path, size + len(data))
        reader.look()
        with log.path.open("r+b", buffering=0) as file:
            file.seek(size)
            file.write(data)
        reader.look()
    copy = log.path.with_name("restored")
    shutil.copyfile(log.path, copy)
    copy.rename(log.path)
    log.add(5)


@case("a writer that died in the middle of a line, and another behind it", bad={"torn": 2})
def torn_lines(log: Log, reader: Reader) -> None:
    log.add(3)
    for cut in (20, 90):
        log.put(line_of(999_000 + cut, log.team)[:cut])
        reader.look()
        log.add(2)
    log.put(log.lines(1).rstrip(b"\n"))  # only the newline is missing
    log.add(2)


@case("clocks that jump: of the writer, and of the file system")
def clocks_jump(log: Log, reader: Reader) -> None:
    for ts in ("2099-01-01T00:00:00Z", "1999-12-31T23:59:59+14:00", timestamp(time.time()), "2024-02-29T12:00:00"):
        log.put(log.lines(3, ts=ts))
        reader.settle(log)
    with reader.paused():
        log.add(4)
        old = log.rotate("2")
        log.add(5)
        newer = log.rotate("1")
        log.add(6)
        os.utime(newer, (0, 0))
        os.utime(old, (4e9, 4e9))


@case(
    "two rotated files are compressed before they were read to their end, one while the reader is stopped, one over a"
    " SIGKILL"
)
def compressed_too_early(log: Log, reader: Reader) -> None:
    for number, ending in enumerate("21"):
        log.add(100)
        reader.settle(log)
        if number:
            reader.kill()
        with contextlib.nullcontext() if number else reader.paused():
            log.add(50)
            log.compress(log.rotate(ending))
            log.add(5)
        reader.start(log)


@case("random renames, copytruncates, gzips, SIGSTOPs and SIGKILLs under a writer")
def compressed_in_a_storm(log: Log, reader: Reader) -> None:
    chance = random.Random(SEED)
    numbers = iter(range(1000, 9999))

    def disturb() -> None:
        log.add(chance.randrange(60))
        plain = [path for path in log.path.parent.glob("requests.jsonl.*") if path.suffix != ".gz"]
        match chance.choice(["rename", "copytruncate", "gzip", "gzip", ""]):
            case "rename":
                log.rotate(str(next(numbers)))
            case "copytruncate":
                log.copytruncate(str(next(numbers)))
            case "gzip" if plain:
                log.compress(chance.choice(plain))
        log.add(chance.randrange(60))

    for _ in range(25 * KILLS):
        match chance.choice(["stop", "kill", "", "", ""]):
            case "stop":
                with reader.paused():
                    for _ in range(chance.randrange(6)):
                        disturb()
            case "kill":
                reader.kill()
                for _ in range(chance.randrange(6)):
                    disturb()
                reader.begin(log)
            case _:
                disturb()
                time.sleep(chance.uniform(0, 0.1))
    reader.start(log)


def run(case: Case, reader: Reader, log: Log) -> Figures:
    """What the reader made of a case."""
    reader.start(log)
    case.act(log, reader)
    return reader.settle(log)
