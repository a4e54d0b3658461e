"""`vllm-watch runbook`: find, fill and evaluate a runbook."""

from __future__ import annotations

import asyncio
import difflib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import click
from rich.console import Console
from rich.markdown import Markdown

from alerts.rules import Links
from alerts.settings import Settings
from exporters.net.alertmanager import Firing, firing_alerts, parse_alerts
from exporters.net.http_client import HttpClientConfig
from exporters.net.prometheus import address_from
from runbooks import lookup, search
from runbooks import page as runbook_pages
from runbooks.page import RunbookPage
from stack import render
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.options import (
    ALERTMANAGER_URL,
    HTTP_CONFIG,
    PROMETHEUS_URL,
    THRESHOLDS,
    TOKEN_FILE,
    USER_FILE,
    settings_of,
)
from stack.cli.struct_options import options_of
from stack.option import Opt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunbookOptions:
    """Which page is meant, what fills it, and what is shown of it."""

    listed: Annotated[bool, Opt(name="--list", help="List all runbooks; the same as no NAME.")] = False
    firing: Annotated[bool, Opt(help="List firing alerts; with NAME, show its page with the alert's labels.")] = False
    alertmanager: Annotated[
        str | None,
        Opt(metavar="URL", help=f"With --firing.  [default: {ALERTMANAGER_URL}, else http://127.0.0.1:9093]"),
    ] = None
    source: Annotated[
        IO[bytes] | None,
        click.File("rb"),
        Opt(name="--from-alertmanager", metavar="FILE", help="Webhook body or amtool's JSON; - is stdin."),
    ] = None
    given: Annotated[
        tuple[str, ...],
        Opt(name="--label", metavar="NAME=VALUE", help="Label to fill into commands and queries; repeatable."),
    ] = ()
    live: Annotated[bool, Opt(help="Evaluate all queries of the page in Prometheus.")] = False
    url: Annotated[
        str, Opt(name="--prometheus", metavar="URL", envvar=PROMETHEUS_URL, help="With --live: URL of Prometheus.")
    ] = "http://127.0.0.1:9090"
    token_file: Annotated[Path | None, TOKEN_FILE] = None
    user_file: Annotated[Path | None, USER_FILE] = None
    http_config: Annotated[Path | None, HTTP_CONFIG] = None
    section: Annotated[
        str | None, Opt(metavar="HEADING", help="Show only this section; its first letters are enough.")
    ] = None
    only_url: Annotated[bool, Opt(name="--print-url", help="Print only the URL of the page.")] = False
    base: Annotated[
        str | None,
        Opt(metavar="URL", help=f"Base URL of the runbooks.  [default: as in the alert, else {Links().runbooks}]"),
    ] = None
    thresholds: Annotated[Path | None, THRESHOLDS] = None


@click.command("runbook")
@click.argument("words", nargs=-1, metavar="[NAME]")
@options_of(RunbookOptions, "asked")
@AS_JSON
def runbook_command(words: tuple[str, ...], asked: RunbookOptions, as_json: bool) -> None:
    """Show the runbook of an alert, filled with live values.

    NAME is an alert, words of a page, or the URL of a notification; NAME=VALUE fills in a label. Exit 1 if nothing was
    found, 2 if several pages match, or for a mistake.

    \b
    Example:  vllm-watch runbook kv cache full instance=127.0.0.1:8001 --live
    """
    _check_usage(words, asked)
    with mistakes_as_errors():
        settings = settings_of(asked.thresholds)
        alerts = _alerts_of(asked)
    query, labels = search.split_query(words)
    if not any("://" in word for word in words):
        _note_unused(labels)
    choice = lookup.choose(
        query,
        alerts,
        labels | dict(map(_label, asked.given)),
        render.pages(settings),
        asked.base,
        single=_needs_page(asked),
        with_constant=not asked.firing,
    )
    if choice.page is None:
        click.echo(json_text(choice.rows) if as_json else choice.message, err=choice.status == 1 and not as_json)
        raise SystemExit(choice.status)
    if choice.message:
        click.echo(choice.message, err=True)
    if asked.only_url:
        address = choice.links.runbook(choice.page.name)
        click.echo(json_text({"page": choice.page.name, "url": address}) if as_json else address)
        return
    filled = choice.page.filled(choice.labels)
    with mistakes_as_errors():
        heading = lookup.heading(filled, asked.section) if asked.section is not None else ""
        live = _live_of(filled, choice.labels, asked, settings) if asked.live else None
    if as_json:
        click.echo(json_text(lookup.as_json(filled, choice.labels, live, heading, choice.links)))
    else:
        _page_out(lookup.as_text(filled, choice.labels, live, heading, choice.links))


def _note_unused(labels: Mapping[str, str]) -> None:
    """Report labels that no page has a place for."""
    known = {name for page in runbook_pages.pages() for name in runbook_pages.placeholders(page.text)}
    for name in sorted(labels.keys() - known - {"alertname", "severity", "job"}):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        click.echo(f"note: no page uses the label {name}{f'; did you mean {near[0]}?' if near else ''}", err=True)


def _needs_page(asked: RunbookOptions) -> bool:
    return asked.live or asked.section is not None or asked.only_url


def _check_usage(words: tuple[str, ...], asked: RunbookOptions) -> None:
    """Raise UsageError for options that exclude or need each other."""
    if asked.alertmanager and not asked.firing:
        raise click.UsageError("--alertmanager belongs to --firing")
    if (asked.firing and asked.source) or (asked.listed and (words or asked.firing or asked.source)):
        raise click.UsageError(
            "choose NAME, --list, --firing or --from-alertmanager; only NAME goes together with one of the last two"
        )
    page_given = words or asked.firing or asked.source
    if not page_given and (_needs_page(asked) or asked.given):
        raise click.UsageError("name a page; vllm-watch runbook --list has them all")


def _alerts_of(asked: RunbookOptions) -> Sequence[Firing] | None:
    """Return the alerts of a file or of Alertmanager; None where neither is requested."""
    if asked.source:
        return parse_alerts(asked.source.read(), getattr(asked.source, "name", "<stdin>"))
    if not asked.firing:
        return None
    url = asked.alertmanager or os.environ.get(ALERTMANAGER_URL) or lookup.ALERTMANAGER
    config = HttpClientConfig(asked.http_config) if asked.http_config else None
    return asyncio.run(firing_alerts(url, config))


def _live_of(page: RunbookPage, labels: lookup.Labels, asked: RunbookOptions, settings: Settings) -> lookup.Live:
    address = address_from(asked.url, asked.token_file, asked.user_file, asked.http_config)
    return asyncio.run(lookup.ask(page, labels, address, time.time(), settings))


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
