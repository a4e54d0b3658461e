"""`vllm-watch gateway`: serve, check, key, haproxy. The process that runs pays for every import, so what only another
command needs is imported by that one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stack.cli.common import AS_JSON, json_text, log_to_stderr, mistakes_as_errors
from stack.gateway import check, make_key, run

if TYPE_CHECKING:
    from rich.console import Console


@click.group()
def gateway() -> None:
    """Run the gateway: auth, admission, request log."""


@gateway.command("run")
@click.option(
    "--config",
    "path",
    required=True,
    type=click.Path(path_type=Path),
    help="Configuration file; see stack/deploy/gateway.yaml.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes that share the address and the limits.",
)
def gateway_run(path: Path, workers: int) -> None:
    """Forward requests to vLLM and log them.

    With several workers each has a log and a metrics port of its own; see docs/guides/gateway.md.

    \b
    Example:  vllm-watch gateway run --config gateway.yaml
    """
    log_to_stderr()
    with mistakes_as_errors():
        if workers == 1:
            raise SystemExit(run(path))
        from stack.gateway.workers import supervise

        raise SystemExit(supervise(path, workers))


@gateway.command("key")
@click.argument("team")
def gateway_key(team: str) -> None:
    """Create an API key for a team.

    Prints the secret to hand out and the hash for teams.yaml.

    \b
    Example:  vllm-watch gateway key demo
    """
    with mistakes_as_errors():
        key, hashed = make_key(team)
    click.echo(f"key for {team} (shown once): {key}\nfor teams.yaml:\n  teams:\n    {team}:\n      keys: ['{hashed}']")


@gateway.command("haproxy")
@click.argument("gateways", nargs=-1, required=True, metavar="HOST:PORT...")
@click.option("--listen", metavar="HOST:PORT", default="127.0.0.1:8000", show_default=True, help="Address for clients.")
@click.option("--by-team", is_flag=True, help="Send requests of one API key to one gateway.")
@click.option("--certificate", metavar="PEM", help="Certificate chain and key for clients, in one file.")
@click.option("--ca-file", metavar="PEM", help="Authority of the gateways' certificates.")
@click.option("--metrics-listen", metavar="HOST:PORT", help="Address of HAProxy's own metrics.")
@click.option(
    "--silence",
    "silence_s",
    type=click.IntRange(min=60),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="Longest time without a byte in either direction.",
)
def gateway_haproxy(gateways: tuple[str, ...], **options: Any) -> None:
    """Print a HAProxy configuration for several gateways.

    HOST:PORT is the address of each gateway. Give them limits in common with `sharing` in gateway.yaml.

    \b
    Example:  vllm-watch gateway haproxy 10.0.0.5:8000 10.0.0.6:8000 --listen 0.0.0.0:8000 > haproxy.cfg
    """
    from stack.deploy.haproxy import LoadBalancer, configuration

    with mistakes_as_errors():
        text = configuration(LoadBalancer(gateways=gateways, **options))
    click.echo(text, nl=False)


@gateway.command("check")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@AS_JSON
def gateway_check(file: Path, as_json: bool) -> None:
    """Check a policy file and explain its effect.

    Check FILE and print its effect: priorities, limits, and the share of each engine.

    FILE is teams.yaml, or gateway.yaml, with which the teams.yaml that it names is checked too. Exit 1 when there are
    mistakes.

    \b
    Example:  vllm-watch gateway check teams.yaml
    """
    findings = check.check(file)
    if as_json:
        click.echo(json_text(findings))
    elif sys.stdout.isatty() and not findings["mistakes"]:
        from rich.console import Console

        draw(findings, Console(highlight=False))
    else:
        click.echo(check.as_text(findings))
    raise SystemExit(1 if findings["mistakes"] else 0)


def draw(findings: dict[str, Any], console: Console) -> None:
    """Print `gateway check` with its tables drawn."""
    from rich.markup import escape
    from rich.table import Table

    console.print(check.summary(findings), markup=False)
    for sheet in check.sheets(findings):
        table = Table(*sheet.head, title=sheet.title, title_justify="left")
        for row in sheet.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    console.print(check.verdict(findings), markup=False)
