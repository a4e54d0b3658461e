"""`vllm-watch lab`: install and run the stack on a vLLM CPU build."""

from __future__ import annotations

import os

import click
from rich.console import Console

from stack.cli.options import duration
from stack.lab import install
from stack.lab.plan import GATEWAYS_AT_MOST
from stack.lab.up import NEEDED, up
from stack.terminal import output_width


@click.group()
def lab() -> None:
    """Run the whole stack on this machine's CPU."""


@lab.command("up")
@click.option(
    "--engine",
    metavar="URL",
    help="Monitor this vLLM instead of starting one; no traffic is sent to it without --traffic.",
)
@click.option(
    "--traffic/--no-traffic",
    default=None,
    help="Send about two small requests per second.  [default: only to the lab's own vLLM]",
)
@click.option(
    "--for",
    "for_s",
    metavar="TIME",
    callback=duration,
    help="Stop this long after start-up; exit 0 only if all went well.",
)
@click.option(
    "--port-offset", type=click.IntRange(0, 50000), default=0, show_default=True, help="Number to add to every port."
)
@click.option(
    "--gateways",
    type=click.IntRange(1, GATEWAYS_AT_MOST),
    default=1,
    show_default=True,
    help="Gateways behind HAProxy, with limits shared in Valkey.",
)
def lab_up(engine: str | None, traffic: bool | None, for_s: float | None, port_offset: int, gateways: int) -> None:
    """Install what is missing and run the lab.

    Starts every process, sends load to its own vLLM and shows the state.

    \b
    Example:  vllm-watch lab up --for 120s
    """
    if traffic is None:
        traffic = engine is None
    raise SystemExit(up(engine, for_s, port_offset, Console(width=output_width(110)), traffic, gateways))


@lab.command("install")
@click.argument("names", nargs=-1)
@click.option("--every", is_flag=True, help="Install also the components that only tests need.")
def lab_install(names: tuple[str, ...], every: bool) -> None:
    """Install components into the cache, or list them.

    Without NAMES: all that the lab needs.

    \b
    Example:  vllm-watch lab install prometheus promtool
    """
    console = Console(soft_wrap=True, highlight=False)
    unknown = sorted(set(names) - set(install.PARTS))
    if unknown:
        raise click.UsageError(f"{unknown[0]} is no part; there are {', '.join(install.PARTS)}")
    wanted = tuple(install.PARTS) if every else names or NEEDED
    try:
        found = install.install(wanted, console.print)
    except install.PartMissing as error:
        if not every or os.environ.get("CI"):
            raise click.ClickException(str(error)) from error
        found = {name: part for name in wanted if (part := install.find(name))}
        console.print(f"going on without what is missing:\n{error}")
    for part in found.values():
        console.print(f"{part.name} {part.version}: {part.path} ({part.origin})")
