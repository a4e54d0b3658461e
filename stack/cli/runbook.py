"""`vllm-watch runbook`: what to do about an alert."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.markdown import Markdown

from alerts.rules import Links
from exporters.net.alertmanager import firing_alerts, parse_alerts
from exporters.net.http_client import HttpClientConfig
from exporters.net.prometheus import address_from
from runbooks import lookup
from stack import render
from stack.cli.common import AS_JSON, json_text, mistakes_told
from stack.cli.options import HTTP_CONFIG, THRESHOLDS, TOKEN_FILE, USER_FILE, settings_of


@click.command("runbook")
@click.argument("words", nargs=-1, metavar="[NAME]")
@click.option("--list", "listed", is_flag=True, help="Every page; the same as no NAME.")
@click.option("--firing", is_flag=True, help="The pages of what fires now; with NAME, that page with its labels.")
@click.option("--alertmanager", metavar="URL", help="With --firing.  [default: http://127.0.0.1:9093]")
@click.option(
    "--from-alertmanager",
    "source",
    type=click.File("rb"),
    metavar="FILE",
    help="The body of a webhook, or amtool's JSON; - is stdin.",
)
@click.option(
    "--label",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="Fill this into commands and queries; may be given more than once.",
)
@click.option("--live", is_flag=True, help="Ask Prometheus every question of the page and show what holds.")
@click.option(
    "--prometheus", "url", default="http://127.0.0.1:9090", show_default=True, metavar="URL", help="With --live."
)
@TOKEN_FILE
@USER_FILE
@HTTP_CONFIG
@click.option("--section", metavar="HEADING", help="Only this part; its first letters will do, such as mitigation.")
@click.option("--url", "only_url", is_flag=True, help="Only the address of the page.")
@click.option(
    "--base", metavar="URL", help=f"Where pages are served.  [default: where the alert says, else {Links().runbooks}]"
)
@THRESHOLDS
@AS_JSON
def runbook_command(
    words: tuple[str, ...],
    listed: bool,
    firing: bool,
    alertmanager: str | None,
    source: IO[bytes] | None,
    given: tuple[str, ...],
    live: bool,
    url: str,
    token_file: Path | None,
    user_file: Path | None,
    http_config: Path | None,
    section: str | None,
    only_url: bool,
    base: str | None,
    thresholds: Path | None,
    as_json: bool,
) -> None:
    """What to do about an alert: its page, by name, by a part of it, or by words that it holds.

    Exit 1 when nothing was found, 2 when several pages are meant as likely, or for a mistake.

    \b
    Example:  vllm-watch runbook kv cache full --label instance=127.0.0.1:8001 --live
    """
    if alertmanager and not firing:
        raise click.UsageError("--alertmanager belongs to --firing")
    if (firing and source) or (listed and (words or firing or source)):
        raise click.UsageError(
            "choose NAME, --list, --firing or --from-alertmanager; only NAME goes together with one of the last two"
        )
    one = live or section is not None or only_url
    if not words and not firing and not source and (one or given):
        raise click.UsageError("name a page; vllm-watch runbook --list has them all")
    alerts = None
    with mistakes_told():
        settings = settings_of(thresholds)
        if source:
            alerts = parse_alerts(source.read(), getattr(source, "name", "<stdin>"))
        elif firing:
            alerts = asyncio.run(
                firing_alerts(
                    alertmanager or lookup.ALERTMANAGER, HttpClientConfig(http_config) if http_config else None
                )
            )
    choice = lookup.choose(" ".join(words), alerts, dict(map(_label, given)), render.pages(settings), base, one)
    if choice.page is None:
        click.echo(json_text(choice.rows) if as_json else choice.said, err=choice.status == 1 and not as_json)
        raise SystemExit(choice.status)
    if choice.said:
        click.echo(choice.said, err=True)
    if only_url:
        address = choice.links.runbook(choice.page.name)
        click.echo(json_text({"page": choice.page.name, "url": address}) if as_json else address)
        return
    shown = choice.page.filled(choice.labels)
    with mistakes_told():
        heading = lookup.heading(shown, section) if section is not None else ""
        now = (
            asyncio.run(
                lookup.ask(
                    shown, choice.labels, address_from(url, token_file, user_file, http_config), time.time(), settings
                )
            )
            if live
            else None
        )
    if as_json:
        click.echo(json_text(lookup.as_json(shown, choice.labels, now, heading, choice.links)))
    else:
        _page_out(lookup.as_text(shown, choice.labels, now, heading, choice.links))


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise click.UsageError(f"--label {text!r} is no label; write it like instance=127.0.0.1:8001")
    return name, value


def _page_out(markdown: str) -> None:
    """Drawn in a terminal, through a pager where it is higher than that; as it was written into a file or pipe."""
    if not sys.stdout.isatty():
        click.echo(markdown, nl=False)
        return
    console = Console()
    with console.capture() as drawn:
        console.print(Markdown(markdown, hyperlinks=False))
    if drawn.get().count("\n") > console.height:
        click.echo_via_pager(drawn.get(), color=console.color_system is not None)
    else:
        click.echo(drawn.get(), nl=False, color=True)
