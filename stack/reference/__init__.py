"""Generated reference pages below docs/.

Invariant: nothing here is a fact of its own but the words by which a symptom is called; what a page says of a series, a
rule or a page stands there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stack.reference import alerts, metrics, modules, routes, runbooks, upgrades

FOLDER = Path("docs/reference")


def pages() -> Iterator[tuple[Path, str]]:
    """Path below the root and text of each page."""
    yield FOLDER / "metrics.md", metrics.page()
    yield FOLDER / "alerts.md", alerts.page()
    yield FOLDER / "runbooks.md", runbooks.page()
    yield FOLDER / "routes.md", routes.page()
    yield FOLDER / "upgrades.md", upgrades.page()
    yield FOLDER / "modules.md", modules.page()
