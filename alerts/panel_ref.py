"""Which panel of which board an alert points at; addresses are pure functions of two slugs, so alerts need not import
dashboards."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class PanelRef:
    """A board slug and a panel slug. Raises ValueError for what is no slug."""

    board: str
    panel: str

    def __post_init__(self) -> None:
        for slug in (self.board, self.panel):
            if not _SLUG.fullmatch(slug):
                raise ValueError(f"{slug!r} is no slug; write it like kv-cache")

    @property
    def uid(self) -> str:
        """Grafana's dashboard uid: at most 40 characters, and ours alone."""
        return board_uid(self.board)

    @property
    def panel_id(self) -> int:
        """A panel id that stays when panels move: 1 to 999983, distinct within a board (a test says so)."""
        return zlib.crc32(self.panel.encode()) % 999_983 + 1

    def url(self, base: str) -> str:
        return f"{base.rstrip('/')}/d/{self.uid}?viewPanel={self.panel_id}"


def board_uid(board: str) -> str:
    return f"vllm-watch-{board}"
