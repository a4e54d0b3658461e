"""Export of files into folders of other programs.

Invariant: a file that we did not write, or that was changed since, is overwritten only with force; an export is
written completely or not at all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Foreign = Callable[[Path], str]  # returns why a file is not ours; empty if it is


class NotOurs(ValueError):
    """An existing file is not ours to overwrite."""


def write(folder: Path, files: Mapping[str, str], foreign: Foreign, force: bool = False) -> dict[Path, bool]:
    """Write files by relative path, and return for each whether it changed. Raises NotOurs before anything is written,
    and OSError."""
    foreign_files = {name: why for name in files if (folder / name).exists() and (why := foreign(folder / name))}
    if foreign_files and not force:
        name, why = next(iter(foreign_files.items()))
        more = f" (and {len(foreign_files) - 1} more)" if len(foreign_files) > 1 else ""
        raise NotOurs(f"{folder / name}{more} {why}; choose another --out, or overwrite with --force")
    changed = {}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        changed[path] = not path.exists() or path.read_bytes() != text.encode()
        if changed[path]:
            path.write_text(text, encoding="utf-8", newline="\n")
    return changed


def left_over(folder: Path, files: Iterable[str], foreign: Foreign, pattern: str) -> list[Path]:
    """Return the files of an earlier export that this one does not contain."""
    printed = set(files)
    return sorted(path for path in folder.glob(pattern) if path.name not in printed and not foreign(path))


# ---- files with comments: the first line names their origin and a digest of the rest


def marked(text: str, command: str) -> str:
    """Return the text below a line that a later export recognises."""
    return f"# Printed by {command} (unchanged: {_digest(text)}).\n{text}"


def unmarked(text: str) -> str:
    """Return the text without that line."""
    return re.sub(r"\A# Printed by vllm-watch [^\n]*\(unchanged: \w+\)\.\n", "", text)


def changed_since(path: Path) -> str:
    """Return why a marked file is not ours, or no longer; empty if it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except (ValueError, OSError):
        return "cannot be read as text"
    plain = unmarked(text)
    if plain == text:
        return "did not come from here"
    return "" if f"(unchanged: {_digest(plain)})" in text.split("\n", 1)[0] else "was changed after it was printed"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
