"""Jinja2 environments for HTML and Markdown. The only module that imports Jinja2 and MarkupSafe.

Invariant: every value is escaped for the format it goes into, unless it is Markup already."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["Markup", "html", "markdown", "markdown_text"]

ZERO_WIDTH_AT = "@\u200b"  # a name in a table notifies nobody
_SPECIAL = re.compile(r"([\\`*_\[\]<>~#$!&@])")


@cache
def html(package: str) -> Environment:
    """Return the environment for the HTML templates of a package."""
    return _environment(package)


@cache
def markdown(package: str) -> Environment:
    """Return the environment for the Markdown templates of a package."""
    environment = _environment(package, finalize=lambda value: _as_markup(value, markdown_text))
    environment.filters["cell"] = lambda text: Markup(markdown_text(text).replace("|", "\\|"))  # noqa: S704  escaped
    environment.filters["in_html"] = lambda text: Markup(_html_line(text))  # noqa: S704  escaped
    environment.filters["fenced"] = _fenced
    return environment


def _environment(package: str, finalize: Callable[[Any], Any] | None = None) -> Environment:
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _as_markup(value: Any, escaped: Callable[[str], str]) -> Markup:
    return value if isinstance(value, Markup) else Markup(escaped(str(value)))  # noqa: S704  escaped for the format


def markdown_text(text: str) -> str:
    """Escape text for Markdown: one line, in which no character has a meaning. A bar has one in tables only, which
    escape it."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("\\@", ZERO_WIDTH_AT)


def _html_line(text: str) -> str:
    """Escape text for HTML inside Markdown, where Markdown's own escapes mean nothing."""
    return escape(" ".join(text.split())).replace("@", ZERO_WIDTH_AT)


def _fenced(text: str, language: str) -> Markup:
    """Return a block of code whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return Markup(f"{fence}{language}\n{text}\n{fence}\n")  # noqa: S704  the fence contains it
