"""Files for somebody else's program. Law: what did not come from here, or was changed since, is overwritten only by
force, and half an export is never written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Foreign = Callable[[Path], str]  # why a file is not ours; empty when it is


class NotOurs(ValueError):
    """A file in the way that is not ours to overwrite."""


def write(folder: Path, files: Mapping[str, str], foreign: Foreign, force: bool = False) -> dict[Path, bool]:
    """Write files by name, which may have folders in it; whether each one changed. Raises NotOurs before anything is
    written, and OSError."""
    strange = {name: why for name in files if (folder / name).exists() and (why := foreign(folder / name))}
    if strange and not force:
        name, why = next(iter(strange.items()))
        more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
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
    """Files of an earlier export that this one does not hold."""
    printed = set(files)
    return sorted(path for path in folder.glob(pattern) if path.name not in printed and not foreign(path))


# ---- files with comments: the first line says where they come from, and whether they are as they were


def marked(text: str, command: str) -> str:
    """The text below a line that a later export recognises."""
    return f"# Printed by {command} (unchanged: {_digest(text)}).\n{text}"


def unmarked(text: str) -> str:
    """The text without such a line."""
    return re.sub(r"\A# Printed by vllm-watch [^\n]*\(unchanged: \w+\)\.\n", "", text)


def changed_since(path: Path) -> str:
    """Why a file with a mark is not ours (any more); empty when it is."""
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
