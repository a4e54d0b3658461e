"""Last commit of a running shipper, read without its lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from exporters.dataset.layout import BadDataset, LogSegment
from exporters.dataset.ship_state import ShipCommit
from exporters.requests.checkpoint import frames_of
from exporters.requests.duplicates import RecentRequests
from exporters.requests.positions import Position

_decoder = msgspec.msgpack.Decoder(ShipCommit)


@dataclass(frozen=True, slots=True)
class ShippedState:
    """Positions by log, remembered requests, and segments that no manifest lists yet, with their files.

    number, pending: change with every commit that a reader must know of."""

    number: int = 0
    positions: Mapping[str, Sequence[Position]] = field(default_factory=dict)
    requests: tuple[bytes, ...] = ()
    pending: tuple[tuple[LogSegment, Path], ...] = ()


def read_shipped(folder: Path, remember: int) -> ShippedState:
    """Return the last commit in a shipper's state folder; an empty one before its first. Raises BadDataset, OSError."""
    path = folder / "positions"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ShippedState()
    window, last = RecentRequests(remember), None
    try:
        for frame in frames_of(data) or ():
            last = _decoder.decode(frame)
            window.restore(last.requests)
    except msgspec.MsgspecError as error:
        raise BadDataset(f"{path} is no state of this release's shipper ({error})") from error
    if last is None:
        raise BadDataset(f"{path} is no state of a shipper")
    pending = tuple(
        (one.segment, folder / "spool" / f"{one.segment.sha256}.parquet") for one in last.pending if not one.replaces
    )
    return ShippedState(last.number, last.positions, (*window.older, *window.newer), pending)
