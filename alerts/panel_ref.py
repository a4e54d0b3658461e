"""Reference from an alert to a panel of a dashboard.

Addresses are pure functions of two slugs, so alerts do not import dashboards."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class PanelRef:
    """Slugs of a dashboard and a panel. Raises ValueError for text that is not a slug."""

    board: str
    panel: str

    def __post_init__(self) -> None:
        for slug in (self.board, self.panel):
            if not _SLUG.fullmatch(slug):
                raise ValueError(f"{slug!r} is not a slug; write it like kv-cache")

    @property
    def uid(self) -> str:
        """Return the uid in Grafana: at most 40 characters, with our prefix."""
        return board_uid(self.board)

    @property
    def panel_id(self) -> int:
        """Return a panel id that stays when panels move: 1 to 999983, distinct within a dashboard."""
        return zlib.crc32(self.panel.encode()) % 999_983 + 1

    def url(self, base: str) -> str:
        return f"{base.rstrip('/')}/d/{self.uid}?viewPanel={self.panel_id}"


def board_uid(board: str) -> str:
    return f"vllm-watch-{board}"
