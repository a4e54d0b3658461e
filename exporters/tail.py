"""Follow growing files of lines through rotation, cuts and crashes.

Law: a line is handed out when its newline has arrived, and once. What was read is known by its content: a position holds fingerprints of the bytes
before it, names and inodes are only hints. So a file is read on after a rename, found again in its copy after a cut, and never taken for another one
that got its inode. Where a line must be missed or may come twice, that is counted by reason.

`positions` after a batch and `since` at the next start carry a reader over its own death: exactly once, if both are stored with what was counted."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import EINVAL
from functools import partial
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG

import msgspec
from msgspec.structs import replace

MAX_LINE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
HEAD_BYTES = 512
GUARD_BYTES = 1024  # more than a line of ours has, so that a request id is always among them
STEP_BYTES = 1 << 16  # how far marks stand apart; after a cut at most this much is read twice, more where it was far back
STEPS = 32
LOOK_S = 1.0  # how long a new file, other than the one at the path itself, waits at most to be seen
OPEN_AT_MOST = 64
MISSED_AT_MOST = 32  # positions of files that are not there, kept in case they come back or turn up as a copy
TOLD_AT_MOST = 3  # log lines for each reason

# What may go wrong with a file and is survived: see Tail.faults.
REASONS = ("long", "nul", "torn", "cut", "gone", "reread", "packed", "unreadable")

_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")  # gzip, bzip2, xz, zstd, lz4

log = logging.getLogger("vllm_watch.tail")

Read = Callable[[int, int], bytes]  # offset, size -> what stands there, less at the end of the file
Identity = tuple[int, int]  # device and inode


# --- what is known of a file, and what may be concluded: values and pure functions


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A place in a file and the digest of bytes next to it; no content is kept."""

    offset: int
    digest: bytes


class Position(msgspec.Struct, frozen=True):
    """How far a file was read, and how to know it again.

    heads: its first bytes, at several sizes while it is small, so that a shorter copy is known too. marks: places at the end of a line and the
    bytes before each; the last one is where reading goes on. skipping: that place is inside a line too long to keep. left: size of the file when
    it was let go, -1 while it is followed."""

    name: str
    identity: Identity
    heads: tuple[Mark, ...]
    marks: tuple[Mark, ...]
    skipping: bool = False
    left: int = -1

    @property
    def offset(self) -> int:
        return self.marks[-1].offset

    def goes_beyond(self, other: Position) -> bool:
        """Whether it is the same reading, further on."""
        return self.offset > other.offset and self.marks[: len(other.marks)] == other.marks


class Seen(msgspec.Struct, frozen=True):
    """A file as one look shows it. live: it stands where the writer writes, and is not a rotated one. first: its first bytes."""

    name: str
    identity: Identity
    size: int
    live: bool
    first: bytes


class Taken(msgspec.Struct, frozen=True):
    """What some bytes hold: a block of whole lines, how many bytes are done with, and whether a line too long goes on beyond them."""

    block: bytes = b""
    used: int = 0
    skipping: bool = False
    long: bool = False
    nul: bool = False


class Batch(msgspec.Struct, frozen=True):
    """A block of lines, and the position after it. more: the file may hold more than was read."""

    taken: Taken
    position: Position
    more: bool


class Changed(msgspec.Struct, frozen=True):
    """The bytes before the position are not those that were read. back_to: the last place up to which they are; None: nowhere."""

    back_to: Position | None


class Packed(msgspec.Struct, frozen=True):
    """A compressed file: a copy of lines that were read before."""


def begun(name: str, identity: Identity) -> Position:
    """The position before anything was read."""
    return Position(name, identity, (), (Mark(0, _digest(b"")),))


def at_end(file: Seen, read: Read) -> Position:
    """The position behind the last line that is there, for a file that was rotated before we came."""
    start = max(0, file.size - CHUNK_BYTES)
    data = read(start, file.size - start)
    offset = start + (data.rfind(b"\n") + 1 or (len(data) if start else 0))
    first, back = file.first[:offset], min(offset, GUARD_BYTES)
    heads = (Mark(len(first), _digest(first)),) if first else ()
    return Position(file.name, file.identity, heads, (Mark(offset, _digest(read(offset - back, back))),), left=file.size)


def take(data: bytes, skipping: bool = False, start: int = 0) -> Taken:
    """Whole lines of what stands behind the last one, which is from `start` on, as one block that ends with a newline and may hold blank lines.

    NUL blocks, which crashes and cuts under a writer leave, end a line as a newline does; the last ones stay until something follows, since a
    network file system may show a size before its bytes."""
    end = data.rfind(b"\n", start) + 1
    if not end and (skipping or len(data) - start > MAX_LINE_BYTES):
        end = data.rfind(b"\0", start) + 1
        if not end:
            return Taken(used=len(data) - start, skipping=True, long=not skipping)
    block = data[start:end]
    if nul := b"\0" in block:
        block = block.replace(b"\0", b"\n")
    if skipping:
        block = block[block.find(b"\n") + 1 :]
    return Taken(b"" if block.isspace() else block, max(0, end - start), nul=nul)


def lines_of(block: bytes) -> list[bytes]:
    """The lines of a block that are not blank, without their ends."""
    return [line.rstrip(b"\r") for line in block.split(b"\n") if line and not line.isspace()]


def read_on(position: Position, read: Read) -> Batch | Changed | Packed:
    """The next lines behind a position. One call reads them and the bytes before them, so that no cut comes between the check and the reading."""
    back = min(position.offset, GUARD_BYTES)
    for window in (CHUNK_BYTES, MAX_LINE_BYTES + 1):
        data = read(position.offset - back, back + window)
        if _digest(data[:back]) != position.marks[-1].digest or (position.offset > back and not _begins_so(position, read)):
            return Changed(last_that_holds(position, read))
        if position.offset == 0 and data.startswith(_PACKED):
            return Packed()
        taken = take(data, position.skipping, back)
        if taken.used or len(data) < back + window:
            break
    return Batch(taken, _moved_on(position, taken, data, back + taken.used), len(data) == back + window)


def last_that_holds(position: Position, read: Read) -> Position | None:
    """The position at its last mark before which the file still holds what was read; None when there is no such mark."""
    if not _begins_so(position, read):
        return None
    for count in range(len(position.marks), 0, -1):
        mark = position.marks[count - 1]
        back = min(mark.offset, GUARD_BYTES)
        if _digest(read(mark.offset - back, back)) == mark.digest:
            newest = count == len(position.marks)
            return position if newest else replace(position, marks=position.marks[:count], skipping=False, left=-1)
    return None


def place(
    seen: Sequence[Seen], known: Sequence[Position], followed: Sequence[Position], read: Callable[[str, int, int], bytes], first_look: bool
) -> tuple[list[tuple[Seen, Position]], list[Position]]:
    """Where to read on in each file that is not followed yet, and the known positions that no file was found for (of those that had got anywhere).

    First what holds what was read of it, then what holds what was read of another (moved or copied away). The rest is new and read from its
    beginning, unless it begins like one that is known: then it is a copy, and left out. At the very first look rotated files are taken as read."""

    def holds(file: Seen, position: Position) -> Position | None:
        back = last_that_holds(position, partial(read, file.name))
        return back and replace(back, name=file.name, identity=file.identity)

    hollow = [p for p in known if p.marks[-1].digest == _digest(bytes(min(p.offset, GUARD_BYTES)))]  # inside a hole, and any other is like it
    solid = [p for p in known if p not in hollow]
    placed: dict[Seen, Position] = {}
    for among, moved in ((solid, False), (solid, True), (hollow, False)):
        for file in sorted((file for file in seen if file not in placed), key=lambda file: -file.size):  # of two copies the longer one holds more
            fitting = [p for p in among if p.offset and (_begins_like(file, p) if moved else p.identity == file.identity)]
            held = [(p, back) for p in fitting if (back := holds(file, p)) and (back.offset == p.offset or not moved)]
            if held:  # several where it was cut before: the one that was read furthest
                own, placed[file] = max(held, key=lambda pair: pair[1].offset)
                among.remove(own)
    free = [*solid, *hollow]
    rest = [file for file in seen if file not in placed]
    everyone = [*placed.values(), *followed, *free]
    for file in rest:
        alike = [p for p in everyone if _begins_like(file, p)] if file.first.strip(b"\0") else []
        cut = any(p.identity == file.identity and _begins_like(file, p) for p in known)
        if file.live or cut:
            backs = [back for p in alike if (back := holds(file, p))]
            best = max(backs, key=lambda back: back.offset, default=begun(file.name, file.identity))
            free = [p for p in free if not p.goes_beyond(best)]
            placed[file] = replace(best, left=-1)
        elif first_look:
            placed[file] = at_end(file, partial(read, file.name))
        elif (
            file.first and not alike and not any(other.live and other.first.startswith(file.first) for other in rest)
        ):  # an empty one may become a copy
            unread = [replace(p, name=file.name) for p in free if p.offset == 0 and p.identity == file.identity]
            placed[file] = (*unread, begun(file.name, file.identity))[0]
    return [(file, placed[file]) for file in seen if file in placed], [p for p in free if p.offset]


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=12).digest()


def _begins_so(position: Position, read: Read) -> bool:
    """Lines may be longer than a guard and end alike; then the beginning tells files apart."""
    return all(_digest(read(0, head.offset)) == head.digest for head in position.heads[-1:])


def _begins_like(file: Seen, position: Position) -> bool:
    """By the longest head that is not longer than the file."""
    fitting = [head for head in position.heads if head.offset <= len(file.first)]
    return bool(fitting) and _digest(file.first[: fitting[-1].offset]) == fitting[-1].digest


def _moved_on(position: Position, taken: Taken, data: bytes, end: int) -> Position:
    """The position behind what was taken. data: the bytes from the guard of the old position on, `end` of them before the new one."""
    if not taken.used:
        return position
    offset = position.offset + taken.used
    heads, size = position.heads, min(offset, HEAD_BYTES)
    # As long as the longest head is not there, the position is less than a guard from the beginning, and `data` begins at 0.
    if not heads or (heads[-1].offset < HEAD_BYTES and (size == HEAD_BYTES or size >= 2 * heads[-1].offset)):
        heads = (*heads, Mark(size, _digest(data[:size])))
    *steps, newest = position.marks
    in_a_hole = not data[: end - taken.used].strip(b"\0")  # which says nothing: any other hole is like it
    if not position.skipping and not in_a_hole and newest.offset >= (steps[-1].offset if steps else 0) + STEP_BYTES:
        steps.append(newest)
    if len(steps) > STEPS:  # every second one of the older half goes: the further back, the wider apart
        steps = steps[: STEPS // 2 : 2] + steps[STEPS // 2 :]
    marks = (*steps, Mark(offset, _digest(data[max(0, end - GUARD_BYTES) : end])))
    return replace(position, heads=heads, marks=marks, skipping=taken.skipping)


# --- the edge: a folder, open files, and what happened to them


class Stat(msgspec.Struct, frozen=True):
    """What the system says of a file. written_s: only puts rotated files in order; file systems lie about times."""

    identity: Identity
    size: int
    regular: bool
    written_s: float


class Disk:
    """The few calls to the system that a tail makes. All may raise OSError."""

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def stat(self, path: Path) -> Stat:
        return self._stat(os.stat(path))

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe that took the name must not be waited for

    def fstat(self, fd: int) -> Stat:
        return self._stat(os.fstat(fd))

    def read(self, fd: int, offset: int, size: int) -> bytes:
        return os.pread(fd, size, offset)

    def close(self, fd: int) -> None:
        os.close(fd)

    def _stat(self, found: os.stat_result) -> Stat:
        return Stat((found.st_dev, found.st_ino), found.st_size, S_ISREG(found.st_mode), found.st_mtime)


@dataclass(slots=True, eq=False)
class _Followed:
    fd: int
    position: Position
    live: bool
    grown_s: float
    leave_at: float | None = None
    more: bool = True


@dataclass(slots=True)
class Tail:
    """One path, or all files whose names fit it, as in requests*.jsonl. `poll` hands out whole lines; counters say what happened on the way.

    Rotated files are those that stand beside it and are named after it, with `.` or `-` and more. since: `positions` as they were stored; with None
    it starts at the beginning of the file that is there, and takes rotated ones as read.

    faults, by reason. long: a line beyond the limit, left out. nul: NUL blocks, left out. torn: a last line without newline, in a file let go.
    cut: cut in place and no copy found; lines that were not read yet, if any, are lost. gone: the same for a file that is not there at a start.
    reread: cut in place, but not to nothing; lines from the last mark before the cut come again. packed: compressed, left out.
    unreadable: a rotated file that cannot be read; it is tried again."""

    path: Path
    since: Sequence[Position] | None = None
    grace_s: float = 5.0
    disk: Disk = field(default_factory=Disk)
    rotations: int = 0
    found: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    _followed: list[_Followed] = field(default_factory=list)
    _known: list[Position] = field(default_factory=list)
    _first_look: bool = True
    _next_look_s: float = float("-inf")
    _trouble: OSError | None = None
    _names: dict[str, Identity] = field(default_factory=dict)
    _live: re.Pattern[str] = field(init=False)
    _rotated: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._first_look = self.since is None
        self._known = list(self.since or ())
        pattern = self.path.name if self._is_pattern else glob.escape(self.path.name)
        self._live = re.compile(fnmatch.translate(pattern))
        self._rotated = re.compile(fnmatch.translate(pattern + "[.-]?*"))

    def poll(self, now_s: float, budget_bytes: int = 4 * CHUNK_BYTES) -> list[bytes]:
        """Whole lines since the last poll, in blocks that `lines_of` or a decoder of JSON lines takes, oldest file first; about budget_bytes at most.

        now_s: a monotonic clock. A missing file has no lines. Raises OSError when a file that is there cannot be read, and no other had lines."""
        self._trouble = None
        blocks: list[bytes] = []
        budget_bytes = self._drain_all(blocks, budget_bytes, now_s)
        if now_s >= self._next_look_s or self._path_leads_elsewhere():
            try:
                self._look(now_s)
            except FileNotFoundError:  # moved in the middle of a look
                self._next_look_s = float("-inf")
            except OSError as error:
                self._in_trouble(error)
            self._drain_all(blocks, budget_bytes, now_s)
        self._let_go(now_s)
        if self._trouble and not blocks:
            raise self._trouble
        return blocks

    def positions(self) -> tuple[Position, ...]:
        """Where reading stands, after all lines handed out so far: to be stored, and given as `since` at the next start."""
        return (*self._known, *(file.position for file in self._followed))

    def unread_bytes(self) -> int:
        """Bytes in the followed files beyond the last complete line handed out."""
        return sum(max(0, self._size(file) - file.position.offset) for file in self._followed)

    def close(self) -> None:
        for file in self._followed:
            self.disk.close(file.fd)
        self._known += [file.position for file in self._followed]
        self._followed.clear()

    @property
    def _is_pattern(self) -> bool:
        return "*" in self.path.name or "?" in self.path.name

    def _path_leads_elsewhere(self) -> bool:
        if self._is_pattern:
            return False
        try:
            there = self.disk.stat(self.path).identity
        except OSError:
            return self.found
        return all(file.position.identity != there or not file.live for file in self._followed)

    def _look(self, now_s: float) -> None:
        """See which files there are, whose they are, and open those that hold something new."""
        self._next_look_s = now_s + LOOK_S
        stats = self._stats()
        followed = {file.position.identity: file for file in self._followed}
        seen, unreadable = self._seen({name: stat for name, stat in stats.items() if stat.identity not in followed})
        aside = [p for p in self._known if p.identity in unreadable]
        known = [p for p in self._known if p.identity not in unreadable]
        placed, missed = place(seen, known, [file.position for file in self._followed], self._peek, self._first_look)

        self._first_look = False
        self.found = any(self._live.match(name) for name in stats)
        self._note_names(stats, followed, now_s)
        self._known = aside + self._missed(missed, {stat.identity for stat in stats.values()})
        for file, position in placed:
            if any(p.goes_beyond(position) for p in known):
                self._tell("reread", file.name, f"was changed while nobody read; it is read on from byte {position.offset}")
            if position.left != file.size or (file.live and not self._is_pattern):
                self._open(file, position, now_s)
            else:
                self._known.append(position)

    def _stats(self) -> dict[str, Stat]:
        """Regular files with our names, each once: rotated ones first, the oldest before the others."""
        try:
            names = self.disk.names(self.path.parent)
        except FileNotFoundError:
            return {}
        except PermissionError:  # a folder may be passed through and not listed; then there is the path alone
            names = [self.path.name]
        stats: dict[str, Stat] = {}
        identities: set[Identity] = set()
        for name in sorted(names, key=lambda name: (not self._live.match(name), name)):
            live = self._live.match(name)
            if not live and not self._rotated.match(name):
                continue
            try:
                stat = self.disk.stat(self.path.parent / name)
            except FileNotFoundError:
                continue
            if stat.regular and stat.identity not in identities:
                stats[name] = stat
                identities.add(stat.identity)
            elif live and not stat.regular:
                self._in_trouble(OSError(EINVAL, "a request log is a regular file", str(self.path.parent / name)))
        return dict(sorted(stats.items(), key=lambda item: (self._live.match(item[0]) is not None, item[1].written_s)))

    def _seen(self, stats: dict[str, Stat]) -> tuple[list[Seen], set[Identity]]:
        """These files with their first bytes, and the identities of those that cannot be read now."""
        seen, unreadable = [], set()
        for name, stat in stats.items():
            live = self._live.match(name) is not None
            try:
                seen.append(Seen(name, stat.identity, stat.size, live, self._peek(name, 0, min(stat.size, HEAD_BYTES))))
            except FileNotFoundError:
                continue
            except OSError as error:
                unreadable.add(stat.identity)
                if live:
                    self._in_trouble(error)
                else:
                    self._tell("unreadable", name, f"cannot be read: {error.strerror}")
        return seen, unreadable

    def _note_names(self, stats: dict[str, Stat], followed: dict[Identity, _Followed], now_s: float) -> None:
        """Which followed files still stand where their writer writes; the others are left once they have not grown for a while."""
        for file in self._followed:
            file.live = False
        for name, stat in stats.items():
            live = self._live.match(name) is not None
            if at := followed.get(stat.identity):
                at.live, at.position = live, replace(at.position, name=name)
            if live:
                self.rotations += self._names.get(name, stat.identity) != stat.identity
                self._names[name] = stat.identity
        self._names = {name: identity for name, identity in self._names.items() if name in stats or identity in followed}
        for file in self._followed:
            if file.live or not self.found:  # without a successor its writer may hold it open for long
                file.leave_at = None
            elif file.leave_at is None:
                file.leave_at = now_s + self.grace_s

    def _missed(self, missed: list[Position], there: set[Identity]) -> list[Position]:
        """Positions without a file, told when they were being followed; the newest are kept."""
        for position in missed:
            if position.left < 0 and position.identity in there:
                self._tell("cut", position.name, f"was cut at byte {position.offset} or before, and no copy of it was found")
            elif position.left < 0:
                self._tell("gone", position.name, f"was read up to byte {position.offset} and is not there any more")
        return [replace(p, left=max(p.left, 0)) for p in missed][-MISSED_AT_MOST:]

    def _open(self, file: Seen, position: Position, now_s: float) -> None:
        rotated = sum(not other.live for other in self._followed)
        try:
            if not file.live and rotated >= OPEN_AT_MOST:
                raise FileNotFoundError  # later
            fd = self.disk.open(self.path.parent / file.name)
            if self.disk.fstat(fd).identity != file.identity:
                self.disk.close(fd)
                raise FileNotFoundError
        except OSError as error:
            if position.offset or position.left >= 0:
                self._known.append(position)
            if not isinstance(error, FileNotFoundError):
                self._in_trouble(error)
            return
        leave_at = None if file.live or not self.found else now_s + self.grace_s
        self._followed.append(_Followed(fd, replace(position, left=-1), file.live, now_s, leave_at))

    def _drain_all(self, blocks: list[bytes], budget_bytes: int, now_s: float) -> int:
        for file in list(self._followed):
            budget_bytes = self._drain(file, blocks, budget_bytes, now_s)
        return budget_bytes

    def _drain(self, file: _Followed, blocks: list[bytes], budget_bytes: int, now_s: float) -> int:
        """Hand out what is new in one file; how much of the budget is left."""
        file.more = True
        while budget_bytes > 0 and file.more:
            try:
                step = read_on(file.position, lambda offset, size: self.disk.read(file.fd, offset, size))
            except OSError as error:  # such as a stale handle: it is opened anew
                self._in_trouble(error)
                self._leave(file, -1)
                break
            match step:
                case Packed():
                    self._leave_packed(file)
                    break
                case Changed(back_to):
                    self._go_back(file, back_to)
                case Batch(taken):
                    if taken.block:
                        blocks.append(taken.block)
                    budget_bytes -= taken.used
                    self._move_on(file, step, now_s)
        return budget_bytes

    def _move_on(self, file: _Followed, batch: Batch, now_s: float) -> None:
        """Stand behind a batch, and tell what was left out of it."""
        taken, position = batch.taken, batch.position
        file.position, file.more = position, batch.more
        if taken.used:
            file.grown_s = now_s
            file.leave_at = None if file.leave_at is None else now_s + self.grace_s
        if taken.long:
            self._tell("long", position.name, f"has a line of more than {MAX_LINE_BYTES} bytes before byte {position.offset}")
        if taken.nul:
            self._tell("nul", position.name, f"has NUL bytes before byte {position.offset}")

    def _go_back(self, file: _Followed, back_to: Position | None) -> None:
        """Read a changed file on from where it still holds what was read, or from its beginning."""
        position = file.position
        if back_to:
            self._tell("reread", position.name, f"was changed before byte {position.offset}; it is read on from {back_to.offset}")
            file.position = back_to
        else:  # what is there now is new, and the old rest may be in a copy
            self.rotations += 1
            self._known.append(position)
            self._next_look_s = float("-inf")
            file.position = begun(position.name, position.identity)

    def _leave_packed(self, file: _Followed) -> None:
        if file.live:
            self._in_trouble(OSError(EINVAL, "a request log is not compressed", str(self.path.parent / file.position.name)))
        else:
            self._tell("packed", file.position.name, "is compressed and left out")
        self._leave(file, self._size(file))

    def _let_go(self, now_s: float) -> None:
        over = max(0, len(self._followed) - OPEN_AT_MOST)
        crowded = sorted(self._followed, key=lambda file: (file.live, file.grown_s))[:over] if over else []
        for file in list(self._followed):
            if file.more or (file not in crowded and (file.leave_at is None or now_s < file.leave_at)):
                continue
            size = self._size(file)
            if size > file.position.offset and not file.live:
                self._tell("torn", file.position.name, "ends without a newline")
            self._leave(file, size)

    def _leave(self, file: _Followed, size: int) -> None:
        self.disk.close(file.fd)
        self._followed.remove(file)
        position = file.position
        self._known.append(replace(position, left=size, marks=position.marks if size < 0 else position.marks[-1:]))

    def _peek(self, name: str, offset: int, size: int) -> bytes:
        """Some bytes of a file that is not followed."""
        fd = self.disk.open(self.path.parent / name)
        try:
            return self.disk.read(fd, offset, size)
        finally:
            self.disk.close(fd)

    def _size(self, file: _Followed) -> int:
        try:
            return self.disk.fstat(file.fd).size
        except OSError:
            return file.position.offset

    def _in_trouble(self, error: OSError) -> None:
        self._trouble = error
        self._next_look_s = float("-inf")

    def _tell(self, reason: str, name: str, what: str) -> None:
        self.faults[reason] += 1
        if self.faults[reason] <= TOLD_AT_MOST:
            log.warning("%s: %s (%s)", self.path.parent / name, what, reason)
