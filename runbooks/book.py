"""Finds and checks the pages. They travel in the package, so they can be read when nothing else answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HEADINGS = ("Meaning", "Impact", "First five minutes", "Diagnosis", "Mitigation", "Why this threshold", "Escalation")


def names(folder: Path = FOLDER) -> list[str]:
    """The alerts that have a page."""
    return sorted(page.stem for page in folder.glob("VLLM*.md"))


def text(name: str, folder: Path = FOLDER) -> str | None:
    """The page of an alert as Markdown; None when there is none. Any other name than that of a page finds nothing."""
    return (folder / f"{name}.md").read_text(encoding="utf-8") if name in names(folder) else None


def faults(alerts: Iterable[str], folder: Path = FOLDER) -> Iterator[str]:
    """What keeps the pages and the alerts from matching one to one, and each page from being whole."""
    pages, wanted = set(names(folder)), set(alerts)
    yield from (f"{name} has no page" for name in sorted(wanted - pages))
    yield from (f"{name}.md belongs to no alert" for name in sorted(pages - wanted))
    for name in sorted(pages & wanted):
        page = text(name, folder) or ""
        if not page.startswith(f"# {name}\n"):
            yield f"{name}.md does not open with its name"
        found = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
        if tuple(found) != HEADINGS:
            yield f"{name}.md has the headings {', '.join(found)} instead of {', '.join(HEADINGS)}"
