"""A real engine under one request at a time, on our page in Chromium: nothing waits, and no quantile is shown inside
the first bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import requests

from alerts.panel_ref import PanelRef, board_uid
from exporters.catalogue import vllm
from tests.support.engines import Engines
from tests.support.wait import eventually

pytestmark = [pytest.mark.engine, pytest.mark.chromium, pytest.mark.prometheus]
ROOT = Path(__file__).parents[2]
# The first default bound of vLLM's histograms of these panels.
FIRST_BOUND_MS, BELOW = 300.0, "< 300 ms"


def one_at_a_time(url: str, model: str, done: threading.Event) -> None:
    body = {"model": model, "prompt": "Idle", "max_tokens": 4, "temperature": 0}
    while not done.wait(0.05):
        requests.post(url, json=body, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def page_url(real_engines: Engines, part, free_port, tmp_path_factory):
    engine, folder = real_engines.shared().up(), tmp_path_factory.mktemp("idle")
    prometheus, board = (f"127.0.0.1:{free_port()}" for _ in range(2))
    target = engine.spec.address.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms}\nscrape_configs:\n  - {job_name: vllm, static_configs: [{targets:"
        f" ['{target}']}}]}}\n"
    )
    log, done, client = (folder / "log").open("w"), threading.Event(), None
    commands = (
        [
            part("prometheus").path,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={prometheus}",
        ],
        [sys.executable, "-m", "stack.cli", "board", "--prometheus", f"http://{prometheus}", "--listen", board],
    )
    started = [
        subprocess.Popen(
            list(map(str, c)), stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        for c in commands
    ]
    try:
        eventually(lambda: requests.get(f"http://{board}/", timeout=5).ok, what="the page answers")
        model = requests.get(f"{engine.spec.address}/v1/models", timeout=10).json()["data"][0]["id"]

        def answer(query: str) -> float:
            found = requests.get(f"http://{prometheus}/api/v1/query", {"query": query}, timeout=10).json()
            return float(found["data"]["result"][0]["value"][1])

        count = vllm.REQUEST_QUEUE_TIME.name + "_count"
        eventually(lambda: answer(f"count_over_time({count}[1m])") >= 2, "series that stand before they grow")
        client = threading.Thread(
            target=one_at_a_time, args=(f"{engine.spec.address}/v1/completions", model, done), daemon=True
        )
        client.start()
        eventually(lambda: answer(f"increase({count}[1m])") >= 20, "twenty requests in Prometheus")
        yield f"http://{board}"
    finally:
        done.set()
        if client:
            client.join(60)
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)
        log.close()


def legends(new_tab, url: str, board: str, *slugs: str) -> list[list[str]]:
    page = new_tab(viewport={"width": 1440, "height": 1000}).page
    page.goto(f"{url}/d/{board_uid(board)}?from=now-5m&to=now")
    page.evaluate("document.querySelectorAll('details.row').forEach(row => { row.open = true })")
    shown = []
    for slug in slugs:
        panel = page.locator(f'section[data-id="{PanelRef(board, slug).panel_id}"]')
        panel.scroll_into_view_if_needed()
        panel.locator(".legend b").first.wait_for(timeout=60_000)
        shown.append(list(panel.locator(".legend b").all_inner_texts()))
    return shown


def milliseconds(text: str) -> float:
    """Returns the value at the start of a legend, such as 390.0 of "390 ms (300 ms to 500 ms)"."""
    number, unit = text.split()[:2]
    return float(number) * {"µs": 0.001, "us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


def test_no_quantile_is_shown_inside_the_first_bucket(page_url, new_tab):
    """The engine has one request at a time, so most queue times lie in the first bucket. A busy machine may hold one up
    for longer, and prefills of a slow one take longer: such quantiles are values."""
    queue, prefill = legends(new_tab, page_url, "latency", "queue-time", "prefill-time")
    assert BELOW in queue, queue
    assert all(text == BELOW or milliseconds(text) >= FIRST_BOUND_MS for text in queue + prefill), (queue, prefill)


def test_the_mean_of_the_queue_on_overview_is_a_value(page_url, new_tab):
    """What can be known below the first bound."""
    (texts,) = legends(new_tab, page_url, "overview", "queue-time")
    assert any(text.endswith(("ms", "µs", "us")) and not text.startswith("<") for text in texts), texts
