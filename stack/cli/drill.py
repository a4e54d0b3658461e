"""`vllm-watch drill`: fault injection with the alert that must fire and resolve."""

from __future__ import annotations

import json

import click

from stack.cli.common import mistakes_as_errors
from stack.drill import drills, run


@click.command("drill")
@click.argument("alerts", nargs=-1, metavar="[ALERT|fast|all]...")
@click.option("--list", "only_list", is_flag=True, help="List every alert with its drill, or the reason for none.")
@click.option(
    "--port-offset", type=click.IntRange(0, 50000), default=2000, show_default=True, help="Number to add to every port."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; progress goes to stderr.")
def drill_command(alerts: tuple[str, ...], only_list: bool, port_offset: int, as_json: bool) -> None:
    """Inject a fault and check that its alert fires.

    Windows and waiting times are fifteen times shorter than the defaults, or sixty; GPUs are stand-ins. Exit 0 only if
    every alert fired and resolved.

    \b
    Example:  vllm-watch drill VLLMEngineDown
    """
    if only_list:
        rows = run.listed()
        click.echo(
            json.dumps(rows, indent=1)
            if as_json
            else "\n".join(f"{r['alert']:30} {r['drill'] or 'none: ' + r['why_not']}" for r in rows)
        )
        return
    if not alerts:
        raise click.UsageError("name an alert, or fast, or all; --list shows them")
    with mistakes_as_errors():
        chosen = drills.chosen(alerts)
    raise SystemExit(run.command(chosen, port_offset, as_json))
