"""State of a writer: read positions, remembered requests, and segments that its manifests do not list yet.

Invariant: positions, the requests behind them and the segments with their lines are one commit. A line is either in a
committed segment, or after the committed positions; never both, never neither."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from exporters.dataset.layout import LogSegment, Sums
from exporters.requests.checkpoint import Checkpoint
from exporters.requests.duplicates import RecentRequests
from exporters.requests.positions import Position
from exporters.requests.store import LogTotals


class PendingSegment(msgspec.Struct, frozen=True, array_like=True):
    """Segment in the spool that is not in its manifest yet.

    commit: number of the commit that made it. replaces: keys of the segments that it was merged from."""

    commit: int
    segment: LogSegment
    replaces: tuple[str, ...] = ()


class ShipCommit(msgspec.Struct, array_like=True):
    """One commit. requests: all that are remembered in a whole frame, in any other those since the last.

    sealed: sums of all records ever put into segments, by model as in keys."""

    owner: str
    number: int
    totals: LogTotals
    positions: dict[str, tuple[Position, ...]]
    pending: tuple[PendingSegment, ...]
    sealed: dict[str, Sums]
    requests: list[bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ShipCommit)


class ShipState:
    """Last commit, and the way to the next. `last` changes only when a commit is on disk."""

    def __init__(self, checkpoint: Checkpoint, remember: int) -> None:
        self.window = RecentRequests(remember)
        self.last = ShipCommit(secrets.token_hex(8), 0, LogTotals(), {}, (), {}, [])
        self.opened = 0  # number of the last commit of before this process
        self._checkpoint = checkpoint

    def open(self) -> None:
        """Restore the last commit, or make the first: the owner must be on disk before it claims a name.

        Raises Locked, Unreadable, OSError."""
        frames = self._checkpoint.open()
        for data in frames:
            try:
                self.last = _decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise self._checkpoint.put_aside(error) from error
            self.window.restore(self.last.requests)
            self.last.requests = []
        self.opened = self.last.number
        if not frames:
            self._commit()

    def seal(
        self, totals: LogTotals, positions: Mapping[str, Sequence[Position]], segments: Sequence[LogSegment]
    ) -> None:
        """Commit positions together with the segments of all lines before them. Raises OSError; repeat it then."""
        number = self.last.number + 1
        sealed = dict(self.last.sealed)
        for segment in segments:
            sealed[segment.model] = sealed.get(segment.model, Sums()).plus(segment.sums)
        self._commit(
            number=number,
            totals=totals,
            positions=self.last.positions | {path: tuple(found) for path, found in positions.items()},
            pending=(*self.last.pending, *(PendingSegment(number, segment) for segment in segments)),
            sealed=sealed,
            requests=self.window.added,
        )
        self.window.added = []

    def merge(self, segment: LogSegment, replaces: Sequence[str]) -> None:
        """Commit a merged segment. Raises OSError."""
        number = self.last.number + 1
        self._commit(number=number, pending=(*self.last.pending, PendingSegment(number, segment, tuple(replaces))))

    def stored(self, pending: Sequence[PendingSegment]) -> None:
        """Commit that the manifests list these segments. Raises OSError."""
        self._commit(pending=tuple(one for one in self.last.pending if one not in pending))

    def move(self, pending: PendingSegment, segment: LogSegment) -> PendingSegment:
        """Commit another key for a segment that no manifest lists, and return it. Raises OSError."""
        moved = msgspec.structs.replace(pending, segment=segment)
        self._commit(pending=tuple(moved if one == pending else one for one in self.last.pending))
        return moved

    def _commit(self, requests: Sequence[bytes] = (), **changes: Any) -> None:
        made: ShipCommit = msgspec.structs.replace(self.last, requests=list(requests), **changes)
        if self._checkpoint.needs_rewrite:
            # Requests of lines that no segment holds are read again after a crash, so they must not be known then.
            unsealed = set(self.window.added) - set(requests)
            known = [key for part in (self.window.older, self.window.newer) for key in part if key not in unsealed]
            self._checkpoint.rewrite(_encoder.encode(msgspec.structs.replace(made, requests=known)))
        else:
            self._checkpoint.append(_encoder.encode(made))
        made.requests = []
        self.last = made

    def close(self) -> None:
        self._checkpoint.close()
