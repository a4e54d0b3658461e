"""What the compose stack made for itself: `vllm-watch secrets`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stack.cli.common import AS_JSON, mistakes_told
from stack.deploy import init


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Where they are; by default the compose stack's volume.")
@AS_JSON
def secrets(folder: Path | None, as_json: bool) -> None:
    """Print what the compose stack made at its first start: Grafana's password and a key for each team.

    \b
    Example:  docker compose run --rm cli secrets
    """
    with mistakes_told():
        made = init.read(folder or init.FOLDER)
    if as_json:
        click.echo(json.dumps({"grafana_password": made.grafana_password, "keys": made.keys}, indent=1))
        return
    click.echo(f"Grafana     http://127.0.0.1:3000   user admin, password {made.grafana_password}")
    for team, key in made.keys.items():
        click.echo(f"key         {team:14} {key}")
    some = next(iter(made.keys.values()))
    click.echo(f'try         curl -H "Authorization: Bearer {some}" http://127.0.0.1:8000/v1/models')
