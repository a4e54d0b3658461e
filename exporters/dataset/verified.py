"""Segment files of a folder whose content was compared with its hash, remembered over commands.

Invariant: a file counts as compared while its path, inode, size and time of change are those of the comparison."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from exporters.dataset.catalog import local_copy
from exporters.dataset.layout import BadDataset, LogSegment
from exporters.dataset.objects import FolderStore
from exporters.text import write_atomically

REMEMBERED = 100_000  # files, the newest; about 20 MB
WORKERS = 4  # threads that hash; hashing is faster than most disks read

Compared = tuple[int, int, int, str]  # inode, size, nanoseconds of the last change, SHA-256
_decoder = msgspec.msgpack.Decoder(dict[str, Compared])


class VerifiedFiles:
    """Files that were compared, kept in `path`. Without a readable `path` all are compared again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Compared] = {}
        self._changed = False
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._known = _decoder.decode(path.read_bytes())

    def files(self, store: FolderStore, segments: Sequence[LogSegment]) -> Iterator[Path | BadDataset]:
        """Yield the file of each segment, or what is wrong with it. Raises OSError."""
        unknown = [segment for segment in segments if not self._is_known(store.path(segment.key), segment)]
        damaged = dict(self._compare(store, unknown))
        self._save()
        for segment in segments:
            yield damaged.get(segment.key) or store.path(segment.key)

    def _compare(self, store: FolderStore, segments: Sequence[LogSegment]) -> Iterable[tuple[str, BadDataset]]:
        def compare(segment: LogSegment) -> BadDataset | None:
            try:
                local_copy(store, segment, Path())
            except BadDataset as error:
                return error
            return None

        before = [_stat(store.path(segment.key)) for segment in segments]
        with ThreadPoolExecutor(WORKERS) as pool:
            for segment, stat, error in zip(segments, before, pool.map(compare, segments), strict=True):
                if error:
                    yield segment.key, error
                elif stat:
                    self._known[str(store.path(segment.key))] = (*stat, segment.sha256)
                    self._changed = True

    def _is_known(self, path: Path, segment: LogSegment) -> bool:
        known = self._known.get(str(path))
        return known is not None and known == (*(_stat(path) or ()), segment.sha256)

    def _save(self) -> None:
        if self._changed:
            newest = dict(list(self._known.items())[-REMEMBERED:])
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, msgspec.msgpack.encode(newest), mode=0o600)
            self._changed = False


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
