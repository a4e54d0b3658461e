"""Folder that holds the packages (the checkout, or site-packages of an installation), and the release of what is in
it."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version() -> str:
    """Return this release; 'unknown' where the code runs without having been installed."""
    try:
        return importlib.metadata.version("vllm-watch")
    except importlib.metadata.PackageNotFoundError:
        found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        return found[1] if found else "unknown"
