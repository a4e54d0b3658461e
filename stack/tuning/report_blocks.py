"""Blocks of a report: tables, text, lists, code and charts. Every format is made from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Cell:
    """mark: how it is shown: a verdict, pass, fail, differs, or nothing."""

    text: str
    mark: str = ""


Row = tuple[Cell | str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """caption: a sentence above it. folded: what it is called where it is closed at first."""

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    kind: ClassVar[str] = "text"
    folded: ClassVar[str] = ""
    text: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    kind: ClassVar[str] = "listed"
    folded: ClassVar[str] = ""
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    kind: ClassVar[str] = "code"
    text: str
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Placeholder for charts of the page: `curves`, `groups` or `time`."""

    kind: ClassVar[str] = "pictures"
    folded: ClassVar[str] = ""
    what: str


Block = Table | Text | Listed | Code | Pictures


@dataclass(frozen=True, slots=True)
class ReportSection:
    """shown: open in Markdown also."""

    title: str
    blocks: tuple[Block, ...]
    shown: bool = False
