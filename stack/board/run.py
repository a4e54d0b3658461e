"""`vllm-watch board`: serve until a signal, or write one HTML file. Errors are one sentence for the user."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from alerts.settings import Settings
from dashboards.model import Dashboard
from dashboards.registry import BOARDS, boards
from exporters.net.prometheus import Address, PrometheusError
from exporters.text import write_atomically
from stack.board import server, snapshot
from stack.request_source import RequestSourceOptions


async def until_signal(
    where: Address,
    listen: str,
    scrape_s: float | None,
    allowed: Sequence[str],
    settings: Settings,
    web_config: Path | None = None,
    team: str | None = None,
    source: RequestSourceOptions | None = None,
    trace_url: str | None = None,
) -> None:
    """Raises ValueError for a bad address or team, BadConfig for one that cannot be used and for a mistake in
    web_config."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.serve(where, listen, scrape_s, allowed, stop, settings, web_config, team, source, trace_url)


async def write_snapshot(
    path: Path,
    where: Address,
    slugs: Sequence[str],
    scrape_s: float | None,
    start: str,
    end: str,
    settings: Settings,
    team: str | None = None,
) -> None:
    """Raises ValueError for an unknown board, range or team, OSError when Prometheus does not answer or the file cannot
    be written."""
    shown = chosen(slugs, boards(settings=settings, team=team))
    if not path.parent.is_dir():
        raise OSError(f"{path.parent} is no folder; make it first, or write elsewhere")
    try:
        page = await snapshot.take(where, shown, scrape_s, start, end)
    except PrometheusError as error:
        raise OSError(str(error)) from error
    await asyncio.to_thread(write_atomically, path, page)


def chosen(slugs: Sequence[str], boards: Sequence[Dashboard] = BOARDS) -> tuple[Dashboard, ...]:
    """All boards, or those named. Raises ValueError for a name that no board has."""
    unknown = sorted(set(slugs) - {board.slug for board in boards})
    if unknown:
        raise ValueError(f"there is no board {unknown[0]}; there are {', '.join(board.slug for board in boards)}")
    return tuple(board for board in boards if not slugs or board.slug in slugs)
