"""State of a canary's controller, in a file that is replaced as a whole before and after each act.

Invariant: an act is written here before it is done (`pending`), and every part of it may be done again: the share is
compared before it is written, an event has the id of its act. So a controller that was killed at any point finishes
the act it had begun, and begins no other twice. One process at a time has the state, by a lock beside the file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from exporters.engine.view import CoreCache
from exporters.requests.positions import Position
from exporters.text import write_atomically
from stack.canary.evidence import CanaryEvidence
from stack.config import BadConfig
from stack.gateway.policy import Canary


class CanaryStep(msgspec.Struct, frozen=True):
    """One act. number: in its run. action: as decided, or `interrupted`. was, share: 0 to 1, before and after it.
    acted: the controller changes the share, and does not only advise to."""

    number: int
    at_s: float
    action: str
    was: float
    share: float
    why: str
    acted: bool = False


class EngineVersion(msgspec.Struct, frozen=True):
    """Version and cache configuration of an engine when it was last watched."""

    version: str | None = None
    caches: tuple[CoreCache, ...] = ()


class CanaryState(msgspec.Struct):
    """One run of a canary. teams: path of the file. policy, mark: of it, at the start. since_s: when the share was last
    changed.

    pending: an act that may be done in part. done: the action that ended the run. advised: the latest advice, which is
    given once. positions: in the request logs, where evidence ends. recorded: number of steps whose event is recorded.
    closed: the report of a run that is over is written. engines: by address, of --watch."""

    teams: str
    variant: str
    run: str
    started_s: float
    since_s: float
    share: float
    policy: Canary
    mark: str
    pending: CanaryStep | None = None
    done: str | None = None
    advised: str = ""
    steps: list[CanaryStep] = []
    recorded: int = 0
    closed: bool = False
    positions: dict[str, tuple[Position, ...]] = {}
    evidence: CanaryEvidence = msgspec.field(default_factory=CanaryEvidence)
    engines: dict[str, EngineVersion] = {}


def read_state(path: Path, teams: Path, variant: str) -> CanaryState | None:
    """Return the state of this canary; None without a file. Raises BadConfig for an unreadable file, and for one of
    another canary."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=CanaryState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no state of a canary"
        raise BadConfig(f"{path} cannot be read: {why}; name another file with --state") from error
    if (state.teams, state.variant) != (str(teams), variant):
        raise BadConfig(
            f"{path} belongs to the canary {state.variant!r} of {state.teams}; name another file with --state"
        )
    return state


@contextlib.contextmanager
def held_state(path: Path) -> Iterator[None]:
    """Hold the lock of the state. Raises BadConfig if another process has it, or the folder cannot be written."""
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadConfig(f"{path} cannot be written: {error.strerror}; name another file with --state") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BadConfig(
            f"{path} is in use by another `vllm-watch canary`; stop that, or name another file with --state"
        ) from None
    finally:
        os.close(lock)


def write_state(path: Path, state: CanaryState) -> None:
    """Replace the file. Raises OSError."""
    write_atomically(path, msgspec.json.encode(state), sync=True)
