"""`vllm-watch cost`: usage and cost by team and model, and the bill of a month."""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exporters.accounting import cost
from exporters.accounting.bill import BillRequest, make_bill
from exporters.accounting.focus import FocusRow, focus_rows
from exporters.accounting.prices import Prices
from exporters.net.prometheus import address_from
from exporters.text import printable
from stack import config
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.options import DATA, HTTP_CONFIG, PROMETHEUS_URL, TOKEN_FILE, USER_FILE, duration
from stack.cli.rows import no_formula
from stack.request_source import data_cost
from stack.terminal import output_width

_PLACE = ("period_start", "period_end", "cluster", "price_version")
_COLUMNS = {"price": "price_version"}  # of names of --by that are named otherwise
_HEADS = {"period_start": "from", "period_end": "to", "price_version": "prices"}
_MOST_DIGITS = 9


def _parse_by(text: str) -> str:
    with mistakes_as_errors():
        return cost.parse_by(text)


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
@DATA
@click.option("--month", metavar="YYYY-MM", help="Calendar month to bill, such as 2026-10.")
@click.option("--from", "from_text", metavar="DATE", help="First day (or time) of the period.")
@click.option("--to", "to_text", metavar="DATE", help="Day (or time) after the period's end.  [default: now]")
@click.option(
    "--since", "since_s", metavar="TIME", callback=duration, help="Time range.  [default: 24h; with --log all lines]"
)
@click.option("--timezone", metavar="NAME", help="Time zone of days and months.  [default: that of the prices, or UTC]")
@click.option(
    "--prices",
    "prices_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="prices.yaml; see docs/guides/cost.md.",
)
@click.option("--gpus", multiple=True, metavar="N|MODEL=N", help="With --log: number of GPUs of a model.  [default: 1]")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --log: the sidecar's YAML, for its field_names.",
)
@click.option("--spread", metavar="ROWS", help="Rows whose cost the teams carry: idle,aborted,unattributed.")
@click.option("--cluster", default="", metavar="NAME", help="Cluster of series without such a label, and of logs.")
@click.option(
    "--by",
    metavar="NAMES",
    type=_parse_by,
    default=cost.DEFAULT_BY,
    show_default=True,
    help="Any of team,model,cluster,price; a row sums the others.",
)
@click.option("--daily", is_flag=True, help="Print rows for each day of the period.")
@click.option(
    "--bills", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Folder of closed months."
)
@click.option("--close", is_flag=True, help="Keep this month in the folder of closed months.")
@click.option("--allow-bad-lines", is_flag=True, help="With --close: close in spite of bad lines.")
@click.option("--focus", is_flag=True, help="Name columns of --csv or --json as FOCUS does.")
@click.option("--issuer", default="vllm-watch", show_default=True, metavar="NAME", help="Issuer in FOCUS rows.")
@TOKEN_FILE
@USER_FILE
@HTTP_CONFIG
@AS_JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print rows and total as CSV.")
@click.option("--no-total", is_flag=True, help="Print no total row in the table and the CSV.")
def cost_command(
    url: str | None,
    logs: tuple[Path, ...],
    data: str | None,
    prices_path: Path | None,
    config_path: Path | None,
    by: str,
    daily: bool,
    focus: bool,
    issuer: str,
    token_file: Path | None,
    user_file: Path | None,
    http_config: Path | None,
    as_json: bool,
    as_csv: bool,
    no_total: bool,
    **asked: Any,
) -> None:
    """Report GPU hours, energy, tokens and cost per team.

    Idle, aborted and unattributed time have rows of their own; the total is the sum of all rows.

    The share of each team in a shared GPU is an estimate; the sum over teams is exact.

    For chargeback and showback: --month bills a calendar month, --close keeps it, --focus is for FinOps tools.

    \b
    Example:  vllm-watch cost --prometheus http://127.0.0.1:9090 --since 24h
    """
    if not logs and not data:
        url = url or os.environ.get(PROMETHEUS_URL)
    if config_path and not logs:
        raise click.UsageError("--config names the fields of --log; the sidecar has its own")
    _refuse_contradictions(url, logs, data, focus, as_json, as_csv, asked)
    with mistakes_as_errors():
        request = BillRequest(
            prometheus=address_from(url, token_file, user_file, http_config) if url else None,
            logs=logs,
            prices=config.load(prices_path, Prices) if prices_path else None,
            fields=config.sidecar(config_path).fields if config_path else None,
            **asked,
        )
        if data:
            period = request.period(time.time()) if request.has_period else None
            since_s, until_s = (period.from_s, period.to_s) if period else (None, None)
            request = replace(request, data=data_cost(data, since_s, until_s))
        found = make_bill(request, time.time())
        rows = focus_rows(found, issuer) if focus else []
    if as_csv:  # CSV has no place for notes
        for note in found.notes:
            click.echo(f"note: {note}", err=True)
    if focus:
        click.echo(json_text(rows) if as_json else focus_csv(rows), nl=as_json)
        return
    computed = cost.report(found, by, daily)
    if as_json or as_csv:
        click.echo(json_text(computed) if as_json else csv_text(computed, not no_total), nl=as_json)
        return
    _print_table(computed, not no_total)


def _refuse_contradictions(
    url: str | None,
    logs: Sequence[Path],
    data: str | None,
    focus: bool,
    as_json: bool,
    as_csv: bool,
    asked: Mapping[str, Any],
) -> None:
    sources = sum(map(bool, (url, logs, data)))
    if sources > 1 or (not sources and not (asked["bills"] and asked["month"])):
        raise click.UsageError("name either --prometheus URL, --log FILE or --data LOCATION")
    if asked["gpus"] and url:
        raise click.UsageError("--gpus belongs to --log; Prometheus knows the GPUs")
    if as_json and as_csv:
        raise click.UsageError("choose --json or --csv")
    if focus and not (as_json or as_csv):
        raise click.UsageError("--focus names columns of --csv or --json; choose one")


def _print_table(computed: Mapping[str, Any], total: bool) -> None:
    head, rows = sheet(computed, total)
    labels = len(_labels(computed))
    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number < labels else "right")
    for number, row in enumerate(rows):
        table.add_row(*map(escape, row), end_section=total and number == len(rows) - 2)
    Console(width=output_width(200)).print(table)
    for note in computed["notes"]:
        click.echo(f"note: {note}")
    click.echo(
        f"period: {computed['period_start']} to {computed['period_end']} ({computed['timezone']}), cluster:"
        f" {_listed(row['cluster'] for row in computed['rows'])}, prices:"
        f" {_listed(row['price_version'] for row in computed['rows'])}"
    )


def _listed(names: Iterable[str | None]) -> str:
    each = (name for joined in names for name in (joined or "").split(","))
    return ", ".join(dict.fromkeys(printable(name) for name in each if name)) or "none"


def csv_text(result: Mapping[str, Any], total: bool = True) -> str:
    """Return the rows, and their total, as CSV with all digits."""
    text = io.StringIO()
    names = _by(result)
    columns = dict.fromkeys([*(name for name in names if name not in _PLACE), *_PLACE, "currency", *result["total"]])
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in result["rows"]:
        plain = {name: no_formula(row[name] or "") for name in (*names, "cluster", "price_version")}
        writer.writerow({"currency": result["currency"], **row, **plain})
    if total:
        shared = {name: result[name] for name in ("period_start", "period_end", "currency")}
        writer.writerow({**shared, names[0]: "total", **result["total"]})
    return text.getvalue()


def focus_csv(rows: Sequence[FocusRow]) -> str:
    """Return FOCUS rows as CSV; null is an empty field. There is no total: it would be counted twice."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: no_formula(value) if isinstance(value, str) else value for name, value in row.items()})
    return text.getvalue()


def _by(result: Mapping[str, Any]) -> list[str]:
    """Return the columns that --by names."""
    return [_COLUMNS.get(name, name) for name in result["by"].split(",")]


def _labels(result: Mapping[str, Any]) -> list[str]:
    """Return the labels of the table: team and model of --by, and of the others those that differ between rows."""
    differ = [name for name in _PLACE if len({row[name] for row in result["rows"]}) > 1]
    return [*(name for name in _by(result) if name not in _PLACE), *differ] or _by(result)


def sheet(result: Mapping[str, Any], total: bool = True) -> tuple[list[str], list[list[str]]]:
    """Return table head and rows, total last if wanted; columns without data, and estimates and unreadable
    answers of 0, are omitted."""
    money = result["currency"] or ""
    columns = {
        "gpu_hours": ("GPU hours", 4, 1.0), "aborted_gpu_hours": ("of which aborted", 4, 1.0),
        "share": ("share %", 1, 100.0), "cost_allocation": (f"{money} allocated", 4, 1.0),
        "cost_usage": (f"{money} busy", 4, 1.0), "allocation_per_1k_tokens": (f"{money} per 1K tokens", 6, 1.0),
        "joules": ("kWh", 4, 1 / cost.JOULES_PER_KWH),
        "prompt_tokens": ("prompt", 0, 1.0), "cached_tokens": ("cached", 0, 1.0),
        "completion_tokens": ("completion", 0, 1.0),
        "est_prompt_tokens": ("est. prompt", 0, 1.0), "est_completion_tokens": ("est. completion", 0, 1.0),
        "unreadable_requests": ("unreadable", 0, 1.0),
        "api_cost": (f"{money} at API prices", 4, 1.0),
    }  # fmt: skip
    shown = {
        name: column for name, column in columns.items()
        if result["total"][name] is not None
        and not (name.startswith(("est_", "unreadable_")) and result["total"][name] == 0)
    }  # fmt: skip
    names = _labels(result)
    rows = [*map(_with_short_times, result["rows"]), *([{names[0]: "total", **result["total"]}] if total else ())]
    digits = {
        name: _digits((row[name] for row in rows), least, times) if least > 1 else least
        for name, (_, least, times) in shown.items()
    }
    cells = [
        [
            *(printable(row.get(name) or "") for name in names),
            *(_cell(row[name], digits[name], times) for name, (_, _, times) in shown.items()),
        ]
        for row in rows
    ]
    return [*(_HEADS.get(name, name) for name in names), *(head for head, _, _ in shown.values())], cells


def _with_short_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its period to the minute, or the day."""
    period = {name: row[name][:16].replace("T", " ").removesuffix(" 00:00") for name in ("period_start", "period_end")}
    return {**row, **period}


def _digits(values: Iterable[float | None], least: int, times: float) -> int:
    """Return the decimals at which the smallest value still has two digits, so that a small team is not 0."""
    sizes = [abs(value * times) for value in values if value]
    return min(_MOST_DIGITS, max(least, 1 - math.floor(math.log10(min(sizes))))) if sizes else least


def _cell(value: float | None, digits: int, times: float) -> str:
    return "" if value is None else f"{value * times:,.{digits}f}"
