"""`vllm-watch secrets`: secrets of the compose stack."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from stack.cli.common import AS_JSON, mistakes_as_errors
from stack.deploy import init


@click.command()
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Folder of the secrets.  [default: the compose stack's volume]"
)
@click.option(
    "--grafana",
    metavar="URL",
    envvar="VLLM_WATCH_GRAFANA_URL",
    default="http://127.0.0.1:3000",
    show_default=True,
    help="URL to print.",
)
@click.option(
    "--gateway",
    metavar="URL",
    envvar="VLLM_WATCH_GATEWAY_URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="URL to print.",
)
@AS_JSON
def secrets(folder: Path | None, grafana: str, gateway: str, as_json: bool) -> None:
    """Print the passwords and keys of the compose stack.

    Grafana's password and a key for each team; with TLS the operator's too.

    \b
    Example:  docker compose run --rm cli secrets
    """
    with mistakes_as_errors():
        made = init.read(folder or init.FOLDER)
    if as_json:
        click.echo(json.dumps({name: value for name, value in asdict(made).items() if value is not None}, indent=1))
        return
    click.echo(f"Grafana     {grafana}   user admin, password {made.grafana_password}")
    if made.operator_password:
        click.echo(
            f"operator    user operator, password {made.operator_password}   for Prometheus, Alertmanager and the board"
        )
    for team, key in made.keys.items():
        click.echo(f"key         {team:14} {key}")
    if some := next(iter(made.keys.values()), None):
        trusting = "--cacert ca.crt " if gateway.startswith("https:") else ""
        click.echo(f'try         curl {trusting}-H "Authorization: Bearer {some}" {gateway}/v1/models')
