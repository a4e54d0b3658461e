"""`vllm-watch cost`: usage and cost by team and model."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exporters.accounting import cost
from exporters.accounting.prices import Prices
from exporters.net.prometheus import address_from
from exporters.text import printable
from stack import config
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.options import HTTP_CONFIG, PROMETHEUS_URL, TOKEN_FILE, USER_FILE, duration
from stack.terminal import output_width


@click.command("cost")
@click.option(
    "--prometheus", "url", metavar="URL", help=f"Prometheus that scrapes the sidecar.  [default: {PROMETHEUS_URL}]"
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Request log to read instead; repeatable.",
)
@click.option(
    "--since", "since_s", metavar="TIME", callback=duration, help="Time range.  [default: 24h; with --log all lines]"
)
@click.option(
    "--prices",
    "prices_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="prices.yaml; see docs/guides/cost.md.",
)
@click.option("--gpus", multiple=True, metavar="N|MODEL=N", help="With --log: number of GPUs of a model.  [default: 1]")
@click.option(
    "--by",
    type=click.Choice(["team", "model", "team,model"]),
    default="team,model",
    show_default=True,
    help="Labels of a row.",
)
@TOKEN_FILE
@USER_FILE
@HTTP_CONFIG
@AS_JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print rows and total as CSV.")
def cost_command(
    url: str | None,
    logs: tuple[Path, ...],
    since_s: float | None,
    prices_path: Path | None,
    gpus: tuple[str, ...],
    by: str,
    token_file: Path | None,
    user_file: Path | None,
    http_config: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Report GPU hours, energy, tokens and cost per team.

    Idle, aborted and unattributed time have rows of their own; the total is the sum of all rows.

    The share of each team in a shared GPU is an estimate; the sum over teams is exact.

    \b
    Example:  vllm-watch cost --prometheus http://127.0.0.1:9090 --since 24h
    """
    if not logs:
        url = url or os.environ.get(PROMETHEUS_URL)
    if bool(url) == bool(logs):
        raise click.UsageError("name either --prometheus URL or --log FILE")
    if gpus and not logs:
        raise click.UsageError("--gpus belongs to --log; Prometheus knows the GPUs")
    if as_json and as_csv:
        raise click.UsageError("choose --json or --csv")
    with mistakes_as_errors():
        prices = config.load(prices_path, Prices) if prices_path else None
        computed = cost.compute_report(
            address_from(url, token_file, user_file, http_config) if url else None,
            logs,
            since_s,
            time.time(),
            prices,
            gpus,
            by,
        )
    if as_json or as_csv:
        click.echo(json_text(computed) if as_json else csv_text(computed), nl=as_json)
        return
    head, rows = sheet(computed)
    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number < len(cost.BY[by]) else "right")
    for number, row in enumerate(rows):
        table.add_row(*map(escape, row), end_section=number == len(rows) - 2)
    Console(width=output_width(200)).print(table)
    for note in computed["notes"]:
        click.echo(f"note: {note}")


def csv_text(result: Mapping[str, Any]) -> str:
    """Return the rows and their total as CSV, with all digits."""
    text = io.StringIO()
    names = result["by"].split(",")
    writer = csv.DictWriter(text, [*names, "currency", *result["total"]], lineterminator="\n")
    writer.writeheader()
    for row in result["rows"]:
        writer.writerow({"currency": result["currency"], **row, **{name: _no_formula(row[name]) for name in names}})
    writer.writerow({"currency": result["currency"], **dict.fromkeys(names, ""), names[0]: "total", **result["total"]})
    return text.getvalue()


def _no_formula(name: str) -> str:
    """Return a client-supplied name that no spreadsheet evaluates: it shows an apostrophe before it."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def sheet(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return table head and rows, total last; columns without data and estimates of 0 are omitted."""
    money = result["currency"] or ""
    columns = {
        "gpu_hours": ("GPU hours", 4, 1.0), "aborted_gpu_hours": ("of which aborted", 4, 1.0),
        "share": ("share %", 1, 100.0), "cost_allocation": (f"{money} allocated", 4, 1.0),
        "cost_usage": (f"{money} busy", 4, 1.0), "allocation_per_1k_tokens": (f"{money} per 1K tokens", 6, 1.0),
        "joules": ("kWh", 4, 1 / cost.JOULES_PER_KWH),
        "prompt_tokens": ("prompt", 0, 1.0), "cached_tokens": ("cached", 0, 1.0),
        "completion_tokens": ("completion", 0, 1.0),
        "est_prompt_tokens": ("est. prompt", 0, 1.0), "est_completion_tokens": ("est. completion", 0, 1.0),
        "api_cost": (f"{money} at API prices", 4, 1.0),
    }  # fmt: skip
    shown = {
        name: column for name, column in columns.items()
        if result["total"][name] is not None and not (name.startswith("est_") and result["total"][name] == 0)
    }  # fmt: skip
    names = result["by"].split(",")
    rows = [*result["rows"], {names[0]: "total", **result["total"]}]
    cells = [
        [
            *(printable(row.get(name, "")) for name in names),
            *(_cell(row[name], digits, times) for name, (_, digits, times) in shown.items()),
        ]
        for row in rows
    ]
    return [*names, *(head for head, _, _ in shown.values())], cells


def _cell(value: float | None, digits: int, times: float) -> str:
    return "" if value is None else f"{value * times:,.{digits}f}"
