"""Page "Requests" of the board: server-side filters, and a team's view that shows that team only."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from dashboards.registry import BOARDS
from exporters.net.prometheus import Prometheus, address_from
from exporters.requests.record import to_line
from stack.board import pages, server
from stack.board.request_pages import RequestPages
from stack.request_source import RequestSourceOptions
from tests.support.request_dataset import START_S, made_requests

RECORDS = made_requests(400)
NOW = START_S + 300.0


async def got(log: Path, *paths: str, team: str | None = None) -> list[tuple[int, str]]:
    async with Prometheus(address_from("http://127.0.0.1:1", None, None, None), 15.0) as prometheus:
        shown = RequestPages(RequestSourceOptions(logs=(log,)), team, lambda: NOW, "http://traces/{trace_id}")
        desk = server.DashboardServer(prometheus, BOARDS[:1], requests=shown)
        async with TestClient(TestServer(server.application(desk))) as client:
            found = []
            for path in paths:
                async with client.get(path) as answer:
                    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                    found.append((answer.status, unescape(await answer.text())))
            return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"".join(map(to_line, RECORDS)))
    return path


async def test_filters_and_order(log: Path):
    (_, newest), (_, chat), (_, wrong), (_, hostile) = await got(
        log, "/requests", "/requests?team=chat&slowest=ttft&from=now-24h", "/requests?team=chatt",
        "/requests?team=%3Cscript%3E'%20OR%201=1&slowest=1;DROP",
    )  # fmt: skip
    assert "r1-399" in newest
    slowest = max((r for r in RECORDS if r.team == "chat" and r.ttft_ms), key=lambda r: r.ttft_ms or 0)
    assert slowest.request_id in chat
    assert "search" not in chat.partition("<tbody")[0].partition("team=chat")[2].partition("<table")[0]
    assert "'chatt'" in wrong
    assert "mean chat?" in wrong
    assert "'1;DROP'" in hostile
    assert "ttft, tpot, e2e, queue" in hostile


async def test_one_request(log: Path):
    one = next(r for r in RECORDS if r.ttft_ms and r.e2e_ms and r.team == "chat")
    (status, page), (missing, _) = await got(log, f"/requests/{one.request_id}", "/requests/nobody")
    assert (200, 404) == (status, missing)
    assert f"Request {one.request_id}" in page
    assert "meanwhile" in page


async def test_a_team_sees_its_own_requests_only(log: Path):
    theirs = next(r for r in RECORDS if r.team == "search" and r.e2e_ms)
    own = next(r for r in RECORDS if r.team == "chat" and r.e2e_ms and r.upstream == "e1")
    answers = await got(
        log, "/requests?from=now-24h", "/requests?team=search&from=now-24h", "/requests?reason=nonsense&from=now-24h",
        f"/requests/{theirs.request_id}?from=now-24h", f"/requests/{own.request_id}?from=now-24h", team="chat",
    )  # fmt: skip
    for _, page in answers:
        assert f"/{theirs.request_id}?" not in page
        assert f"Request {theirs.request_id}<" not in page
        assert "batch" not in page
        assert ">search<" not in page
    assert [200, 200, 200, 404, 200] == [status for status, _ in answers]


def test_links_lead_to_requests():
    assert "/requests?model=m&team=a+b&from=now-1h" == pages.requests_url({"model_name": "m", "team": "a b", "x": "y"})
    assert '"requests":true' in pages.board_page(BOARDS[0], BOARDS[:1], requests=True)
    assert '"requests":false' in pages.board_page(BOARDS[0], BOARDS[:1])
