"""All dashboards of the project."""

from __future__ import annotations

from dataclasses import replace

from alerts.settings import DEFAULTS, Settings
from dashboards.boards import (
    cost,
    fleet,
    fleet_weeks,
    gateway,
    gpu,
    kv_cache,
    latency,
    monitoring_health,
    overview,
    prefill_decode,
    teams,
    tuning,
    tuning_options,
)
from dashboards.boards.team import dashboard as team_dashboard
from dashboards.model import Dashboard, Panel, Profile, only

# In the order in which one asks: is it well, where does the time go, what is the limit, who is affected and who goes
# first, did the change help.
BOARDS: tuple[Dashboard, ...] = tuple(
    part.BOARD
    for part in (
        overview,
        latency,
        kv_cache,
        tuning_options,
        prefill_decode,
        teams,
        cost,
        gateway,
        gpu,
        tuning,
        fleet,
        fleet_weeks,
        monitoring_health,
    )
)


def boards(
    profile: Profile = Profile.FULL, settings: Settings = DEFAULTS, team: str | None = None
) -> tuple[Dashboard, ...]:
    """The boards of a profile, with their lines where a deployment's settings put them; none links to one that the
    profile does not have.

    team: only the dashboard of this team. Raises ValueError for a name that no team can have."""
    if team is not None:
        return (team_dashboard(team),)
    kept = [board for board in (only(b, profile.components) for b in BOARDS) if board]
    there = {board.slug for board in kept}
    return tuple(_with(board, there, settings) for board in kept)


def _with(board: Dashboard, there: set[str], settings: Settings) -> Dashboard:
    return replace(
        board,
        rows=tuple(replace(row, panels=tuple(_panel(p, there, settings) for p in row.panels)) for row in board.rows),
    )


def _panel(panel: Panel, there: set[str], settings: Settings) -> Panel:
    line = panel.threshold and settings.at(panel.threshold)
    return replace(panel, threshold=line, detail=panel.detail if panel.detail in there else "")
