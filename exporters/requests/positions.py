"""Positions in line files, and recognition of a file by its content after rotation or compression. Pure.

Invariant: a file is recognised by fingerprints of its bytes. Names and inodes are only hints."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

MAX_LINE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
HEAD_BYTES = 512
GUARD_BYTES = 1024  # more than one of our lines, so that it always contains a request id
# distance of marks; after a truncation at most this much is read twice, more further back
STEP_BYTES = 1 << 16
STEPS = 32

PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")  # gzip, bzip2, xz, zstd, lz4

Read = Callable[[int, int], bytes]  # offset, size -> bytes, fewer at the end of the file
Identity = tuple[int, int]  # device and inode


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Offset in a file and the digest of the bytes next to it; no content is kept."""

    offset: int
    digest: bytes


class Position(msgspec.Struct, frozen=True):
    """Read position in a file, and the fingerprints to recognise it.

    heads: digests of its first bytes, at several sizes while it is small, so that a shorter copy is recognised too.
    marks: line ends and the bytes before each; the last one is the position. skipping: the position is inside an
    over-long line. left: size of the file when it was closed, -1 while it is followed. seen: its size at the last
    look, 0 if all of it was read."""

    name: str
    identity: Identity
    heads: tuple[Mark, ...]
    marks: tuple[Mark, ...]
    skipping: bool = False
    left: int = -1
    seen: int = 0

    @property
    def offset(self) -> int:
        return self.marks[-1].offset

    def goes_beyond(self, other: Position) -> bool:
        """Return True if this is the same reading, further on."""
        return self.offset > other.offset and self.marks[: len(other.marks)] == other.marks


class ObservedFile(msgspec.Struct, frozen=True):
    """File at one scan. live: at the writer's path, not rotated. first: its first bytes."""

    name: str
    identity: Identity
    size: int
    live: bool
    first: bytes


class Taken(msgspec.Struct, frozen=True):
    """Content of some bytes: a block of complete lines, the bytes consumed, and whether an over-long line continues."""

    block: bytes = b""
    used: int = 0
    skipping: bool = False
    long: bool = False
    nul: bool = False


class Batch(msgspec.Struct, frozen=True):
    """Block of lines, and the position after it. more: the file may hold more than was read."""

    taken: Taken
    position: Position
    more: bool


class Changed(msgspec.Struct, frozen=True):
    """File whose bytes before the position changed. back_to: the last unchanged mark; None: nothing is unchanged."""

    back_to: Position | None


class Packed(msgspec.Struct, frozen=True):
    """A compressed file where lines were expected."""


class CompressedFile(msgspec.Struct, frozen=True):
    """Compressed rotated file at one scan. size: compressed.

    raw: its first bytes. first: its first unpacked bytes, fewer than HEAD_BYTES only at its end."""

    name: str
    identity: Identity
    size: int
    raw: bytes
    first: bytes

    def tried(self, position: Position) -> tuple[Identity, int, Mark]:
        """Return the key for: this file does not hold what was read up to a position."""
        return self.identity, self.size, position.marks[-1]


class Sorted(msgspec.Struct, frozen=True):
    """Result of `place_archives`.

    to_read: archives and their start positions. done: positions that need no reading now. missed: positions that no
    archive may hold."""

    to_read: list[tuple[CompressedFile, Position]]
    done: list[Position]
    missed: list[Position]


def start_position(name: str, identity: Identity) -> Position:
    """Return the position before anything was read."""
    return Position(name, identity, (), (Mark(0, _digest(b"")),))


def at_end(file: ObservedFile, read: Read) -> Position:
    """Return the end position of a file that was rotated before start-up."""
    start = max(0, file.size - CHUNK_BYTES)
    data = read(start, file.size - start)
    offset = start + (data.rfind(b"\n") + 1 or (len(data) if start else 0))
    first, back = file.first[:offset], min(offset, GUARD_BYTES)
    heads = (Mark(len(first), _digest(first)),) if first else ()
    return Position(
        file.name, file.identity, heads, (Mark(offset, _digest(read(offset - back, back))),), left=file.size
    )


def take(data: bytes, skipping: bool = False, start: int = 0) -> Taken:
    """Split data after the last position, which is from `start` on, into a block of complete lines and a rest.

    The block ends with a newline and may hold blank lines. NUL blocks, left by crashes and truncation, end a line as
    a newline does; trailing ones wait for more data, because a network file system may show a size before its bytes."""
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


def read_on(position: Position, read: Read) -> Batch | Changed | Packed:
    """Read the next lines after a position.

    One call reads them and the bytes before them, so that no truncation can happen between check and read."""
    back = min(position.offset, GUARD_BYTES)
    for window in (CHUNK_BYTES, MAX_LINE_BYTES + 1):
        data = read(position.offset - back, back + window)
        if _digest(data[:back]) != position.marks[-1].digest or (
            position.offset > back and not _begins_so(position, read)
        ):
            return Changed(last_that_holds(position, read))
        if position.offset == 0 and data.startswith(PACKED):
            return Packed()
        taken = take(data, position.skipping, back)
        if taken.used or len(data) < back + window:
            break
    return Batch(taken, _moved_on(position, taken, data, back + taken.used), len(data) == back + window)


def last_that_holds(position: Position, read: Read) -> Position | None:
    """Return the position at its last mark before which the file is unchanged; None if there is none."""
    if not _begins_so(position, read):
        return None
    for count in range(len(position.marks), 0, -1):
        mark = position.marks[count - 1]
        back = min(mark.offset, GUARD_BYTES)
        if _digest(read(mark.offset - back, back)) == mark.digest:
            newest = count == len(position.marks)
            return position if newest else replace(position, marks=position.marks[:count], skipping=False, left=-1)
    return None


def match_files(
    seen: Sequence[ObservedFile],
    known: Sequence[Position],
    followed: Sequence[Position],
    read: Callable[[str, int, int], bytes],
    first_look: bool,
) -> tuple[list[tuple[ObservedFile, Position]], list[Position]]:
    """Return start positions for files not followed yet, and the known positions without a file.

    First files that hold what was read of them, then files that hold what was read of another (moved or copied). The
    rest is new and read from its start, unless it begins like a known file: then it is a copy and is skipped. At the
    first scan rotated files count as read. Positions at 0 are not returned as missing."""

    solid = [position for position in known if not _is_zero_filled(position)]
    zero_filled = [position for position in known if _is_zero_filled(position)]
    placed: dict[ObservedFile, Position] = {}
    for candidates, moved in ((solid, False), (solid, True), (zero_filled, False)):
        for file in sorted(seen, key=lambda file: -file.size):  # the longer one of two copies holds more
            if file in placed:
                continue
            match = _furthest_match(file, candidates, moved, read)
            if match is not None:
                own, placed[file] = match
                candidates.remove(own)
    free = [*solid, *zero_filled]
    rest = [file for file in seen if file not in placed]
    everyone = [*placed.values(), *followed, *free]
    for file in rest:
        is_zeros = not file.first.strip(b"\0")
        alike = [] if is_zeros else [position for position in everyone if _begins_like(file, position)]
        if file.live or _was_cut(file, known):
            start = _furthest_start(file, alike, read)
            free = [position for position in free if not position.goes_beyond(start)]
            placed[file] = replace(start, left=-1)
        elif first_look:
            placed[file] = at_end(file, partial(read, file.name))
        elif file.first and not alike and not _is_copied(file, rest):  # an empty file may become a copy
            placed[file] = _unread_start(file, free)
    return [(file, placed[file]) for file in seen if file in placed], [position for position in free if position.offset]


ReadNamed = Callable[[str, int, int], bytes]


def _held(file: ObservedFile, position: Position, read: ReadNamed) -> Position | None:
    """Return the position up to which this file holds what was read, under the file's own name."""
    back = last_that_holds(position, partial(read, file.name))
    return None if back is None else replace(back, name=file.name, identity=file.identity)


def _furthest_match(
    file: ObservedFile, candidates: Sequence[Position], moved: bool, read: ReadNamed
) -> tuple[Position, Position] | None:
    """Return the known position that this file holds, and the position to read on from.

    Several match after a truncation: the one read furthest is used. moved: match files of another identity, which
    must hold everything read."""
    best = None
    for position in candidates:
        same = _begins_like(file, position) if moved else position.identity == file.identity
        if not same or not position.offset:
            continue
        held = _held(file, position, read)
        if held is None or (moved and held.offset != position.offset):
            continue
        if best is None or held.offset > best[1].offset:
            best = position, held
    return best


def _was_cut(file: ObservedFile, known: Sequence[Position]) -> bool:
    """Return True if this is a known file that no longer holds everything that was read of it."""
    return any(position.identity == file.identity and _begins_like(file, position) for position in known)


def _furthest_start(file: ObservedFile, alike: Sequence[Position], read: ReadNamed) -> Position:
    """Return the start position of a file that begins like others: after their common part."""
    start = None
    for position in alike:
        held = _held(file, position, read)
        if held is not None and (start is None or held.offset > start.offset):
            start = held
    return start or start_position(file.name, file.identity)


def _is_copied(file: ObservedFile, others: Sequence[ObservedFile]) -> bool:
    """Return True if a live file begins with this file's content."""
    return any(other.live and other.first.startswith(file.first) for other in others)


def _unread_start(file: ObservedFile, free: Sequence[Position]) -> Position:
    """Return the known position of an unread file, else a new one."""
    for position in free:
        if position.offset == 0 and position.identity == file.identity:
            return replace(position, name=file.name)
    return start_position(file.name, file.identity)


def is_of(archive: CompressedFile, position: Position) -> bool:
    """Return True if a position belongs to this archive: by identity, and by content as far as known."""
    if position.identity != archive.identity:
        return False
    if not position.heads:  # skipped unread
        return position.left == archive.size
    head = position.heads[-1]
    return any(_digest(first[: head.offset]) == head.digest for first in (archive.first, archive.raw))


def place_archives(
    archives: Sequence[CompressedFile],
    own: Sequence[Position],
    missed: Sequence[Position],
    others: Sequence[Position],
    firsts: Sequence[bytes],
    tried: Container[tuple[Identity, int, Mark]],
    first_look: bool,
) -> Sorted:
    """Decide which archives to read, and from where.

    An archive that begins like a missed position may be that file, compressed: it is continued, and reading verifies
    the bytes before the position. It is read from its start only if it is unlike every known file. While an equal
    plain file exists, that file is read instead. own: positions stored for the archives. others: positions of plain
    files and of archives being read. firsts: beginnings of unread plain files. tried: pairs that reading has
    refuted. first_look: archives count as read, as other rotated files do."""
    to_read, done, free = [], [], list(missed)
    for archive in archives:
        zero_filled = not archive.first.strip(b"\0")  # begins with a hole; all holes are alike
        mine = next((p for p in own if is_of(archive, p)), None)
        if mine and mine.offset and mine.left != archive.size:  # being read, or changed since
            free.append(mine)
        fitting = [p for p in free if p.offset and _begins_like(archive, p) and not _is_zero_filled(p)]
        claimed = [p for p in fitting if archive.tried(p) not in tried]
        if claimed:
            best = mine if mine in claimed else max(claimed, key=lambda p: p.offset)
            free.remove(best)
            to_read.append((archive, best))
            continue
        if first_look or mine or (fitting and not zero_filled):
            kept = mine if mine and mine not in free else _unread(archive)
            done.append(replace(kept, name=archive.name))
            continue
        is_read_elsewhere = any(_begins_like(archive, p) for p in (*others, *own))
        is_plain_too = any(_alike(archive.first, first) for first in firsts)
        if zero_filled or not (is_read_elsewhere or is_plain_too):
            to_read.append((archive, start_position(archive.name, archive.identity)))
    return Sorted(to_read, done, free)


def _unread(archive: CompressedFile) -> Position:
    """Return the position of a skipped archive."""
    first = archive.first
    return Position(
        archive.name,
        archive.identity,
        (Mark(len(first), _digest(first)),) if first else (),
        start_position("", (0, 0)).marks,
        left=archive.size,
    )


def _is_zero_filled(position: Position) -> bool:
    """Return True if a position is inside a hole, where all positions are alike."""
    return position.marks[-1].digest == _digest(bytes(min(position.offset, GUARD_BYTES)))


def _alike(one: bytes, other: bytes) -> bool:
    size = min(len(one), len(other))
    return size > 0 and one[:size] == other[:size]


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=12).digest()


def _begins_so(position: Position, read: Read) -> bool:
    """Compare the beginning: lines may be longer than a guard and end alike."""
    return all(_digest(read(0, head.offset)) == head.digest for head in position.heads[-1:])


def _begins_like(file: ObservedFile | CompressedFile, position: Position) -> bool:
    """Compare by the longest head that fits into the file."""
    fitting = [head for head in position.heads if head.offset <= len(file.first)]
    return bool(fitting) and _digest(file.first[: fitting[-1].offset]) == fitting[-1].digest


def _moved_on(position: Position, taken: Taken, data: bytes, end: int) -> Position:
    """Return the position after consumed data.

    data: bytes from the old position's guard on, `end` of them before it."""
    if not taken.used:
        return position
    offset = position.offset + taken.used
    heads, size = position.heads, min(offset, HEAD_BYTES)
    # Until the longest head exists, the position is within a guard of the start, and `data` begins at 0.
    if not heads or (heads[-1].offset < HEAD_BYTES and (size == HEAD_BYTES or size >= 2 * heads[-1].offset)):
        heads = (*heads, Mark(size, _digest(data[:size])))
    *steps, newest = position.marks
    in_a_hole = not data[: end - taken.used].strip(b"\0")  # no evidence: all holes are alike
    if not position.skipping and not in_a_hole and newest.offset >= (steps[-1].offset if steps else 0) + STEP_BYTES:
        steps.append(newest)
    if len(steps) > STEPS:  # drops every second mark of the older half: wider spacing further back
        steps = steps[: STEPS // 2 : 2] + steps[STEPS // 2 :]
    marks = (*steps, Mark(offset, _digest(data[max(0, end - GUARD_BYTES) : end])))
    return replace(position, heads=heads, marks=marks, skipping=taken.skipping)
