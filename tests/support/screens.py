"""Pictures of dashboards over an hour of data."""

from __future__ import annotations

import urllib.parse
from typing import Any

from alerts.panel_ref import board_uid
from tests.support.panel_fixtures import HOUR_S
from tests.support.wait import eventually

END_S = 1_767_229_200  # a whole number of the two hours that a block spans, and an hour


DRAWN = (
    "!document.querySelector('.panel:not([hidden]) .chart:not([data-state])') &&"
    " !document.querySelector('.panel:not([hidden]).busy')"
)


def dashboard(url: str, slug: str) -> str:
    span = {"from": (END_S - HOUR_S) * 1000, "to": END_S * 1000, "refresh": "off"}
    return f"{url}/d/{board_uid(slug)}?{urllib.parse.urlencode(span)}"


def whole(page: Any) -> None:
    """Draw also what lies below the screen: the window becomes as high as the page."""
    for _ in range(2):  # what is drawn may make the page higher
        page.set_viewport_size(
            {
                "width": page.viewport_size["width"],
                "height": page.evaluate("document.documentElement.scrollHeight") + 50,
            }
        )
        # the page's own policy forbids what wait_for_function does
        eventually(lambda: page.evaluate(DRAWN), f"{page.url}: every panel drawn", within_s=120, every_s=0.1)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
