"""Cache of parts, and the mark of a complete part.

Invariant: a part is there when its stamp is there, and the stamp is written last. What has no stamp was interrupted and
is made again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from exporters.text import write_atomically

GIB = 2**30


@dataclass(frozen=True)
class InstalledPart:
    """One program or folder the lab runs on. Origin says in words where it came from."""

    name: str
    path: Path
    version: str
    origin: str


class PartMissing(Exception):
    """A part could not be had: what, why, and what to do.

    As `ensure` raises it, `missing` holds one sentence per part. `reason` is what several parts may have in common."""

    def __init__(self, sentence: str, missing: Mapping[str, str] | None = None, reason: str = "") -> None:
        super().__init__(sentence)
        self.missing = dict(missing or {})
        self.reason = reason or sentence


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds every installed part, outside any checkout."""
    if chosen := env.get("VLLM_WATCH_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(env.get("HOME") or Path.home()) / ".cache").absolute() / "vllm-watch"


def stamp(cache: Path, part: InstalledPart, recipe: str) -> InstalledPart:
    """Declares a part finished. `recipe` is whatever, when changed, makes the part out of date."""
    (cache / "stamps").mkdir(parents=True, exist_ok=True)
    write_atomically(
        cache / "stamps" / f"{part.name}.json", json.dumps({**asdict(part), "path": str(part.path), "recipe": recipe})
    )
    return part


def stamped(cache: Path, name: str, recipe: str) -> InstalledPart | None:
    """The finished part of that recipe, or None."""
    try:
        known = json.loads((cache / "stamps" / f"{name}.json").read_text())
        part = InstalledPart(known["name"], Path(known["path"]), known["version"], known["origin"])
    except (OSError, ValueError, KeyError):
        return None
    return part if known.get("recipe") == recipe and part.path.exists() else None


@contextmanager
def locked(cache: Path, name: str, idle: Callable[[], None], poll_s: float = 0.2) -> Iterator[int]:
    """Holds a lock that other processes respect; yields its file descriptor. `idle` is called while another has it,
    every `poll_s`.

    Hand the descriptor to child processes: the lock then lasts as long as any of them, even when we are killed."""
    path = cache / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _try_lock(handle):
            idle()
            time.sleep(poll_s)
        yield handle
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def require_space(cache: Path, need_bytes: float, what: str = "it") -> None:
    """Refuses before the disk is full, not after. Raises PartMissing."""
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if free < need_bytes:
        raise PartMissing(
            f"{what} needs {need_bytes / GIB:.0f} GB of disk and {cache} has {free / GIB:.1f} GB free; "
            "free some, or set VLLM_WATCH_CACHE to a folder on a larger disk."
        )


def version_in(text: str) -> str:
    """The first thing that looks like a release, such as 3.5.3; empty when there is none."""
    found = re.search(r"\d+\.\d+(\.\d+)*", text)
    return found.group() if found else ""


def release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version_in(version).split(".") if number)


def ask_version(program: Path, arguments: tuple[str, ...]) -> str:
    """Return the version output of a program, or an empty string when it does not start."""
    return version_in(_said(program, arguments) or "")


def starts(program: Path, arguments: tuple[str, ...]) -> bool:
    """Return whether the program starts here, whatever it says."""
    return _said(program, arguments) is not None


def _said(program: Path, arguments: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def remembered_version(cache: Path, program: Path, arguments: tuple[str, ...]) -> str:
    """`ask_version`, asked once per file: a change of size or time asks again."""
    memory = cache / "versions.json"
    state = program.stat()
    key = f"{program} {state.st_mtime_ns} {state.st_size}"
    try:
        known: dict[str, str] = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        version = ask_version(program, arguments)
        if not version:  # it did not start this time; what it lacked may be there next time
            return ""
        known[key] = version
        with suppress(OSError):  # a cache we may not write to costs time, not correctness
            cache.mkdir(parents=True, exist_ok=True)
            write_atomically(memory, json.dumps(known))
    return known[key]
