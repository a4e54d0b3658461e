"""Tail of growing line files through rotation, truncation, compression and crashes.

Invariant: a line is returned once, after its newline arrived. Content identifies what was read: a position holds
fingerprints of the bytes before it; names and inodes are only hints. So reading continues after a rename, in a copy
after a truncation, or in the compressed form of a file, and never in another file with a reused inode. Lines that must
be missed or may repeat are counted by reason.

`positions` after a batch and `since` at the next start continue over a restart: exactly once, if both are stored
with the counts."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EINVAL
from functools import partial
from pathlib import Path
from stat import S_ISREG

import msgspec
from msgspec.structs import replace

from exporters.requests import positions
from exporters.requests.compressed import Damaged, Unpacked
from exporters.requests.positions import (
    Batch,
    Changed,
    CompressedFile,
    Identity,
    Mark,
    ObservedFile,
    Packed,
    Position,
    Read,
)

LOOK_S = 1.0  # maximum delay until a new file, other than the path itself, is noticed
ARCHIVE_BYTES = 1 << 20  # unpacked in one poll; bzip2 takes 40 ms for it, gzip 4
ARCHIVE_PATIENCE_S = 60.0  # time without writes after which a compressed file counts as truncated
OPEN_AT_MOST = 64
MISSED_AT_MOST = 32  # positions of missing files, kept in case they return or appear as a copy
LOGGED_AT_MOST = 3  # log lines for each reason

# Survivable faults of a file: see Tail.faults.
REASONS = ("long", "nul", "torn", "cut", "gone", "reread", "packed", "unreadable")

log = logging.getLogger("vllm_watch.tail")


class Stat(msgspec.Struct, frozen=True):
    """File status. written_s: only used to order rotated files, because file systems are unreliable about times."""

    identity: Identity
    size: int
    regular: bool
    written_s: float


class TailDisk:
    """Disk operations of a tail. All may raise OSError."""

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def matching(self, folder: Path, pattern: str) -> list[str]:
        """Return the paths that match a pattern relative to a folder."""
        return glob.glob(os.path.join(glob.escape(str(folder)), pattern))

    def stat(self, path: Path) -> Stat:
        return self._stat(os.stat(path))

    def open(self, path: Path) -> int:
        # do not block on a pipe with this name
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

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
    """Open file. archive: set for a compressed one, with its start position as known before."""

    fd: int
    read: Read
    position: Position
    live: bool
    grown_s: float
    leave_at: float | None = None
    more: bool = True
    archive: _Open | None = None


@dataclass(slots=True, eq=False)
class _Open:
    """Compressed file being read. source: the position that it continues, under the plain file's name."""

    file: CompressedFile
    source: Position
    unpacked: Unpacked


@dataclass(slots=True)
class Tail:
    """Tail of one path, or of all files that match a pattern such as requests*.jsonl. `poll` returns complete lines.

    Rotated files are next to the file, with its name followed by `.` or `-` and more, or match `rotated`, a pattern
    relative to its folder. since: stored `positions`; None starts at the beginning of the current file and takes
    rotated ones as read.

    faults, by reason. long: over-long line, skipped. nul: NUL blocks, skipped. torn: last line without newline, in a
    closed file. cut: truncated in place without a copy; unread lines, if any, are lost. gone: the same for a file
    missing at start. reread: truncated in place, but not to zero; lines from the last mark before the truncation
    repeat. packed: a compressed file is damaged, incomplete or of an unsupported format; its unread lines are lost.
    unreadable: a rotated file cannot be read; it is retried.

    A rotated file compressed before it was read to its end is continued in its compressed form; see
    `positions.place_archives`."""

    path: Path
    since: Sequence[Position] | None = None
    grace_s: float = 5.0
    disk: TailDisk = field(default_factory=TailDisk)
    rotated: str | None = None
    rotations: int = 0
    found: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    _followed: list[_Followed] = field(default_factory=list)
    _known: list[Position] = field(default_factory=list)
    _first_look: bool = True
    _next_look_s: float = float("-inf")
    _trouble: OSError | None = None
    # by identity and size; None: cannot be read
    _archives: dict[tuple[Identity, int], CompressedFile | None] = field(default_factory=dict)
    _tried: set[tuple[Identity, int, Mark]] = field(default_factory=set)
    _waiting: bool = False  # True while an archive waits for another
    _names: dict[str, Identity] = field(default_factory=dict)
    _live: re.Pattern[str] = field(init=False)
    _rotated: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._first_look = self.since is None
        self._known = list(self.since or ())
        pattern = self.path.name if self._is_pattern else glob.escape(self.path.name)
        self._live = re.compile(fnmatch.translate(pattern))
        self._rotated = re.compile(fnmatch.translate(pattern + "[.-]?*"))

    def poll(self, now_s: float, budget_bytes: int = 4 * positions.CHUNK_BYTES) -> list[bytes]:
        """Return complete lines since the last poll, in blocks for a JSON lines decoder, oldest file first.

        Returns about budget_bytes at most. now_s: a monotonic clock. A missing file has no lines. Raises OSError if
        an existing file cannot be read and no other had lines."""
        self._trouble = None
        blocks: list[bytes] = []
        budget_bytes = self._drain_all(blocks, budget_bytes, now_s)
        if now_s >= self._next_look_s or self._path_leads_elsewhere():
            try:
                self._look(now_s)
            except FileNotFoundError:  # moved during a scan
                self._next_look_s = float("-inf")
            except OSError as error:
                self._in_trouble(error)
            self._drain_all(blocks, budget_bytes, now_s)
        self._let_go(now_s)
        if self._trouble and not blocks:
            raise self._trouble
        return blocks

    def positions(self) -> tuple[Position, ...]:
        """Return the positions after all returned lines: store them and pass them as `since` at the next start."""
        return (*self._known, *(self._seen(file) for file in self._followed))

    def unfinished(self) -> list[bytes]:
        """Return last lines that lack a newline, which `poll` leaves to their writers. Raises OSError."""
        live = [file for file in self._followed if file.live]
        return [file.read(file.position.offset, positions.MAX_LINE_BYTES) for file in live]

    def unread_bytes(self) -> int:
        """Return the bytes in followed files after the last returned line."""
        return sum(max(0, self._unread(file)) for file in self._followed)

    @property
    def busy(self) -> bool:
        """Return True while a compressed file is unpacked whose lines take several polls to reach."""
        return self._waiting or any(file.archive and file.more for file in self._followed)

    def close(self) -> None:
        self._known += [self._seen(file) for file in self._followed]
        for file in self._followed:
            self.disk.close(file.fd)
        self._followed.clear()

    @property
    def _is_pattern(self) -> bool:
        return "*" in self.path.name or "?" in self.path.name

    def _is_live(self, name: str) -> bool:
        """Return True for the name of a file at the writer's path. Names in other folders are paths."""
        return os.sep not in name and self._live.match(name) is not None

    def _path_leads_elsewhere(self) -> bool:
        if self._is_pattern:
            return False
        try:
            there = self.disk.stat(self.path).identity
        except OSError:
            return self.found
        return all(file.position.identity != there or not file.live for file in self._followed)

    def _look(self, now_s: float) -> None:
        """Scan for files, match them with positions, and open those with new content."""
        self._next_look_s = now_s + LOOK_S
        stats = self._stats()
        followed = {file.position.identity: file for file in self._followed}
        seen, archives, unreadable = self._observe(
            {name: stat for name, stat in stats.items() if stat.identity not in followed}
        )
        own, aside, known = self._sorted_known(archives, unreadable)
        positions_read = [file.position for file in self._followed]
        placed, missed = positions.match_files(seen, known, [*positions_read, *own], self._peek, self._first_look)
        others = [*positions_read, *aside, *(position for _, position in placed)]
        firsts = [file.first for file in seen]
        firsts += [self._beginning(file) for file in self._followed if not file.position.heads]
        found = positions.place_archives(archives, own, missed, others, firsts, self._tried, self._first_look)

        self._first_look = False
        self.found = any(map(self._is_live, stats))
        self._note_names(stats, followed, now_s)
        self._known = [*aside, *found.done, *self._missed(found.missed, {stat.identity for stat in stats.values()})]
        for file, position in placed:
            if any(p.goes_beyond(position) for p in known):
                self._tell(
                    "reread",
                    file.name,
                    f"was changed while the reader was stopped; reading continues at byte {position.offset}",
                )
            if position.left != file.size or (file.live and not self._is_pattern):
                self._open(file, position, now_s)
            else:
                self._known.append(position)
        self._open_archives(found.to_read, now_s)

    def _sorted_known(
        self, archives: Sequence[CompressedFile], unreadable: Container[Identity]
    ) -> tuple[list[Position], list[Position], list[Position]]:
        """Sort the known positions: those of archives, those of files that cannot be read now, and the rest."""
        own, aside, known = list[Position](), list[Position](), list[Position]()
        for position in self._known:
            is_own = any(positions.is_of(archive, position) for archive in archives)
            if is_own:
                own.append(position)
            if position.identity in unreadable:
                aside.append(position)
            elif not is_own:
                known.append(position)
        return own, aside, known

    def _stats(self) -> dict[str, Stat]:
        """Return regular files with our names, each once: rotated ones first, oldest before newest."""
        try:
            names = self.disk.names(self.path.parent)
        except FileNotFoundError:
            return {}
        except PermissionError:  # a folder may be searchable but not listable; then only the path itself
            names = [self.path.name]
        names = [name for name in names if self._live.match(name) or self._rotated.match(name)]
        for found in map(Path, self.disk.matching(self.path.parent, self.rotated) if self.rotated else ()):
            names.append(found.name if found.parent == self.path.parent else str(found))
        stats: dict[str, Stat] = {}
        identities: set[Identity] = set()
        for name in sorted(names, key=lambda name: (not self._is_live(name), name)):
            live = self._is_live(name)
            try:
                stat = self.disk.stat(self.path.parent / name)
            except FileNotFoundError:
                continue
            if stat.regular and stat.identity not in identities:
                stats[name] = stat
                identities.add(stat.identity)
            elif live and not stat.regular:
                self._in_trouble(OSError(EINVAL, "not a regular file", str(self.path.parent / name)))
        return dict(sorted(stats.items(), key=lambda item: (self._is_live(item[0]), item[1].written_s)))

    def _observe(self, stats: dict[str, Stat]) -> tuple[list[ObservedFile], list[CompressedFile], set[Identity]]:
        """Return files with their first bytes, plain and compressed, and identities of unreadable or deferred ones."""
        seen, archives, unreadable = [], [], set()
        for name, stat in stats.items():
            live = self._is_live(name)
            try:
                first = self._peek(name, 0, min(stat.size, positions.HEAD_BYTES))
                if live or not first.startswith(positions.PACKED):
                    seen.append(ObservedFile(name, stat.identity, stat.size, live, first))
                elif archive := self._archive(name, stat, first):
                    archives.append(archive)
                else:
                    unreadable.add(stat.identity)
            except FileNotFoundError:
                continue
            except OSError as error:
                unreadable.add(stat.identity)
                if live:
                    self._in_trouble(error)
                else:
                    self._tell("unreadable", name, f"cannot be read: {error.strerror}")
        self._archives = {
            key: archive
            for key, archive in self._archives.items()
            if key in {(stat.identity, stat.size) for stat in stats.values()}
        }
        self._tried = {key for key in self._tried if key[:2] in self._archives}
        return seen, archives, unreadable

    def _archive(self, name: str, stat: Stat, raw: bytes) -> CompressedFile | None:
        """Return a compressed file with its unpacked beginning; None if unreadable or still too short."""
        key = stat.identity, stat.size
        if key not in self._archives:
            unpacked = Unpacked(partial(self._peek, name))
            try:
                first = unpacked.read(0, positions.HEAD_BYTES)
            except Damaged as error:
                self._archives[key] = None
                if not any(p.identity == stat.identity and p.left == stat.size for p in self._known):
                    self._tell_packed(name, error, 0)
                    self._known.append(replace(positions.start_position(name, stat.identity), left=stat.size))
                return None
            if len(first) < positions.HEAD_BYTES and not unpacked.complete:
                return None  # still being compressed
            self._archives[key] = CompressedFile(name, stat.identity, stat.size, raw, first)
        archive = self._archives[key]
        return archive and replace(archive, name=name)

    def _note_names(self, stats: dict[str, Stat], followed: dict[Identity, _Followed], now_s: float) -> None:
        """Record which followed files are still at the writer's path; others are closed once they stop growing."""
        for file in self._followed:
            file.live = False
        for name, stat in stats.items():
            live = self._is_live(name)
            if at := followed.get(stat.identity):
                at.live, at.position = live, replace(at.position, name=name)
            if live:
                self.rotations += self._names.get(name, stat.identity) != stat.identity
                self._names[name] = stat.identity
        self._names = {
            name: identity for name, identity in self._names.items() if name in stats or identity in followed
        }
        for file in self._followed:
            if file.live or not self.found:  # without a successor the writer may keep it open
                file.leave_at = None
            elif file.leave_at is None:
                file.leave_at = now_s + self.grace_s

    def _missed(self, missed: list[Position], there: set[Identity]) -> list[Position]:
        """Return positions without a file, reported if they were followed; only the newest are kept."""
        for position in missed:
            if position.left < 0 and position.identity in there:
                self._tell(
                    "cut",
                    position.name,
                    f"was truncated at byte {position.offset} or before, and no copy was found{_missing(position)}",
                )
            elif position.left < 0:
                self._tell(
                    "gone", position.name, f"was read up to byte {position.offset} and is gone{_missing(position)}"
                )
        return [replace(p, left=max(p.left, 0)) for p in missed][-MISSED_AT_MOST:]

    def _open(self, file: ObservedFile, position: Position, now_s: float) -> None:
        rotated = sum(not other.live for other in self._followed)
        try:
            if not file.live and rotated >= OPEN_AT_MOST:
                raise FileNotFoundError  # next scan
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
        self._followed.append(
            _Followed(fd, partial(self.disk.read, fd), replace(position, left=-1), file.live, now_s, leave_at)
        )

    def _open_archives(self, to_read: Sequence[tuple[CompressedFile, Position]], now_s: float) -> None:
        """Open the first of these, unless one is open, because unpacking takes memory. The others wait."""
        self._waiting = False
        for archive, source in to_read:
            if any(file.archive for file in self._followed) or not self._open_archive(archive, source, now_s):
                self._waiting = True
                if source.offset:
                    self._known.append(source)

    def _open_archive(self, archive: CompressedFile, source: Position, now_s: float) -> bool:
        try:
            fd = self.disk.open(self.path.parent / archive.name)
        except OSError:
            return False
        if self.disk.fstat(fd).identity != archive.identity:
            self.disk.close(fd)
            return False
        unpacked = Unpacked(partial(self.disk.read, fd))
        position = replace(source, name=archive.name, identity=archive.identity, left=-1)
        opened = _Open(archive, source, unpacked)
        self._followed.append(
            _Followed(fd, unpacked.read, position, False, now_s, now_s + ARCHIVE_PATIENCE_S, archive=opened)
        )
        return True

    def _drain_all(self, blocks: list[bytes], budget_bytes: int, now_s: float) -> int:
        for file in list(self._followed):
            budget_bytes = self._drain(file, blocks, budget_bytes, now_s)
        return budget_bytes

    def _drain(self, file: _Followed, blocks: list[bytes], budget_bytes: int, now_s: float) -> int:
        """Return new lines of one file in `blocks`; return the remaining budget."""
        file.more = True
        at_most = budget_bytes
        if file.archive:
            at_most = min(at_most, ARCHIVE_BYTES)
        while at_most > 0 and file.more:
            try:
                used = self._reach(file, at_most, now_s) or self._step(file, blocks, now_s)
            except Damaged as error:
                self._tell_packed(file.position.name, error, file.position.offset)
                self._leave(file, self._read_size(file))
                break
            except OSError as error:  # such as a stale handle: reopened later
                self._in_trouble(error)
                self._leave(file, -1)
                break
            at_most -= used
            budget_bytes -= used
        return budget_bytes

    def _reach(self, file: _Followed, at_most: int, now_s: float) -> int:
        """Unpack a compressed file up to its position. Return the number of bytes unpacked."""
        if file.archive is None or (unpacked := file.archive.unpacked).end >= file.position.offset:
            return 0
        offset = file.position.offset
        used = unpacked.advance(max(0, offset - positions.GUARD_BYTES), offset, at_most)
        file.leave_at = now_s + ARCHIVE_PATIENCE_S if used else file.leave_at
        if unpacked.end < offset and unpacked.exhausted:
            file.more = False
            if unpacked.complete:
                self._refute(file, file.archive)
        return used

    def _step(self, file: _Followed, blocks: list[bytes], now_s: float) -> int:
        """Read once after the position. Return the number of bytes read."""
        if not file.more:
            return 0
        match step := positions.read_on(file.position, file.read):
            case Packed():
                file.more = False
                self._leave_packed(file)
            case Changed() if file.archive:
                file.more = False
                self._refute(file, file.archive)
            case Changed(back_to):
                self._go_back(file, back_to)
            case Batch(taken):
                if taken.block:
                    blocks.append(taken.block)
                self._move_on(file, step, now_s)
                return taken.used
        return 0

    def _move_on(self, file: _Followed, batch: Batch, now_s: float) -> None:
        """Set the position after a batch, and report skipped data."""
        taken, position = batch.taken, batch.position
        file.position, file.more = position, batch.more
        if taken.used:
            file.grown_s = now_s
            grace_s = ARCHIVE_PATIENCE_S if file.archive else self.grace_s
            file.leave_at = None if file.leave_at is None else now_s + grace_s
        if taken.long:
            self._tell(
                "long",
                position.name,
                f"has a line of more than {positions.MAX_LINE_BYTES} bytes before byte {position.offset}",
            )
        if taken.nul:
            self._tell("nul", position.name, f"has NUL bytes before byte {position.offset}")

    def _go_back(self, file: _Followed, back_to: Position | None) -> None:
        """Continue a changed file at its last unchanged mark, or at its start."""
        position = file.position
        if back_to:
            self._tell(
                "reread",
                position.name,
                f"was changed before byte {position.offset}; reading continues at {back_to.offset}",
            )
            file.position = back_to
        else:  # current content is new; the old rest may be in a copy
            self.rotations += 1
            self._known.append(position)
            self._next_look_s = float("-inf")
            file.position = positions.start_position(position.name, position.identity)

    def _refute(self, file: _Followed, archive: _Open) -> None:
        """Close a compressed file that does not hold what was read, and keep the position for another."""
        self._tried.add(archive.file.tried(archive.source))
        self._close(file)
        self._known.append(archive.source)

    def _leave_packed(self, file: _Followed) -> None:
        if file.live:
            self._in_trouble(
                OSError(EINVAL, "a request log is not compressed", str(self.path.parent / file.position.name))
            )
        else:
            self._tell_packed(file.position.name, "compressed twice", 0)
        self._leave(file, self._read_size(file))

    def _tell_packed(self, name: str, why: object, offset: int) -> None:
        self._tell(
            "packed", name, f"cannot be unpacked ({why}); lines after byte {offset} of its content are not counted"
        )

    def _let_go(self, now_s: float) -> None:
        over = max(0, len(self._followed) - OPEN_AT_MOST)
        crowded = sorted(self._followed, key=lambda file: (file.live, file.grown_s))[:over] if over else []
        for file in list(self._followed):
            if file.more or (file not in crowded and not self._is_over(file, now_s)):
                continue
            if file.archive and not file.archive.unpacked.complete:
                self._tell_packed(file.position.name, "incomplete", file.position.offset)
            elif self._ends_torn(file):
                self._tell("torn", file.position.name, "ends without a newline")
            self._leave(file, self._read_size(file))

    def _is_over(self, file: _Followed, now_s: float) -> bool:
        """Return True if a completely read file need not be followed any longer."""
        return (file.archive is not None and file.archive.unpacked.complete) or (
            file.leave_at is not None and now_s >= file.leave_at
        )

    def _ends_torn(self, file: _Followed) -> bool:
        """Return True if a rotated file ends with an incomplete line that was not reported yet.

        The plain file may have reported it before."""
        if file.archive:
            return (
                file.archive.unpacked.end > file.position.offset
                and file.archive.source.left != file.archive.unpacked.end
            )
        return self._size(file) > file.position.offset and not file.live

    def _leave(self, file: _Followed, size: int) -> None:
        self._close(file)
        position = file.position
        self._known.append(replace(position, left=size, marks=position.marks if size < 0 else position.marks[-1:]))

    def _close(self, file: _Followed) -> None:
        self.disk.close(file.fd)
        self._followed.remove(file)
        if file.archive:
            self._next_look_s = float("-inf")  # another archive may wait

    def _peek(self, name: str, offset: int, size: int) -> bytes:
        """Read some bytes of a file that is not followed."""
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

    def _read_size(self, file: _Followed) -> int:
        """Return the handled size, compressed where applicable: a file with another size later is opened again."""
        return max(file.archive.unpacked.raw_end, file.archive.file.size) if file.archive else self._size(file)

    def _seen(self, file: _Followed) -> Position:
        """Return the position of a file with its size, if that is beyond it."""
        size = 0 if file.archive else self._size(file)
        return replace(file.position, seen=size if size > file.position.offset else 0)

    def _unread(self, file: _Followed) -> int:
        if file.archive is None:
            return self._size(file) - file.position.offset
        unpacked = file.archive.unpacked
        return self._size(file) - unpacked.raw_end + max(0, unpacked.end - file.position.offset)

    def _beginning(self, file: _Followed) -> bytes:
        try:
            return file.read(0, positions.HEAD_BYTES)
        except (OSError, Damaged):
            return b""

    def _in_trouble(self, error: OSError) -> None:
        self._trouble = error
        self._next_look_s = float("-inf")

    def _tell(self, reason: str, name: str, what: str) -> None:
        self.faults[reason] += 1
        if self.faults[reason] <= LOGGED_AT_MOST:
            log.warning("%s: %s (%s)", self.path.parent / name, what, reason)


def check_rotated(logs: Sequence[str], rotated: Mapping[str, str]) -> None:
    """Raise ValueError if a pattern of rotated files belongs to no log."""
    if unknown := next((path for path in rotated if path not in logs), None):
        raise ValueError(f"rotated names {unknown}, which requests_log does not list")


def _missing(position: Position) -> str:
    """Return what is missing of a file that cannot be found, and what to do."""
    known = position.seen - position.offset
    lost = f"at least {known:,} bytes after it are missing" if known > 0 else "what was written after it is missing"
    return f": {lost}. If the file was moved or renamed, give the pattern of its new names in `rotated`"
