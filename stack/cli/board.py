"""`vllm-watch board`: serve dashboards and runbooks without Grafana."""

from __future__ import annotations

from pathlib import Path

import click

from exporters import process
from exporters.net.prometheus import address_from
from stack.board import run
from stack.cli.common import log_to_stderr, mistakes_as_errors
from stack.cli.options import (
    HTTP_CONFIG,
    PROMETHEUS_URL,
    TEAM,
    THRESHOLDS,
    TOKEN_FILE,
    USER_FILE,
    duration,
    settings_of,
)
from stack.cli.struct_options import options_of
from stack.request_source import RequestSourceOptions


@click.command("board")
@click.option(
    "--prometheus",
    "url",
    default="http://127.0.0.1:9090",
    show_default=True,
    metavar="URL",
    envvar=PROMETHEUS_URL,
    show_envvar=True,
    help="URL of Prometheus, with its path if it has one.",
)
@TOKEN_FILE
@USER_FILE
@HTTP_CONFIG
@click.option(
    "--listen", default="127.0.0.1:9402", show_default=True, metavar="HOST:PORT", help="Address to listen on."
)
@click.option(
    "--web-config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TLS and auth of this server (Prometheus web.yml format).",
)
@click.option(
    "--allow-host", "allowed", multiple=True, metavar="NAME", help="Host name that browsers may use, besides loopback."
)
@click.option(
    "--scrape-interval",
    "scrape_s",
    metavar="TIME",
    callback=duration,
    help="Scrape interval.  [default: read from Prometheus, else 15s]",
)
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one static HTML file with its data instead of serving.",
)
@click.option(
    "--board", "slugs", multiple=True, metavar="SLUG", help="With --snapshot: only this dashboard; repeatable."
)
@click.option(
    "--from",
    "start",
    default="now-1h",
    show_default=True,
    metavar="TIME",
    help="With --snapshot: start, such as now-6h, 2026-03-01T12:00:00Z or ms.",
)
@click.option("--to", "end", default="now", show_default=True, metavar="TIME", help="With --snapshot: end.")
@TEAM
@THRESHOLDS
@options_of(RequestSourceOptions, "source")
@click.option("--trace-url", metavar="URL", help="URL of a trace, with {trace_id} in it, for the page of requests.")
def board_command(
    url: str,
    token_file: Path | None,
    user_file: Path | None,
    http_config: Path | None,
    listen: str,
    web_config: Path | None,
    allowed: tuple[str, ...],
    scrape_s: float | None,
    snapshot: Path | None,
    slugs: tuple[str, ...],
    start: str,
    end: str,
    team: str | None,
    thresholds: Path | None,
    source: RequestSourceOptions,
    trace_url: str | None,
) -> None:
    """Serve the dashboards as web pages, without Grafana.

    With --team, one dashboard whose queries read that team only, and no runbooks. With --data, --log or --ship-config,
    a page that lists requests as well.

    \b
    Example:  vllm-watch board --prometheus http://127.0.0.1:9090
    """
    if slugs and not snapshot:
        raise click.UsageError("--board belongs to --snapshot; the live page has every board")
    if slugs and team is not None:
        raise click.UsageError("--team has one dashboard; omit --board")
    with mistakes_as_errors():
        where, settings = address_from(url, token_file, user_file, http_config), settings_of(thresholds)
        with process.runner() as runner:
            if snapshot:
                runner.run(run.write_snapshot(snapshot, where, slugs, scrape_s, start, end, settings, team))
                click.echo(f"written: {snapshot} ({snapshot.stat().st_size / 1e6:.1f} MB)")
            else:
                log_to_stderr()
                requests = source if source.any else None
                served = run.until_signal(
                    where, listen, scrape_s, allowed, settings, web_config, team, requests, trace_url
                )
                runner.run(served)
