"""Width of printed tables."""

from __future__ import annotations

import os
import sys


def output_width(piped: int) -> int | None:
    """Return the columns of a table on standard output: None, which rich reads as the terminal's width or COLUMNS, or
    `piped` where output goes to a file or a pipe and COLUMNS is not set."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else piped
