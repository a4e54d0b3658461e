"""`vllm-watch render`: write or check all generated files."""

from __future__ import annotations

import click

from stack import render as rendering
from stack.root import ROOT


@click.command(hidden=True)
@click.option("--check", "only_check", is_flag=True, help="Change nothing; exit 1 when a printed file is out of date.")
def render(only_check: bool) -> None:
    """Regenerate dashboards, rules and reference pages.

    \b
    Example:  vllm-watch render --check
    """
    changed = rendering.stale() if only_check else rendering.write()
    for path in changed:
        click.echo(f"{'out of date' if only_check else 'printed'}: {path}")
    if only_check and changed:
        raise SystemExit(1)
    if not changed:
        click.echo(f"all printed files below {ROOT} are up to date")
