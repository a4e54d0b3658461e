"""Rows of an answer as table, JSON or CSV."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exporters.text import printable
from stack.cli.common import json_text
from stack.terminal import output_width

AS_CSV = click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")


def no_formula(name: str) -> str:
    """Return a client-supplied name that no spreadsheet evaluates: it shows an apostrophe before it."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def show_rows(
    head: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str], as_json: bool, as_csv: bool
) -> None:
    """Print rows on standard output, and notes with them, or on standard error where the format has no place."""
    if as_json and as_csv:
        raise click.UsageError("choose --json or --csv")
    if as_json:
        named = [dict(zip(head, map(_plain, row), strict=True)) for row in rows]
        click.echo(json_text({"rows": named, "notes": list(notes)}))
        return
    if as_csv:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(head)
        writer.writerows([no_formula(v) if isinstance(v, str) else _plain(v) for v in row] for row in rows)
        click.echo(text.getvalue(), nl=False)
    else:
        numeric = [any(isinstance(row[at], int | float) for row in rows) for at in range(len(head))]
        table = Table()
        for name, right in zip(head, numeric, strict=True):
            table.add_column(escape(name), justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(escape(printable(_cell(value))) for value in row))
        Console(width=output_width(200), highlight=False).print(table)
    for note in notes:
        click.echo(f"note: {note}", err=as_csv)


def _plain(value: Any) -> Any:
    """Return a value that JSON and CSV have."""
    if isinstance(value, datetime.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if isinstance(value, float) else str(_plain(value))
