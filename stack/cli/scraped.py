"""Exposition given by the user: a URL or a file."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from exporters.engine.client import scrape_engine
from exporters.net.http_client import HttpClientConfig


def page_of(target: str, http_config: Path | None = None) -> tuple[str, str | None]:
    """The page and, from a live engine, its release. Raises ValueError, BadConfig and OSError."""
    if "://" in target:
        return asyncio.run(scrape_engine(target, http_config=HttpClientConfig(http_config) if http_config else None))
    if not Path(target).exists() and re.fullmatch(r"[\w.-]+:\d+(/.*)?", target):
        raise ValueError(f"there is no file {target}; for a server write http://{target}")
    return text_of(Path(target)), None


def text_of(path: Path) -> str:
    """A file's text. Raises ValueError where it is none, and OSError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text") from error
