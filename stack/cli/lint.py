"""`vllm-watch lint`: rules, dashboards and runbooks, beyond promtool and Grafana. For development."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import yaml

from alerts import lint as alert_lint
from alerts import printer
from alerts.registry import ALERTS, RECORDINGS
from dashboards import coverage
from dashboards import lint as dashboard_lint
from dashboards.grafana_json import to_json
from dashboards.registry import BOARDS
from runbooks import page_check
from stack.cli.common import mistakes_as_errors


@click.command("lint", hidden=True)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def lint(files: tuple[Path, ...]) -> None:
    """Check rules, dashboards and runbooks.

    \b
    Example:  vllm-watch lint
              vllm-watch lint my-dashboard.json
    """
    with mistakes_as_errors():
        faults = list(_faults_of(files) if files else _own_faults())
    for warning in () if files else page_check.warnings(datetime.datetime.now(datetime.UTC).date()):
        click.echo(f"warning: {warning}", err=True)
    click.echo("\n".join(faults) or "OK")
    raise SystemExit(1 if faults else 0)


def _own_faults() -> Iterator[str]:
    yield from alert_lint.faults(ALERTS, RECORDINGS)
    yield from alert_lint.crowded(
        {group["name"]: group["rules"] for _, text in printer.rule_files() for group in yaml.safe_load(text)["groups"]}
    )
    yield from map(str, dashboard_lint.lint([json.loads(to_json(board)) for board in BOARDS]))
    yield from coverage.unexplained(BOARDS)
    yield from page_check.faults(alert.name for alert in ALERTS)


def _faults_of(files: Sequence[Path]) -> Iterator[str]:
    """Raises ValueError for a file that is no dashboard."""
    boards = []
    for path in files:
        try:
            board = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(board, dict):
            raise ValueError(f"{path} is no dashboard; export one from Grafana as JSON")
        boards.append(board.get("dashboard", board))
    yield from map(str, dashboard_lint.findings(boards))
