"""Every board that is shipped."""

from __future__ import annotations

from dataclasses import replace

from dashboards import fleet, gpu, kv_cache, latency, levers, overview, teams, tuning, watch
from dashboards.model import Board, Profile, only

# In the order in which one asks: is it well, where does the time go, what is the limit, who is affected, did the change help.
BOARDS: tuple[Board, ...] = tuple(
    part.BOARD for part in (overview, latency, kv_cache, levers, teams, gpu, tuning, fleet, watch)
)


def boards(profile: Profile = Profile.FULL) -> tuple[Board, ...]:
    """The boards of a profile; none links to one that the profile does not have."""
    kept = [board for board in (only(b, profile.components) for b in BOARDS) if board]
    there = {board.slug for board in kept}
    return tuple(_without_links_outside(board, there) for board in kept)


def _without_links_outside(board: Board, there: set[str]) -> Board:
    rows = (replace(row, panels=tuple(p if p.detail in there else replace(p, detail="") for p in row.panels)) for row in board.rows)
    return replace(board, rows=tuple(rows))
