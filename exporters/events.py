"""TuningEvent <-> one JSON line of events.jsonl: what changed, when, by whom, and the windows to compare.

Law: the file is only ever appended to, under its lock, one line at a time; dashboards and alerts hold copies."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from errno import EINVAL
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from exporters.catalogue import ours
from exporters.exposition import Sample

Kind = Literal["change", "restart", "version", "config", "note"]


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A span of time, in unix seconds; end is after start."""

    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not self.start_s < self.end_s:
            raise ValueError(f"a window ends after it starts, not {self.start_s} .. {self.end_s}")


class TuningEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. at_s: unix seconds. diff: option -> (old, new) as they are written on the command line; None: not set."""

    at_s: float
    kind: Kind
    what: str
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex[:12])
    who: str | None = None
    upstream: str | None = None
    model: str | None = None
    diff: Mapping[str, tuple[str | None, str | None]] = {}
    before: Window | None = None
    after: Window | None = None
    tags: tuple[str, ...] = ()


LOCK_WITHIN_S = 2.0

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TuningEvent)


def append(path: Path, event: TuningEvent) -> None:
    """Add one event, durably. Writers in other processes take turns; a half line left by a crash is closed first.

    Raises OSError, and TimeoutError (which is one) when another process keeps the lock for two seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        _lock(file, time.monotonic() + LOCK_WITHIN_S)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(_encoder.encode(event) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _lock(file: BinaryIO, deadline_s: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{file.name} is locked by another process") from None
            time.sleep(0.02)


def read(path: Path) -> tuple[list[TuningEvent], int]:
    """All events in the order in which they were written, and how many lines were none. A missing file holds none. Raises OSError."""
    events, bad = [], 0
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "a file of events is a regular file", str(path))
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    for line in lines:
        if line.strip():
            try:
                events.append(_decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
                bad += 1
    return events, bad


def samples(events: list[TuningEvent]) -> Iterator[Sample]:
    """The newest time and the count of each kind of event."""
    for kind in sorted({event.kind for event in events}):
        times = [event.at_s for event in events if event.kind == kind]
        yield ours.EVENT_TIME, {"kind": kind}, max(times)
        yield ours.EVENTS, {"kind": kind}, len(times)
