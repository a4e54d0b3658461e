"""docs/reference/modules.md: every module by package, with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from stack.reference.markdown import PRINTED, table
from stack.root import ROOT

PACKAGES = ("exporters", "alerts", "dashboards", "runbooks", "stack", "vllm_watch", "tools")


def page() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    source = "the first sentence of each module's docstring"
    yield from ("# Modules", "", PRINTED.format(source=source), "")
    yield from (
        "To find the place of a change, search this page for its subject.",
        "How packages depend on each other: [CONTRIBUTING](../../CONTRIBUTING.md#packages).",
        "How to add something: [extending](../internals/extending.md).",
        "",
    )
    modules = sorted((path for package in PACKAGES for path in (ROOT / package).rglob("*.py")), key=_order)
    for folder, files in groupby(modules, key=lambda path: path.parent):
        yield from (f"## {folder.relative_to(ROOT).as_posix()}/", "")
        rows = ((f"`{file.name}`", text) for file in files if (text := _purpose(file)))
        yield from table(("module", "contents"), rows)
    yield from ("Test status: [modules (reference)](../internals/test-status.md#modules-reference).", "")


def _order(path: Path) -> tuple[int, Path, bool, str]:
    """Return the sort key: packages from low to high, a package's `__init__` first."""
    return PACKAGES.index(path.relative_to(ROOT).parts[0]), path.parent, path.name != "__init__.py", path.name


def _purpose(path: Path) -> str:
    """Return the first sentence of the docstring; '' where there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(re.split(r"(?<=[^.][.?!])\s|\n\n", docstring, maxsplit=1)[0].split())
