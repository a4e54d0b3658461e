"""`vllm-watch ship`: run, verify. The process that runs pays for every import, so what only another command needs is
imported by that one."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from exporters.dataset.catalog import NEEDS_EXTRA
from stack import config
from stack.cli.common import AS_JSON, UsageMistake, json_text, log_to_stderr, mistakes_as_errors
from stack.cli.options import PROMETHEUS_URL

if TYPE_CHECKING:
    from exporters.dataset.ship_config import ShipConfig

CONFIG = click.option(
    "--config",
    "path",
    required=True,
    type=click.Path(path_type=Path),
    help="Configuration file; see stack/deploy/ship.yaml.",
)


@click.group()
def ship() -> None:
    """Ship request logs into a data set of Parquet segments."""


@ship.command("run")
@CONFIG
@click.option("--once", is_flag=True, help="Ship what the logs hold now, and exit.")
def ship_run(path: Path, once: bool) -> None:
    """Follow request logs and ship them as Parquet segments.

    Each record is in one segment, also after a crash. Serves /metrics and /-/healthy.

    \b
    Example:  vllm-watch ship run --config ship.yaml
    """
    log_to_stderr()
    with mistakes_as_errors():
        settings = config.ship(path)
        _with_libraries()
        from exporters import process
        from exporters.dataset.ship import ship_once

        if once:
            click.echo(f"wrote {ship_once(settings)} requests to {settings.dataset}")
            return
        with process.runner(batches=True) as runner:
            runner.run(_serve(settings))


@ship.command("verify")
@CONFIG
@click.option("--day", metavar="DATE", help="Day in UTC, such as 2026-11-25.  [default: yesterday]")
@click.option(
    "--prometheus", "url", metavar="URL", help="Prometheus that scrapes the sidecar.  [default: that of the file]"
)
@AS_JSON
def ship_verify(path: Path, day: str | None, url: str | None, as_json: bool) -> None:
    """Compare a day's segments with sidecar and engine counters.

    Prints requests and tokens by model, and the known causes of differences. Exit 1 if a difference has none.

    \b
    Example:  vllm-watch ship verify --config ship.yaml --day 2026-11-24
    """
    with mistakes_as_errors():
        settings = config.ship(path)
        _with_libraries()
        from exporters.dataset.layout import UNDATED, is_day
        from exporters.ship_service import verify

        day = day or (datetime.now(UTC).date() - timedelta(days=1)).isoformat()
        if day == UNDATED or not is_day(day):
            raise ValueError(f"--day {day!r} is no day; write it like 2026-11-25")
        url = url or settings.prometheus or os.environ.get(PROMETHEUS_URL)
        if not url:
            raise ValueError("name a Prometheus with --prometheus URL, or with `prometheus` in the file")
        balances = asyncio.run(verify(msgspec.structs.replace(settings, prometheus=url), day))
    unexplained = any(one.unexplained for one in balances)
    if as_json:
        rows = [msgspec.to_builtins(one) | {"unexplained": one.unexplained} for one in balances]
        click.echo(json_text({"day": day, "balances": rows}))
    else:
        from stack.ship_report import as_text

        click.echo(as_text(day, balances))
    raise SystemExit(1 if unexplained else 0)


def _with_libraries() -> None:
    """Raise UsageMistake if the libraries of the data set are missing."""
    try:
        import exporters.dataset.parquet  # noqa: F401
    except ImportError as error:
        raise UsageMistake(f"this command needs the package {error.name}; {NEEDS_EXTRA}") from error


async def _serve(settings: ShipConfig) -> None:
    from exporters.ship_service import ShipService

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await ShipService(settings).run(stop)
