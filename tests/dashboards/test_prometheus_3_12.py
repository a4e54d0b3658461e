"""Every panel query on Prometheus 3.12 beside 3.5.3: both servers read the same blocks, and answer the same.

Native histograms are not compared: both releases scrape them in different ways, and blocks made from text have none."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request

import pytest

from dashboards import variables
from dashboards.interpolate import ALL, Range, fill
from dashboards.model import Panel, Shape
from dashboards.registry import BOARDS
from tests.support.replayed_hour import ReplayedHour
from tests.support.screens import END_S

NOT_SHOWN = {"prefill-decode", "fleet-weeks"}  # the hour has one kind of engine, and no recorded series
Series = dict[str, list[tuple[float, float]]]
pytestmark = pytest.mark.prometheus


@pytest.fixture(scope="module")
def servers(past, tmp_path_factory) -> tuple[str, str]:
    """Addresses of 3.5.3 and of 3.12, each with the same hour of 20 teams."""
    page = tmp_path_factory.mktemp("both") / "page"
    with page.open("w") as file:
        file.writelines(ReplayedHour(every_s=60).text(END_S))
    return past(page), past(page, "-3.12")


def answer(server: str, panel: Panel, sent: str) -> Series:
    """Points of each series: at the end of the hour for a panel that shows one, else over the hour."""
    instant = panel.shape in (Shape.NUMBER, Shape.TABLE)
    span = {"time": END_S} if instant else {"start": END_S - 3600, "end": END_S, "step": 60}
    query = urllib.parse.urlencode({"query": sent, **span})
    with urllib.request.urlopen(f"{server}/api/v1/query{'' if instant else '_range'}?{query}", timeout=60) as got:
        rows = json.load(got)["data"]["result"]
    return {
        json.dumps(row["metric"], sort_keys=True): [
            (at, float(value)) for at, value in row.get("values") or [row["value"]]
        ]
        for row in rows
    }


def same(one: Series, other: Series) -> bool:
    """Same series and times, and values up to the order of a sum."""
    if {name: [at for at, _ in points] for name, points in one.items()} != {
        name: [at for at, _ in points] for name, points in other.items()
    }:
        return False
    pairs = ((left, right) for name in one for (_, left), (_, right) in zip(one[name], other[name], strict=True))
    return all(left == pytest.approx(right, rel=1e-9, nan_ok=True) for left, right in pairs)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.slug)
def test_panels_read_the_same_on_both(servers, board):
    choices = {each.name: [ALL] if each.kind == "query" else each.default for each in variables.of(board)}
    over = Range(END_S - 3600, END_S, points=30, scrape_s=60, least_s=120)
    asked = [(panel, fill(query.expr, choices, over)) for panel in board.panels for query in panel.queries]
    answers = [(panel.slug, *(answer(server, panel, sent) for server in servers)) for panel, sent in asked]
    assert [] == [slug for slug, one, other in answers if not same(one, other)]
    assert board.slug in NOT_SHOWN or any(one for _, one, _ in answers), "nothing was compared"
