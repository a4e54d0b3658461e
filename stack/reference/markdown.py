"""Markdown as GitHub shows it: tables, links, and anchors of headings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from exporters.text import markdown_table
from runbooks.page_check import slug

PRINTED = "Printed by `vllm-watch render`; the source is {source}."


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a table, with an empty line behind it."""
    yield from (*markdown_table(head, rows), "")


def to(heading: str, page: str = "", shown: str = "") -> str:
    """A link to a heading, of this page where no other one is named."""
    return f"[{shown or heading}]({page}#{slug(heading)})"


def listed(items: Iterable[str]) -> Iterator[str]:
    """A list, with an empty line behind it; nothing where there are no items."""
    lines = [f"- {item}" for item in items]
    yield from (*lines, "") if lines else ()


def code(language: str, text: str, most_lines: int) -> Iterator[str]:
    """A block of code; one of more lines is folded away, and says how many it has."""
    lines = text.splitlines()
    folded = len(lines) > most_lines
    yield from (f"<details><summary>{len(lines)} lines</summary>", "") if folded else ()
    yield from (f"```{language}", *lines, "```", "")
    yield from ("</details>", "") if folded else ()
