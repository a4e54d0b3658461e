"""A real engine under one request at a time, on our page in Chromium: nothing waits, and no quantile is shown inside
the first bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests

from alerts.panel_ref import PanelRef, board_uid
from tests.support.engines import Engines
from tests.support.wait import eventually

pytestmark = [pytest.mark.engine, pytest.mark.chromium, pytest.mark.prometheus]
ROOT = Path(__file__).parents[2]
AT_MOST_S = 120.0
# The first default bound of vLLM's histograms of these panels.
FIRST_BOUND_MS, BELOW = 300.0, "< 300 ms"


def one_at_a_time(url: str, model: str, done: threading.Event) -> None:
    until = time.monotonic() + AT_MOST_S
    while not done.wait(0.2) and time.monotonic() < until:
        requests.post(
            url, json={"model": model, "prompt": f"Idle {until}", "max_tokens": 4, "temperature": 0}, timeout=60
        ).raise_for_status()


@pytest.fixture(scope="module")
def page_url(real_engines: Engines, part, free_port, tmp_path_factory):
    engine, folder = real_engines.shared().up(), tmp_path_factory.mktemp("idle")
    prometheus, board = (f"127.0.0.1:{free_port()}" for _ in range(2))
    target = engine.spec.address.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n  - {job_name: vllm, static_configs: [{targets:"
        f" ['{target}']}}]}}\n"
    )
    log, done = (folder / "log").open("w"), threading.Event()
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
        time.sleep(3)  # series that stand before they grow
        client = threading.Thread(
            target=one_at_a_time, args=(f"{engine.spec.address}/v1/completions", model, done), daemon=True
        )
        client.start()
        time.sleep(8)
        yield f"http://{board}"
    finally:
        done.set()
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)
        log.close()


def legends(new_tab, url: str, board: str, slug: str) -> list[str]:
    page = new_tab(viewport={"width": 1440, "height": 1000}).page
    page.goto(f"{url}/d/{board_uid(board)}?from=now-5m&to=now")
    page.evaluate("document.querySelectorAll('details.row').forEach(row => { row.open = true })")
    panel = page.locator(f'section[data-id="{PanelRef(board, slug).panel_id}"]')
    panel.scroll_into_view_if_needed()
    panel.locator(".legend b").first.wait_for(timeout=20_000)
    return list(panel.locator(".legend b").all_inner_texts())


def milliseconds(text: str) -> float:
    """Returns the value at the start of a legend, such as 390.0 of "390 ms (300 ms to 500 ms)"."""
    number, unit = text.split()[:2]
    return float(number) * {"µs": 0.001, "us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


def test_a_queue_time_below_the_first_bound_is_that_bound(page_url, new_tab):
    """The engine has one request at a time, so every quantile lies in the first bucket."""
    shown = legends(new_tab, page_url, "latency", "queue-time")
    assert {BELOW} == set(shown), shown


def test_no_prefill_time_is_shown_inside_the_first_bucket(page_url, new_tab):
    """A slow machine has prefills above the first bound, whose quantiles are values."""
    shown = legends(new_tab, page_url, "latency", "prefill-time")
    assert all(text == BELOW or milliseconds(text) >= FIRST_BOUND_MS for text in shown), shown


def test_the_mean_of_the_queue_on_overview_is_a_value(page_url, new_tab):
    """What can be known below the first bound."""
    texts = legends(new_tab, page_url, "overview", "queue-time")
    assert any(text.endswith(("ms", "µs", "us")) and not text.startswith("<") for text in texts), texts
