"""Every board that is shipped."""

from dashboards import overview
from dashboards.panels import Board

BOARDS: tuple[Board, ...] = (overview.BOARD,)
