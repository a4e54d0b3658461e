"""Options that several commands share: addresses, durations, thresholds."""

from __future__ import annotations

from pathlib import Path

import click

from alerts.rules import Links
from alerts.settings import DEFAULTS, Overrides, Settings
from exporters.text import parse_duration
from stack import config

# Where the user's own services are, for all commands that take such an address and get none.
PROMETHEUS_URL, ALERTMANAGER_URL, ENGINE_URL = (
    f"VLLM_WATCH_{name}_URL" for name in ("PROMETHEUS", "ALERTMANAGER", "ENGINE")
)

THRESHOLDS = click.option(
    "--thresholds",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with your thresholds; see `alerts list`.",
)
TEAM = click.option("--team", metavar="NAME", help="Only the dashboard of this team, without any data of others.")
DATA = click.option(
    "--data", metavar="LOCATION", help="Data set of `ship` to read instead: folder or s3://bucket/prefix."
)
RUNBOOK_BASE = click.option(
    "--runbook-base", metavar="URL", help=f"Base URL of the runbooks.  [default: {Links().runbooks}]"
)
DASHBOARD_BASE = click.option(
    "--dashboard-base", metavar="URL", help=f"Base URL of Grafana.  [default: {Links().dashboards}]"
)
SLO = click.option(
    "--slo", type=click.Path(path_type=Path, dir_okay=False), help="File with your objectives; see `alerts slo`."
)
LIMITS = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=MS",
    help="SLO for the p95 of ttft_ms, tpot_ms or e2e_ms, such as ttft_ms=500; repeatable.",
)
TOKEN_FILE = click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with a bearer token for Prometheus."
)
HTTP_CONFIG = click.option(
    "--http-config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TLS and auth for the target (promtool http.config format).",
)
USER_FILE = click.option("--user-file", type=click.Path(path_type=Path), help="File with user:password for Prometheus.")


def settings_of(thresholds: Path | None) -> Settings:
    """Return the thresholds of a file, or the defaults. Raises BadConfig."""
    return Settings(config.load(thresholds, Overrides)) if thresholds else DEFAULTS


def duration(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """A callback: seconds of a time such as 120s or 1h."""
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
