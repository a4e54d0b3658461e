"""TuningEvent <-> one JSON line of events.jsonl: what changed, when, by whom, and the windows to compare.

Invariant: the file is only appended to, under its lock, one line at a time, because dashboards and alerts hold
copies. The end of a region is a later line with the same id: the newest line of an id is valid."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from errno import EINVAL
from pathlib import Path
from typing import Literal

import msgspec

from exporters.catalogue import sidecar
from exporters.exposition import Sample

Kind = Literal["change", "restart", "scaling", "version", "config", "note"]
ManualKind = Literal["change", "version", "config", "note"]  # entered by people; restarts and scaling are detected


class TimeWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time window in unix seconds; end is after start."""

    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not self.start_s < self.end_s:
            raise ValueError(f"a window must end after it starts, not {self.start_s} .. {self.end_s}")


class TuningEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event: a point in time; with end_s a region; open, a region that has not ended.

    at_s, end_s: unix seconds. diff: option -> (old, new) as written on the command line; None: not set."""

    at_s: float
    end_s: float | None = None
    open: bool = False
    kind: Kind
    what: str
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex[:12])
    who: str | None = None
    upstream: str | None = None
    model: str | None = None
    diff: Mapping[str, tuple[str | None, str | None]] = {}
    before: TimeWindow | None = None
    after: TimeWindow | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.end_s is not None and (self.open or not self.at_s < self.end_s):
            raise ValueError(
                f"a region is open, or ends after its start; it cannot start at {self.at_s:.3f} and end at"
                f" {self.end_s:.3f}"
            )

    @property
    def latest_s(self) -> float:
        """Time of the last change, including the end of a region."""
        return self.at_s if self.end_s is None else self.end_s


MAX_TEXT, MAX_NAME, MAX_TAGS, MAX_OPTIONS = 500, 100, 8, 50
CLOCKS_APART_S = 60.0  # tolerated clock difference


class NewEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Event as entered on the command line or over HTTP.

    at_s: None means now. id: the same id is written once. Raises ValueError for text that would break a line, a
    terminal or a dashboard; existing lines of the file are not checked."""

    what: str
    kind: ManualKind = "change"
    id: str | None = None
    at_s: float | None = None
    end_s: float | None = None
    open: bool = False
    who: str | None = None
    upstream: str | None = None
    model: str | None = None
    diff: Mapping[str, tuple[str | None, str | None]] = {}
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _plain("the text", self.what, MAX_TEXT)
        if not self.what.strip():
            raise ValueError("the text is empty; say what was changed")
        names = (("who", self.who), ("upstream", self.upstream), ("model", self.model))
        options = (
            (f"diff of {option[:MAX_NAME]!r}", word) for option, words in self.diff.items() for word in (option, *words)
        )
        for place, word in (*names, *options):
            _plain(place, word or "", MAX_TEXT if place.startswith("diff") else MAX_NAME)
        if self.id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.id):
            raise ValueError(
                "an id has up to 64 letters, digits, dots, dashes or underscores, and starts with a letter or digit"
            )
        if bad := next(
            (
                tag
                for tag in self.tags
                if not re.fullmatch(r"[\w./=+@-][\w.:/=+@-]{0,39}", tag) or tag.startswith("event:")
            ),
            None,
        ):
            raise ValueError(
                f"{bad[:50]!r} is no valid tag; a tag is a word of at most 40 letters, digits and . : / = + @ - _, not"
                " event:..."
            )
        if len(self.tags) > MAX_TAGS or len(self.diff) > MAX_OPTIONS:
            raise ValueError(f"an event has at most {MAX_TAGS} tags and {MAX_OPTIONS} options")

    def event(self, now_s: float) -> TuningEvent:
        """Return the event to write. Raises ValueError for an impossible time."""
        at_s = now_s if self.at_s is None else checked_time(self.at_s, now_s)
        end_s = None if self.end_s is None else checked_time(self.end_s, now_s)
        return TuningEvent(
            at_s=at_s, end_s=end_s, open=self.open, kind=self.kind, what=self.what.strip(), id=self.id or new_id(),
            who=self.who,
            upstream=self.upstream, model=self.model, diff=self.diff, tags=tuple(dict.fromkeys(self.tags)),
        )  # fmt: skip


def new_id() -> str:
    return uuid.uuid4().hex[:12]


def _plain(place: str, text: str, longest: int) -> None:
    if len(text) > longest:
        raise ValueError(f"{place} has {len(text)} characters; the limit is {longest}")
    if not text.isprintable():
        raise ValueError(f"{place} contains a line break or a non-printable character")


def checked_time(at_s: float, now_s: float) -> float:
    """Return a past event time unchanged. Raises ValueError for any other."""
    if not math.isfinite(at_s) or at_s <= 0:
        raise ValueError(f"{at_s} is not a unix time in seconds")
    if at_s > now_s + CLOCKS_APART_S:
        why = "it looks like milliseconds; use seconds" if at_s > 100 * now_s else "record an event after it happened"
        raise ValueError(f"{at_s:.0f} is in the future; {why}")
    return at_s


class UnknownEvent(ValueError):
    """Id without an event."""


class Conflict(ValueError):
    """Request that contradicts the recorded event with this id."""


LOCK_WITHIN_S = 2.0

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TuningEvent)


def append(path: Path, event: TuningEvent) -> None:
    """Append one event durably.

    Writers in other processes take turns; an incomplete line left by a crash is closed first, and a full disk leaves
    none. Raises OSError, and TimeoutError (an OSError) if another process holds the lock for two seconds."""
    with _locked(path) as fd:
        _append(fd, event)


def record(path: Path, event: TuningEvent) -> tuple[TuningEvent, bool]:
    """Append an event unless its id exists. Return the recorded event and whether it was written now.

    Raises OSError as `append` does, and Conflict if another event has this id."""
    with _locked(path) as fd:
        there = _by_id(path).get(event.id)
        if there is None:
            _append(fd, event)
            return event, True
    if (there.kind, there.what) != (event.kind, event.what):
        raise Conflict(f"{event.id} is already used by another event: {there.kind}, {there.what!r}; choose another id")
    return there, False


def close(path: Path, event_id: str, end_s: float) -> tuple[TuningEvent, bool]:
    """End an open region. Return the recorded event and whether it ended now; an ended one stays unchanged.

    Raises OSError as `append` does, UnknownEvent, Conflict for a point in time, and ValueError for an end before the
    start."""
    with _locked(path) as fd:
        there = _by_id(path).get(event_id)
        if there is None:
            raise UnknownEvent(f"no event with id {event_id[:64]!r}; `vllm-watch events` lists them")
        if there.open:
            ended = msgspec.structs.replace(there, end_s=end_s, open=False)
            _append(fd, ended)
            return ended, True
    if there.end_s is None:
        raise Conflict(f"{event_id} is a point in time, not an open region: there is nothing to close")
    return there, False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + LOCK_WITHIN_S
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{path} is locked by another process") from None
                time.sleep(0.02)
        yield fd
    finally:
        os.close(fd)


def _append(fd: int, event: TuningEvent) -> None:
    size = os.fstat(fd).st_size
    cut = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
    line = cut + _encoder.encode(event) + b"\n"
    try:
        while line:
            line = line[os.write(fd, line) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)  # after a reported failure neither part nor all of the line may remain
        raise


def read(path: Path) -> tuple[list[TuningEvent], int]:
    """Return all current events, in the order first written, and the number of invalid lines.

    A missing file has none. Raises OSError."""
    by_id, bad = {}, 0
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "the events file is not a regular file", str(path))
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    for line in lines:
        if line.strip():
            try:
                event = _decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
                bad += 1
                continue
            if b'"id"' not in line:  # written by hand; needs an id that is stable over reads
                event = msgspec.structs.replace(event, id=hashlib.sha256(line).hexdigest()[:12])
            by_id[event.id] = event
    return list(by_id.values()), bad


def _by_id(path: Path) -> dict[str, TuningEvent]:
    return {event.id: event for event in read(path)[0]}


def since(events: Iterable[TuningEvent], since_s: float) -> list[TuningEvent]:
    """Return events that happened, ended or were open at or after a time, newest last."""
    return sorted((event for event in events if event.open or event.latest_s >= since_s), key=lambda event: event.at_s)


def samples(events: list[TuningEvent]) -> Iterator[Sample]:
    """Yield the newest time and the count of each kind, and the newest act on each canary.

    A region counts once; its end is newer than its start."""
    for kind in sorted({event.kind for event in events}):
        times = [event.latest_s for event in events if event.kind == kind]
        yield sidecar.EVENT_TIME, {"kind": kind}, max(times)
        yield sidecar.EVENTS, {"kind": kind}, len(times)
    steps: dict[str, tuple[float, str]] = {}
    for event in events:
        said = dict(tag.split("=", 1) for tag in event.tags if "=" in tag)
        if "canary" in said and "step" in said:
            steps[said["canary"]] = max(steps.get(said["canary"], (0.0, "")), (event.at_s, said["step"]))
    for variant, (at_s, step) in steps.items():
        yield sidecar.CANARY_TIME, {"variant": variant, "step": step}, at_s
