"""Text functions for all packages: durations, sizes, Markdown tables, untrusted text on a terminal, atomic writes.

Invariant: this module imports nothing of ours, so that every package may use it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_UNIT_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_WHOLE_UNITS = ("w", "d", "h", "m", "s")  # a year is 52 weeks and a day
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdwy])")
_PARTS = re.compile(rf"(?:{_PART.pattern})+")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration as Prometheus and Grafana write it: 15s, 1m30s, 500ms, 1.5h.

    A bare number is seconds. Raises ValueError."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _PARTS.fullmatch(text):
        raise ValueError(f"{text!r} is no duration; write it like 15s, 5m or 1m30s")
    return sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(text))


def parse_window(text: str) -> int:
    """Return the seconds of a PromQL range such as 5m. Raises ValueError, also for a bare number and for parts of a
    second."""
    seconds = parse_duration(text)
    if _NUMBER.fullmatch(text) or seconds % 1:
        raise ValueError(f"{text!r} is no duration such as 5m")
    return int(seconds)


def format_duration(seconds: int) -> str:
    """Return a duration in the largest unit that leaves no rest: 300 is 5m."""
    if not seconds:
        return "0s"
    unit = next(unit for unit in _WHOLE_UNITS if seconds % _UNIT_S[unit] == 0)
    return f"{seconds // int(_UNIT_S[unit])}{unit}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table as GitHub shows it; a bar in a cell does not end the cell."""
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def printable(text: str) -> str:
    """Return foreign text as one line without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else escaped_letter(letter) for letter in text)


def escaped_letter(letter: str) -> str:
    """Return a character as Go, and so PromQL, writes it in a string."""
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"


def write_atomically(
    path: Path,
    content: str | bytes,
    mode: int | None = None,
    once: bool = False,
    sync: bool = False,
    owner: tuple[int, int] | None = None,
) -> None:
    """Replace a file as a whole, so that readers see the old content or the new and a full disk leaves nothing behind.

    mode: of the file, whatever the umask; never more than 0600 before it is complete. owner: user and group of the
    file. once: the file is synced to disk and never replaces another. sync: file and folder are synced to disk. Raises
    OSError; FileExistsError with `once`."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, 0o666 if mode is None else 0o600), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), *owner)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if once or sync:
                file.flush()
                os.fsync(file.fileno())
        if once:
            os.link(partial, path)
            partial.unlink()
        else:
            partial.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
