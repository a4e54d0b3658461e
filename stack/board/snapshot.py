"""Dashboards with their data as one static HTML file, for reports and incident reviews."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from multidict import MultiDict

from alerts.panel_ref import board_uid
from dashboards.model import Dashboard
from exporters.net.prometheus import Address, Prometheus
from stack.board import pages
from stack.board.server import DashboardServer
from stack.board.view import PanelView, parse, span


async def take(
    where: Address, shown: Sequence[Dashboard], scrape_s: float | None, start: str, end: str, now_s: float | None = None
) -> str:
    """The page. Raises Refused when Prometheus does not answer, BadView for a range that cannot be."""
    now_s = time.time() if now_s is None else now_s
    start_s, end_s = span(start, end, now_s)
    async with Prometheus(where, scrape_s) as prometheus:
        desk = DashboardServer(prometheus)
        await prometheus.scrape_s()
        # also with a given interval: a snapshot has no other place for the warning
        await prometheus.label_values("job", "", start_s, end_s)
        boards = {
            board_uid(board.slug): await _board(desk, board, parse(MultiDict({"from": start, "to": end}), board, now_s))
            for board in shown
        }
    taken = {
        "takenAt": round(now_s * 1000),
        "prometheus": where.shown,
        "start": round(start_s * 1000),
        "end": round(end_s * 1000),
    }
    return pages.snapshot_page(shown, desk.boards, taken | {"boards": boards})


async def _board(desk: DashboardServer, board: Dashboard, view: PanelView) -> dict[str, Any]:
    drawn, marks, variables, missing = await asyncio.gather(
        asyncio.gather(*(desk.panel(panel, view) for panel in board.panels)),
        desk.annotations(board, view),
        desk.variables(board, view),
        desk.missing(board, view),
    )
    ids = [str(pages.panel_id(board, panel)) for panel in board.panels]
    return {
        "panels": dict(zip(ids, drawn, strict=True)),
        "annotations": marks,
        "variables": variables,
        "missing": missing,
    }
